// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Storage types of cached keys and values: how a stored number becomes a float and back.
///
/// | type | an element stands for | scale |
/// |---|---|---|
/// | `float`, `float16`, `bfloat16` | one number | none |
/// | `float8_e4m3`, `float8_e5m2` | one number | outside, shared by a row, a head or all |
/// | `std::int8_t` | one number | outside, one for each row |
/// | `q8_0` | 32 numbers | inside |
///
/// Moves use none of this: they copy elements and scales.

#include <bit>
#include <cfloat>
#include <cmath>
#include <concepts>
#include <type_traits>

#include "beaconkv/detail/numeric.hpp"
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

/// 8-bit float of the Open Compute Project, "E4M3": up to 448, no infinity, one NaN of each sign.
struct float8_e4m3 {
  std::uint8_t bits = 0;
  [[nodiscard]] bool operator==(const float8_e4m3&) const noexcept = default;
};

/// 8-bit float of the Open Compute Project, "E5M2": up to 57344, the upper half of a `float16`.
struct float8_e5m2 {
  std::uint8_t bits = 0;
  [[nodiscard]] bool operator==(const float8_e5m2&) const noexcept = default;
};

/// 32 numbers as one scale and 32 small integers: byte for byte the block that ggml calls q8_0.
struct q8_0 {
  float16 scale{};
  std::int8_t values[32] = {};
  [[nodiscard]] bool operator==(const q8_0&) const noexcept = default;
};
static_assert(sizeof(q8_0) == 34);

/// Exact.
[[nodiscard]] constexpr float decode(float value) noexcept { return value; }
/// Exact; without the row's scale.
[[nodiscard]] constexpr float decode(std::int8_t value) noexcept { return static_cast<float>(value); }
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

/// Exact; without the scale.
[[nodiscard]] constexpr float decode(float8_e5m2 value) noexcept {
  return decode(float16{static_cast<std::uint16_t>(value.bits << 8)});
}

/// Exact; without the scale.
[[nodiscard]] constexpr float decode(float8_e4m3 value) noexcept {
  const std::uint32_t sign = (value.bits & 0x80U) << 24;
  const std::uint32_t exponent = (value.bits >> 3) & 0xFU;
  const std::uint32_t mantissa = value.bits & 0x7U;
  if ((value.bits & 0x7FU) == 0x7FU) return std::bit_cast<float>(sign | 0x7FC00000U);
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-9
    const float magnitude = static_cast<float>(mantissa) * 0x1p-9F;
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(magnitude));
  }
  return std::bit_cast<float>(sign | ((exponent + 120U) << 23) | (mantissa << 20));
}

namespace detail {

/// `bits >> shift`, rounded to nearest, ties to even.
[[nodiscard]] constexpr std::uint32_t shift_rounded(std::uint32_t bits, unsigned shift) noexcept {
  const std::uint32_t odd = (bits >> shift) & 1U;
  return (bits + (1U << (shift - 1)) - 1U + odd) >> shift;
}

[[nodiscard]] constexpr bool is_nan_bits(std::uint32_t bits) noexcept { return (bits & 0x7FFFFFFFU) > 0x7F800000U; }

/// The magnitude bits of a float that is no NaN as a smaller float of `mantissa` bits and this exponent bias, without its
/// sign; what is beyond its range comes out as a larger number than any of its codes.
[[nodiscard]] constexpr std::uint32_t narrow(std::uint32_t magnitude, unsigned mantissa, unsigned bias) noexcept {
  const std::uint32_t exponent = magnitude >> 23;
  if (exponent > 127U - bias) return shift_rounded(magnitude - ((127U - bias) << 23), 23U - mantissa);
  const unsigned shift = 23U - mantissa + 128U - bias - exponent;  // subnormal: the hidden one moves into place
  if (shift > 25) return 0;
  return shift_rounded((magnitude & 0x7FFFFFU) | (exponent > 0 ? 0x800000U : 0U), shift);
}

constexpr void encode_to(float value, float& out) noexcept { out = value; }

constexpr void encode_to(float value, bfloat16& out) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  out.bits = static_cast<std::uint16_t>(is_nan_bits(bits) ? (bits >> 16) | 0x40U : shift_rounded(bits, 16));
}

constexpr void encode_to(float value, float16& out) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t code = narrow(bits & 0x7FFFFFFFU, 10, 15);
  const std::uint32_t half = is_nan_bits(bits) ? 0x7E00U : (code < 0x7C00U ? code : 0x7C00U);
  out.bits = static_cast<std::uint16_t>(((bits >> 16) & 0x8000U) | half);
}

