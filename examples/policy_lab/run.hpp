// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// `policy_lab run`: every policy at every budget on the same problems.

#include <filesystem>
#include <map>
#include <string>

#include "beaconkv/types.hpp"

namespace beaconkv::lab {

struct RunOptions {
  std::filesystem::path model{};
  std::filesystem::path prompts{};
  std::string policies = "full,random,recent_window,snapkv,rpc,rkv,beaconkv";
  std::string budgets = "64,128";
  index_t limit = 0;
  index_t max_new = 0;  ///< 0: from the problems, or 1024
  index_t seed = 0;
  index_t threads = 0;            ///< 0: one a core
  index_t repeats = 1;            ///< each step's time is the least of so many runs
  index_t layers_per_step = 0;    ///< the most layers that evict in one decode step; 0: all that are due
  std::string instruction_set{};  ///< of the kernels, the engine's too; empty: the best there is
  bool as_published = false;
  bool compare = true;
  std::map<std::string, std::string> settings{};  ///< for every policy that has them
  std::filesystem::path csv{};
  std::filesystem::path results{};  ///< where to write what each policy did on each problem (`results.hpp`)
  std::filesystem::path plot{};
};

/// Runs and prints; the rows appear one by one (with `repeats`, during the last). `instruction_set` stays chosen. Errors are
/// found before the first problem is run, as far as they can be.
[[nodiscard]] Status run(const RunOptions& options);

}  // namespace beaconkv::lab
