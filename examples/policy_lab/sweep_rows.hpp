// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// The rows of `policy_lab sweep`, to be read and changed in one place.

#include <string>
#include <string_view>
#include <vector>

#include "beaconkv/status.hpp"

namespace beaconkv::lab {

/// A policy, and why it stands in the table.
struct SweepLine {
  std::string group;
  std::string policy;  ///< with its settings, as on the command line
};

struct SweepTable {
  std::string title;
  std::string budgets;           ///< unless others are asked for
  std::vector<SweepLine> lines;  ///< all are compared with the first one at the same budget
};

/// Table `1`: every policy. `2`: which queries look at the keys. `3`: how they score them. Others are refused.
[[nodiscard]] Result<SweepTable> sweep_table(std::string_view name);

}  // namespace beaconkv::lab
