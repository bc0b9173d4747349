// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// TOVA: the tokens that the newest query attends to stay.

#include "beaconkv/policy/evict.hpp"

namespace beaconkv::inline v0 {

template <Schedule ScheduleT = FixedBudget>
struct TOVAOptions {
  ScheduleT budget{};
  index_t n_recent_kv = 1;              ///< newest tokens, which stay; 0 in the paper, where the newest may go, 1 in kvpress
  std::optional<index_t> n_prefix = 0;  ///< positions below this stay; none are protected in the paper
  HeadScope head_scope = HeadScope::layer;  ///< `layer`: one choice for all KV heads
  Reduce over_heads = Reduce::mean;
  std::optional<float> scale{};
  std::optional<float> logit_softcap{};
  std::span<const float> sink_logits{};  ///< of each query head, of a model with learned sinks; must outlive the policy
};

/// TOVA (arXiv 2401.06104), section 3, as kvpress has it.
///
/// * observer: the newest query
/// * scorer: softmax over all keys, mean over all query heads of the layer
/// * schedule: `FixedBudget`; the paper evicts with every token, which is `{.max = n + 1, .min = n}`
/// * protected: the newest token
template <class ScorerT = AttentionScorer, Schedule ScheduleT = FixedBudget>
class TOVA : public EvictionPolicy<RecentQueries, ScorerT, ScheduleT> {
 public:
  using Base = EvictionPolicy<RecentQueries, ScorerT, ScheduleT>;
  using Options = TOVAOptions<ScheduleT>;

  /// What TOVA's options mean as a scorer.
  [[nodiscard]] static AttentionScorer scorer_of(const Options& o) {
    return {.attention = {.over_queries = Reduce::max,
                          .over_heads = o.over_heads,
                          .scale = o.scale,
                          .logit_softcap = o.logit_softcap},
            .head_scope = o.head_scope,
            .sink_logits = o.sink_logits};
  }

  /// The policy, or what is wrong with its options. Without a table queries must come rotated.
  [[nodiscard]] static Result<TOVA> make(const Shape& shape, const Options& options,
                                         RopeTable rope = {}) requires std::same_as<ScorerT, AttentionScorer> {
    return make(shape, options, std::move(rope), scorer_of(options));
  }
  /// The same with another scorer.
  [[nodiscard]] static Result<TOVA> make(const Shape& shape, const Options& options, RopeTable rope, ScorerT scorer) {
    const typename Base::Parts parts{.observer = {.count = 1},
                                     .scorer = std::move(scorer),
                                     .schedule = options.budget,
                                     .protection = {options.n_prefix, options.n_recent_kv},
                                     .rope = std::move(rope)};
    if (Status s = Base::validate_parts(shape, parts); !s) return s;
    return TOVA(shape, parts);
  }

#ifndef BEACONKV_NO_EXCEPTIONS
  /// As `make`; throws `Error`.
  TOVA(const Shape& shape, const Options& options, RopeTable rope = {})
  requires std::same_as<ScorerT, AttentionScorer> : TOVA(make(shape, options, std::move(rope)).or_throw()) {}
#endif

 private:
  TOVA(const Shape& shape, const typename Base::Parts& parts) : Base(shape, parts) {}
};

}  // namespace beaconkv::inline v0
