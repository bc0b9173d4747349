// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

// Regret and revisits: by hand on a tiny cache, against the policy's own cache on the model; and what interventions do.

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <string>
#include <vector>

#include "policy_lab/replay_run.hpp"
#include "support/catch.hpp"
#include "support/files.hpp"
#include "support/reasoner.hpp"

using namespace beaconkv;
using namespace beaconkv::lab;
using namespace beaconkv::test;

namespace {

/// A problem of the first level, its full text, and a policy on it.
struct Run {
  Problem problem;
  FullText full;
  Outcome outcome;
  std::vector<EvictionEvent> events;
};
[[nodiscard]] Run run_policy(const std::string& text, index_t budget, const Intervention& intervention = {}) {
  Run run;
  run.problem = some_problems(1).front();
  EventLog log;
  EvaluationOptions options{.max_new = max_new_of(run.problem, {run.problem}, 0),
                            .eos = reasoner().config().eos_ids,
                            .intervention = intervention,
                            .log = &log};
  run.full = generate_full(reasoner(), run.problem, options).or_throw();
  const PolicySpec spec = parse_policies(text).or_throw().front();
  run.outcome = evaluate(reasoner(), find_policy(spec.name).or_throw(), {.budget = budget}, {spec.text, spec.settings, {}},
                         run.problem, run.full, options)
                    .or_throw();
  run.events = log.take();
  return run;
}
[[nodiscard]] Replay replay_of(const Run& run) {
  return replay_events(reasoner(), run.problem, run.full, run.events, {}).or_throw();
}

/// An eviction of one layer with two KV heads.
[[nodiscard]] EvictionEvent event(position_t step, index_t layer, const std::vector<LoggedToken>& of_first,
                                  const std::vector<LoggedToken>& of_second) {
  return {.step = step, .layer = layer, .heads = {{of_first, {}, {}}, {of_second, {}, {}}}};
}

void require_step(const HeadStep& step, const HeadStep& expected) {
  CAPTURE(step.position, step.layer, step.head);
  REQUIRE(step.position == expected.position);
  REQUIRE(step.layer == expected.layer);
  REQUIRE(step.head == expected.head);
  REQUIRE(step.regret == expected.regret);
  REQUIRE(step.revisits == expected.revisits);
  REQUIRE(step.wanted == expected.wanted);
  REQUIRE(step.found == expected.found);
}

[[nodiscard]] std::string lines_without_heading(const std::filesystem::path& file) {
  const std::string text = text_of(file);
  return text.substr(text.find('\n') + 1);
}

}  // namespace

TEST_CASE("regret, revisits and lost tokens of a tiny cache, by hand", "[replay]") {
  // Two layers, two KV heads, of two query heads each. All numbers are sums of powers of two: nothing is rounded.
  Replay replay({.query_heads = 4, .kv_heads = 2, .head_dim = 1}, 2, {.top_k = 2, .min_distance = 1});
  const std::vector<float> three{0.5F, 0.25F, 0.25F, 0.25F, 0.5F, 0.25F, 0.125F, 0.125F, 0.75F, 0, 0.25F, 0.75F};
  replay.look(0, three);
  // Query head 0: keys 0 (0.5) and 1 (0.25, before 2 of equal weight), 2 and 1 back: 1.5 on average, global. Query head 1: keys
  // 1 and 0: global. Of the second KV head: keys 2 and 0, 2 and 1: not above 1, and 0.5.
  require_step(replay.steps()[0], {2, 0, 0, 0, 2, 4, 4});
  require_step(replay.steps()[1], {2, 0, 1, 0, 0, 0, 0});

  REQUIRE(replay.evict(event(2, 0, {{1, 0.5F}}, {{0, std::nullopt}, {2, 8.0F}})).ok());
  const std::vector<float> four{0.25F, 0.5F, 0.125F, 0.125F, 0, 0.0625F, 0.1875F, 0.75F,
                                0.5F,  0,    0.5F,   0,      0, 0.25F,   0.25F,   0.5F};
  replay.look(0, four);
  // First KV head: (0.5 + 0.0625) / 2 on position 1; query head 0 looks at keys 1 and 0, 2.5 back, 1 is gone; query head 1 at
  // 3 and 2. Second: (1 + 0.25) / 2 on positions 0 and 2; query head 2 looks at 0 and 2, both gone, 2 back; 3 at 3 and 1, 1
  // back.
  require_step(replay.steps()[2], {3, 0, 0, 0.28125, 1, 2, 1});
  require_step(replay.steps()[3], {3, 0, 1, 0.625, 1, 2, 0});
  replay.look(1, four);  // where nothing went
  require_step(replay.steps()[4], {3, 1, 0, 0, 1, 2, 2});
  require_step(replay.steps()[5], {3, 1, 1, 0, 1, 2, 2});

  const std::vector<LostToken> lost = replay.lost();
  REQUIRE(lost.size() == 3);
  const std::vector<LostToken> expected{{0, 1, 2, 2, 8.0F, 0.375}, {0, 0, 1, 2, 0.5F, 0.28125}, {0, 1, 0, 2, {}, 0.25}};
  for (std::size_t i = 0; i < 3; ++i) {
    REQUIRE(lost[i].layer == expected[i].layer);
    REQUIRE(lost[i].head == expected[i].head);
    REQUIRE(lost[i].position == expected[i].position);
    REQUIRE(lost[i].evicted_at == expected[i].evicted_at);
    REQUIRE(lost[i].score == expected[i].score);
    REQUIRE(lost[i].mass == expected[i].mass);
    REQUIRE(lost[i].peak == 0.5);
  }

  // The same position in other heads and layers adds up: 1 is dearer than 2 then.
  REQUIRE(replay.evict(event(3, 1, {{1, 0.5F}}, {{1, 0.5F}})).ok());
  replay.look(1, four);
  REQUIRE(dearest_positions(replay, 1) == std::vector<Range>{{1, 2}});
  REQUIRE(dearest_positions(replay, 2) == std::vector<Range>{{1, 2}, {2, 3}});
  REQUIRE(dearest_positions(replay, 9) == std::vector<Range>{{0, 1}, {1, 2}, {2, 3}});
  REQUIRE(cheapest_positions(replay, 1) == std::vector<Range>{{0, 1}});
}

