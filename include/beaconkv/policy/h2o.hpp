// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// H2O: the tokens that gathered most attention so far stay, and the newest ones.

#include <algorithm>
#include <vector>

#include "beaconkv/policy/evict.hpp"

namespace beaconkv::inline v0 {

/// Remembers the queries of all tokens since the last eviction, at most `most`: of more, the newest.
class PendingQueries : public RecentQueries {
 public:
  struct Options {
    index_t most = 512;
  };

  PendingQueries(const Shape& shape, const Options& options) : RecentQueries(shape, {.count = options.most}) {}

  [[nodiscard]] friend Status validate(const Options& options, const Shape&) {
    if (options.most < 1) return detail::invalid("max_pending_queries = ", options.most, ": must be at least 1");
    return {};
  }
  [[nodiscard]] Status commit() {
    ring_.clear();
    return {};
  }
  template <class Archive>
  void exchange(Archive& archive) {
    archive.expect("observer", 4);
    archive.expect("n_recent_queries", ring_.capacity());
    ring_.exchange(archive);
  }
};
static_assert(Observer<PendingQueries>);

/// Attention that a token received from all queries so far, mean over the group. Each query counts once, with the softmax over
/// what was cached when it came: since nothing goes between two evictions, the observed queries are all those since the last,
/// and the sums of what stays are carried over.
///
/// `sum` is H2O's. `mean` divides by the number of tokens that could see the key (its own included), as kvpress's observed
/// attention does. `max` keeps the largest weight.
class AccumulatedAttentionScorer {
 public:
  /// Its sums belong to protected slots, too, so that none begins at 0 where it comes out of the window.
  static constexpr bool scores_every_slot = true;

  struct Options {
    Reduce over_queries = Reduce::sum;
    std::optional<float> scale{};
    std::optional<float> logit_softcap{};
    std::span<const float> sink_logits{};
    index_t capacity = 0;  ///< tokens that an eviction may leave before the sums need more memory
  };

  AccumulatedAttentionScorer() = default;
  explicit AccumulatedAttentionScorer(const Options& options, index_t kv_heads = 0)
      : options_(options), room_(options.capacity), carried_(static_cast<std::size_t>(kv_heads * options.capacity)) {}

  [[nodiscard]] Status validate(const Shape& shape) const {
    if (options_.capacity < 0) return detail::invalid("capacity = ", options_.capacity, ": must not be negative");
    return attention().validate(shape);
  }
  /// The sums are those of a layer; whoever scores head by head or in slices would commit other slots than were scored.
  [[nodiscard]] bool needs_all_heads() const noexcept { return true; }

  template <CacheReader Cache>
  [[nodiscard]] Result<ScoreReport> score(const Cache& cache, const Observations& observations, Range, ScoreMatrix out,
                                          Workspace& work) const {
    if (held_ > out.tokens || out.heads * room_ > static_cast<index_t>(carried_.size()))
      return detail::error(StatusCode::out_of_order, "cache holds ", out.tokens, " tokens: there are sums of ", held_,
                           ", which were made for another");
    if (detail::keeps_one_set<Cache>() && options_.over_queries == Reduce::max && out.heads > 1)
      return detail::error(
          StatusCode::unsupported,
          "over_queries = max: what stays takes along one number for all heads, but each has a maximum of its own");
    const Result<ScoreReport> report = attention().score(cache, observations, {0, out.tokens}, out, work);
    if (!report) return report;
    const position_t first = observations.rows > 0 ? observations.positions[0] : 0;
    const position_t last =
        observations.rows > 0 ? observations.positions[static_cast<std::size_t>(observations.rows - 1)] : -1;
    for (index_t h = 0; h < out.heads; ++h)
      for (index_t j = 0; j < out.tokens; ++j) {
        float& score = out.row(h)[static_cast<std::size_t>(j)];
        const float before = j < held_ ? carried_[static_cast<std::size_t>(h * room_ + j)] : 0.0F;
        if (options_.over_queries == Reduce::sum) score += before;
        if (options_.over_queries == Reduce::max) score = detail::max_or_nan(score, before);
        if (options_.over_queries == Reduce::mean && observations.rows == 0) score += before;
        if (options_.over_queries == Reduce::mean && observations.rows > 0) {
          const position_t position = cache.position(h, j);
          const auto earlier = static_cast<double>(j < held_ ? std::max<position_t>(0, first - position) : 0);
          const auto now = static_cast<double>(std::max<position_t>(0, last - std::max(first, position) + 1));
          score = static_cast<float>((static_cast<double>(before) * earlier + static_cast<double>(score)) /
                                     std::max(1.0, earlier + now));
        }
      }
    return report;
  }
  [[nodiscard]] WorkspaceSize workspace_size(const Shape& shape, index_t rows, index_t tokens) const {
    return attention().workspace_size(shape, rows, tokens);
  }

