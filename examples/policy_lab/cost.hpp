// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// `policy_lab cost`: what policies cost in bytes and time, and what they win: sequences that fit into a limit of memory.

#include <filesystem>
#include <string>
#include <vector>

#include "policy_lab/evaluation.hpp"

namespace beaconkv::lab {

struct CostOptions {
  std::filesystem::path model{};
  std::filesystem::path prompts{};
  std::string policies = "full,recent_window,snapkv,rpc,rkv,beaconkv,beaconkv_credit";
  std::string budgets = "64,128";
  index_t limit = 3;
  index_t max_new = 0;   ///< 0: from the problems, or 1024
  index_t repeats = 3;   ///< each step's time is the least of so many runs
  double memory_mb = 0;  ///< weights, keys and values, and all that policies hold; 0: no sequences are run
};

/// Decode steps in which a layer evicted, all layers and the forward pass together.
struct Tail {
  index_t evictions = 0;  ///< such steps
  double p50_us = 0;
  double p99_us = 0;
  double worst = 0;  ///< the longest step over the median of all steps of its problem, where this is largest
};
/// `steps[i]`: those of a problem.
[[nodiscard]] Tail tail_of(const std::vector<std::vector<StepTime>>& steps);

/// One policy at one budget along the full cache's texts.
struct PolicyCost {
  PolicyBytes bytes{};    ///< where the cache was largest
  index_t rows = 0;       ///< the most that a KV head held
  double samplings = 0;   ///< of a query head's beacons, in 1000 decoded tokens of a layer
  double prefill_us = 0;  ///< of the policy, a prompt, all layers
  double policy_us = 0;   ///< of the policy, a decoded token, evictions included, all layers
  Tail together{};        ///< all layers that are due evict in one step
  Tail staggered{};       ///< one layer a step
};
/// Errors: what the policy refuses, `texts` that are not as many as `problems`.
[[nodiscard]] Result<PolicyCost> cost_of(const engine::Model& model, const PolicySpec& spec, index_t budget,
                                         const std::vector<Problem>& problems, const std::vector<FullText>& texts,
                                         index_t repeats);

/// How many sequences fit into `memory` beside the weights, all in bytes; 0 where not even one does.
[[nodiscard]] index_t sequences_that_fit(double memory, double weights, double per_sequence);

/// Sequences that decode in turn, one token each, until all texts are written.
struct Goodput {
  std::size_t sequence_bytes = 0;  ///< of one: keys and values of `rows` tokens, and all that its policy holds
  index_t sequences = 0;
  index_t sequences_sharing = 0;  ///< that would fit if all shared one workspace, as an engine's do; not run
  index_t tokens = 0;
  double seconds = 0;  ///< of the decode steps, on one thread

  [[nodiscard]] double tokens_per_second() const noexcept { return seconds > 0 ? static_cast<double>(tokens) / seconds : 0; }
};
/// As many sequences as fit into `memory` bytes, whose caches have room for `rows` tokens. Of `full` only keys and values
/// count.
[[nodiscard]] Result<Goodput> run_many(const engine::Model& model, const PolicySpec& spec, index_t budget, index_t rows,
                                       const std::vector<Problem>& problems, const std::vector<FullText>& texts, double memory);

/// Measures and prints. Errors in the arguments are found before the first problem is run.
[[nodiscard]] Status cost(const CostOptions& options);

}  // namespace beaconkv::lab
