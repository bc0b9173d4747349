// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Every layout with every storage type and granularity: the same decisions and the same bytes as in dense head-major memory.

#include <algorithm>
#include <string>
#include <type_traits>
#include <vector>

#include "beaconkv/memory/owning_cache.hpp"
#include "beaconkv/policy/snapkv.hpp"
#include "beaconkv/sequence/sequence.hpp"
#include "support/catch.hpp"
#include "support/check.hpp"
#include "support/random.hpp"

namespace beaconkv::test::matrix {

inline constexpr index_t heads = 2;
inline constexpr index_t dim = 64;
inline constexpr index_t capacity = 24;
inline constexpr index_t page_size = 4;
inline constexpr index_t layers = 2;

enum class Engine : std::uint8_t {
  head_major,
  token_major,
  llama2_c,
  gemma,
  llama_cpp,
  llama_cpp_transposed,
  flashinfer_nhd,
  flashinfer_hnd,
  vllm_nhd,
  vllm_hnd,
  ggml,
};
struct EngineRow {
  Engine engine;
  const char* name;  ///< as README's table calls it
};
inline constexpr EngineRow engines[] = {
    {Engine::head_major, "dense `[head][token][dim]`: `head_major_plane`"},
    {Engine::token_major, "dense `[token][head][dim]`: `token_major_plane`"},
    {Engine::llama2_c, "llama2.c: `llama2_c_planes`"},
    {Engine::gemma, "gemma.cpp, K and V interleaved, ring: `gemma_planes`"},
    {Engine::llama_cpp, "llama.cpp, flash attention: `token_major_plane` twice"},
    {Engine::llama_cpp_transposed, "llama.cpp, V transposed: `transposed_plane`"},
    {Engine::flashinfer_nhd, "FlashInfer paged NHD: `flashinfer_planes`"},
    {Engine::flashinfer_hnd, "FlashInfer paged HND: `flashinfer_planes`"},
    {Engine::vllm_nhd, "vLLM paged NHD: `vllm_planes`"},
    {Engine::vllm_hnd, "vLLM paged HND: `vllm_planes`"},
    {Engine::ggml, "ggml byte strides, padded rows: `ggml_plane`"},
};

/// Whether a layout can hold these types: two of them keep K and V in one array, and blocks of numbers cannot be transposed.
template <class K, class V>
[[nodiscard]] constexpr bool holds(Engine engine) {
  const bool one_array = engine == Engine::gemma || engine >= Engine::flashinfer_nhd;
  if (engine == Engine::ggml) return true;
  if (engine == Engine::llama_cpp_transposed) return numbers_per_element<V> == 1;
  return std::is_same_v<K, V> || !one_array;
}

/// The memory of one layer, as an engine has it, with margins that nobody may write.
template <class K, class V>
class EngineMemory {
 public:
  EngineMemory(Engine engine, Random& random) : random_(&random) {
    index_t pages = capacity / page_size + 3;
    if (engine == Engine::gemma) pages = capacity;  // a ring of single tokens, begun somewhere
    const index_t size = (engine == Engine::gemma || engine == Engine::llama2_c ? 3 : 2) * layers * heads *
                         std::max(pages * page_size, capacity) * (dim + 8);
    keys_.resize(static_cast<std::size_t>(size / numbers_per_element<K>));
    values_.resize(static_cast<std::size_t>(size / numbers_per_element<V>));
    key_scales_.assign(static_cast<std::size_t>(heads * std::max(pages * page_size, capacity)), 1.0F);
    value_scales_ = key_scales_;
    if (engine == Engine::gemma) {
      for (std::int32_t i = 0; i < 2 * capacity; ++i) ids_.push_back(i % static_cast<std::int32_t>(capacity));
      pages_ = {ids_.data() + 5, capacity, 1, capacity};
    } else {
      for (std::int32_t p = 0; p < pages; ++p) ids_.push_back(p);
      random_->shuffle(ids_);
      pages_ = {ids_.data(), capacity / page_size, page_size, pages};
    }
    planes_ = describe(engine);
    if constexpr (takes_scale<K>) planes_.keys = with_row_scales(planes_.keys, key_scales_.data());
    if constexpr (takes_scale<V>) planes_.values = with_row_scales(planes_.values, value_scales_.data());
  }
  EngineMemory(const EngineMemory&) = delete;
  EngineMemory& operator=(const EngineMemory&) = delete;

