// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Farthest point sampling of few rows: all their cosines, and the greedy rule on these.

#include "beaconkv/kernel/dot_products.hpp"
#include "beaconkv/kernel/least.hpp"

namespace beaconkv::inline v0::detail {

// A nearness is a cosine or a negative squared distance. These stand in its place, in this order above all of them.
inline constexpr float chosen_nearness = FLT_MAX;
inline constexpr float not_finite_nearness = FLT_MAX / 2;
inline constexpr float nothing_chosen = -FLT_MAX;

/// Nearness is scanned in blocks of this many; what pads the last one counts as chosen.
inline constexpr index_t nearness_block = 64;

/// Cosines of `n` rows, those among the first `known` done already. Rows whose scale is negative come out wrong: run `Mend` on
/// them.
struct CosineMatrix {
  const float* const* row = nullptr;  ///< `[n]`
  index_t dim = 0;
  index_t n = 0;
  index_t known = 0;
  const float* scale = nullptr;
  float* cosines = nullptr;
  index_t width = 0;                   ///< of a row of `cosines`
  const float* const* next = nullptr;  ///< rows of what is sampled after this: on their way here meanwhile
  index_t num_next = 0;
};

/// Fills in what is missing, and 1 (0 for a zero row) on the diagonal, where rounding would decide which row is the farthest.
struct CompleteCosines {
  template <class Isa>
  BEACONKV_KERNEL void run(const CosineMatrix* matrix) noexcept {
    const CosineMatrix m = *matrix;
    const index_t blocks = blocks_up_to(m.n) - blocks_up_to(m.known);
    const index_t step = blocks > 0 ? round_up(m.num_next, blocks) / blocks : 0;
    index_t fetched = 0;
    for (index_t i = m.known / block * block; i < m.n; i += block)
      for (index_t j = 0; j < m.n && j < i + block; j += block) {
        for (index_t end = std::min(fetched + step, m.num_next); fetched < end; ++fetched) fetch_row(m.next[fetched], m.dim);
        run_block<Isa>(m, i, j);
      }
    for (index_t i = 0; i < m.n; ++i) {
      m.cosines[i * m.width + i] = m.scale[i] > 0 ? 1.0F : 0.0F;
      for (index_t j = m.n; j < m.width; ++j) m.cosines[i * m.width + j] = 0;
    }
  }

  /// What follows a run where some scale is negative.
  struct Mend {
    template <class Isa>
    BEACONKV_KERNEL void run(const CosineMatrix* matrix) noexcept {
      const CosineMatrix m = *matrix;
      for (index_t i = 0; i < m.n; ++i)
        for (index_t j = 0; j <= i; ++j) {
          if (m.scale[i] >= 0 && m.scale[j] >= 0) continue;
          float cosine = i == j ? 1.0F : 0.0F;
          if (m.scale[i] == not_finite_row || m.scale[j] == not_finite_row)
            cosine = 0;
          else if (i != j)
            cosine = nearness_of_unusual<Pairing::product, Isa>(m.row[i], m.row[j], m.dim, 1);
          m.cosines[i * m.width + j] = cosine;
          m.cosines[j * m.width + i] = cosine;
        }
    }
  };

 private:
  static constexpr index_t block = 4;

  /// Of the lower triangle of `n` rows, about.
  [[nodiscard]] static constexpr index_t blocks_up_to(index_t n) noexcept {
    const index_t rows = round_up(n, block) / block;
    return rows * (rows + 1) / 2;
  }

  BEACONKV_KERNEL float scale_at(const CosineMatrix& m, index_t i) noexcept { return m.scale[std::min(i, m.n - 1)]; }

