// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

/// \file
/// Compaction in place, 7/8 of the rows kept at random, keys and values of 128 numbers: beside memcpy of as many bytes to other
/// memory, and beside memmove of as many by one row, which is the least that closing gaps can cost.

#include <cstring>

#include "beaconkv/memory/compact.hpp"
#include "support.hpp"
#include "targets/paths.hpp"

namespace beaconkv::bench {
namespace {

constexpr index_t dim = 128;
constexpr std::size_t inputs = 8;

/// The slots that a head keeps: exactly 7/8, at random.
[[nodiscard]] std::vector<slot_t> seven_eighths(index_t tokens, Random& random) {
  std::vector<slot_t> kept;
  index_t wanted = tokens / 8 * 7;
  for (index_t slot = 0; slot < tokens; ++slot)
    if (random.below(tokens - slot) < wanted) {
      kept.push_back(static_cast<slot_t>(slot));
      --wanted;
    }
  return kept;
}

template <class T>
class Compaction {
 public:
  Compaction(index_t heads, index_t tokens)
      : tokens_(tokens), cache_(random_cache<T>({heads, heads, dim}, tokens, random_)), elsewhere_(bytes()) {
    for (std::size_t i = 0; i < inputs * static_cast<std::size_t>(heads); ++i) kept_.push_back(seven_eighths(tokens, random_));
    plan_.reserve(heads, tokens);
  }

  /// The seconds of `compact` alone; the plan comes before, and the tokens that fill the cache up again behind.
  [[nodiscard]] double run() {
    make_plan();
    const Stopwatch watch;
    compact(cache_.view(), plan_).or_throw();
    const double seconds = watch.seconds();
    refill();
    return seconds;
  }
  void copy() {
    const std::size_t half = bytes() / 2;
    std::memcpy(elsewhere_.data(), cache_.view().key_plane().base, half);
    std::memcpy(elsewhere_.data() + half, cache_.view().value_plane().base, half);
    keep(elsewhere_);
  }
  void move() {
    const std::size_t row = dim * sizeof(T);
    for (T* const base : {cache_.view().key_plane().base, cache_.view().value_plane().base}) {
      auto* const rows = reinterpret_cast<std::byte*>(base);
      std::memmove(rows, rows + row, bytes() / 2);
      keep(*rows);
    }
  }
  /// Every head holds the rows that its plan keeps.
  void check() {
    make_plan();
    const OwningCache<T> before = cache_;
    compact(cache_.view(), plan_).or_throw();
    std::vector<float> a(dim), b(dim);
    for (index_t h = 0; h < cache_.view().num_kv_heads(); ++h)
      for (index_t i = 0; i < plan_.num_kept(h); ++i) {
        const float* const x = cache_.view().keys(h, i, 1, a.data()).data;
        const float* const y = before.view().keys(h, plan_.kept(h)[static_cast<std::size_t>(i)], 1, b.data()).data;
        require_same(std::equal(x, x + dim, y), "compaction / gather");
      }
    refill();
  }

 private:
  void make_plan() {
    auto& cache = cache_.view();
    plan_.start(cache.epoch(), tokens_, {0, tokens_});
    for (index_t h = 0; h < cache.num_kv_heads(); ++h) {
      const std::vector<slot_t>& kept = kept_[next_++ % kept_.size()];
      std::copy(kept.begin(), kept.end(), plan_.add_set(static_cast<index_t>(kept.size()), tokens_).begin());
    }
  }
  void refill() {
    auto& cache = cache_.view();
    const position_t next = cache.position(0, cache.num_tokens() - 1) + tokens_;
    cache.append_run(next, tokens_ - cache.num_tokens()).or_throw();
  }
  /// Of the keys and values that stay.
  [[nodiscard]] std::size_t bytes() const {
    return static_cast<std::size_t>(cache_.view().num_kv_heads() * (tokens_ / 8 * 7) * dim * 2) * sizeof(T);
  }

  Random random_{11};
  index_t tokens_;
  OwningCache<T> cache_;
  std::vector<std::byte> elsewhere_;
  std::vector<std::vector<slot_t>> kept_{};
  KeepPlan plan_{};
  std::size_t next_ = 0;
};

template <class T>
void against_memcpy(Report& report, index_t heads, index_t tokens, const std::string& type) {
  const std::string name = "compaction/memcpy/" + std::to_string(tokens) + "_" + type;
  if (!report.wants({name})) return;
  Compaction<T> compaction(heads, tokens);
  compaction.check();
  const auto [ours, theirs] = fastest(
      report.pace(), [&] { return compaction.run(); }, [&] { compaction.copy(); });
  report.target(name, ours / theirs, "x", at_most(1.0), against(ours, theirs) + ", " + std::to_string(heads) + " heads");
}

/// Half a MiB, which a second-level cache holds.
void against_memmove(Report& report) {
  const std::string name = "compaction/memmove/512_f32_in_L2";
  if (!report.wants({name})) return;
  Compaction<float> compaction(1, 512);
  const auto [ours, theirs] = fastest(
      report.pace(), [&] { return compaction.run(); }, [&] { compaction.move(); });
  report.target(name, ours / theirs, "x", at_most(1.25), against(ours, theirs));
}

}  // namespace

void measure_compaction(Report& report) {
  against_memcpy<float>(report, 1, 2048, "f32");
  against_memcpy<bfloat16>(report, 1, 2048, "bf16");
  against_memcpy<float>(report, 4, 32768, "f32");
  against_memcpy<bfloat16>(report, 4, 32768, "bf16");
  against_memmove(report);
}

}  // namespace beaconkv::bench
