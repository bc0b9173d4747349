// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

// Also compiled with -ffast-math, hence special numbers by their bits.

#include "beaconkv/algorithm/top_k.hpp"

#include <algorithm>
#include <vector>

#include "support/check.hpp"
#include "support/random.hpp"
#include "support/reference.hpp"

namespace {

using namespace beaconkv;
using namespace beaconkv::test;
using Slots = std::vector<slot_t>;

struct Chosen {
  Slots slots;
  index_t num_nan;
};

Chosen choose(const std::vector<float>& scores, index_t k) {
  Workspace work(top_k_workspace_size(static_cast<index_t>(scores.size())));
  Slots out(scores.size(), -1);
  const TopK result = top_k(scores, k, out, work).or_throw();
  for (std::size_t i = static_cast<std::size_t>(result.count); i < out.size(); ++i) REQUIRE(out[i] == -1);
  out.resize(static_cast<std::size_t>(result.count));
  return {out, result.num_nan};
}

index_t count_nan(const std::vector<float>& scores) {
  return std::count_if(scores.begin(), scores.end(), [](float x) { return (bits_of(x) & 0x7FFFFFFFU) > infinity_bits; });
}

TEST_CASE("[D1] NaN ranks below every number, whatever the order of the input", "[D1]") {
  const float nan = nan_float();
  const std::vector<float> scores{nan, nan, nan, 0, 0, 0};
  const std::vector<float> reversed{0, 0, 0, nan, nan, nan};
  CHECK(choose(scores, 3).slots == Slots{3, 4, 5});
  CHECK(choose(reversed, 3).slots == Slots{0, 1, 2});
  CHECK(choose(scores, 5).slots == Slots{0, 1, 3, 4, 5});
  CHECK(choose(scores, 5).num_nan == 3);
  CHECK(choose({nan, nan, nan}, 2).slots == Slots{0, 1});
  CHECK(choose({nan, nan, nan}, 2).num_nan == 3);
  CHECK(choose({nan, -infinity_float()}, 1).slots == Slots{1});
  CHECK(choose({1, 2}, 1).num_nan == 0);
  CHECK(choose({nan, 2}, 0).num_nan == 1);
  CHECK(choose({float_of(0xFFC00001U), float_of(0x7F800001U), -infinity_float()}, 1).slots ==
        Slots{2});  // NaN of any sign and payload
}

TEST_CASE("[D2] equal scores: the lowest slots win", "[D2]") {
  CHECK(choose({3, 3, 3}, 1).slots == Slots{0});
  CHECK(choose({1, 1, 1, 1, 0, 2, 2, 2, 2, 0}, 6).slots == Slots{0, 1, 5, 6, 7, 8});
}

TEST_CASE("[D3] the order of scores is one that can be sorted by", "[D3]") {
  const std::vector<float> scores{3, nan_float(), 1, nan_float(), 2};
  const Slots order{0, 4, 2, 1, 3};
  for (std::size_t k = 0; k <= order.size(); ++k) {
    Slots expected(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(k));
    std::sort(expected.begin(), expected.end());
    CHECK(choose(scores, static_cast<index_t>(k)).slots == expected);
  }
}

TEST_CASE("[D5] k beyond the scores gives all of them", "[D5]") {
  CHECK(choose({4, 1, 5, 1, 3}, 8).slots == Slots{0, 1, 2, 3, 4});
  CHECK(choose({nan_float(), 1}, 1000000).slots == Slots{0, 1});
  CHECK(choose({1, 2}, std::numeric_limits<index_t>::max()).slots == Slots{0, 1});
  CHECK(choose({}, 3).slots.empty());
  CHECK(choose({}, 0).slots.empty());
  CHECK(choose({1}, 0).slots.empty());
}

TEST_CASE("[A2] the count that was asked for is the count that comes", "[A2]") {
  Random random;
  CAPTURE(random.seed());
  CHECK(choose(random.normals(732), 100).slots.size() == 100);
  CHECK(choose(random.normals(20000), 768).slots.size() == 768);
}

TEST_CASE("-0 equals +0 in top-k") {
  CHECK(choose({-0.0F, 0.0F}, 1).slots == Slots{0});
  CHECK(choose({0.0F, -0.0F}, 1).slots == Slots{0});
  CHECK(choose({-1.0F, 0.0F, -0.0F}, 1).slots == Slots{1});
  CHECK(choose({-1.0F, -0.0F, 0.0F}, 1).slots == Slots{1});
}

TEST_CASE("Top-k agrees with a stable sort on every short list of special numbers") {
  const std::vector<float> alphabet{
      nan_float(), float_of(0xFFFFFFFFU), -infinity_float(), -1.0F, float_of(0x80000001U), -0.0F, 0.0F, float_of(0x1U),
      1.0F,        infinity_float()};
  index_t disagreements = 0;
  for (index_t length = 0; length <= 4; ++length) {
    index_t lists = 1;
    for (index_t i = 0; i < length; ++i) lists *= static_cast<index_t>(alphabet.size());
    Workspace work(top_k_workspace_size(length));
    std::vector<float> scores(static_cast<std::size_t>(length));
    Slots out(scores.size());
    for (index_t list = 0; list < lists; ++list) {
      index_t rest = list;
      for (float& score : scores) {
        score = alphabet[static_cast<std::size_t>(rest) % alphabet.size()];
        rest /= static_cast<index_t>(alphabet.size());
      }
      for (index_t k = 0; k <= length + 1; ++k) {
        const Result<TopK> result = top_k(scores, k, out, work);
        const Slots expected = reference::top_k(scores, k);
        const bool same = result.ok() && result->count == std::min(k, length) && result->num_nan == count_nan(scores) &&
                          std::equal(expected.begin(), expected.end(), out.begin());
        if (!same && ++disagreements == 1) {
          CAPTURE(scores, k, expected, out);
          CHECK(same);
        }
      }
    }
  }
  CHECK(disagreements == 0);
}

TEST_CASE("Top-k agrees with a stable sort on random scores with many ties") {
  Random random;
  CAPTURE(random.seed());
  const index_t n = GENERATE(1, 2, 7, 8, 9, 63, 64, 65, 127, 128, 129, 1000);
  const index_t distinct = GENERATE(1, 2, 5, 40);
  std::vector<float> scores;
  for (index_t i = 0; i < n; ++i) {
    const index_t value = random.integer(0, distinct - 1);
    scores.push_back(random.integer(0, 19) == 0 ? nan_float() : static_cast<float>(value - distinct / 2) / 8.0F);
  }
  for (const index_t k : {index_t{0}, index_t{1}, n / 3, n / 2, n - 1, n, n + 1}) {
    CAPTURE(n, distinct, k);
    const Chosen chosen = choose(scores, k);
    CHECK(chosen.slots == reference::top_k(scores, k));
    CHECK(chosen.num_nan == count_nan(scores));
  }
}

/// What scores look like to a selection: every scale, order and pattern of ties that takes another way through it.
enum class Kind {
  uniform,
  normal,
  ascending,
  descending,
  plateaus,  ///< of 7, as pooling makes them
  two_values,
  mostly_zero,
  equal,
  denormals,
  some_nan,
  mostly_nan,
  infinities,
  far_apart,  ///< all but one next to each other
  bit_patterns,
  last
};

std::vector<float> make_scores(Random& random, Kind kind, index_t n) {
  std::vector<float> scores;
  for (index_t i = 0; i < n; ++i) {
    const float u = random.uniform(0, 1);
    float x = u;
    if (kind == Kind::normal) x = random.normal();
    if (kind == Kind::plateaus && i % 7 != 0) x = scores.back();
    if (kind == Kind::two_values) x = u < 0.5F ? -0.0F : 1.0F;
    if (kind == Kind::mostly_zero) x = u < 0.9F ? 0.0F : u;
    if (kind == Kind::equal) x = -0.25F;
    if (kind == Kind::denormals) x = float_of(random.bits() & 0x800000FFU);
    if (kind == Kind::some_nan && u < 0.05F) x = nan_float();
    if (kind == Kind::mostly_nan && u < 0.95F) x = nan_float();
    if (kind == Kind::infinities) x = u < 0.3F ? infinity_float() : (u < 0.6F ? -infinity_float() : u);
    if (kind == Kind::far_apart) x = i == n / 2 ? -infinity_float() : float_of(0x3F800000U + (random.bits() & 0xFFU));
    if (kind == Kind::bit_patterns) x = float_of(random.bits());
    scores.push_back(x);
  }
  if (kind == Kind::ascending) std::sort(scores.begin(), scores.end());
  if (kind == Kind::descending) std::sort(scores.begin(), scores.end(), std::greater<>());
  return scores;
}

TEST_CASE("Top-k agrees with a stable sort on every kind of scores and every instruction set") {
  Random random;
  CAPTURE(random.seed());
  const InstructionSet chosen = instruction_set();
  for (int k = 0; k < static_cast<int>(Kind::last); ++k)
    for (const index_t n : {1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 511, 512, 640, 2049, 5000}) {
      const std::vector<float> scores = make_scores(random, static_cast<Kind>(k), n);
      const Slots best_first = reference::best_first(scores);
      for (const index_t keep : {index_t{1}, n / 8, n / 2, n / 8 * 7, n - 17, n - 1}) {
        if (keep < 1) continue;
        Slots expected(best_first.begin(), best_first.begin() + keep);
        std::sort(expected.begin(), expected.end());
        for (const InstructionSet set : {InstructionSet::baseline, InstructionSet::avx2, InstructionSet::avx512}) {
          if (!use_instruction_set(set).ok()) continue;
          const Chosen got = choose(scores, keep);
          const bool same = got.slots == expected && got.num_nan == count_nan(scores);
          CAPTURE(k, n, keep, name_of(set));
          REQUIRE(same);
        }
      }
    }
  REQUIRE(use_instruction_set(chosen).ok());
}

TEST_CASE("Top-k writes nothing behind the indices that it owes") {
  Random random;
  CAPTURE(random.seed());
  const index_t n = 300;
  for (index_t k = 0; k <= n; ++k) {
    const std::vector<float> scores = make_scores(random, k % 2 == 0 ? Kind::uniform : Kind::two_values, n);
    std::vector<slot_t> exact(static_cast<std::size_t>(k));  // ends where the heap block does: for the sanitizers
    Workspace work(top_k_workspace_size(n));
    REQUIRE(top_k(scores, k, exact, work).ok());
    CAPTURE(k);
    REQUIRE(choose(scores, k).slots == exact);  // and `choose` looks at what lies behind
  }
}

TEST_CASE("Top-k agrees with a stable sort on arbitrary bit patterns") {
  Random random;
  CAPTURE(random.seed());
  for (index_t round = 0; round < 300; ++round) {
    std::vector<float> scores;
    const index_t n = random.integer(1, 200);
    for (index_t i = 0; i < n; ++i) scores.push_back(float_of(random.bits()));
    const index_t k = random.integer(0, n);
    CAPTURE(round, n, k);
    REQUIRE(choose(scores, k).slots == reference::top_k(scores, k));
  }
}

TEST_CASE("A longer top-k contains the shorter one") {
  Random random;
  CAPTURE(random.seed());
  std::vector<float> scores = random.normals(150);
  for (float& x : scores) x = std::round(4 * x) / 4;
  for (index_t k = 0; k < 150; ++k) {
    const Slots shorter = choose(scores, k).slots;
    const Slots longer = choose(scores, k + 1).slots;
    CAPTURE(k);
    CHECK(std::includes(longer.begin(), longer.end(), shorter.begin(), shorter.end()));
    CHECK(std::adjacent_find(longer.begin(), longer.end(), std::greater_equal<>()) == longer.end());
  }
}

TEST_CASE("[K4] top-k uses the workspace that it asked for and allocates nothing", "[K4]") {
  Random random;
  CAPTURE(random.seed());
  const index_t n = GENERATE(0, 1, 7, 8, 9, 64, 65, 5000);
  const std::vector<float> scores = random.normals(n);
  Slots out(scores.size());
  check_workspace(
      top_k_workspace_size(n), [&](Workspace& work) { return top_k(scores, n / 2, out, work).status(); },
      [&] { std::fill(out.begin(), out.end(), -7); });
  CHECK(std::count(out.begin(), out.end(), -7) == n);
}

TEST_CASE("Bad arguments of top-k are named and nothing is written") {
  const std::vector<float> scores{1, 2, 3};
  Slots out(2, -7);
  Workspace work(top_k_workspace_size(3));
  check_invalid(top_k(scores, -1, out, work).status(), {"k = -1"});
  check_invalid(top_k(scores, std::numeric_limits<index_t>::min(), out, work).status(), {"k = -9223372036854775808"});
  check_invalid(top_k(scores, 3, out, work).status(), {"out has room for 2", "3 are needed"});
  check_invalid(top_k(scores, 2000000000, out, work).status(), {"out has room for 2", "3 are needed"});
  CHECK(out == Slots{-7, -7});
  CHECK(work.peak() == 0);
}

}  // namespace
