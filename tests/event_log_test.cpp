// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

// What an event log says against what an observer from outside sees: scores asked for before each eviction, positions before
// and after it.

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "beaconkv/sequence/event_log.hpp"
#include "support/sequence_run.hpp"
#include "support/workers.hpp"

using namespace beaconkv;
using namespace beaconkv::test;

namespace {

/// One KV head before an eviction: position and score of each slot.
using HeadBefore = std::vector<LoggedToken>;

[[nodiscard]] bool same_tokens(const std::vector<LoggedToken>& a, const std::vector<LoggedToken>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const LoggedToken& x, const LoggedToken& y) {
    return x.position == y.position && x.score.has_value() == y.score.has_value() &&
           (!x.score || bits_of(*x.score) == bits_of(*y.score));
  });
}

[[nodiscard]] std::vector<position_t> positions_of(const std::vector<LoggedToken>& tokens) {
  std::vector<position_t> out;
  for (const LoggedToken& t : tokens) out.push_back(t.position);
  return out;
}

/// Everything but the time.
[[nodiscard]] bool same_event(const EvictionEvent& a, const EvictionEvent& b) {
  return a.step == b.step && a.layer == b.layer && a.bytes_freed == b.bytes_freed &&
         std::equal(a.heads.begin(), a.heads.end(), b.heads.begin(), b.heads.end(), [](const HeadEvent& x, const HeadEvent& y) {
           return same_tokens(x.evicted, y.evicted) && same_tokens(x.kept, y.kept) &&
                  std::equal(x.queries.begin(), x.queries.end(), y.queries.begin(), y.queries.end(),
                             [](const QueryOrigins& p, const QueryOrigins& q) {
                               return p.beacons == q.beacons && p.recent == q.recent;
                             });
         });
}
[[nodiscard]] bool same_events(const std::vector<EvictionEvent>& a, const std::vector<EvictionEvent>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), same_event);
}

/// Scores by a call of their own, and what competes by the policy's options: not the prefix of 2 and the newest `n_recent`.
template <class PolicyT, class CacheT>
[[nodiscard]] std::vector<HeadBefore> look(const PolicyT& policy, const CacheT& cache, index_t n_recent) {
  const index_t n = cache.num_tokens();
  Workspace work(policy.workspace_size(n));
  std::vector<float> scores(at(cache.num_kv_heads() * n));
  require_value(policy.score(cache, {scores.data(), cache.num_kv_heads(), n}, work));
  std::vector<HeadBefore> heads;
  for (index_t h = 0; h < cache.num_kv_heads(); ++h) {
    heads.emplace_back();
    for (index_t j = 0; j < n; ++j) {
      heads.back().push_back({cache.position(h, j), {}});
      if (cache.position(h, j) >= 2 && j < n - n_recent) heads.back().back().score = scores[at(h * n + j)];
    }
  }
  return heads;
}

/// The event is `before`, split by what the cache holds now.
template <class CacheT>
void check_heads(const EvictionEvent& event, const std::vector<HeadBefore>& before, const CacheT& cache) {
  REQUIRE(event.heads.size() == before.size());
  index_t evicted = 0;
  for (std::size_t h = 0; h < before.size(); ++h) {
    CAPTURE(h);
    HeadBefore kept, gone;
    for (const LoggedToken& token : before[h]) {
      bool stays = false;
      for (index_t j = 0; j < cache.num_tokens(); ++j)
        stays = stays || cache.position(static_cast<index_t>(h), j) == token.position;
      (stays ? kept : gone).push_back(token);
    }
    REQUIRE_FALSE(gone.empty());
    REQUIRE(same_tokens(event.heads[h].kept, kept));
    REQUIRE(same_tokens(event.heads[h].evicted, gone));
    evicted += static_cast<index_t>(gone.size());
  }
  REQUIRE(event.bytes_freed == evicted * 2 * 16 * static_cast<index_t>(sizeof(float)));
}

[[nodiscard]] std::vector<position_t> range_of(position_t first, position_t last) {
  std::vector<position_t> out;
  for (; first < last; ++first) out.push_back(first);
  return out;
}

}  // namespace

