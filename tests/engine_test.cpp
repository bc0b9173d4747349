// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

// The engine of the examples: against recorded outputs of real models, against a slow double-precision forward pass for every
// feature that those models do not have, and against files that are damaged or mean something else.

#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "beaconkv/memory/codec.hpp"
#include "engine/json_file.hpp"
#include "engine/safetensors.hpp"
#include "engine/sampler.hpp"
#include "engine/session.hpp"
#include "engine/vocabulary.hpp"
#include "support/catch.hpp"
#include "support/check.hpp"
#include "support/counting_allocator.hpp"
#include "support/random.hpp"

namespace {

using namespace beaconkv;
using namespace beaconkv::engine;
using nlohmann::json;
namespace fs = std::filesystem;

const fs::path reasoner = fs::path(BEACONKV_SOURCE_DIR) / "examples/models/reasoner";

bool contains(const std::string& text, const std::string& piece) { return text.find(piece) != std::string::npos; }

std::size_t at(index_t i) { return static_cast<std::size_t>(i); }

bool all_within(double limit, std::span<const float> a, std::span<const float> b) {
  return test::largest_difference(a, std::vector<double>(b.begin(), b.end())) < limit;
}

/// A folder of its own, removed at the end.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    static int count = 0;
    path_ = fs::temp_directory_path() / ("beaconkv_engine_test_" + std::to_string(::getpid()) + "_" + std::to_string(count++));
    fs::create_directories(path_);
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  [[nodiscard]] const fs::path& path() const { return path_; }
  [[nodiscard]] fs::path operator/(const char* name) const { return path_ / name; }

 private:
  fs::path path_;
};

