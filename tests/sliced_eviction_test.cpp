// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

// Evictions whose work is spread: over threads, and over decode steps.

#include <algorithm>
#include <vector>

#include "support/counting_allocator.hpp"
#include "support/sequence_run.hpp"
#include "support/workers.hpp"

using namespace beaconkv;
using namespace beaconkv::test;

namespace {

/// A policy that scores head by head, over four KV heads.
[[nodiscard]] BeaconKV<> wide_beaconkv() {
  return BeaconKV<>({.query_heads = 8, .kv_heads = 4, .head_dim = 16},
                    {.budget = {.max = small_budget + 8, .min = small_budget, .counts_prefix = true},
                     .n_beacon = 4,
                     .n_recent_queries = 3,
                     .n_recent_kv = 4,
                     .n_prefix = 2},
                    small_rope());
}

/// The slots that an eviction keeps which scored `cache` now, once `later` more tokens have come: by a plain sort.
template <class PolicyT, class CacheT>
std::vector<std::vector<position_t>> expected_positions(const PolicyT& policy, const CacheT& cache, index_t later) {
  Workspace work(policy.workspace_size(cache.capacity()));
  const index_t n = cache.num_tokens();
  const index_t heads = cache.num_kv_heads();
  std::vector<float> scores(static_cast<std::size_t>(heads * n));
  require_value(policy.score(cache, {scores.data(), heads, n}, work));
  std::vector<std::vector<position_t>> kept;
  for (index_t h = 0; h < heads; ++h) {
    const Range candidates = policy.candidates_of(cache, h);
    std::vector<index_t> order;
    for (index_t j = candidates.first; j < candidates.last; ++j) order.push_back(j);
    const auto score = [&](index_t j) { return scores[static_cast<std::size_t>(h * n + j)]; };
    std::stable_sort(order.begin(), order.end(), [&](index_t a, index_t b) { return score(a) > score(b); });
    order.resize(static_cast<std::size_t>(small_budget - later - (n - candidates.size())));
    for (index_t j = 0; j < n; ++j)
      if (j < candidates.first || j >= candidates.last) order.push_back(j);
    kept.emplace_back();
    for (const index_t j : order) kept.back().push_back(cache.position(h, j));
    std::sort(kept.back().begin(), kept.back().end());
  }
  return kept;
}

}  // namespace

TEST_CASE("[O1] an eviction in slices keeps what the scores of its first moment say, and all that came later", "[O1]") {
  Random random;
  CAPTURE(random.seed());
  const Shape shape{.query_heads = 8, .kv_heads = 4, .head_dim = 16};
  for (const index_t heads : {1, 2, 3, 4, 9}) {
    const index_t slices = (4 + heads - 1) / heads;  // and one more call
    const index_t layers = 3;
    Layers<BeaconKV<>> s(wide_beaconkv(), layers, {.capacity = 96, .sequence = {.heads_per_step = heads}});
    LayerStreams streams(random, layers, shape);
    std::vector<std::vector<position_t>> expected;
    std::vector<index_t> evictions(static_cast<std::size_t>(layers));
    index_t in_progress = -1;
    index_t calls = 0;
    index_t next = 0;
    for (position_t p = 0; p < 250; ++p) {
      decode(*s, streams.next(p));
      for (index_t i = 0; i < layers && in_progress < 0; ++i) {
        const index_t l = (next + i) % layers;
        if (s->cache(l).num_tokens() < small_budget + 8) continue;  // due before, or now
        in_progress = l;
        calls = 0;
        expected = expected_positions(s->policy(l), s->cache(l), slices);
      }
      std::vector<index_t> before;
      for (index_t l = 0; l < layers; ++l) before.push_back(s->cache(l).num_tokens());
      const SequenceReport report = evict_due(*s);
      ++calls;
      CAPTURE(heads, p, in_progress, calls);
      const bool last = in_progress >= 0 && calls == slices + 1;
      REQUIRE(report.layers == (last ? 1 : 0));
      for (index_t l = 0; l < layers; ++l)
        if (!last || l != in_progress) REQUIRE(s->cache(l).num_tokens() == before[at(l)]);
      if (!last) continue;
      for (position_t later = p - slices + 1; later <= p; ++later)
        for (auto& kept : expected) kept.push_back(later);
      for (index_t h = 0; h < shape.kv_heads; ++h) {
        std::vector<position_t> kept;
        for (index_t j = 0; j < s->cache(in_progress).num_tokens(); ++j) kept.push_back(s->cache(in_progress).position(h, j));
        REQUIRE(kept == expected[at(h)]);
      }
      ++evictions[at(in_progress)];
      next = (in_progress + 1) % layers;
      in_progress = -1;
    }
    const auto [least, most] = std::minmax_element(evictions.begin(), evictions.end());
    REQUIRE(*least >= 5);
    REQUIRE(*most - *least <= 1);
  }
}

