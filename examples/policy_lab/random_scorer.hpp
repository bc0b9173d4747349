// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Chance as a policy: the baseline that every other one has to beat, and an example of a scorer of one's own.

#include "beaconkv/policy/scorer.hpp"

namespace beaconkv::lab {

/// A score drawn anew for every token at every eviction, for each KV head by itself; the same seed gives the same scores.
struct RandomScorer {
  std::uint64_t seed = 0;

  [[nodiscard]] Status validate(const Shape&) const { return {}; }

  template <CacheReader Cache>
  [[nodiscard]] Result<ScoreReport> score(const Cache& cache, const Observations&, Range candidates, ScoreMatrix out,
                                          Workspace&) const {
    for (index_t h = 0; h < out.heads; ++h) {
      std::uint64_t state = seed + static_cast<std::uint64_t>(h) * 0x632BE59BD9B4E019U +
                            static_cast<std::uint64_t>(cache.position(h, out.tokens - 1)) * 0x9FB21C651E98DF25U;
      for (index_t j = candidates.first; j < candidates.last; ++j)
        out.row(h)[static_cast<std::size_t>(j)] = static_cast<float>(next(state) >> 40);
    }
    return ScoreReport{};
  }

  [[nodiscard]] WorkspaceSize workspace_size(const Shape&, index_t, index_t) const { return {}; }

 private:
  /// splitmix64 (Steele, Lea, Flood 2014).
  [[nodiscard]] static std::uint64_t next(std::uint64_t& state) noexcept {
    std::uint64_t z = state += 0x9E3779B97F4A7C15U;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
    return z ^ (z >> 31);
  }
};

}  // namespace beaconkv::lab
