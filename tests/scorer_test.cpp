// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

// The stock scorers by themselves: what they see, what they write, what they ask for.

#include "beaconkv/policy/scorer.hpp"

#include <limits>
#include <vector>

#include "beaconkv/policy/rkv.hpp"
#include "support/catch.hpp"
#include "support/policy_run.hpp"

namespace {

using namespace beaconkv;
using namespace beaconkv::test;

static_assert(Scorer<RecencyScorer, PositionCache>);
static_assert(Scorer<AttentionScorer, PlaneCache<float>>);
static_assert(Scorer<AttentionScorer, PlaneCache<float16, bfloat16, Granularity::per_layer>>);
static_assert(Scorer<RKVScorer, PlaneCache<bfloat16>>);
static_assert(!Scorer<RecencyScorer, int>);

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float nan_number = std::numeric_limits<float>::quiet_NaN();

/// Queries as a scorer gets them, and the memory behind them.
struct Rows {
  std::vector<float> queries;         ///< [query head][row][dim]
  std::vector<position_t> positions;  ///< [query head][row]
  index_t query_heads;
  index_t rows;
  index_t dim;

  Rows(Random& random, const Shape& shape, index_t n, position_t last)
      : queries(random.normals(shape.query_heads * n * shape.head_dim, 1.5F)),
        query_heads(shape.query_heads),
        rows(n),
        dim(shape.head_dim) {
    for (index_t i = 0; i < query_heads * rows; ++i) positions.push_back(random.integer(-1, last));
  }
  [[nodiscard]] Observations view() const { return {queries.data(), positions, query_heads, rows, dim}; }
};

/// A cache of random keys at ascending positions with gaps.
template <class CacheT>
CacheT random_cache(Random& random, const Shape& shape, index_t tokens, Layout layout) {
  CacheT cache(shape, std::max<index_t>(tokens, 1), layout);
  position_t position = 0;
  for (index_t i = 0; i < tokens; ++i) {
    position += random.integer(1, 3);
    cache.append(
        {position, {}, {}, random.normals(shape.kv_heads * shape.head_dim), random.normals(shape.kv_heads * shape.head_dim)});
  }
  return cache;
}

/// The reference's score of every KV head.
template <class CacheT>
reference::Matrix expected_scores(const AttentionScorer& scorer, const CacheT& cache, const Rows& rows, Range candidates) {
  const index_t heads = cache.view().num_kv_heads();
  const index_t group = rows.query_heads / heads;
  const index_t n = cache.view().num_tokens();
  const Range domain = scorer.softmax_domain == SoftmaxDomain::all_visible ? Range{0, n} : candidates;
  reference::Attention attention{
      .over_queries = scorer.attention.over_queries,
      .over_heads = scorer.attention.over_heads,
      .group_stage = scorer.attention.group_stage,
      .pool = scorer.attention.pool,
      .pool_each_query_head = scorer.attention.pool_stage == PoolStage::query_head,
      .scale =
          scorer.attention.scale ? static_cast<double>(*scorer.attention.scale) : 1 / std::sqrt(static_cast<double>(rows.dim)),
      .softcap = scorer.attention.logit_softcap ? static_cast<double>(*scorer.attention.logit_softcap) : 0};
  reference::Matrix out;
  for (index_t h = 0; h < heads; ++h) {
    std::vector<reference::Matrix> queries(at(group));
    for (index_t g = 0; g < group; ++g)
      for (index_t r = 0; r < rows.rows; ++r)
        queries[at(g)].push_back(
            reference::row_of(rows.queries.data() + ((h * group + g) * rows.rows + r) * rows.dim, rows.dim));
    reference::Matrix keys;
    for (index_t j = domain.first; j < domain.last; ++j) keys.push_back(cache.key(h, j));
    const auto sees = [&](std::size_t g, std::size_t r, std::size_t j) {
      const position_t from = rows.positions[at((h * group + static_cast<index_t>(g)) * rows.rows + static_cast<index_t>(r))];
      return !scorer.causal || cache.view().position(h, domain.first + static_cast<index_t>(j)) <= from;
    };
    const reference::Row part = reference::attention_scores(
        queries, keys, sees, {candidates.first - domain.first, candidates.last - domain.first}, attention);
    out.emplace_back(at(n), 0.0);
    std::copy(part.begin(), part.end(), out.back().begin() + domain.first);
  }
  return out;
}

template <class CacheT>
void compare_random(Random& random, const AttentionScorer& scorer) {
  const index_t group = random.integer(1, 4);
  const index_t heads = random.integer(1, 3);
  const Shape shape{.query_heads = group * heads, .kv_heads = heads, .head_dim = random.integer(1, 40)};
  const index_t n = random.integer(0, 150);
  const CacheT cache = random_cache<CacheT>(random, shape, n, all_layouts[at(random.integer(0, 6))]);
  const Rows rows(random, shape, random.integer(1, 9), 2 * n + 2);
  const index_t first = random.integer(0, n);
  const Range candidates{first, random.integer(first, n)};
  CAPTURE(group, heads, shape.head_dim, n, candidates.first, candidates.last, rows.rows);

  Workspace work(scorer.workspace_size(shape, rows.rows, n));
  std::vector<float> flat(at(heads * n), nan_number);
  const ScoreMatrix out{flat.data(), heads, n};
  const ScoreReport report = require_value(scorer.score(cache.view(), rows.view(), candidates, out, work));
  REQUIRE(report.num_non_finite == 0);
  const reference::Matrix want = expected_scores(scorer, cache, rows, candidates);
  double worst = 0;
  double top = 0;
  for (index_t h = 0; h < heads; ++h)
    for (index_t j = candidates.first; j < candidates.last; ++j) {
      worst = std::max(worst, std::abs(static_cast<double>(out.row(h)[at(j)]) - want[at(h)][at(j)]));
      top = std::max(top, std::abs(want[at(h)][at(j)]));
    }
  REQUIRE(worst <= 2e-5 * top);
}

}  // namespace

