// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

/// \file
/// BeaconKV on memory that an engine owns: the whole integration, with a stand-in for the engine.

#include <beaconkv/beaconkv.hpp>
#include <cstdio>
#include <random>
#include <vector>

using namespace beaconkv;

namespace {

constexpr Shape shape{.query_heads = 8, .kv_heads = 2, .head_dim = 64};
constexpr index_t capacity = 512;

/// Stands for one attention layer of an engine: it owns keys and values, `[kv_head][capacity][head_dim]`, and makes up its
/// tokens.
struct Engine {
  std::vector<float> k = std::vector<float>(static_cast<std::size_t>(shape.kv_heads * capacity * shape.head_dim));
  std::vector<float> v = k;
  std::vector<float> queries = std::vector<float>(static_cast<std::size_t>(shape.query_heads * shape.head_dim));
  std::mt19937 random{1};
  std::normal_distribution<float> normal;

  /// Writes one token's keys (rotated to its position) and values at `slot` of every head; leaves its queries, before RoPE.
  void step(const RopeTable& rope, index_t slot, position_t position) {
    for (float& q : queries) q = normal(random);
    for (index_t h = 0; h < shape.kv_heads; ++h) {
      float* const key = k.data() + (h * capacity + slot) * shape.head_dim;
      float* const value = v.data() + (h * capacity + slot) * shape.head_dim;
      for (index_t d = 0; d < shape.head_dim; ++d) key[d] = value[d] = normal(random);
      rope.rotate(key, position);
    }
  }
};

}  // namespace

int main() {
  Engine engine;
  const std::vector<float> prompt_queries(static_cast<std::size_t>(20 * shape.query_heads * shape.head_dim), 0.1F);

  // README: begin
  RopeTable rope({.head_dim = 64, .theta = 1e6});
  BeaconKV policy(shape, {.budget = {.max = 128, .min = 112}, .n_beacon = 16, .n_recent_queries = 16, .n_recent_kv = 32}, rope);
  auto cache = PlaneCache<float>::head_major(engine.k.data(), engine.v.data(), shape, capacity);  // a view, no copy
  Workspace work(policy.workspace_size(capacity));  // once; nothing allocates after this

  for (position_t t = 0; t < 20; ++t) engine.step(rope, t, t);  // the engine reads a prompt of 20 tokens
  cache.append_run(0, 20).or_throw();
  policy.prefill(QueryView::token_major(prompt_queries.data(), 20, shape.query_heads, shape.head_dim), work).or_throw();

  for (position_t t = 20; t < 400; ++t) {
    engine.step(rope, cache.num_tokens(), t);      // the engine writes K and V behind the last row ...
    cache.append(t).or_throw();                    // ... and tells the view
    policy.observe(engine.queries, t).or_throw();  // queries [query_heads][head_dim], before RoPE
    if (policy.due(cache)) evict(policy, cache, work).or_throw();
  }
  // README: end

  std::printf("%td of %td tokens are cached; the newest is at position %td\n", cache.num_tokens(),
              static_cast<index_t>(cache.next_position()), static_cast<index_t>(cache.position(0, cache.num_tokens() - 1)));
  return cache.num_tokens() < 20 + 128 ? 0 : 1;
}
