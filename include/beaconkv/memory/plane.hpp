// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Where an engine's keys (or values) of one layer lie in memory: strides and pages.

#include <type_traits>

#include "beaconkv/types.hpp"

namespace beaconkv::inline v0 {

/// Distances between neighbours, in elements. `page` is used only where there are pages.
struct Strides {
  index_t page = 0;
  index_t head = 0;
  index_t token = 0;
  index_t dim = 1;
};

/// The keys or the values of one layer of one sequence. Does not own: `base` and `pages` must outlive it. Trivially copyable.
///
/// Token `t` of head `h` begins at `base + page(t)*stride.page + h*stride.head + in_page(t)*stride.token`, its numbers
/// `stride.dim` apart. Contiguous memory is one page.
template <class T>
struct Plane {
  using element_type = T;

  T* base = nullptr;
  Strides stride{};
  index_t heads = 0;
  index_t dim = 0;
  index_t capacity = 0;                 ///< tokens that the memory (or the page table) has room for
  index_t page_size = 0;                ///< tokens a page; 0: not paged
  const std::int32_t* pages = nullptr;  ///< page numbers of the sequence, in order; `capacity / page_size` of them

  [[nodiscard]] T* row(index_t head, index_t token) const noexcept {
    if (page_size == 0) return base + head * stride.head + token * stride.token;
    return base + index_t{pages[token / page_size]} * stride.page + head * stride.head + token % page_size * stride.token;
  }

  /// How many of the rows `[first, first + count)` lie `stride.token` apart, counted from `first`: all of them unless a page
  /// ends.
  [[nodiscard]] index_t contiguous_rows(index_t first, index_t count) const noexcept {
    if (page_size == 0) return count;
    const index_t in_page = page_size - first % page_size;
    return in_page < count ? in_page : count;
  }
};

static_assert(std::is_trivially_copyable_v<Plane<float>>);

/// Dense `[head][capacity][dim]` ("HND").
template <class T>
[[nodiscard]] constexpr Plane<T> head_major_plane(T* base, index_t heads, index_t dim, index_t capacity) noexcept {
  return {base, {0, capacity * dim, dim, 1}, heads, dim, capacity, 0, nullptr};
}

/// Dense `[capacity][head][dim]` ("NHD").
template <class T>
[[nodiscard]] constexpr Plane<T> token_major_plane(T* base, index_t heads, index_t dim, index_t capacity) noexcept {
  return {base, {0, dim, heads * dim, 1}, heads, dim, capacity, 0, nullptr};
}

namespace detail {

/// Empty where the plane can be addressed.
template <class T>
[[nodiscard]] Status validate_plane(const Plane<T>& plane, const char* name) {
  if (plane.base == nullptr) return invalid(name, ".base is null");
  if (plane.heads < 1 || plane.dim < 1)
    return invalid(name, ": heads = ", plane.heads, ", dim = ", plane.dim, ": must be at least 1");
  if (plane.capacity < 0) return invalid(name, ".capacity = ", plane.capacity, ": must not be negative");
  if (plane.page_size < 0) return invalid(name, ".page_size = ", plane.page_size, ": must not be negative");
  if (plane.page_size > 0 && plane.capacity % plane.page_size != 0)
    return invalid(name, ".capacity = ", plane.capacity, ": must be a multiple of page_size = ", plane.page_size);
  if (plane.page_size > 0 && plane.capacity > 0 && plane.pages == nullptr)
    return invalid(name, ".pages is null for paged memory");
  if (plane.stride.dim == 0 || (plane.stride.token == 0 && plane.capacity > 1))
    return invalid(name, ".stride: dim = ", plane.stride.dim, ", token = ", plane.stride.token, ": must not be 0");
  if (plane.stride.head == 0 && plane.heads > 1 && plane.capacity > 0)
    return invalid(name, ".stride: head = 0: ", plane.heads, " heads must not share their rows");
  if (plane.pages != nullptr)
    for (index_t p = 0; p < plane.capacity / (plane.page_size > 0 ? plane.page_size : 1); ++p)
      if (plane.pages[p] < 0) return invalid(name, ".pages[", p, "] = ", plane.pages[p], ": must not be negative");
  return {};
}

}  // namespace detail
}  // namespace beaconkv::inline v0
