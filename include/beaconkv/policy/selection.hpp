// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// From scores to a plan: the best candidates, everything that is protected, and units that go whole or not at all.

#include <algorithm>
#include <numeric>
#include <optional>
#include <span>
#include <vector>

#include "beaconkv/algorithm/top_k.hpp"
#include "beaconkv/memory/cache_buffer.hpp"
#include "beaconkv/policy/scorer.hpp"

namespace beaconkv::inline v0 {

/// What never goes, whatever its score. Structural: a protected slot is no candidate.
struct Protection {
  std::optional<index_t> n_prefix{};  ///< positions below this; default: the prompt (the tokens given to `prefill`)
  index_t n_recent_kv = 0;            ///< the newest slots
};

/// Counts that are not negative.
[[nodiscard]] inline Status validate(const Protection& protection) {
  if (protection.n_prefix && *protection.n_prefix < 0)
    return detail::invalid("n_prefix = ", *protection.n_prefix, ": must not be negative");
  if (protection.n_recent_kv < 0) return detail::invalid("n_recent_kv = ", protection.n_recent_kv, ": must not be negative");
  return {};
}

namespace detail {

/// Scratch of a selection over `n` slots.
struct SelectionScratch {
  SelectionScratch(Workspace& work, index_t n)
      : scores(work.take<float>(n)), slots(work.take<slot_t>(n)), best(work.take<slot_t>(n)) {}
  std::span<float> scores;
  std::span<slot_t> slots;
  std::span<slot_t> best;
};

[[nodiscard]] inline WorkspaceSize selection_workspace_size(index_t n) {
  return measure([&](Workspace& work) {
    static_cast<void>(SelectionScratch(work, n));
    static_cast<void>(work.take<std::byte>(static_cast<index_t>(top_k_workspace_size(n).bytes)));
  });
}

/// The slots of `head` within positions `[range.first, range.last)`, cut to `within`.
template <CacheReader Cache>
[[nodiscard]] Range slots_of(const Cache& cache, index_t head, Range range, Range within) {
  const auto clamp = [&](std::int64_t slot) { return std::clamp<std::int64_t>(slot, within.first, within.last); };
  return {clamp(slot_at_or_behind(cache, head, range.first)), clamp(slot_at_or_behind(cache, head, range.last))};
}

/// How many candidates of `head` lie in none of the protected ranges. O(ranges * log L).
template <CacheReader Cache>
[[nodiscard]] index_t num_open(const Cache& cache, index_t head, Range candidates, std::span<const Range> ranges) {
  index_t open = candidates.size();
  for (const Range& range : ranges) open -= slots_of(cache, head, range, candidates).size();
  return open;
}

/// `select_head` where some ranges are protected: the candidates outside them move together to compete.
template <CacheReader Cache>
[[nodiscard]] Result<index_t> select_around(const Cache& cache, index_t head, std::span<const float> scores, Range candidates,
                                            std::span<const Range> ranges, index_t keep, KeepPlan& plan, Workspace& work) {
  const Workspace::Frame frame(work);
  const index_t n = tokens_of(cache, head);
  const SelectionScratch scratch(work, n);
  index_t open = 0;  // candidates that are not protected
  index_t next = candidates.first;
  const auto add = [&](index_t last) {
    for (; next < last; ++next, ++open) {
      scratch.scores[static_cast<std::size_t>(open)] = scores[static_cast<std::size_t>(next)];
      scratch.slots[static_cast<std::size_t>(open)] = static_cast<slot_t>(next);
    }
  };
  for (const Range& range : ranges) {
    const Range slots = slots_of(cache, head, range, candidates);
    add(std::max<index_t>(slots.first, next));
    next = std::max<index_t>(slots.last, next);
  }
  add(candidates.last);

  const index_t fixed = n - open;
  const index_t wanted = std::max<index_t>(0, keep - fixed);
  const Result<TopK> best = top_k(scratch.scores.first(static_cast<std::size_t>(open)), wanted, scratch.best, work);
  if (!best) return best.status();

  const std::span<slot_t> kept = plan.add_set(fixed + best->count, n);
  const std::span<float> kept_scores = plan.last_scores();
  std::size_t out = 0;
  index_t chosen = 0;
  index_t at = 0;  // in scratch.slots
  for (index_t slot = 0; slot < n; ++slot) {
    const bool is_open = at < open && scratch.slots[static_cast<std::size_t>(at)] == slot;
    const bool is_best = is_open && chosen < best->count && scratch.best[static_cast<std::size_t>(chosen)] == at;
    if (is_best) kept_scores[out] = scratch.scores[static_cast<std::size_t>(at)];
    if (!is_open || is_best) kept[out++] = static_cast<slot_t>(slot);
    chosen += is_best ? 1 : 0;
    at += is_open ? 1 : 0;
  }
  return std::max<index_t>(0, fixed - keep);
}

/// Adds one head's set of `keep` slots to `plan`: every slot outside `candidates` or inside a protected range, and the best of
/// the others. Returns how many tokens protection kept beyond `keep`.
template <CacheReader Cache>
[[nodiscard]] Result<index_t> select_head(const Cache& cache, index_t head, std::span<const float> scores, Range candidates,
                                          std::span<const Range> ranges, index_t keep, KeepPlan& plan, Workspace& work) {
  if (!ranges.empty()) return select_around(cache, head, scores, candidates, ranges, keep, plan, work);
  // The set where it belongs, with no copy of scores or slots: those before the candidates, the best, those behind.
  const index_t n = tokens_of(cache, head);
  const index_t fixed = n - candidates.size();
  const index_t wanted = std::clamp<index_t>(keep - fixed, 0, candidates.size());
  if (Status s = work.require(top_k_workspace_size(candidates.size())); !s) return s;
  const auto first = static_cast<std::size_t>(candidates.first);
  const std::span<const float> competing = scores.subspan(first, static_cast<std::size_t>(candidates.size()));
  const std::span<slot_t> kept = plan.add_set(fixed + wanted, n);
  const std::span<float> kept_scores = plan.last_scores().subspan(first);
  const std::span<slot_t> best = kept.subspan(first, static_cast<std::size_t>(wanted));
  if (const Result<TopK> found = top_k(competing, wanted, best, work); !found) return found.status();
  for (std::size_t i = 0; i < best.size(); ++i) {
    kept_scores[i] = competing[static_cast<std::size_t>(best[i])];
    best[i] += static_cast<slot_t>(first);
  }
  std::iota(kept.begin(), kept.begin() + candidates.first, slot_t{0});
  std::iota(kept.begin() + candidates.first + wanted, kept.end(), static_cast<slot_t>(candidates.last));
  return std::max<index_t>(0, fixed - keep);
}

/// The scores of the slots of `head` that compete go to the plan.
template <CacheReader Cache>
void record_scores(const Cache& cache, index_t head, std::span<const float> scores, Range candidates,
                   std::span<const Range> ranges, KeepPlan& plan) {
  const std::span<std::optional<float>> out = plan.add_slot_scores(tokens_of(cache, head));
  for (auto j = static_cast<std::size_t>(candidates.first); j < static_cast<std::size_t>(candidates.last); ++j)
    out[j] = scores[j];
  for (const Range& range : ranges) {
    const Range slots = slots_of(cache, head, range, candidates);
    std::fill(out.begin() + slots.first, out.begin() + slots.last, std::nullopt);
  }
}

/// As `select_head` for the one set of all heads, but tokens go in units: those between two of the ascending `boundaries`
/// (positions). A unit with a slot that is no candidate or protected stays whole, and so does the one that no boundary ends
/// yet. The unit with the lowest mean score goes first, of equal ones the newer, until no more than `keep` tokens are left.
/// Returns how many could not go.
template <CacheReader Cache>
[[nodiscard]] index_t select_units(const Cache& cache, std::span<const float> scores, Range candidates,
                                   std::span<const Range> ranges, std::span<const position_t> boundaries, index_t keep,
                                   KeepPlan& plan, Workspace& work) {
  const Workspace::Frame frame(work);
  const index_t n = cache.num_tokens();
  const SelectionScratch scratch(work, n);
  const auto begin_of = [&](std::size_t unit) -> index_t {  // units 0 .. boundaries.size()
    return unit == 0 ? 0 : (unit > boundaries.size() ? n : slot_at_or_behind(cache, 0, boundaries[unit - 1]));
  };
  const auto unit_of = [&](slot_t slot) {
    const position_t position = cache.position(0, slot);
    return static_cast<std::size_t>(std::upper_bound(boundaries.begin(), boundaries.end(), position) - boundaries.begin());
  };
  std::size_t open = 0;  // units that may go: their first slot in `slots`, their mean in `scores`
  for (index_t first = 0; first < n;) {
    const index_t last = begin_of(unit_of(static_cast<slot_t>(first)) + 1);
    bool may_go =
        first >= candidates.first && last <= candidates.last && unit_of(static_cast<slot_t>(first)) < boundaries.size();
    for (const Range& range : ranges) may_go = may_go && slots_of(cache, 0, range, {first, last}).size() == 0;
    if (may_go) {
      double sum = 0;
      for (index_t slot = first; slot < last; ++slot) sum += static_cast<double>(scores[static_cast<std::size_t>(slot)]);
      scratch.slots[open] = static_cast<slot_t>(first);
      scratch.scores[open++] = static_cast<float>(sum / static_cast<double>(last - first));
    }
    first = last;
  }
  const std::span<slot_t> order = scratch.best.first(open);
  std::iota(order.begin(), order.end(), slot_t{0});
  std::sort(order.begin(), order.end(), [&](slot_t a, slot_t b) {
    const std::int32_t x = score_rank(scratch.scores[static_cast<std::size_t>(a)]);
    const std::int32_t y = score_rank(scratch.scores[static_cast<std::size_t>(b)]);
    return x != y ? x < y : a > b;
  });
  index_t left = n;
  std::size_t going = 0;
  for (; going < open && left > keep; ++going) {
    const slot_t first = scratch.slots[static_cast<std::size_t>(order[going])];
    const index_t size = begin_of(unit_of(first) + 1) - first;
    if (size == left) break;  // no cache ends up empty
    left -= size;
  }
  std::sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(going));

