// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "beaconkv/memory/codec.hpp"

#include <cmath>
#include <vector>

#include "support/check.hpp"
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
  CHECK(ElementCodec<float>);
  CHECK(ElementCodec<float16>);
  CHECK(ElementCodec<bfloat16>);
  CHECK_FALSE(ElementCodec<std::int8_t>);  // would be taken for a number without a scale
  CHECK_FALSE(ElementCodec<std::uint16_t>);
  CHECK_FALSE(ElementCodec<double>);
}

}  // namespace
