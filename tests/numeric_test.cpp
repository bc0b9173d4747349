// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

// Also compiled with -ffast-math, hence special numbers by their bits.

#include "beaconkv/detail/numeric.hpp"

#include <cmath>
#include <numeric>
#include <vector>

#include "beaconkv/kernel/softmax.hpp"
#include "support/check.hpp"
#include "support/instruction_sets.hpp"
#include "support/random.hpp"

namespace {

using namespace beaconkv;
using namespace beaconkv::test;

/// Reassociation costs the exponential its two-part reduction.
#ifdef __FAST_MATH__
constexpr double exponential_tolerance = 1e-5;
#else
constexpr double exponential_tolerance = 2e-7;
#endif

TEST_CASE("NaN and infinities are told by their bits") {
  for (const std::uint32_t sign : {0U, 0x80000000U}) {
    CAPTURE(sign);
    for (const std::uint32_t magnitude : {0U, 1U, 0x7FFFFFU, 0x800000U, 0x3F800000U, 0x7F7FFFFFU}) {
      CHECK(detail::is_finite(float_of(sign | magnitude)));
      CHECK_FALSE(detail::is_nan(float_of(sign | magnitude)));
    }
    CHECK_FALSE(detail::is_finite(float_of(sign | 0x7F800000U)));
    CHECK_FALSE(detail::is_nan(float_of(sign | 0x7F800000U)));
    for (const std::uint32_t magnitude : {0x7F800001U, 0x7FC00000U, 0x7FFFFFFFU}) {
      CHECK_FALSE(detail::is_finite(float_of(sign | magnitude)));
      CHECK(detail::is_nan(float_of(sign | magnitude)));
    }
  }
  CHECK(detail::is_nan(detail::quiet_nan()));
  CHECK(detail::is_finite(detail::masked_logit));
}

TEST_CASE("One number that is not finite is seen anywhere in a row") {
  for (index_t n = 0; n <= 40; ++n) {
    std::vector<float> row(static_cast<std::size_t>(n), 1.0F);
    CAPTURE(n);
    CHECK(detail::all_finite(row.data(), n));
    for (std::size_t i = 0; i < row.size(); ++i)
      for (const std::uint32_t bad : {0x7F800000U, 0xFF800000U, 0x7FC00000U, 0xFF800001U}) {
        row[i] = float_of(bad);
        CHECK_FALSE(detail::all_finite(row.data(), n));
        row[i] = 1.0F;
      }
  }
}

TEST_CASE("The larger of two is NaN where one of them is") {
  for (const std::uint32_t bits : {0x7FC00000U, 0xFFFFFFFFU}) {
    const float nan = float_of(bits);
    for (const float other : {0.0F, 1.0F, infinity_float(), -infinity_float(), nan}) {
      CHECK(detail::is_nan(detail::max_or_nan(nan, other)));
      CHECK(detail::is_nan(detail::max_or_nan(other, nan)));
    }
  }
  CHECK(detail::max_or_nan(2.0F, -3.0F) == 2.0F);
  CHECK(detail::max_or_nan(-3.0F, 2.0F) == 2.0F);
  CHECK(detail::max_or_nan(-3.0F, -3.0F) == -3.0F);
  CHECK(bits_of(detail::max_or_nan(1.0F, infinity_float())) == infinity_bits);
  CHECK(detail::max_or_nan(-infinity_float(), -5.0F) == -5.0F);
}

/// `exp(x - shift)` of every number, sixteen at a time, by the instruction set in use.
struct Exponentials {
  template <class Isa>
  BEACONKV_KERNEL void run(float* x, const float* shift, index_t n) noexcept {
    for (index_t i = 0; i < n; i += Isa::width) {
      typename Isa::Floats v, s;
      detail::load(v, x + i);
      detail::load(s, shift + i);
      v -= s;
      detail::exp_not_positive<Isa>(v);
      detail::store(x + i, v);
    }
  }
};
struct HyperbolicTangents {
  template <class Isa>
  BEACONKV_KERNEL void run(float* x, index_t n) noexcept {
    for (index_t i = 0; i < n; i += Isa::width) {
      typename Isa::Floats v;
      detail::load(v, x + i);
      detail::tanh_of<Isa>(v);
      detail::store(x + i, v);
    }
  }
};

TEST_CASE("The exponential is as exact as it says, and exactly 0 below -87") {
  const ForcedSet set(GENERATE(from_range(supported_sets())));
  std::vector<float> x;
  for (std::uint32_t bits = 0x80000000U; bits < bits_of(-87.0F); bits += 997) x.push_back(float_of(bits));  // from -0 on
  x.resize(x.size() / 16 * 16);
  std::vector<float> out = x;
  const std::vector<float> zero(x.size(), 0.0F);
  detail::run<Exponentials>(out.data(), zero.data(), static_cast<index_t>(out.size()));
  double worst = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double exact = std::exp(static_cast<double>(x[i]));
    worst = std::max(worst, std::abs(static_cast<double>(out[i]) - exact) / exact);
  }
  CHECK(worst < exponential_tolerance);

