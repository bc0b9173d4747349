// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

// BeaconKV beyond the paper: orphan credit and value norm, against plain loops in double.

#include <algorithm>
#include <cmath>
#include <deque>
#include <optional>
#include <vector>

#include "support/catch.hpp"
#include "support/counting_allocator.hpp"
#include "support/instruction_sets.hpp"
#include "support/policies.hpp"
#include "support/sequence_run.hpp"
#include "support/workers.hpp"

namespace {

using namespace beaconkv;
using namespace beaconkv::test;
using reference::Matrix;
using reference::Row;

/// A case: a shape, what is scored how, and what it is fed with.
struct Case {
  RunPlan plan{};
  index_t n_beacon = 4;
  index_t n_recent = 3;
  double gamma = 0.95;
  bool value_norm = false;
  Pool pool{};
  SoftmaxDomain domain = SoftmaxDomain::all_visible;
  double softcap = 0;
  index_t budget_max = 40;
  index_t budget_min = 32;
  index_t n_recent_kv = 5;
};

[[nodiscard]] BeaconKVOptions<> options_of(const Case& c) {
  BeaconKVOptions<> o{.budget = {.max = c.budget_max, .min = c.budget_min},
                      .n_beacon = c.n_beacon,
                      .n_recent_queries = c.n_recent,
                      .n_recent_kv = c.n_recent_kv,
                      .softmax_domain = c.domain,
                      .pool = c.pool,
                      .orphan_credit = static_cast<float>(c.gamma),
                      .value_norm = c.value_norm};
  if (c.softcap > 0) o.logit_softcap = static_cast<float>(c.softcap);
  return o;
}

/// RESEARCH's rule from its words: each cached key has a credit, and the query head and position of the beacon that gave it.
class CreditReference {
 public:
  struct Key {
    position_t position = 0;
    Row key{};
    Row value{};
    double credit = 0;
    bool owned = false;
    std::size_t owner_head = 0;
    position_t owner = 0;
    bool unclear = false;  ///< whose credit it is hung on less than rounding errors
  };
  struct Scored {
    double score = 0;
    Key after{};  ///< if it stays
  };

  explicit CreditReference(const Case& c)
      : c_(c),
        banks_(at(c.plan.shape.query_heads),
               reference::ContinualSampling{.n_min = at(c.n_beacon), .n_max = at(c.n_beacon + c.n_recent)}),
        rings_(banks_.size()),
        keys_(at(c.plan.shape.kv_heads)) {}

  [[nodiscard]] std::vector<reference::ContinualSampling>& banks() { return banks_; }
  [[nodiscard]] const std::vector<Key>& keys(std::size_t head) const { return keys_[head]; }

  void append(position_t position, const Matrix& keys, const Matrix& values) {
    for (std::size_t h = 0; h < keys_.size(); ++h) keys_[h].push_back({position, keys[h], values[h]});
  }
  void prefill(const std::vector<Matrix>& queries) {  // [query head][token]
    for (std::size_t g = 0; g < banks_.size(); ++g) banks_[g].prefill(queries[g], 0);
    prompt_ = static_cast<index_t>(queries.front().size());
    now_ = prompt_ - 1;
  }
  void observe(const Matrix& queries, position_t position) {
    for (std::size_t g = 0; g < banks_.size(); ++g) {
      if (static_cast<index_t>(rings_[g].size()) == c_.n_recent) {
        banks_[g].push(rings_[g].front().second, rings_[g].front().first);
        rings_[g].pop_front();
      }
      rings_[g].emplace_back(position, queries[g]);
    }
    now_ = position;
  }
  void reduce_banks() {
    for (auto& b : banks_) b.reduce();
  }

  /// Of one KV head, with banks as they stand.
  [[nodiscard]] std::vector<Scored> score(std::size_t head) const {
    const std::vector<Key>& keys = keys_[head];
    const auto group = at(c_.plan.shape.group());
    const auto n = static_cast<index_t>(keys.size());
    const Range open{prompt_, std::max(prompt_, n - c_.n_recent_kv)};
    const Range domain = c_.domain == SoftmaxDomain::all_visible ? Range{0, n} : open;
    std::vector<Scored> out(keys.size());
    Row second(keys.size(), 0.0);
    for (std::size_t j = 0; j < keys.size(); ++j) out[j].after = keys[j];
    Row ring(keys.size(), 0.0);
    Row beacon(keys.size(), -1.0);
    std::vector<std::pair<std::size_t, position_t>> by(keys.size());
    for (std::size_t g = head * group; g < (head + 1) * group; ++g) {
      for (std::size_t i = 0; i < banks_[g].rows.size(); ++i) {
        const Row w = weights(c_.plan.rope.reference.at(banks_[g].rows[i], now_), now_, keys, domain);
        for (std::size_t j = 0; j < w.size(); ++j) {
          if (w[j] > beacon[j]) {
            second[j] = std::max(second[j], beacon[j]);
            beacon[j] = w[j];
            by[j] = {g, banks_[g].tags[i]};
          } else {
            second[j] = std::max(second[j], w[j]);
          }
        }
      }
      for (const auto& [position, row] : rings_[g]) {
        const Row w = weights(c_.plan.rope.reference.at(row, position), position, keys, domain);
        for (std::size_t j = 0; j < w.size(); ++j) ring[j] = std::max(ring[j], w[j]);
      }
    }
    Row scores(keys.size());
    for (std::size_t j = 0; j < keys.size(); ++j) {
      Key& key = out[j].after;
      const double b = std::max(beacon[j], 0.0);
      const bool alive = key.owned && is_beacon(key.owner_head, key.owner);
      const double carried = key.owned && !alive ? c_.gamma * key.credit : 0.0;
      if (b >= carried) {
        key.owned = true;
        key.owner_head = by[j].first;
        key.owner = by[j].second;
      }
      const double most = std::max(b, carried);
      const bool hangs = most > 1e-7 && (std::abs(b - carried) < 1e-4 * most || (b >= carried && b - second[j] < 1e-4 * b));
      key.unclear = hangs || (key.unclear && b < carried * 1.0001);
      if (key.unclear && !hangs && b >= carried) key.unclear = false;
      key.credit = most;
      scores[j] = std::max(ring[j], most);
    }
    Row pooled(scores.begin() + open.first, scores.begin() + open.last);
    pooled = reference::pool(pooled, c_.pool);
    std::copy(pooled.begin(), pooled.end(), scores.begin() + open.first);
    for (std::size_t j = 0; j < keys.size(); ++j) {
      out[j].score = reference::finite(keys[j].key) ? scores[j] : reference::nan;
      if (!c_.value_norm) continue;
      out[j].score = reference::finite(keys[j].value) ? out[j].score * std::sqrt(reference::dot(keys[j].value, keys[j].value))
                                                      : reference::nan;
    }
    return out;
  }

