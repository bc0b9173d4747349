// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Baselines that look at no query: the length of a key (Knorm), how far it is from the others' direction (KeyDiff), how unlike
/// the tokens behind it (LagKV).

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "beaconkv/kernel/row_lengths.hpp"
#include "beaconkv/policy/evict.hpp"
#include "beaconkv/policy/key_diff_mix.hpp"

namespace beaconkv::inline v0 {

namespace detail {

/// Keys and values are read in tiles of this many rows at most.
inline constexpr index_t tile_rows = 64;
/// How much wider than keys values may be.
inline constexpr index_t most_value_width = 8;

/// Calls `f(first, rows)` for the rows of `range`, as `read(first, count, scratch)` gives them, in tiles that fit `scratch`.
template <class Read, class F>
void for_each_tile(const Read& read, Range range, index_t dim, std::span<float> scratch, F&& f) {
  const index_t at_once = std::clamp<index_t>(static_cast<index_t>(scratch.size()) / dim, 1, tile_rows);
  for (index_t first = range.first; first < range.last; first += at_once)
    f(first, read(first, std::min(at_once, range.last - first), scratch.data()));
}

[[nodiscard]] inline Status check_value_width(index_t value_dim, index_t key_dim) {
  if (value_dim >= 1 && value_dim <= most_value_width * key_dim) return {};
  return error(StatusCode::unsupported, "cache has values of ", value_dim, " and keys of ", key_dim, ": values may be at most ",
               most_value_width, " times as wide");
}

}  // namespace detail

/// Short keys stay: minus the length of the key.
struct KnormScorer {
  static constexpr bool reads_keys = true;

  [[nodiscard]] Status validate(const Shape&) const { return {}; }

  template <CacheReader Cache>
  [[nodiscard]] Result<ScoreReport> score(const Cache& cache, const Observations&, Range candidates, ScoreMatrix out,
                                          Workspace& work) const {
    const Workspace::Frame frame(work);
    const std::span<float> scratch = work.take<float>(detail::tile_rows * cache.key_dim());
    float lengths[static_cast<std::size_t>(detail::tile_rows)];
    ScoreReport report;
    for (index_t h = 0; h < out.heads; ++h) {
      const auto keys = [&](index_t first, index_t count, float* to) { return cache.keys(h, first, count, to); };
      detail::for_each_tile(keys, candidates, cache.key_dim(), scratch, [&](index_t first, const ConstRows& rows) {
        detail::run<detail::RowLengths>(rows.data, rows.stride, rows.dim, rows.rows, static_cast<float*>(lengths));
        for (index_t i = 0; i < rows.rows; ++i) {
          const bool finite = lengths[i] >= 0;
          out.row(h)[static_cast<std::size_t>(first + i)] = finite ? -lengths[i] : detail::quiet_nan();
          report.num_non_finite += finite ? 0 : 1;
        }
      });
    }
    return report;
  }
  [[nodiscard]] WorkspaceSize workspace_size(const Shape& shape, index_t, index_t) const {
    return detail::measure([&](Workspace& work) { static_cast<void>(work.take<float>(detail::tile_rows * shape.head_dim)); });
  }
};

/// Keys that point elsewhere than the others stay: minus the cosine of the key with the mean of all unit keys of its head,
/// protected ones included. A key of zeros scores 0.
struct KeyDiffScorer {
  static constexpr bool reads_keys = true;

  [[nodiscard]] Status validate(const Shape&) const { return {}; }

