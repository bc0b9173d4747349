// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

// BeaconKV token by token beside the slow reference: beacons, scores and kept positions at every eviction.

#include "beaconkv/policy/beaconkv.hpp"

#include <vector>

#include "support/catch.hpp"
#include "support/policy_run.hpp"

namespace {

using namespace beaconkv;
using namespace beaconkv::test;

struct Case {
  RunPlan plan{};
  BeaconKVOptions<> options{};
};

reference::PolicySettings settings_of(const Case& c) {
  const BeaconKVOptions<>& o = c.options;
  const reference::Schedule schedule = reference::fixed_budget(o.budget.max, o.budget.lower(), o.budget.counts_prefix);
  return {.shape = c.plan.shape,
          .rope = c.plan.rope.reference,
          .n_beacon = o.n_beacon,
          .n_recent_queries = o.n_recent_queries,
          .attention = {.over_queries = o.over_queries,
                        .over_heads = o.over_heads,
                        .pool = o.pool,
                        .scale =
                            o.scale ? static_cast<double>(*o.scale) : 1 / std::sqrt(static_cast<double>(c.plan.shape.head_dim)),
                        .softcap = o.logit_softcap ? static_cast<double>(*o.logit_softcap) : 0},
          .domain = o.softmax_domain,
          .n_prefix = o.n_prefix,
          .n_recent_kv = o.n_recent_kv,
          .due = schedule.due,
          .target = schedule.target};
}

RunReport run(const Case& c, index_t kind, Random& random) {
  return run_kind(kind, c.plan, BeaconKV<>(c.plan.shape, c.options, RopeTable(c.plan.rope.options)), settings_of(c), random);
}

Case small_case() {
  return {.plan = {.shape = {.query_heads = 4, .kv_heads = 2, .head_dim = 16}, .rope = make_rope(16)},
          .options = {.budget = {.max = 40, .min = 28}, .n_beacon = 6, .n_recent_queries = 5, .n_recent_kv = 7}};
}

}  // namespace

TEST_CASE("BeaconKV's defaults are those of the paper's text", "[beaconkv]") {
  const BeaconKVOptions<> o;
  REQUIRE(o.n_beacon == 16);
  REQUIRE(o.n_recent_queries == 16);
  REQUIRE(o.n_recent_kv == 32);
  REQUIRE_FALSE(o.n_prefix.has_value());
  REQUIRE_FALSE(o.budget.counts_prefix);
  REQUIRE(o.over_queries == Reduce::max);
  REQUIRE(o.over_heads == Reduce::max);
  REQUIRE(o.softmax_domain == SoftmaxDomain::all_visible);
  REQUIRE_FALSE(o.pool.active());
  const BeaconKVOptions<> literal = BeaconKVOptions<>::paper_literal(128, 112);
  REQUIRE(literal.n_beacon == 16);
  REQUIRE(literal.n_recent_queries == 16);
  REQUIRE(literal.n_recent_kv == 16);
  REQUIRE(literal.budget.max == 128);
  REQUIRE(literal.budget.lower() == 112);
}

TEST_CASE("BeaconKV equals the reference over shapes, storage types, layouts and inputs", "[beaconkv]") {
  Random random;
  CAPTURE(random.seed());
  constexpr index_t beacons[] = {16, 1, 7, 16};
  constexpr index_t recents[] = {16, 31, 5, 9};
  RunReport total;
  for (index_t i = 0; i < 20; ++i) {
    Case c{.plan = varied_plan(i)};
    c.options = {.budget = {.max = 56, .min = 40},
                 .n_beacon = beacons[i % 4],
                 .n_recent_queries = recents[(i / 3) % 4],
                 .n_recent_kv = 4 + i % 20};
    CAPTURE(i, c.plan.shape.query_heads, c.plan.shape.kv_heads, c.plan.shape.head_dim);
    const RunReport r = run(c, i, random);
    REQUIRE(r.evictions >= 3);
    total.add(r);
  }
  total.require_sound();
}

