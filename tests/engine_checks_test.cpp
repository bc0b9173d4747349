// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

// What engines do with their memory: padding, windows, units of text, pages of all heads, storage of two kinds.

#include <memory>
#include <numeric>
#include <vector>

#include "beaconkv/memory/owning_cache.hpp"
#include "beaconkv/policy/beaconkv.hpp"
#include "beaconkv/policy/realign.hpp"
#include "beaconkv/policy/recent_window.hpp"
#include "beaconkv/policy/snapkv.hpp"
#include "support/check.hpp"
#include "support/layouts.hpp"

namespace {

using namespace beaconkv;
using namespace beaconkv::test;
using Slots = std::vector<slot_t>;
using Positions = std::vector<position_t>;

constexpr Shape shape{.query_heads = 2, .kv_heads = 2, .head_dim = 8};

Positions positions_of(const auto& cache, index_t head = 0) {
  Positions out;
  for (index_t s = 0; s < cache.num_tokens(); ++s) out.push_back(cache.position(head, s));
  return out;
}

/// Scores that a test chooses: `scores[slot position]`.
struct GivenScores {
  std::vector<float> scores;
  [[nodiscard]] Status validate(const Shape&) const { return {}; }
  template <CacheReader Cache>
  [[nodiscard]] Result<ScoreReport> score(const Cache& cache, const Observations&, Range candidates, ScoreMatrix out,
                                          Workspace&) const {
    for (index_t h = 0; h < out.heads; ++h)
      for (index_t s = candidates.first; s < candidates.last; ++s)
        out.row(h)[static_cast<std::size_t>(s)] = scores[static_cast<std::size_t>(cache.position(h, s))];
    return ScoreReport{};
  }
  [[nodiscard]] WorkspaceSize workspace_size(const Shape&, index_t, index_t) const { return {}; }
};

/// A cache of `tokens` tokens without content.
template <Granularity G = Granularity::per_head>
OwningCache<float, float, G> filled(index_t tokens, index_t capacity) {
  OwningCache<float, float, G> cache(shape, capacity);
  cache.view().append_run(0, tokens).or_throw();
  return cache;
}

}  // namespace

TEST_CASE("[G1] left padding: a row's view begins behind it, sinks are its first real tokens, padding is never kept", "[G1]") {
  // A batch of two rows of width 8, [row][head][8][dim]; the valid tokens are the last 3 and the last 5.
  Random random;
  CAPTURE(random.seed());
  const std::vector<float> keys = random.normals(2 * 2 * 8 * 8);
  std::vector<float> memory = keys;
  std::vector<float> values = keys;
  const index_t valid[] = {3, 5};
  const Slots expected[] = {{5, 6, 7}, {3, 5, 7}};
  for (index_t r = 0; r < 2; ++r) {
    const auto plane = [&](std::vector<float>& all) {
      return without_first(head_major_plane(all.data() + r * 128, 2, 8, 8), 8 - valid[r]).or_throw();
    };
    auto cache = PlaneCache<float>::make(plane(memory), plane(values)).or_throw();
    CHECK(cache.capacity() == valid[r]);
    cache.append_run(0, valid[r]).or_throw();
    CHECK(cache.next_position() == valid[r]);  // positions begin at 0 at the first valid token
    RecentWindow<GivenScores> policy =
        RecentWindow<GivenScores>::make(shape, {.budget = {.max = 3, .min = 3, .counts_prefix = true}, .n_prefix = 1},
                                        GivenScores{{0, 1, 5, 2, 9, 0, 0, 0}})
            .or_throw();
    policy.prefill_tokens(valid[r]).or_throw();
    Workspace work(policy.workspace_size(8));
    evict(policy, cache, work).or_throw();
    Slots physical;
    for (const slot_t s : work.plan().kept(1)) physical.push_back(static_cast<slot_t>(s + 8 - valid[r]));
    if (work.plan().sets() == 0) physical = {5, 6, 7};
    CHECK(physical == expected[r]);
    // Rows in front of the view, the padding, are as they were.
    for (index_t h = 0; h < 2; ++h)
      for (index_t i = 0; i < (8 - valid[r]) * 8; ++i) {
        const auto at = static_cast<std::size_t>(r * 128 + h * 64 + i);
        REQUIRE(memory[at] == keys[at]);
      }
  }
}

