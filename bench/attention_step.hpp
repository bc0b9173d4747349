// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// One decode step's attention over a layer's cache, and a pure read of it: what an eviction is measured against.
///
/// Written as an engine would that cares: the query heads of a KV head together, so that keys and values are read once; tiles
/// that stay in the first-level cache; a running softmax; vectors for everything, with the instruction set that the library's
/// kernels use, so that an eviction is never compared with a slower machine than its own.

#include <cmath>
#include <vector>

#include "beaconkv/kernel/vector.hpp"

namespace beaconkv::bench {

namespace detail {

using beaconkv::detail::bits_of;
using beaconkv::detail::load;
using beaconkv::detail::raise_to;
using beaconkv::detail::store;

/// Rows that stay in the first-level cache while they are used.
inline constexpr index_t attention_tile = 64;

/// `x = exp(x)` for `x <= 0`, relative error 1e-7.
template <class Isa>
BEACONKV_KERNEL void exp_not_positive(typename Isa::Floats& x) noexcept {
  using Floats = typename Isa::Floats;
  using Ints = typename Isa::Ints;
  const Floats least = -87.0F - Floats{};
  Floats t = x;
  raise_to(t, least);
  const Ints n = __builtin_convertvector(t * 1.44269504F - 0.5F, Ints);  // truncates towards zero
  const Floats whole = __builtin_convertvector(n, Floats);
  const Floats r = t - whole * 0.693359375F + whole * 2.12194440e-4F;
  Floats p = 1.9875691500e-4F - Floats{};
  p = p * r + 1.3981999507e-3F;
  p = p * r + 8.3334519073e-3F;
  p = p * r + 4.1665795894e-2F;
  p = p * r + 1.6666665459e-1F;
  p = p * r + 5.0000001201e-1F;
  p = p * r * r + r + 1.0F;
  const Ints power = (n + 127) << 23;
  Floats scale;
  bits_of(scale, power);
  x = p * scale;
}

/// The query heads of a group side by side.
struct Group4 {
  using Floats = beaconkv::detail::Float4;
  static constexpr index_t width = 4;
};
struct Group8 {
  using Floats = beaconkv::detail::Float8;
  static constexpr index_t width = 8;
};

/// One KV head. `queries` [dim][Q], scaled; `keys` and `values` [tokens][dim], dense; `out` [Q][dim]. Q is the group, padded.
template <class GroupT>
struct AttentionHead {
  using Group = typename GroupT::Floats;
  static constexpr index_t Q = GroupT::width;

  template <class Isa>
  BEACONKV_KERNEL void run(const float* queries, const float* keys, const float* values, index_t tokens, index_t dim,
                           float* out) noexcept {
    alignas(64) float weights[static_cast<std::size_t>(attention_tile * Q)];
    float top[static_cast<std::size_t>(Q)];
    float sum[static_cast<std::size_t>(Q)];
    for (index_t q = 0; q < Q; ++q) {
      top[q] = -3e38F;
      sum[q] = 0;
    }
    for (index_t i = 0; i < Q * dim; ++i) out[i] = 0;
    for (index_t first = 0; first < tokens; first += attention_tile) {
      const index_t n = tokens - first < attention_tile ? tokens - first : attention_tile;
      Group high;
      load(high, top);
      logits<8>(queries, keys + first * dim, n / 8 * 8, dim, weights, high);
      logits<1>(queries, keys + (first + n / 8 * 8) * dim, n % 8, dim, weights + n / 8 * 8 * Q, high);
      float old_top[static_cast<std::size_t>(Q)];
      for (index_t q = 0; q < Q; ++q) old_top[q] = top[q];
      store(top, high);
      exponentials<Isa>(weights, n, top, sum, old_top);
      for (index_t q = 0; q < Q; ++q)
        if (old_top[q] != 1.0F) {
          typename Isa::Floats x;
          for (index_t d = 0; d < dim; d += Isa::width) {
            load(x, out + q * dim + d);
            x *= old_top[q];
            store(out + q * dim + d, x);
          }
        }
      constexpr index_t wide = Isa::width == 16 ? 4 : 2;
      for (index_t d = 0; d < dim; d += wide * Isa::width)
        for (index_t q = 0; q < Q; q += 4) mix<Isa, wide>(weights + q, values + first * dim + d, n, dim, out + q * dim + d);
    }
    for (index_t q = 0; q < Q; ++q)
      for (index_t d = 0; d < dim; ++d) out[q * dim + d] /= sum[q];
  }

