// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

/// \file
/// policy_lab sweep: its statistics by hand, its ablations against the library, and the tables that it makes of results.

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "beaconkv/policy/beacon_queries.hpp"
#include "policy_lab/coverage.hpp"
#include "policy_lab/reference_results.hpp"
#include "policy_lab/sweep.hpp"
#include "policy_lab/sweep_rows.hpp"
#include "support/catch.hpp"
#include "support/files.hpp"
#include "support/random.hpp"
#include "support/reasoner.hpp"

using namespace beaconkv;
using namespace beaconkv::lab;
using namespace beaconkv::test;
using Catch::Matchers::WithinAbs;

namespace {

const std::filesystem::path reference_file =
    std::filesystem::path(BEACONKV_SOURCE_DIR) / "examples/policy_lab/reference_results.json";

void require_near(const Interval& i, double low, double high, double margin = 5e-5) {
  REQUIRE_THAT(i.low, WithinAbs(low, margin));
  REQUIRE_THAT(i.high, WithinAbs(high, margin));
}

/// The evictions of a policy along the full cache's text of the first problem.
[[nodiscard]] std::vector<EvictionEvent> evictions_of(const std::string& policy, index_t budget) {
  static const Problem problem = load_problems(prompts_file, model_directory, reasoner().vocab_size()).or_throw().front();
  EvaluationOptions options{.max_new = static_cast<index_t>(problem.expected.size()) + 24,
                            .eos = reasoner().config().eos_ids,
                            .compare = false,
                            .answer = false};
  static const FullText full = generate_full(reasoner(), problem, options).or_throw();
  EventLog log;
  options.log = &log;
  const PolicySpec spec = parse_policies(policy).or_throw().front();
  static_cast<void>(evaluate(reasoner(), find_policy(spec.name).or_throw(), {.budget = budget}, {spec.text, spec.settings, {}},
                             problem, full, options)
                        .or_throw());
  return log.events();
}

/// Whether the same positions went at the same time, by scores that are the same to so many parts.
void require_same_evictions(const std::string& one, const std::string& other, index_t budget, double margin = 0) {
  CAPTURE(one, other, budget);
  const std::vector<EvictionEvent> a = evictions_of(one, budget);
  const std::vector<EvictionEvent> b = evictions_of(other, budget);
  REQUIRE(a.size() > 20);
  REQUIRE(a.size() == b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    REQUIRE(a[i].step == b[i].step);
    for (std::size_t h = 0; h < a[i].heads.size(); ++h) {
      const std::vector<LoggedToken>& from = a[i].heads[h].evicted;
      const std::vector<LoggedToken>& to = b[i].heads[h].evicted;
      REQUIRE(from.size() == to.size());
      for (std::size_t t = 0; t < from.size(); ++t) {
        REQUIRE(from[t].position == to[t].position);
        REQUIRE(std::abs(from[t].score.value() - to[t].score.value()) <=
                static_cast<float>(margin) * std::abs(from[t].score.value()));
      }
    }
  }
}

[[nodiscard]] std::vector<OldQuery> pool_of(const std::vector<std::vector<float>>& rows) {
  std::vector<OldQuery> pool;
  for (const std::vector<float>& row : rows) pool.push_back({row, static_cast<position_t>(10 + pool.size())});
  return pool;
}

[[nodiscard]] std::vector<position_t> positions_of(const std::vector<OldQuery>& queries) {
  std::vector<position_t> positions;
  for (const OldQuery& query : queries) positions.push_back(query.position);
  return positions;
}

[[nodiscard]] ProblemResult result(const std::string& policy, index_t budget, int problem, bool exact) {
  return {.policy = policy,
          .budget = budget,
          .problem = std::to_string(problem),
          .level = problem < 2 ? 12 : 18,
          .exact = exact,
          .kl = 0.5,
          .regret = 0.25,
          .model_us = 30,
          .policy_us = 10,
          .state_bytes = static_cast<std::size_t>(100 + problem)};
}

}  // namespace

