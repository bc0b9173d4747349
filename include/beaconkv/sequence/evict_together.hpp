// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// The eviction of layers that keep one set of tokens (`Granularity::per_sequence`).

#include <span>
#include <utility>
#include <vector>

#include "beaconkv/policy/realign.hpp"
#include "beaconkv/sequence/event_log.hpp"
#include "beaconkv/sequence/sequence_options.hpp"

namespace beaconkv::inline v0::detail {

/// Scratch for the scores of a layer, and what all layers come to.
[[nodiscard]] inline WorkspaceSize shared_scores_size(index_t kv_heads, index_t tokens) {
  return measure([&](Workspace& work) {
    static_cast<void>(work.take<float>(kv_heads * tokens));
    static_cast<void>(work.take<float>(tokens));
  });
}

/// Scored layer by layer, reduced over heads and layers, chosen once, taken down where `log` is not null. Precondition: all
/// hold equally many tokens.
template <class PolicyT, CacheBuffer CacheT>
[[nodiscard]] Result<SequenceReport> evict_together(std::span<PolicyT> policies, std::span<CacheT> caches, Reduce over_layers,
                                                    Workspace& work, EventLog* log) {
  const index_t tokens = caches[0].num_tokens();
  const index_t heads = policies[0].shape().kv_heads;
  SequenceReport total;
  const double start = log != nullptr ? seconds_now() : 0;
  if (Status s = work.require(shared_scores_size(heads, tokens)); !s) return s;
  const Workspace::Frame frame(work);
  const ScoreMatrix of_layer{work.take<float>(heads * tokens).data(), heads, tokens};
  const ScoreMatrix shared{work.take<float>(tokens).data(), 1, tokens};
  for (std::size_t l = 0; l < policies.size(); ++l) {
    const Result<ScoreReport> report = policies[l].score(caches[l], of_layer, work);
    if (!report) return report.status();
    total.num_non_finite += report->num_non_finite;
    reduce_heads(of_layer, policies[l].shared_reduce());
    const std::span<float> sum = shared.row(0);
    const std::span<const float> own = of_layer.row(0);
    for (std::size_t j = 0; j < sum.size(); ++j)
      sum[j] = l == 0 ? own[j] : (over_layers == Reduce::max ? max_or_nan(sum[j], own[j]) : sum[j] + own[j]);
  }
  if (over_layers == Reduce::mean)
    for (float& x : shared.row(0)) x *= 1.0F / static_cast<float>(policies.size());
  KeepPlan& plan = work.plan();
  const bool recorded = plan.records_scores();
  plan.record_scores(recorded || log != nullptr);
  const Status selected = policies[0].select(caches[0], shared, work, plan);
  plan.record_scores(recorded);
  if (!selected) return selected;
  total.unchanged_prefix = plan.unchanged_prefix();
  for (std::size_t l = 0; l < policies.size(); ++l) {  // none may refuse once another has evicted
    if (Status s = plan.readdress(caches[l]); !s) return s;
    if (Status s = check_move(caches[l], plan, policies[l].rope(), work); !s) return s;
  }
  std::vector<EvictionEvent> events;
  const double decided = log != nullptr ? seconds_now() : 0;
  for (std::size_t l = 0; log != nullptr && l < policies.size(); ++l)
    events.push_back(event_of(static_cast<index_t>(l), policies[l], caches[l], plan));
  const double moving = log != nullptr ? seconds_now() : 0;
  for (std::size_t l = 0; l < policies.size(); ++l) {
    if (Status s = plan.readdress(caches[l]); !s) return s;
    if (Status s = move_tokens(caches[l], plan, policies[l].rope(), work, SerialExecutor{}); !s) return s;
    if (Status s = policies[l].commit(plan); !s) return s;
    ++total.layers;
    total.evicted += plan.num_evicted(0);
  }
  if (log != nullptr && !plan.keeps_all()) {
    const double seconds = decided - start + seconds_now() - moving;
    for (EvictionEvent& event : events) {
      event.seconds = seconds / static_cast<double>(events.size());
      log->add(std::move(event));
    }
  }
  return total;
}

}  // namespace beaconkv::inline v0::detail
