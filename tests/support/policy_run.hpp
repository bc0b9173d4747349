// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// What the tests of policies share: a stream of queries and keys that resembles a model's, caches in every memory layout, and
/// the run of a policy token by token beside its slow reference.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <map>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "beaconkv/memory/owning_cache.hpp"
#include "beaconkv/policy/eviction_policy.hpp"
#include "support/catch.hpp"
#include "support/check.hpp"
#include "support/layouts.hpp"
#include "support/policy_reference.hpp"
#include "support/random.hpp"

namespace beaconkv::test {

[[nodiscard]] inline std::size_t at(index_t i) { return static_cast<std::size_t>(i); }

/// Fails with the message unless `status` is ok.
inline void require_ok(const Status& status) {
  INFO("message: " << status.message());
  REQUIRE(status.ok());
}

template <class T>
T require_value(Result<T> result) {
  require_ok(result.ok() ? Status() : result.status());
  return std::move(*result);
}

[[nodiscard]] inline std::vector<slot_t> slots_of(std::span<const slot_t> slots) { return {slots.begin(), slots.end()}; }

/// All slots of `[0, n)` but those of `gone`.
[[nodiscard]] inline std::vector<slot_t> all_but(index_t n, std::initializer_list<slot_t> gone) {
  std::vector<slot_t> out;
  for (slot_t s = 0; s < static_cast<slot_t>(n); ++s)
    if (std::find(gone.begin(), gone.end(), s) == gone.end()) out.push_back(s);
  return out;
}

/// A cache of which only the positions exist: [head][slot].
struct PositionCache {
  std::vector<std::vector<position_t>> positions;

  [[nodiscard]] index_t num_kv_heads() const noexcept { return static_cast<index_t>(positions.size()); }
  [[nodiscard]] index_t num_tokens() const noexcept { return static_cast<index_t>(positions.front().size()); }
  [[nodiscard]] index_t key_dim() const noexcept { return 1; }
  [[nodiscard]] index_t value_dim() const noexcept { return 1; }
  [[nodiscard]] position_t position(index_t head, index_t slot) const noexcept { return positions[at(head)][at(slot)]; }
  [[nodiscard]] ConstRows keys(index_t, index_t, index_t count, float* scratch) const noexcept {
    return {scratch, count, 1, 1};
  }
  [[nodiscard]] ConstRows values(index_t, index_t, index_t count, float* scratch) const noexcept {
    return {scratch, count, 1, 1};
  }
  [[nodiscard]] std::uint64_t epoch() const noexcept { return 1; }
};
static_assert(CacheReader<PositionCache>);

// Data.

/// A RoPE as the library's options and as the reference sees it.
struct RopeCase {
  RopeOptions options{};
  reference::Rope reference{};
};

[[nodiscard]] inline RopeCase make_rope(index_t head_dim, RopeLayout layout = RopeLayout::half,
                                        std::optional<index_t> rotary_dim = {}, double theta = 10000) {
  return {{.head_dim = head_dim, .rotary_dim = rotary_dim, .theta = theta, .layout = layout},
          {reference::rope_frequencies(rotary_dim.value_or(head_dim), theta), layout, 1}};
}
/// With an attention factor, as YaRN has one.
[[nodiscard]] inline RopeCase make_rope_with_factor(index_t head_dim, double factor) {
  const reference::Row frequencies = reference::rope_frequencies(head_dim, 50000);
  return {{.head_dim = head_dim, .scaling = GivenFrequencies{frequencies, factor}}, {frequencies, RopeLayout::half, factor}};
}

/// One token of one layer.
struct Token {
  position_t position = 0;
  std::vector<float> queries;  ///< [query head][dim], pre-RoPE
  std::vector<float> rotated;  ///< the same as the attention uses them
  std::vector<float> keys;     ///< [KV head][dim], rotated
  std::vector<float> values;
};

/// Tokens of a sequence that walks over a few topics, so that a query looks at some keys much more than at others.
class Stream {
 public:
  Stream(Random& random, const Shape& shape, const RopeCase& rope) : random_(&random), shape_(shape), rope_(rope.reference) {
    const double length = std::sqrt(2.5) * std::pow(static_cast<double>(shape.head_dim), 0.25);
    for (index_t t = 0; t < topics * shape.kv_heads; ++t) {
      reference::Row topic;
      for (index_t d = 0; d < shape.head_dim; ++d) topic.push_back(static_cast<double>(random.normal()));
      const double norm = std::sqrt(reference::dot(topic, topic));
      for (double& x : topic) x *= length / norm;
      topics_.push_back(topic);
    }
  }

