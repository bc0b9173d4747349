// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// What benches share: fast random numbers, the shapes of named models, caches full of them, cold memory, two threads.

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <fstream>
#include <mutex>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "beaconkv/memory/owning_cache.hpp"

namespace beaconkv::bench {

/// Random numbers at about a nanosecond each, since benches need hundreds of millions (xorshift64*).
class Random {
 public:
  explicit Random(std::uint64_t seed = 1) : state_(seed * 0x9E3779B97F4A7C15ULL + 1) {}

  [[nodiscard]] std::uint64_t next() noexcept {
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return state_ * 0x2545F4914F6CDD1DULL;
  }
  [[nodiscard]] float uniform() noexcept { return static_cast<float>(next() >> 40) * 0x1p-24F; }
  [[nodiscard]] index_t below(index_t n) noexcept { return static_cast<index_t>(next() % static_cast<std::uint64_t>(n)); }
  /// Close to normal with variance 1: four of 16 bits each, summed.
  [[nodiscard]] float normal() noexcept {
    const std::uint64_t x = next();
    const auto sum = static_cast<float>((x & 0xFFFF) + (x >> 16 & 0xFFFF) + (x >> 32 & 0xFFFF) + (x >> 48));
    return (sum - 131070.0F) * (1.7320508F / 65536.0F);
  }
  /// Close to normal.
  [[nodiscard]] std::vector<float> normals(index_t count) {
    std::vector<float> numbers(static_cast<std::size_t>(count));
    for (float& x : numbers) x = normal();
    return numbers;
  }

 private:
  std::uint64_t state_;
};

/// A published model's attention.
struct ModelShape {
  const char* name;
  Shape shape;
  index_t layers;
};
inline constexpr ModelShape model_shapes[] = {
    {"Llama-3-8B", {32, 8, 128}, 32},
    {"Qwen3-4B", {32, 8, 128}, 36},
    {"Qwen3-14B", {40, 8, 128}, 40},
    {"DeepSeek-R1-Distill-Qwen-7B", {28, 4, 128}, 28},
};
inline constexpr Shape llama3_8b = model_shapes[0].shape;

/// A cache of one layer that holds `tokens` random tokens.
template <StorageType K>
[[nodiscard]] OwningCache<K> random_cache(const Shape& shape, index_t tokens, Random& random,
                                          const CacheOptions& options = {}) {
  OwningCache<K> cache(shape, tokens, options);
  auto& view = cache.view();
  view.append_run(0, tokens).or_throw();
  std::vector<float> row(static_cast<std::size_t>(shape.head_dim));
  for (index_t h = 0; h < shape.kv_heads; ++h)
    for (index_t slot = 0; slot < tokens; ++slot) {
      for (float& x : row) x = random.normal();
      view.store_key(h, slot, row.data());
      for (float& x : row) x = random.normal();
      view.store_value(h, slot, row.data());
    }
  return cache;
}

/// Memory larger than the processor's caches: reading it leaves nothing else in them, as the other layers of a model do between
/// two visits to a layer.
class ColdCaches {
 public:
  ColdCaches() : memory_(3 * largest_cache() / sizeof(std::uint64_t), 1) {}

  void flush() noexcept {
    std::uint64_t sum = 0;
    for (std::size_t i = 0; i < memory_.size(); i += 8) sum += memory_[i];
    memory_[0] = sum | 1;
  }

 private:
  /// The last level as Linux reports it, or a guess; a machine shared by many may report more than one of them can use.
  [[nodiscard]] static std::size_t largest_cache() {
    std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index3/size");
    std::size_t kib = 0;
    if (!(file >> kib)) kib = 32 * 1024;
    return std::clamp<std::size_t>(kib * 1024, 8 << 20, 64 << 20);
  }

  std::vector<std::uint64_t> memory_;
};

/// The calling thread and one more, which waits between calls: an executor as an engine would wrap its pool.
class TwoThreads {
 public:
  TwoThreads() : other_([this] { serve(); }) {}
  ~TwoThreads() {
    start(nullptr, nullptr, 0);
    other_.join();
  }
  TwoThreads(const TwoThreads&) = delete;
  TwoThreads& operator=(const TwoThreads&) = delete;

  [[nodiscard]] index_t num_workers() const noexcept { return 2; }
  template <class F>
  void run(index_t count, F&& f) {
    if (count == 0) return;
    start([](void* call, index_t i, index_t worker) { (*static_cast<std::remove_reference_t<F>*>(call))(i, worker); }, &f,
          count);
    work(0);
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return idle_; });
  }

 private:
  using Call = void (*)(void*, index_t, index_t);

  void start(Call call, void* context, index_t count) {
    {
      const std::lock_guard lock(mutex_);
      call_ = call;
      context_ = context;
      count_ = count;
      next_ = 0;
      idle_ = false;
    }
    changed_.notify_all();
  }
  void work(index_t worker) {
    for (;;) {
      index_t i = 0;
      {
        const std::lock_guard lock(mutex_);
        if (next_ >= count_) return;
        i = next_++;
      }
      call_(context_, i, worker);
    }
  }
  void serve() {
    for (;;) {
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return !idle_; });
        if (call_ == nullptr) return;
      }
      work(1);
      {
        const std::lock_guard lock(mutex_);
        idle_ = true;
      }
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  Call call_ = nullptr;
  void* context_ = nullptr;
  index_t count_ = 0;
  index_t next_ = 0;
  bool idle_ = true;
  std::thread other_;  // last: it uses the others
};

}  // namespace beaconkv::bench
