// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

// Observers by themselves: which queries they hold, in which order, and at which positions they look.

#include "beaconkv/policy/beacon_queries.hpp"

#include <vector>

#include "support/catch.hpp"
#include "support/policy_run.hpp"

namespace {

using namespace beaconkv;
using namespace beaconkv::test;

static_assert(Observer<NoQueries> && Observer<RecentQueries> && Observer<BeaconQueries>);
static_assert(!Observer<int>);
static_assert(!NoQueries::needs_queries && RecentQueries::needs_queries && BeaconQueries::needs_queries);
static_assert(!NoQueries::needs_rope && !RecentQueries::needs_rope && BeaconQueries::needs_rope);

constexpr Shape shape{.query_heads = 3, .kv_heads = 1, .head_dim = 12};

/// What an observer shows a scorer.
struct Shown {
  std::vector<std::vector<reference::Row>> rows;   ///< [query head][row]
  std::vector<std::vector<position_t>> positions;  ///< [query head][row]
};

template <class ObserverT>
Shown show(const ObserverT& observer, const RopeTable* rope, position_t now) {
  const index_t n = observer.rows();
  std::vector<float> queries(at(shape.query_heads * n * shape.head_dim));
  std::vector<position_t> positions(at(shape.query_heads * n));
  Workspace work(observer.workspace_size());
  require_ok(observer.write_rows(rope, now, {0, shape.query_heads}, queries.data(), positions.data(), work));
  for (index_t first = 0; first <= shape.query_heads; ++first)  // some heads are shown as among all of them
    for (index_t last = first; last <= shape.query_heads; ++last) {
      std::vector<float> some(at((last - first) * n * shape.head_dim));
      std::vector<position_t> seen_from(at((last - first) * n));
      require_ok(observer.write_rows(rope, now, {first, last}, some.data(), seen_from.data(), work));
      REQUIRE(std::equal(some.begin(), some.end(), queries.begin() + first * n * shape.head_dim));
      REQUIRE(std::equal(seen_from.begin(), seen_from.end(), positions.begin() + first * n));
    }
  Shown out{std::vector<std::vector<reference::Row>>(3), std::vector<std::vector<position_t>>(3)};
  for (index_t h = 0; h < 3; ++h)
    for (index_t r = 0; r < n; ++r) {
      out.rows[at(h)].push_back(reference::row_of(queries.data() + (h * n + r) * shape.head_dim, shape.head_dim));
      out.positions[at(h)].push_back(positions[at(h * n + r)]);
    }
  return out;
}

/// Rows that differ by less than the rounding of a rotation.
void compare_rows(const std::vector<reference::Row>& got, const std::vector<reference::Row>& want) {
  REQUIRE(got.size() == want.size());
  double worst = 0;
  for (std::size_t r = 0; r < want.size(); ++r)
    for (std::size_t d = 0; d < want[r].size(); ++d) worst = std::max(worst, std::abs(got[r][d] - want[r][d]));
  REQUIRE(worst < 4e-6);
}

/// `[token][head][dim]` queries of a sequence.
struct Sequence {
  std::vector<float> numbers;
  index_t tokens;

  Sequence(Random& random, index_t n) : numbers(random.normals(n * 36)), tokens(n) {}
  [[nodiscard]] QueryView view(index_t first, index_t count) const {
    return QueryView::token_major(numbers.data() + first * 36, count, 3, 12);
  }
  [[nodiscard]] reference::Row row(index_t token, index_t head) const {
    return reference::row_of(numbers.data() + token * 36 + head * 12, 12);
  }
};

}  // namespace

TEST_CASE("NoQueries holds nothing", "[observer]") {
  NoQueries observer(shape, {});
  Workspace work(WorkspaceSize{});
  require_ok(observer.prefill({}, work));
  require_ok(observer.observe({}));
  require_ok(observer.commit());
  REQUIRE(observer.rows() == 0);
  REQUIRE(observer.max_rows() == 0);
  REQUIRE(observer.state_bytes() == 0);
}

