// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// `PlaneCache`: a `CacheBuffer` over memory that an engine owns. `OwningCache`: the same with memory of its own.

#include <cstring>
#include <limits>
#include <vector>

#include "beaconkv/memory/cache_buffer.hpp"
#include "beaconkv/memory/codec.hpp"
#include "beaconkv/memory/plane.hpp"

namespace beaconkv::inline v0 {

/// The keys and values of one layer of one sequence, in memory that somebody else owns.
///
/// It owns only its bookkeeping: how many tokens there are and their true positions (8 bytes a slot, for each head that keeps
/// a set of its own). The engine writes keys and values at slot `num_tokens()` of every head and then calls `append`. A copy
/// refers to the same keys and values; use `OwningCache::copy`-like deep copies to fork a sequence.
///
/// \tparam K storage type of keys, \tparam V of values (they may also differ in width), \tparam G which heads must agree.
template <ElementCodec K, ElementCodec V = K, Granularity G = Granularity::per_head>
class PlaneCache {
 public:
  using key_type = K;
  using value_type = V;
  static constexpr Granularity granularity = G;

  /// A view of two planes that address the same heads. Allocates the positions of `capacity` slots, nothing later.
  [[nodiscard]] static Result<PlaneCache> make(const Plane<K>& keys, const Plane<V>& values) {
    if (Status s = detail::validate_plane(keys, "keys"); !s) return s;
    if (Status s = detail::validate_plane(values, "values"); !s) return s;
    if (keys.heads != values.heads)
      return detail::invalid("keys.heads = ", keys.heads, ", values.heads = ", values.heads, ": must be equal");
    if (keys.capacity != values.capacity)
      return detail::invalid("keys.capacity = ", keys.capacity, ", values.capacity = ", values.capacity, ": must be equal");
    if (keys.capacity > std::numeric_limits<slot_t>::max())
      return detail::invalid("keys.capacity = ", keys.capacity, ": must be below ", std::numeric_limits<slot_t>::max());
    return PlaneCache(keys, values);
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
  [[nodiscard]] index_t num_tokens() const noexcept { return tokens_; }
  [[nodiscard]] index_t capacity() const noexcept { return keys_.capacity; }
  [[nodiscard]] index_t key_dim() const noexcept { return keys_.dim; }
  [[nodiscard]] index_t value_dim() const noexcept { return values_.dim; }
  [[nodiscard]] const Plane<K>& key_plane() const noexcept { return keys_; }
  [[nodiscard]] const Plane<V>& value_plane() const noexcept { return values_; }

  /// The true position of the token in `slot` of `head`.
  [[nodiscard]] position_t position(index_t head, index_t slot) const noexcept {
    return positions_[position_index(head, slot)];
  }
  /// The position that the next token will have: one more than the newest token ever appended, whatever was evicted since.
  [[nodiscard]] position_t next_position() const noexcept { return next_position_; }

  /// A number for the state of this cache: other after every `append`, `truncate` or compaction, other for other memory.
  [[nodiscard]] std::uint64_t epoch() const noexcept {
    return changes_ + reinterpret_cast<std::uintptr_t>(keys_.base) * std::uint64_t{0x9E3779B97F4A7C15};
  }

  /// Bytes of keys and values a token of this layer takes.
  [[nodiscard]] index_t bytes_per_token() const noexcept {
    return keys_.heads * (keys_.dim * index_t{sizeof(K)} + values_.dim * index_t{sizeof(V)});
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
    if (count == 0) return {};
    for (index_t h = 0; h < sets(); ++h)
      for (index_t i = 0; i < count; ++i) positions_[position_index(h, tokens_ + i)] = first_position + i;
    tokens_ += count;
    next_position_ = first_position + count;
    ++changes_;
    return {};
  }

  /// Leading slots that other sequences share: never moved, never evicted.
  [[nodiscard]] index_t pinned_prefix() const noexcept { return pinned_; }
  [[nodiscard]] Status set_pinned_prefix(index_t count) {
    if (count < 0 || count > tokens_) return detail::invalid("pinned prefix = ", count, ": must be between 0 and ", tokens_);
    pinned_ = count;
    return {};
  }

  /// Moves `count` slots of `head` from `from` to `to <= from`: bytes of keys and values, and positions.
  void move_run(index_t head, index_t to, index_t from, index_t count) noexcept {
    BEACONKV_ASSERT(0 <= to && to <= from && count >= 0 && from + count <= tokens_);
    if (to == from) return;
    const index_t first_head = G == Granularity::per_head ? head : 0;
    const index_t last_head = G == Granularity::per_head ? head + 1 : keys_.heads;
    for (index_t h = first_head; h < last_head; ++h)
      for (index_t i = 0; i < count; ++i) {
        move_row(keys_, h, to + i, from + i);
        move_row(values_, h, to + i, from + i);
      }
    position_t* const p = &positions_[position_index(head, 0)];
    std::memmove(p + to, p + from, static_cast<std::size_t>(count) * sizeof(position_t));
  }

  /// Keeps the first `count` slots of every head. `next_position` stays.
  void truncate(index_t count) noexcept {
    BEACONKV_ASSERT(0 <= count && count <= tokens_);
    tokens_ = count;
    if (pinned_ > count) pinned_ = count;
    ++changes_;
  }

  /// Writes one key back, encoded once. For `realign_keys`.
  void store_key(index_t head, index_t slot, const float* row) noexcept {
    K* const out = keys_.row(head, slot);
    for (index_t d = 0; d < keys_.dim; ++d) out[d * keys_.stride.dim] = encode<K>(row[d]);
  }

  /// Points the same bookkeeping at other memory of the same shape (after the engine moved or copied its buffers).
  [[nodiscard]] Status rebase(const Plane<K>& keys, const Plane<V>& values) {
    if (Status s = detail::validate_plane(keys, "keys"); !s) return s;
    if (Status s = detail::validate_plane(values, "values"); !s) return s;
    if (keys.heads != keys_.heads || keys.dim != keys_.dim || values.heads != keys_.heads || values.dim != values_.dim ||
        keys.capacity != keys_.capacity || values.capacity != keys_.capacity)
      return detail::invalid("rebase: heads, dims or capacity (", keys.capacity, ") differ from the cache's (", keys_.capacity,
                             ")");
    keys_ = keys;
    values_ = values;
    return {};
  }

 private:
  PlaneCache(const Plane<K>& keys, const Plane<V>& values)
      : keys_(keys),
        values_(values),
        positions_(static_cast<std::size_t>((G == Granularity::per_head ? keys.heads : 1) * keys.capacity)) {}

  [[nodiscard]] index_t sets() const noexcept { return G == Granularity::per_head ? keys_.heads : 1; }
  [[nodiscard]] std::size_t position_index(index_t head, index_t slot) const noexcept {
    return static_cast<std::size_t>((G == Granularity::per_head ? head : 0) * keys_.capacity + slot);
  }

  template <class T>
  [[nodiscard]] static ConstRows tile(const Plane<T>& plane, index_t head, index_t first, index_t count,
                                      float* scratch) noexcept {
    if constexpr (std::is_same_v<T, float>) {
      if (plane.stride.dim == 1 && plane.contiguous_rows(first, count) == count)
        return {count > 0 ? plane.row(head, first) : scratch, count, plane.dim, plane.stride.token};
    }
    for (index_t i = 0; i < count; ++i) {
      const T* const row = plane.row(head, first + i);
      for (index_t d = 0; d < plane.dim; ++d) scratch[i * plane.dim + d] = decode(row[d * plane.stride.dim]);
    }
    return {scratch, count, plane.dim, plane.dim};
  }

  template <class T>
  static void move_row(const Plane<T>& plane, index_t head, index_t to, index_t from) noexcept {
    T* const out = plane.row(head, to);
    const T* const in = plane.row(head, from);
    if (plane.stride.dim == 1) {
      std::memcpy(out, in, static_cast<std::size_t>(plane.dim) * sizeof(T));
    } else {
      for (index_t d = 0; d < plane.dim; ++d) out[d * plane.stride.dim] = in[d * plane.stride.dim];
    }
  }

  Plane<K> keys_;
  Plane<V> values_;
  index_t tokens_ = 0;
  index_t pinned_ = 0;
  position_t next_position_ = 0;
  std::uint64_t changes_ = 0;
  std::vector<position_t> positions_;  // [sets][capacity]
};

static_assert(CacheBuffer<PlaneCache<float>>);
static_assert(CacheBuffer<PlaneCache<float16, bfloat16, Granularity::per_layer>>);

/// A cache with memory of its own, `[kv_head][capacity][dim]`: for tests, examples and small engines. A copy is a deep copy.
///
/// Policies take its `view()`.
template <ElementCodec K, ElementCodec V = K, Granularity G = Granularity::per_head>
class OwningCache {
 public:
  using View = PlaneCache<K, V, G>;

