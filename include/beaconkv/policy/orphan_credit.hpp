// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// What cached keys remember of the beacons that looked at them: the state behind BeaconKV's orphan credit.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "beaconkv/archive.hpp"
#include "beaconkv/detail/numeric.hpp"
#include "beaconkv/keep_plan.hpp"

namespace beaconkv::inline v0::detail {

/// For each cached key and KV head: a credit, and who gave it, the number of a row among those of its head's group.
///
/// A beacon that has left its bank does not come back, so it is enough to know whether the beacon that a key has its credit
/// from at the last eviction is still there: positions tell beacons of a query head apart, and each eviction compares two short
/// lists of them. After it every credit belongs to a beacon of its bank, or to none that is left (`orphan`). (An eviction in
/// slices scores with the beacons of its first moment and samples in its last: one that was passed over in between may be a
/// beacon once more, and its keys stay orphans until one looks at them as much.)
///
/// There are two of everything. Scoring writes `noted`; the `commit` of the plan that was made of these scores lets it take the
/// place of what there was, for the slots that stay. A scoring that no commit follows leaves no trace. Slots below `first` (the
/// protected prefix) have no credit, nor have those behind the last one (tokens that came since).
class OrphanCredits {
 public:
  using row_t = std::uint16_t;
  static constexpr row_t orphan = std::numeric_limits<row_t>::max();
  /// Rows of a group that can be told apart.
  static constexpr index_t max_rows = orphan;

  OrphanCredits() = default;
  OrphanCredits(const OrphanCredits&) = default;
  OrphanCredits(OrphanCredits&&) noexcept = default;
  ~OrphanCredits() = default;
  OrphanCredits& operator=(OrphanCredits&&) noexcept = default;
  /// Allocates only where there is too little room.
  OrphanCredits& operator=(const OrphanCredits& other) {
    if (this == &other) return *this;
    const bool same_heads = heads_.size() == other.heads_.size() && group_ == other.group_ && rows_ == other.rows_;
    index_t longest = 0;
    for (const Head& head : other.heads_) longest = std::max({longest, head.held.slots, head.noted.slots});
    if (!same_heads || longest > room_) return *this = OrphanCredits(other);
    for (index_t h = 0; h < static_cast<index_t>(heads_.size()); ++h) {
      held_.copy_head(h, room_, other.held_, other.room_, other.head(h).held.slots, tags_per_head());
      noted_.copy_head(h, room_, other.noted_, other.room_, other.head(h).noted.slots, tags_per_head());
      heads_[static_cast<std::size_t>(h)] = other.head(h);
    }
    noted_epoch_ = other.noted_epoch_;
    has_notes_ = other.has_notes_;
    return *this;
  }

  /// Room for `slots` slots of every head, with `rows` rows of each of the `group` query heads. Allocates where there was less.
  /// Heads, group and rows are the same in all calls.
  void reserve(index_t num_heads, index_t group, index_t rows, index_t slots) {
    if (static_cast<index_t>(heads_.size()) == num_heads && room_ >= slots) return;
    if (room_ > 0) slots = std::max(slots, room_ + room_ / 2);  // a cache that grows does not ask each time
    OrphanCredits larger;
    larger.group_ = group;
    larger.rows_ = rows;
    larger.room_ = slots;
    larger.heads_.resize(static_cast<std::size_t>(num_heads));
    for (Store* store : {&larger.held_, &larger.noted_}) {
      store->credit.resize(static_cast<std::size_t>(num_heads * slots));
      store->owner.resize(static_cast<std::size_t>(num_heads * slots));
      store->tags.resize(static_cast<std::size_t>(num_heads * larger.tags_per_head()));
    }
    if (!heads_.empty()) larger = *this;  // has the room
    *this = std::move(larger);
  }

