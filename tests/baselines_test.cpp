// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

// TOVA, H2O and ExpectedAttention beside their formulas in double, and what is to hold for every baseline.

#include <cmath>
#include <string_view>
#include <vector>

#include "beaconkv/policy/expected_attention.hpp"
#include "beaconkv/policy/h2o.hpp"
#include "beaconkv/policy/key_scores.hpp"
#include "beaconkv/policy/tova.hpp"
#include "support/catch.hpp"
#include "support/instruction_sets.hpp"
#include "support/policies.hpp"
#include "support/workers.hpp"

namespace {

using namespace beaconkv;
using namespace beaconkv::test;
using reference::Matrix;
using reference::Row;

constexpr FixedBudget small_fixed{.max = small_budget + 8, .min = small_budget, .counts_prefix = true};

/// Calls `f(name, policy)` with every baseline: prefix 2, window 4, budget `small_budget`.
template <class F>
void for_each_baseline(F&& f) {
  f("TOVA", TOVA<>(small_shape, {.budget = small_fixed, .n_recent_kv = 4, .n_prefix = 2}, small_rope()));
  H2OOptions<> h2o{.budget = small_fixed, .n_recent_kv = 4, .n_prefix = 2, .max_pending_queries = 80, .capacity = 80};
  f("H2O", H2O<>(small_shape, h2o, small_rope()));
  h2o.over_queries = Reduce::mean;
  f("H2O, mean", H2O<>(small_shape, h2o, small_rope()));
  f("Knorm", Knorm<>(small_shape, {.budget = small_fixed, .n_recent_kv = 4, .n_prefix = 2}));
  f("KeyDiff", KeyDiff<>(small_shape, {.budget = small_fixed, .n_recent_kv = 4, .n_prefix = 2}));
  f("LagKV", LagKV<>(small_shape, {.budget = small_fixed, .n_recent_kv = 4, .n_prefix = 2, .scorer = {.lag = 5}}));
  f("ExpectedAttention",
    ExpectedAttention<>(small_shape,
                        {.budget = small_fixed, .n_recent_kv = 4, .n_prefix = 2, .n_sink = 2, .n_future_positions = 16},
                        small_rope()));
}

/// Scores of all heads, [head][slot].
template <class PolicyT, class View>
std::vector<float> scores_of(const PolicyT& policy, const View& view, Workspace& work, index_t* non_finite = nullptr) {
  const index_t n = view.num_tokens();
  std::vector<float> flat(at(view.num_kv_heads() * n), nan_float());
  const ScoreReport report = require_value(policy.score(view, {flat.data(), view.num_kv_heads(), n}, work));
  if (non_finite != nullptr) *non_finite = report.num_non_finite;
  return flat;
}

/// Attention weights of one query over the keys.
Row attention(const Row& query, const Matrix& keys, double scale) {
  Row z;
  for (const Row& k : keys)
    z.push_back(reference::finite(k) && reference::finite(query) ? reference::dot(query, k) * scale : -reference::infinity);
  return reference::softmax(z);
}

template <class CacheT>
Matrix keys_of(const CacheT& cache, index_t head) {
  Matrix out;
  for (index_t j = 0; j < cache.view().num_tokens(); ++j) out.push_back(cache.key(head, j));
  return out;
}

template <class CacheT>
std::vector<position_t> positions_of(const CacheT& cache, index_t head) {
  std::vector<position_t> out;
  for (index_t j = 0; j < cache.view().num_tokens(); ++j) out.push_back(cache.view().position(head, j));
  return out;
}

/// H2O step by step: every query, when it comes, adds its attention to what is cached.
struct SlowH2O {
  Shape shape;
  Reduce how;
  std::vector<Row> gathered;  // [KV head][slot], mean over the group

  SlowH2O(const Shape& s, Reduce over_queries) : shape(s), how(over_queries), gathered(at(s.kv_heads)) {}

