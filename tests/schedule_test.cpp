// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

// Schedules as arithmetic: when something is due, how much stays, and which settings are refused. Token by token runs with a
// policy around them are in the policies' own tests.

#include "beaconkv/policy/schedule.hpp"

#include <limits>
#include <vector>

#include "support/catch.hpp"
#include "support/policy_run.hpp"

namespace {

using namespace beaconkv;
using namespace beaconkv::test;

constexpr index_t huge = std::numeric_limits<index_t>::max();

/// Tokens of one head as a schedule sees them, with an eviction down to the target wherever one is due.
template <Schedule S>
struct Run {
  S schedule;
  index_t prompt = 0;
  index_t n_prefix = 0;
  index_t n_recent = 0;
  ScheduleState state{};
  index_t evictions = 0;
  index_t peak = 0;

  void evict_if_due() {
    peak = std::max(peak, state.tokens);
    if (!schedule.due(state)) return;
    const index_t target = schedule.target(state);
    REQUIRE(target <= state.tokens);
    state.tokens = target;
    schedule.committed();
    ++evictions;
    note_windows();
  }
  void prefill() {
    state = {.tokens = prompt, .total = prompt, .after_prefill = true};
    note_windows();
    evict_if_due();
  }
  void decode() {
    ++state.tokens;
    ++state.total;
    state.after_prefill = false;
    note_windows();
    evict_if_due();
  }

 private:
  void note_windows() {
    state.prefix = std::min(n_prefix, state.tokens);
    state.recent = std::min(n_recent, state.tokens - state.prefix);
  }
};

}  // namespace

TEST_CASE("FixedBudget keeps 7/8 of max by default, rounded down", "[schedule]") {
  std::vector<index_t> wrong;
  for (index_t max = 1; max <= 300; ++max)
    if (FixedBudget{.max = max}.lower() != 7 * max / 8) wrong.push_back(max);
  REQUIRE(wrong.empty());
  REQUIRE(FixedBudget{.max = 128}.lower() == 112);
  REQUIRE(FixedBudget{.max = 128, .min = 100}.lower() == 100);
  // 7 * max would not fit.
  REQUIRE(FixedBudget{.max = huge}.lower() == huge - huge / 8 - 1);
}

TEST_CASE("FixedBudget is due at max counted tokens and cuts to min", "[schedule]") {
  for (const bool counts_prefix : {false, true})
    for (const index_t prefix : {0, 1, 7})
      for (const index_t min : {10, 15, 16}) {
        const FixedBudget budget{.max = 16, .min = min, .counts_prefix = counts_prefix};
        const index_t on_top = counts_prefix ? 0 : prefix;
        for (index_t tokens = 0; tokens <= 40; ++tokens) {
          CAPTURE(counts_prefix, prefix, min, tokens);
          const ScheduleState state{.tokens = tokens, .prefix = std::min(prefix, tokens), .total = tokens};
          const index_t counted = tokens - std::min(on_top, tokens);
          REQUIRE(budget.due(state) == (counted >= 16 && counted > min));
          REQUIRE(budget.target(state) == std::min(tokens, min + std::min(on_top, tokens)));
        }
      }
}

TEST_CASE("[A5] a schedule that has just cut is quiet for the next interval", "[schedule]") {
  SECTION("FixedBudget of 476 tokens from its lower bound on") {
    Run<FixedBudget> run{.schedule = {.max = 128, .min = 64}};
    run.prompt = 64;
    run.prefill();
    REQUIRE(run.evictions == 0);
    for (index_t i = 0; i < 476; ++i) {
      const index_t before = run.evictions;
      run.decode();
      REQUIRE(run.evictions - before == ((i + 1) % 64 == 0 ? 1 : 0));
    }
    REQUIRE(run.evictions == 476 / 64);
  }
  SECTION("PromptBudget with an interval") {
    Run<PromptBudget> run{.schedule = {.tokens = 64, .interval = 64}};
    run.prompt = 64;
    run.prefill();
    for (index_t i = 0; i < 476; ++i) run.decode();
    REQUIRE(run.evictions == 7);
    REQUIRE(run.peak == 128);
    REQUIRE(run.state.tokens == 64 + 476 % 64);
  }
}

