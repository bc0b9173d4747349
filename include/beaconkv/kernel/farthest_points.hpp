// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Farthest point sampling of many rows as they lie, evaluating only what may matter.

#include "beaconkv/kernel/cosine_matrix.hpp"

namespace beaconkv::inline v0::detail {

/// `n` rows and what is known of them. `nearness` has room for whole blocks.
struct FarthestPoints {
  const float* rows = nullptr;
  index_t stride = 0;
  index_t dim = 0;
  index_t n = 0;
  double unit = 1;                ///< distances of unusual rows are taken in it
  float* scale = nullptr;         ///< for distances: 1, `not_finite_row` or `unusual_row`
  float* nearness = nullptr;      ///< to the nearest of the first `seen` picks: never above the nearness to all
  std::int32_t* seen = nullptr;   ///< picks that `nearness` takes into account
  const slot_t* start = nullptr;  ///< the picks: first these
  index_t num_start = 0;
  const slot_t* picked = nullptr;  ///< and then these
  index_t picks = 0;               ///< of both kinds

  [[nodiscard]] const float* row(index_t i) const noexcept { return rows + i * stride; }
  [[nodiscard]] index_t pick(index_t k) const noexcept { return k < num_start ? start[k] : picked[k - num_start]; }
};

/// Where the first pick is sought from.
struct FirstPick {
  double* sum = nullptr;  ///< `[dim]`, in whole multiples of 8: of the unit rows, or of the rows
  float* mean = nullptr;  ///< `[dim]`
  double longest = 0;     ///< sum of squares
  index_t finite = 0;     ///< rows
};

/// Scales of all rows, and the sum of the finite ones.
template <Pairing pairing>
struct SumRows {
  template <class Isa>
  BEACONKV_KERNEL void run(const FarthestPoints* points, FirstPick* first) noexcept {
    const FarthestPoints f = *points;
    double* const total = first->sum;
    for (index_t d = 0; d < round_up(f.dim, double_lanes); ++d) total[d] = 0;
    double longest = 0;
    index_t finite = 0;
    for (index_t i = 0; i < f.n; i += 4) {
      const float* row[4];
      double squares[4];
      for (index_t r = 0; r < 4; ++r) row[r] = f.row(std::min(i + r, f.n - 1));
      squares_of<Isa, 4>(squares, row, f.dim);
      const float* used[4] = {};  // a row that is not finite would spoil the sum even with weight 0
      double weight[4] = {};
      index_t n = 0;
      bool usual = pairing == Pairing::product;
      for (index_t r = 0; r < 4 && i + r < f.n; ++r) {
        const float scale = scale_of(squares[r]);
        f.scale[i + r] = pairing == Pairing::product || scale == not_finite_row ? scale : 1.0F;
        if (scale == not_finite_row) continue;
        usual = usual && scale >= 0;
        ++finite;
        longest = longest > squares[r] ? longest : squares[r];
        used[n] = row[r];
        weight[n++] = pairing == Pairing::product ? (squares[r] > 0 ? 1 / std::sqrt(squares[r]) : 0) : 1;
      }
      if (n == 0) continue;
      for (; n < 4; ++n) used[n] = used[0];
      if (usual) {
        add_unit_rows<Isa>(total, used, weight, f.dim);
        continue;
      }
      for (index_t d = 0; d < f.dim; d += double_lanes) {
        DoubleLanes<Isa> sum;
        DoubleLanes<Isa>::read(sum, total + d);
        BEACONKV_UNROLL for (index_t r = 0; r < 4; ++r) {
          DoubleLanes<Isa> x;
          read_up_to(x, used[r] + d, f.dim - d);
          BEACONKV_UNROLL for (index_t p = 0; p < x.count; ++p) sum.part[p] = sum.part[p] + x.part[p] * weight[r];
        }
        DoubleLanes<Isa>::write(total + d, sum);
      }
    }
    first->longest = longest;
    first->finite = finite;
  }

