// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// BeaconKV's scores: attention of beacons and recent queries, and, beyond the paper, orphan credit.

#include <algorithm>
#include <span>
#include <utility>

#include "beaconkv/algorithm/split_attention.hpp"
#include "beaconkv/policy/key_diff_mix.hpp"
#include "beaconkv/policy/orphan_credit.hpp"
#include "beaconkv/policy/scorer.hpp"

namespace beaconkv::inline v0 {

/// An `AttentionScorer` whose keys may remember the beacons that looked at them (orphan credit, not in the paper).
///
/// Each cached key has a credit and an owner, of each KV head. At an eviction `b` is the largest weight that a beacon of the
/// group gives the key, `r` the largest of a recent query. Where the key's owner is still a beacon its present weight speaks
/// for it; where it has left its bank the key carries `orphan_credit` times its credit over. If `b` is not below what is
/// carried, the beacon that reaches it becomes the owner. The credit is the larger of both, the score the larger of `r` and the
/// credit, pooled where the attention pools. Credits change only in `commit`, by what scoring noted.
///
/// Keys are known by their slots: an engine that takes observed tokens back by itself (`truncate`) and writes others leaves
/// these the credits of those. `Sequence` never does.
///
/// With `value_norm` the lengths of values are remembered, too (`detail::ValueLengths`), so that an eviction reads the values
/// of new tokens only.
///
/// Scores that are formed through a const policy are the same, but note nothing: a plan made of them, or by hand, moves credits
/// along with their keys and changes none.
class BeaconScorer {
 public:
  struct Options {
    AttentionScorer attention{};
    float orphan_credit = 0;  ///< what is left of an orphan's credit at each eviction, 0 to 1; 0: no credits, as published
    float key_diff_share =
        0;  ///< 0 to 1; above 0, final scores are ranks, of which this share goes by unlikeness to the mean key
  };
  /// Only an eviction is one: a cache within its budget is not looked at.
  static constexpr bool follows_evictions_only = true;

  BeaconScorer() = default;
  explicit BeaconScorer(const Options& options) : options_(options) {}

  [[nodiscard]] const Options& options() const noexcept { return options_; }

  [[nodiscard]] Status validate(const Shape& shape) const {
    const float left = options_.orphan_credit;
    if (!(detail::is_finite(left) && left >= 0 && left <= 1))
      return detail::invalid("orphan_credit = ", left, ": must be between 0 and 1");
    const float share = options_.key_diff_share;
    if (!(detail::is_finite(share) && share >= 0 && share <= 1))
      return detail::invalid("key_diff_share = ", share, ": must be between 0 and 1");
    const AttentionOptions& a = options_.attention.attention;
    if (left > 0 &&
        (a.over_queries != Reduce::max || a.over_heads != Reduce::max || a.group_stage != GroupStage::weights ||
         options_.attention.head_scope != HeadScope::group || (a.pool.active() && a.pool_stage != PoolStage::kv_head)))
      return detail::error(StatusCode::unsupported, "orphan_credit = ", left,
                           ": needs over_queries = max, over_heads = max over the weights of a group, and a pool behind them");
    return options_.attention.validate(shape);
  }
  [[nodiscard]] bool needs_all_heads() const noexcept { return options_.attention.needs_all_heads(); }

  template <CacheReader Cache>
  [[nodiscard]] Result<ScoreReport> score(const Cache& cache, const Observations& observations, Range candidates,
                                          ScoreMatrix out, Workspace& work) const {
    return score_with(cache, observations, candidates, out, work, nullptr);
  }
  /// The same, and notes for `commit` what keys would remember. Different heads may be scored at the same time. Needs
  /// `reserve`.
  template <CacheReader Cache>
  [[nodiscard]] Result<ScoreReport> score(const Cache& cache, const Observations& observations, Range candidates,
                                          ScoreMatrix out, Workspace& work) {
    return score_with(cache, observations, candidates, out, work, this);
  }

  [[nodiscard]] WorkspaceSize workspace_size(const Shape& shape, index_t rows, index_t tokens) const {
    WorkspaceSize last = options_.attention.value_norm ? detail::value_norm_workspace_size(shape.head_dim) : WorkspaceSize{};
    if (options_.key_diff_share > 0) last = max(last, detail::key_diff_workspace_size(shape.head_dim, tokens));
    const WorkspaceSize published = max(options_.attention.workspace_size(shape, rows, tokens), last);
    if (!has_credits()) return published;
    return max(published, detail::measure([&](Workspace& work) {
                 static_cast<void>(Scratch(work, shape.group(), rows, tokens));
                 last = max(last, split_attention_workspace_size(shape.group(), rows, shape.head_dim, tokens));
                 static_cast<void>(work.take<std::byte>(static_cast<index_t>(last.bytes)));
               }));
  }