  const std::span<slot_t> kept = plan.add_set(left, n);
  const std::span<float> kept_scores = plan.last_scores();
  std::size_t out = 0;
  index_t slot = 0;
  const auto keep_until = [&](index_t last) {
    for (; slot < last; ++slot) {
      kept[out] = static_cast<slot_t>(slot);
      if (slot >= candidates.first && slot < candidates.last) kept_scores[out] = scores[static_cast<std::size_t>(slot)];
      ++out;
    }
  };
  for (const slot_t unit : order.first(going)) {
    const slot_t first = scratch.slots[static_cast<std::size_t>(unit)];
    keep_until(first);
    slot = begin_of(unit_of(first) + 1);
  }
  keep_until(n);
  return std::max<index_t>(0, left - keep);
}

}  // namespace detail

/// Scores of all heads become one row, in row 0: for memory that keeps one set for all heads. `max` or `mean` (or `sum`), heads
/// in order, so that the bits do not depend on who computes it.
inline void reduce_heads(ScoreMatrix scores, Reduce how) noexcept {
  const std::span<float> first = scores.row(0);
  for (index_t h = 1; h < scores.heads; ++h)
    for (std::size_t j = 0; j < first.size(); ++j)
      first[j] = how == Reduce::max ? detail::max_or_nan(first[j], scores.row(h)[j]) : first[j] + scores.row(h)[j];
  if (how == Reduce::mean)
    for (float& x : first)
      x *= 1.0F / static_cast<float>(scores.heads);  // a quotient may have other bits at the end of a vector
}

