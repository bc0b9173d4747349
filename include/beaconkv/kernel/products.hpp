// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Dot products of many rows (queries) with many others (keys): the heart of scoring.
///
/// The rows are packed once, so that a register holds one dimension of several rows; keys are read as they lie, one number at
/// a time, which meets all rows. Every dot product is then one chain in order of the dimensions: equal keys have equal bits
/// wherever they stand, and no register has to be summed across.

#include "beaconkv/kernel/read_ahead.hpp"
#include "beaconkv/kernel/vector.hpp"

namespace beaconkv::inline v0::detail {

/// How many keys and registers of rows a kernel holds at once: as many accumulators as there are registers to spare.
template <class Isa>
inline constexpr index_t keys_at_once = 6;
template <>
inline constexpr index_t keys_at_once<Avx512> = 8;
template <class Isa>
inline constexpr index_t rows_at_once = 2 * Isa::width;

/// Four times four numbers, turned over.
BEACONKV_KERNEL void transpose(Float4& a, Float4& b, Float4& c, Float4& d) noexcept {
  const Float4 ab_low = __builtin_shufflevector(a, b, 0, 4, 1, 5);
  const Float4 ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
  const Float4 cd_low = __builtin_shufflevector(c, d, 0, 4, 1, 5);
  const Float4 cd_high = __builtin_shufflevector(c, d, 2, 6, 3, 7);
  a = __builtin_shufflevector(ab_low, cd_low, 0, 1, 4, 5);
  b = __builtin_shufflevector(ab_low, cd_low, 2, 3, 6, 7);
  c = __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5);
  d = __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7);
}

/// Packs the rows of `heads` heads, `rows` each, dense `[heads][rows][dim]`, times `scale`: every head padded with rows of 0 to
/// `padded`, all of them to `total`, a multiple of `lanes`. Blocks of `rows_at_once`, `[dim][row]` within; `total * dim`
/// floats.
struct PackRows {
  template <class Isa>
  BEACONKV_KERNEL void run(const float* in, index_t heads, index_t rows, index_t padded, index_t total, index_t dim,
                           float scale, float* out) noexcept {
    for (index_t first = 0; first < total; first += 4) {
      const index_t block = first / rows_at_once<Isa> * rows_at_once<Isa>;
      const index_t width = block + rows_at_once<Isa> <= total ? rows_at_once<Isa> : total - block;
      float* const to = out + block * dim + (first - block);
      const float* from[4];
      bool all = true;
      for (index_t i = 0; i < 4; ++i) {
        const index_t head = (first + i) / padded;
        const index_t row = (first + i) % padded;
        from[i] = head < heads && row < rows ? in + (head * rows + row) * dim : nullptr;
        all = all && from[i] != nullptr;
      }
      index_t d = 0;
      for (; all && d + 4 <= dim; d += 4) {
        Float4 a, b, c, e;
        load(a, from[0] + d);
        load(b, from[1] + d);
        load(c, from[2] + d);
        load(e, from[3] + d);
        transpose(a, b, c, e);
        store(to + d * width, a * scale);
        store(to + (d + 1) * width, b * scale);
        store(to + (d + 2) * width, c * scale);
        store(to + (d + 3) * width, e * scale);
      }
      for (; d < dim; ++d)
        for (index_t i = 0; i < 4; ++i) to[d * width + i] = from[i] == nullptr ? 0.0F : from[i][d] * scale;
    }
  }
};

/// `out[j][r]`, `rows` apart: dot products of `count` keys, `stride` apart, with `rows` packed rows. `*not_finite` is set where
/// one of them is no finite number, and left alone otherwise. Asks for `*ahead` meanwhile, unless it is null.
struct Products {
  template <class Isa>
  BEACONKV_KERNEL void run(const float* packed, index_t rows, index_t dim, const float* keys, index_t stride, index_t count,
                           float* out, bool* not_finite, const MemoryAhead* ahead = nullptr) noexcept {
    typename Isa::Ints bad{};
    Asking asking;
    const index_t steps =
        blocks_of(rows, rows_at_once<Isa>) * blocks_of(count, keys_at_once<Isa>) * blocks_of(dim, dims_at_once);
    if (ahead != nullptr && steps > 0) Asking::start(asking, *ahead, steps);
    index_t r = 0;
    for (; r + rows_at_once<Isa> <= rows; r += rows_at_once<Isa>)
      over_keys<Isa, 2>(packed + r * dim, rows, dim, keys, stride, count, out + r, bad, asking);
    if constexpr (lanes < rows_at_once<Isa>)
      if (r < rows) over_keys<Isa, 1>(packed + r * dim, rows, dim, keys, stride, count, out + r, bad, asking);
    std::int32_t flags[static_cast<std::size_t>(Isa::width)];
    store(flags, bad);
    for (const std::int32_t flag : flags)
      if (flag < 0) *not_finite = true;
  }

 private:
  static constexpr index_t dims_at_once = 32;  ///< between two steps of asking for memory

  BEACONKV_KERNEL index_t blocks_of(index_t n, index_t size) noexcept { return (n + size - 1) / size; }

  template <class Isa, index_t registers>
  BEACONKV_KERNEL void over_keys(const float* packed, index_t rows, index_t dim, const float* keys, index_t stride,
                                 index_t count, float* out, typename Isa::Ints& bad, Asking& asking) noexcept {
    constexpr index_t most = keys_at_once<Isa>;
    index_t j = 0;
    for (; j + most <= count; j += most)
      tile<Isa, most, registers>(packed, rows, dim, keys + j * stride, stride, out + j * rows, bad, asking);
    for (; j + 2 <= count; j += 2)
      tile<Isa, 2, registers>(packed, rows, dim, keys + j * stride, stride, out + j * rows, bad, asking);
    if (j < count) tile<Isa, 1, registers>(packed, rows, dim, keys + j * stride, stride, out + j * rows, bad, asking);
  }

  template <class Isa, index_t count, index_t registers>
  BEACONKV_KERNEL void tile(const float* packed, index_t rows, index_t dim, const float* keys, index_t stride, float* out,
                            typename Isa::Ints& bad, Asking& asking) noexcept {
    using F = typename Isa::Floats;
    using I = typename Isa::Ints;
    F sum[static_cast<std::size_t>(count)][static_cast<std::size_t>(registers)];
    BEACONKV_UNROLL for (index_t j = 0; j < count; ++j) {
      BEACONKV_UNROLL for (index_t v = 0; v < registers; ++v) sum[j][v] = F{};
    }
    for (index_t d = 0; d < dim;) {
      Asking::step(asking);
      const index_t last = d + dims_at_once < dim ? d + dims_at_once : dim;
      for (; d < last; ++d) {
        F row[static_cast<std::size_t>(registers)];
        BEACONKV_UNROLL for (index_t v = 0; v < registers; ++v) load(row[v], packed + (d * registers + v) * Isa::width);
        BEACONKV_UNROLL for (index_t j = 0; j < count; ++j) {
          const float key = keys[j * stride + d];
          BEACONKV_UNROLL for (index_t v = 0; v < registers; ++v) sum[j][v] += row[v] * key;
        }
      }
    }
    BEACONKV_UNROLL for (index_t j = 0; j < count; ++j) {
      BEACONKV_UNROLL for (index_t v = 0; v < registers; ++v) {
        I bits;
        bits_of(bits, sum[j][v]);
        bad |= ~((bits & 0x7F800000) - 0x7F800000);  // negative for an exponent of all ones
        store(out + j * rows + v * Isa::width, sum[j][v]);
      }
    }
  }
};

}  // namespace beaconkv::inline v0::detail