  template <CacheReader Cache>
  [[nodiscard]] Result<ScoreReport> score(const Cache& cache, const Observations&, Range candidates, ScoreMatrix out,
                                          Workspace& work) const {
    const Workspace::Frame frame(work);
    const detail::KeyDiffScratch scratch(work, cache.key_dim(), out.tokens);
    ScoreReport report;
    for (index_t h = 0; h < out.heads; ++h) {
      detail::unlikeness(cache, h, out.tokens, scratch);
      for (const float length : scratch.lengths) report.num_non_finite += length < 0 ? 1 : 0;
      for (auto j = static_cast<std::size_t>(candidates.first); j < static_cast<std::size_t>(candidates.last); ++j)
        out.row(h)[j] = scratch.lengths[j] < 0 ? detail::quiet_nan() : scratch.unlike[j];
    }
    return report;
  }
  [[nodiscard]] WorkspaceSize workspace_size(const Shape& shape, index_t, index_t tokens) const {
    return detail::key_diff_workspace_size(shape.head_dim, tokens);
  }
};

/// Tokens that the next ones do not resemble stay. Behind the protected prefix the tokens are cut into partitions of `lag`;
/// each channel of a partition is scaled by its least and largest number in the *next* one, and the deviation over a token's
/// channels, by a softmax within the partition, is its score: the mean of keys' and values'. What no partition follows scores
/// 1, and where there are no two partitions newer is better.
///
/// A channel whose next partition is constant adds nothing (the published code divides by 0). A token with a NaN or infinity in
/// key or value scores NaN and scales no one.
struct LagKVScorer {
  static constexpr bool reads_keys = true;

  index_t lag = 128;
  /// False: the score is the rank within the partition, over `lag`, so that every partition keeps as many. True: the number
  /// itself.
  bool cross_scoring = false;

  [[nodiscard]] Status validate(const Shape&) const {
    if (lag < 1) return detail::invalid("lag = ", lag, ": must be at least 1");
    return {};
  }

  template <CacheReader Cache>
  [[nodiscard]] Result<ScoreReport> score(const Cache& cache, const Observations&, Range candidates, ScoreMatrix out,
                                          Workspace& work) const {
    if (Status s = detail::check_value_width(cache.value_dim(), cache.key_dim()); !s) return s;
    const Workspace::Frame frame(work);
    const Scratch scratch(work, cache.key_dim(), lag, out.tokens);
    const index_t first = candidates.first;
    const index_t partitions = (out.tokens - first) / lag;
    ScoreReport report;
    for (index_t h = 0; h < out.heads; ++h) {
      const auto keys = [&](index_t j, index_t count, float* to) { return cache.keys(h, j, count, to); };
      const auto values = [&](index_t j, index_t count, float* to) { return cache.values(h, j, count, to); };
      std::fill(scratch.bad.begin(), scratch.bad.end(), std::uint8_t{0});
      report.num_non_finite += mark(keys, {first, out.tokens}, cache.key_dim(), scratch);
      report.num_non_finite += mark(values, {first, out.tokens}, cache.value_dim(), scratch);
      const std::span<float> row = out.row(h);
      for (index_t j = first; j < out.tokens; ++j)
        row[static_cast<std::size_t>(j)] =
            partitions < 2 ? static_cast<float>(j - first) / static_cast<float>(out.tokens - first) : 1.0F;
      for (index_t p = 0; p + 1 < partitions; ++p) {
        const Range part{first + p * lag, first + (p + 1) * lag};
        std::fill(scratch.sum.begin(), scratch.sum.end(), 0.0);
        add_deviations(keys, part, cache.key_dim(), scratch);
        add_deviations(values, part, cache.value_dim(), scratch);
        finish(row.subspan(static_cast<std::size_t>(part.first), static_cast<std::size_t>(lag)), scratch,
               scratch.bad.data() + part.first);
      }
      for (index_t j = first; j < out.tokens; ++j)
        if (scratch.bad[static_cast<std::size_t>(j)] != 0) row[static_cast<std::size_t>(j)] = detail::quiet_nan();
    }
    return report;
  }
  [[nodiscard]] WorkspaceSize workspace_size(const Shape& shape, index_t, index_t tokens) const {
    return detail::measure([&](Workspace& work) { static_cast<void>(Scratch(work, shape.head_dim, lag, tokens)); });
  }

