// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Asking for memory before it is read. All at once gains nothing: a core can have few lines under way, and whatever follows
/// waits. A few at a time, while something else is computed, cost nothing.

#include <cstddef>

#include "beaconkv/kernel/vector.hpp"

namespace beaconkv::inline v0::detail {

inline constexpr index_t cache_line = 64;

/// `rows` rows of `bytes` bytes, `stride` bytes apart, that will be read soon. None by default.
struct RowsAhead {
  const std::byte* data = nullptr;
  index_t stride = 0;
  index_t bytes = 0;
  index_t rows = 0;

  [[nodiscard]] index_t lines() const noexcept { return rows * ((bytes + cache_line - 1) / cache_line); }
};

/// What a kernel asks for while it computes: first these rows, then those.
struct MemoryAhead {
  RowsAhead first{};
  RowsAhead then{};

  [[nodiscard]] index_t lines() const noexcept { return first.lines() + then.lines(); }
};

/// `MemoryAhead` as it is asked for, in steps that are spread over a computation.
struct Asking {
  MemoryAhead left{};
  index_t asked = 0;  // bytes of the first row
  index_t lines = 0;  // a step

  BEACONKV_KERNEL void start(Asking& a, const MemoryAhead& memory, index_t steps) noexcept {
    a = {memory, 0, (memory.lines() + steps - 1) / steps};
  }
  BEACONKV_KERNEL void step(Asking& a) noexcept {
    asm("" : "+m"(a));  // stays in memory: the loops around it need all registers
    RowsAhead& rows = a.left.first;
    for (index_t i = 0; i < a.lines; ++i) {
      if (rows.rows <= 0) {
        rows = a.left.then;
        a.left.then.rows = 0;
        if (rows.rows <= 0) break;
      }
      __builtin_prefetch(rows.data + a.asked);
      a.asked += cache_line;
      if (a.asked < rows.bytes) continue;
      a.asked = 0;
      rows.data += rows.stride;
      --rows.rows;
    }
  }
};

}  // namespace beaconkv::inline v0::detail
