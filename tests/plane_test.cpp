// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "beaconkv/memory/layouts.hpp"

#include <sys/mman.h>

#include <cstdint>
#include <vector>

#include "support/check.hpp"

namespace {

using namespace beaconkv;
using namespace beaconkv::test;

/// Where a row begins, counted from `base`.
template <class T>
index_t offset(const Plane<T>& plane, index_t head, index_t token) {
  return plane.row(head, token) - plane.base;
}

TEST_CASE("Dense planes find their rows") {
  std::vector<float> memory(2 * 5 * 3);
  const Plane<float> by_head = head_major_plane(memory.data(), 2, 3, 5);
  const Plane<float> by_token = token_major_plane(memory.data(), 2, 3, 5);
  CHECK(by_head.heads == 2);
  CHECK(by_head.dim == 3);
  CHECK(by_head.capacity == 5);
  CHECK(by_head.stride.dim == 1);
  for (index_t h = 0; h < 2; ++h)
    for (index_t t = 0; t < 5; ++t) {
      CHECK(offset(by_head, h, t) == (h * 5 + t) * 3);
      CHECK(offset(by_token, h, t) == (t * 2 + h) * 3);
    }
  CHECK(by_head.contiguous_rows(2, 3) == 3);
}

TEST_CASE("A paged plane goes through its page table") {
  std::vector<float> memory(1000);
  const std::vector<std::int32_t> pages{5, 0, 3};
  Plane<float> plane{memory.data(), {100, 10, 20, 1}, 2, 10, 12, 4, pages.data()};
  CHECK(detail::validate_plane(plane, "keys").ok());
  CHECK(offset(plane, 0, 0) == 500);
  CHECK(offset(plane, 1, 3) == 500 + 10 + 60);
  CHECK(offset(plane, 0, 4) == 0);
  CHECK(offset(plane, 1, 7) == 10 + 60);
  CHECK(offset(plane, 0, 9) == 300 + 20);
  CHECK(plane.contiguous_rows(0, 4) == 4);
  CHECK(plane.contiguous_rows(0, 5) == 4);
  CHECK(plane.contiguous_rows(3, 5) == 1);
  CHECK(plane.contiguous_rows(4, 3) == 3);
  CHECK(plane.contiguous_rows(6, 9) == 2);
  CHECK(plane.contiguous_rows(6, 0) == 0);
}

TEST_CASE("Memory to ask for: whole rows up to the end of a page, none where numbers lie apart") {
  std::vector<float> memory(1000);
  const std::vector<std::int32_t> pages{5, 0, 3};
  Plane<float> plane{memory.data(), {100, 10, 20, 1}, 2, 10, 12, 4, pages.data()};
  const detail::RowsAhead rows = detail::rows_ahead(plane, 1, 2, 7);
  CHECK(rows.data == reinterpret_cast<const std::byte*>(plane.row(1, 2)));
  CHECK(rows.stride == 80);
  CHECK(rows.bytes == 40);
  CHECK(rows.rows == 2);
  CHECK(rows.lines() == 2);
  CHECK(detail::rows_ahead(plane, 1, 12, 0).rows == 0);
  CHECK(detail::rows_ahead(plane, 1, 13, -1).rows == 0);
  plane.stride.dim = 2;
  CHECK(detail::rows_ahead(plane, 1, 2, 7).rows == 0);
}

TEST_CASE("Offsets are 64 bits wide") {
  // Addresses without memory behind them: nothing is read there.
  constexpr std::size_t size = std::size_t{14} << 30;
  void* const addresses = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  REQUIRE(addresses != MAP_FAILED);
  auto* const base = static_cast<char*>(addresses);
  constexpr index_t wide = index_t{1} << 32;
  const std::int32_t pages[] = {0, 2};
  const Plane<char> strided{base, {0, wide, wide, 1}, 2, 1, 3, 0, nullptr};
  const Plane<char> paged{base, {wide, 1, 1, 1}, 1, 1, 2, 1, pages};
  CHECK(strided.row(1, 2) - base == 3 * wide);
  CHECK(paged.row(0, 1) - base == 2 * wide);
  CHECK(munmap(addresses, size) == 0);
}

TEST_CASE("Planes that cannot be addressed are refused by name and value") {
  std::vector<float> memory(100);
  const std::vector<std::int32_t> pages{1, -1};
  const Plane<float> good{memory.data(), {40, 20, 5, 1}, 2, 5, 8, 4, pages.data()};
  Plane<float> plane = good;
  const auto status = [&] { return detail::validate_plane(plane, "values"); };

  CHECK(status().ok());  // an entry behind the last used one may be -1
  CHECK(detail::check_pages(plane, 0, 4, "values").ok());
  check_invalid(detail::check_pages(plane, 3, 2, "values"), {"values.pages[1] = -1"});
  plane.num_pages = 1;
  check_invalid(detail::check_pages(plane, 0, 1, "values"), {"values.pages[0] = 1", "num_pages = 1"});
  plane.num_pages = -1;
  check_invalid(status(), {"values.num_pages = -1"});
  plane = good;
  plane.capacity = 6;
  check_invalid(status(), {"values.capacity = 6", "page_size = 4"});
  plane.capacity = -4;
  check_invalid(status(), {"values.capacity = -4"});
  plane = good;
  plane.pages = nullptr;
  check_invalid(status(), {"values.pages", "null"});
  plane.capacity = 0;
  CHECK(status().ok());
  plane = good;
  plane.page_size = -1;
  check_invalid(status(), {"values.page_size = -1"});
  plane = good;
  plane.base = nullptr;
  check_invalid(status(), {"values.base", "null"});
  plane = head_major_plane(memory.data(), 0, 5, 8);
  check_invalid(status(), {"heads = 0"});
  plane = head_major_plane(memory.data(), 2, -5, 8);
  check_invalid(status(), {"dim = -5"});
  plane = head_major_plane(memory.data(), 2, 5, 8);
  CHECK(status().ok());
  plane.stride.dim = 0;
  check_invalid(status(), {"values.stride", "dim = 0"});
  plane.stride = {0, 40, 0, 1};
  check_invalid(status(), {"values.stride", "token = 0"});
}

TEST_CASE("Heads that lie on top of each other are refused") {
  std::vector<float> memory(100);
  Plane<float> plane = head_major_plane(memory.data(), 2, 5, 8);
  plane.stride.head = 0;  // compaction would move every row twice
  check_invalid(detail::validate_plane(plane, "keys"), {"keys.stride", "head = 0"});
  plane.heads = 1;
  CHECK(detail::validate_plane(plane, "keys").ok());
}

}  // namespace
