// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Driving the library's policies over a case, and comparing what they kept.

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "beaconkv/beaconkv.hpp"
#include "case.hpp"
#include "report.hpp"

namespace beaconkv::conformance {

/// A cache with memory of its own that is filled from a case's arrays. Keys and values may differ in width.
class CaseCache {
 public:
  CaseCache(index_t heads, index_t key_dim, index_t value_dim, index_t capacity);
  CaseCache(CaseCache&&) noexcept = default;  // a moved vector keeps its memory
  CaseCache& operator=(CaseCache&&) noexcept = default;
  CaseCache(const CaseCache&) = delete;
  CaseCache& operator=(const CaseCache&) = delete;

  /// All tokens of `k` and `v` [Hk,L,*], at positions 0..L-1; each head stands there `repeat` times, one behind the other.
  [[nodiscard]] static CaseCache filled(const FloatArray& k, const FloatArray& v, index_t repeat = 1);

  /// Writes one head's row of the token that `append` adds next.
  void write(index_t head, const float* key, const float* value);
  void append(position_t position) { view_.append(position).or_throw(); }

  [[nodiscard]] PlaneCache<float>& view() noexcept { return view_; }
  [[nodiscard]] const PlaneCache<float>& view() const noexcept { return view_; }

 private:
  std::vector<float> keys_;
  std::vector<float> values_;
  PlaneCache<float> view_;
};

/// The values of a case, or its keys where it has none: so that something moves along with them.
[[nodiscard]] FloatArray values_or_keys(const Case& c, const FloatArray& k);

/// The part `[range.first, range.last)` of every row of `scores` [heads][tokens].
[[nodiscard]] std::vector<float> columns(std::span<const float> scores, index_t heads, index_t tokens, Range range);

/// The kept slots of `heads` heads, one head behind the other.
[[nodiscard]] std::vector<std::int64_t> kept_slots(const KeepPlan& plan, index_t heads);

/// The true positions in the cache, one head behind the other.
[[nodiscard]] std::vector<std::int64_t> cached_positions(const PlaneCache<float>& cache);

/// The positions in the order in which the published code stores them: the chosen tokens by descending score, then the window.
[[nodiscard]] std::vector<std::int64_t> cached_positions(const PlaneCache<float>& cache, const detail::PublishedOrder& order);

/// One eviction of a policy, from a cache that a case describes.
template <class Policy>
class SingleStep {
 public:
  SingleStep(Policy policy, CaseCache cache)
      : policy_(std::move(policy)),
        cache_(std::move(cache)),
        work_(policy_.workspace_size(cache_.view().num_tokens())),
        scores_(static_cast<std::size_t>(cache_.view().num_kv_heads() * cache_.view().num_tokens())) {}

  [[nodiscard]] Policy& policy() noexcept { return policy_; }
  [[nodiscard]] const PlaneCache<float>& cache() const noexcept { return cache_.view(); }
  /// What the eviction kept.
  [[nodiscard]] const KeepPlan& plan() const noexcept { return work_.plan(); }

  /// The first `count` tokens of `q` [Hq,rows,D], rotated, as the queries of the newest tokens.
  void observe(const FloatArray& q, index_t count) {
    const QueryView queries{q.data.data(), count, q.dim(0), q.dim(2), q.dim(2), q.dim(1) * q.dim(2)};
    policy_.prefill_rotated(queries, work_, std::max<position_t>(0, cache_.view().num_tokens() - count)).or_throw();
  }

  /// All tokens of `q` [Hq,L,D], before RoPE, as the queries of the prompt.
  void observe_pre_rope(const FloatArray& q) {
    const QueryView queries{q.data.data(), q.dim(1), q.dim(0), q.dim(2), q.dim(2), q.dim(1) * q.dim(2)};
    policy_.prefill(queries, work_).or_throw();
  }

  /// The policy's scores of the slots of `range`, [heads][range].
  [[nodiscard]] std::vector<float> scores(Range range) {
    policy_.score(cache(), matrix(), work_).or_throw();
    return columns(scores_, cache().num_kv_heads(), cache().num_tokens(), range);
  }

  /// One whole eviction, as far as the policy's own schedule wants.
  void evict() { beaconkv::evict(policy_, cache_.view(), work_).or_throw(); }

  /// Keeps `keep` tokens, by the scores that `scores` found last.
  void evict(index_t keep) {
    policy_.select(cache(), matrix(), work_, work_.plan(), keep).or_throw();
    compact(cache_.view(), work_.plan()).or_throw();
    policy_.commit(work_.plan()).or_throw();
  }

 private:
  [[nodiscard]] ScoreMatrix matrix() noexcept { return {scores_.data(), cache().num_kv_heads(), cache().num_tokens()}; }

  Policy policy_;
  CaseCache cache_;
  Workspace work_;
  std::vector<float> scores_;
};

/// What a single-step case of a published method consists of.
struct WindowCase {
  /// Reads `q_obs` [Hq,rows,D], `k` [Hk,L,D] and `v`.
  explicit WindowCase(const Case& c);

