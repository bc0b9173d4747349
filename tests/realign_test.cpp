// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

// Moving cached keys to other positions, over every storage type and layout.

#include "beaconkv/policy/realign.hpp"

#include <vector>

#include "beaconkv/policy/recent_window.hpp"
#include "support/catch.hpp"
#include "support/policy_run.hpp"

namespace {

using namespace beaconkv;
using namespace beaconkv::test;

template <class Cache>
concept CanRealign = requires(Cache& cache, std::span<const position_t> positions, const RopeTable& rope, Workspace& work) {
  realign_keys(cache, 0, positions, positions, rope, work);
};
static_assert(CanRealign<PlaneCache<float16>>);
// [C7] Where keys cannot be written back there is nothing to call.
static_assert(!CanRealign<PositionCache>);

constexpr Shape shape{.query_heads = 2, .kv_heads = 2, .head_dim = 24};

/// The unit in the last place of a storage type, relative.
template <class K>
constexpr double rounding = 0x1p-23;
template <>
constexpr double rounding<float16> = 0x1p-10;
template <>
constexpr double rounding<bfloat16> = 0x1p-7;

template <class CacheT>
std::vector<position_t> positions_of(const CacheT& cache, index_t head) {
  std::vector<position_t> out;
  for (index_t s = 0; s < cache.view().num_tokens(); ++s) out.push_back(cache.view().position(head, s));
  return out;
}

std::vector<position_t> counting(index_t n) {
  std::vector<position_t> out;
  for (position_t p = 0; p < n; ++p) out.push_back(p);
  return out;
}

double largest(const reference::Row& row) {
  double out = 0;
  for (const double x : row) out = std::max(out, std::abs(x));
  return out;
}

template <class K>
void compare_moves(Random& random, Layout layout, const RopeCase& rope_case) {
  const RopeTable rope(rope_case.options);
  TestCache<K> cache(shape, 20, layout);
  std::vector<position_t> from[2];
  std::vector<position_t> to[2];
  for (index_t i = 0; i < 20; ++i) {
    cache.append({i, {}, {}, random.normals(48, 2.0F), random.normals(48)});
    for (auto& list : from) list.push_back(random.integer(0, 120000));
    for (std::size_t h = 0; h < 2; ++h) to[h].push_back(random.integer(0, 3) == 0 ? from[h].back() : random.integer(0, 120000));
  }
  const TestCache<K> before = cache;
  Workspace work(realign_workspace_size(24));
  for (index_t h = 0; h < 2; ++h) require_ok(realign_keys(cache.view(), h, from[h], to[h], rope, work));
  REQUIRE(positions_of(cache, 0) == counting(20));
  for (index_t h = 0; h < 2; ++h)
    for (index_t s = 0; s < 20; ++s) {
      CAPTURE(h, s, static_cast<int>(layout));
      REQUIRE(cache.value(h, s) == before.value(h, s));  // [C7c]
      const position_t delta = to[h][at(s)] - from[h][at(s)];
      if (delta == 0) {
        REQUIRE(cache.key(h, s) == before.key(h, s));
        continue;
      }
      const reference::Row want =
          reference::rotated(before.key(h, s), delta, rope_case.reference.frequencies, rope_case.reference.layout);
      const reference::Row got = cache.key(h, s);
      for (std::size_t d = 0; d < want.size(); ++d)
        REQUIRE_THAT(got[d], Catch::Matchers::WithinAbs(want[d], 2 * rounding<K> * largest(want)));
      for (std::size_t d = 2 * rope_case.reference.frequencies.size(); d < want.size(); ++d)
        REQUIRE(got[d] == before.key(h, s)[d]);
    }
}

}  // namespace

TEST_CASE("realign_keys turns each key by its distance, in every storage type and layout", "[realign]") {
  Random random;
  CAPTURE(random.seed());
  const RopeCase ropes[] = {make_rope(24), make_rope(24, RopeLayout::interleaved, 16, 500000), make_rope_with_factor(24, 1.3)};
  for (const Layout layout : all_layouts)
    for (const RopeCase& rope : ropes) {
      compare_moves<float>(random, layout, rope);
      compare_moves<float16>(random, layout, rope);
      compare_moves<bfloat16>(random, layout, rope);
    }
}

