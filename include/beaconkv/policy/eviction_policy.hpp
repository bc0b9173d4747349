// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// What all policies have in common: observe, score, select, commit. A policy is an observer, a scorer, a schedule and
/// protection; `RecentWindow`, `SnapKV`, `RPC`, `RKV` and `BeaconKV` are named choices of these.

#include <algorithm>
#include <limits>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "beaconkv/algorithm/rope.hpp"
#include "beaconkv/memory/compact.hpp"
#include "beaconkv/policy/observer.hpp"
#include "beaconkv/policy/schedule.hpp"
#include "beaconkv/policy/scorer.hpp"
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
class EvictionPolicy {
 public:
  /// Everything that a policy is made of.
  struct Parts {
    typename ObserverT::Options observer{};
    ScorerT scorer{};
    ScheduleT schedule{};
    Protection protection{};
    RopeTable rope{};  ///< empty: queries are taken rotated
    /// How scores of several heads become one where the cache keeps one set for all of them.
    Reduce shared_reduce = Reduce::mean;
  };

  /// The policy, or what is wrong with its parts.
  [[nodiscard]] static Result<EvictionPolicy> make(const Shape& shape, const Parts& parts) {
    if (Status s = validate_parts(shape, parts); !s) return s;
    return EvictionPolicy(shape, parts);
  }

  [[nodiscard]] const Shape& shape() const noexcept { return shape_; }
  [[nodiscard]] const ObserverT& observer() const noexcept { return observer_; }
  [[nodiscard]] const ScorerT& scorer() const noexcept { return scorer_; }
  [[nodiscard]] const ScheduleT& schedule() const noexcept { return schedule_; }
  /// The position that the next token must at least have.
  [[nodiscard]] position_t next_position() const noexcept { return next_position_; }
  /// Positions below this are protected.
  [[nodiscard]] position_t prefix() const noexcept { return protection_.n_prefix ? *protection_.n_prefix : prompt_end_; }
  /// Bytes that the policy itself holds: remembered queries and per-slot state.
  [[nodiscard]] std::size_t state_bytes() const noexcept {
    std::size_t bytes = observer_.state_bytes();
    if constexpr (requires { scorer_.state_bytes(); }) bytes += scorer_.state_bytes();
    return bytes;
  }

  /// Queries of a prompt (or of its next chunk), pre-RoPE, at `first_position` and the positions behind it.
  [[nodiscard]] Status prefill(const QueryView& queries, Workspace& work, std::optional<position_t> first_position = {}) {
    return take_prompt(queries, work, first_position, false);
  }
  /// The same with queries as the attention used them.
  [[nodiscard]] Status prefill_rotated(const QueryView& queries, Workspace& work,
                                       std::optional<position_t> first_position = {}) {
    return take_prompt(queries, work, first_position, true);
  }
  /// A prompt of `tokens`, for a policy that looks at no query.
  [[nodiscard]] Status prefill_tokens(index_t tokens) requires(!ObserverT::needs_queries) {
    if (tokens < 0) return detail::invalid("tokens = ", tokens, ": must not be negative");
    note_prompt(next_position_, tokens);
    return {};
  }

  /// The queries `[query_heads][head_dim]` of one decoded token, pre-RoPE, and its true position.
  [[nodiscard]] Status observe(std::span<const float> queries, position_t position) {
    return take_token(queries, position, false);
  }
  /// The same with queries as the attention used them.
  [[nodiscard]] Status observe_rotated(std::span<const float> queries, position_t position) {
    return take_token(queries, position, true);
  }

  /// Protects the positions `[range.first, range.last)` from now on. Protected tokens still take part in the softmax and the
  /// pool. Allocates.
  [[nodiscard]] Status protect(Range range) {
    if (range.first < 0 || range.last <= range.first)
      return detail::invalid("range = [", range.first, ", ", range.last, "): must be ascending and not negative");
    for (const Range& r : protected_ranges_)
      if (range.first < r.last && r.first < range.last)
        return detail::invalid("range = [", range.first, ", ", range.last, "): overlaps the protected [", r.first, ", ", r.last,
                               ")");
    const auto behind =
        std::find_if(protected_ranges_.begin(), protected_ranges_.end(), [&](const Range& r) { return r.first > range.first; });
    protected_ranges_.insert(behind, range);
    return {};
  }

