// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// From settings of the command line to a policy's options, and to the policy.

#include "policy_lab/layered_policy.hpp"

namespace beaconkv::lab {

/// Gives each setting of the command line to the option of that name, where the policy has one.
template <class Options>
void read_options(Options& o, Settings& s) {
  if constexpr (requires { o.n_recent_queries; }) o.n_recent_queries = s.count("n_recent_queries", o.n_recent_queries);
  if constexpr (requires { o.n_recent_kv; }) o.n_recent_kv = s.count("n_recent_kv", o.n_recent_kv);
  if constexpr (requires { o.n_beacon; }) o.n_beacon = s.count("n_beacon", o.n_beacon);
  if constexpr (requires { o.orphan_credit; }) o.orphan_credit = s.number("orphan_credit", o.orphan_credit);
  if constexpr (requires { o.key_diff_share; }) o.key_diff_share = s.number("key_diff_share", o.key_diff_share);
  if constexpr (requires { o.value_norm; }) o.value_norm = s.flag("value_norm", o.value_norm);
  if constexpr (requires { o.pool; }) o.pool = s.pool(o.pool);
  if constexpr (requires { o.over_queries; }) o.over_queries = s.reduce("over_queries", o.over_queries);
  if constexpr (requires { o.over_heads; }) o.over_heads = s.reduce("over_heads", o.over_heads);
  if constexpr (requires { o.softmax_domain; }) o.softmax_domain = s.softmax_domain(o.softmax_domain);
  if constexpr (requires { o.head_scope; }) o.head_scope = s.head_scope(o.head_scope);
  if constexpr (requires { o.causal; }) o.causal = s.flag("causal", o.causal);
  if constexpr (requires { o.newest_query_twice; }) o.newest_query_twice = s.flag("newest_query_twice", o.newest_query_twice);
  if constexpr (requires { o.lambda; }) o.lambda = s.number("lambda", o.lambda);
  if constexpr (requires { o.redundancy; }) {
    o.redundancy.threshold = s.number("threshold", o.redundancy.threshold);
    o.redundancy.spare_column_zero = s.flag("spare_column_zero", o.redundancy.spare_column_zero);
  }
  if constexpr (requires { o.order; }) o.order = s.order(o.order);
  if constexpr (requires { o.max_pending_queries; })
    o.max_pending_queries = s.count("max_pending_queries", o.max_pending_queries);
  if constexpr (requires { o.n_future_positions; }) {
    o.n_sink = s.count("n_sink", o.n_sink);
    o.n_future_positions = s.count("n_future_positions", o.n_future_positions);
    o.use_covariance = s.flag("use_covariance", o.use_covariance);
    o.value_norm = s.flag("value_norm", o.value_norm);
    o.epsilon = s.number("epsilon", o.epsilon);
  }
  if constexpr (requires { o.scorer.lag; }) {
    o.scorer.lag = s.count("lag", o.scorer.lag);
    o.scorer.cross_scoring = s.flag("cross_scoring", o.scorer.cross_scoring);
  }
}

/// Copies a policy for each layer, once its options were read without complaint.
template <class Policy>
[[nodiscard]] MadePolicy build(const PolicyRequest& request, const typename Policy::Options& options, const Settings& settings,
                               Session& session) {
  if (Status s = settings.status(); !s) return s;
  const engine::Model& model = session.model();
  const Result<Policy> policy = [&] {
    if constexpr (requires { Policy::make(model.shape(), options, model.rope()); })
      return Policy::make(model.shape(), options, model.rope());
    else
      return Policy::make(model.shape(), options);
  }();
  if (!policy) return policy.status();
  return LayeredPolicy<Policy>::make(session, std::vector<Policy>(static_cast<std::size_t>(model.layers()), *policy),
                                     request.layers_per_step);
}

/// The common rule of a comparison: the prompt is kept and lies on top of the budget.
[[nodiscard]] inline FixedBudget common_budget(const PolicyRequest& request, Settings& settings) {
  return {.max = request.budget, .min = settings.optional_count("budget_min")};
}

/// The options of any policy with a `FixedBudget`, under the common rule. Its windows are small here, because the lab's budgets
/// are.
template <class Policy>
[[nodiscard]] typename Policy::Options common_options(const PolicyRequest& request, Settings& settings) {
  typename Policy::Options o{};
  o.budget = common_budget(request, settings);
  o.n_prefix = std::nullopt;
  if constexpr (requires { o.n_recent_kv; }) o.n_recent_kv = 8;
  if constexpr (requires { o.n_recent_queries; }) o.n_recent_queries = std::min<index_t>(o.n_recent_queries, 16);
  if constexpr (requires { o.n_future_positions; }) o.n_future_positions = 32;
  if constexpr (requires { o.scorer.lag; }) o.scorer.lag = 16;
  read_options(o, settings);
  return o;
}

}  // namespace beaconkv::lab