TEST_CASE("[G1] padding is cut off at any token, in paged memory at whole pages only", "[G1]") {
  std::vector<float> memory(2 * 8 * 8);
  const std::int32_t pages[] = {0, 1};
  check_invalid(without_first(head_major_plane(memory.data(), 2, 8, 8), 9).status(), {"count = 9", "8"});
  check_invalid(without_first(head_major_plane(memory.data(), 2, 8, 8), -1).status(), {"count = -1"});
  const Plane<float> paged = paged_token_major_plane(memory.data(), 2, 8, {pages, 2, 4, 2});
  check_error(without_first(paged, 3).status(), StatusCode::unsupported, {"count = 3", "page_size = 4"});
  const Plane<float> cut = without_first(paged, 4).or_throw();
  CHECK(cut.capacity == 4);
  CHECK(cut.row(1, 2) == paged.row(1, 6));
}

TEST_CASE("[G2] rows of a batch have lengths of their own", "[G2]") {
  std::vector<float> memory(2 * 2 * 8 * 8);
  std::vector<PlaneCache<float>> rows;
  for (index_t r = 0; r < 2; ++r) {
    const Plane<float> plane = head_major_plane(memory.data() + r * 128, 2, 8, 8);
    rows.push_back(PlaneCache<float>::make(plane, plane).or_throw());
  }
  rows[0].append_run(0, 3).or_throw();
  rows[1].append_run(0, 5).or_throw();
  CHECK(rows[0].next_position() == 3);
  CHECK(rows[1].next_position() == 5);
}

TEST_CASE("[G3] padding behind the last chunk of a prompt pushes no token out of a window", "[G3]") {
  auto memory = filled(0, 16);
  PlaneCache<float>& cache = memory.view();
  RecentWindow<> window(shape, {.budget = {.max = 9, .min = 8}, .n_prefix = 0});
  Workspace work(window.workspace_size(16));
  for (const index_t n_valid : {8, 8, 4}) {  // the last chunk of 8 has 4 tokens and 4 of padding
    const position_t first = cache.next_position();
    cache.append_run(first, n_valid).or_throw();
    window.prefill_tokens(n_valid).or_throw();
    if (window.due(cache)) evict(window, cache, work).or_throw();
  }
  CHECK(positions_of(cache) == Positions{12, 13, 14, 15, 16, 17, 18, 19});
}

TEST_CASE("[J5] growth over powers of two: budgets and prompts on both sides, keys of 8 bits and values of another type",
          "[J5]") {
  Random random;
  CAPTURE(random.seed());
  for (const index_t power : {64, 256, 4096})
    for (const index_t offset : {-6, -1, 0, 1}) {
      const index_t budget = power + offset;
      CAPTURE(budget);
      OwningCache<std::int8_t, q8_0> memory(Shape{.query_heads = 1, .kv_heads = 1, .head_dim = 32}, budget + 8);
      const Shape one{.query_heads = 1, .kv_heads = 1, .head_dim = 32};
      RecentWindow<> policy(one, {.budget = {.max = budget + 8, .min = budget, .counts_prefix = true}, .n_prefix = 2});
      Workspace work(policy.workspace_size(budget + 8));
      const std::vector<float> row = random.normals(32);
      for (position_t p = 0; p < budget + 30; ++p) {
        memory.append(row, row, p).or_throw();
        policy.observe({}, p).or_throw();
        if (policy.due(memory.view())) evict(policy, memory.view(), work).or_throw();
      }
      const index_t n = memory.view().num_tokens();
      REQUIRE(n >= budget);
      REQUIRE(n < budget + 8);
      REQUIRE(memory.view().position(0, n - 1) == budget + 29);
      REQUIRE(memory.view().position(0, 1) == 1);
    }
}