  /// After the token's key is cached.
  template <class CacheT>
  void see(const CacheT& cache, const Token& token) {
    for (index_t h = 0; h < shape.kv_heads; ++h) {
      const Matrix keys = keys_of(cache, h);
      gathered[at(h)].resize(keys.size(), 0.0);
      for (index_t g = 0; g < shape.group(); ++g) {
        const Row query = reference::row_of(token.rotated.data() + (h * shape.group() + g) * shape.head_dim, shape.head_dim);
        const Row w = attention(query, keys, 1 / std::sqrt(static_cast<double>(shape.head_dim)));
        for (std::size_t j = 0; j < w.size(); ++j) gathered[at(h)][j] += w[j] / static_cast<double>(shape.group());
      }
    }
  }
  template <class CacheT>
  [[nodiscard]] Row scores(const CacheT& cache, index_t head, position_t now) const {
    Row out = gathered[at(head)];
    if (how == Reduce::mean)
      for (std::size_t j = 0; j < out.size(); ++j)
        out[j] /= static_cast<double>(now - cache.view().position(head, static_cast<index_t>(j)) + 1);
    return out;
  }
  void keep(index_t head, std::span<const slot_t> slots) {
    Row left;
    for (const slot_t s : slots) left.push_back(gathered[at(head)][at(s)]);
    gathered[at(head)] = left;
  }
};

/// A run of H2O beside the slow one. Returns the number of evictions.
template <class CacheT>
index_t run_h2o(Random& random, const Shape& shape, Reduce how, index_t prompt, bool rotated, Layout layout) {
  const RopeCase rope = make_rope(shape.head_dim);
  const bool one_set = CacheT::View::granularity == Granularity::per_layer;
  H2O<> policy(shape,
               {.budget = {.max = 30, .min = 22, .counts_prefix = true},
                .n_recent_kv = 3,
                .n_prefix = 1,
                .over_queries = how,
                .max_pending_queries = 120},
               RopeTable(rope.options));
  Stream stream(random, shape, rope);
  CacheT cache(shape, 140, layout);
  Workspace work(policy.workspace_size(140));
  SlowH2O slow(shape, how);
  index_t evictions = 0;
  std::vector<float> queries;
  for (position_t p = 0; p < 130; ++p) {
    const Token token = stream.next(p);
    cache.append(token);
    slow.see(cache, token);
    const std::vector<float>& given = rotated ? token.rotated : token.queries;
    if (p < prompt) {
      queries.insert(queries.end(), given.begin(), given.end());
      if (p + 1 < prompt) continue;
      const QueryView view = QueryView::token_major(queries.data(), prompt, shape.query_heads, shape.head_dim);
      require_ok(rotated ? policy.prefill_rotated(view, work) : policy.prefill(view, work));
    } else {
      require_ok(rotated ? policy.observe_rotated(given, p) : policy.observe(given, p));
    }
    if (!policy.due(cache.view())) continue;
    ++evictions;
    const index_t n = cache.view().num_tokens();
    const std::vector<float> found = scores_of(policy, cache.view(), work);
    for (index_t h = 0; h < shape.kv_heads; ++h) {
      Row want = slow.scores(cache, h, p);
      CAPTURE(p, h, evictions);
      if (one_set && evictions > 1) {  // the sums that were carried are those of all heads
        Row mean(want.size(), 0.0);
        std::vector<float> found_mean(want.size());
        for (index_t i = 0; i < shape.kv_heads; ++i)
          for (std::size_t j = 0; j < want.size(); ++j) {
            mean[j] += slow.scores(cache, i, p)[j] / static_cast<double>(shape.kv_heads);
            found_mean[j] += found[at(i * n) + j] / static_cast<float>(shape.kv_heads);
          }
        REQUIRE(largest_difference(found_mean, mean) <= 2e-5 * largest_size(mean));
        continue;
      }
      REQUIRE(largest_difference(std::span(found).subspan(at(h * n), at(n)), want) <= 2e-5 * largest_size(want));
    }
    require_value(evict(policy, cache.view(), work));
    for (index_t h = 0; h < shape.kv_heads; ++h) slow.keep(h, work.plan().kept(h));
  }
  return evictions;
}

/// ExpectedAttention by its formula, with whole matrices.
struct Expectation {
  ExpectedAttentionOptions<> options;
  RopeCase rope;