  [[nodiscard]] const Shape& shape() const { return shape_; }

  [[nodiscard]] Token next(position_t position) {
    Token token;
    token.position = position;
    if (random_->integer(0, 3) == 0) topic_ = random_->integer(0, topics - 1);
    for (index_t h = 0; h < shape_.query_heads; ++h) {
      const reference::Row row =
          around(h / shape_.group(), random_->integer(0, 2) == 0 ? random_->integer(0, topics - 1) : topic_);
      const reference::Row rotated = rope_.at(row, position);
      for (const double x : row) token.queries.push_back(static_cast<float>(x));
      for (const double x : rotated) token.rotated.push_back(static_cast<float>(x));
    }
    for (index_t h = 0; h < shape_.kv_heads; ++h)
      for (const double x : rope_.at(around(h, topic_), position)) token.keys.push_back(static_cast<float>(x));
    token.values = random_->normals(shape_.kv_heads * shape_.head_dim);
    return token;
  }

 private:
  static constexpr index_t topics = 6;

  /// Rounded to float before it is rotated, so that both forms of a query say the same.
  [[nodiscard]] reference::Row around(index_t kv_head, index_t topic) {
    reference::Row row = topics_[at(kv_head * topics + topic)];
    for (double& x : row) x = static_cast<double>(static_cast<float>(x) + 0.5F * random_->normal());
    return row;
  }

  Random* random_;
  Shape shape_;
  reference::Rope rope_;
  std::vector<reference::Row> topics_;
  index_t topic_ = 0;
};

/// Equal, NaN included.
[[nodiscard]] inline bool same_row(const reference::Row& a, const reference::Row& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](double x, double y) { return std::bit_cast<std::uint64_t>(x) == std::bit_cast<std::uint64_t>(y); });
}

/// `[query head][dim]` numbers as rows.
[[nodiscard]] inline reference::Matrix rows_of(const std::vector<float>& all, index_t dim) {
  reference::Matrix out;
  for (std::size_t i = 0; i < all.size(); i += at(dim)) out.push_back(reference::row_of(all.data() + i, dim));
  return out;
}

// Caches.

/// Memory of its own in any layout, and the library's view of it. A copy is a deep copy.
template <StorageType K = float, StorageType V = K, Granularity G = Granularity::per_head>
class TestCache {
 public:
  using View = PlaneCache<K, V, G>;

  TestCache(const Shape& shape, index_t capacity, Layout layout = Layout::head_major)
      : shape_(shape),
        capacity_((capacity + LayoutPlane<K>::page_size - 1) / LayoutPlane<K>::page_size * LayoutPlane<K>::page_size),
        layout_(layout),
        keys_(layout, shape.kv_heads, shape.head_dim, capacity_, pages_),
        values_(layout, shape.kv_heads, shape.head_dim, capacity_, pages_),
        view_(require_value(View::make(keys_.plane(), values_.plane()))) {}
  TestCache(const TestCache& other) : TestCache(other.shape_, other.capacity_, other.layout_) { *this = other; }
  /// From a cache of the same shape, capacity and layout.
  TestCache& operator=(const TestCache& other) {
    REQUIRE(keys_.memory().size() == other.keys_.memory().size());
    std::copy(other.keys_.memory().begin(), other.keys_.memory().end(), keys_.memory().begin());
    std::copy(other.values_.memory().begin(), other.values_.memory().end(), values_.memory().begin());
    std::copy(other.keys_.scales().begin(), other.keys_.scales().end(), keys_.scales().begin());
    std::copy(other.values_.scales().begin(), other.values_.scales().end(), values_.scales().begin());
    view_ = other.view_;
    require_ok(view_.rebase(keys_.plane(), values_.plane()));
    return *this;
  }

  [[nodiscard]] View& view() { return view_; }
  [[nodiscard]] const View& view() const { return view_; }

