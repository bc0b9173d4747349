// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

// A user's own scorer, observer and schedule, each a small struct, within the policies that the library has.

#include <bit>
#include <vector>

#include "support/catch.hpp"
#include "support/policies.hpp"

namespace {

using namespace beaconkv;
using namespace beaconkv::test;

// KeyDiff-like: keys far from the mean direction stay. Reads keys, takes scratch, and looks at no query.
struct UnusualKeys {
  float sign = -1;

  [[nodiscard]] Status validate(const Shape&) const { return {}; }
  template <CacheReader Cache>
  [[nodiscard]] Result<ScoreReport> score(const Cache& cache, const Observations&, Range candidates, ScoreMatrix out,
                                          Workspace& work) const {
    const Workspace::Frame frame(work);
    const std::span<float> mean = work.take<float>(cache.key_dim());
    const std::span<float> scratch = work.take<float>(cache.key_dim());
    for (index_t h = 0; h < out.heads; ++h) {
      std::fill(mean.begin(), mean.end(), 0.0F);
      for (index_t j = 0; j < out.tokens; ++j) add(cache.keys(h, j, 1, scratch.data()), mean);
      for (index_t j = candidates.first; j < candidates.last; ++j)
        out.row(h)[static_cast<std::size_t>(j)] = sign * dot(cache.keys(h, j, 1, scratch.data()), mean);
    }
    return ScoreReport{};
  }
  [[nodiscard]] WorkspaceSize workspace_size(const Shape& shape, index_t, index_t) const {
    return {2 * ((static_cast<std::size_t>(shape.head_dim) * sizeof(float) + Workspace::alignment - 1) / Workspace::alignment *
                 Workspace::alignment),
            0, 0};
  }

 private:
  static void add(const ConstRows& key, std::span<float> sum) {
    for (std::size_t d = 0; d < sum.size(); ++d) sum[d] += key.data[d];
  }
  static float dot(const ConstRows& key, std::span<const float> with) {
    float sum = 0;
    for (std::size_t d = 0; d < with.size(); ++d) sum += key.data[d] * with[d];
    return sum;
  }
};
static_assert(Scorer<UnusualKeys, PlaneCache<float>>);

/// Looks at the newest query of head 0 only: what observers of all kinds hand over.
struct NewestQuery {
  float limit = 1;

  [[nodiscard]] Status validate(const Shape&) const {
    if (limit <= 0) return Status(StatusCode::invalid_argument, "limit = 0: must be positive");
    return {};
  }
  [[nodiscard]] bool needs_all_heads() const { return true; }
  template <CacheReader Cache>
  [[nodiscard]] Result<ScoreReport> score(const Cache& cache, const Observations& seen, Range candidates, ScoreMatrix out,
                                          Workspace& work) const {
    if (seen.rows == 0) return Status(StatusCode::out_of_order, "no query was observed yet");
    const Workspace::Frame frame(work);
    const std::span<float> scratch = work.take<float>(seen.dim);
    const float* const newest = seen.queries + (seen.rows - 1) * seen.dim;
    for (index_t h = 0; h < out.heads; ++h)
      for (index_t j = candidates.first; j < candidates.last; ++j) {
        const ConstRows key = cache.keys(h, j, 1, scratch.data());
        float sum = 0;
        for (index_t d = 0; d < seen.dim; ++d) sum += key.data[d] * newest[d];
        out.row(h)[static_cast<std::size_t>(j)] = sum;
      }
    return ScoreReport{.num_non_finite = 3};
  }
  [[nodiscard]] WorkspaceSize workspace_size(const Shape& shape, index_t, index_t) const {
    return {static_cast<std::size_t>(shape.head_dim) * 4 + 64, 0, 0};
  }
};

/// H2O: scores add up over evictions; the sums follow the plan.
struct Accumulating {
  std::vector<std::vector<float>> sums{};  // of each head and kept slot
  index_t commits = 0;

