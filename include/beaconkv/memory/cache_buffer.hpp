// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// The two concepts through which the library sees an engine's KV cache: one layer of one sequence.

#include <concepts>

#include "beaconkv/types.hpp"

namespace beaconkv::inline v0 {

/// What scoring and planning need. All heads hold the same number of tokens, and equally many of a protected prefix;
/// `position` is strictly ascending over the slots of a head.
///
/// `keys(head, first, count, scratch)` returns `count` rows of `key_dim()` floats: a pointer into the engine's own memory where
/// that is float with unit stride, else rows decoded into `scratch` (`count * key_dim()` floats). `values` likewise.
/// `epoch()` changes whenever tokens are added, moved or removed; two caches should not share it.
template <class C>
concept CacheReader = requires(const C& cache, index_t head, index_t slot, index_t count, float* scratch) {
  { cache.num_kv_heads() }
  noexcept->std::same_as<index_t>;
  { cache.num_tokens() }
  noexcept->std::same_as<index_t>;
  { cache.key_dim() }
  noexcept->std::same_as<index_t>;
  { cache.value_dim() }
  noexcept->std::same_as<index_t>;
  { cache.position(head, slot) }
  noexcept->std::same_as<position_t>;
  { cache.keys(head, slot, count, scratch) }
  noexcept->std::same_as<ConstRows>;
  { cache.values(head, slot, count, scratch) }
  noexcept->std::same_as<ConstRows>;
  { cache.epoch() }
  noexcept->std::same_as<std::uint64_t>;
};

/// A cache that can also be compacted in place.
///
/// `move_run(head, to, from, count)` moves keys, values, scales and positions of `count` slots towards the front (`to <=
/// from`). Under `Granularity::per_layer` it is called once, with head 0, and moves all heads. `truncate(n)` keeps the first
/// `n` slots of every head. The first `pinned_prefix()` slots are shared with other sequences: never moved, never evicted.
template <class C>
concept CacheBuffer = CacheReader<C> && requires(C& cache, index_t head, index_t to, index_t from, index_t count) {
  requires std::same_as<std::remove_cv_t<decltype(C::granularity)>, Granularity>;
  { cache.pinned_prefix() }
  noexcept->std::same_as<index_t>;
  { cache.move_run(head, to, from, count) }
  noexcept->std::same_as<void>;
  { cache.truncate(count) }
  noexcept->std::same_as<void>;
};

namespace detail {

/// Whether all heads of the cache must keep the same tokens. A reader that does not say keeps a set for each.
template <class Cache>
[[nodiscard]] constexpr bool keeps_one_set() {
  if constexpr (requires { Cache::granularity; }) return Cache::granularity != Granularity::per_head;
  return false;
}

/// The slot of the first token of `head` at or behind `position`. O(log L).
template <CacheReader Cache>
[[nodiscard]] index_t slot_at_or_behind(const Cache& cache, index_t head, position_t position) noexcept {
  index_t low = 0;
  index_t high = cache.num_tokens();
  while (low < high) {
    const index_t middle = low + (high - low) / 2;
    if (cache.position(head, middle) < position)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

}  // namespace detail
}  // namespace beaconkv::inline v0
