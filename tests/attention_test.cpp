// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "beaconkv/algorithm/attention.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "beaconkv/algorithm/top_k.hpp"
#include "support/check.hpp"
#include "support/instruction_sets.hpp"
#include "support/layouts.hpp"
#include "support/reference.hpp"

namespace {

using namespace beaconkv;
using namespace beaconkv::test;
using Catch::Matchers::WithinAbs;
using Catch::Matchers::WithinRel;
using Slots = std::vector<slot_t>;

/// One call of `attention_scores` over dense keys.
struct Case {
  index_t group = 1;
  index_t rows = 1;
  index_t dim = 1;
  index_t slots = 0;
  Range domain{};
  Range pooled{};
  AttentionOptions options{};
  std::vector<float> queries{};  // [group][rows][dim]
  std::vector<float> keys{};     // [slots][dim]
  Slots visible{};               // [group][rows]
  std::vector<float> sinks{};    // [group] or empty

  /// Random queries and keys that every row sees.
  Case(index_t group_size, index_t row_count, index_t dims, index_t slot_count, Random& random)
      : group(group_size),
        rows(row_count),
        dim(dims),
        slots(slot_count),
        domain{0, slot_count},
        pooled{0, slot_count},
        queries(random.normals(group * rows * dim, 1.5F)),
        keys(random.normals(slots * dim, 1.5F)),
        visible(static_cast<std::size_t>(group * rows), static_cast<slot_t>(slot_count)) {}
  /// Given rows over an identity matrix of keys: the logits are the queries.
  Case(index_t group_size, index_t row_count, index_t slot_count, std::vector<float> logits)
      : group(group_size),
        rows(row_count),
        dim(slot_count),
        slots(slot_count),
        domain{0, slot_count},
        pooled{0, slot_count},
        queries(std::move(logits)),
        keys(static_cast<std::size_t>(slot_count * slot_count), 0.0F),
        visible(static_cast<std::size_t>(group * rows), static_cast<slot_t>(slot_count)) {
    for (index_t j = 0; j < slots; ++j) keys[static_cast<std::size_t>(j * (slots + 1))] = 1;
    options.scale = 1.0F;
  }