  /// `queries` [token][dim] of one query head, pre-RoPE, from position 0 on.
  [[nodiscard]] Row logits(const Matrix& queries, const Matrix& keys, position_t now) const {
    const std::size_t dim = keys.front().size();
    Matrix seen;
    for (std::size_t t = at(options.n_sink); t < queries.size(); ++t)
      if (reference::finite(queries[t])) seen.push_back(queries[t]);
    Row mean(dim, 0.0);
    for (const Row& q : seen)
      for (std::size_t d = 0; d < dim; ++d) mean[d] += q[d] / static_cast<double>(seen.size());
    Matrix covariance(dim, Row(dim, 0.0));
    for (const Row& q : seen)
      for (std::size_t i = 0; i < dim; ++i)
        for (std::size_t j = 0; j < dim; ++j)
          covariance[i][j] += (q[i] - mean[i]) * (q[j] - mean[j]) / static_cast<double>(seen.size());
    const auto turned = [&](const Row& x) {  // by the mean rotation
      Row out(dim, 0.0);
      for (index_t i = 1; i <= options.n_future_positions; ++i) {
        const Row one = rope.reference.at(x, now + i);
        for (std::size_t d = 0; d < dim; ++d) out[d] += one[d] / static_cast<double>(options.n_future_positions);
      }
      return out;
    };
    mean = turned(mean);
    Matrix half;  // C R^T
    for (const Row& row : covariance) half.push_back(turned(row));
    Matrix both(dim, Row(dim));
    for (std::size_t j = 0; j < dim; ++j) {
      Row column;
      for (std::size_t i = 0; i < dim; ++i) column.push_back(half[i][j]);
      column = turned(column);
      for (std::size_t i = 0; i < dim; ++i) both[i][j] = column[i];
    }
    const double scale = options.scale ? static_cast<double>(*options.scale) : 1 / std::sqrt(static_cast<double>(dim));
    Row z;
    for (const Row& k : keys) {
      if (!reference::finite(k)) {
        z.push_back(-reference::infinity);
        continue;
      }
      double variance = 0;
      for (std::size_t i = 0; i < dim && options.use_covariance; ++i)
        for (std::size_t j = 0; j < dim; ++j) variance += k[i] * both[i][j] * k[j];
      z.push_back(reference::dot(mean, k) * scale + variance * scale * scale / 2);
    }
    return z;
  }
};

struct ExpectedRun {
  Shape shape{4, 2, 16};
  RopeCase rope = make_rope(16);
  ExpectedAttentionOptions<> options{.budget = {.max = 200}, .n_future_positions = 20};
  index_t tokens = 60;
  index_t prompt = 20;
  bool rotated = false;
  double poison = 0;
  float size = 1;  ///< of queries
};

template <class CacheT>
void compare_expected(Random& random, const ExpectedRun& run) {
  const Shape& shape = run.shape;
  const index_t dim = shape.head_dim;
  ExpectedAttention<> policy(shape, run.options, RopeTable(run.rope.options));
  Stream stream(random, shape, run.rope);
  CacheT cache(shape, run.tokens);
  Workspace work(policy.workspace_size(run.tokens));
  std::vector<Matrix> history(at(shape.query_heads));
  std::vector<float> queries;
  for (position_t p = 0; p < run.tokens; ++p) {
    Token token = stream.next(p);
    for (float& x : token.queries) x *= run.size;
    for (float& x : token.rotated) x *= run.size;
    if (random.unit() < run.poison) token.keys[at(random.integer(0, shape.kv_heads * dim - 1))] = nan_float();
    if (random.unit() < run.poison) token.values[at(random.integer(0, shape.kv_heads * dim - 1))] = infinity_float();
    if (random.unit() < run.poison) {
      const index_t bad = random.integer(0, shape.query_heads - 1) * dim;
      std::fill_n(token.queries.begin() + bad, dim, nan_float());
      std::fill_n(token.rotated.begin() + bad, dim, nan_float());
    }
    cache.append(token);
    for (index_t h = 0; h < shape.query_heads; ++h)
      history[at(h)].push_back(reference::row_of(token.queries.data() + h * dim, dim));
    const std::vector<float>& given = run.rotated ? token.rotated : token.queries;
    if (p >= run.prompt) {
      require_ok(run.rotated ? policy.observe_rotated(given, p) : policy.observe(given, p));
      continue;
    }
    queries.insert(queries.end(), given.begin(), given.end());
    if (p + 1 < run.prompt) continue;
    const QueryView view = QueryView::token_major(queries.data(), run.prompt, shape.query_heads, dim);
    require_ok(run.rotated ? policy.prefill_rotated(view, work) : policy.prefill(view, work));
  }
  const index_t n = run.tokens;
  const Expectation expectation{run.options, run.rope};
  const index_t sink = std::min(run.options.n_sink, policy.prefix());
  std::vector<float> wide;
  for (const InstructionSet set : supported_sets()) {
    const ForcedSet forced(set);
    index_t non_finite = 0;
    const std::vector<float> found = scores_of(policy, cache.view(), work, &non_finite);
    index_t bad = 0;
    for (index_t h = 0; h < shape.kv_heads; ++h) {
      const Matrix all = keys_of(cache, h);
      const Matrix keys(all.begin() + sink, all.end());
      Row want(keys.size(), 0.0);
      for (index_t g = 0; g < shape.group(); ++g) {
        const Row w = reference::softmax(expectation.logits(history[at(h * shape.group() + g)], keys, n - 1));
        for (std::size_t j = 0; j < w.size(); ++j) want[j] += w[j] / static_cast<double>(shape.group());
      }
      for (std::size_t j = 0; j < keys.size(); ++j) {
        const Row value = cache.value(h, sink + static_cast<index_t>(j));
        const bool bad_value = run.options.value_norm && !reference::finite(value);
        if (run.options.value_norm && !bad_value)
          want[j] = (want[j] + static_cast<double>(run.options.epsilon)) * std::sqrt(reference::dot(value, value));
        if (!reference::finite(keys[j]) || bad_value) want[j] = reference::nan;
        bad += (reference::finite(keys[j]) ? 0 : 1) + (bad_value ? 1 : 0);
      }
      const Row candidates(want.begin() + (policy.prefix() - sink), want.end());
      REQUIRE(largest_difference(std::span(found).subspan(at(h * n + policy.prefix()), at(n - policy.prefix())), candidates) <=
              5e-5 * largest_size(candidates));
    }
    REQUIRE(non_finite == bad);
    if (set == InstructionSet::baseline) continue;
    if (!wide.empty()) REQUIRE(same_bits(wide, found));
    wide = found;
  }
}

}  // namespace

