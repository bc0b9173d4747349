// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// `OwningCache`: a `PlaneCache` with memory of its own.

#include <limits>
#include <new>
#include <span>
#include <utility>
#include <vector>

#include "beaconkv/memory/plane_cache.hpp"

namespace beaconkv::inline v0 {

namespace detail {

/// Memory that begins with a cache line, as engines allocate it: a register that lies across two of them is read twice.
template <class T>
struct LineAllocator {
  using value_type = T;
  static constexpr std::align_val_t alignment{64};

  LineAllocator() = default;
  template <class U>
  LineAllocator(const LineAllocator<U>&) noexcept {}

  [[nodiscard]] T* allocate(std::size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), alignment)); }
  void deallocate(T* memory, std::size_t) noexcept { ::operator delete(memory, alignment); }
  [[nodiscard]] friend bool operator==(const LineAllocator&, const LineAllocator&) noexcept { return true; }
};

}  // namespace detail

/// What an `OwningCache` may have beside its shape.
struct CacheOptions {
  index_t value_dim = 0;  ///< numbers a value; 0: as many as a key
  PositionMode positions = PositionMode::true_positions;
};

/// A cache with memory of its own, `[kv_head][capacity][dim]`, with a scale for each row where the type takes one: for tests,
/// examples and small engines. A copy is a deep copy.
///
/// Policies take its `view()`.
template <StorageType K, StorageType V = K, Granularity G = Granularity::per_head>
class OwningCache {
 public:
  using View = PlaneCache<K, V, G>;

  /// Room for `capacity` tokens with keys of `shape.head_dim`. Allocates, nothing later does.
  [[nodiscard]] static Result<OwningCache> make(const Shape& shape, index_t capacity, const CacheOptions& options = {}) {
    if (Status s = validate(shape); !s) return s;
    if (options.value_dim < 0) return detail::invalid("value_dim = ", options.value_dim, ": must not be negative");
    if (capacity < 1 || capacity > std::numeric_limits<slot_t>::max())
      return detail::invalid("capacity = ", capacity, ": must be at least 1 and below ", std::numeric_limits<slot_t>::max());
    const index_t value_dim = options.value_dim > 0 ? options.value_dim : shape.head_dim;
    return make_rows(shape.kv_heads, shape.head_dim, value_dim, capacity, options.positions);
  }

#ifndef BEACONKV_NO_EXCEPTIONS
  /// As `make`; throws `Error`.
  OwningCache(const Shape& shape, index_t capacity, const CacheOptions& options = {})
      : OwningCache(make(shape, capacity, options).or_throw()) {}
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

  /// Appends one token: `keys` `[kv_head][key_dim]` and `values` `[kv_head][value_dim]` as floats, encoded on the way.
  [[nodiscard]] Status append(std::span<const float> keys, std::span<const float> values, position_t position) {
    View& v = view();
    const auto key_size = static_cast<std::size_t>(v.num_kv_heads() * v.key_dim());
    const auto value_size = static_cast<std::size_t>(v.num_kv_heads() * v.value_dim());
    if (keys.size() != key_size || values.size() != value_size)
      return detail::invalid("keys have ", keys.size(), " and values ", values.size(), " numbers: they must have ", key_size,
                             " and ", value_size);
    if (Status s = v.append(position); !s) return s;
    for (index_t h = 0; h < v.num_kv_heads(); ++h) {
      const index_t slot = detail::tokens_of(v, h) - 1;
      v.store_key(h, slot, keys.data() + h * v.key_dim());
      v.store_value(h, slot, values.data() + h * v.value_dim());
    }
    return {};
  }

  /// Gives memory behind the tokens back: room for `capacity` of them is left, which must hold what there is. The only way in
  /// which the bytes of a cache shrink: evictions alone keep the memory for the tokens that follow. Allocates, and copies
  /// what stays. Copies of the view, those in a `Sequence` too, still point to the memory that is gone: make them anew.
  [[nodiscard]] Status shrink(index_t capacity) {
    if (capacity < std::max<index_t>(1, view().num_tokens()) || capacity > view().capacity())
      return detail::invalid("capacity = ", capacity, ": must be between the ", view().num_tokens(), " tokens and ",
                             view().capacity());
    Result<OwningCache> smaller =
        make_rows(view().num_kv_heads(), view().key_dim(), view().value_dim(), capacity, view().position_mode());
    if (!smaller) return smaller.status();
    if (Status s = smaller->view().copy_from(view()); !s) return s;
    if (Status s = smaller->view().set_pinned_prefix(view().pinned_prefix()); !s) return s;
    *this = std::move(*smaller);
    return {};
  }

  /// Bytes of keys, values, scales and bookkeeping.
  [[nodiscard]] std::size_t memory_bytes() const noexcept { return keys_.bytes() + values_.bytes() + view().state_bytes(); }

 private:
  template <class T>
  struct Rows {
    Rows(index_t num_heads, index_t row_dim, index_t num_rows) : heads(num_heads), dim(row_dim), capacity(num_rows) {
      const index_t per_row = (dim + numbers_per_element<T> - 1) / numbers_per_element<T>;
      elements.resize(static_cast<std::size_t>(heads * capacity * per_row));
      if (takes_scale<T>) scales.resize(static_cast<std::size_t>(heads * capacity));
    }
    [[nodiscard]] Plane<T> plane() noexcept {
      Plane<T> plane = head_major_plane(elements.data(), heads, dim, capacity);
      if constexpr (takes_scale<T>) plane = with_row_scales(plane, scales.data());
      return plane;
    }
    [[nodiscard]] std::size_t bytes() const noexcept { return elements.size() * sizeof(T) + scales.size() * sizeof(float); }

    index_t heads;
    index_t dim;
    index_t capacity;
    std::vector<T, detail::LineAllocator<T>> elements;
    std::vector<float> scales;
  };

  /// The view points into the rows, which keep their memory when they are moved.
  OwningCache(Rows<K> keys, Rows<V> values, View view)
      : keys_(std::move(keys)), values_(std::move(values)), view_(std::move(view)) {}

  [[nodiscard]] static Result<OwningCache> make_rows(index_t heads, index_t key_dim, index_t value_dim, index_t capacity,
                                                     PositionMode positions) {
    Rows<K> keys(heads, key_dim, capacity);
    Rows<V> values(heads, value_dim, capacity);
    Result<View> view = View::make(keys.plane(), values.plane(), positions);
    if (!view) return view.status();
    return OwningCache(std::move(keys), std::move(values), std::move(*view));
  }

  void point() {
    const Status s = view().rebase(keys_.plane(), values_.plane());
    BEACONKV_ASSERT(s.ok());
    static_cast<void>(s);
  }

  Rows<K> keys_;
  Rows<V> values_;
  View view_;
};

}  // namespace beaconkv::inline v0