 private:
  /// Four rows are summed as floats: that rounds less than the nearness that is made of all of them.
  template <class Isa>
  BEACONKV_KERNEL void add_unit_rows(double* total, const float* const (&rows)[4], const double (&weight)[4],
                                     index_t dim) noexcept {
    for (index_t d = 0; d < dim; d += lanes) {
      Lanes<Isa> four = {};
      BEACONKV_UNROLL for (index_t r = 0; r < 4; ++r) {
        Lanes<Isa> x;
        if (d + lanes <= dim)
          Lanes<Isa>::read(x, rows[r] + d);
        else
          read_end(x, rows[r] + d, dim - d);
        BEACONKV_UNROLL for (index_t p = 0; p < x.count; ++p) four.part[p] =
            four.part[p] + x.part[p] * static_cast<float>(weight[r]);
      }
      float sums[std::size_t{lanes}];
      Lanes<Isa>::write(sums, four);
      for (index_t k = d; k < d + lanes && k < dim; k += double_lanes) {
        DoubleLanes<Isa> sum;
        DoubleLanes<Isa> x;
        DoubleLanes<Isa>::read(sum, total + k);
        DoubleLanes<Isa>::read(x, sums + (k - d));
        DoubleLanes<Isa>::add(sum, x);
        DoubleLanes<Isa>::write(total + k, sum);
      }
    }
  }
};

/// `nearness[i] = ` the mean nearness of row `i` to all, up to a term that is equal for all rows.
template <Pairing pairing>
struct MeanNearness {
  template <class Isa>
  BEACONKV_KERNEL void run(const FarthestPoints* points, const FirstPick* first) noexcept {
    constexpr index_t height = Isa::width == 4 ? 2 : 4;
    const FarthestPoints f = *points;
    const double n = static_cast<double>(std::max<index_t>(first->finite, 1));
    for (index_t d = 0; d < f.dim; ++d) {
      first->sum[d] /= n;
      first->mean[d] = static_cast<float>(first->sum[d]);
    }
    const float* const mean[1] = {first->mean};
    for (index_t i = 0; i < f.n; i += height) {
      const float* row[std::size_t{height}];
      float dots[std::size_t{height}];
      for (index_t r = 0; r < height; ++r) row[r] = f.row(std::min(i + r, f.n - 1));
      if constexpr (pairing == Pairing::product) tile<pairing, Isa, height, 1>(dots, row, mean, f.dim);
      for (index_t r = 0; r < height && i + r < f.n; ++r) {
        const float scale = f.scale[i + r];
        if (scale == not_finite_row)
          f.nearness[i + r] = not_finite_nearness;
        else if (pairing == Pairing::product && scale >= 0)
          f.nearness[i + r] = dots[r] * scale;
        else
          f.nearness[i + r] = in_double<Isa>(row[r], first->sum, f.dim, f.unit);
      }
    }
  }

 private:
  /// For a finite row of any length.
  template <class Isa>
  BEACONKV_KERNEL float in_double(const float* row, const double* mean, index_t dim, double unit) noexcept {
    DoubleLanes<Isa> sum = {};
    for (index_t d = 0; d < dim; d += double_lanes) {
      DoubleLanes<Isa> x;
      DoubleLanes<Isa> y;
      read_up_to(x, row + d, dim - d);
      DoubleLanes<Isa>::read(y, mean + d);
      BEACONKV_UNROLL for (index_t p = 0; p < x.count; ++p) {
        if constexpr (pairing == Pairing::product) {
          sum.part[p] = sum.part[p] + x.part[p] * y.part[p];
        } else {
          const typename Isa::Doubles gap = x.part[p] * unit - y.part[p] * unit;
          sum.part[p] = sum.part[p] + gap * gap;
        }
      }
    }
    const double value = DoubleLanes<Isa>::sum(sum);
    if constexpr (pairing == Pairing::square_of_difference) return static_cast<float>(-value);
    double squares = 0;
    const float* const rows[1] = {row};
    squares_of<Isa, 1>(&squares, rows, dim);
    return static_cast<float>(value / std::sqrt(squares));
  }
};

/// Raises `near` to the nearness of row `i` to pick number `k`, one pair at a time, for rows that are not as usual.
template <Pairing pairing, class Isa>
BEACONKV_KERNEL void come_nearer_slowly(float& near, const FarthestPoints& f, index_t i, index_t k) noexcept {
  const index_t pick = f.pick(k);
  if (f.scale[pick] == not_finite_row || f.scale[i] == not_finite_row) return;
  const float value = nearness_of_unusual<pairing, Isa>(f.row(i), f.row(pick), f.dim, f.unit);
  near = value > near ? value : near;
}

/// Evaluates every row against the newest pick, which must be the only one not seen.
template <Pairing pairing>
struct ComeNearer {
  template <class Isa>
  BEACONKV_KERNEL void run(const FarthestPoints* points) noexcept {
    constexpr index_t height = Isa::width == 4 ? 2 : 4;
    const FarthestPoints f = *points;
    const index_t pick = f.pick(f.picks - 1);
    const float* const b[1] = {f.row(pick)};
    const float scale = f.scale[pick];
    for (index_t i = 0; i < f.n; i += height) {
      const float* a[std::size_t{height}];
      float pairs[std::size_t{height}];
      for (index_t r = 0; r < height; ++r) a[r] = f.row(std::min(i + r, f.n - 1));
      tile<pairing, Isa, height, 1>(pairs, a, b, f.dim);
      for (index_t r = 0; r < height && i + r < f.n; ++r) {
        float near = f.nearness[i + r];
        if (scale < 0 || f.scale[i + r] < 0) {
          come_nearer_slowly<pairing, Isa>(near, f, i + r, f.picks - 1);
        } else {
          const float value = pairing == Pairing::product ? pairs[r] * (f.scale[i + r] * scale) : -pairs[r];
          near = value > near ? value : near;
        }
        f.nearness[i + r] = near;
        f.seen[i + r] = static_cast<std::int32_t>(f.picks);
      }
    }
  }
};

/// The free row that is least near, the first among equals; brings up to date only rows whose last known nearness leaves them a
/// chance. Nearness only grows, so this is exact.
template <Pairing pairing>
struct Farthest {
  template <class Isa>
  BEACONKV_KERNEL void run(const FarthestPoints* points, index_t* result) noexcept {
    using Floats = typename Isa::Floats;
    const FarthestPoints f = *points;
    LeastSoFar<Isa> search;
    LeastSoFar<Isa>::begin(search);
    for (index_t c = 0; c < f.n; c += lanes) BEACONKV_UNROLL for (index_t p = 0; p < search.count; ++p) {
        Floats x;
        load(x, f.nearness + c + p * Isa::width);
        LeastSoFar<Isa>::add(search, x, p);
      }
    float best = 0;
    index_t at = 0;
    LeastSoFar<Isa>::end(search, best, at);
    best = refresh<Isa>(f, at, not_finite_nearness, at);

    for (index_t c = 0; c < f.n; c += nearness_block) {
      const float lowest = least_of_block<Isa>(f.nearness + c);
      if (!beats(lowest, c, best, at)) continue;
      std::int32_t open[std::size_t{nearness_block + 1}];
      index_t num_open = 0;
      for (index_t i = c; i < c + nearness_block; ++i) {
        open[num_open] = static_cast<std::int32_t>(i);
        num_open += f.nearness[i] <= best ? 1 : 0;
      }
      for (index_t o = 0; o < num_open; ++o) {
        const index_t i = open[o];
        if (o + 1 < num_open) fetch_row(f.row(open[o + 1]), f.dim);
        if (!beats(f.nearness[i], i, best, at)) continue;
        const float near = refresh<Isa>(f, i, best, at);
        if (!beats(near, i, best, at)) continue;
        best = near;
        at = i;
      }
    }
    *result = at;
  }

