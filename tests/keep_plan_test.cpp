// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "beaconkv/keep_plan.hpp"

#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "beaconkv/memory/plane_cache.hpp"
#include "support/check.hpp"
#include "support/random.hpp"

namespace {

using namespace beaconkv;
using namespace beaconkv::test;
using Slots = std::vector<slot_t>;

/// What `assign` reads of a cache.
struct FakeCache {
  index_t heads = 1;
  index_t tokens = 0;
  std::uint64_t state = 17;
  [[nodiscard]] index_t num_kv_heads() const noexcept { return heads; }
  [[nodiscard]] index_t num_tokens() const noexcept { return tokens; }
  [[nodiscard]] std::uint64_t epoch() const noexcept { return state; }
};

/// A cache whose heads have positions of their own.
struct FakePositions : FakeCache {
  std::vector<std::vector<position_t>> positions;
  explicit FakePositions(std::vector<std::vector<position_t>> all)
      : FakeCache{static_cast<index_t>(all.size()), static_cast<index_t>(all.front().size())}, positions(std::move(all)) {}
  [[nodiscard]] position_t position(index_t head, index_t slot) const noexcept {
    return positions[static_cast<std::size_t>(head)][static_cast<std::size_t>(slot)];
  }
};

Status assign(KeepPlan& plan, const FakeCache& cache, const std::vector<Slots>& sets) {
  std::vector<std::span<const slot_t>> spans(sets.begin(), sets.end());
  return plan.assign(cache, spans);
}

KeepPlan plan_of(index_t tokens, const Slots& kept) {
  KeepPlan plan;
  assign(plan, {1, tokens}, {kept}).or_throw();
  return plan;
}

std::vector<Range> evicted_runs(const KeepPlan& plan, index_t head = 0) {
  std::vector<Range> runs;
  plan.for_each_evicted_run(head, [&](Range run) { runs.push_back(run); });
  return runs;
}

std::vector<Range> evicted_positions(const KeepPlan& plan, const FakePositions& cache, index_t head = 0) {
  std::vector<Range> ranges;
  plan.for_each_evicted_positions(cache, head, [&](Range range) { ranges.push_back(range); }).or_throw();
  return ranges;
}

struct Move {
  index_t to;
  index_t from;
  index_t count;
  bool operator==(const Move&) const = default;
};

std::vector<Move> moves(const KeepPlan& plan, index_t head = 0) {
  std::vector<Move> all;
  plan.for_each_move(head, [&](index_t to, index_t from, index_t count) { all.push_back({to, from, count}); });
  return all;
}

Slots old_to_new(const KeepPlan& plan, index_t head = 0) {
  Slots map(static_cast<std::size_t>(plan.tokens_before()));
  plan.old_to_new(head, map);
  return map;
}

TEST_CASE("[B5] a plan maps old slots to new ones and names the removed ranges", "[B5]") {
  const KeepPlan plan = plan_of(10, {0, 1, 6, 7, 8, 9});
  const Slots map = old_to_new(plan);
  CHECK(map[6] == 2);
  CHECK(map[9] == 5);
  CHECK(map[3] == -1);
  CHECK(map == Slots{0, 1, -1, -1, -1, -1, 2, 3, 4, 5});
  CHECK(evicted_runs(plan) == std::vector<Range>{{2, 6}});
  CHECK(moves(plan) == std::vector<Move>{{0, 0, 2}, {2, 6, 4}});
  CHECK(plan.num_evicted(0) == 4);
  CHECK_FALSE(plan.keeps_all());
}

TEST_CASE("[J3] moves are safe to run from front to back", "[J3]") {
  const KeepPlan plan = plan_of(16, {0, 1, 5, 6, 9, 10, 13, 14, 15});
  CHECK(moves(plan) == std::vector<Move>{{0, 0, 2}, {2, 5, 2}, {4, 9, 2}, {6, 13, 3}});
  CHECK(evicted_runs(plan) == std::vector<Range>{{2, 5}, {7, 9}, {11, 13}});
}

TEST_CASE("[A11] evicted runs come oldest first", "[A11]") {
  CHECK(evicted_runs(plan_of(9, {0, 1, 5, 6, 7, 8})) == std::vector<Range>{{2, 5}});
}

TEST_CASE("[M3] the longest prefix that is still valid", "[M3]") {
  Slots kept{0, 1, 2, 3};
  for (slot_t slot = 20; slot < 40; ++slot) kept.push_back(slot);
  CHECK(plan_of(40, kept).unchanged_prefix() == 4);
}

TEST_CASE("[I4] the first slot whose content changes", "[I4]") {
  Slots kept;
  for (slot_t slot = 0; slot < 64; ++slot)
    if (slot < 20 || slot > 22) kept.push_back(slot);
  CHECK(plan_of(64, kept).unchanged_prefix() == 20);
}

TEST_CASE("The unchanged prefix is the shortest of all heads, and everything where nothing goes") {
  CHECK(plan_of(5, {0, 1, 2, 3, 4}).unchanged_prefix() == 5);
  CHECK(plan_of(5, {0, 1, 2}).unchanged_prefix() == 3);  // only the end goes
  CHECK(plan_of(5, {1, 2}).unchanged_prefix() == 0);
  CHECK(plan_of(5, {}).unchanged_prefix() == 0);
  CHECK(plan_of(0, {}).unchanged_prefix() == 0);
  CHECK(KeepPlan().unchanged_prefix() == 0);
  KeepPlan plan;
  assign(plan, {3, 6}, {{0, 1, 2, 5}, {0, 1, 4, 5}, {0, 1, 2, 3}}).or_throw();
  CHECK(plan.unchanged_prefix() == 2);
  CHECK(plan.unchanged_prefix(0) == 3);
  CHECK(plan.unchanged_prefix(1) == 2);
  CHECK(plan.unchanged_prefix(2) == 4);
}

TEST_CASE("[B5] evicted runs as positions, newest first, each head's own", "[B5]") {
  const FakePositions fresh{{{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}}};
  CHECK(evicted_positions(plan_of(10, {0, 1, 6, 7, 8, 9}), fresh) == std::vector<Range>{{2, 6}});
  CHECK(evicted_positions(plan_of(10, {1, 4, 5, 8}), fresh) == std::vector<Range>{{9, 10}, {6, 8}, {2, 4}, {0, 1}});
  CHECK(evicted_positions(plan_of(10, {}), fresh) == std::vector<Range>{{0, 10}});
  CHECK(evicted_positions(plan_of(10, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9}), fresh).empty());

