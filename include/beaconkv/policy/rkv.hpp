// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// R-KV: tokens that the newest ones attend to, and that do not repeat others, stay.

#include <algorithm>
#include <numeric>
#include <vector>

#include "beaconkv/algorithm/key_redundancy.hpp"
#include "beaconkv/policy/evict.hpp"

namespace beaconkv::inline v0 {

/// In which order R-KV looks at the cached tokens. It decides which look-alike is "the newest" and who a token's neighbours in
/// the pool are.
enum class RKVOrder : std::uint8_t {
  chronological,
  /// As published: after an eviction the chosen tokens stand by descending score, then the window. The cache itself stays in
  /// time order; the published order is kept beside it (4 bytes a slot and KV head, allocated at commits).
  published,
};

namespace detail {

/// Which slot of a chronological cache stands at which rank of the published order.
class PublishedOrder {
 public:
  /// Tokens appended since the last plan follow in time order.
  [[nodiscard]] index_t slot_at(index_t head, index_t rank) const noexcept {
    const auto h = static_cast<std::size_t>(head);
    return h < slots_.size() && rank < static_cast<index_t>(slots_[h].size()) ? slots_[h][static_cast<std::size_t>(rank)]
                                                                              : rank;
  }

  /// Whether every slot of the order is one of `tokens`: not in a cache that was cut otherwise, or that it was not saved with.
  [[nodiscard]] bool fits(index_t head, index_t tokens) const noexcept {
    const auto h = static_cast<std::size_t>(head);
    return h >= slots_.size() || static_cast<index_t>(slots_[h].size()) <= tokens;
  }

  /// The chosen tokens by descending score, the earlier rank first among equals; protected ones stay at their end.
  void follow(const KeepPlan& plan, index_t num_heads) {
    slots_.resize(static_cast<std::size_t>(num_heads));
    for (index_t h = 0; h < num_heads; ++h) {
      const std::span<const slot_t> kept = plan.kept(h);
      const std::span<const float> scores = plan.kept_scores(h);
      if (!fits(h, plan.tokens_before())) slots_[static_cast<std::size_t>(h)].clear();  // of tokens that are there no more
      std::vector<index_t> old_rank(static_cast<std::size_t>(plan.tokens_before()));
      for (index_t r = 0; r < plan.tokens_before(); ++r) old_rank[static_cast<std::size_t>(slot_at(h, r))] = r;
      std::vector<slot_t> order(kept.size());
      std::iota(order.begin(), order.end(), slot_t{0});
      const auto first = std::lower_bound(kept.begin(), kept.end(), plan.candidates().first) - kept.begin();
      const auto last = std::lower_bound(kept.begin(), kept.end(), plan.candidates().last) - kept.begin();
      std::sort(order.begin() + first, order.begin() + last, [&](slot_t a, slot_t b) {
        const auto i = static_cast<std::size_t>(a);
        const auto j = static_cast<std::size_t>(b);
        const std::int32_t x = score_rank(scores[i]);  // a NaN is in order, too
        const std::int32_t y = score_rank(scores[j]);
        if (x != y) return x > y;
        return old_rank[static_cast<std::size_t>(kept[i])] < old_rank[static_cast<std::size_t>(kept[j])];
      });
      slots_[static_cast<std::size_t>(h)] = std::move(order);
    }
  }

  template <class Archive>
  void exchange(Archive& archive) {
    constexpr std::int64_t most = std::numeric_limits<slot_t>::max();
    auto heads = static_cast<std::int64_t>(slots_.size());
    archive.value("heads in published order", heads, 0, 1 << 16);
    if constexpr (Archive::loading) slots_.resize(static_cast<std::size_t>(archive.ok() ? heads : 0));
    for (auto& head : slots_) {
      archive.list("published order", head, static_cast<std::size_t>(most));
      if constexpr (Archive::loading)
        if (!is_permutation(head)) archive.fail(error(StatusCode::damaged, "saved state: published order: is no order"));
    }
  }

  [[nodiscard]] std::size_t state_bytes() const noexcept {
    std::size_t bytes = 0;
    for (const auto& head : slots_) bytes += head.size() * sizeof(slot_t);
    return bytes;
  }

 private:
  [[nodiscard]] static bool is_permutation(const std::vector<slot_t>& order) {
    std::vector<bool> seen(order.size());
    for (const slot_t slot : order) {
      if (slot < 0 || slot >= static_cast<slot_t>(order.size()) || seen[static_cast<std::size_t>(slot)]) return false;
      seen[static_cast<std::size_t>(slot)] = true;
    }
    return true;
  }

  std::vector<std::vector<slot_t>> slots_;  // of each KV head
};

/// A cache as a reader that sees the published order instead of time order.
template <CacheReader Cache>
struct ReorderedReader {
  const Cache& cache;
  const PublishedOrder& order;

