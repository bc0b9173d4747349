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

/// What `TurnRows` does: `rows` rows from `in` to `out`, which may be the same. Only the numbers that turn are written, front
/// to back: rows of `out` must not be rows of `in` that come later.
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

/// Cosines and sines of pairs for both of their numbers; sines with the sign of the number they are added to.
BEACONKV_KERNEL void spread_pairs(Float4& low, Float4& high, const Float4& x) noexcept {
  low = __builtin_shufflevector(x, x, 0, 0, 1, 1);
  high = __builtin_shufflevector(x, x, 2, 2, 3, 3);
}
BEACONKV_KERNEL void spread_pairs(Float8& low, Float8& high, const Float8& x) noexcept {
  low = __builtin_shufflevector(x, x, 0, 0, 1, 1, 2, 2, 3, 3);
  high = __builtin_shufflevector(x, x, 4, 4, 5, 5, 6, 6, 7, 7);
}
BEACONKV_KERNEL void spread_pairs(Float16& low, Float16& high, const Float16& x) noexcept {
  low = __builtin_shufflevector(x, x, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  high = __builtin_shufflevector(x, x, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15);
}
/// Each number and its neighbour change places.
BEACONKV_KERNEL void swap_pairs(Float4& out, const Float4& x) noexcept { out = __builtin_shufflevector(x, x, 1, 0, 3, 2); }
BEACONKV_KERNEL void swap_pairs(Float8& out, const Float8& x) noexcept {
  out = __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6);
}
BEACONKV_KERNEL void swap_pairs(Float16& out, const Float16& x) noexcept {
  out = __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
}

/// `(i, i + second)` turn together. Turns one vector of first and one of second numbers.
struct HalfOrder {
  template <class Isa>
  static constexpr index_t vectors_at_once = 4;
  static constexpr index_t step = 1;  ///< from the first number of a pair to that of the next

  template <class V>
  struct Rotation {
    V cos;
    V sin;
  };
  template <class V>
  BEACONKV_KERNEL void prepare(Rotation<V>& r, const V& cos, const V& sin) noexcept {
    r.cos = cos;
    r.sin = sin;
  }
  template <class V>
  BEACONKV_KERNEL void turn(const Rotation<V>& r, const float* in, float* out, index_t second) noexcept {
    V x, y;
    load(x, in);
    load(y, in + second);
    read_once(x);
    read_once(y);
    const V turned_x = x * r.cos - y * r.sin;
    const V turned_y = y * r.cos + x * r.sin;
    store(out, turned_x);
    store(out + second, turned_y);
  }
  /// The numbers of `n` pairs.
  BEACONKV_KERNEL void copy_some(const float* in, index_t in_second, float* out, index_t out_second, index_t n) noexcept {
    for (index_t i = 0; i < n; ++i) {
      out[i] = in[i];
      out[out_second + i] = in[in_second + i];
    }
  }
};

/// `(2i, 2i + 1)` turn together. Turns two vectors of pairs.
struct PairOrder {
  template <class Isa>
  static constexpr index_t vectors_at_once = Isa::width == 16 ? 4 : 2;  // a rotation takes four registers
  static constexpr index_t step = 2;

  template <class V>
  struct Rotation {
    V cos[2];
    V sin[2];
  };
  template <class V>
  BEACONKV_KERNEL void prepare(Rotation<V>& r, const V& cos, const V& sin) noexcept {
    spread_pairs(r.cos[0], r.cos[1], cos);
    V sign{};
    V low, high;
    BEACONKV_UNROLL for (std::size_t i = 0; i < sizeof(V) / sizeof(float); ++i) sign[i] = i % 2 == 0 ? -1.0F : 1.0F;
    spread_pairs(low, high, sin);
    r.sin[0] = low * sign;
    r.sin[1] = high * sign;
  }
  template <class V>
  BEACONKV_KERNEL void turn(const Rotation<V>& r, const float* in, float* out, index_t) noexcept {
    constexpr auto width = static_cast<index_t>(sizeof(V) / sizeof(float));
    V x, y, swapped_x, swapped_y;
    load(x, in);
    load(y, in + width);
    read_once(x);
    read_once(y);
    swap_pairs(swapped_x, x);
    swap_pairs(swapped_y, y);
    store(out, x * r.cos[0] + swapped_x * r.sin[0]);
    store(out + width, y * r.cos[1] + swapped_y * r.sin[1]);
  }
  BEACONKV_KERNEL void copy_some(const float* in, index_t, float* out, index_t, index_t n) noexcept {
    for (index_t i = 0; i < 2 * n; ++i) out[i] = in[i];
  }
};