  /// Room for `capacity` tokens, keys and values of `shape.head_dim`. Allocates, nothing later does.
  [[nodiscard]] static Result<OwningCache> make(const Shape& shape, index_t capacity) {
    if (Status s = validate(shape); !s) return s;
    if (capacity < 1 || capacity > std::numeric_limits<slot_t>::max())
      return detail::invalid("capacity = ", capacity, ": must be at least 1 and below ", std::numeric_limits<slot_t>::max());
    const auto size = static_cast<std::size_t>(shape.kv_heads * capacity * shape.head_dim);
    std::vector<K> keys(size);
    std::vector<V> values(size);
    Result<View> view = View::make(head_major_plane(keys.data(), shape.kv_heads, shape.head_dim, capacity),
                                   head_major_plane(values.data(), shape.kv_heads, shape.head_dim, capacity));
    if (!view) return view.status();
    return OwningCache(std::move(keys), std::move(values), std::move(*view));
  }

#ifndef BEACONKV_NO_EXCEPTIONS
  /// As `make`; throws `Error`.
  OwningCache(const Shape& shape, index_t capacity) : OwningCache(make(shape, capacity).or_throw()) {}
#endif

  OwningCache(const OwningCache& other) : keys_(other.keys_), values_(other.values_), view_(other.view_) { point(); }
  OwningCache(OwningCache&& other) noexcept = default;  // a moved vector keeps its memory
  OwningCache& operator=(const OwningCache& other) {
    if (this != &other) {
      keys_ = other.keys_;
      values_ = other.values_;
      view_ = other.view_;
      point();
    }
    return *this;
  }
  OwningCache& operator=(OwningCache&& other) noexcept = default;

