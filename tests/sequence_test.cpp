// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "beaconkv/sequence/sequence.hpp"

#include <string>
#include <vector>

#include "support/counting_allocator.hpp"
#include "support/sequence_run.hpp"
#include "support/workers.hpp"

using namespace beaconkv;
using namespace beaconkv::test;

namespace {

constexpr Shape shape{.query_heads = 4, .kv_heads = 2, .head_dim = 16};
constexpr index_t capacity = 64;

[[nodiscard]] std::vector<float> floats(Random& random, index_t count) {
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& x : values) x = random.uniform(-1, 1);
  return values;
}

/// What `answers_of` looks at.
template <class CacheT>
struct Viewed {
  const CacheT& cache;
  [[nodiscard]] const CacheT& view() const { return cache; }
};
template <class CacheT>
Viewed(const CacheT&) -> Viewed<CacheT>;

}  // namespace

TEST_CASE("layers of a sequence evict as they would alone, each by its own budget") {
  Random random;
  CAPTURE(random.seed());
  const RopeTable rope({.head_dim = 16});
  std::vector<BeaconKV<>> policies;
  for (const index_t max : {16, 24, 1000})
    policies.emplace_back(
        shape, BeaconKVOptions<>{.budget = {.max = max}, .n_beacon = 4, .n_recent_queries = 4, .n_recent_kv = 4}, rope);
  std::vector<OwningCache<float>> memory(3, OwningCache<float>(shape, capacity));
  std::vector<OwningCache<float>> alone_memory(3, OwningCache<float>(shape, capacity));
  std::vector<BeaconKV<>> alone = policies;

  std::vector<PlaneCache<float>> views;
  for (OwningCache<float>& m : memory) views.push_back(m.view());
  auto sequence = Sequence<BeaconKV<>, PlaneCache<float>>::make(policies, views, {.capacity = capacity}).or_throw();
  Workspace work(alone[2].workspace_size(capacity));

  index_t evictions = 0;
  for (position_t t = 0; t < 60; ++t) {
    for (index_t l = 0; l < 3; ++l) {
      const std::vector<float> keys = floats(random, shape.kv_heads * shape.head_dim);
      const std::vector<float> queries = floats(random, shape.query_heads * shape.head_dim);
      PlaneCache<float>& view = sequence.cache(l);
      for (index_t h = 0; h < shape.kv_heads; ++h) {
        const auto from = keys.begin() + h * shape.head_dim;
        std::copy(from, from + shape.head_dim, view.key_plane().row(h, view.num_tokens()));
        std::copy(from, from + shape.head_dim, view.value_plane().row(h, view.num_tokens()));
      }
      view.append(t).or_throw();
      sequence.policy(l).observe(queries, t).or_throw();

      OwningCache<float>& own = alone_memory[static_cast<std::size_t>(l)];
      own.append(keys, keys, t).or_throw();
      BeaconKV<>& policy = alone[static_cast<std::size_t>(l)];
      policy.observe(queries, t).or_throw();
      if (policy.due(own.view())) evict(policy, own.view(), work).or_throw();
    }
    evictions += sequence.evict_where_due().or_throw().layers;
    for (index_t l = 0; l < 3; ++l) {
      const PlaneCache<float>& expected = alone_memory[static_cast<std::size_t>(l)].view();
      REQUIRE(sequence.cache(l).num_tokens() == expected.num_tokens());
      for (index_t h = 0; h < shape.kv_heads; ++h)
        for (index_t slot = 0; slot < expected.num_tokens(); ++slot)
          REQUIRE(sequence.cache(l).position(h, slot) == expected.position(h, slot));
    }
  }
  REQUIRE(evictions > 20);
  REQUIRE(sequence.cache(2).num_tokens() == 60);
  REQUIRE(sequence.state_bytes() == 3 * sequence.policy(0).state_bytes());
}

TEST_CASE("a sequence needs one policy and one cache for each layer") {
  using Layers = Sequence<BeaconKV<>, PlaneCache<float>>;
  const BeaconKV<> policy(shape, {.budget = {.max = 16}, .n_recent_kv = 4}, RopeTable({.head_dim = 16}));
  OwningCache<float> cache(shape, capacity);
  REQUIRE(Layers::make({}, {}, {.capacity = capacity}).status().message().find("policies = 0") != std::string::npos);
  REQUIRE(Layers::make({policy, policy}, {cache.view()}, {.capacity = capacity}).status().message().find("caches = 1") !=
          std::string::npos);
  REQUIRE(Layers::make({policy}, {cache.view()}, {.capacity = -1}).status().message().find("capacity = -1") !=
          std::string::npos);
}

TEST_CASE("speculative decoding leaves every layer as if only the accepted tokens had been there") {
  Random random;
  CAPTURE(random.seed());
  for_each_policy([&](const char* name, const auto& policy) {
    INFO(name);
    using PolicyT = std::decay_t<decltype(policy)>;
    constexpr index_t layers = 3;
    const LayersOptions options{.layout = Layout::paged, .sequence = {.max_draft_tokens = 5}};
    Layers<PolicyT> guessing(policy, layers, options);
    Layers<PolicyT> plain(policy, layers, options);
    LayerStreams streams(random, layers);
    const std::vector<LayerTokens> prompt = streams.next(0, 20);
    prefill(*guessing, prompt);
    prefill(*plain, prompt);

    index_t evictions = 0;
    for (index_t round = 0; round < 40; ++round) {
      std::vector<LayerTokens> tokens;
      position_t position = guessing->next_position();
      for (index_t i = random.integer(1, 5); i > 0; --i) {
        position += random.integer(0, 9) == 0 ? 3 : 0;  // an engine may leave out positions
        tokens.push_back(streams.next(position++));
        draft(*guessing, tokens.back());
        REQUIRE(guessing->next_position() == position);
      }
      const index_t held = guessing->cache(0).num_tokens();
      REQUIRE(evict_due(*guessing).layers == 0);
      REQUIRE(guessing->cache(0).num_tokens() == held);

      const auto drafts = static_cast<index_t>(tokens.size());
      const index_t undone = random.integer(0, drafts);
      REQUIRE(require_value(guessing->rollback(undone)) == undone);
      REQUIRE(guessing->num_draft_tokens() == drafts - undone);
      const index_t accepted = random.integer(0, drafts - undone);
      require_ok(guessing->accept(accepted));
      REQUIRE(guessing->num_draft_tokens() == 0);
      evictions += evict_due(*guessing).layers;

      // The same tokens by hand: a layer that is due at any of them evicts behind the last.
      for (index_t l = 0; l < layers; ++l) {
        bool due = round == 0 && accepted == 0 && plain->policy(l).due(plain->cache(l));
        for (index_t i = 0; i < accepted; ++i) require_ok(try_append(*plain, l, tokens[at(i)][at(l)]));
        for (index_t i = 0; i < accepted; ++i) {
          require_ok(plain->policy(l).observe(tokens[at(i)][at(l)].queries, tokens[at(i)][at(l)].position));
          due = due || plain->policy(l).due(plain->cache(l));
        }
        if (due) static_cast<void>(require_value(evict(plain->policy(l), plain->cache(l), plain->workspace())));
      }
      REQUIRE((state_of(*guessing) == state_of(*plain)));
      for (index_t l = 0; l < layers; ++l) {
        const Viewed a{guessing->cache(l)};
        const Viewed b{plain->cache(l)};
        REQUIRE(answers_of(guessing->policy(l), a, guessing->workspace()) ==
                answers_of(plain->policy(l), b, plain->workspace()));
      }
    }
    REQUIRE(evictions > layers);
  });
}

