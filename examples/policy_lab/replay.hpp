// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// What became of evicted tokens: later attention of a full cache to what a policy had thrown away.

#include <span>
#include <vector>

#include "beaconkv/sequence/event_log.hpp"
#include "policy_lab/evaluation.hpp"

namespace beaconkv::lab {

/// When a query looks far back: a revisit.
struct RevisitOptions {
  index_t top_k = 4;         ///< strongest keys of a query
  double min_distance = 64;  ///< in tokens: a query is global where the mean distance of its strongest keys is above
};

/// One decode step, seen by one KV head.
struct HeadStep {
  position_t position = 0;  ///< of the query
  index_t layer = 0;
  index_t head = 0;
  double regret = 0;     ///< attention mass on evicted positions, mean over the query heads
  index_t revisits = 0;  ///< query heads whose query is global
  index_t wanted = 0;    ///< strongest keys of those
  index_t found = 0;     ///< the ones among them that were still there
};

/// An evicted token and what it was missed for.
struct LostToken {
  index_t layer = 0;
  index_t head = 0;
  position_t position = 0;
  position_t evicted_at = 0;     ///< step of its eviction
  std::optional<float> score{};  ///< by which it went
  double mass = 0;               ///< attention that it would have got since, mean over the query heads, summed over steps
  double peak = 0;               ///< the largest weight that a query head would have given it since
};

/// Evictions against the attention of a full cache, step by step. Exact: where nothing was evicted every regret is 0.
class Replay {
 public:
  Replay(const Shape& shape, index_t layers, const RevisitOptions& options)
      : shape_(shape), layers_(layers), options_(options), gone_(static_cast<std::size_t>(layers * shape.kv_heads)) {}

  /// What the event evicted is gone from now on. Refused where it is of another model, or a position went before.
  [[nodiscard]] Status evict(const EvictionEvent& event);
  /// The attention weights `[query_heads][rows]` of a full cache in one layer; the query is at position `rows - 1`.
  void look(index_t layer, std::span<const float> weights);

  [[nodiscard]] const std::vector<HeadStep>& steps() const noexcept { return steps_; }
  /// Evicted tokens, most missed first.
  [[nodiscard]] std::vector<LostToken> lost() const;

 private:
  /// Index + 1 into `tokens_` of each position that is gone.
  using Gone = std::vector<std::size_t>;

  Shape shape_;
  index_t layers_;
  RevisitOptions options_;
  std::vector<Gone> gone_;  // [layers][kv_heads]
  std::vector<LostToken> tokens_{};
  std::vector<HeadStep> steps_{};
};

/// Runs the full cache along its own text once more, and looks at it with the evictions of `events` (ascending steps).
[[nodiscard]] Result<Replay> replay_events(const engine::Model& model, const Problem& problem, const FullText& full,
                                           const std::vector<EvictionEvent>& events, const RevisitOptions& options);

/// The positions that were missed most, over all layers and heads, as ascending ranges of one; at most `count`.
[[nodiscard]] std::vector<Range> dearest_positions(const Replay& replay, index_t count);
/// Those of the evicted ones that were missed least.
[[nodiscard]] std::vector<Range> cheapest_positions(const Replay& replay, index_t count);

}  // namespace beaconkv::lab
