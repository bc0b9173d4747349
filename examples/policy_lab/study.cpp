// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "policy_lab/study.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <mutex>
#include <set>
#include <thread>

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
  for (index_t t = 1; t < std::min(threads, static_cast<index_t>(count)); ++t) others.emplace_back(loop);
  loop();
  for (std::thread& t : others) t.join();
  for (Status& error : errors)
    if (!error.ok()) return error;
  return {};
}

[[nodiscard]] Status choose_instruction_set(const std::string& text) {
  if (text.empty()) return {};
  const Result<InstructionSet> set = instruction_set_of(text);
  if (!set) return detail::invalid("--instruction-set: ", set.status().message());
  if (Status s = use_instruction_set(*set); !s)
    return detail::error(StatusCode::unsupported, "--instruction-set: ", s.message());
  return {};
}

[[nodiscard]] Status check(const RunOptions& options) {
  if (options.limit < 0) return detail::invalid("--limit = ", options.limit, ": must not be negative");
  if (options.threads < 0) return detail::invalid("--threads = ", options.threads, ": must not be negative");
  if (options.repeats < 1) return detail::invalid("--repeats = ", options.repeats, ": must be at least 1");
  if (options.layers_per_step < 0)
    return detail::invalid("--layers-per-step = ", options.layers_per_step, ": must not be negative");
  if (options.max_new < 0) return detail::invalid("--max-new = ", options.max_new, ": must not be negative");
  if (options.seed < 0) return detail::invalid("--seed = ", options.seed, ": must not be negative");
  return {};
}

}  // namespace

Result<Study> Study::make(const RunOptions& options) {
  const Result<std::vector<PolicySpec>> specs = parse_policies(options.policies);
  if (!specs) return specs.status();
  const Result<std::vector<index_t>> budgets = parse_budgets(options.budgets);
  if (!budgets) return budgets.status();
  std::vector<JobRequest> jobs;
  for (const PolicySpec& spec : *specs)
    for (const index_t budget : spec.name == "full" ? std::vector<index_t>{0} : *budgets) jobs.push_back({spec.text, budget});
  return make(options, jobs);
}

Result<Study> Study::make(const RunOptions& options, const std::vector<JobRequest>& jobs) {
  if (Status s = check(options); !s) return s;
  Study study;
  study.options_ = options;
  if (options.threads == 0)
    study.options_.threads = std::max<index_t>(1, static_cast<index_t>(std::thread::hardware_concurrency()));
  if (Status s = choose_instruction_set(options.instruction_set); !s) return s;
  if (options.model.empty()) return detail::invalid("--model: must be given");
  if (options.prompts.empty()) return detail::invalid("--prompts: must be given");
  Result<engine::Model> model = engine::Model::load(options.model);
  if (!model) return detail::invalid("--model = ", options.model.string(), ": ", model.status().message());
  study.model_ = std::make_unique<engine::Model>(std::move(*model));
  Result<std::vector<Problem>> loaded = load_problems(options.prompts, options.model, study.model_->vocab_size());
  if (!loaded) return loaded.status();
  study.problems_ = take_evenly(std::move(*loaded), options.limit);
  if (Status s = study.plan_jobs(jobs); !s) return s;
  for (const Problem& problem : study.problems_)
    study.how_.push_back({.max_new = max_new_of(problem, study.problems_, options.max_new),
                          .eos = study.model_->config().eos_ids,
                          .compare = options.compare});
  return study;
}

PolicyRequest Study::request() const {
  return {.model = model_.get(),
          .as_published = options_.as_published,
          .seed = options_.seed,
          .layers_per_step = options_.layers_per_step};
}

