// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// The decode steps around an eviction of all layers of a model, over and over again: how long the longest step takes.

#include <algorithm>
#include <vector>

#include "attention_step.hpp"
#include "beaconkv/policy/beaconkv.hpp"
#include "beaconkv/sequence/sequence.hpp"
#include "decoding_layer.hpp"
#include "measure.hpp"

namespace beaconkv::bench {

struct ReplayOptions {
  index_t layers = 8;
  index_t budget = 2048;
  index_t layers_per_step = 1;  ///< 0: all that are due in one step
  index_t heads_per_step = 0;   ///< 0: a layer evicts in one step
};

/// A step is the attention of all layers of Llama-3 8B's shape, observation and `evict_where_due`. The same steps of the same
/// state again and again, and of each step the shortest: what disturbs one of them is not in all replays.
class DecodeReplay {
 public:
  explicit DecodeReplay(const ReplayOptions& options)
      : options_(options),
        steps_(steps_of(options)),
        capacity_(options.budget + steps_),
        queries_(shape, random_),
        attention_(shape),
        out_(static_cast<std::size_t>(shape.query_heads * shape.head_dim)),
        least_(static_cast<std::size_t>(steps_), 1e300) {
    const RopeTable rope = llama3_rope(shape.head_dim);
    const index_t tokens = options.budget - before;
    for (index_t l = 0; l < options.layers; ++l) {
      BeaconKV<> policy(shape, {.budget = {.max = options.budget}, .n_prefix = 0}, rope);
      for (position_t p = tokens - 64; p < tokens; ++p) policy.observe(queries_.at(p), p).or_throw();
      policies_.push_back(std::move(policy));
      memory_.push_back(random_cache<float>(shape, capacity_, random_));
      const PlaneCache<float>& full = memory_.back().view();
      caches_.push_back(PlaneCache<float>::make(full.key_plane(), full.value_plane()).or_throw());  // with empty books
      caches_.back().append_run(0, tokens).or_throw();
    }
    const SequenceOptions made{
        .capacity = capacity_, .layers_per_step = options.layers_per_step, .heads_per_step = options.heads_per_step};
    sequence_.push_back(Sequence<BeaconKV<>, PlaneCache<float>>::make(policies_, caches_, made).or_throw());
  }

  /// Runs all steps once; returns how many layers evicted.
  index_t run() {
    for (index_t l = 0; l < options_.layers; ++l) {
      sequence_[0].policy(l) = policies_[static_cast<std::size_t>(l)];
      sequence_[0].cache(l) = caches_[static_cast<std::size_t>(l)];
    }
    index_t evicted = 0;
    for (index_t i = 0; i < steps_; ++i) {
      const Stopwatch watch;
      evicted += step(options_.budget - before + i);
      double& least = least_[static_cast<std::size_t>(i)];
      least = std::min(least, watch.seconds());
    }
    return evicted;
  }

  /// Seconds.
  [[nodiscard]] double worst_step() const { return *std::max_element(least_.begin(), least_.end()); }
  [[nodiscard]] double median_step() const {
    std::vector<double> sorted = least_;
    std::sort(sorted.begin(), sorted.end());
    return sorted[sorted.size() / 2];
  }

 private:
  static constexpr Shape shape = llama3_8b;
  static constexpr index_t before = 4;  // steps until all layers are due
  /// Twice as many as evict something, so that the median evicts nothing.
  [[nodiscard]] static index_t steps_of(const ReplayOptions& options) {
    const index_t slices = options.heads_per_step > 0 ? (shape.kv_heads - 1) / options.heads_per_step + 2 : 1;
    const index_t layers_at_once = options.layers_per_step > 0 ? options.layers_per_step : options.layers;
    return before + 2 * slices * ((options.layers - 1) / layers_at_once + 1) + 4;
  }

  [[nodiscard]] index_t step(position_t position) {
    for (index_t l = 0; l < options_.layers; ++l) {
      PlaneCache<float>& cache = sequence_[0].cache(l);
      cache.append(position).or_throw();
      attention_.run(queries_.at(position).data(), cache.key_plane().base, cache.value_plane().base, cache.num_tokens(),
                     capacity_, out_.data());
      keep(out_);
      sequence_[0].policy(l).observe(queries_.at(position), position).or_throw();
    }
    return sequence_[0].evict_where_due().or_throw().layers;
  }

  ReplayOptions options_;
  index_t steps_;
  index_t capacity_;
  Random random_{19};
  QueryStream queries_;
  AttentionStep attention_;
  std::vector<float> out_;
  std::vector<double> least_;  // of each step, over all replays
  std::vector<OwningCache<float>> memory_{};
  std::vector<BeaconKV<>> policies_{};                               // as they are before the first step
  std::vector<PlaneCache<float>> caches_{};                          // their books likewise
  std::vector<Sequence<BeaconKV<>, PlaneCache<float>>> sequence_{};  // one
};

}  // namespace beaconkv::bench
