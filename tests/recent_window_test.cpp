// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

// RecentWindow: the first tokens and the newest ones stay, whatever the budget, the prompt and the storage.

#include "beaconkv/policy/recent_window.hpp"

#include <limits>
#include <vector>

#include "support/catch.hpp"
#include "support/policy_run.hpp"

namespace {

using namespace beaconkv;
using namespace beaconkv::test;

constexpr Shape shape{.query_heads = 2, .kv_heads = 2, .head_dim = 4};

/// A window that keeps `budget` tokens, the first `sinks` among them, and cuts as soon as one more is there.
RecentWindow<> window(index_t sinks, index_t budget) {
  return RecentWindow<>(shape, {.budget = {.max = budget, .min = budget, .counts_prefix = true}, .n_prefix = sinks});
}

/// A cache and a policy over it, without queries.
struct Line {
  RecentWindow<> policy;
  TestCache<> cache;
  Workspace work;
  position_t next = 0;

  explicit Line(const RecentWindow<>& p, index_t capacity = 64)
      : policy(p), cache(shape, capacity), work(p.workspace_size(capacity)) {}

  void append(index_t tokens) {
    for (index_t i = 0; i < tokens; ++i) {
      const auto x = static_cast<float>(next);
      cache.append({next++, {}, {}, std::vector<float>(8, x), std::vector<float>(8, -x)});
    }
  }
  void prompt(index_t tokens) {
    append(tokens);
    require_ok(policy.prefill_tokens(tokens));
  }
  void token() {
    append(1);
    require_ok(policy.observe({}, next - 1));
  }
  void evict_if_due() {
    if (policy.due(cache.view())) require_value(evict(policy, cache.view(), work));
  }
  [[nodiscard]] std::vector<position_t> positions(index_t head = 0) const {
    std::vector<position_t> out;
    for (index_t s = 0; s < cache.view().num_tokens(); ++s) out.push_back(cache.view().position(head, s));
    return out;
  }
};

using Positions = std::vector<position_t>;

}  // namespace

TEST_CASE("[A11] the oldest tokens behind the sinks go, never the newest", "[recent_window]") {
  Line line(window(2, 6));
  line.prompt(9);
  KeepPlan plan;
  require_ok(line.policy.plan(line.cache.view(), line.work, plan));
  REQUIRE(slots_of(plan.kept(0)) == std::vector<slot_t>{0, 1, 5, 6, 7, 8});
  std::vector<Range> gone;
  plan.for_each_evicted_run(0, [&](Range r) { gone.push_back(r); });
  REQUIRE(gone == std::vector<Range>{{2, 5}});
  line.evict_if_due();
  REQUIRE(line.positions(0) == Positions{0, 1, 5, 6, 7, 8});
  REQUIRE(line.positions(1) == Positions{0, 1, 5, 6, 7, 8});
}

TEST_CASE("[A3] exactly one over the budget", "[recent_window]") {
  SECTION("a window of the whole budget") {
    Line line(window(0, 32));
    line.prompt(32);
    REQUIRE_FALSE(line.policy.due(line.cache.view()));
    const auto before = line.cache.state();
    require_value(evict(line.policy, line.cache.view(), line.work));
    REQUIRE(line.cache.state() == before);
    line.token();
    line.evict_if_due();
    Positions want;
    for (position_t p = 1; p <= 32; ++p) want.push_back(p);
    REQUIRE(line.positions() == want);
  }
  SECTION("with sinks") {
    Line line(window(4, 32));
    line.prompt(33);
    line.evict_if_due();
    REQUIRE(line.positions().size() == 32);
    KeepPlan plan = line.work.plan();
    REQUIRE(slots_of(plan.kept(0)) == all_but(33, {4}));
  }
}

TEST_CASE("[A12] one prompt longer than the whole cache", "[recent_window]") {
  Line line(window(1, 4));
  line.prompt(10);
  line.evict_if_due();
  REQUIRE(line.positions() == Positions{0, 7, 8, 9});
  // Again, into a full cache.
  line.prompt(10);
  line.evict_if_due();
  REQUIRE(line.positions() == Positions{0, 17, 18, 19});
}

