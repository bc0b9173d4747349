// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Whole policies, slow and obvious and in double precision, written from the papers' formulas and the published protocols. Of
/// the library they use option types only.

#include <algorithm>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "beaconkv/types.hpp"
#include "support/reference.hpp"

namespace beaconkv::test::reference {

/// The keys of one layer, in time order: [KV head][slot].
struct Cache {
  std::vector<Matrix> keys{};
  std::vector<std::vector<position_t>> positions{};

  explicit Cache(index_t heads) : keys(static_cast<std::size_t>(heads)), positions(static_cast<std::size_t>(heads)) {}

  [[nodiscard]] index_t tokens() const { return static_cast<index_t>(positions.front().size()); }
  void append(position_t position, const Matrix& key_of_each_head) {
    for (std::size_t h = 0; h < keys.size(); ++h) {
      keys[h].push_back(key_of_each_head[h]);
      positions[h].push_back(position);
    }
  }
  void keep(std::size_t head, std::span<const slot_t> slots) {
    Matrix kept;
    std::vector<position_t> where;
    for (const slot_t s : slots) {
      kept.push_back(keys[head][static_cast<std::size_t>(s)]);
      where.push_back(positions[head][static_cast<std::size_t>(s)]);
    }
    keys[head] = kept;
    positions[head] = where;
  }
};

struct Rope {
  Row frequencies{};
  RopeLayout layout = RopeLayout::half;
  double factor = 1;

  [[nodiscard]] Row at(const Row& row, position_t position) const {
    return rotated(row, position, frequencies, layout, factor);
  }
};

/// R-KV's second term.
struct Redundancy {
  double lambda = 0.07;
  double threshold = 0.5;
  Spare spare = Spare::last_or_zero;
  double ratio = 0.1;
};

/// Where a sequence stands when the schedule is asked.
struct Moment {
  index_t tokens = 0;  ///< cached
  index_t prefix = 0;  ///< of them: protected prefix
  index_t total = 0;   ///< tokens of the sequence so far
  bool after_prompt = false;
  index_t evictions = 0;  ///< so far
};

struct Scores {
  Matrix of_head{};          ///< [KV head][slot]; outside the candidates without meaning
  double largest = 0;        ///< of a candidate's score, its parts taken by their size: rounding errors are relative to it
  double logit_bound = 0;    ///< |query| |key| scale at most: what rounding errors grow with
  double margin = infinity;  ///< of a cosine to R-KV's threshold, at least: below rounding errors its side is a matter of luck
};

/// How near a cosine of two keys comes to the threshold.
[[nodiscard]] inline double threshold_margin(const Matrix& keys, double threshold) {
  double margin = infinity;
  for (std::size_t i = 0; i < keys.size(); ++i)
    for (std::size_t j = 0; j < i; ++j)
      if (finite(keys[i]) && finite(keys[j])) margin = std::min(margin, std::abs(cosine(keys[i], keys[j]) - threshold));
  return margin;
}

/// What is scored and kept, in the words of SPEC. Queries are pre-RoPE.
struct PolicySettings {
  Shape shape{};
  Rope rope{};
  std::optional<index_t> n_beacon{};  ///< set: BeaconKV's memory. Else the newest queries, the prompt's included.
  index_t n_recent_queries = 1;
  bool newest_twice = false;
  Attention attention{};
  SoftmaxDomain domain = SoftmaxDomain::all_visible;
  HeadScope scope = HeadScope::group;
  bool causal = true;
  std::optional<Redundancy> redundancy{};
  bool published_order = false;
  std::optional<index_t> n_prefix{};
  index_t n_recent_kv = 0;
  std::vector<Range> ranges{};
  std::function<bool(const Moment&)> due = [](const Moment&) { return false; };
  std::function<index_t(const Moment&)> target = [](const Moment& m) { return m.tokens; };
};

class Policy {
 public:
  explicit Policy(const PolicySettings& settings)
      : s_(settings),
        history_(static_cast<std::size_t>(settings.shape.query_heads)),
        ring_(history_.size()),
        order_(static_cast<std::size_t>(settings.shape.kv_heads)) {
    const auto n = static_cast<std::size_t>(s_.n_beacon.value_or(0));
    beacons_.assign(history_.size(), ContinualSampling{.n_min = n, .n_max = n + static_cast<std::size_t>(s_.n_recent_queries)});
  }