TEST_CASE("the log of a sequence holds each eviction with scores, positions, step and bytes", "[event_log]") {
  Random random;
  CAPTURE(random.seed());
  for_each_policy([&](const char* name, auto policy) {
    INFO(name);
    const index_t n_recent = std::string_view(name) == "RecentWindow" ? 0 : 4;
    constexpr index_t layers = 3;
    for (const index_t layers_per_step : {0, 1}) {
      Layers<decltype(policy)> s(policy, layers, {.sequence = {.layers_per_step = layers_per_step}});
      EventLog log;
      s->set_event_log(&log);
      LayerStreams streams(random, layers);
      prefill(*s, streams.next(0, 10));
      index_t seen = 0;
      for (position_t p = 10; p < 120; ++p) {
        std::vector<std::vector<HeadBefore>> before;
        decode(*s, streams.next(p));
        for (index_t l = 0; l < layers; ++l) before.push_back(look(s->policy(l), s->cache(l), n_recent));
        const SequenceReport report = evict_due(*s);
        const std::vector<EvictionEvent> events = log.take();
        REQUIRE(static_cast<index_t>(events.size()) == (report.evicted > 0 ? report.layers : 0));
        for (const EvictionEvent& event : events) {
          CAPTURE(p, event.layer);
          REQUIRE(event.step == p);
          REQUIRE(event.seconds > 0);
          REQUIRE(event.seconds < 10);
          check_heads(event, before[at(event.layer)], s->cache(event.layer));
          ++seen;
        }
        for (std::size_t i = 1; i < events.size(); ++i) REQUIRE(events[i - 1].layer < events[i].layer);
      }
      REQUIRE(seen > 3 * layers);
    }
  });
}

TEST_CASE("the log says where the queries came from, of each query head", "[event_log]") {
  Random random;
  CAPTURE(random.seed());
  const BeaconKV<> policy = small_beaconkv();
  const index_t n_beacon = policy.observer().max_rows() - 3;
  Layers<BeaconKV<>> s(policy, 1);
  EventLog log;
  s->set_event_log(&log);
  LayerStreams streams(random, 1);
  prefill(*s, streams.next(0, 10));
  for (position_t p = 10; p < 150; ++p) {
    decode(*s, streams.next(p));
    static_cast<void>(evict_due(*s));
  }
  REQUIRE(log.events().size() > 5);
  std::vector<std::vector<position_t>> last(4);
  for (const EvictionEvent& event : log.events()) {
    CAPTURE(event.step);
    REQUIRE(event.heads.size() == 2);
    for (std::size_t h = 0; h < 2; ++h) {
      REQUIRE(event.heads[h].queries.size() == 2);
      for (std::size_t q = 0; q < 2; ++q) {
        const auto& [beacons, recent] = event.heads[h].queries[q];
        REQUIRE(recent == range_of(event.step - 2, event.step + 1));
        REQUIRE(static_cast<index_t>(beacons.size()) == n_beacon);
        REQUIRE(std::is_sorted(beacons.begin(), beacons.end()));
        REQUIRE(std::adjacent_find(beacons.begin(), beacons.end()) == beacons.end());
        REQUIRE(beacons.back() < recent.front());
        last[2 * h + q] = beacons;
      }
    }
  }
  REQUIRE((last[0] != last[1] || last[1] != last[2]));  // heads sample for themselves
  // After an eviction the pool is what was scored with: the log must agree with the policy itself.
  Layers<BeaconKV<>> again(policy, 1);
  EventLog first;
  again->set_event_log(&first);
  prefill(*again, streams.next(0, 10));
  for (position_t p = 10; first.events().empty(); ++p) {
    decode(*again, streams.next(p));
    static_cast<void>(evict_due(*again));
  }
  const BeaconQueries& observer = again->policy(0).observer();
  for (index_t q = 0; q < 4; ++q) {
    std::vector<position_t> pool;
    for (index_t i = 0; i < observer.pool_size(); ++i) pool.push_back(observer.pool_position(q, i));
    REQUIRE(first.events()[0].heads[at(q / 2)].queries[at(q % 2)].beacons == pool);
  }
}

TEST_CASE("policies without beacons log their recent queries, and those without queries none", "[event_log]") {
  Random random;
  CAPTURE(random.seed());
  const auto run = [&](auto policy) {
    Layers<decltype(policy)> s(policy, 1);
    EventLog log;
    s->set_event_log(&log);
    LayerStreams streams(random, 1);
    run_conversation(*s, streams, 10, 60);
    REQUIRE(log.events().size() > 1);
    return log.take().back();
  };
  const EvictionEvent snapkv = run(small_snapkv());
  REQUIRE(snapkv.heads[1].queries[0].recent == range_of(snapkv.step - 4, snapkv.step + 1));
  REQUIRE(snapkv.heads[1].queries[0].beacons.empty());
  const EvictionEvent window = run(small_recent_window());
  REQUIRE(window.heads[1].queries[1].recent.empty());
  const EvictionEvent rpc = run(RPC<>(
      small_shape, {.budget = {.period = 8, .ratio = 4}, .n_recent_queries = 4, .n_recent_kv = 4, .newest_query_twice = true},
      small_rope()));
  std::vector<position_t> twice = range_of(rpc.step - 2, rpc.step + 1);
  twice.push_back(rpc.step);
  REQUIRE(rpc.heads[0].queries[0].recent == twice);
}

