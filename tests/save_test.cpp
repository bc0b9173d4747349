// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

// Saved state goes on bit for bit, and bytes that are wrong in any way are refused with nothing changed.

#include <cstring>
#include <string>

#include "beaconkv/archive.hpp"
#include "support/sequence_run.hpp"

namespace {

using namespace beaconkv;
using namespace beaconkv::test;

template <class F>
void for_each_saved_policy(F&& f) {
  for_each_policy(f);
  f("RPC, growing", small_growing_rpc());
}

template <class PolicyT>
[[nodiscard]] Bytes saved(const PolicyT& policy) {
  Bytes out;
  policy.save(out);
  return out;
}

/// The payload in a frame of its own: checksum and length are right.
[[nodiscard]] Bytes framed(std::span<const std::byte> payload) {
  Bytes out;
  detail::save_framed(out, [&](StateWriter& w) { w.bytes(payload.data(), payload.size()); });
  return out;
}

[[nodiscard]] Bytes payload_of(const Bytes& state) { return {state.begin() + detail::saved_header_size, state.end()}; }

/// Calls `f(bytes)` with each byte changed (all of them, or every `stride`-th) and with each shorter length.
template <class F>
void for_each_damage(const Bytes& good, std::size_t stride, Random& random, F&& f) {
  for (std::size_t i = 0; i < good.size(); i += i < 64 ? 1 : stride) {
    Bytes bad = good;
    bad[i] ^= static_cast<std::byte>(random.integer(1, 255));
    f(bad);
  }
  for (std::size_t n = 0; n < good.size(); n += n < 64 ? 1 : stride)
    f(Bytes(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(n)));
  Bytes longer = good;
  longer.push_back(std::byte{0});
  f(longer);
}

/// Calls `f(bytes)` with numbers within the payload replaced by what no object holds, in a frame that is right.
template <class F>
void for_each_forgery(const Bytes& good, std::size_t stride, F&& f) {
  const Bytes payload = payload_of(good);
  constexpr std::int64_t numbers[] = {-1, 1 << 20, std::int64_t{1} << 40, std::numeric_limits<std::int64_t>::max(),
                                      std::numeric_limits<std::int64_t>::min()};
  for (std::size_t i = 0; i + 8 <= payload.size(); i += stride)
    for (const std::int64_t number : numbers) {
      Bytes bad = payload;
      std::memcpy(bad.data() + i, &number, sizeof(number));
      f(framed(bad));
    }
  for (std::size_t n = 0; n < payload.size(); n += stride) f(framed(std::span(payload).first(n)));
}

/// Everything that a policy can be asked, whatever it answers.
template <class PolicyT, class CacheT>
void exercise(PolicyT policy, CacheT cache, Workspace& work, const Token& token) {
  KeepPlan plan;
  static_cast<void>(policy.due(cache.view()));
  static_cast<void>(policy.plan_free(cache.view(), 3, work, plan));
  static_cast<void>(evict(policy, cache.view(), work));
  static_cast<void>(policy.observe(token.queries, policy.next_position()));
  static_cast<void>(evict(policy, cache.view(), work));
}

}  // namespace

