// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// The numbers of a report's page.

#include <array>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "policy_lab/kept_map.hpp"
#include "policy_lab/results.hpp"
#include "policy_lab/statistics.hpp"

namespace beaconkv::lab {

/// A policy at a budget over its problems.
struct AccuracyRow {
  std::string policy{};
  index_t budget = 0;  ///< 0: none
  index_t right = 0;
  index_t of = 0;
  std::map<int, std::pair<index_t, index_t>> by_level{};  ///< level -> right, of
  std::optional<double> kl{};                             ///< mean, where all problems have it; the same
  std::optional<double> regret{};
  double policy_share = 0;  ///< of the time of all decode steps
  std::size_t peak_kv_bytes = 0;
  std::size_t state_bytes = 0;

  [[nodiscard]] double share() const { return of > 0 ? static_cast<double>(right) / static_cast<double>(of) : 0; }
  [[nodiscard]] Interval interval() const { return wilson_interval(right, of); }
};

/// Sums results up: policies in the order in which they first come, budgets ascending.
[[nodiscard]] std::vector<AccuracyRow> accuracy_rows(const std::vector<ProblemResult>& results);

/// Attention to evicted tokens.
struct RegretCurve {
  static constexpr std::size_t parts = 32;

  std::string policy{};
  double mean = 0;                      ///< over problems, steps, layers and KV heads
  std::vector<double> by_layer{};       ///< the same, of each layer
  std::array<double, parts> by_part{};  ///< over problems, layers and KV heads: of equal parts of each text
  index_t right = 0;                    ///< problems answered rightly
  index_t needed = 0;                   ///< evicted tokens (in a layer and KV head) that a later query gives a large weight
  index_t wanted = 0;                   ///< strongest keys of queries that look far back
  index_t found = 0;                    ///< of these, the ones that were still there
};

/// How long steps took.
struct Latency {
  std::string policy{};
  index_t layers_per_step = 0;
  std::vector<double> steps{};      ///< whole decode steps, microseconds, ascending
  std::vector<double> evictions{};  ///< the policy's part of those that evicted, ascending
};

/// Which positions a policy held on one text.
struct KeptMap {
  std::string policy{};
  bool exact = false;
  std::vector<std::vector<KeptRun>> heads{};  ///< `[layers][kv_heads]`
};

/// All that a page shows.
struct ReportData {
  // what was run
  std::string model{};
  index_t weights = 0;
  index_t layers = 0;
  Shape shape{};
  std::string prompts{};
  index_t problems = 0;  ///< run here
  std::vector<std::string> files{};
  std::string instruction_set{};
  std::string date{};
  std::string command{};
  std::vector<std::string> policies{};  ///< named on the command line, without the full cache
  index_t budget = 0;
  index_t repeats = 0;
  double needed = 0;
  // what came out
  std::vector<AccuracyRow> accuracy{};
  std::vector<RegretCurve> regret{};
  std::vector<Latency> latency{};
  std::string map_problem{};
  int map_level = 0;
  std::string map_text{};  ///< the problem in words
  Span map_span{};
  position_t map_distance = 0;  ///< needs that are nearer are left out
  std::vector<KeptMap> maps{};
  std::vector<std::vector<Need>> needs{};  ///< `[layers][kv_heads]`
};

/// The value below which a share of the ascending `values` lies, by nearest rank; 0 where there are none.
[[nodiscard]] double quantile(const std::vector<double>& values, double share);

/// A problem with all that is the same for every policy.
struct ReportTask {
  Problem problem;
  FullText full;
  EvaluationOptions how;
};

/// A policy of the report with its settings.
struct ReportPolicy {
  PolicySpec spec;
  PolicyEntry entry;
};

/// Runs policies at budgets on tasks beside a full cache, for `accuracy_rows`.
[[nodiscard]] Result<std::vector<ProblemResult>> measure_accuracy(const engine::Model& model,
                                                                  const std::vector<ReportTask>& tasks,
                                                                  const std::vector<ReportPolicy>& policies,
                                                                  const std::vector<index_t>& budgets);
/// Runs them at `data.budget` with an event log: `regret`, and the map of a problem (`problem`, or one on which they differ).
[[nodiscard]] Status measure_regret(const engine::Model& model, const std::vector<ReportTask>& tasks,
                                    const std::vector<ReportPolicy>& policies, const std::string& problem, ReportData& data);
/// Times them at `data.budget`, all layers at once and one a step, taking turns; the full cache, too.
[[nodiscard]] Status measure_latency(const engine::Model& model, const std::vector<ReportTask>& tasks,
                                     const std::vector<ReportPolicy>& policies, ReportData& data);

}  // namespace beaconkv::lab
