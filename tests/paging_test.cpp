// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "beaconkv/memory/paging.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "beaconkv/memory/compact.hpp"
#include "beaconkv/memory/plane_cache.hpp"
#include "support/check.hpp"
#include "support/random.hpp"

namespace {

using namespace beaconkv;
using namespace beaconkv::test;
using Slots = std::vector<slot_t>;
using Pages = std::vector<page_t>;

/// What `assign` reads of a cache.
struct FakeCache {
  index_t heads = 1;
  index_t tokens = 0;
  [[nodiscard]] index_t num_kv_heads() const noexcept { return heads; }
  [[nodiscard]] index_t num_tokens() const noexcept { return tokens; }
  [[nodiscard]] std::uint64_t epoch() const noexcept { return 1; }
};

KeepPlan plan_of(index_t tokens, const std::vector<Slots>& sets) {
  KeepPlan plan;
  const std::vector<std::span<const slot_t>> spans(sets.begin(), sets.end());
  plan.assign(FakeCache{static_cast<index_t>(sets.size()), tokens}, spans).or_throw();
  return plan;
}

Slots all_but(index_t tokens, const Slots& gone) {
  Slots kept;
  for (slot_t slot = 0; slot < tokens; ++slot)
    if (std::find(gone.begin(), gone.end(), slot) == gone.end()) kept.push_back(slot);
  return kept;
}

std::vector<PagedMove> moves(const KeepPlan& plan, index_t head, index_t page_size, const Pages& table) {
  std::vector<PagedMove> all;
  for_each_paged_move(plan, head, page_size, table, [&](const PagedMove& move) { all.push_back(move); }).or_throw();
  return all;
}

index_t not_shared(page_t) { return 1; }

auto holders(const PagePool& pool) {
  return [&pool](page_t page) { return pool.ref_count(page); };
}

/// A table of `tokens` tokens in pages of `pool`.
PageTable filled(PagePool& pool, index_t max_pages, index_t page_size, index_t tokens) {
  PageTable table = PageTable::make(max_pages, page_size).or_throw();
  for (index_t t = 0; t < tokens; ++t) table.append(pool).or_throw();
  return table;
}

Pages used(const PageTable& table) { return {table.entries().begin(), table.entries().begin() + table.num_pages()}; }

TEST_CASE("[J3] pages are free only when they are empty, so rows move, in place and from front to back", "[J3]") {
  const KeepPlan plan = plan_of(16, {{0, 1, 5, 6, 9, 10, 13, 14, 15}});
  const Pages table{7, 3, 9, 2};
  const PageChanges changes = page_changes(plan, 4, table, not_shared).or_throw();
  CHECK(changes.released == Range{3, 4});  // 3 pages stay
  CHECK(changes.num_freed == 1);
  CHECK(changes.num_freed_in_place == 0);
  CHECK(changes.written == Range{0, 3});
  CHECK(changes.unchanged == Range{0, 0});
  CHECK(moves(plan, 0, 4, table) == std::vector<PagedMove>{{7, 2, 3, 1, 2}, {3, 0, 9, 1, 2}, {3, 2, 2, 1, 2}, {9, 0, 2, 3, 1}});
}

TEST_CASE("[J4] an order of sources that is not safe in place cannot become a plan", "[J4]") {
  KeepPlan plan;
  const Slots unsorted{9, 0, 5};
  const std::array<std::span<const slot_t>, 1> sets{unsorted};
  check_invalid(plan.assign(FakeCache{1, 10}, sets), {"slot 0", "behind 9"});
  CHECK(plan.sets() == 0);
  index_t calls = 0;
  check_error(for_each_paged_move(plan, 0, 4, Pages{0, 1, 2}, [&](const PagedMove&) { ++calls; }), StatusCode::stale_plan,
              {"plan is empty"});
  check_error(page_changes(plan, 4, Pages{0, 1, 2}, not_shared).status(), StatusCode::stale_plan, {"plan is empty"});
  CHECK(calls == 0);
}

TEST_CASE("[I4] pages behind the first removed slot lose their identity", "[I4]") {
  const Pages table{0, 1, 2, 3};
  const auto unchanged = [&](const Slots& gone) {
    return page_changes(plan_of(64, {all_but(64, gone)}), 16, table, not_shared).or_throw().unchanged;
  };
  CHECK(unchanged({20, 21}) == Range{0, 1});
  CHECK(unchanged({16}) == Range{0, 1});
  CHECK(unchanged({15}) == Range{0, 0});
  CHECK(unchanged({63}) == Range{0, 3});
  CHECK(unchanged({}) == Range{0, 4});
  CHECK(page_changes(plan_of(60, {all_but(60, {})}), 16, table, not_shared).or_throw().unchanged == Range{0, 4});
}

TEST_CASE("[M3] a prefix that stays is not moved, and its full pages stay valid", "[M3]") {
  Slots kept{0, 1, 2, 3};
  for (slot_t slot = 20; slot < 40; ++slot) kept.push_back(slot);
  const KeepPlan plan = plan_of(40, {kept});
  const Pages table{0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
  const PageChanges changes = page_changes(plan, 4, table, not_shared).or_throw();
  CHECK(changes.unchanged == Range{0, 1});
  CHECK(changes.written == Range{1, 6});
  CHECK(changes.released == Range{6, 10});
  CHECK(changes.num_freed == 4);
  CHECK(changes.num_freed_in_place == 4);  // slots 4 .. 19 are whole pages
  CHECK(moves(plan, 0, 4, table).front() == PagedMove{1, 0, 5, 0, 4});
}

TEST_CASE("[I3] a plan over shared pages says which ones need a copy first", "[I3]") {
  PagePool pool = PagePool::make(16).or_throw();
  PageTable table = filled(pool, 8, 8, 60);
  for (index_t entry = 0; entry < 4; ++entry)  // [0, 32) is shared
    pool.share(table.entries()[static_cast<std::size_t>(entry)]).or_throw();

  // Behind the shared range: nothing of it is written.
  std::vector<index_t> entries(8, -1);
  PageChanges changes =
      page_changes(plan_of(60, {all_but(60, {32, 40})}), 8, table.entries(), holders(pool), entries).or_throw();
  CHECK(changes.num_need_copy == 0);
  CHECK(changes.unchanged == Range{0, 4});
  CHECK(entries == std::vector<index_t>(8, -1));

  // Into it: pages 2 and 3 are shared, 4 to 7 are not.
  const KeepPlan plan = plan_of(60, {all_but(60, {17, 18, 30})});
  changes = page_changes(plan, 8, table.entries(), holders(pool), entries).or_throw();
  CHECK(changes.num_need_copy == 2);
  CHECK(entries == std::vector<index_t>{2, 3, -1, -1, -1, -1, -1, -1});
  CHECK(changes.written == Range{2, 8});
  std::array<index_t, 1> one{-1};
  CHECK(page_changes(plan, 8, table.entries(), holders(pool), one).or_throw().num_need_copy == 2);
  CHECK(one[0] == 2);

  // With its copies, the sequence writes pages that it alone holds.
  const Pages before = used(table);
  for (const index_t entry : {2, 3}) {
    const PageCopy copy = table.make_own(entry, pool).or_throw();
    CHECK(copy.from == before[static_cast<std::size_t>(entry)]);
    CHECK(copy.to == table.entries()[static_cast<std::size_t>(entry)]);
    CHECK(pool.ref_count(copy.from) == 1);
    CHECK(pool.ref_count(copy.to) == 1);
  }
  CHECK(table.make_own(4, pool).or_throw() == PageCopy{});  // its own already
  CHECK(page_changes(plan, 8, table.entries(), holders(pool)).or_throw().num_need_copy == 0);
}

TEST_CASE("[K2] a page that others hold is not free", "[K2]") {
  PagePool pool = PagePool::make(4).or_throw();
  PageTable table = filled(pool, 4, 4, 16);
  pool.share(table.entries()[1]).or_throw();
  const PageChanges changes = page_changes(plan_of(16, {{}}), 4, table.entries(), holders(pool)).or_throw();
  CHECK(changes.released == Range{0, 4});
  CHECK(changes.num_freed == 3);
  CHECK(changes.num_freed_in_place == 3);
  CHECK(table.truncate(0, pool).or_throw() == 3);
  CHECK(pool.num_free() == 3);
}

TEST_CASE("[I2] who appends to a shared page copies it first", "[I2]") {
  PagePool pool = PagePool::make(8).or_throw();
  PageTable first = filled(pool, 4, 4, 6);
  PageTable second = PageTable::make(4, 4).or_throw();
  second.fork_from(first, pool).or_throw();
  CHECK(used(second) == used(first));
  CHECK(second.num_tokens() == 6);
  const page_t shared = first.entries()[1];
  CHECK(pool.ref_count(shared) == 2);

  const PagePlace place = second.append(pool).or_throw();
  CHECK(place.entry == 1);
  CHECK(place.offset == 2);
  CHECK(place.page != shared);
  CHECK(place.copy == PageCopy{shared, place.page});
  CHECK(second.entries()[1] == place.page);
  CHECK(first.entries()[1] == shared);
  CHECK(pool.ref_count(shared) == 1);
  CHECK(pool.ref_count(place.page) == 1);
  CHECK(pool.ref_count(first.entries()[0]) == 2);
  CHECK(second.entries()[0] == first.entries()[0]);

  CHECK(first.append(pool).or_throw().copy == PageCopy{});  // nobody else holds it now
  CHECK(second.append(pool).or_throw().copy == PageCopy{});
  CHECK(second.append(pool).or_throw().copy == PageCopy{});  // at a boundary the shared page before stays shared
  CHECK(pool.ref_count(first.entries()[0]) == 2);
}

TEST_CASE("[J1] after whole pages went from the front, tokens keep their numbers", "[J1]") {
  PagePool pool = PagePool::make(4).or_throw();
  PageTable table = filled(pool, 3, 4, 12);
  const Pages before = used(table);
  CHECK(table.drop_front(1, pool).or_throw() == 1);
  CHECK(table.first_token() == 4);
  CHECK(table.num_tokens() == 8);
  const PagePlace five = table.locate(5).or_throw();
  CHECK(five.entry == 0);
  CHECK(five.offset == 1);
  CHECK(five.page == before[1]);
  check_invalid(table.locate(3).status(), {"token = 3", "[4, 12)"});
  const PagePlace twelve = table.append(pool).or_throw();
  CHECK(twelve.entry == 2);
  CHECK(twelve.offset == 0);
  CHECK(table.locate(12).or_throw().page == twelve.page);
  check_invalid(table.drop_front(3, pool).status(), {"count = 3", "2 full pages"});
  check_invalid(table.drop_front(-1, pool).status(), {"count = -1"});
}

TEST_CASE("[J2] entries behind the used ones are -1, and -1 is never read", "[J2]") {
  PagePool pool = PagePool::make(8).or_throw();
  PageTable table = filled(pool, 8, 4, 12);
  const page_t last = table.entries()[2];
  CHECK(table.truncate(8, pool).or_throw() == 1);
  for (std::size_t entry = 2; entry < 8; ++entry) CHECK(table.entries()[entry] == no_page);
  CHECK(table.entries()[1] >= 0);
  CHECK(pool.ref_count(last) == 0);
  check_invalid(table.locate(8).status(), {"token = 8", "[0, 8)"});

  // A plan that is older than the table, or a table with a hole.
  const KeepPlan plan = plan_of(12, {{0, 5, 11}});
  index_t calls = 0;
  const auto count = [&](const PagedMove&) { ++calls; };
  check_invalid(for_each_paged_move(plan, 0, 4, table.entries(), count), {"table[2] = -1"});
  check_invalid(for_each_paged_move(plan, 0, 4, Pages{0, 1}, count), {"table has 2 entries", "3 pages"});
  check_invalid(page_changes(plan, 4, table.entries(), not_shared).status(), {"table[2] = -1"});
  check_invalid(for_each_paged_move(plan, 0, 0, table.entries(), count), {"page_size = 0"});
  check_invalid(page_changes(plan, -3, table.entries(), not_shared).status(), {"page_size = -3"});
  check_invalid(for_each_paged_move(plan, -1, 4, Pages{0, 1, 2}, count), {"head = -1"});
  CHECK(calls == 0);
  CHECK(for_each_paged_move(plan_of(8, {{0, 5}}), 3, 4, table.entries(), count).ok());  // any head where one set counts for all
  CHECK(calls == 1);
  check_invalid(for_each_paged_move(plan_of(8, {{0, 5}, {1, 2}}), 2, 4, table.entries(), count), {"head = 2", "2 sets"});
}

TEST_CASE("A pool names what it refuses and stays as it was") {
  check_invalid(PagePool::make(-1).status(), {"num_pages = -1"});
  check_invalid(PagePool::make(index_t{1} << 40).status(), {"num_pages = 1099511627776"});
  check_error(PagePool::make(0).or_throw().take().status(), StatusCode::out_of_capacity, {"0 pages"});

  PagePool pool = PagePool::make(2).or_throw();
  const page_t a = pool.take().or_throw();
  CHECK(a == 0);
  CHECK(pool.take().or_throw() == 1);
  check_error(pool.take().status(), StatusCode::out_of_capacity, {"2 pages"});
  pool.share(a).or_throw();
  CHECK(pool.ref_count(a) == 2);
  CHECK_FALSE(pool.release(a).or_throw());
  CHECK(pool.release(a).or_throw());
  check_invalid(pool.release(a).status(), {"page = 0", "twice"});
  check_invalid(pool.share(a), {"page = 0", "free"});
  check_invalid(pool.release(2).status(), {"page = 2", "between 0 and 1"});
  check_invalid(pool.release(no_page).status(), {"page = -1"});
  check_invalid(pool.share(-7), {"page = -7"});
  CHECK(pool.ref_count(2) == 0);
  CHECK(pool.ref_count(-1) == 0);
  CHECK(pool.num_free() == 1);
  CHECK(pool.take().or_throw() == a);
}

TEST_CASE("A table names what it refuses; table and pool stay as they were") {
  check_invalid(PageTable::make(-1, 4).status(), {"max_pages = -1"});
  check_invalid(PageTable::make(4, 0).status(), {"page_size = 0"});
  PagePool pool = PagePool::make(3).or_throw();
  PageTable table = filled(pool, 2, 2, 4);
  const Pages before = used(table);
  check_error(table.append(pool).status(), StatusCode::out_of_capacity, {"2 entries"});
  check_invalid(table.truncate(5, pool).status(), {"count = 5", "4"});
  check_invalid(table.truncate(-1, pool).status(), {"count = -1"});
  check_invalid(table.make_own(2, pool).status(), {"entry = 2", "[0, 2)"});
  check_invalid(table.make_own(-1, pool).status(), {"entry = -1"});
  check_invalid(table.locate(-1).status(), {"token = -1"});

  PageTable other = PageTable::make(1, 2).or_throw();
  check_error(other.fork_from(table, pool), StatusCode::out_of_capacity, {"2 pages", "1 entries"});
  PageTable wide = PageTable::make(2, 4).or_throw();
  check_invalid(wide.fork_from(table, pool), {"page_size = 2", "4"});
  check_invalid(table.fork_from(wide, pool), {"4 tokens"});

  PagePool stranger = PagePool::make(3).or_throw();
  check_invalid(table.truncate(1, stranger).status(), {"table[1] = 1", "pool"});
  check_invalid(table.drop_front(1, stranger).status(), {"table[0] = 0", "pool"});
  check_invalid(table.make_own(0, stranger).status(), {"table[0] = 0", "pool"});
  PageTable fork = PageTable::make(2, 2).or_throw();
  check_invalid(fork.fork_from(table, stranger), {"table[0] = 0", "pool"});
  CHECK(used(table) == before);
  CHECK(table.num_tokens() == 4);
  CHECK(fork.num_pages() == 0);
  CHECK(stranger.num_free() == 3);
  CHECK(pool.num_free() == 1);

  // A fork that finds no page for its copy.
  CHECK(table.truncate(3, pool).or_throw() == 0);  // within a page
  fork.fork_from(table, pool).or_throw();
  static_cast<void>(pool.take().or_throw());
  check_error(fork.append(pool).status(), StatusCode::out_of_capacity, {"3 pages"});
  CHECK(fork.num_tokens() == 3);
  CHECK(used(fork) == before);
  CHECK(pool.ref_count(before[1]) == 2);
}

/// Paged keys of two heads that a plan is applied to, `[page][in page][head]`, one number a row.
struct PagedRows {
  index_t page_size;
  std::vector<float> rows;
  [[nodiscard]] float* at(page_t page, index_t offset, index_t head) {
    return &rows[static_cast<std::size_t>((page * page_size + offset) * 2 + head)];
  }
};

TEST_CASE("[J3] paged moves equal a gather and what compact does, for any plan and page size", "[J3]") {
  Random random;
  CAPTURE(random.seed());
  for (const index_t page_size : {1, 3, 4, 16})
    for (const index_t base : {index_t{1}, page_size, 2 * page_size, 5 * page_size})
      for (index_t tokens = std::max<index_t>(1, base - 1); tokens <= base + 1; ++tokens)
        for (index_t round = 0; round < 12; ++round) {
          const index_t count = random.integer(0, tokens);
          const index_t sets = random.integer(1, 2);
          CAPTURE(page_size, tokens, count, sets);
          const index_t pages = detail::pages_of(tokens, page_size);
          Pages table(static_cast<std::size_t>(pages + 3));
          for (std::size_t p = 0; p < table.size(); ++p) table[p] = static_cast<page_t>(p);
          random.shuffle(table);
          PagedRows moved{page_size, random.normals((pages + 3) * page_size * 2)};
          PagedRows compacted = moved;
          PagedRows values = moved;
          const PagedRows before = moved;

          Plane<float> plane;
          plane.base = compacted.rows.data();
          plane.stride = {page_size * 2, 1, 2, 1};
          plane.heads = 2;
          plane.dim = 1;
          plane.capacity = pages * page_size;
          plane.page_size = page_size;
          plane.pages = table.data();
          Plane<float> value_plane = plane;
          value_plane.base = values.rows.data();
          auto cache = PlaneCache<float>::make(plane, value_plane).or_throw();
          cache.append_run(0, tokens).or_throw();
          std::vector<Slots> kept;
          for (index_t s = 0; s < sets; ++s) kept.push_back(random.subset(count, tokens));
          KeepPlan plan;
          const std::vector<std::span<const slot_t>> spans(kept.begin(), kept.end());
          plan.assign(cache, spans).or_throw();

          const auto place = [&](index_t slot) {
            return std::pair{table[static_cast<std::size_t>(slot / page_size)], slot % page_size};
          };
          index_t entries_written = 0;
          std::vector<bool> written(table.size(), false);
          for (index_t head = 0; head < 2; ++head) {
            index_t next = plan.unchanged_prefix(head);  // moves come in order, without a gap
            for (const PagedMove& move : moves(plan, head, page_size, table)) {
              REQUIRE(move.count > 0);
              REQUIRE(move.to_offset + move.count <= page_size);
              REQUIRE(move.from_offset + move.count <= page_size);
              REQUIRE(place(next) == std::pair{move.to_page, move.to_offset});
              REQUIRE_FALSE((move.to_page == move.from_page && move.to_offset >= move.from_offset));
              for (index_t i = 0; i < move.count; ++i)
                *moved.at(move.to_page, move.to_offset + i, head) = *moved.at(move.from_page, move.from_offset + i, head);
              written[static_cast<std::size_t>(next / page_size)] = true;
              next += move.count;
            }
            REQUIRE(next == plan.num_kept(head));
            PagedRows source = before;
            for (index_t i = 0; i < count; ++i) {
              const auto [to_page, to_offset] = place(i);
              const auto [from_page, from_offset] = place(plan.kept(head)[static_cast<std::size_t>(i)]);
              REQUIRE(bits_of(*moved.at(to_page, to_offset, head)) == bits_of(*source.at(from_page, from_offset, head)));
            }
          }

          const PageChanges changes = page_changes(plan, page_size, table, not_shared).or_throw();
          for (std::size_t p = 0; p < written.size(); ++p) {
            entries_written += written[p] ? 1 : 0;
            const auto entry = static_cast<std::int64_t>(p);
            if (written[p]) REQUIRE((entry >= changes.written.first && entry < changes.written.last));
          }
          REQUIRE(changes.written.size() == entries_written);
          REQUIRE(changes.num_freed == pages - detail::pages_of(count, page_size));
          REQUIRE(changes.released == Range{detail::pages_of(count, page_size), pages});
          index_t empty = 0;
          for (index_t p = 0; p < pages; ++p) {
            bool holds = false;
            for (const Slots& set : kept)
              for (const slot_t slot : set) holds = holds || slot / page_size == p;
            empty += holds ? 0 : 1;
          }
          REQUIRE(changes.num_freed_in_place == empty);
          REQUIRE(changes.num_freed_in_place <= changes.num_freed);
          for (index_t p = 0; p < changes.unchanged.last; ++p)  // bit for bit, and all of it kept
            for (index_t offset = 0; offset < page_size && p * page_size + offset < tokens; ++offset)
              for (const Slots& set : kept)
                REQUIRE(set.at(static_cast<std::size_t>(p * page_size + offset)) == p * page_size + offset);

          compact(cache, plan).or_throw();
          REQUIRE(same_bits(moved.rows, compacted.rows));
          REQUIRE(same_bits(moved.rows, values.rows));
        }
}

TEST_CASE("Paging allocates nothing after construction") {
  PagePool pool = PagePool::make(16).or_throw();
  PageTable table = PageTable::make(8, 4).or_throw();
  PageTable fork = PageTable::make(8, 4).or_throw();
  const KeepPlan plan = plan_of(30, {all_but(30, {3, 9, 20})});
  std::array<index_t, 8> need_copy{};
  index_t rows = 0;
  bool ok = true;
  CHECK(allocations_of([&] {
          for (index_t t = 0; t < 30; ++t) ok = table.append(pool).ok() && ok;
          ok = fork.fork_from(table, pool).ok() && ok;
          const Result<PageChanges> changes = page_changes(plan, 4, fork.entries(), holders(pool), need_copy);
          ok = changes && changes->num_need_copy == 7 && ok;
          for (index_t i = 0; changes && i < changes->num_need_copy; ++i)
            ok = fork.make_own(need_copy[static_cast<std::size_t>(i)], pool).ok() && ok;
          ok = for_each_paged_move(plan, 0, 4, fork.entries(), [&](const PagedMove& move) { rows += move.count; }).ok() && ok;
          ok = fork.truncate(27, pool).ok() && ok;
          ok = fork.append(pool).ok() && ok;
          ok = fork.drop_front(2, pool).ok() && fork.truncate(0, pool).ok() && table.truncate(0, pool).ok() && ok;
        }) == 0);
  CHECK(ok);
  CHECK(rows == 24);
  CHECK(pool.num_free() == 16);
}

}  // namespace