void write_bytes(const fs::path& path, const std::string& bytes) {
  std::ofstream file(path, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  REQUIRE(file.good());
}

std::string read_bytes(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

json json_of(const fs::path& path) { return read_json(path).or_throw(); }

// Checkpoints made here.

struct Tensor {
  std::vector<index_t> shape;
  std::vector<float> values;
};
using Tensors = std::map<std::string, Tensor>;

std::string length_prefix(std::uint64_t length) {
  std::string bytes(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) bytes[i] = static_cast<char>(length >> (8 * i) & 0xFFU);
  return bytes;
}

std::string safetensors_bytes(const std::string& header, const std::string& data) {
  return length_prefix(header.size()) + header + data;
}

template <class Stored>
std::string encoded(std::span<const float> values) {
  std::string bytes;
  for (const float value : values) {
    const Stored stored = encode<Stored>(value);
    std::array<char, sizeof(Stored)> raw{};
    std::memcpy(raw.data(), &stored, sizeof(Stored));
    bytes.append(raw.data(), raw.size());
  }
  return bytes;
}

std::string safetensors_bytes(const Tensors& tensors, const std::string& dtype = "F32") {
  json header;
  header["__metadata__"] = {{"format", "pt"}};
  std::string data;
  for (const auto& [name, tensor] : tensors) {
    const std::size_t begin = data.size();
    data += dtype == "F16"    ? encoded<float16>(tensor.values)
            : dtype == "BF16" ? encoded<bfloat16>(tensor.values)
                              : encoded<float>(tensor.values);
    header[name] = {{"dtype", dtype}, {"shape", tensor.shape}, {"data_offsets", {begin, data.size()}}};
  }
  return safetensors_bytes(header.dump(), data);
}

/// A small model: a configuration, and random weights that fit it.
struct TinyModel {
  json config;
  Tensors tensors;

  void write(const fs::path& folder) const {
    write_bytes(folder / "config.json", config.dump());
    write_bytes(folder / "model.safetensors", safetensors_bytes(tensors));
  }
  [[nodiscard]] Model load() const {
    const TemporaryFolder folder;
    write(folder.path());
    return Model::load(folder.path()).or_throw();
  }
};

json tiny_config(const std::string& type) {
  return {{"model_type", type},       {"vocab_size", 23},         {"hidden_size", 24},
          {"intermediate_size", 20},  {"num_hidden_layers", 2},   {"head_dim", 8},
          {"num_attention_heads", 6}, {"num_key_value_heads", 2}, {"max_position_embeddings", 64},
          {"rms_norm_eps", 1e-5},     {"rope_theta", 1000}};
}

TinyModel tiny_model(const json& config) {
  test::Random random;
  TinyModel model{.config = config, .tensors = {}};
  const auto add = [&](const std::string& name, std::vector<index_t> shape, float mean, float deviation) {
    index_t count = 1;
    for (const index_t size : shape) count *= size;
    Tensor tensor{.shape = std::move(shape), .values = std::vector<float>(at(count))};
    for (float& value : tensor.values) value = mean + deviation * random.normal();
    model.tensors.emplace(name, std::move(tensor));
  };
  const auto linear = [&](const std::string& name, index_t outputs, index_t inputs, bool bias) {
    add(name + ".weight", {outputs, inputs}, 0, 0.3F);
    if (bias) add(name + ".bias", {outputs}, 0, 0.5F);
  };
  const std::string type = config["model_type"];
  const bool attention_bias = config.value("attention_bias", false);
  const bool mlp_bias = config.value("mlp_bias", false);
  const index_t hidden = config["hidden_size"];
  const index_t inner = config["intermediate_size"];
  const index_t dim = config["head_dim"];
  const index_t query_width = config["num_attention_heads"].get<index_t>() * dim;
  const index_t kv_width = config["num_key_value_heads"].get<index_t>() * dim;
  add("model.embed_tokens.weight", {config["vocab_size"], hidden}, 0, 1);
  for (int i = 0; i < config["num_hidden_layers"]; ++i) {
    const std::string layer = "model.layers." + std::to_string(i) + ".";
    add(layer + "input_layernorm.weight", {hidden}, 1, 0.2F);
    linear(layer + "self_attn.q_proj", query_width, hidden, type == "qwen2" || attention_bias);
    linear(layer + "self_attn.k_proj", kv_width, hidden, type == "qwen2" || attention_bias);
    linear(layer + "self_attn.v_proj", kv_width, hidden, type == "qwen2" || attention_bias);
    linear(layer + "self_attn.o_proj", hidden, query_width, type != "qwen2" && attention_bias);
    if (type == "qwen3") {
      add(layer + "self_attn.q_norm.weight", {dim}, 1, 0.2F);
      add(layer + "self_attn.k_norm.weight", {dim}, 1, 0.2F);
    }
    add(layer + "post_attention_layernorm.weight", {hidden}, 1, 0.2F);
    linear(layer + "mlp.gate_proj", inner, hidden, mlp_bias);
    linear(layer + "mlp.up_proj", inner, hidden, mlp_bias);
    linear(layer + "mlp.down_proj", hidden, inner, mlp_bias);
  }
  add("model.norm.weight", {hidden}, 1, 0.2F);
  if (!config.value("tie_word_embeddings", false)) add("lm_head.weight", {config["vocab_size"], hidden}, 0, 0.3F);
  return model;
}

// The slow forward pass.

using Row = std::vector<double>;

/// One token at a time in double precision, straight from the names in the checkpoint; rows of the cache are vectors.
class Reference {
 public:
  Reference(const TinyModel& model, std::vector<double> inv_freq, double attention_factor = 1)
      : config_(model.config), tensors_(model.tensors), inv_freq_(std::move(inv_freq)), attention_factor_(attention_factor) {
    const Heads empty(at(config_["num_key_value_heads"].get<index_t>()));
    keys.assign(at(layers()), empty);
    values.assign(at(layers()), empty);
  }

  using Heads = std::vector<std::vector<Row>>;
  std::vector<Heads> keys, values;          // [layer][kv head][row][dim]
  std::vector<std::vector<Row>> queries;    // [layer][head][dim] of the last step, before RoPE
  std::vector<std::vector<Row>> attention;  // [layer][head][row] of the last step

  Row step(int token) {
    const index_t group = config_["num_attention_heads"].get<index_t>() / config_["num_key_value_heads"].get<index_t>();
    queries.assign(at(layers()), {});
    attention.assign(at(layers()), {});
    Row x = row("model.embed_tokens.weight", token);
    for (index_t l = 0; l < layers(); ++l) {
      const std::string layer = "model.layers." + std::to_string(l) + ".";
      const Row h = norm(x, layer + "input_layernorm.weight");
      std::vector<Row> q = heads(linear(layer + "self_attn.q_proj", h), layer + "self_attn.q_norm.weight");
      std::vector<Row> k = heads(linear(layer + "self_attn.k_proj", h), layer + "self_attn.k_norm.weight");
      const std::vector<Row> v = heads(linear(layer + "self_attn.v_proj", h), "");
      queries[at(l)] = q;
      for (std::size_t i = 0; i < k.size(); ++i) {
        keys[at(l)][i].push_back(rotated(k[i]));
        values[at(l)][i].push_back(v[i]);
      }
      Row mixed;
      for (std::size_t i = 0; i < q.size(); ++i) {
        const Row out = attend(rotated(q[i]), l, i / at(group));
        mixed.insert(mixed.end(), out.begin(), out.end());
      }
      add(x, linear(layer + "self_attn.o_proj", mixed));
      const Row m = norm(x, layer + "post_attention_layernorm.weight");
      Row gate = linear(layer + "mlp.gate_proj", m);
      const Row up = linear(layer + "mlp.up_proj", m);
      for (std::size_t i = 0; i < gate.size(); ++i) gate[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
      add(x, linear(layer + "mlp.down_proj", gate));
    }
    ++position_;
    const bool tied = config_.value("tie_word_embeddings", false);
    return multiply(tied ? "model.embed_tokens.weight" : "lm_head.weight", norm(x, "model.norm.weight"));
  }

 private:
  [[nodiscard]] index_t layers() const { return config_["num_hidden_layers"].get<index_t>(); }

  [[nodiscard]] Row row(const std::string& name, index_t i) const {
    const Tensor& tensor = tensors_.at(name);
    const auto begin = tensor.values.begin() + i * tensor.shape.back();
    return {begin, begin + tensor.shape.back()};
  }
  [[nodiscard]] Row multiply(const std::string& name, const Row& x) const {
    Row out;
    for (index_t i = 0; i < tensors_.at(name).shape[0]; ++i) {
      const Row weights = row(name, i);
      double sum = 0;
      for (std::size_t j = 0; j < x.size(); ++j) sum += weights[j] * x[j];
      out.push_back(sum);
    }
    return out;
  }
  [[nodiscard]] Row linear(const std::string& name, const Row& x) const {
    Row out = multiply(name + ".weight", x);
    if (tensors_.contains(name + ".bias")) add(out, row(name + ".bias", 0));
    return out;
  }
  [[nodiscard]] Row norm(const Row& x, const std::string& name) const {
    double squares = 0;
    for (const double value : x) squares += value * value;
    const double scale = 1 / std::sqrt(squares / static_cast<double>(x.size()) + config_["rms_norm_eps"].get<double>());
    Row out = row(name, 0);
    for (std::size_t i = 0; i < x.size(); ++i) out[i] *= x[i] * scale;
    return out;
  }
  [[nodiscard]] std::vector<Row> heads(const Row& x, const std::string& norm_name) const {
    const index_t dim = config_["head_dim"];
    std::vector<Row> out;
    for (auto begin = x.begin(); begin != x.end(); begin += dim) {
      const Row head(begin, begin + dim);
      out.push_back(tensors_.contains(norm_name) ? norm(head, norm_name) : head);
    }
    return out;
  }
  [[nodiscard]] Row rotated(const Row& x) const {
    const bool interleaved = config_.value("rope_interleaved", false);
    const std::size_t pairs = inv_freq_.size();
    Row out = x;
    for (std::size_t i = 0; i < pairs; ++i) {
      const std::size_t a = interleaved ? 2 * i : i;
      const std::size_t b = interleaved ? 2 * i + 1 : i + pairs;
      const double angle = static_cast<double>(position_) * inv_freq_[i];
      out[a] = (x[a] * std::cos(angle) - x[b] * std::sin(angle)) * attention_factor_;
      out[b] = (x[b] * std::cos(angle) + x[a] * std::sin(angle)) * attention_factor_;
    }
    return out;
  }
  [[nodiscard]] Row attend(const Row& query, index_t layer, std::size_t kv_head) {
    const std::vector<Row>& k = keys[at(layer)][kv_head];
    const std::vector<Row>& v = values[at(layer)][kv_head];
    Row weights;
    double sum = 0;
    for (const Row& key : k) {
      double dot = 0;
      for (std::size_t d = 0; d < query.size(); ++d) dot += query[d] * key[d];
      weights.push_back(std::exp(dot / std::sqrt(static_cast<double>(query.size()))));
      sum += weights.back();
    }
    Row out(query.size());
    for (std::size_t r = 0; r < v.size(); ++r) {
      weights[r] /= sum;
      for (std::size_t d = 0; d < out.size(); ++d) out[d] += weights[r] * v[r][d];
    }
    attention[at(layer)].push_back(weights);
    return out;
  }
  static void add(Row& x, const Row& y) {
    for (std::size_t i = 0; i < x.size(); ++i) x[i] += y[i];
  }

  json config_;
  Tensors tensors_;
  std::vector<double> inv_freq_;
  double attention_factor_;
  index_t position_ = 0;
};

std::vector<double> frequencies(index_t rotary_dim, double theta, double factor = 1) {
  std::vector<double> out;
  for (index_t i = 0; i < rotary_dim / 2; ++i)
    out.push_back(std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(rotary_dim)) / factor);
  return out;
}

std::vector<int> random_tokens(int count, int vocab_size) {
  test::Random random;
  std::vector<int> tokens(static_cast<std::size_t>(count));
  for (int& token : tokens) token = static_cast<int>(random.integer(0, vocab_size - 1));
  return tokens;
}

/// Rounding only: logits of the small models are about 5, keys about 2.
constexpr double tolerance = 2e-4;

void compare_step(const Session& session, const Reference& reference, const Row& logits) {
  CHECK(test::largest_difference(session.logits(), logits) < tolerance);
  const Shape& shape = session.model().shape();
  for (index_t l = 0; l < session.model().layers(); ++l) {
    const QueryView queries = session.queries(l);
    REQUIRE(queries.tokens == 1);
    for (index_t h = 0; h < shape.query_heads; ++h) {
      const Row& query = reference.queries[at(l)][at(h)];
      CHECK(test::largest_difference(std::span(queries.row(0, h), query.size()), query) < tolerance);
      const Row& weights = reference.attention[at(l)][at(h)];
      const std::span<const float> recorded = session.attention(l);
      REQUIRE(recorded.size() == at(shape.query_heads) * weights.size());
      CHECK(test::largest_difference(recorded.subspan(at(h) * weights.size(), weights.size()), weights) < tolerance);
    }
    for (index_t h = 0; h < shape.kv_heads; ++h)
      for (index_t r = 0; r < session.length(l); ++r) {
        const index_t offset = (h * session.capacity() + r) * shape.head_dim;
        const Row& key = reference.keys[at(l)][at(h)][at(r)];
        const Row& value = reference.values[at(l)][at(h)][at(r)];
        if (test::largest_difference(std::span(session.keys(l) + offset, key.size()), key) > tolerance)
          FAIL_CHECK("key of row " << r);
        if (test::largest_difference(std::span(session.values(l) + offset, value.size()), value) > tolerance)
          FAIL_CHECK("value of row " << r);
      }
  }
}

void compare_with_reference(const json& config, const std::vector<double>& inv_freq, double attention_factor = 1) {
  CAPTURE(test::Random().seed());
  const TinyModel tiny = tiny_model(config);
  const Model model = tiny.load();
  Session session(model, 40);
  session.record_attention(true);
  Reference reference(tiny, inv_freq, attention_factor);
  for (const int token : random_tokens(24, 23)) {
    REQUIRE(session.decode(token).ok());
    compare_step(session, reference, reference.step(token));
  }
}

json with(json config, const json& changes) {
  config.update(changes);
  return config;
}

/// The message of a load that must fail.
std::string load_error(const fs::path& folder) {
  const Result<Model> model = Model::load(folder);
  REQUIRE_FALSE(model.ok());
  return model.status().message();
}

}  // namespace

TEST_CASE("The reasoner gives the recorded logits and tokens") {
  const Model model = Model::load(reasoner).or_throw();
  CHECK(model.weight_count() == 867456);
  const json recorded = json_of(reasoner / "logits_check.json");
  REQUIRE(recorded["prompts"].size() == 3);
  for (const json& prompt : recorded["prompts"]) {
    Session session(model, 400);
    REQUIRE(session.prefill(prompt["prompt_ids"].get<std::vector<int>>()).ok());
    for (const json& entry : prompt["first_position_top5"]) {
      const float logit = session.logits()[entry["id"].get<std::size_t>()];
      CHECK(std::abs(static_cast<double>(logit) - entry["logit"].get<double>()) < 1e-4);
    }
    std::vector<int> tokens;
    while (tokens.size() < prompt["greedy_ids"].size()) {
      tokens.push_back(*greedy(session.logits()));
      REQUIRE(session.decode(tokens.back()).ok());
    }
    CHECK(tokens == prompt["greedy_ids"].get<std::vector<int>>());
  }
}

TEST_CASE("The reasoner solves a problem of each level to the end") {
  const Model model = Model::load(reasoner).or_throw();
  REQUIRE(model.config().eos_ids == std::vector<int>{2});
  std::ifstream lines(reasoner / "prompts.jsonl");
  std::vector<int> levels;
  for (std::string line; std::getline(lines, line);) {
    const json problem = json::parse(line);
    if (std::find(levels.begin(), levels.end(), problem["level"]) != levels.end()) continue;
    levels.push_back(problem["level"]);
    const auto expected = problem["expected_ids"].get<std::vector<int>>();
    Session session(model, 900);
    REQUIRE(session.prefill(problem["prompt_ids"].get<std::vector<int>>()).ok());
    std::vector<int> tokens;
    while (tokens.size() < expected.size() && (tokens.empty() || tokens.back() != 2)) {
      tokens.push_back(*greedy(session.logits()));
      REQUIRE(session.decode(tokens.back()).ok());
    }
    CHECK(tokens == expected);
  }
  CHECK(levels == std::vector<int>{12, 18, 24});
}

TEST_CASE("A model of others with interleaved RoPE and a tied head, where its folder exists") {
  const fs::path folder = fs::path(BEACONKV_SOURCE_DIR) / "../shared/models/stories260k";
  if (!fs::exists(folder)) {
    WARN("not run: there is no stories260k model beside the project");
    CHECK_FALSE(fs::exists(folder / "config.json"));
    return;
  }
  const Model model = Model::load(folder).or_throw();
  CHECK(model.rope().layout() == RopeLayout::interleaved);
  const json recorded = json_of(folder / "logits_check.json");
  const auto expected = recorded["greedy_ids"].get<std::vector<int>>();
  Session session(model, 512);
  const auto check_top5 = [&](const json& top5) {
    REQUIRE(top5.size() == 5);
    for (const json& entry : top5) {
      const float logit = session.logits()[entry[0].get<std::size_t>()];
      CHECK(std::abs(static_cast<double>(logit) - entry[1].get<double>()) < 1e-4);
    }
  };
  std::vector<int> tokens = recorded["greedy_from"];
  REQUIRE(session.prefill(tokens).ok());
  check_top5(recorded["first_logits_top5"]);
  while (tokens.size() < expected.size()) {
    tokens.push_back(*greedy(session.logits()));
    REQUIRE(session.decode(tokens.back()).ok());
    if (session.next_position() == 200) check_top5(recorded["logits_at_200_top5"]);
  }
  CHECK(tokens == expected);
}

TEST_CASE("Every variant of the models agrees with a double-precision forward pass") {
  SECTION("llama: grouped heads, own output matrix") { compare_with_reference(tiny_config("llama"), frequencies(8, 1000)); }
  SECTION("llama: one KV head for each query head") {
    compare_with_reference(with(tiny_config("llama"), {{"num_key_value_heads", 6}}), frequencies(8, 1000));
  }
  SECTION("qwen2: biases on q, k and v, tied head") {
    compare_with_reference(with(tiny_config("qwen2"), {{"tie_word_embeddings", true}}), frequencies(8, 1000));
  }
  SECTION("qwen3: norms on q and k") { compare_with_reference(tiny_config("qwen3"), frequencies(8, 1000)); }
  SECTION("all biases, interleaved and partial RoPE with linear scaling") {
    const json changes = {{"attention_bias", true},
                          {"mlp_bias", true},
                          {"rope_interleaved", true},
                          {"partial_rotary_factor", 0.5},
                          {"rope_scaling", {{"type", "linear"}, {"factor", 2.5}}}};
    compare_with_reference(with(tiny_config("llama"), changes), frequencies(4, 1000, 2.5));
  }
  SECTION("YaRN's attention factor") {
    // In an original context of 4 no pair turns once: the ramp ends at pair 0, which stays as it is, and the others are
    // divided.
    const json yarn = {{"rope_type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 4}};
    std::vector<double> inv_freq = frequencies(8, 1000, 4);
    inv_freq[0] *= 4;
    compare_with_reference(with(tiny_config("llama"), {{"rope_scaling", yarn}}), inv_freq, 0.1 * std::log(4.0) + 1);
  }
}

TEST_CASE("A prompt in pieces gives what it gives in one") {
  CAPTURE(test::Random().seed());
  const Model model = Model::load(reasoner).or_throw();
  const std::vector<int> tokens = random_tokens(150, static_cast<int>(model.vocab_size()));
  Session whole(model, 200);
  REQUIRE(whole.prefill(tokens).ok());
  CHECK(whole.queries(3).tokens == 150);
  const auto same = [](const float* a, const float* b, std::size_t size) {
    return all_within(1e-3, std::span(a, size), std::span(b, size));
  };
  for (const std::size_t piece : {std::size_t{1}, std::size_t{7}, std::size_t{64}, std::size_t{65}, std::size_t{149}}) {
    INFO("pieces of " << piece);
    Session pieces(model, 200);
    for (std::size_t done = 0; done < tokens.size();) {
      const std::size_t count = std::min(piece, tokens.size() - done);
      REQUIRE(pieces.prefill(std::span(tokens).subspan(done, count)).ok());
      for (index_t l = 0; l < model.layers(); ++l) {
        const QueryView queries = pieces.queries(l);
        REQUIRE(queries.tokens == static_cast<index_t>(count));
        CHECK(same(queries.data, whole.queries(l).row(static_cast<index_t>(done), 0), count * 6 * 32));
      }
      done += count;
    }
    CHECK(pieces.next_position() == 150);
    CHECK(same(pieces.logits().data(), whole.logits().data(), 56));
    for (index_t l = 0; l < model.layers(); ++l) {
      CHECK(pieces.length(l) == 150);
      for (const index_t head : {index_t{0}, index_t{200} * 32}) {
        CHECK(same(pieces.keys(l) + head, whole.keys(l) + head, std::size_t{150} * 32));
        CHECK(same(pieces.values(l) + head, whole.values(l) + head, std::size_t{150} * 32));
      }
    }
  }
}

TEST_CASE("After rows were evicted, attention sees what is left, at true positions") {
  CAPTURE(test::Random().seed());
  const TinyModel tiny = tiny_model(tiny_config("llama"));
  const Model model = tiny.load();
  const std::vector<int> tokens = random_tokens(30, 23);
  Session session(model, 30);
  session.record_attention(true);
  Reference reference(tiny, frequencies(8, 1000));
  REQUIRE(session.prefill(std::span(tokens).first(20)).ok());
  for (int i = 0; i < 20; ++i) (void)reference.step(tokens[at(i)]);

  // Layer 1 only; each head loses other rows.
  const auto evict = [&](index_t head, index_t first, index_t count) {
    for (std::vector<Row>* rows : {&reference.keys[1][at(head)], &reference.values[1][at(head)]})
      rows->erase(rows->begin() + first, rows->begin() + first + count);
    for (float* memory : {session.keys(1), session.values(1)}) {
      float* const rows = memory + head * session.capacity() * 8;
      std::copy(rows + (first + count) * 8, rows + index_t{20} * 8, rows + first * 8);
    }
  };
  SECTION("heads of different lengths") {
    evict(0, 3, 7);
    evict(1, 11, 2);
    REQUIRE(session.set_length(1, 0, 13).ok());
    REQUIRE(session.set_length(1, 1, 18).ok());
    for (int i = 20; i < 30; ++i) {
      const Row logits = reference.step(tokens[at(i)]);
      REQUIRE(session.decode(tokens[at(i)]).ok());
      CHECK(test::largest_difference(session.logits(), logits) < tolerance);
      CHECK(session.attention(0).size() == at(6 * (i + 1)));
      CHECK(session.attention(1).empty());  // no [heads][rows] to show
    }
    CHECK(session.length(1, 0) == 23);
    CHECK(session.length(1, 1) == 28);
    CHECK(session.length(1) == 28);
    return;
  }
  evict(0, 3, 7);
  evict(1, 11, 7);
  REQUIRE(session.set_length(1, 13).ok());
  CHECK(session.next_position() == 20);

  SECTION("token by token") {
    for (int i = 20; i < 30; ++i) {
      REQUIRE(session.decode(tokens[at(i)]).ok());
      compare_step(session, reference, reference.step(tokens[at(i)]));
    }
  }
  SECTION("in one piece") {
    Row logits;
    for (int i = 20; i < 30; ++i) logits = reference.step(tokens[at(i)]);
    REQUIRE(session.prefill(std::span(tokens).subspan(20)).ok());
    CHECK(test::largest_difference(session.logits(), logits) < tolerance);
  }
  CHECK(session.length(0) == 30);
  CHECK(session.length(1) == 23);
  CHECK(session.next_position() == 30);
  CHECK_FALSE(session.decode(1).ok());  // layer 0 is full, layer 1 is not
}

TEST_CASE("A decode step allocates nothing") {
  const json changes = {{"attention_bias", true}, {"mlp_bias", true}};
  for (const Model& model : {Model::load(reasoner).or_throw(), tiny_model(with(tiny_config("qwen3"), changes)).load()}) {
    Session session(model, 300);
    session.record_attention(true);
    bool done = true;
    const auto decode = [&](int count) {
      for (int i = 0; i < count; ++i) done = done && session.decode(i % 20).ok() && greedy(session.logits()).ok();
    };
    const std::vector<int> prompt(200, 3);
    const std::int64_t first_step = test::allocations_of([&] { decode(1); });
    const std::int64_t longer_prefill = test::allocations_of([&] { done = done && session.prefill(prompt).ok(); });
    const std::int64_t later_steps = test::allocations_of([&] { decode(50); });
    CHECK(done);
    CHECK(first_step == 0);
    CHECK(longer_prefill > 0);
    CHECK(later_steps == 0);
  }
}

TEST_CASE("A copy of a session is a fork") {
  const Model model = Model::load(reasoner).or_throw();
  const std::vector<int> tokens = random_tokens(60, 56);
  Session original(model, 100);
  REQUIRE(original.prefill(tokens).ok());
  Session alone = original;
  REQUIRE(alone.decode(5).ok());
  REQUIRE(alone.decode(6).ok());

  Session fork = original;
  CHECK(fork.keys(0) != original.keys(0));
  REQUIRE(fork.decode(9).ok());
  REQUIRE(fork.set_length(2, 10).ok());
  std::fill_n(fork.values(3), 100 * 32, 7.0F);
  REQUIRE(original.decode(5).ok());
  REQUIRE(original.decode(6).ok());
  CHECK(original.length(2) == 62);
  CHECK(std::equal(original.logits().begin(), original.logits().end(), alone.logits().begin()));

  fork = original;
  REQUIRE(fork.decode(7).ok());
  REQUIRE(original.decode(7).ok());
  CHECK(std::equal(original.logits().begin(), original.logits().end(), fork.logits().begin()));
}

TEST_CASE("Tokens that were taken back leave no trace") {
  const Model model = Model::load(reasoner).or_throw();
  const std::vector<int> tokens = random_tokens(60, 56);
  Session session(model, 70);
  REQUIRE(session.prefill(tokens).ok());
  Session never = session;
  for (const int draft : {5, 6, 7}) REQUIRE(session.decode(draft).ok());
  CHECK(session.set_next_position(62).message() == "position = 62: must be at least the 63 rows of a layer");
  CHECK(session.next_position() == 63);
  for (index_t l = 0; l < model.layers(); ++l) REQUIRE(session.set_length(l, 61).ok());
  REQUIRE(session.set_next_position(61).ok());
  REQUIRE(never.decode(5).ok());
  for (const int token : {9, 10}) {
    REQUIRE(session.decode(token).ok());
    REQUIRE(never.decode(token).ok());
    CHECK(std::equal(session.logits().begin(), session.logits().end(), never.logits().begin()));
  }
  CHECK(session.next_position() == 63);
  CHECK(session.length(3) == 63);

  // A session that was given the rows of another goes on like it.
  Session other(model, 100);
  const index_t dim = model.shape().head_dim;
  for (index_t l = 0; l < model.layers(); ++l) {
    for (index_t h = 0; h < model.shape().kv_heads; ++h) {
      std::copy_n(never.keys(l) + h * 70 * dim, 63 * dim, other.keys(l) + h * 100 * dim);
      std::copy_n(never.values(l) + h * 70 * dim, 63 * dim, other.values(l) + h * 100 * dim);
    }
    REQUIRE(other.set_length(l, 63).ok());
  }
  REQUIRE(other.set_next_position(63).ok());
  REQUIRE(other.decode(11).ok());
  REQUIRE(never.decode(11).ok());
  CHECK(std::equal(other.logits().begin(), other.logits().end(), never.logits().begin()));
}

TEST_CASE("A refused call names the value and leaves the session as it was") {
  const Model model = tiny_model(tiny_config("llama")).load();
  Session session(model, 8);
  REQUIRE(session.prefill(std::vector{1, 2, 3, 4, 5}).ok());
  const std::vector<float> logits(session.logits().begin(), session.logits().end());
  const std::vector<float> keys(session.keys(0), session.keys(0) + index_t{2} * 8 * 8);
  const auto refused = [&](const Status& status, StatusCode code, const std::string& piece) {
    INFO(status.message());
    CHECK(status.code() == code);
    CHECK(contains(status.message(), piece));
    CHECK(session.next_position() == 5);
    CHECK(session.length(0) == 5);
    CHECK(session.queries(0).tokens == 5);
    CHECK(std::equal(logits.begin(), logits.end(), session.logits().begin()));
    CHECK(std::equal(keys.begin(), keys.end(), session.keys(0)));
  };
  refused(session.decode(23), StatusCode::invalid_argument, "tokens[0] = 23");
  refused(session.decode(-1), StatusCode::invalid_argument, "tokens[0] = -1");
  refused(session.prefill(std::vector{1, 99}), StatusCode::invalid_argument, "tokens[1] = 99");
  refused(session.prefill({}), StatusCode::invalid_argument, "none");
  refused(session.prefill(std::vector{1, 2, 3, 4}), StatusCode::out_of_capacity, "capacity = 8");
  refused(session.set_length(2, 1), StatusCode::invalid_argument, "layer = 2");
  refused(session.set_length(0, 9), StatusCode::invalid_argument, "rows = 9");
  refused(session.set_length(0, -1), StatusCode::invalid_argument, "rows = -1");
  refused(session.set_length(0, 2, 1), StatusCode::invalid_argument, "head = 2");
  refused(session.set_length(0, -1, 1), StatusCode::invalid_argument, "head = -1");
  refused(session.set_length(0, 1, 9), StatusCode::invalid_argument, "rows = 9");
  CHECK(session.prefill(std::vector{1, 2, 3}).ok());

  for (const index_t capacity : {index_t{0}, index_t{-5}, std::numeric_limits<index_t>::max()}) {
    const Result<Session> made = Session::make(model, capacity);
    REQUIRE_FALSE(made.ok());
    CHECK(contains(made.status().message(), "capacity = " + std::to_string(capacity)));
    CHECK_THROWS_AS(Session(model, capacity), Error);
  }
}

TEST_CASE("Attention weights are there after a recorded decode step only") {
  const Model model = tiny_model(tiny_config("llama")).load();
  Session session(model, 20);
  const std::size_t heads = 6;
  CHECK(session.attention(0).empty());
  CHECK(session.queries(0).tokens == 0);
  REQUIRE(session.prefill(std::vector{1, 2, 3}).ok());
  REQUIRE(session.decode(4).ok());
  CHECK(session.attention(1).empty());
  session.record_attention(true);
  CHECK(session.attention(1).empty());
  REQUIRE(session.decode(5).ok());
  REQUIRE(session.attention(1).size() == heads * 5);
  for (std::size_t h = 0; h < heads; ++h) {
    double sum = 0;
    for (const float weight : session.attention(1).subspan(h * 5, 5)) sum += static_cast<double>(weight);
    CHECK(std::abs(sum - 1) < 1e-5);
  }
  REQUIRE(session.set_length(1, 2).ok());
  CHECK(session.attention(1).size() == heads * 5);
  REQUIRE(session.prefill(std::vector{1, 2}).ok());
  CHECK(session.attention(1).empty());
  REQUIRE(session.decode(5).ok());
  CHECK(session.attention(0).size() == heads * 8);
  CHECK(session.attention(1).size() == heads * 5);
  session.record_attention(false);
  CHECK(session.attention(0).empty());
}

TEST_CASE("Half-precision weights become the floats that they stand for") {
  const float infinity = std::numeric_limits<float>::infinity();
  const std::vector<float> exact = {0, -0.0F, 1, -2.5F, 65504, 0x1p-14F, 0x1p-24F, -0x1.ff8p-15F, infinity, -infinity};
  const TemporaryFolder folder;
  for (const std::string dtype : {"F32", "F16", "BF16"}) {
    INFO(dtype);
    std::vector<float> values = exact;
    if (dtype == "BF16") values = {0, -0.0F, 1, -2.5F, 0x1.fep127F, 0x1p-126F, 0x1p-133F, -0x1p-130F, infinity, -infinity};
    write_bytes(folder / "x.safetensors", safetensors_bytes(Tensors{{"w", {.shape = {2, 5}, .values = values}}}, dtype));
    SafetensorsFile file = SafetensorsFile::open(folder / "x.safetensors").or_throw();
    REQUIRE(file.expect("w", std::vector<index_t>{2, 5}).ok());
    std::vector<float> read(10);
    REQUIRE(file.read("w", read.data()).ok());
    for (std::size_t i = 0; i < 10; ++i)
      CHECK(std::bit_cast<std::uint32_t>(read[i]) == std::bit_cast<std::uint32_t>(values[i]));
  }
  // Written out, so that the encoder above is not its own witness: 1.5, the smallest subnormal, NaN.
  const std::string header =
      R"({"h":{"dtype":"F16","shape":[3],"data_offsets":[0,6]},"b":{"dtype":"BF16","shape":[3],"data_offsets":[6,12]}})";
  const std::string data("\x00\x3E\x01\x00\x01\x7E\xC0\x3F\x01\x00\xC0\x7F", 12);
  write_bytes(folder / "y.safetensors", safetensors_bytes(header, data));
  SafetensorsFile file = SafetensorsFile::open(folder / "y.safetensors").or_throw();
  std::array<float, 3> half{};
  std::array<float, 3> brain{};
  REQUIRE(file.read("h", half.data()).ok());
  REQUIRE(file.read("b", brain.data()).ok());
  CHECK((half[0] == 1.5F && half[1] == 0x1p-24F && std::isnan(half[2])));
  CHECK((brain[0] == 1.5F && brain[1] == 0x1p-133F && std::isnan(brain[2])));
}

TEST_CASE("Tensors longer than one read are whole") {
  Tensor tensor{.shape = {700, 1001}, .values = std::vector<float>(std::size_t{700} * 1001)};
  for (std::size_t i = 0; i < tensor.values.size(); ++i) tensor.values[i] = static_cast<float>(i);
  const TemporaryFolder folder;
  write_bytes(folder / "x.safetensors", safetensors_bytes(Tensors{{"a", {.shape = {1}, .values = {3}}}, {"w", tensor}}));
  SafetensorsFile file = SafetensorsFile::open(folder / "x.safetensors").or_throw();
  std::vector<float> read(tensor.values.size());
  REQUIRE(file.read("w", read.data()).ok());
  CHECK(read == tensor.values);
}

TEST_CASE("A damaged safetensors file is refused") {
  const TemporaryFolder folder;
  const TinyModel tiny = tiny_model(tiny_config("llama"));
  tiny.write(folder.path());
  const std::string whole = read_bytes(folder / "model.safetensors");
  const auto header_size = static_cast<std::size_t>(json::parse(whole.substr(8, whole.find("]}}") + 3 - 8)).dump().size());

  SECTION("truncated") {
    for (const std::size_t size : {std::size_t{0}, std::size_t{4}, std::size_t{8}, std::size_t{20}, 8 + header_size,
                                   8 + header_size + 100, whole.size() - 1}) {
      write_bytes(folder / "model.safetensors", whole.substr(0, size));
      const std::string message = load_error(folder.path());
      INFO(size << ": " << message);
      CHECK(contains(message, "model.safetensors"));
      CHECK((contains(message, "truncated") || contains(message, "too short")));
    }
  }
  SECTION("longer than its header says") {
    write_bytes(folder / "model.safetensors", whole + "x");
    CHECK(contains(load_error(folder.path()), "model.safetensors: its tensors have"));
  }
  SECTION("a header length that no file has") {
    for (const std::uint64_t length : {std::uint64_t{1} << 60, ~std::uint64_t{0}, std::uint64_t{99'000'000}}) {
      write_bytes(folder / "model.safetensors", length_prefix(length) + whole.substr(8));
      CHECK(contains(load_error(folder.path()), "header has " + std::to_string(length)));
    }
  }
  SECTION("another kind of file") {
    write_bytes(folder / "model.safetensors", "\x89PNG\r\n\x1a\n" + std::string(5000, '\x42'));
    CHECK(contains(load_error(folder.path()), "not a safetensors file"));
    write_bytes(folder / "model.safetensors", safetensors_bytes("this is text", ""));
    CHECK(contains(load_error(folder.path()), "header: not JSON"));
    write_bytes(folder / "model.safetensors", safetensors_bytes("[1, 2]", ""));
    CHECK(contains(load_error(folder.path()), "header is [1,2], must be an object"));
    fs::remove(folder / "model.safetensors");
    CHECK(contains(load_error(folder.path()), "no such file"));
    fs::create_directory(folder / "model.safetensors");
    CHECK(contains(load_error(folder.path()), "no such file"));
  }
  SECTION("random damage to the header") {
    test::Random random;
    CAPTURE(random.seed());
    const auto below = [&](std::size_t n) { return at(random.integer(0, static_cast<index_t>(n) - 1)); };
    int refused = 0;
    for (int round = 0; round < 300; ++round) {
      std::string bytes = whole;
      for (std::size_t i = 0; i <= below(3); ++i) bytes[below(8 + header_size)] = static_cast<char>(below(256));
      write_bytes(folder / "model.safetensors", bytes);
      const Result<Model> model = Model::load(folder.path());
      refused += model.ok() ? 0 : 1;
      if (!model.ok()) REQUIRE_FALSE(model.status().message().empty());
    }
    CHECK(refused > 200);
  }
}

TEST_CASE("A safetensors header that contradicts itself is refused") {
  const TemporaryFolder folder;
  const std::string data(16, '\0');
  struct Case {
    const char* header;
    const char* message;
  };
  const std::array cases{
      Case{R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[3],"data_offsets":[4,16]}})",
           "tensor 'b' begins at data byte 4, the tensor before it ends at 8"},
      Case{R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}})",
           "tensor 'b' begins at data byte 8, the tensor before it ends at 4"},
      Case{R"({"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}})",
           "key \"a\" stands twice"},
      Case{R"({"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,16]}})", "tensor 'a' has shape [2,3] of F32, but 16 bytes"},
      Case{R"({"a":{"dtype":"F16","shape":[4],"data_offsets":[0,16]}})", "tensor 'a' has shape [4] of F16, but 16 bytes"},
      Case{R"({"a":{"dtype":"F32","shape":[5],"data_offsets":[0,20]}})", "ends at data byte 20, the file has 16"},
      Case{R"({"a":{"dtype":"F32","shape":[4],"data_offsets":[16,0]}})", "the end is before the start"},
      Case{R"({"a":{"dtype":"F32","shape":[4],"data_offsets":[-16,0]}})", "data_offsets [-16,0]"},
      Case{R"({"a":{"dtype":"F32","shape":[4],"data_offsets":[0,18446744073709551615]}})",
           "data_offsets [0,18446744073709551615]"},
      Case{R"({"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16.0]}})", "data_offsets [0,16.0]"},
      Case{R"({"a":{"dtype":"F32","shape":[4],"data_offsets":[0]}})", "data_offsets [0]"},
      Case{R"({"a":{"dtype":"F32","shape":[-4],"data_offsets":[0,16]}})", "shape [-4]"},
      Case{R"({"a":{"dtype":"F32","shape":[4611686018427387904,4611686018427387904],"data_offsets":[0,16]}})", "but 16 bytes"},
      Case{R"({"a":{"dtype":"F32","shape":4,"data_offsets":[0,16]}})", "shape 4"},
      Case{R"({"a":{"dtype":32,"shape":[4],"data_offsets":[0,16]}})", "dtype 32"},
      Case{R"({"a":{"shape":[4],"data_offsets":[0,16]}})", "dtype null"},
      Case{R"({"a":[1,2,3]})", "dtype null"},
      Case{R"({"a":{"dtype":"F32","shape":[1e999],"data_offsets":[0,16]}})", "not usable JSON"},
  };
  for (const Case& c : cases) {
    write_bytes(folder / "x.safetensors", safetensors_bytes(std::string(c.header), data));
    const Result<SafetensorsFile> file = SafetensorsFile::open(folder / "x.safetensors");
    INFO(c.header);
    REQUIRE_FALSE(file.ok());
    INFO(file.status().message());
    CHECK(contains(file.status().message(), c.message));
    CHECK(contains(file.status().message(), "x.safetensors: "));
  }
}

