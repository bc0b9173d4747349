// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// What a number means nothing without.

#include <string>

namespace beaconkv::bench {

struct Machine {
  std::string cpu;              ///< as Linux calls it
  std::string compiler;         ///< and its version
  std::string flags;            ///< that this program was compiled with
  std::string instruction_set;  ///< that the library's kernels use
};

/// Of this machine, this build and the instruction set in use now.
[[nodiscard]] Machine this_machine();

/// Whether everything was compiled for more than the oldest processors of its kind (`-march=native`).
[[nodiscard]] bool is_native_build() noexcept;

}  // namespace beaconkv::bench
