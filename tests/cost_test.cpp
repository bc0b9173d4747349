// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

// `policy_lab cost`: bytes against counting by hand and against what the library says, latencies and sequences by arithmetic.

#include "policy_lab/cost.hpp"

#include "beaconkv/beaconkv.hpp"
#include "support/catch.hpp"
#include "support/check.hpp"
#include "support/reasoner.hpp"

namespace {

using namespace beaconkv;
using namespace beaconkv::lab;
using namespace beaconkv::test;

[[nodiscard]] const std::vector<Problem>& two_problems() {
  static const std::vector<Problem> problems = some_problems(2);
  return problems;
}
/// Texts of any length: what is right is long enough.
[[nodiscard]] std::vector<FullText> right_texts() {
  std::vector<FullText> texts;
  for (const Problem& problem : two_problems()) texts.push_back({.tokens = problem.expected});
  return texts;
}
[[nodiscard]] PolicySpec spec_of(const std::string& text) { return parse_policies(text).or_throw().front(); }

/// The common rule's policies, as they are made for the reasoner.
[[nodiscard]] BeaconKV<> beaconkv_of_lab(index_t budget, bool preset) {
  BeaconKVOptions<> o =
      preset ? BeaconKVOptions<>::with_orphan_credit({.max = budget}) : BeaconKVOptions<>{.budget = {.max = budget}};
  o.n_recent_kv = 8;
  return BeaconKV<>(reasoner().shape(), o, reasoner().rope());
}

}  // namespace

TEST_CASE("Bytes of the lab, item by item, are what the library says and what one counts by hand", "[cost]") {
  // 4 layers of 6 query and 2 KV heads of 32.
  const Shape& shape = reasoner().shape();
  REQUIRE(shape.query_heads == 6);
  REQUIRE(shape.kv_heads == 2);
  REQUIRE(shape.head_dim == 32);
  REQUIRE(reasoner().layers() == 4);
  const Problem& problem = two_problems().front();
  const auto prompt = static_cast<index_t>(problem.prompt.size());
  const index_t rows = prompt + 64;
  for (const char* name : {"recent_window", "snapkv", "rpc", "rkv", "beaconkv", "beaconkv_credit", "beaconkv:value_norm=1",
                           "h2o", "expected_attention", "adakv"}) {
    CAPTURE(name);
    const PolicySpec spec = spec_of(name);
    engine::Session session(reasoner(), rows);
    REQUIRE(session.prefill(problem.prompt).ok());
    Settings settings(spec.text, spec.settings, {});
    const PolicyRequest request{.model = &reasoner(), .capacity = rows, .budget = 64};
    const std::unique_ptr<ModelPolicy> policy =
        find_policy(spec.name).or_throw().maker(request)(request, settings, session).or_throw();
    static_cast<void>(policy->after_prefill(session).or_throw());
    const PolicyBytes bytes = policy->bytes();
    CHECK(bytes.state() == policy->state_bytes());
    CHECK(bytes.total() == bytes.cache + bytes.beacons + bytes.queries + bytes.keys + bytes.books + bytes.workspace);
    CHECK(bytes.cache == static_cast<std::size_t>(prompt) * 4 * 2 * 32 * 2 * sizeof(float));
    CHECK(bytes.books >= static_cast<std::size_t>(rows) * 4 * 2 * sizeof(position_t));
    CHECK(bytes.books < static_cast<std::size_t>(rows + 8) * 4 * 2 * sizeof(position_t));

    const std::string text = name;
    if (text == "recent_window") CHECK(bytes.state() == 0);
    if (text.starts_with("beaconkv")) {
      const bool preset = text == "beaconkv_credit";
      const BeaconKV<> made = beaconkv_of_lab(64, preset);
      CHECK(bytes.beacons == 4 * made.observer().beacon_bytes());
      CHECK(bytes.beacons + bytes.queries == 4 * made.observer().state_bytes());
      CHECK(bytes.beacons > std::size_t{4 * 6 * 32} * (preset ? 24 : 16) * sizeof(float));
      // n_recent queries and as many less one that wait.
      CHECK(bytes.queries > std::size_t{4 * 6 * 32} * (preset ? 15 : 31) * sizeof(float));
      const auto slots = static_cast<std::size_t>(4 * 2 * rows);
      const std::size_t lengths = slots * 4;
      const std::size_t credits = 2 * (slots * (4 + 2) + std::size_t{4 * 6 * 32} * sizeof(position_t));
      CHECK(bytes.keys == (preset ? credits + lengths : text == "beaconkv" ? 0 : lengths));
      if (text != "beaconkv:value_norm=1") {
        const WorkspaceSize size = max(made.workspace_size(rows), realign_workspace_size(32));
        CHECK(bytes.workspace == size.bytes);
      }
    } else {
      CHECK(bytes.beacons == 0);
    }
  }
}

