// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Where an engine's keys (or values) of one layer lie in memory: strides, pages, scales. And the three things that are done
/// with a row: read it, write it, move it.

#include <cstring>
#include <type_traits>

#include "beaconkv/kernel/copy.hpp"
#include "beaconkv/kernel/read_ahead.hpp"
#include "beaconkv/memory/encode_rows.hpp"

namespace beaconkv::inline v0 {

/// Distances between neighbours, in elements. `page` is used only where there are pages.
struct Strides {
  index_t page = 0;
  index_t head = 0;
  index_t token = 0;
  index_t dim = 1;
};

/// The scales of a type that takes them: the number of row `(head, token)` is `element * base[...]`, with the strides of this
/// record, in floats. A stride of 0 shares a scale: `token` and `page` 0 is one a head, all 0 one for the whole plane.
struct Scales {
  float* base = nullptr;
  index_t page = 0;
  index_t head = 0;
  index_t token = 0;

  /// Whether each row has its own. It then moves with the row and is found anew when a row is written.
  [[nodiscard]] constexpr bool per_row() const noexcept { return token != 0; }
};

/// The keys or the values of one layer of one sequence. Does not own: `base`, `pages` and scales must outlive it. Trivially
/// copyable.
///
/// Token `t` of head `h` begins at `base + page(t)*stride.page + h*stride.head + in_page(t)*stride.token`, its elements
/// `stride.dim` apart. Contiguous memory is one page. A ring is a page table with pages of one token.
template <class T>
struct Plane {
  using element_type = T;

  T* base = nullptr;
  Strides stride{};
  index_t heads = 0;
  index_t dim = 0;        ///< numbers a row (for `q8_0` a multiple of 32)
  index_t capacity = 0;   ///< tokens that the memory (or the page table) has room for
  index_t page_size = 0;  ///< tokens a page; 0: not paged
  /// Page numbers of the sequence, in order; `capacity / page_size` of them. Entries behind the last used one may be -1: they
  /// are read when a token is appended there.
  const std::int32_t* pages = nullptr;
  index_t num_pages = 0;  ///< pages that the memory holds in all, to check entries against; 0: unknown
  Scales scales{};        ///< for types that take a scale

  [[nodiscard]] T* row(index_t head, index_t token) const noexcept {
    if (page_size == 0) return base + head * stride.head + token * stride.token;
    return base + index_t{pages[token / page_size]} * stride.page + head * stride.head + token % page_size * stride.token;
  }
  /// Precondition: there are scales.
  [[nodiscard]] float* scale(index_t head, index_t token) const noexcept {
    if (page_size == 0) return scales.base + head * scales.head + token * scales.token;
    return scales.base + index_t{pages[token / page_size]} * scales.page + head * scales.head +
           token % page_size * scales.token;
  }
  /// Elements a row.
  [[nodiscard]] constexpr index_t elements() const noexcept { return dim / numbers_per_element<T>; }

  /// How many of the rows `[first, first + count)` lie `stride.token` apart, counted from `first`: all of them unless a page
  /// ends.
  [[nodiscard]] index_t contiguous_rows(index_t first, index_t count) const noexcept {
    if (page_size == 0) return count;
    const index_t in_page = page_size - first % page_size;
    return in_page < count ? in_page : count;
  }

