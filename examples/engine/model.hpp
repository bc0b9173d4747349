// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// The weights of a model, as floats, in the order in which a forward pass uses them.

#include <Eigen/Core>
#include <filesystem>
#include <utility>
#include <vector>

#include "engine/model_config.hpp"

namespace beaconkv::engine {

using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using Vector = Eigen::VectorXf;

/// `weight * x + bias`, weight `[outputs, inputs]`; no bias: an empty vector.
struct Linear {
  Matrix weight;
  Vector bias;
};

/// One transformer layer. Projections of the same input are one matrix, so that a token reads them in one pass.
struct LayerWeights {
  Vector attention_norm;
  Linear qkv;                   ///< rows: `Hq * D` of q, `Hk * D` of k, `Hk * D` of v
  Vector query_norm, key_norm;  ///< `[D]`; empty without q/k norm
  Linear output;
  Vector mlp_norm;
  Linear gate_up;  ///< rows: gate, then up
  Linear down;
};

/// A loaded model. Never changes after loading, so sessions on several threads may share one; it must outlive them.
class Model {
 public:
  /// Reads `config.json` and the safetensors files of a folder. Errors name the file, the tensor or field, and the value.
  /// A tensor that the configuration has no place for is an error: the result would be wrong without it.
  [[nodiscard]] static Result<Model> load(const std::filesystem::path& directory);

  [[nodiscard]] const ModelConfig& config() const noexcept { return config_; }
  [[nodiscard]] const Shape& shape() const noexcept { return config_.shape; }
  [[nodiscard]] index_t layers() const noexcept { return config_.layers; }
  [[nodiscard]] index_t vocab_size() const noexcept { return config_.vocab_size; }
  [[nodiscard]] const RopeTable& rope() const noexcept { return rope_; }
  /// Number of weights; a tied output matrix counts once.
  [[nodiscard]] index_t weight_count() const noexcept;

  [[nodiscard]] const LayerWeights& layer(index_t i) const noexcept { return layer_weights_[static_cast<std::size_t>(i)]; }
  [[nodiscard]] const Matrix& embedding() const noexcept { return embedding_; }
  [[nodiscard]] const Vector& final_norm() const noexcept { return final_norm_; }
  /// `[vocab, hidden]`
  [[nodiscard]] const Matrix& head() const noexcept { return config_.tied_head ? embedding_ : head_; }

 private:
  Model(ModelConfig config, RopeTable rope) : config_(std::move(config)), rope_(std::move(rope)) {}

  ModelConfig config_;
  RopeTable rope_;
  Matrix embedding_;
  std::vector<LayerWeights> layer_weights_;
  Vector final_norm_;
  Matrix head_;
};

}  // namespace beaconkv::engine
