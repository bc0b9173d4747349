// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

// Scorers that look at keys and values alone: Knorm, KeyDiff, LagKV, each beside its formula in double.

#include "beaconkv/policy/key_scores.hpp"

#include <cmath>
#include <vector>

#include "support/catch.hpp"
#include "support/instruction_sets.hpp"
#include "support/policies.hpp"

namespace {

using namespace beaconkv;
using namespace beaconkv::test;
using reference::Matrix;
using reference::Row;

double length(const Row& x) { return std::sqrt(reference::dot(x, x)); }

// The formulas. A row that is not finite scores NaN and has no say.

Row knorm(const Matrix& keys) {
  Row out;
  for (const Row& k : keys) out.push_back(reference::finite(k) ? -length(k) : reference::nan);
  return out;
}

Row keydiff(const Matrix& keys) {
  Row mean(keys.front().size(), 0.0);
  for (const Row& k : keys)
    for (std::size_t d = 0; d < k.size() && reference::finite(k); ++d) mean[d] += k[d] / std::max(length(k), 1e-12);
  Row out;
  for (const Row& k : keys) out.push_back(reference::finite(k) ? -reference::cosine(k, mean) : reference::nan);
  return out;
}

/// Softmax over a partition of the deviations of its rows, each channel scaled by the next partition.
Row lag_part(const Matrix& rows, std::size_t first, std::size_t lag, const std::vector<bool>& good) {
  const std::size_t dim = rows.front().size();
  Row least(dim, reference::infinity);
  Row largest(dim, -reference::infinity);
  for (std::size_t j = first + lag; j < first + 2 * lag; ++j)
    for (std::size_t d = 0; d < dim && good[j]; ++d) {
      least[d] = std::min(least[d], rows[j][d]);
      largest[d] = std::max(largest[d], rows[j][d]);
    }
  Row logits;
  for (std::size_t j = first; j < first + lag; ++j) {
    if (!good[j]) {
      logits.push_back(-reference::infinity);
      continue;
    }
    Row scaled;
    for (std::size_t d = 0; d < dim; ++d)
      scaled.push_back(largest[d] > least[d] ? (rows[j][d] - least[d]) / (largest[d] - least[d]) : 0.0);
    const double mean = reference::reduce(scaled, Reduce::mean);
    double squares = 0;
    for (const double x : scaled) squares += (x - mean) * (x - mean);
    logits.push_back(dim > 1 ? std::sqrt(squares / static_cast<double>(dim - 1)) : 0.0);
  }
  return reference::softmax(logits);
}

Row lagkv(const Matrix& keys, const Matrix& values, std::size_t sink, std::size_t lag, bool cross) {
  const std::size_t n = keys.size();
  std::vector<bool> good;
  for (std::size_t j = 0; j < n; ++j) good.push_back(reference::finite(keys[j]) && reference::finite(values[j]));
  Row out(n, 1.0);
  if (n < sink + 2 * lag)
    for (std::size_t j = sink; j < n; ++j) out[j] = static_cast<double>(j - sink) / static_cast<double>(n - sink);
  for (std::size_t first = sink; first + 2 * lag <= n; first += lag) {
    const Row of_keys = lag_part(keys, first, lag, good);
    const Row of_values = lag_part(values, first, lag, good);
    Row sum;
    for (std::size_t i = 0; i < lag; ++i) sum.push_back((of_keys[i] + of_values[i]) / 2);
    for (std::size_t i = 0; i < lag; ++i) {
      std::size_t rank = 0;  // how many are worse
      for (std::size_t other = 0; other < lag; ++other)
        if (good[first + other] && (sum[other] < sum[i] || (sum[other] == sum[i] && other < i))) ++rank;
      out[first + i] = cross ? sum[i] : static_cast<double>(rank) / static_cast<double>(lag);
    }
  }
  for (std::size_t j = sink; j < n; ++j)
    if (!good[j]) out[j] = reference::nan;
  return out;
}

template <class CacheT>
CacheT random_cache(Random& random, const Shape& shape, index_t tokens, Layout layout, double poison = 0) {
  CacheT cache(shape, std::max<index_t>(tokens, 1), layout);
  for (position_t p = 0; p < tokens; ++p) {
    const float size = std::exp(random.normal());
    Token token{
        p, {}, {}, random.normals(shape.kv_heads * shape.head_dim, size), random.normals(shape.kv_heads * shape.head_dim)};
    if (random.unit() < poison) token.keys[at(random.integer(0, shape.kv_heads * shape.head_dim - 1))] = nan_float();
    if (random.unit() < poison) token.values[at(random.integer(0, shape.kv_heads * shape.head_dim - 1))] = infinity_float();
    cache.append(token);
  }
  return cache;
}

template <class CacheT>
Matrix keys_of(const CacheT& cache, index_t head) {
  Matrix out;
  for (index_t j = 0; j < cache.view().num_tokens(); ++j) out.push_back(cache.key(head, j));
  return out;
}
template <class CacheT>
Matrix values_of(const CacheT& cache, index_t head) {
  Matrix out;
  for (index_t j = 0; j < cache.view().num_tokens(); ++j) out.push_back(cache.value(head, j));
  return out;
}

/// What the scorer says, [head][slot]; candidates only, all else NaN. Scratch is exactly what it says.
template <class ScorerT, class View>
std::vector<float> scores_of(const ScorerT& scorer, const View& view, Range candidates, index_t* non_finite = nullptr) {
  const Shape shape{view.num_kv_heads(), view.num_kv_heads(), view.key_dim()};
  std::vector<float> flat(at(view.num_kv_heads() * view.num_tokens()), nan_float());
  Workspace work(scorer.workspace_size(shape, 0, view.num_tokens()));
  ScoreReport report;
  const std::int64_t allocations = allocations_of([&] {
    report = scorer.score(view, {}, candidates, {flat.data(), view.num_kv_heads(), view.num_tokens()}, work).or_throw();
  });
  REQUIRE(allocations == 0);
  REQUIRE(work.peak() == work.capacity());
  if (non_finite != nullptr) *non_finite = report.num_non_finite;
  return flat;
}

/// Against `expected(head) -> Row`, under every instruction set.
template <class ScorerT, class CacheT, class Expected>
void compare(const ScorerT& scorer, const CacheT& cache, Range candidates, double tolerance, Expected expected) {
  std::vector<float> wide;
  const index_t n = cache.view().num_tokens();
  for (const InstructionSet set : supported_sets()) {
    const ForcedSet forced(set);
    CAPTURE(name_of(set));
    const std::vector<float> found = scores_of(scorer, cache.view(), candidates);
    for (index_t h = 0; h < cache.view().num_kv_heads(); ++h) {
      const Row want = expected(h);
      const std::span<const float> row = std::span(found).subspan(at(h * n + candidates.first), at(candidates.size()));
      const Row part(want.begin() + candidates.first, want.begin() + candidates.last);
      REQUIRE(largest_difference(row, part) <= tolerance * std::max(largest_size(part), 1e-30));
    }
    if (set == InstructionSet::baseline) continue;
    if (!wide.empty()) REQUIRE(same_bits(wide, found));
    wide = found;
  }
}

template <class CacheT>
void compare_all(Random& random, double poison) {
  for (const index_t n : {1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 130}) {
    const index_t heads = random.integer(1, 3);
    const Shape shape{heads, heads, random.integer(1, 5) * 8 + (random.coin() ? 0 : random.integer(0, 7))};
    const CacheT cache = random_cache<CacheT>(random, shape, n, all_layouts[at(random.integer(0, 6))], poison);
    const index_t first = random.coin() ? 0 : random.integer(0, n);
    const Range candidates{first, random.integer(first, n)};
    CAPTURE(n, heads, shape.head_dim, candidates.first, candidates.last, poison);
    compare(KnormScorer{}, cache, candidates, 1e-6, [&](index_t h) { return knorm(keys_of(cache, h)); });
    compare(KeyDiffScorer{}, cache, candidates, 2e-6, [&](index_t h) { return keydiff(keys_of(cache, h)); });
    const LagKVScorer lag{.lag = random.integer(1, 20), .cross_scoring = random.coin()};
    CAPTURE(lag.lag, lag.cross_scoring);
    const bool one_channel = shape.head_dim == 1;
    compare(lag, cache, candidates, one_channel ? 1e-6 : 2e-6, [&](index_t h) {
      return lagkv(keys_of(cache, h), values_of(cache, h), at(first), at(lag.lag), lag.cross_scoring);
    });
  }
}

}  // namespace

