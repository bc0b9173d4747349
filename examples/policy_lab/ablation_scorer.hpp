// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// BeaconKV's scorer with a value norm that can be bent: what RESEARCH of the value norm left open.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "beaconkv/policy/beacon_scorer.hpp"

namespace beaconkv::lab {

/// `BeaconScorer`, and then each score times a power of the length of the key's value, which may count as at most so many times
/// the median of the head's candidates. (A length relative to the median alone changes no order within a head.)
class AblationScorer : public BeaconScorer {
 public:
  struct Options {
    BeaconScorer::Options beacon{};
    float value_exponent = 0;  ///< 0: as `beacon` says
    float value_limit = 0;     ///< 0: none
  };

  AblationScorer() = default;
  explicit AblationScorer(const Options& options) : BeaconScorer(options.beacon), options_(options) {}

  [[nodiscard]] Status validate(const Shape& shape) const {
    if (options_.value_exponent < 0) return detail::invalid("value_exponent = ", options_.value_exponent, ": is negative");
    if (options_.value_limit < 0) return detail::invalid("value_limit = ", options_.value_limit, ": is negative");
    if (options_.value_exponent > 0 && (options_.beacon.attention.value_norm || options_.beacon.key_diff_share > 0))
      return detail::invalid("value_exponent = ", options_.value_exponent, ": not with value_norm or key_diff_share");
    if (options_.value_limit > 0 && options_.value_exponent == 0)
      return detail::invalid("value_limit = ", options_.value_limit, ": needs value_exponent");
    return BeaconScorer::validate(shape);
  }

  template <CacheReader Cache>
  [[nodiscard]] Result<ScoreReport> score(const Cache& cache, const Observations& observations, Range candidates,
                                          ScoreMatrix out, Workspace& work) const {
    Result<ScoreReport> report = BeaconScorer::score(cache, observations, candidates, out, work);
    if (report) weigh(cache, candidates, out);
    return report;
  }
  template <CacheReader Cache>
  [[nodiscard]] Result<ScoreReport> score(const Cache& cache, const Observations& observations, Range candidates,
                                          ScoreMatrix out, Workspace& work) {
    Result<ScoreReport> report = BeaconScorer::score(cache, observations, candidates, out, work);
    if (report) weigh(cache, candidates, out);
    return report;
  }

 private:
  template <CacheReader Cache>
  void weigh(const Cache& cache, Range candidates, ScoreMatrix out) const {
    if (options_.value_exponent == 0 || candidates.size() <= 0) return;
    const auto dim = static_cast<std::size_t>(cache.value_dim());
    std::vector<float> scratch(static_cast<std::size_t>(candidates.size()) * dim);
    for (index_t h = 0; h < out.heads; ++h) {
      const ConstRows values = cache.values(h, candidates.first, candidates.size(), scratch.data());
      std::vector<float> lengths;
      for (index_t i = 0; i < candidates.size(); ++i) {
        float square = 0;
        for (index_t d = 0; d < values.dim; ++d) square += values.row(i)[d] * values.row(i)[d];
        lengths.push_back(std::sqrt(square));
      }
      std::vector<float> sorted = lengths;
      std::nth_element(sorted.begin(), sorted.begin() + static_cast<index_t>(sorted.size() / 2), sorted.end());
      const float most =
          options_.value_limit > 0 ? options_.value_limit * sorted[sorted.size() / 2] : std::numeric_limits<float>::max();
      for (index_t i = 0; i < candidates.size(); ++i)
        out.row(h)[static_cast<std::size_t>(candidates.first + i)] *=
            std::pow(std::min(lengths[static_cast<std::size_t>(i)], most), options_.value_exponent);
    }
  }

  Options options_{};
};

}  // namespace beaconkv::lab