TEST_CASE("Tensors that do not fit the configuration are named") {
  const TemporaryFolder folder;
  const std::string q_proj = "model.layers.1.self_attn.q_proj.weight";
  TinyModel tiny = tiny_model(tiny_config("llama"));
  SECTION("wrong shape") {
    tiny.tensors[q_proj].shape = {24, 48};
    tiny.write(folder.path());
    CHECK(load_error(folder.path()) ==
          "model.safetensors: tensor '" + q_proj + "' has shape [24, 48], config.json needs [48, 24]");
  }
  SECTION("missing") {
    tiny.tensors.erase(q_proj);
    tiny.write(folder.path());
    CHECK(load_error(folder.path()) == "model.safetensors: tensor '" + q_proj + "' is missing");
  }
  SECTION("more layers than weights, without memory for them") {
    tiny.config["num_hidden_layers"] = 4096;
    tiny.write(folder.path());
    CHECK(contains(load_error(folder.path()), "tensor 'model.layers.2.input_layernorm.weight' is missing"));
  }
  SECTION("enormous sizes in config.json take no memory") {
    tiny.config["vocab_size"] = 1 << 20;
    tiny.config["hidden_size"] = 1 << 20;
    tiny.config["intermediate_size"] = 1 << 20;
    tiny.write(folder.path());
    CHECK(contains(load_error(folder.path()), "config.json needs [1048576, 1048576]"));
  }
  SECTION("a bias that the configuration does not know") {
    tiny.tensors["model.layers.0.self_attn.q_proj.bias"] = {.shape = {48}, .values = std::vector<float>(48)};
    tiny.write(folder.path());
    CHECK(contains(load_error(folder.path()), "tensor 'model.layers.0.self_attn.q_proj.bias' has no place in a llama model"));
  }
  SECTION("derived data is not missed") {
    tiny.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = {.shape = {4}, .values = std::vector<float>(4)};
    tiny.write(folder.path());
    CHECK(Model::load(folder.path()).ok());
  }
  SECTION("another element type") {
    tiny.write(folder.path());
    std::string bytes = read_bytes(folder / "model.safetensors");
    const std::size_t type = bytes.find("\"dtype\":\"F32\"", bytes.find(q_proj)) + 9;
    bytes.replace(type, 3, "I32");
    write_bytes(folder / "model.safetensors", bytes);
    CHECK(contains(load_error(folder.path()), "tensor '" + q_proj + "' has dtype I32, supported are F32, F16 and BF16"));
  }
}

