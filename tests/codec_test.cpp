// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "beaconkv/memory/codec.hpp"

#include <cmath>
#include <cstring>
#include <span>
#include <vector>

#include "beaconkv/memory/encode_rows.hpp"
#include "support/check.hpp"
#include "support/instruction_sets.hpp"
#include "support/random.hpp"

namespace {

using namespace beaconkv;
using namespace beaconkv::test;

static_assert(encode<float16>(1.0F).bits == 0x3C00 && encode<bfloat16>(1.0F).bits == 0x3F80, "usable in constants");
static_assert(decode(float16{0xC000}) == -2.0F && decode(bfloat16{0xC000}) == -2.0F);
static_assert(encode<float>(0.1F) == 0.1F && decode(0.1F) == 0.1F);

/// A 16-bit format: `exponent` bits of exponent, `mantissa` bits of mantissa.
struct Format {
  int exponent;
  int mantissa;

  [[nodiscard]] std::uint16_t infinity() const { return static_cast<std::uint16_t>(((1 << exponent) - 1) << mantissa); }

  /// From the definition. Precondition: neither infinite nor NaN.
  [[nodiscard]] double value(std::uint16_t bits) const {
    const int e = (bits & 0x7FFF) >> mantissa;
    const int m = bits & ((1 << mantissa) - 1);
    const int bias = (1 << (exponent - 1)) - 1;
    const double size = e == 0 ? std::ldexp(m, 1 - bias - mantissa) : std::ldexp(m + (1 << mantissa), e - bias - mantissa);
    return (bits & 0x8000) != 0 ? -size : size;
  }

