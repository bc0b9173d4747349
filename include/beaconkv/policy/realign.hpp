// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Moving cached keys to other positions, in place: RoPE re-alignment over a cache of any layout and storage type.
///
/// Each key is decoded, turned once and encoded once; its scale is found anew where it has its own. Rounding adds up with every
/// call, so many small moves should be one: positions are integers, and `realign_to_slots` may wait for several evictions.
/// Values are never touched, but moved where `compact_and_realign` moves tokens.

#include <algorithm>
#include <concepts>
#include <span>

#include "beaconkv/algorithm/row_turner.hpp"
#include "beaconkv/memory/compact.hpp"
#include "beaconkv/memory/plane.hpp"
#include "beaconkv/workspace.hpp"

namespace beaconkv::inline v0 {

/// A cache whose keys can be written back.
template <class C>
concept RealignableCache = CacheReader<C> && requires(C& cache, index_t head, index_t slot, const float* row) {
  cache.store_key(head, slot, row);
};

/// A cache that knows where its keys are rotated to.
template <class C>
concept RelativeCache = RealignableCache<C> && requires(C& cache, index_t i) {
  cache.position_mode();
  cache.rotary_position(i, i);
  cache.set_rotary_position(i, i, i);
};

/// Scratch of everything here: about 1 KiB a number of a key, for rotations that heads share.
[[nodiscard]] inline WorkspaceSize realign_workspace_size(index_t key_dim) {
  return detail::measure([&](Workspace& work) {  // more than the key and the two cursors of `switch_rope`
    static_cast<void>(work.take<float>(detail::rows_a_block * key_dim));
    static_cast<void>(work.take<std::byte>(static_cast<index_t>(detail::RowTurner::workspace_size(key_dim).bytes)));
  });
}

namespace detail {

template <RealignableCache Cache>
void read_key(const Cache& cache, index_t head, index_t slot, std::span<float> key) {
  const ConstRows row = cache.keys(head, slot, 1, key.data());
  if (row.data != key.data()) std::copy_n(row.data, row.dim, key.data());
}

template <RealignableCache Cache>
[[nodiscard]] Status check_fits(const Cache& cache, index_t head, index_t slot, const float* key) {
  if constexpr (requires { cache.key_fits(head, slot, key); })
    if (!cache.key_fits(head, slot, key))
      return error(StatusCode::unsupported, "head ", head, ", slot ", slot,
                   ": the turned key is beyond the range of its shared scale: keys of this storage need a larger one, or one a "
                   "row");
  return {};
}

/// Turns keys on their way from slot to slot. A key that does not turn moves as bytes.
template <RealignableCache Cache>
class KeyTurner {
 public:
  KeyTurner(Cache& cache, const RopeTable& rope, Workspace& work)
      : cache_(&cache), keys_(work.take<float>(rows_a_block * cache.key_dim())), rows_(rope, work) {}

  /// An error where one of the keys `[from, from + count)` of `head`, turned by `delta(i)`, does not fit its storage.
  template <class Delta>
  [[nodiscard]] Status check(index_t head, index_t from, index_t count, Delta delta) {
    if constexpr (requires { cache_->keys_always_fit(); })
      for (index_t i = 0; i < count && !cache_->keys_always_fit();) {
        if (delta(i) == 0) {
          ++i;
          continue;
        }
        const index_t n = turn_decoded(head, from + i, count - i, [delta, i](index_t j) { return delta(i + j); });
        for (index_t j = 0; j < n; ++j)
          if (Status s = check_fits(*cache_, head, from + i + j, key(j)); !s) return s;
        i += n;
      }
    return {};
  }

  /// Moves `count` keys of `head` from `from` to `to <= from`, key `i` turned by `delta(i)`.
  template <class Delta>
  void move(index_t head, index_t to, index_t from, index_t count, Delta delta) {
    for (index_t i = 0; i < count;) {
      if (delta(i) != 0) {
        i += turn(head, to + i, from + i, count - i, [delta, i](index_t j) { return delta(i + j); });
        continue;
      }
      index_t n = 1;
      while (i + n < count && delta(i + n) == 0) ++n;
      if (to != from) move_bytes(head, to + i, from + i, n);
      i += n;
    }
  }

