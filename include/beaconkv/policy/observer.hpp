// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Observers: which queries a policy remembers between evictions. The queries of one layer, all query heads.
///
/// An observer is a value with `Options`, `prefill`, `observe`, `rows`, `max_rows`, `write_rows`, `commit`, `state_bytes` and
/// two workspace queries; see the concept `Observer`. One that can be saved has `exchange` (`archive.hpp`), too. Stock models:
/// `NoQueries`, `RecentQueries`, and `BeaconQueries` (`beacon_queries.hpp`).
///
/// `write_rows(rope, now, heads, out, positions, work)` writes the rows of the query heads `[heads.first, heads.last)` and
/// where they look from: `out` `[heads][rows()][dim]`, `positions` `[heads][rows()]`. Where scores are formed head by head, it
/// is called for the group of one KV head after another, on as many threads as score. `add_ahead(heads, memory)` is optional:
/// where these rows are stored, so that they are asked for while the KV head before is scored.

#include <algorithm>
#include <concepts>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "beaconkv/algorithm/rope.hpp"
#include "beaconkv/archive.hpp"
#include "beaconkv/kernel/read_ahead.hpp"

namespace beaconkv::inline v0 {

/// The observed queries as a scorer sees them: rotated to the positions at which they look at the keys.
struct Observations {
  const float* queries = nullptr;           ///< `[query_heads][rows][dim]`, dense
  std::span<const position_t> positions{};  ///< `[query_heads][rows]`; a row does not see keys at later positions
  index_t query_heads = 0;
  index_t rows = 0;
  index_t dim = 0;
  index_t first_query_head = 0;        ///< of the layer's, where only some are shown: scores are formed head by head
  std::span<const position_t> tags{};  ///< `[query_heads][beacons]`: where leading rows were observed, for scorers that ask
  const detail::MemoryAhead* next = nullptr;  ///< set where another KV head is looked at next: what will be read for that
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
             Workspace& work, const RopeTable* rope, position_t now, Range heads, float* out, position_t* positions,
             index_t n) {
  { validate(options, shape) } -> std::same_as<Status>;
  O(shape, options);
  { observer.prefill(queries, work) } -> std::same_as<Status>;
  { observer.observe(queries) } -> std::same_as<Status>;
  { observer.commit() } -> std::same_as<Status>;
  { view.rows() } -> std::same_as<index_t>;
  { view.max_rows() } -> std::same_as<index_t>;
  { view.write_rows(rope, now, heads, out, positions, work) } -> std::same_as<Status>;
  { view.workspace_size() } -> std::same_as<WorkspaceSize>;
  { view.prefill_workspace_size(n) } -> std::same_as<WorkspaceSize>;
  { view.state_bytes() } -> std::same_as<std::size_t>;
  { O::needs_queries } -> std::convertible_to<bool>;
  { O::needs_rope } -> std::convertible_to<bool>;
};

namespace detail {

/// Rotates rows to one position after another, forming the angles once for all heads of a position.
class RowRotation {
 public:
  RowRotation(Workspace& work, const RopeTable* rope)
      : rotates_(rope != nullptr), cursor_(rope != nullptr ? *rope : none_, work) {}
  [[nodiscard]] static WorkspaceSize workspace_size(index_t dim) { return rope_cursor_workspace_size(dim); }
  void at(position_t position) {
    if (rotates_) rotation_ = cursor_.at(position);
  }
  /// `count` rows of `dim` numbers, `stride` apart, to `out`, `out_stride` apart.
  void write(const float* rows, index_t stride, index_t dim, index_t count, float* out, index_t out_stride) const {
    if (rotates_) {
      const auto factor = static_cast<float>(cursor_.table().attention_factor());
      cursor_.table().apply_to(rotation_, rows, stride, out, out_stride, count, factor);
    } else {
      for (index_t i = 0; i < count; ++i) std::copy_n(rows + i * stride, dim, out + i * out_stride);
    }
  }

