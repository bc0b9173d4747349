// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Observers: which queries a policy remembers between evictions. The queries of one layer, all query heads.
///
/// An observer is a value with `Options`, `prefill`, `observe`, `rows`, `max_rows`, `write_rows`, `commit`, `state_bytes` and
/// two workspace queries; see the concept `Observer`. One that can be saved has `exchange` (`archive.hpp`), too. Stock models:
/// `NoQueries`, `RecentQueries`, `BeaconQueries`.

#include <algorithm>
#include <concepts>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "beaconkv/algorithm/continual_fps.hpp"
#include "beaconkv/algorithm/rope.hpp"
#include "beaconkv/archive.hpp"

namespace beaconkv::inline v0 {

/// The observed queries as a scorer sees them: rotated to the positions at which they look at the keys.
struct Observations {
  const float* queries = nullptr;           ///< `[query_heads][rows][dim]`, dense
  std::span<const position_t> positions{};  ///< `[query_heads][rows]`; a row does not see keys at later positions
  index_t query_heads = 0;
  index_t rows = 0;
  index_t dim = 0;
  index_t first_query_head = 0;        ///< of the layer's, where only some are shown (a ragged cache is scored head by head)
  std::span<const position_t> tags{};  ///< `[query_heads][beacons]`: where leading rows were observed, for scorers that ask
};

/// Queries on their way into an observer, and what turns them into the form that it keeps.
struct QuerySource {
  QueryView view{};
  position_t first_position = 0;
  /// Set where the queries come rotated and the observer keeps them pre-RoPE.
  const RopeTable* unrotate = nullptr;

  /// One row. For many of them `cursor`, over the table, saves sines and cosines.
  void load(index_t token, index_t head, float* out, RopeCursor* cursor = nullptr) const {
    std::copy_n(view.row(token, head), view.dim, out);
    if (unrotate != nullptr && cursor != nullptr)
      unrotate->apply(cursor->at(-(first_position + token)), out, static_cast<float>(1 / unrotate->attention_factor()));
    else if (unrotate != nullptr)
      unrotate->unrotate(out, first_position + token);
  }
  /// The rows of all heads of a token, one after the other.
  void load_heads(index_t token, float* out) const {
    for (index_t h = 0; h < view.heads; ++h) std::copy_n(view.row(token, h), view.dim, out + h * view.dim);
    if (unrotate != nullptr) unrotate->unrotate_heads(out, view.heads, view.dim, first_position + token);
  }
};

/// What `EvictionPolicy` needs of an observer. `rope` is null where the queries are kept in rotated form.
template <class O>
concept Observer = std::copyable<O> &&
    requires(O observer, const O& view, const Shape& shape, const typename O::Options& options, const QuerySource& queries,
             Workspace& work, const RopeTable* rope, position_t now, float* out, position_t* positions, index_t n) {
  { validate(options, shape) } -> std::same_as<Status>;
  O(shape, options);
  { observer.prefill(queries, work) } -> std::same_as<Status>;
  { observer.observe(queries) } -> std::same_as<Status>;
  { observer.commit() } -> std::same_as<Status>;
  { view.rows() } -> std::same_as<index_t>;
  { view.max_rows() } -> std::same_as<index_t>;
  { view.write_rows(rope, now, out, positions, work) } -> std::same_as<Status>;
  { view.workspace_size() } -> std::same_as<WorkspaceSize>;
  { view.prefill_workspace_size(n) } -> std::same_as<WorkspaceSize>;
  { view.state_bytes() } -> std::same_as<std::size_t>;
  { O::needs_queries } -> std::convertible_to<bool>;
  { O::needs_rope } -> std::convertible_to<bool>;
};

namespace detail {

/// The newest `capacity` tokens' queries, `[token][head][dim]`, with their positions.
class QueryRing {
 public:
  QueryRing(const Shape& shape, index_t capacity)
      : heads_(shape.query_heads),
        dim_(shape.head_dim),
        capacity_(capacity),
        rows_(static_cast<std::size_t>(capacity * heads_ * dim_)),
        positions_(static_cast<std::size_t>(capacity)) {}

  [[nodiscard]] index_t size() const noexcept { return size_; }
  [[nodiscard]] index_t capacity() const noexcept { return capacity_; }
  [[nodiscard]] bool full() const noexcept { return size_ == capacity_; }
  /// Token `i` counts from the oldest.
  [[nodiscard]] const float* row(index_t i, index_t head) const noexcept {
    return rows_.data() + (slot(i) * heads_ + head) * dim_;
  }
  [[nodiscard]] position_t position(index_t i) const noexcept { return positions_[static_cast<std::size_t>(slot(i))]; }
  [[nodiscard]] std::size_t state_bytes() const noexcept {
    return rows_.size() * sizeof(float) + positions_.size() * sizeof(position_t);
  }

