// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "engine/session.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <new>

#include "engine/kernels.hpp"

namespace beaconkv::engine {
namespace {

using VectorMap = Eigen::Map<Vector>;
using ConstVectorMap = Eigen::Map<const Vector>;
/// `out (+)= W * in + b`, for rows of `in` and `out`, both dense.
void apply(const Linear& linear, const float* in, index_t tokens, float* out, bool accumulate, float* scratch) {
  const index_t outputs = linear.weight.rows();
  Eigen::Map<Matrix> rows(out, tokens, outputs);
  if (!accumulate) rows.setZero();
  if (linear.bias.size() > 0) rows.rowwise() += linear.bias.transpose();
  multiply_add(linear.weight.data(), outputs, linear.weight.cols(), in, tokens, out, scratch);
}

void rms_norm(const Vector& weight, float eps, const float* in, float* out) {
  const ConstVectorMap x(in, weight.size());
  const float scale = 1.0F / std::sqrt(x.squaredNorm() / static_cast<float>(weight.size()) + eps);
  VectorMap(out, weight.size()) = (x * scale).cwiseProduct(weight);
}

}  // namespace

Result<Session> Session::make(const Model& model, index_t capacity) {
  const Shape& shape = model.shape();
  const index_t floats_per_row = model.layers() * std::max(2 * shape.kv_heads * shape.head_dim, shape.query_heads) + block;
  if (capacity < 1 || capacity > std::numeric_limits<index_t>::max() / 8 / floats_per_row)
    return detail::invalid("capacity = ", capacity, ": must be at least 1 and fit into memory");
  try {
    return Session(model, capacity, Checked{});
  } catch (const std::bad_alloc&) {
    return detail::error(StatusCode::out_of_capacity, "capacity = ", capacity, ": no memory for ",
                         2 * model.layers() * shape.kv_heads * shape.head_dim * capacity, " floats of keys and values");
  }
}

Session::Session(const Model& model, index_t capacity, Checked /*tag*/)
    : model_(&model),
      capacity_(capacity),
      lengths_(static_cast<std::size_t>(model.layers() * model.shape().kv_heads)),
      keys_(model.layers() * layer_stride()),
      values_(keys_.size()),
      logits_(Vector::Zero(model.vocab_size())),
      queries_(model.layers() * query_width()),
      recorded_rows_(static_cast<std::size_t>(model.layers())),
      hidden_(block * model.config().hidden_size),
      normed_(hidden_.size()),
      qkv_(block * qkv_width()),
      mixed_(block * query_width()),
      gate_up_(block * 2 * model.config().intermediate_size),
      weights_(model.shape().query_heads * capacity),
      rotations_(block * model.rope().rotary_dim()),
      products_(
          product_scratch(block, std::max({model.config().hidden_size, model.config().intermediate_size, query_width()}))) {}

index_t Session::qkv_width() const noexcept { return query_width() + 2 * model_->shape().kv_heads * model_->shape().head_dim; }

Status Session::check(std::span<const int> tokens) const {
  const auto count = static_cast<index_t>(tokens.size());
  if (count == 0) return detail::invalid("tokens: none given");
  for (std::size_t i = 0; i < tokens.size(); ++i)
    if (tokens[i] < 0 || tokens[i] >= model_->vocab_size())
      return detail::invalid("tokens[", i, "] = ", tokens[i], ": the model has ", model_->vocab_size());
  const index_t longest = *std::max_element(lengths_.begin(), lengths_.end());
  if (count > capacity_ - longest)
    return detail::error(StatusCode::out_of_capacity, count, " tokens after ", longest, " rows: capacity = ", capacity_);
  return {};
}

Status Session::prefill(std::span<const int> tokens) {
  if (Status s = check(tokens); !s) return s;
  const auto count = static_cast<index_t>(tokens.size());
  const index_t needed = model_->layers() * count * query_width();
  if (queries_.size() < needed) queries_.resize(needed);
  query_tokens_ = count;
  std::fill(recorded_rows_.begin(), recorded_rows_.end(), 0);
  for (index_t first = 0; first < count; first += block)
    forward(tokens.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(std::min(block, count - first))), first);