  [[nodiscard]] Status validate(const Shape&) const { return {}; }
  template <CacheReader Cache>
  [[nodiscard]] Result<ScoreReport> score(const Cache&, const Observations&, Range candidates, ScoreMatrix out,
                                          Workspace&) const {
    for (index_t h = 0; h < out.heads; ++h)
      for (index_t j = candidates.first; j < candidates.last; ++j) {
        const bool known = !sums.empty() && j < static_cast<index_t>(sums[static_cast<std::size_t>(h)].size());
        out.row(h)[static_cast<std::size_t>(j)] =
            1 + (known ? sums[static_cast<std::size_t>(h)][static_cast<std::size_t>(j)] : 0.0F);
      }
    return ScoreReport{};
  }
  [[nodiscard]] WorkspaceSize workspace_size(const Shape&, index_t, index_t) const { return {}; }
  void commit(const KeepPlan& plan, const Shape& shape) {
    sums.resize(static_cast<std::size_t>(shape.kv_heads));
    for (index_t h = 0; h < shape.kv_heads; ++h)
      sums[static_cast<std::size_t>(h)].assign(plan.kept_scores(h).begin(), plan.kept_scores(h).end());
    ++commits;
  }
  [[nodiscard]] std::size_t state_bytes() const { return sums.empty() ? 0 : sums.size() * sums[0].size() * sizeof(float); }
};

/// An observer that counts tokens and shows nothing else.
class EveryThird {
 public:
  struct Options {
    index_t first = 0;
  };
  static constexpr bool needs_queries = true;
  static constexpr bool needs_rope = false;

  EveryThird(const Shape& shape, const Options& options)
      : shape_(shape), seen_(options.first), row_(static_cast<std::size_t>(shape.query_heads * shape.head_dim)) {}
  [[nodiscard]] friend Status validate(const Options& options, const Shape&) {
    return options.first < 0 ? Status(StatusCode::invalid_argument, "first = -1") : Status();
  }
  [[nodiscard]] Status prefill(const QuerySource& queries, Workspace&) {
    seen_ += queries.view.tokens;
    return {};
  }
  [[nodiscard]] Status observe(const QuerySource& queries) {
    if (seen_++ % 3 == 0)
      for (index_t h = 0; h < shape_.query_heads; ++h) queries.load(0, h, row_.data() + h * shape_.head_dim);
    return {};
  }
  [[nodiscard]] Status commit() { return {}; }
  [[nodiscard]] index_t rows() const noexcept { return 1; }
  [[nodiscard]] index_t max_rows() const noexcept { return 1; }
  [[nodiscard]] Status write_rows(const RopeTable*, position_t now, Range heads, float* out, position_t* positions,
                                  Workspace&) const {
    std::copy(row_.begin() + heads.first * shape_.head_dim, row_.begin() + heads.last * shape_.head_dim, out);
    std::fill(positions, positions + heads.size(), now);
    return {};
  }
  [[nodiscard]] WorkspaceSize workspace_size() const { return {}; }
  [[nodiscard]] WorkspaceSize prefill_workspace_size(index_t) const { return {}; }
  [[nodiscard]] std::size_t state_bytes() const noexcept { return row_.size() * sizeof(float); }

 private:
  Shape shape_;
  index_t seen_;
  std::vector<float> row_;
};
static_assert(Observer<EveryThird>);

/// Evicts whenever the number of tokens is odd, down by one.
struct OddOneOut {
  index_t least = 1;
  index_t count = 0;

  [[nodiscard]] Status validate(std::optional<index_t>, index_t) const {
    return least < 1 ? Status(StatusCode::invalid_argument, "least = 0") : Status();
  }
  [[nodiscard]] bool due(const ScheduleState& state) const { return state.tokens % 2 == 1 && state.tokens > least; }
  [[nodiscard]] index_t target(const ScheduleState& state) const { return state.tokens - 1; }
  void committed() { ++count; }
};
static_assert(Schedule<OddOneOut>);

template <class PolicyT>
std::vector<slot_t> kept_by_unusual_keys(PolicyT policy, float sign) {
  Random random(5);
  Stream stream = small_stream(random);
  TestCache<> cache(small_shape, 40);
  Workspace work(policy.workspace_size(40));
  feed(policy, cache, stream, 40);
  // What the scorer should have said, in double.
  std::vector<float> want;
  for (index_t j = 0; j < 40; ++j) {
    double sum = 0;
    for (index_t i = 0; i < 40; ++i) sum += reference::dot(cache.key(0, i), cache.key(0, j));
    want.push_back(sign * static_cast<float>(sum));
  }
  std::vector<float> flat(80, 0.0F);
  require_value(policy.score(cache.view(), {flat.data(), 2, 40}, work));
  KeepPlan plan;
  require_ok(policy.plan_free(cache.view(), 16, work, plan));
  for (index_t j = plan.candidates().first; j < plan.candidates().last; ++j)
    REQUIRE_THAT(static_cast<double>(flat[at(j)]), Catch::Matchers::WithinAbs(static_cast<double>(want[at(j)]), 1e-3));
  require_value(evict(policy, cache.view(), work));
  return slots_of(work.plan().kept(0));
}

}  // namespace

