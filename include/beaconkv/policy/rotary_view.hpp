// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Scoring over caches whose keys do not stand at their true positions (`PositionMode`): queries move to where the cache counts
/// them, and keys that are cached before RoPE are rotated as they are read.

#include <algorithm>
#include <span>

#include "beaconkv/algorithm/rope.hpp"
#include "beaconkv/memory/cache_buffer.hpp"

namespace beaconkv::inline v0 {
namespace detail {

template <class Cache>
inline constexpr bool has_position_mode = requires(const Cache& cache, index_t i) {
  cache.position_mode();
  cache.rotary_position(i, i);
};

/// Moves each observed query from its true position to that of its own token in the cache, or of the newest older one that is
/// left. `queries` [heads][rows][dim], `positions` [heads][rows], of a range of query heads. Scratch: a `RopeCursor`'s.
template <CacheReader Cache>
void move_to_rotary_positions(const Cache& cache, const RopeTable* rope, const Shape& shape, Range heads, index_t rows,
                              std::span<float> queries, std::span<const position_t> positions, Workspace& work) {
  if constexpr (has_position_mode<Cache>) {
    if (cache.position_mode() == PositionMode::true_positions || rope == nullptr) return;
    const Workspace::Frame frame(work);
    RopeCursor cursor(*rope, work);
    for (index_t q = 0; q < heads.size(); ++q)
      for (index_t r = 0; r < rows; ++r) {
        const index_t kv_head = (heads.first + q) / shape.group();
        const position_t position = positions[static_cast<std::size_t>(q * rows + r)];
        const index_t slot = slot_at_or_behind(cache, kv_head, position + 1) - 1;
        const position_t rotary = slot < 0 ? 0 : cache.rotary_position(kv_head, slot);
        if (rotary != position) rope->apply(cursor.at(rotary - position), queries.data() + (q * rows + r) * shape.head_dim);
      }
  }
}

}  // namespace detail

/// A cache that holds its keys before RoPE (`PositionMode::unrotated_keys`) as policies need to see it: `keys` rotates what it
/// reads to the slots. A view of cache and table, which must outlive it; `evict(policy, view, work)` evicts from the cache.
///
/// Costs O(D) multiplications for each key that is read; behind slot 4096 O(D) sines and cosines, too, for each tile that is
/// read at once (64 to 96 keys).
template <CacheBuffer Cache>
class RotatedKeys {
 public:
  static constexpr Granularity granularity = Cache::granularity;

  RotatedKeys(Cache& cache, const RopeTable& rope) noexcept : cache_(&cache), rope_(&rope) {
    BEACONKV_ASSERT(rope.head_dim() == cache.key_dim());
  }
  RotatedKeys(Cache& cache, RopeTable&& rope) = delete;  // would be gone before it is used
  /// Whether the cache's keys are what this view takes them for; policies refuse the view where not.
  [[nodiscard]] bool reads_unrotated_keys() const noexcept { return cache_->position_mode() == PositionMode::unrotated_keys; }
  [[nodiscard]] index_t num_kv_heads() const noexcept { return cache_->num_kv_heads(); }
  [[nodiscard]] index_t num_tokens() const noexcept { return cache_->num_tokens(); }
  [[nodiscard]] index_t key_dim() const noexcept { return cache_->key_dim(); }
  [[nodiscard]] index_t value_dim() const noexcept { return cache_->value_dim(); }
  [[nodiscard]] std::uint64_t epoch() const noexcept { return cache_->epoch(); }
  [[nodiscard]] index_t pinned_prefix() const noexcept { return cache_->pinned_prefix(); }
  [[nodiscard]] position_t position(index_t head, index_t slot) const noexcept { return cache_->position(head, slot); }
  [[nodiscard]] PositionMode position_mode() const noexcept { return PositionMode::cache_relative; }
  [[nodiscard]] position_t rotary_position(index_t, index_t slot) const noexcept { return slot; }
  [[nodiscard]] ConstRows keys(index_t head, index_t first, index_t count, float* scratch) const noexcept {
    const ConstRows rows = cache_->keys(head, first, count, scratch);
    if (rows.data != scratch)
      for (index_t i = 0; i < count; ++i) std::copy(rows.row(i), rows.row(i) + rows.dim, scratch + i * rows.dim);
    rope_->rotate_run(scratch, count, rows.dim, first);
    return {scratch, count, rows.dim, rows.dim};
  }
  [[nodiscard]] ConstRows values(index_t head, index_t first, index_t count, float* scratch) const noexcept {
    return cache_->values(head, first, count, scratch);
  }
  void move_run(index_t head, index_t to, index_t from, index_t count) noexcept { cache_->move_run(head, to, from, count); }
  void truncate(index_t count) noexcept { cache_->truncate(count); }

 private:
  Cache* cache_;
  const RopeTable* rope_;
};

}  // namespace beaconkv::inline v0
