// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

/// \file
/// The parts of policy_lab: what it reads, how it judges, and that a policy at work is what its metrics say.

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "policy_lab/evaluation.hpp"
#include "policy_lab/problems.hpp"
#include "policy_lab/results.hpp"
#include "policy_lab/run.hpp"
#include "policy_lab/settings.hpp"
#include "policy_lab/table.hpp"
#include "support/catch.hpp"
#include "support/files.hpp"
#include "support/instruction_sets.hpp"
#include "support/reasoner.hpp"

using namespace beaconkv;
using namespace beaconkv::lab;
using namespace beaconkv::test;

namespace {

[[nodiscard]] std::string load_error(const std::string& text) {
  const TemporaryFile file(text);
  return load_problems(file.path(), model_directory, 56).status().message();
}

[[nodiscard]] EvaluationOptions options_for(const Problem& problem) {
  return {.max_new = static_cast<index_t>(problem.expected.size()) + 24, .eos = reasoner().config().eos_ids, .compare = true};
}

[[nodiscard]] Outcome evaluate_policy(const std::string& text, index_t budget, const Problem& problem,
                                      index_t layers_per_step = 0) {
  const PolicySpec spec = parse_policies(text).or_throw().front();
  const EvaluationOptions options = options_for(problem);
  const FullText full = generate_full(reasoner(), problem, options).or_throw();
  return evaluate(reasoner(), find_policy(spec.name).or_throw(), {.budget = budget, .layers_per_step = layers_per_step},
                  {spec.text, spec.settings, {}}, problem, full, options)
      .or_throw();
}

/// In how many decode steps something was evicted.
[[nodiscard]] index_t evictions_of(const Outcome& o) {
  return std::count_if(o.steps.begin(), o.steps.end(), [](const StepTime& step) { return step.evicted; });
}

/// The lines of a CSV file, in fields.
[[nodiscard]] std::vector<std::vector<std::string>> read_csv(const std::filesystem::path& file) {
  std::vector<std::vector<std::string>> lines;
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    std::istringstream fields(line);
    lines.emplace_back();
    for (std::string field; std::getline(fields, field, ',');) lines.back().push_back(field);
  }
  return lines;
}

[[nodiscard]] std::size_t column(const std::string& name) {
  const std::vector<std::string>& names = column_names();
  const auto found = std::find(names.begin(), names.end(), name);
  REQUIRE(found != names.end());
  return static_cast<std::size_t>(found - names.begin());
}

}  // namespace

TEST_CASE("policies and budgets are read from the command line") {
  const std::vector<PolicySpec> specs = parse_policies("full,rkv:lambda=0.1:kernel=5").or_throw();
  REQUIRE(specs.size() == 2);
  REQUIRE(specs[1].name == "rkv");
  REQUIRE(specs[1].settings.at("lambda") == "0.1");
  REQUIRE(specs[1].settings.at("kernel") == "5");
  REQUIRE(parse_budgets("64,96").or_throw() == std::vector<index_t>{64, 96});

  require_says(parse_policies("full,,rkv").status().message(), {"empty name"});
  require_says(parse_policies("rkv:lambda").status().message(), {"'lambda'", "setting=value"});
  require_says(parse_policies("rkv:lambda=1:lambda=2").status().message(), {"'lambda'", "twice"});
  require_says(parse_budgets("64,-3").status().message(), {"'-3'"});
  require_says(parse_budgets("64,1e3").status().message(), {"'1e3'"});
  require_says(parse_budgets("99999999999999999999").status().message(), {"'99999999999999999999'"});
  require_says(find_policy("snap").status().message(), {"'snap'", "snapkv"});
}

TEST_CASE("a setting that cannot be read or that nobody has is an error") {
  Settings settings("p", {{"kernel", "x"}}, {{"lambda", "0.5"}});
  REQUIRE(settings.number("lambda", 0.1F) == 0.5F);
  REQUIRE(settings.count("window", 7) == 7);
  REQUIRE(settings.count("kernel", 5) == 5);
  require_says(settings.status().message(), {"kernel = x"});

  Settings unknown("p", {{"kernal", "3"}}, {});
  REQUIRE(unknown.count("kernel", 5) == 5);
  require_says(unknown.status().message(), {"'kernal'", "kernel"});
}