TEST_CASE("A checkpoint may lie in several files") {
  const TemporaryFolder folder;
  const TinyModel tiny = tiny_model(tiny_config("qwen3"));
  write_bytes(folder / "config.json", tiny.config.dump());
  Tensors parts[2];
  json index = {{"metadata", {{"total_size", 1}}}, {"weight_map", json::object()}};
  for (const auto& [name, tensor] : tiny.tensors) {
    const std::size_t part = contains(name, "layers.1") ? 1 : 0;
    parts[part].emplace(name, tensor);
    index["weight_map"][name] = part == 1 ? "model-2-of-2.safetensors" : "model-1-of-2.safetensors";
  }
  write_bytes(folder / "model-1-of-2.safetensors", safetensors_bytes(parts[0]));
  write_bytes(folder / "model-2-of-2.safetensors", safetensors_bytes(parts[1]));
  const auto write_index = [&] { write_bytes(folder / "model.safetensors.index.json", index.dump()); };
  write_index();

  SECTION("whole") {
    const Model single = tiny.load();
    const Model several = Model::load(folder.path()).or_throw();
    Session a(single, 4);
    Session b(several, 4);
    REQUIRE(a.prefill(std::vector{1, 2, 3}).ok());
    REQUIRE(b.prefill(std::vector{1, 2, 3}).ok());
    CHECK(std::equal(a.logits().begin(), a.logits().end(), b.logits().begin()));
  }
  SECTION("a file is missing") {
    fs::remove(folder / "model-2-of-2.safetensors");
    CHECK(contains(load_error(folder.path()), "model-2-of-2.safetensors"));
  }
  SECTION("a tensor is missing") {
    parts[1].erase("model.layers.1.self_attn.q_norm.weight");
    write_bytes(folder / "model-2-of-2.safetensors", safetensors_bytes(parts[1]));
    CHECK(contains(load_error(folder.path()),
                   "model.safetensors.index.json: tensor 'model.layers.1.self_attn.q_norm.weight' is missing"));
  }
  SECTION("a tensor is there twice") {
    parts[1]["model.norm.weight"] = parts[0]["model.norm.weight"];
    write_bytes(folder / "model-2-of-2.safetensors", safetensors_bytes(parts[1]));
    CHECK(contains(load_error(folder.path()), "tensor 'model.norm.weight' is in model-1-of-2.safetensors too"));
  }
  SECTION("a name that leads elsewhere") {
    index["weight_map"]["model.norm.weight"] = "../other/model.safetensors";
    write_index();
    CHECK(contains(load_error(folder.path()), "\"../other/model.safetensors\", must be the name of a file beside the index"));
  }
  SECTION("no list") {
    index.erase("weight_map");
    write_index();
    CHECK(contains(load_error(folder.path()), "model.safetensors.index.json: weight_map"));
  }
}

