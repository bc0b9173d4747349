// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// All layers of one request: they evict together, fork, take tokens back, are saved and loaded.

#include <algorithm>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "beaconkv/executor.hpp"
#include "beaconkv/policy/evict.hpp"
#include "beaconkv/policy/realign.hpp"
#include "beaconkv/sequence/draft_tokens.hpp"
#include "beaconkv/sequence/event_log.hpp"
#include "beaconkv/sequence/evict_together.hpp"
#include "beaconkv/sequence/layer_turns.hpp"
#include "beaconkv/sequence/sequence_options.hpp"
#include "beaconkv/sequence/sliced_eviction.hpp"

namespace beaconkv::inline v0 {

/// The policies and caches of all global layers of one sequence. Layers may have policies with different options or budgets.
///
/// A copy forks the policies' state, but cache views in a copy still refer to the same memory: use `copy_from` with a sequence
/// over memory of its own. One thread uses a sequence at a time. Only `save`, `load`, logs and errors allocate later.
///
/// Caches with `PositionMode::cache_relative` are re-aligned in each eviction, where the policy has a `RopeTable`: one pass
/// moves and turns, and an eviction whose keys cannot be turned is refused as a whole.
template <class PolicyT, CacheBuffer CacheT>
class Sequence {
 public:
  /// One policy and one cache for each global layer, in order. Allocates.
  [[nodiscard]] static Result<Sequence> make(std::vector<PolicyT> policies, std::vector<CacheT> caches,
                                             const SequenceOptions& options) {
    if (policies.empty() || policies.size() != caches.size())
      return detail::invalid("policies = ", policies.size(), ", caches = ", caches.size(),
                             ": there must be one of each for every layer");
    if (Status s = validate(options, static_cast<index_t>(policies.size())); !s) return s;
    if (one_set_for_all && options.layers_per_step != 0)
      return detail::error(StatusCode::unsupported, "layers_per_step = ", options.layers_per_step,
                           ": layers that keep one set evict together");
    for (const PolicyT& policy : policies)
      if (options.heads_per_step != 0 && (one_set_for_all || !policy.scores_by_head()))
        return detail::error(StatusCode::unsupported, "heads_per_step = ", options.heads_per_step,
                             ": scores of all heads or layers are formed together");
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
    for (index_t l = 0; l < num_layers(); ++l) next = std::max({next, policy(l).next_position(), drafts_.next_position(l)});
    return next;
  }
  /// Bytes that the policies of all layers and tentative tokens take; the caches have a `state_bytes` of their own.
  [[nodiscard]] std::size_t state_bytes() const noexcept {
    std::size_t bytes = drafts_.state_bytes();
    for (const PolicyT& policy : policies_) bytes += policy.state_bytes();
    return bytes;
  }

  /// Every eviction from now on goes to `log`, which must outlive this, and allocates; null: none, as in copies and forks.
  void set_event_log(EventLog* log) noexcept { log_.set(log); }

  /// After how many more decoded tokens a layer will be due, at most `most`; 0: one is now. While tokens are tentative nothing
  /// evicts: with no more drafts than this, evictions come where they come without drafts. Ask while no token is tentative.
  [[nodiscard]] index_t tokens_until_due(index_t most) const {
    if (turns_.any_waits()) return 0;
    for (index_t l = 0; l < (one_set_for_all ? 1 : num_layers()); ++l) most = policy(l).tokens_until_due(cache(l), most);
    return most;
  }

  /// Evicts where a policy is due, or was due before it was its layer's turn or between accepted tokens, and in no layer while
  /// tokens are tentative. On an error the layers that did evict are consistent, and the error of the first that did not is
  /// reported.
  [[nodiscard]] Result<SequenceReport> evict_where_due() { return evict_where_due(SerialExecutor{}); }
  /// The same with the layers spread over threads, or the KV heads of a layer where fewer are due than there are workers; the
  /// same bits whatever the executor.
  template <class ExecutorT>
  requires Executor<std::remove_cvref_t<ExecutorT>>
  [[nodiscard]] Result<SequenceReport> evict_where_due(ExecutorT&& executor) {
    if (executor.num_workers() > static_cast<index_t>(works_.size()))
      return detail::invalid("executor has ", executor.num_workers(), " workers: options.workers = ", works_.size());
    if (drafts_.size() > 0) return report_of({});
    if constexpr (one_set_for_all) {
      return evict_all();
    } else {
      if (heads_per_step_ > 0) return evict_a_slice(executor);
      note_due();
      const std::span<const index_t> due = turns_.pick();
      const auto count = static_cast<index_t>(due.size());
      if (count < executor.num_workers()) {  // rather the heads of a layer
        for (const index_t l : due) {
          const auto plan = [&](KeepPlan& out) { return policy(l).plan(cache(l), works_, out, executor); };
          steps_[static_cast<std::size_t>(l)] = evict_layer(l, works_[0], plan, executor);
        }
      } else {
        executor.run(count, [this, due](index_t i, index_t worker) {
          const index_t l = due[static_cast<std::size_t>(i)];
          Workspace& work = works_[static_cast<std::size_t>(worker)];
          const auto plan = [&](KeepPlan& out) { return policy(l).plan(cache(l), work, out); };
          steps_[static_cast<std::size_t>(l)] = evict_layer(l, work, plan, SerialExecutor{});
        });
      }
      return report_of(due);
    }
  }

