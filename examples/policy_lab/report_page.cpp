// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "policy_lab/report_page.hpp"

#include <algorithm>
#include <set>

#include "policy_lab/report_figures.hpp"
#include "policy_lab/svg.hpp"

namespace beaconkv::lab {
namespace {

constexpr const char* style = R"css(
:root{color-scheme:light dark;--paper:#fffefb;--ink:#1b1b1a;--soft:#5c5b57;--rule:#d9d6cd;--ground:#f3f1ea;--miss:#d3152f;
--full:#1b1b1a;--grey:#8b8983;--c0:#8a6100;--c1:#7a3fa3;--c2:#0b7f6f;--c3:#c2470d;--c4:#1b5fb0;--c5:#ad2670;--c6:#4a7a16;--c7:#5b5f8f}
@media(prefers-color-scheme:dark){:root{--paper:#161719;--ink:#e7e5df;--soft:#a5a39c;--rule:#3a3b3e;--ground:#222326;--miss:#ff5a6a;
--full:#e7e5df;--grey:#85837d;--c0:#d9b04a;--c1:#c79bec;--c2:#5cc7b5;--c3:#ff9359;--c4:#74b0f4;--c5:#f28fc2;--c6:#a3cf6b;--c7:#a9afe6}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;text-size-adjust:100%}
body{margin:0 auto;padding:2.5rem 1.1rem 4rem;max-width:66rem;background:var(--paper);color:var(--ink);
font:1.0625rem/1.55 Charter,"Bitstream Charter","Iowan Old Style",Palatino,Georgia,"Liberation Serif",serif}
h1,h2,p,figcaption{max-width:44rem}
h1{font-size:1.9rem;line-height:1.2;font-weight:600;margin:0 0 1rem}
h2{font-size:1.25rem;font-weight:600;margin:3rem 0 .75rem}
p{margin:.75rem 0;overflow-wrap:anywhere}
code{font:.85em ui-monospace,"SF Mono",Menlo,Consolas,"Liberation Mono",monospace;overflow-wrap:anywhere}
figure{margin:1.5rem 0 0}
figcaption{margin:.75rem 0;font-size:.95rem;line-height:1.45;color:var(--soft)}
figcaption b{color:var(--ink)}
.panels{display:grid;gap:1.25rem 2rem;grid-template-columns:repeat(auto-fit,minmax(min(100%,25rem),1fr))}
.panels.narrow{grid-template-columns:repeat(auto-fill,minmax(min(100%,18rem),1fr))}
.panel{min-width:0;max-width:40rem;display:flex;flex-direction:column;justify-content:flex-end}
.panel-title{margin:0 0 .35rem;font:600 .875rem/1.35 system-ui,"Segoe UI",Roboto,Helvetica,Arial,sans-serif}
.note,.missing{font-size:.9rem;color:var(--soft)}
.missing{border-left:3px solid var(--miss);padding-left:.75rem}
.problem{max-width:none}
details{margin:.5rem 0;font-size:.95rem}
summary{cursor:pointer;color:var(--soft)}
.box{overflow-x:auto;margin:.75rem 0}
table{border-collapse:collapse;border-top:1.5px solid var(--ink);border-bottom:1.5px solid var(--ink);font-size:.9rem;line-height:1.35;
font-variant-numeric:tabular-nums lining-nums}
th,td{padding:.28rem .7rem;text-align:right;white-space:nowrap;font-weight:400;vertical-align:baseline}
thead th{white-space:normal;border-bottom:1px solid var(--ink);color:var(--soft);vertical-align:bottom}
th:first-child{text-align:left;padding-left:.2rem;position:sticky;left:0;background:var(--paper)}
tbody tr+tr>*{border-top:1px solid var(--rule)}
td small{color:var(--soft);font-size:.82em}
b{font-weight:700}
svg.plot{display:block;width:100%;height:auto;overflow:visible}
svg text{font:12.5px system-ui,"Segoe UI",Roboto,Helvetica,Arial,sans-serif;fill:var(--soft);font-variant-numeric:tabular-nums}
svg .name{fill:var(--ink)}
svg .label{fill:var(--c);font-weight:500}
.end{text-anchor:end}.middle{text-anchor:middle}
svg.map text{font-size:11px}
.grid{stroke:var(--rule);stroke-width:.75}.axis{stroke:var(--soft);stroke-width:1}
.curve{fill:none;stroke:var(--c);stroke-width:1.9;stroke-linejoin:round}
.curve.grey{stroke-width:1;opacity:.8}.dashed{stroke-dasharray:5 4;stroke-width:1.3}
.whisker{stroke:var(--c);stroke-width:1.3;opacity:.65}.leader{stroke:var(--c);stroke-width:.6;opacity:.6;fill:none}
.dot{fill:var(--c);stroke:var(--paper);stroke-width:.8}.grey .dot{r:2px}.near{fill:transparent}
.ground{fill:var(--ground)}.kept{fill:var(--c);opacity:.62}.border{stroke:var(--soft);stroke-width:.6}
.need,.miss{fill:none;stroke:var(--ink);stroke-width:1.7;stroke-linecap:round;vector-effect:non-scaling-stroke}
.miss{stroke:var(--miss);stroke-width:2.2}
.met{color:var(--ink)}.missed{color:var(--miss)}
.full{--c:var(--full)}.grey{--c:var(--grey)}
.c0{--c:var(--c0)}.c1{--c:var(--c1)}.c2{--c:var(--c2)}.c3{--c:var(--c3)}.c4{--c:var(--c4)}.c5{--c:var(--c5)}.c6{--c:var(--c6)}.c7{--c:var(--c7)}
@media(max-width:40rem){body{padding-top:1.5rem}th:first-child{white-space:normal;overflow-wrap:anywhere;min-width:7rem;max-width:9.5rem}}
@media print{details{display:block}}
)css";

[[nodiscard]] std::string listed(const std::vector<std::string>& words) {
  std::string out;
  for (std::size_t i = 0; i < words.size(); ++i)
    out.append(i == 0 ? "" : (i + 1 == words.size() ? " and " : ", ")).append(words[i]);
  return out;
}

[[nodiscard]] std::string code(std::string_view text) { return element("code", "", breakable(text)); }

/// What was run: the first paragraph.
[[nodiscard]] std::string what_was_run(const ReportData& data) {
  std::set<index_t> budgets;
  std::map<index_t, index_t> counts;  // of problems, over the rows
  for (const AccuracyRow& row : data.accuracy) {
    if (row.budget > 0) budgets.insert(row.budget);
    ++counts[row.of];
  }
  std::vector<std::string> numbers;
  for (const index_t budget : budgets) numbers.push_back(std::to_string(budget));
  const index_t fewest = counts.empty() ? 0 : counts.begin()->first;
  const index_t most = counts.empty() ? 0 : counts.rbegin()->first;
  std::string out = joined(
      {"The model ", code(data.model), " (", grouped(data.weights), " weights, ", std::to_string(data.layers), " layers of ",
       std::to_string(data.shape.query_heads), " query and ", std::to_string(data.shape.kv_heads), " KV heads of ",
       std::to_string(data.shape.head_dim), " numbers) on problems of ", code(data.prompts),
       ". Accuracy: ", fewest == most ? "" : joined({std::to_string(fewest), " to "}), std::to_string(most), " problems"});
  if (!numbers.empty()) out.append(joined({" at budgets of ", listed(numbers), " tokens"}));
  std::vector<std::string> files;
  for (const std::string& file : data.files) files.push_back(code(file));
  out.append(files.empty() ? ", measured here" : joined({", read from ", listed(files)}));
  out.append(
      joined({". Regret, latency and kept positions: ", std::to_string(data.problems),
              data.problems == 1 ? " problem" : " problems", " at a budget of ", std::to_string(data.budget), ", run here on ",
              escaped(data.date), " with ", escaped(data.instruction_set),
              " kernels under one rule for all policies: the prompt stays, on top of the budget, and so do the eight newest "
              "tokens, unless settings say otherwise."}));
  return joined({element("p", "", out), "\n", element("p", " class=\"note\"", code(data.command))});
}

}  // namespace

std::string page_of(const ReportData& data) {
  const std::string title = joined({"KV-cache eviction on ", escaped(data.model)});
  const std::string body = joined({element("h1", "", title),
                                   "\n",
                                   what_was_run(data),
                                   "\n",
                                   element("h2", "", "Exact answers"),
                                   "\n",
                                   element("p", "",
                                           "Exact answers in percent, with the 95 % interval. Bold: the best at each budget; "
                                           "where intervals overlap, the order may be "
                                           "chance."),
                                   html_of(accuracy_table(data)),
                                   accuracy_figure(data),
                                   "\n",
                                   element("h2", "", "What evictions cost later"),
                                   "\n",
                                   regret_figure(data),
                                   "\n",
                                   element("h2", "", "How long a step takes"),
                                   "\n",
                                   latency_figure(data),
                                   "\n",
                                   element("h2", "", "What was kept"),
                                   "\n",
                                   map_figure(data),
                                   "\n"});
  return joined({"<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n",
                 "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n", element("title", "", title),
                 "\n", element("style", "", style), "\n</head>\n<body>\n<main>\n", body, "</main>\n</body>\n</html>\n"});
}

}  // namespace beaconkv::lab
