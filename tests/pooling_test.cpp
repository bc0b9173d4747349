// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

// Also compiled with -ffast-math.

#include "beaconkv/algorithm/pooling.hpp"

#include <vector>

#include "support/check.hpp"
#include "support/random.hpp"
#include "support/reference.hpp"

namespace {

using namespace beaconkv;
using namespace beaconkv::test;
using Catch::Matchers::WithinAbs;

std::vector<float> pooled(const std::vector<float>& in, const Pool& pool) {
  std::vector<float> out(in.size(), -1.0F);
  pool_scores(in, pool, out);
  return out;
}

void check_close(const std::vector<float>& got, const std::vector<double>& expected) {
  REQUIRE(got.size() == expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) CHECK_THAT(static_cast<double>(got[i]), WithinAbs(expected[i], 1e-6));
}

TEST_CASE("[E4] a pool keeps the length, and its average counts the padding", "[E4]") {
  const Pool average{PoolKind::average, 5};
  check_close(pooled({1, 0, 0, 0, 0, 0}, average), {0.2, 0.2, 0.2, 0, 0, 0});
  check_close(pooled({1, 1, 1, 1, 1, 1}, average), {0.6, 0.8, 1, 1, 0.8, 0.6});
  check_close(pooled({3, 1, 2}, {PoolKind::average, 1}), {3, 1, 2});
  check_close(pooled({3, 1, 2}, {PoolKind::max, 1}), {3, 1, 2});
}

TEST_CASE("[E4] even kernels are refused", "[E4]") {
  const PoolKind kind = GENERATE(PoolKind::none, PoolKind::average, PoolKind::max);
  check_invalid(validate(Pool{kind, 4}), {"pool.kernel = 4"});
  check_invalid(validate(Pool{kind, 2}), {"pool.kernel = 2"});
  check_invalid(validate(Pool{kind, 0}), {"pool.kernel = 0"});
  check_invalid(validate(Pool{kind, -3}), {"pool.kernel = -3"});
  CHECK(validate(Pool{kind, 1}).ok());
  CHECK(validate(Pool{kind, 7}).ok());
  CHECK(validate(Pool{}).ok());
}

TEST_CASE("A maximum does not see the padding") {
  CHECK(pooled({-5, -3, -4, -1}, {PoolKind::max, 3}) == std::vector<float>{-3, -3, -1, -1});
  CHECK(pooled({0, 0, 9, 0, 0, 0}, {PoolKind::max, 3}) == std::vector<float>{0, 9, 9, 9, 0, 0});
}

TEST_CASE("Without a kind the pool changes nothing") {
  const std::vector<float> in{3, -1, 2, 0.1F};
  CHECK(pooled(in, {PoolKind::none, 1}) == in);
  CHECK(pooled(in, {PoolKind::none, 3}) == in);
  CHECK_FALSE(Pool{PoolKind::none, 3}.active());
  CHECK_FALSE(Pool{PoolKind::average, 1}.active());
  CHECK(Pool{PoolKind::average, 3}.active());
}

TEST_CASE("Pools agree with the reference for every length around the kernel") {
  Random random;
  CAPTURE(random.seed());
  const PoolKind kind = GENERATE(PoolKind::none, PoolKind::average, PoolKind::max);
  const index_t kernel = GENERATE(1, 3, 5, 7, 63, 129);
  for (const index_t n : {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 62, 63, 64, 65, 130}) {
    CAPTURE(kernel, n);
    const std::vector<float> in = random.normals(n);
    const std::vector<float> out = pooled(in, {kind, kernel});
    const reference::Row expected = reference::pool(reference::Row(in.begin(), in.end()), {kind, kernel});
    CHECK(largest_difference(out, expected) <= 2e-6);
  }
}

TEST_CASE("Pooling allocates nothing") {
  const std::vector<float> in(300, 1.0F);
  std::vector<float> out(300);
  CHECK(allocations_of([&] {
          pool_scores(in, {PoolKind::average, 7}, out);
          pool_scores(in, {PoolKind::max, 7}, out);
        }) == 0);
  CHECK(out[150] == 1.0F);
}

}  // namespace