TEST_CASE("RecencyScorer: the newer the better, in every head", "[scorer]") {
  const PositionCache cache{{{3, 5, 9, 20}, {3, 6, 7, 20}}};
  std::vector<float> flat(8, -1.0F);
  Workspace work(WorkspaceSize{});
  require_value(RecencyScorer{}.score(cache, {}, {1, 4}, {flat.data(), 2, 4}, work));
  REQUIRE(flat == std::vector<float>{-1, 1, 2, 3, -1, 1, 2, 3});
  REQUIRE(RecencyScorer{}.workspace_size({4, 2, 8}, 100, 100).bytes == 0);
}

TEST_CASE("AttentionScorer equals the reference at any positions, over any candidates", "[scorer]") {
  Random random;
  CAPTURE(random.seed());
  for (int trial = 0; trial < 300; ++trial) {
    CAPTURE(trial);
    AttentionScorer scorer;
    scorer.attention.over_queries = static_cast<Reduce>(random.integer(0, 2));
    scorer.attention.over_heads = static_cast<Reduce>(random.integer(0, 1));
    scorer.attention.group_stage = random.coin() ? GroupStage::logits : GroupStage::weights;
    scorer.attention.pool_stage = random.coin() ? PoolStage::query_head : PoolStage::kv_head;
    scorer.attention.pool = {static_cast<PoolKind>(random.integer(0, 2)), 2 * random.integer(0, 4) + 1};
    scorer.softmax_domain = random.coin() ? SoftmaxDomain::candidates_only : SoftmaxDomain::all_visible;
    scorer.causal = random.integer(0, 2) != 0;
    if (random.coin()) scorer.attention.scale = random.uniform(0.05F, 0.8F);
    if (random.coin()) scorer.attention.logit_softcap = random.uniform(1, 5);
    if (trial % 3 == 0) compare_random<TestCache<float>>(random, scorer);
    if (trial % 3 == 1) compare_random<TestCache<float16, bfloat16, Granularity::per_layer>>(random, scorer);
    if (trial % 3 == 2) compare_random<TestCache<bfloat16>>(random, scorer);
  }
}

