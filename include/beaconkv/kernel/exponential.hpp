// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Exponential and hyperbolic tangent of vectors.

#include "beaconkv/kernel/vector.hpp"

namespace beaconkv::inline v0::detail {

/// `x = exp(x)` for finite `x <= 0`; exactly 0 below exp(-87). Relative error below 2e-7, or 4e-6 under a user's `-ffast-math`,
/// which undoes the two-part reduction.
///
/// Range reduction by a two-part ln 2 and the degree-5 polynomial of the Cephes library's `expf`.
template <class Isa>
BEACONKV_KERNEL void exp_not_positive(typename Isa::Floats& x) noexcept {
  using F = typename Isa::Floats;
  using I = typename Isa::Ints;
  I bits, keep;
  bits_of(bits, x);
  mask_negative(keep, (bits & INT32_MAX) - 0x42AE0000);  // |x| < 87
  bits &= keep;
  F y;
  bits_of(y, bits);
  const I k = __builtin_convertvector(y * 1.44269504088896341F - 0.5F, I);  // y <= 0: truncation rounds to nearest
  const F whole = __builtin_convertvector(k, F);
  const F r = (y - whole * 0.693359375F) + whole * 2.12194440e-4F;
  F p = r * 1.9875691500e-4F + 1.3981999507e-3F;
  p = p * r + 8.3334519073e-3F;
  p = p * r + 4.1665795894e-2F;
  p = p * r + 1.6666665459e-1F;
  p = p * r + 5.0000001201e-1F;
  p = p * (r * r) + r + 1.0F;
  const I exponent = (k + 127) << 23;
  F power;
  bits_of(power, exponent);
  p *= power;
  bits_of(bits, p);
  bits &= keep;
  bits_of(x, bits);
}

/// `x = tanh(x)` for finite `x`. Relative error below 1e-6: a polynomial (Cephes, `tanhf`) near 0, else by the exponential.
template <class Isa>
BEACONKV_KERNEL void tanh_of(typename Isa::Floats& x) noexcept {
  using F = typename Isa::Floats;
  using I = typename Isa::Ints;
  I bits;
  bits_of(bits, x);
  const I sign = bits & INT32_MIN;
  bits &= INT32_MAX;
  F size;
  bits_of(size, bits);
  const F square = size * size;
  F near = square * -5.70498872745e-3F + 2.06390887954e-2F;
  near = near * square - 5.37397155531e-2F;
  near = near * square + 1.33314422036e-1F;
  near = near * square - 3.33332819422e-1F;
  near = near * square * size + size;
  F e = size * -2.0F;
  exp_not_positive<Isa>(e);
  const F far = (1.0F - e) / (1.0F + e);
  F result;
  I is_near;
  mask_negative(is_near, bits - 0x3F200000);  // size < 0.625
  select(result, is_near, near, far);
  bits_of(bits, result);
  bits |= sign;
  bits_of(x, bits);
}

}  // namespace beaconkv::inline v0::detail
