// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

// What holds for every policy: the contract of plan, apply and commit, protection, copies, errors, workspaces.

#include "beaconkv/policy/eviction_policy.hpp"

#include <limits>
#include <vector>

#include "support/catch.hpp"
#include "support/policies.hpp"

namespace {

using namespace beaconkv;
using namespace beaconkv::test;

constexpr index_t huge = std::numeric_limits<index_t>::max();

using PerLayer = TestCache<float16, float16, Granularity::per_layer>;

/// Scores that are given from outside: an adversary.
struct GivenScores {
  std::vector<float> of_slot{};

  [[nodiscard]] Status validate(const Shape&) const { return {}; }
  template <CacheReader Cache>
  [[nodiscard]] Result<ScoreReport> score(const Cache&, const Observations&, Range candidates, ScoreMatrix out,
                                          Workspace&) const {
    for (index_t h = 0; h < out.heads; ++h)
      for (index_t j = candidates.first; j < candidates.last; ++j) out.row(h)[at(j)] = of_slot[at(j)];
    return ScoreReport{};
  }
  [[nodiscard]] WorkspaceSize workspace_size(const Shape&, index_t, index_t) const { return {}; }
};

/// A scorer that is shown the queries of all heads together.
template <class ScorerT>
struct AllHeadsAtOnce : ScorerT {
  explicit AllHeadsAtOnce(const ScorerT& scorer) : ScorerT(scorer) {}
  [[nodiscard]] bool needs_all_heads() const noexcept { return true; }
};

/// Notes what it was told of the memory that is read next.
struct LookingAhead : AttentionScorer {
  struct Seen {
    index_t first_query_head = 0;
    index_t query_heads = 0;
    index_t lines = -1;  ///< -1: nothing is read next
    [[nodiscard]] bool operator==(const Seen&) const = default;
  };
  std::vector<Seen>* seen = nullptr;

  template <CacheReader Cache>
  [[nodiscard]] Result<ScoreReport> score(const Cache& cache, const Observations& o, Range candidates, ScoreMatrix out,
                                          Workspace& work) const {
    seen->push_back({o.first_query_head, o.query_heads, o.next == nullptr ? -1 : o.next->lines()});
    return AttentionScorer::score(cache, o, candidates, out, work);
  }
};

template <class PolicyT, class CacheT>
std::vector<std::vector<slot_t>> kept_of(const PolicyT& policy, const CacheT& cache, Workspace& work) {
  KeepPlan plan;
  require_ok(policy.plan(cache.view(), work, plan));
  std::vector<std::vector<slot_t>> out;
  for (index_t h = 0; h < cache.view().num_kv_heads(); ++h) out.push_back(slots_of(plan.kept(h)));
  return out;
}

}  // namespace

TEST_CASE("a plan is ascending, unique, of the budget's size, and holds prefix and window", "[policy]") {
  Random random;
  CAPTURE(random.seed());
  for_each_policy([&](const char* name, auto policy) {
    Stream stream = small_stream(random);
    TestCache<> cache(small_shape, 160);
    Workspace work(policy.workspace_size(160));
    const bool has_window = policy.observer().rows() >= 0 && std::string_view(name) != "RecentWindow";
    for (index_t i = 0; i < 120; ++i) {
      feed(policy, cache, stream, 1);
      const index_t n = cache.view().num_tokens();
      KeepPlan plan;
      require_ok(policy.plan(cache.view(), work, plan));
      CAPTURE(name, i, n);
      for (index_t h = 0; h < 2; ++h) {
        const std::vector<slot_t> kept = slots_of(plan.kept(h));
        REQUIRE(static_cast<index_t>(kept.size()) == std::min(n, small_budget));
        REQUIRE(std::adjacent_find(kept.begin(), kept.end(), [](slot_t a, slot_t b) { return a >= b; }) == kept.end());
        REQUIRE(kept.front() >= 0);
        REQUIRE(kept.back() < n);
        for (slot_t s = 0; s < static_cast<slot_t>(n); ++s)
          if (cache.view().position(h, s) < 2 || (has_window && s >= n - 4))
            REQUIRE(std::binary_search(kept.begin(), kept.end(), s));
      }
      if (policy.due(cache.view())) require_value(evict(policy, cache.view(), work));
    }
    REQUIRE(cache.view().num_tokens() < small_budget + 8);
    REQUIRE(policy.next_position() == 120);
  });
}

TEST_CASE("a cache within its budget keeps everything, bit for bit", "[policy]") {
  Random random;
  CAPTURE(random.seed());
  for_each_policy([&](const char* name, auto policy) {
    for (const index_t tokens : {index_t{0}, index_t{1}, small_budget - 1, small_budget}) {
      auto own = policy;
      Stream stream = small_stream(random);
      TestCache<> cache(small_shape, 40);
      Workspace work(own.workspace_size(40));
      feed(own, cache, stream, tokens);
      const auto before = cache.state();
      CAPTURE(name, tokens);
      const EvictionReport report = require_value(evict(own, cache.view(), work));
      REQUIRE(report.evicted == 0);
      REQUIRE(report.kept == tokens);
      REQUIRE(cache.state() == before);
      REQUIRE(work.plan().keeps_all());
    }
  });
}

TEST_CASE("an eviction may follow upon another without a token between", "[policy]") {
  Random random;
  CAPTURE(random.seed());
  for_each_policy([&](const char* name, auto policy) {
    Stream stream = small_stream(random);
    TestCache<> cache(small_shape, 40);
    Workspace work(policy.workspace_size(40));
    feed(policy, cache, stream, 40);
    CAPTURE(name);
    REQUIRE(require_value(evict(policy, cache.view(), work)).evicted == 40 - small_budget);
    const auto after_first = cache.state();
    REQUIRE(require_value(evict(policy, cache.view(), work)).evicted == 0);
    REQUIRE(require_value(evict(policy, cache.view(), work)).evicted == 0);
    REQUIRE(cache.state() == after_first);
  });
}

TEST_CASE("an eviction that finds the cache within its budget changes nothing in the policy either", "[policy]") {
  Random random;
  CAPTURE(random.seed());
  const auto check = [&](const char* name, auto policy) {
    Stream stream = small_stream(random);
    TestCache<> cache(small_shape, 40);
    Workspace work(policy.workspace_size(40));
    feed(policy, cache, stream, small_budget - 4);
    const auto before = answers_of(policy, cache, work);
    CAPTURE(name);
    require_value(evict(policy, cache.view(), work));
    REQUIRE(answers_of(policy, cache, work) == before);
  };
  for_each_policy(check);
  // RPC counts its evictions: one that took nothing is none.
  RPC<> growing(small_shape, {.budget = {.period = 40, .ratio = 2}, .n_recent_queries = 4, .n_recent_kv = 4}, small_rope());
  check("RPC", growing);
  Stream stream = small_stream(random);
  TestCache<> cache(small_shape, 40);
  Workspace work(growing.workspace_size(40));
  feed(growing, cache, stream, 10);
  require_value(evict(growing, cache.view(), work));
  REQUIRE(growing.schedule().evictions == 0);
}

