// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Scorers: how observed queries and cached keys become one number a key. The one interface that all policies share.

#include <concepts>
#include <span>

#include "beaconkv/algorithm/attention.hpp"
#include "beaconkv/keep_plan.hpp"
#include "beaconkv/memory/cache_buffer.hpp"
#include "beaconkv/policy/observer.hpp"
#include "beaconkv/policy/value_norm.hpp"

namespace beaconkv::inline v0 {

/// Scores `[kv_heads][tokens]`, dense. A higher score stays. Outside the candidates it is never read.
struct ScoreMatrix {
  float* data = nullptr;
  index_t heads = 0;
  index_t tokens = 0;

  [[nodiscard]] std::span<float> row(index_t head) const noexcept {
    return {data + head * tokens, static_cast<std::size_t>(tokens)};
  }
};

/// What turns observations into scores. Your own policy is one such struct, put into any of the library's policies.
///
/// * `validate(shape)`: what is wrong with its options, before a policy is made.
/// * `score(cache, observations, candidates, out, work)`: writes `out` for the slots `[candidates.first, candidates.last)`
///   of every head; it may read everything in the cache. Counts non-finite rows. Const: no state of its own changes.
/// * `workspace_size(shape, rows, tokens)`: the most scratch that `score` takes from `work`.
/// * optional `needs_all_heads()`: true where a head's scores depend on other heads, or on their queries, which a ragged cache
///   cannot offer. Others are asked for one KV head at a time, as if it were a layer, and for several on as many threads; which
///   head it is tells `observations.first_query_head`, the first query head of its group. (For all heads at once only where the
///   observer shows no rows and one thread scores.)
/// * optional `commit(plan, shape)`: follows an applied plan with per-slot state; `state_bytes()` reports its size. A static
///   `follows_evictions_only` spares it plans that evict nothing.
/// * optional `score` that is not const, beside the const one: notes what `commit` will need, where `takes_notes()`. Comes with
///   `reserve(shape, rows, slots)`, called before each scoring, and `noted(epoch)`, called behind it. Its observations have
///   tags.
/// * optional `reads_keys = true`: keys must be as wide as the shape says even where the observer remembers no queries.
/// * optional `scores_every_slot = true`: `out` is written for all slots, and `plan.kept_scores` has those of protected ones,
/// too.
template <class S, class Cache>
concept Scorer = CacheReader<Cache> && std::copyable<S> &&
    requires(const S& scorer, const Cache& cache, const Observations& observations, Range candidates, ScoreMatrix out,
             Workspace& work, const Shape& shape, index_t n) {
  { scorer.validate(shape) } -> std::same_as<Status>;
  { scorer.score(cache, observations, candidates, out, work) } -> std::same_as<Result<ScoreReport>>;
  { scorer.workspace_size(shape, n, n) } -> std::same_as<WorkspaceSize>;
};

/// Newer is better: the score of a slot is its number (exact below 2^24 slots).
struct RecencyScorer {
  [[nodiscard]] Status validate(const Shape&) const { return {}; }
  template <CacheReader Cache>
  [[nodiscard]] Result<ScoreReport> score(const Cache&, const Observations&, Range candidates, ScoreMatrix out,
                                          Workspace&) const {
    for (index_t h = 0; h < out.heads; ++h)
      for (index_t j = candidates.first; j < candidates.last; ++j)
        out.row(h)[static_cast<std::size_t>(j)] = static_cast<float>(j);
    return ScoreReport{};
  }
  [[nodiscard]] WorkspaceSize workspace_size(const Shape&, index_t, index_t) const { return {}; }
};

namespace detail {

/// The keys of one head as `attention_scores` reads them, and what is read after them: `next`, if another head is.
template <CacheReader Cache>
struct KeysOfHead {
  const Cache& cache;
  index_t head;
  Range domain;
  const MemoryAhead* next;

