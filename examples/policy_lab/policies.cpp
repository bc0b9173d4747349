// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "policy_lab/policies.hpp"

#include <limits>

#include "policy_lab/ablation.hpp"
#include "policy_lab/policy_options.hpp"
#include "policy_lab/random_scorer.hpp"

namespace beaconkv::lab {
namespace {

template <class Policy>
MadePolicy make_common(const PolicyRequest& request, Settings& settings, Session& session) {
  const typename Policy::Options o = common_options<Policy>(request, settings);
  return build<Policy>(request, o, settings, session);
}

/// SnapKV with a budget for each layer, of which `budget` is the mean.
MadePolicy make_pyramidkv(const PolicyRequest& request, Settings& settings, Session& session) {
  using Policy = SnapKV<AttentionScorer, FixedBudget>;
  const Policy::Options o = common_options<Policy>(request, settings);
  const index_t beta = settings.count("beta", 20);
  if (Status s = settings.status(); !s) return s;
  const engine::Model& model = session.model();
  Result<std::vector<Policy>> layers = pyramid_layers<Policy>(model.shape(), o, model.layers(), beta, model.rope());
  if (!layers) return layers.status();
  return LayeredPolicy<Policy>::make(session, std::move(*layers), request.layers_per_step);
}

/// BeaconKV with what its paper has not: orphan credit and value norm, 24 beacons and 8 recent queries.
MadePolicy make_beaconkv_with_credit(const PolicyRequest& request, Settings& settings, Session& session) {
  BeaconKVOptions<> o = BeaconKVOptions<>::with_orphan_credit(common_budget(request, settings));
  o.n_recent_kv = 8;
  read_options(o, settings);
  return build<BeaconKV<>>(request, o, settings, session);
}

/// Never evicts: a budget that nothing reaches.
MadePolicy make_full(const PolicyRequest& request, Settings& settings, Session& session) {
  return build<RecentWindow<>>(request, {.budget = {.max = std::numeric_limits<index_t>::max()}}, settings, session);
}

/// The heads of a layer share the budget of a policy.
template <class Policy>
[[nodiscard]] MadePolicy build_adakv(const PolicyRequest& request, const typename Policy::Options& options, Settings& settings,
                                     Session& session) {
  using Shared = AdaKV<Policy>;
  const AdaKVOptions own{.safeguard = static_cast<double>(settings.number("safeguard", 0.2F))};
  if (Status s = settings.status(); !s) return s;
  const engine::Model& model = session.model();
  const Result<Policy> policy = Policy::make(model.shape(), options, model.rope());
  if (!policy) return policy.status();
  const Result<Shared> shared = Shared::make(*policy, own);
  if (!shared) return shared.status();
  return LayeredPolicy<Shared, Granularity::per_head_ragged>::make(
      session, std::vector<Shared>(static_cast<std::size_t>(model.layers()), *shared), request.layers_per_step);
}

MadePolicy make_adakv(const PolicyRequest& request, Settings& settings, Session& session) {
  using Policy = SnapKV<AttentionScorer, FixedBudget>;
  const Policy::Options o = common_options<Policy>(request, settings);
  return build_adakv<Policy>(request, o, settings, session);
}

MadePolicy make_random(const PolicyRequest& request, Settings& settings, Session& session) {
  using Random = EvictionPolicy<NoQueries, RandomScorer, FixedBudget>;
  Random::Parts parts{.schedule = common_budget(request, settings),
                      .protection = {.n_recent_kv = settings.count("n_recent_kv", 8)}};
  const auto seed = static_cast<std::uint64_t>(settings.count("seed", request.seed));
  if (Status s = settings.status(); !s) return s;
  std::vector<Random> layers;
  for (index_t l = 0; l < session.model().layers(); ++l) {
    parts.scorer.seed = (seed << 16) + static_cast<std::uint64_t>(l);
    Result<Random> policy = Random::make(session.model().shape(), parts);
    if (!policy) return policy.status();
    layers.push_back(std::move(*policy));
  }
  return LayeredPolicy<Random>::make(session, std::move(layers), request.layers_per_step);
}

// As published: each paper's own trigger, protection and growth. What "budget" means differs.

/// StreamingLLM: sinks and a window that slides with every token.
MadePolicy publish_recent_window(const PolicyRequest& request, Settings& settings, Session& session) {
  const FixedBudget sliding{.max = request.budget, .min = request.budget, .counts_prefix = true};
  return build<RecentWindow<>>(request, {.budget = sliding, .n_prefix = settings.count("n_prefix", 4)}, settings, session);
}

MadePolicy publish_snapkv(const PolicyRequest& request, Settings& settings, Session& session) {
  SnapKVOptions<> o{.budget = {.tokens = request.budget}};
  read_options(o, settings);
  return build<SnapKV<>>(request, o, settings, session);
}

MadePolicy publish_rpc(const PolicyRequest& request, Settings& settings, Session& session) {
  RPCOptions<> o{.budget = {.period = request.budget, .ratio = settings.count("ratio", 4)}, .newest_query_twice = true};
  read_options(o, settings);
  return build<RPC<>>(request, o, settings, session);
}

MadePolicy publish_rkv(const PolicyRequest& request, Settings& settings, Session& session) {
  RKVOptions<> o{.budget = {.tokens = request.budget, .interval = settings.count("interval", 128)},
                 .order = RKVOrder::published};
  read_options(o, settings);
  return build<RKV<>>(request, o, settings, session);
}

/// What evicts with every token, as TOVA and H2O do.
[[nodiscard]] FixedBudget sliding(index_t tokens) { return {.max = tokens + 1, .min = tokens, .counts_prefix = true}; }

MadePolicy publish_tova(const PolicyRequest& request, Settings& settings, Session& session) {
  TOVAOptions<> o{.budget = sliding(request.budget)};
  read_options(o, settings);
  return build<TOVA<>>(request, o, settings, session);
}

/// Half of the budget for the newest tokens.
MadePolicy publish_h2o(const PolicyRequest& request, Settings& settings, Session& session) {
  H2OOptions<> o{.budget = sliding(request.budget), .n_recent_kv = request.budget / 2, .capacity = request.budget};
  read_options(o, settings);
  return build<H2O<>>(request, o, settings, session);
}

/// kvpress's presses: the prompt is cut, and nothing while decoding.
template <class Policy>
MadePolicy publish_press(const PolicyRequest& request, Settings& settings, Session& session) {
  typename Policy::Options o{.budget = {.tokens = request.budget}};
  if constexpr (requires { o.scorer.lag; }) o.n_prefix = 4;
  read_options(o, settings);
  return build<Policy>(request, o, settings, session);
}

MadePolicy publish_pyramidkv(const PolicyRequest& request, Settings& settings, Session& session) {
  SnapKVOptions<> o{.budget = {.tokens = request.budget}};
  read_options(o, settings);
  const index_t beta = settings.count("beta", 20);
  if (Status s = settings.status(); !s) return s;
  const engine::Model& model = session.model();
  Result<std::vector<SnapKV<>>> layers = pyramid_layers<SnapKV<>>(model.shape(), o, model.layers(), beta, model.rope());
  if (!layers) return layers.status();
  return LayeredPolicy<SnapKV<>>::make(session, std::move(*layers), request.layers_per_step);
}

MadePolicy publish_adakv(const PolicyRequest& request, Settings& settings, Session& session) {
  SnapKVOptions<> o{.budget = {.tokens = request.budget}};
  read_options(o, settings);
  return build_adakv<SnapKV<>>(request, o, settings, session);
}

MadePolicy publish_beaconkv(const PolicyRequest& request, Settings& settings, Session& session) {
  BeaconKVOptions<> o{.budget = common_budget(request, settings)};
  read_options(o, settings);
  return build<BeaconKV<>>(request, o, settings, session);
}

}  // namespace

const std::vector<PolicyEntry>& policy_entries() {
  static const std::vector<PolicyEntry> entries{
      {"full", make_full, make_full},
      {"random", make_random, make_random},
      {"recent_window", make_common<RecentWindow<>>, publish_recent_window},
      {"snapkv", make_common<SnapKV<AttentionScorer, FixedBudget>>, publish_snapkv},
      {"rpc", make_common<RPC<AttentionScorer, FixedBudget>>, publish_rpc},
      {"rkv", make_common<RKV<RKVScorer, FixedBudget>>, publish_rkv},
      {"beaconkv", make_common<BeaconKV<>>, publish_beaconkv},
      {"beaconkv_credit", make_beaconkv_with_credit, make_beaconkv_with_credit},
      {"beaconkv_ablation", make_beaconkv_ablation, make_beaconkv_ablation},
      {"streaming_llm", make_common<RecentWindow<>>, publish_recent_window},
      {"h2o", make_common<H2O<>>, publish_h2o},
      {"tova", make_common<TOVA<>>, publish_tova},
      {"keydiff", make_common<KeyDiff<>>, publish_press<KeyDiff<PromptBudget>>},
      {"knorm", make_common<Knorm<>>, publish_press<Knorm<PromptBudget>>},
      {"lagkv", make_common<LagKV<>>, publish_press<LagKV<PromptBudget>>},
      {"expected_attention", make_common<ExpectedAttention<>>,
       publish_press<ExpectedAttention<ExpectedAttentionScorer, PromptBudget>>},
      {"pyramidkv", make_pyramidkv, publish_pyramidkv},
      {"adakv", make_adakv, publish_adakv},
  };
  return entries;
}

Result<PolicyEntry> find_policy(std::string_view name) {
  std::string names;
  for (const PolicyEntry& entry : policy_entries()) {
    if (entry.name == name) return entry;
    names.append(names.empty() ? "" : ", ").append(entry.name);
  }
  return detail::invalid("policy '", name, "' is not known; there are ", names);
}

}  // namespace beaconkv::lab
