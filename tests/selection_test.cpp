// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

// From scores to a head's set: against a slow choice, over protection, ties and scores that are no numbers.

#include "beaconkv/policy/selection.hpp"

#include <limits>
#include <string>
#include <vector>

#include "support/catch.hpp"
#include "support/policy_run.hpp"
#include "support/random.hpp"
#include "support/reference.hpp"

namespace {

using namespace beaconkv;
using namespace beaconkv::test;

constexpr float nan_score = std::numeric_limits<float>::quiet_NaN();
constexpr float infinity = std::numeric_limits<float>::infinity();

struct Chosen {
  std::vector<slot_t> kept;
  std::vector<float> kept_scores;
  index_t shortfall = 0;
};

Chosen choose(const PositionCache& cache, index_t head, const std::vector<float>& scores, Range candidates,
              const std::vector<Range>& ranges, index_t keep) {
  Workspace work(detail::selection_workspace_size(cache.num_tokens()));
  KeepPlan plan;
  plan.start(cache.epoch(), cache.num_tokens(), candidates);
  const index_t shortfall = require_value(detail::select_head(cache, head, scores, candidates, ranges, keep, plan, work));
  const std::span<const float> kept_scores = plan.kept_scores(0);
  return {slots_of(plan.kept(0)), {kept_scores.begin(), kept_scores.end()}, shortfall};
}

/// Positions 0 .. n - 1 in every head.
PositionCache dense(index_t n, index_t heads = 1) {
  std::vector<position_t> positions;
  for (index_t i = 0; i < n; ++i) positions.push_back(i);
  return {std::vector<std::vector<position_t>>(at(heads), positions)};
}

bool is_protected(const PositionCache& cache, index_t head, slot_t slot, Range candidates, const std::vector<Range>& ranges) {
  if (slot < candidates.first || slot >= candidates.last) return true;
  const position_t p = cache.position(head, slot);
  return std::any_of(ranges.begin(), ranges.end(), [&](const Range& r) { return r.first <= p && p < r.last; });
}

float random_score(Random& random) {
  switch (random.integer(0, 9)) {
    case 0:
      return nan_score;
    case 1:
      return infinity;
    case 2:
      return -infinity;
    case 3:
      return -0.0F;
    case 4:
      return 0.0F;
    default:
      return static_cast<float>(random.integer(-3, 3)) / 2;
  }
}

/// Ascending and disjoint, some of them next to each other, some without any token in them.
std::vector<Range> random_ranges(Random& random, position_t end) {
  std::vector<Range> out;
  for (position_t p = random.integer(0, 6); p < end;) {
    const position_t last = p + random.integer(1, 9);
    if (random.coin()) out.push_back({p, last});
    p = last + random.integer(0, 3);
  }
  return out;
}

std::string as_text(const std::vector<Range>& ranges) {
  std::string text;
  for (const Range& r : ranges) text += "[" + std::to_string(r.first) + "," + std::to_string(r.last) + ") ";
  return text;
}

}  // namespace

TEST_CASE("select_head keeps the protected slots and the best of the others", "[selection]") {
  Random random;
  CAPTURE(random.seed());
  for (int trial = 0; trial < 3000; ++trial) {
    PositionCache cache{std::vector<std::vector<position_t>>(2)};
    const index_t n = random.integer(0, 40);
    for (auto& positions : cache.positions)
      for (const slot_t p : random.subset(n, 60)) positions.push_back(p);
    const index_t head = random.integer(0, 1);
    const index_t first = random.integer(0, n);
    const Range candidates{first, random.integer(first, n)};
    const std::vector<Range> ranges = random.coin() ? random_ranges(random, 60) : std::vector<Range>{};
    const index_t keep = random.integer(0, n + 3);
    std::vector<float> scores;
    for (index_t i = 0; i < n; ++i) scores.push_back(random_score(random));

    std::vector<slot_t> open;
    std::vector<float> open_scores;
    for (slot_t s = 0; s < static_cast<slot_t>(n); ++s)
      if (!is_protected(cache, head, s, candidates, ranges)) {
        open.push_back(s);
        open_scores.push_back(scores[at(s)]);
      }
    const index_t fixed = n - static_cast<index_t>(open.size());
    std::vector<slot_t> want;
    for (slot_t s = 0; s < static_cast<slot_t>(n); ++s)
      if (is_protected(cache, head, s, candidates, ranges)) want.push_back(s);
    for (const slot_t i : reference::top_k(open_scores, std::max<index_t>(0, keep - fixed))) want.push_back(open[at(i)]);
    std::sort(want.begin(), want.end());

    REQUIRE(detail::num_open(cache, head, candidates, ranges) == static_cast<index_t>(open.size()));
    const Chosen got = choose(cache, head, scores, candidates, ranges, keep);
    CAPTURE(trial, n, candidates.first, candidates.last, keep, as_text(ranges));
    REQUIRE(got.kept == want);
    REQUIRE(got.shortfall == std::max<index_t>(0, fixed - keep));
    for (std::size_t i = 0; i < want.size(); ++i) {
      const float expected = is_protected(cache, head, want[i], candidates, ranges) ? 0.0F : scores[at(want[i])];
      REQUIRE(std::bit_cast<std::uint32_t>(got.kept_scores[i]) == std::bit_cast<std::uint32_t>(expected));
    }
  }
}

