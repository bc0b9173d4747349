// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Ways to stand for many queries by a few of them: farthest point sampling and what it is compared with.

#include <cstdint>
#include <vector>

#include "beaconkv/algorithm/rope.hpp"

namespace beaconkv::lab {

/// A remembered query of one head, pre-RoPE.
struct OldQuery {
  std::vector<float> row{};
  position_t position = 0;
};

enum class QuerySampler : std::uint8_t {
  fps,       ///< farthest point sampling by cosine, as BeaconKV
  random,    ///< any, all equally likely
  recent,    ///< the newest
  centroid,  ///< means of k-means clusters: no query that was ever asked
  medoid,    ///< of each of these clusters the query nearest to its mean
};

/// `count` queries for those of `pool` (all of them where there are no more), in time order. `rope`: sampled as they looked at
/// the keys, after RoPE at their own positions; null: as they are. `seed` is for `random`: the same pool, the same choice.
///
/// Clusters go by direction: spherical k-means, ten rounds, begun at queries that lie evenly in time; a cluster that runs empty
/// takes the query that fits worst where it is. A centroid is the mean of its members' rows, at the position of the newest.
[[nodiscard]] std::vector<OldQuery> sample_queries(const std::vector<OldQuery>& pool, index_t count, QuerySampler sampler,
                                                   const RopeTable* rope = nullptr, std::uint64_t seed = 0);

}  // namespace beaconkv::lab