  /// `Rows` keys at a time, lanes = query heads. Lines a tile ahead are asked for one by one, between products: all at once
  /// they would wait for each other (1.6 times slower from memory), and without asking so do the loads.
  template <index_t Rows>
  BEACONKV_KERNEL void logits(const float* queries, const float* keys, index_t n, index_t dim, float* to,
                              Group& high) noexcept {
    for (index_t k = 0; k < n; k += Rows) {
      const float* const key = keys + k * dim;
      Group sums[static_cast<std::size_t>(Rows)];
      BEACONKV_UNROLL for (index_t r = 0; r < Rows; ++r) sums[r] = Group{};
      for (index_t e = 0; e < dim; e += 16) {
        BEACONKV_UNROLL for (index_t r = 0; r < Rows; ++r) __builtin_prefetch(key + (attention_tile + r) * dim + e, 0, 2);
        for (index_t d = e; d < e + 16; ++d) {
          Group q;
          load(q, queries + d * Q);
          BEACONKV_UNROLL for (index_t r = 0; r < Rows; ++r) sums[r] += q * key[r * dim + d];
        }
      }
      BEACONKV_UNROLL for (index_t r = 0; r < Rows; ++r) {
        store(to + (k + r) * Q, sums[r]);
        raise_to(high, sums[r]);
      }
    }
  }

  /// Logits `[n][Q]` become weights; `factor` comes with the old maxima and leaves with what everything older is worth.
  template <class Isa>
  BEACONKV_KERNEL void exponentials(float* weights, index_t n, const float* top, float* sum, float* factor) noexcept {
    using beaconkv::detail::lanes;  // a multiple of every width, and of Q
    alignas(64) float tops[static_cast<std::size_t>(lanes)];
    alignas(64) float sums[static_cast<std::size_t>(lanes)];
    for (index_t i = 0; i < lanes; ++i) {
      tops[i] = top[i % Q];
      sums[i] = 0;
    }
    for (index_t i = n * Q; i % lanes != 0; ++i) weights[i] = -3e38F;
    for (index_t i = 0; i < n * Q; i += lanes)
      for (index_t l = 0; l < lanes; l += Isa::width) {
        typename Isa::Floats x, t, s;
        load(x, weights + i + l);
        load(t, tops + l);
        load(s, sums + l);
        x -= t;
        exp_not_positive<Isa>(x);
        s += x;
        store(weights + i + l, x);
        store(sums + l, s);
      }
    for (index_t q = 0; q < Q; ++q) {
      factor[q] = std::exp(factor[q] - top[q]);
      sum[q] *= factor[q];
    }
    for (index_t i = 0; i < lanes; ++i) sum[i % Q] += sums[i];
  }

