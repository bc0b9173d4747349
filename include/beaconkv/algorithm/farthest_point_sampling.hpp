// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Farthest point sampling: a few rows that together cover the directions (or places) of all.
///
/// Source: BeaconKV (arXiv 2609.04971) eq. 7 for the cosine form; Gonzalez 1985 for the greedy rule.

#include <algorithm>
#include <cmath>
#include <span>

#include "beaconkv/kernel/cosine_matrix.hpp"
#include "beaconkv/kernel/farthest_points.hpp"
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

/// So few rows that all their cosines cost less than looking for those that matter.
inline constexpr index_t few_rows = 64;

/// One sampling over rows as they lie. Scratch: 12 bytes a row, and the cosines of few rows.
class FpsRun {
 public:
  FpsRun(Workspace& work, index_t n, index_t dim)
      : scale_(work.take<float>(n)),
        nearness_(work.take<float>(round_up(n, nearness_block))),
        seen_(work.take<std::int32_t>(n)),
        cosines_(work.take<float>(std::min(n, few_rows) * round_up(std::min(n, few_rows), lanes))),
        sum_(work.take<double>(round_up(dim, double_lanes))),
        mean_(work.take<float>(dim)) {}

  /// Picks `count` more rows; their indices, in order of selection, go to `out`. Returns how many: fewer only where no row is
  /// left.
  index_t run(const ConstRows& rows, FpsMetric metric, std::span<const slot_t> start, index_t count, slot_t* out) noexcept {
    return metric == FpsMetric::cosine ? run<Pairing::product>(rows, start, count, out)
                                       : run<Pairing::square_of_difference>(rows, start, count, out);
  }

 private:
  template <Pairing pairing>
  index_t run(const ConstRows& rows, std::span<const slot_t> start, index_t count, slot_t* out) noexcept {
    const index_t n = rows.rows;
    const auto num_start = static_cast<index_t>(start.size());
    if (count >= n - num_start) return pick_the_rest(n, start, out);
    if (count == 0) return 0;
    if (pairing == Pairing::product && n <= few_rows && num_start == 0) return pick_by_cosines(rows, count, out);
    FarthestPoints points{.rows = rows.data,
                          .stride = rows.stride,
                          .dim = rows.dim,
                          .n = n,
                          .scale = scale_.data(),
                          .nearness = nearness_.data(),
                          .seen = seen_.data(),
                          .start = start.data(),
                          .num_start = num_start,
                          .picked = out};
    FirstPick first{.sum = sum_.data(), .mean = mean_.data()};
    detail::run<SumRows<pairing>>(&points, &first);
    std::fill(nearness_.begin() + n, nearness_.end(), chosen_nearness);
    std::fill(seen_.begin(), seen_.begin() + n, 0);
    if (pairing == Pairing::square_of_difference && scale_of(first.longest) == unusual_row) {
      points.unit = std::ldexp(1.0, -std::ilogb(first.longest) / 2);  // squares then stay in the range of float
      std::replace(scale_.begin(), scale_.begin() + n, 1.0F, unusual_row);
    }

    index_t picked = 0;
    if (num_start == 0) {
      detail::run<MeanNearness<pairing>>(&points, &first);
      index_t least_near = 0;
      detail::run<Farthest<pairing>>(&points, &least_near);
      out[picked++] = static_cast<slot_t>(least_near);
      if (picked == count) return count;
    }
    for (index_t i = 0; i < n; ++i) nearness_[at(i)] = scale_[at(i)] == not_finite_row ? not_finite_nearness : nothing_chosen;
    points.picks = 1;
    detail::run<ComeNearer<pairing>>(&points);  // this once there is no bound that could spare a row
    for (index_t k = 0; k < num_start + picked; ++k) nearness_[at(points.pick(k))] = chosen_nearness;
    while (picked < count) {
      points.picks = num_start + picked;
      index_t next = 0;
      detail::run<Farthest<pairing>>(&points, &next);
      out[picked++] = static_cast<slot_t>(next);
      nearness_[at(next)] = chosen_nearness;
    }
    return count;
  }

  index_t pick_by_cosines(const ConstRows& rows, index_t count, slot_t* out) noexcept {
    const float* row[static_cast<std::size_t>(few_rows)];
    for (index_t i = 0; i < rows.rows; ++i) row[i] = rows.row(i);
    detail::run<RowScales>(static_cast<const float* const*>(row), rows.dim, rows.rows, scale_.data());
    const CosineMatrix matrix{.row = row,
                              .dim = rows.dim,
                              .n = rows.rows,
                              .scale = scale_.data(),
                              .cosines = cosines_.data(),
                              .width = round_up(rows.rows, lanes)};
    detail::run<CompleteCosines>(&matrix);
    const std::span<const float> scales = scale_.first(static_cast<std::size_t>(rows.rows));
    if (std::any_of(scales.begin(), scales.end(), [](float s) { return s < 0; })) detail::run<CompleteCosines::Mend>(&matrix);
    detail::run<PickByCosines>(&matrix, count, nearness_.data(), out);
    return count;
  }

  index_t pick_the_rest(index_t n, std::span<const slot_t> start, slot_t* out) noexcept {
    std::fill(seen_.begin(), seen_.begin() + n, 0);
    for (const slot_t s : start) seen_[at(s)] = 1;
    index_t left = 0;
    for (index_t i = 0; i < n; ++i)
      if (seen_[at(i)] == 0) out[left++] = static_cast<slot_t>(i);
    return left;
  }
  [[nodiscard]] static std::size_t at(index_t i) noexcept { return static_cast<std::size_t>(i); }

  std::span<float> scale_;
  std::span<float> nearness_;  // of each free row to the nearest picks that it has seen
  std::span<std::int32_t> seen_;
  std::span<float> cosines_;  // of few rows; taken for many, too: a workspace serves every smaller sampling
  std::span<double> sum_;
  std::span<float> mean_;
};

}  // namespace detail

/// Scratch of `farthest_point_sampling` over `n` rows of `dim`: 12 bytes a row, and the cosines of
/// up to 64 rows; the rows themselves are read where they lie.
[[nodiscard]] inline WorkspaceSize fps_workspace_size(index_t n, index_t dim) {
  return detail::measure([&](Workspace& work) { static_cast<void>(detail::FpsRun(work, n, dim)); });
}

/// Picks `count` rows, each the one whose nearest picked row is farthest. Their indices go to `selected` in order of selection;
/// returns how many.
///
/// Ties: lowest index. `count` at or beyond the rows that are left: all of those, ascending. A row with a NaN or infinity is
/// picked only when no finite row is left. A prefix of a longer run is the shorter run. O(n * count * D) at worst (n * n * D
/// for up to 64 rows); evaluated is only what may change a pick, a quarter of that for long prompts. No allocation.
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
  return detail::FpsRun(work, rows.rows, rows.dim).run(rows, options.metric, options.start, count, selected.data());
}

}  // namespace beaconkv::inline v0