TEST_CASE("[B7] keys that do not move keep every bit, and a plan applied twice changes nothing the second time", "[realign]") {
  Random random;
  CAPTURE(random.seed());
  const RopeTable rope({.head_dim = 24});
  TestCache<float16> cache(shape, 10);
  for (position_t p = 0; p < 10; ++p) cache.append({p, {}, {}, random.normals(48), random.normals(48)});
  const std::vector<position_t> same = counting(10);
  Workspace work(realign_workspace_size(24));
  const auto before = cache.state();
  require_ok(realign_keys(cache.view(), 0, same, same, rope, work));
  REQUIRE(cache.state() == before);
  // A table of what the keys are rotated to now, as an engine keeps it: the second time nothing is left to move.
  std::vector<position_t> rotated = same;
  const std::vector<position_t> wanted{0, 1, 2, 2, 3, 4, 4, 5, 6, 7};
  require_ok(realign_keys(cache.view(), 0, rotated, wanted, rope, work));
  rotated = wanted;
  const auto once = cache.state();
  REQUIRE_FALSE(once == before);
  require_ok(realign_keys(cache.view(), 0, rotated, wanted, rope, work));
  REQUIRE(cache.state() == once);
  REQUIRE(cache.view().position(0, 9) == 9);  // what the cache reports stays true
}

TEST_CASE("[B2] positions within the cache: every key behind a gap moves, the newest ones too", "[realign]") {
  Random random;
  CAPTURE(random.seed());
  const RopeCase rope_case = make_rope(24);
  const RopeTable rope(rope_case.options);
  struct Example {
    RecentWindowOptions<> options;
    index_t tokens;
    std::vector<position_t> kept;
    std::vector<position_t> deltas;
  };
  const Example examples[] = {
      {{.budget = {.max = 7, .min = 7, .counts_prefix = true}, .n_prefix = 4},
       9,
       {0, 1, 2, 3, 6, 7, 8},
       {0, 0, 0, 0, -2, -2, -2}},
      {{.budget = {.max = 4, .min = 4, .counts_prefix = true}, .n_prefix = 1}, 10, {0, 7, 8, 9}, {0, -6, -6, -6}},
  };
  for (const Example& e : examples) {
    RecentWindow<> policy(shape, e.options);
    TestCache<> cache(shape, 16);
    Workspace work(max(policy.workspace_size(16), realign_workspace_size(24)));
    reference::Matrix pre;  // of head 1
    for (position_t p = 0; p < e.tokens; ++p) {
      const std::vector<float> row = random.normals(24);
      pre.push_back(reference::row_of(row.data(), 24));
      std::vector<float> keys(24, 0.0F);
      for (const double x : rope_case.reference.at(pre.back(), p)) keys.push_back(static_cast<float>(x));
      cache.append({p, {}, {}, keys, std::vector<float>(48)});
    }
    require_ok(policy.prefill_tokens(e.tokens));
    require_value(evict(policy, cache.view(), work));
    const std::vector<position_t> from = positions_of(cache, 1);
    REQUIRE(from == e.kept);
    const std::vector<position_t> to = counting(cache.view().num_tokens());
    for (std::size_t j = 0; j < to.size(); ++j) REQUIRE(to[j] - from[j] == e.deltas[j]);
    require_ok(realign_keys(cache.view(), 1, from, to, rope, work));
    // [C8] Each is as a fresh key at its new position; the query being decoded gets the next one.
    for (index_t s = 0; s < cache.view().num_tokens(); ++s) {
      const reference::Row want = rope_case.reference.at(pre[at(e.kept[at(s)])], s);
      const reference::Row got = cache.key(1, s);
      for (std::size_t d = 0; d < want.size(); ++d) REQUIRE_THAT(got[d], Catch::Matchers::WithinAbs(want[d], 4e-6));
    }
    REQUIRE(cache.view().num_tokens() == (e.tokens == 9 ? 7 : 4));
    REQUIRE(policy.next_position() == e.tokens);  // the other mode: true positions go on
  }
}

