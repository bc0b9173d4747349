// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

// Lengths of values that a policy remembers are those that it would read, to the bit, whatever happened to the cache.

#include <numeric>
#include <vector>

#include "support/catch.hpp"
#include "support/policies.hpp"

namespace {

using namespace beaconkv;
using namespace beaconkv::test;

[[nodiscard]] BeaconKV<> weighing_policy(float credit, index_t n_recent_kv = 4) {
  return BeaconKV<>(small_shape,
                    {.budget = {.max = 40, .min = 32},
                     .n_beacon = 4,
                     .n_recent_queries = 3,
                     .n_recent_kv = n_recent_kv,
                     .n_prefix = 3,
                     .orphan_credit = credit,
                     .value_norm = true},
                    small_rope());
}

/// A policy that remembers no length: they are not part of what is saved.
[[nodiscard]] BeaconKV<> without_lengths(const BeaconKV<>& policy) {
  std::vector<std::byte> saved;
  policy.save(saved);
  BeaconKV<> copy = policy;
  require_ok(copy.load(saved));
  return copy;
}

template <class Policy, class CacheT>
[[nodiscard]] std::vector<std::uint32_t> scores_of(Policy& policy, const CacheT& cache) {
  const index_t n = cache.num_tokens();
  std::vector<float> scores(at(2 * n));
  Workspace work(policy.workspace_size(n));
  require_value(policy.score(cache, {scores.data(), 2, n}, std::span(&work, 1), SerialExecutor{}));
  std::vector<std::uint32_t> bits;
  for (index_t h = 0; h < 2; ++h) {
    const Range open = policy.candidates_of(cache, h);
    for (index_t j = open.first; j < open.last; ++j) bits.push_back(std::bit_cast<std::uint32_t>(scores[at(h * n + j)]));
  }
  return bits;
}

/// Noted, through a const policy, and with every value read.
template <class CacheT>
void require_same_scores(const BeaconKV<>& policy, const CacheT& cache) {
  const BeaconKV<> fresh = without_lengths(policy);
  BeaconKV<> noting = policy;
  const std::vector<std::uint32_t> want = scores_of(fresh, cache);
  REQUIRE(scores_of(policy, cache) == want);
  REQUIRE(scores_of(noting, cache) == want);
  REQUIRE(scores_of(noting, cache) == want);
}

template <class CacheT>
void evict_now(BeaconKV<>& policy, CacheT& cache) {
  Workspace work(policy.workspace_size(96));
  require_value(evict(policy, cache, work));
}

template <StorageType K, StorageType V, Granularity G>
void run_long(float credit, Random& random) {
  CAPTURE(credit);
  BeaconKV<> policy = weighing_policy(credit);
  TestCache<K, V, G> cache(small_shape, 96);
  Stream stream = small_stream(random);
  index_t evictions = 0;
  for (position_t p = 0; p < 150; ++p) {
    Token token = stream.next(p);
    if (p % 11 == 3) token.values[at(p) % token.values.size()] = std::numeric_limits<float>::quiet_NaN();
    feed(policy, cache, token);
    if (!policy.due(cache.view())) continue;
    ++evictions;
    CAPTURE(p);
    require_same_scores(policy, cache.view());
    if (p % 2 == 0) {
      BeaconKV<> other = weighing_policy(credit);  // a fork goes on, one that forgot goes on
      other = policy;
      policy = p % 4 == 0 ? without_lengths(other) : other;
    }
    evict_now(policy, cache.view());
  }
  REQUIRE(evictions > 8);
}

}  // namespace

TEST_CASE("Remembered lengths of values give the scores of lengths that are read, to the bit", "[value_norm]") {
  Random random;
  CAPTURE(random.seed());
  for (const float credit : {0.0F, 0.9F}) {
    run_long<float, float, Granularity::per_head>(credit, random);
    run_long<float16, bfloat16, Granularity::per_layer>(credit, random);
    run_long<float, float16, Granularity::per_head_ragged>(credit, random);
    run_long<float8_e4m3, float8_e5m2, Granularity::per_head>(credit, random);
  }
}

