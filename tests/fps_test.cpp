// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "beaconkv/algorithm/farthest_point_sampling.hpp"

#include <algorithm>
#include <numeric>
#include <set>
#include <vector>

#include "support/check.hpp"
#include "support/random.hpp"
#include "support/reference.hpp"

namespace {

using namespace beaconkv;
using namespace beaconkv::test;
using Slots = std::vector<slot_t>;

/// Dense rows.
struct Points {
  index_t dim;
  std::vector<float> data;

  [[nodiscard]] index_t size() const { return static_cast<index_t>(data.size()) / dim; }
  [[nodiscard]] ConstRows rows() const { return {data.data(), size(), dim, dim}; }
  [[nodiscard]] float* row(index_t i) { return data.data() + i * dim; }
};

Slots sample(const ConstRows& rows, index_t count, FpsMetric metric = FpsMetric::cosine, const Slots& start = {}) {
  Workspace work(fps_workspace_size(rows.rows, rows.dim));
  Slots out(static_cast<std::size_t>(std::min(count, rows.rows)) + 2, -1);
  const index_t picked = farthest_point_sampling(rows, count, out, work, {metric, start}).or_throw();
  for (std::size_t i = static_cast<std::size_t>(picked); i < out.size(); ++i) REQUIRE(out[i] == -1);
  out.resize(static_cast<std::size_t>(picked));
  return out;
}
Slots sample(const Points& points, index_t count, FpsMetric metric = FpsMetric::cosine, const Slots& start = {}) {
  return sample(points.rows(), count, metric, start);
}

Slots first(const Slots& all, std::size_t count) { return {all.begin(), all.begin() + static_cast<std::ptrdiff_t>(count)}; }

/// How much nearer to the chosen rows each pick was than the best possible one: 0 for a perfect run. Relative to the largest
/// nearness.
double worst_pick(const reference::Matrix& rows, const Slots& picked, const Slots& start, FpsMetric metric) {
  Slots chosen = start;
  double worst = 0;
  double scale = 1;
  for (const slot_t pick : picked) {
    double best = reference::infinity;
    double of_pick = 0;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      if (std::count(chosen.begin(), chosen.end(), static_cast<slot_t>(i)) != 0) continue;
      reference::Row near;
      if (chosen.empty())
        for (const auto& row : rows) near.push_back(reference::nearness(rows[i], row, metric));
      else
        for (const slot_t c : chosen) near.push_back(reference::nearness(rows[i], rows[static_cast<std::size_t>(c)], metric));
      const double value = reference::reduce(near, chosen.empty() ? Reduce::mean : Reduce::max);
      best = std::min(best, value);
      scale = std::max(scale, std::abs(value));
      if (static_cast<slot_t>(i) == pick) of_pick = value;
    }
    worst = std::max(worst, of_pick - best);
    chosen.push_back(pick);
  }
  return worst / scale;
}

TEST_CASE("[F1] more samples than points", "[F1]") {
  const Points three{2, {1, 0, 0, 1, -1, 0}};
  const FpsMetric metric = GENERATE(FpsMetric::cosine, FpsMetric::euclidean);
  CHECK(sample(three, 3, metric) == Slots{0, 1, 2});
  CHECK(sample(three, 5, metric) == Slots{0, 1, 2});
  CHECK(sample(three, std::numeric_limits<index_t>::max(), metric) == Slots{0, 1, 2});
  CHECK(sample(three, 0, metric).empty());
  CHECK(sample(three, 5, metric, {1}) == Slots{0, 2});
  CHECK(sample(three, 2, metric, {2, 0, 1}).empty());
  const Points none{2, {}};
  CHECK(sample(none, 0, metric).empty());
  Workspace work(WorkspaceSize{1000, 0, 0});
  Slots out(4);
  check_invalid(farthest_point_sampling(none.rows(), 1, out, work, {metric}).status(), {"rows = 0"});
}