TEST_CASE("[C7] a hundred steps as one move lose what one rounding loses", "[realign]") {
  Random random;
  CAPTURE(random.seed());
  const RopeCase rope_case = make_rope(24);
  const RopeTable rope(rope_case.options);
  TestCache<float16> one(shape, 8);
  for (position_t p = 0; p < 8; ++p) one.append({p, {}, {}, random.normals(48), std::vector<float>(48)});
  TestCache<float16> many = one;
  const TestCache<float16> before = one;
  Workspace work(realign_workspace_size(24));
  const std::vector<position_t> far(8, 1000);
  require_ok(realign_keys(one.view(), 0, far, std::vector<position_t>(8, 900), rope, work));
  for (position_t p = 1000; p > 900; --p)
    require_ok(realign_keys(many.view(), 0, std::vector<position_t>(8, p), std::vector<position_t>(8, p - 1), rope, work));
  double worst_one = 0;
  double worst_many = 0;
  for (index_t s = 0; s < 8; ++s) {
    const reference::Row want = reference::rotated(before.key(0, s), -100, rope_case.reference.frequencies, RopeLayout::half);
    for (std::size_t d = 0; d < want.size(); ++d) {
      worst_one = std::max(worst_one, std::abs(one.key(0, s)[d] - want[d]) / largest(want));
      worst_many = std::max(worst_many, std::abs(many.key(0, s)[d] - want[d]) / largest(want));
    }
  }
  REQUIRE(worst_one < 0.0006);
  REQUIRE(worst_many > 2 * worst_one);
}

TEST_CASE("[C6] a move over 127,000 positions is as exact as the storage", "[realign]") {
  Random random;
  CAPTURE(random.seed());
  const RopeCase rope_case = make_rope(64);
  const RopeTable rope(rope_case.options);
  const Shape wide{.query_heads = 1, .kv_heads = 1, .head_dim = 64};
  TestCache<> cache(wide, 8);
  for (position_t p = 0; p < 8; ++p) cache.append({p, {}, {}, random.normals(64), std::vector<float>(64)});
  const TestCache<> before = cache;
  Workspace work(realign_workspace_size(64));
  require_ok(realign_keys(cache.view(), 0, std::vector<position_t>(8, 131071), std::vector<position_t>(8, 4096), rope, work));
  for (index_t s = 0; s < 8; ++s) {
    const reference::Row want =
        reference::rotated(before.key(0, s), 4096 - 131071, rope_case.reference.frequencies, RopeLayout::half);
    for (std::size_t d = 0; d < 64; ++d)
      REQUIRE_THAT(cache.key(0, s)[d], Catch::Matchers::WithinAbs(want[d], 1e-6 * largest(want)));
  }
}

TEST_CASE("realign_keys refuses what does not fit, before a key is changed", "[realign]") {
  Random random;
  const RopeTable rope({.head_dim = 24});
  TestCache<> cache(shape, 8);
  for (position_t p = 0; p < 8; ++p) cache.append({p, {}, {}, random.normals(48), random.normals(48)});
  const auto before = cache.state();
  const std::vector<position_t> from = counting(8);
  const std::vector<position_t> to(8, 0);
  const std::vector<position_t> seven(7, 0);
  Workspace work(realign_workspace_size(24));
  Workspace small(WorkspaceSize{realign_workspace_size(24).bytes - 1, 0, 0});
  check_invalid(realign_keys(cache.view(), 0, seven, to, rope, work), {"from has 7", "to 8", "8 tokens"});
  check_invalid(realign_keys(cache.view(), 0, from, seven, rope, work), {"from has 8", "to 7", "8 tokens"});
  check_invalid(realign_keys(cache.view(), 2, from, to, rope, work), {"head = 2", "2"});
  check_invalid(realign_keys(cache.view(), -1, from, to, rope, work), {"head = -1"});
  check_invalid(realign_keys(cache.view(), 0, from, to, RopeTable({.head_dim = 16}), work), {"rope.head_dim = 16", "24"});
  check_error(realign_keys(cache.view(), 0, from, to, rope, small), StatusCode::workspace_too_small, {"workspace has"});
  REQUIRE(cache.state() == before);
  const std::int64_t allocations =
      allocations_of([&] { static_cast<void>(realign_keys(cache.view(), 0, from, to, rope, work)); });
  REQUIRE(allocations == 0);
  REQUIRE_FALSE(cache.state() == before);
}