TEST_CASE("tentative tokens that a layer has not seen are neither accepted nor taken from it") {
  Random random;
  CAPTURE(random.seed());
  Layers<BeaconKV<>> s(small_beaconkv(), 3, {.sequence = {.max_draft_tokens = 4}});
  LayerStreams streams(random, 3);
  for (position_t p = 0; p < 9; ++p) decode(*s, streams.next(p));
  const Bytes before = state_of(*s);
  const auto counts = [&] {
    return std::vector<index_t>{s->cache(0).num_tokens(), s->cache(1).num_tokens(), s->cache(2).num_tokens()};
  };

  draft(*s, streams.next(9));
  const LayerTokens second = streams.next(10);
  for (const index_t l : {0, 1}) {
    require_ok(try_append(*s, l, second[at(l)]));
    require_ok(s->observe_draft(l, second[at(l)].queries, 10));
  }
  REQUIRE(s->num_draft_tokens() == 2);
  check_error(s->accept(1), StatusCode::out_of_order, {"layer 2", "1 of 2"});
  check_invalid(s->accept(3), {"count = 3", "2 drafts"});
  check_invalid(s->accept(-1), {"count = -1"});
  check_invalid(s->rollback(-1).status(), {"count = -1"});
  REQUIRE(counts() == std::vector<index_t>{11, 11, 10});

  // The token that two layers saw goes from these two, and no observed one from the third.
  REQUIRE(require_value(s->rollback(1)) == 1);
  REQUIRE(counts() == std::vector<index_t>{10, 10, 10});
  for (const index_t l : {0, 1}) {
    require_ok(try_append(*s, l, second[at(l)]));
    require_ok(s->observe_draft(l, second[at(l)].queries, 10));
  }
  REQUIRE(require_value(s->rollback(1000)) == 2);
  REQUIRE(counts() == std::vector<index_t>{9, 9, 9});
  REQUIRE(require_value(s->rollback(1)) == 0);
  REQUIRE((state_of(*s) == before));

  // Queries without keys and values, keys and values without queries, and a token observed in between.
  const LayerTokens third = streams.next(9);
  for (index_t l = 0; l < 3; ++l) require_ok(s->observe_draft(l, third[at(l)].queries, 9));
  check_error(s->accept(1), StatusCode::out_of_order, {"layer 0", "newest"});
  check_error(s->rollback(1).status(), StatusCode::out_of_order, {"layer 0", "newest"});
  REQUIRE(counts() == std::vector<index_t>{9, 9, 9});
  for (const index_t l : {0, 1}) require_ok(try_append(*s, l, third[at(l)]));
  check_error(s->accept(0), StatusCode::out_of_order, {"layer 2", "newest"});
  REQUIRE(counts() == std::vector<index_t>{10, 10, 9});
  require_ok(try_append(*s, 2, third[2]));
  require_ok(s->accept(0));
  REQUIRE((state_of(*s) == before));
}

TEST_CASE("an eviction behind the sequence's back makes tentative tokens stay, not half of them") {
  Random random;
  CAPTURE(random.seed());
  Layers<BeaconKV<>> s(small_beaconkv(), 2, {.sequence = {.max_draft_tokens = 4}});
  LayerStreams streams(random, 2);
  for (position_t p = 0; p < 40; ++p) decode(*s, streams.next(p));
  draft(*s, streams.next(40));
  static_cast<void>(require_value(evict(s->policy(1), s->cache(1), s->workspace())));
  const index_t left = s->cache(1).num_tokens();
  check_error(s->accept(0), StatusCode::out_of_order, {"layer 1", "newest"});
  check_error(s->rollback(1).status(), StatusCode::out_of_order, {"layer 1", "newest"});
  REQUIRE(s->cache(0).num_tokens() == 41);
  REQUIRE(s->cache(1).num_tokens() == left);
}

