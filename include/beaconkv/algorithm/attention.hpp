// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// How much a few observed queries attend to each cached key: the score that SnapKV, RPC, R-KV and BeaconKV are made of.
///
/// Softmax per query row over a range of keys, then one number a key: reduced over the query rows of a head, smoothed over
/// neighbours if asked, reduced over the query heads of the KV head's group.

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <optional>
#include <span>

#include "beaconkv/algorithm/pooling.hpp"
#include "beaconkv/detail/numeric.hpp"
#include "beaconkv/workspace.hpp"

namespace beaconkv::inline v0 {

/// Which smoothing comes first: of each query head's scores, or of the scores of the KV head. The same for an average pool, up
/// to rounding; not for a max pool.
enum class PoolStage : std::uint8_t { query_head, kv_head };

/// Everything in which the published attention scores differ.
struct AttentionOptions {
  Reduce over_queries = Reduce::max;             ///< over the rows of a query head
  Reduce over_heads = Reduce::max;               ///< over the query heads of a group: max or mean
  GroupStage group_stage = GroupStage::weights;  ///< `logits`: the group meets before the softmax
  Pool pool{};
  PoolStage pool_stage = PoolStage::kv_head;
  std::optional<float> scale{};          ///< of the logits; default 1 / sqrt(dim)
  std::optional<float> logit_softcap{};  ///< c: logits become `c * tanh(logit / c)`
};

[[nodiscard]] inline Status validate(const AttentionOptions& options) {
  if (options.over_heads == Reduce::sum) return detail::invalid("over_heads = sum: must be max or mean");
  if (options.scale && !(*options.scale > 0 && detail::is_finite(*options.scale)))
    return detail::invalid("scale = ", *options.scale, ": must be positive");
  if (options.logit_softcap && !(*options.logit_softcap > 0 && detail::is_finite(*options.logit_softcap)))
    return detail::invalid("logit_softcap = ", *options.logit_softcap, ": must be positive");
  return validate(options.pool);
}

/// Observed queries of the heads of one group, rotated: `[group][rows][dim]`, dense.
struct AttentionQueries {
  const float* data = nullptr;
  index_t group = 0;
  index_t rows = 0;
  index_t dim = 0;
  /// `[group][rows]`: how many leading keys each row may see (the causal mask, since keys are in time order).
  std::span<const slot_t> visible{};
  /// `[group]` or empty: a logit of each head that takes its share of every softmax and belongs to no key (learned sinks).
  std::span<const float> sink_logits{};
};

struct ScoreReport {
  index_t num_non_finite = 0;  ///< key and query rows with a NaN or infinity
};

namespace detail {

/// Keys are read in tiles of this many rows at most, so that Eigen's products stay below its stack limit and never allocate.
[[nodiscard]] constexpr index_t tile_rows(index_t dim) noexcept {
  return std::clamp<index_t>(16384 / std::max<index_t>(dim, 1), 1, 64);
}

using RowMajor = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using ConstRowMap = Eigen::Map<const RowMajor, 0, Eigen::OuterStride<>>;
using Columns = Eigen::Map<Eigen::MatrixXf>;

[[nodiscard]] inline ConstRowMap map_rows(const ConstRows& rows) {
  return {rows.data, rows.rows, rows.dim, Eigen::OuterStride<>(rows.stride)};
}

/// `out` [a.rows x b.rows], column-major: all dot products. Blocks of rows of `a` keep Eigen's packing on the stack.
inline void products(const ConstRows& a, const ConstRows& b, float* out) {
  const index_t block = std::max<index_t>(8, 16384 / a.dim);
  const ConstRowMap left = map_rows(a);
  const ConstRowMap right = map_rows(b);
  Columns all(out, a.rows, b.rows);
  for (index_t i = 0; i < a.rows; i += block) {
    const index_t n = std::min(block, a.rows - i);
    all.middleRows(i, n).noalias() = left.middleRows(i, n) * right.transpose();
  }
}

struct AttentionScratch {
  AttentionScratch(Workspace& work, index_t group, index_t rows, index_t dim, index_t keys)
      : decoded(work.take<float>(tile_rows(dim) * dim)),
        tile(work.take<float>(group * rows * tile_rows(dim))),
        logits(work.take<float>(group * rows * keys)),
        top(work.take<float>(group * rows)),
        weight(work.take<float>(group * rows)),
        column(work.take<float>(keys)),
        pooled(work.take<float>(keys)),
        bad_key(work.take<std::uint8_t>(keys)) {}

