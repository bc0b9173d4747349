// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Which positions a KV head held when: the lives of tokens, from an event log.

#include <string>
#include <vector>

#include "beaconkv/sequence/event_log.hpp"
#include "policy_lab/evaluation.hpp"

namespace beaconkv::lab {

/// Neighbouring positions that left together. Each was held from its own step on (the prompt's from the prompt's last one),
/// `until` being the last step whose query could see it.
struct KeptRun {
  position_t first = 0;
  position_t last = 0;  ///< behind the last one
  position_t until = 0;

  [[nodiscard]] bool operator==(const KeptRun&) const noexcept = default;
};

/// A text's positions in one KV head: prompt and generated tokens.
struct Span {
  position_t prompt = 0;  ///< tokens of the prompt
  position_t tokens = 0;  ///< of prompt and text, as far as they were decoded
};

/// The runs of one layer and KV head, ascending; together all positions of the text. Linear in positions and evicted tokens.
[[nodiscard]] std::vector<KeptRun> kept_runs(const std::vector<EvictionEvent>& events, index_t layer, index_t head, Span span);

/// SVG path data that covers just the cells (step, position) in which a position was held, one unit each; the first step is
/// that of the prompt's last token, and lies at 0.
[[nodiscard]] std::string path_of(const std::vector<KeptRun>& runs, Span span);

/// A weight of the full cache's attention that is large.
struct Need {
  position_t step = 0;      ///< of the query
  position_t position = 0;  ///< of the key
};

/// Of each layer and KV head `[layers][kv_heads]`: where the full cache, along its own text, gives a key a weight above `least`
/// in a query head, the key being at least `distance` tokens back. Ascending.
[[nodiscard]] Result<std::vector<std::vector<Need>>> needs_of(const engine::Model& model, const Problem& problem,
                                                              const FullText& full, double least, position_t distance);

/// Whether the position was still held when it was needed. Logarithmic in runs.
[[nodiscard]] bool held(const std::vector<KeptRun>& runs, const Need& need);

}  // namespace beaconkv::lab
