// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "beaconkv/beaconkv.hpp"
#include "methods.hpp"

namespace beaconkv::conformance {
namespace {

/// Checks that a list of picks is a greedy run over the rows `x`, in double: for cases with ties.
class GreedyRun {
 public:
  explicit GreedyRun(const FloatArray& x) : x_(x), nearness_(static_cast<std::size_t>(x.dim(0)), lowest) {}

  /// Empty, or what is wrong with the first bad pick.
  [[nodiscard]] std::string check(std::span<const std::int64_t> picks) {
    for (std::size_t i = 0; i < picks.size(); ++i) {
      const std::int64_t pick = picks[i];
      const std::string at = "pick " + std::to_string(i) + " = " + std::to_string(pick);
      if (pick < 0 || pick >= x_.dim(0)) return at + ": is no row";
      if (taken(pick)) return at + ": was picked before";
      if (i == 0) start();
      if (std::string wrong = judge(pick); !wrong.empty()) return at + wrong;
      if (i == 0) std::fill(nearness_.begin(), nearness_.end(), lowest);
      take(pick);
    }
    return {};
  }

 private:
  static constexpr double lowest = -2;  // below every cosine
  static constexpr double tolerance = 1e-6;

  [[nodiscard]] bool taken(index_t row) const { return std::find(taken_.begin(), taken_.end(), row) != taken_.end(); }
  [[nodiscard]] bool finite(index_t row) const {
    return std::all_of(x_.row(row), x_.row(row) + x_.dim(1), [](float v) { return std::isfinite(v); });
  }
  [[nodiscard]] double dot(index_t a, index_t b) const {
    double sum = 0;
    for (index_t d = 0; d < x_.dim(1); ++d) sum += static_cast<double>(x_.row(a)[d]) * static_cast<double>(x_.row(b)[d]);
    return sum;
  }
  [[nodiscard]] double cosine(index_t a, index_t b) const {
    const double norms = std::sqrt(dot(a, a)) * std::sqrt(dot(b, b));
    return finite(a) && finite(b) && norms > 0 ? dot(a, b) / norms : 0;
  }

  /// The first pick looks at the mean cosine to all rows.
  void start() {
    for (index_t i = 0; i < x_.dim(0); ++i) {
      double sum = 0;
      for (index_t j = 0; j < x_.dim(0); ++j) sum += cosine(i, j);
      nearness_[static_cast<std::size_t>(i)] = sum / static_cast<double>(x_.dim(0));
    }
  }

  [[nodiscard]] std::string judge(index_t pick) const {
    double best = std::numeric_limits<double>::infinity();
    for (index_t i = 0; i < x_.dim(0); ++i) {
      if (taken(i) || !finite(i)) continue;
      best = std::min(best, nearness_[static_cast<std::size_t>(i)]);
      if (i < pick && std::memcmp(x_.row(i), x_.row(pick), static_cast<std::size_t>(x_.dim(1)) * sizeof(float)) == 0)
        return ": row " + std::to_string(i) + " is equal and has a lower index";
    }
    if (!finite(pick)) return std::isfinite(best) ? ": is not finite, but finite rows are left" : "";
    const double nearness = nearness_[static_cast<std::size_t>(pick)];
    if (nearness <= best + tolerance) return {};
    return ": has nearness " + std::to_string(nearness) + ", the best free row has " + std::to_string(best);
  }

  void take(index_t pick) {
    taken_.push_back(pick);
    for (index_t i = 0; i < x_.dim(0); ++i)
      nearness_[static_cast<std::size_t>(i)] = std::max(nearness_[static_cast<std::size_t>(i)], cosine(i, pick));
  }

  const FloatArray& x_;
  std::vector<double> nearness_;
  std::vector<std::int64_t> taken_;
};

/// One row of `sets`: the buffered times, -1 behind them.
void append_padded(std::vector<std::int64_t>& out, std::span<const position_t> tags, index_t width) {
  out.insert(out.end(), tags.begin(), tags.end());
  out.insert(out.end(), static_cast<std::size_t>(std::max<index_t>(0, width - static_cast<index_t>(tags.size()))), -1);
}

}  // namespace

void run_fps(const Case& c, Report& report) {
  const FloatArray x = c.floats("x", {c.integer("n"), c.integer("head_dim")});
  const IndexArray expected = c.integers("selected", {Case::any});
  const index_t m = c.integer("m");
  std::vector<slot_t> selected(static_cast<std::size_t>(std::clamp<index_t>(m, 0, x.dim(0))));
  Workspace work(fps_workspace_size(x.dim(0), x.dim(1)));
  const index_t count = farthest_point_sampling({x.data.data(), x.dim(0), x.dim(1), x.dim(1)}, m, selected, work).or_throw();
  const std::vector<std::int64_t> actual(selected.begin(), selected.begin() + count);

  if (c.exact_indices()) return report.compare("selected", expected, actual);
  report.count();
  if (actual.size() != expected.data.size())
    return report.fail("selected", "expected " + std::to_string(expected.data.size()) + " rows, are " + std::to_string(count));
  if (const std::string wrong = GreedyRun(x).check(actual); !wrong.empty()) report.fail("selected", wrong);
  if (const std::string wrong = GreedyRun(x).check(expected.data); !wrong.empty())
    report.fail("selected", "the case's own " + wrong);
}

void run_continual_fps(const Case& c, Report& report) {
  const FloatArray q = c.floats("q", {c.integer("n_total"), c.integer("head_dim")});
  const IndexArray expected = c.integers("sets", {Case::any, c.integer("n_min")});
  const index_t prompt = prompt_of(c, "n_prefill", q.dim(0));
  ContinualFps buffer = ContinualFps::make(q.dim(1), c.integer("n_min"), c.integer("n_max")).or_throw();
  Workspace work(buffer.workspace_size(prompt));
  std::vector<std::int64_t> sets;
  std::vector<std::int64_t> after{prompt - 1};

  const auto load = [&](index_t i, float* out) { std::copy_n(q.row(i), q.dim(1), out); };
  buffer.prefill(prompt, load, 0, work).or_throw();
  append_padded(sets, buffer.tags(), expected.dim(1));
  for (index_t i = prompt; i < q.dim(0); ++i) {
    const index_t size = buffer.size();
    buffer.push(q.row(i), i, work).or_throw();
    if (buffer.size() > size) continue;
    append_padded(sets, buffer.tags(), expected.dim(1));
    after.push_back(i);
  }
  report.compare("after", c.integers("after", {expected.dim(0)}), after);
  report.compare("sets", expected, sets);
}

}  // namespace beaconkv::conformance