  /// Keeps these slots, with what `score` said of them.
  void keep(std::size_t head, const std::vector<Scored>& scored, std::span<const slot_t> slots) {
    std::vector<Key> kept;
    for (const slot_t s : slots) kept.push_back(scored[at(s)].after);
    keys_[head] = kept;
  }

  /// Keys whose owner is a beacon no more.
  [[nodiscard]] index_t orphans(std::size_t head) const {
    return std::count_if(keys_[head].begin(), keys_[head].end(),
                         [&](const Key& k) { return k.owned && k.credit > 1e-3 && !is_beacon(k.owner_head, k.owner); });
  }

 private:
  [[nodiscard]] bool is_beacon(std::size_t head, position_t tag) const {
    return std::find(banks_[head].tags.begin(), banks_[head].tags.end(), tag) != banks_[head].tags.end();
  }
  [[nodiscard]] Row weights(const Row& query, position_t position, const std::vector<Key>& keys, Range domain) const {
    Row logits(keys.size(), -reference::infinity);
    const double scale = 1 / std::sqrt(static_cast<double>(query.size()));
    for (std::size_t j = at(domain.first); j < at(domain.last); ++j) {
      if (!reference::finite(query) || !reference::finite(keys[j].key) || keys[j].position > position) continue;
      logits[j] = reference::dot(query, keys[j].key) * scale;
      if (c_.softcap > 0) logits[j] = c_.softcap * std::tanh(logits[j] / c_.softcap);
    }
    return reference::softmax(logits);
  }

  Case c_;
  std::vector<reference::ContinualSampling> banks_;
  std::vector<std::deque<std::pair<position_t, Row>>> rings_;
  std::vector<std::vector<Key>> keys_;
  index_t prompt_ = 0;
  position_t now_ = -1;
};

/// What runs of cases compared.
struct Seen {
  index_t evictions = 0;
  index_t scores = 0;
  index_t by_credit = 0;  ///< scores that an orphan's credit decided
  index_t unclear = 0;
  index_t ambiguous = 0;  ///< samplings that hung on rounding errors
  double worst = 0;
};

/// The library's banks are the reference's, or it takes them over where its own choice hung on rounding errors.
void compare_banks(const BeaconKV<>& policy, std::vector<reference::ContinualSampling>& banks, Seen& seen) {
  for (std::size_t g = 0; g < banks.size(); ++g) {
    const BeaconQueries& got = policy.observer();
    const std::vector<position_t> tags = pool_positions(got, static_cast<index_t>(g));
    if (tags != banks[g].tags) {
      CAPTURE(g, tags, banks[g].tags);
      REQUIRE(banks[g].gap < 1e-6);
      ++seen.ambiguous;
      banks[g].tags = tags;
      banks[g].rows.clear();
      for (index_t r = 0; r < got.pool_size(); ++r)
        banks[g].rows.push_back(reference::row_of(got.pool_row(static_cast<index_t>(g), r), policy.shape().head_dim));
    }
    banks[g].gap = reference::infinity;
  }
}

template <StorageType K, StorageType V, Granularity G>
void run_case(const Case& c, Random& random, Seen& seen) {
  const Shape& shape = c.plan.shape;
  BeaconKV<> policy(shape, options_of(c), RopeTable(c.plan.rope.options));
  TestCache<K, V, G> cache(shape, c.plan.prompt + c.budget_max + 8, c.plan.layout);
  Workspace work(policy.workspace_size(c.plan.prompt + c.budget_max + 8));
  CreditReference ref(c);
  Stream stream(random, shape, c.plan.rope);
  const auto next = [&](position_t p) {
    Token token = stream.next(p);
    poison(token.keys, shape.head_dim, c.plan.poison, random);
    poison(token.values, shape.head_dim, c.plan.poison / 2, random);
    poison(token.queries, shape.head_dim, c.plan.poison, random);
    return token;
  };
  const auto append = [&](const Token& token) {
    const index_t slot = cache.view().num_tokens();
    cache.append(token);
    Matrix keys, values;
    for (index_t h = 0; h < shape.kv_heads; ++h) {
      keys.push_back(cache.key(h, slot));
      values.push_back(cache.value(h, slot));
    }
    ref.append(token.position, keys, values);
  };

  std::vector<float> prompt;
  std::vector<Matrix> rows(at(shape.query_heads));
  for (position_t p = 0; p < c.plan.prompt; ++p) {
    const Token token = next(p);
    append(token);
    prompt.insert(prompt.end(), token.queries.begin(), token.queries.end());
    const Matrix of_token = rows_of(token.queries, shape.head_dim);
    for (std::size_t g = 0; g < rows.size(); ++g) rows[g].push_back(of_token[g]);
  }
  require_ok(policy.prefill(QueryView::token_major(prompt.data(), c.plan.prompt, shape.query_heads, shape.head_dim), work));
  ref.prefill(rows);
  compare_banks(policy, ref.banks(), seen);

  KeepPlan plan;
  for (position_t p = c.plan.prompt; p < c.plan.prompt + c.plan.decode; ++p) {
    const Token token = next(p);
    append(token);
    require_ok(policy.observe(token.queries, p));
    ref.observe(rows_of(token.queries, shape.head_dim), p);
    compare_banks(policy, ref.banks(), seen);
    const bool early = c.plan.at_any_time && random.integer(0, 12) == 0;
    if (!policy.due(cache.view()) && !early) continue;

    const index_t n = cache.view().num_tokens();
    std::vector<float> flat(at(shape.kv_heads * n));
    const ScoreMatrix scores{flat.data(), shape.kv_heads, n};
    {  // what the bank will be, and that looking twice leaves no trace
      auto probe = policy;
      require_value(probe.score(cache.view(), scores, work));
      require_value(probe.score(cache.view(), scores, work));
      KeepPlan all;
      std::vector<slot_t> slots(at(n));
      for (index_t j = 0; j < n; ++j) slots[at(j)] = static_cast<slot_t>(j);
      const std::span<const slot_t> sets[] = {slots};
      require_ok(all.assign(cache.view(), sets));
      require_ok(probe.commit(all));
      ref.reduce_banks();
      compare_banks(probe, ref.banks(), seen);
    }
    const Range open = policy.candidates_of(cache.view(), 0);
    std::vector<std::vector<CreditReference::Scored>> want;
    for (std::size_t h = 0; h < at(shape.kv_heads); ++h) {
      want.push_back(ref.score(h));
      double largest = 0;
      for (const auto& s : want[h]) largest = std::max(largest, std::isnan(s.score) ? 0.0 : s.score);
      for (std::int64_t j = open.first; j < open.last; ++j) {
        const auto& s = want[h][at(j)];
        const float got = scores.row(static_cast<index_t>(h))[at(j)];
        CAPTURE(p, h, j, s.score, got, largest);
        if (s.after.unclear) {
          ++seen.unclear;
          continue;
        }
        REQUIRE(std::isnan(got) == std::isnan(s.score));
        ++seen.scores;
        if (std::isnan(got)) continue;
        const double off = std::abs(static_cast<double>(got) - s.score);
        seen.worst = std::max(seen.worst, off / largest);
        REQUIRE(off <= 2e-5 * largest);
      }
      seen.by_credit += ref.orphans(h);
    }
    if (early)
      require_ok(policy.plan_free(cache.view(), std::min<index_t>(3, open.size()), work, plan));
    else
      require_ok(policy.plan(cache.view(), work, plan));
    for (index_t h = 0; h < plan.sets() && G == Granularity::per_head; ++h) {  // the best by the library's own scores
      const std::span<const float> row = scores.row(h).subspan(at(open.first), at(open.size()));
      std::vector<slot_t> kept;
      for (const slot_t s : plan.kept(h))
        if (s >= open.first && s < open.last) kept.push_back(s - static_cast<slot_t>(open.first));
      REQUIRE(kept == reference::top_k(row, static_cast<index_t>(kept.size())));
    }
    for (std::size_t h = 0; h < want.size(); ++h) ref.keep(h, want[h], plan.kept(static_cast<index_t>(h)));
    require_ok(compact(cache.view(), plan));
    require_ok(policy.commit(plan));
    compare_banks(policy, ref.banks(), seen);
    ++seen.evictions;
  }
}

void require_sound(const Seen& seen) {
  CAPTURE(seen.evictions, seen.scores, seen.by_credit, seen.unclear, seen.ambiguous, seen.worst);
  REQUIRE(seen.evictions > 10);
  REQUIRE(seen.unclear * 20 < seen.scores);
  REQUIRE(seen.ambiguous < 10);
  REQUIRE(seen.by_credit > 20);
}

}  // namespace

