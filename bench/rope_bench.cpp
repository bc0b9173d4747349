// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

/// \file
/// RoPE re-alignment of the keys of one layer (8 KV heads of 128) in place: `scaling` reads and writes every number once, which
/// is what any move costs at least. `common` turns all keys alike, `each` by deltas that change where one token in eight went,
/// `naive` forms sines and cosines for each key. Then what reading unrotated keys costs. Counter `bytes/s` of keys.

#include <benchmark/benchmark.h>

#include <cmath>
#include <random>
#include <vector>

#include "beaconkv/memory/owning_cache.hpp"
#include "beaconkv/policy/realign.hpp"
#include "beaconkv/policy/rotary_view.hpp"

namespace {

using namespace beaconkv;

constexpr Shape shape{.query_heads = 32, .kv_heads = 8, .head_dim = 128};

/// Keys in aligned memory, as engines allocate it.
struct Keys {
  explicit Keys(const benchmark::State& state)
      : tokens(state.range(0)),
        memory(WorkspaceSize{static_cast<std::size_t>(shape.kv_heads * tokens * shape.head_dim) * sizeof(float), 0, 0}),
        rows(memory.take<float>(shape.kv_heads * tokens * shape.head_dim)) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (float& x : rows) x = normal(random);
  }
  void count(benchmark::State& state) const {
    state.SetBytesProcessed(state.iterations() * static_cast<index_t>(rows.size_bytes()));
  }
  [[nodiscard]] float* row(index_t i) const { return rows.data() + i * shape.head_dim; }

  index_t tokens;
  Workspace memory;
  std::span<float> rows;
};

/// Reads and writes each number, with the best instructions there are.
struct Scale {
  template <class Isa>
  BEACONKV_KERNEL void run(float* x, index_t n, float factor) noexcept {
    for (index_t i = 0; i < n; i += 64) BEACONKV_UNROLL for (index_t v = 0; v < 64; v += Isa::width) {
        typename Isa::Floats a;
        detail::load(a, x + i + v);
        a *= factor;
        detail::store(x + i + v, a);
      }
  }
};

/// By how much the token in each slot moves after 7/8 of all were kept at random.
[[nodiscard]] std::vector<position_t> deltas_of(index_t tokens) {
  std::mt19937 random(2);
  std::vector<position_t> deltas;
  for (position_t position = 0; static_cast<index_t>(deltas.size()) < tokens; ++position)
    if (random() % 8 != 0) deltas.push_back(static_cast<position_t>(deltas.size()) - position);
  return deltas;
}

[[nodiscard]] RopeTable table_of(const benchmark::State& state) {
  return RopeTable(
      {.head_dim = shape.head_dim, .theta = 1e6, .layout = state.range(1) == 0 ? RopeLayout::half : RopeLayout::interleaved});
}

void scaling(benchmark::State& state) {
  Keys keys(state);
  float factor = 1.0000001F;
  for (auto _ : state) {
    benchmark::DoNotOptimize(factor);
    detail::run<Scale>(keys.rows.data(), static_cast<index_t>(keys.rows.size()), factor);
    benchmark::ClobberMemory();
  }
  keys.count(state);
}

void common(benchmark::State& state) {
  Keys keys(state);
  const RopeTable rope = table_of(state);
  std::vector<float> scratch(static_cast<std::size_t>(shape.head_dim));
  for (auto _ : state) {
    rope.apply(rope.rotation(-5000, scratch), keys.rows.data(), shape.kv_heads * keys.tokens, shape.head_dim);
    benchmark::ClobberMemory();
  }
  keys.count(state);
}

void each(benchmark::State& state) {
  Keys keys(state);
  const RopeTable rope = table_of(state);
  const std::vector<position_t> deltas = deltas_of(keys.tokens);
  Workspace work(rope_cursor_workspace_size(shape.head_dim));
  for (auto _ : state) {
    const Workspace::Frame frame(work);
    RopeCursor cursor(rope, work);
    for (index_t h = 0; h < shape.kv_heads; ++h)
      for (index_t first = 0; first < keys.tokens;) {
        const auto delta = [&](index_t i) { return deltas[static_cast<std::size_t>(i)]; };
        index_t last = first + 1;
        while (last < keys.tokens && delta(last) == delta(first)) ++last;
        rope.apply(cursor.at(delta(first)), keys.row(h * keys.tokens + first), last - first, shape.head_dim);
        first = last;
      }
    benchmark::ClobberMemory();
  }
  keys.count(state);
}

