// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Moving cached keys to other positions: RoPE re-alignment over a cache.

#include <span>

#include "beaconkv/algorithm/rope.hpp"
#include "beaconkv/memory/cache_buffer.hpp"
#include "beaconkv/workspace.hpp"

namespace beaconkv::inline v0 {

/// Scratch of `realign_keys`.
[[nodiscard]] inline WorkspaceSize realign_workspace_size(index_t key_dim) {
  return detail::measure([&](Workspace& work) { static_cast<void>(work.take<float>(key_dim)); });
}

/// Re-aligns the keys of `head`: slot `j` from position `from[j]` to `to[j]`, in place, decoded and encoded once. Values stay,
/// and so do the positions that the cache reports: who closes gaps keeps his own table of rotated positions. A key that does
/// not move keeps every bit. O(tokens * dim), no allocation.
///
/// Positions within the cache, as StreamingLLM assigns them, are `to[j] = j`; the token that is decoded next then gets
/// `num_tokens()`.
template <class Cache>
requires CacheReader<Cache> && requires(Cache& cache, index_t head, index_t slot, const float* row) {
  cache.store_key(head, slot, row);
}
[[nodiscard]] Status realign_keys(Cache& cache, index_t head, std::span<const position_t> from, std::span<const position_t> to,
                                  const RopeTable& rope, Workspace& work) {
  const auto n = static_cast<std::size_t>(cache.num_tokens());
  if (from.size() != n || to.size() != n)
    return detail::invalid("from has ", from.size(), " and to ", to.size(), " positions: the cache has ", n, " tokens");
  if (rope.head_dim() != cache.key_dim())
    return detail::invalid("rope.head_dim = ", rope.head_dim(), ": the keys have ", cache.key_dim());
  if (head < 0 || head >= cache.num_kv_heads())
    return detail::invalid("head = ", head, ": must be below ", cache.num_kv_heads());
  if (Status s = work.require(realign_workspace_size(cache.key_dim())); !s) return s;

  const Workspace::Frame frame(work);
  const std::span<float> key = work.take<float>(cache.key_dim());
  for (std::size_t j = 0; j < n; ++j) {
    if (from[j] == to[j]) continue;
    const auto slot = static_cast<index_t>(j);
    const ConstRows row = cache.keys(head, slot, 1, key.data());
    if (row.data != key.data()) std::copy(row.data, row.data + row.dim, key.data());
    rope.realign(key.data(), from[j], to[j]);
    cache.store_key(head, slot, key.data());
  }
  return {};
}

}  // namespace beaconkv::inline v0