TEST_CASE("[M1] a second prompt into a full cache: positions stay true, nothing is reset", "[recent_window]") {
  Line line(window(2, 8));
  line.prompt(30);
  line.evict_if_due();
  REQUIRE(line.positions() == Positions{0, 1, 24, 25, 26, 27, 28, 29});
  line.prompt(5);
  line.evict_if_due();
  REQUIRE(line.positions() == Positions{0, 1, 29, 30, 31, 32, 33, 34});
  REQUIRE(line.policy.next_position() == 35);
  REQUIRE(line.policy.prefix() == 2);
}

TEST_CASE("[B8] as many sinks as asked for, 0 included", "[recent_window]") {
  Line none(window(0, 4));
  none.prompt(6);
  none.evict_if_due();
  REQUIRE(none.positions() == Positions{2, 3, 4, 5});
  Line four(window(4, 6));
  four.prompt(20);
  four.evict_if_due();
  REQUIRE(four.positions() == Positions{0, 1, 2, 3, 18, 19});
}

TEST_CASE("[A1] the newest token survives the smallest budget", "[recent_window]") {
  for (const index_t tokens : {1, 2, 50}) {
    Line line(window(0, 1));
    line.prompt(tokens);
    line.evict_if_due();
    REQUIRE(line.positions() == Positions{tokens - 1});
  }
}

TEST_CASE("[H-1] a window of 4: the fifth token drives out the first", "[recent_window]") {
  Line line(window(0, 4));
  for (int i = 0; i < 4; ++i) {
    line.token();
    line.evict_if_due();
  }
  REQUIRE(line.positions() == Positions{0, 1, 2, 3});
  line.token();
  line.evict_if_due();
  REQUIRE(line.positions() == Positions{1, 2, 3, 4});
}

TEST_CASE("[B1] after 300 tokens the next position is 300, whatever is cached", "[recent_window]") {
  Line line(window(4, 128), 160);
  for (int i = 0; i < 300; ++i) {
    line.token();
    line.evict_if_due();
  }
  REQUIRE(line.cache.view().num_tokens() == 128);
  REQUIRE(line.policy.next_position() == 300);
  REQUIRE(line.cache.view().next_position() == 300);
  Positions want{0, 1, 2, 3};
  for (position_t p = 176; p < 300; ++p) want.push_back(p);
  REQUIRE(line.positions() == want);
  line.token();
  REQUIRE(line.policy.next_position() == 301);
}

TEST_CASE("RecentWindow equals its definition over random budgets, prompts and storage", "[recent_window]") {
  Random random;
  CAPTURE(random.seed());
  for (int trial = 0; trial < 200; ++trial) {
    const index_t max = random.integer(2, 40);
    const bool counts = random.coin();
    const index_t sinks = counts ? random.integer(0, max / 2) : random.integer(0, 12);
    const index_t min = random.integer(counts ? sinks + 1 : 1, max);
    const index_t prompt = random.integer(0, 60);
    const bool by_prompt = !counts && random.coin();  // the prompt is the prefix
    RecentWindowOptions<> options{.budget = {.max = max, .min = min, .counts_prefix = counts}};
    if (!by_prompt) options.n_prefix = sinks;
    Line line(RecentWindow<>(shape, options), 200);
    CAPTURE(trial, max, min, sinks, counts, prompt, by_prompt);
    const position_t prefix = by_prompt ? prompt : sinks;
    Positions want;
    const auto cut = [&] {
      const auto first = std::lower_bound(want.begin(), want.end(), prefix) - want.begin();
      const index_t counted = static_cast<index_t>(want.size()) - (counts ? 0 : first);
      if (counted < max || counted <= min) return;
      const index_t keep = min + (counts ? 0 : first);
      want.erase(want.begin() + first, want.end() - (keep - first));
    };
    if (prompt > 0) line.prompt(prompt);
    for (position_t p = 0; p < prompt; ++p) want.push_back(p);
    cut();
    line.evict_if_due();
    REQUIRE(line.positions() == want);
    for (position_t p = prompt; p < prompt + 60; ++p) {
      line.token();
      want.push_back(p);
      cut();
      line.evict_if_due();
      REQUIRE(line.positions() == want);
      REQUIRE(line.positions(1) == want);
    }
    // The rows moved along with their positions.
    for (index_t s = 0; s < line.cache.view().num_tokens(); ++s) {
      REQUIRE(line.cache.key(1, s) == reference::Row(4, static_cast<double>(want[at(s)])));
      REQUIRE(line.cache.value(0, s) == reference::Row(4, static_cast<double>(-want[at(s)])));
    }
  }
}

