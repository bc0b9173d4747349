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
  /// The most rows that `turn` takes in one call: enough that what a call costs does not show.
  static constexpr index_t most_rows = 64;

  /// Takes its scratch from `work`.
  RowTurner(const RopeTable& rope, Workspace& work)
      : rope_(&rope),
        cursor_(rope, work),
        rotations_(work.take<float>(remembered * rope.rotary_dim())),
        deltas_(work.take<position_t>(remembered)) {
    std::fill(deltas_.begin(), deltas_.end(), position_t{0});
  }
  [[nodiscard]] static WorkspaceSize workspace_size(index_t rotary_dim) {
    return measure([&](Workspace& work) {
      static_cast<void>(work.take<std::byte>(static_cast<index_t>(rope_cursor_workspace_size(rotary_dim).bytes)));
      static_cast<void>(work.take<float>(remembered * rotary_dim));
      static_cast<void>(work.take<position_t>(remembered));
    });
  }

  /// Turns the first of `rows` rows on their way from `in` to `out`, row `i` by `delta(i)`: up to one that does not turn, or
  /// whose rotation would take the place of one in use. Returns how many, at least one. `out` is `in`, or rows before it of the
  /// same memory. Precondition: `delta(0) != 0`.
  template <class Delta>
  [[nodiscard]] index_t turn(const float* in, index_t in_stride, float* out, index_t out_stride, index_t rows,
                             Delta delta) noexcept {
    const index_t most = std::min(rows, most_rows);
    position_t by[most_rows];  // of each run
    index_t ends[most_rows];
    index_t runs = 0;
    position_t now = delta(0);
    for (index_t i = 1; i < most; ++i) {  // no branch, since none could be foretold
      const position_t next = delta(i);
      by[runs] = now;
      ends[runs] = i;
      runs += now != next ? 1 : 0;
      now = next;
    }
    by[runs] = now;
    ends[runs++] = most;
    const float* rotations[most_rows];
    index_t found = 0;
    for (; found < runs; ++found) {
      if (by[found] == 0) break;
      const index_t slot = slot_of(by[found]);
      const float* const here = rotation(slot);
      if (deltas_[static_cast<std::size_t>(slot)] != by[found]) {
        if (std::find(rotations, rotations + found, here) != rotations + found) break;  // it is in use
        form(by[found], slot);
      }
      rotations[found] = here;
    }
    const index_t first = rope_->rotary_first();
    const index_t n = ends[found - 1];
    const RunsToTurn t{
        {nullptr, nullptr, in + first, in_stride, out + first, out_stride, n, rope_->pairs(), rope_->pairs(), 1.0F},
        rotations,
        ends,
        found};
    if (rope_->layout() == RopeLayout::half)
      run<TurnRuns<HalfOrder>>(&t);
    else
      run<TurnRuns<PairOrder>>(&t);
    if (in != out && rope_->rotary_dim() != rope_->head_dim()) copy_rest(in, in_stride, out, out_stride, n);
    return n;
  }

 private:
  /// Deltas whose rotations are remembered: of those that are this far apart only one.
  static constexpr index_t remembered = 256;

  [[nodiscard]] static index_t slot_of(position_t delta) noexcept { return static_cast<index_t>(delta & (remembered - 1)); }
  [[nodiscard]] float* rotation(index_t slot) const noexcept { return rotations_.data() + slot * rope_->rotary_dim(); }
  void form(position_t delta, index_t slot) noexcept {
    cursor_.form(delta, rotation(slot));
    deltas_[static_cast<std::size_t>(slot)] = delta;
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
  std::span<float> rotations_;    // [remembered][cos, sin][pairs]
  std::span<position_t> deltas_;  // of each; 0: none, since no row turns by it
};

}  // namespace beaconkv::inline v0::detail
