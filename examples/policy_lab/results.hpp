// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// What policies did on each problem, as JSON lines: what tables with intervals, and pages, are made of later.

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "policy_lab/study.hpp"

namespace beaconkv::lab {

/// A policy at a budget on one problem. Equal policies are known by equal texts.
struct ProblemResult {
  std::string policy{};  ///< with its settings, as on the command line
  index_t budget = 0;    ///< 0: none
  std::string problem{};
  int level = 0;
  bool exact = false;
  bool same_text = false;
  std::optional<double> kl{};      ///< nats a token, where a full cache ran beside it
  std::optional<double> regret{};  ///< mean share of the full cache's attention that falls on evicted tokens; the same
  index_t steps = 0;               ///< decode steps along the full cache's text
  index_t evictions = 0;           ///< of these, how many evicted
  double model_us = 0;             ///< of all steps
  double policy_us = 0;            ///< of all steps
  double step_p50_us = 0;
  double step_max_us = 0;
  std::size_t peak_kv_bytes = 0;
  std::size_t state_bytes = 0;
};

[[nodiscard]] ProblemResult result_of(const std::string& policy, index_t budget, const Problem& problem, const Outcome& outcome,
                                      bool compared);

/// Appends a job's, one for each problem.
void add_results(const Job& job, const std::vector<Problem>& problems, std::vector<ProblemResult>& results);

/// Writes a file anew, a line each.
[[nodiscard]] Status write_results(const std::filesystem::path& file, const std::vector<ProblemResult>& results);

/// Reads it. A damaged line is refused with its number and the reason; so is a result that the file holds twice.
[[nodiscard]] Result<std::vector<ProblemResult>> read_results(const std::filesystem::path& file);

}  // namespace beaconkv::lab
