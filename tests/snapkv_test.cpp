// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

// SnapKV beside the slow reference, and the published numbers that its parts must give.

#include "beaconkv/policy/snapkv.hpp"

#include <vector>

#include "support/catch.hpp"
#include "support/policy_run.hpp"

namespace {

using namespace beaconkv;
using namespace beaconkv::test;

struct Case {
  RunPlan plan{};
  SnapKVOptions<> options{};
};

reference::PolicySettings settings_of(const Case& c) {
  const SnapKVOptions<>& o = c.options;
  const index_t interval = o.budget.interval.value_or(0);
  const index_t budget = o.budget.tokens;
  return {.shape = c.plan.shape,
          .rope = c.plan.rope.reference,
          .n_recent_queries = o.n_recent_queries,
          .attention = {.over_queries = o.over_queries,
                        .over_heads = o.over_heads,
                        .group_stage = o.group_stage,
                        .pool = o.pool,
                        .pool_each_query_head = o.pool_stage == PoolStage::query_head,
                        .scale =
                            o.scale ? static_cast<double>(*o.scale) : 1 / std::sqrt(static_cast<double>(c.plan.shape.head_dim)),
                        .softcap = o.logit_softcap ? static_cast<double>(*o.logit_softcap) : 0},
          .domain = o.softmax_domain,
          .n_prefix = o.n_prefix,
          .n_recent_kv = o.n_recent_kv,
          .due =
              [=](const reference::Moment& m) {
                return m.tokens > budget && (m.after_prompt || (interval > 0 && m.tokens >= budget + interval));
              },
          .target = reference::prompt_budget(budget).target};
}

RunReport run(const Case& c, index_t kind, Random& random, bool with_rope = true) {
  RopeTable rope;
  if (with_rope) rope = RopeTable(c.plan.rope.options);
  return run_kind(kind, c.plan, SnapKV<>(c.plan.shape, c.options, rope), settings_of(c), random);
}

Case small_case() {
  return {
      .plan = {.shape = {.query_heads = 4, .kv_heads = 2, .head_dim = 16}, .rope = make_rope(16), .prompt = 70, .decode = 30},
      .options = {.budget = {.tokens = 32}, .n_recent_queries = 6, .n_recent_kv = 6}};
}

}  // namespace

TEST_CASE("SnapKV's defaults are those of the documentation", "[snapkv]") {
  const SnapKVOptions<> o;
  REQUIRE(o.n_recent_queries == 32);
  REQUIRE(o.n_recent_kv == 32);
  REQUIRE(o.n_prefix == std::optional<index_t>(0));
  REQUIRE(o.pool.kind == PoolKind::average);
  REQUIRE(o.pool.kernel == 5);
  REQUIRE(o.pool_stage == PoolStage::query_head);
  REQUIRE(o.over_queries == Reduce::sum);
  REQUIRE(o.over_heads == Reduce::mean);
  REQUIRE(o.softmax_domain == SoftmaxDomain::all_visible);
  REQUIRE(o.group_stage == GroupStage::weights);
  REQUIRE_FALSE(o.budget.interval.has_value());
}

TEST_CASE("SnapKV equals the reference over shapes, storage types, layouts and inputs", "[snapkv]") {
  Random random;
  CAPTURE(random.seed());
  RunReport total;
  for (index_t i = 0; i < 20; ++i) {
    const bool with_rope = i % 4 != 3;
    Case c{.plan = varied_plan(i, with_rope)};
    c.plan.prompt = 60 + 5 * i;
    c.options = {
        .budget = {.tokens = 40 + i, .interval = 16}, .n_recent_queries = 1 + (5 * i) % 32, .n_recent_kv = 1 + (7 * i) % 32};
    if (i % 2 == 1) c.options.pool = {PoolKind::max, 7};
    CAPTURE(i, c.plan.shape.query_heads, c.plan.shape.kv_heads, c.plan.shape.head_dim);
    const RunReport r = run(c, i, random, with_rope);
    REQUIRE(r.evictions >= 3);
    total.add(r);
  }
  total.require_sound();
}

