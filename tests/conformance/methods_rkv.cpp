// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "drive.hpp"
#include "methods.hpp"

namespace beaconkv::conformance {
namespace {

[[nodiscard]] SparedLookAlike spared_of(const Case& c) {
  const std::string direction = c.text("retain_direction");
  if (direction == "last" || direction == "last_percent")
    return SparedLookAlike::last;  // the published code does the same for both
  if (direction == "first") return SparedLookAlike::column_zero;
  if (direction == "first_percent") return SparedLookAlike::first_percent;
  throw Unsupported(c.where("retain_direction") + ": the library has no '" + direction + "'");
}

/// Importance alone: the R-KV repository's SnapKV, and the first term of R-KV.
[[nodiscard]] RKVOptions<> importance_of(const Case& c) {
  return {.budget = {.tokens = c.integer("budget")},
          .n_recent_queries = c.integer("window_size"),
          .n_recent_kv = c.integer("window_size"),
          .lambda = 1.0F,
          .pool = {PoolKind::max, c.integer("kernel_size")}};
}

[[nodiscard]] RKVOptions<> options_of(const Case& c) {
  RKVOptions<> options = importance_of(c);
  options.lambda = static_cast<float>(c.number("mix_lambda"));
  options.redundancy.spared = spared_of(c);
  if (c.has_param("retain_ratio")) options.redundancy.ratio = c.number("retain_ratio");
  if (c.has_param("threshold")) options.redundancy.threshold = static_cast<float>(c.number("threshold"));
  return options;
}

/// The redundancy of all keys, [heads][tokens].
[[nodiscard]] std::vector<float> redundancy(const PlaneCache<float>& cache, const RedundancyOptions& options) {
  const index_t n = cache.num_tokens();
  std::vector<float> out(static_cast<std::size_t>(cache.num_kv_heads() * n));
  Workspace work(key_redundancy_workspace_size(n, cache.key_dim()));
  for (index_t h = 0; h < cache.num_kv_heads(); ++h) {
    const auto keys = [&](index_t first, index_t count, float* scratch) { return cache.keys(h, first, count, scratch); };
    const std::span<float> row = std::span(out).subspan(static_cast<std::size_t>(h * n), static_cast<std::size_t>(n));
    key_redundancy(keys, n, cache.key_dim(), options, row, work).or_throw();
  }
  return out;
}

/// Everything behind the scores: what was kept, in which published order, and the compacted memory.
void compare_eviction(Report& report, const Case& c, const WindowCase& w, SingleStep<RKV<>>& step, const Scored& scored) {
  step.evict();
  compare_kept(report, c, kept_slots(step.plan(), w.shape.kv_heads), w.shape.kv_heads, scored);
  compare_rows(report, step.cache(), w.k, w.v);
  compare_compacted(report, c, step.cache());
  if (!c.has("scores") || !c.has("kept_order") || !c.exact_indices()) return;
  detail::PublishedOrder order;
  order.follow(step.plan(), w.shape.kv_heads);
  compare_order(report, "kept_order", c.integers("kept_order", {w.shape.kv_heads, Case::any}), step.cache(), order,
                step.plan());
}

[[nodiscard]] Range candidates_of(const Case& c, const WindowCase& w) {
  return {0, std::max<index_t>(0, w.tokens - c.integer("window_size"))};
}

[[nodiscard]] SingleStep<RKV<>> step_of(const RKVOptions<>& options, const WindowCase& w) {
  SingleStep<RKV<>> step(RKV<>::make(w.shape, options).or_throw(), CaseCache::filled(w.k, w.v));
  step.observe(w.q, w.q.dim(1));
  return step;
}

void run_trace(const Case& c, Report& report, RKVOrder published) {
  const Shape shape = c.shape();
  const FloatArray q = c.floats("q", {shape.query_heads, Case::any, shape.head_dim});
  const FloatArray k = c.floats("k", {shape.kv_heads, q.dim(1), shape.head_dim});
  const index_t prompt = prompt_of(c, "prompt_len", q.dim(1));
  RKVOptions<> options = options_of(c);
  options.budget.interval = c.integer("divide_length");
  options.order = published;

  Trace<RKV<>> trace(RKV<>::make(shape, options).or_throw(), q, k, QueryForm::rotated);
  detail::PublishedOrder order;  // follows the same plans as the policy's own
  Rounds rounds(report, c, "kept_order");
  const auto evict_if_due = [&](position_t newest) {
    if (!trace.due()) return;
    trace.evict();
    if (published == RKVOrder::published) order.follow(trace.plan(), shape.kv_heads);
    if (const auto array = rounds.begin(newest)) {
      const IndexArray expected = c.integers(*array, {shape.kv_heads, Case::any});
      if (published == RKVOrder::published)
        compare_order(report, *array, expected, trace.cache(), order, trace.plan());
      else
        report.compare(*array, expected, cached_positions(trace.cache()));
    }
    compare_rows(report, trace.cache(), k, k);
  };

  trace.prefill(prompt);
  evict_if_due(prompt - 1);
  std::vector<std::int64_t> lengths{trace.cache().num_tokens()};
  for (index_t t = prompt; t < trace.tokens(); ++t) {
    trace.decode(t);
    evict_if_due(t);
    lengths.push_back(trace.cache().num_tokens());
  }
  rounds.end();
  report.compare("cache_len", c.integers("cache_len", {Case::any}), lengths);
}

}  // namespace

void run_rkv(const Case& c, Report& report) {
  const WindowCase w(c);
  const RKVOptions<> options = options_of(c);
  const Range candidates = candidates_of(c, w);
  SingleStep<RKV<>> step = step_of(options, w);
  Scored scored;
  if (c.has("scores")) {
    scored = {step.scores(candidates), candidates};
    compare_scores(report, c, "scores", scored);
    compare_scores(report, c, "redundancy", {redundancy(step.cache(), options.redundancy), {0, w.tokens}});
    RKVOptions<> importance = importance_of(c);
    compare_scores(report, c, "attn_pooled",
                   {window_scores<RKV<>>(w.shape, importance, w, w.q.dim(1), candidates), candidates});
    importance.pool = {};
    compare_scores(report, c, "attn_prepool",
                   {window_scores<RKV<>>(w.shape, importance, w, w.q.dim(1), candidates), candidates});
  }
  compare_eviction(report, c, w, step, scored);
}

void run_rkv_snapkv(const Case& c, Report& report) {
  const WindowCase w(c);
  RKVOptions<> options = importance_of(c);
  if (c.has_param("pooling")) options.pool = pool_of(c);
  const Range candidates = candidates_of(c, w);
  SingleStep<RKV<>> step = step_of(options, w);
  Scored scored;
  if (c.has("scores")) {
    scored = {step.scores(candidates), candidates};
    compare_scores(report, c, "scores", scored);
    options.pool = {};
    compare_scores(report, c, "scores_prepool",
                   {window_scores<RKV<>>(w.shape, options, w, w.q.dim(1), candidates), candidates});
  }
  compare_eviction(report, c, w, step, scored);
}

void run_rkv_streaming(const Case& c, Report& report) {
  const index_t heads = c.integer("kv_heads");
  const FloatArray k = c.floats("k", {heads, c.integer("L"), c.integer("head_dim")});
  const FloatArray v = values_or_keys(c, k);
  const index_t budget = c.integer("budget");
  const RecentWindowOptions<> options{.budget = {.max = budget, .min = budget, .counts_prefix = true},
                                      .n_prefix = c.integer("first_tokens")};
  const Shape shape{heads, heads, k.dim(2)};
  SingleStep<RecentWindow<>> step(RecentWindow<>::make(shape, options).or_throw(), CaseCache::filled(k, v));
  step.policy().prefill_tokens(k.dim(1)).or_throw();
  step.evict();
  compare_kept(report, c, kept_slots(step.plan(), heads), heads, {});
  compare_rows(report, step.cache(), k, v);
  compare_compacted(report, c, step.cache());
}

void run_rkv_trace(const Case& c, Report& report) { run_trace(c, report, RKVOrder::published); }
void run_rkv_trace_chronological(const Case& c, Report& report) { run_trace(c, report, RKVOrder::chronological); }

}  // namespace beaconkv::conformance
