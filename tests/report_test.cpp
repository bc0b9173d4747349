// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

// The page of `policy_lab report`: its numbers by hand and against replays, its pictures by rebuilding what they show, its text
// under hostile names.

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "policy_lab/replay.hpp"
#include "policy_lab/report.hpp"
#include "policy_lab/report_figures.hpp"
#include "policy_lab/report_page.hpp"
#include "policy_lab/svg.hpp"
#include "support/catch.hpp"
#include "support/files.hpp"
#include "support/reasoner.hpp"

using namespace beaconkv;
using namespace beaconkv::lab;
using namespace beaconkv::test;

namespace {

[[nodiscard]] std::vector<ReportTask> tasks_of(index_t limit) {
  const std::vector<Problem> all = load_problems(prompts_file, model_directory, reasoner().vocab_size()).or_throw();
  std::vector<ReportTask> tasks;
  for (const Problem& problem : take_evenly(all, limit)) {
    ReportTask task{problem, {}, {}};
    task.how = {.max_new = max_new_of(problem, all, 0), .eos = reasoner().config().eos_ids, .compare = false};
    task.full = generate_full(reasoner(), problem, task.how).or_throw();
    tasks.push_back(std::move(task));
  }
  return tasks;
}

[[nodiscard]] std::vector<ReportPolicy> policies_named(const std::string& text) {
  std::vector<ReportPolicy> policies;
  for (const PolicySpec& spec : parse_policies(text).or_throw()) policies.push_back({spec, find_policy(spec.name).or_throw()});
  return policies;
}

[[nodiscard]] std::vector<EvictionEvent> events_of(const ReportTask& task, const ReportPolicy& policy, index_t budget) {
  EventLog log;
  EvaluationOptions how = task.how;
  how.answer = false;
  how.log = &log;
  evaluate(reasoner(), policy.entry, {.budget = budget}, {policy.spec.text, policy.spec.settings, {}}, task.problem, task.full,
           how)
      .or_throw();
  return log.take();
}

[[nodiscard]] Span span_of(const ReportTask& task) {
  const auto prompt = static_cast<position_t>(task.problem.prompt.size());
  return {prompt, prompt + static_cast<position_t>(task.full.tokens.size()) - 1};
}

/// Whether every tag is closed in order, attributes are quoted, and every & begins an entity. Empty where all is well.
[[nodiscard]] std::string fault_of(const std::string& html) {
  std::vector<std::string> open;
  for (std::size_t at = 0; at < html.size(); ++at) {
    if (html[at] == '&') {
      const std::size_t end = html.find(';', at);
      if (end == std::string::npos || end - at > 7) return "a bare & at " + html.substr(at, 30);
      continue;
    }
    if (html[at] == '>') return "a bare > before " + html.substr(at, 30);
    if (html[at] != '<') continue;
    std::size_t end = at + 1;
    for (bool quoted = false; end < html.size() && (quoted || html[end] != '>'); ++end) {
      if (html[end] == '"') quoted = !quoted;
      if (html[end] == '<') return "a bare < in " + html.substr(at, 60);
    }
    if (end >= html.size()) return "no end of " + html.substr(at, 60);
    const std::string tag = html.substr(at + 1, end - at - 1);
    at = end;
    const std::string name = tag.substr(0, tag.find_first_of(" /", 1));
    if (tag.back() == '/' || name == "!DOCTYPE" || name == "meta" || name == "wbr") continue;
    if (name[0] != '/') {
      open.push_back(name);
      // Rules of style may hold > and &; they end with the element.
      if (name == "style") at = html.find("</style>", at) - 1;
      continue;
    }
    if (open.empty() || "/" + open.back() != name) return name + " closes " + (open.empty() ? "nothing" : open.back());
    open.pop_back();
  }
  return open.empty() ? "" : open.back() + " stays open";
}

struct Corner {
  double x = 0;
  double y = 0;
};

/// The polygons of path data of M, H, V, h, v and z.
[[nodiscard]] std::vector<std::vector<Corner>> polygons_of(const std::string& path) {
  std::vector<std::vector<Corner>> polygons;
  Corner at;
  const char* p = path.c_str();
  const auto number = [&p] {
    char* end = nullptr;
    const double value = std::strtod(p, &end);
    p = end;
    return value;
  };
  while (*p != '\0') {
    const char command = *p++;
    if (command == 'z') continue;
    if (command == 'M') {
      polygons.emplace_back();
      at.x = number();
      at.y = number();
    } else if (command == 'H') {
      at.x = number();
    } else if (command == 'V') {
      at.y = number();
    } else if (command == 'h') {
      at.x += number();
    } else {
      REQUIRE(command == 'v');
      at.y += number();
    }
    polygons.back().push_back(at);
  }
  return polygons;
}

[[nodiscard]] bool inside(const std::vector<Corner>& polygon, Corner p) {
  bool in = false;
  for (std::size_t i = 0, j = polygon.size() - 1; i < polygon.size(); j = i++) {
    const Corner a = polygon[i], b = polygon[j];
    if ((a.y > p.y) != (b.y > p.y) && p.x < (b.x - a.x) * (p.y - a.y) / (b.y - a.y) + a.x) in = !in;
  }
  return in;
}

[[nodiscard]] double area_of(const std::vector<Corner>& polygon) {
  double twice = 0;
  for (std::size_t i = 0, j = polygon.size() - 1; i < polygon.size(); j = i++)
    twice += polygon[j].x * polygon[i].y - polygon[i].x * polygon[j].y;
  return std::abs(twice) / 2;
}

void require_near(const std::vector<double>& is, const std::vector<double>& should_be) {
  CAPTURE(is, should_be);
  REQUIRE(is.size() == should_be.size());
  for (std::size_t i = 0; i < is.size(); ++i) REQUIRE(std::abs(is[i] - should_be[i]) < 1e-9 * (1 + std::abs(should_be[i])));
}

/// A page's numbers, all of them made up, with names that try to be markup.
[[nodiscard]] ReportData hostile() {
  const std::string evil = "<script>alert(\"1\")</script>&'x";
  ReportData data{.model = evil,
                  .weights = 1234567,
                  .layers = 1,
                  .shape = {.query_heads = 2, .kv_heads = 1, .head_dim = 4},
                  .prompts = evil,
                  .problems = 1,
                  .files = {evil},
                  .instruction_set = "avx2",
                  .date = evil,
                  .command = evil,
                  .policies = {evil, "other"},
                  .budget = 8,
                  .repeats = 1,
                  .needed = 0.3};
  data.accuracy.push_back({.policy = "full", .right = 1, .of = 1, .by_level = {{3, {1, 1}}}});
  data.accuracy.push_back({.policy = evil, .budget = 8, .right = 1, .of = 2, .by_level = {{3, {1, 1}}, {4, {0, 1}}}});
  data.accuracy.push_back({.policy = "third", .budget = 16, .right = 0, .of = 2, .by_level = {{3, {0, 1}}, {4, {0, 1}}}});
  data.regret.push_back({.policy = evil, .by_layer = {0.5}});
  data.latency = {{"full", 0, {1, 2}, {}}, {evil, 0, {1, 2, 3}, {1}}, {evil, 1, {1, 2}, {0.5}}};
  data.map_problem = evil;
  data.map_text = evil;
  data.map_span = {2, 6};
  data.map_distance = 1;
  data.maps = {{evil, false, {{{0, 2, 5}, {2, 4, 3}, {4, 6, 5}}}}};
  data.needs = {{{4, 2}, {5, 0}}};
  return data;
}

}  // namespace

