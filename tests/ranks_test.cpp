// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

// Tensor-parallel ranks: each holds some of a layer's heads, and all must keep the same tokens. The ranks here live in one
// process; examples/tensor_parallel has real ones.

#include <algorithm>
#include <string>
#include <vector>

#include "support/catch.hpp"
#include "support/policies.hpp"

namespace {

using namespace beaconkv;
using namespace beaconkv::test;

using PerLayer = TestCache<float, float, Granularity::per_layer>;

constexpr Shape layer{.query_heads = 8, .kv_heads = 4, .head_dim = 16};

/// A token's rows of the heads of rank `rank` of `ranks`.
[[nodiscard]] Token part_of(const Token& token, index_t rank, index_t ranks) {
  const auto part = [&](const std::vector<float>& all) {
    const index_t size = static_cast<index_t>(all.size()) / ranks;
    return std::vector<float>(all.begin() + rank * size, all.begin() + (rank + 1) * size);
  };
  return {token.position, part(token.queries), part(token.rotated), part(token.keys), part(token.values)};
}

/// Runs the policies that `make(shape)` makes over 1, 2 and 4 ranks, and compares each eviction with one rank's that evicts by
/// the ordinary call.
template <class Make>
void check_ranks(Random& random, Make&& make) {
  using PolicyT = decltype(make(layer));
  struct Rank {
    PolicyT policy;
    PerLayer cache;
    Workspace work;
  };
  Stream stream(random, layer, make_rope(16));
  std::vector<Token> tokens;
  for (position_t p = 0; p < 100; ++p) tokens.push_back(stream.next(p));

  struct Eviction {
    position_t position;
    std::vector<slot_t> kept;
    std::vector<float> scores;
  };
  std::vector<Eviction> expected;
  PolicyT one = make(layer);
  PerLayer one_cache(layer, 60);
  Workspace one_work(one.workspace_size(60));
  for (const Token& token : tokens) {
    feed(one, one_cache, token);
    if (!one.due(one_cache.view())) continue;
    require_value(evict(one, one_cache.view(), one_work));
    expected.push_back({token.position, slots_of(one_work.plan().kept(0)), to_vector(one_work.plan().kept_scores(0))});
  }
  REQUIRE(expected.size() >= 4);

  for (const index_t ranks : {1, 2, 4}) {
    CAPTURE(ranks);
    const Shape shape{layer.query_heads / ranks, layer.kv_heads / ranks, layer.head_dim};
    std::vector<Rank> all;
    for (index_t r = 0; r < ranks; ++r) {
      const PolicyT policy = make(shape);
      all.push_back({policy, PerLayer(shape, 60), Workspace(policy.workspace_size(60))});
    }
    std::size_t evictions = 0;
    index_t disagreements = 0;
    for (const Token& token : tokens) {
      for (index_t r = 0; r < ranks; ++r) feed(all[at(r)].policy, all[at(r)].cache, part_of(token, r, ranks));
      const bool due = evictions < expected.size() && expected[evictions].position == token.position;
      for (const Rank& rank : all) REQUIRE(rank.policy.due(rank.cache.view()) == due);
      if (!due) continue;
      const Eviction& same = expected[evictions++];
      const index_t n = all[0].cache.view().num_tokens();
      std::vector<float> rows;  // [KV heads of the layer][n]
      for (Rank& rank : all) {
        std::vector<float> own(at(shape.kv_heads * n));
        require_value(rank.policy.score(rank.cache.view(), {own.data(), shape.kv_heads, n}, rank.work));
        rows.insert(rows.end(), own.begin(), own.end());
        KeepPlan alone;
        require_ok(rank.policy.select(rank.cache.view(), {own.data(), shape.kv_heads, n}, rank.work, alone));
        disagreements += slots_of(alone.kept(0)) == same.kept ? 0 : 1;
      }
      for (Rank& rank : all) {
        std::vector<float> copy = rows;
        KeepPlan plan;
        require_ok(rank.policy.select(rank.cache.view(), {copy.data(), layer.kv_heads, n}, rank.work, plan));
        REQUIRE(slots_of(plan.kept(0)) == same.kept);
        REQUIRE(same_bits(plan.kept_scores(0), same.scores));
        require_ok(compact(rank.cache.view(), plan));
        require_ok(rank.policy.commit(plan));
      }
    }
    REQUIRE(evictions == expected.size());
    REQUIRE((disagreements == 0) == (ranks == 1));  // else the exchange would prove nothing
  }
}

}  // namespace

TEST_CASE("[L1] ranks that reduce their scores in between keep the same tokens", "[L1]") {
  const Shape shape{.query_heads = 1, .kv_heads = 1, .head_dim = 1};
  const RecentWindow<> policy(shape, {.budget = {.max = 4, .min = 2}, .n_prefix = 0});
  std::vector<PerLayer> caches(2, PerLayer(shape, 4));
  for (PerLayer& cache : caches)
    for (position_t p = 0; p < 4; ++p) cache.append({p, {}, {}, {0.0F}, {0.0F}});
  Workspace work(policy.workspace_size(4));
  const std::vector<std::vector<float>> scores{{5, 1, 3, 0}, {0, 6, 3, 1}};
  const auto kept = [&](index_t rank, std::vector<float> rows) {
    const index_t heads = static_cast<index_t>(rows.size()) / 4;
    KeepPlan plan;
    require_ok(policy.select(caches[at(rank)].view(), {rows.data(), heads, 4}, work, plan, 2));
    REQUIRE(plan.sets() == 1);
    return slots_of(plan.kept(0));
  };

  CHECK(kept(0, scores[0]) == std::vector<slot_t>{0, 2});
  CHECK(kept(1, scores[1]) == std::vector<slot_t>{1, 2});
  const std::vector<float> sum{5, 7, 6, 1};
  const std::vector<float> both{5, 1, 3, 0, 0, 6, 3, 1};
  for (const index_t rank : {0, 1}) {
    CAPTURE(rank);
    CHECK(kept(rank, sum) == std::vector<slot_t>{1, 2});   // the engine reduced the rows
    CHECK(kept(rank, both) == std::vector<slot_t>{1, 2});  // or leaves that to select
  }
}