 private:
  static constexpr bool may_turn_in_place = requires(const Cache& cache) {
    { cache.key_plane() } -> std::same_as<const Plane<float>&>;
  };

  void move_bytes(index_t head, index_t to, index_t from, index_t count) {
    if constexpr (requires { cache_->move_key_rows(head, to, from, count); }) cache_->move_key_rows(head, to, from, count);
  }
  /// The first keys of those that turn: returns how many it moved.
  template <class Delta>
  [[nodiscard]] index_t turn(index_t head, index_t to, index_t from, index_t count, Delta delta) {
    if constexpr (may_turn_in_place) {
      const Plane<float>& keys = cache_->key_plane();
      if (keys.stride.dim == 1)
        return rows_.turn(keys.row(head, from), keys.stride.token, keys.row(head, to), keys.stride.token,
                          keys.contiguous_rows(to, keys.contiguous_rows(from, count)), delta);
    }
    const index_t n = turn_decoded(head, from, count, delta);
    for (index_t i = 0; i < n; ++i) cache_->store_key(head, to + i, key(i));
    return n;
  }
  /// The same in scratch: `key(i)` is the turned key of slot `from + i`.
  template <class Delta>
  [[nodiscard]] index_t turn_decoded(index_t head, index_t from, index_t count, Delta delta) {
    const index_t n = std::min(count, rows_a_block);
    const ConstRows rows = cache_->keys(head, from, n, keys_.data());
    for (index_t i = 0; i < n && rows.data != keys_.data(); ++i) std::copy_n(rows.data + i * rows.stride, rows.dim, key(i));
    return rows_.turn(key(0), cache_->key_dim(), key(0), cache_->key_dim(), n, delta);
  }
  [[nodiscard]] float* key(index_t i) const noexcept { return keys_.data() + i * cache_->key_dim(); }

