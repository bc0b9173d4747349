// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// The observer of BeaconKV: recent queries, and beacon queries sampled from everything older.

#include <algorithm>
#include <optional>
#include <span>
#include <vector>

#include "beaconkv/algorithm/continual_fps.hpp"
#include "beaconkv/policy/observer.hpp"

namespace beaconkv::inline v0 {

/// BeaconKV's memory: the newest `n_recent_queries` queries, and `n_beacon` beacon queries of each query head, sampled from
/// everything older (arXiv 2609.04971, section 4 and algorithm 2). Kept pre-RoPE.
///
/// Queries that are not recent any more enter their head's `ContinualFps`, in the paper's cycle; prompt queries go there
/// directly. With a period between evictions of at least `n_recent_queries` this is the paper's cycle (freeze, collect, evict,
/// merge) step for step, and it serves an engine that evicts at moments of its own as well.
///
/// Until a sampling they wait in the ring, all heads of a token together: a token costs one write in one place, and a sampling
/// copies only queries that stay.
class BeaconQueries {
 public:
  struct Options {
    index_t n_beacon = 16;
    index_t n_recent_queries = 16;
  };
  static constexpr bool needs_queries = true;
  static constexpr bool needs_rope = true;

  BeaconQueries(const Shape& shape, const Options& options)
      : heads_(shape.query_heads),
        dim_(shape.head_dim),
        n_beacon_(options.n_beacon),
        n_recent_(options.n_recent_queries),
        ring_(shape, n_beacon_ == 0 ? n_recent_ : 2 * n_recent_ - 1),
        scratch_(WorkspaceSize{}) {
    if (n_beacon_ == 0) return;
    const Result<ContinualFps> empty = ContinualFps::make(dim_, n_beacon_, n_beacon_ + 1);
    BEACONKV_ASSERT(empty.ok());
    beacons_.assign(static_cast<std::size_t>(heads_), *empty);
    scratch_ = Workspace(sampling_workspace_size());
  }

  [[nodiscard]] friend Status validate(const Options& options, const Shape&) {
    if (options.n_beacon < 0) return detail::invalid("n_beacon = ", options.n_beacon, ": must not be negative");
    if (options.n_recent_queries < 1)
      return detail::invalid("n_recent_queries = ", options.n_recent_queries, ": must be at least 1");
    return {};
  }

  [[nodiscard]] Status prefill(const QuerySource& queries, Workspace& work) {
    if (beacons_.empty()) return {};
    if (Status s = work.require(prefill_workspace_size(queries.view.tokens)); !s) return s;
    const Workspace::Frame frame(work);
    std::optional<RopeCursor> cursor;
    if (queries.unrotate != nullptr) cursor.emplace(*queries.unrotate, work);
    const index_t waiting = num_waiting();
    const auto position = [&](index_t i) { return i < waiting ? ring_.position(i) : queries.first_position + (i - waiting); };
    for (index_t h = 0; h < heads_; ++h) {
      const auto load = [&](index_t i, float* out) {
        if (i < waiting)
          std::copy_n(ring_.row(i, h), dim_, out);
        else
          queries.load(i - waiting, h, out, cursor ? &*cursor : nullptr);
      };
      if (Status s = of(h).prefill(waiting + queries.view.tokens, load, position, work); !s) return s;
    }
    ring_.drop_oldest(waiting);
    return {};
  }

  [[nodiscard]] Status observe(const QuerySource& queries) {
    if (!beacons_.empty() && ring_.size() >= n_recent_) {  // the oldest recent query waits, too, from now on
      const index_t waiting = num_waiting() + 1;
      Status s;
      if (beacons_[0].size() + waiting == n_beacon_ + n_recent_)
        s = merge(waiting);
      else if (waiting == n_recent_)
        s = merge(1);  // there is room for it among the beacons
      if (!s) return s;
    }
    ring_.push(queries, 0);
    return {};
  }

  /// After an eviction: beacons and waiting queries go down to `n_beacon`, to the very rows that `write_rows` showed.
  [[nodiscard]] Status commit() { return pool_size() > n_beacon_ ? merge(num_waiting()) : Status{}; }

  /// The pool of a head: its beacons, and queries that wait to be sampled, in the order in which they entered (time order, but
  /// that recent queries of before a second prompt enter behind it). All heads have equally many, up to
  /// `n_beacon + n_recent_queries - 1`.
  [[nodiscard]] index_t pool_size() const noexcept { return beacons_.empty() ? 0 : beacons_[0].size() + num_waiting(); }
  [[nodiscard]] const float* pool_row(index_t head, index_t i) const noexcept {
    const index_t bank = of(head).size();
    return i < bank ? of(head).rows().row(i) : ring_.row(i - bank, head);
  }
  [[nodiscard]] position_t pool_position(index_t head, index_t i) const noexcept {
    const index_t bank = of(head).size();
    return i < bank ? of(head).tags()[static_cast<std::size_t>(i)] : ring_.position(i - bank);
  }
  [[nodiscard]] index_t num_recent() const noexcept { return ring_.size() - num_waiting(); }
  /// Of the recent queries, oldest first.
  [[nodiscard]] position_t recent_position(index_t i) const noexcept { return ring_.position(num_waiting() + i); }