TEST_CASE("drafts are refused by name, before anything changes") {
  Random random;
  CAPTURE(random.seed());
  Layers<BeaconKV<>> s(small_beaconkv(), 2, {.sequence = {.max_draft_tokens = 2}});
  LayerStreams streams(random, 2);
  decode(*s, streams.next(0));
  const LayerTokens token = streams.next(1);
  const std::vector<float>& queries = token[0].queries;
  check_invalid(s->observe_draft(-1, queries, 1), {"layer = -1"});
  check_invalid(s->observe_draft(2, queries, 1), {"layer = 2"});
  check_error(s->observe_draft(0, queries, 0), StatusCode::out_of_order, {"position = 0", "at least 1"});
  check_invalid(s->observe_draft(0, std::span(queries).first(63), 1), {"63 numbers"});
  check_invalid(s->observe_draft(0, std::span(queries).first(60), 1), {"heads of 15"});
  check_invalid(s->observe_draft(0, queries, std::numeric_limits<position_t>::max()), {"position = 9223372036854775807"});
  REQUIRE(s->num_draft_tokens() == 0);
  require_ok(s->observe_draft(0, queries, 5));
  check_error(s->observe_draft(0, queries, 5), StatusCode::out_of_order, {"position = 5", "at least 6"});
  check_error(s->observe_draft(0, queries, 3), StatusCode::out_of_order, {"position = 3", "at least 6"});
  require_ok(s->observe_draft(0, queries, 6));
  check_error(s->observe_draft(0, queries, 7), StatusCode::out_of_capacity, {"max_draft_tokens = 2"});
  REQUIRE(s->num_draft_tokens() == 2);
  REQUIRE(s->next_position() == 7);
  Bytes out;
  check_error(s->save(out), StatusCode::out_of_order, {"2 tokens are tentative"});
  REQUIRE(out.empty());
}

TEST_CASE("drafts come rotated to a policy without a table, in every layer's own shape") {
  Random random;
  CAPTURE(random.seed());
  const Shape wide{.query_heads = 6, .kv_heads = 2, .head_dim = 16};
  const SnapKVOptions<> snap{.budget = {.tokens = 8, .interval = 4}, .n_recent_queries = 3, .n_recent_kv = 2};
  const std::vector<SnapKV<>> policies{SnapKV<>(small_shape, snap), SnapKV<>(wide, snap)};
  Layers<SnapKV<>> guessing(policies, {.sequence = {.max_draft_tokens = 3}});
  Layers<SnapKV<>> plain(policies, {});
  Stream narrow_stream(random, small_shape, make_rope(16));
  Stream wide_stream(random, wide, make_rope(16));
  for (index_t round = 0; round < 20; ++round) {
    for (index_t i = 0; i < 3; ++i) {
      const position_t p = guessing->next_position();
      const LayerTokens tokens{narrow_stream.next(p), wide_stream.next(p)};
      for (index_t l = 0; l < 2; ++l) {
        const Token& t = tokens[at(l)];
        require_ok(try_append(*guessing, l, t));
        check_error(guessing->observe_draft(l, t.queries, p), StatusCode::unsupported, {"RopeTable", "_rotated"});
        require_ok(guessing->observe_draft_rotated(l, t.rotated, p));
        if (i == 2) continue;
        require_ok(try_append(*plain, l, t));
        require_ok(plain->policy(l).observe_rotated(t.rotated, p));
      }
    }
    require_ok(guessing->accept(2));
    REQUIRE(evict_due(*guessing).layers == evict_due(*plain).layers);
    REQUIRE((state_of(*guessing) == state_of(*plain)));
  }
  REQUIRE(guessing->cache(0).num_tokens() < 14);
}

TEST_CASE("[I1] a fork and its origin never see each other", "[I1]") {
  Random random;
  CAPTURE(random.seed());
  for_each_policy([&](const char* name, const auto& policy) {
    INFO(name);
    using PolicyT = std::decay_t<decltype(policy)>;
    LayerStreams streams(random, 2);
    Layers<PolicyT> a(policy, 2, {.sequence = {.max_draft_tokens = 3}});
    Layers<PolicyT> fork(policy, 2, {.capacity = 80, .layout = Layout::paged, .sequence = {.max_draft_tokens = 3}});
    Layers<PolicyT> twin(policy, 2, {.capacity = 100, .layout = Layout::transposed, .sequence = {.max_draft_tokens = 3}});
    run_conversation(*fork, streams, 5, 3);  // what was there before goes
    run_conversation(*a, streams, 20, 30);
    const Bytes before = state_of(*a);
    require_ok(fork->copy_from(*a));
    require_ok(twin->copy_from(*a));
    REQUIRE((state_of(*fork) == before));
    std::vector<std::uint64_t> epochs{a->cache(0).epoch(), a->cache(1).epoch()};

    run_conversation(*fork, streams, 0, 40);
    REQUIRE((state_of(*a) == before));
    REQUIRE(epochs == std::vector<std::uint64_t>{a->cache(0).epoch(), a->cache(1).epoch()});
    const Bytes of_fork = state_of(*fork);
    for (index_t i = 0; i < 40; ++i) {
      const LayerTokens tokens = streams.next(a->next_position());
      decode(*a, tokens);
      decode(*twin, tokens);
      REQUIRE(evict_due(*a).layers == evict_due(*twin).layers);
    }
    REQUIRE((state_of(*a) == state_of(*twin)));
    REQUIRE((state_of(*fork) == of_fork));

    // Tentative tokens come along.
    draft(*a, streams.next(a->next_position()));
    draft(*a, streams.next(a->next_position()));
    require_ok(fork->copy_from(*a));
    REQUIRE(fork->num_draft_tokens() == 2);
    require_ok(fork->accept(1));
    REQUIRE(a->num_draft_tokens() == 2);
    require_ok(a->accept(1));
    REQUIRE((state_of(*fork) == state_of(*a)));
    require_ok(a->copy_from(*a));
    REQUIRE((state_of(*fork) == state_of(*a)));
  });
}

TEST_CASE("a fork that does not fit is refused with nothing changed, in any layer") {
  Random random;
  CAPTURE(random.seed());
  LayerStreams streams(random, 2);
  const BeaconKV<> small = small_beaconkv();
  const BeaconKV<> never(small_shape, {.budget = {.max = 1000}, .n_recent_kv = 4}, small_rope());
  Layers<BeaconKV<>> a({small, never}, {.capacity = 100, .sequence = {.max_draft_tokens = 4}});
  run_conversation(*a, streams, 20, 40);
  Layers<BeaconKV<>> tight({small, never}, {.capacity = 40, .sequence = {.max_draft_tokens = 2}});
  run_conversation(*tight, streams, 8, 4);
  const Bytes before = state_of(*tight);
  check_error(tight->copy_from(*a), StatusCode::out_of_capacity, {"60 tokens", "capacity = 40"});
  REQUIRE((state_of(*tight) == before));
  Layers<BeaconKV<>> three(small, 3);
  check_invalid(three->copy_from(*a), {"2 layers", "3"});
  Layers<BeaconKV<>> few({small, never}, {.capacity = 100, .sequence = {.max_draft_tokens = 2}});
  for (index_t i = 0; i < 3; ++i) draft(*a, streams.next(a->next_position()));
  check_error(few->copy_from(*a), StatusCode::out_of_capacity, {"3 tentative tokens"});
  REQUIRE(few->next_position() == 0);
  REQUIRE(require_value(a->rollback(1)) == 1);
  require_ok(few->copy_from(*a));
  REQUIRE(few->num_draft_tokens() == 2);
  check_error(few->observe_draft(0, streams.next(62)[0].queries, 62), StatusCode::out_of_capacity, {"max_draft_tokens = 2"});
}

