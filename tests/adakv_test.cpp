// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

// Budgets that differ: over the heads of a layer (AdaKV), over layers (PyramidKV).

#include "beaconkv/policy/adakv.hpp"

#include <numeric>
#include <vector>

#include "beaconkv/policy/pyramidkv.hpp"
#include "support/catch.hpp"
#include "support/policies.hpp"

namespace {

using namespace beaconkv;
using namespace beaconkv::test;

using Ragged = OwningCache<float, float, Granularity::per_head_ragged>;
constexpr auto all_compete = [](index_t, index_t) { return true; };

/// Rows of equally many scores.
std::vector<index_t> budgets_of(std::vector<std::vector<float>> rows, index_t floor, index_t total) {
  const auto heads = static_cast<index_t>(rows.size());
  const auto tokens = static_cast<index_t>(rows[0].size());
  std::vector<float> flat;
  for (const auto& row : rows) flat.insert(flat.end(), row.begin(), row.end());
  std::vector<index_t> out(at(heads), -1);
  check_workspace(
      head_budgets_workspace_size(heads, tokens),
      [&](Workspace& work) {
        return head_budgets({flat.data(), heads, tokens}, all_compete, floor, total, out, work);
      },
      [] {});
  return out;
}

/// A policy whose scores are given, by position.
struct GivenByPosition {
  std::vector<std::vector<float>> of_head{};

  [[nodiscard]] Status validate(const Shape&) const { return {}; }
  template <CacheReader Cache>
  [[nodiscard]] Result<ScoreReport> score(const Cache& cache, const Observations& seen, Range candidates, ScoreMatrix out,
                                          Workspace&) const {
    for (index_t h = 0; h < out.heads; ++h)
      for (index_t j = candidates.first; j < candidates.last; ++j)
        out.row(h)[at(j)] = of_head[at(seen.first_query_head + h)][at(static_cast<index_t>(cache.position(h, j)))];
    return ScoreReport{};
  }
  [[nodiscard]] WorkspaceSize workspace_size(const Shape&, index_t, index_t) const { return {}; }
};
using Given = EvictionPolicy<NoQueries, GivenByPosition, FixedBudget>;

std::vector<position_t> positions_in(const Ragged::View& cache, index_t head) {
  std::vector<position_t> out;
  for (index_t j = 0; j < cache.num_tokens(head); ++j) out.push_back(cache.position(head, j));
  return out;
}

}  // namespace

TEST_CASE("[E11] heads share a budget: the best of all, no head below its floor, the sum exact", "[E11]") {
  const std::vector<float> strong{9, 8, 7, 6, 5, 4};
  const std::vector<float> weak{3, 2, 1, 0, 0, 0};
  CHECK(budgets_of({strong, weak}, 1, 8) == std::vector<index_t>{6, 2});
  CHECK(budgets_of({strong, weak}, 3, 8) == std::vector<index_t>{5, 3});
  CHECK(budgets_of({weak, strong}, 1, 8) == std::vector<index_t>{2, 6});
  CHECK(budgets_of({strong, weak}, 4, 8) == std::vector<index_t>{4, 4});
  // Of equal scores the lower slot, then the lower head: heads take turns.
  CHECK(budgets_of({std::vector<float>(6), std::vector<float>(6)}, 1, 8) == std::vector<index_t>{4, 4});
  CHECK(budgets_of({std::vector<float>(6), std::vector<float>(6)}, 0, 7) == std::vector<index_t>{4, 3});
  CHECK(budgets_of({std::vector<float>(6), std::vector<float>(6)}, 0, 0) == std::vector<index_t>{0, 0});
  CHECK(budgets_of({strong, weak}, 0, 12) == std::vector<index_t>{6, 6});
  CHECK(budgets_of({strong, weak}, 9, 100) == std::vector<index_t>{6, 6});
  // A head of NaN keeps its floor, no more.
  CHECK(budgets_of({std::vector<float>(6, nan_float()), weak}, 1, 7) == std::vector<index_t>{1, 6});

  // The whole way: two heads, 8 tokens in all, by scores that a policy forms; the rows of the ragged cache say what is left.
  for (const auto& [safeguard, expected] :
       {std::pair{0.25, std::vector<index_t>{6, 2}}, std::pair{0.75, std::vector<index_t>{5, 3}}}) {
    const Shape shape{2, 2, 4};
    const Given base = require_value(Given::make(
        shape,
        {.scorer = {{strong, weak}}, .schedule = {.max = 6, .min = 4, .counts_prefix = true}, .protection = {.n_prefix = 0}}));
    auto policy = require_value(AdaKV<Given>::make(base, {.safeguard = safeguard}));
    Ragged cache(shape, 6);
    Workspace work(policy.workspace_size(6));
    for (position_t p = 0; p < 6; ++p) {
      REQUIRE_FALSE(policy.due(cache.view()));
      require_ok(cache.append(std::vector<float>(8), std::vector<float>(8), p));
      require_ok(policy.observe({}, p));
    }
    REQUIRE(policy.due(cache.view()));
    require_value(evict(policy, cache.view(), work));
    REQUIRE_FALSE(policy.due(cache.view()));
    index_t offset = 0;
    for (index_t h = 0; h < 2; ++h) {
      REQUIRE(cache.view().num_tokens(h) == expected[at(h)]);
      for (index_t j = 0; j < expected[at(h)]; ++j) REQUIRE(cache.view().position(h, j) == j);
      offset += cache.view().num_tokens(h);
    }
    REQUIRE(offset == 8);
  }
}