TEST_CASE("RecentQueries holds the newest tokens' queries, oldest first", "[observer]") {
  Random random;
  CAPTURE(random.seed());
  const RopeCase rope_case = make_rope(12, RopeLayout::interleaved, 8);
  const RopeTable rope(rope_case.options);
  for (const index_t count : {1, 2, 7})
    for (const bool twice : {false, true})
      for (const bool with_rope : {false, true}) {
        CAPTURE(count, twice, with_rope);
        RecentQueries observer(shape, {.count = count, .newest_twice = twice});
        const Sequence sequence(random, 40);
        Workspace work(observer.prefill_workspace_size(10));
        require_ok(observer.prefill({sequence.view(0, 5), 100}, work));
        for (index_t token = 5; token < 40; ++token) {
          require_ok(observer.observe({sequence.view(token, 1), 100 + token}));
          const bool doubled = twice && count > 1;
          const index_t distinct = std::min(count - (doubled ? 1 : 0), token + 1);
          std::vector<index_t> tokens;
          for (index_t t = token + 1 - distinct; t <= token; ++t) tokens.push_back(t);
          if (doubled) tokens.push_back(token);
          const Shown shown = show(observer, with_rope ? &rope : nullptr, 100 + token);
          for (index_t h = 0; h < 3; ++h) {
            std::vector<reference::Row> want;
            std::vector<position_t> positions;
            for (const index_t t : tokens) {
              want.push_back(with_rope ? rope_case.reference.at(sequence.row(t, h), 100 + t) : sequence.row(t, h));
              positions.push_back(100 + t);
            }
            REQUIRE(shown.positions[at(h)] == positions);
            compare_rows(shown.rows[at(h)], want);
          }
          REQUIRE(observer.rows() <= observer.max_rows());
        }
        REQUIRE(observer.max_rows() == count);
        REQUIRE(observer.rows() == count);
      }
}

TEST_CASE("RecentQueries that has seen nothing shows nothing, not twice either", "[observer]") {
  for (const bool twice : {false, true}) {
    RecentQueries observer(shape, {.count = 5, .newest_twice = twice});
    REQUIRE(observer.rows() == 0);
    REQUIRE(show(observer, nullptr, 0).rows[0].empty());
    Random random;
    const Sequence sequence(random, 1);
    require_ok(observer.observe({sequence.view(0, 1), 0}));
    REQUIRE(observer.rows() == (twice ? 2 : 1));
  }
}

TEST_CASE("RecentQueries takes a prompt of any length and in any chunks", "[observer]") {
  Random random;
  CAPTURE(random.seed());
  for (const index_t prompt : {0, 1, 3, 4, 5, 30})
    for (const index_t chunk : {1, 2, 4, 30}) {
      CAPTURE(prompt, chunk);
      RecentQueries observer(shape, {.count = 4});
      const Sequence sequence(random, 30);
      Workspace work(WorkspaceSize{});
      for (index_t first = 0; first < prompt; first += chunk)
        require_ok(observer.prefill({sequence.view(first, std::min(chunk, prompt - first)), first}, work));
      REQUIRE(observer.rows() == std::min<index_t>(prompt, 4));
      const Shown shown = show(observer, nullptr, prompt);
      for (index_t r = 0; r < observer.rows(); ++r) {
        const index_t token = prompt - observer.rows() + r;
        REQUIRE(shown.rows[2][at(r)] == sequence.row(token, 2));
        REQUIRE(shown.positions[2][at(r)] == token);
      }
    }
}

