// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

/// \file
/// A whole eviction, and what continual sampling costs each token, as shares of the attention of the decode steps between two
/// evictions: one layer of Llama-3 8B, float32, everything cold, as the other layers leave it.

#include <cmath>
#include <cstdio>

#include "attention_step.hpp"
#include "beaconkv/policy/beaconkv.hpp"
#include "decoding_layer.hpp"
#include "targets/paths.hpp"

namespace beaconkv::bench {
namespace {

constexpr Shape shape = llama3_8b;

/// BeaconKV with 16 beacons and 16 recent queries, from `tokens` down to 7/8 of them.
class Layer {
 public:
  explicit Layer(index_t tokens)
      : period_(tokens / 8),
        layer_(shape,
               BeaconKV<>(shape, {.budget = {.max = tokens, .min = tokens - tokens / 8}, .n_prefix = 0}, llama3_rope(128)),
               tokens, random_),
        attention_(shape),
        out_(static_cast<std::size_t>(shape.query_heads * shape.head_dim)),
        work_(layer_.policy.workspace_size(tokens)) {}

  [[nodiscard]] index_t period() const noexcept { return period_; }

  [[nodiscard]] double evict_cold() {
    cold_.flush();
    const Stopwatch watch;
    const EvictionReport report = evict(layer_.policy, layer_.memory.view(), work_).or_throw();
    const double seconds = watch.seconds();
    require_same(report.evicted == period_, "eviction / budget");
    layer_.refill();
    return seconds;
  }
  [[nodiscard]] double attend_cold() {
    cold_.flush();
    return seconds_of([&] { attend(); });
  }
  [[nodiscard]] double read_cold() {
    cold_.flush();
    return seconds_of([&] { keep(read_cache(shape, keys(), values(), tokens(), tokens())); });
  }
  /// The attention of one head, by its definition in double.
  void check() {
    attend();
    const index_t dim = shape.head_dim;
    const float* const q = layer_.queries.at(0).data();
    std::vector<double> mixed(static_cast<std::size_t>(dim));
    double sum = 0;
    for (index_t t = 0; t < tokens(); ++t) {
      double z = 0;
      for (index_t d = 0; d < dim; ++d) z += static_cast<double>(q[d]) * static_cast<double>(keys()[t * dim + d]);
      const double weight = std::exp(z / std::sqrt(static_cast<double>(dim)));
      sum += weight;
      for (index_t d = 0; d < dim; ++d)
        mixed[static_cast<std::size_t>(d)] += weight * static_cast<double>(values()[t * dim + d]);
    }
    for (std::size_t d = 0; d < mixed.size(); ++d)
      require_same(std::fabs(mixed[d] / sum - static_cast<double>(out_[d])) < 1e-5, "attention step / definition");
  }

 private:
  void attend() {
    attention_.run(layer_.queries.at(0).data(), keys(), values(), tokens(), tokens(), out_.data());
    keep(out_);
  }
  [[nodiscard]] index_t tokens() const noexcept { return layer_.memory.view().capacity(); }
  [[nodiscard]] const float* keys() const noexcept { return layer_.memory.view().key_plane().base; }
  [[nodiscard]] const float* values() const noexcept { return layer_.memory.view().value_plane().base; }

  Random random_{15};
  index_t period_;
  DecodingLayer<BeaconKV<>> layer_;
  AttentionStep attention_;
  std::vector<float> out_;
  Workspace work_;
  ColdCaches cold_{};
};

void against_attention(Report& report, index_t tokens, double percent) {
  const std::string name = "eviction/attention/" + std::to_string(tokens);
  const std::string read = "eviction/attention_step_over_read/" + std::to_string(tokens);
  if (!report.wants({name, read})) return;
  Layer layer(tokens);
  layer.check();
  const auto [eviction, step, reading] = fastest(
      report.pace(), [&] { return layer.evict_cold(); }, [&] { return layer.attend_cold(); },
      [&] { return layer.read_cold(); });
  char note[160];
  std::snprintf(note, sizeof note, "%s: %.2f steps, every %d tokens", against(eviction, step).c_str(), eviction / step,
                static_cast<int>(layer.period()));
  report.target(name, 100 * eviction / step / static_cast<double>(layer.period()), "%", at_most(percent), note);
  report.number(read, step / reading, "x", "the opponent itself: " + against(step, reading) + " for reading the cache");
}

/// The buffers of all heads, which take one row each a token and are reduced every 16.
void upkeep(Report& report) {
  const std::string name = "eviction/fps_upkeep/2048";
  if (!report.wants({name})) return;
  constexpr index_t count = 16;
  Random random(17);
  Layer layer(2048);
  ColdCaches cold;
  const QueryStream queries(shape, random);
  Workspace work(ContinualFps::make(shape.head_dim, count, 2 * count).or_throw().workspace_size());
  std::vector<ContinualFps> buffers(static_cast<std::size_t>(shape.query_heads),
                                    ContinualFps::make(shape.head_dim, count, 2 * count).or_throw());
  position_t position = 0;
  const auto push = [&] {
    for (std::size_t h = 0; h < buffers.size(); ++h)
      buffers[h].push(queries.at(position).data() + static_cast<index_t>(h) * shape.head_dim, position, work).or_throw();
    ++position;
    keep(buffers);
  };
  while (position < 4 * count) push();                                 // 16 rows are left of 32
  std::vector<double> tokens(static_cast<std::size_t>(count), 1e300);  // of a cycle; only the last one reduces
  double step = 1e300;
  Pace pace = report.pace();
  for (const double end = now() + pace.seconds; pace.rounds > 0 || now() < end; --pace.rounds)
    for (double& least : tokens) {
      step = std::min(step, layer.attend_cold());
      cold.flush();
      keep(read_cache({1, 1, 64}, queries.at(position).data(), queries.at(position).data(), 64, 64));  // just computed
      least = std::min(least, seconds_of(push));
    }
  double sum = 0;
  for (const double seconds : tokens) sum += seconds;
  const double each = sum / static_cast<double>(count);
  report.target(name, 100 * each / step, "%", at_most(0.4), against(each, step) + " a token, mean over a cycle of 16");
}

}  // namespace

void measure_eviction(Report& report) {
  against_attention(report, 2048, 1.5);
  against_attention(report, 8192, 0.3);
  against_attention(report, 128, 35);
  upkeep(report);
}

}  // namespace beaconkv::bench
