// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "policy_lab/sweep.hpp"

#include <algorithm>
#include <cstdio>
#include <optional>

#include "policy_lab/coverage.hpp"
#include "policy_lab/files.hpp"
#include "policy_lab/reference_results.hpp"
#include "policy_lab/sweep_rows.hpp"
#include "policy_lab/swept.hpp"

namespace beaconkv::lab {
namespace {

/// A row to come.
struct PlannedRow {
  std::string group;
  std::string policy;
  index_t budget = 0;
};

struct Plan {
  std::string title;
  std::string base{};  ///< empty: rows are not compared with each other
  std::vector<PlannedRow> rows{};
};

/// A table's rows, each at each budget.
[[nodiscard]] Result<Plan> plan_table(const SweepOptions& options) {
  const Result<SweepTable> table = sweep_table(options.table);
  if (!table) return table.status();
  const Result<std::vector<index_t>> budgets =
      parse_budgets(options.run.budgets.empty() ? table->budgets : options.run.budgets);
  if (!budgets) return budgets.status();
  Plan plan{table->title, options.base.empty() ? table->lines.front().policy : options.base};
  for (const SweepLine& line : table->lines)
    for (const index_t budget : line.policy == "full" ? std::vector<index_t>{0} : *budgets)
      plan.rows.push_back({line.group, line.policy, budget});
  // The base is there before what is compared with it.
  const auto is_base = [&](const PlannedRow& row) { return row.policy == plan.base; };
  if (std::stable_partition(plan.rows.begin(), plan.rows.end(), is_base) == plan.rows.begin())
    return detail::invalid("--base = ", plan.base, ": is no row of the table");
  return plan;
}

/// The rows of the reference, at the budgets that were asked for.
[[nodiscard]] Result<Plan> plan_reference(const SweepOptions& options, const ReferenceResults& reference) {
  std::optional<std::vector<index_t>> budgets;
  if (!options.run.budgets.empty()) {
    Result<std::vector<index_t>> read = parse_budgets(options.run.budgets);
    if (!read) return read.status();
    budgets = std::move(*read);
  }
  Plan plan{"the rows of " + options.compare_with.filename().string()};
  for (const ReferenceRow& row : reference.rows)
    if (!budgets || std::find(budgets->begin(), budgets->end(), row.budget) != budgets->end())
      plan.rows.push_back({row.source, row.policy, row.budget});
  if (plan.rows.empty()) return detail::invalid("--budgets = ", options.run.budgets, ": the reference has no such row");
  return plan;
}

/// Prints the rows as they become known, and counts those that differ from the reference.
class Printer {
 public:
  Printer(const Plan& plan, const SweepOptions& options, const std::optional<ReferenceResults>& reference)
      : plan_(plan), reference_(reference), lines_(options.markdown, width_of(plan)), markdown_(options.markdown) {
    std::printf("%s\n", lines_.header().c_str());
    std::fflush(stdout);
  }

  /// The next row of the plan.
  [[nodiscard]] Status print(const ResultTable& results, const std::vector<Problem>& problems) {
    const PlannedRow& planned = plan_.rows[next_++];
    if (planned.group != group_) std::printf("%s\n", lines_.group(group_ = planned.group).c_str());
    const bool has_base = !plan_.base.empty() && planned.budget > 0 && planned.policy != plan_.base;
    const Result<SweptRow> row = results.row(planned.policy, planned.budget, has_base ? &plan_.base : nullptr, problems);
    if (!row) return row.status();
    std::printf("%s\n", lines_.line(*row).c_str());
    if (reference_) compare(*row);
    std::fflush(stdout);
    return {};
  }

  /// The comparison as a whole.
  [[nodiscard]] Status finish() const {
    if (!reference_) return {};
    std::printf("\n%s%s", comparison_.c_str(), markdown_ ? "\n" : "");
    std::printf("%td of %td rows agree with the reference within two standard errors\n", compared_ - differing_, compared_);
    std::fflush(stdout);
    if (differing_ > 0)
      return detail::invalid("--compare-with: ", differing_, " of ", compared_,
                             " rows differ from the reference by more than two standard errors");
    return {};
  }

 private:
  [[nodiscard]] static std::size_t width_of(const Plan& plan) {
    std::size_t width = 14;
    for (const PlannedRow& row : plan.rows) width = std::max(width, row.policy.size());
    return width;
  }

  void compare(const SweptRow& row) {
    const ReferenceRow* const theirs = reference_->find(row.policy, row.budget);
    if (theirs == nullptr) return;
    const Agreement agreement = compare_with_reference(row, *theirs);
    ++compared_;
    differing_ += agreement.agrees() ? 0 : 1;
    if (comparison_.empty())
      comparison_ = markdown_
                        ? "| policy | budget | ours % | reference % | standard errors | |\n|---|---:|---:|---:|---:|---|\n"
                        : "ours % and the reference's, and the difference in standard errors\n";
    char text[128];
    std::snprintf(text, sizeof text, markdown_ ? " | %td | %.1f | %.1f | %+.1f | %s |\n" : " %4td %6.1f %6.1f %+5.1f  %s\n",
                  row.budget, agreement.ours, agreement.theirs, agreement.errors, agreement.agrees() ? "OK" : "DIFFERS");
    std::string name = row.policy;
    if (markdown_)
      name = "| `" + name + "`";
    else
      name.resize(std::max(name.size(), width_of(plan_)), ' ');
    comparison_ += name + text;
  }

