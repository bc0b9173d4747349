// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

/// \file
/// Top-K with ties to the lowest slot and an ascending result, beside nth_element and sort of indices, over every kind of
/// scores that takes another way through it. Up to 64 inputs in rotation.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "beaconkv/algorithm/top_k.hpp"

namespace {

using namespace beaconkv;

/// Enough different inputs that the branch predictor learns none of them.
[[nodiscard]] std::size_t num_inputs(std::size_t n) { return std::clamp<std::size_t>((std::size_t{1} << 19) / n, 4, 64); }

enum Data : std::int64_t {
  uniform,
  ascending,
  descending,
  plateaus,  // of 7, as pooling makes them
  two_values,
  mostly_zero,
  equal,
  denormals,
  some_nan,
  normal,  // both signs
  last
};
const char* const names[] = {"uniform",     "ascending", "descending", "plateaus", "two_values",
                             "mostly_zero", "equal",     "denormals",  "some_nan", "normal"};

[[nodiscard]] std::vector<float> make_scores(std::size_t n, std::int64_t data) {
  std::mt19937 random(1);
  std::uniform_real_distribution<float> distribution;
  std::normal_distribution<float> bell;
  std::vector<float> scores(num_inputs(n) * n);
  for (std::size_t i = 0; i < scores.size(); ++i) {
    const float u = distribution(random);
    float x = u;
    if (data == plateaus && i % 7 != 0) x = scores[i - 1];
    if (data == two_values) x = u < 0.5F ? 0.0F : 1.0F;
    if (data == mostly_zero) x = u < 0.9F ? 0.0F : u;
    if (data == equal) x = 0.25F;
    if (data == denormals) x = u * std::numeric_limits<float>::min();
    if (data == some_nan && u < 0.05F) x = std::numeric_limits<float>::quiet_NaN();
    if (data == normal) x = bell(random);
    scores[i] = x;
  }
  for (auto first = scores.begin(); first != scores.end(); first += static_cast<std::ptrdiff_t>(n)) {
    if (data == ascending) std::sort(first, first + static_cast<std::ptrdiff_t>(n));
    if (data == descending) std::sort(first, first + static_cast<std::ptrdiff_t>(n), std::greater<>());
  }
  return scores;
}

void nth_element_and_sort(benchmark::State& state) {
  const auto n = static_cast<std::size_t>(state.range(0));
  const auto k = state.range(1);
  state.SetLabel(names[state.range(2)]);
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
    input = (input + 1) % num_inputs(n);
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
}

void top_k_scores(benchmark::State& state) {
  const auto n = static_cast<std::size_t>(state.range(0));
  state.SetLabel(names[state.range(2)]);
  const std::vector<float> scores = make_scores(n, state.range(2));
  std::vector<slot_t> best(n);
  Workspace work(top_k_workspace_size(state.range(0)));
  std::size_t input = 0;
  for (auto _ : state) {
    if (!top_k(std::span(scores).subspan(input * n, n), state.range(1), best, work)) state.SkipWithError("top_k failed");
    benchmark::DoNotOptimize(best.data());
    input = (input + 1) % num_inputs(n);
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
}

void cases(benchmark::internal::Benchmark* b, std::int64_t data) {
  b->ArgNames({"scores", "k", "data"})->Unit(benchmark::kMicrosecond);
  for (const std::int64_t n : {128, 512, 2048, 8192, 32768, 131072})
    for (const std::int64_t k : {n / 8 * 7, n / 8})
      for (std::int64_t d = 0; d < data; ++d) b->Args({n, k, d});
}

// Comparisons with NaN are no order to sort by, and ties make no difference here: numbers that differ are enough.
BENCHMARK(nth_element_and_sort)->Apply([](auto* b) { cases(b, uniform + 1); });
BENCHMARK(top_k_scores)->Apply([](auto* b) { cases(b, last); });

}  // namespace
