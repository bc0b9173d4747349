// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "policy_lab/ablation.hpp"

#include <cmath>

#include "policy_lab/ablation_queries.hpp"
#include "policy_lab/ablation_scorer.hpp"
#include "policy_lab/policy_options.hpp"

namespace beaconkv::lab {

Result<std::unique_ptr<ModelPolicy>> make_beaconkv_ablation(const PolicyRequest& request, Settings& settings,
                                                            engine::Session& session) {
  using Policy = EvictionPolicy<AblationQueries, AblationScorer, FixedBudget>;
  const engine::Model& model = session.model();
  BeaconKVOptions<> o = common_options<BeaconKV<>>(request, settings);
  AblationQueries::Options queries{.n_beacon = o.n_beacon, .n_recent_queries = o.n_recent_queries};
  queries.sampler = settings.choice<QuerySampler>("sampler", queries.sampler,
                                                  {{"fps", QuerySampler::fps},
                                                   {"random", QuerySampler::random},
                                                   {"recent", QuerySampler::recent},
                                                   {"centroid", QuerySampler::centroid},
                                                   {"medoid", QuerySampler::medoid}});
  queries.place = settings.choice<BeaconPlace>(
      "beacon_place", queries.place,
      {{"now", BeaconPlace::now}, {"own", BeaconPlace::own}, {"own_unmasked", BeaconPlace::own_unmasked}});
  queries.whole_history = settings.choice<bool>("history", false, {{"bounded", false}, {"whole", true}});
  if (settings.choice<bool>("sample_space", false, {{"pre_rope", false}, {"post_rope", true}}))
    queries.sampled_after = model.rope();
  const auto seed = static_cast<std::uint64_t>(settings.count("seed", request.seed));
  const float per_token = settings.number("credit_per_token", 0);
  if (per_token > 0) o.orphan_credit = std::pow(per_token, static_cast<float>(o.budget.max - o.budget.lower()));
  const float exponent = settings.number("value_exponent", 0);
  const float limit = settings.number("value_limit", 0);
  const bool score_at_reductions = settings.flag("score_at_reductions", false);
  if (Status s = settings.status(); !s) return s;

  const AttentionScorer attention = BeaconKV<>::scorer_of(o).options().attention;
  Policy::Parts parts{.observer = queries,
                      .scorer = AblationScorer({{attention, o.orphan_credit, o.key_diff_share}, exponent, limit}),
                      .schedule = o.budget,
                      .protection = {o.n_prefix, o.n_recent_kv},
                      .rope = model.rope()};
  std::vector<Policy> layers;
  for (index_t l = 0; l < model.layers(); ++l) {
    parts.observer.seed = (seed << 16) + static_cast<std::uint64_t>(l);
    Result<Policy> policy = Policy::make(model.shape(), parts);
    if (!policy) return policy.status();
    layers.push_back(std::move(*policy));
  }
  return LayeredPolicy<Policy>::make(session, std::move(layers), request.layers_per_step, score_at_reductions);
}

}  // namespace beaconkv::lab