TEST_CASE("[I3] a pinned prefix is overwritten by no copy, no load and no beam", "[I3]") {
  Random random;
  CAPTURE(random.seed());
  LayerStreams streams(random, 2);
  Layers<BeaconKV<>> a(small_beaconkv(), 2);
  Layers<BeaconKV<>> b(small_beaconkv(), 2);
  Layers<BeaconKV<>> spare(small_beaconkv(), 2);
  for (auto* s : {&a, &b, &spare}) run_conversation(**s, streams, 20, 10);
  require_ok(a->cache(1).set_pinned_prefix(3));
  const Bytes of_a = state_of(*a);
  const Bytes of_b = state_of(*b);
  const Bytes of_spare = state_of(*spare);
  const auto nothing_changed = [&] {
    REQUIRE((state_of(*a) == of_a));
    REQUIRE((state_of(*b) == of_b));
    REQUIRE((state_of(*spare) == of_spare));
    REQUIRE(a->cache(1).pinned_prefix() == 3);
  };
  check_error(a->copy_from(*b), StatusCode::unsupported, {"copy_from", "pinned prefix of 3"});
  check_error(a->load(of_b), StatusCode::unsupported, {"load", "pinned prefix of 3"});
  nothing_changed();
  std::vector<Layers<BeaconKV<>>::Type> beams{*b, *a};
  for (const std::vector<index_t>& order : {std::vector<index_t>{1, 0}, {0, 0}}) {
    CAPTURE(order);
    check_error(reorder_beams<Layers<BeaconKV<>>::Type>(beams, order, *spare), StatusCode::unsupported, {"pinned prefix of 3"});
    REQUIRE((state_of(beams[0]) == of_b));
    REQUIRE((state_of(beams[1]) == of_a));
    nothing_changed();
  }
  require_ok(reorder_beams<Layers<BeaconKV<>>::Type>(beams, std::vector<index_t>{1, 1}, *spare));  // into memory without a pin
  REQUIRE((state_of(beams[0]) == of_a));
  REQUIRE(beams[0].cache(1).pinned_prefix() == 0);

  // A fork and a restart have memory of their own.
  require_ok(b->copy_from(*a));
  REQUIRE(b->cache(1).pinned_prefix() == 0);
  REQUIRE((state_of(*b) == of_a));
  require_ok(spare->load(of_a));
  REQUIRE(spare->cache(1).pinned_prefix() == 0);
  REQUIRE((state_of(*spare) == of_a));
}

TEST_CASE("[I3] beams that share the pages of a pinned prefix change places, and leave it alone", "[I3]") {
  Random random;
  CAPTURE(random.seed());
  using Cache = PlaneCache<float>;
  constexpr index_t page_size = 4;
  constexpr index_t table = 12;
  std::vector<float> pool(static_cast<std::size_t>(4 * table * page_size * 2 * 2 * 16), 0.0F);
  std::vector<std::vector<std::int32_t>> pages;
  for (std::int32_t i = 0; i < 4; ++i) {
    pages.emplace_back();
    for (std::int32_t p = 0; p < table; ++p) pages.back().push_back(p < 2 ? p : static_cast<std::int32_t>(table) * i + p);
  }
  using Seq = Sequence<BeaconKV<>, Cache>;
  std::vector<Seq> all;
  for (index_t i = 0; i < 4; ++i) {
    Plane<float> keys{.base = pool.data(),
                      .stride = {page_size * 64, 16, 64, 1},
                      .heads = 2,
                      .dim = 16,
                      .capacity = table * page_size,
                      .page_size = page_size,
                      .pages = pages[at(i)].data(),
                      .num_pages = 4 * table};
    Plane<float> values = keys;
    values.base += 32;
    all.push_back(require_value(Seq::make({small_beaconkv()}, {require_value(Cache::make(keys, values))}, {.capacity = 48})));
  }
  LayerStreams streams(random, 1);
  LayerTokens tokens;
  for (position_t p = 0; p < 8; ++p) {
    const LayerTokens common = streams.next(p);
    for (Seq& s : all) decode(s, common);
  }
  for (Seq& s : all) require_ok(s.cache(0).set_pinned_prefix(8));
  for (index_t i = 0; i < 4; ++i)
    for (position_t p = 8; p < 12 + i; ++p) decode(all[at(i)], streams.next(p));
  std::vector<Seq> beams(all.begin(), all.begin() + 3);
  const std::vector<float> shared(pool.begin(), pool.begin() + 2 * page_size * 64);
  for (const std::vector<index_t>& order : {std::vector<index_t>{1, 2, 0}, {1, 0, 1}, {2, 2, 2}}) {
    CAPTURE(order);
    std::vector<Bytes> old;
    for (const Seq& s : beams) old.push_back(state_of(s));
    require_ok(reorder_beams<Seq>(beams, order, all[3]));
    for (std::size_t i = 0; i < 3; ++i) {
      REQUIRE((state_of(beams[i]) == old[at(order[i])]));
      REQUIRE(beams[i].cache(0).pinned_prefix() == 8);
    }
    REQUIRE(std::equal(shared.begin(), shared.end(), pool.begin()));
  }
}

