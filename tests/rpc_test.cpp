// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

// RPC beside the slow reference, and beside the published protocol from beginning to end.

#include "beaconkv/policy/rpc.hpp"

#include <array>
#include <vector>

#include "support/catch.hpp"
#include "support/policy_run.hpp"

namespace {

using namespace beaconkv;
using namespace beaconkv::test;

using Matrix4 = std::array<std::array<float, 4>, 2>;

struct Case {
  RunPlan plan{};
  RPCOptions<> options{};
};

reference::PolicySettings settings_of(const Case& c) {
  const RPCOptions<>& o = c.options;
  const reference::Schedule schedule = reference::growing_budget(o.budget.period, o.budget.ratio, o.n_recent_kv);
  return {.shape = c.plan.shape,
          .rope = c.plan.rope.reference,
          .n_recent_queries = o.n_recent_queries,
          .newest_twice = o.newest_query_twice,
          .attention = {.over_queries = o.over_queries,
                        .over_heads = o.over_heads,
                        .group_stage = o.group_stage,
                        .pool = o.pool,
                        .scale =
                            o.scale ? static_cast<double>(*o.scale) : 1 / std::sqrt(static_cast<double>(c.plan.shape.head_dim)),
                        .softcap = o.logit_softcap ? static_cast<double>(*o.logit_softcap) : 0},
          .domain = o.softmax_domain,
          .scope = o.head_scope,
          .causal = o.causal,
          .n_prefix = o.n_prefix,
          .n_recent_kv = o.n_recent_kv,
          .due = schedule.due,
          .target = schedule.target};
}

RunReport run(const Case& c, index_t kind, Random& random, bool with_rope = true) {
  RopeTable rope;
  if (with_rope) rope = RopeTable(c.plan.rope.options);
  return run_kind(kind, c.plan, RPC<>(c.plan.shape, c.options, rope), settings_of(c), random);
}

Case small_case() {
  return {.plan = {.shape = {.query_heads = 4, .kv_heads = 2, .head_dim = 16}, .rope = make_rope(16), .prompt = 11},
          .options = {.budget = {.period = 24, .ratio = 4}, .n_recent_queries = 6, .n_recent_kv = 6}};
}

}  // namespace

TEST_CASE("RPC's defaults are those of the published code, with the paper's selector", "[rpc]") {
  const RPCOptions<> o;
  REQUIRE(o.budget.period == 1024);
  REQUIRE(o.budget.ratio == 4);
  REQUIRE(o.n_recent_queries == 32);
  REQUIRE(o.n_recent_kv == 32);
  REQUIRE_FALSE(o.n_prefix.has_value());
  REQUIRE_FALSE(o.newest_query_twice);
  REQUIRE(o.head_scope == HeadScope::layer);
  REQUIRE(o.over_queries == Reduce::sum);
  REQUIRE(o.over_heads == Reduce::mean);
  REQUIRE(o.pool.kind == PoolKind::average);
  REQUIRE(o.pool.kernel == 7);
  REQUIRE(o.softmax_domain == SoftmaxDomain::candidates_only);
  REQUIRE(o.group_stage == GroupStage::weights);
  REQUIRE(o.causal);
}

TEST_CASE("RPC equals the reference over shapes, storage types, layouts and inputs", "[rpc]") {
  Random random;
  CAPTURE(random.seed());
  RunReport total;
  for (index_t i = 0; i < 20; ++i) {
    const bool with_rope = i % 4 != 3;
    Case c{.plan = varied_plan(i, with_rope)};
    c.options = {
        .budget = {.period = 20 + i, .ratio = 2 + i % 4}, .n_recent_queries = 1 + (5 * i) % 17, .n_recent_kv = (7 * i) % 17};
    c.options.newest_query_twice = i % 2 == 0;
    c.options.head_scope = i % 3 == 0 ? HeadScope::group : HeadScope::layer;
    CAPTURE(i, c.plan.shape.query_heads, c.plan.shape.kv_heads, c.plan.shape.head_dim);
    const RunReport r = run(c, i, random, with_rope);
    REQUIRE(r.evictions >= 2);
    total.add(r);
  }
  total.require_sound();
}