  void append(const Token& token) {
    const index_t slot = view_.num_tokens();
    for (index_t h = 0; h < shape_.kv_heads; ++h) {
      keys_.write(h, slot, part(token.keys, h));
      values_.write(h, slot, part(token.values, h));
    }
    require_ok(view_.append(token.position));
  }

  /// The key in a slot, as the library decodes it.
  [[nodiscard]] reference::Row key(index_t head, index_t slot) const { return decoded(keys_.read(head, slot)); }
  [[nodiscard]] reference::Row value(index_t head, index_t slot) const { return decoded(values_.read(head, slot)); }

  /// Everything that a caller can see, bit for bit.
  struct State {
    std::vector<std::byte> memory{};
    std::vector<position_t> positions{};
    position_t next_position = 0;
    std::uint64_t epoch = 0;
    [[nodiscard]] bool operator==(const State&) const = default;
  };
  [[nodiscard]] State state() const {
    State out{.next_position = view_.next_position(), .epoch = view_.epoch()};
    const auto keys = std::as_bytes(std::span(keys_.memory()));
    const auto values = std::as_bytes(std::span(values_.memory()));
    out.memory.assign(keys.begin(), keys.end());
    out.memory.insert(out.memory.end(), values.begin(), values.end());
    for (index_t h = 0; h < shape_.kv_heads; ++h)
      for (index_t s = 0; s < view_.num_tokens(); ++s) out.positions.push_back(view_.position(h, s));
    return out;
  }

 private:
  [[nodiscard]] std::span<const float> part(const std::vector<float>& rows, index_t head) const {
    return std::span(rows).subspan(at(head * shape_.head_dim), at(shape_.head_dim));
  }
  [[nodiscard]] static reference::Row decoded(const std::vector<float>& row) { return {row.begin(), row.end()}; }

  Random pages_{1};  // the same order of pages in every copy
  Shape shape_;
  index_t capacity_;
  Layout layout_;
  LayoutPlane<K> keys_;
  LayoutPlane<V> values_;
  View view_;
};

// Runs.

/// When the queries of a head's pool were observed.
template <class ObserverT>
[[nodiscard]] std::vector<position_t> pool_positions(const ObserverT& observer, index_t head) {
  std::vector<position_t> positions;
  for (index_t i = 0; i < observer.pool_size(); ++i) positions.push_back(observer.pool_position(head, i));
  return positions;
}

/// What one run of a policy beside its reference saw.
struct RunReport {
  index_t evictions = 0;
  index_t samplings = 0;  ///< reductions of a beacon buffer
  index_t ambiguous = 0;  ///< of samplings and evictions: the reference's own choice hung on a difference below rounding errors
  double worst = 0;       ///< difference of a score to the reference's, in units of what is allowed
  index_t unclear = 0;    ///< evictions whose scores hung on a pair of keys at R-KV's threshold: one pair may stay for several

  void add(const RunReport& other) {
    evictions += other.evictions;
    samplings += other.samplings;
    ambiguous += other.ambiguous;
    unclear += other.unclear;
    worst = std::max(worst, other.worst);
  }
  /// Fails where nothing was compared, or so little was clear-cut that the comparison says nothing.
  void require_sound() const {
    CAPTURE(evictions, samplings, ambiguous, unclear, worst);
    REQUIRE(evictions > 2 * unclear);
    REQUIRE(ambiguous <= 2 + (samplings + evictions) / 50);
  }
};

/// One option of a policy's case changed.
template <class CaseT>
struct Variation {
  const char* name;
  void (*change)(CaseT&);
};

/// Every variation of `small`, in some storage types and layouts; `run(case, kind) -> RunReport`.
template <class CaseT, std::size_t count, class Run>
void require_sound_for_each(const Variation<CaseT> (&variations)[count], const CaseT& small, Run run) {
  for (const Variation<CaseT>& variation : variations) {
    INFO(variation.name);
    RunReport total;
    for (const index_t kind : {0, 1, 5}) {
      CaseT c = small;
      variation.change(c);
      total.add(run(c, kind));
    }
    total.require_sound();
  }
}

/// `small` with a share of keys and queries that are not finite, in every storage type and layout.
template <class CaseT, class Run>
void require_sound_when_poisoned(const CaseT& small, Run run) {
  RunReport total;
  for (const double share : {0.03, 0.3, 1.0})
    for (index_t kind = 0; kind < 6; ++kind) {
      CaseT c = small;
      c.plan.poison = share;
      CAPTURE(share, kind);
      total.add(run(c, kind));
    }
  total.require_sound();
}