TEST_CASE("[F2] the distance is to all chosen points", "[F2]") {
  CHECK(sample(Points{1, {0, 10, 1, 9, 5}}, 3, FpsMetric::euclidean, {0}) == Slots{1, 4, 2});
}

TEST_CASE("[F3] ties go to the lowest index", "[F3]") {
  const Points points{2, {-1, -1, -1, 1, 1, 1, 1, -1, -2, -2, -2, 2, 2, 2, 2, -2}};
  CHECK(sample(points, 6, FpsMetric::euclidean, {0}) == Slots{6, 5, 7, 1, 2, 3});
}

TEST_CASE("[F4] points near the origin are points", "[F4]") {
  const Points points{2, {1, 0, 0, 1, 0.01F, 0, -1, 0, 0, -1}};
  CHECK(sample(points, 3, FpsMetric::euclidean, {0}) == Slots{3, 1, 4});
  CHECK(sample(points, 4, FpsMetric::euclidean, {0}) == Slots{1, 2, 3, 4});  // all that are left come in ascending order
  const Points one_more{2, {1, 0, 0, 1, 0.01F, 0, -1, 0, 0, -1, 0.01F, 0}};
  CHECK(sample(one_more, 4, FpsMetric::euclidean, {0}) == Slots{3, 1, 4, 2});
}

TEST_CASE("[F5] a run goes on from chosen points, and its prefix is a run", "[F5]") {
  CHECK(sample(Points{1, {0, 1, 2, 10, 11, 20}}, 2, FpsMetric::euclidean, {0, 5}) == Slots{3, 2});
  Random random;
  CAPTURE(random.seed());
  const FpsMetric metric = GENERATE(FpsMetric::cosine, FpsMetric::euclidean);
  const Points points{16, random.normals(60 * 16)};
  const Slots longest = sample(points, 59, metric);
  for (std::size_t k = 0; k < longest.size(); ++k) {
    CAPTURE(k);
    CHECK(sample(points, static_cast<index_t>(k), metric) == first(longest, k));
  }
  for (const std::size_t k : {1U, 2U, 17U, 40U}) {
    CAPTURE(k);
    const Slots start = first(longest, k);
    CHECK(sample(points, 15, metric, start) ==
          Slots(longest.begin() + static_cast<std::ptrdiff_t>(k), longest.begin() + static_cast<std::ptrdiff_t>(k + 15)));
  }
}

TEST_CASE("[F6] many points", "[F6]") {
  Random random;
  CAPTURE(random.seed());
  constexpr index_t n = 200000;
  const Points points{2, random.normals(2 * n)};
  CHECK(fps_workspace_size(n, 2).bytes <= static_cast<std::size_t>(n) * 13 + 1024);
  const FpsMetric metric = GENERATE(FpsMetric::cosine, FpsMetric::euclidean);
  const Slots picked = sample(points, 64, metric);
  CHECK(std::set<slot_t>(picked.begin(), picked.end()).size() == 64);
  CHECK(*std::min_element(picked.begin(), picked.end()) >= 0);
  CHECK(*std::max_element(picked.begin(), picked.end()) < n);
  CHECK(*std::max_element(picked.begin(), picked.end()) > n / 2);
}

TEST_CASE("[F7] a duplicate far from the origin is at distance 0", "[F7]") {
  Random random;
  CAPTURE(random.seed());
  Points points{64, random.normals(64)};
  const double norm = std::sqrt(reference::dot(reference::row_of(points.row(0), 64), reference::row_of(points.row(0), 64)));
  for (float& x : points.data) x *= static_cast<float>(1e4 / norm);
  const std::vector<float> key = points.data;
  points.data.insert(points.data.end(), key.begin(), key.end());  // 1: an exact duplicate
  points.data.insert(points.data.end(), key.begin(), key.end());
  points.row(2)[0] += 0.001F;
  points.data.insert(points.data.end(), key.begin(), key.end());
  CHECK(sample(points, 2, FpsMetric::euclidean, {0}) == Slots{2, 1});
}