TEST_CASE("[A6] nothing is due right after an eviction", "[policy]") {
  Random random;
  CAPTURE(random.seed());
  for_each_policy([&](const char* name, auto policy) {
    Stream stream = small_stream(random);
    TestCache<> cache(small_shape, 40);
    Workspace work(policy.workspace_size(40));
    index_t evictions = 0;
    for (index_t i = 0; i < 33; ++i) {
      feed(policy, cache, stream, 1);
      // An engine that evicts for as long as something is due.
      index_t rounds = 0;
      while (policy.due(cache.view()) && rounds < 3) {
        ++rounds;
        require_value(evict(policy, cache.view(), work));
      }
      CAPTURE(name, i);
      REQUIRE(rounds <= 1);
      evictions += rounds;
    }
    REQUIRE(evictions > 0);
  });
}

TEST_CASE("a policy knows how many tokens are left until an eviction is due", "[policy]") {
  Random random;
  CAPTURE(random.seed());
  const auto check = [&](const char* name, auto policy) {
    Stream stream = small_stream(random);
    TestCache<> cache(small_shape, 96);
    Workspace work(policy.workspace_size(96));
    std::vector<index_t> told;  // behind each token
    std::vector<index_t> due;   // which tokens led to an eviction
    for (index_t i = 0; i < 90; ++i) {
      feed(policy, cache, stream, 1);
      CAPTURE(name, i);
      if (policy.due(cache.view())) {
        REQUIRE(policy.tokens_until_due(cache.view(), 90) == 0);
        require_value(evict(policy, cache.view(), work));
        due.push_back(i);
      }
      told.push_back(policy.tokens_until_due(cache.view(), 90));
      for (const index_t most : {0, 1, 5}) REQUIRE(policy.tokens_until_due(cache.view(), most) == std::min(most, told.back()));
    }
    REQUIRE_FALSE(due.empty());
    index_t next = 0;  // in `due`
    for (index_t i = 0; i < due.back(); ++i) {
      next += due[at(next)] <= i ? 1 : 0;
      CAPTURE(name, i);
      REQUIRE(told[at(i)] == due[at(next)] - i);
    }
    policy.set_eviction(false);
    REQUIRE(policy.tokens_until_due(cache.view(), 70) == 70);
    REQUIRE(policy.tokens_until_due(cache.view(), -1) == 0);
  };
  for_each_policy(check);
  check("prefix to come", RecentWindow<>(small_shape, {.budget = {.max = 16}, .n_prefix = 40}));
  check("interval", SnapKV<>(small_shape, {.budget = {.tokens = 24, .interval = 10}, .n_recent_queries = 4, .n_recent_kv = 4},
                             small_rope()));
}

TEST_CASE("the layout of the memory has no say: equal scores and plans, bit for bit", "[policy]") {
  Random random;
  CAPTURE(random.seed());
  for_each_policy([&](const char* name, auto policy) {
    Stream stream = small_stream(random);
    std::vector<Token> tokens;
    for (position_t p = 0; p < 90; ++p) tokens.push_back(stream.next(p));
    std::vector<std::vector<std::uint64_t>> answers;
    for (const Layout layout : all_layouts) {
      auto own = policy;
      TestCache<> cache(small_shape, 96, layout);
      Workspace work(own.workspace_size(96));
      for (const Token& token : tokens) {
        feed(own, cache, token);
        if (own.due(cache.view())) require_value(evict(own, cache.view(), work));
      }
      answers.push_back(answers_of(own, cache, work));
    }
    CAPTURE(name);
    for (const auto& other : answers) REQUIRE(other == answers.front());
  });
}

TEST_CASE("queries before RoPE and behind it lead to the same plans", "[policy]") {
  Random random;
  CAPTURE(random.seed());
  for_each_policy([&](const char* name, auto policy) {
    Stream stream = small_stream(random);
    auto rotated = policy;
    TestCache<> cache(small_shape, 96);
    TestCache<> rotated_cache(small_shape, 96);
    Workspace work(policy.workspace_size(96));
    for (position_t p = 0; p < 90; ++p) {
      const Token token = stream.next(p);
      feed(policy, cache, token);
      rotated_cache.append(token);
      require_ok(rotated.observe_rotated(token.rotated, p));
      std::vector<float> a(at(2 * cache.view().num_tokens()), 0.0F);
      std::vector<float> b = a;
      require_value(policy.score(cache.view(), {a.data(), 2, cache.view().num_tokens()}, work));
      require_value(rotated.score(rotated_cache.view(), {b.data(), 2, cache.view().num_tokens()}, work));
      double worst = 0;
      for (std::size_t i = 0; i < a.size(); ++i)
        worst = std::max(worst, std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i])));
      const float top = *std::max_element(a.begin(), a.end(), [](float x, float y) { return std::abs(x) < std::abs(y); });
      CAPTURE(name, p);
      REQUIRE(worst <= 2e-5 * std::abs(static_cast<double>(top)));
      if (policy.due(cache.view())) {
        require_value(evict(policy, cache.view(), work));
        require_ok(compact(rotated_cache.view(), work.plan()).code() == StatusCode::stale_plan
                       ? Status()
                       : Status(StatusCode::stale_plan, "accepted"));
        KeepPlan same;
        std::vector<std::span<const slot_t>> sets;
        for (index_t h = 0; h < work.plan().sets(); ++h) sets.push_back(work.plan().kept(h));
        require_ok(same.assign(rotated_cache.view(), sets));
        require_ok(compact(rotated_cache.view(), same));
        require_ok(rotated.commit(same));
      }
      if (std::string_view(name) == "RKV, published order")
        break;  // its order goes by the scores, which a plan made by hand has not
    }
  });
}

TEST_CASE("planning changes neither the policy nor the cache", "[policy]") {
  Random random;
  CAPTURE(random.seed());
  for_each_policy([&](const char* name, auto policy) {
    Stream stream = small_stream(random);
    TestCache<> cache(small_shape, 40);
    Workspace work(policy.workspace_size(40));
    feed(policy, cache, stream, 40);
    const auto state = cache.state();
    const auto answers = answers_of(policy, cache, work);
    for (int i = 0; i < 3; ++i) static_cast<void>(kept_of(policy, cache, work));
    CAPTURE(name);
    REQUIRE(cache.state() == state);
    REQUIRE(answers_of(policy, cache, work) == answers);
  });
}

