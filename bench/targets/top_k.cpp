// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

/// \file
/// Top-K with an ascending result. 64 inputs in rotation, since a branch predictor learns one; their scores are distinct, so
/// that the opponent needs no rule for ties.

#include <algorithm>
#include <numeric>

#include "beaconkv/algorithm/top_k.hpp"
#include "support.hpp"
#include "targets/paths.hpp"

namespace beaconkv::bench {
namespace {

constexpr std::size_t inputs = 64;

using Scores = std::vector<std::vector<float>>;

/// `inputs` inputs of `n` scores each; `fill(random, i)` gives the i-th score.
template <class Fill>
[[nodiscard]] Scores make_scores(index_t n, Fill&& fill) {
  Random random(3);
  Scores scores(inputs);
  for (std::vector<float>& input : scores)
    for (index_t i = 0; i < n; ++i) input.push_back(fill(random, i));
  return scores;
}

/// In random order, no two alike.
[[nodiscard]] Scores distinct_scores(index_t n) {
  Scores scores = make_scores(n, [n](Random&, index_t i) { return static_cast<float>(i) / static_cast<float>(n); });
  Random random(4);
  for (std::vector<float>& input : scores)
    for (std::size_t i = input.size(); i > 1; --i)
      std::swap(input[i - 1], input[static_cast<std::size_t>(random.below(static_cast<index_t>(i)))]);
  return scores;
}

/// All inputs once.
class Ours {
 public:
  explicit Ours(index_t n, index_t k) : k_(k), out_(static_cast<std::size_t>(k)), work_(top_k_workspace_size(n)) {}
  void run(const Scores& scores) {
    for (const std::vector<float>& input : scores) {
      top_k(input, k_, out_, work_).or_throw();
      keep(out_);
    }
  }
  [[nodiscard]] const std::vector<slot_t>& result() const noexcept { return out_; }

 private:
  index_t k_;
  std::vector<slot_t> out_;
  Workspace work_;
};

class NthElementAndSort {
 public:
  explicit NthElementAndSort(index_t n, index_t k) : k_(k), order_(static_cast<std::size_t>(n)) {}
  void run(const Scores& scores) {
    for (const std::vector<float>& input : scores) {
      const float* const s = input.data();
      std::iota(order_.begin(), order_.end(), slot_t{0});
      std::nth_element(order_.begin(), order_.begin() + k_, order_.end(), [s](slot_t a, slot_t b) { return s[a] > s[b]; });
      std::sort(order_.begin(), order_.begin() + k_);
      keep(order_);
    }
  }
  [[nodiscard]] std::vector<slot_t> result() const { return {order_.begin(), order_.begin() + k_}; }

 private:
  index_t k_;
  std::vector<slot_t> order_;
};

void against_nth_element(Report& report, index_t n, index_t k, const std::string& share, double bound) {
  const std::string name = "top_k/nth_element_sort/" + std::to_string(n) + "/" + share;
  const std::string argselect = "top_k/argselect/" + std::to_string(n) + "/" + share;
  if (!report.wants({name, argselect})) return;
  const Scores scores = distinct_scores(n);
  Ours ours(n, k);
  NthElementAndSort theirs(n, k);
  ours.run(scores);
  theirs.run(scores);
  require_same(ours.result() == theirs.result(), "top_k / nth_element + sort");
  const auto [mine, other] = fastest(
      report.pace(), [&] { ours.run(scores); }, [&] { theirs.run(scores); });
  report.target(name, other / mine, "x", at_least(bound), against(mine / inputs, other / inputs));
  if (n == 32768) report.number(argselect, 1e6 * mine / inputs, "us", "x86-simd-sort is not linked: ours alone");
}

/// Scores as policies really have them: equal, pooled, mostly zero.
void ties(Report& report) {
  const std::string name = "top_k/worst_pattern/32768/7_8";
  const std::string two_valued = "top_k/argselect/32768/two_valued";
  if (!report.wants({name, two_valued})) return;
  constexpr index_t n = 32768;
  constexpr index_t k = n / 8 * 7;
  const Scores random = distinct_scores(n);
  float last = 0;
  const struct {
    const char* name;
    Scores scores;
  } patterns[] = {
      {"all_equal", make_scores(n, [](Random&, index_t) { return 0.25F; })},
      {"two_valued", make_scores(n, [](Random& r, index_t) { return r.uniform() < 0.5F ? 0.0F : 1.0F; })},
      {"mostly_zero", make_scores(n, [](Random& r, index_t) { return r.uniform() < 0.95F ? 0.0F : r.uniform(); })},
      {"plateaus_of_7", make_scores(n, [&](Random& r, index_t i) { return last = i % 7 == 0 ? r.uniform() : last; })},
      {"ascending", make_scores(n, [](Random&, index_t i) { return static_cast<float>(i); })},
      {"descending", make_scores(n, [](Random&, index_t i) { return static_cast<float>(n - i); })},
      {"denormal", make_scores(n, [](Random& r, index_t) { return r.uniform() * 1e-39F; })},
      {"some_nan",
       make_scores(n, [](Random& r, index_t) { return r.uniform() < 0.1F ? beaconkv::detail::quiet_nan() : r.uniform(); })},
  };
  Ours ours(n, k);
  double worst = 0;
  std::string note;
  for (const auto& pattern : patterns) {
    const auto [plain, tied] = fastest(
        {report.pace().seconds / 4, report.pace().rounds}, [&] { ours.run(random); }, [&] { ours.run(pattern.scores); });
    if (tied / plain > worst)
      note = std::string(pattern.name) + ", " + against(tied / inputs, plain / inputs) + " (distinct scores)";
    worst = std::max(worst, tied / plain);
    if (pattern.name == std::string("two_valued"))
      report.number(two_valued, 1e6 * tied / inputs, "us", "x86-simd-sort is not linked: ours alone");
  }
  report.target(name, worst, "x", at_most(1.3), note);
}

}  // namespace

void measure_top_k(Report& report) {
  for (const index_t n : {2048, 8192, 32768}) {
    against_nth_element(report, n, n / 8 * 7, "7_8", 15);
    against_nth_element(report, n, n / 8, "1_8", 4.5);
  }
  ties(report);
}

}  // namespace beaconkv::bench