TEST_CASE("[A2] as many samples as were asked for", "[A2]") {
  Random random;
  CAPTURE(random.seed());
  CHECK(sample(Points{3, random.normals(732 * 3)}, 100).size() == 100);
  CHECK(sample(Points{2, random.normals(20000 * 2)}, 768, FpsMetric::euclidean).size() == 768);
}

TEST_CASE("Farthest points agree with the reference") {
  Random random;
  CAPTURE(random.seed());
  const FpsMetric metric = GENERATE(FpsMetric::cosine, FpsMetric::euclidean);
  index_t exact = 0;
  index_t runs = 0;
  for (const index_t n : {1, 2, 3, 31, 32, 33, 63, 64, 65, 129})
    for (const index_t dim : {1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 40, 64, 80, 128, 256}) {
      const index_t count = random.integer(0, n + 1);
      Points points{dim, random.normals(n * dim)};
      for (index_t i = 0; i < n; ++i)  // lengths differ
        for (index_t d = 0; d < dim; ++d) points.row(i)[d] *= static_cast<float>(1 + i % 5);
      Slots start = random.coin() ? Slots{} : random.subset(random.integer(0, std::min<index_t>(n, 4)), n);
      random.shuffle(start);
      CAPTURE(n, dim, count, start);
      const reference::Matrix rows = reference::matrix_of(points.rows());
      const Slots picked = sample(points, count, metric, start);
      const reference::Sampling expected = reference::farthest_points(rows, count, start, metric);
      REQUIRE(picked.size() == expected.picked.size());
      ++runs;
      if (picked == expected.picked) {
        ++exact;
      } else {
        CHECK(expected.gap < 1e-5);  // only rounding may decide otherwise
        CHECK(worst_pick(rows, picked, start, metric) <= 1e-6);
      }
    }
  CHECK(exact >= runs * 8 / 10);  // in one dimension all cosines are ties
}

TEST_CASE("Ties, duplicates and zero rows: the same choice as the reference, index for index") {
  Random random;
  CAPTURE(random.seed());
  const FpsMetric metric = GENERATE(FpsMetric::cosine, FpsMetric::euclidean);
  for (index_t round = 0; round < 300; ++round) {
    // Axes with lengths of powers of two: every number below is exact.
    const index_t dim = random.integer(1, 9);
    const index_t n = random.integer(1, 40);
    Points points{dim, std::vector<float>(static_cast<std::size_t>(n * dim), 0.0F)};
    for (index_t i = 0; i < n; ++i)
      if (random.integer(0, 5) != 0)
        points.row(i)[random.integer(0, dim - 1)] =
            (random.coin() ? 1.0F : -1.0F) * std::ldexp(1.0F, static_cast<int>(random.integer(-3, 3)));
    const index_t count = random.integer(0, n);
    // Sums of these cosines are exact, a centroid only where n is a power of two: else the first pick is given.
    const Slots start =
        (n & (n - 1)) == 0 || metric == FpsMetric::cosine ? Slots{} : Slots{static_cast<slot_t>(random.integer(0, n - 1))};
    CAPTURE(round, n, dim, count, start, points.data);
    REQUIRE(sample(points, count, metric, start) ==
            reference::farthest_points(reference::matrix_of(points.rows()), count, start, metric).picked);
  }
}

/// Calls `check(set)` with each instruction set that this machine has in use.
template <class Check>
void with_each_instruction_set(Check&& check) {
  const InstructionSet before = instruction_set();
  for (const InstructionSet set : {InstructionSet::baseline, InstructionSet::avx2, InstructionSet::avx512})
    if (use_instruction_set(set).ok()) check(set);
  REQUIRE(use_instruction_set(before).ok());
}