TEST_CASE("a source turns rotated queries back where the observer keeps them before RoPE", "[observer]") {
  Random random;
  CAPTURE(random.seed());
  const RopeCase rope_case = make_rope_with_factor(12, 1.4);
  const RopeTable rope(rope_case.options);
  const Sequence sequence(random, 6);
  std::vector<float> rotated;
  for (index_t t = 0; t < 6; ++t)
    for (index_t h = 0; h < 3; ++h)
      for (const double x : rope_case.reference.at(sequence.row(t, h), 70 + t)) rotated.push_back(static_cast<float>(x));
  RecentQueries observer(shape, {.count = 6});
  Workspace work(WorkspaceSize{});
  require_ok(observer.prefill({QueryView::token_major(rotated.data(), 6, 3, 12), 70, &rope}, work));
  const Shown kept = show(observer, nullptr, 0);
  const Shown shown = show(observer, &rope, 0);
  for (index_t h = 0; h < 3; ++h)
    for (index_t t = 0; t < 6; ++t) {
      compare_rows({kept.rows[at(h)][at(t)]}, {sequence.row(t, h)});
      compare_rows({shown.rows[at(h)][at(t)]}, {rope_case.reference.at(sequence.row(t, h), 70 + t)});
    }
}

TEST_CASE("a view of queries may have any strides", "[observer]") {
  Random random;
  CAPTURE(random.seed());
  const Sequence sequence(random, 5);
  // [head][token][dim], and rows padded within a larger block as a fused QKV projection leaves them.
  std::vector<float> head_major(180);
  std::vector<float> padded(5 * 100, -5.0F);
  for (index_t t = 0; t < 5; ++t)
    for (index_t h = 0; h < 3; ++h)
      for (index_t d = 0; d < 12; ++d) {
        const float x = sequence.numbers[at(t * 36 + h * 12 + d)];
        head_major[at((h * 5 + t) * 12 + d)] = x;
        padded[at(t * 100 + 7 + h * 20 + d)] = x;
      }
  const QueryView views[] = {
      sequence.view(0, 5), QueryView::head_major(head_major.data(), 5, 3, 12), {padded.data() + 7, 5, 3, 12, 100, 20}};
  for (const QueryView& view : views) {
    RecentQueries observer(shape, {.count = 5});
    Workspace work(WorkspaceSize{});
    require_ok(observer.prefill({view, 0}, work));
    const Shown shown = show(observer, nullptr, 0);
    for (index_t h = 0; h < 3; ++h)
      for (index_t t = 0; t < 5; ++t) REQUIRE(shown.rows[at(h)][at(t)] == sequence.row(t, h));
  }
}

