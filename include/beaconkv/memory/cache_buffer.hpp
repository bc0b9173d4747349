// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// The two concepts through which the library sees an engine's KV cache: one layer of one sequence.

#include <concepts>

#include "beaconkv/types.hpp"

namespace beaconkv::inline v0 {

// clang-format off: version 14 breaks lines before every noexcept.

/// What scoring and planning need. `num_tokens()` is what every head holds, or the longest head where they differ; all heads
/// hold equally many tokens of a protected prefix; `position` is strictly ascending over the slots of a head.
///
/// `keys(head, first, count, scratch)` returns `count` rows of `key_dim()` floats: a pointer into the engine's own memory where
/// that is float with unit stride, else rows decoded into `scratch` (`count * key_dim()` floats). `values` likewise.
/// `epoch()` changes whenever tokens are added, moved or removed; two caches should not share it.
///
/// Optional: `granularity` and `pinned_prefix()` as in `CacheBuffer`; `num_tokens(head)` of a ragged cache; `position_mode()`
/// with `rotary_position(head, slot)` and `next_rotary_position()` of a cache whose keys do not stand at their true positions.
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
/// from`). Where all heads keep one set it is called once, with head 0, and moves all heads. `truncate(n)` keeps the first
/// `n` slots of every head; a ragged cache has `truncate(head, n)`, called for every head in order, instead. The first
/// `pinned_prefix()` slots are shared with other sequences: never moved, never evicted.
template <class C>
concept CacheBuffer = CacheReader<C> && requires(C& cache, index_t head, index_t to, index_t from, index_t count) {
  requires std::same_as<std::remove_cv_t<decltype(C::granularity)>, Granularity>;
  { cache.pinned_prefix() }
  noexcept->std::same_as<index_t>;
  { cache.move_run(head, to, from, count) }
  noexcept->std::same_as<void>;
  requires requires {
    { cache.truncate(count) }
    noexcept->std::same_as<void>;
  } || requires {
    { cache.truncate(head, count) }
    noexcept->std::same_as<void>;
  };
};

// clang-format on

namespace detail {

/// Whether all heads of the cache must keep the same tokens. A reader that does not say keeps a set for each.
template <class Cache>
[[nodiscard]] constexpr bool keeps_one_set() {
  if constexpr (requires { Cache::granularity; })
    return Cache::granularity == Granularity::per_layer || Cache::granularity == Granularity::per_sequence;
  return false;
}

template <class Cache>
[[nodiscard]] constexpr bool is_ragged() {
  if constexpr (requires { Cache::granularity; }) return Cache::granularity == Granularity::per_head_ragged;
  return false;
}

/// What `head` holds.
template <CacheReader Cache>
[[nodiscard]] index_t tokens_of(const Cache& cache, index_t head) noexcept {
  if constexpr (is_ragged<Cache>()) return cache.num_tokens(head);
  static_cast<void>(head);
  return cache.num_tokens();
}

/// Whether the cache tells where rows lie, so that their memory can be asked for before it is read.
template <class Cache>
concept has_memory_ahead = requires(const Cache& cache, index_t i) {
  cache.keys_ahead(i, i, i);
  cache.values_ahead(i, i, i);
};

/// The slot of the first token of `head` at or behind `position`. O(log L).
template <CacheReader Cache>
[[nodiscard]] index_t slot_at_or_behind(const Cache& cache, index_t head, position_t position) noexcept {
  index_t low = 0;
  index_t high = tokens_of(cache, head);
  while (low < high) {
    const index_t middle = low + (high - low) / 2;
    if (cache.position(head, middle) < position)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

/// The first tokens of one KV head of a cache as a cache of its own: how heads are scored one by one.
template <CacheReader Cache>
class HeadReader {
 public:
  HeadReader(const Cache& cache, index_t head, index_t tokens) noexcept : cache_(&cache), head_(head), tokens_(tokens) {}
  [[nodiscard]] index_t num_kv_heads() const noexcept { return 1; }
  [[nodiscard]] index_t num_tokens() const noexcept { return tokens_; }
  [[nodiscard]] index_t key_dim() const noexcept { return cache_->key_dim(); }
  [[nodiscard]] index_t value_dim() const noexcept { return cache_->value_dim(); }
  [[nodiscard]] std::uint64_t epoch() const noexcept { return cache_->epoch(); }
  [[nodiscard]] position_t position(index_t, index_t slot) const noexcept { return cache_->position(head_, slot); }
  [[nodiscard]] ConstRows keys(index_t, index_t first, index_t count, float* scratch) const noexcept {
    return cache_->keys(head_, first, count, scratch);
  }
  [[nodiscard]] ConstRows values(index_t, index_t first, index_t count, float* scratch) const noexcept {
    return cache_->values(head_, first, count, scratch);
  }
  /// Of the head behind this one, too, which is read next.
  [[nodiscard]] auto keys_ahead(index_t head, index_t first, index_t count) const noexcept requires has_memory_ahead<Cache> {
    return cache_->keys_ahead(head_ + head, first, count);
  }
  [[nodiscard]] auto values_ahead(index_t, index_t first, index_t count) const noexcept requires has_memory_ahead<Cache> {
    return cache_->values_ahead(head_, first, count);
  }

 private:
  const Cache* cache_;
  index_t head_;
  index_t tokens_;
};

}  // namespace detail
}  // namespace beaconkv::inline v0
