// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// All policies with small budgets, for what is to hold for every one of them.

#include "beaconkv/beaconkv.hpp"
#include "support/policy_run.hpp"

namespace beaconkv::test {

inline constexpr Shape small_shape{.query_heads = 4, .kv_heads = 2, .head_dim = 16};
inline constexpr index_t small_budget = 24;

[[nodiscard]] inline RopeTable small_rope() { return RopeTable({.head_dim = 16}); }

[[nodiscard]] inline RecentWindow<> small_recent_window() {
  return RecentWindow<>(small_shape,
                        {.budget = {.max = small_budget + 8, .min = small_budget, .counts_prefix = true}, .n_prefix = 2});
}
[[nodiscard]] inline SnapKV<> small_snapkv() {
  return SnapKV<>(small_shape,
                  {.budget = {.tokens = small_budget, .interval = 8}, .n_recent_queries = 5, .n_recent_kv = 4, .n_prefix = 2},
                  small_rope());
}
/// Holds a budget, so that it can stand beside the others.
[[nodiscard]] inline RPC<AttentionScorer, FixedBudget> small_rpc() {
  return RPC<AttentionScorer, FixedBudget>(small_shape,
                                           {.budget = {.max = small_budget + 8, .min = small_budget, .counts_prefix = true},
                                            .n_recent_queries = 5,
                                            .n_recent_kv = 4,
                                            .n_prefix = 2},
                                           small_rope());
}
[[nodiscard]] inline RKV<> small_rkv(RKVOrder order = RKVOrder::chronological) {
  return RKV<>(small_shape,
               {.budget = {.tokens = small_budget, .interval = 8},
                .n_recent_queries = 5,
                .n_recent_kv = 4,
                .n_prefix = 2,
                .lambda = 0.4F,
                .order = order},
               small_rope());
}
[[nodiscard]] inline BeaconKV<> small_beaconkv() {
  return BeaconKV<>(small_shape,
                    {.budget = {.max = small_budget + 8, .min = small_budget, .counts_prefix = true},
                     .n_beacon = 4,
                     .n_recent_queries = 3,
                     .n_recent_kv = 4,
                     .n_prefix = 2},
                    small_rope());
}

/// Beyond the paper: keys remember beacons, and values weigh.
[[nodiscard]] inline BeaconKV<> small_beaconkv_with_credit() {
  BeaconKVOptions<> o =
      BeaconKVOptions<>::with_orphan_credit({.max = small_budget + 8, .min = small_budget, .counts_prefix = true}, 4, 3);
  o.n_recent_kv = 4;
  o.n_prefix = 2;
  return BeaconKV<>(small_shape, o, small_rope());
}

/// Calls `f(name, policy)` with each of them: prefix 2, window 4 (RecentWindow: 0), budget `small_budget`.
template <class F>
void for_each_policy(F&& f) {
  f("RecentWindow", small_recent_window());
  f("SnapKV", small_snapkv());
  f("RPC", small_rpc());
  f("RKV", small_rkv());
  f("RKV, published order", small_rkv(RKVOrder::published));
  f("BeaconKV", small_beaconkv());
  f("BeaconKV, orphan credit", small_beaconkv_with_credit());
}

/// One decoded token, to a policy and to its cache.
template <class PolicyT, class CacheT>
void feed(PolicyT& policy, CacheT& cache, const Token& token) {
  cache.append(token);
  require_ok(policy.observe(token.queries, token.position));
}

/// `tokens` of a stream to a policy and a cache, without any eviction.
template <class PolicyT, class CacheT>
void feed(PolicyT& policy, CacheT& cache, Stream& stream, index_t tokens) {
  for (index_t i = 0; i < tokens; ++i) feed(policy, cache, stream.next(policy.next_position()));
}

[[nodiscard]] inline Stream small_stream(Random& random) { return Stream(random, small_shape, make_rope(16)); }

}  // namespace beaconkv::test