TEST_CASE("SnapKV equals the reference for every option", "[snapkv]") {
  Random random;
  CAPTURE(random.seed());
  const Variation<Case> variations[] = {
      {"as it is", [](Case&) {}},
      {"max over queries", [](Case& c) { c.options.over_queries = Reduce::max; }},
      {"mean over queries", [](Case& c) { c.options.over_queries = Reduce::mean; }},
      {"max over heads", [](Case& c) { c.options.over_heads = Reduce::max; }},
      {"max over heads and max pool before it",
       [](Case& c) {
         c.options.over_heads = Reduce::max;
         c.options.pool = {PoolKind::max, 5};
       }},
      {"mean over heads after a max pool",
       [](Case& c) {
         c.options.pool = {PoolKind::max, 5};
       }},
      {"mean over heads before a max pool",
       [](Case& c) {
         c.options.pool = {PoolKind::max, 5};
         c.options.pool_stage = PoolStage::kv_head;
       }},
      {"no pool", [](Case& c) { c.options.pool = {}; }},
      {"kernel of 1",
       [](Case& c) {
         c.options.pool = {PoolKind::average, 1};
       }},
      {"kernel longer than the candidates",
       [](Case& c) {
         c.options.pool = {PoolKind::average, 201};
       }},
      {"softmax over the candidates", [](Case& c) { c.options.softmax_domain = SoftmaxDomain::candidates_only; }},
      {"group mean of logits", [](Case& c) { c.options.group_stage = GroupStage::logits; }},
      {"group maximum of logits",
       [](Case& c) {
         c.options.group_stage = GroupStage::logits;
         c.options.over_heads = Reduce::max;
       }},
      {"another scale", [](Case& c) { c.options.scale = 0.1F; }},
      {"softcap", [](Case& c) { c.options.logit_softcap = 1.5F; }},
      {"more queries than window", [](Case& c) { c.options.n_recent_queries = 20; }},
      {"fewer queries than window", [](Case& c) { c.options.n_recent_kv = 20; }},
      {"more queries than there are tokens", [](Case& c) { c.options.n_recent_queries = 400; }},
      {"no window", [](Case& c) { c.options.n_recent_kv = 0; }},
      {"sinks", [](Case& c) { c.options.n_prefix = 4; }},
      {"while decoding, too", [](Case& c) { c.options.budget.interval = 7; }},
      {"on every token", [](Case& c) { c.options.budget.interval = 1; }},
      {"at moments of the engine's own", [](Case& c) { c.plan.at_any_time = true; }},
      {"protected ranges",
       [](Case& c) {
         c.plan.protect = {{3, 9}, {30, 31}};
       }},
      {"a head for each query head", [](Case& c) { c.plan.shape.kv_heads = 4; }},
  };
  require_sound_for_each(variations, small_case(), [&](const Case& c, index_t kind) { return run(c, kind, random); });
}

TEST_CASE("SnapKV evicts the prompt once, down to its budget, and only where it is longer", "[snapkv]") {
  Random random;
  CAPTURE(random.seed());
  for (const index_t prompt : {0, 1, 5, 6, 7, 31, 32, 33, 34, 90}) {
    CAPTURE(prompt);
    Case c = small_case();
    c.plan.prompt = prompt;
    for (const index_t kind : {0, 3}) REQUIRE(run(c, kind, random).evictions == (prompt > 32 ? 1 : 0));
  }
}

TEST_CASE("SnapKV's prompt may come in chunks: the same scores, bit for bit", "[snapkv]") {
  Random random;
  CAPTURE(random.seed());
  const Case c = small_case();
  Stream stream(random, c.plan.shape, c.plan.rope);
  SnapKV<> whole(c.plan.shape, c.options, RopeTable(c.plan.rope.options));
  TestCache<> cache(c.plan.shape, 70);
  std::vector<float> queries;
  for (position_t p = 0; p < 70; ++p) {
    const Token token = stream.next(p);
    cache.append(token);
    queries.insert(queries.end(), token.queries.begin(), token.queries.end());
  }
  Workspace work(whole.workspace_size(70));
  const auto scores_of = [&](const SnapKV<>& policy) {
    std::vector<float> flat(140, 0.0F);
    require_value(policy.score(cache.view(), {flat.data(), 2, 70}, work));
    return flat;
  };
  SnapKV<> fresh = whole;
  require_ok(whole.prefill(QueryView::token_major(queries.data(), 70, 4, 16), work));
  for (const index_t chunk : {1, 3, 6, 64}) {
    SnapKV<> chunked = fresh;
    for (index_t first = 0; first < 70; first += chunk)
      require_ok(chunked.prefill(
          QueryView::token_major(queries.data() + first * 64, std::min<index_t>(chunk, 70 - first), 4, 16), work));
    CAPTURE(chunk);
    REQUIRE(scores_of(chunked) == scores_of(whole));
    REQUIRE(chunked.next_position() == 70);
  }
}

