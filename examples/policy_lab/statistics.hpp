// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// How sure a share of right answers is, and the difference of two on the same problems.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "beaconkv/types.hpp"

namespace beaconkv::lab {

struct Interval {
  double low = 0;
  double high = 0;
};

/// Half a 95 % interval of a normal distribution, in standard deviations.
inline constexpr double two_sided_95 = 1.959963984540054;

/// The 95 % interval of a share of which `right` of `of` were seen (Wilson 1927): within 0 and 1, never empty. Everything where
/// nothing was seen.
[[nodiscard]] inline Interval wilson_interval(index_t right, index_t of) {
  if (of <= 0) return {0, 1};
  const auto n = static_cast<double>(of);
  const double p = static_cast<double>(right) / n;
  const double z2 = two_sided_95 * two_sided_95;
  const double centre = p + z2 / (2 * n);
  const double half = two_sided_95 * std::sqrt(p * (1 - p) / n + z2 / (4 * n * n));
  return {right == 0 ? 0 : (centre - half) / (1 + z2 / n), right == of ? 1 : (centre + half) / (1 + z2 / n)};
}

/// Two answers to the same problems: those that only the one got right, and those that only the other did.
struct Paired {
  index_t fixed = 0;   ///< wrong in the base row, right in this one
  index_t broken = 0;  ///< the other way round
  index_t problems = 0;

  /// Of the shares, this one's minus the base's.
  [[nodiscard]] double difference() const noexcept {
    return problems > 0 ? static_cast<double>(fixed - broken) / static_cast<double>(problems) : 0;
  }
};

/// The chance of a split at least as uneven where both are equally good (McNemar, exact, two-sided).
[[nodiscard]] inline double mcnemar_p(const Paired& pair) {
  const index_t n = pair.fixed + pair.broken;
  const double log_half = std::log(0.5);
  double tail = 0;
  for (index_t k = 0; k <= std::min(pair.fixed, pair.broken); ++k) {
    const double log_ways = std::lgamma(static_cast<double>(n + 1)) - std::lgamma(static_cast<double>(k + 1)) -
                            std::lgamma(static_cast<double>(n - k + 1));
    tail += std::exp(log_ways + static_cast<double>(n) * log_half);
  }
  return std::min(1.0, 2 * tail);
}

/// The 95 % interval of the difference: percentiles over so many bootstrap samples of the problems, always the same ones. No
/// wider than a point where no problem differs.
[[nodiscard]] inline Interval paired_interval(const Paired& pair, index_t samples = 10000) {
  if (pair.problems <= 0) return {-1, 1};
  std::mt19937_64 random(20260701);
  const auto n = static_cast<std::uint64_t>(pair.problems);
  std::vector<index_t> sums(static_cast<std::size_t>(samples));
  for (index_t& sum : sums)
    for (index_t i = 0; i < pair.problems; ++i) {
      const auto drawn = static_cast<index_t>(random() % n);  // n is tiny beside 2^64
      sum += drawn < pair.fixed ? 1 : drawn < pair.fixed + pair.broken ? -1 : 0;
    }
  std::sort(sums.begin(), sums.end());
  const auto at = [&](double share) {
    const auto rank = static_cast<std::size_t>(std::lround(share * static_cast<double>(samples - 1)));
    return static_cast<double>(sums[rank]) / static_cast<double>(pair.problems);
  };
  return {at(0.025), at(0.975)};
}

/// The standard error of a share near `share` among `of`, with two right and two wrong ones added (Agresti and Coull 1998), so
/// that it is not 0 at either end.
[[nodiscard]] inline double standard_error(double share, index_t of) {
  const double n = static_cast<double>(of) + 4;
  const double p = (share * static_cast<double>(of) + 2) / n;
  return std::sqrt(p * (1 - p) / n);
}

}  // namespace beaconkv::lab