TEST_CASE("a policy that was saved and loaded at any moment answers bit for bit like one that was not") {
  Random random;
  CAPTURE(random.seed());
  for_each_saved_policy([&](const char* name, const auto& made) {
    INFO(name);
    auto policy = made;
    require_ok(policy.protect({40, 41}));
    auto reloaded = policy;
    TestCache<> cache(small_shape, 96);
    TestCache<> other(small_shape, 96);
    Stream stream = small_stream(random);
    Workspace work(policy.workspace_size(96));
    index_t reloads = 0;
    const auto reload = [&] {
      auto fresh = made;
      require_ok(fresh.protect({1, 2}));  // replaced by what was saved
      require_ok(fresh.load(saved(reloaded)));
      REQUIRE((saved(fresh) == saved(policy)));
      reloaded = fresh;
      ++reloads;
    };
    reload();  // before the first token
    for (const index_t chunk : {7, 1, 20}) {
      std::vector<float> queries;
      const position_t first = policy.next_position();
      for (index_t i = 0; i < chunk; ++i) {
        const Token token = stream.next(first + i);
        cache.append(token);
        other.append(token);
        queries.insert(queries.end(), token.queries.begin(), token.queries.end());
      }
      const QueryView view = QueryView::token_major(queries.data(), chunk, 4, 16);
      require_ok(policy.prefill(view, work));
      require_ok(reloaded.prefill(view, work));
      reload();
      REQUIRE(answers_of(policy, cache, work) == answers_of(reloaded, other, work));
    }
    index_t evictions = 0;
    for (index_t i = 0; i < 70; ++i) {
      const bool due = policy.due(cache.view());
      REQUIRE(reloaded.due(other.view()) == due);
      if (due) {
        static_cast<void>(require_value(evict(policy, cache.view(), work)));
        static_cast<void>(require_value(evict(reloaded, other.view(), work)));
        ++evictions;
      }
      if (random.integer(0, 5) == 0) reload();
      REQUIRE(answers_of(policy, cache, work) == answers_of(reloaded, other, work));
      REQUIRE(cache.state().memory == other.state().memory);
      REQUIRE(cache.state().positions == other.state().positions);
      for (auto* p : {&policy, &reloaded}) p->set_eviction(i < 20 || i >= 27);
      const Token token = stream.next(policy.next_position());
      feed(policy, cache, token);
      feed(reloaded, other, token);
    }
    REQUIRE(evictions >= 2);
    REQUIRE(reloads > 6);
  });
}

TEST_CASE("protected ranges and boundaries survive") {
  Random random;
  CAPTURE(random.seed());
  for_each_policy([&](const char* name, const auto& made) {
    INFO(name);
    auto policy = made;
    TestCache<float, float, Granularity::per_layer> cache(small_shape, 64);
    Stream stream = small_stream(random);
    feed(policy, cache, stream, 40);
    for (const position_t b : {4, 9, 15, 22, 30, 33}) require_ok(policy.add_boundary(b));
    require_ok(policy.protect({16, 18}));
    require_ok(policy.protect({10, 11}));
    auto loaded = made;
    require_ok(loaded.load(saved(policy)));
    Workspace work(policy.workspace_size(64));
    REQUIRE(answers_of(policy, cache, work) == answers_of(loaded, cache, work));
    KeepPlan plan;
    require_ok(loaded.plan_free(cache.view(), 30, work, plan));
    const std::vector<slot_t> kept = slots_of(plan.kept(0));
    for (slot_t s = 9; s < 22; ++s) REQUIRE(std::binary_search(kept.begin(), kept.end(), s));  // two units, whole
    REQUIRE_FALSE(std::binary_search(kept.begin(), kept.end(), slot_t{5}));
    check_error(loaded.add_boundary(33), StatusCode::out_of_order, {"boundary = 33", "above 33"});
    check_invalid(loaded.protect({17, 20}), {"overlaps"});
  });
}