  /// True where the schedule wants an eviction now. False between a commit and the next token. O(log L).
  template <CacheReader Cache>
  [[nodiscard]] bool due(const Cache& cache) const {
    return !committed_since_token_ && schedule_.due(state_of(cache));
  }

  /// Scratch and plan for caches of up to `capacity` tokens and prompts of up to `capacity` tokens. Policies of several layers
  /// may share one workspace, one after the other.
  [[nodiscard]] WorkspaceSize workspace_size(index_t capacity) const {
    WorkspaceSize size = detail::measure([&](Workspace& work) {
      static_cast<void>(work.take<float>(shape_.kv_heads * capacity));
      const std::size_t inner =
          std::max(score_workspace_size(capacity).bytes, detail::selection_workspace_size(capacity).bytes);
      static_cast<void>(work.take<std::byte>(static_cast<index_t>(inner)));
    });
    size = max(size, observer_.prefill_workspace_size(capacity));
    size.plan_sets = shape_.kv_heads;
    size.plan_tokens = capacity;
    return size;
  }
  /// Scratch of `score` alone, over at most `tokens` cached tokens.
  [[nodiscard]] WorkspaceSize score_workspace_size(index_t tokens) const {
    return detail::measure([&](Workspace& work) {
      take_observations(work, observer_.max_rows());
      const std::size_t inner =
          std::max(observer_.workspace_size().bytes, scorer_.workspace_size(shape_, observer_.max_rows(), tokens).bytes);
      static_cast<void>(work.take<std::byte>(static_cast<index_t>(inner)));
    });
  }

  /// Scores of all candidates, to `out` (`kv_heads` x the cache's tokens). Separate from `select`, so that tensor-parallel
  /// ranks can reduce in between. Changes nothing.
  template <CacheReader Cache>
  [[nodiscard]] Result<ScoreReport> score(const Cache& cache, ScoreMatrix out, Workspace& work) const {
    static_assert(Scorer<ScorerT, Cache>);
    if (Status s = check_scores(cache, out); !s) return s;
    if (Status s = work.require(score_workspace_size(cache.num_tokens())); !s) return s;
    const Workspace::Frame frame(work);
    const index_t rows = observer_.rows();
    const auto [queries, positions] = take_observations(work, rows);
    if (Status s = observer_.write_rows(rope(), next_position_ - 1, queries.data(), positions.data(), work); !s) return s;
    const Observations observations{queries.data(), positions, shape_.query_heads, rows, shape_.head_dim};
    return scorer_.score(cache, observations, candidates_of(cache), out, work);
  }

  /// The plan that keeps `keep` tokens of each head by these scores (default: what the schedule aims at). Changes nothing but
  /// `plan`, and, where all heads keep one set, row 0 of `scores`. Protected tokens beyond `keep` are kept too and reported as
  /// the plan's shortfall.
  template <CacheReader Cache>
  [[nodiscard]] Status select(const Cache& cache, ScoreMatrix scores, Workspace& work, KeepPlan& plan,
                              std::optional<index_t> keep = {}) const {
    if (Status s = check_scores(cache, scores); !s) return s;
    const index_t target = keep.value_or(schedule_.target(state_of(cache)));
    if (target < 0) return detail::invalid("keep = ", target, ": must not be negative");
    if (Status s = work.require(detail::selection_workspace_size(cache.num_tokens())); !s) return s;

    const bool one_set = detail::keeps_one_set<Cache>();
    if (one_set) detail::reduce_score_rows(scores, shared_reduce_);
    const Range candidates = candidates_of(cache);
    plan.start(cache.epoch(), cache.num_tokens(), candidates);
    index_t shortfall = 0;
    for (index_t h = 0; h < (one_set ? 1 : shape_.kv_heads); ++h) {
      const Result<index_t> beyond =
          detail::select_head(cache, h, scores.row(h), candidates, protected_ranges_, target, plan, work);
      if (!beyond) return beyond.status();
      shortfall = std::max(shortfall, *beyond);
    }
    plan.report(shortfall, 0);
    return {};
  }