  [[nodiscard]] const PolicySettings& settings() const { return s_; }
  void protect(Range range) { s_.ranges.push_back(range); }
  [[nodiscard]] std::vector<ContinualSampling>& beacons() { return beacons_; }

  /// `queries` is [query head][token].
  void prefill(const std::vector<Matrix>& queries, position_t first) {
    for (std::size_t h = 0; h < queries.size(); ++h) {
      if (has_beacons()) beacons_[h].prefill(queries[h], first);
      for (std::size_t t = 0; t < queries[h].size(); ++t)
        history_[h].push_back({queries[h][t], first + static_cast<position_t>(t)});
    }
    next_ = first + static_cast<position_t>(queries.front().size());
    if (!decoded_) prompt_end_ = next_;
    after_prompt_ = true;
  }

  void observe(const Matrix& queries, position_t position) {
    for (std::size_t h = 0; h < queries.size(); ++h) {
      if (static_cast<index_t>(ring_[h].size()) == s_.n_recent_queries) {
        if (has_beacons()) beacons_[h].push(ring_[h].front().row, ring_[h].front().position);
        ring_[h].erase(ring_[h].begin());
      }
      ring_[h].push_back({queries[h], position});
      history_[h].push_back({queries[h], position});
    }
    next_ = position + 1;
    decoded_ = true;
    after_prompt_ = false;
  }

  [[nodiscard]] position_t prefix() const { return s_.n_prefix.value_or(prompt_end_); }

  [[nodiscard]] Moment moment(const Cache& cache) const {
    index_t prefix_slots = 0;
    for (const position_t p : cache.positions.front()) prefix_slots += p < prefix() ? 1 : 0;
    return {cache.tokens(), prefix_slots, next_, after_prompt_, evictions_};
  }
  [[nodiscard]] bool due(const Cache& cache) const { return s_.due(moment(cache)); }
  [[nodiscard]] index_t target(const Cache& cache) const { return s_.target(moment(cache)); }

  /// The slots that compete for the softmax and the pool: without prefix and window. Protected ranges lie within.
  [[nodiscard]] Range candidates(const Cache& cache) const {
    const Moment m = moment(cache);
    return {m.prefix, std::max(m.prefix, m.tokens - s_.n_recent_kv)};
  }
  [[nodiscard]] bool is_protected(const Cache& cache, std::size_t head, index_t slot) const {
    const position_t p = cache.positions[head][static_cast<std::size_t>(slot)];
    if (p < prefix() || slot >= cache.tokens() - s_.n_recent_kv) return true;
    return std::any_of(s_.ranges.begin(), s_.ranges.end(), [&](const Range& r) { return r.first <= p && p < r.last; });
  }

  [[nodiscard]] Scores scores(const Cache& cache) const {
    Scores out;
    std::vector<Matrix> keys = cache.keys;
    std::vector<std::vector<position_t>> positions = cache.positions;
    if (s_.published_order)
      for (std::size_t h = 0; h < keys.size(); ++h) {
        const std::vector<slot_t> slots = slots_by_rank(cache, h);
        for (std::size_t r = 0; r < slots.size(); ++r) {
          keys[h][r] = cache.keys[h][static_cast<std::size_t>(slots[r])];
          positions[h][r] = cache.positions[h][static_cast<std::size_t>(slots[r])];
        }
      }
    const Range open = candidates(cache);
    out.of_head = importance(keys, positions, open, out.logit_bound);
    if (s_.redundancy) subtract_redundancy(keys, open, out);
    for (const Row& row : out.of_head)
      for (std::int64_t j = open.first; j < open.last; ++j)
        if (const double x = std::abs(row[static_cast<std::size_t>(j)]); x > out.largest) out.largest = x;
    if (s_.published_order)
      for (std::size_t h = 0; h < keys.size(); ++h) {
        const std::vector<slot_t> slots = slots_by_rank(cache, h);
        const Row by_rank = out.of_head[h];
        for (std::size_t r = 0; r < slots.size(); ++r) out.of_head[h][static_cast<std::size_t>(slots[r])] = by_rank[r];
      }
    return out;
  }