  /// Whether scoring notes anything for `commit`, and needs the beacons' positions for it.
  [[nodiscard]] bool takes_notes() const noexcept { return has_credits() || options_.attention.value_norm; }
  /// Whether scores depend on what was noted before; lengths of values only spare a reading.
  [[nodiscard]] bool needs_notes() const noexcept { return has_credits(); }
  /// Room for what `slots` slots of each head remember, and for `rows` rows of each query head. Allocates where there was less.
  void reserve(const Shape& shape, index_t rows, index_t slots) {
    if (has_credits()) credits_.reserve(shape.kv_heads, shape.group(), rows, slots);
    if (options_.attention.value_norm) lengths_.reserve(shape.kv_heads, slots);
  }
  /// All heads of the cache were scored in this state of it: what was noted is for plans of this state.
  void noted(std::uint64_t epoch) noexcept {
    credits_.noted(epoch);
    lengths_.noted(epoch);
  }
  /// Credits, and lengths of values, follow the keys that stay. O(kept tokens) a head; no allocation.
  void commit(const KeepPlan& plan, const Shape&) noexcept {
    if (has_credits()) credits_.commit(plan);
    if (options_.attention.value_norm) lengths_.commit(plan);
  }
  [[nodiscard]] std::size_t state_bytes() const noexcept { return credits_.state_bytes() + lengths_.state_bytes(); }
  /// Lengths of values are not saved: they are in the cache.
  template <class Archive>
  void exchange(Archive& archive) {
    archive.expect("orphan_credit is on", has_credits() ? 1 : 0);
    if (has_credits()) credits_.exchange(archive);
    if constexpr (Archive::loading) lengths_.forget();
  }

 private:
  using row_t = detail::OrphanCredits::row_t;

  struct Scratch {
    Scratch(Workspace& work, index_t group, index_t rows, index_t tokens)
        : visible(work.take<slot_t>(group * rows)),
          left(work.take<std::uint8_t>(group * rows)),
          beacons(work.take<float>(tokens)),
          beacon(work.take<slot_t>(tokens)),
          bad_key(work.take<std::uint8_t>(tokens)),
          pooled(work.take<float>(tokens)) {}

    std::span<slot_t> visible;
    std::span<std::uint8_t> left;  // 1 for a row of the last eviction whose beacon has left its bank
    std::span<float> beacons;      // of each key: the largest weight of a beacon
    std::span<slot_t> beacon;      // which row has it
    std::span<std::uint8_t> bad_key;
    std::span<float> pooled;
  };

  /// The part of the spans that the domain has.
  [[nodiscard]] static SplitScores in_domain(const Scratch& s, std::span<float> others, Range domain) {
    const auto first = static_cast<std::size_t>(domain.first);
    const auto size = static_cast<std::size_t>(domain.size());
    return {s.beacons.subspan(first, size), s.beacon.subspan(first, size), others.subspan(first, size),
            s.bad_key.subspan(first, size)};
  }

  /// Leading rows of each head that are beacons.
  [[nodiscard]] static index_t beacons_of(const Observations& observations) noexcept {
    return static_cast<index_t>(observations.tags.size()) / observations.query_heads;
  }

  /// Marks the rows of the last eviction whose beacons are no beacons any more.
  static void mark_left(const detail::OrphanCredits::View& held, std::span<const position_t> now, index_t beacons,
                        std::span<std::uint8_t> left) noexcept {
    const index_t group = held.beacons > 0 ? static_cast<index_t>(held.tags.size()) / held.beacons : 0;
    for (index_t g = 0; g < group; ++g) {
      const std::span<const position_t> of_head =
          now.subspan(static_cast<std::size_t>(g * beacons), static_cast<std::size_t>(beacons));
      auto next = of_head.begin();  // most beacons stay, in their order
      for (index_t r = 0; r < held.beacons; ++r) {
        const position_t tag = held.tags[static_cast<std::size_t>(g * held.beacons + r)];
        const auto found = next != of_head.end() && *next == tag ? next : std::find(of_head.begin(), of_head.end(), tag);
        left[static_cast<std::size_t>(g * held.rows + r)] = found == of_head.end();
        if (found != of_head.end()) next = found + 1;
      }
    }
  }