  [[nodiscard]] const Planes<K, V>& planes() const { return planes_; }

 private:
  [[nodiscard]] Planes<K, V> describe(Engine engine) {
    K* const k = keys_.data();
    V* const v = values_.data();
    const Planes<K, V> dense{token_major_plane(k, heads, dim, capacity), token_major_plane(v, heads, dim, capacity)};
    switch (engine) {
      case Engine::head_major:
        return {head_major_plane(k, heads, dim, capacity), head_major_plane(v, heads, dim, capacity)};
      case Engine::token_major:
      case Engine::llama_cpp:
        return dense;
      case Engine::llama2_c:
        if constexpr (std::is_same_v<K, V>) return llama2_c_planes(k, v, 1, heads, dim, capacity);
        return dense;
      case Engine::gemma: {
        const index_t row = layers * 2 * heads * dim / numbers_per_element<K> + 3;
        if constexpr (std::is_same_v<K, V>) return gemma_planes(k, 1, heads, dim, row, pages_);
        return dense;
      }
      case Engine::llama_cpp_transposed:
        if constexpr (numbers_per_element<V> == 1)
          return {token_major_plane(k, heads, dim, capacity), transposed_plane(v, heads, dim, capacity)};
        return dense;
      case Engine::flashinfer_nhd:
      case Engine::flashinfer_hnd:
        if constexpr (std::is_same_v<K, V>)
          return flashinfer_planes(k, engine == Engine::flashinfer_nhd ? PageLayout::nhd : PageLayout::hnd, heads, dim, pages_);
        return dense;
      case Engine::vllm_nhd:
      case Engine::vllm_hnd:
        if constexpr (std::is_same_v<K, V>)
          return vllm_planes(k, engine == Engine::vllm_nhd ? PageLayout::nhd : PageLayout::hnd, heads, dim, pages_);
        return dense;
      case Engine::ggml:
        break;
    }
    const auto plane = [](auto* data) {
      using T = std::remove_pointer_t<decltype(data)>;
      const index_t row = dim / numbers_per_element<T> * index_t{sizeof(T)};
      const index_t pad = 2 * index_t{sizeof(T)};
      return require_plane(ggml_plane<T>(data, dim, heads, capacity, sizeof(T), row + pad, heads * (row + pad) + pad));
    };
    return {plane(k), plane(v)};
  }
  template <class T>
  [[nodiscard]] static Plane<T> require_plane(const Result<Plane<T>>& plane) {
    REQUIRE(plane.ok());
    return *plane;
  }

