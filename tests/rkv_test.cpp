// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

// R-KV beside the slow reference, and beside the published protocol from beginning to end, in both orders.

#include "beaconkv/policy/rkv.hpp"

#include <array>
#include <limits>
#include <vector>

#include "support/catch.hpp"
#include "support/policy_run.hpp"

namespace {

using namespace beaconkv;
using namespace beaconkv::test;

struct Case {
  RunPlan plan{};
  RKVOptions<> options{};
};

reference::PolicySettings settings_of(const Case& c) {
  const RKVOptions<>& o = c.options;
  const reference::Schedule schedule = reference::interval_budget(o.budget.tokens, o.budget.interval);
  reference::Redundancy redundancy{
      .lambda = static_cast<double>(o.lambda),
      .threshold = static_cast<double>(o.redundancy.threshold),
      .spare = o.redundancy.spare_column_zero ? reference::Spare::last_or_zero : reference::Spare::last_or_none,
      .ratio = static_cast<double>(o.redundancy.ratio)};
  if (o.redundancy.spared == SparedLookAlike::column_zero) redundancy.spare = reference::Spare::zero;
  if (o.redundancy.spared == SparedLookAlike::first_percent) redundancy.spare = reference::Spare::first_percent;
  return {.shape = c.plan.shape,
          .rope = c.plan.rope.reference,
          .n_recent_queries = o.n_recent_queries,
          .attention = {.over_queries = o.over_queries,
                        .over_heads = o.over_heads,
                        .group_stage = o.group_stage,
                        .pool = o.pool,
                        .scale =
                            o.scale ? static_cast<double>(*o.scale) : 1 / std::sqrt(static_cast<double>(c.plan.shape.head_dim)),
                        .softcap = o.logit_softcap ? static_cast<double>(*o.logit_softcap) : 0},
          .domain = o.softmax_domain,
          .causal = o.causal && o.order == RKVOrder::chronological,
          .redundancy = redundancy,
          .published_order = o.order == RKVOrder::published,
          .n_prefix = o.n_prefix,
          .n_recent_kv = o.n_recent_kv,
          .due = schedule.due,
          .target = schedule.target};
}

RunReport run(const Case& c, index_t kind, Random& random, bool with_rope = true) {
  RopeTable rope;
  if (with_rope) rope = RopeTable(c.plan.rope.options);
  return run_kind(kind, c.plan, RKV<>(c.plan.shape, c.options, rope), settings_of(c), random);
}

Case small_case() {
  return {.plan = {.shape = {.query_heads = 4, .kv_heads = 2, .head_dim = 16}, .rope = make_rope(16), .prompt = 11},
          .options = {.budget = {.tokens = 30, .interval = 12}, .n_recent_queries = 6, .n_recent_kv = 6, .lambda = 0.3F}};
}

/// The policy of `options` over a whole sequence of `tokens`, of which the first `prompt` come as a prompt.
struct Trace {
  std::vector<index_t> lengths{};
  std::vector<std::vector<std::vector<position_t>>> kept{};  ///< of each eviction that took something, ascending
};

Trace run_alone(const Shape& shape, const RKVOptions<>& options, const std::vector<Token>& tokens, index_t prompt) {
  RKV<> policy(shape, options);
  const auto total = static_cast<index_t>(tokens.size());
  TestCache<> cache(shape, total);
  Workspace work(policy.workspace_size(total));
  Trace out;
  const auto evict_if_due = [&] {
    if (policy.due(cache.view())) {
      require_value(evict(policy, cache.view(), work));
      out.kept.emplace_back(at(shape.kv_heads));
      for (index_t h = 0; h < shape.kv_heads; ++h)
        for (index_t s = 0; s < cache.view().num_tokens(); ++s) out.kept.back()[at(h)].push_back(cache.view().position(h, s));
    }
    out.lengths.push_back(cache.view().num_tokens());
  };
  std::vector<float> queries;
  for (index_t p = 0; p < prompt; ++p) {
    cache.append(tokens[at(p)]);
    queries.insert(queries.end(), tokens[at(p)].rotated.begin(), tokens[at(p)].rotated.end());
  }
  require_ok(policy.prefill_rotated(QueryView::token_major(queries.data(), prompt, shape.query_heads, shape.head_dim), work));
  evict_if_due();
  for (index_t p = prompt; p < total; ++p) {
    cache.append(tokens[at(p)]);
    require_ok(policy.observe_rotated(tokens[at(p)].rotated, p));
    evict_if_due();
  }
  return out;
}

}  // namespace

