// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

/// \file
/// The snippets of docs/integration.md, at work. After each part every row must be that of its token.

#include <algorithm>
#include <atomic>
#include <beaconkv/beaconkv.hpp>
#include <cmath>
#include <cstdio>
#include <thread>
#include <vector>

using namespace beaconkv;

namespace {

constexpr Shape shape{.query_heads = 4, .kv_heads = 2, .head_dim = 16};
constexpr index_t capacity = 112, prompt = 24, chunk = 8, H = shape.kv_heads, D = shape.head_dim;

/// One number of a key (rows 0 and up), of a value (rows 100 and up) or of a query (rows 200 and up) of a token.
float made_up(position_t token, index_t row, index_t d) {
  return static_cast<float>(std::sin(static_cast<double>((token + 1) * (row + 2) * (d + 3))));
}

/// A layer of an engine: owns `[kv_head][capacity][head_dim]` keys and values, and the queries that it computed last.
struct Engine {
  RopeTable rope{{.head_dim = D}};
  std::vector<float> k = std::vector<float>(H * capacity * D), v = k;
  std::vector<float> queries;  // [tokens][query_heads][head_dim], before RoPE

  /// `count` tokens: rows from `slot` on, keys turned to the positions from `rotary` on.
  void forward(index_t slot, position_t token, position_t rotary, index_t count = 1) {
    queries.clear();
    for (index_t i = 0; i < count; ++i) {
      for (index_t h = 0; h < H; ++h) {
        float* const key = k.data() + (h * capacity + slot + i) * D;
        float* const value = v.data() + (h * capacity + slot + i) * D;
        for (index_t d = 0; d < D; ++d) key[d] = made_up(token + i, h, d), value[d] = made_up(token + i, 100 + h, d);
        rope.rotate(key, rotary + i);
      }
      for (index_t q = 0; q < shape.query_heads * D; ++q) queries.push_back(made_up(token + i, 200, q));
    }
  }
  void move_rows(index_t head, index_t to, index_t from, index_t count) {
    for (float* rows : {k.data() + head * capacity * D, v.data() + head * capacity * D})
      std::copy_n(rows + from * D, count * D, rows + to * D);
  }
};

/// Whether each slot holds key and value of its token, the key where the cache says that it was turned to.
bool holds(const PlaneCache<float>& cache, const RopeTable& rope) {
  std::vector<float> row(D);
  bool good = cache.num_tokens() > 0;
  for (index_t h = 0; h < H; ++h)
    for (index_t s = 0; s < cache.num_tokens(); ++s) {
      for (index_t d = 0; d < D; ++d) row[static_cast<std::size_t>(d)] = made_up(cache.position(h, s), h, d);
      rope.rotate(row.data(), cache.rotary_position(h, s));
      for (index_t d = 0; d < D; ++d)
        good = good && std::fabs(row[static_cast<std::size_t>(d)] - cache.key_plane().row(h, s)[d]) < 1e-4F &&
               cache.value_plane().row(h, s)[d] == made_up(cache.position(h, s), 100 + h, d);
    }
  return good;
}

/// A row of head 1 must be where the engines have it.
bool layouts() {
  std::vector<float> k(4096), v(4096), scales(H * 64), v_scales(H * 64);
  std::vector<float16> k16(4096), v16(4096);
  std::vector<bfloat16> pool(8192);
  std::vector<std::int8_t> k8(4096), v8(4096);
  const std::vector<std::int32_t> table{5, 2, 7, 0}, ring{0, 1, 2, 3, 4, 5, 6, 7};
  const index_t C = 64, page_size = 4, gemma_row = 2 * 2 * H * D, nb = sizeof(float16);

  // docs/integration.md: 1 begin
  // [H][C][D] (Hugging Face); [C][H][D] is token_major.
  auto hnd = PlaneCache<float>::head_major(k.data(), v.data(), shape, C);
  // llama2.c: [layer][seq_len][H * D]
  auto llama2 = PlaneCache<float>::make(llama2_c_planes(k.data(), v.data(), 1, H, D, C)).or_throw();
  // llama.cpp without flash attention: V lies transposed
  auto llama_cpp = PlaneCache<float16>::make(token_major_plane(k16.data(), H, D, C), transposed_plane(v16.data(), H, D, C));
  // any ggml tensor by its byte strides
  auto ggml_k = ggml_plane<float16>(k16.data(), D, H, C, nb, D * nb, H * D * nb).or_throw();
  // gemma.cpp: a ring of rows, here from row 0 on
  auto gemma = gemma_planes(k.data(), 1, H, D, gemma_row, {.ids = ring.data(), .count = 8, .page_size = 1});
  // FlashInfer: pages [K, V][page_size][H][D]; vllm_planes where all K come before all V
  const PageList pages{.ids = table.data(), .count = 4, .page_size = page_size, .num_pages = 8};
  auto flashinfer = PlaneCache<bfloat16>::make(flashinfer_planes(pool.data(), PageLayout::nhd, H, D, pages)).or_throw();
  // 8-bit rows with a scale for each, [H][C]
  auto int8 = PlaneCache<std::int8_t>::make(with_row_scales(head_major_plane(k8.data(), H, D, C), scales.data()),
                                            with_row_scales(head_major_plane(v8.data(), H, D, C), v_scales.data()));
  // docs/integration.md: 1 end

  return hnd.key_plane().row(1, 3) == &k[(C + 3) * D] && llama2.key_plane().row(1, 3) == &k[((C + 3) * H + 1) * D] &&
         llama_cpp->value_plane().row(1, 3) == &v16[D * C + 3] && ggml_k.row(1, 3) == &k16[(3 * H + 1) * D] &&
         gemma.values.row(1, 3) == &k[3 * gemma_row + 2 * H * D + 3 * D] && int8->key_plane().scale(1, 3) == &scales[C + 3] &&
         flashinfer.value_plane().row(1, 7) == &pool[(5 * page_size * H + 3 * H + 1) * D];
}

BeaconKV<> make_policy(const RopeTable& rope) {
  // docs/integration.md: 2 begin
  BeaconKV policy(shape, {.budget = {.max = 48, .min = 40}, .n_beacon = 8, .n_recent_queries = 4, .n_recent_kv = 8}, rope);
  // docs/integration.md: 2 end
  return policy;
}

bool one_layer() {
  Engine engine;
  auto cache = PlaneCache<float>::head_major(engine.k.data(), engine.v.data(), shape, capacity);
  BeaconKV policy = make_policy(engine.rope);
  Workspace work(policy.workspace_size(capacity));

  // docs/integration.md: 4 begin
  for (position_t t = 0; t < prompt; t += chunk) {
    engine.forward(cache.num_tokens(), t, t, chunk);  // the chunk's own attention comes first
    cache.append_run(t, chunk).or_throw();
    policy.prefill(QueryView::token_major(engine.queries.data(), chunk, shape.query_heads, D), work).or_throw();
    if (policy.due(cache)) evict(policy, cache, work).or_throw();
  }
  // docs/integration.md: 4 end

  // docs/integration.md: 3 begin
  for (position_t t = policy.next_position(); t < 300; ++t) {
    engine.forward(cache.num_tokens(), t, t);      // yours: K and V go to slot num_tokens(), RoPE gets t
    cache.append(t).or_throw();                    // a row is there
    policy.observe(engine.queries, t).or_throw();  // its queries [query_heads][head_dim], before RoPE
    if (policy.due(cache)) evict(policy, cache, work).or_throw();
  }
  // docs/integration.md: 3 end

  KeepPlan plan;
  // docs/integration.md: 5 begin
  policy.plan_free(cache, 10, work, plan).or_throw();  // or plan(): what the schedule wants
  for (index_t h = 0; h < shape.kv_heads; ++h)
    plan.for_each_move(h, [&](index_t to, index_t from, index_t count) { engine.move_rows(h, to, from, count); });
  follow(cache, plan).or_throw();  // counts and positions only
  policy.commit(plan).or_throw();
  // docs/integration.md: 5 end
  return holds(cache, engine.rope) && cache.num_tokens() < prompt + 48 - 9;
}

bool positions_in_cache() {
  Engine engine;
  BeaconKV policy = make_policy(engine.rope);
  Workspace work(max(policy.workspace_size(capacity), realign_workspace_size(D)));
  const RopeTable longer({.head_dim = D, .theta = 1e6});
  // docs/integration.md: 6 begin
  auto cache = PlaneCache<float>::make(head_major_plane(engine.k.data(), H, D, capacity),
                                       head_major_plane(engine.v.data(), H, D, capacity), PositionMode::cache_relative)
                   .or_throw();
  for (position_t t = 0; t < 300; ++t) {
    engine.forward(cache.num_tokens(), t, cache.next_rotary_position());  // what RoPE gets now
    cache.append(t).or_throw();                                           // still the true position
    policy.observe(engine.queries, t).or_throw();
    if (!policy.due(cache)) continue;
    evict(policy, cache, work).or_throw();
    realign_to_slots(cache, engine.rope, work).or_throw();  // now, or after several evictions
  }
  switch_rope(cache, engine.rope, longer, work).or_throw();  // LongRoPE: other frequencies from here on
  policy.set_rope(longer).or_throw();
  // docs/integration.md: 6 end
  return holds(cache, longer) && cache.next_rotary_position() < 48 && policy.next_position() == 300;
}

using Layers = Sequence<BeaconKV<>, PlaneCache<float>>;

Layers make_layers(std::vector<Engine>& engines) {
  // docs/integration.md: 7a begin
  std::vector<PlaneCache<float>> caches;
  for (Engine& e : engines) caches.push_back(PlaneCache<float>::head_major(e.k.data(), e.v.data(), shape, capacity));
  std::vector<BeaconKV<>> policies(caches.size(), make_policy(engines[0].rope));
  auto sequence = Sequence<BeaconKV<>, PlaneCache<float>>::make(std::move(policies), std::move(caches),
                                                                {.capacity = capacity, .max_draft_tokens = 4})
                      .or_throw();
  // docs/integration.md: 7a end
  return sequence;
}

bool whole_model() {
  std::vector<Engine> engines(3), fork_engines(3), later_engines(3);
  Layers sequence = make_layers(engines), fork = make_layers(fork_engines), later = make_layers(later_engines);
  // docs/integration.md: 7b begin
  for (position_t t = 0; t < 300; ++t) {
    for (index_t l = 0; l < sequence.num_layers(); ++l) {
      Engine& engine = engines[static_cast<std::size_t>(l)];
      engine.forward(sequence.cache(l).num_tokens(), t, t);
      sequence.cache(l).append(t).or_throw();
      sequence.policy(l).observe(engine.queries, t).or_throw();
    }
    sequence.evict_where_due().or_throw();
  }
  // docs/integration.md: 7b end

  // docs/integration.md: 9a begin
  const index_t drafts = sequence.tokens_until_due(4);  // with more, the next eviction would come late
  for (index_t i = 0; i < drafts; ++i) {
    const position_t t = sequence.next_position();
    for (index_t l = 0; l < sequence.num_layers(); ++l) {
      Engine& engine = engines[static_cast<std::size_t>(l)];
      engine.forward(sequence.cache(l).num_tokens(), t, t);
      sequence.cache(l).append(t).or_throw();
      sequence.observe_draft(l, engine.queries, t).or_throw();
    }
  }
  sequence.accept(drafts / 2).or_throw();  // the others leave caches and policies as if they had never come
  sequence.evict_where_due().or_throw();
  // docs/integration.md: 9a end

  // docs/integration.md: 9b begin
  fork.copy_from(sequence).or_throw();  // rows too, into the fork's own memory
  std::vector<std::byte> saved;
  sequence.save(saved).or_throw();
  later.load(saved).or_throw();  // made with the same options; layout and capacity may be others
  // docs/integration.md: 9b end
  bool good = drafts > 0;
  for (const Layers* s : {&sequence, &fork, &later})
    for (index_t l = 0; l < s->num_layers(); ++l)
      good = good && holds(s->cache(l), engines[0].rope) && s->next_position() == 300 + drafts / 2;
  return good;
}

// docs/integration.md: 8a begin
struct Pool {  // here two threads; yours is the engine's own pool
  index_t num_workers() const { return 2; }
  template <class F>
  void run(index_t count, F&& f) const {  // f(i, worker) once for each i below count
    std::atomic<index_t> next{0};
    const auto work = [&](index_t worker) {
      for (index_t i = next++; i < count; i = next++) f(i, worker);
    };
    std::thread other(work, index_t{1});
    work(0);
    other.join();
  }
};
// docs/integration.md: 8a end

bool threads_and_slices() {
  std::vector<Engine> engines(3);
  Engine& engine = engines[0];
  Pool pool;
  BeaconKV policy = make_policy(engine.rope);
  auto cache = PlaneCache<float>::head_major(engine.k.data(), engine.v.data(), shape, capacity);
  // docs/integration.md: 8b begin
  std::vector<Workspace> works(2, Workspace(policy.workspace_size(capacity)));  // one for each worker
  for (position_t t = 0; t < 300; ++t) {
    engine.forward(cache.num_tokens(), t, t);
    cache.append(t).or_throw();
    policy.observe(engine.queries, t).or_throw();
    if (policy.due(cache)) evict(policy, cache, works, pool).or_throw();  // its KV heads over the threads
  }
  // docs/integration.md: 8b end
  bool good = holds(cache, engine.rope) && cache.num_tokens() < 48;

  std::vector<PlaneCache<float>> caches;
  for (Engine& e : engines) caches.push_back(PlaneCache<float>::head_major(e.k.data(), e.v.data(), shape, capacity));
  std::vector<BeaconKV<>> policies(caches.size(), make_policy(engine.rope));
  // docs/integration.md: 8c begin
  const SequenceOptions options{.capacity = capacity, .workers = 2, .heads_per_step = 1};
  auto sequence = Sequence<BeaconKV<>, PlaneCache<float>>::make(policies, caches, options).or_throw();
  // docs/integration.md: 8c end
  for (position_t t = 0; t < 300; ++t) {
    for (index_t l = 0; l < sequence.num_layers(); ++l) {
      Engine& e = engines[static_cast<std::size_t>(l)];
      e.forward(sequence.cache(l).num_tokens(), t, t);
      sequence.cache(l).append(t).or_throw();
      sequence.policy(l).observe(e.queries, t).or_throw();
    }
    sequence.evict_where_due(pool).or_throw();
    for (index_t l = 0; l < sequence.num_layers(); ++l) good = good && sequence.cache(l).num_tokens() < 48 + 3 * (H + 1);
  }
  for (index_t l = 0; l < sequence.num_layers(); ++l) good = good && holds(sequence.cache(l), engine.rope);
  return good;
}

}  // namespace

int main() {
  const bool good[] = {layouts(), one_layer(), positions_in_cache(), whole_model(), threads_and_slices()};
  std::printf("layouts %d, one layer %d, positions within the cache %d, whole model %d, threads and slices %d\n", good[0],
              good[1], good[2], good[3], good[4]);
  return std::all_of(std::begin(good), std::end(good), [](bool x) { return x; }) ? 0 : 1;
}
