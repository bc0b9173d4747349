// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Proves "allocates nothing": counts every allocation of the program, whether by `operator new`, `malloc` or a relative.

#include <cstdint>

namespace beaconkv::test {

/// Counts the allocations of all threads since it was made. Read `count()` before asserting: Catch2 allocates.
class AllocationCounter {
 public:
  AllocationCounter() noexcept;
  [[nodiscard]] std::int64_t count() const noexcept;

 private:
  std::int64_t before_;
};

/// How often calling `f` allocates.
template <class F>
[[nodiscard]] std::int64_t allocations_of(F&& f) {
  const AllocationCounter counter;
  f();
  return counter.count();
}

}  // namespace beaconkv::test