TEST_CASE("Knorm, KeyDiff and LagKV equal their formulas over sizes, storage types, layouts and instruction sets", "[keys]") {
  Random random;
  CAPTURE(random.seed());
  for (int trial = 0; trial < 6; ++trial) {
    compare_all<TestCache<float>>(random, 0);
    compare_all<TestCache<float16, bfloat16>>(random, 0);
    compare_all<TestCache<std::int8_t, float>>(random, 0);
    compare_all<TestCache<bfloat16, float, Granularity::per_layer>>(random, 0);
  }
}

TEST_CASE("keys and values that are not finite score NaN, are counted, and change no other score", "[keys]") {
  Random random;
  CAPTURE(random.seed());
  for (const double share : {0.05, 0.5, 1.0}) compare_all<TestCache<float>>(random, share);
  // One bad key, one bad value.
  const Shape shape{2, 2, 8};
  for (const float bad : {nan_float(), infinity_float(), -infinity_float()}) {
    TestCache<> cache(shape, 20);
    for (position_t p = 0; p < 20; ++p) {
      Token token{p, {}, {}, random.normals(16), random.normals(16)};
      if (p == 5) token.keys[3] = bad;
      if (p == 6) token.values[11] = bad;
      cache.append(token);
    }
    const auto bad_slots = [&](const auto& scorer, index_t count) {
      index_t non_finite = 0;
      const std::vector<float> scores = scores_of(scorer, cache.view(), {0, 20}, &non_finite);
      REQUIRE(non_finite == count);
      std::vector<slot_t> out;
      for (std::size_t i = 0; i < scores.size(); ++i)
        if (std::isnan(scores[i])) out.push_back(static_cast<slot_t>(i));
      return out;
    };
    REQUIRE(bad_slots(KnormScorer{}, 1) == std::vector<slot_t>{5});
    REQUIRE(bad_slots(KeyDiffScorer{}, 1) == std::vector<slot_t>{5});
    for (const index_t lag : {4, 7, 10, 16}) REQUIRE(bad_slots(LagKVScorer{.lag = lag}, 2) == std::vector<slot_t>{5, 26});
    // They are the first to go.
    Knorm<> policy(shape, {.budget = {.max = 20, .min = 19}});
    Workspace work(policy.workspace_size(20));
    require_ok(policy.prefill_tokens(20));
    REQUIRE(require_value(evict(policy, cache.view(), work)).num_non_finite == 1);
    REQUIRE(slots_of(work.plan().kept(0)) == all_but(20, {5}));
  }
}

