// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// A library policy on all layers of a session.

#include <algorithm>
#include <numeric>
#include <optional>
#include <span>

#include "beaconkv/beaconkv.hpp"
#include "policy_lab/policies.hpp"

namespace beaconkv::lab {

using engine::Session;
using MadePolicy = Result<std::unique_ptr<ModelPolicy>>;

[[nodiscard]] inline Plane<float> plane_of(const Session& session, float* base) {
  const Shape& shape = session.model().shape();
  return head_major_plane(base, shape.kv_heads, shape.head_dim, session.capacity());
}

/// A policy at work on the layers of a session's memory.
template <class Policy, Granularity G = Granularity::per_head>
class LayeredPolicy final : public ModelPolicy {
  using Cache = PlaneCache<float, float, G>;

 public:
  /// `policies`: one for each layer. `score_at_reductions` (of a policy with a pool of queries): keys are scored, for what they
  /// remember, whenever the pool is about to be reduced, not only at evictions.
  [[nodiscard]] static MadePolicy make(Session& session, std::vector<Policy> policies, index_t layers_per_step,
                                       bool score_at_reductions = false) {
    std::vector<Cache> caches;
    for (index_t l = 0; l < session.model().layers(); ++l) {
      Result<Cache> cache = Cache::make(plane_of(session, session.keys(l)), plane_of(session, session.values(l)));
      if (!cache) return cache.status();
      caches.push_back(std::move(*cache));
    }
    Result<Layers> layers = Layers::make(std::move(policies), std::move(caches),
                                         {.capacity = session.capacity(), .layers_per_step = layers_per_step});
    if (!layers) return layers.status();
    auto made = std::unique_ptr<LayeredPolicy>(new LayeredPolicy(std::move(*layers)));
    made->score_at_reductions_ = score_at_reductions;
    return std::unique_ptr<ModelPolicy>(std::move(made));
  }

  [[nodiscard]] MadePolicy fork(Session& session) const override {
    auto copy = std::unique_ptr<LayeredPolicy>(new LayeredPolicy(layers_));
    copy->score_at_reductions_ = score_at_reductions_;
    for (index_t l = 0; l < layers_.num_layers(); ++l) {
      Cache& cache = copy->layers_.cache(l);
      if (Status s = cache.rebase(plane_of(session, session.keys(l)), plane_of(session, session.values(l))); !s) return s;
    }
    return std::unique_ptr<ModelPolicy>(std::move(copy));
  }

  [[nodiscard]] Result<index_t> after_prefill(Session& session) override {
    for (index_t l = 0; l < layers_.num_layers(); ++l) {
      const QueryView queries = session.queries(l);
      if (Status s = layers_.cache(l).append_run(session.next_position() - queries.tokens, queries.tokens); !s) return s;
      if (Status s = layers_.policy(l).prefill(queries, layers_.workspace()); !s) return s;
    }
    return evict_where_due(session);
  }

  [[nodiscard]] Status append(Session& session) override {
    for (index_t l = 0; l < layers_.num_layers(); ++l)
      if (Status s = layers_.cache(l).append(session.next_position() - 1); !s) return s;
    return {};
  }

  [[nodiscard]] Result<index_t> observe_and_evict(Session& session) override {
    for (index_t l = 0; l < layers_.num_layers(); ++l) {
      const QueryView queries = session.queries(l);
      const std::span<const float> one_token(queries.data, static_cast<std::size_t>(queries.heads * queries.dim));
      const index_t pool = pool_of(l);
      if (Status s = layers_.policy(l).observe(one_token, session.next_position() - 1); !s) return s;
      if (samples && pool == layers_.policy(l).observer().max_rows() - 1 && pool_of(l) <= pool) ++samplings_;
      if (score_at_reductions_)
        if (Status s = score_before_reduction(l); !s) return s;
    }
    return evict_where_due(session);
  }

  void set_event_log(EventLog* log) override {
    log_ = log;
    layers_.set_event_log(log);
  }
  [[nodiscard]] Status keep(Range positions) override {
    for (index_t l = 0; l < layers_.num_layers(); ++l)
      if (Status s = layers_.policy(l).protect(positions); !s) return s;
    return {};
  }
  [[nodiscard]] Status evict_newest(Session& session) override {
    for (index_t l = 0; l < layers_.num_layers(); ++l) {
      Cache& cache = layers_.cache(l);
      bool all_hold_it = cache.num_tokens() > 1;
      for (index_t h = 0; all_hold_it && h < cache.num_kv_heads(); ++h)
        all_hold_it = cache.position(h, cache.num_tokens() - 1) == session.next_position() - 1;
      if (!all_hold_it) continue;
      std::vector<slot_t> slots(static_cast<std::size_t>(cache.num_tokens() - 1));
      std::iota(slots.begin(), slots.end(), slot_t{0});
      const std::vector<std::span<const slot_t>> sets(static_cast<std::size_t>(cache.num_kv_heads()), slots);
      KeepPlan plan;
      if (Status s = plan.assign(cache, sets); !s) return s;
      if (log_ != nullptr) log_->add(detail::event_of(l, layers_.policy(l), cache, plan));
      if (Status s = compact(cache, plan); !s) return s;
      if (Status s = layers_.policy(l).commit(plan); !s) return s;
      if (Status s = session.set_length(l, cache.num_tokens()); !s) return s;
    }
    return {};
  }