  const index_t hidden = model_->config().hidden_size;
  const index_t last = (count - 1) % block;
  rms_norm(model_->final_norm(), model_->config().rms_norm_eps, hidden_.data() + last * hidden, normed_.data());
  logits_.setZero();
  multiply_add(model_->head().data(), model_->vocab_size(), hidden, normed_.data(), 1, logits_.data(), nullptr);
  return {};
}

/// One block through all layers; `first` is its offset within the call. Leaves the residual stream in `hidden_`.
void Session::forward(std::span<const int> tokens, index_t first) {
  const ModelConfig& config = model_->config();
  const RopeTable& rope = model_->rope();
  const auto count = static_cast<index_t>(tokens.size());
  for (index_t t = 0; t < count; ++t) {
    hidden_.segment(t * config.hidden_size, config.hidden_size) = model_->embedding().row(tokens[static_cast<std::size_t>(t)]);
    (void)rope.rotation(next_position_ + t,
                        {rotations_.data() + t * rope.rotary_dim(), static_cast<std::size_t>(rope.rotary_dim())});
  }
  for (index_t l = 0; l < model_->layers(); ++l) {
    const LayerWeights& weights = model_->layer(l);
    for (index_t t = 0; t < count; ++t)
      rms_norm(weights.attention_norm, config.rms_norm_eps, hidden_.data() + t * config.hidden_size,
               normed_.data() + t * config.hidden_size);
    apply(weights.qkv, normed_.data(), count, qkv_.data(), false, products_.data());
    append_heads(l, count, first);
    attend(l, count);
    apply(weights.output, mixed_.data(), count, hidden_.data(), true, products_.data());
    feed_forward(weights, count);
    for (index_t h = 0; h < model_->shape().kv_heads; ++h)
      lengths_[static_cast<std::size_t>(l * model_->shape().kv_heads + h)] += count;
  }
  next_position_ += count;
}

/// Takes the heads in `qkv_` apart: norms, queries set aside, RoPE, keys and values to their rows.
void Session::append_heads(index_t layer, index_t tokens, index_t first) {
  const auto& [query_heads, kv_heads, dim] = model_->shape();
  const LayerWeights& weights = model_->layer(layer);
  const RopeTable& rope = model_->rope();
  const float eps = model_->config().rms_norm_eps;
  const auto factor = static_cast<float>(rope.attention_factor());
  const auto pairs = static_cast<std::size_t>(rope.pairs());
  for (index_t t = 0; t < tokens; ++t) {
    float* const query = qkv_.data() + t * qkv_width();
    float* const key = query + query_width();
    const float* const value = key + kv_heads * dim;
    if (weights.query_norm.size() > 0) {
      for (index_t h = 0; h < query_heads; ++h) rms_norm(weights.query_norm, eps, query + h * dim, query + h * dim);
      for (index_t h = 0; h < kv_heads; ++h) rms_norm(weights.key_norm, eps, key + h * dim, key + h * dim);
    }
    std::copy_n(query, query_width(), queries_.data() + (layer * query_tokens_ + first + t) * query_width());
    const float* const angles = rotations_.data() + t * rope.rotary_dim();
    const RopeRotation rotation{.cos = {angles, pairs}, .sin = {angles + pairs, pairs}};
    for (index_t h = 0; h < query_heads + kv_heads; ++h) rope.apply(rotation, query + h * dim, factor);
    for (index_t h = 0; h < kv_heads; ++h) {
      const index_t row = (h * capacity_ + length(layer, h) + t) * dim;
      std::copy_n(key + h * dim, dim, keys(layer) + row);
      std::copy_n(value + h * dim, dim, values(layer) + row);
    }
  }
}

