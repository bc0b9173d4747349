// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// `beaconkv_ablation`: BeaconKV with every choice of its paper, and some of ours, as a setting.

#include "policy_lab/policies.hpp"

namespace beaconkv::lab {

/// Without settings of its own it keeps what `beaconkv` keeps. Those of `beaconkv`, and:
/// * `sampler` = fps, random, recent, centroid or medoid; `sample_space` = pre_rope or post_rope; `history` = bounded or whole;
/// * `beacon_place` = now, own or own_unmasked;
/// * `value_exponent`, `value_limit` (`AblationScorer`);
/// * `credit_per_token`: orphan credit as what is left of it at each token between two evictions;
/// * `score_at_reductions` = 1: keys remember scores of every reduction of the pool, too.
[[nodiscard]] Result<std::unique_ptr<ModelPolicy>> make_beaconkv_ablation(const PolicyRequest& request, Settings& settings,
                                                                          engine::Session& session);

}  // namespace beaconkv::lab