TEST_CASE("a copy of policy and cache is a fork: it plans the same, and then goes its own way", "[policy]") {
  Random random;
  CAPTURE(random.seed());
  for_each_policy([&](const char* name, auto policy) {
    CAPTURE(name);
    Stream stream = small_stream(random);
    TestCache<> cache(small_shape, 160);
    Workspace work(policy.workspace_size(160));
    for (index_t i = 0; i < 50; ++i) {
      feed(policy, cache, stream, 1);
      if (policy.due(cache.view())) require_value(evict(policy, cache.view(), work));
    }
    auto fork = policy;
    TestCache<> fork_cache = cache;
    const auto before = answers_of(policy, cache, work);
    REQUIRE(answers_of(fork, fork_cache, work) == before);
    // The fork decodes other tokens and evicts; the original does not notice.
    for (index_t i = 0; i < 40; ++i) {
      feed(fork, fork_cache, stream, 1);
      if (fork.due(fork_cache.view())) require_value(evict(fork, fork_cache.view(), work));
    }
    REQUIRE(answers_of(policy, cache, work) == before);
    REQUIRE(fork.next_position() == 90);
    // The same tokens to the original and to a second fork lead to the same state.
    auto twin = policy;
    TestCache<> twin_cache = cache;
    for (index_t i = 0; i < 40; ++i) {
      const Token token = stream.next(policy.next_position());
      feed(policy, cache, token);
      feed(twin, twin_cache, token);
      if (policy.due(cache.view())) require_value(evict(policy, cache.view(), work));
      if (twin.due(twin_cache.view())) require_value(evict(twin, twin_cache.view(), work));
    }
    REQUIRE(answers_of(twin, twin_cache, work) == answers_of(policy, cache, work));
  });
}

TEST_CASE("an assignment of policy and cache goes back to a saved state", "[policy]") {
  Random random;
  CAPTURE(random.seed());
  for_each_policy([&](const char* name, auto policy) {
    CAPTURE(name);
    Stream stream = small_stream(random);
    TestCache<> cache(small_shape, 160);
    Workspace work(policy.workspace_size(160));
    for (index_t i = 0; i < 50; ++i) {
      feed(policy, cache, stream, 1);
      if (policy.due(cache.view())) require_value(evict(policy, cache.view(), work));
    }
    const auto saved = policy;
    const TestCache<> saved_cache = cache;
    const auto before = answers_of(policy, cache, work);
    std::vector<Token> tokens;
    for (position_t p = 50; p < 80; ++p) tokens.push_back(stream.next(p));
    const auto go_on = [&] {
      for (const Token& token : tokens) {
        feed(policy, cache, token);
        if (policy.due(cache.view())) require_value(evict(policy, cache.view(), work));
      }
      return answers_of(policy, cache, work);
    };
    const auto first_time = go_on();
    policy = saved;
    cache = saved_cache;
    REQUIRE(answers_of(policy, cache, work) == before);
    REQUIRE(go_on() == first_time);
  });
}

TEST_CASE("a plan of another state of the cache, or of another cache, is refused, and nothing changes", "[policy]") {
  Random random;
  CAPTURE(random.seed());
  for_each_policy([&](const char* name, auto policy) {
    CAPTURE(name);
    Stream stream = small_stream(random);
    TestCache<> cache(small_shape, 60);
    Workspace work(policy.workspace_size(60));
    feed(policy, cache, stream, 40);
    KeepPlan plan;
    require_ok(policy.plan(cache.view(), work, plan));

    TestCache<> other = cache;
    const auto other_before = other.state();
    check_error(compact(other.view(), plan), StatusCode::stale_plan, {"another state", "40"});
    REQUIRE(other.state() == other_before);

    feed(policy, cache, stream, 1);
    const auto before = cache.state();
    check_error(compact(cache.view(), plan), StatusCode::stale_plan, {"another state", "40", "41"});
    REQUIRE(cache.state() == before);

    // Applied once; a second time it is old.
    require_ok(policy.plan(cache.view(), work, plan));
    require_ok(compact(cache.view(), plan));
    const auto compacted = cache.state();
    check_error(compact(cache.view(), plan), StatusCode::stale_plan, {"another state"});
    REQUIRE(cache.state() == compacted);
  });
}

TEST_CASE("a plan is committed once", "[policy]") {
  Random random;
  CAPTURE(random.seed());
  for_each_policy([&](const char* name, auto policy) {
    CAPTURE(name);
    Stream stream = small_stream(random);
    TestCache<> cache(small_shape, 60);
    Workspace work(policy.workspace_size(60));
    feed(policy, cache, stream, 40);
    check_error(policy.commit(KeepPlan{}), StatusCode::stale_plan, {"empty"});
    KeepPlan plan;
    require_ok(policy.plan(cache.view(), work, plan));
    require_ok(compact(cache.view(), plan));
    require_ok(policy.commit(plan));
    const auto before = answers_of(policy, cache, work);
    check_error(policy.commit(plan), StatusCode::stale_plan, {"committed before"});
    REQUIRE(answers_of(policy, cache, work) == before);
  });
}

TEST_CASE("[A10] plan_free frees exactly so many, or says how many are missing", "[policy]") {
  Random random;
  CAPTURE(random.seed());
  for_each_policy([&](const char* name, auto policy) {
    Stream stream = small_stream(random);
    TestCache<> cache(small_shape, 40);
    PerLayer shared(small_shape, 40);
    Workspace work(policy.workspace_size(40));
    for (position_t p = 0; p < 20; ++p) {
      const Token token = stream.next(p);
      feed(policy, cache, token);
      shared.append(token);
    }
    const index_t window = std::string_view(name) == "RecentWindow" ? 0 : 4;
    const index_t most = 20 - 2 - window;
    for (index_t count = 0; count <= 25; ++count) {
      CAPTURE(name, count);
      const auto check = [&](const auto& c) {
        KeepPlan plan;
        require_ok(policy.plan_free(c.view(), count, work, plan));
        for (index_t h = 0; h < 2; ++h) REQUIRE(plan.num_evicted(h) == std::min(count, most));
        REQUIRE(plan.shortfall() == std::max<index_t>(0, count - most));
      };
      check(cache);
      check(shared);
    }
    KeepPlan plan;
    check_error(policy.plan_free(cache.view(), -1, work, plan), StatusCode::invalid_argument, {"count = -1"});
  });
}