TEST_CASE("Wilson's interval: published values") {
  // Newcombe 1998, table I.
  require_near(wilson_interval(81, 263), 0.2553, 0.3662);
  require_near(wilson_interval(15, 148), 0.0624, 0.1605);
  require_near(wilson_interval(0, 20), 0.0, 0.1611);
  require_near(wilson_interval(1, 29), 0.0061, 0.1718);
  require_near(wilson_interval(20, 20), 1 - 0.1611, 1.0);
  REQUIRE(wilson_interval(0, 20).low == 0.0);
  REQUIRE(wilson_interval(20, 20).high == 1.0);
  require_near(wilson_interval(0, 0), 0.0, 1.0, 0);
}

TEST_CASE("McNemar's test: exact, by hand") {
  REQUIRE_THAT(mcnemar_p({5, 0, 20}), WithinAbs(2.0 / 32, 1e-12));
  REQUIRE_THAT(mcnemar_p({0, 5, 20}), WithinAbs(2.0 / 32, 1e-12));
  REQUIRE_THAT(mcnemar_p({1, 9, 20}), WithinAbs(2.0 * (1 + 10) / 1024, 1e-12));
  REQUIRE(mcnemar_p({3, 3, 20}) == 1.0);
  REQUIRE_THAT(mcnemar_p({0, 0, 20}), WithinAbs(1.0, 1e-12));
}

TEST_CASE("the interval of a paired difference") {
  const Paired pair{30, 10, 200};
  REQUIRE_THAT(pair.difference(), WithinAbs(0.1, 1e-12));
  // Nearly normal, of variance (40/200 - 0.1^2) / 200.
  const double half = 1.96 * std::sqrt((0.2 - 0.01) / 200);
  require_near(paired_interval(pair), 0.1 - half, 0.1 + half, 0.006);
  const Interval mirrored = paired_interval({10, 30, 200});
  require_near(mirrored, -0.1 - half, -0.1 + half, 0.006);
  require_near(paired_interval({0, 0, 200}), 0, 0, 0);
  require_near(paired_interval({200, 0, 200}), 1, 1, 0);
  const Interval again = paired_interval(pair);
  require_near(paired_interval(pair), again.low, again.high, 0);
  require_near(paired_interval({}), -1, 1, 0);
}

TEST_CASE("the standard error of a share is not 0 at its ends") {
  REQUIRE_THAT(standard_error(0.5, 201), WithinAbs(std::sqrt(0.25 / 205), 1e-12));
  REQUIRE_THAT(standard_error(0.0, 201), WithinAbs(std::sqrt(2.0 / 205 * 203 / 205 / 205), 1e-12));
  REQUIRE_THAT(standard_error(1.0, 201), WithinAbs(standard_error(0.0, 201), 1e-12));
}

TEST_CASE("samplers by hand") {
  // Two tight bundles and one that stands alone.
  const std::vector<OldQuery> pool = pool_of({{1, 0}, {1, 0.1F}, {1, -0.1F}, {0, 2}, {0.1F, 2}, {-3, -3}});
  REQUIRE(positions_of(sample_queries(pool, 2, QuerySampler::recent)) == std::vector<position_t>{14, 15});
  // The row that is least like all, then the one farthest from it: (1, 0.1) and (0.1, 2) have the smaller cosines with (-3,
  // -3).
  REQUIRE(positions_of(sample_queries(pool, 1, QuerySampler::fps)) == std::vector<position_t>{15});
  const std::vector<OldQuery> centroids = sample_queries(pool, 3, QuerySampler::centroid);
  REQUIRE(positions_of(centroids) == std::vector<position_t>{12, 14, 15});  // each at its newest member's
  REQUIRE(centroids[0].row == std::vector<float>{1, 0});
  REQUIRE_THAT(static_cast<double>(centroids[1].row[0]), WithinAbs(0.05, 1e-6));
  REQUIRE(centroids[2].row == std::vector<float>{-3, -3});
  const std::vector<OldQuery> medoids = sample_queries(pool, 3, QuerySampler::medoid);
  REQUIRE(positions_of(medoids) == std::vector<position_t>{10, 13, 15});
  for (const QuerySampler sampler :
       {QuerySampler::fps, QuerySampler::random, QuerySampler::recent, QuerySampler::centroid, QuerySampler::medoid}) {
    REQUIRE(sample_queries(pool, 0, sampler).empty());
    REQUIRE(positions_of(sample_queries(pool, 6, sampler)) == positions_of(pool));
    REQUIRE(positions_of(sample_queries(pool, 9, sampler)) == positions_of(pool));
    for (index_t count = 1; count < 6; ++count) {
      const std::vector<position_t> kept = positions_of(sample_queries(pool, count, sampler, nullptr, 3));
      REQUIRE(static_cast<index_t>(kept.size()) == count);
      REQUIRE(std::adjacent_find(kept.begin(), kept.end(), std::greater_equal<>()) == kept.end());
    }
  }
  std::vector<index_t> seen(pool.size());
  for (std::uint64_t seed = 0; seed < 600; ++seed)
    for (const position_t at : positions_of(sample_queries(pool, 2, QuerySampler::random, nullptr, seed)))
      ++seen[static_cast<std::size_t>(at - 10)];
  for (const index_t count : seen) REQUIRE(std::abs(count - 200) < 60);  // five standard deviations
}

