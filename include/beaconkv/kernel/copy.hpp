// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Moving bytes towards the front. `memmove` loses here: compaction moves a few KiB by a few hundred bytes, where it takes
/// string instructions that are slow for overlapping memory.

#include <cstddef>
#include <cstring>

#include "beaconkv/kernel/vector.hpp"

namespace beaconkv::inline v0::detail {

/// `rows` times `bytes` bytes, `stride` bytes apart in both, from front to back; `out` is not behind `in`.
struct CopyForward {
  template <class Isa>
  BEACONKV_KERNEL void run(std::byte* out, const std::byte* in, index_t bytes, index_t rows, index_t stride) noexcept {
    using Floats = typename Isa::Floats;
    constexpr auto width = static_cast<index_t>(sizeof(Floats));
    for (index_t r = 0; r < rows; ++r, out += stride, in += stride) {
      index_t i = 0;
      for (; i + 4 * width <= bytes; i += 4 * width) {  // all is read before it can be overwritten
        Floats a, b, c, d;
        load(a, in + i);
        load(b, in + i + width);
        load(c, in + i + 2 * width);
        load(d, in + i + 3 * width);
        store(out + i, a);
        store(out + i + width, b);
        store(out + i + 2 * width, c);
        store(out + i + 3 * width, d);
      }
      for (; i + width <= bytes; i += width) {
        Floats a;
        load(a, in + i);
        store(out + i, a);
      }
      if (i < bytes) std::memmove(out + i, in + i, static_cast<std::size_t>(bytes - i));
    }
  }
};

}  // namespace beaconkv::inline v0::detail