TEST_CASE("[A7] [A1] however many are asked for, the newest token stays", "[policy]") {
  Random random;
  CAPTURE(random.seed());
  RecentWindow<> policy(small_shape, {.budget = {.max = huge, .min = huge}, .n_prefix = 0});
  Stream stream = small_stream(random);
  TestCache<> cache(small_shape, 100);
  Workspace work(policy.workspace_size(100));
  feed(policy, cache, stream, 91);
  REQUIRE_FALSE(policy.due(cache.view()));
  KeepPlan plan;
  require_ok(policy.plan_free(cache.view(), 91, work, plan));
  REQUIRE(slots_of(plan.kept(0)) == std::vector<slot_t>{90});
  REQUIRE(plan.shortfall() == 1);
  for (const index_t count : {index_t{2147483647}, huge}) {
    require_ok(policy.plan_free(cache.view(), count, work, plan));
    REQUIRE(slots_of(plan.kept(0)) == std::vector<slot_t>{90});
    REQUIRE(plan.shortfall() == count - 90);
  }
}

TEST_CASE("what protects more than the budget holds is refused by plan", "[policy]") {
  Random random;
  CAPTURE(random.seed());
  SECTION("a prompt") {
    BeaconKV<> policy(small_shape, {.budget = {.max = 20, .min = 16, .counts_prefix = true}, .n_recent_kv = 4}, small_rope());
    Stream stream = small_stream(random);
    TestCache<> cache(small_shape, 40);
    Workspace work(policy.workspace_size(40));
    const std::vector<float> queries = random.normals(30 * 64);
    for (position_t p = 0; p < 30; ++p) cache.append(stream.next(p));
    require_ok(policy.prefill(QueryView::token_major(queries.data(), 30, 4, 16), work));
    const auto before = cache.state();
    check_error(evict(policy, cache.view(), work).status(), StatusCode::invalid_argument, {"16", "30", "prefix 30"});
    REQUIRE(cache.state() == before);
  }
  SECTION("protected ranges") {
    RecentWindow<> policy(small_shape, {.budget = {.max = 20, .min = 16}, .n_prefix = 0});
    Stream stream = small_stream(random);
    TestCache<> cache(small_shape, 40);
    Workspace work(policy.workspace_size(40));
    feed(policy, cache, stream, 30);
    require_ok(policy.protect({2, 22}));
    const auto before = cache.state();
    check_error(evict(policy, cache.view(), work).status(), StatusCode::invalid_argument, {"16", "20", "protected"});
    REQUIRE(cache.state() == before);
  }
}

TEST_CASE("protection of exactly the budget is a plan: what is protected stays, and nothing else", "[policy]") {
  Random random;
  CAPTURE(random.seed());
  RecentWindow<> policy(small_shape, {.budget = {.max = 20, .min = 16}, .n_prefix = 0});
  Stream stream = small_stream(random);
  TestCache<> cache(small_shape, 40);
  Workspace work(policy.workspace_size(40));
  feed(policy, cache, stream, 30);
  require_ok(policy.protect({3, 10}));
  require_ok(policy.protect({15, 24}));
  const EvictionReport report = require_value(evict(policy, cache.view(), work));
  REQUIRE(report.kept == 16);
  REQUIRE(report.evicted == 14);
  REQUIRE(work.plan().shortfall() == 0);
  for (index_t s = 0; s < 16; ++s) REQUIRE(cache.view().position(0, s) == (s < 7 ? 3 + s : 8 + s));
}

TEST_CASE("[E12] a protected range survives every compaction, whatever the scores", "[policy]") {
  using Adversarial = EvictionPolicy<NoQueries, GivenScores, FixedBudget>;
  constexpr float inf = std::numeric_limits<float>::infinity();
  for (const float low : {0.0F, -inf, std::numeric_limits<float>::quiet_NaN()}) {
    CAPTURE(low);
    GivenScores scores{std::vector<float>(60, 5.0F)};
    for (std::size_t j = 10; j < 20; ++j) scores.of_slot[j] = low;
    Adversarial policy =
        require_value(Adversarial::make(small_shape, {.scorer = scores,
                                                      .schedule = {.max = 24, .min = 16, .counts_prefix = true},
                                                      .protection = {.n_prefix = 2, .n_recent_kv = 3}}));
    require_ok(policy.protect({10, 20}));
    TestCache<> cache(small_shape, 60);
    Workspace work(policy.workspace_size(60));
    position_t position = 0;
    for (int round = 0; round < 3; ++round) {
      for (index_t i = 0; i < (round == 0 ? 40 : 10); ++i) {
        cache.append({position, {}, {}, std::vector<float>(32), std::vector<float>(32)});
        require_ok(policy.observe({}, position++));
      }
      require_value(evict(policy, cache.view(), work));
      REQUIRE(cache.view().num_tokens() == 16);
      std::vector<position_t> kept;
      for (index_t s = 0; s < 16; ++s) kept.push_back(cache.view().position(0, s));
      for (position_t p = 10; p < 20; ++p) REQUIRE(std::binary_search(kept.begin(), kept.end(), p));
      REQUIRE(kept[0] == 0);
      REQUIRE(kept[1] == 1);
      for (position_t p = position - 3; p < position; ++p) REQUIRE(std::binary_search(kept.begin(), kept.end(), p));
    }
  }
}

TEST_CASE("protected ranges must be ascending and disjoint", "[policy]") {
  RecentWindow<> policy = small_recent_window();
  require_ok(policy.protect({10, 20}));
  require_ok(policy.protect({30, 40}));
  require_ok(policy.protect({20, 30}));  // next to both
  require_ok(policy.protect({0, 1}));
  check_error(policy.protect({5, 11}), StatusCode::invalid_argument, {"[5, 11)", "[10, 20)"});
  check_error(policy.protect({39, 50}), StatusCode::invalid_argument, {"[39, 50)", "[30, 40)"});
  check_error(policy.protect({12, 13}), StatusCode::invalid_argument, {"[12, 13)", "[10, 20)"});
  check_error(policy.protect({0, 100}), StatusCode::invalid_argument, {"[0, 100)", "overlaps"});
  check_error(policy.protect({7, 7}), StatusCode::invalid_argument, {"[7, 7)"});
  check_error(policy.protect({9, 8}), StatusCode::invalid_argument, {"[9, 8)"});
  check_error(policy.protect({-1, 3}), StatusCode::invalid_argument, {"[-1, 3)"});
}