  /// What a head's keys had after the last eviction. `tags` `[group][beacons]`: positions of the beacons of that time; the row
  /// that a key owes its credit is `owner / rows`, `owner % rows` of it.
  struct View {
    std::span<const float> credit{};  ///< of the slots from `first` on
    std::span<const row_t> owner{};
    std::span<const position_t> tags{};
    index_t first = 0;
    index_t rows = 0;     ///< of a query head
    index_t beacons = 0;  ///< of them, the leading ones
  };
  [[nodiscard]] View held(index_t head_index) const noexcept {
    if (head_index >= static_cast<index_t>(heads_.size())) return {};
    const Extent& e = head(head_index).held;
    const auto slots = static_cast<std::size_t>(e.slots);
    return {std::span(held_.credit).subspan(static_cast<std::size_t>(head_index * room_), slots),
            std::span(held_.owner).subspan(static_cast<std::size_t>(head_index * room_), slots),
            std::span(held_.tags)
                .subspan(static_cast<std::size_t>(head_index * tags_per_head()), static_cast<std::size_t>(group_ * e.beacons)),
            e.first,
            e.rows,
            e.beacons};
  }

  /// Where scoring notes what a head's keys will have: the same, of `slots` slots from `first` on. Heads may be noted at the
  /// same time. Precondition: there is room.
  struct Notes {
    std::span<float> credit{};
    std::span<row_t> owner{};
  };
  [[nodiscard]] Notes note(index_t head_index, index_t first, index_t slots, index_t rows, index_t beacons,
                           std::span<const position_t> tags) noexcept {
    BEACONKV_ASSERT(head_index < static_cast<index_t>(heads_.size()) && slots <= room_ && beacons <= rows && rows <= rows_);
    heads_[static_cast<std::size_t>(head_index)].noted = {first, slots, rows, beacons};
    std::copy(tags.begin(), tags.end(), noted_.tags.begin() + head_index * tags_per_head());
    return {std::span(noted_.credit).subspan(static_cast<std::size_t>(head_index * room_), static_cast<std::size_t>(slots)),
            std::span(noted_.owner).subspan(static_cast<std::size_t>(head_index * room_), static_cast<std::size_t>(slots))};
  }
  /// All heads were noted, for plans of this state of the cache.
  void noted(std::uint64_t epoch) noexcept {
    noted_epoch_ = epoch;
    has_notes_ = true;
  }

  /// After the plan was applied. Without notes for it credits stay what they were and move with their keys.
  void commit(const KeepPlan& plan) noexcept {
    const bool takes_notes = has_notes_ && noted_epoch_ == plan.epoch();
    for (index_t h = 0; h < static_cast<index_t>(heads_.size()); ++h) {
      Head& of = heads_[static_cast<std::size_t>(h)];
      if (takes_notes) {
        std::copy_n(noted_.tags.begin() + h * tags_per_head(), group_ * of.noted.beacons,
                    held_.tags.begin() + h * tags_per_head());
        of.held = of.noted;
      }
      const Store& from = takes_notes ? noted_ : held_;
      const std::span<const slot_t> kept = plan.kept(h);
      const auto begin = std::lower_bound(kept.begin(), kept.end(), of.held.first);
      const auto end = std::lower_bound(begin, kept.end(), of.held.first + of.held.slots);
      index_t to = h * room_;
      for (auto slot = begin; slot != end; ++slot, ++to) {  // never behind where it stood
        const index_t at = h * room_ + (*slot - of.held.first);
        held_.credit[static_cast<std::size_t>(to)] = from.credit[static_cast<std::size_t>(at)];
        held_.owner[static_cast<std::size_t>(to)] = from.owner[static_cast<std::size_t>(at)];
      }
      of.held.first = begin - kept.begin();
      of.held.slots = end - begin;
    }
    has_notes_ = false;
  }

  [[nodiscard]] std::size_t state_bytes() const noexcept {
    return 2 *
           (held_.credit.size() * sizeof(float) + held_.owner.size() * sizeof(row_t) + held_.tags.size() * sizeof(position_t));
  }

  /// Saves or loads what the keys have; notes that no commit followed are not part of it. Loading may allocate.
  template <class Archive>
  void exchange(Archive& archive) {
    constexpr std::int64_t most = std::numeric_limits<slot_t>::max();
    std::int64_t heads = static_cast<std::int64_t>(heads_.size());
    archive.value("heads with credits", heads, 0, 1 << 16);
    if constexpr (Archive::loading) {
      if (!archive.ok()) return;
      if (heads != 0 && heads != static_cast<std::int64_t>(heads_.size()))
        return archive.fail(error(StatusCode::damaged, "saved state: heads with credits = ", heads));
      for (Head& head : heads_) head = {};
      has_notes_ = false;
    }
    for (index_t h = 0; h < heads && archive.ok(); ++h) exchange_head(archive, h, most);
  }