TEST_CASE("Wilson's interval has its known values", "[report]") {
  const auto rounded = [](const Interval& i) { return std::pair(std::round(1e4 * i.low), std::round(1e4 * i.high)); };
  // Newcombe 1998, table I, method 3.
  CHECK(rounded(wilson_interval(81, 263)) == std::pair(2553.0, 3662.0));
  CHECK(rounded(wilson_interval(15, 148)) == std::pair(624.0, 1605.0));
  CHECK(rounded(wilson_interval(0, 20)) == std::pair(0.0, 1611.0));
  CHECK(rounded(wilson_interval(1, 29)) == std::pair(61.0, 1718.0));
  CHECK(wilson_interval(20, 20).high == 1);
  CHECK(wilson_interval(0, 0).low == 0);
  CHECK(wilson_interval(0, 0).high == 1);
}

TEST_CASE("text becomes HTML that shows it and nothing else", "[report]") {
  CHECK(escaped("a<b>&\"c'") == "a&lt;b&gt;&amp;&quot;c&#39;");
  CHECK(escaped("\x01\n\x7F\u00b5") == "   \u00b5");
  CHECK(breakable("a_b:c<") == "a_<wbr>b:<wbr>c&lt;");
  CHECK(breakable("a_") == "a_");
  CHECK(breakable("") == "");
  CHECK(html_of(Table{{"<h>"}, {{{"<a>", "<b>", true}, {"&"}}}}).find("<b>&lt;a&gt;</b> <small>&lt;b&gt;</small>") !=
        std::string::npos);
  CHECK(fault_of(html_of(Table{{"<h>"}, {{{"<a>", "<b>", true}, {"&"}}}})).empty());
  // The checker itself finds what it is for.
  CHECK(!fault_of("<p><b></p></b>").empty());
  CHECK(!fault_of("<p>").empty());
  CHECK(!fault_of("<p>a & b</p>").empty());
  CHECK(!fault_of("<p title=\"<\"></p>").empty());
  CHECK(!fault_of("<p>a > b</p>").empty());
}

