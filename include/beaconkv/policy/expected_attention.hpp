// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// ExpectedAttention: the tokens that queries to come are expected to attend to stay.

#include <algorithm>
#include <vector>

#include "beaconkv/policy/key_scores.hpp"
#include "beaconkv/policy/query_moments.hpp"

namespace beaconkv::inline v0 {

/// The logarithm of what a normally distributed query's exponential is on average, then a softmax, mean over the group, times
/// the length of the value. The first observed row is the mean of the queries, the others are roots of their covariance
/// (`QueryMoments`).
struct ExpectedAttentionScorer {
  index_t n_sink = 4;  ///< protected positions below this have no part in the softmax
  bool value_norm = true;
  float epsilon = 0;             ///< added to the weight that the length of the value multiplies
  std::optional<float> scale{};  ///< of the logits; default 1 / sqrt(dim)

  [[nodiscard]] Status validate(const Shape&) const {
    if (n_sink < 0) return detail::invalid("n_sink = ", n_sink, ": must not be negative");
    if (!(epsilon >= 0 && detail::is_finite(epsilon))) return detail::invalid("epsilon = ", epsilon, ": must not be negative");
    if (scale && !(*scale > 0 && detail::is_finite(*scale))) return detail::invalid("scale = ", *scale, ": must be positive");
    return {};
  }

  template <CacheReader Cache>
  [[nodiscard]] Result<ScoreReport> score(const Cache& cache, const Observations& seen, Range candidates, ScoreMatrix out,
                                          Workspace& work) const {
    if (value_norm)
      if (Status s = detail::check_value_width(cache.value_dim(), cache.key_dim()); !s) return s;
    const Workspace::Frame frame(work);
    const index_t group = seen.query_heads / out.heads;
    const Scratch scratch(work, group, seen.rows, cache.key_dim(), out.tokens);
    ScoreReport report;
    for (index_t h = 0; h < out.heads; ++h) {
      const Range domain{std::min<index_t>(candidates.first, detail::slot_at_or_behind(cache, h, n_sink)), out.tokens};
      const std::span<float> row = out.row(h);
      std::fill(row.begin(), row.end(), 0.0F);
      report.num_non_finite += write_logits(cache, h, seen, group, domain, scratch);
      for (index_t g = 0; g < group && seen.rows > 0; ++g) {
        const std::span<float> weights = scratch.logits.subspan(static_cast<std::size_t>(g * out.tokens + domain.first),
                                                                static_cast<std::size_t>(domain.size()));
        detail::softmax(weights);
        for (std::size_t j = 0; j < weights.size(); ++j)
          row[static_cast<std::size_t>(domain.first) + j] += weights[j] / static_cast<float>(group);
      }
      if (value_norm) report.num_non_finite += multiply_by_values(cache, h, domain, row, scratch);
      for (index_t j = domain.first; j < domain.last; ++j)
        if (scratch.bad[static_cast<std::size_t>(j)] != 0) row[static_cast<std::size_t>(j)] = detail::quiet_nan();
    }
    return report;
  }

  [[nodiscard]] WorkspaceSize workspace_size(const Shape& shape, index_t rows, index_t tokens) const {
    return detail::measure(
        [&](Workspace& work) { static_cast<void>(Scratch(work, shape.group(), rows, shape.head_dim, tokens)); });
  }

 private:
  struct Scratch {
    Scratch(Workspace& work, index_t group, index_t rows, index_t dim, index_t tokens)
        : padded(detail::round_up(rows, detail::lanes)),
          packed(work.take<float>(group * padded * dim)),
          decoded(work.take<float>(detail::tile_rows * dim)),
          products(work.take<float>(detail::tile_rows * group * padded)),
          logits(work.take<float>(group * tokens)),
          bad(work.take<std::uint8_t>(tokens)) {}
    index_t padded;  // rows of a query head
    std::span<float> packed;
    std::span<float> decoded;
    std::span<float> products;  // [tile][group][padded]
    std::span<float> logits;    // [group][tokens]
    std::span<std::uint8_t> bad;
  };

  /// Masked where the key, or its logit, is not finite. Returns how many keys are not.
  template <CacheReader Cache>
  [[nodiscard]] index_t write_logits(const Cache& cache, index_t head, const Observations& seen, index_t group, Range domain,
                                     const Scratch& scratch) const {
    const index_t dim = cache.key_dim();
    const index_t total = group * scratch.padded;
    const index_t tokens = static_cast<index_t>(scratch.bad.size());
    const float factor = scale.value_or(1.0F / std::sqrt(static_cast<float>(dim)));
    detail::run<detail::PackRows>(seen.queries + head * group * seen.rows * dim, group, seen.rows, scratch.padded, total, dim,
                                  factor, scratch.packed.data());
    index_t found = 0;
    const auto keys = [&](index_t first, index_t count, float* to) { return cache.keys(head, first, count, to); };
    detail::for_each_tile(keys, domain, dim, scratch.decoded, [&](index_t j, const ConstRows& rows) {
      bool not_finite = false;
      detail::run<detail::Products>(scratch.packed.data(), total, dim, rows.data, rows.stride, rows.rows,
                                    scratch.products.data(), &not_finite);
      for (index_t i = 0; i < rows.rows; ++i) {
        const bool bad = (not_finite || total == 0) && !detail::all_finite(rows.row(i), dim);
        scratch.bad[static_cast<std::size_t>(j + i)] = bad ? 1 : 0;
        found += bad ? 1 : 0;
        for (index_t g = 0; g < group; ++g) {
          const float* const product = scratch.products.data() + i * total + g * scratch.padded;
          double variance = 0;
          for (index_t r = 1; r < seen.rows; ++r) variance += static_cast<double>(product[r]) * static_cast<double>(product[r]);
          const double logit = seen.rows > 0 ? static_cast<double>(product[0]) + variance / 2 : 0;
          const double most = static_cast<double>(-detail::masked_logit);
          scratch.logits[static_cast<std::size_t>(g * tokens + j + i)] =
              bad || !detail::is_finite(logit) ? detail::masked_logit : static_cast<float>(std::clamp(logit, -most, most));
        }
      }
    });
    return found;
  }