TEST_CASE("problems are read with or without token ids") {
  const TemporaryFile file(
      "{\"prompt\": \"<bos> a = 3\", \"id\": 7, \"level\": 2}\n\n{\"prompt_ids\": [1, 2], \"answer_ids\": [5]}\n");
  const std::vector<Problem> problems = load_problems(file.path(), model_directory, 56).or_throw();
  REQUIRE(problems.size() == 2);
  REQUIRE(problems[0].id == "7");
  REQUIRE(problems[0].level == 2);
  REQUIRE(problems[0].prompt == std::vector<int>{1, 30, 3, 13});
  REQUIRE(problems[1].answer == std::vector<int>{5});
}

TEST_CASE("malformed prompts are refused by line and value") {
  require_says(load_error("{\"prompt_ids\": [1]}\nnot json\n"), {"line 2"});
  require_says(load_error("[1, 2]\n"), {"line 1", "[1,2]", "object"});
  require_says(load_error("{\"prompt_ids\": [1, 56]}\n"), {"line 1", "prompt_ids", "56"});
  require_says(load_error("{\"prompt_ids\": [1, -1]}\n"), {"prompt_ids", "-1"});
  require_says(load_error("{\"prompt_ids\": [1, 1e300]}\n"), {"prompt_ids", "1e+300"});
  require_says(load_error("{\"prompt_ids\": [1.5]}\n"), {"1.5"});
  require_says(load_error("{\"prompt_ids\": \"1 2\"}\n"), {"prompt_ids", "list"});
  require_says(load_error("{\"level\": 3}\n"), {"line 1", "prompt"});
  require_says(load_error("{\"prompt\": \"<bos> hello\"}\n"), {"line 1", "hello"});
  require_says(load_error("{\"prompt\": \"\"}\n"), {"line 1", "empty"});
  require_says(load_error("{\"prompt_ids\": [1], \"level\": \"easy\"}\n"), {"level", "easy"});
  require_says(load_error("\n"), {"no problems"});
  require_says(load_error("{\"id\": 3, \"prompt_ids\": [1]}\n\n{\"id\": \"3\", \"prompt_ids\": [1]}\n"),
               {"line 3", "id = '3'", "line 1"});
  const TemporaryFile unnamed("{\"prompt_ids\": [1]}\n{\"prompt_ids\": [1]}\n");
  REQUIRE(load_problems(unnamed.path(), model_directory, 56).or_throw()[1].id == "line 2");
  require_says(load_problems("/does/not/exist.jsonl", model_directory, 56).status().message(), {"/does/not/exist.jsonl"});
}

TEST_CASE("a limit takes problems evenly over the levels, in file order") {
  std::vector<Problem> all;
  for (int i = 0; i < 9; ++i) all.push_back({.id = std::to_string(i), .level = i % 3 == 0 ? 12 : (i % 3 == 1 ? 18 : 24)});
  const auto ids = [&](index_t limit) {
    std::string text;
    for (const Problem& p : take_evenly(all, limit)) text += p.id;
    return text;
  };
  REQUIRE(ids(0) == "012345678");
  REQUIRE(ids(3) == "012");
  REQUIRE(ids(4) == "0123");
  REQUIRE(ids(6) == "012345");
  REQUIRE(ids(100) == "012345678");
}

TEST_CASE("an answer is what stands between its marker and the end") {
  const std::vector<int> eos{2};
  const Problem p{.expected = {7, 9, 31, 11, 2}, .answer = {31, 11}};  // 9 is the marker
  REQUIRE(p.answered_by({7, 9, 31, 11, 2}, eos));
  REQUIRE(p.answered_by({5, 5, 9, 31, 11, 2}, eos));           // another way to the same answer
  REQUIRE_FALSE(p.answered_by({7, 9, 31, 12, 2}, eos));        // another answer
  REQUIRE_FALSE(p.answered_by({7, 9, 31, 11}, eos));           // does not end
  REQUIRE_FALSE(p.answered_by({7, 9, 31, 11, 4, 2}, eos));     // goes on
  REQUIRE_FALSE(p.answered_by({7, 9, 4, 9, 31, 11, 2}, eos));  // the first marker counts
  REQUIRE_FALSE(p.answered_by({31, 11, 2}, eos));              // no marker
  REQUIRE_FALSE(p.answered_by({}, eos));
  const Problem no_text{.answer = {31, 11}};
  REQUIRE(no_text.answered_by({7, 31, 11, 2}, eos));
  REQUIRE_FALSE(no_text.answered_by({11, 2}, eos));
}