TEST_CASE("BeaconQueries shows beacons at now and recent queries at their positions", "[observer]") {
  Random random;
  CAPTURE(random.seed());
  const RopeCase rope_case = make_rope_with_factor(12, 1.2);
  const RopeTable rope(rope_case.options);
  index_t ambiguous = 0;
  for (const index_t prompt : {0, 1, 4, 5, 6, 40})
    for (const auto& [n_beacon, n_recent] : {std::pair<index_t, index_t>{5, 3}, {1, 6}, {6, 1}, {0, 4}}) {
      CAPTURE(prompt, n_beacon, n_recent);
      const Sequence sequence(random, prompt + 60);
      BeaconQueries observer(shape, {.n_beacon = n_beacon, .n_recent_queries = n_recent});
      Workspace work(observer.prefill_workspace_size(prompt));
      require_ok(observer.prefill({sequence.view(0, prompt), 0}, work));
      std::vector<reference::ContinualSampling> memory(3, {.n_min = at(n_beacon), .n_max = at(n_beacon + n_recent)});
      if (n_beacon > 0)
        for (index_t h = 0; h < 3; ++h) {
          reference::Matrix rows;
          for (index_t t = 0; t < prompt; ++t) rows.push_back(sequence.row(t, h));
          memory[at(h)].prefill(rows, 0);
        }
      bool clear = true;
      for (index_t token = prompt; token < prompt + 60 && clear; ++token) {
        require_ok(observer.observe({sequence.view(token, 1), 2 * token}));  // positions with gaps
        const index_t left = token - n_recent;                               // what has just left the ring
        if (n_beacon > 0 && left >= prompt)
          for (index_t h = 0; h < 3; ++h) memory[at(h)].push(sequence.row(left, h), 2 * left);
        if (token % 11 == 0) {
          require_ok(observer.commit());
          if (n_beacon > 0)
            for (auto& m : memory) m.reduce();
        }
        const index_t in_ring = std::min(n_recent, token + 1 - prompt);
        REQUIRE(observer.num_recent() == in_ring);
        const position_t now = 2 * token + 5;
        const Shown shown = show(observer, &rope, now);
        for (index_t h = 0; h < 3 && clear; ++h) {
          reference::ContinualSampling beacons = memory[at(h)];
          if (n_beacon > 0) beacons.reduce();
          clear = beacons.gap > 1e-6;
          if (!clear) {
            ++ambiguous;
            break;
          }
          std::vector<reference::Row> want;
          std::vector<position_t> positions;
          for (const reference::Row& row : beacons.rows) {
            want.push_back(rope_case.reference.at(row, now));
            positions.push_back(now);
          }
          for (index_t t = token + 1 - in_ring; t <= token; ++t) {
            want.push_back(rope_case.reference.at(sequence.row(t, h), 2 * t));
            positions.push_back(2 * t);
          }
          REQUIRE(shown.positions[at(h)] == positions);
          compare_rows(shown.rows[at(h)], want);
        }
        REQUIRE(observer.rows() <= observer.max_rows());
      }
      REQUIRE(observer.max_rows() == n_beacon + n_recent);
    }
  REQUIRE(ambiguous <= 10);  // of some thousands: two queries, for one, are equally far from their mean
}

TEST_CASE("a prompt in the middle of decoding is sampled together with the queries that wait", "[observer]") {
  Random random;
  CAPTURE(random.seed());
  for (const index_t decoded : {0, 2, 4, 7, 9, 13, 22, 23})
    for (const index_t prompt : {1, 3, 20}) {
      CAPTURE(decoded, prompt);
      const Sequence sequence(random, decoded + prompt + 30);
      BeaconQueries observer(shape, {.n_beacon = 5, .n_recent_queries = 4});
      reference::ContinualSampling memory{.n_min = 5, .n_max = 9};
      std::vector<index_t> recent;
      const auto decode = [&](index_t first, index_t count) {
        for (index_t token = first; token < first + count; ++token) {
          require_ok(observer.observe({sequence.view(token, 1), 7 * token}));
          recent.push_back(token);
          if (recent.size() <= 4) continue;
          memory.push(sequence.row(recent.front(), 1), 7 * recent.front());
          recent.erase(recent.begin());
        }
      };
      decode(0, decoded);
      Workspace work(observer.prefill_workspace_size(prompt));
      require_ok(observer.prefill({sequence.view(decoded, prompt), 1000}, work));
      REQUIRE(work.peak() <= observer.prefill_workspace_size(prompt).bytes);
      reference::Matrix rows;
      for (index_t t = 0; t < prompt; ++t) rows.push_back(sequence.row(decoded + t, 1));
      memory.prefill(rows, 1000);
      if (memory.gap < 1e-6) continue;
      REQUIRE(pool_positions(observer, 1) == memory.tags);
      REQUIRE(observer.num_recent() == std::min<index_t>(4, decoded));
      decode(decoded + prompt, 30);
      if (memory.gap < 1e-6) continue;
      REQUIRE(pool_positions(observer, 1) == memory.tags);
    }
}

