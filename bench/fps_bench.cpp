// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

/// \file
/// Farthest point sampling: the reduction while decoding (32 rows to 16, one in 16 tokens a head), and long prompts, beside the
/// textbook form and beside an evaluation of everything with the same kernels. Several inputs in rotation; one iteration is one
/// sampling, in `decoding` with the 16 pushes that lead to it.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "beaconkv/algorithm/continual_fps.hpp"

namespace {

using namespace beaconkv;

constexpr index_t dim = 128;
enum Data : std::int64_t { distinct, all_equal, two_clusters, one_nan_in_three };

/// Some inputs of `n` rows.
struct Inputs {
  index_t n;
  index_t count;
  index_t next = 0;
  std::vector<float> numbers;

  explicit Inputs(index_t rows, std::int64_t data = distinct)
      : n(rows), count(rows > 1024 ? 2 : 16), numbers(static_cast<std::size_t>(count * rows * dim)) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<float> centre(2 * dim);
    for (float& x : centre) x = normal(random);
    for (index_t i = 0; i < count * n; ++i)
      for (index_t d = 0; d < dim; ++d) {
        float& x = numbers[static_cast<std::size_t>(i * dim + d)];
        x = normal(random);
        if (data == all_equal) x = centre[static_cast<std::size_t>(d)];
        if (data == two_clusters) x = 0.01F * x + centre[static_cast<std::size_t>(i % 2 * dim + d)];
        if (data == one_nan_in_three && i % 3 == 0 && d == i % dim) x = std::numeric_limits<float>::quiet_NaN();
      }
  }
  /// The next one.
  [[nodiscard]] ConstRows take() {
    next = (next + 1) % count;
    return {numbers.data() + next * n * dim, n, dim, dim};
  }
};