/// Attention of the queries in `qkv_` over the rows of the layer, of which each token sees those up to its own; result in
/// `mixed_`.
void Session::attend(index_t layer, index_t tokens) {
  const auto& [query_heads, kv_heads, dim] = model_->shape();
  const index_t group = model_->shape().group();
  const index_t longest = length(layer);
  bool record = recording_ && query_tokens_ == 1;
  for (index_t h = 0; h < kv_heads; ++h) record = record && length(layer, h) == longest;
  float* const weights = record ? recorded_.data() + layer * query_heads * capacity_ : weights_.data();
  if (record) recorded_rows_[static_cast<std::size_t>(layer)] = longest + 1;
  for (index_t h = 0; h < kv_heads; ++h) {
    const index_t first = h * capacity_ * dim;
    for (index_t t = 0; t < tokens; ++t) {
      const index_t rows = length(layer, h) + t + 1;
      engine::attend({keys(layer) + first, values(layer) + first, rows, dim}, group,
                     qkv_.data() + t * qkv_width() + h * group * dim, weights + h * group * (longest + t + 1),
                     mixed_.data() + t * query_width() + h * group * dim);
    }
  }
}

void Session::feed_forward(const LayerWeights& weights, index_t tokens) {
  const index_t hidden = model_->config().hidden_size;
  const index_t inner = model_->config().intermediate_size;
  for (index_t t = 0; t < tokens; ++t)
    rms_norm(weights.mlp_norm, model_->config().rms_norm_eps, hidden_.data() + t * hidden, normed_.data() + t * hidden);
  apply(weights.gate_up, normed_.data(), tokens, gate_up_.data(), false, products_.data());
  for (index_t t = 0; t < tokens; ++t) {  // the results move up: every row of `inner` was read before it is written over
    const float* const row = gate_up_.data() + t * 2 * inner;
    gate(row, row + inner, inner, gate_up_.data() + t * inner);
  }
  apply(weights.down, gate_up_.data(), tokens, hidden_.data(), true, products_.data());
}

QueryView Session::queries(index_t layer) const noexcept {
  const Shape& shape = model_->shape();
  return QueryView::token_major(queries_.data() + layer * query_tokens_ * query_width(), query_tokens_, shape.query_heads,
                                shape.head_dim);
}

index_t Session::length(index_t layer) const noexcept {
  const auto first = lengths_.begin() + layer * model_->shape().kv_heads;
  return *std::max_element(first, first + model_->shape().kv_heads);
}

Status Session::set_length(index_t layer, index_t rows) {
  for (index_t h = 0; h < model_->shape().kv_heads; ++h)
    if (Status s = set_length(layer, h, rows); !s) return s;
  return {};
}

Status Session::set_length(index_t layer, index_t head, index_t rows) {
  if (layer < 0 || layer >= model_->layers()) return detail::invalid("layer = ", layer, ": the model has ", model_->layers());
  if (head < 0 || head >= model_->shape().kv_heads)
    return detail::invalid("head = ", head, ": the model has ", model_->shape().kv_heads, " KV heads");
  if (rows < 0 || rows > capacity_) return detail::invalid("rows = ", rows, ": must be from 0 to capacity = ", capacity_);
  lengths_[static_cast<std::size_t>(layer * model_->shape().kv_heads + head)] = rows;
  return {};
}

Status Session::set_next_position(position_t position) {
  const index_t longest = *std::max_element(lengths_.begin(), lengths_.end());
  if (position < longest)
    return detail::invalid("position = ", position, ": must be at least the ", longest, " rows of a layer");
  next_position_ = position;
  return {};
}

void Session::record_attention(bool on) {
  if (on) recorded_.resize(model_->layers() * model_->shape().query_heads * capacity_);
  recording_ = on;
  std::fill(recorded_rows_.begin(), recorded_rows_.end(), 0);
}

std::span<const float> Session::attention(index_t layer) const noexcept {
  const index_t query_heads = model_->shape().query_heads;
  const index_t rows = recorded_rows_[static_cast<std::size_t>(layer)];
  return view(recorded_).subspan(static_cast<std::size_t>(layer * query_heads * capacity_ * (rows > 0 ? 1 : 0)),
                                 static_cast<std::size_t>(query_heads * rows));
}

}  // namespace beaconkv::engine
