// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Scores times the lengths of the cached values: what a key's weight moves in the output when it goes.

#include <algorithm>
#include <span>

#include "beaconkv/detail/numeric.hpp"
#include "beaconkv/kernel/row_lengths.hpp"
#include "beaconkv/memory/cache_buffer.hpp"
#include "beaconkv/workspace.hpp"

namespace beaconkv::inline v0::detail {

/// Values are read in runs of this many, or as many as fit into that many rows of `head_dim`.
inline constexpr index_t values_at_once = 64;

[[nodiscard]] inline WorkspaceSize value_norm_workspace_size(index_t head_dim) {
  return measure([&](Workspace& work) {
    static_cast<void>(work.take<float>(values_at_once * head_dim));
    static_cast<void>(work.take<float>(values_at_once));
  });
}

/// `scores[j] *= ` the Euclidean length of the value of `head` in slot `j`, for the `candidates`; NaN where the value holds a
/// NaN or infinity. Returns how many did. One pass over these values; no allocation. Refused where a value is longer than all
/// of the scratch, `values_at_once * head_dim`.
template <CacheReader Cache>
[[nodiscard]] Result<index_t> multiply_by_value_norms(const Cache& cache, index_t head, Range candidates, index_t head_dim,
                                                      std::span<float> scores, Workspace& work) {
  const index_t at_once = std::min(values_at_once, values_at_once * head_dim / std::max<index_t>(1, cache.value_dim()));
  if (at_once < 1)
    return error(StatusCode::unsupported, "value_norm: the cache has values of ", cache.value_dim(), ": at most ",
                 values_at_once * head_dim, " are read");
  if (Status s = work.require(value_norm_workspace_size(head_dim)); !s) return s;
  const Workspace::Frame frame(work);
  const std::span<float> decoded = work.take<float>(values_at_once * head_dim);
  const std::span<float> lengths = work.take<float>(values_at_once);
  index_t num_non_finite = 0;
  for (index_t first = candidates.first; first < candidates.last; first += at_once) {
    const index_t count = std::min<index_t>(at_once, candidates.last - first);
    const ConstRows values = cache.values(head, first, count, decoded.data());
    run<RowLengths>(values.data, values.stride, values.dim, count, lengths.data());
    for (index_t i = 0; i < count; ++i) {
      float& score = scores[static_cast<std::size_t>(first + i)];
      const float length = lengths[static_cast<std::size_t>(i)];
      if (length >= 0) {
        score = is_nan(score) ? score : score * length;
      } else {
        score = quiet_nan();
        ++num_non_finite;
      }
    }
  }
  return num_non_finite;
}

}  // namespace beaconkv::inline v0::detail