template <class Order>
struct TurnRows {
  /// Rows that turn together where the rotation fills the registers several times: a load waits for a store that is a multiple
  /// of 4 KiB away, and no eight rows of 512 bytes are.
  static constexpr index_t rows_a_block = 4;

  template <class Isa>
  static constexpr index_t pairs_a_pass = Order::template vectors_at_once<Isa>* Isa::width;

  template <class Isa>
  BEACONKV_KERNEL void run(const RowsToTurn* rows) noexcept {
    const RowsToTurn& t = *rows;  // by address: copies wait for the stores that made it
    const index_t most = t.pairs == pairs_a_pass<Isa> ? t.rows : rows_a_block;
    for (index_t first = 0; first < t.rows; first += most) {
      const index_t left = t.rows - first;
      turn_block<Isa>(t, t.in + first * t.in_stride, t.out + first * t.out_stride, left < most ? left : most);
    }
  }

  template <class Isa>
  BEACONKV_KERNEL void turn_block(const RowsToTurn& t, const float* in, float* out, index_t rows) noexcept {
    using Floats = typename Isa::Floats;
    constexpr index_t at_once = Order::template vectors_at_once<Isa>;
    index_t i = 0;
    for (; i + pairs_a_pass<Isa> <= t.pairs; i += pairs_a_pass<Isa>) turn_all<Floats, at_once>(t, in, out, rows, i);
    for (; i + Isa::width <= t.pairs; i += Isa::width) turn_all<Floats, 1>(t, in, out, rows, i);
    if (i < t.pairs) turn_last<Floats>(t, in, out, rows, i);
  }

  /// The rotation of the pairs of `count` vectors.
  template <class V, index_t count>
  struct Rotation {
    typename Order::template Rotation<V> part[static_cast<std::size_t>(count)];
  };
  template <class V, index_t count>
  BEACONKV_KERNEL void prepare(Rotation<V, count>& rotation, const float* cos, const float* sin, float factor) noexcept {
    constexpr auto width = static_cast<index_t>(sizeof(V) / sizeof(float));
    BEACONKV_UNROLL for (index_t v = 0; v < count; ++v) {
      V c, s;
      load(c, cos + v * width);
      load(s, sin + v * width);
      c *= factor;
      s *= factor;
      Order::prepare(rotation.part[v], c, s);
    }
  }
  template <class V, index_t count>
  BEACONKV_KERNEL void turn_row(const Rotation<V, count>& rotation, const float* in, float* out, index_t second) noexcept {
    constexpr auto width = static_cast<index_t>(sizeof(V) / sizeof(float));
    BEACONKV_UNROLL for (index_t v = 0; v < count; ++v)
        Order::turn(rotation.part[v], in + Order::step * v * width, out + Order::step * v * width, second);
  }

  /// Of all rows the pairs of `count` vectors from `i` on.
  template <class V, index_t count>
  BEACONKV_KERNEL void turn_all(const RowsToTurn& t, const float* in, float* out, index_t rows, index_t i) noexcept {
    Rotation<V, count> rotation;
    prepare(rotation, t.cos + i, t.sin + i, t.factor);
    in += Order::step * i;
    out += Order::step * i;
    const index_t in_stride = t.in_stride;  // or they would be read again after each store
    const index_t out_stride = t.out_stride;
    const index_t second = t.second;
    for (; rows > 0; --rows, in += in_stride, out += out_stride) turn_row(rotation, in, out, second);
  }

