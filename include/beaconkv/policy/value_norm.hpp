// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Scores times the lengths of the cached values: what a key's weight moves in the output when it goes.

#include <algorithm>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "beaconkv/detail/numeric.hpp"
#include "beaconkv/keep_plan.hpp"
#include "beaconkv/kernel/row_lengths.hpp"
#include "beaconkv/memory/cache_buffer.hpp"
#include "beaconkv/workspace.hpp"

namespace beaconkv::inline v0::detail {

/// Values are read in runs of this many, or as many as fit into that many rows of `head_dim`.
inline constexpr index_t values_at_once = 64;

[[nodiscard]] inline WorkspaceSize value_norm_workspace_size(index_t head_dim) {
  return measure([&](Workspace& work) {
    static_cast<void>(work.take<float>(values_at_once * head_dim));
    static_cast<void>(work.take<float>(values_at_once));
  });
}

/// A score times its value's length; NaN where that is none. Returns how often.
[[nodiscard]] inline index_t multiply_by_lengths(std::span<float> scores, const float* lengths) noexcept {
  index_t num_non_finite = 0;
  for (std::size_t i = 0; i < scores.size(); ++i) {
    if (lengths[i] >= 0) {
      scores[i] = is_nan(scores[i]) ? scores[i] : scores[i] * lengths[i];
    } else {
      scores[i] = quiet_nan();
      ++num_non_finite;
    }
  }
  return num_non_finite;
}

/// `scores[j] *= ` the Euclidean length of the value of `head` in slot `j`, for the slots of the range; NaN where the value
/// holds a NaN or infinity. Returns how many did. The lengths go to `lengths_out`, too (one a slot, the first slot's first),
/// unless that is null. One pass over these values; no allocation. Refused where a value is longer than all of the scratch,
/// `values_at_once * head_dim`.
template <CacheReader Cache>
[[nodiscard]] Result<index_t> multiply_by_value_norms(const Cache& cache, index_t head, Range slots, index_t head_dim,
                                                      std::span<float> scores, Workspace& work, float* lengths_out = nullptr) {
  const index_t at_once = std::min(values_at_once, values_at_once * head_dim / std::max<index_t>(1, cache.value_dim()));
  if (at_once < 1)
    return error(StatusCode::unsupported, "value_norm: the cache has values of ", cache.value_dim(), ": at most ",
                 values_at_once * head_dim, " are read");
  if (Status s = work.require(value_norm_workspace_size(head_dim)); !s) return s;
  const Workspace::Frame frame(work);
  const std::span<float> decoded = work.take<float>(values_at_once * head_dim);
  const std::span<float> lengths = work.take<float>(values_at_once);
  index_t num_non_finite = 0;
  for (index_t first = slots.first; first < slots.last; first += at_once) {
    const index_t count = std::min<index_t>(at_once, slots.last - first);
    const ConstRows values = cache.values(head, first, count, decoded.data());
    run<RowLengths>(values.data, values.stride, values.dim, count, lengths.data());
    if (lengths_out != nullptr) std::copy_n(lengths.begin(), count, lengths_out + (first - slots.first));
    num_non_finite +=
        multiply_by_lengths(scores.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count)), lengths.data());
  }
  return num_non_finite;
}

/// Lengths of cached values that an earlier eviction has read, so that the next one reads those of newer tokens only: 4 bytes a
/// slot and KV head.
///
/// Values are known by their slots, as credits are (`OrphanCredits`). Scoring notes lengths; they count after the `commit` of a
/// plan that was made of these scores, for the slots that stay. Where the cache holds not as many tokens before the position up
/// to which lengths are known, something else has evicted from it: they are read anew. So they are after a load. What nobody
/// can see is that values behind the same positions have become others, by hand, or by a `truncate` of more tokens than were
/// protected as recent.
class ValueLengths {
 public:
  ValueLengths() = default;
  ValueLengths(const ValueLengths&) = default;
  ValueLengths(ValueLengths&&) noexcept = default;
  ~ValueLengths() = default;
  ValueLengths& operator=(ValueLengths&&) noexcept = default;
  /// Allocates only where there is too little room.
  ValueLengths& operator=(const ValueLengths& other) {
    if (this == &other) return *this;
    index_t longest = 0;
    for (const Head& head : other.heads_) longest = std::max(longest, head.slots());
    if (heads_.size() != other.heads_.size() || longest > room_) return *this = ValueLengths(other);
    copy_heads(other);
    return *this;
  }

  /// Room for `slots` slots of every head. Allocates where there was less.
  void reserve(index_t num_heads, index_t slots) {
    if (static_cast<index_t>(heads_.size()) == num_heads && room_ >= slots) return;
    if (room_ > 0) slots = std::max(slots, room_ + room_ / 2);  // a cache that grows does not ask each time
    ValueLengths larger;
    larger.room_ = slots;
    larger.heads_.resize(static_cast<std::size_t>(num_heads));
    larger.lengths_.resize(static_cast<std::size_t>(num_heads * slots));
    if (!heads_.empty()) larger.copy_heads(*this);
    *this = std::move(larger);
  }

