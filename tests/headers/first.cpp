// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include <beaconkv/beaconkv.hpp>

const char* second_error(beaconkv::Status& status);

int main() {
  // A Status goes through both translation units: the types are the same in both.
  beaconkv::Status status = beaconkv::validate(beaconkv::Shape{.query_heads = 8, .kv_heads = 2, .head_dim = 64});
  return status.ok() && second_error(status)[0] != '\0' && !status.ok() ? 0 : 1;
}