  template <class Archive>
  void exchange(Archive& archive) {
    archive.expect("n_recent_queries", capacity_);
    begin_at_oldest();
    archive.value("number of recent queries", size_, 0, capacity_);
    archive.array("recent queries", std::span(rows_).first(static_cast<std::size_t>(size_ * heads_ * dim_)));
    archive.array("positions of recent queries", std::span(positions_).first(static_cast<std::size_t>(size_)));
    if constexpr (Archive::loading)
      for (index_t i = 0; i < size_ && archive.ok(); ++i)
        if (position(i) < 0 || position(i) == std::numeric_limits<position_t>::max())
          archive.fail(error(StatusCode::damaged, "saved state: a recent query at position ", position(i)));
  }

  /// Adds one token; the oldest one makes room.
  void push(const QuerySource& queries, index_t token) {
    if (full()) {
      first_ = (first_ + 1) % capacity_;
      --size_;
    }
    const index_t at = slot(size_);
    queries.load_heads(token, rows_.data() + at * heads_ * dim_);
    positions_[static_cast<std::size_t>(at)] = queries.first_position + token;
    ++size_;
  }

 private:
  [[nodiscard]] index_t slot(index_t i) const noexcept { return (first_ + i) % capacity_; }
  /// The same tokens, so stored that equal states are equal bytes.
  void begin_at_oldest() {
    std::rotate(positions_.begin(), positions_.begin() + first_, positions_.end());
    std::rotate(rows_.begin(), rows_.begin() + first_ * heads_ * dim_, rows_.end());
    first_ = 0;
  }

  index_t heads_;
  index_t dim_;
  index_t capacity_;
  index_t first_ = 0;
  index_t size_ = 0;
  std::vector<float> rows_;
  std::vector<position_t> positions_;
};

/// Rotates `row` to one position after another, forming the angles once for all heads of a position.
class RowRotation {
 public:
  RowRotation(Workspace& work, const RopeTable* rope)
      : rotates_(rope != nullptr), cursor_(rope != nullptr ? *rope : none_, work) {}
  [[nodiscard]] static WorkspaceSize workspace_size(index_t dim) { return rope_cursor_workspace_size(dim); }
  void at(position_t position) {
    if (rotates_) rotation_ = cursor_.at(position);
  }
  void write(const float* row, index_t dim, float* out) const {
    std::copy(row, row + dim, out);
    if (rotates_) cursor_.table().apply(rotation_, out, static_cast<float>(cursor_.table().attention_factor()));
  }

 private:
  RopeTable none_{};
  bool rotates_;
  RopeCursor cursor_;
  RopeRotation rotation_{};
};

}  // namespace detail

/// Remembers nothing: for policies that look at no query.
class NoQueries {
 public:
  struct Options {};
  static constexpr bool needs_queries = false;
  static constexpr bool needs_rope = false;

  NoQueries(const Shape&, const Options&) {}
  [[nodiscard]] friend Status validate(const Options&, const Shape&) { return {}; }
  [[nodiscard]] Status prefill(const QuerySource&, Workspace&) { return {}; }
  [[nodiscard]] Status observe(const QuerySource&) { return {}; }
  [[nodiscard]] Status commit() { return {}; }
  [[nodiscard]] index_t rows() const noexcept { return 0; }
  [[nodiscard]] index_t max_rows() const noexcept { return 0; }
  [[nodiscard]] Status write_rows(const RopeTable*, position_t, float*, position_t*, Workspace&) const { return {}; }
  [[nodiscard]] WorkspaceSize workspace_size() const { return {}; }
  [[nodiscard]] WorkspaceSize prefill_workspace_size(index_t) const { return {}; }
  [[nodiscard]] std::size_t state_bytes() const noexcept { return 0; }
  template <class Archive>
  void exchange(Archive& archive) {
    archive.expect("observer", 0);
  }
};

/// Remembers the queries of the last `count` tokens, of the prompt or decoded.
class RecentQueries {
 public:
  struct Options {
    index_t count = 32;
    /// As published RPC: the newest query stands there twice, and the oldest not at all.
    bool newest_twice = false;
  };
  static constexpr bool needs_queries = true;
  static constexpr bool needs_rope = false;

  RecentQueries(const Shape& shape, const Options& options)
      : heads_(shape.query_heads),
        dim_(shape.head_dim),
        newest_twice_(options.newest_twice && options.count > 1),
        ring_(shape, newest_twice_ ? options.count - 1 : options.count) {}

