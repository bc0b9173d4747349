// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// `policy_lab run`: every policy at every budget on the same problems.

#include "policy_lab/study.hpp"

namespace beaconkv::lab {

/// Runs and prints; the rows appear one by one (with `repeats`, during the last). `instruction_set` stays chosen. Errors are
/// found before the first problem is run, as far as they can be.
[[nodiscard]] Status run(const RunOptions& options);

}  // namespace beaconkv::lab
