// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// From what a policy remembers to scores: the layer as a whole, head by head, on one thread or on several.

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>

#include "beaconkv/executor.hpp"
#include "beaconkv/policy/policy_state.hpp"
#include "beaconkv/policy/rotary_view.hpp"

namespace beaconkv::inline v0 {

namespace detail {

template <class Scorer>
[[nodiscard]] bool needs_all_heads(const Scorer& scorer) {
  if constexpr (requires { scorer.needs_all_heads(); }) return scorer.needs_all_heads();
  static_cast<void>(scorer);
  return false;
}

/// Whether the scorer may take notes while it scores (`Scorer`).
template <class Scorer>
concept NoteTaker = requires(Scorer scorer, const Scorer& view, const Shape& shape, index_t n, std::uint64_t epoch) {
  { view.takes_notes() } -> std::same_as<bool>;
  scorer.reserve(shape, n, n);
  scorer.noted(epoch);
};

/// Whether the observer tells where its leading rows were observed.
template <class ObserverT>
concept ShowsTags = requires(const ObserverT& observer, const RopeTable* rope, position_t now, Range heads, float* out,
                             position_t* to, Workspace& work) {
  { observer.num_beacons() } -> std::same_as<index_t>;
  { observer.write_rows(rope, now, heads, out, to, work, to) } -> std::same_as<Status>;
};

template <class Scorer>
[[nodiscard]] constexpr bool reads_keys() {
  if constexpr (requires { Scorer::reads_keys; }) return Scorer::reads_keys;
  return false;
}

template <class Scorer>
[[nodiscard]] bool takes_notes(const Scorer& scorer) {
  if constexpr (NoteTaker<Scorer>) return scorer.takes_notes();
  static_cast<void>(scorer);
  return false;
}

/// What one KV head's query heads observed.
[[nodiscard]] inline Observations of_head(const Observations& all, index_t head, index_t group) noexcept {
  const index_t rows = group * all.rows;
  const std::size_t tags = all.tags.size() / static_cast<std::size_t>(all.query_heads);
  return {all.queries + head * rows * all.dim,
          all.positions.subspan(static_cast<std::size_t>(head * rows), static_cast<std::size_t>(rows)),
          group,
          all.rows,
          all.dim,
          head * group,
          all.tags.subspan(static_cast<std::size_t>(head * group) * tags, static_cast<std::size_t>(group) * tags)};
}

/// Calls `score(head, workspace)` for the heads `[first, last)`, spread over threads, and adds up what they met. The first
/// head that fails gives the error, whatever the order in which they ran. No allocation.
template <Executor ExecutorT, class Score>
[[nodiscard]] Result<ScoreReport> spread_heads(index_t first, index_t last, std::span<Workspace> works, ExecutorT& executor,
                                               Score score) {
  if (executor.num_workers() > static_cast<index_t>(works.size()))
    return invalid("executor has ", executor.num_workers(), " workers: there are ", works.size(), " workspaces");
  const Workspace::Frame frame(works[0]);
  const std::span<index_t> met = works[0].take<index_t>(last - first);
  executor.run(last - first, [&](index_t i, index_t worker) {
    const Result<ScoreReport> report = score(first + i, works[static_cast<std::size_t>(worker)]);
    met[static_cast<std::size_t>(i)] = report ? report->num_non_finite : -1;
  });
  ScoreReport total;
  for (index_t h = first; h < last; ++h) {
    if (met[static_cast<std::size_t>(h - first)] < 0) return score(h, works[0]);
    total.num_non_finite += met[static_cast<std::size_t>(h - first)];
  }
  return total;
}

}  // namespace detail

/// The part of an `EvictionPolicy` that scores.
template <Observer ObserverT, class ScorerT, Schedule ScheduleT>
class PolicyScoring : public PolicyState<ObserverT, ScorerT, ScheduleT> {
 public:
  using Base = PolicyState<ObserverT, ScorerT, ScheduleT>;
  using typename Base::Parts;
  /// Whether scoring may note something for `commit`, where the policy is not const.
  static constexpr bool may_take_notes = detail::NoteTaker<ScorerT>;

