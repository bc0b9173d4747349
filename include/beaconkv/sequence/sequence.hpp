// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// All layers of one request: they evict together, fork, take tokens back, are saved and loaded.

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "beaconkv/policy/evict.hpp"
#include "beaconkv/policy/realign.hpp"
#include "beaconkv/sequence/draft_tokens.hpp"
#include "beaconkv/sequence/executor.hpp"

namespace beaconkv::inline v0 {

/// What a layer of a model keeps. Only global layers have a policy; a windowed layer drops what leaves its window by itself, a
/// recurrent one has no keys and values.
enum class LayerKind : std::uint8_t { global, windowed, recurrent };

struct SequenceOptions {
  index_t capacity = 0;            ///< the longest cache and the longest prompt
  std::vector<LayerKind> kinds{};  ///< of all layers of the model, in order; default: all global
  index_t max_draft_tokens = 0;    ///< the most tokens that may be tentative at once (speculative decoding)
  index_t workers = 1;             ///< threads that an executor may use: a workspace for each
  /// The most layers that evict in one call: the others stay due and come next, so that no decode step pays for all. Their
  /// caches need room for as many tokens more as it takes to come round. 0: all at once.
  index_t layers_per_step = 0;
  Reduce over_layers = Reduce::mean;  ///< how layers that keep one set together agree (`Granularity::per_sequence`)
};

/// What an eviction over all layers did.
struct SequenceReport {
  index_t layers = 0;          ///< that evicted
  index_t evicted = 0;         ///< tokens of a head, summed over those layers
  index_t num_non_finite = 0;  ///< key and query rows with a NaN or infinity that scoring met
  /// Leading slots that stayed as they were in every layer: a prefix cache must forget what lies behind.
  index_t unchanged_prefix = 0;
};

/// The policies and caches of all global layers of one sequence. Layers may have policies with different options or budgets.
///
/// A copy forks the policies' state, but cache views in a copy still refer to the same memory: use `copy_from` with a sequence
/// over memory of its own. One thread uses a sequence at a time. Nothing allocates after construction, but for `save`, `load`
/// and errors.
///
/// Caches with `PositionMode::cache_relative` are re-aligned after each eviction.
template <class PolicyT, CacheBuffer CacheT>
class Sequence {
 public:
  /// One policy and one cache for each global layer, in order. Allocates.
  [[nodiscard]] static Result<Sequence> make(std::vector<PolicyT> policies, std::vector<CacheT> caches,
                                             const SequenceOptions& options) {
    if (policies.empty() || policies.size() != caches.size())
      return detail::invalid("policies = ", policies.size(), ", caches = ", caches.size(),
                             ": there must be one of each for every layer");
    const auto globals = options.kinds.empty() ? static_cast<std::ptrdiff_t>(policies.size())
                                               : std::count(options.kinds.begin(), options.kinds.end(), LayerKind::global);
    if (globals != static_cast<std::ptrdiff_t>(policies.size()))
      return detail::invalid("kinds has ", globals, " global layers: there are ", policies.size(), " policies");
    if (options.capacity < 0) return detail::invalid("capacity = ", options.capacity, ": must not be negative");
    if (options.max_draft_tokens < 0)
      return detail::invalid("max_draft_tokens = ", options.max_draft_tokens, ": must not be negative");
    if (options.workers < 1) return detail::invalid("workers = ", options.workers, ": must be at least 1");
    if (options.layers_per_step < 0)
      return detail::invalid("layers_per_step = ", options.layers_per_step, ": must not be negative");
    if (one_set_for_all && options.layers_per_step != 0)
      return detail::error(StatusCode::unsupported, "layers_per_step = ", options.layers_per_step,
                           ": layers that keep one set evict together");
    return Sequence(std::move(policies), std::move(caches), options);
  }

  /// Global layers: those that have a policy.
  [[nodiscard]] index_t num_layers() const noexcept { return static_cast<index_t>(policies_.size()); }
  /// Which layer of the model the `layer`-th global one is.
  [[nodiscard]] index_t model_layer(index_t layer) const noexcept { return model_layers_[static_cast<std::size_t>(layer)]; }
  /// Whether evictions ever touch this layer of the model.
  [[nodiscard]] bool covers(index_t model_layer) const noexcept {
    return std::find(model_layers_.begin(), model_layers_.end(), model_layer) != model_layers_.end();
  }
  [[nodiscard]] PolicyT& policy(index_t layer) noexcept { return policies_[static_cast<std::size_t>(layer)]; }
  [[nodiscard]] const PolicyT& policy(index_t layer) const noexcept { return policies_[static_cast<std::size_t>(layer)]; }
  [[nodiscard]] CacheT& cache(index_t layer) noexcept { return caches_[static_cast<std::size_t>(layer)]; }
  [[nodiscard]] const CacheT& cache(index_t layer) const noexcept { return caches_[static_cast<std::size_t>(layer)]; }
  [[nodiscard]] Workspace& workspace(index_t worker = 0) noexcept { return works_[static_cast<std::size_t>(worker)]; }

