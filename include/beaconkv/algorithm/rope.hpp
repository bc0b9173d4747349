// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Rotary position embedding: rotate, unrotate and re-align vectors, for every common variant.
///
/// Source: Su et al., RoFormer (arXiv 2104.09864) eq. 34; the scalings as Hugging Face Transformers computes them. Frequencies
/// and angles are formed in double, so that a move over 100,000 positions is as exact as one over ten; vectors are float.
///
/// A rotation by `64 a + b` is one complex product, in double, of the rotations by `64 a` and by `b`, rounded to float once.
/// Those by `b < 64`, and by `64 a` for `a < 64`, stand in tables that all copies of a `RopeTable` share; beyond them sines and
/// cosines are formed where `a` changes. A rotation has the same bits whichever way it was formed.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <span>
#include <type_traits>
#include <vector>

#include "beaconkv/algorithm/rope_options.hpp"
#include "beaconkv/kernel/rotation.hpp"
#include "beaconkv/workspace.hpp"

namespace beaconkv::inline v0 {

/// Cosines and sines of one rotation, one of each a pair. Views scratch given to `RopeTable::rotation`.
struct RopeRotation {
  std::span<const float> cos;
  std::span<const float> sin;
};

namespace detail {

/// Positions that a fine rotation covers, and how many coarse ones are stored.
inline constexpr index_t rotation_step = 64;
/// Pairs that are turned at a time where there is no scratch but the stack.
inline constexpr index_t pairs_at_once = 128;
/// Rows that are decoded, turned and encoded at a time: they stay in the first cache.
inline constexpr index_t rows_a_block = 16;

/// What the copies of a `RopeTable` share.
struct RotationTables {
  struct alignas(64) Line {
    double numbers[8];
  };

  std::vector<double> inv_freq;
  index_t padded;            ///< pairs, rounded up to whole vectors
  std::vector<Line> memory;  ///< `[fine, coarse][rotation_step][cos, sin][padded]`

  explicit RotationTables(std::vector<double> frequencies);
  [[nodiscard]] const double* row(index_t i) const noexcept {
    return reinterpret_cast<const double*>(memory.data()) + i * 2 * padded;
  }
};

/// Half of a product: cosines and sines of the same pairs.
struct RotationPart {
  const double* cos = nullptr;
  const double* sin = nullptr;
};

/// `delta` as `sign * (rotation_step * coarse + fine)`: the rotation back is the inverse, to the bit.
struct SplitDelta {
  explicit SplitDelta(position_t delta) noexcept : back(delta < 0) {
    const auto bits = static_cast<std::uint64_t>(delta);
    const std::uint64_t size = back ? 0 - bits : bits;
    coarse = static_cast<position_t>(size / rotation_step);
    fine = static_cast<index_t>(size % rotation_step);
  }
  [[nodiscard]] bool coarse_is_stored() const noexcept { return coarse < rotation_step; }

  position_t coarse;
  index_t fine;
  bool back;
};

class RowTurner;

}  // namespace detail

/// The rotation of one layer, ready to use. A small value that shares its tables with its copies: copy it freely, one for each
/// layer.
///
/// Positions are integers; a negative one is a shift backwards. Moves are pure rotations: the attention factor multiplies a
/// vector once, in `rotate`, and is taken back in `unrotate`, never in `realign`. Rotations by less than 4096 positions cost
/// O(D) multiplications, those beyond O(D) sines and cosines where no `RopeCursor` remembers them.
class RopeTable {
 public:
  /// An empty table: no RoPE, only there to be replaced or to say "none".
  RopeTable() = default;

  /// The table, or what is wrong with the options. Allocates 2 KiB a pair, which copies share.
  [[nodiscard]] static Result<RopeTable> make(const RopeOptions& options);

#ifndef BEACONKV_NO_EXCEPTIONS
  /// As `make`; throws `Error`.
  explicit RopeTable(const RopeOptions& options) : RopeTable(make(options).or_throw()) {}
#endif