TEST_CASE("TOVA: the newest query's attention to all keys, mean over all heads, one choice for all", "[tova]") {
  Random random;
  CAPTURE(random.seed());
  for (const index_t n : {2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 97, 130})
    for (const index_t group : {1, 2, 7}) {
      const Shape shape{.query_heads = 2 * group, .kv_heads = 2, .head_dim = 8 + 8 * random.integer(0, 3)};
      CAPTURE(n, group, shape.head_dim);
      const RopeCase rope = make_rope(shape.head_dim);
      TOVA<> policy(shape, {.budget = {.max = 200}}, RopeTable(rope.options));
      Stream stream(random, shape, rope);
      TestCache<float16> cache(shape, n, all_layouts[at(random.integer(0, 6))]);
      Workspace work(policy.workspace_size(n));
      Token newest;
      for (position_t p = 0; p < n; ++p) {
        newest = stream.next(p);
        feed(policy, cache, newest);
      }
      const std::vector<float> found = scores_of(policy, cache.view(), work);
      Row want(at(n), 0.0);
      for (index_t q = 0; q < shape.query_heads; ++q) {
        const Row query = reference::row_of(newest.rotated.data() + q * shape.head_dim, shape.head_dim);
        const Row w = attention(query, keys_of(cache, q / group), 1 / std::sqrt(static_cast<double>(shape.head_dim)));
        for (std::size_t j = 0; j < w.size(); ++j) want[j] += w[j] / static_cast<double>(shape.query_heads);
      }
      want.pop_back();  // protected
      for (index_t h = 0; h < 2; ++h)
        REQUIRE(largest_difference(std::span(found).subspan(at(h * n), at(n - 1)), want) <= 2e-5 * largest_size(want));
    }
  const TOVAOptions<> o;
  REQUIRE(o.n_recent_kv == 1);
  REQUIRE(o.head_scope == HeadScope::layer);
}

TEST_CASE("H2O equals the sums of every token's own attention, whenever it evicts", "[h2o]") {
  Random random;
  CAPTURE(random.seed());
  for (const Reduce how : {Reduce::sum, Reduce::mean})
    for (const index_t prompt : {0, 1, 20, 60}) {
      CAPTURE(static_cast<int>(how), prompt);
      const index_t evictions = prompt > 30 ? 1 + (130 - 60) / 8 : (130 - 22) / 8;
      REQUIRE(run_h2o<TestCache<>>(random, {4, 2, 16}, how, prompt, false, Layout::head_major) == evictions);
      REQUIRE(run_h2o<TestCache<float16, bfloat16>>(random, {7, 1, 24}, how, prompt, true, Layout::paged) == evictions);
      REQUIRE(run_h2o<TestCache<float, float, Granularity::per_layer>>(random, {3, 3, 8}, how, prompt, false,
                                                                       Layout::token_major) == evictions);
    }
}

TEST_CASE("H2O with max keeps the largest weight that a key ever got", "[h2o]") {
  // One dimension of interest: a query of size x gives the key of interest the weight e^x / (e^x + others).
  const Shape shape{1, 1, 2};
  H2O<> policy(
      shape,
      {.budget = {.max = 5, .min = 4, .counts_prefix = true}, .n_recent_kv = 1, .over_queries = Reduce::max, .scale = 1.0F});
  TestCache<> cache(shape, 8);
  Workspace work(policy.workspace_size(8));
  for (position_t p = 0; p < 7; ++p) {
    cache.append({p, {}, {}, {p == 1 ? 1.0F : 0.0F, 0}, {0, 0}});
    require_ok(policy.observe_rotated(std::vector<float>{p == 2 ? 8.0F : -8.0F, 0}, p));
    if (policy.due(cache.view())) require_value(evict(policy, cache.view(), work));
  }
  // Position 1 was adored once, by the query at 2, and stays. Position 0 had all of the first query's attention.
  REQUIRE(cache.view().position(0, 0) == 0);
  REQUIRE(cache.view().position(0, 1) == 1);
  const std::vector<float> scores = scores_of(policy, cache.view(), work);
  REQUIRE(scores[0] == 1.0F);
  REQUIRE_THAT(scores[1], Catch::Matchers::WithinAbs(std::exp(8.0) / (std::exp(8.0) + 2), 1e-5));
}

