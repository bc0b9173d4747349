// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// `CacheBooks`: which tokens a layer's cache holds, without their keys and values.

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include "beaconkv/archive.hpp"
#include "beaconkv/memory/cache_buffer.hpp"

namespace beaconkv::inline v0 {

/// The bookkeeping of a cache: token counts, true positions, rotary positions. What `PlaneCache` is beside its memory.
///
/// 8 bytes a slot, for each head that keeps a set of its own; twice that under `PositionMode::cache_relative`. Nothing
/// allocates after construction but `exchange`.
template <Granularity G>
class CacheBooks {
 public:
  static constexpr Granularity granularity = G;

  [[nodiscard]] index_t num_kv_heads() const noexcept { return heads_; }
  /// Tokens of a head; of the longest one where they differ.
  [[nodiscard]] index_t num_tokens() const noexcept { return tokens_; }
  [[nodiscard]] index_t num_tokens(index_t head) const noexcept requires(G == Granularity::per_head_ragged) {
    return lengths_[static_cast<std::size_t>(head)];
  }
  [[nodiscard]] index_t capacity() const noexcept { return capacity_; }

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
  /// Notes to which position a key was rotated. For `realign_to_slots`.
  void set_rotary_position(index_t head, index_t slot, position_t position) noexcept {
    BEACONKV_ASSERT(mode_ == PositionMode::cache_relative);
    rotary_[index_of(head, slot)] = position;
  }
  void set_next_rotary_position(position_t position) noexcept { next_rotary_ = position; }
  /// Notes that every key was rotated to its slot, and that the next one will be.
  void count_rotary_by_slots() noexcept {
    BEACONKV_ASSERT(mode_ == PositionMode::cache_relative);
    for (index_t h = 0; h < sets(); ++h) {
      const std::span<position_t> rotary = slots_of(rotary_, h);
      std::iota(rotary.begin(), rotary.end(), position_t{0});
    }
    next_rotary_ = tokens_;
  }

  /// Bytes that the books hold.
  [[nodiscard]] std::size_t state_bytes() const noexcept {
    return (positions_.size() + rotary_.size()) * sizeof(position_t) + lengths_.size() * sizeof(index_t);
  }

  /// Leading slots that other sequences share: never moved, never evicted, never written. A property of this memory: it is not
  /// saved, and a fork into other memory has none.
  [[nodiscard]] index_t pinned_prefix() const noexcept { return pinned_; }
  [[nodiscard]] Status set_pinned_prefix(index_t count) {
    if (count < 0 || count > shortest())
      return detail::invalid("pinned prefix = ", count, ": must be between 0 and ", shortest());
    pinned_ = count;
    return {};
  }

  /// Takes back the newest `count` tokens, `next_position` included, as if they had never been appended. Only tokens behind
  /// the last eviction and the pinned prefix can be taken back: returns how many were.
  [[nodiscard]] Result<index_t> rollback(index_t count) {
    if (count < 0) return detail::invalid("count = ", count, ": must not be negative");
    const index_t undone = std::min(count, num_undoable());
    if (undone == 0) return undone;
    undoable_ -= undone;
    next_position_ = undoable_ > 0 ? position(0, length_of(0) - undone - 1) + 1 : firm_position_;
    next_rotary_ -= undone;
    for (index_t& length : lengths_) length -= undone;
    shorten(tokens_ - undone);
    return undone;
  }

  /// The most tokens that `rollback` can take back now.
  [[nodiscard]] index_t num_undoable() const noexcept { return std::min(undoable_, shortest() - pinned_); }

  /// Keeps the first `count` slots of every head. `next_position` stays.
  void truncate(index_t count) noexcept requires(G != Granularity::per_head_ragged) {
    BEACONKV_ASSERT(0 <= count && count <= tokens_);
    make_firm();
    shorten(count);
  }
  /// Keeps the first `count` slots of `head`. `next_position` stays.
  void truncate(index_t head, index_t count) noexcept requires(G == Granularity::per_head_ragged) {
    index_t& length = lengths_[static_cast<std::size_t>(head)];
    BEACONKV_ASSERT(pinned_ <= count && count <= length);
    length = count;
    make_firm();
    shorten(*std::max_element(lengths_.begin(), lengths_.end()));
  }