  [[nodiscard]] bool empty() const noexcept { return tables_ == nullptr; }
  [[nodiscard]] index_t head_dim() const noexcept { return head_dim_; }
  [[nodiscard]] index_t rotary_dim() const noexcept { return 2 * pairs(); }
  [[nodiscard]] index_t rotary_first() const noexcept { return rotary_first_; }
  [[nodiscard]] index_t pairs() const noexcept { return static_cast<index_t>(inv_freq().size()); }
  [[nodiscard]] RopeLayout layout() const noexcept { return layout_; }
  [[nodiscard]] double attention_factor() const noexcept { return attention_factor_; }
  /// Radians per position of each pair, scaling included.
  [[nodiscard]] std::span<const double> inv_freq() const noexcept {
    return empty() ? std::span<const double>() : std::span<const double>(tables_->inv_freq);
  }

  /// The rotation by `delta` positions, written to `scratch` (`rotary_dim` floats). For many of them see `RopeCursor`.
  [[nodiscard]] RopeRotation rotation(position_t delta, std::span<float> scratch) const noexcept;

  /// Turns `rotary_dim` numbers of `row` (`head_dim` floats) and multiplies them by `factor`; the rest stays, bit for bit.
  void apply(const RopeRotation& rotation, float* row, float factor = 1.0F) const noexcept {
    apply(rotation, row, 1, 0, factor);
  }
  /// The same for `count` rows, `stride` floats apart.
  void apply(const RopeRotation& rotation, float* rows, index_t count, index_t stride, float factor = 1.0F) const noexcept {
    turn(rotation.cos.data(), rotation.sin.data(), rows, stride, rows, stride, count, 0, pairs(), factor);
  }
  /// The same on the way from `in` to `out`, front to back, which must not be ahead of `in` where they overlap.
  void apply_to(const RopeRotation& rotation, const float* in, index_t in_stride, float* out, index_t out_stride, index_t count,
                float factor = 1.0F) const noexcept;

  /// `row` (`head_dim` floats) at `position`, in place: rotation and attention factor.
  void rotate(float* row, position_t position) const noexcept { rotate_run(row, 1, 0, position); }
  /// `count` rows, `stride` floats apart, at `first_position` and the positions that follow.
  void rotate_run(float* rows, index_t count, index_t stride, position_t first_position) const noexcept {
    turn_rows(rows, count, stride, first_position, 1, static_cast<float>(attention_factor_));
  }

  /// The inverse of `rotate`.
  void unrotate(float* row, position_t position) const noexcept { unrotate_heads(row, 1, 0, position); }
  /// The same for `count` rows of one position, `stride` floats apart.
  void unrotate_heads(float* rows, index_t count, index_t stride, position_t position) const noexcept {
    turn_rows(rows, count, stride, -position, 0, static_cast<float>(1 / attention_factor_));
  }

  /// Moves a rotated `row` from one position to another, in place. A move by 0 leaves every bit as it is. Several moves add up
  /// as integers: make one call of the sum.
  void realign(float* row, position_t from, position_t to) const noexcept {
    if (from != to) turn_rows(row, 1, 0, to - from, 0, 1.0F);
  }

 private:
  friend class RopeCursor;
  friend class detail::RowTurner;

  [[nodiscard]] const double* stored(bool coarse, index_t i) const noexcept {
    return tables_->row((coarse ? detail::rotation_step : 0) + i);
  }
  /// The coarse part of pairs `[first, first + n)`, formed in `scratch` (2 x `room` numbers) where it is not stored.
  [[nodiscard]] detail::RotationPart coarse_part(const detail::SplitDelta& delta, index_t first, index_t n, double* scratch,
                                                 index_t room) const noexcept;
  /// Cosines and sines of pairs `[first, first + n)`.
  void compose(const detail::SplitDelta& delta, const detail::RotationPart& coarse, index_t first, index_t n, float* cos,
               float* sin) const noexcept {
    const double* const fine = stored(false, delta.fine) + first;
    detail::run<detail::ComposeRotation>(coarse.cos, coarse.sin, fine, fine + tables_->padded, n, delta.back ? -1.0F : 1.0F,
                                         cos, sin);
  }
  /// Turns pairs `[first_pair, first_pair + n)` of `count` whole rows.
  void turn(const float* cos, const float* sin, const float* in, index_t in_stride, float* out, index_t out_stride,
            index_t count, index_t first_pair, index_t n, float factor) const noexcept {
    const index_t first = rotary_first_ + (layout_ == RopeLayout::half ? first_pair : 2 * first_pair);
    const detail::RowsToTurn rows{cos, sin, in + first, in_stride, out + first, out_stride, count, n, pairs(), factor};
    if (layout_ == RopeLayout::half)
      detail::run<detail::TurnRows<detail::HalfOrder>>(&rows);
    else
      detail::run<detail::TurnRows<detail::PairOrder>>(&rows);
  }
  /// Row `i` by `first + i * step`.
  void turn_rows(float* rows, index_t count, index_t stride, position_t first, position_t step, float factor) const noexcept;

