// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Small arithmetic that several algorithms share. Written so that a user's `-ffast-math` cannot change what it decides:
/// special values are recognised by their bits, never by comparisons.

#include <bit>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <span>

#include "beaconkv/types.hpp"

namespace beaconkv::inline v0::detail {

/// A logit that stands for "not visible"; finite, so that arithmetic on it is defined under every compiler flag.
inline constexpr float masked_logit = -FLT_MAX;

[[nodiscard]] inline bool is_finite(float x) noexcept { return (std::bit_cast<std::uint32_t>(x) & 0x7F800000U) != 0x7F800000U; }
[[nodiscard]] inline bool is_nan(float x) noexcept { return (std::bit_cast<std::uint32_t>(x) & 0x7FFFFFFFU) > 0x7F800000U; }

/// The larger of two; NaN where one of them is NaN, whichever it is.
[[nodiscard]] inline float max_or_nan(float a, float b) noexcept { return is_nan(a) || (!is_nan(b) && a > b) ? a : b; }

[[nodiscard]] inline float quiet_nan() noexcept { return std::bit_cast<float>(std::uint32_t{0x7FC00000U}); }

/// True where all `n` numbers are finite. Vectorises.
[[nodiscard]] inline bool all_finite(const float* x, index_t n) noexcept {
  std::uint32_t bad = 0;
  for (index_t i = 0; i < n; ++i) bad |= (std::bit_cast<std::uint32_t>(x[i]) & 0x7F800000U) == 0x7F800000U ? 1U : 0U;
  return bad == 0;
}

/// `x[i] = exp(x[i] - shift[i])` for finite `x[i] <= shift[i]`; exactly 0 below exp(-87). Relative error below 2e-7.
/// Vectorises.
///
/// Range reduction by a two-part ln 2 and the degree-5 polynomial of the Cephes library's `expf`.
inline void exp_shifted(float* x, const float* shift, index_t n) noexcept {
  for (index_t i = 0; i < n; ++i) {
    const float t = x[i] - shift[i];
    const std::uint32_t keep = 0U - static_cast<std::uint32_t>(t > -87.0F);  // as bits: a select would become a branch
    const auto y = std::bit_cast<float>(std::bit_cast<std::uint32_t>(t) & keep);
    const auto k = static_cast<std::int32_t>(y * 1.44269504088896341F - 0.5F);  // y <= 0: truncation rounds to nearest
    const auto whole = static_cast<float>(k);
    const float r = (y - whole * 0.693359375F) + whole * 2.12194440e-4F;
    float p = 1.9875691500e-4F;
    p = p * r + 1.3981999507e-3F;
    p = p * r + 8.3334519073e-3F;
    p = p * r + 4.1665795894e-2F;
    p = p * r + 1.6666665459e-1F;
    p = p * r + 5.0000001201e-1F;
    p = p * r * r + r + 1.0F;
    const float power = std::bit_cast<float>((k + 127) << 23);
    x[i] = std::bit_cast<float>(std::bit_cast<std::uint32_t>(p * power) & keep);
  }
}

/// Dot product in a fixed order of eight lanes: the same bits for equal rows, and vectorisable without `-ffast-math`.
[[nodiscard]] inline float dot(const float* a, const float* b, index_t n) noexcept {
  float lane[8] = {};
  index_t i = 0;
  for (; i + 8 <= n; i += 8)
    for (index_t l = 0; l < 8; ++l) lane[l] += a[i + l] * b[i + l];
  for (index_t l = 0; i + l < n; ++l) lane[l] += a[i + l] * b[i + l];
  return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

/// Softmax in place over finite numbers, in double.
inline void softmax(std::span<float> x) noexcept {
  if (x.empty()) return;
  float top = x[0];
  for (const float v : x) top = v > top ? v : top;
  double sum = 0;
  for (const float v : x) sum += std::exp(static_cast<double>(v) - static_cast<double>(top));
  for (float& v : x) v = static_cast<float>(std::exp(static_cast<double>(v) - static_cast<double>(top)) / sum);
}

}  // namespace beaconkv::inline v0::detail
