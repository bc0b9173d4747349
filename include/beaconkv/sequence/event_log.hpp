// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Every eviction as data: which positions went and which stayed, with which scores, and which queries had asked for them.

#include <ctime>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "beaconkv/policy/evict.hpp"

namespace beaconkv::inline v0 {

/// A token in an eviction.
struct LoggedToken {
  position_t position = 0;
  std::optional<float> score{};  ///< none: it did not compete (protected, or newer than the scores)
};

/// The positions of the queries that a query head scored with.
struct QueryOrigins {
  std::vector<position_t> beacons{};  ///< in the order in which they became old enough
  std::vector<position_t> recent{};   ///< ascending; the newest twice where the policy counts it twice
};

/// What an eviction did to one KV head. Positions ascend.
struct HeadEvent {
  std::vector<LoggedToken> evicted{};
  std::vector<LoggedToken> kept{};
  std::vector<QueryOrigins> queries{};  ///< of each query head of the KV head
};

/// An eviction of one layer.
struct EvictionEvent {
  position_t step = 0;  ///< position of the newest token that the policy had seen when it evicted
  index_t layer = 0;
  double seconds = 0;              ///< plan, moves and commit, in all slices; the log's own work aside
  std::int64_t bytes_freed = 0;    ///< of keys and values; 0 where the cache does not say `bytes_per_token`
  std::vector<HeadEvent> heads{};  ///< of each KV head, also where all keep one set
};

/// The evictions of a sequence, or of policies that are evicted by themselves, in the order in which they happened; those of
/// one decode step by layer. Evictions that removed nothing are not among them.
///
/// Logging is off unless asked for, and then allocates: about 40 bytes a cached token and head at each eviction, and a copy of
/// the observer, for the origins of its queries. What is evicted does not change.
class EventLog {
 public:
  [[nodiscard]] const std::vector<EvictionEvent>& events() const noexcept { return events_; }
  /// What was logged so far; the log is empty afterwards.
  [[nodiscard]] std::vector<EvictionEvent> take() noexcept { return std::exchange(events_, {}); }
  void clear() noexcept { events_.clear(); }
  /// Allocates.
  void add(EvictionEvent event) { events_.push_back(std::move(event)); }