TEST_CASE("Slices give the same bits on any number of threads, and forks go on in the middle of one") {
  Random random;
  CAPTURE(random.seed());
  const Shape shape{.query_heads = 8, .kv_heads = 4, .head_dim = 16};
  const auto make = [&](index_t workers) {
    return Layers<BeaconKV<>>(wide_beaconkv(), 2, {.capacity = 96, .sequence = {.workers = workers, .heads_per_step = 2}});
  };
  auto serial = make(1);
  auto two = make(2);
  auto three = make(3);
  auto fork = make(1);
  LayerStreams streams(random, 2, shape);
  for (position_t p = 0; p < 160; ++p) {
    const LayerTokens tokens = streams.next(p);
    for (auto* s : {&serial, &two, &three}) decode(**s, tokens);
    if (p > 100) decode(*fork, tokens);
    static_cast<void>(evict_due(*serial));
    require_value(two->evict_where_due(Workers{2}));
    require_value(three->evict_where_due(Workers{3}));
    if (p > 100) static_cast<void>(evict_due(*fork));
    if (p >= 90 && p <= 100) {  // at every point of a cycle; the last one goes on
      require_ok(fork->copy_from(*serial));
      REQUIRE((state_of(*fork) == state_of(*serial)));
    }
    const Bytes state = state_of(*serial);
    REQUIRE((state_of(*two) == state));
    REQUIRE((state_of(*three) == state));
    if (p > 100) REQUIRE((state_of(*fork) == state));
  }
}

TEST_CASE("A slice whose cache was evicted, loaded or pinned meanwhile does no harm") {
  Random random;
  CAPTURE(random.seed());
  const Shape shape{.query_heads = 8, .kv_heads = 4, .head_dim = 16};
  const LayersOptions options{.capacity = 96, .sequence = {.heads_per_step = 1}};
  Layers<BeaconKV<>> s(wide_beaconkv(), 1, options);
  LayerStreams streams(random, 1, shape);
  position_t p = 0;
  const auto until_begun = [&] {
    while (s->cache(0).num_tokens() < small_budget + 8) decode(*s, streams.next(p++));
    for (index_t i = 0; i < 2; ++i) REQUIRE(evict_due(*s).layers == 0);
  };
  const auto calls_until_done = [&] {
    index_t calls = 1;
    while (evict_due(*s).layers == 0) REQUIRE(++calls < 20);
    return calls;
  };
  until_begun();
  REQUIRE(calls_until_done() == 3);
  REQUIRE(s->cache(0).num_tokens() == small_budget);

  until_begun();  // by hand
  require_value(evict(s->policy(0), s->cache(0), s->workspace()));
  REQUIRE(s->cache(0).num_tokens() == small_budget);
  REQUIRE(calls_until_done() == 5);  // begins anew, and finds nothing to do
  REQUIRE(s->cache(0).num_tokens() == small_budget);

  until_begun();  // taken back by hand
  REQUIRE(require_value(s->cache(0).rollback(3)) == 3);
  REQUIRE(calls_until_done() == 5);
  REQUIRE(s->cache(0).num_tokens() == small_budget);

  until_begun();  // saved and loaded
  Layers<BeaconKV<>> loaded(wide_beaconkv(), 1, options);
  require_ok(loaded->load(state_of(*s)));
  require_ok(s->load(state_of(*s)));
  REQUIRE(calls_until_done() == 5);
  for (index_t i = 0; i < 5; ++i) static_cast<void>(evict_due(*loaded));
  REQUIRE((state_of(*loaded) == state_of(*s)));

  until_begun();  // pinned
  std::vector<position_t> first;
  for (index_t j = 0; j < 10; ++j) first.push_back(s->cache(0).position(0, j));
  require_ok(s->cache(0).set_pinned_prefix(10));
  static_cast<void>(calls_until_done());
  for (index_t j = 0; j < 10; ++j) REQUIRE(s->cache(0).position(0, j) == first[at(j)]);
  require_ok(s->cache(0).set_pinned_prefix(0));

  until_begun();  // switched off
  s->policy(0).set_eviction(false);
  for (index_t i = 0; i < 10; ++i) REQUIRE(evict_due(*s).layers == 0);
  s->policy(0).set_eviction(true);
  REQUIRE(calls_until_done() == 5);
}