  /// The true position of the next token, from what was seen, not from what a layer still holds.
  [[nodiscard]] position_t next_position() const noexcept {
    position_t next = 0;
    for (const PolicyT& policy : policies_) next = std::max(next, policy.next_position());
    return next + drafts_.size();
  }
  /// Bytes that the policies and the books of the caches hold, of all layers.
  [[nodiscard]] std::size_t state_bytes() const noexcept {
    std::size_t bytes = drafts_.state_bytes();
    for (const PolicyT& policy : policies_) bytes += policy.state_bytes();
    return bytes;
  }

  /// After how many more decoded tokens a layer will be due, at most `most`; 0: one is now. While tokens are tentative nothing
  /// evicts: with no more drafts than this, evictions come where they come without drafts. Ask while no token is tentative.
  [[nodiscard]] index_t tokens_until_due(index_t most) const {
    for (index_t l = 0; l < (one_set_for_all ? 1 : num_layers()); ++l) most = policy(l).tokens_until_due(cache(l), most);
    return most;
  }

  /// Evicts where a policy is due, and in no layer while tokens are tentative. On an error the layers that did evict are
  /// consistent, and the error of the first that did not is reported.
  [[nodiscard]] Result<SequenceReport> evict_where_due() { return evict_where_due(SerialExecutor{}); }
  /// The same with the layers spread over threads; the same bits whatever the executor.
  template <class ExecutorT>
  requires Executor<std::remove_cvref_t<ExecutorT>>
  [[nodiscard]] Result<SequenceReport> evict_where_due(ExecutorT&& executor) {
    if (executor.num_workers() > static_cast<index_t>(works_.size()))
      return detail::invalid("executor has ", executor.num_workers(), " workers: options.workers = ", works_.size());
    if (drafts_.size() > 0) return SequenceReport{};
    if constexpr (one_set_for_all) {
      return evict_together();
    } else {
      const index_t count = pick_due();
      executor.run(count, [this](index_t i, index_t worker) {
        const auto l = static_cast<std::size_t>(due_[static_cast<std::size_t>(i)]);
        steps_[l] = evict_layer(static_cast<index_t>(l), works_[static_cast<std::size_t>(worker)]);
      });
      return report_of(count);
    }
  }

  /// The queries `[query_heads][head_dim]` of a tentative token in one layer, before RoPE: a draft of speculative decoding. The
  /// engine writes and appends its keys and values as always. No policy sees it before `accept`.
  [[nodiscard]] Status observe_draft(index_t layer, std::span<const float> queries, position_t position) {
    if (layer < 0 || layer >= num_layers()) return detail::invalid("layer = ", layer, ": must be below ", num_layers());
    if (position < policy(layer).next_position() + drafts_.size(layer))
      return detail::error(StatusCode::out_of_order, "position = ", position, ": must be at least ",
                           policy(layer).next_position() + drafts_.size(layer));
    return drafts_.push(layer, queries, position);
  }
  [[nodiscard]] index_t num_draft_tokens() const noexcept { return drafts_.size(); }

  /// The first `count` tentative tokens become real, as if they had been observed one by one; the others are taken back from
  /// every cache, exactly. Refused, with nothing changed, unless every layer saw all of them.
  [[nodiscard]] Status accept(index_t count) {
    const index_t drafts = drafts_.size();
    if (count < 0 || count > drafts)
      return detail::invalid("count = ", count, ": must be between 0 and the ", drafts, " drafts");
    for (index_t l = 0; l < num_layers(); ++l)
      if (drafts_.size(l) != drafts || cache(l).num_tokens() < drafts)
        return detail::error(StatusCode::out_of_order, "layer ", l, " has seen ", drafts_.size(l), " of ", drafts,
                             " tentative tokens");
    for (index_t l = 0; l < num_layers(); ++l) {
      if (Result<index_t> undone = cache(l).rollback(drafts - count); !undone) return undone.status();
      for (index_t i = 0; i < count; ++i)
        if (Status s = policy(l).observe(drafts_.queries(l, i), drafts_.position(l, i)); !s) return s;
    }
    drafts_.clear();
    return {};
  }
  /// Takes back the newest `count` tokens and returns how many really were: tentative ones are taken back exactly, observed
  /// ones never (a saved copy brings those back).
  [[nodiscard]] Result<index_t> rollback(index_t count) {
    if (count < 0) return detail::invalid("count = ", count, ": must not be negative");
    const index_t undone = std::min(count, drafts_.size());
    for (index_t l = 0; l < num_layers(); ++l)
      if (Result<index_t> rows = cache(l).rollback(undone); !rows) return rows.status();
    drafts_.drop(undone);
    return undone;
  }

