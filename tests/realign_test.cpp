// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

// Moving cached keys to other positions, over every storage type and layout.

#include "beaconkv/policy/realign.hpp"

#include <cstring>
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

namespace {

template <class K, class V, Granularity G>
struct Relative {
  using Cache = LayoutCache<K, V, G>;
  static constexpr bool one_set = G == Granularity::per_layer;

  /// The same cache for the same seed.
  Relative(Layout layout, std::uint32_t seed)
      : random(seed), cache(layout, 2, 64, 32, 24, random, PositionMode::cache_relative) {
    append(random.integer(1, 20));
  }
  void append(index_t count) {
    for (index_t i = 0; i < count; ++i) {
      require_ok(cache.cache.append(cache.cache.next_position() + random.integer(0, 3)));
      for (index_t h = 0; h < 2; ++h) {
        cache.keys.write(h, cache.cache.num_tokens() - 1, random.normals(64));
        cache.values.write(h, cache.cache.num_tokens() - 1, random.normals(32));
      }
    }
  }
  [[nodiscard]] KeepPlan plan() {
    const index_t tokens = cache.cache.num_tokens();
    const index_t kept = random.integer(0, 3) == 0 ? tokens : random.integer(0, tokens);
    std::vector<std::vector<slot_t>> sets{random.subset(kept, tokens)};
    if (!one_set && random.coin()) sets.push_back(random.subset(kept, tokens));
    const std::vector<std::span<const slot_t>> views(sets.begin(), sets.end());
    KeepPlan plan;
    require_ok(plan.assign(cache.cache, views));
    return plan;
  }

  Random random;
  Cache cache;
};

template <class T>
bool same_memory(const LayoutPlane<T>& a, const LayoutPlane<T>& b) {
  return std::memcmp(a.memory().data(), b.memory().data(), a.memory().size() * sizeof(T)) == 0 &&
         same_bits(a.scales(), b.scales());
}

template <class K, class V, Granularity G>
void compare_passes(Random& random) {
  const RopeTable rope(
      make_rope(64, random.coin() ? RopeLayout::half : RopeLayout::interleaved, random.coin() ? 64 : 40).options);
  Workspace work(realign_workspace_size(64));
  for (const Layout layout : all_layouts)
    for (index_t round = 0; round < 6; ++round) {
      const auto seed = static_cast<std::uint32_t>(random.integer(0, 1 << 30));
      CAPTURE(static_cast<int>(layout), round, seed);
      Relative<K, V, G> one(layout, seed);
      Relative<K, V, G> two(layout, seed);
      for (index_t step = 0; step < 3; ++step) {
        if (one.random.coin()) {  // keys that an earlier eviction left where they were
          require_ok(compact(one.cache.cache, one.plan()));
          static_cast<void>(two.random.coin());
          require_ok(compact(two.cache.cache, two.plan()));
        } else {
          static_cast<void>(two.random.coin());
        }
        const index_t more = std::min<index_t>(3, 24 - one.cache.cache.num_tokens());
        one.append(more);
        two.append(more);
        Status status;
        const KeepPlan plan = one.plan();
        REQUIRE(allocations_of([&] { status = compact_and_realign(one.cache.cache, plan, rope, work); }) == 0);
        require_ok(status);
        require_ok(compact(two.cache.cache, two.plan()));
        require_ok(realign_to_slots(two.cache.cache, rope, work));
        REQUIRE(same_memory(one.cache.keys, two.cache.keys));
        REQUIRE(same_memory(one.cache.values, two.cache.values));
        const auto& a = one.cache.cache;
        const auto& b = two.cache.cache;
        REQUIRE(a.num_tokens() == b.num_tokens());
        REQUIRE(a.next_position() == b.next_position());
        REQUIRE(a.next_rotary_position() == a.num_tokens());
        REQUIRE(a.num_undoable() == b.num_undoable());
        for (index_t h = 0; h < 2; ++h)
          for (index_t s = 0; s < a.num_tokens(); ++s) {
            REQUIRE(a.position(h, s) == b.position(h, s));
            REQUIRE(a.rotary_position(h, s) == s);
          }
      }
    }
}

}  // namespace

TEST_CASE("compact_and_realign does in one pass what two do, bit for bit, in every storage type and layout", "[realign]") {
  Random random;
  CAPTURE(random.seed());
  compare_passes<float, float, Granularity::per_head>(random);
  compare_passes<float, bfloat16, Granularity::per_layer>(random);
  compare_passes<bfloat16, float, Granularity::per_head>(random);
  compare_passes<float16, float16, Granularity::per_layer>(random);
  compare_passes<q8_0, q8_0, Granularity::per_head>(random);
  compare_passes<std::int8_t, float8_e4m3, Granularity::per_head>(random);
  compare_passes<float8_e5m2, std::int8_t, Granularity::per_layer>(random);
}

