// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// From scores to a plan: the best candidates and everything that is protected.

#include <algorithm>
#include <span>

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

/// Scratch of `select_head` over `n` slots.
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

/// How many candidates of `head` lie in none of the protected ranges. O(ranges * log L).
template <CacheReader Cache>
[[nodiscard]] index_t num_open(const Cache& cache, index_t head, Range candidates, std::span<const Range> ranges) {
  index_t open = candidates.size();
  for (const Range& range : ranges) {
    const index_t first = std::max<index_t>(candidates.first, slot_at_or_behind(cache, head, range.first));
    const index_t last = std::min<index_t>(candidates.last, slot_at_or_behind(cache, head, range.last));
    open -= std::max<index_t>(0, last - first);
  }
  return open;
}

/// Adds one head's set of `keep` slots to `plan`: every slot outside `candidates` or inside a protected range, and the best of
/// the others. Returns how many tokens protection kept beyond `keep`.
template <CacheReader Cache>
[[nodiscard]] Result<index_t> select_head(const Cache& cache, index_t head, std::span<const float> scores, Range candidates,
                                          std::span<const Range> ranges, index_t keep, KeepPlan& plan, Workspace& work) {
  const Workspace::Frame frame(work);
  const index_t n = cache.num_tokens();
  SelectionScratch scratch(work, n);
  index_t open = 0;  // candidates that are not protected
  index_t next = candidates.first;
  const auto add = [&](index_t last) {
    for (; next < last; ++next, ++open) {
      scratch.scores[static_cast<std::size_t>(open)] = scores[static_cast<std::size_t>(next)];
      scratch.slots[static_cast<std::size_t>(open)] = static_cast<slot_t>(next);
    }
  };
  for (const Range& range : ranges) {
    add(std::clamp<index_t>(slot_at_or_behind(cache, head, range.first), next, candidates.last));
    next = std::clamp<index_t>(slot_at_or_behind(cache, head, range.last), next, candidates.last);
  }
  add(candidates.last);

  const index_t fixed = n - open;
  const index_t wanted = std::max<index_t>(0, keep - fixed);
  const Result<TopK> best = top_k(scratch.scores.first(static_cast<std::size_t>(open)), wanted, scratch.best, work);
  if (!best) return best.status();

  const std::span<slot_t> kept = plan.add_set(fixed + best->count);
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

/// Scores of all heads become one row, in row 0: for memory that keeps one set for all heads.
inline void reduce_score_rows(ScoreMatrix scores, Reduce how) noexcept {
  const std::span<float> first = scores.row(0);
  for (index_t h = 1; h < scores.heads; ++h)
    for (std::size_t j = 0; j < first.size(); ++j)
      first[j] = how == Reduce::max ? max_or_nan(first[j], scores.row(h)[j]) : first[j] + scores.row(h)[j];
  if (how == Reduce::mean)
    for (float& x : first) x /= static_cast<float>(scores.heads);
}

}  // namespace detail
}  // namespace beaconkv::inline v0
