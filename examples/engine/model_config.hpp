// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// What `config.json` of a Llama, Qwen2 or Qwen3 checkpoint in Hugging Face layout says about the model.

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "beaconkv/algorithm/rope.hpp"
#include "beaconkv/types.hpp"

namespace beaconkv::engine {

/// Sizes and switches of a model. Defaults where the file is silent are those of Hugging Face Transformers for the model type.
struct ModelConfig {
  std::string model_type;  ///< llama, qwen2 or qwen3
  index_t vocab_size = 0;
  index_t hidden_size = 0;
  index_t intermediate_size = 0;
  index_t layers = 0;
  index_t max_position_embeddings = 0;  ///< longest context of the training; information only
  Shape shape;
  RopeOptions rope;
  float rms_norm_eps = 1e-6F;
  bool qkv_bias = false;
  bool output_bias = false;  ///< of the attention's output projection
  bool mlp_bias = false;
  bool qk_norm = false;      ///< RMSNorm over the head dimension of each query and key, before RoPE
  bool tied_head = false;    ///< the embedding is the output matrix too
  std::vector<int> eos_ids;  ///< tokens that end a text; may be empty
};

/// Reads the fields that the engine needs and refuses by name and value what it would get wrong: other model types and
/// activations, sliding windows in use, experts, quantised weights, softcaps, RoPE scalings other than linear, llama3 and yarn.
/// `name` begins the messages.
[[nodiscard]] Result<ModelConfig> parse_config(const nlohmann::json& json, const std::string& name);

/// `parse_config` of a file.
[[nodiscard]] Result<ModelConfig> read_config(const std::filesystem::path& path);

}  // namespace beaconkv::engine
