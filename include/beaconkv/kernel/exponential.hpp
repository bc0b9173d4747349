// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Exponential and hyperbolic tangent of vectors, and a softmax.

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

/// `x = exp(x)` for finite `x <= 0`, relative error below 3e-10; exactly 0 below exp(-88).
template <class Isa>
BEACONKV_KERNEL void exp_not_positive(typename Isa::Doubles& x) noexcept {
  using D = typename Isa::Doubles;
  using I = typename Isa::NarrowInts;
  raise_to(x, D{} - 100.0);
  I k = __builtin_convertvector(x * 1.4426950408889634 - 0.5, I);
  const D r = x - __builtin_convertvector(k, D) * 0.6931471805599453;
  D p = r * (1.0 / 40320) + 1.0 / 5040;  // |r| < 0.35: what the series leaves out is below 2.1e-10
  p = p * r + 1.0 / 720;
  p = p * r + 1.0 / 120;
  p = p * r + 1.0 / 24;
  p = p * r + 1.0 / 6;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  raise_to(k, I{} - 127);
  const I exponent = (k + 127) << 23;
  typename Isa::NarrowFloats power;
  bits_of(power, exponent);
  x = p * __builtin_convertvector(power, D);
}

/// Softmax in place over `n > 0` finite numbers, in double but for one rounding between.
struct Softmax {
  template <class Isa>
  BEACONKV_KERNEL void run(float* x, index_t n) noexcept {
    using E = DoubleLanes<Isa>;
    constexpr index_t at_once = double_lanes;
    const index_t whole = n / at_once * at_once;
    const float top = largest<Isa>(x, n);
    E sum, e;
    E::clear(sum);
    for (index_t i = 0; i < whole; i += at_once) {
      E::read(e, x + i);
      exp_below<Isa>(e, top);
      E::write(x + i, e);
      E::add(sum, e);
    }
    double total = E::sum(sum);
    if (whole < n) {
      float rest[at_once] = {};
      for (index_t i = whole; i < n; ++i) rest[i - whole] = x[i];
      for (index_t i = n; i < whole + at_once; ++i) rest[i - whole] = top;
      double numbers[at_once];
      E::read(e, rest);
      exp_below<Isa>(e, top);
      E::write(numbers, e);
      for (index_t i = whole; i < n; ++i) {
        x[i] = static_cast<float>(numbers[i - whole]);
        total += numbers[i - whole];
      }
    }
    const double inverse = 1.0 / total;
    for (index_t i = 0; i < whole; i += at_once) {
      E::read(e, x + i);
      E::scale(e, inverse);
      E::write(x + i, e);
    }
    for (index_t i = whole; i < n; ++i) x[i] = static_cast<float>(static_cast<double>(x[i]) * inverse);
  }

 private:
  template <class Isa>
  BEACONKV_KERNEL float largest(const float* x, index_t n) noexcept {
    Lanes<Isa> top, some;
    Lanes<Isa>::fill(top, x[0]);
    index_t i = 0;
    for (; i + lanes <= n; i += lanes) {
      Lanes<Isa>::read(some, x + i);
      BEACONKV_UNROLL for (index_t p = 0; p < Lanes<Isa>::count; ++p) raise_to(top.part[p], some.part[p]);
    }
    float numbers[static_cast<std::size_t>(lanes)];
    Lanes<Isa>::write(numbers, top);
    float result = x[0];
    for (const float number : numbers) raise_to(result, number);
    for (; i < n; ++i) raise_to(result, x[i]);
    return result;
  }
  template <class Isa>
  BEACONKV_KERNEL void exp_below(DoubleLanes<Isa>& x, float top) noexcept {
    BEACONKV_UNROLL for (index_t i = 0; i < DoubleLanes<Isa>::count; ++i) {
      x.part[i] -= static_cast<double>(top);
      exp_not_positive<Isa>(x.part[i]);
    }
  }
};

}  // namespace beaconkv::inline v0::detail
