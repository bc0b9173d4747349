// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// AdaKV: the KV heads of a layer share one budget, and those with more high scores keep more tokens.

#include <algorithm>
#include <numeric>
#include <span>
#include <utility>

#include "beaconkv/policy/evict.hpp"

namespace beaconkv::inline v0 {

namespace detail {

struct HeadBudgetScratch {
  HeadBudgetScratch(Workspace& work, index_t heads, index_t tokens)
      : open(work.take<std::uint8_t>(heads * tokens)),
        scores(work.take<float>(heads * tokens)),
        slots(work.take<slot_t>(heads * tokens)),
        best(work.take<slot_t>(heads * tokens)) {}
  std::span<std::uint8_t> open;  // [heads][tokens]: competes for what is left
  std::span<float> scores;
  std::span<slot_t> slots;
  std::span<slot_t> best;
};

}  // namespace detail

/// Scratch of `head_budgets` over `heads` heads of at most `tokens` tokens.
[[nodiscard]] inline WorkspaceSize head_budgets_workspace_size(index_t heads, index_t tokens) {
  return detail::measure([&](Workspace& work) {
    static_cast<void>(detail::HeadBudgetScratch(work, heads, tokens));
    static_cast<void>(work.take<std::byte>(static_cast<index_t>(top_k_workspace_size(heads * tokens).bytes)));
  });
}

/// How many tokens each head keeps of `total`, to `out` (one a head): first the best `floor` candidates of each, then the best
/// of all others whatever their head. Of equal scores the lower slot, then the lower head.
///
/// \param competes `competes(head, slot)`: not protected. What is protected is no part of `total` and of `out`.
///
/// No allocation. O(heads * tokens). Errors: sizes that do not match, `work` too small.
template <class Competes>
[[nodiscard]] Status head_budgets(ScoreMatrix scores, Competes competes, index_t floor, index_t total, std::span<index_t> out,
                                  Workspace& work) {
  if (static_cast<index_t>(out.size()) != scores.heads)
    return detail::invalid("out has ", out.size(), " entries: there are ", scores.heads, " heads");
  if (floor < 0 || total < 0) return detail::invalid("floor = ", floor, ", total = ", total, ": must not be negative");
  if (Status s = work.require(head_budgets_workspace_size(scores.heads, scores.tokens)); !s) return s;
  const Workspace::Frame frame(work);
  const detail::HeadBudgetScratch scratch(work, scores.heads, scores.tokens);
  std::fill(out.begin(), out.end(), index_t{0});
  std::fill(scratch.open.begin(), scratch.open.end(), std::uint8_t{0});
  index_t left = total;
  const auto at = [&](index_t h, index_t slot) { return static_cast<std::size_t>(h * scores.tokens + slot); };
  // The best `count` of the first `n` of `scratch.slots`, whose scores stand beside them, leave: calls `f(slot)` for each.
  const auto take_best = [&](std::size_t n, index_t count, auto f) -> Status {
    const Result<TopK> found = top_k(scratch.scores.first(n), count, scratch.best, work);
    if (!found) return found.status();
    for (index_t i = 0; i < found->count; ++i)
      f(scratch.slots[static_cast<std::size_t>(scratch.best[static_cast<std::size_t>(i)])]);
    return {};
  };
  for (index_t h = 0; h < scores.heads; ++h) {
    std::size_t n = 0;
    for (index_t slot = 0; slot < scores.tokens; ++slot) {
      if (!competes(h, slot)) continue;
      scratch.open[at(h, slot)] = 1;
      scratch.scores[n] = scores.row(h)[static_cast<std::size_t>(slot)];
      scratch.slots[n++] = static_cast<slot_t>(slot);
    }
    const index_t safe = std::min(floor, left);  // a total below the floors goes to the first heads
    const auto keep = [&](slot_t slot) {
      scratch.open[at(h, slot)] = 0;
      ++out[static_cast<std::size_t>(h)];
      --left;
    };
    if (Status s = take_best(n, safe, keep); !s) return s;
  }
  std::size_t n = 0;
  for (index_t slot = 0; slot < scores.tokens; ++slot)
    for (index_t h = 0; h < scores.heads; ++h) {
      if (scratch.open[at(h, slot)] == 0) continue;
      scratch.scores[n] = scores.row(h)[static_cast<std::size_t>(slot)];
      scratch.slots[n++] = static_cast<slot_t>(h);
    }
  return take_best(n, left, [&](slot_t h) { ++out[static_cast<std::size_t>(h)]; });
}

struct AdaKVOptions {
  /// The share of the mean budget that every head keeps of its own best tokens, protected ones included.
  double safeguard = 0.2;
};

/// AdaKV (arXiv 2407.11550), algorithm 1, as kvpress has it: any policy whose KV heads share the budget of a layer. For ragged
/// caches; the schedule's numbers are those of the mean head, rounded up.
///
/// The published code masks evicted tokens and frees nothing; here they are gone. Heads are not scored on several threads and
/// not in slices: which tokens go depends on all of them.
template <class PolicyT>
class AdaKV : public PolicyT {
 public:
  /// The policy, or what is wrong with its options.
  [[nodiscard]] static Result<AdaKV> make(PolicyT policy, const AdaKVOptions& options = {}) {
    if (!(options.safeguard >= 0 && options.safeguard <= 1))
      return detail::invalid("safeguard = ", options.safeguard, ": must be between 0 and 1");
    if (!policy.scores_by_head())
      return detail::error(StatusCode::unsupported,
                           "policy: scores all heads of a layer together: none can have more than others");
    if (needs_notes(policy))
      return detail::error(StatusCode::unsupported,
                           "policy: keys remember what scoring notes (orphan_credit), and plans over all heads note nothing");
    return AdaKV(std::move(policy), options);
  }