TEST_CASE("samplers look at queries after RoPE where they are told to") {
  const RopeTable rope = RopeTable::make({.head_dim = 2}).or_throw();
  // The same query everywhere; RoPE turns them to different directions, one radian a token: positions 0, 3, 6 and 1.
  const std::vector<OldQuery> pool{{{1, 0}, 0}, {{1, 0}, 1}, {{1, 0}, 3}, {{1, 0}, 6}};
  // Directions 0, 57, 172 and 344 degrees: 172 is least like the others, then the one farthest from it.
  REQUIRE(positions_of(sample_queries(pool, 2, QuerySampler::fps, &rope)) == std::vector<position_t>{0, 3});
  REQUIRE(positions_of(sample_queries(pool, 2, QuerySampler::fps)) == std::vector<position_t>{0, 1});  // all alike
}

TEST_CASE("the ablation's observer is BeaconQueries where nothing else is asked for, token for token") {
  test::Random random;
  CAPTURE(random.seed());
  const Shape shape{4, 2, 16};
  const RopeTable rope = RopeTable::make({.head_dim = 16}).or_throw();
  for (const auto& [beacons, recent] : {std::pair<index_t, index_t>{16, 16}, {24, 8}, {31, 1}, {0, 8}, {3, 12}}) {
    CAPTURE(beacons, recent);
    BeaconQueries published(shape, {.n_beacon = beacons, .n_recent_queries = recent});
    AblationQueries same(shape, {.n_beacon = beacons, .n_recent_queries = recent});
    AblationQueries other(shape, {.n_beacon = beacons, .n_recent_queries = recent, .sampler = QuerySampler::random});
    AblationQueries whole(shape, {.n_beacon = beacons, .n_recent_queries = recent, .whole_history = true});
    const index_t prompt = 90;
    const std::vector<float> first = random.normals(prompt * 4 * 16);
    Workspace work(max(published.prefill_workspace_size(prompt), published.workspace_size()));
    const QuerySource prompt_queries{QueryView::token_major(first.data(), prompt, 4, 16), 0};
    REQUIRE(published.prefill(prompt_queries, work).ok());
    for (AblationQueries* queries : {&same, &other, &whole}) REQUIRE(queries->prefill(prompt_queries, work).ok());
    for (position_t t = prompt; t < prompt + 100; ++t) {
      const std::vector<float> row = random.normals(4 * 16);
      const QuerySource token{QueryView::token_major(row.data(), 1, 4, 16), t};
      REQUIRE(published.observe(token).ok());
      for (AblationQueries* queries : {&same, &other, &whole}) REQUIRE(queries->observe(token).ok());
      REQUIRE(same.pool_size() == published.pool_size());
      REQUIRE(other.pool_size() == published.pool_size());  // reduced at the same moments
      REQUIRE(whole.pool_size() == (beacons > 0 ? prompt + std::max<index_t>(0, t - prompt + 1 - recent) : 0));
      REQUIRE(same.rows() == published.rows());
      const auto rows = static_cast<std::size_t>(4 * same.rows());
      std::vector<float> a(rows * 16), b(rows * 16);
      std::vector<position_t> at_a(rows), at_b(rows), tags_a(rows), tags_b(rows);
      REQUIRE(published.write_rows(&rope, t, {0, 4}, a.data(), at_a.data(), work, tags_a.data()).ok());
      REQUIRE(same.write_rows(&rope, t, {0, 4}, b.data(), at_b.data(), work, tags_b.data()).ok());
      REQUIRE(a == b);
      REQUIRE(at_a == at_b);
      REQUIRE(tags_a == tags_b);
      if (t % 7 != 0) continue;
      REQUIRE(published.commit().ok());
      for (AblationQueries* queries : {&same, &other, &whole}) REQUIRE(queries->commit().ok());
    }
  }
}

