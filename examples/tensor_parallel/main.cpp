// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

/// \file
/// Tensor parallelism: the heads of a layer are spread over ranks, and all ranks keep the same tokens as one rank with all
/// heads.

#include <algorithm>
#include <beaconkv/beaconkv.hpp>
#include <cstdio>
#include <exception>
#include <random>
#include <string>
#include <vector>

#include "ranks.hpp"

using namespace beaconkv;
using tensor_parallel::Ranks;

namespace {

constexpr Shape layer{.query_heads = 8, .kv_heads = 4, .head_dim = 32};
constexpr position_t length = 700;

/// One set of tokens for all heads: only then must ranks agree on it. (With a set for each head there is nothing to exchange.)
using Cache = OwningCache<float, float, Granularity::per_layer>;

/// The heads that a rank holds, consecutive ones of the layer's.
struct Heads {
  Shape shape{};
  index_t first_kv = 0;
};

[[nodiscard]] Result<Heads> heads_of(index_t rank, index_t ranks) {
  if (layer.kv_heads % ranks != 0)
    return Status(StatusCode::invalid_argument,
                  std::to_string(ranks) + " ranks: must divide the layer's " + std::to_string(layer.kv_heads) + " KV heads");
  const index_t kv_heads = layer.kv_heads / ranks;
  return Heads{{kv_heads * layer.group(), kv_heads, layer.head_dim}, rank * kv_heads};
}

/// Bytes of KV memory differ from device to device, and here the last one has least.
[[nodiscard]] index_t capacity_of(index_t rank, index_t ranks) { return 160 + 56 * (ranks - 1 - rank); }

/// Stands for a model: rows `[heads][dim]` of the heads from `first` on. A head gets the same numbers on whatever rank it is.
void make_up(position_t position, index_t first, std::span<float> rows) {
  constexpr auto dim = static_cast<std::size_t>(layer.head_dim);
  for (std::size_t h = 0; h < rows.size() / dim; ++h) {
    std::mt19937 random(static_cast<std::uint32_t>(position * 100 + first) + static_cast<std::uint32_t>(h));
    std::normal_distribution<float> normal;
    for (float& x : rows.subspan(h * dim, dim)) x = normal(random);
  }
}

/// Decodes the sequence with these heads. Where the policy wants an eviction, `evict_now(policy, cache, work)` does it.
template <class Policy, class EvictNow>
void decode(Policy policy, const Heads& heads, index_t capacity, EvictNow&& evict_now) {
  const RopeTable rope({.head_dim = layer.head_dim});
  Cache cache(heads.shape, capacity);
  Workspace work(policy.workspace_size(capacity));
  std::vector<float> queries(static_cast<std::size_t>(heads.shape.query_heads * layer.head_dim));
  std::vector<float> keys(static_cast<std::size_t>(heads.shape.kv_heads * layer.head_dim));
  for (position_t t = 0; t < length; ++t) {
    make_up(t, heads.first_kv * layer.group(), queries);
    make_up(t, 50 + heads.first_kv, keys);
    for (index_t h = 0; h < heads.shape.kv_heads; ++h) rope.rotate(keys.data() + h * layer.head_dim, t);
    cache.append(keys, keys, t).or_throw();  // no attention here, so values do not matter
    policy.observe(queries, t).or_throw();
    if (policy.due(cache.view())) evict_now(policy, cache.view(), work);
  }
}

/// What was kept: the slots of all evictions, one behind the other.
struct History {
  std::vector<slot_t> kept;
  index_t evictions = 0;
  index_t otherwise = 0;  ///< evictions in which this rank by its own scores would have kept other tokens

