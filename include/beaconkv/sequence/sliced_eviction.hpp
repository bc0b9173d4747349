// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// The eviction of one layer in slices between decode steps, so that no step pays for all of it.

#include <algorithm>
#include <span>
#include <vector>

#include "beaconkv/policy/evict.hpp"

namespace beaconkv::inline v0::detail {

/// An eviction in progress: the queries and candidates of the moment when it began, and the scores of the KV heads done since.
/// Tokens that are appended meanwhile do not compete and stay. Nothing allocates after construction.
template <class PolicyT, CacheBuffer CacheT>
class SlicedEviction {
 public:
  /// Room for no eviction.
  SlicedEviction() = default;
  /// Room for an eviction of any of these policies over caches of up to `capacity` tokens.
  SlicedEviction(std::span<const PolicyT> policies, index_t capacity) : capacity_(capacity) {
    index_t heads = 0, queries = 0, positions = 0;
    for (const PolicyT& policy : policies) {
      const index_t rows = policy.shape().query_heads * policy.observer().max_rows();
      heads = std::max(heads, policy.shape().kv_heads);
      queries = std::max(queries, rows * policy.shape().head_dim);
      positions = std::max(positions, rows);
    }
    heads_.resize(static_cast<std::size_t>(heads));
    scores_.resize(static_cast<std::size_t>(heads * capacity));
    queries_.resize(static_cast<std::size_t>(queries));
    positions_.resize(static_cast<std::size_t>(positions));
    tags_.resize(static_cast<std::size_t>(positions));
  }

  [[nodiscard]] bool active() const noexcept { return active_; }
  void stop() noexcept { active_ = false; }

  /// Takes down what the policy would score with now. Refused where the cache holds more than there is room for.
  [[nodiscard]] Status begin(PolicyT& policy, const CacheT& cache, Workspace& work) {
    active_ = false;
    if (cache.num_tokens() > capacity_)
      return error(StatusCode::out_of_capacity, "a layer holds ", cache.num_tokens(),
                   " tokens: options.capacity = ", capacity_);
    if (Status s = policy.check_scoring(cache, work); !s) return s;
    rows_ = policy.observer().rows();
    const auto rows = static_cast<std::size_t>(policy.shape().query_heads * rows_);
    const auto dim = static_cast<std::size_t>(policy.shape().head_dim);
    num_tags_ = policy.shape().query_heads * policy.num_tags();
    const Result<Observations> seen = policy.observe_now(
        cache, {0, policy.shape().query_heads}, std::span(queries_).first(rows * dim), std::span(positions_).first(rows), work,
        std::span(tags_).first(static_cast<std::size_t>(num_tags_)));
    if (!seen) return seen.status();
    policy.prepare_notes(cache);
    scoring_ = policy.num_scorings();
    for (index_t h = 0; h < policy.shape().kv_heads; ++h) {
      const index_t tokens = tokens_of(cache, h);
      heads_[static_cast<std::size_t>(h)] = {tokens, policy.candidates_of(cache, h),
                                             tokens > 0 ? cache.position(h, tokens - 1) : 0,
                                             tokens > 0 ? rotary_position_of(cache, h, tokens - 1) : 0};
    }
    rope_ = frequencies_of(policy);
    stride_ = cache.num_tokens();
    done_ = 0;
    num_non_finite_ = 0;
    active_ = true;
    return {};
  }

  /// Whether every token that was there when it began still is where it was, and is turned as the queries are; and whether the
  /// policy was asked for no other scores since, of which it would have taken notes.
  [[nodiscard]] bool intact(const PolicyT& policy, const CacheT& cache) const noexcept {
    if (rope_ != frequencies_of(policy) || scoring_ != policy.num_scorings()) return false;
    for (index_t h = 0; h < policy.shape().kv_heads; ++h) {
      const Head& head = heads_[static_cast<std::size_t>(h)];
      if (tokens_of(cache, h) < head.tokens) return false;
      if (head.tokens > 0 && (cache.position(h, head.tokens - 1) != head.last_position ||
                              rotary_position_of(cache, h, head.tokens - 1) != head.last_rotary_position))
        return false;
    }
    return true;
  }

