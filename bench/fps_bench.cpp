// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

/// \file
/// Farthest point sampling: the reduction while decoding (32 rows to 16), and a long prompt, each beside the textbook form.
/// Counter `rows/s`; many inputs in rotation.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "beaconkv/algorithm/farthest_point_sampling.hpp"

namespace {

using namespace beaconkv;

constexpr index_t dim = 128;
constexpr std::size_t inputs = 16;

[[nodiscard]] std::vector<float> random_rows(index_t n) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> rows(inputs * static_cast<std::size_t>(n * dim));
  for (float& x : rows) x = normal(random);
  return rows;
}

/// The definition, word for word: all cosines, again and again.
void sample_naively(const float* rows, index_t n, index_t count, std::vector<slot_t>& picked) {
  const auto cosine = [&](index_t i, index_t j) {
    double ab = 0, aa = 0, bb = 0;
    for (index_t d = 0; d < dim; ++d) {
      const auto a = static_cast<double>(rows[i * dim + d]);
      const auto b = static_cast<double>(rows[j * dim + d]);
      ab += a * b;
      aa += a * a;
      bb += b * b;
    }
    return ab / std::sqrt(aa * bb);
  };
  picked.clear();
  while (static_cast<index_t>(picked.size()) < count) {
    slot_t best = 0;
    double lowest = 2;
    for (slot_t i = 0; i < n; ++i) {
      if (std::find(picked.begin(), picked.end(), i) != picked.end()) continue;
      double near = picked.empty() ? 0 : -2;
      if (picked.empty())
        for (index_t j = 0; j < n; ++j) near += cosine(i, j) / static_cast<double>(n);
      for (const slot_t p : picked) near = std::max(near, cosine(i, p));
      if (near < lowest) {
        lowest = near;
        best = i;
      }
    }
    picked.push_back(best);
  }
}

void naive(benchmark::State& state) {
  const index_t n = state.range(0);
  const std::vector<float> rows = random_rows(n);
  std::vector<slot_t> picked;
  std::size_t input = 0;
  for (auto _ : state) {
    sample_naively(rows.data() + static_cast<index_t>(input) * n * dim, n, state.range(1), picked);
    benchmark::DoNotOptimize(picked.data());
    input = (input + 1) % inputs;
  }
  state.SetItemsProcessed(state.iterations() * n);
}

void fps(benchmark::State& state) {
  const index_t n = state.range(0);
  const std::vector<float> rows = random_rows(n);
  std::vector<slot_t> picked(static_cast<std::size_t>(state.range(1)));
  Workspace work(fps_workspace_size(n, dim));
  std::size_t input = 0;
  for (auto _ : state) {
    const ConstRows view{rows.data() + static_cast<index_t>(input) * n * dim, n, dim, dim};
    if (!farthest_point_sampling(view, state.range(1), picked, work)) state.SkipWithError("sampling failed");
    benchmark::DoNotOptimize(picked.data());
    input = (input + 1) % inputs;
  }
  state.SetItemsProcessed(state.iterations() * n);
}

BENCHMARK(naive)->Args({32, 16})->Args({256, 16})->ArgNames({"rows", "picked"})->Unit(benchmark::kMicrosecond);
BENCHMARK(fps)
    ->Args({32, 16})
    ->Args({256, 16})
    ->Args({1024, 16})
    ->Args({8192, 16})
    ->ArgNames({"rows", "picked"})
    ->Unit(benchmark::kMicrosecond);

}  // namespace