/// The same through a cache and its books.
void realign_cache(benchmark::State& state) {
  Keys keys(state);
  const RopeTable rope = table_of(state);
  const std::vector<position_t> deltas = deltas_of(keys.tokens);
  const std::vector<position_t> from(deltas.size(), 1 << 20);
  std::vector<position_t> to = from;
  for (std::size_t i = 0; i < to.size(); ++i) to[i] += deltas[i];
  auto cache = PlaneCache<float>::head_major(keys.rows.data(), keys.rows.data(), shape, keys.tokens);
  Workspace work(realign_workspace_size(shape.head_dim));
  cache.append_run(0, keys.tokens).or_throw();
  for (auto _ : state)
    for (index_t h = 0; h < shape.kv_heads; ++h)
      if (!realign_keys(cache, h, from, to, rope, work)) state.SkipWithError("realign_keys failed");
  keys.count(state);
}

void naive(benchmark::State& state) {
  Keys keys(state);
  const RopeTable rope = table_of(state);
  const std::vector<position_t> deltas = deltas_of(keys.tokens);
  const index_t pairs = rope.pairs();
  for (auto _ : state) {
    for (index_t i = 0; i < shape.kv_heads * keys.tokens; ++i) {
      const auto delta = static_cast<double>(deltas[static_cast<std::size_t>(i % keys.tokens)]);
      float* const row = keys.row(i);
      for (index_t p = 0; p < pairs; ++p) {
        const double angle = delta * rope.inv_freq()[static_cast<std::size_t>(p)];
        const auto c = static_cast<float>(std::cos(angle));
        const auto s = static_cast<float>(std::sin(angle));
        const float a = row[p];
        row[p] = a * c - row[pairs + p] * s;
        row[pairs + p] = row[pairs + p] * c + a * s;
      }
    }
    benchmark::ClobberMemory();
  }
  keys.count(state);
}

/// Tiles of keys, as scoring reads them: as they are stored, or rotated to their slots.
void read_tiles(benchmark::State& state) {
  const bool rotated = state.range(1) != 0;
  OwningCache<bfloat16> cache(shape, state.range(0), {.positions = PositionMode::unrotated_keys});
  cache.view().append_run(0, state.range(0)).or_throw();
  const RopeTable rope({.head_dim = shape.head_dim, .theta = 1e6});
  const RotatedKeys view(cache.view(), rope);
  constexpr index_t tile = 64;
  std::vector<float> scratch(static_cast<std::size_t>(tile * shape.head_dim));
  for (auto _ : state)
    for (index_t h = 0; h < shape.kv_heads; ++h)
      for (index_t first = 0; first + tile <= state.range(0); first += tile) {
        const ConstRows rows =
            rotated ? view.keys(h, first, tile, scratch.data()) : cache.view().keys(h, first, tile, scratch.data());
        benchmark::DoNotOptimize(rows.data[0]);
      }
  state.SetItemsProcessed(state.iterations() * shape.kv_heads * state.range(0));
}

void make_table(benchmark::State& state) {
  for (auto _ : state) {
    const RopeTable rope({.head_dim = shape.head_dim, .theta = 1e6});
    benchmark::DoNotOptimize(rope.inv_freq().data());
  }
}

BENCHMARK(scaling)->ArgNames({"tokens"})->Arg(128)->Arg(2048)->Arg(32768)->Unit(benchmark::kMicrosecond);
BENCHMARK(common)
    ->ArgNames({"tokens", "interleaved"})
    ->ArgsProduct({{128, 2048, 32768}, {0, 1}})
    ->Unit(benchmark::kMicrosecond);
BENCHMARK(each)->ArgNames({"tokens", "interleaved"})->ArgsProduct({{128, 2048, 32768}, {0, 1}})->Unit(benchmark::kMicrosecond);
BENCHMARK(realign_cache)
    ->ArgNames({"tokens", "interleaved"})
    ->ArgsProduct({{128, 2048, 32768}, {0, 1}})
    ->Unit(benchmark::kMicrosecond);
BENCHMARK(naive)->ArgNames({"tokens", "interleaved"})->Args({2048, 0})->Unit(benchmark::kMicrosecond);
BENCHMARK(read_tiles)->ArgNames({"tokens", "rotated"})->ArgsProduct({{2048, 32768}, {0, 1}})->Unit(benchmark::kMicrosecond);
BENCHMARK(make_table)->Unit(benchmark::kMicrosecond);

}  // namespace
