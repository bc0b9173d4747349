// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "policy_lab/sweep_rows.hpp"

namespace beaconkv::lab {
namespace {

[[nodiscard]] SweepTable policies() {
  return {"every policy",
          "64,96,128,192,256",
          {
              {"BeaconKV", "beaconkv"},
              {"BeaconKV", "beaconkv:n_beacon=28:n_recent_queries=4"},
              {"BeaconKV", "beaconkv:value_norm=1"},
              {"BeaconKV", "beaconkv_credit:value_norm=0"},
              {"BeaconKV", "beaconkv_credit"},
              {"BeaconKV", "beaconkv_credit:n_beacon=28:n_recent_queries=4"},
              {"the past's queries", "expected_attention"},
              {"recent queries", "rkv"},
              {"recent queries", "rpc"},
              {"recent queries", "snapkv"},
              {"recent queries", "adakv"},
              {"recent queries", "pyramidkv"},
              {"recent queries", "tova"},
              {"all queries", "h2o"},
              {"keys alone", "lagkv"},
              {"keys alone", "keydiff"},
              {"keys alone", "knorm"},
              {"neither", "streaming_llm"},
              {"neither", "random"},
              {"nothing goes", "full"},
          }};
}

/// `beaconkv_ablation` has the choices that the library does not offer; it begins as `beaconkv`.
[[nodiscard]] SweepTable which_queries() {
  return {"which queries look at the keys",
          "64,128",
          {
              {"published: 16 beacons, 16 recent", "beaconkv"},
              {"recent and beacon queries", "beaconkv:n_beacon=0:n_recent_queries=32"},
              {"recent and beacon queries", "beaconkv:n_beacon=0"},
              {"recent and beacon queries", "beaconkv:n_beacon=24:n_recent_queries=8"},
              {"recent and beacon queries", "beaconkv:n_beacon=28:n_recent_queries=4"},
              {"recent and beacon queries", "beaconkv:n_beacon=31:n_recent_queries=1"},
              {"sampler, at equal times", "beaconkv_ablation:sampler=random"},
              {"sampler, at equal times", "beaconkv_ablation:sampler=recent"},
              {"sampler, at equal times", "beaconkv_ablation:sampler=centroid"},
              {"sampler, at equal times", "beaconkv_ablation:sampler=medoid"},
              {"the whole history, unbounded", "beaconkv_ablation:history=whole"},
              {"the whole history, unbounded", "beaconkv_ablation:history=whole:n_beacon=24:n_recent_queries=8"},
              {"sampled after RoPE", "beaconkv_ablation:sample_space=post_rope"},
              {"beacons where they were", "beaconkv_ablation:beacon_place=own"},
              {"beacons where they were", "beaconkv_ablation:beacon_place=own_unmasked"},
              {"protected rows (8 above)", "beaconkv:n_recent_kv=16"},
              {"protected rows (8 above)", "beaconkv:n_recent_kv=32"},
          }};
}

[[nodiscard]] SweepTable how_scored() {
  return {"how they score them",
          "64,128",
          {
              {"published: max, max", "beaconkv"},
              {"over queries, over heads", "beaconkv:over_heads=mean"},
              {"over queries, over heads", "beaconkv:over_queries=mean"},
              {"over queries, over heads", "beaconkv:over_queries=mean:over_heads=mean"},
              {"softmax", "beaconkv:softmax_domain=candidates_only"},
              {"pool", "beaconkv:pool=max:kernel=7"},
              {"pool", "beaconkv:pool=average:kernel=5"},
              {"beyond the paper", "beaconkv:value_norm=1"},
              {"beyond the paper", "beaconkv:orphan_credit=0.95"},
              {"beyond the paper", "beaconkv:key_diff_share=0.3"},
              {"credit, 24 and 8", "beaconkv_credit:value_norm=0"},
              {"credit, 24 and 8", "beaconkv_credit:value_norm=0:key_diff_share=0.3"},
              {"credit and value norm", "beaconkv_credit"},
              {"credit and value norm", "beaconkv_credit:n_beacon=28:n_recent_queries=4"},
              {"credit and value norm", "beaconkv_credit:key_diff_share=0.3"},
              {"open questions", "beaconkv_ablation:n_beacon=24:n_recent_queries=8:credit_per_token=0.99"},
              {"open questions", "beaconkv_ablation:n_beacon=24:n_recent_queries=8:orphan_credit=0.95:score_at_reductions=1"},
              {"open questions", "beaconkv_ablation:n_beacon=24:n_recent_queries=8:orphan_credit=0.95:value_exponent=0.5"},
              {"open questions", "beaconkv_ablation:n_beacon=24:n_recent_queries=8:orphan_credit=0.95:value_exponent=2"},
              {"open questions",
               "beaconkv_ablation:n_beacon=24:n_recent_queries=8:orphan_credit=0.95:value_exponent=1:value_limit=2"},
              {"value norm of others", "snapkv"},
              {"value norm of others", "snapkv:value_norm=1"},
              {"value norm of others", "rpc"},
              {"value norm of others", "rpc:value_norm=1"},
              {"value norm of others", "expected_attention"},
              {"value norm of others", "expected_attention:value_norm=0"},
          }};
}

}  // namespace

Result<SweepTable> sweep_table(std::string_view name) {
  if (name == "1") return policies();
  if (name == "2") return which_queries();
  if (name == "3") return how_scored();
  return detail::invalid("--table = ", name, ": must be 1 (policies), 2 (queries), 3 (scores) or coverage");
}

}  // namespace beaconkv::lab
