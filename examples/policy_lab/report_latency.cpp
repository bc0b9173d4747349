// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

// The figure of latencies.

#include <algorithm>
#include <cmath>

#include "policy_lab/report_figures.hpp"
#include "policy_lab/svg.hpp"

namespace beaconkv::lab {
namespace {

using Values = std::vector<double> Latency::*;

/// Quantiles at places that are evenly far apart on the axis, up to `last` or to the second longest value: the very longest is
/// chance, and would make the axis.
[[nodiscard]] std::vector<Point> quantile_curve(const std::vector<double>& values, double last) {
  std::vector<Point> points;
  if (values.empty()) return points;
  const double most = std::min(last, 1 - 1 / static_cast<double>(values.size()));
  for (double nines = 0; nines < -std::log10(1 - most); nines += 0.04)
    points.push_back({1 - std::pow(10, -nines), quantile(values, 1 - std::pow(10, -nines))});
  points.push_back({most, std::min(quantile(values, most), values[values.size() < 2 ? 0 : values.size() - 2])});
  return points;
}

/// The curves that share one pair of axes: all policies, one way of evicting.
[[nodiscard]] std::string quantile_panel(const ReportData& data, Values values, index_t layers_per_step,
                                         const std::string& title) {
  constexpr double last = 0.9995;
  double low = INFINITY;
  double high = 0;
  for (const Latency& latency : data.latency)  // both ways: panels side by side share their axes
    for (const Point& point : quantile_curve(latency.*values, last)) {
      low = std::min(low, point.y);
      high = std::max(high, point.y);
    }
  low = high > 0 ? std::max(low, 0.1) : 1;  // nothing was timed: any axis
  high = std::max(high, 2 * low);
  std::vector<Tick> times;
  for (const double value : logarithmic_ticks(low, high, 10)) times.push_back({value, coordinate(value)});
  Plot plot({.scale = Scale::nines,
             .high = last,
             .ticks = {{0, "0"}, {0.5, "50"}, {0.9, "90"}, {0.99, "99"}, {0.999, "99.9"}},
             .title = "quantile, %"},
            {.scale = Scale::logarithmic, .low = low, .high = high, .ticks = times, .title = "\u00b5s"}, 300, 136);
  for (const Latency& latency : data.latency) {
    const bool full = latency.policy == "full";
    if ((!full && latency.layers_per_step != layers_per_step) || (latency.*values).empty()) continue;
    const std::vector<Point> points = quantile_curve(latency.*values, last);
    const std::string style = style_of(data, latency.policy);
    plot.line(points, style, full);
    plot.label(points.back(), latency.policy, style);
  }
  return element("div", " class=\"panel\"",
                 joined({element("p", " class=\"panel-title\"", escaped(title)),
                         plot.svg(joined({title, ": time over quantiles, a curve for each policy"}))}));
}

[[nodiscard]] Table latency_table(const ReportData& data) {
  Table table{.heads = {"policy", "evicting", "steps", "p50, \u00b5s", "p90", "p99", "p99.9", "longest", "evictions",
                        "p50, \u00b5s", "p99", "longest"}};
  for (const Latency& latency : data.latency) {
    std::vector<Cell> cells{{latency.policy},
                            {latency.policy == "full" ? "never" : (latency.layers_per_step == 0 ? "all layers" : "one a step")},
                            {std::to_string(latency.steps.size())}};
    for (const double share : {0.5, 0.9, 0.99, 0.999, 1.0}) cells.push_back({fixed(quantile(latency.steps, share), 0)});
    cells.push_back({std::to_string(latency.evictions.size())});
    for (const double share : {0.5, 0.99, 1.0})
      cells.push_back({latency.evictions.empty() ? "\u2013" : fixed(quantile(latency.evictions, share), 0)});
    table.rows.push_back(std::move(cells));
  }
  return table;
}

}  // namespace

std::string latency_figure(const ReportData& data) {
  const bool evicted =
      std::any_of(data.latency.begin(), data.latency.end(), [](const Latency& l) { return !l.evictions.empty(); });
  std::string content = joined({quantile_panel(data, &Latency::steps, 0, "Decode step, all layers evict at once"),
                                quantile_panel(data, &Latency::steps, 1, "Decode step, one layer evicts a step")});
  std::string below;
  if (evicted)
    content
        .append(quantile_panel(data, &Latency::evictions, 0, "The policy\u2019s part of steps that evict, all layers at once"))
        .append(quantile_panel(data, &Latency::evictions, 1, "The policy\u2019s part of steps that evict, one layer a step"));
  else
    below = element("p", " class=\"missing\"",
                    joined({"Nothing was evicted: the texts are shorter than the budget of ", std::to_string(data.budget),
                            " tokens. A smaller --budget shows evictions."}));
  return figure("Figure 3",
                joined({"How long a decode step takes at ", std::to_string(data.budget),
                        " tokens, by quantiles, both axes logarithmic: at 99 %, one step in a hundred takes longer. The very "
                        "longest step is in the table alone. Staggered "
                        "(right, --layers-per-step 1), the layers take turns and no step pays for all. Each step\u2019s time "
                        "is the least of ",
                        std::to_string(data.repeats), " runs, on one thread, the policies taking turns."}),
                element("div", " class=\"panels\"", content),
                joined({below, details("Numbers of figure 3", html_of(latency_table(data)))}));
}

}  // namespace beaconkv::lab