TEST_CASE("R-KV's defaults are those of the published code", "[rkv]") {
  const RKVOptions<> o;
  REQUIRE(o.budget.interval == 128);
  REQUIRE(o.n_recent_queries == 8);
  REQUIRE(o.n_recent_kv == 8);
  REQUIRE(o.n_prefix == std::optional<index_t>(0));
  REQUIRE(o.lambda == 0.07F);
  REQUIRE(o.pool.kind == PoolKind::max);
  REQUIRE(o.pool.kernel == 7);
  REQUIRE(o.over_queries == Reduce::mean);
  REQUIRE(o.over_heads == Reduce::max);
  REQUIRE(o.group_stage == GroupStage::logits);
  REQUIRE(o.softmax_domain == SoftmaxDomain::candidates_only);
  REQUIRE(o.redundancy.threshold == 0.5F);
  REQUIRE(o.redundancy.spared == SparedLookAlike::last);
  REQUIRE(o.redundancy.spare_column_zero);
  REQUIRE(o.order == RKVOrder::chronological);
}

TEST_CASE("R-KV equals the reference over shapes, storage types, layouts and inputs", "[rkv]") {
  Random random;
  CAPTURE(random.seed());
  RunReport total;
  for (index_t i = 0; i < 20; ++i) {
    const bool with_rope = i % 4 != 3;
    Case c{.plan = varied_plan(i, with_rope)};
    c.plan.decode = 80;
    c.options = {.budget = {.tokens = 24 + i, .interval = 16},
                 .n_recent_queries = 1 + (5 * i) % 12,
                 .n_recent_kv = (7 * i) % 12,
                 .lambda = i % 2 == 0 ? 0.07F : 0.5F};
    if (i % 3 != 0) c.options.order = RKVOrder::published;
    CAPTURE(i, c.plan.shape.query_heads, c.plan.shape.kv_heads, c.plan.shape.head_dim);
    const RunReport r = run(c, i, random, with_rope);
    REQUIRE(r.evictions >= 3);
    total.add(r);
  }
  total.require_sound();
}