TEST_CASE("[E9] accumulated scores do not starve new tokens: the window is kept, and what leaves it brings its sums along",
          "[E9]") {
  for (const Reduce how : {Reduce::sum, Reduce::mean}) {
    H2O<> policy(small_shape,
                 {.budget = {.max = 7, .min = 6, .counts_prefix = true}, .n_recent_kv = 2, .over_queries = how, .capacity = 6});
    TestCache<> cache(small_shape, 16);
    Workspace work(policy.workspace_size(16));
    for (position_t p = 0; p < 20; ++p) {  // equal attention: all queries and keys are zero
      cache.append({p, {}, {}, std::vector<float>(32), std::vector<float>(32)});
      require_ok(policy.observe_rotated(std::vector<float>(64), p));
      if (policy.due(cache.view())) require_value(evict(policy, cache.view(), work));
      const index_t n = cache.view().num_tokens();
      REQUIRE(cache.view().position(0, n - 1) == p);
      if (p > 0) REQUIRE(cache.view().position(0, n - 2) == p - 1);
      REQUIRE(n <= 6);
    }
    const std::vector<position_t> left = positions_of(cache, 0);
    REQUIRE(left.back() == 19);
    REQUIRE(std::count_if(left.begin(), left.end(), [](position_t p) { return p > 10; }) >= 2);
    // Every slot's score counts from its token's first step on, the window's too.
    const std::vector<float> scores = scores_of(policy, cache.view(), work);
    for (const float score : scores) REQUIRE(score > 0.1F);
  }
}

TEST_CASE("H2O counts the newest queries where more came than it remembers", "[h2o]") {
  Random random;
  CAPTURE(random.seed());
  const Shape shape{2, 1, 8};
  const RopeCase rope = make_rope(8);
  H2O<> few(shape, {.budget = {.max = 40}, .max_pending_queries = 5}, RopeTable(rope.options));
  H2O<> all(shape, {.budget = {.max = 40}, .max_pending_queries = 100}, RopeTable(rope.options));
  Stream stream(random, shape, rope);
  TestCache<> cache(shape, 20);
  Workspace work(max(few.workspace_size(20), all.workspace_size(20)));
  std::vector<float> before;
  for (position_t p = 0; p < 20; ++p) {
    const Token token = stream.next(p);
    cache.append(token);
    require_ok(few.observe(token.queries, p));
    require_ok(all.observe(token.queries, p));
    if (p == 14) before = scores_of(all, cache.view(), work);
  }
  const std::vector<float> newest = scores_of(few, cache.view(), work);
  const std::vector<float> whole = scores_of(all, cache.view(), work);
  for (std::size_t j = 0; j < 15; ++j) REQUIRE_THAT(newest[j], Catch::Matchers::WithinAbs(whole[j] - before[j], 1e-5));
  for (std::size_t j = 15; j < 20; ++j) REQUIRE_THAT(newest[j], Catch::Matchers::WithinAbs(whole[j], 1e-5));
}

TEST_CASE("H2O's sums belong to the cache that they were made for", "[h2o]") {
  Random random;
  H2O<> policy(small_shape, {.budget = {.max = 16, .min = 12, .counts_prefix = true}, .n_recent_kv = 2}, small_rope());
  Stream stream = small_stream(random);
  TestCache<> cache(small_shape, 20);
  Workspace work(policy.workspace_size(20));
  feed(policy, cache, stream, 16);
  require_value(evict(policy, cache.view(), work));
  TestCache<> shorter(small_shape, 20);
  for (position_t p = 0; p < 5; ++p) shorter.append(stream.next(p));
  std::vector<float> flat(10);
  check_error(policy.score(shorter.view(), {flat.data(), 2, 5}, work).status(), StatusCode::out_of_order,
              {"cache holds 5 tokens", "sums of 12"});
}