  index_t head_dim_ = 0;
  index_t rotary_first_ = 0;
  RopeLayout layout_ = RopeLayout::half;
  double attention_factor_ = 1;
  std::shared_ptr<const detail::RotationTables> tables_{};
};

/// Rotations by one delta after another: remembers the last one, and the sines and cosines of its 64 neighbours. The same bits
/// as `RopeTable::rotation`. The table must outlive it. No allocation.
class RopeCursor {
 public:
  /// Takes its scratch from `work`, for as long as the frame that it was made in (see `rope_cursor_workspace_size`).
  RopeCursor(const RopeTable& table, Workspace& work)
      : table_(&table),
        coarse_(work.take<double>(2 * padded(table.rotary_dim()))),
        rotation_(work.take<float>(table.rotary_dim())) {}
  RopeCursor(RopeTable&& table, Workspace& work) = delete;

  /// The rotation by `delta`, good until the next call.
  [[nodiscard]] RopeRotation at(position_t delta) noexcept {
    const auto n = static_cast<std::size_t>(table_->pairs());
    const RopeRotation rotation{rotation_.first(n), rotation_.last(n)};
    if (any_ && delta == last_) return rotation;
    form(delta, rotation_.data());
    last_ = delta;
    any_ = true;
    return rotation;
  }
  [[nodiscard]] const RopeTable& table() const noexcept { return *table_; }

 private:
  friend class detail::RowTurner;
  friend WorkspaceSize rope_cursor_workspace_size(index_t rotary_dim);
  [[nodiscard]] static index_t padded(index_t rotary_dim) noexcept {
    return (rotary_dim / 2 + detail::rotation_padding - 1) / detail::rotation_padding * detail::rotation_padding;
  }
  /// Writes cosines, then sines.
  void form(position_t delta, float* out) noexcept {
    const detail::SplitDelta split(delta);
    detail::RotationPart coarse{coarse_.data(), coarse_.data() + coarse_.size() / 2};
    if (split.coarse_is_stored() || split.coarse != formed_)
      coarse = table_->coarse_part(split, 0, table_->pairs(), coarse_.data(), static_cast<index_t>(coarse_.size() / 2));
    if (!split.coarse_is_stored()) formed_ = split.coarse;
    table_->compose(split, coarse, 0, table_->pairs(), out, out + table_->pairs());
  }

