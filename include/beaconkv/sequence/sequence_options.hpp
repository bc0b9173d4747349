// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// What a `Sequence` is made with, and what it tells.

#include <algorithm>
#include <vector>

#include "beaconkv/types.hpp"

namespace beaconkv::inline v0 {

/// What a layer of a model keeps. Only global layers have a policy; a windowed layer drops what leaves its window by itself, a
/// recurrent one has no keys and values.
enum class LayerKind : std::uint8_t { global, windowed, recurrent };

struct SequenceOptions {
  index_t capacity = 0;            ///< the longest cache and the longest prompt
  std::vector<LayerKind> kinds{};  ///< of all layers of the model, in order; default: all global
  index_t max_draft_tokens = 0;    ///< the most tokens that may be tentative at once (speculative decoding)
  index_t workers = 1;             ///< threads that an executor may use: a workspace for each
  /// The most layers that evict in one call: the others stay due and come next, so that no decode step pays for all. Their
  /// caches need room for as many tokens more as it takes to come round. 0: all at once.
  index_t layers_per_step = 0;
  /// The most KV heads of a layer that are scored in one call: then layers evict one after the other, each in as many calls as
  /// it takes to score its heads and one more that moves the rows. The queries are those of the first of these calls; tokens
  /// that come meanwhile stay, and the caches need room for them. 0: a layer evicts in one call.
  index_t heads_per_step = 0;
  Reduce over_layers = Reduce::mean;  ///< how layers that keep one set together agree (`Granularity::per_sequence`)
};

/// What an eviction over all layers did.
struct SequenceReport {
  index_t layers = 0;          ///< that evicted
  index_t evicted = 0;         ///< tokens of a head, summed over those layers
  index_t num_non_finite = 0;  ///< key and query rows with a NaN or infinity that scoring met
  /// Leading slots that stayed as they were in every layer: a prefix cache must forget what lies behind. All of the longest
  /// layer where none evicted.
  index_t unchanged_prefix = 0;
};

/// Counts that are not negative, and as many global layers as there are policies.
[[nodiscard]] inline Status validate(const SequenceOptions& options, index_t policies) {
  const auto globals = options.kinds.empty()
                           ? index_t{policies}
                           : static_cast<index_t>(std::count(options.kinds.begin(), options.kinds.end(), LayerKind::global));
  if (globals != policies) return detail::invalid("kinds has ", globals, " global layers: there are ", policies, " policies");
  if (options.capacity < 0) return detail::invalid("capacity = ", options.capacity, ": must not be negative");
  if (options.max_draft_tokens < 0)
    return detail::invalid("max_draft_tokens = ", options.max_draft_tokens, ": must not be negative");
  if (options.workers < 1) return detail::invalid("workers = ", options.workers, ": must be at least 1");
  if (options.layers_per_step < 0)
    return detail::invalid("layers_per_step = ", options.layers_per_step, ": must not be negative");
  if (options.heads_per_step < 0) return detail::invalid("heads_per_step = ", options.heads_per_step, ": must not be negative");
  if (options.heads_per_step > 0 && options.layers_per_step > 1)
    return detail::invalid("layers_per_step = ", options.layers_per_step, ": with heads_per_step = ", options.heads_per_step,
                           " layers evict one at a time");
  return {};
}

}  // namespace beaconkv::inline v0
