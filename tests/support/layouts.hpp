// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// A cache over each way in which engines lay out keys and values, with memory that shows writes beside the rows.

#include <array>
#include <bit>
#include <type_traits>
#include <vector>

#include "beaconkv/memory/owning_cache.hpp"
#include "support/random.hpp"

namespace beaconkv::test {

enum class Layout : std::uint8_t { head_major, token_major, padded_rows, paged, transposed, interleaved_kv, backwards };

inline constexpr std::array all_layouts{Layout::head_major, Layout::token_major,    Layout::padded_rows, Layout::paged,
                                        Layout::transposed, Layout::interleaved_kv, Layout::backwards};

/// Keys or values in a memory of their own, with a margin, in a layout; every element that belongs to no row stays `filler`.
template <class T>
class LayoutPlane {
 public:
  static constexpr index_t margin = 16;
  static constexpr index_t page_size = 4;

  /// `capacity` must be a multiple of `page_size` where it is paged, `dim` of the numbers in an element.
  LayoutPlane(Layout layout, index_t heads, index_t dim, index_t capacity, Random& random) {
    plane_ = {.heads = heads, .dim = dim, .capacity = capacity};
    const index_t row = plane_.elements();
    index_t size = heads * capacity * row;
    index_t base = margin;
    switch (layout) {
      case Layout::head_major:
        plane_.stride = {0, capacity * row, row, 1};
        break;
      case Layout::token_major:
        plane_.stride = {0, row, heads * row, 1};
        break;
      case Layout::padded_rows:  // [token][head][dim], rows of tokens padded
        plane_.stride = {0, row + 1, heads * (row + 1) + 5, 1};
        size = capacity * plane_.stride.token;
        break;
      case Layout::interleaved_kv:  // [token][head][K, V][dim]: this is one of the two
        plane_.stride = {0, 2 * row, heads * 2 * row, 1};
        size *= 2;
        break;
      case Layout::transposed:
        plane_.stride = {0, capacity * row, 1, capacity};
        break;
      case Layout::backwards:  // the newest token first
        plane_.stride = {0, row, -heads * row, 1};
        base += (capacity - 1) * heads * row;
        break;
      case Layout::paged: {  // [page][K, V][in page][head][dim], pages in any order, some of others between
        plane_.stride = {2 * page_size * heads * row, row, heads * row, 1};
        plane_.page_size = page_size;
        for (std::int32_t p = 0; p < capacity / page_size + 3; ++p) pages_.push_back(p);
        random.shuffle(pages_);
        size = static_cast<index_t>(pages_.size()) * plane_.stride.page;
        break;
      }
    }
    memory_.assign(static_cast<std::size_t>(size + 2 * margin), filler());
    if (takes_scale<T>) scales_.assign(static_cast<std::size_t>((capacity + 3 * page_size) * heads), 1.0F);
    base_ = base;
    point();
  }
  LayoutPlane(const LayoutPlane&) = delete;
  LayoutPlane& operator=(const LayoutPlane&) = delete;

  [[nodiscard]] static T filler() {
    std::array<std::uint8_t, sizeof(T)> bytes;
    bytes.fill(0xA5);
    return std::bit_cast<T>(bytes);
  }
  [[nodiscard]] const Plane<T>& plane() const { return plane_; }
  [[nodiscard]] std::vector<T>& memory() { return memory_; }
  [[nodiscard]] const std::vector<T>& memory() const { return memory_; }

  [[nodiscard]] const std::vector<float>& scales() const { return scales_; }
  [[nodiscard]] std::vector<float>& scales() { return scales_; }
  /// Of a row; 1 where there is none.
  [[nodiscard]] float scale(index_t head, index_t token) const { return detail::scale_or_one(plane_, head, token); }

  /// Where element `d` of a token lies in `memory()`.
  [[nodiscard]] std::size_t offset(index_t head, index_t token, index_t d) const {
    const Strides& s = plane_.stride;
    index_t at = base_ + head * s.head + d * s.dim;
    at += plane_.page_size == 0 ? token * s.token
                                : pages_[static_cast<std::size_t>(token / page_size)] * s.page + token % page_size * s.token;
    return static_cast<std::size_t>(at);
  }
  [[nodiscard]] std::vector<T> row(index_t head, index_t token) const {
    std::vector<T> out;
    for (index_t d = 0; d < plane_.elements(); ++d) out.push_back(memory_[offset(head, token, d)]);
    return out;
  }
  void set_row(index_t head, index_t token, const std::vector<T>& row) {
    for (index_t d = 0; d < plane_.elements(); ++d) memory_[offset(head, token, d)] = row[static_cast<std::size_t>(d)];
  }

  /// Encodes a row of floats.
  void write(index_t head, index_t token, std::span<const float> row) {
    REQUIRE(static_cast<index_t>(row.size()) == plane_.dim);
    detail::store_row(plane_, head, token, row.data());
  }
  /// A row as floats.
  [[nodiscard]] std::vector<float> read(index_t head, index_t token) const {
    std::vector<float> out(static_cast<std::size_t>(plane_.dim));
    detail::load_row(plane_, head, token, out.data());
    return out;
  }

  /// True where nothing was written beside the rows.
  [[nodiscard]] bool fillers_untouched() const {
    std::vector<bool> ours(memory_.size(), false);
    for (index_t h = 0; h < plane_.heads; ++h)
      for (index_t t = 0; t < plane_.capacity; ++t)
        for (index_t d = 0; d < plane_.elements(); ++d) ours[offset(h, t, d)] = true;
    for (std::size_t i = 0; i < memory_.size(); ++i)
      if (!ours[i] && !(memory_[i] == filler())) return false;
    return true;
  }

 private:
  void point() {
    plane_.base = memory_.data() + base_;
    if (plane_.page_size != 0) plane_.pages = pages_.data();
    if constexpr (takes_scale<T>) plane_ = with_row_scales(plane_, scales_.data());
  }

  Plane<T> plane_;
  std::vector<std::int32_t> pages_;
  std::vector<T> memory_;
  std::vector<float> scales_;
  index_t base_ = 0;
};

/// A `PlaneCache` and its memory.
template <StorageType K, StorageType V = K, Granularity G = Granularity::per_head>
struct LayoutCache {
  LayoutPlane<K> keys;
  LayoutPlane<V> values;
  PlaneCache<K, V, G> cache;

  LayoutCache(Layout layout, index_t heads, index_t key_dim, index_t value_dim, index_t capacity, Random& random,
              PositionMode mode = PositionMode::true_positions)
      : keys(layout, heads, key_dim, capacity, random),
        values(layout, heads, value_dim, capacity, random),
        cache(PlaneCache<K, V, G>::make(keys.plane(), values.plane(), mode).or_throw()) {}

  /// Appends a token: `keys` [heads][key_dim], `values` [heads][value_dim].
  void append(std::span<const float> key_rows, std::span<const float> value_rows, position_t position) {
    for (index_t h = 0; h < cache.num_kv_heads(); ++h) {
      const index_t slot = detail::tokens_of(cache, h);
      const auto row = [&](std::span<const float> rows, index_t dim) {
        return rows.subspan(static_cast<std::size_t>(h * dim), static_cast<std::size_t>(dim));
      };
      keys.write(h, slot, row(key_rows, cache.key_dim()));
      values.write(h, slot, row(value_rows, cache.value_dim()));
    }
    cache.append(position).or_throw();
  }
};

}  // namespace beaconkv::test
