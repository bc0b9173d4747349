// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

// The program of a project that uses the library.
#include <beaconkv/beaconkv.hpp>

#include <cstdio>

int main() {
  std::printf("beaconkv %d.%d.%d\n", BEACONKV_VERSION_MAJOR, BEACONKV_VERSION_MINOR, BEACONKV_VERSION_PATCH);
  const auto rope = beaconkv::RopeTable::make({.head_dim = 128, .theta = 1e6});
  const auto wrong = beaconkv::RopeTable::make({.head_dim = 0});
  return rope.ok() && rope->pairs() == 64 && !wrong.ok() && !wrong.status().message().empty() ? 0 : 1;
}
