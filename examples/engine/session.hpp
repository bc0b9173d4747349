// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// One sequence of a model: its KV memory and the forward pass.

#include <span>
#include <vector>

#include "engine/model.hpp"

namespace beaconkv::engine {

/// Token ids in, logits out. The KV memory is open to eviction policies: they move rows within it and then tell the new length.
///
/// Keys are stored after RoPE at their true positions; positions go on growing whatever is evicted. Layers may hold different
/// numbers of rows, the heads of a layer hold equally many. Rows are in time order as long as whoever moves them keeps it so;
/// attention does not depend on their order.
///
/// A copy is a fork: it has memory of its own and goes on independently. One thread uses a session; the model is shared.
class Session {
 public:
  /// Takes KV memory for `capacity` rows in every layer, and all scratch that a decode step needs. An impossible capacity is
  /// an error. The model must outlive the session.
  [[nodiscard]] static Result<Session> make(const Model& model, index_t capacity);

  /// As `make`; throws `Error`.
  Session(const Model& model, index_t capacity) : Session(make(model, capacity).or_throw()) {}

  /// Appends tokens: a prompt, or its next piece. Each attends to all rows before it and to itself. Leaves the logits of the
  /// last token. A token id that does not exist, no tokens, or more than fit is an error, and nothing has changed. Allocates
  /// where the piece is longer than any before.
  [[nodiscard]] Status prefill(std::span<const int> tokens);

  /// Appends one token. As a `prefill` of one token, and never allocates where it succeeds.
  [[nodiscard]] Status decode(int token) { return prefill(std::span(&token, 1)); }

  /// `[vocab]` logits of the newest token; zeros before the first.
  [[nodiscard]] std::span<const float> logits() const noexcept { return view(logits_); }

  /// Queries before RoPE, after the q-norm, of all tokens of the last `prefill` or `decode`. Valid until the next.
  [[nodiscard]] QueryView queries(index_t layer) const noexcept;

  /// KV memory of a layer: `[Hk][capacity][D]`, of which the first `length(layer, head)` rows of each head are in use.
  [[nodiscard]] float* keys(index_t layer) noexcept { return keys_.data() + layer * layer_stride(); }
  [[nodiscard]] float* values(index_t layer) noexcept { return values_.data() + layer * layer_stride(); }
  [[nodiscard]] const float* keys(index_t layer) const noexcept { return keys_.data() + layer * layer_stride(); }
  [[nodiscard]] const float* values(index_t layer) const noexcept { return values_.data() + layer * layer_stride(); }

  [[nodiscard]] index_t capacity() const noexcept { return capacity_; }
  /// Of all heads, or of the longest one.
  [[nodiscard]] index_t length(index_t layer) const noexcept;
  [[nodiscard]] index_t length(index_t layer, index_t head) const noexcept {
    return lengths_[static_cast<std::size_t>(layer * model_->shape().kv_heads + head)];
  }
  /// To be told after rows of a layer were moved, removed or put back: the first `rows` of each head are in use.
  [[nodiscard]] Status set_length(index_t layer, index_t rows);
  /// The same of one KV head: heads may differ.
  [[nodiscard]] Status set_length(index_t layer, index_t head, index_t rows);

  /// Position of the next token: the number of tokens seen so far.
  [[nodiscard]] position_t next_position() const noexcept { return next_position_; }
  /// To be told, after `set_length`, where the text stands once tokens were taken back or rows came from elsewhere (a saved
  /// conversation). Refused below the rows of a layer. Logits and queries stay those of the last call.
  [[nodiscard]] Status set_next_position(position_t position);
  [[nodiscard]] const Model& model() const noexcept { return *model_; }

  /// Whether decode steps leave their attention weights for `attention`. Off at first; switching it on allocates.
  void record_attention(bool on);

  /// `[Hq][rows]` weights of the last decode step, with `rows = length(layer)` as it was then, the new row included. Empty
  /// where recording was off, heads differed in length or the last call had several tokens.
  [[nodiscard]] std::span<const float> attention(index_t layer) const noexcept;

 private:
  struct Checked {};
  Session(const Model& model, index_t capacity, Checked /*tag*/);

  [[nodiscard]] Status check(std::span<const int> tokens) const;
  void forward(std::span<const int> tokens, index_t first);
  void append_heads(index_t layer, index_t tokens, index_t first);
  void attend(index_t layer, index_t tokens);
  void feed_forward(const LayerWeights& weights, index_t tokens);

  [[nodiscard]] static std::span<const float> view(const Vector& v) noexcept {
    return {v.data(), static_cast<std::size_t>(v.size())};
  }
  [[nodiscard]] index_t layer_stride() const noexcept {
    return model_->shape().kv_heads * capacity_ * model_->shape().head_dim;
  }
  [[nodiscard]] index_t query_width() const noexcept { return model_->shape().query_heads * model_->shape().head_dim; }
  [[nodiscard]] index_t qkv_width() const noexcept;

  const Model* model_;
  index_t capacity_;
  position_t next_position_ = 0;
  std::vector<index_t> lengths_;  // [layers][Hk]
  Vector keys_, values_;          // [layers][Hk][capacity][D]
  Vector logits_;
  Vector queries_;  // [layers][query_tokens_][Hq][D], room for more
  index_t query_tokens_ = 0;
  bool recording_ = false;
  Vector recorded_;  // [layers][Hq * capacity]
  std::vector<index_t> recorded_rows_;

  // Scratch of a forward pass over at most `block` tokens.
  Vector hidden_;     // [block][hidden], the residual stream
  Vector normed_;     // [block][hidden]
  Vector qkv_;        // [block][(Hq + 2 Hk) * D]
  Vector mixed_;      // [block][Hq * D], what attention gives
  Vector gate_up_;    // [block][2 * intermediate]
  Vector weights_;    // [Hq][capacity] of one token
  Vector rotations_;  // [block][rotary_dim]
  Vector products_;   // what a matrix product of several tokens needs
};

}  // namespace beaconkv::engine