TEST_CASE("Values whose lengths are known are not read again", "[value_norm]") {
  Random random;
  CAPTURE(random.seed());
  for (const float credit : {0.0F, 0.9F}) {
    BeaconKV<> policy = weighing_policy(credit);
    TestCache<> cache(small_shape, 96);
    Stream stream = small_stream(random);
    while (!policy.due(cache.view())) feed(policy, cache, stream, 1);
    evict_now(policy, cache.view());
    const Range known = policy.candidates_of(cache.view(), 0);
    while (!policy.due(cache.view())) feed(policy, cache, stream, 1);
    const std::vector<std::uint32_t> before = scores_of(std::as_const(policy), cache.view());
    const BeaconKV<> fresh = without_lengths(policy);
    const auto change = [&](index_t slot) {
      const std::vector<float> other = random.normals(small_shape.head_dim);
      for (index_t h = 0; h < small_shape.kv_heads; ++h) cache.view().store_value(h, slot, other.data());
    };
    for (index_t slot = known.first; slot < known.last; ++slot) change(slot);
    REQUIRE(scores_of(std::as_const(policy), cache.view()) == before);
    REQUIRE(scores_of(fresh, cache.view()) != before);
    change(known.last);  // the first that was recent
    REQUIRE(scores_of(std::as_const(policy), cache.view()) != before);
  }
}

TEST_CASE("Where something else moved values, their lengths are read anew", "[value_norm]") {
  Random random;
  CAPTURE(random.seed());
  for (const index_t n_recent_kv : {0, 4})
    for (const index_t gone : {0, 2, 3, 20, 31}) {
      CAPTURE(n_recent_kv, gone);
      BeaconKV<> policy = weighing_policy(0.9F, n_recent_kv);
      TestCache<> cache(small_shape, 96);
      Stream stream = small_stream(random);
      while (policy.next_position() < 100) {
        feed(policy, cache, stream, 1);
        if (policy.due(cache.view())) evict_now(policy, cache.view());
      }
      KeepPlan plan;
      std::vector<slot_t> kept;
      for (index_t s = 0; s < cache.view().num_tokens(); ++s)
        if (s != gone) kept.push_back(static_cast<slot_t>(s));
      const std::span<const slot_t> sets[] = {kept};
      require_ok(plan.assign(cache.view(), sets));
      BeaconKV<> told = policy;
      require_ok(compact(cache.view(), plan));
      require_ok(told.commit(plan));
      require_same_scores(policy, cache.view());
      require_same_scores(told, cache.view());
      feed(policy, cache, stream, 6);
      require_same_scores(policy, cache.view());
    }
}

TEST_CASE("A plan that nobody scored leaves no length to the value of another token", "[value_norm]") {
  Random random;
  CAPTURE(random.seed());
  for (index_t second = 20; second < 36; ++second) {
    CAPTURE(second);
    BeaconKV<> policy = weighing_policy(0.9F);
    TestCache<> cache(small_shape, 96);
    Stream stream = small_stream(random);
    while (!policy.due(cache.view())) feed(policy, cache, stream, 1);
    evict_now(policy, cache.view());
    const auto take_out = [&](index_t gone, bool told) {
      std::vector<slot_t> kept;
      for (index_t s = 0; s < cache.view().num_tokens(); ++s)
        if (s != gone) kept.push_back(static_cast<slot_t>(s));
      const std::span<const slot_t> sets[] = {kept};
      KeepPlan plan;
      require_ok(plan.assign(cache.view(), sets));
      require_ok(compact(cache.view(), plan));
      if (told) require_ok(policy.commit(plan));
    };
    take_out(10, false);
    feed(policy, cache, stream, 3);
    take_out(second, true);
    require_same_scores(policy, cache.view());
  }
}

TEST_CASE("A plan that keeps all makes no length known: its tokens may still be taken back", "[value_norm]") {
  Random random;
  CAPTURE(random.seed());
  BeaconKV<> policy = weighing_policy(0, 0);
  TestCache<> cache(small_shape, 96);
  Stream stream = small_stream(random);
  feed(policy, cache, stream, 20);
  static_cast<void>(scores_of(policy, cache.view()));
  std::vector<slot_t> kept(20);
  std::iota(kept.begin(), kept.end(), slot_t{0});
  const std::span<const slot_t> sets[] = {kept};
  KeepPlan plan;
  require_ok(plan.assign(cache.view(), sets));
  require_ok(policy.commit(plan));
  for (index_t h = 0; h < small_shape.kv_heads; ++h)
    cache.view().store_value(h, 19, random.normals(small_shape.head_dim).data());
  require_same_scores(policy, cache.view());
}