  /// `score` and `select`: what to keep now, by the schedule. A cache within its budget keeps everything. Changes nothing but
  /// `plan`. Refused where the protected tokens alone exceed the budget.
  template <CacheReader Cache>
  [[nodiscard]] Status plan(const Cache& cache, Workspace& work, KeepPlan& plan) const {
    if (Status s = check_cache(cache); !s) return s;
    const ScheduleState state = state_of(cache);
    const index_t target = schedule_.target(state);
    const Range open = candidates_of(cache);
    for (index_t h = 0; target < state.tokens && h < (detail::keeps_one_set<Cache>() ? 1 : shape_.kv_heads); ++h) {
      const index_t fixed = state.tokens - detail::num_open(cache, h, open, protected_ranges_);
      if (fixed > target)
        return detail::invalid("the budget keeps ", target, " of ", state.tokens, " tokens, but ", fixed,
                               " are protected (prefix ", state.prefix, ", n_recent_kv ", state.recent, ", ranges ",
                               protected_ranges_.size(), ")");
    }
    // A scorer that follows plans looks at a cache of exactly its budget, too, where an eviction is due.
    if (target == state.tokens && !(follows_plans && due(cache))) return plan_everything(cache, plan);
    return plan_to(cache, target, work, plan);
  }

  /// What to keep so that `count` tokens of each head go, whatever the schedule says. Where protection allows fewer, those
  /// go and the plan's `shortfall` tells how many are missing.
  template <CacheReader Cache>
  [[nodiscard]] Status plan_free(const Cache& cache, index_t count, Workspace& work, KeepPlan& plan) const {
    if (Status s = check_cache(cache); !s) return s;
    if (count < 0) return detail::invalid("count = ", count, ": must not be negative");
    if (count == 0) return plan_everything(cache, plan);
    const index_t tokens = cache.num_tokens();
    const index_t target = count < tokens ? tokens - count : std::min<index_t>(1, tokens);  // no cache ends up empty
    if (Status s = plan_to(cache, target, work, plan); !s) return s;
    plan.report(std::max<index_t>(0, count - plan.num_evicted(0)), plan.num_non_finite());
    return {};
  }

  /// After the plan was applied: queries and per-slot state follow. Once for each plan.
  [[nodiscard]] Status commit(const KeepPlan& plan) {
    if (plan.sets() == 0) return detail::error(StatusCode::stale_plan, "commit: the plan is empty");
    if (plan.keeps_all() && plan.candidates().size() == 0) return {};  // within the budget: nothing competed, nothing follows
    if (committed_epoch_ && *committed_epoch_ == plan.epoch() && !plan.keeps_all())
      return detail::error(StatusCode::stale_plan, "commit: this plan was committed before");
    if (Status s = observer_.commit(); !s) return s;
    if constexpr (follows_plans) scorer_.commit(plan, shape_);
    schedule_.committed();
    committed_epoch_ = plan.epoch();
    committed_since_token_ = true;
    return {};
  }

 protected:
  EvictionPolicy(const Shape& shape, const Parts& parts)
      : shape_(shape),
        observer_(shape, parts.observer),
        scorer_(parts.scorer),
        schedule_(parts.schedule),
        protection_(parts.protection),
        rope_(parts.rope),
        shared_reduce_(parts.shared_reduce) {}