TEST_CASE("[I5] beams change places as plain copies would", "[I5]") {
  struct Beam {
    index_t state = 0;
    index_t* copies = nullptr;
    Status copy_from(const Beam& other) {
      state = other.state;
      ++*copies;
      return {};
    }
  };
  const auto check = [](const std::vector<index_t>& order) {
    const std::size_t n = order.size();
    index_t copies = 0;
    std::vector<Beam> beams;
    for (std::size_t i = 0; i < n; ++i) beams.push_back({static_cast<index_t>(10 + i), &copies});
    Beam spare{-1, &copies};
    require_ok(reorder_beams<Beam>(beams, order, spare));
    index_t moved = 0;
    index_t cycles = 0;
    for (std::size_t i = 0; i < n; ++i) {
      REQUIRE(beams[i].state == 10 + order[i]);
      moved += order[i] != static_cast<index_t>(i) ? 1 : 0;
      std::size_t lowest = i;  // of a cycle that leads back to i
      std::size_t x = at(order[i]);
      for (std::size_t step = 0; step < n && x != i; ++step, x = at(order[x])) lowest = std::min(lowest, x);
      cycles += x == i && lowest == i && at(order[i]) != i ? 1 : 0;
    }
    REQUIRE(copies >= moved);
    REQUIRE(copies <= moved + cycles);
  };
  for (index_t n = 0; n <= 5; ++n) {
    index_t all = 1;
    for (index_t i = 0; i < n; ++i) all *= n;
    for (index_t code = 0; code < all; ++code) {
      std::vector<index_t> order;
      for (index_t i = 0, rest = code; i < n; ++i, rest /= n) order.push_back(rest % n);
      CAPTURE(order);
      check(order);
    }
  }
  index_t copies = 0;
  std::vector<Beam> two{{0, &copies}, {1, &copies}};
  Beam spare{-1, &copies};
  const std::vector<index_t> short_order{0};
  check_invalid(reorder_beams<Beam>(two, short_order, spare), {"order has 1", "2 beams"});
  for (const index_t bad : {-1, 2}) {
    const std::vector<index_t> order{1, bad};
    check_invalid(reorder_beams<Beam>(two, order, spare), {"order[1] = ", std::to_string(bad).c_str()});
  }
  REQUIRE(copies == 0);
}

TEST_CASE("[I5] beams of sequences: the state of the source, then diverging appends that do not alias", "[I5]") {
  Random random;
  CAPTURE(random.seed());
  using Cache = Layers<BeaconKV<>>;
  std::vector<Cache> memory;
  std::vector<Cache> references;
  std::vector<Cache::Type> beams;
  LayerStreams streams(random, 2);
  for (index_t i = 0; i < 5; ++i) {
    memory.emplace_back(small_beaconkv(), 2, LayersOptions{.layout = all_layouts[at(i)]});
    references.emplace_back(small_beaconkv(), 2);
    if (i < 4) beams.push_back(*memory.back());
    if (i < 4) run_conversation(beams.back(), streams, 10 + i, 15);
  }
  std::vector<std::vector<index_t>> orders{{2, 0, 0, 3}, {1, 0, 3, 2}, {1, 2, 3, 0}, {0, 1, 2, 3}, {3, 3, 3, 3}};
  for (index_t i = 0; i < 8; ++i)
    orders.push_back({random.integer(0, 3), random.integer(0, 3), random.integer(0, 3), random.integer(0, 3)});
  for (const std::vector<index_t>& order : orders) {
    CAPTURE(order);
    std::vector<Bytes> old;
    for (const auto& b : beams) old.push_back(state_of(b));
    require_ok(reorder_beams<Cache::Type>(beams, order, *memory.back()));
    for (std::size_t i = 0; i < beams.size(); ++i) {
      REQUIRE((state_of(beams[i]) == old[at(order[i])]));
      require_ok(references[i]->load(old[at(order[i])]));
    }
    for (index_t step = 0; step < 12; ++step)
      for (std::size_t i = 0; i < beams.size(); ++i) {
        const LayerTokens tokens = streams.next(beams[i].next_position());
        decode(beams[i], tokens);
        decode(*references[i], tokens);
        REQUIRE(evict_due(beams[i]).layers == evict_due(*references[i]).layers);
      }
    for (std::size_t i = 0; i < beams.size(); ++i) REQUIRE((state_of(beams[i]) == state_of(*references[i])));
  }
}

TEST_CASE("an eviction that fails is reported for the first layer, and the others are done") {
  Random random;
  CAPTURE(random.seed());
  constexpr index_t layers = 4;
  Layers<BeaconKV<>> s(small_beaconkv(), layers, {.sequence = {.workers = 3}});
  LayerStreams streams(random, layers);
  for (position_t p = 0; p < 40; ++p) decode(*s, streams.next(p));
  for (const index_t l : {1, 3}) require_ok(s->policy(l).protect({3, 30 + l}));  // more than the budget
  check_invalid(s->evict_where_due(Workers{3}).status(), {"the budget keeps 24", "34 are protected"});
  for (index_t l = 0; l < layers; ++l) REQUIRE(s->cache(l).num_tokens() == (l % 2 == 0 ? 24 : 40));
}

TEST_CASE("staggered layers evict equally often, at most so many at once, and within their room") {
  Random random;
  CAPTURE(random.seed());
  for_each_policy([&](const char* name, const auto& policy) {
    using PolicyT = std::decay_t<decltype(policy)>;
    constexpr index_t layers = 5;
    for (index_t most = 1; most <= layers; ++most) {
      CAPTURE(name, most);
      Layers<PolicyT> s(policy, layers, {.sequence = {.layers_per_step = most}});
      LayerStreams streams(random, layers);
      const index_t turn = (layers + most - 1) / most;  // steps until every layer has had its turn
      std::vector<index_t> evictions(at(layers));
      const auto step = [&] {
        std::vector<index_t> before;
        for (index_t l = 0; l < layers; ++l) before.push_back(s->cache(l).num_tokens());
        const SequenceReport report = evict_due(*s);
        REQUIRE(report.layers <= most);
        index_t changed = 0;
        index_t gone = 0;
        for (index_t l = 0; l < layers; ++l) {
          const index_t lost = before[at(l)] - s->cache(l).num_tokens();
          gone += lost;
          changed += lost > 0 ? 1 : 0;
          evictions[at(l)] += lost > 0 ? 1 : 0;
        }
        REQUIRE(report.evicted == gone);
        REQUIRE(report.layers == changed);
        if (report.layers == 0)
          REQUIRE(report.unchanged_prefix == *std::max_element(before.begin(), before.end()));
        else
          REQUIRE(report.unchanged_prefix < small_budget);
      };
      prefill(*s, streams.next(0, 34));
      step();
      for (position_t p = 34; p < 154; ++p) {
        decode(*s, streams.next(p));
        step();
        if (p < 34 + turn) continue;
        for (index_t l = 0; l < layers; ++l) REQUIRE(s->cache(l).num_tokens() < small_budget + 8 + turn);
      }
      const auto [least, largest] = std::minmax_element(evictions.begin(), evictions.end());
      REQUIRE(*least >= 10);
      REQUIRE(*largest - *least <= 1);
    }
  });
}

