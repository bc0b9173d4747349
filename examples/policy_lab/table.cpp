// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "policy_lab/table.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <set>

namespace beaconkv::lab {
namespace {

[[nodiscard]] std::string fixed(double value, int digits) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}

[[nodiscard]] std::string signed_fixed(double value, int digits) { return (value < 0 ? "" : "+") + fixed(value, digits); }

/// The value below which a share of the ascending `values` lies (nearest rank).
[[nodiscard]] double percentile(const std::vector<double>& values, double share) {
  if (values.empty()) return 0;
  const auto rank = static_cast<std::size_t>(std::ceil(share * static_cast<double>(values.size())));
  return values[std::clamp<std::size_t>(rank, 1, values.size()) - 1];
}

[[nodiscard]] std::string by_level(const Row& row) {
  std::string text;
  for (const auto& [level, counts] : row.exact_by_level)
    text.append(text.empty() ? "" : "/")
        .append(fixed(100.0 * static_cast<double>(counts.first) / static_cast<double>(counts.second), 0));
  return text;
}

[[nodiscard]] std::string padded(const std::string& text, std::size_t width, bool left) {
  const std::string space(width > text.size() ? width - text.size() : 0, ' ');
  return left ? text + space : space + text;
}

/// Policy names may hold commas only inside settings, and quotes never; quoting is for readers that split at commas.
[[nodiscard]] std::string csv_field(const std::string& text) {
  return text.find_first_of(",\"") == std::string::npos ? text : '"' + text + '"';
}

}  // namespace

Row summarise(const std::vector<Problem>& problems, const std::vector<Outcome>& outcomes, bool compared) {
  Row row;
  row.problems = static_cast<index_t>(outcomes.size());
  row.compared = compared;
  std::vector<double> steps;
  std::vector<double> evictions;
  index_t exact = 0;
  index_t same = 0;
  double model_us = 0;
  double policy_us = 0;
  for (std::size_t i = 0; i < outcomes.size(); ++i) {
    const Outcome& o = outcomes[i];
    auto& [right, of] = row.exact_by_level[problems[i].level];
    right += o.exact ? 1 : 0;
    ++of;
    exact += o.exact ? 1 : 0;
    same += o.same_text ? 1 : 0;
    row.mean_kl += o.kl;
    row.attention_mass_kept += o.mass_kept;
    row.peak_kv_bytes = std::max(row.peak_kv_bytes, o.peak_kv_bytes);
    row.state_bytes = std::max(row.state_bytes, o.state_bytes);
    if (o.prompt_eviction_us) evictions.push_back(*o.prompt_eviction_us);
    std::vector<double> own_steps;
    for (const StepTime& step : o.steps) {
      model_us += step.model_us;
      policy_us += step.policy_us;
      own_steps.push_back(step.model_us + step.policy_us);
      if (step.evicted) evictions.push_back(step.policy_us);
    }
    std::sort(own_steps.begin(), own_steps.end());
    if (const double median = percentile(own_steps, 0.5); median > 0)
      row.worst_step = std::max(row.worst_step, own_steps.back() / median);
    steps.insert(steps.end(), own_steps.begin(), own_steps.end());
  }
  const auto n = static_cast<double>(std::max<index_t>(1, row.problems));
  row.exact_percent = 100 * static_cast<double>(exact) / n;
  row.same_text_percent = 100 * static_cast<double>(same) / n;
  row.mean_kl /= n;
  row.attention_mass_kept /= n;
  if (const double us = model_us + policy_us; us > 0) {
    row.tokens_per_second = 1e6 * static_cast<double>(steps.size()) / us;
    row.policy_percent = 100 * policy_us / us;
  }
  std::sort(steps.begin(), steps.end());
  row.step_p50_us = percentile(steps, 0.5);
  std::sort(evictions.begin(), evictions.end());
  row.evictions = static_cast<index_t>(evictions.size());
  row.evict_p50_us = percentile(evictions, 0.5);
  row.evict_p99_us = percentile(evictions, 0.99);
  row.evict_max_us = evictions.empty() ? 0 : evictions.back();
  return row;
}

const std::vector<std::string>& column_names() {
  static const std::vector<std::string> names{"policy",
                                              "budget_max",
                                              "budget_min",
                                              "problems",
                                              "exact_percent",
                                              "exact_by_level",
                                              "same_text_percent",
                                              "mean_kl",
                                              "attention_mass_kept",
                                              "peak_kv_bytes",
                                              "state_bytes",
                                              "tokens_per_second",
                                              "speed_against_rpc_percent",
                                              "policy_percent",
                                              "step_p50_us",
                                              "worst_step",
                                              "evictions",
                                              "evict_p50_us",
                                              "evict_p99_us",
                                              "evict_max_us"};
  return names;
}

