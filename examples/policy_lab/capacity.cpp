// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "policy_lab/capacity.hpp"

#include <cmath>
#include <cstdio>
#include <sstream>

#include "beaconkv/policy/beaconkv.hpp"
#include "beaconkv/policy/recent_window.hpp"
#include "beaconkv/policy/rkv.hpp"
#include "beaconkv/policy/rpc.hpp"
#include "beaconkv/policy/snapkv.hpp"

namespace beaconkv::lab {

namespace {

[[nodiscard]] std::vector<std::string> names_of(const std::string& list) {
  std::vector<std::string> names;
  std::istringstream in(list);
  for (std::string name; std::getline(in, name, ',');) names.push_back(name);
  return names;
}

/// What a policy of one layer takes.
struct PolicyBytes {
  double state = 0;
  double workspace = 0;
};

template <class Policy>
[[nodiscard]] Result<PolicyBytes> bytes_of(const Result<Policy>& policy, index_t tokens) {
  if (!policy) return policy.status();
  return PolicyBytes{static_cast<double>(policy->state_bytes()), static_cast<double>(policy->workspace_size(tokens).bytes)};
}

[[nodiscard]] Result<PolicyBytes> bytes_of_policy(const ModelShape& model, const std::string& name, index_t budget,
                                                  index_t tokens) {
  const Shape& shape = model.shape;
  const FixedBudget schedule{.max = budget};
  const RopeTable rope({.head_dim = shape.head_dim});
  if (name == "recent_window") return bytes_of(RecentWindow<>::make(shape, {.budget = schedule}), tokens);
  if (name == "snapkv") return bytes_of(SnapKV<AttentionScorer, FixedBudget>::make(shape, {.budget = schedule}, rope), tokens);
  if (name == "rpc") return bytes_of(RPC<AttentionScorer, FixedBudget>::make(shape, {.budget = schedule}, rope), tokens);
  if (name == "rkv") return bytes_of(RKV<RKVScorer, FixedBudget>::make(shape, {.budget = schedule}, rope), tokens);
  if (name == "beaconkv") return bytes_of(BeaconKV<>::make(shape, {.budget = schedule}, rope), tokens);
  if (name == "beaconkv_credit")
    return bytes_of(BeaconKV<>::make(shape, BeaconKVOptions<>::with_orphan_credit(schedule), rope), tokens);
  return detail::invalid("policies: there is no '", name,
                         "': full, recent_window, snapkv, rpc, rkv, beaconkv or beaconkv_credit");
}

[[nodiscard]] Status validate(const CapacityOptions& o) {
  if (o.length < 1) return detail::invalid("length = ", o.length, ": must be at least 1");
  if (o.prompt < 0 || o.prompt > o.length)
    return detail::invalid("prompt = ", o.prompt, ": must be between 0 and length = ", o.length);
  if (o.batch < 1) return detail::invalid("batch = ", o.batch, ": must be at least 1");
  if (o.budget < 1) return detail::invalid("budget = ", o.budget, ": must be at least 1");
  if (o.bytes_per_number < 1) return detail::invalid("bytes_per_number = ", o.bytes_per_number, ": must be at least 1");
  constexpr index_t most = index_t{1} << 40;  // products of these are exact as floating-point numbers, and fit into integers
  for (const auto& [name, value] : {std::pair{"length", o.length}, {"batch", o.batch}, {"budget", o.budget}})
    if (value > most) return detail::invalid(name, " = ", value, ": must be at most ", most);
  if (o.bytes_per_number > 8) return detail::invalid("bytes_per_number = ", o.bytes_per_number, ": must be at most 8");
  if (!(o.memory > 0 && o.memory <= 1e18))
    return detail::invalid("memory = ", o.memory, ": must be positive, and at most 1e18");
  return {};
}

}  // namespace

const std::vector<ModelShape>& model_shapes() {
  static const std::vector<ModelShape> shapes = {
      {"llama3-8b", {32, 8, 128}, 32, 8.03e9},          {"qwen3-4b", {32, 8, 128}, 36, 4.02e9},
      {"qwen3-8b", {32, 8, 128}, 36, 8.19e9},           {"qwen3-14b", {40, 8, 128}, 40, 14.77e9},
      {"r1-distill-qwen-7b", {28, 4, 128}, 28, 7.62e9}, {"r1-distill-llama-8b", {32, 8, 128}, 32, 8.03e9},
  };
  return shapes;
}

Result<Capacity> capacity_of(const ModelShape& model, const std::string& policy, const CapacityOptions& options) {
  if (Status s = validate(options); !s) return s;
  const bool evicts = policy != "full";
  const index_t tokens = evicts ? std::min(options.length, options.budget + options.prompt) : options.length;
  const auto per_number = static_cast<double>(options.bytes_per_number);
  const auto layers = static_cast<double>(model.layers);
  PolicyBytes bytes;
  if (evicts) {
    const Result<PolicyBytes> made = bytes_of_policy(model, policy, options.budget, tokens);
    if (!made) return made.status();
    bytes = *made;
  }
  const double cache = 2 * layers * static_cast<double>(model.shape.kv_heads * model.shape.head_dim * tokens) * per_number;
  const auto batch = static_cast<double>(options.batch);
  Capacity out{.weights = model.parameters * per_number,
               .cache = batch * cache,
               .state = batch * layers * bytes.state,
               .workspace = bytes.workspace};
  const double room = options.memory - out.weights - out.workspace;
  out.sequences = static_cast<index_t>(std::max(0.0, std::floor(room / (cache + layers * bytes.state))));
  return out;
}

Status capacity(const CapacityOptions& options) {
  if (Status s = validate(options); !s) return s;
  std::vector<ModelShape> models;
  for (const std::string& name : names_of(options.models)) {
    const std::size_t before = models.size();
    for (const ModelShape& model : model_shapes())
      if (name == "all" || name == model.name) models.push_back(model);
    if (models.size() > before) continue;
    std::string known = "all";
    for (const ModelShape& model : model_shapes()) known += ", " + model.name;
    return detail::invalid("models: there is no '", name, "': ", known);
  }
  std::printf("# %lld sequences of %lld tokens (prompt %lld), budget %lld, %lld bytes a number; GB are 10^9 bytes\n",
              static_cast<long long>(options.batch), static_cast<long long>(options.length),
              static_cast<long long>(options.prompt), static_cast<long long>(options.budget),
              static_cast<long long>(options.bytes_per_number));
  std::printf("%-20s %-16s %8s %8s %8s %9s %8s %6s %9s\n", "model", "policy", "weights", "cache", "state", "workspace", "total",
              "less", "sequences");
  for (const ModelShape& model : models) {
    const Result<Capacity> full = capacity_of(model, "full", options);
    if (!full) return full.status();
    for (const std::string& policy : names_of(options.policies)) {
      const Result<Capacity> c = capacity_of(model, policy, options);
      if (!c) return c.status();
      std::printf("%-20s %-16s %8.2f %8.2f %8.2f %9.3f %8.2f %5.2fx %9lld\n", model.name.c_str(), policy.c_str(),
                  c->weights / 1e9, c->cache / 1e9, c->state / 1e9, c->workspace / 1e9, c->total() / 1e9,
                  full->total() / c->total(), static_cast<long long>(c->sequences));
    }
    if (model.name == "qwen3-4b" && options.length == 32768 && options.batch == 14 && options.budget == 2048)
      std::puts(
          "# The paper measures 77.0 GB for the full cache and 13.3 GB for BeaconKV here (5.8x). Activations and what a\n"
          "# framework and its allocator hold are in its figures and not in these.");
  }
  return {};
}

}  // namespace beaconkv::lab