TEST_CASE("Orphan credit scores as plain loops do, over many evictions", "[orphan_credit]") {
  Random random;
  CAPTURE(random.seed());
  constexpr index_t beacons[] = {4, 1, 24, 28, 7, 16};
  constexpr index_t recent[] = {3, 4, 8, 4, 9, 16};
  constexpr double gammas[] = {0.95, 1.0, 0.5};
  Seen seen;
  for (index_t i = 0; i < 18; ++i) {
    Case c{.plan = varied_plan(i), .n_beacon = beacons[i % 6], .n_recent = recent[i % 6], .gamma = gammas[i % 3]};
    c.plan.decode = 90;
    c.value_norm = i % 2 == 1;
    c.plan.at_any_time = i % 3 == 2;
    if (i % 7 == 3) c.pool = {PoolKind::average, 5};
    if (i % 5 == 4) c.domain = SoftmaxDomain::candidates_only;
    if (i % 6 == 5) c.softcap = 3;
    CAPTURE(i, c.n_beacon, c.n_recent, c.gamma, c.plan.shape.query_heads, c.plan.shape.kv_heads, c.plan.shape.head_dim);
    if (i % 3 == 0) run_case<float, float, Granularity::per_head>(c, random, seen);
    if (i % 3 == 1) run_case<float16, bfloat16, Granularity::per_head>(c, random, seen);
    if (i % 3 == 2) run_case<float, float16, Granularity::per_layer>(c, random, seen);
  }
  require_sound(seen);
}

TEST_CASE("Keys, values and queries that are not finite leave every credit right", "[orphan_credit]") {
  Random random;
  CAPTURE(random.seed());
  Seen seen;
  for (const double share : {0.02, 0.1, 0.4})
    for (const bool norm : {false, true}) {
      Case c{.plan = varied_plan(5), .value_norm = norm};
      c.plan.decode = 150;
      c.plan.poison = share;
      CAPTURE(share, norm);
      run_case<float, float, Granularity::per_head>(c, random, seen);
    }
  CAPTURE(seen.evictions, seen.scores, seen.unclear, seen.worst);
  REQUIRE(seen.evictions > 50);
  REQUIRE(seen.unclear * 10 < seen.scores);
}

namespace {

[[nodiscard]] std::vector<std::uint32_t> bits_of_scores(const std::vector<float>& all) {
  std::vector<std::uint32_t> out;
  for (const float x : all) out.push_back(std::bit_cast<std::uint32_t>(x));
  return out;
}

/// A policy with credit over four KV heads, which scores head by head.
[[nodiscard]] BeaconKV<> wide_policy() {
  BeaconKVOptions<> o =
      BeaconKVOptions<>::with_orphan_credit({.max = small_budget + 8, .min = small_budget, .counts_prefix = true}, 6, 3);
  o.n_recent_kv = 4;
  o.n_prefix = 2;
  return BeaconKV<>({.query_heads = 8, .kv_heads = 4, .head_dim = 16}, o, small_rope());
}
constexpr Shape wide_shape{.query_heads = 8, .kv_heads = 4, .head_dim = 16};

/// All that a policy remembers.
template <class PolicyT>
[[nodiscard]] Bytes memory_of(const PolicyT& policy) {
  Bytes out;
  policy.save(out);
  return out;
}

}  // namespace