TEST_CASE("BeaconKV equals the reference for every option", "[beaconkv]") {
  Random random;
  CAPTURE(random.seed());
  const Variation<Case> variations[] = {
      {"as it is", [](Case&) {}},
      {"mean over queries", [](Case& c) { c.options.over_queries = Reduce::mean; }},
      {"sum over queries", [](Case& c) { c.options.over_queries = Reduce::sum; }},
      {"mean over heads", [](Case& c) { c.options.over_heads = Reduce::mean; }},
      {"mean over both", [](Case& c) { c.options.over_queries = c.options.over_heads = Reduce::mean; }},
      {"softmax over the candidates", [](Case& c) { c.options.softmax_domain = SoftmaxDomain::candidates_only; }},
      {"average pool",
       [](Case& c) {
         c.options.pool = {PoolKind::average, 5};
       }},
      {"max pool over the candidates",
       [](Case& c) {
         c.options.pool = {PoolKind::max, 3};
         c.options.softmax_domain = SoftmaxDomain::candidates_only;
       }},
      {"another scale", [](Case& c) { c.options.scale = 0.4F; }},
      {"softcap", [](Case& c) { c.options.logit_softcap = 2.0F; }},
      {"no beacons", [](Case& c) { c.options.n_beacon = 0; }},
      {"1 beacon and 31 recent queries",
       [](Case& c) {
         c.options.n_beacon = 1;
         c.options.n_recent_queries = 31;
         c.plan.decode = 200;
       }},
      {"31 beacons and 1 recent query",
       [](Case& c) {
         c.options.n_beacon = 31;
         c.options.n_recent_queries = 1;
       }},
      {"no window", [](Case& c) { c.options.n_recent_kv = 0; }},
      {"prefix of 5, less than the prompt", [](Case& c) { c.options.n_prefix = 5; }},
      {"prefix of 50, more than the prompt", [](Case& c) { c.options.n_prefix = 50; }},
      {"no prefix", [](Case& c) { c.options.n_prefix = 0; }},
      {"the budget counts a prefix",
       [](Case& c) {
         c.options.n_prefix = 9;
         c.options.budget.counts_prefix = true;
       }},
      {"the budget counts the prompt", [](Case& c) { c.options.budget.counts_prefix = true; }},
      {"a period below n_recent_queries",
       [](Case& c) {
         c.options.budget = {.max = 30, .min = 27};
         c.options.n_recent_queries = 8;
       }},
      {"eviction on every token", [](Case& c) { c.options.budget = {.max = 30, .min = 29}; }},
      {"lower bound equal to the upper", [](Case& c) { c.options.budget = {.max = 30, .min = 30}; }},
      {"default lower bound", [](Case& c) { c.options.budget = {.max = 40}; }},
      {"evictions at moments of the engine's own", [](Case& c) { c.plan.at_any_time = true; }},
      {"protected ranges",
       [](Case& c) {
         c.plan.protect = {{22, 26}, {40, 41}, {60, 66}};
         c.plan.decode = 150;
       }},
      {"all defaults but the budget",
       [](Case& c) {
         c.options = {.budget = {.max = 64}};
         c.plan.decode = 150;
       }},
  };
  require_sound_for_each(variations, small_case(), [&](const Case& c, index_t kind) { return run(c, kind, random); });
}

TEST_CASE("BeaconKV under paper_literal: one window, the prompt competes and counts", "[beaconkv]") {
  Random random;
  CAPTURE(random.seed());
  const BeaconKVOptions<> literal = BeaconKVOptions<>::paper_literal(48, 36, 8, 6);
  REQUIRE(literal.n_beacon == 8);
  REQUIRE(literal.n_recent_queries == 6);
  REQUIRE(literal.n_recent_kv == 6);
  REQUIRE(literal.n_prefix == std::optional<index_t>(0));
  REQUIRE(literal.budget.counts_prefix);
  Case c = small_case();
  c.options = literal;
  c.plan.prompt = 30;
  RunReport total;
  total.add(run(c, 0, random));
  c.plan.prompt = 90;  // evicted as soon as it has been read
  total.add(run(c, 3, random));
  total.require_sound();
}

