// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

// Nothing allocates once policy, cache and workspace exist: several hundred tokens, every policy, every storage type.

#include <cstdlib>
#include <memory>
#include <string_view>
#include <vector>

#include "support/catch.hpp"
#include "support/counting_allocator.hpp"
#include "support/policies.hpp"

namespace {

using namespace beaconkv;
using namespace beaconkv::test;

/// Keeps the compiler from removing an allocation that nobody uses.
void use(const volatile void* memory) {
  static const volatile void* volatile last = nullptr;
  last = memory;
  static_cast<void>(last);
}

/// What an engine holds, all of it made before the first token.
template <class PolicyT, class CacheT>
struct Engine {
  PolicyT policy;
  CacheT cache;
  Workspace work;
  std::vector<float> rows;  // [token][head][dim]: queries, keys and values alike
  index_t evictions = 0;
  bool failed = false;

  Engine(const PolicyT& p, const Shape& shape, index_t capacity)
      : policy(p),
        cache(shape, capacity),
        work(policy.workspace_size(capacity)),
        rows(Random(3).normals(64 * shape.query_heads * shape.head_dim)) {}

  /// A prompt, then `tokens` decoded ones with an eviction where it is due. `sabotage` allocates once in the middle.
  void run(const Shape& shape, index_t prompt, index_t tokens, bool sabotage) {
    const index_t query_size = shape.query_heads * shape.head_dim;
    const index_t key_size = shape.kv_heads * shape.head_dim;
    const std::span<const float> all(rows);
    position_t position = 0;
    const auto append = [&] {
      const std::span<const float> row = all.subspan(at(position % 48 * query_size), at(key_size));
      failed = failed || !cache.append(row, row, position).ok();
    };
    for (; position < prompt; ++position) append();
    failed =
        failed || !policy.prefill(QueryView::token_major(rows.data(), prompt, shape.query_heads, shape.head_dim), work).ok();
    evict_if_due();
    for (; position < prompt + tokens; ++position) {
      append();
      failed = failed || !policy.observe(all.subspan(at(position % 64 * query_size), at(query_size)), position).ok();
      evict_if_due();
      if (sabotage && position == prompt + tokens / 2) use(std::make_unique<int>(7).get());
    }
  }

 private:
  void evict_if_due() {
    if (!policy.due(cache.view())) return;
    failed = failed || !evict(policy, cache.view(), work).ok();
    ++evictions;
  }
};

template <class CacheT, class PolicyT>
std::int64_t allocations_of_run(const PolicyT& policy, const Shape& shape, bool sabotage = false) {
  constexpr index_t capacity = 64;
  Engine<PolicyT, CacheT> engine(policy, shape, capacity);
  const std::int64_t count = allocations_of([&] { engine.run(shape, 40, 400, sabotage); });
  REQUIRE_FALSE(engine.failed);
  REQUIRE(engine.evictions > 10);
  return count;
}

template <class PolicyT>
void check_all_storage(const PolicyT& policy) {
  REQUIRE(allocations_of_run<OwningCache<float>>(policy, small_shape) == 0);
  REQUIRE(allocations_of_run<OwningCache<float16, bfloat16>>(policy, small_shape) == 0);
  REQUIRE(allocations_of_run<OwningCache<bfloat16, float, Granularity::per_layer>>(policy, small_shape) == 0);
}

}  // namespace

TEST_CASE("the counter notices one allocation in a run, by operator new and by malloc", "[allocation]") {
  REQUIRE(allocations_of_run<OwningCache<float>>(small_beaconkv(), small_shape, true) == 1);
  REQUIRE(allocations_of([] {
            void* const memory = std::malloc(64);
            use(memory);
            std::free(memory);
          }) == 1);
}

TEST_CASE("400 decoded tokens allocate nothing, under any policy and storage", "[allocation]") {
  for_each_policy([](const char* name, auto policy) {
    if (std::string_view(name) == "RKV, published order")
      return;  // says that it keeps the order beside the cache, allocated at commits
    INFO(name);
    check_all_storage(policy);
  });
}

TEST_CASE("no storage type allocates, nor do ragged heads", "[allocation]") {
  const Shape shape{.query_heads = 4, .kv_heads = 2, .head_dim = 32};
  const BeaconKV<> policy(shape,
                          {.budget = {.max = 32, .min = 24, .counts_prefix = true},
                           .n_beacon = 4,
                           .n_recent_queries = 3,
                           .n_recent_kv = 4,
                           .n_prefix = 2},
                          RopeTable({.head_dim = 32}));
  REQUIRE(allocations_of_run<OwningCache<std::int8_t, q8_0>>(policy, shape) == 0);
  REQUIRE(allocations_of_run<OwningCache<q8_0, float16, Granularity::per_layer>>(policy, shape) == 0);
  REQUIRE(allocations_of_run<OwningCache<float8_e4m3, float8_e5m2>>(policy, shape) == 0);
  REQUIRE(allocations_of_run<OwningCache<float8_e5m2, std::int8_t, Granularity::per_head_ragged>>(policy, shape) == 0);
  REQUIRE(allocations_of_run<OwningCache<float, float, Granularity::per_head_ragged>>(policy, shape) == 0);
}

TEST_CASE("RPC as published, whose cache grows, allocates nothing", "[allocation]") {
  const RPC<> policy(small_shape, {.budget = {.period = 16, .ratio = 16}, .n_recent_queries = 4, .n_recent_kv = 4},
                     small_rope());
  Engine<RPC<>, OwningCache<float>> engine(policy, small_shape, 120);
  REQUIRE(allocations_of([&] { engine.run(small_shape, 40, 400, false); }) == 0);
  REQUIRE_FALSE(engine.failed);
  REQUIRE(engine.evictions == 24);
}

TEST_CASE("a real model's shape allocates nothing: 32 query heads, 8 KV heads, dimension 128", "[allocation]") {
  const Shape shape{.query_heads = 32, .kv_heads = 8, .head_dim = 128};
  const BeaconKV<> policy(shape, {.budget = {.max = 300, .min = 250}}, RopeTable({.head_dim = 128, .theta = 1e6}));
  Engine<BeaconKV<>, OwningCache<float16>> engine(policy, shape, 360);
  REQUIRE(allocations_of([&] { engine.run(shape, 48, 360, false); }) == 0);
  REQUIRE_FALSE(engine.failed);
  REQUIRE(engine.evictions == 2);
}

TEST_CASE("plan, plan_free, score and select allocate nothing either", "[allocation]") {
  for_each_policy([](const char* name, auto policy) {
    INFO(name);
    Engine<decltype(policy), OwningCache<float>> engine(policy, small_shape, 64);
    engine.run(small_shape, 40, 30, false);
    const index_t n = engine.cache.view().num_tokens();
    std::vector<float> flat(at(2 * n));
    KeepPlan plan;
    plan.reserve(2, 64);
    bool ok = true;
    const std::int64_t count = allocations_of([&] {
      ok = ok && engine.policy.plan(engine.cache.view(), engine.work, plan).ok();
      ok = ok && engine.policy.plan_free(engine.cache.view(), 5, engine.work, plan).ok();
      ok = ok && engine.policy.score(engine.cache.view(), {flat.data(), 2, n}, engine.work).ok();
      ok = ok && engine.policy.select(engine.cache.view(), {flat.data(), 2, n}, engine.work, plan, 10).ok();
    });
    REQUIRE(ok);
    REQUIRE(count == 0);
  });
}
