// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// What a policy remembers between evictions, and how the engine's queries get there.

#include <algorithm>
#include <limits>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "beaconkv/algorithm/rope.hpp"
#include "beaconkv/policy/observer.hpp"
#include "beaconkv/policy/schedule.hpp"
#include "beaconkv/policy/scorer.hpp"
#include "beaconkv/policy/selection.hpp"

namespace beaconkv::inline v0 {

/// The parts and the memory of an `EvictionPolicy`, which adds the decisions.
template <Observer ObserverT, class ScorerT, Schedule ScheduleT>
class PolicyState {
 public:
  /// Everything that a policy is made of.
  struct Parts {
    typename ObserverT::Options observer{};
    ScorerT scorer{};
    ScheduleT schedule{};
    Protection protection{};
    RopeTable rope{};  ///< empty: queries are taken rotated
    /// How scores of several heads become one where the cache keeps one set for all of them.
    Reduce shared_reduce = Reduce::mean;
  };

  [[nodiscard]] const Shape& shape() const noexcept { return shape_; }
  [[nodiscard]] const ObserverT& observer() const noexcept { return observer_; }
  [[nodiscard]] const ScorerT& scorer() const noexcept { return scorer_; }
  [[nodiscard]] const ScheduleT& schedule() const noexcept { return schedule_; }
  /// Null where the policy was made without a table.
  [[nodiscard]] const RopeTable* rope() const noexcept { return rope_.empty() ? nullptr : &rope_; }
  /// The position that the next token must at least have.
  [[nodiscard]] position_t next_position() const noexcept { return next_position_; }
  /// Positions below this are protected.
  [[nodiscard]] position_t prefix() const noexcept { return protection_.n_prefix ? *protection_.n_prefix : prompt_end_; }
  /// How scores of several heads become one where they keep one set.
  [[nodiscard]] Reduce shared_reduce() const noexcept { return shared_reduce_; }
  /// Bytes that the policy itself holds: remembered queries and per-slot state.
  [[nodiscard]] std::size_t state_bytes() const noexcept {
    std::size_t bytes = observer_.state_bytes();
    if constexpr (requires { scorer_.state_bytes(); }) bytes += scorer_.state_bytes();
    return bytes;
  }

  /// Queries of a prompt (or of its next chunk), pre-RoPE, at `first_position` and the positions behind it.
  [[nodiscard]] Status prefill(const QueryView& queries, Workspace& work, std::optional<position_t> first_position = {}) {
    return take_prompt(queries, work, first_position, false);
  }
  /// The same with queries as the attention used them.
  [[nodiscard]] Status prefill_rotated(const QueryView& queries, Workspace& work,
                                       std::optional<position_t> first_position = {}) {
    return take_prompt(queries, work, first_position, true);
  }
  /// A prompt of `tokens`, for a policy that looks at no query.
  [[nodiscard]] Status prefill_tokens(index_t tokens) requires(!ObserverT::needs_queries) {
    if (tokens < 0) return detail::invalid("tokens = ", tokens, ": must not be negative");
    if (next_position_ > std::numeric_limits<position_t>::max() - tokens)
      return detail::invalid("tokens = ", tokens, ": leave no position for what follows ", next_position_);
    note_prompt(next_position_, tokens);
    return {};
  }

  /// The queries `[query_heads][head_dim]` of one decoded token, pre-RoPE, and its true position.
  [[nodiscard]] Status observe(std::span<const float> queries, position_t position) {
    return take_token(queries, position, false);
  }
  /// The same with queries as the attention used them.
  [[nodiscard]] Status observe_rotated(std::span<const float> queries, position_t position) {
    return take_token(queries, position, true);
  }

  /// What `observe` (or `observe_rotated`) would say to a token, without taking it.
  [[nodiscard]] Status check_token(std::span<const float> queries, position_t position, bool rotated) const {
    const auto size = static_cast<index_t>(queries.size());
    if (size % shape_.query_heads != 0 && ObserverT::needs_queries)
      return detail::invalid("queries have ", size, " numbers: the shape has ", shape_.query_heads, " heads of ",
                             shape_.head_dim);
    const index_t dim = ObserverT::needs_queries ? size / shape_.query_heads : shape_.head_dim;
    return check_queries(shape_.query_heads, dim, position, 1, rotated);
  }