TEST_CASE("H2O: what its sums cannot follow", "[h2o]") {
  Random random;
  CAPTURE(random.seed());
  // Heads that keep unequally many by a plan made by hand: sums begin anew.
  H2O<> policy(small_shape, {.budget = {.max = 32, .min = 16}, .n_recent_kv = 4}, small_rope());
  TestCache<float, float, Granularity::per_head_ragged> ragged(small_shape, 64);
  Stream stream = small_stream(random);
  for (position_t p = 0; p < 32; ++p) feed(policy, ragged, stream.next(p));
  std::vector<slot_t> all(32);
  std::iota(all.begin(), all.end(), slot_t{0});
  for (const bool first_is_long : {false, true}) {
    CAPTURE(first_is_long);
    H2O<> copy = policy;
    const std::span<const slot_t> few = std::span(all).first(1);
    const std::span<const slot_t> sets[] = {first_is_long ? std::span<const slot_t>(all) : few,
                                            first_is_long ? few : std::span<const slot_t>(all)};
    KeepPlan plan;
    require_ok(plan.assign(ragged.view(), sets));
    require_ok(copy.commit(plan));
    REQUIRE(copy.state_bytes() >= policy.state_bytes());
  }
  // Heads that keep the same tokens carry one number, which is nobody's maximum.
  H2O<> max(small_shape, {.budget = {.max = 32, .min = 16}, .n_recent_kv = 4, .over_queries = Reduce::max}, small_rope());
  TestCache<float, float, Granularity::per_layer> layer(small_shape, 64);
  for (position_t p = 0; p < 32; ++p) feed(max, layer, stream.next(p));
  Workspace work(max.workspace_size(64));
  check_error(evict(max, layer.view(), work).status(), StatusCode::unsupported, {"over_queries = max"});
  REQUIRE(layer.view().num_tokens() == 32);
}

TEST_CASE("ExpectedAttention equals its formula with whole matrices", "[expected]") {
  Random random;
  CAPTURE(random.seed());
  for (const index_t n : {6, 15, 16, 17, 31, 33, 63, 64, 65, 130}) {
    CAPTURE(n);
    ExpectedRun run;
    run.tokens = n;
    run.prompt = random.integer(0, n);
    run.rotated = random.coin();
    compare_expected<TestCache<>>(random, run);
    run.shape = {7, 1, 24};
    run.rope = make_rope(24, RopeLayout::interleaved, 16);
    compare_expected<TestCache<float16, bfloat16>>(random, run);
    run.shape = {3, 3, 10};
    run.rope = make_rope_with_factor(10, 1.3);
    compare_expected<TestCache<bfloat16, float, Granularity::per_layer>>(random, run);
  }
  const auto with = [&](auto change) {
    ExpectedRun run;
    change(run);
    compare_expected<TestCache<>>(random, run);
  };
  with([](ExpectedRun& r) { r.options.use_covariance = false; });
  with([](ExpectedRun& r) { r.options.value_norm = false; });
  with([](ExpectedRun& r) { r.options.epsilon = 0.02F; });
  with([](ExpectedRun& r) { r.options.scale = 0.1F; });
  with([](ExpectedRun& r) { r.options.n_future_positions = 1; });
  with([](ExpectedRun& r) { r.options.n_sink = 0; });
  with([](ExpectedRun& r) { r.options.n_prefix = 0; });   // sinks that compete are in the softmax
  with([](ExpectedRun& r) { r.options.n_prefix = 10; });  // protected tokens behind the sinks, too
  with([](ExpectedRun& r) { r.size = 3; });               // logits far apart
  with([](ExpectedRun& r) { r.tokens = r.prompt = 5; });  // one query behind the sinks: no covariance
  with([](ExpectedRun& r) { r.tokens = r.prompt = 9; });  // rank below the dimension
  for (const double share : {0.05, 0.5}) {
    CAPTURE(share);
    with([&](ExpectedRun& r) { r.poison = share; });
  }
}

TEST_CASE("QueryMoments: saved bytes are refused where they are of another kind, and roots have the covariance's rank",
          "[expected]") {
  const Shape shape{1, 1, 4};
  const RopeTable rope({.head_dim = 4});
  QueryMoments moments(shape, {.n_sink = 0, .n_future_positions = 1});
  REQUIRE(moments.rows() == 0);
  REQUIRE(moments.max_rows() == 5);
  Workspace work(max(moments.workspace_size(), moments.prefill_workspace_size(2)));
  const float rows[] = {1, 2, 3, 4, 3, 2, 1, 0};
  require_ok(moments.prefill({QueryView::token_major(rows, 2, 1, 4), 0, nullptr}, work));
  REQUIRE(moments.num_queries(0) == 2);
  std::vector<float> out(20);
  std::vector<position_t> positions(5);
  check_workspace(
      moments.workspace_size(),
      [&](Workspace& w) {
        if (Status s = w.require(moments.workspace_size()); !s) return s;
        return moments.write_rows(&rope, -1, {0, 1}, out.data(), positions.data(), w);  // turns to position 0: not at all
      },
      [] {});
  REQUIRE(std::vector<float>(out.begin(), out.begin() + 4) == std::vector<float>{2, 2, 2, 2});
  REQUIRE_THAT(out[4], Catch::Matchers::WithinAbs(1, 1e-6));  // the one root: (1, 0, -1, -2), up to its sign
  REQUIRE_THAT(out[5], Catch::Matchers::WithinAbs(0, 1e-6));
  REQUIRE_THAT(out[6], Catch::Matchers::WithinAbs(-1, 1e-6));
  REQUIRE_THAT(out[7], Catch::Matchers::WithinAbs(-2, 1e-6));
  for (std::size_t i = 8; i < 20; ++i) REQUIRE(out[i] == 0.0F);
  check_invalid(validate(QueryMoments::Options{.n_sink = -1}, shape), {"n_sink = -1"});
  check_invalid(validate(QueryMoments::Options{.n_future_positions = 0}, shape), {"n_future_positions = 0"});
}