TEST_CASE("BeaconQueries' commit leaves the very beacons that were shown", "[observer]") {
  Random random;
  CAPTURE(random.seed());
  const RopeTable rope({.head_dim = 12});
  BeaconQueries observer(shape, {.n_beacon = 4, .n_recent_queries = 5});
  const Sequence sequence(random, 50);
  index_t reduced = 0;
  for (index_t token = 0; token < 50; ++token) {
    require_ok(observer.observe({sequence.view(token, 1), token}));
    BeaconQueries committed = observer;
    require_ok(committed.commit());
    reduced += observer.pool_size() > 4 ? 1 : 0;
    REQUIRE(committed.pool_size() == std::min<index_t>(4, observer.pool_size()));
    const Shown before = show(observer, &rope, 99);
    const Shown after = show(committed, &rope, 99);
    REQUIRE(before.rows == after.rows);
    REQUIRE(before.positions == after.positions);
  }
  REQUIRE(reduced > 10);
}

TEST_CASE("what BeaconQueries remembers of being shown changes no query that it keeps", "[observer]") {
  Random random;
  CAPTURE(random.seed());
  const RopeTable rope({.head_dim = 12});
  for (const auto& [n_beacon, n_recent] : {std::pair<index_t, index_t>{4, 5}, {6, 2}, {5, 1}, {1, 6}, {0, 3}, {40, 7}}) {
    CAPTURE(n_beacon, n_recent);
    BeaconQueries plain(shape, {.n_beacon = n_beacon, .n_recent_queries = n_recent});
    BeaconQueries shown = plain;
    const Sequence sequence(random, 300);
    Workspace work(max(plain.workspace_size(), plain.prefill_workspace_size(9)));
    for (index_t token = 0; token < 300; ++token) {
      const index_t count = random.integer(0, 9) == 0 ? std::min<index_t>(9, 300 - token) : 1;
      for (BeaconQueries* const observer : {&plain, &shown})
        require_ok(count > 1 ? observer->prefill({sequence.view(token, count), token}, work)
                             : observer->observe({sequence.view(token, 1), token}));
      token += count - 1;
      std::vector<float> rows(at(3 * shown.rows() * 12));
      std::vector<position_t> positions(at(3 * shown.rows()));
      std::vector<position_t> tags(at(3 * shown.num_beacons()));
      const Range heads{random.integer(0, 1), random.integer(1, 3)};
      for (int i = random.coin() ? 2 : 0; i > 0; --i) {
        require_ok(shown.write_rows(&rope, 999, heads, rows.data(), positions.data(), work, tags.data()));
        std::vector<float> expected(rows.size());
        std::vector<position_t> expected_tags(tags.size());
        require_ok(plain.write_rows(&rope, 999, heads, expected.data(), positions.data(), work, expected_tags.data()));
        REQUIRE(rows == expected);
        REQUIRE(tags == expected_tags);
      }
      if (random.integer(0, 3) == 0)
        for (BeaconQueries* const observer : {&plain, &shown}) require_ok(observer->commit());
      REQUIRE(shown.pool_size() == plain.pool_size());
      for (index_t h = 0; h < 3; ++h) {
        REQUIRE(pool_positions(shown, h) == pool_positions(plain, h));
        for (index_t i = 0; i < plain.pool_size(); ++i)
          REQUIRE(std::equal(plain.pool_row(h, i), plain.pool_row(h, i) + 12, shown.pool_row(h, i)));
      }
    }
  }
}