  template <CacheReader Cache>
  [[nodiscard]] index_t multiply_by_values(const Cache& cache, index_t head, Range domain, std::span<float> row,
                                           const Scratch& scratch) const {
    index_t found = 0;
    const auto values = [&](index_t first, index_t count, float* to) { return cache.values(head, first, count, to); };
    detail::for_each_tile(values, domain, cache.value_dim(), scratch.decoded, [&](index_t j, const ConstRows& rows) {
      float lengths[static_cast<std::size_t>(detail::tile_rows)];
      detail::run<detail::RowLengths>(rows.data, rows.stride, rows.dim, rows.rows, static_cast<float*>(lengths));
      for (index_t i = 0; i < rows.rows; ++i) {
        float& score = row[static_cast<std::size_t>(j + i)];
        score = (score + epsilon) * lengths[i];
        if (lengths[i] >= 0) continue;
        scratch.bad[static_cast<std::size_t>(j + i)] = 1;
        ++found;
      }
    });
    return found;
  }
};

template <Schedule ScheduleT = FixedBudget>
struct ExpectedAttentionOptions {
  ScheduleT budget{};
  index_t n_recent_kv = 0;              ///< newest tokens, which stay; none are protected as published
  std::optional<index_t> n_prefix = 4;  ///< positions below this stay: the sinks
  index_t n_sink = 4;                   ///< queries and protected keys below this position are left out
  index_t n_future_positions = 512;     ///< over which the rotation of the expected query is averaged
  bool use_covariance = true;
  bool value_norm = true;
  float epsilon = 0;  ///< added to the weight that the length of the value multiplies
  std::optional<float> scale{};
};

/// ExpectedAttention (arXiv 2510.00636), as kvpress has it.
///
/// * observer: `QueryMoments`: mean and covariance of all pre-RoPE queries of each query head
/// * scorer: `softmax(mu.k / sqrt(D) + k^T C k / (2 D))` with both turned by the mean rotation over the coming positions; mean
///   over the group; times the length of the value
/// * schedule: `FixedBudget`; the published code evicts once, after the prompt, which is `PromptBudget`
/// * protected: the first `n_prefix` positions
///
/// The published code takes the covariance as a matrix, this takes its Cholesky root: the same numbers up to rounding. There
/// the queries are those of the prompt, here all queries so far, evicted tokens' too. Scoring costs as much as D observed
/// queries would.
template <class ScorerT = ExpectedAttentionScorer, Schedule ScheduleT = FixedBudget>
class ExpectedAttention : public EvictionPolicy<QueryMoments, ScorerT, ScheduleT> {
 public:
  using Base = EvictionPolicy<QueryMoments, ScorerT, ScheduleT>;
  using Options = ExpectedAttentionOptions<ScheduleT>;

  /// What ExpectedAttention's options mean as a scorer.
  [[nodiscard]] static ExpectedAttentionScorer scorer_of(const Options& o) {
    return {.n_sink = o.n_sink, .value_norm = o.value_norm, .epsilon = o.epsilon, .scale = o.scale};
  }

  /// The policy, or what is wrong with its options.
  [[nodiscard]] static Result<ExpectedAttention> make(
      const Shape& shape, const Options& options,
      const RopeTable& rope) requires std::same_as<ScorerT, ExpectedAttentionScorer> {
    return make(shape, options, rope, scorer_of(options));
  }
  /// The same with another scorer.
  [[nodiscard]] static Result<ExpectedAttention> make(const Shape& shape, const Options& options, const RopeTable& rope,
                                                      ScorerT scorer) {
    const typename Base::Parts parts{.observer = {.n_sink = options.n_sink,
                                                  .n_future_positions = options.n_future_positions,
                                                  .use_covariance = options.use_covariance},
                                     .scorer = std::move(scorer),
                                     .schedule = options.budget,
                                     .protection = {options.n_prefix, options.n_recent_kv},
                                     .rope = rope};
    if (Status s = Base::validate_parts(shape, parts); !s) return s;
    return ExpectedAttention(shape, parts);
  }

#ifndef BEACONKV_NO_EXCEPTIONS
  /// As `make`; throws `Error`.
  ExpectedAttention(const Shape& shape, const Options& options,
                    const RopeTable& rope) requires std::same_as<ScorerT, ExpectedAttentionScorer>
      : ExpectedAttention(make(shape, options, rope).or_throw()) {}
#endif

 private:
  ExpectedAttention(const Shape& shape, const typename Base::Parts& parts) : Base(shape, parts) {}
};

}  // namespace beaconkv::inline v0
