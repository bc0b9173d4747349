// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Farthest point sampling over a stream, in bounded memory.
///
/// Source: BeaconKV (arXiv 2609.04971) algorithm 2.

#include <algorithm>
#include <concepts>
#include <numeric>
#include <span>
#include <vector>

#include "beaconkv/algorithm/farthest_point_sampling.hpp"

namespace beaconkv::inline v0 {

/// Rows that have not been copied into a `ContinualFps` yet, in time order, with what goes along with each (its position).
struct WaitingRows {
  std::span<const float* const> rows{};
  std::span<const position_t> tags{};

  [[nodiscard]] index_t size() const noexcept { return static_cast<index_t>(rows.size()); }
};

/// A bounded buffer of rows (queries) that stands for everything pushed into it so far.
///
/// It fills up to `n_max` rows and is then reduced to `n_min` by farthest point sampling; after a reduction rows are in time
/// order. This approximates sampling over the whole history: a row that was dropped cannot come back, so directions that were
/// crowded out early stay lost. A value: copying it forks the stream.
///
/// Rows come one by one (`push`), or wait where they are until `merge` takes those that stay: for many buffers that are fed
/// together that is cheaper, since a push to each of them fetches a line of memory from each.
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
    return (rows_.size() + cosines_.size() + scale_.size()) * sizeof(float) + tags_.size() * sizeof(position_t) +
           kept_.size() * sizeof(slot_t);
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
    if constexpr (Archive::loading) known_ = sampled_ = 0;  // only a cache
  }

  /// Scratch of every call that takes a workspace and no waiting rows; `prefill_rows` counts for `prefill` only.
  [[nodiscard]] WorkspaceSize workspace_size(index_t prefill_rows = 0) const {
    const WorkspaceSize size = merge_workspace_size(n_max_, 0);
    return prefill_rows == 0 ? size : max(size, by_rows_workspace_size(n_max_ + prefill_rows, prefill_rows));
  }
  /// Scratch of `merge` and `would_keep` where at most `n` rows, `waiting` of which wait, are sampled.
  [[nodiscard]] WorkspaceSize merge_workspace_size(index_t n, index_t waiting) const {
    const index_t few = std::min(n, most_by_cosines());
    const WorkspaceSize size = detail::measure([&](Workspace& work) { static_cast<void>(ByCosines(work, few, *this)); });
    return n == few ? size : max(size, by_rows_workspace_size(n, waiting));
  }
  /// Adds one row; reduces where the buffer is full. No allocation.
  [[nodiscard]] Status push(const float* row, position_t tag, Workspace& work) {
    if (size_ + 1 >= n_max_)
      if (Status s = work.require(workspace_size()); !s) return s;
    append(row, tag);
    return size_ < n_max_ ? Status{} : merge({}, work);
  }

  /// Adds rows that wait elsewhere and reduces them and the buffer together to `n_min`; copies only those that stay. Meanwhile
  /// asks for the rows of `next`, which the next call will read. No allocation.
  [[nodiscard]] Status merge(const WaitingRows& waiting, Workspace& work, std::span<const float* const> next = {}) {
    sampled_ = 0;
    return merge_sampled(waiting, work, next);
  }
  /// The same with the waiting rows of the last `sample`, if nothing has come or gone since: then nothing is sampled again.
  [[nodiscard]] Status merge_sampled(const WaitingRows& waiting, Workspace& work, std::span<const float* const> next = {}) {
    const index_t n = size_ + waiting.size();
    if (Status s = sample(waiting, work, next).status(); !s) return s;
    if (n <= n_min_) {
      for (std::size_t i = 0; i < waiting.rows.size(); ++i) append(waiting.rows[i], waiting.tags[i]);
      return {};
    }
    keep_rows(kept_, waiting);
    if (n <= most_by_cosines()) known_ = n_min_;
    return {};
  }
  /// The rows that `merge` would keep, ascending, good until the next call that is not const. Waiting rows count on from the
  /// buffered ones. Remembers them for `merge_sampled`, and for another `sample` of the same waiting rows. No allocation.
  [[nodiscard]] Result<std::span<const slot_t>> sample(const WaitingRows& waiting, Workspace& work,
                                                       std::span<const float* const> next = {}) {
    if (Status s = check(waiting, work); !s) return s;
    const index_t n = size_ + waiting.size();
    const std::span<const slot_t> kept = std::span(kept_).first(static_cast<std::size_t>(std::min(n, n_min_)));
    if (sampled_ == n) return kept;
    sampled_ = 0;
    if (n <= n_min_) {
      std::iota(kept_.begin(), kept_.begin() + n, slot_t{0});
      return kept;
    }
    const Workspace::Frame frame(work);
    if (n <= most_by_cosines()) {
      ByCosines sampling(work, n, *this);
      const std::span<const slot_t> picked = sampling.pick(*this, waiting, next);
      std::copy(picked.begin(), picked.end(), kept_.begin());
      sampling.keep_cosines(*this);
    } else {
      const std::span<const slot_t> picked = ByRows(work, n, waiting.size(), *this).pick(*this, waiting);
      std::copy(picked.begin(), picked.end(), kept_.begin());
    }
    known_ = 0;
    sampled_ = n;
    return kept;
  }

  /// Adds `count` rows at once (a prompt) and reduces the buffer and them together, in one shot, where they exceed `n_min`.
  /// A prompt given in chunks is reduced once a chunk. `load(i, out)` writes row `i`; `tag_of(i)` is its tag. No allocation.
  template <class Load, class TagOf>
  requires std::invocable<TagOf, index_t>
  [[nodiscard]] Status prefill(index_t count, Load&& load, TagOf&& tag_of, Workspace& work) {
    if (count < 0) return detail::invalid("count = ", count, ": must not be negative");
    if (count == 0) return reduce(work);
    if (Status s = work.require(workspace_size(count)); !s) return s;
    const Workspace::Frame frame(work);
    const index_t old_size = size_;
    ByRows sampling(work, old_size + count, count, *this);
    for (index_t i = 0; i < count; ++i) load(i, sampling.row(old_size + i));
    const std::span<const slot_t> kept = sampling.pick(*this);
    const auto first_new = std::lower_bound(kept.begin(), kept.end(), static_cast<slot_t>(old_size));
    keep_rows({kept.begin(), first_new}, {});
    for (const slot_t slot : kept.subspan(static_cast<std::size_t>(first_new - kept.begin())))
      append(sampling.row(slot), tag_of(slot - old_size));
    return {};
  }
  /// The same with tags that ascend from `first_tag`.
  template <class Load>
  [[nodiscard]] Status prefill(index_t count, Load&& load, position_t first_tag, Workspace& work) {
    return prefill(
        count, load, [&](index_t i) { return first_tag + i; }, work);
  }

  /// Reduces to `n_min` rows now; nothing happens where there are no more. No allocation.
  [[nodiscard]] Status reduce(Workspace& work) { return size_ > n_min_ ? merge({}, work) : Status{}; }

  /// The rows that `merge` would keep, ascending, without doing it: at most `n_min`, written to `out`. Waiting rows count on
  /// from the buffered ones. No allocation.
  [[nodiscard]] Result<index_t> would_keep(std::span<slot_t> out, Workspace& work, const WaitingRows& waiting = {},
                                           std::span<const float* const> next = {}) const {
    const index_t n = size_ + waiting.size();
    const index_t count = std::min(n, n_min_);
    if (static_cast<index_t>(out.size()) < count)
      return detail::invalid("out has room for ", out.size(), " rows: ", count, " are needed");
    if (Status s = check(waiting, work); !s) return s;
    const Workspace::Frame frame(work);
    if (n <= n_min_) {
      std::iota(out.begin(), out.begin() + n, slot_t{0});
    } else if (n <= most_by_cosines()) {
      const std::span<const slot_t> kept = ByCosines(work, n, *this).pick(*this, waiting, next);
      std::copy(kept.begin(), kept.end(), out.begin());
    } else {
      const std::span<const slot_t> kept = ByRows(work, n, waiting.size(), *this).pick(*this, waiting);
      std::copy(kept.begin(), kept.end(), out.begin());
    }
    return count;
  }

 private:
  ContinualFps(index_t dim, index_t n_min, index_t n_max)
      : dim_(dim),
        n_min_(n_min),
        n_max_(n_max),
        rows_(static_cast<std::size_t>(n_max * dim)),
        tags_(static_cast<std::size_t>(n_max)),
        cosines_(static_cast<std::size_t>(n_min < most_by_cosines() ? n_min * n_min : 0)),
        scale_(static_cast<std::size_t>(n_min < most_by_cosines() ? n_min : 0)),
        kept_(static_cast<std::size_t>(n_min)) {}

  /// So many rows are sampled by all their cosines: these cost more than sampling by rows where few of many rows stay.
  [[nodiscard]] index_t most_by_cosines() const noexcept { return std::max<index_t>(32, std::min<index_t>(256, 3 * n_min_)); }

  [[nodiscard]] Status check(const WaitingRows& waiting, const Workspace& work) const {
    if (waiting.rows.size() != waiting.tags.size())
      return detail::invalid("waiting has ", waiting.rows.size(), " rows and ", waiting.tags.size(), " tags");
    return work.require(merge_workspace_size(size_ + waiting.size(), waiting.size()));
  }

  [[nodiscard]] WorkspaceSize by_rows_workspace_size(index_t n, index_t more) const {
    return detail::measure([&](Workspace& work) { static_cast<void>(ByRows(work, n, more, *this)); });
  }

  /// Scratch of one sampling of `n` rows by all their cosines.
  struct ByCosines {
    ByCosines(Workspace& work, index_t n, const ContinualFps& buffer)
        : width(detail::round_up(n, detail::lanes)),
          row(work.take<const float*>(n)),
          cosines(work.take<float>(n * width)),
          scale(work.take<float>(n)),
          nearness(work.take<float>(width)),
          picked(work.take<slot_t>(buffer.n_min_)) {}

    /// The rows to keep, in time order.
    [[nodiscard]] std::span<const slot_t> pick(const ContinualFps& buffer, const WaitingRows& waiting,
                                               std::span<const float* const> next) {
      const auto n = static_cast<index_t>(row.size());
      for (index_t i = 0; i < buffer.size_; ++i) row[static_cast<std::size_t>(i)] = buffer.rows().row(i);
      std::copy(waiting.rows.begin(), waiting.rows.end(), row.begin() + buffer.size_);
      const index_t known = buffer.known_;
      std::copy_n(buffer.scale_.data(), known, scale.data());
      for (index_t i = 0; i < known; ++i)
        std::copy_n(buffer.cosines_.data() + i * buffer.n_min_, known, cosines.data() + i * width);
      detail::run<detail::RowScales>(row.data() + known, buffer.dim_, n - known, scale.data() + known);
      const detail::CosineMatrix matrix{.row = row.data(),
                                        .dim = buffer.dim_,
                                        .n = n,
                                        .known = known,
                                        .scale = scale.data(),
                                        .cosines = cosines.data(),
                                        .width = width,
                                        .next = next.data(),
                                        .num_next = static_cast<index_t>(next.size())};
      detail::run<detail::CompleteCosines>(&matrix);
      if (std::any_of(scale.begin(), scale.end(), [](float s) { return s < 0; }))
        detail::run<detail::CompleteCosines::Mend>(&matrix);
      detail::run<detail::PickByCosines>(&matrix, buffer.n_min_, nearness.data(), static_cast<slot_t*>(nullptr));
      index_t kept = 0;
      for (index_t i = 0; i < n && kept < buffer.n_min_; ++i) {
        picked[static_cast<std::size_t>(kept)] = static_cast<slot_t>(i);
        kept += nearness[static_cast<std::size_t>(i)] == detail::chosen_nearness ? 1 : 0;
      }
      return picked;
    }

    /// Those of the rows that stay are not computed again.
    void keep_cosines(ContinualFps& buffer) const {
      float* out = buffer.cosines_.data();
      for (std::size_t i = 0; i < picked.size(); ++i) {
        buffer.scale_[i] = scale[static_cast<std::size_t>(picked[i])];
        const float* const of_row = cosines.data() + picked[i] * width;
        for (const slot_t j : picked) *out++ = of_row[j];
      }
    }

    index_t width;
    std::span<const float*> row;
    std::span<float> cosines;  ///< `[n][width]`
    std::span<float> scale;
    std::span<float> nearness;
    std::span<slot_t> picked;
  };

  /// Scratch of one sampling of `n` rows, the last `more` of which are not in the buffer.
  struct ByRows {
    ByRows(Workspace& work, index_t n, index_t more, const ContinualFps& buffer)
        : all{nullptr, n, buffer.dim_, buffer.dim_},
          copy(work.take<float>(more > 0 ? n * buffer.dim_ : 0)),
          picked(work.take<slot_t>(buffer.n_min_)),
          run(work, n, buffer.dim_) {}

    [[nodiscard]] float* row(index_t i) const noexcept { return copy.data() + i * all.dim; }

    /// The rows to keep, in time order; those behind the buffer's stand in `copy`.
    [[nodiscard]] std::span<const slot_t> pick(const ContinualFps& buffer) {
      if (!copy.empty()) std::copy_n(buffer.rows_.data(), buffer.size_ * buffer.dim_, copy.data());
      all.data = copy.empty() ? buffer.rows_.data() : copy.data();
      const index_t count = run.run(all, FpsMetric::cosine, {}, std::min(all.rows, buffer.n_min_), picked.data());
      std::sort(picked.begin(), picked.begin() + count);
      return picked.first(static_cast<std::size_t>(count));
    }
    [[nodiscard]] std::span<const slot_t> pick(const ContinualFps& buffer, const WaitingRows& waiting) {
      for (index_t i = 0; i < waiting.size(); ++i)
        std::copy_n(waiting.rows[static_cast<std::size_t>(i)], all.dim, row(buffer.size_ + i));
      return pick(buffer);
    }

    ConstRows all;
    std::span<float> copy;
    std::span<slot_t> picked;
    detail::FpsRun run;
  };

  void append(const float* row, position_t tag) noexcept {
    std::copy_n(row, dim_, rows_.data() + size_ * dim_);
    tags_[static_cast<std::size_t>(size_)] = tag;
    ++size_;
    sampled_ = 0;
  }

  /// Keeps the rows among the ascending `kept`: buffered ones in place, then waiting ones.
  void keep_rows(std::span<const slot_t> kept, const WaitingRows& waiting) noexcept {
    const index_t buffered = size_;
    size_ = 0;
    known_ = sampled_ = 0;
    for (const slot_t slot : kept) {
      if (slot >= buffered)
        append(waiting.rows[static_cast<std::size_t>(slot - buffered)],
               waiting.tags[static_cast<std::size_t>(slot - buffered)]);
      else if (slot == size_)
        ++size_;
      else
        append(rows_.data() + slot * dim_, tags_[static_cast<std::size_t>(slot)]);
    }
  }

  index_t dim_;
  index_t n_min_;
  index_t n_max_;
  index_t size_ = 0;
  index_t known_ = 0;  // of the first rows, all cosines are in `cosines_`: of those that the last reduction kept, or none
  std::vector<float> rows_;
  std::vector<position_t> tags_;
  std::vector<float> cosines_;  // `[n_min][n_min]`
  std::vector<float> scale_;    // `[n_min]`
  std::vector<slot_t> kept_;    // by the last sampling of `sampled_` rows, those that wait among them; 0: none
  index_t sampled_ = 0;
};

}  // namespace beaconkv::inline v0
