// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// What comparing one case found.

#include <span>
#include <string>
#include <vector>

#include "npy.hpp"

namespace beaconkv::conformance {

/// Of a score, relative to the largest reference of its array: what float32 arithmetic in another order may cost.
inline constexpr double score_tolerance = 1e-5;

class Report {
 public:
  /// Floats within `tolerance * max |expected|`; `actual` is dense and of the same shape.
  void compare(const std::string& array, const FloatArray& expected, std::span<const float> actual,
               double tolerance = score_tolerance);
  /// Equal integers.
  void compare(const std::string& array, const IndexArray& expected, std::span<const std::int64_t> actual);
  /// Notes a difference that the two above do not cover.
  void fail(const std::string& array, const std::string& what) { differences_.push_back(array + ": " + what); }
  /// Notes that something else was compared.
  void count() noexcept { ++compared_; }

  /// One entry an array that differs: its name, where, expected and actual.
  [[nodiscard]] const std::vector<std::string>& differences() const noexcept { return differences_; }
  /// Arrays compared so far.
  [[nodiscard]] index_t compared() const noexcept { return compared_; }
  /// The largest difference of a float, relative to the largest reference of its array.
  [[nodiscard]] double max_score_diff() const noexcept { return max_score_diff_; }

 private:
  [[nodiscard]] bool same_size(const std::string& array, const std::vector<index_t>& shape, std::size_t expected,
                               std::size_t actual);

  std::vector<std::string> differences_;
  index_t compared_ = 0;
  double max_score_diff_ = 0;
};

/// The largest magnitude among the finite ones.
[[nodiscard]] double max_magnitude(std::span<const float> values);

}  // namespace beaconkv::conformance