TEST_CASE("evictions that cannot have happened are refused", "[replay]") {
  Replay replay({.query_heads = 4, .kv_heads = 2, .head_dim = 1}, 2, {});
  REQUIRE(replay.evict(event(5, 1, {{3, {}}}, {{4, {}}})).ok());
  require_says(replay.evict(event(6, 1, {{2, {}}}, {{4, {}}})).message(), {"layer 1", "head 1", "position 4", "before"});
  require_says(replay.evict(event(6, 0, {{7, {}}}, {})).message(), {"step 6", "head 0", "position 7", "not come"});
  require_says(replay.evict(event(6, 2, {}, {})).message(), {"layer 2", "has 2"});
  require_says(replay.evict({.step = 6, .layer = 0, .heads = {{}}}).message(), {"1 KV heads", "has 2"});
}

TEST_CASE("a policy whose budget covers everything has regret exactly 0", "[replay]") {
  for (const char* const policy : {"full", "beaconkv", "recent_window"}) {
    INFO(policy);
    const Run run = run_policy(policy, 4096);
    REQUIRE(run.events.empty());
    const Replay replay = replay_of(run);
    REQUIRE(replay.steps().size() == (run.full.tokens.size() - 1) * 8);
    index_t revisits = 0;
    for (const HeadStep& step : replay.steps()) {
      REQUIRE(step.regret == 0);
      REQUIRE(step.found == step.wanted);
      revisits += step.revisits;
    }
    REQUIRE(revisits > 0);
    REQUIRE(replay.lost().empty());
  }
}

TEST_CASE("regret is what the policy's cache lacks of the full cache's attention", "[replay]") {
  for (const char* const policy : {"recent_window", "snapkv", "rkv", "beaconkv"}) {
    INFO(policy);
    const Run run = run_policy(policy, 48);
    const Replay replay = replay_of(run);
    double regret = 0, mass = 0;
    for (const HeadStep& step : replay.steps()) regret += step.regret / static_cast<double>(replay.steps().size());
    for (const LostToken& token : replay.lost()) mass += token.mass / static_cast<double>(replay.steps().size());
    REQUIRE(regret > 0.01);
    REQUIRE(std::abs(regret - (1 - run.outcome.mass_kept)) < 1e-5);  // that one asks the policy where its tokens are
    REQUIRE(std::abs(regret - mass) < 1e-9);
  }
}

TEST_CASE("positions that are forced to stay are never evicted, in any layer or head", "[replay]") {
  const Run before = run_policy("beaconkv", 48);
  const std::vector<Range> dearest = dearest_positions(replay_of(before), 4);
  REQUIRE(dearest.size() == 4);
  const Run after = run_policy("beaconkv", 48, {.keep = dearest});
  const auto evictions_of = [&](const Run& run) {
    index_t count = 0;
    for (const EvictionEvent& e : run.events)
      for (const HeadEvent& head : e.heads)
        for (const LoggedToken& token : head.evicted)
          count += std::count_if(dearest.begin(), dearest.end(), [&](const Range& r) { return r.first == token.position; });
    return count;
  };
  REQUIRE(evictions_of(before) >= 4);
  REQUIRE(evictions_of(after) == 0);
  REQUIRE(after.full.tokens == before.full.tokens);
  for (const LostToken& token : replay_of(after).lost())
    for (const Range& range : dearest) REQUIRE(token.position != range.first);
}

