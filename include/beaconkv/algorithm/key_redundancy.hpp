// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// How much a cached key repeats others: the second half of R-KV's score.
///
/// Source: R-KV (arXiv 2505.24133), as its published code computes it (`cal_similarity`), which differs from the paper's text:
/// every row spares one look-alike of its own, and a row without a look-alike spares column 0.

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <span>

#include "beaconkv/algorithm/attention.hpp"
#include "beaconkv/detail/numeric.hpp"
#include "beaconkv/workspace.hpp"

namespace beaconkv::inline v0 {

/// Which of its look-alikes (the columns above the threshold) a row spares.
enum class SparedLookAlike : std::uint8_t {
  last,           ///< the newest (published `last` and `last_percent`)
  column_zero,    ///< always column 0 (what the published `first` comes to)
  first_percent,  ///< what the published `first_percent` comes to: column 0 unless more than `L - int(L * ratio)` are alike
};

struct RedundancyOptions {
  float threshold = 0.5F;  ///< cosine above which two keys are look-alikes
  SparedLookAlike spared = SparedLookAlike::last;
  double ratio = 0.1;  ///< of `first_percent` only
  /// Published: a row without any look-alike spares column 0, which makes the oldest token look less redundant. False: it
  /// spares none.
  bool spare_column_zero = true;
};

[[nodiscard]] inline Status validate(const RedundancyOptions& options, index_t keys) {
  if (!(options.threshold >= -1.0F && options.threshold <= 1.0F))
    return detail::invalid("redundancy.threshold = ", options.threshold, ": must be between -1 and 1");
  if (options.spared == SparedLookAlike::first_percent && !(options.ratio > 0 && options.ratio <= 1))
    return detail::invalid("redundancy.ratio = ", options.ratio, ": must be above 0 and at most 1");
  if (options.spared == SparedLookAlike::first_percent && static_cast<index_t>(static_cast<double>(keys) * options.ratio) < 1)
    return detail::invalid("redundancy.ratio = ", options.ratio, ": no entry of ", keys, " keys is left");
  return {};
}

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

inline constexpr index_t redundancy_strip = 64;  // rows of the similarity matrix that exist at a time

struct RedundancyScratch {
  RedundancyScratch(Workspace& work, index_t keys, index_t dim)
      : decoded(work.take<float>(tile_rows(dim) * dim)),
        unit(work.take<float>(keys * dim)),
        strip(work.take<float>(redundancy_strip * keys)),
        column_sum(work.take<double>(keys)) {}

  std::span<float> decoded;
  std::span<float> unit;
  std::span<float> strip;  // [keys][rows of the strip]
  std::span<double> column_sum;
};

/// The column that row `i` spares, or -1. `strip` is [keys][rows], `r` the row within it.
[[nodiscard]] inline index_t spared_column(const float* strip, index_t keys, index_t rows, index_t r,
                                           const RedundancyOptions& options) noexcept {
  if (options.spared == SparedLookAlike::column_zero) return 0;
  if (options.spared == SparedLookAlike::last) {
    for (index_t j = keys - 1; j >= 0; --j)
      if (strip[j * rows + r] > options.threshold) return j;
    return options.spare_column_zero ? 0 : -1;
  }
  // The published code sorts "column number where alike, else 0" and takes entry int(L * ratio) - 1.
  index_t alike = 0;
  for (index_t j = 1; j < keys; ++j) alike += strip[j * rows + r] > options.threshold ? 1 : 0;
  index_t rank = static_cast<index_t>(static_cast<double>(keys) * options.ratio) - 1 - (keys - alike);
  for (index_t j = 1; rank >= 0 && j < keys; ++j)
    if (strip[j * rows + r] > options.threshold && rank-- == 0) return j;
  return 0;
}

}  // namespace detail