TEST_CASE("a layer that waits for its turn is remembered by forks and saved bytes, and forgotten where eviction is off") {
  Random random;
  CAPTURE(random.seed());
  const LayersOptions options{.sequence = {.layers_per_step = 1}};
  Layers<SnapKV<>> s(small_snapkv(), 3, options);
  Layers<SnapKV<>> fork(small_snapkv(), 3, options);
  Layers<SnapKV<>> loaded(small_snapkv(), 3, options);
  Layers<SnapKV<>> off(small_snapkv(), 3, options);
  LayerStreams streams(random, 3);
  prefill(*s, streams.next(0, 30));  // fewer than the interval above the budget: due after the prompt only
  REQUIRE(evict_due(*s).layers == 1);
  const Bytes saved = state_of(*s);
  require_ok(fork->copy_from(*s));
  require_ok(loaded->load(saved));
  require_ok(off->copy_from(*s));
  for (index_t l = 0; l < 3; ++l) off->policy(l).set_eviction(false);
  const LayerTokens tokens = streams.next(30);
  for (Layers<SnapKV<>>* one : {&s, &fork, &loaded}) {
    decode(**one, tokens);
    REQUIRE(evict_due(**one).layers == 1);
    REQUIRE((*one)->cache(1).num_tokens() == small_budget);
    REQUIRE((*one)->cache(2).num_tokens() == 31);
  }
  REQUIRE((state_of(*fork) == state_of(*s)));
  REQUIRE((state_of(*loaded) == state_of(*s)));
  decode(*off, tokens);
  REQUIRE(evict_due(*off).layers == 0);
  for (index_t l = 0; l < 3; ++l) off->policy(l).set_eviction(true);
  REQUIRE(evict_due(*off).layers == 0);
}

TEST_CASE("one set for all layers is what the layers' scores come to together") {
  // `evict` and `plan` refuse such a cache when they are compiled, by a static_assert in their bodies: no concept to test.
  Random random;
  CAPTURE(random.seed());
  constexpr index_t layers = 3;
  for (const Reduce how : {Reduce::mean, Reduce::max, Reduce::sum})
    for_each_policy([&](const char* name, const auto& policy) {
      CAPTURE(name, static_cast<int>(how));
      using PolicyT = std::decay_t<decltype(policy)>;
      Layers<PolicyT, float, float16, Granularity::per_sequence> s(policy, layers, {.sequence = {.over_layers = how}});
      LayerStreams streams(random, layers);
      prefill(*s, streams.next(0, 20));
      index_t evictions = 0;
      for (position_t p = 20; p < 60; ++p) {
        decode(*s, streams.next(p));
        const index_t n = s->cache(0).num_tokens();
        std::vector<float> together;
        std::vector<std::vector<position_t>> positions(at(layers));
        for (index_t l = 0; l < layers; ++l) {
          std::vector<float> flat(at(2 * n));
          static_cast<void>(require_value(s->policy(l).score(s->cache(l), {flat.data(), 2, n}, s->workspace())));
          for (index_t j = 0; j < n; ++j) {
            const float own = (flat[at(j)] + flat[at(n + j)]) / 2.0F;
            if (l == 0)
              together.push_back(own);
            else
              together[at(j)] = how == Reduce::max ? std::max(together[at(j)], own) : together[at(j)] + own;
          }
        }
        if (how == Reduce::mean)
          for (float& x : together) x *= 1.0F / static_cast<float>(layers);
        const bool due = s->policy(0).due(s->cache(0));
        const index_t recent = std::string_view(name) == "RecentWindow" ? 0 : 4;
        const std::span<const float> open = std::span(together).subspan(2, at(n - 2 - recent));
        std::vector<position_t> want;
        std::vector<float> want_scores;
        const std::vector<slot_t> best = reference::top_k({open.begin(), open.end()}, small_budget - 2 - recent);
        for (slot_t j = 0; j < static_cast<slot_t>(n); ++j) {
          const bool candidate = j >= 2 && j < static_cast<slot_t>(n - recent);
          if (candidate && !std::binary_search(best.begin(), best.end(), j - 2)) continue;
          want.push_back(s->cache(0).position(0, j));
          want_scores.push_back(candidate ? together[at(j)] : 0.0F);
        }
        const SequenceReport report = evict_due(*s);
        REQUIRE(report.layers == (due ? layers : 0));
        if (!due) {
          REQUIRE(report.unchanged_prefix == n);
          continue;
        }
        ++evictions;
        REQUIRE(report.evicted == layers * (n - small_budget));
        REQUIRE(same_bits(s->workspace().plan().kept_scores(0), want_scores));
        for (index_t l = 0; l < layers; ++l) {
          REQUIRE(s->cache(l).num_tokens() == small_budget);
          for (index_t j = 0; j < small_budget; ++j) REQUIRE(s->cache(l).position(1, j) == want[at(j)]);
        }
      }
      REQUIRE(evictions >= 3);
    });
}