  [[nodiscard]] static Status validate_parts(const Shape& shape, const Parts& parts) {
    if (Status s = validate(shape); !s) return s;
    if (Status s = validate(parts.observer, shape); !s) return s;
    if (Status s = parts.scorer.validate(shape); !s) return s;
    if (Status s = validate(parts.protection); !s) return s;
    if (Status s = parts.schedule.validate(parts.protection.n_prefix, parts.protection.n_recent_kv); !s) return s;
    if (ObserverT::needs_rope && parts.rope.empty()) return detail::invalid("rope: this policy needs a RopeTable");
    if (!parts.rope.empty() && parts.rope.head_dim() != shape.head_dim)
      return detail::invalid("rope.head_dim = ", parts.rope.head_dim(), ": must be shape.head_dim = ", shape.head_dim);
    return {};
  }

 private:
  static constexpr bool follows_plans = requires(ScorerT scorer, const KeepPlan& plan, const Shape& shape) {
    scorer.commit(plan, shape);
  };

  /// Scratch for the queries and the positions of `rows` rows of every query head.
  std::pair<std::span<float>, std::span<position_t>> take_observations(Workspace& work, index_t rows) const {
    const std::span<float> queries = work.take<float>(shape_.query_heads * rows * shape_.head_dim);
    return {queries, work.take<position_t>(shape_.query_heads * rows)};
  }

  [[nodiscard]] const RopeTable* rope() const noexcept { return rope_.empty() ? nullptr : &rope_; }

  template <CacheReader Cache>
  [[nodiscard]] ScheduleState state_of(const Cache& cache) const {
    const index_t tokens = cache.num_tokens();
    const index_t prefix_slots = tokens > 0 ? detail::slot_at_or_behind(cache, 0, prefix()) : 0;
    return {tokens, prefix_slots, std::min(protection_.n_recent_kv, tokens - prefix_slots),
            static_cast<index_t>(next_position_), after_prefill_};
  }

  template <CacheReader Cache>
  [[nodiscard]] Range candidates_of(const Cache& cache) const {
    const ScheduleState state = state_of(cache);
    index_t first = state.prefix;
    if constexpr (requires { cache.pinned_prefix(); }) first = std::max(first, cache.pinned_prefix());
    return {first, std::max(first, state.tokens - state.recent)};
  }

  template <CacheReader Cache>
  [[nodiscard]] Status check_cache(const Cache& cache) const {
    if (cache.num_kv_heads() != shape_.kv_heads)
      return detail::invalid("cache has ", cache.num_kv_heads(), " KV heads: shape.kv_heads = ", shape_.kv_heads);
    if (ObserverT::needs_queries && cache.key_dim() != shape_.head_dim)
      return detail::invalid("cache has keys of ", cache.key_dim(), ": shape.head_dim = ", shape_.head_dim);
    return {};
  }

  template <CacheReader Cache>
  [[nodiscard]] Status check_scores(const Cache& cache, const ScoreMatrix& scores) const {
    if (Status s = check_cache(cache); !s) return s;
    if (scores.heads == shape_.kv_heads && scores.tokens == cache.num_tokens()) return {};
    return detail::invalid("scores are [", scores.heads, "][", scores.tokens, "]: the cache has [", shape_.kv_heads, "][",
                           cache.num_tokens(), "]");
  }

  template <CacheReader Cache>
  [[nodiscard]] Status plan_to(const Cache& cache, index_t target, Workspace& work, KeepPlan& plan) const {
    const index_t tokens = cache.num_tokens();
    if (Status s = work.require(workspace_size(tokens)); !s) return s;
    const Workspace::Frame frame(work);
    const ScoreMatrix scores{work.take<float>(shape_.kv_heads * tokens).data(), shape_.kv_heads, tokens};
    const Result<ScoreReport> report = score(cache, scores, work);
    if (!report) return report.status();
    if (Status s = select(cache, scores, work, plan, target); !s) return s;
    plan.report(plan.shortfall(), report->num_non_finite);
    return {};
  }

  template <CacheReader Cache>
  [[nodiscard]] static Status plan_everything(const Cache& cache, KeepPlan& plan) {
    plan.start(cache.epoch(), cache.num_tokens(), {});
    const std::span<slot_t> all = plan.add_set(cache.num_tokens());
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<slot_t>(i);
    return {};
  }