TEST_CASE("with a budget larger than the problem every policy writes the full cache's text") {
  const Problem problem = some_problems(1).front();
  for (const PolicyEntry& entry : policy_entries()) {
    CAPTURE(entry.name);
    const index_t budget = entry.name == "pyramidkv" ? 8000 : 1000;  // of which its last layer gets a twentieth
    const Outcome o = evaluate_policy(std::string(entry.name), budget, problem);
    REQUIRE(o.same_text);
    REQUIRE(o.exact);
    REQUIRE(evictions_of(o) == 0);
    REQUIRE_FALSE(o.prompt_eviction_us);
    REQUIRE(o.kl == 0.0);
    REQUIRE_THAT(o.mass_kept, Catch::Matchers::WithinAbs(1.0, 1e-5));
  }
}

TEST_CASE("a small budget shows in every column") {
  const Problem problem = some_problems(1).front();
  const auto prompt = problem.prompt.size();
  for (const PolicyEntry& entry : policy_entries()) {
    if (entry.name == "full" || entry.name == "pyramidkv") continue;
    CAPTURE(entry.name);
    const Outcome o = evaluate_policy(std::string(entry.name), 64, problem);
    REQUIRE(o.kl > 0.0);
    REQUIRE(o.mass_kept < 0.999);
    REQUIRE(o.mass_kept > 0.1);
    // 4 layers x 2 KV heads x 32 floats of K and V a row
    REQUIRE(o.peak_kv_bytes == (prompt + 64) * 4 * 2 * 2 * 32 * sizeof(float));
    // Every 8 tokens from the 64th generated one that is cached on; the last token of a text is never cached.
    for (std::size_t i = 0; i < o.steps.size(); ++i) REQUIRE(o.steps[i].evicted == (i >= 63 && (i - 63) % 8 == 0));
    REQUIRE(evictions_of(o) > 10);
    const std::set<std::string_view> without_state{"random", "recent_window", "streaming_llm", "keydiff", "knorm", "lagkv"};
    REQUIRE((o.state_bytes > 0) == !without_state.contains(entry.name));
  }
}

TEST_CASE("pyramidkv: layers have budgets of their own, with the same mean") {
  const Problem problem = some_problems(1).front();
  const Outcome o = evaluate_policy("pyramidkv", 64, problem);
  // Around 64: 118, 82, 46 and 10, of which the problem's text of some 210 tokens fills all.
  REQUIRE(o.peak_kv_bytes <= (problem.prompt.size() + 64) * 4 * 2 * 2 * 32 * sizeof(float));
  REQUIRE(o.peak_kv_bytes >= (problem.prompt.size() + 56) * 4 * 2 * 2 * 32 * sizeof(float));
  for (std::size_t i = 0; i < o.steps.size() && i < 9; ++i) REQUIRE_FALSE(o.steps[i].evicted);
  REQUIRE(evictions_of(o) > 50);  // the last layer's budget is 10, of which 9 stay
}

TEST_CASE("every decode step is timed, the model's part and the policy's") {
  const Problem problem = some_problems(1).front();
  const FullText full = generate_full(reasoner(), problem, options_for(problem)).or_throw();
  REQUIRE(full.steps.size() == full.tokens.size() - 1);
  for (const StepTime& step : full.steps) {
    REQUIRE(step.model_us > 0);
    REQUIRE(step.policy_us == 0);
    REQUIRE_FALSE(step.evicted);
  }
  const Outcome o = evaluate_policy("beaconkv", 64, problem);
  REQUIRE(o.steps.size() == full.steps.size());
  double policy_us = 0;
  for (const StepTime& step : o.steps) {
    REQUIRE(step.model_us > 0);
    policy_us += step.policy_us;
  }
  REQUIRE(policy_us > 0);
}