TEST_CASE("Slices evict where tokens that come meanwhile leave no room in the budget") {
  Random random;
  CAPTURE(random.seed());
  const Shape shape{.query_heads = 8, .kv_heads = 4, .head_dim = 16};
  const BeaconKV<> policy(
      shape, {.budget = {.max = 24, .min = 20}, .n_beacon = 4, .n_recent_queries = 3, .n_recent_kv = 17, .n_prefix = 0},
      small_rope());
  Layers<BeaconKV<>> s(policy, 1, {.capacity = 48, .sequence = {.heads_per_step = 1}});
  LayerStreams streams(random, 1, shape);
  index_t evictions = 0;
  for (position_t p = 0; p < 200; ++p) {
    decode(*s, streams.next(p));
    evictions += evict_due(*s).layers;
    REQUIRE(s->cache(0).num_tokens() < 36);
  }
  REQUIRE(evictions > 10);
}

TEST_CASE("Slices refuse what scoring refuses, and begin anew where RoPE changes") {
  Random random;
  CAPTURE(random.seed());
  const Shape shape{.query_heads = 8, .kv_heads = 4, .head_dim = 16};
  LayerStreams streams(random, 1, shape);
  const auto fill = [&](auto& s) {
    for (position_t p = 0; p < small_budget + 8; ++p) decode(s, streams.next(p));
  };
  Layers<BeaconKV<>> unrotated(wide_beaconkv(), 1,
                               {.capacity = 64, .mode = PositionMode::unrotated_keys, .sequence = {.heads_per_step = 1}});
  fill(*unrotated);
  check_error(unrotated->evict_where_due().status(), StatusCode::unsupported, {"not rotated"});
  REQUIRE(unrotated->cache(0).num_tokens() == small_budget + 8);

  Layers<BeaconKV<>> s(wide_beaconkv(), 1, {.capacity = 64, .sequence = {.heads_per_step = 1}});
  fill(*s);
  for (index_t i = 0; i < 2; ++i) REQUIRE(evict_due(*s).layers == 0);
  const RopeTable longer({.head_dim = 16, .theta = 500000});
  require_ok(switch_rope(s->cache(0), *s->policy(0).rope(), longer, s->workspace()));
  require_ok(s->policy(0).set_rope(longer));
  const std::vector<std::vector<position_t>> expected = expected_positions(s->policy(0), s->cache(0), 0);
  index_t calls = 1;
  while (evict_due(*s).layers == 0) REQUIRE(++calls < 20);
  REQUIRE(calls == 5);
  for (index_t h = 0; h < shape.kv_heads; ++h)
    for (index_t j = 0; j < s->cache(0).num_tokens(); ++j) REQUIRE(s->cache(0).position(h, j) == expected[at(h)][at(j)]);
}

TEST_CASE("Slices are refused by name where scores are formed together") {
  using Sliced = Sequence<BeaconKV<>, PlaneCache<float>>;
  OwningCache<float> cache(small_shape, 64);
  const auto refused = [&](const SequenceOptions& options) {
    return Sliced::make({small_beaconkv()}, {cache.view()}, options).status();
  };
  check_invalid(refused({.capacity = 64, .heads_per_step = -1}), {"heads_per_step = -1"});
  check_invalid(refused({.capacity = 64, .layers_per_step = 2, .heads_per_step = 1}),
                {"layers_per_step = 2", "heads_per_step"});
  REQUIRE(refused({.capacity = 64, .layers_per_step = 1, .heads_per_step = 1}).ok());
  const RPC<> over_all_heads = small_growing_rpc();
  REQUIRE_FALSE(over_all_heads.scores_by_head());
  check_error(Sequence<RPC<>, PlaneCache<float>>::make({over_all_heads}, {cache.view()}, {.capacity = 64, .heads_per_step = 1})
                  .status(),
              StatusCode::unsupported, {"heads_per_step = 1", "together"});
}

TEST_CASE("Slices of a cache that outgrew the sequence's capacity are refused by name") {
  Random random;
  CAPTURE(random.seed());
  const Shape shape{.query_heads = 8, .kv_heads = 4, .head_dim = 16};
  Layers<BeaconKV<>> s(wide_beaconkv(), 1, {.capacity = 96, .sequence = {.heads_per_step = 1}});
  Layers<BeaconKV<>> memory(wide_beaconkv(), 1, {.capacity = 96});
  auto small = require_value(
      Layers<BeaconKV<>>::Type::make({memory->policy(0)}, {memory->cache(0)}, {.capacity = small_budget, .heads_per_step = 1}));
  LayerStreams streams(random, 1, shape);
  for (position_t p = 0; s->cache(0).num_tokens() < small_budget + 8; ++p) decode(*s, streams.next(p));
  for (int begun = 0; begun < 2; ++begun) {  // what is copied has no scores, then those of one slice
    CAPTURE(begun);
    require_ok(small.copy_from(*s));
    const Result<SequenceReport> report = small.evict_where_due();
    REQUIRE_FALSE(report.ok());
    REQUIRE(report.status().code() == StatusCode::out_of_capacity);
    REQUIRE(small.cache(0).num_tokens() == small_budget + 8);
    REQUIRE(evict_due(*s).layers == 0);
  }
}