TEST_CASE("keys of any finite length: the squares of none leave their range", "[keys]") {
  const Shape shape{1, 1, 16};
  Random random;
  CAPTURE(random.seed());
  TestCache<> cache(shape, 12);
  const float sizes[] = {0, 1e-44F, 1e-38F, 1e-20F, 1e-8F, 1, 1e8F, 1e19F, 1e25F, 1e30F, 1e37F, 3e38F};
  for (position_t p = 0; p < 12; ++p) {
    Token token{p, {}, {}, std::vector<float>(16), std::vector<float>(16)};
    for (float& x : token.keys) x = random.coin() ? sizes[p] : -sizes[p];
    cache.append(token);
  }
  const auto expected = keydiff(keys_of(cache, 0));
  const std::vector<float> found = scores_of(KeyDiffScorer{}, cache.view(), {0, 12});
  REQUIRE(found[0] == 0.0F);
  for (std::size_t j = 4; j < 12; ++j) REQUIRE_THAT(found[j], Catch::Matchers::WithinAbs(expected[j], 1e-6));
  const std::vector<float> norms = scores_of(KnormScorer{}, cache.view(), {0, 12});
  for (std::size_t j = 0; j < 12; ++j) {
    REQUIRE(std::isfinite(norms[j]));
    REQUIRE(std::isfinite(found[j]));
    if (j > 0) REQUIRE(norms[j] < norms[j - 1]);
  }
}

