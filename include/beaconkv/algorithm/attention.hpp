// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// How much a few observed queries attend to each cached key: the score that SnapKV, RPC, R-KV and BeaconKV are made of.
///
/// Softmax per query row over a range of keys, then one number a key: reduced over the query rows of a head, smoothed over
/// neighbours if asked, reduced over the query heads of the KV head's group.

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <span>

#include "beaconkv/algorithm/pooling.hpp"
#include "beaconkv/detail/numeric.hpp"
#include "beaconkv/kernel/softmax.hpp"
#include "beaconkv/workspace.hpp"

namespace beaconkv::inline v0 {

/// Which smoothing comes first: of each query head's scores, or of the scores of the KV head. The same for an average pool, up
/// to rounding; not for a max pool.
enum class PoolStage : std::uint8_t { query_head, kv_head };

/// Everything in which the published attention scores differ.
struct AttentionOptions {
  Reduce over_queries = Reduce::max;             ///< over the rows of a query head
  Reduce over_heads = Reduce::max;               ///< over the query heads of a group: max or mean
  GroupStage group_stage = GroupStage::weights;  ///< `logits`: the group meets before the softmax
  Pool pool{};
  PoolStage pool_stage = PoolStage::kv_head;
  std::optional<float> scale{};          ///< of the logits; default 1 / sqrt(dim)
  std::optional<float> logit_softcap{};  ///< c: logits become `c * tanh(logit / c)`
};

[[nodiscard]] inline Status validate(const AttentionOptions& options) {
  if (options.over_heads == Reduce::sum) return detail::invalid("over_heads = sum: must be max or mean");
  if (options.scale && !(*options.scale > 0 && detail::is_finite(*options.scale)))
    return detail::invalid("scale = ", *options.scale, ": must be positive");
  if (options.logit_softcap && !(*options.logit_softcap > 0 && detail::is_finite(*options.logit_softcap)))
    return detail::invalid("logit_softcap = ", *options.logit_softcap, ": must be positive");
  return validate(options.pool);
}

/// Observed queries of the heads of one group, rotated: `[group][rows][dim]`, dense.
struct AttentionQueries {
  const float* data = nullptr;
  index_t group = 0;
  index_t rows = 0;
  index_t dim = 0;
  /// `[group][rows]`: how many leading keys each row may see (the causal mask, since keys are in time order).
  std::span<const slot_t> visible{};
  /// `[group]` or empty: a logit of each head that takes its share of every softmax and belongs to no key (learned sinks).
  std::span<const float> sink_logits{};
};

struct ScoreReport {
  index_t num_non_finite = 0;  ///< key and query rows with a NaN or infinity
};

namespace detail {

/// Keys are read in tiles of this many rows at most: few enough that a tile's logits stay in a core's own cache.
inline constexpr index_t tile_keys = 96;

/// How the query rows of a group lie in the kernels' scratch: `heads` times `padded` rows, `rows` of them real.
struct RowLayout {
  index_t heads = 0;
  index_t rows = 0;
  index_t padded = 0;
  index_t total = 0;

  /// Calls `f(at, row)` for each row of the group: where it stands, ascending, and its number. What lies between is padding.
  template <class F>
  void for_each_row(F&& f) const {
    for (index_t h = 0; h < heads; ++h)
      for (index_t r = 0; r < rows; ++r) f(h * padded + r, h * rows + r);
  }
};

[[nodiscard]] constexpr RowLayout row_layout(index_t heads, index_t rows, index_t unit) noexcept {
  const index_t padded = round_up(rows, unit);
  return {heads, rows, padded, round_up(heads * padded, lanes)};
}

/// Where queries and heads both reduce to their maximum, and nothing comes between, the group is one head with many rows.
[[nodiscard]] inline bool reduces_at_once(const AttentionOptions& options) noexcept {
  return options.over_queries == Reduce::max && options.over_heads == Reduce::max &&
         options.group_stage == GroupStage::weights && (!options.pool.active() || options.pool_stage == PoolStage::kv_head);
}

struct AttentionScratch {
  AttentionScratch(Workspace& work, index_t group, index_t rows, index_t dim, index_t keys)
      : total(group * round_up(rows, lanes)),
        packed(work.take<float>(total * dim)),
        decoded(work.take<float>(tile_keys * dim)),
        tile(work.take<float>(tile_keys * total)),
        logits(work.take<float>(keys * total)),
        top(work.take<float>(total)),
        sum(work.take<float>(total)),
        visible(work.take<slot_t>(total)),
        column(work.take<float>(keys)),
        pooled(work.take<float>(keys)),
        bad_key(work.take<std::uint8_t>(keys)) {}

