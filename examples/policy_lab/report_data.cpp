// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "policy_lab/report_data.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "policy_lab/replay.hpp"

namespace beaconkv::lab {
namespace {

constexpr position_t map_distance = 8;  // nearer keys always stay

[[nodiscard]] Status failed(const ReportPolicy& policy, const ReportTask& task, const Status& status) {
  return detail::error(status.code(), policy.spec.text, " on problem ", task.problem.id, ": ", status.message());
}

/// What the regret of a policy is made of, over all problems.
class RegretSum {
 public:
  RegretSum(std::string policy, index_t layers) : layers_(layers) {
    curve_.policy = std::move(policy);
    curve_.by_layer.resize(static_cast<std::size_t>(layers));
  }

  void add(const Replay& replay, const ReportTask& task, double needed, bool exact) {
    curve_.right += exact ? 1 : 0;
    for (const LostToken& token : replay.lost()) curve_.needed += token.peak > needed ? 1 : 0;
    if (replay.steps().empty()) return;
    ++problems_;
    const auto prompt = static_cast<position_t>(task.problem.prompt.size());
    const auto length = static_cast<position_t>(task.full.tokens.size()) - 1;  // decode steps
    std::array<double, RegretCurve::parts> sum{};
    std::array<double, RegretCurve::parts> count{};
    const auto n = static_cast<double>(replay.steps().size());
    for (const HeadStep& s : replay.steps()) {
      const auto part = static_cast<std::size_t>((s.position - prompt) * static_cast<position_t>(sum.size()) / length);
      sum[part] += s.regret;
      ++count[part];
      curve_.mean += s.regret / n;
      curve_.by_layer[static_cast<std::size_t>(s.layer)] += s.regret * static_cast<double>(layers_) / n;
      curve_.wanted += s.wanted;
      curve_.found += s.found;
    }
    for (std::size_t part = 0; part < sum.size(); ++part) {
      if (count[part] == 0) continue;  // a text of fewer steps than parts
      curve_.by_part[part] += sum[part] / count[part];
      ++filled_[part];
    }
  }
  [[nodiscard]] RegretCurve means() const {
    RegretCurve curve = curve_;
    const double n = std::max(1.0, problems_);
    curve.mean /= n;
    for (double& regret : curve.by_layer) regret /= n;
    for (std::size_t part = 0; part < curve.by_part.size(); ++part) curve.by_part[part] /= std::max(1.0, filled_[part]);
    return curve;
  }