  /// Rows of queries and of keys that share a softmax and have a NaN or infinity: of every head.
  [[nodiscard]] index_t num_non_finite(const Cache& cache) const {
    index_t count = 0;
    for (std::size_t h = 0; h < history_.size(); ++h)
      for (const Query& q : rows(h)) count += finite(q.row) ? 0 : 1;
    const Range domain = s_.domain == SoftmaxDomain::all_visible ? Range{0, cache.tokens()} : candidates(cache);
    for (const Matrix& keys : cache.keys)
      for (std::int64_t j = domain.first; j < domain.last; ++j) count += finite(keys[static_cast<std::size_t>(j)]) ? 0 : 1;
    return count;
  }

  /// After the sets `kept` (one a head, in the cache's old numbering) were chosen by `scores`. Call before the cache changes. A
  /// cache that is `within` its budget was not looked at.
  void commit(const Cache& before, const std::vector<std::vector<slot_t>>& kept, const Matrix& scores, bool within) {
    for (ContinualSampling& b : beacons_)
      if (has_beacons()) b.reduce();
    ++evictions_;
    if (!s_.published_order || within) return;
    const Range open = candidates(before);
    for (std::size_t h = 0; h < order_.size(); ++h) {
      std::vector<slot_t> prefix_part;
      std::vector<slot_t> chosen;
      std::vector<slot_t> window;
      for (const slot_t s : slots_by_rank(before, h)) {
        if (!std::binary_search(kept[h].begin(), kept[h].end(), s)) continue;
        (s < open.first ? prefix_part : s < open.last ? chosen : window).push_back(s);
      }
      const auto score = [&](slot_t slot) {
        const double x = scores[h][static_cast<std::size_t>(slot)];
        return std::isnan(x) ? -infinity : x;
      };
      std::stable_sort(chosen.begin(), chosen.end(), [&](slot_t a, slot_t b) { return score(a) > score(b); });
      order_[h].clear();
      for (const auto* part : {&prefix_part, &chosen, &window})
        for (const slot_t s : *part) order_[h].push_back(before.positions[h][static_cast<std::size_t>(s)]);
    }
  }

 private:
  struct Query {
    Row row;
    position_t position;
  };

  [[nodiscard]] bool has_beacons() const { return s_.n_beacon.value_or(0) > 0; }

  /// The rows of one query head that look at the keys: rotated, with the position from which they look.
  [[nodiscard]] std::vector<Query> rows(std::size_t head) const {
    std::vector<Query> out;
    if (s_.n_beacon) {
      ContinualSampling b = beacons_[head];
      if (has_beacons()) b.reduce();
      for (const Row& row : b.rows) out.push_back({s_.rope.at(row, next_ - 1), next_ - 1});
      for (const Query& q : ring_[head]) out.push_back({s_.rope.at(q.row, q.position), q.position});
      return out;
    }
    const bool twice = s_.newest_twice && s_.n_recent_queries > 1;
    const auto distinct = static_cast<std::size_t>(s_.n_recent_queries - (twice ? 1 : 0));
    const std::vector<Query>& all = history_[head];
    for (std::size_t i = all.size() - std::min(all.size(), distinct); i < all.size(); ++i)
      out.push_back({s_.rope.at(all[i].row, all[i].position), all[i].position});
    if (twice && !out.empty()) out.push_back(out.back());
    return out;
  }

  [[nodiscard]] std::vector<slot_t> slots_by_rank(const Cache& cache, std::size_t head) const {
    const std::vector<position_t>& positions = cache.positions[head];
    std::vector<slot_t> slots;
    for (const position_t p : order_[head])
      slots.push_back(static_cast<slot_t>(std::find(positions.begin(), positions.end(), p) - positions.begin()));
    for (std::size_t s = slots.size(); s < positions.size(); ++s) slots.push_back(static_cast<slot_t>(s));
    return slots;
  }