TEST_CASE("Without orphan credit and value norm the scores are the published ones to the bit", "[orphan_credit]") {
  Random random;
  CAPTURE(random.seed());
  for (index_t i = 0; i < 6; ++i) {
    const RunPlan plan = varied_plan(i);
    const BeaconKVOptions<> o{.budget = {.max = 40, .min = 32}, .n_beacon = 5, .n_recent_queries = 4, .n_recent_kv = 6};
    const RopeTable rope(plan.rope.options);
    BeaconKV<> off(plan.shape, o, rope);
    auto published =
        require_value(BeaconKV<AttentionScorer>::make(plan.shape, o, rope, BeaconKV<>::scorer_of(o).options().attention));
    REQUIRE_FALSE(off.scorer().takes_notes());
    REQUIRE(off.state_bytes() == published.state_bytes());
    REQUIRE((off.workspace_size(64) == published.workspace_size(64)));
    TestCache<> a(plan.shape, 64), b(plan.shape, 64);
    Workspace work(off.workspace_size(64));
    Stream stream(random, plan.shape, plan.rope);
    for (index_t t = 0; t < 150; ++t) {
      const Token token = stream.next(t);
      feed(off, a, token);
      feed(published, b, token);
      REQUIRE(off.due(a.view()) == published.due(b.view()));
      if (!off.due(a.view())) continue;
      const index_t n = a.view().num_tokens();
      std::vector<float> x(at(plan.shape.kv_heads * n)), y(x.size());
      require_value(off.score(a.view(), {x.data(), plan.shape.kv_heads, n}, work));
      require_value(published.score(b.view(), {y.data(), plan.shape.kv_heads, n}, work));
      REQUIRE(bits_of_scores(x) == bits_of_scores(y));
      require_value(evict(off, a.view(), work));
      require_value(evict(published, b.view(), work));
    }
    REQUIRE(a.state().positions == b.state().positions);
  }
}

TEST_CASE("Rows of two kinds: maxima apart, and the lowest row that reaches one, under each instruction set",
          "[orphan_credit]") {
  Random random;
  CAPTURE(random.seed());
  for (const index_t group : {1, 2, 3, 7})
    for (const auto& [rows, leading] : {std::pair<index_t, index_t>{1, 0},
                                        {1, 1},
                                        {5, 3},
                                        {16, 8},
                                        {17, 16},
                                        {32, 24},
                                        {32, 28},
                                        {33, 1},
                                        {17, 17},
                                        {33, 33}})
      for (const index_t keys : {1, 2, 3, 5, 97, 131}) {
        constexpr index_t dim = 16;
        CAPTURE(group, rows, leading, keys);
        std::vector<float> q = random.normals(group * rows * dim);
        std::vector<float> k = random.normals(keys * dim);
        std::copy_n(q.begin(), dim, q.begin() + (group * rows - 1) * dim);  // a row twice: the lower one reaches it
        if (keys > 4) k[at(3 * dim + 2)] = reference::nan;
        std::vector<slot_t> visible;
        for (index_t r = 0; r < group * rows; ++r) visible.push_back(static_cast<slot_t>(random.integer(0, keys)));
        visible.back() = visible.front();
        const AttentionQueries queries{q.data(), group, rows, dim, visible, {}};
        const auto read = [&](index_t first, index_t count, float*) {
          return ConstRows{k.data() + first * dim, count, dim, dim};
        };

        Row a(at(keys), 0.0), b(at(keys), 0.0);
        std::vector<Row> weights;
        for (index_t r = 0; r < group * rows; ++r) {
          Row z(at(keys), -reference::infinity);
          const Row row = reference::row_of(q.data() + r * dim, dim);
          for (index_t j = 0; j < visible[at(r)]; ++j) {
            const Row key = reference::row_of(k.data() + j * dim, dim);
            if (reference::finite(key)) z[at(j)] = reference::dot(row, key) / 4;
          }
          weights.push_back(reference::softmax(z));
          Row& kind = r % rows < leading ? a : b;
          for (std::size_t j = 0; j < kind.size(); ++j) kind[j] = std::max(kind[j], weights.back()[j]);
        }

        std::vector<std::vector<std::uint32_t>> bits;
        for (const InstructionSet set : supported_sets()) {
          const ForcedSet forced(set);
          std::vector<float> got_a(at(keys)), got_b(at(keys)), whole(at(keys));
          std::vector<slot_t> row(at(keys));
          std::vector<std::uint8_t> bad(at(keys));
          Workspace work(split_attention_workspace_size(group, rows, dim, keys));
          const ScoreReport report =
              require_value(split_attention_scores(read, queries, leading, {0, keys}, {}, {got_a, row, got_b, bad}, work));
          REQUIRE(report.num_non_finite == (keys > 4 ? 1 : 0));
          require_value(attention_scores(read, queries, {0, keys}, {0, keys}, {}, whole, work));
          for (std::size_t j = 0; j < at(keys); ++j) {
            CAPTURE(j);
            REQUIRE(std::abs(static_cast<double>(got_a[j]) - a[j]) < 3e-6);
            REQUIRE(std::abs(static_cast<double>(got_b[j]) - b[j]) < 3e-6);
            REQUIRE((bad[j] != 0) == (keys > 4 && j == 3));
            if (bad[j] == 0) REQUIRE(std::max(got_a[j], got_b[j]) == Approx(whole[j]).epsilon(1e-6));
            if (a[j] < 1e-6) continue;
            const auto by = static_cast<std::size_t>(row[j]);
            REQUIRE(row[j] % rows < leading);
            REQUIRE(weights[by][j] > a[j] * (1 - 1e-5));
            if (leading == rows) REQUIRE(row[j] != group * rows - (group * rows > 1 ? 1 : 0));
          }
          if (set == InstructionSet::baseline) continue;
          bits.push_back(bits_of_scores(got_a));
          bits.push_back(bits_of_scores(got_b));
          for (const slot_t r : row) bits.back().push_back(static_cast<std::uint32_t>(r));
        }
        for (std::size_t i = 2; i < bits.size(); ++i) REQUIRE(bits[i] == bits[i % 2]);
      }
}