  index_t total;  // the most rows that any options lay out
  std::span<float> packed;
  std::span<float> decoded;
  std::span<float> tile;    // of all heads, where they meet in their logits
  std::span<float> logits;  // [keys][rows]
  std::span<float> top;     // of each row: its largest logit
  std::span<float> sum;     // of each row: of exp(logit - top), then -log of it
  std::span<slot_t> visible;
  std::span<float> column;
  std::span<float> pooled;
  std::span<std::uint8_t> bad_key;
};

/// The logits of a tile: capped, and masked where the row does not see the key or something is not finite.
class LogitTile {
 public:
  LogitTile(const AttentionQueries& queries, const AttentionOptions& options, const RowLayout& layout,
            const AttentionScratch& scratch)
      : dim_(queries.dim),
        total_(layout.total),
        packed_(scratch.packed.data()),
        visible_(scratch.visible.data()),
        softcap_(options.logit_softcap) {
    const float scale = options.scale.value_or(1.0F / std::sqrt(static_cast<float>(queries.dim)));
    run<PackRows>(queries.data, layout.heads, layout.rows, layout.padded, layout.total, queries.dim, scale,
                  scratch.packed.data());
    std::fill(scratch.visible.begin(), scratch.visible.end(), std::numeric_limits<slot_t>::max());
    layout.for_each_row([&](index_t at, index_t row) {
      const slot_t seen = queries.visible[static_cast<std::size_t>(row)];
      scratch.visible[static_cast<std::size_t>(at)] = seen;
      all_see_below_ = std::min<index_t>(all_see_below_, std::max<slot_t>(seen, 0));
    });
  }

  /// `out` [keys.rows][total]; `first` is the slot of the first key. Marks keys that are not finite. Returns whether all
  /// products were finite: then all queries are. Asks for `ahead` meanwhile.
  [[nodiscard]] bool fill(const ConstRows& keys, index_t first, const MemoryAhead& ahead, float* out,
                          std::uint8_t* bad_key) const {
    std::fill(bad_key, bad_key + keys.rows, std::uint8_t{0});
    bool not_finite = total_ == 0;
    run<Products>(packed_, total_, dim_, keys.data, keys.stride, keys.rows, out, &not_finite, &ahead);
    if (not_finite) mask_non_finite(keys, out, bad_key);  // before the cap, which makes infinities finite
    if (softcap_) run<CapLogits>(out, keys.rows * total_, *softcap_);
    const index_t all_see = std::clamp<index_t>(all_see_below_ - first, 0, keys.rows);
    if (all_see < keys.rows) run<MaskUnseen>(out + all_see * total_, first + all_see, keys.rows - all_see, total_, visible_);
    return !not_finite;
  }

 private:
  void mask_non_finite(const ConstRows& keys, float* out, std::uint8_t* bad_key) const {
    for (index_t j = 0; j < keys.rows; ++j) {
      bad_key[j] = all_finite(keys.row(j), keys.dim) ? 0 : 1;
      for (index_t r = 0; r < total_; ++r)
        if (bad_key[j] != 0 || !is_finite(out[j * total_ + r])) out[j * total_ + r] = masked_logit;
    }
  }

