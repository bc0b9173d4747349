// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include <cmath>

#include "drive.hpp"
#include "methods.hpp"

namespace beaconkv::conformance {
namespace {

[[nodiscard]] HeadScope scope_of(const Case& c) {
  const std::string aggregation = c.text("aggregation");
  if (aggregation == "all") return HeadScope::layer;
  if (aggregation == "group") return HeadScope::group;
  throw Unsupported(c.where("aggregation") + ": the library has no '" + aggregation + "'");
}

[[nodiscard]] Reduce over_heads_of(const Case& c) {
  const std::string function = c.has_param("agg_func") ? c.text("agg_func") : "mean";
  if (function == "mean") return Reduce::mean;
  if (function == "max") return Reduce::max;
  throw Unsupported(c.where("agg_func") + ": the library has no '" + function + "'");
}

[[nodiscard]] index_t ratio_of(const Case& c) {
  if (const double ratio = c.number("c"); ratio != std::floor(ratio))
    throw Unsupported(c.where("c") + " = " + std::to_string(ratio) + ": the library's ratio is an integer");
  return c.integer("c");
}

[[nodiscard]] RPCOptions<> options_of(const Case& c) {
  return {.n_recent_queries = c.integer("R"),
          .n_recent_kv = c.integer("R"),
          .head_scope = scope_of(c),
          .over_heads = over_heads_of(c),
          .pool = pool_of(c)};
}

/// `selector_rows_and_last_duplicated`: a pair for each eviction. One query alone cannot count twice.
[[nodiscard]] bool newest_query_twice(const Case& c) {
  const std::string name = "selector_rows_and_last_duplicated";
  if (!c.has_param(name)) return true;
  index_t twice = 0;
  index_t once = 0;
  for (const nlohmann::json& pair : c.param(name)) {
    if (!pair.is_array() || pair.size() != 2 || !pair[0].is_number_integer() || !pair[1].is_boolean())
      throw InputError(c.where(name) + " is no list of [rows, true or false]");
    if (pair[0].get<index_t>() > 1) ++(pair[1].get<bool>() ? twice : once);
  }
  if (twice > 0 && once > 0) throw Unsupported(c.where(name) + ": the library doubles the newest query always or never");
  return once == 0;
}

/// An array [1 or Hk][N]: one row stands for all heads, which share their scores.
void compare_shared_scores(Report& report, const Case& c, const std::string& array, index_t heads, const Scored& scored) {
  if (!c.has(array)) return;
  FloatArray expected = c.floats(array, {scope_of(c) == HeadScope::layer ? 1 : heads, scored.range.size()});
  const std::vector<float> row = expected.data;
  for (; expected.shape[0] < heads; ++expected.shape[0]) expected.data.insert(expected.data.end(), row.begin(), row.end());
  report.compare(array, expected, scored.values);
}

}  // namespace

void run_rpc(const Case& c, Report& report) {
  const WindowCase w(c);
  RPCOptions<> options = options_of(c);
  options.n_prefix = c.integer("prompt_len");
  options.newest_query_twice = c.flag("last_query_duplicated", false) && w.q.dim(1) > 1;
  options.n_recent_queries = w.q.dim(1);
  const index_t queries = w.q.dim(1) - (options.newest_query_twice ? 1 : 0);
  const Range candidates{*options.n_prefix, w.tokens - options.n_recent_kv};
  if (candidates.first < 0 || candidates.size() < 0)
    throw InputError(c.where("prompt_len") + " and 'R' leave no candidates of 'L'");

  SingleStep<RPC<>> step(RPC<>::make(w.shape, options).or_throw(), CaseCache::filled(w.k, w.v));
  step.observe(w.q, queries);
  const Scored scored{step.scores(candidates), candidates};
  compare_shared_scores(report, c, "scores", w.shape.kv_heads, scored);
  options.pool = {};
  compare_shared_scores(report, c, "scores_prepool", w.shape.kv_heads,
                        {window_scores<RPC<>>(w.shape, options, w, queries, candidates), candidates});

  step.evict(*options.n_prefix + c.integer("n_selected") + options.n_recent_kv);
  compare_kept(report, c, kept_slots(step.plan(), w.shape.kv_heads), w.shape.kv_heads, scored);
  compare_rows(report, step.cache(), w.k, w.v);
  compare_compacted(report, c, step.cache());
}

void run_rpc_trace(const Case& c, Report& report) {
  const Shape shape = c.shape();
  const FloatArray q = c.floats("q", {shape.query_heads, Case::any, shape.head_dim});
  const FloatArray k = c.floats("k", {shape.kv_heads, q.dim(1), shape.head_dim});
  const index_t prompt = prompt_of(c, "prompt_len", q.dim(1));
  RPCOptions<> options = options_of(c);
  options.budget = {.period = c.integer("P"), .ratio = ratio_of(c)};
  options.newest_query_twice = newest_query_twice(c);

  Trace<RPC<>> trace(RPC<>::make(shape, options).or_throw(), q, k, QueryForm::rotated);
  trace.prefill(prompt);
  std::vector<std::int64_t> lengths{trace.cache().num_tokens()};
  Rounds rounds(report, c, "kept");
  for (index_t t = prompt; t < trace.tokens(); ++t) {
    trace.decode(t);
    if (trace.due()) {
      trace.evict();
      if (const auto array = rounds.begin(t))
        report.compare(*array, c.integers(*array, {shape.kv_heads, Case::any}), cached_positions(trace.cache()));
      compare_rows(report, trace.cache(), k, k);
    }
    lengths.push_back(trace.cache().num_tokens());
  }
  rounds.end();
  report.compare("cache_len", c.integers("cache_len", {Case::any}), lengths);
}

}  // namespace beaconkv::conformance
