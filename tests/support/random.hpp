// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Random numbers for tests: the same with every standard library, and repeatable from one seed.
///
/// Begin a test with `Random random; CAPTURE(random.seed());`, so that a failure shows how to repeat it:
/// `BEACONKV_TEST_SEED=<seed> <test program>`.

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <numbers>
#include <random>
#include <utility>
#include <vector>

#include "beaconkv/types.hpp"
#include "support/catch.hpp"

namespace beaconkv::test {

class Random {
 public:
  /// Seeded by the environment's BEACONKV_TEST_SEED, else by the seed of this run.
  Random() : Random(seed_of_run()) {}
  explicit Random(std::uint32_t seed) : seed_(seed), engine_(seed) {}

  [[nodiscard]] std::uint32_t seed() const { return seed_; }

  /// From `first` to `last`, both included.
  [[nodiscard]] index_t integer(index_t first, index_t last) {
    return first + static_cast<index_t>(engine_() % static_cast<std::uint64_t>(last - first + 1));
  }
  [[nodiscard]] bool coin() { return integer(0, 1) == 1; }
  /// In [0, 1).
  [[nodiscard]] double unit() { return static_cast<double>(engine_() >> 11U) * 0x1p-53; }
  [[nodiscard]] float uniform(float low, float high) { return low + (high - low) * static_cast<float>(unit()); }
  /// Normally distributed, variance 1 (Box and Muller).
  [[nodiscard]] float normal() {
    const double radius = std::sqrt(-2 * std::log(1 - unit()));
    return static_cast<float>(radius * std::cos(2 * std::numbers::pi * unit()));
  }
  /// Any bit pattern, NaN and infinities included.
  [[nodiscard]] std::uint32_t bits() { return static_cast<std::uint32_t>(engine_()); }

  [[nodiscard]] std::vector<float> normals(index_t count, float deviation = 1.0F) {
    std::vector<float> out(static_cast<std::size_t>(count));
    for (float& x : out) x = deviation * normal();
    return out;
  }

  /// `count` of the numbers 0 .. `n - 1`, ascending.
  [[nodiscard]] std::vector<slot_t> subset(index_t count, index_t n) {
    std::vector<slot_t> out;
    for (index_t i = 0; i < n; ++i)
      if (integer(1, n - i) <= count - static_cast<index_t>(out.size())) out.push_back(static_cast<slot_t>(i));
    return out;
  }

  template <class T>
  void shuffle(std::vector<T>& all) {
    for (std::size_t i = all.size(); i > 1; --i)
      std::swap(all[i - 1], all[static_cast<std::size_t>(integer(0, static_cast<index_t>(i) - 1))]);
  }

 private:
  [[nodiscard]] static std::uint32_t seed_of_run() {
    const char* const text = std::getenv("BEACONKV_TEST_SEED");
    return text != nullptr ? static_cast<std::uint32_t>(std::strtoul(text, nullptr, 0)) : test::seed();
  }

  std::uint32_t seed_;
  std::mt19937_64 engine_;
};

}  // namespace beaconkv::test