TEST_CASE("a policy of another make is refused by name, and nothing has changed") {
  Random random;
  CAPTURE(random.seed());
  const auto refused = [&](auto into, const Bytes& from, std::initializer_list<const char*> parts) {
    const Bytes before = saved(into);
    check_invalid(into.load(from), parts);
    REQUIRE((saved(into) == before));
  };
  Stream stream = small_stream(random);
  TestCache<> cache(small_shape, 64);
  BeaconKV<> beacon = small_beaconkv();
  feed(beacon, cache, stream, 20);
  const Bytes good = saved(beacon);
  const auto beacon_of = [](Shape shape, index_t n_beacon, index_t n_recent) {
    return BeaconKV<>(shape, {.budget = {.max = 32}, .n_beacon = n_beacon, .n_recent_queries = n_recent, .n_recent_kv = 4},
                      RopeTable({.head_dim = shape.head_dim}));
  };
  refused(beacon_of({.query_heads = 2, .kv_heads = 2, .head_dim = 16}, 4, 3), good, {"query_heads = 4", "must be 2"});
  refused(beacon_of({.query_heads = 4, .kv_heads = 4, .head_dim = 16}, 4, 3), good, {"kv_heads = 2", "must be 4"});
  refused(beacon_of({.query_heads = 4, .kv_heads = 2, .head_dim = 32}, 4, 3), good, {"head_dim = 16", "must be 32"});
  refused(beacon_of(small_shape, 5, 3), good, {"n_beacon = 4", "must be 5"});
  refused(beacon_of(small_shape, 0, 3), good, {"n_beacon = 4", "must be 0"});
  refused(beacon_of(small_shape, 4, 6), good, {"n_recent_queries = 3", "must be 6"});
  refused(small_snapkv(), good, {"observer = 3", "must be 1"});
  refused(small_recent_window(), good, {"observer = 3", "must be 0"});
  const auto rpc_of = [](index_t count, bool twice) {
    return RPC<>(
        small_shape,
        {.budget = {.period = 8, .ratio = 4}, .n_recent_queries = count, .n_recent_kv = 4, .newest_query_twice = twice},
        small_rope());
  };
  refused(rpc_of(5, true), saved(rpc_of(5, false)), {"observer = 1", "must be 2"});
  refused(rpc_of(5, true), saved(rpc_of(6, true)), {"n_recent_queries = 5", "must be 4"});
  refused(small_rkv(RKVOrder::published), saved(small_rkv()), {"order = 0", "must be 1"});
  Bytes other = good;
  other[4] = std::byte{2};
  check_error(beacon.load(other), StatusCode::unsupported, {"format version = 2", "version 1"});
  other[0] = std::byte{0};
  check_error(beacon.load(other), StatusCode::damaged, {"magic number"});
  check_error(beacon.load(std::span(good).first(23)), StatusCode::damaged, {"23 bytes", "24"});
  check_error(beacon.load(std::span(good).first(100)), StatusCode::damaged, {"76 bytes"});
  REQUIRE((saved(beacon) == good));
}

TEST_CASE("every damaged byte and every shorter policy is refused, and nothing has changed") {
  Random random;
  CAPTURE(random.seed());
  for_each_saved_policy([&](const char* name, const auto& made) {
    INFO(name);
    auto policy = made;
    auto other = made;
    TestCache<> cache(small_shape, 64);
    Stream stream = small_stream(random);
    feed(policy, cache, stream, 40);
    Workspace work(policy.workspace_size(64));
    static_cast<void>(require_value(evict(policy, cache.view(), work)));
    require_ok(policy.protect({40, 43}));
    const Bytes good = saved(policy);
    require_ok(other.load(good));
    REQUIRE((saved(other) == good));
    other = made;
    const Bytes before = saved(other);
    index_t accepted = 0;
    for_each_damage(good, 7, random, [&](const Bytes& bad) { accepted += other.load(bad).ok() ? 1 : 0; });
    REQUIRE(accepted == 0);
    REQUIRE((saved(other) == before));
    require_ok(other.load(good));
  });
}

TEST_CASE("forged policies with the right checksum are refused, or harmless") {
  Random random;
  CAPTURE(random.seed());
  for_each_saved_policy([&](const char* name, const auto& made) {
    INFO(name);
    auto policy = made;
    TestCache<> cache(small_shape, 64);
    Stream stream = small_stream(random);
    feed(policy, cache, stream, 40);
    Workspace work(policy.workspace_size(64));
    static_cast<void>(require_value(evict(policy, cache.view(), work)));
    for (const Range r : {Range{40, 43}, Range{50, 52}}) require_ok(policy.protect(r));
    for (const position_t b : {3, 9}) require_ok(policy.add_boundary(b));
    const Token token = stream.next(40);
    TestCache<> shorter(small_shape, 64);  // than an order that was saved with another cache
    for (position_t p = 0; p < 10; ++p) shorter.append(stream.next(p));
    auto other = made;
    const Bytes before = saved(other);
    index_t refused = 0;
    std::size_t i = 0;
    for_each_forgery(saved(policy), 13, [&](const Bytes& bad) {
      if (!other.load(bad).ok()) {
        ++refused;
        if (++i % 16 == 0) REQUIRE((saved(other) == before));
        return;
      }
      exercise(other, cache, work, token);
      exercise(other, shorter, work, token);
      other = made;
    });
    REQUIRE(refused > 20);
    require_ok(other.load(saved(policy)));
    exercise(other, shorter, work, token);
  });
}