/// The definition, word for word: all cosines, again and again.
void sample_naively(const ConstRows& rows, index_t count, std::vector<slot_t>& picked) {
  const auto cosine = [&](index_t i, index_t j) {
    double ab = 0, aa = 0, bb = 0;
    for (index_t d = 0; d < dim; ++d) {
      const auto a = static_cast<double>(rows.row(i)[d]);
      const auto b = static_cast<double>(rows.row(j)[d]);
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
    for (slot_t i = 0; i < rows.rows; ++i) {
      if (std::find(picked.begin(), picked.end(), i) != picked.end()) continue;
      double near = picked.empty() ? 0 : -2;
      if (picked.empty())
        for (index_t j = 0; j < rows.rows; ++j) near += cosine(i, j) / static_cast<double>(rows.rows);
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
  Inputs inputs(state.range(0));
  std::vector<slot_t> picked;
  for (auto _ : state) {
    sample_naively(inputs.take(), state.range(1), picked);
    benchmark::DoNotOptimize(picked.data());
  }
}

/// Brings every row up to date after every pick.
void incremental(benchmark::State& state) {
  using namespace beaconkv::detail;
  const index_t n = state.range(0);
  Inputs inputs(n, state.range(2));
  std::vector<float> scale(static_cast<std::size_t>(n));
  std::vector<float> nearness(static_cast<std::size_t>(round_up(n, nearness_block)), chosen_nearness);
  std::vector<std::int32_t> seen(static_cast<std::size_t>(n));
  std::vector<double> sum(dim);
  std::vector<float> mean(dim);
  std::vector<slot_t> picked(static_cast<std::size_t>(state.range(1)));
  for (auto _ : state) {
    FarthestPoints points{.rows = inputs.take().data,
                          .stride = dim,
                          .dim = dim,
                          .n = n,
                          .scale = scale.data(),
                          .nearness = nearness.data(),
                          .seen = seen.data(),
                          .picked = picked.data()};
    FirstPick first{.sum = sum.data(), .mean = mean.data()};
    detail::run<SumRows<Pairing::product>>(&points, &first);
    detail::run<MeanNearness<Pairing::product>>(&points, &first);
    for (slot_t& pick : picked) {
      index_t next = 0;
      detail::run<Farthest<Pairing::product>>(&points, &next);  // nothing is left to refresh: a search for the least
      pick = static_cast<slot_t>(next);
      if (&pick == &picked.back()) break;
      if (points.picks++ == 0)
        for (std::size_t i = 0; i < scale.size(); ++i)
          nearness[i] = scale[i] == not_finite_row ? not_finite_nearness : nothing_chosen;
      detail::run<ComeNearer<Pairing::product>>(&points);
      nearness[static_cast<std::size_t>(pick)] = chosen_nearness;
    }
    benchmark::DoNotOptimize(picked.data());
  }
}

void sample(benchmark::State& state, FpsMetric metric) {
  Inputs inputs(state.range(0), state.range(2));
  std::vector<slot_t> picked(static_cast<std::size_t>(state.range(1)));
  Workspace work(fps_workspace_size(state.range(0), dim));
  for (auto _ : state) {
    if (!farthest_point_sampling(inputs.take(), state.range(1), picked, work, {metric})) state.SkipWithError("sampling failed");
    benchmark::DoNotOptimize(picked.data());
  }
}
void fps(benchmark::State& state) { sample(state, FpsMetric::cosine); }
void fps_euclidean(benchmark::State& state) { sample(state, FpsMetric::euclidean); }

/// Buffers of several heads that hold 16 rows, and all scratch.
struct Heads {
  std::vector<ContinualFps> buffers;
  Inputs inputs{1024};
  Workspace work;

  explicit Heads(index_t count)
      : buffers(static_cast<std::size_t>(count), ContinualFps::make(dim, 16, 32).or_throw()),
        work(buffers[0].workspace_size()) {
    for (ContinualFps& b : buffers) push(b, 32);
  }
  void push(ContinualFps& buffer, index_t count) {
    for (index_t i = 0; i < count; ++i, row = (row + 1) % inputs.n)
      buffer.push(inputs.numbers.data() + row * dim, row, work).or_throw();
  }
  index_t row = 0;
};

/// 16 tokens and the reduction, of one head after another. Many heads: their buffers come from memory.
void decoding(benchmark::State& state) {
  Heads heads(state.range(0));
  std::size_t head = 0;
  for (auto _ : state) {
    heads.push(heads.buffers[head], 16);
    head = (head + 1) % heads.buffers.size();
  }
}

/// What an eviction asks of each head, 15 tokens after the last reduction.
void would_keep(benchmark::State& state) {
  Heads heads(state.range(0));
  std::vector<slot_t> kept(16);
  for (ContinualFps& b : heads.buffers) heads.push(b, 15);
  std::size_t head = 0;
  for (auto _ : state) {
    benchmark::DoNotOptimize(heads.buffers[head].would_keep(kept, heads.work).or_throw());
    head = (head + 1) % heads.buffers.size();
  }
}

void prompts(benchmark::internal::Benchmark* b) {
  b->ArgNames({"rows", "picked", "data"})->Unit(benchmark::kMicrosecond);
  for (const std::int64_t n : {32, 1024, 8192, 32768}) b->Args({n, 16, distinct});
  for (const std::int64_t data : {all_equal, two_clusters, one_nan_in_three}) b->Args({8192, 16, data});
}

BENCHMARK(naive)->Args({32, 16})->Args({256, 16})->ArgNames({"rows", "picked"})->Unit(benchmark::kMicrosecond);
BENCHMARK(decoding)->Arg(1)->Arg(32)->Arg(1024)->ArgName("heads")->Unit(benchmark::kMicrosecond);
BENCHMARK(would_keep)->Arg(1)->Arg(32)->Arg(1024)->ArgName("heads")->Unit(benchmark::kMicrosecond);
BENCHMARK(fps)->Apply(prompts);
BENCHMARK(incremental)->Apply(prompts);
BENCHMARK(fps_euclidean)->Apply(prompts);

}  // namespace