TEST_CASE("beacons look from now, from their own position, or from there at all keys") {
  test::Random random;
  CAPTURE(random.seed());
  const Shape shape{2, 1, 8};
  const RopeTable rope = RopeTable::make({.head_dim = 8}).or_throw();
  const std::vector<float> prompt = random.normals(3 * 2 * 8);
  for (const BeaconPlace place : {BeaconPlace::now, BeaconPlace::own, BeaconPlace::own_unmasked}) {
    AblationQueries queries(shape, {.n_beacon = 3, .n_recent_queries = 1, .place = place});
    Workspace work(queries.workspace_size());
    REQUIRE(queries.prefill({QueryView::token_major(prompt.data(), 3, 2, 8), 5}, work).ok());
    std::vector<float> rows(2 * 3 * 8);
    std::vector<position_t> sees(2 * 3);
    REQUIRE(queries.write_rows(&rope, 20, {0, 2}, rows.data(), sees.data(), work).ok());
    for (std::size_t h = 0; h < 2; ++h)
      for (std::size_t i = 0; i < 3; ++i) {
        const auto own = static_cast<position_t>(5 + i);
        REQUIRE(sees[h * 3 + i] == (place == BeaconPlace::own ? own : 20));
        std::vector<float> row(prompt.begin() + static_cast<std::ptrdiff_t>((i * 2 + h) * 8),
                               prompt.begin() + static_cast<std::ptrdiff_t>((i * 2 + h + 1) * 8));
        rope.rotate(row.data(), place == BeaconPlace::now ? 20 : own);
        for (std::size_t d = 0; d < 8; ++d)
          REQUIRE_THAT(static_cast<double>(rows[(h * 3 + i) * 8 + d]), WithinAbs(static_cast<double>(row[d]), 1e-5));
      }
  }
}

TEST_CASE("beaconkv_ablation keeps what beaconkv keeps") {
  require_same_evictions("beaconkv", "beaconkv_ablation", 64);
  require_same_evictions("beaconkv:n_beacon=28:n_recent_queries=4:pool=max:kernel=3",
                         "beaconkv_ablation:n_beacon=28:n_recent_queries=4:pool=max:kernel=3", 96);
  require_same_evictions("beaconkv_credit", "beaconkv_ablation:n_beacon=24:n_recent_queries=8:orphan_credit=0.95:value_norm=1",
                         64);
  // The square root of a square, by another way.
  require_same_evictions("beaconkv:value_norm=1", "beaconkv_ablation:value_exponent=1", 64, 1e-5);
  require_same_evictions("beaconkv_ablation:value_exponent=1", "beaconkv_ablation:value_exponent=1:value_limit=1000", 64);
  // Credit by the token, over the eight tokens between two evictions.
  require_same_evictions("beaconkv_ablation:orphan_credit=0.43046721", "beaconkv_ablation:credit_per_token=0.9", 64, 1e-5);
}

TEST_CASE("every switch changes what goes") {
  const auto gone = [](const std::string& policy) {
    std::vector<position_t> positions;
    for (const EvictionEvent& event : evictions_of(policy, 64))
      for (const auto& head : event.heads)
        for (const LoggedToken& token : head.evicted) positions.push_back(token.position);
    return positions;
  };
  std::set<std::vector<position_t>> all;
  const std::string credit = "beaconkv_ablation:orphan_credit=0.95";
  std::vector<std::string> policies{"beaconkv_ablation", credit, credit + ":score_at_reductions=1",
                                    "beaconkv_ablation:value_exponent=2", "beaconkv_ablation:value_exponent=2:value_limit=1"};
  for (const char* setting : {"sampler=random", "sampler=random:seed=1", "sampler=recent", "sampler=centroid", "sampler=medoid",
                              "history=whole", "sample_space=post_rope", "beacon_place=own", "beacon_place=own_unmasked"})
    policies.push_back(std::string("beaconkv_ablation:") + setting);
  for (const std::string& policy : policies) {
    const std::vector<position_t> positions = gone(policy);
    CAPTURE(policy);
    REQUIRE(all.insert(positions).second);
    REQUIRE(positions.size() == all.begin()->size());  // as many evictions
  }
}