TEST_CASE("layers that keep one set refuse together, before one of them has evicted") {
  Random random;
  CAPTURE(random.seed());
  using One = Layers<BeaconKV<>, float, float, Granularity::per_sequence>;
  LayerStreams streams(random, 2);
  {
    One s(small_beaconkv(), 2);
    for (position_t p = 0; p < 34; ++p) decode(*s, streams.next(p));
    require_ok(s->cache(1).set_pinned_prefix(20));  // more than the plan leaves alone
    const Bytes before = state_of(*s);
    check_invalid(s->evict_where_due().status(), {"pinned prefix of 20"});
    REQUIRE((state_of(*s) == before));
    require_ok(s->cache(1).set_pinned_prefix(0));
    REQUIRE(evict_due(*s).layers == 2);

    require_ok(s->cache(1).append(34));
    check_error(s->evict_where_due().status(), StatusCode::out_of_order, {"layer 1 holds 25", "24"});
  }
  {
    One s(small_beaconkv(), 2, {.capacity = 40});
    std::vector<BeaconKV<>> policies(2, small_beaconkv());
    auto small = require_value(One::Type::make(policies, {s->cache(0), s->cache(1)}, {.capacity = 20}));
    for (position_t p = 0; p < 40; ++p) decode(small, streams.next(p));
    check_error(small.evict_where_due().status(), StatusCode::workspace_too_small, {"workspace"});
    check_error(One::Type::make(policies, {s->cache(0), s->cache(1)}, {.capacity = 20, .layers_per_step = 1}).status(),
                StatusCode::unsupported, {"layers_per_step = 1"});
  }
}

TEST_CASE("an eviction whose keys cannot be turned is refused as a whole, in one layer and in all that keep one set") {
  Random random;
  CAPTURE(random.seed());
  LayerStreams streams(random, 2);
  {
    Layers<BeaconKV<>> s(small_beaconkv(), 2, {.mode = PositionMode::cache_relative});
    for (position_t p = 0; p < 34; ++p) decode(*s, streams.next(p));
    s->cache(1).set_rotary_position(0, 0, 5);
    require_ok(s->cache(1).set_pinned_prefix(1));
    const index_t before = s->cache(1).num_tokens();
    check_error(s->evict_where_due().status(), StatusCode::unsupported, {"slot 0", "pinned prefix of 1"});
    REQUIRE(s->cache(0).num_tokens() < before);  // a layer of its own
    REQUIRE(s->cache(1).num_tokens() == before);
    s->cache(1).set_rotary_position(0, 0, 0);
    REQUIRE(evict_due(*s).layers == 1);
    REQUIRE(s->cache(1).num_tokens() == s->cache(0).num_tokens());
    REQUIRE(s->cache(1).next_rotary_position() == s->cache(1).num_tokens());
  }
  {
    Layers<BeaconKV<>, float, float, Granularity::per_sequence> s(small_beaconkv(), 2, {.mode = PositionMode::cache_relative});
    for (position_t p = 0; p < 34; ++p) decode(*s, streams.next(p));
    s->cache(1).set_rotary_position(0, 0, 5);
    require_ok(s->cache(1).set_pinned_prefix(1));
    const Bytes before = state_of(*s);
    check_error(s->evict_where_due().status(), StatusCode::unsupported, {"slot 0", "pinned prefix of 1"});
    REQUIRE((state_of(*s) == before));
  }
}

TEST_CASE("[H-2] global layers have policies, windowed and recurrent ones are not touched", "[H-2]") {
  Random random;
  CAPTURE(random.seed());
  using enum LayerKind;
  const SequenceOptions kinds{.kinds = {global, windowed, recurrent, global}};
  Layers<BeaconKV<>> s(small_beaconkv(), 2, {.sequence = kinds});
  OwningCache<float> window(small_shape, 64);  // the engine's own
  REQUIRE(s->num_layers() == 2);
  REQUIRE(s->model_layer(0) == 0);
  REQUIRE(s->model_layer(1) == 3);
  const bool covered[] = {true, false, false, true};
  for (index_t m = 0; m < 4; ++m) REQUIRE(s->covers(m) == covered[m]);
  REQUIRE_FALSE(s->covers(-1));
  REQUIRE_FALSE(s->covers(4));
  LayerStreams streams(random, 2);
  for (position_t p = 0; p < 40; ++p) {
    const LayerTokens tokens = streams.next(p);
    decode(*s, tokens);
    require_ok(window.append(tokens[0].keys, tokens[0].values, p));
  }
  const std::uint64_t epoch = window.view().epoch();
  REQUIRE(evict_due(*s).layers == 2);
  REQUIRE(window.view().epoch() == epoch);
  REQUIRE(window.view().num_tokens() == 40);

  std::vector<BeaconKV<>> policies(2, small_beaconkv());
  const auto refused = [&](std::vector<LayerKind> k) {
    return Sequence<BeaconKV<>, PlaneCache<float>>::make(policies, {s->cache(0), s->cache(1)}, {.kinds = std::move(k)})
        .status();
  };
  check_invalid(refused({global, windowed}), {"kinds has 1 global", "2 policies"});
  check_invalid(refused({global, global, recurrent, global}), {"kinds has 3 global", "2 policies"});
  check_invalid(refused({windowed}), {"kinds has 0 global"});
  Layers<BeaconKV<>> all(small_beaconkv(), 2);
  REQUIRE(all->model_layer(1) == 1);
  REQUIRE(all->covers(1));
  REQUIRE_FALSE(all->covers(2));
}

TEST_CASE("[B6] the next position is what was seen, not what a layer still holds", "[B6]") {
  Random random;
  CAPTURE(random.seed());
  const BeaconKV<> never(small_shape, {.budget = {.max = 1000}, .n_recent_kv = 4}, small_rope());
  Layers<BeaconKV<>> s(never, 2, {.capacity = 400});
  LayerStreams streams(random, 2);
  for (position_t p = 0; p < 400; ++p) decode(*s, streams.next(p));
  s->cache(0).truncate(0);
  REQUIRE(s->cache(0).num_tokens() == 0);
  REQUIRE(s->next_position() == 400);
  s->cache(1).truncate(0);
  REQUIRE(s->next_position() == 400);
}