  /// The queries `[query_heads][head_dim]` of a tentative token in one layer, before RoPE: a draft of speculative decoding. The
  /// engine writes and appends its keys and values as always. No policy sees it before `accept`.
  [[nodiscard]] Status observe_draft(index_t layer, std::span<const float> queries, position_t position) {
    return take_draft(layer, queries, position, false);
  }
  /// The same with queries as the attention used them.
  [[nodiscard]] Status observe_draft_rotated(index_t layer, std::span<const float> queries, position_t position) {
    return take_draft(layer, queries, position, true);
  }
  [[nodiscard]] index_t num_draft_tokens() const noexcept { return drafts_.size(); }

  /// The first `count` tentative tokens become real, as if they had been observed one by one; the others are taken back from
  /// every cache, exactly. Refused, with nothing changed, unless every layer saw all of them and they are the newest of its
  /// cache. A layer that became due at any of them evicts in the next `evict_where_due`.
  [[nodiscard]] Status accept(index_t count) {
    const index_t drafts = drafts_.size();
    if (count < 0 || count > drafts)
      return detail::invalid("count = ", count, ": must be between 0 and the ", drafts, " drafts");
    for (index_t l = 0; l < num_layers(); ++l)
      if (drafts_.size(l) != drafts)
        return detail::error(StatusCode::out_of_order, "layer ", l, " has seen ", drafts_.size(l), " of ", drafts,
                             " tentative tokens");
    if (Status s = check_drafts(); !s) return s;
    for (index_t l = 0; l < num_layers(); ++l) {
      if (Result<index_t> undone = cache(l).rollback(drafts - count); !undone) return undone.status();
      for (index_t i = 0; i < count; ++i) {
        const auto queries = drafts_.queries(l, i).first(static_cast<std::size_t>(width_of(l)));
        if (Status s = drafts_.rotated(l, i) ? policy(l).observe_rotated(queries, drafts_.position(l, i))
                                             : policy(l).observe(queries, drafts_.position(l, i));
            !s)
          return s;
        turns_.note(l, policy(l), cache(l));
      }
    }
    drafts_.keep(0);
    return {};
  }
  /// Takes back the newest `count` tokens, tentative ones exactly and observed ones never; returns how many really were.
  [[nodiscard]] Result<index_t> rollback(index_t count) {
    if (count < 0) return detail::invalid("count = ", count, ": must not be negative");
    if (Status s = check_drafts(); !s) return s;
    const index_t undone = std::min(count, drafts_.size());
    const index_t left = drafts_.size() - undone;
    for (index_t l = 0; l < num_layers(); ++l)
      if (Result<index_t> rows = cache(l).rollback(std::max<index_t>(0, drafts_.size(l) - left)); !rows) return rows.status();
    drafts_.keep(left);
    return undone;
  }

  /// Whether `copy_from` takes `other`: the error that it would give, or would give if `other` held what `held` holds.
  [[nodiscard]] Status check_copy_from(const Sequence& other) const { return check_copy_from(other, other); }
  [[nodiscard]] Status check_copy_from(const Sequence& other, const Sequence& held) const {
    if (num_layers() != other.num_layers())
      return detail::invalid("copy_from: ", other.num_layers(), " layers, not ", num_layers());
    if (!drafts_.fits(held.drafts_))
      return detail::error(StatusCode::out_of_capacity, "copy_from: ", held.drafts_.size(),
                           " tentative tokens: more than max_draft_tokens, or queries of another size");
    for (index_t l = 0; l < num_layers(); ++l)
      if (Status s = cache(l).check_copy_from(other.cache(l), held.cache(l)); !s) return s;
    return {};
  }
  /// Becomes a fork of `other`, in this sequence's own memory: policies, rows and tentative tokens. For sequences of the same
  /// make; capacity and memory layout may be others. Refused with nothing changed. Pinned prefixes: see
  /// `PlaneCache::copy_from`.
  [[nodiscard]] Status copy_from(const Sequence& other) {
    if (this == &other) return {};
    if (Status s = check_copy_from(other); !s) return s;
    for (index_t l = 0; l < num_layers(); ++l) {
      if (Status s = cache(l).copy_from(other.cache(l)); !s) return s;
      policy(l) = other.policy(l);
    }
    drafts_.copy_from(other.drafts_);
    turns_.copy_from(other.turns_);
    slices_.copy_from(other.slices_);
    sliced_layer_ = other.sliced_layer_;
    log_.forget_slices();
    return {};
  }

