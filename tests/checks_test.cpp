// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

// What authors of inference engines run into, where it concerns several headers at once. The number is that of the check; those
// about one header are in its test. What the library refuses by design is tested to be refused.

#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "support/catch.hpp"
#include "support/policies.hpp"

namespace {

using namespace beaconkv;
using namespace beaconkv::test;

/// The scores of each head and slot, given from outside.
struct GivenScores {
  std::vector<std::vector<float>> of_head{};

  [[nodiscard]] Status validate(const Shape&) const { return {}; }
  template <CacheReader Cache>
  [[nodiscard]] Result<ScoreReport> score(const Cache&, const Observations&, Range candidates, ScoreMatrix out,
                                          Workspace&) const {
    ScoreReport report;
    for (index_t h = 0; h < out.heads; ++h)
      for (index_t j = candidates.first; j < candidates.last; ++j) {
        out.row(h)[at(j)] = of_head[at(h)][at(j)];
        report.num_non_finite += std::isnan(out.row(h)[at(j)]) ? 1 : 0;
      }
    return report;
  }
  [[nodiscard]] WorkspaceSize workspace_size(const Shape&, index_t, index_t) const { return {}; }
};
using Given = EvictionPolicy<NoQueries, GivenScores, FixedBudget>;

template <class PolicyT, class CacheT>
void fill_blank(PolicyT& policy, CacheT& cache, const Shape& shape, index_t tokens) {
  const std::vector<float> row(at(shape.kv_heads * shape.head_dim), 0.0F);
  for (index_t i = 0; i < tokens; ++i) {
    cache.append({policy.next_position(), {}, {}, row, row});
    require_ok(policy.observe({}, policy.next_position()));
  }
}

template <class CacheT>
std::vector<position_t> positions_of(const CacheT& cache, index_t head = 0) {
  std::vector<position_t> out;
  for (index_t s = 0; s < cache.view().num_tokens(); ++s) out.push_back(cache.view().position(head, s));
  return out;
}

}  // namespace

TEST_CASE("[A2] budgets are counts, so none is off by one", "[A2]") {
  const Shape shape{1, 1, 1};
  struct Size {
    index_t tokens, keep;
  };
  for (const Size s : {Size{732, 100}, Size{20000, 768}, Size{10, 1}, Size{100, 10}}) {
    CAPTURE(s.tokens, s.keep);
    RecentWindow<> policy(shape, {.budget = {.max = s.keep, .min = s.keep}, .n_prefix = 0});
    TestCache<> cache(shape, s.tokens);
    Workspace work(policy.workspace_size(s.tokens));
    fill_blank(policy, cache, shape, s.tokens);
    KeepPlan plan;
    require_ok(policy.plan(cache.view(), work, plan));
    REQUIRE(plan.num_kept(0) == s.keep);
    require_ok(policy.plan_free(cache.view(), s.tokens - s.keep, work, plan));
    REQUIRE(plan.num_kept(0) == s.keep);
  }
}

