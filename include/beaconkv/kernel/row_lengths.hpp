// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Euclidean lengths of rows.

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>

#include "beaconkv/kernel/dot_products.hpp"

namespace beaconkv::inline v0::detail {

/// `length[i] = ` the length of row `i`, or `not_finite_row`. Squares are summed in float, and again in double where they leave
/// its range or its exactness; a length beyond the range of float becomes its largest number.
struct RowLengths {
  template <class Isa>
  BEACONKV_KERNEL void run(const float* rows, index_t stride, index_t dim, index_t n, float* length) noexcept {
    for (index_t i = 0; i < n; i += 4) {
      const float* row[4];
      float squares[4];
      for (index_t r = 0; r < 4; ++r) row[r] = rows + std::min(i + r, n - 1) * stride;
      if (stride == dim) ask_for(rows, (i + 8) * dim, 4 * dim);
      squares_of_four<Isa>(squares, row, dim);
      for (index_t r = 0; r < 4 && i + r < n; ++r) {
        const auto exponent = static_cast<std::int32_t>(std::bit_cast<std::uint32_t>(squares[r]) >> 23) & 0xFF;
        if (exponent > 127 - 80 && exponent < 127 + 80)
          length[i + r] = std::sqrt(squares[r]);
        else
          length[i + r] = length_of_unusual<Isa>(row[r], dim);
      }
    }
  }

 private:
  /// Fetches what comes next from main memory: a row is over before the processor sees a stream. Behind the last row is the
  /// next run, or nothing that hurts.
  BEACONKV_KERNEL void ask_for(const float* rows, index_t first, index_t count) noexcept {
    const auto address = reinterpret_cast<std::uintptr_t>(rows) + static_cast<std::size_t>(first) * sizeof(float);
    for (index_t d = 0; d < count; d += lanes)
      __builtin_prefetch(reinterpret_cast<const void*>(address + static_cast<std::size_t>(d) * sizeof(float)));
  }

  template <class Isa>
  BEACONKV_KERNEL void squares_of_four(float* out, const float* const (&rows)[4], index_t dim) noexcept {
    Lanes<Isa> sum[4] = {};
    Lanes<Isa> x[4];
    index_t d = 0;
    for (; d + lanes <= dim; d += lanes) {
      BEACONKV_UNROLL for (index_t i = 0; i < 4; ++i) Lanes<Isa>::read(x[i], rows[i] + d);
      add_squares(sum, x);
    }
    if (d < dim) {
      BEACONKV_UNROLL for (index_t i = 0; i < 4; ++i) read_end(x[i], rows[i] + d, dim - d);
      add_squares(sum, x);
    }
    sums_of<4, Isa>(out, sum);
  }

  template <class Isa>
  BEACONKV_KERNEL void add_squares(Lanes<Isa> (&sum)[4], const Lanes<Isa> (&x)[4]) noexcept {
    BEACONKV_UNROLL for (index_t i = 0; i < 4; ++i) BEACONKV_UNROLL for (index_t p = 0; p < Lanes<Isa>::count; ++p) sum[i]
        .part[p] = sum[i].part[p] + x[i].part[p] * x[i].part[p];
  }

  template <class Isa>
  BEACONKV_KERNEL float length_of_unusual(const float* row, index_t dim) noexcept {
    const float* const one[1] = {row};
    double squares[1];
    squares_of<Isa, 1>(squares, one, dim);
    const auto exponent = static_cast<std::int32_t>(std::bit_cast<std::uint64_t>(squares[0]) >> 52) & 0x7FF;
    if (exponent == 0x7FF) return not_finite_row;
    return static_cast<float>(std::min(std::sqrt(squares[0]), double{FLT_MAX}));
  }
};

}  // namespace beaconkv::inline v0::detail