  template <CacheReader Cache>
  [[nodiscard]] Result<ScoreReport> score_with(const Cache& cache, const Observations& observations, Range candidates,
                                               ScoreMatrix out, Workspace& work, BeaconScorer* notes) const {
    if (!has_credits()) {
      AttentionScorer attention = options_.attention;
      attention.value_norm = false;  // below
      Result<ScoreReport> published = attention.score(cache, observations, candidates, out, work);
      if (published)
        if (Status s = finish(cache, observations, candidates, out, *published, work, notes); !s) return s;
      return published;
    }
    const index_t group = observations.query_heads / out.heads;
    if (group * observations.rows > detail::OrphanCredits::max_rows)
      return detail::invalid("n_beacon + n_recent_queries = ", observations.rows,
                             ": too many rows for orphan_credit in a group of ", group);
    ScoreReport report;
    for (index_t h = 0; h < out.heads; ++h) {
      const Workspace::Frame frame(work);
      Scratch scratch(work, group, std::max(observations.rows, credits_.held(observations.first_query_head / group + h).rows),
                      out.tokens);
      const AttentionQueries queries =
          options_.attention.queries_of_head(cache, observations, h, group, out.tokens,
                                             scratch.visible.first(static_cast<std::size_t>(group * observations.rows)));
      const Range domain = options_.attention.domain(candidates, out.tokens);
      std::fill(out.row(h).begin(), out.row(h).end(), 0.0F);
      std::fill(scratch.beacons.begin(), scratch.beacons.end(), 0.0F);
      std::fill(scratch.bad_key.begin(), scratch.bad_key.end(), std::uint8_t{0});
      AttentionOptions attention = options_.attention.attention;
      attention.pool = {};
      const detail::KeysOfHead<Cache> keys{cache, h, domain, h + 1 < out.heads ? &detail::nothing_ahead : observations.next};
      const Result<ScoreReport> part = split_attention_scores(keys, queries, beacons_of(observations), domain, attention,
                                                              in_domain(scratch, out.row(h), domain), work);
      if (!part) return part;
      report.num_non_finite += part->num_non_finite;
      add_credits(observations, h, group, candidates, out.row(h), scratch, notes);
      if (attention_pools()) {
        const std::span<float> open =
            out.row(h).subspan(static_cast<std::size_t>(candidates.first), static_cast<std::size_t>(candidates.size()));
        detail::pool_in_place(open, options_.attention.attention.pool, scratch.pooled);
      }
      for (std::size_t j = 0; j < scratch.bad_key.size(); ++j)
        if (scratch.bad_key[j] != 0) out.row(h)[j] = detail::quiet_nan();
    }
    if (Status s = finish(cache, observations, candidates, out, report, work, notes); !s) return s;
    return report;
  }

  /// What comes behind the weights of each head: the lengths of its values, and the ranks.
  template <CacheReader Cache>
  [[nodiscard]] Status finish(const Cache& cache, const Observations& observations, Range candidates, ScoreMatrix out,
                              ScoreReport& report, Workspace& work, BeaconScorer* notes) const {
    const index_t first_head = observations.first_query_head / (observations.query_heads / out.heads);
    for (index_t h = 0; h < out.heads; ++h) {
      if (options_.attention.value_norm) {
        const auto multiply = [&](auto& lengths) {
          return lengths.multiply(cache, h, first_head + h, candidates, observations.dim, out.row(h), work);
        };
        const Result<index_t> bad_values = notes != nullptr ? multiply(notes->lengths_) : multiply(lengths_);
        if (!bad_values) return bad_values.status();
        report.num_non_finite += *bad_values;
      }
      if (Status s = detail::mix_with_key_diff(cache, h, candidates, options_.key_diff_share, out.row(h), work); !s) return s;
    }
    return {};
  }

  [[nodiscard]] bool has_credits() const noexcept { return options_.orphan_credit > 0; }
  [[nodiscard]] bool attention_pools() const noexcept { return options_.attention.attention.pool.active(); }

  /// From the weights of recent queries, in `scores`, to scores; and what the keys will remember, to `notes`.
  void add_credits(const Observations& observations, index_t head, index_t group, Range candidates, std::span<float> scores,
                   const Scratch& scratch, BeaconScorer* notes) const noexcept {
    const index_t beacons = beacons_of(observations);
    const index_t kv_head = observations.first_query_head / group + head;
    const std::span<const position_t> tags =
        observations.tags.subspan(static_cast<std::size_t>(head * group * beacons), static_cast<std::size_t>(group * beacons));
    const detail::OrphanCredits::View held = credits_.held(kv_head);
    mark_left(held, tags, beacons, scratch.left);
    const auto first = static_cast<std::size_t>(candidates.first);
    const auto held_first = static_cast<std::size_t>(held.first);
    detail::OrphanCredits::Notes noted;
    if (notes != nullptr)
      noted = notes->credits_.note(kv_head, candidates.first, static_cast<index_t>(scores.size()) - candidates.first,
                                   observations.rows, beacons, tags);
    for (std::size_t j = first; j < scores.size(); ++j) {
      float carried = 0;
      if (const std::size_t i = j - held_first; j >= held_first && i < held.credit.size()) {
        const row_t owner = held.owner[i];
        if (owner == detail::OrphanCredits::orphan || scratch.left[owner] != 0)
          carried = options_.orphan_credit * held.credit[i];
      }
      const float beacon = scratch.beacons[j];
      const bool is_given = beacon > 0 && beacon >= carried;
      const float credit = is_given ? beacon : carried;
      scores[j] = std::max(scores[j], credit);
      if (notes == nullptr) continue;
      noted.credit[j - first] = credit;
      noted.owner[j - first] = is_given ? static_cast<row_t>(scratch.beacon[j]) : detail::OrphanCredits::orphan;
    }
  }

  Options options_{};
  detail::OrphanCredits credits_;
  detail::ValueLengths lengths_;
};

}  // namespace beaconkv::inline v0