TEST_CASE("Rows apart: what cannot work is refused by name", "[orphan_credit]") {
  const std::vector<float> q(32), k(32);
  const std::vector<slot_t> visible{2, 2};
  const AttentionQueries queries{q.data(), 1, 2, 16, visible, {}};
  const auto read = [&](index_t first, index_t count, float*) { return ConstRows{k.data() + first * 16, count, 16, 16}; };
  std::vector<float> a(2), b(2);
  std::vector<slot_t> row(2);
  std::vector<std::uint8_t> bad(2);
  Workspace work(split_attention_workspace_size(1, 2, 16, 2));
  const auto status = [&](index_t leading, const AttentionOptions& o, const SplitScores& out, Workspace& w) {
    return split_attention_scores(read, queries, leading, {0, 2}, o, out, w).status();
  };
  const SplitScores out{a, row, b, bad};
  check_error(status(3, {}, out, work), StatusCode::invalid_argument, {"leading = 3", "queries.rows = 2"});
  check_error(status(-1, {}, out, work), StatusCode::invalid_argument, {"leading = -1"});
  check_error(status(1, {.over_queries = Reduce::mean}, out, work), StatusCode::unsupported, {"maxima"});
  check_error(status(1, {.pool = {PoolKind::max, 3}}, out, work), StatusCode::unsupported, {"pool"});
  check_error(status(1, {}, {a, std::span(row).first(1), b, bad}, work), StatusCode::invalid_argument, {"2 entries"});
  check_error(status(1, {}, {std::span(a).first(1), row, b, bad}, work), StatusCode::invalid_argument, {"the domain has 2"});
  Workspace small({.bytes = 64});
  check_error(status(1, {}, out, small), StatusCode::workspace_too_small, {"64 free bytes"});
  REQUIRE(allocations_of([&] { static_cast<void>(status(1, {}, out, work)); }) == 0);
}

TEST_CASE("Lengths of rows, at any size and under each instruction set", "[value_norm]") {
  Random random;
  CAPTURE(random.seed());
  for (const index_t dim : {1, 15, 16, 17, 31, 33, 64, 80, 128})
    for (const index_t n : {1, 2, 3, 4, 5, 63, 65}) {
      std::vector<float> rows = random.normals(n * dim);
      const float sizes[] = {1, 1e-20F, 1e-30F, 1e25F, 3e38F, 1e-3F};
      for (index_t i = 0; i < n; ++i)
        for (index_t d = 0; d < dim; ++d) rows[at(i * dim + d)] *= sizes[at(i) % 6] / (sizes[at(i) % 6] > 1e30F ? 8.0F : 1.0F);
      if (n > 4) rows[at(4 * dim - 1)] = reference::infinity;
      std::vector<std::vector<std::uint32_t>> bits;
      for (const InstructionSet set : supported_sets()) {
        const ForcedSet forced(set);
        std::vector<float> got(at(n));
        detail::run<detail::RowLengths>(rows.data(), dim, dim, n, got.data());
        for (index_t i = 0; i < n; ++i) {
          CAPTURE(dim, n, i);
          const Row row = reference::row_of(rows.data() + i * dim, dim);
          if (!reference::finite(row)) {
            REQUIRE(got[at(i)] == detail::not_finite_row);
            continue;
          }
          const double want = std::min(std::sqrt(reference::dot(row, row)), double{std::numeric_limits<float>::max()});
          REQUIRE(std::abs(static_cast<double>(got[at(i)]) - want) <= 1e-6 * want);
        }
        if (set != InstructionSet::baseline) bits.push_back(bits_of_scores(got));
      }
      for (const auto& other : bits) REQUIRE(other == bits[0]);
    }
}

TEST_CASE("Value norm multiplies the final scores of every window policy", "[value_norm]") {
  Random random;
  CAPTURE(random.seed());
  const auto compare = [&](const char* name, auto plain, auto weighed) {
    INFO(name);
    Stream stream = small_stream(random);
    TestCache<float16, bfloat16> cache(small_shape, 64);
    for (index_t t = 0; t < 60; ++t) {
      Token token = stream.next(t);
      if (t == 20) token.values[3] = std::numeric_limits<float>::quiet_NaN();
      if (t == 21) token.values[16] = std::numeric_limits<float>::infinity();
      feed(plain, cache, token);
      require_ok(weighed.observe(token.queries, t));
    }
    Workspace work(weighed.workspace_size(64));
    std::vector<float> a(at(2 * 60)), b(at(2 * 60));
    const ScoreReport of_plain = require_value(plain.score(cache.view(), {a.data(), 2, 60}, work));
    const ScoreReport of_weighed = require_value(weighed.score(cache.view(), {b.data(), 2, 60}, work));
    REQUIRE(of_weighed.num_non_finite == of_plain.num_non_finite + 2);
    const Range open = plain.candidates_of(cache.view(), 0);
    for (index_t h = 0; h < 2; ++h)
      for (index_t j = open.first; j < open.last; ++j) {
        CAPTURE(h, j);
        const Row value = cache.value(h, j);
        if (!reference::finite(value)) {
          REQUIRE(detail::is_nan(b[at(h * 60 + j)]));
          continue;
        }
        const double want = static_cast<double>(a[at(h * 60 + j)]) * std::sqrt(reference::dot(value, value));
        REQUIRE(static_cast<double>(b[at(h * 60 + j)]) == Approx(want).epsilon(1e-5));
      }
  };
  const auto both = [&](const char* name, auto options, auto make) {
    auto weighed = options;
    weighed.value_norm = true;
    compare(name, make(options), make(weighed));
  };
  both("SnapKV", SnapKVOptions<FixedBudget>{.budget = {.max = 40}, .n_recent_kv = 4},
       [](const auto& o) { return SnapKV<AttentionScorer, FixedBudget>(small_shape, o, small_rope()); });
  for (const HeadScope scope : {HeadScope::group, HeadScope::layer})
    both("RPC", RPCOptions<FixedBudget>{.budget = {.max = 40}, .n_recent_kv = 4, .head_scope = scope},
         [](const auto& o) { return RPC<AttentionScorer, FixedBudget>(small_shape, o, small_rope()); });
  both("BeaconKV", BeaconKVOptions<>{.budget = {.max = 40}, .n_recent_kv = 4},
       [](const auto& o) { return BeaconKV<>(small_shape, o, small_rope()); });
  both("BeaconKV, credit", BeaconKVOptions<>{.budget = {.max = 40}, .n_recent_kv = 4, .orphan_credit = 0.9F},
       [](const auto& o) { return BeaconKV<>(small_shape, o, small_rope()); });
}

