// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Kernels of RoPE: forming a rotation as a product of two, and turning rows by it.

#include "beaconkv/kernel/vector.hpp"

namespace beaconkv::inline v0::detail {

/// What rotations are composed in: on `avx2` and `avx512` a whole register of doubles, on `baseline` two, or their floats would
/// fill half of one.
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

/// Both stay in registers: g++ would read them from memory for each of their uses.
template <class V>
BEACONKV_KERNEL void read_once([[maybe_unused]] V& x, [[maybe_unused]] V& y) noexcept {
#if defined(BEACONKV_DETAIL_X86) && !defined(__clang__)
  asm("" : "+v"(x), "+v"(y));
#endif
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

/// What `TurnRows` does: `rows` rows from `in` to `out`, which may be the same. Only the numbers that turn are written, some of
/// them in all rows, then others: rows of `out` must not be rows of `in` that come later, and all should fit the first cache.
struct RowsToTurn {
  const float* cos;
  const float* sin;
  const float* in;
  index_t in_stride;
  float* out;
  index_t out_stride;
  index_t rows;
  index_t pairs;
  index_t second;  ///< of `HalfOrder`: from the first number of a pair to its second
  float factor;    ///< multiplies cosines and sines
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

/// `(i, i + second)` turn together. Reads and writes the first and the second numbers of pairs from `i` on.
struct HalfOrder {
  template <class V>
  BEACONKV_KERNEL void read(V& x, V& y, const float* in, index_t i, index_t second) noexcept {
    load(x, in + i);
    load(y, in + second + i);
  }
  template <class V>
  BEACONKV_KERNEL void write(float* out, index_t i, index_t second, const V& x, const V& y) noexcept {
    store(out + i, x);
    store(out + second + i, y);
  }
  template <class V>
  BEACONKV_KERNEL void read_first(V& x, V& y, const float* in, index_t i, index_t second, index_t n) noexcept {
    load_first(x, in + i, n);
    load_first(y, in + second + i, n);
  }
  template <class V>
  BEACONKV_KERNEL void write_first(float* out, index_t i, index_t second, const V& x, const V& y, index_t n) noexcept {
    store_first(out + i, x, n);
    store_first(out + second + i, y, n);
  }
};

/// `(2i, 2i + 1)` turn together.
struct PairOrder {
  template <class V>
  BEACONKV_KERNEL void read(V& x, V& y, const float* in, index_t i, index_t) noexcept {
    V low, high;
    load(low, in + 2 * i);
    load(high, in + 2 * i + static_cast<index_t>(sizeof(V) / sizeof(float)));
    split_pairs(x, y, low, high);
  }
  template <class V>
  BEACONKV_KERNEL void write(float* out, index_t i, index_t, const V& x, const V& y) noexcept {
    V low, high;
    join_pairs(low, high, x, y);
    store(out + 2 * i, low);
    store(out + 2 * i + static_cast<index_t>(sizeof(V) / sizeof(float)), high);
  }
  template <class V>
  BEACONKV_KERNEL void read_first(V& x, V& y, const float* in, index_t i, index_t second, index_t n) noexcept {
    float some[2 * sizeof(V) / sizeof(float)] = {};
    for (index_t d = 0; d < 2 * n; ++d) some[d] = in[2 * i + d];
    read(x, y, some, 0, second);
  }
  template <class V>
  BEACONKV_KERNEL void write_first(float* out, index_t i, index_t second, const V& x, const V& y, index_t n) noexcept {
    float some[2 * sizeof(V) / sizeof(float)];
    write(some, 0, second, x, y);
    for (index_t d = 0; d < 2 * n; ++d) out[2 * i + d] = some[d];
  }
};

template <class Order>
struct TurnRows {
  static constexpr index_t vectors_at_once = 4;

  template <class Isa>
  BEACONKV_KERNEL void run(const RowsToTurn* rows) noexcept {
    const RowsToTurn& t = *rows;  // by address: copies wait for the stores that made it
    using Floats = typename Isa::Floats;
    index_t i = 0;
    for (; i + vectors_at_once * Isa::width <= t.pairs; i += vectors_at_once * Isa::width)
      turn_all<Floats, vectors_at_once>(t, i);
    for (; i + Isa::width <= t.pairs; i += Isa::width) turn_all<Floats, 1>(t, i);
    if (i == t.pairs) return;
    const index_t left = t.pairs - i;
    Floats c, s, x, y;
    load_first(c, t.cos + i, left);
    load_first(s, t.sin + i, left);
    c *= t.factor;
    s *= t.factor;
    for (index_t r = 0; r < t.rows; ++r) {
      Order::read_first(x, y, t.in + r * t.in_stride, i, t.second, left);
      turn(c, s, x, y);
      Order::write_first(t.out + r * t.out_stride, i, t.second, x, y, left);
    }
  }

  /// Of all rows the pairs of `count` vectors from `i` on.
  template <class V, index_t count>
  BEACONKV_KERNEL void turn_all(const RowsToTurn& t, index_t i) noexcept {
    constexpr auto width = static_cast<index_t>(sizeof(V) / sizeof(float));
    V c[static_cast<std::size_t>(count)];
    V s[static_cast<std::size_t>(count)];
    BEACONKV_UNROLL for (index_t v = 0; v < count; ++v) {
      load(c[v], t.cos + i + v * width);
      load(s[v], t.sin + i + v * width);
      c[v] *= t.factor;
      s[v] *= t.factor;
    }
    const float* in = t.in;
    float* out = t.out;
    const index_t in_stride = t.in_stride;  // or they would be read again after each store
    const index_t out_stride = t.out_stride;
    const index_t second = t.second;
    for (index_t left = t.rows; left > 0; --left, in += in_stride, out += out_stride) {
      BEACONKV_UNROLL for (index_t v = 0; v < count; ++v) {
        V x, y;
        Order::read(x, y, in, i + v * width, second);
        read_once(x, y);
        turn(c[v], s[v], x, y);
        Order::write(out, i + v * width, second, x, y);
      }
    }
  }

  template <class V>
  BEACONKV_KERNEL void turn(const V& cos, const V& sin, V& x, V& y) noexcept {
    const V a = x;
    x = a * cos - y * sin;
    y = y * cos + a * sin;
  }
};

}  // namespace beaconkv::inline v0::detail
