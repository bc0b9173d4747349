// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Schedules: when a policy evicts, and how many tokens of a head stay. All counts are integers, in tokens of one head.
///
/// A schedule is a small aggregate with `validate(protected)`, `due(state)`, `target(state)` and `committed()`; see the concept
/// `Schedule`. One that counts also has `exchange`, to be saved.

#include <algorithm>
#include <cmath>
#include <concepts>
#include <limits>
#include <optional>
#include <span>

#include "beaconkv/types.hpp"

namespace beaconkv::inline v0 {

/// Where a sequence stands when a schedule is asked.
struct ScheduleState {
  index_t tokens = 0;          ///< cached, of a head
  index_t prefix = 0;          ///< of them: protected prefix
  index_t recent = 0;          ///< the newest ones that are protected (`n_recent_kv`)
  index_t total = 0;           ///< tokens of the sequence so far, evicted ones included
  bool after_prefill = false;  ///< no token was decoded since the last prefill
};

/// `validate(prefix, recent)` names what cannot work, given the prefix where it is known and `n_recent_kv`.
template <class S>
concept Schedule = std::copyable<S> &&
    requires(S schedule, const S& view, const ScheduleState& state, std::optional<index_t> prefix, index_t recent) {
  { view.validate(prefix, recent) } -> std::same_as<Status>;
  { view.due(state) } -> std::same_as<bool>;
  { view.target(state) } -> std::same_as<index_t>;
  { schedule.committed() } -> std::same_as<void>;
};

namespace detail {

/// Names the budget, unless the protected tokens leave room for at least one other.
[[nodiscard]] inline Status room_for_choice(const char* name, index_t budget, index_t prefix, index_t recent) {
  if (budget < 1) return invalid(name, " = ", budget, ": must be at least 1");
  if (recent >= budget) return invalid("n_recent_kv = ", recent, ": must be below ", name, " = ", budget);
  if (prefix > 0 && prefix >= budget - recent)
    return invalid("n_prefix = ", prefix, " and n_recent_kv = ", recent, ": together they must be below ", name, " = ", budget);
  return {};
}

}  // namespace detail

/// BeaconKV's rule, and the fair one for comparisons: once `max` tokens are counted, cut down to `min`.
struct FixedBudget {
  index_t max = 0;
  std::optional<index_t> min{};  ///< default 7/8 of `max`, rounded down
  /// False: the budget counts generated tokens, and the protected prefix lies on top. True: it counts everything.
  bool counts_prefix = false;

  [[nodiscard]] constexpr index_t lower() const noexcept { return min.value_or(max - max / 8 - (max % 8 != 0 ? 1 : 0)); }

  [[nodiscard]] Status validate(std::optional<index_t> prefix, index_t recent) const {
    if (max < 1) return detail::invalid("budget.max = ", max, ": must be at least 1");
    if (lower() > max) return detail::invalid("budget.min = ", lower(), ": must not be above budget.max = ", max);
    return detail::room_for_choice("budget.min", lower(), counts_prefix ? prefix.value_or(0) : 0, recent);
  }
  [[nodiscard]] bool due(const ScheduleState& state) const noexcept {
    const index_t counted = state.tokens - (counts_prefix ? 0 : state.prefix);
    return counted >= max && counted > lower();
  }
  [[nodiscard]] index_t target(const ScheduleState& state) const noexcept {
    const index_t on_top = counts_prefix ? 0 : state.prefix;
    return lower() > state.tokens - on_top ? state.tokens : lower() + on_top;
  }
  void committed() noexcept {}
};

/// SnapKV's rule: the prompt is cut to `tokens` once it has been read. While decoding nothing goes (as published), unless
/// `interval` is set: then whenever `tokens + interval` are cached.
struct PromptBudget {
  index_t tokens = 0;
  std::optional<index_t> interval{};

  [[nodiscard]] Status validate(std::optional<index_t> prefix, index_t recent) const {
    if (interval && *interval < 1) return detail::invalid("budget.interval = ", *interval, ": must be at least 1");
    return detail::room_for_choice("budget.tokens", tokens, prefix.value_or(0), recent);
  }
  [[nodiscard]] bool due(const ScheduleState& state) const noexcept {
    if (state.tokens <= tokens) return false;
    return state.after_prefill || (interval && state.tokens - tokens >= *interval);
  }
  [[nodiscard]] index_t target(const ScheduleState& state) const noexcept {
    return tokens < state.tokens ? tokens : state.tokens;
  }
  void committed() noexcept {}
};

/// R-KV's rule: the prompt is cut to `tokens`; later the token after every `interval`-th of the sequence triggers a cut to
/// `tokens`, if so many are cached. (The published code sets a flag when the length is a multiple and compresses in the next
/// step.)
struct IntervalBudget {
  index_t tokens = 0;
  index_t interval = 128;

  [[nodiscard]] Status validate(std::optional<index_t> prefix, index_t recent) const {
    if (interval < 1) return detail::invalid("budget.interval = ", interval, ": must be at least 1");
    return detail::room_for_choice("budget.tokens", tokens, prefix.value_or(0), recent);
  }
  [[nodiscard]] bool due(const ScheduleState& state) const noexcept {
    return state.tokens >= tokens && (state.after_prefill || (state.total - 1) % interval == 0);
  }
  [[nodiscard]] index_t target(const ScheduleState& state) const noexcept {
    return tokens < state.tokens ? tokens : state.tokens;
  }
  void committed() noexcept {}
};

/// RPC's rule: every `period` generated tokens, keep `period / ratio` more of them than last time (rounded down). The prompt
/// and the newest `n_recent_kv` tokens lie on top. So the cache still grows, by `period / ratio` a period: no upper limit.
struct GrowingBudget {
  index_t period = 1024;
  index_t ratio = 4;
  index_t evictions = 0;  ///< done so far; begins at 0