 private:
  struct Scratch {
    Scratch(Workspace& work, index_t dim, index_t lag, index_t tokens)
        : decoded(work.take<float>(detail::tile_rows * dim)),
          least(work.take<float>(detail::most_value_width * dim)),
          largest(work.take<float>(detail::most_value_width * dim)),
          deviation(work.take<double>(std::min(lag, tokens))),
          sum(work.take<double>(std::min(lag, tokens))),
          order(work.take<slot_t>(std::min(lag, tokens))),
          bad(work.take<std::uint8_t>(tokens)) {}
    std::span<float> decoded;
    std::span<float> least;  // of each channel of the next partition
    std::span<float> largest;
    std::span<double> deviation;  // of each token of a partition
    std::span<double> sum;        // of keys' and values' softmax
    std::span<slot_t> order;
    std::span<std::uint8_t> bad;  // of each slot
  };

  template <class Read>
  [[nodiscard]] static index_t mark(const Read& read, Range range, index_t dim, const Scratch& scratch) {
    index_t found = 0;
    detail::for_each_tile(read, range, dim, scratch.decoded, [&](index_t j, const ConstRows& rows) {
      for (index_t i = 0; i < rows.rows; ++i) {
        if (detail::all_finite(rows.row(i), dim)) continue;
        scratch.bad[static_cast<std::size_t>(j + i)] = 1;
        ++found;
      }
    });
    return found;
  }

  /// Adds a softmax over `part` of the deviation of each row.
  template <class Read>
  static void add_deviations(const Read& read, Range part, index_t dim, const Scratch& scratch) {
    const auto is_bad = [&](index_t j) { return scratch.bad[static_cast<std::size_t>(j)] != 0; };
    const auto channels = static_cast<std::size_t>(dim);
    std::fill_n(scratch.least.begin(), channels, std::numeric_limits<float>::max());
    std::fill_n(scratch.largest.begin(), channels, std::numeric_limits<float>::lowest());
    const Range next{part.last, part.last + part.size()};
    detail::for_each_tile(read, next, dim, scratch.decoded, [&](index_t j, const ConstRows& rows) {
      for (index_t i = 0; i < rows.rows; ++i) {
        if (is_bad(j + i)) continue;
        const float* const row = rows.row(i);
        for (std::size_t d = 0; d < channels; ++d) {
          scratch.least[d] = std::min(scratch.least[d], row[d]);
          scratch.largest[d] = std::max(scratch.largest[d], row[d]);
        }
      }
    });
    double top = 0;
    detail::for_each_tile(read, part, dim, scratch.decoded, [&](index_t j, const ConstRows& rows) {
      for (index_t i = 0; i < rows.rows; ++i) {
        double& deviation = scratch.deviation[static_cast<std::size_t>(j + i - part.first)];
        deviation = is_bad(j + i) ? 0 : deviation_of(rows.row(i), channels, scratch);
        top = std::max(top, deviation);
      }
    });
    double total = 0;
    for (index_t i = 0; i < part.size(); ++i) {
      double& weight = scratch.deviation[static_cast<std::size_t>(i)];
      weight = is_bad(part.first + i) ? 0 : std::exp(weight - top);
      total += weight;
    }
    for (index_t i = 0; total > 0 && i < part.size(); ++i)
      scratch.sum[static_cast<std::size_t>(i)] += scratch.deviation[static_cast<std::size_t>(i)] / total;
  }

  /// Over the scaled channels of a row, with divisor `channels - 1`.
  [[nodiscard]] static double deviation_of(const float* row, std::size_t channels, const Scratch& scratch) {
    const auto scaled = [&](std::size_t d) -> double {
      const double width = static_cast<double>(scratch.largest[d]) - static_cast<double>(scratch.least[d]);
      return width > 0 ? (static_cast<double>(row[d]) - static_cast<double>(scratch.least[d])) / width : 0.0;
    };
    double mean = 0;
    for (std::size_t d = 0; d < channels; ++d) mean += scaled(d);
    mean /= static_cast<double>(channels);
    double squares = 0;
    for (std::size_t d = 0; d < channels; ++d) squares += (scaled(d) - mean) * (scaled(d) - mean);
    return channels > 1 ? std::sqrt(squares / static_cast<double>(channels - 1)) : 0.0;
  }