TEST_CASE("RPC equals the reference for every option", "[rpc]") {
  Random random;
  CAPTURE(random.seed());
  const Variation<Case> variations[] = {
      {"as it is", [](Case&) {}},
      {"the newest query twice", [](Case& c) { c.options.newest_query_twice = true; }},
      {"the newest and only query",
       [](Case& c) {
         c.options.newest_query_twice = true;
         c.options.n_recent_queries = 1;
       }},
      {"a choice of each group", [](Case& c) { c.options.head_scope = HeadScope::group; }},
      {"max over all heads", [](Case& c) { c.options.over_heads = Reduce::max; }},
      {"max over the group",
       [](Case& c) {
         c.options.over_heads = Reduce::max;
         c.options.head_scope = HeadScope::group;
       }},
      {"max over queries", [](Case& c) { c.options.over_queries = Reduce::max; }},
      {"mean over queries", [](Case& c) { c.options.over_queries = Reduce::mean; }},
      {"max pool",
       [](Case& c) {
         c.options.pool = {PoolKind::max, 5};
       }},
      {"no pool", [](Case& c) { c.options.pool = {}; }},
      {"softmax over all keys", [](Case& c) { c.options.softmax_domain = SoftmaxDomain::all_visible; }},
      {"group mean of logits", [](Case& c) { c.options.group_stage = GroupStage::logits; }},
      {"not causal, queries that reach back",
       [](Case& c) {
         c.options.causal = false;
         c.options.n_recent_queries = 20;
       }},
      {"causal, queries that reach back", [](Case& c) { c.options.n_recent_queries = 20; }},
      {"another scale", [](Case& c) { c.options.scale = 0.1F; }},
      {"softcap", [](Case& c) { c.options.logit_softcap = 1.5F; }},
      {"a ratio that leaves a rest", [](Case& c) { c.options.budget = {.period = 25, .ratio = 3}; }},
      {"no prefix", [](Case& c) { c.options.n_prefix = 0; }},
      {"a prefix within the prompt", [](Case& c) { c.options.n_prefix = 4; }},
      {"no window", [](Case& c) { c.options.n_recent_kv = 0; }},
      {"a window longer than the period", [](Case& c) { c.options.n_recent_kv = 40; }},
      {"no prompt", [](Case& c) { c.plan.prompt = 0; }},
      {"a prompt of 1 token", [](Case& c) { c.plan.prompt = 1; }},
      {"a prompt longer than the period", [](Case& c) { c.plan.prompt = 90; }},
      {"a prompt in chunks",
       [](Case& c) {
         c.plan.prompt = 50;
         c.plan.chunk = 7;
       }},
      {"at moments of the engine's own", [](Case& c) { c.plan.at_any_time = true; }},
      {"protected ranges",
       [](Case& c) {
         c.plan.protect = {{13, 17}, {30, 31}};
       }},
  };
  require_sound_for_each(variations, small_case(), [&](const Case& c, index_t kind) { return run(c, kind, random); });
}