TEST_CASE("[J6] memory that keeps one set for all heads gets one, from all heads' scores; sets of their own are refused",
          "[J6]") {
  auto memory = filled<Granularity::per_layer>(4, 8);
  auto& cache = memory.view();
  const SnapKV<> policy(shape, {.budget = {.tokens = 3}, .n_recent_queries = 1, .n_recent_kv = 1});
  Workspace work(policy.workspace_size(8));
  KeepPlan plan;
  std::vector<float> scores{9, 0, 0, 1, 0, 8, 8, 1};
  policy.select(cache, {scores.data(), 2, 4}, work, plan, 3).or_throw();
  REQUIRE(plan.sets() == 1);
  CHECK(to_vector(plan.kept(0)) == Slots{0, 1, 3});
  CHECK(to_vector(plan.kept(1)) == Slots{0, 1, 3});
  const Slots one{0, 1};
  const Slots other{2, 3};
  const std::span<const slot_t> sets[] = {one, other};
  plan.assign(cache, sets).or_throw();
  check_error(compact(cache, plan), StatusCode::unsupported, {"2 sets", "one set"});
  CHECK(cache.num_tokens() == 4);
  // Numbers for each head have no overload for such a cache.
  using Shared = PlaneCache<float, float, Granularity::per_layer>;
  using Ragged = PlaneCache<float, float, Granularity::per_head_ragged>;
  constexpr auto takes_counts = []<class Cache>(const Cache*) {
    return requires(const SnapKV<>& p, const Cache& c, ScoreMatrix s, Workspace& w, KeepPlan& k, std::span<const index_t> n) {
      p.select(c, s, w, k, n);
    };
  };
  STATIC_REQUIRE_FALSE(takes_counts(static_cast<const Shared*>(nullptr)));
  STATIC_REQUIRE(takes_counts(static_cast<const Ragged*>(nullptr)));
}

TEST_CASE("[M2] whole units go, never a part of one", "[M2]") {
  for (const bool few : {true, false}) {
    auto memory = filled<Granularity::per_layer>(40, 48);
    auto& cache = memory.view();
    RecentWindow<> policy(shape, {.budget = {.max = 40, .min = 37, .counts_prefix = true}, .n_prefix = 10});
    policy.prefill_tokens(40).or_throw();
    for (const position_t b : {0, 10, 25, 40}) policy.add_boundary(b).or_throw();
    Workspace work(policy.workspace_size(48));
    KeepPlan plan;
    if (few) {
      policy.plan(cache, work, plan).or_throw();  // 3 tokens
      CHECK(plan.num_evicted(0) == 15);
    } else {
      policy.plan_free(cache, 16, work, plan).or_throw();
      CHECK(plan.num_evicted(0) == 30);
    }
    CHECK(plan.shortfall() == 0);
    std::vector<Range> runs;
    plan.for_each_evicted_run(0, [&](Range r) { runs.push_back(r); });
    CHECK(runs == std::vector<Range>{few ? Range{10, 25} : Range{10, 40}});
    policy.plan_free(cache, 31, work, plan).or_throw();
    CHECK(plan.num_evicted(0) == 30);
    CHECK(plan.shortfall() == 1);
  }
}

TEST_CASE("[M2] the unit with the lowest mean goes first, protected ones stay whole, and the choice can be switched off",
          "[M2]") {
  using Policy = RecentWindow<GivenScores>;
  auto memory = filled<Granularity::per_layer>(20, 24);
  auto& cache = memory.view();
  std::vector<float> scores(24, 1.0F);
  for (const position_t p : {4, 5, 6, 7}) scores[static_cast<std::size_t>(p)] = 0.5F;     // unit [4, 8)
  for (const position_t p : {8, 9, 10, 11}) scores[static_cast<std::size_t>(p)] = 0.25F;  // unit [8, 12), mean 0.25
  scores[13] = nan_float();                                                               // unit [12, 14): NaN
  Policy policy =
      Policy::make(shape, {.budget = {.max = 20, .min = 15, .counts_prefix = true}, .n_prefix = 2}, GivenScores{scores})
          .or_throw();
  policy.prefill_tokens(20).or_throw();
  for (const position_t b : {4, 8, 12, 14, 17}) policy.add_boundary(b).or_throw();
  Workspace work(policy.workspace_size(24));
  KeepPlan plan;
  const auto evicted = [&] {
    Positions out;
    plan.for_each_evicted_run(0, [&](Range r) {
      for (std::int64_t s = r.first; s < r.last; ++s) out.push_back(s);
    });
    return out;
  };
  policy.plan(cache, work, plan).or_throw();
  CHECK(evicted() == Positions{8, 9, 10, 11, 12, 13});  // NaN first, then 0.25: six tokens for five
  policy.protect({9, 10}).or_throw();
  policy.plan(cache, work, plan).or_throw();
  CHECK(evicted() == Positions{4, 5, 6, 7, 12, 13});
  check_invalid(policy.unprotect({9, 11}), {"[9, 11)", "1 protected"});
  policy.unprotect({9, 10}).or_throw();
  policy.plan(cache, work, plan).or_throw();
  CHECK(evicted() == Positions{8, 9, 10, 11, 12, 13});
  policy.protect({9, 10}).or_throw();
  policy.plan_free(cache, 14, work, plan).or_throw();             // [0, 4) has protected slots, [8, 12) a protected one
  CHECK(evicted() == Positions{4, 5, 6, 7, 12, 13, 14, 15, 16});  // and [17, ...) has no end yet
  CHECK(plan.shortfall() == 5);

  CHECK(policy.due(cache));
  policy.set_eviction(false);
  CHECK_FALSE(policy.due(cache));
  check_error(cache.append_run(20, 5), StatusCode::out_of_capacity, {"count = 5", "4 more"});
  check_error(policy.add_boundary(17), StatusCode::out_of_order, {"boundary = 17"});
  check_invalid(policy.add_boundary(-1), {"boundary = -1"});
}