TEST_CASE("config.json: what is wrong or unsupported is named with its value") {
  struct Case {
    const char* changes;
    const char* message;
  };
  const std::array cases{
      Case{R"({"model_type": "gpt2"})", "model_type = \"gpt2\": supported are"},
      Case{R"({"model_type": null})", "model_type is missing"},
      Case{R"({"model_type": 3})", "model_type = 3: must be a text"},
      Case{R"({"hidden_act": "gelu"})", "hidden_act = \"gelu\": supported is silu"},
      Case{R"({"hidden_size": null})", "hidden_size is missing"},
      Case{R"({"hidden_size": 0})", "hidden_size = 0: must be a whole number from 1"},
      Case{R"({"hidden_size": -64})", "hidden_size = -64"},
      Case{R"({"hidden_size": 64.5})", "hidden_size = 64.5"},
      Case{R"({"hidden_size": "64"})", "hidden_size = \"64\""},
      Case{R"({"hidden_size": 18446744073709551615})", "hidden_size = 18446744073709551615"},
      Case{R"({"vocab_size": 9223372036854775807})", "vocab_size = 9223372036854775807"},
      Case{R"({"intermediate_size": 1e30})", "intermediate_size = 1e+30"},
      Case{R"({"num_hidden_layers": 1000000000})", "num_hidden_layers = 1000000000"},
      Case{R"({"num_attention_heads": 0})", "num_attention_heads = 0"},
      Case{R"({"num_key_value_heads": 4})", "num_key_value_heads = 4: must divide num_attention_heads = 6"},
      Case{R"({"num_key_value_heads": 12})", "num_key_value_heads = 12"},
      Case{R"({"head_dim": 7})", "rotary_dim = 7"},
      Case{R"({"head_dim": 1099511627776})", "head_dim = 1099511627776"},
      Case{R"({"head_dim": null, "num_attention_heads": 7, "num_key_value_heads": 7})",
           "num_attention_heads = 7 does not divide"},
      Case{R"({"rms_norm_eps": 0})", "rms_norm_eps = 0"},
      Case{R"({"rms_norm_eps": -1e-5})", "rms_norm_eps = -1e-05"},
      Case{R"({"rms_norm_eps": "small"})", "rms_norm_eps = \"small\""},
      Case{R"({"rope_theta": 0})", "rope_theta = 0"},
      Case{R"({"rope_theta": 1e300})", "rope_theta = 1e+300"},
      Case{R"({"rope_theta": [10000]})", "rope_theta = [10000]"},
      Case{R"({"partial_rotary_factor": 1.5})", "partial_rotary_factor = 1.5"},
      Case{R"({"partial_rotary_factor": 0.1})", "rotary_dim = 0"},
      Case{R"({"rope_interleaved": 1})", "rope_interleaved = 1: must be true or false"},
      Case{R"({"tie_word_embeddings": "yes"})", "tie_word_embeddings = \"yes\""},
      Case{R"({"eos_token_id": 23})", "eos_token_id = 23: must be token ids below vocab_size = 23"},
      Case{R"({"eos_token_id": [1, -2]})", "eos_token_id = [1,-2]"},
      Case{R"({"sliding_window": 4096})", "sliding_window = 4096: sliding-window attention is not supported"},
      Case{R"({"layer_types": ["full_attention", "sliding_attention"]})",
           "layer_types = [\"full_attention\",\"sliding_attention\"]"},
      Case{R"({"num_experts": 8})", "num_experts = 8: mixtures of experts"},
      Case{R"({"num_local_experts": 8})", "num_local_experts = 8: mixtures of experts"},
      Case{R"({"quantization_config": {"bits": 4}})", "quantization_config = {\"bits\":4}"},
      Case{R"({"final_logit_softcapping": 30.0})", "final_logit_softcapping = 30.0"},
      Case{R"({"rope_scaling": {"type": "dynamic", "factor": 2.0}})", "rope_scaling.type = \"dynamic\": supported are"},
      Case{R"({"rope_scaling": {"rope_type": "ntk", "factor": 2.0}})", "rope_scaling.rope_type = \"ntk\": supported are"},
      Case{R"({"rope_scaling": {"rope_type": "longrope", "short_factor": [1, 2]}})",
           "rope_scaling.rope_type = \"longrope\": supported are"},
      Case{R"({"rope_scaling": {"factor": 2.0}})", "rope_scaling.rope_type is missing"},
      Case{R"({"rope_scaling": {"rope_type": "linear"}})", "rope_scaling.factor is missing"},
      Case{R"({"rope_scaling": {"rope_type": "linear", "factor": -2}})", "rope_scaling.factor = -2"},
      Case{R"({"rope_scaling": {"rope_type": "llama3", "factor": 8}})", "rope_scaling.low_freq_factor is missing"},
      Case{R"({"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1,
               "original_max_position_embeddings": 8192}})",
           "scaling.low_freq_factor = 4"},
      Case{R"({"rope_scaling": {"rope_type": "yarn", "factor": 4, "mscale": 0.7}})", "rope_scaling.mscale = 0.7"},
      Case{R"({"rope_scaling": "yarn"})", "rope_scaling = \"yarn\": must be an object"},
      Case{R"({"rope_scaling": {"rope_type": "default"}, "rope_parameters": {"rope_type": "default"}})",
           "rope_scaling is given too"},
  };
  for (const Case& c : cases) {
    const Result<ModelConfig> config = parse_config(with(tiny_config("llama"), json::parse(c.changes)), "config.json");
    INFO(c.changes);
    REQUIRE_FALSE(config.ok());
    INFO(config.status().message());
    CHECK(contains(config.status().message(), c.message));
    CHECK(contains(config.status().message(), "config.json: "));
  }
  const json qwen = with(tiny_config("qwen2"), {{"sliding_window", 4096}, {"use_sliding_window", true}});
  CHECK(contains(parse_config(qwen, "config.json").status().message(), "sliding_window = 4096"));
}