 private:
  RopeTable none_{};
  bool rotates_;
  RopeCursor cursor_;
  RopeRotation rotation_{};
};

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
    begin_at_oldest();
    archive.value("number of recent queries", size_, 0, capacity_);
    archive.array("recent queries", std::span(rows_).first(static_cast<std::size_t>(size_ * heads_ * dim_)));
    archive.array("positions of recent queries", std::span(positions_).first(static_cast<std::size_t>(size_)));
    if constexpr (Archive::loading)
      for (index_t i = 0; i < size_ && archive.ok(); ++i)
        if (position(i) < 0 || position(i) == std::numeric_limits<position_t>::max())
          archive.fail(error(StatusCode::damaged, "saved state: a recent query at position ", position(i)));
  }

  void clear() noexcept { first_ = size_ = 0; }
  /// Adds one token; the oldest one makes room.
  void push(const QuerySource& queries, index_t token) {
    if (size_ == capacity_) drop_oldest(1);
    const index_t at = slot(size_);
    queries.load_heads(token, rows_.data() + at * heads_ * dim_);
    positions_[static_cast<std::size_t>(at)] = queries.first_position + token;
    ++size_;
  }
  /// Tokens `[first, first + count)` at their positions, to the rows from `row` on of each of the `heads` in `out`
  /// `[heads][rows][dim]` and in `positions` `[heads][rows]`.
  void write(index_t first, index_t count, Range heads, RowRotation& rotation, index_t row, index_t rows, float* out,
             position_t* positions) const {
    for (index_t i = first; i < first + count; ++i, ++row) {
      rotation.at(position(i));
      rotation.write(this->row(i, heads.first), dim_, dim_, heads.size(), out + row * dim_, rows * dim_);
      for (index_t h = 0; h < heads.size(); ++h) positions[h * rows + row] = position(i);
    }
  }
  /// Where the queries of `heads` are stored.
  void add_ahead(Range heads, MemoryAhead& to) const noexcept {
    const index_t up_to_end = std::min(size_, capacity_ - first_);
    to.add(rows_ahead(row(0, heads.first), heads_ * dim_, heads.size() * dim_, up_to_end));
    to.add(rows_ahead(row(up_to_end, heads.first), heads_ * dim_, heads.size() * dim_, size_ - up_to_end));
  }
  void drop_oldest(index_t count) noexcept {
    first_ = slot(count);
    size_ -= count;
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
  [[nodiscard]] Status write_rows(const RopeTable*, position_t, Range, float*, position_t*, Workspace&) const { return {}; }
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
      : dim_(shape.head_dim),
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
  /// All of them are recent: what `write_rows` shows, oldest first.
  [[nodiscard]] index_t num_recent() const noexcept { return rows(); }
  [[nodiscard]] position_t recent_position(index_t i) const noexcept { return ring_.position(std::min(i, ring_.size() - 1)); }
  [[nodiscard]] Status write_rows(const RopeTable* rope, position_t, Range heads, float* out, position_t* positions,
                                  Workspace& work) const {
    const Workspace::Frame frame(work);
    detail::RowRotation rotation(work, rope);
    ring_.write(0, ring_.size(), heads, rotation, 0, rows(), out, positions);
    if (newest_twice_ && ring_.size() > 0)
      ring_.write(ring_.size() - 1, 1, heads, rotation, ring_.size(), rows(), out, positions);
    return {};
  }
  void add_ahead(Range heads, detail::MemoryAhead& to) const noexcept { ring_.add_ahead(heads, to); }
  [[nodiscard]] WorkspaceSize workspace_size() const { return detail::RowRotation::workspace_size(dim_); }
  [[nodiscard]] WorkspaceSize prefill_workspace_size(index_t) const { return {}; }
  [[nodiscard]] std::size_t state_bytes() const noexcept { return ring_.state_bytes(); }
  template <class Archive>
  void exchange(Archive& archive) {
    archive.expect("observer", newest_twice_ ? 2 : 1);
    archive.expect("n_recent_queries", ring_.capacity());
    ring_.exchange(archive);
  }

 protected:
  index_t dim_;
  bool newest_twice_;
  detail::QueryRing ring_;
};

static_assert(Observer<NoQueries> && Observer<RecentQueries>);

}  // namespace beaconkv::inline v0