TEST_CASE("[E5] the causal corner of the window, and the softmax without it", "[snapkv]") {
  const Shape shape{.query_heads = 1, .kv_heads = 1, .head_dim = 4};
  SnapKVOptions<> options{.budget = {.tokens = 3}, .n_recent_queries = 2, .n_recent_kv = 2, .pool = {}};
  TestCache<> cache(shape, 6);
  for (position_t p = 0; p < 6; ++p) cache.append({p, {}, {}, std::vector<float>(4, 1.0F), std::vector<float>(4)});
  const auto scores_of = [&](const SnapKV<>& made) {
    SnapKV<> policy = made;
    Workspace work(policy.workspace_size(8));
    const std::vector<float> queries(24, 0.0F);
    require_ok(policy.prefill_rotated(QueryView::token_major(queries.data(), 6, 1, 4), work));
    std::vector<float> out(6, 0.0F);
    require_value(policy.score(cache.view(), {out.data(), 1, 6}, work));
    return out;
  };
  const std::vector<float> all = scores_of(SnapKV<>(shape, options));
  for (std::size_t j = 0; j < 4; ++j) REQUIRE_THAT(all[j], Catch::Matchers::WithinAbs(1.0 / 5 + 1.0 / 6, 1e-6));
  options.softmax_domain = SoftmaxDomain::candidates_only;
  const std::vector<float> candidates = scores_of(SnapKV<>(shape, options));
  for (std::size_t j = 0; j < 4; ++j) REQUIRE_THAT(candidates[j], Catch::Matchers::WithinAbs(0.5, 1e-6));
  // Rows see the whole window where it is not masked: what the check says a missing mask would give.
  AttentionScorer unmasked = SnapKV<>::scorer_of({.n_recent_queries = 2, .pool = {}});
  unmasked.causal = false;
  SnapKV<> policy =
      require_value(SnapKV<>::make(shape, {.budget = {.tokens = 3}, .n_recent_queries = 2, .n_recent_kv = 2}, {}, unmasked));
  const std::vector<float> without = scores_of(policy);
  for (std::size_t j = 0; j < 4; ++j) REQUIRE_THAT(without[j], Catch::Matchers::WithinAbs(1.0 / 3, 1e-6));
}

TEST_CASE("[E4] the pool counts the padding and stops at the window", "[snapkv]") {
  const Shape shape{.query_heads = 1, .kv_heads = 1, .head_dim = 4};
  SnapKV<> policy(shape, {.budget = {.tokens = 3}, .n_recent_queries = 2, .n_recent_kv = 2, .pool = {PoolKind::average, 5}});
  TestCache<> cache(shape, 8);
  for (position_t p = 0; p < 8; ++p) cache.append({p, {}, {}, std::vector<float>(4, 1.0F), std::vector<float>(4)});
  Workspace work(policy.workspace_size(8));
  const std::vector<float> queries(32, 0.0F);
  require_ok(policy.prefill_rotated(QueryView::token_major(queries.data(), 8, 1, 4), work));
  std::vector<float> out(8, 0.0F);
  require_value(policy.score(cache.view(), {out.data(), 1, 8}, work));
  const double each = 1.0 / 7 + 1.0 / 8;
  const double factor[] = {0.6, 0.8, 1, 1, 0.8, 0.6};
  for (std::size_t j = 0; j < 6; ++j) REQUIRE_THAT(out[j], Catch::Matchers::WithinAbs(factor[j] * each, 1e-6));
}

TEST_CASE("SnapKV with keys and queries that are not finite: counted, without a say, and gone first", "[snapkv]") {
  Random random;
  CAPTURE(random.seed());
  require_sound_when_poisoned(small_case(), [&](const Case& c, index_t kind) { return run(c, kind, random); });
}

TEST_CASE("SnapKV refuses what cannot work, by name and value", "[snapkv]") {
  const Shape shape{.query_heads = 4, .kv_heads = 2, .head_dim = 16};
  struct Bad {
    const char* what;
    Shape shape;
    SnapKVOptions<> options;
    std::initializer_list<const char*> parts;
  };
  const SnapKVOptions<> good{.budget = {.tokens = 64}};
  const auto with = [&](auto change) {
    SnapKVOptions<> o = good;
    change(o);
    return o;
  };
  const Bad cases[] = {
      {"no budget", shape, {}, {"budget.tokens = 0"}},
      {"window of the budget", shape, with([](auto& o) { o.n_recent_kv = 64; }), {"n_recent_kv = 64", "budget.tokens = 64"}},
      {"sinks and window",
       shape,
       with([](auto& o) { o.n_prefix = 32; }),
       {"n_prefix = 32", "n_recent_kv = 32", "budget.tokens = 64"}},
      {"no query", shape, with([](auto& o) { o.n_recent_queries = 0; }), {"n_recent_queries = 0"}},
      {"even kernel", shape, with([](auto& o) { o.pool.kernel = 4; }), {"pool.kernel = 4"}},
      {"sum over heads", shape, with([](auto& o) { o.over_heads = Reduce::sum; }), {"over_heads = sum"}},
      {"infinite scale", shape, with([](auto& o) { o.scale = std::numeric_limits<float>::infinity(); }), {"scale = inf"}},
      {"softcap of 0", shape, with([](auto& o) { o.logit_softcap = 0.0F; }), {"logit_softcap = 0"}},
      {"heads that do not divide", {3, 2, 16}, good, {"shape.query_heads = 3", "shape.kv_heads = 2"}},
      {"another dimension than the table's", {4, 2, 8}, good, {"rope.head_dim = 16", "shape.head_dim = 8"}},
  };
  for (const Bad& bad : cases)
    require_refused_options<SnapKV<>>(bad.what, bad.shape, bad.options, RopeTable({.head_dim = 16}),
                                      StatusCode::invalid_argument, bad.parts);
  REQUIRE(SnapKV<>::make(shape, good).ok());
}