TEST_CASE("[A4] PromptBudget cuts the prompt and, with an interval, goes on while decoding", "[schedule]") {
  Run<PromptBudget> run{.schedule = {.tokens = 32, .interval = 8}, .prompt = 100};
  run.prefill();
  REQUIRE(run.state.tokens == 32);
  REQUIRE(run.evictions == 1);
  run.peak = 0;
  for (index_t i = 0; i < 50; ++i) run.decode();
  REQUIRE(run.peak == 40);
  REQUIRE(run.evictions == 1 + 50 / 8);
  REQUIRE(run.state.tokens == 34);
}

TEST_CASE("PromptBudget without an interval evicts once, after the prompt", "[schedule]") {
  Run<PromptBudget> run{.schedule = {.tokens = 32}, .prompt = 33};
  run.prefill();
  REQUIRE(run.state.tokens == 32);
  for (index_t i = 0; i < 500; ++i) run.decode();
  REQUIRE(run.evictions == 1);
  REQUIRE(run.state.tokens == 532);

  const PromptBudget budget{.tokens = 32};
  REQUIRE_FALSE(budget.due({.tokens = 32, .total = 32, .after_prefill = true}));
  REQUIRE(budget.due({.tokens = 33, .total = 33, .after_prefill = true}));
  REQUIRE(budget.target({.tokens = 31}) == 31);
  REQUIRE(budget.target({.tokens = 32}) == 32);
  REQUIRE(budget.target({.tokens = 33}) == 32);
}

TEST_CASE("IntervalBudget cuts on the token after every interval-th of the sequence", "[schedule]") {
  for (const index_t prompt : {0, 1, 31, 32, 33, 50, 64, 65, 200}) {
    CAPTURE(prompt);
    Run<IntervalBudget> run{.schedule = {.tokens = 32, .interval = 16}, .prompt = prompt};
    run.prefill();
    REQUIRE(run.state.tokens == std::min<index_t>(prompt, 32));
    for (index_t i = 0; i < 150; ++i) {
      const index_t before = run.state.tokens;
      run.decode();
      const index_t total = prompt + i + 1;
      const bool cut = (total - 1) % 16 == 0 && before + 1 >= 32;
      REQUIRE(run.state.tokens == (cut ? 32 : before + 1));
    }
  }
  const IntervalBudget budget{.tokens = 32, .interval = 1};
  REQUIRE(budget.due({.tokens = 33, .total = 77}));
  REQUIRE(budget.target({.tokens = 20}) == 20);
}

TEST_CASE("GrowingBudget evicts every period and keeps a step more each time", "[schedule]") {
  struct Case {
    index_t prompt, period, ratio, recent, step;
  };
  for (const Case c : {Case{10, 32, 4, 8, 8}, Case{0, 100, 3, 5, 33}, Case{200, 16, 16, 0, 1}, Case{7, 9, 2, 20, 4}}) {
    CAPTURE(c.prompt, c.period, c.ratio, c.recent);
    Run<GrowingBudget> run{
        .schedule = {.period = c.period, .ratio = c.ratio}, .prompt = c.prompt, .n_prefix = c.prompt, .n_recent = c.recent};
    REQUIRE(run.schedule.step() == c.step);
    run.prefill();
    REQUIRE(run.evictions == 0);
    for (index_t generated = 1; generated <= 6 * c.period + c.recent; ++generated) {
      run.decode();
      // The first compression comes once period + recent tokens were generated, then one every period.
      const index_t done = std::max<index_t>(0, (generated - c.recent) / c.period);
      REQUIRE(run.evictions == done);
      REQUIRE(run.schedule.evictions == done);
      const index_t since = generated - c.recent - done * c.period;
      if (done > 0) REQUIRE(run.state.tokens == c.prompt + done * c.step + c.recent + since);
    }
    REQUIRE(run.peak == c.prompt + 5 * c.step + c.period + c.recent);
  }
}

TEST_CASE("GrowingBudget never evicts a prompt by itself", "[schedule]") {
  const GrowingBudget budget{.period = 8, .ratio = 4};
  REQUIRE_FALSE(budget.due({.tokens = 5000, .prefix = 0, .recent = 0, .total = 5000, .after_prefill = true}));
  REQUIRE(budget.due({.tokens = 5001, .prefix = 0, .recent = 0, .total = 5001}));
}