  /// Beacons of each head that `write_rows` shows now.
  [[nodiscard]] index_t num_beacons() const noexcept { return std::min(n_beacon_, pool_size()); }
  /// Beacons first, then the recent queries, oldest first. All heads have equally many.
  [[nodiscard]] index_t rows() const noexcept { return num_beacons() + num_recent(); }
  [[nodiscard]] index_t max_rows() const noexcept { return n_beacon_ + n_recent_; }

  /// Beacons rotated to `now`, recent queries to their own positions. Where the beacons were observed goes to `tags`
  /// `[heads][num_beacons()]`, in the order of the pool, unless that is null.
  [[nodiscard]] Status write_rows(const RopeTable* rope, position_t now, Range heads, float* out, position_t* positions,
                                  Workspace& work, position_t* tags = nullptr) const {
    return write_rows_by(*this, rope, now, heads, out, positions, work, tags);
  }
  /// The same, and remembers what it sampled for a `commit` that follows before the next query. Different heads may be written
  /// at the same time.
  [[nodiscard]] Status write_rows(const RopeTable* rope, position_t now, Range heads, float* out, position_t* positions,
                                  Workspace& work, position_t* tags = nullptr) {
    return write_rows_by(*this, rope, now, heads, out, positions, work, tags);
  }

  /// Where the queries that `write_rows` reads are stored.
  void add_ahead(Range heads, detail::MemoryAhead& to) const noexcept {
    ring_.add_ahead(heads, to);
    for (index_t h = heads.first; h < heads.last && !beacons_.empty(); ++h)
      to.add(detail::rows_ahead(of(h).rows().data, dim_, dim_, of(h).size()));
  }

  [[nodiscard]] WorkspaceSize workspace_size() const {
    return detail::measure([&](Workspace& work) {
      static_cast<void>(work.take<std::byte>(static_cast<index_t>(detail::RowRotation::workspace_size(dim_).bytes)));
      static_cast<void>(work.take<slot_t>(n_beacon_));
      static_cast<void>(work.take<std::byte>(static_cast<index_t>(sampling_workspace_size().bytes)));
    });
  }
  [[nodiscard]] WorkspaceSize prefill_workspace_size(index_t tokens) const {
    if (beacons_.empty()) return {};
    return {rope_cursor_workspace_size(dim_).bytes + beacons_[0].workspace_size(n_recent_ + tokens).bytes, 0, 0};
  }
  [[nodiscard]] std::size_t state_bytes() const noexcept { return ring_.state_bytes() + beacon_bytes(); }
  /// The beacons' part of it; the rest are recent queries and those that wait.
  [[nodiscard]] std::size_t beacon_bytes() const noexcept {
    std::size_t bytes = 0;
    for (const ContinualFps& b : beacons_) bytes += b.state_bytes();
    return bytes;
  }

  template <class Archive>
  void exchange(Archive& archive) {
    archive.expect("observer", 3);
    archive.expect("n_beacon", n_beacon_);
    archive.expect("n_recent_queries", n_recent_);
    ring_.exchange(archive);
    for (ContinualFps& b : beacons_) b.exchange(archive);
    if constexpr (Archive::loading)  // all heads have equally many
      for (const ContinualFps& b : beacons_)
        if (b.size() != beacons_[0].size())
          archive.fail(detail::error(StatusCode::damaged, "saved state: heads have ", beacons_[0].size(), " and ", b.size(),
                                     " beacons"));
  }

 private:
  [[nodiscard]] ContinualFps& of(index_t head) noexcept { return beacons_[static_cast<std::size_t>(head)]; }
  [[nodiscard]] const ContinualFps& of(index_t head) const noexcept { return beacons_[static_cast<std::size_t>(head)]; }
  [[nodiscard]] index_t num_waiting() const noexcept { return std::max<index_t>(0, ring_.size() - n_recent_); }