TEST_CASE("AdaKV equals its definition: floors, then the best of all heads; protected tokens on top", "[adakv]") {
  Random random;
  CAPTURE(random.seed());
  for (int trial = 0; trial < 120; ++trial) {
    CAPTURE(trial);
    const index_t heads = random.integer(1, 4);
    const Shape shape{heads, heads, 4};
    const index_t prefix = random.integer(0, 3);
    const index_t recent = random.integer(0, 4);
    const index_t keep = prefix + recent + random.integer(1, 20);
    const double safeguard = random.unit();
    GivenByPosition scores;
    for (index_t h = 0; h < heads; ++h) {
      scores.of_head.push_back(random.normals(200, random.uniform(0.2F, 3)));
      for (float& x : scores.of_head.back())
        if (random.integer(0, 4) == 0) x = std::round(x);  // ties
    }
    const Given base =
        require_value(Given::make(shape, {.scorer = scores,
                                          .schedule = {.max = keep + random.integer(1, 9), .min = keep, .counts_prefix = true},
                                          .protection = {.n_prefix = prefix, .n_recent_kv = recent}}));
    auto policy = require_value(AdaKV<Given>::make(base, {.safeguard = safeguard}));
    Ragged cache(shape, 200);
    Workspace work(policy.workspace_size(200));
    index_t evictions = 0;
    for (position_t p = 0; p < 90; ++p) {
      require_ok(cache.append(std::vector<float>(at(4 * heads)), std::vector<float>(at(4 * heads)), p));
      require_ok(policy.observe({}, p));
      if (!policy.due(cache.view())) continue;
      ++evictions;
      std::vector<std::vector<position_t>> before;
      for (index_t h = 0; h < heads; ++h) before.push_back(positions_in(cache.view(), h));
      const std::int64_t allocations = allocations_of([&] { evict(policy, cache.view(), work).or_throw(); });
      REQUIRE(allocations == 0);

      // Slow and obvious: a list of all candidates of all heads, best first.
      struct Candidate {
        float score;
        index_t slot;
        index_t head;
      };
      std::vector<std::vector<position_t>> kept(at(heads));
      std::vector<Candidate> rest;
      index_t left = heads * keep;
      for (index_t h = 0; h < heads; ++h) {
        const auto n = static_cast<index_t>(before[at(h)].size());
        std::vector<Candidate> own;
        for (index_t j = 0; j < n; ++j) {
          const position_t position = before[at(h)][at(j)];
          if (position >= prefix && j < n - recent) {
            own.push_back({scores.of_head[at(h)][at(position)], j, h});
            continue;
          }
          kept[at(h)].push_back(position);
          --left;
        }
        std::stable_sort(own.begin(), own.end(), [](const Candidate& a, const Candidate& b) { return a.score > b.score; });
        const auto floor = std::max<index_t>(0, static_cast<index_t>(static_cast<double>(keep) * safeguard) - prefix - recent);
        for (std::size_t i = 0; i < own.size(); ++i) {
          if (static_cast<index_t>(i) >= floor) {
            rest.push_back(own[i]);
            continue;
          }
          kept[at(h)].push_back(before[at(h)][at(own[i].slot)]);
          --left;
        }
      }
      std::sort(rest.begin(), rest.end(), [](const Candidate& a, const Candidate& b) {
        return a.score != b.score ? a.score > b.score : (a.slot != b.slot ? a.slot < b.slot : a.head < b.head);
      });
      for (index_t i = 0; i < left; ++i)
        kept[at(rest[at(i)].head)].push_back(before[at(rest[at(i)].head)][at(rest[at(i)].slot)]);
      index_t sum = 0;
      for (index_t h = 0; h < heads; ++h) {
        std::sort(kept[at(h)].begin(), kept[at(h)].end());
        REQUIRE(positions_in(cache.view(), h) == kept[at(h)]);
        sum += cache.view().num_tokens(h);
      }
      REQUIRE(sum == heads * keep);
    }
    REQUIRE(evictions > 5);
  }
}