TEST_CASE("with layers_per_step no decode step pays for more layers") {
  const Problem problem = some_problems(1).front();
  const Outcome together = evaluate_policy("beaconkv", 64, problem);
  const Outcome staggered = evaluate_policy("beaconkv", 64, problem, 1);
  // Four layers, one a step, then four steps without: as many evictions of layers, but for those at the end of the text.
  for (std::size_t i = 0; i < staggered.steps.size(); ++i) REQUIRE(staggered.steps[i].evicted == (i >= 63 && (i - 63) % 8 < 4));
  REQUIRE(evictions_of(staggered) <= 4 * evictions_of(together));
  REQUIRE(evictions_of(staggered) > 4 * evictions_of(together) - 4);
  const std::size_t row_bytes = 2 * 2 * 32 * sizeof(float);
  // A layer that waits grows by a row a step, while those that were first have not come back to the budget yet.
  REQUIRE(staggered.peak_kv_bytes == together.peak_kv_bytes);
  REQUIRE(together.peak_kv_bytes == (problem.prompt.size() + 64) * 4 * row_bytes);
  REQUIRE(evaluate_policy("rpc", 64, problem, 4).kl == evaluate_policy("rpc", 64, problem).kl);
}

TEST_CASE("the least of several times, step by step") {
  std::vector<StepTime> steps{{.model_us = 3, .policy_us = 1}, {.model_us = 2, .policy_us = 9, .evicted = true}};
  keep_least(steps, {{.model_us = 2, .policy_us = 2}, {.model_us = 4, .policy_us = 5, .evicted = true}});
  REQUIRE(steps.size() == 2);
  REQUIRE(steps[0].model_us == 2);
  REQUIRE(steps[0].policy_us == 1);
  REQUIRE(steps[1].model_us == 2);
  REQUIRE(steps[1].policy_us == 5);
  REQUIRE(steps[1].evicted);
}

TEST_CASE("the same run gives the same outcome, whatever the number of problems at a time and of repeats") {
  const TemporaryFile one("");
  const TemporaryFile two("");
  RunOptions options{
      .model = model_directory, .prompts = prompts_file, .policies = "random,beaconkv", .budgets = "64", .limit = 3};
  const auto columns = [&](index_t threads, index_t repeats, const std::filesystem::path& csv) {
    options.threads = threads;
    options.repeats = repeats;
    options.csv = csv;
    REQUIRE(run(options).ok());
    std::vector<std::vector<std::string>> lines = read_csv(csv);
    for (std::vector<std::string>& line : lines) {
      const std::string evictions = line.at(column("evictions"));
      line.resize(column("tokens_per_second"));  // from here on: time
      line.push_back(evictions);
    }
    return lines;
  };
  const auto serial = columns(1, 1, one.path());
  REQUIRE(serial.size() == 3);
  REQUIRE(serial == columns(3, 2, two.path()));
}

TEST_CASE("speed against rpc at the same budget, whichever stands first") {
  const TemporaryFile csv("");
  const RunOptions options{.model = model_directory,
                           .prompts = prompts_file,
                           .policies = "full,beaconkv,rpc,rpc:n_recent_queries=4",
                           .budgets = "64,72",
                           .limit = 1,
                           .compare = false,
                           .csv = csv.path()};
  REQUIRE(run(options).ok());
  const auto lines = read_csv(csv.path());
  REQUIRE(lines.size() == 8);
  const std::size_t against_rpc = column("speed_against_rpc_percent");
  REQUIRE(lines[1][against_rpc] == "-");
  const auto speed = [&](std::size_t line) { return std::stod(lines[line][column("tokens_per_second")]); };
  for (std::size_t line = 2; line < 8; ++line) {
    CAPTURE(line);
    const std::size_t rpc = line % 2 == 0 ? 4 : 5;  // of the same budget
    REQUIRE(lines[line][1] == lines[rpc][1]);
    // The speed in the table is rounded to one token a second, the comparison to 0.1 %.
    const double rounding = 0.06 + 200 / std::min(speed(line), speed(rpc));
    REQUIRE_THAT(std::stod(lines[line][against_rpc]),
                 Catch::Matchers::WithinAbs(100 * (speed(line) / speed(rpc) - 1), rounding));
  }
  REQUIRE(lines[4][against_rpc] == "+0.0");
}

