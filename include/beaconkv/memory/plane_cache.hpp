// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// `PlaneCache`: a `CacheBuffer` over memory that an engine owns.

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "beaconkv/memory/cache_buffer.hpp"
#include "beaconkv/memory/layouts.hpp"

namespace beaconkv::inline v0 {

/// The keys and values of one layer of one sequence, in memory that somebody else owns.
///
/// It owns only its bookkeeping: how many tokens there are and their positions (8 bytes a slot, for each head that keeps a set
/// of its own; twice that under `PositionMode::cache_relative`). The engine writes keys and values at slot `num_tokens()` of
/// every head (of a ragged cache at `num_tokens(head)`) and then calls `append`. A copy refers to the same keys and values;
/// `copy_from` copies rows too. Nothing allocates after construction.
///
/// \tparam K storage type of keys, \tparam V of values (they may also differ in width), \tparam G which heads must agree.
template <StorageType K, StorageType V = K, Granularity G = Granularity::per_head>
class PlaneCache {
 public:
  using key_type = K;
  using value_type = V;
  static constexpr Granularity granularity = G;

  /// A view of two planes that address the same heads. Allocates the positions of `capacity` slots, nothing later.
  [[nodiscard]] static Result<PlaneCache> make(const Plane<K>& keys, const Plane<V>& values,
                                               PositionMode mode = PositionMode::true_positions) {
    if (Status s = detail::validate_plane(values, "values"); !s) return s;
    if (keys.heads != values.heads)
      return detail::invalid("keys.heads = ", keys.heads, ", values.heads = ", values.heads, ": must be equal");
    if (keys.capacity != values.capacity)
      return detail::invalid("keys.capacity = ", keys.capacity, ", values.capacity = ", values.capacity, ": must be equal");
    return make_checked(keys, values, mode);
  }
  [[nodiscard]] static Result<PlaneCache> make(const Planes<K, V>& planes, PositionMode mode = PositionMode::true_positions) {
    return make(planes.keys, planes.values, mode);
  }

  /// Multi-head latent attention: the first `value_dim` numbers of a key are its value, so there is no memory of values. Moves
  /// and `bytes_per_token` count a row once.
  [[nodiscard]] static Result<PlaneCache> make_latent(
      const Plane<K>& rows, index_t value_dim, PositionMode mode = PositionMode::true_positions) requires std::same_as<K, V> {
    if (value_dim < 1 || value_dim > rows.dim)
      return detail::invalid("value_dim = ", value_dim, ": must be between 1 and the rows' ", rows.dim);
    Plane<V> values = rows;
    values.dim = value_dim;
    if (value_dim % numbers_per_element<V> != 0)
      return detail::invalid("value_dim = ", value_dim, ": must be a multiple of ", numbers_per_element<V>);
    Result<PlaneCache> cache = make_checked(rows, values, mode);
    if (cache) cache->latent_ = true;
    return cache;
  }

#ifndef BEACONKV_NO_EXCEPTIONS
  /// Dense `[kv_head][capacity][dim]` memory; throws `Error` on bad sizes. Keys and values have `shape.head_dim` numbers a row.
  [[nodiscard]] static PlaneCache head_major(K* keys, V* values, const Shape& shape, index_t capacity) {
    return make(head_major_plane(keys, shape.kv_heads, shape.head_dim, capacity),
                head_major_plane(values, shape.kv_heads, shape.head_dim, capacity))
        .or_throw();
  }
  /// Dense `[capacity][kv_head][dim]` memory; throws `Error` on bad sizes.
  [[nodiscard]] static PlaneCache token_major(K* keys, V* values, const Shape& shape, index_t capacity) {
    return make(token_major_plane(keys, shape.kv_heads, shape.head_dim, capacity),
                token_major_plane(values, shape.kv_heads, shape.head_dim, capacity))
        .or_throw();
  }
#endif

