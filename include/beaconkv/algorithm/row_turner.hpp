// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Turning many rows, each by a delta of its own. Few of the deltas of an eviction differ, since none is larger than what was
/// evicted, and the heads share them: so rotations are remembered.

#include <algorithm>
#include <cstring>
#include <span>

#include "beaconkv/algorithm/rope.hpp"

namespace beaconkv::inline v0::detail {

class RowTurner {
 public:
  /// Takes its scratch from `work`.
  RowTurner(const RopeTable& rope, Workspace& work)
      : rope_(&rope),
        cursor_(rope, work),
        rotations_(work.take<float>(remembered_rotations * rope.rotary_dim())),
        deltas_(work.take<position_t>(remembered_rotations)) {
    std::fill(deltas_.begin(), deltas_.end(), position_t{0});
    deltas_[0] = 1;  // whose place is another: rows that do not turn find no rotation
  }
  [[nodiscard]] static WorkspaceSize workspace_size(index_t rotary_dim) {
    return measure([&](Workspace& work) {
      static_cast<void>(work.take<std::byte>(static_cast<index_t>(rope_cursor_workspace_size(rotary_dim).bytes)));
      static_cast<void>(work.take<float>(remembered_rotations * rotary_dim));
      static_cast<void>(work.take<position_t>(remembered_rotations));
    });
  }

  /// Turns the first of `rows` rows on their way from `in` to `out`, row `i` by `delta(i)`: up to one that does not turn.
  /// Returns how many, at least one. `out` is `in`, or rows before it of the same memory. Precondition: `delta(0) != 0`.
  template <class Delta>
  [[nodiscard]] index_t turn(const float* in, index_t in_stride, float* out, index_t out_stride, index_t rows,
                             Delta delta) noexcept {
    const index_t first = rope_->rotary_first();
    const index_t pairs = rope_->pairs();
    position_t deltas[most_rows];
    DeltasToTurn t{{nullptr, nullptr, in + first, in_stride, out + first, out_stride, 0, pairs, pairs, 1.0F},
                   deltas,
                   rotations_.data(),
                   deltas_.data(),
                   0};
    index_t n = 0;
    for (bool all = true; all && n < rows;) {
      t.rows.rows = std::min(rows - n, most_rows);
      for (index_t i = 0; i < t.rows.rows; ++i) deltas[i] = delta(n + i);
      t.deltas = deltas;
      all = turn(t);
      n += t.deltas - deltas;
    }
    if (in != out && rope_->rotary_dim() != rope_->head_dim()) copy_rest(in, in_stride, out, out_stride, n);
    return n;
  }

 private:
  /// Rows whose deltas are looked up at a time: while the stores of those before them are under way.
  static constexpr index_t most_rows = 48;

  /// Turns the rows up to one that does not turn, forming what rotations are missing, and takes them off `t`. False where there
  /// was one.
  [[nodiscard]] bool turn(DeltasToTurn& t) noexcept {
    while (true) {
      if (rope_->layout() == RopeLayout::half)
        run<TurnByDeltas<HalfOrder>>(&t);
      else
        run<TurnByDeltas<PairOrder>>(&t);
      t.rows.in += t.turned * t.rows.in_stride;
      t.rows.out += t.turned * t.rows.out_stride;
      t.rows.rows -= t.turned;
      t.deltas += t.turned;
      if (t.rows.rows == 0) return true;
      const position_t next = *t.deltas;
      if (next == 0) return false;
      const index_t slot = rotation_slot(next);
      cursor_.form(next, rotations_.data() + slot * rope_->rotary_dim());
      deltas_[static_cast<std::size_t>(slot)] = next;
    }
  }
  /// The numbers that do not turn.
  void copy_rest(const float* in, index_t in_stride, float* out, index_t out_stride, index_t rows) const noexcept {
    const auto before = static_cast<std::size_t>(rope_->rotary_first());
    const index_t last = rope_->rotary_first() + rope_->rotary_dim();
    const auto behind = static_cast<std::size_t>(rope_->head_dim() - last);
    for (index_t i = 0; i < rows; ++i, in += in_stride, out += out_stride) {
      std::memcpy(out, in, before * sizeof(float));
      std::memcpy(out + last, in + last, behind * sizeof(float));
    }
  }

  const RopeTable* rope_;
  RopeCursor cursor_;
  std::span<float> rotations_;    // [remembered_rotations][cos, sin][pairs]
  std::span<position_t> deltas_;  // of each; 0: none, since no row turns by it
};

}  // namespace beaconkv::inline v0::detail
