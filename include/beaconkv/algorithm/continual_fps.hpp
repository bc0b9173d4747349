// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Farthest point sampling over a stream, in bounded memory.
///
/// Source: BeaconKV (arXiv 2609.04971) algorithm 2.

#include <algorithm>
#include <cstring>
#include <span>
#include <vector>

#include "beaconkv/algorithm/farthest_point_sampling.hpp"

namespace beaconkv::inline v0 {

/// A bounded buffer of rows (queries) that stands for everything pushed into it so far.
///
/// It fills up to `n_max` rows and is then reduced to `n_min` by farthest point sampling; after a reduction rows are in time
/// order. This approximates sampling over the whole history: a row that was dropped cannot come back, so directions that were
/// crowded out early stay lost. A value: copying it forks the stream.
class ContinualFps {
 public:
  /// An empty buffer for rows of `dim`. Allocates `n_max * dim` floats, nothing later. Needs `1 <= n_min < n_max`.
  [[nodiscard]] static Result<ContinualFps> make(index_t dim, index_t n_min, index_t n_max) {
    if (dim < 1) return detail::invalid("dim = ", dim, ": must be at least 1");
    if (n_min < 1) return detail::invalid("n_min = ", n_min, ": must be at least 1");
    if (n_max <= n_min) return detail::invalid("n_max = ", n_max, ": must be above n_min = ", n_min);
    return ContinualFps(dim, n_min, n_max);
  }

  [[nodiscard]] index_t dim() const noexcept { return dim_; }
  [[nodiscard]] index_t size() const noexcept { return size_; }
  [[nodiscard]] index_t n_min() const noexcept { return n_min_; }
  [[nodiscard]] index_t n_max() const noexcept { return n_max_; }
  /// The buffered rows, in time order.
  [[nodiscard]] ConstRows rows() const noexcept { return {rows_.data(), size_, dim_, dim_}; }
  /// What was pushed along with each row (its position).
  [[nodiscard]] std::span<const position_t> tags() const noexcept {
    return std::span(tags_).first(static_cast<std::size_t>(size_));
  }
  [[nodiscard]] std::size_t state_bytes() const noexcept {
    return rows_.size() * sizeof(float) + tags_.size() * sizeof(position_t);
  }

  /// Saves or loads the buffered rows (`archive.hpp`).
  template <class Archive>
  void exchange(Archive& archive) {
    archive.expect("dim", dim_);
    archive.expect("n_beacon", n_min_);
    archive.expect("n_max", n_max_);
    archive.value("number of beacons", size_, 0, n_max_ - 1);
    archive.array("beacons", std::span(rows_).first(static_cast<std::size_t>(size_ * dim_)));
    archive.array("beacon positions", std::span(tags_).first(static_cast<std::size_t>(size_)));
  }

  /// Scratch of every call that takes a workspace; `prefill_rows` counts for `prefill` only.
  [[nodiscard]] WorkspaceSize workspace_size(index_t prefill_rows = 0) const {
    return detail::measure([&](Workspace& work) { static_cast<void>(Reduction(work, n_max_ + prefill_rows, *this)); });
  }

  /// Adds one row; reduces where the buffer is full. No allocation.
  [[nodiscard]] Status push(const float* row, position_t tag, Workspace& work) {
    if (size_ + 1 >= n_max_)
      if (Status s = work.require(workspace_size()); !s) return s;
    std::copy(row, row + dim_, rows_.data() + size_ * dim_);
    tags_[static_cast<std::size_t>(size_)] = tag;
    ++size_;
    if (size_ >= n_max_) reduce_unchecked(work);
    return {};
  }