TEST_CASE("numbers as text", "[report]") {
  CHECK(coordinate(1.50) == "1.5");
  CHECK(coordinate(-0.001) == "0");
  CHECK(coordinate(100) == "100");
  CHECK(coordinate(2.0 / 3) == "0.67");
  CHECK(coordinate(std::nan("")) == "0");
  CHECK(fixed(1.005e300, 0).size() == 301);
  CHECK(fixed(INFINITY, 1) == "-");
  CHECK(grouped(7) == "7");
  CHECK(grouped(999) == "999");
  CHECK(grouped(1000) == "1\u2009000");
  CHECK(grouped(1234567) == "1\u2009234\u2009567");
  CHECK(grouped(-123) == "-123");
  CHECK(grouped(-1234) == "-1\u2009234");
  CHECK(shortened("abcdef", 6) == "abcdef");
  CHECK(shortened("abcdefg", 6) == "abc\u2026fg");
  CHECK(shortened("\u00e4\u00f6\u00fc\u00df", 3) == "\u00e4\u2026\u00df");
  CHECK(shortened("abc", 1) == "\u2026");
}

TEST_CASE("ticks by hand", "[report]") {
  require_near(linear_ticks(0, 100, 5), {0, 20, 40, 60, 80, 100});
  require_near(linear_ticks(0, 100, 6), {0, 20, 40, 60, 80, 100});
  require_near(linear_ticks(30, 100, 6), {40, 60, 80, 100});
  require_near(linear_ticks(0, 0.37, 4), {0, 0.1, 0.2, 0.3});
  require_near(linear_ticks(-1, 1, 4), {-1, -0.5, 0, 0.5, 1});
  require_near(linear_ticks(0, 42, 6), {0, 10, 20, 30, 40});
  require_near(linear_ticks(3, 3, 5), {3});
  require_near(logarithmic_ticks(62, 300, 10), {70, 100, 200, 300});
  require_near(logarithmic_ticks(2.3, 420, 10), {5, 10, 20, 50, 100, 200});
  require_near(logarithmic_ticks(0.5, 2e6, 10), {1, 10, 100, 1e3, 1e4, 1e5, 1e6});
  require_near(logarithmic_ticks(1, 10, 10), {1, 2, 3, 5, 7, 10});
  CHECK(logarithmic_ticks(0, 10, 10).empty());
  CHECK(logarithmic_ticks(-1, 10, 10).empty());
  CHECK(logarithmic_ticks(1, INFINITY, 10).empty());
  CHECK(logarithmic_ticks(INFINITY, INFINITY, 10).empty());
  require_near(linear_ticks(0, INFINITY, 5), {0});
}