TEST_CASE("ranges that are protected late, in any order, hold for each head by position", "[policy]") {
  Random random;
  CAPTURE(random.seed());
  BeaconKV<> policy = small_beaconkv();
  Stream stream = small_stream(random);
  TestCache<> cache(small_shape, 160);
  Workspace work(policy.workspace_size(160));
  std::vector<std::vector<position_t>> protected_now(2);
  for (index_t i = 0; i < 140; ++i) {
    feed(policy, cache, stream, 1);
    if (policy.due(cache.view())) require_value(evict(policy, cache.view(), work));
    if (i == 60) {
      for (const Range r : {Range{50, 54}, Range{20, 30}, Range{3, 10}}) {
        require_ok(policy.protect(r));
        for (index_t h = 0; h < 2; ++h)
          for (index_t s = 0; s < cache.view().num_tokens(); ++s) {
            const position_t p = cache.view().position(h, s);
            if (r.first <= p && p < r.last) protected_now[at(h)].push_back(p);
          }
      }
      REQUIRE_FALSE(protected_now[0].empty());
    }
  }
  for (index_t h = 0; h < 2; ++h) {
    std::vector<position_t> live;
    for (index_t s = 0; s < cache.view().num_tokens(); ++s) live.push_back(cache.view().position(h, s));
    for (const position_t p : protected_now[at(h)]) REQUIRE(std::binary_search(live.begin(), live.end(), p));
  }
}

TEST_CASE("a pinned prefix of the cache is never planned away", "[policy]") {
  Random random;
  CAPTURE(random.seed());
  for_each_policy([&](const char* name, auto policy) {
    CAPTURE(name);
    Stream stream = small_stream(random);
    TestCache<> cache(small_shape, 60);
    Workspace work(policy.workspace_size(60));
    feed(policy, cache, stream, 40);
    require_ok(cache.view().set_pinned_prefix(17));
    require_value(evict(policy, cache.view(), work));
    REQUIRE(cache.view().num_tokens() == small_budget);
    for (index_t h = 0; h < 2; ++h)
      for (index_t s = 0; s < 17; ++s) REQUIRE(cache.view().position(h, s) == s);
    // Pinned more than the budget: refused, unchanged.
    feed(policy, cache, stream, 10);
    require_ok(cache.view().set_pinned_prefix(28));
    const auto before = cache.state();
    check_error(evict(policy, cache.view(), work).status(), StatusCode::invalid_argument, {"24", "34", "protected"});
    REQUIRE(cache.state() == before);
  });
}

TEST_CASE("a workspace of exactly the size asked for is enough at exactly that capacity, and one byte less is refused",
          "[policy]") {
  Random random;
  CAPTURE(random.seed());
  for_each_policy([&](const char* name, auto policy) {
    Stream stream = small_stream(random);
    TestCache<> cache(small_shape, 40);
    feed(policy, cache, stream, 40);
    CAPTURE(name);
    const WorkspaceSize size = policy.workspace_size(40);
    Workspace short_by_one({size.bytes - 1, size.plan_sets, size.plan_tokens});
    Workspace exact(size);
    KeepPlan plan;
    const auto before = cache.state();
    check_error(policy.plan(cache.view(), short_by_one, plan), StatusCode::workspace_too_small, {"workspace has"});
    check_error(policy.plan_free(cache.view(), 3, short_by_one, plan), StatusCode::workspace_too_small, {"workspace has"});
    check_error(evict(policy, cache.view(), short_by_one).status(), StatusCode::workspace_too_small, {"workspace has"});
    std::vector<float> flat(80);
    REQUIRE(cache.state() == before);
    require_ok(policy.plan(cache.view(), exact, plan));
    require_value(policy.score(cache.view(), {flat.data(), 2, 40}, exact));
    require_value(evict(policy, cache.view(), exact));
    REQUIRE(cache.view().num_tokens() == small_budget);
    REQUIRE(exact.peak() <= size.bytes);
  });
}

TEST_CASE("score asks for its scratch before it writes", "[policy]") {
  Random random;
  CAPTURE(random.seed());
  for_each_policy([&](const char* name, auto policy) {
    if (std::string_view(name) == "RecentWindow") return;  // takes no scratch for scores
    CAPTURE(name);
    Stream stream = small_stream(random);
    TestCache<> cache(small_shape, 40);
    feed(policy, cache, stream, 40);
    Workspace none(WorkspaceSize{});
    std::vector<float> flat(80, -9.0F);
    check_error(policy.score(cache.view(), {flat.data(), 2, 40}, none).status(), StatusCode::workspace_too_small,
                {"workspace has 0"});
    REQUIRE(flat == std::vector<float>(80, -9.0F));
    KeepPlan plan;
    check_error(policy.select(cache.view(), {flat.data(), 2, 40}, none, plan), StatusCode::workspace_too_small,
                {"workspace has 0"});
    REQUIRE(plan.sets() == 0);
  });
}

TEST_CASE("scores head by head are those of all heads at once, bit for bit, and take less scratch", "[policy]") {
  Random random;
  CAPTURE(random.seed());
  const FixedBudget schedule{.max = 30, .min = 25, .counts_prefix = true};
  const auto check = [&]<class ObserverT, class ScorerT>(const typename ObserverT::Options& observer, const ScorerT& scorer,
                                                         index_t rows) {
    using ByHead = EvictionPolicy<ObserverT, ScorerT, FixedBudget>;
    using AtOnce = EvictionPolicy<ObserverT, AllHeadsAtOnce<ScorerT>, FixedBudget>;
    const Protection protection{.n_prefix = 1, .n_recent_kv = 3};
    ByHead by_head = require_value(ByHead::make(small_shape, {observer, scorer, schedule, protection, small_rope()}));
    AtOnce at_once = require_value(
        AtOnce::make(small_shape, {observer, AllHeadsAtOnce<ScorerT>(scorer), schedule, protection, small_rope()}));
    const auto spared = static_cast<std::size_t>((4 - 2) * rows * 16 * 4);  // two query heads' rows
    REQUIRE(by_head.score_workspace_size(40).bytes + spared <= at_once.score_workspace_size(40).bytes);
    Workspace work(by_head.workspace_size(40));
    Workspace more(at_once.workspace_size(40));
    TestCache<> cache(small_shape, 40);
    TestCache<> other(small_shape, 40);
    Stream stream = small_stream(random);
    for (position_t p = 0; p < 120; ++p) {
      const Token token = stream.next(p);
      feed(by_head, cache, token);
      feed(at_once, other, token);
      const index_t n = cache.view().num_tokens();
      std::vector<float> scores(at(2 * n), 0.0F);
      std::vector<float> expected(at(2 * n), 0.0F);
      require_value(std::as_const(by_head).score(cache.view(), {scores.data(), 2, n}, work));
      require_value(std::as_const(at_once).score(other.view(), {expected.data(), 2, n}, more));
      REQUIRE(same_bits(scores, expected));
      if (random.coin()) {  // scores that no eviction follows
        require_value(by_head.score(cache.view(), {scores.data(), 2, n}, work));
        REQUIRE(same_bits(scores, expected));
      }
      REQUIRE(by_head.due(cache.view()) == at_once.due(other.view()));
      if (!by_head.due(cache.view())) continue;
      require_value(evict(by_head, cache.view(), work));
      require_value(evict(at_once, other.view(), more));
      for (index_t h = 0; h < 2; ++h) REQUIRE(slots_of(work.plan().kept(h)) == slots_of(more.plan().kept(h)));
    }
    REQUIRE(work.peak() <= by_head.workspace_size(40).bytes);
  };
  check.operator()<RecentQueries>({.count = 5}, AttentionScorer{}, 5);
  check.operator()<RecentQueries>({.count = 5, .newest_twice = true}, AttentionScorer{.value_norm = true}, 5);
  check.operator()<RecentQueries>({.count = 3}, RKVScorer({.lambda = 0.4F}), 3);
  check.operator()<QueryMoments>({.n_sink = 0, .n_future_positions = 9}, ExpectedAttentionScorer{}, 17);
  for (const float left : {0.0F, 0.9F}) {
    BeaconScorer::Options options{.orphan_credit = left, .key_diff_share = left / 3};
    options.attention.attention.pool = {PoolKind::max, 3};
    check.operator()<BeaconQueries>({.n_beacon = 4, .n_recent_queries = 7}, BeaconScorer(options), 11);
  }
}