  /// Appends all that the policy remembers to `out`, with version and checksum. Its options are not part of it. Allocates.
  void save(std::vector<std::byte>& out) const {
    PolicyState copy = *this;  // one function reads and writes
    detail::save_framed(out, [&](StateWriter& archive) { copy.exchange(archive); });
  }
  /// Goes on where a policy of the same shape, observer and options stood when it was saved. Damaged bytes, another shape or
  /// another size of what is remembered are refused by name, and nothing has changed. Allocates.
  [[nodiscard]] Status load(std::span<const std::byte> in) {
    PolicyState copy = *this;
    if (Status s = detail::load_framed(in, [&](StateReader& archive) { copy.exchange(archive); }); !s) return s;
    *this = std::move(copy);
    return {};
  }
  /// Saves or loads (`archive.hpp`). Own observers, and own scorers that follow plans, need an `exchange` for this.
  template <class Archive>
  void exchange(Archive& archive) {
    static_assert(
        requires { observer_.exchange(archive); }, "this observer cannot be saved: it has no exchange(archive)");
    static_assert(
        requires { scorer_.exchange(archive); } || !requires(const KeepPlan& plan) { scorer_.commit(plan, shape_); },
        "this scorer cannot be saved: it follows plans and has no exchange(archive)");
    constexpr std::int64_t far = std::numeric_limits<position_t>::max();
    archive.expect("query_heads", shape_.query_heads);
    archive.expect("kv_heads", shape_.kv_heads);
    archive.expect("head_dim", shape_.head_dim);
    archive.value("next position", next_position_, 0, far);
    archive.value("end of the prompt", prompt_end_, 0, far);
    archive.value("after a prefill", after_prefill_);
    archive.value("has decoded", decoded_);
    archive.value("committed since a token", committed_since_token_);
    archive.value("eviction on", eviction_on_);
    rules_.exchange(archive);
    observer_.exchange(archive);
    if constexpr (ObserverT::needs_queries)
      archive.expect("rotary_dim", rope_.rotary_dim());  // 0 without a table: then queries are kept rotated
    if constexpr (requires { scorer_.exchange(archive); }) scorer_.exchange(archive);
    if constexpr (requires { schedule_.exchange(archive); }) schedule_.exchange(archive);
    if constexpr (Archive::loading) committed_epoch_.reset();  // states of caches have other numbers now
  }

  /// Protects the positions `[range.first, range.last)` from now on. Protected tokens still take part in the softmax and the
  /// pool. Allocates.
  [[nodiscard]] Status protect(Range range) { return rules_.protect(range); }
  /// Takes back a `protect` of the same range. No allocation.
  [[nodiscard]] Status unprotect(Range range) { return rules_.unprotect(range); }
  /// From now on tokens go in whole units, those between two boundaries (the first positions of messages, say); the unit with
  /// the lowest mean score goes first. An eviction may then free more than the schedule asks for. For caches that keep one set
  /// for all heads. Boundaries come in ascending order. Allocates.
  [[nodiscard]] Status add_boundary(position_t position) { return rules_.add_boundary(position); }

  /// Switched off, nothing is ever due: the cache fills up and its `append` says so.
  void set_eviction(bool on) noexcept { eviction_on_ = on; }
  [[nodiscard]] bool eviction_on() const noexcept { return eviction_on_; }
  /// The model changed its RoPE frequencies (LongRoPE): the queries that the policy remembers are kept pre-RoPE and follow. The
  /// cached keys do by `switch_rope`.
  [[nodiscard]] Status set_rope(const RopeTable& rope) {
    if (rope_.empty() != rope.empty())
      return detail::error(StatusCode::unsupported, "rope: a policy made ", rope_.empty() ? "without" : "with",
                           " a RopeTable cannot change that");
    if (!rope.empty() && rope.head_dim() != shape_.head_dim)
      return detail::invalid("rope.head_dim = ", rope.head_dim(), ": must be shape.head_dim = ", shape_.head_dim);
    rope_ = rope;
    return {};
  }

