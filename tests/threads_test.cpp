// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

// What may happen on several threads at once, and that it makes no difference. Half of these tests say little unless
// ThreadSanitizer watches (the preset `tsan`).

#include <vector>

#include "support/sequence_run.hpp"
#include "support/workers.hpp"

using namespace beaconkv;
using namespace beaconkv::test;

namespace {

/// A plan by its numbers.
struct Kept {
  std::vector<slot_t> slots{};  ///< of all heads, one after the other
  std::vector<std::uint32_t> scores{};
  [[nodiscard]] bool operator==(const Kept&) const = default;
};

Kept kept_of(const KeepPlan& plan) {
  Kept out;
  for (index_t h = 0; h < plan.sets(); ++h) {
    out.slots.insert(out.slots.end(), plan.kept(h).begin(), plan.kept(h).end());
    for (const float x : plan.kept_scores(h)) out.scores.push_back(std::bit_cast<std::uint32_t>(x));
  }
  return out;
}

/// What a policy makes of a cache by its const functions; empty where one of them failed.
template <class PolicyT, class Cache>
Kept judge(const PolicyT& policy, const Cache& cache, Workspace& work) {
  KeepPlan plan;
  if (!policy.plan(cache, work, plan).ok() || plan.keeps_all()) return {};
  return kept_of(plan);
}

/// Bits of all rows of the first `tokens` slots, as an attention would read them.
template <class Cache>
std::uint64_t read_rows(const Cache& cache, index_t tokens) {
  std::vector<float> scratch(at(tokens * cache.key_dim()));
  std::uint64_t sum = 0;
  const auto add = [&](const ConstRows& rows) {
    for (index_t t = 0; t < rows.rows; ++t)
      for (index_t d = 0; d < rows.dim; ++d) sum = sum * 31 + std::bit_cast<std::uint32_t>(rows.row(t)[d]);
  };
  for (index_t h = 0; h < cache.num_kv_heads(); ++h) {
    add(cache.keys(h, 0, tokens, scratch.data()));
    add(cache.values(h, 0, tokens, scratch.data()));
  }
  return sum;
}

}  // namespace

TEST_CASE("[L3] any number of threads keeps the same tokens and bits", "[L3]") {
  Random random;
  CAPTURE(random.seed());
  for_each_policy([&](const char* name, const auto& policy) {
    INFO(name);
    using PolicyT = std::decay_t<decltype(policy)>;
    constexpr index_t layers = 7;
    const LayersOptions options{.sequence = {.workers = 8}};
    std::vector<Layers<PolicyT>> all;
    for (index_t i = 0; i < 5; ++i) all.emplace_back(policy, layers, options);
    LayerStreams streams(random, layers);
    const std::vector<LayerTokens> prompt = streams.next(0, 40);
    for (auto& s : all) prefill(*s, prompt);
    index_t evictions = 0;
    for (position_t p = 40; p < 80; ++p) {
      const SequenceReport serial = evict_due(*all[0]);
      evictions += serial.layers;
      for (std::size_t i = 1; i < all.size(); ++i) {
        constexpr index_t workers[] = {0, 1, 2, 3, 8};
        const SequenceReport r = require_value(all[i]->evict_where_due(Workers{workers[i]}));
        REQUIRE(r.layers == serial.layers);
        REQUIRE(r.evicted == serial.evicted);
        REQUIRE(r.unchanged_prefix == serial.unchanged_prefix);
      }
      const LayerTokens tokens = streams.next(p);
      for (auto& s : all) decode(*s, tokens);
    }
    for (std::size_t i = 1; i < all.size(); ++i) REQUIRE((state_of(*all[i]) == state_of(*all[0])));
    REQUIRE(evictions >= 3 * layers);
    const Bytes before = state_of(*all[0]);
    check_invalid(all[0]->evict_where_due(Workers{9}).status(), {"9 workers", "options.workers = 8"});
    REQUIRE((state_of(*all[0]) == before));
  });
}