TEST_CASE("a scorer is told what is read for the next head, where one thread scores them", "[policy]") {
  using Policy = EvictionPolicy<BeaconQueries, LookingAhead, FixedBudget>;
  std::vector<LookingAhead::Seen> seen;
  LookingAhead scorer;
  scorer.seen = &seen;
  Policy policy = require_value(Policy::make(
      small_shape,
      {.observer = {.n_beacon = 3, .n_recent_queries = 2}, .scorer = scorer, .schedule = {.max = 30}, .rope = small_rope()}));
  Random random;
  Stream stream = small_stream(random);
  TestCache<> cache(small_shape, 40);
  feed(policy, cache, stream, 30);
  std::vector<float> scores(60);
  Workspace work(policy.workspace_size(40));
  require_value(policy.score(cache.view(), {scores.data(), 2, 30}, work));
  // A head's pool and its recent queries, each a cache line.
  const index_t lines = 2 * (policy.observer().pool_size() + 2);
  REQUIRE(seen == std::vector<LookingAhead::Seen>{{0, 2, lines}, {2, 2, -1}});
}

TEST_CASE("what is to be asked for ahead is a list of a few rows, without empty ones", "[policy]") {
  const std::vector<float> memory(400);
  detail::MemoryAhead few;
  few.add(detail::rows_ahead(memory.data(), 20, 17, 3));
  few.add(detail::rows_ahead(memory.data(), 20, 17, 0));
  REQUIRE(few.end() - few.begin() == 1);
  REQUIRE(few.lines() == 3 * 2);
  detail::MemoryAhead more;
  for (int i = 0; i < 40; ++i) more.add(few);
  REQUIRE(more.end() - more.begin() < 40);
  REQUIRE(more.lines() == (more.end() - more.begin()) * 6);
  REQUIRE(detail::nothing_ahead.lines() == 0);
}

TEST_CASE("a prompt of the capacity fits the workspace, a longer one is refused and leaves the policy as it was", "[policy]") {
  Random random;
  CAPTURE(random.seed());
  BeaconKV<> policy(small_shape, {.budget = {.max = 24}, .n_beacon = 4, .n_recent_queries = 3, .n_recent_kv = 4}, small_rope());
  const std::vector<float> queries = random.normals(5000 * 64);
  Workspace work(policy.workspace_size(100));
  TestCache<> cache(small_shape, 8);
  const auto before = answers_of(policy, cache, work);
  // Small prompts may fit beyond the capacity, so ask for far more.
  check_error(policy.prefill(QueryView::token_major(queries.data(), 5000, 4, 16), work), StatusCode::workspace_too_small,
              {"workspace has"});
  REQUIRE(answers_of(policy, cache, work) == before);
  REQUIRE(policy.observer().rows() == 0);
  require_ok(policy.prefill(QueryView::token_major(queries.data(), 100, 4, 16), work));
  REQUIRE(policy.next_position() == 100);
  REQUIRE(policy.observer().rows() == 4);
}

TEST_CASE("the workspace fits the prompt where that takes more than the scores", "[policy]") {
  // One query head of many dimensions and few observed rows.
  const Shape shape{.query_heads = 1, .kv_heads = 1, .head_dim = 256};
  BeaconKV<> policy(shape, {.budget = {.max = 24}, .n_beacon = 1, .n_recent_queries = 1, .n_recent_kv = 4},
                    RopeTable({.head_dim = 256}));
  const std::vector<float> queries = Random(4).normals(300 * 256);
  Workspace work(policy.workspace_size(300));
  require_ok(policy.prefill(QueryView::token_major(queries.data(), 300, 1, 256), work));
  REQUIRE(work.peak() <= work.capacity());
  REQUIRE(policy.observer().rows() == 1);
}

TEST_CASE("select says how many tokens protection keeps beyond what was asked for", "[policy]") {
  Random random;
  CAPTURE(random.seed());
  SnapKV<> policy = small_snapkv();  // prefix 2, window 4
  Stream stream = small_stream(random);
  TestCache<> cache(small_shape, 40);
  Workspace work(policy.workspace_size(40));
  feed(policy, cache, stream, 40);
  std::vector<float> flat(80);
  require_value(policy.score(cache.view(), {flat.data(), 2, 40}, work));
  KeepPlan plan;
  for (const index_t keep : {0, 5, 6, 7, 40, 41}) {
    require_ok(policy.select(cache.view(), {flat.data(), 2, 40}, work, plan, keep));
    CAPTURE(keep);
    REQUIRE(plan.num_kept(0) == std::clamp<index_t>(keep, 6, 40));
    REQUIRE(plan.num_kept(1) == plan.num_kept(0));
    REQUIRE(plan.shortfall() == std::max<index_t>(0, 6 - keep));
  }
  require_ok(policy.select(cache.view(), {flat.data(), 2, 40}, work, plan));  // what the schedule aims at
  REQUIRE(plan.num_kept(0) == small_budget);
}