TEST_CASE("places on axes", "[report]") {
  const Axis log{.scale = Scale::logarithmic, .low = 1, .high = 100};
  CHECK(log.along(10) == 0.5);
  CHECK(log.along(1000) == 1);
  CHECK(log.along(0) == 0);
  const Axis nines{.scale = Scale::nines, .low = 0, .high = 0.9999};
  CHECK(std::abs(nines.along(0.99) - 0.5) < 1e-12);
  CHECK(nines.along(0) == 0);
  CHECK(Axis{.low = 5, .high = 5}.along(5) == 0.5);
  CHECK(Axis{.low = -1, .high = 3}.along(0) == 0.25);
}

TEST_CASE("labels make room for each other", "[report]") {
  require_near(spread({50, 10}, 10, 0, 100), {50, 10});
  require_near(spread({50, 50}, 10, 0, 100), {45, 55});
  require_near(spread({99, 98, 10}, 10, 0, 100), {100, 90, 10});
  require_near(spread({0, 0, 0}, 10, 0, 100), {0, 10, 20});
  require_near(spread({40, 45, 52}, 10, 0, 100), {107.0 / 3, 137.0 / 3, 167.0 / 3});
  require_near(spread({5, 5, 5}, 10, 0, 15), {0, 10, 20});  // too little room: from the start
  CHECK(spread({}, 10, 0, 100).empty());
}

TEST_CASE("what was kept, by hand: runs, cells and needs", "[report]") {
  // A prompt of 3, tokens 3 to 7. At step 4 positions 1 and 3 go, at 6 positions 2 and 4; another head keeps everything.
  const auto tokens = [](const std::vector<position_t>& positions) {
    std::vector<LoggedToken> all;
    for (const position_t p : positions) all.push_back({p, {}});
    return all;
  };
  const std::vector<EvictionEvent> events{
      {.step = 4, .layer = 1, .heads = {{}, {tokens({1, 3}), tokens({0, 2, 4}), {}}}},
      {.step = 5, .layer = 0, .heads = {{tokens({0}), {}, {}}, {tokens({5}), {}, {}}}},
      {.step = 6, .layer = 1, .heads = {{}, {tokens({2, 4}), tokens({0, 5, 6}), {}}}},
  };
  const Span span{3, 8};
  CHECK(kept_runs(events, 1, 0, span) == std::vector<KeptRun>{{0, 8, 7}});
  const std::vector<KeptRun> runs = kept_runs(events, 1, 1, span);
  CHECK(runs == std::vector<KeptRun>{{0, 1, 7}, {1, 2, 4}, {2, 3, 6}, {3, 4, 4}, {4, 5, 6}, {5, 8, 7}});
  CHECK(kept_runs(events, 0, 1, span) == std::vector<KeptRun>{{0, 5, 7}, {5, 6, 5}, {6, 8, 7}});

  CHECK(path_of({{0, 1, 7}}, span) == "M0 0H6V1H0z");
  CHECK(path_of({{5, 8, 7}}, span) == "M3 5H6V8H5v-1h-1v-1h-1z");
  for (const auto& [layer, head] : {std::pair(1, 1), std::pair(1, 0), std::pair(0, 1)}) {
    const std::vector<std::vector<Corner>> polygons = polygons_of(path_of(kept_runs(events, layer, head, span), span));
    for (position_t step = 2; step < 8; ++step)
      for (position_t p = 0; p < 8; ++p) {
        position_t end = 7;
        for (const EvictionEvent& event : events)
          if (event.layer == layer)
            for (const LoggedToken& token : event.heads[static_cast<std::size_t>(head)].evicted)
              if (token.position == p) end = event.step;
        const Corner middle{static_cast<double>(step - 2) + 0.5, static_cast<double>(p) + 0.5};
        const auto covering =
            std::count_if(polygons.begin(), polygons.end(), [&](const auto& polygon) { return inside(polygon, middle); });
        CAPTURE(layer, head, step, p);
        REQUIRE(covering == (step >= p && step <= end ? 1 : 0));
      }
  }

  CHECK(held(runs, {4, 1}));
  CHECK(!held(runs, {5, 1}));
  CHECK(held(runs, {7, 0}));
  CHECK(held(runs, {7, 7}));
  CHECK(!held(runs, {7, 4}));
  CHECK(!held(runs, {7, 8}));
  CHECK(!held({}, {0, 0}));
}