  /// The same as `multiply_by_value_norms`, to the bit. Const: reads what is known.
  template <CacheReader Cache>
  [[nodiscard]] Result<index_t> multiply(const Cache& cache, index_t head, index_t kv_head, Range candidates, index_t head_dim,
                                         std::span<float> scores, Workspace& work) const {
    return multiply_with(cache, head, kv_head, known(cache, head, kv_head, candidates), candidates, head_dim, scores, work,
                         nullptr);
  }
  /// And notes the others. Different heads may be multiplied at the same time. Precondition: there is room.
  template <CacheReader Cache>
  [[nodiscard]] Result<index_t> multiply(const Cache& cache, index_t head, index_t kv_head, Range candidates, index_t head_dim,
                                         std::span<float> scores, Workspace& work) {
    BEACONKV_ASSERT(kv_head < static_cast<index_t>(heads_.size()) && candidates.size() <= room_);
    Head& of = heads_[static_cast<std::size_t>(kv_head)];
    Range held = known(cache, head, kv_head, candidates);
    if (held.size() == 0 || candidates.first < of.held.first || candidates.last - of.held.first > room_) {
      of.held = {candidates.first, candidates.first};  // begins anew
      held = of.held;
    }
    const Result<index_t> bad = multiply_with(cache, head, kv_head, held, candidates, head_dim, scores, work,
                                              row(kv_head) + (held.last - of.held.first));
    of.noted = {of.held.first, bad ? candidates.last : held.last};
    of.noted_before = candidates.size() > 0 ? cache.position(head, candidates.last - 1) + 1 : of.before;
    return bad;
  }
  /// All heads were noted, for plans of this state of the cache.
  void noted(std::uint64_t epoch) noexcept {
    noted_epoch_ = epoch;
    has_notes_ = true;
  }

  /// After the plan was applied: lengths move with their values. Without notes for it they are read anew. No allocation.
  void commit(const KeepPlan& plan) noexcept {
    const bool takes_notes = std::exchange(has_notes_, false) && noted_epoch_ == plan.epoch();
    if (plan.keeps_all()) return;  // nothing moved, and what was noted may still be taken back
    if (!takes_notes) return forget();
    for (index_t h = 0; h < static_cast<index_t>(heads_.size()); ++h) {
      Head& of = heads_[static_cast<std::size_t>(h)];
      of.held = of.noted;
      of.before = of.noted_before;
      const std::span<const slot_t> kept = plan.kept(h);
      const auto begin = std::lower_bound(kept.begin(), kept.end(), of.held.first);
      const auto end = std::lower_bound(begin, kept.end(), of.held.last);
      float* to = row(h);
      for (auto slot = begin; slot != end; ++slot) *to++ = row(h)[*slot - of.held.first];  // never behind where it stood
      of.held = of.noted = {begin - kept.begin(), end - kept.begin()};
    }
  }

  void forget() noexcept {
    for (Head& head : heads_) head = {};
    has_notes_ = false;
  }
  [[nodiscard]] std::size_t state_bytes() const noexcept { return lengths_.size() * sizeof(float); }

 private:
  struct Head {
    Range held{};           // slots whose lengths are known
    position_t before = 0;  // behind the last of these no token has a position below this, and none of them reaches it
    Range noted{};          // the same after the commit of the scored plan
    position_t noted_before = 0;

    [[nodiscard]] index_t slots() const noexcept { return std::max(held.last, noted.last) - held.first; }
  };

  [[nodiscard]] float* row(index_t head) noexcept { return lengths_.data() + head * room_; }
  [[nodiscard]] const float* row(index_t head) const noexcept { return lengths_.data() + head * room_; }

  void copy_heads(const ValueLengths& other) {
    for (index_t h = 0; h < static_cast<index_t>(heads_.size()); ++h) {
      const Head& of = other.heads_[static_cast<std::size_t>(h)];
      std::copy_n(other.row(h), of.slots(), row(h));
      heads_[static_cast<std::size_t>(h)] = of;
    }
    noted_epoch_ = other.noted_epoch_;
    has_notes_ = other.has_notes_;
  }

  /// The candidates whose lengths are known.
  template <CacheReader Cache>
  [[nodiscard]] Range known(const Cache& cache, index_t head, index_t kv_head, Range candidates) const noexcept {
    const Range none{candidates.first, candidates.first};
    if (kv_head >= static_cast<index_t>(heads_.size())) return none;
    const Head& of = heads_[static_cast<std::size_t>(kv_head)];
    const index_t tokens = tokens_of(cache, head);
    if (of.held.size() <= 0 || of.held.last > tokens || of.held.last > candidates.last) return none;
    if (cache.position(head, of.held.last - 1) >= of.before) return none;
    if (of.held.last < tokens && cache.position(head, of.held.last) < of.before) return none;
    return {std::max(of.held.first, candidates.first), std::max(of.held.last, candidates.first)};
  }

  /// Slots below the `held` ones are never noted: these begin in front of all candidates, or there are none.
  template <CacheReader Cache>
  [[nodiscard]] Result<index_t> multiply_with(const Cache& cache, index_t head, index_t kv_head, Range held, Range candidates,
                                              index_t head_dim, std::span<float> scores, Workspace& work,
                                              float* newer_lengths) const {
    const Result<index_t> older = multiply_by_value_norms(cache, head, {candidates.first, held.first}, head_dim, scores, work);
    if (!older) return older;
    const Result<index_t> newer =
        multiply_by_value_norms(cache, head, {held.last, candidates.last}, head_dim, scores, work, newer_lengths);
    if (!newer) return newer;
    if (held.size() == 0) return *older + *newer;
    const std::span<float> of_held =
        scores.subspan(static_cast<std::size_t>(held.first), static_cast<std::size_t>(held.size()));
    const index_t first = heads_[static_cast<std::size_t>(kv_head)].held.first;
    return *older + *newer + multiply_by_lengths(of_held, row(kv_head) + (held.first - first));
  }

  std::vector<Head> heads_;
  std::vector<float> lengths_;  // [heads][room_], from the first held slot on
  index_t room_ = 0;            // slots of a head
  std::uint64_t noted_epoch_ = 0;
  bool has_notes_ = false;
};

}  // namespace beaconkv::inline v0::detail
