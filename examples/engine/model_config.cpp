// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "engine/model_config.hpp"

#include <algorithm>
#include <array>
#include <optional>
#include <string_view>
#include <utility>

#include "engine/json_file.hpp"

namespace beaconkv::engine {
namespace {

using nlohmann::json;

// Far above any model, and small enough that products of three sizes fit into 64 bits.
constexpr index_t max_size = index_t{1} << 20;
constexpr index_t max_layers = 4096;
constexpr index_t max_head_size = 4096;
constexpr index_t max_context = index_t{1} << 40;

/// Whether `value` is a whole number from `low` to `high`, written without a fraction.
bool is_whole(const json& value, index_t low, index_t high) {
  if (value.is_number_unsigned()) {
    const auto n = value.get<std::uint64_t>();
    return n <= static_cast<std::uint64_t>(high) && static_cast<index_t>(n) >= low;
  }
  return value.is_number_integer() && value.get<index_t>() >= low && value.get<index_t>() <= high;
}

/// Typed fields of one JSON object. The first error sticks; a field that is wrong reads as some allowed value, so that the
/// reader can go on and look at the status once.
class Fields {
 public:
  Fields(const json& object, std::string prefix) : object_(object), prefix_(std::move(prefix)) {}

  /// The field, or null where it is missing or null itself.
  [[nodiscard]] const json* find(std::string_view name) const {
    const auto found = object_.find(name);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }

  index_t integer(std::string_view name, index_t low, index_t high, std::optional<index_t> fallback = {}) {
    const json* value = need(name, fallback.has_value());
    if (value == nullptr) return fallback.value_or(low);
    if (!is_whole(*value, low, high)) {
      refuse(name, *value, "must be a whole number from " + std::to_string(low) + " to " + std::to_string(high));
      return low;
    }
    return value->get<index_t>();
  }

  /// A number above `low`, at most `high`.
  double number(std::string_view name, double low, double high, std::optional<double> fallback = {}) {
    const json* value = need(name, fallback.has_value());
    if (value == nullptr) return fallback.value_or(high);
    if (!value->is_number() || !(value->get<double>() > low && value->get<double>() <= high)) {
      refuse(name, *value, "must be a number above " + shown(json(low)) + ", at most " + shown(json(high)));
      return high;
    }
    return value->get<double>();
  }

  bool boolean(std::string_view name, bool fallback) {
    const json* value = find(name);
    if (value == nullptr) return fallback;
    if (!value->is_boolean()) refuse(name, *value, "must be true or false");
    return value->is_boolean() && value->get<bool>();
  }

  std::string text(std::string_view name, const std::optional<std::string>& fallback = {}) {
    const json* value = need(name, fallback.has_value());
    if (value == nullptr) return fallback.value_or("");
    if (!value->is_string()) refuse(name, *value, "must be a text");
    return value->is_string() ? value->get<std::string>() : "";
  }

  void refuse(std::string_view name, const json& value, std::string_view why, StatusCode code = StatusCode::invalid_argument) {
    if (status_.ok()) status_ = detail::error(code, prefix_, name, " = ", shown(value), ": ", why);
  }
  void unsupported(std::string_view name, const json& value, std::string_view why) {
    refuse(name, value, why, StatusCode::unsupported);
  }
  void fail(Status status) {
    if (status_.ok()) status_ = std::move(status);
  }

  [[nodiscard]] const Status& status() const noexcept { return status_; }
  [[nodiscard]] const json& object() const noexcept { return object_; }

