// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

// Caches that keep true positions, count within themselves, or hold keys before RoPE; tables that change; latent caches.

#include <algorithm>
#include <vector>

#include "beaconkv/memory/owning_cache.hpp"
#include "beaconkv/policy/beaconkv.hpp"
#include "beaconkv/policy/realign.hpp"
#include "beaconkv/policy/recent_window.hpp"
#include "beaconkv/policy/snapkv.hpp"
#include "support/check.hpp"
#include "support/policy_run.hpp"

namespace {

using namespace beaconkv;
using namespace beaconkv::test;

constexpr index_t dim = 16;
constexpr Shape shape{.query_heads = 4, .kv_heads = 2, .head_dim = dim};

std::vector<position_t> positions_of(const auto& cache, index_t head) {
  std::vector<position_t> out;
  for (index_t s = 0; s < cache.num_tokens(); ++s) out.push_back(cache.position(head, s));
  return out;
}
std::vector<position_t> rotary_of(const auto& cache, index_t head) {
  std::vector<position_t> out;
  for (index_t s = 0; s < cache.num_tokens(); ++s) out.push_back(cache.rotary_position(head, s));
  return out;
}
std::vector<position_t> counting(index_t n) {
  std::vector<position_t> out;
  for (position_t p = 0; p < n; ++p) out.push_back(p);
  return out;
}

/// `[heads][dim]` rows, rotated to a position.
std::vector<float> rotated(std::vector<float> rows, const RopeTable& rope, position_t position) {
  for (std::size_t i = 0; i < rows.size(); i += static_cast<std::size_t>(rope.head_dim()))
    rope.rotate(rows.data() + i, position);
  return rows;
}

template <class K>
std::vector<std::byte> bytes_of(const OwningCache<K>& cache) {
  std::vector<std::byte> out;
  StateWriter archive(out);
  OwningCache<K> copy = cache;
  copy.view().exchange_rows(archive);
  return out;
}

}  // namespace

TEST_CASE("[B2] StreamingLLM's positions: old and new keys are shifted to their slots, the next query follows", "[B2]") {
  Random random;
  CAPTURE(random.seed());
  const RopeTable rope({.head_dim = dim});
  OwningCache<float> memory(shape, 16, {.positions = PositionMode::cache_relative});
  PlaneCache<float>& cache = memory.view();
  RecentWindow<> policy(shape, {.budget = {.max = 4, .min = 4, .counts_prefix = true}, .n_prefix = 1});
  Workspace work(max(policy.workspace_size(16), realign_workspace_size(dim)));
  std::vector<std::vector<float>> fresh;
  for (position_t p = 0; p < 10; ++p) {
    fresh.push_back(random.normals(2 * dim));
    memory.append(rotated(fresh.back(), rope, cache.next_rotary_position()), random.normals(2 * dim), p).or_throw();
  }
  policy.prefill_tokens(10).or_throw();
  evict(policy, cache, work).or_throw();
  CHECK(positions_of(cache, 0) == std::vector<position_t>{0, 7, 8, 9});
  CHECK(rotary_of(cache, 0) == std::vector<position_t>{0, 7, 8, 9});
  CHECK(cache.next_rotary_position() == 10);
  realign_to_slots(cache, rope, work).or_throw();
  CHECK(rotary_of(cache, 1) == counting(4));
  CHECK(cache.next_rotary_position() == 4);
  CHECK(cache.next_position() == 10);
  for (index_t h = 0; h < 2; ++h)  // [C8] as fresh keys at their new positions
    for (index_t s = 0; s < 4; ++s) {
      const std::vector<float> want = rotated(fresh[static_cast<std::size_t>(cache.position(h, s))], rope, s);
      const ConstRows got = cache.keys(h, s, 1, nullptr);
      for (index_t d = 0; d < dim; ++d)
        REQUIRE_THAT(got.row(0)[d], Catch::Matchers::WithinAbs(want[static_cast<std::size_t>(h * dim + d)], 4e-6));
    }
}