  Random* random_;
  std::vector<K> keys_;
  std::vector<V> values_;
  std::vector<float> key_scales_;
  std::vector<float> value_scales_;
  std::vector<std::int32_t> ids_;
  PageList pages_;
  Planes<K, V> planes_;
};

template <class T>
[[nodiscard]] bool same_row(const Plane<T>& a, const Plane<T>& b, index_t head, index_t slot) {
  const T* const x = a.row(head, slot);
  const T* const y = b.row(head, slot);
  bool same = detail::scale_or_one(a, head, slot) == detail::scale_or_one(b, head, slot);
  for (index_t d = 0; d < a.elements(); ++d) same = same && x[d * a.stride.dim] == y[d * b.stride.dim];
  return same;
}

/// Two layers under SnapKV, in dense memory and in an engine's: the same plans, the same bytes.
template <class K, class V, Granularity G>
void compare(Engine engine, Random& random) {
  using Cache = PlaneCache<K, V, G>;
  const Shape shape{.query_heads = 4, .kv_heads = heads, .head_dim = dim};
  const SnapKV<> policy(shape, {.budget = {.tokens = 14, .interval = 4}, .n_recent_queries = 3, .n_recent_kv = 3});
  std::vector<OwningCache<K, V, G>> dense(layers, OwningCache<K, V, G>(shape, capacity));
  EngineMemory<K, V> memory[layers]{{engine, random}, {engine, random}};
  std::vector<Cache> plain;
  std::vector<Cache> other;
  for (index_t l = 0; l < layers; ++l) {
    plain.push_back(dense[static_cast<std::size_t>(l)].view());
    other.push_back(Cache::make(memory[l].planes()).or_throw());
  }
  const auto make = [&](const std::vector<Cache>& caches) {
    return Sequence<SnapKV<>, Cache>::make({policy, policy}, caches, {.capacity = capacity}).or_throw();
  };
  auto a = make(plain);
  auto b = make(other);

  index_t evictions = 0;
  bool ragged = false;
  for (position_t t = 0; t < 60; ++t) {
    for (index_t l = 0; l < layers; ++l) {
      const std::vector<float> rows = random.normals(2 * heads * dim);
      const std::vector<float> queries = random.normals(4 * dim);
      for (auto* sequence : {&a, &b}) {
        Cache& cache = sequence->cache(l);
        for (index_t h = 0; h < heads; ++h) {
          const index_t slot = detail::tokens_of(cache, h);
          cache.store_key(h, slot, rows.data() + h * dim);
          cache.store_value(h, slot, rows.data() + (heads + h) * dim);
        }
        cache.append(t).or_throw();
        sequence->policy(l).observe_rotated(queries, t).or_throw();
        if constexpr (G == Granularity::per_head_ragged)
          if (t == 11) {  // from here on one head holds less than the other
            KeepPlan plan;
            std::vector<float> scores(static_cast<std::size_t>(heads * cache.num_tokens()));
            const ScoreMatrix matrix{scores.data(), heads, cache.num_tokens()};
            REQUIRE(sequence->policy(l).score(cache, matrix, sequence->workspace()).ok());
            const index_t keep[] = {12, 7};
            sequence->policy(l).select(cache, matrix, sequence->workspace(), plan, std::span<const index_t>(keep)).or_throw();
            compact(cache, plan).or_throw();
            sequence->policy(l).commit(plan).or_throw();
          }
      }
    }
    const SequenceReport in_a = a.evict_where_due().or_throw();
    const SequenceReport in_b = b.evict_where_due().or_throw();
    REQUIRE(in_a.evicted == in_b.evicted);
    evictions += in_a.layers;
    for (index_t l = 0; l < layers; ++l)
      for (index_t h = 0; h < heads; ++h) {
        CAPTURE(t, l, h);
        REQUIRE(detail::tokens_of(a.cache(l), h) == detail::tokens_of(b.cache(l), h));
        bool same = true;
        for (index_t s = 0; s < detail::tokens_of(a.cache(l), h); ++s)
          same = same && a.cache(l).position(h, s) == b.cache(l).position(h, s) &&
                 same_row(a.cache(l).key_plane(), b.cache(l).key_plane(), h, s) &&
                 same_row(a.cache(l).value_plane(), b.cache(l).value_plane(), h, s);
        REQUIRE(same);
        ragged = ragged || detail::tokens_of(a.cache(l), h) != detail::tokens_of(a.cache(l), 0);
      }
  }
  REQUIRE(evictions >= 20);
  REQUIRE(ragged == (G == Granularity::per_head_ragged));
}

/// All layouts that hold these types.
template <class K, class V, Granularity G>
void compare_all(Random& random) {
  for (const EngineRow& row : engines) {
    if (!holds<K, V>(row.engine)) continue;
    CAPTURE(row.name, random.seed());
    compare<K, V, G>(row.engine, random);
  }
}

template <Granularity G>
void compare_storage_types() {
  Random random;
  compare_all<float, float, G>(random);
  compare_all<float16, float16, G>(random);
  compare_all<bfloat16, bfloat16, G>(random);
  compare_all<std::int8_t, std::int8_t, G>(random);
  compare_all<q8_0, q8_0, G>(random);
  compare_all<float8_e4m3, float8_e4m3, G>(random);
  compare_all<float8_e5m2, float8_e5m2, G>(random);
  compare_all<float16, q8_0, G>(random);
}

}  // namespace beaconkv::test::matrix
