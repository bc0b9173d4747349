// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "drive.hpp"
#include "methods.hpp"

namespace beaconkv::conformance {
namespace {

[[nodiscard]] Reduce reduce_of(const Case& c, const std::string& name) {
  if (!c.has_param(name) || c.text(name) == "max") return Reduce::max;
  if (c.text(name) == "mean") return Reduce::mean;
  throw Unsupported(c.where(name) + ": the library has no '" + c.text(name) + "'");
}

[[nodiscard]] SoftmaxDomain domain_of(const Case& c) {
  const std::string name = "softmax_domain";
  if (!c.has_param(name) || c.text(name) == "all_visible") return SoftmaxDomain::all_visible;
  if (c.text(name) == "candidates_only") return SoftmaxDomain::candidates_only;
  throw Unsupported(c.where(name) + ": the library has no '" + c.text(name) + "'");
}

[[nodiscard]] BeaconKVOptions<> options_of(const Case& c, const FixedBudget& budget) {
  BeaconKVOptions<> options{.budget = budget,
                            .n_beacon = c.integer("n_beacon"),
                            .n_recent_queries = c.integer("n_recent_queries"),
                            .n_recent_kv = c.integer("n_recent_kv"),
                            .n_prefix = c.integer("n_prefix"),
                            .over_queries = reduce_of(c, "over_queries"),
                            .over_heads = reduce_of(c, "over_heads"),
                            .softmax_domain = domain_of(c)};
  if (c.has_param("scale")) options.scale = static_cast<float>(c.number("scale"));
  return options;
}

/// One KV head of a case: its own cache, and the queries of its group.
class BeaconHead {
 public:
  /// `k` [Hk,L,D] at the positions `k_pos` [Hk,L].
  BeaconHead(const FloatArray& k, const IndexArray& k_pos, index_t head)
      : cache_(1, k.dim(2), k.dim(2), k.dim(1)), dim_(k.dim(2)) {
    for (index_t i = 0; i < k.dim(1); ++i) {
      cache_.write(0, k.row(head, i), k.row(head, i));
      cache_.append(k_pos.row(head)[i]);
    }
  }

  /// The next row of the observations, rotated to `position`.
  void observe(const float* row, position_t position, const RopeTable& rope) {
    queries_.insert(queries_.end(), row, row + dim_);
    rope.rotate(queries_.data() + queries_.size() - static_cast<std::size_t>(dim_), position);
    positions_.push_back(position);
  }

  /// Scores and selects as `policy` does, and adds the results to those of the heads before.
  void decide(const BeaconKV<>& policy, index_t keep, Workspace& work, std::vector<float>& all_scores,
              std::vector<std::int64_t>& all_kept) const {
    const index_t group = policy.shape().group();
    const Observations observations{queries_.data(), positions_, group, static_cast<index_t>(positions_.size()) / group, dim_};
    std::vector<float> scores(static_cast<std::size_t>(cache_.view().num_tokens()));
    const ScoreMatrix matrix{scores.data(), 1, cache_.view().num_tokens()};
    KeepPlan plan;
    policy.select(cache_.view(), matrix, work, plan, keep).or_throw();  // only to learn the candidates
    policy.scorer().score(cache_.view(), observations, plan.candidates(), matrix, work).or_throw();
    policy.select(cache_.view(), matrix, work, plan, keep).or_throw();
    all_scores.insert(all_scores.end(), scores.begin(), scores.end());
    all_kept.insert(all_kept.end(), plan.kept(0).begin(), plan.kept(0).end());
  }

