// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// BeaconKV: beacon queries from the whole history, rotated to now, together with the newest ones decide what stays.

#include "beaconkv/policy/beacon_queries.hpp"
#include "beaconkv/policy/beacon_scorer.hpp"
#include "beaconkv/policy/evict.hpp"

namespace beaconkv::inline v0 {

template <Schedule ScheduleT = FixedBudget>
struct BeaconKVOptions {
  ScheduleT budget{};
  index_t n_beacon = 16;              ///< beacon queries of each query head
  index_t n_recent_queries = 16;      ///< newest queries of each query head
  index_t n_recent_kv = 32;           ///< newest tokens, which stay
  std::optional<index_t> n_prefix{};  ///< positions below this stay; default: the prompt
  Reduce over_queries = Reduce::max;
  Reduce over_heads = Reduce::max;
  SoftmaxDomain softmax_domain = SoftmaxDomain::all_visible;
  Pool pool{};  ///< of the final scores; none in the paper
  std::optional<float> scale{};
  std::optional<float> logit_softcap{};
  std::span<const float> sink_logits{};  ///< of each query head, of a model with learned sinks; must outlive the policy

  // Beyond the paper; off, the scores are the published ones to the bit.

  /// Orphan credit: a key remembers the best score that a beacon gave it. When that beacon has left its bank the memory fades
  /// to this share of itself at each eviction, 0 to 1, instead of being lost at once (`BeaconScorer`). 0: none. Needs maxima
  /// over queries and heads. 12 bytes a slot of the budget and KV head.
  float orphan_credit = 0;
  /// Final scores times the Euclidean length of the key's value: what goes with a key is its weight times its value. 4 bytes a
  /// slot of the budget and KV head.
  bool value_norm = false;
  /// Above 0, at most 1: in the end candidates are ranked, and this share of the rank goes by how far a key is from the mean
  /// direction of all (KeyDiff). 0.3 is a good share where a hundred tokens or more stay. Two more passes over the keys.
  float key_diff_share = 0;

  /// The reading of the paper's pseudocode: one number for both windows, and a budget that counts the prompt too.
  [[nodiscard]] static BeaconKVOptions paper_literal(index_t budget_max, index_t budget_min, index_t n_beacon = 16,
                                                     index_t n_recent = 16) requires std::same_as<ScheduleT, FixedBudget> {
    return {.budget = {.max = budget_max, .min = budget_min, .counts_prefix = true},
            .n_beacon = n_beacon,
            .n_recent_queries = n_recent,
            .n_recent_kv = n_recent,
            .n_prefix = 0};
  }

  /// What is not in the paper and keeps more of what long chains of thought come back to: few recent queries and many beacons,
  /// orphan credit, value norm. The same rows are scored as by the published 16 and 16. For smallest budgets 24 beacons and 8
  /// recent queries; 28 and 4 may be better where a hundred tokens or more stay.
  [[nodiscard]] static BeaconKVOptions with_orphan_credit(ScheduleT budget, index_t n_beacon = 24, index_t n_recent = 8) {
    return {.budget = std::move(budget),
            .n_beacon = n_beacon,
            .n_recent_queries = n_recent,
            .orphan_credit = 0.95F,
            .value_norm = true};
  }
};

/// BeaconKV (arXiv 2609.04971), equations 7 to 9 and algorithms 1 and 2.
///
/// | part | here |
/// |---|---|
/// | observer | `BeaconQueries`: a ring of recent queries and, for each query head, Continual FPS over all older ones |
/// | scorer | beacons rotated to now, recent ones at their positions; softmax over visible keys; max over queries and heads |
/// | schedule | `FixedBudget`: at `max` counted tokens down to `min` |
/// | protected | the prompt, the last `n_recent_kv` tokens |
///
/// Beyond the paper, and off: `orphan_credit`, `value_norm` and `key_diff_share`.
///
/// The paper's text and pseudocode disagree on the two windows: `n_recent_queries` and `n_recent_kv` are separate.
template <class ScorerT = BeaconScorer, Schedule ScheduleT = FixedBudget>
class BeaconKV : public EvictionPolicy<BeaconQueries, ScorerT, ScheduleT> {
 public:
  using Base = EvictionPolicy<BeaconQueries, ScorerT, ScheduleT>;
  using Options = BeaconKVOptions<ScheduleT>;

  /// What BeaconKV's options mean as a scorer.
  [[nodiscard]] static BeaconScorer scorer_of(const Options& o) {
    const AttentionScorer attention{.attention = {.over_queries = o.over_queries,
                                                  .over_heads = o.over_heads,
                                                  .pool = o.pool,
                                                  .scale = o.scale,
                                                  .logit_softcap = o.logit_softcap},
                                    .softmax_domain = o.softmax_domain,
                                    .sink_logits = o.sink_logits,
                                    .value_norm = o.value_norm};
    return BeaconScorer({.attention = attention, .orphan_credit = o.orphan_credit, .key_diff_share = o.key_diff_share});
  }

  /// The policy, or what is wrong with its options.
  [[nodiscard]] static Result<BeaconKV> make(const Shape& shape, const Options& options,
                                             const RopeTable& rope) requires std::same_as<ScorerT, BeaconScorer> {
    return make(shape, options, rope, scorer_of(options));
  }
  /// The same with another scorer.
  [[nodiscard]] static Result<BeaconKV> make(const Shape& shape, const Options& options, const RopeTable& rope,
                                             ScorerT scorer) {
    const typename Base::Parts parts{.observer = {.n_beacon = options.n_beacon, .n_recent_queries = options.n_recent_queries},
                                     .scorer = std::move(scorer),
                                     .schedule = options.budget,
                                     .protection = {options.n_prefix, options.n_recent_kv},
                                     .rope = rope};
    if (Status s = Base::validate_parts(shape, parts); !s) return s;
    if (options.orphan_credit > 0) {
      if (options.n_beacon < 1)
        return detail::invalid("n_beacon = ", options.n_beacon,
                               ": must be at least 1 for orphan_credit = ", options.orphan_credit);
      const index_t most = detail::OrphanCredits::max_rows / shape.group();
      if (options.n_beacon > most || options.n_recent_queries > most - options.n_beacon)
        return detail::invalid("n_beacon = ", options.n_beacon, " and n_recent_queries = ", options.n_recent_queries,
                               ": orphan_credit tells at most ", most, " rows of a query head apart");
    }
    return BeaconKV(shape, parts);
  }

#ifndef BEACONKV_NO_EXCEPTIONS
  /// As `make`; throws `Error`.
  BeaconKV(const Shape& shape, const Options& options, const RopeTable& rope) requires std::same_as<ScorerT, BeaconScorer>
      : BeaconKV(make(shape, options, rope).or_throw()) {}
#endif

 private:
  BeaconKV(const Shape& shape, const typename Base::Parts& parts) : Base(shape, parts) {}
};

}  // namespace beaconkv::inline v0