TEST_CASE("1, 2 and 4 ranks keep the same tokens with the same scores, bit for bit", "[ranks]") {
  Random random;
  CAPTURE(random.seed());
  const FixedBudget budget{.max = 40, .min = 30, .counts_prefix = true};
  SECTION("BeaconKV") {
    check_ranks(random, [&](const Shape& shape) {
      return BeaconKV<>(shape, {.budget = budget, .n_beacon = 4, .n_recent_queries = 3, .n_recent_kv = 4, .n_prefix = 2},
                        small_rope());
    });
  }
  SECTION("SnapKV") {
    check_ranks(random, [&](const Shape& shape) {
      return SnapKV<>(shape, {.budget = {.tokens = 30, .interval = 10}, .n_recent_queries = 5, .n_recent_kv = 4}, small_rope());
    });
  }
  SECTION("RPC") {  // of each head: reduced over a rank's heads only, scores would not be the layer's
    check_ranks(random, [&](const Shape& shape) {
      return RPC<AttentionScorer, FixedBudget>(
          shape, {.budget = budget, .n_recent_queries = 5, .n_recent_kv = 4, .n_prefix = 2, .head_scope = HeadScope::group},
          small_rope());
    });
  }
  SECTION("RKV") {
    check_ranks(random, [&](const Shape& shape) {
      return RKV<>(shape, {.budget = {.tokens = 30, .interval = 10}, .n_recent_queries = 5, .n_recent_kv = 4, .n_prefix = 2},
                   small_rope());
    });
  }
  SECTION("other reductions over heads") {
    using Shared = EvictionPolicy<RecentQueries, AttentionScorer, FixedBudget>;
    for (const Reduce how : {Reduce::max, Reduce::sum})
      check_ranks(random, [&](const Shape& shape) {
        return require_value(Shared::make(shape, {.observer = {.count = 6},
                                                  .scorer = {},
                                                  .schedule = budget,
                                                  .protection = {.n_prefix = 2, .n_recent_kv = 4},
                                                  .rope = small_rope(),
                                                  .shared_reduce = how}));
      });
  }
}

TEST_CASE("select takes the rows of all ranks, or one, only where all heads keep one set", "[ranks]") {
  RecentWindow<> policy = small_recent_window();
  PerLayer shared(small_shape, 40);
  TestCache<> of_each(small_shape, 40);
  const std::vector<float> row(32, 0.0F);
  for (position_t p = 0; p < 40; ++p) {
    shared.append({p, {}, {}, row, row});
    of_each.append({p, {}, {}, row, row});
    require_ok(policy.observe({}, p));
  }
  Workspace work(policy.workspace_size(40));
  std::vector<float> flat(at(6 * 40), 1.0F);
  for (index_t heads = -2; heads <= 6; ++heads) {
    CAPTURE(heads);
    const std::string shape = "[" + std::to_string(heads) + "][40]";
    KeepPlan plan;
    const Status status = policy.select(shared.view(), {flat.data(), heads, 40}, work, plan);
    if (heads == 1 || heads == 2 || heads == 4 || heads == 6)
      require_ok(status);
    else
      check_invalid(status, {shape.c_str(), "[2][40]"});
    const Status of_each_status = policy.select(of_each.view(), {flat.data(), heads, 40}, work, plan);
    REQUIRE(of_each_status.ok() == (heads == 2));
    REQUIRE(policy.score(shared.view(), {flat.data(), heads, 40}, work).ok() == (heads == 2));
  }
  KeepPlan plan;
  check_invalid(policy.select(shared.view(), {flat.data(), 4, 39}, work, plan), {"[4][39]", "[2][40]"});
}

TEST_CASE("[L2] ranks of different capacity plan for the smallest", "[L2]") {
  const Shape shape{.query_heads = 1, .kv_heads = 1, .head_dim = 1};
  const std::vector<index_t> capacities{2111, 2055};
  const index_t smallest = *std::min_element(capacities.begin(), capacities.end());
  REQUIRE(smallest == 2055);
  std::vector<std::vector<slot_t>> kept;
  for (const index_t capacity : capacities) {
    CAPTURE(capacity);
    RecentWindow<> together(shape, {.budget = {.max = smallest, .counts_prefix = true}, .n_prefix = 4});
    RecentWindow<> alone(shape, {.budget = {.max = capacity, .counts_prefix = true}, .n_prefix = 4});
    OwningCache<float, float, Granularity::per_layer> memory(shape, capacity);
    auto& cache = memory.view();
    Workspace work(together.workspace_size(capacity));
    for (position_t p = 0; p < 2055; ++p) {
      REQUIRE_FALSE(together.due(cache));
      require_ok(memory.append(std::vector<float>{0}, std::vector<float>{0}, p));
      require_ok(together.observe({}, p));
      require_ok(alone.observe({}, p));
    }
    REQUIRE(alone.due(cache) == (capacity == 2055));  // the larger rank would go on, and the caches part
    REQUIRE(together.due(cache));
    require_value(evict(together, cache, work));
    kept.push_back(slots_of(work.plan().kept(0)));
    REQUIRE(cache.num_tokens() == 1798);  // 7/8 of 2055, rounded down
  }
  REQUIRE(kept[0] == kept[1]);
}