TEST_CASE("positions that are forced out go at once from all layers and heads, and are missed", "[replay]") {
  const Run calm = run_policy("beaconkv", 4096);
  const auto first = static_cast<position_t>(calm.problem.prompt.size()) + 20;
  const Run run = run_policy("beaconkv", 4096, {.evict = {{first, first + 30}}});
  REQUIRE(run.events.size() == 30 * 4);  // nothing but these
  for (std::size_t i = 0; i < run.events.size(); ++i) {
    const position_t position = first + static_cast<position_t>(i) / 4;
    REQUIRE(run.events[i].step == position);
    for (const HeadEvent& head : run.events[i].heads) {
      REQUIRE(head.evicted.size() == 1);
      REQUIRE(head.evicted[0].position == position);
    }
  }
  double regret = 0;
  const Replay replay = replay_of(run);
  for (const HeadStep& step : replay.steps()) {
    if (step.position <= first) REQUIRE(step.regret == 0);
    regret += step.regret / static_cast<double>(replay.steps().size());
  }
  REQUIRE(std::abs(regret - (1 - run.outcome.mass_kept)) < 1e-5);
  REQUIRE(run.outcome.text != calm.outcome.text);  // thirty tokens of its reasoning were never there
  REQUIRE_FALSE(run.outcome.exact);
}

TEST_CASE("positions are read from the command line", "[replay]") {
  REQUIRE(parse_positions("", "--keep").or_throw().empty());
  REQUIRE(parse_positions("7", "--keep").or_throw() == std::vector<Range>{{7, 8}});
  REQUIRE(parse_positions("17-20,3", "--keep").or_throw() == std::vector<Range>{{3, 4}, {17, 21}});
  for (const char* const wrong : {",", "3,", "3-", "-3", "5-4", "a", "3;4", "3--4", "99999999999999999999"}) {
    INFO(wrong);
    require_says(parse_positions(wrong, "--keep").status().message(), {"--keep = " + std::string(wrong), "17-20"});
  }
  require_says(parse_positions("3-5,5", "--evict").status().message(), {"--evict", "position 5", "twice"});
}

TEST_CASE("policy_lab replay writes evictions, and replaying the file says the same", "[replay]") {
  const std::filesystem::path folder = std::filesystem::temp_directory_path() / "beaconkv_replay_test";
  std::filesystem::create_directories(folder);
  ReplayOptions options{.model = model_directory,
                        .prompts = prompts_file,
                        .policies = "snapkv,beaconkv:n_beacon=8",
                        .budgets = "64",
                        .limit = 1,
                        .keep = "dearest:2",
                        .events = folder / "events.jsonl",
                        .csv = folder / "run.csv"};
  REQUIRE(replay(options).message() == "");
  ReplayOptions again{.model = model_directory, .prompts = prompts_file, .log = options.events, .csv = folder / "log.csv"};
  REQUIRE(replay(again).message() == "");
  REQUIRE(lines_without_heading(options.csv).size() > 1000);
  REQUIRE(text_of(options.csv) == text_of(again.csv));

  const auto error_of = [&](auto change) {
    ReplayOptions wrong = options;
    change(wrong);
    return replay(wrong).message();
  };
  require_says(error_of([](ReplayOptions& o) { o.policies = "snapk"; }), {"'snapk'"});
  require_says(error_of([](ReplayOptions& o) { o.keep = "dearest:x"; }), {"--keep", "dearest:x"});
  require_says(error_of([](ReplayOptions& o) { o.evict = "3"; }), {"--evict", "prompt"});
  require_says(error_of([](ReplayOptions& o) { o.problem = "no such"; }), {"--problem = no such"});
  require_says(error_of([](ReplayOptions& o) { o.revisit.top_k = 0; }), {"--top-k = 0"});
  require_says(error_of([](ReplayOptions& o) { o.revisit.min_distance = std::numeric_limits<double>::quiet_NaN(); }),
               {"--distance"});
  require_says(error_of([](ReplayOptions& o) { o.log = "/no/such.jsonl"; }), {"/no/such.jsonl"});
  require_says(error_of([](ReplayOptions& o) { o.csv = "/no/such/file.csv"; }), {"--csv"});
  std::filesystem::remove_all(folder);
}