/// Policies are made once for a trial, so that what cannot work is known before anything runs.
Status Study::plan_jobs(const std::vector<JobRequest>& wanted) {
  Result<engine::Session> session = engine::Session::make(*model_, 1);
  if (!session) return session.status();
  std::set<std::string> known;
  PolicyRequest request = this->request();
  for (const JobRequest& job_request : wanted) {
    const Result<std::vector<PolicySpec>> specs = parse_policies(job_request.policy);
    if (!specs) return specs.status();
    const PolicySpec& spec = specs->front();
    const Result<PolicyEntry> entry = find_policy(spec.name);
    if (!entry) return entry.status();
    for (const Job& other : jobs_)
      if (other.spec.text == spec.text && other.budget == job_request.budget)
        return detail::invalid("--policies: ", spec.text,
                               job_request.budget > 0 ? " at " + std::to_string(job_request.budget) : "",
                               " stands there twice");
    Job job{spec, *entry, job_request.budget};
    job.compared = job.budget == 0 || options_.compare;
    Settings settings = settings_of(job);
    request.budget = job.budget;
    const Result<std::unique_ptr<ModelPolicy>> trial = entry->maker(request)(request, settings, *session);
    if (!trial)
      return detail::invalid(spec.text, job.budget > 0 ? " at budget " + std::to_string(job.budget) : "", ": ",
                             trial.status().message());
    job.budget_min = (*trial)->budget_min();
    known.insert(settings.known().begin(), settings.known().end());
    jobs_.push_back(std::move(job));
  }
  for (const auto& setting : options_.settings)
    if (!known.contains(setting.first)) return detail::invalid("none of the policies has the setting '", setting.first, "'");
  return {};
}

Status Study::run(const std::function<Status(const Job&)>& finished) {
  texts_.resize(problems_.size());
  for (index_t pass = 0; pass + 1 < options_.repeats; ++pass) {  // the policies take turns, so that all see the same weather
    if (Status s = write_texts(pass); !s) return s;
    for (Job& job : jobs_)
      if (job.budget > 0)
        if (Status s = run_job(job, pass); !s) return s;
  }
  const index_t last = options_.repeats - 1;
  if (Status s = write_texts(last); !s) return s;
  for (Job& job : jobs_) {
    if (job.budget == 0)
      job.outcomes = outcomes_of_full();
    else if (Status s = run_job(job, last); !s)
      return s;
    if (Status s = finished(job); !s) return s;
  }
  return {};
}

std::string Study::pass_text(index_t pass) const {
  return options_.repeats == 1 ? "" : ", run " + std::to_string(pass + 1) + " of " + std::to_string(options_.repeats);
}

/// The full cache's texts; a second pass measures only.
Status Study::write_texts(index_t pass) {
  return for_each_problem(problems_.size(), options_.threads, "full cache" + pass_text(pass), [&](std::size_t i) {
    Result<FullText> text = generate_full(*model_, problems_[i], how_[i]);
    if (!text) return text.status();
    if (pass == 0)
      texts_[i] = std::move(*text);
    else
      keep_least(texts_[i].steps, text->steps);
    return Status();
  });
}

/// The full cache as if it were a policy.
std::vector<Outcome> Study::outcomes_of_full() const {
  const auto bytes_per_token =
      static_cast<std::size_t>(2 * model_->layers() * model_->shape().kv_heads * model_->shape().head_dim) * sizeof(float);
  std::vector<Outcome> outcomes;
  for (std::size_t i = 0; i < problems_.size(); ++i) {
    Outcome o;
    o.steps = texts_[i].steps;
    o.same_text = true;
    o.exact = problems_[i].answer.empty() || problems_[i].answered_by(texts_[i].tokens, how_[i].eos);
    o.peak_kv_bytes = (problems_[i].prompt.size() + texts_[i].tokens.size() - 1) * bytes_per_token;
    outcomes.push_back(std::move(o));
  }
  return outcomes;
}

/// A job on every problem; a second pass measures only.
Status Study::run_job(Job& job, index_t pass) {
  PolicyRequest request = this->request();
  request.budget = job.budget;
  job.outcomes.resize(problems_.size());
  const std::string label = job.spec.text + " at " + std::to_string(job.budget);
  return for_each_problem(problems_.size(), options_.threads, label + pass_text(pass), [&](std::size_t i) {
    EvaluationOptions this_time = how_[i];
    this_time.compare = this_time.compare && pass == 0;
    this_time.answer = pass == 0;
    Result<Outcome> outcome = evaluate(*model_, job.entry, request, settings_of(job), problems_[i], texts_[i], this_time);
    if (!outcome) return detail::invalid("problem ", problems_[i].id, ", ", label, ": ", outcome.status().message());
    if (pass == 0)
      job.outcomes[i] = std::move(*outcome);
    else
      keep_least(job.outcomes[i].steps, outcome->steps);
    return Status();
  });
}

}  // namespace beaconkv::lab