  // 2 to 5 and 8 went before, and positions began at 100 in head 1.
  const FakePositions gaps{{{0, 1, 6, 7, 9, 10}, {100, 103, 104, 105, 106, 120}}};
  KeepPlan plan;
  assign(plan, gaps, {{0, 4}, {1, 5}}).or_throw();
  CHECK(evicted_positions(plan, gaps, 0) == std::vector<Range>{{10, 11}, {1, 8}});
  CHECK(evicted_positions(plan, gaps, 1) == std::vector<Range>{{104, 107}, {100, 101}});
}

TEST_CASE("[B4] ranges in original numbering may be removed, and the rest moved up, one after the other", "[B4]") {
  const FakePositions cache{{{0, 1, 2, 3, 4, 5, 6, 7, 8}}};
  const KeepPlan plan = plan_of(9, {0, 1, 4, 5, 7, 8});
  std::string tokens = "abcdefghj";
  CHECK(plan.for_each_evicted_positions(cache, 0,
                                        [&](Range range) {  // at once, as `seq_rm` and `seq_add` do
                                          tokens.erase(static_cast<std::size_t>(range.first),
                                                       static_cast<std::size_t>(range.size()));
                                        })
            .ok());
  CHECK(tokens == "abefhj");
}

TEST_CASE("Positions are told before a plan is applied, of heads that there are") {
  FakePositions cache{{{0, 1, 2, 3}}};
  const KeepPlan plan = plan_of(4, {0, 3});
  index_t calls = 0;
  const auto count = [&](Range) { ++calls; };
  check_invalid(plan.for_each_evicted_positions(cache, 1, count), {"head = 1"});
  check_invalid(plan.for_each_evicted_positions(cache, -1, count), {"head = -1"});
  check_error(KeepPlan().for_each_evicted_positions(cache, 0, count), StatusCode::stale_plan, {"plan"});
  cache.state = 18;
  check_error(plan.for_each_evicted_positions(cache, 0, count), StatusCode::stale_plan, {"4 tokens"});
  cache.state = 17;
  cache.tokens = 3;
  check_error(plan.for_each_evicted_positions(cache, 0, count), StatusCode::stale_plan, {"4 tokens", "now 3"});
  CHECK(calls == 0);
}

TEST_CASE("Plans at the ends: nothing kept, everything kept, first or last only") {
  CHECK(evicted_runs(plan_of(5, {})) == std::vector<Range>{{0, 5}});
  CHECK(moves(plan_of(5, {})).empty());
  CHECK(old_to_new(plan_of(2, {})) == Slots{-1, -1});
  CHECK(plan_of(3, {0, 1, 2}).keeps_all());
  CHECK(evicted_runs(plan_of(3, {0, 1, 2})).empty());
  CHECK(moves(plan_of(3, {0, 1, 2})) == std::vector<Move>{{0, 0, 3}});
  CHECK(evicted_runs(plan_of(3, {0})) == std::vector<Range>{{1, 3}});
  CHECK(evicted_runs(plan_of(3, {2})) == std::vector<Range>{{0, 2}});
  CHECK(moves(plan_of(3, {2})) == std::vector<Move>{{0, 2, 1}});
  CHECK(plan_of(0, {}).keeps_all());
  CHECK(evicted_runs(plan_of(0, {})).empty());
}

