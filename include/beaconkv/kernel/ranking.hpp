// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Scores as integers of the same order, and the places of the integers within two limits.

#include <algorithm>
#include <array>
#include <bit>
#include <limits>

#include "beaconkv/kernel/vector.hpp"

namespace beaconkv::inline v0::detail {

/// The rank of NaN: below every number.
inline constexpr std::int32_t nan_rank = std::numeric_limits<std::int32_t>::min();

/// An integer in the order of the scores: NaN is lowest, -0 equals +0. On bit patterns, so that `-ffast-math` has no say.
[[nodiscard]] constexpr std::int32_t score_rank(float score) noexcept {
  const auto bits = std::bit_cast<std::int32_t>(score);
  const std::int32_t magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) return nan_rank;
  return bits < 0 ? -magnitude : magnitude;
}

/// What `RankScores` saw.
struct RankSummary {
  std::int32_t min = std::numeric_limits<std::int32_t>::max();
  std::int32_t max = std::numeric_limits<std::int32_t>::min();
  index_t num_nan = 0;
};

/// `ranks[i] = score_rank(scores[i])`.
struct RankScores {
  template <class Isa>
  BEACONKV_KERNEL void run(const float* scores, index_t n, std::int32_t* ranks, RankSummary* summary) noexcept {
    using Ints = typename Isa::Ints;
    Ints least[2], most[2], nans[2];
    BEACONKV_UNROLL for (int u = 0; u < 2; ++u) {
      least[u] = std::numeric_limits<std::int32_t>::max() - Ints{};
      most[u] = nan_rank - Ints{};
      nans[u] = Ints{};
    }
    index_t i = 0;
    for (; i + 2 * Isa::width <= n; i += 2 * Isa::width) {
      BEACONKV_UNROLL for (int u = 0; u < 2; ++u) {
        Ints bits;
        load(bits, scores + i + u * Isa::width);
        const Ints magnitude = bits & 0x7FFFFFFF;
        const Ints sign = bits >> 31;
        const Ints is_nan = magnitude > 0x7F800000;
        Ints rank = (magnitude ^ sign) - sign;
        rank = (rank & ~is_nan) | (nan_rank & is_nan);
        nans[u] -= is_nan;
        const Ints or_most = rank ^ is_nan;  // NaN is not the least number
        least[u] = or_most < least[u] ? or_most : least[u];
        raise_to(most[u], rank);
        store(ranks + i + u * Isa::width, rank);
      }
    }
    RankSummary all;
    if (i > 0) {
      std::int32_t lane[3][2 * Isa::width];
      BEACONKV_UNROLL for (int u = 0; u < 2; ++u) {
        store(lane[0] + u * Isa::width, least[u]);
        store(lane[1] + u * Isa::width, most[u]);
        store(lane[2] + u * Isa::width, nans[u]);
      }
      for (index_t l = 0; l < 2 * Isa::width; ++l) {
        all.min = std::min(all.min, lane[0][l]);
        all.max = std::max(all.max, lane[1][l]);
        all.num_nan += lane[2][l];
      }
    }
    for (; i < n; ++i) {
      ranks[i] = score_rank(scores[i]);
      const bool is_nan = ranks[i] == nan_rank;
      all.min = std::min(all.min, is_nan ? all.min : ranks[i]);
      all.max = std::max(all.max, ranks[i]);
      all.num_nan += is_nan ? 1 : 0;
    }
    *summary = all;
  }
};

/// `x[i] = max(x[i], least)`.
struct RaiseTo {
  template <class Isa>
  BEACONKV_KERNEL void run(std::int32_t* x, index_t n, std::int32_t least) noexcept {
    const typename Isa::Ints all = least - typename Isa::Ints{};
    index_t i = 0;
    for (; i + Isa::width <= n; i += Isa::width) {
      typename Isa::Ints value;
      load(value, x + i);
      raise_to(value, all);
      store(x + i, value);
    }
    for (; i < n; ++i) x[i] = std::max(x[i], least);
  }
};

/// Makes `[*low, *high]` the range that the `x` within it really have; there is at least one.
struct ShrinkRange {
  template <class Isa>
  BEACONKV_KERNEL void run(const std::int32_t* x, index_t n, std::int32_t* low, std::int32_t* high) noexcept {
    using Ints = typename Isa::Ints;
    const Ints lowest = *low - Ints{};
    const Ints highest = *high - Ints{};
    Ints least = highest;
    Ints most = lowest;
    index_t i = 0;
    for (; i + Isa::width <= n; i += Isa::width) {
      Ints value;
      load(value, x + i);
      const Ints from_below = value < lowest ? highest : value;  // out of the way
      const Ints from_above = value > highest ? lowest : value;
      least = from_below < least ? from_below : least;
      raise_to(most, from_above);
    }
    std::int32_t lane[2][Isa::width];
    store(lane[0], least);
    store(lane[1], most);
    for (; i < n; ++i) {
      if (x[i] >= *low) lane[0][0] = std::min(lane[0][0], x[i]);
      if (x[i] <= *high) lane[1][0] = std::max(lane[1][0], x[i]);
    }
    *low = *std::min_element(lane[0], lane[0] + Isa::width);
    *high = *std::max_element(lane[1], lane[1] + Isa::width);
  }
};