TEMPLATE_TEST_CASE("[B7] re-aligning twice changes nothing the second time, and waiting costs one move instead of many",
                   "[B7][C7]", float, std::int8_t) {
  Random random;
  CAPTURE(random.seed());
  const RopeTable rope({.head_dim = dim});
  OwningCache<TestType> lazy(shape, 40, {.positions = PositionMode::cache_relative});
  for (position_t p = 0; p < 40; ++p)
    lazy.append(rotated(random.normals(2 * dim), rope, lazy.view().next_rotary_position()), random.normals(2 * dim), p)
        .or_throw();
  OwningCache<TestType> eager = lazy;
  const OwningCache<TestType> before = lazy;
  Workspace work(realign_workspace_size(dim));
  realign_to_slots(lazy.view(), rope, work).or_throw();
  CHECK(bytes_of(lazy) == bytes_of(before));  // nothing to move: not a bit

  for (index_t round = 0; round < 30; ++round) {  // 30 evictions of slot 2
    for (auto* cache : {&lazy, &eager}) {
      KeepPlan plan;
      std::vector<slot_t> kept;
      for (slot_t s = 0; s < cache->view().num_tokens(); ++s)
        if (s != 2) kept.push_back(s);
      const std::span<const slot_t> sets[] = {kept};
      plan.assign(cache->view(), sets).or_throw();
      compact(cache->view(), plan).or_throw();
    }
    realign_to_slots(eager.view(), rope, work).or_throw();
  }
  CHECK(rotary_of(lazy.view(), 0)[2] == 32);
  realign_to_slots(lazy.view(), rope, work).or_throw();
  const auto once = bytes_of(lazy);
  realign_to_slots(lazy.view(), rope, work).or_throw();
  CHECK(bytes_of(lazy) == once);

  double worst_lazy = 0;
  double worst_eager = 0;
  std::vector<float> key(dim);
  std::vector<float> got(dim);
  for (index_t s = 2; s < 10; ++s) {
    const ConstRows row = before.view().keys(0, s + 30, 1, key.data());
    std::copy(row.data, row.data + dim, key.begin());
    rope.realign(key.data(), s + 30, s);
    double top = 0;
    for (const float x : key) top = std::max(top, std::abs(static_cast<double>(x)));
    for (auto* cache : {&lazy, &eager}) {
      const ConstRows out = cache->view().keys(0, s, 1, got.data());
      double& worst = cache == &lazy ? worst_lazy : worst_eager;
      for (index_t d = 0; d < dim; ++d)
        worst = std::max(
            worst, std::abs(static_cast<double>(out.row(0)[d]) - static_cast<double>(key[static_cast<std::size_t>(d)])) / top);
    }
  }
  CAPTURE(worst_lazy, worst_eager);
  CHECK(worst_lazy < (std::is_same_v<TestType, float> ? 1e-6 : 0.02));
  if (!std::is_same_v<TestType, float>) CHECK(worst_eager > 2 * worst_lazy);
}

TEST_CASE("[B7] keys before RoPE are never turned, and their new positions are reported", "[B7]") {
  Random random;
  CAPTURE(random.seed());
  const RopeTable rope({.head_dim = dim});
  OwningCache<float16> memory(shape, 12, {.positions = PositionMode::unrotated_keys});
  PlaneCache<float16>& cache = memory.view();
  for (position_t p = 0; p < 12; ++p) memory.append(random.normals(2 * dim), random.normals(2 * dim), p).or_throw();
  RecentWindow<> policy(shape, {.budget = {.max = 6, .min = 6, .counts_prefix = true}, .n_prefix = 2});
  Workspace work(max(policy.workspace_size(12), realign_workspace_size(dim)));
  policy.prefill_tokens(12).or_throw();
  evict(policy, cache, work).or_throw();
  const auto before = bytes_of(memory);
  realign_to_slots(cache, rope, work).or_throw();
  CHECK(bytes_of(memory) == before);
  CHECK(rotary_of(cache, 1) == counting(6));
  CHECK(cache.next_rotary_position() == 6);
  CHECK(positions_of(cache, 1) == std::vector<position_t>{0, 1, 8, 9, 10, 11});
}