TEST_CASE("Map, evicted runs and moves of any plan agree") {
  Random random;
  CAPTURE(random.seed());
  for (index_t round = 0; round < 500; ++round) {
    const index_t tokens = random.integer(0, 70);
    const Slots kept = random.subset(random.integer(0, tokens), tokens);
    CAPTURE(round, tokens, kept);
    const KeepPlan plan = plan_of(tokens, kept);
    const Slots map = old_to_new(plan);

    Slots from_map;
    for (index_t old = 0; old < tokens; ++old)
      if (map[static_cast<std::size_t>(old)] >= 0) {
        REQUIRE(map[static_cast<std::size_t>(old)] == static_cast<slot_t>(from_map.size()));
        from_map.push_back(static_cast<slot_t>(old));
      }
    REQUIRE(from_map == kept);

    index_t unchanged = 0;
    while (unchanged < tokens && map[static_cast<std::size_t>(unchanged)] == unchanged) ++unchanged;
    REQUIRE(plan.unchanged_prefix() == unchanged);

    FakePositions cache{{std::vector<position_t>(static_cast<std::size_t>(tokens))}};
    position_t position = random.integer(0, 3);
    for (position_t& p : cache.positions[0]) {
      p = position;
      position += random.integer(1, 3);
    }
    std::vector<Range> expected;
    for (const Range& run : evicted_runs(plan))
      expected.insert(expected.begin(), {cache.position(0, run.first), cache.position(0, run.last - 1) + 1});
    REQUIRE(evicted_positions(plan, cache) == expected);

    std::vector<bool> gone(static_cast<std::size_t>(tokens), false);
    std::int64_t end_before = -1;
    for (const Range& run : evicted_runs(plan)) {
      REQUIRE(run.first > end_before);  // maximal: a kept slot lies between two runs
      REQUIRE(run.size() > 0);
      for (std::int64_t s = run.first; s < run.last; ++s) gone[static_cast<std::size_t>(s)] = true;
      end_before = run.last;
    }
    for (std::size_t old = 0; old < map.size(); ++old) REQUIRE(gone[old] == (map[old] < 0));

    index_t next_to = 0;
    index_t end_from = -1;
    for (const Move& move : moves(plan)) {
      REQUIRE(move.to == next_to);
      REQUIRE(move.to <= move.from);
      REQUIRE(move.from > end_from);
      REQUIRE(move.count > 0);
      for (index_t i = 0; i < move.count; ++i) REQUIRE(map[static_cast<std::size_t>(move.from + i)] == move.to + i);
      next_to += move.count;
      end_from = move.from + move.count;
    }
    REQUIRE(next_to == static_cast<index_t>(kept.size()));
    REQUIRE(plan.num_kept(0) + plan.num_evicted(0) == tokens);
    REQUIRE(plan.keeps_all() == (static_cast<index_t>(kept.size()) == tokens));
  }
}

TEST_CASE("A plan of several heads keeps each head's set; one set counts for all heads") {
  KeepPlan plan;
  assign(plan, {3, 6}, {{0, 5}, {1, 2}, {3, 4}}).or_throw();
  CHECK(plan.sets() == 3);
  CHECK(to_vector(plan.kept(0)) == Slots{0, 5});
  CHECK(to_vector(plan.kept(1)) == Slots{1, 2});
  CHECK(to_vector(plan.kept(2)) == Slots{3, 4});
  CHECK(evicted_runs(plan, 1) == std::vector<Range>{{0, 1}, {3, 6}});
  CHECK(moves(plan, 2) == std::vector<Move>{{0, 3, 2}});
  CHECK(old_to_new(plan, 2) == Slots{-1, -1, -1, 0, 1, -1});

  assign(plan, {3, 6}, {{2, 4}}).or_throw();
  CHECK(plan.sets() == 1);
  for (const index_t head : {0, 1, 2}) CHECK(to_vector(plan.kept(head)) == Slots{2, 4});
  CHECK(plan.num_evicted(2) == 4);
}

TEST_CASE("A plan that keeps all of one head only does not keep all") {
  KeepPlan plan;
  assign(plan, {2, 3}, {{0, 1, 2}, {0, 1}}).or_throw();
  CHECK_FALSE(plan.keeps_all());
}

