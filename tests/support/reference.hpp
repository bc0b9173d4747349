// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Slow, obvious, double-precision statements of what the library computes, straight from the formulas. Of the library they
/// use option types only, none of its arithmetic.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numbers>
#include <numeric>
#include <span>
#include <vector>

#include "beaconkv/algorithm/farthest_point_sampling.hpp"
#include "beaconkv/algorithm/pooling.hpp"
#include "beaconkv/algorithm/rope.hpp"
#include "beaconkv/types.hpp"

namespace beaconkv::test::reference {

using Row = std::vector<double>;
using Matrix = std::vector<Row>;

inline constexpr double nan = std::numeric_limits<double>::quiet_NaN();
inline constexpr double infinity = std::numeric_limits<double>::infinity();

[[nodiscard]] inline Row row_of(const float* data, index_t dim) { return Row(data, data + dim); }

[[nodiscard]] inline Matrix matrix_of(const ConstRows& rows) {
  Matrix out;
  for (index_t i = 0; i < rows.rows; ++i) out.push_back(row_of(rows.row(i), rows.dim));
  return out;
}

[[nodiscard]] inline double dot(const Row& a, const Row& b) { return std::inner_product(a.begin(), a.end(), b.begin(), 0.0); }

[[nodiscard]] inline bool finite(const Row& x) {
  return std::all_of(x.begin(), x.end(), [](double v) { return std::isfinite(v); });
}

/// 0 where one of them is zero.
[[nodiscard]] inline double cosine(const Row& a, const Row& b) {
  const double norms = std::sqrt(dot(a, a)) * std::sqrt(dot(b, b));
  return norms > 0 ? dot(a, b) / norms : 0.0;
}

/// Over the entries that are not minus infinity; zeros where there is none.
[[nodiscard]] inline Row softmax(const Row& logits) {
  double top = -infinity;
  for (const double z : logits) top = std::max(top, z);
  Row out(logits.size(), 0.0);
  if (top == -infinity) return out;
  double sum = 0;
  for (const double z : logits) sum += std::exp(z - top);
  for (std::size_t j = 0; j < out.size(); ++j) out[j] = std::exp(logits[j] - top) / sum;
  return out;
}

[[nodiscard]] inline double reduce(const Row& values, Reduce how) {
  if (values.empty()) return 0;
  if (how == Reduce::max) return *std::max_element(values.begin(), values.end());
  const double sum = std::accumulate(values.begin(), values.end(), 0.0);
  return how == Reduce::mean ? sum / static_cast<double>(values.size()) : sum;
}

// Selection (SPEC 1.6).

/// The rank of a score: NaN lowest, -0 equal to +0. By bits, so that it is right under `-ffast-math` too.
[[nodiscard]] inline std::int64_t rank(float score) {
  const auto bits = std::bit_cast<std::uint32_t>(score);
  const std::int64_t magnitude = bits & 0x7FFFFFFFU;
  if (magnitude > 0x7F800000) return std::numeric_limits<std::int64_t>::min();
  return (bits >> 31U) != 0 ? -magnitude : magnitude;
}

/// All indices, best score first, lowest index first among equals.
[[nodiscard]] inline std::vector<slot_t> best_first(std::span<const float> scores) {
  std::vector<slot_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](slot_t a, slot_t b) {
    return rank(scores[static_cast<std::size_t>(a)]) > rank(scores[static_cast<std::size_t>(b)]);
  });
  return order;
}

/// The `k` best, ascending.
[[nodiscard]] inline std::vector<slot_t> top_k(std::span<const float> scores, index_t k) {
  std::vector<slot_t> order = best_first(scores);
  order.resize(std::min(order.size(), static_cast<std::size_t>(k)));
  std::sort(order.begin(), order.end());
  return order;
}

// Pooling (SPEC 2.0).

/// Stride 1, `kernel / 2` on both sides: zeros that count for the average, nothing for the maximum.
[[nodiscard]] inline Row pool(const Row& in, const Pool& pool) {
  if (pool.kind == PoolKind::none) return in;
  const auto n = static_cast<index_t>(in.size());
  Row out;
  for (index_t i = 0; i < n; ++i) {
    double sum = 0;
    double top = -infinity;
    for (index_t j = i - pool.kernel / 2; j <= i + pool.kernel / 2; ++j) {
      if (j < 0 || j >= n) continue;
      sum += in[static_cast<std::size_t>(j)];
      top = std::max(top, in[static_cast<std::size_t>(j)]);
    }
    out.push_back(pool.kind == PoolKind::max ? top : sum / static_cast<double>(pool.kernel));
  }
  return out;
}

// Farthest point sampling (SPEC 1.1).

struct Sampling {
  std::vector<slot_t> picked;  ///< in order of selection
  double gap = infinity;       ///< the smallest lead of a winner over its best rival; 0 for a tie
};

