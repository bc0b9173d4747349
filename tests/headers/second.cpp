// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include <beaconkv/beaconkv.hpp>

const char* second_error(beaconkv::Status& status);

const char* second_error(beaconkv::Status& status) {
  status = beaconkv::validate(beaconkv::Shape{.query_heads = 7, .kv_heads = 2, .head_dim = 64});
  return status.message().c_str();
}