 private:
  std::vector<EvictionEvent> events_;
};

namespace detail {

/// Seconds since some moment, by a clock that only goes forward where there is one. `<chrono>` would bring streams along.
[[nodiscard]] inline double seconds_now() noexcept {
  std::timespec time{};
#ifdef CLOCK_MONOTONIC
  clock_gettime(CLOCK_MONOTONIC, &time);
#else
  static_cast<void>(std::timespec_get(&time, TIME_UTC));
#endif
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

/// Where the queries come from that the policy would score with now, of each query head. Observers tell by `num_recent` and
/// `recent_position`, and by `pool_size` and `pool_position` once `commit` has sampled the pool; others have no origins.
template <class PolicyT>
[[nodiscard]] std::vector<QueryOrigins> origins_of(const PolicyT& policy) {
  const auto& observer = policy.observer();
  auto sampled = observer;
  std::vector<QueryOrigins> origins(static_cast<std::size_t>(policy.shape().query_heads));
  if (!sampled.commit().ok()) return origins;
  for (std::size_t h = 0; h < origins.size(); ++h) {
    if constexpr (requires { sampled.pool_position(index_t{}, index_t{}); })
      for (index_t i = 0; i < sampled.pool_size(); ++i)
        origins[h].beacons.push_back(sampled.pool_position(static_cast<index_t>(h), i));
    if constexpr (requires { observer.recent_position(index_t{}); })
      for (index_t i = 0; i < observer.num_recent(); ++i) origins[h].recent.push_back(observer.recent_position(i));
  }
  return origins;
}

/// The plan as an event, before it is applied. Allocates.
template <class PolicyT, class CacheT>
[[nodiscard]] EvictionEvent event_of(index_t layer, const PolicyT& policy, const CacheT& cache, const KeepPlan& plan,
                                     std::vector<QueryOrigins> origins) {
  EvictionEvent event{.step = policy.next_position() - 1, .layer = layer};
  index_t evicted = 0;
  for (index_t h = 0; h < cache.num_kv_heads(); ++h) {
    const std::span<const std::optional<float>> scores = plan.slot_scores(h);
    const std::span<const slot_t> kept = plan.kept(h);
    HeadEvent head;
    std::size_t next = 0;  // in `kept`
    for (index_t slot = 0; slot < plan.tokens_before(h); ++slot) {
      const bool stays = next < kept.size() && kept[next] == slot;
      next += stays ? 1 : 0;
      (stays ? head.kept : head.evicted)
          .push_back({cache.position(h, slot), scores.empty() ? std::nullopt : scores[static_cast<std::size_t>(slot)]});
    }
    evicted += plan.num_evicted(h);
    const index_t group = policy.shape().group();
    for (index_t q = h * group; q < (h + 1) * group && q < static_cast<index_t>(origins.size()); ++q)
      head.queries.push_back(std::move(origins[static_cast<std::size_t>(q)]));
    event.heads.push_back(std::move(head));
  }
  if constexpr (requires { cache.bytes_per_token(); })
    event.bytes_freed = cache.bytes_per_token() / cache.num_kv_heads() * evicted;
  return event;
}
template <class PolicyT, class CacheT>
[[nodiscard]] EvictionEvent event_of(index_t layer, const PolicyT& policy, const CacheT& cache, const KeepPlan& plan) {
  return event_of(layer, policy, cache, plan, origins_of(policy));
}

/// `evict_by`, and what it did as `event`, which stays empty where nothing went. `make_event(plan)` is called between the
/// decision and the moves. Allocates.
template <class Policy, class MakePlan, class Apply, class MakeEvent>
[[nodiscard]] Result<EvictionReport> evict_logged(Policy& policy, Workspace& work, MakePlan make_plan, Apply apply,
                                                  MakeEvent make_event, std::optional<EvictionEvent>& event) {
  double aside = 0;
  const double start = seconds_now();
  const bool recorded = work.plan().records_scores();
  work.plan().record_scores(true);
  Result<EvictionReport> report = evict_by(policy, work, make_plan, [&](const KeepPlan& plan) {
    const double before = seconds_now();
    event = make_event(plan);
    aside = seconds_now() - before;
    return apply(plan);
  });
  work.plan().record_scores(recorded);
  if (!report || report->evicted == 0)
    event.reset();
  else
    event->seconds += seconds_now() - start - aside;
  return report;
}

/// The log that a `Sequence` writes, and the eviction that is in slices. A copy of the sequence writes to none, and an
/// assignment changes nothing here: forks may evict at the same time.
class LogHandle {
 public:
  LogHandle() = default;
  LogHandle(const LogHandle&) noexcept {}
  LogHandle(LogHandle&& other) noexcept = default;
  LogHandle& operator=(const LogHandle& other) noexcept {
    if (this != &other) forget_slices();
    return *this;
  }
  ~LogHandle() = default;

  [[nodiscard]] EventLog* get() const noexcept { return log_; }
  void set(EventLog* log) noexcept {
    log_ = log;
    forget_slices();
  }

  /// `evict_by`, and with a log what it did as `event`.
  template <class PolicyT, class CacheT, class MakePlan, class Apply>
  [[nodiscard]] Result<EvictionReport> evict(index_t layer, PolicyT& policy, const CacheT& cache, Workspace& work, bool sliced,
                                             MakePlan make_plan, Apply apply, std::optional<EvictionEvent>& event) {
    if (log_ == nullptr) return evict_by(policy, work, make_plan, apply);
    const auto make_event = [&](const KeepPlan& plan) {
      EvictionEvent made =
          event_of(layer, policy, cache, plan, sliced ? std::exchange(sliced_origins_, {}) : origins_of(policy));
      if (sliced) made.seconds = std::exchange(sliced_seconds_, 0);
      return made;
    };
    return evict_logged(policy, work, make_plan, apply, make_event, event);
  }
  void add(std::optional<EvictionEvent>& event) {
    if (log_ != nullptr && event) log_->add(std::move(*event));
    event.reset();
  }

  /// An eviction in slices begins: the queries are those of now.
  template <class PolicyT>
  void begin_slices(const PolicyT& policy) {
    if (log_ != nullptr) sliced_origins_ = origins_of(policy);
    sliced_seconds_ = 0;
  }
  void forget_slices() noexcept {
    sliced_origins_.clear();
    sliced_seconds_ = 0;
  }
  /// 0 without a log: nobody looks at the clock then.
  [[nodiscard]] double now() const noexcept { return log_ != nullptr ? seconds_now() : 0; }
  void add_slice(double start) noexcept { sliced_seconds_ += now() - start; }

 private:
  EventLog* log_ = nullptr;
  std::vector<QueryOrigins> sliced_origins_{};
  double sliced_seconds_ = 0;
};

}  // namespace detail

/// `evict(policy, cache, work)`, taken down in `log` as an eviction of `layer`. Allocates.
template <class Policy, CacheBuffer Cache>
[[nodiscard]] Result<EvictionReport> evict(Policy& policy, Cache& cache, Workspace& work, EventLog& log, index_t layer = 0) {
  std::optional<EvictionEvent> event;
  Result<EvictionReport> report = detail::evict_logged(
      policy, work, [&](KeepPlan& plan) { return policy.plan(cache, work, plan); },
      [&](const KeepPlan& plan) { return compact(cache, plan); },
      [&](const KeepPlan& plan) { return detail::event_of(layer, policy, cache, plan); }, event);
  if (event) log.add(std::move(*event));
  return report;
}

}  // namespace beaconkv::inline v0