TEST_CASE("BeaconKV with prompts of 0, 1, about a budget, and in chunks", "[beaconkv]") {
  Random random;
  CAPTURE(random.seed());
  RunReport total;
  for (const index_t prompt : {0, 1, 27, 28, 29, 39, 40, 41, 120})
    for (const bool counts_prefix : {false, true}) {
      Case c = small_case();
      c.plan.prompt = prompt;
      c.options.n_prefix = counts_prefix ? std::optional<index_t>(3) : std::nullopt;
      c.options.budget.counts_prefix = counts_prefix;
      CAPTURE(prompt, counts_prefix);
      total.add(run(c, prompt, random));
    }
  for (const index_t chunk : {1, 7, 40}) {
    Case c = small_case();
    c.plan.prompt = 60;
    c.plan.chunk = chunk;
    CAPTURE(chunk);
    total.add(run(c, chunk, random));
  }
  total.require_sound();
}

TEST_CASE("a prompt in chunks samples once a chunk, so its beacons may differ from those of one piece", "[beaconkv]") {
  const Shape shape{.query_heads = 1, .kv_heads = 1, .head_dim = 16};
  const RopeCase rope = make_rope(16);
  index_t different = 0;
  for (std::uint32_t s = 0; s < 20; ++s) {
    Random random(test::seed() + s);
    CAPTURE(random.seed());
    Stream stream(random, shape, rope);
    std::vector<float> queries;
    reference::Matrix rows;
    for (position_t p = 0; p < 90; ++p) {
      const Token token = stream.next(p);
      queries.insert(queries.end(), token.queries.begin(), token.queries.end());
      rows.push_back(reference::row_of(token.queries.data(), 16));
    }
    BeaconKV<> whole(shape, {.budget = {.max = 64}, .n_beacon = 8}, RopeTable(rope.options));
    BeaconKV<> chunked = whole;
    Workspace work(whole.workspace_size(90));
    require_ok(whole.prefill(QueryView::token_major(queries.data(), 90, 1, 16), work));
    reference::ContinualSampling chunks{.n_min = 8, .n_max = 24};
    for (index_t first = 0; first < 90; first += 30) {
      require_ok(chunked.prefill(QueryView::token_major(queries.data() + first * 16, 30, 1, 16), work));
      chunks.prefill({rows.begin() + first, rows.begin() + first + 30}, first);
    }
    const auto tags = [](const BeaconKV<>& p) { return pool_positions(p.observer(), 0); };
    reference::ContinualSampling once{.n_min = 8, .n_max = 24};
    once.prefill(rows, 0);
    REQUIRE(tags(whole) == once.tags);
    REQUIRE(tags(chunked) == chunks.tags);
    REQUIRE(whole.prefix() == chunked.prefix());
    different += tags(whole) != tags(chunked) ? 1 : 0;
  }
  REQUIRE(different > 0);
}