TEST_CASE("one scorer of twenty lines works in all five policies", "[own]") {
  const auto check = [](const char* name, auto policy, index_t window) {
    CAPTURE(name);
    const std::vector<slot_t> kept = kept_by_unusual_keys(policy, -1);
    REQUIRE(static_cast<index_t>(kept.size()) == small_budget);
    for (slot_t s = 0; s < 2; ++s) REQUIRE(std::binary_search(kept.begin(), kept.end(), s));
    for (slot_t s = 0; s < static_cast<slot_t>(window); ++s)
      REQUIRE(std::binary_search(kept.begin(), kept.end(), static_cast<slot_t>(39 - s)));
  };
  const FixedBudget budget{.max = small_budget + 8, .min = small_budget, .counts_prefix = true};
  check("RecentWindow", require_value(RecentWindow<UnusualKeys>::make(small_shape, {.budget = budget, .n_prefix = 2})), 0);
  check("SnapKV",
        require_value(SnapKV<UnusualKeys>::make(
            small_shape, {.budget = {.tokens = small_budget}, .n_recent_kv = 4, .n_prefix = 2}, small_rope(), UnusualKeys{})),
        4);
  check("RPC",
        require_value(RPC<UnusualKeys, FixedBudget>::make(small_shape, {.budget = budget, .n_recent_kv = 4, .n_prefix = 2},
                                                          small_rope(), UnusualKeys{})),
        4);
  check("RKV",
        require_value(RKV<UnusualKeys>::make(small_shape, {.budget = {.tokens = small_budget}, .n_recent_kv = 4, .n_prefix = 2},
                                             small_rope(), UnusualKeys{})),
        4);
  check("BeaconKV",
        require_value(BeaconKV<UnusualKeys>::make(small_shape, {.budget = budget, .n_recent_kv = 4, .n_prefix = 2},
                                                  small_rope(), UnusualKeys{})),
        4);
  // The constructor of RecentWindow takes one, too.
  const RecentWindow<UnusualKeys> usual(small_shape, {.budget = budget, .n_prefix = 2}, UnusualKeys{.sign = 1});
  const std::vector<slot_t> usual_keys = kept_by_unusual_keys(usual, 1);
  REQUIRE(
      usual_keys !=
      kept_by_unusual_keys(require_value(RecentWindow<UnusualKeys>::make(small_shape, {.budget = budget, .n_prefix = 2})), -1));
}

TEST_CASE("a scorer of one's own sees what the policy's observer holds", "[own]") {
  Random random;
  CAPTURE(random.seed());
  const auto check = [&](auto policy, index_t rows) {
    Stream stream = small_stream(random);
    TestCache<> cache(small_shape, 40);
    Workspace work(policy.workspace_size(40));
    feed(policy, cache, stream, 39);
    const Token last = stream.next(39);
    feed(policy, cache, last);
    REQUIRE(policy.observer().rows() == rows);
    std::vector<float> flat(80, 0.0F);
    REQUIRE(require_value(policy.score(cache.view(), {flat.data(), 2, 40}, work)).num_non_finite == 3);
    const reference::Row query = reference::row_of(last.rotated.data(), 16);
    for (index_t h = 0; h < 2; ++h)
      for (index_t j = 2; j < 36; ++j)
        REQUIRE_THAT(static_cast<double>(flat[at(h * 40 + j)]),
                     Catch::Matchers::WithinAbs(reference::dot(query, cache.key(h, j)), 1e-4));
    REQUIRE(require_value(evict(policy, cache.view(), work)).num_non_finite == 3);
  };
  check(require_value(SnapKV<NewestQuery>::make(
            small_shape, {.budget = {.tokens = small_budget}, .n_recent_queries = 7, .n_recent_kv = 4, .n_prefix = 2},
            small_rope(), NewestQuery{})),
        7);
  check(require_value(BeaconKV<NewestQuery>::make(
            small_shape, {.budget = {.max = 24}, .n_beacon = 5, .n_recent_queries = 6, .n_recent_kv = 4, .n_prefix = 2},
            small_rope(), NewestQuery{})),
        11);
}