 private:
  CaseCache cache_;
  index_t dim_;
  std::vector<float> queries_;  // [group][rows][dim]
  std::vector<position_t> positions_;
};

/// `beacon_pos_j` [Hq,n]: when the beacons were queries.
[[nodiscard]] std::vector<std::int64_t> beacon_positions(const BeaconQueries& observer, index_t query_heads, index_t n_beacon) {
  std::vector<std::int64_t> out;
  for (index_t h = 0; h < query_heads && n_beacon > 0; ++h)
    for (index_t i = 0; i < observer.pool_size(); ++i) out.push_back(observer.pool_position(h, i));
  return out;
}

}  // namespace

/// The beacons are given, so the scorer gets them directly; selection is the policy's. One KV head at a time: in a case the
/// heads may hold unequally many tokens of the prefix, which in a cache that a policy looks after they never do.
void run_beaconkv(const Case& c, Report& report) {
  const Shape shape = c.shape();
  const index_t group = shape.group();
  const index_t tokens = c.integer("L");
  const index_t keep = c.integer("n_keep");
  const position_t now = c.integer("t");
  const FloatArray beacons = c.floats("beacons", {shape.query_heads, Case::any, shape.head_dim});
  const FloatArray recents = c.floats("recents", {shape.query_heads, Case::any, shape.head_dim});
  const IndexArray recent_pos = c.integers("recent_pos", {recents.dim(1)});
  const FloatArray k = c.floats("k", {shape.kv_heads, tokens, shape.head_dim});
  const IndexArray k_pos = c.integers("k_pos", {shape.kv_heads, tokens});
  const RopeTable rope = rope_of(c, shape.head_dim);
  const Shape one_head{group, 1, shape.head_dim};
  const FixedBudget unused{.max = 2 * tokens + 1, .min = 2 * tokens + 1};  // how many stay is said below
  const BeaconKV<> policy = BeaconKV<>::make(one_head, options_of(c, unused), rope).or_throw();
  Workspace work(
      max(policy.workspace_size(tokens), policy.scorer().workspace_size(one_head, beacons.dim(1) + recents.dim(1), tokens)));

  Scored scored{{}, {0, tokens}};
  std::vector<std::int64_t> kept;
  for (index_t h = 0; h < shape.kv_heads; ++h) {
    BeaconHead head(k, k_pos, h);
    for (index_t g = h * group; g < (h + 1) * group; ++g) {
      for (index_t i = 0; i < beacons.dim(1); ++i) head.observe(beacons.row(g, i), now, rope);
      for (index_t i = 0; i < recents.dim(1); ++i)
        head.observe(recents.row(g, i), recent_pos.data[static_cast<std::size_t>(i)], rope);
    }
    head.decide(policy, keep, work, scored.values, kept);
  }
  compare_scores(report, c, "scores", scored);
  compare_kept(report, c, kept, shape.kv_heads, scored);
}

void run_beaconkv_trace(const Case& c, Report& report) {
  const Shape shape = c.shape();
  const FloatArray q = c.floats("q_pre", {shape.query_heads, c.integer("n_total"), shape.head_dim});
  const FloatArray k = c.floats("k", {shape.kv_heads, q.dim(1), shape.head_dim});
  const index_t prompt = prompt_of(c, "n_prefill", q.dim(1));
  const BeaconKVOptions<> options = options_of(
      c,
      {.max = c.integer("budget_max"), .min = c.integer("budget_min"), .counts_prefix = c.flag("budget_counts_prefix", false)});

  Trace<BeaconKV<>> trace(BeaconKV<>::make(shape, options, rope_of(c, shape.head_dim)).or_throw(), q, k, QueryForm::pre_rope);
  trace.prefill(prompt);
  std::vector<std::int64_t> lengths;
  std::vector<std::int64_t> evicted_at;
  Rounds kept(report, c, "kept_pos");
  Rounds scores(report, c, "scores");
  Rounds beacons(report, c, "beacon_pos");
  for (index_t t = prompt; t < trace.tokens(); ++t) {
    trace.decode(t);
    if (trace.due()) {
      evicted_at.push_back(t);
      if (const auto array = scores.begin(t))
        report.compare(*array, c.floats(*array, {shape.kv_heads, Case::any}), trace.scores());
      trace.evict();
      if (const auto array = kept.begin(t))
        report.compare(*array, c.integers(*array, {shape.kv_heads, Case::any}), cached_positions(trace.cache()));
      if (const auto array = beacons.begin(t))
        report.compare(*array, c.integers(*array, {shape.query_heads, Case::any}),
                       beacon_positions(trace.policy().observer(), shape.query_heads, options.n_beacon));
      compare_rows(report, trace.cache(), k, k);
    }
    lengths.push_back(trace.cache().num_tokens());
  }
  kept.end();
  scores.end();
  beacons.end();
  report.compare("evict_at", c.integers("evict_at", {Case::any}), evicted_at);
  report.compare("cache_len", c.integers("cache_len", {Case::any}), lengths);
}

}  // namespace beaconkv::conformance
