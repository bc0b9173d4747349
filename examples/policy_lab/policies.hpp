// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// The policies that the lab knows by name, each ready to run on all layers of a model.

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "beaconkv/sequence/event_log.hpp"
#include "engine/session.hpp"
#include "policy_lab/settings.hpp"

namespace beaconkv::lab {

/// What a policy and its caches take, item by item, of all layers together.
struct PolicyBytes {
  std::size_t cache = 0;      ///< keys and values of the tokens that are held
  std::size_t beacons = 0;    ///< queries that were sampled
  std::size_t queries = 0;    ///< recent queries, or their moments
  std::size_t keys = 0;       ///< what each cached key has: running scores, credits, lengths of values
  std::size_t books = 0;      ///< positions of the cached tokens
  std::size_t workspace = 0;  ///< scratch, which sequences may share

  [[nodiscard]] std::size_t state() const noexcept { return beacons + queries + keys; }
  [[nodiscard]] std::size_t total() const noexcept { return cache + state() + books + workspace; }
};

/// One policy at work on every layer of one sequence. It holds the policy objects and a view of each layer's KV memory.
class ModelPolicy {
 public:
  virtual ~ModelPolicy() = default;

  /// A copy with the same state that works on `session`, itself a copy of the session that this one works on.
  [[nodiscard]] virtual Result<std::unique_ptr<ModelPolicy>> fork(engine::Session& session) const = 0;

  /// After `session.prefill`: takes note of the prompt, and evicts where the policy does that at once. Returns how many layers
  /// did.
  [[nodiscard]] virtual Result<index_t> after_prefill(engine::Session& session) = 0;
  /// After `session.decode`, first: the views learn of the new row.
  [[nodiscard]] virtual Status append(engine::Session& session) = 0;
  /// Then: the policies see the token's queries and evict where they are due. Returns how many layers evicted.
  [[nodiscard]] virtual Result<index_t> observe_and_evict(engine::Session& session) = 0;

  /// Evictions are taken down there from now on; null: no more. A fork has no log.
  virtual void set_event_log(EventLog* log) = 0;
  /// These positions stay, in every layer.
  [[nodiscard]] virtual Status keep(Range positions) = 0;
  /// The newest token goes at once, from every layer and head, whatever the policy says. Where a head of a
  /// layer does not hold it any more, nothing happens in that layer.
  [[nodiscard]] virtual Status evict_newest(engine::Session& session) = 0;

  /// Generated tokens left by an eviction, where the rule has such a number, the same for all layers.
  [[nodiscard]] virtual std::optional<index_t> budget_min() const = 0;
  [[nodiscard]] virtual index_t num_tokens(index_t layer, index_t head) const = 0;
  [[nodiscard]] virtual position_t position(index_t layer, index_t head, index_t slot) const = 0;
  [[nodiscard]] virtual index_t bytes_per_token() const = 0;  ///< of all layers together
  [[nodiscard]] virtual std::size_t state_bytes() const = 0;  ///< of all layers together
  [[nodiscard]] virtual PolicyBytes bytes() const = 0;
  /// How often beacons were sampled since the prompt, in each layer on average: where a bank was full, and at an
  /// eviction. Each time all query heads are.
  [[nodiscard]] virtual double samplings() const = 0;
};

/// What a policy is made for.
struct PolicyRequest {
  const engine::Model* model = nullptr;
  index_t capacity = 0;  ///< rows of the session
  index_t budget = 0;
  bool as_published = false;  ///< the paper's own trigger, protection and growth instead of the common rule
  index_t seed = 0;
  index_t layers_per_step = 0;  ///< the most layers that evict in one decode step; 0: all that are due
};

/// Makes a policy for all layers of a session. Bad settings are errors.
using MakePolicy = Result<std::unique_ptr<ModelPolicy>> (*)(const PolicyRequest& request, Settings& settings,
                                                            engine::Session& session);

/// A policy by name.
struct PolicyEntry {
  std::string_view name;
  MakePolicy make;          ///< under the rule that is common to all
  MakePolicy as_published;  ///< by its paper's own rule

  [[nodiscard]] MakePolicy maker(const PolicyRequest& request) const noexcept {
    return request.as_published ? as_published : make;
  }
};

/// All of them, in the order of the table.
[[nodiscard]] const std::vector<PolicyEntry>& policy_entries();

/// The entry of that name, or an error that lists the names.
[[nodiscard]] Result<PolicyEntry> find_policy(std::string_view name);

}  // namespace beaconkv::lab