  /// Scratch of `score` alone, over at most `tokens` cached tokens.
  [[nodiscard]] WorkspaceSize score_workspace_size(index_t tokens) const {
    return detail::measure([&](Workspace& work) {
      static_cast<void>(work.take<index_t>(shape_.kv_heads));
      static_cast<void>(Rows(work, scores_by_head() ? shape_.group() : shape_.query_heads, observer_.max_rows(),
                             shape_.head_dim, detail::ShowsTags<ObserverT> && takes_notes() ? observer_.max_rows() : 0));
      const std::size_t inner =
          std::max({observer_.workspace_size().bytes, rope_cursor_workspace_size(rope_.rotary_dim()).bytes,
                    scorer_.workspace_size(shape_, observer_.max_rows(), tokens).bytes});
      static_cast<void>(work.take<std::byte>(static_cast<index_t>(inner)));
    });
  }

  /// Scores of all candidates, to `out` (`kv_heads` x the cache's tokens). Separate from `select`, so that tensor-parallel
  /// ranks can reduce in between. Changes nothing.
  template <CacheReader Cache>
  [[nodiscard]] Result<ScoreReport> score(const Cache& cache, ScoreMatrix out, Workspace& work) const {
    return score_by(*this, cache, out, work);
  }
  /// The same of a policy whose scorer takes notes: what keys would remember is noted for the `commit` of a plan that is made
  /// of these scores. Nothing else changes. Allocates where the cache holds more than there is room for (`reserve`).
  template <CacheReader Cache>
  [[nodiscard]] Result<ScoreReport> score(const Cache& cache, ScoreMatrix out, Workspace& work) requires(may_take_notes) {
    return score_by(*this, cache, out, work);
  }

  /// The same with the KV heads spread over threads: the same bits. Worker `i` uses `works[i]`, each of them as large as
  /// `score_workspace_size` says. Refused where a head's scores depend on other heads.
  template <CacheReader Cache, class ExecutorT>
  requires Executor<std::remove_cvref_t<ExecutorT>>
  [[nodiscard]] Result<ScoreReport> score(const Cache& cache, ScoreMatrix out, std::span<Workspace> works,
                                          ExecutorT&& executor) const {
    return score_by(*this, cache, out, works, executor);
  }
  template <CacheReader Cache, class ExecutorT>
  requires(Executor<std::remove_cvref_t<ExecutorT>>&& may_take_notes)
      [[nodiscard]] Result<ScoreReport> score(const Cache& cache, ScoreMatrix out, std::span<Workspace> works,
                                              ExecutorT&& executor) {
    return score_by(*this, cache, out, works, executor);
  }

  /// Room for what the scorer notes of a cache of `capacity` tokens: then no scoring allocates. Where a schedule has a `max`,
  /// there is room for a little more than that from the beginning. Allocates.
  void reserve(index_t capacity) requires(may_take_notes) { scorer_.reserve(shape_, observer_.max_rows(), capacity); }

  /// Whether a head's scores depend on this head alone.
  [[nodiscard]] bool scores_by_head() const noexcept { return !detail::needs_all_heads(scorer_); }

  /// What `score` would refuse: a cache of another shape or position mode, too small a workspace.
  template <CacheReader Cache>
  [[nodiscard]] Status check_scoring(const Cache& cache, const Workspace& work) const {
    if (Status s = check_cache(cache); !s) return s;
    if (Status s = check_rotary(cache); !s) return s;
    return work.require(score_workspace_size(cache.num_tokens()));
  }

  /// The queries that `score` would look with now, as those of the query heads `heads` look at the keys of `cache`: `queries`
  /// `[heads][observer().rows()][head_dim]`, `positions` `[heads][rows]`, `tags` `[heads][num_tags()]`.
  template <CacheReader Cache>
  [[nodiscard]] Result<Observations> observe_now(const Cache& cache, Range heads, std::span<float> queries,
                                                 std::span<position_t> positions, Workspace& work,
                                                 std::span<position_t> tags = {}) const {
    if (heads.first < 0 || heads.first > heads.last || heads.last > shape_.query_heads)
      return detail::invalid("heads = ", heads.first, " to ", heads.last, ": there are ", shape_.query_heads, " query heads");
    return observe_by(*this, cache, heads, queries, positions, work, tags);
  }
  /// How many `tags` of each query head that call wants now: its beacons where the scorer takes notes, else none.
  [[nodiscard]] index_t num_tags() const noexcept {
    if constexpr (detail::ShowsTags<ObserverT>)
      if (takes_notes()) return observer_.num_beacons();
    return 0;
  }

