// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

// The program of a project that uses the library.
#include <beaconkv/beaconkv.hpp>

#include <cstdio>

int main() {
  std::printf("beaconkv %d.%d.%d\n", BEACONKV_VERSION_MAJOR, BEACONKV_VERSION_MINOR, BEACONKV_VERSION_PATCH);
  const auto rope = beaconkv::RopeTable::make({.head_dim = 128, .theta = 1e6});
  const auto wrong = beaconkv::RopeTable::make({.head_dim = 0});
  if (!rope.ok() || rope->pairs() != 64 || wrong.ok() || wrong.status().message().empty()) return 1;

  // A kernel, with the project's own flags.
  std::printf("kernels: %s\n", beaconkv::name_of(beaconkv::instruction_set()));
  float scores[100] = {};
  scores[70] = scores[7] = 1.0F;
  beaconkv::slot_t best[2] = {};
  beaconkv::Workspace work(beaconkv::top_k_workspace_size(100));
  return beaconkv::top_k(scores, 2, best, work).ok() && best[0] == 7 && best[1] == 70 ? 0 : 1;
}
