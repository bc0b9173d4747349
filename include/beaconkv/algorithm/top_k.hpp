// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// The k best scores, by a contract that gives the same answer on every machine.

#include <algorithm>
#include <bit>
#include <limits>
#include <span>

#include "beaconkv/detail/numeric.hpp"
#include "beaconkv/workspace.hpp"

namespace beaconkv::inline v0 {

struct TopK {
  index_t count = 0;    ///< indices written
  index_t num_nan = 0;  ///< NaN scores seen
};

/// Scratch of `top_k` over `n` scores.
[[nodiscard]] inline WorkspaceSize top_k_workspace_size(index_t n) {
  return detail::measure([&](Workspace& work) { static_cast<void>(work.take<std::uint32_t>(2 * n)); });
}

namespace detail {

/// Integers in the order of the scores: NaN is lowest, -0 equals +0. On bit patterns, so that `-ffast-math` has no say.
[[nodiscard]] inline std::uint32_t score_order(float score) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(score);
  if (is_nan(score)) return 0;
  if (bits == 0x80000000U) return 0x80000000U;
  return (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
}

}  // namespace detail

/// Writes the indices of the `k` largest scores to `out`, ascending and unique. Among equal scores the lowest index wins; NaN
/// ranks below minus infinity and is counted; -0 equals +0. `k` beyond the number of scores gives all of them.
///
/// O(n) on average, no allocation. Errors: negative `k`, `out` or `work` too small, more scores than `slot_t` can number.
[[nodiscard]] inline Result<TopK> top_k(std::span<const float> scores, index_t k, std::span<slot_t> out, Workspace& work) {
  const auto n = static_cast<index_t>(scores.size());
  if (k < 0) return detail::invalid("k = ", k, ": must not be negative");
  if (n > std::numeric_limits<slot_t>::max()) return detail::invalid("scores: ", n, " are more than a slot can number");
  k = std::min(k, n);
  if (static_cast<index_t>(out.size()) < k)
    return detail::invalid("out has room for ", out.size(), " indices: ", k, " are needed");
  if (Status s = work.require(top_k_workspace_size(n)); !s) return s;

  const Workspace::Frame frame(work);
  const std::span<std::uint32_t> order = work.take<std::uint32_t>(2 * n).first(scores.size());
  TopK result{.count = k};
  for (std::size_t i = 0; i < scores.size(); ++i) {
    order[i] = detail::score_order(scores[i]);
    result.num_nan += order[i] == 0 ? 1 : 0;
  }
  if (k == 0) return result;

  std::uint32_t threshold = 0;
  if (k < n) {
    const std::span<std::uint32_t> sorted(order.data() + n, scores.size());
    std::copy(order.begin(), order.end(), sorted.begin());
    std::nth_element(sorted.begin(), sorted.begin() + (k - 1), sorted.end(),
                     [](std::uint32_t a, std::uint32_t b) { return a > b; });
    threshold = sorted[static_cast<std::size_t>(k - 1)];
  }
  const auto above = std::count_if(order.begin(), order.end(), [&](std::uint32_t o) { return o > threshold; });
  index_t ties_left = k - above;
  std::size_t written = 0;
  for (std::size_t i = 0; i < order.size() && written < static_cast<std::size_t>(k); ++i) {
    const bool tie = order[i] == threshold && ties_left > 0;
    if (order[i] > threshold || tie) out[written++] = static_cast<slot_t>(i);
    ties_left -= tie ? 1 : 0;
  }
  return result;
}

}  // namespace beaconkv::inline v0