  /// Scores of the `candidates` among the first `tokens` of one KV head, to `out` (`tokens` of them). `all` is what
  /// `observe_now` gave for all heads.
  template <CacheReader Cache>
  [[nodiscard]] Result<ScoreReport> score_head(const Cache& cache, index_t head, index_t tokens, Range candidates,
                                               const Observations& all, std::span<float> out, Workspace& work) const {
    return score_head_by(*this, cache, head, tokens, candidates, detail::of_head(all, head, shape_.group()), out, work);
  }
  /// The same, and notes. `prepare_notes` comes before all heads, `finish_notes` behind them.
  template <CacheReader Cache>
  [[nodiscard]] Result<ScoreReport> score_head(const Cache& cache, index_t head, index_t tokens, Range candidates,
                                               const Observations& all, std::span<float> out,
                                               Workspace& work) requires(may_take_notes) {
    return score_head_by(*this, cache, head, tokens, candidates, detail::of_head(all, head, shape_.group()), out, work);
  }
  template <CacheReader Cache>
  void prepare_notes(const Cache& cache) {
    if constexpr (may_take_notes) {
      index_t first = cache.num_tokens();
      for (index_t h = 0; h < shape_.kv_heads; ++h) first = std::min(first, candidates_of(cache, h).first);
      scorer_.reserve(shape_, observer_.max_rows(), cache.num_tokens() - first);
      ++num_scorings_;
    }
    static_cast<void>(cache);
  }
  /// How often notes were begun. Where it changes between `prepare_notes` and `finish_notes`, another scoring has come between.
  [[nodiscard]] std::uint64_t num_scorings() const noexcept { return num_scorings_; }
  /// What was noted is for plans of the present state of the cache.
  template <CacheReader Cache>
  void finish_notes(const Cache& cache) noexcept {
    if constexpr (may_take_notes) scorer_.noted(cache.epoch());
    static_cast<void>(cache);
  }

  /// The slots of `head` that compete: behind the protected prefix and the pinned one, before the newest tokens.
  template <CacheReader Cache>
  [[nodiscard]] Range candidates_of(const Cache& cache, index_t head) const {
    const ScheduleState state = state_of(cache, head);
    index_t first = state.prefix;
    if constexpr (requires { cache.pinned_prefix(); }) first = std::max(first, cache.pinned_prefix());
    return {first, std::max(first, state.tokens - state.recent)};
  }

 protected:
  PolicyScoring(const Shape& shape, const Parts& parts) : Base(shape, parts) {
    if constexpr (may_take_notes) {
      index_t slots = 0;
      if constexpr (requires { parts.schedule.max; })
        slots = parts.schedule.max > reserved_at_most ? 0 : parts.schedule.max + parts.schedule.max / 8 + 16;
      scorer_.reserve(shape_, observer_.max_rows(), slots);
    }
  }

  using Base::after_prefill_;
  using Base::next_position_;
  using Base::observer_;
  using Base::protection_;
  using Base::rope_;
  using Base::scorer_;
  using Base::shape_;

  template <CacheReader Cache>
  [[nodiscard]] ScheduleState state_of(const Cache& cache, index_t head) const {
    const index_t tokens = detail::tokens_of(cache, head);
    const index_t prefix_slots = tokens > 0 ? detail::slot_at_or_behind(cache, head, this->prefix()) : 0;
    return {tokens, prefix_slots, std::min(protection_.n_recent_kv, tokens - prefix_slots),
            static_cast<index_t>(next_position_), after_prefill_};
  }

