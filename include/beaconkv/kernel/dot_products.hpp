// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Dot products and distances of rows as they lie in memory, several pairs at a time.
///
/// Element `d` of a pair is added to lane `d % 16`, and the lanes are summed in one fixed tree: a pair has the same bits
/// whichever way round it is, in whatever company it is computed.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "beaconkv/kernel/vector.hpp"

namespace beaconkv::inline v0::detail {

/// `out[i] = ` the sum of all lanes of `x[i]`, for `n` of them.
template <index_t n, class Isa>
BEACONKV_KERNEL void sums_of(float* out, const Lanes<Isa> (&x)[std::size_t{n}]) noexcept {
  BEACONKV_UNROLL for (index_t i = 0; i < n; i += 4) {
    Float4 f[4];
    BEACONKV_UNROLL for (index_t k = 0; k < 4; ++k) sum_to_four(f[k], x[i + k < n ? i + k : i]);
    const Float4 a = __builtin_shufflevector(f[0], f[1], 0, 1, 4, 5) + __builtin_shufflevector(f[0], f[1], 2, 3, 6, 7);
    const Float4 b = __builtin_shufflevector(f[2], f[3], 0, 1, 4, 5) + __builtin_shufflevector(f[2], f[3], 2, 3, 6, 7);
    const Float4 s = __builtin_shufflevector(a, b, 0, 2, 4, 6) + __builtin_shufflevector(a, b, 1, 3, 5, 7);
    if constexpr (n % 4 == 0)
      store(out + i, s);
    else
      BEACONKV_UNROLL for (index_t k = 0; i + k < n; ++k) out[i + k] = s[k];
  }
}

/// Sixteen floats of a row that ends after `rest` more: zeros behind.
template <class Isa>
BEACONKV_KERNEL void read_end(Lanes<Isa>& x, const float* from, index_t rest) noexcept {
  float padded[lanes] = {};
  for (index_t i = 0; i < rest; ++i) padded[i] = from[i];
  Lanes<Isa>::read(x, padded);
}

/// Asks for a row that will be read soon.
BEACONKV_KERNEL void fetch_row(const float* row, index_t dim) noexcept {
  for (index_t d = 0; d < dim; d += lanes) __builtin_prefetch(row + d);
}

enum class Pairing : std::uint8_t { product, square_of_difference };

/// One step of `tile`: sixteen elements of each pair.
template <Pairing pairing, class Isa, index_t n, index_t m>
BEACONKV_KERNEL void add_pairs(Lanes<Isa> (&sum)[std::size_t{n * m}], const Lanes<Isa> (&a)[std::size_t{n}],
                               const Lanes<Isa> (&b)[std::size_t{m}]) noexcept {
  BEACONKV_UNROLL for (index_t i = 0; i < n; ++i) BEACONKV_UNROLL for (index_t j = 0; j < m; ++j)
      BEACONKV_UNROLL for (index_t p = 0; p < Lanes<Isa>::count; ++p) {
    typename Isa::Floats& s = sum[i * m + j].part[p];
    if constexpr (pairing == Pairing::product) {
      s = s + a[i].part[p] * b[j].part[p];
    } else {
      const typename Isa::Floats gap = a[i].part[p] - b[j].part[p];
      s = s + gap * gap;
    }
  }
}

/// `out[i * m + j] = ` the sum over `d` of `a[i][d] * b[j][d]`, or of the squares of `a[i][d] - b[j][d]`.
template <Pairing pairing, class Isa, index_t n, index_t m>
BEACONKV_KERNEL void tile(float* out, const float* const (&a)[std::size_t{n}], const float* const (&b)[std::size_t{m}],
                          index_t dim) noexcept {
  Lanes<Isa> sum[std::size_t{n * m}] = {};
  Lanes<Isa> x[std::size_t{n}];
  Lanes<Isa> y[std::size_t{m}];
  index_t d = 0;
  for (; d + lanes <= dim; d += lanes) {
    BEACONKV_UNROLL for (index_t i = 0; i < n; ++i) Lanes<Isa>::read(x[i], a[i] + d);
    BEACONKV_UNROLL for (index_t j = 0; j < m; ++j) Lanes<Isa>::read(y[j], b[j] + d);
    BEACONKV_UNROLL for (index_t i = 0; i < n; ++i) Lanes<Isa>::read_once(x[i]);
    BEACONKV_UNROLL for (index_t j = 0; j < m; ++j) Lanes<Isa>::read_once(y[j]);
    add_pairs<pairing, Isa, n, m>(sum, x, y);
  }
  if (d < dim) {
    BEACONKV_UNROLL for (index_t i = 0; i < n; ++i) read_end(x[i], a[i] + d, dim - d);
    BEACONKV_UNROLL for (index_t j = 0; j < m; ++j) read_end(y[j], b[j] + d, dim - d);
    add_pairs<pairing, Isa, n, m>(sum, x, y);
  }
  sums_of<n * m, Isa>(out, sum);
}

/// Eight floats of a row, zeros behind its end.
template <class Isa>
BEACONKV_KERNEL void read_up_to(DoubleLanes<Isa>& x, const float* from, index_t rest) noexcept {
  if (rest >= double_lanes) return DoubleLanes<Isa>::read(x, from);
  float padded[double_lanes] = {};
  for (index_t i = 0; i < rest; ++i) padded[i] = from[i];
  DoubleLanes<Isa>::read(x, padded);
}

/// The same as `squares_of`, in double from the beginning.
template <class Isa>
BEACONKV_KERNEL double squares_in_double(const float* row, index_t dim) noexcept {
  DoubleLanes<Isa> sum = {};
  for (index_t d = 0; d < dim; d += double_lanes) {
    DoubleLanes<Isa> x;
    read_up_to(x, row + d, dim - d);
    DoubleLanes<Isa>::add_product(sum, x, x);
  }
  return DoubleLanes<Isa>::sum(sum);
}

/// `out[i] = ` the sum of the squares of `rows[i]`; NaN or infinity where the row holds one, and only there. In floats where
/// these neither overflow nor vanish.
template <class Isa, index_t n>
BEACONKV_KERNEL void squares_of(double* out, const float* const (&rows)[std::size_t{n}], index_t dim) noexcept {
  Lanes<Isa> sum[std::size_t{n}] = {};
  for (index_t d = 0; d < dim; d += lanes) BEACONKV_UNROLL for (index_t i = 0; i < n; ++i) {
      Lanes<Isa> x;
      if (d + lanes <= dim)
        Lanes<Isa>::read(x, rows[i] + d);
      else
        read_end(x, rows[i] + d, dim - d);
      BEACONKV_UNROLL for (index_t p = 0; p < x.count; ++p) sum[i].part[p] = sum[i].part[p] + x.part[p] * x.part[p];
    }
  float squares[std::size_t{n}];
  sums_of<n, Isa>(squares, sum);
  for (index_t i = 0; i < n; ++i) {
    const auto exponent = static_cast<std::int32_t>(std::bit_cast<std::uint32_t>(squares[i]) >> 23) & 0xFF;
    const bool usual = exponent > 127 - 80 && exponent < 127 + 80;
    out[i] = usual ? static_cast<double>(squares[i]) : squares_in_double<Isa>(rows[i], dim);
  }
}

// A row stands for its direction; what turns dot products into cosines is one number a row, its scale: 1 / length, 0 for a row
// of zeros, or one of these.
inline constexpr float not_finite_row = -1.0F;
/// So long or short that products of its elements leave the range of float; see `nearness_of_unusual`.
inline constexpr float unusual_row = -2.0F;

/// The scale of a row from the sum of its squares.
BEACONKV_KERNEL float scale_of(double squares) noexcept {
  const auto exponent = static_cast<std::int32_t>(std::bit_cast<std::uint64_t>(squares) >> 52) & 0x7FF;
  if (exponent == 0x7FF) return not_finite_row;
  if (exponent == 0) return 0.0F;
  if (exponent < 1023 - 80 || exponent > 1023 + 80) return unusual_row;
  return static_cast<float>(1 / std::sqrt(squares));
}

/// The nearness of two finite rows of any lengths: their cosine, or minus the square of their distance in `unit`s. In double,
/// where nothing leaves the range, however a compiler rearranges it.
template <Pairing pairing, class Isa>
BEACONKV_KERNEL float nearness_of_unusual(const float* a, const float* b, index_t dim, double unit) noexcept {
  DoubleLanes<Isa> sum = {};
  for (index_t d = 0; d < dim; d += double_lanes) {
    DoubleLanes<Isa> x;
    DoubleLanes<Isa> y;
    read_up_to(x, a + d, dim - d);
    read_up_to(y, b + d, dim - d);
    BEACONKV_UNROLL for (index_t p = 0; p < x.count; ++p) {
      if constexpr (pairing == Pairing::product) {
        sum.part[p] = sum.part[p] + x.part[p] * y.part[p];
      } else {
        const typename Isa::Doubles gap = x.part[p] - y.part[p];
        sum.part[p] = sum.part[p] + gap * gap;
      }
    }
  }
  const double value = DoubleLanes<Isa>::sum(sum);
  if constexpr (pairing == Pairing::square_of_difference) return static_cast<float>(-value * unit * unit);
  double squares[2];
  const float* const rows[2] = {a, b};
  squares_of<Isa, 2>(squares, rows, dim);
  const double lengths = std::sqrt(squares[0] * squares[1]);
  return lengths > 0 ? static_cast<float>(value / lengths) : 0.0F;
}

/// `out[i] = rows[i] . row`, for `n` rows that lie `stride` apart.
struct DotProducts {
  template <class Isa>
  BEACONKV_KERNEL void run(const float* row, const float* rows, index_t stride, index_t dim, index_t n, float* out) noexcept {
    constexpr index_t height = Isa::width == 4 ? 2 : 4;
    const float* const b[1] = {row};
    for (index_t i = 0; i < n; i += height) {
      const float* a[std::size_t{height}];
      float dots[std::size_t{height}];
      for (index_t r = 0; r < height; ++r) a[r] = rows + std::min(i + r, n - 1) * stride;
      tile<Pairing::product, Isa, height, 1>(dots, a, b, dim);
      for (index_t r = 0; r < height && i + r < n; ++r) out[i + r] = dots[r];
    }
  }
};

/// `scale[i] = ` the scale of `rows[i]`.
struct RowScales {
  template <class Isa>
  BEACONKV_KERNEL void run(const float* const* rows, index_t dim, index_t n, float* scale) noexcept {
    for (index_t i = 0; i < n; i += 4) {
      const float* row[4];
      double squares[4];
      for (index_t r = 0; r < 4; ++r) row[r] = rows[std::min(i + r, n - 1)];
      squares_of<Isa, 4>(squares, row, dim);
      for (index_t r = 0; r < 4 && i + r < n; ++r) scale[i + r] = scale_of(squares[r]);
    }
  }
};

}  // namespace beaconkv::inline v0::detail
