// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Beam search over sequences with memory of their own.

#include <span>
#include <vector>

#include "beaconkv/types.hpp"

namespace beaconkv::inline v0 {

/// Beam `i` becomes what beam `order[i]` was, for all at once. Beams keep their own memory; what survives in place is not
/// copied. `spare` is one more sequence of the same make, written where beams change places. Rows are copied at most once a
/// beam, and once more for each cycle. Allocates a few integers. All need
/// room for the longest beam: where one has none, the copy into it is refused after others were made.
///
/// `SequenceT` has `Status copy_from(const SequenceT&)`: a `Sequence`, or an engine's own.
template <class SequenceT>
[[nodiscard]] Status reorder_beams(std::span<SequenceT> beams, std::span<const index_t> order, SequenceT& spare) {
  const auto n = static_cast<index_t>(beams.size());
  if (static_cast<index_t>(order.size()) != n)
    return detail::invalid("order has ", order.size(), " entries: there are ", n, " beams");
  std::vector<index_t> wanted(beams.size(), 0);  // by how many beams that are still to be written
  for (index_t i = 0; i < n; ++i) {
    const index_t from = order[static_cast<std::size_t>(i)];
    if (from < 0 || from >= n) return detail::invalid("order[", i, "] = ", from, ": must be below ", n);
    if (from != i) ++wanted[static_cast<std::size_t>(from)];
  }
  std::vector<bool> done(beams.size());
  index_t spared = -1;  // the beam whose old state is in `spare`
  const auto write = [&](index_t i) -> Status {
    const index_t from = order[static_cast<std::size_t>(i)];
    done[static_cast<std::size_t>(i)] = true;
    --wanted[static_cast<std::size_t>(from)];
    return beams[static_cast<std::size_t>(i)].copy_from(from == spared ? spare : beams[static_cast<std::size_t>(from)]);
  };
  for (index_t i = 0; i < n; ++i) done[static_cast<std::size_t>(i)] = order[static_cast<std::size_t>(i)] == i;
  for (;;) {
    bool progress = false;
    index_t cycle = -1;
    for (index_t i = 0; i < n; ++i) {
      if (done[static_cast<std::size_t>(i)]) continue;
      if (wanted[static_cast<std::size_t>(i)] == 0 || spared == i) {
        if (Status s = write(i); !s) return s;
        progress = true;
      } else {
        cycle = i;
      }
    }
    if (cycle < 0) return {};
    if (progress) continue;
    spared = cycle;  // all that are left change places in cycles: set one aside
    if (Status s = spare.copy_from(beams[static_cast<std::size_t>(cycle)]); !s) return s;
  }
}

}  // namespace beaconkv::inline v0