constexpr void encode_to(float value, float8_e5m2& out) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t code = narrow(bits & 0x7FFFFFFFU, 2, 15);
  const std::uint32_t small = is_nan_bits(bits) ? 0x7EU : (code < 0x7CU ? code : 0x7CU);
  out.bits = static_cast<std::uint8_t>(((bits >> 24) & 0x80U) | small);
}

constexpr void encode_to(float value, float8_e4m3& out) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t code = narrow(bits & 0x7FFFFFFFU, 3, 7);
  const std::uint32_t small = is_nan_bits(bits) ? 0x7FU : (code < 0x7FU ? code : 0x7FU);
  out.bits = static_cast<std::uint8_t>(((bits >> 24) & 0x80U) | small);
}

/// Precondition: within [-127, 127]. Halves are rounded away from 0.
inline void encode_to(float value, std::int8_t& out) noexcept { out = static_cast<std::int8_t>(std::round(value)); }

}  // namespace detail

/// `value` as `T`, rounded to nearest, ties to even. Too large becomes infinity, or NaN in `float8_e4m3`, which has none; NaN
/// stays NaN. For `std::int8_t` see `store_row`, which finds the scale.
template <class T>
requires requires(float value, T& out) { detail::encode_to(value, out); }
[[nodiscard]] constexpr T encode(float value) noexcept {
  T out{};
  detail::encode_to(value, out);
  return out;
}

/// How many numbers an element of `T` stands for.
template <class T>
inline constexpr index_t numbers_per_element = std::is_same_v<T, q8_0> ? 32 : 1;

/// The largest number that `T` stores before its scale; 0 for types that take no scale.
template <class T>
inline constexpr float largest_before_scale = 0.0F;
template <>
inline constexpr float largest_before_scale<std::int8_t> = 127.0F;
template <>
inline constexpr float largest_before_scale<float8_e4m3> = 448.0F;
template <>
inline constexpr float largest_before_scale<float8_e5m2> = 57344.0F;

/// Whether elements of `T` are multiplied by a scale that stands beside them (`Plane::scales`).
template <class T>
inline constexpr bool takes_scale = largest_before_scale<T> > 0.0F;

/// What stands for `T` in saved bytes; never changes.
template <class T>
inline constexpr int storage_code = 0;
template <>
inline constexpr int storage_code<float> = 1;
template <>
inline constexpr int storage_code<float16> = 2;
template <>
inline constexpr int storage_code<bfloat16> = 3;
template <>
inline constexpr int storage_code<std::int8_t> = 4;
template <>
inline constexpr int storage_code<float8_e4m3> = 5;
template <>
inline constexpr int storage_code<float8_e5m2> = 6;
template <>
inline constexpr int storage_code<q8_0> = 7;

/// A type that a cache can hold.
template <class T>
concept StorageType = std::is_trivially_copyable_v<T> &&(std::is_same_v<T, q8_0> || requires(T stored, float value) {
  { decode(stored) } -> std::same_as<float>;
  { encode<T>(value) } -> std::same_as<T>;
});

static_assert(StorageType<float> && StorageType<float16> && StorageType<bfloat16> && StorageType<q8_0>);
static_assert(StorageType<std::int8_t> && StorageType<float8_e4m3> && StorageType<float8_e5m2>);

/// 32 numbers of a block.
inline void decode_block(const q8_0& block, float* out) noexcept {
  const float scale = decode(block.scale);
  for (index_t i = 0; i < 32; ++i) out[i] = scale * static_cast<float>(block.values[i]);
}

namespace detail {

/// The scale that brings the largest of `n` numbers to `largest`: 0 where all are 0, NaN where one is not finite (a row that
/// cannot be stored says so when it is read).
[[nodiscard]] inline float scale_for(const float* in, index_t n, float largest) noexcept {
  if (!all_finite(in, n)) return quiet_nan();
  float top = 0;
  for (index_t i = 0; i < n; ++i) top = std::abs(in[i]) > top ? std::abs(in[i]) : top;
  return top / largest;
}

/// 1 / scale, or 0 where that is no number: zeros stay zeros, and what is not finite is carried by the scale.
[[nodiscard]] inline float inverse_of(float scale) noexcept {
  const float inverse = is_finite(scale) && scale > 0 ? 1.0F / scale : 0.0F;
  return is_finite(inverse) ? inverse : 0.0F;
}

}  // namespace detail

/// The scale becomes the largest magnitude / 127, as in ggml.
[[nodiscard]] inline q8_0 encode_block(const float* in) noexcept {
  const float scale = detail::scale_for(in, 32, 127.0F);
  const float inverse = detail::inverse_of(scale);
  q8_0 out;
  out.scale = encode<float16>(scale);
  for (index_t i = 0; i < 32; ++i) out.values[i] = inverse > 0 ? encode<std::int8_t>(in[i] * inverse) : std::int8_t{0};
  return out;
}

}  // namespace beaconkv::inline v0
