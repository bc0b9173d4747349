// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

/// \file
/// RoPE re-alignment of the keys of 8 heads, 128 numbers a key, beside a pass that multiplies each of them in place.

#include <cmath>

#include "beaconkv/policy/realign.hpp"
#include "support.hpp"
#include "targets/paths.hpp"

namespace beaconkv::bench {
namespace {

constexpr index_t dim = 128;
constexpr Shape shape{8, 8, dim};

/// The opponent. Noinline, so that it is compiled as a function of its own.
[[gnu::noinline]] void scale_in_place(float* keys, index_t count, float factor) {
  for (index_t i = 0; i < count; ++i) keys[i] *= factor;
}

class Realignment {
 public:
  explicit Realignment(index_t tokens)
      : rope_({.head_dim = dim, .theta = 500000}),
        cache_(random_cache<float>(shape, tokens, random_, {.positions = PositionMode::cache_relative})),
        work_(realign_workspace_size(dim)),
        to_(static_cast<std::size_t>(tokens)),
        from_(to_.size()) {
    for (std::size_t j = 0; j < to_.size(); ++j) to_[j] = static_cast<position_t>(j);
  }

  /// Every key moves by as many positions: what is left of a cache whose oldest tokens went.
  void by_a_common_delta() {
    for (std::size_t j = 0; j < to_.size(); ++j) from_[j] = to_[j] + 256;
    for (index_t h = 0; h < shape.kv_heads; ++h) realign_keys(cache_.view(), h, from_, to_, rope_, work_).or_throw();
    keep(cache_);
  }
  /// Every key moves to its slot, an eighth of the gaps between them at random: the seconds of the call alone.
  [[nodiscard]] double to_slots() {
    auto& cache = cache_.view();
    for (index_t h = 0; h < shape.kv_heads; ++h) {
      position_t position = 1;
      for (index_t slot = 0; slot < cache.num_tokens(); ++slot) {
        cache.set_rotary_position(h, slot, position);
        position += random_.below(8) == 0 ? 2 : 1;
      }
      cache.set_next_rotary_position(2 * cache.num_tokens());
    }
    const Stopwatch watch;
    realign_to_slots(cache, rope_, work_).or_throw();
    return watch.seconds();
  }
  void scale() {
    factor_ = 1 / factor_;  // there and back, so that keys neither vanish nor overflow
    scale_in_place(cache_.view().key_plane().base, shape.kv_heads * cache_.view().num_tokens() * dim, factor_);
    keep(cache_);
  }
  /// A key moved by delta is the key turned by delta.
  void check() {
    std::vector<float> key(cache_.view().key_plane().row(3, 5), cache_.view().key_plane().row(3, 5) + dim);
    by_a_common_delta();
    rope_.realign(key.data(), 256, 0);
    for (index_t d = 0; d < dim; ++d)
      require_same(std::fabs(key[static_cast<std::size_t>(d)] - cache_.view().key_plane().row(3, 5)[d]) < 1e-5F,
                   "rope / realign");
  }

 private:
  Random random_{13};
  RopeTable rope_;
  OwningCache<float> cache_;
  Workspace work_;
  std::vector<position_t> to_;
  std::vector<position_t> from_;
  float factor_ = 2;
};

void against_scaling(Report& report, index_t tokens) {
  const std::string common = "rope/scaling/" + std::to_string(tokens) + "/common_delta";
  const std::string each = "rope/scaling/" + std::to_string(tokens) + "/delta_of_each_key";
  if (!report.wants({common, each})) return;
  Realignment realignment(tokens);
  realignment.check();
  const auto [shared, own, theirs] = fastest(
      tokens > 2048 ? report.heavy_pace() : report.pace(), [&] { realignment.by_a_common_delta(); },
      [&] { return realignment.to_slots(); }, [&] { realignment.scale(); });
  report.target(common, shared / theirs, "x", at_most(1.15), against(shared, theirs));
  report.target(each, own / theirs, "x", at_most(1.15), against(own, theirs) + ", tables included");
}

}  // namespace

void measure_rope(Report& report) {
  against_scaling(report, 2048);
  against_scaling(report, 32768);
}

}  // namespace beaconkv::bench
