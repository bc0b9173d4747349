// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Which layers of a sequence evict in which call.

#include <algorithm>
#include <span>
#include <vector>

#include "beaconkv/types.hpp"

namespace beaconkv::inline v0::detail {

/// The layers that are due, and whose turn it is where not all of them evict at once. Nothing allocates after construction.
class LayerTurns {
 public:
  /// `layers_per_step`: the most layers that evict in one call; 0: all.
  LayerTurns(index_t layers, index_t layers_per_step)
      : waiting_(static_cast<std::size_t>(layers)),
        picked_(static_cast<std::size_t>(layers)),
        layers_per_step_(layers_per_step) {}

  [[nodiscard]] bool waits(index_t layer) const noexcept { return waiting_[static_cast<std::size_t>(layer)] != 0; }
  [[nodiscard]] bool any_waits() const noexcept {
    return std::any_of(waiting_.begin(), waiting_.end(), [](std::uint8_t waits) { return waits != 0; });
  }

  /// A schedule may say so once only: remembers it until the layer evicts.
  template <class PolicyT, class CacheT>
  void note(index_t layer, const PolicyT& policy, const CacheT& cache) {
    waiting_[static_cast<std::size_t>(layer)] = policy.eviction_on() && (waits(layer) || policy.due(cache)) ? 1 : 0;
  }

  /// The layer whose turn it is. Precondition: one waits.
  [[nodiscard]] index_t next() const noexcept {
    index_t layer = next_;
    while (!waits(layer)) layer = behind(layer);
    return layer;
  }
  /// The layers that evict now, ascending, from where the last call stopped; they wait no more. Good until the next call.
  [[nodiscard]] std::span<const index_t> pick() {
    const index_t layers = num_layers();
    const index_t most = layers_per_step_ > 0 ? layers_per_step_ : layers;
    index_t count = 0;
    index_t last = next_;
    for (index_t i = 0; i < layers && count < most; ++i) {
      const index_t layer = (next_ + i) % layers;
      if (!waits(layer)) continue;
      waiting_[static_cast<std::size_t>(layer)] = 0;
      picked_[static_cast<std::size_t>(count++)] = layer;
      last = layer;
    }
    if (layers_per_step_ > 0 && count > 0) next_ = behind(last);
    std::sort(picked_.begin(), picked_.begin() + count);
    return std::span(picked_).first(static_cast<std::size_t>(count));
  }
  /// A layer has evicted: it waits no more, and those behind it come next.
  void evicted(index_t layer) noexcept {
    waiting_[static_cast<std::size_t>(layer)] = 0;
    next_ = behind(layer);
  }
  /// No layer waits.
  void clear() noexcept { std::fill(waiting_.begin(), waiting_.end(), std::uint8_t{0}); }

  /// Goes on where `other` stands, which has as many layers.
  void copy_from(const LayerTurns& other) noexcept {
    std::copy(other.waiting_.begin(), other.waiting_.end(), waiting_.begin());
    next_ = other.next_;
  }
  template <class Archive>
  void exchange(Archive& archive) {
    archive.value("next layer to evict", next_, 0, num_layers() - 1);
    archive.array("layers that wait for their turn", std::span(waiting_));
  }

 private:
  [[nodiscard]] index_t num_layers() const noexcept { return static_cast<index_t>(waiting_.size()); }
  [[nodiscard]] index_t behind(index_t layer) const noexcept { return (layer + 1) % num_layers(); }

  std::vector<std::uint8_t> waiting_;  // whether each layer is to evict when its turn comes
  std::vector<index_t> picked_;
  index_t layers_per_step_;
  index_t next_ = 0;
};

}  // namespace beaconkv::inline v0::detail
