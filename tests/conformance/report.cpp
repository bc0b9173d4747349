// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "report.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

namespace beaconkv::conformance {
namespace {

[[nodiscard]] std::string number_text(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", value);
  return text;
}

/// `at [1, 17]: expected 3, is 4`, and how many differ.
template <class T>
[[nodiscard]] std::string first_of(const std::vector<index_t>& shape, std::size_t at, T expected, T actual,
                                   std::size_t differing, std::size_t all) {
  std::vector<index_t> index(shape.size());
  auto rest = static_cast<index_t>(at);
  for (std::size_t axis = shape.size(); axis-- > 0;) {
    index[axis] = rest % shape[axis];
    rest /= shape[axis];
  }
  return "at " + conformance::shown(index) + ": expected " + number_text(static_cast<double>(expected)) + ", is " +
         number_text(static_cast<double>(actual)) + " (" + std::to_string(differing) + " of " + std::to_string(all) +
         " differ)";
}

/// Absolute difference; 0 for two NaN or two equal infinities.
[[nodiscard]] double difference(float a, float b) {
  if (a == b || (std::isnan(a) && std::isnan(b))) return 0;
  const double d = std::fabs(static_cast<double>(a) - static_cast<double>(b));
  return std::isfinite(d) ? d : std::numeric_limits<double>::infinity();
}

}  // namespace

double max_magnitude(std::span<const float> values) {
  double largest = 0;
  for (const float v : values)
    if (std::isfinite(v)) largest = std::max(largest, std::fabs(static_cast<double>(v)));
  return largest;
}

bool Report::same_size(const std::string& array, const std::vector<index_t>& shape, std::size_t expected, std::size_t actual) {
  ++compared_;
  if (expected == actual) return true;
  fail(array, "expected shape " + conformance::shown(shape) + ", " + std::to_string(expected) + " numbers, are " +
                  std::to_string(actual));
  return false;
}

void Report::compare(const std::string& array, const FloatArray& expected, std::span<const float> actual, double tolerance) {
  if (!same_size(array, expected.shape, expected.data.size(), actual.size())) return;
  const double largest = max_magnitude(expected.data);
  std::size_t worst = 0;
  std::size_t differing = 0;
  double worst_difference = 0;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const double d = difference(expected.data[i], actual[i]);
    if (d > tolerance * largest) ++differing;
    if (d > worst_difference) {
      worst = i;
      worst_difference = d;
    }
  }
  if (worst_difference > 0) max_score_diff_ = std::max(max_score_diff_, worst_difference / largest);
  if (differing > 0)
    fail(array, first_of(expected.shape, worst, expected.data[worst], actual[worst], differing, actual.size()));
}

void Report::compare(const std::string& array, const IndexArray& expected, std::span<const std::int64_t> actual) {
  if (!same_size(array, expected.shape, expected.data.size(), actual.size())) return;
  std::size_t first = actual.size();
  std::size_t differing = 0;
  for (std::size_t i = actual.size(); i-- > 0;)
    if (expected.data[i] != actual[i]) {
      first = i;
      ++differing;
    }
  if (differing > 0)
    fail(array, first_of(expected.shape, first, expected.data[first], actual[first], differing, actual.size()));
}

}  // namespace beaconkv::conformance
