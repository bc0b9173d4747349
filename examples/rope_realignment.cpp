// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

/// \file
/// Keys that were rotated to one position, moved to another: alone, and over a cache whose gaps are closed (as StreamingLLM
/// does).

#include <beaconkv/beaconkv.hpp>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <vector>

using namespace beaconkv;

int main() {
  const RopeTable rope({.head_dim = 4, .theta = 10000, .scaling = LinearScaling{.factor = 2}});
  std::vector<float> key{1, 2, 3, 4};
  rope.rotate(key.data(), 1000);
  rope.realign(key.data(), 1000, 7);  // as if it had been rotated to 7 at once
  std::printf("at position 7: %.4f %.4f %.4f %.4f\n", key[0], key[1], key[2], key[3]);

  // Ten tokens, a window of the newest three behind one sink; then the kept keys move to the positions 0..3.
  const Shape shape{.query_heads = 1, .kv_heads = 1, .head_dim = 4};
  RecentWindow policy(shape, {.budget = {.max = 4, .min = 4, .counts_prefix = true}, .n_prefix = 1});
  OwningCache<float16> cache(shape, 10);
  Workspace work(max(policy.workspace_size(10), realign_workspace_size(4)));
  for (position_t t = 0; t < 10; ++t) {
    std::vector<float> row{1, 2, 3, 4};
    rope.rotate(row.data(), t);
    cache.append(row, row, t).or_throw();
    policy.observe({}, t).or_throw();
  }
  evict(policy, cache.view(), work).or_throw();
  std::vector<position_t> from(4);
  std::vector<position_t> to(4);
  for (index_t slot = 0; slot < 4; ++slot) from[static_cast<std::size_t>(slot)] = cache.view().position(0, slot);
  std::iota(to.begin(), to.end(), position_t{0});
  realign_keys(cache.view(), 0, from, to, rope, work).or_throw();

  std::vector<float> fresh{1, 2, 3, 4};
  rope.rotate(fresh.data(), 3);
  std::vector<float> scratch(4);
  const ConstRows moved = cache.view().keys(0, 3, 1, scratch.data());
  std::printf("kept");
  for (const position_t p : from) std::printf(" %td", static_cast<index_t>(p));
  std::printf("; the newest key, moved from 9 to 3: %.3f, a fresh key at 3: %.3f\n", moved.data[0], fresh[0]);
  return std::fabs(moved.data[0] - fresh[0]) < 4e-3F ? 0 : 1;
}
