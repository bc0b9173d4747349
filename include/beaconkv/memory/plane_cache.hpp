// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// `PlaneCache`: a `CacheBuffer` over memory that an engine owns.

#include <algorithm>

#include "beaconkv/memory/cache_books.hpp"
#include "beaconkv/memory/layouts.hpp"

namespace beaconkv::inline v0 {

/// The keys and values of one layer of one sequence, in memory that somebody else owns.
///
/// It owns only its bookkeeping (`CacheBooks`). The engine writes keys and values at slot `num_tokens()` of every head (of a
/// ragged cache at `num_tokens(head)`) and then calls `append`. A copy refers to the same keys and values; `copy_from` copies
/// rows too. Nothing allocates after construction.
///
/// \tparam K storage type of keys, \tparam V of values (they may also differ in width), \tparam G which heads must agree.
template <StorageType K, StorageType V = K, Granularity G = Granularity::per_head>
class PlaneCache : public CacheBooks<G> {
  using Books = CacheBooks<G>;

 public:
  using key_type = K;
  using value_type = V;

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

  using Books::capacity;
  using Books::num_kv_heads;
  using Books::num_tokens;
  using Books::position_mode;
  [[nodiscard]] index_t key_dim() const noexcept { return keys_.dim; }
  [[nodiscard]] index_t value_dim() const noexcept { return values_.dim; }
  [[nodiscard]] const Plane<K>& key_plane() const noexcept { return keys_; }
  [[nodiscard]] const Plane<V>& value_plane() const noexcept { return values_; }

  /// A number for the state of this cache: other after every `append`, `truncate` or compaction, other for other memory and
  /// for another page table over the same memory.
  [[nodiscard]] std::uint64_t epoch() const noexcept {
    const auto memory = reinterpret_cast<std::uintptr_t>(keys_.base) + 31 * reinterpret_cast<std::uintptr_t>(keys_.pages);
    return Books::changes() + memory * std::uint64_t{0x9E3779B97F4A7C15};
  }

  /// Bytes of keys and values a token of this layer takes, their own scales included.
  [[nodiscard]] index_t bytes_per_token() const noexcept {
    return keys_.bytes_per_token() + (latent_ ? 0 : values_.bytes_per_token());
  }
  /// Rows of keys as floats; see `CacheReader`.
  [[nodiscard]] ConstRows keys(index_t head, index_t first, index_t count, float* scratch) const noexcept {
    return tile(keys_, head, first, count, scratch);
  }
  /// Rows of values as floats; see `CacheReader`.
  [[nodiscard]] ConstRows values(index_t head, index_t first, index_t count, float* scratch) const noexcept {
    return tile(values_, head, first, count, scratch);
  }
  /// Where their memory is, to ask for it before it is read.
  [[nodiscard]] detail::RowsAhead keys_ahead(index_t head, index_t first, index_t count) const noexcept {
    return detail::rows_ahead(keys_, head, first, count);
  }
  [[nodiscard]] detail::RowsAhead values_ahead(index_t head, index_t first, index_t count) const noexcept {
    return latent_ ? detail::RowsAhead{} : detail::rows_ahead(values_, head, first, count);
  }

  /// The engine wrote one token at slot `num_tokens()` of every head; its true position.
  [[nodiscard]] Status append(position_t position) { return append_run(position, 1); }

  /// The engine wrote `count` tokens from slot `num_tokens()` on, at positions `first_position`, `first_position + 1`, ...
  [[nodiscard]] Status append_run(position_t first_position, index_t count) {
    if (Status s = Books::check_append(first_position, count); !s) return s;
    if (Status s = detail::check_pages(keys_, num_tokens(), count, "keys"); !s) return s;
    if (Status s = detail::check_pages(values_, num_tokens(), count, "values"); !s) return s;
    Books::note_append(first_position, count);
    return {};
  }

