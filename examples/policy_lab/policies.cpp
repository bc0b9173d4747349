// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "policy_lab/policies.hpp"

#include <algorithm>
#include <optional>

#include "beaconkv/beaconkv.hpp"
#include "policy_lab/random_scorer.hpp"

namespace beaconkv::lab {
namespace {

using engine::Session;
using Cache = PlaneCache<float>;
using MadePolicy = Result<std::unique_ptr<ModelPolicy>>;

[[nodiscard]] Plane<float> plane_of(const Session& session, float* base) {
  const Shape& shape = session.model().shape();
  return head_major_plane(base, shape.kv_heads, shape.head_dim, session.capacity());
}

/// One copy of `Policy` a layer, over views of a session's memory.
template <class Policy>
class LayeredPolicy final : public ModelPolicy {
 public:
  /// `policies`: one for each layer.
  [[nodiscard]] static MadePolicy make(Session& session, std::vector<Policy> policies) {
    std::vector<Cache> caches;
    for (index_t l = 0; l < session.model().layers(); ++l) {
      Result<Cache> cache = Cache::make(plane_of(session, session.keys(l)), plane_of(session, session.values(l)));
      if (!cache) return cache.status();
      caches.push_back(std::move(*cache));
    }
    Workspace work(policies.front().workspace_size(session.capacity()));
    return std::unique_ptr<ModelPolicy>(new LayeredPolicy(std::move(policies), std::move(caches), std::move(work)));
  }

  [[nodiscard]] MadePolicy fork(Session& session) const override {
    auto copy = std::unique_ptr<LayeredPolicy>(new LayeredPolicy(policies_, caches_, work_));
    for (index_t l = 0; l < layers(); ++l)
      if (Status s = copy->cache(l).rebase(plane_of(session, session.keys(l)), plane_of(session, session.values(l))); !s) return s;
    return std::unique_ptr<ModelPolicy>(std::move(copy));
  }

  [[nodiscard]] Status after_prefill(Session& session) override {
    for (index_t l = 0; l < layers(); ++l) {
      const QueryView queries = session.queries(l);
      if (Status s = cache(l).append_run(session.next_position() - queries.tokens, queries.tokens); !s) return s;
      if (Status s = policy(l).prefill(queries, work_); !s) return s;
    }
    return evict_where_due(session).status();
  }

  [[nodiscard]] Status append(Session& session) override {
    for (index_t l = 0; l < layers(); ++l)
      if (Status s = cache(l).append(session.next_position() - 1); !s) return s;
    return {};
  }

  [[nodiscard]] Result<index_t> observe_and_evict(Session& session) override {
    for (index_t l = 0; l < layers(); ++l) {
      const QueryView queries = session.queries(l);
      const std::span<const float> one_token(queries.data, static_cast<std::size_t>(queries.heads * queries.dim));
      if (Status s = policy(l).observe(one_token, session.next_position() - 1); !s) return s;
    }
    return evict_where_due(session);
  }

  [[nodiscard]] index_t num_tokens(index_t layer) const override { return caches_[static_cast<std::size_t>(layer)].num_tokens(); }
  [[nodiscard]] position_t position(index_t layer, index_t head, index_t slot) const override {
    return caches_[static_cast<std::size_t>(layer)].position(head, slot);
  }
  [[nodiscard]] index_t bytes_per_token() const override { return layers() * caches_.front().bytes_per_token(); }
  [[nodiscard]] std::size_t state_bytes() const override {
    std::size_t bytes = 0;
    for (const Policy& p : policies_) bytes += p.state_bytes();
    return bytes;
  }

 private:
  LayeredPolicy(std::vector<Policy> policies, std::vector<Cache> caches, Workspace work)
      : policies_(std::move(policies)), caches_(std::move(caches)), work_(std::move(work)) {}

  [[nodiscard]] index_t layers() const noexcept { return static_cast<index_t>(caches_.size()); }
  [[nodiscard]] Policy& policy(index_t layer) noexcept { return policies_[static_cast<std::size_t>(layer)]; }
  [[nodiscard]] Cache& cache(index_t layer) noexcept { return caches_[static_cast<std::size_t>(layer)]; }

