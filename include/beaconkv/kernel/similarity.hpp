// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Cosines between all keys of a head, without the matrix: who is alike, and what a column sums to.
///
/// Unit vectors lie in rows of `width` floats, a multiple of `lanes`, zeros behind the dimensions. Every cosine is one chain in
/// order of the dimensions (`Products`), so that S[i][j] and S[j][i] have the same bits.

#include <bit>
#include <cmath>

#include "beaconkv/kernel/products.hpp"

namespace beaconkv::inline v0::detail {

/// The most columns that `FindAlike` takes, and what it wants a multiple of.
inline constexpr index_t most_columns = 128;
inline constexpr index_t column_block = 32;

/// `out[i] = keys[i] / (|keys[i]| + 1e-8)`, norms in double; a row of zeros where a number is not finite. Adds all of them to
/// `total` [width].
struct UnitRows {
  template <class Isa>
  BEACONKV_KERNEL void run(const float* keys, index_t stride, index_t count, index_t dim, index_t width, float* out,
                           double* total) noexcept {
    using E = DoubleLanes<Isa>;
    constexpr index_t at_once = 8;  // rows, so that their square roots and divisions overlap
    constexpr index_t half = double_lanes;
    const index_t whole = dim / lanes * lanes;
    float rest[at_once][static_cast<std::size_t>(lanes)] = {};  // dimensions behind `whole`, and zeros
    double inverse[at_once];
    bool finite[at_once];
    for (index_t i = 0; i < count; i += at_once) {
      const index_t rows = count - i < at_once ? count - i : at_once;
      for (index_t r = 0; r < rows; ++r) {
        const float* const key = keys + (i + r) * stride;
        for (index_t d = whole; d < dim; ++d) rest[r][d - whole] = key[d];
        E low, high, x;
        E::clear(low);
        E::clear(high);
        for (index_t d = 0; d < width; d += lanes) {
          const float* const from = d < whole ? key + d : rest[r];
          E::read(x, from);
          E::add_product(low, x, x);
          E::read(x, from + half);
          E::add_product(high, x, x);
        }
        E::add(low, high);
        const double square = E::sum(low);  // finite where all floats are
        finite[r] = (std::bit_cast<std::uint64_t>(square) >> 52 & 0x7FF) != 0x7FF;
        inverse[r] = 1.0 / (std::sqrt(square) + 1e-8);
      }
      for (index_t d = 0; d < width; d += half) {
        E sum, x;
        E::read(sum, total + d);
        for (index_t r = 0; r < rows; ++r) {
          float* const unit = out + (i + r) * width + d;
          if (finite[r]) {
            E::read(x, d < whole ? keys + (i + r) * stride + d : rest[r] + (d - whole));
            E::scale(x, inverse[r]);
          } else {
            E::clear(x);
          }
          E::write(unit, x);
          E::read(x, unit);
          E::add(sum, x);
        }
        E::write(total + d, sum);
      }
    }
  }
};

/// Looks for look-alikes among `columns` neighbouring keys, `[first, first + columns)`: their unit vectors packed by `PackRows`
/// to `round_up(columns, column_block)`. `newest[i]`, for `i` of the `count` ascending `rows`, is raised to the last of these
/// columns whose cosine with `i` is above the threshold. The cosine of a key with itself is 0.
///
/// `both_ways`: `rows` are 0, 1, 2, ..., of which those before a column are enough, since the column, too, gets to know them.
struct FindAlike {
  template <class Isa>
  BEACONKV_KERNEL void run(const float* packed, index_t first, index_t columns, index_t width, const float* units,
                           const slot_t* rows, index_t count, bool both_ways, float threshold, slot_t* newest) noexcept {
    constexpr index_t block = rows_at_once<Isa>;
    const index_t total = round_up(columns, column_block);
    // One more than the column, so that 0 stands for none.
    slot_t column[static_cast<std::size_t>(most_columns)];
    slot_t of_column[static_cast<std::size_t>(most_columns)] = {};
    for (index_t c = 0; c < total; ++c) column[c] = c < columns ? static_cast<slot_t>(first + c + 1) : 0;

    slot_t of_row[static_cast<std::size_t>(tile_rows * Isa::width)];
    for (index_t at = 0; at < count; at += tile_rows) {
      const index_t n = count - at < tile_rows ? count - at : tile_rows;
      for (slot_t& x : of_row) x = 0;
      for (index_t b = 0; b < total; b += block)
        for (index_t i = 0; i < n && !(both_ways && rows[at + i] >= first + b + block); i += keys_at_once<Isa>)
          tile<Isa>(packed + b * width, width, units, rows + at + i, n - i, first + b, column + b, threshold,
                    of_row + i * Isa::width, of_column + b);
      for (index_t i = 0; i < n; i += 4) {
        slot_t last[4];
        last_of_four<Isa>(of_row + i * Isa::width, last);
        for (index_t r = 0; r < 4 && i + r < n; ++r) raise_to(newest[rows[at + i + r]], last[r] - 1);
      }
    }
    if (!both_ways) return;
    for (index_t c = 0; c < columns; ++c) raise_to(newest[first + c], of_column[c] - 1);
  }

