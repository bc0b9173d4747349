// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// The program, apart from `main`.

#include <iosfwd>
#include <span>
#include <string>

namespace beaconkv::conformance {

/// Runs `conformance` with these arguments (without the program's name). Returns the exit code: 0, 1 where a case failed, 2
/// where something cannot be read.
[[nodiscard]] int run(std::span<const std::string> arguments, std::ostream& out, std::ostream& err);

}  // namespace beaconkv::conformance