TEST_CASE("Every instruction set picks what the reference picks") {
  Random random;
  CAPTURE(random.seed());
  const FpsMetric metric = GENERATE(FpsMetric::cosine, FpsMetric::euclidean);
  for (const index_t n : {1, 15, 16, 17, 31, 33, 63, 64, 65, 200})
    for (const index_t dim : {1, 15, 16, 17, 31, 33, 63, 64, 65, 128}) {
      const Points points{dim, random.normals(n * dim)};
      const reference::Matrix rows = reference::matrix_of(points.rows());
      const index_t count = random.integer(0, n);
      const reference::Sampling expected = reference::farthest_points(rows, count, {}, metric);
      Slots of_avx2;
      with_each_instruction_set([&](InstructionSet set) {
        CAPTURE(name_of(set), n, dim, count);
        const Slots picked = sample(points, count, metric);
        REQUIRE(picked.size() == expected.picked.size());
        if (picked != expected.picked) CHECK(worst_pick(rows, picked, {}, metric) <= 1e-6);
        if (expected.gap > 1e-5) CHECK(picked == expected.picked);
        if (set == InstructionSet::avx2) of_avx2 = picked;
        if (set == InstructionSet::avx512) CHECK(picked == of_avx2);
      });
    }
}

TEST_CASE("Dot products have the same bits either way round, in any company, and from AVX2 as from AVX-512") {
  Random random;
  CAPTURE(random.seed());
  for (const index_t n : {1, 2, 3, 4, 5, 9})
    for (const index_t dim : {1, 15, 16, 17, 31, 33, 63, 64, 65, 128}) {
      const Points points{dim, random.normals(n * dim)};
      const reference::Matrix rows = reference::matrix_of(points.rows());
      std::vector<float> of_avx2;
      with_each_instruction_set([&](InstructionSet set) {
        CAPTURE(name_of(set), n, dim);
        std::vector<float> dots(static_cast<std::size_t>(n * n));
        const auto at = [&](index_t i, index_t j) -> float& { return dots[static_cast<std::size_t>(i * n + j)]; };
        for (index_t i = 0; i < n; ++i)
          detail::run<detail::DotProducts>(points.rows().row(i), points.data.data(), dim, dim, n, &at(i, 0));
        for (index_t i = 0; i < n; ++i)
          for (index_t j = 0; j < n; ++j) {
            const double exact = reference::dot(rows[static_cast<std::size_t>(i)], rows[static_cast<std::size_t>(j)]);
            REQUIRE(std::abs(static_cast<double>(at(i, j)) - exact) <= 2e-6 * static_cast<double>(dim));
            REQUIRE(bits_of(at(i, j)) == bits_of(at(j, i)));
            float alone = 0;
            detail::run<detail::DotProducts>(points.rows().row(i), points.rows().row(j), dim, dim, index_t{1}, &alone);
            REQUIRE(bits_of(alone) == bits_of(at(i, j)));
          }
        if (set == InstructionSet::avx2) of_avx2 = dots;
        if (set == InstructionSet::avx512) CHECK(same_bits(dots, of_avx2));
      });
    }
}

TEST_CASE("Ties among many rows: the lowest, whatever was evaluated before") {
  Random random;
  CAPTURE(random.seed());
  for (index_t round = 0; round < 12; ++round) {
    const index_t n = random.integer(60, 300);
    const index_t dim = random.integer(2, 6);
    Points points{dim, std::vector<float>(static_cast<std::size_t>(n * dim), 0.0F)};
    for (index_t i = 0; i < n; ++i) {  // axes: every number below is exact
      points.row(i)[random.integer(0, dim - 1)] = random.coin() ? 2.0F : -0.5F;
      if (random.integer(0, 2) == 0) points.row(i)[0] = 0;
      if (random.integer(0, 20) == 0) points.row(i)[random.integer(0, dim - 1)] = nan_float();
    }
    const Slots start{static_cast<slot_t>(random.integer(0, n - 1))};
    const Slots expected = reference::farthest_points(reference::matrix_of(points.rows()), n / 2, start).picked;
    with_each_instruction_set([&](InstructionSet set) {
      CAPTURE(name_of(set), round, n, dim, start);
      REQUIRE(sample(points, n / 2, FpsMetric::cosine, start) == expected);
    });
  }
  const Points equal{24, std::vector<float>(24 * 500, 0.3F)};
  Slots ascending(40);
  std::iota(ascending.begin(), ascending.end(), slot_t{0});
  with_each_instruction_set([&](InstructionSet set) {
    CAPTURE(name_of(set));
    CHECK(sample(equal, 40, FpsMetric::cosine) == ascending);
    CHECK(sample(equal, 40, FpsMetric::euclidean) == ascending);
  });
}