TEST_CASE("queries that an eviction uses up are logged, too", "[event_log]") {
  Random random;
  CAPTURE(random.seed());
  H2O<> policy(small_shape, {.budget = {.max = 32, .min = 16}, .n_recent_kv = 4}, small_rope());
  TestCache<> cache(small_shape, 40);
  Stream stream = small_stream(random);
  for (position_t p = 0; p < 32; ++p) feed(policy, cache, stream.next(p));
  Workspace work(policy.workspace_size(40));
  EventLog log;
  require_value(evict(policy, cache.view(), work, log));
  REQUIRE(log.events().size() == 1);
  for (const QueryOrigins& origins : log.events()[0].heads[0].queries) REQUIRE(origins.recent.size() == 32);
}

TEST_CASE("an eviction in slices is logged with the scores and queries of its first moment", "[event_log]") {
  Random random;
  CAPTURE(random.seed());
  Layers<BeaconKV<>> s(small_beaconkv(), 2, {.capacity = 96, .sequence = {.heads_per_step = 1}});
  EventLog log;
  s->set_event_log(&log);
  LayerStreams streams(random, 2);
  prefill(*s, streams.next(0, 10));
  std::optional<index_t> in_progress;
  std::vector<HeadBefore> before;
  position_t began = 0;
  index_t next = 0, seen = 0;
  for (position_t p = 10; p < 150; ++p) {
    decode(*s, streams.next(p));
    for (index_t i = 0; i < 2 && !in_progress; ++i)
      if (const index_t l = (next + i) % 2; s->cache(l).num_tokens() >= small_budget + 8) {
        in_progress = l;
        began = p;
        before = look(s->policy(l), s->cache(l), 4);
      }
    if (in_progress && began < p)  // came since: stays, unscored
      for (std::size_t h = 0; h < 2; ++h) before[h].push_back({p, {}});
    static_cast<void>(evict_due(*s));
    const std::vector<EvictionEvent> events = log.take();
    if (events.empty()) continue;
    CAPTURE(p, began);
    REQUIRE(events.size() == 1);
    REQUIRE(in_progress);
    REQUIRE(events[0].layer == *in_progress);
    REQUIRE(events[0].step == p);
    REQUIRE(p == began + 2);  // two heads, and the moves
    check_heads(events[0], before, s->cache(*in_progress));
    REQUIRE(events[0].heads[0].queries[1].recent == range_of(began - 2, began + 1));
    REQUIRE(events[0].heads[0].queries[1].beacons.back() < began - 2);
    next = (*in_progress + 1) % 2;
    in_progress.reset();
    ++seen;
  }
  REQUIRE(seen > 6);
}

TEST_CASE("the log does not depend on threads, and what is evicted does not depend on the log", "[event_log][threads]") {
  Random random;
  CAPTURE(random.seed());
  constexpr index_t layers = 3;
  const auto run = [&](const auto& executor, EventLog* log) {
    Random same(random.seed());
    LayerStreams streams(same, layers);
    Layers<BeaconKV<>> s(small_beaconkv(), layers, {.sequence = {.workers = executor.num_workers()}});
    s->set_event_log(log);
    prefill(*s, streams.next(0, 10));
    for (position_t p = 10; p < 100; ++p) {
      decode(*s, streams.next(p));
      require_value(s->evict_where_due(executor));
    }
    return state_of(*s);
  };
  EventLog serial, few, many;
  const Bytes state = run(SerialExecutor{}, &serial);
  REQUIRE(serial.events().size() > 9);
  REQUIRE(run(SerialExecutor{}, nullptr) == state);
  REQUIRE(run(Workers{2}, &few) == state);   // layers over threads
  REQUIRE(run(Workers{5}, &many) == state);  // heads over threads
  REQUIRE(same_events(few.events(), serial.events()));
  REQUIRE(same_events(many.events(), serial.events()));
}