TEST_CASE("[A4] a cache under a budget does not grow while decoding", "[A4]") {
  Random random;
  CAPTURE(random.seed());
  const auto run = [&](const char* name, auto policy) {
    CAPTURE(name);
    Stream stream = small_stream(random);
    TestCache<> cache(small_shape, 160);
    Workspace work(policy.workspace_size(160));
    std::vector<float> queries;
    for (position_t p = 0; p < 100; ++p) {
      const Token token = stream.next(p);
      cache.append(token);
      queries.insert(queries.end(), token.queries.begin(), token.queries.end());
    }
    require_ok(policy.prefill(QueryView::token_major(queries.data(), 100, 4, 16), work));
    REQUIRE(policy.due(cache.view()));
    require_value(evict(policy, cache.view(), work));
    REQUIRE(cache.view().num_tokens() == 32);
    index_t compactions = 0;
    index_t peak = 0;
    for (position_t p = 100; p < 150; ++p) {
      feed(policy, cache, stream.next(p));
      peak = std::max(peak, cache.view().num_tokens());
      if (!policy.due(cache.view())) continue;
      require_value(evict(policy, cache.view(), work));
      REQUIRE(cache.view().num_tokens() == 32);
      ++compactions;
    }
    REQUIRE(peak == 40);
    REQUIRE(compactions == 50 / 8);
    REQUIRE(cache.view().num_tokens() == 34);
    REQUIRE(policy.next_position() == 150);
  };
  const FixedBudget fixed{.max = 40, .min = 32, .counts_prefix = true};
  run("SnapKV",
      SnapKV<>(small_shape, {.budget = {.tokens = 32, .interval = 8}, .n_recent_queries = 8, .n_recent_kv = 8}, small_rope()));
  run("BeaconKV",
      BeaconKV<>(small_shape, {.budget = fixed, .n_beacon = 4, .n_recent_queries = 4, .n_recent_kv = 8, .n_prefix = 0},
                 small_rope()));
  run("RecentWindow", RecentWindow<>(small_shape, {.budget = fixed, .n_prefix = 2}));
  run("RPC", RPC<AttentionScorer, FixedBudget>(
                 small_shape, {.budget = fixed, .n_recent_queries = 8, .n_recent_kv = 8, .n_prefix = 0}, small_rope()));
  run("RKV", require_value(RKV<RKVScorer, FixedBudget>::make(small_shape, {.budget = fixed, .n_prefix = 0}, small_rope())));
}

TEST_CASE("[A5] 476 tokens with an interval of 64 are 7 compactions", "[A5]") {
  RecentWindow<> policy(small_shape, {.budget = {.max = 32 + 64, .min = 32, .counts_prefix = true}, .n_prefix = 4});
  TestCache<> cache(small_shape, 100);
  Workspace work(policy.workspace_size(100));
  fill_blank(policy, cache, small_shape, 32);
  index_t compactions = 0;
  index_t since = 0;
  for (int i = 0; i < 476; ++i) {
    fill_blank(policy, cache, small_shape, 1);
    ++since;
    if (!policy.due(cache.view())) continue;
    REQUIRE(since == 64);
    since = 0;
    ++compactions;
    REQUIRE(require_value(evict(policy, cache.view(), work)).evicted == 64);
  }
  REQUIRE(compactions == 7);
}

TEST_CASE("[A6] a loop that evicts until the budget holds runs once at most", "[A6]") {
  Random random;
  CAPTURE(random.seed());
  for_each_policy([&](const char* name, auto policy) {
    CAPTURE(name);
    for (const index_t tokens : {small_budget - 1, small_budget, small_budget + 1, 2 * small_budget}) {
      auto own = policy;
      Stream stream = small_stream(random);
      TestCache<> cache(small_shape, 60);
      Workspace work(own.workspace_size(60));
      feed(own, cache, stream, tokens);
      index_t rounds = 0;
      while (cache.view().num_tokens() > small_budget && rounds < 5) {
        REQUIRE(require_value(evict(own, cache.view(), work)).evicted > 0);
        ++rounds;
      }
      REQUIRE(rounds == (tokens > small_budget ? 1 : 0));
    }
  });
}

TEST_CASE("[A8] budgets that differ by layer: each clamps to its sequence", "[A8]") {
  Random random;
  CAPTURE(random.seed());
  const index_t budgets[] = {118, 82, 46, 10};
  const index_t tokens = 100;
  Stream stream = small_stream(random);
  index_t kept = 0;
  for (const index_t budget : budgets) {
    CAPTURE(budget);
    SnapKV<> policy(small_shape, {.budget = {.tokens = budget}, .n_recent_queries = 8, .n_recent_kv = 8}, small_rope());
    TestCache<> cache(small_shape, tokens);
    Workspace work(policy.workspace_size(tokens));
    feed(policy, cache, stream, tokens);
    KeepPlan plan;
    require_ok(policy.plan(cache.view(), work, plan));
    REQUIRE(plan.num_kept(0) == std::min(budget, tokens));
    REQUIRE(plan.num_kept(0) >= 9);
    REQUIRE(plan.kept(0).back() == tokens - 1);
    REQUIRE(plan.kept(1).back() == tokens - 1);
    kept += plan.num_kept(0);
  }
  REQUIRE(kept == 100 + 82 + 46 + 10);  // what a layer does not use goes to nobody
}

