// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// From what a policy remembers to scores: the layer as a whole, head by head, on one thread or on several.

#include <algorithm>
#include <span>
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

/// What one KV head's query heads observed.
[[nodiscard]] inline Observations of_head(const Observations& all, index_t head, index_t group) noexcept {
  const index_t rows = group * all.rows;
  return {all.queries + head * rows * all.dim,
          all.positions.subspan(static_cast<std::size_t>(head * rows), static_cast<std::size_t>(rows)),
          group,
          all.rows,
          all.dim,
          head * group};
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

  /// Scratch of `score` alone, over at most `tokens` cached tokens.
  [[nodiscard]] WorkspaceSize score_workspace_size(index_t tokens) const {
    return detail::measure([&](Workspace& work) {
      take_observations(work, observer_.max_rows());
      static_cast<void>(work.take<index_t>(shape_.kv_heads));
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
    if constexpr (detail::is_ragged<Cache>()) {
      return score(cache, out, std::span(&work, 1), SerialExecutor{});
    } else {
      static_assert(Scorer<ScorerT, Cache>);
      if (Status s = check_before_scoring(cache, out, work); !s) return s;
      const Workspace::Frame frame(work);
      const auto [queries, positions] = take_observations(work, observer_.rows());
      const Result<Observations> seen = observe_now(cache, queries, positions, work);
      if (!seen) return seen.status();
      return scorer_.score(cache, *seen, candidates_of(cache, 0), out, work);
    }
  }

  /// The same with the KV heads spread over threads: the same bits. Worker `i` uses `works[i]`, each of them as large as
  /// `score_workspace_size` says. Refused where a head's scores depend on other heads.
  template <CacheReader Cache, class ExecutorT>
  requires Executor<std::remove_cvref_t<ExecutorT>>
  [[nodiscard]] Result<ScoreReport> score(const Cache& cache, ScoreMatrix out, std::span<Workspace> works,
                                          ExecutorT&& executor) const {
    if (works.empty()) return detail::invalid("works is empty: there must be one for each worker");
    for (const Workspace& work : works)
      if (Status s = check_before_scoring(cache, out, work); !s) return s;
    if (!scores_by_head())
      return detail::error(StatusCode::unsupported, "scores over all heads of a layer: cannot be formed head by head");
    const Workspace::Frame frame(works[0]);
    const auto [queries, positions] = take_observations(works[0], observer_.rows());
    const Result<Observations> seen = observe_now(cache, queries, positions, works[0]);
    if (!seen) return seen.status();
    return detail::spread_heads(0, shape_.kv_heads, works, executor, [&](index_t h, Workspace& work) {
      const index_t tokens = detail::tokens_of(cache, h);
      return score_head(cache, h, tokens, candidates_of(cache, h), *seen, out.row(h), work);
    });
  }

  /// Whether a head's scores depend on this head alone.
  [[nodiscard]] bool scores_by_head() const noexcept { return !detail::needs_all_heads(scorer_); }

  /// What `score` would refuse: a cache of another shape or position mode, too small a workspace.
  template <CacheReader Cache>
  [[nodiscard]] Status check_scoring(const Cache& cache, const Workspace& work) const {
    if (Status s = check_cache(cache); !s) return s;
    if (Status s = check_rotary(cache); !s) return s;
    return work.require(score_workspace_size(cache.num_tokens()));
  }

  /// The queries that `score` would look with now, as they look at the keys of `cache`: `queries`
  /// `[query_heads][observer().rows()][head_dim]`, `positions` `[query_heads][rows]`.
  template <CacheReader Cache>
  [[nodiscard]] Result<Observations> observe_now(const Cache& cache, std::span<float> queries, std::span<position_t> positions,
                                                 Workspace& work) const {
    const index_t rows = observer_.rows();
    if (Status s = observer_.write_rows(this->rope(), next_position_ - 1, queries.data(), positions.data(), work); !s) return s;
    detail::move_to_rotary_positions(cache, this->rope(), shape_, rows, queries, positions, work);
    return Observations{queries.data(), positions, shape_.query_heads, rows, shape_.head_dim, 0};
  }

  /// Scores of the `candidates` among the first `tokens` of one KV head, to `out` (`tokens` of them). `all` is what
  /// `observe_now` gave.
  template <CacheReader Cache>
  [[nodiscard]] Result<ScoreReport> score_head(const Cache& cache, index_t head, index_t tokens, Range candidates,
                                               const Observations& all, std::span<float> out, Workspace& work) const {
    return scorer_.score(detail::HeadReader<Cache>(cache, head, tokens), detail::of_head(all, head, shape_.group()), candidates,
                         {out.data(), 1, tokens}, work);
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
  PolicyScoring(const Shape& shape, const Parts& parts) : Base(shape, parts) {}

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
    if (ObserverT::needs_queries && cache.key_dim() != shape_.head_dim)
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
  template <CacheReader Cache>
  [[nodiscard]] Status check_before_scoring(const Cache& cache, const ScoreMatrix& out, const Workspace& work) const {
    if (Status s = check_scores(cache, out, false); !s) return s;
    return check_scoring(cache, work);
  }

  /// Scratch for the queries and the positions of `rows` rows of every query head.
  std::pair<std::span<float>, std::span<position_t>> take_observations(Workspace& work, index_t rows) const {
    const std::span<float> queries = work.take<float>(shape_.query_heads * rows * shape_.head_dim);
    return {queries, work.take<position_t>(shape_.query_heads * rows)};
  }
};

}  // namespace beaconkv::inline v0