TEST_CASE("R-KV equals the reference for every option, in both orders", "[rkv]") {
  Random random;
  CAPTURE(random.seed());
  const Variation<Case> variations[] = {
      {"as it is", [](Case&) {}},
      {"as published", [](Case& c) { c.options = {.budget = {.tokens = 40, .interval = 16}}; }},
      {"importance alone", [](Case& c) { c.options.lambda = 1; }},
      {"redundancy alone", [](Case& c) { c.options.lambda = 0; }},
      {"a lower threshold", [](Case& c) { c.options.redundancy.threshold = 0.1F; }},
      {"a threshold that nothing passes", [](Case& c) { c.options.redundancy.threshold = 0.99F; }},
      {"the same with column 0 spared by nobody",
       [](Case& c) {
         c.options.redundancy.threshold = 0.99F;
         c.options.redundancy.spare_column_zero = false;
       }},
      {"column 0 spared by all", [](Case& c) { c.options.redundancy.spared = SparedLookAlike::column_zero; }},
      {"first_percent",
       [](Case& c) {
         c.options.redundancy.spared = SparedLookAlike::first_percent;
         c.options.redundancy.ratio = 0.9F;
       }},
      {"group mean of logits", [](Case& c) { c.options.over_heads = Reduce::mean; }},
      {"group maximum of weights", [](Case& c) { c.options.group_stage = GroupStage::weights; }},
      {"max over queries", [](Case& c) { c.options.over_queries = Reduce::max; }},
      {"softmax over all keys", [](Case& c) { c.options.softmax_domain = SoftmaxDomain::all_visible; }},
      {"average pool",
       [](Case& c) {
         c.options.pool = {PoolKind::average, 5};
       }},
      {"no pool", [](Case& c) { c.options.pool = {}; }},
      {"another scale", [](Case& c) { c.options.scale = 0.1F; }},
      {"softcap", [](Case& c) { c.options.logit_softcap = 1.5F; }},
      {"queries that reach back", [](Case& c) { c.options.n_recent_queries = 20; }},
      {"the same, not causal",
       [](Case& c) {
         c.options.n_recent_queries = 20;
         c.options.causal = false;
       }},
      {"no window", [](Case& c) { c.options.n_recent_kv = 0; }},
      {"the prompt protected", [](Case& c) { c.options.n_prefix = {}; }},
      {"a prefix", [](Case& c) { c.options.n_prefix = 3; }},
      {"interval of 1", [](Case& c) { c.options.budget.interval = 1; }},
      {"no prompt", [](Case& c) { c.plan.prompt = 0; }},
      {"a prompt of the budget", [](Case& c) { c.plan.prompt = 30; }},
      {"a prompt of one more", [](Case& c) { c.plan.prompt = 31; }},
      {"a long prompt", [](Case& c) { c.plan.prompt = 90; }},
      {"a prompt in chunks",
       [](Case& c) {
         c.plan.prompt = 50;
         c.plan.chunk = 9;
       }},
      {"protected ranges",
       [](Case& c) {
         c.plan.protect = {{3, 9}, {20, 21}};
       }},
  };
  for (const Variation<Case>& variation : variations)
    for (const RKVOrder order : {RKVOrder::chronological, RKVOrder::published}) {
      INFO(variation.name << (order == RKVOrder::published ? ", published order" : ""));
      RunReport total;
      for (const index_t kind : {0, 1, 5}) {
        Case c = small_case();
        variation.change(c);
        c.options.order = order;
        // How the published order places a protected slot among the chosen is nobody's convention.
        if (order == RKVOrder::published && !c.plan.protect.empty()) c.options.order = RKVOrder::chronological;
        total.add(run(c, kind, random));
      }
      total.require_sound();
    }
}

TEST_CASE("R-KV equals the reference where the engine evicts at moments of its own", "[rkv]") {
  Random random;
  CAPTURE(random.seed());
  for (const RKVOrder order : {RKVOrder::chronological, RKVOrder::published}) {
    Case c = small_case();
    c.options.order = order;
    c.options.budget.interval = 1000;  // one of its own could otherwise fall on the same token
    c.plan.at_any_time = true;
    RunReport total;
    for (const index_t kind : {0, 1, 5}) total.add(run(c, kind, random));
    total.require_sound();
  }
}

TEST_CASE("R-KV follows the published protocol from beginning to end, in both orders", "[rkv]") {
  Random random;
  CAPTURE(random.seed());
  index_t compared = 0;
  struct Setting {
    index_t prompt, budget, window, interval;
    float lambda;
  };
  for (const Setting s :
       {Setting{50, 32, 8, 16, 0.07F}, Setting{10, 24, 4, 20, 0.1F}, Setting{32, 32, 8, 16, 0.3F}, Setting{20, 24, 1, 7, 0.5F}})
    for (const bool chronological : {true, false}) {
      CAPTURE(s.prompt, s.budget, s.window, s.interval, chronological);
      const Shape shape{.query_heads = 6, .kv_heads = 2, .head_dim = 16};
      const RopeCase rope = make_rope(16);
      Stream stream(random, shape, rope);
      std::vector<Token> tokens;
      std::vector<reference::Matrix> q(6);
      std::vector<reference::Matrix> k(2);
      for (position_t p = 0; p < 130; ++p) {
        tokens.push_back(stream.next(p));
        const reference::Matrix queries = rows_of(tokens.back().rotated, 16);
        const reference::Matrix keys = rows_of(tokens.back().keys, 16);
        for (std::size_t h = 0; h < 6; ++h) q[h].push_back(queries[h]);
        for (std::size_t h = 0; h < 2; ++h) k[h].push_back(keys[h]);
      }
      reference::Protocol want =
          reference::rkv_protocol(q, k, s.prompt, s.budget, s.window, s.interval, static_cast<double>(s.lambda),
                                  {PoolKind::max, 7}, reference::Spare::last_or_zero, chronological);
      const Trace got = run_alone(shape,
                                  {.budget = {.tokens = s.budget, .interval = s.interval},
                                   .n_recent_queries = s.window,
                                   .n_recent_kv = s.window,
                                   .lambda = s.lambda,
                                   .order = chronological ? RKVOrder::chronological : RKVOrder::published},
                                  tokens, s.prompt);
      REQUIRE(got.lengths == want.lengths);
      if (want.margin < 3e-7) continue;
      ++compared;
      for (auto& eviction : want.kept)
        for (auto& head : eviction) std::sort(head.begin(), head.end());
      REQUIRE(want.kept.size() >= 4);
      REQUIRE(got.kept == want.kept);
    }
  REQUIRE(compared >= 6);
}