TEST_CASE("[A9] two stages one after the other: 20 % of 100, then half of what is left", "[A9]") {
  Random random;
  CAPTURE(random.seed());
  SnapKV<> first(small_shape, {.budget = {.tokens = 80}, .n_recent_queries = 4, .n_recent_kv = 4}, small_rope());
  RecentWindow<> second(small_shape, {.budget = {.max = 41, .min = 40}, .n_prefix = 0});
  Stream stream = small_stream(random);
  TestCache<> cache(small_shape, 100);
  Workspace work(max(first.workspace_size(100), second.workspace_size(100)));
  feed(first, cache, stream, 100);
  require_ok(second.prefill_tokens(100));
  const EvictionReport one = require_value(evict(first, cache.view(), work));
  std::vector<slot_t> map(100);
  work.plan().old_to_new(0, map);
  const EvictionReport two = require_value(evict(second, cache.view(), work));
  REQUIRE(one.evicted + two.evicted == 60);
  REQUIRE(two.kept == 40);
  // The maps compose to where the original slots are now.
  std::vector<slot_t> map_two(80);
  work.plan().old_to_new(0, map_two);
  for (index_t slot = 0; slot < 100; ++slot) {
    const slot_t between = map[at(slot)];
    const slot_t now = between < 0 ? slot_t{-1} : map_two[at(between)];
    if (now >= 0) REQUIRE(cache.view().position(0, now) == slot);
  }
}

TEST_CASE("[A13] a window longer than the sequence", "[A13]") {
  Random random;
  CAPTURE(random.seed());
  Stream stream = small_stream(random);
  TestCache<> cache(small_shape, 20);
  SnapKV<> wide(small_shape, {.budget = {.tokens = 70}, .n_recent_queries = 64, .n_recent_kv = 64}, small_rope());
  Workspace work(wide.workspace_size(20));
  feed(wide, cache, stream, 14);
  const auto before = cache.state();
  REQUIRE(require_value(evict(wide, cache.view(), work)).evicted == 0);
  REQUIRE(cache.state() == before);
  KeepPlan plan;
  require_ok(wide.plan_free(cache.view(), 3, work, plan));  // nothing is free to go
  REQUIRE(plan.keeps_all());
  REQUIRE(plan.shortfall() == 3);
  check_invalid(
      SnapKV<>::make(small_shape, {.budget = {.tokens = 8}, .n_recent_queries = 64, .n_recent_kv = 64}, small_rope()).status(),
      {"n_recent_kv = 64", "budget.tokens = 8"});
  // 5 tokens, a window of 5, a budget of 5: a window that leaves no choice is refused; without one it is a no-op.
  check_invalid(SnapKV<>::make(small_shape, {.budget = {.tokens = 5}, .n_recent_kv = 5}, small_rope()).status(),
                {"n_recent_kv = 5", "budget.tokens = 5"});
  RecentWindow<> whole(small_shape, {.budget = {.max = 5, .min = 5}, .n_prefix = 0});
  TestCache<> five(small_shape, 8);
  fill_blank(whole, five, small_shape, 5);
  REQUIRE_FALSE(whole.due(five.view()));
  REQUIRE(require_value(evict(whole, five.view(), work)).evicted == 0);
}

TEST_CASE("[A14] a budget in bytes binds", "[A14]") {
  const Shape shape{.query_heads = 32, .kv_heads = 8, .head_dim = 128};
  OwningCache<float16> cache(shape, 8);
  REQUIRE(cache.view().bytes_per_token() == 4096);
  for (const auto& [bytes, tokens] : {std::pair<std::int64_t, index_t>{1 << 20, 256}, {(1 << 20) - 1, 255}}) {
    const index_t budget = require_value(tokens_in_bytes(bytes, cache.view().bytes_per_token()));
    REQUIRE(budget == tokens);
    RecentWindow<> policy(shape, {.budget = {.max = budget, .min = budget}, .n_prefix = 0});
    REQUIRE(policy.schedule().target({.tokens = 10000, .total = 10000}) == tokens);
  }
}

