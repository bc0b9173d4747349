// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

/// \file
/// R-KV's redundancy of one head's keys, more or less alike, beside Eigen's product of all keys with all keys alone.

#include <benchmark/benchmark.h>

#include <Eigen/Core>

#include "beaconkv/algorithm/key_redundancy.hpp"
#include "key_data.hpp"

namespace beaconkv::bench {
namespace {

constexpr index_t dim = 128;

void redundancy(benchmark::State& state) {
  const index_t n = state.range(0);
  const KeyData& data = key_data[state.range(1)];
  const std::vector<float> keys = make_keys(data.kind, n, dim);
  const auto rows = [&](index_t first, index_t count, float*) { return ConstRows{keys.data() + first * dim, count, dim, dim}; };
  std::vector<float> out(static_cast<std::size_t>(n));
  Workspace work(key_redundancy_workspace_size(n, dim));
  for (auto _ : state) {
    if (!key_redundancy(rows, n, dim, {}, out, work)) state.SkipWithError("key_redundancy failed");
    benchmark::DoNotOptimize(out.data());
  }
  state.SetLabel(data.name);
  state.counters["scratch_bytes"] = static_cast<double>(work.capacity());
}

void eigen_gemm_alone(benchmark::State& state) {
  using Rows = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const index_t n = state.range(0);
  const std::vector<float> keys = make_keys(KeyData::independent, n, dim);
  const Rows unit = Eigen::Map<const Rows>(keys.data(), n, dim).rowwise().normalized();
  Eigen::MatrixXf cosines(n, n);
  for (auto _ : state) {
    cosines.noalias() = unit * unit.transpose();
    benchmark::DoNotOptimize(cosines.data());
  }
  state.counters["scratch_bytes"] = static_cast<double>(n * n) * sizeof(float);
}

BENCHMARK(redundancy)
    ->ArgsProduct({{2048, 4096, 8192}, {0, 1, 2, 3}})
    ->ArgNames({"keys", "data"})
    ->Unit(benchmark::kMillisecond);
BENCHMARK(eigen_gemm_alone)->Arg(2048)->Arg(4096)->Arg(8192)->ArgName("keys")->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace beaconkv::bench
