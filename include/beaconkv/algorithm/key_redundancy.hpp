// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// How much a cached key repeats others: the second half of R-KV's score.
///
/// Source: R-KV (arXiv 2505.24133), as its published code computes it (`cal_similarity`), which differs from the paper's text:
/// every row spares one look-alike of its own, and a row without a look-alike spares column 0.
///
/// The matrix of cosines is never made. Its column sums are dot products with the sum of all unit vectors; what needs single
/// cosines is each row's newest look-alike, which most keys find among the newest keys.

#include <algorithm>
#include <bit>
#include <numeric>
#include <span>

#include "beaconkv/detail/numeric.hpp"
#include "beaconkv/kernel/similarity.hpp"
#include "beaconkv/types.hpp"
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

struct RedundancyScratch {
  static constexpr index_t tile_rows = 64;  // keys are read in tiles of this many

  RedundancyScratch(Workspace& work, index_t keys, index_t dim)
      : width(round_up(dim, lanes)),
        decoded(work.take<float>(tile_rows * dim)),
        unit(work.take<float>(keys * width)),
        total(work.take<double>(width)),
        packed(work.take<float>(std::min(round_up(keys, column_block), most_columns) * width)),
        strip(work.take<float>(column_block * keys)),
        open(work.take<slot_t>(keys)),
        spared(work.take<slot_t>(keys)),
        column_sum(work.take<double>(keys)) {}

  /// Unit vectors of `[first, last)`, as `FindAlike` and `Products` want them.
  void pack(index_t first, index_t last) const noexcept {
    const index_t total_rows = round_up(last - first, column_block);
    run<PackRows>(unit.data() + first * width, index_t{1}, last - first, total_rows, total_rows, width, 1.0F, packed.data());
  }

  index_t width;  // of a unit vector, zeros behind `dim`
  std::span<float> decoded;
  std::span<float> unit;
  std::span<double> total;  // sum of all unit vectors
  std::span<float> packed;
  std::span<float> strip;    // [keys][column_block], of `first_percent` only
  std::span<slot_t> open;    // rows whose newest look-alike is not known yet
  std::span<slot_t> spared;  // column that each row spares, or -1
  std::span<double> column_sum;
};

/// `scratch.spared`: each row's last column above the threshold, or -1.
///
/// From the newest columns down. As long as most rows are open, all rows meet the columns and both sides of each pair take
/// note, so that the columns are done with: half the matrix at worst. Then only open rows go on, which leave as they find.
inline void find_newest_alike(const RedundancyScratch& scratch, index_t keys, float threshold) noexcept {
  std::fill(scratch.spared.begin(), scratch.spared.end(), slot_t{-1});
  std::iota(scratch.open.begin(), scratch.open.end(), slot_t{0});
  const auto rows = scratch.open.begin();
  const auto is_done = [&](slot_t row) { return scratch.spared[static_cast<std::size_t>(row)] >= 0; };
  bool both_ways = true;
  index_t count = keys;
  index_t step = column_block;
  for (index_t last = keys; last > 0 && count > 0;) {
    const index_t first = std::max<index_t>(last - step, 0);
    scratch.pack(first, last);
    run<FindAlike>(scratch.packed.data(), first, last - first, scratch.width, scratch.unit.data(), scratch.open.data(), count,
                   both_ways, threshold, scratch.spared.data());
    if (both_ways) {
      if (last < keys) step = std::min(2 * step, most_columns);
      count = first;
      if (2 * std::count_if(rows, rows + count, is_done) > count) {
        both_ways = false;
        step = column_block;
      }
    }
    if (!both_ways) count = std::remove_if(rows, rows + count, is_done) - rows;
    last = first;
  }
}

/// `scratch.spared`: what the published code takes when it sorts "column number where alike, else 0" and picks entry
/// `int(L * ratio) - 1`.
inline void find_alike_of_rank(const RedundancyScratch& scratch, index_t keys, float threshold, double ratio) noexcept {
  const index_t rank = static_cast<index_t>(static_cast<double>(keys) * ratio) - 1 - keys;
  for (index_t first = 0; first < keys; first += column_block) {
    const index_t rows = std::min(column_block, keys - first);
    scratch.pack(first, first + rows);
    bool not_finite = false;
    float* const strip = scratch.strip.data();
    run<Products>(scratch.packed.data(), column_block, scratch.width, scratch.unit.data(), scratch.width, keys, strip,
                  &not_finite);
    for (index_t r = 0; r < rows; ++r) strip[(first + r) * column_block + r] = 0.0F;
    slot_t found[static_cast<std::size_t>(column_block)];
    run<AlikeOfRank>(strip, keys, threshold, static_cast<slot_t>(rank), found);
    std::copy(found, found + rows, scratch.spared.begin() + first);
  }
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
/// Cosines are chains of floats and decide who is alike; sums are doubles. No allocation. O(n * dim) where most keys have
/// look-alikes among the newest, and for `column_zero`; at worst n * n / 2 cosines; `first_percent` n * n of them.
template <class Keys>
[[nodiscard]] Status key_redundancy_means(const Keys& keys, index_t n, index_t dim, const RedundancyOptions& options,
                                          std::span<float> out, Workspace& work) {
  if (dim < 1) return detail::invalid("dim = ", dim, ": must be at least 1");
  if (Status s = validate(options, n); !s) return s;
  if (static_cast<index_t>(out.size()) != n) return detail::invalid("out has ", out.size(), " numbers: there are ", n, " keys");
  if (Status s = work.require(key_redundancy_workspace_size(n, dim)); !s) return s;

  const Workspace::Frame frame(work);
  const detail::RedundancyScratch scratch(work, n, dim);
  // No -0, whose sign the kernels would see.
  const bool zero = (std::bit_cast<std::uint32_t>(options.threshold) & 0x7FFFFFFFU) == 0;
  const float threshold = zero ? 0.0F : options.threshold;
  std::fill(scratch.total.begin(), scratch.total.end(), 0.0);
  for (index_t j = 0; j < n; j += scratch.tile_rows) {
    const ConstRows rows = keys(j, std::min(scratch.tile_rows, n - j), scratch.decoded.data());
    detail::run<detail::UnitRows>(rows.data, rows.stride, rows.rows, dim, scratch.width,
                                  scratch.unit.data() + j * scratch.width, scratch.total.data());
  }

  switch (options.spared) {
    case SparedLookAlike::last:
      detail::find_newest_alike(scratch, n, threshold);
      if (options.spare_column_zero) std::replace(scratch.spared.begin(), scratch.spared.end(), slot_t{-1}, slot_t{0});
      break;
    case SparedLookAlike::column_zero:
      std::fill(scratch.spared.begin(), scratch.spared.end(), slot_t{0});
      break;
    case SparedLookAlike::first_percent:
      detail::find_alike_of_rank(scratch, n, threshold, options.ratio);
      break;
  }
  detail::run<detail::ColumnSums>(scratch.unit.data(), n, scratch.width, scratch.total.data(), scratch.spared.data(),
                                  scratch.column_sum.data());
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