/// For both metrics larger = nearer.
[[nodiscard]] inline double nearness(const Row& a, const Row& b, FpsMetric metric) {
  if (metric == FpsMetric::cosine) return cosine(a, b);
  double square = 0;
  for (std::size_t d = 0; d < a.size(); ++d) square += (a[d] - b[d]) * (a[d] - b[d]);
  return -square;
}

/// Greedy: again and again the row that is least near to what is chosen; the first one is least near to all on average.
[[nodiscard]] inline Sampling farthest_points(const Matrix& rows, index_t count, const std::vector<slot_t>& start = {},
                                              FpsMetric metric = FpsMetric::cosine) {
  const std::size_t n = rows.size();
  std::vector<bool> chosen(n, false);
  Row near(n, -infinity);  // of each row to the nearest chosen one
  const auto choose = [&](std::size_t c) {
    chosen[c] = true;
    for (std::size_t i = 0; i < n; ++i)
      if (finite(rows[i]) && finite(rows[c])) near[i] = std::max(near[i], nearness(rows[i], rows[c], metric));
  };
  for (const slot_t s : start) choose(static_cast<std::size_t>(s));
  const auto left = static_cast<std::size_t>(std::count(chosen.begin(), chosen.end(), false));

  Sampling out;
  if (static_cast<std::size_t>(count) >= left) {
    for (std::size_t i = 0; i < n; ++i)
      if (!chosen[i]) out.picked.push_back(static_cast<slot_t>(i));
    return out;
  }
  while (out.picked.size() < static_cast<std::size_t>(count)) {
    Row value = near;
    if (start.empty() && out.picked.empty())
      for (std::size_t i = 0; i < n; ++i) {
        Row to_all;
        for (std::size_t j = 0; j < n; ++j)
          if (finite(rows[j])) to_all.push_back(nearness(rows[i], rows[j], metric));
        value[i] = reduce(to_all, Reduce::mean);
      }
    std::size_t best = n;
    for (std::size_t i = 0; i < n; ++i) {
      if (!finite(rows[i])) value[i] = infinity;  // last
      if (!chosen[i] && (best == n || value[i] < value[best])) best = i;
    }
    for (std::size_t i = 0; i < n; ++i)
      if (!chosen[i] && i != best && value[i] < infinity) out.gap = std::min(out.gap, value[i] - value[best]);
    choose(best);
    out.picked.push_back(static_cast<slot_t>(best));
  }
  return out;
}

/// Continual FPS (SPEC 1.2): a buffer that is cut to `n_min` when it reaches `n_max`.
struct ContinualSampling {
  std::size_t n_min = 1;
  std::size_t n_max = 2;
  Matrix rows{};
  std::vector<position_t> tags{};
  double gap = infinity;  ///< of the last reduction

  void reduce() {
    if (rows.size() <= n_min) return;
    const Sampling sampling = farthest_points(rows, static_cast<index_t>(n_min));
    gap = sampling.gap;
    std::vector<slot_t> kept = sampling.picked;
    std::sort(kept.begin(), kept.end());
    Matrix kept_rows;
    std::vector<position_t> kept_tags;
    for (const slot_t s : kept) {
      kept_rows.push_back(rows[static_cast<std::size_t>(s)]);
      kept_tags.push_back(tags[static_cast<std::size_t>(s)]);
    }
    rows = kept_rows;
    tags = kept_tags;
  }
  void push(const Row& row, position_t tag) {
    rows.push_back(row);
    tags.push_back(tag);
    if (rows.size() >= n_max) reduce();
  }
  void prefill(const Matrix& more, position_t first_tag) {
    for (const Row& row : more) {
      rows.push_back(row);
      tags.push_back(first_tag++);
    }
    reduce();
  }
};

// Attention scores (SPEC 1.4, 2.1 to 2.3).

struct Attention {
  Reduce over_queries = Reduce::max;
  Reduce over_heads = Reduce::max;
  GroupStage group_stage = GroupStage::weights;
  Pool pool{};
  bool pool_each_query_head = false;  ///< before the query heads meet, else behind
  double scale = 1;
  double softcap = 0;  ///< 0: none
};