TEST_CASE("settings of the ablation that cannot be are refused by name") {
  const auto error = [](const std::string& policies) {
    RunOptions options{.model = model_directory, .prompts = prompts_file, .policies = policies, .budgets = "64", .limit = 1};
    return Study::make(options).status().message();
  };
  require_says(error("beaconkv_ablation:sampler=best"), {"sampler = best", "fps or random"});
  require_says(error("beaconkv_ablation:history=long"), {"history = long"});
  require_says(error("beaconkv_ablation:n_beacon=-1"), {"n_beacon = -1"});
  require_says(error("beaconkv_ablation:n_recent_queries=0"), {"n_recent_queries = 0"});
  require_says(error("beaconkv_ablation:value_exponent=-1"), {"value_exponent = -1"});
  require_says(error("beaconkv_ablation:value_limit=-1"), {"value_limit = -1"});
  require_says(error("beaconkv_ablation:value_limit=2"), {"value_limit = 2", "value_exponent"});
  require_says(error("beaconkv_ablation:value_exponent=1:value_norm=1"), {"value_exponent = 1", "value_norm"});
  require_says(error("beaconkv:sampler=fps"), {"no setting 'sampler'"});
}

TEST_CASE("coverage by hand") {
  const std::vector<OldQuery> history = pool_of({{1, 0}, {0, 2}, {-1, 0}, {0, 0}});
  const Coverage c = coverage_of(history, pool_of({{3, 0}, {1, 1}}));
  REQUIRE_THAT(c.worst, WithinAbs(1 + std::sqrt(0.5), 1e-9));  // (-1, 0): cosines -1 and -0.7
  REQUIRE_THAT(c.mean, WithinAbs((0 + (1 - std::sqrt(0.5)) + (1 + std::sqrt(0.5)) + 1) / 4, 1e-9));
  REQUIRE(coverage_of(history, {}).worst == 2);
}

TEST_CASE("rows of results: shares, pairs, means") {
  ResultTable table;
  std::vector<ProblemResult> results;
  for (int p = 0; p < 4; ++p) {
    results.push_back(result("base", 64, p, p < 2));
    results.push_back(result("other", 64, p, p > 0));
  }
  results.back().kl = 1.5;
  results.back().policy_us = 50;
  REQUIRE(table.add(results).ok());
  const std::vector<Problem> problems = table.problems(0);
  REQUIRE(problems.size() == 4);
  const std::string base = "base";
  const SweptRow row = table.row("other", 64, &base, problems).or_throw();
  REQUIRE(row.right == 3);
  REQUIRE(row.by_level.at(12) == std::pair<index_t, index_t>(1, 2));
  REQUIRE(row.by_level.at(18) == std::pair<index_t, index_t>(2, 2));
  REQUIRE(row.against_base->fixed == 2);
  REQUIRE(row.against_base->broken == 1);
  REQUIRE_THAT(*row.kl, WithinAbs(0.75, 1e-12));
  REQUIRE_THAT(*row.regret, WithinAbs(0.25, 1e-12));
  REQUIRE_THAT(row.policy_share, WithinAbs(80.0 / 200, 1e-12));
  REQUIRE(row.state_bytes == 103);
  const std::string line = SweptLines(true, 0).line(row);
  require_says(line, {"| `other` | 64 | 4 | 75.0 | [30.1, 95.4] | 50/100 | +25.0 |",
                      "| +2/-1 | 1.0000 | 0.7500 | 25.00 | 40.0 | 103 |"});
  REQUIRE(std::count(line.begin(), line.end(), '|') == 15);
  const std::string head = SweptLines(true, 0).header();
  REQUIRE(std::count(head.begin(), head.end(), '|') == 30);
  REQUIRE_FALSE(table.row("base", 64, nullptr, problems)->against_base);

  REQUIRE(table.problems(2).size() == 2);  // one of each level
  REQUIRE(table.problems(2)[1].id == "2");
  require_says(table.row("third", 64, nullptr, problems).status().message(), {"no row third at 64"});
  require_says(table.row("base", 96, nullptr, problems).status().message(), {"no row base at 96"});
  ResultTable more = table;
  REQUIRE(more.add({result("new", 64, 0, true)}).ok());
  require_says(more.row("new", 64, &base, problems).status().message(), {"new at 64", "no problem '1'"});
  require_says(more.add({result("base", 64, 0, false)}).message(), {"base at 64", "'0'", "twice"});
  REQUIRE(more.row("base", 64, nullptr, problems)->right == 2);
}