/// Scratch of `key_redundancy` over at most `keys` keys: O(keys * (dim + 64)) floats, never keys * keys.
[[nodiscard]] inline WorkspaceSize key_redundancy_workspace_size(index_t keys, index_t dim) {
  return detail::measure([&](Workspace& work) { static_cast<void>(detail::RedundancyScratch(work, keys, dim)); });
}

/// For each of `n` keys of one head, the mean cosine of all keys to it, after every key spared one of its look-alikes: to
/// `out`. A softmax over `out` (`detail::softmax`) gives R-KV's redundancy.
///
/// With `S` the matrix of cosines and a zero diagonal: every row `i` sets one entry `S[i][c(i)]` to 0 (`RedundancyOptions`),
/// and `out[j] = sum over i of S[i][j] / n`. Norms get 1e-8 added, as published. A key with a NaN or infinity counts as zero.
/// O(n * n * dim), no allocation.
template <class Keys>
[[nodiscard]] Status key_redundancy_means(const Keys& keys, index_t n, index_t dim, const RedundancyOptions& options,
                                          std::span<float> out, Workspace& work) {
  if (dim < 1) return detail::invalid("dim = ", dim, ": must be at least 1");
  if (Status s = validate(options, n); !s) return s;
  if (static_cast<index_t>(out.size()) != n) return detail::invalid("out has ", out.size(), " numbers: there are ", n, " keys");
  if (Status s = work.require(key_redundancy_workspace_size(n, dim)); !s) return s;

  const Workspace::Frame frame(work);
  const detail::RedundancyScratch scratch(work, n, dim);
  const index_t step = detail::tile_rows(dim);
  for (index_t j = 0; j < n; j += step) {
    const ConstRows rows = keys(j, std::min(step, n - j), scratch.decoded.data());
    for (index_t i = 0; i < rows.rows; ++i) {
      float* const unit = scratch.unit.data() + (j + i) * dim;
      const float* const key = rows.row(i);
      const bool finite = detail::all_finite(key, dim);
      double square = 0;  // in float, that of a long key would overflow
      for (index_t d = 0; d < dim; ++d) square += static_cast<double>(key[d]) * static_cast<double>(key[d]);
      const double norm = std::sqrt(square) + 1e-8;
      for (index_t d = 0; d < dim; ++d) unit[d] = finite ? static_cast<float>(static_cast<double>(key[d]) / norm) : 0.0F;
    }
  }

  std::fill(scratch.column_sum.begin(), scratch.column_sum.end(), 0.0);
  float* const strip = scratch.strip.data();
  for (index_t first = 0; first < n; first += detail::redundancy_strip) {
    const index_t rows = std::min(detail::redundancy_strip, n - first);
    for (index_t j = 0; j < n; j += step)
      detail::products({scratch.unit.data() + first * dim, rows, dim, dim},
                       {scratch.unit.data() + j * dim, std::min(step, n - j), dim, dim}, strip + j * rows);
    for (index_t r = 0; r < rows; ++r) {
      strip[(first + r) * rows + r] = 0.0F;
      const index_t spared = detail::spared_column(strip, n, rows, r, options);
      if (spared >= 0) strip[spared * rows + r] = 0.0F;
    }
    for (index_t j = 0; j < n; ++j) {
      float sum = 0;
      for (index_t r = 0; r < rows; ++r) sum += strip[j * rows + r];
      scratch.column_sum[static_cast<std::size_t>(j)] += static_cast<double>(sum);
    }
  }
  for (std::size_t j = 0; j < out.size(); ++j) out[j] = static_cast<float>(scratch.column_sum[j] / static_cast<double>(n));
  return {};
}

/// `key_redundancy_means` and a softmax over all `n` keys: sums to 1, larger = more redundant.
template <class Keys>
[[nodiscard]] Status key_redundancy(const Keys& keys, index_t n, index_t dim, const RedundancyOptions& options,
                                    std::span<float> out, Workspace& work) {
  if (Status s = key_redundancy_means(keys, n, dim, options, out, work); !s) return s;
  detail::softmax(out);
  return {};
}

}  // namespace beaconkv::inline v0
