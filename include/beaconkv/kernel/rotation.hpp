// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Kernels of RoPE: forming a rotation as a product of two, and turning rows by it.

#include "beaconkv/kernel/vector.hpp"

namespace beaconkv::inline v0::detail {

typedef double Double4 __attribute__((vector_size(32)));
typedef double Double8 __attribute__((vector_size(64)));

/// As many doubles as `Isa` has floats in half a register: of `avx2` and `avx512` whole registers, of `baseline` two.
template <class Isa>
struct Doubles {
  using Type = Double4;
  using Floats = Float4;
};
template <>
struct Doubles<Avx512> {
  using Type = Double8;
  using Floats = Float8;
};

/// Rows of rotations are so long that kernels may read whole vectors: multiples of this many numbers.
inline constexpr index_t rotation_padding = lanes;

/// `out[0, n)` from a vector of at least `n` floats.
template <class V>
BEACONKV_KERNEL void store_first(float* out, const V& v, index_t n) noexcept {
  float all[sizeof(V) / sizeof(float)];
  store(all, v);
  for (index_t i = 0; i < n; ++i) out[i] = all[i];
}
/// A vector whose first numbers are `in[0, n)`, the others 0.
template <class V>
BEACONKV_KERNEL void load_first(V& v, const float* in, index_t n) noexcept {
  float all[sizeof(V) / sizeof(float)] = {};
  for (index_t i = 0; i < n; ++i) all[i] = in[i];
  load(v, all);
}

/// The product of two rotations, formed in double; `sign` is -1 for its inverse.
struct ComposeRotation {
  /// Sources are padded, results are not.
  template <class Isa>
  BEACONKV_KERNEL void run(const double* cos_a, const double* sin_a, const double* cos_b, const double* sin_b, index_t n,
                           float sign, float* cos, float* sin) noexcept {
    using Wide = typename Doubles<Isa>::Type;
    using Narrow = typename Doubles<Isa>::Floats;
    constexpr index_t width = sizeof(Wide) / sizeof(double);
    for (index_t i = 0; i < n; i += width) {
      Wide ca, sa, cb, sb;
      load(ca, cos_a + i);
      load(sa, sin_a + i);
      load(cb, cos_b + i);
      load(sb, sin_b + i);
      const Narrow c = __builtin_convertvector(ca * cb - sa * sb, Narrow);
      const Narrow s = __builtin_convertvector(sa * cb + ca * sb, Narrow) * sign;
      if (i + width <= n) {
        store(cos + i, c);
        store(sin + i, s);
      } else {
        store_first(cos + i, c, n - i);
        store_first(sin + i, s, n - i);
      }
    }
  }
};

/// What `TurnHalves` and `TurnPairs` do: `rows` rows from `in` to `out`, which may be the same, front to back. Only the numbers
/// that turn are written.
struct RowsToTurn {
  const float* cos;
  const float* sin;
  const float* in;
  index_t in_stride;
  float* out;
  index_t out_stride;
  index_t rows;
  index_t pairs;
  index_t second;  ///< of `TurnHalves`: from the first number of a pair to its second
  float factor;    ///< multiplies cosines and sines
};

/// `(i, i + second)` turn together.
struct TurnHalves {
  template <class Isa>
  BEACONKV_KERNEL void run(RowsToTurn t) noexcept {
    using Floats = typename Isa::Floats;
    const index_t whole = t.pairs / Isa::width * Isa::width;
    for (index_t r = 0; r < t.rows; ++r) {
      const float* const in = t.in + r * t.in_stride;
      float* const out = t.out + r * t.out_stride;
      for (index_t i = 0; i < whole; i += Isa::width) {
        Floats c, s, x, y;
        load(c, t.cos + i);
        load(s, t.sin + i);
        load(x, in + i);
        load(y, in + t.second + i);
        turn(c, s, t.factor, x, y);
        store(out + i, x);
        store(out + t.second + i, y);
      }
      if (whole == t.pairs) continue;
      const index_t left = t.pairs - whole;
      Floats c, s, x, y;
      load_first(c, t.cos + whole, left);
      load_first(s, t.sin + whole, left);
      load_first(x, in + whole, left);
      load_first(y, in + t.second + whole, left);
      turn(c, s, t.factor, x, y);
      store_first(out + whole, x, left);
      store_first(out + t.second + whole, y, left);
    }
  }