TEST_CASE("RPC follows the published protocol from beginning to end", "[rpc]") {
  Random random;
  CAPTURE(random.seed());
  index_t compared = 0;
  struct Setting {
    index_t prompt, period, window, ratio;
    bool shared, twice;
  };
  for (const Setting s :
       {Setting{12, 32, 8, 4, true, true}, Setting{5, 24, 4, 3, false, true}, Setting{40, 20, 8, 2, true, false},
        Setting{1, 16, 16, 4, true, false}, Setting{9, 30, 1, 5, false, true}}) {
    CAPTURE(s.prompt, s.period, s.window, s.ratio, s.shared, s.twice);
    const Shape shape{.query_heads = 6, .kv_heads = 2, .head_dim = 16};
    const RopeCase rope = make_rope(16);
    Stream stream(random, shape, rope);
    const index_t total = s.prompt + 3 * s.period + s.window + 5;
    std::vector<Token> tokens;
    std::vector<reference::Matrix> q(6);
    std::vector<reference::Matrix> k(2);
    for (position_t p = 0; p < total; ++p) {
      tokens.push_back(stream.next(p));
      const reference::Matrix queries = rows_of(tokens.back().rotated, 16);
      const reference::Matrix keys = rows_of(tokens.back().keys, 16);
      for (std::size_t h = 0; h < 6; ++h) q[h].push_back(queries[h]);
      for (std::size_t h = 0; h < 2; ++h) k[h].push_back(keys[h]);
    }
    const reference::Protocol want =
        reference::rpc_protocol(q, k, s.prompt, s.period, s.window, s.ratio, s.shared, {PoolKind::average, 7}, s.twice);
    REQUIRE(want.kept.size() == 3);
    if (want.margin < 3e-7) continue;
    ++compared;

    RPC<> policy(shape, {.budget = {.period = s.period, .ratio = s.ratio},
                         .n_recent_queries = s.window,
                         .n_recent_kv = s.window,
                         .newest_query_twice = s.twice,
                         .head_scope = s.shared ? HeadScope::layer : HeadScope::group});
    TestCache<> cache(shape, total);
    Workspace work(policy.workspace_size(total));
    std::vector<float> queries;
    for (position_t p = 0; p < s.prompt; ++p) {
      cache.append(tokens[at(p)]);
      queries.insert(queries.end(), tokens[at(p)].rotated.begin(), tokens[at(p)].rotated.end());
    }
    require_ok(policy.prefill_rotated(QueryView::token_major(queries.data(), s.prompt, 6, 16), work));
    REQUIRE_FALSE(policy.due(cache.view()));
    std::vector<index_t> lengths{s.prompt};
    std::vector<std::vector<std::vector<position_t>>> kept;
    for (position_t p = s.prompt; p < total; ++p) {
      cache.append(tokens[at(p)]);
      require_ok(policy.observe_rotated(tokens[at(p)].rotated, p));
      if (policy.due(cache.view())) {
        require_value(evict(policy, cache.view(), work));
        kept.emplace_back(2);
        for (index_t h = 0; h < 2; ++h)
          for (index_t slot = 0; slot < cache.view().num_tokens(); ++slot)
            kept.back()[at(h)].push_back(cache.view().position(h, slot));
      }
      lengths.push_back(cache.view().num_tokens());
    }
    REQUIRE(lengths == want.lengths);
    REQUIRE(kept == want.kept);
    REQUIRE(policy.schedule().evictions == 3);
  }
  REQUIRE(compared >= 4);
}

TEST_CASE("the published protocol of the reference itself gives RPC's lengths", "[rpc]") {
  // prompt + n T + R after the n-th compression, which comes once R + n P tokens were generated.
  Random random;
  std::vector<reference::Matrix> q(1);
  std::vector<reference::Matrix> k(1);
  for (int t = 0; t < 60; ++t) {
    q[0].push_back({static_cast<double>(random.normal()), static_cast<double>(random.normal())});
    k[0].push_back({static_cast<double>(random.normal()), static_cast<double>(random.normal())});
  }
  const reference::Protocol p = reference::rpc_protocol(q, k, 10, 16, 4, 4, true, {PoolKind::average, 7}, true);
  REQUIRE(p.lengths[19] == 29);
  REQUIRE(p.lengths[20] == 10 + 4 + 4);
  REQUIRE(p.lengths[35] == 18 + 15);
  REQUIRE(p.lengths[36] == 10 + 8 + 4);
  REQUIRE(p.kept.size() == 2);
}

