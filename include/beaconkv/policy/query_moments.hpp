// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Mean and covariance of all queries so far: what the next ones are expected to be.

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "beaconkv/detail/numeric.hpp"
#include "beaconkv/policy/observer.hpp"

namespace beaconkv::inline v0 {

/// Remembers mean and covariance of each query head's pre-RoPE queries, of the prompt and decoded, from position `n_sink` on;
/// numbers in double, one pass (Welford). A query with a NaN or infinity is left out.
///
/// Shows the mean, and behind it rows whose outer products add up to the covariance (divisor: the number of queries), all
/// turned by the mean rotation over the `n_future_positions` positions behind the newest. So `sum over rows of (row . k)^2` is
/// the variance of a key's logit. Their position is that of the newest token.
///
/// State: 4 D^2 bytes a query head. A token costs D^2 / 2 multiplications a query head, an eviction D^3 / 6.
class QueryMoments {
 public:
  struct Options {
    index_t n_sink = 4;
    index_t n_future_positions = 512;
    bool use_covariance = true;
  };
  static constexpr bool needs_queries = true;
  static constexpr bool needs_rope = true;

  QueryMoments(const Shape& shape, const Options& options)
      : options_(options),
        heads_(shape.query_heads),
        dim_(shape.head_dim),
        count_(static_cast<std::size_t>(heads_)),
        mean_(static_cast<std::size_t>(heads_ * dim_)),
        products_(static_cast<std::size_t>(options.use_covariance ? heads_ * triangle(dim_) : 0)),
        row_(static_cast<std::size_t>(heads_ * dim_)),
        gap_(static_cast<std::size_t>(dim_)) {}

  [[nodiscard]] friend Status validate(const Options& options, const Shape&) {
    if (options.n_sink < 0) return detail::invalid("n_sink = ", options.n_sink, ": must not be negative");
    if (options.n_future_positions < 1)
      return detail::invalid("n_future_positions = ", options.n_future_positions, ": must be at least 1");
    return {};
  }

  [[nodiscard]] Status prefill(const QuerySource& queries, Workspace& work) {
    if (Status s = work.require(prefill_workspace_size(queries.view.tokens)); !s) return s;
    const Workspace::Frame frame(work);
    std::optional<RopeCursor> cursor;
    if (queries.unrotate != nullptr) cursor.emplace(*queries.unrotate, work);
    for (index_t t = 0; t < queries.view.tokens; ++t)
      for (index_t h = 0; h < heads_ && queries.first_position + t >= options_.n_sink; ++h) {
        queries.load(t, h, row_.data(), cursor ? &*cursor : nullptr);
        add(h, row_.data());
      }
    return {};
  }
  [[nodiscard]] Status observe(const QuerySource& queries) {
    if (queries.first_position < options_.n_sink) return {};
    queries.load_heads(0, row_.data());
    for (index_t h = 0; h < heads_; ++h) add(h, row_.data() + h * dim_);
    return {};
  }
  [[nodiscard]] Status commit() { return {}; }

  /// Queries of a head that were counted.
  [[nodiscard]] index_t num_queries(index_t head) const noexcept { return count_[static_cast<std::size_t>(head)]; }

  [[nodiscard]] index_t rows() const noexcept {
    return std::any_of(count_.begin(), count_.end(), [](index_t n) { return n > 0; }) ? max_rows() : 0;
  }
  [[nodiscard]] index_t max_rows() const noexcept { return options_.use_covariance ? 1 + dim_ : 1; }

  [[nodiscard]] Status write_rows(const RopeTable* rope, position_t now, Range heads, float* out, position_t* positions,
                                  Workspace& work) const {
    BEACONKV_ASSERT(rope != nullptr);
    const Workspace::Frame frame(work);
    const Scratch scratch(work, dim_, options_.use_covariance);
    std::fill_n(positions, heads.size() * rows(), now);
    const RopeRotation rotation = mean_rotation(*rope, now, scratch.rotation);
    const auto factor = static_cast<float>(rope->attention_factor());
    for (index_t h = heads.first; h < heads.last && rows() > 0; ++h, out += rows() * dim_) {
      for (index_t d = 0; d < dim_; ++d) out[d] = static_cast<float>(mean_[static_cast<std::size_t>(h * dim_ + d)]);
      if (options_.use_covariance) write_roots(h, scratch.matrix, out + dim_);
      rope->apply(rotation, out, rows(), dim_, factor);
    }
    return {};
  }