TEST_CASE("layers that keep one set are logged each, with the shared scores", "[event_log]") {
  Random random;
  CAPTURE(random.seed());
  constexpr index_t layers = 2;
  Layers<BeaconKV<>, float, float, Granularity::per_sequence> s(small_beaconkv(), layers);
  EventLog log;
  s->set_event_log(&log);
  LayerStreams streams(random, layers);
  prefill(*s, streams.next(0, 10));
  index_t seen = 0;
  for (position_t p = 10; p < 100; ++p) {
    decode(*s, streams.next(p));
    // By hand: the mean over the heads of each layer, then over layers.
    const index_t n = s->cache(0).num_tokens();
    std::vector<double> shared(at(n));
    for (index_t l = 0; l < layers; ++l) {
      Workspace work(s->policy(l).workspace_size(n));
      std::vector<float> scores(at(2 * n));
      require_value(s->policy(l).score(s->cache(l), {scores.data(), 2, n}, work));
      for (index_t j = 0; j < 2 * n; ++j) shared[at(j % n)] += static_cast<double>(scores[at(j)]) / (2 * layers);
    }
    std::vector<position_t> before;
    for (index_t j = 0; j < n; ++j) before.push_back(s->cache(0).position(0, j));
    static_cast<void>(evict_due(*s));
    const std::vector<EvictionEvent> events = log.take();
    if (events.empty()) continue;
    REQUIRE(events.size() == layers);
    ++seen;
    for (index_t l = 0; l < layers; ++l) {
      const EvictionEvent& event = events[at(l)];
      REQUIRE(event.layer == l);
      REQUIRE(event.step == p);
      REQUIRE(event.seconds > 0);
      REQUIRE(event.seconds == events[0].seconds);
      REQUIRE(event.bytes_freed == (n - small_budget) * s->cache(l).bytes_per_token());
      REQUIRE(event.heads.size() == 2);
      for (const HeadEvent& head : event.heads) {
        REQUIRE(positions_of(head.kept) == [&] {
          std::vector<position_t> now;
          for (index_t j = 0; j < s->cache(l).num_tokens(); ++j) now.push_back(s->cache(l).position(0, j));
          return now;
        }());
        REQUIRE(head.queries.size() == 2);
        REQUIRE(head.queries[0].recent == range_of(p - 2, p + 1));
        for (const auto* tokens : {&head.evicted, &head.kept})
          for (const LoggedToken& token : *tokens) {
            const auto j = std::find(before.begin(), before.end(), token.position) - before.begin();
            const bool competes = token.position >= 2 && j < n - 4;
            REQUIRE(token.score.has_value() == competes);
            if (competes) REQUIRE(std::abs(static_cast<double>(*token.score) - shared[at(j)]) < 1e-6);
          }
      }
    }
  }
  REQUIRE(seen > 5);
}

TEST_CASE("protected ranges have no score, whole units have the scores of their tokens", "[event_log]") {
  Random random;
  CAPTURE(random.seed());
  Layers<BeaconKV<>> s(small_beaconkv(), 1);
  EventLog log;
  s->set_event_log(&log);
  require_ok(s->policy(0).protect({12, 15}));
  LayerStreams streams(random, 1);
  run_conversation(*s, streams, 10, 40);
  REQUIRE(log.events().size() > 1);
  for (const EvictionEvent& event : log.events())
    for (const HeadEvent& head : event.heads)
      for (const LoggedToken& token : head.kept)
        if (token.position >= 12 && token.position < 15) REQUIRE_FALSE(token.score);

  Layers<BeaconKV<>, float, float, Granularity::per_layer> units(small_beaconkv(), 1);
  EventLog of_units;
  units->set_event_log(&of_units);
  for (position_t b = 4; b < 200; b += 4) require_ok(units->policy(0).add_boundary(b));
  run_conversation(*units, streams, 10, 60);
  REQUIRE(of_units.events().size() > 1);
  for (const EvictionEvent& event : of_units.events()) {
    REQUIRE(same_tokens(event.heads[0].evicted, event.heads[1].evicted));
    REQUIRE(event.heads[0].evicted.size() % 4 == 0);
    for (const LoggedToken& token : event.heads[0].evicted) REQUIRE(token.score);
  }
}