TEST_CASE("each wrong count of a forged policy is named") {
  struct Fields {
    std::int64_t next = 40;
    std::uint8_t after_prefill = 0;
    std::vector<position_t> ends{5, 7};
    std::uint64_t num_ends = 2;
    std::vector<position_t> boundaries{3, 9};
    std::int64_t observer = 0;
    bool more = false;
  };
  const auto write = [](const Fields& f) {
    Bytes out;
    detail::save_framed(out, [&](StateWriter& w) {
      for (const std::int64_t x : {4, 2, 16}) w.value("shape", x);
      w.value("next", f.next);
      w.value("end of the prompt", std::int64_t{2});
      w.value("after prefill", f.after_prefill);
      for (index_t i = 0; i < 3; ++i) w.value("flags", std::uint8_t{1});
      w.value("number of ends", f.num_ends);
      for (const position_t e : f.ends) w.value("end", e);
      w.list("boundaries", f.boundaries, 0);
      w.value("observer", f.observer);
      if (f.more) w.value("more", std::uint8_t{0});
    });
    return out;
  };
  RecentWindow<> policy = small_recent_window();
  const Bytes before = saved(policy);
  RecentWindow<> taken = policy;
  require_ok(taken.load(write({})));
  REQUIRE((saved(taken) == write({})));
  const auto refused = [&](const Fields& f, std::initializer_list<const char*> parts) {
    check_error(policy.load(write(f)), StatusCode::damaged, parts);
    REQUIRE((saved(policy) == before));
  };
  refused({.next = -1}, {"next position = -1", "between 0 and"});
  refused({.after_prefill = 2}, {"after a prefill = 2"});
  refused({.num_ends = std::uint64_t{1} << 60}, {"protected ranges has 1152921504606846976 entries"});
  refused({.num_ends = 100}, {"protected ranges has 100 entries"});
  refused({.ends = {5, 7, 9}, .num_ends = 3}, {"protected ranges", "3"});
  refused({.more = true}, {"1 bytes too many"});
  check_invalid(policy.load(write({.ends = {5, 7, 6, 9}, .num_ends = 4})), {"overlaps"});
  check_invalid(policy.load(write({.ends = {7, 5}})), {"[7, 5)"});
  REQUIRE_FALSE(policy.load(write({.boundaries = {9, 3}})).ok());
  check_invalid(policy.load(write({.observer = 3})), {"observer = 3", "must be 0"});
  REQUIRE((saved(policy) == before));
}

TEST_CASE("queries that were kept before RoPE are no rotated ones: a policy without the table refuses them") {
  const SnapKVOptions<> options{.budget = {.tokens = 24}, .n_recent_queries = 5, .n_recent_kv = 4};
  const SnapKV<> with(small_shape, options, small_rope());
  SnapKV<> without(small_shape, options);
  check_invalid(without.load(saved(with)), {"rotary_dim = 16", "must be 0"});
}

TEST_CASE("a published order that was made for another cache is refused, not followed out of it") {
  Random random;
  CAPTURE(random.seed());
  RKV<> policy = small_rkv(RKVOrder::published);
  TestCache<> cache(small_shape, 64);
  Stream stream = small_stream(random);
  feed(policy, cache, stream, 41);
  Workspace work(policy.workspace_size(64));
  static_cast<void>(require_value(evict(policy, cache.view(), work)));
  cache.view().truncate(10);
  std::vector<float> flat(20);
  check_error(policy.score(cache.view(), {flat.data(), 2, 10}, work).status(), StatusCode::out_of_order,
              {"10 tokens", "published order"});
  const std::vector<slot_t> some{0, 3, 9};
  KeepPlan plan;
  const std::span<const slot_t> sets[] = {some};
  require_ok(plan.assign(cache.view(), sets));
  require_ok(policy.commit(plan));  // the order begins anew
  require_ok(compact(cache.view(), plan));
  require_ok(policy.score(cache.view(), {flat.data(), 2, 3}, work).status());
}