TEST_CASE("[L3] the order of the sequences in a batch makes no difference", "[L3]") {
  Random random;
  CAPTURE(random.seed());
  for_each_policy([&](const char* name, const auto& policy) {
    INFO(name);
    using PolicyT = std::decay_t<decltype(policy)>;
    constexpr index_t requests = 5;
    const auto batch = [&] {
      std::vector<Layers<PolicyT>> out;
      for (index_t i = 0; i < requests; ++i) out.emplace_back(policy, 2);
      return out;
    };
    std::vector<Layers<PolicyT>> forward = batch();
    std::vector<Layers<PolicyT>> backward = batch();
    std::vector<Layers<PolicyT>> at_will = batch();
    std::vector<LayerStreams> streams(at(requests), LayerStreams(random, 2));
    for (index_t step = 0; step < 45; ++step) {
      for (index_t i = 0; i < requests; ++i) {
        if (step < 3 * i) continue;  // joins later
        const LayerTokens tokens = streams[at(i)].next(step - 3 * i);
        for (std::vector<Layers<PolicyT>>* b : {&forward, &backward, &at_will}) decode(*(*b)[at(i)], tokens);
      }
      for (index_t i = 0; i < requests; ++i) {
        static_cast<void>(evict_due(*forward[at(i)]));
        static_cast<void>(evict_due(*backward[at(requests - 1 - i)]));
      }
      std::vector<Status> failed(at(requests));
      Workers{3}.run(requests, [&](index_t i, index_t) { failed[at(i)] = at_will[at(i)]->evict_where_due().status(); });
      for (const Status& s : failed) require_ok(s);
    }
    for (index_t i = 0; i < requests; ++i) {
      REQUIRE(forward[at(i)]->cache(0).num_tokens() < 33);
      REQUIRE((state_of(*forward[at(i)]) == state_of(*backward[at(i)])));
      REQUIRE((state_of(*forward[at(i)]) == state_of(*at_will[at(i)])));
    }
  });
}

TEST_CASE("[L3] equal keys score equal bits in every slot, on every instruction set: the lowest slots stay", "[L3]") {
  Random random;
  CAPTURE(random.seed());
  const InstructionSet chosen = instruction_set();
  constexpr index_t tokens = 61;
  constexpr index_t keep = 24;
  constexpr index_t recent = 4;
  SnapKV<> policy(small_shape, {.budget = {.tokens = keep, .interval = 8},
                                .n_recent_queries = 5,
                                .n_recent_kv = recent,
                                .n_prefix = 0,
                                .pool = {.kind = PoolKind::none}});  // no table: queries come as they are used
  TestCache<> cache(small_shape, 64);
  // Dyadic numbers: products and sums are exact, fused or not.
  const auto dyadic = [&](index_t count) {
    std::vector<float> out;
    for (index_t i = 0; i < count; ++i) out.push_back(static_cast<float>(random.integer(-4, 4)) / 4);
    return out;
  };
  constexpr index_t kinds = 4;
  std::vector<std::vector<float>> keys;
  for (index_t i = 0; i < kinds; ++i) keys.push_back(dyadic(small_shape.kv_heads * small_shape.head_dim));
  std::vector<index_t> kind;
  for (position_t p = 0; p < tokens; ++p) {
    kind.push_back(random.integer(0, kinds - 1));
    Token token;
    token.position = p;
    token.keys = keys[at(kind.back())];
    token.values = dyadic(small_shape.kv_heads * small_shape.head_dim);
    cache.append(token);
    require_ok(policy.observe_rotated(dyadic(small_shape.query_heads * small_shape.head_dim), p));
  }

  std::vector<slot_t> first;
  for (const InstructionSet set : {InstructionSet::baseline, InstructionSet::avx2, InstructionSet::avx512}) {
    if (!use_instruction_set(set).ok()) continue;
    INFO(name_of(set));
    Workspace work(policy.workspace_size(tokens));
    std::vector<float> memory(at(small_shape.kv_heads * tokens));
    const ScoreMatrix scores{memory.data(), small_shape.kv_heads, tokens};
    require_ok(policy.score(cache.view(), scores, work).status());
    index_t unequal = 0;
    for (index_t h = 0; h < small_shape.kv_heads; ++h)
      for (index_t a = 0; a < tokens - recent; ++a)
        for (index_t b = 0; b < a; ++b)
          if (kind[at(a)] == kind[at(b)])
            unequal += std::bit_cast<std::uint32_t>(scores.row(h)[at(a)]) != std::bit_cast<std::uint32_t>(scores.row(h)[at(b)])
                           ? 1
                           : 0;
    REQUIRE(unequal == 0);

    KeepPlan plan;
    require_ok(policy.plan(cache.view(), work, plan));
    for (index_t h = 0; h < small_shape.kv_heads; ++h) {
      std::vector<slot_t> want = reference::top_k(scores.row(h).first(at(tokens - recent)), keep - recent);
      for (index_t s = tokens - recent; s < tokens; ++s) want.push_back(static_cast<slot_t>(s));
      REQUIRE(slots_of(plan.kept(h)) == want);
    }
    if (first.empty()) first = kept_of(plan).slots;
    REQUIRE(kept_of(plan).slots == first);
  }
  require_ok(use_instruction_set(chosen));
}

