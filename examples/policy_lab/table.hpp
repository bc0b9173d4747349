// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// The rows of a run, on the terminal, as CSV and as a plot.

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "policy_lab/evaluation.hpp"

namespace beaconkv::lab {

/// One policy at one budget over all problems.
struct Row {
  std::string policy;
  std::string budget_max;  ///< "-" without a budget
  std::string budget_min;
  index_t problems = 0;
  double exact_percent = 0;
  std::map<int, std::pair<index_t, index_t>> exact_by_level;  ///< level -> right, of
  double same_text_percent = 0;
  bool compared = true;  ///< whether `mean_kl` and `attention_mass_kept` were measured
  double mean_kl = 0;
  double attention_mass_kept = 0;
  std::size_t peak_kv_bytes = 0;
  std::size_t state_bytes = 0;
  double tokens_per_second = 0;
  std::optional<double> speed_against_rpc_percent{};  ///< at the same budget: 0 where equal, negative where slower
  double policy_percent = 0;                          ///< the policy's share of the time of decoding
  double step_p50_us = 0;
  double worst_step = 0;  ///< the longest step over the median one of the same problem, where this is largest
  index_t evictions = 0;
  double evict_p50_us = 0;
  double evict_p99_us = 0;
  double evict_max_us = 0;
};

/// Sums outcomes up. `problems[i]` belongs to `outcomes[i]`.
[[nodiscard]] Row summarise(const std::vector<Problem>& problems, const std::vector<Outcome>& outcomes, bool compared);

/// The names of the columns, in order, and a row's values as text. `-` stands for not measured.
[[nodiscard]] const std::vector<std::string>& column_names();
[[nodiscard]] std::vector<std::string> cells(const Row& row);

/// One line of the table on the terminal; `policy_width` makes room for the longest name.
[[nodiscard]] std::string table_header(std::size_t policy_width);
[[nodiscard]] std::string table_line(const Row& row, std::size_t policy_width);

/// Errors name the file.
[[nodiscard]] Status write_csv(const std::filesystem::path& file, const std::vector<Row>& rows);

/// An error where `write_plot` could not work.
[[nodiscard]] Status check_gnuplot();

/// Exact answers over the budget and the policies' share of decoding, one curve a policy, as PNG by gnuplot. Errors where
/// gnuplot is missing or fails.
[[nodiscard]] Status write_plot(const std::filesystem::path& file, const std::vector<Row>& rows);

}  // namespace beaconkv::lab