 protected:
  static constexpr bool one_set = G == Granularity::per_layer || G == Granularity::per_sequence;

  CacheBooks(index_t heads, index_t capacity, PositionMode mode)
      : heads_(heads), capacity_(capacity), mode_(mode), positions_(static_cast<std::size_t>(sets() * capacity)) {
    if (mode == PositionMode::cache_relative) rotary_.resize(positions_.size());
    if constexpr (G == Granularity::per_head_ragged) lengths_.resize(static_cast<std::size_t>(heads));
  }

  /// Empty where books of this size and mode can be.
  [[nodiscard]] static Status validate_books(index_t capacity, PositionMode mode) {
    if (capacity > std::numeric_limits<slot_t>::max())
      return detail::invalid("keys.capacity = ", capacity, ": must be below ", std::numeric_limits<slot_t>::max());
    if (G == Granularity::per_head_ragged && mode != PositionMode::true_positions)
      return detail::error(StatusCode::unsupported,
                           "position mode: heads of different lengths have no common positions within the cache");
    return {};
  }

  /// An error where `count` tokens from `first_position` on cannot follow.
  [[nodiscard]] Status check_append(position_t first_position, index_t count) const {
    if (count < 0) return detail::invalid("count = ", count, ": must not be negative");
    if (count > capacity_ - tokens_)
      return detail::error(StatusCode::out_of_capacity, "count = ", count, ": the cache has room for ", capacity_ - tokens_,
                           " more of its ", capacity_, " tokens");
    if (first_position < next_position_)
      return detail::error(StatusCode::out_of_order, "position = ", first_position, ": must be at least ", next_position_);
    if (first_position > std::numeric_limits<position_t>::max() - count)
      return detail::invalid("position = ", first_position, ": leaves no position for what follows");
    return {};
  }
  void note_append(position_t first_position, index_t count) noexcept {
    if (count == 0) return;
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
  }
  /// What `move_run` does to the books.
  void note_move(index_t head, index_t to, index_t from, index_t count) noexcept {
    const auto move = [&](std::vector<position_t>& all) {
      position_t* const p = all.data() + index_of(head, 0);
      std::memmove(p + to, p + from, static_cast<std::size_t>(count) * sizeof(position_t));
    };
    move(positions_);
    if (!rotary_.empty()) move(rotary_);
  }
  /// The tokens of `other`, which fit and are counted in the same mode; the first `pinned` of them stay where they are.
  void copy_books(const CacheBooks& other, index_t pinned) noexcept {
    for (index_t h = 0; h < sets(); ++h)
      for (index_t i = 0; i < other.length_of(h); ++i) {
        positions_[index_of(h, i)] = other.positions_[other.index_of(h, i)];
        if (!rotary_.empty()) rotary_[index_of(h, i)] = other.rotary_[other.index_of(h, i)];
      }
    std::copy(other.lengths_.begin(), other.lengths_.end(), lengths_.begin());
    tokens_ = other.tokens_;
    pinned_ = pinned;
    undoable_ = other.undoable_;
    firm_position_ = other.firm_position_;
    next_position_ = other.next_position_;
    next_rotary_ = other.next_rotary_;
    changes_ = std::max(changes_, other.changes_) + 1;  // memory may be used again: no epoch of a cache that was there before
  }

