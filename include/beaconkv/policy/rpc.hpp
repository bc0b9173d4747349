// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// RPC, Reasoning Path Compression: every period, the generated tokens that the newest ones attend to stay.

#include "beaconkv/policy/evict.hpp"

namespace beaconkv::inline v0 {

template <Schedule ScheduleT = GrowingBudget>
struct RPCOptions {
  ScheduleT budget{};
  index_t n_recent_queries = 32;      ///< selector queries (R)
  index_t n_recent_kv = 32;           ///< newest tokens, which stay (R)
  std::optional<index_t> n_prefix{};  ///< positions below this stay; default: the prompt
  /// As published: the newest selector query counts twice and the oldest not at all. The paper's algorithm 1 has R distinct
  /// ones.
  bool newest_query_twice = false;
  HeadScope head_scope = HeadScope::layer;  ///< `layer`: one choice for all KV heads (`all` in the published code)
  Reduce over_queries = Reduce::sum;
  Reduce over_heads = Reduce::mean;
  Pool pool{PoolKind::average, 7};
  SoftmaxDomain softmax_domain = SoftmaxDomain::candidates_only;
  GroupStage group_stage = GroupStage::weights;
  bool causal = true;  ///< matters only where the queries reach back over candidates
  std::optional<float> scale{};
  std::optional<float> logit_softcap{};
  std::span<const float> sink_logits{};  ///< of each query head, of a model with learned sinks; must outlive the policy
  bool value_norm = false;               ///< final scores times the Euclidean length of the key's value; not in the paper
};

/// RPC (arXiv 2505.13866), algorithm 1 and its published code.
///
/// | part | here |
/// |---|---|
/// | observer | the last `n_recent_queries` queries |
/// | scorer | softmax over the candidates only; sum over queries, mean over heads, average pool |
/// | schedule | `GrowingBudget`: every `period` tokens, `period / ratio` more are kept than before |
/// | protected | the prompt, the last `n_recent_kv` tokens |
///
/// "Budget" means something else here than for the other policies: the cache goes on growing. `RPC<AttentionScorer,
/// FixedBudget>` holds it.
template <class ScorerT = AttentionScorer, Schedule ScheduleT = GrowingBudget>
class RPC : public EvictionPolicy<RecentQueries, ScorerT, ScheduleT> {
 public:
  using Base = EvictionPolicy<RecentQueries, ScorerT, ScheduleT>;
  using Options = RPCOptions<ScheduleT>;

  /// What RPC's options mean as a scorer.
  [[nodiscard]] static AttentionScorer scorer_of(const Options& o) {
    return {.attention = {.over_queries = o.over_queries,
                          .over_heads = o.over_heads,
                          .group_stage = o.group_stage,
                          .pool = o.pool,
                          .pool_stage = PoolStage::kv_head,
                          .scale = o.scale,
                          .logit_softcap = o.logit_softcap},
            .softmax_domain = o.softmax_domain,
            .head_scope = o.head_scope,
            .causal = o.causal,
            .sink_logits = o.sink_logits,
            .value_norm = o.value_norm};
  }

  /// The policy, or what is wrong with its options. Without a table queries must come rotated.
  [[nodiscard]] static Result<RPC> make(const Shape& shape, const Options& options,
                                        RopeTable rope = {}) requires std::same_as<ScorerT, AttentionScorer> {
    return make(shape, options, std::move(rope), scorer_of(options));
  }
  /// The same with another scorer.
  [[nodiscard]] static Result<RPC> make(const Shape& shape, const Options& options, RopeTable rope, ScorerT scorer) {
    const typename Base::Parts parts{
        .observer = {.count = options.n_recent_queries, .newest_twice = options.newest_query_twice},
        .scorer = std::move(scorer),
        .schedule = options.budget,
        .protection = {options.n_prefix, options.n_recent_kv},
        .rope = std::move(rope)};
    if (Status s = Base::validate_parts(shape, parts); !s) return s;
    return RPC(shape, parts);
  }

#ifndef BEACONKV_NO_EXCEPTIONS
  /// As `make`; throws `Error`.
  RPC(const Shape& shape, const Options& options, RopeTable rope = {})
  requires std::same_as<ScorerT, AttentionScorer> : RPC(make(shape, options, std::move(rope)).or_throw()) {}
#endif

 private:
  RPC(const Shape& shape, const typename Base::Parts& parts) : Base(shape, parts) {}
};

}  // namespace beaconkv::inline v0