  ConstRows operator()(index_t first, index_t count, float* scratch) const noexcept {
    return cache.keys(head, first, count, scratch);
  }
  /// The next tile of keys, or, where heads are short, that of the next head; the values of this tile, since they move if an
  /// eviction follows; and with the last whole tile `next`.
  MemoryAhead ahead(index_t first, index_t count) const noexcept requires has_memory_ahead<Cache> {
    const index_t behind = first + count;
    const bool next_head = next != nullptr && domain.size() <= 4 * tile_keys;
    MemoryAhead memory;
    memory.add(next_head ? cache.keys_ahead(head + 1, first, count)
                         : cache.keys_ahead(head, behind, std::min(tile_keys, domain.last - behind)));
    memory.add(cache.values_ahead(head, first, count));
    if (next != nullptr && behind + tile_keys > domain.last && (count == tile_keys || first == domain.first)) memory.add(*next);
    return memory;
  }
};

}  // namespace detail

/// Attention of the observed queries to the keys: SnapKV, RPC, R-KV's importance and BeaconKV are settings of this.
struct AttentionScorer {
  AttentionOptions attention{};
  SoftmaxDomain softmax_domain = SoftmaxDomain::all_visible;
  HeadScope head_scope = HeadScope::group;  ///< `layer`: every KV head gets the scores reduced over all query heads
  bool causal = true;                       ///< false: a query sees keys newer than itself, too
  std::span<const float> sink_logits{};     ///< `[query_heads]` of a model with learned sinks, which share every softmax;
                                            ///< must outlive the scorer
  bool value_norm = false;                  ///< each final score times the Euclidean length of the key's value

  [[nodiscard]] Status validate(const Shape& shape) const {
    const auto sinks = static_cast<index_t>(sink_logits.size());
    if (sinks != 0 && sinks != shape.query_heads)
      return detail::invalid("sink_logits has ", sinks, " entries: must be one for each of ", shape.query_heads,
                             " query heads");
    if (!detail::all_finite(sink_logits.data(), sinks)) return detail::invalid("sink_logits: must be finite");
    if (sinks != 0 && attention.group_stage == GroupStage::logits)
      return detail::error(StatusCode::unsupported, "sink_logits: need group_stage = weights");
    return beaconkv::validate(attention);
  }
  [[nodiscard]] bool needs_all_heads() const noexcept { return head_scope == HeadScope::layer; }

  template <CacheReader Cache>
  [[nodiscard]] Result<ScoreReport> score(const Cache& cache, const Observations& observations, Range candidates,
                                          ScoreMatrix out, Workspace& work) const {
    const Workspace::Frame frame(work);
    const index_t group = observations.query_heads / out.heads;
    const std::span<slot_t> visible = work.take<slot_t>(group * observations.rows);
    const Range shared = domain(candidates, out.tokens);
    AttentionOptions options = attention;
    if (head_scope == HeadScope::layer && options.pool_stage == PoolStage::kv_head) options.pool = {};  // pooled below, once
    ScoreReport report;
    for (index_t h = 0; h < out.heads; ++h) {
      const AttentionQueries queries = queries_of_head(cache, observations, h, group, out.tokens, visible);
      const detail::KeysOfHead<Cache> keys{cache, h, shared, h + 1 < out.heads ? &detail::nothing_ahead : observations.next};
      const std::span<float> row = out.row(h);
      std::fill(row.begin(), row.end(), 0.0F);
      const Result<ScoreReport> part =
          attention_scores(keys, queries, shared, candidates, options,
                           row.subspan(static_cast<std::size_t>(shared.first), static_cast<std::size_t>(shared.size())), work);
      if (!part) return part;
      report.num_non_finite += part->num_non_finite;
    }
    if (head_scope == HeadScope::layer) share_over_heads(out, candidates, work);
    for (index_t h = 0; h < out.heads; ++h) {
      const Result<index_t> bad = weigh_by_values(cache, h, candidates, observations.dim, out.row(h), work);
      if (!bad) return bad.status();
      report.num_non_finite += *bad;
    }
    return report;
  }

  // What scorers that are made of this one share.