  [[nodiscard]] index_t num_kv_heads() const noexcept { return keys_.heads; }
  /// Tokens of a head; of the longest one where they differ.
  [[nodiscard]] index_t num_tokens() const noexcept { return tokens_; }
  [[nodiscard]] index_t num_tokens(index_t head) const noexcept requires(G == Granularity::per_head_ragged) {
    return lengths_[static_cast<std::size_t>(head)];
  }
  [[nodiscard]] index_t capacity() const noexcept { return keys_.capacity; }
  [[nodiscard]] index_t key_dim() const noexcept { return keys_.dim; }
  [[nodiscard]] index_t value_dim() const noexcept { return values_.dim; }
  [[nodiscard]] const Plane<K>& key_plane() const noexcept { return keys_; }
  [[nodiscard]] const Plane<V>& value_plane() const noexcept { return values_; }

  /// The true position of the token in `slot` of `head`.
  [[nodiscard]] position_t position(index_t head, index_t slot) const noexcept { return positions_[index_of(head, slot)]; }
  /// The true position that the next token will at least have: one more than the newest token ever appended, whatever was
  /// evicted since.
  [[nodiscard]] position_t next_position() const noexcept { return next_position_; }

  [[nodiscard]] PositionMode position_mode() const noexcept { return mode_; }
  /// The position to which the key in `slot` is rotated (under `unrotated_keys`: is to be rotated by its reader).
  [[nodiscard]] position_t rotary_position(index_t head, index_t slot) const noexcept {
    if (mode_ == PositionMode::cache_relative) return rotary_[index_of(head, slot)];
    return mode_ == PositionMode::unrotated_keys ? slot : position(head, slot);
  }
  /// The position to which the next token's key and query are to be rotated.
  [[nodiscard]] position_t next_rotary_position() const noexcept {
    if (mode_ == PositionMode::cache_relative) return next_rotary_;
    return mode_ == PositionMode::unrotated_keys ? tokens_ : next_position_;
  }

  /// A number for the state of this cache: other after every `append`, `truncate` or compaction, other for other memory.
  [[nodiscard]] std::uint64_t epoch() const noexcept {
    return changes_ + reinterpret_cast<std::uintptr_t>(keys_.base) * std::uint64_t{0x9E3779B97F4A7C15};
  }

  /// Bytes of keys and values a token of this layer takes, their own scales included.
  [[nodiscard]] index_t bytes_per_token() const noexcept {
    return keys_.bytes_per_token() + (latent_ ? 0 : values_.bytes_per_token());
  }
  /// Bytes that the cache itself holds.
  [[nodiscard]] std::size_t state_bytes() const noexcept {
    return (positions_.size() + rotary_.size()) * sizeof(position_t) + lengths_.size() * sizeof(index_t);
  }

  /// Rows of keys as floats; see `CacheReader`.
  [[nodiscard]] ConstRows keys(index_t head, index_t first, index_t count, float* scratch) const noexcept {
    return tile(keys_, head, first, count, scratch);
  }
  /// Rows of values as floats; see `CacheReader`.
  [[nodiscard]] ConstRows values(index_t head, index_t first, index_t count, float* scratch) const noexcept {
    return tile(values_, head, first, count, scratch);
  }

  /// The engine wrote one token at slot `num_tokens()` of every head; its true position.
  [[nodiscard]] Status append(position_t position) { return append_run(position, 1); }