TEST_CASE("a query sees the key at its own position and none behind it", "[scorer]") {
  // Keys at 0, 2, 4, 6, equal logits: a query at p spreads its weight over the keys at positions up to p.
  const Shape shape{1, 1, 2};
  TestCache<> cache(shape, 4);
  for (const position_t p : {0, 2, 4, 6}) cache.append({p, {}, {}, {1, 0}, {0, 0}});
  const float query[] = {0, 0};
  const AttentionScorer scorer;
  Workspace work(scorer.workspace_size(shape, 1, 4));
  for (position_t p = -1; p <= 8; ++p) {
    const position_t from[] = {p};
    std::vector<float> out(4, -1.0F);
    require_value(scorer.score(cache.view(), {query, from, 1, 1, 2}, {0, 4}, {out.data(), 1, 4}, work));
    const index_t seen = p < 0 ? 0 : std::min<index_t>(4, p / 2 + 1);
    CAPTURE(p, seen);
    for (index_t j = 0; j < 4; ++j)
      REQUIRE_THAT(out[at(j)], Catch::Matchers::WithinAbs(j < seen ? 1.0 / static_cast<double>(seen) : 0.0, 1e-7));
  }
}

TEST_CASE("[D4] a row that sees nothing counts as zeros", "[scorer]") {
  const Shape shape{1, 1, 2};
  TestCache<> cache(shape, 2);
  cache.append({5, {}, {}, {0, 0}, {0, 0}});
  cache.append({6, {}, {}, {std::log(3.0F), 0}, {0, 0}});
  const float queries[] = {1, 0, 1, 0};
  const position_t from[] = {4, 6};
  AttentionScorer scorer;
  scorer.attention.scale = 1.0F;
  Workspace work(scorer.workspace_size(shape, 2, 2));
  std::vector<float> out(2);
  for (const Reduce how : {Reduce::sum, Reduce::max, Reduce::mean}) {
    scorer.attention.over_queries = how;
    require_value(scorer.score(cache.view(), {queries, from, 1, 2, 2}, {0, 2}, {out.data(), 1, 2}, work));
    const double share = how == Reduce::mean ? 0.5 : 1;
    REQUIRE_THAT(out[0], Catch::Matchers::WithinAbs(0.25 * share, 1e-7));
    REQUIRE_THAT(out[1], Catch::Matchers::WithinAbs(0.75 * share, 1e-7));
  }
}

TEST_CASE("[C9] the scale of the logits is an option", "[scorer]") {
  // Two keys whose dot products with the query are 100 and 0: their weights' ratio shows the softmax's input.
  const Shape shape{1, 1, 128};
  TestCache<> cache(shape, 2);
  std::vector<float> key(128, 0.0F);
  key[0] = 10;
  cache.append({0, {}, {}, key, std::vector<float>(128)});
  cache.append({1, {}, {}, std::vector<float>(128), std::vector<float>(128)});
  std::vector<float> query(128, 0.0F);
  query[0] = 10;
  const position_t from[] = {1};
  const auto input_at = [&](std::optional<float> scale) {
    AttentionScorer scorer;
    scorer.attention.scale = scale;
    Workspace work(scorer.workspace_size(shape, 1, 2));
    std::vector<float> out(2);
    require_value(scorer.score(cache.view(), {query.data(), from, 1, 1, 128}, {0, 2}, {out.data(), 1, 2}, work));
    return std::log(static_cast<double>(out[0]) / static_cast<double>(out[1]));
  };
  REQUIRE_THAT(input_at({}), Catch::Matchers::WithinAbs(8.83883, 1e-4));
  REQUIRE_THAT(input_at(0.0771517F), Catch::Matchers::WithinAbs(7.71517, 1e-4));
}