TEST_CASE("Distances far from 1 keep their order") {
  Random random;
  CAPTURE(random.seed());
  const Points points{7, random.normals(90 * 7)};
  for (const int exponent : {-100, -63, 63, 120}) {
    Points scaled = points;
    for (float& x : scaled.data) x = std::ldexp(x, exponent);
    CAPTURE(exponent);
    CHECK(sample(scaled, 60, FpsMetric::euclidean) == sample(points, 60, FpsMetric::euclidean));
  }
}

TEST_CASE("A start that is not finite counts for nothing") {
  const Points points{2, {1, 0, nan_float(), 1, 0.5F, 0.5F, -1, 0.25F}};
  const FpsMetric metric = GENERATE(FpsMetric::cosine, FpsMetric::euclidean);
  CHECK(sample(points, 1, metric, {1}) == Slots{0});
  CHECK(sample(points, 1, metric, {1, 0}) == Slots{3});
  CHECK(sample(points, 1, metric, {0, 1}) == Slots{3});
}

TEST_CASE("A zero row has cosine 0 to everything") {
  // Two opposite rows first; then the zero row (0) comes before the row at 45 degrees (0.7).
  CHECK(sample(Points{2, {1, 0, 1, 1, 0, 0, -1, 0}}, 3) == Slots{3, 0, 2});
  CHECK(sample(Points{2, {0, 0, 0, 0, 0, 0}}, 2) == Slots{0, 1});
  CHECK(sample(Points{2, {0, 0, 0, 0, 3, 1}}, 1, FpsMetric::cosine, {2}) == Slots{0});
}

TEST_CASE("Rows that are not finite are picked last, and count for nothing before") {
  Random random;
  CAPTURE(random.seed());
  const FpsMetric metric = GENERATE(FpsMetric::cosine, FpsMetric::euclidean);
  for (index_t round = 0; round < 60; ++round) {
    const index_t dim = random.integer(1, 20);
    const index_t n = random.integer(4, 40);
    const index_t bad = random.integer(1, n - 2);
    Points points{dim, random.normals(n * dim)};
    for (float& x : points.data) x += 3;  // away from the origin, where a zero row would lie
    const Slots bad_rows = random.subset(bad, n);
    Slots finite_rows;
    Points finite{dim, {}};
    for (index_t i = 0; i < n; ++i)
      if (std::binary_search(bad_rows.begin(), bad_rows.end(), static_cast<slot_t>(i))) {
        const std::uint32_t kinds[] = {0x7FC00000U, 0x7F800000U, 0xFF800000U, 0xFFFFFFFFU};
        points.row(i)[random.integer(0, dim - 1)] = float_of(kinds[random.integer(0, 3)]);
      } else {
        finite_rows.push_back(static_cast<slot_t>(i));
        finite.data.insert(finite.data.end(), points.row(i), points.row(i) + dim);
      }
    CAPTURE(round, n, dim, bad_rows);
    // One pick less than there are, since all of them would come in ascending order.
    const auto finite_count = static_cast<std::size_t>(n - bad);
    const Slots picked = sample(points, n - 1, metric);
    Slots expected;
    for (const slot_t s : sample(finite, n - bad - 1, metric)) expected.push_back(finite_rows[static_cast<std::size_t>(s)]);
    REQUIRE(first(picked, finite_count - 1) == expected);
    CHECK(Slots(picked.begin() + static_cast<std::ptrdiff_t>(finite_count), picked.end()) ==
          first(bad_rows, static_cast<std::size_t>(bad) - 1));
  }
}

