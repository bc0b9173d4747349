// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

/// \file
/// Attention scores of one KV head of named models, 32 query rows a query head: keys of every storage type, hot and cold,
/// beside the definition as a triple loop and Eigen's matrix product alone. Counter `GF`, a rate: products and sums of queries
/// with keys.

#include <benchmark/benchmark.h>

#include <string>

#include "measure.hpp"
#include "scoring_opponents.hpp"
#include "support.hpp"

namespace beaconkv::bench {
namespace {

constexpr index_t rows = 32;

/// One head's problem.
template <StorageType K>
struct Problem {
  Problem(const Shape& shape, index_t tokens)
      : group(shape.group()),
        dim(shape.head_dim),
        cache(random_cache<K>({group, 1, dim}, tokens, random)),
        queries(random.normals(group * rows * dim)),
        visible(static_cast<std::size_t>(group * rows), static_cast<slot_t>(tokens)),
        scores(static_cast<std::size_t>(tokens)),
        work(attention_workspace_size(group, rows, dim, tokens)) {}

  void run(Reduce over_queries) {
    const auto keys = [&](index_t first, index_t count, float* scratch) { return cache.view().keys(0, first, count, scratch); };
    const Range all{0, static_cast<index_t>(scores.size())};
    attention_scores(keys, {queries.data(), group, rows, dim, visible, {}}, all, all,
                     {.over_queries = over_queries, .over_heads = over_queries}, scores, work)
        .or_throw();
    benchmark::DoNotOptimize(scores.data());
  }
  [[nodiscard]] ScoringInput input() requires std::same_as<K, float> {
    return {queries.data(), cache.view().key_plane().base, group * rows, static_cast<index_t>(scores.size()), dim};
  }
  void count(benchmark::State& state) const {
    const auto flops = flops_of({nullptr, nullptr, group * rows, static_cast<index_t>(scores.size()), dim});
    state.counters["GF"] = benchmark::Counter(1e-9 * flops, benchmark::Counter::kIsIterationInvariantRate);
  }

  Random random;
  index_t group;
  index_t dim;
  OwningCache<K> cache;
  std::vector<float> queries;
  std::vector<slot_t> visible;
  std::vector<float> scores;
  Workspace work;
};

template <StorageType K>
void hot(benchmark::State& state, const Shape& shape, index_t tokens, Reduce over_queries) {
  Problem<K> problem(shape, tokens);
  for (auto _ : state) problem.run(over_queries);
  problem.count(state);
}

template <StorageType K>
void cold(benchmark::State& state, const Shape& shape, index_t tokens, Reduce over_queries) {
  Problem<K> problem(shape, tokens);
  ColdCaches caches;
  for (auto _ : state) {
    caches.flush();
    state.SetIterationTime(seconds_of([&] { problem.run(over_queries); }));
  }
  problem.count(state);
}

void naive(benchmark::State& state, const Shape& shape, index_t tokens) {
  Problem<float> problem(shape, tokens);
  std::vector<float> row;
  for (auto _ : state) {
    score_naively(problem.input(), row, problem.scores);
    benchmark::DoNotOptimize(problem.scores.data());
  }
  problem.count(state);
}

void eigen_gemm_alone(benchmark::State& state, const Shape& shape, index_t tokens) {
  Problem<float> problem(shape, tokens);
  std::vector<float> products(static_cast<std::size_t>(shape.group() * rows * tokens));
  for (auto _ : state) {
    multiply_with_eigen(problem.input(), products.data());
    benchmark::DoNotOptimize(products.data());
  }
  problem.count(state);
}

template <class... Args>
void add(const std::string& name, Args&&... args) {
  benchmark::RegisterBenchmark(name.c_str(), std::forward<Args>(args)...)->Unit(benchmark::kMicrosecond);
}

template <StorageType K>
void add_storage(const std::string& type) {
  for (const index_t tokens : {2048, 32768}) {
    const std::string name = std::string("/") + model_shapes[0].name + "/" + type + "/L:" + std::to_string(tokens);
    if (type != "f32") add("hot" + name, hot<K>, llama3_8b, tokens, Reduce::max);
    add("hot_mean" + name, hot<K>, llama3_8b, tokens, Reduce::mean);
  }
}

[[maybe_unused]] const bool registered = [] {
  for (const ModelShape& model : model_shapes) {
    if (model.name == std::string("Qwen3-4B")) continue;  // the heads of Llama-3 8B
    for (const index_t tokens : {512, 2048, 8192, 32768, 131072}) {
      const std::string name = std::string("/") + model.name + "/f32/L:" + std::to_string(tokens);
      add("hot" + name, hot<float>, model.shape, tokens, Reduce::max);
      benchmark::RegisterBenchmark(("cold" + name).c_str(), cold<float>, model.shape, tokens, Reduce::max)
          ->Unit(benchmark::kMicrosecond)
          ->UseManualTime();
      if (tokens > 32768) continue;
      add("eigen_gemm_alone" + name, eigen_gemm_alone, model.shape, tokens);
      if (tokens <= 8192) add("naive" + name, naive, model.shape, tokens);
    }
  }
  add_storage<float>("f32");
  add_storage<bfloat16>("bf16");
  add_storage<float16>("f16");
  add_storage<q8_0>("q8_0");
  return true;
}();

}  // namespace
}  // namespace beaconkv::bench
