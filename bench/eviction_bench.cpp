// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

/// \file
/// Whole evictions: of one layer, every policy on named models and at small budgets, beside the attention of a decode step; of
/// several layers with one and two threads; and the longest step of a decode loop, with and without staggering.
///
/// Every policy evicts 1/8 of a full cache. Counters: `steps` attention steps that an eviction takes, `percent` of all
/// attention between two evictions, everything cold; `worst/median` of a decode loop's steps.

#include <benchmark/benchmark.h>

#include <string>

#include "beaconkv/policy/recent_window.hpp"
#include "beaconkv/policy/rkv.hpp"
#include "beaconkv/policy/rpc.hpp"
#include "beaconkv/policy/snapkv.hpp"
#include "decode_replay.hpp"

namespace beaconkv::bench {
namespace {

[[nodiscard]] FixedBudget budget_of(index_t tokens) { return {.max = tokens, .min = tokens - tokens / 8}; }

struct MakeRecentWindow {
  [[nodiscard]] auto operator()(const Shape& shape, index_t tokens) const {
    return RecentWindow<>::make(shape, {.budget = budget_of(tokens), .n_prefix = 4}).or_throw();
  }
};
struct MakeSnapKV {
  [[nodiscard]] auto operator()(const Shape& shape, index_t tokens) const {
    return SnapKV<AttentionScorer, FixedBudget>::make(shape, {.budget = budget_of(tokens)}, llama3_rope(shape.head_dim))
        .or_throw();
  }
};
struct MakeRPC {
  [[nodiscard]] auto operator()(const Shape& shape, index_t tokens) const {
    return RPC<AttentionScorer, FixedBudget>::make(shape, {.budget = budget_of(tokens), .n_prefix = 0},
                                                   llama3_rope(shape.head_dim))
        .or_throw();
  }
};
struct MakeRKV {
  [[nodiscard]] auto operator()(const Shape& shape, index_t tokens) const {
    return RKV<RKVScorer, FixedBudget>::make(shape, {.budget = budget_of(tokens)}, llama3_rope(shape.head_dim)).or_throw();
  }
};
struct MakeBeaconKV {
  [[nodiscard]] auto operator()(const Shape& shape, index_t tokens) const {
    return BeaconKV<>::make(shape, {.budget = budget_of(tokens), .n_prefix = 0}, llama3_rope(shape.head_dim)).or_throw();
  }
};

template <class Make>
void one_layer(benchmark::State& state, const Shape& shape, index_t tokens) {
  Random random;
  DecodingLayer layer(shape, Make{}(shape, tokens), tokens, random);
  Workspace work(layer.policy.workspace_size(tokens));
  AttentionStep attention(shape);
  std::vector<float> out(static_cast<std::size_t>(shape.query_heads * shape.head_dim));
  ColdCaches caches;
  const PlaneCache<float>& cache = layer.memory.view();
  double eviction = 1e300;
  double step = 1e300;
  for (auto _ : state) {
    caches.flush();
    step = std::min(step, seconds_of([&] {
                      attention.run(layer.queries.at(0).data(), cache.key_plane().base, cache.value_plane().base, tokens,
                                    tokens, out.data());
                      benchmark::DoNotOptimize(out.data());
                    }));
    caches.flush();
    const double seconds = seconds_of([&] { evict(layer.policy, layer.memory.view(), work).or_throw(); });
    state.SetIterationTime(seconds);
    eviction = std::min(eviction, seconds);
    layer.refill();
  }
  state.counters["steps"] = eviction / step;
  state.counters["percent"] = 100 * eviction / step / static_cast<double>(tokens / 8);
}

/// All layers of a sequence evict at once.
template <class ExecutorT>
void layers(benchmark::State& state, index_t tokens) {
  constexpr index_t count = 4;
  Random random;
  std::vector<DecodingLayer<BeaconKV<>>> made;
  std::vector<BeaconKV<>> policies;
  std::vector<PlaneCache<float>> views;
  for (index_t l = 0; l < count; ++l) {
    made.emplace_back(llama3_8b, MakeBeaconKV{}(llama3_8b, tokens), tokens, random);
    policies.push_back(made.back().policy);
    views.push_back(made.back().memory.view());
  }
  ExecutorT executor;
  auto sequence =
      Sequence<BeaconKV<>, PlaneCache<float>>::make(policies, views, {.capacity = tokens, .workers = executor.num_workers()})
          .or_throw();
  for (auto _ : state) {
    const double start = now();  // not the thread's own time: there may be two
    if (sequence.evict_where_due(executor).or_throw().layers != count) state.SkipWithError("not all layers evicted");
    state.SetIterationTime(now() - start);
    for (index_t l = 0; l < count; ++l) {
      sequence.policy(l) = policies[static_cast<std::size_t>(l)];
      sequence.cache(l) = views[static_cast<std::size_t>(l)];
    }
  }
}

void decode_loop(benchmark::State& state) {
  DecodeReplay replay({.layers = state.range(1), .budget = state.range(0), .layers_per_step = state.range(2)});
  for (auto _ : state) {
    if (replay.run() < state.range(1)) state.SkipWithError("not all layers evicted");
  }
  state.counters["worst/median"] = replay.worst_step() / replay.median_step();
  state.counters["median_ms"] = 1e3 * replay.median_step();
}

template <class... Args>
void add(const std::string& name, Args&&... args) {
  benchmark::RegisterBenchmark(name.c_str(), std::forward<Args>(args)...)->Unit(benchmark::kMicrosecond)->UseManualTime();
}

template <class Make>
void add_policy(const std::string& policy) {
  for (const ModelShape& model : model_shapes) {
    if (model.name == std::string("Qwen3-4B")) continue;  // the heads of Llama-3 8B
    for (const index_t tokens : {128, 256, 512, 2048, 8192}) {
      const bool first = &model == &model_shapes[0];
      if (!first && tokens != 128 && tokens != 2048) continue;
      add(policy + "/" + model.name + "/B:" + std::to_string(tokens), one_layer<Make>, model.shape, tokens);
    }
  }
}

[[maybe_unused]] const bool registered = [] {
  add_policy<MakeRecentWindow>("RecentWindow");
  add_policy<MakeSnapKV>("SnapKV");
  add_policy<MakeRPC>("RPC");
  add_policy<MakeRKV>("RKV");
  add_policy<MakeBeaconKV>("BeaconKV");
  for (const index_t tokens : {128, 512, 2048}) {
    add("four_layers/threads:1/B:" + std::to_string(tokens), layers<SerialExecutor>, tokens);
    add("four_layers/threads:2/B:" + std::to_string(tokens), layers<TwoThreads>, tokens);
  }
  return true;
}();
BENCHMARK(decode_loop)
    ->ArgsProduct({{128, 512, 2048}, {8}, {0, 1}})
    ->ArgNames({"B", "layers", "layers_per_step"})
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace beaconkv::bench