  std::span<float> decoded;
  std::span<float> tile;
  std::span<float> logits;  // [keys][rows of all heads]
  std::span<float> top;     // of each row
  std::span<float> weight;  // of each row: 1 / sum of exponentials
  std::span<float> column;
  std::span<float> pooled;
  std::span<std::uint8_t> bad_key;
};

/// The logits of a tile: scaled, capped, and masked where the row does not see the key or something is not finite.
class LogitTile {
 public:
  LogitTile(const AttentionQueries& queries, const AttentionOptions& options)
      : queries_(queries),
        scale_(options.scale.value_or(1.0F / std::sqrt(static_cast<float>(queries.dim)))),
        softcap_(options.logit_softcap) {
    const auto low = std::min_element(queries.visible.begin(), queries.visible.end());
    all_see_below_ = low == queries.visible.end() ? 0 : *low;
  }

  /// `out` [keys.rows][rows]; `first` is the slot of the first key. Marks keys that are not finite.
  void fill(const ConstRows& keys, index_t first, float* out, std::uint8_t* bad_key) const {
    const index_t m = queries_.group * queries_.rows;
    products({queries_.data, m, queries_.dim, queries_.dim}, keys, out);
    for (index_t i = 0; i < m * keys.rows; ++i) out[i] *= scale_;
    std::fill(bad_key, bad_key + keys.rows, std::uint8_t{0});
    if (m == 0 || !all_finite(out, m * keys.rows))
      mask_non_finite(keys, out, bad_key);  // before the cap, which makes infinities finite
    if (softcap_)
      for (index_t i = 0; i < m * keys.rows; ++i)
        if (out[i] > masked_logit) out[i] = *softcap_ * std::tanh(out[i] / *softcap_);
    for (index_t j = std::max<index_t>(0, all_see_below_ - first); j < keys.rows; ++j)
      for (index_t r = 0; r < m; ++r)
        if (queries_.visible[static_cast<std::size_t>(r)] <= first + j) out[j * m + r] = masked_logit;
  }

 private:
  void mask_non_finite(const ConstRows& keys, float* out, std::uint8_t* bad_key) const {
    const index_t m = queries_.group * queries_.rows;
    for (index_t j = 0; j < keys.rows; ++j) {
      bad_key[j] = all_finite(keys.row(j), keys.dim) ? 0 : 1;
      for (index_t r = 0; r < m; ++r)
        if (bad_key[j] != 0 || !is_finite(out[j * m + r])) out[j * m + r] = masked_logit;
    }
  }