  [[nodiscard]] View& view() noexcept { return view_; }
  [[nodiscard]] const View& view() const noexcept { return view_; }

  /// Appends one token: `keys` and `values` are `[kv_head][dim]` floats, encoded on the way.
  [[nodiscard]] Status append(std::span<const float> keys, std::span<const float> values, position_t position) {
    const auto size = static_cast<std::size_t>(view_.num_kv_heads() * view_.key_dim());
    if (keys.size() != size || values.size() != size)
      return detail::invalid("keys have ", keys.size(), " and values ", values.size(), " numbers: both must have ", size);
    const index_t slot = view_.num_tokens();
    if (Status s = view_.append(position); !s) return s;
    for (index_t h = 0; h < view_.num_kv_heads(); ++h)
      for (index_t d = 0; d < view_.key_dim(); ++d) {
        const auto i = static_cast<std::size_t>(h * view_.key_dim() + d);
        view_.key_plane().row(h, slot)[d] = encode<K>(keys[i]);
        view_.value_plane().row(h, slot)[d] = encode<V>(values[i]);
      }
    return {};
  }

 private:
  OwningCache(std::vector<K> keys, std::vector<V> values, View view)
      : keys_(std::move(keys)), values_(std::move(values)), view_(std::move(view)) {}

  void point() {
    const Status s = view_.rebase(head_major_plane(keys_.data(), view_.num_kv_heads(), view_.key_dim(), view_.capacity()),
                                  head_major_plane(values_.data(), view_.num_kv_heads(), view_.value_dim(), view_.capacity()));
    BEACONKV_ASSERT(s.ok());
    static_cast<void>(s);
  }

  std::vector<K> keys_;
  std::vector<V> values_;
  View view_;
};

}  // namespace beaconkv::inline v0
