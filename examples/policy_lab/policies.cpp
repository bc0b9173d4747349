// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "policy_lab/policies.hpp"

#include <algorithm>
#include <limits>
#include <numeric>
#include <optional>
#include <span>

#include "beaconkv/beaconkv.hpp"
#include "policy_lab/random_scorer.hpp"

namespace beaconkv::lab {
namespace {

using engine::Session;
using MadePolicy = Result<std::unique_ptr<ModelPolicy>>;

[[nodiscard]] Plane<float> plane_of(const Session& session, float* base) {
  const Shape& shape = session.model().shape();
  return head_major_plane(base, shape.kv_heads, shape.head_dim, session.capacity());
}

/// A policy at work on the layers of a session's memory.
template <class Policy, Granularity G = Granularity::per_head>
class LayeredPolicy final : public ModelPolicy {
  using Cache = PlaneCache<float, float, G>;

 public:
  /// `policies`: one for each layer.
  [[nodiscard]] static MadePolicy make(Session& session, std::vector<Policy> policies, index_t layers_per_step) {
    std::vector<Cache> caches;
    for (index_t l = 0; l < session.model().layers(); ++l) {
      Result<Cache> cache = Cache::make(plane_of(session, session.keys(l)), plane_of(session, session.values(l)));
      if (!cache) return cache.status();
      caches.push_back(std::move(*cache));
    }
    Result<Layers> layers = Layers::make(std::move(policies), std::move(caches),
                                         {.capacity = session.capacity(), .layers_per_step = layers_per_step});
    if (!layers) return layers.status();
    return std::unique_ptr<ModelPolicy>(new LayeredPolicy(std::move(*layers)));
  }

  [[nodiscard]] MadePolicy fork(Session& session) const override {
    auto copy = std::unique_ptr<LayeredPolicy>(new LayeredPolicy(layers_));
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
      if constexpr (samples) bytes.beacons += policy.observer().beacon_bytes();
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
      if (pool_of(l) < pools_[static_cast<std::size_t>(l)]) samplings_ += 2;
    for (index_t l = 0; report->layers > 0 && l < layers_.num_layers(); ++l)
      for (index_t h = 0; h < layers_.cache(l).num_kv_heads(); ++h)
        if (Status s = session.set_length(l, h, num_tokens(l, h)); !s) return s;
    return report->layers;
  }