TEST_CASE("[D2] equal scores: the lowest slots stay", "[selection]") {
  REQUIRE(choose(dense(3), 0, {3, 3, 3}, {0, 3}, {}, 1).kept == std::vector<slot_t>{0});
  REQUIRE(choose(dense(10), 0, {1, 1, 1, 1, 0, 2, 2, 2, 2, 0}, {0, 10}, {}, 6).kept == std::vector<slot_t>{0, 1, 5, 6, 7, 8});
  REQUIRE(choose(dense(4), 0, {-0.0F, 0.0F, -0.0F, 0.0F}, {0, 4}, {}, 2).kept == std::vector<slot_t>{0, 1});
}

TEST_CASE("[D1] NaN goes first wherever it stands", "[selection]") {
  REQUIRE(choose(dense(6), 0, {nan_score, nan_score, nan_score, 0, 0, 0}, {0, 6}, {}, 3).kept == std::vector<slot_t>{3, 4, 5});
  REQUIRE(choose(dense(6), 0, {0, 0, 0, nan_score, nan_score, nan_score}, {0, 6}, {}, 3).kept == std::vector<slot_t>{0, 1, 2});
  REQUIRE(choose(dense(6), 0, {nan_score, nan_score, nan_score, 0, 0, 0}, {0, 6}, {}, 5).kept ==
          std::vector<slot_t>{0, 1, 3, 4, 5});
  REQUIRE(choose(dense(3), 0, {nan_score, nan_score, nan_score}, {0, 3}, {}, 2).kept == std::vector<slot_t>{0, 1});
  REQUIRE(choose(dense(3), 0, {nan_score, -infinity, nan_score}, {0, 3}, {}, 1).kept == std::vector<slot_t>{1});
}

TEST_CASE("[D5] more than there are candidates: all of them", "[selection]") {
  REQUIRE(choose(dense(5), 0, {1, 5, 2, 4, 3}, {0, 5}, {}, 8).kept == std::vector<slot_t>{0, 1, 2, 3, 4});
}

TEST_CASE("protection is no score: it holds against infinities, and what it takes beyond the budget is reported",
          "[selection]") {
  const std::vector<float> scores{-infinity, nan_score, infinity, infinity, -infinity, nan_score, infinity, -infinity};
  const Chosen all = choose(dense(8), 0, scores, {1, 7}, {{4, 6}}, 6);
  REQUIRE(all.kept == std::vector<slot_t>{0, 2, 3, 4, 5, 7});
  REQUIRE(all.shortfall == 0);
  const Chosen too_many = choose(dense(8), 0, scores, {1, 7}, {{4, 6}}, 1);
  REQUIRE(too_many.kept == std::vector<slot_t>{0, 4, 5, 7});
  REQUIRE(too_many.shortfall == 3);
}

TEST_CASE("a protected range is one of positions, not of slots", "[selection]") {
  PositionCache cache{{{0, 5, 10, 11, 12, 30}, {0, 1, 2, 3, 12, 31}}};
  REQUIRE(choose(cache, 0, {0, 0, 0, 0, 0, 0}, {0, 6}, {{11, 31}}, 4).kept == std::vector<slot_t>{0, 3, 4, 5});
  REQUIRE(choose(cache, 1, {0, 0, 0, 0, 0, 0}, {0, 6}, {{11, 31}}, 4).kept == std::vector<slot_t>{0, 1, 2, 4});
}

TEST_CASE("[E2] one set for all heads comes of all heads' scores", "[selection]") {
  std::vector<float> all{9, 0, 0, 1, 0, 8, 8, 0};
  const ScoreMatrix scores{all.data(), 2, 4};
  SECTION("mean") {
    reduce_heads(scores, Reduce::mean);
    REQUIRE(std::vector<float>(all.begin(), all.begin() + 4) == std::vector<float>{4.5F, 4, 4, 0.5F});
  }
  SECTION("max") {
    reduce_heads(scores, Reduce::max);
    REQUIRE(std::vector<float>(all.begin(), all.begin() + 4) == std::vector<float>{9, 8, 8, 1});
  }
  SECTION("sum") {
    reduce_heads(scores, Reduce::sum);
    REQUIRE(std::vector<float>(all.begin(), all.begin() + 4) == std::vector<float>{9, 8, 8, 1});
  }
  REQUIRE(choose(dense(4), 0, {all.begin(), all.begin() + 4}, {0, 4}, {}, 2).kept == std::vector<slot_t>{0, 1});
}

TEST_CASE("[D1] a NaN of any head is a NaN of the shared set, in whatever order the heads come", "[selection]") {
  for (const Reduce how : {Reduce::max, Reduce::mean, Reduce::sum})
    for (index_t bad = 0; bad < 3; ++bad) {
      std::vector<float> all{1, 2, 3, 4, 5, 6};  // [3 heads][2 slots]
      all[at(2 * bad)] = nan_score;
      reduce_heads({all.data(), 3, 2}, how);
      CAPTURE(static_cast<int>(how), bad);
      REQUIRE(std::isnan(all[0]));
      REQUIRE_FALSE(std::isnan(all[1]));
    }
}

TEST_CASE("select_head takes exactly the scratch that it asks for", "[selection]") {
  for (const index_t n : {0, 1, 15, 16, 17, 100}) {
    const WorkspaceSize size = detail::selection_workspace_size(n);
    Workspace work(size);
    KeepPlan plan;
    plan.start(1, n, {0, n});
    const std::vector<float> scores(at(n), 1.0F);
    const std::vector<Range> outside{{1000, 1001}};  // ranges are what takes most
    require_ok(detail::select_head(dense(n), 0, scores, {0, n}, outside, n / 2, plan, work).status());
    CAPTURE(n);
    REQUIRE(work.peak() == size.bytes);
  }
}