/// What a run feeds a policy with, and where it keeps the keys.
struct RunPlan {
  Shape shape{};
  RopeCase rope{};
  Layout layout = Layout::head_major;
  index_t prompt = 20;
  index_t chunk = 0;  ///< of the prompt; 0: all at once
  index_t decode = 100;
  bool rotated = false;      ///< queries come as the attention used them
  bool head_major = false;   ///< the prompt's queries lie [head][token]
  bool at_any_time = false;  ///< evict at moments of the engine's own, too
  double poison = 0;         ///< share of keys and of queries that get a NaN or an infinity
  std::vector<Range> protect{};
};

/// A policy, its cache and its workspace, and the reference of each. Every step of the library is compared with the
/// reference's.
template <class PolicyT, class CacheT>
class Duo {
 public:
  PolicyT policy;
  CacheT cache;
  reference::Policy reference;
  reference::Cache reference_cache;
  Workspace work;
  RunReport report{};
  bool rotated_input = false;
  /// How the scores of the KV heads become one where the cache keeps one set.
  Reduce shared_reduce = Reduce::mean;

  Duo(PolicyT p, CacheT c, const reference::PolicySettings& settings, index_t prompt_tokens)
      : policy(std::move(p)),
        cache(std::move(c)),
        reference(settings),
        reference_cache(settings.shape.kv_heads),
        work(policy.workspace_size(std::max(cache.view().capacity(), prompt_tokens))) {}

  void append(const Token& token) {
    const index_t slot = cache.view().num_tokens();
    cache.append(token);
    reference::Matrix keys;
    for (index_t h = 0; h < cache.view().num_kv_heads(); ++h) keys.push_back(cache.key(h, slot));
    reference_cache.append(token.position, keys);
    seen_.emplace(token.position, std::pair{keys, std::vector<reference::Row>()});
    for (index_t h = 0; h < cache.view().num_kv_heads(); ++h) seen_[token.position].second.push_back(cache.value(h, slot));
  }

  /// A chunk of a prompt.
  void prefill(const std::vector<Token>& tokens, const Shape& shape, bool head_major = false) {
    if (tokens.empty()) return;
    const auto n = static_cast<index_t>(tokens.size());
    std::vector<float> queries(at(n * shape.query_heads * shape.head_dim));
    std::vector<reference::Matrix> rows(at(shape.query_heads));
    for (index_t t = 0; t < n; ++t) {
      append(tokens[at(t)]);
      const std::vector<float>& from = rotated_input ? tokens[at(t)].rotated : tokens[at(t)].queries;
      const reference::Matrix pre = rows_of(tokens[at(t)].queries, shape.head_dim);
      for (index_t h = 0; h < shape.query_heads; ++h) {
        const index_t place = head_major ? h * n + t : t * shape.query_heads + h;
        std::copy_n(from.begin() + h * shape.head_dim, shape.head_dim, queries.begin() + place * shape.head_dim);
        rows[at(h)].push_back(pre[at(h)]);
      }
    }
    const QueryView view = head_major ? QueryView::head_major(queries.data(), n, shape.query_heads, shape.head_dim)
                                      : QueryView::token_major(queries.data(), n, shape.query_heads, shape.head_dim);
    const position_t first = tokens.front().position;
    require_ok(rotated_input ? policy.prefill_rotated(view, work, first) : policy.prefill(view, work, first));
    reference.prefill(rows, first);
    compare_beacons();
    REQUIRE(policy.next_position() == first + n);
    REQUIRE(policy.prefix() == reference.prefix());
  }

  void decode(const Token& token, const Shape& shape) {
    append(token);
    require_ok(rotated_input ? policy.observe_rotated(token.rotated, token.position)
                             : policy.observe(token.queries, token.position));
    reference.observe(rows_of(token.queries, shape.head_dim), token.position);
    compare_beacons();
  }

  /// Compares `due`, and evicts where it is.
  void evict_if_due() {
    const bool due = policy.due(cache.view());
    REQUIRE(due == reference.due(reference_cache));
    if (due) evict();
  }

