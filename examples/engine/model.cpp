// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "engine/model.hpp"

#include <array>
#include <initializer_list>
#include <span>
#include <string>

#include "engine/checkpoint.hpp"

namespace beaconkv::engine {
namespace {

/// One of the matrices that are stacked into a `Linear`.
struct Part {
  std::string name;  ///< without `.weight`
  index_t outputs = 0;
};

/// Reads tensors into weights. The first error sticks and later calls do nothing. Shapes are compared with the file before
/// memory is taken, so a wrong size in a configuration never allocates more than the file holds.
class Loader {
 public:
  explicit Loader(Checkpoint& checkpoint) : checkpoint_(checkpoint) {}

  void vector(const std::string& name, index_t size, Vector& out) {
    if (!expect(name, std::array{size})) return;
    out.resize(size);
    read(name, out.data());
  }

  void matrix(const std::string& name, index_t rows, index_t cols, Matrix& out) {
    if (!expect(name, std::array{rows, cols})) return;
    out.resize(rows, cols);
    read(name, out.data());
  }

  void linear(std::initializer_list<Part> parts, index_t inputs, bool bias, Linear& out) {
    index_t outputs = 0;
    for (const Part& part : parts) {
      if (!expect(part.name + ".weight", std::array{part.outputs, inputs})) return;
      if (bias && !expect(part.name + ".bias", std::array{part.outputs})) return;
      outputs += part.outputs;
    }
    out.weight.resize(outputs, inputs);
    out.bias.resize(bias ? outputs : 0);
    index_t row = 0;
    for (const Part& part : parts) {
      read(part.name + ".weight", out.weight.data() + row * inputs);
      if (bias) read(part.name + ".bias", out.bias.data() + row);
      row += part.outputs;
    }
  }

  [[nodiscard]] const Status& status() const noexcept { return status_; }

 private:
  [[nodiscard]] bool expect(const std::string& name, std::span<const index_t> shape) {
    if (status_.ok()) status_ = checkpoint_.expect(name, shape);
    return status_.ok();
  }
  void read(const std::string& name, float* out) {
    if (status_.ok()) status_ = checkpoint_.read(name, out);
  }

  Checkpoint& checkpoint_;
  Status status_;
};

LayerWeights load_layer(Loader& loader, const ModelConfig& config, index_t index) {
  const auto& [query_heads, kv_heads, head_dim] = config.shape;
  const index_t hidden = config.hidden_size;
  const std::string layer = "model.layers." + std::to_string(index) + ".";
  const std::string attention = layer + "self_attn.";
  const std::string mlp = layer + "mlp.";
  LayerWeights weights;
  loader.vector(layer + "input_layernorm.weight", hidden, weights.attention_norm);
  loader.linear({{attention + "q_proj", query_heads * head_dim},
                 {attention + "k_proj", kv_heads * head_dim},
                 {attention + "v_proj", kv_heads * head_dim}},
                hidden, config.qkv_bias, weights.qkv);
  if (config.qk_norm) {
    loader.vector(attention + "q_norm.weight", head_dim, weights.query_norm);
    loader.vector(attention + "k_norm.weight", head_dim, weights.key_norm);
  }
  loader.linear({{attention + "o_proj", hidden}}, query_heads * head_dim, config.output_bias, weights.output);
  loader.vector(layer + "post_attention_layernorm.weight", hidden, weights.mlp_norm);
  loader.linear({{mlp + "gate_proj", config.intermediate_size}, {mlp + "up_proj", config.intermediate_size}}, hidden,
                config.mlp_bias, weights.gate_up);
  loader.linear({{mlp + "down_proj", hidden}}, config.intermediate_size, config.mlp_bias, weights.down);
  return weights;
}

/// Whether a tensor of a checkpoint may be left unread: derived data, or a copy of the embedding.
bool redundant(const std::string& tensor, const ModelConfig& config) {
  return tensor.ends_with("rotary_emb.inv_freq") || (config.tied_head && tensor == "lm_head.weight");
}

index_t count(const Linear& linear) { return linear.weight.size() + linear.bias.size(); }

}  // namespace

Result<Model> Model::load(const std::filesystem::path& directory) {
  Result<ModelConfig> config = read_config(directory / "config.json");
  if (!config) return config.status();
  Result<RopeTable> rope = RopeTable::make(config->rope);
  if (!rope) return rope.status();
  Result<Checkpoint> checkpoint = Checkpoint::open(directory);
  if (!checkpoint) return checkpoint.status();

  Model model(std::move(*config), std::move(*rope));
  Loader loader(*checkpoint);
  const index_t hidden = model.config_.hidden_size;
  loader.matrix("model.embed_tokens.weight", model.vocab_size(), hidden, model.embedding_);
  for (index_t i = 0; i < model.layers() && loader.status().ok(); ++i)
    model.layer_weights_.push_back(load_layer(loader, model.config_, i));
  loader.vector("model.norm.weight", hidden, model.final_norm_);
  if (!model.config_.tied_head) loader.matrix("lm_head.weight", model.vocab_size(), hidden, model.head_);
  if (!loader.status().ok()) return loader.status();

  for (const std::string& tensor : checkpoint->unread())
    if (!redundant(tensor, model.config_))
      return detail::error(StatusCode::unsupported, "tensor '", tensor, "' has no place in a ", model.config_.model_type,
                           " model with the sizes and switches of config.json");
  return model;
}

index_t Model::weight_count() const noexcept {
  index_t sum = embedding_.size() + final_norm_.size() + head_.size();
  for (const LayerWeights& w : layer_weights_)
    sum += w.attention_norm.size() + count(w.qkv) + w.query_norm.size() + w.key_norm.size() + count(w.output) +
           w.mlp_norm.size() + count(w.gate_up) + count(w.down);
  return sum;
}

}  // namespace beaconkv::engine