 private:
  index_t layers_;
  RegretCurve curve_{};
  double problems_ = 0;
  std::array<double, RegretCurve::parts> filled_{};
};

/// A policy's evictions on a task.
struct Logged {
  std::vector<EvictionEvent> events{};
  bool exact = false;
};

/// The task whose map is shown: the one asked for; else the first that some answer and others do not; else the first.
[[nodiscard]] std::size_t task_of_map(const std::vector<ReportTask>& tasks, const std::vector<std::vector<Logged>>& logged,
                                      const std::string& problem) {
  for (std::size_t t = 0; t < tasks.size(); ++t)
    if (!problem.empty() && tasks[t].problem.id == problem) return t;
  for (std::size_t t = 0; t < tasks.size(); ++t)
    for (const std::vector<Logged>& of_policy : logged)
      if (of_policy[t].exact != logged[0][t].exact) return t;
  return 0;
}

}  // namespace

double quantile(const std::vector<double>& values, double share) {
  if (values.empty()) return 0;
  const auto rank = static_cast<std::size_t>(std::ceil(share * static_cast<double>(values.size())));
  return values[std::clamp<std::size_t>(rank, 1, values.size()) - 1];
}

std::vector<AccuracyRow> accuracy_rows(const std::vector<ProblemResult>& results) {
  struct Sum {
    AccuracyRow row;
    double kl = 0, regret = 0, model_us = 0, policy_us = 0;
    bool has_kl = true, has_regret = true;
  };
  std::vector<std::string> order;
  std::map<std::pair<std::size_t, index_t>, Sum> sums;
  for (const ProblemResult& r : results) {
    const auto known = std::find(order.begin(), order.end(), r.policy);
    const auto at = static_cast<std::size_t>(known - order.begin());
    if (known == order.end()) order.push_back(r.policy);
    Sum& sum = sums[{at, r.budget}];
    AccuracyRow& row = sum.row;
    row.policy = r.policy;
    row.budget = r.budget;
    auto& [right, of] = row.by_level[r.level];
    right += r.exact ? 1 : 0;
    ++of;
    row.right += r.exact ? 1 : 0;
    ++row.of;
    sum.kl += r.kl.value_or(0);
    sum.regret += r.regret.value_or(0);
    sum.has_kl = sum.has_kl && r.kl;
    sum.has_regret = sum.has_regret && r.regret;
    sum.model_us += r.model_us;
    sum.policy_us += r.policy_us;
    row.peak_kv_bytes = std::max(row.peak_kv_bytes, r.peak_kv_bytes);
    row.state_bytes = std::max(row.state_bytes, r.state_bytes);
  }
  std::vector<AccuracyRow> rows;
  for (auto& entry : sums) {
    Sum& sum = entry.second;
    const auto n = static_cast<double>(sum.row.of);
    if (sum.has_kl) sum.row.kl = sum.kl / n;
    if (sum.has_regret) sum.row.regret = sum.regret / n;
    if (const double us = sum.model_us + sum.policy_us; us > 0) sum.row.policy_share = sum.policy_us / us;
    rows.push_back(std::move(sum.row));
  }
  return rows;
}

Result<std::vector<ProblemResult>> measure_accuracy(const engine::Model& model, const std::vector<ReportTask>& tasks,
                                                    const std::vector<ReportPolicy>& policies,
                                                    const std::vector<index_t>& budgets) {
  std::vector<ProblemResult> results;
  const index_t numbers = 2 * model.layers() * model.shape().kv_heads * model.shape().head_dim;
  for (const ReportTask& task : tasks) {
    Outcome full{.same_text = true, .steps = task.full.steps};
    full.exact = task.problem.answer.empty() || task.problem.answered_by(task.full.tokens, task.how.eos);
    full.peak_kv_bytes =
        (task.problem.prompt.size() + task.full.tokens.size() - 1) * static_cast<std::size_t>(numbers) * sizeof(float);
    results.push_back(result_of("full", 0, task.problem, full, true));
  }
  for (const ReportPolicy& policy : policies)
    for (const index_t budget : budgets) {
      std::fprintf(stderr, "accuracy: %s at %td\n", policy.spec.text.c_str(), budget);
      for (const ReportTask& task : tasks) {
        EvaluationOptions how = task.how;
        how.compare = true;
        const Result<Outcome> outcome = evaluate(model, policy.entry, {.budget = budget},
                                                 {policy.spec.text, policy.spec.settings, {}}, task.problem, task.full, how);
        if (!outcome) return failed(policy, task, outcome.status());
        results.push_back(result_of(policy.spec.text, budget, task.problem, *outcome, true));
      }
    }
  return results;
}

Status measure_regret(const engine::Model& model, const std::vector<ReportTask>& tasks,
                      const std::vector<ReportPolicy>& policies, const std::string& problem, ReportData& data) {
  std::vector<std::vector<Logged>> logged;  // [policies][tasks]
  for (const ReportPolicy& policy : policies) {
    std::fprintf(stderr, "regret: %s at %td\n", policy.spec.text.c_str(), data.budget);
    RegretSum sum(policy.spec.text, model.layers());
    logged.emplace_back();
    for (const ReportTask& task : tasks) {
      EventLog log;
      EvaluationOptions how = task.how;
      how.log = &log;
      const Result<Outcome> outcome = evaluate(model, policy.entry, {.budget = data.budget},
                                               {policy.spec.text, policy.spec.settings, {}}, task.problem, task.full, how);
      if (!outcome) return failed(policy, task, outcome.status());
      logged.back().push_back({log.take(), outcome->exact});
      const Result<Replay> replay = replay_events(model, task.problem, task.full, logged.back().back().events, {});
      if (!replay) return failed(policy, task, replay.status());
      sum.add(*replay, task, data.needed, outcome->exact);
    }
    data.regret.push_back(sum.means());
  }

  const std::size_t shown = task_of_map(tasks, logged, problem);
  const ReportTask& task = tasks[shown];
  data.map_problem = task.problem.id;
  data.map_level = task.problem.level;
  data.map_span = {static_cast<position_t>(task.problem.prompt.size()),
                   static_cast<position_t>(task.problem.prompt.size() + task.full.tokens.size()) - 1};
  data.map_distance = map_distance;
  for (std::size_t p = 0; p < policies.size(); ++p) {
    KeptMap map{policies[p].spec.text, logged[p][shown].exact, {}};
    for (index_t l = 0; l < model.layers(); ++l)
      for (index_t h = 0; h < model.shape().kv_heads; ++h)
        map.heads.push_back(kept_runs(logged[p][shown].events, l, h, data.map_span));
    data.maps.push_back(std::move(map));
  }
  Result<std::vector<std::vector<Need>>> needs = needs_of(model, task.problem, task.full, data.needed, map_distance);
  if (!needs) return needs.status();
  data.needs = std::move(*needs);
  return {};
}

Status measure_latency(const engine::Model& model, const std::vector<ReportTask>& tasks,
                       const std::vector<ReportPolicy>& policies, ReportData& data) {
  std::fprintf(stderr, "latency at %td\n", data.budget);
  std::vector<Latency> all{{"full", 0, {}, {}}};
  for (const ReportPolicy& policy : policies)
    for (const index_t layers : {0, 1}) all.push_back({policy.spec.text, layers, {}, {}});
  for (const ReportTask& task : tasks) {
    std::vector<std::vector<StepTime>> times(all.size());
    for (index_t repeat = 0; repeat < data.repeats; ++repeat)
      for (std::size_t i = 0; i < all.size(); ++i) {  // in turn, so that all see the same weather
        std::vector<StepTime> steps;
        if (i == 0) {
          Result<FullText> full = generate_full(model, task.problem, task.how);
          if (!full) return full.status();
          steps = std::move(full->steps);
        } else {
          const ReportPolicy& policy = policies[(i - 1) / 2];
          EvaluationOptions how = task.how;
          how.answer = false;
          Result<Outcome> outcome =
              evaluate(model, policy.entry, {.budget = data.budget, .layers_per_step = all[i].layers_per_step},
                       {policy.spec.text, policy.spec.settings, {}}, task.problem, task.full, how);
          if (!outcome) return failed(policy, task, outcome.status());
          steps = std::move(outcome->steps);
        }
        if (repeat == 0)
          times[i] = std::move(steps);
        else
          keep_least(times[i], steps);
      }
    for (std::size_t i = 0; i < all.size(); ++i)
      for (const StepTime& step : times[i]) {
        all[i].steps.push_back(step.model_us + step.policy_us);
        if (step.evicted) all[i].evictions.push_back(step.policy_us);
      }
  }
  for (Latency& latency : all) {
    std::sort(latency.steps.begin(), latency.steps.end());
    std::sort(latency.evictions.begin(), latency.evictions.end());
  }
  data.latency = std::move(all);
  return {};
}

}  // namespace beaconkv::lab
