// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Rows of any finite numbers, measured in double: squares of their lengths, and products with one direction.

#include <bit>

#include "beaconkv/kernel/dot_products.hpp"

namespace beaconkv::inline v0::detail {

/// `out[i] = ` the sum of the squares of row `i`: NaN or infinity where it holds one, and only there.
struct RowSquares {
  template <class Isa>
  BEACONKV_KERNEL void run(const float* rows, index_t stride, index_t dim, index_t n, double* out) noexcept {
    for (index_t i = 0; i < n; i += 4) {
      const float* row[4];
      double squares[4];
      for (index_t r = 0; r < 4; ++r) row[r] = rows + std::min(i + r, n - 1) * stride;
      squares_of<Isa, 4>(squares, row, dim);
      for (index_t r = 0; r < 4 && i + r < n; ++r) out[i + r] = squares[r];
    }
  }
};

/// `out[i] = rows[i] . direction`, where zeros follow the `dim` numbers of `direction` to a multiple of `double_lanes`.
struct RowProducts {
  template <class Isa>
  BEACONKV_KERNEL void run(const double* direction, const float* rows, index_t stride, index_t dim, index_t n,
                           double* out) noexcept {
    for (index_t i = 0; i < n; ++i) {
      DoubleLanes<Isa> sum = {};
      for (index_t d = 0; d < dim; d += double_lanes) {
        DoubleLanes<Isa> x;
        DoubleLanes<Isa> y;
        read_up_to(x, rows + i * stride + d, dim - d);
        DoubleLanes<Isa>::read(y, direction + d);
        DoubleLanes<Isa>::add_product(sum, x, y);
      }
      out[i] = DoubleLanes<Isa>::sum(sum);
    }
  }
};

/// By bits, so that `-ffast-math` cannot take it away.
[[nodiscard]] inline bool is_finite(double x) noexcept { return (std::bit_cast<std::uint64_t>(x) >> 52 & 0x7FF) != 0x7FF; }

}  // namespace beaconkv::inline v0::detail