  /// Appends policies, books and rows of all layers to `out`, with version and checksum. Tentative tokens are not saved: accept
  /// or take them back before. A layer whose scoring is spread over steps (`heads_per_step`) begins it anew after a load.
  /// Allocates.
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
  /// bytes, another shape, storage type or number of layers, and a cache with a pinned prefix, which would be overwritten, are
  /// refused by name, and nothing has changed. References to policies and caches stay valid. Allocates.
  [[nodiscard]] Status load(std::span<const std::byte> in) {
    Sequence copy = *this;
    if (Status s = detail::load_framed(in, [&](StateReader& archive) { copy.read(archive); }); !s) return s;
    std::move(copy.policies_.begin(), copy.policies_.end(), policies_.begin());
    std::move(copy.caches_.begin(), copy.caches_.end(), caches_.begin());
    drafts_.keep(0);
    slices_.stop();
    turns_.copy_from(copy.turns_);
    return {};
  }

 private:
  static constexpr bool one_set_for_all = CacheT::granularity == Granularity::per_sequence;
  struct Step {
    Status status{};
    EvictionReport report{};
    index_t unchanged_prefix = 0;
    std::optional<EvictionEvent> event{};  // for the log
  };

  Sequence(std::vector<PolicyT> policies, std::vector<CacheT> caches, const SequenceOptions& options)
      : policies_(std::move(policies)),
        caches_(std::move(caches)),
        drafts_(num_layers(), widest(), options.max_draft_tokens),
        steps_(policies_.size()),
        turns_(num_layers(), options.layers_per_step),
        heads_per_step_(options.heads_per_step),
        over_layers_(options.over_layers) {
    WorkspaceSize size;
    if constexpr (PolicyT::may_take_notes)
      for (PolicyT& p : policies_) p.reserve(options.capacity);
    for (std::size_t l = 0; l < policies_.size(); ++l)
      size = max(size, max(policies_[l].workspace_size(options.capacity), realign_workspace_size(caches_[l].key_dim())));
    if (one_set_for_all) size.bytes += detail::shared_scores_size(policies_[0].shape().kv_heads, options.capacity).bytes;
    works_.assign(static_cast<std::size_t>(options.workers), Workspace(size));
    if (heads_per_step_ > 0) slices_ = {std::span<const PolicyT>(policies_), options.capacity};
    for (index_t m = 0; m < static_cast<index_t>(options.kinds.size()); ++m)
      if (options.kinds[static_cast<std::size_t>(m)] == LayerKind::global) model_layers_.push_back(m);
    for (index_t l = 0; options.kinds.empty() && l < num_layers(); ++l) model_layers_.push_back(l);
  }

  /// Numbers that a token's queries have in a layer; 0 where its policy looks at none.
  [[nodiscard]] index_t width_of(index_t layer) const noexcept {
    if (!std::remove_cvref_t<decltype(policy(layer).observer())>::needs_queries) return 0;
    return policy(layer).shape().query_heads * policy(layer).shape().head_dim;
  }
  [[nodiscard]] index_t widest() const noexcept {
    index_t width = 0;
    for (index_t l = 0; l < num_layers(); ++l) width = std::max(width, width_of(l));
    return width;
  }
  [[nodiscard]] Status take_draft(index_t layer, std::span<const float> queries, position_t position, bool rotated) {
    if (layer < 0 || layer >= num_layers()) return detail::invalid("layer = ", layer, ": must be below ", num_layers());
    if (position < drafts_.next_position(layer))
      return detail::error(StatusCode::out_of_order, "position = ", position, ": must be at least ",
                           drafts_.next_position(layer));
    if (Status s = policy(layer).check_token(queries, position, rotated); !s) return s;
    return drafts_.push(layer, width_of(layer) > 0 ? queries : queries.first(0), position, rotated);
  }
  /// An error unless the tentative tokens of each layer are the newest of its cache and its policy has seen none behind them.
  [[nodiscard]] Status check_drafts() const {
    for (index_t l = 0; l < num_layers(); ++l) {
      const index_t drafts = drafts_.size(l);
      const index_t firm = detail::tokens_of(cache(l), 0) - drafts;
      bool newest = drafts <= cache(l).num_undoable();
      for (index_t i = 0; i < drafts && newest; ++i) newest = cache(l).position(0, firm + i) == drafts_.position(l, i);
      if (!newest || (drafts > 0 && drafts_.position(l, 0) < policy(l).next_position()))
        return detail::error(StatusCode::out_of_order, "layer ", l, ": the newest tokens of its cache are not its ", drafts,
                             " tentative ones");
    }
    return {};
  }