TEST_CASE("Options of orphan credit that cannot work are refused by name and value", "[orphan_credit]") {
  const Shape shape = small_shape;
  const RopeTable rope = small_rope();
  const BeaconKVOptions<> good{.budget = {.max = 64}, .n_recent_kv = 4, .orphan_credit = 0.95F};
  const auto refused = [&](const char* what, auto change, StatusCode code, std::initializer_list<const char*> parts) {
    BeaconKVOptions<> o = good;
    change(o);
    require_refused_options<BeaconKV<>>(what, shape, o, rope, code, parts);
  };
  require_ok(BeaconKV<>::make(shape, good, rope).status());
  refused("negative", [](auto& o) { o.orphan_credit = -0.5F; }, StatusCode::invalid_argument,
          {"orphan_credit = -0.5", "between 0 and 1"});
  refused("above 1", [](auto& o) { o.orphan_credit = 1.5F; }, StatusCode::invalid_argument, {"orphan_credit = 1.5"});
  refused("NaN", [](auto& o) { o.orphan_credit = std::numeric_limits<float>::quiet_NaN(); }, StatusCode::invalid_argument,
          {"orphan_credit = "});
  refused("share below 0", [](auto& o) { o.key_diff_share = -0.1F; }, StatusCode::invalid_argument, {"key_diff_share = -0.1"});
  refused("share above 1", [](auto& o) { o.key_diff_share = 1.1F; }, StatusCode::invalid_argument, {"key_diff_share = 1.1"});
  refused("mean over queries", [](auto& o) { o.over_queries = Reduce::mean; }, StatusCode::unsupported,
          {"orphan_credit = 0.95", "over_queries = max"});
  refused("mean over heads", [](auto& o) { o.over_heads = Reduce::mean; }, StatusCode::unsupported,
          {"orphan_credit = 0.95", "over_heads = max"});
  refused("no beacons", [](auto& o) { o.n_beacon = 0; }, StatusCode::invalid_argument,
          {"n_beacon = 0", "orphan_credit = 0.95"});
  refused("too many rows", [](auto& o) { o.n_beacon = 40000; }, StatusCode::invalid_argument, {"n_beacon = 40000", "32767"});

  const auto preset = BeaconKVOptions<>::with_orphan_credit({.max = 64, .min = 48});
  REQUIRE(preset.n_beacon == 24);
  REQUIRE(preset.n_recent_queries == 8);
  REQUIRE(preset.orphan_credit == 0.95F);
  REQUIRE(preset.value_norm);
}

TEST_CASE("An eviction with credit is the same by slices, threads, ragged heads, and an engine that moves rows by itself",
          "[orphan_credit]") {
  Random random;
  CAPTURE(random.seed());
  using Ragged = TestCache<float, float, Granularity::per_head_ragged>;
  Stream stream(random, wide_shape, make_rope(16));
  auto plain = wide_policy();
  auto threads = wide_policy();
  auto ragged = wide_policy();
  auto by_hand = wide_policy();
  auto ranks = wide_policy();
  TestCache<> a(wide_shape, 96), b(wide_shape, 96), d(wide_shape, 96), e(wide_shape, 96);
  Ragged c(wide_shape, 96);
  Workspace work(plain.workspace_size(96));
  std::vector<Workspace> works(3, work);
  index_t evictions = 0;
  for (position_t p = 0; p < 200; ++p) {
    const Token token = stream.next(p);
    feed(plain, a, token);
    feed(threads, b, token);
    feed(ragged, c, token);
    feed(by_hand, d, token);
    feed(ranks, e, token);
    if (!plain.due(a.view())) continue;
    ++evictions;
    require_value(evict(plain, a.view(), work));
    require_value(evict(threads, b.view(), std::span(works), Workers{3}));
    require_value(evict(ragged, c.view(), work));
    {
      KeepPlan plan;
      require_ok(by_hand.plan(d.view(), work, plan));
      const auto rows = d;  // the engine's own kernel moves them
      require_ok(follow(d.view(), plan));
      for (index_t h = 0; h < 4; ++h)
        for (index_t i = 0; i < plan.num_kept(h); ++i) {
          const auto floats = [](const Row& row) { return std::vector<float>(row.begin(), row.end()); };
          d.view().store_key(h, i, floats(rows.key(h, plan.kept(h)[at(i)])).data());
          d.view().store_value(h, i, floats(rows.value(h, plan.kept(h)[at(i)])).data());
        }
      require_ok(by_hand.commit(plan));
    }
    {  // scores that leave in between, as for ranks
      const index_t n = e.view().num_tokens();
      std::vector<float> flat(at(4 * n));
      KeepPlan plan;
      require_value(ranks.score(e.view(), {flat.data(), 4, n}, work));
      require_ok(ranks.select(e.view(), {flat.data(), 4, n}, work, plan));
      require_ok(compact(e.view(), plan));
      require_ok(ranks.commit(plan));
    }
    const Bytes want = memory_of(plain);
    REQUIRE((memory_of(threads) == want));
    REQUIRE((memory_of(ragged) == want));
    REQUIRE((memory_of(by_hand) == want));
    REQUIRE((memory_of(ranks) == want));
    REQUIRE(a.state().positions == b.state().positions);
    REQUIRE(a.state().positions == c.state().positions);
    REQUIRE(a.state().positions == d.state().positions);
    REQUIRE(a.state().positions == e.state().positions);
  }
  REQUIRE(evictions > 15);
}