  [[nodiscard]] index_t num_kv_heads() const noexcept { return cache.num_kv_heads(); }
  [[nodiscard]] index_t num_tokens() const noexcept { return cache.num_tokens(); }
  [[nodiscard]] index_t key_dim() const noexcept { return cache.key_dim(); }
  [[nodiscard]] index_t value_dim() const noexcept { return cache.value_dim(); }
  [[nodiscard]] std::uint64_t epoch() const noexcept { return cache.epoch(); }
  [[nodiscard]] position_t position(index_t head, index_t rank) const noexcept {
    return cache.position(head, order.slot_at(head, rank));
  }
  [[nodiscard]] ConstRows keys(index_t head, index_t first, index_t count, float* scratch) const noexcept {
    return gather(head, first, count, cache.key_dim(), scratch,
                  [&](index_t slot, float* out) { return cache.keys(head, slot, 1, out); });
  }
  [[nodiscard]] ConstRows values(index_t head, index_t first, index_t count, float* scratch) const noexcept {
    return gather(head, first, count, cache.value_dim(), scratch,
                  [&](index_t slot, float* out) { return cache.values(head, slot, 1, out); });
  }

 private:
  template <class Read>
  [[nodiscard]] ConstRows gather(index_t head, index_t first, index_t count, index_t dim, float* scratch,
                                 Read read) const noexcept {
    for (index_t i = 0; i < count; ++i) {
      float* const out = scratch + i * dim;
      const ConstRows row = read(order.slot_at(head, first + i), out);
      if (row.data != out) std::copy(row.data, row.data + dim, out);
    }
    return {scratch, count, dim, dim};
  }
};

}  // namespace detail

/// `lambda * importance - (1 - lambda) * redundancy`: an `AttentionScorer`'s score, and a softmax over all cached keys of
/// `key_redundancy_means`.
class RKVScorer {
 public:
  struct Options {
    AttentionScorer importance{};
    RedundancyOptions redundancy{};
    float lambda = 0.07F;
    RKVOrder order = RKVOrder::chronological;
  };

  RKVScorer() = default;
  explicit RKVScorer(const Options& options) : options_(options) {}

  [[nodiscard]] Status validate(const Shape& shape) const {
    if (!(options_.lambda >= 0.0F && options_.lambda <= 1.0F))
      return detail::invalid("lambda = ", options_.lambda, ": must be between 0 and 1");
    if (options_.order == RKVOrder::published && options_.importance.causal)
      return detail::error(StatusCode::unsupported, "causal = true: the published order has no causal mask");
    if (Status s = beaconkv::validate(options_.redundancy, std::numeric_limits<slot_t>::max()); !s) return s;
    return options_.importance.validate(shape);
  }

  template <CacheReader Cache>
  [[nodiscard]] Result<ScoreReport> score(const Cache& cache, const Observations& observations, Range candidates,
                                          ScoreMatrix out, Workspace& work) const {
    if (options_.order == RKVOrder::chronological) return score_in_order(cache, observations, candidates, out, work);
    for (index_t h = 0; h < out.heads; ++h)
      if (!published_.fits(h, out.tokens))
        return detail::error(StatusCode::out_of_order, "cache holds ", out.tokens,
                             " tokens: fewer than the published order of its head ", h, ", which was made for another");
    const Result<ScoreReport> report =
        score_in_order(detail::ReorderedReader<Cache>{cache, published_}, observations, candidates, out, work);
    if (!report) return report;
    const Workspace::Frame frame(work);
    const std::span<float> by_rank = work.take<float>(out.tokens);
    for (index_t h = 0; h < out.heads; ++h) {
      std::copy(out.row(h).begin(), out.row(h).end(), by_rank.begin());
      for (index_t r = 0; r < out.tokens; ++r)
        out.row(h)[static_cast<std::size_t>(published_.slot_at(h, r))] = by_rank[static_cast<std::size_t>(r)];
    }
    return report;
  }

  [[nodiscard]] WorkspaceSize workspace_size(const Shape& shape, index_t rows, index_t tokens) const {
    return detail::measure([&](Workspace& work) {
      static_cast<void>(work.take<float>(tokens));
      const std::size_t inner = std::max(options_.importance.workspace_size(shape, rows, tokens).bytes,
                                         key_redundancy_workspace_size(tokens, shape.head_dim).bytes);
      static_cast<void>(work.take<std::byte>(static_cast<index_t>(inner)));
    });
  }

  [[nodiscard]] bool needs_all_heads() const noexcept {
    return options_.order == RKVOrder::published || options_.importance.needs_all_heads();
  }
  void commit(const KeepPlan& plan, const Shape& shape) {
    if (options_.order == RKVOrder::published) published_.follow(plan, shape.kv_heads);
  }
  [[nodiscard]] std::size_t state_bytes() const noexcept { return published_.state_bytes(); }
  template <class Archive>
  void exchange(Archive& archive) {
    archive.expect("order", static_cast<std::int64_t>(options_.order));
    published_.exchange(archive);
  }

