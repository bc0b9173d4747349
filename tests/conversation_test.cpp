// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

// A model in conversation under each policy: whatever happens in between, the text is that of an undisturbed conversation, and
// the memory holds the same bits.

#include "conversation/script.hpp"

#include <algorithm>

#include "support/catch.hpp"

namespace {

using namespace beaconkv;
using namespace beaconkv::conversation;

const std::filesystem::path folder = std::filesystem::path(BEACONKV_SOURCE_DIR) / "examples/models/reasoner";
constexpr index_t capacity = 400;

const engine::Model& model() {
  static const engine::Model loaded = engine::Model::load(folder).or_throw();
  return loaded;
}

/// Small budgets beside the problem (150 tokens), so that every turn evicts often.
template <class F>
void for_each_policy(F&& f) {
  const Shape& shape = model().shape();
  const RopeTable& rope = model().rope();
  f("BeaconKV", BeaconKV<>(shape, {.budget = {.max = 64}, .n_beacon = 28, .n_recent_queries = 4, .n_recent_kv = 8}, rope));
  f("RKV", RKV<>(shape, {.budget = {.tokens = 214, .interval = 16}, .n_prefix = 150}, rope));
  f("RKV, published order",
    RKV<>(shape, {.budget = {.tokens = 214, .interval = 16}, .n_prefix = 150, .order = RKVOrder::published}, rope));
  f("SnapKV",
    SnapKV<>(shape, {.budget = {.tokens = 230, .interval = 12}, .n_recent_queries = 16, .n_recent_kv = 16, .n_prefix = 150},
             rope));
  f("RPC", RPC<>(shape, {.budget = {.period = 32, .ratio = 4}, .n_recent_queries = 8, .n_recent_kv = 8}, rope));
  f("RecentWindow", RecentWindow<>(shape, {.budget = {.max = 64}}));
}

/// All that a conversation has come to: rows and positions of every layer, and what the policies remember.
template <class Policy>
[[nodiscard]] std::vector<std::byte> state_of(const Talk<Policy>& talk) {
  std::vector<std::byte> bytes;
  talk.layers().save(bytes).or_throw();
  return bytes;
}

}  // namespace

TEST_CASE("A conversation with fork, rollback, save and load writes the same tokens", "[conversation]") {
  const std::vector<Turn> turns = three_turns(folder);
  REQUIRE(turns.size() == 3);
  for_each_policy([&](const char* name, const auto& policy) {
    using Policy = std::decay_t<decltype(policy)>;
    const auto make = [&](index_t rows) { return Talk<Policy>(model(), policy, rows); };
    std::vector<TurnReport> expected;
    std::vector<std::vector<std::byte>> states;  // behind each turn
    {
      std::optional<Talk<Policy>> plain(make(capacity));
      for (const Turn& turn : turns) {
        expected.push_back(take_turn(plain, turn, {}, make));
        states.push_back(state_of(*plain));
      }
    }
    const auto disturbed = [&](const char* what, const Extras& extras) {
      CAPTURE(name, what);
      std::optional<Talk<Policy>> talk(make(capacity));
      index_t right = 0;
      index_t wrong = 0;
      for (std::size_t i = 0; i < turns.size(); ++i) {
        CAPTURE(i);
        const TurnReport report = take_turn(talk, turns[i], extras, make);
        REQUIRE(report.text == expected[i].text);
        REQUIRE(report.evictions == expected[i].evictions);
        REQUIRE(state_of(*talk) == states[i]);
        REQUIRE(report.evictions > 2 * model().layers());
        REQUIRE((report.evictions_of_fork > 0) == extras.fork);
        REQUIRE((report.saved_bytes > 0) == extras.reload);
        right += report.drafts - report.taken_back;
        wrong += report.taken_back;
      }
      REQUIRE((right > 0) == extras.drafts);
      REQUIRE((wrong > 0) == extras.drafts);
      REQUIRE(talk->capacity() == capacity + (extras.reload ? 3 * 37 : 0));
    };
    disturbed("all of it", {.fork = true, .drafts = true, .reload = true});
    if (std::is_same_v<Policy, BeaconKV<>>) {  // one by one, to see what it is if it fails
      disturbed("fork", {.fork = true});
      disturbed("drafts", {.drafts = true});
      disturbed("saved and loaded", {.reload = true});
    }
  });
}