TEST_CASE("the map rebuilds the kept sets of a real log, and its gone needs are the needed tokens of the replay", "[report]") {
  const std::vector<ReportTask> tasks = tasks_of(1);
  const ReportTask& task = tasks[0];
  const Span span = span_of(task);
  const std::vector<std::vector<Need>> needs = needs_of(reasoner(), task.problem, task.full, 0.3, 8).or_throw();
  REQUIRE(needs.size() == 8);
  for (const ReportPolicy& policy : policies_named("snapkv,beaconkv,adakv")) {
    INFO(policy.spec.text);
    const std::vector<EvictionEvent> events = events_of(task, policy, 48);
    REQUIRE(events.size() > 20);
    std::set<std::tuple<index_t, index_t, position_t>> gone;
    for (index_t layer = 0; layer < 4; ++layer)
      for (index_t head = 0; head < 2; ++head) {
        const std::vector<KeptRun> runs = kept_runs(events, layer, head, span);
        for (const EvictionEvent& event : events) {
          if (event.layer != layer) continue;
          std::vector<position_t> logged;
          for (const LoggedToken& token : event.heads[static_cast<std::size_t>(head)].kept) logged.push_back(token.position);
          std::vector<position_t> rebuilt;  // what the next query finds, itself aside
          for (const KeptRun& run : runs)
            for (position_t p = run.first; p < run.last; ++p)
              if (p <= event.step && run.until > event.step) rebuilt.push_back(p);
          if (event.step + 1 < span.tokens) REQUIRE(rebuilt == logged);
        }
        double cells = 0;
        for (const KeptRun& run : runs)
          for (position_t p = run.first; p < run.last; ++p)
            cells += static_cast<double>(run.until + 1 - std::max(p, span.prompt - 1));
        double drawn = 0;
        for (const std::vector<Corner>& polygon : polygons_of(path_of(runs, span))) drawn += area_of(polygon);
        REQUIRE(drawn == cells);
        for (const Need& need : needs[static_cast<std::size_t>(layer * 2 + head)])
          if (!held(runs, need)) gone.emplace(layer, head, need.position);
      }
    std::set<std::tuple<index_t, index_t, position_t>> needed;
    for (const LostToken& token : replay_events(reasoner(), task.problem, task.full, events, {}).or_throw().lost())
      if (token.peak > 0.3) needed.emplace(token.layer, token.head, token.position);
    REQUIRE(!needed.empty());
    REQUIRE(gone == needed);
  }
}

TEST_CASE("needs that are nearer than asked for are left out", "[report]") {
  const std::vector<ReportTask> tasks = tasks_of(1);
  const auto all = needs_of(reasoner(), tasks[0].problem, tasks[0].full, 0.3, 0).or_throw();
  std::size_t at_the_edge = 0;
  for (const position_t distance : {1, 2, 8, 20}) {
    const auto far = needs_of(reasoner(), tasks[0].problem, tasks[0].full, 0.3, distance).or_throw();
    for (std::size_t head = 0; head < all.size(); ++head) {
      std::vector<Need> expected;
      for (const Need& need : all[head])
        if (need.step - need.position >= distance) expected.push_back(need);
      REQUIRE(far[head].size() == expected.size());
      for (std::size_t i = 0; i < expected.size(); ++i) {
        REQUIRE(far[head][i].step == expected[i].step);
        REQUIRE(far[head][i].position == expected[i].position);
        at_the_edge += expected[i].step - expected[i].position == distance ? 1U : 0U;
      }
    }
  }
  REQUIRE(at_the_edge > 0);
}