  AttentionQueries queries_;
  float scale_;
  std::optional<float> softcap_;
  index_t all_see_below_ = 0;
};

/// Several heads' logits `[keys][group][rows]` become one head's, `[keys][rows]`. A masked logit has no say.
inline void reduce_group_logits(const float* in, index_t keys, index_t group, index_t rows, Reduce how, float* out) noexcept {
  for (index_t j = 0; j < keys; ++j)
    for (index_t r = 0; r < rows; ++r) {
      float value = masked_logit;
      index_t seen = 0;
      for (index_t g = 0; g < group; ++g) {
        const float z = in[(j * group + g) * rows + r];
        if (z <= masked_logit) continue;
        value = seen == 0 ? z : (how == Reduce::max ? std::max(value, z) : value + z);
        ++seen;
      }
      out[j * rows + r] = how == Reduce::mean && seen > 0 ? value / static_cast<float>(seen) : value;
    }
}

/// Logits `[keys][m]` become `exp(logit - row maximum)`; `weight` becomes 1 / their sum, 0 for a row that sees nothing.
inline void exponentials(float* logits, index_t keys, index_t m, float* top, float* weight) noexcept {
  std::fill(top, top + m, masked_logit);
  for (index_t j = 0; j < keys; ++j)
    for (index_t r = 0; r < m; ++r) top[r] = std::max(top[r], logits[j * m + r]);
  std::fill(weight, weight + m, 0.0F);
  constexpr index_t chunk = 64;  // one long chain of float additions would drift: sum by chunks, then the chunks
  for (index_t first = 0; first < keys; first += chunk) {
    const index_t last = std::min(keys, first + chunk);
    for (index_t r0 = 0; r0 < m; r0 += chunk) {
      const index_t n = std::min(chunk, m - r0);
      float sum[chunk] = {};
      for (index_t j = first; j < last; ++j) {
        float* const z = logits + j * m + r0;
        exp_shifted(z, top + r0, n);
        for (index_t r = 0; r < n; ++r) sum[r] += z[r];
      }
      for (index_t r = 0; r < n; ++r) weight[r0 + r] += sum[r];
    }
  }
  for (index_t r = 0; r < m; ++r) weight[r] = top[r] > masked_logit && weight[r] > 0 ? 1.0F / weight[r] : 0.0F;
}

/// Adds a logit that belongs to no key to the softmax of each of a head's rows.
inline void add_sink(float sink, const float* top, float* weight, index_t rows) noexcept {
  for (index_t r = 0; r < rows; ++r)
    if (weight[r] > 0) weight[r] = 1.0F / (1.0F / weight[r] + std::exp(std::min(sink - top[r], 80.0F)));
}

/// One number a key from a head's weights: rows `[first_row, first_row + rows)` of `e` [keys][m].
inline void reduce_rows(const float* e, index_t keys, index_t m, index_t first_row, index_t rows, const float* weight,
                        Reduce how, std::span<float> out) {
  using Rows = Eigen::Map<const Eigen::ArrayXf>;
  const Rows w(weight + first_row, rows);
  const float divisor = how == Reduce::mean ? static_cast<float>(rows) : 1.0F;
  for (index_t j = 0; j < keys; ++j) {
    const auto weights = Rows(e + j * m + first_row, rows) * w;
    out[static_cast<std::size_t>(j)] = how == Reduce::max ? weights.maxCoeff() : weights.sum() / divisor;
  }
}

inline void pool_in_place(std::span<float> scores, const Pool& pool, std::span<float> scratch) noexcept {
  if (!pool.active()) return;
  const std::span<float> pooled = scratch.first(scores.size());
  pool_scores(scores, pool, pooled);
  std::copy(pooled.begin(), pooled.end(), scores.begin());
}

}  // namespace detail

/// Scratch of `attention_scores` over at most `keys` keys.
[[nodiscard]] inline WorkspaceSize attention_workspace_size(index_t group, index_t rows, index_t dim, index_t keys) {
  return detail::measure([&](Workspace& work) { static_cast<void>(detail::AttentionScratch(work, group, rows, dim, keys)); });
}

/// Scores of the keys `[domain.first, domain.last)` of one KV head, to `out` (one number a key of the domain).
///
/// \param keys `keys(first, count, scratch) -> ConstRows` gives rows of `queries.dim` floats.
/// \param domain the keys that share each row's softmax.
/// \param pooled the part of the domain that the pool smooths, as if nothing stood beside it; the rest is left as it is.
///
/// A row that sees no key contributes 0; it still counts as a row in a mean. A key with a NaN or infinity gets the score NaN
/// and no weight; a query row with one has no weight. Both are counted. Float arithmetic, sums in a fixed order; no allocation.
/// O(group * rows * keys * dim). Errors: bad options, sizes that do not match, `work` too small.
template <class Keys>
[[nodiscard]] Result<ScoreReport> attention_scores(const Keys& keys, const AttentionQueries& queries, Range domain,
                                                   Range pooled, const AttentionOptions& options, std::span<float> out,
                                                   Workspace& work) {
  const index_t n = domain.size();
  const index_t all_rows = queries.group * queries.rows;
  if (Status s = validate(options); !s) return s;
  if (queries.group < 1 || queries.rows < 0 || queries.dim < 1)
    return detail::invalid("queries: group = ", queries.group, ", rows = ", queries.rows, ", dim = ", queries.dim,
                           ": must be positive");
  if (static_cast<index_t>(queries.visible.size()) != all_rows)
    return detail::invalid("queries.visible has ", queries.visible.size(), " entries: ", all_rows, " are needed");
  if (!queries.sink_logits.empty()) {
    if (static_cast<index_t>(queries.sink_logits.size()) != queries.group)
      return detail::invalid("queries.sink_logits has ", queries.sink_logits.size(), " entries: ", queries.group,
                             " are needed");
    if (options.group_stage == GroupStage::logits)
      return detail::error(StatusCode::unsupported, "sink_logits: heads that meet in their logits share no softmax with them");
  }
  if (domain.first < 0 || n < 0) return detail::invalid("domain = [", domain.first, ", ", domain.last, "): must be ascending");
  if (pooled.first < domain.first || pooled.last > domain.last || pooled.size() < 0)
    return detail::invalid("pooled = [", pooled.first, ", ", pooled.last, "): must lie in the domain [", domain.first, ", ",
                           domain.last, ")");
  if (static_cast<index_t>(out.size()) != n) return detail::invalid("out has ", out.size(), " numbers: the domain has ", n);
  if (Status s = work.require(attention_workspace_size(queries.group, queries.rows, queries.dim, n)); !s) return s;

  const Workspace::Frame frame(work);
  const detail::AttentionScratch scratch(work, queries.group, queries.rows, queries.dim, n);
  const bool one_head = options.group_stage == GroupStage::logits;
  const index_t m = one_head ? queries.rows : all_rows;
  ScoreReport report;
  for (index_t r = 0; r < all_rows; ++r)
    report.num_non_finite += detail::all_finite(queries.data + r * queries.dim, queries.dim) ? 0 : 1;

  const detail::LogitTile logit_tile(queries, options);
  const index_t step = detail::tile_rows(queries.dim);
  for (index_t j = 0; j < n; j += step) {
    const index_t count = std::min(step, n - j);
    const ConstRows rows = keys(domain.first + j, count, scratch.decoded.data());
    float* const logits = scratch.logits.data() + j * m;
    float* const filled = one_head ? scratch.tile.data() : logits;
    logit_tile.fill(rows, domain.first + j, filled, scratch.bad_key.data() + j);
    if (one_head) detail::reduce_group_logits(filled, count, queries.group, queries.rows, options.over_heads, logits);
  }
  detail::exponentials(scratch.logits.data(), n, m, scratch.top.data(), scratch.weight.data());

  for (std::size_t g = 0; g < queries.sink_logits.size(); ++g) {
    const auto first = static_cast<std::size_t>(queries.rows) * g;
    detail::add_sink(queries.sink_logits[g], scratch.top.data() + first, scratch.weight.data() + first, queries.rows);
  }

  const auto poolable = [&](std::span<float> scores) {
    return scores.subspan(static_cast<std::size_t>(pooled.first - domain.first), static_cast<std::size_t>(pooled.size()));
  };
  const index_t heads = one_head ? 1 : queries.group;
  std::fill(out.begin(), out.end(), 0.0F);
  for (index_t g = 0; g < heads && queries.rows > 0; ++g) {
    detail::reduce_rows(scratch.logits.data(), n, m, g * queries.rows, queries.rows, scratch.weight.data(),
                        options.over_queries, scratch.column);
    if (options.pool_stage == PoolStage::query_head)
      detail::pool_in_place(poolable(scratch.column), options.pool, scratch.pooled);
    for (std::size_t j = 0; j < out.size(); ++j)
      out[j] = options.over_heads == Reduce::max ? std::max(out[j], scratch.column[j]) : out[j] + scratch.column[j];
  }
  if (options.over_heads == Reduce::mean)
    for (float& x : out) x /= static_cast<float>(heads);
  if (options.pool_stage == PoolStage::kv_head) detail::pool_in_place(poolable(out), options.pool, scratch.pooled);

  for (std::size_t j = 0; j < out.size(); ++j)
    if (scratch.bad_key[j] != 0) {
      out[j] = detail::quiet_nan();
      ++report.num_non_finite;
    }
  return report;
}

}  // namespace beaconkv::inline v0