TEST_CASE("[B1] positions go on, whatever is retained: any policy, 300 tokens, a budget of 24", "[B1]") {
  Random random;
  CAPTURE(random.seed());
  for_each_policy([&](const char* name, auto policy) {
    CAPTURE(name);
    Stream stream = small_stream(random);
    TestCache<> cache(small_shape, 40);
    Workspace work(policy.workspace_size(40));
    for (int i = 0; i < 300; ++i) {
      feed(policy, cache, stream, 1);
      if (policy.due(cache.view())) require_value(evict(policy, cache.view(), work));
    }
    REQUIRE(policy.next_position() == 300);
    REQUIRE(cache.view().next_position() == 300);
    for (index_t h = 0; h < 2; ++h) {
      const std::vector<position_t> positions = positions_of(cache, h);
      REQUIRE(std::adjacent_find(positions.begin(), positions.end(), [](position_t a, position_t b) { return a >= b; }) ==
              positions.end());
      REQUIRE(positions.back() == 299);
    }
    feed(policy, cache, stream, 1);
    REQUIRE(policy.next_position() == 301);
  });
}

TEST_CASE("[B3] the first decoded token of a 9-token prompt is at position 9, in slot 9; after evicting 3, in slot 6", "[B3]") {
  Random random;
  CAPTURE(random.seed());
  BeaconKV<> policy(small_shape, {.budget = {.max = 100}, .n_recent_kv = 2, .n_prefix = 1}, small_rope());
  Stream stream = small_stream(random);
  TestCache<> cache(small_shape, 40);
  Workspace work(policy.workspace_size(40));
  std::vector<float> queries;
  for (position_t p = 0; p < 9; ++p) {
    const Token token = stream.next(p);
    cache.append(token);
    queries.insert(queries.end(), token.queries.begin(), token.queries.end());
  }
  require_ok(policy.prefill(QueryView::token_major(queries.data(), 9, 4, 16), work));
  auto plain = policy;
  TestCache<> plain_cache = cache;
  for (position_t p = 9; p < 12; ++p) {
    REQUIRE(plain.next_position() == p);
    REQUIRE(plain_cache.view().num_tokens() == p);
    feed(plain, plain_cache, stream.next(p));
    REQUIRE(plain_cache.view().position(0, p) == p);
  }
  KeepPlan plan;
  require_ok(policy.plan_free(cache.view(), 3, work, plan));
  require_ok(compact(cache.view(), plan));
  require_ok(policy.commit(plan));
  REQUIRE(policy.next_position() == 9);
  REQUIRE(cache.view().next_position() == 9);
  REQUIRE(cache.view().num_tokens() == 6);
  const Token token = stream.next(9);
  feed(policy, cache, token);
  REQUIRE(cache.view().position(0, 6) == 9);
  REQUIRE(cache.key(0, 6) == reference::row_of(token.keys.data(), 16));
}

TEST_CASE("[B4] [B5] a plan speaks of slots before the eviction, and maps them to those behind it", "[B4][B5]") {
  const Shape shape{1, 1, 1};
  // 10 tokens of which 2 to 5 score lowest.
  Given policy = require_value(Given::make(shape, {.scorer = {{{9, 9, 1, 1, 1, 1, 9, 9, 9, 9}}},
                                                   .schedule = {.max = 7, .min = 6},
                                                   .protection = {.n_prefix = 0, .n_recent_kv = 1}}));
  TestCache<> cache(shape, 12);
  for (position_t p = 0; p < 10; ++p) {
    cache.append({p, {}, {}, {static_cast<float>(100 + p)}, {0}});
    require_ok(policy.observe({}, p));
  }
  Workspace work(policy.workspace_size(12));
  KeepPlan plan;
  require_ok(policy.plan(cache.view(), work, plan));
  std::vector<Range> removed;
  plan.for_each_evicted_run(0, [&](Range r) { removed.push_back(r); });
  REQUIRE(removed == std::vector<Range>{{2, 6}});
  std::vector<slot_t> map(10);
  plan.old_to_new(0, map);
  REQUIRE(map == std::vector<slot_t>{0, 1, -1, -1, -1, -1, 2, 3, 4, 5});
  require_ok(compact(cache.view(), plan));
  for (std::size_t slot = 0; slot < map.size(); ++slot)
    if (map[slot] >= 0) REQUIRE(cache.key(0, map[slot])[0] == static_cast<double>(100 + slot));
}