  const Plan& plan_;
  const std::optional<ReferenceResults>& reference_;
  SweptLines lines_;
  bool markdown_;
  std::size_t next_ = 0;
  std::string group_{};
  std::string comparison_{};
  index_t compared_ = 0;
  index_t differing_ = 0;
};

/// Whether there will be anything to compare: before it is run.
[[nodiscard]] Status check_comparison(const Plan& plan, const std::optional<ReferenceResults>& reference,
                                      const std::vector<Problem>& problems) {
  if (!reference) return {};
  const auto is_there = [&](const PlannedRow& row) { return reference->find(row.policy, row.budget) != nullptr; };
  if (std::none_of(plan.rows.begin(), plan.rows.end(), is_there))
    return detail::invalid("--compare-with: the reference has none of these rows at these budgets");
  return check_problems(*reference, problems);
}

void print_title(const Plan& plan, const std::string& what, std::size_t problems) {
  std::printf("%s; %zu problems; %s", plan.title.c_str(), problems, what.c_str());
  if (!plan.base.empty()) std::printf("; differences are from %s at the same budget, on the same problems", plan.base.c_str());
  std::printf("\n\n");
}

[[nodiscard]] Status sweep_from_files(const SweepOptions& options, const Plan& plan,
                                      const std::optional<ReferenceResults>& reference) {
  ResultTable results;
  std::string names;
  for (const std::filesystem::path& file : options.from) {
    const Result<std::vector<ProblemResult>> read = read_results(file);
    if (!read) return detail::error(read.status().code(), "--from = ", read.status().message());
    if (Status s = results.add(*read); !s) return detail::invalid("--from = ", file.string(), ": ", s.message());
    names.append(names.empty() ? "from " : ", ").append(file.filename().string());
  }
  const std::vector<Problem> problems = results.problems(options.run.limit);
  if (Status s = check_comparison(plan, reference, problems); !s) return s;
  for (const PlannedRow& row : plan.rows)  // before anything is printed
    if (const Result<SweptRow> found = results.row(row.policy, row.budget, nullptr, problems); !found) return found.status();
  print_title(plan, names, problems.size());
  Printer printer(plan, options, reference);
  for (std::size_t i = 0; i < plan.rows.size(); ++i)
    if (Status s = printer.print(results, problems); !s) return s;
  return printer.finish();
}

[[nodiscard]] Status sweep_by_running(const SweepOptions& options, const Plan& plan,
                                      const std::optional<ReferenceResults>& reference) {
  std::vector<JobRequest> jobs;
  for (const PlannedRow& row : plan.rows) jobs.push_back({row.policy, row.budget});
  if (Status s = check_files({{"--prompts", options.run.prompts},
                              {"--compare-with", options.compare_with},
                              {"--results", options.run.results, true}});
      !s)
    return s;
  Result<Study> study = Study::make(options.run, jobs);
  if (!study) return study.status();
  if (Status s = check_comparison(plan, reference, study->problems()); !s) return s;
  const std::filesystem::path& file = options.run.results;
  if (!file.empty())
    if (Status s = write_results(file, {}); !s) return detail::invalid("--results = ", s.message());
  print_title(plan, options.run.model.string() + ", " + name_of(instruction_set()), study->problems().size());
  Printer printer(plan, options, reference);
  std::vector<ProblemResult> all;
  ResultTable results;
  const Status finished = study->run([&](const Job& job) -> Status {
    std::vector<ProblemResult> of_job;
    add_results(job, study->problems(), of_job);
    if (Status s = results.add(of_job); !s) return s;
    all.insert(all.end(), of_job.begin(), of_job.end());
    if (!file.empty())
      if (Status s = write_results(file, all); !s) return detail::invalid("--results = ", s.message());
    return printer.print(results, study->problems());
  });
  if (!finished) return finished;
  return printer.finish();
}

}  // namespace

Status sweep(const SweepOptions& options) {
  if (options.table == "coverage") {
    if (!options.from.empty() || !options.base.empty() || !options.compare_with.empty() || !options.run.results.empty())
      return detail::invalid("--table = coverage: has no rows for --from, --results, --base or --compare-with");
    return print_coverage(options.run, options.markdown);
  }
  if (options.table.empty() && options.compare_with.empty())
    return detail::invalid("--table: must be given, or --compare-with, whose rows are run then");
  if (options.table.empty() && !options.base.empty())
    return detail::invalid("--base = ", options.base, ": needs a --table, whose row it is");
  if (options.run.limit < 0) return detail::invalid("--limit = ", options.run.limit, ": must not be negative");
  std::optional<ReferenceResults> reference;
  if (!options.compare_with.empty()) {
    Result<ReferenceResults> read = read_reference(options.compare_with);
    if (!read) return detail::error(read.status().code(), "--compare-with = ", read.status().message());
    reference = std::move(*read);
  }
  const Result<Plan> plan = options.table.empty() ? plan_reference(options, *reference) : plan_table(options);
  if (!plan) return plan.status();
  return options.from.empty() ? sweep_by_running(options, *plan, reference) : sweep_from_files(options, *plan, reference);
}

}  // namespace beaconkv::lab