TEST_CASE("observers tell where the queries of some heads are stored, and no others", "[observer]") {
  Random random;
  CAPTURE(random.seed());
  const Sequence sequence(random, 90);
  const auto stored = [](const auto& observer, Range heads) {
    detail::MemoryAhead memory;
    observer.add_ahead(heads, memory);
    std::vector<reference::Row> rows;
    for (const detail::RowsAhead& part : memory)
      for (index_t i = 0; i < part.rows; ++i)
        for (index_t b = 0; b < part.bytes; b += 12 * 4)
          rows.push_back(reference::row_of(reinterpret_cast<const float*>(part.data + i * part.stride + b), 12));
    std::sort(rows.begin(), rows.end());
    return rows;
  };
  RecentQueries recent(shape, {.count = 6});
  BeaconQueries beacons(shape, {.n_beacon = 4, .n_recent_queries = 5});
  for (index_t token = 0; token < 90; ++token) {
    require_ok(recent.observe({sequence.view(token, 1), token}));
    require_ok(beacons.observe({sequence.view(token, 1), token}));
    for (const Range heads : {Range{0, 3}, Range{1, 2}, Range{2, 3}}) {
      std::vector<reference::Row> in_ring;
      std::vector<reference::Row> in_both;
      for (index_t h = heads.first; h < heads.last; ++h) {
        for (index_t t = std::max<index_t>(0, token - 5); t <= token; ++t) in_ring.push_back(sequence.row(t, h));
        for (index_t t = std::max<index_t>(0, token - 4); t <= token; ++t) in_both.push_back(sequence.row(t, h));
        for (index_t i = 0; i < beacons.pool_size(); ++i) in_both.push_back(reference::row_of(beacons.pool_row(h, i), 12));
      }
      std::sort(in_ring.begin(), in_ring.end());
      std::sort(in_both.begin(), in_both.end());
      REQUIRE(stored(recent, heads) == in_ring);
      REQUIRE(stored(beacons, heads) == in_both);
    }
  }
}

TEST_CASE("a copy of an observer goes its own way", "[observer]") {
  Random random;
  CAPTURE(random.seed());
  const RopeTable rope({.head_dim = 12});
  const Sequence sequence(random, 80);
  const auto check = [&](auto observer) {
    for (index_t token = 0; token < 40; ++token) require_ok(observer.observe({sequence.view(token, 1), token}));
    const Shown before = show(observer, &rope, 99);
    auto copy = observer;
    for (index_t token = 40; token < 80; ++token) require_ok(copy.observe({sequence.view(token, 1), token}));
    require_ok(copy.commit());
    REQUIRE(show(observer, &rope, 99).rows == before.rows);
    REQUIRE(show(copy, &rope, 99).rows != before.rows);
    copy = observer;
    REQUIRE(show(copy, &rope, 99).rows == before.rows);
  };
  check(RecentQueries(shape, {.count = 6}));
  check(BeaconQueries(shape, {.n_beacon = 5, .n_recent_queries = 6}));
}

TEST_CASE("BeaconQueries' prefill asks for its scratch before it takes anything", "[observer]") {
  Random random;
  const Sequence sequence(random, 60);
  BeaconQueries observer(shape, {.n_beacon = 5, .n_recent_queries = 6});
  require_ok(observer.observe({sequence.view(0, 1), 0}));
  const auto call = [&](Workspace& work) { return observer.prefill({sequence.view(0, 60), 1}, work); };
  const BeaconQueries before = observer;
  const RopeTable rope({.head_dim = 12});
  const WorkspaceSize size = observer.prefill_workspace_size(60);
  Workspace exact(size);
  Workspace less({size.bytes - 1, 0, 0});
  check_error(call(less), StatusCode::workspace_too_small, {"workspace has"});
  REQUIRE(show(observer, &rope, 70).rows == show(before, &rope, 70).rows);
  require_ok(call(exact));
  REQUIRE(exact.peak() <= size.bytes);
  REQUIRE(observer.rows() == 6);
}

TEST_CASE("observers refuse what cannot work, by name and value", "[observer]") {
  check_invalid(validate(RecentQueries::Options{.count = 0}, shape), {"n_recent_queries = 0"});
  check_invalid(validate(RecentQueries::Options{.count = -7}, shape), {"n_recent_queries = -7"});
  check_invalid(validate(BeaconQueries::Options{.n_beacon = -1}, shape), {"n_beacon = -1"});
  check_invalid(validate(BeaconQueries::Options{.n_recent_queries = 0}, shape), {"n_recent_queries = 0"});
  REQUIRE(validate(BeaconQueries::Options{.n_beacon = 0, .n_recent_queries = 1}, shape).ok());
  REQUIRE(validate(RecentQueries::Options{.count = 1, .newest_twice = true}, shape).ok());
}