  [[nodiscard]] Matrix importance(const std::vector<Matrix>& keys, const std::vector<std::vector<position_t>>& positions,
                                  Range open, double& logit_bound) const {
    const auto group = static_cast<std::size_t>(s_.shape.group());
    const bool shared = s_.scope == HeadScope::layer;
    Attention attention = s_.attention;
    if (shared && !attention.pool_each_query_head) attention.pool = {};
    Matrix out;
    for (std::size_t h = 0; h < keys.size(); ++h) {
      std::vector<Matrix> queries(group);
      std::vector<std::vector<position_t>> from(group);
      for (std::size_t g = 0; g < group; ++g)
        for (const Query& q : rows(h * group + g)) {
          queries[g].push_back(q.row);
          from[g].push_back(q.position);
        }
      const Range domain = s_.domain == SoftmaxDomain::all_visible ? Range{0, static_cast<std::int64_t>(keys[h].size())} : open;
      const Matrix part(keys[h].begin() + domain.first, keys[h].begin() + domain.last);
      for (const Matrix& m : queries)
        for (const Row& q : m)
          for (const Row& k : part)
            if (finite(q) && finite(k)) logit_bound = std::max(logit_bound, std::sqrt(dot(q, q) * dot(k, k)) * attention.scale);
      const auto sees = [&](std::size_t g, std::size_t r, std::size_t j) {
        return !s_.causal || positions[h][j + static_cast<std::size_t>(domain.first)] <= from[g][r];
      };
      const Row scores =
          attention_scores(queries, part, sees, {open.first - domain.first, open.last - domain.first}, attention);
      out.push_back(Row(keys[h].size(), 0.0));
      std::copy(scores.begin(), scores.end(), out.back().begin() + domain.first);
    }
    if (shared) share(out, open);
    return out;
  }

  /// One row for all heads. A key that is not finite has no say in its neighbours' scores and none of its own.
  void share(Matrix& scores, Range open) const {
    Row one(scores.front().size(), 0.0);
    std::vector<bool> bad(one.size(), false);
    for (std::size_t j = 0; j < one.size(); ++j) {
      Row column;
      for (const Row& row : scores) {
        bad[j] = bad[j] || std::isnan(row[j]);
        column.push_back(std::isnan(row[j]) ? 0.0 : row[j]);
      }
      one[j] = reduce(column, s_.attention.over_heads);
    }
    if (!s_.attention.pool_each_query_head) {
      const Row pooled = pool(Row(one.begin() + open.first, one.begin() + open.last), s_.attention.pool);
      std::copy(pooled.begin(), pooled.end(), one.begin() + open.first);
    }
    for (std::size_t j = 0; j < one.size(); ++j)
      if (bad[j]) one[j] = nan;
    for (Row& row : scores) row = one;
  }

  void subtract_redundancy(const std::vector<Matrix>& keys, Range open, Scores& out) const {
    const Redundancy& r = *s_.redundancy;
    for (std::size_t h = 0; h < keys.size(); ++h) {
      const Row redundant = softmax(redundancy_means(keys[h], r.threshold, r.spare, r.ratio));
      out.margin = std::min(out.margin, threshold_margin(keys[h], r.threshold));
      for (std::size_t j = 0; j < redundant.size(); ++j) {
        double& score = out.of_head[h][j];
        const double size = r.lambda * score + (1 - r.lambda) * redundant[j];
        const auto slot = static_cast<std::int64_t>(j);
        if (open.first <= slot && slot < open.last && size > out.largest) out.largest = size;
        score = r.lambda * score - (1 - r.lambda) * redundant[j];
      }
    }
  }

