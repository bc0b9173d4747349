// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Ranks by score mixed with ranks by how far a key is from the others' direction (KeyDiff, arXiv 2504.15364).

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>

#include "beaconkv/detail/numeric.hpp"
#include "beaconkv/kernel/ranking.hpp"
#include "beaconkv/kernel/row_lengths.hpp"
#include "beaconkv/kernel/row_sums.hpp"
#include "beaconkv/memory/cache_buffer.hpp"
#include "beaconkv/workspace.hpp"

namespace beaconkv::inline v0::detail {

struct KeyDiffScratch {
  static constexpr index_t keys_at_once = 64;

  KeyDiffScratch(Workspace& work, index_t dim, index_t tokens)
      : decoded(work.take<float>(keys_at_once * dim)),
        lengths(work.take<float>(tokens)),
        factors(work.take<float>(keys_at_once)),
        tile(work.take<float>(dim)),
        direction(work.take<double>(dim)),
        unlike(work.take<float>(tokens)),
        order(work.take<std::int64_t>(tokens)) {}

  std::span<float> decoded;
  std::span<float> lengths;
  std::span<float> factors;
  std::span<float> tile;        // sum of a tile's unit keys, then the direction
  std::span<double> direction;  // sum of all unit keys
  std::span<float> unlike;
  std::span<std::int64_t> order;
};

[[nodiscard]] inline WorkspaceSize key_diff_workspace_size(index_t dim, index_t tokens) {
  return measure([&](Workspace& work) { static_cast<void>(KeyDiffScratch(work, dim, tokens)); });
}

/// Whether products of unit rows with a row of this length keep to the range of float.
[[nodiscard]] inline bool usual_length(float length) noexcept { return length > 1e-12F && length < 1e30F; }

/// The length of a finite row of any size, which counts as 1e-12 at least, as published.
[[nodiscard]] inline double length_in_double(const float* row, index_t dim) noexcept {
  double squares = 0;
  for (index_t d = 0; d < dim; ++d) squares += static_cast<double>(row[d]) * static_cast<double>(row[d]);
  return std::max(std::sqrt(squares), 1e-12);
}

/// `unlike[j] = ` minus the cosine of key `j` with the mean of all finite unit keys among the first `tokens` of `head`; 0 for a
/// key of zeros or one that is not finite, whose length is negative.
template <CacheReader Cache>
void unlikeness(const Cache& cache, index_t head, index_t tokens, const KeyDiffScratch& s) noexcept {
  const auto tiles = [&](auto f) {
    for (index_t first = 0; first < tokens; first += s.keys_at_once) {
      const ConstRows keys = cache.keys(head, first, std::min(s.keys_at_once, tokens - first), s.decoded.data());
      f(keys, s.lengths.data() + first, s.unlike.data() + first);
    }
  };
  std::fill(s.direction.begin(), s.direction.end(), 0.0);
  tiles([&](const ConstRows& keys, float* lengths, float*) {
    run<RowLengths>(keys.data, keys.stride, keys.dim, keys.rows, lengths);
    for (index_t i = 0; i < keys.rows; ++i) {
      s.factors[static_cast<std::size_t>(i)] = usual_length(lengths[i]) ? 1 / lengths[i] : 0.0F;
      if (usual_length(lengths[i]) || lengths[i] < 0) continue;
      const double length = length_in_double(keys.row(i), keys.dim);
      for (index_t d = 0; d < keys.dim; ++d)
        s.direction[static_cast<std::size_t>(d)] += static_cast<double>(keys.row(i)[d]) / length;
    }
    std::fill(s.tile.begin(), s.tile.end(), 0.0F);
    run<AddRows>(keys.data, keys.stride, keys.dim, keys.rows, static_cast<const float*>(s.factors.data()), s.tile.data());
    for (std::size_t d = 0; d < s.tile.size(); ++d) s.direction[d] += static_cast<double>(s.tile[d]);
  });
  double squares = 0;
  for (const double x : s.direction) squares += x * x;
  const double scale = squares > 0 ? 1 / std::sqrt(squares) : 0.0;
  for (std::size_t d = 0; d < s.tile.size(); ++d) s.tile[d] = static_cast<float>(s.direction[d] * scale);
  tiles([&](const ConstRows& keys, const float* lengths, float* unlike) {
    run<DotProducts>(static_cast<const float*>(s.tile.data()), keys.data, keys.stride, keys.dim, keys.rows, unlike);
    for (index_t i = 0; i < keys.rows; ++i) {
      if (usual_length(lengths[i])) {
        unlike[i] = -unlike[i] / lengths[i];
        continue;
      }
      double product = 0;
      for (index_t d = 0; lengths[i] >= 0 && d < keys.dim; ++d)
        product += static_cast<double>(keys.row(i)[d]) * static_cast<double>(s.tile[static_cast<std::size_t>(d)]);
      unlike[i] = lengths[i] < 0 ? 0.0F : static_cast<float>(0 - product / length_in_double(keys.row(i), keys.dim));
    }
  });
}

/// `to[i] += weight * rank / (n - 1)` of `scores[i]` among all `n`: 0 for the worst. Of equal ones the first is the better, NaN
/// is below everything. `order` has `n` entries.
inline void add_ranks(std::span<const float> scores, float weight, std::span<std::int64_t> order,
                      std::span<float> to) noexcept {
  const std::size_t n = scores.size();
  for (std::size_t i = 0; i < n; ++i)
    order[i] = std::int64_t{score_rank(scores[i])} * (std::int64_t{1} << 31) - static_cast<std::int64_t>(i);
  std::sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(n));
  const float step = n > 1 ? weight / static_cast<float>(n - 1) : 0.0F;
  for (std::size_t r = 0; r < n; ++r) to[static_cast<std::size_t>(-order[r] & INT32_MAX)] += step * static_cast<float>(r);
}

/// Scores of the `candidates` of `head` become `(1 - share)` times their rank plus `share` times the rank of their keys'
/// unlikeness to the mean key, ranks from 0 (worst) to 1. NaN stays. Two passes over the keys and two sorts; no allocation.
template <CacheReader Cache>
[[nodiscard]] Status mix_with_key_diff(const Cache& cache, index_t head, Range candidates, float share, std::span<float> scores,
                                       Workspace& work) {
  if (share == 0) return {};
  const auto tokens = static_cast<index_t>(scores.size());
  if (Status s = work.require(key_diff_workspace_size(cache.key_dim(), tokens)); !s) return s;
  const Workspace::Frame frame(work);
  const KeyDiffScratch scratch(work, cache.key_dim(), tokens);
  unlikeness(cache, head, tokens, scratch);
  const auto first = static_cast<std::size_t>(candidates.first);
  const auto size = static_cast<std::size_t>(candidates.size());
  const std::span<float> own = scores.subspan(first, size);
  const std::span<float> mixed = scratch.lengths.first(size);  // lengths are done with
  std::fill(mixed.begin(), mixed.end(), 0.0F);
  add_ranks(own, 1 - share, scratch.order, mixed);
  add_ranks(scratch.unlike.subspan(first, size), share, scratch.order, mixed);
  for (std::size_t i = 0; i < size; ++i) own[i] = is_nan(own[i]) ? own[i] : mixed[i];
  return {};
}

}  // namespace beaconkv::inline v0::detail
