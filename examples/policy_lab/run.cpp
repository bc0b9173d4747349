// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "policy_lab/run.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <mutex>
#include <optional>
#include <set>
#include <thread>

#include "beaconkv/policy/schedule.hpp"
#include "policy_lab/evaluation.hpp"
#include "policy_lab/results.hpp"
#include "policy_lab/table.hpp"

namespace beaconkv::lab {
namespace {

/// How far a row is: one line that is written over on a terminal, a plain line every ten seconds elsewhere. To stderr, so that
/// the table can be redirected.
class Progress {
 public:
  Progress(std::string label, std::size_t total)
      : label_(std::move(label)), total_(total), terminal_(isatty(STDERR_FILENO) == 1) {}
  ~Progress() {
    if (terminal_) std::fprintf(stderr, "\r\033[K");
  }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void advance() {
    const std::lock_guard lock(mutex_);
    ++done_;
    const auto now = std::chrono::steady_clock::now();
    if (terminal_) {
      constexpr std::size_t width = 30;
      const std::size_t filled = width * done_ / total_;
      std::fprintf(stderr, "\r\033[K%s [%s%s] %zu/%zu", label_.c_str(), std::string(filled, '#').c_str(),
                   std::string(width - filled, '.').c_str(), done_, total_);
      std::fflush(stderr);
    } else if (now - last_ > std::chrono::seconds(10)) {
      std::fprintf(stderr, "%s: %zu of %zu problems\n", label_.c_str(), done_, total_);
      last_ = now;
    }
  }