  /// The cosines of the rows from `i` with those from `j`, and their mirror image. What is beyond `n` repeats the last row.
  template <class Isa>
  BEACONKV_KERNEL void run_block(const CosineMatrix& m, index_t i, index_t j) noexcept {
    constexpr index_t height = Isa::width == 16 ? 4 : (Isa::width == 8 ? 2 : 1);
    constexpr index_t breadth = Isa::width == 16 ? 4 : 2;
    constexpr index_t across = block / breadth;
    float dots[std::size_t{block / height * across}][std::size_t{height * breadth}];  // of each tile
    for (index_t r = 0; r < block; r += height)
      for (index_t c = 0; c < block; c += breadth) {
        const float* a[std::size_t{height}];
        const float* b[std::size_t{breadth}];
        for (index_t k = 0; k < height; ++k) a[k] = m.row[std::min(i + r + k, m.n - 1)];
        for (index_t k = 0; k < breadth; ++k) b[k] = m.row[std::min(j + c + k, m.n - 1)];
        tile<Pairing::product, Isa, height, breadth>(dots[r / height * across + c / breadth], a, b, m.dim);
      }
    Float4 row[std::size_t{block}];
    const Float4 scale = {scale_at(m, j), scale_at(m, j + 1), scale_at(m, j + 2), scale_at(m, j + 3)};
    BEACONKV_UNROLL for (index_t r = 0; r < block; ++r) {
      const float* const left = dots[r / height * across] + r % height * breadth;
      const float* const right = dots[r / height * across + across - 1] + r % height * breadth;
      if constexpr (breadth == block)
        load(row[r], left);
      else
        row[r] = Float4{left[0], left[1], right[0], right[1]};
      const Float4 both = scale * scale_at(m, i + r);
      row[r] = row[r] * both;
      if (i + r < m.n) store(m.cosines + (i + r) * m.width + j, row[r]);
    }
    Float4 half[std::size_t{block}];
    BEACONKV_UNROLL for (index_t r = 0; r < block; r += 2) {
      half[r] = __builtin_shufflevector(row[r], row[r + 1], 0, 4, 1, 5);
      half[r + 1] = __builtin_shufflevector(row[r], row[r + 1], 2, 6, 3, 7);
    }
    BEACONKV_UNROLL for (index_t c = 0; c < block; ++c) {
      if (j + c >= m.n) break;
      const Float4 column = c % 2 == 0 ? __builtin_shufflevector(half[c / 2], half[c / 2 + 2], 0, 1, 4, 5)
                                       : __builtin_shufflevector(half[c / 2], half[c / 2 + 2], 2, 3, 6, 7);
      store(m.cosines + (j + c) * m.width + i, column);
    }
  }
};

/// Picks `count < n` rows by the greedy rule, to `order` where that is not null. `nearness` has room for whole multiples of 16
/// and is `chosen_nearness` for the chosen ones in the end; a row of `cosines` is as wide.
struct PickByCosines {
  template <class Isa>
  BEACONKV_KERNEL void run(const CosineMatrix* matrix, index_t count, float* nearness, slot_t* order) noexcept {
    using Floats = typename Isa::Floats;
    const CosineMatrix m = *matrix;
    for (index_t c = 0; c < m.n; c += double_lanes) {
      DoubleLanes<Isa> sum = {};
      for (index_t j = 0; j < m.n; ++j) {
        DoubleLanes<Isa> x;
        DoubleLanes<Isa>::read(x, m.cosines + j * m.width + c);
        BEACONKV_UNROLL for (index_t p = 0; p < x.count; ++p) sum.part[p] = sum.part[p] + x.part[p];
      }
      DoubleLanes<Isa>::write(nearness + c, sum);
    }
    for (index_t i = 0; i < m.n; ++i)
      if (m.scale[i] == not_finite_row) nearness[i] = not_finite_nearness;
    for (index_t i = m.n; i < round_up(m.n, lanes); ++i) nearness[i] = chosen_nearness;

    LeastSoFar<Isa> search;
    LeastSoFar<Isa>::begin(search);
    for (index_t c = 0; c < m.n; c += lanes) BEACONKV_UNROLL for (index_t p = 0; p < search.count; ++p) {
        Floats x;
        load(x, nearness + c + p * Isa::width);
        LeastSoFar<Isa>::add(search, x, p);
      }
    float value = 0;
    index_t pick = 0;
    LeastSoFar<Isa>::end(search, value, pick);

    for (index_t picked = 1; picked < count; ++picked) {
      if (order != nullptr) order[picked - 1] = static_cast<slot_t>(pick);
      const float* const row = m.cosines + pick * m.width;
      LeastSoFar<Isa>::begin(search);
      for (index_t c = 0; c < m.n; c += lanes) BEACONKV_UNROLL for (index_t p = 0; p < search.count; ++p) {
          Floats x;
          Floats near;
          load(x, nearness + c + p * Isa::width);
          load(near, row + c + p * Isa::width);
          if (picked == 1) {  // the means have done their service
            const typename Isa::Ints free = x < not_finite_nearness;
            select(x, free, near, x);
          } else {
            raise_to(x, near);
          }
          const typename Isa::Ints here = search.now[p] == static_cast<std::int32_t>(pick);
          const Floats chosen = chosen_nearness - Floats{};
          select(x, here, chosen, x);
          store(nearness + c + p * Isa::width, x);
          LeastSoFar<Isa>::add(search, x, p);
        }
      LeastSoFar<Isa>::end(search, value, pick);
    }
    nearness[pick] = chosen_nearness;
    if (order != nullptr) order[count - 1] = static_cast<slot_t>(pick);
  }
};

}  // namespace beaconkv::inline v0::detail
