// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// How well a few queries stand for all that were asked: bounded samplers against the whole history.

#include "policy_lab/ablation_queries.hpp"
#include "policy_lab/study.hpp"

namespace beaconkv::lab {

/// How far the queries of a history are from the nearest of a few: 1 - cosine. Of one query head.
struct Coverage {
  double worst = 0;
  double mean = 0;
};
[[nodiscard]] Coverage coverage_of(const std::vector<OldQuery>& history, const std::vector<OldQuery>& few);

/// `sweep --table coverage`: along the full cache's texts, with a reduction every eighth of the budget as evictions bring it,
/// the coverage of all queries that are not recent any more, after 1, 4, 16 and 64 of these cycles and at the end.
[[nodiscard]] Status print_coverage(const RunOptions& options, bool markdown);

}  // namespace beaconkv::lab
