// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "drive.hpp"
#include "methods.hpp"

namespace beaconkv::conformance {

/// As published: keys repeated over the group, so that every query head chooses for itself.
void run_snapkv(const Case& c, Report& report) {
  const WindowCase w(c);
  const index_t window = c.integer("window_size");
  const Shape repeated{w.shape.query_heads, w.shape.query_heads, w.shape.head_dim};
  SnapKVOptions<> options{.budget = {.tokens = c.integer("max_capacity_prompt")},
                          .n_recent_queries = window,
                          .n_recent_kv = window,
                          .pool = pool_of(c)};

  SingleStep<SnapKV<>> step(SnapKV<>::make(repeated, options).or_throw(), CaseCache::filled(w.k, w.v, w.shape.group()));
  step.observe(w.q, w.q.dim(1));
  Scored scored;
  if (c.has("scores")) {
    scored.range = {0, std::max<index_t>(0, w.tokens - window)};
    scored.values = step.scores(scored.range);
    compare_scores(report, c, "scores", scored);
    options.pool = {};
    compare_scores(report, c, "scores_prepool",
                   {window_scores<SnapKV<>>(repeated, options, w, w.q.dim(1), scored.range), scored.range});
  }
  step.evict();
  compare_kept(report, c, kept_slots(step.plan(), repeated.kv_heads), repeated.kv_heads, scored);
  compare_rows(report, step.cache(), w.k, w.v, w.shape.group());
  compare_compacted(report, c, step.cache());
}

}  // namespace beaconkv::conformance