  /// Scores, plan and eviction, each against the reference. `free`: as many tokens instead of what the schedule says.
  void evict(std::optional<index_t> free = {}) {
    const index_t n = cache.view().num_tokens();
    const index_t heads = cache.view().num_kv_heads();
    const index_t target = free ? n - *free : reference.target(reference_cache);
    sync_beacons_with_next_commit();

    std::vector<float> flat(at(heads * n), -7.0F);
    const ScoreMatrix scores{flat.data(), heads, n};
    const ScoreReport scored = require_value(policy.score(cache.view(), scores, work));
    REQUIRE(scored.num_non_finite == reference.num_non_finite(reference_cache));
    const reference::Scores expected = compare_scores(scores);
    KeepPlan separate;
    require_ok(policy.select(cache.view(), scores, work, separate, target));

    KeepPlan plan;
    require_ok(free ? policy.plan_free(cache.view(), *free, work, plan) : policy.plan(cache.view(), work, plan));
    REQUIRE(plan.tokens_before() == n);
    if (!plan.keeps_all()) REQUIRE(plan.num_non_finite() == scored.num_non_finite);
    const std::vector<std::vector<slot_t>> kept = compare_plan(plan, separate, scores, expected, target);

    reference::Matrix own;  // the published order of R-KV goes by the scores themselves: the library's, so that rounding errors
                            // do not part the two
    for (index_t h = 0; h < heads; ++h) {
      const std::span<float> row = scores.row(one_set ? 0 : h);
      own.emplace_back(row.begin(), row.end());
    }
    reference.commit(reference_cache, kept, own, n < target);
    for (std::size_t h = 0; h < kept.size(); ++h) reference_cache.keep(h, kept[h]);
    require_ok(compact(cache.view(), plan));
    require_ok(policy.commit(plan));
    ++report.evictions;
    compare_cache();
    compare_beacons();
  }

  /// Every key, value and position in the cache is where the reference has it, bit for bit.
  void compare_cache() const {
    REQUIRE(cache.view().num_tokens() == reference_cache.tokens());
    index_t wrong = 0;
    for (index_t h = 0; h < cache.view().num_kv_heads(); ++h)
      for (index_t s = 0; s < cache.view().num_tokens(); ++s) {
        const position_t position = reference_cache.positions[at(h)][at(s)];
        const auto& [keys, values] = seen_.at(position);
        const bool same = same_row(cache.key(h, s), keys[at(h)]) && same_row(cache.value(h, s), values[at(h)]);
        wrong += cache.view().position(h, s) != position || !same ? 1 : 0;
      }
    REQUIRE(wrong == 0);
  }

 private:
  static constexpr bool one_set = CacheT::View::granularity == Granularity::per_layer;

  reference::Scores compare_scores(const ScoreMatrix& scores) {
    reference::Scores expected = reference.scores(reference_cache);
    const Range open = reference.candidates(reference_cache);
    // Each logit is a rotated dot product in float: a few units in the last place of |q||k|; the weights inherit it relatively.
    tolerance_ = (4 * 0x1p-24 * expected.logit_bound + 1e-6) * expected.largest;
    clear_ = expected.margin > 3e-7;
    report.unclear += clear_ ? 0 : 1;
    double worst = 0;
    index_t nan_mismatches = 0;
    for (index_t h = 0; h < scores.heads; ++h)
      for (std::int64_t j = open.first; j < open.last; ++j) {
        const double got = static_cast<double>(scores.row(h)[at(j)]);
        const double want = expected.of_head[at(h)][at(j)];
        nan_mismatches += std::isnan(got) != std::isnan(want) ? 1 : 0;
        if (!std::isnan(got) && !std::isnan(want)) worst = std::max(worst, std::abs(got - want));
      }
    CAPTURE(worst, tolerance_, expected.largest, cache.view().num_tokens());
    REQUIRE(nan_mismatches == 0);
    if (clear_) REQUIRE(worst <= tolerance_);
    if (clear_ && tolerance_ > 0) report.worst = std::max(report.worst, worst / tolerance_);
    if (one_set) {
      reference::Row shared(expected.of_head.front().size());
      for (std::size_t j = 0; j < shared.size(); ++j) {
        reference::Row column;
        for (const reference::Row& row : expected.of_head) column.push_back(row[j]);
        const bool bad = std::any_of(column.begin(), column.end(), [](double x) { return std::isnan(x); });
        shared[j] = bad ? reference::nan : reference::reduce(column, shared_reduce);
      }
      expected.of_head.assign(expected.of_head.size(), shared);
    }
    return expected;
  }