  const RopeTable* table_;
  std::span<double> coarse_;
  std::span<float> rotation_;
  position_t formed_ = 0;  // whose coarse rotation is in coarse_; 0: none, since that one is stored
  position_t last_ = 0;
  bool any_ = false;
};

/// Scratch of a cursor over a table with up to `rotary_dim` dimensions that turn.
[[nodiscard]] inline WorkspaceSize rope_cursor_workspace_size(index_t rotary_dim) {
  return detail::measure([&](Workspace& work) {
    static_cast<void>(work.take<double>(2 * RopeCursor::padded(rotary_dim)));
    static_cast<void>(work.take<float>(rotary_dim));
  });
}

namespace detail {

/// An error unless both tables turn the same dimensions.
[[nodiscard]] inline Status same_rotated_dims(const RopeTable& a, const RopeTable& b) {
  if (a.head_dim() == b.head_dim() && a.rotary_dim() == b.rotary_dim() && a.rotary_first() == b.rotary_first() &&
      a.layout() == b.layout())
    return {};
  return error(StatusCode::unsupported, "realign: the two RoPE tables differ in head_dim (", a.head_dim(), ", ", b.head_dim(),
               "), rotary_dim (", a.rotary_dim(), ", ", b.rotary_dim(), "), rotary_first (", a.rotary_first(), ", ",
               b.rotary_first(), ") or layout");
}

}  // namespace detail

/// Moves a row that `from_table` rotated at `from` to where `to_table` would have put it at `to` (a switch between two LongRoPE
/// tables, say). Both must turn the same dimensions.
[[nodiscard]] inline Status realign(float* row, const RopeTable& from_table, position_t from, const RopeTable& to_table,
                                    position_t to) {
  if (Status s = detail::same_rotated_dims(from_table, to_table); !s) return s;
  from_table.unrotate(row, from);
  to_table.rotate(row, to);
  return {};
}

inline Result<RopeTable> RopeTable::make(const RopeOptions& options) {
  if (options.head_dim < 1) return detail::invalid("head_dim = ", options.head_dim, ": must be at least 1");
  if (options.rotary_first < 0 || options.rotary_first >= options.head_dim)
    return detail::invalid("rotary_first = ", options.rotary_first, ": must be between 0 and head_dim = ", options.head_dim);
  const index_t room = options.head_dim - options.rotary_first;
  const index_t rotary = options.rotary_dim.value_or(room);
  if (rotary < 2 || rotary > room || rotary % 2 != 0)
    return detail::invalid("rotary_dim = ", rotary, ": must be even, at least 2 and at most ", room,
                           " (head_dim = ", options.head_dim, ", rotary_first = ", options.rotary_first, ")");
  if (!detail::positive(options.theta)) return detail::invalid("theta = ", options.theta, ": must be positive");
  if (Status s = detail::validate_scaling(options.scaling, rotary, options.theta); !s) return s;

  RopeTable table;
  table.head_dim_ = options.head_dim;
  table.rotary_first_ = options.rotary_first;
  table.layout_ = options.layout;
  std::vector<double> freq = detail::rope_frequencies(rotary, options.theta);
  std::visit(
      [&](const auto& s) {
        using S = std::remove_cvref_t<decltype(s)>;
        if constexpr (std::is_same_v<S, LinearScaling>) {
          for (double& f : freq) f /= s.factor;
        } else if constexpr (std::is_same_v<S, NtkScaling>) {
          const auto r = static_cast<double>(rotary);
          freq = detail::rope_frequencies(rotary, options.theta * std::pow(s.factor, r / (r - 2)));
        } else if constexpr (std::is_same_v<S, Llama3Scaling>) {
          detail::scale_llama3(freq, s);
        } else if constexpr (std::is_same_v<S, YarnScaling>) {
          detail::scale_yarn(freq, s, options.theta);
          table.attention_factor_ = s.attention_factor.value_or(s.factor > 1 ? 0.1 * std::log(s.factor) + 1 : 1.0);
        } else if constexpr (std::is_same_v<S, GivenFrequencies>) {
          freq = s.inv_freq;
          table.attention_factor_ = s.attention_factor;
        }
      },
      options.scaling);
  table.tables_ = std::make_shared<const detail::RotationTables>(std::move(freq));
  return table;
}

inline detail::RotationTables::RotationTables(std::vector<double> frequencies) : inv_freq(std::move(frequencies)) {
  const std::size_t n = inv_freq.size();
  padded = round_up(static_cast<index_t>(n), rotation_padding);
  memory.resize(static_cast<std::size_t>(2 * rotation_step * 2 * padded / 8));
  auto* row_data = reinterpret_cast<double*>(memory.data());
  for (index_t r = 0; r < 2 * rotation_step; ++r, row_data += 2 * padded) {
    const auto delta = static_cast<double>(r < rotation_step ? r : (r - rotation_step) * rotation_step);
    for (std::size_t i = 0; i < n; ++i) {
      row_data[i] = std::cos(delta * inv_freq[i]);
      row_data[static_cast<std::size_t>(padded) + i] = std::sin(delta * inv_freq[i]);
    }
  }
}

inline detail::RotationPart RopeTable::coarse_part(const detail::SplitDelta& delta, index_t first, index_t n, double* scratch,
                                                   index_t room) const noexcept {
  if (delta.coarse_is_stored()) {
    const double* const row = stored(true, static_cast<index_t>(delta.coarse)) + first;
    return {row, row + tables_->padded};
  }
  const double positions = static_cast<double>(delta.coarse) * static_cast<double>(detail::rotation_step);
  for (index_t i = 0; i < n; ++i) {
    const double angle = positions * tables_->inv_freq[static_cast<std::size_t>(first + i)];
    scratch[i] = std::cos(angle);
    scratch[room + i] = std::sin(angle);
  }
  for (index_t i = n; i % detail::rotation_padding != 0; ++i) scratch[i] = scratch[room + i] = 0;  // kernels read whole vectors
  return {scratch, scratch + room};
}

inline RopeRotation RopeTable::rotation(position_t delta, std::span<float> scratch) const noexcept {
  const index_t n = pairs();
  BEACONKV_ASSERT(static_cast<index_t>(scratch.size()) >= 2 * n);
  const detail::SplitDelta split(delta);
  for (index_t first = 0; first < n; first += detail::pairs_at_once) {
    double formed[2 * detail::pairs_at_once];
    const index_t some = std::min(detail::pairs_at_once, n - first);
    const detail::RotationPart coarse = coarse_part(split, first, some, formed, detail::pairs_at_once);
    compose(split, coarse, first, some, scratch.data() + first, scratch.data() + n + first);
  }
  const auto count = static_cast<std::size_t>(n);
  return {scratch.first(count), scratch.subspan(count, count)};
}

inline void RopeTable::apply_to(const RopeRotation& rotation, const float* in, index_t in_stride, float* out,
                                index_t out_stride, index_t count, float factor) const noexcept {
  const auto before = static_cast<std::size_t>(rotary_first_);
  const auto behind = static_cast<std::size_t>(head_dim_ - rotary_first_ - rotary_dim());
  if (before == 0 && behind == 0) {
    turn(rotation.cos.data(), rotation.sin.data(), in, in_stride, out, out_stride, count, 0, pairs(), factor);
    return;
  }
  for (index_t i = 0; i < count; ++i, in += in_stride, out += out_stride) {
    turn(rotation.cos.data(), rotation.sin.data(), in, 0, out, 0, 1, 0, pairs(), factor);
    if (in == out) continue;
    std::memcpy(out, in, before * sizeof(float));
    std::memcpy(out + head_dim_ - behind, in + head_dim_ - behind, behind * sizeof(float));
  }
}

inline void RopeTable::turn_rows(float* rows, index_t count, index_t stride, position_t first, position_t step,
                                 float factor) const noexcept {
  for (index_t pair = 0; pair < pairs(); pair += detail::pairs_at_once) {
    double formed[2 * detail::pairs_at_once];
    float cos[detail::pairs_at_once];
    float sin[detail::pairs_at_once];
    const index_t n = std::min(detail::pairs_at_once, pairs() - pair);
    position_t now_formed = 0;  // whose coarse rotation is in `formed`; 0: none, since that one is stored
    const index_t at_once = step == 0 ? count : 1;
    for (index_t i = 0; i < count; i += at_once) {
      const detail::SplitDelta delta(first + i * step);
      detail::RotationPart coarse{formed, formed + detail::pairs_at_once};
      if (delta.coarse_is_stored() || delta.coarse != now_formed)
        coarse = coarse_part(delta, pair, n, formed, detail::pairs_at_once);
      if (!delta.coarse_is_stored()) now_formed = delta.coarse;
      compose(delta, coarse, pair, n, cos, sin);
      float* const row = rows + i * stride;
      turn(cos, sin, row, stride, row, stride, at_once, pair, n, factor);
    }
  }
}

}  // namespace beaconkv::inline v0