TEST_CASE("results are summed up", "[report]") {
  const auto result = [](const char* policy, index_t budget, const char* problem, int level, bool exact) {
    return ProblemResult{.policy = policy, .budget = budget, .problem = problem, .level = level, .exact = exact};
  };
  std::vector<ProblemResult> results{result("z", 64, "1", 3, true), result("z", 64, "2", 4, false),
                                     result("a", 64, "1", 3, true), result("z", 32, "1", 3, false)};
  results[0].kl = 0.5;
  results[1].kl = 1.5;
  results[0].regret = 0.25;
  results[0].model_us = 10;
  results[0].policy_us = 30;
  results[1].model_us = 50;
  results[1].policy_us = 10;
  results[0].state_bytes = 7;
  results[1].state_bytes = 5;
  results[1].peak_kv_bytes = 9;
  const std::vector<AccuracyRow> rows = accuracy_rows(results);
  REQUIRE(rows.size() == 3);
  CHECK(rows[0].policy == "z");
  CHECK(rows[0].budget == 32);
  CHECK(rows[2].policy == "a");
  const AccuracyRow& row = rows[1];
  CHECK(row.budget == 64);
  CHECK(row.right == 1);
  CHECK(row.of == 2);
  CHECK(row.share() == 0.5);
  CHECK(row.by_level.at(3) == std::pair<index_t, index_t>(1, 1));
  CHECK(row.by_level.at(4) == std::pair<index_t, index_t>(0, 1));
  CHECK(row.kl == 1.0);
  CHECK(!row.regret);  // one of two has none
  CHECK(row.policy_share == 0.4);
  CHECK(row.state_bytes == 7);
  CHECK(row.peak_kv_bytes == 9);
  CHECK(quantile({1, 2, 3, 4}, 0.5) == 2);
  CHECK(quantile({1, 2, 3, 4}, 0.51) == 3);
  CHECK(quantile({1, 2, 3, 4}, 1) == 4);
  CHECK(quantile({1, 2, 3, 4}, 0) == 1);
  CHECK(quantile({}, 0.5) == 0);
}

TEST_CASE("regret over time is the regret that the shadow full cache measures", "[report]") {
  const std::vector<ReportTask> tasks = tasks_of(2);
  const std::vector<ReportPolicy> policies = policies_named("snapkv,beaconkv");
  ReportData data{.layers = 4, .problems = 2, .budget = 48, .repeats = 1, .needed = 0.3};
  REQUIRE(measure_regret(reasoner(), tasks, policies, tasks[1].problem.id, data).ok());
  const std::vector<ProblemResult> results = measure_accuracy(reasoner(), tasks, policies, {48}).or_throw();
  const std::vector<AccuracyRow> rows = accuracy_rows(results);
  REQUIRE(rows.size() == 3);
  CHECK(rows[0].policy == "full");
  CHECK(rows[0].regret == 0.0);
  CHECK(data.map_problem == tasks[1].problem.id);
  REQUIRE(data.regret.size() == 2);
  for (std::size_t i = 0; i < 2; ++i) {
    const RegretCurve& curve = data.regret[i];
    CHECK(curve.policy == rows[i + 1].policy);
    CHECK(curve.mean > 0.05);
    CHECK(std::abs(curve.mean - rows[i + 1].regret.value()) < 1e-5);
    CHECK(curve.right == rows[i + 1].right);
    double layers = 0;
    for (const double regret : curve.by_layer) layers += regret / 4;
    CHECK(std::abs(layers - curve.mean) < 1e-9);
    double parts = 0;  // of almost equally many steps
    for (const double regret : curve.by_part) parts += regret / static_cast<double>(RegretCurve::parts);
    CHECK(std::abs(parts - curve.mean) < 0.01 * curve.mean);
    CHECK(curve.by_part.front() == 0);  // the budget is not full yet
  }

  REQUIRE(measure_latency(reasoner(), tasks, policies, data).ok());
  REQUIRE(data.latency.size() == 5);
  const std::size_t steps = tasks[0].full.tokens.size() + tasks[1].full.tokens.size() - 2;
  for (const Latency& latency : data.latency) {
    CHECK(latency.steps.size() == steps);
    CHECK(std::is_sorted(latency.steps.begin(), latency.steps.end()));
    CHECK(latency.steps.front() > 0);
  }
  CHECK(data.latency[0].evictions.empty());
  // A layer a step: about four times as many steps evict.
  CHECK(data.latency[2].evictions.size() > 3 * data.latency[1].evictions.size());
}

