// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// The k best scores, by a contract that gives the same answer on every machine.

#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>
#include <span>

#include "beaconkv/kernel/ranking.hpp"
#include "beaconkv/workspace.hpp"

namespace beaconkv::inline v0 {

struct TopK {
  index_t count = 0;    ///< indices written
  index_t num_nan = 0;  ///< NaN scores seen
};

namespace detail {

/// Bits of a digit for `n` ranks: a quarter as many bins, so that clearing and reading them costs less than sorting into them.
[[nodiscard]] inline int digit_bits(index_t n) noexcept {
  return std::clamp(static_cast<int>(std::bit_width(static_cast<std::uint64_t>(n))) - 2, 5, 11);
}

/// Scratch of `top_k` over `n` scores.
struct TopKScratch {
  TopKScratch(Workspace& work, index_t n)
      : ranks(work.take<std::int32_t>(n)),
        rest(work.take<std::int32_t>(n)),
        histogram(work.take<std::uint32_t>(index_t{4} << digit_bits(n))) {}
  std::span<std::int32_t> ranks;
  std::span<std::int32_t> rest;
  std::span<std::uint32_t> histogram;
};

/// Ranks from `low` to `high`: how many there are, and how many are higher.
struct RankBin {
  std::int32_t low;
  std::int32_t high;
  index_t count;
  index_t above;
};

/// `ranks` are those within `bin`. Sorts them into bins of equal width and makes `bin` the one that holds the `k`-th largest
/// rank of all.
inline void narrow(RankBin& bin, std::span<const std::int32_t> ranks, index_t k, std::uint32_t* counts) noexcept {
  const auto base = static_cast<std::uint32_t>(bin.low);
  const std::uint32_t width = static_cast<std::uint32_t>(bin.high) - base;
  const int shift = std::max(0, static_cast<int>(std::bit_width(width)) - digit_bits(bin.count));
  constexpr index_t group = 8;
  index_t b = (static_cast<index_t>(width >> shift) + group) / group * group;  // bins, four counters each
  std::fill_n(counts, 4 * b, 0U);
  const auto counter = [&](std::size_t i) { return std::size_t{4} * ((static_cast<std::uint32_t>(ranks[i]) - base) >> shift); };
  std::size_t i = 0;
  for (; i + 4 <= ranks.size(); i += 4)  // a counter each, or equal ranks in a row would wait for one another
    for (std::size_t c = 0; c < 4; ++c) ++counts[counter(i + c) + c];
  for (; i < ranks.size(); ++i) ++counts[counter(i)];

  for (;; b -= group) {
    Int4 sum{};
    BEACONKV_UNROLL for (index_t j = 1; j <= group; ++j) {
      Int4 four;
      load(four, counts + 4 * (b - j));
      sum += four;
    }
    const index_t here = index_t{sum[0]} + sum[1] + sum[2] + sum[3];
    if (bin.above + here >= k) break;
    bin.above += here;
  }
  for (;; bin.above += bin.count) {
    const std::uint32_t* const four = counts + 4 * --b;
    bin.count = index_t{four[0]} + four[1] + four[2] + four[3];
    if (bin.above + bin.count >= k) break;
  }
  const std::uint32_t first = static_cast<std::uint32_t>(b) << shift;
  bin.low = static_cast<std::int32_t>(base + first);
  bin.high = static_cast<std::int32_t>(base + std::min(width, first + ((1U << shift) - 1)));
}

/// The bin of all ranks that equal the `k`-th largest one, `1 <= k <= n`; all are within `[low, high]`, both of which occur.
/// Radix selection from the highest digit down, where digits divide the range that the remaining ranks really have: few rounds
/// at any scale of the scores, and none among equals.
[[nodiscard]] inline RankBin kth_rank(const TopKScratch& scratch, index_t k, std::int32_t low, std::int32_t high) noexcept {
  const std::span<const std::int32_t> ranks = scratch.ranks;
  const auto n = static_cast<index_t>(ranks.size());
  RankBin bin{low, high, n, 0};
  if (bin.low == bin.high) return bin;
  narrow(bin, ranks, k, scratch.histogram.data());
  // Many in one bin are often all equal: then they need not be collected.
  if (bin.low != bin.high && bin.count > n / 8) run<ShrinkRange>(ranks.data(), n, &bin.low, &bin.high);
  if (bin.low == bin.high) return bin;

  std::int32_t* const rest = scratch.rest.data();
  index_t found = 0;
  run<FindWithin>(ranks.data(), index_t{0}, n, bin.low, bin.high, rest, bin.count, &found);
  BEACONKV_ASSERT(found == bin.count);
  for (index_t i = 0; i < found; ++i) rest[i] = ranks[static_cast<std::size_t>(rest[i])];
  for (;;) {
    const std::span<const std::int32_t> left = scratch.rest.first(static_cast<std::size_t>(bin.count));
    low = bin.high;
    high = bin.low;
    for (const std::int32_t rank : left) {
      low = std::min(low, rank);
      high = std::max(high, rank);
    }
    bin.low = low;
    bin.high = high;
    if (low == high) return bin;
    narrow(bin, left, k, scratch.histogram.data());
    std::size_t kept = 0;
    for (const std::int32_t rank : left) {
      rest[kept] = rank;
      kept += static_cast<std::size_t>(rank >= bin.low) & static_cast<std::size_t>(rank <= bin.high);
    }
  }
}

}  // namespace detail

/// Scratch of `top_k` over `n` scores.
[[nodiscard]] inline WorkspaceSize top_k_workspace_size(index_t n) {
  return detail::measure([&](Workspace& work) { static_cast<void>(detail::TopKScratch(work, n)); });
}

/// Writes the indices of the `k` largest scores to `out`, ascending and unique. Among equal scores the lowest index wins; NaN
/// ranks below minus infinity and is counted; -0 equals +0. `k` beyond the number of scores gives all of them.
///
/// O(n), whatever the scores; no allocation. Errors: negative `k`, `out` or `work` too small, more scores than `slot_t` can
/// number.
[[nodiscard]] inline Result<TopK> top_k(std::span<const float> scores, index_t k, std::span<slot_t> out, Workspace& work) {
  const auto n = static_cast<index_t>(scores.size());
  if (k < 0) return detail::invalid("k = ", k, ": must not be negative");
  if (n > std::numeric_limits<slot_t>::max()) return detail::invalid("scores: ", n, " are more than a slot can number");
  k = std::min(k, n);
  if (static_cast<index_t>(out.size()) < k)
    return detail::invalid("out has room for ", out.size(), " indices: ", k, " are needed");
  if (Status s = work.require(top_k_workspace_size(n)); !s) return s;

  const Workspace::Frame frame(work);
  const detail::TopKScratch scratch(work, n);
  std::int32_t* const ranks = scratch.ranks.data();
  detail::RankSummary seen;
  detail::run<detail::RankScores>(scores.data(), n, ranks, &seen);
  const TopK result{.count = k, .num_nan = seen.num_nan};
  if (k == n) std::iota(out.begin(), out.begin() + k, slot_t{0});
  if (k == 0 || k == n) return result;

  if (seen.num_nan == n) {
    seen.min = seen.max;
  } else if (seen.num_nan > 0) {  // to right below the least number, or digits would span a range that is empty
    detail::run<detail::RaiseTo>(ranks, n, --seen.min);
  }
  const detail::RankBin kth = detail::kth_rank(scratch, k, seen.min, seen.max);
  constexpr std::int32_t no_limit = std::numeric_limits<std::int32_t>::max();
  index_t behind_ties = n;  // from here on, ranks that equal the k-th no longer fit
  if (k - kth.above < kth.count) detail::run<detail::FindNth>(ranks, n, kth.low, k - kth.above, &behind_ties);
  index_t first = 0;
  index_t second = 0;
  detail::run<detail::FindWithin>(ranks, index_t{0}, behind_ties, kth.low, no_limit, out.data(), k, &first);
  if (first < k)
    detail::run<detail::FindWithin>(ranks, behind_ties, n, kth.low + 1, no_limit, out.data() + first, k - first, &second);
  BEACONKV_ASSERT(first + second == k);
  return result;
}

}  // namespace beaconkv::inline v0