TEST_CASE("A policy's cost along the full cache's texts: rows, samplings and steps that evict are counted", "[cost]") {
  const std::vector<FullText> texts = right_texts();
  index_t prompt = 0;
  index_t tokens = 0;
  index_t evictions = 0;
  double without = 0, with = 0;
  for (std::size_t i = 0; i < texts.size(); ++i) {
    prompt = std::max(prompt, static_cast<index_t>(two_problems()[i].prompt.size()));
    const auto decoded = static_cast<index_t>(texts[i].tokens.size()) - 1;
    tokens += decoded;
    // 16 recent queries, 16 that wait: sampled with the 32nd token and every 16th from there on. Where 8 tokens go at the 64th
    // and every 8th from there on, once at each eviction; the first comes when the bank was just sampled.
    without += static_cast<double>(decoded / 16 - 1);
    with += static_cast<double>(3 + (decoded - 64) / 8);
    evictions += 1 + (decoded - 64) / 8;
  }
  const PolicyCost full = cost_of(reasoner(), spec_of("full"), 0, two_problems(), texts, 1).or_throw();
  CHECK(full.samplings == 0);
  CHECK(full.together.evictions == 0);
  CHECK(full.bytes.state() == 0);

  const PolicyCost never = cost_of(reasoner(), spec_of("beaconkv"), 100000, two_problems(), texts, 1).or_throw();
  CHECK(never.samplings == Approx(1000 * without / static_cast<double>(tokens)));
  CHECK(never.together.evictions == 0);
  CHECK(never.rows == full.rows);

  const PolicyCost beacon = cost_of(reasoner(), spec_of("beaconkv"), 64, two_problems(), texts, 2).or_throw();
  CHECK(beacon.samplings == Approx(1000 * with / static_cast<double>(tokens)));
  CHECK(beacon.rows == prompt + 64);
  CHECK(beacon.bytes.cache == static_cast<std::size_t>(prompt + 64) * 4 * 2 * 32 * 2 * sizeof(float));
  CHECK(beacon.together.evictions == evictions);
  CHECK(beacon.staggered.evictions > 3 * evictions);  // a layer a step
  CHECK(beacon.together.p50_us > 0);
  CHECK(beacon.together.p99_us >= beacon.together.p50_us);
  CHECK(beacon.prefill_us > 0);
  CHECK(beacon.policy_us > 0);
}

TEST_CASE("The tail of decode steps, by hand", "[cost]") {
  CHECK(tail_of({}).evictions == 0);
  CHECK(tail_of({{}, {}}).worst == 0);
  const Tail tail = tail_of({{{10, 1, false}, {10, 3, true}, {10, 0, false}}, {{20, 0, false}, {20, 60, true}, {20, 4, true}}});
  CHECK(tail.evictions == 3);
  CHECK(tail.p50_us == 24);
  CHECK(tail.p99_us == 80);
  CHECK(tail.worst == Approx(80.0 / 24.0));  // of 13 / 11 and 80 / 24
  std::vector<StepTime> many;
  for (int i = 1; i <= 200; ++i) many.push_back({static_cast<double>(i), 0, true});
  CHECK(tail_of({many}).p99_us == 198);
  CHECK(tail_of({many}).p50_us == 100);
}