TEST_CASE("[M2] units need a cache that keeps one set", "[M2]") {
  auto memory = filled(20, 20);
  RecentWindow<> policy(shape, {.budget = {.max = 20, .min = 15, .counts_prefix = true}, .n_prefix = 0});
  policy.prefill_tokens(20).or_throw();
  policy.add_boundary(5).or_throw();
  Workspace work(policy.workspace_size(20));
  KeepPlan plan;
  check_error(policy.plan(memory.view(), work, plan), StatusCode::unsupported, {"boundaries (1)", "one set"});
}

TEST_CASE("units of every shape: whole, ascending, enough, and the reference's choice", "[M2]") {
  Random random;
  CAPTURE(random.seed());
  using Policy = RecentWindow<GivenScores>;
  for (index_t round = 0; round < 300; ++round) {
    const index_t tokens = random.integer(2, 40);
    auto memory = filled<Granularity::per_layer>(tokens, 40);
    auto& cache = memory.view();
    std::vector<float> scores;
    for (index_t i = 0; i < tokens; ++i) scores.push_back(static_cast<float>(random.integer(0, 3)));
    Policy policy =
        Policy::make(shape, {.budget = {.max = 100, .min = 50}, .n_prefix = random.integer(0, 3)}, GivenScores{scores})
            .or_throw();
    policy.prefill_tokens(tokens).or_throw();
    Positions boundaries{0};
    for (position_t p = 0; p < tokens + 2; ++p)
      if (random.integer(0, 4) == 0) policy.add_boundary(p).or_throw(), boundaries.push_back(p);
    if (boundaries.size() == 1) continue;
    boundaries.push_back(1000);
    const index_t count = random.integer(1, tokens);
    Workspace work(policy.workspace_size(40));
    KeepPlan plan;
    policy.plan_free(cache, count, work, plan).or_throw();

    struct Unit {
      index_t first;
      index_t last;
      double mean;
    };
    std::vector<Unit> open;
    for (std::size_t b = 0; b + 1 < boundaries.size(); ++b) {
      const index_t first = boundaries[b];
      const index_t last = std::min<index_t>(boundaries[b + 1], tokens);
      if (first >= last || first < policy.prefix() || b + 2 == boundaries.size()) continue;
      open.push_back({first, last,
                      std::accumulate(scores.begin() + first, scores.begin() + last, 0.0) / static_cast<double>(last - first)});
    }
    std::stable_sort(open.begin(), open.end(), [](const Unit& a, const Unit& b) {
      return static_cast<float>(a.mean) != static_cast<float>(b.mean) ? a.mean < b.mean : a.first > b.first;
    });
    std::vector<bool> gone(static_cast<std::size_t>(tokens));
    index_t left = tokens;
    const index_t target = count < tokens ? tokens - count : 1;
    for (const Unit& u : open) {
      if (left <= target || left == u.last - u.first) break;
      left -= u.last - u.first;
      for (index_t s = u.first; s < u.last; ++s) gone[static_cast<std::size_t>(s)] = true;
    }
    Slots expected;
    for (slot_t s = 0; s < tokens; ++s)
      if (!gone[static_cast<std::size_t>(s)]) expected.push_back(s);
    REQUIRE(to_vector(plan.kept(0)) == expected);
  }
}

