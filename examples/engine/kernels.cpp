// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "engine/kernels.hpp"

#include <algorithm>
#include <cmath>

#include "beaconkv/kernel/exponential.hpp"
#include "beaconkv/kernel/products.hpp"
#include "beaconkv/kernel/softmax.hpp"
#include "beaconkv/kernel/vector.hpp"

namespace beaconkv::engine {
namespace {

using detail::Baseline;
using detail::Float16;
using detail::Float4;
using detail::Float8;
using detail::Lanes;
using detail::lanes;

/// `out[4 g + i]` is the sum of numbers `4 g` to `4 g + 3` of the i-th of four vectors: four sums at the price of one.
BEACONKV_KERNEL void add_turned(Float4& out, const Float4& a, const Float4& b, const Float4& c, const Float4& d) noexcept {
  const Float4 ab = __builtin_shufflevector(a, b, 0, 4, 1, 5) + __builtin_shufflevector(a, b, 2, 6, 3, 7);
  const Float4 cd = __builtin_shufflevector(c, d, 0, 4, 1, 5) + __builtin_shufflevector(c, d, 2, 6, 3, 7);
  out = __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
}
BEACONKV_KERNEL void add_turned(Float8& out, const Float8& a, const Float8& b, const Float8& c, const Float8& d) noexcept {
  const Float8 ab =
      __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13) + __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
  const Float8 cd =
      __builtin_shufflevector(c, d, 0, 8, 1, 9, 4, 12, 5, 13) + __builtin_shufflevector(c, d, 2, 10, 3, 11, 6, 14, 7, 15);
  out = __builtin_shufflevector(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) + __builtin_shufflevector(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15);
}
BEACONKV_KERNEL void add_turned(Float16& out, const Float16& a, const Float16& b, const Float16& c, const Float16& d) noexcept {
  const Float16 ab = __builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
                     __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  const Float16 cd = __builtin_shufflevector(c, d, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
                     __builtin_shufflevector(c, d, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  out = __builtin_shufflevector(ab, cd, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
        __builtin_shufflevector(ab, cd, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}

/// How many rows' sums are kept in registers together: those of four are too many without AVX.
template <class Isa>
constexpr index_t rows_together = Isa::width == Baseline::width ? 1 : 4;

/// `out[i] = rows[i] . x` for four rows of `n` numbers.
template <class Isa>
BEACONKV_KERNEL void four_dots(Float4& out, const float* const* rows, const float* x, index_t n) noexcept {
  constexpr index_t together = rows_together<Isa>;
  Lanes<Isa> sum[4];
  const index_t whole = n / lanes * lanes;
  BEACONKV_UNROLL for (index_t first = 0; first < 4; first += together) {
    BEACONKV_UNROLL for (index_t i = first; i < first + together; ++i) Lanes<Isa>::fill(sum[i], 0.0F);
    for (index_t d = 0; d < whole; d += lanes) {
      Lanes<Isa> other;
      Lanes<Isa>::read(other, x + d);
      BEACONKV_UNROLL for (index_t i = first; i < first + together; ++i) {
        BEACONKV_UNROLL for (index_t v = 0; v < Lanes<Isa>::count; ++v) {
          typename Isa::Floats row;
          detail::load(row, rows[i] + d + v * Isa::width);
          sum[i].part[v] += row * other.part[v];
        }
      }
    }
  }
  Lanes<Isa> turned;
  BEACONKV_UNROLL for (index_t v = 0; v < Lanes<Isa>::count; ++v)
      add_turned(turned.part[v], sum[0].part[v], sum[1].part[v], sum[2].part[v], sum[3].part[v]);
  detail::sum_to_four(out, turned);
  if (whole == n) return;
  float rest[4] = {};
  for (index_t d = whole; d < n; ++d)
    for (index_t i = 0; i < 4; ++i) rest[i] += rows[i][d] * x[d];
  Float4 more;
  detail::load(more, rest);
  out += more;
}

/// `out[r] = matrix[r] . x`, times `scale`, added to what is there where `add`.
template <bool add>
struct MatrixVector {
  template <class Isa>
  BEACONKV_KERNEL void run(const float* matrix, index_t rows, index_t cols, const float* x, float scale, float* out) noexcept {
    for (index_t r = 0; r < rows; r += 4) {
      const float* four[4];
      for (index_t i = 0; i < 4; ++i) four[i] = matrix + (r + i < rows ? r + i : rows - 1) * cols;
      Float4 dots;
      four_dots<Isa>(dots, four, x, cols);
      dots *= scale;
      if (r + 4 <= rows) {
        put(out + r, dots);
        continue;
      }
      float last[4] = {};
      std::copy(out + r, out + rows, last);
      put(last, dots);
      std::copy(last, last + (rows - r), out + r);
    }
  }

 private:
  BEACONKV_KERNEL void put(float* out, Float4& numbers) noexcept {
    Float4 before{};
    if constexpr (add) detail::load(before, out);
    numbers += before;
    detail::store(out, numbers);
  }
};

/// `out[t][r] += in[r][t]`, `in` `[rows][lanes of tokens]`, `out` `[tokens][stride]`.
struct AddTurned {
  template <class Isa>
  BEACONKV_KERNEL void run(const float* in, index_t rows, index_t padded, index_t tokens, float* out, index_t stride) noexcept {
    for (index_t t = 0; t < tokens; t += 4) {
      index_t r = 0;
      for (; t + 4 <= tokens && r + 4 <= rows; r += 4) {
        Float4 part[4];
        BEACONKV_UNROLL for (index_t i = 0; i < 4; ++i) detail::load(part[i], in + (r + i) * padded + t);
        detail::transpose(part[0], part[1], part[2], part[3]);
        BEACONKV_UNROLL for (index_t i = 0; i < 4; ++i) {
          Float4 sum;
          detail::load(sum, out + (t + i) * stride + r);
          sum += part[i];
          detail::store(out + (t + i) * stride + r, sum);
        }
      }
      for (; r < rows; ++r)
        for (index_t i = t; i < std::min(t + 4, tokens); ++i) out[i * stride + r] += in[r * padded + i];
    }
  }
};

/// Softmax in place of `heads` rows of `n` logits.
struct SoftmaxRows {
  template <class Isa>
  BEACONKV_KERNEL void run(float* logits, index_t heads, index_t n) noexcept {
    for (index_t h = 0; h < heads; ++h) one<Isa>(logits + h * n, n);
  }

 private:
  template <class Isa>
  BEACONKV_KERNEL void one(float* row, index_t n) noexcept {
    const index_t whole = n / lanes * lanes;
    float last[lanes];  // the numbers behind the last whole lanes, padded with logits that weigh nothing
    for (index_t i = 0; i < lanes; ++i) last[i] = whole + i < n ? row[whole + i] : detail::masked_logit;
    Lanes<Isa> top, sum;
    Lanes<Isa>::read(top, last);
    for (index_t j = 0; j < whole; j += lanes) {
      BEACONKV_UNROLL for (index_t v = 0; v < Lanes<Isa>::count; ++v) {
        typename Isa::Floats z;
        detail::load(z, row + j + v * Isa::width);
        detail::raise_to(top.part[v], z);
      }
    }
    Float4 largest, total;
    detail::largest_four(largest, top);
    const float most = std::max(std::max(largest[0], largest[1]), std::max(largest[2], largest[3]));
    Lanes<Isa>::fill(sum, 0.0F);
    for (index_t j = 0; j < whole; j += lanes) add_weights<Isa>(row + j, most, sum);
    add_weights<Isa>(last, most, sum);
    detail::sum_to_four(total, sum);
    const float scale = 1.0F / ((total[0] + total[2]) + (total[1] + total[3]));
    for (index_t j = 0; j < whole; j += Isa::width) {
      typename Isa::Floats z;
      detail::load(z, row + j);
      detail::store(row + j, z * scale);
    }
    for (index_t j = whole; j < n; ++j) row[j] = last[j - whole] * scale;
  }

  template <class Isa>
  BEACONKV_KERNEL void add_weights(float* sixteen, float top, Lanes<Isa>& sum) noexcept {
    BEACONKV_UNROLL for (index_t v = 0; v < Lanes<Isa>::count; ++v) {
      typename Isa::Floats z;
      detail::load(z, sixteen + v * Isa::width);
      z -= top;
      detail::exp_not_positive<Isa>(z);
      detail::store(sixteen + v * Isa::width, z);
      sum.part[v] += z;
    }
  }
};

/// `out[h] = sum over rows of weights[h][row] * values[row]`.
struct MixRows {
  template <class Isa>
  BEACONKV_KERNEL void run(const float* weights, index_t heads, const float* values, index_t rows, index_t dim,
                           float* out) noexcept {
    constexpr index_t most = Isa::width == Baseline::width ? 2 : 4;
    index_t h = 0;
    for (; h + most <= heads; h += most) some<Isa, most>(weights + h * rows, values, rows, dim, out + h * dim);
    if constexpr (most > 2) {
      if (h + 3 <= heads) {
        some<Isa, 3>(weights + h * rows, values, rows, dim, out + h * dim);
        h += 3;
      } else if (h + 2 <= heads) {
        some<Isa, 2>(weights + h * rows, values, rows, dim, out + h * dim);
        h += 2;
      }
    }
    if (h < heads) some<Isa, 1>(weights + h * rows, values, rows, dim, out + h * dim);
  }

 private:
  template <class Isa, index_t heads>
  BEACONKV_KERNEL void some(const float* weights, const float* values, index_t rows, index_t dim, float* out) noexcept {
    constexpr index_t most = Isa::width == Baseline::width ? 4 : 2;
    index_t d = 0;
    for (; d + most * Isa::width <= dim; d += most * Isa::width) tile<Isa, heads, most>(weights, values, rows, dim, d, out);
    for (; d + Isa::width <= dim; d += Isa::width) tile<Isa, heads, 1>(weights, values, rows, dim, d, out);
    for (; d < dim; ++d)
      for (index_t h = 0; h < heads; ++h) {
        float sum = 0;
        for (index_t j = 0; j < rows; ++j) sum += weights[h * rows + j] * values[j * dim + d];
        out[h * dim + d] = sum;
      }
  }

  template <class Isa, index_t heads, index_t registers>
  BEACONKV_KERNEL void tile(const float* weights, const float* values, index_t rows, index_t dim, index_t d,
                            float* out) noexcept {
    using F = typename Isa::Floats;
    F sum[static_cast<std::size_t>(heads)][static_cast<std::size_t>(registers)];
    BEACONKV_UNROLL for (index_t h = 0; h < heads; ++h) {
      BEACONKV_UNROLL for (index_t v = 0; v < registers; ++v) sum[h][v] = F{};
    }
    for (index_t j = 0; j < rows; ++j) {
      F value[static_cast<std::size_t>(registers)];
      BEACONKV_UNROLL for (index_t v = 0; v < registers; ++v) detail::load(value[v], values + j * dim + d + v * Isa::width);
      BEACONKV_UNROLL for (index_t h = 0; h < heads; ++h) {
        const float weight = weights[h * rows + j];
        BEACONKV_UNROLL for (index_t v = 0; v < registers; ++v) sum[h][v] += value[v] * weight;
      }
    }
    BEACONKV_UNROLL for (index_t h = 0; h < heads; ++h) {
      BEACONKV_UNROLL for (index_t v = 0; v < registers; ++v) detail::store(out + h * dim + d + v * Isa::width, sum[h][v]);
    }
  }
};

struct Gate {
  template <class Isa>
  BEACONKV_KERNEL void run(const float* gate, const float* up, index_t n, float* out) noexcept {
    index_t i = 0;
    for (; i + Isa::width <= n; i += Isa::width) one<Isa>(gate + i, up + i, out + i);
    for (; i < n; ++i) single(gate + i, up + i, out + i);
  }

 private:
  /// `Isa::width` of them.
  template <class Isa>
  BEACONKV_KERNEL void one(const float* gate, const float* up, float* out) noexcept {
    using F = typename Isa::Floats;
    using I = typename Isa::Ints;
    F x, y;
    detail::load(x, gate);
    detail::load(y, up);
    I negative, bits;
    detail::bits_of(bits, x);
    detail::mask_negative(negative, bits);
    bits |= INT32_MIN;  // -|x|
    F e;
    detail::bits_of(e, bits);
    detail::exp_not_positive<Isa>(e);
    F top;
    detail::select(top, negative, e, F{} + 1.0F);
    detail::store(out, x * top / (1.0F + e) * y);
  }
  BEACONKV_KERNEL void single(const float* gate, const float* up, float* out) noexcept {
    float x[4] = {*gate, 0, 0, 0};
    const float y[4] = {*up, 0, 0, 0};
    one<Baseline>(x, y, x);
    *out = x[0];
  }
};

}  // namespace

index_t product_scratch(index_t tokens, index_t cols) noexcept {
  return tokens == 1 ? 0 : detail::round_up(tokens, lanes) * (cols + block);
}

void multiply_add(const float* weight, index_t rows, index_t cols, const float* in, index_t tokens, float* out,
                  float* scratch) {
  if (tokens == 1) return detail::run<MatrixVector<true>>(weight, rows, cols, in, 1.0F, out);
  const index_t padded = detail::round_up(tokens, lanes);
  float* const products = scratch + padded * cols;  // of `block` rows of weights, [row][token]
  bool not_finite = false;
  detail::run<detail::PackRows>(in, index_t{1}, tokens, padded, padded, cols, 1.0F, scratch);
  for (index_t r = 0; r < rows; r += block) {
    const index_t count = std::min(block, rows - r);
    detail::run<detail::Products>(const_cast<const float*>(scratch), padded, cols, weight + r * cols, cols, count, products,
                                  &not_finite);
    detail::run<AddTurned>(const_cast<const float*>(products), count, padded, tokens, out + r, rows);
  }
}

void attend(const AttentionRows& kv, index_t heads, const float* queries, float* weights, float* mixed) {
  const float scale = 1.0F / std::sqrt(static_cast<float>(kv.dim));
  for (index_t h = 0; h < heads; ++h)
    detail::run<MatrixVector<false>>(kv.keys, kv.rows, kv.dim, queries + h * kv.dim, scale, weights + h * kv.rows);
  detail::run<SoftmaxRows>(weights, heads, kv.rows);
  detail::run<MixRows>(const_cast<const float*>(weights), heads, kv.values, kv.rows, kv.dim, mixed);
}

void gate(const float* gate, const float* up, index_t n, float* out) { detail::run<Gate>(gate, up, n, out); }

}  // namespace beaconkv::engine