TEST_CASE("[B6] the next position is the sequence's, whatever a layer's cache still holds", "[B6]") {
  RecentWindow<> full(small_shape, {.budget = {.max = 1000}, .n_prefix = 0});
  RecentWindow<> windowed(small_shape, {.budget = {.max = 500, .min = 500}, .n_prefix = 0});
  TestCache<> full_cache(small_shape, 400);
  TestCache<> trimmed(small_shape, 400);
  fill_blank(full, full_cache, small_shape, 400);
  fill_blank(windowed, trimmed, small_shape, 400);
  trimmed.view().truncate(0);
  REQUIRE(trimmed.view().num_tokens() == 0);
  REQUIRE(windowed.next_position() == 400);
  REQUIRE(trimmed.view().next_position() == 400);
  REQUIRE(full.next_position() == 400);
  check_error(windowed.observe({}, 0), StatusCode::out_of_order, {"position = 0", "400"});
  check_error(trimmed.view().append(0), StatusCode::out_of_order, {"position = 0", "400"});
}

TEST_CASE("[D1] [D3] NaN scores go first and are reported, and the order of the others is one", "[D1][D3]") {
  constexpr float nan_score = std::numeric_limits<float>::quiet_NaN();
  const Shape shape{1, 1, 1};
  const auto order_of = [&](const std::vector<float>& scores) {
    const auto n = static_cast<index_t>(scores.size());
    Given policy =
        require_value(Given::make(shape, {.scorer = {{scores}}, .schedule = {.max = 100}, .protection = {.n_prefix = 0}}));
    TestCache<> cache(shape, n);
    fill_blank(policy, cache, shape, n);
    Workspace work(policy.workspace_size(n));
    // Freeing one more each time shows who goes when.
    std::vector<slot_t> worst_first;
    KeepPlan plan;
    for (index_t count = 1; count < n; ++count) {
      require_ok(policy.plan_free(cache.view(), count, work, plan));
      for (slot_t s = 0; s < static_cast<slot_t>(n); ++s)
        if (!std::binary_search(plan.kept(0).begin(), plan.kept(0).end(), s) &&
            std::find(worst_first.begin(), worst_first.end(), s) == worst_first.end())
          worst_first.push_back(s);
      REQUIRE(plan.num_non_finite() == std::count_if(scores.begin(), scores.end(), [](float x) { return std::isnan(x); }));
    }
    worst_first.push_back(plan.kept(0)[0]);
    std::reverse(worst_first.begin(), worst_first.end());
    return worst_first;
  };
  REQUIRE(order_of({3, nan_score, 1, nan_score, 2}) == std::vector<slot_t>{0, 4, 2, 1, 3});
  REQUIRE(order_of({nan_score, nan_score, nan_score, 0, 0, 0}) == std::vector<slot_t>{3, 4, 5, 0, 1, 2});
  REQUIRE(order_of({0, 0, 0, nan_score, nan_score, nan_score}) == std::vector<slot_t>{0, 1, 2, 3, 4, 5});
  REQUIRE(order_of({-std::numeric_limits<float>::infinity(), nan_score, -0.0F, 0.0F}) == std::vector<slot_t>{2, 3, 0, 1});
}

TEST_CASE("[E2] memory that keeps one set for all heads goes by all of them", "[E2]") {
  const Shape shape{.query_heads = 2, .kv_heads = 2, .head_dim = 1};
  const GivenScores scores{{{9, 0, 0, 1}, {0, 8, 8, 0}}};
  const auto kept_in = [&](auto cache) {
    Given policy =
        require_value(Given::make(shape, {.scorer = scores, .schedule = {.max = 3, .min = 2}, .protection = {.n_prefix = 0}}));
    fill_blank(policy, cache, shape, 4);
    Workspace work(policy.workspace_size(4));
    KeepPlan plan;
    require_ok(policy.plan(cache.view(), work, plan));
    return std::pair{slots_of(plan.kept(0)), slots_of(plan.kept(1))};
  };
  const auto shared = kept_in(TestCache<float, float, Granularity::per_layer>(shape, 4));
  REQUIRE(shared.first == std::vector<slot_t>{0, 1});
  REQUIRE(shared.second == shared.first);
  const auto each = kept_in(TestCache<>(shape, 4));
  REQUIRE(each.first == std::vector<slot_t>{0, 3});
  REQUIRE(each.second == std::vector<slot_t>{1, 2});
}