  index_t dim_;
  index_t total_;
  const float* packed_;
  const slot_t* visible_;
  std::optional<float> softcap_;
  index_t all_see_below_ = std::numeric_limits<slot_t>::max();
};

/// Sums of exponentials become what is added to `logit - top` to make it the logarithm of a weight: masked for padding, and for
/// a row that sees nothing. `sinks` [heads] or empty takes part in the sums.
inline void log_of_sums(const RowLayout& layout, std::span<const float> sinks, const AttentionScratch& scratch) noexcept {
  index_t next = 0;
  layout.for_each_row([&](index_t at, index_t row) {
    for (; next < at; ++next) scratch.sum[static_cast<std::size_t>(next)] = masked_logit;
    ++next;
    const float top = scratch.top[static_cast<std::size_t>(at)];
    float& sum = scratch.sum[static_cast<std::size_t>(at)];
    if (top <= masked_logit) {
      sum = masked_logit;
      return;
    }
    if (!sinks.empty()) {
      const float sink =
          sinks[static_cast<std::size_t>(row * static_cast<index_t>(sinks.size()) / (layout.heads * layout.rows))];
      sum += std::exp(std::min(sink - top, 80.0F));
    }
    sum = -std::log(sum);
  });
  for (; next < layout.total; ++next) scratch.sum[static_cast<std::size_t>(next)] = masked_logit;
}

/// What is wrong with the options, or with sizes that do not match.
[[nodiscard]] inline Status check_attention(const AttentionQueries& queries, Range domain, Range pooled,
                                            const AttentionOptions& options, std::size_t out_size) {
  if (Status s = validate(options); !s) return s;
  if (queries.group < 1 || queries.rows < 0 || queries.dim < 1)
    return invalid("queries: group = ", queries.group, ", rows = ", queries.rows, ", dim = ", queries.dim,
                   ": must be positive");
  if (static_cast<index_t>(queries.visible.size()) != queries.group * queries.rows)
    return invalid("queries.visible has ", queries.visible.size(), " entries: ", queries.group * queries.rows, " are needed");
  if (!queries.sink_logits.empty()) {
    if (static_cast<index_t>(queries.sink_logits.size()) != queries.group)
      return invalid("queries.sink_logits has ", queries.sink_logits.size(), " entries: ", queries.group, " are needed");
    if (options.group_stage == GroupStage::logits)
      return error(StatusCode::unsupported, "sink_logits: heads that meet in their logits share no softmax with them");
  }
  if (domain.first < 0 || domain.size() < 0)
    return invalid("domain = [", domain.first, ", ", domain.last, "): must be ascending");
  if (pooled.first < domain.first || pooled.last > domain.last || pooled.size() < 0)
    return invalid("pooled = [", pooled.first, ", ", pooled.last, "): must lie in the domain [", domain.first, ", ",
                   domain.last, ")");
  if (static_cast<index_t>(out_size) != domain.size())
    return invalid("out has ", out_size, " numbers: the domain has ", domain.size());
  return {};
}

/// Query rows with a NaN or infinity.
[[nodiscard]] inline index_t num_non_finite_rows(const AttentionQueries& queries) noexcept {
  index_t count = 0;
  for (index_t r = 0; r < queries.group * queries.rows; ++r)
    count += all_finite(queries.data + r * queries.dim, queries.dim) ? 0 : 1;
  return count;
}

/// The logits of all keys of the domain, and what makes them weights, to `scratch`: laid out by `rows`, or by `kept` where the
/// group has met in its logits. Returns how many query rows are not finite.
template <class Keys>
[[nodiscard]] index_t form_logits(const Keys& keys, const AttentionQueries& queries, Range domain,
                                  const AttentionOptions& options, const RowLayout& rows, const RowLayout& kept,
                                  const AttentionScratch& scratch) {
  const index_t n = domain.size();
  const bool meet_in_logits = options.group_stage == GroupStage::logits;
  const LogitTile logit_tile(queries, options, rows, scratch);
  std::fill(scratch.top.begin(), scratch.top.end(), masked_logit);
  std::fill(scratch.sum.begin(), scratch.sum.end(), 0.0F);
  bool all_finite = n > 0;
  for (index_t j = 0; j < n; j += tile_keys) {
    const index_t count = std::min(tile_keys, n - j);
    const ConstRows tile = keys(domain.first + j, count, scratch.decoded.data());
    float* const logits = scratch.logits.data() + j * kept.total;
    float* const filled = meet_in_logits ? scratch.tile.data() : logits;
    MemoryAhead ahead;
    if constexpr (requires { keys.ahead(j, count); }) ahead = keys.ahead(domain.first + j, count);
    all_finite = logit_tile.fill(tile, domain.first + j, ahead, filled, scratch.bad_key.data() + j) && all_finite;
    if (meet_in_logits)
      run<ReduceGroup>(filled, count, rows.heads, rows.padded, rows.total, options.over_heads == Reduce::mean, logits,
                       kept.total);
    run<AddToSoftmax>(logits, count, kept.total, scratch.top.data(), scratch.sum.data());
  }
  log_of_sums(kept, queries.sink_logits, scratch);
  return all_finite ? 0 : num_non_finite_rows(queries);
}

inline void pool_in_place(std::span<float> scores, const Pool& pool, std::span<float> scratch) noexcept {
  if (!pool.active()) return;
  const std::span<float> pooled = scratch.first(scores.size());
  pool_scores(scores, pool, pooled);
  std::copy(pooled.begin(), pooled.end(), scores.begin());
}

}  // namespace detail

/// Scratch of `attention_scores` over at most `keys` keys: their logits, 4 bytes a key and row (`rows` in whole multiples of
/// 16, for each head of the group), and little else.
[[nodiscard]] inline WorkspaceSize attention_workspace_size(index_t group, index_t rows, index_t dim, index_t keys) {
  return detail::measure([&](Workspace& work) { static_cast<void>(detail::AttentionScratch(work, group, rows, dim, keys)); });
}

/// Scores of the keys `[domain.first, domain.last)` of one KV head, to `out` (one number a key of the domain).
///
/// \param keys `keys(first, count, scratch) -> ConstRows` gives rows of `queries.dim` floats.
/// \param domain the keys that share each row's softmax.
/// \param pooled the part of the domain that the pool smooths, as if nothing stood beside it; the rest is left as it is.
///
/// Where there is `keys.ahead(first, count) -> MemoryAhead`, that memory is asked for while these keys are multiplied.
/// A row that sees no key contributes 0; it still counts as a row in a mean. A key with a NaN or infinity gets the score NaN
/// and no weight; a query row with one has no weight. Both are counted. A finite row does not see a finite key whose product
/// with it leaves the range of float. Float arithmetic, sums in a fixed order; no allocation. O(group * rows * keys * dim).
/// Errors: bad options, sizes that do not match, `work` too small.
template <class Keys>
[[nodiscard]] Result<ScoreReport> attention_scores(const Keys& keys, const AttentionQueries& queries, Range domain,
                                                   Range pooled, const AttentionOptions& options, std::span<float> out,
                                                   Workspace& work) {
  const index_t n = domain.size();
  if (Status s = detail::check_attention(queries, domain, pooled, options, out.size()); !s) return s;
  if (Status s = work.require(attention_workspace_size(queries.group, queries.rows, queries.dim, n)); !s) return s;

  const Workspace::Frame frame(work);
  const detail::AttentionScratch scratch(work, queries.group, queries.rows, queries.dim, n);
  const bool meet_in_logits = options.group_stage == GroupStage::logits;
  const detail::RowLayout rows = detail::reduces_at_once(options)
                                     ? detail::row_layout(1, queries.group * queries.rows, detail::lanes)
                                 : meet_in_logits ? detail::row_layout(queries.group, queries.rows, 4)
                                                  : detail::row_layout(queries.group, queries.rows, detail::lanes);
  const detail::RowLayout kept = meet_in_logits ? detail::row_layout(1, queries.rows, detail::lanes) : rows;
  ScoreReport report{detail::form_logits(keys, queries, domain, options, rows, kept, scratch)};

  const auto poolable = [&](std::span<float> scores) {
    return scores.subspan(static_cast<std::size_t>(pooled.first - domain.first), static_cast<std::size_t>(pooled.size()));
  };
  const float divisor = options.over_queries == Reduce::mean ? static_cast<float>(queries.rows) : 1.0F;
  std::fill(out.begin(), out.end(), 0.0F);
  for (index_t h = 0; h < kept.heads && queries.rows > 0; ++h) {
    const auto reduce = [&](auto kernel) {
      detail::run<decltype(kernel)>(scratch.logits.data(), n, kept.total, h * kept.padded,
                                    detail::round_up(kept.rows, detail::lanes), scratch.top.data(), scratch.sum.data(), divisor,
                                    scratch.column.data());
    };
    if (options.over_queries == Reduce::max)
      reduce(detail::ReduceRows<false>{});
    else
      reduce(detail::ReduceRows<true>{});
    if (options.pool_stage == PoolStage::query_head)
      detail::pool_in_place(poolable(scratch.column), options.pool, scratch.pooled);
    for (std::size_t j = 0; j < out.size(); ++j)
      out[j] = options.over_heads == Reduce::max ? std::max(out[j], scratch.column[j]) : out[j] + scratch.column[j];
  }
  if (options.over_heads == Reduce::mean)
    for (float& x : out) x *= 1.0F / static_cast<float>(kept.heads);  // under -ffast-math quotients of equals may differ
  if (options.pool_stage == PoolStage::kv_head) detail::pool_in_place(poolable(out), options.pool, scratch.pooled);

  for (std::size_t j = 0; j < out.size(); ++j)
    if (scratch.bad_key[j] != 0) {
      out[j] = detail::quiet_nan();
      ++report.num_non_finite;
    }
  return report;
}

}  // namespace beaconkv::inline v0
