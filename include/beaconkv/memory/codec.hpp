// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Storage types of cached keys and values: how a stored number becomes a float and back.
///
/// A storage type that is a plain element models `ElementCodec`: `decode` and `encode` of one number. Moves never use either:
/// they copy bytes. Types with scales (int8, q8_0, fp8) will stand here beside these.

#include <bit>
#include <concepts>
#include <type_traits>

#include "beaconkv/types.hpp"

namespace beaconkv::inline v0 {

/// IEEE 754 binary16, as 16 bits of storage.
struct float16 {
  std::uint16_t bits = 0;
  [[nodiscard]] bool operator==(const float16&) const noexcept = default;
};

/// bfloat16: the upper half of a float, as 16 bits of storage.
struct bfloat16 {
  std::uint16_t bits = 0;
  [[nodiscard]] bool operator==(const bfloat16&) const noexcept = default;
};

/// Exact.
[[nodiscard]] constexpr float decode(float value) noexcept { return value; }

/// Exact, subnormals, infinities and NaN included.
[[nodiscard]] constexpr float decode(bfloat16 value) noexcept { return std::bit_cast<float>(std::uint32_t{value.bits} << 16); }

/// Exact, subnormals, infinities and NaN included.
[[nodiscard]] constexpr float decode(float16 value) noexcept {
  const std::uint32_t sign = (value.bits & 0x8000U) << 16;
  const std::uint32_t exponent = (value.bits >> 10) & 0x1FU;
  const std::uint32_t mantissa = value.bits & 0x3FFU;
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24F;
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(magnitude));
  }
  const std::uint32_t wide = exponent == 31 ? 255U : exponent + 112U;
  return std::bit_cast<float>(sign | (wide << 23) | (mantissa << 13));
}

namespace detail {

/// `bits >> shift`, rounded to nearest, ties to even.
[[nodiscard]] constexpr std::uint32_t shift_rounded(std::uint32_t bits, unsigned shift) noexcept {
  const std::uint32_t odd = (bits >> shift) & 1U;
  return (bits + (1U << (shift - 1)) - 1U + odd) >> shift;
}

[[nodiscard]] constexpr bool is_nan_bits(std::uint32_t bits) noexcept { return (bits & 0x7FFFFFFFU) > 0x7F800000U; }

constexpr void encode_to(float value, float& out) noexcept { out = value; }

constexpr void encode_to(float value, bfloat16& out) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  out.bits = static_cast<std::uint16_t>(is_nan_bits(bits) ? (bits >> 16) | 0x40U : shift_rounded(bits, 16));
}

constexpr void encode_to(float value, float16& out) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000U;
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  std::uint32_t half = 0;
  if (is_nan_bits(bits)) {
    half = 0x7E00U;
  } else if (magnitude >= 0x477FF000U) {  // rounds to 65536 or more, or is infinite
    half = 0x7C00U;
  } else if (magnitude >= 0x38800000U) {  // normal
    half = shift_rounded(magnitude - 0x38000000U, 13);
  } else if (magnitude > 0x33000000U) {  // subnormal: shift the mantissa with its hidden one into place
    const unsigned shift = 126U - (magnitude >> 23);
    half = shift_rounded((magnitude & 0x7FFFFFU) | 0x800000U, shift);
  }
  out.bits = static_cast<std::uint16_t>(sign | half);
}

}  // namespace detail

/// `value` as `T`, rounded to nearest, ties to even; too large becomes infinity, NaN stays NaN.
template <class T>
requires requires(float value, T& out) { detail::encode_to(value, out); }
[[nodiscard]] constexpr T encode(float value) noexcept {
  T out{};
  detail::encode_to(value, out);
  return out;
}

/// A storage type of which each element stands for one number by itself: `float`, `float16`, `bfloat16`.
template <class T>
concept ElementCodec = std::is_trivially_copyable_v<T> && requires(T stored, float value) {
  { decode(stored) }
  noexcept->std::same_as<float>;
  { encode<T>(value) }
  noexcept->std::same_as<T>;
};

static_assert(ElementCodec<float> && ElementCodec<float16> && ElementCodec<bfloat16>);

}  // namespace beaconkv::inline v0
