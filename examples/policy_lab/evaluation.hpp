// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// One policy on one problem, against the full cache.

#include <optional>
#include <vector>

#include "engine/session.hpp"
#include "policy_lab/policies.hpp"
#include "policy_lab/problems.hpp"

namespace beaconkv::lab {

/// How long a decode step took.
struct StepTime {
  double model_us = 0;  ///< the forward pass
  double policy_us =
      0;  ///< all that the policy costs: its books, taking note of the queries, and the eviction where one is due
  bool evicted = false;
};

/// The least of both, step by step: for the same steps, measured twice.
void keep_least(std::vector<StepTime>& steps, const std::vector<StepTime>& again);

/// What the full cache wrote, and how long that took.
struct FullText {
  std::vector<int> tokens;  ///< `<eos>` included, unless `max_new` came first
  std::vector<StepTime> steps{};
};

/// What one policy did on one problem.
struct Outcome {
  bool exact = false;       ///< answered rightly
  bool same_text = false;   ///< token for token the full cache's text
  double kl = 0;            ///< mean over the tokens of the full cache's text, nats
  double mass_kept = 1;     ///< mean over decode steps, layers and query heads
  std::vector<int> text{};  ///< its own; the full cache's where it wrote the same
  std::size_t peak_kv_bytes = 0;
  std::size_t state_bytes = 0;    ///< at most, of all layers
  std::vector<StepTime> steps{};  ///< along the full cache's text, all layers together
  std::optional<double> prompt_eviction_us{};
};

/// Positions that are forced to stay in every layer and head, and such that go as soon as they were written. Both are generated
/// tokens or the prompt's last one; ranges are disjoint.
struct Intervention {
  std::vector<Range> keep{};
  std::vector<Range> evict{};
};

/// How a problem is run.
struct EvaluationOptions {
  index_t max_new = 0;     ///< longest text
  std::vector<int> eos{};  ///< tokens that end a text
  bool compare = true;     ///< a shadow full cache runs beside the policy: gives `kl` and `mass_kept`
  bool answer = true;      ///< the policy writes on by itself where it departs: gives `exact`
  Intervention intervention{};
  EventLog* log = nullptr;  ///< takes down the evictions along the full cache's text
};

/// The full cache's greedy text.
[[nodiscard]] Result<FullText> generate_full(const engine::Model& model, const Problem& problem,
                                             const EvaluationOptions& options);

/// Runs a policy twice over a problem, as one run with a fork: along the full cache's text, which gives everything that is
/// compared or timed; and, from where the policy would first have written another token, on by itself, which gives the answer.
[[nodiscard]] Result<Outcome> evaluate(const engine::Model& model, const PolicyEntry& entry, PolicyRequest request,
                                       Settings settings, const Problem& problem, const FullText& full,
                                       const EvaluationOptions& options);

}  // namespace beaconkv::lab