TEST_CASE("[A6] whatever is due makes progress, and at once enough", "[schedule]") {
  const auto check = [](const auto& schedule) {
    for (index_t tokens = 0; tokens <= 60; ++tokens)
      for (const index_t prefix : {0, 1, 5, 60})
        for (const index_t recent : {0, 1, 9})
          for (const bool after_prefill : {false, true}) {
            ScheduleState state{
                .tokens = tokens, .prefix = std::min(prefix, tokens), .total = tokens, .after_prefill = after_prefill};
            state.recent = std::min(recent, tokens - state.prefix);
            CAPTURE(tokens, prefix, recent, after_prefill);
            const index_t target = schedule.target(state);
            REQUIRE(target >= 0);
            REQUIRE(target <= tokens);
            if (!schedule.due(state)) continue;
            REQUIRE(target < tokens);
          }
  };
  SECTION("FixedBudget") { check(FixedBudget{.max = 16, .min = 16}); }
  SECTION("FixedBudget that counts the prefix") { check(FixedBudget{.max = 16, .min = 12, .counts_prefix = true}); }
  SECTION("PromptBudget") { check(PromptBudget{.tokens = 16, .interval = 1}); }
  SECTION("GrowingBudget") { check(GrowingBudget{.period = 8, .ratio = 4}); }
}

TEST_CASE("IntervalBudget at exactly its budget is due, as published, and its cut takes nothing", "[schedule]") {
  const IntervalBudget budget{.tokens = 16, .interval = 4};
  const ScheduleState at_budget{.tokens = 16, .total = 16, .after_prefill = true};
  REQUIRE(budget.due(at_budget));
  REQUIRE(budget.target(at_budget) == 16);
  REQUIRE_FALSE(budget.due({.tokens = 15, .total = 15, .after_prefill = true}));
}

TEST_CASE("[A6] [A7] [A13] budgets that cannot work are refused by name and value", "[schedule]") {
  struct Case {
    const char* what;
    Status status;
    std::initializer_list<const char*> parts;
  };
  const std::optional<index_t> unknown{};
  const Case cases[] = {
      {"zero max", FixedBudget{.max = 0}.validate(unknown, 0), {"budget.max = 0"}},
      {"negative max", FixedBudget{.max = -5}.validate(unknown, 0), {"budget.max = -5"}},
      {"7/8 of 1", FixedBudget{.max = 1}.validate(unknown, 0), {"budget.min = 0"}},
      {"zero min", FixedBudget{.max = 8, .min = 0}.validate(unknown, 0), {"budget.min = 0"}},
      {"negative min", FixedBudget{.max = 8, .min = -1}.validate(unknown, 0), {"budget.min = -1"}},
      {"min above max", FixedBudget{.max = 8, .min = 9}.validate(unknown, 0), {"budget.min = 9", "budget.max = 8"}},
      {"window of the whole budget",
       FixedBudget{.max = 8, .min = 8}.validate(unknown, 8),
       {"n_recent_kv = 8", "budget.min = 8"}},
      {"window above it", FixedBudget{.max = 8, .min = 8}.validate(unknown, 64), {"n_recent_kv = 64", "budget.min = 8"}},
      {"prefix and window fill it",
       FixedBudget{.max = 32, .min = 32, .counts_prefix = true}.validate(28, 4),
       {"n_prefix = 28", "n_recent_kv = 4", "budget.min = 32"}},
      {"prefix alone fills it",
       FixedBudget{.max = 32, .min = 32, .counts_prefix = true}.validate(huge, 0),
       {"n_prefix = ", "budget.min = 32"}},
      {"prompt budget of 0", PromptBudget{}.validate(0, 0), {"budget.tokens = 0"}},
      {"negative prompt budget", PromptBudget{.tokens = -1}.validate(0, 0), {"budget.tokens = -1"}},
      {"interval of 0", PromptBudget{.tokens = 8, .interval = 0}.validate(0, 0), {"budget.interval = 0"}},
      {"negative interval", PromptBudget{.tokens = 8, .interval = -3}.validate(0, 0), {"budget.interval = -3"}},
      {"window as large", PromptBudget{.tokens = 8}.validate(0, 8), {"n_recent_kv = 8", "budget.tokens = 8"}},
      {"sinks and window", PromptBudget{.tokens = 8}.validate(4, 4), {"n_prefix = 4", "n_recent_kv = 4", "budget.tokens = 8"}},
      {"R-KV budget of 0", IntervalBudget{}.validate(0, 0), {"budget.tokens = 0"}},
      {"R-KV interval of 0", IntervalBudget{.tokens = 8, .interval = 0}.validate(0, 0), {"budget.interval = 0"}},
      {"R-KV window", IntervalBudget{.tokens = 8}.validate(0, 9), {"n_recent_kv = 9", "budget.tokens = 8"}},
      {"R-KV sinks", IntervalBudget{.tokens = 8}.validate(7, 1), {"n_prefix = 7", "n_recent_kv = 1", "budget.tokens = 8"}},
      {"period of 0", GrowingBudget{.period = 0}.validate(unknown, 0), {"budget.period = 0"}},
      {"ratio of 1", GrowingBudget{.period = 8, .ratio = 1}.validate(unknown, 0), {"budget.ratio = 1", "budget.period = 8"}},
      {"ratio above the period",
       GrowingBudget{.period = 8, .ratio = 9}.validate(unknown, 0),
       {"budget.ratio = 9", "budget.period = 8"}},
      {"negative count",
       GrowingBudget{.period = 8, .ratio = 2, .evictions = -1}.validate(unknown, 0),
       {"budget.evictions = -1"}},
  };
  for (const Case& c : cases) {
    INFO(c.what);
    check_error(c.status, StatusCode::invalid_argument, c.parts);
  }
}

