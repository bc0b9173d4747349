// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "case.hpp"

#include <cmath>
#include <fstream>
#include <utility>

namespace beaconkv::conformance {
namespace {

[[nodiscard]] nlohmann::json read_json_object(const std::filesystem::path& path) {
  std::ifstream file(path);
  if (!file) throw InputError(path.string() + ": cannot be read");
  try {
    nlohmann::json value = nlohmann::json::parse(file);
    if (!value.is_object()) throw InputError(path.string() + ": is no JSON object");
    return value;
  } catch (const nlohmann::json::exception& error) {
    throw InputError(path.string() + ": " + error.what());
  }
}

[[nodiscard]] bool fits(const std::vector<index_t>& shape, std::initializer_list<index_t> wanted) {
  if (shape.size() != wanted.size()) return false;
  auto size = shape.begin();
  for (const index_t w : wanted)
    if (const index_t s = *size++; w != Case::any && s != w) return false;
  return true;
}

[[nodiscard]] std::string shown_wanted(std::initializer_list<index_t> wanted) {
  std::string text = "[";
  for (const index_t w : wanted) text += (text.size() == 1 ? "" : ", ") + (w == Case::any ? "any" : std::to_string(w));
  return text + "]";
}

[[nodiscard]] RopeScaling scaling_of(const Case& c) {
  if (!c.has_param("scaling")) return {};
  const nlohmann::json& s = c.param("scaling");
  const auto value = [&](const char* name, std::optional<double> fallback = {}) {
    if (s.contains(name) && s[name].is_number()) return s[name].get<double>();
    if (!fallback || (s.contains(name) && !s[name].is_null()))
      throw InputError(c.where("scaling") + ": '" + name + "' is no number");
    return *fallback;
  };
  if (!s.is_object() || !s.contains("type") || !s["type"].is_string()) throw InputError(c.where("scaling") + " has no 'type'");
  const auto type = s["type"].get<std::string>();
  if (type == "linear") return LinearScaling{value("factor")};
  if (type == "ntk") return NtkScaling{value("factor")};
  if (type == "llama3")
    return Llama3Scaling{value("factor"), value("low_freq_factor"), value("high_freq_factor"), value("original_max_position")};
  if (type == "yarn") {
    YarnScaling yarn{value("factor"), value("original_max_position"), value("beta_fast", 32.0), value("beta_slow", 1.0), {}};
    if (s.contains("attention_factor") && !s["attention_factor"].is_null()) yarn.attention_factor = value("attention_factor");
    return yarn;
  }
  throw Unsupported(c.where("scaling") + ": the library has no type '" + type + "'");
}

}  // namespace

Case::Case(std::string method, std::filesystem::path folder)
    : method_(std::move(method)), folder_(std::move(folder)), params_(read_json_object(params_file())) {
  if (!params_.contains("arrays")) return;
  if (!params_["arrays"].is_object()) throw InputError(where("arrays") + " is no object");
  for (const auto& [array, shape] : params_["arrays"].items()) {
    if (!has(array)) throw InputError(file(array).string() + ": is missing, params.json lists it");
    bool is_shape = shape.is_array();
    for (const auto& size : shape) is_shape = is_shape && size.is_number_integer();
    if (!is_shape) throw InputError(where("arrays") + ": '" + array + "' is no list of sizes");
  }
}

bool Case::has_param(const std::string& name) const { return params_.contains(name) && !params_[name].is_null(); }

const nlohmann::json& Case::param(const std::string& name) const {
  if (!has_param(name)) throw InputError(where(name) + " is missing");
  return params_[name];
}

index_t Case::integer(const std::string& name) const {
  const double value = number(name);
  if (value != std::floor(value) || std::fabs(value) > 9e15)
    throw InputError(where(name) + " = " + std::to_string(value) + " is no integer");
  return static_cast<index_t>(value);
}

double Case::number(const std::string& name) const {
  if (!param(name).is_number()) throw InputError(where(name) + " is no number");
  return param(name).get<double>();
}

std::string Case::text(const std::string& name) const {
  if (!param(name).is_string()) throw InputError(where(name) + " is no string");
  return param(name).get<std::string>();
}

bool Case::flag(const std::string& name, bool fallback) const {
  if (!has_param(name)) return fallback;
  if (!param(name).is_boolean()) throw InputError(where(name) + " is neither true nor false");
  return param(name).get<bool>();
}

Shape Case::shape() const {
  const Shape shape{integer("kv_heads") * integer("gqa_group"), integer("kv_heads"), integer("head_dim")};
  if (const Status s = validate(shape); !s) throw InputError(params_file().string() + ": " + s.message());
  return shape;
}

bool Case::has(const std::string& array) const { return std::filesystem::exists(file(array)); }

template <class T>
Array<T> Case::load(const std::string& array, std::initializer_list<index_t> shape, const char* kind) const {
  AnyArray read = read_npy(file(array));
  Array<T>* const found = std::get_if<Array<T>>(&read);
  if (found == nullptr) throw InputError(file(array).string() + ": must hold " + kind);
  if (!fits(found->shape, shape))
    throw InputError(file(array).string() + ": shape " + shown(found->shape) + ": must be " + shown_wanted(shape));
  if (params_.contains("arrays") && params_["arrays"].contains(array) &&
      params_["arrays"][array].get<std::vector<index_t>>() != found->shape)
    throw InputError(file(array).string() + ": shape " + shown(found->shape) + ": params.json says " +
                     params_["arrays"][array].dump());
  return std::move(*found);
}

FloatArray Case::floats(const std::string& array, std::initializer_list<index_t> shape) const {
  return load<float>(array, shape, "floats");
}

IndexArray Case::integers(const std::string& array, std::initializer_list<index_t> shape) const {
  return load<std::int64_t>(array, shape, "integers");
}

Pool pool_of(const Case& c) {
  const std::string kind = c.text("pooling");
  if (kind == "avgpool") return {PoolKind::average, c.integer("kernel_size")};
  if (kind == "maxpool") return {PoolKind::max, c.integer("kernel_size")};
  throw Unsupported(c.where("pooling") + ": the library has no '" + kind + "'");
}

index_t prompt_of(const Case& c, const std::string& name, index_t tokens) {
  const index_t prompt = c.integer(name);
  if (prompt < 0 || prompt > tokens)
    throw InputError(c.where(name) + " = " + std::to_string(prompt) + ": must be between 0 and the " + std::to_string(tokens) +
                     " tokens of the case");
  return prompt;
}

RopeTable rope_of(const Case& c, index_t head_dim) {
  RopeOptions options{
      .head_dim = head_dim, .theta = c.number(c.has_param("theta") ? "theta" : "rope_theta"), .scaling = scaling_of(c)};
  if (c.has_param("rotary_dim")) options.rotary_dim = c.integer("rotary_dim");
  if (c.has_param("layout")) {
    const std::string layout = c.text("layout");
    if (layout != "half" && layout != "interleaved")
      throw Unsupported(c.where("layout") + ": the library has no '" + layout + "'");
    options.layout = layout == "half" ? RopeLayout::half : RopeLayout::interleaved;
  }
  return RopeTable::make(options).or_throw();
}

}  // namespace beaconkv::conformance
