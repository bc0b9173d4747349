// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Moving cached keys to other positions, in place: RoPE re-alignment over a cache of any layout and storage type.
///
/// Each key is decoded, turned once and encoded once; its scale is found anew where it has its own. Rounding adds up with every
/// call, so many small moves should be one: positions are integers, and `realign_to_slots` may wait for several evictions.
/// Values are never touched.

#include <algorithm>
#include <span>

#include "beaconkv/algorithm/rope.hpp"
#include "beaconkv/memory/cache_buffer.hpp"
#include "beaconkv/workspace.hpp"

namespace beaconkv::inline v0 {

/// A cache whose keys can be written back.
template <class C>
concept RealignableCache = CacheReader<C> && requires(C& cache, index_t head, index_t slot, const float* row) {
  cache.store_key(head, slot, row);
};

/// Scratch of everything here.
[[nodiscard]] inline WorkspaceSize realign_workspace_size(index_t key_dim) {
  return detail::measure([&](Workspace& work) { static_cast<void>(work.take<float>(key_dim)); });
}

namespace detail {

/// Turns each key of heads `[first, last)` by `turn(head, slot, row)`, which returns false where the key stays as it is.
/// Refused with nothing changed where a turned key does not fit its storage.
template <RealignableCache Cache, class Turn>
[[nodiscard]] Status turn_keys(Cache& cache, index_t first, index_t last, const RopeTable& rope, Workspace& work, Turn turn) {
  if (rope.head_dim() != cache.key_dim())
    return invalid("rope.head_dim = ", rope.head_dim(), ": the keys have ", cache.key_dim());
  if (Status s = work.require(realign_workspace_size(cache.key_dim())); !s) return s;
  const Workspace::Frame frame(work);
  const std::span<float> key = work.take<float>(cache.key_dim());
  const auto turned = [&](index_t head, index_t slot) {
    const ConstRows row = cache.keys(head, slot, 1, key.data());
    if (row.data != key.data()) std::copy(row.data, row.data + row.dim, key.data());
    return turn(head, slot, key.data());
  };
  if constexpr (requires { cache.keys_always_fit(); }) {
    if (!cache.keys_always_fit())
      for (index_t h = first; h < last; ++h)
        for (index_t slot = 0; slot < tokens_of(cache, h); ++slot)
          if (turned(h, slot) && !cache.key_fits(h, slot, key.data()))
            return error(StatusCode::unsupported, "head ", h, ", slot ", slot,
                         ": the turned key is beyond the range of its shared scale: keys of this storage need a larger one, "
                         "or one a row");
  }
  for (index_t h = first; h < last; ++h)
    for (index_t slot = 0; slot < tokens_of(cache, h); ++slot)
      if (turned(h, slot)) cache.store_key(h, slot, key.data());
  return {};
}

}  // namespace detail

/// Re-aligns the keys of `head`: slot `j` from position `from[j]` to `to[j]`. The positions that the cache reports stay: for
/// engines that keep a table of rotary positions of their own. A key that does not move keeps every bit. O(tokens * dim), no
/// allocation.
template <RealignableCache Cache>
[[nodiscard]] Status realign_keys(Cache& cache, index_t head, std::span<const position_t> from, std::span<const position_t> to,
                                  const RopeTable& rope, Workspace& work) {
  if (head < 0 || head >= cache.num_kv_heads())
    return detail::invalid("head = ", head, ": must be below ", cache.num_kv_heads());
  const auto n = static_cast<std::size_t>(detail::tokens_of(cache, head));
  if (from.size() != n || to.size() != n)
    return detail::invalid("from has ", from.size(), " and to ", to.size(), " positions: the cache has ", n, " tokens");
  return detail::turn_keys(cache, head, head + 1, rope, work, [&](index_t, index_t slot, float* key) {
    const auto j = static_cast<std::size_t>(slot);
    rope.realign(key, from[j], to[j]);
    return from[j] != to[j];
  });
}

/// Closes the gaps of a `PositionMode::cache_relative` cache: every key is rotated to its slot, and the next token has the
/// rotary position `num_tokens()`. May wait for any number of evictions, since the cache knows where each key stands; a second
/// call changes nothing. Under `unrotated_keys` there is nothing to turn. Refused where true positions are kept. No allocation.
template <RealignableCache Cache>
requires requires(Cache& cache, index_t i) {
  cache.position_mode();
  cache.set_rotary_position(i, i, i);
}
[[nodiscard]] Status realign_to_slots(Cache& cache, const RopeTable& rope, Workspace& work) {
  if (cache.position_mode() == PositionMode::unrotated_keys) return {};
  if (cache.position_mode() == PositionMode::true_positions)
    return detail::error(StatusCode::unsupported,
                         "realign_to_slots: this cache keeps true positions; make it with PositionMode::cache_relative");
  const index_t heads = cache.num_kv_heads();
  if constexpr (requires { cache.pinned_prefix(); })
    for (index_t h = 0; h < heads; ++h)
      for (index_t slot = 0; slot < cache.pinned_prefix(); ++slot)
        if (cache.rotary_position(h, slot) != slot)
          return detail::error(StatusCode::unsupported, "realign_to_slots: slot ", slot, " of the pinned prefix of ",
                               cache.pinned_prefix(), " slots would have to be turned");
  if (Status s = detail::turn_keys(cache, 0, heads, rope, work,
                                   [&](index_t h, index_t slot, float* key) {
                                     const position_t from = cache.rotary_position(h, slot);
                                     rope.realign(key, from, slot);
                                     return from != slot;
                                   });
      !s)
    return s;
  for (index_t h = 0; h < heads; ++h)
    for (index_t slot = 0; slot < cache.num_tokens(); ++slot) cache.set_rotary_position(h, slot, slot);
  cache.set_next_rotary_position(cache.num_tokens());
  return {};
}

/// Turns every key from one RoPE table to another at the position where it stands: a model that changes its frequencies with
/// the length of the text (LongRoPE). Tell the policy its new table, too (`EvictionPolicy::set_rope`). No allocation.
template <RealignableCache Cache>
[[nodiscard]] Status switch_rope(Cache& cache, const RopeTable& from, const RopeTable& to, Workspace& work) {
  if (Status s = detail::same_rotated_dims(from, to); !s) return s;
  if constexpr (requires { cache.pinned_prefix(); })
    if (cache.pinned_prefix() > 0)
      return detail::error(StatusCode::unsupported, "switch_rope: the pinned prefix of ", cache.pinned_prefix(),
                           " slots would have to be turned");
  const auto position = [&](index_t h, index_t slot) {
    if constexpr (requires { cache.rotary_position(h, slot); }) return cache.rotary_position(h, slot);
    return cache.position(h, slot);
  };
  if constexpr (requires { cache.position_mode(); })
    if (cache.position_mode() == PositionMode::unrotated_keys) return {};
  return detail::turn_keys(cache, 0, cache.num_kv_heads(), from, work, [&](index_t h, index_t slot, float* key) {
    from.unrotate(key, position(h, slot));
    to.rotate(key, position(h, slot));
    return true;
  });
}

}  // namespace beaconkv::inline v0