  [[nodiscard]] Result<index_t> evict_where_due(Session& session) {
    index_t evictions = 0;
    for (index_t l = 0; l < layers(); ++l) {
      if (!policy(l).due(cache(l))) continue;
      if (Result<EvictionReport> report = evict(policy(l), cache(l), work_); !report) return report.status();
      if (Status s = session.set_length(l, cache(l).num_tokens()); !s) return s;
      ++evictions;
    }
    return evictions;
  }

  std::vector<Policy> policies_;  // of each layer
  std::vector<Cache> caches_;     // of each layer, over the session's memory
  Workspace work_;                // shared by the layers, which take turns
};

/// The common rule of a comparison: the prompt is kept and lies on top of the budget.
[[nodiscard]] FixedBudget common_budget(const PolicyRequest& request, Settings& settings) {
  return {.max = request.budget, .min = settings.optional_count("budget_min")};
}

/// The newest rows that always stay under the common rule: few, because the lab's budgets are small.
[[nodiscard]] index_t common_recent(Settings& settings) { return settings.count("n_recent_kv", 8); }

/// Makes the layers' policies once the options were read without complaint.
template <class Policy, class... Arguments>
[[nodiscard]] MadePolicy build(Session& session, const Settings& settings, Arguments&&... arguments) {
  if (Status s = settings.status(); !s) return s;
  const Result<Policy> policy = Policy::make(session.model().shape(), std::forward<Arguments>(arguments)...);
  if (!policy) return policy.status();
  return LayeredPolicy<Policy>::make(session, std::vector<Policy>(static_cast<std::size_t>(session.model().layers()), *policy));
}

template <class Options>
void read_common_options(Options& o, Settings& s) {
  o.pool = s.pool(o.pool);
  o.over_queries = s.reduce("over_queries", o.over_queries);
  o.over_heads = s.reduce("over_heads", o.over_heads);
  o.softmax_domain = s.softmax_domain(o.softmax_domain);
}

/// Never evicts: a budget that nothing reaches.
MadePolicy make_full(const PolicyRequest&, Settings& settings, Session& session) {
  return build<RecentWindow<>>(session, settings, RecentWindowOptions<>{.budget = {.max = std::numeric_limits<index_t>::max()}});
}

MadePolicy make_random(const PolicyRequest& request, Settings& s, Session& session) {
  using Random = EvictionPolicy<NoQueries, RandomScorer, FixedBudget>;
  Random::Parts parts{.schedule = common_budget(request, s), .protection = {.n_recent_kv = common_recent(s)}};
  const auto seed = static_cast<std::uint64_t>(s.count("seed", request.seed));
  if (Status status = s.status(); !status) return status;
  std::vector<Random> layers;
  for (index_t l = 0; l < session.model().layers(); ++l) {
    parts.scorer.seed = (seed << 16) + static_cast<std::uint64_t>(l);
    Result<Random> policy = Random::make(session.model().shape(), parts);
    if (!policy) return policy.status();
    layers.push_back(std::move(*policy));
  }
  return LayeredPolicy<Random>::make(session, std::move(layers));
}

MadePolicy make_recent_window(const PolicyRequest& request, Settings& s, Session& session) {
  if (!request.as_published) return build<RecentWindow<>>(session, s, RecentWindowOptions<>{.budget = common_budget(request, s)});
  const FixedBudget sliding{.max = request.budget, .min = request.budget, .counts_prefix = true};
  return build<RecentWindow<>>(session, s, RecentWindowOptions<>{.budget = sliding, .n_prefix = s.count("n_prefix", 4)});
}

template <class Options>
[[nodiscard]] Options snapkv_options(Settings& s, Options o) {
  o.n_recent_queries = s.count("n_recent_queries", o.n_recent_queries);
  o.n_recent_kv = s.count("n_recent_kv", o.n_recent_kv);
  read_common_options(o, s);
  return o;
}

MadePolicy make_snapkv(const PolicyRequest& request, Settings& s, Session& session) {
  const RopeTable& rope = session.model().rope();
  if (request.as_published) {
    const SnapKVOptions<> o = snapkv_options(s, SnapKVOptions<>{.budget = {.tokens = request.budget}});
    return build<SnapKV<>>(session, s, o, rope);
  }
  using Common = SnapKV<AttentionScorer, FixedBudget>;
  Common::Options o{.budget = common_budget(request, s), .n_recent_queries = 16, .n_recent_kv = common_recent(s), .n_prefix = std::nullopt};
  return build<Common>(session, s, snapkv_options(s, o), rope);
}

template <class Options>
[[nodiscard]] Options rpc_options(Settings& s, Options o) {
  o.n_recent_queries = s.count("n_recent_queries", o.n_recent_queries);
  o.n_recent_kv = s.count("n_recent_kv", o.n_recent_kv);
  o.newest_query_twice = s.flag("newest_query_twice", o.newest_query_twice);
  o.head_scope = s.head_scope(o.head_scope);
  o.causal = s.flag("causal", o.causal);
  read_common_options(o, s);
  return o;
}

MadePolicy make_rpc(const PolicyRequest& request, Settings& s, Session& session) {
  const RopeTable& rope = session.model().rope();
  if (request.as_published) {
    RPCOptions<> o{.budget = {.period = request.budget, .ratio = s.count("ratio", 4)}, .newest_query_twice = true};
    return build<RPC<>>(session, s, rpc_options(s, o), rope);
  }
  using Common = RPC<AttentionScorer, FixedBudget>;
  Common::Options o{.budget = common_budget(request, s), .n_recent_queries = 16, .n_recent_kv = common_recent(s)};
  return build<Common>(session, s, rpc_options(s, o), rope);
}

template <class Options>
[[nodiscard]] Options rkv_options(Settings& s, Options o) {
  o.n_recent_queries = s.count("n_recent_queries", o.n_recent_queries);
  o.n_recent_kv = s.count("n_recent_kv", o.n_recent_kv);
  o.lambda = s.number("lambda", o.lambda);
  o.redundancy.threshold = s.number("threshold", o.redundancy.threshold);
  o.redundancy.spare_column_zero = s.flag("spare_column_zero", o.redundancy.spare_column_zero);
  o.order = s.word("order", o.order == RKVOrder::published ? "published" : "chronological", {"published", "chronological"}) == "published"
                ? RKVOrder::published
                : RKVOrder::chronological;
  o.causal = s.flag("causal", o.causal);
  read_common_options(o, s);
  return o;
}

MadePolicy make_rkv(const PolicyRequest& request, Settings& s, Session& session) {
  const RopeTable& rope = session.model().rope();
  if (request.as_published) {
    RKVOptions<> o{.budget = {.tokens = request.budget, .interval = s.count("interval", 128)}, .order = RKVOrder::published};
    return build<RKV<>>(session, s, rkv_options(s, o), rope);
  }
  using Common = RKV<RKVScorer, FixedBudget>;
  Common::Options o{.budget = common_budget(request, s), .n_recent_kv = common_recent(s), .n_prefix = std::nullopt};
  return build<Common>(session, s, rkv_options(s, o), rope);
}

MadePolicy make_beaconkv(const PolicyRequest& request, Settings& s, Session& session) {
  BeaconKVOptions<> o{.budget = common_budget(request, s)};
  if (!request.as_published) o.n_recent_kv = common_recent(s);
  o.n_recent_kv = s.count("n_recent_kv", o.n_recent_kv);
  o.n_beacon = s.count("n_beacon", o.n_beacon);
  o.n_recent_queries = s.count("n_recent_queries", o.n_recent_queries);
  read_common_options(o, s);
  return build<BeaconKV<>>(session, s, o, session.model().rope());
}

}  // namespace

const std::vector<PolicyEntry>& policy_entries() {
  static const std::vector<PolicyEntry> entries{
      {"full", make_full},     {"random", make_random}, {"recent_window", make_recent_window}, {"snapkv", make_snapkv},
      {"rpc", make_rpc},       {"rkv", make_rkv},       {"beaconkv", make_beaconkv},
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