TEST_CASE("Slices with credit: the same bits on any number of threads, in forks in the middle, and after a load",
          "[orphan_credit]") {
  Random random;
  CAPTURE(random.seed());
  const auto make = [&](index_t workers, index_t capacity = 96) {
    return Layers<BeaconKV<>>(wide_policy(), 2, {.capacity = capacity, .sequence = {.workers = workers, .heads_per_step = 1}});
  };
  auto serial = make(1);
  auto two = make(2);
  auto fork = make(1);
  auto smaller = make(1, 64);
  LayerStreams streams(random, 2, wide_shape);
  index_t evictions = 0;
  for (position_t p = 0; p < 190; ++p) {
    const LayerTokens tokens = streams.next(p);
    decode(*serial, tokens);
    decode(*two, tokens);
    const SequenceReport report = evict_due(*serial);
    evictions += report.layers;
    require_value(two->evict_where_due(Workers{2}));
    if (p > 100) {
      decode(*fork, tokens);
      decode(*smaller, tokens);
      static_cast<void>(evict_due(*fork));
      static_cast<void>(evict_due(*smaller));
    }
    if (p >= 80 && p <= 100) {
      REQUIRE(allocations_of([&] {
                require_ok(fork->copy_from(*serial));
                require_ok(smaller->copy_from(*serial));
              }) == 0);
    }
    const Bytes state = state_of(*serial);
    REQUIRE((state_of(*two) == state));
    if (p >= 100) {
      REQUIRE((state_of(*fork) == state));
      REQUIRE((state_of(*smaller) == state));
    }
  }
  REQUIRE(evictions > 20);
}

TEST_CASE("Looking through a const policy notes nothing, and a plan made by hand moves credits with their keys",
          "[orphan_credit]") {
  Random random;
  CAPTURE(random.seed());
  auto policy = small_beaconkv_with_credit();
  TestCache<> cache(small_shape, 96);
  Stream stream = small_stream(random);
  Workspace work(policy.workspace_size(96));
  while (policy.next_position() < 120) {
    feed(policy, cache, stream, 1);
    if (policy.due(cache.view()) && policy.next_position() < 110) require_value(evict(policy, cache.view(), work));
  }
  const index_t n = cache.view().num_tokens();
  std::vector<float> before(at(2 * n));
  require_value(std::as_const(policy).score(cache.view(), {before.data(), 2, n}, work));
  const Bytes memory = memory_of(policy);

  auto noting = policy;
  std::vector<float> same(before.size());
  require_value(noting.score(cache.view(), {same.data(), 2, n}, work));
  REQUIRE(bits_of_scores(same) == bits_of_scores(before));
  REQUIRE((memory_of(noting) == memory));  // not before the commit

  KeepPlan plan;
  std::vector<slot_t> kept;
  for (slot_t s = 0; s < static_cast<slot_t>(n); ++s)
    if (s % 3 != 1 || s < 2) kept.push_back(s);
  const std::span<const slot_t> sets[] = {kept};
  require_ok(plan.assign(cache.view(), sets));
  auto moved = policy;
  require_ok(moved.commit(plan));
  REQUIRE((memory_of(moved) != memory));
  auto twice = moved;  // and a plan that keeps everything changes no credit at all
  require_ok(compact(cache.view(), plan));
  std::vector<slot_t> all(kept.size());
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<slot_t>(i);
  const std::span<const slot_t> everything[] = {all};
  require_ok(plan.assign(cache.view(), everything));
  require_ok(twice.commit(plan));
  REQUIRE((memory_of(twice) == memory_of(moved)));
}

TEST_CASE("Where no beacon ever leaves, credit changes no score, also behind a second prompt", "[orphan_credit]") {
  Random random;
  CAPTURE(random.seed());
  const Shape shape{4, 2, 16};
  BeaconKVOptions<> options{
      .budget = {.max = 64, .min = 40}, .n_beacon = 200, .n_recent_queries = 4, .n_recent_kv = 4, .n_prefix = 0};
  const RopeTable rope({.head_dim = 16});
  BeaconKV<> plain(shape, options, rope);
  options.orphan_credit = 1;
  BeaconKV<> credit(shape, options, rope);
  OwningCache<float> cache(shape, 256);
  Workspace work(max(plain.workspace_size(256), credit.workspace_size(256)));
  const auto append = [&](position_t p) { require_ok(cache.append(random.normals(32), random.normals(32), p)); };
  const auto decode = [&](position_t p) {
    append(p);
    const std::vector<float> queries = random.normals(64);
    require_ok(plain.observe(queries, p));
    require_ok(credit.observe(queries, p));
  };
  position_t next = 0;
  while (next < 10) decode(next++);
  const std::vector<float> prompt = random.normals(6 * 64);
  require_ok(plain.prefill(QueryView::token_major(prompt.data(), 6, 4, 16), work));
  require_ok(credit.prefill(QueryView::token_major(prompt.data(), 6, 4, 16), work));
  for (index_t i = 0; i < 6; ++i) append(next++);
  for (int evictions = 0; evictions < 3;) {
    decode(next++);
    if (!credit.due(cache.view())) continue;
    const index_t tokens = cache.view().num_tokens();
    std::vector<float> published(at(2 * tokens));
    std::vector<float> with_credit(at(2 * tokens));
    require_value(plain.score(cache.view(), {published.data(), 2, tokens}, work));
    require_value(std::as_const(credit).score(cache.view(), {with_credit.data(), 2, tokens}, work));
    const Range candidates = credit.candidates_of(cache.view(), 0);
    for (index_t h = 0; h < 2; ++h)
      for (index_t j = candidates.first; j < candidates.last; ++j)
        REQUIRE_THAT(with_credit[at(h * tokens + j)], Catch::Matchers::WithinAbs(published[at(h * tokens + j)], 1e-6));
    require_ok(credit.plan(cache.view(), work, work.plan()));
    require_ok(compact(cache.view(), work.plan()));
    require_ok(credit.commit(work.plan()));
    require_ok(plain.commit(work.plan()));
    ++evictions;
  }
}

