// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "beaconkv/algorithm/row_turner.hpp"

#include <limits>
#include <string>
#include <vector>

#include "support/check.hpp"
#include "support/random.hpp"
#include "support/reference.hpp"

namespace {

using namespace beaconkv;
using namespace beaconkv::test;
using Catch::Matchers::WithinAbs;
using Catch::Matchers::WithinRel;
using reference::Row;

Row row_of(const std::vector<float>& x) { return Row(x.begin(), x.end()); }
Row frequencies_of(const RopeTable& table) { return Row(table.inv_freq().begin(), table.inv_freq().end()); }

std::vector<float> rotated(const RopeTable& table, std::vector<float> x, position_t position) {
  table.rotate(x.data(), position);
  return x;
}
std::vector<float> unrotated(const RopeTable& table, std::vector<float> x, position_t position) {
  table.unrotate(x.data(), position);
  return x;
}
std::vector<float> realigned(const RopeTable& table, std::vector<float> x, position_t from, position_t to) {
  table.realign(x.data(), from, to);
  return x;
}

void check_close(const std::vector<float>& got, const Row& expected, double tolerance) {
  CAPTURE(got, expected);
  CHECK(largest_difference(got, expected) <= tolerance);
}

RopeOptions options(index_t head_dim, RopeLayout layout = RopeLayout::half) {
  RopeOptions o;
  o.head_dim = head_dim;
  o.layout = layout;
  return o;
}

TEST_CASE("[C1] which numbers turn together", "[C1]") {
  const RopeTable half(options(4));
  const RopeTable interleaved(options(4, RopeLayout::interleaved));
  const std::vector<float> k{1, 2, 3, 4};
  check_close(rotated(half, k, 1), {-1.984111, 1.959901, 2.462378, 4.019800}, 1e-6);
  check_close(rotated(interleaved, k, 1), {-1.142640, 1.922076, 2.959851, 4.029800}, 1e-6);
  check_close(rotated(half, k, -3), {-0.566632, 2.119082, -3.111097, 3.938209}, 1e-6);
  for (const position_t position : {5, 100, 1000, 131071})
    for (const RopeTable& table : {half, interleaved}) {
      CAPTURE(position);
      check_close(rotated(table, rotated(table, k, position), -position), row_of(k), 1e-6);
      check_close(rotated(table, k, position), reference::rotated(row_of(k), position, {1, 0.01}, table.layout()), 1e-6);
    }
}

TEST_CASE("[C2] partial rotary: the first dimensions turn, the rest stays bit for bit", "[C2]") {
  RopeOptions o = options(8);
  o.rotary_dim = 4;
  const RopeTable table(o);
  const std::vector<float> k{1, 2, 3, 4, 5, 6, 7, 8};
  const std::vector<float> turned = rotated(table, k, 3);
  check_close(turned, {-1.413353, 1.879118, -2.828857, 4.058191, 5, 6, 7, 8}, 1e-6);
  CHECK(same_bits(std::span(turned).last(4), std::span(k).last(4)));
  CHECK(table.rotary_dim() == 4);
  CHECK(table.pairs() == 2);
  CHECK(table.head_dim() == 8);

  for (const index_t bad : {3, 1, 0, -2, 10}) {
    o.rotary_dim = bad;
    const std::string value = "rotary_dim = " + std::to_string(bad);
    check_invalid(RopeTable::make(o).status(), {value.c_str(), "head_dim = 8"});
  }
  check_invalid(RopeTable::make(options(7)).status(), {"rotary_dim = 7"});
}

TEST_CASE("[C3] Llama 3 bands: short wavelengths stay, long ones are divided, a blend between", "[C3]") {
  RopeOptions o = options(64);
  o.theta = 500000;
  o.scaling = Llama3Scaling{32, 1, 4, 8192};
  const RopeTable table(o);
  o.scaling = {};
  const RopeTable plain(o);
  const auto ratio = [&](index_t pair) {
    return plain.inv_freq()[static_cast<std::size_t>(pair)] / table.inv_freq()[static_cast<std::size_t>(pair)];
  };
  for (index_t i = 0; i < 32; ++i) {
    CAPTURE(i);
    if (i <= 14) CHECK(ratio(i) == 1);
    if (i >= 15 && i <= 17) CHECK((ratio(i) > 1.001 && ratio(i) < 31.99));
    if (i >= 18) CHECK_THAT(ratio(i), WithinRel(32.0, 1e-12));
  }
  CHECK_THAT(plain.inv_freq()[16], WithinRel(0.0014142136, 1e-7));
  CHECK_THAT(table.inv_freq()[16], WithinRel(0.00042955680, 1e-7));
  CHECK_THAT(table.inv_freq()[31], WithinRel(9.4183067e-8, 1e-7));

  std::vector<float> k(64, 0.0F);
  k[31] = 1;
  const std::vector<float> moved = realigned(table, k, 6000, 0);
  CHECK_THAT(static_cast<double>(moved[63]), WithinAbs(-0.000565098, 1e-8));

  o.head_dim = 128;
  o.scaling = Llama3Scaling{8, 1, 4, 8192};
  const RopeTable wide(o);
  o.scaling = {};
  const RopeTable wide_plain(o);
  for (std::size_t i = 0; i < 64; ++i) {
    const double r = wide_plain.inv_freq()[i] / wide.inv_freq()[i];
    CAPTURE(i, r);
    if (i <= 28) CHECK(r == 1);
    if (i >= 29 && i <= 34) CHECK((r > 1.001 && r < 7.999));
    if (i >= 35) CHECK_THAT(r, WithinRel(8.0, 1e-12));
  }
}

TEST_CASE("[C4] layers with tables of their own", "[C4]") {
  RopeOptions a = options(4);
  a.theta = 1e6;
  a.scaling = LinearScaling{8};
  const RopeTable layer_a(a);
  const RopeTable layer_b(options(4));
  const std::vector<float> k{0, 1, 0, 0};
  const std::vector<float> in_a = realigned(layer_a, k, 100, 0);
  const std::vector<float> in_b = realigned(layer_b, k, 100, 0);
  CHECK_THAT(std::atan2(static_cast<double>(in_a[3]), static_cast<double>(in_a[1])), WithinAbs(-0.0125, 1e-7));
  CHECK_THAT(std::atan2(static_cast<double>(in_b[3]), static_cast<double>(in_b[1])), WithinAbs(-1.0, 1e-7));
}

TEST_CASE("[C5] several axes: a table for each axis, with frequency 0 for the pairs of the others", "[C5]") {
  const RopeTable whole(options(12));
  const auto axis = [&](std::size_t first, std::size_t last) {
    RopeOptions o = options(12);
    GivenFrequencies given{std::vector<double>(6, 0.0)};
    for (std::size_t i = first; i < last; ++i) given.inv_freq[i] = whole.inv_freq()[i];
    o.scaling = given;
    return RopeTable(o);
  };
  const RopeTable time = axis(0, 2);
  const RopeTable height = axis(2, 4);
  const RopeTable width = axis(4, 6);
  Random random;
  CAPTURE(random.seed());
  const std::vector<float> key = random.normals(12);

  const std::vector<float> text = realigned(width, realigned(height, realigned(time, key, 50, 40), 50, 40), 50, 40);
  check_close(text, row_of(realigned(whole, key, 50, 40)), 1e-6);

  const std::vector<float> image = realigned(width, realigned(height, realigned(time, key, 50, 40), 3, 3), 7, 7);
  const std::vector<float> one_axis = realigned(whole, key, 50, 40);
  for (std::size_t i = 0; i < 6; ++i) {
    CAPTURE(i);
    const bool temporal = i < 2;
    CHECK((bits_of(image[i]) == bits_of(key[i])) != temporal);
    CHECK((bits_of(image[i + 6]) == bits_of(key[i + 6])) != temporal);
    if (temporal) CHECK(bits_of(image[i]) == bits_of(one_axis[i]));
  }
}

TEST_CASE("[C6] angles are exact at long distances", "[C6]") {
  const RopeTable table(options(64));
  std::vector<float> scratch(64);
  const RopeRotation far = table.rotation(131071, scratch);
  CHECK_THAT(static_cast<double>(far.cos[0]), WithinAbs(-0.8179835, 1e-7));
  CHECK_THAT(static_cast<double>(far.sin[0]), WithinAbs(-0.5752417, 1e-7));

  Random random;
  CAPTURE(random.seed());
  const std::vector<float> k = random.normals(64);
  const Row exact = reference::rotated(row_of(k), 4096 - 131071, reference::rope_frequencies(64, 10000), RopeLayout::half);
  CHECK(largest_difference(realigned(table, k, 131071, 4096), exact) <= 1e-6 * largest_size(exact));
}

TEST_CASE("[C8] scores depend on distances alone", "[C8]") {
  Random random;
  CAPTURE(random.seed());
  const auto score = [](const std::vector<float>& a, const std::vector<float>& b) {
    return reference::dot(row_of(a), row_of(b));
  };
  const RopeLayout layout = GENERATE(RopeLayout::half, RopeLayout::interleaved);
  const RopeTable table(options(64, layout));
  for (index_t round = 0; round < 50; ++round) {
    const std::vector<float> q = random.normals(64);
    const std::vector<float> k = random.normals(64);
    const position_t p = random.integer(0, 100000);
    const position_t r = random.integer(0, p);
    const position_t shift = random.integer(-r, 30000);
    const double tolerance = 1e-5 * std::sqrt(score(q, q) * score(k, k));
    CAPTURE(round, p, r, shift);
    CHECK_THAT(score(rotated(table, q, p + shift), rotated(table, k, r + shift)),
               WithinAbs(score(rotated(table, q, p), rotated(table, k, r)), tolerance));
    // A key moved there is a key that was rotated there.
    CHECK_THAT(score(rotated(table, q, p), realigned(table, rotated(table, k, r), r, r + shift)),
               WithinAbs(score(rotated(table, q, p), rotated(table, k, r + shift)), tolerance));
  }
}

TEST_CASE("Rotations agree with the reference for every size, layout and position") {
  Random random;
  CAPTURE(random.seed());
  const RopeLayout layout = GENERATE(RopeLayout::half, RopeLayout::interleaved);
  for (const index_t dim : {2, 4, 6, 10, 16, 40, 64, 80, 128, 256})
    for (const index_t rotary : {index_t{2}, dim / 4 * 2, dim}) {
      if (rotary < 2) continue;
      RopeOptions o = options(dim, layout);
      o.rotary_dim = rotary;
      const RopeTable table(o);
      const Row exact_frequencies = reference::rope_frequencies(rotary, 10000);
      for (std::size_t i = 0; i < exact_frequencies.size(); ++i)
        CHECK_THAT(table.inv_freq()[i], WithinRel(exact_frequencies[i], 1e-13));
      for (const position_t position : {0, 1, 2, 100, 4097, 1000000, -1, -777}) {
        const std::vector<float> k = random.normals(dim);
        const Row exact = reference::rotated(row_of(k), position, exact_frequencies, layout);
        CAPTURE(dim, rotary, position);
        CHECK(largest_difference(rotated(table, k, position), exact) <= 1e-6 * largest_size(exact));
        CHECK(largest_difference(realigned(table, k, 50, 50 + position), exact) <= 1e-6 * largest_size(exact));

        std::vector<float> applied = k;
        std::vector<float> scratch(static_cast<std::size_t>(rotary));
        table.apply(table.rotation(position, scratch), applied.data());
        CHECK(same_bits(applied, rotated(table, k, position)));
      }
    }
}

TEST_CASE("[B7] a move by 0 changes no bit", "[B7]") {
  Random random;
  CAPTURE(random.seed());
  const RopeTable table(options(32));
  for (index_t round = 0; round < 100; ++round) {
    std::vector<float> k;
    for (index_t d = 0; d < 32; ++d) k.push_back(float_of(random.bits()));
    const position_t at = random.integer(0, 1 << 20);
    CHECK(same_bits(realigned(table, k, at, at), k));
  }
}

TEST_CASE("Two moves are the move of their sum, and unrotate undoes rotate") {
  Random random;
  CAPTURE(random.seed());
  const RopeLayout layout = GENERATE(RopeLayout::half, RopeLayout::interleaved);
  RopeOptions o = options(40, layout);
  o.rotary_dim = 32;
  o.scaling = YarnScaling{.factor = 4, .original_max_position = 2048};
  const RopeTable table(o);
  for (index_t round = 0; round < 50; ++round) {
    const std::vector<float> k = random.normals(40);
    const position_t a = random.integer(-100000, 100000);
    const position_t b = random.integer(-100000, 100000);
    const double tolerance = 2e-6 * largest_size(row_of(k));
    CAPTURE(round, a, b);
    check_close(realigned(table, realigned(table, k, 0, a), a, a + b), row_of(realigned(table, k, 0, a + b)), tolerance);
    check_close(unrotated(table, rotated(table, k, a), a), row_of(k), tolerance);
    check_close(rotated(table, unrotated(table, k, b), b), row_of(k), tolerance);
  }
}

TEST_CASE("The attention factor multiplies once, in rotate, and never in a move") {
  RopeOptions o = options(6);
  o.rotary_dim = 4;
  o.scaling = GivenFrequencies{{1.0, 0.1}, 1.5};
  const RopeTable table(o);
  const std::vector<float> k{1, 2, 3, 4, 5, 6};
  CHECK(table.attention_factor() == 1.5);
  check_close(rotated(table, k, 7), reference::rotated(row_of(k), 7, {1.0, 0.1}, RopeLayout::half, 1.5), 2e-6);
  check_close(rotated(table, k, 0), {1.5, 3, 4.5, 6, 5, 6}, 1e-6);
  check_close(unrotated(table, k, 7), reference::rotated(row_of(k), -7, {1.0, 0.1}, RopeLayout::half, 1 / 1.5), 2e-6);
  check_close(realigned(table, k, 3, 10), reference::rotated(row_of(k), 7, {1.0, 0.1}, RopeLayout::half), 2e-6);
  check_close(realigned(table, rotated(table, k, 3), 3, 10), row_of(rotated(table, k, 10)), 5e-6);

  std::vector<float> scratch(4);
  std::vector<float> applied = k;
  table.apply(table.rotation(7, scratch), applied.data(), 1.5F);
  CHECK(same_bits(applied, rotated(table, k, 7)));
}

TEST_CASE("Linear and NTK scalings follow their formulas") {
  for (const double factor : {0.5, 1.0, 2.0, 8.0})
    for (const index_t rotary : {4, 64}) {
      CAPTURE(factor, rotary);
      RopeOptions o = options(64);
      o.rotary_dim = rotary;
      o.theta = 50000;
      o.scaling = LinearScaling{factor};
      const Row plain = reference::rope_frequencies(rotary, 50000);
      const RopeTable linear(o);
      for (std::size_t i = 0; i < plain.size(); ++i) CHECK_THAT(linear.inv_freq()[i], WithinRel(plain[i] / factor, 1e-13));
      o.scaling = NtkScaling{factor};
      const RopeTable ntk(o);
      // The first pair stays, the last one is divided by the factor.
      CHECK(ntk.inv_freq()[0] == 1);
      CHECK_THAT(ntk.inv_freq()[plain.size() - 1], WithinRel(plain.back() / factor, 1e-12));
      for (std::size_t i = 0; i < plain.size(); ++i)
        CHECK_THAT(
            ntk.inv_freq()[i],
            WithinRel(plain[i] * std::pow(factor, -2.0 * static_cast<double>(i) / static_cast<double>(rotary - 2)), 1e-12));
      CHECK(linear.attention_factor() == 1);
      CHECK(ntk.attention_factor() == 1);
    }
}

TEST_CASE("YaRN blends between the pairs that make beta_fast and beta_slow turns") {
  constexpr index_t rotary = 64;
  for (const double theta : {10.0, 10000.0, 1e6})
    for (const double original : {2048.0, 32768.0})
      for (const double factor : {1.0, 4.0, 40.0}) {
        CAPTURE(theta, original, factor);
        RopeOptions o = options(rotary);
        o.theta = theta;
        o.scaling = YarnScaling{.factor = factor, .original_max_position = original};
        const RopeTable table(o);
        // The real-valued pair that makes so many turns over the original context, by bisection.
        const auto pair_of_turns = [&](double turns) {
          double low = -1000;
          double high = 1000;
          for (int i = 0; i < 200; ++i) {
            const double middle = (low + high) / 2;
            const double made = original * std::pow(theta, -2 * middle / rotary) / (2 * std::numbers::pi);
            (made > turns ? low : high) = middle;
          }
          return low;
        };
        const double first = std::max(0.0, std::floor(pair_of_turns(32)));
        const double last = std::min(rotary - 1.0, std::ceil(pair_of_turns(1)));
        const Row plain = reference::rope_frequencies(rotary, theta);
        for (std::size_t i = 0; i < plain.size(); ++i) {
          const double stretched = std::clamp((static_cast<double>(i) - first) / (last - first), 0.0, 1.0);
          CAPTURE(i, stretched);
          CHECK_THAT(table.inv_freq()[i], WithinRel((1 - stretched) * plain[i] + stretched * plain[i] / factor, 1e-12));
        }
        CHECK_THAT(table.attention_factor(), WithinRel(factor > 1 ? 0.1 * std::log(factor) + 1 : 1, 1e-12));
      }
}

TEST_CASE("YaRN takes another attention factor, and ends that fall together") {
  RopeOptions o = options(8);
  o.scaling = YarnScaling{.factor = 4, .original_max_position = 4096, .attention_factor = 1.25};
  CHECK(RopeTable(o).attention_factor() == 1.25);
  o.scaling = YarnScaling{.factor = 0.5, .original_max_position = 4096};
  CHECK(RopeTable(o).attention_factor() == 1);
  o.scaling = YarnScaling{.factor = 4, .original_max_position = 1, .beta_fast = 1e9, .beta_slow = 0.2};  // both round to pair 0
  const RopeTable table(o);
  for (std::size_t i = 0; i < 4; ++i) {
    CHECK(std::isfinite(table.inv_freq()[i]));
    CHECK_THAT(table.inv_freq()[i], WithinRel(std::pow(0.1, static_cast<double>(i)) / (i > 0 ? 4 : 1), 1e-12));
  }
}

TEST_CASE("The engine's own frequencies are taken as they are") {
  RopeOptions o = options(8);
  o.rotary_dim = 6;
  o.scaling = GivenFrequencies{{0.5, 0.0, 3.0}};
  const RopeTable table(o);
  CHECK(frequencies_of(table) == Row{0.5, 0.0, 3.0});
  CHECK(table.attention_factor() == 1);
}

TEST_CASE("Tables that cannot be made are refused by name and value") {
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  constexpr double infinity = std::numeric_limits<double>::infinity();
  RopeOptions o = options(0);
  const auto status = [&] { return RopeTable::make(o).status(); };
  check_invalid(status(), {"head_dim = 0"});
  o = options(-8);
  check_invalid(status(), {"head_dim = -8"});
  o = options(8);
  for (const double theta : {0.0, -1.0, nan, infinity}) {
    o.theta = theta;
    check_invalid(status(), {"theta = "});
  }
  o = options(8);
  const auto check_scaling = [&](const RopeScaling& scaling, std::initializer_list<const char*> parts) {
    o.scaling = scaling;
    check_invalid(status(), parts);
  };
  for (const double factor : {0.0, -2.0, nan, infinity}) {
    check_scaling(LinearScaling{factor}, {"scaling.factor = "});
    check_scaling(NtkScaling{factor}, {"scaling.factor = "});
    check_scaling(Llama3Scaling{.factor = factor}, {"scaling.factor = "});
    check_scaling(YarnScaling{.factor = factor, .original_max_position = 100}, {"scaling.factor = "});
  }
  check_scaling(Llama3Scaling{.original_max_position = 0}, {"scaling.original_max_position = 0"});
  check_scaling(Llama3Scaling{.low_freq_factor = 4, .high_freq_factor = 4}, {"low_freq_factor = 4", "high_freq_factor = 4"});
  check_scaling(Llama3Scaling{.low_freq_factor = -1}, {"low_freq_factor = -1"});
  check_scaling(YarnScaling{.factor = 4}, {"scaling.original_max_position = 0"});
  check_scaling(YarnScaling{.factor = 4, .original_max_position = 100, .beta_fast = 1, .beta_slow = 2},
                {"beta_slow = 2", "beta_fast = 1"});
  check_scaling(YarnScaling{.factor = 4, .original_max_position = 100, .beta_slow = 0}, {"beta_slow = 0"});
  check_scaling(YarnScaling{.factor = 4, .original_max_position = 100, .attention_factor = -3.0},
                {"scaling.attention_factor = -3"});
  check_scaling(GivenFrequencies{{1, 2, 3}}, {"inv_freq has 3", "rotary_dim = 8", "needs 4"});
  check_scaling(GivenFrequencies{{1, 2, nan, 3}}, {"scaling.inv_freq[2]"});
  check_scaling(GivenFrequencies{{1, -2, 1, 3}}, {"scaling.inv_freq[1] = -2"});
  check_scaling(GivenFrequencies{{1, 2, 1, 3}, 0}, {"scaling.attention_factor = 0"});
  o.theta = 1;
  check_scaling(YarnScaling{.factor = 4, .original_max_position = 100}, {"theta = 1"});
  o = options(8);
  o.rotary_dim = 2;
  check_scaling(NtkScaling{2}, {"rotary_dim = 2", "NTK"});
  CHECK_THROWS_AS(RopeTable(o), Error);
}

TEST_CASE("A key moves from one table to another") {
  RopeOptions o = options(16);
  const RopeTable short_table(o);
  o.scaling = YarnScaling{.factor = 8, .original_max_position = 4096};
  const RopeTable long_table(o);
  Random random;
  CAPTURE(random.seed());
  const std::vector<float> k = random.normals(16);
  std::vector<float> moved = rotated(short_table, k, 700);
  REQUIRE(realign(moved.data(), short_table, 700, long_table, 650).ok());
  check_close(moved, row_of(rotated(long_table, k, 650)), 3e-6 * largest_size(row_of(k)));

  const std::vector<float> before = moved;
  RopeOptions other = options(16);
  other.rotary_dim = 8;
  check_error(realign(moved.data(), short_table, 1, RopeTable(other), 2), StatusCode::unsupported, {"rotary_dim (16, 8)"});
  check_error(realign(moved.data(), short_table, 1, RopeTable(options(16, RopeLayout::interleaved)), 2),
              StatusCode::unsupported, {"layout"});
  check_error(realign(moved.data(), short_table, 1, RopeTable(options(32)), 2), StatusCode::unsupported, {"head_dim (16, 32)"});
  CHECK(same_bits(moved, before));
}

/// Calls `f` under each instruction set of this machine.
template <class F>
void for_each_instruction_set(F f) {
  const InstructionSet before = instruction_set();
  for (const InstructionSet set : {InstructionSet::baseline, InstructionSet::avx2, InstructionSet::avx512}) {
    if (!use_instruction_set(set)) continue;
    INFO(name_of(set));
    f(set);
  }
  REQUIRE(use_instruction_set(before).ok());
}

TEST_CASE("A rotation is exact to the rounding of a float, and the same bits whichever way it is formed") {
  Random random;
  CAPTURE(random.seed());
  for (const index_t dim : {2, 6, 30, 32, 34, 66, 128, 256, 260, 300}) {
    const RopeTable table(options(dim));
    Workspace work(rope_cursor_workspace_size(dim));
    std::vector<float> scratch(static_cast<std::size_t>(dim));
    const auto bits_of_rotation = [](const RopeRotation& r) {
      std::vector<std::uint32_t> out;
      for (const auto& part : {r.cos, r.sin})
        for (const float x : part) out.push_back(bits_of(x));
      return out;
    };
    for_each_instruction_set([&](InstructionSet) {
      const Workspace::Frame frame(work);
      RopeCursor cursor(table, work);
      position_t delta = 0;
      for (index_t round = 0; round < 200; ++round) {
        // Steps of a few positions now and then, as compaction makes them, and jumps to where nothing is stored, and back.
        if (round % 20 == 0) delta = random.integer(-200000, 200000);
        if (round % 20 == 10) delta = random.integer(-5000, 5000);
        delta += random.integer(-2, 2) * random.integer(0, 40);
        if (round % 7 == 0) delta = -delta;
        CAPTURE(dim, round, delta);
        const RopeRotation got = cursor.at(delta);
        REQUIRE(got.cos.size() == table.inv_freq().size());
        for (std::size_t i = 0; i < got.cos.size(); ++i) {
          const double angle = static_cast<double>(delta) * table.inv_freq()[i];
          const double tolerance = 0x1p-25 + 1e-15 * (1 + std::abs(angle));
          REQUIRE_THAT(static_cast<double>(got.cos[i]), WithinAbs(std::cos(angle), tolerance));
          REQUIRE_THAT(static_cast<double>(got.sin[i]), WithinAbs(std::sin(angle), tolerance));
        }
        REQUIRE(bits_of_rotation(table.rotation(delta, scratch)) == bits_of_rotation(got));
        const RopeRotation back = table.rotation(-delta, scratch);  // the inverse, exactly
        for (std::size_t i = 0; i < got.cos.size(); ++i) REQUIRE((back.cos[i] == got.cos[i] && back.sin[i] == -got.sin[i]));
      }
      REQUIRE(work.peak() == rope_cursor_workspace_size(dim).bytes);
    });
  }
}

TEST_CASE("Deltas of any size split without overflow") {
  const RopeTable table(options(2));
  std::vector<float> scratch(2);
  constexpr position_t far = std::numeric_limits<position_t>::max();
  for (const position_t delta : {far, -far, std::numeric_limits<position_t>::min()}) {
    const RopeRotation r = table.rotation(delta, scratch);
    CHECK_THAT(static_cast<double>(r.cos[0] * r.cos[0] + r.sin[0] * r.sin[0]), WithinAbs(1, 1e-6));
  }
}

/// The definition, pair by pair.
void turn_slowly(const RopeTable& table, const RopeRotation& rotation, float* row, float factor) {
  row += table.rotary_first();
  for (index_t i = 0; i < table.pairs(); ++i) {
    float& x = table.layout() == RopeLayout::half ? row[i] : row[2 * i];
    float& y = table.layout() == RopeLayout::half ? row[i + table.pairs()] : row[2 * i + 1];
    const double c = static_cast<double>(rotation.cos[static_cast<std::size_t>(i)] * factor);
    const double s = static_cast<double>(rotation.sin[static_cast<std::size_t>(i)] * factor);
    const double a = static_cast<double>(x);
    const double b = static_cast<double>(y);
    x = static_cast<float>(a * c - b * s);
    y = static_cast<float>(b * c + a * s);
  }
}

TEST_CASE("Rows turn as pair by pair, one, many and on their way elsewhere, and nothing beside them changes") {
  Random random;
  CAPTURE(random.seed());
  const RopeLayout layout = GENERATE(RopeLayout::half, RopeLayout::interleaved);
  for (const index_t rotary : {2, 10, 14, 16, 18, 30, 32, 62, 64, 66, 126, 128, 130, 190, 256, 260})
    for (const index_t first : {0, 3}) {
      RopeOptions o = options(rotary + 2 * first, layout);
      o.rotary_first = first;
      o.rotary_dim = rotary;
      const RopeTable table(o);
      const index_t dim = table.head_dim();
      const index_t stride = dim + 5;
      const index_t count = random.integer(1, 40);
      const float factor = random.coin() ? 1.0F : 1.5F;
      const position_t position = random.integer(-9000, 9000);
      const std::vector<float> rows = random.normals(stride * count);
      std::vector<float> scratch(static_cast<std::size_t>(rotary));
      std::vector<float> of_set[3];
      CAPTURE(rotary, first, count, factor, position);
      for_each_instruction_set([&](InstructionSet set) {
        const RopeRotation rotation = table.rotation(position, scratch);
        std::vector<float> many = rows;
        table.apply(rotation, many.data(), count, stride, factor);
        std::vector<float> slow = rows;
        std::vector<float> single = rows;
        for (index_t r = 0; r < count; ++r) {
          turn_slowly(table, rotation, slow.data() + r * stride, factor);
          table.apply(rotation, single.data() + r * stride, factor);
        }
        REQUIRE(same_bits(many, single));
        for (std::size_t i = 0; i < rows.size(); ++i) {
          const index_t d = static_cast<index_t>(i) % stride - first;
          if (d < 0 || d >= rotary)
            REQUIRE(bits_of(many[i]) == bits_of(rows[i]));
          else
            REQUIRE_THAT(many[i], WithinAbs(static_cast<double>(slow[i]), 1e-6));
        }
        of_set[static_cast<std::size_t>(set)] = many;

        // To the front within one memory, as compaction does, and to rows further apart.
        std::vector<float> alone = rows;
        table.apply(rotation, alone.data(), count, stride);
        for (const index_t by : {index_t{1}, count / 2, count}) {
          std::vector<float> moved(static_cast<std::size_t>(by * stride), 7.0F);
          moved.insert(moved.end(), rows.begin(), rows.end());
          table.apply_to(rotation, moved.data() + by * stride, stride, moved.data(), stride, count);
          for (index_t r = 0; r < count; ++r)
            REQUIRE(same_bits(
                std::span<const float>(moved).subspan(static_cast<std::size_t>(r * stride), static_cast<std::size_t>(dim)),
                std::span<const float>(alone).subspan(static_cast<std::size_t>(r * stride), static_cast<std::size_t>(dim))));
        }
        std::vector<float> apart(static_cast<std::size_t>(2 * stride * count), 7.0F);
        table.apply_to(rotation, rows.data(), stride, apart.data(), 2 * stride, count);
        for (index_t r = 0; r < count; ++r)
          for (index_t d = 0; d < 2 * stride; ++d)
            REQUIRE(bits_of(apart[static_cast<std::size_t>(2 * r * stride + d)]) ==
                    bits_of(d < dim ? alone[static_cast<std::size_t>(r * stride + d)] : 7.0F));
      });
      if (!of_set[2].empty()) REQUIRE(same_bits(of_set[1], of_set[2]));
    }
}

TEST_CASE("Rows at consecutive positions, and of several heads, are the same bits as one by one") {
  Random random;
  CAPTURE(random.seed());
  const RopeLayout layout = GENERATE(RopeLayout::half, RopeLayout::interleaved);
  for (const index_t rotary : {2, 34, 128, 270}) {
    RopeOptions o = options(rotary + 4, layout);
    o.rotary_dim = rotary;
    o.scaling = YarnScaling{.factor = 4, .original_max_position = 2048};
    const RopeTable table(o);
    const index_t stride = table.head_dim() + 3;
    for (const position_t first : {0, 60, 4000, 4090, 131000}) {
      CAPTURE(rotary, first);
      const std::vector<float> rows = random.normals(150 * stride);
      std::vector<float> run = rows;
      table.rotate_run(run.data(), 150, stride, first);
      std::vector<float> single = rows;
      for (index_t i = 0; i < 150; ++i) table.rotate(single.data() + i * stride, first + i);
      REQUIRE(same_bits(run, single));
      run = single = rows;
      table.unrotate_heads(run.data(), 150, stride, first);
      for (index_t i = 0; i < 150; ++i) table.unrotate(single.data() + i * stride, first);
      REQUIRE(same_bits(run, single));
      table.rotate_run(run.data(), 0, stride, first);
      REQUIRE(same_bits(run, single));
    }
  }
}

TEST_CASE("Rows that turn by deltas of their own are the same bits as one by one, in place and on their way") {
  Random random;
  CAPTURE(random.seed());
  const RopeLayout layout = GENERATE(RopeLayout::half, RopeLayout::interleaved);
  for (const index_t rotary : {2, 30, 128, 144})
    for (const index_t first : {0, 3}) {
      RopeOptions o = options(rotary + 2 * first, layout);
      o.rotary_first = first;
      o.rotary_dim = rotary;
      const RopeTable table(o);
      const auto dim = static_cast<std::size_t>(table.head_dim());
      const index_t count = random.integer(1, 200);
      std::vector<position_t> deltas;
      position_t delta = random.coin() ? -1 : 100000;
      for (index_t i = 0; i < count; ++i) {
        deltas.push_back(delta);
        if (random.integer(0, 3) == 0) delta += random.coin() ? -1 : 256;  // 256 apart: only one of the two is remembered
        if (random.integer(0, 40) == 0) delta = 0;
      }
      const std::vector<float> rows = random.normals(count * table.head_dim());
      std::vector<float> scratch(static_cast<std::size_t>(rotary));
      Workspace work(detail::RowTurner::workspace_size(rotary));
      CAPTURE(rotary, first, count);
      for_each_instruction_set([&](InstructionSet) {
        std::vector<float> expected = rows;
        for (std::size_t i = 0; i < deltas.size(); ++i)
          if (deltas[i] != 0) table.apply(table.rotation(deltas[i], scratch), expected.data() + i * dim);
        const Workspace::Frame frame(work);
        detail::RowTurner turner(table, work);
        for (const std::size_t by : {std::size_t{0}, std::size_t{1}, std::size_t{70}}) {
          std::vector<float> memory(by * dim, 7.0F);
          memory.insert(memory.end(), rows.begin(), rows.end());
          const auto stride = static_cast<index_t>(dim);
          for (std::size_t i = 0; i < deltas.size();) {
            float* const in = memory.data() + (i + by) * dim;
            float* const out = memory.data() + i * dim;
            if (deltas[i] == 0) {
              std::copy_n(in, dim, out);
              ++i;
              continue;
            }
            const index_t left = count - static_cast<index_t>(i);
            const index_t n =
                turner.turn(in, stride, out, stride, left, [&](index_t j) { return deltas[i + static_cast<std::size_t>(j)]; });
            REQUIRE((1 <= n && n <= left));
            i += static_cast<std::size_t>(n);
          }
          memory.resize(rows.size());
          REQUIRE(same_bits(memory, expected));
        }
      });
      REQUIRE(work.peak() == detail::RowTurner::workspace_size(rotary).bytes);
    }
}

TEST_CASE("Copies of a table share what it stores") {
  const RopeTable table(options(64));
  RopeTable copy;
  CHECK(allocations_of([&] { copy = table; }) == 0);
  CHECK(copy.inv_freq().data() == table.inv_freq().data());
  CHECK(copy.rotary_dim() == 64);
  CHECK(RopeTable().empty());
  CHECK(RopeTable().rotary_dim() == 0);
}

TEST_CASE("Rotations allocate nothing") {
  const RopeTable table(options(256));
  std::vector<float> k(256, 1.0F);
  std::vector<float> scratch(256);
  CHECK(allocations_of([&] {
          table.rotate(k.data(), 5);
          table.realign(k.data(), 5, 9);
          table.unrotate(k.data(), 9);
          table.apply(table.rotation(3, scratch), k.data());
          table.rotate_run(k.data(), 1, 256, 5000);
          table.unrotate_heads(k.data(), 1, 256, 5000);
          static_cast<void>(realign(k.data(), table, 3, table, 0));
        }) == 0);
  check_close(k, Row(256, 1.0), 1e-5);
}

}  // namespace
