// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "policy_lab/swept.hpp"

#include <algorithm>
#include <cstdio>

namespace beaconkv::lab {
namespace {

[[nodiscard]] std::string fixed(double value, int digits, bool sign = false) {
  char text[64];
  std::snprintf(text, sizeof text, sign ? "%+.*f" : "%.*f", digits, value);
  return text;
}

[[nodiscard]] std::string interval_text(const Interval& i, bool sign) {
  return "[" + fixed(100 * i.low, 1, sign) + ", " + fixed(100 * i.high, 1, sign) + "]";
}

[[nodiscard]] std::string p_text(double p) { return p < 0.0001 ? "<0.0001" : fixed(p, 4); }

[[nodiscard]] std::string levels_text(const SweptRow& row) {
  std::string text;
  for (const auto& [level, counts] : row.by_level)
    text.append(text.empty() ? "" : "/")
        .append(fixed(100.0 * static_cast<double>(counts.first) / static_cast<double>(counts.second), 0));
  return text;
}

[[nodiscard]] std::vector<std::string> cells_of(const SweptRow& row) {
  std::vector<std::string> cells{row.policy,
                                 row.budget > 0 ? std::to_string(row.budget) : "-",
                                 std::to_string(row.problems),
                                 fixed(100 * row.share(), 1),
                                 interval_text(wilson_interval(row.right, row.problems), false),
                                 levels_text(row)};
  if (row.against_base) {
    const Paired& pair = *row.against_base;
    for (const std::string& cell :
         {fixed(100 * pair.difference(), 1, true), interval_text(paired_interval(pair), true),
          "+" + std::to_string(pair.fixed) + "/-" + std::to_string(pair.broken), p_text(mcnemar_p(pair))})
      cells.push_back(cell);
  } else {
    cells.insert(cells.end(), {"-", "-", "-", "-"});
  }
  cells.push_back(row.kl ? fixed(*row.kl, 4) : "-");
  cells.push_back(row.regret ? fixed(100 * *row.regret, 2) : "-");
  cells.push_back(fixed(100 * row.policy_share, 1));
  cells.push_back(std::to_string(row.state_bytes));
  return cells;
}

const std::vector<std::string> names{
    "policy",        "budget",       "n", "exact%", "95 % interval", "by level", "against base",
    "95 % interval", "fixed/broken", "p", "KL",     "regret%",       "policy%",  "state bytes"};
const std::vector<std::size_t> widths{0, 6, 4, 6, 14, 12, 12, 14, 12, 7, 6, 7, 7, 11};

}  // namespace

Status ResultTable::add(const std::vector<ProblemResult>& results) {
  for (const ProblemResult& r : results) {
    if (!rows_[{r.policy, r.budget}].emplace(r.problem, r).second)
      return detail::invalid("results: ", r.policy, " at ", r.budget, " on problem '", r.problem, "' is there twice");
    if (known_.insert(r.problem).second) problems_.push_back({.id = r.problem, .level = r.level});
  }
  return {};
}

std::vector<Problem> ResultTable::problems(index_t limit) const { return take_evenly(problems_, limit); }

Result<const ProblemResult*> ResultTable::find(const Key& key, const std::string& problem) const {
  const Results& row = rows_.at(key);
  const auto result = row.find(problem);
  if (result == row.end())
    return detail::invalid("results: the row ", key.first, " at ", key.second, " has no problem '", problem, "'");
  return &result->second;
}

Result<SweptRow> ResultTable::row(const std::string& policy, index_t budget, const std::string* base,
                                  const std::vector<Problem>& problems) const {
  for (const std::string* name : {&policy, base})
    if (name != nullptr && rows_.find({*name, budget}) == rows_.end())
      return detail::invalid("results: there is no row ", *name, " at ", budget);
  SweptRow row{.policy = policy, .budget = budget, .problems = static_cast<index_t>(problems.size())};
  double kl = 0, regret = 0, model_us = 0, policy_us = 0;
  bool compared = true;
  Paired pair{.problems = row.problems};
  for (const Problem& problem : problems) {
    const Result<const ProblemResult*> found = find({policy, budget}, problem.id);
    if (!found) return found.status();
    const ProblemResult& r = **found;
    row.right += r.exact ? 1 : 0;
    auto& [right, of] = row.by_level[r.level];
    right += r.exact ? 1 : 0;
    ++of;
    compared = compared && r.kl && r.regret;
    kl += r.kl.value_or(0);
    regret += r.regret.value_or(0);
    model_us += r.model_us;
    policy_us += r.policy_us;
    row.state_bytes = std::max(row.state_bytes, r.state_bytes);
    if (base == nullptr) continue;
    const Result<const ProblemResult*> other = find({*base, budget}, problem.id);
    if (!other) return other.status();
    pair.fixed += r.exact && !(*other)->exact ? 1 : 0;
    pair.broken += !r.exact && (*other)->exact ? 1 : 0;
  }
  if (base != nullptr) row.against_base = pair;
  if (compared && row.problems > 0) {
    row.kl = kl / static_cast<double>(row.problems);
    row.regret = regret / static_cast<double>(row.problems);
  }
  if (model_us + policy_us > 0) row.policy_share = policy_us / (model_us + policy_us);
  return row;
}

std::string SweptLines::join(const std::vector<std::string>& cells) const {
  std::string line = markdown_ ? "|" : "";
  for (std::size_t i = 0; i < cells.size(); ++i) {
    if (markdown_) {
      line.append(" ").append(i == 0 ? "`" + cells[i] + "`" : cells[i]).append(" |");
      continue;
    }
    const std::size_t width = i == 0 ? policy_width_ : widths[i];
    const std::string space(width > cells[i].size() ? width - cells[i].size() : 0, ' ');
    line.append(i == 0 ? "" : " ").append(i == 0 ? cells[i] + space : space + cells[i]);
  }
  return line;
}

std::string SweptLines::header() const {
  if (!markdown_) return join(names);
  std::string head = "|";
  std::string rule = "|";
  for (std::size_t i = 0; i < names.size(); ++i) {
    head.append(" ").append(names[i]).append(" |");
    rule.append(i == 0 ? "---|" : "---:|");
  }
  return head + "\n" + rule;
}

std::string SweptLines::group(const std::string& name) const {
  if (!markdown_) return "-- " + name;
  std::string line = "| *" + name + "* |";
  for (std::size_t i = 1; i < names.size(); ++i) line.append(" |");
  return line;
}

std::string SweptLines::line(const SweptRow& row) const { return join(cells_of(row)); }

}  // namespace beaconkv::lab