  /// The engine wrote `count` tokens from slot `num_tokens()` on, at positions `first_position`, `first_position + 1`, ...
  [[nodiscard]] Status append_run(position_t first_position, index_t count) {
    if (count < 0) return detail::invalid("count = ", count, ": must not be negative");
    if (count > capacity() - tokens_)
      return detail::error(StatusCode::out_of_capacity, "count = ", count, ": the cache has room for ", capacity() - tokens_,
                           " more of its ", capacity(), " tokens");
    if (first_position < next_position_)
      return detail::error(StatusCode::out_of_order, "position = ", first_position, ": must be at least ", next_position_);
    if (Status s = detail::check_pages(keys_, tokens_, count, "keys"); !s) return s;
    if (Status s = detail::check_pages(values_, tokens_, count, "values"); !s) return s;
    if (count == 0) return {};
    for (index_t h = 0; h < sets(); ++h) {
      const index_t first = length_of(h);
      for (index_t i = 0; i < count; ++i) {
        positions_[index_of(h, first + i)] = first_position + i;
        if (!rotary_.empty()) rotary_[index_of(h, first + i)] = next_rotary_ + i;
      }
      if constexpr (G == Granularity::per_head_ragged) lengths_[static_cast<std::size_t>(h)] += count;
    }
    tokens_ += count;
    next_position_ = first_position + count;
    next_rotary_ += count;
    undoable_ += count;
    ++changes_;
    return {};
  }

  /// Takes back the newest `count` tokens, `next_position` included, as if they had never been appended. Only tokens behind
  /// the last eviction and the pinned prefix can be taken back: returns how many were.
  [[nodiscard]] Result<index_t> rollback(index_t count) {
    if (count < 0) return detail::invalid("count = ", count, ": must not be negative");
    const index_t undone = std::min({count, undoable_, tokens_ - pinned_});
    if (undone == 0) return undone;
    undoable_ -= undone;
    next_position_ = undoable_ > 0 ? position(0, length_of(0) - undone - 1) + 1 : firm_position_;
    next_rotary_ -= undone;
    shorten(tokens_ - undone, undone);
    return undone;
  }

  /// Leading slots that other sequences share: never moved, never evicted.
  [[nodiscard]] index_t pinned_prefix() const noexcept { return pinned_; }
  [[nodiscard]] Status set_pinned_prefix(index_t count) {
    index_t shortest = tokens_;
    for (index_t h = 0; h < sets(); ++h) shortest = std::min(shortest, length_of(h));
    if (count < 0 || count > shortest) return detail::invalid("pinned prefix = ", count, ": must be between 0 and ", shortest);
    pinned_ = count;
    return {};
  }

  /// Moves `count` slots of `head` from `from` to `to <= from`: bytes of keys, values and scales, and positions.
  void move_run(index_t head, index_t to, index_t from, index_t count) noexcept {
    BEACONKV_ASSERT(0 <= to && to <= from && count >= 0 && from + count <= tokens_);
    if (to == from) return;
    const index_t first_head = one_set ? 0 : head;
    const index_t last_head = one_set ? keys_.heads : head + 1;
    for (index_t h = first_head; h < last_head; ++h)
      for (index_t i = 0; i < count; ++i) {
        detail::copy_row(keys_, h, to + i, keys_, h, from + i);
        if (!latent_) detail::copy_row(values_, h, to + i, values_, h, from + i);
      }
    move_positions(positions_, head, to, from, count);
    if (!rotary_.empty()) move_positions(rotary_, head, to, from, count);
  }

  /// Keeps the first `count` slots of every head. `next_position` stays.
  void truncate(index_t count) noexcept requires(G != Granularity::per_head_ragged) {
    BEACONKV_ASSERT(0 <= count && count <= tokens_);
    make_firm();
    shorten(count, tokens_ - count);
  }
  /// Keeps the first `count` slots of `head`. `next_position` stays.
  void truncate(index_t head, index_t count) noexcept requires(G == Granularity::per_head_ragged) {
    index_t& length = lengths_[static_cast<std::size_t>(head)];
    BEACONKV_ASSERT(pinned_ <= count && count <= length);
    length = count;
    tokens_ = *std::max_element(lengths_.begin(), lengths_.end());
    make_firm();
    ++changes_;
  }

