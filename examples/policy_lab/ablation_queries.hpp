// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// BeaconKV's observer with every choice open: what the library does not offer, because it loses. Slow and obvious; allocates.

#include <algorithm>
#include <deque>

#include "beaconkv/policy/observer.hpp"
#include "policy_lab/query_samplers.hpp"

namespace beaconkv::lab {

/// At which position a beacon looks at the keys.
enum class BeaconPlace : std::uint8_t {
  now,           ///< rotated to the newest token, as published
  own,           ///< where it was asked: it sees no later key
  own_unmasked,  ///< where it was asked, and sees all keys
};

/// `BeaconQueries` (recent queries in a ring, older ones in a pool that is reduced to the beacons whenever it is full, and at
/// evictions), with another sampler, another place for the beacons, or a pool that is never reduced (the whole history).
class AblationQueries {
 public:
  struct Options {
    index_t n_beacon = 16;
    index_t n_recent_queries = 16;
    QuerySampler sampler = QuerySampler::fps;
    BeaconPlace place = BeaconPlace::now;
    bool whole_history = false;
    RopeTable sampled_after{};  ///< sampled after RoPE by this table; empty: pre-RoPE, as published
    std::uint64_t seed = 0;     ///< of the sampler `random`
  };
  static constexpr bool needs_queries = true;
  static constexpr bool needs_rope = true;

  AblationQueries(const Shape& shape, const Options& options)
      : options_(options), dim_(shape.head_dim), heads_(static_cast<std::size_t>(shape.query_heads)) {}

  [[nodiscard]] friend Status validate(const Options& options, const Shape&) {
    if (options.n_beacon < 0) return detail::invalid("n_beacon = ", options.n_beacon, ": must not be negative");
    if (options.n_recent_queries < 1)
      return detail::invalid("n_recent_queries = ", options.n_recent_queries, ": must be at least 1");
    return {};
  }

  [[nodiscard]] Status prefill(const QuerySource& queries, Workspace&) {
    for (std::size_t h = 0; h < heads_.size() && options_.n_beacon > 0; ++h) {
      for (index_t t = 0; t < queries.view.tokens; ++t) heads_[h].pool.push_back(load(queries, t, h));
      reduce(h);
    }
    return {};
  }
  [[nodiscard]] Status observe(const QuerySource& queries) {
    for (std::size_t h = 0; h < heads_.size(); ++h) {
      Head& head = heads_[h];
      head.recent.push_back(load(queries, 0, h));
      if (static_cast<index_t>(head.recent.size()) <= options_.n_recent_queries) continue;
      if (options_.n_beacon > 0) head.pool.push_back(std::move(head.recent.front()));
      head.recent.pop_front();
      if (static_cast<index_t>(head.pool.size()) == options_.n_beacon + options_.n_recent_queries) reduce(h);
    }
    return {};
  }
  [[nodiscard]] Status commit() {
    for (std::size_t h = 0; h < heads_.size(); ++h) reduce(h);
    return {};
  }

  /// What would be looked with now; of the beacons, before they are rotated.
  [[nodiscard]] std::vector<OldQuery> beacons(index_t head) const { return sampled(static_cast<std::size_t>(head)); }
  [[nodiscard]] const std::vector<OldQuery>& pool(index_t head) const { return heads_[static_cast<std::size_t>(head)].pool; }

  [[nodiscard]] index_t pool_size() const noexcept { return static_cast<index_t>(heads_[0].pool.size()); }
  [[nodiscard]] index_t num_beacons() const noexcept { return std::min(options_.n_beacon, pool_size()); }
  [[nodiscard]] index_t rows() const noexcept { return num_beacons() + static_cast<index_t>(heads_[0].recent.size()); }
  [[nodiscard]] index_t max_rows() const noexcept { return options_.n_beacon + options_.n_recent_queries; }

  [[nodiscard]] Status write_rows(const RopeTable* rope, position_t now, Range heads, float* out, position_t* positions,
                                  Workspace& work, position_t* tags = nullptr) const {
    BEACONKV_ASSERT(rope != nullptr);
    const Workspace::Frame frame(work);
    detail::RowRotation rotation(work, rope);
    const auto write = [&](const OldQuery& query, position_t at, position_t sees_up_to) {
      rotation.at(at);
      rotation.write(query.row.data(), dim_, dim_, 1, out, dim_);
      out += dim_;
      *positions++ = sees_up_to;
    };
    for (auto h = static_cast<std::size_t>(heads.first); h < static_cast<std::size_t>(heads.last); ++h) {
      for (const OldQuery& beacon : sampled(h)) {
        const position_t at = options_.place == BeaconPlace::now ? now : beacon.position;
        write(beacon, at, options_.place == BeaconPlace::own ? at : now);
        if (tags != nullptr) *tags++ = beacon.position;
      }
      for (const OldQuery& query : heads_[h].recent) write(query, query.position, query.position);
    }
    return {};
  }
  [[nodiscard]] WorkspaceSize workspace_size() const { return detail::RowRotation::workspace_size(dim_); }
  [[nodiscard]] WorkspaceSize prefill_workspace_size(index_t) const { return {}; }
  [[nodiscard]] std::size_t state_bytes() const noexcept {
    std::size_t queries = 0;
    for (const Head& head : heads_) queries += head.pool.size() + head.recent.size();
    return queries * (static_cast<std::size_t>(dim_) * sizeof(float) + sizeof(position_t));
  }

 private:
  struct Head {
    std::vector<OldQuery> pool{};  // in time order
    std::deque<OldQuery> recent{};
  };

  [[nodiscard]] OldQuery load(const QuerySource& queries, index_t token, std::size_t head) const {
    OldQuery query{std::vector<float>(static_cast<std::size_t>(dim_)), queries.first_position + token};
    queries.load(token, static_cast<index_t>(head), query.row.data());
    return query;
  }
  [[nodiscard]] std::vector<OldQuery> sampled(std::size_t head) const {
    const std::vector<OldQuery>& pool = heads_[head].pool;
    const RopeTable* const rope = options_.sampled_after.empty() ? nullptr : &options_.sampled_after;
    const auto newest = pool.empty() ? 0 : static_cast<std::uint64_t>(pool.back().position);
    return sample_queries(pool, options_.n_beacon, options_.sampler, rope,
                          (options_.seed << 40) + (newest << 16) + static_cast<std::uint64_t>(head));
  }
  void reduce(std::size_t head) {
    if (!options_.whole_history) heads_[head].pool = sampled(head);
  }

  Options options_;
  index_t dim_;
  std::vector<Head> heads_;
};

static_assert(Observer<AblationQueries>);

}  // namespace beaconkv::lab