  /// Saves or loads (`archive.hpp`).
  template <class Archive>
  void exchange(Archive& archive) {
    constexpr std::int64_t far = std::numeric_limits<position_t>::max();
    archive.expect("kv_heads", heads_);
    archive.expect("granularity", static_cast<std::int64_t>(G));
    archive.expect("position mode", static_cast<std::int64_t>(mode_));
    archive.value("tokens", tokens_, 0, capacity_);
    for (index_t& length : lengths_) archive.value("tokens of a head", length, 0, tokens_);
    if constexpr (Archive::loading)
      if (pinned_ > 0)
        archive.fail(
            detail::error(StatusCode::unsupported, "load: the pinned prefix of ", pinned_, " slots would be overwritten"));
    index_t pinned = 0;  // whatever shared the rows of another memory
    archive.value("pinned prefix", pinned, 0, tokens_);
    archive.value("tokens that can be taken back", undoable_, 0, tokens_);
    archive.value("next position", next_position_, 0, far);
    archive.value("firm position", firm_position_, 0, far);
    archive.value("next rotary position", next_rotary_, 0, next_position_);
    for (index_t h = 0; h < sets() && archive.ok(); ++h) {
      archive.array("positions", slots_of(positions_, h));
      if (!rotary_.empty()) archive.array("rotary positions", slots_of(rotary_, h));
    }
    if constexpr (Archive::loading) {
      ++changes_;
      if (archive.ok() && !consistent())
        archive.fail(detail::error(StatusCode::damaged, "saved state: positions or lengths contradict each other"));
    }
  }

  [[nodiscard]] index_t length_of(index_t head) const noexcept {
    if constexpr (G == Granularity::per_head_ragged) return lengths_[static_cast<std::size_t>(head)];
    static_cast<void>(head);
    return tokens_;
  }
  /// What the head that holds least holds.
  [[nodiscard]] index_t shortest() const noexcept {
    index_t least = tokens_;
    for (const index_t length : lengths_) least = std::min(least, length);
    return least;
  }
  [[nodiscard]] std::uint64_t changes() const noexcept { return changes_; }

 private:
  [[nodiscard]] index_t sets() const noexcept { return one_set ? 1 : heads_; }
  [[nodiscard]] std::size_t index_of(index_t head, index_t slot) const noexcept {
    return static_cast<std::size_t>((one_set ? 0 : head) * capacity_ + slot);
  }
  [[nodiscard]] std::span<position_t> slots_of(std::vector<position_t>& all, index_t head) const noexcept {
    return std::span(all).subspan(index_of(head, 0), static_cast<std::size_t>(length_of(head)));
  }

  /// `tokens` are left in the longest head.
  void shorten(index_t tokens) noexcept {
    tokens_ = tokens;
    pinned_ = std::min(pinned_, tokens);
    ++changes_;
  }
  /// What was appended until now can no longer be taken back.
  void make_firm() noexcept {
    undoable_ = 0;
    firm_position_ = next_position_;
  }

  /// What holds of any cache, and may not of loaded bytes.
  [[nodiscard]] bool consistent() const noexcept {
    index_t longest = lengths_.empty() ? tokens_ : 0;
    for (const index_t length : lengths_) longest = std::max(longest, length);
    if (longest != tokens_ || (undoable_ == 0 && firm_position_ != next_position_)) return false;
    for (index_t h = 0; h < sets(); ++h) {
      const index_t firm = length_of(h) - undoable_;
      if (pinned_ > length_of(h) || firm < 0) return false;
      position_t least = 0;  // that the next one may have
      for (index_t i = 0; i < length_of(h); ++i) {
        if (i == firm) least = std::max(least, firm_position_);
        if (position(h, i) < least || position(h, i) >= (i < firm ? firm_position_ : next_position_)) return false;
        if (i >= firm && position(h, i) != position(0, length_of(0) - undoable_ + i - firm)) return false;
        if (mode_ == PositionMode::cache_relative && rotary_position(h, i) < 0) return false;
        least = position(h, i) + 1;
      }
      if (undoable_ > 0 && least != next_position_) return false;
    }
    return true;
  }

  index_t heads_;
  index_t capacity_;
  PositionMode mode_;
  index_t tokens_ = 0;  // of the longest head
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

}  // namespace beaconkv::inline v0
