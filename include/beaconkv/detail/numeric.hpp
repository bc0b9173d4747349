// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Small arithmetic that several algorithms share. Written so that a user's `-ffast-math` cannot change what it decides:
/// special values are recognised by their bits, never by comparisons.

#include <bit>
#include <cstdint>
#include <span>

#include "beaconkv/kernel/exponential.hpp"

namespace beaconkv::inline v0::detail {

[[nodiscard]] inline bool is_finite(float x) noexcept { return (std::bit_cast<std::uint32_t>(x) & 0x7F800000U) != 0x7F800000U; }
[[nodiscard]] inline bool is_finite(double x) noexcept { return (std::bit_cast<std::uint64_t>(x) >> 52 & 0x7FF) != 0x7FF; }
[[nodiscard]] inline bool is_nan(float x) noexcept { return (std::bit_cast<std::uint32_t>(x) & 0x7FFFFFFFU) > 0x7F800000U; }

/// The larger of two; NaN where one of them is NaN, whichever it is.
[[nodiscard]] inline float max_or_nan(float a, float b) noexcept { return is_nan(a) || (!is_nan(b) && a > b) ? a : b; }

[[nodiscard]] inline float quiet_nan() noexcept { return std::bit_cast<float>(std::uint32_t{0x7FC00000U}); }

/// True where all `n` numbers are finite.
[[nodiscard]] inline bool all_finite(const float* x, index_t n) noexcept {
  constexpr index_t at_once = 8;
  Int4 low{}, high{};
  index_t i = 0;
  for (; i + at_once <= n; i += at_once) {
    Int4 a, b;
    load(a, x + i);
    load(b, x + i + 4);
    low |= ~((a & 0x7F800000) - 0x7F800000);  // negative for an exponent of all ones
    high |= ~((b & 0x7F800000) - 0x7F800000);
  }
  const Int4 bad = low | high;
  if ((bad[0] | bad[1] | bad[2] | bad[3]) < 0) return false;
  for (; i < n; ++i)
    if (!is_finite(x[i])) return false;
  return true;
}

/// Softmax in place over finite numbers, to a float's precision.
inline void softmax(std::span<float> x) noexcept {
  if (!x.empty()) run<Softmax>(x.data(), static_cast<index_t>(x.size()));
}

}  // namespace beaconkv::inline v0::detail