  [[nodiscard]] const AdaKVOptions& adakv_options() const noexcept { return options_; }
  [[nodiscard]] bool scores_by_head() const noexcept { return false; }

  /// As `EvictionPolicy::due`, by the mean length of the heads.
  template <CacheReader Cache>
  [[nodiscard]] bool due(const Cache& cache) const {
    return this->eviction_on_ && !this->committed_since_token_ && this->schedule_.due(mean_state(cache));
  }
  template <CacheReader Cache>
  [[nodiscard]] index_t tokens_until_due(const Cache& cache, index_t most) const {
    if (most <= 0 || due(cache)) return 0;
    if (!this->eviction_on_) return most;
    ScheduleState state = mean_state(cache);
    state.after_prefill = false;
    for (index_t n = 1; n < most; ++n) {
      ++state.tokens;
      if (state.total++ < this->prefix()) ++state.prefix;
      state.recent = std::min(this->protection_.n_recent_kv, state.tokens - state.prefix);
      if (this->schedule_.due(state)) return n;
    }
    return most;
  }

  [[nodiscard]] WorkspaceSize workspace_size(index_t capacity) const {
    WorkspaceSize size = PolicyT::workspace_size(capacity);
    const WorkspaceSize own = detail::measure([&](Workspace& work) {
      static_cast<void>(work.take<float>(this->shape().kv_heads * capacity));
      const std::size_t inner = std::max(this->score_workspace_size(capacity).bytes, select_workspace_size(capacity).bytes);
      static_cast<void>(work.take<std::byte>(static_cast<index_t>(inner)));
    });
    return max(size, own);
  }

  /// As `EvictionPolicy::plan`. Refused where the protected tokens alone exceed the budget.
  template <CacheReader Cache>
  requires(detail::is_ragged<Cache>()) [[nodiscard]] Status plan(const Cache& cache, Workspace& work, KeepPlan& plan) const {
    if (Status s = this->check_cache(cache); !s) return s;
    const ScheduleState state = mean_state(cache);
    const index_t target = this->schedule_.target(state);
    if (target >= state.tokens) return this->plan_everything(cache, plan);
    const index_t heads = this->shape().kv_heads;
    if (const index_t fixed = all_fixed(cache); fixed > heads * target)
      return detail::invalid("the budget keeps ", heads * target, " tokens of ", heads, " heads, but ", fixed,
                             " are protected");
    return plan_to(cache, target, work, plan);
  }
  template <CacheReader Cache, class ExecutorT>
  requires(detail::is_ragged<Cache>() && Executor<std::remove_cvref_t<ExecutorT>>) [[nodiscard]] Status
      plan(const Cache& cache, std::span<Workspace> works, KeepPlan& out, ExecutorT&&) const {
    if (works.empty()) return detail::invalid("works is empty: there must be one for each worker");
    return plan(cache, works[0], out);
  }
  /// What to keep so that the heads together lose `count` tokens a head, whatever the schedule says; `plan.shortfall()` tells
  /// how many fewer it is where more are protected.
  template <CacheReader Cache>
  requires(detail::is_ragged<Cache>()) [[nodiscard]] Status
      plan_free(const Cache& cache, index_t count, Workspace& work, KeepPlan& plan) const {
    if (Status s = this->check_cache(cache); !s) return s;
    if (count < 0) return detail::invalid("count = ", count, ": must not be negative");
    const index_t tokens = mean_state(cache).tokens;
    if (count == 0) return this->plan_everything(cache, plan);
    const index_t keep = count < tokens ? tokens - count : std::min<index_t>(1, tokens);
    if (Status s = plan_to(cache, keep, work, plan); !s) return s;
    const index_t heads = this->shape().kv_heads;
    index_t missing = heads * count;
    for (index_t h = 0; h < heads; ++h) missing -= plan.num_evicted(h);
    plan.report((std::max<index_t>(0, missing) + heads - 1) / heads, plan.num_non_finite());
    return {};
  }

