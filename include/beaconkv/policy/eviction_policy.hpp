// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// What all policies have in common: observe, score, select, commit. A policy is an observer, a scorer, a schedule and
/// protection; `RecentWindow`, `SnapKV`, `RPC`, `RKV` and `BeaconKV` are named choices of these.

#include <algorithm>
#include <optional>
#include <span>
#include <utility>

#include "beaconkv/policy/policy_scoring.hpp"
#include "beaconkv/policy/selection.hpp"

namespace beaconkv::inline v0 {

/// The eviction policy of one layer of one sequence. A value: a copy is a fork, an assignment goes back to a saved state.
///
/// The engine calls, in this order: `prefill` with the prompt's queries; then for each decoded token `observe`, and where
/// `due` says so `evict` (or `plan`, its own way of applying the plan, `commit`). One thread uses a policy at a time; const
/// calls are safe together as long as each has a workspace of its own.
///
/// Queries come pre-RoPE (`observe`, `prefill`) if the policy was made with a `RopeTable`, or as the attention used them
/// (`observe_rotated`, `prefill_rotated`). With a table both work: rotated ones are turned back. Nothing allocates after
/// construction.
template <Observer ObserverT, class ScorerT, Schedule ScheduleT>
class EvictionPolicy : public PolicyScoring<ObserverT, ScorerT, ScheduleT> {
 public:
  using Base = PolicyScoring<ObserverT, ScorerT, ScheduleT>;
  using typename Base::Parts;

  /// The policy, or what is wrong with its parts.
  [[nodiscard]] static Result<EvictionPolicy> make(const Shape& shape, const Parts& parts) {
    if (Status s = validate_parts(shape, parts); !s) return s;
    return EvictionPolicy(shape, parts);
  }

  /// True where the schedule wants an eviction now. False between a commit and the next token. O(log L).
  template <CacheReader Cache>
  [[nodiscard]] bool due(const Cache& cache) const {
    return eviction_on_ && !committed_since_token_ && schedule_.due(state_of(cache, longest_head(cache)));
  }

  /// After how many more decoded tokens an eviction will be due, at most `most`; 0: now. As many may be drafted (speculative
  /// decoding) before an eviction would come later than it does token by token. O(most + log L).
  template <CacheReader Cache>
  [[nodiscard]] index_t tokens_until_due(const Cache& cache, index_t most) const {
    if (most <= 0 || due(cache)) return 0;
    if (!eviction_on_) return most;
    ScheduleState state = state_of(cache, longest_head(cache));
    state.after_prefill = false;
    for (index_t n = 1; n < most; ++n) {
      ++state.tokens;
      if (state.total++ < this->prefix()) ++state.prefix;
      state.recent = std::min(protection_.n_recent_kv, state.tokens - state.prefix);
      if (schedule_.due(state)) return n;
    }
    return most;
  }

  /// Scratch and plan for caches of up to `capacity` tokens and prompts of up to `capacity` tokens. Policies of several layers
  /// may share one workspace, one after the other.
  [[nodiscard]] WorkspaceSize workspace_size(index_t capacity) const {
    WorkspaceSize size = detail::measure([&](Workspace& work) {
      static_cast<void>(work.take<float>(shape_.kv_heads * capacity));
      const std::size_t inner =
          std::max(this->score_workspace_size(capacity).bytes, detail::selection_workspace_size(capacity).bytes);
      static_cast<void>(work.take<std::byte>(static_cast<index_t>(inner)));
    });
    size = max(size, observer_.prefill_workspace_size(capacity));
    size.plan_sets = shape_.kv_heads;
    size.plan_tokens = capacity;
    return size;
  }
  /// The plan that keeps `keep` tokens of each head by these scores (default: what the schedule aims at). Changes nothing but
  /// `plan`, and, where all heads keep one set, row 0 of `scores`. There the rows may also be those of all tensor-parallel
  /// ranks, in head order, or the one that they became (`reduce_heads`). Protected tokens beyond `keep` are kept too and
  /// reported as the plan's shortfall.
  template <CacheReader Cache>
  [[nodiscard]] Status select(const Cache& cache, ScoreMatrix scores, Workspace& work, KeepPlan& plan,
                              std::optional<index_t> keep = {}) const {
    if (keep && *keep < 0) return detail::invalid("keep = ", *keep, ": must not be negative");
    const auto target = [&](index_t h) { return keep.value_or(schedule_.target(state_of(cache, h))); };
    return select_each(cache, scores, work, plan, target, all_candidates(cache));
  }
  /// The same with a number for each head of a ragged cache.
  template <CacheReader Cache>
  requires(detail::is_ragged<Cache>()) [[nodiscard]] Status
      select(const Cache& cache, ScoreMatrix scores, Workspace& work, KeepPlan& plan, std::span<const index_t> keep) const {
    if (static_cast<index_t>(keep.size()) != shape_.kv_heads)
      return detail::invalid("keep has ", keep.size(), " entries: one for each of ", shape_.kv_heads, " KV heads");
    for (std::size_t h = 0; h < keep.size(); ++h)
      if (keep[h] < 0) return detail::invalid("keep[", h, "] = ", keep[h], ": must not be negative");
    const auto target = [&](index_t h) { return keep[static_cast<std::size_t>(h)]; };
    return select_each(cache, scores, work, plan, target, all_candidates(cache));
  }