  template <CacheReader Cache>
  [[nodiscard]] Status check_cache(const Cache& cache) const {
    if (cache.num_kv_heads() != shape_.kv_heads)
      return detail::invalid("cache has ", cache.num_kv_heads(), " KV heads: shape.kv_heads = ", shape_.kv_heads);
    if ((ObserverT::needs_queries || detail::reads_keys<ScorerT>()) && cache.key_dim() != shape_.head_dim)
      return detail::invalid("cache has keys of ", cache.key_dim(), ": shape.head_dim = ", shape_.head_dim);
    return {};
  }

  template <CacheReader Cache>
  [[nodiscard]] Status check_scores(const Cache& cache, const ScoreMatrix& scores, bool of_ranks) const {
    if (Status s = check_cache(cache); !s) return s;
    const bool heads_fit = scores.heads == shape_.kv_heads ||
                           (of_ranks && (scores.heads == 1 || (scores.heads > 0 && scores.heads % shape_.kv_heads == 0)));
    if (heads_fit && scores.tokens == cache.num_tokens()) return {};
    return detail::invalid("scores are [", scores.heads, "][", scores.tokens, "]: the cache has [", shape_.kv_heads, "][",
                           cache.num_tokens(), "]");
  }

  /// Queries can only be moved to where the cache counts them if they are kept before RoPE, and meet rotated keys only.
  template <CacheReader Cache>
  [[nodiscard]] Status check_rotary(const Cache& cache) const {
    if constexpr (requires { cache.reads_unrotated_keys(); })
      if (!cache.reads_unrotated_keys())
        return detail::error(StatusCode::unsupported, "position mode: RotatedKeys reads caches of unrotated_keys only");
    if constexpr (detail::has_position_mode<Cache> && ObserverT::needs_queries) {
      if (cache.position_mode() == PositionMode::unrotated_keys)
        return detail::error(StatusCode::unsupported,
                             "position mode: the keys are not rotated; read them through RotatedKeys(cache, rope)");
      if (cache.position_mode() != PositionMode::true_positions && rope_.empty())
        return detail::error(StatusCode::unsupported,
                             "position mode: a cache that keeps no true positions needs a policy made with a RopeTable");
    }
    static_cast<void>(cache);
    return {};
  }

 private:
  /// A budget beyond this is none (nothing is ever evicted): room comes when it is needed.
  static constexpr index_t reserved_at_most = index_t{1} << 24;

  /// `Self` is this class, const where nothing is noted.
  template <class Self, CacheReader Cache>
  [[nodiscard]] static Result<ScoreReport> score_by(Self& self, const Cache& cache, ScoreMatrix out, Workspace& work) {
    if constexpr (!detail::is_ragged<Cache>()) {
      static_assert(Scorer<ScorerT, Cache>);
      if (self.observer_.max_rows() == 0 || !self.scores_by_head()) return score_layer_by(self, cache, out, work);
    }
    return score_by(self, cache, out, std::span(&work, 1), SerialExecutor{});
  }
  /// All heads at once: for scores that depend on other heads, and where there are no rows that would need room.
  template <class Self, CacheReader Cache>
  [[nodiscard]] static Result<ScoreReport> score_layer_by(Self& self, const Cache& cache, ScoreMatrix out, Workspace& work) {
    if (Status s = self.check_before_scoring(cache, out, work); !s) return s;
    const Workspace::Frame frame(work);
    const Result<Observations> seen = observe_by(self, cache, {0, self.shape_.query_heads}, work);
    if (!seen) return seen.status();
    if constexpr (!std::is_const_v<Self>) self.prepare_notes(cache);
    const Result<ScoreReport> report = self.scorer_.score(cache, *seen, self.candidates_of(cache, 0), out, work);
    if constexpr (!std::is_const_v<Self>)
      if (report) self.finish_notes(cache);
    return report;
  }
  /// Head by head: the rows of one are written right before they are looked at, and lie in a core's own cache then.
  template <class Self, CacheReader Cache, class ExecutorT>
  [[nodiscard]] static Result<ScoreReport> score_by(Self& self, const Cache& cache, ScoreMatrix out, std::span<Workspace> works,
                                                    ExecutorT&& executor) {
    if (works.empty()) return detail::invalid("works is empty: there must be one for each worker");
    for (const Workspace& work : works)
      if (Status s = self.check_before_scoring(cache, out, work); !s) return s;
    if (!self.scores_by_head())
      return detail::error(StatusCode::unsupported, "scores over all heads of a layer: cannot be formed head by head");
    if constexpr (!std::is_const_v<Self>) self.prepare_notes(cache);
    const index_t group = self.shape_.group();
    const Result<ScoreReport> report =
        detail::spread_heads(0, self.shape_.kv_heads, works, executor, [&](index_t h, Workspace& work) -> Result<ScoreReport> {
          const Workspace::Frame frame(work);
          Result<Observations> seen = observe_by(self, cache, {h * group, (h + 1) * group}, work);
          if (!seen) return seen.status();
          detail::MemoryAhead next;
          if (h + 1 < self.shape_.kv_heads && executor.num_workers() == 1) {  // else another thread may read it
            if constexpr (requires { self.observer_.add_ahead(Range{}, next); })
              self.observer_.add_ahead({(h + 1) * group, (h + 2) * group}, next);
            seen->next = &next;
          }
          const index_t tokens = detail::tokens_of(cache, h);
          return score_head_by(self, cache, h, tokens, self.candidates_of(cache, h), *seen, out.row(h), work);
        });
    if constexpr (!std::is_const_v<Self>)
      if (report) self.finish_notes(cache);
    return report;
  }
  template <class Self, CacheReader Cache>
  [[nodiscard]] static Result<ScoreReport> score_head_by(Self& self, const Cache& cache, index_t head, index_t tokens,
                                                         Range candidates, const Observations& seen, std::span<float> out,
                                                         Workspace& work) {
    return self.scorer_.score(detail::HeadReader<Cache>(cache, head, tokens), seen, candidates, {out.data(), 1, tokens}, work);
  }

