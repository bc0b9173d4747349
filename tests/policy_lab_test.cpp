// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

/// \file
/// The parts of policy_lab: what it reads, how it judges, and that a policy at work is what its metrics say.

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "policy_lab/evaluation.hpp"
#include "policy_lab/problems.hpp"
#include "policy_lab/run.hpp"
#include "policy_lab/settings.hpp"
#include "policy_lab/table.hpp"
#include "support/catch.hpp"

using namespace beaconkv;
using namespace beaconkv::lab;

namespace {

const std::filesystem::path model_directory = std::filesystem::path(BEACONKV_SOURCE_DIR) / "examples/models/reasoner";
const std::filesystem::path prompts_file = model_directory / "prompts.jsonl";

[[nodiscard]] const engine::Model& reasoner() {
  static const engine::Model model = engine::Model::load(model_directory).or_throw();
  return model;
}

/// The first problem of each of some levels.
[[nodiscard]] std::vector<Problem> some_problems(index_t count) {
  return take_evenly(load_problems(prompts_file, model_directory, reasoner().vocab_size()).or_throw(), count);
}

/// A file that is gone afterwards.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& text)
      : path_(std::filesystem::temp_directory_path() / ("beaconkv_lab_test_" + std::to_string(counter_++) + ".jsonl")) {
    std::ofstream(path_) << text;
  }
  ~TemporaryFile() { std::filesystem::remove(path_); }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  [[nodiscard]] const std::filesystem::path& path() const { return path_; }

 private:
  static inline int counter_ = 0;
  std::filesystem::path path_;
};

[[nodiscard]] std::string load_error(const std::string& text) {
  const TemporaryFile file(text);
  return load_problems(file.path(), model_directory, 56).status().message();
}

void require_says(const std::string& message, const std::vector<std::string>& parts) {
  CAPTURE(message);
  for (const std::string& part : parts) {
    CAPTURE(part);
    REQUIRE(message.find(part) != std::string::npos);
  }
}

[[nodiscard]] EvaluationOptions options_for(const Problem& problem) {
  return {.max_new = static_cast<index_t>(problem.expected.size()) + 24, .eos = reasoner().config().eos_ids, .compare = true};
}

[[nodiscard]] Outcome evaluate_policy(const std::string& text, index_t budget, const Problem& problem) {
  const PolicySpec spec = parse_policies(text).or_throw().front();
  const EvaluationOptions options = options_for(problem);
  const FullText full = generate_full(reasoner(), problem, options).or_throw();
  return evaluate(reasoner(), find_policy(spec.name).or_throw(), {.budget = budget}, {spec.text, spec.settings, {}}, problem,
                  full, options)
      .or_throw();
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
    const Outcome o = evaluate_policy(std::string(entry.name), 1000, problem);
    REQUIRE(o.same_text);
    REQUIRE(o.exact);
    REQUIRE(o.eviction_us.empty());
    REQUIRE(o.kl == 0.0);
    REQUIRE_THAT(o.mass_kept, Catch::Matchers::WithinAbs(1.0, 1e-5));
  }
}

TEST_CASE("a small budget shows in every column") {
  const Problem problem = some_problems(1).front();
  const auto prompt = problem.prompt.size();
  for (const PolicyEntry& entry : policy_entries()) {
    if (entry.name == "full") continue;
    CAPTURE(entry.name);
    const Outcome o = evaluate_policy(std::string(entry.name), 64, problem);
    REQUIRE(o.kl > 0.0);
    REQUIRE(o.mass_kept < 0.999);
    REQUIRE(o.mass_kept > 0.1);
    // 4 layers x 2 KV heads x 32 floats of K and V a row
    REQUIRE(o.peak_kv_bytes == (prompt + 64) * 4 * 2 * 2 * 32 * sizeof(float));
    // Every 8 tokens from the 64th generated one that is cached on; the last token of a text is never cached.
    REQUIRE(static_cast<index_t>(o.eviction_us.size()) == (o.tokens - 1 - 64) / 8 + 1);
    REQUIRE((o.state_bytes > 0) == (entry.name != "random" && entry.name != "recent_window"));
  }
}

TEST_CASE("the same run gives the same outcome, whatever the number of problems at a time") {
  const TemporaryFile one("");
  const TemporaryFile two("");
  RunOptions options{
      .model = model_directory, .prompts = prompts_file, .policies = "random,beaconkv", .budgets = "64", .limit = 3};
  const auto columns = [&](index_t threads, const std::filesystem::path& csv) {
    options.threads = threads;
    options.csv = csv;
    REQUIRE(run(options).ok());
    std::ifstream in(csv);
    std::string text;
    for (std::string line; std::getline(in, line);) {  // up to state_bytes: what follows is time
      std::size_t end = 0;
      for (int commas = 0; commas < 11; ++commas) end = line.find(',', end) + 1;
      text += line.substr(0, end) + "\n";
    }
    return text;
  };
  const std::string serial = columns(1, one.path());
  REQUIRE(std::count(serial.begin(), serial.end(), '\n') == 3);
  REQUIRE(serial == columns(3, two.path()));
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
  require_says(error([](RunOptions& o) { o.model = "/does/not/exist"; }), {"/does/not/exist"});
  require_says(error([](RunOptions& o) { o.csv = "/does/not/exist/a.csv"; }), {"/does/not/exist/a.csv"});
}

TEST_CASE("rows sum outcomes up") {
  const std::vector<Problem> problems{{.level = 1}, {.level = 1}, {.level = 2}};
  const std::vector<Outcome> outcomes{
      {.exact = true,
       .same_text = true,
       .kl = 0.1,
       .mass_kept = 1.0,
       .tokens = 11,
       .seconds = 1,
       .peak_kv_bytes = 10,
       .eviction_us = {5, 1}},
      {.exact = false, .kl = 0.3, .mass_kept = 0.8, .tokens = 21, .seconds = 2, .peak_kv_bytes = 30, .eviction_us = {3}},
      {.exact = true, .kl = 0.2, .mass_kept = 0.6, .tokens = 31, .seconds = 3, .peak_kv_bytes = 20, .eviction_us = {}}};
  Row row = summarise(problems, outcomes, true);
  row.policy = "p";
  row.budget_max = "64";
  row.budget_min = "56";
  REQUIRE(cells(row) == std::vector<std::string>{"p", "64", "56", "3", "66.7", "50/100", "33.3", "0.2000", "0.8000", "30", "0",
                                                 "10", "3", "3", "5", "5"});
  REQUIRE(column_names().size() == cells(row).size());
  row.compared = false;
  REQUIRE(cells(row)[7] == "-");
}