  /// The plan is exactly what the slow selection makes of the library's own scores, and what it makes of the reference's scores
  /// unless that hangs on rounding errors. Returns the kept slots of every head.
  std::vector<std::vector<slot_t>> compare_plan(const KeepPlan& plan, const KeepPlan& separate, const ScoreMatrix& scores,
                                                const reference::Scores& expected, index_t target) {
    const index_t n = cache.view().num_tokens();
    if (one_set) REQUIRE(plan.sets() == 1);
    if (!one_set && !plan.keeps_all()) REQUIRE(plan.sets() == cache.view().num_kv_heads());
    std::vector<std::vector<slot_t>> all;
    for (index_t h = 0; h < cache.view().num_kv_heads(); ++h) {
      const std::vector<slot_t> kept = slots_of(plan.kept(h));
      all.push_back(kept);
      if (!plan.keeps_all()) REQUIRE(kept == slots_of(separate.kept(h)));
      std::vector<slot_t> open;
      for (slot_t s = 0; s < static_cast<slot_t>(n); ++s)
        if (!reference.is_protected(reference_cache, at(h), s)) open.push_back(s);
      const index_t wanted = std::max<index_t>(0, target - (n - static_cast<index_t>(open.size())));
      std::vector<float> own;
      reference::Row theirs;
      for (const slot_t s : open) {
        own.push_back(scores.row(one_set ? 0 : h)[at(s)]);
        theirs.push_back(expected.of_head[at(h)][at(s)]);
      }
      std::vector<slot_t> best;
      for (const slot_t i : reference::top_k(own, wanted)) best.push_back(open[at(i)]);
      std::vector<slot_t> want;
      for (slot_t s = 0; s < static_cast<slot_t>(n); ++s)
        if (!std::binary_search(open.begin(), open.end(), s) || std::binary_search(best.begin(), best.end(), s))
          want.push_back(s);
      REQUIRE(kept == want);
      if (!plan.keeps_all()) compare_kept_scores(plan, h, open, scores);
      compare_with_exact_choice(theirs, own, wanted);
    }
    return all;
  }

  void compare_kept_scores(const KeepPlan& plan, index_t head, const std::vector<slot_t>& open,
                           const ScoreMatrix& scores) const {
    index_t wrong = 0;
    for (std::size_t i = 0; i < plan.kept(head).size(); ++i) {
      const slot_t s = plan.kept(head)[i];
      const bool candidate = std::binary_search(open.begin(), open.end(), s);
      const float want = candidate ? scores.row(one_set ? 0 : head)[at(s)] : 0.0F;
      wrong += std::bit_cast<std::uint32_t>(plan.kept_scores(head)[i]) != std::bit_cast<std::uint32_t>(want) ? 1 : 0;
    }
    REQUIRE(wrong == 0);
  }

  void compare_with_exact_choice(const reference::Row& exact, const std::vector<float>& own, index_t wanted) {
    if (!clear_ || wanted <= 0 || wanted >= static_cast<index_t>(exact.size())) return;
    const auto low = [](double x) { return std::isnan(x) ? -reference::infinity : x; };
    reference::Row sorted;
    for (const double x : exact) sorted.push_back(low(x));
    std::sort(sorted.rbegin(), sorted.rend());
    const double last = sorted[at(wanted - 1)];
    if (last - sorted[at(wanted)] <= 2 * tolerance_) {
      report.ambiguous +=
          last > sorted[at(wanted)] ? 1 : 0;  // exact ties, as a max pool makes them, are nobody's rounding error
      return;
    }
    index_t wrong = 0;
    for (const slot_t i : reference::top_k(own, wanted)) wrong += low(exact[at(i)]) < last ? 1 : 0;
    REQUIRE(wrong == 0);
  }

