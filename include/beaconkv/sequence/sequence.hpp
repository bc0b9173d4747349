// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// All layers of one request: a policy and a cache for each, and one workspace that they share.

#include <algorithm>
#include <utility>
#include <vector>

#include "beaconkv/policy/evict.hpp"

namespace beaconkv::inline v0 {

/// What an eviction over all layers did.
struct SequenceReport {
  index_t layers = 0;          ///< that evicted
  index_t evicted = 0;         ///< tokens of a head, summed over those layers
  index_t num_non_finite = 0;  ///< key and query rows with a NaN or infinity that scoring met
};

/// The policies and caches of all layers of one sequence. Layers may have policies with different options or budgets.
///
/// A value: a copy forks the policies' state. Cache views in a copy still refer to the same memory: `rebase` them to the fork's
/// own. One thread uses a sequence at a time. Nothing allocates after construction.
template <class PolicyT, CacheBuffer CacheT>
class Sequence {
 public:
  /// One policy and one cache for each layer, in order; the workspace fits caches and prompts of up to `capacity` tokens.
  /// Allocates.
  [[nodiscard]] static Result<Sequence> make(std::vector<PolicyT> policies, std::vector<CacheT> caches, index_t capacity) {
    if (policies.empty() || policies.size() != caches.size())
      return detail::invalid("policies = ", policies.size(), ", caches = ", caches.size(),
                             ": there must be one of each for every layer");
    if (capacity < 0) return detail::invalid("capacity = ", capacity, ": must not be negative");
    WorkspaceSize size;
    for (const PolicyT& policy : policies) size = max(size, policy.workspace_size(capacity));
    return Sequence(std::move(policies), std::move(caches), Workspace(size));
  }

  [[nodiscard]] index_t num_layers() const noexcept { return static_cast<index_t>(policies_.size()); }
  [[nodiscard]] PolicyT& policy(index_t layer) noexcept { return policies_[static_cast<std::size_t>(layer)]; }
  [[nodiscard]] const PolicyT& policy(index_t layer) const noexcept { return policies_[static_cast<std::size_t>(layer)]; }
  [[nodiscard]] CacheT& cache(index_t layer) noexcept { return caches_[static_cast<std::size_t>(layer)]; }
  [[nodiscard]] const CacheT& cache(index_t layer) const noexcept { return caches_[static_cast<std::size_t>(layer)]; }
  [[nodiscard]] Workspace& workspace() noexcept { return work_; }

  /// Bytes that the policies hold, of all layers.
  [[nodiscard]] std::size_t state_bytes() const noexcept {
    std::size_t bytes = 0;
    for (const PolicyT& policy : policies_) bytes += policy.state_bytes();
    return bytes;
  }

  /// Evicts in every layer whose policy is due. Where a layer fails, the layers before it have evicted and are consistent.
  [[nodiscard]] Result<SequenceReport> evict_where_due() {
    SequenceReport total;
    for (index_t l = 0; l < num_layers(); ++l) {
      if (!policy(l).due(cache(l))) continue;
      const Result<EvictionReport> report = evict(policy(l), cache(l), work_);
      if (!report) return report.status();
      ++total.layers;
      total.evicted += report->evicted;
      total.num_non_finite += report->num_non_finite;
    }
    return total;
  }

 private:
  Sequence(std::vector<PolicyT> policies, std::vector<CacheT> caches, Workspace work)
      : policies_(std::move(policies)), caches_(std::move(caches)), work_(std::move(work)) {}

  std::vector<PolicyT> policies_;
  std::vector<CacheT> caches_;
  Workspace work_;  // the layers take turns
};

}  // namespace beaconkv::inline v0
