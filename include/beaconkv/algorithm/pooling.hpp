// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Smoothing of scores over neighbouring tokens, as SnapKV, RPC and R-KV do it.

#include <algorithm>
#include <span>

#include "beaconkv/types.hpp"

namespace beaconkv::inline v0 {

enum class PoolKind : std::uint8_t {
  none,
  average,  ///< neighbours beyond the ends count as zeros: the divisor is always `kernel`
  max,      ///< neighbours beyond the ends do not count
};

/// A pool of stride 1 that keeps the length. `kernel` is odd; 1 changes nothing.
struct Pool {
  PoolKind kind = PoolKind::none;
  index_t kernel = 1;

  [[nodiscard]] constexpr bool active() const noexcept { return kind != PoolKind::none && kernel > 1; }
};

/// Even kernels are refused: with the published padding they would yield one score more than there are tokens.
[[nodiscard]] inline Status validate(const Pool& pool) {
  if (pool.kernel < 1 || pool.kernel % 2 == 0)
    return detail::invalid("pool.kernel = ", pool.kernel, ": must be odd and positive");
  return {};
}

/// Writes the pooled `in` to `out` (same size, other memory). O(n * kernel), no allocation.
///
/// Source: `avg_pool1d` / `max_pool1d` with padding `kernel / 2` in the published codes of SnapKV, RPC and R-KV.
/// Precondition: `validate(pool)` is ok.
inline void pool_scores(std::span<const float> in, const Pool& pool, std::span<float> out) noexcept {
  BEACONKV_ASSERT(in.size() == out.size() && pool.kernel % 2 == 1);
  const auto n = static_cast<index_t>(in.size());
  const index_t reach = pool.active() ? pool.kernel / 2 : 0;
  for (index_t i = 0; i < n; ++i) {
    const index_t first = std::max<index_t>(0, i - reach);
    const index_t last = std::min(n, i + reach + 1);
    float value = in[static_cast<std::size_t>(first)];
    for (index_t j = first + 1; j < last; ++j) {
      const float x = in[static_cast<std::size_t>(j)];
      value = pool.kind == PoolKind::max ? std::max(value, x) : value + x;
    }
    out[static_cast<std::size_t>(i)] =
        pool.kind == PoolKind::average ? value * (1.0F / static_cast<float>(pool.active() ? pool.kernel : 1)) : value;
  }
}

}  // namespace beaconkv::inline v0