TEST_CASE("compact_and_realign turns latent rows once", "[realign]") {
  Random random;
  CAPTURE(random.seed());
  const RopeTable rope({.head_dim = 16, .rotary_first = 12});
  Workspace work(realign_workspace_size(16));
  std::vector<float> rows = random.normals(16 * 10);
  std::vector<float> others = rows;
  const std::vector<slot_t> kept{0, 3, 4, 7, 9};
  const std::span<const slot_t> sets[] = {kept};
  KeepPlan plan;
  auto one =
      PlaneCache<float>::make_latent(head_major_plane(rows.data(), 1, 16, 10), 12, PositionMode::cache_relative).or_throw();
  auto two =
      PlaneCache<float>::make_latent(head_major_plane(others.data(), 1, 16, 10), 12, PositionMode::cache_relative).or_throw();
  for (auto* cache : {&one, &two}) require_ok(cache->append_run(0, 10));
  require_ok(plan.assign(one, sets));
  require_ok(compact_and_realign(one, plan, rope, work));
  require_ok(plan.assign(two, sets));
  require_ok(compact(two, plan));
  require_ok(realign_to_slots(two, rope, work));
  REQUIRE(same_bits(rows, others));
}

TEMPLATE_TEST_CASE("compact_and_realign refuses what one of the two would, before anything changes", "[realign]", float8_e4m3,
                   float8_e5m2) {
  constexpr float top = largest_before_scale<TestType>;
  std::vector<TestType> keys(2 * 6);
  std::vector<TestType> values(2 * 6);
  float scale = 2.0F;
  const RopeTable rope({.head_dim = 2});
  auto cache =
      PlaneCache<TestType>::make(with_scale(head_major_plane(keys.data(), 1, 2, 6), &scale),
                                 with_scale(head_major_plane(values.data(), 1, 2, 6), &scale), PositionMode::cache_relative)
          .or_throw();
  const float large[] = {2 * top, 2 * top};  // a turn by 45 degrees would make one of them larger
  const float small[] = {1.0F, 2.0F};
  require_ok(cache.append_run(0, 6));
  for (index_t s = 0; s < 6; ++s) cache.store_key(0, s, s == 4 ? large : small);
  const std::vector<TestType> before = keys;
  Workspace work(realign_workspace_size(2));
  KeepPlan plan;
  const auto plan_of = [&](const std::vector<slot_t>& kept) -> const KeepPlan& {
    const std::span<const slot_t> sets[] = {kept};
    require_ok(plan.assign(cache, sets));
    return plan;
  };
  const std::uint64_t epoch = cache.epoch();
  check_error(compact_and_realign(cache, plan_of({0, 2, 4, 5}), rope, work), StatusCode::unsupported,
              {"head 0, slot 4", "shared scale"});
  check_invalid(compact_and_realign(cache, plan_of({0, 2}), RopeTable({.head_dim = 4}), work), {"rope.head_dim = 4", "2"});
  Workspace less(WorkspaceSize{realign_workspace_size(2).bytes - 1, 0, 0});
  check_error(compact_and_realign(cache, plan_of({0, 2}), rope, less), StatusCode::workspace_too_small, {"workspace"});
  require_ok(cache.set_pinned_prefix(1));
  check_invalid(compact_and_realign(cache, plan_of({1, 2}), rope, work), {"pinned prefix of 1"});
  cache.set_rotary_position(0, 0, 3);
  check_error(compact_and_realign(cache, plan_of({0, 2}), rope, work), StatusCode::unsupported,
              {"compact_and_realign", "slot 0", "pinned prefix of 1"});
  cache.set_rotary_position(0, 0, 0);
  require_ok(cache.set_pinned_prefix(0));
  CHECK(std::memcmp(keys.data(), before.data(), keys.size() * sizeof(TestType)) == 0);
  CHECK(cache.epoch() == epoch);
  CHECK(cache.num_tokens() == 6);
  require_ok(compact_and_realign(cache, plan_of({0, 2, 5}), rope, work));  // the large key goes
  CHECK(cache.num_tokens() == 3);
  check_error(compact_and_realign(cache, plan, rope, work), StatusCode::stale_plan, {"6 tokens, now 3"});

  OwningCache<float> plain({.query_heads = 1, .kv_heads = 1, .head_dim = 2}, 4);
  require_ok(plain.view().append_run(0, 4));
  const std::vector<slot_t> kept{1, 2};
  const std::span<const slot_t> sets[] = {kept};
  require_ok(plan.assign(plain.view(), sets));
  check_error(compact_and_realign(plain.view(), plan, rope, work), StatusCode::unsupported, {"true positions"});
  CHECK(plain.view().num_tokens() == 4);

  OwningCache<float> unrotated({.query_heads = 1, .kv_heads = 1, .head_dim = 2}, 4,
                               {.positions = PositionMode::unrotated_keys});
  require_ok(unrotated.view().append_run(0, 4));
  unrotated.view().store_key(0, 2, small);
  require_ok(plan.assign(unrotated.view(), sets));
  require_ok(compact_and_realign(unrotated.view(), plan, rope, work));
  CHECK(unrotated.view().keys(0, 1, 1, nullptr).row(0)[1] == 2.0F);
}
