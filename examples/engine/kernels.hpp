// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// The arithmetic of a forward pass, by the library's kernels: on every instruction set, whatever the program is compiled for.

#include "beaconkv/types.hpp"

namespace beaconkv::engine {

/// Tokens that pass through the layers together: enough to use a matrix product well, few enough to keep scratch small.
inline constexpr index_t block = 64;

/// Numbers of scratch that `multiply_add` needs for `tokens` tokens, at most `block`, of `cols` numbers.
[[nodiscard]] index_t product_scratch(index_t tokens, index_t cols) noexcept;

/// `out[t][r] += weight[r] . in[t]`: `weight` `[rows][cols]`, `in` `[tokens][cols]`, `out` `[tokens][rows]`, all dense. At most
/// `block` tokens. One token reads the weights once and needs no scratch; several read them once together.
void multiply_add(const float* weight, index_t rows, index_t cols, const float* in, index_t tokens, float* out, float* scratch);

/// The KV rows that the query heads of one KV head attend to: `[rows][dim]`, dense.
struct AttentionRows {
  const float* keys = nullptr;
  const float* values = nullptr;
  index_t rows = 0;
  index_t dim = 0;
};

/// Attention of `heads` queries `[heads][dim]` over the same rows. Leaves the weights `[heads][rows]` and the mixed values
/// `[heads][dim]`. One exponential a weight.
void attend(const AttentionRows& kv, index_t heads, const float* queries, float* weights, float* mixed);

/// `out[i] = gate[i] / (1 + exp(-gate[i])) * up[i]`; `out` may be `gate`.
void gate(const float* gate, const float* up, index_t n, float* out);

}  // namespace beaconkv::engine