TEST_CASE("what each policy did on each problem, written and read") {
  const TemporaryFile file;
  const TemporaryFile csv;
  const RunOptions options{.model = model_directory,
                           .prompts = prompts_file,
                           .policies = "full,snapkv:kernel=1",
                           .budgets = "64",
                           .limit = 3,
                           .csv = csv.path(),
                           .results = file.path()};
  REQUIRE(run(options).ok());
  const std::vector<ProblemResult> results = read_results(file.path()).or_throw();
  const std::vector<Problem> problems = some_problems(3);
  REQUIRE(results.size() == 6);
  index_t evictions = 0;
  double regret = 0;
  for (std::size_t i = 0; i < results.size(); ++i) {
    CAPTURE(i);
    const ProblemResult& r = results[i];
    REQUIRE(r.policy == (i < 3 ? "full" : "snapkv:kernel=1"));
    REQUIRE(r.budget == (i < 3 ? 0 : 64));
    REQUIRE(r.problem == problems[i % 3].id);
    REQUIRE(r.level == problems[i % 3].level);
    REQUIRE(r.steps > 100);
    REQUIRE(r.step_p50_us <= r.step_max_us);
    REQUIRE(r.step_max_us <= r.model_us + r.policy_us);
    if (i < 3) {
      REQUIRE((r.exact && r.same_text && r.kl == 0.0 && r.regret == 0.0 && r.evictions == 0));
    } else {
      REQUIRE((r.kl > 0.0 && r.regret > 0.0 && r.evictions > 0));
      evictions += r.evictions;
      regret += *r.regret / 3;
    }
  }
  const auto lines = read_csv(csv.path());
  REQUIRE(lines[2][column("evictions")] == std::to_string(evictions));
  REQUIRE_THAT(std::stod(lines[2][column("attention_mass_kept")]), Catch::Matchers::WithinAbs(1 - regret, 1e-4));

  REQUIRE(write_results(file.path(), results).ok());
  const std::string text = text_of(file.path());
  REQUIRE(write_results(file.path(), read_results(file.path()).or_throw()).ok());
  REQUIRE(text_of(file.path()) == text);
}

TEST_CASE("damaged results are refused with their line") {
  const std::string line =
      R"({"policy":"p","budget":64,"problem":"7","level":1,"exact":true,"same_text":false,"kl":null,"regret":0.5,"steps":3,)"
      R"("evictions":1,"model_us":1.5,"policy_us":2,"step_p50_us":1,"step_max_us":2,"peak_kv_bytes":8,"state_bytes":0})";
  const auto error_of = [](const std::string& text) {
    const TemporaryFile file(text);
    const Result<std::vector<ProblemResult>> results = read_results(file.path());
    REQUIRE_FALSE(results.ok());
    return results.status().message();
  };
  const TemporaryFile good(line + "\n");
  const std::vector<ProblemResult> results = read_results(good.path()).or_throw();
  REQUIRE(results.size() == 1);
  REQUIRE((results[0].policy == "p" && results[0].exact && !results[0].kl && results[0].regret == 0.5));
  require_says(error_of(line + "\n" + line + "\n"), {"line 2", "p at 64 on problem '7' is there twice"});
  require_says(error_of(line.substr(0, line.size() - 4)), {"line 1"});
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string changed = line;
    REQUIRE(changed.find(from) != std::string::npos);
    return error_of(changed.replace(changed.find(from), from.size(), to) + "\n");
  };
  require_says(with("\"budget\":64", "\"budget\":-1"), {"line 1", "budget = -1", "not negative"});
  require_says(with("\"exact\":true", "\"exact\":1"), {"line 1", "exact = 1", "true or false"});
  require_says(with("\"kl\":null", "\"kl\":\"x\""), {"line 1", "kl = \"x\""});
  require_says(with("\"level\":1,", ""), {"line 1", "'level'"});
  require_says(with("\"level\":1,", "\"level\":1,\"more\":2,"), {"line 1", "more"});
  require_says(read_results("/does/not/exist").status().message(), {"/does/not/exist"});
}

TEST_CASE("an instruction set can be forced") {
  const test::ForcedSet restore(instruction_set());
  RunOptions options{.model = model_directory, .prompts = prompts_file, .policies = "rpc", .budgets = "64", .limit = 1};
  for (const InstructionSet set : {InstructionSet::baseline, InstructionSet::avx2, InstructionSet::avx512}) {
    options.instruction_set = name_of(set);
    const Status status = run(options);
    REQUIRE(status.ok() == is_supported(set));
    if (status.ok())
      REQUIRE(instruction_set() == set);
    else
      require_says(status.message(), {"--instruction-set", name_of(set)});
  }
  options.instruction_set = "sse9";
  require_says(run(options).message(), {"--instruction-set", "'sse9'", "avx2"});
}

