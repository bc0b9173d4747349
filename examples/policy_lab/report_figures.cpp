// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "policy_lab/report_figures.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <set>

#include "policy_lab/svg.hpp"

namespace beaconkv::lab {
namespace {

constexpr double label_width = 136;
constexpr std::size_t most_labels = 20;

[[nodiscard]] std::string panel(std::string_view title, const Plot& plot, std::string_view description) {
  return element("div", " class=\"panel\"",
                 joined({element("p", " class=\"panel-title\"", escaped(title)), plot.svg(description)}));
}

[[nodiscard]] std::string panels(std::string_view content) { return element("div", " class=\"panels\"", content); }

[[nodiscard]] std::string missing(std::string_view text) { return element("p", " class=\"missing\"", escaped(text)); }

[[nodiscard]] std::string range_of(const Interval& interval) {
  return joined({percent(interval.low), "\u2013", percent(interval.high)});
}

[[nodiscard]] std::vector<index_t> budgets_of(const ReportData& data) {
  std::set<index_t> budgets;
  for (const AccuracyRow& row : data.accuracy)
    if (row.budget > 0) budgets.insert(row.budget);
  return {budgets.begin(), budgets.end()};
}

[[nodiscard]] std::vector<std::string> policies_of(const ReportData& data) {
  std::vector<std::string> policies;
  for (const AccuracyRow& row : data.accuracy)
    if (std::find(policies.begin(), policies.end(), row.policy) == policies.end()) policies.push_back(row.policy);
  return policies;
}

/// The rows of a policy, of one level alone where that is given.
[[nodiscard]] std::vector<AccuracyRow> rows_of(const ReportData& data, const std::string& policy, const int* level) {
  std::vector<AccuracyRow> rows;
  for (AccuracyRow row : data.accuracy) {
    if (row.policy != policy) continue;
    if (level != nullptr) {
      const auto found = row.by_level.find(*level);
      if (found == row.by_level.end()) continue;
      row.right = found->second.first;
      row.of = found->second.second;
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

[[nodiscard]] std::vector<Tick> ticks_at(const std::vector<double>& values, int digits, const char* unit = "") {
  std::vector<Tick> ticks;
  for (const double value : values) ticks.push_back({value, joined({fixed(value, digits), unit})});
  return ticks;
}

[[nodiscard]] Axis budget_axis(const std::vector<index_t>& budgets) {
  Axis axis{.scale = Scale::logarithmic,
            .low = static_cast<double>(budgets.front()) / 1.12,
            .high = static_cast<double>(budgets.back()) * 1.12,
            .title = "budget, tokens"};
  for (std::size_t i = 0; i < budgets.size(); i += budgets.size() / 8 + 1)
    axis.ticks.push_back({static_cast<double>(budgets[i]), std::to_string(budgets[i])});
  return axis;
}

[[nodiscard]] Plot accuracy_plot(const ReportData& data, const std::vector<index_t>& budgets, const int* level) {
  const std::vector<std::string> policies = policies_of(data);
  double low = 1;
  for (const std::string& policy : policies)
    for (const AccuracyRow& row : rows_of(data, policy, level)) low = std::min(low, row.interval().low);
  const Axis x = budget_axis(budgets);
  const double foot = std::clamp(std::floor(10 * low) * 10, 0.0, 90.0);
  Plot plot(x, {.low = foot, .high = 100, .ticks = ticks_at(linear_ticks(foot, 100, 6), 0), .title = "exact answers, %"}, 340,
            label_width);
  // Those of the command line come last, on top.
  std::vector<std::string> order = policies;
  std::stable_partition(order.begin(), order.end(), [&](const std::string& p) { return style_of(data, p) == "grey"; });
  const double own = static_cast<double>(data.policies.size());
  for (const std::string& policy : order) {
    const std::string style = style_of(data, policy);
    const auto number = std::find(data.policies.begin(), data.policies.end(), policy) - data.policies.begin();
    const double shift = style == "grey" ? 0 : 3 * (static_cast<double>(number) - (own - 1) / 2);
    std::vector<Point> points;
    bool dashed = false;
    for (const AccuracyRow& row : rows_of(data, policy, level)) {
      const double exact = 100 * row.share();
      if (row.budget == 0) {
        points = {{x.low, exact}, {x.high, exact}};
        dashed = true;
        break;
      }
      points.push_back({static_cast<double>(row.budget), exact});
      const Interval interval = row.interval();
      if (style != "grey") plot.whisker(points.back().x, 100 * interval.low, 100 * interval.high, style, shift);
      plot.mark(points.back(), style,
                joined({policy, " at ", std::to_string(row.budget), ": ", percent(row.share()), " % (", range_of(interval),
                        "), ", std::to_string(row.right), " of ", std::to_string(row.of)}),
                shift);
    }
    if (points.empty()) continue;
    if (points.size() > 1) plot.line(points, style, dashed, dashed ? 0 : shift);
    // Labels stand on the right: none for a curve that ends before.
    const bool ends_there = dashed || points.back().x == static_cast<double>(budgets.back());
    if (style != "grey" || (ends_there && policies.size() <= most_labels)) plot.label(points.back(), policy, style);
  }
  return plot;
}

/// What the results lack: policies of the command line, or some problems.
[[nodiscard]] std::string lacking(const ReportData& data) {
  const std::vector<std::string> there = policies_of(data);
  std::string names;
  for (const std::string& policy : data.policies)
    if (std::find(there.begin(), there.end(), policy) == there.end()) names.append(names.empty() ? "" : ",").append(policy);
  std::string notes;
  for (const AccuracyRow& row : data.accuracy)
    if (notes.empty() && row.of != data.accuracy.front().of)
      notes = missing("Not all policies were run on the same problems: see the column of problems in the numbers below.");
  if (names.empty()) return notes;
  return notes + missing(joined({"There are no results of ", names, ". To get them: policy_lab run --policies ", names,
                                 " --results FILE, then --results FILE here, beside the others."}));
}

}  // namespace

std::string percent(double share) { return fixed(100 * share, 1); }

std::string style_of(const ReportData& data, const std::string& policy) {
  if (policy == "full") return "full";
  const auto found = std::find(data.policies.begin(), data.policies.end(), policy);
  return found == data.policies.end() ? "grey" : joined({"c", std::to_string((found - data.policies.begin()) % 8)});
}

std::string figure(std::string_view name, std::string_view caption, std::string_view panels, std::string_view below) {
  return element("figure", "",
                 joined({"\n", panels, element("figcaption", "", joined({element("b", "", joined({name, "."})), " ", caption})),
                         "\n", below}));
}

Table accuracy_table(const ReportData& data) {
  const std::vector<index_t> budgets = budgets_of(data);
  std::map<index_t, index_t> best;  // of a budget, in ten-thousandths
  for (const AccuracyRow& row : data.accuracy)
    if (row.budget > 0) best[row.budget] = std::max(best[row.budget], std::lround(1e4 * row.share()));
  Table table{.heads = {"exact answers, %"}};
  for (const index_t budget : budgets) table.heads.push_back(joined({"at ", std::to_string(budget)}));
  for (const std::string& policy : policies_of(data)) {
    std::vector<Cell> cells{{policy}};
    const std::vector<AccuracyRow> rows = rows_of(data, policy, nullptr);
    for (const index_t budget : budgets) {
      cells.push_back({"\u2013"});
      for (const AccuracyRow& row : rows)  // the full cache has no budget: the same everywhere
        if (row.budget == budget || row.budget == 0)
          cells.back() = {percent(row.share()), range_of(row.interval()),
                          row.budget > 0 && std::lround(1e4 * row.share()) == best[budget]};
    }
    table.rows.push_back(std::move(cells));
  }
  return table;
}

Table cost_table(const ReportData& data) {
  std::set<int> levels;
  for (const AccuracyRow& row : data.accuracy)
    for (const auto& entry : row.by_level) levels.insert(entry.first);
  std::string level_names;
  for (const int level : levels) level_names.append(level_names.empty() ? "" : "/").append(std::to_string(level));
  Table table{.heads = {"policy", "budget", "problems", "exact, %", joined({"at level ", level_names}), "policy, % of decoding",
                        "state, bytes", "KV at most, bytes", "KL, nats a token", "regret, %"}};
  for (const AccuracyRow& row : data.accuracy) {
    std::string by_level;
    for (const int level : levels) {
      const auto counts = row.by_level.find(level);
      by_level.append(by_level.empty() ? "" : "/")
          .append(counts == row.by_level.end()
                      ? "\u2013"
                      : fixed(100 * static_cast<double>(counts->second.first) / static_cast<double>(counts->second.second), 0));
    }
    table.rows.push_back({{row.policy},
                          {row.budget > 0 ? std::to_string(row.budget) : "none"},
                          {std::to_string(row.of)},
                          {percent(row.share()), range_of(row.interval())},
                          {by_level},
                          {row.budget > 0 ? percent(row.policy_share) : "0"},
                          {grouped(static_cast<std::int64_t>(row.state_bytes))},
                          {grouped(static_cast<std::int64_t>(row.peak_kv_bytes))},
                          {row.kl ? fixed(*row.kl, 4) : "\u2013"},
                          {row.regret ? percent(*row.regret) : "\u2013"}});
  }
  return table;
}

std::string accuracy_figure(const ReportData& data) {
  const std::vector<index_t> budgets = budgets_of(data);
  if (budgets.empty())
    return figure(
        "Figure 1", "Exact answers over the budget.",
        missing("The results have no policy with a budget. To get some: policy_lab run --results FILE, then --results "
                "FILE here."),
        "");
  std::set<int> levels;
  for (const AccuracyRow& row : data.accuracy)
    for (const auto& entry : row.by_level) levels.insert(entry.first);
  std::string content = panel("All problems", accuracy_plot(data, budgets, nullptr),
                              "Exact answers over the budget, a curve for each policy; the numbers are in the table below");
  if (levels.size() > 1)
    content.append(panel(joined({"The hardest: level ", std::to_string(*levels.rbegin())}),
                         accuracy_plot(data, budgets, &*levels.rbegin()), "The same for the problems of the highest level"));
  return figure("Figure 1",
                "Exact answers over the budget (generated tokens that a KV head may hold; logarithmic). Whiskers: 95 % "
                "intervals (Wilson), moved apart sideways. Grey: policies that are in the results but were not named for this "
                "page. The dashed line is the full cache.",
                panels(content), joined({lacking(data), details("Numbers of figure 1", html_of(cost_table(data)))}));
}

std::string regret_figure(const ReportData& data) {
  double most = 0;
  double most_of_layer = 0;
  for (const RegretCurve& curve : data.regret) {
    most = std::max(most, 100 * *std::max_element(curve.by_part.begin(), curve.by_part.end()));
    most_of_layer = std::max(most_of_layer, 100 * *std::max_element(curve.by_layer.begin(), curve.by_layer.end()));
  }
  const auto upwards = [](double top) {
    const double high = top > 0 ? 1.05 * top : 1;
    return Axis{.high = high, .ticks = ticks_at(linear_ticks(0, high, 6), high < 3 ? 1 : 0), .title = "regret, %"};
  };
  Axis time{.high = 100, .ticks = ticks_at({0, 25, 50, 75, 100}, 0), .title = "share of the text, %"};
  Plot over_time(time, upwards(most), 300, label_width);
  Axis by_layer{.low = -0.3, .high = static_cast<double>(data.layers) - 0.7, .title = "layer"};
  for (index_t l = 0; l < data.layers; l += data.layers / 16 + 1)
    by_layer.ticks.push_back({static_cast<double>(l), std::to_string(l)});
  Plot over_layers(by_layer, upwards(most_of_layer), 300, label_width);
  Table table{.heads = {"policy", "regret, %", "1st quarter", "2nd", "3rd", "4th"}};
  for (index_t l = 0; l < data.layers; ++l) table.heads.push_back(joined({"layer ", std::to_string(l)}));
  table.heads.insert(table.heads.end(), {"needed and gone", "found far back, %", "exact"});
  for (const RegretCurve& curve : data.regret) {
    const std::string style = style_of(data, curve.policy);
    std::vector<Point> points;
    constexpr auto parts = static_cast<double>(RegretCurve::parts);
    for (const double regret : curve.by_part)
      points.push_back({(static_cast<double>(points.size()) + 0.5) / parts * 100, 100 * regret});
    over_time.line(points, style);
    over_time.label(points.back(), curve.policy, style);
    std::vector<Point> layers;
    for (const double regret : curve.by_layer) layers.push_back({static_cast<double>(layers.size()), 100 * regret});
    over_layers.line(layers, style);
    for (const Point& p : layers)
      over_layers.mark(p, style, joined({curve.policy, ", layer ", fixed(p.x, 0), ": ", fixed(p.y, 2), " %"}));
    over_layers.label(layers.back(), curve.policy, style);
    std::vector<Cell> cells{{curve.policy}, {fixed(100 * curve.mean, 2)}};
    for (std::size_t quarter = 0; quarter < 4; ++quarter) {
      double sum = 0;
      for (std::size_t i = 0; i < RegretCurve::parts / 4; ++i) sum += curve.by_part[quarter * RegretCurve::parts / 4 + i];
      cells.push_back({fixed(100 * sum / (parts / 4), 2)});
    }
    for (const double regret : curve.by_layer) cells.push_back({fixed(100 * regret, 2)});
    cells.push_back({std::to_string(curve.needed)});
    cells.push_back(
        {curve.wanted > 0 ? percent(static_cast<double>(curve.found) / static_cast<double>(curve.wanted)) : "\u2013"});
    cells.push_back({joined({std::to_string(curve.right), " of ", std::to_string(data.problems)})});
    table.rows.push_back(std::move(cells));
  }
  return figure(
      "Figure 2",
      joined(
          {"Regret at ", std::to_string(data.budget),
           " tokens: the share of the full cache\u2019s attention that falls on tokens which the policy has evicted, along the "
           "full cache\u2019s text. Left: over time, mean over ",
           std::to_string(data.problems), " problems, layers and heads. Right: by layer."}),
      panels(joined({panel("Over time", over_time, "Regret over time, a curve for each policy"),
                     panel("By layer", over_layers, "Mean regret of each layer, a curve for each policy")})),
      details("Numbers of figure 2",
              joined({html_of(table),
                      element("p", " class=\"note\"",
                              joined({"Needed and gone: evicted tokens, counted in each layer and KV head, to which a "
                                      "later query gives a weight above ",
                                      coordinate(data.needed),
                                      ". Found far back: of the four strongest keys of queries that look more than 64 "
                                      "tokens back on average, those that the policy still held."}))})));
}

}  // namespace beaconkv::lab