TEST_CASE("config.json: files that are none") {
  const TemporaryFolder folder;
  CHECK(contains(load_error(folder.path()), "no such file"));
  const auto error_of = [&](const std::string& content) {
    write_bytes(folder / "config.json", content);
    return load_error(folder.path());
  };
  CHECK(contains(error_of(""), "config.json: not JSON"));
  CHECK(contains(error_of("\x89PNG\r\n\x1a\n"), "config.json: not JSON (error at byte 1)"));
  CHECK(contains(error_of(R"({"model_type": "llama", )"), "config.json: not JSON"));
  CHECK(contains(error_of("[1, 2, 3]"), "config.json: is [1,2,3], must be an object"));
  CHECK(contains(error_of(R"({"name": "something else", "version": 3})"), "config.json: model_type is missing"));
  CHECK(
      contains(error_of(R"({"model_type": "llama", "model_type": "qwen2"})"), "config.json: key \"model_type\" stands twice"));
  CHECK(contains(error_of(std::string(100000, '[')), "config.json: not JSON"));
}

TEST_CASE("config.json: defaults and scalings") {
  const auto parsed = [](const json& config) { return parse_config(config, "config.json").or_throw(); };
  const ModelConfig plain = parsed({{"model_type", "llama"},
                                    {"vocab_size", 100},
                                    {"hidden_size", 64},
                                    {"intermediate_size", 96},
                                    {"num_hidden_layers", 3},
                                    {"num_attention_heads", 4},
                                    {"rope_scaling", nullptr}});
  CHECK(plain.shape.kv_heads == 4);
  CHECK(plain.shape.head_dim == 16);
  CHECK(plain.rope.theta == 10000);
  CHECK(plain.rope.layout == RopeLayout::half);
  CHECK_FALSE(plain.rope.rotary_dim.has_value());
  CHECK_FALSE((plain.qkv_bias || plain.output_bias || plain.mlp_bias || plain.qk_norm || plain.tied_head));
  CHECK(plain.eos_ids.empty());

  const json window_off = {{"sliding_window", 32768},
                           {"use_sliding_window", false},
                           {"eos_token_id", {2, 7}},
                           {"layer_types", {"full_attention", "full_attention"}}};
  const ModelConfig qwen2 = parsed(with(tiny_config("qwen2"), window_off));
  CHECK((qwen2.qkv_bias && !qwen2.output_bias));
  CHECK(qwen2.eos_ids == std::vector<int>{2, 7});

  const ModelConfig qwen3 = parsed(with(tiny_config("qwen3"), {{"head_dim", nullptr}, {"attention_bias", true}}));
  CHECK((qwen3.qk_norm && qwen3.qkv_bias && qwen3.output_bias));
  CHECK(qwen3.shape.head_dim == 128);

  const json llama3 = {{"rope_type", "llama3"},
                       {"factor", 32.0},
                       {"low_freq_factor", 1.0},
                       {"high_freq_factor", 4.0},
                       {"original_max_position_embeddings", 8192}};
  const auto scaling = std::get<Llama3Scaling>(parsed(with(tiny_config("llama"), {{"rope_scaling", llama3}})).rope.scaling);
  CHECK((scaling.factor == 32 && scaling.low_freq_factor == 1 && scaling.high_freq_factor == 4));
  CHECK(scaling.original_max_position == 8192);

  const json yarn = {{"type", "yarn"}, {"factor", 4}, {"attention_factor", 1.5}, {"beta_fast", 16}};
  const auto stretched = std::get<YarnScaling>(parsed(with(tiny_config("qwen3"), {{"rope_scaling", yarn}})).rope.scaling);
  CHECK((stretched.factor == 4 && stretched.beta_fast == 16 && stretched.beta_slow == 1));
  CHECK(stretched.original_max_position == 64);
  CHECK(stretched.attention_factor == 1.5);

  const json parameters = {{"rope_type", "default"}, {"rope_theta", 5e5}, {"partial_rotary_factor", 0.5}};
  const ModelConfig newer = parsed(with(tiny_config("llama"), {{"rope_parameters", parameters}}));
  CHECK(newer.rope.theta == 5e5);
  CHECK(newer.rope.rotary_dim == 4);
}