 private:
  template <CacheReader Cache>
  [[nodiscard]] Result<ScoreReport> score_in_order(const Cache& cache, const Observations& observations, Range candidates,
                                                   ScoreMatrix out, Workspace& work) const {
    const Result<ScoreReport> report = options_.importance.score(cache, observations, candidates, out, work);
    if (!report || options_.lambda == 1.0F) return report;
    const Workspace::Frame frame(work);
    const std::span<float> redundancy = work.take<float>(out.tokens);
    for (index_t h = 0; h < out.heads; ++h) {
      const auto keys = [&](index_t first, index_t count, float* scratch) { return cache.keys(h, first, count, scratch); };
      if (Status s = key_redundancy(keys, out.tokens, cache.key_dim(), options_.redundancy, redundancy, work); !s) return s;
      const std::span<float> row = out.row(h);
      for (std::size_t j = 0; j < row.size(); ++j) row[j] = options_.lambda * row[j] - (1 - options_.lambda) * redundancy[j];
    }
    return report;
  }

  Options options_{};
  detail::PublishedOrder published_;  // used by the published order only
};

template <Schedule ScheduleT = IntervalBudget>
struct RKVOptions {
  ScheduleT budget{};
  index_t n_recent_queries = 8;         ///< the observation window's queries (alpha)
  index_t n_recent_kv = 8;              ///< the observation window's tokens, which stay
  std::optional<index_t> n_prefix = 0;  ///< positions below this stay; as published the prompt is evicted like everything else
  float lambda = 0.07F;                 ///< weight of the importance; the published code's default, its README says 0.1
  Pool pool{PoolKind::max, 7};
  Reduce over_queries = Reduce::mean;
  Reduce over_heads = Reduce::max;  ///< over the group's logits
  GroupStage group_stage = GroupStage::logits;
  SoftmaxDomain softmax_domain = SoftmaxDomain::candidates_only;
  RedundancyOptions redundancy{};  ///< column 0 as published, unless `spare_column_zero` is false
  RKVOrder order = RKVOrder::chronological;
  bool causal = true;  ///< matters only where the queries reach back over candidates; never in the published order
  std::optional<float> scale{};
  std::optional<float> logit_softcap{};
  std::span<const float> sink_logits{};  ///< of each query head, of a model with learned sinks; must outlive the policy
};

/// R-KV (arXiv 2505.24133) and its published code.
///
/// | part | here |
/// |---|---|
/// | observer | the last `n_recent_queries` queries |
/// | scorer | importance (maximum of the group's logits, softmax over candidates, mean, max pool) against key redundancy |
/// | schedule | `IntervalBudget`: the prompt, then every `interval` tokens, down to `tokens` |
/// | protected | the last `n_recent_kv` tokens |
///
/// The paper zeroes `S[j][i]` for look-alikes, the published code `S[i][j]` of one of them: this is the code's
/// (`RedundancyOptions`).
template <class ScorerT = RKVScorer, Schedule ScheduleT = IntervalBudget>
class RKV : public EvictionPolicy<RecentQueries, ScorerT, ScheduleT> {
 public:
  using Base = EvictionPolicy<RecentQueries, ScorerT, ScheduleT>;
  using Options = RKVOptions<ScheduleT>;

  /// What R-KV's options mean as a scorer.
  [[nodiscard]] static RKVScorer scorer_of(const Options& o) {
    const AttentionScorer importance{.attention = {.over_queries = o.over_queries,
                                                   .over_heads = o.over_heads,
                                                   .group_stage = o.group_stage,
                                                   .pool = o.pool,
                                                   .pool_stage = PoolStage::kv_head,
                                                   .scale = o.scale,
                                                   .logit_softcap = o.logit_softcap},
                                     .softmax_domain = o.softmax_domain,
                                     .causal = o.causal && o.order == RKVOrder::chronological,
                                     .sink_logits = o.sink_logits};
    return RKVScorer({.importance = importance, .redundancy = o.redundancy, .lambda = o.lambda, .order = o.order});
  }

  /// The policy, or what is wrong with its options. Without a table queries must come rotated.
  [[nodiscard]] static Result<RKV> make(const Shape& shape, const Options& options,
                                        RopeTable rope = {}) requires std::same_as<ScorerT, RKVScorer> {
    return make(shape, options, std::move(rope), scorer_of(options));
  }
  /// The same with another scorer.
  [[nodiscard]] static Result<RKV> make(const Shape& shape, const Options& options, RopeTable rope, ScorerT scorer) {
    const typename Base::Parts parts{.observer = {.count = options.n_recent_queries},
                                     .scorer = std::move(scorer),
                                     .schedule = options.budget,
                                     .protection = {options.n_prefix, options.n_recent_kv},
                                     .rope = std::move(rope)};
    if (Status s = Base::validate_parts(shape, parts); !s) return s;
    return RKV(shape, parts);
  }

#ifndef BEACONKV_NO_EXCEPTIONS
  /// As `make`; throws `Error`.
  RKV(const Shape& shape, const Options& options, RopeTable rope = {})
  requires std::same_as<ScorerT, RKVScorer> : RKV(make(shape, options, std::move(rope)).or_throw()) {}
#endif

 private:
  RKV(const Shape& shape, const typename Base::Parts& parts) : Base(shape, parts) {}
};

}  // namespace beaconkv::inline v0