namespace {

/// A conversation that moves in the middle to a sequence with other memory, and goes on bit for bit.
template <class PolicyT, class From, class To>
void check_move(const PolicyT& policy, Random& random, From& from, To& to, index_t prompt = 20) {
  LayerStreams streams(random, from->num_layers(), policy.shape());
  run_conversation(*to, streams, 3, 7);  // goes
  run_conversation(*from, streams, prompt, random.integer(30, 50));
  const auto* const cache = &to->cache(0);
  require_ok(to->load(state_of(*from)));
  REQUIRE(cache == &to->cache(0));
  REQUIRE((state_of(*to) == state_of(*from)));
  index_t evictions = 0;
  for (index_t i = 0; i < 40; ++i) {
    const LayerTokens tokens = streams.next(from->next_position());
    decode(*from, tokens);
    decode(*to, tokens);
    const SequenceReport report = evict_due(*from);
    REQUIRE(evict_due(*to).layers == report.layers);
    evictions += report.layers;
    if (random.integer(0, 6) == 0) require_ok(to->load(state_of(*to)));
    REQUIRE((state_of(*to) == state_of(*from)));
    REQUIRE(to->next_position() == from->next_position());
  }
  REQUIRE(evictions >= 2);
}

}  // namespace

TEST_CASE("a conversation that was saved goes on bit for bit in another memory layout and capacity") {
  Random random;
  CAPTURE(random.seed());
  for_each_saved_policy([&](const char* name, const auto& policy) {
    using PolicyT = std::decay_t<decltype(policy)>;
    for (const Layout layout : {Layout::paged, Layout::transposed, Layout::backwards}) {
      CAPTURE(name, static_cast<int>(layout));
      Layers<PolicyT> from(policy, 3, {.capacity = 100});
      Layers<PolicyT> to(policy, 3, {.capacity = 124, .layout = layout});
      check_move(policy, random, from, to);
    }
  });
}

TEST_CASE("a conversation that was saved goes on in every storage type and kind of cache") {
  Random random;
  CAPTURE(random.seed());
  const Shape shape{.query_heads = 4, .kv_heads = 2, .head_dim = 32};
  const BeaconKV<> policy(
      shape, {.budget = {.max = 32, .min = 24}, .n_beacon = 4, .n_recent_queries = 3, .n_recent_kv = 4, .n_prefix = 2},
      RopeTable({.head_dim = 32}));
  const LayersOptions wide{.capacity = 96, .layout = Layout::interleaved_kv};
  const LayersOptions paged{.capacity = 128, .layout = Layout::paged};
  {
    INFO("q8_0 keys, float16 values");
    Layers<BeaconKV<>, q8_0, float16> from(policy, 2, wide);
    Layers<BeaconKV<>, q8_0, float16> to(policy, 2, paged);
    check_move(policy, random, from, to);
  }
  {
    INFO("int8");
    Layers<BeaconKV<>, std::int8_t> from(policy, 2, wide);
    Layers<BeaconKV<>, std::int8_t> to(policy, 2, {.capacity = 128, .layout = Layout::transposed});
    check_move(policy, random, from, to);
  }
  {
    INFO("float8, one set for each layer");
    Layers<BeaconKV<>, float8_e4m3, float8_e5m2, Granularity::per_layer> from(policy, 2, paged);
    Layers<BeaconKV<>, float8_e4m3, float8_e5m2, Granularity::per_layer> to(policy, 2, wide);
    check_move(policy, random, from, to);
  }
  {
    INFO("one set for all layers");
    Layers<BeaconKV<>, bfloat16, bfloat16, Granularity::per_sequence> from(policy, 2, wide);
    Layers<BeaconKV<>, bfloat16, bfloat16, Granularity::per_sequence> to(policy, 2, paged);
    check_move(policy, random, from, to);
  }
  {
    INFO("positions within the cache");
    Layers<BeaconKV<>> from(policy, 2, {.capacity = 96, .mode = PositionMode::cache_relative});
    Layers<BeaconKV<>> to(policy, 2, {.capacity = 96, .layout = Layout::paged, .mode = PositionMode::cache_relative});
    check_move(policy, random, from, to);
    REQUIRE(to->cache(0).next_rotary_position() == from->cache(0).next_rotary_position());
  }
}

