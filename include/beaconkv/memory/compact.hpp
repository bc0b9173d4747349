// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Applying a plan to a cache, in place.

#include <type_traits>

#include "beaconkv/executor.hpp"
#include "beaconkv/keep_plan.hpp"
#include "beaconkv/memory/cache_buffer.hpp"

namespace beaconkv::inline v0 {

namespace detail {

template <CacheBuffer Cache>
[[nodiscard]] Status validate_plan(const Cache& cache, const KeepPlan& plan) {
  if (plan.epoch() != cache.epoch() || plan.tokens_before() != cache.num_tokens())
    return error(StatusCode::stale_plan, "plan was made for another state of the cache (", plan.tokens_before(),
                 " tokens, now ", cache.num_tokens(), "): plan again");
  if (plan.sets() != cache.num_kv_heads() && (plan.sets() != 1 || is_ragged<Cache>()))
    return invalid("plan has ", plan.sets(), " sets: the cache has ", cache.num_kv_heads(), " KV heads");
  if (keeps_one_set<Cache>() && plan.sets() != 1)
    return error(StatusCode::unsupported, "plan has ", plan.sets(), " sets: this cache keeps one set for all heads");
  for (index_t s = 0; s < plan.sets(); ++s) {
    if (!is_ragged<Cache>() && plan.num_kept(s) != plan.num_kept(0))
      return error(StatusCode::unsupported, "head ", s, " keeps ", plan.num_kept(s), " tokens and head 0 keeps ",
                   plan.num_kept(0), ": this cache holds equally many in every head");
    if (is_ragged<Cache>() && plan.tokens_before(s) != tokens_of(cache, s))
      return error(StatusCode::stale_plan, "plan was made where head ", s, " held ", plan.tokens_before(s), " tokens, now ",
                   tokens_of(cache, s), ": plan again");
    const index_t pinned = cache.pinned_prefix();
    if (pinned > 0 && (plan.num_kept(s) < pinned || plan.kept(s)[static_cast<std::size_t>(pinned - 1)] != pinned - 1))
      return invalid("head ", s, " evicts a slot of the pinned prefix of ", pinned, " slots");
  }
  return {};
}

template <CacheBuffer Cache, class Move, Executor ExecutorT>
void apply_plan(Cache& cache, const KeepPlan& plan, Move move, ExecutorT&& executor) {
  const index_t moves = keeps_one_set<Cache>() ? 1 : cache.num_kv_heads();
  executor.run(moves, [&](index_t head, index_t) {
    index_t next = 0;  // slot behind the last run
    plan.for_each_move(head, [&](index_t to, index_t from, index_t count) {
      if constexpr (requires { cache.read_ahead(head, next, count); })
        if (next < from && from - next <= count) cache.read_ahead(head, next, from - next);
      move(head, to, from, count);
      next = from + count;
    });
  });
  if constexpr (is_ragged<Cache>()) {
    for (index_t head = 0; head < moves; ++head) cache.truncate(head, plan.num_kept(head));
  } else {
    cache.truncate(plan.num_kept(0));
  }
}

}  // namespace detail

template <CacheBuffer Cache, class ExecutorT>
requires Executor<std::remove_cvref_t<ExecutorT>>
[[nodiscard]] Status compact(Cache& cache, const KeepPlan& plan, ExecutorT&& executor);

/// Keeps what `plan` keeps, in place and without scratch: every row moves at most once, to a slot not behind its own. O(kept *
/// D) bytes.
///
/// After it, slots are not positions any more: the engine goes on feeding true positions to RoPE (or calls
/// `realign_to_slots`). Refused, with nothing changed, where the plan was made for another state of the cache.
template <CacheBuffer Cache>
[[nodiscard]] Status compact(Cache& cache, const KeepPlan& plan) {
  return compact(cache, plan, SerialExecutor{});
}
/// The same with the KV heads spread over threads: `move_run` is called for different heads at the same time.
template <CacheBuffer Cache, class ExecutorT>
requires Executor<std::remove_cvref_t<ExecutorT>>
[[nodiscard]] Status compact(Cache& cache, const KeepPlan& plan, ExecutorT&& executor) {
  if (Status s = detail::validate_plan(cache, plan); !s) return s;
  if (plan.keeps_all()) return {};
  detail::apply_plan(
      cache, plan, [&](index_t head, index_t to, index_t from, index_t count) { cache.move_run(head, to, from, count); },
      executor);
  return {};
}

/// As `compact`, where the engine has moved the rows by itself (a kernel on a GPU): counts and positions follow, keys and
/// values are not touched.
template <CacheBuffer Cache>
requires requires(Cache& cache, index_t i) { cache.move_books(i, i, i, i); }
[[nodiscard]] Status follow(Cache& cache, const KeepPlan& plan) {
  if (Status s = detail::validate_plan(cache, plan); !s) return s;
  if (plan.keeps_all()) return {};
  detail::apply_plan(
      cache, plan, [&](index_t head, index_t to, index_t from, index_t count) { cache.move_books(head, to, from, count); },
      SerialExecutor{});
  return {};
}

}  // namespace beaconkv::inline v0
