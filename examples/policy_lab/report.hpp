// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// `policy_lab report`: what policies do to a model, as one page with tables and plots.

#include <filesystem>
#include <string>
#include <vector>

#include "beaconkv/status.hpp"
#include "beaconkv/types.hpp"

namespace beaconkv::lab {

struct ReportOptions {
  std::filesystem::path directory{};
  std::filesystem::path model{};
  std::filesystem::path prompts{};
  std::vector<std::filesystem::path> results{};  ///< of `policy_lab run --results`; none: accuracy is measured here
  std::string policies = "recent_window,snapkv,expected_attention,beaconkv,beaconkv_credit";
  std::string budgets = "64,96,128,192,256";  ///< of accuracy, where it is measured here
  index_t budget = 64;                        ///< of regret, latency and map
  index_t limit = 12;                         ///< problems that are run here, evenly over the levels; 0: all
  index_t repeats = 3;                        ///< a step's time is the least of so many runs
  index_t max_new = 0;                        ///< 0: from the problems, or 1024
  double needed = 0.3;                        ///< a key with a larger weight in the full cache is needed
  std::string problem{};                      ///< of the map, by id; empty: one on which the policies differ
  std::string instruction_set{};              ///< empty: the best there is
  std::string date{};                         ///< empty: today
  std::string command{};                      ///< shown on the page
};

/// Measures what is not in `results` and writes `directory/index.html`, which needs no network and no scripts. The folder is
/// made where it is missing; other files in it are left alone. Errors in the arguments are found before anything is run or
/// written.
[[nodiscard]] Status report(const ReportOptions& options);

}  // namespace beaconkv::lab
