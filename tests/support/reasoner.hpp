// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// The lab's model and its problems.

#include <filesystem>
#include <vector>

#include "engine/model.hpp"
#include "policy_lab/problems.hpp"

namespace beaconkv::test {

inline const std::filesystem::path model_directory = std::filesystem::path(BEACONKV_SOURCE_DIR) / "examples/models/reasoner";
inline const std::filesystem::path prompts_file = model_directory / "prompts.jsonl";

[[nodiscard]] inline const engine::Model& reasoner() {
  static const engine::Model model = engine::Model::load(model_directory).or_throw();
  return model;
}

/// So many problems, evenly over the levels.
[[nodiscard]] inline std::vector<lab::Problem> some_problems(index_t count) {
  return lab::take_evenly(lab::load_problems(prompts_file, model_directory, reasoner().vocab_size()).or_throw(), count);
}

}  // namespace beaconkv::test