  /// The beacons of each head are the reference's. Where its own sampling hung on less than rounding errors, it takes over the
  /// library's.
  template <class P>
  void compare_beacons_of(const P& p) {
    if constexpr (requires { p.observer().pool_size(); }) {
      if (reference.settings().n_beacon.value_or(0) == 0) return;
      std::vector<reference::ContinualSampling>& all = reference.beacons();
      for (std::size_t h = 0; h < all.size(); ++h) {
        const auto head = static_cast<index_t>(h);
        const std::vector<position_t> tags = pool_positions(p.observer(), head);
        if (all[h].gap < reference::infinity) ++report.samplings;
        if (tags != all[h].tags) {
          CAPTURE(h, tags, all[h].tags, all[h].gap);
          REQUIRE(all[h].gap < 1e-6);
          REQUIRE(tags.size() == all[h].tags.size());
          ++report.ambiguous;
          all[h].tags = tags;
          all[h].rows.clear();
          for (index_t r = 0; r < p.observer().pool_size(); ++r)
            all[h].rows.push_back(reference::row_of(p.observer().pool_row(head, r), p.shape().head_dim));
        }
        all[h].gap = reference::infinity;
      }
    }
  }
  void compare_beacons() { compare_beacons_of(policy); }

  /// `score` looks with the beacons that the next commit will leave: those of a copy that commits now.
  void sync_beacons_with_next_commit() {
    if constexpr (requires { policy.observer().pool_size(); }) {
      PolicyT probe = policy;
      KeepPlan all;
      std::vector<slot_t> slots(at(cache.view().num_tokens()));
      std::iota(slots.begin(), slots.end(), slot_t{0});
      const std::span<const slot_t> sets[] = {slots};
      require_ok(all.assign(cache.view(), sets));
      require_ok(probe.commit(all));
      if (reference.settings().n_beacon.value_or(0) > 0)
        for (reference::ContinualSampling& b : reference.beacons()) b.reduce();
      compare_beacons_of(probe);
    }
  }

  std::map<position_t, std::pair<reference::Matrix, reference::Matrix>> seen_{};
  double tolerance_ = 0;  // of the scores compared last
  bool clear_ = true;     // the reference's scores hang on no cosine at R-KV's threshold
};

/// Makes one number of some rows of `rows` NaN or infinite.
inline void poison(std::vector<float>& rows, index_t dim, double share, Random& random) {
  constexpr float bad[] = {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                           -std::numeric_limits<float>::infinity()};
  for (index_t r = 0; r < static_cast<index_t>(rows.size()) / dim; ++r)
    if (random.unit() < share) rows[at(r * dim + random.integer(0, dim - 1))] = bad[random.integer(0, 2)];
}

/// A whole sequence of `policy` beside the reference, in one kind of cache.
template <StorageType K, Granularity G, class PolicyT>
RunReport run_in(const RunPlan& plan, PolicyT policy, reference::PolicySettings settings, Random& random) {
  settings.ranges = plan.protect;
  for (const Range& r : plan.protect) require_ok(policy.protect(r));
  Stream stream(random, plan.shape, plan.rope);
  Duo duo(policy, TestCache<K, K, G>(plan.shape, plan.prompt + plan.decode, plan.layout), settings, plan.prompt);
  duo.rotated_input = plan.rotated;
  const auto next = [&](position_t p) {
    Token token = stream.next(p);
    if (plan.poison == 0) return token;
    poison(token.keys, plan.shape.head_dim, plan.poison, random);
    poison(token.queries, plan.shape.head_dim, plan.poison, random);
    return token;
  };
  position_t position = 0;
  while (position < plan.prompt) {
    std::vector<Token> chunk;
    for (index_t i = 0; i < (plan.chunk > 0 ? plan.chunk : plan.prompt) && position < plan.prompt; ++i)
      chunk.push_back(next(position++));
    duo.prefill(chunk, plan.shape, plan.head_major);
  }
  if (plan.prompt > 0) duo.evict_if_due();
  for (index_t i = 0; i < plan.decode; ++i) {
    duo.decode(next(position++), plan.shape);
    duo.evict_if_due();
    const index_t open = duo.reference.candidates(duo.reference_cache).size();
    if (plan.at_any_time && open > 0 && random.integer(0, 10) == 0) duo.evict(random.integer(1, open));
  }
  return duo.report;
}