TEST_CASE("what cannot work is refused before anything runs") {
  const RunOptions good{.model = model_directory, .prompts = prompts_file, .budgets = "64", .limit = 1};
  const auto error = [&](auto&& change) {
    RunOptions options = good;
    change(options);
    return run(options).message();
  };
  require_says(error([](RunOptions& o) { o.budgets = "8"; }), {"budget 8", "n_recent_kv = 8", "budget.min = 7"});
  require_says(error([](RunOptions& o) { o.policies = "beaconkv:n_beacon=-1"; }), {"n_beacon = -1"});
  require_says(error([](RunOptions& o) { o.settings["kernel"] = "4"; }), {"pool.kernel = 4"});
  require_says(error([](RunOptions& o) {
                 o.policies = "rpc";
                 o.settings["n_beacon"] = "4";
               }),
               {"'n_beacon'"});
  require_says(error([](RunOptions& o) { o.limit = -1; }), {"--limit = -1"});
  require_says(error([](RunOptions& o) { o.repeats = 0; }), {"--repeats = 0"});
  require_says(error([](RunOptions& o) { o.layers_per_step = -1; }), {"--layers-per-step = -1"});
  require_says(error([](RunOptions& o) { o.model = "/does/not/exist"; }), {"/does/not/exist"});
  require_says(error([](RunOptions& o) { o.csv = "/does/not/exist/a.csv"; }), {"/does/not/exist/a.csv"});
  require_says(error([](RunOptions& o) { o.results = "/does/not/exist/a"; }), {"--results", "/does/not/exist/a"});
  require_says(error([](RunOptions& o) { o.policies = "rpc,snapkv,rpc"; }), {"--policies", "rpc at 64", "twice"});
  const TemporaryFile copy(text_of(prompts_file));
  for (auto RunOptions::*file : {&RunOptions::csv, &RunOptions::results, &RunOptions::plot}) {
    RunOptions options = good;
    options.prompts = copy.path();
    options.*file = copy.path().parent_path() / "." / copy.path().filename();
    require_says(run(options).message(), {"--", copy.path().filename().string(), "is the file of --prompts"});
  }
  REQUIRE(text_of(copy.path()) == text_of(prompts_file));
}

TEST_CASE("rows sum outcomes up") {
  const std::vector<Problem> problems{{.level = 1}, {.level = 1}, {.level = 2}};
  const std::vector<Outcome> outcomes{
      {.exact = true,
       .same_text = true,
       .kl = 0.1,
       .mass_kept = 1.0,
       .peak_kv_bytes = 10,
       .steps = {{.model_us = 40}, {.model_us = 40, .policy_us = 30, .evicted = true}, {.model_us = 30, .policy_us = 20}},
       .prompt_eviction_us = 7},
      {.exact = false,
       .kl = 0.3,
       .mass_kept = 0.8,
       .peak_kv_bytes = 30,
       .steps = {{.model_us = 100, .policy_us = 60, .evicted = true}, {.model_us = 80}}},
      {.exact = true, .kl = 0.2, .mass_kept = 0.6, .peak_kv_bytes = 20}};
  Row row = summarise(problems, outcomes, true);
  row.policy = "p";
  row.budget_max = "64";
  row.budget_min = "56";
  // Steps of 40, 70 and 50 us, and of 160 and 80: 5 in 400 us, of which 110 the policy's. The medians are 50 and 80.
  REQUIRE(cells(row) == std::vector<std::string>{"p",      "64",     "56", "3",  "66.7",  "50/100", "33.3",
                                                 "0.2000", "0.8000", "30", "0",  "12500", "-",      "27.5",
                                                 "70",     "2.00",   "3",  "30", "60",    "60"});
  REQUIRE(column_names().size() == cells(row).size());
  row.speed_against_rpc_percent = -2.84;
  REQUIRE(cells(row)[column("speed_against_rpc_percent")] == "-2.8");
  row.speed_against_rpc_percent = 0.04;
  REQUIRE(cells(row)[column("speed_against_rpc_percent")] == "+0.0");
  const Row nothing = summarise({}, {}, false);
  REQUIRE(cells(nothing)[column("policy_percent")] == "0.0");
  REQUIRE(cells(nothing)[column("worst_step")] == "0.00");
  row.compared = false;
  REQUIRE(cells(row)[7] == "-");
}
