// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// A layer in the middle of a long decode: a full cache and a policy that has seen queries, back in the same state after each
/// eviction.

#include <span>
#include <utility>
#include <vector>

#include "beaconkv/policy/evict.hpp"
#include "support.hpp"

namespace beaconkv::bench {

[[nodiscard]] inline RopeTable llama3_rope(index_t head_dim) { return RopeTable({.head_dim = head_dim, .theta = 500000}); }

/// Queries `[query_heads][head_dim]` of a few tokens, over and over again.
class QueryStream {
 public:
  QueryStream(const Shape& shape, Random& random)
      : width_(static_cast<std::size_t>(shape.query_heads * shape.head_dim)),
        queries_(random.normals(static_cast<index_t>(width_) * tokens)) {}
  [[nodiscard]] std::span<const float> at(position_t position) const {
    return std::span(queries_).subspan(static_cast<std::size_t>(position % tokens) * width_, width_);
  }

 private:
  static constexpr index_t tokens = 61;
  std::size_t width_;
  std::vector<float> queries_;
};

/// `tokens` in the cache; the last `seen` of them were observed.
template <class Policy, StorageType K = float>
class DecodingLayer {
 public:
  DecodingLayer(const Shape& shape, Policy made_policy, index_t tokens, Random& random)
      : policy(std::move(made_policy)), memory(random_cache<K>(shape, tokens, random)), queries(shape, random), next_(tokens) {
    for (position_t p = std::max<position_t>(0, tokens - seen); p < tokens; ++p) observe(p);
  }
  DecodingLayer(const DecodingLayer&) = delete;
  DecodingLayer& operator=(const DecodingLayer&) = delete;
  DecodingLayer(DecodingLayer&&) noexcept = default;
  DecodingLayer& operator=(DecodingLayer&&) noexcept = default;

  /// Tokens are appended until the cache is full again; the newest of them are observed. A multiple of the period of continual
  /// sampling, so that every eviction meets the same state.
  void refill() {
    auto& cache = memory.view();
    const index_t count = cache.capacity() - cache.num_tokens();
    cache.append_run(next_, count).or_throw();
    for (position_t p = next_ + std::max<position_t>(0, count - seen); p < next_ + count; ++p) observe(p);
    next_ += count;
  }

  Policy policy;
  OwningCache<K> memory;
  QueryStream queries;

 private:
  static constexpr index_t seen = 64;
  void observe(position_t position) {
    if constexpr (std::remove_cvref_t<decltype(policy.observer())>::needs_queries)
      policy.observe(queries.at(position), position).or_throw();
    else
      policy.observe({}, position).or_throw();
  }

  position_t next_;
};

}  // namespace beaconkv::bench