TEST_CASE("[E10] a channel that is constant in the next partition adds nothing, and no NaN", "[E10]") {
  // Channel 0 is constant in the second partition, channel 1 runs from 0 to 3: only it counts.
  const Shape shape{1, 1, 2};
  TestCache<> cache(shape, 8);
  for (position_t p = 0; p < 8; ++p) {
    const auto x = static_cast<float>(p % 4);
    cache.append({p, {}, {}, {p < 4 ? 100 * x : 7.0F, p < 4 ? 3 - x : x}, {5, 5}});
  }
  const std::vector<float> found = scores_of(LagKVScorer{.lag = 4, .cross_scoring = true}, cache.view(), {0, 8});
  Row logits;
  for (int i = 0; i < 4; ++i) logits.push_back((3 - i) / 3.0 / std::sqrt(2.0));  // deviation of (0, y) is y / sqrt(2)
  const Row keys = reference::softmax(logits);
  for (std::size_t i = 0; i < 4; ++i) REQUIRE_THAT(found[i], Catch::Matchers::WithinAbs((keys[i] + 0.25) / 2, 1e-6));
  for (std::size_t i = 4; i < 8; ++i) REQUIRE(found[i] == 1.0F);
  // All channels constant, as in a cache of equal tokens: equal scores, so ranks by age, and never a NaN.
  TestCache<> equal(shape, 8);
  for (position_t p = 0; p < 8; ++p) equal.append({p, {}, {}, {1, 2}, {3, 4}});
  const std::vector<float> ranks = scores_of(LagKVScorer{.lag = 4}, equal.view(), {0, 8});
  REQUIRE(ranks == std::vector<float>{0, 0.25F, 0.5F, 0.75F, 1, 1, 1, 1});
}

TEST_CASE("LagKV: newer is better where there are no two partitions, and values may be wider than keys", "[keys]") {
  Random random;
  CAPTURE(random.seed());
  const Shape shape{1, 1, 4};
  for (const index_t width : {1, 4, 11, 32}) {
    OwningCache<float> cache(shape, 23, {.value_dim = width});
    Matrix keys;
    Matrix values;
    for (position_t p = 0; p < 23; ++p) {
      const std::vector<float> k = random.normals(4);
      const std::vector<float> v = random.normals(width);
      require_ok(cache.append(k, v, p));
      keys.push_back(reference::row_of(k.data(), 4));
      values.push_back(reference::row_of(v.data(), width));
      const index_t n = p + 1;
      for (const index_t first : {index_t{0}, index_t{3}}) {
        if (first >= n) continue;
        const std::vector<float> found = scores_of(LagKVScorer{.lag = 5, .cross_scoring = true}, cache.view(), {first, n});
        const Row expected = lagkv(keys, values, at(first), 5, true);
        for (std::size_t j = at(first); j < at(n); ++j) REQUIRE_THAT(found[j], Catch::Matchers::WithinAbs(expected[j], 1e-6));
      }
    }
  }
  OwningCache<float> wide(shape, 4, {.value_dim = 33});
  LagKV<> policy(shape, {.budget = {.max = 4, .min = 3}});
  Workspace work(policy.workspace_size(4));
  for (position_t p = 0; p < 4; ++p) require_ok(wide.append(std::vector<float>(4), std::vector<float>(33), p));
  require_ok(policy.prefill_tokens(4));
  check_error(evict(policy, wide.view(), work).status(), StatusCode::unsupported, {"values of 33", "keys of 4"});
  REQUIRE(wide.view().num_tokens() == 4);
}

TEST_CASE("key policies refuse what cannot work, by name and value", "[keys]") {
  const Shape shape{4, 2, 16};
  check_invalid(LagKV<>::make(shape, {.budget = {.max = 64}, .scorer = {.lag = 0}}).status(), {"lag = 0"});
  check_invalid(Knorm<>::make(shape, {}).status(), {"budget.max = 0"});
  check_invalid(KeyDiff<>::make(shape, {.budget = {.max = 8}, .n_recent_kv = 9}).status(), {"n_recent_kv = 9"});
  check_invalid(KeyDiff<>::make(shape, {.budget = {.max = 8}, .n_prefix = -1}).status(), {"n_prefix = -1"});
  check_invalid(Knorm<>::make({3, 2, 16}, {.budget = {.max = 8}}).status(), {"shape.query_heads = 3"});
  // Keys of another width than the shape says, for which there is no scratch.
  OwningCache<float16> wide({4, 2, 512}, 8);
  for (position_t p = 0; p < 8; ++p) require_ok(wide.append(std::vector<float>(1024, 1.0F), std::vector<float>(1024, 1.0F), p));
  const auto refuses = [&](auto policy) {
    Workspace work(policy.workspace_size(8));
    require_ok(policy.prefill_tokens(8));
    check_invalid(evict(policy, wide.view(), work).status(), {"keys of 512", "head_dim = 16"});
  };
  refuses(Knorm<>(shape, {.budget = {.max = 8, .min = 4}}));
  refuses(KeyDiff<>(shape, {.budget = {.max = 8, .min = 4}}));
  refuses(LagKV<>(shape, {.budget = {.max = 8, .min = 4}}));
}
