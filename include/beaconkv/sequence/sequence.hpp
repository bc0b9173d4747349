// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// All layers of one request: they evict together, fork, take tokens back, are saved and loaded.

#include <algorithm>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "beaconkv/policy/evict.hpp"
#include "beaconkv/policy/realign.hpp"
#include "beaconkv/sequence/draft_tokens.hpp"
#include "beaconkv/sequence/executor.hpp"
#include "beaconkv/sequence/sequence_options.hpp"

namespace beaconkv::inline v0 {

/// The policies and caches of all global layers of one sequence. Layers may have policies with different options or budgets.
///
/// A copy forks the policies' state, but cache views in a copy still refer to the same memory: use `copy_from` with a sequence
/// over memory of its own. One thread uses a sequence at a time. Nothing allocates after construction, but for `save`, `load`
/// and errors.
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

  /// After how many more decoded tokens a layer will be due, at most `most`; 0: one is now. While tokens are tentative nothing
  /// evicts: with no more drafts than this, evictions come where they come without drafts. Ask while no token is tentative.
  [[nodiscard]] index_t tokens_until_due(index_t most) const {
    if (std::find(waiting_.begin(), waiting_.end(), std::uint8_t{1}) != waiting_.end()) return 0;
    for (index_t l = 0; l < (one_set_for_all ? 1 : num_layers()); ++l) most = policy(l).tokens_until_due(cache(l), most);
    return most;
  }

