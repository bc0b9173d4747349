// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

/// \file
/// A whole eviction, and what continual sampling costs each token, as shares of the attention of the decode steps between two
/// evictions: one layer of Llama-3 8B, float32, everything cold, as the other layers leave it.

#include <array>
#include <cmath>
#include <cstdio>
#include <numeric>

#include "attention_step.hpp"
#include "beaconkv/policy/beaconkv.hpp"
#include "decoding_layer.hpp"
#include "targets/paths.hpp"

namespace beaconkv::bench {
namespace {

constexpr Shape shape = llama3_8b;

/// As the paper has it: 16 beacons and 16 recent queries, from `tokens` down to 7/8 of them.
[[nodiscard]] BeaconKVOptions<> published(index_t tokens) {
  return {.budget = {.max = tokens, .min = tokens - tokens / 8}, .n_prefix = 0};
}

class Layer {
 public:
  explicit Layer(index_t tokens) : Layer(tokens, published(tokens)) {}
  Layer(index_t tokens, const BeaconKVOptions<>& options)
      : period_(tokens / 8),
        layer_(shape, BeaconKV<>(shape, options, llama3_rope(128)), tokens, random_),
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

/// What goes beyond the paper, against the published form.
void beyond_the_paper(Report& report, index_t tokens) {
  const std::string size = "/" + std::to_string(tokens);
  const std::string names[] = {"eviction/credit_over_published" + size, "eviction/value_norm_over_published" + size,
                               "eviction/both_over_published" + size};
  if (!report.wants({names[0], names[1], names[2]})) return;
  BeaconKVOptions<> credit = published(tokens);
  credit.orphan_credit = 0.95F;
  BeaconKVOptions<> value_norm = published(tokens);
  value_norm.value_norm = true;
  BeaconKVOptions<> both = BeaconKVOptions<>::with_orphan_credit(credit.budget);
  both.n_prefix = 0;
  Layer layers[] = {Layer(tokens), Layer(tokens, credit), Layer(tokens, value_norm), Layer(tokens, both)};
  const auto seconds = fastest(
      report.pace(), [&] { return layers[0].evict_cold(); }, [&] { return layers[1].evict_cold(); },
      [&] { return layers[2].evict_cold(); }, [&] { return layers[3].evict_cold(); });
  for (std::size_t i = 0; i < 3; ++i)
    report.target(names[i], seconds[i + 1] / seconds[0], "x", at_most(1.1), against(seconds[i + 1], seconds[0]));
}

/// A token of `observer`, mean over a cycle of 16 tokens, of which one samples.
template <class ObserverT>
class Upkeep {
 public:
  static constexpr std::size_t cycle = 16;

  Upkeep(const QueryStream& queries, const typename ObserverT::Options& options) : observer_(shape, options) {
    while (position_ < static_cast<position_t>(4 * cycle)) observe(queries);
    least_.fill(1e300);
  }
  /// One cycle; everything cold but the token's queries, which were just computed.
  void run(const QueryStream& queries, ColdCaches& cold) {
    for (double& least : least_) {
      cold.flush();
      const float* const q = queries.at(position_).data();
      keep(read_cache({1, 1, 64}, q, q, 64, 64));
      least = std::min(least, seconds_of([&] { observe(queries); }));
    }
  }
  [[nodiscard]] double seconds() const { return std::accumulate(least_.begin(), least_.end(), 0.0) / cycle; }

 private:
  void observe(const QueryStream& queries) {
    const QueryView view = QueryView::token_major(queries.at(position_).data(), 1, shape.query_heads, shape.head_dim);
    observer_.observe({view, position_}).or_throw();
    ++position_;
    keep(observer_);
  }

  ObserverT observer_;
  position_t position_ = 0;
  std::array<double, cycle> least_{};
};

/// What continual sampling of beacons costs a token more than a ring of recent queries alone.
void upkeep(Report& report) {
  const std::string name = "eviction/fps_upkeep/2048";
  if (!report.wants({name})) return;
  Random random(17);
  const QueryStream queries(shape, random);
  Layer layer(2048);
  ColdCaches cold;
  Upkeep<RecentQueries> ring(queries, {.count = 16});
  Upkeep<BeaconQueries> beacons(queries, {.n_beacon = 16, .n_recent_queries = 16});
  double step = 1e300;
  Pace pace = report.pace();
  for (const double end = now() + pace.seconds; pace.rounds > 0 || now() < end; --pace.rounds) {
    step = std::min(step, layer.attend_cold());
    ring.run(queries, cold);
    beacons.run(queries, cold);
  }
  const double each = beacons.seconds() - ring.seconds();
  char note[160];
  std::snprintf(note, sizeof note, "%s a token: %s, less %s for the ring alone", against(each, step).c_str(),
                shown_seconds(beacons.seconds()).c_str(), shown_seconds(ring.seconds()).c_str());
  report.target(name, 100 * each / step, "%", at_most(0.4), note);
}

}  // namespace

void measure_eviction(Report& report) {
  against_attention(report, 2048, 1.5);
  against_attention(report, 8192, 0.3);
  against_attention(report, 128, 35);
  beyond_the_paper(report, 2048);
  beyond_the_paper(report, 128);
  upkeep(report);
}

}  // namespace beaconkv::bench
