// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// From logits to the next token.

#include <cstdint>
#include <span>
#include <vector>

#include "beaconkv/status.hpp"

namespace beaconkv::engine {

/// The token with the largest logit, the lowest id among equals. NaN never wins; logits of NaN alone, or none at all, are an
/// error.
[[nodiscard]] Result<int> greedy(std::span<const float> logits);

struct SamplerOptions {
  double temperature = 1;  ///< at least 0; 0 is greedy
  double top_p = 1;        ///< in (0, 1]: draws among the most likely tokens that reach this probability together
  std::uint64_t seed = 0;
};

/// Draws tokens; the same seed and logits give the same tokens. A copy goes on independently from the same state.
class Sampler {
 public:
  [[nodiscard]] static Result<Sampler> make(const SamplerOptions& options);

  /// O(n log n) for n logits; O(n) where greedy. Allocates on the first call only, unless n grows.
  [[nodiscard]] Result<int> sample(std::span<const float> logits);

 private:
  explicit Sampler(const SamplerOptions& options) : options_(options), state_(options.seed) {}
  double uniform() noexcept;

  SamplerOptions options_;
  std::uint64_t state_;
  std::vector<double> weights_;
  std::vector<int> order_;
};

}  // namespace beaconkv::engine