  /// Evicts where a policy is due, or was due before it was its layer's turn or between accepted tokens, and in no layer while
  /// tokens are tentative. On an error the layers that did evict are consistent, and the error of the first that did not is
  /// reported.
  [[nodiscard]] Result<SequenceReport> evict_where_due() { return evict_where_due(SerialExecutor{}); }
  /// The same with the layers spread over threads; the same bits whatever the executor.
  template <class ExecutorT>
  requires Executor<std::remove_cvref_t<ExecutorT>>
  [[nodiscard]] Result<SequenceReport> evict_where_due(ExecutorT&& executor) {
    if (executor.num_workers() > static_cast<index_t>(works_.size()))
      return detail::invalid("executor has ", executor.num_workers(), " workers: options.workers = ", works_.size());
    if (drafts_.size() > 0) return report_of(0);
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
        note_due(l);
      }
    }
    drafts_.keep(0);
    return {};
  }
  /// Takes back the newest `count` tokens and returns how many really were: tentative ones are taken back exactly, in each
  /// layer that saw them, observed ones never (a saved copy brings those back).
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

  /// Becomes a fork of `other`, in this sequence's own memory: policies, rows and tentative tokens. For sequences of the same
  /// make; capacity and memory layout may be others. Refused with nothing changed.
  [[nodiscard]] Status copy_from(const Sequence& other) {
    if (num_layers() != other.num_layers())
      return detail::invalid("copy_from: ", other.num_layers(), " layers, not ", num_layers());
    if (this == &other) return {};
    if (!drafts_.fits(other.drafts_))
      return detail::error(StatusCode::out_of_capacity, "copy_from: ", other.drafts_.size(),
                           " tentative tokens: more than max_draft_tokens, or queries of another size");
    for (index_t l = 0; l < num_layers(); ++l)
      if (Status s = cache(l).check_copy_from(other.cache(l)); !s) return s;
    for (index_t l = 0; l < num_layers(); ++l) {
      if (Status s = cache(l).copy_from(other.cache(l)); !s) return s;
      policy(l) = other.policy(l);
    }
    drafts_.copy_from(other.drafts_);
    waiting_ = other.waiting_;
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
  /// bytes, another shape, storage type or number of layers are refused by name, and nothing has changed. References
  /// to policies and caches stay valid. Allocates.
  [[nodiscard]] Status load(std::span<const std::byte> in) {
    Sequence copy = *this;
    if (Status s = detail::load_framed(in, [&](StateReader& archive) { copy.read(archive); }); !s) return s;
    std::move(copy.policies_.begin(), copy.policies_.end(), policies_.begin());
    std::move(copy.caches_.begin(), copy.caches_.end(), caches_.begin());
    drafts_.keep(0);
    waiting_ = copy.waiting_;
    next_ = copy.next_;
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
        drafts_(num_layers(), widest(), options.max_draft_tokens),
        steps_(policies_.size()),
        due_(policies_.size()),
        waiting_(policies_.size()),
        layers_per_step_(options.layers_per_step),
        over_layers_(options.over_layers) {
    WorkspaceSize size;
    for (std::size_t l = 0; l < policies_.size(); ++l)
      size = max(size, max(policies_[l].workspace_size(options.capacity), realign_workspace_size(caches_[l].key_dim())));
    if (one_set_for_all) size.bytes += shared_scores_size(options.capacity).bytes;
    works_.assign(static_cast<std::size_t>(options.workers), Workspace(size));
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
  /// The scores of a layer, and what all layers come to.
  [[nodiscard]] WorkspaceSize shared_scores_size(index_t tokens) const {
    return detail::measure([&](Workspace& work) {
      static_cast<void>(work.take<float>(policies_[0].shape().kv_heads * tokens));
      static_cast<void>(work.take<float>(tokens));
    });
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

  /// A schedule may say so once only: remembers it until the layer evicts.
  void note_due(index_t layer) {
    std::uint8_t& waits = waiting_[static_cast<std::size_t>(layer)];
    waits = policy(layer).eviction_on() && (waits != 0 || policy(layer).due(cache(layer))) ? 1 : 0;
  }
  /// The layers that evict now, to `due_`: from where the last call stopped.
  [[nodiscard]] index_t pick_due() {
    const index_t most = layers_per_step_ > 0 ? layers_per_step_ : num_layers();
    index_t count = 0;
    index_t last = next_;
    for (index_t i = 0; i < num_layers(); ++i) {
      const index_t l = (next_ + i) % num_layers();
      note_due(l);
      if (waiting_[static_cast<std::size_t>(l)] == 0 || count == most) continue;
      waiting_[static_cast<std::size_t>(l)] = 0;
      due_[static_cast<std::size_t>(count++)] = l;
      last = l;
    }
    if (layers_per_step_ > 0 && count > 0) next_ = (last + 1) % num_layers();
    std::sort(due_.begin(), due_.begin() + count);
    return count;
  }

  [[nodiscard]] Step evict_layer(index_t layer, Workspace& work) {
    const Result<EvictionReport> report = detail::evict_by(policy(layer), cache(layer), work, [&](const KeepPlan& plan) {
      return detail::move_tokens(cache(layer), plan, policy(layer).rope(), work);
    });
    if (!report) return {report.status(), {}, 0};
    return {{}, *report, work.plan().unchanged_prefix()};
  }

  [[nodiscard]] Result<SequenceReport> report_of(index_t count) const {
    SequenceReport total;
    for (const CacheT& c : caches_) total.unchanged_prefix = std::max(total.unchanged_prefix, c.num_tokens());
    Status first_error;
    for (index_t i = 0; i < count; ++i) {
      const Step& step = steps_[static_cast<std::size_t>(due_[static_cast<std::size_t>(i)])];
      if (!step.status && first_error.ok()) first_error = step.status;
      total.unchanged_prefix = std::min(total.unchanged_prefix, step.unchanged_prefix);
      ++total.layers;
      total.evicted += step.report.evicted;
      total.num_non_finite += step.report.num_non_finite;
    }
    if (!first_error) return first_error;
    return total;
  }

  /// One set for all layers: scored layer by layer, reduced over heads and layers, chosen once.
  [[nodiscard]] Result<SequenceReport> evict_together() {
    const index_t tokens = cache(0).num_tokens();
    for (index_t l = 1; l < num_layers(); ++l)
      if (cache(l).num_tokens() != tokens)
        return detail::error(StatusCode::out_of_order, "layer ", l, " holds ", cache(l).num_tokens(), " tokens and layer 0 ",
                             tokens, ": they keep one set");
    note_due(0);
    SequenceReport total{.unchanged_prefix = tokens};
    const bool due = waiting_[0] != 0;
    std::fill(waiting_.begin(), waiting_.end(), std::uint8_t{0});
    if (!due) return total;
    Workspace& work = works_[0];
    if (Status s = work.require(shared_scores_size(tokens)); !s) return s;
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
    if (over_layers_ == Reduce::mean)
      for (float& x : shared.row(0)) x /= static_cast<float>(num_layers());
    KeepPlan& plan = work.plan();
    if (Status s = policy(0).select(cache(0), shared, work, plan); !s) return s;
    total.unchanged_prefix = plan.unchanged_prefix();
    for (index_t l = 0; l < num_layers(); ++l) {  // none may refuse once another has evicted
      if (Status s = plan.readdress(cache(l)); !s) return s;
      if (Status s = detail::check_move(cache(l), plan, policy(l).rope(), work); !s) return s;
    }
    for (index_t l = 0; l < num_layers(); ++l) {
      if (Status s = plan.readdress(cache(l)); !s) return s;
      if (Status s = detail::move_tokens(cache(l), plan, policy(l).rope(), work); !s) return s;
      if (Status s = policy(l).commit(plan); !s) return s;
      ++total.layers;
      total.evicted += plan.num_evicted(0);
    }
    return total;
  }

  template <class Archive>
  void exchange_state(Archive& archive) {
    archive.expect("layers", num_layers());
    archive.value("next layer to evict", next_, 0, num_layers() - 1);
    archive.array("layers that wait for their turn", std::span(waiting_));
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
  std::vector<index_t> due_;
  std::vector<std::uint8_t> waiting_;  // whether each layer is to evict when its turn comes
  index_t layers_per_step_;
  Reduce over_layers_;
  index_t next_ = 0;
};

}  // namespace beaconkv::inline v0