TEST_CASE("what a scorer of one's own refuses reaches the caller, and nothing changes", "[own]") {
  const SnapKVOptions<> options{.budget = {.tokens = small_budget}, .n_recent_kv = 4};
  check_invalid(SnapKV<NewestQuery>::make(small_shape, options, small_rope(), NewestQuery{.limit = 0}).status(), {"limit = 0"});
  SnapKV<NewestQuery> policy = require_value(SnapKV<NewestQuery>::make(small_shape, options, small_rope(), NewestQuery{}));
  TestCache<> cache(small_shape, 40);
  Workspace work(policy.workspace_size(40));
  for (position_t p = 0; p < 40; ++p) cache.append({p, {}, {}, std::vector<float>(32), std::vector<float>(32)});
  const auto before = cache.state();
  check_error(evict(policy, cache.view(), work).status(), StatusCode::out_of_order, {"no query was observed yet"});
  REQUIRE(cache.state() == before);
  KeepPlan plan;
  check_error(policy.plan_free(cache.view(), 5, work, plan), StatusCode::out_of_order, {"no query was observed yet"});
  REQUIRE(plan.sets() == 0);
}

TEST_CASE("[E9] a scorer's own sums follow the plans, and the newest tokens are kept all the same", "[own]") {
  using Heavy = EvictionPolicy<NoQueries, Accumulating, FixedBudget>;
  Heavy policy = require_value(Heavy::make(
      small_shape, {.schedule = {.max = 7, .min = 6, .counts_prefix = true}, .protection = {.n_prefix = 0, .n_recent_kv = 2}}));
  TestCache<> cache(small_shape, 16);
  Workspace work(policy.workspace_size(16));
  for (position_t p = 0; p < 20; ++p) {
    cache.append({p, {}, {}, std::vector<float>(32), std::vector<float>(32)});
    require_ok(policy.observe({}, p));
    if (policy.due(cache.view())) require_value(evict(policy, cache.view(), work));
    const index_t n = cache.view().num_tokens();
    REQUIRE(cache.view().position(0, n - 1) == p);
    if (p > 0) REQUIRE(cache.view().position(0, n - 2) == p - 1);
  }
  REQUIRE(cache.view().num_tokens() == 6);
  REQUIRE(cache.view().position(0, 5) > 10);
  REQUIRE(policy.scorer().commits == 14);
  REQUIRE(policy.state_bytes() == 2 * 6 * sizeof(float));
  // The oldest gathered one point an eviction, the window none: its slots were protected.
  REQUIRE(policy.scorer().sums[0].front() == 14.0F);
  REQUIRE(policy.scorer().sums[0].back() == 0.0F);
}

TEST_CASE("an observer and a schedule of one's own", "[own]") {
  using Own = EvictionPolicy<EveryThird, AttentionScorer, OddOneOut>;
  check_invalid(Own::make(small_shape, {.observer = {.first = -1}}).status(), {"first = -1"});
  check_invalid(Own::make(small_shape, {.schedule = {.least = 0}}).status(), {"least = 0"});
  Own policy =
      require_value(Own::make(small_shape, {.schedule = {.least = 9}, .protection = {.n_prefix = 1, .n_recent_kv = 2}}));
  Random random;
  CAPTURE(random.seed());
  Stream stream = small_stream(random);
  TestCache<> cache(small_shape, 40);
  Workspace work(policy.workspace_size(40));
  for (position_t p = 0; p < 25; ++p) {
    const Token token = stream.next(p);
    cache.append(token);
    require_ok(policy.observe_rotated(token.rotated, p));
    if (policy.due(cache.view())) {
      const index_t before = cache.view().num_tokens();
      require_value(evict(policy, cache.view(), work));
      REQUIRE(cache.view().num_tokens() == before - 1);
    }
  }
  REQUIRE(cache.view().num_tokens() == 10);
  REQUIRE(policy.schedule().count == 15);
}