TEST_CASE("Room for credits: from the schedule, by reserve, or when a longer cache is scored", "[orphan_credit]") {
  Random random;
  CAPTURE(random.seed());
  auto reserved = small_beaconkv_with_credit();
  auto growing = small_beaconkv_with_credit();
  reserved.reserve(300);
  TestCache<> a(small_shape, 300), b(small_shape, 300);
  Workspace work(reserved.workspace_size(300));
  Stream stream = small_stream(random);
  for (auto* p : {&reserved, &growing}) p->set_eviction(false);
  index_t forced = 0;
  for (position_t p = 0; p < 280; ++p) {
    const Token token = stream.next(p);
    feed(reserved, a, token);
    feed(growing, b, token);
    if (p % 40 != 39) continue;
    ++forced;
    KeepPlan plan;
    plan.reserve(2, 300);
    REQUIRE(allocations_of([&] {
              require_ok(reserved.plan_free(a.view(), 7, work, plan));
              require_ok(compact(a.view(), plan));
              require_ok(reserved.commit(plan));
            }) == 0);
    require_ok(growing.plan_free(b.view(), 7, work, plan));
    require_ok(compact(b.view(), plan));
    require_ok(growing.commit(plan));
    REQUIRE((memory_of(reserved) == memory_of(growing)));
  }
  REQUIRE(forced == 7);
  REQUIRE(a.state().positions == b.state().positions);
  REQUIRE(growing.state_bytes() < reserved.state_bytes());
  auto copy = reserved;  // an assignment keeps the larger room and takes the same credits
  REQUIRE(allocations_of([&] { copy = growing; }) == 0);
  REQUIRE((memory_of(copy) == memory_of(growing)));
}

TEST_CASE("A share of the rank goes by unlikeness to the mean key", "[orphan_credit]") {
  Random random;
  CAPTURE(random.seed());
  for (const float credit : {0.0F, 0.9F})
    for (const bool norm : {false, true})
      for (const float share : {0.3F, 1.0F})
        for (const index_t tokens : {12, 60}) {
          CAPTURE(credit, norm, share, tokens);
          BeaconKVOptions<> o{
              .budget = {.max = 40}, .n_recent_kv = 4, .n_prefix = 3, .orphan_credit = credit, .value_norm = norm};
          BeaconKV<> plain(small_shape, o, small_rope());
          o.key_diff_share = share;
          BeaconKV<> mixed(small_shape, o, small_rope());
          Stream stream = small_stream(random);
          TestCache<float16> cache(small_shape, 64);
          for (index_t t = 0; t < tokens; ++t) {
            Token token = stream.next(t);
            if (t == 6) token.keys[5] = std::numeric_limits<float>::infinity();
            if (t == 5) std::fill(token.keys.begin(), token.keys.end(), 0.0F);
            feed(plain, cache, token);
            require_ok(mixed.observe(token.queries, t));
          }
          Workspace work(mixed.workspace_size(64));
          std::vector<float> a(at(2 * tokens)), b(a.size());
          require_value(plain.score(cache.view(), {a.data(), 2, tokens}, work));
          require_value(mixed.score(cache.view(), {b.data(), 2, tokens}, work));
          const Range open = plain.candidates_of(cache.view(), 0);
          for (index_t h = 0; h < 2; ++h) {
            Row mean(16, 0.0);
            Matrix keys;
            for (index_t j = 0; j < tokens; ++j) {
              keys.push_back(cache.key(h, j));
              const double length = std::sqrt(reference::dot(keys.back(), keys.back()));
              for (std::size_t d = 0; d < 16 && reference::finite(keys.back()) && length > 0; ++d)
                mean[d] += keys.back()[d] / length;
            }
            std::vector<float> score, unlike;
            for (std::int64_t j = open.first; j < open.last; ++j) {
              score.push_back(a[at(h * tokens + j)]);
              const bool finite = reference::finite(keys[at(j)]);
              unlike.push_back(finite ? static_cast<float>(-reference::cosine(keys[at(j)], mean)) : 0.0F);
            }
            Row want(score.size(), 0.0);
            const auto add = [&](const std::vector<float>& by, double weight) {
              const std::vector<slot_t> best = reference::best_first(by);
              for (std::size_t r = 0; r < best.size(); ++r)
                want[at(best[r])] += weight * static_cast<double>(best.size() - 1 - r) / static_cast<double>(best.size() - 1);
            };
            add(score, 1 - static_cast<double>(share));
            add(unlike, static_cast<double>(share));
            for (std::size_t i = 0; i < want.size(); ++i) {
              const float got = b[at(h * tokens + open.first) + i];
              CAPTURE(h, i, want[i], got);
              if (std::isnan(score[i]))
                REQUIRE(std::isnan(got));
              else
                REQUIRE(std::abs(static_cast<double>(got) - want[i]) < 1e-5);
            }
          }
        }
}

TEST_CASE("Values may be wider or narrower than keys, up to what the scratch holds", "[value_norm]") {
  Random random;
  CAPTURE(random.seed());
  for (const index_t width : {1, 7, 16, 40, 64 * 16, 64 * 16 + 1}) {
    CAPTURE(width);
    BeaconKVOptions<> o{.budget = {.max = 40}, .n_recent_kv = 4, .n_prefix = 2};
    BeaconKV<> plain(small_shape, o, small_rope());
    o.value_norm = true;
    BeaconKV<> weighed(small_shape, o, small_rope());
    OwningCache<float, float16> cache(small_shape, 30, {.value_dim = width});
    Stream stream = small_stream(random);
    std::vector<float> values;
    for (index_t t = 0; t < 30; ++t) {
      const Token token = stream.next(t);
      values = random.normals(2 * width);
      require_ok(cache.append(token.keys, values, t));
      require_ok(plain.observe(token.queries, t));
      require_ok(weighed.observe(token.queries, t));
    }
    Workspace work(weighed.workspace_size(30));
    std::vector<float> a(60), b(60);
    require_value(plain.score(cache.view(), {a.data(), 2, 30}, work));
    const auto report = weighed.score(cache.view(), {b.data(), 2, 30}, work);
    if (width > 64 * 16) {
      check_error(report.status(), StatusCode::unsupported, {"value_norm", "values of 1025", "at most 1024"});
      continue;
    }
    require_value(report);
    for (index_t h = 0; h < 2; ++h)
      for (index_t j = 2; j < 26; ++j) {
        std::vector<float> scratch(at(width));
        const Row value = reference::row_of(cache.view().values(h, j, 1, scratch.data()).data, width);
        const double want = static_cast<double>(a[at(h * 30 + j)]) * std::sqrt(reference::dot(value, value));
        REQUIRE(static_cast<double>(b[at(h * 30 + j)]) == Approx(want).epsilon(1e-5));
      }
  }
}