TEST_CASE("[E1] RPC's order: probabilities first, then the mean over heads", "[rpc]") {
  // One selector row, keys that are unit vectors: each query head's weights are what the check lists.
  const Shape shape{.query_heads = 4, .kv_heads = 2, .head_dim = 4};
  const float weight[4][4] = {{.7F, .1F, .1F, .1F}, {.1F, .1F, .1F, .7F}, {.25F, .25F, .25F, .25F}, {.1F, .6F, .2F, .1F}};
  TestCache<> cache(shape, 8);
  for (index_t p = 0; p < 4; ++p) {
    std::vector<float> keys(8, 0.0F);
    keys[at(p)] = keys[at(4 + p)] = 1.0F;
    cache.append({p, {}, {}, keys, std::vector<float>(8)});
  }
  cache.append({4, {}, {}, std::vector<float>(8, 0.0F), std::vector<float>(8)});
  std::vector<float> queries;
  for (const auto& row : weight)
    for (const float w : row) queries.push_back(std::log(w));
  const auto plan_with = [&](HeadScope scope, Reduce over_heads, Matrix4& out) {
    RPC<> policy(shape, {.budget = {.period = 4, .ratio = 2},
                         .n_recent_queries = 1,
                         .n_recent_kv = 1,
                         .head_scope = scope,
                         .over_heads = over_heads,
                         .pool = {},
                         .scale = 1.0F});
    Workspace work(policy.workspace_size(8));
    require_ok(policy.observe_rotated(queries, 4));
    std::vector<float> flat(10, 0.0F);
    require_value(policy.score(cache.view(), {flat.data(), 2, 5}, work));
    for (std::size_t h = 0; h < 2; ++h)
      for (std::size_t j = 0; j < 4; ++j) out[h][j] = flat[h * 5 + j];
    KeepPlan plan;
    require_ok(policy.plan(cache.view(), work, plan));
    return std::pair{slots_of(plan.kept(0)), slots_of(plan.kept(1))};
  };
  const auto near = [](const std::array<float, 4>& got, const std::array<double, 4>& want) {
    for (std::size_t j = 0; j < 4; ++j) REQUIRE_THAT(got[j], Catch::Matchers::WithinAbs(want[j], 1e-6));
  };
  Matrix4 scores{};
  auto kept = plan_with(HeadScope::group, Reduce::mean, scores);
  near(scores[0], {.4, .1, .1, .4});
  near(scores[1], {.175, .425, .225, .175});
  REQUIRE(kept.first == std::vector<slot_t>{0, 3, 4});
  REQUIRE(kept.second == std::vector<slot_t>{1, 2, 4});
  kept = plan_with(HeadScope::group, Reduce::max, scores);
  near(scores[0], {.7, .1, .1, .7});
  near(scores[1], {.25, .6, .25, .25});
  REQUIRE(kept.first == std::vector<slot_t>{0, 3, 4});
  kept = plan_with(HeadScope::layer, Reduce::mean, scores);
  near(scores[0], {.2875, .2625, .1625, .2875});
  near(scores[1], {.2875, .2625, .1625, .2875});
  REQUIRE(kept.first == std::vector<slot_t>{0, 3, 4});
  REQUIRE(kept.second == kept.first);
}

TEST_CASE("RPC with keys and queries that are not finite: counted, without a say, and gone first", "[rpc]") {
  Random random;
  CAPTURE(random.seed());
  require_sound_when_poisoned(small_case(), [&](const Case& c, index_t kind) { return run(c, kind, random); });
}

TEST_CASE("RPC refuses what cannot work, by name and value", "[rpc]") {
  const Shape shape{.query_heads = 4, .kv_heads = 2, .head_dim = 16};
  struct Bad {
    const char* what;
    Shape shape;
    RPCOptions<> options;
    std::initializer_list<const char*> parts;
  };
  const auto with = [&](auto change) {
    RPCOptions<> o{};
    change(o);
    return o;
  };
  const Bad cases[] = {
      {"period of 0", shape, with([](auto& o) { o.budget.period = 0; }), {"budget.period = 0"}},
      {"ratio of 1", shape, with([](auto& o) { o.budget.ratio = 1; }), {"budget.ratio = 1", "budget.period = 1024"}},
      {"ratio above the period",
       shape,
       with([](auto& o) { o.budget.ratio = 2000; }),
       {"budget.ratio = 2000", "budget.period = 1024"}},
      {"no selector", shape, with([](auto& o) { o.n_recent_queries = 0; }), {"n_recent_queries = 0"}},
      {"negative window", shape, with([](auto& o) { o.n_recent_kv = -4; }), {"n_recent_kv = -4"}},
      {"negative prefix", shape, with([](auto& o) { o.n_prefix = -4; }), {"n_prefix = -4"}},
      {"even kernel", shape, with([](auto& o) { o.pool.kernel = 8; }), {"pool.kernel = 8"}},
      {"kernel of 0", shape, with([](auto& o) { o.pool.kernel = 0; }), {"pool.kernel = 0"}},
      {"sum over heads", shape, with([](auto& o) { o.over_heads = Reduce::sum; }), {"over_heads = sum"}},
      {"negative scale", shape, with([](auto& o) { o.scale = -1.0F; }), {"scale = -1"}},
      {"softcap NaN", shape, with([](auto& o) { o.logit_softcap = std::nanf(""); }), {"logit_softcap = nan"}},
      {"negative heads", {-4, -2, 16}, RPCOptions<>{}, {"shape.kv_heads = -2"}},
      {"another dimension than the table's", {4, 2, 8}, RPCOptions<>{}, {"rope.head_dim = 16", "shape.head_dim = 8"}},
  };
  for (const Bad& bad : cases)
    require_refused_options<RPC<>>(bad.what, bad.shape, bad.options, RopeTable({.head_dim = 16}), StatusCode::invalid_argument,
                                   bad.parts);
  REQUIRE(RPC<>::make(shape, {}).ok());
}