  /// `Self` is this class, const where nothing is remembered.
  template <class Self>
  [[nodiscard]] static Status write_rows_by(Self& self, const RopeTable* rope, position_t now, Range heads, float* out,
                                            position_t* positions, Workspace& work, position_t* tags) {
    BEACONKV_ASSERT(rope != nullptr);
    const Workspace::Frame frame(work);
    detail::RowRotation rotation(work, rope);
    const index_t dim = self.dim_;
    const index_t n = self.rows();
    const index_t beacons_of_head = self.num_beacons();
    if (beacons_of_head > 0) {
      const std::span<slot_t> room = work.take<slot_t>(self.n_beacon_);
      rotation.at(now);
      const Status sampled =
          self.for_each_head(heads, self.num_waiting(), work, [&](index_t h, const WaitingRows& waiting, auto next) -> Status {
            const Result<std::span<const slot_t>> kept = self.sample(h, waiting, next, room, work);
            if (!kept) return kept.status();
            const auto slot = [&](index_t r) { return (*kept)[static_cast<std::size_t>(r)]; };
            const index_t i = h - heads.first;
            for (index_t r = 0, end = 0; r < beacons_of_head; r = end) {  // rows that lie one behind the other at once
              while (++end < beacons_of_head && slot(end) == slot(end - 1) + 1 && slot(end) < self.of(h).size()) continue;
              rotation.write(self.pool_row(h, slot(r)), dim, dim, end - r, out + (i * n + r) * dim, dim);
            }
            std::fill_n(positions + i * n, beacons_of_head, now);
            if (tags != nullptr)
              for (index_t r = 0; r < beacons_of_head; ++r) tags[i * beacons_of_head + r] = self.pool_position(h, slot(r));
            return {};
          });
      if (!sampled) return sampled;
    }
    self.ring_.write(self.num_waiting(), self.num_recent(), heads, rotation, beacons_of_head, n, out, positions);
    return {};
  }
  /// The beacons of a head's pool, ascending; to `room`, or remembered.
  [[nodiscard]] Result<std::span<const slot_t>> sample(index_t head, const WaitingRows& waiting,
                                                       std::span<const float* const> next, std::span<slot_t> room,
                                                       Workspace& work) const {
    const Result<index_t> count = of(head).would_keep(room, work, waiting, next);
    if (!count) return count.status();
    return std::span<const slot_t>(room.first(static_cast<std::size_t>(*count)));
  }
  [[nodiscard]] Result<std::span<const slot_t>> sample(index_t head, const WaitingRows& waiting,
                                                       std::span<const float* const> next, std::span<slot_t>, Workspace& work) {
    return of(head).sample(waiting, work, next);
  }

  /// The oldest `count` queries of the ring go to the beacons. It is always the oldest that wait: what was sampled of as many
  /// was sampled of these.
  [[nodiscard]] Status merge(index_t count) {
    const Status s = for_each_head({0, heads_}, count, scratch_, [&](index_t h, const WaitingRows& waiting, auto next) {
      return of(h).merge_sampled(waiting, scratch_, next);
    });
    if (s) ring_.drop_oldest(count);
    return s;
  }

  /// Calls `use(head, waiting, next)` for the oldest `count` queries of the ring, for each of the `heads`; `next` are all rows
  /// that the head behind it will be sampled from.
  template <class Use>
  [[nodiscard]] Status for_each_head(Range heads, index_t count, Workspace& work, Use use) const {
    if (heads.size() <= 0) return {};
    const Workspace::Frame frame(work);
    const index_t bank = beacons_[0].size();
    std::span<const float*> rows = work.take<const float*>(n_beacon_ + n_recent_).first(static_cast<std::size_t>(bank + count));
    std::span<const float*> next = work.take<const float*>(n_beacon_ + n_recent_).first(rows.size());
    const std::span<position_t> tags = work.take<position_t>(n_recent_).first(static_cast<std::size_t>(count));
    const auto gather = [&](index_t h) {
      for (index_t i = 0; i < bank; ++i) next[static_cast<std::size_t>(i)] = of(h).rows().row(i);
      for (index_t i = 0; i < count; ++i) next[static_cast<std::size_t>(bank + i)] = ring_.row(i, h);
    };
    for (index_t i = 0; i < count; ++i) tags[static_cast<std::size_t>(i)] = ring_.position(i);
    gather(heads.first);
    for (index_t h = heads.first; h < heads.last; ++h) {
      std::swap(rows, next);
      if (h + 1 < heads_)
        gather(h + 1);
      else
        next = {};
      if (Status s =
              use(h, WaitingRows{rows.subspan(static_cast<std::size_t>(bank)), tags}, std::span<const float* const>(next));
          !s)
        return s;
    }
    return {};
  }
  [[nodiscard]] WorkspaceSize sampling_workspace_size() const {
    return detail::measure([&](Workspace& work) {
      if (beacons_.empty()) return;
      static_cast<void>(work.take<const float*>(n_beacon_ + n_recent_));
      static_cast<void>(work.take<const float*>(n_beacon_ + n_recent_));
      static_cast<void>(work.take<position_t>(n_recent_));
      static_cast<void>(
          work.take<std::byte>(static_cast<index_t>(beacons_[0].merge_workspace_size(n_beacon_ + n_recent_, n_recent_).bytes)));
    });
  }

  index_t heads_;
  index_t dim_;
  index_t n_beacon_;
  index_t n_recent_;
  detail::QueryRing ring_;             // the recent queries, and up to `n_recent - 1` older ones that wait
  std::vector<ContinualFps> beacons_;  // of each query head; empty where n_beacon is 0
  Workspace scratch_;                  // for the samplings while decoding, where no caller's workspace is at hand
};

static_assert(Observer<BeaconQueries>);

}  // namespace beaconkv::inline v0