  Cache* cache_;
  std::span<float> keys_;  // [rows_a_block][key_dim]
  RowTurner rows_;
};

template <RealignableCache Cache>
[[nodiscard]] Status check_rope(const Cache& cache, const RopeTable& rope, const Workspace& work) {
  if (rope.head_dim() != cache.key_dim())
    return invalid("rope.head_dim = ", rope.head_dim(), ": the keys have ", cache.key_dim());
  return work.require(realign_workspace_size(cache.key_dim()));
}

/// Why the keys of a cache are not rotated to their slots, or empty. `name` is the caller's.
template <RelativeCache Cache>
[[nodiscard]] Status check_slots_are_positions(const Cache& cache, const char* name) {
  if (cache.position_mode() == PositionMode::true_positions)
    return error(StatusCode::unsupported, name, ": this cache keeps true positions; make it with PositionMode::cache_relative");
  if constexpr (requires { cache.pinned_prefix(); })
    for (index_t h = 0; h < cache.num_kv_heads(); ++h)
      for (index_t slot = 0; slot < cache.pinned_prefix(); ++slot)
        if (cache.rotary_position(h, slot) != slot)
          return error(StatusCode::unsupported, name, ": slot ", slot, " of the pinned prefix of ", cache.pinned_prefix(),
                       " slots would have to be turned");
  return {};
}

template <RelativeCache Cache>
void count_by_slots(Cache& cache) {
  if constexpr (requires { cache.count_rotary_by_slots(); }) return cache.count_rotary_by_slots();
  const index_t sets = keeps_one_set<Cache>() ? 1 : cache.num_kv_heads();
  for (index_t h = 0; h < sets; ++h)
    for (index_t slot = 0; slot < cache.num_tokens(); ++slot) cache.set_rotary_position(h, slot, slot);
  cache.set_next_rotary_position(cache.num_tokens());
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
  const index_t tokens = detail::tokens_of(cache, head);
  if (static_cast<index_t>(from.size()) != tokens || static_cast<index_t>(to.size()) != tokens)
    return detail::invalid("from has ", from.size(), " and to ", to.size(), " positions: the cache has ", tokens, " tokens");
  if (Status s = detail::check_rope(cache, rope, work); !s) return s;
  const Workspace::Frame frame(work);
  detail::KeyTurner<Cache> turner(cache, rope, work);
  const auto delta = [&](index_t j) { return to[static_cast<std::size_t>(j)] - from[static_cast<std::size_t>(j)]; };
  if (Status s = turner.check(head, 0, tokens, delta); !s) return s;
  turner.move(head, 0, 0, tokens, delta);
  return {};
}

/// Closes the gaps of a `PositionMode::cache_relative` cache: every key is rotated to its slot, and the next token has the
/// rotary position `num_tokens()`. May wait for any number of evictions, since the cache knows where each key stands; a second
/// call changes nothing. Under `unrotated_keys` there is nothing to turn. Refused where true positions are kept. No allocation.
template <RelativeCache Cache>
[[nodiscard]] Status realign_to_slots(Cache& cache, const RopeTable& rope, Workspace& work) {
  if (cache.position_mode() == PositionMode::unrotated_keys) return {};
  if (Status s = detail::check_slots_are_positions(cache, "realign_to_slots"); !s) return s;
  if (Status s = detail::check_rope(cache, rope, work); !s) return s;
  const Workspace::Frame frame(work);
  detail::KeyTurner<Cache> turner(cache, rope, work);
  const auto delta = [&](index_t h) { return [&cache, h](index_t slot) { return slot - cache.rotary_position(h, slot); }; };
  for (index_t h = 0; h < cache.num_kv_heads(); ++h)
    if (Status s = turner.check(h, 0, detail::tokens_of(cache, h), delta(h)); !s) return s;
  constexpr index_t at_once = 1024;  // keys: their deltas are close to each other in all heads
  for (index_t first = 0; first < cache.num_tokens(); first += at_once)
    for (index_t h = 0; h < cache.num_kv_heads(); ++h)
      if (const index_t n = std::min(at_once, detail::tokens_of(cache, h) - first); n > 0)
        turner.move(h, first, first, n,
                    [&cache, h, first](index_t i) { return first + i - cache.rotary_position(h, first + i); });
  detail::count_by_slots(cache);
  return {};
}

namespace detail {

/// What `compact_and_realign` would refuse.
template <RelativeCache Cache>
[[nodiscard]] Status check_compact_and_realign(Cache& cache, const KeepPlan& plan, const RopeTable& rope, Workspace& work) {
  if (Status s = validate_plan(cache, plan); !s) return s;
  if (cache.position_mode() == PositionMode::unrotated_keys) return {};
  if (Status s = check_slots_are_positions(cache, "compact_and_realign"); !s) return s;
  if (Status s = check_rope(cache, rope, work); !s) return s;
  const Workspace::Frame frame(work);
  KeyTurner<Cache> turner(cache, rope, work);
  Status fits;
  for (index_t h = 0; h < cache.num_kv_heads(); ++h)
    plan.for_each_move(h, [&](index_t to, index_t from, index_t count) {
      if (fits.ok())
        fits = turner.check(h, from, count, [&](index_t i) { return to + i - cache.rotary_position(h, from + i); });
    });
  return fits;
}

}  // namespace detail

/// `compact` and `realign_to_slots` in one pass: each key that stays is read once, turned once and written once, at its new
/// slot. The same bits in every storage type, but refused with nothing changed where one of the two would refuse: by a shared
/// scale, say, that the turned keys do not fit. Under `unrotated_keys` it is `compact` alone. No allocation; scratch as for
/// `realign_to_slots`.
template <RelativeCache Cache>
requires CacheBuffer<Cache>
[[nodiscard]] Status compact_and_realign(Cache& cache, const KeepPlan& plan, const RopeTable& rope, Workspace& work) {
  if (Status s = detail::check_compact_and_realign(cache, plan, rope, work); !s) return s;
  constexpr bool one_pass = requires(index_t i) {
    cache.move_key_rows(i, i, i, i);
    cache.move_value_rows(i, i, i, i);
    cache.move_books(i, i, i, i);
  };
  if (!one_pass || plan.keeps_all() || cache.position_mode() == PositionMode::unrotated_keys) {
    if (Status s = compact(cache, plan); !s) return s;
    return realign_to_slots(cache, rope, work);
  }
  if constexpr (one_pass) {
    const Workspace::Frame frame(work);
    detail::KeyTurner<Cache> turner(cache, rope, work);
    detail::apply_plan(
        cache, plan,
        [&](index_t head, index_t to, index_t from, index_t count) {
          const auto delta = [&cache, head, to, from](index_t i) { return to + i - cache.rotary_position(head, from + i); };
          const index_t last = detail::keeps_one_set<Cache>() ? cache.num_kv_heads() : head + 1;
          for (index_t h = head; h < last; ++h) {
            turner.move(h, to, from, count, delta);
            if (to != from) cache.move_value_rows(h, to, from, count);
          }
          cache.move_books(head, to, from, count);
        },
        SerialExecutor{});
    detail::count_by_slots(cache);
  }
  return {};
}

namespace detail {

/// Whether keys are to be turned where tokens move. `rope` may be null.
template <class Cache>
[[nodiscard]] bool realigns(const Cache& cache, const RopeTable* rope) {
  if constexpr (RelativeCache<Cache>) return cache.position_mode() == PositionMode::cache_relative && rope != nullptr;
  return false;
}
/// What `move_tokens` would refuse.
template <CacheBuffer Cache>
[[nodiscard]] Status check_move(Cache& cache, const KeepPlan& plan, const RopeTable* rope, Workspace& work) {
  if constexpr (RelativeCache<Cache>)
    if (realigns(cache, rope)) return check_compact_and_realign(cache, plan, *rope, work);
  return validate_plan(cache, plan);
}
/// `compact_and_realign` where keys are to be turned, else `compact`, its heads over threads.
template <CacheBuffer Cache, class ExecutorT>
[[nodiscard]] Status move_tokens(Cache& cache, const KeepPlan& plan, const RopeTable* rope, Workspace& work,
                                 ExecutorT&& executor) {
  if constexpr (RelativeCache<Cache>)
    if (realigns(cache, rope)) return compact_and_realign(cache, plan, *rope, work);
  return compact(cache, plan, executor);
}

}  // namespace detail

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
  if (Status s = detail::check_rope(cache, from, work); !s) return s;
  const Workspace::Frame frame(work);
  const std::span<float> key = work.take<float>(cache.key_dim());
  RopeCursor back(from, work);
  RopeCursor forth(to, work);
  const auto each_key = [&](auto f) -> Status {
    for (index_t h = 0; h < cache.num_kv_heads(); ++h)
      for (index_t slot = 0; slot < detail::tokens_of(cache, h); ++slot) {
        detail::read_key(cache, h, slot, key);
        from.apply(back.at(-position(h, slot)), key.data(), static_cast<float>(1 / from.attention_factor()));
        to.apply(forth.at(position(h, slot)), key.data(), static_cast<float>(to.attention_factor()));
        if (Status s = f(h, slot); !s) return s;
      }
    return {};
  };
  if constexpr (requires { cache.keys_always_fit(); })
    if (!cache.keys_always_fit())
      if (Status s = each_key([&](index_t h, index_t slot) { return detail::check_fits(cache, h, slot, key.data()); }); !s)
        return s;
  return each_key([&](index_t h, index_t slot) -> Status {
    cache.store_key(h, slot, key.data());
    return {};
  });
}

}  // namespace beaconkv::inline v0