  /// Of all rows the pairs from `i` on, fewer than a vector holds.
  template <class V>
  BEACONKV_KERNEL void turn_last(const RowsToTurn& t, const float* in, float* out, index_t rows, index_t i) noexcept {
    constexpr auto width = static_cast<index_t>(sizeof(V) / sizeof(float));
    const index_t left = t.pairs - i;
    V c, s;
    load_first(c, t.cos + i, left);
    load_first(s, t.sin + i, left);
    c *= t.factor;
    s *= t.factor;
    typename Order::template Rotation<V> rotation;
    Order::prepare(rotation, c, s);
    for (index_t r = 0; r < rows; ++r) {
      float some[2 * sizeof(V) / sizeof(float)] = {};
      Order::copy_some(in + r * t.in_stride + Order::step * i, t.second, some, width, left);
      Order::turn(rotation, some, some, width);
      Order::copy_some(some, width, out + r * t.out_stride + Order::step * i, t.second, left);
    }
  }
};

/// Rotations that are remembered: of deltas that are this far apart only one.
inline constexpr index_t remembered_rotations = 256;
[[nodiscard]] constexpr index_t rotation_slot(position_t delta) noexcept {
  return static_cast<index_t>(delta & (remembered_rotations - 1));
}

/// What `TurnByDeltas` does: as `rows` says, but row `i` by the rotation by `deltas[i]`. That stands in row
/// `rotation_slot(delta)` of `rotations`, `rows.pairs` cosines and then as many sines, if `formed` says so there. Stops before
/// the first row whose rotation does not.
struct DeltasToTurn {
  RowsToTurn rows;
  const position_t* deltas;
  const float* rotations;
  const position_t* formed;
  index_t turned;  ///< set: how many rows
};

template <class Order>
struct TurnByDeltas {
  template <class Isa>
  BEACONKV_KERNEL void run(DeltasToTurn* by) noexcept {
    using Rows = TurnRows<Order>;
    constexpr bool at_once = true;
    if (by->rows.pairs == Rows::template pairs_a_pass<Isa>)
      turn_runs<Isa, at_once>(*by);
    else
      turn_runs<Isa, !at_once>(*by);
  }

  /// Run after run of rows with the same delta. Where the rotation fits the registers, a run is found while it turns, or its
  /// end, which cannot be foretold, would be waited for twice.
  template <class Isa, bool at_once>
  BEACONKV_KERNEL void turn_runs(DeltasToTurn& by) noexcept {
    using Rows = TurnRows<Order>;
    // Number by number: a copy would wait for the stores that made it.
    const RowsToTurn t{by.rows.cos,        by.rows.sin,  by.rows.in,    by.rows.in_stride, by.rows.out,
                       by.rows.out_stride, by.rows.rows, by.rows.pairs, by.rows.second,    by.rows.factor};
    const float* in = t.in;
    float* out = t.out;
    const position_t* const deltas = by.deltas;
    index_t r = 0;
    while (r < t.rows) {
      const position_t now = deltas[r];
      if (by.formed[rotation_slot(now)] != now) break;
      const float* const cos = by.rotations + rotation_slot(now) * 2 * t.pairs;
      const float* const sin = cos + t.pairs;
      if constexpr (at_once) {
        typename Rows::template Rotation<typename Isa::Floats, Order::template vectors_at_once<Isa>> rotation;
        Rows::prepare(rotation, cos, sin, t.factor);
        do {
          Rows::turn_row(rotation, in, out, t.second);
          in += t.in_stride;
          out += t.out_stride;
        } while (++r < t.rows && deltas[r] == now);
      } else {
        const index_t first = r;
        while (++r < t.rows && deltas[r] == now) {
        }
        const RowsToTurn run{cos, sin, in, t.in_stride, out, t.out_stride, r - first, t.pairs, t.second, t.factor};
        Rows::template run<Isa>(&run);
        in += run.rows * t.in_stride;
        out += run.rows * t.out_stride;
      }
    }
    by.turned = r;
  }
};

}  // namespace beaconkv::inline v0::detail
