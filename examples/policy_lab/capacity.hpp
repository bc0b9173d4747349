// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// `policy_lab capacity`: bytes of a model with and without eviction, by arithmetic from shapes alone.

#include <string>
#include <vector>

#include "beaconkv/types.hpp"

namespace beaconkv::lab {

/// What decides how much memory a model takes. Sizes are those of the published checkpoints.
struct ModelShape {
  std::string name;
  Shape shape;
  index_t layers = 0;
  double parameters = 0;  ///< of the whole model, embeddings included
};
[[nodiscard]] const std::vector<ModelShape>& model_shapes();

struct CapacityOptions {
  std::string models = "qwen3-4b";  ///< names with commas between them, or `all`
  std::string policies = "full,recent_window,snapkv,rpc,rkv,beaconkv,beaconkv_credit";
  index_t length = 32768;        ///< tokens of each sequence at the end
  index_t prompt = 0;            ///< of these: a prompt that stays and lies on top of the budget
  index_t batch = 14;            ///< sequences
  index_t budget = 2048;         ///< tokens that a KV head holds at most
  index_t bytes_per_number = 2;  ///< of weights, keys and values; policies keep their queries as float
  double memory = 80e9;          ///< of the device, in bytes
};

/// Bytes at the moment when they are most.
struct Capacity {
  double weights = 0;
  double cache = 0;       ///< keys and values of all sequences
  double state = 0;       ///< what the policies of all layers and sequences remember
  double workspace = 0;   ///< scratch of one worker, which layers and sequences share
  index_t sequences = 0;  ///< that fit into `memory` beside the weights; 0 where not even one does

  [[nodiscard]] double total() const noexcept { return weights + cache + state + workspace; }
};

/// Errors: an unknown policy, options that cannot be, a policy that refuses the budget.
[[nodiscard]] Result<Capacity> capacity_of(const ModelShape& model, const std::string& policy, const CapacityOptions& options);

/// Prints a row for every model and policy.
[[nodiscard]] Status capacity(const CapacityOptions& options);

}  // namespace beaconkv::lab