  /// Becomes a fork of `other`, in this sequence's own memory: policies and rows. For sequences of the same make.
  [[nodiscard]] Status copy_from(const Sequence& other) {
    if (num_layers() != other.num_layers())
      return detail::invalid("copy_from: ", other.num_layers(), " layers, not ", num_layers());
    for (index_t l = 0; l < num_layers(); ++l) {
      if (Status s = cache(l).copy_from(other.cache(l)); !s) return s;
      policy(l) = other.policy(l);
    }
    drafts_ = other.drafts_;
    next_ = other.next_;
    return {};
  }

  /// Appends policies, books and rows of all layers to `out`, with version and checksum. Tentative tokens are not saved: accept
  /// or take them back before. Allocates.
  [[nodiscard]] Status save(std::vector<std::byte>& out) const {
    if (drafts_.size() > 0)
      return detail::error(StatusCode::out_of_order, "save: ", drafts_.size(), " tokens are tentative: accept them before");
    Sequence copy = *this;  // of views: one function reads and writes
    detail::save_framed(out, [&](StateWriter& archive) {
      copy.exchange_state(archive);
      for (CacheT& c : copy.caches_) c.exchange_rows(archive);
    });
    return {};
  }
  /// Goes on where a sequence of the same make stood when it was saved; memory layout and capacity may be others. Damaged
  /// bytes, another shape, storage type or number of layers are refused by name, and nothing has changed. Allocates.
  [[nodiscard]] Status load(std::span<const std::byte> in) {
    Sequence copy = *this;
    if (Status s = detail::load_framed(in, [&](StateReader& archive) { copy.read(archive); }); !s) return s;
    *this = std::move(copy);
    return {};
  }

 private:
  static constexpr bool one_set_for_all = CacheT::granularity == Granularity::per_sequence;
  struct Step {
    Status status{};
    EvictionReport report{};
    index_t unchanged_prefix = 0;
  };

  Sequence(std::vector<PolicyT> policies, std::vector<CacheT> caches, const SequenceOptions& options)
      : policies_(std::move(policies)),
        caches_(std::move(caches)),
        drafts_(num_layers(), policies_[0].shape().query_heads * policies_[0].shape().head_dim, options.max_draft_tokens),
        steps_(policies_.size()),
        due_(policies_.size()),
        layers_per_step_(options.layers_per_step),
        over_layers_(options.over_layers) {
    WorkspaceSize size;
    for (std::size_t l = 0; l < policies_.size(); ++l)
      size = max(size, max(policies_[l].workspace_size(options.capacity), realign_workspace_size(caches_[l].key_dim())));
    if (one_set_for_all) {  // the scores of a layer, and what all layers come to
      const index_t heads = policies_[0].shape().kv_heads;
      size.bytes += detail::measure([&](Workspace& work) {
                      static_cast<void>(work.take<float>(heads * options.capacity));
                      static_cast<void>(work.take<float>(options.capacity));
                    }).bytes;
    }
    works_.assign(static_cast<std::size_t>(options.workers), Workspace(size));
    for (index_t m = 0; m < static_cast<index_t>(options.kinds.size()); ++m)
      if (options.kinds[static_cast<std::size_t>(m)] == LayerKind::global) model_layers_.push_back(m);
    for (index_t l = 0; options.kinds.empty() && l < num_layers(); ++l) model_layers_.push_back(l);
  }

  /// The layers that evict now, to `due_`: from where the last call stopped.
  [[nodiscard]] index_t pick_due() {
    const index_t most = layers_per_step_ > 0 ? layers_per_step_ : num_layers();
    index_t count = 0;
    index_t last = next_;
    for (index_t i = 0; i < num_layers() && count < most; ++i) {
      const index_t l = (next_ + i) % num_layers();
      if (!policy(l).due(cache(l))) continue;
      due_[static_cast<std::size_t>(count++)] = l;
      last = l;
    }
    if (layers_per_step_ > 0 && count > 0) next_ = (last + 1) % num_layers();
    std::sort(due_.begin(), due_.begin() + count);
    return count;
  }