  void note_prompt(position_t first_position, index_t tokens) {
    if (!decoded_) prompt_end_ = first_position + tokens;
    next_position_ = first_position + tokens;
    after_prefill_ = true;
    committed_since_token_ = false;
  }

  [[nodiscard]] Status check_queries(index_t heads, index_t dim, position_t position, index_t tokens, bool rotated) const {
    if (heads != shape_.query_heads || dim != shape_.head_dim)
      return detail::invalid("queries have ", heads, " heads of ", dim, ": the shape has ", shape_.query_heads, " of ",
                             shape_.head_dim);
    if (!rotated && rope_.empty() && ObserverT::needs_queries)
      return detail::error(StatusCode::unsupported,
                           "pre-RoPE queries: this policy was made without a RopeTable, use the _rotated call");
    if (position < next_position_)
      return detail::error(StatusCode::out_of_order, "position = ", position, ": must be at least ", next_position_);
    if (position > std::numeric_limits<position_t>::max() - tokens)
      return detail::invalid("position = ", position, ": leaves no position for what follows");
    return {};
  }

  [[nodiscard]] Status take_prompt(const QueryView& queries, Workspace& work, std::optional<position_t> first_position,
                                   bool rotated) {
    if (queries.tokens < 0) return detail::invalid("queries.tokens = ", queries.tokens, ": must not be negative");
    const position_t first = first_position.value_or(next_position_);
    if (Status s = check_queries(queries.heads, queries.dim, first, queries.tokens, rotated); !s) return s;
    if (Status s = observer_.prefill({queries, first, rotated ? rope() : nullptr}, work); !s) return s;
    note_prompt(first, queries.tokens);
    return {};
  }

  [[nodiscard]] Status take_token(std::span<const float> queries, position_t position, bool rotated) {
    const auto size = static_cast<index_t>(queries.size());
    if (size % shape_.query_heads != 0 && ObserverT::needs_queries)
      return detail::invalid("queries have ", size, " numbers: the shape has ", shape_.query_heads, " heads of ",
                             shape_.head_dim);
    const index_t dim = ObserverT::needs_queries ? size / shape_.query_heads : shape_.head_dim;
    if (Status s = check_queries(shape_.query_heads, dim, position, 1, rotated); !s) return s;
    const QueryView view = QueryView::token_major(queries.data(), 1, shape_.query_heads, shape_.head_dim);
    if (Status s = observer_.observe({view, position, rotated ? rope() : nullptr}); !s) return s;
    next_position_ = position + 1;
    after_prefill_ = false;
    committed_since_token_ = false;
    decoded_ = true;
    return {};
  }

  Shape shape_;
  ObserverT observer_;
  ScorerT scorer_;
  ScheduleT schedule_;
  Protection protection_;
  std::vector<Range> protected_ranges_;  // of positions, ascending
  RopeTable rope_;
  Reduce shared_reduce_;
  position_t next_position_ = 0;
  position_t prompt_end_ = 0;
  bool after_prefill_ = false;
  bool decoded_ = false;
  bool committed_since_token_ = false;
  std::optional<std::uint64_t> committed_epoch_{};
};

/// What an `evict` did, in tokens of each head.
struct EvictionReport {
  index_t evicted = 0;
  index_t kept = 0;
  index_t num_non_finite = 0;  ///< key and query rows with a NaN or infinity that scoring met
};

/// One whole eviction: plan, compact in place, commit. `work.plan()` holds the plan afterwards. On an error cache and policy
/// are as before. Does not ask `due`: a cache within its budget is left alone, bit for bit.
template <class Policy, CacheBuffer Cache>
[[nodiscard]] Result<EvictionReport> evict(Policy& policy, Cache& cache, Workspace& work) {
  KeepPlan& plan = work.plan();
  if (Status s = policy.plan(cache, work, plan); !s) return s;
  if (Status s = compact(cache, plan); !s) return s;
  if (Status s = policy.commit(plan); !s) return s;
  return EvictionReport{plan.num_evicted(0), plan.num_kept(0), plan.num_non_finite()};
}

}  // namespace beaconkv::inline v0
