// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Farthest point sampling over a stream, in bounded memory.
///
/// Source: BeaconKV (arXiv 2609.04971) algorithm 2.

#include <algorithm>
#include <cstring>
#include <numeric>
#include <span>
#include <vector>

#include "beaconkv/algorithm/farthest_point_sampling.hpp"

namespace beaconkv::inline v0 {

/// A bounded buffer of rows (queries) that stands for everything pushed into it so far.
///
/// It fills up to `n_max` rows and is then reduced to `n_min` by farthest point sampling; after a reduction rows are in time
/// order. This approximates sampling over the whole history: a row that was dropped cannot come back, so directions that were
/// crowded out early stay lost. A value: copying it forks the stream.
///
/// The cosines among the rows that stay are kept, so that a reduction has to compute only those of newer rows. It does so for
/// all of them at once: at each push every row of the buffer would have to be read again, mostly from memory.
class ContinualFps {
 public:
  /// An empty buffer for rows of `dim`. Allocates `n_max` rows and at most `n_min * (n_min + 1)` floats, nothing later. Needs
  /// `1 <= n_min < n_max`.
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
    return (rows_.size() + cosines_.size() + scale_.size()) * sizeof(float) + tags_.size() * sizeof(position_t);
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
    if constexpr (Archive::loading) known_ = 0;  // what is kept of the cosines is only a cache
  }

  /// Scratch of every call that takes a workspace; `prefill_rows` counts for `prefill` only.
  [[nodiscard]] WorkspaceSize workspace_size(index_t prefill_rows = 0) const {
    const WorkspaceSize reduction =
        detail::measure([&](Workspace& work) { static_cast<void>(Reduction(work, n_max_, *this)); });
    if (prefill_rows == 0) return reduction;
    return max(reduction,
               detail::measure([&](Workspace& work) { static_cast<void>(Prompt(work, n_max_ + prefill_rows, *this)); }));
  }

  /// Adds one row; reduces where the buffer is full. No allocation.
  [[nodiscard]] Status push(const float* row, position_t tag, Workspace& work) {
    if (size_ + 1 >= n_max_)
      if (Status s = work.require(workspace_size()); !s) return s;
    append(row, tag);
    if (size_ >= n_max_) reduce_unchecked(work);
    return {};
  }

  /// Adds `count` rows at once (a prompt) and reduces the buffer and them together, in one shot, where they exceed `n_min`.
  /// A prompt given in chunks is reduced once a chunk. `load(i, out)` writes row `i`; tags ascend from `first_tag`. No
  /// allocation.
  template <class Load>
  [[nodiscard]] Status prefill(index_t count, Load&& load, position_t first_tag, Workspace& work) {
    if (count < 0) return detail::invalid("count = ", count, ": must not be negative");
    if (count == 0) return reduce(work);
    if (Status s = work.require(workspace_size(count)); !s) return s;
    const Workspace::Frame frame(work);
    const index_t old_size = size_;
    const index_t n = old_size + count;
    Prompt prompt(work, n, *this);
    std::copy_n(rows_.data(), old_size * dim_, prompt.rows.data());
    for (index_t i = 0; i < count; ++i) load(i, prompt.rows.data() + (old_size + i) * dim_);
    const std::span<const slot_t> kept = prompt.pick({prompt.rows.data(), n, dim_, dim_}, n_min_);
    const auto first_new = std::lower_bound(kept.begin(), kept.end(), static_cast<slot_t>(old_size));
    keep_rows({kept.begin(), first_new});
    known_ = 0;
    for (const slot_t slot : kept.subspan(static_cast<std::size_t>(first_new - kept.begin())))
      append(prompt.rows.data() + slot * dim_, first_tag + (slot - old_size));
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
    const std::span<const slot_t> kept = r.pick(*this);
    std::copy(kept.begin(), kept.end(), out.begin());
    return static_cast<index_t>(kept.size());
  }

 private:
  ContinualFps(index_t dim, index_t n_min, index_t n_max)
      : dim_(dim),
        n_min_(n_min),
        n_max_(n_max),
        // All cosines cost more than sampling by rows where few of many rows stay.
        by_cosines_(n_max <= 32 || (n_max <= 256 && n_max <= 3 * n_min)),
        rows_(static_cast<std::size_t>(n_max * dim)),
        tags_(static_cast<std::size_t>(n_max)),
        cosines_(static_cast<std::size_t>(by_cosines_ ? n_min * n_min : 0)),
        scale_(static_cast<std::size_t>(by_cosines_ ? n_min : 0)) {}

  /// Scratch of one sampling of `n` buffered rows.
  struct Reduction {
    Reduction(Workspace& work, index_t n, const ContinualFps& buffer)
        : width(buffer.by_cosines_ ? detail::round_up(n, detail::lanes) : 0),
          cosines(work.take<float>(n * width)),
          scale(work.take<float>(buffer.by_cosines_ ? n : 0)),
          nearness(work.take<float>(width)),
          picked(work.take<slot_t>(buffer.n_min_)),
          run(work, buffer.by_cosines_ ? 0 : n, buffer.by_cosines_ ? 0 : buffer.dim_) {}