std::vector<std::string> cells(const Row& row) {
  const bool evicted = row.evictions > 0;
  return {row.policy,
          row.budget_max,
          row.budget_min,
          std::to_string(row.problems),
          fixed(row.exact_percent, 1),
          by_level(row),
          fixed(row.same_text_percent, 1),
          row.compared ? fixed(row.mean_kl, 4) : "-",
          row.compared ? fixed(row.attention_mass_kept, 4) : "-",
          std::to_string(row.peak_kv_bytes),
          std::to_string(row.state_bytes),
          fixed(row.tokens_per_second, 0),
          row.speed_against_rpc_percent ? signed_fixed(*row.speed_against_rpc_percent, 1) : "-",
          fixed(row.policy_percent, 1),
          fixed(row.step_p50_us, 0),
          fixed(row.worst_step, 2),
          std::to_string(row.evictions),
          evicted ? fixed(row.evict_p50_us, 0) : "-",
          evicted ? fixed(row.evict_p99_us, 0) : "-",
          evicted ? fixed(row.evict_max_us, 0) : "-"};
}

namespace {

/// Column heads of the terminal table: two short words above each other would be more than a terminal is wide.
const std::vector<std::string> short_names{"policy",  "max",   "min",      "n",     "exact%", "by level", "same%",
                                           "KL",      "mass",  "KV bytes", "state", "tok/s",  "vs rpc",   "policy%",
                                           "step us", "worst", "evict",    "p50us", "p99us",  "maxus"};
const std::vector<std::size_t> widths{0, 6, 6, 4, 6, 12, 6, 7, 6, 9, 8, 6, 6, 7, 7, 6, 6, 6, 6, 6};

[[nodiscard]] std::string line_of(const std::vector<std::string>& values, std::size_t policy_width) {
  std::string line = padded(values[0], policy_width, true);
  for (std::size_t i = 1; i < values.size(); ++i) line.append(" ").append(padded(values[i], widths[i], false));
  return line;
}

}  // namespace

std::string table_header(std::size_t policy_width) { return line_of(short_names, policy_width); }
std::string table_line(const Row& row, std::size_t policy_width) { return line_of(cells(row), policy_width); }

Status write_csv(const std::filesystem::path& file, const std::vector<Row>& rows) {
  std::ofstream out(file);
  const auto write = [&](const std::vector<std::string>& values) {
    for (std::size_t i = 0; i < values.size(); ++i) out << (i == 0 ? "" : ",") << csv_field(values[i]);
    out << '\n';
  };
  write(column_names());
  for (const Row& row : rows) write(cells(row));
  out.close();
  if (!out) return detail::invalid("--csv = ", file.string(), ": cannot be written");
  return {};
}

Status check_gnuplot() {
  if (std::system("command -v gnuplot > /dev/null 2>&1") == 0) return {};
  return detail::error(StatusCode::unsupported,
                       "--plot needs gnuplot, which is not installed; the table and --csv do without it");
}

namespace {

/// The command and the data of one picture: a column over the budget, a curve for each policy. Without a budget: a level line.
[[nodiscard]] std::string curves(const std::vector<Row>& rows, const std::vector<std::string>& policies, double left,
                                 double right, double Row::*column) {
  std::string command;
  std::string data;
  for (const std::string& policy : policies) {
    command.append(command.empty() ? "plot " : ", ")
        .append("'-' title '")
        .append(policy)
        .append("' noenhanced linewidth 2 pointsize 1.2");
    for (const Row& row : rows) {
      if (row.policy != policy) continue;
      const std::string value = " " + fixed(row.*column, 3) + "\n";
      if (row.budget_max != "-")
        data.append(row.budget_max).append(value);
      else
        data.append(fixed(left, 3)).append(value).append(fixed(right, 3)).append(value);
    }
    data.append("e\n");
  }
  return command + "\n" + data;
}

}  // namespace

Status write_plot(const std::filesystem::path& file, const std::vector<Row>& rows) {
  if (Status s = check_gnuplot(); !s) return s;
  std::vector<std::string> policies;
  for (const Row& row : rows)
    if (std::find(policies.begin(), policies.end(), row.policy) == policies.end()) policies.push_back(row.policy);
  std::set<double> budgets;
  for (const Row& row : rows)
    if (row.budget_max != "-") budgets.insert(std::stod(row.budget_max));
  if (budgets.empty()) return detail::invalid("--plot = ", file.string(), ": no row has a budget to plot over");

  FILE* const gnuplot = popen("gnuplot 2>&1", "w");
  if (gnuplot == nullptr) return detail::invalid("--plot = ", file.string(), ": gnuplot does not start");
  const double left = *budgets.begin() * 0.9;
  const double right = *budgets.rbegin() * 1.1;
  const std::string script = "set terminal pngcairo size 900,1000\nset output '" + file.string() +
                             "'\nset xlabel 'budget (generated tokens kept per KV head, at most)'\n"
                             "set key outside right\nset grid\nset style data linespoints\nset xrange [" +
                             fixed(left, 3) + ":" + fixed(right, 3) + "]\nset multiplot layout 2,1\n" +
                             "set ylabel 'exact answers, %'\nset yrange [-2:102]\n" +
                             curves(rows, policies, left, right, &Row::exact_percent) +
                             "set ylabel 'policy, % of the time of decoding'\nset yrange [0:*]\n" +
                             curves(rows, policies, left, right, &Row::policy_percent) + "unset multiplot\n";
  std::fputs(script.c_str(), gnuplot);
  if (pclose(gnuplot) != 0) return detail::invalid("--plot = ", file.string(), ": gnuplot failed, see its message above");
  return {};
}

}  // namespace beaconkv::lab