  [[nodiscard]] Step evict_layer(index_t layer, Workspace& work) {
    const Result<EvictionReport> report = evict(policy(layer), cache(layer), work);
    if (!report) return {report.status(), {}, 0};
    return {realign(layer, work), *report, work.plan().unchanged_prefix()};
  }

  [[nodiscard]] Status realign(index_t layer, Workspace& work) {
    if constexpr (requires { realign_to_slots(cache(layer), *policy(layer).rope(), work); })
      if (cache(layer).position_mode() == PositionMode::cache_relative && policy(layer).rope() != nullptr)
        return realign_to_slots(cache(layer), *policy(layer).rope(), work);
    return {};
  }

  [[nodiscard]] Result<SequenceReport> report_of(index_t count) const {
    SequenceReport total;
    Status first_error;
    for (index_t i = 0; i < count; ++i) {
      const Step& step = steps_[static_cast<std::size_t>(due_[static_cast<std::size_t>(i)])];
      if (!step.status && first_error.ok()) first_error = step.status;
      total.unchanged_prefix = i == 0 ? step.unchanged_prefix : std::min(total.unchanged_prefix, step.unchanged_prefix);
      ++total.layers;
      total.evicted += step.report.evicted;
      total.num_non_finite += step.report.num_non_finite;
    }
    if (!first_error) return first_error;
    return total;
  }

  /// One set for all layers: scored layer by layer, reduced over heads and layers, chosen once.
  [[nodiscard]] Result<SequenceReport> evict_together() {
    SequenceReport total;
    const index_t tokens = cache(0).num_tokens();
    for (index_t l = 1; l < num_layers(); ++l)
      if (cache(l).num_tokens() != tokens)
        return detail::error(StatusCode::out_of_order, "layer ", l, " holds ", cache(l).num_tokens(), " tokens and layer 0 ",
                             tokens, ": they keep one set");
    if (!policy(0).due(cache(0))) return total;
    Workspace& work = works_[0];
    const Workspace::Frame frame(work);
    const index_t heads = policy(0).shape().kv_heads;
    const ScoreMatrix of_layer{work.take<float>(heads * tokens).data(), heads, tokens};
    const ScoreMatrix shared{work.take<float>(tokens).data(), 1, tokens};
    for (index_t l = 0; l < num_layers(); ++l) {
      const Result<ScoreReport> report = policy(l).score(cache(l), of_layer, work);
      if (!report) return report.status();
      total.num_non_finite += report->num_non_finite;
      reduce_heads(of_layer, policy(l).shared_reduce());
      const std::span<float> sum = shared.row(0);
      const std::span<const float> own = of_layer.row(0);
      for (std::size_t j = 0; j < sum.size(); ++j)
        sum[j] = l == 0 ? own[j] : (over_layers_ == Reduce::max ? detail::max_or_nan(sum[j], own[j]) : sum[j] + own[j]);
    }
    KeepPlan& plan = work.plan();
    if (Status s = policy(0).select(cache(0), shared, work, plan); !s) return s;
    total.unchanged_prefix = plan.unchanged_prefix();
    for (index_t l = 0; l < num_layers(); ++l) {
      if (Status s = plan.readdress(cache(l)); !s) return s;
      if (Status s = compact(cache(l), plan); !s) return s;
      if (Status s = policy(l).commit(plan); !s) return s;
      if (Status s = realign(l, work); !s) return s;
      ++total.layers;
      total.evicted += plan.num_evicted(0);
    }
    return total;
  }

  template <class Archive>
  void exchange_state(Archive& archive) {
    archive.expect("layers", num_layers());
    archive.value("next layer to evict", next_, 0, num_layers() - 1);
    for (PolicyT& p : policies_) p.exchange(archive);
    for (CacheT& c : caches_) c.exchange_books(archive);
  }
  void read(StateReader& archive) {
    exchange_state(archive);
    drafts_.clear();
    std::size_t rows = 0;
    for (const CacheT& c : caches_) rows += archive.ok() ? c.row_bytes() : 0;
    if (archive.ok() && archive.left() != rows)
      archive.fail(detail::error(StatusCode::damaged, "saved state: has ", archive.left(), " bytes of rows: must have ", rows));
    for (CacheT& c : caches_)
      if (archive.ok()) c.exchange_rows(archive);
  }

  std::vector<PolicyT> policies_;
  std::vector<CacheT> caches_;
  detail::DraftTokens drafts_;
  std::vector<index_t> model_layers_{};
  std::vector<Workspace> works_{};  // of each worker; the layers take turns
  std::vector<Step> steps_;         // of each layer, of the last eviction
  std::vector<index_t> due_;
  index_t layers_per_step_;
  Reduce over_layers_;
  index_t next_ = 0;
};

}  // namespace beaconkv::inline v0