TEST_CASE("every baseline: ascending, unique, on budget, protected tokens kept, the best of its own scores", "[baseline]") {
  Random random;
  CAPTURE(random.seed());
  for_each_baseline([&](const char* name, auto policy) {
    INFO(name);
    Stream stream = small_stream(random);
    TestCache<float16> cache(small_shape, 60);
    Workspace work(policy.workspace_size(60));
    index_t evictions = 0;
    for (position_t p = 0; p < 120; ++p) {
      feed(policy, cache, stream.next(p));
      if (!policy.due(cache.view())) continue;
      ++evictions;
      const index_t n = cache.view().num_tokens();
      const std::vector<float> scores = scores_of(policy, cache.view(), work);
      const auto before = cache.state();
      KeepPlan plan;
      require_ok(policy.plan(cache.view(), work, plan));
      REQUIRE(cache.state() == before);
      for (index_t h = 0; h < 2; ++h) {
        std::vector<slot_t> want = reference::top_k(std::span(scores).subspan(at(h * n + 2), at(n - 6)), small_budget - 6);
        for (slot_t& s : want) s += 2;
        want.insert(want.begin(), {0, 1});
        for (index_t j = n - 4; j < n; ++j) want.push_back(static_cast<slot_t>(j));
        REQUIRE(slots_of(plan.kept(h)) == want);
      }
      require_value(evict(policy, cache.view(), work));
      REQUIRE(cache.view().num_tokens() == small_budget);
    }
    REQUIRE(evictions == 12);
  });
}

TEST_CASE("every baseline: nothing allocates, the same bits on threads, and a saved one goes on as if nothing had been",
          "[baseline]") {
  Random random;
  CAPTURE(random.seed());
  for_each_baseline([&](const char* name, auto policy) {
    INFO(name);
    Stream stream = small_stream(random);
    TestCache<> cache(small_shape, 60);
    Workspace work(policy.workspace_size(60));
    std::vector<Workspace> works(3, Workspace(policy.workspace_size(60)));
    std::vector<Token> tokens;
    for (position_t p = 0; p < 100; ++p) tokens.push_back(stream.next(p));
    auto threaded = policy;
    TestCache<> threaded_cache(cache);
    for (position_t p = 0; p < 50; ++p) {
      const Token& token = tokens[at(p)];
      cache.append(token);
      threaded_cache.append(token);
      bool ok = true;
      const std::int64_t allocations = allocations_of([&] {
        ok = policy.observe(token.queries, p).ok();
        if (policy.due(cache.view())) ok = ok && evict(policy, cache.view(), work).ok();
      });
      REQUIRE(ok);
      REQUIRE(allocations == 0);
      require_ok(threaded.observe(token.queries, p));
      if (threaded.due(threaded_cache.view())) require_value(evict(threaded, threaded_cache.view(), works, Workers{3}));
      REQUIRE(positions_of(cache, 0) == positions_of(threaded_cache, 0));
      REQUIRE(positions_of(cache, 1) == positions_of(threaded_cache, 1));
    }
    std::vector<std::byte> bytes;
    policy.save(bytes);
    std::vector<std::byte> again;
    threaded.save(again);
    REQUIRE(bytes == again);
    auto loaded = threaded;
    for (position_t p = 50; p < 55; ++p) require_ok(loaded.observe(tokens[at(p)].queries, p));  // something else meanwhile
    require_ok(loaded.load(bytes));
    for (position_t p = 50; p < 100; ++p) {
      const Token& token = tokens[at(p)];
      feed(policy, cache, token);
      feed(loaded, threaded_cache, token);
      REQUIRE(policy.due(cache.view()) == loaded.due(threaded_cache.view()));
      if (!policy.due(cache.view())) continue;
      require_value(evict(policy, cache.view(), work));
      require_value(evict(loaded, threaded_cache.view(), work));
      REQUIRE(positions_of(cache, 0) == positions_of(threaded_cache, 0));
    }
    bytes[bytes.size() / 2] ^= std::byte{1};
    REQUIRE_FALSE(loaded.load(bytes).ok());
  });
}