/// The run in one of six kinds of cache: three storage types, heads that keep sets of their own or one.
template <class PolicyT>
RunReport run_kind(index_t kind, const RunPlan& plan, const PolicyT& policy, const reference::PolicySettings& settings,
                   Random& random) {
  switch (kind % 6) {
    case 0:
      return run_in<float, Granularity::per_head>(plan, policy, settings, random);
    case 1:
      return run_in<float16, Granularity::per_layer>(plan, policy, settings, random);
    case 2:
      return run_in<bfloat16, Granularity::per_head>(plan, policy, settings, random);
    case 3:
      return run_in<float, Granularity::per_layer>(plan, policy, settings, random);
    case 4:
      return run_in<float16, Granularity::per_head>(plan, policy, settings, random);
    default:
      return run_in<bfloat16, Granularity::per_layer>(plan, policy, settings, random);
  }
}

/// The `i`-th of a set of shapes, RoPEs, layouts and inputs in which every one comes with many of the others: head groups 1, 2,
/// 4 and 7, dimensions 16 to 128.
[[nodiscard]] inline RunPlan varied_plan(index_t i, bool pre_rope = true) {
  constexpr index_t groups[] = {1, 2, 4, 7};
  constexpr index_t dims[] = {16, 128, 32, 64, 80};
  const index_t group = groups[i % 4];
  const index_t kv_heads = group == 7 ? 1 : 1 + i % 3;
  const index_t dim = dims[i % 5];
  RunPlan plan{.shape = {.query_heads = group * kv_heads, .kv_heads = kv_heads, .head_dim = dim},
               .rope = make_rope(dim),
               .layout = all_layouts[at(i / 2) % all_layouts.size()]};
  if (i % 5 == 1) plan.rope = make_rope(dim, RopeLayout::interleaved, dim / 2, 500000);
  if (i % 5 == 3) plan.rope = make_rope_with_factor(dim, 1.3);
  plan.prompt = 17 + i;
  plan.decode = 110;
  plan.rotated = !pre_rope || i % 3 == 1;
  plan.head_major = i % 2 == 1;
  return plan;
}

/// A test of every bad set of options: `make` refuses it with these words, and the constructor throws the same.
template <class PolicyT, class OptionsT, class RopeT>
void require_refused_options(const char* what, const Shape& shape, const OptionsT& options, const RopeT& rope, StatusCode code,
                             std::initializer_list<const char*> parts) {
  INFO(what);
  const Status status = PolicyT::make(shape, options, rope).status();
  check_error(status, code, parts);
  std::string thrown = "nothing was thrown";
  StatusCode thrown_code = StatusCode::ok;
  try {
    const PolicyT policy(shape, options, rope);
  } catch (const Error& error) {
    thrown = error.what();
    thrown_code = error.code();
  }
  REQUIRE(thrown == status.message());
  REQUIRE(static_cast<int>(thrown_code) == static_cast<int>(code));
}

/// Everything that `policy` answers about `cache`, bit for bit: two equal answers are two policies in the same state.
template <class PolicyT, class CacheT>
[[nodiscard]] std::vector<std::uint64_t> answers_of(const PolicyT& policy, const CacheT& cache, Workspace& work) {
  const index_t n = cache.view().num_tokens();
  const index_t heads = cache.view().num_kv_heads();
  std::vector<std::uint64_t> out{static_cast<std::uint64_t>(policy.next_position()),
                                 static_cast<std::uint64_t>(policy.prefix()), policy.state_bytes(),
                                 policy.due(cache.view()) ? 1U : 0U};
  std::vector<float> flat(at(heads * n), 0.0F);
  out.push_back(
      static_cast<std::uint64_t>(require_value(policy.score(cache.view(), {flat.data(), heads, n}, work)).num_non_finite));
  for (const float x : flat) out.push_back(std::bit_cast<std::uint32_t>(x));
  KeepPlan plan;
  for (index_t count = 0; count <= n; count += 5) {
    require_ok(policy.plan_free(cache.view(), count, work, plan));
    out.push_back(static_cast<std::uint64_t>(plan.shortfall()));
    for (index_t h = 0; h < plan.sets(); ++h)
      for (const slot_t s : plan.kept(h)) out.push_back(static_cast<std::uint64_t>(s));
  }
  return out;
}

}  // namespace beaconkv::test