  [[nodiscard]] constexpr index_t step() const noexcept { return period / ratio; }

  [[nodiscard]] Status validate(std::optional<index_t>, index_t) const {
    if (period < 1) return detail::invalid("budget.period = ", period, ": must be at least 1");
    if (ratio < 2 || ratio > period)
      return detail::invalid("budget.ratio = ", ratio, ": must be between 2 and budget.period = ", period);
    if (evictions < 0) return detail::invalid("budget.evictions = ", evictions, ": must not be negative");
    return {};
  }
  [[nodiscard]] bool due(const ScheduleState& state) const noexcept {
    return !state.after_prefill && state.tokens - state.prefix - state.recent >= evictions * step() + period;
  }
  [[nodiscard]] index_t target(const ScheduleState& state) const noexcept {
    const index_t kept = state.prefix + (evictions + 1) * step() + state.recent;
    return kept < state.tokens ? kept : state.tokens;
  }
  void committed() noexcept { ++evictions; }
  template <class Archive>
  void exchange(Archive& archive) {
    archive.value("evictions", evictions, 0, std::numeric_limits<std::int32_t>::max());
  }
};

static_assert(Schedule<FixedBudget> && Schedule<PromptBudget> && Schedule<IntervalBudget> && Schedule<GrowingBudget>);

/// How many of `tokens` are left where a share of them goes: `tokens - round(tokens * pruned)`, halves rounded away from zero,
/// and at least one of any. For those who think in ratios; budgets themselves are counts.
[[nodiscard]] inline Result<index_t> tokens_after_pruning(index_t tokens, double pruned) {
  if (tokens < 0) return detail::invalid("tokens = ", tokens, ": must not be negative");
  if (!(pruned >= 0 && pruned <= 1)) return detail::invalid("pruned = ", pruned, ": must be between 0 and 1");
  const auto gone = static_cast<index_t>(std::llround(static_cast<double>(tokens) * pruned));
  return std::max(tokens - gone, std::min<index_t>(1, tokens));
}

/// Budgets of layers that shrink evenly from the first to the last (PyramidKV, arXiv 2406.02069), to `out`, one a layer. They
/// include the window. The last layer gets a `beta`-th of the mean beside its window, at least 1; the sum is at most `mean`
/// times the layers. What a short sequence leaves of a budget is not given to other layers.
[[nodiscard]] inline Status pyramid_budgets(index_t mean, index_t window, index_t beta, std::span<index_t> out) {
  const auto layers = static_cast<index_t>(out.size());
  if (window < 0) return detail::invalid("window = ", window, ": must not be negative");
  if (beta < 1) return detail::invalid("beta = ", beta, ": must be at least 1");
  if (mean <= window) return detail::invalid("mean = ", mean, ": must be above window = ", window);
  const index_t least = std::max<index_t>(1, (mean - window) / beta);
  const index_t most = 2 * (mean - window) - least;
  for (index_t l = 0; l < layers; ++l) {  // rounded down
    const index_t less = layers > 1 ? (l * (most - least) + layers - 2) / (layers - 1) : mean - window - least;
    out[static_cast<std::size_t>(l)] = window + most - less;
  }
  return {};
}

/// The same as kvpress's PyramidKV has it: budgets of one sequence of `tokens`, none beyond it. The first layer gets at most
/// `tokens - window` and the last what keeps the mean; where the last would be less than the window, every layer gets the mean.
/// Rounded to the nearest, halves to even. `mean` may be a fraction, as a share of the tokens is.
[[nodiscard]] inline Status pyramid_budgets_of_prompt(double mean, index_t tokens, index_t window, index_t beta,
                                                      std::span<index_t> out) {
  const auto length = static_cast<double>(tokens);
  if (tokens < 0) return detail::invalid("tokens = ", tokens, ": must not be negative");
  if (!(mean >= 0 && mean <= length)) return detail::invalid("mean = ", mean, ": must be between 0 and tokens = ", tokens);
  if (window < 0) return detail::invalid("window = ", window, ": must not be negative");
  if (beta < 1) return detail::invalid("beta = ", beta, ": must be at least 1");
  const auto rounded = [](double x) {
    const double below = std::floor(x);
    const auto whole = static_cast<index_t>(below);
    return x - below > 0.5 || (x - below == 0.5 && whole % 2 != 0) ? whole + 1 : whole;
  };
  const auto least = static_cast<double>(window);
  double last = mean / static_cast<double>(beta);
  double first = 2 * mean - last;
  if (first >= length - least) {
    first = length - least;
    last = 2 * mean - first;
  }
  const bool even = out.size() < 2 || !(length >= first && first >= last && last >= least);
  for (std::size_t l = 0; l < out.size(); ++l)
    out[l] = rounded(even ? mean : first - static_cast<double>(l) * (first - last) / static_cast<double>(out.size() - 1));
  return {};
}

/// How many tokens fit into `bytes`, where a token takes `bytes_per_token` (see `PlaneCache::bytes_per_token`): rounded down.
[[nodiscard]] inline Result<index_t> tokens_in_bytes(std::int64_t bytes, index_t bytes_per_token) {
  if (bytes < 0) return detail::invalid("bytes = ", bytes, ": must not be negative");
  if (bytes_per_token < 1) return detail::invalid("bytes_per_token = ", bytes_per_token, ": must be at least 1");
  return static_cast<index_t>(bytes / bytes_per_token);
}

}  // namespace beaconkv::inline v0
