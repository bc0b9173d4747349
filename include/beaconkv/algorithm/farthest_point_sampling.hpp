// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Farthest point sampling: a few rows that together cover the directions (or places) of all.
///
/// Source: BeaconKV (arXiv 2609.04971) eq. 7 for the cosine form; Gonzalez 1985 for the greedy rule.

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <span>

#include "beaconkv/detail/numeric.hpp"
#include "beaconkv/workspace.hpp"

namespace beaconkv::inline v0 {

enum class FpsMetric : std::uint8_t {
  cosine,     ///< far = small cosine; a zero row has cosine 0 to everything
  euclidean,  ///< far = large distance
};

struct FpsOptions {
  FpsMetric metric = FpsMetric::cosine;
  /// Rows that are chosen already: the sampling continues from them. Empty: it begins with the row that is on average
  /// farthest from all (cosine: smallest mean cosine, itself included).
  std::span<const slot_t> start{};
};

namespace detail {

/// The greedy loop over points that `load` has prepared. Scratch: `n * dim` floats and 5 bytes a point.
class FpsRun {
 public:
  FpsRun(Workspace& work, index_t n, index_t dim, FpsMetric metric)
      : n_(n),
        dim_(dim),
        metric_(metric),
        points_(work.take<float>(n * dim)),
        nearness_(work.take<float>(n)),
        state_(work.take<std::uint8_t>(n)),
        sum_(work.take<double>(dim)) {}

  /// The place of point `i`: write it there, then call `prepare`.
  [[nodiscard]] float* point(index_t i) noexcept { return points_.data() + i * dim_; }

  /// Normalises point `i` (cosine) and notes whether it is finite; a non-finite row counts as zero and is chosen last.
  void prepare(index_t i) noexcept {
    float* const x = point(i);
    const bool finite = all_finite(x, dim_);
    state_[at(i)] = finite ? free_finite : free_not_finite;
    if (!finite) std::fill(x, x + dim_, 0.0F);
    if (metric_ != FpsMetric::cosine) return;
    double square = 0;
    for (index_t d = 0; d < dim_; ++d) square += static_cast<double>(x[d]) * static_cast<double>(x[d]);
    const double scale = square > 0 ? 1 / std::sqrt(square) : 0;
    for (index_t d = 0; d < dim_; ++d) x[d] = static_cast<float>(static_cast<double>(x[d]) * scale);
  }

  /// Picks `count` more points; their indices, in order of selection, go to `out`. Returns how many: fewer only where no point
  /// is left.
  index_t run(std::span<const slot_t> start, index_t count, slot_t* out) noexcept {
    const index_t left = n_ - static_cast<index_t>(start.size());
    for (const slot_t s : start) state_[at(s)] = chosen;
    if (count >= left) {
      for (index_t i = 0; i < n_; ++i)
        if (state_[at(i)] != chosen) *out++ = static_cast<slot_t>(i);
      return left;
    }
    if (start.empty())
      begin();
    else
      std::fill(nearness_.begin(), nearness_.end(), -FLT_MAX);
    for (const slot_t s : start) come_nearer(s);
    for (index_t picked = 0; picked < count; ++picked) {
      const index_t next = farthest();
      state_[at(next)] = chosen;
      out[picked] = static_cast<slot_t>(next);
      if (picked == 0 && start.empty()) std::fill(nearness_.begin(), nearness_.end(), -FLT_MAX);
      come_nearer(next);
    }
    return count;
  }

 private:
  static constexpr std::uint8_t free_finite = 0, free_not_finite = 1, chosen = 2;
  [[nodiscard]] static std::size_t at(index_t i) noexcept { return static_cast<std::size_t>(i); }

  /// Mean nearness of each point to all, up to a term that is equal for all: O(n D) by way of the sum of the points.
  void begin() noexcept {
    std::fill(sum_.begin(), sum_.end(), 0.0);
    for (index_t i = 0; i < n_; ++i)
      for (index_t d = 0; d < dim_; ++d) sum_[at(d)] += static_cast<double>(point(i)[d]);
    const double n = static_cast<double>(std::count(state_.begin(), state_.end(), free_finite));
    for (index_t i = 0; i < n_; ++i) {
      double mean = 0;
      for (index_t d = 0; d < dim_; ++d) {
        const auto x = static_cast<double>(point(i)[d]);
        const double gap = x - sum_[at(d)] / n;
        mean += metric_ == FpsMetric::cosine ? x * sum_[at(d)] / n : -gap * gap;
      }
      nearness_[at(i)] = static_cast<float>(mean);
    }
  }