  /// `score` and `select`: what to keep now, by the schedule. A cache within its budget keeps everything. Changes nothing but
  /// `plan`, and what a scorer notes while it scores (`score`). Refused where the protected tokens alone exceed the budget.
  template <CacheReader Cache>
  [[nodiscard]] Status plan(const Cache& cache, Workspace& work, KeepPlan& plan) const {
    return plan_by(*this, cache, work, plan);
  }
  template <CacheReader Cache>
  [[nodiscard]] Status plan(const Cache& cache, Workspace& work, KeepPlan& plan) requires(Base::may_take_notes) {
    return plan_by(*this, cache, work, plan);
  }
  /// The same with the KV heads spread over threads, where scores are formed head by head; the same bits. Worker `i` uses
  /// `works[i]`, each as large as `workspace_size` says.
  template <CacheReader Cache, class ExecutorT>
  requires Executor<std::remove_cvref_t<ExecutorT>>
  [[nodiscard]] Status plan(const Cache& cache, std::span<Workspace> works, KeepPlan& plan, ExecutorT&& executor) const {
    return plan_by(*this, cache, works, plan, executor);
  }
  template <CacheReader Cache, class ExecutorT>
  requires(Executor<std::remove_cvref_t<ExecutorT>>&& Base::may_take_notes) [[nodiscard]] Status
      plan(const Cache& cache, std::span<Workspace> works, KeepPlan& plan, ExecutorT&& executor) {
    return plan_by(*this, cache, works, plan, executor);
  }
  /// The same by scores that were formed before: `score(out)` writes them, and only `candidates(head)` compete, slots that all
  /// have a score. For evictions whose scoring is spread over several steps.
  template <CacheReader Cache, class Candidates, class Score>
  [[nodiscard]] Status plan_scored(const Cache& cache, Workspace& work, KeepPlan& plan, Candidates candidates,
                                   Score score) const {
    static_assert(!is_per_sequence<Cache>, "one set for all layers: score every layer and select once, as Sequence does");
    if (Status s = check_cache(cache); !s) return s;
    bool anything_to_do = false;
    for (index_t h = 0; h < heads_of(cache); ++h) {
      const ScheduleState state = state_of(cache, h);
      const index_t target = schedule_.target(state);
      if (target >= state.tokens) continue;
      anything_to_do = true;
      const Range competing = candidates(h);
      const index_t fixed = state.tokens - detail::num_open(cache, h, competing, rules_.protected_ranges());
      const index_t newer =
          std::max<index_t>(0, state.tokens - state.recent - competing.last);  // than the scores: not held against it
      if (fixed - newer > target)
        return detail::invalid("the budget keeps ", target, " of ", state.tokens, " tokens, but ", fixed,
                               " are protected (prefix ", state.prefix, ", n_recent_kv ", state.recent, ", ranges ",
                               rules_.protected_ranges().size(), ")");
    }
    // A scorer that follows plans looks at a cache of exactly its budget, too, where an eviction is due.
    if (!anything_to_do && !(follows_all_plans && due(cache))) return plan_everything(cache, plan);
    return plan_to(
        cache, work, plan, [&](index_t h) { return schedule_.target(state_of(cache, h)); }, candidates, score);
  }

  /// What to keep so that `count` tokens of each head go, whatever the schedule says. Where protection allows fewer, those
  /// go and the plan's `shortfall` tells how many are missing.
  template <CacheReader Cache>
  [[nodiscard]] Status plan_free(const Cache& cache, index_t count, Workspace& work, KeepPlan& plan) const {
    return plan_free_by(*this, cache, count, work, plan);
  }
  template <CacheReader Cache>
  [[nodiscard]] Status plan_free(const Cache& cache, index_t count, Workspace& work,
                                 KeepPlan& plan) requires(Base::may_take_notes) {
    return plan_free_by(*this, cache, count, work, plan);
  }