  Layers layers_;
  std::vector<index_t> pools_;  // before an eviction
  index_t samplings_ = 0;       // summed over layers
  std::size_t workspace_bytes_;
  EventLog* log_ = nullptr;
};

/// Gives each setting of the command line to the option of that name, where the policy has one.
template <class Options>
void read_options(Options& o, Settings& s) {
  if constexpr (requires { o.n_recent_queries; }) o.n_recent_queries = s.count("n_recent_queries", o.n_recent_queries);
  if constexpr (requires { o.n_recent_kv; }) o.n_recent_kv = s.count("n_recent_kv", o.n_recent_kv);
  if constexpr (requires { o.n_beacon; }) o.n_beacon = s.count("n_beacon", o.n_beacon);
  if constexpr (requires { o.orphan_credit; }) o.orphan_credit = s.number("orphan_credit", o.orphan_credit);
  if constexpr (requires { o.key_diff_share; }) o.key_diff_share = s.number("key_diff_share", o.key_diff_share);
  if constexpr (requires { o.value_norm; }) o.value_norm = s.flag("value_norm", o.value_norm);
  if constexpr (requires { o.pool; }) o.pool = s.pool(o.pool);
  if constexpr (requires { o.over_queries; }) o.over_queries = s.reduce("over_queries", o.over_queries);
  if constexpr (requires { o.over_heads; }) o.over_heads = s.reduce("over_heads", o.over_heads);
  if constexpr (requires { o.softmax_domain; }) o.softmax_domain = s.softmax_domain(o.softmax_domain);
  if constexpr (requires { o.head_scope; }) o.head_scope = s.head_scope(o.head_scope);
  if constexpr (requires { o.causal; }) o.causal = s.flag("causal", o.causal);
  if constexpr (requires { o.newest_query_twice; }) o.newest_query_twice = s.flag("newest_query_twice", o.newest_query_twice);
  if constexpr (requires { o.lambda; }) o.lambda = s.number("lambda", o.lambda);
  if constexpr (requires { o.redundancy; }) {
    o.redundancy.threshold = s.number("threshold", o.redundancy.threshold);
    o.redundancy.spare_column_zero = s.flag("spare_column_zero", o.redundancy.spare_column_zero);
  }
  if constexpr (requires { o.order; }) o.order = s.order(o.order);
  if constexpr (requires { o.max_pending_queries; })
    o.max_pending_queries = s.count("max_pending_queries", o.max_pending_queries);
  if constexpr (requires { o.n_future_positions; }) {
    o.n_sink = s.count("n_sink", o.n_sink);
    o.n_future_positions = s.count("n_future_positions", o.n_future_positions);
    o.use_covariance = s.flag("use_covariance", o.use_covariance);
    o.value_norm = s.flag("value_norm", o.value_norm);
    o.epsilon = s.number("epsilon", o.epsilon);
  }
  if constexpr (requires { o.scorer.lag; }) {
    o.scorer.lag = s.count("lag", o.scorer.lag);
    o.scorer.cross_scoring = s.flag("cross_scoring", o.scorer.cross_scoring);
  }
}

/// Copies a policy for each layer, once its options were read without complaint.
template <class Policy>
[[nodiscard]] MadePolicy build(const PolicyRequest& request, const typename Policy::Options& options, const Settings& settings,
                               Session& session) {
  if (Status s = settings.status(); !s) return s;
  const engine::Model& model = session.model();
  const Result<Policy> policy = [&] {
    if constexpr (requires { Policy::make(model.shape(), options, model.rope()); })
      return Policy::make(model.shape(), options, model.rope());
    else
      return Policy::make(model.shape(), options);
  }();
  if (!policy) return policy.status();
  return LayeredPolicy<Policy>::make(session, std::vector<Policy>(static_cast<std::size_t>(model.layers()), *policy),
                                     request.layers_per_step);
}

/// The common rule of a comparison: the prompt is kept and lies on top of the budget.
[[nodiscard]] FixedBudget common_budget(const PolicyRequest& request, Settings& settings) {
  return {.max = request.budget, .min = settings.optional_count("budget_min")};
}

/// The options of any policy with a `FixedBudget`, under the common rule. Its windows are small here, because the lab's budgets
/// are.
template <class Policy>
[[nodiscard]] typename Policy::Options common_options(const PolicyRequest& request, Settings& settings) {
  typename Policy::Options o{};
  o.budget = common_budget(request, settings);
  o.n_prefix = std::nullopt;
  if constexpr (requires { o.n_recent_kv; }) o.n_recent_kv = 8;
  if constexpr (requires { o.n_recent_queries; }) o.n_recent_queries = std::min<index_t>(o.n_recent_queries, 16);
  if constexpr (requires { o.n_future_positions; }) o.n_future_positions = 32;
  if constexpr (requires { o.scorer.lag; }) o.scorer.lag = 16;
  read_options(o, settings);
  return o;
}

template <class Policy>
MadePolicy make_common(const PolicyRequest& request, Settings& settings, Session& session) {
  const typename Policy::Options o = common_options<Policy>(request, settings);
  return build<Policy>(request, o, settings, session);
}

/// SnapKV with a budget for each layer, of which `budget` is the mean.
MadePolicy make_pyramidkv(const PolicyRequest& request, Settings& settings, Session& session) {
  using Policy = SnapKV<AttentionScorer, FixedBudget>;
  const Policy::Options o = common_options<Policy>(request, settings);
  const index_t beta = settings.count("beta", 20);
  if (Status s = settings.status(); !s) return s;
  const engine::Model& model = session.model();
  Result<std::vector<Policy>> layers = pyramid_layers<Policy>(model.shape(), o, model.layers(), beta, model.rope());
  if (!layers) return layers.status();
  return LayeredPolicy<Policy>::make(session, std::move(*layers), request.layers_per_step);
}

/// BeaconKV with what its paper has not: orphan credit and value norm, 24 beacons and 8 recent queries.
MadePolicy make_beaconkv_with_credit(const PolicyRequest& request, Settings& settings, Session& session) {
  BeaconKVOptions<> o = BeaconKVOptions<>::with_orphan_credit(common_budget(request, settings));
  o.n_recent_kv = 8;
  read_options(o, settings);
  return build<BeaconKV<>>(request, o, settings, session);
}

/// Never evicts: a budget that nothing reaches.
MadePolicy make_full(const PolicyRequest& request, Settings& settings, Session& session) {
  return build<RecentWindow<>>(request, {.budget = {.max = std::numeric_limits<index_t>::max()}}, settings, session);
}

/// The heads of a layer share the budget of a policy.
template <class Policy>
[[nodiscard]] MadePolicy build_adakv(const PolicyRequest& request, const typename Policy::Options& options, Settings& settings,
                                     Session& session) {
  using Shared = AdaKV<Policy>;
  const AdaKVOptions own{.safeguard = static_cast<double>(settings.number("safeguard", 0.2F))};
  if (Status s = settings.status(); !s) return s;
  const engine::Model& model = session.model();
  const Result<Policy> policy = Policy::make(model.shape(), options, model.rope());
  if (!policy) return policy.status();
  const Result<Shared> shared = Shared::make(*policy, own);
  if (!shared) return shared.status();
  return LayeredPolicy<Shared, Granularity::per_head_ragged>::make(
      session, std::vector<Shared>(static_cast<std::size_t>(model.layers()), *shared), request.layers_per_step);
}

MadePolicy make_adakv(const PolicyRequest& request, Settings& settings, Session& session) {
  using Policy = SnapKV<AttentionScorer, FixedBudget>;
  const Policy::Options o = common_options<Policy>(request, settings);
  return build_adakv<Policy>(request, o, settings, session);
}

MadePolicy make_random(const PolicyRequest& request, Settings& settings, Session& session) {
  using Random = EvictionPolicy<NoQueries, RandomScorer, FixedBudget>;
  Random::Parts parts{.schedule = common_budget(request, settings),
                      .protection = {.n_recent_kv = settings.count("n_recent_kv", 8)}};
  const auto seed = static_cast<std::uint64_t>(settings.count("seed", request.seed));
  if (Status s = settings.status(); !s) return s;
  std::vector<Random> layers;
  for (index_t l = 0; l < session.model().layers(); ++l) {
    parts.scorer.seed = (seed << 16) + static_cast<std::uint64_t>(l);
    Result<Random> policy = Random::make(session.model().shape(), parts);
    if (!policy) return policy.status();
    layers.push_back(std::move(*policy));
  }
  return LayeredPolicy<Random>::make(session, std::move(layers), request.layers_per_step);
}

// As published: each paper's own trigger, protection and growth. What "budget" means differs.

/// StreamingLLM: sinks and a window that slides with every token.
MadePolicy publish_recent_window(const PolicyRequest& request, Settings& settings, Session& session) {
  const FixedBudget sliding{.max = request.budget, .min = request.budget, .counts_prefix = true};
  return build<RecentWindow<>>(request, {.budget = sliding, .n_prefix = settings.count("n_prefix", 4)}, settings, session);
}

MadePolicy publish_snapkv(const PolicyRequest& request, Settings& settings, Session& session) {
  SnapKVOptions<> o{.budget = {.tokens = request.budget}};
  read_options(o, settings);
  return build<SnapKV<>>(request, o, settings, session);
}

MadePolicy publish_rpc(const PolicyRequest& request, Settings& settings, Session& session) {
  RPCOptions<> o{.budget = {.period = request.budget, .ratio = settings.count("ratio", 4)}, .newest_query_twice = true};
  read_options(o, settings);
  return build<RPC<>>(request, o, settings, session);
}

MadePolicy publish_rkv(const PolicyRequest& request, Settings& settings, Session& session) {
  RKVOptions<> o{.budget = {.tokens = request.budget, .interval = settings.count("interval", 128)},
                 .order = RKVOrder::published};
  read_options(o, settings);
  return build<RKV<>>(request, o, settings, session);
}

/// What evicts with every token, as TOVA and H2O do.
[[nodiscard]] FixedBudget sliding(index_t tokens) { return {.max = tokens + 1, .min = tokens, .counts_prefix = true}; }

MadePolicy publish_tova(const PolicyRequest& request, Settings& settings, Session& session) {
  TOVAOptions<> o{.budget = sliding(request.budget)};
  read_options(o, settings);
  return build<TOVA<>>(request, o, settings, session);
}

/// Half of the budget for the newest tokens.
MadePolicy publish_h2o(const PolicyRequest& request, Settings& settings, Session& session) {
  H2OOptions<> o{.budget = sliding(request.budget), .n_recent_kv = request.budget / 2, .capacity = request.budget};
  read_options(o, settings);
  return build<H2O<>>(request, o, settings, session);
}

/// kvpress's presses: the prompt is cut, and nothing while decoding.
template <class Policy>
MadePolicy publish_press(const PolicyRequest& request, Settings& settings, Session& session) {
  typename Policy::Options o{.budget = {.tokens = request.budget}};
  if constexpr (requires { o.scorer.lag; }) o.n_prefix = 4;
  read_options(o, settings);
  return build<Policy>(request, o, settings, session);
}

MadePolicy publish_pyramidkv(const PolicyRequest& request, Settings& settings, Session& session) {
  SnapKVOptions<> o{.budget = {.tokens = request.budget}};
  read_options(o, settings);
  const index_t beta = settings.count("beta", 20);
  if (Status s = settings.status(); !s) return s;
  const engine::Model& model = session.model();
  Result<std::vector<SnapKV<>>> layers = pyramid_layers<SnapKV<>>(model.shape(), o, model.layers(), beta, model.rope());
  if (!layers) return layers.status();
  return LayeredPolicy<SnapKV<>>::make(session, std::move(*layers), request.layers_per_step);
}

MadePolicy publish_adakv(const PolicyRequest& request, Settings& settings, Session& session) {
  SnapKVOptions<> o{.budget = {.tokens = request.budget}};
  read_options(o, settings);
  return build_adakv<SnapKV<>>(request, o, settings, session);
}

MadePolicy publish_beaconkv(const PolicyRequest& request, Settings& settings, Session& session) {
  BeaconKVOptions<> o{.budget = common_budget(request, settings)};
  read_options(o, settings);
  return build<BeaconKV<>>(request, o, settings, session);
}

}  // namespace

const std::vector<PolicyEntry>& policy_entries() {
  static const std::vector<PolicyEntry> entries{
      {"full", make_full, make_full},
      {"random", make_random, make_random},
      {"recent_window", make_common<RecentWindow<>>, publish_recent_window},
      {"snapkv", make_common<SnapKV<AttentionScorer, FixedBudget>>, publish_snapkv},
      {"rpc", make_common<RPC<AttentionScorer, FixedBudget>>, publish_rpc},
      {"rkv", make_common<RKV<RKVScorer, FixedBudget>>, publish_rkv},
      {"beaconkv", make_common<BeaconKV<>>, publish_beaconkv},
      {"beaconkv_credit", make_beaconkv_with_credit, make_beaconkv_with_credit},
      {"streaming_llm", make_common<RecentWindow<>>, publish_recent_window},
      {"h2o", make_common<H2O<>>, publish_h2o},
      {"tova", make_common<TOVA<>>, publish_tova},
      {"keydiff", make_common<KeyDiff<>>, publish_press<KeyDiff<PromptBudget>>},
      {"knorm", make_common<Knorm<>>, publish_press<Knorm<PromptBudget>>},
      {"lagkv", make_common<LagKV<>>, publish_press<LagKV<PromptBudget>>},
      {"expected_attention", make_common<ExpectedAttention<>>,
       publish_press<ExpectedAttention<ExpectedAttentionScorer, PromptBudget>>},
      {"pyramidkv", make_pyramidkv, publish_pyramidkv},
      {"adakv", make_adakv, publish_adakv},
  };
  return entries;
}

Result<PolicyEntry> find_policy(std::string_view name) {
  std::string names;
  for (const PolicyEntry& entry : policy_entries()) {
    if (entry.name == name) return entry;
    names.append(names.empty() ? "" : ", ").append(entry.name);
  }
  return detail::invalid("policy '", name, "' is not known; there are ", names);
}

}  // namespace beaconkv::lab