  /// Adds `count` rows at once (a prompt) and reduces the buffer and them together, in one shot, where they exceed `n_min`.
  /// A prompt given in chunks is reduced once a chunk. `load(i, out)` writes row `i`; tags ascend from `first_tag`. No
  /// allocation.
  template <class Load>
  [[nodiscard]] Status prefill(index_t count, Load&& load, position_t first_tag, Workspace& work) {
    if (count < 0) return detail::invalid("count = ", count, ": must not be negative");
    if (Status s = work.require(workspace_size(count)); !s) return s;
    const Workspace::Frame frame(work);
    Reduction r(work, size_ + count, *this);
    for (index_t i = 0; i < count; ++i) {
      load(i, r.run.point(size_ + i));
      r.run.prepare(size_ + i);
    }
    const std::span<const slot_t> kept = r.pick(size_ + count, *this);
    keep_rows(kept);
    for (const slot_t slot : kept.subspan(static_cast<std::size_t>(size_))) {
      load(slot - r.old_size, rows_.data() + size_ * dim_);
      tags_[static_cast<std::size_t>(size_)] = first_tag + (slot - r.old_size);
      ++size_;
    }
    return {};
  }

  /// Reduces to `n_min` rows now; nothing happens where there are no more. No allocation.
  [[nodiscard]] Status reduce(Workspace& work) {
    if (size_ <= n_min_) return {};
    if (Status s = work.require(workspace_size()); !s) return s;
    reduce_unchecked(work);
    return {};
  }

  /// The rows that `reduce` would keep, ascending, without doing it: at most `n_min`, written to `out`. No allocation.
  [[nodiscard]] Result<index_t> would_keep(std::span<slot_t> out, Workspace& work) const {
    const index_t count = std::min(size_, n_min_);
    if (static_cast<index_t>(out.size()) < count)
      return detail::invalid("out has room for ", out.size(), " rows: ", count, " are needed");
    if (Status s = work.require(workspace_size()); !s) return s;
    const Workspace::Frame frame(work);
    Reduction r(work, size_, *this);
    const std::span<const slot_t> kept = r.pick(size_, *this);
    std::copy(kept.begin(), kept.end(), out.begin());
    return static_cast<index_t>(kept.size());
  }

 private:
  ContinualFps(index_t dim, index_t n_min, index_t n_max)
      : dim_(dim),
        n_min_(n_min),
        n_max_(n_max),
        rows_(static_cast<std::size_t>(n_max * dim)),
        tags_(static_cast<std::size_t>(n_max)) {}

  /// Scratch of one sampling over the buffered rows and `n - size` more.
  struct Reduction {
    Reduction(Workspace& work, index_t n, const ContinualFps& buffer)
        : picked(work.take<slot_t>(n)), run(work, n, buffer.dim_, FpsMetric::cosine), old_size(buffer.size_) {}

    /// The rows to keep of `n` loaded ones, in time order.
    [[nodiscard]] std::span<const slot_t> pick(index_t n, const ContinualFps& buffer) {
      for (index_t i = 0; i < buffer.size_; ++i) {
        std::copy(buffer.rows().row(i), buffer.rows().row(i) + buffer.dim_, run.point(i));
        run.prepare(i);
      }
      const index_t count = run.run({}, std::min(n, buffer.n_min_), picked.data());
      const std::span<slot_t> kept = picked.first(static_cast<std::size_t>(count));
      std::sort(kept.begin(), kept.end());
      return kept;
    }

    std::span<slot_t> picked;
    detail::FpsRun run;
    index_t old_size;
  };

  void reduce_unchecked(Workspace& work) {
    const Workspace::Frame frame(work);
    Reduction r(work, size_, *this);
    keep_rows(r.pick(size_, *this));
  }

  /// Keeps the buffered rows among the ascending `kept`, in place.
  void keep_rows(std::span<const slot_t> kept) noexcept {
    const index_t old_size = size_;
    size_ = 0;
    for (const slot_t slot : kept) {
      if (slot >= old_size) break;
      if (slot != size_) {
        std::memcpy(rows_.data() + size_ * dim_, rows_.data() + slot * dim_, static_cast<std::size_t>(dim_) * sizeof(float));
        tags_[static_cast<std::size_t>(size_)] = tags_[static_cast<std::size_t>(slot)];
      }
      ++size_;
    }
  }

  index_t dim_;
  index_t n_min_;
  index_t n_max_;
  index_t size_ = 0;
  std::vector<float> rows_;
  std::vector<position_t> tags_;
};

}  // namespace beaconkv::inline v0