TEST_CASE("[A1] [A2] a share of the tokens: counted in whole tokens, rounded as it says, never to none", "[A1][A2]") {
  const auto left = [](index_t tokens, double pruned) { return tokens_after_pruning(tokens, pruned).or_throw(); };
  CHECK(left(2, 0.9) == 1);
  CHECK(left(1, 0.5) == 1);
  CHECK(left(10, 0.9) == 1);
  CHECK(left(100, 0.9) == 10);
  CHECK(left(100, 0.2) == 80);
  CHECK(left(80, 0.5) == 40);
  CHECK(left(1000, 0.9) == 100);
  CHECK(left(0, 0.5) == 0);
  CHECK(left(7, 0) == 7);
  CHECK(left(7, 1) == 1);
  check_invalid(tokens_after_pruning(-1, 0.5).status(), {"tokens = -1"});
  check_invalid(tokens_after_pruning(5, 1.5).status(), {"pruned = 1.5"});
  check_invalid(tokens_after_pruning(5, static_cast<double>(nan_float())).status(), {"pruned = "});
}

TEST_CASE("[A8] pyramid budgets: from wide to narrow, the sum kept, each above the window", "[A8]") {
  std::vector<index_t> budgets(4);
  pyramid_budgets(64, 8, 20, budgets).or_throw();
  CHECK(budgets == std::vector<index_t>{118, 82, 46, 10});
  Random random;
  CAPTURE(random.seed());
  for (index_t round = 0; round < 200; ++round) {
    const index_t layers = random.integer(1, 40);
    const index_t window = random.integer(0, 30);
    const index_t mean = window + random.integer(1, 300);
    const index_t beta = random.integer(1, 40);
    CAPTURE(layers, window, mean, beta);
    std::vector<index_t> all(static_cast<std::size_t>(layers));
    pyramid_budgets(mean, window, beta, all).or_throw();
    const index_t sum = std::accumulate(all.begin(), all.end(), index_t{0});
    REQUIRE(sum <= mean * layers);
    REQUIRE(sum > (mean - 1) * layers);
    for (std::size_t l = 0; l < all.size(); ++l) {
      REQUIRE(all[l] >= window + 1);
      if (l > 0) REQUIRE(all[l] <= all[l - 1]);
    }
  }
  check_invalid(pyramid_budgets(8, 8, 20, budgets), {"mean = 8", "window = 8"});
  check_invalid(pyramid_budgets(64, -1, 20, budgets), {"window = -1"});
  check_invalid(pyramid_budgets(64, 8, 0, budgets), {"beta = 0"});
}

TEST_CASE("ragged heads: budgets for each, lengths that differ, and the same choice as a cache of that head alone") {
  Random random;
  CAPTURE(random.seed());
  using Cache = OwningCache<float, float, Granularity::per_head_ragged>;
  const Shape one{.query_heads = 1, .kv_heads = 1, .head_dim = 8};
  Cache memory(shape, 40);
  OwningCache<float> alone[2] = {OwningCache<float>(one, 40), OwningCache<float>(one, 40)};
  const SnapKVOptions<> options{.budget = {.tokens = 12}, .n_recent_queries = 3, .n_recent_kv = 3};
  SnapKV<> policy(shape, options);
  SnapKV<> own[2] = {SnapKV<>(one, options), SnapKV<>(one, options)};
  Workspace work(policy.workspace_size(40));
  for (position_t t = 0; t < 80; ++t) {
    const std::vector<float> rows = random.normals(16);
    const std::vector<float> queries = random.normals(16);
    memory.append(rows, rows, t).or_throw();
    policy.observe_rotated(queries, t).or_throw();
    for (std::size_t h = 0; h < 2; ++h) {
      const auto part = [&](const std::vector<float>& all) { return std::span(all).subspan(8 * h, 8); };
      alone[h].append(part(rows), part(rows), t).or_throw();
      own[h].observe_rotated(part(queries), t).or_throw();
    }
    if (memory.view().num_tokens() < 30) continue;
    const index_t keep[] = {random.integer(4, 28), random.integer(4, 28)};
    KeepPlan plan;
    std::vector<float> scores(static_cast<std::size_t>(2 * memory.view().num_tokens()));
    const ScoreMatrix matrix{scores.data(), 2, memory.view().num_tokens()};
    REQUIRE(policy.score(memory.view(), matrix, work).ok());
    policy.select(memory.view(), matrix, work, plan, std::span<const index_t>(keep)).or_throw();
    for (index_t h = 0; h < 2; ++h) {
      auto& view = alone[h].view();
      KeepPlan single;
      CHECK_FALSE(policy.plan_free(view, 1, work, single).ok());  // another shape
      std::vector<float> own_scores(static_cast<std::size_t>(view.num_tokens()));
      const ScoreMatrix own_matrix{own_scores.data(), 1, view.num_tokens()};
      REQUIRE(own[h].score(view, own_matrix, work).ok());
      own[h].select(view, own_matrix, work, single, keep[h]).or_throw();
      REQUIRE(to_vector(plan.kept(h)) == to_vector(single.kept(0)));
      REQUIRE(plan.tokens_before(h) == view.num_tokens());
      REQUIRE(plan.num_evicted(h) == single.num_evicted(0));
      compact(view, single).or_throw();
      own[h].commit(single).or_throw();
    }
    compact(memory.view(), plan).or_throw();
    policy.commit(plan).or_throw();
    for (index_t h = 0; h < 2; ++h) {
      REQUIRE(memory.view().num_tokens(h) == alone[h].view().num_tokens());
      for (index_t s = 0; s < memory.view().num_tokens(h); ++s) {
        REQUIRE(memory.view().position(h, s) == alone[h].view().position(0, s));
        for (index_t d = 0; d < 8; ++d)
          REQUIRE(memory.view().keys(h, s, 1, nullptr).row(0)[d] == alone[h].view().keys(0, s, 1, nullptr).row(0)[d]);
      }
    }
  }
  const index_t short_list[] = {1};
  KeepPlan plan;
  std::vector<float> scores(static_cast<std::size_t>(2 * memory.view().num_tokens()));
  const ScoreMatrix matrix{scores.data(), 2, memory.view().num_tokens()};
  check_invalid(policy.select(memory.view(), matrix, work, plan, std::span<const index_t>(short_list)),
                {"keep has 1", "2 KV heads"});
}

