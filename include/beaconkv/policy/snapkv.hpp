// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// SnapKV: the tokens that the end of the prompt attends to stay.

#include "beaconkv/policy/evict.hpp"

namespace beaconkv::inline v0 {

template <Schedule ScheduleT = PromptBudget>
struct SnapKVOptions {
  ScheduleT budget{};
  index_t n_recent_queries = 32;        ///< the observation window's queries
  index_t n_recent_kv = 32;             ///< the observation window's tokens, which stay
  std::optional<index_t> n_prefix = 0;  ///< positions below this stay; none are protected in the paper
  Pool pool{PoolKind::average, 5};
  Reduce over_queries = Reduce::sum;
  Reduce over_heads = Reduce::mean;  ///< over the group, where a KV head serves several query heads
  SoftmaxDomain softmax_domain = SoftmaxDomain::all_visible;
  GroupStage group_stage = GroupStage::weights;
  PoolStage pool_stage = PoolStage::query_head;
  std::optional<float> scale{};
  std::optional<float> logit_softcap{};
  std::span<const float> sink_logits{};  ///< of each query head, of a model with learned sinks; must outlive the policy
  bool value_norm = false;               ///< final scores times the Euclidean length of the key's value; not in the paper
};

/// SnapKV (arXiv 2404.14469), section 3 and its published code.
///
/// | part | here |
/// |---|---|
/// | observer | the last `n_recent_queries` queries |
/// | scorer | softmax over all keys, causal within the window; sum over queries, average pool over the candidates |
/// | schedule | `PromptBudget`: once, after the prompt |
/// | protected | the last `n_recent_kv` tokens |
///
/// The published code repeats keys over the group and chooses for each *query* head. That is this class with `kv_heads =
/// query_heads`. With fewer KV heads each pooled query head counts equally (`over_heads`), as in kvpress. Slots stay in time
/// order; the published code stores them by descending score (same set).
template <class ScorerT = AttentionScorer, Schedule ScheduleT = PromptBudget>
class SnapKV : public EvictionPolicy<RecentQueries, ScorerT, ScheduleT> {
 public:
  using Base = EvictionPolicy<RecentQueries, ScorerT, ScheduleT>;
  using Options = SnapKVOptions<ScheduleT>;

  /// What SnapKV's options mean as a scorer.
  [[nodiscard]] static AttentionScorer scorer_of(const Options& o) {
    return {.attention = {.over_queries = o.over_queries,
                          .over_heads = o.over_heads,
                          .group_stage = o.group_stage,
                          .pool = o.pool,
                          .pool_stage = o.pool_stage,
                          .scale = o.scale,
                          .logit_softcap = o.logit_softcap},
            .softmax_domain = o.softmax_domain,
            .sink_logits = o.sink_logits,
            .value_norm = o.value_norm};
  }

  /// The policy, or what is wrong with its options. Without a table queries must come rotated.
  [[nodiscard]] static Result<SnapKV> make(const Shape& shape, const Options& options,
                                           RopeTable rope = {}) requires std::same_as<ScorerT, AttentionScorer> {
    return make(shape, options, std::move(rope), scorer_of(options));
  }
  /// The same with another scorer.
  [[nodiscard]] static Result<SnapKV> make(const Shape& shape, const Options& options, RopeTable rope, ScorerT scorer) {
    const typename Base::Parts parts{.observer = {.count = options.n_recent_queries},
                                     .scorer = std::move(scorer),
                                     .schedule = options.budget,
                                     .protection = {options.n_prefix, options.n_recent_kv},
                                     .rope = std::move(rope)};
    if (Status s = Base::validate_parts(shape, parts); !s) return s;
    return SnapKV(shape, parts);
  }

#ifndef BEACONKV_NO_EXCEPTIONS
  /// As `make`; throws `Error`.
  SnapKV(const Shape& shape, const Options& options, RopeTable rope = {}) requires std::same_as<ScorerT, AttentionScorer>
      : SnapKV(make(shape, options, std::move(rope)).or_throw()) {}
#endif

 private:
  SnapKV(const Shape& shape, const typename Base::Parts& parts) : Base(shape, parts) {}
};

}  // namespace beaconkv::inline v0