TEST_CASE("the two orders of R-KV really differ", "[rkv]") {
  Random random;
  CAPTURE(random.seed());
  const Shape shape{.query_heads = 2, .kv_heads = 1, .head_dim = 16};
  Stream stream(random, shape, make_rope(16));
  std::vector<Token> tokens;
  for (position_t p = 0; p < 200; ++p) tokens.push_back(stream.next(p));
  RKVOptions<> options{.budget = {.tokens = 32, .interval = 16}, .lambda = 0.5F};
  const Trace chronological = run_alone(shape, options, tokens, 50);
  options.order = RKVOrder::published;
  const Trace published = run_alone(shape, options, tokens, 50);
  REQUIRE(chronological.kept.front() == published.kept.front());
  REQUIRE(chronological.kept.back() != published.kept.back());
}

TEST_CASE("an eviction within the budget leaves the published order as it is", "[rkv]") {
  // The published code does not touch a cache below its budget. An engine that calls `evict` anyway must get the same later
  // choice.
  Random random;
  CAPTURE(random.seed());
  const Shape shape{.query_heads = 2, .kv_heads = 1, .head_dim = 16};
  Stream stream(random, shape, make_rope(16));
  RKV<> quiet(shape, {.budget = {.tokens = 32, .interval = 1000}, .lambda = 0.5F, .order = RKVOrder::published});
  RKV<> eager = quiet;
  TestCache<> quiet_cache(shape, 120);
  TestCache<> eager_cache(shape, 120);
  Workspace work(quiet.workspace_size(120));
  for (position_t p = 0; p < 100; ++p) {
    const Token token = stream.next(p);
    quiet_cache.append(token);
    eager_cache.append(token);
    require_ok(quiet.observe_rotated(token.rotated, p));
    require_ok(eager.observe_rotated(token.rotated, p));
    if (p == 40) {
      require_value(evict(quiet, quiet_cache.view(), work));
      require_value(evict(eager, eager_cache.view(), work));
      KeepPlan fewer;
      require_ok(quiet.plan_free(quiet_cache.view(), 10, work, fewer));
      require_ok(compact(quiet_cache.view(), fewer));
      require_ok(quiet.commit(fewer));
      require_ok(eager.plan_free(eager_cache.view(), 10, work, fewer));
      require_ok(compact(eager_cache.view(), fewer));
      require_ok(eager.commit(fewer));
    }
    if (p == 45) require_value(evict(eager, eager_cache.view(), work));  // 27 of 32: keeps everything
    if (p == 46) {                                                       // nothing asked for, nothing done
      KeepPlan none;
      require_ok(eager.plan_free(eager_cache.view(), 0, work, none));
      require_ok(compact(eager_cache.view(), none));
      require_ok(eager.commit(none));
    }
  }
  const index_t n = quiet_cache.view().num_tokens();
  std::vector<float> a(at(n), 0.0F);
  std::vector<float> b(at(n), 0.0F);
  require_value(quiet.score(quiet_cache.view(), {a.data(), 1, n}, work));
  require_value(eager.score(eager_cache.view(), {b.data(), 1, n}, work));
  REQUIRE(a == b);
}

