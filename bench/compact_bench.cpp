// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

/// \file
/// Compaction of one layer (8 KV heads of 128), 7/8 kept at random: `compact` beside a memcpy of the same bytes to other memory
/// and a memmove of everything by one row. Then compaction and RoPE re-alignment, in one pass and in two. Counter `bytes/s` of
/// kept keys and values.

#include <benchmark/benchmark.h>

#include <cstring>
#include <random>
#include <vector>

#include "beaconkv/memory/owning_cache.hpp"
#include "beaconkv/policy/realign.hpp"

namespace {

using namespace beaconkv;

constexpr Shape shape{.query_heads = 32, .kv_heads = 8, .head_dim = 128};

/// A full cache, and plans that keep 7/8 of each head; `plan` makes both anew, as no time that counts.
template <class T>
class Layer {
 public:
  Layer(const benchmark::State& state, PositionMode mode)
      : tokens_(state.range(0)), memory_(shape, tokens_, {.positions = mode}), books_(memory_.view()) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<float> row(static_cast<std::size_t>(shape.kv_heads * shape.head_dim));
    for (index_t t = 0; t < tokens_; ++t) {
      for (float& x : row) x = normal(random);
      memory_.append(row, row, t).or_throw();
    }
    for (index_t h = 0; h < shape.kv_heads; ++h) {
      std::vector<slot_t> kept;
      for (slot_t s = 0; s < tokens_; ++s)
        if (static_cast<index_t>(random() % static_cast<std::uint64_t>(tokens_ - s)) <
            num_kept() - static_cast<index_t>(kept.size()))
          kept.push_back(s);
      kept_.push_back(kept);
    }
    books_ = memory_.view();
  }
  [[nodiscard]] index_t num_kept() const { return tokens_ / 8 * 7; }
  [[nodiscard]] index_t bytes() const { return num_kept() * memory_.view().bytes_per_token(); }
  /// All tokens are there again.
  PlaneCache<T>& refill(KeepPlan& plan) {
    memory_.view() = books_;
    const std::vector<std::span<const slot_t>> sets(kept_.begin(), kept_.end());
    plan.assign(memory_.view(), sets).or_throw();
    return memory_.view();
  }

 private:
  index_t tokens_;
  OwningCache<T> memory_;
  PlaneCache<T> books_;
  std::vector<std::vector<slot_t>> kept_{};
};

template <class T>
void compacted(benchmark::State& state) {
  Layer<T> layer(state, PositionMode::true_positions);
  KeepPlan plan;
  for (auto _ : state) {
    state.PauseTiming();
    PlaneCache<T>& cache = layer.refill(plan);
    state.ResumeTiming();
    if (!compact(cache, plan)) state.SkipWithError("compact failed");
  }
  state.SetBytesProcessed(state.iterations() * layer.bytes());
}

/// `one_pass`: `compact_and_realign`, else `compact` and `realign_to_slots`.
template <class T, bool one_pass>
void compacted_and_realigned(benchmark::State& state) {
  Layer<T> layer(state, PositionMode::cache_relative);
  const RopeTable rope({.head_dim = shape.head_dim, .theta = 1e6});
  Workspace work(realign_workspace_size(shape.head_dim));
  KeepPlan plan;
  for (auto _ : state) {
    state.PauseTiming();
    PlaneCache<T>& cache = layer.refill(plan);
    state.ResumeTiming();
    if constexpr (one_pass) {
      if (!compact_and_realign(cache, plan, rope, work)) state.SkipWithError("compact_and_realign failed");
    } else {
      if (!compact(cache, plan) || !realign_to_slots(cache, rope, work)) state.SkipWithError("realign_to_slots failed");
    }
  }
  state.SetBytesProcessed(state.iterations() * layer.bytes());
}

/// The limits: `elsewhere` copies as many bytes to other memory, else all move by one row, head by head.
template <class T, bool elsewhere>
void limit(benchmark::State& state) {
  const std::size_t row = static_cast<std::size_t>(shape.head_dim) * sizeof(T);
  const std::size_t kept = static_cast<std::size_t>(state.range(0)) / 8 * 7 * row;
  const std::size_t head = static_cast<std::size_t>(state.range(0)) * row;
  const std::size_t heads = 2 * static_cast<std::size_t>(shape.kv_heads);  // keys and values
  std::vector<std::byte> from(heads * head, std::byte{1});
  std::vector<std::byte> to(elsewhere ? heads * head : 0, std::byte{1});
  for (auto _ : state) {
    for (std::size_t h = 0; h < heads; ++h) {
      if constexpr (elsewhere)
        std::memcpy(to.data() + h * head, from.data() + h * head, kept);
      else
        std::memmove(from.data() + h * head, from.data() + h * head + row, kept);
    }
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * static_cast<index_t>(heads * kept));
}

template <class T>
void register_all(const char* type) {
  const auto add = [&](const char* name, void (*f)(benchmark::State&)) {
    benchmark::RegisterBenchmark((std::string(name) + "/" + type).c_str(), f)
        ->ArgName("tokens")
        ->Arg(128)
        ->Arg(2048)
        ->Arg(32768)
        ->Unit(benchmark::kMicrosecond)
        ->UseRealTime();
  };
  add("memcpy_elsewhere", limit<T, true>);
  add("memmove_by_one_row", limit<T, false>);
  add("compact", compacted<T>);
  add("compact_then_realign", compacted_and_realigned<T, false>);
  add("compact_and_realign", compacted_and_realigned<T, true>);
}

const bool registered = [] {
  register_all<float>("f32");
  register_all<bfloat16>("bf16");
  return true;
}();

}  // namespace