  /// What `commit` would refuse: ask before the plan is applied.
  [[nodiscard]] Status check_commit(const KeepPlan& plan) const {
    if (plan.sets() == 0) return detail::error(StatusCode::stale_plan, "commit: the plan is empty");
    if (plan.sets() != 1 && plan.sets() != shape_.kv_heads)
      return detail::invalid("commit: the plan has ", plan.sets(), " sets: must be 1 or shape.kv_heads = ", shape_.kv_heads);
    if (committed_epoch_ && *committed_epoch_ == plan.epoch() && !plan.keeps_all())
      return detail::error(StatusCode::stale_plan, "commit: this plan was committed before");
    return {};
  }
  /// After the plan was applied: queries and per-slot state follow. Once for each plan.
  [[nodiscard]] Status commit(const KeepPlan& plan) {
    if (Status s = check_commit(plan); !s) return s;
    if (plan.keeps_all() && plan.candidates().size() == 0) return {};  // within the budget: nothing competed, nothing follows
    if (Status s = observer_.commit(); !s) return s;
    if constexpr (follows_plans) scorer_.commit(plan, shape_);
    schedule_.committed();
    committed_epoch_ = plan.epoch();
    committed_since_token_ = true;
    return {};
  }

 protected:
  EvictionPolicy(const Shape& shape, const Parts& parts) : Base(shape, parts) {}
  using Base::validate_parts;

  using Base::after_prefill_;
  using Base::check_cache;
  using Base::check_scores;
  using Base::committed_epoch_;
  using Base::committed_since_token_;
  using Base::eviction_on_;
  using Base::next_position_;
  using Base::observer_;
  using Base::protection_;
  using Base::rope_;
  using Base::rules_;
  using Base::schedule_;
  using Base::scorer_;
  using Base::shape_;
  using Base::shared_reduce_;
  using Base::state_of;

 private:
  static constexpr bool follows_plans = requires(ScorerT scorer, const KeepPlan& plan, const Shape& shape) {
    scorer.commit(plan, shape);
  };
  static constexpr bool follows_all_plans = follows_plans && !requires { requires ScorerT::follows_evictions_only; };

  template <class Cache>
  static constexpr bool is_per_sequence = requires {
    requires Cache::granularity == Granularity::per_sequence;
  };

  /// How many sets a plan for the cache has.
  template <CacheReader Cache>
  [[nodiscard]] index_t heads_of(const Cache&) const noexcept {
    return detail::keeps_one_set<Cache>() ? 1 : shape_.kv_heads;
  }

  template <CacheReader Cache>
  [[nodiscard]] index_t longest_head(const Cache& cache) const noexcept {
    index_t longest = 0;
    if constexpr (detail::is_ragged<Cache>())
      for (index_t h = 1; h < cache.num_kv_heads(); ++h)
        if (cache.num_tokens(h) > cache.num_tokens(longest)) longest = h;
    return longest;
  }

  template <CacheReader Cache>
  [[nodiscard]] auto all_candidates(const Cache& cache) const {
    return [this, &cache](index_t head) { return this->candidates_of(cache, head); };
  }

  /// Where the scorer says that it scores protected slots, too (`scores_every_slot`), the plan tells their scores.
  static void note_scores(std::span<const float> scores, index_t head, KeepPlan& plan) {
    if constexpr (requires { requires ScorerT::scores_every_slot; })
      for (std::size_t i = 0; i < plan.kept(head).size(); ++i)
        plan.last_scores()[i] = scores[static_cast<std::size_t>(plan.kept(head)[i])];
  }

