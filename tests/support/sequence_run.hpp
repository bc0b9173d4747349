// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// What the tests of sequences share: layers with memory of their own in any layout, and tokens for them.

#include <memory>
#include <vector>

#include "beaconkv/sequence/beams.hpp"
#include "beaconkv/sequence/sequence.hpp"
#include "support/policies.hpp"

namespace beaconkv::test {

using Bytes = std::vector<std::byte>;

/// How a sequence of the tests is made.
struct LayersOptions {
  index_t capacity = 64;
  Layout layout = Layout::head_major;
  PositionMode mode = PositionMode::true_positions;
  SequenceOptions sequence{};
};

/// A sequence over memory of its own.
template <class PolicyT, StorageType K = float, StorageType V = K, Granularity G = Granularity::per_head>
class Layers {
 public:
  using Cache = PlaneCache<K, V, G>;
  using Type = Sequence<PolicyT, Cache>;

  Layers(const std::vector<PolicyT>& policies, LayersOptions options) {
    Random pages(7);
    std::vector<Cache> views;
    for (const PolicyT& p : policies) {
      const Shape& shape = p.shape();
      memory_.push_back(std::make_unique<LayoutCache<K, V, G>>(options.layout, shape.kv_heads, shape.head_dim, shape.head_dim,
                                                               options.capacity, pages, options.mode));
      views.push_back(memory_.back()->cache);
    }
    options.sequence.capacity = options.capacity;
    sequence_ = std::make_unique<Type>(require_value(Type::make(policies, views, options.sequence)));
  }
  Layers(const PolicyT& policy, index_t layers, const LayersOptions& options = {})
      : Layers(std::vector<PolicyT>(at(layers), policy), options) {}

  [[nodiscard]] Type& operator*() { return *sequence_; }
  [[nodiscard]] Type* operator->() { return sequence_.get(); }

 private:
  std::vector<std::unique_ptr<LayoutCache<K, V, G>>> memory_{};
  std::unique_ptr<Type> sequence_{};
};

/// All that a sequence remembers and holds: equal bytes are equal sequences.
template <class S>
[[nodiscard]] Bytes state_of(const S& sequence) {
  Bytes out;
  require_ok(sequence.save(out));
  return out;
}

/// The tokens of one step, of each layer.
using LayerTokens = std::vector<Token>;

/// A stream of tokens for each layer.
class LayerStreams {
 public:
  LayerStreams(Random& random, index_t layers, const Shape& shape = small_shape)
      : streams_(at(layers), Stream(random, shape, make_rope(shape.head_dim))) {}
  [[nodiscard]] LayerTokens next(position_t position) {
    LayerTokens out;
    for (Stream& s : streams_) out.push_back(s.next(position));
    return out;
  }
  /// `count` steps from `position` on.
  [[nodiscard]] std::vector<LayerTokens> next(position_t position, index_t count) {
    std::vector<LayerTokens> out;
    for (index_t i = 0; i < count; ++i) out.push_back(next(position + i));
    return out;
  }

 private:
  std::vector<Stream> streams_;
};

/// Keys and values of one token. Allocates nothing.
template <CacheBuffer Cache>
[[nodiscard]] Status try_append(Cache& cache, const Token& token) {
  if (Status s = cache.append(token.position); !s) return s;
  for (index_t h = 0; h < cache.num_kv_heads(); ++h) {
    const index_t slot = detail::tokens_of(cache, h) - 1;
    cache.store_key(h, slot, token.keys.data() + h * cache.key_dim());
    cache.store_value(h, slot, token.values.data() + h * cache.value_dim());
  }
  return {};
}
template <class S>
[[nodiscard]] Status try_append(S& sequence, index_t layer, const Token& token) {
  return try_append(sequence.cache(layer), token);
}

/// A decoded token, to all layers.
template <class S>
void decode(S& sequence, const LayerTokens& tokens) {
  for (index_t l = 0; l < sequence.num_layers(); ++l) {
    require_ok(try_append(sequence, l, tokens[at(l)]));
    require_ok(sequence.policy(l).observe(tokens[at(l)].queries, tokens[at(l)].position));
  }
}

/// A tentative token, to all layers.
template <class S>
void draft(S& sequence, const LayerTokens& tokens) {
  for (index_t l = 0; l < sequence.num_layers(); ++l) {
    require_ok(try_append(sequence, l, tokens[at(l)]));
    require_ok(sequence.observe_draft(l, tokens[at(l)].queries, tokens[at(l)].position));
  }
}

/// A prompt, or a chunk of one.
template <class S>
void prefill(S& sequence, std::span<const LayerTokens> prompt) {
  if (prompt.empty()) return;
  for (index_t l = 0; l < sequence.num_layers(); ++l) {
    std::vector<float> queries;
    for (const LayerTokens& tokens : prompt) {
      require_ok(try_append(sequence, l, tokens[at(l)]));
      queries.insert(queries.end(), tokens[at(l)].queries.begin(), tokens[at(l)].queries.end());
    }
    const Shape& shape = sequence.policy(l).shape();
    require_ok(sequence.policy(l).prefill(
        QueryView::token_major(queries.data(), static_cast<index_t>(prompt.size()), shape.query_heads, shape.head_dim),
        sequence.workspace(), prompt.front()[at(l)].position));
  }
}

template <class S>
SequenceReport evict_due(S& sequence) {
  return require_value(sequence.evict_where_due());
}

/// A prompt and decoded tokens with evictions where they are due.
template <class S>
void run_conversation(S& sequence, LayerStreams& streams, index_t prompt, index_t tokens) {
  prefill(sequence, streams.next(sequence.next_position(), prompt));
  static_cast<void>(evict_due(sequence));
  for (index_t i = 0; i < tokens; ++i) {
    decode(sequence, streams.next(sequence.next_position()));
    static_cast<void>(evict_due(sequence));
  }
}

/// RPC as published, whose cache grows.
[[nodiscard]] inline RPC<> small_growing_rpc() {
  return RPC<>(small_shape, {.budget = {.period = 8, .ratio = 4}, .n_recent_queries = 5, .n_recent_kv = 4}, small_rope());
}

}  // namespace beaconkv::test
