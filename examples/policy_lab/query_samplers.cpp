// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "policy_lab/query_samplers.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "beaconkv/algorithm/farthest_point_sampling.hpp"

namespace beaconkv::lab {
namespace {

/// Rows of equal width, one behind the other.
struct Points {
  index_t dim = 0;
  std::vector<float> data{};

  [[nodiscard]] index_t size() const { return static_cast<index_t>(data.size()) / dim; }
  [[nodiscard]] const float* row(std::size_t i) const { return data.data() + static_cast<index_t>(i) * dim; }
};

/// The rows in which the sampling takes place.
[[nodiscard]] Points points_of(const std::vector<OldQuery>& pool, const RopeTable* rope) {
  Points points{static_cast<index_t>(pool.front().row.size())};
  for (const OldQuery& query : pool) {
    std::vector<float> row = query.row;
    if (rope != nullptr) rope->rotate(row.data(), query.position);
    points.data.insert(points.data.end(), row.begin(), row.end());
  }
  return points;
}

[[nodiscard]] std::vector<slot_t> pick_farthest(const Points& points, index_t count) {
  std::vector<slot_t> picks(static_cast<std::size_t>(count));
  Workspace work(fps_workspace_size(points.size(), points.dim));
  const Result<index_t> picked =
      farthest_point_sampling({points.data.data(), points.size(), points.dim, points.dim}, count, picks, work);
  BEACONKV_ASSERT(picked.ok() && *picked == count);
  return picks;
}

[[nodiscard]] std::vector<slot_t> pick_randomly(index_t n, index_t count, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<slot_t> order(static_cast<std::size_t>(n));
  std::iota(order.begin(), order.end(), slot_t{0});
  for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i)
    std::swap(order[i], order[i + static_cast<std::size_t>(random() % (order.size() - i))]);
  order.resize(static_cast<std::size_t>(count));
  return order;
}

[[nodiscard]] double cosine(const float* a, const double* b, index_t dim) {
  double product = 0, a2 = 0, b2 = 0;
  for (index_t d = 0; d < dim; ++d) {
    product += static_cast<double>(a[d]) * b[d];
    a2 += static_cast<double>(a[d]) * static_cast<double>(a[d]);
    b2 += b[d] * b[d];
  }
  return a2 > 0 && b2 > 0 ? product / std::sqrt(a2 * b2) : 0;
}

/// Spherical k-means.
struct Clusters {
  std::vector<std::size_t> of{};  ///< of each point
  std::vector<double> fit{};      ///< of each point: its cosine to its cluster's mean

  Clusters(const Points& points, std::size_t count)
      : of(static_cast<std::size_t>(points.size())), fit(of.size()), points_(points), means_(count) {
    for (std::size_t c = 0; c < count; ++c) {
      const float* const row = points.row(c * of.size() / count);
      means_[c].assign(row, row + points.dim);
    }
    for (int round = 0; round < 10; ++round) {
      assign();
      fill_empty_ones();
      find_means();
    }
    for (std::size_t i = 0; i < of.size(); ++i) fit[i] = cosine(points_.row(i), means_[of[i]].data(), points_.dim);
  }

 private:
  void assign() {
    for (std::size_t i = 0; i < of.size(); ++i) {
      fit[i] = -2;
      for (std::size_t c = 0; c < means_.size(); ++c)
        if (const double near = cosine(points_.row(i), means_[c].data(), points_.dim); near > fit[i]) {
          fit[i] = near;
          of[i] = c;
        }
    }
  }
  void fill_empty_ones() {
    std::vector<index_t> members(means_.size());
    for (const std::size_t c : of) ++members[c];
    for (std::size_t c = 0; c < means_.size(); ++c) {
      if (members[c] > 0) continue;
      std::size_t worst = of.size();
      for (std::size_t i = 0; i < of.size(); ++i)
        if (members[of[i]] > 1 && (worst == of.size() || fit[i] < fit[worst])) worst = i;
      --members[of[worst]];
      of[worst] = c;
      fit[worst] = 1;
      members[c] = 1;
    }
  }
  void find_means() {
    for (std::vector<double>& mean : means_) std::fill(mean.begin(), mean.end(), 0.0);
    for (std::size_t i = 0; i < of.size(); ++i) {
      const float* const row = points_.row(i);
      double square = 0;
      for (index_t d = 0; d < points_.dim; ++d) square += static_cast<double>(row[d]) * static_cast<double>(row[d]);
      if (!(square > 0)) continue;
      for (std::size_t d = 0; d < means_[of[i]].size(); ++d)
        means_[of[i]][d] += static_cast<double>(row[d]) / std::sqrt(square);
    }
  }

  const Points& points_;
  std::vector<std::vector<double>> means_;  // their lengths do not matter
};

[[nodiscard]] std::vector<slot_t> pick_medoids(const Clusters& clusters, index_t count) {
  std::vector<slot_t> picks(static_cast<std::size_t>(count), -1);
  for (std::size_t i = 0; i < clusters.of.size(); ++i) {
    slot_t& best = picks[clusters.of[i]];
    if (best < 0 || clusters.fit[i] > clusters.fit[static_cast<std::size_t>(best)]) best = static_cast<slot_t>(i);
  }
  return picks;
}

[[nodiscard]] std::vector<OldQuery> centroids_of(const std::vector<OldQuery>& pool, const Clusters& clusters, index_t count) {
  std::vector<OldQuery> means(static_cast<std::size_t>(count), {std::vector<float>(pool.front().row.size()), -1});
  std::vector<float> members(means.size());
  for (std::size_t i = 0; i < pool.size(); ++i) {
    OldQuery& mean = means[clusters.of[i]];
    for (std::size_t d = 0; d < mean.row.size(); ++d) mean.row[d] += pool[i].row[d];
    mean.position = std::max(mean.position, pool[i].position);
    ++members[clusters.of[i]];
  }
  for (std::size_t c = 0; c < means.size(); ++c)
    for (float& x : means[c].row) x /= members[c];
  std::sort(means.begin(), means.end(), [](const OldQuery& a, const OldQuery& b) { return a.position < b.position; });
  return means;
}

}  // namespace

std::vector<OldQuery> sample_queries(const std::vector<OldQuery>& pool, index_t count, QuerySampler sampler,
                                     const RopeTable* rope, std::uint64_t seed) {
  const auto n = static_cast<index_t>(pool.size());
  if (n <= count) return pool;
  if (count == 0) return {};
  if (sampler == QuerySampler::recent) return {pool.end() - count, pool.end()};
  std::vector<slot_t> picks;
  if (sampler == QuerySampler::random) {
    picks = pick_randomly(n, count, seed);
  } else {
    const Points points = points_of(pool, rope);
    if (sampler == QuerySampler::fps) {
      picks = pick_farthest(points, count);
    } else {
      const Clusters clusters(points, static_cast<std::size_t>(count));
      if (sampler == QuerySampler::centroid) return centroids_of(pool, clusters, count);
      picks = pick_medoids(clusters, count);
    }
  }
  std::sort(picks.begin(), picks.end());
  std::vector<OldQuery> sampled;
  for (const slot_t slot : picks) sampled.push_back(pool[static_cast<std::size_t>(slot)]);
  return sampled;
}

}  // namespace beaconkv::lab
