// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// `policy_lab sweep`: one switch of a policy at a time, with intervals, and beside somebody else's figures.

#include <filesystem>
#include <string>
#include <vector>

#include "policy_lab/study.hpp"

namespace beaconkv::lab {

struct SweepOptions {
  /// How problems are run, which, and where results go. `policies` is the table's; empty `budgets` are the table's, too.
  RunOptions run{.policies = "", .budgets = ""};
  std::string table{};                        ///< 1, 2, 3, coverage; empty: the rows of `compare_with`
  std::vector<std::filesystem::path> from{};  ///< results that were written before: nothing is run
  std::string base{};                         ///< the row of the table that others are compared with; empty: its first
  std::filesystem::path compare_with{};       ///< reference results
  bool markdown = false;
};

/// Runs and prints, row by row. An error, too, where a row differs from the reference by more than two standard errors.
[[nodiscard]] Status sweep(const SweepOptions& options);

}  // namespace beaconkv::lab