TEST_CASE("RecentWindow under other schedules", "[recent_window]") {
  RecentWindow<RecencyScorer, IntervalBudget> policy(shape, {.budget = {.tokens = 8, .interval = 16}, .n_prefix = 1});
  TestCache<> cache(shape, 64);
  Workspace work(policy.workspace_size(64));
  std::vector<index_t> lengths;
  for (position_t p = 0; p < 40; ++p) {
    cache.append({p, {}, {}, std::vector<float>(8), std::vector<float>(8)});
    require_ok(policy.observe({}, p));
    if (policy.due(cache.view())) require_value(evict(policy, cache.view(), work));
    lengths.push_back(cache.view().num_tokens());
  }
  REQUIRE(*std::max_element(lengths.begin(), lengths.end()) == 23);
  REQUIRE(lengths[16] == 8);
  REQUIRE(lengths[32] == 8);
  REQUIRE(cache.view().position(0, 0) == 0);
  REQUIRE(cache.view().position(0, 1) == 26);
}

TEST_CASE("RecentWindow takes no queries, and queries of any kind", "[recent_window]") {
  Line line(window(0, 4));
  line.append(3);
  REQUIRE(line.policy.observe({}, 0).ok());
  REQUIRE(line.policy.observe(std::vector<float>(8), 1).ok());
  REQUIRE(line.policy.observe_rotated(std::vector<float>(8), 2).ok());
  check_error(line.policy.observe({}, 2), StatusCode::out_of_order, {"position = 2", "3"});
  check_error(line.policy.prefill_tokens(-1), StatusCode::invalid_argument, {"tokens = -1"});
  REQUIRE(line.policy.next_position() == 3);
  REQUIRE(line.policy.state_bytes() == 0);
}

TEST_CASE("[A6] [A13] RecentWindow refuses what cannot work, by name and value", "[recent_window]") {
  struct Bad {
    const char* what;
    RecentWindowOptions<> options;
    std::initializer_list<const char*> parts;
  };
  const Bad cases[] = {
      {"no budget", {}, {"budget.max = 0"}},
      {"negative budget", {.budget = {.max = -3}}, {"budget.max = -3"}},
      {"sinks as large as the budget",
       {.budget = {.max = 4, .min = 4, .counts_prefix = true}, .n_prefix = 4},
       {"n_prefix = 4", "budget.min = 4"}},
      {"negative sinks", {.budget = {.max = 4}, .n_prefix = -1}, {"n_prefix = -1"}},
  };
  for (const Bad& bad : cases)
    require_refused_options<RecentWindow<>>(bad.what, shape, bad.options, RecencyScorer{}, StatusCode::invalid_argument,
                                            bad.parts);
  REQUIRE(RecentWindow<>::make(shape, {.budget = {.max = 5, .min = 5}, .n_prefix = 0}).ok());
}

TEST_CASE("a prompt that alone exceeds a budget counting it is refused at the plan, and nothing changes", "[recent_window]") {
  Line line(RecentWindow<>(shape, {.budget = {.max = 8, .min = 8, .counts_prefix = true}}));  // the prompt is the prefix
  line.prompt(12);
  const auto before = line.cache.state();
  REQUIRE(line.policy.due(line.cache.view()));
  check_error(evict(line.policy, line.cache.view(), line.work).status(), StatusCode::invalid_argument,
              {"8", "12", "protected", "prefix 12"});
  REQUIRE(line.cache.state() == before);
}