TEST_CASE("BeaconKV's cycle is the paper's: freeze, collect, evict, merge", "[beaconkv]") {
  // Algorithm 1 for periods of at least n_recent: the newest n_recent queries are collected, used at the eviction and merged
  // only afterwards; the beacons of the eviction stem from everything before them.
  const Shape shape{.query_heads = 2, .kv_heads = 1, .head_dim = 16};
  const RopeCase rope = make_rope(16);
  Random random;
  CAPTURE(random.seed());
  constexpr index_t n_recent = 6;
  constexpr index_t n_beacon = 5;
  BeaconKV<> policy(shape,
                    {.budget = {.max = 40, .min = 30}, .n_beacon = n_beacon, .n_recent_queries = n_recent, .n_recent_kv = 4},
                    RopeTable(rope.options));
  TestCache<> cache(shape, 200);
  Workspace work(policy.workspace_size(200));
  Stream stream(random, shape, rope);
  std::vector<reference::ContinualSampling> memory(2, {.n_min = n_beacon, .n_max = n_beacon + n_recent});
  std::vector<Token> collected;
  index_t evictions = 0;
  for (position_t p = 0; p < 120; ++p) {
    const Token token = stream.next(p);
    cache.append(token);
    require_ok(policy.observe(token.queries, p));
    collected.push_back(token);
    if (!policy.due(cache.view())) continue;
    // Everything collected since the last eviction but the newest n_recent enters the memory, then the eviction reduces it.
    const std::vector<Token> newest(collected.end() - n_recent, collected.end());
    collected.resize(collected.size() - n_recent);
    for (std::size_t h = 0; h < 2; ++h) {
      for (const Token& t : collected) memory[h].push(rows_of(t.queries, 16)[h], t.position);
      memory[h].reduce();
    }
    collected = newest;
    require_value(evict(policy, cache.view(), work));
    ++evictions;
    for (std::size_t h = 0; h < 2; ++h) {
      if (memory[h].gap < 1e-6) continue;
      REQUIRE(pool_positions(policy.observer(), static_cast<index_t>(h)) == memory[h].tags);
    }
    REQUIRE(policy.observer().num_recent() == n_recent);
  }
  REQUIRE(evictions == 9);
}

TEST_CASE("[F1] beacons before there are any, and fewer than n_beacon", "[beaconkv]") {
  Case c = small_case();
  c.options.n_beacon = 200;  // never reached
  c.plan.prompt = 0;
  Random random;
  CAPTURE(random.seed());
  run(c, 0, random).require_sound();
  c.options.n_recent_queries = 300;  // nothing ever leaves the ring
  run(c, 0, random).require_sound();
}

TEST_CASE("BeaconKV with positions that jump", "[beaconkv]") {
  // An engine that skips positions (a removed image, a padded batch): positions ascend, with gaps.
  const Case c = small_case();
  Random random;
  CAPTURE(random.seed());
  Stream stream(random, c.plan.shape, c.plan.rope);
  Duo duo(BeaconKV<>(c.plan.shape, c.options, RopeTable(c.plan.rope.options)), TestCache<>(c.plan.shape, 120), settings_of(c),
          20);
  position_t position = 1000;
  std::vector<Token> prompt;
  for (index_t i = 0; i < 20; ++i) prompt.push_back(stream.next(position++));
  duo.prefill(prompt, c.plan.shape);
  for (index_t i = 0; i < 100; ++i) {
    position += random.integer(1, 40);
    duo.decode(stream.next(position), c.plan.shape);
    duo.evict_if_due();
  }
  duo.report.require_sound();
}

TEST_CASE("BeaconKV far from position 0 decides as near it: only distances count", "[beaconkv]") {
  // Both runs see the same pre-RoPE vectors, 100,000 positions apart.
  const Case c = small_case();
  std::vector<std::vector<position_t>> kept[2];
  for (const position_t offset : {0, 100000}) {
    Random random(7);
    Stream stream(random, c.plan.shape, c.plan.rope);
    BeaconKV<> policy(c.plan.shape, c.options, RopeTable(c.plan.rope.options));
    TestCache<> cache(c.plan.shape, 120);
    Workspace work(policy.workspace_size(120));
    for (position_t p = offset; p < offset + 100; ++p) {
      const Token token = stream.next(p);
      cache.append(token);
      require_ok(policy.observe(token.queries, p));
      if (policy.due(cache.view())) require_value(evict(policy, cache.view(), work));
    }
    for (index_t h = 0; h < 2; ++h) {
      kept[offset > 0].emplace_back();
      for (index_t s = 0; s < cache.view().num_tokens(); ++s)
        kept[offset > 0].back().push_back(cache.view().position(h, s) - offset);
    }
  }
  REQUIRE(kept[0] == kept[1]);
}

