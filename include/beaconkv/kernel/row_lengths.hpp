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
      double squares[4];
      for (index_t r = 0; r < 4; ++r) row[r] = rows + std::min(i + r, n - 1) * stride;
      squares_of<Isa, 4>(squares, row, dim);
      for (index_t r = 0; r < 4 && i + r < n; ++r) {
        const auto exponent = static_cast<std::int32_t>(std::bit_cast<std::uint64_t>(squares[r]) >> 52) & 0x7FF;
        length[i + r] =
            exponent == 0x7FF ? not_finite_row : static_cast<float>(std::min(std::sqrt(squares[r]), double{FLT_MAX}));
      }
    }
  }
};

}  // namespace beaconkv::inline v0::detail
