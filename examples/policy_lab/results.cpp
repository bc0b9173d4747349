// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "policy_lab/results.hpp"

#include <algorithm>
#include <fstream>
#include <set>
#include <tuple>

#include "policy_lab/json_reader.hpp"

namespace beaconkv::lab {
namespace {

[[nodiscard]] json json_of(const std::optional<double>& value) { return value ? json(*value) : json(nullptr); }

[[nodiscard]] std::string line_of(const ProblemResult& r) {
  const json line{{"policy", r.policy},
                  {"budget", r.budget},
                  {"problem", r.problem},
                  {"level", r.level},
                  {"exact", r.exact},
                  {"same_text", r.same_text},
                  {"kl", json_of(r.kl)},
                  {"regret", json_of(r.regret)},
                  {"steps", r.steps},
                  {"evictions", r.evictions},
                  {"model_us", r.model_us},
                  {"policy_us", r.policy_us},
                  {"step_p50_us", r.step_p50_us},
                  {"step_max_us", r.step_max_us},
                  {"peak_kv_bytes", r.peak_kv_bytes},
                  {"state_bytes", r.state_bytes}};
  return line.dump(-1, ' ', false, json::error_handler_t::replace);
}

[[nodiscard]] Result<ProblemResult> parse_result(std::string_view line, const std::string& where) {
  const Result<json> value = engine::parse_json(line, where);
  if (!value) return detail::error(StatusCode::damaged, value.status().message());
  ProblemResult r;
  JsonReader reader(where);
  const json& v = *value;
  const bool read =
      reader.has_keys(v, "the result",
                      {"policy", "budget", "problem", "level", "exact", "same_text", "kl", "regret", "steps", "evictions",
                       "model_us", "policy_us", "step_p50_us", "step_max_us", "peak_kv_bytes", "state_bytes"}) &&
      reader.read_text(v["policy"], "policy", r.policy) && reader.read_count(v["budget"], "budget", r.budget) &&
      reader.read_text(v["problem"], "problem", r.problem) && reader.read_count(v["level"], "level", r.level) &&
      reader.read_flag(v["exact"], "exact", r.exact) && reader.read_flag(v["same_text"], "same_text", r.same_text) &&
      reader.read_amount(v["kl"], "kl", r.kl) && reader.read_amount(v["regret"], "regret", r.regret) &&
      reader.read_count(v["steps"], "steps", r.steps) && reader.read_count(v["evictions"], "evictions", r.evictions) &&
      reader.read_amount(v["model_us"], "model_us", r.model_us) &&
      reader.read_amount(v["policy_us"], "policy_us", r.policy_us) &&
      reader.read_amount(v["step_p50_us"], "step_p50_us", r.step_p50_us) &&
      reader.read_amount(v["step_max_us"], "step_max_us", r.step_max_us) &&
      reader.read_count(v["peak_kv_bytes"], "peak_kv_bytes", r.peak_kv_bytes) &&
      reader.read_count(v["state_bytes"], "state_bytes", r.state_bytes);
  if (!read) return reader.status();
  return r;
}

}  // namespace

ProblemResult result_of(const std::string& policy, index_t budget, const Problem& problem, const Outcome& outcome,
                        bool compared) {
  ProblemResult r{.policy = policy,
                  .budget = budget,
                  .problem = problem.id,
                  .level = problem.level,
                  .exact = outcome.exact,
                  .same_text = outcome.same_text,
                  .steps = static_cast<index_t>(outcome.steps.size()),
                  .peak_kv_bytes = outcome.peak_kv_bytes,
                  .state_bytes = outcome.state_bytes};
  if (compared) {
    r.kl = outcome.kl;
    r.regret = std::max(0.0, 1 - outcome.mass_kept);
  }
  std::vector<double> steps;
  for (const StepTime& step : outcome.steps) {
    r.evictions += step.evicted ? 1 : 0;
    r.model_us += step.model_us;
    r.policy_us += step.policy_us;
    steps.push_back(step.model_us + step.policy_us);
  }
  if (!steps.empty()) {
    std::sort(steps.begin(), steps.end());
    r.step_p50_us = steps[(steps.size() - 1) / 2];
    r.step_max_us = steps.back();
  }
  return r;
}

void add_results(const Job& job, const std::vector<Problem>& problems, std::vector<ProblemResult>& results) {
  for (std::size_t i = 0; i < problems.size(); ++i)
    results.push_back(result_of(job.spec.text, job.budget, problems[i], job.outcomes[i], job.compared));
}

Status write_results(const std::filesystem::path& file, const std::vector<ProblemResult>& results) {
  std::ofstream out(file);
  for (const ProblemResult& result : results) out << line_of(result) << '\n';
  out.close();
  if (!out) return detail::invalid(file.string(), ": cannot be written");
  return {};
}

Result<std::vector<ProblemResult>> read_results(const std::filesystem::path& file) {
  std::ifstream in(file);
  if (!in) return detail::invalid(file.string(), ": cannot be read");
  std::vector<ProblemResult> results;
  std::set<std::tuple<std::string, index_t, std::string>> seen;
  std::string text;
  for (index_t number = 1; std::getline(in, text); ++number) {
    const std::string where = file.filename().string() + " line " + std::to_string(number);
    Result<ProblemResult> result = parse_result(text, where);
    if (!result) return result.status();
    if (!seen.emplace(result->policy, result->budget, result->problem).second)
      return detail::error(StatusCode::damaged, where, ": ", result->policy, " at ", result->budget, " on problem '",
                           result->problem, "' is there twice");
    results.push_back(std::move(*result));
  }
  return results;
}

}  // namespace beaconkv::lab
