// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "policy_lab/report.hpp"

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <set>
#include <system_error>
#include <tuple>

#include "engine/vocabulary.hpp"
#include "policy_lab/report_page.hpp"

namespace beaconkv::lab {
namespace {

[[nodiscard]] Status check(const ReportOptions& options) {
  if (options.limit < 0) return detail::invalid("--limit = ", options.limit, ": must not be negative");
  if (options.budget < 1) return detail::invalid("--budget = ", options.budget, ": must be at least 1");
  if (options.repeats < 1) return detail::invalid("--repeats = ", options.repeats, ": must be at least 1");
  if (options.max_new < 0) return detail::invalid("--max-new = ", options.max_new, ": must not be negative");
  if (!(options.needed >= 0)) return detail::invalid("--needed = ", options.needed, ": must not be negative");
  if (options.instruction_set.empty()) return {};
  const Result<InstructionSet> set = instruction_set_of(options.instruction_set);
  if (!set) return detail::invalid("--instruction-set: ", set.status().message());
  if (Status s = use_instruction_set(*set); !s)
    return detail::error(StatusCode::unsupported, "--instruction-set: ", s.message());
  return {};
}

/// The policies by name, without the full cache, which is beside all of them.
[[nodiscard]] Result<std::vector<ReportPolicy>> find_policies(const std::string& text) {
  const Result<std::vector<PolicySpec>> specs = parse_policies(text);
  if (!specs) return specs.status();
  std::vector<ReportPolicy> policies;
  std::set<std::string> seen;
  for (const PolicySpec& spec : *specs) {
    const Result<PolicyEntry> entry = find_policy(spec.name);
    if (!entry) return detail::invalid("--policies: ", entry.status().message());
    if (!seen.insert(spec.text).second) return detail::invalid("--policies: '", spec.text, "' stands there twice");
    if (spec.name != "full") policies.push_back({spec, *entry});
  }
  if (policies.empty()) return detail::invalid("--policies = ", text, ": has no policy that evicts");
  return policies;
}

[[nodiscard]] Result<std::vector<ProblemResult>> read_all(const std::vector<std::filesystem::path>& files) {
  std::vector<ProblemResult> all;
  std::set<std::tuple<std::string, index_t, std::string>> seen;
  for (const std::filesystem::path& file : files) {
    Result<std::vector<ProblemResult>> read = read_results(file);
    if (!read) return detail::error(read.status().code(), "--results = ", file.string(), ": ", read.status().message());
    if (read->empty()) return detail::invalid("--results = ", file.string(), ": has no results");
    for (ProblemResult& r : *read) {
      const bool is_new = seen.emplace(r.policy, r.budget, r.problem).second;
      if (!is_new && r.policy == "full") continue;  // every run has it
      if (!is_new)
        return detail::invalid("--results = ", file.string(), ": ", r.policy, " at ", r.budget, " on problem '", r.problem,
                               "' is in another file, too");
      all.push_back(std::move(r));
    }
  }
  return all;
}

/// Results of other problems than those given would be a table of nobody knows what.
[[nodiscard]] Status check_problems(const std::vector<ProblemResult>& results, const std::vector<Problem>& problems) {
  std::set<std::string> ids;
  for (const Problem& problem : problems) ids.insert(problem.id);
  for (const ProblemResult& r : results)
    if (!ids.contains(r.problem)) return detail::invalid("--results: problem '", r.problem, "' is not among --prompts");
  return {};
}

/// Makes each policy once, so that what cannot work is known before anything runs.
[[nodiscard]] Status try_policies(const engine::Model& model, const std::vector<ReportPolicy>& policies,
                                  const std::vector<index_t>& budgets) {
  Result<engine::Session> session = engine::Session::make(model, 1);
  if (!session) return session.status();
  for (const ReportPolicy& policy : policies)
    for (const index_t budget : budgets) {
      Settings settings(policy.spec.text, policy.spec.settings, {});
      const PolicyRequest request{.model = &model, .budget = budget};
      const Result<std::unique_ptr<ModelPolicy>> trial = policy.entry.make(request, settings, *session);
      if (!trial) return detail::invalid(policy.spec.text, " at budget ", budget, ": ", trial.status().message());
    }
  return {};
}

/// Makes the folder and sees whether a page can be written there. Leaves no file that was not there.
[[nodiscard]] Status make_room(const std::filesystem::path& directory) {
  std::error_code error;
  if (std::filesystem::create_directories(directory, error); error)
    return detail::invalid("DIR = ", directory.string(), ": cannot be made: ", error.message());
  const std::filesystem::path page = directory / "index.html";
  const bool was_there = std::filesystem::exists(page, error);
  const bool works = std::ofstream(page, std::ios::app).is_open();
  if (works && !was_there) std::filesystem::remove(page, error);
  if (!works) return detail::invalid("DIR = ", directory.string(), ": index.html cannot be written there");
  return {};
}

[[nodiscard]] Result<std::vector<Problem>> choose(std::vector<Problem> all, const ReportOptions& options) {
  std::vector<Problem> chosen = take_evenly(all, options.limit);
  const auto is_it = [&](const Problem& p) { return p.id == options.problem; };
  if (options.problem.empty() || std::any_of(chosen.begin(), chosen.end(), is_it)) return chosen;
  const auto found = std::find_if(all.begin(), all.end(), is_it);
  if (found == all.end()) return detail::invalid("--problem = ", options.problem, ": no problem has this id");
  chosen.push_back(*found);
  return chosen;
}

/// A prompt in words where the model has some, else its ids.
[[nodiscard]] std::string words_of(const Problem& problem, const std::filesystem::path& model) {
  if (const Result<engine::Vocabulary> words = engine::Vocabulary::load(model / "vocab.json"); words)
    if (Result<std::string> text = words->decode(problem.prompt); text) return *text;
  std::string ids;
  for (const int id : problem.prompt) ids.append(ids.empty() ? "" : " ").append(std::to_string(id));
  return ids;
}

[[nodiscard]] std::string today() {
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  localtime_r(&now, &local);
  char text[32];
  return {text, std::strftime(text, sizeof text, "%Y-%m-%d", &local)};
}

}  // namespace

Status report(const ReportOptions& options) {
  if (Status s = check(options); !s) return s;
  const Result<std::vector<ReportPolicy>> policies = find_policies(options.policies);
  if (!policies) return policies.status();
  const Result<std::vector<index_t>> budgets = parse_budgets(options.budgets);
  if (!budgets) return budgets.status();
  Result<std::vector<ProblemResult>> results = read_all(options.results);
  if (!results) return results.status();
  const Result<engine::Model> model = engine::Model::load(options.model);
  if (!model) return detail::invalid("--model = ", options.model.string(), ": ", model.status().message());
  Result<std::vector<Problem>> loaded = load_problems(options.prompts, options.model, model->vocab_size());
  if (!loaded) return loaded.status();
  if (Status s = check_problems(*results, *loaded); !s) return s;
  const Result<std::vector<Problem>> problems = choose(*loaded, options);
  if (!problems) return problems.status();
  std::vector<index_t> tried{options.budget};
  if (options.results.empty()) tried.insert(tried.end(), budgets->begin(), budgets->end());
  if (Status s = try_policies(*model, *policies, tried); !s) return s;
  if (Status s = make_room(options.directory); !s) return s;

  std::vector<ReportTask> tasks;
  for (const Problem& problem : *problems) {
    ReportTask task{problem, {}, {}};
    task.how = {.max_new = max_new_of(problem, *loaded, options.max_new), .eos = model->config().eos_ids, .compare = false};
    Result<FullText> full = generate_full(*model, problem, task.how);
    if (!full) return full.status();
    task.full = std::move(*full);
    tasks.push_back(std::move(task));
  }
  // A folder is called by its last name, with or without a slash behind it.
  const std::filesystem::path folder = std::filesystem::absolute(options.model / "").lexically_normal().parent_path();
  ReportData data{.model = folder.filename().string(),
                  .weights = model->weight_count(),
                  .layers = model->layers(),
                  .shape = model->shape(),
                  .prompts = options.prompts.filename().string(),
                  .problems = static_cast<index_t>(tasks.size()),
                  .instruction_set = name_of(instruction_set()),
                  .date = options.date.empty() ? today() : options.date,
                  .command = options.command,
                  .budget = options.budget,
                  .repeats = options.repeats,
                  .needed = options.needed};
  for (const std::filesystem::path& file : options.results) data.files.push_back(file.filename().string());
  for (const ReportPolicy& policy : *policies) data.policies.push_back(policy.spec.text);
  if (options.results.empty()) {
    results = measure_accuracy(*model, tasks, *policies, *budgets);
    if (!results) return results.status();
  }
  data.accuracy = accuracy_rows(*results);
  if (Status s = measure_regret(*model, tasks, *policies, options.problem, data); !s) return s;
  if (Status s = measure_latency(*model, tasks, *policies, data); !s) return s;
  for (const ReportTask& task : tasks)
    if (task.problem.id == data.map_problem) data.map_text = words_of(task.problem, options.model);

  const std::filesystem::path page = options.directory / "index.html";
  std::ofstream out(page);
  out << page_of(data);
  out.close();
  if (!out) return detail::invalid("DIR = ", options.directory.string(), ": index.html cannot be written there");
  std::printf("%s\n", page.string().c_str());
  return {};
}

}  // namespace beaconkv::lab