 private:
  /// Few enough that they stay in the cache over all columns; room for whole tiles of any `keys_at_once`.
  static constexpr index_t tile_rows = 96;

  template <class Isa>
  BEACONKV_KERNEL void tile(const float* packed, index_t width, const float* units, const slot_t* rows, index_t left,
                            index_t first, const slot_t* column, float threshold, slot_t* of_row, slot_t* of_column) noexcept {
    using F = typename Isa::Floats;
    using I = typename Isa::Ints;
    constexpr index_t most = keys_at_once<Isa>;
    constexpr index_t registers = 2;
    slot_t row[static_cast<std::size_t>(most)];
    const float* unit[static_cast<std::size_t>(most)];
    F sum[static_cast<std::size_t>(most)][static_cast<std::size_t>(registers)];
    BEACONKV_UNROLL for (index_t j = 0; j < most; ++j) {
      row[j] = rows[j < left ? j : left - 1];  // the last row again where there are no more
      unit[j] = units + row[j] * width;
      BEACONKV_UNROLL for (index_t v = 0; v < registers; ++v) sum[j][v] = F{};
    }
    for (index_t d = 0; d < width; ++d) {
      F x[static_cast<std::size_t>(registers)];
      BEACONKV_UNROLL for (index_t v = 0; v < registers; ++v) load(x[v], packed + (d * registers + v) * Isa::width);
      BEACONKV_UNROLL for (index_t j = 0; j < most; ++j) {
        const float y = unit[j][d];
        BEACONKV_UNROLL for (index_t v = 0; v < registers; ++v) sum[j][v] += x[v] * y;
      }
    }
    I name[static_cast<std::size_t>(registers)], of_name[static_cast<std::size_t>(registers)];
    BEACONKV_UNROLL for (index_t v = 0; v < registers; ++v) {
      load(name[v], column + v * Isa::width);
      load(of_name[v], of_column + v * Isa::width);
    }
    if (row[0] < first + registers * Isa::width && row[most - 1] >= first) {
      BEACONKV_UNROLL for (index_t j = 0; j < most; ++j) {
        BEACONKV_UNROLL for (index_t v = 0; v < registers; ++v) {
          I other;
          mask_not_zero(other, name[v] ^ (row[j] + 1));
          select(sum[j][v], other, sum[j][v], F{});
        }
      }
    }
    BEACONKV_UNROLL for (index_t j = 0; j < most; ++j) {
      I found;
      load(found, of_row + j * Isa::width);
      BEACONKV_UNROLL for (index_t v = 0; v < registers; ++v) {
        const F below = threshold - sum[j][v];
        I above;
        bits_of(above, below);
        mask_negative(above, above);
        raise_to(found, above & name[v]);
        raise_to(of_name[v], above & (row[j] + 1));
      }
      store(of_row + j * Isa::width, found);
    }
    BEACONKV_UNROLL for (index_t v = 0; v < registers; ++v) store(of_column + v * Isa::width, of_name[v]);
  }

