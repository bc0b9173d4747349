// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "policy_lab/run.hpp"

#include <algorithm>
#include <cstdio>

#include "beaconkv/policy/schedule.hpp"
#include "policy_lab/files.hpp"
#include "policy_lab/results.hpp"
#include "policy_lab/table.hpp"

namespace beaconkv::lab {
namespace {

/// Every row's speed against `rpc` at the same budget, as far as that has a row.
void compare_with_rpc(std::vector<Row>& rows, const std::vector<Job>& jobs) {
  for (std::size_t i = 0; i < rows.size(); ++i)
    for (std::size_t r = rows.size(); r-- > 0;)  // of several, the first
      if (jobs[r].spec.name == "rpc" && jobs[r].budget == jobs[i].budget && rows[r].tokens_per_second > 0)
        rows[i].speed_against_rpc_percent = 100 * (rows[i].tokens_per_second / rows[r].tokens_per_second - 1);
}

void name(Row& row, const Job& job) {
  row.policy = job.spec.text;
  row.budget_max = job.budget > 0 ? std::to_string(job.budget) : "-";
  row.budget_min = job.budget > 0 && job.budget_min ? std::to_string(*job.budget_min) : "-";
}

}  // namespace

Status run(const RunOptions& options) {
  Result<Study> study = Study::make(options);
  if (!study) return study.status();
  if (Status s = check_files({{"--prompts", options.prompts},
                              {"--csv", options.csv, true},
                              {"--results", options.results, true},
                              {"--plot", options.plot, true}});
      !s)
    return s;
  if (!options.csv.empty())  // better now than after the first row
    if (Status s = write_csv(options.csv, {}); !s) return s;
  if (!options.results.empty())
    if (Status s = write_results(options.results, {}); !s) return detail::invalid("--results = ", s.message());
  if (!options.plot.empty())
    if (Status s = check_gnuplot(); !s) return s;

  std::printf("%s: %td weights, %td layers; %zu problems; %s; %s\n", options.model.string().c_str(),
              study->model().weight_count(), study->model().layers(), study->problems().size(),
              options.as_published ? "each policy as published" : "one rule for all: prompt kept, on top of the budget",
              name_of(instruction_set()));
  std::size_t width = 14;
  for (const Job& job : study->jobs()) width = std::max(width, job.spec.text.size());
  std::printf("%s\n", table_header(width).c_str());
  std::fflush(stdout);

  std::vector<Row> rows;
  std::vector<ProblemResult> results;
  const Status finished = study->run([&](const Job& job) -> Status {
    rows.push_back(summarise(study->problems(), job.outcomes, job.compared));
    name(rows.back(), job);
    compare_with_rpc(rows, study->jobs());
    std::printf("%s\n", table_line(rows.back(), width).c_str());
    std::fflush(stdout);
    if (!options.csv.empty())
      if (Status s = write_csv(options.csv, rows); !s) return s;
    if (options.results.empty()) return {};
    add_results(job, study->problems(), results);
    if (Status s = write_results(options.results, results); !s) return detail::invalid("--results = ", s.message());
    return {};
  });
  if (!finished) return finished;
  if (!options.plot.empty()) return write_plot(options.plot, rows);
  return {};
}

}  // namespace beaconkv::lab
