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
    return std::count_if(keys_[head].begin(), keys_[head].end(), [&](const Key& k) {
      return k.owned && k.credit > 1e-3 && !is_beacon(k.owner_head, k.owner);
    });
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
    const ContinualFps& got = policy.observer().beacons(static_cast<index_t>(g));
    const std::vector<position_t> tags(got.tags().begin(), got.tags().end());
    if (tags != banks[g].tags) {
      CAPTURE(g, tags, banks[g].tags);
      REQUIRE(banks[g].gap < 1e-6);
      ++seen.ambiguous;
      banks[g].tags = tags;
      banks[g].rows.clear();
      for (index_t r = 0; r < got.size(); ++r) banks[g].rows.push_back(reference::row_of(got.rows().row(r), got.dim()));
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
