// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// RecentWindow: the first tokens ("sinks") and the newest ones stay.

#include "beaconkv/policy/evict.hpp"

namespace beaconkv::inline v0 {

template <Schedule ScheduleT = FixedBudget>
struct RecentWindowOptions {
  ScheduleT budget{};
  std::optional<index_t> n_prefix{};  ///< sinks: positions below this stay; default: the whole prompt
};

/// StreamingLLM's choice of tokens (arXiv 2309.17453) with true positions kept; the paper's positions within the cache are what
/// `realign_keys` makes of it. Looks at no query: feed it with `prefill_tokens` and `observe({}, position)`.
///
/// | part | here |
/// |---|---|
/// | observer | none |
/// | scorer | `RecencyScorer`: the newer the better |
/// | schedule | `FixedBudget` |
/// | protected | the first `n_prefix` positions |
template <class ScorerT = RecencyScorer, Schedule ScheduleT = FixedBudget>
class RecentWindow : public EvictionPolicy<NoQueries, ScorerT, ScheduleT> {
 public:
  using Base = EvictionPolicy<NoQueries, ScorerT, ScheduleT>;
  using Options = RecentWindowOptions<ScheduleT>;

  /// The policy, or what is wrong with its options.
  [[nodiscard]] static Result<RecentWindow> make(const Shape& shape, const Options& options, ScorerT scorer = {}) {
    const typename Base::Parts parts{
        .observer = {}, .scorer = std::move(scorer), .schedule = options.budget, .protection = {options.n_prefix, 0}};
    if (Status s = Base::validate_parts(shape, parts); !s) return s;
    return RecentWindow(shape, parts);
  }

#ifndef BEACONKV_NO_EXCEPTIONS
  /// As `make`; throws `Error`.
  RecentWindow(const Shape& shape, const Options& options, ScorerT scorer = {})
      : RecentWindow(make(shape, options, std::move(scorer)).or_throw()) {}
#endif

 private:
  RecentWindow(const Shape& shape, const typename Base::Parts& parts) : Base(shape, parts) {}
};

}  // namespace beaconkv::inline v0
