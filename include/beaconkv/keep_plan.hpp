// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// What an eviction decided: which slots stay. Data only, so that an engine may apply it by itself (a new block table, a GPU
/// kernel, removed position ranges) instead of calling `compact`.

#include <algorithm>
#include <optional>
#include <span>
#include <vector>

#include "beaconkv/types.hpp"

namespace beaconkv::inline v0 {

/// The slots that stay, for each KV head: ascending, unique, in the numbering before the eviction.
///
/// Made by a policy's `plan`, or by hand through `assign`. It belongs to one state of one cache (`epoch`) and is applied once.
/// A value: copy it to keep it. Storage is reused from plan to plan, so nothing is allocated once `reserve` covered the cache.
class KeepPlan {
 public:
  KeepPlan() = default;

  /// Room for `sets` sets over a cache of at most `tokens` tokens. Allocates.
  void reserve(index_t sets, index_t tokens) {
    slots_.reserve(static_cast<std::size_t>(sets * tokens));
    scores_.reserve(static_cast<std::size_t>(sets * tokens));
    offsets_.reserve(static_cast<std::size_t>(sets + 1));
    before_.reserve(static_cast<std::size_t>(sets));
  }

  /// A plan made by hand: one set for each KV head, or a single one for all. Refused unless every set is ascending, unique and
  /// within `[0, tokens)`; then this plan is unchanged. Allocates where the room is too small.
  template <class Cache>
  [[nodiscard]] Status assign(const Cache& cache, std::span<const std::span<const slot_t>> sets) {
    const index_t n = static_cast<index_t>(sets.size());
    if (n != cache.num_kv_heads() && (n != 1 || has_own_lengths<Cache>))
      return detail::invalid("sets = ", n, ": must be ", has_own_lengths<Cache> ? "" : "1 or ", "the cache's ",
                             cache.num_kv_heads(), " KV heads");
    for (index_t s = 0; s < n; ++s) {
      slot_t previous = -1;
      for (const slot_t slot : sets[static_cast<std::size_t>(s)]) {
        if (slot <= previous || slot >= tokens_in(cache, s))
          return detail::invalid("set ", s, " has slot ", slot, " behind ", previous, ": slots must be ascending and below ",
                                 tokens_in(cache, s));
        previous = slot;
      }
    }
    start(cache.epoch(), cache.num_tokens(), {0, cache.num_tokens()});
    for (index_t s = 0; s < n; ++s) {
      const auto& set = sets[static_cast<std::size_t>(s)];
      std::copy(set.begin(), set.end(), add_set(static_cast<index_t>(set.size()), tokens_in(cache, s)).begin());
    }
    return {};
  }

  /// The state of the cache that the plan was made for.
  [[nodiscard]] std::uint64_t epoch() const noexcept { return epoch_; }
  /// Tokens that every head held before, or the longest one did.
  [[nodiscard]] index_t tokens_before() const noexcept { return tokens_before_; }
  /// Tokens that `head` held before.
  [[nodiscard]] index_t tokens_before(index_t head) const noexcept { return before_[set_of(head)]; }
  /// 1 where all heads keep the same slots, else the number of KV heads.
  [[nodiscard]] index_t sets() const noexcept { return offsets_.empty() ? 0 : static_cast<index_t>(offsets_.size()) - 1; }

  /// The slots that `head` keeps.
  [[nodiscard]] std::span<const slot_t> kept(index_t head) const noexcept { return part(slots_, head); }
  /// The scores of `kept(head)`, in the same order; 0 where the slot was protected.
  [[nodiscard]] std::span<const float> kept_scores(index_t head) const noexcept { return part(scores_, head); }
  /// The scores of all slots that `head` chose from, evicted ones included; none where the slot did not compete. Empty unless
  /// the plan was to record them.
  [[nodiscard]] std::span<const std::optional<float>> slot_scores(index_t head) const noexcept {
    if (slot_scores_.empty()) return {};
    std::size_t first = 0;
    for (std::size_t s = 0; s < set_of(head); ++s) first += static_cast<std::size_t>(before_[s]);
    return std::span(slot_scores_).subspan(first, static_cast<std::size_t>(tokens_before(head)));
  }
  /// Whether plans made from now on keep `slot_scores`: for logs. Off at first. While it is on, making a plan allocates.
  void record_scores(bool on) noexcept { records_scores_ = on; }
  [[nodiscard]] bool records_scores() const noexcept { return records_scores_; }
  [[nodiscard]] index_t num_kept(index_t head) const noexcept { return static_cast<index_t>(kept(head).size()); }
  [[nodiscard]] index_t num_evicted(index_t head) const noexcept { return tokens_before(head) - num_kept(head); }