  template <CacheReader Cache>
  [[nodiscard]] Status check_before_scoring(const Cache& cache, const ScoreMatrix& out, const Workspace& work) const {
    if (Status s = check_scores(cache, out, false); !s) return s;
    return check_scoring(cache, work);
  }

  /// Scratch for the observed rows of `heads` query heads.
  struct Rows {
    Rows(Workspace& work, index_t heads, index_t rows, index_t dim, index_t num_tags)
        : queries(work.take<float>(heads * rows * dim)),
          positions(work.take<position_t>(heads * rows)),
          tags(work.take<position_t>(heads * num_tags)) {}
    std::span<float> queries;
    std::span<position_t> positions;
    std::span<position_t> tags;
  };
  template <class Self, CacheReader Cache>
  [[nodiscard]] static Result<Observations> observe_by(Self& self, const Cache& cache, Range heads, std::span<float> queries,
                                                       std::span<position_t> positions, Workspace& work,
                                                       std::span<position_t> tags) {
    const index_t rows = self.observer_.rows();
    const auto write = [&](auto... more) {
      return self.observer_.write_rows(self.rope(), self.next_position_ - 1, heads, queries.data(), positions.data(), work,
                                       more...);
    };
    Observations seen{queries.data(), positions, heads.size(), rows, self.shape_.head_dim, heads.first};
    if constexpr (detail::ShowsTags<ObserverT>) {
      if (Status s = tags.empty() ? write() : write(tags.data()); !s) return s;
      seen.tags = tags;
    } else {
      if (Status s = write(); !s) return s;
    }
    detail::move_to_rotary_positions(cache, self.rope(), self.shape_, heads, rows, queries, positions, work);
    return seen;
  }
  /// The same to scratch of `work`, for as long as the caller's frame.
  template <class Self, CacheReader Cache>
  [[nodiscard]] static Result<Observations> observe_by(Self& self, const Cache& cache, Range heads, Workspace& work) {
    const Rows to(work, heads.size(), self.observer_.rows(), self.shape_.head_dim, self.num_tags());
    return observe_by(self, cache, heads, to.queries, to.positions, work, to.tags);
  }
  [[nodiscard]] bool takes_notes() const noexcept { return detail::takes_notes(scorer_); }

  std::uint64_t num_scorings_ = 0;
};

}  // namespace beaconkv::inline v0