  /// Moves `count` slots of `head` from `from` to `to <= from`: bytes of keys, values and scales, and positions.
  void move_run(index_t head, index_t to, index_t from, index_t count) noexcept {
    BEACONKV_ASSERT(0 <= to && to <= from && count >= 0 && from + count <= num_tokens());
    if (to == from) return;
    const index_t first_head = one_set ? 0 : head;
    const index_t last_head = one_set ? keys_.heads : head + 1;
    detail::move_rows(keys_, first_head, last_head, to, from, count);
    if (!latent_) detail::move_rows(values_, first_head, last_head, to, from, count);
    Books::note_move(head, to, from, count);
  }
  /// Before the slots behind them move: these will go, but main memory is read faster without gaps.
  void read_ahead(index_t head, index_t from, index_t count) const noexcept {
    constexpr index_t most_in_cache = index_t{4} << 20;
    if (bytes_per_token() * num_tokens() < most_in_cache) return;
    const index_t first_head = one_set ? 0 : head;
    const index_t last_head = one_set ? keys_.heads : head + 1;
    detail::read_ahead(keys_, first_head, last_head, from, count);
    if (!latent_) detail::read_ahead(values_, first_head, last_head, from, count);
  }
  /// The bytes of one head's keys alone, or of its values: for `compact_and_realign`, which turns keys on their way.
  void move_key_rows(index_t head, index_t to, index_t from, index_t count) noexcept {
    detail::move_rows(keys_, head, head + 1, to, from, count);
  }
  void move_value_rows(index_t head, index_t to, index_t from, index_t count) noexcept {
    if (!latent_) detail::move_rows(values_, head, head + 1, to, from, count);
  }
  /// The same where the engine has moved the rows by itself: only the books follow. See `follow`.
  void move_books(index_t head, index_t to, index_t from, index_t count) noexcept {
    BEACONKV_ASSERT(0 <= to && to <= from && count >= 0 && from + count <= num_tokens());
    Books::note_move(head, to, from, count);
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
  /// Points the same bookkeeping at other memory of the same shape (after the engine moved or copied its buffers).
  [[nodiscard]] Status rebase(const Plane<K>& keys, const Plane<V>& values) {
    if (Status s = detail::validate_plane(keys, "keys"); !s) return s;
    if (Status s = detail::validate_plane(values, "values"); !s) return s;
    if (Status s = detail::same_rows(keys_, keys, "rebase: keys"); !s) return s;
    if (Status s = detail::same_rows(values_, values, "rebase: values"); !s) return s;
    if (keys.capacity != keys_.capacity || values.capacity != keys_.capacity)
      return detail::invalid("rebase: capacity = ", keys.capacity, ": must be the cache's ", keys_.capacity);
    if (Status s = detail::check_pages(keys, 0, num_tokens(), "keys"); !s) return s;
    if (Status s = detail::check_pages(values, 0, num_tokens(), "values"); !s) return s;
    keys_ = keys;
    values_ = values;
    return {};
  }

  /// Whether `copy_from` takes `other`: the error that it would give, or would give if `other` held the tokens of `held`.
  [[nodiscard]] Status check_copy_from(const PlaneCache& other) const { return check_copy_from(other, other); }
  [[nodiscard]] Status check_copy_from(const PlaneCache& other, const PlaneCache& held) const {
    if (Status s = detail::same_rows(keys_, other.keys_, "copy_from: keys"); !s) return s;
    if (Status s = detail::same_rows(values_, other.values_, "copy_from: values"); !s) return s;
    if (Status s = detail::same_shared_scales(keys_, other.keys_, "copy_from: keys"); !s) return s;
    if (Status s = detail::same_shared_scales(values_, other.values_, "copy_from: values"); !s) return s;
    if (position_mode() != other.position_mode() || latent_ != other.latent_)
      return detail::invalid("copy_from: the caches differ in position mode or latent values");
    if (held.num_tokens() > capacity())
      return detail::error(StatusCode::out_of_capacity, "copy_from: ", held.num_tokens(), " tokens, capacity = ", capacity());
    if (Status s = detail::check_pages(keys_, 0, held.num_tokens(), "keys"); !s) return s;
    if (Status s = detail::check_pages(values_, 0, held.num_tokens(), "values"); !s) return s;
    const index_t pinned = Books::pinned_prefix();
    const index_t shared = num_shared_rows(other, std::min({pinned, held.shortest(), other.capacity()}));
    if (shared == pinned) return {};
    return detail::error(StatusCode::unsupported, "copy_from: slot ", shared, " of the pinned prefix of ", pinned,
                         " slots would be overwritten: its row is another one in the source");
  }
  /// Becomes a deep copy of `other`, in this cache's own memory: a fork. Layout and capacity may differ, if the tokens fit;
  /// scales that rows share must be the same.
  ///
  /// Refused where rows of the pinned prefix would be overwritten: it must be the same memory in both (the same pages), which
  /// is left alone. What is pinned in one of the two and the same memory in both is pinned afterwards, and nothing else.
  [[nodiscard]] Status copy_from(const PlaneCache& other) {
    if (this == &other) return {};
    if (Status s = check_copy_from(other); !s) return s;
    const index_t pinned = num_shared_rows(other, std::max(Books::pinned_prefix(), other.pinned_prefix()));
    for (index_t h = 0; h < keys_.heads; ++h)
      for (index_t i = pinned; i < other.length_of(h); ++i) {
        detail::copy_row(keys_, h, i, other.keys_, h, i);
        if (!latent_) detail::copy_row(values_, h, i, other.values_, h, i);
      }
    Books::copy_books(other, pinned);
    return {};
  }

  /// Saves or loads how many tokens there are and where (`archive.hpp`); the rows come with `exchange_rows`, so that all that
  /// can be refused is refused before a row is written.
  template <class Archive>
  void exchange_books(Archive& archive) {
    archive.expect("key_dim", keys_.dim);
    archive.expect("value_dim", values_.dim);
    archive.expect("key storage", storage_code<K>);
    archive.expect("value storage", storage_code<V>);
    archive.expect("scales of keys by row", keys_.scales.per_row() ? 1 : 0);
    archive.expect("scales of values by row", values_.scales.per_row() ? 1 : 0);
    archive.expect("latent values", latent_ ? 1 : 0);
    expect_shared_scales(archive, keys_, "bits of a shared scale of keys");
    expect_shared_scales(archive, values_, "bits of a shared scale of values");
    Books::exchange(archive);
    if constexpr (Archive::loading) {
      if (!archive.ok()) return;
      archive.fail(detail::check_pages(keys_, 0, num_tokens(), "keys"));
      archive.fail(detail::check_pages(values_, 0, num_tokens(), "values"));
    }
  }
  /// Bytes that `exchange_rows` reads or writes.
  [[nodiscard]] std::size_t row_bytes() const noexcept {
    index_t rows = 0;
    for (index_t h = 0; h < keys_.heads; ++h) rows += length_of(h);
    return static_cast<std::size_t>(rows * (bytes_per_token() / keys_.heads));
  }
  /// Saves or loads the bytes of all rows, scales included. The layout in memory may be another one.
  template <class Archive>
  void exchange_rows(Archive& archive) {
    for (index_t h = 0; h < keys_.heads; ++h)
      for (index_t i = 0; i < length_of(h); ++i) {
        exchange_row(archive, keys_, h, i);
        if (!latent_) exchange_row(archive, values_, h, i);
      }
  }

 private:
  using Books::length_of;
  using Books::one_set;
  using Books::shortest;

  /// How many of the first `most` slots, of all heads, are the same memory in both.
  [[nodiscard]] index_t num_shared_rows(const PlaneCache& other, index_t most) const noexcept {
    for (index_t i = 0; i < most; ++i)
      for (index_t h = 0; h < keys_.heads; ++h)
        if (!detail::same_memory(keys_, other.keys_, h, i) || !detail::same_memory(values_, other.values_, h, i)) return i;
    return most;
  }

  [[nodiscard]] static Result<PlaneCache> make_checked(const Plane<K>& keys, const Plane<V>& values, PositionMode mode) {
    if (Status s = detail::validate_plane(keys, "keys"); !s) return s;
    if (Status s = Books::validate_books(keys.capacity, mode); !s) return s;
    return PlaneCache(keys, values, mode);
  }

  PlaneCache(const Plane<K>& keys, const Plane<V>& values, PositionMode mode)
      : Books(keys.heads, keys.capacity, mode), keys_(keys), values_(values) {}

  template <class Archive, class T>
  static void exchange_row(Archive& archive, const Plane<T>& plane, index_t head, index_t slot) {
    T* const row = plane.row(head, slot);
    for (index_t d = 0; d < plane.elements(); ++d) archive.bytes(row + d * plane.stride.dim, sizeof(T));
    if constexpr (takes_scale<T>)
      if (plane.scales.per_row()) archive.bytes(plane.scale(head, slot), sizeof(float));
  }

  /// They are the engine's and not part of the state, but the rows mean nothing without them.
  template <class Archive, class T>
  static void expect_shared_scales(Archive& archive, const Plane<T>& plane, const char* name) {
    if constexpr (takes_scale<T>)
      for (index_t h = 0; h < plane.heads && !plane.scales.per_row(); ++h)
        archive.expect(name, std::int64_t{detail::shared_scale_bits(plane, h)});
  }

  template <class T>
  [[nodiscard]] static ConstRows tile(const Plane<T>& plane, index_t head, index_t first, index_t count,
                                      float* scratch) noexcept {
    if constexpr (std::is_same_v<T, float>) {
      if (plane.stride.dim == 1 && plane.contiguous_rows(first, count) == count)
        return {count > 0 ? plane.row(head, first) : scratch, count, plane.dim, plane.stride.token};
    }
    detail::load_rows(plane, head, first, count, scratch);
    return {scratch, count, plane.dim, plane.dim};
  }

  Plane<K> keys_;
  Plane<V> values_;
  bool latent_ = false;  // values are the first numbers of the keys
};

static_assert(CacheBuffer<PlaneCache<float>>);
static_assert(CacheBuffer<PlaneCache<float16, q8_0, Granularity::per_layer>>);
static_assert(CacheBuffer<PlaneCache<std::int8_t, float8_e4m3, Granularity::per_head_ragged>>);

}  // namespace beaconkv::inline v0
