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

/// `rows` rows of `dim` floats, `stride` floats apart.
[[nodiscard]] inline RowsAhead rows_ahead(const float* data, index_t stride, index_t dim, index_t rows) noexcept {
  constexpr auto size = static_cast<index_t>(sizeof(float));
  return {reinterpret_cast<const std::byte*>(data), stride * size, dim * size, rows};
}

/// What a kernel asks for while it computes, one after the other. Holds a few; more are not asked for.
class MemoryAhead {
 public:
  void add(const RowsAhead& rows) noexcept {
    if (rows.rows > 0 && size_ < most) all_[size_++] = rows;
  }
  void add(const MemoryAhead& other) noexcept {
    for (index_t i = 0; i < other.size_; ++i) add(other.all_[i]);
  }
  [[nodiscard]] const RowsAhead* begin() const noexcept { return static_cast<const RowsAhead*>(all_); }
  [[nodiscard]] const RowsAhead* end() const noexcept { return begin() + size_; }
  [[nodiscard]] index_t lines() const noexcept {
    index_t sum = 0;
    for (const RowsAhead& rows : *this) sum += rows.lines();
    return sum;
  }

 private:
  static constexpr index_t most = 16;
  RowsAhead all_[most]{};
  index_t size_ = 0;
};

inline constexpr MemoryAhead nothing_ahead{};

/// `MemoryAhead` as it is asked for, in steps that are spread over a computation.
struct Asking {
  RowsAhead rows{};
  const RowsAhead* next = nullptr;
  const RowsAhead* end = nullptr;
  index_t asked = 0;  // bytes of the first of `rows`
  index_t lines = 0;  // a step

  BEACONKV_KERNEL void start(Asking& a, const MemoryAhead& memory, index_t steps) noexcept {
    a = {{}, memory.begin(), memory.end(), 0, (memory.lines() + steps - 1) / steps};
  }
  BEACONKV_KERNEL void step(Asking& a) noexcept {
    asm("" : "+m"(a));  // stays in memory: the loops around it need all registers
    RowsAhead& rows = a.rows;
    for (index_t i = 0; i < a.lines; ++i) {
      if (rows.rows == 0) {
        if (a.next == a.end) break;
        rows = *a.next++;
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