TEST_CASE("closing gaps, in place or while reading, gives the scores of keys that were never anywhere else", "[B2]") {
  // Three caches of the same keys: re-aligned after each eviction, cached before RoPE, and, as the reference, rotated afresh to
  // the slots by hand before each scoring, under true positions that are the slots.
  Random random;
  CAPTURE(random.seed());
  const RopeTable rope({.head_dim = dim});
  const BeaconKV<> policy(
      shape, {.budget = {.max = 24, .min = 18}, .n_beacon = 4, .n_recent_queries = 4, .n_recent_kv = 6, .n_prefix = 3}, rope);
  BeaconKV<> relative_policy = policy;
  BeaconKV<> unrotated_policy = policy;
  OwningCache<float> relative(shape, 40, {.positions = PositionMode::cache_relative});
  OwningCache<float> unrotated(shape, 40, {.positions = PositionMode::unrotated_keys});
  Workspace work(max(policy.workspace_size(40), realign_workspace_size(dim)));
  index_t evictions = 0;
  for (position_t t = 0; t < 120; ++t) {
    const std::vector<float> key = random.normals(2 * dim);
    const std::vector<float> value = random.normals(2 * dim);
    const std::vector<float> query = random.normals(4 * dim);
    relative.append(rotated(key, rope, relative.view().next_rotary_position()), value, t).or_throw();
    unrotated.append(key, value, t).or_throw();
    relative_policy.observe(query, t).or_throw();
    unrotated_policy.observe(query, t).or_throw();
    if (!relative_policy.due(relative.view())) continue;
    ++evictions;
    RotatedKeys view(unrotated.view(), rope);
    const index_t n = relative.view().num_tokens();
    std::vector<float> a(static_cast<std::size_t>(2 * n));
    std::vector<float> b(static_cast<std::size_t>(2 * n));
    REQUIRE(relative_policy.score(relative.view(), {a.data(), 2, n}, work).ok());
    REQUIRE(unrotated_policy.score(view, {b.data(), 2, n}, work).ok());
    for (std::size_t i = 0; i < a.size(); ++i)
      if (static_cast<index_t>(i) % n >= 3 && static_cast<index_t>(i) % n < n - 6)
        REQUIRE_THAT(a[i], Catch::Matchers::WithinAbs(b[i], 2e-5));
    // Any third way to see it: queries and keys both rotated to slots by hand give the same logits.
    const index_t before = unrotated.view().num_tokens();
    const KeepPlan& plan = work.plan();
    evict(relative_policy, relative.view(), work).or_throw();
    std::vector<std::vector<slot_t>> kept;
    for (index_t h = 0; h < 2; ++h) kept.emplace_back(plan.kept(h).begin(), plan.kept(h).end());
    realign_to_slots(relative.view(), rope, work).or_throw();
    evict(unrotated_policy, view, work).or_throw();
    for (index_t h = 0; h < 2; ++h)
      REQUIRE(std::equal(kept[static_cast<std::size_t>(h)].begin(), kept[static_cast<std::size_t>(h)].end(),
                         plan.kept(h).begin(), plan.kept(h).end()));
    REQUIRE(unrotated.view().num_tokens() < before);
    REQUIRE(relative.view().next_rotary_position() == unrotated.view().next_rotary_position());
  }
  REQUIRE(evictions > 5);
}

TEST_CASE("position modes that cannot work are refused by name", "[B2]") {
  const RopeTable rope({.head_dim = dim});
  OwningCache<float> plain(shape, 8);
  OwningCache<float> relative(shape, 8, {.positions = PositionMode::cache_relative});
  OwningCache<float> unrotated(shape, 8, {.positions = PositionMode::unrotated_keys});
  Workspace work(realign_workspace_size(dim));
  check_error(realign_to_slots(plain.view(), rope, work), StatusCode::unsupported, {"true positions", "cache_relative"});
  check_error(
      OwningCache<float, float, Granularity::per_head_ragged>::make(shape, 8, {.positions = PositionMode::cache_relative})
          .status(),
      StatusCode::unsupported, {"position mode", "lengths"});
  const SnapKV<> without_rope(shape, {.budget = {.tokens = 8}, .n_recent_queries = 2, .n_recent_kv = 2});
  const SnapKV<> with_rope(shape, {.budget = {.tokens = 8}, .n_recent_queries = 2, .n_recent_kv = 2}, rope);
  Workspace scratch(with_rope.workspace_size(8));
  check_error(without_rope.score(relative.view(), {nullptr, 2, 0}, scratch).status(), StatusCode::unsupported, {"RopeTable"});
  check_error(with_rope.score(unrotated.view(), {nullptr, 2, 0}, scratch).status(), StatusCode::unsupported, {"RotatedKeys"});
}