TEST_CASE("AdaKV says when it will be due, and evicts through a Sequence", "[adakv]") {
  Random random;
  CAPTURE(random.seed());
  const auto policy = require_value(AdaKV<TOVA<>>::make(require_value(TOVA<>::make(
      small_shape, {.budget = {.max = 16, .min = 12, .counts_prefix = true}, .head_scope = HeadScope::group}, small_rope()))));
  Stream stream = small_stream(random);
  std::vector<Ragged> memory(2, Ragged(small_shape, 80));
  std::vector<Ragged::View> views;
  for (Ragged& m : memory) views.push_back(m.view());
  using Layers = Sequence<AdaKV<TOVA<>>, Ragged::View>;
  check_error(Layers::make({policy, policy}, views, {.capacity = 80, .heads_per_step = 1}).status(), StatusCode::unsupported,
              {"heads_per_step = 1"});
  Layers layers = require_value(Layers::make({policy, policy}, views, {.capacity = 80}));
  index_t evictions = 0;
  bool uneven = false;
  index_t announced = layers.tokens_until_due(100);
  REQUIRE(announced == 16);
  for (position_t p = 0; p < 100; ++p) {
    const Token token = stream.next(p);
    for (index_t l = 0; l < 2; ++l) {
      Ragged::View& cache = layers.cache(l);
      for (index_t h = 0; h < 2; ++h) {
        std::copy_n(token.keys.begin() + h * 16, 16, cache.key_plane().row(h, cache.num_tokens(h)));
        std::copy_n(token.values.begin() + h * 16, 16, cache.value_plane().row(h, cache.num_tokens(h)));
      }
      require_ok(cache.append(p));
      require_ok(layers.policy(l).observe(token.queries, p));
    }
    --announced;
    const SequenceReport report = require_value(layers.evict_where_due());
    REQUIRE((report.layers > 0) == (announced == 0));
    if (report.layers == 0) continue;
    ++evictions;
    for (index_t l = 0; l < 2; ++l) {
      const index_t a = layers.cache(l).num_tokens(0);
      const index_t b = layers.cache(l).num_tokens(1);
      REQUIRE(a + b == 24);
      REQUIRE(std::min(a, b) >= 2);
      uneven = uneven || a != b;
    }
    announced = layers.tokens_until_due(100);
    REQUIRE(announced == 4);
  }
  REQUIRE(evictions == 22);
  REQUIRE(uneven);
}