  /// The largest of each of four rows' lanes.
  template <class Isa>
  BEACONKV_KERNEL void last_of_four(const slot_t* of_row, slot_t* last) noexcept {
    Int4 found[4];
    Float4 turned[4];
    for (index_t r = 0; r < 4; ++r) {
      load(found[r], of_row + r * Isa::width);
      for (index_t l = 4; l < Isa::width; l += 4) {
        Int4 more;
        load(more, of_row + r * Isa::width + l);
        raise_to(found[r], more);
      }
      bits_of(turned[r], found[r]);
    }
    transpose(turned[0], turned[1], turned[2], turned[3]);
    for (index_t r = 0; r < 4; ++r) bits_of(found[r], turned[r]);
    raise_to(found[0], found[1]);
    raise_to(found[2], found[3]);
    raise_to(found[0], found[2]);
    store(last, found[0]);
  }
};

/// Which look-alike stands at a rank: for each row of a strip of cosines `[keys][column_block]`, the column `j >= 1` above the
/// threshold that has `rank` + (number of such columns) others before it, or 0.
struct AlikeOfRank {
  template <class Isa>
  BEACONKV_KERNEL void run(const float* strip, index_t keys, float threshold, slot_t rank, slot_t* out) noexcept {
    using I = typename Isa::Ints;
    for (index_t r = 0; r < column_block; r += Isa::width) {
      I above, before = I{} + rank, found{};
      for (index_t j = 1; j < keys; ++j) {
        mask_above<Isa>(above, strip + j * column_block + r, threshold);
        before -= above;
      }
      for (index_t j = 1; j < keys; ++j) {
        mask_above<Isa>(above, strip + j * column_block + r, threshold);
        I passed;
        mask_not_zero(passed, before);
        found |= above & ~passed & static_cast<slot_t>(j);
        before += above;
      }
      store(out + r, found);
    }
  }

 private:
  template <class Isa>
  BEACONKV_KERNEL void mask_above(typename Isa::Ints& mask, const float* cosines, float threshold) noexcept {
    typename Isa::Floats x;
    load(x, cosines);
    x = threshold - x;
    bits_of(mask, x);
    mask_negative(mask, mask);
  }
};

/// `out[j]` = sum of S[i][j] over all `i` but `j`, and over those that do not spare `j`: `spared[i]` is the column that `i`
/// spares, or negative. `total` [width] is the sum of all unit vectors. In double throughout, so that what is spared cancels.
struct ColumnSums {
  template <class Isa>
  BEACONKV_KERNEL void run(const float* units, index_t count, index_t width, const double* total, const slot_t* spared,
                           double* out) noexcept {
    using E = DoubleLanes<Isa>;
    for (index_t j = 0; j < count; ++j) out[j] = 0.0;
    for (index_t i = 0; i < count; ++i) {
      const float* const unit = units + i * width;
      const bool spares = spared[i] >= 0 && spared[i] != i;
      const float* const other = spares ? units + spared[i] * width : unit;
      E with_all, with_self, with_other, x, y;
      E::clear(with_all);
      E::clear(with_self);
      E::clear(with_other);
      for (index_t d = 0; d < width; d += double_lanes) {
        E::read(x, unit + d);
        E::read(y, total + d);
        E::add_product(with_all, x, y);
        E::add_product(with_self, x, x);
        E::read(y, other + d);
        E::add_product(with_other, x, y);
      }
      out[i] += E::sum(with_all) - E::sum(with_self);
      if (spares) out[spared[i]] -= E::sum(with_other);
    }
  }
};

}  // namespace beaconkv::inline v0::detail