TEST_CASE("The vocabulary turns words into ids and back") {
  const Vocabulary vocabulary = Vocabulary::load(reasoner / "vocab.json").or_throw();
  CHECK(vocabulary.size() == 56);
  std::ifstream lines(reasoner / "prompts.jsonl");
  std::string line;
  REQUIRE(std::getline(lines, line));
  const json problem = json::parse(line);
  for (const auto& [text, ids] : {std::pair("prompt", "prompt_ids"), std::pair("expected", "expected_ids")}) {
    const Result<std::vector<int>> encoded_ids = vocabulary.encode(problem[text].get<std::string>());
    REQUIRE(encoded_ids.ok());
    CHECK(*encoded_ids == problem[ids].get<std::vector<int>>());
    CHECK(*vocabulary.decode(*encoded_ids) == problem[text].get<std::string>());
  }
  CHECK(vocabulary.encode("")->empty());
  CHECK(vocabulary.decode({})->empty());
  CHECK(contains(vocabulary.encode("a = horse ;").status().message(), "unknown word \"horse\" at byte 4"));
  CHECK(contains(vocabulary.encode("a  =").status().message(), "no word at byte 2"));
  CHECK(contains(vocabulary.encode(" a").status().message(), "no word at byte 0"));
  CHECK(contains(vocabulary.encode("a ").status().message(), "no word at byte 2"));
  CHECK(contains(vocabulary.decode(std::vector{1, 56}).status().message(), "token 56"));
  CHECK(contains(vocabulary.decode(std::vector{-1}).status().message(), "token -1"));
}

