// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Assertions that many tests share.

#include <bit>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "beaconkv/workspace.hpp"
#include "support/catch.hpp"
#include "support/counting_allocator.hpp"

namespace beaconkv::test {

[[nodiscard]] inline float float_of(std::uint32_t bits) { return std::bit_cast<float>(bits); }
[[nodiscard]] inline std::uint32_t bits_of(float x) { return std::bit_cast<std::uint32_t>(x); }

inline constexpr std::uint32_t nan_bits = 0x7FC00000U;
inline constexpr std::uint32_t infinity_bits = 0x7F800000U;
[[nodiscard]] inline float nan_float() { return float_of(nan_bits); }
[[nodiscard]] inline float infinity_float() { return float_of(infinity_bits); }

template <class T>
[[nodiscard]] std::vector<T> to_vector(std::span<const T> all) {
  return {all.begin(), all.end()};
}

/// The same bits everywhere: NaN equals NaN, -0 differs from 0.
[[nodiscard]] inline bool same_bits(std::span<const float> a, std::span<const float> b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i)
    if (bits_of(a[i]) != bits_of(b[i])) return false;
  return true;
}

/// The largest difference, infinite where only one of two is NaN or the sizes differ.
[[nodiscard]] inline double largest_difference(std::span<const float> a, std::span<const double> b) {
  if (a.size() != b.size()) return std::numeric_limits<double>::infinity();
  double out = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (std::isnan(a[i]) && std::isnan(b[i])) continue;
    const double gap = std::abs(static_cast<double>(a[i]) - b[i]);
    out = gap <= out ? out : (std::isnan(gap) ? std::numeric_limits<double>::infinity() : gap);
  }
  return out;
}

/// The largest size of a number, NaN aside.
[[nodiscard]] inline double largest_size(std::span<const double> all) {
  double out = 0;
  for (const double x : all)
    if (!std::isnan(x)) out = std::max(out, std::abs(x));
  return out;
}

/// An error of this kind whose message has all `parts`: the argument's name and its value.
inline void check_error(const Status& status, StatusCode code, std::initializer_list<const char*> parts) {
  INFO("message: " << status.message());
  CHECK(status.code() == code);
  for (const char* const part : parts) {
    INFO("expected: " << part);
    CHECK(status.message().find(part) != std::string::npos);
  }
}

inline void check_invalid(const Status& status, std::initializer_list<const char*> parts) {
  check_error(status, StatusCode::invalid_argument, parts);
}

/// `call(workspace) -> Status` uses exactly `size`, allocates nothing, and is refused with a byte less. Ends with a refused
/// call, so that the caller can see that it wrote nothing: `between` runs before it.
template <class Call, class Between>
void check_workspace(const WorkspaceSize& size, Call&& call, Between&& between) {
  Workspace exact(size);
  Status status;
  const std::int64_t allocations = allocations_of([&] { status = call(exact); });
  INFO("workspace of " << size.bytes << " bytes");
  INFO("message: " << status.message());
  CHECK(status.ok());
  CHECK(allocations == 0);
  CHECK(exact.peak() == size.bytes);
  CHECK(exact.require({size.bytes, 0, 0}).ok());  // all of it is free again
  between();
  if (size.bytes == 0) return;
  Workspace less(WorkspaceSize{size.bytes - 1, 0, 0});
  const std::string needed = std::to_string(size.bytes);
  check_error(call(less), StatusCode::workspace_too_small, {"workspace", needed.c_str()});
  CHECK(less.peak() == 0);
}

}  // namespace beaconkv::test