  const auto shifted = [](float value, float shift) {
    std::vector<float> values(16, value);
    const std::vector<float> shifts(16, shift);
    detail::run<Exponentials>(values.data(), shifts.data(), index_t{16});
    for (const float v : values) CHECK(bits_of(v) == bits_of(values[0]));
    return values[5];
  };
  CHECK(shifted(0.0F, 0.0F) == 1.0F);
  CHECK(shifted(-0.0F, 0.0F) == 1.0F);
  CHECK(shifted(-1234.5F, -1234.5F) == 1.0F);
  CHECK(std::abs(shifted(1000.0F, 1001.0F) - std::exp(-1.0F)) < 1e-6F);
  CHECK(shifted(std::nextafter(-87.0F, 0.0F), 0.0F) > 0.0F);
  for (const float below : {std::nextafter(-87.0F, -88.0F), -88.0F, -100.0F, -1e30F}) CHECK(shifted(below, 0.0F) == 0.0F);
  CHECK(shifted(detail::masked_logit, 3e38F) == 0.0F);  // their difference is infinite
  CHECK(shifted(detail::masked_logit, -1e30F) == 0.0F);
}

TEST_CASE("The hyperbolic tangent is as exact as it says") {
  const ForcedSet set(GENERATE(from_range(supported_sets())));
  std::vector<float> x;
  for (std::uint32_t bits = bits_of(1e-6F); bits < bits_of(200.0F); bits += 9973) {
    x.push_back(float_of(bits));
    x.push_back(-float_of(bits));
  }
  x.resize(x.size() / 16 * 16);
  std::vector<float> out = x;
  detail::run<HyperbolicTangents>(out.data(), static_cast<index_t>(out.size()));
  double worst = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double exact = std::tanh(static_cast<double>(x[i]));
    worst = std::max(worst, std::abs(static_cast<double>(out[i]) - exact) / std::abs(exact));
  }
  CHECK(worst < 5 * exponential_tolerance);
}

TEST_CASE("Softmax agrees with the formula and does not overflow") {
  std::vector<float> x{0.0F, std::log(3.0F), -1e30F, 1.0F};
  detail::softmax(x);
  const double sum = 1 + 3 + std::exp(1.0);
  CHECK(largest_difference(x, std::vector<double>{1 / sum, 3 / sum, 0, std::exp(1.0) / sum}) <= 1e-7);

  std::vector<float> large{3e38F, 3e38F, -3e38F};
  detail::softmax(large);
  CHECK(large == std::vector<float>{0.5F, 0.5F, 0.0F});
  std::vector<float> one{-5.0F};
  detail::softmax(one);
  CHECK(one[0] == 1.0F);
  std::vector<float> none;
  detail::softmax(none);
  CHECK(none.empty());
}

TEST_CASE("Softmax at every size around registers, under each instruction set") {
  Random random;
  CAPTURE(random.seed());
  for (const index_t n : {1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 65, 1000})
    for (const float width : {1e-3F, 1.0F, 30.0F, 200.0F}) {
      std::vector<float> x = random.normals(n);
      for (float& v : x) v *= width;
      double top = -1e30;
      for (const float v : x) top = std::max(top, static_cast<double>(v));
      double sum = 0;
      for (const float v : x) sum += std::exp(static_cast<double>(v) - top);
      std::vector<std::vector<float>> results;
      for (const InstructionSet set : supported_sets()) {
        const ForcedSet forced(set);
        std::vector<float> out = x;
        detail::softmax(out);
        CAPTURE(n, width);
        for (std::size_t i = 0; i < x.size(); ++i) {
          const double exact = std::exp(static_cast<double>(x[i]) - top) / sum;
          REQUIRE(std::abs(static_cast<double>(out[i]) - exact) <= 1.5e-7 * exact + 1e-37);
          for (std::size_t j = 0; j < x.size() && j < 40; ++j)
            if (x[i] < x[j]) REQUIRE(out[i] <= out[j]);
        }
        if (set != InstructionSet::baseline) results.push_back(out);
      }
      if (results.size() == 2) REQUIRE(results[0] == results[1]);
    }
}

}  // namespace