TEST_CASE("Slices allocate nothing", "[allocation]") {
  Random random;
  Layers<BeaconKV<>> s(wide_beaconkv(), 2, {.capacity = 96, .sequence = {.heads_per_step = 1}});
  Layers<BeaconKV<>> fork(wide_beaconkv(), 2, {.capacity = 96, .sequence = {.heads_per_step = 1}});
  LayerStreams streams(random, 2, {.query_heads = 8, .kv_heads = 4, .head_dim = 16});
  const std::vector<LayerTokens> tokens = streams.next(0, 120);
  index_t evictions = 0;
  const AllocationCounter counter;
  for (const LayerTokens& token : tokens) {
    for (index_t l = 0; l < 2; ++l) {
      if (!try_append(*s, l, token[at(l)])) std::abort();
      if (!s->policy(l).observe(token[at(l)].queries, token[at(l)].position)) std::abort();
    }
    const Result<SequenceReport> report = s->evict_where_due();
    evictions += report ? report->layers : 1000;
    if (!fork->copy_from(*s)) std::abort();
  }
  const std::int64_t allocations = counter.count();
  REQUIRE(allocations == 0);
  REQUIRE(evictions > 5);
  REQUIRE(evictions < 100);
}

TEST_CASE("Heads over threads: the same plan, the same bits, for every policy and kind of cache") {
  Random random;
  CAPTURE(random.seed());
  for_each_policy([&](const char* name, const auto& policy) {
    const auto run = [&](auto granularity) {
      constexpr Granularity G = decltype(granularity)::value;
      auto one = policy;
      auto other = policy;
      if (G == Granularity::per_head_ragged && !one.scores_by_head()) return;
      OwningCache<float, float, G> memory(small_shape, 64);
      OwningCache<float, float, G> other_memory(small_shape, 64);
      Workspace work(one.workspace_size(64));
      std::vector<Workspace> works(3, work);
      Stream stream = small_stream(random);
      for (position_t p = 0; p < 120; ++p) {
        const Token token = stream.next(p);
        require_ok(memory.append(token.keys, token.values, p));
        require_ok(other_memory.append(token.keys, token.values, p));
        require_ok(one.observe(token.queries, p));
        require_ok(other.observe(token.queries, p));
        if (!one.due(memory.view())) continue;
        const EvictionReport a = require_value(evict(one, memory.view(), work));
        const EvictionReport b = require_value(evict(other, other_memory.view(), works, Workers{random.integer(1, 3)}));
        CAPTURE(name, static_cast<int>(G), p);
        REQUIRE(a.evicted == b.evicted);
        REQUIRE(a.kept == b.kept);
        for (index_t h = 0; h < work.plan().sets(); ++h) {
          REQUIRE(std::ranges::equal(work.plan().kept(h), works[0].plan().kept(h)));
          for (std::size_t i = 0; i < work.plan().kept(h).size(); ++i)
            REQUIRE(bits_of(work.plan().kept_scores(h)[i]) == bits_of(works[0].plan().kept_scores(h)[i]));
        }
        for (index_t h = 0; h < small_shape.kv_heads; ++h)
          for (index_t j = 0; j < detail::tokens_of(memory.view(), h); ++j) {
            REQUIRE(memory.view().position(h, j) == other_memory.view().position(h, j));
            REQUIRE(*memory.view().key_plane().row(h, j) == *other_memory.view().key_plane().row(h, j));
            REQUIRE(*memory.view().value_plane().row(h, j) == *other_memory.view().value_plane().row(h, j));
          }
      }
    };
    run(std::integral_constant<Granularity, Granularity::per_head>{});
    run(std::integral_constant<Granularity, Granularity::per_layer>{});
    run(std::integral_constant<Granularity, Granularity::per_head_ragged>{});
  });

  BeaconKV<> policy = small_beaconkv();
  OwningCache<float> memory(small_shape, 64);
  std::vector<Workspace> none;
  check_invalid(evict(policy, memory.view(), none, SerialExecutor{}).status(), {"works is empty"});
}
