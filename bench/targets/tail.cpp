// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

/// \file
/// The longest decode step beside the usual one: attention of 8 layers, observation and evictions, 2048 tokens a layer.

#include "decode_replay.hpp"
#include "targets/paths.hpp"

namespace beaconkv::bench {
namespace {

struct Tail {
  double worst = 0;
  double median = 0;
};

[[nodiscard]] Tail tail_of(const Report& report, const ReplayOptions& options) {
  DecodeReplay replay(options);
  static_cast<void>(fastest({2 * report.pace().seconds, report.pace().rounds},
                            [&] { require_same(replay.run() == options.layers, "tail / every layer evicts once"); }));
  return {replay.worst_step(), replay.median_step()};
}

}  // namespace

void measure_tail(Report& report) {
  const std::string name = "tail/worst_step/2048";
  const std::string layers = "tail/worst_step_whole_layers/2048";
  const std::string together = "tail/worst_step_not_staggered/2048";
  if (report.wants({name})) {
    const Tail tail = tail_of(report, {.layers_per_step = 1, .heads_per_step = 2});
    report.target(name, tail.worst / tail.median, "x", at_most(1.5),
                  against(tail.worst, tail.median) + " (median), 2 heads of one of 8 layers are scored a step");
  }
  if (report.wants({layers})) {
    const Tail tail = tail_of(report, {.layers_per_step = 1});
    report.number(layers, tail.worst / tail.median, "x",
                  against(tail.worst, tail.median) + " (median), one of 8 layers evicts a step");
  }
  if (report.wants({together})) {
    const Tail tail = tail_of(report, {.layers_per_step = 0});
    report.number(together, tail.worst / tail.median, "x",
                  against(tail.worst, tail.median) + " (median), 8 layers in one step");
  }
}

}  // namespace beaconkv::bench