TEST_CASE("keys that are not finite are scored NaN and counted, their neighbours as if they were not there", "[scorer]") {
  const Shape shape{4, 2, 8};
  Random random;
  CAPTURE(random.seed());
  for (const float bad : {nan_number, infinity, -infinity})
    for (const HeadScope scope : {HeadScope::group, HeadScope::layer})
      for (const Reduce over_heads : {Reduce::mean, Reduce::max})
        for (const PoolKind kind : {PoolKind::none, PoolKind::average, PoolKind::max})
          for (const PoolStage stage : {PoolStage::kv_head, PoolStage::query_head})
            for (const std::optional<float> softcap : {std::optional<float>(), std::optional<float>(3.0F)})
              for (index_t bad_head = 0; bad_head < 2; ++bad_head) {
                CAPTURE(bad, static_cast<int>(scope), static_cast<int>(over_heads), static_cast<int>(kind),
                        static_cast<int>(stage), softcap.has_value(), bad_head);
                TestCache<> cache(shape, 12);
                for (position_t p = 0; p < 12; ++p) {
                  std::vector<float> keys = random.normals(16);
                  if (p == 5) keys[at(8 * bad_head + 3)] = bad;
                  cache.append({p, {}, {}, keys, std::vector<float>(16)});
                }
                Rows rows(random, shape, 3, 11);
                for (position_t& p : rows.positions) p = 11;
                AttentionScorer scorer;
                scorer.attention = {.over_heads = over_heads, .pool = {kind, 3}, .pool_stage = stage, .logit_softcap = softcap};
                scorer.head_scope = scope;
                Workspace work(scorer.workspace_size(shape, 3, 12));
                std::vector<float> flat(24);
                const ScoreMatrix out{flat.data(), 2, 12};
                const ScoreReport report = require_value(scorer.score(cache.view(), rows.view(), {0, 12}, out, work));
                REQUIRE(report.num_non_finite == 1);
                for (index_t h = 0; h < 2; ++h)
                  for (index_t j = 0; j < 12; ++j) {
                    CAPTURE(h, j);
                    const bool is_bad = j == 5 && (h == bad_head || scope == HeadScope::layer);
                    REQUIRE(std::isnan(out.row(h)[at(j)]) == is_bad);
                    if (!is_bad) REQUIRE(std::isfinite(out.row(h)[at(j)]));
                  }
              }
}

TEST_CASE("queries that are not finite have no weight and are counted", "[scorer]") {
  const Shape shape{2, 1, 8};
  Random random;
  CAPTURE(random.seed());
  TestCache<> cache = random_cache<TestCache<>>(random, shape, 20, Layout::head_major);
  for (const std::optional<float> softcap : {std::optional<float>(), std::optional<float>(3.0F)})
    for (const GroupStage stage : {GroupStage::weights, GroupStage::logits})
      for (const float bad : {nan_number, infinity}) {
        CAPTURE(softcap.has_value(), static_cast<int>(stage), bad);
        Rows rows(random, shape, 4, 100);
        for (position_t& p : rows.positions) p = 100;
        rows.queries[at(8 * 2 + 1)] = bad;  // head 0, row 2
        AttentionScorer scorer;
        scorer.attention = {.over_queries = Reduce::sum, .group_stage = stage, .logit_softcap = softcap};
        const reference::Matrix want = expected_scores(scorer, cache, rows, {0, 20});
        Workspace work(scorer.workspace_size(shape, 4, 20));
        std::vector<float> out(20);
        const ScoreReport report = require_value(scorer.score(cache.view(), rows.view(), {0, 20}, {out.data(), 1, 20}, work));
        REQUIRE(report.num_non_finite == 1);
        for (std::size_t j = 0; j < 20; ++j) REQUIRE_THAT(out[j], Catch::Matchers::WithinAbs(want[0][j], 1e-5));
      }
}

TEST_CASE("without any observed query all scores are equal, and a plan keeps the oldest", "[scorer]") {
  const Shape shape{2, 1, 8};
  Random random;
  TestCache<> cache = random_cache<TestCache<>>(random, shape, 20, Layout::head_major);
  const AttentionScorer scorer;
  Workspace work(scorer.workspace_size(shape, 0, 20));
  std::vector<float> out(20, -1.0F);
  require_value(scorer.score(cache.view(), {nullptr, {}, 2, 0, 8}, {0, 20}, {out.data(), 1, 20}, work));
  REQUIRE(out == std::vector<float>(20, 0.0F));
}