  PolicySettings s_;
  std::vector<std::vector<Query>> history_;  // of each query head: all queries ever
  std::vector<std::vector<Query>> ring_;     // of each query head: the newest decoded ones
  std::vector<ContinualSampling> beacons_;
  std::vector<std::vector<position_t>> order_;  // of each KV head: positions in the published order
  position_t next_ = 0;
  position_t prompt_end_ = 0;
  bool decoded_ = false;
  bool after_prompt_ = false;
  index_t evictions_ = 0;
};

// Schedules in SPEC's words.

struct Schedule {
  std::function<bool(const Moment&)> due;
  std::function<index_t(const Moment&)> target;
};

/// SPEC 1.5: once `max` tokens are counted, down to `min`.
[[nodiscard]] inline Schedule fixed_budget(index_t max, index_t min, bool counts_prefix) {
  return {[=](const Moment& m) {
            const index_t counted = m.tokens - (counts_prefix ? 0 : m.prefix);
            return counted >= max && counted > min;
          },
          [=](const Moment& m) { return std::min(m.tokens, min + (counts_prefix ? 0 : m.prefix)); }};
}
/// SPEC 2.1: only after the prompt.
[[nodiscard]] inline Schedule prompt_budget(index_t tokens) {
  return {[=](const Moment& m) { return m.after_prompt && m.tokens > tokens; },
          [=](const Moment& m) { return std::min(m.tokens, tokens); }};
}
/// SPEC 2.3.2: after the prompt, and on the token after every multiple of `interval`.
[[nodiscard]] inline Schedule interval_budget(index_t tokens, index_t interval) {
  return {[=](const Moment& m) { return m.tokens >= tokens && (m.after_prompt || (m.total - 1) % interval == 0); },
          [=](const Moment& m) { return std::min(m.tokens, tokens); }};
}
/// SPEC 2.2: fill = length - prompt - m T - R before the token is appended; compression at fill == P - 1.
[[nodiscard]] inline Schedule growing_budget(index_t period, index_t ratio, index_t recent) {
  const index_t step = period / ratio;
  return {
      [=](const Moment& m) { return !m.after_prompt && m.tokens - 1 - m.prefix - m.evictions * step - recent >= period - 1; },
      [=](const Moment& m) { return std::min(m.tokens, m.prefix + (m.evictions + 1) * step + recent); }};
}

// The published protocols, from beginning to end, over the queries and keys of a whole sequence: [head][token], after RoPE.

struct Protocol {
  std::vector<index_t> lengths{};                            ///< of the cache after the prompt, then after each token
  std::vector<std::vector<std::vector<position_t>>> kept{};  ///< of each compression: positions of each KV head, stored order
  double margin = infinity;  ///< the smallest difference that decided something: below rounding errors, luck
};

namespace protocol {

/// The rows `[first, last)` of `all`, or those listed.
[[nodiscard]] inline Matrix pick(const Matrix& all, const std::vector<position_t>& which) {
  Matrix out;
  for (const position_t i : which) out.push_back(all[static_cast<std::size_t>(i)]);
  return out;
}

/// Indices of the `n` largest, best first, lower index first among equals. Lowers `margin` to the step behind the last one.
[[nodiscard]] inline std::vector<std::size_t> best(const Row& scores, std::size_t n, double& margin) {
  std::vector<std::size_t> order(scores.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return scores[a] > scores[b]; });
  if (n > 0 && n < order.size()) margin = std::min(margin, scores[order[n - 1]] - scores[order[n]]);
  order.resize(std::min(order.size(), n));
  return order;
}

[[nodiscard]] inline Row logits(const Row& q, const Matrix& keys) {
  Row z;
  for (const Row& k : keys) z.push_back(dot(q, k) / std::sqrt(static_cast<double>(q.size())));
  return z;
}

}  // namespace protocol

/// SPEC 2.2 (`rpc_utils.py`). `shared`: one selection for all KV heads, else one a group.
[[nodiscard]] inline Protocol rpc_protocol(const std::vector<Matrix>& q, const std::vector<Matrix>& k, index_t prompt,
                                           index_t period, index_t window, index_t ratio, bool shared, const Pool& kernel,
                                           bool newest_twice) {
  const auto total = static_cast<index_t>(q.front().size());
  const std::size_t group = q.size() / k.size();
  const index_t step = period / ratio;
  std::vector<position_t> prompt_positions;
  for (position_t p = 0; p < prompt; ++p) prompt_positions.push_back(p);
  std::vector<std::vector<position_t>> cached(k.size(), prompt_positions);
  std::vector<position_t> selector;
  Protocol out;
  out.lengths.push_back(prompt);
  index_t done = 0;
  for (position_t i = prompt; i < total; ++i) {
    const index_t fill = static_cast<index_t>(cached.front().size()) - prompt - done * step - window;
    if (fill > period - window - (newest_twice ? 0 : 1)) selector.push_back(i);
    for (auto& positions : cached) positions.push_back(i);
    if (fill == period - 1) {
      if (newest_twice) selector.push_back(i);
      Matrix weights;  // of each query head, summed over the selector rows
      const std::size_t n = cached.front().size() - static_cast<std::size_t>(prompt + window);
      for (std::size_t h = 0; h < q.size(); ++h) {
        const std::vector<position_t>& positions = cached[h / group];
        const std::vector<position_t> candidates(positions.begin() + prompt, positions.end() - window);
        const Matrix keys = protocol::pick(k[h / group], candidates);
        Row sum(n, 0.0);
        for (const Row& row : protocol::pick(q[h], selector)) {
          const Row w = softmax(protocol::logits(row, keys));
          for (std::size_t j = 0; j < n; ++j) sum[j] += w[j];
        }
        weights.push_back(sum);
      }
      for (std::size_t h = 0; h < k.size(); ++h) {
        const std::size_t first = shared ? 0 : h * group;
        const std::size_t last = shared ? q.size() : first + group;
        Row mean(n, 0.0);
        for (std::size_t g = first; g < last; ++g)
          for (std::size_t j = 0; j < n; ++j) mean[j] += weights[g][j] / static_cast<double>(last - first);
        std::vector<std::size_t> chosen =
            protocol::best(pool(mean, kernel), static_cast<std::size_t>((done + 1) * step), out.margin);
        std::sort(chosen.begin(), chosen.end());
        std::vector<position_t> next(cached[h].begin(), cached[h].begin() + prompt);
        for (const std::size_t j : chosen) next.push_back(cached[h][static_cast<std::size_t>(prompt) + j]);
        next.insert(next.end(), cached[h].end() - window, cached[h].end());
        cached[h] = next;
      }
      selector.clear();
      ++done;
      out.kept.push_back(cached);
    }
    out.lengths.push_back(static_cast<index_t>(cached.front().size()));
  }
  return out;
}

