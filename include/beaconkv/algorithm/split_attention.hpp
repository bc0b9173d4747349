// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Attention scores by two kinds of query rows, apart: what each kind gives a key at most, and which row of the first kind it
/// is.

#include "beaconkv/algorithm/attention.hpp"

namespace beaconkv::inline v0 {

/// What `split_attention_scores` writes: one number a key of the domain each.
struct SplitScores {
  std::span<float> leading{};         ///< the largest weight that a leading row gives the key
  std::span<slot_t> leading_row{};    ///< which one does, `head * rows + row`; the lowest among equals
  std::span<float> others{};          ///< the largest weight that another row gives it
  std::span<std::uint8_t> bad_key{};  ///< 1 for a key with a NaN or infinity: it has no weight
};

/// Scratch of `split_attention_scores` over at most `keys` keys.
[[nodiscard]] inline WorkspaceSize split_attention_workspace_size(index_t group, index_t rows, index_t dim, index_t keys) {
  return detail::measure([&](Workspace& work) {
    const detail::AttentionScratch scratch(work, group, rows, dim, keys);
    static_cast<void>(work.take<float>(scratch.total));
    static_cast<void>(work.take<float>(scratch.total));
    static_cast<void>(work.take<std::uint8_t>(scratch.total / detail::lanes));
  });
}

/// As `attention_scores` with maxima over rows and heads and no pool, but the first `leading` rows of each head apart from the
/// others. The larger of both numbers is that function's score, to an ulp. A kind without rows gives 0.
///
/// Errors: options that do not reduce to maxima, sizes that do not match, `work` too small. No allocation.
template <class Keys>
[[nodiscard]] Result<ScoreReport> split_attention_scores(const Keys& keys, const AttentionQueries& queries, index_t leading,
                                                         Range domain, const AttentionOptions& options, const SplitScores& out,
                                                         Workspace& work) {
  const index_t n = domain.size();
  if (Status s = detail::check_attention(queries, domain, domain, options, out.leading.size()); !s) return s;
  if (!detail::reduces_at_once(options) || options.pool.active())
    return detail::error(StatusCode::unsupported,
                         "options: rows are told apart by maxima over queries and heads, without a pool");
  if (leading < 0 || leading > queries.rows)
    return detail::invalid("leading = ", leading, ": must be between 0 and queries.rows = ", queries.rows);
  if (out.leading_row.size() != out.leading.size() || out.others.size() != out.leading.size() ||
      out.bad_key.size() != out.leading.size())
    return detail::invalid("out: its parts must all have ", n, " entries");
  if (Status s = work.require(split_attention_workspace_size(queries.group, queries.rows, queries.dim, n)); !s) return s;

  const Workspace::Frame frame(work);
  const detail::AttentionScratch scratch(work, queries.group, queries.rows, queries.dim, n);
  const std::span<float> of_leading = work.take<float>(scratch.total);
  const std::span<float> of_others = work.take<float>(scratch.total);
  const std::span<std::uint8_t> kinds = work.take<std::uint8_t>(scratch.total / detail::lanes);
  std::fill(kinds.begin(), kinds.end(), std::uint8_t{0});
  const detail::RowLayout rows = detail::row_layout(1, queries.group * queries.rows, detail::lanes);
  ScoreReport report{detail::form_logits(keys, queries, domain, options, rows, rows, scratch)};
  for (index_t at = 0; at < rows.total; ++at) {
    const auto i = static_cast<std::size_t>(at);
    const bool leads = at < rows.rows && at % queries.rows < leading;
    of_leading[i] = leads ? scratch.sum[i] : detail::masked_logit;
    of_others[i] = leads ? detail::masked_logit : scratch.sum[i];
    if (at < rows.rows) {
      std::uint8_t& kind = kinds[i / static_cast<std::size_t>(detail::lanes)];
      kind = static_cast<std::uint8_t>(kind | (leads ? detail::ReduceTwoKinds::has_a : detail::ReduceTwoKinds::has_b));
    }
  }
  detail::run<detail::ReduceTwoKinds>(scratch.logits.data(), n, rows.total, scratch.top.data(), of_leading.data(),
                                      of_others.data(), kinds.data(), out.leading.data(), out.leading_row.data(),
                                      out.others.data());
  std::copy_n(scratch.bad_key.begin(), n, out.bad_key.begin());
  for (const std::uint8_t bad : out.bad_key) report.num_non_finite += bad;
  return report;
}

}  // namespace beaconkv::inline v0