  [[nodiscard]] friend Status validate(const Options& options, const Shape&) {
    if (options.count < 1) return detail::invalid("n_recent_queries = ", options.count, ": must be at least 1");
    return {};
  }

  [[nodiscard]] Status prefill(const QuerySource& queries, Workspace&) {
    for (index_t t = std::max<index_t>(0, queries.view.tokens - ring_.capacity()); t < queries.view.tokens; ++t)
      ring_.push(queries, t);
    return {};
  }
  [[nodiscard]] Status observe(const QuerySource& queries) {
    ring_.push(queries, 0);
    return {};
  }
  [[nodiscard]] Status commit() { return {}; }

  [[nodiscard]] index_t rows() const noexcept { return ring_.size() + (newest_twice_ && ring_.size() > 0 ? 1 : 0); }
  [[nodiscard]] index_t max_rows() const noexcept { return ring_.capacity() + (newest_twice_ ? 1 : 0); }
  [[nodiscard]] Status write_rows(const RopeTable* rope, position_t, float* out, position_t* positions, Workspace& work) const {
    const Workspace::Frame frame(work);
    detail::RowRotation rotation(work, rope);
    for (index_t r = 0; r < rows(); ++r) {
      const index_t token = std::min(r, ring_.size() - 1);
      rotation.at(ring_.position(token));
      for (index_t h = 0; h < heads_; ++h) {
        rotation.write(ring_.row(token, h), dim_, out + (h * rows() + r) * dim_);
        positions[h * rows() + r] = ring_.position(token);
      }
    }
    return {};
  }
  [[nodiscard]] WorkspaceSize workspace_size() const { return detail::RowRotation::workspace_size(dim_); }
  [[nodiscard]] WorkspaceSize prefill_workspace_size(index_t) const { return {}; }
  [[nodiscard]] std::size_t state_bytes() const noexcept { return ring_.state_bytes(); }
  template <class Archive>
  void exchange(Archive& archive) {
    archive.expect("observer", newest_twice_ ? 2 : 1);
    ring_.exchange(archive);
  }

 private:
  index_t heads_;
  index_t dim_;
  bool newest_twice_;
  detail::QueryRing ring_;
};

/// BeaconKV's memory: the newest `n_recent_queries` queries, and `n_beacon` beacon queries of each query head, sampled from
/// everything older (arXiv 2609.04971, section 4 and algorithm 2). Kept pre-RoPE.
///
/// The query that leaves the ring of recent ones enters its head's `ContinualFps`. Prompt queries go there directly. With a
/// period between evictions of at least `n_recent_queries` this is the paper's cycle (freeze, collect, evict, merge) step for
/// step, and it serves an engine that evicts at moments of its own as well.
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
        ring_(shape, options.n_recent_queries),
        reduction_(WorkspaceSize{}) {
    if (n_beacon_ == 0) return;
    const Result<ContinualFps> empty = ContinualFps::make(dim_, n_beacon_, n_beacon_ + options.n_recent_queries);
    BEACONKV_ASSERT(empty.ok());
    buffers_.assign(static_cast<std::size_t>(heads_), *empty);
    reduction_ = Workspace(empty->workspace_size());
  }

  [[nodiscard]] friend Status validate(const Options& options, const Shape&) {
    if (options.n_beacon < 0) return detail::invalid("n_beacon = ", options.n_beacon, ": must not be negative");
    if (options.n_recent_queries < 1)
      return detail::invalid("n_recent_queries = ", options.n_recent_queries, ": must be at least 1");
    return {};
  }

  [[nodiscard]] Status prefill(const QuerySource& queries, Workspace& work) {
    if (Status s = work.require(prefill_workspace_size(queries.view.tokens)); !s) return s;
    const Workspace::Frame frame(work);
    std::optional<RopeCursor> cursor;
    if (queries.unrotate != nullptr) cursor.emplace(*queries.unrotate, work);
    for (index_t h = 0; h < static_cast<index_t>(buffers_.size()); ++h) {
      const auto load = [&](index_t token, float* out) { queries.load(token, h, out, cursor ? &*cursor : nullptr); };
      if (Status s = buffer(h).prefill(queries.view.tokens, load, queries.first_position, work); !s) return s;
    }
    return {};
  }

  [[nodiscard]] Status observe(const QuerySource& queries) {
    if (ring_.full())
      for (index_t h = 0; h < static_cast<index_t>(buffers_.size()); ++h)
        if (Status s = buffer(h).push(ring_.row(0, h), ring_.position(0), reduction_); !s) return s;
    ring_.push(queries, 0);
    return {};
  }

  /// After an eviction: the continual buffers go down to `n_beacon`, to the very rows that `write_rows` showed.
  [[nodiscard]] Status commit() {
    for (ContinualFps& b : buffers_)
      if (Status s = b.reduce(reduction_); !s) return s;
    return {};
  }