 private:
  /// Of which slots and rows there are entries.
  struct Extent {
    index_t first = 0;
    index_t slots = 0;
    index_t rows = 0;  // of a query head
    index_t beacons = 0;
  };
  struct Head {
    Extent held{};
    Extent noted{};
  };
  struct Store {
    std::vector<float> credit;     // [heads][room_]
    std::vector<row_t> owner;      // [heads][room_]
    std::vector<position_t> tags;  // [heads][tags_per_head()]

    void copy_head(index_t head, index_t room, const Store& other, index_t other_room, index_t slots, index_t num_tags) {
      std::copy_n(other.credit.begin() + head * other_room, slots, credit.begin() + head * room);
      std::copy_n(other.owner.begin() + head * other_room, slots, owner.begin() + head * room);
      std::copy_n(other.tags.begin() + head * num_tags, num_tags, tags.begin() + head * num_tags);
    }
  };

  [[nodiscard]] index_t tags_per_head() const noexcept { return group_ * rows_; }
  [[nodiscard]] const Head& head(index_t h) const noexcept { return heads_[static_cast<std::size_t>(h)]; }

  template <class Archive>
  void exchange_head(Archive& archive, index_t h, std::int64_t most) {
    Extent& e = heads_[static_cast<std::size_t>(h)].held;
    archive.value("first slot with a credit", e.first, 0, most);
    archive.value("rows of a query head", e.rows, 0, rows_);
    archive.value("beacons of a query head", e.beacons, 0, e.rows);
    const auto begin = static_cast<std::size_t>(h * room_);
    const auto slots = static_cast<std::size_t>(e.slots);
    std::vector<float> credit(held_.credit.begin() + static_cast<std::ptrdiff_t>(begin),
                              held_.credit.begin() + static_cast<std::ptrdiff_t>(begin + slots));
    std::vector<row_t> owner(held_.owner.begin() + static_cast<std::ptrdiff_t>(begin),
                             held_.owner.begin() + static_cast<std::ptrdiff_t>(begin + slots));
    archive.list("credits", credit, static_cast<std::size_t>(most));
    archive.list("owners of credits", owner, static_cast<std::size_t>(most));
    if constexpr (Archive::loading) {
      if (!archive.ok()) return;
      if (owner.size() != credit.size())
        return archive.fail(
            error(StatusCode::damaged, "saved state: credits = ", credit.size(), ": there are ", owner.size(), " owners"));
      for (std::size_t i = 0; i < credit.size(); ++i)
        if (!is_finite(credit[i]) || credit[i] < 0 || credit[i] > 1 ||
            (owner[i] != orphan && (owner[i] >= group_ * e.rows || owner[i] % e.rows >= e.beacons)))
          return archive.fail(error(StatusCode::damaged, "saved state: credit = ", credit[i], " of row ", owner[i]));
      const Extent read = e;
      e = {};
      reserve(static_cast<index_t>(heads_.size()), group_, rows_, static_cast<index_t>(credit.size()));
      Extent& now = heads_[static_cast<std::size_t>(h)].held;
      now = read;
      now.slots = static_cast<index_t>(credit.size());
      std::copy(credit.begin(), credit.end(), held_.credit.begin() + h * room_);
      std::copy(owner.begin(), owner.end(), held_.owner.begin() + h * room_);
    }
    const Extent& now = heads_[static_cast<std::size_t>(h)].held;
    archive.array("beacons of credits",
                  std::span(held_.tags)
                      .subspan(static_cast<std::size_t>(h * tags_per_head()), static_cast<std::size_t>(group_ * now.beacons)));
  }

  std::vector<Head> heads_;
  Store held_;
  Store noted_;
  index_t room_ = 0;  // slots of a head
  index_t group_ = 0;
  index_t rows_ = 0;  // at most, of a query head
  std::uint64_t noted_epoch_ = 0;
  bool has_notes_ = false;
};

}  // namespace beaconkv::inline v0::detail