TEST_CASE("reference results are read with care") {
  const auto error = [](const std::string& text) {
    const TemporaryFile file(text);
    return read_reference(file.path()).status().message();
  };
  require_says(error("{"), {"beaconkv_test_", "not JSON"});
  require_says(error(R"({"problems": {"12": 67}})"), {"'tables'"});
  require_says(error(R"({"problems": {"a": 67}, "tables": []})"), {"a level = 'a'"});
  require_says(error(R"({"problems": {"12": -1}, "tables": []})"), {"level 12 = -1"});
  require_says(error(R"({"problems": {}, "tables": [{"source": "s", "rows": {"p": {"x": 1}}}]})"), {"a budget of p = 'x'"});
  require_says(error(R"({"problems": {}, "tables": [{"source": "s", "rows": {"p": {"64": 101}}}]})"), {"p at 64 = 101"});
  const std::string twice = R"({"source": "s", "rows": {"p": {"64": 1}}})";
  require_says(error(R"({"problems": {}, "tables": [)" + twice + "," + twice + "]}"), {"p at 64", "twice"});
}

TEST_CASE("agreement with a reference by hand") {
  ReferenceResults reference{.problems = {{12, 2}, {18, 2}}, .rows = {{.policy = "p", .budget = 64, .percent = 50}}};
  SweptRow row{.policy = "p", .budget = 64, .problems = 4, .right = 4, .by_level = {{12, {2, 2}}, {18, {2, 2}}}};
  const Agreement a = compare_with_reference(row, reference.rows[0]);
  REQUIRE_THAT(a.errors, WithinAbs(0.5 / std::sqrt(0.25 / 8), 1e-9));  // 2.8
  REQUIRE_FALSE(a.agrees());
  row.right = 3;
  REQUIRE(compare_with_reference(row, reference.rows[0]).agrees());
  row.right = 0;
  REQUIRE_FALSE(compare_with_reference(row, reference.rows[0]).agrees());
  const std::vector<Problem> problems{{.level = 12}, {.level = 18}, {.level = 12}, {.level = 18}};
  REQUIRE(check_problems(reference, problems).ok());
  reference.problems[18] = 3;
  require_says(check_problems(reference, problems).message(), {"3 problems of level 18", "2"});
}

TEST_CASE("the reference's problems are those that --limit chooses, and every row of it and of the tables can be run") {
  const ReferenceResults reference = read_reference(reference_file).or_throw();
  const std::vector<Problem> all = load_problems(prompts_file, model_directory, reasoner().vocab_size()).or_throw();
  std::map<int, std::vector<std::string>> first, taken;
  for (const Problem& p : all)
    if (static_cast<index_t>(first[p.level].size()) < reference.problems.at(p.level)) first[p.level].push_back(p.id);
  index_t limit = 0;
  for (const auto& entry : reference.problems) limit += entry.second;
  for (const Problem& p : take_evenly(all, limit)) taken[p.level].push_back(p.id);
  REQUIRE(limit == 201);
  REQUIRE(taken == first);

  const RunOptions options{.model = model_directory, .prompts = prompts_file, .limit = 1};
  const auto require_runs = [&](const std::vector<JobRequest>& jobs) {
    const Result<Study> study = Study::make(options, jobs);
    REQUIRE(study.status().message() == "");
    REQUIRE(study->jobs().size() == jobs.size());
  };
  std::vector<JobRequest> of_reference;
  for (const ReferenceRow& row : reference.rows) of_reference.push_back({row.policy, row.budget});
  require_runs(of_reference);
  for (const char* name : {"1", "2", "3"}) {
    const SweepTable table = sweep_table(name).or_throw();
    REQUIRE(table.lines.front().policy == "beaconkv");
    std::vector<JobRequest> jobs;
    for (const SweepLine& line : table.lines)
      if (line.policy != "full")
        for (const index_t budget : parse_budgets(table.budgets).or_throw()) jobs.push_back({line.policy, budget});
    require_runs(jobs);
  }
}

