// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// How layers, or the KV heads of one, are spread over threads: an engine's own pool, OpenMP, or none.

#include <concepts>

#include "beaconkv/types.hpp"

namespace beaconkv::inline v0 {

/// `run(count, f)` calls `f(i, worker)` once for each `i` in `[0, count)`, in any order and on any thread, and returns when all
/// are done; two calls at the same time have different `worker` numbers below `num_workers()`. The library creates no threads:
/// an engine wraps its own pool in such a struct. Layers and heads are independent, so the bits do not depend on the executor.
template <class E>
concept Executor = requires(E& executor, index_t count, void (*f)(index_t, index_t)) {
  { executor.num_workers() } -> std::same_as<index_t>;
  executor.run(count, f);
};

/// One after the other, in the calling thread.
struct SerialExecutor {
  [[nodiscard]] index_t num_workers() const noexcept { return 1; }
  template <class F>
  void run(index_t count, F&& f) const {
    for (index_t i = 0; i < count; ++i) f(i, index_t{0});
  }
};
static_assert(Executor<SerialExecutor>);

}  // namespace beaconkv::inline v0