TEST_CASE("a copy and a fork have no log, an assignment keeps it", "[event_log]") {
  Random random;
  CAPTURE(random.seed());
  Layers<BeaconKV<>> s(small_beaconkv(), 1), fork(small_beaconkv(), 1);
  EventLog log;
  s->set_event_log(&log);
  LayerStreams streams(random, 1);
  run_conversation(*s, streams, 10, 40);
  const std::size_t so_far = log.events().size();
  REQUIRE(so_far > 0);
  require_ok(fork->copy_from(*s));
  run_conversation(*fork, streams, 0, 40);
  REQUIRE(log.events().size() == so_far);
  {
    Sequence<BeaconKV<>, PlaneCache<float>> copy = *s;  // over the same memory
    run_conversation(copy, streams, 0, 40);
    REQUIRE(log.events().size() == so_far);
    *s = copy;
  }
  run_conversation(*s, streams, 0, 40);
  REQUIRE(log.events().size() > so_far);
  const std::size_t all = log.events().size();
  s->set_event_log(nullptr);
  run_conversation(*s, streams, 0, 40);
  REQUIRE(log.events().size() == all);
}

TEST_CASE("a slice that was begun before there was a log has no origins, and nobody else's", "[event_log]") {
  Random random;
  CAPTURE(random.seed());
  Layers<BeaconKV<>> a(small_beaconkv(), 1, {.capacity = 96, .sequence = {.heads_per_step = 1}});
  Layers<BeaconKV<>> b(small_beaconkv(), 1, {.capacity = 96, .sequence = {.heads_per_step = 1}});
  EventLog log;
  b->set_event_log(&log);
  LayerStreams streams(random, 1);
  for (position_t p = 0; p < small_budget + 8; ++p) decode(*a, streams.next(p));
  for (position_t p = 0; p < small_budget + 8; ++p) decode(*b, streams.next(p));
  static_cast<void>(evict_due(*a));  // both have begun
  static_cast<void>(evict_due(*b));
  require_ok(b->copy_from(*a));
  static_cast<void>(evict_due(*b));
  static_cast<void>(evict_due(*b));
  REQUIRE(log.events().size() == 1);
  REQUIRE(log.events()[0].heads[0].queries.empty());
  REQUIRE(log.events()[0].heads[0].evicted.size() > 0);
}

TEST_CASE("an evict of a single policy is logged; one that does nothing, or is refused, is not", "[event_log]") {
  Random random;
  CAPTURE(random.seed());
  BeaconKV<> policy = small_beaconkv();
  TestCache<float> cache(small_shape, 64);
  Workspace work(policy.workspace_size(64));
  Stream stream = small_stream(random);
  EventLog log;
  feed(policy, cache, stream, 20);
  REQUIRE(require_value(evict(policy, cache.view(), work, log)).evicted == 0);
  REQUIRE(log.events().empty());
  feed(policy, cache, stream, 12);
  const std::vector<HeadBefore> before = look(policy, cache.view(), 4);
  Workspace small(WorkspaceSize{64, 1, 1});
  REQUIRE_FALSE(evict(policy, cache.view(), small, log).ok());
  REQUIRE(log.events().empty());
  REQUIRE_FALSE(small.plan().records_scores());
  REQUIRE(require_value(evict(policy, cache.view(), work, log, 7)).evicted == 8);
  REQUIRE(log.events().size() == 1);
  REQUIRE(log.events()[0].layer == 7);
  REQUIRE(log.events()[0].step == 31);
  check_heads(log.events()[0], before, cache.view());
  REQUIRE_FALSE(work.plan().records_scores());
}

TEST_CASE("without a log nothing is recorded and nothing allocates, even after there was one", "[event_log][allocation]") {
  Random random;
  CAPTURE(random.seed());
  Layers<BeaconKV<>> s(small_beaconkv(), 2);
  EventLog log;
  s->set_event_log(&log);
  LayerStreams streams(random, 2);
  run_conversation(*s, streams, 10, 40);
  REQUIRE(log.events().size() > 1);
  s->set_event_log(nullptr);
  const std::vector<LayerTokens> tokens = streams.next(s->next_position(), 100);
  bool failed = false;
  index_t evictions = 0;
  const std::int64_t allocations = allocations_of([&] {
    for (const LayerTokens& token : tokens) {
      for (index_t l = 0; l < 2; ++l)
        failed = failed || !try_append(*s, l, token[at(l)]).ok() ||
                 !s->policy(l).observe(token[at(l)].queries, token[at(l)].position).ok();
      const Result<SequenceReport> report = s->evict_where_due();
      failed = failed || !report;
      evictions += report ? report->layers : 0;
    }
  });
  REQUIRE_FALSE(failed);
  REQUIRE(evictions > 10);
  REQUIRE(allocations == 0);
  REQUIRE(s->workspace().plan().slot_scores(0).empty());
}