TEST_CASE("ggml byte strides that are no whole elements are refused by name and value") {
  std::vector<float> memory(64);
  check_invalid(ggml_plane<float>(memory.data(), 8, 2, 4, 4, 32, 66).status(), {"token = 66", "multiples of 4"});
  check_invalid(ggml_plane<float>(memory.data(), 8, 2, 4, 2, 32, 64).status(), {"dim = 2"});
  check_invalid(ggml_plane<float>(reinterpret_cast<char*>(memory.data()) + 2, 8, 2, 4, 4, 32, 64).status(),
                {"data", "aligned"});
  CHECK(ggml_plane<float>(memory.data(), 8, 2, 4, 4, 32, 64).ok());
}

TEST_CASE("a page that the pool does not have is refused when a token is appended there, with nothing changed") {
  std::vector<float> memory(4 * 2 * 2 * 4 * 8);
  std::int32_t pages[] = {1, -1, 7};
  const Planes<float> planes = flashinfer_planes(memory.data(), PageLayout::nhd, 2, 8, {pages, 3, 4, 4});
  auto cache = PlaneCache<float>::make(planes).or_throw();
  cache.append_run(0, 4).or_throw();
  const std::uint64_t epoch = cache.epoch();
  check_invalid(cache.append(4), {"keys.pages[1] = -1"});
  pages[1] = 3;
  check_invalid(cache.append_run(4, 5), {"keys.pages[2] = 7", "num_pages = 4"});
  CHECK(cache.epoch() == epoch);
  CHECK(cache.num_tokens() == 4);
  cache.append_run(4, 4).or_throw();
}

TEST_CASE("[I1] two sequences over one pool of pages: a plan for one is refused by the other") {
  std::vector<float> memory(8 * 2 * 2 * 4 * 8);
  const std::int32_t first[] = {0, 1};
  const std::int32_t second[] = {4, 5};
  const auto make = [&](const std::int32_t* ids) {
    return PlaneCache<float>::make(flashinfer_planes(memory.data(), PageLayout::nhd, 2, 8, {ids, 2, 4, 8})).or_throw();
  };
  auto a = make(first);
  auto b = make(second);
  a.append_run(0, 8).or_throw();
  b.append_run(0, 8).or_throw();
  const Slots kept{0, 5, 6, 7};
  const std::span<const slot_t> sets[] = {kept};
  KeepPlan plan;
  plan.assign(a, sets).or_throw();
  check_error(compact(b, plan), StatusCode::stale_plan, {"another state"});
  compact(a, plan).or_throw();
  check_error(compact(a, plan), StatusCode::stale_plan, {"another state"});
}