  /// `out` [4][dim] += weights [n][Q] times `Wide` registers of each value.
  template <class Isa, index_t Wide>
  BEACONKV_KERNEL void mix(const float* weights, const float* values, index_t n, index_t dim, float* out) noexcept {
    typename Isa::Floats sums[4][static_cast<std::size_t>(Wide)];
    BEACONKV_UNROLL for (index_t q = 0; q < 4; ++q) BEACONKV_UNROLL for (index_t w = 0; w < Wide; ++w)
        load(sums[q][w], out + q * dim + w * Isa::width);
    for (index_t k = 0; k < n; ++k) {
      const float* const value = values + k * dim;
      for (index_t i = 0; i < Wide * Isa::width; i += 16) __builtin_prefetch(value + attention_tile * dim + i, 0, 2);
      typename Isa::Floats v[static_cast<std::size_t>(Wide)];
      BEACONKV_UNROLL for (index_t w = 0; w < Wide; ++w) load(v[w], value + w * Isa::width);
      BEACONKV_UNROLL for (index_t q = 0; q < 4; ++q) BEACONKV_UNROLL for (index_t w = 0; w < Wide; ++w) sums[q][w] +=
          v[w] * weights[k * Q + q];
    }
    BEACONKV_UNROLL for (index_t q = 0; q < 4; ++q) BEACONKV_UNROLL for (index_t w = 0; w < Wide; ++w)
        store(out + q * dim + w * Isa::width, sums[q][w]);
  }
};

/// The sum of `count` floats, a multiple of 64: how fast they can be read at all.
struct ReadAll {
  template <class Isa>
  BEACONKV_KERNEL void run(const float* from, index_t count, float* out) noexcept {
    constexpr index_t registers = 64 / Isa::width;
    typename Isa::Floats sums[static_cast<std::size_t>(registers)] = {};
    for (index_t i = 0; i < count; i += 64) BEACONKV_UNROLL for (index_t r = 0; r < registers; ++r) {
        typename Isa::Floats x;
        load(x, from + i + r * Isa::width);
        sums[r] += x;
      }
    float total = 0;
    for (index_t r = 0; r < registers; ++r)
      for (index_t l = 0; l < Isa::width; ++l) total += sums[r][l];
    *out = total;
  }
};

}  // namespace detail

/// The attention of one decode step over one layer, `[kv_head][capacity][head_dim]` memory, dense; `head_dim` a multiple of 64
/// and at most 8 query heads a KV head.
class AttentionStep {
 public:
  explicit AttentionStep(const Shape& shape)
      : shape_(shape),
        padded_(shape.group() <= 4 ? 4 : 8),
        packed_(static_cast<std::size_t>(padded_ * shape.head_dim)),
        mixed_(packed_.size()) {}

  /// `queries` and `out`: `[query_heads][head_dim]`.
  void run(const float* queries, const float* keys, const float* values, index_t tokens, index_t capacity, float* out) {
    const index_t dim = shape_.head_dim;
    const index_t group = shape_.group();
    const float scale = 1.0F / std::sqrt(static_cast<float>(dim));
    for (index_t h = 0; h < shape_.kv_heads; ++h) {
      for (index_t g = 0; g < group; ++g)
        for (index_t d = 0; d < dim; ++d)
          packed_[static_cast<std::size_t>(d * padded_ + g)] = queries[(h * group + g) * dim + d] * scale;
      const float* const k = keys + h * capacity * dim;
      const float* const v = values + h * capacity * dim;
      if (padded_ == 4)
        beaconkv::detail::run<detail::AttentionHead<detail::Group4>>(packed_.data(), k, v, tokens, dim, mixed_.data());
      else
        beaconkv::detail::run<detail::AttentionHead<detail::Group8>>(packed_.data(), k, v, tokens, dim, mixed_.data());
      for (index_t i = 0; i < group * dim; ++i) out[h * group * dim + i] = mixed_[static_cast<std::size_t>(i)];
    }
  }

 private:
  Shape shape_;
  index_t padded_;  // the group, up to whole vectors
  std::vector<float> packed_;
  std::vector<float> mixed_;
};

/// Reads what an attention step reads, and nothing else.
[[nodiscard]] inline float read_cache(const Shape& shape, const float* keys, const float* values, index_t tokens,
                                      index_t capacity) {
  float total = 0;
  for (index_t h = 0; h < shape.kv_heads; ++h)
    for (const float* const rows : {keys, values}) {
      float sum = 0;
      beaconkv::detail::run<detail::ReadAll>(rows + h * capacity * shape.head_dim, tokens * shape.head_dim, &sum);
      total += sum;
    }
  return total;
}

}  // namespace beaconkv::bench
