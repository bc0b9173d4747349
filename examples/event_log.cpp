// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

/// \file
/// Every eviction as data: which positions went, with which scores, and which queries had asked.

#include <beaconkv/beaconkv.hpp>
#include <cstdio>
#include <random>
#include <vector>

using namespace beaconkv;

int main() {
  const Shape shape{.query_heads = 2, .kv_heads = 1, .head_dim = 8};
  const BeaconKV policy(shape, {.budget = {.max = 24, .min = 16}, .n_beacon = 4, .n_recent_queries = 4, .n_recent_kv = 4},
                        RopeTable({.head_dim = 8}));
  OwningCache<float> memory(shape, 32);
  auto sequence = Sequence<BeaconKV<>, PlaneCache<float>>::make({policy}, {memory.view()}, {.capacity = 32}).or_throw();

  // docs/event_log.md: begin
  EventLog log;
  sequence.set_event_log(&log);  // or evict(policy, cache, work, log) for a policy by itself
  // docs/event_log.md: end

  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> row(8), queries(16);
  for (position_t t = 0; t < 60; ++t) {
    for (float& x : row) x = normal(random);
    for (float& x : queries) x = normal(random);
    auto& cache = sequence.cache(0);
    cache.append(t).or_throw();
    cache.store_key(0, cache.num_tokens() - 1, row.data());
    cache.store_value(0, cache.num_tokens() - 1, row.data());
    sequence.policy(0).observe(queries, t).or_throw();
    sequence.evict_where_due().or_throw();
  }

  for (const EvictionEvent& event : log.events()) {
    std::printf("step %td, layer %td, %td bytes freed:", static_cast<index_t>(event.step), event.layer,
                static_cast<index_t>(event.bytes_freed));
    for (const LoggedToken& token : event.heads[0].evicted)
      std::printf(" %td (%.3f)", static_cast<index_t>(token.position), static_cast<double>(token.score.value_or(0)));
    std::printf("; beacons from");
    for (const position_t beacon : event.heads[0].queries[0].beacons) std::printf(" %td", static_cast<index_t>(beacon));
    std::printf("\n");
  }
  return log.events().size() == 5 ? 0 : 1;  // at 24 tokens, then every 8
}