  Shape shape;
  index_t tokens;
  FloatArray q;
  FloatArray k;
  FloatArray v;
};

/// The scores of a policy with these options, as `SingleStep::scores`.
template <class Policy>
[[nodiscard]] std::vector<float> window_scores(const Shape& shape, const typename Policy::Options& options, const WindowCase& w,
                                               index_t queries, Range range) {
  SingleStep<Policy> step(Policy::make(shape, options).or_throw(),
                          CaseCache::filled(w.k, w.k, shape.kv_heads / w.shape.kv_heads));
  step.observe(w.q, queries);
  return step.scores(range);
}

/// The library's scores of the slots of `range`, [heads][range].
struct Scored {
  std::vector<float> values;
  Range range{};
};

/// The slots of `range` of `scores` [heads][tokens], apart from the others: each part has a size of its own to be exact to.
void compare_part(Report& report, const std::string& name, const FloatArray& expected, std::span<const float> actual,
                  Range range);

/// The candidates' scores among kvpress's mark of protected tokens: the best score of all heads, plus 1.
[[nodiscard]] Scored with_mark(const Scored& candidates, index_t heads, index_t tokens);

/// The array `array` [rows][range] against these scores, where the case has it.
void compare_scores(Report& report, const Case& c, const std::string& array, const Scored& scored);

/// `kept` (and `kept_order`): equal sets, or where scores tie at the boundary equal multisets of kept scores.
/// `actual` is [heads][kept].
void compare_kept(Report& report, const Case& c, std::span<const std::int64_t> actual, index_t heads, const Scored& scored);

/// `kept_order`, where the case has it, names the slots of `kept`.
void compare_order_as_set(Report& report, const Case& c, const IndexArray& kept);

/// The published order of positions after `plan` was applied to `cache`: as expected, or exchanged only among candidates whose
/// scores are equal within the tolerance.
void compare_order(Report& report, const std::string& array, const IndexArray& expected, const PlaneCache<float>& cache,
                   const detail::PublishedOrder& order, const KeepPlan& plan);

/// `k_out` and `v_out`, where the case has them: the rows of the compacted cache, bit for bit. They stand in the order of
/// `kept_order`, or of `kept` where there is none.
void compare_compacted(Report& report, const Case& c, const PlaneCache<float>& cache);

/// Every cached row holds the bits of the row of `k` and `v` at its position.
void compare_rows(Report& report, const PlaneCache<float>& cache, const FloatArray& k, const FloatArray& v, index_t repeat = 1);

/// In which form a case gives queries.
enum class QueryForm : std::uint8_t { pre_rope, rotated };

/// A sequence of tokens whose queries and keys a case gives, decoded one by one.
template <class Policy>
class Trace {
 public:
  /// `q` [Hq,T,D], `k` [Hk,T,D].
  Trace(Policy policy, const FloatArray& q, const FloatArray& k, QueryForm form)
      : policy_(std::move(policy)),
        q_(q),
        k_(k),
        form_(form),
        cache_(k.dim(0), k.dim(2), k.dim(2), k.dim(1)),
        work_(policy_.workspace_size(k.dim(1))),
        queries_(static_cast<std::size_t>(q.dim(0) * q.dim(2))) {}

  [[nodiscard]] index_t tokens() const noexcept { return k_.dim(1); }
  [[nodiscard]] const Policy& policy() const noexcept { return policy_; }
  [[nodiscard]] const PlaneCache<float>& cache() const noexcept { return cache_.view(); }
  [[nodiscard]] const KeepPlan& plan() const noexcept { return work_.plan(); }
  [[nodiscard]] bool due() const { return policy_.due(cache()); }

  /// The first `count` tokens at once.
  void prefill(index_t count) {
    for (index_t t = 0; t < count; ++t) append(t);
    const QueryView queries{q_.data.data(), count, q_.dim(0), q_.dim(2), q_.dim(2), q_.dim(1) * q_.dim(2)};
    (form_ == QueryForm::rotated ? policy_.prefill_rotated(queries, work_) : policy_.prefill(queries, work_)).or_throw();
  }

  void decode(index_t token) {
    append(token);
    for (index_t h = 0; h < q_.dim(0); ++h) std::copy_n(q_.row(h, token), q_.dim(2), queries_.begin() + h * q_.dim(2));
    (form_ == QueryForm::rotated ? policy_.observe_rotated(queries_, token) : policy_.observe(queries_, token)).or_throw();
  }

  [[nodiscard]] std::vector<float> scores() {
    std::vector<float> out(static_cast<std::size_t>(cache().num_kv_heads() * cache().num_tokens()));
    policy_.score(cache(), {out.data(), cache().num_kv_heads(), cache().num_tokens()}, work_).or_throw();
    return out;
  }

  void evict() { beaconkv::evict(policy_, cache_.view(), work_).or_throw(); }

 private:
  void append(index_t token) {
    for (index_t h = 0; h < k_.dim(0); ++h) cache_.write(h, k_.row(h, token), k_.row(h, token));
    cache_.append(token);
  }

  Policy policy_;
  const FloatArray& q_;
  const FloatArray& k_;
  QueryForm form_;
  CaseCache cache_;
  Workspace work_;
  std::vector<float> queries_;  // of one token, [Hq][D]
};

/// Compares the arrays `array_0`, `array_1`, ... of a trace, one an eviction.
class Rounds {
 public:
  Rounds(Report& report, const Case& c, std::string array) : report_(report), case_(c), array_(std::move(array)) {}

  /// The name of the array of the round that runs now; empty, and noted, where the case has no such round.
  [[nodiscard]] std::optional<std::string> begin(position_t position);
  /// After the last token: the case must not have more rounds.
  void end();

 private:
  Report& report_;
  const Case& case_;
  std::string array_;
  index_t round_ = 0;
};

}  // namespace beaconkv::conformance