TEST_CASE("AdaKV refuses what cannot work, by name and value", "[adakv]") {
  const TOVA<> together(small_shape, {.budget = {.max = 16, .min = 12}}, small_rope());
  check_error(AdaKV<TOVA<>>::make(together).status(), StatusCode::unsupported, {"policy", "all heads"});
  const TOVA<> base(small_shape, {.budget = {.max = 16, .min = 12}, .head_scope = HeadScope::group}, small_rope());
  check_invalid(AdaKV<TOVA<>>::make(base, {.safeguard = -0.1}).status(), {"safeguard = -0.1"});
  check_invalid(AdaKV<TOVA<>>::make(base, {.safeguard = 1.5}).status(), {"safeguard = 1.5"});
  const auto beaconkv = [](float credit) {
    return BeaconKV<>(small_shape,
                      {.budget = {.max = 16, .min = 12}, .n_recent_kv = 4, .orphan_credit = credit, .value_norm = true},
                      small_rope());
  };
  check_error(AdaKV<BeaconKV<>>::make(beaconkv(0.9F)).status(), StatusCode::unsupported, {"policy", "orphan_credit"});
  require_ok(AdaKV<BeaconKV<>>::make(beaconkv(0)).status());  // lengths of values are only a reading that is spared
  auto policy = require_value(AdaKV<TOVA<>>::make(base));
  Ragged cache(small_shape, 30);
  Workspace work(policy.workspace_size(30));
  for (position_t p = 0; p < 20; ++p) {
    require_ok(cache.append(std::vector<float>(32), std::vector<float>(32), p));
    require_ok(policy.observe(std::vector<float>(64), p));
  }
  KeepPlan plan;
  std::vector<float> flat(40);
  check_invalid(policy.select(cache.view(), {flat.data(), 2, 20}, work, plan, -1), {"keep = -1"});
  check_invalid(policy.select(cache.view(), {flat.data(), 2, 19}, work, plan, 4), {"scores are [2][19]"});
  check_invalid(policy.plan_free(cache.view(), -1, work, plan), {"count = -1"});
  REQUIRE(plan.sets() == 0);
  require_ok(policy.plan_free(cache.view(), 3, work, plan));
  REQUIRE(plan.num_evicted(0) + plan.num_evicted(1) == 6);
  require_ok(policy.plan_free(cache.view(), 0, work, plan));
  REQUIRE(plan.keeps_all());
  require_ok(policy.protect({0, 19}));
  check_invalid(policy.plan(cache.view(), work, plan), {"24 tokens of 2 heads", "40 are protected"});
}

TEST_CASE("AdaKV: scratch is asked for first, what is protected is told, and credits are refused", "[adakv]") {
  const Shape shape{4, 2, 16};
  const auto policy = AdaKV<Knorm<>>::make(Knorm<>(shape, {.budget = {.max = 48, .min = 32}})).or_throw();
  Random random;
  CAPTURE(random.seed());
  Ragged cache(shape, 64);
  for (position_t p = 0; p < 48; ++p) require_ok(cache.append(random.normals(32), random.normals(32), p));
  const std::vector<float> scores(96, 1.0F);
  std::vector<float> given = scores;
  KeepPlan plan;
  Workspace none(WorkspaceSize{});
  check_error(policy.select(cache.view(), {given.data(), 2, 48}, none, plan, 20), StatusCode::workspace_too_small,
              {"workspace"});
  REQUIRE(none.peak() == 0);

  AdaKV<Knorm<>> guarded = policy;
  require_ok(guarded.protect({0, 30}));
  require_ok(guarded.prefill_tokens(48));
  Workspace work(guarded.workspace_size(64));
  require_ok(guarded.plan_free(cache.view(), 28, work, plan));  // 18 of 48 tokens of each head may go
  REQUIRE(plan.num_evicted(0) + plan.num_evicted(1) <= 36);
  REQUIRE(plan.shortfall() == 28 - (plan.num_evicted(0) + plan.num_evicted(1)) / 2);

  BeaconKV<> credit(shape, BeaconKVOptions<>::with_orphan_credit({.max = 64}), RopeTable({.head_dim = 16}));
  check_error(AdaKV<BeaconKV<>>::make(credit).status(), StatusCode::unsupported, {"orphan_credit"});
}