  template <CacheReader Cache, class Target, class Candidates>
  [[nodiscard]] Status select_each(const Cache& cache, ScoreMatrix scores, Workspace& work, KeepPlan& plan, Target target,
                                   Candidates candidates_of_head) const {
    constexpr bool one_set = detail::keeps_one_set<Cache>();
    if (Status s = check_scores(cache, scores, one_set); !s) return s;
    if (Status s = work.require(detail::selection_workspace_size(cache.num_tokens())); !s) return s;
    if (!one_set && !rules_.boundaries().empty())
      return detail::error(StatusCode::unsupported, "boundaries (", rules_.boundaries().size(),
                           "): units go whole only from a cache that keeps one set for all heads");
    if (one_set) reduce_heads(scores, shared_reduce_);
    plan.start(cache.epoch(), cache.num_tokens(), candidates_of_head(longest_head(cache)));
    index_t shortfall = 0;
    for (index_t h = 0; h < heads_of(cache); ++h) {
      const Range candidates = candidates_of_head(h);
      if (plan.records_scores()) detail::record_scores(cache, h, scores.row(h), candidates, rules_.protected_ranges(), plan);
      if (!rules_.boundaries().empty()) {
        shortfall = detail::select_units(cache, scores.row(h), candidates, rules_.protected_ranges(), rules_.boundaries(),
                                         target(h), plan, work);
        note_scores(scores.row(h), h, plan);
        continue;
      }
      const Result<index_t> beyond =
          detail::select_head(cache, h, scores.row(h), candidates, rules_.protected_ranges(), target(h), plan, work);
      if (!beyond) return beyond.status();
      shortfall = std::max(shortfall, *beyond);
      note_scores(scores.row(h), h, plan);
    }
    plan.report(shortfall, 0);
    return {};
  }

  template <CacheReader Cache, class Target, class Candidates, class Score>
  [[nodiscard]] Status plan_to(const Cache& cache, Workspace& work, KeepPlan& plan, Target target, Candidates candidates,
                               Score score) const {
    const index_t tokens = cache.num_tokens();
    if (Status s = work.require(workspace_size(tokens)); !s) return s;
    const Workspace::Frame frame(work);
    const ScoreMatrix scores{work.take<float>(shape_.kv_heads * tokens).data(), shape_.kv_heads, tokens};
    const Result<ScoreReport> report = score(scores);
    if (!report) return report.status();
    if (Status s = select_each(cache, scores, work, plan, target, candidates); !s) return s;
    plan.report(plan.shortfall(), report->num_non_finite);
    return {};
  }

  // `Self` is this class, const where nothing is noted.

  template <class Self, CacheReader Cache>
  [[nodiscard]] static Status plan_by(Self& self, const Cache& cache, Workspace& work, KeepPlan& plan) {
    return self.plan_scored(cache, work, plan, self.all_candidates(cache),
                            [&](ScoreMatrix out) { return self.score(cache, out, work); });
  }
  template <class Self, CacheReader Cache, class ExecutorT>
  [[nodiscard]] static Status plan_by(Self& self, const Cache& cache, std::span<Workspace> works, KeepPlan& plan,
                                      ExecutorT& executor) {
    if (works.empty()) return detail::invalid("works is empty: there must be one for each worker");
    return self.plan_scored(cache, works[0], plan, self.all_candidates(cache), [&](ScoreMatrix out) {
      return self.scores_by_head() ? self.score(cache, out, works, executor) : self.score(cache, out, works[0]);
    });
  }
  template <class Self, CacheReader Cache>
  [[nodiscard]] static Status plan_free_by(Self& self, const Cache& cache, index_t count, Workspace& work, KeepPlan& plan) {
    if (Status s = self.check_cache(cache); !s) return s;
    if (count < 0) return detail::invalid("count = ", count, ": must not be negative");
    static_assert(!is_per_sequence<Cache>, "one set for all layers: score every layer and select once, as Sequence does");
    if (count == 0) return self.plan_everything(cache, plan);
    const auto target = [&](index_t h) {
      const index_t tokens = detail::tokens_of(cache, h);
      return count < tokens ? tokens - count : std::min<index_t>(1, tokens);  // no cache ends up empty
    };
    const auto score = [&](ScoreMatrix out) { return self.score(cache, out, work); };
    if (Status s = self.plan_to(cache, work, plan, target, self.all_candidates(cache), score); !s) return s;
    index_t missing = 0;
    for (index_t h = 0; h < plan.sets(); ++h) missing = std::max(missing, count - plan.num_evicted(h));
    plan.report(missing, plan.num_non_finite());
    return {};
  }

 protected:
  template <CacheReader Cache>
  [[nodiscard]] Status plan_everything(const Cache& cache, KeepPlan& plan) const {
    plan.start(cache.epoch(), cache.num_tokens(), {});
    const index_t sets = detail::is_ragged<Cache>() ? shape_.kv_heads : 1;
    for (index_t h = 0; h < sets; ++h) {
      const index_t tokens = detail::tokens_of(cache, h);
      const std::span<slot_t> all = plan.add_set(tokens, tokens);
      for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<slot_t>(i);
    }
    return {};
  }
};

}  // namespace beaconkv::inline v0