  /// Bytes of all heads' rows of a token, scales included.
  [[nodiscard]] constexpr index_t bytes_per_token() const noexcept {
    return heads * (elements() * index_t{sizeof(T)} + (scales.per_row() ? index_t{sizeof(float)} : 0));
  }
};

static_assert(std::is_trivially_copyable_v<Plane<float>>);

namespace detail {

/// An error where a page of the slots `[first, first + count)` cannot be addressed.
template <class T>
[[nodiscard]] Status check_pages(const Plane<T>& plane, index_t first, index_t count, const char* name) {
  if (plane.page_size == 0 || count == 0) return {};
  for (index_t p = first / plane.page_size; p <= (first + count - 1) / plane.page_size; ++p)
    if (plane.pages[p] < 0 || (plane.num_pages > 0 && plane.pages[p] >= plane.num_pages))
      return invalid(name, ".pages[", p, "] = ", plane.pages[p], ": must be a page of the pool",
                     plane.num_pages > 0 ? ", below num_pages = " : "",
                     plane.num_pages > 0 ? std::to_string(plane.num_pages) : std::string());
  return {};
}

/// Empty where the plane can be addressed.
template <class T>
[[nodiscard]] Status validate_plane(const Plane<T>& plane, const char* name) {
  if (plane.base == nullptr) return invalid(name, ".base is null");
  if (plane.heads < 1 || plane.dim < 1)
    return invalid(name, ": heads = ", plane.heads, ", dim = ", plane.dim, ": must be at least 1");
  if (plane.dim % numbers_per_element<T> != 0)
    return invalid(name, ".dim = ", plane.dim, ": must be a multiple of ", numbers_per_element<T>, ", the numbers in a block");
  if (plane.capacity < 0) return invalid(name, ".capacity = ", plane.capacity, ": must not be negative");
  if (plane.page_size < 0) return invalid(name, ".page_size = ", plane.page_size, ": must not be negative");
  if (plane.num_pages < 0) return invalid(name, ".num_pages = ", plane.num_pages, ": must not be negative");
  if (plane.page_size > 0 && plane.capacity % plane.page_size != 0)
    return invalid(name, ".capacity = ", plane.capacity, ": must be a multiple of page_size = ", plane.page_size);
  if (plane.page_size > 0 && plane.capacity > 0 && plane.pages == nullptr)
    return invalid(name, ".pages is null for paged memory");
  if (plane.stride.dim == 0 || (plane.stride.token == 0 && plane.capacity > 1 && plane.page_size != 1))
    return invalid(name, ".stride: dim = ", plane.stride.dim, ", token = ", plane.stride.token, ": must not be 0");
  if (plane.stride.head == 0 && plane.heads > 1 && plane.capacity > 0)
    return invalid(name, ".stride: head = 0: ", plane.heads, " heads must not share their rows");
  if (takes_scale<T> && plane.scales.base == nullptr)
    return invalid(name, ".scales.base is null: this storage type takes scales");
  if (!takes_scale<T> && plane.scales.base != nullptr) return invalid(name, ".scales: this storage type takes none");
  if (takes_scale<T> && plane.page_size > 0 && !plane.scales.per_row() && plane.scales.page != 0)
    return invalid(name, ".scales.page = ", plane.scales.page,
                   ": rows move between pages: give a scale to each row or to a head");
  if (std::is_same_v<T, std::int8_t> && !plane.scales.per_row() && plane.capacity > 1)
    return invalid(name, ".scales.token = 0: int8 needs a scale for each row");
  return {};
}

template <class T>
[[nodiscard]] float scale_or_one(const Plane<T>& plane, index_t head, index_t token) noexcept {
  if constexpr (takes_scale<T>) return *plane.scale(head, token);
  return 1.0F;
}

/// Reads a row: `dim` floats.
template <class T>
void load_row(const Plane<T>& plane, index_t head, index_t token, float* out) noexcept {
  const T* const row = plane.row(head, token);
  if constexpr (std::is_same_v<T, q8_0>) {
    for (index_t b = 0; b < plane.elements(); ++b) decode_block(row[b * plane.stride.dim], out + 32 * b);
  } else {
    const float scale = scale_or_one(plane, head, token);
    for (index_t d = 0; d < plane.dim; ++d) {
      out[d] = decode(row[d * plane.stride.dim]);
      if constexpr (takes_scale<T>) out[d] *= scale;
    }
  }
}

/// Reads `count` rows, dense: `count * dim` floats.
template <class T>
void load_rows(const Plane<T>& plane, index_t head, index_t first, index_t count, float* out) noexcept {
  for (index_t i = 0; i < count;) {
    const index_t n = plane.contiguous_rows(first + i, count - i);
    if (plane.stride.dim == 1) {
      const float* const scales = takes_scale<T> ? plane.scale(head, first + i) : nullptr;
      run<DecodeRows<T>>(
          StoredRows<T>{plane.row(head, first + i), plane.stride.token, n, plane.dim, scales, plane.scales.token},
          out + i * plane.dim);
    } else {
      for (index_t j = i; j < i + n; ++j) load_row(plane, head, first + j, out + j * plane.dim);
    }
    i += n;
  }
}

/// Whether `store_row` can write these numbers without running out of range: not where a shared scale is too small for them.
template <class T>
[[nodiscard]] bool row_fits(const Plane<T>& plane, index_t head, index_t token, const float* in) noexcept {
  if constexpr (takes_scale<T>) {
    if (plane.scales.per_row()) return true;
    const float limit = largest_before_scale<T> * *plane.scale(head, token);
    if (!all_finite(in, plane.dim)) return true;  // it stays what it is, a row that is not finite
    for (index_t d = 0; d < plane.dim; ++d)
      if (std::abs(in[d]) > limit) return false;
  }
  return true;
}

/// Writes a row, encoded once. A row's own scale is found anew from its largest number, a shared one is used as it is.
template <class T>
void store_row(const Plane<T>& plane, index_t head, index_t token, const float* in) noexcept {
  T* const row = plane.row(head, token);
  if (plane.stride.dim == 1) {
    float factor = 1;
    if constexpr (takes_scale<T>) {
      float& scale = *plane.scale(head, token);
      if (plane.scales.per_row() || std::is_same_v<T, std::int8_t>) {
        std::int32_t top = 0;
        run<LargestMagnitude>(in, plane.dim, &top);
        scale = scale_from(top, largest_before_scale<T>);
      }
      factor = inverse_of(scale);
    }
    run<EncodeRow<T>>(in, plane.dim, factor, row);
  } else if constexpr (std::is_same_v<T, q8_0>) {
    for (index_t b = 0; b < plane.elements(); ++b) row[b * plane.stride.dim] = encode_block(in + 32 * b);
  } else if constexpr (takes_scale<T>) {
    float& scale = *plane.scale(head, token);
    if (plane.scales.per_row() || std::is_same_v<T, std::int8_t>) scale = scale_for(in, plane.dim, largest_before_scale<T>);
    const float inverse = inverse_of(scale);
    for (index_t d = 0; d < plane.dim; ++d)
      row[d * plane.stride.dim] = inverse > 0 ? encode<T>(in[d] * inverse) : encode<T>(0.0F);
  } else {
    for (index_t d = 0; d < plane.dim; ++d) row[d * plane.stride.dim] = encode<T>(in[d]);
  }
}

/// Copies the bytes of a row, its own scale included, from one plane to another of the same storage type and width.
template <class T>
void copy_row(const Plane<T>& to_plane, index_t to_head, index_t to, const Plane<T>& from_plane, index_t from_head,
              index_t from) noexcept {
  T* const out = to_plane.row(to_head, to);
  const T* const in = from_plane.row(from_head, from);
  const index_t n = to_plane.elements();
  if (to_plane.stride.dim == 1 && from_plane.stride.dim == 1) {
    std::memcpy(out, in, static_cast<std::size_t>(n) * sizeof(T));
  } else {
    for (index_t d = 0; d < n; ++d) out[d * to_plane.stride.dim] = in[d * from_plane.stride.dim];
  }
  if (to_plane.scales.per_row() && from_plane.scales.per_row())
    *to_plane.scale(to_head, to) = *from_plane.scale(from_head, from);
}

/// Copies the bytes of rows `[from, from + count)` of heads `[first, last)`, their own scales included, to `to` on, front to
/// back: `to <= from`.
template <class T>
void move_rows(const Plane<T>& plane, index_t first, index_t last, index_t to, index_t from, index_t count) noexcept {
  const Strides& stride = plane.stride;
  const bool one_row = stride.dim == 1 && stride.head == plane.elements();  // the rows of all heads, one behind the other
  const index_t width = one_row ? (last - first) * plane.elements() : plane.elements();
  constexpr auto size = static_cast<index_t>(sizeof(T));
  while (count > 0) {
    const index_t n = plane.contiguous_rows(to, plane.contiguous_rows(from, count));
    for (index_t h = first; h < (one_row ? first + 1 : last); ++h) {
      T* const out = plane.row(h, to);
      const T* const in = plane.row(h, from);
      if (stride.dim == 1) {
        const bool dense = stride.token == width;
        run<CopyForward>(reinterpret_cast<std::byte*>(out), reinterpret_cast<const std::byte*>(in),
                         (dense ? n : index_t{1}) * width * size, dense ? index_t{1} : n, stride.token * size);
      } else if (stride.token == 1) {
        for (index_t d = 0; d < width; ++d)
          std::memmove(out + d * stride.dim, in + d * stride.dim, static_cast<std::size_t>(n) * sizeof(T));
      } else {
        for (index_t i = 0; i < n; ++i)
          for (index_t d = 0; d < width; ++d) out[i * stride.token + d * stride.dim] = in[i * stride.token + d * stride.dim];
      }
    }
    for (index_t h = first; h < last && plane.scales.per_row(); ++h) {
      float* const out = plane.scale(h, to);
      const float* const in = plane.scale(h, from);
      for (index_t i = 0; i < n; ++i) out[i * plane.scales.token] = in[i * plane.scales.token];
    }
    to += n;
    from += n;
    count -= n;
  }
}

/// Where rows `[first, first + count)` lie, up to the end of a page; none where their numbers lie apart.
template <class T>
[[nodiscard]] RowsAhead rows_ahead(const Plane<T>& plane, index_t head, index_t first, index_t count) noexcept {
  if (plane.stride.dim != 1 || count <= 0) return {};
  constexpr auto size = static_cast<index_t>(sizeof(T));
  return {reinterpret_cast<const std::byte*>(plane.row(head, first)), plane.stride.token * size, plane.elements() * size,
          plane.contiguous_rows(first, count)};
}

/// Asks for the memory of rows `[from, from + count)` that nobody needs. A processor fetches ahead only what is read without
/// gaps: from main memory, rows between which a few are missing come at half the speed of all of them.
template <class T>
void read_ahead(const Plane<T>& plane, index_t first, index_t last, index_t from, index_t count) noexcept {
  constexpr index_t line = 64;
  const index_t bytes = plane.elements() * static_cast<index_t>(sizeof(T));
  for (index_t i = from; i < from + count && plane.stride.dim == 1; ++i)
    for (index_t h = first; h < last; ++h) {
      const auto* const row = reinterpret_cast<const std::byte*>(plane.row(h, i));
      for (index_t b = 0; b < bytes; b += line) __builtin_prefetch(row + b);
      asm volatile("" : : "r"(row));  // or g++ takes all this for a function without effect
    }
}

/// Whether a row lies at the same addresses in both.
template <class T>
[[nodiscard]] bool same_memory(const Plane<T>& a, const Plane<T>& b, index_t head, index_t token) noexcept {
  for (const Plane<T>* const p : {&a, &b})
    if (p->page_size > 0 && p->pages[token / p->page_size] < 0) return false;
  if (a.row(head, token) != b.row(head, token) || a.stride.dim != b.stride.dim) return false;
  return !a.scales.per_row() || a.scale(head, token) == b.scale(head, token);
}

/// Whether rows can be copied between the two as bytes.
template <class T>
[[nodiscard]] Status same_rows(const Plane<T>& a, const Plane<T>& b, const char* name) {
  if (a.heads != b.heads || a.dim != b.dim)
    return invalid(name, ": ", b.heads, " heads of ", b.dim, " numbers, not ", a.heads, " of ", a.dim);
  if (a.scales.per_row() != b.scales.per_row()) return invalid(name, ": only one of the two has a scale for each row");
  return {};
}

/// The bits of the scale that all rows of `head` share. Precondition: they share one.
template <class T>
[[nodiscard]] std::uint32_t shared_scale_bits(const Plane<T>& plane, index_t head) noexcept {
  return std::bit_cast<std::uint32_t>(plane.scales.base[head * plane.scales.head]);
}

/// Whether bytes of rows mean the same numbers in both: scales that rows share are not copied with them.
template <class T>
[[nodiscard]] Status same_shared_scales(const Plane<T>& a, const Plane<T>& b, const char* name) {
  if constexpr (takes_scale<T>)
    for (index_t h = 0; h < a.heads && !a.scales.per_row(); ++h)
      if (shared_scale_bits(a, h) != shared_scale_bits(b, h))
        return invalid(name, ": the rows of head ", h, " share other scales in the two");
  return {};
}

}  // namespace detail
}  // namespace beaconkv::inline v0