  /// Scores the next `count` heads, over threads.
  template <Executor ExecutorT>
  [[nodiscard]] Status advance(PolicyT& policy, const CacheT& cache, index_t count, std::span<Workspace> works,
                               ExecutorT& executor) {
    const index_t last = std::min(done_ + count, policy.shape().kv_heads);
    const Shape& shape = policy.shape();
    const std::span<const position_t> positions =
        std::span(positions_).first(static_cast<std::size_t>(shape.query_heads * rows_));
    const Observations all{queries_.data(),
                           positions,
                           shape.query_heads,
                           rows_,
                           shape.head_dim,
                           0,
                           std::span(tags_).first(static_cast<std::size_t>(num_tags_))};
    const Result<ScoreReport> report = spread_heads(done_, last, works, executor, [&](index_t h, Workspace& work) {
      const Head& head = heads_[static_cast<std::size_t>(h)];
      return policy.score_head(cache, h, head.tokens, head.candidates, all, row(h), work);
    });
    if (!report) return report.status();
    num_non_finite_ += report->num_non_finite;
    done_ = last;
    return {};
  }
  [[nodiscard]] bool all_scored(const PolicyT& policy) const noexcept { return done_ == policy.shape().kv_heads; }

  /// The plan by these scores.
  [[nodiscard]] Status plan(PolicyT& policy, const CacheT& cache, Workspace& work, KeepPlan& plan) const {
    policy.finish_notes(cache);
    const auto candidates = [&](index_t h) {
      const Range& range = heads_[static_cast<std::size_t>(h)].candidates;
      return Range{std::min(std::max<std::int64_t>(range.first, cache.pinned_prefix()), range.last), range.last};
    };
    return policy.plan_scored(cache, work, plan, candidates, [&](ScoreMatrix out) -> Result<ScoreReport> {
      for (index_t h = 0; h < out.heads; ++h) {
        const std::span<float> to = out.row(h);
        std::fill(std::copy(row(h).begin(), row(h).end(), to.begin()), to.end(), 0.0F);
      }
      return ScoreReport{num_non_finite_};
    });
  }

  /// The same eviction at the same point, for a fork; none where there is no room for it.
  void copy_from(const SlicedEviction& other) noexcept {
    if (!other.active_ || heads_.empty() || other.stride_ > capacity_) return stop();
    std::copy(other.heads_.begin(), other.heads_.end(), heads_.begin());
    std::copy(other.queries_.begin(), other.queries_.end(), queries_.begin());
    std::copy(other.positions_.begin(), other.positions_.end(), positions_.begin());
    std::copy(other.tags_.begin(), other.tags_.end(), tags_.begin());
    std::copy_n(other.scores_.begin(), other.stride_ * static_cast<index_t>(other.heads_.size()), scores_.begin());
    rope_ = other.rope_;
    rows_ = other.rows_;
    num_tags_ = other.num_tags_;
    stride_ = other.stride_;
    done_ = other.done_;
    num_non_finite_ = other.num_non_finite_;
    active_ = true;
  }

 private:
  struct Head {
    index_t tokens = 0;
    Range candidates{};
    position_t last_position = 0;
    position_t last_rotary_position = 0;
  };

  [[nodiscard]] static position_t rotary_position_of(const CacheT& cache, index_t head, index_t slot) noexcept {
    if constexpr (requires { cache.rotary_position(head, slot); }) return cache.rotary_position(head, slot);
    return cache.position(head, slot);
  }
  /// What tells one RoPE table from another.
  [[nodiscard]] static const double* frequencies_of(const PolicyT& policy) noexcept {
    return policy.rope() == nullptr ? nullptr : policy.rope()->inv_freq().data();
  }

  [[nodiscard]] std::span<float> row(index_t head) noexcept {
    return std::span(scores_).subspan(static_cast<std::size_t>(head * stride_),
                                      static_cast<std::size_t>(heads_[static_cast<std::size_t>(head)].tokens));
  }
  [[nodiscard]] std::span<const float> row(index_t head) const noexcept {
    return std::span(scores_).subspan(static_cast<std::size_t>(head * stride_),
                                      static_cast<std::size_t>(heads_[static_cast<std::size_t>(head)].tokens));
  }

  std::vector<Head> heads_;
  std::vector<float> scores_;  // [heads][stride_]
  std::vector<float> queries_;
  std::vector<position_t> positions_;
  std::vector<position_t> tags_;
  index_t capacity_ = 0;
  const double* rope_ = nullptr;  // whose frequencies turned the queries
  index_t rows_ = 0;              // of each query head
  index_t num_tags_ = 0;
  index_t stride_ = 0;
  std::uint64_t scoring_ = 0;  // of the policy
  index_t done_ = 0;           // heads
  index_t num_non_finite_ = 0;
  bool active_ = false;
};

}  // namespace beaconkv::inline v0::detail