  /// The keys that share each row's softmax.
  [[nodiscard]] Range domain(Range candidates, index_t tokens) const noexcept {
    return softmax_domain == SoftmaxDomain::all_visible ? Range{0, tokens} : candidates;
  }
  /// The rows of one head's group, with what each sees, which is written to `visible` `[group][rows]`.
  template <CacheReader Cache>
  [[nodiscard]] AttentionQueries queries_of_head(const Cache& cache, const Observations& observations, index_t head,
                                                 index_t group, index_t tokens, std::span<slot_t> visible) const {
    const index_t first_row = head * group * observations.rows;
    const auto positions = observations.positions.subspan(static_cast<std::size_t>(first_row), visible.size());
    const auto rows = static_cast<std::size_t>(observations.rows);
    for (std::size_t r = 0; r < visible.size(); ++r) {
      if (r >= rows && positions[r] == positions[r - rows])  // as in the query head before
        visible[r] = visible[r - rows];
      else
        visible[r] = static_cast<slot_t>(causal ? detail::slot_at_or_behind(cache, head, positions[r] + 1) : tokens);
    }
    AttentionQueries queries{
        observations.queries + first_row * observations.dim, group, observations.rows, observations.dim, visible, {}};
    if (!sink_logits.empty())
      queries.sink_logits = sink_logits.subspan(static_cast<std::size_t>(observations.first_query_head + head * group),
                                                static_cast<std::size_t>(group));
    return queries;
  }
  /// The last step, where `value_norm` asks for it. Returns how many values are not finite.
  template <CacheReader Cache>
  [[nodiscard]] Result<index_t> weigh_by_values(const Cache& cache, index_t head, Range candidates, index_t head_dim,
                                                std::span<float> scores, Workspace& work) const {
    if (!value_norm) return index_t{0};
    return detail::multiply_by_value_norms(cache, head, candidates, head_dim, scores, work);
  }

  [[nodiscard]] WorkspaceSize workspace_size(const Shape& shape, index_t rows, index_t tokens) const {
    return detail::measure([&](Workspace& work) {
      static_cast<void>(work.take<slot_t>(shape.group() * rows));
      const WorkspaceSize inner = max(attention_workspace_size(shape.group(), rows, shape.head_dim, tokens),
                                      value_norm ? detail::value_norm_workspace_size(shape.head_dim) : WorkspaceSize{});
      static_cast<void>(work.take<std::byte>(static_cast<index_t>(inner.bytes)));
    });
  }

 private:
  /// Reduces the groups' scores over all KV heads, pools once, and gives every head the result. A key that is not finite in one
  /// head has no weight there, and no score in any.
  void share_over_heads(ScoreMatrix out, Range candidates, Workspace& work) const {
    const Workspace::Frame frame(work);
    const std::span<std::uint8_t> bad = work.take<std::uint8_t>(out.tokens);
    const std::span<float> first = out.row(0);
    for (std::size_t j = 0; j < first.size(); ++j) {
      float shared = 0;
      bad[j] = 0;
      for (index_t h = 0; h < out.heads; ++h) {
        const float score = out.row(h)[j];
        if (detail::is_nan(score))
          bad[j] = 1;
        else
          shared = attention.over_heads == Reduce::max ? std::max(shared, score) : shared + score;
      }
      first[j] = attention.over_heads == Reduce::mean ? shared * (1.0F / static_cast<float>(out.heads)) : shared;
    }
    if (attention.pool_stage == PoolStage::kv_head)
      detail::pool_in_place(
          first.subspan(static_cast<std::size_t>(candidates.first), static_cast<std::size_t>(candidates.size())),
          attention.pool, work.take<float>(out.tokens));
    for (std::size_t j = 0; j < first.size(); ++j)
      if (bad[j] != 0) first[j] = detail::quiet_nan();
    for (index_t h = 1; h < out.heads; ++h) std::copy(first.begin(), first.end(), out.row(h).begin());
  }
};

}  // namespace beaconkv::inline v0