TEST_CASE("A fork writes what the original writes, and neither hears the other", "[conversation]") {
  const std::vector<Turn> turns = three_turns(folder);
  for_each_policy([&](const char* name, const auto& policy) {
    using Policy = std::decay_t<decltype(policy)>;
    CAPTURE(name);
    Talk<Policy> original(model(), policy, capacity);
    Talk<Policy> alone(model(), policy, capacity);
    Talk<Policy> fork(model(), policy, capacity + 100);
    for (Talk<Policy>* talk : {&original, &alone}) {
      talk->read(turns[0].said);
      for (int i = 0; i < 60; ++i) static_cast<void>(talk->write());
    }
    fork.fork_from(original);
    REQUIRE(state_of(fork) == state_of(original));
    fork.read(turns[1].said);  // now they hear different things
    for (int i = 0; i < 60; ++i) REQUIRE(original.write() == alone.write());
    REQUIRE(state_of(original) == state_of(alone));
    REQUIRE(state_of(original) != state_of(fork));

    fork.fork_from(original);
    for (int i = 0; i < 60; ++i) REQUIRE(fork.write() == original.write());
    REQUIRE(state_of(fork) == state_of(original));
  });
}

TEST_CASE("With the full cache the model makes no mistake in any turn", "[conversation]") {
  const std::vector<Turn> turns = three_turns(folder);
  const RecentWindow<> never(model().shape(), {.budget = {.max = 100000}});
  const auto make = [&](index_t rows) { return Talk<RecentWindow<>>(model(), never, rows); };
  std::optional<Talk<RecentWindow<>>> talk(make(1000));
  for (const Turn& turn : turns) {
    const TurnReport report = take_turn(talk, turn, {}, make);
    CHECK(report.text == turn.right);
    CHECK(report.evictions == 0);
  }
}

TEST_CASE("A second prompt into a full cache: positions stay true, and the budget holds again", "[conversation]") {
  const std::vector<Turn> turns = three_turns(folder);
  const BeaconKV<> policy(model().shape(), {.budget = {.max = 64}, .n_recent_queries = 4, .n_recent_kv = 8}, model().rope());
  Talk<BeaconKV<>> talk(model(), policy, capacity);
  talk.read(turns[0].said);
  while (talk.layers().cache(0).num_tokens() < 150 + 63) static_cast<void>(talk.write());
  const position_t before = talk.layers().next_position();
  talk.read(turns[1].said);
  REQUIRE(talk.layers().next_position() == before + std::ssize(turns[1].said));
  for (index_t l = 0; l < talk.layers().num_layers(); ++l) {
    const PlaneCache<float>& cache = talk.layers().cache(l);
    REQUIRE(cache.num_tokens() < 150 + 64);
    for (index_t h = 0; h < cache.num_kv_heads(); ++h) {
      for (index_t s = 0; s < 150; ++s) REQUIRE(cache.position(h, s) == s);  // the first prompt stays whole
      for (index_t s = 1; s <= 8; ++s) REQUIRE(cache.position(h, cache.num_tokens() - s) == talk.layers().next_position() - s);
    }
  }
}

TEST_CASE("The layer that is due first says how many drafts fit", "[conversation]") {
  const Shape shape{.query_heads = 1, .kv_heads = 1, .head_dim = 2};
  std::vector<RecentWindow<>> policies;
  std::vector<PlaneCache<float>> caches;
  std::vector<float> memory(64);
  for (const index_t max : {16, 10, 1000}) {
    policies.emplace_back(shape, RecentWindowOptions<>{.budget = {.max = max}});
    caches.push_back(PlaneCache<float>::head_major(memory.data(), memory.data(), shape, 32));
  }
  auto layers = Sequence<RecentWindow<>, PlaneCache<float>>::make(policies, caches, {.capacity = 32}).or_throw();
  for (position_t t = 0; t < 10; ++t) {
    CHECK(layers.tokens_until_due(20) == 10 - t);
    CHECK(layers.tokens_until_due(3) == std::min<index_t>(3, 10 - t));
    for (index_t l = 0; l < 3; ++l) {
      REQUIRE(layers.cache(l).append(t).ok());
      REQUIRE(layers.policy(l).observe({}, t).ok());
    }
  }
  CHECK(layers.tokens_until_due(20) == 0);
  layers.policy(1).set_eviction(false);
  CHECK(layers.tokens_until_due(20) == 6);
}