  /// The scores of a partition from the sums.
  void finish(std::span<float> row, const Scratch& scratch, const std::uint8_t* bad) const {
    if (cross_scoring) {
      for (std::size_t i = 0; i < row.size(); ++i) row[i] = static_cast<float>(scratch.sum[i] / 2);
      return;
    }
    auto end = scratch.order.begin();
    for (slot_t i = 0; i < static_cast<slot_t>(row.size()); ++i)
      if (bad[i] == 0) *end++ = i;
    std::sort(scratch.order.begin(), end, [&](slot_t a, slot_t b) {
      const double x = scratch.sum[static_cast<std::size_t>(a)];
      const double y = scratch.sum[static_cast<std::size_t>(b)];
      return x != y ? x < y : a < b;
    });
    for (auto at = scratch.order.begin(); at != end; ++at)
      row[static_cast<std::size_t>(*at)] = static_cast<float>(at - scratch.order.begin()) / static_cast<float>(lag);
  }
};

template <class ScorerT, Schedule ScheduleT = FixedBudget>
struct KeyPolicyOptions {
  ScheduleT budget{};
  index_t n_recent_kv = 0;              ///< newest tokens, which stay; none are protected as published
  std::optional<index_t> n_prefix = 0;  ///< positions below this stay; none are protected as published, but LagKV's first 4
  ScorerT scorer{};
};

/// A policy that looks at keys (and values) alone: feed it with `prefill_tokens` and `observe({}, position)`.
///
/// * observer: none
/// * scorer: `KnormScorer`, `KeyDiffScorer`, `LagKVScorer`, or your own
/// * schedule: `FixedBudget`; the published code evicts once, after the prompt, which is `PromptBudget`
/// * protected: as the options say
template <class ScorerT, Schedule ScheduleT = FixedBudget>
class KeyPolicy : public EvictionPolicy<NoQueries, ScorerT, ScheduleT> {
 public:
  using Base = EvictionPolicy<NoQueries, ScorerT, ScheduleT>;
  using Options = KeyPolicyOptions<ScorerT, ScheduleT>;

  /// The policy, or what is wrong with its options.
  [[nodiscard]] static Result<KeyPolicy> make(const Shape& shape, const Options& options) {
    const typename Base::Parts parts{.observer = {},
                                     .scorer = options.scorer,
                                     .schedule = options.budget,
                                     .protection = {options.n_prefix, options.n_recent_kv}};
    if (Status s = Base::validate_parts(shape, parts); !s) return s;
    return KeyPolicy(shape, parts);
  }

#ifndef BEACONKV_NO_EXCEPTIONS
  /// As `make`; throws `Error`.
  KeyPolicy(const Shape& shape, const Options& options) : KeyPolicy(make(shape, options).or_throw()) {}
#endif

 private:
  KeyPolicy(const Shape& shape, const typename Base::Parts& parts) : Base(shape, parts) {}
};

/// "A simple and effective L2 norm-based strategy" (arXiv 2406.11430), as kvpress has it: a set for each KV head.
template <Schedule ScheduleT = FixedBudget>
using Knorm = KeyPolicy<KnormScorer, ScheduleT>;

/// KeyDiff (arXiv 2504.15364), as kvpress has it: all keys at once (the paper goes by blocks).
template <Schedule ScheduleT = FixedBudget>
using KeyDiff = KeyPolicy<KeyDiffScorer, ScheduleT>;

/// LagKV (arXiv 2504.04704), as kvpress has it. The sinks are the protected prefix: `n_prefix = 4` as published. In a decoding
/// loop partitions are those of what is cached.
template <Schedule ScheduleT = FixedBudget>
using LagKV = KeyPolicy<LagKVScorer, ScheduleT>;

}  // namespace beaconkv::inline v0
