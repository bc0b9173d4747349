// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Catch2, version 2 or 3. Tests keep to what both have, spell matchers `Catch::Matchers::...` and draw their random numbers
/// from `test::seed()`.

#include <cstdint>

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif

namespace beaconkv::test {

/// The seed of this run: fixed, or what `--rng-seed` says. Each test program prints it, so that a failure can be repeated.
[[nodiscard]] inline std::uint32_t seed() {
#if __has_include(<catch2/catch_all.hpp>)
  return Catch::getSeed();
#else
  return Catch::rngSeed();
#endif
}

}  // namespace beaconkv::test