  /// Whether `store_key` can hold any numbers: not where rows share a scale.
  [[nodiscard]] bool keys_always_fit() const noexcept { return !takes_scale<K> || keys_.scales.per_row(); }
  /// Whether `store_key` can hold these numbers: not where a shared scale is too small for them.
  [[nodiscard]] bool key_fits(index_t head, index_t slot, const float* row) const noexcept {
    return detail::row_fits(keys_, head, slot, row);
  }
  /// Writes one key back, encoded once. For `realign_keys`.
  void store_key(index_t head, index_t slot, const float* row) noexcept { detail::store_row(keys_, head, slot, row); }
  /// Writes one value, encoded once.
  void store_value(index_t head, index_t slot, const float* row) noexcept { detail::store_row(values_, head, slot, row); }
  /// Notes to which position a key was rotated. For `realign_to_slots`.
  void set_rotary_position(index_t head, index_t slot, position_t position) noexcept {
    BEACONKV_ASSERT(mode_ == PositionMode::cache_relative);
    rotary_[index_of(head, slot)] = position;
  }
  void set_next_rotary_position(position_t position) noexcept { next_rotary_ = position; }

  /// Points the same bookkeeping at other memory of the same shape (after the engine moved or copied its buffers).
  [[nodiscard]] Status rebase(const Plane<K>& keys, const Plane<V>& values) {
    if (Status s = detail::validate_plane(keys, "keys"); !s) return s;
    if (Status s = detail::validate_plane(values, "values"); !s) return s;
    if (Status s = detail::same_rows(keys_, keys, "rebase: keys"); !s) return s;
    if (Status s = detail::same_rows(values_, values, "rebase: values"); !s) return s;
    if (keys.capacity != keys_.capacity || values.capacity != keys_.capacity)
      return detail::invalid("rebase: capacity = ", keys.capacity, ": must be the cache's ", keys_.capacity);
    if (Status s = detail::check_pages(keys, 0, tokens_, "keys"); !s) return s;
    if (Status s = detail::check_pages(values, 0, tokens_, "values"); !s) return s;
    keys_ = keys;
    values_ = values;
    return {};
  }

  /// Becomes a deep copy of `other`, in this cache's own memory: a fork. Layout and capacity may differ, if the tokens fit.
  [[nodiscard]] Status copy_from(const PlaneCache& other) {
    if (Status s = detail::same_rows(keys_, other.keys_, "copy_from: keys"); !s) return s;
    if (Status s = detail::same_rows(values_, other.values_, "copy_from: values"); !s) return s;
    if (mode_ != other.mode_ || latent_ != other.latent_)
      return detail::invalid("copy_from: the caches differ in position mode or latent values");
    if (other.tokens_ > capacity())
      return detail::error(StatusCode::out_of_capacity, "copy_from: ", other.tokens_, " tokens, capacity = ", capacity());
    if (Status s = detail::check_pages(keys_, 0, other.tokens_, "keys"); !s) return s;
    if (Status s = detail::check_pages(values_, 0, other.tokens_, "values"); !s) return s;
    for (index_t h = 0; h < keys_.heads; ++h)
      for (index_t i = 0; i < other.length_of(one_set ? 0 : h); ++i) {
        detail::copy_row(keys_, h, i, other.keys_, h, i);
        if (!latent_) detail::copy_row(values_, h, i, other.values_, h, i);
      }
    for (index_t h = 0; h < sets(); ++h)
      for (index_t i = 0; i < other.length_of(h); ++i) {
        positions_[index_of(h, i)] = other.positions_[other.index_of(h, i)];
        if (!rotary_.empty()) rotary_[index_of(h, i)] = other.rotary_[other.index_of(h, i)];
      }
    lengths_ = other.lengths_;
    tokens_ = other.tokens_;
    pinned_ = other.pinned_;
    undoable_ = other.undoable_;
    firm_position_ = other.firm_position_;
    next_position_ = other.next_position_;
    next_rotary_ = other.next_rotary_;
    ++changes_;
    return {};
  }

 private:
  static constexpr bool one_set = G == Granularity::per_layer || G == Granularity::per_sequence;