  void note_due() {
    for (index_t l = 0; l < num_layers(); ++l) turns_.note(l, policy(l), cache(l));
  }

  template <class MakePlan, class ExecutorT>
  [[nodiscard]] Step evict_layer(index_t layer, Workspace& work, MakePlan make_plan, ExecutorT&& executor) {
    std::optional<EvictionEvent> event;
    const auto move = [&](const KeepPlan& plan) {
      return detail::move_tokens(cache(layer), plan, policy(layer).rope(), work, executor);
    };
    const Result<EvictionReport> report =
        log_.evict(layer, policy(layer), cache(layer), work, heads_per_step_ > 0, make_plan, move, event);
    if (!report) return {report.status(), {}, 0, {}};
    return {{}, *report, work.plan().unchanged_prefix(), std::move(event)};
  }

  /// What became of these layers; what they evicted goes to the log.
  [[nodiscard]] Result<SequenceReport> report_of(std::span<const index_t> layers) {
    SequenceReport total;
    for (const CacheT& c : caches_) total.unchanged_prefix = std::max(total.unchanged_prefix, c.num_tokens());
    Status first_error;
    for (const index_t l : layers) {
      Step& step = steps_[static_cast<std::size_t>(l)];
      log_.add(step.event);
      if (!step.status && first_error.ok()) first_error = step.status;
      total.unchanged_prefix = std::min(total.unchanged_prefix, step.unchanged_prefix);
      ++total.layers;
      total.evicted += step.report.evicted;
      total.num_non_finite += step.report.num_non_finite;
    }
    if (!first_error) return first_error;
    return total;
  }

  [[nodiscard]] Result<SequenceReport> evict_all() {
    const index_t tokens = cache(0).num_tokens();
    for (index_t l = 1; l < num_layers(); ++l)
      if (cache(l).num_tokens() != tokens)
        return detail::error(StatusCode::out_of_order, "layer ", l, " holds ", cache(l).num_tokens(), " tokens and layer 0 ",
                             tokens, ": they keep one set");
    turns_.note(0, policy(0), cache(0));
    const bool due = turns_.waits(0);
    turns_.clear();
    if (!due) return SequenceReport{.unchanged_prefix = tokens};
    return detail::evict_together(std::span(policies_), std::span(caches_), over_layers_, works_[0], log_.get());
  }

  /// The next slice of the eviction that is in progress, or the first one of the next layer that is due.
  template <Executor ExecutorT>
  [[nodiscard]] Result<SequenceReport> evict_a_slice(ExecutorT& executor) {
    note_due();
    if (!turns_.waits(sliced_layer_)) slices_.stop();
    if (!slices_.active()) {
      if (!turns_.any_waits()) return report_of({});
      sliced_layer_ = turns_.next();
    }
    const index_t layer = sliced_layer_;
    const double start = log_.now();
    if (!slices_.active() || !slices_.intact(policy(layer), cache(layer))) {
      if (Status s = slices_.begin(policy(layer), cache(layer), works_[0]); !s) return s;
      log_.begin_slices(policy(layer));
    }
    if (!slices_.all_scored(policy(layer))) {
      if (Status s = slices_.advance(policy(layer), cache(layer), heads_per_step_, works_, executor); !s) return s;
      log_.add_slice(start);
      return report_of({});
    }
    steps_[static_cast<std::size_t>(layer)] = evict_layer(
        layer, works_[0], [&](KeepPlan& plan) { return slices_.plan(policy(layer), cache(layer), works_[0], plan); }, executor);
    slices_.stop();
    turns_.evicted(layer);
    return report_of(std::span(&layer, 1));
  }

  template <class Archive>
  void exchange_state(Archive& archive) {
    archive.expect("layers", num_layers());
    turns_.exchange(archive);
    for (PolicyT& p : policies_) p.exchange(archive);
    for (CacheT& c : caches_) c.exchange_books(archive);
  }
  void read(StateReader& archive) {
    exchange_state(archive);
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
  detail::LayerTurns turns_;
  index_t heads_per_step_;
  Reduce over_layers_;
  detail::SlicedEviction<PolicyT, CacheT> slices_;  // of the layer below, where heads_per_step_ is set
  index_t sliced_layer_ = 0;
  detail::LogHandle log_{};
};

}  // namespace beaconkv::inline v0