TEST_CASE("a conversation over heads of different lengths is saved with all of them") {
  Random random;
  CAPTURE(random.seed());
  using Ragged = Layers<BeaconKV<>, float, float, Granularity::per_head_ragged>;
  Ragged from(small_beaconkv(), 2, {.capacity = 96});
  Ragged to(small_beaconkv(), 2, {.capacity = 128, .layout = Layout::paged});
  LayerStreams streams(random, 2);
  run_conversation(*from, streams, 20, 5);
  for (index_t l = 0; l < 2; ++l) {
    const index_t n = from->cache(l).num_tokens();
    std::vector<float> flat(at(2 * n));
    const ScoreMatrix scores{flat.data(), 2, n};
    static_cast<void>(require_value(from->policy(l).score(from->cache(l), scores, from->workspace())));
    const std::vector<index_t> keep{10 + l, 20 - l};
    KeepPlan plan;
    require_ok(from->policy(l).select(from->cache(l), scores, from->workspace(), plan, keep));
    require_ok(compact(from->cache(l), plan));
    require_ok(from->policy(l).commit(plan));
    REQUIRE(from->cache(l).num_tokens(0) == 10 + l);
    REQUIRE(from->cache(l).num_tokens(1) == 20 - l);
  }
  require_ok(to->load(state_of(*from)));
  REQUIRE(to->cache(1).num_tokens(0) == 11);
  index_t evictions = 0;
  for (index_t i = 0; i < 50; ++i) {
    const LayerTokens tokens = streams.next(from->next_position());
    decode(*from, tokens);
    decode(*to, tokens);
    evictions += evict_due(*from).layers;
    static_cast<void>(evict_due(*to));
    REQUIRE((state_of(*to) == state_of(*from)));
  }
  REQUIRE(evictions > 2);
  Ragged fork(small_beaconkv(), 2, {.capacity = 64, .layout = Layout::token_major});
  require_ok(fork->copy_from(*from));
  REQUIRE((state_of(*fork) == state_of(*from)));
}

TEST_CASE("a conversation that was saved goes on in pages of another size") {
  Random random;
  CAPTURE(random.seed());
  constexpr index_t capacity = 96;
  std::vector<float> pool(at(2 * capacity * 2 * 16), 0.0F);
  std::vector<std::int32_t> pages(at(capacity / 8));
  for (std::size_t i = 0; i < pages.size(); ++i) pages[i] = static_cast<std::int32_t>(pages.size() - 1 - i);
  const PageList list{pages.data(), capacity / 8, 8, capacity / 8};
  using Type = Layers<BeaconKV<>>::Type;
  const auto planes = flashinfer_planes(pool.data(), PageLayout::hnd, 2, 16, list);
  std::vector<BeaconKV<>> policies(1, small_beaconkv());
  auto to = std::make_unique<Type>(
      require_value(Type::make(policies, {require_value(PlaneCache<float>::make(planes))}, {.capacity = capacity})));
  Layers<BeaconKV<>> from(small_beaconkv(), 1, {.capacity = 64, .layout = Layout::paged});
  check_move(small_beaconkv(), random, from, to);
  // A page that is not there is refused, before anything is written.
  const std::vector<float> before = pool;
  pages[1] = -1;
  check_invalid(to->load(state_of(*from)), {"keys.pages[1] = -1"});
  REQUIRE(pool == before);
}