TEST_CASE("[E1] R-KV's order: the maximum of the group's logits first, then the softmax", "[rkv]") {
  const Shape shape{.query_heads = 2, .kv_heads = 1, .head_dim = 4};
  TestCache<> cache(shape, 8);
  for (index_t p = 0; p < 4; ++p) {
    std::vector<float> keys(4, 0.0F);
    keys[at(p)] = 1.0F;
    cache.append({p, {}, {}, keys, std::vector<float>(4)});
  }
  cache.append({4, {}, {}, std::vector<float>(4, 0.0F), std::vector<float>(4)});
  const std::vector<float> queries{2, 0, 1, 0, 0, 1, 0, 3};
  RKV<> policy(shape,
               {.budget = {.tokens = 3}, .n_recent_queries = 1, .n_recent_kv = 1, .lambda = 1, .pool = {}, .scale = 1.0F});
  Workspace work(policy.workspace_size(8));
  require_ok(policy.observe_rotated(queries, 4));
  std::vector<float> scores(5, 0.0F);
  require_value(policy.score(cache.view(), {scores.data(), 1, 5}, work));
  const double met[] = {2, 1, 1, 3};
  double sum = 0;
  for (const double z : met) sum += std::exp(z);
  for (std::size_t j = 0; j < 4; ++j) REQUIRE_THAT(scores[j], Catch::Matchers::WithinAbs(std::exp(met[j]) / sum, 1e-6));
}

TEST_CASE("[E7] R-KV spares the newest look-alike, and column 0 where there is none", "[rkv]") {
  const auto scores_of = [](const std::vector<std::vector<float>>& keys, bool spare_column_zero) {
    const auto dim = static_cast<index_t>(keys.front().size());
    const Shape shape{.query_heads = 1, .kv_heads = 1, .head_dim = dim};
    const auto n = static_cast<index_t>(keys.size());
    TestCache<> cache(shape, n);
    for (index_t p = 0; p < n; ++p) cache.append({p, {}, {}, keys[at(p)], std::vector<float>(at(dim))});
    RKV<> policy(shape, {.budget = {.tokens = 1},
                         .n_recent_queries = 1,
                         .n_recent_kv = 0,
                         .lambda = 0,
                         .redundancy = {.spare_column_zero = spare_column_zero}});
    Workspace work(policy.workspace_size(n));
    require_ok(policy.observe_rotated(std::vector<float>(at(dim), 0.0F), n - 1));
    std::vector<float> out(at(n), 0.0F);
    require_value(policy.score(cache.view(), {out.data(), 1, n}, work));
    return out;
  };
  const std::vector<float> duplicates = scores_of({{1, 0}, {0, 1}, {1, 0}, {1, 0}}, true);
  const double want[] = {0.334240, 0.202727, 0.260306, 0.202727};
  for (std::size_t j = 0; j < 4; ++j) REQUIRE_THAT(duplicates[j], Catch::Matchers::WithinAbs(-want[j], 1e-5));
  // Nothing is alike: as published column 0 is cleared, corrected it is not.
  const std::vector<std::vector<float>> unlike{{1, 0, 0}, {.45F, .893F, 0}, {.45F, 0, .893F}};
  const auto softmax_of = [](std::array<double, 3> x) {
    double sum = 0;
    for (double& v : x) sum += v = std::exp(v);
    for (double& v : x) v /= sum;
    return x;
  };
  const std::array<double, 3> parity = softmax_of({0, .2175, .2175});
  const std::array<double, 3> corrected = softmax_of({.3, .2175, .2175});
  const std::vector<float> as_published = scores_of(unlike, true);
  const std::vector<float> as_meant = scores_of(unlike, false);
  for (std::size_t j = 0; j < 3; ++j) {
    REQUIRE_THAT(as_published[j], Catch::Matchers::WithinAbs(-parity[j], 1e-4));
    REQUIRE_THAT(as_meant[j], Catch::Matchers::WithinAbs(-corrected[j], 1e-4));
  }
  REQUIRE(RKVOptions<>{}.redundancy.spare_column_zero);
}