TEST_CASE("scorers say how much scratch they take, and no more is taken", "[scorer]") {
  Random random;
  const Shape shape{6, 2, 48};
  for (const index_t n : {1, 63, 64, 65, 300}) {
    TestCache<> cache = random_cache<TestCache<>>(random, shape, n, Layout::paged);
    const Rows rows(random, shape, 5, 1000);
    std::vector<float> flat(at(2 * n));
    CAPTURE(n);
    AttentionScorer attention;
    attention.head_scope = HeadScope::layer;
    attention.attention.pool = {PoolKind::average, 7};
    Workspace exact(attention.workspace_size(shape, 5, n));
    require_value(attention.score(cache.view(), rows.view(), {0, n}, {flat.data(), 2, n}, exact));
    REQUIRE(exact.peak() <= exact.capacity());

    for (const RKVOrder order : {RKVOrder::chronological, RKVOrder::published}) {
      RKVScorer::Options options{.order = order};
      options.importance.causal = order == RKVOrder::chronological;
      const RKVScorer rkv(options);
      Workspace exact_rkv(rkv.workspace_size(shape, 5, n));
      require_value(rkv.score(cache.view(), rows.view(), {0, n}, {flat.data(), 2, n}, exact_rkv));
      REQUIRE(exact_rkv.peak() <= exact_rkv.capacity());
    }
    WorkspaceSize small = attention.workspace_size(shape, 5, n);
    small.bytes /= 2;
    Workspace too_small(small);
    attention.head_scope = HeadScope::group;
    check_error(attention.score(cache.view(), rows.view(), {0, n}, {flat.data(), 2, n}, too_small).status(),
                StatusCode::workspace_too_small, {"workspace has"});
  }
}

TEST_CASE("[E8] R-KV's scratch is linear in the number of keys", "[scorer]") {
  const Shape shape{8, 1, 128};
  const RKVScorer scorer;
  const std::size_t rows_alone = 16128 * 128 * sizeof(float);  // the normalised keys
  REQUIRE(scorer.workspace_size(shape, 8, 16128).bytes < rows_alone + (8U << 20U));
  REQUIRE(scorer.workspace_size(shape, 8, 2 * 16128).bytes < 2 * scorer.workspace_size(shape, 8, 16128).bytes + 4096);
}

TEST_CASE("what a head asks for ahead: its other keys or those of the next head, its values, and once what that head needs",
          "[scorer]") {
  constexpr Shape shape{4, 2, 16};  // a row is a cache line
  const float more[16]{};
  detail::MemoryAhead next;
  next.add(detail::rows_ahead(static_cast<const float*>(more), 16, 16, 1));
  for (const index_t n : {1, 95, 96, 97, 128, 191, 192, 193, 384, 385, 500}) {
    const OwningCache<float> memory(shape, n);
    const PlaneCache<float>& cache = memory.view();
    const auto line = [](const float* row) { return reinterpret_cast<const std::byte*>(row); };
    for (const detail::MemoryAhead* const last : {static_cast<const detail::MemoryAhead*>(nullptr), &detail::nothing_ahead,
                                                  static_cast<const detail::MemoryAhead*>(&next)}) {
      CAPTURE(n, last == &next, last == nullptr);
      const detail::HeadReader<PlaneCache<float>> head(cache, 0, n);  // as where heads are scored one by one
      const detail::KeysOfHead<detail::HeadReader<PlaneCache<float>>> keys{head, 0, {0, n}, last};
      std::vector<const std::byte*> asked;
      for (index_t j = 0; j < n; j += detail::tile_keys)
        for (const detail::RowsAhead& rows : keys.ahead(j, std::min(detail::tile_keys, n - j)))
          for (index_t i = 0; i < rows.rows; ++i) asked.push_back(rows.data + i * rows.stride);
      std::vector<const std::byte*> want;
      const bool next_head = last != nullptr && n <= 4 * detail::tile_keys;
      for (index_t j = next_head ? 0 : detail::tile_keys; j < n; ++j)
        want.push_back(line(cache.key_plane().row(next_head ? 1 : 0, j)));
      for (index_t j = 0; j < n; ++j) want.push_back(line(cache.value_plane().row(0, j)));
      if (last == &next) want.push_back(line(static_cast<const float*>(more)));
      std::sort(asked.begin(), asked.end());
      std::sort(want.begin(), want.end());
      REQUIRE(asked == want);
    }
  }
}