TEST_CASE("As many sequences run as fit into the memory beside the weights", "[cost]") {
  CHECK(sequences_that_fit(100, 40, 20) == 3);
  CHECK(sequences_that_fit(99, 40, 20) == 2);
  CHECK(sequences_that_fit(30, 40, 20) == 0);
  CHECK(sequences_that_fit(40, 40, 20) == 0);

  const std::vector<FullText> texts = right_texts();
  const auto weights = static_cast<double>(reasoner().weight_count()) * sizeof(float);
  std::size_t longest = 0;
  index_t first_two = 0;
  for (std::size_t i = 0; i < texts.size(); ++i) {
    longest = std::max(longest, two_problems()[i].prompt.size() + texts[i].tokens.size());
    first_two += static_cast<index_t>(texts[i].tokens.size()) - 1;
  }
  const auto rows = static_cast<index_t>(longest);
  const double row = 4 * 2 * 32 * 2 * sizeof(float);
  const double memory = weights + 3.5 * row * static_cast<double>(rows);
  const Goodput full = run_many(reasoner(), spec_of("full"), 0, rows, two_problems(), texts, memory).or_throw();
  CHECK(full.sequence_bytes == static_cast<std::size_t>(row) * longest);
  CHECK(full.sequences == 3);
  CHECK(full.tokens == first_two + static_cast<index_t>(texts[0].tokens.size()) - 1);
  CHECK(full.tokens_per_second() == Approx(static_cast<double>(full.tokens) / full.seconds));

  const index_t held = 64 + static_cast<index_t>(std::max(two_problems()[0].prompt.size(), two_problems()[1].prompt.size()));
  const Goodput window = run_many(reasoner(), spec_of("recent_window"), 64, held, two_problems(), texts, memory).or_throw();
  CHECK(window.sequence_bytes > static_cast<std::size_t>(row) * static_cast<std::size_t>(held));
  CHECK(window.sequences == sequences_that_fit(memory, weights, static_cast<double>(window.sequence_bytes)));
  CHECK(window.sequences > full.sequences);
  CHECK(full.sequences_sharing == full.sequences);
  CHECK(window.sequences_sharing > window.sequences);
  const double workspace = static_cast<double>(
      cost_of(reasoner(), spec_of("recent_window"), 64, two_problems(), texts, 1).or_throw().bytes.workspace);
  CHECK(window.sequences_sharing ==
        sequences_that_fit(memory, weights + workspace, static_cast<double>(window.sequence_bytes) - workspace));
  CHECK(run_many(reasoner(), spec_of("full"), 0, rows, two_problems(), texts, weights).or_throw().sequences == 0);
}

TEST_CASE("What cannot be measured is refused by name", "[cost]") {
  CostOptions good{.model = model_directory, .prompts = model_directory / "prompts.jsonl", .policies = "full", .limit = 1};
  const auto refused = [&](auto change, std::initializer_list<const char*> parts) {
    CostOptions o = good;
    change(o);
    check_error(cost(o), StatusCode::invalid_argument, parts);
  };
  refused([](CostOptions& o) { o.limit = -1; }, {"--limit = -1"});
  refused([](CostOptions& o) { o.max_new = -2; }, {"--max-new = -2"});
  refused([](CostOptions& o) { o.repeats = 0; }, {"--repeats = 0"});
  refused([](CostOptions& o) { o.memory_mb = -3; }, {"--memory-mb = -3"});
  refused([](CostOptions& o) { o.policies = "full,nobody"; }, {"nobody"});
  refused(
      [](CostOptions& o) {
        o.policies = "snapkv";
        o.budgets = "64,4";
      },
      {"snapkv at 4"});
  refused([](CostOptions& o) { o.model = "nowhere"; }, {"--model = nowhere"});
  check_error(cost_of(reasoner(), spec_of("full"), 0, two_problems(), {}, 1).status(), StatusCode::invalid_argument,
              {"texts are 0", "2 problems"});
}