TEST_CASE("the page is well formed whatever things are called, and refers to nothing outside", "[report]") {
  const std::string page = page_of(hostile());
  CHECK(fault_of(page) == "");
  CHECK(page.find("<script") == std::string::npos);
  CHECK(page.find("&lt;script&gt;") != std::string::npos);
  for (const char* const outside : {"http", "//", "url(", "src=", "href", "@import", "<link", "<img"}) {
    INFO(outside);
    CHECK(page.find(outside) == std::string::npos);
  }
  for (const char* const part : {"Figure 1.", "Figure 2.", "Figure 3.", "Figure 4.", "1\u2009234\u2009567 weights"}) {
    INFO(part);
    CHECK(page.find(part) != std::string::npos);
  }
  // `other` was named and is not in the results.
  CHECK(page.find("There are no results of other") != std::string::npos);
  CHECK(page.find("nan") == std::string::npos);
  CHECK(page.find("inf\"") == std::string::npos);
}

TEST_CASE("figures without data say so", "[report]") {
  ReportData data = hostile();
  data.accuracy.resize(1);
  CHECK(accuracy_figure(data).find("no policy with a budget") != std::string::npos);
  for (Latency& latency : data.latency) latency.evictions.clear();
  CHECK(latency_figure(data).find("Nothing was evicted") != std::string::npos);
  CHECK(fault_of(page_of(data)) == "");
  for (Latency& latency : data.latency) latency.steps.clear();  // texts of one token
  CHECK(fault_of(page_of(data)) == "");
}

