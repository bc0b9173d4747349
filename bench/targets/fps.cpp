// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

/// \file
/// Farthest point sampling: the reduction while decoding, 32 rows to 16, and a long prompt, 8192 rows to 16; 128 numbers a row.

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <numeric>

#include "beaconkv/algorithm/continual_fps.hpp"
#include "support.hpp"
#include "targets/paths.hpp"

namespace beaconkv::bench {
namespace {

constexpr index_t dim = 128;
constexpr index_t count = 16;

/// Unit rows.
void normalise(const float* rows, index_t n, std::vector<float>& out) {
  out.resize(static_cast<std::size_t>(n * dim));
  for (index_t i = 0; i < n; ++i) {
    float square = 0;
    for (index_t d = 0; d < dim; ++d) square += rows[i * dim + d] * rows[i * dim + d];
    const float scale = 1.0F / std::sqrt(square);
    for (index_t d = 0; d < dim; ++d) out[static_cast<std::size_t>(i * dim + d)] = rows[i * dim + d] * scale;
  }
}

/// The row of least nearness that is not taken (nearness 2).
[[nodiscard]] slot_t least(const std::vector<float>& nearness) {
  return static_cast<slot_t>(std::min_element(nearness.begin(), nearness.end()) - nearness.begin());
}

/// The textbook form: all cosines for the first row, then those to each chosen row, by plain loops.
class Naive {
 public:
  [[nodiscard]] const std::vector<slot_t>& run(const float* rows, index_t n) {
    normalise(rows, n, unit_);
    const auto cosine = [&](index_t i, index_t j) {
      const float* const a = unit_.data() + i * dim;
      const float* const b = unit_.data() + j * dim;
      float dot = 0;
      for (index_t d = 0; d < dim; ++d) dot += a[d] * b[d];
      return dot;
    };
    near_.assign(static_cast<std::size_t>(n), 0.0F);
    for (index_t i = 0; i < n; ++i)
      for (index_t j = 0; j < n; ++j) near_[static_cast<std::size_t>(i)] += cosine(i, j) / static_cast<float>(n);
    picked_.assign(1, least(near_));
    std::fill(near_.begin(), near_.end(), -2.0F);
    while (static_cast<index_t>(picked_.size()) < count) {
      for (index_t i = 0; i < n; ++i)
        near_[static_cast<std::size_t>(i)] = std::max(near_[static_cast<std::size_t>(i)], cosine(i, picked_.back()));
      near_[static_cast<std::size_t>(picked_.back())] = 3;
      picked_.push_back(least(near_));
    }
    return picked_;
  }

 private:
  std::vector<float> unit_;
  std::vector<float> near_;
  std::vector<slot_t> picked_;
};

/// The usual good form: the first row through the sum of all, then one product of the matrix with each chosen row.
class Incremental {
 public:
  [[nodiscard]] const std::vector<slot_t>& run(const float* rows, index_t n) {
    using Rows = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
    unit_.resize(static_cast<std::size_t>(n * dim));
    Eigen::Map<Rows> unit(unit_.data(), n, dim);
    unit = Eigen::Map<const Rows>(rows, n, dim).rowwise().normalized();
    const Eigen::VectorXf sum = unit.colwise().sum();
    cosines_.noalias() = unit * sum;
    near_.assign(cosines_.data(), cosines_.data() + n);
    picked_.assign(1, least(near_));
    Eigen::Map<Eigen::VectorXf> near(near_.data(), n);
    near.setConstant(-2);
    while (static_cast<index_t>(picked_.size()) < count) {
      cosines_.noalias() = unit * unit.row(picked_.back()).transpose();
      near = near.cwiseMax(cosines_);
      near[picked_.back()] = 3;
      picked_.push_back(least(near_));
    }
    return picked_;
  }

 private:
  std::vector<float> unit_;
  Eigen::VectorXf cosines_;
  std::vector<float> near_;
  std::vector<slot_t> picked_;
};

/// Whether each row was, but for rounding, the farthest from those before it: near-ties may be decided either way.
[[nodiscard]] bool is_greedy(const float* rows, index_t n, const std::vector<slot_t>& picked) {
  std::vector<float> unit;
  normalise(rows, n, unit);
  const Eigen::Map<const Eigen::MatrixXf> points(unit.data(), dim, n);
  const Eigen::VectorXd sum = points.cast<double>().rowwise().sum();
  Eigen::VectorXd near = points.cast<double>().transpose() * sum / static_cast<double>(n);
  for (std::size_t i = 0; i < picked.size(); ++i) {
    const double own = near[picked[i]];
    if (own > near.minCoeff() + 1e-6) return false;
    if (i == 0) near.setConstant(-2);
    near = near.cwiseMax(points.cast<double>().transpose() * points.col(picked[i]).cast<double>());
    near[picked[i]] = 3;
  }
  return static_cast<index_t>(picked.size()) == count;
}

/// A cycle of decoding: 16 rows are pushed, and 32 become 16 again. 32 heads in rotation.
class Cycles {
 public:
  Cycles() : stream_(random_.normals(heads * per_head * dim)) {
    for (index_t h = 0; h < heads; ++h) buffers_.push_back(ContinualFps::make(dim, count, 2 * count).or_throw());
    for (index_t warm = 0; warm < 2; ++warm) run();
  }
  static constexpr index_t heads = 32;