  void add(std::span<const slot_t> slots) {
    kept.insert(kept.end(), slots.begin(), slots.end());
    ++evictions;
  }
};

/// The heads of this rank, together with the others.
template <class Policy>
[[nodiscard]] History decode_together(const Policy& start, const Heads& heads, index_t capacity, const Ranks& ranks) {
  std::vector<float> own_rows(static_cast<std::size_t>(heads.shape.kv_heads * capacity));
  std::vector<float> all_rows(static_cast<std::size_t>(layer.kv_heads * capacity));
  KeepPlan alone;
  History history;
  decode(start, heads, capacity, [&](Policy& policy, Cache::View& cache, Workspace& work) {
    // This is `evict`, with the ranks' exchange between scoring and choosing.
    const index_t tokens = cache.num_tokens();
    const ScoreMatrix own{own_rows.data(), heads.shape.kv_heads, tokens};
    const ScoreMatrix all{all_rows.data(), layer.kv_heads, tokens};
    KeepPlan& plan = work.plan();
    policy.score(cache, own, work).or_throw();
    ranks.gather({own.data, static_cast<std::size_t>(own.heads * tokens)},
                 {all.data, static_cast<std::size_t>(all.heads * tokens)});
    policy.select(cache, all, work, plan).or_throw();   // reduces the rows, in head order
    policy.select(cache, own, work, alone).or_throw();  // only for the report
    compact(cache, plan).or_throw();
    policy.commit(plan).or_throw();

    const std::span<const slot_t> kept = plan.kept(0);
    history.add(kept);
    history.otherwise += std::equal(kept.begin(), kept.end(), alone.kept(0).begin(), alone.kept(0).end()) ? 0 : 1;
  });
  return history;
}

/// All heads in one process, by the ordinary call.
template <class Policy>
[[nodiscard]] History decode_alone(const Policy& start, index_t capacity) {
  History history;
  decode(start, {layer, 0}, capacity, [&](Policy& policy, Cache::View& cache, Workspace& work) {
    evict(policy, cache, work).or_throw();
    history.add(work.plan().kept(0));
  });
  return history;
}

/// Whether all ranks' histories are the same. Called by all of them.
[[nodiscard]] bool all_agree(const History& mine, const Ranks& ranks) {
  const auto size = static_cast<index_t>(mine.kept.size());
  if (ranks.smallest(size) != -ranks.smallest(-size)) return false;
  std::vector<slot_t> first = mine.kept;
  ranks.copy_from_first(first);
  return ranks.smallest(first == mine.kept ? 1 : 0) == 1;
}

/// FNV-1a: one number for the kept sets, to compare runs with other numbers of ranks.
void mix(std::uint64_t& hash, const std::vector<slot_t>& slots) {
  for (const slot_t slot : slots) hash = (hash ^ static_cast<std::uint64_t>(slot)) * 0x100000001b3U;
}

/// A rank's KV memory, in tokens: its own, and what all ranks have room for.
struct Room {
  index_t own = 0;
  index_t shared = 0;
};

/// Runs one policy; true where all ranks kept the same as one. `make(shape)` makes the policy for so many heads.
template <class Make>
[[nodiscard]] bool run(const char* name, Make&& make, const Heads& heads, const Room& room, const Ranks& ranks,
                       std::uint64_t& hash) {
  const History mine = decode_together(make(heads.shape), heads, room.own, ranks);
  const bool agree = all_agree(mine, ranks);
  bool as_one = true;
  if (ranks.rank() == 0) as_one = decode_alone(make(layer), room.shared).kept == mine.kept;
  as_one = ranks.smallest(as_one ? 1 : 0) == 1;
  mix(hash, mine.kept);
  if (ranks.rank() == 0) {
    std::printf("%s: %td evictions, %td tokens kept in each; by its own scores rank 0 would have chosen otherwise in %td\n",
                name, mine.evictions, static_cast<index_t>(mine.kept.size()) / std::max<index_t>(1, mine.evictions),
                mine.otherwise);
    if (!agree) std::printf("%s: the ranks do not keep the same tokens\n", name);
    if (!as_one) std::printf("%s: rank 0 does not keep what one rank with all heads keeps\n", name);
  }
  return agree && as_one && mine.evictions > 0;
}

[[nodiscard]] bool run_all(const Heads& heads, const Ranks& ranks) {
  const index_t capacity = capacity_of(ranks.rank(), ranks.size());
  const Room room{capacity, ranks.smallest(capacity)};
  if (ranks.rank() == 0)
    std::printf("ranks: %td, each with %td of %td KV heads; room for %td tokens on rank 0, all plan for %td\n", ranks.size(),
                heads.shape.kv_heads, layer.kv_heads, room.own, room.shared);

  // Budgets follow from what all have room for. By its own, one rank would evict while another still waits.
  const RopeTable rope({.head_dim = layer.head_dim});
  const auto beaconkv = [&](const Shape& shape) {
    return BeaconKV<>(shape, {.budget = {.max = room.shared, .counts_prefix = true}, .n_prefix = 4}, rope);
  };
  const auto snapkv = [&](const Shape& shape) {
    return SnapKV<>(shape, {.budget = {.tokens = room.shared - 32, .interval = 32}}, rope);
  };
  std::uint64_t hash = 0xcbf29ce484222325U;
  bool good = run("BeaconKV", beaconkv, heads, room, ranks, hash);
  good &= run("SnapKV", snapkv, heads, room, ranks, hash);
  if (ranks.rank() == 0) {
    std::printf("kept sets: %016llx\n", static_cast<unsigned long long>(hash));
    std::puts(good ? "all ranks keep the same tokens as one rank" : "failed");
  }
  return good;
}

}  // namespace

int main(int argc, char** argv) {
  const Ranks ranks(&argc, &argv);
  // Every rank comes to this answer by itself, so that none waits for another.
  const Result<Heads> heads = heads_of(ranks.rank(), ranks.size());
  if (!heads) {
    std::fprintf(stderr, "rank %td: %s\n", ranks.rank(), heads.status().message().c_str());
    return 1;
  }
  try {
    return run_all(*heads, ranks) ? 0 : 1;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "rank %td: %s\n", ranks.rank(), e.what());
    Ranks::abort();
    return 1;
  }
}