TEST_CASE("[C4] a model that switches its table: keys and policy follow", "[C4]") {
  Random random;
  CAPTURE(random.seed());
  const RopeTable near({.head_dim = dim, .scaling = GivenFrequencies{std::vector<double>(dim / 2, 0.01), 1.0}});
  const RopeTable far({.head_dim = dim, .scaling = GivenFrequencies{std::vector<double>(dim / 2, 0.003), 1.2}});
  OwningCache<float> switched(shape, 12);
  OwningCache<float> fresh(shape, 12);
  SnapKV<> policy(shape, {.budget = {.tokens = 8}, .n_recent_queries = 3, .n_recent_kv = 3}, near);
  SnapKV<> fresh_policy(shape, {.budget = {.tokens = 8}, .n_recent_queries = 3, .n_recent_kv = 3}, far);
  for (position_t p = 0; p < 12; ++p) {
    const std::vector<float> key = random.normals(2 * dim);
    const std::vector<float> query = random.normals(4 * dim);
    switched.append(rotated(key, near, p), key, p).or_throw();
    fresh.append(rotated(key, far, p), key, p).or_throw();
    policy.observe(query, p).or_throw();
    fresh_policy.observe(query, p).or_throw();
  }
  Workspace work(max(policy.workspace_size(12), realign_workspace_size(dim)));
  switch_rope(switched.view(), near, far, work).or_throw();
  policy.set_rope(far).or_throw();
  std::vector<float> a(24);
  std::vector<float> b(24);
  REQUIRE(policy.score(switched.view(), {a.data(), 2, 12}, work).ok());
  REQUIRE(fresh_policy.score(fresh.view(), {b.data(), 2, 12}, work).ok());
  for (std::size_t i = 0; i < 24; ++i)
    if (i % 12 < 9) REQUIRE_THAT(a[i], Catch::Matchers::WithinAbs(b[i], 1e-5));
  check_invalid(policy.set_rope(RopeTable({.head_dim = 8})), {"rope.head_dim = 8", "16"});
  check_error(policy.set_rope(RopeTable()), StatusCode::unsupported, {"RopeTable"});
  check_error(switch_rope(switched.view(), near, RopeTable({.head_dim = dim, .rotary_dim = 8}), work), StatusCode::unsupported,
              {"rotary_dim"});
}

TEST_CASE("[H-4] a latent cache: one row for key and value, the last dimensions turn, a token counts once", "[H-4]") {
  Random random;
  CAPTURE(random.seed());
  const Shape latent{.query_heads = 8, .kv_heads = 1, .head_dim = 576};
  std::vector<float16> memory(20 * 576);
  using Cache = PlaneCache<float16, float16, Granularity::per_layer>;
  Cache cache = Cache::make_latent(head_major_plane(memory.data(), 1, 576, 20), 512, PositionMode::cache_relative).or_throw();
  CHECK(cache.bytes_per_token() == 576 * 2);
  CHECK(cache.value_dim() == 512);
  const RopeTable rope({.head_dim = 576, .rotary_first = 512, .layout = RopeLayout::interleaved});
  CHECK(rope.rotary_dim() == 64);
  SnapKV<> policy(latent, {.budget = {.tokens = 10}, .n_recent_queries = 2, .n_recent_kv = 2}, rope);
  for (position_t p = 0; p < 20; ++p) {
    std::vector<float> row = random.normals(576);
    rope.rotate(row.data(), cache.next_rotary_position());
    cache.store_key(0, cache.num_tokens(), row.data());
    cache.append(p).or_throw();
    policy.observe(random.normals(8 * 576), p).or_throw();
  }
  const std::vector<float16> before = memory;
  Workspace work(max(policy.workspace_size(20), realign_workspace_size(576)));
  KeepPlan plan;
  policy.plan_free(cache, 8, work, plan).or_throw();
  REQUIRE(plan.sets() == 1);
  compact(cache, plan).or_throw();
  policy.commit(plan).or_throw();
  realign_to_slots(cache, rope, work).or_throw();
  for (index_t s = 0; s < 12; ++s) {
    const slot_t from = plan.kept(0)[static_cast<std::size_t>(s)];
    for (index_t d = 0; d < 512; ++d)
      REQUIRE(memory[static_cast<std::size_t>(s * 576 + d)] == before[static_cast<std::size_t>(from * 576 + d)]);
    std::vector<float> value(512);
    static_cast<void>(cache.values(0, s, 1, value.data()));
    REQUIRE(encode<float16>(value[511]) == before[static_cast<std::size_t>(from * 576 + 511)]);
    bool turned = false;
    for (index_t d = 512; d < 576; ++d)
      turned = turned || !(memory[static_cast<std::size_t>(s * 576 + d)] == before[static_cast<std::size_t>(from * 576 + d)]);
    REQUIRE(turned == (from != s));
  }
  check_invalid(Cache::make_latent(head_major_plane(memory.data(), 1, 576, 20), 577).status(), {"value_dim = 577", "576"});
}