TEST_CASE("a sequence of another make is refused by name and value, and nothing has changed") {
  Random random;
  CAPTURE(random.seed());
  LayerStreams streams(random, 3);
  Layers<BeaconKV<>> from(small_beaconkv(), 2);
  run_conversation(*from, streams, 10, 20);
  const Bytes good = state_of(*from);
  const auto refused = [&](auto into, StatusCode code, std::initializer_list<const char*> parts) {
    run_conversation(*into, streams, 4, 6);
    const Bytes before = state_of(*into);
    check_error(into->load(good), code, parts);
    REQUIRE((state_of(*into) == before));
  };
  constexpr StatusCode invalid = StatusCode::invalid_argument;
  refused(Layers<BeaconKV<>>(small_beaconkv(), 3), invalid, {"layers = 2", "must be 3"});
  refused(Layers<BeaconKV<>, float16>(small_beaconkv(), 2), invalid, {"key storage = 1", "must be 2"});
  refused(Layers<BeaconKV<>, float, bfloat16>(small_beaconkv(), 2), invalid, {"value storage = 1", "must be 3"});
  refused(Layers<BeaconKV<>, float, float, Granularity::per_layer>(small_beaconkv(), 2), invalid,
          {"granularity = 0", "must be 2"});
  refused(Layers<BeaconKV<>>(small_beaconkv(), 2, {.mode = PositionMode::cache_relative}), invalid,
          {"position mode = 0", "must be 1"});
  refused(Layers<BeaconKV<>>(small_beaconkv(), 2, {.capacity = 20}), StatusCode::damaged, {"tokens = 30", "between 0 and 20"});
  const Shape other{.query_heads = 2, .kv_heads = 2, .head_dim = 16};
  Layers<BeaconKV<>> shaped(BeaconKV<>(other, {.budget = {.max = 32}, .n_recent_kv = 4}, small_rope()), 2);
  check_invalid(shaped->load(good), {"query_heads = 4", "must be 2"});
  REQUIRE(shaped->next_position() == 0);
}

TEST_CASE("scales that rows share belong to the engine: they must agree in copies and saved bytes") {
  Random random;
  CAPTURE(random.seed());
  const Shape shape{.query_heads = 2, .kv_heads = 2, .head_dim = 8};
  std::vector<std::vector<float8_e4m3>> memory(6, std::vector<float8_e4m3>(2 * 16 * 8));
  std::vector<std::vector<float>> scales{{0.5F, 0.25F}, {0.5F, 0.25F}, {0.5F, 0.125F}};
  using Cache = PlaneCache<float8_e4m3>;
  using Type = Sequence<RecentWindow<>, Cache>;
  std::vector<Type> all;
  for (std::size_t i = 0; i < 3; ++i) {
    const auto plane = [&](std::size_t m) {
      return with_head_scales(head_major_plane(memory[m].data(), index_t{2}, index_t{8}, index_t{16}), scales[i].data());
    };
    std::vector<Cache> caches{require_value(Cache::make(plane(2 * i), plane(2 * i + 1)))};
    std::vector<RecentWindow<>> policies{RecentWindow<>(shape, {.budget = {.max = 8}})};
    all.push_back(require_value(Type::make(policies, caches, {.capacity = 16})));
  }
  LayerStreams streams(random, 1, shape);
  for (position_t p = 0; p < 6; ++p) decode(all[0], streams.next(p));
  const Bytes good = state_of(all[0]);
  require_ok(all[1].load(good));
  REQUIRE((state_of(all[1]) == good));
  require_ok(all[1].copy_from(all[0]));
  check_invalid(all[2].load(good), {"shared scale of keys"});
  check_invalid(all[2].copy_from(all[0]), {"keys", "head 1", "scales"});
  REQUIRE(all[2].cache(0).num_tokens() == 0);
  std::vector<std::int32_t> pages{0, 1};
  Plane<float8_e4m3> by_page =
      with_row_scales(paged_head_major_plane(memory[0].data(), 2, 8, {pages.data(), 2, 8, 2}), scales[0].data());
  by_page.scales.token = 0;
  check_invalid(Cache::make(by_page, by_page).status(), {".scales.page = 16"});
}

TEST_CASE("every damaged byte and every shorter sequence is refused, and nothing has changed") {
  Random random;
  CAPTURE(random.seed());
  const Shape shape{.query_heads = 1, .kv_heads = 1, .head_dim = 2};
  const RecentWindow<> policy(shape, {.budget = {.max = 6, .min = 4}, .n_prefix = 1});
  LayerStreams streams(random, 2, shape);
  Layers<RecentWindow<>, float16> from(policy, 2, {.capacity = 8});
  Layers<RecentWindow<>, float16> to(policy, 2, {.capacity = 8, .sequence = {.max_draft_tokens = 2}});
  run_conversation(*from, streams, 2, 9);
  run_conversation(*to, streams, 2, 2);
  const Bytes good = state_of(*from);
  const Bytes before = state_of(*to);
  index_t accepted = 0;
  for_each_damage(good, 1, random, [&](const Bytes& bad) { accepted += to->load(bad).ok() ? 1 : 0; });
  REQUIRE(accepted == 0);
  REQUIRE((state_of(*to) == before));

  // Tentative tokens stay where the bytes are refused, and are forgotten where they are taken.
  draft(*to, streams.next(4));
  check_error(to->load(std::span(good).first(30)), StatusCode::damaged, {"saved state"});
  REQUIRE(to->num_draft_tokens() == 1);
  require_ok(to->load(good));
  REQUIRE(to->num_draft_tokens() == 0);
  REQUIRE((state_of(*to) == good));
}