  template <class V>
  BEACONKV_KERNEL void turn(const V& cos, const V& sin, float factor, V& x, V& y) noexcept {
    const V c = cos * factor;
    const V s = sin * factor;
    const V a = x;
    x = a * c - y * s;
    y = y * c + a * s;
  }
};

/// The even and the odd numbers of two vectors.
BEACONKV_KERNEL void split_pairs(Float4& even, Float4& odd, const Float4& a, const Float4& b) noexcept {
  even = __builtin_shufflevector(a, b, 0, 2, 4, 6);
  odd = __builtin_shufflevector(a, b, 1, 3, 5, 7);
}
BEACONKV_KERNEL void split_pairs(Float8& even, Float8& odd, const Float8& a, const Float8& b) noexcept {
  even = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14);
  odd = __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
}
BEACONKV_KERNEL void split_pairs(Float16& even, Float16& odd, const Float16& a, const Float16& b) noexcept {
  even = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  odd = __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}
/// The inverse.
BEACONKV_KERNEL void join_pairs(Float4& a, Float4& b, const Float4& even, const Float4& odd) noexcept {
  a = __builtin_shufflevector(even, odd, 0, 4, 1, 5);
  b = __builtin_shufflevector(even, odd, 2, 6, 3, 7);
}
BEACONKV_KERNEL void join_pairs(Float8& a, Float8& b, const Float8& even, const Float8& odd) noexcept {
  a = __builtin_shufflevector(even, odd, 0, 8, 1, 9, 2, 10, 3, 11);
  b = __builtin_shufflevector(even, odd, 4, 12, 5, 13, 6, 14, 7, 15);
}
BEACONKV_KERNEL void join_pairs(Float16& a, Float16& b, const Float16& even, const Float16& odd) noexcept {
  a = __builtin_shufflevector(even, odd, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  b = __builtin_shufflevector(even, odd, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}

/// `(2i, 2i + 1)` turn together.
struct TurnPairs {
  template <class Isa>
  BEACONKV_KERNEL void run(RowsToTurn t) noexcept {
    using Floats = typename Isa::Floats;
    const index_t whole = t.pairs / Isa::width * Isa::width;
    for (index_t r = 0; r < t.rows; ++r) {
      const float* const in = t.in + r * t.in_stride;
      float* const out = t.out + r * t.out_stride;
      for (index_t i = 0; i < whole; i += Isa::width) {
        Floats c, s, low, high, x, y;
        load(c, t.cos + i);
        load(s, t.sin + i);
        load(low, in + 2 * i);
        load(high, in + 2 * i + Isa::width);
        split_pairs(x, y, low, high);
        TurnHalves::turn(c, s, t.factor, x, y);
        join_pairs(low, high, x, y);
        store(out + 2 * i, low);
        store(out + 2 * i + Isa::width, high);
      }
      if (whole == t.pairs) continue;
      const index_t left = t.pairs - whole;
      float some[2 * Isa::width] = {};
      for (index_t i = 0; i < 2 * left; ++i) some[i] = in[2 * whole + i];
      Floats c, s, low, high, x, y;
      load_first(c, t.cos + whole, left);
      load_first(s, t.sin + whole, left);
      load(low, some);
      load(high, some + Isa::width);
      split_pairs(x, y, low, high);
      TurnHalves::turn(c, s, t.factor, x, y);
      join_pairs(low, high, x, y);
      store(some, low);
      store(some + Isa::width, high);
      for (index_t i = 0; i < 2 * left; ++i) out[2 * whole + i] = some[i];
    }
  }
};

}  // namespace beaconkv::inline v0::detail
