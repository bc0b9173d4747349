// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// PyramidKV: SnapKV with budgets that shrink from the first layer to the last.

#include <algorithm>
#include <vector>

#include "beaconkv/policy/snapkv.hpp"

namespace beaconkv::inline v0 {

namespace detail {

[[nodiscard]] inline index_t mean_budget(const PromptBudget& schedule) noexcept { return schedule.tokens; }
[[nodiscard]] inline index_t mean_budget(const FixedBudget& schedule) noexcept { return schedule.max; }

/// The same rule with another budget; what an eviction takes away keeps its share, down to one token beside the window.
inline void set_budget(PromptBudget& schedule, index_t tokens, index_t) noexcept { schedule.tokens = tokens; }
inline void set_budget(FixedBudget& schedule, index_t tokens, index_t window) noexcept {
  const index_t lower = tokens - (schedule.max - schedule.lower()) * tokens / std::max<index_t>(schedule.max, 1);
  schedule.max = tokens;
  schedule.min = std::min(tokens, std::max(lower, window + 1));
}

}  // namespace detail

/// PyramidKV (arXiv 2406.02069): one policy for each of `layers` layers, with `options` and the budget of
/// `pyramid_budgets` around `options.budget` (`PromptBudget::tokens`, `FixedBudget::max`), the window included. A budget that
/// a short sequence does not use is given to no other layer.
///
/// `PolicyT` is `SnapKV` as published, or any policy whose options have a `budget` of these two kinds and `n_recent_kv`.
/// Allocates.
template <class PolicyT = SnapKV<>>
[[nodiscard]] Result<std::vector<PolicyT>> pyramid_layers(const Shape& shape, typename PolicyT::Options options, index_t layers,
                                                          index_t beta = 20, const RopeTable& rope = {}) {
  if (layers < 1) return detail::invalid("layers = ", layers, ": must be at least 1");
  const auto schedule = options.budget;
  std::vector<index_t> budgets(static_cast<std::size_t>(layers));
  if (Status s = pyramid_budgets(detail::mean_budget(schedule), options.n_recent_kv, beta, budgets); !s) return s;
  std::vector<PolicyT> policies;
  policies.reserve(budgets.size());
  for (const index_t budget : budgets) {
    options.budget = schedule;
    detail::set_budget(options.budget, budget, options.n_recent_kv);
    Result<PolicyT> policy = PolicyT::make(shape, options, rope);
    if (!policy) return policy.status();
    policies.push_back(std::move(*policy));
  }
  return policies;
}

}  // namespace beaconkv::inline v0