    /// The rows to keep, in time order.
    [[nodiscard]] std::span<const slot_t> pick(const ContinualFps& buffer) {
      const index_t n = buffer.size_;
      const index_t count = std::min(n, buffer.n_min_);
      if (!buffer.by_cosines_) {
        const index_t found = run.run(buffer.rows(), FpsMetric::cosine, {}, count, picked.data());
        std::sort(picked.begin(), picked.begin() + found);
        return picked.first(static_cast<std::size_t>(found));
      }
      if (count == n) {
        std::iota(picked.begin(), picked.begin() + n, slot_t{0});
        return picked.first(static_cast<std::size_t>(n));
      }
      complete_cosines(buffer);
      const detail::CosineMatrix matrix = matrix_of(buffer);
      detail::run<detail::PickByCosines>(&matrix, count, nearness.data(), static_cast<slot_t*>(nullptr));
      index_t kept = 0;
      for (index_t i = 0; i < n && kept < count; ++i) {
        picked[static_cast<std::size_t>(kept)] = static_cast<slot_t>(i);
        kept += nearness[static_cast<std::size_t>(i)] == detail::chosen_nearness ? 1 : 0;
      }
      return picked.first(static_cast<std::size_t>(kept));
    }

    index_t width;
    std::span<float> cosines;  ///< `[n][width]`
    std::span<float> scale;
    std::span<float> nearness;
    std::span<slot_t> picked;
    detail::FpsRun run;

   private:
    [[nodiscard]] detail::CosineMatrix matrix_of(const ContinualFps& buffer) const noexcept {
      return {buffer.rows_.data(), buffer.dim_,  buffer.dim_,    buffer.size_,
              buffer.known_,       scale.data(), cosines.data(), detail::round_up(buffer.size_, detail::lanes)};
    }

    void complete_cosines(const ContinualFps& buffer) {
      const index_t known = buffer.known_;
      const detail::CosineMatrix matrix = matrix_of(buffer);
      std::copy_n(buffer.scale_.data(), known, scale.data());
      for (index_t i = 0; i < known; ++i)
        std::copy_n(buffer.cosines_.data() + i * buffer.n_min_, known, cosines.data() + i * matrix.width);
      detail::run<detail::RowScales>(buffer.rows_.data() + known * buffer.dim_, buffer.dim_, buffer.dim_, buffer.size_ - known,
                                     scale.data() + known);
      detail::run<detail::CompleteCosines>(&matrix);
      if (std::any_of(scale.begin(), scale.begin() + buffer.size_, [](float s) { return s < 0; }))
        detail::run<detail::CompleteCosines::Mend>(&matrix);
    }
  };

  /// Scratch of one sampling of `n` rows, those of a prompt among them.
  struct Prompt {
    Prompt(Workspace& work, index_t n, const ContinualFps& buffer)
        : rows(work.take<float>(n * buffer.dim_)), picked(work.take<slot_t>(buffer.n_min_)), run(work, n, buffer.dim_) {}

    [[nodiscard]] std::span<const slot_t> pick(const ConstRows& all, index_t n_min) {
      const index_t count = run.run(all, FpsMetric::cosine, {}, std::min(all.rows, n_min), picked.data());
      std::sort(picked.begin(), picked.begin() + count);
      return picked.first(static_cast<std::size_t>(count));
    }

    std::span<float> rows;
    std::span<slot_t> picked;
    detail::FpsRun run;
  };

  void append(const float* row, position_t tag) noexcept {
    std::copy_n(row, dim_, rows_.data() + size_ * dim_);
    tags_[static_cast<std::size_t>(size_)] = tag;
    ++size_;
  }

  void reduce_unchecked(Workspace& work) {
    const Workspace::Frame frame(work);
    Reduction r(work, size_, *this);
    const index_t width = detail::round_up(size_, detail::lanes);
    const std::span<const slot_t> kept = r.pick(*this);
    keep_rows(kept);
    if (!by_cosines_) return;
    float* out = cosines_.data();
    for (std::size_t i = 0; i < kept.size(); ++i) {
      scale_[i] = r.scale[static_cast<std::size_t>(kept[i])];
      const float* const row = r.cosines.data() + kept[i] * width;
      for (const slot_t j : kept) *out++ = row[j];
    }
    known_ = n_min_;
  }

  /// Keeps the buffered rows among the ascending `kept`, in place.
  void keep_rows(std::span<const slot_t> kept) noexcept {
    size_ = 0;
    for (const slot_t slot : kept) {
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
  bool by_cosines_;
  index_t size_ = 0;
  index_t known_ = 0;  // of the first rows, all cosines are in `cosines_`: of those that the last reduction kept, or none
  std::vector<float> rows_;
  std::vector<position_t> tags_;
  std::vector<float> cosines_;  // `[n_min][n_min]`
  std::vector<float> scale_;    // `[n_min]`
};

}  // namespace beaconkv::inline v0