 private:
  const json* need(std::string_view name, bool optional) {
    const json* value = find(name);
    if (value == nullptr && !optional) fail(detail::invalid(prefix_, name, " is missing"));
    return value;
  }
  const json& object_;
  std::string prefix_;
  Status status_;
};

/// Features that would change the result silently if they were ignored.
void refuse_unsupported(Fields& fields) {
  for (const char* name : {"num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size"})
    if (const json* value = fields.find(name)) fields.unsupported(name, *value, "mixtures of experts are not supported");
  for (const char* name : {"attn_logit_softcapping", "final_logit_softcapping"})
    if (const json* value = fields.find(name)) fields.unsupported(name, *value, "softcaps are not supported");
  if (const json* value = fields.find("quantization_config"))
    fields.unsupported("quantization_config", *value, "quantised weights are not supported");
}

void refuse_sliding_window(Fields& fields, const std::string& model_type) {
  constexpr std::string_view why = "sliding-window attention is not supported";
  const bool in_use = fields.boolean("use_sliding_window", model_type == "llama");  // Qwen's configs name a window that is off
  if (const json* window = fields.find("sliding_window"); window != nullptr && in_use)
    fields.unsupported("sliding_window", *window, why);
  if (const json* types = fields.find("layer_types")) {
    const bool full =
        types->is_array() && std::all_of(types->begin(), types->end(), [](const json& t) { return t == "full_attention"; });
    if (!full) fields.unsupported("layer_types", *types, "every layer must be \"full_attention\"");
  }
}

void refuse_unknown_scaling_fields(Fields& fields) {
  static constexpr std::array known{"rope_type",        "type",
                                    "rope_theta",       "partial_rotary_factor",
                                    "factor",           "low_freq_factor",
                                    "high_freq_factor", "original_max_position_embeddings",
                                    "beta_fast",        "beta_slow",
                                    "attention_factor", "finetuned"};
  for (const auto& [name, value] : fields.object().items())
    if (!value.is_null() && std::find(known.begin(), known.end(), name) == known.end())
      fields.unsupported(name, value, "this field is not supported");
}

RopeScaling parse_scaling(Fields& fields, index_t max_position) {
  constexpr double huge = 1e9;
  const bool legacy = fields.find("rope_type") == nullptr && fields.find("type") != nullptr;
  const char* const type_field = legacy ? "type" : "rope_type";
  const std::string type = fields.text(type_field);
  if (!fields.status().ok()) return {};
  if (type != "default" && type != "linear" && type != "llama3" && type != "yarn")
    fields.unsupported(type_field, type, "supported are default, linear, llama3 and yarn");
  refuse_unknown_scaling_fields(fields);
  if (type == "linear") return LinearScaling{.factor = fields.number("factor", 0, huge)};
  if (type == "llama3")
    return Llama3Scaling{
        .factor = fields.number("factor", 0, huge),
        .low_freq_factor = fields.number("low_freq_factor", 0, huge),
        .high_freq_factor = fields.number("high_freq_factor", 0, huge),
        .original_max_position = static_cast<double>(fields.integer("original_max_position_embeddings", 1, max_context))};
  if (type == "yarn") {
    YarnScaling yarn{.factor = fields.number("factor", 0, huge),
                     .original_max_position =
                         static_cast<double>(fields.integer("original_max_position_embeddings", 1, max_context, max_position)),
                     .beta_fast = fields.number("beta_fast", 0, huge, 32.0),
                     .beta_slow = fields.number("beta_slow", 0, huge, 1.0)};
    if (fields.find("attention_factor") != nullptr) yarn.attention_factor = fields.number("attention_factor", 0, huge);
    return yarn;
  }
  return {};
}

/// `rope_theta`, `rope_scaling`, `partial_rotary_factor`, `rope_interleaved`; Transformers 5 has them together in
/// `rope_parameters`.
RopeOptions parse_rope(Fields& fields, const std::string& name, index_t head_dim, index_t max_position) {
  RopeOptions rope{.head_dim = head_dim};
  const auto theta = [](Fields& from) { return from.number("rope_theta", 1, 1e15, 10000.0); };
  const auto turning = [](Fields& from) { return from.number("partial_rotary_factor", 0, 1, 1.0); };
  rope.theta = theta(fields);
  double part = turning(fields);
  if (fields.boolean("rope_interleaved", false)) rope.layout = RopeLayout::interleaved;

  const char* const group = fields.find("rope_parameters") != nullptr ? "rope_parameters" : "rope_scaling";
  if (const json* scaling = fields.find(group)) {
    if (group == std::string_view("rope_parameters") && fields.find("rope_scaling") != nullptr)
      fields.refuse(group, *scaling, "rope_scaling is given too, one of them must go");
    if (!scaling->is_object()) {
      fields.refuse(group, *scaling, "must be an object");
      return rope;
    }
    Fields inner(*scaling, name + ": " + group + ".");
    rope.scaling = parse_scaling(inner, max_position);
    if (inner.find("rope_theta") != nullptr) rope.theta = theta(inner);
    if (inner.find("partial_rotary_factor") != nullptr) part = turning(inner);
    fields.fail(inner.status());
  }
  if (part < 1) rope.rotary_dim = static_cast<index_t>(static_cast<double>(head_dim) * part);
  if (!fields.status().ok()) return rope;
  if (const Result<RopeTable> table = RopeTable::make(rope); !table)
    fields.fail(Status(table.status().code(), name + ": " + table.status().message()));
  return rope;
}

std::vector<int> parse_eos(Fields& fields, index_t vocab_size) {
  const json* value = fields.find("eos_token_id");
  if (value == nullptr) return {};
  const json list = value->is_array() ? *value : json::array({*value});
  std::vector<int> ids;
  for (const json& id : list) {
    if (!is_whole(id, 0, vocab_size - 1)) {
      fields.refuse("eos_token_id", *value, "must be token ids below vocab_size = " + std::to_string(vocab_size));
      return {};
    }
    ids.push_back(id.get<int>());
  }
  return ids;
}

Shape parse_shape(Fields& fields, const ModelConfig& config) {
  Shape shape;
  shape.query_heads = fields.integer("num_attention_heads", 1, max_head_size);
  shape.kv_heads = fields.integer("num_key_value_heads", 1, max_head_size, shape.query_heads);
  if (shape.query_heads % shape.kv_heads != 0)
    fields.refuse("num_key_value_heads", shape.kv_heads,
                  "must divide num_attention_heads = " + std::to_string(shape.query_heads));
  const bool derived = config.model_type != "qwen3";  // Qwen3's default does not follow from the other sizes
  if (derived && fields.find("head_dim") == nullptr && config.hidden_size % shape.query_heads != 0)
    fields.refuse(
        "hidden_size", config.hidden_size,
        "num_attention_heads = " + std::to_string(shape.query_heads) + " does not divide it, and head_dim is missing");
  shape.head_dim = fields.integer("head_dim", 2, max_head_size, derived ? config.hidden_size / shape.query_heads : 128);
  return shape;
}

void parse_type(Fields& fields, ModelConfig& config) {
  config.model_type = fields.text("model_type");
  if (!fields.status().ok()) return;
  if (config.model_type != "llama" && config.model_type != "qwen2" && config.model_type != "qwen3")
    fields.unsupported("model_type", config.model_type, "supported are llama, qwen2 and qwen3");
  if (const std::string act = fields.text("hidden_act", "silu"); act != "silu")
    fields.unsupported("hidden_act", act, "supported is silu");
}

void parse_switches(Fields& fields, ModelConfig& config) {
  const bool attention_bias = fields.boolean("attention_bias", false);
  const bool qwen2 = config.model_type == "qwen2";  // biases on q, k and v, whatever the file says
  config.qkv_bias = qwen2 || attention_bias;
  config.output_bias = !qwen2 && attention_bias;
  config.mlp_bias = fields.boolean("mlp_bias", false);
  config.qk_norm = config.model_type == "qwen3";
  config.tied_head = fields.boolean("tie_word_embeddings", false);
}

}  // namespace

Result<ModelConfig> parse_config(const json& root, const std::string& name) {
  if (!root.is_object()) return detail::invalid(name, ": is ", shown(root), ", must be an object");
  Fields fields(root, name + ": ");
  ModelConfig config;
  parse_type(fields, config);
  refuse_unsupported(fields);
  refuse_sliding_window(fields, config.model_type);
  config.vocab_size = fields.integer("vocab_size", 1, max_size);
  config.hidden_size = fields.integer("hidden_size", 1, max_size);
  config.intermediate_size = fields.integer("intermediate_size", 1, max_size);
  config.layers = fields.integer("num_hidden_layers", 1, max_layers);
  config.max_position_embeddings = fields.integer("max_position_embeddings", 1, max_context, 2048);
  config.rms_norm_eps = static_cast<float>(fields.number("rms_norm_eps", 1e-30, 1, 1e-6));
  config.shape = parse_shape(fields, config);
  parse_switches(fields, config);
  config.eos_ids = parse_eos(fields, config.vocab_size);
  config.rope = parse_rope(fields, name, config.shape.head_dim, config.max_position_embeddings);
  if (!fields.status().ok()) return fields.status();
  return config;
}

Result<ModelConfig> read_config(const std::filesystem::path& path) {
  const Result<json> root = read_json(path);
  if (!root) return root.status();
  return parse_config(*root, path.filename().string());
}

}  // namespace beaconkv::engine
