// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

// The figure of kept positions.

#include <algorithm>

#include "policy_lab/report_figures.hpp"
#include "policy_lab/svg.hpp"

namespace beaconkv::lab {
namespace {

constexpr index_t most_layers = 8;
constexpr index_t most_heads = 4;
constexpr double width = 320;
constexpr double left = 34;
constexpr double top = 4;
constexpr double title_height = 18;
constexpr double gap = 12;
constexpr double bottom = 38;

/// How many needed positions were there, and how many not.
struct Found {
  index_t held = 0;
  index_t gone = 0;
};
[[nodiscard]] Found found_in(const std::vector<KeptRun>& runs, const std::vector<Need>& needs) {
  Found found;
  for (const Need& need : needs) ++(held(runs, need) ? found.held : found.gone);
  return found;
}

[[nodiscard]] std::string text(double x, double y, std::string_view style, std::string_view content) {
  return joined(
      {"<text class=\"", style, "\" x=\"", coordinate(x), "\" y=\"", coordinate(y), "\">", escaped(content), "</text>\n"});
}

/// Dots of no length, which round caps make visible.
[[nodiscard]] std::string dots(const std::vector<KeptRun>& runs, const std::vector<Need>& needs, position_t start, bool there) {
  std::string path;
  for (const Need& need : needs)
    if (held(runs, need) == there)
      path.append("M").append(std::to_string(need.step - start)).append(" ").append(std::to_string(need.position)).append("h0");
  if (path.empty()) return "";
  return joined({"<path class=\"", there ? "need" : "miss", "\" d=\"", path, "\"/>\n"});
}

/// All heads of one policy: a row for each layer.
[[nodiscard]] std::string picture(const ReportData& data, const KeptMap& map) {
  const index_t rows = std::min(data.layers, most_layers);
  const index_t columns = std::min(data.shape.kv_heads, most_heads);
  const position_t start = data.map_span.prompt - 1;
  const auto steps = static_cast<double>(data.map_span.tokens - start);
  const auto positions = static_cast<double>(data.map_span.tokens);
  const double side = (width - left - 6 - gap * static_cast<double>(columns - 1)) / static_cast<double>(columns);
  const double high = 0.82 * side;
  const double height = top + static_cast<double>(rows) * (title_height + high) + bottom;
  std::string out = joined({"<svg class=\"plot map ", style_of(data, map.policy), "\" viewBox=\"0 0 ", coordinate(width), " ",
                            coordinate(height), "\" role=\"img\" aria-label=\"Positions that ", escaped(map.policy),
                            " kept over time, by layer and KV head\">\n"});
  for (index_t l = 0; l < rows; ++l)
    for (index_t h = 0; h < columns; ++h) {
      const auto head = static_cast<std::size_t>(l * data.shape.kv_heads + h);
      const std::vector<KeptRun>& runs = map.heads[head];
      const Found found = found_in(runs, data.needs[head]);
      const double x = left + static_cast<double>(h) * (side + gap);
      const double y = top + static_cast<double>(l) * (title_height + high) + title_height;
      const std::string name = joined({"layer ", std::to_string(l), ", head ", std::to_string(h)});
      out.append(text(x, y - 5, "tick", name));
      out.append(joined({"<g><title>",
                         escaped(map.policy),
                         ", ",
                         name,
                         ": of ",
                         std::to_string(found.held + found.gone),
                         " needs ",
                         std::to_string(found.gone),
                         " met an evicted token</title><rect class=\"ground\" x=\"",
                         coordinate(x),
                         "\" y=\"",
                         coordinate(y),
                         "\" width=\"",
                         coordinate(side),
                         "\" height=\"",
                         coordinate(high),
                         "\"/>\n<g transform=\"translate(",
                         coordinate(x),
                         " ",
                         coordinate(y + high),
                         ") scale(",
                         fixed(side / steps, 5),
                         " -",
                         fixed(high / positions, 5),
                         ")\">\n<path class=\"kept\" d=\"",
                         path_of(runs, data.map_span),
                         "\"/>\n",
                         dots(runs, data.needs[head], start, true),
                         dots(runs, data.needs[head], start, false),
                         "</g></g>\n"}));
      const double border = y + high - high * static_cast<double>(data.map_span.prompt) / positions;
      out.append(
          joined({"<path class=\"border\" d=\"M", coordinate(x), " ", coordinate(border), "h", coordinate(side), "\"/>\n"}));
      if (h == 0) {
        out.append(text(x - 4, y + high + 1, "tick end", "0"));
        out.append(text(x - 4, border + 4, "tick end", std::to_string(data.map_span.prompt)));
        if (border - y > 14) out.append(text(x - 4, y + 9, "tick end", std::to_string(data.map_span.tokens)));
      }
      if (l + 1 == rows) {
        const std::vector<double> ticks = linear_ticks(0, steps, 3);
        for (const double tick : ticks)
          out.append(text(x + side * tick / steps, y + high + 14, tick == 0 ? "tick" : "tick middle", fixed(tick, 0)));
        if (h + 1 == columns) out.append(text(x + side, y + high + 31, "name end", "decode step"));
      }
    }
  return out.append("</svg>\n");
}

}  // namespace

std::string map_figure(const ReportData& data) {
  std::string content;
  Table table{.heads = {"policy", "answer"}};
  for (index_t l = 0; l < data.layers; ++l)
    for (index_t h = 0; h < data.shape.kv_heads; ++h)
      table.heads.push_back(joined({"layer\u00a0", std::to_string(l), ", head\u00a0", std::to_string(h)}));
  for (const KeptMap& map : data.maps) {
    content.append(element("div", " class=\"panel\"",
                           joined({element("p", " class=\"panel-title\"",
                                           joined({breakable(map.policy), ": ", map.exact ? "right answer" : "wrong answer"})),
                                   picture(data, map)})));
    std::vector<Cell> cells{{map.policy}, {map.exact ? "right" : "wrong"}};
    for (std::size_t head = 0; head < map.heads.size(); ++head) {
      const Found found = found_in(map.heads[head], data.needs[head]);
      cells.push_back({std::to_string(found.gone), joined({"of ", std::to_string(found.gone + found.held)})});
    }
    table.rows.push_back(std::move(cells));
  }
  std::string caption =
      joined({"What each policy kept at ", std::to_string(data.budget), " tokens on problem ", escaped(data.map_problem),
              " (level ", std::to_string(data.map_level),
              "), in each layer and KV head. Coloured: the position (upwards) is in the cache at the decode step (to the "
              "right); below "
              "the thin line is the prompt, which stays. Dots are needs: the full cache gives the position a weight above ",
              coordinate(data.needed), " there, ", std::to_string(data.map_distance),
              " or more tokens back. <span class=\"met\">\u25cf</span> the policy still has it; <span "
              "class=\"missed\">\u25cf</span> it is gone."});
  if (data.layers > most_layers || data.shape.kv_heads > most_heads)
    caption.append(joined({" Drawn are the first ", std::to_string(std::min(data.layers, most_layers)), " layers and ",
                           std::to_string(std::min(data.shape.kv_heads, most_heads)), " KV heads; the table has all."}));
  const std::string problem = element("p", " class=\"note problem\"", joined({"The problem: ", escaped(data.map_text)}));
  return figure("Figure 4", caption, element("div", " class=\"panels narrow\"", content),
                details("Numbers of figure 4: needs that met an evicted token", joined({html_of(table), problem})));
}

}  // namespace beaconkv::lab
