// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

// Rows of every storage type: what is read back, what a scale may be shared by, what a move copies.

#include <cmath>
#include <vector>

#include "beaconkv/policy/realign.hpp"
#include "support/check.hpp"
#include "support/layouts.hpp"

namespace {

using namespace beaconkv;
using namespace beaconkv::test;

/// Largest error of a stored number, relative to the row's largest.
template <class T>
constexpr double step = 0;
template <>
constexpr double step<float16> = 0x1p-11;
template <>
constexpr double step<bfloat16> = 0x1p-8;
template <>
constexpr double step<std::int8_t> = 0.5 / 127;
template <>
constexpr double step<q8_0> = 0.5 / 127 + 0x1p-10;
template <>
constexpr double step<float8_e4m3> = 0x1p-4;
template <>
constexpr double step<float8_e5m2> = 0x1p-3;

double largest(const std::vector<float>& row) {
  double out = 0;
  for (const float x : row) out = std::max(out, std::abs(static_cast<double>(x)));
  return out;
}

}  // namespace

TEMPLATE_TEST_CASE("a row is read back as it was stored, to a step of its type, in every layout", "", float, float16, bfloat16,
                   std::int8_t, q8_0, float8_e4m3, float8_e5m2) {
  Random random;
  CAPTURE(random.seed());
  for (const Layout layout : all_layouts) {
    LayoutPlane<TestType> plane(layout, 2, 64, 8, random);
    std::vector<std::vector<float>> rows;
    for (index_t h = 0; h < 2; ++h)
      for (index_t t = 0; t < 8; ++t) {
        rows.push_back(random.normals(64, std::exp2(static_cast<float>(random.integer(-6, 6)))));
        plane.write(h, t, rows.back());
      }
    for (index_t h = 0; h < 2; ++h)
      for (index_t t = 0; t < 8; ++t) {
        CAPTURE(static_cast<int>(layout), h, t);
        const std::vector<float>& want = rows[static_cast<std::size_t>(h * 8 + t)];
        const std::vector<float> got = plane.read(h, t);
        for (std::size_t d = 0; d < 64; ++d)
          REQUIRE_THAT(got[d], Catch::Matchers::WithinAbs(want[d], step<TestType> * largest(want)));
      }
    REQUIRE(plane.fillers_untouched());
  }
}

TEMPLATE_TEST_CASE("a row with a number that is not finite is not finite when it is read", "", float, float16, bfloat16,
                   std::int8_t, q8_0, float8_e4m3, float8_e5m2) {
  Random random;
  for (const float bad : {nan_float(), infinity_float()}) {
    LayoutPlane<TestType> plane(Layout::head_major, 1, 32, 4, random);
    std::vector<float> row = random.normals(32);
    row[7] = bad;
    plane.write(0, 1, row);
    CHECK_FALSE(detail::all_finite(plane.read(0, 1).data(), 32));
    plane.write(0, 1, std::vector<float>(32, 0.0F));
    CHECK(plane.read(0, 1) == std::vector<float>(32, 0.0F));
  }
}

TEST_CASE("scales stand beside the types that take them, and nowhere else") {
  std::vector<float8_e4m3> bytes(64);
  std::vector<float> floats(64);
  std::vector<std::int8_t> ints(64);
  std::vector<q8_0> blocks(4);
  float scale = 0.5F;
  const auto check = [](const auto& plane) { return detail::validate_plane(plane, "keys"); };
  check_invalid(check(head_major_plane(bytes.data(), 1, 16, 4)), {"keys.scales.base is null"});
  CHECK(check(with_scale(head_major_plane(bytes.data(), 1, 16, 4), &scale)).ok());
  Plane<float> plain = head_major_plane(floats.data(), 1, 16, 4);
  plain.scales.base = &scale;
  check_invalid(check(plain), {"keys.scales", "none"});
  check_invalid(check(with_scale(head_major_plane(ints.data(), 1, 16, 4), &scale)), {"keys.scales.token = 0", "int8"});
  CHECK(check(with_row_scales(head_major_plane(ints.data(), 1, 16, 4), floats.data())).ok());
  check_invalid(check(head_major_plane(blocks.data(), 1, 33, 4)), {"keys.dim = 33", "32"});
  CHECK(check(head_major_plane(blocks.data(), 1, 32, 4)).ok());
}