TEST_CASE("[N1] threads share one const policy, each over a cache of its own", "[N1]") {
  Random random;
  CAPTURE(random.seed());
  constexpr index_t threads = 8;
  constexpr index_t rounds = 5;
  for_each_policy([&](const char* name, const auto& made) {
    INFO(name);
    auto fed = made;
    Stream stream = small_stream(random);
    std::vector<TestCache<>> caches;
    for (index_t i = 0; i < threads; ++i) caches.emplace_back(small_shape, 64);
    for (position_t p = 0; p < 40; ++p) {
      for (TestCache<>& cache : caches) cache.append(stream.next(p));
      require_ok(fed.observe(stream.next(p).queries, p));
    }
    const auto& policy = fed;
    std::vector<Workspace> work(at(threads), Workspace(policy.workspace_size(64)));
    std::vector<Kept> serial;
    for (const TestCache<>& cache : caches) {
      serial.push_back(judge(policy, cache.view(), work[0]));
      REQUIRE_FALSE(serial.back().slots.empty());
    }
    std::vector<index_t> agreed(at(threads));
    at_once(threads, [&](index_t t) {
      for (index_t r = 0; r < rounds; ++r) {
        const std::size_t mine = at((t + r) % threads);  // and const caches are shared, too
        agreed[at(t)] += judge(policy, caches[mine].view(), work[at(t)]) == serial[mine] ? 1 : 0;
      }
    });
    REQUIRE(agreed == std::vector<index_t>(at(threads), rounds));
  });
}

TEST_CASE("[N2] a plan is made while others read the cache, and refused once the cache went on", "[N2]") {
  Random random;
  CAPTURE(random.seed());
  for_each_policy([&](const char* name, const auto& made) {
    INFO(name);
    auto policy = made;
    TestCache<> cache(small_shape, 64);
    Stream stream = small_stream(random);
    feed(policy, cache, stream, 40);
    Workspace work(policy.workspace_size(64));
    const Kept alone = judge(policy, cache.view(), work);
    const std::uint64_t rows = read_rows(cache.view(), 40);
    const auto before = cache.state();

    constexpr index_t readers = 3;
    std::vector<std::uint64_t> seen(at(readers));
    KeepPlan plan;
    Status planned;
    at_once(readers + 1, [&](index_t t) {
      if (t == readers)
        planned = policy.plan(std::as_const(cache).view(), work, plan);
      else
        seen[at(t)] = read_rows(std::as_const(cache).view(), 40);
    });
    require_ok(planned);
    REQUIRE(seen == std::vector<std::uint64_t>(at(readers), rows));
    REQUIRE((kept_of(plan) == alone));
    REQUIRE((cache.state() == before));

    feed(policy, cache, stream, 1);
    const auto appended = cache.state();
    check_error(compact(cache.view(), plan), StatusCode::stale_plan, {"40 tokens", "now 41"});
    REQUIRE((cache.state() == appended));
  });
}

TEST_CASE("[O2] [N2] appending moves no row: a view made before reads on meanwhile", "[O2][N2]") {
  Random random;
  CAPTURE(random.seed());
  for (const Layout layout : all_layouts) {
    CAPTURE(static_cast<int>(layout));
    TestCache<> cache(small_shape, 64, layout);
    Stream stream = small_stream(random);
    for (position_t p = 0; p < 30; ++p) cache.append(stream.next(p));
    const auto earlier = cache.view();
    const std::uint64_t rows = read_rows(earlier, 30);
    std::vector<Token> tokens;
    for (position_t p = 30; p < 60; ++p) tokens.push_back(stream.next(p));

    constexpr index_t readers = 2;
    std::vector<std::uint64_t> seen(at(readers));
    Status failed;
    at_once(readers + 1, [&](index_t t) {
      if (t < readers) {
        seen[at(t)] = read_rows(earlier, 30);
        return;
      }
      for (const Token& token : tokens)
        if (Status s = try_append(cache.view(), token); !s) failed = s;
    });
    require_ok(failed);
    REQUIRE(seen == std::vector<std::uint64_t>(at(readers), rows));
    REQUIRE(read_rows(cache.view(), 30) == rows);
    REQUIRE(cache.view().num_tokens() == 60);
  }
}