/// Scores of the keys of one KV head that share a softmax, one a key; NaN for a key that is not finite.
///
/// `queries` is [head][row][dim]; `sees(head, row, key)` is the mask; the pool smooths the keys of `pooled` only.
template <class Sees>
[[nodiscard]] Row attention_scores(const std::vector<Matrix>& queries, const Matrix& keys, Sees&& sees, Range pooled,
                                   const Attention& options) {
  const std::size_t rows = queries.front().size();
  std::vector<Matrix> logits(queries.size(), Matrix(rows, Row(keys.size(), -infinity)));
  for (std::size_t g = 0; g < queries.size(); ++g)
    for (std::size_t r = 0; r < rows; ++r)
      for (std::size_t j = 0; j < keys.size(); ++j) {
        if (!finite(keys[j]) || !finite(queries[g][r]) || !sees(g, r, j)) continue;
        const double z = dot(queries[g][r], keys[j]) * options.scale;
        logits[g][r][j] = options.softcap > 0 ? options.softcap * std::tanh(z / options.softcap) : z;
      }
  if (options.group_stage == GroupStage::logits) {
    Matrix met(rows, Row(keys.size(), -infinity));
    for (std::size_t r = 0; r < rows; ++r)
      for (std::size_t j = 0; j < keys.size(); ++j) {
        Row seen;
        for (const Matrix& head : logits)
          if (head[r][j] != -infinity) seen.push_back(head[r][j]);
        if (!seen.empty()) met[r][j] = reduce(seen, options.over_heads);
      }
    logits = {met};
  }
  const auto smooth = [&](Row& scores) {
    const auto first = scores.begin() + pooled.first;
    const Row part = pool(Row(first, first + pooled.size()), options.pool);
    std::copy(part.begin(), part.end(), first);
  };
  Matrix of_head;
  for (const Matrix& head : logits) {
    Row scores(keys.size(), 0.0);
    Matrix weights;
    for (const Row& z : head) weights.push_back(softmax(z));
    for (std::size_t j = 0; j < keys.size(); ++j) {
      Row column;
      for (const Row& w : weights) column.push_back(w[j]);
      scores[j] = reduce(column, options.over_queries);
    }
    if (options.pool_each_query_head) smooth(scores);
    of_head.push_back(scores);
  }
  Row out;
  for (std::size_t j = 0; j < keys.size(); ++j) {
    Row column;
    for (const Row& scores : of_head) column.push_back(scores[j]);
    out.push_back(reduce(column, options.over_heads));
  }
  if (!options.pool_each_query_head) smooth(out);
  for (std::size_t j = 0; j < keys.size(); ++j)
    if (!finite(keys[j])) out[j] = nan;
  return out;
}

// R-KV's key redundancy (SPEC 2.3.1).

enum class Spare : std::uint8_t { last_or_zero, last_or_none, zero, first_percent };

/// Column means of the cosine matrix, after every row spared one look-alike. `ratio` is of `first_percent` only.
[[nodiscard]] inline Row redundancy_means(const Matrix& keys, double threshold, Spare spare, double ratio = 0.1) {
  const std::size_t n = keys.size();
  Row length;
  for (const Row& key : keys) length.push_back(std::sqrt(dot(key, key)) + 1e-8);
  Matrix s(n, Row(n, 0.0));
  for (std::size_t i = 0; i < n; ++i)
    for (std::size_t j = 0; j < n; ++j)
      if (i != j && finite(keys[i]) && finite(keys[j])) s[i][j] = dot(keys[i], keys[j]) / (length[i] * length[j]);
  for (Row& row : s) {
    std::vector<std::size_t> number(n, 0);  // of the column where it is alike, else 0
    bool any = false;
    for (std::size_t j = 0; j < n; ++j)
      if (row[j] > threshold) {
        number[j] = j;
        any = true;
      }
    std::sort(number.begin(), number.end());
    std::size_t column = 0;
    if (spare == Spare::last_or_zero || spare == Spare::last_or_none) column = number.back();
    if (spare == Spare::first_percent) column = number[static_cast<std::size_t>(static_cast<double>(n) * ratio) - 1];
    if (spare != Spare::last_or_none || any) row[column] = 0;
  }
  Row out(n, 0.0);
  for (std::size_t j = 0; j < n; ++j) {
    for (std::size_t i = 0; i < n; ++i) out[j] += s[i][j];
    out[j] /= static_cast<double>(n);
  }
  return out;
}

// RoPE (SPEC 1.7).

/// Radians per position of each pair, without a scaling.
[[nodiscard]] inline Row rope_frequencies(index_t rotary_dim, double theta) {
  Row out;
  for (index_t i = 0; i < rotary_dim / 2; ++i)
    out.push_back(1 / std::pow(theta, 2 * static_cast<double>(i) / static_cast<double>(rotary_dim)));
  return out;
}

/// A copy of `x` turned by `delta` positions and multiplied by `factor` where it turns.
[[nodiscard]] inline Row rotated(const Row& x, position_t delta, const Row& frequencies, RopeLayout layout, double factor = 1) {
  Row out = x;
  const std::size_t pairs = frequencies.size();
  for (std::size_t i = 0; i < pairs; ++i) {
    const std::size_t a = layout == RopeLayout::half ? i : 2 * i;
    const std::size_t b = layout == RopeLayout::half ? i + pairs : 2 * i + 1;
    const double angle = static_cast<double>(delta) * frequencies[i];
    out[a] = factor * (std::cos(angle) * x[a] - std::sin(angle) * x[b]);
    out[b] = factor * (std::sin(angle) * x[a] + std::cos(angle) * x[b]);
  }
  return out;
}

}  // namespace beaconkv::test::reference