  /// The nearest of two neighbours, the even one in the middle; beyond the largest number as if one more followed.
  [[nodiscard]] std::uint16_t nearest(double x) const {
    std::uint16_t low = 0;  // the largest not above |x|
    std::uint16_t high = infinity();
    while (high - low > 1) {
      const auto middle = static_cast<std::uint16_t>((low + high) / 2);
      (value(middle) <= std::abs(x) ? low : high) = middle;
    }
    const double above = high == infinity() ? std::ldexp(1.0, 1 << (exponent - 1)) : value(high);
    const double to_low = std::abs(x) - value(low);
    const double to_high = above - std::abs(x);
    const std::uint16_t even = low % 2 == 0 ? low : high;
    const std::uint16_t size = to_low == to_high ? even : (to_low < to_high ? low : high);
    return static_cast<std::uint16_t>(size | (std::signbit(x) ? 0x8000 : 0));
  }
};

template <class T>
inline constexpr Format format_of{};
template <>
inline constexpr Format format_of<float16>{5, 10};
template <>
inline constexpr Format format_of<bfloat16>{8, 7};

template <class T>
T from_bits(unsigned bits) {
  return T{static_cast<std::uint16_t>(bits)};
}

TEMPLATE_TEST_CASE("Every 16-bit pattern decodes exactly and encodes to itself", "", float16, bfloat16) {
  const Format format = format_of<TestType>;
  index_t wrong = 0;
  for (unsigned bits = 0; bits < 65536; ++bits) {
    const TestType stored = from_bits<TestType>(bits);
    const float x = decode(stored);
    const unsigned size = bits & 0x7FFFU;
    bool right = false;
    if (size < format.infinity())
      right = static_cast<double>(x) == format.value(stored.bits) && std::signbit(x) == (bits > 0x7FFF) &&
              encode<TestType>(x) == stored;
    else if (size == format.infinity())
      right = std::isinf(x) && std::signbit(x) == (bits > 0x7FFF) && encode<TestType>(x) == stored;
    else
      right = std::isnan(x) && std::signbit(x) == (bits > 0x7FFF) && std::isnan(decode(encode<TestType>(x)));
    if (!right && ++wrong == 1) {
      CAPTURE(bits, x);
      CHECK(right);
    }
  }
  CHECK(wrong == 0);
}

TEMPLATE_TEST_CASE("Between two neighbours: ties go to the even one, all else to the nearer", "", float16, bfloat16) {
  const Format format = format_of<TestType>;
  index_t wrong = 0;
  for (unsigned bits = 0; bits < format.infinity(); ++bits) {
    const auto low = static_cast<std::uint16_t>(bits);
    const auto high = static_cast<std::uint16_t>(bits + 1);
    const double above = high == format.infinity() ? std::ldexp(1.0, 1 << (format.exponent - 1)) : format.value(high);
    const auto middle = static_cast<float>((format.value(low) + above) / 2);  // exact
    const std::uint16_t even = low % 2 == 0 ? low : high;
    for (const float sign : {1.0F, -1.0F}) {
      const auto code = [&](float x) { return encode<TestType>(sign * x).bits & 0x7FFF; };
      const bool right = code(middle) == even && code(std::nextafter(middle, 0.0F)) == low &&
                         code(std::nextafter(middle, infinity_float())) == high;
      if (!right && ++wrong == 1) {
        CAPTURE(bits, middle, sign);
        CHECK(right);
      }
    }
  }
  CHECK(wrong == 0);
}

TEMPLATE_TEST_CASE("Any float becomes the nearest number of the type", "", float16, bfloat16) {
  Random random;
  CAPTURE(random.seed());
  const Format format = format_of<TestType>;
  index_t wrong = 0;
  const auto check = [&](float x) {
    const TestType stored = encode<TestType>(x);
    const bool right = std::isnan(x) ? std::isnan(decode(stored)) : stored.bits == format.nearest(static_cast<double>(x));
    if (!right && ++wrong == 1) {
      CAPTURE(x, bits_of(x), stored.bits);
      CHECK(right);
    }
  };
  for (index_t i = 0; i < 200000; ++i) check(float_of(random.bits()));
  for (index_t i = 0; i < 200000; ++i) check(random.normal() * std::ldexp(1.0F, static_cast<int>(random.integer(-30, 17))));
  for (const std::uint32_t sign : {0U, 0x80000000U})
    for (const std::uint32_t x : {0U,          1U,          0x007FFFFFU, 0x00800000U, 0x33000000U, 0x33000001U, 0x32FFFFFFU,
                                  0x387FFFFFU, 0x38800000U, 0x387FE000U, 0x387FF000U, 0x477FE000U, 0x477FEFFFU, 0x477FF000U,
                                  0x7F7FFFFFU, 0x7F7F7FFFU, 0x7F7F8000U, 0x7F800000U, 0x7F800001U, 0x7FFFFFFFU})
      check(float_of(sign | x));
  CHECK(wrong == 0);
}

TEST_CASE("Numbers too large become infinity, numbers too small a zero of their sign") {
  CHECK(encode<float16>(65519.0F).bits == 0x7BFF);
  CHECK(encode<float16>(65520.0F).bits == 0x7C00);
  CHECK(encode<float16>(-65520.0F).bits == 0xFC00);
  CHECK(encode<float16>(0x1p-25F).bits == 0);
  CHECK(encode<float16>(-0x1p-25F).bits == 0x8000);
  CHECK(encode<float16>(std::nextafter(0x1p-25F, 1.0F)).bits == 1);
  CHECK(encode<bfloat16>(3.4e38F).bits == 0x7F80);
  CHECK(encode<bfloat16>(0x1p-134F).bits == 0);
}

TEST_CASE("A float is stored as it is, NaN payload and all") {
  for (const std::uint32_t bits : {0x80000000U, 1U, 0x7F800001U, 0xFFFFFFFFU, 0x7F800000U})
    CHECK(bits_of(decode(encode<float>(float_of(bits)))) == bits);
}

TEST_CASE("[C7] storage types that no codec reads are refused when a program is compiled", "[C7]") {
  CHECK(StorageType<float>);
  CHECK(StorageType<float16>);
  CHECK(StorageType<bfloat16>);
  CHECK(StorageType<std::int8_t>);
  CHECK(StorageType<q8_0>);
  CHECK_FALSE(StorageType<std::uint8_t>);
  CHECK_FALSE(StorageType<std::uint16_t>);
  CHECK_FALSE(StorageType<double>);
}

/// Every finite code of an 8-bit float, from its definition.
template <class T>
double value_of_code(unsigned code) {
  const bool e4m3 = std::is_same_v<T, float8_e4m3>;
  const int mantissa = e4m3 ? 3 : 2;
  const int bias = e4m3 ? 7 : 15;
  const int e = static_cast<int>((code & 0x7FU) >> mantissa);
  const int m = static_cast<int>(code & ((1U << mantissa) - 1U));
  const double size = e == 0 ? std::ldexp(m, 1 - bias - mantissa) : std::ldexp(m + (1 << mantissa), e - bias - mantissa);
  return (code & 0x80U) != 0 ? -size : size;
}

template <class T>
T from_code(unsigned code) {
  return T{static_cast<std::uint8_t>(code)};
}

TEMPLATE_TEST_CASE("8-bit floats: every code, and the nearest code of what lies between two", "", float8_e4m3, float8_e5m2) {
  const unsigned last = std::is_same_v<TestType, float8_e4m3> ? 0x7EU : 0x7BU;  // the largest finite one
  CHECK(value_of_code<TestType>(last) == static_cast<double>(largest_before_scale<TestType>));
  for (unsigned code = 0; code <= last; ++code)
    for (const unsigned sign : {0U, 0x80U}) {
      CAPTURE(code, sign);
      const double value = value_of_code<TestType>(code | sign);
      REQUIRE(bits_of(decode(from_code<TestType>(code | sign))) == bits_of(static_cast<float>(value)));
      REQUIRE(encode<TestType>(static_cast<float>(value)).bits == (code | sign));
      if (code == last) continue;
      const double next = value_of_code<TestType>((code + 1) | sign);
      const auto middle = static_cast<float>((value + next) / 2);
      REQUIRE(encode<TestType>(middle).bits == ((code % 2 == 0 ? code : code + 1) | sign));
      REQUIRE(encode<TestType>(std::nextafter(middle, 0.0F)).bits == (code | sign));
      REQUIRE(encode<TestType>(std::nextafter(middle, sign != 0 ? -1e9F : 1e9F)).bits == ((code + 1) | sign));
    }
  CHECK(encode<TestType>(1e-30F).bits == 0);
  CHECK(encode<TestType>(-0.0F).bits == 0x80U);
  CHECK(std::isnan(decode(encode<TestType>(nan_float()))));
}

TEST_CASE("8-bit floats: what is too large becomes infinity, or NaN where there is none") {
  CHECK(encode<float8_e4m3>(464.0F).bits == 0x7EU);  // half way to 480, which is no number any more: the even code is 448
  CHECK(std::isnan(decode(encode<float8_e4m3>(std::nextafter(464.0F, 1e9F)))));
  CHECK(std::isnan(decode(encode<float8_e4m3>(-infinity_float()))));
  CHECK(std::isnan(decode(from_code<float8_e4m3>(0xFFU))));
  CHECK(encode<float8_e5m2>(std::nextafter(61440.0F, 0.0F)).bits == 0x7BU);
  CHECK(decode(encode<float8_e5m2>(61440.0F)) == infinity_float());
  CHECK(decode(encode<float8_e5m2>(-1e30F)) == -infinity_float());
  CHECK(std::isnan(decode(from_code<float8_e5m2>(0x7DU))));
}

TEST_CASE("q8_0: the largest number of a block gives its scale, and none is off by more than half a step") {
  Random random;
  CAPTURE(random.seed());
  for (index_t round = 0; round < 50; ++round) {
    const std::vector<float> in = random.normals(32, std::exp2(random.uniform(-8.0F, 8.0F)));
    double top = 0;
    for (const float x : in) top = std::max(top, std::abs(static_cast<double>(x)));
    const q8_0 block = encode_block(in.data());
    CHECK(block.scale == encode<float16>(static_cast<float>(top / 127)));
    float out[32];
    decode_block(block, out);
    for (std::size_t i = 0; i < 32; ++i) {
      REQUIRE(block.values[i] == static_cast<std::int8_t>(std::lround(static_cast<double>(in[i]) / (top / 127))));
      REQUIRE_THAT(out[i], Catch::Matchers::WithinAbs(in[i], top / 127 * 0.5 + top * 0x1p-10));
    }
  }
  const std::vector<float> zeros(32, 0.0F);
  CHECK(encode_block(zeros.data()) == q8_0{});
}

TEST_CASE("q8_0: a block with a number that is not finite is not finite") {
  std::vector<float> in(32, 1.0F);
  in[5] = nan_float();
  float out[32];
  decode_block(encode_block(in.data()), out);
  for (const float x : out) CHECK(std::isnan(x));
}

template <class T>
T stored_with(std::uint32_t code) {
  if constexpr (std::is_same_v<T, float>) {
    return float_of(code);
  } else if constexpr (std::is_same_v<T, std::int8_t>) {
    return static_cast<std::int8_t>(code);
  } else {
    T x;
    x.bits = static_cast<decltype(x.bits)>(code);
    return x;
  }
}

/// Rows of every code, and of NaNs and subnormals among them.
TEMPLATE_TEST_CASE("Many rows at once decode to the same bits as one number", "", float, float16, bfloat16, float8_e4m3,
                   float8_e5m2, std::int8_t) {
  Random random;
  CAPTURE(random.seed());
  const ForcedSet set(GENERATE(from_range(supported_sets())));
  for (const index_t dim : {1, 3, 15, 16, 17, 64, 65, 128}) {
    const index_t rows = 65536 / dim + 1;
    const index_t stride = dim + 3;
    std::vector<TestType> stored(static_cast<std::size_t>(rows * stride));
    std::uint32_t code = 0;
    for (TestType& x : stored) {
      code = sizeof(TestType) == 4 ? static_cast<std::uint32_t>(random.integer(0, 1 << 30)) * 4U + 3U : code + 1;
      x = stored_with<TestType>(code);
    }
    const std::vector<float> scales = random.normals(rows);
    std::vector<float> out(static_cast<std::size_t>(rows * dim));
    detail::run<detail::DecodeRows<TestType>>(detail::StoredRows<TestType>{stored.data(), stride, rows, dim, scales.data(), 1},
                                              out.data());
    index_t different = 0;
    for (index_t i = 0; i < rows; ++i)
      for (index_t d = 0; d < dim; ++d) {
        float expected = decode(stored[static_cast<std::size_t>(i * stride + d)]);
        if (takes_scale<TestType>) expected *= scales[static_cast<std::size_t>(i)];
        const float got = out[static_cast<std::size_t>(i * dim + d)];
        different += bits_of(got) == bits_of(expected) ? 0 : 1;
      }
    CAPTURE(dim);
    CHECK(different == 0);
  }
}

TEST_CASE("Many blocks of q8_0 decode to the same bits as one") {
  Random random;
  CAPTURE(random.seed());
  const ForcedSet set(GENERATE(from_range(supported_sets())));
  const std::vector<float> numbers = random.normals(20 * 96);
  std::vector<q8_0> stored;
  for (std::size_t b = 0; b < numbers.size(); b += 32) stored.push_back(encode_block(numbers.data() + b));
  std::vector<float> out(numbers.size());
  detail::run<detail::DecodeRows<q8_0>>(detail::StoredRows<q8_0>{stored.data(), 3, 20, 96, nullptr, 0}, out.data());
  std::vector<float> expected(numbers.size());
  for (std::size_t b = 0; b < stored.size(); ++b) decode_block(stored[b], expected.data() + b * 32);
  CHECK(same_bits(out, expected));
}

/// What a row encodes to, by `encode` alone.
template <class T>
std::vector<T> encoded_one_by_one(std::span<const float> in, float factor) {
  std::vector<T> out;
  for (const float x : in) out.push_back(encode<T>(factor > 0 ? (takes_scale<T> ? x * factor : x) : 0.0F));
  return out;
}

template <class T>
index_t num_different(const std::vector<T>& a, const std::vector<T>& b) {
  index_t different = 0;
  for (std::size_t i = 0; i < a.size(); ++i) different += std::memcmp(&a[i], &b[i], sizeof(T)) == 0 ? 0 : 1;
  return different;
}

/// Floats from all over their range, then those around every number of the type and every middle between two.
template <class T>
std::vector<float> hard_to_encode() {
  std::vector<float> out;
  if constexpr (std::is_same_v<T, std::int8_t>) {
    for (int halves = -254; halves <= 254; ++halves) {
      const float x = 0.5F * static_cast<float>(halves);
      for (const float y : {x, std::nextafter(x, 0.0F), halves == 0 ? -0.0F : x * 0.999F}) out.push_back(y);
    }
    return out;
  }
  for (std::uint64_t bits = 0; bits < 0x100000000U; bits += 4093) out.push_back(float_of(static_cast<std::uint32_t>(bits)));
  const unsigned codes = sizeof(T) == 1 ? 256 : 65536;
  for (unsigned code = 0; code < codes; ++code) {
    const std::uint32_t bits = bits_of(decode(stored_with<T>(code)));
    const std::uint32_t next = bits_of(decode(stored_with<T>(code + 1 == codes ? code : code + 1)));
    const std::uint32_t middle = bits / 2 + next / 2 + (bits & next & 1U);
    for (const std::uint32_t x : {bits, middle, bits_of((decode(stored_with<T>(code)) + float_of(next)) / 2)})
      for (const std::uint32_t y : {x - 1, x, x + 1}) out.push_back(float_of(y));
  }
  return out;
}

TEMPLATE_TEST_CASE("Rows encode to the same bits as one number", "", float16, bfloat16, float8_e4m3, float8_e5m2, std::int8_t) {
  const ForcedSet set(GENERATE(from_range(supported_sets())));
  const std::vector<float> numbers = hard_to_encode<TestType>();
  for (const float factor : {1.0F, 0.37F, 0.0F}) {
    CAPTURE(factor);
    std::vector<TestType> out(numbers.size());
    detail::run<detail::EncodeRow<TestType>>(numbers.data(), static_cast<index_t>(numbers.size()), factor, out.data());
    CHECK(num_different(out, encoded_one_by_one<TestType>(numbers, factor)) == 0);
  }
  for (index_t n = 0; n <= 67; ++n) {  // and nothing behind the row
    const auto size = static_cast<std::size_t>(n);
    std::vector<TestType> out(size + 1, encode<TestType>(77.0F));
    detail::run<detail::EncodeRow<TestType>>(numbers.data() + 5, n, 0.5F, out.data());
    const TestType last = out.back();
    out.pop_back();
    REQUIRE(num_different(out, encoded_one_by_one<TestType>(std::span(numbers).subspan(5, size), 0.5F)) == 0);
    REQUIRE(last == encode<TestType>(77.0F));
  }
}

TEST_CASE("Blocks of q8_0 encode to the same bits as one, and the scale of a row is that of its numbers") {
  Random random;
  CAPTURE(random.seed());
  const ForcedSet set(GENERATE(from_range(supported_sets())));
  std::vector<float> numbers = random.normals(20 * 96);
  for (std::size_t i = 0; i < 96; ++i) numbers[i] *= 1e-41F;  // too small for a scale
  for (std::size_t i = 96; i < 128; ++i) numbers[i] = -0.0F;
  numbers[130] = nan_float();
  numbers[200] = -infinity_float();
  std::vector<q8_0> out(numbers.size() / 32);
  detail::run<detail::EncodeRow<q8_0>>(numbers.data(), static_cast<index_t>(numbers.size()), 1.0F, out.data());
  std::vector<q8_0> expected;
  for (std::size_t b = 0; b < numbers.size(); b += 32) expected.push_back(encode_block(numbers.data() + b));
  CHECK(num_different(out, expected) == 0);
  for (index_t first : {0, 90, 120, 190, 250})
    for (index_t n = 0; n <= 67; ++n) {
      std::int32_t top = -1;
      detail::run<detail::LargestMagnitude>(numbers.data() + first, n, &top);
      REQUIRE(bits_of(detail::scale_from(top, 127.0F)) == bits_of(detail::scale_for(numbers.data() + first, n, 127.0F)));
    }
}

}  // namespace