 private:
  std::string label_;
  std::size_t total_;
  std::size_t done_ = 0;
  bool terminal_;
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
  std::mutex mutex_;
};

/// `work(i)` for all `i < count` on some threads. The error of the lowest `i` that failed is returned; after an error nothing
/// new begins.
template <class Work>
[[nodiscard]] Status for_each_problem(std::size_t count, index_t threads, const std::string& label, Work&& work) {
  Progress progress(label, count);
  std::atomic<std::size_t> next{0};
  std::atomic<bool> failed{false};
  std::vector<Status> errors(count);
  const auto loop = [&] {
    for (std::size_t i = next++; i < count && !failed; i = next++) {
      errors[i] = work(i);
      if (!errors[i].ok()) failed = true;
      progress.advance();
    }
  };
  std::vector<std::thread> others;
  for (index_t t = 1; t < threads; ++t) others.emplace_back(loop);
  loop();
  for (std::thread& t : others) t.join();
  for (Status& error : errors)
    if (!error.ok()) return error;
  return {};
}

struct Job {
  PolicySpec spec;
  PolicyEntry entry;
  index_t budget = 0;  ///< 0: none
  std::optional<index_t> budget_min{};
  std::vector<Outcome> outcomes{};  ///< of each problem
};

[[nodiscard]] std::string pass_text(const RunOptions& options, index_t pass) {
  return options.repeats == 1 ? "" : ", run " + std::to_string(pass + 1) + " of " + std::to_string(options.repeats);
}

[[nodiscard]] Settings settings_of(const Job& job, const RunOptions& options) {
  return {job.spec.text, job.spec.settings, options.settings};
}

/// Every row that was asked for. Policies are made once for a trial, so that what cannot work is known before anything runs.
[[nodiscard]] Result<std::vector<Job>> plan_jobs(const engine::Model& model, const RunOptions& options, PolicyRequest request) {
  Result<std::vector<PolicySpec>> specs = parse_policies(options.policies);
  if (!specs) return specs.status();
  const Result<std::vector<index_t>> budgets = parse_budgets(options.budgets);
  if (!budgets) return budgets.status();
  Result<engine::Session> session = engine::Session::make(model, 1);
  if (!session) return session.status();
  std::vector<Job> jobs;
  std::set<std::string> known;
  for (const PolicySpec& spec : *specs) {
    const Result<PolicyEntry> entry = find_policy(spec.name);
    if (!entry) return entry.status();
    const bool has_budget = spec.name != "full";
    for (const index_t budget : has_budget ? *budgets : std::vector<index_t>{0}) {
      Job job{spec, *entry, budget};
      Settings settings = settings_of(job, options);
      request.budget = budget;
      const Result<std::unique_ptr<ModelPolicy>> trial = entry->maker(request)(request, settings, *session);
      if (!trial)
        return detail::invalid(spec.text, has_budget ? " at budget " + std::to_string(budget) : "", ": ",
                               trial.status().message());
      job.budget_min = (*trial)->budget_min();
      known.insert(settings.known().begin(), settings.known().end());
      jobs.push_back(std::move(job));
    }
  }
  for (const auto& setting : options.settings)
    if (!known.contains(setting.first)) return detail::invalid("none of the policies has the setting '", setting.first, "'");
  return jobs;
}

/// The full cache as if it were a policy.
[[nodiscard]] std::vector<Outcome> outcomes_of_full(const std::vector<Problem>& problems, const std::vector<FullText>& texts,
                                                    const std::vector<int>& eos, std::size_t bytes_per_token) {
  std::vector<Outcome> outcomes;
  for (std::size_t i = 0; i < problems.size(); ++i) {
    Outcome o;
    o.steps = texts[i].steps;
    o.same_text = true;
    o.exact = problems[i].answer.empty() || problems[i].answered_by(texts[i].tokens, eos);
    o.peak_kv_bytes = (problems[i].prompt.size() + texts[i].tokens.size() - 1) * bytes_per_token;
    outcomes.push_back(std::move(o));
  }
  return outcomes;
}

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

[[nodiscard]] Status choose_instruction_set(const std::string& text) {
  if (text.empty()) return {};
  const Result<InstructionSet> set = instruction_set_of(text);
  if (!set) return detail::invalid("--instruction-set: ", set.status().message());
  if (Status s = use_instruction_set(*set); !s)
    return detail::error(StatusCode::unsupported, "--instruction-set: ", s.message());
  return {};
}

/// The full cache's texts; a second pass measures only.
[[nodiscard]] Status write_texts(const engine::Model& model, const std::vector<Problem>& problems,
                                 const std::vector<EvaluationOptions>& how, const RunOptions& options, index_t pass,
                                 std::vector<FullText>& texts) {
  return for_each_problem(problems.size(), options.threads, "full cache" + pass_text(options, pass), [&](std::size_t i) {
    Result<FullText> text = generate_full(model, problems[i], how[i]);
    if (!text) return text.status();
    if (pass == 0)
      texts[i] = std::move(*text);
    else
      keep_least(texts[i].steps, text->steps);
    return Status();
  });
}

/// A job on every problem; a second pass measures only.
[[nodiscard]] Status run_job(Job& job, const engine::Model& model, const std::vector<Problem>& problems,
                             const std::vector<FullText>& texts, const std::vector<EvaluationOptions>& how,
                             const RunOptions& options, PolicyRequest request, index_t pass) {
  request.budget = job.budget;
  job.outcomes.resize(problems.size());
  const std::string label = job.spec.text + " at " + std::to_string(job.budget);
  return for_each_problem(problems.size(), options.threads, label + pass_text(options, pass), [&](std::size_t i) {
    EvaluationOptions this_time = how[i];
    this_time.compare = this_time.compare && pass == 0;
    this_time.answer = pass == 0;
    Result<Outcome> outcome = evaluate(model, job.entry, request, settings_of(job, options), problems[i], texts[i], this_time);
    if (!outcome) return detail::invalid("problem ", problems[i].id, ", ", label, ": ", outcome.status().message());
    if (pass == 0)
      job.outcomes[i] = std::move(*outcome);
    else
      keep_least(job.outcomes[i].steps, outcome->steps);
    return Status();
  });
}

}  // namespace

Status run(const RunOptions& given) {
  RunOptions options = given;
  if (options.limit < 0) return detail::invalid("--limit = ", options.limit, ": must not be negative");
  if (options.threads < 0) return detail::invalid("--threads = ", options.threads, ": must not be negative");
  if (options.repeats < 1) return detail::invalid("--repeats = ", options.repeats, ": must be at least 1");
  if (options.layers_per_step < 0)
    return detail::invalid("--layers-per-step = ", options.layers_per_step, ": must not be negative");
  if (options.max_new < 0) return detail::invalid("--max-new = ", options.max_new, ": must not be negative");
  if (options.seed < 0) return detail::invalid("--seed = ", options.seed, ": must not be negative");
  if (options.threads == 0) options.threads = std::max<index_t>(1, static_cast<index_t>(std::thread::hardware_concurrency()));
  if (Status s = choose_instruction_set(options.instruction_set); !s) return s;
  const Result<engine::Model> model = engine::Model::load(options.model);
  if (!model) return detail::invalid("--model = ", options.model.string(), ": ", model.status().message());
  Result<std::vector<Problem>> loaded = load_problems(options.prompts, options.model, model->vocab_size());
  if (!loaded) return loaded.status();
  const std::vector<Problem> problems = take_evenly(std::move(*loaded), options.limit);
  const PolicyRequest request{
      .model = &*model, .as_published = options.as_published, .seed = options.seed, .layers_per_step = options.layers_per_step};
  Result<std::vector<Job>> jobs = plan_jobs(*model, options, request);
  if (!jobs) return jobs.status();

  if (!options.csv.empty())  // better now than after the first row
    if (Status s = write_csv(options.csv, {}); !s) return s;
  if (!options.results.empty())
    if (Status s = write_results(options.results, {}); !s) return detail::invalid("--results = ", s.message());
  if (!options.plot.empty())
    if (Status s = check_gnuplot(); !s) return s;

  const std::vector<int>& eos = model->config().eos_ids;
  std::vector<EvaluationOptions> how(problems.size());
  for (std::size_t i = 0; i < problems.size(); ++i)
    how[i] = {.max_new = max_new_of(problems[i], problems, options.max_new), .eos = eos, .compare = options.compare};

  std::printf("%s: %td weights, %td layers; %zu problems; %s; %s\n", options.model.string().c_str(), model->weight_count(),
              model->layers(), problems.size(),
              options.as_published ? "each policy as published" : "one rule for all: prompt kept, on top of the budget",
              name_of(instruction_set()));
  std::size_t width = 14;
  for (const Job& job : *jobs) width = std::max(width, job.spec.text.size());
  std::printf("%s\n", table_header(width).c_str());
  std::fflush(stdout);

  std::vector<FullText> texts(problems.size());
  for (index_t pass = 0; pass + 1 < options.repeats; ++pass) {  // the policies take turns, so that all see the same weather
    if (Status s = write_texts(*model, problems, how, options, pass, texts); !s) return s;
    for (Job& job : *jobs)
      if (job.budget > 0)
        if (Status s = run_job(job, *model, problems, texts, how, options, request, pass); !s) return s;
  }
  const index_t last = options.repeats - 1;
  if (Status s = write_texts(*model, problems, how, options, last, texts); !s) return s;
  std::vector<Row> rows;
  std::vector<ProblemResult> results;
  for (Job& job : *jobs) {
    if (job.budget == 0) {
      const auto bytes =
          static_cast<std::size_t>(2 * model->layers() * model->shape().kv_heads * model->shape().head_dim) * sizeof(float);
      job.outcomes = outcomes_of_full(problems, texts, eos, bytes);
    } else {
      if (Status s = run_job(job, *model, problems, texts, how, options, request, last); !s) return s;
    }
    const bool compared = job.budget == 0 || options.compare;
    rows.push_back(summarise(problems, job.outcomes, compared));
    name(rows.back(), job);
    compare_with_rpc(rows, *jobs);
    std::printf("%s\n", table_line(rows.back(), width).c_str());
    std::fflush(stdout);
    if (!options.csv.empty())
      if (Status s = write_csv(options.csv, rows); !s) return s;
    if (options.results.empty()) continue;
    for (std::size_t i = 0; i < problems.size(); ++i)
      results.push_back(result_of(job.spec.text, job.budget, problems[i], job.outcomes[i], compared));
    if (Status s = write_results(options.results, results); !s) return detail::invalid("--results = ", s.message());
  }
  if (!options.plot.empty()) return write_plot(options.plot, rows);
  return {};
}

}  // namespace beaconkv::lab