  [[nodiscard]] std::optional<index_t> budget_min() const override {
    if constexpr (requires { layers_.policy(0).schedule().lower(); }) {
      for (index_t l = 1; l < layers_.num_layers(); ++l)
        if (layers_.policy(l).schedule().lower() != layers_.policy(0).schedule().lower()) return std::nullopt;
      return layers_.policy(0).schedule().lower();
    }
    return std::nullopt;
  }
  [[nodiscard]] index_t num_tokens(index_t layer, index_t head) const override {
    return detail::tokens_of(layers_.cache(layer), head);
  }
  [[nodiscard]] position_t position(index_t layer, index_t head, index_t slot) const override {
    return layers_.cache(layer).position(head, slot);
  }
  [[nodiscard]] index_t bytes_per_token() const override { return layers_.num_layers() * layers_.cache(0).bytes_per_token(); }
  [[nodiscard]] std::size_t state_bytes() const override { return layers_.state_bytes(); }
  [[nodiscard]] PolicyBytes bytes() const override {
    PolicyBytes bytes;
    for (index_t l = 0; l < layers_.num_layers(); ++l) {
      const Policy& policy = layers_.policy(l);
      const Cache& cache = layers_.cache(l);
      for (index_t h = 0; h < cache.num_kv_heads(); ++h)
        bytes.cache += static_cast<std::size_t>(num_tokens(l, h) * cache.bytes_per_token() / cache.num_kv_heads());
      if constexpr (requires { policy.observer().beacon_bytes(); }) bytes.beacons += policy.observer().beacon_bytes();
      if constexpr (requires { policy.scorer().state_bytes(); }) bytes.keys += policy.scorer().state_bytes();
      bytes.queries += policy.observer().state_bytes();
      bytes.books += cache.state_bytes();
    }
    bytes.queries -= bytes.beacons;
    bytes.workspace = workspace_bytes_;
    return bytes;
  }
  [[nodiscard]] double samplings() const override {
    return static_cast<double>(samplings_) / static_cast<double>(layers_.num_layers());
  }

 private:
  using Layers = Sequence<Policy, Cache>;

  explicit LayeredPolicy(Layers layers)
      : layers_(std::move(layers)),
        pools_(static_cast<std::size_t>(layers_.num_layers())),
        workspace_bytes_(layers_.workspace().capacity()) {}

  static constexpr bool samples = requires(const Policy& policy) { policy.observer().pool_size(); };
  [[nodiscard]] index_t pool_of(index_t layer) const {
    if constexpr (samples) return layers_.policy(layer).observer().pool_size();
    static_cast<void>(layer);
    return 0;
  }

  /// The session learns how many rows are left. Returns how many layers evicted.
  [[nodiscard]] Result<index_t> evict_where_due(Session& session) {
    for (index_t l = 0; l < layers_.num_layers(); ++l) pools_[static_cast<std::size_t>(l)] = pool_of(l);
    const Result<SequenceReport> report = layers_.evict_where_due();
    if (!report) return report.status();
    for (index_t l = 0; l < layers_.num_layers(); ++l)
      if (pool_of(l) < pools_[static_cast<std::size_t>(l)]) ++samplings_;
    for (index_t l = 0; report->layers > 0 && l < layers_.num_layers(); ++l)
      for (index_t h = 0; h < layers_.cache(l).num_kv_heads(); ++h)
        if (Status s = session.set_length(l, h, num_tokens(l, h)); !s) return s;
    return report->layers;
  }

  /// An eviction of nothing, where the next token would reduce the pool.
  [[nodiscard]] Status score_before_reduction(index_t layer) {
    if constexpr (requires { layers_.policy(layer).observer().pool_size(); }) {
      Policy& policy = layers_.policy(layer);
      const Cache& cache = layers_.cache(layer);
      if (policy.observer().pool_size() + 1 < policy.observer().max_rows() || policy.due(cache)) return {};
      std::vector<float> scores(static_cast<std::size_t>(cache.num_kv_heads() * cache.num_tokens()));
      const ScoreMatrix out{scores.data(), cache.num_kv_heads(), cache.num_tokens()};
      const Result<ScoreReport> report = policy.score(cache, out, layers_.workspace());
      if (!report) return report.status();
      KeepPlan plan;
      if (Status s = policy.select(cache, out, layers_.workspace(), plan, cache.num_tokens()); !s) return s;
      return policy.commit(plan);
    }
    static_cast<void>(layer);
    return {};
  }

  Layers layers_;
  std::vector<index_t> pools_;  // before an eviction
  index_t samplings_ = 0;       // summed over layers
  std::size_t workspace_bytes_;
  EventLog* log_ = nullptr;
  bool score_at_reductions_ = false;
};

}  // namespace beaconkv::lab