 private:
  /// Whether row `i` is the better choice.
  BEACONKV_KERNEL bool beats(float near, index_t i, float best, index_t at) noexcept {
    return near < best || (near == best && i < at);
  }

  /// Follows the picks that row `i` has not seen, while it is a better choice than row `at`; its nearness.
  template <class Isa>
  BEACONKV_KERNEL float refresh(const FarthestPoints& f, index_t i, float best, index_t at) noexcept {
    constexpr index_t breadth = Isa::width == 4 ? 2 : 4;
    float near = f.nearness[i];
    if (near >= not_finite_nearness) return near;
    index_t k = f.seen[i];
    const float* const a[1] = {f.row(i)};
    while (k < f.picks && beats(near, i, best, at)) {
      const float* b[std::size_t{breadth}];
      float pairs[std::size_t{breadth}];
      float scale[std::size_t{breadth}];
      float least_scale = f.scale[i];
      for (index_t c = 0; c < breadth; ++c) {
        const index_t pick = f.pick(std::min(k + c, f.picks - 1));
        b[c] = f.row(pick);
        scale[c] = f.scale[pick];
        least_scale = scale[c] < least_scale ? scale[c] : least_scale;
      }
      if (least_scale < 0) {
        come_nearer_slowly<pairing, Isa>(near, f, i, k++);
        continue;
      }
      const index_t m = std::min(breadth, f.picks - k);
      if (m == 1) {
        const float* const only[1] = {b[0]};
        tile<pairing, Isa, 1, 1>(pairs, a, only, f.dim);
      } else {
        tile<pairing, Isa, 1, breadth>(pairs, a, b, f.dim);
      }
      for (index_t c = 0; c < m; ++c) {
        const float value = pairing == Pairing::product ? pairs[c] * (f.scale[i] * scale[c]) : -pairs[c];
        near = value > near ? value : near;
      }
      k += m;
    }
    f.nearness[i] = near;
    f.seen[i] = static_cast<std::int32_t>(k);
    return near;
  }

  template <class Isa>
  BEACONKV_KERNEL float least_of_block(const float* block) noexcept {
    typename Isa::Floats lowest;
    load(lowest, block);
    BEACONKV_UNROLL for (index_t c = Isa::width; c < nearness_block; c += Isa::width) {
      typename Isa::Floats x;
      load(x, block + c);
      lowest = x < lowest ? x : lowest;
    }
    Float4 smallest;
    least(smallest, lowest);
    return smallest[0];
  }
};

}  // namespace beaconkv::inline v0::detail
