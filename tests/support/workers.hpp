// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Threads for tests: an executor as an engine's pool would be one, and several threads at the same thing at once.

#include <atomic>
#include <latch>
#include <thread>
#include <vector>

#include "beaconkv/executor.hpp"

namespace beaconkv::test {

/// As an engine wraps its pool: as many threads as workers, each taking the next piece. In a shuffled order.
struct Workers {
  index_t workers;
  [[nodiscard]] index_t num_workers() const noexcept { return workers; }
  template <class F>
  void run(index_t count, F&& f) const {
    std::atomic<index_t> next{0};
    std::vector<std::thread> threads;
    for (index_t w = 0; w < workers; ++w)
      threads.emplace_back([&, w] {
        for (index_t i = next++; i < count; i = next++) f(count - 1 - i, w);
      });
    for (std::thread& t : threads) t.join();
  }
};
static_assert(Executor<Workers>);

/// `f(thread)` on `count` threads that start together. `f` keeps what it finds: Catch2 takes assertions from one thread only.
template <class F>
void at_once(index_t count, F&& f) {
  std::latch start(count);
  Workers{count}.run(count, [&](index_t, index_t worker) {
    start.arrive_and_wait();
    f(worker);
  });
}

}  // namespace beaconkv::test