TEST_CASE("budgets that just work are accepted", "[schedule]") {
  const std::optional<index_t> unknown{};
  REQUIRE(FixedBudget{.max = 2}.validate(unknown, 0).ok());
  REQUIRE(FixedBudget{.max = 8, .min = 8}.validate(unknown, 7).ok());
  REQUIRE(FixedBudget{.max = 8, .min = 1}.validate(1000, 0).ok());  // the prefix lies on top
  REQUIRE(FixedBudget{.max = 8, .min = 8, .counts_prefix = true}.validate(3, 4).ok());
  REQUIRE(FixedBudget{.max = 8, .min = 8, .counts_prefix = true}.validate(unknown, 4).ok());
  REQUIRE(PromptBudget{.tokens = 8, .interval = 1}.validate(3, 4).ok());
  REQUIRE(IntervalBudget{.tokens = 8, .interval = 1}.validate(3, 4).ok());
  REQUIRE(GrowingBudget{.period = 2, .ratio = 2}.validate(unknown, 1000).ok());
}

TEST_CASE("[A7] a budget beyond everything is a budget that never cuts", "[schedule]") {
  const ScheduleState state{.tokens = 1000, .prefix = 100, .recent = 10, .total = 5000, .after_prefill = true};
  REQUIRE(FixedBudget{.max = huge, .min = huge}.validate(100, 10).ok());
  REQUIRE_FALSE(FixedBudget{.max = huge}.due(state));
  REQUIRE(FixedBudget{.max = huge}.target(state) == 1000);
  REQUIRE(FixedBudget{.max = huge, .min = huge, .counts_prefix = true}.target(state) == 1000);
  REQUIRE_FALSE(PromptBudget{.tokens = huge, .interval = huge}.due(state));
  REQUIRE(PromptBudget{.tokens = huge}.target(state) == 1000);
  REQUIRE_FALSE(IntervalBudget{.tokens = huge, .interval = huge}.due(state));
  REQUIRE(IntervalBudget{.tokens = huge}.target(state) == 1000);
}

TEST_CASE("[A14] a budget in bytes is rounded down to whole tokens", "[schedule]") {
  const index_t bytes_per_token = 8 * (128 + 128) * 2;  // 8 KV heads, fp16 keys and values of 128
  REQUIRE(*tokens_in_bytes(1024 * 1024, bytes_per_token) == 256);
  REQUIRE(*tokens_in_bytes(1024 * 1024 - 1, bytes_per_token) == 255);
  REQUIRE(*tokens_in_bytes(0, bytes_per_token) == 0);
  REQUIRE(*tokens_in_bytes(std::numeric_limits<std::int64_t>::max(), 1) == huge);
  check_error(tokens_in_bytes(-1, 16).status(), StatusCode::invalid_argument, {"bytes = -1"});
  check_error(tokens_in_bytes(16, 0).status(), StatusCode::invalid_argument, {"bytes_per_token = 0"});
  check_error(tokens_in_bytes(16, -2).status(), StatusCode::invalid_argument, {"bytes_per_token = -2"});
}
