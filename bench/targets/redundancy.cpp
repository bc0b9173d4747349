// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

/// \file
/// R-KV's redundancy of one head's keys, beside the product of all keys with all keys that its definition begins with.

#include <Eigen/Core>
#include <cmath>

#include "beaconkv/algorithm/key_redundancy.hpp"
#include "key_data.hpp"
#include "targets/paths.hpp"

namespace beaconkv::bench {
namespace {

constexpr index_t dim = 128;

/// All cosines of all keys, by Eigen.
class AllCosines {
 public:
  explicit AllCosines(index_t n) : n_(n), unit_(n, dim), cosines_(static_cast<std::size_t>(n * n)) {}

  void take(const std::vector<float>& keys) { unit_ = Eigen::Map<const Rows>(keys.data(), n_, dim).rowwise().normalized(); }
  void multiply() {
    Eigen::Map<Eigen::MatrixXf> all(cosines_.data(), n_, n_);
    all.noalias() = unit_ * unit_.transpose();
    keep(cosines_);
  }
  /// What the definition makes of them: each row spares its newest look-alike, or the oldest key.
  [[nodiscard]] std::vector<double> means() {
    std::vector<double> sums(static_cast<std::size_t>(n_));
    for (index_t i = 0; i < n_; ++i) {
      const float* const row = cosines_.data() + i * n_;  // symmetric: a column is a row
      index_t spared = 0;
      for (index_t j = 0; j < n_; ++j)
        if (j != i && row[j] > 0.5F) spared = j;
      for (index_t j = 0; j < n_; ++j)
        if (j != i && j != spared) sums[static_cast<std::size_t>(j)] += static_cast<double>(row[j]);
    }
    for (double& x : sums) x /= static_cast<double>(n_);
    return sums;
  }

 private:
  using Rows = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  index_t n_;
  Rows unit_;
  std::vector<float> cosines_;
};

/// Cosines of almost 0.5 may fall on either side of the threshold, and then one entry of two columns differs.
void check(const std::vector<float>& ours, const std::vector<double>& theirs) {
  index_t different = 0;
  for (std::size_t j = 0; j < ours.size(); ++j)
    if (std::fabs(static_cast<double>(ours[j]) - theirs[j]) > 5e-6) ++different;
  require_same(100 * different <= static_cast<index_t>(ours.size()), "redundancy / all cosines");
}

void against_eigen(Report& report, index_t n) {
  const auto name_of = [n](const KeyData& data) {
    return std::string("redundancy/eigen_gemm/") + std::to_string(n) + "/" + data.name;
  };
  AllCosines all(n);
  std::vector<float> means(static_cast<std::size_t>(n));
  Workspace work(key_redundancy_workspace_size(n, dim));
  for (const KeyData& data : key_data) {
    if (data.kind == KeyData::all_equal || !report.wants({name_of(data)})) continue;
    const std::vector<float> keys = make_keys(data.kind, n, dim);
    const auto rows = [&](index_t first, index_t count, float*) {
      return ConstRows{keys.data() + first * dim, count, dim, dim};
    };
    const auto run = [&] {
      key_redundancy_means(rows, n, dim, {}, means, work).or_throw();
      keep(means);
    };
    all.take(keys);
    if (n == 2048) {
      run();
      all.multiply();
      check(means, all.means());
    }
    const auto [ours, theirs] = fastest(n > 2048 ? report.heavy_pace() : report.pace(), run, [&] { all.multiply(); });
    const double bound = data.kind == KeyData::independent ? (n > 2048 ? 0.4 : 0.45) : (n > 2048 ? 0.03 : 0.1);
    report.target(name_of(data), ours / theirs, "x", at_most(bound), against(ours, theirs));
  }
}

}  // namespace

void measure_redundancy(Report& report) {
  for (const index_t n : {2048, 4096, 8192}) against_eigen(report, n);
}

}  // namespace beaconkv::bench