  [[nodiscard]] WorkspaceSize workspace_size() const {
    return detail::measure([&](Workspace& work) { static_cast<void>(Scratch(work, dim_, options_.use_covariance)); });
  }
  [[nodiscard]] WorkspaceSize prefill_workspace_size(index_t) const { return rope_cursor_workspace_size(dim_); }
  [[nodiscard]] std::size_t state_bytes() const noexcept {
    return count_.size() * sizeof(index_t) + (mean_.size() + products_.size()) * sizeof(double);
  }
  template <class Archive>
  void exchange(Archive& archive) {
    archive.expect("observer", 5);
    archive.expect("n_sink", options_.n_sink);
    archive.array("numbers of queries", std::span(count_));
    archive.array("mean queries", std::span(mean_));
    archive.array("products of queries", std::span(products_));
    if constexpr (Archive::loading)
      for (const index_t n : count_)
        if (n < 0 || n > index_t{1} << 53) archive.fail(detail::error(StatusCode::damaged, "saved state: ", n, " queries"));
  }

 private:
  struct Scratch {
    Scratch(Workspace& work, index_t dim, bool covariance)
        : rotation(work.take<float>(dim)), matrix(work.take<double>(covariance ? triangle(dim) : 0)) {}
    std::span<float> rotation;
    std::span<double> matrix;
  };

  /// Numbers of a symmetric matrix, row by row up to the diagonal.
  [[nodiscard]] static constexpr index_t triangle(index_t n) noexcept { return n * (n + 1) / 2; }

  void add(index_t head, const float* row) {
    if (!detail::all_finite(row, dim_)) return;
    const auto n = static_cast<double>(++count_[static_cast<std::size_t>(head)]);
    double* const mean = mean_.data() + head * dim_;
    for (index_t d = 0; d < dim_; ++d) {
      gap_[static_cast<std::size_t>(d)] = static_cast<double>(row[d]) - mean[d];
      mean[d] += gap_[static_cast<std::size_t>(d)] / n;
    }
    if (!options_.use_covariance) return;
    double* at = products_.data() + head * triangle(dim_);
    for (index_t i = 0; i < dim_; ++i, at += i) {
      const double factor = gap_[static_cast<std::size_t>(i)] * ((n - 1) / n);
      for (index_t j = 0; j <= i; ++j) at[j] += factor * gap_[static_cast<std::size_t>(j)];
    }
  }

  /// Cosines and sines, each the mean over the coming positions: those of the middle, shortened (a geometric series).
  [[nodiscard]] RopeRotation mean_rotation(const RopeTable& rope, position_t now, std::span<float> out) const {
    const auto n = static_cast<double>(options_.n_future_positions);
    const double middle = static_cast<double>(now) + (n + 1) / 2;
    const std::span<const double> freq = rope.inv_freq();
    for (std::size_t p = 0; p < freq.size(); ++p) {
      const double half = std::sin(freq[p] / 2);
      const double length = half == 0 ? 1 : std::sin(n * (freq[p] / 2)) / (n * half);
      out[p] = static_cast<float>(length * std::cos(middle * freq[p]));
      out[freq.size() + p] = static_cast<float>(length * std::sin(middle * freq[p]));
    }
    return {out.first(freq.size()), out.subspan(freq.size(), freq.size())};
  }

  /// The columns of the Cholesky root of a head's covariance as rows; zeros where the covariance has no more rank.
  void write_roots(index_t head, std::span<double> matrix, float* out) const {
    std::fill_n(out, dim_ * dim_, 0.0F);
    const index_t n = count_[static_cast<std::size_t>(head)];
    if (n == 0) return;
    const double* const products = products_.data() + head * triangle(dim_);
    const auto at = [&](index_t i, index_t j) -> double& { return matrix[static_cast<std::size_t>(triangle(i) + j)]; };
    for (index_t i = 0; i < triangle(dim_); ++i) matrix[static_cast<std::size_t>(i)] = products[i] / static_cast<double>(n);
    double largest = 0;
    for (index_t k = 0; k < dim_; ++k) largest = std::max(largest, at(k, k));
    for (index_t k = 0; k < dim_; ++k) {
      if (!(at(k, k) > 1e-14 * largest)) continue;  // below what rounding leaves
      const double root = std::sqrt(at(k, k));
      for (index_t i = k; i < dim_; ++i) {
        at(i, k) /= root;
        out[k * dim_ + i] = static_cast<float>(at(i, k));
      }
      for (index_t i = k + 1; i < dim_; ++i)
        for (index_t j = k + 1; j <= i; ++j) at(i, j) -= at(i, k) * at(j, k);
    }
  }

  Options options_;
  index_t heads_;
  index_t dim_;
  std::vector<index_t> count_;    // of each query head
  std::vector<double> mean_;      // [heads][dim]
  std::vector<double> products_;  // [heads][triangle]: sums of products of what queries are off the mean
  std::vector<float> row_;        // scratch
  std::vector<double> gap_;       // scratch
};
static_assert(Observer<QueryMoments>);

}  // namespace beaconkv::inline v0
