// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "beaconkv/algorithm/key_redundancy.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "support/check.hpp"
#include "support/instruction_sets.hpp"
#include "support/layouts.hpp"
#include "support/reference.hpp"

namespace {

using namespace beaconkv;
using namespace beaconkv::test;
using Catch::Matchers::WithinAbs;

/// Keys of one head, dense.
struct Keys {
  index_t count;
  index_t dim;
  std::vector<float> data;

  [[nodiscard]] ConstRows operator()(index_t first, index_t n, float*) const {
    return {data.data() + first * dim, n, dim, dim};
  }
  [[nodiscard]] reference::Matrix matrix() const { return reference::matrix_of((*this)(0, count, nullptr)); }
  [[nodiscard]] float* row(index_t i) { return data.data() + i * dim; }
};

/// Some directions, repeated with noise: many look-alikes, of lengths from 1 to 4.
Keys any_keys(index_t count, index_t dim, Random& random) {
  Keys keys{count, dim, {}};
  const std::vector<float> topics = random.normals(5 * dim);
  for (index_t i = 0; i < count; ++i) {
    const index_t topic = random.integer(0, 4);
    const float length = random.uniform(1, 4);
    for (index_t d = 0; d < dim; ++d)
      keys.data.push_back(length * (topics[static_cast<std::size_t>(topic * dim + d)] + 0.7F * random.normal()));
  }
  return keys;
}

/// A threshold near `wanted` with no cosine close to it, so that float and double agree on who is alike.
float safe_threshold(const Keys& keys, double wanted) {
  const reference::Matrix rows = keys.matrix();
  std::vector<double> near{wanted - 0.1, wanted + 0.1};
  for (std::size_t i = 0; i < rows.size(); ++i)
    for (std::size_t j = 0; j < i; ++j) {
      const double cosine = reference::cosine(rows[i], rows[j]);
      if (std::abs(cosine - wanted) < 0.1) near.push_back(cosine);
    }
  std::sort(near.begin(), near.end());
  std::size_t best = 1;
  for (std::size_t i = 2; i < near.size(); ++i)
    if (near[i] - near[i - 1] > near[best] - near[best - 1]) best = i;
  return static_cast<float>((near[best] + near[best - 1]) / 2);
}

template <class Source>
std::vector<float> means(const Source& keys, index_t count, index_t dim, const RedundancyOptions& options) {
  Workspace work(key_redundancy_workspace_size(count, dim));
  std::vector<float> out(static_cast<std::size_t>(count), -7.0F);
  key_redundancy_means(keys, count, dim, options, out, work).or_throw();
  return out;
}
std::vector<float> means(const Keys& keys, const RedundancyOptions& options) {
  return means(keys, keys.count, keys.dim, options);
}

reference::Row expected(const Keys& keys, const RedundancyOptions& options) {
  reference::Spare spare = options.spare_column_zero ? reference::Spare::last_or_zero : reference::Spare::last_or_none;
  if (options.spared == SparedLookAlike::column_zero) spare = reference::Spare::zero;
  if (options.spared == SparedLookAlike::first_percent) spare = reference::Spare::first_percent;
  return reference::redundancy_means(keys.matrix(), static_cast<double>(options.threshold), spare,
                                     static_cast<double>(options.ratio));
}

/// The whole matrix of cosines, by the same kernel of products as everything that is tested elsewhere: the same bits as the
/// library's cosines, so that even a threshold that meets them decides alike.
reference::Row matrix_form(const Keys& keys, const RedundancyOptions& options) {
  const auto n = static_cast<std::size_t>(keys.count);
  const auto dim = static_cast<std::size_t>(keys.dim);
  std::vector<float> unit(n * dim, 0.0F);
  for (std::size_t i = 0; i < n; ++i) {
    const float* const key = keys.data.data() + i * dim;
    if (!detail::all_finite(key, keys.dim)) continue;
    double square = 0;
    for (std::size_t d = 0; d < dim; ++d) square += static_cast<double>(key[d]) * static_cast<double>(key[d]);
    const double inverse = 1 / (std::sqrt(square) + 1e-8);
    for (std::size_t d = 0; d < dim; ++d) unit[i * dim + d] = static_cast<float>(static_cast<double>(key[d]) * inverse);
  }
  const index_t rows = detail::round_up(keys.count, detail::lanes);
  std::vector<float> packed(static_cast<std::size_t>(rows) * dim);
  std::vector<float> s(static_cast<std::size_t>(rows) * n);  // [column][row]
  bool not_finite = false;
  detail::run<detail::PackRows>(unit.data(), index_t{1}, keys.count, rows, rows, keys.dim, 1.0F, packed.data());
  detail::run<detail::Products>(packed.data(), rows, keys.dim, unit.data(), keys.dim, keys.count, s.data(), &not_finite,
                                static_cast<const detail::MemoryAhead*>(nullptr));

  const auto at = [&](std::size_t row, std::size_t column) -> float& {
    return s[column * static_cast<std::size_t>(rows) + row];
  };
  for (std::size_t i = 0; i < n; ++i) {
    at(i, i) = 0;
    bool any = false;
    std::size_t spared = 0;
    for (std::size_t j = 0; j < n; ++j)
      if (at(i, j) > options.threshold) {
        spared = j;
        any = true;
      }
    if (options.spared == SparedLookAlike::column_zero) spared = 0;
    if (options.spared == SparedLookAlike::first_percent) {
      std::vector<std::size_t> number(n, 0);
      for (std::size_t j = 0; j < n; ++j) number[j] = at(i, j) > options.threshold ? j : 0;
      std::sort(number.begin(), number.end());
      spared = number[static_cast<std::size_t>(static_cast<double>(n) * options.ratio) - 1];
    }
    if (options.spared != SparedLookAlike::last || any || options.spare_column_zero) at(i, spared) = 0;
  }
  reference::Row out(n, 0.0);
  for (std::size_t j = 0; j < n; ++j) {
    for (std::size_t i = 0; i < n; ++i) out[j] += static_cast<double>(at(i, j));
    out[j] /= static_cast<double>(n);
  }
  return out;
}

/// What makes a search short, long, or change its mind.
enum class Kind { independent, common_mean, clusters, some_alike, duplicates, zeros, not_finite };

Keys keys_of(Kind kind, index_t count, index_t dim, Random& random) {
  Keys keys{count, dim, random.normals(count * dim)};
  const std::vector<float> centres = random.normals(8 * dim);
  const float share = random.uniform(0.3F, 0.7F);
  const auto move_to = [&](index_t i, index_t centre) {
    for (index_t d = 0; d < dim; ++d) keys.row(i)[d] += 3 * centres[static_cast<std::size_t>(centre * dim + d)];
  };
  for (index_t i = 0; i < count; ++i) {
    if (kind == Kind::common_mean) move_to(i, 0);
    if (kind == Kind::clusters || kind == Kind::duplicates) move_to(i, random.integer(0, 7));
    if (kind == Kind::some_alike && random.uniform(0, 1) < share) move_to(i, random.integer(0, 1));
    if (kind == Kind::duplicates && i > 0 && random.coin()) std::copy_n(keys.row(random.integer(0, i - 1)), dim, keys.row(i));
    if (kind == Kind::zeros && random.coin()) std::fill_n(keys.row(i), dim, random.coin() ? 0.0F : -0.0F);
    if (kind == Kind::not_finite && random.coin())
      keys.row(i)[random.integer(0, dim - 1)] = random.coin() ? nan_float() : -infinity_float();
  }
  return keys;
}

constexpr Kind all_kinds[] = {Kind::independent, Kind::common_mean, Kind::clusters,  Kind::some_alike,
                              Kind::duplicates,  Kind::zeros,       Kind::not_finite};

TEST_CASE("Column means agree with the whole matrix under each instruction set, whoever is alike") {
  Random random;
  CAPTURE(random.seed());
  for (const index_t count : {1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 95, 96, 97, 170, 200, 500})
    for (const Kind kind : all_kinds) {
      const index_t dim =
          count > 200 ? 24 : std::vector<index_t>{1, 5, 16, 33, 64}[static_cast<std::size_t>(random.integer(0, 4))];
      const Keys keys = keys_of(kind, count, dim, random);
      for (const float threshold : {-1.0F, -0.2F, -0.0F, 0.5F, 1.0F}) {
        RedundancyOptions options{.threshold = threshold, .spare_column_zero = random.coin()};
        std::vector<std::vector<float>> with_fma;
        for (const InstructionSet set : supported_sets()) {
          const ForcedSet forced(set);
          CAPTURE(count, dim, static_cast<int>(kind), threshold, options.spare_column_zero);
          const std::vector<float> out = means(keys, options);
          REQUIRE(largest_difference(out, matrix_form(keys, options)) <= 1e-6);
          if (set != InstructionSet::baseline) with_fma.push_back(out);
          if (threshold != 0.5F || count < 2) continue;
          for (const SparedLookAlike spared : {SparedLookAlike::column_zero, SparedLookAlike::first_percent}) {
            const RedundancyOptions other{.threshold = threshold, .spared = spared, .ratio = 0.9};
            REQUIRE(largest_difference(means(keys, other), matrix_form(keys, other)) <= 1e-6);
          }
        }
        if (with_fma.size() == 2) REQUIRE(same_bits(with_fma[0], with_fma[1]));
      }
    }
}

TEST_CASE("Equal keys have equal column sums but for what is spared") {
  Random random;
  CAPTURE(random.seed());
  for (const InstructionSet set : supported_sets()) {
    const ForcedSet forced(set);
    Keys keys = keys_of(Kind::independent, 150, 20, random);
    for (const index_t i : {7, 64, 149}) std::copy_n(keys.row(3), 20, keys.row(i));
    const std::vector<float> out = means(keys, {.threshold = 1.0F, .spared = SparedLookAlike::column_zero});
    for (const std::size_t i : {7U, 64U, 149U}) CHECK(out[i] == out[3]);
  }
}

TEST_CASE("[E7] the newest look-alike is spared; who has none spares column 0 or nothing", "[E7]") {
  const Keys duplicates{4, 2, {1, 0, 0, 1, 1, 0, 1, 0}};
  CHECK(largest_difference(means(duplicates, {}), std::vector<double>{0.5, 0, 0.25, 0}) < 1e-6);
  Workspace work(key_redundancy_workspace_size(4, 2));
  std::vector<float> out(4);
  REQUIRE(key_redundancy(duplicates, 4, 2, {}, out, work).ok());
  CHECK(largest_difference(out, std::vector<double>{0.334240, 0.202727, 0.260306, 0.202727}) < 1e-6);

  // The cosine of the last two is .2025; the numbers that the issue gives are rounded.
  const Keys distinct{3, 3, {1, 0, 0, .45F, .893F, 0, .45F, 0, .893F}};
  CHECK(RedundancyOptions{}.spare_column_zero);  // the default is the published behaviour
  CHECK(largest_difference(means(distinct, {}), std::vector<double>{0, .2175, .2175}) < 1e-4);
  CHECK(largest_difference(means(distinct, {.spare_column_zero = false}), std::vector<double>{.3, .2175, .2175}) < 1e-4);
}

TEST_CASE("[E8] the scratch grows with the keys, not with their square", "[E8]") {
  const auto bytes = [](index_t n) { return key_redundancy_workspace_size(n, 64).bytes; };
  CHECK(bytes(16128) <= std::size_t{16128} * (64 + 64 + 2) * sizeof(float) + (1 << 16));  // 8 MiB; the full matrix: 1 GiB
  CHECK(bytes(32256) <= 2 * bytes(16128));

  Random random;
  CAPTURE(random.seed());
  const Keys keys = any_keys(512, 64, random);
  const RedundancyOptions options{.threshold = safe_threshold(keys, 0.5)};
  CHECK(largest_difference(means(keys, options), expected(keys, options)) <= 1e-6);
}

TEST_CASE("Column means agree with the reference at every size around tiles, lanes and strips") {
  Random random;
  CAPTURE(random.seed());
  for (const index_t count : {0, 1, 2, 3, 7, 8, 9, 63, 64, 65, 127, 128, 129, 192, 193})
    for (const index_t dim : {1, 2, 7, 8, 9, 33, 40, 64, 80, 128, 256}) {
      if (count > 129 && dim > 64) continue;
      Keys keys = any_keys(count, dim, random);
      RedundancyOptions options{.threshold = safe_threshold(keys, random.coin() ? 0.5 : 0.8)};
      if (dim == 1) options.threshold = 0.5F;  // all cosines are 1 or -1
      for (const SparedLookAlike spared : {SparedLookAlike::last, SparedLookAlike::column_zero, SparedLookAlike::first_percent})
        for (const bool column_zero : {true, false}) {
          options.spared = spared;
          options.spare_column_zero = column_zero;
          options.ratio = spared == SparedLookAlike::first_percent ? 0.6F : 0.0F;
          if (spared == SparedLookAlike::first_percent && count < 2) continue;
          CAPTURE(count, dim, static_cast<int>(spared), column_zero);
          REQUIRE(largest_difference(means(keys, options), expected(keys, options)) <= 2e-6);
        }
    }
}

TEST_CASE("Spared columns at thresholds from none alike to all alike") {
  Random random;
  CAPTURE(random.seed());
  for (const double wanted : {-0.9, -0.3, -0.05, 0.05, 0.3, 0.7, 0.9}) {
    const Keys keys = any_keys(90, 12, random);
    for (const bool column_zero : {true, false}) {
      const RedundancyOptions options{.threshold = safe_threshold(keys, wanted), .spare_column_zero = column_zero};
      CAPTURE(wanted, column_zero);
      CHECK(largest_difference(means(keys, options), expected(keys, options)) <= 2e-6);
    }
  }
  // At both ends: everything but opposites, and nothing.
  const Keys keys = any_keys(70, 5, random);
  for (const float threshold : {-1.0F, 1.0F}) {
    const RedundancyOptions options{.threshold = threshold, .spare_column_zero = false};
    CAPTURE(threshold);
    CHECK(largest_difference(means(keys, options), expected(keys, options)) <= 2e-6);
  }
}

TEST_CASE("The threshold is exclusive") {
  const Keys keys{3, 2, {2, 0, 0, 4, 3, 0}};  // cosines 0 and 1, but for the 1e-8
  for (const float threshold : {0.0F, -0.0F}) {
    const RedundancyOptions options{.threshold = threshold, .spare_column_zero = false};
    CHECK(largest_difference(means(keys, options), std::vector<double>{0, 0, 0}) < 1e-6);  // each of the two spares the other
  }
}

TEST_CASE("The published first_percent, for every ratio") {
  Random random;
  CAPTURE(random.seed());
  for (const index_t count : {10, 50, 100}) {
    const Keys keys = any_keys(count, 9, random);
    const float threshold = safe_threshold(keys, 0.3);
    for (int tenths = 1; tenths <= 10; ++tenths) {
      const RedundancyOptions options{.threshold = threshold,
                                      .spared = SparedLookAlike::first_percent,
                                      .ratio = static_cast<decltype(RedundancyOptions::ratio)>(tenths / 10.0)};
      // int(L * ratio) of the number that the caller wrote.
      const auto exact = reference::redundancy_means(keys.matrix(), static_cast<double>(threshold),
                                                     reference::Spare::first_percent, tenths / 10.0);
      CAPTURE(count, tenths);
      CHECK(largest_difference(means(keys, options), exact) <= 2e-6);
    }
  }
}

TEST_CASE("Zero keys are like nothing, and keys that are not finite count as zero") {
  Random random;
  CAPTURE(random.seed());
  const std::uint32_t kinds[] = {0x7FC00000U, 0x7F800000U, 0xFF800000U, 0xFFFFFFFFU};
  for (index_t round = 0; round < 30; ++round) {
    const index_t count = random.integer(1, 140);
    Keys keys = any_keys(count, random.integer(1, 20), random);
    const RedundancyOptions options{.threshold = safe_threshold(keys, 0.5), .spare_column_zero = random.coin()};
    Keys zeroed = keys;
    for (const slot_t i : random.subset(random.integer(0, keys.count), keys.count)) {
      std::fill_n(zeroed.row(i), keys.dim, 0.0F);
      if (random.coin())
        std::fill_n(keys.row(i), keys.dim, 0.0F);
      else
        keys.row(i)[random.integer(0, keys.dim - 1)] = float_of(kinds[random.integer(0, 3)]);
    }
    CAPTURE(round, keys.count, keys.dim);
    REQUIRE(largest_difference(means(keys, options), expected(keys, options)) <= 2e-6);
    REQUIRE(same_bits(means(keys, options), means(zeroed, options)));
  }
}

TEST_CASE("Keys as short as the added 1e-8, and keys longer than a float's square") {
  Random random;
  CAPTURE(random.seed());
  for (const int exponent : {-40, -27, 30, 62, 100}) {
    Keys keys = any_keys(40, 16, random);
    for (float& x : keys.data) x = std::ldexp(x, exponent);
    const RedundancyOptions options{.threshold = safe_threshold(keys, 0.5)};
    CAPTURE(exponent);
    CHECK(largest_difference(means(keys, options), expected(keys, options)) <= 2e-6);
  }
}

TEMPLATE_TEST_CASE("Redundancy is the same in every layout, of keys as they are stored", "", float, float16, bfloat16) {
  Random random;
  CAPTURE(random.seed());
  for (const index_t dim : {3, 8, 128}) {
    constexpr index_t slots = 140;
    const std::vector<float> rows = any_keys(2 * slots, dim, random).data;
    Keys keys{slots, dim, {}};
    for (index_t s = 0; s < slots; ++s)
      for (index_t d = 0; d < dim; ++d)
        keys.data.push_back(decode(encode<TestType>(rows[static_cast<std::size_t>((2 * s + 1) * dim + d)])));
    const RedundancyOptions options{.threshold = safe_threshold(keys, 0.5)};
    const std::vector<float> dense = means(keys, options);
    CAPTURE(dim);
    REQUIRE(largest_difference(dense, expected(keys, options)) <= 2e-6);
    for (const Layout layout : all_layouts) {
      LayoutCache<TestType> cache(layout, 2, dim, dim, slots, random);
      for (index_t t = 0; t < slots; ++t) {
        const std::span<const float> token(rows.data() + t * 2 * dim, static_cast<std::size_t>(2 * dim));
        cache.append(token, token, t);
      }
      CAPTURE(static_cast<int>(layout));
      const auto of_head = [&](index_t first, index_t count, float* scratch) {
        return cache.cache.keys(1, first, count, scratch);
      };
      CHECK(same_bits(means(of_head, slots, dim, options), dense));
    }
  }
}

TEST_CASE("Redundancy is the softmax of the column means over all keys") {
  Random random;
  CAPTURE(random.seed());
  for (const index_t count : {1, 2, 65, 200}) {
    const Keys keys = any_keys(count, 10, random);
    const RedundancyOptions options{.threshold = safe_threshold(keys, 0.5)};
    Workspace work(key_redundancy_workspace_size(count, 10));
    std::vector<float> out(static_cast<std::size_t>(count));
    REQUIRE(key_redundancy(keys, count, 10, options, out, work).ok());
    CAPTURE(count);
    CHECK(largest_difference(out, reference::softmax(expected(keys, options))) <= 1e-6 / static_cast<double>(count) + 1e-8);
    double sum = 0;
    for (const float x : out) sum += static_cast<double>(x);
    CHECK_THAT(sum, WithinAbs(1.0, 1e-6));
  }
}

TEST_CASE("[K4] redundancy uses the workspace that it asked for and allocates nothing", "[K4]") {
  Random random;
  CAPTURE(random.seed());
  const index_t count = GENERATE(0, 1, 2, 63, 64, 65, 300);
  const index_t dim = GENERATE(1, 7, 64, 128, 256, 1000);
  const Keys keys = any_keys(count, dim, random);
  std::vector<float> out(static_cast<std::size_t>(count));
  check_workspace(
      key_redundancy_workspace_size(count, dim),
      [&](Workspace& work) { return key_redundancy(keys, count, dim, {}, out, work); },
      [&] { std::fill(out.begin(), out.end(), -7.0F); });
  CHECK(out == std::vector<float>(out.size(), -7.0F));
}

TEST_CASE("Bad arguments of redundancy are named and nothing is written") {
  Random random;
  CAPTURE(random.seed());
  const Keys keys = any_keys(9, 4, random);
  std::vector<float> out(9, -7.0F);
  Workspace work(key_redundancy_workspace_size(9, 4));
  const auto status = [&](const RedundancyOptions& options) { return key_redundancy_means(keys, 9, 4, options, out, work); };
  for (const float threshold : {-1.5F, 1.5F, nan_float(), infinity_float()})
    check_invalid(status({.threshold = threshold}), {"redundancy.threshold = "});
  for (const float ratio : {0.0F, 0.1F, -1.0F, 1.5F, 1e30F, nan_float()})
    check_invalid(status({.spared = SparedLookAlike::first_percent, .ratio = ratio}), {"redundancy.ratio = "});
  check_invalid(key_redundancy_means(keys, 9, 4, {}, std::span(out).first(8), work), {"out has 8", "9 keys"});
  check_invalid(key_redundancy_means(keys, -1, 4, {}, std::span(out).first(0), work), {"-1 keys"});
  CHECK(status({.spared = SparedLookAlike::last, .ratio = 0.0F}).ok());
  out.assign(9, -7.0F);
  check_invalid(key_redundancy(keys, 9, 4, {.threshold = 2.0F}, out, work), {"redundancy.threshold = 2"});
  CHECK(out == std::vector<float>(9, -7.0F));
}

TEST_CASE("Redundancy of keys without dimensions is refused") {
  std::vector<float> out(2, -7.0F);
  Workspace work(WorkspaceSize{1 << 20, 0, 0});
  const Keys keys{2, 1, {1, 2}};
  check_invalid(key_redundancy_means(keys, 2, 0, {}, out, work), {"dim = 0"});
  check_invalid(key_redundancy_means(keys, 2, -1, {}, out, work), {"dim = -1"});
  CHECK(out == std::vector<float>(2, -7.0F));
}

}  // namespace