TEST_CASE("A plan made by hand knows the state that it was made for") {
  KeepPlan plan;
  assign(plan, {2, 6, 41}, {{0, 5}}).or_throw();
  CHECK(plan.epoch() == 41);
  CHECK(plan.tokens_before() == 6);
  CHECK(plan.candidates() == Range{0, 6});
  CHECK(plan.shortfall() == 0);
  CHECK(plan.num_non_finite() == 0);
  CHECK(to_vector(plan.kept_scores(1)) == std::vector<float>{0, 0});
}

TEST_CASE("A plan by hand with bad slots is refused and the old plan stays") {
  KeepPlan plan;
  assign(plan, {2, 6, 5}, {{0, 5}, {1, 2}}).or_throw();
  const FakeCache cache{2, 4, 6};
  check_invalid(assign(plan, cache, {{0, 4}}), {"set 0", "slot 4", "4"});
  check_invalid(assign(plan, cache, {{0, 1}, {2, 1}}), {"set 1", "slot 1", "behind 2"});
  check_invalid(assign(plan, cache, {{0, 1}, {2, 2}}), {"set 1", "slot 2", "behind 2"});
  check_invalid(assign(plan, cache, {{-1}}), {"set 0", "slot -1"});
  check_invalid(assign(plan, cache, {}), {"sets = 0", "2 KV heads"});
  check_invalid(assign(plan, cache, {{0}, {0}, {0}}), {"sets = 3", "2 KV heads"});
  CHECK(plan.epoch() == 5);
  CHECK(plan.tokens_before() == 6);
  CHECK(plan.sets() == 2);
  CHECK(to_vector(plan.kept(0)) == Slots{0, 5});
  CHECK(to_vector(plan.kept(1)) == Slots{1, 2});
}

TEST_CASE("[J4] sources out of order are refused", "[J4]") {
  KeepPlan plan;
  check_invalid(assign(plan, {1, 10}, {{9, 0, 5}}), {"slot 0", "behind 9"});
  CHECK(plan.sets() == 0);
}

TEST_CASE("Scores belong to the kept slots of their set, and a report stays until the next plan") {
  KeepPlan plan;
  plan.start(3, 8, {2, 7});
  const Slots first{1, 3, 4};
  std::copy(first.begin(), first.end(), plan.add_set(3, plan.tokens_before()).begin());
  plan.last_scores()[1] = 0.5F;
  const Slots second{0, 6};
  std::copy(second.begin(), second.end(), plan.add_set(2, plan.tokens_before()).begin());
  CHECK(plan.last_scores().size() == 2);
  plan.last_scores()[0] = 2.0F;
  plan.report(4, 7);
  CHECK(to_vector(plan.kept_scores(0)) == std::vector<float>{0, 0.5F, 0});
  CHECK(to_vector(plan.kept_scores(1)) == std::vector<float>{2, 0});
  CHECK(plan.candidates() == Range{2, 7});
  CHECK(plan.shortfall() == 4);
  CHECK(plan.num_non_finite() == 7);

  plan.start(4, 8, {0, 8});
  CHECK(plan.sets() == 0);
  CHECK(plan.shortfall() == 0);
  CHECK(plan.num_non_finite() == 0);
  static_cast<void>(plan.add_set(3, plan.tokens_before()));
  CHECK(to_vector(plan.kept_scores(0)) == std::vector<float>{0, 0, 0});  // nothing left of the old ones
}

TEST_CASE("A reserved plan allocates nothing, and a copy is a plan of its own") {
  KeepPlan plan;
  plan.reserve(2, 100);
  const std::vector<Slots> sets{{0, 1, 50, 99}, {3, 4}};
  const std::array<std::span<const slot_t>, 2> spans{sets[0], sets[1]};
  const FakeCache cache{2, 100};
  const FakePositions positions{{std::vector<position_t>(100, 0), std::vector<position_t>(100, 0)}};
  Slots map(100);
  bool ok = false;
  index_t calls = 0;
  CHECK(allocations_of([&] {
          ok = plan.assign(cache, spans).ok();
          plan.old_to_new(0, map);
          plan.for_each_move(0, [&](index_t, index_t, index_t) { ++calls; });
          plan.for_each_evicted_run(1, [&](Range) { ++calls; });
          ok = ok && plan.for_each_evicted_positions(positions, 1, [&](Range) { ++calls; }).ok();
          calls += plan.unchanged_prefix();
        }) == 0);
  CHECK(ok);
  CHECK(calls == 3 + 2 + 2);

  const KeepPlan copy = plan;
  plan.start(1, 1, {0, 1});
  CHECK(to_vector(copy.kept(1)) == Slots{3, 4});
}

}  // namespace