TEST_CASE("[E3] [E11] heads that keep different numbers are refused by memory that cannot hold them, without filler keys",
          "[E3][E11]") {
  Random random;
  CAPTURE(random.seed());
  TestCache<float16> cache(small_shape, 8);
  Stream stream = small_stream(random);
  for (position_t p = 0; p < 8; ++p) cache.append(stream.next(p));
  const auto before = cache.state();
  const std::vector<slot_t> six{0, 1, 2, 3, 4, 5};
  const std::vector<slot_t> two{0, 1};
  const std::span<const slot_t> ragged[] = {six, two};
  KeepPlan plan;
  require_ok(plan.assign(cache.view(), ragged));  // as data it is fine: an engine may apply it by itself
  REQUIRE(plan.num_kept(0) + plan.num_kept(1) == 8);
  check_error(compact(cache.view(), plan), StatusCode::unsupported, {"head 1 keeps 2", "head 0 keeps 6"});
  REQUIRE(cache.state() == before);
  // No eviction writes anything into keys that was not there before: rows move as they are.
  SnapKV<> policy(small_shape, {.budget = {.tokens = 4}, .n_recent_queries = 1, .n_recent_kv = 1}, small_rope());
  Workspace work(policy.workspace_size(8));
  std::vector<reference::Row> keys;
  for (index_t s = 0; s < 8; ++s) keys.push_back(cache.key(1, s));
  const std::vector<float> queries = random.normals(8 * 64);
  require_ok(policy.prefill(QueryView::token_major(queries.data(), 8, 4, 16), work));
  require_value(evict(policy, cache.view(), work));
  for (index_t s = 0; s < 4; ++s) REQUIRE(cache.key(1, s) == keys[at(cache.view().position(1, s))]);
}

TEST_CASE("[E6] an eviction comes behind the prompt's own attention: observing and planning touch no key and no value",
          "[E6]") {
  Random random;
  CAPTURE(random.seed());
  for_each_policy([&](const char* name, auto policy) {
    CAPTURE(name);
    Stream stream = small_stream(random);
    TestCache<bfloat16> cache(small_shape, 60);
    Workspace work(policy.workspace_size(60));
    std::vector<float> queries;
    for (position_t p = 0; p < 60; ++p) {
      const Token token = stream.next(p);
      cache.append(token);
      queries.insert(queries.end(), token.queries.begin(), token.queries.end());
    }
    const auto before = cache.state();
    require_ok(policy.prefill(QueryView::token_major(queries.data(), 60, 4, 16), work));
    KeepPlan plan;
    require_ok(policy.plan(cache.view(), work, plan));
    REQUIRE(plan.num_evicted(0) == 60 - small_budget);
    REQUIRE(cache.state() == before);
    require_ok(compact(cache.view(), plan));
    REQUIRE_FALSE(cache.state() == before);
  });
}

TEST_CASE("[E12] a protected range survives two compactions under every policy", "[E12]") {
  Random random;
  CAPTURE(random.seed());
  for_each_policy([&](const char* name, auto policy) {
    CAPTURE(name);
    require_ok(policy.protect({10, 20}));
    Stream stream = small_stream(random);
    TestCache<> cache(small_shape, 60);
    Workspace work(policy.workspace_size(60));
    for (int compactions = 0; compactions < 2; ++compactions) {
      for (index_t i = 0; i < (compactions == 0 ? 40 : 20); ++i) {
        Token token = stream.next(policy.next_position());
        if (token.position >= 10 && token.position < 20)
          std::fill(token.keys.begin(), token.keys.end(), 0.0F);  // of little interest to anyone
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
