// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// A model that talks under an eviction policy: an engine's session, and a `Sequence` over its KV memory. What an integration
/// into an engine comes to, with fork, drafts, saving and loading.

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "beaconkv/beaconkv.hpp"
#include "engine/sampler.hpp"
#include "engine/session.hpp"

namespace beaconkv::conversation {

/// Greedy. The newest token is always one that was picked and not yet read: that, the policies and the rows are all that a
/// conversation is. Errors are thrown.
template <class Policy>
class Talk {
 public:
  using Layers = Sequence<Policy, PlaneCache<float>>;
  static constexpr index_t chunk = 32;  ///< tokens of a prompt that are read together
  static constexpr index_t most_drafts = 8;

  /// Memory for `capacity` rows in every layer, and a copy of `policy` for each.
  Talk(const engine::Model& model, const Policy& policy, index_t capacity)
      : session_(model, capacity), layers_(layers_of(session_, policy)) {}
  Talk(const Talk&) = delete;  // the caches are views: see `fork_from`
  Talk& operator=(const Talk&) = delete;
  Talk(Talk&&) noexcept = default;
  Talk& operator=(Talk&&) noexcept = default;

  /// Reads what somebody says, chunk by chunk; evictions follow the attention of each chunk. A token that was picked and not
  /// yet read is dropped.
  void read(std::span<const int> tokens) {
    while (!tokens.empty()) {
      const std::span<const int> now = tokens.first(std::min<std::size_t>(tokens.size(), chunk));
      session_.prefill(now).or_throw();
      for (index_t l = 0; l < layers_.num_layers(); ++l) {
        const QueryView queries = session_.queries(l);
        layers_.cache(l).append_run(session_.next_position() - queries.tokens, queries.tokens).or_throw();
        layers_.policy(l).prefill(queries, layers_.workspace()).or_throw();
      }
      evict();
      tokens = tokens.subspan(now.size());
    }
    picked_ = engine::greedy(session_.logits()).or_throw();
  }

  /// The token that was picked, and as many of `drafts` behind it as the model would have written (speculative decoding); the
  /// others are taken back. Not more are read than fit before the next eviction, so that it sees what it sees without drafts.
  ///
  /// The drafts are read one by one: attention over several tokens at once adds in another order, and its last bits differ from
  /// those of decoding. An engine that reads them together writes the same text only as far as rounding allows.
  std::vector<int> write(std::span<const int> drafts = {}) {
    std::vector<int> text{picked_};
    const position_t position = session_.next_position();
    session_.decode(picked_).or_throw();
    for (index_t l = 0; l < layers_.num_layers(); ++l) {
      layers_.cache(l).append(position).or_throw();
      layers_.policy(l).observe(queries(l), position).or_throw();
    }
    evict();
    picked_ = engine::greedy(session_.logits()).or_throw();
    if (!drafts.empty()) try_out(drafts, text);
    return text;
  }

  /// Goes on from where `other` stands, in this one's own memory.
  void fork_from(const Talk& other) {
    layers_.copy_from(other.layers_).or_throw();
    picked_ = other.picked_;
    follow();
  }

  /// Everything, as bytes.
  [[nodiscard]] std::vector<std::byte> save() const {
    std::vector<std::byte> out;
    StateWriter archive(out);
    archive.value("picked token", picked_);
    archive.value("evictions", num_evictions_);
    archive.value("drafts", num_drafts_);
    archive.value("taken back", num_taken_back_);
    layers_.save(out).or_throw();
    return out;
  }
  void load(std::span<const std::byte> in) {
    StateReader archive(in);
    archive.value("picked token", picked_, 0, session_.model().vocab_size() - 1);
    archive.value("evictions", num_evictions_, 0);
    archive.value("drafts", num_drafts_, 0);
    archive.value("taken back", num_taken_back_, 0);
    archive.status().or_throw();
    layers_.load(in.last(archive.left())).or_throw();
    follow();
  }

  /// The token that comes next: picked, not yet read.
  [[nodiscard]] int picked() const noexcept { return picked_; }
  [[nodiscard]] const Layers& layers() const noexcept { return layers_; }
  [[nodiscard]] index_t capacity() const noexcept { return session_.capacity(); }
  [[nodiscard]] index_t num_evictions() const noexcept { return num_evictions_; }  ///< of single layers
  [[nodiscard]] index_t num_drafts() const noexcept { return num_drafts_; }
  [[nodiscard]] index_t num_taken_back() const noexcept { return num_taken_back_; }

 private:
  [[nodiscard]] static Layers layers_of(engine::Session& session, const Policy& policy) {
    std::vector<PlaneCache<float>> caches;
    for (index_t l = 0; l < session.model().layers(); ++l)
      caches.push_back(
          PlaneCache<float>::head_major(session.keys(l), session.values(l), session.model().shape(), session.capacity()));
    std::vector<Policy> policies(caches.size(), policy);
    return Layers::make(std::move(policies), std::move(caches),
                        {.capacity = session.capacity(), .max_draft_tokens = most_drafts})
        .or_throw();
  }

  /// Adds the right ones of `drafts` to the text.
  void try_out(std::span<const int> drafts, std::vector<int>& text) {
    const index_t most = layers_.tokens_until_due(std::min(most_drafts, std::ssize(drafts)));
    drafts = drafts.first(static_cast<std::size_t>(most));
    std::vector<int> wanted{picked_};
    for (const int draft : drafts) {
      const position_t position = session_.next_position();
      session_.decode(draft).or_throw();
      for (index_t l = 0; l < layers_.num_layers(); ++l) {
        layers_.cache(l).append(position).or_throw();
        layers_.observe_draft(l, queries(l), position).or_throw();
      }
      wanted.push_back(engine::greedy(session_.logits()).or_throw());
    }
    const auto right = std::mismatch(drafts.begin(), drafts.end(), wanted.begin()).first - drafts.begin();
    layers_.accept(right).or_throw();
    evict();
    picked_ = wanted[static_cast<std::size_t>(right)];
    num_drafts_ += most;
    num_taken_back_ += most - right;
    text.insert(text.end(), drafts.begin(), drafts.begin() + right);
  }

  /// Pre-RoPE queries of the token that was decoded last.
  [[nodiscard]] std::span<const float> queries(index_t layer) const noexcept {
    const QueryView view = session_.queries(layer);
    return {view.data, static_cast<std::size_t>(view.heads * view.dim)};
  }

  void evict() {
    num_evictions_ += layers_.evict_where_due().or_throw().layers;
    follow();
  }
  /// The session learns which rows are left, and where the text stands.
  void follow() {
    for (index_t l = 0; l < layers_.num_layers(); ++l) session_.set_length(l, layers_.cache(l).num_tokens()).or_throw();
    session_.set_next_position(layers_.next_position()).or_throw();
  }

  engine::Session session_;
  Layers layers_;
  int picked_ = 0;
  index_t num_evictions_ = 0;
  index_t num_drafts_ = 0;
  index_t num_taken_back_ = 0;
};

}  // namespace beaconkv::conversation
