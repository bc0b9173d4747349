// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// How sure a share is.

#include <algorithm>
#include <cmath>

#include "beaconkv/types.hpp"

namespace beaconkv::lab {

struct Interval {
  double low = 0;
  double high = 1;
};

/// Wilson's 95 % interval of a share, `right` of `of`; of nothing: everything.
[[nodiscard]] inline Interval wilson_interval(index_t right, index_t of) {
  if (of <= 0) return {0, 1};
  constexpr double z = 1.959963984540054;
  const auto n = static_cast<double>(of);
  const double p = static_cast<double>(right) / n;
  const double middle = (p + z * z / (2 * n)) / (1 + z * z / n);
  const double half = z / (1 + z * z / n) * std::sqrt(p * (1 - p) / n + z * z / (4 * n * n));
  return {std::max(0.0, middle - half), std::min(1.0, middle + half)};
}

}  // namespace beaconkv::lab
