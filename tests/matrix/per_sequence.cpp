// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "matrix/matrix.hpp"

TEST_CASE("the same plan and the same bytes from every layout and storage type: per_sequence", "[matrix]") {
  beaconkv::test::matrix::compare_storage_types<beaconkv::Granularity::per_sequence>();
}
