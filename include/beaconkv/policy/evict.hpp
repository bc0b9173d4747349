// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// One whole eviction of one layer.

#include "beaconkv/memory/compact.hpp"
#include "beaconkv/policy/eviction_policy.hpp"

namespace beaconkv::inline v0 {

/// What an `evict` did, in tokens of each head.
struct EvictionReport {
  index_t evicted = 0;         ///< of the head that lost most
  index_t kept = 0;            ///< of the head that keeps most
  index_t num_non_finite = 0;  ///< key and query rows with a NaN or infinity that scoring met
};

namespace detail {

/// One whole eviction; `apply(plan)` moves the rows, or refuses with nothing changed.
template <class Policy, CacheBuffer Cache, class Apply>
[[nodiscard]] Result<EvictionReport> evict_by(Policy& policy, Cache& cache, Workspace& work, Apply apply) {
  KeepPlan& plan = work.plan();
  if (Status s = policy.plan(cache, work, plan); !s) return s;
  if (Status s = policy.check_commit(plan); !s) return s;
  if (Status s = apply(plan); !s) return s;
  if (Status s = policy.commit(plan); !s) return s;
  EvictionReport report{.num_non_finite = plan.num_non_finite()};
  for (index_t h = 0; h < plan.sets(); ++h) {
    report.evicted = std::max(report.evicted, plan.num_evicted(h));
    report.kept = std::max(report.kept, plan.num_kept(h));
  }
  return report;
}

}  // namespace detail

/// One whole eviction: plan, compact in place, commit. `work.plan()` holds the plan afterwards. On an error cache and policy
/// are as before. Does not ask `due`: a cache within its budget is left alone, bit for bit. A cache that keeps one set for all
/// layers is evicted through its `Sequence`.
template <class Policy, CacheBuffer Cache>
[[nodiscard]] Result<EvictionReport> evict(Policy& policy, Cache& cache, Workspace& work) {
  return detail::evict_by(policy, cache, work, [&](const KeepPlan& plan) { return compact(cache, plan); });
}

}  // namespace beaconkv::inline v0
