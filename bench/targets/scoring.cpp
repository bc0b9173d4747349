// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

/// \file
/// Scoring of one KV head: 4 query heads x 32 rows over L keys of 128 numbers, largest weight of each key.

#include "beaconkv/kernel/instruction_set.hpp"
#include "scoring_opponents.hpp"
#include "support.hpp"
#include "targets/paths.hpp"

namespace beaconkv::bench {
namespace {

constexpr index_t dim = 128;
constexpr index_t group = 4;
constexpr index_t rows = 32;

/// One problem, ours and theirs.
class Scoring {
 public:
  explicit Scoring(index_t tokens)
      : queries_(random_.normals(group * rows * dim)),
        keys_(random_.normals(tokens * dim)),
        visible_(static_cast<std::size_t>(group * rows), static_cast<slot_t>(tokens)),
        scores_(static_cast<std::size_t>(tokens)),
        products_(static_cast<std::size_t>(group * rows * tokens)),
        work_(attention_workspace_size(group, rows, dim, tokens)) {}

  [[nodiscard]] ScoringInput input() const {
    return {queries_.data(), keys_.data(), group * rows, static_cast<index_t>(scores_.size()), dim};
  }
  void run() {
    const auto keys = [&](index_t first, index_t count, float*) {
      return ConstRows{keys_.data() + first * dim, count, dim, dim};
    };
    const Range all{0, static_cast<index_t>(scores_.size())};
    attention_scores(keys, {queries_.data(), group, rows, dim, visible_, {}}, all, all, {}, scores_, work_).or_throw();
    keep(scores_);
  }
  void run_naively() {
    score_naively(input(), row_, naive_);
    keep(naive_);
  }
  void multiply() {
    multiply_with_eigen(input(), products_.data());
    keep(products_);
  }
  void multiply_tiles(index_t tile) {
    multiply_tiles_with_eigen(input(), tile, products_.data());
    keep(products_);
  }
  /// The tile of keys with which Eigen is fastest here.
  [[nodiscard]] index_t best_tile() {
    index_t best = 0;
    double least = 1e300;
    for (const index_t tile : {32, 64, 96, 128, 192, 256, 512, 1024}) {
      const double seconds = fastest({0, 3}, [&] { multiply_tiles(tile); })[0];
      if (seconds < least) best = tile;
      least = std::min(least, seconds);
    }
    return best;
  }

  /// Ours, the naive form, and Eigen's products followed by a softmax come to the same scores.
  void check() {
    run();
    run_naively();
    multiply();
    const index_t m = group * rows;
    std::vector<double> from_products(scores_.size());
    for (index_t r = 0; r < m; ++r) {
      double sum = 0;
      const auto weight = [&](std::size_t j) {
        return std::exp(static_cast<double>(products_[j * static_cast<std::size_t>(m) + static_cast<std::size_t>(r)]) /
                        std::sqrt(static_cast<double>(dim)));
      };
      for (std::size_t j = 0; j < scores_.size(); ++j) sum += weight(j);
      for (std::size_t j = 0; j < scores_.size(); ++j) from_products[j] = std::max(from_products[j], weight(j) / sum);
    }
    for (std::size_t j = 0; j < scores_.size(); ++j) {
      const double tolerance = 1e-4 * from_products[j];
      require_same(std::fabs(static_cast<double>(scores_[j]) - from_products[j]) <= tolerance, "scoring / Eigen");
      require_same(std::fabs(static_cast<double>(naive_[j]) - from_products[j]) <= tolerance, "scoring / naive");
    }
  }

 private:
  Random random_{1};
  std::vector<float> queries_;
  std::vector<float> keys_;
  std::vector<slot_t> visible_;
  std::vector<float> scores_;
  std::vector<float> row_;
  std::vector<float> naive_;
  std::vector<float> products_;
  Workspace work_;
};

void against_eigen(Report& report, index_t tokens, double tiles_bound) {
  const std::string whole = "scoring/eigen_gemm/" + std::to_string(tokens);
  const std::string tiles = "scoring/eigen_tiles/" + std::to_string(tokens);
  if (!report.wants({whole, tiles})) return;
  Scoring scoring(tokens);
  const index_t tile = scoring.best_tile();
  const auto [ours, gemm, best] = fastest(
      report.pace(), [&] { scoring.run(); }, [&] { scoring.multiply(); }, [&] { scoring.multiply_tiles(tile); });
  report.target(whole, ours / gemm, "x", at_most(1.0), against(ours, gemm));
  report.target(tiles, ours / best, "x", at_most(tiles_bound), against(ours, best) + ", tiles of " + std::to_string(tile));
}

void against_naive(Report& report) {
  const std::string name = "scoring/naive/2048";
  if (!report.wants({name})) return;
  Scoring scoring(2048);
  scoring.check();
  const auto [ours, naive] = fastest(
      report.pace(), [&] { scoring.run(); }, [&] { scoring.run_naively(); });
  report.target(name, naive / ours, "x", at_least(is_native_build() ? 45 : 5), against(ours, naive));
}

/// The rate of each instruction set: in plain builds, beside that of a native one, what the choice at run time costs.
void rates(Report& report) {
  const InstructionSet before = instruction_set();
  Scoring scoring(2048);
  for (const InstructionSet set : {InstructionSet::baseline, InstructionSet::avx2, InstructionSet::avx512}) {
    const std::string name = std::string("scoring/rate/") + name_of(set);
    if (!report.wants({name}) || !use_instruction_set(set)) continue;
    const double seconds = fastest(report.pace(), [&] { scoring.run(); })[0];
    report.number(name, flops_of(scoring.input()) / seconds / 1e9, "GF/s",
                  "whole scoring, 2048 keys, " + shown_seconds(seconds));
  }
  use_instruction_set(before).or_throw();
}

}  // namespace

void measure_scoring(Report& report) {
  against_eigen(report, 2048, 1.15);
  against_eigen(report, 8192, 1.15);
  against_eigen(report, 32768, 1.3);
  against_naive(report);
  rates(report);
}

}  // namespace beaconkv::bench