TEST_CASE("R-KV with keys and queries that are not finite: counted, without a say, and gone first", "[rkv]") {
  Random random;
  CAPTURE(random.seed());
  for (const RKVOrder order : {RKVOrder::chronological, RKVOrder::published})
    for (const double share : {0.03, 0.3, 0.7, 1.0}) {
      RunReport total;
      for (index_t kind = 0; kind < 6; ++kind) {
        Case c = small_case();
        c.options.order = order;
        c.plan.poison = share;
        CAPTURE(share, kind, order == RKVOrder::published);
        total.add(run(c, kind, random));
      }
      total.require_sound();
    }
}

TEST_CASE("R-KV refuses what cannot work, by name and value", "[rkv]") {
  const Shape shape{.query_heads = 4, .kv_heads = 2, .head_dim = 16};
  struct Bad {
    const char* what;
    Shape shape;
    RKVOptions<> options;
    std::initializer_list<const char*> parts;
  };
  const RKVOptions<> good{.budget = {.tokens = 64}};
  const auto with = [&](auto change) {
    RKVOptions<> o = good;
    change(o);
    return o;
  };
  const Bad cases[] = {
      {"no budget", shape, {}, {"budget.tokens = 0"}},
      {"interval of 0", shape, with([](auto& o) { o.budget.interval = 0; }), {"budget.interval = 0"}},
      {"window of the budget", shape, with([](auto& o) { o.n_recent_kv = 64; }), {"n_recent_kv = 64", "budget.tokens = 64"}},
      {"no query", shape, with([](auto& o) { o.n_recent_queries = 0; }), {"n_recent_queries = 0"}},
      {"lambda above 1", shape, with([](auto& o) { o.lambda = 1.5F; }), {"lambda = 1.5"}},
      {"negative lambda", shape, with([](auto& o) { o.lambda = -0.5F; }), {"lambda = -0.5"}},
      {"lambda NaN", shape, with([](auto& o) { o.lambda = std::nanf(""); }), {"lambda = nan"}},
      {"threshold above 1", shape, with([](auto& o) { o.redundancy.threshold = 2; }), {"redundancy.threshold = 2"}},
      {"threshold NaN", shape, with([](auto& o) { o.redundancy.threshold = std::nanf(""); }), {"redundancy.threshold = nan"}},
      {"first_percent of nothing",
       shape,
       with([](auto& o) {
         o.redundancy.spared = SparedLookAlike::first_percent;
         o.redundancy.ratio = 0;
       }),
       {"redundancy.ratio = 0"}},
      {"even kernel", shape, with([](auto& o) { o.pool.kernel = 6; }), {"pool.kernel = 6"}},
      {"sum over heads", shape, with([](auto& o) { o.over_heads = Reduce::sum; }), {"over_heads = sum"}},
      {"negative scale", shape, with([](auto& o) { o.scale = -1.0F; }), {"scale = -1"}},
      {"another dimension than the table's", {4, 2, 8}, good, {"rope.head_dim = 16", "shape.head_dim = 8"}},
  };
  for (const Bad& bad : cases)
    require_refused_options<RKV<>>(bad.what, bad.shape, bad.options, RopeTable({.head_dim = 16}), StatusCode::invalid_argument,
                                   bad.parts);
  REQUIRE(RKV<>::make(shape, good).ok());

  RKVScorer::Options causal{.order = RKVOrder::published};
  causal.importance.causal = true;
  check_error(RKV<>::make(shape, good, {}, RKVScorer(causal)).status(), StatusCode::unsupported,
              {"causal = true", "published"});
}

TEST_CASE("R-KV's first_percent takes a ratio of at most 1", "[rkv]") {
  // A ratio beyond 1 names an entry that does not exist.
  const Shape shape{.query_heads = 1, .kv_heads = 1, .head_dim = 4};
  RKVOptions<> options{.budget = {.tokens = 64}};
  options.redundancy = {.spared = SparedLookAlike::first_percent, .ratio = 1.5F};
  check_error(RKV<>::make(shape, options).status(), StatusCode::invalid_argument, {"redundancy.ratio = 1.5"});
  options.redundancy.ratio = std::numeric_limits<float>::quiet_NaN();
  check_error(RKV<>::make(shape, options).status(), StatusCode::invalid_argument, {"redundancy.ratio = nan"});
}