/// What a selection has to respect beside the scores: protected positions and boundaries of units.
class SelectionRules {
 public:
  [[nodiscard]] std::span<const Range> protected_ranges() const noexcept { return ranges_; }
  [[nodiscard]] std::span<const position_t> boundaries() const noexcept { return boundaries_; }

  /// Allocates. Refused unless the range is ascending and overlaps none of the others.
  [[nodiscard]] Status protect(Range range) {
    if (range.first < 0 || range.last <= range.first)
      return detail::invalid("range = [", range.first, ", ", range.last, "): must be ascending and not negative");
    for (const Range& r : ranges_)
      if (range.first < r.last && r.first < range.last)
        return detail::invalid("range = [", range.first, ", ", range.last, "): overlaps the protected [", r.first, ", ", r.last,
                               ")");
    const auto behind = std::find_if(ranges_.begin(), ranges_.end(), [&](const Range& r) { return r.first > range.first; });
    ranges_.insert(behind, range);
    return {};
  }

  /// Refused unless just this range is protected.
  [[nodiscard]] Status unprotect(Range range) {
    const auto found = std::find(ranges_.begin(), ranges_.end(), range);
    if (found == ranges_.end())
      return detail::invalid("range = [", range.first, ", ", range.last, "): is none of the ", ranges_.size(),
                             " protected ones");
    ranges_.erase(found);
    return {};
  }

  /// Allocates. Refused unless it is behind all before.
  [[nodiscard]] Status add_boundary(position_t position) {
    if (position < 0) return detail::invalid("boundary = ", position, ": must not be negative");
    if (!boundaries_.empty() && position <= boundaries_.back())
      return detail::error(StatusCode::out_of_order, "boundary = ", position, ": must be above ", boundaries_.back());
    boundaries_.push_back(position);
    return {};
  }

  template <class Archive>
  void exchange(Archive& archive) {
    constexpr std::size_t most = std::size_t{1} << 32;
    std::vector<position_t> ends;
    for (const Range& r : ranges_) ends.insert(ends.end(), {r.first, r.last});
    archive.list("protected ranges", ends, most);
    archive.list("boundaries", boundaries_, most);
    if constexpr (Archive::loading) {
      SelectionRules read;
      if (ends.size() % 2 != 0)
        archive.fail(detail::error(StatusCode::damaged, "saved state: protected ranges: ", ends.size(), " ends, not pairs"));
      for (std::size_t i = 0; i + 1 < ends.size(); i += 2)
        if (Status s = read.protect({ends[i], ends[i + 1]}); !s) archive.fail(std::move(s));
      for (const position_t b : boundaries_)
        if (Status s = read.add_boundary(b); !s) archive.fail(std::move(s));
      *this = std::move(read);
    }
  }

 private:
  std::vector<Range> ranges_;           // of positions, ascending
  std::vector<position_t> boundaries_;  // ascending
};

}  // namespace beaconkv::inline v0