TEST_CASE("several policies may take turns with one workspace", "[policy]") {
  Random random;
  CAPTURE(random.seed());
  SnapKV<> snapkv = small_snapkv();
  BeaconKV<> beaconkv = small_beaconkv();
  RKV<> rkv = small_rkv();
  const WorkspaceSize size = max(max(snapkv.workspace_size(60), beaconkv.workspace_size(60)), rkv.workspace_size(60));
  Workspace shared(size);
  Workspace alone(size);
  Stream stream = small_stream(random);
  const auto run_both = [&](auto& policy, TestCache<>& cache, auto& twin, TestCache<>& twin_cache, const Token& token) {
    feed(policy, cache, token);
    feed(twin, twin_cache, token);
    if (policy.due(cache.view())) require_value(evict(policy, cache.view(), shared));
    if (twin.due(twin_cache.view())) {
      alone = Workspace(size);
      require_value(evict(twin, twin_cache.view(), alone));
    }
    REQUIRE(cache.state().positions == twin_cache.state().positions);
  };
  SnapKV<> snapkv_twin = snapkv;
  BeaconKV<> beaconkv_twin = beaconkv;
  RKV<> rkv_twin = rkv;
  std::vector<TestCache<>> caches(6, TestCache<>(small_shape, 60));
  for (position_t p = 0; p < 100; ++p) {
    const Token token = stream.next(p);
    run_both(snapkv, caches[0], snapkv_twin, caches[1], token);
    run_both(beaconkv, caches[2], beaconkv_twin, caches[3], token);
    run_both(rkv, caches[4], rkv_twin, caches[5], token);
  }
}

TEST_CASE("queries of a wrong size and positions that run backwards are refused, and nothing changes", "[policy]") {
  Random random;
  CAPTURE(random.seed());
  for_each_policy([&](const char* name, auto policy) {
    CAPTURE(name);
    const bool looks = std::string_view(name) != "RecentWindow";
    Stream stream = small_stream(random);
    TestCache<> cache(small_shape, 60);
    Workspace work(policy.workspace_size(60));
    feed(policy, cache, stream, 40);
    const auto before = answers_of(policy, cache, work);
    const std::vector<float> numbers = random.normals(1000);
    const auto some = [&](std::size_t n) { return std::span(numbers).first(n); };
    if (looks) {
      for (const std::size_t n : {0U, 1U, 16U, 63U, 65U, 128U}) {
        CAPTURE(n);
        REQUIRE(static_cast<int>(policy.observe(some(n), 40).code()) == static_cast<int>(StatusCode::invalid_argument));
        REQUIRE(static_cast<int>(policy.observe_rotated(some(n), 40).code()) == static_cast<int>(StatusCode::invalid_argument));
      }
      check_error(policy.observe(some(63), 40), StatusCode::invalid_argument, {"63", "4 heads of 16"});
      check_error(policy.prefill(QueryView::token_major(numbers.data(), 2, 2, 16), work), StatusCode::invalid_argument,
                  {"2 heads of 16", "4 of 16"});
      check_error(policy.prefill_rotated(QueryView::token_major(numbers.data(), 2, 4, 8), work), StatusCode::invalid_argument,
                  {"4 heads of 8", "4 of 16"});
    }
    for (const position_t p : {position_t{39}, position_t{0}, position_t{-1}}) {
      const std::string value = "position = " + std::to_string(p);
      check_error(policy.observe(some(64), p), StatusCode::out_of_order, {value.c_str(), "40"});
      check_error(policy.observe_rotated(some(64), p), StatusCode::out_of_order, {value.c_str(), "40"});
      check_error(policy.prefill(QueryView::token_major(numbers.data(), 2, 4, 16), work, p), StatusCode::out_of_order,
                  {value.c_str(), "40"});
    }
    check_error(policy.prefill(QueryView::token_major(numbers.data(), -2, 4, 16), work), StatusCode::invalid_argument,
                {"queries.tokens = -2"});
    REQUIRE(answers_of(policy, cache, work) == before);
    require_ok(policy.observe(some(64), 40));
    require_ok(policy.observe(some(64), 1000));
    REQUIRE(policy.next_position() == 1001);
  });
}

TEST_CASE("a position beyond which there is none is refused", "[policy]") {
  BeaconKV<> policy = small_beaconkv();
  const std::vector<float> queries(64);
  constexpr position_t last = std::numeric_limits<position_t>::max();
  Workspace work(policy.workspace_size(8));
  REQUIRE_FALSE(policy.observe(queries, last).ok());
  REQUIRE_FALSE(policy.prefill(QueryView::token_major(queries.data(), 1, 4, 16), work, last).ok());
  REQUIRE(policy.next_position() == 0);
}

TEST_CASE("a cache of another shape is refused, and nothing changes", "[policy]") {
  Random random;
  CAPTURE(random.seed());
  for_each_policy([&](const char* name, auto policy) {
    CAPTURE(name);
    Stream stream = small_stream(random);
    TestCache<> cache(small_shape, 40);
    Workspace work(policy.workspace_size(40));
    feed(policy, cache, stream, 40);
    TestCache<> more_heads({.query_heads = 4, .kv_heads = 4, .head_dim = 16}, 40);
    TestCache<> other_dim({.query_heads = 4, .kv_heads = 2, .head_dim = 8}, 40);
    KeepPlan plan;
    std::vector<float> flat(200);
    check_error(policy.plan(more_heads.view(), work, plan), StatusCode::invalid_argument, {"4 KV heads", "shape.kv_heads = 2"});
    check_error(policy.plan_free(more_heads.view(), 1, work, plan), StatusCode::invalid_argument, {"4 KV heads"});
    check_error(policy.score(more_heads.view(), {flat.data(), 4, 0}, work).status(), StatusCode::invalid_argument,
                {"4 KV heads"});
    if (std::string_view(name) != "RecentWindow")
      check_error(policy.plan(other_dim.view(), work, plan), StatusCode::invalid_argument,
                  {"keys of 8", "shape.head_dim = 16"});
    check_error(policy.score(cache.view(), {flat.data(), 2, 39}, work).status(), StatusCode::invalid_argument,
                {"[2][39]", "[2][40]"});
    check_error(policy.select(cache.view(), {flat.data(), 1, 40}, work, plan), StatusCode::invalid_argument,
                {"[1][40]", "[2][40]"});
    check_error(policy.select(cache.view(), {flat.data(), 2, 40}, work, plan, -1), StatusCode::invalid_argument, {"keep = -1"});
    REQUIRE(plan.sets() == 0);
  });
}

TEST_CASE("queries before RoPE need a table", "[policy]") {
  SnapKV<> policy(small_shape, {.budget = {.tokens = 24}, .n_recent_kv = 4});
  const std::vector<float> queries(64);
  Workspace work(policy.workspace_size(8));
  check_error(policy.observe(queries, 0), StatusCode::unsupported, {"RopeTable", "_rotated"});
  check_error(policy.prefill(QueryView::token_major(queries.data(), 1, 4, 16), work), StatusCode::unsupported, {"RopeTable"});
  REQUIRE(policy.next_position() == 0);
  require_ok(policy.observe_rotated(queries, 0));
  require_ok(policy.prefill_rotated(QueryView::token_major(queries.data(), 1, 4, 16), work));

  using NoTable = EvictionPolicy<BeaconQueries, AttentionScorer, FixedBudget>;
  check_error(NoTable::make(small_shape, {.schedule = {.max = 24}}).status(), StatusCode::invalid_argument,
              {"rope", "RopeTable"});
}