TEST_CASE("[G4] sequences of a batch know nothing of each other", "[G4]") {
  Random random;
  CAPTURE(random.seed());
  for_each_policy([&](const char* name, const auto& policy) {
    INFO(name);
    using PolicyT = std::decay_t<decltype(policy)>;
    std::vector<Layers<PolicyT>> batch;
    for (index_t i = 0; i < 4; ++i) batch.emplace_back(policy, 2);
    LayerStreams streams(random, 2);
    LayerStreams others(random, 2);
    for (position_t p = 0; p < 70; ++p) {
      const LayerTokens tokens = streams.next(p);
      const LayerTokens other = others.next(p);
      decode(*batch[0], tokens);
      decode(*batch[1], tokens);
      decode(*batch[2], other);
      if (p % 2 == 0)
        for (std::size_t i = 0; i < 3; ++i) static_cast<void>(evict_due(*batch[i]));
      else
        for (std::size_t i = 3; i-- > 0;) static_cast<void>(evict_due(*batch[i]));
      decode(*batch[3], tokens);  // alone
      static_cast<void>(evict_due(*batch[3]));
    }
    REQUIRE((state_of(*batch[0]) == state_of(*batch[1])));
    REQUIRE((state_of(*batch[0]) == state_of(*batch[3])));
    REQUIRE((state_of(*batch[0]) != state_of(*batch[2])));
    REQUIRE(batch[0]->cache(0).num_tokens() < 40);
  });
}

TEST_CASE("a prompt in chunks is the same prompt, but for beacons, which are reduced once a chunk") {
  Random random;
  CAPTURE(random.seed());
  for_each_policy([&](const char* name, const auto& policy) {
    using PolicyT = std::decay_t<decltype(policy)>;
    const bool beacons = std::string_view(name).starts_with("BeaconKV");
    LayerStreams streams(random, 2);
    for (const index_t length : {1, 4, 5, 6, 23, 40}) {
      const std::vector<LayerTokens> prompt = streams.next(0, length);
      Layers<PolicyT> whole(policy, 2);
      prefill(*whole, prompt);
      const Bytes expected = state_of(*whole);
      for (const index_t chunk : {1, 2, 3, 5, 7, 39, 40, 0}) {
        CAPTURE(name, length, chunk);
        Layers<PolicyT> parts(policy, 2);
        for (index_t i = 0; i < length;) {
          const index_t count = std::min(length - i, chunk > 0 ? chunk : random.integer(1, 9));
          prefill(*parts, std::span(prompt).subspan(at(i), at(count)));
          i += count;
        }
        if (!beacons || chunk >= length) {
          REQUIRE((state_of(*parts) == expected));
        } else {
          for (index_t l = 0; l < 2; ++l) {
            REQUIRE(parts->policy(l).observer().rows() == whole->policy(l).observer().rows());
            REQUIRE(parts->policy(l).state_bytes() == whole->policy(l).state_bytes());
            REQUIRE(parts->policy(l).next_position() == length);
            REQUIRE(parts->policy(l).prefix() == whole->policy(l).prefix());
            REQUIRE(parts->cache(l).num_tokens() == length);
          }
        }
      }
    }
  });
}

TEST_CASE("nothing allocates once sequences exist: not decoding, drafting, evicting, forking", "[allocation]") {
  Random random;
  CAPTURE(random.seed());
  for_each_policy([&](const char* name, const auto& policy) {
    if (std::string_view(name) == "RKV, published order") return;  // says that it allocates at commits
    INFO(name);
    using PolicyT = std::decay_t<decltype(policy)>;
    constexpr index_t layers = 3;
    const LayersOptions options{.sequence = {.max_draft_tokens = 3, .layers_per_step = 2}};
    Layers<PolicyT> s(policy, layers, options);
    Layers<PolicyT> fork(policy, layers, options);
    Layers<PolicyT, float16, float16, Granularity::per_sequence> one(policy, layers, {.sequence = {.max_draft_tokens = 3}});
    LayerStreams streams(random, layers);
    const std::vector<LayerTokens> tokens = streams.next(0, 90);
    bool ok = true;
    index_t evictions = 0;
    const auto run = [&](auto& sequence) {
      for (std::size_t i = 0; i < tokens.size() && ok; i += 3) {
        for (std::size_t d = 0; d < 3; ++d)
          for (index_t l = 0; l < layers; ++l) {
            const Token& t = tokens[i + d][at(l)];
            ok = ok && try_append(sequence, l, t).ok();
            ok = ok &&
                 (d == 0 ? sequence.policy(l).observe(t.queries, t.position) : sequence.observe_draft(l, t.queries, t.position))
                     .ok();
          }
        ok = ok && sequence.accept(i % 2 == 0 ? 2 : 1).ok();
        if (const auto report = sequence.evict_where_due(); report)
          evictions += report->layers;
        else
          ok = false;
        if (i % 2 != 0)  // the draft that was taken back comes again
          for (index_t l = 0; l < layers; ++l) {
            const Token& t = tokens[i + 2][at(l)];
            ok = ok && try_append(sequence, l, t).ok() && sequence.policy(l).observe(t.queries, t.position).ok();
          }
      }
    };
    REQUIRE(allocations_of([&] { run(*s); }) == 0);
    REQUIRE(ok);
    REQUIRE(evictions > 5);
    REQUIRE(allocations_of([&] { ok = fork->copy_from(*s).ok(); }) == 0);
    REQUIRE(ok);
    REQUIRE((state_of(*fork) == state_of(*s)));
    REQUIRE(allocations_of([&] { run(*one); }) == 0);
    REQUIRE(ok);
  });
}

TEST_CASE("a sequence that was loaded allocates no more than one that was made", "[allocation]") {
  Random random;
  CAPTURE(random.seed());
  Layers<BeaconKV<>> s(small_beaconkv(), 2);
  Layers<BeaconKV<>> other(small_beaconkv(), 2);
  LayerStreams streams(random, 2);
  run_conversation(*s, streams, 10, 21);
  require_ok(other->load(state_of(*s)));
  decode(*other, streams.next(31));
  bool ok = false;
  REQUIRE(allocations_of([&] { ok = other->evict_where_due().ok(); }) == 0);
  REQUIRE(ok);
  REQUIRE(other->cache(0).num_tokens() == small_budget);
}
