// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// The layouts in which engines keep keys and values, as strides. Each factory returns a `Plane` (or a pair); nothing else in
/// the library knows a layout's name. Sizes are checked when a cache is made of the planes.
///
/// Letters: `H` KV heads, `D` numbers a row, `C` capacity in tokens, `P` tokens a page.

#include "beaconkv/memory/plane.hpp"

namespace beaconkv::inline v0 {

/// Keys and values of one layer.
template <class K, class V = K>
struct Planes {
  Plane<K> keys;
  Plane<V> values;
};

/// Pages of one sequence: `count` page numbers in order, in a pool of `num_pages`. `ids` must outlive the planes; an engine
/// that fills in entries later is seen at once.
struct PageList {
  const std::int32_t* ids = nullptr;
  index_t count = 0;
  index_t page_size = 0;
  index_t num_pages = 0;  ///< 0: unknown
};

/// Dense `[H][C][D]` ("HND"; Hugging Face, one sequence).
template <class T>
[[nodiscard]] constexpr Plane<T> head_major_plane(T* base, index_t heads, index_t dim, index_t capacity) noexcept {
  const index_t row = dim / numbers_per_element<T>;
  return {.base = base, .stride = {0, capacity * row, row, 1}, .heads = heads, .dim = dim, .capacity = capacity};
}

/// Dense `[C][H][D]` ("NHD"; llama.cpp's keys, and its values with flash attention).
template <class T>
[[nodiscard]] constexpr Plane<T> token_major_plane(T* base, index_t heads, index_t dim, index_t capacity) noexcept {
  const index_t row = dim / numbers_per_element<T>;
  return {.base = base, .stride = {0, row, heads * row, 1}, .heads = heads, .dim = dim, .capacity = capacity};
}

/// Dense `[H][D][C]`: the tokens lie side by side (llama.cpp's values without flash attention).
template <class T>
requires(numbers_per_element<T> == 1)
    [[nodiscard]] constexpr Plane<T> transposed_plane(T* base, index_t heads, index_t dim, index_t capacity) noexcept {
  return {.base = base, .stride = {0, capacity * dim, 1, capacity}, .heads = heads, .dim = dim, .capacity = capacity};
}

namespace detail {

/// Pages of `strides`; where `page_stride` is 0 they are dense.
template <class T>
[[nodiscard]] constexpr Plane<T> paged_plane(T* base, index_t heads, index_t dim, const PageList& pages, index_t page_stride,
                                             Strides strides) noexcept {
  strides.page = page_stride != 0 ? page_stride : heads * pages.page_size * (dim / numbers_per_element<T>);
  return {.base = base,
          .stride = strides,
          .heads = heads,
          .dim = dim,
          .capacity = pages.count * pages.page_size,
          .page_size = pages.page_size,
          .pages = pages.ids,
          .num_pages = pages.num_pages};
}

}  // namespace detail

/// Paged `[page][H][P][D]`; `page_stride` elements from page to page where they are not dense.
template <class T>
[[nodiscard]] constexpr Plane<T> paged_head_major_plane(T* base, index_t heads, index_t dim, const PageList& pages,
                                                        index_t page_stride = 0) noexcept {
  const index_t row = dim / numbers_per_element<T>;
  return detail::paged_plane(base, heads, dim, pages, page_stride, {0, pages.page_size * row, row, 1});
}

/// Paged `[page][P][H][D]`.
template <class T>
[[nodiscard]] constexpr Plane<T> paged_token_major_plane(T* base, index_t heads, index_t dim, const PageList& pages,
                                                         index_t page_stride = 0) noexcept {
  const index_t row = dim / numbers_per_element<T>;
  return detail::paged_plane(base, heads, dim, pages, page_stride, {0, row, heads * row, 1});
}

/// llama2.c: `key_cache` and `value_cache` are `[layer][seq_len][H * D]`.
template <class T>
[[nodiscard]] constexpr Planes<T> llama2_c_planes(T* key_cache, T* value_cache, index_t layer, index_t heads, index_t dim,
                                                  index_t seq_len) noexcept {
  const index_t offset = layer * seq_len * heads * (dim / numbers_per_element<T>);
  return {token_major_plane(key_cache + offset, heads, dim, seq_len),
          token_major_plane(value_cache + offset, heads, dim, seq_len)};
}

/// gemma.cpp: a row for each position, `[layer][H][K, V][D]` in it, rows `row_stride` elements apart; the rows are a ring.
/// `ring` is a page table with pages of one token: with `ids = 0 .. n-1, 0 .. n-1` it begins at any row by `ids + first`.
template <class T>
[[nodiscard]] constexpr Planes<T> gemma_planes(T* base, index_t layer, index_t heads, index_t dim, index_t row_stride,
                                               const PageList& ring) noexcept {
  const index_t row = dim / numbers_per_element<T>;
  Plane<T> keys{.base = base + layer * 2 * heads * row,
                .stride = {row_stride, 2 * row, 0, 1},
                .heads = heads,
                .dim = dim,
                .capacity = ring.count,
                .page_size = 1,
                .pages = ring.ids,
                .num_pages = ring.num_pages};
  Plane<T> values = keys;
  values.base += row;
  return {keys, values};
}

/// The order of heads and tokens within a page.
enum class PageLayout : std::uint8_t { nhd, hnd };

/// FlashInfer, and vLLM's FlashInfer backend: one tensor `[page][K, V][...]`. `page_stride` 0: dense; more where a page holds
/// several layers.
template <class T>
[[nodiscard]] constexpr Planes<T> flashinfer_planes(T* base, PageLayout layout, index_t heads, index_t dim,
                                                    const PageList& pages, index_t page_stride = 0) noexcept {
  const index_t half = heads * pages.page_size * (dim / numbers_per_element<T>);
  const index_t stride = page_stride != 0 ? page_stride : 2 * half;
  const auto plane = layout == PageLayout::nhd ? paged_token_major_plane<T> : paged_head_major_plane<T>;
  return {plane(base, heads, dim, pages, stride), plane(base + half, heads, dim, pages, stride)};
}

/// vLLM's flash-attention backend: one tensor `[K, V][page][...]`. Needs `pages.num_pages`, where the values begin: without it
/// there are none, and no cache can be made.
template <class T>
[[nodiscard]] constexpr Planes<T> vllm_planes(T* base, PageLayout layout, index_t heads, index_t dim,
                                              const PageList& pages) noexcept {
  const index_t half = pages.num_pages * heads * pages.page_size * (dim / numbers_per_element<T>);
  const auto plane = layout == PageLayout::nhd ? paged_token_major_plane<T> : paged_head_major_plane<T>;
  return {plane(base, heads, dim, pages, 0), plane(half > 0 ? base + half : nullptr, heads, dim, pages, 0)};
}

/// A ggml tensor whose axes are number, head, token: `data`, and its byte strides `nb`, in that order of axes (permute as the
/// tensor is). Refused unless every stride is a whole number of elements.
template <class T>
[[nodiscard]] Result<Plane<T>> ggml_plane(void* data, index_t dim, index_t heads, index_t capacity, index_t nb_dim,
                                          index_t nb_head, index_t nb_token) {
  const index_t size = sizeof(T);
  if (nb_dim % size != 0 || nb_head % size != 0 || nb_token % size != 0)
    return detail::invalid("nb: dim = ", nb_dim, ", head = ", nb_head, ", token = ", nb_token, ": must be multiples of ", size,
                           ", the bytes of an element");
  if (reinterpret_cast<std::uintptr_t>(data) % alignof(T) != 0)
    return detail::invalid("data: must be aligned to ", alignof(T), " bytes");
  return Plane<T>{.base = static_cast<T*>(data),
                  .stride = {0, nb_head / size, nb_token / size, nb_dim / size},
                  .heads = heads,
                  .dim = dim,
                  .capacity = capacity};
}

/// The plane with a scale for each row, dense `[H][C]`; for paged memory `[page][H][P]`.
template <class T>
requires takes_scale<T>
[[nodiscard]] constexpr Plane<T> with_row_scales(Plane<T> plane, float* scales) noexcept {
  const index_t rows = plane.page_size > 0 ? plane.page_size : plane.capacity;
  plane.scales = {scales, plane.heads * rows, rows, 1};
  return plane;
}

/// The plane with one scale for each head, `[H]`.
template <class T>
requires takes_scale<T>
[[nodiscard]] constexpr Plane<T> with_head_scales(Plane<T> plane, float* scales) noexcept {
  plane.scales = {scales, 0, 1, 0};
  return plane;
}

/// The plane with one scale.
template <class T>
requires takes_scale<T>
[[nodiscard]] constexpr Plane<T> with_scale(Plane<T> plane, float* scale) noexcept {
  plane.scales = {scale, 0, 0, 0};
  return plane;
}

/// The plane without its first `count` tokens: a row of a left-padded batch without its padding. Paged memory is cut at pages
/// only.
template <class T>
[[nodiscard]] Result<Plane<T>> without_first(Plane<T> plane, index_t count) {
  if (count < 0 || count > plane.capacity)
    return detail::invalid("count = ", count, ": must be between 0 and ", plane.capacity);
  if (plane.page_size > 0) {
    if (count % plane.page_size != 0)
      return detail::error(StatusCode::unsupported, "count = ", count, ": must be a multiple of page_size = ", plane.page_size);
    plane.pages += count / plane.page_size;
  } else {
    plane.base += count * plane.stride.token;
    if (plane.scales.base != nullptr) plane.scales.base += count * plane.scales.token;
  }
  plane.capacity -= count;
  return plane;
}

}  // namespace beaconkv::inline v0
