// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

/// \file
/// Top-K with ties to the lowest slot and an ascending result, beside nth_element and sort of indices; on random and on tied
/// scores. 64 inputs in rotation, since one repeated input would be learnt by the branch predictor.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "beaconkv/algorithm/top_k.hpp"

namespace {

using namespace beaconkv;

constexpr std::size_t inputs = 64;
enum Data : std::int64_t { distinct, plateaus, two_values };

[[nodiscard]] std::vector<float> make_scores(std::size_t n, std::int64_t data) {
  std::mt19937 random(1);
  std::uniform_real_distribution<float> uniform;
  std::vector<float> scores(inputs * n);
  for (std::size_t i = 0; i < scores.size(); ++i) {
    if (data == distinct) scores[i] = uniform(random);
    if (data == plateaus) scores[i] = i % 7 == 0 ? uniform(random) : scores[i - 1];
    if (data == two_values) scores[i] = uniform(random) < 0.5F ? 0.0F : 1.0F;
  }
  return scores;
}

void nth_element_and_sort(benchmark::State& state) {
  const auto n = static_cast<std::size_t>(state.range(0));
  const auto k = state.range(1);
  const std::vector<float> scores = make_scores(n, state.range(2));
  std::vector<slot_t> order(n);
  std::size_t input = 0;
  for (auto _ : state) {
    const float* const s = scores.data() + input * n;
    std::iota(order.begin(), order.end(), slot_t{0});
    std::nth_element(order.begin(), order.begin() + k, order.end(),
                     [&](slot_t a, slot_t b) { return s[a] != s[b] ? s[a] > s[b] : a < b; });
    std::sort(order.begin(), order.begin() + k);
    benchmark::DoNotOptimize(order.data());
    input = (input + 1) % inputs;
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
}

void top_k_scores(benchmark::State& state) {
  const auto n = static_cast<std::size_t>(state.range(0));
  const std::vector<float> scores = make_scores(n, state.range(2));
  std::vector<slot_t> best(n);
  Workspace work(top_k_workspace_size(state.range(0)));
  std::size_t input = 0;
  for (auto _ : state) {
    if (!top_k(std::span(scores).subspan(input * n, n), state.range(1), best, work)) state.SkipWithError("top_k failed");
    benchmark::DoNotOptimize(best.data());
    input = (input + 1) % inputs;
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
}

void sizes(benchmark::internal::Benchmark* b) {
  b->ArgNames({"scores", "k", "data"})->Unit(benchmark::kMicrosecond);
  for (const std::int64_t n : {2048, 8192, 32768})
    for (const std::int64_t k : {n / 8 * 7, n / 8})
      for (const std::int64_t data : {distinct, plateaus, two_values}) b->Args({n, k, data});
}

BENCHMARK(nth_element_and_sort)->Apply(sizes);
BENCHMARK(top_k_scores)->Apply(sizes);

}  // namespace
