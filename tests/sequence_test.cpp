// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "beaconkv/sequence/sequence.hpp"

#include <vector>

#include "beaconkv/memory/owning_cache.hpp"
#include "beaconkv/policy/beaconkv.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"

using namespace beaconkv;
using beaconkv::test::Random;

namespace {

constexpr Shape shape{.query_heads = 4, .kv_heads = 2, .head_dim = 16};
constexpr index_t capacity = 64;

[[nodiscard]] std::vector<float> floats(Random& random, index_t count) {
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& x : values) x = random.uniform(-1, 1);
  return values;
}

}  // namespace

TEST_CASE("layers of a sequence evict as they would alone, each by its own budget") {
  Random random;
  CAPTURE(random.seed());
  const RopeTable rope({.head_dim = 16});
  std::vector<BeaconKV<>> policies;
  for (const index_t max : {16, 24, 1000})
    policies.emplace_back(
        shape, BeaconKVOptions<>{.budget = {.max = max}, .n_beacon = 4, .n_recent_queries = 4, .n_recent_kv = 4}, rope);
  std::vector<OwningCache<float>> memory(3, OwningCache<float>(shape, capacity));
  std::vector<OwningCache<float>> alone_memory(3, OwningCache<float>(shape, capacity));
  std::vector<BeaconKV<>> alone = policies;

  std::vector<PlaneCache<float>> views;
  for (OwningCache<float>& m : memory) views.push_back(m.view());
  auto sequence = Sequence<BeaconKV<>, PlaneCache<float>>::make(policies, views, {.capacity = capacity}).or_throw();
  Workspace work(alone[2].workspace_size(capacity));

  index_t evictions = 0;
  for (position_t t = 0; t < 60; ++t) {
    for (index_t l = 0; l < 3; ++l) {
      const std::vector<float> keys = floats(random, shape.kv_heads * shape.head_dim);
      const std::vector<float> queries = floats(random, shape.query_heads * shape.head_dim);
      PlaneCache<float>& view = sequence.cache(l);
      for (index_t h = 0; h < shape.kv_heads; ++h) {
        const auto from = keys.begin() + h * shape.head_dim;
        std::copy(from, from + shape.head_dim, view.key_plane().row(h, view.num_tokens()));
        std::copy(from, from + shape.head_dim, view.value_plane().row(h, view.num_tokens()));
      }
      view.append(t).or_throw();
      sequence.policy(l).observe(queries, t).or_throw();

      OwningCache<float>& own = alone_memory[static_cast<std::size_t>(l)];
      own.append(keys, keys, t).or_throw();
      BeaconKV<>& policy = alone[static_cast<std::size_t>(l)];
      policy.observe(queries, t).or_throw();
      if (policy.due(own.view())) evict(policy, own.view(), work).or_throw();
    }
    evictions += sequence.evict_where_due().or_throw().layers;
    for (index_t l = 0; l < 3; ++l) {
      const PlaneCache<float>& expected = alone_memory[static_cast<std::size_t>(l)].view();
      REQUIRE(sequence.cache(l).num_tokens() == expected.num_tokens());
      for (index_t h = 0; h < shape.kv_heads; ++h)
        for (index_t slot = 0; slot < expected.num_tokens(); ++slot)
          REQUIRE(sequence.cache(l).position(h, slot) == expected.position(h, slot));
    }
  }
  REQUIRE(evictions > 20);
  REQUIRE(sequence.cache(2).num_tokens() == 60);
  REQUIRE(sequence.state_bytes() == 3 * sequence.policy(0).state_bytes());
}

TEST_CASE("a sequence needs one policy and one cache for each layer") {
  using Layers = Sequence<BeaconKV<>, PlaneCache<float>>;
  const BeaconKV<> policy(shape, {.budget = {.max = 16}, .n_recent_kv = 4}, RopeTable({.head_dim = 16}));
  OwningCache<float> cache(shape, capacity);
  REQUIRE(Layers::make({}, {}, {.capacity = capacity}).status().message().find("policies = 0") != std::string::npos);
  REQUIRE(Layers::make({policy, policy}, {cache.view()}, {.capacity = capacity}).status().message().find("caches = 1") !=
          std::string::npos);
  REQUIRE(Layers::make({policy}, {cache.view()}, {.capacity = -1}).status().message().find("capacity = -1") !=
          std::string::npos);
}