TEST_CASE("a table is made of results that were written before; rows that differ from the reference make it fail") {
  const TemporaryFile file;
  std::vector<ProblemResult> results;
  for (const SweepLine& line : sweep_table("2").or_throw().lines)
    for (int p = 0; p < 4; ++p) results.push_back(result(line.policy, 128, p, line.policy == "beaconkv" || p == 0));
  REQUIRE(write_results(file.path(), results).ok());
  SweepOptions options{.table = "2", .from = {file.path()}};
  options.run.budgets = "128";
  REQUIRE(sweep(options).ok());
  options.from = {file.path(), file.path()};
  require_says(sweep(options).message(), {"--from", file.path().string(), "twice"});
  options.from = {file.path()};
  options.base = "beaconkv:n_beacon=0";
  REQUIRE(sweep(options).ok());
  options.base = "snapkv";
  require_says(sweep(options).message(), {"--base = snapkv"});
  options.base = "";
  options.run.budgets = "64";
  require_says(sweep(options).message(), {"no row beaconkv at 64"});
  options.run.budgets = "128";
  const auto with_percent = [](int percent) {
    return R"({"problems": {"12": 2, "18": 2}, "tables": [{"source": "s", "rows": {"beaconkv": {"128": )" +
           std::to_string(percent) + "}}}]}";
  };
  const TemporaryFile near(with_percent(90));
  const TemporaryFile far(with_percent(10));
  const TemporaryFile elsewhere(R"({"problems": {"12": 2, "18": 2}, "tables": [{"source": "s", "rows": {"x": {"128": 5}}}]})");
  options.compare_with = near.path();
  REQUIRE(sweep(options).ok());
  options.table = "";  // the reference's own row
  for (const bool markdown : {false, true}) {
    options.markdown = markdown;
    options.compare_with = near.path();
    REQUIRE(sweep(options).ok());
    options.compare_with = far.path();
    require_says(sweep(options).message(), {"1 of 1 rows differ"});
  }
  options.run.limit = 2;
  options.compare_with = near.path();
  require_says(sweep(options).message(), {"--compare-with", "2 problems of level 12", "ours of 1"});
  options.run.limit = -1;
  require_says(sweep(options).message(), {"--limit = -1"});
  options.run.limit = 0;
  options.table = "2";
  options.compare_with = elsewhere.path();
  require_says(sweep(options).message(), {"--compare-with", "none of these rows"});
}

TEST_CASE("a sweep without work to do says what is missing") {
  require_says(sweep({}).message(), {"--table", "--compare-with"});
  require_says(sweep({.table = "4"}).message(), {"--table = 4"});
  require_says(sweep({.table = "coverage", .base = "beaconkv"}).message(), {"--table = coverage", "--base"});
  require_says(sweep({.base = "beaconkv", .compare_with = "x"}).message(), {"--base = beaconkv", "--table"});
  require_says(sweep({.table = "1", .from = {"/does/not/exist"}}).message(), {"--from", "/does/not/exist"});
  require_says(sweep({.table = "1", .compare_with = "/does/not/exist"}).message(), {"--compare-with", "/does/not/exist"});
  SweepOptions options{.table = "1"};
  require_says(sweep(options).message(), {"--model: must be given"});
  options.run.prompts = prompts_file;
  options.run.model = "/does/not/exist";
  require_says(sweep(options).message(), {"--model", "/does/not/exist"});
}
