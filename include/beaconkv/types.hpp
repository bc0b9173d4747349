// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// The vocabulary that every floor of the library shares: sizes, positions, shapes and views of rows.
///
/// Letters in comments: `Hq` query heads, `Hk` KV heads, `G = Hq / Hk` query heads a KV head serves (heads
/// `h*G .. h*G + G-1`), `D` head dimension, `L` cached tokens of a head. A *slot* is a row of the cache, a *position* the
/// true absolute position of its token. Slots are in time order, always.

#include <cstddef>
#include <cstdint>
#include <span>

#include "beaconkv/status.hpp"

namespace beaconkv::inline v0 {

using index_t = std::ptrdiff_t;   ///< counts, sizes and strides (in elements), signed
using position_t = std::int64_t;  ///< true absolute token position
using slot_t = std::int32_t;      ///< row in the cache, as it is stored in plans

/// The attention shape of one layer.
struct Shape {
  index_t query_heads = 0;
  index_t kv_heads = 0;
  index_t head_dim = 0;  ///< of queries and keys

  /// Query heads that share one KV head (`G`).
  [[nodiscard]] constexpr index_t group() const noexcept { return query_heads / kv_heads; }
};

/// Positive sizes, and `query_heads` a multiple of `kv_heads`.
[[nodiscard]] inline Status validate(const Shape& shape) {
  if (shape.kv_heads < 1) return detail::invalid("shape.kv_heads = ", shape.kv_heads, ": must be at least 1");
  if (shape.head_dim < 1) return detail::invalid("shape.head_dim = ", shape.head_dim, ": must be at least 1");
  if (shape.query_heads < 1 || shape.query_heads % shape.kv_heads != 0)
    return detail::invalid("shape.query_heads = ", shape.query_heads,
                           ": must be a positive multiple of shape.kv_heads = ", shape.kv_heads);
  return {};
}

/// How several numbers become one.
enum class Reduce : std::uint8_t { max, mean, sum };

/// Which keys share a softmax: every key that the query may see, or the candidates for eviction only.
enum class SoftmaxDomain : std::uint8_t { all_visible, candidates_only };

/// Over which query heads a KV head's scores are reduced: those it serves, or all of the layer (one shared choice).
enum class HeadScope : std::uint8_t { group, layer };

/// Where the query heads of a group meet: in the logits before the softmax, or in the weights after it.
enum class GroupStage : std::uint8_t { logits, weights };

/// Which heads must keep the same tokens. Part of a cache's type: memory that stores one table for all heads cannot keep a
/// set for each.
enum class Granularity : std::uint8_t {
  per_head,         ///< a set for each KV head, equally many tokens in all of them
  per_head_ragged,  ///< a set for each KV head, each with a number of its own
  per_layer,        ///< one set for all heads of a layer
  per_sequence,     ///< one set for all heads of all layers; evicted through a `Sequence`
};

/// What happens to the rotary positions of cached keys when tokens between them go.
enum class PositionMode : std::uint8_t {
  /// Keys stay rotated to their true positions, gaps stay open; the next token has its true position. The default.
  true_positions,
  /// `realign_to_slots` closes the gaps by rotating keys to their slots, as StreamingLLM counts; the next token has the
  /// position `next_rotary_position()`.
  cache_relative,
  /// Keys are cached before RoPE and rotated to their slots by whoever reads them: nothing is ever rotated in place.
  unrotated_keys,
};

/// Read-only rows of floats: `rows` rows of `dim` numbers, `stride` elements apart.
struct ConstRows {
  const float* data = nullptr;
  index_t rows = 0;
  index_t dim = 0;
  index_t stride = 0;

  [[nodiscard]] const float* row(index_t i) const noexcept { return data + i * stride; }
};

/// Read-only view of the queries of some tokens, `[tokens, heads, dim]` with free strides (in elements) and unit stride in
/// the last axis. Does not own; the memory must outlive the call that it is given to.
struct QueryView {
  const float* data = nullptr;
  index_t tokens = 0;
  index_t heads = 0;
  index_t dim = 0;
  index_t token_stride = 0;
  index_t head_stride = 0;

  /// `[tokens, heads, dim]`, dense: the order in which a projection writes them.
  [[nodiscard]] static constexpr QueryView token_major(const float* data, index_t tokens, index_t heads, index_t dim) noexcept {
    return {data, tokens, heads, dim, heads * dim, dim};
  }
  /// `[heads, tokens, dim]`, dense.
  [[nodiscard]] static constexpr QueryView head_major(const float* data, index_t tokens, index_t heads, index_t dim) noexcept {
    return {data, tokens, heads, dim, dim, tokens * dim};
  }
  [[nodiscard]] const float* row(index_t token, index_t head) const noexcept {
    return data + token * token_stride + head * head_stride;
  }
};

/// Half-open range of positions or slots, `[first, last)`.
struct Range {
  std::int64_t first = 0;
  std::int64_t last = 0;

  [[nodiscard]] constexpr std::int64_t size() const noexcept { return last - first; }
  [[nodiscard]] constexpr bool operator==(const Range&) const noexcept = default;
};

}  // namespace beaconkv::inline v0