TEST_CASE("[A8] PyramidKV: a policy for each layer, its budget around the mean, the window included", "[A8]") {
  Random random;
  CAPTURE(random.seed());
  auto layers = require_value(
      pyramid_layers<>(small_shape, {.budget = {.tokens = 64}, .n_recent_queries = 8, .n_recent_kv = 8}, 4, 20, small_rope()));
  REQUIRE(layers.size() == 4);
  const index_t nominal[] = {118, 82, 46, 10};
  Stream stream = small_stream(random);
  index_t kept = 0;
  for (std::size_t l = 0; l < 4; ++l) {
    REQUIRE(layers[l].schedule().tokens == nominal[l]);
    TestCache<> cache(small_shape, 100);
    Workspace work(layers[l].workspace_size(100));
    feed(layers[l], cache, stream, 100);
    KeepPlan plan;
    require_ok(layers[l].plan(cache.view(), work, plan));
    REQUIRE(plan.num_kept(0) == std::min<index_t>(nominal[l], 100));
    REQUIRE(plan.kept(0).back() == 99);
    kept += plan.num_kept(0);
  }
  REQUIRE(kept == 238);  // 18 that layer 0 cannot use go to nobody

  // The rule that knows the length gives them away.
  std::vector<index_t> budgets(4);
  require_ok(pyramid_budgets_of_prompt(64, 100, 8, 20, budgets));
  REQUIRE(budgets == std::vector<index_t>{92, 73, 55, 36});
  require_ok(pyramid_budgets_of_prompt(20, 100, 8, 20, budgets));  // the last would be below the window
  REQUIRE(budgets == std::vector<index_t>(4, 20));
  require_ok(pyramid_budgets_of_prompt(2.5, 100, 8, 20, budgets));  // halves to even
  REQUIRE(budgets == std::vector<index_t>(4, 2));
  require_ok(pyramid_budgets_of_prompt(3.5, 100, 8, 20, budgets));
  REQUIRE(budgets == std::vector<index_t>(4, 4));
  std::vector<index_t> one(1);
  require_ok(pyramid_budgets_of_prompt(64, 100, 8, 20, one));
  REQUIRE(one == std::vector<index_t>{64});
  for (int trial = 0; trial < 200; ++trial) {
    const index_t tokens = random.integer(1, 2000);
    const double mean = random.unit() * static_cast<double>(tokens);
    const index_t window = random.integer(0, 64);
    std::vector<index_t> all(at(random.integer(1, 40)));
    CAPTURE(tokens, mean, window, all.size());
    require_ok(pyramid_budgets_of_prompt(mean, tokens, window, random.integer(1, 30), all));
    const auto sum = static_cast<double>(std::accumulate(all.begin(), all.end(), index_t{0}));
    REQUIRE(std::abs(sum - mean * static_cast<double>(all.size())) <= 0.5 * static_cast<double>(all.size()) + 1e-6);
    for (std::size_t l = 0; l < all.size(); ++l) {
      REQUIRE(all[l] <= tokens);
      if (l > 0) REQUIRE(all[l] <= all[l - 1]);
    }
  }
  check_invalid(pyramid_budgets_of_prompt(101, 100, 8, 20, budgets), {"mean = 101", "tokens = 100"});
  check_invalid(pyramid_budgets_of_prompt(64, -1, 8, 20, budgets), {"tokens = -1"});
  check_invalid(pyramid_budgets_of_prompt(64, 100, -1, 20, budgets), {"window = -1"});
  check_invalid(pyramid_budgets_of_prompt(64, 100, 8, 0, budgets), {"beta = 0"});
  check_invalid(pyramid_budgets_of_prompt(static_cast<double>(nan_float()), 100, 8, 20, budgets), {"mean = "});
}

TEST_CASE("PyramidKV in a decoding loop: every layer goes from its own budget down by the same share", "[pyramid]") {
  using Policy = SnapKV<AttentionScorer, FixedBudget>;
  const auto layers = require_value(
      pyramid_layers<Policy>(small_shape, {.budget = {.max = 64, .min = 48}, .n_recent_queries = 8, .n_recent_kv = 8}, 4));
  const index_t budgets[] = {118, 82, 46, 10};
  for (std::size_t l = 0; l < 4; ++l) {
    REQUIRE(layers[l].schedule().max == budgets[l]);
    REQUIRE(layers[l].schedule().lower() == std::max<index_t>(9, budgets[l] - budgets[l] * 16 / 64));
  }
  check_invalid(pyramid_layers<>(small_shape, {.budget = {.tokens = 64}}, 0).status(), {"layers = 0"});
  check_invalid(pyramid_layers<>(small_shape, {.budget = {.tokens = 32}}, 4).status(), {"mean = 32", "window = 32"});
  check_invalid(pyramid_layers<>(small_shape, {.budget = {.tokens = 64}}, 4, 0).status(), {"beta = 0"});
}