  /// Beacons of a head as they stand between evictions (up to `n_beacon + n_recent_queries - 1`).
  [[nodiscard]] const ContinualFps& beacons(index_t head) const noexcept { return buffers_[static_cast<std::size_t>(head)]; }
  [[nodiscard]] index_t num_recent() const noexcept { return ring_.size(); }

  /// Beacons first, then the recent queries, oldest first. All heads have equally many.
  [[nodiscard]] index_t rows() const noexcept { return num_beacons() + ring_.size(); }
  [[nodiscard]] index_t max_rows() const noexcept { return n_beacon_ + ring_.capacity(); }
  [[nodiscard]] index_t num_beacons() const noexcept { return buffers_.empty() ? 0 : std::min(n_beacon_, buffers_[0].size()); }

  /// Beacons rotated to `now` (unless `tags` is null: where they were observed, ascending), recent queries to their positions.
  [[nodiscard]] Status write_rows(const RopeTable* rope, position_t now, float* out, position_t* positions, Workspace& work,
                                  position_t* tags = nullptr) const {
    BEACONKV_ASSERT(rope != nullptr);
    const Workspace::Frame frame(work);
    detail::RowRotation rotation(work, rope);
    const index_t n = rows();
    const index_t beacons_of_head = num_beacons();
    if (beacons_of_head > 0) {
      const std::span<slot_t> kept = work.take<slot_t>(n_beacon_);
      rotation.at(now);
      for (index_t h = 0; h < heads_; ++h) {
        const ContinualFps& b = beacons(h);
        if (Result<index_t> count = b.would_keep(kept, work); !count) return count.status();
        for (index_t r = 0; r < beacons_of_head; ++r) {
          rotation.write(b.rows().row(kept[static_cast<std::size_t>(r)]), dim_, out + (h * n + r) * dim_);
          positions[h * n + r] = now;
          if (tags != nullptr) *tags++ = b.tags()[static_cast<std::size_t>(kept[static_cast<std::size_t>(r)])];
        }
      }
    }
    for (index_t i = 0; i < ring_.size(); ++i) {
      rotation.at(ring_.position(i));
      for (index_t h = 0; h < heads_; ++h) {
        rotation.write(ring_.row(i, h), dim_, out + (h * n + beacons_of_head + i) * dim_);
        positions[h * n + beacons_of_head + i] = ring_.position(i);
      }
    }
    return {};
  }

  [[nodiscard]] WorkspaceSize workspace_size() const {
    return detail::measure([&](Workspace& work) {
      static_cast<void>(work.take<std::byte>(static_cast<index_t>(detail::RowRotation::workspace_size(dim_).bytes)));
      static_cast<void>(work.take<slot_t>(n_beacon_));
      if (!buffers_.empty()) static_cast<void>(work.take<std::byte>(static_cast<index_t>(buffers_[0].workspace_size().bytes)));
    });
  }
  [[nodiscard]] WorkspaceSize prefill_workspace_size(index_t tokens) const {
    if (buffers_.empty()) return {};
    return {rope_cursor_workspace_size(dim_).bytes + buffers_[0].workspace_size(tokens).bytes, 0, 0};
  }
  [[nodiscard]] std::size_t state_bytes() const noexcept {
    std::size_t bytes = ring_.state_bytes();
    for (const ContinualFps& b : buffers_) bytes += b.state_bytes();
    return bytes;
  }

  template <class Archive>
  void exchange(Archive& archive) {
    archive.expect("observer", 3);
    archive.expect("n_beacon", n_beacon_);
    ring_.exchange(archive);
    for (ContinualFps& b : buffers_) b.exchange(archive);
    if constexpr (Archive::loading)  // all heads have equally many
      for (const ContinualFps& b : buffers_)
        if (b.size() != buffers_[0].size())
          archive.fail(detail::error(StatusCode::damaged, "saved state: heads have ", buffers_[0].size(), " and ", b.size(),
                                     " beacons"));
  }

 private:
  [[nodiscard]] ContinualFps& buffer(index_t head) noexcept { return buffers_[static_cast<std::size_t>(head)]; }

  index_t heads_;
  index_t dim_;
  index_t n_beacon_;
  detail::QueryRing ring_;
  std::vector<ContinualFps> buffers_;  // of each query head; empty where n_beacon is 0
  Workspace reduction_;                // for the reductions while decoding, where no caller's workspace is at hand
};

static_assert(Observer<NoQueries> && Observer<RecentQueries> && Observer<BeaconQueries>);

}  // namespace beaconkv::inline v0
