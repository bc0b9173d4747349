// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "beaconkv/memory/plane_cache.hpp"

#include <malloc.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "beaconkv/memory/compact.hpp"
#include "beaconkv/memory/owning_cache.hpp"
#include "support/check.hpp"
#include "support/layouts.hpp"

namespace {

using namespace beaconkv;
using namespace beaconkv::test;
using Slots = std::vector<slot_t>;
using Positions = std::vector<position_t>;

template <class KeyType, class ValueType, Granularity G>
struct Config {
  using K = KeyType;
  using V = ValueType;
  static constexpr Granularity granularity = G;
};
using Floats = Config<float, float, Granularity::per_head>;
using Halves = Config<float16, bfloat16, Granularity::per_head>;
using SharedMixed = Config<bfloat16, float, Granularity::per_layer>;
using SharedFloats = Config<float, float16, Granularity::per_layer>;

template <class T>
T any_bits(Random& random) {
  std::array<std::uint8_t, sizeof(T)> bytes;
  for (std::uint8_t& b : bytes) b = static_cast<std::uint8_t>(random.bits());
  return std::bit_cast<T>(bytes);
}

template <class T>
std::vector<T> any_row(index_t dim, Random& random) {
  std::vector<T> row;
  for (index_t d = 0; d < dim / numbers_per_element<T>; ++d) row.push_back(any_bits<T>(random));
  return row;
}

template <class T>
bool same_bytes(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

/// Fills every slot of the cache with any bits, NaN payloads included, and appends `tokens` of them at rising positions.
template <class Cache>
void fill(Cache& c, index_t tokens, Random& random) {
  for (index_t h = 0; h < c.cache.num_kv_heads(); ++h)
    for (index_t t = 0; t < c.cache.capacity(); ++t) {
      c.keys.set_row(h, t, any_row<std::decay_t<decltype(c.keys.memory()[0])>>(c.cache.key_dim(), random));
      c.values.set_row(h, t, any_row<std::decay_t<decltype(c.values.memory()[0])>>(c.cache.value_dim(), random));
    }
  for (index_t t = 0; t < tokens; ++t) c.cache.append(c.cache.next_position() + random.integer(0, 2)).or_throw();
}

template <class Cache>
Positions positions(const Cache& cache, index_t head) {
  Positions out;
  for (index_t s = 0; s < cache.num_tokens(); ++s) out.push_back(cache.position(head, s));
  return out;
}

template <class Cache>
KeepPlan plan_for(const Cache& cache, const std::vector<Slots>& sets) {
  KeepPlan plan;
  const std::vector<std::span<const slot_t>> spans(sets.begin(), sets.end());
  plan.assign(cache, spans).or_throw();
  return plan;
}

TEMPLATE_TEST_CASE("Compaction is a gather, bit for bit, in every layout", "", Floats, Halves, SharedMixed, SharedFloats) {
  using K = typename TestType::K;
  using V = typename TestType::V;
  Random random;
  CAPTURE(random.seed());
  for (const Layout layout : all_layouts)
    for (const index_t heads : {1, 2, 4, 7})
      for (index_t round = 0; round < 4; ++round) {
        constexpr index_t capacity = 24;
        const index_t key_dim = random.integer(1, 9);
        const index_t value_dim = random.integer(1, 9);
        const index_t tokens = random.integer(1, capacity);
        const index_t kept = random.integer(0, tokens);
        CAPTURE(static_cast<int>(layout), heads, key_dim, value_dim, tokens, kept, round);
        LayoutCache<K, V, TestType::granularity> c(layout, heads, key_dim, value_dim, capacity, random);
        fill(c, tokens, random);

        const bool one_set = TestType::granularity == Granularity::per_layer || random.coin();
        std::vector<Slots> sets;
        for (index_t s = 0; s < (one_set ? 1 : heads); ++s) sets.push_back(random.subset(kept, tokens));
        std::vector<std::vector<K>> keys;
        std::vector<std::vector<V>> values;
        Positions expected;
        for (index_t h = 0; h < heads; ++h)
          for (const slot_t slot : sets[one_set ? 0 : static_cast<std::size_t>(h)]) {
            keys.push_back(c.keys.row(h, slot));
            values.push_back(c.values.row(h, slot));
            expected.push_back(c.cache.position(h, slot));
          }
        const position_t next = c.cache.next_position();

        REQUIRE(compact(c.cache, plan_for(c.cache, sets)).ok());
        REQUIRE(c.cache.num_tokens() == kept);
        REQUIRE(c.cache.next_position() == next);
        bool same = true;
        std::size_t row = 0;
        for (index_t h = 0; h < heads; ++h)
          for (index_t s = 0; s < kept; ++s, ++row)
            same = same && same_bytes(c.keys.row(h, s), keys[row]) && same_bytes(c.values.row(h, s), values[row]) &&
                   c.cache.position(h, s) == expected[row];
        REQUIRE(same);
        REQUIRE(c.keys.fillers_untouched());
        REQUIRE(c.values.fillers_untouched());
      }
}

TEMPLATE_TEST_CASE("Tiles of rows are the decoded rows in every layout", "", Floats, Halves, SharedMixed, SharedFloats) {
  using K = typename TestType::K;
  using V = typename TestType::V;
  Random random;
  CAPTURE(random.seed());
  for (const Layout layout : all_layouts)
    for (const index_t dim : {1, 7, 8, 9}) {
      constexpr index_t heads = 3;
      constexpr index_t capacity = 12;
      LayoutCache<K, V, TestType::granularity> c(layout, heads, dim, dim + 2, capacity, random);
      for (index_t t = 0; t < capacity; ++t) c.append(random.normals(heads * dim), random.normals(heads * (dim + 2)), t);
      for (index_t h = 0; h < heads; ++h)
        for (index_t first = 0; first <= capacity; ++first)
          for (index_t count = 0; count <= capacity - first; ++count) {
            CAPTURE(static_cast<int>(layout), dim, h, first, count);
            const auto check = [&](const auto& plane, const ConstRows& rows, const std::vector<float>& scratch) {
              using T = std::decay_t<decltype(plane.memory()[0])>;
              const index_t d = plane.plane().dim;
              bool right = rows.rows == count && rows.dim == d;
              for (index_t i = 0; i < count && right; ++i) {
                const std::vector<T> stored = plane.row(h, first + i);
                for (index_t at = 0; at < d; ++at)
                  right = right && bits_of(rows.row(i)[at]) == bits_of(decode(stored[static_cast<std::size_t>(at)]));
              }
              REQUIRE(right);
              // Floats with unit stride that lie evenly apart are not copied.
              const index_t page = LayoutPlane<T>::page_size;
              const bool one_page = layout != Layout::paged || count == 0 || first / page == (first + count - 1) / page;
              const bool direct = std::is_same_v<T, float> && layout != Layout::transposed && one_page && count > 0;
              if (count > 0) REQUIRE((rows.data != scratch.data()) == direct);
              for (std::size_t i = direct ? 0 : static_cast<std::size_t>(count * d); i < scratch.size(); ++i)
                if (scratch[i] != -1.0F) FAIL("scratch was written at " << i);
            };
            std::vector<float> scratch(static_cast<std::size_t>(count * dim) + 4, -1.0F);
            check(c.keys, c.cache.keys(h, first, count, scratch.data()), scratch);
            std::vector<float> value_scratch(static_cast<std::size_t>(count * (dim + 2)) + 4, -1.0F);
            check(c.values, c.cache.values(h, first, count, value_scratch.data()), value_scratch);
          }
    }
}

TEST_CASE("Keys and values interleaved in one row move without touching each other") {
  // [token][head][K, V][dim] with padded rows, one memory for both.
  constexpr index_t heads = 2;
  constexpr index_t dim = 3;
  constexpr index_t tokens = 5;
  constexpr index_t row = heads * 2 * dim + 4;
  std::vector<float16> memory(static_cast<std::size_t>(tokens * row));
  for (std::size_t i = 0; i < memory.size(); ++i) memory[i].bits = static_cast<std::uint16_t>(i);
  const std::vector<float16> before = memory;
  const Plane<float16> keys{memory.data(), {0, 2 * dim, row, 1}, heads, dim, tokens, 0, nullptr};
  Plane<float16> values = keys;
  values.base += dim;
  auto cache = PlaneCache<float16>::make(keys, values).or_throw();
  cache.append_run(0, tokens).or_throw();

  compact(cache, plan_for(cache, {{1, 2, 4}, {0, 3, 4}})).or_throw();
  const index_t from[heads][3] = {{1, 2, 4}, {0, 3, 4}};
  for (index_t t = 0; t < tokens; ++t)
    for (index_t at = 0; at < row; ++at) {
      const index_t head = at / (2 * dim);
      const index_t source = head < heads && t < 3 ? from[head][t] : t;
      CAPTURE(t, at);
      REQUIRE(memory[static_cast<std::size_t>(t * row + at)] == before[static_cast<std::size_t>(source * row + at)]);
    }
}

TEST_CASE("[B1] the next position comes from what was appended, not from what is left", "[B1]") {
  OwningCache<float> memory({.query_heads = 2, .kv_heads = 2, .head_dim = 1}, 300);
  auto& cache = memory.view();
  cache.append_run(0, 300).or_throw();
  Slots kept;
  for (slot_t s = 0; s < 300; ++s)
    if (s < 28 || s >= 200) kept.push_back(s);
  compact(cache, plan_for(cache, {kept})).or_throw();
  CHECK(cache.num_tokens() == 128);
  CHECK(cache.next_position() == 300);
  for (const index_t head : {0, 1}) {
    const Positions held = positions(cache, head);
    CHECK(std::is_sorted(held.begin(), held.end(), std::less_equal<>()));
    CHECK(held.back() == 299);
    CHECK(held[27] == 27);
    CHECK(held[28] == 200);
  }
  CHECK(cache.append(300).ok());
  CHECK(cache.next_position() == 301);
  CHECK(cache.position(1, 128) == 300);
}

TEST_CASE("[B3] the first decoded token follows the prompt, in position and in slot", "[B3]") {
  OwningCache<float> memory({.query_heads = 1, .kv_heads = 1, .head_dim = 1}, 16);
  auto& cache = memory.view();
  cache.append_run(0, 9).or_throw();
  for (const position_t expected : {9, 10, 11}) {
    CHECK(cache.next_position() == expected);
    CHECK(cache.num_tokens() == expected);  // the slot that the engine writes
    CHECK(cache.append(cache.next_position()).ok());
  }

  OwningCache<float> other({.query_heads = 1, .kv_heads = 1, .head_dim = 1}, 16);
  other.view().append_run(0, 9).or_throw();
  compact(other.view(), plan_for(other.view(), {{0, 1, 2, 6, 7, 8}})).or_throw();
  CHECK(other.view().next_position() == 9);
  CHECK(other.view().num_tokens() == 6);
}

TEST_CASE("[B4] a plan is in original numbers and is applied once", "[B4]") {
  OwningCache<float> memory({.query_heads = 1, .kv_heads = 1, .head_dim = 1}, 9);
  auto& cache = memory.view();
  const std::string letters = "abcdefghj";
  for (std::size_t i = 0; i < letters.size(); ++i) {
    const std::vector<float> letter{static_cast<float>(letters[i])};
    memory.append(letter, letter, static_cast<position_t>(i)).or_throw();
  }
  const KeepPlan plan = plan_for(cache, {{0, 1, 4, 5, 7, 8}});
  compact(cache, plan).or_throw();
  std::string left;
  float scratch[1];
  for (index_t s = 0; s < cache.num_tokens(); ++s) left += static_cast<char>(cache.keys(0, s, 1, scratch).data[0]);
  CHECK(left == "abefhj");
  check_error(compact(cache, plan), StatusCode::stale_plan, {"9 tokens", "now 6"});
  CHECK(cache.num_tokens() == 6);
}

TEST_CASE("[B6] a layer that was trimmed to nothing still knows the next position", "[B6]") {
  OwningCache<float> memory({.query_heads = 1, .kv_heads = 1, .head_dim = 1}, 512);
  memory.view().append_run(0, 400).or_throw();
  memory.view().truncate(0);
  CHECK(memory.view().num_tokens() == 0);
  CHECK(memory.view().next_position() == 400);
}

TEST_CASE("[A7] counts that no cache holds are refused without a change", "[A7]") {
  OwningCache<float> memory({.query_heads = 1, .kv_heads = 1, .head_dim = 1}, 8);
  auto& cache = memory.view();
  cache.append_run(3, 5).or_throw();
  const std::uint64_t epoch = cache.epoch();
  check_error(cache.append_run(8, std::numeric_limits<index_t>::max()), StatusCode::out_of_capacity,
              {"count = 9223372036854775807", "room for 3"});
  check_error(cache.append_run(8, 4), StatusCode::out_of_capacity, {"count = 4", "room for 3", "8 tokens"});
  check_invalid(cache.append_run(8, -1), {"count = -1"});
  check_invalid(cache.append_run(8, std::numeric_limits<index_t>::min()), {"count = -9223372036854775808"});
  check_error(cache.append(7), StatusCode::out_of_order, {"position = 7", "at least 8"});
  check_error(cache.append(-1), StatusCode::out_of_order, {"position = -1", "at least 8"});
  CHECK(cache.num_tokens() == 5);
  CHECK(cache.next_position() == 8);
  CHECK(cache.epoch() == epoch);
  CHECK(positions(cache, 0) == Positions{3, 4, 5, 6, 7});

  CHECK(cache.append_run(8, 0).ok());
  CHECK(cache.epoch() == epoch);
  CHECK(cache.append_run(20, 3).ok());
  CHECK(cache.next_position() == 23);
  check_error(cache.append(23), StatusCode::out_of_capacity, {"room for 0"});
}

TEST_CASE("[A14] [K3] bytes of a token count KV heads, keys and values", "[A14][K3]") {
  float16 memory = {};
  const auto cache_of = [&](index_t heads, index_t dim) {
    return PlaneCache<float16>::make(head_major_plane(&memory, heads, dim, 0), head_major_plane(&memory, heads, dim, 0))
        .or_throw();
  };
  CHECK(cache_of(8, 128).bytes_per_token() == 4096);
  CHECK(cache_of(8, 128).bytes_per_token() * 10 == 40960);
  CHECK((1 << 20) / cache_of(8, 128).bytes_per_token() == 256);
  CHECK(((1 << 20) - 1) / cache_of(8, 128).bytes_per_token() == 255);
  float key = 0;
  const auto mixed =
      PlaneCache<float, float16>::make(head_major_plane(&key, 3, 10, 0), head_major_plane(&memory, 3, 4, 0)).or_throw();
  CHECK(mixed.bytes_per_token() == 3 * (10 * 4 + 4 * 2));
  CHECK(mixed.key_dim() == 10);
  CHECK(mixed.value_dim() == 4);
}

TEST_CASE("Every change of the tokens changes the epoch, and nothing else does") {
  OwningCache<float> memory({.query_heads = 1, .kv_heads = 1, .head_dim = 2}, 8);
  auto& cache = memory.view();
  std::vector<std::uint64_t> epochs{cache.epoch()};
  const auto changed = [&] {
    epochs.push_back(cache.epoch());
    return std::count(epochs.begin(), epochs.end(), epochs.back()) == 1;
  };
  cache.append_run(0, 4).or_throw();
  CHECK(changed());
  cache.append(4).or_throw();
  CHECK(changed());
  compact(cache, plan_for(cache, {{0, 2, 3, 4}})).or_throw();
  CHECK(changed());
  cache.truncate(3);
  CHECK(changed());
  const std::uint64_t epoch = cache.epoch();
  compact(cache, plan_for(cache, {{0, 1, 2}})).or_throw();  // keeps all
  CHECK(cache.epoch() == epoch);
  CHECK(cache.num_tokens() == 3);
  cache.set_pinned_prefix(1).or_throw();
  CHECK(cache.epoch() == epoch);
  OwningCache<float> other = memory;
  CHECK(other.view().epoch() != epoch);
  check_error(compact(other.view(), plan_for(cache, {{0}})), StatusCode::stale_plan, {"another state"});
}

TEST_CASE("[N2] a plan that is older than the cache is refused with nothing changed", "[N2]") {
  Random random;
  CAPTURE(random.seed());
  LayoutCache<float> c(Layout::token_major, 2, 3, 3, 8, random);
  fill(c, 6, random);
  const KeepPlan plan = plan_for(c.cache, {{1, 2, 3}});
  c.cache.append(c.cache.next_position()).or_throw();
  const std::vector<float> keys = c.keys.memory();
  check_error(compact(c.cache, plan), StatusCode::stale_plan, {"6 tokens", "now 7"});
  CHECK(c.cache.num_tokens() == 7);
  CHECK(same_bits(keys, c.keys.memory()));
}

TEST_CASE("Plans that a cache cannot follow are refused with nothing changed") {
  Random random;
  CAPTURE(random.seed());
  LayoutCache<float> c(Layout::head_major, 2, 3, 3, 8, random);
  fill(c, 6, random);
  const std::vector<float> keys = c.keys.memory();
  const std::vector<float> values = c.values.memory();
  const Positions held = positions(c.cache, 0);
  const std::uint64_t epoch = c.cache.epoch();

  check_error(compact(c.cache, plan_for(c.cache, {{0, 1}, {2, 3, 4}})), StatusCode::unsupported,
              {"head 1 keeps 3", "head 0 keeps 2"});
  KeepPlan three;
  three.start(epoch, 6, {0, 6});
  for (index_t s = 0; s < 3; ++s) three.add_set(1, three.tokens_before())[0] = 0;
  check_invalid(compact(c.cache, three), {"3 sets", "2 KV heads"});
  c.cache.set_pinned_prefix(2).or_throw();
  check_invalid(compact(c.cache, plan_for(c.cache, {{0, 1, 4}, {0, 2, 4}})), {"head 1", "prefix of 2"});
  check_invalid(compact(c.cache, plan_for(c.cache, {{0}, {1}})), {"head 0", "prefix of 2"});
  check_invalid(compact(c.cache, plan_for(c.cache, {{1, 2, 3}})), {"head 0", "prefix of 2"});
  c.cache.set_pinned_prefix(1).or_throw();
  check_invalid(compact(c.cache, plan_for(c.cache, {{0, 2}, {1, 2}})), {"head 1", "prefix of 1"});
  c.cache.set_pinned_prefix(2).or_throw();
  CHECK(same_bits(keys, c.keys.memory()));
  CHECK(same_bits(values, c.values.memory()));
  CHECK(positions(c.cache, 0) == held);
  CHECK(c.cache.epoch() == epoch);
  CHECK(compact(c.cache, plan_for(c.cache, {{0, 1, 4}, {0, 1, 5}})).ok());
  CHECK(c.cache.pinned_prefix() == 2);

  LayoutCache<float, float, Granularity::per_layer> shared(Layout::head_major, 2, 3, 3, 8, random);
  fill(shared, 6, random);
  check_error(compact(shared.cache, plan_for(shared.cache, {{0, 1}, {2, 3}})), StatusCode::unsupported, {"2 sets"});
  CHECK(shared.cache.num_tokens() == 6);
}

TEST_CASE("[I3] the pinned prefix is a range within the tokens, and shrinks with them", "[I3]") {
  OwningCache<float> memory({.query_heads = 1, .kv_heads = 1, .head_dim = 1}, 8);
  auto& cache = memory.view();
  cache.append_run(0, 5).or_throw();
  check_invalid(cache.set_pinned_prefix(6), {"pinned prefix = 6", "5"});
  check_invalid(cache.set_pinned_prefix(-1), {"pinned prefix = -1"});
  CHECK(cache.pinned_prefix() == 0);
  CHECK(cache.set_pinned_prefix(5).ok());
  cache.truncate(3);
  CHECK(cache.pinned_prefix() == 3);
  CHECK(cache.num_tokens() == 3);
}

TEST_CASE("[I3] the pinned rows may lie in memory that cannot be written", "[I3]") {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  void* const memory = mmap(nullptr, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  REQUIRE(memory != MAP_FAILED);
  auto* const rows = static_cast<float*>(memory);
  const auto pinned = static_cast<slot_t>(page / (16 * sizeof(float)));
  auto cache = PlaneCache<float>::head_major(rows, rows, {1, 1, 16}, 2 * pinned);
  cache.append_run(0, 2 * pinned).or_throw();
  cache.set_pinned_prefix(pinned).or_throw();
  rows[16 * (pinned + 5)] = 5;
  REQUIRE(mprotect(memory, page, PROT_READ) == 0);
  Slots kept;
  for (slot_t s = 0; s < pinned; ++s) kept.push_back(s);
  kept.push_back(pinned + 5);
  CHECK(compact(cache, plan_for(cache, {kept})).ok());
  CHECK(rows[16 * pinned] == 5);
  CHECK(munmap(memory, 2 * page) == 0);
}

TEST_CASE("Behind the kept rows memory is left as it was") {
  Random random;
  CAPTURE(random.seed());
  LayoutCache<float16> c(Layout::padded_rows, 2, 4, 4, 12, random);
  fill(c, 12, random);
  std::vector<std::vector<float16>> before;
  for (index_t t = 0; t < 12; ++t) before.push_back(c.keys.row(1, t));
  compact(c.cache, plan_for(c.cache, {{0, 1, 2, 3, 4, 8, 9}})).or_throw();
  for (index_t t = 0; t < 12; ++t) {
    const auto source = static_cast<std::size_t>(t == 5 ? 8 : (t == 6 ? 9 : t));
    CAPTURE(t);
    CHECK(c.keys.row(1, t) == before[source]);
  }
}

TEMPLATE_TEST_CASE("store_key encodes one row and touches nothing else", "", float, float16, bfloat16) {
  Random random;
  CAPTURE(random.seed());
  for (const Layout layout : all_layouts) {
    LayoutCache<TestType> c(layout, 3, 5, 5, 8, random);
    fill(c, 8, random);
    std::vector<TestType> expected = c.keys.memory();
    const std::vector<TestType> values = c.values.memory();
    const std::vector<float> row = random.normals(5);
    for (index_t d = 0; d < 5; ++d) expected[c.keys.offset(2, 6, d)] = encode<TestType>(row[static_cast<std::size_t>(d)]);
    const std::uint64_t epoch = c.cache.epoch();
    c.cache.store_key(2, 6, row.data());
    CAPTURE(static_cast<int>(layout));
    CHECK(same_bytes(c.keys.memory(), expected));
    CHECK(same_bytes(c.values.memory(), values));
    CHECK(c.cache.epoch() == epoch);
  }
}

TEST_CASE("A cache over planes that do not fit each other is refused") {
  std::vector<float> memory(1000);
  const auto plane = [&](index_t heads, index_t dim, index_t capacity) {
    return head_major_plane(memory.data(), heads, dim, capacity);
  };
  using Cache = PlaneCache<float>;
  check_invalid(Cache::make(plane(2, 3, 5), plane(3, 3, 5)).status(), {"keys.heads = 2", "values.heads = 3"});
  check_invalid(Cache::make(plane(2, 3, 5), plane(2, 3, 6)).status(), {"keys.capacity = 5", "values.capacity = 6"});
  check_invalid(Cache::make(plane(0, 3, 5), plane(2, 3, 5)).status(), {"keys", "heads = 0"});
  check_invalid(Cache::make(plane(2, 3, 5), plane(2, 0, 5)).status(), {"values", "dim = 0"});
  const index_t large = index_t{std::numeric_limits<slot_t>::max()} + 1;
  check_invalid(Cache::make(plane(1, 1, large), plane(1, 1, large)).status(), {"keys.capacity = 2147483648"});
  CHECK_THROWS_AS(Cache::head_major(memory.data(), nullptr, {2, 2, 4}, 5), Error);
  CHECK_THROWS_AS(Cache::token_major(memory.data(), memory.data(), {2, 0, 4}, 5), Error);
}

TEST_CASE("The dense factories lay keys and values out as they say") {
  std::vector<float> memory(2 * 5 * 4);
  for (std::size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<float>(i);
  const Shape shape{.query_heads = 4, .kv_heads = 2, .head_dim = 4};
  auto by_head = PlaneCache<float>::head_major(memory.data(), memory.data(), shape, 5);
  auto by_token = PlaneCache<float>::token_major(memory.data(), memory.data(), shape, 5);
  by_head.append_run(0, 5).or_throw();
  by_token.append_run(0, 5).or_throw();
  float scratch[4];
  CHECK(by_head.keys(1, 3, 1, scratch).data[0] == (1 * 5 + 3) * 4);
  CHECK(by_head.values(1, 3, 1, scratch).data[0] == (1 * 5 + 3) * 4);
  CHECK(by_token.keys(1, 3, 1, scratch).data[0] == (3 * 2 + 1) * 4);
  CHECK(by_head.capacity() == 5);
  CHECK(by_head.num_kv_heads() == 2);
}

TEST_CASE("[I1] a copy of a view keeps its own books over the same memory", "[I1]") {
  std::vector<float> memory(8);
  auto cache = PlaneCache<float>::head_major(memory.data(), memory.data(), {1, 1, 1}, 8);
  cache.append_run(0, 5).or_throw();
  auto copy = cache;
  copy.append_run(10, 3).or_throw();
  CHECK(cache.num_tokens() == 5);
  CHECK(cache.next_position() == 5);
  CHECK(copy.num_tokens() == 8);
  CHECK(positions(copy, 0) == Positions{0, 1, 2, 3, 4, 10, 11, 12});
  CHECK(copy.key_plane().base == cache.key_plane().base);
}

TEST_CASE("A cache follows its memory to another place") {
  std::vector<float> memory(2 * 4 * 3, 1.0F);
  std::vector<float> elsewhere(2 * 4 * 3, 2.0F);
  const Shape shape{.query_heads = 2, .kv_heads = 2, .head_dim = 3};
  auto cache = PlaneCache<float>::head_major(memory.data(), memory.data(), shape, 4);
  cache.append_run(0, 2).or_throw();
  const std::uint64_t epoch = cache.epoch();
  const auto plane = [&](index_t heads, index_t dim, index_t capacity) {
    return head_major_plane(elsewhere.data(), heads, dim, capacity);
  };
  check_invalid(cache.rebase(plane(2, 3, 3), plane(2, 3, 3)), {"capacity", "3", "4"});
  check_invalid(cache.rebase(plane(2, 3, 4), plane(2, 3, 5)), {"capacity"});
  check_invalid(cache.rebase(plane(2, 2, 4), plane(2, 3, 4)), {"rebase"});
  check_invalid(cache.rebase(plane(2, 3, 4), plane(2, 2, 4)), {"rebase"});
  check_invalid(cache.rebase(plane(2, 3, 4), plane(1, 3, 4)), {"rebase"});
  check_invalid(cache.rebase(plane(2, 3, 4), head_major_plane<float>(nullptr, 2, 3, 4)), {"values.base", "null"});
  float scratch[3];
  CHECK(cache.keys(1, 1, 1, scratch).data[0] == 1.0F);
  CHECK(cache.epoch() == epoch);
  CHECK(cache.rebase(plane(2, 3, 4), plane(2, 3, 4)).ok());
  CHECK(cache.keys(1, 1, 1, scratch).data[0] == 2.0F);
  CHECK(cache.values(1, 1, 1, scratch).data[0] == 2.0F);
  CHECK(cache.num_tokens() == 2);
  CHECK(cache.epoch() != epoch);
}

TEST_CASE("[O2] [K4] after it was made a cache allocates nothing and an append moves no row", "[O2][K4]") {
  Random random;
  CAPTURE(random.seed());
  for (const Layout layout : all_layouts) {
    LayoutCache<float16> c(layout, 2, 64, 32, 64, random);
    fill(c, 60, random);
    const std::vector<float16> before = c.keys.memory();
    std::vector<float> scratch(64 * 64);
    CHECK(allocations_of([&] {
            static_cast<void>(c.cache.append(c.cache.next_position()));
            static_cast<void>(c.cache.append_run(c.cache.next_position(), 3));
            static_cast<void>(c.cache.keys(1, 0, 64, scratch.data()));
            static_cast<void>(c.cache.values(1, 0, 64, scratch.data()));
          }) == 0);
    CHECK(c.cache.num_tokens() == 64);
    CHECK(same_bytes(c.keys.memory(), before));
    const KeepPlan plan = plan_for(c.cache, {random.subset(20, 64), random.subset(20, 64)});
    CHECK(allocations_of([&] {
            static_cast<void>(compact(c.cache, plan));
            c.cache.store_key(0, 3, scratch.data());
            c.cache.truncate(7);
          }) == 0);
    CHECK(c.cache.num_tokens() == 7);
  }
}

TEST_CASE("[I1] a copy of an owning cache is a fork", "[I1]") {
  Random random;
  CAPTURE(random.seed());
  using Cache = OwningCache<float16, bfloat16>;
  Cache original({.query_heads = 4, .kv_heads = 2, .head_dim = 3}, 6);
  for (position_t p = 0; p < 4; ++p) original.append(random.normals(6), random.normals(6), p).or_throw();
  const auto contents = [](const Cache& c) {
    std::vector<float> all;
    std::vector<float> scratch(3);
    for (index_t h = 0; h < 2; ++h)
      for (index_t s = 0; s < c.view().num_tokens(); ++s) {
        const ConstRows key = c.view().keys(h, s, 1, scratch.data());
        all.insert(all.end(), key.data, key.data + 3);
        const ConstRows value = c.view().values(h, s, 1, scratch.data());
        all.insert(all.end(), value.data, value.data + 3);
        all.push_back(static_cast<float>(c.view().position(h, s)));
      }
    return all;
  };
  const std::vector<float> before = contents(original);

  Cache fork = original;
  CHECK(contents(fork) == before);
  CHECK(fork.view().key_plane().base != original.view().key_plane().base);
  compact(fork.view(), plan_for(fork.view(), {{1, 3}, {0, 2}})).or_throw();
  fork.append(random.normals(6), random.normals(6), 4).or_throw();
  CHECK(contents(original) == before);

  Cache assigned({.query_heads = 2, .kv_heads = 2, .head_dim = 3}, 20);
  assigned = original;
  CHECK(contents(assigned) == before);
  CHECK(assigned.view().capacity() == 6);
  compact(assigned.view(), plan_for(assigned.view(), {{3}})).or_throw();
  CHECK(contents(original) == before);

  const Cache& same = original;
  original = same;
  CHECK(contents(original) == before);
  CHECK(original.append(random.normals(6), random.normals(6), 4).ok());

  Cache moved = std::move(original);
  CHECK(moved.view().num_tokens() == 5);
  CHECK(moved.append(random.normals(6), random.normals(6), 5).ok());
  assigned = std::move(moved);
  CHECK(assigned.view().num_tokens() == 6);
  CHECK(assigned.view().position(1, 5) == 5);
}

TEST_CASE("An owning cache stores what it is given, encoded once") {
  OwningCache<float16, float> cache({.query_heads = 2, .kv_heads = 2, .head_dim = 2}, 3);
  cache.append(std::vector<float>{1, 2, 3, 0.1F}, std::vector<float>{5, 6, 7, 0.1F}, 4).or_throw();
  float scratch[2];
  CHECK(cache.view().keys(0, 0, 1, scratch).data[1] == 2.0F);
  CHECK(cache.view().keys(1, 0, 1, scratch).data[0] == 3.0F);
  CHECK(cache.view().keys(1, 0, 1, scratch).data[1] == decode(encode<float16>(0.1F)));
  CHECK(cache.view().values(0, 0, 1, scratch).data[1] == 6.0F);
  CHECK(cache.view().values(1, 0, 1, scratch).data[1] == 0.1F);
  CHECK(cache.view().position(0, 0) == 4);

  check_invalid(cache.append(std::vector<float>(3), std::vector<float>(4), 5), {"keys have 3", "must have 4"});
  check_invalid(cache.append(std::vector<float>(4), std::vector<float>(5), 5), {"values 5", "must have 4"});
  check_error(cache.append(std::vector<float>(4), std::vector<float>(4), 4), StatusCode::out_of_order, {"position = 4"});
  CHECK(cache.view().num_tokens() == 1);
  CHECK(cache.view().keys(0, 0, 1, scratch).data[1] == 2.0F);
}

TEST_CASE("An owning cache of a size that cannot be is refused") {
  using Cache = OwningCache<float>;
  check_invalid(Cache::make({.query_heads = 2, .kv_heads = 0, .head_dim = 4}, 5).status(), {"kv_heads = 0"});
  check_invalid(Cache::make({.query_heads = 2, .kv_heads = 2, .head_dim = 4}, 0).status(), {"capacity = 0"});
  check_invalid(Cache::make({.query_heads = 2, .kv_heads = 2, .head_dim = 4}, -5).status(), {"capacity = -5"});
  check_invalid(Cache::make({.query_heads = 2, .kv_heads = 2, .head_dim = 4}, index_t{1} << 40).status(),
                {"capacity = 1099511627776"});
  CHECK_THROWS_AS(Cache({.query_heads = 3, .kv_heads = 2, .head_dim = 4}, 5), Error);
}

TEST_CASE("The slot of a position is found where it was evicted too") {
  OwningCache<float> memory({.query_heads = 2, .kv_heads = 2, .head_dim = 1}, 8);
  auto& cache = memory.view();
  CHECK(detail::slot_at_or_behind(cache, 0, 0) == 0);
  cache.append_run(0, 8).or_throw();
  compact(cache, plan_for(cache, {{0, 3, 4, 7}, {1, 2, 5, 6}})).or_throw();
  for (const index_t head : {0, 1})
    for (position_t position = -1; position <= 9; ++position) {
      index_t expected = 0;
      while (expected < cache.num_tokens() && cache.position(head, expected) < position) ++expected;
      CAPTURE(head, position);
      CHECK(detail::slot_at_or_behind(cache, head, position) == expected);
    }
}

TEST_CASE("[K1] evictions keep the memory, shrink gives it back", "[K1]") {
  Random random;
  CAPTURE(random.seed());
  constexpr Shape shape{.query_heads = 4, .kv_heads = 2, .head_dim = 32};
  const auto check = [&](auto memory, index_t row_bytes, index_t book_bytes) {
    for (position_t p = 0; p < 1000; ++p) memory.append(random.normals(64), random.normals(64), p).or_throw();
    const std::size_t full = memory.memory_bytes();
    REQUIRE(full == static_cast<std::size_t>(1000 * (row_bytes + book_bytes)));
    const Slots kept = random.subset(100, 1000);
    const bool one_set = std::decay_t<decltype(memory)>::View::granularity == Granularity::per_layer;
    std::vector<Slots> sets{kept};
    if (!one_set) sets.push_back(random.subset(100, 1000));
    compact(memory.view(), plan_for(memory.view(), sets)).or_throw();
    REQUIRE(memory.memory_bytes() == full);
    const Positions first = positions(memory.view(), 0);
    const Positions second = positions(memory.view(), 1);
    const auto rows = [&] {
      std::vector<float> out(4 * 100 * 32);
      for (index_t h = 0; h < 2; ++h)
        for (index_t s = 0; s < 100; ++s) {
          float scratch[32];
          std::copy_n(memory.view().keys(h, s, 1, scratch).data, 32, out.begin() + (h * 100 + s) * 32);
          std::copy_n(memory.view().values(h, s, 1, scratch).data, 32, out.begin() + ((2 + h) * 100 + s) * 32);
        }
      return out;
    };
    const std::vector<float> before = rows();
    const std::uint64_t epoch = memory.view().epoch();

    for (const index_t bad : {-1, 0, 99, 1001})
      check_invalid(memory.shrink(bad), {"capacity = ", std::to_string(bad).c_str(), "100 tokens", "1000"});
    REQUIRE(memory.memory_bytes() == full);
    constexpr index_t reserve = 16;
    memory.shrink(100 + reserve).or_throw();
    REQUIRE(memory.memory_bytes() == static_cast<std::size_t>((100 + reserve) * (row_bytes + book_bytes)));
    REQUIRE(memory.view().capacity() == 100 + reserve);
    REQUIRE(positions(memory.view(), 0) == first);
    REQUIRE(positions(memory.view(), 1) == second);
    REQUIRE(same_bits(rows(), before));
    REQUIRE(memory.view().epoch() != epoch);
    REQUIRE(memory.view().next_position() == 1000);
    for (position_t p = 1000; p < 1000 + reserve; ++p) memory.append(random.normals(64), random.normals(64), p).or_throw();
    check_error(memory.append(random.normals(64), random.normals(64), 2000), StatusCode::out_of_capacity, {"room for 0"});
    REQUIRE(memory.view().rollback(reserve).or_throw() == reserve);
    memory.shrink(100).or_throw();
    REQUIRE(same_bits(rows(), before));
  };
  check(OwningCache<float>(shape, 1000), 4 * 32 * 4, 16);
  check(OwningCache<float16, bfloat16, Granularity::per_layer>(shape, 1000), 4 * 32 * 2, 8);
  check(OwningCache<std::int8_t, q8_0>(shape, 1000), 2 * (32 + 4) + 2 * 34, 16);
  check(OwningCache<float>(shape, 1000, {.positions = PositionMode::cache_relative}), 4 * 32 * 4, 32);
}

#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__)  // a sanitizer's malloc says nothing to mallinfo2
TEST_CASE("[K1] the memory that shrink gives back is gone", "[K1]") {
  constexpr Shape shape{.query_heads = 1, .kv_heads = 1, .head_dim = 64};
  OwningCache<float> memory(shape, 1000);
  memory.view().append_run(0, 1000).or_throw();
  memory.view().truncate(100);
  const std::size_t before = mallinfo2().uordblks + mallinfo2().hblkhd;
  memory.shrink(116).or_throw();
  const std::size_t after = mallinfo2().uordblks + mallinfo2().hblkhd;
  CHECK(before - after >= 2 * 880 * 64 * sizeof(float));
}
#endif

TEST_CASE("[N2] a plan from before is stale in memory that was shrunk or copied into", "[N2]") {
  OwningCache<float> memory({.query_heads = 1, .kv_heads = 1, .head_dim = 1}, 32);
  std::vector<KeepPlan> old;
  const auto note = [&] { old.push_back(plan_for(memory.view(), {{0, 2}})); };
  memory.view().append_run(0, 4).or_throw();
  note();
  for (const index_t capacity : {30, 20, 10, 5}) {
    memory.shrink(capacity).or_throw();
    for (const KeepPlan& plan : old) check_error(compact(memory.view(), plan), StatusCode::stale_plan, {"another state"});
    note();
  }
  OwningCache<float> other({.query_heads = 1, .kv_heads = 1, .head_dim = 1}, 32);
  other.view().append_run(0, 4).or_throw();
  memory.view().copy_from(other.view()).or_throw();
  for (const KeepPlan& plan : old) check_error(compact(memory.view(), plan), StatusCode::stale_plan, {"another state"});
}

TEMPLATE_TEST_CASE("rollback takes back what was appended since the last eviction, as if it had never been", "", Floats, Halves,
                   SharedMixed) {
  using K = typename TestType::K;
  using V = typename TestType::V;
  Random random;
  CAPTURE(random.seed());
  for (const PositionMode mode : {PositionMode::true_positions, PositionMode::cache_relative, PositionMode::unrotated_keys})
    for (index_t round = 0; round < 20; ++round) {
      CAPTURE(static_cast<int>(mode), round);
      LayoutCache<K, V, TestType::granularity> c(Layout::paged, 2, 3, 4, 40, random, mode);
      LayoutCache<K, V, TestType::granularity> plain(Layout::token_major, 2, 3, 4, 40, random, mode);
      index_t undoable = 0;
      for (index_t step = 0; step < 12; ++step) {
        const index_t room = c.cache.capacity() - c.cache.num_tokens();
        const index_t firm = random.integer(0, std::min<index_t>(3, room));
        const index_t guessed = random.integer(0, std::min<index_t>(4, room - firm));
        for (index_t i = 0; i < firm + guessed; ++i) {
          const std::vector<float> keys = random.normals(6);
          const std::vector<float> values = random.normals(8);
          const position_t position = c.cache.next_position() + random.integer(0, 2);
          c.append(keys, values, position);
          if (i < firm) plain.append(keys, values, position);
        }
        REQUIRE(c.cache.num_undoable() == undoable + firm + guessed);
        REQUIRE(c.cache.rollback(guessed).or_throw() == guessed);
        undoable += firm;
        if (random.integer(0, 3) == 0 && c.cache.num_tokens() > 0) {
          const Slots kept = random.subset(random.integer(1, c.cache.num_tokens()), c.cache.num_tokens());
          compact(c.cache, plan_for(c.cache, {kept})).or_throw();
          compact(plain.cache, plan_for(plain.cache, {kept})).or_throw();
          if (static_cast<index_t>(kept.size()) == c.cache.num_tokens() && undoable == c.cache.num_undoable()) continue;
          undoable = 0;
        }
        REQUIRE(c.cache.num_undoable() == undoable);
        REQUIRE(c.cache.num_tokens() == plain.cache.num_tokens());
        REQUIRE(c.cache.next_position() == plain.cache.next_position());
        REQUIRE(c.cache.next_rotary_position() == plain.cache.next_rotary_position());
        for (index_t h = 0; h < 2; ++h)
          for (index_t s = 0; s < c.cache.num_tokens(); ++s) {
            REQUIRE(c.cache.position(h, s) == plain.cache.position(h, s));
            REQUIRE(c.cache.rotary_position(h, s) == plain.cache.rotary_position(h, s));
            REQUIRE(same_bytes(c.keys.row(h, s), plain.keys.row(h, s)));
            REQUIRE(same_bytes(c.values.row(h, s), plain.values.row(h, s)));
          }
      }
      const index_t all = c.cache.num_undoable();
      REQUIRE(c.cache.rollback(1000).or_throw() == all);
      REQUIRE(c.cache.rollback(1000).or_throw() == 0);
      check_invalid(c.cache.rollback(-1).status(), {"count = -1"});
    }
}

TEST_CASE("rollback stops at the pinned prefix of the shortest head") {
  Random random;
  CAPTURE(random.seed());
  LayoutCache<float, float, Granularity::per_head_ragged> c(Layout::head_major, 2, 2, 2, 16, random);
  c.cache.append_run(0, 10).or_throw();
  compact(c.cache, plan_for(c.cache, {{0, 1, 2, 3, 4, 5, 6, 7}, {0, 1}})).or_throw();
  c.cache.append_run(10, 3).or_throw();
  c.cache.set_pinned_prefix(4).or_throw();
  REQUIRE(c.cache.rollback(3).or_throw() == 1);
  REQUIRE(c.cache.num_tokens(0) == 10);
  REQUIRE(c.cache.num_tokens(1) == 4);
  REQUIRE(c.cache.pinned_prefix() == 4);
  REQUIRE(c.cache.next_position() == 12);
  c.cache.set_pinned_prefix(0).or_throw();
  REQUIRE(c.cache.rollback(3).or_throw() == 2);
  REQUIRE(c.cache.next_position() == 10);
}

TEMPLATE_TEST_CASE("[I1] copy_from is a deep copy between any two layouts", "[I1]", Floats, Halves, SharedMixed) {
  using K = typename TestType::K;
  using V = typename TestType::V;
  Random random;
  CAPTURE(random.seed());
  for (const Layout from_layout : all_layouts)
    for (const Layout to_layout : all_layouts) {
      CAPTURE(static_cast<int>(from_layout), static_cast<int>(to_layout));
      LayoutCache<K, V, TestType::granularity> from(from_layout, 2, 5, 3, 16, random);
      LayoutCache<K, V, TestType::granularity> to(to_layout, 2, 5, 3, 12, random);
      fill(from, 11, random);
      fill(to, 3, random);
      from.cache.set_pinned_prefix(2).or_throw();
      const auto same = [&](index_t tokens) {
        bool equal = to.cache.num_tokens() == tokens && from.cache.num_tokens() == tokens;
        for (index_t h = 0; h < 2; ++h)
          for (index_t s = 0; s < tokens; ++s)
            equal = equal && same_bytes(to.keys.row(h, s), from.keys.row(h, s)) &&
                    same_bytes(to.values.row(h, s), from.values.row(h, s)) &&
                    to.cache.position(h, s) == from.cache.position(h, s);
        return equal;
      };
      to.cache.copy_from(from.cache).or_throw();
      REQUIRE(same(11));
      REQUIRE(to.cache.next_position() == from.cache.next_position());
      REQUIRE(to.cache.pinned_prefix() == 0);  // memory of its own is shared with nobody
      REQUIRE(from.cache.pinned_prefix() == 2);
      REQUIRE(to.keys.fillers_untouched());
      REQUIRE(to.values.fillers_untouched());
      REQUIRE(to.cache.rollback(4).or_throw() == 4);
      REQUIRE(from.cache.rollback(4).or_throw() == 4);
      REQUIRE(same(7));
      REQUIRE(to.cache.next_position() == from.cache.next_position());
      from.cache.copy_from(from.cache).or_throw();
      REQUIRE(same(7));

      from.cache.append_run(100, 9).or_throw();
      const std::uint64_t epoch = to.cache.epoch();
      check_error(to.cache.copy_from(from.cache), StatusCode::out_of_capacity, {"16 tokens", "capacity = 12"});
      REQUIRE(to.cache.num_tokens() == 7);
      REQUIRE(to.cache.epoch() == epoch);
    }
}

TEST_CASE("[I3] a copy never writes a pinned prefix: it is the same memory, or refused with nothing changed", "[I3]") {
  // Three pages of memory in one pool, the first of them read-only; keys and values of a token lie in one page.
  const auto bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  void* const memory = mmap(nullptr, 4 * bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  REQUIRE(memory != MAP_FAILED);
  auto* const floats = static_cast<float*>(memory);
  const auto row = static_cast<index_t>(bytes / sizeof(float) / 8);  // of four tokens a page
  for (index_t i = 0; i < 4 * 8 * row; ++i) floats[i] = static_cast<float>(i);
  const auto cache_of = [&](const std::vector<std::int32_t>& pages, index_t first_value = 0) {
    Plane<float> keys{.base = floats,
                      .stride = {8 * row, row, row, 1},
                      .heads = 1,
                      .dim = row,
                      .capacity = 8,
                      .page_size = 4,
                      .pages = pages.data(),
                      .num_pages = 4};
    Plane<float> values = keys;
    values.base += first_value + 4 * row;
    return PlaneCache<float>::make(keys, values).or_throw();
  };
  const std::vector<std::int32_t> pages_a{0, 1};
  const std::vector<std::int32_t> pages_b{0, 2};
  const std::vector<std::int32_t> pages_c{3, -1};
  REQUIRE(mprotect(memory, bytes, PROT_READ) == 0);
  auto a = cache_of(pages_a);
  auto b = cache_of(pages_b);
  auto c = cache_of(pages_c);
  a.append_run(0, 7).or_throw();
  a.set_pinned_prefix(4).or_throw();
  b.append_run(0, 5).or_throw();
  b.set_pinned_prefix(4).or_throw();
  b.copy_from(a).or_throw();  // the pinned page is not written
  CHECK(b.num_tokens() == 7);
  CHECK(b.pinned_prefix() == 4);
  CHECK(floats[2 * 8 * row] == floats[8 * row]);
  CHECK(b.values(0, 6, 1, nullptr).row(0)[1] == a.values(0, 6, 1, nullptr).row(0)[1]);

  // A cache with no pin of its own takes over what it shares, and not more.
  b.set_pinned_prefix(0).or_throw();
  a.set_pinned_prefix(6).or_throw();
  b.copy_from(a).or_throw();
  CHECK(b.pinned_prefix() == 4);
  CHECK(a.pinned_prefix() == 6);

  // Other memory: refused where it is pinned, and free where not.
  c.append_run(0, 4).or_throw();
  c.set_pinned_prefix(2).or_throw();
  a.truncate(4);
  const std::vector<float> before(floats, floats + 4 * 8 * row);
  const std::uint64_t epoch = c.epoch();
  check_error(c.check_copy_from(a), StatusCode::unsupported, {"copy_from", "slot 0", "pinned prefix of 2"});
  check_error(c.copy_from(a), StatusCode::unsupported, {"copy_from", "slot 0", "pinned prefix of 2"});
  CHECK(same_bits(before, std::span<const float>(floats, before.size())));
  CHECK(c.epoch() == epoch);
  CHECK(c.pinned_prefix() == 2);
  c.set_pinned_prefix(0).or_throw();
  c.copy_from(a).or_throw();
  CHECK(c.pinned_prefix() == 0);
  CHECK(floats[3 * 8 * row] == floats[0]);

  // The same pages with fewer tokens than are pinned, or with other values, are not the same prefix.
  auto fewer = cache_of(pages_a);
  fewer.append_run(0, 3).or_throw();
  b.set_pinned_prefix(4).or_throw();
  check_error(b.copy_from(fewer), StatusCode::unsupported, {"slot 3", "pinned prefix of 4"});
  auto other_values = cache_of(pages_a, 16);
  other_values.append_run(0, 4).or_throw();
  check_error(b.copy_from(other_values), StatusCode::unsupported, {"slot 0", "pinned prefix of 4"});
  auto same = cache_of(pages_a);
  same.append_run(0, 4).or_throw();
  CHECK(b.copy_from(same).ok());
  CHECK(munmap(memory, 4 * bytes) == 0);
}

TEST_CASE("[I3] a cache that gives memory back keeps its pins") {
  OwningCache<float> memory({.query_heads = 1, .kv_heads = 1, .head_dim = 1}, 8);
  memory.view().append_run(0, 5).or_throw();
  memory.view().set_pinned_prefix(3).or_throw();
  memory.shrink(6).or_throw();
  CHECK(memory.view().pinned_prefix() == 3);
}

TEMPLATE_TEST_CASE("follow does to the books what compact does, and nothing to the rows", "", Floats, Halves, SharedMixed) {
  using K = typename TestType::K;
  using V = typename TestType::V;
  Random random;
  CAPTURE(random.seed());
  for (index_t round = 0; round < 30; ++round) {
    LayoutCache<K, V, TestType::granularity> c(Layout::head_major, 2, 3, 4, 16, random, PositionMode::cache_relative);
    const index_t tokens = random.integer(1, 16);
    fill(c, tokens, random);
    auto view = c.cache;  // books of its own
    const auto keys = c.keys.memory();
    const auto values = c.values.memory();
    const bool one_set = TestType::granularity == Granularity::per_layer || random.coin();
    const index_t kept = random.integer(0, tokens);
    std::vector<Slots> sets{random.subset(kept, tokens)};
    if (!one_set) sets.push_back(random.subset(kept, tokens));
    const KeepPlan plan = plan_for(c.cache, sets);
    follow(view, plan).or_throw();
    REQUIRE(same_bytes(c.keys.memory(), keys));
    REQUIRE(same_bytes(c.values.memory(), values));
    compact(c.cache, plan).or_throw();
    REQUIRE(view.num_tokens() == c.cache.num_tokens());
    REQUIRE(view.next_position() == c.cache.next_position());
    REQUIRE(view.next_rotary_position() == c.cache.next_rotary_position());
    REQUIRE(view.num_undoable() == c.cache.num_undoable());
    for (index_t h = 0; h < 2; ++h) {
      REQUIRE(positions(view, h) == positions(c.cache, h));
      for (index_t s = 0; s < kept; ++s) REQUIRE(view.rotary_position(h, s) == c.cache.rotary_position(h, s));
    }
    if (kept == tokens) continue;
    check_error(follow(view, plan), StatusCode::stale_plan, {"another state"});
    REQUIRE(view.num_tokens() == kept);
  }
  LayoutCache<K, V, TestType::granularity> pinned(Layout::head_major, 2, 3, 4, 16, random);
  fill(pinned, 8, random);
  pinned.cache.set_pinned_prefix(3).or_throw();
  check_invalid(follow(pinned.cache, plan_for(pinned.cache, {{0, 1, 4}})), {"pinned prefix of 3"});
}

TEST_CASE("[A7] a position behind which there is none is refused", "[A7]") {
  OwningCache<float> memory({.query_heads = 1, .kv_heads = 1, .head_dim = 1}, 8);
  constexpr position_t last = std::numeric_limits<position_t>::max();
  check_invalid(memory.view().append(last), {"position = 9223372036854775807"});
  check_invalid(memory.view().append_run(last - 1, 2), {"position = 9223372036854775806"});
  REQUIRE(memory.view().num_tokens() == 0);
  REQUIRE(memory.view().append(last - 1).ok());
  REQUIRE(memory.view().next_position() == last);
}

}  // namespace
