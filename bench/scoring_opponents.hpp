// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// What attention scoring is measured against: the definition as a triple loop, and the matrix product alone by Eigen, which
/// any formulation through a library has to pay before its first exponential.

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <vector>

#include "beaconkv/algorithm/attention.hpp"

namespace beaconkv::bench {

/// One KV head's queries `[rows][dim]` and keys `[tokens][dim]`; every row sees every key.
struct ScoringInput {
  const float* queries = nullptr;
  const float* keys = nullptr;
  index_t rows = 0;
  index_t tokens = 0;
  index_t dim = 0;
};

/// Products and sums of a scoring: what rates are counted in.
[[nodiscard]] inline double flops_of(const ScoringInput& in) {
  return 2.0 * static_cast<double>(in.rows) * static_cast<double>(in.tokens) * static_cast<double>(in.dim);
}

/// Softmax of each row, largest weight of each key, to `out`. `row` is scratch of `tokens` floats.
inline void score_naively(const ScoringInput& in, std::vector<float>& row, std::vector<float>& out) {
  const float scale = 1.0F / std::sqrt(static_cast<float>(in.dim));
  const auto n = static_cast<std::size_t>(in.tokens);
  row.resize(n);
  out.assign(n, 0.0F);
  for (index_t r = 0; r < in.rows; ++r) {
    float top = -3e38F;
    for (std::size_t j = 0; j < n; ++j) {
      float dot = 0;
      const float* const key = in.keys + static_cast<index_t>(j) * in.dim;
      for (index_t d = 0; d < in.dim; ++d) dot += in.queries[r * in.dim + d] * key[d];
      row[j] = dot * scale;
      top = std::max(top, row[j]);
    }
    float sum = 0;
    for (float& x : row) {
      x = std::exp(x - top);
      sum += x;
    }
    for (std::size_t j = 0; j < n; ++j) out[j] = std::max(out[j], row[j] / sum);
  }
}

using EigenRows = Eigen::Map<const Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>>;

/// All dot products `[tokens][rows]` in one call of Eigen. `out` holds as many floats.
inline void multiply_with_eigen(const ScoringInput& in, float* out) {
  Eigen::Map<Eigen::MatrixXf> products(out, in.rows, in.tokens);
  products.noalias() = EigenRows(in.queries, in.rows, in.dim) * EigenRows(in.keys, in.tokens, in.dim).transpose();
}

/// The same, `tile` keys at a time into the same `[tile][rows]` floats: nothing is kept.
inline void multiply_tiles_with_eigen(const ScoringInput& in, index_t tile, float* out) {
  const EigenRows queries(in.queries, in.rows, in.dim);
  for (index_t j = 0; j < in.tokens; j += tile) {
    const index_t n = std::min(tile, in.tokens - j);
    Eigen::Map<Eigen::MatrixXf> products(out, in.rows, n);
    products.noalias() = queries * EigenRows(in.keys + j * in.dim, n, in.dim).transpose();
  }
}

}  // namespace beaconkv::bench