  [[nodiscard]] static Result<PlaneCache> make_checked(const Plane<K>& keys, const Plane<V>& values, PositionMode mode) {
    if (Status s = detail::validate_plane(keys, "keys"); !s) return s;
    if (keys.capacity > std::numeric_limits<slot_t>::max())
      return detail::invalid("keys.capacity = ", keys.capacity, ": must be below ", std::numeric_limits<slot_t>::max());
    if (G == Granularity::per_head_ragged && mode != PositionMode::true_positions)
      return detail::error(StatusCode::unsupported,
                           "position mode: heads of different lengths have no common positions within the cache");
    return PlaneCache(keys, values, mode);
  }

  PlaneCache(const Plane<K>& keys, const Plane<V>& values, PositionMode mode)
      : keys_(keys), values_(values), mode_(mode), positions_(static_cast<std::size_t>(sets() * keys.capacity)) {
    if (mode == PositionMode::cache_relative) rotary_.resize(positions_.size());
    if constexpr (G == Granularity::per_head_ragged) lengths_.resize(static_cast<std::size_t>(keys.heads));
  }

  [[nodiscard]] index_t sets() const noexcept { return one_set ? 1 : keys_.heads; }
  [[nodiscard]] index_t length_of(index_t head) const noexcept { return detail::tokens_of(*this, head); }
  [[nodiscard]] std::size_t index_of(index_t head, index_t slot) const noexcept {
    return static_cast<std::size_t>((one_set ? 0 : head) * keys_.capacity + slot);
  }

  /// `tokens` are left in the longest head, and `gone` fewer than before in each.
  void shorten(index_t tokens, index_t gone) noexcept {
    for (index_t& length : lengths_) length -= gone;
    tokens_ = tokens;
    pinned_ = std::min(pinned_, tokens);
    ++changes_;
  }

  /// What was appended until now can no longer be taken back.
  void make_firm() noexcept {
    undoable_ = 0;
    firm_position_ = next_position_;
  }

  void move_positions(std::vector<position_t>& all, index_t head, index_t to, index_t from, index_t count) noexcept {
    position_t* const p = all.data() + index_of(head, 0);
    std::memmove(p + to, p + from, static_cast<std::size_t>(count) * sizeof(position_t));
  }

  template <class T>
  [[nodiscard]] static ConstRows tile(const Plane<T>& plane, index_t head, index_t first, index_t count,
                                      float* scratch) noexcept {
    if constexpr (std::is_same_v<T, float>) {
      if (plane.stride.dim == 1 && plane.contiguous_rows(first, count) == count)
        return {count > 0 ? plane.row(head, first) : scratch, count, plane.dim, plane.stride.token};
    }
    for (index_t i = 0; i < count; ++i) detail::load_row(plane, head, first + i, scratch + i * plane.dim);
    return {scratch, count, plane.dim, plane.dim};
  }

  Plane<K> keys_;
  Plane<V> values_;
  PositionMode mode_;
  bool latent_ = false;  // values are the first numbers of the keys
  index_t tokens_ = 0;   // of the longest head
  index_t pinned_ = 0;
  index_t undoable_ = 0;  // appended since slots last moved
  position_t next_position_ = 0;
  position_t firm_position_ = 0;  // next_position_ before the undoable tokens
  position_t next_rotary_ = 0;
  std::uint64_t changes_ = 0;
  std::vector<position_t> positions_;  // [sets][capacity]
  std::vector<position_t> rotary_;     // [sets][capacity] under cache_relative
  std::vector<index_t> lengths_;       // [heads] of a ragged cache
};

static_assert(CacheBuffer<PlaneCache<float>>);
static_assert(CacheBuffer<PlaneCache<float16, q8_0, Granularity::per_layer>>);
static_assert(CacheBuffer<PlaneCache<std::int8_t, float8_e4m3, Granularity::per_head_ragged>>);

}  // namespace beaconkv::inline v0