namespace {

template <class LayersT>
void check_forgeries(LayersT& from, LayersT& to, LayerStreams& streams, std::size_t stride) {
  run_conversation(*to, streams, 3, 2);
  const Bytes before = state_of(*to);
  const Bytes good = state_of(*from);
  const LayerTokens tokens = streams.next(from->next_position());
  index_t refused = 0;
  for_each_forgery(good, stride, [&](const Bytes& bad) {
    if (!to->load(bad).ok()) {
      if (++refused % 16 == 0) REQUIRE((state_of(*to) == before));
      return;
    }
    static_cast<void>(to->evict_where_due());
    for (index_t l = 0; l < to->num_layers(); ++l) {
      Token token = tokens[at(l)];
      token.position = to->next_position();
      static_cast<void>(try_append(*to, l, token));
      static_cast<void>(to->policy(l).observe(token.queries, token.position));
      static_cast<void>(evict(to->policy(l), to->cache(l), to->workspace()));
      static_cast<void>(to->cache(l).rollback(3));
      static_cast<void>(to->cache(l).append(to->cache(l).next_position()));
    }
    require_ok(to->load(before));
  });
  REQUIRE(refused > 50);
  REQUIRE((state_of(*to) == before));
}

}  // namespace

TEST_CASE("forged sequences with the right checksum are refused, or harmless") {
  Random random;
  CAPTURE(random.seed());
  const Shape shape{.query_heads = 2, .kv_heads = 2, .head_dim = 2};
  LayerStreams streams(random, 2, shape);
  {
    const RecentWindow<> policy(shape, {.budget = {.max = 6, .min = 4}, .n_prefix = 1});
    using Small = Layers<RecentWindow<>, std::int8_t, float16, Granularity::per_head_ragged>;
    Small from(policy, 2, {.capacity = 8});
    Small to(policy, 2, {.capacity = 8});
    run_conversation(*from, streams, 2, 9);
    check_forgeries(from, to, streams, 1);
  }
  {
    const RKV<> policy(
        shape, {.budget = {.tokens = 6, .interval = 2}, .n_recent_queries = 2, .n_recent_kv = 2, .order = RKVOrder::published},
        RopeTable({.head_dim = 2}));
    using Small = Layers<RKV<>>;
    const LayersOptions options{.capacity = 12, .layout = Layout::paged, .mode = PositionMode::cache_relative};
    Small from(policy, 2, options);
    Small to(policy, 2, options);
    run_conversation(*from, streams, 2, 12);
    check_forgeries(from, to, streams, 3);
  }
}

TEST_CASE("equal states are equal bytes, whatever happened in between") {
  Random random;
  CAPTURE(random.seed());
  LayerStreams streams(random, 2);
  const LayersOptions options{.sequence = {.max_draft_tokens = 4}};
  Layers<RPC<>> a(small_growing_rpc(), 2, options);
  Layers<RPC<>> b(small_growing_rpc(), 2, options);
  run_conversation(*a, streams, 12, 30);
  require_ok(b->copy_from(*a));
  for (index_t i = 0; i < 3; ++i) draft(*b, streams.next(b->next_position()));
  require_ok(b->accept(0));
  REQUIRE((state_of(*a) == state_of(*b)));
  Bytes twice;
  require_ok(a->save(twice));
  require_ok(a->save(twice));  // appends
  REQUIRE(twice.size() == 2 * state_of(*a).size());
  require_ok(b->load(std::span(twice).last(twice.size() / 2)));
  check_error(b->load(twice), StatusCode::damaged, {"bytes behind its header"});
  REQUIRE((state_of(*a) == state_of(*b)));
}
