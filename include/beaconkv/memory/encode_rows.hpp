// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Rows of floats become stored numbers, many at a time: the same bits as `encode`.

#include <cstring>

#include "beaconkv/memory/decode_rows.hpp"

namespace beaconkv::inline v0::detail {

/// The codes of a small float of `mantissa` bits, its sign at `sign_bit`: what is beyond its range becomes `largest`, NaN
/// becomes `nan`, both with their sign.
template <class Isa, int mantissa, int bias, int sign_bit, int largest, int nan>
BEACONKV_KERNEL void narrow(typename Isa::Ints& code, const typename Isa::Floats& x) noexcept {
  using F = typename Isa::Floats;
  using I = typename Isa::Ints;
  constexpr int shift = 23 - mantissa;
  constexpr float unit = bias + mantissa < 24 ? static_cast<float>(1 << (24 - bias - mantissa))
                                              : 1.0F / static_cast<float>(1 << (bias + mantissa - 24));
  I bits, is_number, in_range, subnormal, small, unit_bits;
  bits_of(bits, x);
  mask_negative(is_number, (bits & 0x7FFFFFFF) - 0x7F800001);
  const I magnitude = bits & 0x7FFFFFFF & is_number;  // 0 for a NaN, whose bits would leave the range below
  code = (magnitude - ((127 - bias) << 23) + ((1 << (shift - 1)) - 1) + ((magnitude >> shift) & 1)) >> shift;
  // A subnormal is a count of the type's least numbers, which are the last places of a float as large as `unit`.
  F size;
  bits_of(size, magnitude);
  const F units = F{} + unit;
  bits_of(unit_bits, units);
  const F sum = size + units;
  bits_of(small, sum);
  mask_negative(subnormal, magnitude - ((128 - bias) << 23));
  code = (code & ~subnormal) | ((small - unit_bits) & subnormal);
  mask_negative(in_range, code - largest);
  code = (code & in_range) | (~in_range & largest);
  code = (code & is_number) | (~is_number & nan);
  code |= (bits >> (31 - sign_bit)) & (1 << sign_bit);
}

template <class Isa>
BEACONKV_KERNEL void write_numbers(bfloat16* out, const typename Isa::Floats& x) noexcept {
  using I = typename Isa::Ints;
  I bits, is_number;
  bits_of(bits, x);
  mask_negative(is_number, (bits & 0x7FFFFFFF) - 0x7F800001);
  const I number = bits & is_number;  // which rounds to 0 where there is none
  const I code = ((number + 0x7FFF + ((number >> 16) & 1)) >> 16) | (((bits >> 16) | 0x40) & ~is_number);
  store(out, __builtin_convertvector(code & 0xFFFF, typename Narrow<Isa>::Words));
}
template <class Isa>
BEACONKV_KERNEL void write_numbers(float16* out, const typename Isa::Floats& x) noexcept {
  typename Isa::Ints code;
  narrow<Isa, 10, 15, 15, 0x7C00, 0x7E00>(code, x);
  store(out, __builtin_convertvector(code, typename Narrow<Isa>::Words));
}
/// Integers become bytes by way of 16 bits, as in `read_bytes`.
template <class Isa, class Bytes, class T>
BEACONKV_KERNEL void write_bytes(T* out, const typename Isa::Ints& x) noexcept {
  const typename Narrow<Isa>::Shorts shorts = __builtin_convertvector(x, typename Narrow<Isa>::Shorts);
  store(out, __builtin_convertvector(shorts, Bytes));
}
template <class Isa>
BEACONKV_KERNEL void write_numbers(float8_e5m2* out, const typename Isa::Floats& x) noexcept {
  typename Isa::Ints code;
  narrow<Isa, 2, 15, 7, 0x7C, 0x7E>(code, x);
  write_bytes<Isa, typename Narrow<Isa>::Bytes>(out, code);
}
template <class Isa>
BEACONKV_KERNEL void write_numbers(float8_e4m3* out, const typename Isa::Floats& x) noexcept {
  typename Isa::Ints code;
  narrow<Isa, 3, 7, 7, 0x7F, 0x7F>(code, x);
  write_bytes<Isa, typename Narrow<Isa>::Bytes>(out, code);
}
/// Halves are rounded away from 0: the halves of the number are counted, in integers.
template <class Isa>
BEACONKV_KERNEL void write_numbers(std::int8_t* out, const typename Isa::Floats& x) noexcept {
  using I = typename Isa::Ints;
  const I halves = __builtin_convertvector(x + x, I);
  const I sign = halves >> 31;
  const I size = (((halves ^ sign) - sign) + 1) >> 1;
  write_bytes<Isa, typename Narrow<Isa>::SignedBytes>(out, (size ^ sign) - sign);
}
template <class Isa>
BEACONKV_KERNEL void write_numbers(float* out, const typename Isa::Floats& x) noexcept {
  store(out, x);
}
/// A type of a user's own.
template <class Isa, class T, std::enable_if_t<storage_code<T> == 0, int> = 0>
BEACONKV_KERNEL void write_numbers(T* out, const typename Isa::Floats& x) noexcept {
  float numbers[static_cast<std::size_t>(Isa::width)];
  store(numbers, x);
  for (index_t i = 0; i < Isa::width; ++i) out[i] = encode<T>(numbers[i]);
}

/// The bits of the largest magnitude: those of a NaN or an infinity, where there is one.
struct LargestMagnitude {
  template <class Isa>
  BEACONKV_KERNEL std::int32_t of(const float* in, index_t n) noexcept {
    using I = typename Isa::Ints;
    I top{};
    index_t i = 0;
    for (; i + Isa::width <= n; i += Isa::width) {
      I bits;
      load(bits, in + i);
      raise_to(top, bits & 0x7FFFFFFF);
    }
    std::int32_t all[static_cast<std::size_t>(Isa::width)];
    store(all, top);
    std::int32_t largest = 0;
    for (const std::int32_t x : all) largest = x > largest ? x : largest;
    for (; i < n; ++i) {
      const std::int32_t x = std::bit_cast<std::int32_t>(in[i]) & 0x7FFFFFFF;
      largest = x > largest ? x : largest;
    }
    return largest;
  }
  template <class Isa>
  BEACONKV_KERNEL void run(const float* in, index_t n, std::int32_t* out) noexcept {
    *out = of<Isa>(in, n);
  }
};

/// As `scale_for`.
[[nodiscard]] BEACONKV_KERNEL float scale_from(std::int32_t largest_bits, float largest) noexcept {
  return largest_bits >= 0x7F800000 ? quiet_nan() : std::bit_cast<float>(largest_bits) / largest;
}

/// `n` numbers times `factor`, side by side; zeros where the factor is 0.
template <class T>
struct EncodeRow {
  template <class Isa>
  BEACONKV_KERNEL void run(const float* in, index_t n, float factor, T* out) noexcept {
    if (!(factor > 0)) {
      for (index_t d = 0; d < n; ++d) out[d] = encode<T>(0.0F);
      return;
    }
    const index_t whole = n / Isa::width * Isa::width;
    for (index_t d = 0; d < whole; d += Isa::width) {
      typename Isa::Floats numbers;
      load(numbers, in + d);
      if constexpr (takes_scale<T>) numbers *= factor;
      write_numbers<Isa>(out + d, numbers);
    }
    for (index_t d = whole; d < n; ++d) out[d] = encode<T>(takes_scale<T> ? in[d] * factor : in[d]);
  }
};

template <>
struct EncodeRow<q8_0> {
  template <class Isa>
  BEACONKV_KERNEL void run(const float* in, index_t n, float, q8_0* out) noexcept {
    for (index_t b = 0; b < n / 32; ++b, in += 32, ++out) {
      const float scale = scale_from(LargestMagnitude::of<Isa>(in, 32), 127.0F);
      out->scale = encode<float16>(scale);
      const float inverse = inverse_of(scale);
      for (index_t d = 0; d < 32; d += Isa::width) {
        typename Isa::Floats numbers{};
        if (inverse > 0) load(numbers, in + d);
        write_numbers<Isa>(out->values + d, numbers * inverse);
      }
    }
  }
};

}  // namespace beaconkv::inline v0::detail