/// SPEC 2.3 (`r1_kv.py`, `modeling.py`). As published survivors are stored by descending score, unless `chronological`.
[[nodiscard]] inline Protocol rkv_protocol(const std::vector<Matrix>& q, const std::vector<Matrix>& k, index_t prompt,
                                           index_t budget, index_t window, index_t interval, double lambda, const Pool& kernel,
                                           Spare spare, bool chronological) {
  const auto total = static_cast<index_t>(q.front().size());
  const std::size_t group = q.size() / k.size();
  std::vector<position_t> prompt_positions;
  for (position_t p = 0; p < prompt; ++p) prompt_positions.push_back(p);
  std::vector<std::vector<position_t>> cached(k.size(), prompt_positions);
  Protocol out;
  for (index_t n = prompt; n <= total; ++n) {
    if (n > prompt)
      for (auto& positions : cached) positions.push_back(n - 1);
    const auto length = static_cast<index_t>(cached.front().size());
    if ((n == prompt || (n - 1) % interval == 0) && length >= budget) {
      for (std::size_t h = 0; h < k.size(); ++h) {
        const Matrix keys = protocol::pick(k[h], cached[h]);
        const Matrix candidates(keys.begin(), keys.end() - window);
        Row mean(candidates.size(), 0.0);
        const index_t rows = std::min(window, n);
        for (index_t r = n - rows; r < n; ++r) {
          Row top(candidates.size(), -infinity);
          for (std::size_t g = h * group; g < (h + 1) * group; ++g) {
            const Row z = protocol::logits(q[g][static_cast<std::size_t>(r)], candidates);
            for (std::size_t j = 0; j < z.size(); ++j) top[j] = std::max(top[j], z[j]);
          }
          const Row w = softmax(top);
          for (std::size_t j = 0; j < w.size(); ++j) mean[j] += w[j] / static_cast<double>(rows);
        }
        const Row important = pool(mean, kernel);
        const Row redundant = softmax(redundancy_means(keys, 0.5, spare));
        out.margin = std::min(out.margin, threshold_margin(keys, 0.5));
        Row z(candidates.size());
        for (std::size_t j = 0; j < z.size(); ++j) z[j] = lambda * important[j] - (1 - lambda) * redundant[j];
        std::vector<std::size_t> chosen = protocol::best(z, static_cast<std::size_t>(budget - window), out.margin);
        if (chronological) std::sort(chosen.begin(), chosen.end());
        std::vector<position_t> next;
        for (const std::size_t j : chosen) next.push_back(cached[h][j]);
        next.insert(next.end(), cached[h].end() - window, cached[h].end());
        cached[h] = next;
      }
      out.kept.push_back(cached);
    }
    out.lengths.push_back(static_cast<index_t>(cached.front().size()));
  }
  return out;
}

}  // namespace beaconkv::test::reference