  [[nodiscard]] AttentionQueries view() const { return {queries.data(), group, rows, dim, visible, sinks}; }
  [[nodiscard]] WorkspaceSize workspace_size() const { return attention_workspace_size(group, rows, dim, domain.size()); }
  [[nodiscard]] auto dense_keys() const {
    return [this](index_t first, index_t count, float*) { return ConstRows{keys.data() + first * dim, count, dim, dim}; };
  }
  void see_causally() {
    for (std::size_t i = 0; i < visible.size(); ++i)
      visible[i] = static_cast<slot_t>(slots - rows + 1 + static_cast<index_t>(i) % rows);
  }
  void see_at_random(Random& random) {
    for (slot_t& v : visible) v = static_cast<slot_t>(random.integer(-1, slots + 2));
  }
};

struct Scored {
  std::vector<float> scores;
  index_t num_non_finite;
};

template <class Keys>
Scored score(const Case& c, const Keys& keys) {
  Workspace work(c.workspace_size());
  std::vector<float> out(static_cast<std::size_t>(c.domain.size()), -7.0F);
  const ScoreReport report = attention_scores(keys, c.view(), c.domain, c.pooled, c.options, out, work).or_throw();
  return {out, report.num_non_finite};
}
Scored score(const Case& c) { return score(c, c.dense_keys()); }

reference::Row expected(const Case& c) {
  std::vector<reference::Matrix> queries;
  for (index_t g = 0; g < c.group; ++g)
    queries.push_back(reference::matrix_of({c.queries.data() + g * c.rows * c.dim, c.rows, c.dim, c.dim}));
  const auto sees = [&](std::size_t g, std::size_t r, std::size_t j) {
    return c.domain.first + static_cast<index_t>(j) < c.visible[g * static_cast<std::size_t>(c.rows) + r];
  };
  reference::Attention a;
  a.over_queries = c.options.over_queries;
  a.over_heads = c.options.over_heads;
  a.group_stage = c.options.group_stage;
  a.pool = c.options.pool;
  a.pool_each_query_head = c.options.pool_stage == PoolStage::query_head;
  a.scale = c.options.scale ? static_cast<double>(*c.options.scale) : 1 / std::sqrt(static_cast<double>(c.dim));
  a.softcap = c.options.logit_softcap ? static_cast<double>(*c.options.logit_softcap) : 0;
  return reference::attention_scores(
      queries, reference::matrix_of({c.keys.data() + c.domain.first * c.dim, c.domain.size(), c.dim, c.dim}), sees,
      {c.pooled.first - c.domain.first, c.pooled.last - c.domain.first}, a);
}

/// The largest error, relative to the largest score; infinite where one of the two is NaN.
double error(const Scored& got, const reference::Row& reference) {
  const double size = largest_size(reference);
  const double gap = largest_difference(got.scores, reference);
  return gap == 0 ? 0 : gap / size;
}

constexpr double tolerance = 1e-5;

AttentionOptions any_options(Random& random) {
  constexpr Reduce reductions[] = {Reduce::max, Reduce::mean, Reduce::sum};
  constexpr PoolKind kinds[] = {PoolKind::none, PoolKind::average, PoolKind::max};
  AttentionOptions o;
  o.over_queries = reductions[random.integer(0, 2)];
  o.over_heads = random.coin() ? Reduce::max : Reduce::mean;
  o.group_stage = random.coin() ? GroupStage::logits : GroupStage::weights;
  o.pool = {kinds[random.integer(0, 2)], 1 + 2 * random.integer(0, 3)};
  o.pool_stage = random.coin() ? PoolStage::query_head : PoolStage::kv_head;
  if (random.coin()) o.scale = random.uniform(0.05F, 1.0F);
  if (random.coin()) o.logit_softcap = random.uniform(1.0F, 30.0F);
  return o;
}

TEST_CASE("[C9] the scale is a parameter", "[C9]") {
  Case c(1, 1, 2, {100, 0});
  c.dim = 128;
  c.queries.assign(128, 0.0F);
  c.queries[0] = 100;
  c.keys.assign(256, 0.0F);
  c.keys[0] = 1;
  const auto logit = [&] {
    const std::vector<float> w = score(c).scores;
    return std::log(static_cast<double>(w[0]) / static_cast<double>(w[1]));
  };
  c.options.scale = 1 / std::sqrt(168.0F);
  CHECK_THAT(logit(), WithinRel(7.71517, 1e-5));
  c.options.scale.reset();
  CHECK_THAT(logit(), WithinRel(8.83883, 1e-5));
}

TEST_CASE("[H-3] a learned sink takes its share of every row and is no key", "[H-3]") {
  Case c(1, 1, 2, {0, 0});
  c.sinks = {0.0F};
  CHECK(error(score(c), {1.0 / 3, 1.0 / 3}) < 1e-6);
  c.sinks = {200.0F};  // takes all
  for (const float x : score(c).scores) CHECK(x < 1e-30F);
  c.sinks = {-200.0F};  // takes nothing
  CHECK(error(score(c), {0.5, 0.5}) < 1e-6);

  // As one more key that every row sees and that gets no score: in a dimension of its own, with the sink as its logit.
  Random random;
  CAPTURE(random.seed());
  for (index_t round = 0; round < 40; ++round) {
    Case with(random.integer(1, 3), random.integer(1, 5), random.integer(2, 20), random.integer(1, 150), random);
    with.options.over_queries = random.coin() ? Reduce::max : Reduce::sum;
    with.options.over_heads = Reduce::mean;
    with.options.scale = 0.5F;
    for (index_t g = 0; g < with.group; ++g) with.sinks.push_back(random.uniform(-3.0F, 8.0F));
    Case as_key = with;
    as_key.sinks.clear();
    as_key.dim = with.dim + 1;
    as_key.slots = with.slots + 1;
    as_key.domain = as_key.pooled = {0, as_key.slots};
    as_key.queries.clear();
    as_key.keys.assign(static_cast<std::size_t>(as_key.slots * as_key.dim), 0.0F);
    for (index_t r = 0; r < with.group * with.rows; ++r) {
      for (index_t d = 0; d < with.dim; ++d) as_key.queries.push_back(with.queries[static_cast<std::size_t>(r * with.dim + d)]);
      as_key.queries.push_back(2 * with.sinks[static_cast<std::size_t>(r / with.rows)]);  // scale 0.5
    }
    as_key.keys[static_cast<std::size_t>(with.dim)] = 1;  // key 0 is the sink
    for (index_t j = 0; j < with.slots; ++j)
      std::copy_n(with.keys.begin() + j * with.dim, with.dim, as_key.keys.begin() + (j + 1) * as_key.dim);
    for (slot_t& v : as_key.visible) v = static_cast<slot_t>(as_key.slots);
    reference::Row want = expected(as_key);
    want.erase(want.begin());
    REQUIRE(error(score(with), want) < tolerance);
  }

  Workspace work(c.workspace_size());
  std::vector<float> out(2);
  c.sinks = {0, 0};
  check_invalid(attention_scores(c.dense_keys(), c.view(), c.domain, c.pooled, c.options, out, work).status(),
                {"queries.sink_logits has 2", "1"});
  c.sinks = {0};
  c.options.group_stage = GroupStage::logits;
  check_error(attention_scores(c.dense_keys(), c.view(), c.domain, c.pooled, c.options, out, work).status(),
              StatusCode::unsupported, {"sink_logits"});
}

TEST_CASE("[D4] rows that see nothing, and rows with a single tiny logit", "[D4]") {
  Case c(1, 2, 2, {5, 5, 0, std::log(3.0F)});
  c.options.over_queries = Reduce::sum;
  c.visible = {0, 2};
  CHECK(error(score(c), {0.25, 0.75}) < 1e-6);
  c.options.over_queries = Reduce::max;
  CHECK(error(score(c), {0.25, 0.75}) < 1e-6);
  c.options.over_queries = Reduce::mean;  // a row that sees nothing counts as a row
  CHECK(error(score(c), {0.125, 0.375}) < 1e-6);
  c.visible = {0, 0};
  CHECK(score(c).scores == std::vector<float>{0, 0});

  Case tiny(1, 1, 3, {-1e30F, 7, 9});
  tiny.visible = {1};
  CHECK(score(tiny).scores == std::vector<float>{1, 0, 0});
  tiny.visible = {2};
  CHECK(score(tiny).scores == std::vector<float>{0, 1, 0});
}

TEST_CASE("[E1] scores end at the KV head: mean and max of its query heads", "[E1]") {
  const auto logs = [](std::vector<float> weights) {
    for (float& w : weights) w = std::log(w);
    return weights;
  };
  Case kv0(2, 1, 4, logs({.7F, .1F, .1F, .1F, .1F, .1F, .1F, .7F}));
  Case kv1(2, 1, 4, logs({.25F, .25F, .25F, .25F, .1F, .6F, .2F, .1F}));
  const auto best_two = [](const Case& c) {
    std::vector<float> scores = score(c).scores;
    for (float& s : scores) s = std::round(s * 1e5F);  // equal ones are equal up to rounding
    Workspace work(top_k_workspace_size(4));
    Slots out(2);
    static_cast<void>(top_k(scores, 2, out, work).or_throw());
    return out;
  };
  kv0.options.over_heads = kv1.options.over_heads = Reduce::mean;
  CHECK(error(score(kv0), {.4, .1, .1, .4}) < 1e-6);
  CHECK(error(score(kv1), {.175, .425, .225, .175}) < 1e-6);
  CHECK(best_two(kv0) == Slots{0, 3});
  CHECK(best_two(kv1) == Slots{1, 2});
  kv0.options.over_heads = kv1.options.over_heads = Reduce::max;
  CHECK(error(score(kv0), {.7, .1, .1, .7}) < 1e-6);
  CHECK(error(score(kv1), {.25, .6, .25, .25}) < 1e-6);
  CHECK(best_two(kv0) == Slots{0, 3});
  CHECK(best_two(kv1) == Slots{0, 1});

  // The maximum of the logits, before the softmax: .7 .1 .1 .7 and .25 .6 .25 .25, each divided by its sum.
  kv0.options.group_stage = kv1.options.group_stage = GroupStage::logits;
  CHECK(error(score(kv0), {.7 / 1.6, .1 / 1.6, .1 / 1.6, .7 / 1.6}) < 1e-6);
  CHECK(error(score(kv1), {.25 / 1.35, .6 / 1.35, .25 / 1.35, .25 / 1.35}) < 1e-6);
  // The mean of the logits is the geometric mean of the weights.
  kv1.options.over_heads = Reduce::mean;
  const double sum = std::sqrt(.25) * (2 * std::sqrt(.1) + std::sqrt(.6) + std::sqrt(.2));
  CHECK(error(score(kv1), {std::sqrt(.025) / sum, std::sqrt(.15) / sum, std::sqrt(.05) / sum, std::sqrt(.025) / sum}) < 1e-6);
}

TEST_CASE("[E3] the weight of a masked key is exactly 0", "[E3]") {
  Case c(2, 2, 6, std::vector<float>(24, 50.0F));
  c.visible = {3, 1, 2, 3};
  for (const Reduce how : {Reduce::max, Reduce::mean, Reduce::sum}) {
    c.options.over_queries = how;
    for (const GroupStage stage : {GroupStage::weights, GroupStage::logits}) {
      c.options.group_stage = stage;
      const std::vector<float> scores = score(c).scores;
      for (const std::size_t j : {3U, 4U, 5U}) CHECK(bits_of(scores[j]) == 0);
      for (const std::size_t j : {0U, 1U, 2U}) CHECK(scores[j] > 0);
    }
  }
}

TEST_CASE("[E5] the causal corner of the observation window", "[E5]") {
  Case c(1, 2, 6, std::vector<float>(12, 0.0F));
  c.options.over_queries = Reduce::sum;
  c.visible = {5, 6};
  CHECK(error(score(c), {11.0 / 30, 11.0 / 30, 11.0 / 30, 11.0 / 30, 11.0 / 30, 1.0 / 6}) < 1e-6);
  c.domain = c.pooled = {0, 4};  // R-KV and RPC: the softmax is over the candidates
  CHECK(error(score(c), {0.5, 0.5, 0.5, 0.5}) < 1e-6);
}

TEST_CASE("[E4] the pool smooths its range as if nothing stood beside it", "[E4]") {
  // One row a key, so that every key's score is 1.
  Case c(1, 6, 6, std::vector<float>(36, -200.0F));
  for (std::size_t j = 0; j < 6; ++j) c.queries[j * 7] = 200;
  c.options.over_queries = Reduce::sum;
  c.options.pool = {PoolKind::average, 5};
  CHECK(error(score(c), {0.6, 0.8, 1, 1, 0.8, 0.6}) < 1e-6);
  c.pooled = {0, 3};
  CHECK(error(score(c), {0.6, 0.6, 0.6, 1, 1, 1}) < 1e-6);
  c.pooled = {2, 5};
  CHECK(error(score(c), {1, 1, 0.6, 0.6, 0.6, 1}) < 1e-6);
  c.pooled = {4, 4};
  CHECK(error(score(c), {1, 1, 1, 1, 1, 1}) < 1e-6);
}

TEST_CASE("Attention scores agree with the reference under every combination of options") {
  Random random;
  CAPTURE(random.seed());
  const GroupStage stage = GENERATE(GroupStage::weights, GroupStage::logits);
  const PoolStage pool_stage = GENERATE(PoolStage::query_head, PoolStage::kv_head);
  Case c(3, 5, 8, 22, random);
  c.options.group_stage = stage;
  c.options.pool_stage = pool_stage;
  double worst = 0;
  for (const int sight : {0, 1, 2})
    for (const Range domain : {Range{0, 22}, Range{4, 17}})
      for (const bool whole : {true, false})
        for (const Reduce over_queries : {Reduce::max, Reduce::mean, Reduce::sum})
          for (const Reduce over_heads : {Reduce::max, Reduce::mean})
            for (const Pool& pool : {Pool{}, Pool{PoolKind::average, 3}, Pool{PoolKind::average, 7}, Pool{PoolKind::max, 3},
                                     Pool{PoolKind::max, 7}})
              for (const float scale : {0.0F, 0.7F})
                for (const float softcap : {0.0F, 1.5F}) {
                  if (sight == 0) std::fill(c.visible.begin(), c.visible.end(), slot_t{22});
                  if (sight == 1) c.see_causally();
                  if (sight == 2) c.see_at_random(random);
                  c.domain = domain;
                  c.pooled = whole ? domain : Range{domain.first + 2, domain.last - 5};
                  c.options.over_queries = over_queries;
                  c.options.over_heads = over_heads;
                  c.options.pool = pool;
                  c.options.scale = scale > 0 ? std::optional(scale) : std::nullopt;
                  c.options.logit_softcap = softcap > 0 ? std::optional(softcap) : std::nullopt;
                  CAPTURE(sight, domain.first, whole, static_cast<int>(over_queries), static_cast<int>(over_heads));
                  CAPTURE(static_cast<int>(pool.kind), pool.kernel, scale, softcap, c.visible);
                  const Scored got = score(c);
                  const double gap = error(got, expected(c));
                  REQUIRE(gap <= tolerance);
                  REQUIRE(got.num_non_finite == 0);
                  worst = std::max(worst, gap);
                }
  CHECK(worst > 0);
}

TEST_CASE("Attention scores agree with the reference at every size around tiles, lanes and strips") {
  Random random;
  CAPTURE(random.seed());
  const ForcedSet set(GENERATE(from_range(supported_sets())));
  for (const index_t slots : {0, 1, 2, 7, 8, 9, 95, 96, 97, 127, 192, 200})
    for (const index_t rows : {0, 1, 2, 3, 8, 9, 31, 33, 63, 64, 65})
      for (const index_t group : {1, 2, 4, 7, 8}) {
        Case c(group, rows, random.integer(1, 20), slots, random);
        c.options = any_options(random);
        if (random.coin()) c.see_at_random(random);
        c.domain.first = random.integer(0, std::min<index_t>(slots, 3));
        c.domain.last = slots - random.integer(0, std::min<index_t>(slots - c.domain.first, 3));
        c.pooled.first = random.integer(c.domain.first, c.domain.last);
        c.pooled.last = random.integer(c.pooled.first, c.domain.last);
        CAPTURE(slots, rows, group, c.dim, c.domain.first, c.domain.last, c.pooled.first, c.pooled.last);
        CAPTURE(static_cast<int>(c.options.group_stage), static_cast<int>(c.options.over_queries),
                c.options.logit_softcap.has_value());
        REQUIRE(error(score(c), expected(c)) <= tolerance);
      }
}

TEST_CASE("Attention scores agree with the reference in every dimension") {
  Random random;
  CAPTURE(random.seed());
  std::vector<index_t> dims{64, 80, 96, 128, 255, 256, 257, 512, 1000};
  for (index_t dim = 1; dim <= 40; ++dim) dims.push_back(dim);
  for (const index_t dim : dims)
    for (const index_t rows : {1, 4, 17})
      for (const index_t group : {1, 4}) {
        Case c(group, rows, dim, 70, random);
        c.see_causally();
        c.options.group_stage = random.coin() ? GroupStage::logits : GroupStage::weights;
        c.options.over_queries = random.coin() ? Reduce::max : Reduce::sum;
        const reference::Row reference = expected(c);
        for (const InstructionSet chosen : supported_sets()) {
          const ForcedSet set(chosen);
          CAPTURE(dim, rows, group);
          REQUIRE(error(score(c), reference) <= tolerance);
        }
      }
}

TEMPLATE_TEST_CASE("Attention scores are the same in every layout, of keys as they are stored", "", float, float16, bfloat16) {
  Random random;
  CAPTURE(random.seed());
  for (const index_t dim : {3, 8, 40, 128}) {
    constexpr index_t slots = 84;
    constexpr index_t heads = 2;
    Case c(4, 9, dim, slots, random);
    c.see_causally();
    c.domain = {5, 80};
    c.pooled = {5, 71};
    c.options = any_options(random);
    const std::vector<float> rows = random.normals(slots * heads * dim, 1.5F);
    for (std::size_t i = 0; i < c.keys.size(); ++i) {  // of head 1
      const std::size_t slot = i / static_cast<std::size_t>(dim);
      c.keys[i] = decode(
          encode<TestType>(rows[(slot * heads + 1) * static_cast<std::size_t>(dim) + i % static_cast<std::size_t>(dim)]));
    }
    const Scored dense = score(c);
    CAPTURE(dim);
    REQUIRE(error(dense, expected(c)) <= tolerance);
    for (const Layout layout : all_layouts) {
      LayoutCache<TestType> cache(layout, heads, dim, dim, slots, random);
      for (index_t t = 0; t < slots; ++t) {
        const std::span<const float> token(rows.data() + t * heads * dim, static_cast<std::size_t>(heads * dim));
        cache.append(token, token, t);
      }
      const auto keys = [&](index_t first, index_t count, float* scratch) {
        return cache.cache.keys(1, first, count, scratch);
      };
      CAPTURE(static_cast<int>(layout));
      CHECK(same_bits(score(c, keys).scores, dense.scores));
    }
  }
}

TEST_CASE("Equal keys have equal scores wherever they stand, and AVX2 and AVX-512 give the same bits") {
  Random random;
  CAPTURE(random.seed());
  for (index_t round = 0; round < 60; ++round) {
    Case c(random.integer(1, 4), random.integer(1, 40), random.integer(1, 70), random.integer(2, 250), random);
    c.options = any_options(random);
    c.options.pool = {};
    for (index_t j = 1; j < c.slots; ++j)
      if (random.coin()) std::copy_n(c.keys.begin(), c.dim, c.keys.begin() + j * c.dim);
    std::vector<float> wide;
    for (const InstructionSet chosen : supported_sets()) {
      const ForcedSet set(chosen);
      const std::vector<float> scores = score(c).scores;
      CAPTURE(round, c.group, c.rows, c.dim, c.slots);
      for (index_t j = 1; j < c.slots; ++j)
        if (std::equal(c.keys.begin(), c.keys.begin() + c.dim, c.keys.begin() + j * c.dim))
          REQUIRE(bits_of(scores[static_cast<std::size_t>(j)]) == bits_of(scores[0]));
      if (chosen == InstructionSet::baseline) continue;
      if (!wide.empty()) REQUIRE(same_bits(wide, scores));
      wide = scores;
    }
  }
}

TEST_CASE("Rows of keys may lie apart") {
  Random random;
  CAPTURE(random.seed());
  Case c(2, 3, 5, 100, random);
  std::vector<float> apart(100 * 11, nan_float());
  for (index_t j = 0; j < 100; ++j) std::copy_n(c.keys.begin() + j * 5, 5, apart.begin() + j * 11);
  const auto keys = [&](index_t first, index_t count, float*) { return ConstRows{apart.data() + first * 11, count, 5, 11}; };
  CHECK(same_bits(score(c, keys).scores, score(c).scores));
}

TEST_CASE("A key is asked for once, in order, in tiles that fit the scratch") {
  Random random;
  CAPTURE(random.seed());
  const index_t dim = GENERATE(1, 64, 256, 1000, 20000);
  Case c(1, 2, dim, 150, random);
  c.domain = c.pooled = {3, 147};
  index_t next = 3;
  const auto keys = [&](index_t first, index_t count, float* scratch) {
    CHECK(first == next);
    CHECK(count >= 1);
    next = first + count;
    std::copy_n(c.keys.begin() + first * dim, count * dim, scratch);  // a sanitizer sees where it is too small
    return ConstRows{scratch, count, dim, dim};
  };
  const Scored got = score(c, keys);
  CHECK(next == 147);
  CHECK(same_bits(got.scores, score(c).scores));
}

TEST_CASE("Keys and queries that are not finite: counted, without weight, and without harm to the others") {
  Random random;
  CAPTURE(random.seed());
  const std::uint32_t kinds[] = {0x7FC00000U, 0x7F800000U, 0xFF800000U, 0xFFFFFFFFU};
  for (index_t round = 0; round < 200; ++round) {
    const index_t group = random.integer(1, 4);
    const index_t rows = random.integer(1, 9);
    const index_t dim = random.integer(1, 20);
    Case c(group, rows, dim, random.integer(1, 150), random);
    c.options = any_options(random);
    c.options.logit_softcap.reset();
    if (random.coin()) c.see_causally();
    const Slots bad_keys = random.subset(random.integer(0, c.slots), c.slots);
    for (const slot_t j : bad_keys)
      c.keys[static_cast<std::size_t>(j * c.dim + random.integer(0, c.dim - 1))] = float_of(kinds[random.integer(0, 3)]);
    const Slots bad_rows = random.subset(random.integer(0, c.group * c.rows), c.group * c.rows);
    for (const slot_t r : bad_rows)
      c.queries[static_cast<std::size_t>(r * c.dim + random.integer(0, c.dim - 1))] = float_of(kinds[random.integer(0, 3)]);
    CAPTURE(round, c.group, c.rows, c.dim, c.slots, bad_keys, bad_rows);
    const Scored got = score(c);
    REQUIRE(error(got, expected(c)) <= tolerance);
    REQUIRE(got.num_non_finite == static_cast<index_t>(bad_keys.size() + bad_rows.size()));
    for (const slot_t j : bad_keys) REQUIRE(std::isnan(got.scores[static_cast<std::size_t>(j)]));
  }
}

TEST_CASE("Keys and queries that are not finite are seen through a softcap") {
  Case c(2, 1, 3, {1, 2, 3, 3, 2, 1});
  c.options.logit_softcap = 5.0F;
  c.options.group_stage = GENERATE(GroupStage::weights, GroupStage::logits);
  c.keys.assign(9, 0.5F);
  c.keys[4] = infinity_float();  // every logit of key 1 is infinite, none is NaN
  SECTION("a key") {
    const Scored got = score(c);
    CHECK(std::isnan(got.scores[1]));
    CHECK(got.num_non_finite == 1);
    CHECK(error(got, expected(c)) <= tolerance);
  }
  SECTION("a query") {
    c.queries[1] = -infinity_float();
    const Scored got = score(c);
    CHECK(std::isnan(got.scores[1]));
    CHECK(got.num_non_finite == 2);
    CHECK(error(got, expected(c)) <= tolerance);
  }
}

TEST_CASE("Queries that are not finite are counted where there are no keys") {
  Random random;
  CAPTURE(random.seed());
  Case c(2, 3, 4, 5, random);
  c.queries[7] = nan_float();
  c.domain = c.pooled = {5, 5};
  CHECK(score(c).num_non_finite == 1);
}

TEST_CASE("Keys that are not finite are seen where there are no queries") {
  Random random;
  CAPTURE(random.seed());
  Case c(2, 0, 3, 4, random);
  c.keys[7] = nan_float();
  c.options.group_stage = GENERATE(GroupStage::weights, GroupStage::logits);
  const Scored got = score(c);
  CHECK(std::isnan(got.scores[2]));
  CHECK(got.num_non_finite == 1);
  for (const std::size_t j : {0U, 1U, 3U}) CHECK(got.scores[j] == 0);
}

TEST_CASE("Nothing finite at all") {
  Random random;
  CAPTURE(random.seed());
  Case c(2, 3, 4, 70, random);
  std::fill(c.queries.begin(), c.queries.end(), nan_float());
  Scored got = score(c);
  CHECK(got.num_non_finite == 6);
  CHECK(got.scores == std::vector<float>(70, 0.0F));
  std::fill(c.keys.begin(), c.keys.end(), nan_float());
  got = score(c);
  CHECK(got.num_non_finite == 76);
  CHECK(std::all_of(got.scores.begin(), got.scores.end(), [](float x) { return std::isnan(x); }));
}

TEST_CASE("Large logits do not overflow") {
  Case c(1, 2, 3, {3e37F, -3e37F, 1e37F, -3e38F, -2.9e38F, -3e38F});
  c.options.over_queries = Reduce::sum;
  CHECK(score(c).scores == std::vector<float>{1, 1, 0});
}

TEST_CASE("Many keys: the weights of a row sum to 1") {
  Random random;
  CAPTURE(random.seed());
  Case c(1, 4, 16, 20000, random);
  c.options.over_queries = Reduce::sum;
  double sum = 0;
  for (const float w : score(c).scores) sum += static_cast<double>(w);
  CHECK_THAT(sum, WithinAbs(4.0, 1e-5));
}

TEST_CASE("[K4] [E5] attention uses the workspace that it asked for and allocates nothing", "[K4][E5]") {
  Random random;
  CAPTURE(random.seed());
  const index_t dim = GENERATE(1, 7, 64, 128, 256);
  const index_t group = GENERATE(1, 4, 7, 8);
  const GroupStage stage = GENERATE(GroupStage::weights, GroupStage::logits);
  for (const index_t rows : {0, 1, 2, 33, 64})
    for (const index_t slots : {0, 1, 2, 64, 65, 300}) {
      Case c(group, rows, dim, slots, random);
      c.options.group_stage = stage;
      c.options.pool = {PoolKind::max, 7};
      c.options.logit_softcap = 20.0F;
      if (rows > 0) c.see_causally();
      std::vector<float> out(static_cast<std::size_t>(slots));
      CAPTURE(dim, group, rows, slots);
      check_workspace(
          c.workspace_size(),
          [&](Workspace& work) {
            return attention_scores(c.dense_keys(), c.view(), c.domain, c.pooled, c.options, out, work).status();
          },
          [&] { std::fill(out.begin(), out.end(), -7.0F); });
      REQUIRE(out == std::vector<float>(out.size(), -7.0F));
    }
}

TEST_CASE("Attention over wide rows allocates nothing either") {
  Random random;
  CAPTURE(random.seed());
  const index_t dim = GENERATE(512, 1024, 4096, 20000);
  for (const index_t rows : {1, 9, 70}) {
    Case c(2, rows, dim, 70, random);
    Workspace work(c.workspace_size());
    std::vector<float> out(70);
    bool ok = false;
    const std::int64_t allocations =
        allocations_of([&] { ok = attention_scores(c.dense_keys(), c.view(), c.domain, c.pooled, c.options, out, work).ok(); });
    CAPTURE(dim, rows);
    CHECK(ok);
    CHECK(allocations == 0);
  }
}

TEST_CASE("The scratch of attention grows with the keys, not with their square") {
  const auto bytes = [](index_t keys) { return attention_workspace_size(4, 32, 128, keys).bytes; };
  CHECK(bytes(32768) - bytes(16384) <= 2 * (bytes(16384) - bytes(8192)));
  CHECK(bytes(16384) <= std::size_t{16384} * (4 * 32 * 4 + 16) + (1 << 17));
}

TEST_CASE("Bad arguments of attention are named and nothing is written") {
  Random random;
  CAPTURE(random.seed());
  Case good(2, 3, 4, 10, random);
  std::vector<float> out(10, -7.0F);
  Workspace work(good.workspace_size());
  const auto status = [&](const Case& c, std::span<float> to) {
    return attention_scores(good.dense_keys(), c.view(), c.domain, c.pooled, c.options, to, work).status();
  };
  const auto check = [&](auto&& change, std::initializer_list<const char*> parts) {
    Case c = good;
    change(c);
    check_invalid(status(c, out), parts);
  };
  check([](Case& c) { c.options.over_heads = Reduce::sum; }, {"over_heads = sum"});
  for (const float bad : {0.0F, -0.5F, nan_float(), infinity_float()}) {
    check([&](Case& c) { c.options.scale = bad; }, {"scale = "});
    check([&](Case& c) { c.options.logit_softcap = bad; }, {"logit_softcap = "});
  }
  check([](Case& c) { c.options.pool = {PoolKind::average, 4}; }, {"pool.kernel = 4"});
  check([](Case& c) { c.group = 0; }, {"group = 0"});
  check([](Case& c) { c.group = -2; }, {"group = -2"});
  check([](Case& c) { c.rows = -1; }, {"rows = -1"});
  check([](Case& c) { c.dim = 0; }, {"dim = 0"});
  check([](Case& c) { c.visible.pop_back(); }, {"visible has 5", "6 are needed"});
  check([](Case& c) { c.visible.push_back(1); }, {"visible has 7", "6 are needed"});
  check([](Case& c) { c.domain = {-1, 9}; }, {"domain = [-1, 9)"});
  check([](Case& c) { c.domain = {5, 4}; }, {"domain = [5, 4)"});
  check([](Case& c) { c.domain.first = 1; }, {"pooled = [0, 10)", "domain [1, 10)"});
  check([](Case& c) { c.domain.last = 9; }, {"pooled = [0, 10)", "domain [0, 9)"});
  check([](Case& c) { c.pooled = {6, 5}; }, {"pooled = [6, 5)"});
  check_invalid(status(good, std::span(out).first(9)), {"out has 9", "domain has 10"});
  std::vector<float> longer(11, -7.0F);
  check_invalid(status(good, longer), {"out has 11", "domain has 10"});
  CHECK(out == std::vector<float>(10, -7.0F));
  CHECK(work.peak() == 0);
  CHECK(status(good, out).ok());
}

}  // namespace
