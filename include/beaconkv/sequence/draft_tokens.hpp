// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// The queries of tentative tokens: kept apart until it is known which of them stay.

#include <algorithm>
#include <span>
#include <vector>

#include "beaconkv/types.hpp"

namespace beaconkv::inline v0::detail {

/// Up to `most` tokens of each layer, `[layers][most][width]`; `width` is the widest layer's. Nothing allocates after
/// construction.
class DraftTokens {
 public:
  DraftTokens(index_t layers, index_t width, index_t most)
      : width_(width),
        most_(most),
        queries_(static_cast<std::size_t>(layers * most * width)),
        positions_(static_cast<std::size_t>(layers * most)),
        rotated_(static_cast<std::size_t>(layers * most)),
        sizes_(static_cast<std::size_t>(layers)) {}

  /// The most that a layer has seen.
  [[nodiscard]] index_t size() const noexcept { return sizes_.empty() ? 0 : *std::max_element(sizes_.begin(), sizes_.end()); }
  [[nodiscard]] index_t size(index_t layer) const noexcept { return sizes_[static_cast<std::size_t>(layer)]; }
  [[nodiscard]] std::span<const float> queries(index_t layer, index_t i) const noexcept {
    return std::span(queries_).subspan(static_cast<std::size_t>((layer * most_ + i) * width_),
                                       static_cast<std::size_t>(width_));
  }
  [[nodiscard]] position_t position(index_t layer, index_t i) const noexcept {
    return positions_[static_cast<std::size_t>(layer * most_ + i)];
  }
  [[nodiscard]] bool rotated(index_t layer, index_t i) const noexcept {
    return rotated_[static_cast<std::size_t>(layer * most_ + i)] != 0;
  }
  /// The position that the layer's next tentative token must at least have; 0 where it has none.
  [[nodiscard]] position_t next_position(index_t layer) const noexcept {
    return size(layer) > 0 ? position(layer, size(layer) - 1) + 1 : 0;
  }
  [[nodiscard]] std::size_t state_bytes() const noexcept {
    return queries_.size() * sizeof(float) + positions_.size() * sizeof(position_t) + rotated_.size();
  }

  /// Precondition: no more numbers than `width`.
  [[nodiscard]] Status push(index_t layer, std::span<const float> queries, position_t position, bool rotated) {
    index_t& size = sizes_[static_cast<std::size_t>(layer)];
    BEACONKV_ASSERT(static_cast<index_t>(queries.size()) <= width_);
    if (size == most_) return error(StatusCode::out_of_capacity, "max_draft_tokens = ", most_, ": as many are tentative");
    std::copy(queries.begin(), queries.end(), queries_.begin() + (layer * most_ + size) * width_);
    positions_[static_cast<std::size_t>(layer * most_ + size)] = position;
    rotated_[static_cast<std::size_t>(layer * most_ + size)] = rotated ? 1 : 0;
    ++size;
    return {};
  }
  /// Forgets all of every layer but the first `count`.
  void keep(index_t count) noexcept {
    for (index_t& size : sizes_) size = std::min(size, count);
  }
  /// Whether there is room for those of `other`.
  [[nodiscard]] bool fits(const DraftTokens& other) const noexcept { return other.size() <= most_ && other.width_ == width_; }
  /// Precondition: they fit.
  void copy_from(const DraftTokens& other) noexcept {
    keep(0);
    for (index_t l = 0; l < static_cast<index_t>(sizes_.size()); ++l)
      for (index_t i = 0; i < other.size(l); ++i)
        static_cast<void>(push(l, other.queries(l, i), other.position(l, i), other.rotated(l, i)));
  }

 private:
  index_t width_;
  index_t most_;
  std::vector<float> queries_;
  std::vector<position_t> positions_;
  std::vector<std::uint8_t> rotated_;
  std::vector<index_t> sizes_;  // of each layer
};

}  // namespace beaconkv::inline v0::detail