TEST_CASE("BeaconKV with keys and queries that are not finite: counted, without a say, and gone first", "[beaconkv]") {
  Random random;
  CAPTURE(random.seed());
  require_sound_when_poisoned(small_case(), [&](const Case& c, index_t kind) { return run(c, kind, random); });
}

TEST_CASE("BeaconKV refuses what cannot work, by name and value", "[beaconkv]") {
  const Shape shape{.query_heads = 4, .kv_heads = 2, .head_dim = 16};
  const RopeTable rope({.head_dim = 16});
  struct Bad {
    const char* what;
    Shape shape;
    BeaconKVOptions<> options;
    std::initializer_list<const char*> parts;
  };
  const BeaconKVOptions<> good{.budget = {.max = 64}, .n_recent_kv = 8};
  const auto with = [&](auto change) {
    BeaconKVOptions<> o = good;
    change(o);
    return o;
  };
  const Bad cases[] = {
      {"no budget", shape, {}, {"budget.max = 0"}},
      {"window of the budget", shape, with([](auto& o) { o.n_recent_kv = 56; }), {"n_recent_kv = 56", "budget.min = 56"}},
      {"negative window", shape, with([](auto& o) { o.n_recent_kv = -1; }), {"n_recent_kv = -1"}},
      {"negative beacons", shape, with([](auto& o) { o.n_beacon = -1; }), {"n_beacon = -1"}},
      {"no recent query", shape, with([](auto& o) { o.n_recent_queries = 0; }), {"n_recent_queries = 0"}},
      {"negative prefix", shape, with([](auto& o) { o.n_prefix = -2; }), {"n_prefix = -2"}},
      {"prefix of the budget",
       shape,
       with([](auto& o) {
         o.n_prefix = 50;
         o.budget.counts_prefix = true;
       }),
       {"n_prefix = 50", "n_recent_kv = 8", "budget.min = 56"}},
      {"min above max", shape, with([](auto& o) { o.budget.min = 65; }), {"budget.min = 65", "budget.max = 64"}},
      {"sum over heads", shape, with([](auto& o) { o.over_heads = Reduce::sum; }), {"over_heads = sum"}},
      {"even pool",
       shape,
       with([](auto& o) {
         o.pool = {PoolKind::max, 4};
       }),
       {"pool.kernel = 4"}},
      {"negative pool",
       shape,
       with([](auto& o) {
         o.pool = {PoolKind::max, -3};
       }),
       {"pool.kernel = -3"}},
      {"scale of 0", shape, with([](auto& o) { o.scale = 0.0F; }), {"scale = 0"}},
      {"scale NaN", shape, with([](auto& o) { o.scale = std::nanf(""); }), {"scale = nan"}},
      {"negative softcap", shape, with([](auto& o) { o.logit_softcap = -2.0F; }), {"logit_softcap = -2"}},
      {"no KV head", {4, 0, 16}, good, {"shape.kv_heads = 0"}},
      {"heads that do not divide", {5, 2, 16}, good, {"shape.query_heads = 5", "shape.kv_heads = 2"}},
      {"no query head", {0, 2, 16}, good, {"shape.query_heads = 0"}},
      {"no dimension", {4, 2, 0}, good, {"shape.head_dim = 0"}},
      {"another dimension than the table's", {4, 2, 32}, good, {"rope.head_dim = 16", "shape.head_dim = 32"}},
  };
  for (const Bad& bad : cases)
    require_refused_options<BeaconKV<>>(bad.what, bad.shape, bad.options, rope, StatusCode::invalid_argument, bad.parts);
  REQUIRE(BeaconKV<>::make(shape, good, rope).ok());
}