  void run() {
    for (index_t h = 0; h < heads; ++h) {
      for (index_t i = 0; i < count; ++i)
        buffers_[static_cast<std::size_t>(h)].push(row(h, next_ + i), next_ + i, work_).or_throw();
      keep(buffers_);
    }
    next_ += count;
  }
  /// The next cycle of a head keeps what sampling over its 32 rows picks.
  void check() {
    ContinualFps buffer = buffers_[0];
    std::vector<float> rows(buffer.rows().data, buffer.rows().data + buffer.size() * dim);
    std::vector<position_t> tags(buffer.tags().begin(), buffer.tags().end());
    for (index_t i = 0; i < count; ++i) {
      rows.insert(rows.end(), row(0, next_ + i), row(0, next_ + i) + dim);
      tags.push_back(next_ + i);
      buffer.push(row(0, next_ + i), next_ + i, work_).or_throw();
    }
    Naive naive;
    std::vector<position_t> kept;
    for (const slot_t slot : naive.run(rows.data(), 2 * count)) kept.push_back(tags[static_cast<std::size_t>(slot)]);
    std::sort(kept.begin(), kept.end());
    require_same(std::equal(kept.begin(), kept.end(), buffer.tags().begin(), buffer.tags().end()), "continual FPS / naive");
  }

 private:
  static constexpr index_t per_head = 256;  // rows that come again and again
  [[nodiscard]] const float* row(index_t head, index_t i) const {
    return stream_.data() + (head * per_head + i % per_head) * dim;
  }

  Random random_{5};
  std::vector<float> stream_;
  std::vector<ContinualFps> buffers_{};
  Workspace work_{ContinualFps::make(dim, count, 2 * count).or_throw().workspace_size()};
  index_t next_ = 0;
};

void decoding(Report& report) {
  const std::string cycle = "fps/naive/32_to_16";
  const std::string one_shot = "fps/naive/32_to_16_one_shot";
  const std::string pytorch3d = "fps/pytorch3d/32_to_16";
  if (!report.wants({cycle, one_shot, pytorch3d})) return;
  constexpr index_t n = 2 * count;
  constexpr index_t inputs = Cycles::heads;
  Random random(6);
  const std::vector<float> rows = random.normals(inputs * n * dim);
  std::vector<slot_t> picked(static_cast<std::size_t>(count));
  Workspace work(fps_workspace_size(n, dim));
  Naive naive;
  const auto sample = [&](index_t i) {
    farthest_point_sampling({rows.data() + i * n * dim, n, dim, dim}, count, picked, work).or_throw();
    keep(picked);
  };
  sample(0);
  require_same(is_greedy(rows.data(), n, picked) && is_greedy(rows.data(), n, naive.run(rows.data(), n)), "fps / naive");
  Cycles cycles;
  cycles.check();
  auto [cycled, sampled, theirs] = fastest(
      report.pace(), [&] { cycles.run(); },
      [&] {
        for (index_t i = 0; i < inputs; ++i) sample(i);
      },
      [&] {
        for (index_t i = 0; i < inputs; ++i) keep(naive.run(rows.data() + i * n * dim, n));
      });
  for (double* const seconds : {&cycled, &sampled, &theirs}) *seconds /= static_cast<double>(inputs);
  report.target(cycle, theirs / cycled, "x", at_least(25), against(cycled, theirs) + ", 16 pushes and a reduction");
  report.target(one_shot, theirs / sampled, "x", at_least(25), against(sampled, theirs));
  report.number(pytorch3d, 1e6 * cycled, "us", "PyTorch3D is not linked: ours alone");
}

void prompt(Report& report) {
  const std::string name = "fps/incremental/8192_to_16";
  const std::string pytorch3d = "fps/pytorch3d/8192_to_16";
  if (!report.wants({name, pytorch3d})) return;
  constexpr index_t n = 8192;
  constexpr index_t inputs = 4;
  Random random(7);
  // On cache lines, where an engine has them: a register across two lines is read twice.
  const std::vector<float> numbers = random.normals(inputs * n * dim);
  Workspace memory({numbers.size() * sizeof(float), 0, 0});
  const std::span<float> rows = memory.take<float>(inputs * n * dim);
  std::copy(numbers.begin(), numbers.end(), rows.begin());
  std::vector<slot_t> picked(static_cast<std::size_t>(count));
  Workspace work(fps_workspace_size(n, dim));
  Incremental incremental;
  const auto sample = [&](index_t i) {
    farthest_point_sampling({rows.data() + i * n * dim, n, dim, dim}, count, picked, work).or_throw();
    keep(picked);
  };
  sample(0);
  require_same(is_greedy(rows.data(), n, picked) && is_greedy(rows.data(), n, incremental.run(rows.data(), n)),
               "fps / incremental");
  const auto [ours, theirs] = fastest(
      report.pace(),
      [&] {
        for (index_t i = 0; i < inputs; ++i) sample(i);
      },
      [&] {
        for (index_t i = 0; i < inputs; ++i) keep(incremental.run(rows.data() + i * n * dim, n));
      });
  report.target(name, ours / theirs, "x", at_most(0.6), against(ours / inputs, theirs / inputs));
  report.number(pytorch3d, 1e3 * ours / inputs, "ms", "PyTorch3D is not linked: ours alone");
}

}  // namespace

void measure_fps(Report& report) {
  decoding(report);
  prompt(report);
}

}  // namespace beaconkv::bench
