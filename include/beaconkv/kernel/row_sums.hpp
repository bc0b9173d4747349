// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Weighted sums of rows.

#include "beaconkv/kernel/vector.hpp"

namespace beaconkv::inline v0::detail {

/// `sum[d] += ` the sum over `i` of `factor[i] * rows[i][d]`, rows in order. Rows whose factor is 0 are not looked at.
struct AddRows {
  template <class Isa>
  BEACONKV_KERNEL void run(const float* rows, index_t stride, index_t dim, index_t n, const float* factor,
                           float* sum) noexcept {
    using F = typename Isa::Floats;
    index_t d = 0;
    for (; d + Isa::width <= dim; d += Isa::width) {
      F total;
      load(total, sum + d);
      for (index_t i = 0; i < n; ++i) {
        if (factor[i] == 0) continue;
        F x;
        load(x, rows + i * stride + d);
        total = total + x * factor[i];
      }
      store(sum + d, total);
    }
    for (; d < dim; ++d)
      for (index_t i = 0; i < n; ++i)
        if (factor[i] != 0) sum[d] += rows[i * stride + d] * factor[i];
  }
};

}  // namespace beaconkv::inline v0::detail