TEST_CASE("a ragged cache takes a set for each head, made for the lengths that they have", "[A7]") {
  OwningCache<float, float, Granularity::per_head_ragged> memory(shape, 12);
  auto& cache = memory.view();
  cache.append_run(0, 10).or_throw();
  const Slots eight{0, 1, 2, 3, 4, 5, 6, 7};
  const Slots three{0, 1, 2};
  const std::span<const slot_t> both[] = {eight, three};
  const std::span<const slot_t> single[] = {three};
  KeepPlan plan;
  plan.assign(cache, both).or_throw();
  compact(cache, plan).or_throw();
  check_invalid(plan.assign(cache, single), {"sets = 1", "2 KV heads"});
  check_invalid(
      plan.assign(cache, std::span<const std::span<const slot_t>>(std::vector<std::span<const slot_t>>{three, eight})),
      {"set 1", "below 3"});
  plan.start(cache.epoch(), cache.num_tokens(), {});
  plan.add_set(1, 8)[0] = 0;
  plan.add_set(1, 8)[0] = 7;  // by hand, for a head that has 3
  check_error(compact(cache, plan), StatusCode::stale_plan, {"head 1", "8", "3"});
  CHECK(cache.num_tokens(1) == 3);
}

TEST_CASE("what commit would refuse, evict refuses before a row has moved") {
  auto memory = filled(8, 12);
  RecentWindow<> policy(shape, {.budget = {.max = 9, .min = 6, .counts_prefix = true}, .n_prefix = 0});
  policy.prefill_tokens(8).or_throw();
  Workspace work(policy.workspace_size(12));
  KeepPlan three_sets;
  three_sets.start(1, 4, {0, 4});
  for (index_t s = 0; s < 3; ++s) three_sets.add_set(1, 4)[0] = 0;
  check_invalid(policy.commit(three_sets), {"3 sets", "shape.kv_heads = 2"});
  const auto before = memory;
  memory.view().append(8).or_throw();
  policy.observe({}, 8).or_throw();
  evict(policy, memory.view(), work).or_throw();
  memory = before;
  memory.view().append(9).or_throw();
  policy.observe({}, 9).or_throw();
  const Result<EvictionReport> again = evict(policy, memory.view(), work);
  CHECK((again.ok() || memory.view().num_tokens() == 9));
  check_invalid(policy.prefill_tokens(std::numeric_limits<index_t>::max()), {"tokens = ", "no position"});
  SnapKV<> needs(shape, {.budget = {.tokens = 8}, .n_recent_queries = 2, .n_recent_kv = 2});
  check_invalid(needs.prefill_rotated(QueryView::token_major(nullptr, 2, 2, 8), work), {"queries.data is null"});
}

TEST_CASE("vLLM's layout needs the number of pages: without it no cache is made") {
  std::vector<float> memory(512);
  const std::int32_t ids[] = {0};
  check_invalid(PlaneCache<float>::make(vllm_planes(memory.data(), PageLayout::nhd, 2, 8, {ids, 1, 4, 0})).status(),
                {"values.base is null"});
}

TEST_CASE("[I3] keys of a pinned prefix are never turned", "[I3]") {
  OwningCache<float> memory(shape, 8, {.positions = PositionMode::cache_relative});
  auto& cache = memory.view();
  cache.append_run(0, 6).or_throw();
  const Slots kept{0, 2, 3, 4, 5};
  const std::span<const slot_t> sets[] = {kept};
  KeepPlan plan;
  plan.assign(cache, sets).or_throw();
  compact(cache, plan).or_throw();
  cache.set_pinned_prefix(2).or_throw();
  const RopeTable rope({.head_dim = 8});
  Workspace work(realign_workspace_size(8));
  check_error(realign_to_slots(cache, rope, work), StatusCode::unsupported, {"slot 1", "pinned prefix of 2"});
  check_error(switch_rope(cache, rope, rope, work), StatusCode::unsupported, {"pinned prefix of 2"});
  cache.set_pinned_prefix(1).or_throw();
  realign_to_slots(cache, rope, work).or_throw();
  OwningCache<float> rotated(shape, 8);
  rotated.view().append_run(0, 4).or_throw();
  const SnapKV<> policy(shape, {.budget = {.tokens = 8}, .n_recent_queries = 2, .n_recent_kv = 2}, rope);
  Workspace scratch(policy.workspace_size(8));
  check_error(policy.score(RotatedKeys(rotated.view(), rope), {nullptr, 2, 4}, scratch).status(), StatusCode::unsupported,
              {"unrotated_keys only"});
}
