// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include <algorithm>

#include "drive.hpp"
#include "methods.hpp"

namespace beaconkv::conformance {
namespace {

/// kvpress keeps `int(L * (1 - ratio))` tokens, in double and truncated.
[[nodiscard]] index_t kept_count(const Case& c, index_t tokens) {
  if (c.has_param("n_kept")) return c.integer("n_kept");
  return static_cast<index_t>(static_cast<double>(tokens) * (1.0 - c.number("compression_ratio")));
}

/// kvpress protects by a score above all others, so where it keeps fewer tokens than it protects, some of these go. The library
/// keeps them and reports how many are too many: then `kept` must lie within them.
void compare_soft_kept(Report& report, const Case& c, const KeepPlan& plan, index_t heads, const Scored& scored) {
  if (plan.shortfall() == 0) return compare_kept(report, c, kept_slots(plan, heads), heads, scored);
  const IndexArray expected = c.integers("kept", {heads, Case::any});
  report.count();
  for (index_t h = 0; h < heads; ++h) {
    if (plan.num_kept(h) - plan.shortfall() != expected.dim(1)) return report.fail("kept", "another number of tokens");
    for (index_t i = 0; i < expected.dim(1); ++i)
      if (const std::int64_t slot = expected.row(h)[i]; !std::binary_search(plan.kept(h).begin(), plan.kept(h).end(), slot))
        return report.fail("kept", "at " + shown({h, i}) + ": expected " + std::to_string(slot) + ", which is not protected");
  }
  compare_order_as_set(report, c, expected);
}

}  // namespace

void run_kvpress_snapkv(const Case& c, Report& report) {
  const WindowCase w(c);
  const index_t heads = w.shape.kv_heads;
  const index_t window = c.integer("window_size");
  const SnapKVOptions<> options{.budget = {.tokens = window + 1},  // any that is valid: how many stay is said below
                                .n_recent_queries = window,
                                .n_recent_kv = window,
                                .pool = {PoolKind::average, c.integer("kernel_size")},
                                .over_queries = Reduce::mean};
  const Range candidates{0, std::max<index_t>(0, w.tokens - window)};
  SingleStep<SnapKV<>> step(SnapKV<>::make(w.shape, options).or_throw(), CaseCache::filled(w.k, w.v));
  step.observe(w.q, w.q.dim(1));
  const Scored scored = with_mark({step.scores(candidates), candidates}, heads, w.tokens);
  const FloatArray expected = c.floats("scores", {heads, w.tokens});
  compare_part(report, "scores", expected, scored.values, candidates);
  compare_part(report, "scores (window)", expected, scored.values, {candidates.last, w.tokens});
  const Shape per_query_head{w.shape.query_heads, w.shape.query_heads, w.shape.head_dim};
  compare_scores(report, c, "scores_per_q_head",
                 {window_scores<SnapKV<>>(per_query_head, options, w, w.q.dim(1), candidates), candidates});

  step.evict(kept_count(c, w.tokens));
  compare_soft_kept(report, c, step.plan(), heads, scored);
  compare_rows(report, step.cache(), w.k, w.v);
  compare_compacted(report, c, step.cache());
}

void run_kvpress_streaming(const Case& c, Report& report) {
  const Shape shape = c.shape();
  const index_t tokens = c.integer("L");
  const FloatArray expected = c.floats("scores", {shape.kv_heads, tokens});
  FloatArray k{{shape.kv_heads, tokens, shape.head_dim},
               std::vector<float>(static_cast<std::size_t>(shape.kv_heads * tokens * shape.head_dim))};
  if (c.has("k")) k = c.floats("k", {shape.kv_heads, tokens, shape.head_dim});
  const RecentWindowOptions<> options{.budget = {.max = tokens + 1}, .n_prefix = c.integer("n_sink")};
  SingleStep<RecentWindow<>> step(RecentWindow<>::make(shape, options).or_throw(), CaseCache::filled(k, k));
  step.policy().prefill_tokens(tokens).or_throw();
  static_cast<void>(step.scores({0, tokens}));
  step.evict(kept_count(c, tokens));

  // The press's scores are 1 for what it wants to keep, sinks always among them.
  Scored mask{std::vector<float>(static_cast<std::size_t>(shape.kv_heads * tokens)), {0, tokens}};
  for (index_t h = 0; h < shape.kv_heads; ++h)
    for (const slot_t slot : step.plan().kept(h)) mask.values[static_cast<std::size_t>(h * tokens + slot)] = 1.0F;
  report.compare("scores", expected, mask.values);
  compare_soft_kept(report, c, step.plan(), shape.kv_heads, mask);
  compare_rows(report, step.cache(), k, k);
  compare_compacted(report, c, step.cache());
}

void run_kvpress_key_rerotation(const Case& c, Report& report) {
  constexpr double tolerance = 1e-4;  // the published code forms the angles in float
  const index_t heads = c.integer("kv_heads");
  const index_t dim = c.integer("head_dim");
  const FloatArray k = c.floats("k", {heads, c.integer("L"), dim});
  const IndexArray kept = c.integers("kept", {heads, Case::any});
  const FloatArray expected = c.floats("k_out", {heads, kept.dim(1), dim});
  const FloatArray inv_freq = c.floats("inv_freq", {Case::any});
  const GivenFrequencies frequencies{std::vector<double>(inv_freq.data.begin(), inv_freq.data.end()), 1.0};
  const RopeTable rope =
      RopeTable::make({.head_dim = dim, .rotary_dim = 2 * inv_freq.dim(0), .layout = RopeLayout::half, .scaling = frequencies})
          .or_throw();

  CaseCache cache = CaseCache::filled(k, k);
  const std::vector<slot_t> slots(kept.data.begin(), kept.data.end());
  std::vector<std::span<const slot_t>> sets;
  for (index_t h = 0; h < heads; ++h)
    sets.push_back(std::span(slots).subspan(static_cast<std::size_t>(h * kept.dim(1)), static_cast<std::size_t>(kept.dim(1))));
  KeepPlan plan;
  plan.assign(cache.view(), sets).or_throw();
  compact(cache.view(), plan).or_throw();

  Workspace work(realign_workspace_size(dim));
  std::vector<float> actual;
  std::vector<position_t> to(static_cast<std::size_t>(kept.dim(1)));
  for (std::size_t j = 0; j < to.size(); ++j) to[j] = static_cast<position_t>(j);
  for (index_t h = 0; h < heads; ++h) {
    const std::vector<position_t> from(kept.row(h), kept.row(h) + kept.dim(1));
    realign_keys(cache.view(), h, from, to, rope, work).or_throw();
    for (index_t slot = 0; slot < kept.dim(1); ++slot) {
      const float* const row = cache.view().key_plane().row(h, slot);
      actual.insert(actual.end(), row, row + dim);
    }
  }
  report.compare("k_out", expected, actual, tolerance);
}

}  // namespace beaconkv::conformance
