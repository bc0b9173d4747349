// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Keys that are more or less alike: what the search for look-alikes depends on.

#include <vector>

#include "support.hpp"

namespace beaconkv::bench {

struct KeyData {
  enum Kind : std::int64_t {
    independent,  ///< no two alike: the worst case
    common_mean,  ///< a large mean of all, as keys of real models have: all alike
    clusters,     ///< around 64 centres: a 64th alike
    all_equal,
  };
  const char* name;
  Kind kind;
};
inline constexpr KeyData key_data[] = {{"independent", KeyData::independent},
                                       {"common_mean", KeyData::common_mean},
                                       {"clusters_64", KeyData::clusters},
                                       {"all_equal", KeyData::all_equal}};

/// `[n][dim]`.
[[nodiscard]] inline std::vector<float> make_keys(KeyData::Kind kind, index_t n, index_t dim) {
  Random random(9);
  const index_t centres = kind == KeyData::independent ? 0 : (kind == KeyData::clusters ? 64 : 1);
  const float spread = kind == KeyData::all_equal ? 0.0F : (kind == KeyData::independent ? 1.0F : 0.6F);
  const std::vector<float> middle = random.normals(centres * dim);
  std::vector<float> keys;
  keys.reserve(static_cast<std::size_t>(n * dim));
  for (index_t i = 0; i < n; ++i) {
    const index_t centre = centres > 0 ? random.below(centres) : 0;
    for (index_t d = 0; d < dim; ++d)
      keys.push_back(spread * random.normal() + (centres > 0 ? middle[static_cast<std::size_t>(centre * dim + d)] : 0.0F));
  }
  return keys;
}

}  // namespace beaconkv::bench