  [[nodiscard]] float nearness(index_t i, index_t j) noexcept {
    if (metric_ == FpsMetric::cosine) return dot(point(i), point(j), dim_);
    double square = 0;
    for (index_t d = 0; d < dim_; ++d) {
      const double gap = static_cast<double>(point(i)[d]) - static_cast<double>(point(j)[d]);
      square += gap * gap;
    }
    return static_cast<float>(-square);
  }

  void come_nearer(index_t to) noexcept {
    for (index_t i = 0; i < n_; ++i)
      if (state_[at(i)] == free_finite) nearness_[at(i)] = std::max(nearness_[at(i)], nearness(i, to));
  }

  /// The free point of least nearness, lowest index among equals; non-finite ones only where nothing else is free.
  [[nodiscard]] index_t farthest() const noexcept {
    index_t best = -1;
    index_t fallback = -1;
    for (index_t i = 0; i < n_; ++i) {
      if (state_[at(i)] == free_not_finite && fallback < 0) fallback = i;
      if (state_[at(i)] == free_finite && (best < 0 || nearness_[at(i)] < nearness_[at(best)])) best = i;
    }
    return best >= 0 ? best : fallback;
  }

  index_t n_;
  index_t dim_;
  FpsMetric metric_;
  std::span<float> points_;
  std::span<float> nearness_;  // of each free point to its nearest chosen one
  std::span<std::uint8_t> state_;
  std::span<double> sum_;
};

}  // namespace detail

/// Scratch of `farthest_point_sampling` over `n` rows of `dim`.
[[nodiscard]] inline WorkspaceSize fps_workspace_size(index_t n, index_t dim) {
  return detail::measure([&](Workspace& work) { static_cast<void>(detail::FpsRun(work, n, dim, FpsMetric::cosine)); });
}

/// Picks `count` rows, each the one whose nearest picked row is farthest. Their indices go to `selected` in order of selection;
/// returns how many.
///
/// Ties: lowest index. `count` at or beyond the rows that are left: all of those, ascending. A row with a NaN or infinity is
/// picked only when no finite row is left. A prefix of a longer run is the shorter run. O(n * count * D), no allocation.
/// Errors: no rows to pick from, negative count, `selected` or `work` too small, `start` out of range or repeated.
[[nodiscard]] inline Result<index_t> farthest_point_sampling(const ConstRows& rows, index_t count, std::span<slot_t> selected,
                                                             Workspace& work, const FpsOptions& options = {}) {
  if (count < 0) return detail::invalid("count = ", count, ": must not be negative");
  if (rows.rows < 0 || rows.dim < 1)
    return detail::invalid("rows = ", rows.rows, ", dim = ", rows.dim, ": must be at least 0 and 1");
  if (count > 0 && rows.rows == 0) return detail::invalid("rows = 0: there is nothing to pick ", count, " from");
  const index_t left = rows.rows - static_cast<index_t>(options.start.size());
  if (static_cast<index_t>(selected.size()) < std::min(count, std::max<index_t>(left, 0)))
    return detail::invalid("selected has room for ", selected.size(), " indices: ", std::min(count, left), " are needed");
  for (std::size_t i = 0; i < options.start.size(); ++i) {
    const slot_t s = options.start[i];
    if (s < 0 || s >= rows.rows) return detail::invalid("start[", i, "] = ", s, ": must be a row below ", rows.rows);
    if (std::find(options.start.begin(), options.start.begin() + static_cast<index_t>(i), s) !=
        options.start.begin() + static_cast<index_t>(i))
      return detail::invalid("start[", i, "] = ", s, ": is there twice");
  }
  if (Status s = work.require(fps_workspace_size(rows.rows, rows.dim)); !s) return s;

  const Workspace::Frame frame(work);
  detail::FpsRun run(work, rows.rows, rows.dim, options.metric);
  for (index_t i = 0; i < rows.rows; ++i) {
    std::copy(rows.row(i), rows.row(i) + rows.dim, run.point(i));
    run.prepare(i);
  }
  return run.run(options.start, count, selected.data());
}

}  // namespace beaconkv::inline v0
