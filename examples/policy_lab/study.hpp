// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Policies at budgets on problems: what `run` and `sweep` make their tables of.

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "policy_lab/evaluation.hpp"

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

/// A policy with its settings, as on the command line, and a budget; without one for the full cache.
struct JobRequest {
  std::string policy{};
  index_t budget = 0;
};

/// One policy at one budget.
struct Job {
  PolicySpec spec;
  PolicyEntry entry;
  index_t budget = 0;  ///< 0: none
  std::optional<index_t> budget_min{};
  bool compared = true;             ///< whether a full cache runs beside it
  std::vector<Outcome> outcomes{};  ///< of each problem, once it was run
};

/// Everything that was asked for, known to work as far as that can be known before the first problem is run.
class Study {
 public:
  /// Reads model and problems, and makes each policy once for a trial. The instruction set stays chosen. Of the options, `csv`,
  /// `results` and `plot` are the caller's business.
  [[nodiscard]] static Result<Study> make(const RunOptions& options);
  /// The same with these jobs instead of each policy at each budget.
  [[nodiscard]] static Result<Study> make(const RunOptions& options, const std::vector<JobRequest>& jobs);

  [[nodiscard]] const engine::Model& model() const noexcept { return *model_; }
  [[nodiscard]] const std::vector<Problem>& problems() const noexcept { return problems_; }
  [[nodiscard]] const std::vector<Job>& jobs() const noexcept { return jobs_; }

  /// Runs the jobs in order; `finished` is called behind each, with `repeats` during the last, and the first error ends it.
  [[nodiscard]] Status run(const std::function<Status(const Job&)>& finished);

 private:
  Study() = default;
  [[nodiscard]] Status plan_jobs(const std::vector<JobRequest>& wanted);
  [[nodiscard]] Settings settings_of(const Job& job) const { return {job.spec.text, job.spec.settings, options_.settings}; }
  [[nodiscard]] PolicyRequest request() const;
  [[nodiscard]] std::string pass_text(index_t pass) const;
  [[nodiscard]] Status write_texts(index_t pass);
  [[nodiscard]] std::vector<Outcome> outcomes_of_full() const;
  [[nodiscard]] Status run_job(Job& job, index_t pass);

  RunOptions options_;
  std::unique_ptr<engine::Model> model_;  // sessions know where it lies
  std::vector<Problem> problems_;
  std::vector<EvaluationOptions> how_;  // of each problem
  std::vector<FullText> texts_;         // of each problem, the full cache's
  std::vector<Job> jobs_;
};

}  // namespace beaconkv::lab
