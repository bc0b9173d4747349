// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

/// \file
/// The longest decode step beside the usual one: attention of all layers, observation and evictions, 2048 tokens a layer.

#include <algorithm>

#include "attention_step.hpp"
#include "beaconkv/policy/beaconkv.hpp"
#include "beaconkv/sequence/sequence.hpp"
#include "decoding_layer.hpp"
#include "targets/paths.hpp"

namespace beaconkv::bench {
namespace {

constexpr Shape shape = llama3_8b;
constexpr index_t layers = 8;
constexpr index_t budget = 2048;
constexpr index_t before = 4;  // steps until the first layer is due
constexpr index_t steps = 32;
constexpr index_t capacity = budget + steps;

/// The same steps of the same model again and again: what disturbs one of them is not in all replays.
class Replay {
 public:
  explicit Replay(index_t layers_per_step)
      : queries_(shape, random_), attention_(shape), out_(static_cast<std::size_t>(shape.query_heads * shape.head_dim)) {
    const RopeTable rope = llama3_rope(shape.head_dim);
    for (index_t l = 0; l < layers; ++l) {
      BeaconKV<> policy(shape, {.budget = {.max = budget}, .n_prefix = 0}, rope);
      for (position_t p = budget - 64; p < budget - before; ++p) policy.observe(queries_.at(p), p).or_throw();
      policies_.push_back(std::move(policy));
      memory_.push_back(random_cache<float>(shape, capacity, random_));
      PlaneCache<float>& cache = memory_.back().view();
      cache.truncate(0);
      cache = PlaneCache<float>::make(cache.key_plane(), cache.value_plane()).or_throw();  // empty books, full rows
      cache.append_run(0, budget - before).or_throw();
      caches_.push_back(cache);
    }
    sequence_.push_back(Sequence<BeaconKV<>, PlaneCache<float>>::make(
                            policies_, caches_, {.capacity = capacity, .layers_per_step = layers_per_step})
                            .or_throw());
  }

  /// Shortest seconds of each step over all replays.
  [[nodiscard]] const std::vector<double>& least() const noexcept { return least_; }
  void run() {
    for (index_t l = 0; l < layers; ++l) {
      sequence_[0].policy(l) = policies_[static_cast<std::size_t>(l)];
      sequence_[0].cache(l) = caches_[static_cast<std::size_t>(l)];
    }
    index_t evicted = 0;
    for (index_t i = 0; i < steps; ++i) {
      const double start = now();
      evicted += step(budget - before + i);
      double& least = least_[static_cast<std::size_t>(i)];
      least = std::min(least, now() - start);
    }
    require_same(evicted == layers, "tail / every layer evicts once");
  }

 private:
  [[nodiscard]] index_t step(position_t position) {
    for (index_t l = 0; l < layers; ++l) {
      PlaneCache<float>& cache = sequence_[0].cache(l);
      cache.append(position).or_throw();
      attention_.run(queries_.at(position).data(), cache.key_plane().base, cache.value_plane().base, cache.num_tokens(),
                     capacity, out_.data());
      keep(out_);
      sequence_[0].policy(l).observe(queries_.at(position), position).or_throw();
    }
    return sequence_[0].evict_where_due().or_throw().layers;
  }

  Random random_{19};
  QueryStream queries_;
  AttentionStep attention_;
  std::vector<float> out_;
  std::vector<OwningCache<float>> memory_{};
  std::vector<BeaconKV<>> policies_{};                               // as they are before the first step
  std::vector<PlaneCache<float>> caches_{};                          // their books likewise
  std::vector<Sequence<BeaconKV<>, PlaneCache<float>>> sequence_{};  // one
  std::vector<double> least_ = std::vector<double>(static_cast<std::size_t>(steps), 1e300);
};

struct Tail {
  double worst = 0;
  double median = 0;
};

[[nodiscard]] Tail tail_of(const Report& report, index_t layers_per_step) {
  Replay replay(layers_per_step);
  static_cast<void>(fastest({2 * report.pace().seconds, report.pace().rounds}, [&] { replay.run(); }));
  std::vector<double> sorted = replay.least();
  std::sort(sorted.begin(), sorted.end());
  return {sorted.back(), sorted[sorted.size() / 2]};
}

}  // namespace

void measure_tail(Report& report) {
  const std::string name = "tail/worst_step/2048";
  const std::string together = "tail/worst_step_not_staggered/2048";
  if (report.wants({name})) {
    const Tail tail = tail_of(report, 1);
    report.target(name, tail.worst / tail.median, "x", at_most(1.5),
                  against(tail.worst, tail.median) + " (median), 8 layers, one evicts a step");
  }
  if (report.wants({together})) {
    const Tail tail = tail_of(report, 0);
    report.number(together, tail.worst / tail.median, "x",
                  against(tail.worst, tail.median) + " (median), 8 layers in one step");
  }
}

}  // namespace beaconkv::bench