TEST_CASE("A slice whose policy was asked for scores meanwhile begins anew", "[value_norm]") {
  Random random;
  CAPTURE(random.seed());
  for (const float credit : {0.0F, 0.9F}) {
    CAPTURE(credit);
    TestCache<> alone_cache(small_shape, 96);
    TestCache<> asked_cache(small_shape, 96);
    using Layers = Sequence<BeaconKV<>, TestCache<>::View>;
    const SequenceOptions options{.capacity = 96, .heads_per_step = 1};
    Layers alone = require_value(Layers::make({weighing_policy(credit)}, {alone_cache.view()}, options));
    Layers asked = require_value(Layers::make({weighing_policy(credit)}, {asked_cache.view()}, options));
    Stream stream = small_stream(random);
    index_t evicted = 0;
    for (position_t p = 0; p < 120; ++p) {
      const Token token = stream.next(p);
      for (Layers* layers : {&alone, &asked}) {
        auto& view = layers->cache(0);
        require_ok(view.append(p));
        for (index_t h = 0; h < small_shape.kv_heads; ++h) {
          view.store_key(h, view.num_tokens() - 1, token.keys.data() + h * small_shape.head_dim);
          view.store_value(h, view.num_tokens() - 1, token.values.data() + h * small_shape.head_dim);
        }
        require_ok(layers->policy(0).observe(token.queries, p));
        evicted += require_value(layers->evict_where_due()).evicted;
      }
      if (p % 3 == 0) static_cast<void>(scores_of(asked.policy(0), asked.cache(0)));
      require_same_scores(asked.policy(0), asked.cache(0));
    }
    REQUIRE(evicted > 100);
    REQUIRE(asked.cache(0).num_tokens() < 60);
  }
}

TEST_CASE("Tokens that are taken back and written anew get the lengths of their new values", "[value_norm]") {
  Random random;
  CAPTURE(random.seed());
  BeaconKV<> policy = weighing_policy(0);
  TestCache<> cache(small_shape, 96);
  Stream stream = small_stream(random);
  while (!policy.due(cache.view())) feed(policy, cache, stream, 1);
  evict_now(policy, cache.view());
  for (int again = 0; again < 3; ++again) {
    for (index_t i = 0; i < 9; ++i) cache.append(stream.next(policy.next_position() + i));
    static_cast<void>(scores_of(policy, cache.view()));  // a scoring that no commit follows leaves no trace
    require_same_scores(policy, cache.view());
    REQUIRE(require_value(cache.view().rollback(9)) == 9);
  }
  while (!policy.due(cache.view())) feed(policy, cache, stream, 1);
  require_same_scores(policy, cache.view());
  {  // nor does it where the next commit is that of another plan
    BeaconKV<> told = policy;
    TestCache<> copy = cache;
    std::vector<slot_t> kept(at(copy.view().num_tokens() - 1));
    for (std::size_t i = 0; i < kept.size(); ++i) kept[i] = static_cast<slot_t>(i < 10 ? i : i + 1);
    const std::span<const slot_t> sets[] = {kept};
    KeepPlan plan;
    require_ok(plan.assign(copy.view(), sets));
    require_ok(compact(copy.view(), plan));
    require_ok(told.commit(plan));
    feed(told, copy, stream, 5);
    require_same_scores(told, copy.view());
  }
  evict_now(policy, cache.view());
  cache.view().truncate(20);  // far into what is known, and not as many tokens again
  require_same_scores(policy, cache.view());
  feed(policy, cache, stream, 30);
  require_same_scores(policy, cache.view());
}

TEST_CASE("A prefix that grows or shrinks leaves every length right", "[value_norm]") {
  Random random;
  CAPTURE(random.seed());
  BeaconKV<> policy = weighing_policy(0.9F);
  TestCache<> cache(small_shape, 96);
  Stream stream = small_stream(random);
  while (!policy.due(cache.view())) feed(policy, cache, stream, 1);
  for (const index_t pinned : {6, 20, 0, 4, 31, 3, 0}) {
    CAPTURE(pinned);
    require_ok(cache.view().set_pinned_prefix(pinned));
    require_same_scores(policy, cache.view());
    Workspace work(policy.workspace_size(96));
    require_ok(policy.plan_free(cache.view(), 3, work, work.plan()));
    require_ok(compact(cache.view(), work.plan()));
    require_ok(policy.commit(work.plan()));
    require_same_scores(policy, cache.view());
    feed(policy, cache, stream, 3);
    require_same_scores(policy, cache.view());
  }
}

TEST_CASE("Lengths of values: 4 bytes a slot and KV head, only where they are wanted", "[value_norm]") {
  BeaconKVOptions<> o{.budget = {.max = 40, .min = 32}, .n_recent_kv = 4};
  const std::size_t published = BeaconKV<>(small_shape, o, small_rope()).state_bytes();
  o.value_norm = true;
  const BeaconKV<> weighing(small_shape, o, small_rope());
  REQUIRE(weighing.state_bytes() - published == (40 + 40 / 8 + 16) * 2 * 4);
}