TEST_CASE("A vocabulary of another kind is refused") {
  const TemporaryFolder folder;
  const auto error_of = [&](const std::string& content) {
    write_bytes(folder / "vocab.json", content);
    const Result<Vocabulary> vocabulary = Vocabulary::load(folder / "vocab.json");
    REQUIRE_FALSE(vocabulary.ok());
    return vocabulary.status().message();
  };
  CHECK(contains(error_of(R"({"a": 0, "b": 1})"), "vocab.json: is {\"a\":0,\"b\":1}, must be a list of words"));
  CHECK(contains(error_of(R"(["a", 7])"), "vocab.json: token 1 = 7: must be a word"));
  CHECK(contains(error_of(R"(["a", "b", "a"])"), "vocab.json: token 2 = \"a\": token 0 is the same"));
  CHECK(contains(error_of(R"(["a", " b"])"), "vocab.json: token 1 = \" b\""));
  CHECK(contains(error_of(R"(["a", ""])"), "vocab.json: token 1 = \"\""));
  CHECK(contains(error_of("\x89PNG"), "vocab.json: not JSON"));
}

TEST_CASE("The greedy choice is the lowest id of the largest logit") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  CHECK(*greedy(std::vector{1.0F, 3.0F, 3.0F, 2.0F}) == 1);
  CHECK(*greedy(std::vector{nan, -5.0F, nan, -4.0F}) == 3);
  CHECK(*greedy(std::vector{-infinity, -infinity}) == 0);
  CHECK_FALSE(greedy(std::vector{nan, nan}).ok());
  CHECK_FALSE(greedy({}).ok());
}

TEST_CASE("The sampler repeats itself for a seed and follows the probabilities") {
  const std::vector<float> logits = {std::log(0.2F), std::log(0.5F), std::numeric_limits<float>::quiet_NaN(), std::log(0.3F)};
  const auto draw = [&](const SamplerOptions& options, int count) {
    Sampler sampler = Sampler::make(options).or_throw();
    std::vector<int> tokens(static_cast<std::size_t>(count));
    for (int& token : tokens) token = *sampler.sample(logits);
    return tokens;
  };
  const auto share = [](const std::vector<int>& tokens, int token) {
    return static_cast<double>(std::count(tokens.begin(), tokens.end(), token)) / static_cast<double>(tokens.size());
  };
  CHECK(draw({.seed = 5}, 100) == draw({.seed = 5}, 100));
  CHECK(draw({.seed = 5}, 100) != draw({.seed = 6}, 100));
  CHECK(draw({.temperature = 0}, 20) == std::vector<int>(20, 1));
  CHECK(draw({.temperature = 1e-300}, 20) == std::vector<int>(20, 1));
  CHECK(draw({.top_p = 0.4}, 20) == std::vector<int>(20, 1));

  // 20,000 draws: a share of p is off by 0.0035 in the standard deviation.
  const std::vector<int> all = draw({.seed = 1}, 20000);
  CHECK(std::abs(share(all, 0) - 0.2) < 0.015);
  CHECK(std::abs(share(all, 1) - 0.5) < 0.015);
  CHECK(share(all, 2) == 0);
  const std::vector<int> likely = draw({.top_p = 0.7, .seed = 2}, 20000);
  CHECK(share(likely, 0) == 0);
  CHECK(std::abs(share(likely, 1) - 0.5 / 0.8) < 0.015);
  const std::vector<int> hot = draw({.temperature = 2, .seed = 3}, 20000);
  const double total = std::sqrt(0.2) + std::sqrt(0.5) + std::sqrt(0.3);
  CHECK(std::abs(share(hot, 0) - std::sqrt(0.2) / total) < 0.015);

  Sampler original = Sampler::make({.seed = 9}).or_throw();
  (void)original.sample(logits);
  Sampler copy = original;
  for (int i = 0; i < 20; ++i) CHECK(*original.sample(logits) == *copy.sample(logits));

  for (const double wrong : {-1.0, std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()})
    CHECK(contains(Sampler::make({.temperature = wrong}).status().message(), "temperature = "));
  for (const double wrong : {0.0, 1.5, -0.1, std::numeric_limits<double>::quiet_NaN()})
    CHECK(contains(Sampler::make({.top_p = wrong}).status().message(), "top_p = "));
}