TEST_CASE("the prompt is what came before the first decoded token, in one piece or in chunks", "[policy]") {
  Random random;
  BeaconKV<> policy(small_shape, {.budget = {.max = 24}, .n_recent_kv = 4}, small_rope());
  const std::vector<float> queries = random.normals(64 * 20);
  Workspace work(policy.workspace_size(64));
  REQUIRE(policy.prefix() == 0);
  require_ok(policy.prefill(QueryView::token_major(queries.data(), 5, 4, 16), work));
  REQUIRE(policy.prefix() == 5);
  require_ok(policy.prefill(QueryView::token_major(queries.data(), 7, 4, 16), work));
  REQUIRE(policy.prefix() == 12);
  require_ok(policy.prefill(QueryView::token_major(queries.data(), 2, 4, 16), work, 20));  // with a gap
  REQUIRE(policy.prefix() == 22);
  require_ok(policy.observe(std::span(queries).first(64), 22));
  require_ok(policy.prefill(QueryView::token_major(queries.data(), 10, 4, 16), work));  // a later turn competes
  REQUIRE(policy.prefix() == 22);
  REQUIRE(policy.next_position() == 33);
  BeaconKV<> given(small_shape, {.budget = {.max = 24}, .n_recent_kv = 4, .n_prefix = 3}, small_rope());
  require_ok(given.prefill(QueryView::token_major(queries.data(), 5, 4, 16), work));
  REQUIRE(given.prefix() == 3);
}

TEST_CASE("one set for all heads: by the mean of their scores, or by the maximum", "[policy]") {
  Random random;
  CAPTURE(random.seed());
  using Shared = EvictionPolicy<RecentQueries, AttentionScorer, FixedBudget>;
  for (const Reduce how : {Reduce::mean, Reduce::max, Reduce::sum}) {
    const RunPlan plan{.shape = {.query_heads = 6, .kv_heads = 3, .head_dim = 16}, .rope = make_rope(16)};
    const Shared policy = require_value(Shared::make(plan.shape, {.observer = {.count = 6},
                                                                  .scorer = {},
                                                                  .schedule = {.max = 40, .min = 30, .counts_prefix = true},
                                                                  .protection = {.n_prefix = 2, .n_recent_kv = 4},
                                                                  .rope = RopeTable(plan.rope.options),
                                                                  .shared_reduce = how}));
    const reference::Schedule schedule = reference::fixed_budget(40, 30, true);
    const reference::PolicySettings settings{.shape = plan.shape,
                                             .rope = plan.rope.reference,
                                             .n_recent_queries = 6,
                                             .attention = {.scale = 0.25},
                                             .n_prefix = 2,
                                             .n_recent_kv = 4,
                                             .due = schedule.due,
                                             .target = schedule.target};
    Stream stream(random, plan.shape, plan.rope);
    Duo duo(policy, TestCache<float, float, Granularity::per_layer>(plan.shape, 120), settings, 0);
    duo.shared_reduce = how;
    for (position_t p = 0; p < 100; ++p) {
      duo.decode(stream.next(p), plan.shape);
      duo.evict_if_due();
    }
    CAPTURE(static_cast<int>(how));
    REQUIRE(duo.report.evictions == 7);
  }
}

TEST_CASE("a token whose key is not finite goes first in every policy and storage", "[policy]") {
  Random random;
  CAPTURE(random.seed());
  const auto check = [&](const char* name, auto policy, auto cache) {
    Stream stream = small_stream(random);
    Workspace work(policy.workspace_size(40));
    for (position_t p = 0; p < 40; ++p) {
      Token token = stream.next(p);
      if (p == 17 || p == 30) token.keys[at(p % 2 == 0 ? 0 : 20)] = std::numeric_limits<float>::infinity();  // a head each
      feed(policy, cache, token);
    }
    KeepPlan plan;
    require_ok(policy.plan_free(cache.view(), 2, work, plan));
    CAPTURE(name, plan.sets());
    REQUIRE(plan.num_non_finite() == 2);
    if (plan.sets() == 1 || std::string_view(name) == "RPC") {
      REQUIRE(slots_of(plan.kept(0)) == all_but(40, {17, 30}));
    } else {
      const std::vector<slot_t> first = slots_of(plan.kept(0));
      const std::vector<slot_t> second = slots_of(plan.kept(1));
      REQUIRE_FALSE(std::binary_search(first.begin(), first.end(), slot_t{30}));
      REQUIRE_FALSE(std::binary_search(second.begin(), second.end(), slot_t{17}));
    }
    const EvictionReport report = require_value(evict(policy, cache.view(), work));
    REQUIRE(report.num_non_finite == 2);
  };
  for_each_policy([&](const char* name, auto policy) {
    if (std::string_view(name) == "RecentWindow") return;  // looks at no key
    check(name, policy, TestCache<>(small_shape, 40));
    check(name, policy, PerLayer(small_shape, 40));
  });
}

TEST_CASE("RecentWindow looks at no key, so what keys hold is nothing to it", "[policy]") {
  RecentWindow<> policy = small_recent_window();
  TestCache<> cache(small_shape, 40);
  Workspace work(policy.workspace_size(40));
  for (position_t p = 0; p < 40; ++p) {
    cache.append({p, {}, {}, std::vector<float>(32, std::numeric_limits<float>::quiet_NaN()), std::vector<float>(32)});
    require_ok(policy.observe({}, p));
  }
  REQUIRE(require_value(evict(policy, cache.view(), work)).num_non_finite == 0);
  REQUIRE(cache.view().position(0, 2) == 18);
}

TEST_CASE("the state of a policy is what its memory takes", "[policy]") {
  REQUIRE(small_recent_window().state_bytes() == 0);
  // 5 queries of 4 heads of 16 floats, and their positions.
  REQUIRE(small_snapkv().state_bytes() == 5 * 64 * 4 + 5 * 8);
  // A ring of 5, and for each of 4 heads 5 rows with their tags; of 4 the cosines and scales, and which they are.
  REQUIRE(small_beaconkv().state_bytes() == 5 * 64 * 4 + 5 * 8 + 4 * (5 * (16 * 4 + 8) + (4 * 4 + 4 + 4) * 4));
  RKV<> rkv = small_rkv(RKVOrder::published);
  const std::size_t before = rkv.state_bytes();
  Random random;
  Stream stream = small_stream(random);
  TestCache<> cache(small_shape, 40);
  Workspace work(rkv.workspace_size(40));
  feed(rkv, cache, stream, 40);
  require_value(evict(rkv, cache.view(), work));
  REQUIRE(rkv.state_bytes() == before + 2 * small_budget * 4);
}