TEMPLATE_TEST_CASE("a shared scale is used as it is: one for all, or one for each head", "", float8_e4m3, float8_e5m2) {
  Random random;
  CAPTURE(random.seed());
  std::vector<TestType> memory(2 * 4 * 16);
  float scales[2] = {0.25F, 0.5F};
  const Plane<TestType> shared = with_scale(head_major_plane(memory.data(), 2, 16, 4), scales);
  const Plane<TestType> heads = with_head_scales(head_major_plane(memory.data(), 2, 16, 4), scales);
  const std::vector<float> row = random.normals(16);
  for (index_t h = 0; h < 2; ++h) {
    detail::store_row(heads, h, 2, row.data());
    std::vector<float> got(16);
    detail::load_row(heads, h, 2, got.data());
    for (std::size_t d = 0; d < 16; ++d) {
      REQUIRE(got[d] == scales[h] * decode(encode<TestType>(row[d] / scales[h])));
      REQUIRE(shared.row(h, 2)[d] == encode<TestType>(row[d] / scales[h]));
    }
    detail::load_row(shared, h, 2, got.data());
    for (std::size_t d = 0; d < 16; ++d) REQUIRE(got[d] == 0.25F * decode(encode<TestType>(row[d] / scales[h])));
  }
  CHECK(scales[0] == 0.25F);
  CHECK(scales[1] == 0.5F);
}

TEMPLATE_TEST_CASE("[C7] quantised keys: a hundred steps as one move lose what one rounding loses", "[C7]", std::int8_t, q8_0,
                   float8_e4m3) {
  Random random;
  CAPTURE(random.seed());
  const RopeTable rope({.head_dim = 64});
  const Shape shape{.query_heads = 1, .kv_heads = 1, .head_dim = 64};
  OwningCache<TestType> before(shape, 32);
  for (position_t p = 0; p < 32; ++p) REQUIRE(before.append(random.normals(64), std::vector<float>(64, 1.0F), p).ok());
  OwningCache<TestType> one = before;
  OwningCache<TestType> many = before;
  Workspace work(realign_workspace_size(64));
  const auto at = [](position_t p) { return std::vector<position_t>(32, p); };
  REQUIRE(realign_keys(one.view(), 0, at(1000), at(900), rope, work).ok());
  for (position_t p = 1000; p > 900; --p) REQUIRE(realign_keys(many.view(), 0, at(p), at(p - 1), rope, work).ok());

  double worst_one = 0;
  double worst_many = 0;
  std::vector<float> key(64);
  std::vector<float> moved(64);
  for (index_t s = 0; s < 32; ++s) {
    static_cast<void>(before.view().keys(0, s, 1, key.data()));
    rope.realign(key.data(), 1000, 900);
    const auto error = [&](const OwningCache<TestType>& cache) {
      static_cast<void>(cache.view().keys(0, s, 1, moved.data()));
      double worst = 0;
      for (std::size_t d = 0; d < 64; ++d)
        worst = std::max(worst, std::abs(static_cast<double>(moved[d]) - static_cast<double>(key[d])));
      return worst / largest(key);
    };
    worst_one = std::max(worst_one, error(one));
    worst_many = std::max(worst_many, error(many));
    // (c) values stay
    static_cast<void>(one.view().values(0, s, 1, moved.data()));
    std::vector<float> value(64);
    static_cast<void>(before.view().values(0, s, 1, value.data()));
    REQUIRE(moved == value);
  }
  CAPTURE(worst_one, worst_many);
  CHECK(worst_one < (std::is_same_v<TestType, float8_e4m3> ? 0.07 : 0.02));
  CHECK(worst_many > 2 * worst_one);
}

TEMPLATE_TEST_CASE("[C7] a turned key that its shared scale cannot hold is refused before any key is changed", "[C7]",
                   float8_e4m3, float8_e5m2) {
  constexpr float top = largest_before_scale<TestType>;
  std::vector<TestType> keys(2 * 4);
  std::vector<TestType> values(2 * 4);
  float scale = 2.0F;
  const RopeTable rope({.head_dim = 2});
  auto cache =
      PlaneCache<TestType>::make(with_scale(head_major_plane(keys.data(), 1, 2, 4), &scale),
                                 with_scale(head_major_plane(values.data(), 1, 2, 4), &scale), PositionMode::cache_relative)
          .or_throw();
  const float row[] = {2 * top, 2 * top};  // a turn by 45 degrees would make one of them larger
  const float small[] = {1.0F, 2.0F};
  for (index_t s = 0; s < 4; ++s) cache.store_key(0, s, s == 3 ? row : small);
  REQUIRE(cache.append_run(0, 4).ok());
  cache.move_run(0, 1, 2, 2);
  cache.truncate(3);
  const std::vector<TestType> before = keys;
  Workspace work(realign_workspace_size(2));
  check_error(realign_to_slots(cache, rope, work), StatusCode::unsupported, {"head 0, slot 2", "shared scale"});
  CHECK(keys == before);
  CHECK(cache.rotary_position(0, 1) == 2);
  scale = 4.0F;  // numbers twice as large, and twice the range: still refused
  CHECK_FALSE(realign_to_slots(cache, rope, work).ok());
  cache.store_key(0, 2, small);
  REQUIRE(realign_to_slots(cache, rope, work).ok());
  CHECK(cache.rotary_position(0, 1) == 1);
}