  /// The plan by these scores that keeps `keep` tokens of each head on average. Changes nothing but `plan`.
  template <CacheReader Cache>
  requires(detail::is_ragged<Cache>()) [[nodiscard]] Status
      select(const Cache& cache, ScoreMatrix scores, Workspace& work, KeepPlan& plan, index_t keep) const {
    if (Status s = this->check_scores(cache, scores, false); !s) return s;
    if (keep < 0) return detail::invalid("keep = ", keep, ": must not be negative");
    if (Status s = work.require(select_workspace_size(cache.num_tokens())); !s) return s;
    const Workspace::Frame frame(work);
    const index_t heads = this->shape().kv_heads;
    const std::span<const Range> ranges = this->rules_.protected_ranges();
    const auto competes = [&, head = index_t{-1}, candidates = Range{}](index_t h, index_t slot) mutable {
      if (h != head) candidates = this->candidates_of(cache, head = h);
      if (slot < candidates.first || slot >= candidates.last) return false;
      return std::none_of(ranges.begin(), ranges.end(), [&](const Range& r) {
        const position_t position = cache.position(h, slot);
        return position >= r.first && position < r.last;
      });
    };
    index_t total = heads * keep;
    index_t least = keep;  // protected tokens of the head that has fewest
    const std::span<index_t> budgets = work.take<index_t>(heads);
    for (index_t h = 0; h < heads; ++h) {
      const index_t fixed = fixed_of(cache, h);
      total -= fixed;
      least = std::min(least, fixed);
    }
    const auto floor = std::max<index_t>(0, static_cast<index_t>(static_cast<double>(keep) * options_.safeguard) - least);
    if (Status s = head_budgets(scores, competes, floor, std::max<index_t>(0, total), budgets, work); !s) return s;
    for (index_t h = 0; h < heads; ++h) budgets[static_cast<std::size_t>(h)] += fixed_of(cache, h);
    return PolicyT::select(cache, scores, work, plan, std::span<const index_t>(budgets));
  }

 private:
  [[nodiscard]] static bool needs_notes(const PolicyT& policy) {
    if constexpr (requires { policy.scorer().needs_notes(); }) return policy.scorer().needs_notes();
    return detail::takes_notes(policy.scorer());
  }
  AdaKV(PolicyT policy, const AdaKVOptions& options) : PolicyT(std::move(policy)), options_(options) {}

  [[nodiscard]] WorkspaceSize select_workspace_size(index_t tokens) const {
    return detail::measure([&](Workspace& work) {
      static_cast<void>(work.take<index_t>(this->shape().kv_heads));
      const std::size_t inner = std::max(head_budgets_workspace_size(this->shape().kv_heads, tokens).bytes,
                                         detail::selection_workspace_size(tokens).bytes);
      static_cast<void>(work.take<std::byte>(static_cast<index_t>(inner)));
    });
  }

  template <CacheReader Cache>
  [[nodiscard]] index_t fixed_of(const Cache& cache, index_t head) const {
    const Range candidates = this->candidates_of(cache, head);
    return detail::tokens_of(cache, head) - detail::num_open(cache, head, candidates, this->rules_.protected_ranges());
  }

  /// Protected tokens of all heads.
  template <CacheReader Cache>
  [[nodiscard]] index_t all_fixed(const Cache& cache) const {
    index_t fixed = 0;
    for (index_t h = 0; h < this->shape().kv_heads; ++h) fixed += fixed_of(cache, h);
    return fixed;
  }

  /// Of a head as long as all are on average.
  template <CacheReader Cache>
  [[nodiscard]] ScheduleState mean_state(const Cache& cache) const {
    index_t sum = 0;
    for (index_t h = 0; h < cache.num_kv_heads(); ++h) sum += detail::tokens_of(cache, h);
    ScheduleState state = this->state_of(cache, 0);
    state.tokens = (sum + cache.num_kv_heads() - 1) / cache.num_kv_heads();
    state.recent = std::min(this->protection_.n_recent_kv, state.tokens - state.prefix);
    return state;
  }

  template <CacheReader Cache>
  [[nodiscard]] Status plan_to(const Cache& cache, index_t keep, Workspace& work, KeepPlan& plan) const {
    const index_t tokens = cache.num_tokens();
    const index_t heads = this->shape().kv_heads;
    if (Status s = work.require(workspace_size(tokens)); !s) return s;
    const Workspace::Frame frame(work);
    const ScoreMatrix scores{work.take<float>(heads * tokens).data(), heads, tokens};
    const Result<ScoreReport> report = PolicyT::score(cache, scores, work);
    if (!report) return report.status();
    if (Status s = select(cache, scores, work, plan, keep); !s) return s;
    plan.report(plan.shortfall(), report->num_non_finite);
    return {};
  }

  AdaKVOptions options_;
};

}  // namespace beaconkv::inline v0