/// For each byte the places of its ones, lowest first, and their number. As wide as they are used: g++ 12 widens one by one.
struct BitPlaces {
  std::array<std::array<std::int32_t, 8>, 256> place{};
  std::array<std::uint8_t, 256> count{};
};
inline constexpr BitPlaces bit_places = [] {
  BitPlaces table;
  for (std::size_t byte = 0; byte < 256; ++byte)
    for (std::int32_t bit = 0; bit < 8; ++bit)
      if ((byte >> bit & 1U) != 0) table.place[byte][table.count[byte]++] = bit;
  return table;
}();

typedef std::uint32_t Word4 __attribute__((vector_size(16)));
typedef std::uint32_t Word8 __attribute__((vector_size(32)));
typedef std::uint32_t Word16 __attribute__((vector_size(64)));
/// Unsigned integers, whose differences wrap around, in vectors of `width`.
template <index_t width>
struct WordsOf;
template <>
struct WordsOf<4> {
  using Type = Word4;
};
template <>
struct WordsOf<8> {
  using Type = Word8;
};
template <>
struct WordsOf<16> {
  using Type = Word16;
};

/// One bit for each of the sixteen comparisons `low <= x[i] && x[i] <= high`. As one comparison: g++ takes two apart.
template <class Isa>
BEACONKV_KERNEL void bits_within(std::uint32_t& bits, const std::int32_t* x, std::int32_t low, std::int32_t high) noexcept {
  using Ints = typename Isa::Ints;
  using Words = typename WordsOf<Isa::width>::Type;
  constexpr std::uint32_t sign = 0x80000000U;
  const std::uint32_t to_least = static_cast<std::uint32_t>(low) - sign;
  const auto most = static_cast<std::int32_t>(static_cast<std::uint32_t>(high) - to_least);
  static constexpr std::int32_t weights[16] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
  Ints sum{};
  BEACONKV_UNROLL for (index_t at = 0; at < lanes; at += Isa::width) {
    Words value;
    Ints shifted, weight;
    load(value, x + at);
    load(weight, weights + at);
    value -= to_least;
    bits_of(shifted, value);
    sum |= (shifted <= most) & weight;
  }
  Int4 four;
  sum_to_four(four, sum);
  std::uint64_t half[2];
  bits_of(half, four);
  const std::uint64_t both = half[0] + half[1];
  bits = static_cast<std::uint32_t>(both + (both >> 32U));
}

/// Writes the places `i` in `[first, last)` with `low <= x[i] <= high` to `out`, ascending; stops after `room` of them.
/// `*written` tells how many.
struct FindWithin {
  template <class Isa>
  BEACONKV_KERNEL void run(const std::int32_t* x, index_t first, index_t last, std::int32_t low, std::int32_t high,
                           std::int32_t* out, index_t room, index_t* written) noexcept {
    index_t w = 0;
    index_t i = first;
    for (; i + lanes <= last && w + lanes <= room; i += lanes) {
      std::uint32_t bits;
      bits_within<Isa>(bits, x + i, low, high);
      BEACONKV_UNROLL for (index_t half = 0; half < 2; ++half) {
        const std::size_t byte = bits >> (8 * half) & 255U;
        Int8 places;
        load(places, bit_places.place[byte].data());
        places += static_cast<std::int32_t>(i + 8 * half);
        store(out + w, places);
        w += bit_places.count[byte];
      }
    }
    // Where whole registers no longer fit behind the last one.
    for (; i + lanes <= last && w < room; i += lanes) {
      std::uint32_t bits;
      bits_within<Isa>(bits, x + i, low, high);
      for (; bits != 0 && w < room; bits &= bits - 1) out[w++] = static_cast<std::int32_t>(i) + std::countr_zero(bits);
    }
    for (; i < last && w < room; ++i)
      if (x[i] >= low && x[i] <= high) out[w++] = static_cast<std::int32_t>(i);
    *written = w;
  }
};

/// `*behind` is the place behind the `count`-th `x[i] == value`, `count` from 1; there are that many.
struct FindNth {
  template <class Isa>
  BEACONKV_KERNEL void run(const std::int32_t* x, index_t n, std::int32_t value, index_t count, index_t* behind) noexcept {
    using Ints = typename Isa::Ints;
    constexpr index_t step = 128;
    index_t i = 0;
    index_t left = count;
    for (; i + step <= n; i += step) {
      Ints sum{};
      BEACONKV_UNROLL for (index_t at = 0; at < step; at += Isa::width) {
        Ints v;
        load(v, x + i + at);
        sum -= v == value;
      }
      Int4 four;
      sum_to_four(four, sum);
      const index_t here = index_t{four[0]} + four[1] + four[2] + four[3];
      if (left <= here) break;
      left -= here;
    }
    while (left > 0) left -= x[i++] == value ? 1 : 0;
    *behind = i;
  }
};

}  // namespace beaconkv::inline v0::detail