  /// The slots that competed; those outside were protected.
  [[nodiscard]] Range candidates() const noexcept { return candidates_; }

  /// True where every head keeps everything: applying it changes nothing.
  [[nodiscard]] bool keeps_all() const noexcept {
    for (index_t s = 0; s < sets(); ++s)
      if (num_evicted(s) != 0) return false;
    return true;
  }

  /// Leading slots that stay where they are in every head: what a prefix cache may still call by its old name. The first slot
  /// whose content changes, or `tokens_before()` where none does. O(log L) a set.
  [[nodiscard]] index_t unchanged_prefix() const noexcept {
    index_t unchanged = sets() > 0 ? tokens_before_ : 0;
    for (index_t s = 0; s < sets(); ++s) unchanged = std::min(unchanged, unchanged_prefix(s));
    return unchanged;
  }
  /// The same of one head.
  [[nodiscard]] index_t unchanged_prefix(index_t head) const noexcept {
    const std::span<const slot_t> slots = kept(head);
    index_t low = 0;
    index_t high = num_kept(head);
    while (low < high) {  // slots are ascending and unique: the first that is not its own index ends the prefix
      const index_t middle = low + (high - low) / 2;
      if (slots[static_cast<std::size_t>(middle)] == middle)
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  }

  /// Tokens a head that the request wanted gone but protection kept.
  [[nodiscard]] index_t shortfall() const noexcept { return shortfall_; }
  /// Keys and queries (rows) with a NaN or infinity that scoring met; such keys go first.
  [[nodiscard]] index_t num_non_finite() const noexcept { return non_finite_; }

  /// Calls `f(Range)` for each maximal run of evicted slots of `head`, ascending, in the old numbering.
  template <class F>
  void for_each_evicted_run(index_t head, F&& f) const {
    std::int64_t next = 0;
    for (const slot_t slot : kept(head)) {
      if (slot > next) f(Range{next, slot});
      next = std::int64_t{slot} + 1;
    }
    if (next < tokens_before(head)) f(Range{next, tokens_before(head)});
  }

  /// The evicted runs of `head` as positions, for engines that remove `[first, last)` by position: calls `f(Range)` once for
  /// each maximal run, with the true positions that the tokens have in `cache`. A range may span positions that went earlier;
  /// it holds no kept token.
  ///
  /// The newest run comes first, so that `f` may remove it, and move what lies behind it, at once: neither changes what is
  /// still to come. Refused, without a call, where the plan was made for another state of the cache.
  template <class Cache, class F>
  [[nodiscard]] Status for_each_evicted_positions(const Cache& cache, index_t head, F&& f) const {
    if (sets() == 0 || epoch_ != cache.epoch() || tokens_before_ != cache.num_tokens())
      return detail::error(StatusCode::stale_plan, "plan was made for another state of the cache (", tokens_before_,
                           " tokens, now ", cache.num_tokens(), "): ask before it is applied");
    if (head < 0 || head >= cache.num_kv_heads())
      return detail::invalid("head = ", head, ": must be between 0 and ", cache.num_kv_heads() - 1);
    const std::span<const slot_t> slots = kept(head);
    index_t end = tokens_before(head);
    for (std::size_t i = slots.size() + 1; i-- > 0;) {
      const index_t first = i > 0 ? index_t{slots[i - 1]} + 1 : 0;
      if (first < end) f(Range{cache.position(head, first), cache.position(head, end - 1) + 1});
      end = first - 1;
    }
    return {};
  }

  /// Calls `f(to, from, count)` for each maximal run of kept slots of `head`; `to <= from`, ascending, so that the moves are
  /// safe in place from front to back. Runs that stay where they are are reported too (`to == from`).
  template <class F>
  void for_each_move(index_t head, F&& f) const {
    const std::span<const slot_t> slots = kept(head);
    for (std::size_t i = 0; i < slots.size();) {
      std::size_t end = i + 1;
      while (end < slots.size() && slots[end] == slots[end - 1] + 1) ++end;
      f(static_cast<index_t>(i), static_cast<index_t>(slots[i]), static_cast<index_t>(end - i));
      i = end;
    }
  }

  /// Writes where each old slot of `head` went: its new slot, or -1 for gone. `map` has `tokens_before(head)` entries.
  void old_to_new(index_t head, std::span<slot_t> map) const {
    BEACONKV_ASSERT(static_cast<index_t>(map.size()) == tokens_before(head));
    std::fill(map.begin(), map.end(), slot_t{-1});
    slot_t to = 0;
    for (const slot_t from : kept(head)) map[static_cast<std::size_t>(from)] = to++;
  }

  /// Begins a new plan; then one `add_set` a set. For policies.
  void start(std::uint64_t epoch, index_t tokens_before, Range candidates) {
    epoch_ = epoch;
    tokens_before_ = tokens_before;
    candidates_ = candidates;
    shortfall_ = 0;
    non_finite_ = 0;
    slots_.clear();
    scores_.clear();
    offsets_.assign(1, 0);
    before_.clear();
    slot_scores_.clear();
  }
  /// The same slots for another cache that holds as many tokens: layers that keep one set together.
  template <class Cache>
  [[nodiscard]] Status readdress(const Cache& cache) {
    if (sets() != 1 || cache.num_tokens() != tokens_before_)
      return detail::invalid("readdress: the cache has ", cache.num_tokens(), " tokens, the plan ", sets(), " sets over ",
                             tokens_before_);
    epoch_ = cache.epoch();
    return {};
  }
  /// Adds a set of `count` of the head's `before` slots, to be filled in by the caller; its scores are 0 until set.
  [[nodiscard]] std::span<slot_t> add_set(index_t count, index_t before) {
    before_.push_back(before);
    slots_.resize(slots_.size() + static_cast<std::size_t>(count));
    scores_.resize(slots_.size(), 0.0F);
    offsets_.push_back(static_cast<index_t>(slots_.size()));
    return std::span(slots_).last(static_cast<std::size_t>(count));
  }
  /// The scores of the set added last.
  [[nodiscard]] std::span<float> last_scores() noexcept {
    return std::span(scores_).subspan(static_cast<std::size_t>(offsets_[offsets_.size() - 2]));
  }
  /// The recorded scores of the set added last, or about to be, to be filled in: none until then. Allocates.
  [[nodiscard]] std::span<std::optional<float>> add_slot_scores(index_t before) {
    slot_scores_.resize(slot_scores_.size() + static_cast<std::size_t>(before));
    return std::span(slot_scores_).last(static_cast<std::size_t>(before));
  }
  void report(index_t shortfall, index_t non_finite) noexcept {
    shortfall_ = shortfall;
    non_finite_ = non_finite;
  }

 private:
  /// Of a ragged cache.
  template <class Cache>
  static constexpr bool has_own_lengths = requires(const Cache& cache, index_t head) {
    cache.num_tokens(head);
  };

  template <class Cache>
  [[nodiscard]] static index_t tokens_in(const Cache& cache, index_t head) noexcept {
    if constexpr (has_own_lengths<Cache>) return cache.num_tokens(head);
    static_cast<void>(head);
    return cache.num_tokens();
  }
  [[nodiscard]] std::size_t set_of(index_t head) const noexcept {
    const auto s = static_cast<std::size_t>(sets() == 1 ? 0 : head);
    BEACONKV_ASSERT(s + 1 < offsets_.size());
    return s;
  }
  template <class T>
  [[nodiscard]] std::span<const T> part(const std::vector<T>& all, index_t head) const noexcept {
    const std::size_t s = set_of(head);
    return std::span(all).subspan(static_cast<std::size_t>(offsets_[s]),
                                  static_cast<std::size_t>(offsets_[s + 1] - offsets_[s]));
  }

  std::uint64_t epoch_ = 0;
  index_t tokens_before_ = 0;
  Range candidates_{};
  index_t shortfall_ = 0;
  index_t non_finite_ = 0;
  std::vector<slot_t> slots_;
  std::vector<float> scores_;
  std::vector<index_t> offsets_;  // of each set in slots_, and the end
  std::vector<index_t> before_;   // tokens that each set chose from
  bool records_scores_ = false;
  std::vector<std::optional<float>> slot_scores_;  // of each set in turn, or empty
};

}  // namespace beaconkv::inline v0
