// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// The least of many numbers, the first among equals.

#include <cfloat>
#include <limits>

#include "beaconkv/kernel/vector.hpp"

namespace beaconkv::inline v0::detail {

/// Makes every lane of `x` the least one.
BEACONKV_KERNEL void spread_least(Float4& x) noexcept {
  const Float4 y = __builtin_shufflevector(x, x, 2, 3, 0, 1);
  x = x < y ? x : y;
  const Float4 z = __builtin_shufflevector(x, x, 1, 0, 3, 2);
  x = x < z ? x : z;
}
BEACONKV_KERNEL void spread_least(Int4& x) noexcept {
  const Int4 y = __builtin_shufflevector(x, x, 2, 3, 0, 1);
  x = x < y ? x : y;
  const Int4 z = __builtin_shufflevector(x, x, 1, 0, 3, 2);
  x = x < z ? x : z;
}
template <class Four, class Eight>
BEACONKV_KERNEL void least_four(Four& out, const Eight& x) noexcept {
  const Four low = __builtin_shufflevector(x, x, 0, 1, 2, 3);
  const Four high = __builtin_shufflevector(x, x, 4, 5, 6, 7);
  out = low < high ? low : high;
  spread_least(out);
}
BEACONKV_KERNEL void least(Float4& out, const Float4& x) noexcept {
  out = x;
  spread_least(out);
}
BEACONKV_KERNEL void least(Int4& out, const Int4& x) noexcept {
  out = x;
  spread_least(out);
}
BEACONKV_KERNEL void least(Float4& out, const Float8& x) noexcept { least_four(out, x); }
BEACONKV_KERNEL void least(Int4& out, const Int8& x) noexcept { least_four(out, x); }
BEACONKV_KERNEL void least(Float4& out, const Float16& x) noexcept {
  const Float8 low = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7);
  const Float8 high = __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
  const Float8 y = low < high ? low : high;
  least_four(out, y);
}
BEACONKV_KERNEL void least(Int4& out, const Int16& x) noexcept {
  const Int8 low = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7);
  const Int8 high = __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
  const Int8 y = low < high ? low : high;
  least_four(out, y);
}

alignas(64) inline constexpr std::int32_t lane_numbers[lanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/// A search for the least of a row of numbers, the first among equals: each lane remembers its own.
template <class Isa>
struct LeastSoFar {
  using Floats = typename Isa::Floats;
  using Ints = typename Isa::Ints;
  static constexpr index_t count = lanes / Isa::width;
  Floats value[std::size_t{count}];
  Ints at[std::size_t{count}];
  Ints now[std::size_t{count}];

  BEACONKV_KERNEL void begin(LeastSoFar& s) noexcept {
    BEACONKV_UNROLL for (index_t p = 0; p < count; ++p) {
      load(s.now[p], lane_numbers + p * Isa::width);
      s.value[p] = FLT_MAX - Floats{};
      s.at[p] = s.now[p];
    }
  }
  BEACONKV_KERNEL void add(LeastSoFar& s, const Floats& x, index_t p) noexcept {
    const Ints less = x < s.value[p];
    select(s.at[p], less, s.now[p], s.at[p]);
    s.value[p] = x < s.value[p] ? x : s.value[p];
    s.now[p] = s.now[p] + static_cast<std::int32_t>(lanes);
  }
  BEACONKV_KERNEL void end(const LeastSoFar& s, float& value, index_t& at) noexcept {
    Floats x = s.value[0];
    BEACONKV_UNROLL for (index_t p = 1; p < count; ++p) x = s.value[p] < x ? s.value[p] : x;
    Float4 smallest;
    least(smallest, x);
    value = smallest[0];
    Ints first = std::numeric_limits<std::int32_t>::max() - Ints{};
    BEACONKV_UNROLL for (index_t p = 0; p < count; ++p) {
      const Ints equal = s.value[p] == value;
      Ints here;
      select(here, equal, s.at[p], first);
      first = here < first ? here : first;
    }
    Int4 lowest;
    least(lowest, first);
    at = lowest[0];
  }
};

}  // namespace beaconkv::inline v0::detail
