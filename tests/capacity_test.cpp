// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

// Bytes by arithmetic: against the paper's measurement, and against counting by hand.

#include "policy_lab/capacity.hpp"

#include "support/catch.hpp"
#include "support/check.hpp"

namespace {

using namespace beaconkv;
using namespace beaconkv::lab;
using namespace beaconkv::test;

const ModelShape& model_named(const std::string& name) {
  for (const ModelShape& model : model_shapes())
    if (model.name == name) return model;
  throw std::runtime_error("no model " + name);
}

}  // namespace

TEST_CASE("Qwen3-4B with 14 sequences of 32K takes 5.8 times less under BeaconKV, as the paper measures", "[capacity]") {
  const ModelShape& model = model_named("qwen3-4b");
  const Capacity full = capacity_of(model, "full", {}).or_throw();
  const Capacity beacon = capacity_of(model, "beaconkv", {}).or_throw();
  // 36 layers of 8 KV heads, keys and values of 128 numbers of two bytes.
  CHECK(full.cache == 14.0 * 32768 * 36 * 8 * 128 * 2 * 2);
  CHECK(beacon.cache == 14.0 * 2048 * 36 * 8 * 128 * 2 * 2);
  CHECK(full.state == 0);
  // 48 queries of 32 heads at least, as floats.
  CHECK(beacon.state > 14.0 * 36 * 32 * 48 * 128 * 4);
  CHECK(beacon.state < 1.1 * 14.0 * 36 * 32 * 48 * 128 * 4);
  CHECK(std::abs(full.total() / 77.0e9 - 1) < 0.1);
  CHECK(std::abs(beacon.total() / 13.3e9 - 1) < 0.1);
  CHECK(std::abs(full.total() / beacon.total() / 5.8 - 1) < 0.1);
}

TEST_CASE("as many sequences fit as the memory has room for", "[capacity]") {
  for (const ModelShape& model : model_shapes())
    for (const char* policy : {"full", "recent_window", "snapkv", "rpc", "rkv", "beaconkv", "beaconkv_credit"}) {
      CapacityOptions options{.length = 9000, .prompt = 700, .budget = 1000, .memory = 70e9};
      CAPTURE(model.name, policy);
      const Capacity c = capacity_of(model, policy, options).or_throw();
      options.batch = c.sequences;
      REQUIRE(capacity_of(model, policy, options).or_throw().total() <= options.memory);
      ++options.batch;
      REQUIRE(capacity_of(model, policy, options).or_throw().total() > options.memory);
      options.memory = 1e9;  // less than the weights
      REQUIRE(capacity_of(model, policy, options).or_throw().sequences == 0);
    }
  // The prompt lies on top of the budget, and no sequence is longer than it is.
  const ModelShape& model = model_named("llama3-8b");
  const double token = capacity_of(model, "full", {.length = 1, .batch = 1}).or_throw().cache;
  CHECK(capacity_of(model, "snapkv", {.length = 5000, .prompt = 300, .batch = 1, .budget = 1000}).or_throw().cache ==
        1300 * token);
  CHECK(capacity_of(model, "snapkv", {.length = 900, .batch = 1, .budget = 1000}).or_throw().cache == 900 * token);
}

TEST_CASE("capacity refuses what cannot be, by name and value", "[capacity]") {
  const ModelShape& model = model_named("llama3-8b");
  check_invalid(capacity_of(model, "nobody", {}).status(), {"'nobody'", "beaconkv"});
  check_invalid(capacity_of(model, "full", {.length = 0}).status(), {"length = 0"});
  check_invalid(capacity_of(model, "full", {.length = 5, .prompt = 6}).status(), {"prompt = 6", "length = 5"});
  check_invalid(capacity_of(model, "full", {.batch = 0}).status(), {"batch = 0"});
  check_invalid(capacity_of(model, "beaconkv", {.budget = 0}).status(), {"budget = 0"});
  check_invalid(capacity_of(model, "full", {.bytes_per_number = 0}).status(), {"bytes_per_number = 0"});
  check_invalid(capacity_of(model, "full", {.memory = -1}).status(), {"memory"});
  check_invalid(capacity_of(model, "full", {.memory = 1e300}).status(), {"memory"});
  check_invalid(capacity_of(model, "full", {.length = index_t{1} << 41}).status(), {"length"});
  check_invalid(capacity_of(model, "full", {.batch = index_t{1} << 41}).status(), {"batch"});
  check_invalid(capacity({.models = "llama3-8b,gpt"}), {"'gpt'", "qwen3-4b"});
}
