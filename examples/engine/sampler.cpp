// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "engine/sampler.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace beaconkv::engine {

Result<int> greedy(std::span<const float> logits) {
  int best = -1;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (std::isnan(logits[i])) continue;
    if (best < 0 || logits[i] > logits[static_cast<std::size_t>(best)]) best = static_cast<int>(i);
  }
  if (best < 0) return detail::invalid("logits: none of ", logits.size(), " is a number");
  return best;
}

Result<Sampler> Sampler::make(const SamplerOptions& options) {
  if (!(options.temperature >= 0 && std::isfinite(options.temperature)))
    return detail::invalid("temperature = ", options.temperature, ": must be 0 or more");
  if (!(options.top_p > 0 && options.top_p <= 1))
    return detail::invalid("top_p = ", options.top_p, ": must be above 0, at most 1");
  return Sampler(options);
}

/// In [0, 1). SplitMix64 (Steele, Lea, Flood 2014).
double Sampler::uniform() noexcept {
  std::uint64_t z = (state_ += 0x9E3779B97F4A7C15ULL);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  return static_cast<double>((z ^ (z >> 31)) >> 11) * 0x1p-53;
}

Result<int> Sampler::sample(std::span<const float> logits) {
  Result<int> best = greedy(logits);
  if (!best || options_.temperature == 0) return best;
  const float top = logits[static_cast<std::size_t>(*best)];
  if (!std::isfinite(top)) return best;

  weights_.resize(logits.size());
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const double weight = std::exp((static_cast<double>(logits[i]) - static_cast<double>(top)) / options_.temperature);
    weights_[i] = std::isnan(weight) ? 0 : weight;
  }
  order_.resize(logits.size());
  std::iota(order_.begin(), order_.end(), 0);
  const auto weight_of = [&](int id) { return weights_[static_cast<std::size_t>(id)]; };
  std::sort(order_.begin(), order_.end(),
            [&](int a, int b) { return weight_of(a) != weight_of(b) ? weight_of(a) > weight_of(b) : a < b; });

  double total = 0;
  for (const int id : order_) total += weight_of(id);
  std::size_t kept = 0;
  double reach = 0;
  while (kept < order_.size() && reach < options_.top_p * total) reach += weight_of(order_[kept++]);
  double left = uniform() * reach;
  for (std::size_t i = 0; i + 1 < kept; ++i) {
    left -= weight_of(order_[i]);
    if (left < 0) return order_[i];
  }
  return order_[kept - 1];
}

}  // namespace beaconkv::engine
