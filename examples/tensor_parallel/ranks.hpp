// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// All that the ranks of an engine exchange for eviction. Here over MPI; yours has a transport of its own.

#include <mpi.h>

#include <span>

#include "beaconkv/types.hpp"

namespace tensor_parallel {

using beaconkv::index_t;
using beaconkv::slot_t;

/// The processes that mpirun started, each with its share of the heads. MPI ends all of them where a call fails.
class Ranks {
 public:
  Ranks(int* argc, char*** argv) {
    MPI_Init(argc, argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    MPI_Comm_size(MPI_COMM_WORLD, &size_);
  }
  ~Ranks() { MPI_Finalize(); }
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  [[nodiscard]] index_t rank() const noexcept { return rank_; }
  [[nodiscard]] index_t size() const noexcept { return size_; }

  /// The smallest of all ranks' numbers: once, for the capacity.
  [[nodiscard]] index_t smallest(index_t mine) const {
    std::int64_t all = mine;
    MPI_Allreduce(MPI_IN_PLACE, &all, 1, MPI_INT64_T, MPI_MIN, MPI_COMM_WORLD);
    return all;
  }

  /// The score rows of all ranks, by rank, `all.size() = size() * mine.size()`: for each eviction. Ranks hold consecutive
  /// heads, so this is head order. Gathered, not summed: a sum's bits would depend on how many ranks add up in which order.
  void gather(std::span<const float> mine, std::span<float> all) const {
    const int count = static_cast<int>(mine.size());
    MPI_Allgather(mine.data(), count, MPI_FLOAT, all.data(), count, MPI_FLOAT, MPI_COMM_WORLD);
  }

  /// Overwrites `slots` with those of rank 0: only to check that all ranks agree. Everywhere equally many.
  void copy_from_first(std::span<slot_t> slots) const {
    MPI_Bcast(slots.data(), static_cast<int>(slots.size()), MPI_INT32_T, 0, MPI_COMM_WORLD);
  }

  /// Ends all ranks: for an error of one, while the others may be waiting for it.
  static void abort() { MPI_Abort(MPI_COMM_WORLD, 1); }

 private:
  int rank_ = 0;
  int size_ = 0;
};

}  // namespace tensor_parallel
