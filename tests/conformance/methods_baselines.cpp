// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include <cmath>

#include "drive.hpp"
#include "methods.hpp"

namespace beaconkv::conformance {
namespace {

/// Any that is valid: how many stay is what a case says.
[[nodiscard]] FixedBudget any_budget(const Case& c) { return {.max = c.integer("L") + 1}; }

/// What evicting to `n_kept` tokens a head keeps, and the rows of the cache afterwards.
template <class Policy>
void compare_eviction(Report& report, const Case& c, SingleStep<Policy>& step, const FloatArray& k, const FloatArray& v,
                      const Scored& scored) {
  step.evict(c.integer("n_kept"));
  const index_t heads = step.cache().num_kv_heads();
  compare_kept(report, c, kept_slots(step.plan(), heads), heads, scored);
  compare_rows(report, step.cache(), k, v);
  compare_compacted(report, c, step.cache());
}

template <class ScorerT>
void run_keys_alone(const Case& c, Report& report) {
  const Shape shape = c.shape();
  const index_t tokens = c.integer("L");
  const FloatArray k = c.floats("k", {shape.kv_heads, tokens, shape.head_dim});
  using Policy = KeyPolicy<ScorerT>;
  SingleStep<Policy> step(Policy::make(shape, {.budget = any_budget(c)}).or_throw(), CaseCache::filled(k, k));
  step.policy().prefill_tokens(tokens).or_throw();
  const Scored scored{step.scores({0, tokens}), {0, tokens}};
  compare_scores(report, c, "scores", scored);
  compare_eviction(report, c, step, k, k, scored);
}

}  // namespace

void run_kvpress_knorm(const Case& c, Report& report) { run_keys_alone<KnormScorer>(c, report); }

void run_kvpress_keydiff(const Case& c, Report& report) { run_keys_alone<KeyDiffScorer>(c, report); }

void run_kvpress_lagkv(const Case& c, Report& report) {
  const Shape shape{c.integer("kv_heads"), c.integer("kv_heads"), c.integer("head_dim")};
  const index_t tokens = c.integer("L");
  const index_t sink = c.integer("n_sink");
  const FloatArray k = c.floats("k", {shape.kv_heads, tokens, shape.head_dim});
  const FloatArray v = c.floats("v", {shape.kv_heads, tokens, Case::any});
  const LagKV<>::Options options{.budget = any_budget(c),
                                 .n_prefix = sink,
                                 .scorer = {.lag = c.integer("lag_size"), .cross_scoring = c.flag("cross_scoring", false)}};
  SingleStep<LagKV<>> step(LagKV<>::make(shape, options).or_throw(), CaseCache::filled(k, v));
  step.policy().prefill_tokens(tokens).or_throw();
  const Range candidates{sink, tokens};
  const std::vector<float> found = step.scores(candidates);
  Scored scored{std::vector<float>(static_cast<std::size_t>(shape.kv_heads * tokens), 1.0F), {0, tokens}};  // sinks: 1
  for (index_t h = 0; h < shape.kv_heads; ++h)
    std::copy_n(found.begin() + h * candidates.size(), candidates.size(), scored.values.begin() + h * tokens + sink);
  compare_scores(report, c, "scores", scored);
}

void run_kvpress_tova(const Case& c, Report& report) {
  const WindowCase w(c);
  SingleStep<TOVA<>> step(TOVA<>::make(w.shape, {.budget = any_budget(c)}).or_throw(), CaseCache::filled(w.k, w.v));
  step.observe(w.q, 1);
  const Range candidates{0, w.tokens - 1};
  const Scored scored = with_mark({step.scores(candidates), candidates}, w.shape.kv_heads, w.tokens);
  const FloatArray expected = c.floats("scores", {w.shape.kv_heads, w.tokens});
  compare_part(report, "scores", expected, scored.values, candidates);
  compare_part(report, "scores (newest)", expected, scored.values, {w.tokens - 1, w.tokens});
  compare_eviction(report, c, step, w.k, w.v, scored);
}

/// The case has attention weights [Hq,L,L] and neither queries nor keys. Keys that are unit vectors, one dimension a token, and
/// queries that are logarithms of weights have just these weights.
void run_kvpress_observed_attention(const Case& c, Report& report) {
  const index_t tokens = c.integer("L");
  const Shape shape{c.integer("q_heads"), c.integer("kv_heads"), tokens};
  const FloatArray weights = c.floats("attentions", {shape.query_heads, tokens, tokens});
  FloatArray k{{shape.kv_heads, tokens, tokens},
               std::vector<float>(static_cast<std::size_t>(shape.kv_heads * tokens * tokens))};
  for (index_t h = 0; h < shape.kv_heads; ++h)
    for (index_t j = 0; j < tokens; ++j) k.data[static_cast<std::size_t>((h * tokens + j) * tokens + j)] = 1.0F;
  FloatArray q = weights;
  for (float& x : q.data) x = std::max(std::log(x), -80.0F);
  const H2O<>::Options options{
      .budget = any_budget(c), .n_recent_kv = 0, .over_queries = Reduce::mean, .max_pending_queries = tokens, .scale = 1.0F};
  SingleStep<H2O<>> step(H2O<>::make(shape, options).or_throw(), CaseCache::filled(k, k));
  step.observe(q, tokens);
  const Scored scored{step.scores({0, tokens}), {0, tokens}};
  compare_scores(report, c, "scores", scored);
  compare_eviction(report, c, step, k, k, scored);
}

void run_kvpress_expected_attention(const Case& c, Report& report) {
  const Shape shape = c.shape();
  const index_t tokens = c.integer("L");
  const index_t dim = shape.head_dim;
  const index_t sink = c.integer("n_sink");
  const FloatArray q = c.floats("q_prerope", {shape.query_heads, tokens, dim});
  const FloatArray k = c.floats("k", {shape.kv_heads, tokens, dim});
  const FloatArray v = c.floats("v", {shape.kv_heads, tokens, Case::any});
  const ExpectedAttentionOptions<> options{.budget = any_budget(c),
                                           .n_prefix = sink,
                                           .n_sink = sink,
                                           .n_future_positions = c.integer("n_future_positions"),
                                           .use_covariance = c.flag("use_covariance", true),
                                           .value_norm = c.flag("use_vnorm", true),
                                           .epsilon = static_cast<float>(c.number("epsilon"))};
  SingleStep<ExpectedAttention<>> step(ExpectedAttention<>::make(shape, options, rope_of(c, dim)).or_throw(),
                                       CaseCache::filled(k, v));
  step.observe_pre_rope(q);

  const QueryMoments& moments = step.policy().observer();
  const index_t rows = moments.rows();
  std::vector<float> seen(static_cast<std::size_t>(shape.query_heads * rows * dim));
  std::vector<position_t> positions(static_cast<std::size_t>(shape.query_heads * rows));
  Workspace work(moments.workspace_size());
  moments.write_rows(step.policy().rope(), tokens - 1, {0, shape.query_heads}, seen.data(), positions.data(), work).or_throw();
  std::vector<float> mean;
  std::vector<float> covariance;
  for (index_t h = 0; h < shape.query_heads; ++h) {
    const float* const row = seen.data() + h * rows * dim;
    mean.insert(mean.end(), row, row + dim);
    for (index_t i = 0; i < dim && options.use_covariance; ++i)
      for (index_t j = 0; j < dim; ++j) {
        double sum = 0;
        for (index_t r = 1; r < rows; ++r) sum += static_cast<double>(row[r * dim + i]) * static_cast<double>(row[r * dim + j]);
        covariance.push_back(static_cast<float>(sum));
      }
  }
  report.compare("mean_query", c.floats("mean_query", {shape.query_heads, dim}), mean);
  if (c.has("cov_query")) report.compare("cov_query", c.floats("cov_query", {shape.query_heads, dim, dim}), covariance);

  const Range candidates{sink, tokens};
  const Scored scored = with_mark({step.scores(candidates), candidates}, shape.kv_heads, tokens);
  const FloatArray expected = c.floats("scores", {shape.kv_heads, tokens});
  compare_part(report, "scores", expected, scored.values, candidates);
  compare_part(report, "scores (sinks)", expected, scored.values, {0, sink});
  compare_eviction(report, c, step, k, v, scored);
}

void run_kvpress_adakv(const Case& c, Report& report) {
  const index_t heads = c.integer("kv_heads");
  const index_t tokens = c.integer("L");
  FloatArray scores = c.floats("scores", {heads, tokens});
  OwningCache<float, float, Granularity::per_head_ragged> cache(Shape{heads, heads, 1}, tokens);
  const std::vector<float> row(static_cast<std::size_t>(heads));
  for (position_t t = 0; t < tokens; ++t) cache.append(row, row, t).or_throw();
  using Policy = AdaKV<RecentWindow<>>;  // any: the scores are the case's
  const Shape shape{heads, heads, 1};
  const Policy policy = Policy::make(RecentWindow<>::make(shape, {.budget = any_budget(c), .n_prefix = 0}).or_throw(),
                                     {.safeguard = c.number("alpha_safeguard")})
                            .or_throw();
  Workspace work(policy.workspace_size(tokens));
  policy.select(cache.view(), {scores.data.data(), heads, tokens}, work, work.plan(), c.integer("n_kept_mean")).or_throw();
  std::vector<std::int64_t> mask(static_cast<std::size_t>(heads * tokens));
  for (index_t h = 0; h < heads; ++h)
    for (const slot_t slot : work.plan().kept(h)) mask[static_cast<std::size_t>(h * tokens + slot)] = 1;
  report.compare("kept_mask", c.integers("kept_mask", {heads, tokens}), mask);
}

void run_kvpress_pyramidkv(const Case& c, Report& report) {
  const nlohmann::json& rows = c.param("rows");
  if (!rows.is_array()) throw InputError(c.where("rows") + " is no list");
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::string name = "budgets (row " + std::to_string(i) + ")";
    try {
      const auto expected = rows[i].at("budgets").get<std::vector<std::int64_t>>();
      const auto tokens = rows[i].at("q_len").get<index_t>();
      std::vector<index_t> budgets(rows[i].at("num_layers").get<std::size_t>());
      pyramid_budgets_of_prompt(static_cast<double>(tokens) * (1 - rows[i].at("compression_ratio").get<double>()), tokens,
                                rows[i].at("window_size").get<index_t>(), rows[i].at("beta").get<index_t>(), budgets)
          .or_throw();
      report.compare(name, IndexArray{{static_cast<index_t>(expected.size())}, expected},
                     std::vector<std::int64_t>(budgets.begin(), budgets.end()));
    } catch (const nlohmann::json::exception& error) {
      throw InputError(c.where("rows") + ": " + error.what());
    }
  }
}

}  // namespace beaconkv::conformance