TEST_CASE("[E12] a protected range survives two compactions under every baseline", "[E12]") {
  Random random;
  CAPTURE(random.seed());
  for_each_baseline([&](const char* name, auto policy) {
    INFO(name);
    require_ok(policy.protect({10, 20}));
    Stream stream = small_stream(random);
    TestCache<> cache(small_shape, 60);
    Workspace work(policy.workspace_size(60));
    for (int compactions = 0; compactions < 2; ++compactions) {
      for (index_t i = 0; i < (compactions == 0 ? 40 : 20); ++i) {
        Token token = stream.next(policy.next_position());
        if (token.position >= 10 && token.position < 20)  // as bad as can be: NaN scores lowest
          std::fill(token.keys.begin(), token.keys.end(), nan_float());
        feed(policy, cache, token);
      }
      require_value(evict(policy, cache.view(), work));
      REQUIRE(cache.view().num_tokens() == small_budget);
      for (index_t h = 0; h < 2; ++h) {
        const std::vector<position_t> positions = positions_of(cache, h);
        for (position_t p = 10; p < 20; ++p) REQUIRE(std::binary_search(positions.begin(), positions.end(), p));
      }
    }
  });
}

TEST_CASE("every baseline: keys and queries that are not finite are counted and go first", "[baseline]") {
  Random random;
  CAPTURE(random.seed());
  for_each_baseline([&](const char* name, auto policy) {
    INFO(name);
    Stream stream = small_stream(random);
    TestCache<> cache(small_shape, 40);
    Workspace work(policy.workspace_size(40));
    for (position_t p = 0; p < 32; ++p) {
      Token token = stream.next(p);
      if (p == 7) token.keys[5] = infinity_float();
      if (p == 9) token.keys[20] = nan_float();
      if (p == 12) token.queries[3] = nan_float();
      feed(policy, cache, token);
    }
    const EvictionReport report = require_value(evict(policy, cache.view(), work));
    REQUIRE(report.num_non_finite >= 2);
    REQUIRE(report.num_non_finite <= 3);
    const std::vector<position_t> first = positions_of(cache, 0);
    const std::vector<position_t> second = positions_of(cache, 1);
    REQUIRE_FALSE(std::binary_search(first.begin(), first.end(), position_t{7}));
    REQUIRE_FALSE(std::binary_search(second.begin(), second.end(), position_t{9}));
    REQUIRE(first.size() == at(small_budget));
  });
}

TEST_CASE("baselines refuse what cannot work, by name and value", "[baseline]") {
  const RopeTable rope = small_rope();
  check_invalid(H2O<>::make(small_shape, {.budget = {.max = 64}, .max_pending_queries = 0}, rope).status(),
                {"max_pending_queries = 0"});
  check_invalid(H2O<>::make(small_shape, {.budget = {.max = 64}, .capacity = -1}, rope).status(), {"capacity = -1"});
  check_invalid(H2O<>::make(small_shape, {.budget = {.max = 64}, .scale = 0.0F}, rope).status(), {"scale = 0"});
  check_invalid(H2O<>::make(small_shape, {.budget = {.max = 32}}, rope).status(), {"n_recent_kv = 32"});
  check_invalid(TOVA<>::make(small_shape, {}, rope).status(), {"budget.max = 0"});
  check_invalid(TOVA<>::make(small_shape, {.budget = {.max = 64}, .over_heads = Reduce::sum}, rope).status(),
                {"over_heads = sum"});
  using Expected = ExpectedAttention<>;
  check_invalid(Expected::make(small_shape, {.budget = {.max = 64}}, {}).status(), {"rope"});
  check_invalid(Expected::make(small_shape, {.budget = {.max = 64}, .n_sink = -1}, rope).status(), {"n_sink = -1"});
  check_invalid(Expected::make(small_shape, {.budget = {.max = 64}, .n_future_positions = 0}, rope).status(),
                {"n_future_positions = 0"});
  check_invalid(Expected::make(small_shape, {.budget = {.max = 64}, .epsilon = -1.0F}, rope).status(), {"epsilon = -1"});
  check_invalid(Expected::make(small_shape, {.budget = {.max = 64}, .epsilon = nan_float()}, rope).status(), {"epsilon = "});
  check_invalid(Expected::make(small_shape, {.budget = {.max = 64}, .scale = -1.0F}, rope).status(), {"scale = -1"});
  // H2O's sums are those of whole layers.
  using Ragged = OwningCache<float, float, Granularity::per_head_ragged>;
  H2O<> policy(small_shape, {.budget = {.max = 8, .min = 6}, .n_recent_kv = 2}, rope);
  Ragged ragged(small_shape, 10);
  Workspace work(policy.workspace_size(10));
  for (position_t p = 0; p < 8; ++p) {
    require_ok(ragged.append(std::vector<float>(32), std::vector<float>(32), p));
    require_ok(policy.observe(std::vector<float>(64), p));
  }
  check_error(evict(policy, ragged.view(), work).status(), StatusCode::unsupported, {"all heads"});
}