TEST_CASE("a report overwrites its page and touches nothing else; errors name the argument and write nothing", "[report]") {
  const std::filesystem::path folder = std::filesystem::temp_directory_path() / "beaconkv_report_test";
  std::filesystem::remove_all(folder);
  const ReportOptions good{.directory = folder / "deep" / "er",
                           .model = model_directory,
                           .prompts = prompts_file,
                           .policies = "full,beaconkv",
                           .budgets = "64",
                           .limit = 1,
                           .repeats = 1,
                           .date = "2001-02-03",
                           .command = "policy_lab report <here>"};
  const auto refused = [&](ReportOptions options, const std::vector<std::string>& words) {
    const Status status = report(options);
    REQUIRE(!status.ok());
    for (const std::string& word : words) {
      CAPTURE(word, status.message());
      CHECK(status.message().find(word) != std::string::npos);
    }
    CHECK(!std::filesystem::exists(folder / "deep"));
  };
  const auto with = [&](auto&& change) {
    ReportOptions options = good;
    change(options);
    return options;
  };
  std::filesystem::create_directories(folder);
  std::ofstream(folder / "file") << "x";
  std::ofstream(folder / "damaged.jsonl") << "{\"policy\":1}\n";
  std::ofstream(folder / "empty.jsonl") << "";
  REQUIRE(write_results(folder / "foreign.jsonl", {{.policy = "p", .budget = 8, .problem = "nowhere"}}).ok());
  REQUIRE(write_results(folder / "a.jsonl", {{.policy = "full", .problem = "0"}, {.policy = "p", .budget = 8, .problem = "0"}})
              .ok());
  refused(with([](ReportOptions& o) { o.policies = "beaconkv,nobody"; }), {"--policies", "'nobody'"});
  refused(with([](ReportOptions& o) { o.policies = "full"; }), {"--policies = full"});
  refused(with([](ReportOptions& o) { o.policies = "rkv,rkv"; }), {"--policies", "'rkv'", "twice"});
  refused(with([](ReportOptions& o) { o.policies = "beaconkv:n_beacon=x"; }), {"n_beacon = x"});
  refused(with([](ReportOptions& o) { o.budgets = "64,none"; }), {"--budgets", "'none'"});
  refused(with([](ReportOptions& o) { o.budget = 0; }), {"--budget = 0"});
  refused(with([](ReportOptions& o) { o.limit = -1; }), {"--limit = -1"});
  refused(with([](ReportOptions& o) { o.repeats = 0; }), {"--repeats = 0"});
  refused(with([](ReportOptions& o) { o.max_new = -2; }), {"--max-new = -2"});
  refused(with([](ReportOptions& o) { o.needed = -1; }), {"--needed = -1"});
  refused(with([](ReportOptions& o) { o.needed = std::nan(""); }), {"--needed = nan"});
  refused(with([](ReportOptions& o) { o.instruction_set = "mmx"; }), {"--instruction-set", "mmx"});
  refused(with([](ReportOptions& o) { o.problem = "77777"; }), {"--problem = 77777"});
  refused(with([](ReportOptions& o) { o.model = "nowhere"; }), {"--model = nowhere"});
  refused(with([](ReportOptions& o) { o.prompts = "nowhere.jsonl"; }), {"nowhere.jsonl"});
  refused(with([&](ReportOptions& o) { o.results = {folder / "none.jsonl"}; }),
          {"--results = ", "none.jsonl", "cannot be read"});
  refused(with([&](ReportOptions& o) { o.results = {folder / "damaged.jsonl"}; }), {"--results = ", "damaged.jsonl", "line 1"});
  refused(with([&](ReportOptions& o) { o.results = {folder / "empty.jsonl"}; }), {"--results = ", "empty.jsonl", "no results"});
  refused(with([&](ReportOptions& o) { o.results = {folder / "foreign.jsonl"}; }), {"--results", "'nowhere'", "--prompts"});
  refused(with([&](ReportOptions& o) {
            o.results = {folder / "a.jsonl", folder / "a.jsonl"};
          }),
          {"--results = ", "p at 8", "'0'"});
  refused(with([&](ReportOptions& o) { o.directory = folder / "file"; }), {"DIR = ", "file"});
  refused(with([&](ReportOptions& o) { o.directory = folder / "file" / "below"; }), {"DIR = ", "below"});
  CHECK(text_of(folder / "file") == "x");

  std::filesystem::create_directories(good.directory);
  std::ofstream(good.directory / "mine.txt") << "stays";
  std::ofstream(good.directory / "index.html") << "old";
  const Status status = report(good);
  INFO(status.message());
  REQUIRE(status.ok());
  CHECK(text_of(good.directory / "mine.txt") == "stays");
  CHECK(std::distance(std::filesystem::directory_iterator(good.directory), std::filesystem::directory_iterator()) == 2);
  const std::string page = text_of(good.directory / "index.html");
  CHECK(page.size() < 3'000'000);
  CHECK(fault_of(page) == "");
  CHECK(page.find("http") == std::string::npos);
  for (const char* const part : {"reasoner", "prompts.jsonl", "2001-02-03", "report &lt;here&gt;", "867\u2009456"}) {
    INFO(part);
    CHECK(page.find(part) != std::string::npos);
  }
  std::filesystem::remove_all(folder);
}