 protected:
  PolicyState(const Shape& shape, const Parts& parts)
      : shape_(shape),
        observer_(shape, parts.observer),
        scorer_(parts.scorer),
        schedule_(parts.schedule),
        protection_(parts.protection),
        rope_(parts.rope),
        shared_reduce_(parts.shared_reduce) {}

  [[nodiscard]] static Status validate_parts(const Shape& shape, const Parts& parts) {
    if (Status s = validate(shape); !s) return s;
    if (Status s = validate(parts.observer, shape); !s) return s;
    if (Status s = parts.scorer.validate(shape); !s) return s;
    if (Status s = validate(parts.protection); !s) return s;
    if (Status s = parts.schedule.validate(parts.protection.n_prefix, parts.protection.n_recent_kv); !s) return s;
    if (ObserverT::needs_rope && parts.rope.empty()) return detail::invalid("rope: this policy needs a RopeTable");
    if (!parts.rope.empty() && parts.rope.head_dim() != shape.head_dim)
      return detail::invalid("rope.head_dim = ", parts.rope.head_dim(), ": must be shape.head_dim = ", shape.head_dim);
    return {};
  }

  void note_prompt(position_t first_position, index_t tokens) {
    if (!decoded_) prompt_end_ = first_position + tokens;
    next_position_ = first_position + tokens;
    after_prefill_ = true;
    committed_since_token_ = false;
  }

  [[nodiscard]] Status check_queries(index_t heads, index_t dim, position_t position, index_t tokens, bool rotated) const {
    if (heads != shape_.query_heads || dim != shape_.head_dim)
      return detail::invalid("queries have ", heads, " heads of ", dim, ": the shape has ", shape_.query_heads, " of ",
                             shape_.head_dim);
    if (!rotated && rope_.empty() && ObserverT::needs_queries)
      return detail::error(StatusCode::unsupported,
                           "pre-RoPE queries: this policy was made without a RopeTable, use the _rotated call");
    if (position < next_position_)
      return detail::error(StatusCode::out_of_order, "position = ", position, ": must be at least ", next_position_);
    if (position > std::numeric_limits<position_t>::max() - tokens)
      return detail::invalid("position = ", position, ": leaves no position for what follows");
    return {};
  }

  [[nodiscard]] Status take_prompt(const QueryView& queries, Workspace& work, std::optional<position_t> first_position,
                                   bool rotated) {
    if (queries.tokens < 0) return detail::invalid("queries.tokens = ", queries.tokens, ": must not be negative");
    if (ObserverT::needs_queries && queries.data == nullptr && queries.tokens > 0)
      return detail::invalid("queries.data is null");
    const position_t first = first_position.value_or(next_position_);
    if (Status s = check_queries(queries.heads, queries.dim, first, queries.tokens, rotated); !s) return s;
    if (Status s = observer_.prefill({queries, first, rotated ? rope() : nullptr}, work); !s) return s;
    note_prompt(first, queries.tokens);
    return {};
  }

  [[nodiscard]] Status take_token(std::span<const float> queries, position_t position, bool rotated) {
    if (Status s = check_token(queries, position, rotated); !s) return s;
    const QueryView view = QueryView::token_major(queries.data(), 1, shape_.query_heads, shape_.head_dim);
    if (Status s = observer_.observe({view, position, rotated ? rope() : nullptr}); !s) return s;
    next_position_ = position + 1;
    after_prefill_ = false;
    committed_since_token_ = false;
    decoded_ = true;
    return {};
  }

  Shape shape_;
  ObserverT observer_;
  ScorerT scorer_;
  ScheduleT schedule_;
  Protection protection_;
  SelectionRules rules_;
  RopeTable rope_;
  Reduce shared_reduce_;
  position_t next_position_ = 0;
  position_t prompt_end_ = 0;
  bool after_prefill_ = false;
  bool decoded_ = false;
  bool committed_since_token_ = false;
  bool eviction_on_ = true;
  std::optional<std::uint64_t> committed_epoch_{};
};

}  // namespace beaconkv::inline v0
