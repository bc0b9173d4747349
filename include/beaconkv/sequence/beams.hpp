// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Beam search over sequences with memory of their own.

#include <span>
#include <vector>

#include "beaconkv/types.hpp"

namespace beaconkv::inline v0 {

namespace detail {

/// Calls `copy(to, from, held)` for each copy that brings beams into `order`, in an order in which none is overwritten before
/// it was copied: `to` and `from` are beams, or -1 for the spare one; `held` is the beam whose old state `from` has.
template <class Copy>
[[nodiscard]] Status for_each_copy(std::span<const index_t> order, Copy copy) {
  const auto n = static_cast<index_t>(order.size());
  std::vector<index_t> wanted(order.size(), 0);  // by how many beams that are still to be written
  std::vector<bool> done(order.size());
  const auto from_of = [&](index_t i) { return order[static_cast<std::size_t>(i)]; };
  for (index_t i = 0; i < n; ++i) {
    done[static_cast<std::size_t>(i)] = from_of(i) == i;
    if (from_of(i) != i) ++wanted[static_cast<std::size_t>(from_of(i))];
  }
  index_t spared = -1;  // the beam whose old state is in the spare one
  for (;;) {
    bool progress = false;
    index_t cycle = -1;
    for (index_t i = 0; i < n; ++i) {
      if (done[static_cast<std::size_t>(i)]) continue;
      if (wanted[static_cast<std::size_t>(i)] != 0 && spared != i) {
        cycle = i;
        continue;
      }
      const index_t from = from_of(i);
      done[static_cast<std::size_t>(i)] = true;
      --wanted[static_cast<std::size_t>(from)];
      if (Status s = copy(i, from == spared ? -1 : from, from); !s) return s;
      progress = true;
    }
    if (cycle < 0) return {};
    if (progress) continue;
    spared = cycle;  // all that are left change places in cycles: set one aside
    if (Status s = copy(-1, cycle, cycle); !s) return s;
  }
}

}  // namespace detail

/// Beam `i` becomes what beam `order[i]` was, for all at once. Beams keep their own memory; what survives in place is not
/// copied. `spare` is one more sequence of the same make, written where beams change places. Rows are copied at most once a
/// beam, and once more for each cycle. Allocates a few integers. All need room for the longest beam; rows of a pinned prefix
/// must be the same memory in all, `spare` included.
///
/// `SequenceT` has `Status copy_from(const SequenceT&)`: a `Sequence`, or an engine's own. What its `check_copy_from` refuses,
/// if it has one as `Sequence` does, is refused before anything is changed.
template <class SequenceT>
[[nodiscard]] Status reorder_beams(std::span<SequenceT> beams, std::span<const index_t> order, SequenceT& spare) {
  const auto n = static_cast<index_t>(beams.size());
  if (static_cast<index_t>(order.size()) != n)
    return detail::invalid("order has ", order.size(), " entries: there are ", n, " beams");
  for (index_t i = 0; i < n; ++i)
    if (const index_t from = order[static_cast<std::size_t>(i)]; from < 0 || from >= n)
      return detail::invalid("order[", i, "] = ", from, ": must be below ", n);
  const auto at = [&](index_t i) -> SequenceT& { return i < 0 ? spare : beams[static_cast<std::size_t>(i)]; };
  if constexpr (requires { spare.check_copy_from(spare, spare); })
    if (Status s = detail::for_each_copy(
            order, [&](index_t to, index_t from, index_t held) { return at(to).check_copy_from(at(from), at(held)); });
        !s)
      return s;
  return detail::for_each_copy(order, [&](index_t to, index_t from, index_t) { return at(to).copy_from(at(from)); });
}

}  // namespace beaconkv::inline v0