  /// What stays takes its sums along. A plan made by hand has no scores: sums begin anew. Allocates where more stay than
  /// `capacity` and than ever before.
  void commit(const KeepPlan& plan, const Shape& shape) {
    held_ = plan.num_kept(0);
    for (index_t h = 1; h < shape.kv_heads; ++h)
      if (plan.num_kept(h) != held_) held_ = 0;  // made by hand
    room_ = std::max(room_, held_);
    carried_.resize(static_cast<std::size_t>(shape.kv_heads * room_));
    for (index_t h = 0; h < shape.kv_heads && held_ > 0; ++h)
      std::copy(plan.kept_scores(h).begin(), plan.kept_scores(h).end(), carried_.begin() + h * room_);
  }
  [[nodiscard]] std::size_t state_bytes() const noexcept { return carried_.size() * sizeof(float); }
  template <class Archive>
  void exchange(Archive& archive) {
    archive.expect("over_queries", static_cast<std::int64_t>(options_.over_queries));
    archive.value("tokens with sums", held_, 0, std::numeric_limits<slot_t>::max());
    archive.value("room for sums", room_, held_, std::numeric_limits<slot_t>::max());
    archive.list("sums of attention", carried_, std::size_t{1} << 40);
    if constexpr (Archive::loading)
      if (archive.ok() && (room_ == 0 ? !carried_.empty() : static_cast<index_t>(carried_.size()) % room_ != 0))
        archive.fail(detail::error(StatusCode::damaged, "saved state: ", carried_.size(), " sums are not some of ", room_,
                                   " for each KV head"));
  }

 private:
  [[nodiscard]] AttentionScorer attention() const {
    return {.attention = {.over_queries = options_.over_queries == Reduce::max ? Reduce::max : Reduce::sum,
                          .over_heads = Reduce::mean,
                          .scale = options_.scale,
                          .logit_softcap = options_.logit_softcap},
            .sink_logits = options_.sink_logits};
  }

  Options options_{};
  index_t held_ = 0;  // tokens of each head that have a carried score
  index_t room_ = 0;
  std::vector<float> carried_;  // [kv_heads][room_]
};

template <Schedule ScheduleT = FixedBudget>
struct H2OOptions {
  ScheduleT budget{};
  index_t n_recent_kv = 32;             ///< newest tokens, which stay; half of the budget in the paper
  std::optional<index_t> n_prefix = 0;  ///< positions below this stay; none are protected in the paper
  Reduce over_queries = Reduce::sum;    ///< `mean`: kvpress's observed attention
  /// The most tokens between two evictions, the prompt included, whose queries are remembered and counted; of more, the newest.
  index_t max_pending_queries = 512;
  index_t capacity = 0;  ///< tokens that stay; where it is enough, evictions allocate nothing, else the first ones do
  std::optional<float> scale{};
  std::optional<float> logit_softcap{};
  std::span<const float> sink_logits{};  ///< of each query head, of a model with learned sinks; must outlive the policy
};

/// H2O, heavy hitters (arXiv 2306.14048), algorithm 1; with `over_queries = mean` kvpress's observed attention.
///
/// * observer: `PendingQueries`: the queries of all tokens since the last eviction
/// * scorer: `AccumulatedAttentionScorer`: the attention that a key received so far, mean over the group
/// * schedule: `FixedBudget`; the paper evicts with every token, which is `{.max = n + 1, .min = n}`
/// * protected: the newest `n_recent_kv` tokens
///
/// The engine hands over no attention: it is formed again from the queries, at evictions, exactly as it was.
/// A set for each KV head, equally long, or one for all; not for ragged caches, and not in slices.
template <class ScorerT = AccumulatedAttentionScorer, Schedule ScheduleT = FixedBudget>
class H2O : public EvictionPolicy<PendingQueries, ScorerT, ScheduleT> {
 public:
  using Base = EvictionPolicy<PendingQueries, ScorerT, ScheduleT>;
  using Options = H2OOptions<ScheduleT>;

  /// What H2O's options mean as a scorer.
  [[nodiscard]] static AccumulatedAttentionScorer scorer_of(const Options& o, const Shape& shape) {
    const AccumulatedAttentionScorer::Options options{.over_queries = o.over_queries,
                                                      .scale = o.scale,
                                                      .logit_softcap = o.logit_softcap,
                                                      .sink_logits = o.sink_logits,
                                                      .capacity = std::max<index_t>(o.capacity, 0)};
    return AccumulatedAttentionScorer(options, std::max<index_t>(shape.kv_heads, 0));
  }

  /// The policy, or what is wrong with its options. Without a table queries must come rotated.
  [[nodiscard]] static Result<H2O> make(const Shape& shape, const Options& options,
                                        RopeTable rope = {}) requires std::same_as<ScorerT, AccumulatedAttentionScorer> {
    if (options.capacity < 0) return detail::invalid("capacity = ", options.capacity, ": must not be negative");
    return make(shape, options, std::move(rope), scorer_of(options, shape));
  }
  /// The same with another scorer.
  [[nodiscard]] static Result<H2O> make(const Shape& shape, const Options& options, RopeTable rope, ScorerT scorer) {
    const typename Base::Parts parts{.observer = {.most = options.max_pending_queries},
                                     .scorer = std::move(scorer),
                                     .schedule = options.budget,
                                     .protection = {options.n_prefix, options.n_recent_kv},
                                     .rope = std::move(rope)};
    if (Status s = Base::validate_parts(shape, parts); !s) return s;
    return H2O(shape, parts);
  }

#ifndef BEACONKV_NO_EXCEPTIONS
  /// As `make`; throws `Error`.
  H2O(const Shape& shape, const Options& options, RopeTable rope = {})
  requires std::same_as<ScorerT, AccumulatedAttentionScorer> : H2O(make(shape, options, std::move(rope)).or_throw()) {}
#endif

 private:
  H2O(const Shape& shape, const typename Base::Parts& parts) : Base(shape, parts) {}
};

}  // namespace beaconkv::inline v0