TEST_CASE("Only rows that are not finite") {
  const float nan = nan_float();
  const Points points{2, {nan, 0, infinity_float(), 1, 0, nan}};
  const FpsMetric metric = GENERATE(FpsMetric::cosine, FpsMetric::euclidean);
  CHECK(sample(points, 2, metric) == Slots{0, 1});
  CHECK(sample(points, 1, metric, {0}) == Slots{1});
}

TEST_CASE("The cosine does not see lengths, however small or large") {
  Random random;
  CAPTURE(random.seed());
  const Points points{24, random.normals(50 * 24)};
  Points scaled = points;
  for (index_t i = 0; i < 50; ++i) {
    const float scale = std::ldexp(1.0F, static_cast<int>(random.integer(-100, 100)));
    for (index_t d = 0; d < 24; ++d) scaled.row(i)[d] *= scale;
  }
  CHECK(sample(scaled, 30) == sample(points, 30));
}

TEST_CASE("Rows may lie apart, and are not written") {
  Random random;
  CAPTURE(random.seed());
  const Points points{5, random.normals(40 * 5)};
  std::vector<float> apart(40 * 9, nan_float());
  for (index_t i = 0; i < 40; ++i) std::copy(points.rows().row(i), points.rows().row(i) + 5, apart.begin() + i * 9);
  const std::vector<float> before = apart;
  CHECK(sample(ConstRows{apart.data(), 40, 5, 9}, 20) == sample(points, 20));
  CHECK(same_bits(apart, before));
}

TEST_CASE("[K4] farthest point sampling uses the workspace that it asked for and allocates nothing", "[K4]") {
  Random random;
  CAPTURE(random.seed());
  const index_t n = GENERATE(1, 2, 33, 64, 257);
  const index_t dim = GENERATE(1, 7, 64, 256);
  const FpsMetric metric = GENERATE(FpsMetric::cosine, FpsMetric::euclidean);
  const Points points{dim, random.normals(n * dim)};
  Slots out(static_cast<std::size_t>(n));
  check_workspace(
      fps_workspace_size(n, dim),
      [&](Workspace& work) { return farthest_point_sampling(points.rows(), n / 2, out, work, {metric}).status(); },
      [&] { std::fill(out.begin(), out.end(), -7); });
  CHECK(std::count(out.begin(), out.end(), -7) == n);
}

TEST_CASE("Bad arguments of farthest point sampling are named and nothing is written") {
  const Points points{2, {1, 0, 0, 1, -1, 0}};
  Slots out(2, -7);
  Workspace work(fps_workspace_size(3, 2));
  const auto status = [&](const ConstRows& rows, index_t count, const Slots& start = {}) {
    return farthest_point_sampling(rows, count, out, work, {FpsMetric::cosine, start}).status();
  };
  check_invalid(status(points.rows(), -1), {"count = -1"});
  check_invalid(status({points.data.data(), -1, 2, 2}, 1), {"rows = -1"});
  check_invalid(status({points.data.data(), 3, 0, 2}, 1), {"dim = 0"});
  check_invalid(status(points.rows(), 3), {"selected has room for 2", "3 are needed"});
  check_invalid(status(points.rows(), 99), {"selected has room for 2", "3 are needed"});
  check_invalid(status(points.rows(), 1, {0, 3}), {"start[1] = 3", "below 3"});
  check_invalid(status(points.rows(), 1, {-1}), {"start[0] = -1"});
  check_invalid(status(points.rows(), 1, {1, 2, 1}), {"start[2] = 1", "twice"});
  check_invalid(status(points.rows(), 1, {1, 2, 0, 1}), {"start[3] = 1", "twice"});
  CHECK(out == Slots{-7, -7});
  CHECK(work.peak() == 0);
}

}  // namespace
