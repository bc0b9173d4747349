// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "policy_lab/replay.hpp"

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

namespace beaconkv::lab {

Status Replay::evict(const EvictionEvent& event) {
  if (event.layer < 0 || event.layer >= layers_)
    return detail::invalid("an eviction of layer ", event.layer, ": the model has ", layers_);
  if (static_cast<index_t>(event.heads.size()) != shape_.kv_heads)
    return detail::invalid("an eviction of ", event.heads.size(), " KV heads: the model has ", shape_.kv_heads);
  for (index_t h = 0; h < shape_.kv_heads; ++h) {
    Gone& gone = gone_[static_cast<std::size_t>(event.layer * shape_.kv_heads + h)];
    for (const LoggedToken& token : event.heads[static_cast<std::size_t>(h)].evicted) {
      const auto at = static_cast<std::size_t>(token.position);
      if (token.position < 0 || token.position > event.step || (at < gone.size() && gone[at] > 0))
        return detail::invalid("step ", event.step, ", layer ", event.layer, ", head ", h, ": position ", token.position,
                               " cannot go: ", token.position > event.step ? "it has not come" : "it went before");
      if (gone.size() <= at) gone.resize(at + 1);
      tokens_.push_back({event.layer, h, token.position, event.step, token.score});
      gone[at] = tokens_.size();
    }
  }
  return {};
}

void Replay::look(index_t layer, std::span<const float> weights) {
  const auto rows = weights.size() / static_cast<std::size_t>(shape_.query_heads);
  const auto newest = static_cast<position_t>(rows) - 1;
  const auto group = static_cast<double>(shape_.group());
  const auto k = static_cast<std::ptrdiff_t>(std::min<std::size_t>(rows, static_cast<std::size_t>(options_.top_k)));
  std::vector<std::size_t> order(rows);
  for (index_t h = 0; h < shape_.kv_heads; ++h) {
    const Gone& gone = gone_[static_cast<std::size_t>(layer * shape_.kv_heads + h)];
    const auto is_gone = [&](std::size_t position) { return position < gone.size() && gone[position] > 0; };
    HeadStep step{.position = newest, .layer = layer, .head = h};
    for (index_t q = h * shape_.group(); q < (h + 1) * shape_.group(); ++q) {
      const std::span<const float> row = weights.subspan(static_cast<std::size_t>(q) * rows, rows);
      for (std::size_t p = 0; p < std::min(rows, gone.size()); ++p) {
        if (!is_gone(p)) continue;
        const double mass = static_cast<double>(row[p]) / group;
        step.regret += mass;
        LostToken& token = tokens_[gone[p] - 1];
        token.mass += mass;
        token.peak = std::max(token.peak, static_cast<double>(row[p]));
      }
      std::iota(order.begin(), order.end(), std::size_t{0});
      std::partial_sort(order.begin(), order.begin() + k, order.end(),
                        [&](std::size_t a, std::size_t b) { return row[a] != row[b] ? row[a] > row[b] : a < b; });
      double distance = 0;
      for (std::ptrdiff_t i = 0; i < k; ++i) distance += static_cast<double>(rows - 1 - order[static_cast<std::size_t>(i)]);
      if (k == 0 || distance / static_cast<double>(k) <= options_.min_distance) continue;
      ++step.revisits;
      step.wanted += k;
      step.found += std::count_if(order.begin(), order.begin() + k, [&](std::size_t p) { return !is_gone(p); });
    }
    steps_.push_back(step);
  }
}

std::vector<LostToken> Replay::lost() const {
  std::vector<LostToken> lost = tokens_;
  std::stable_sort(lost.begin(), lost.end(), [](const LostToken& a, const LostToken& b) { return a.mass > b.mass; });
  return lost;
}

Result<Replay> replay_events(const engine::Model& model, const Problem& problem, const FullText& full,
                             const std::vector<EvictionEvent>& events, const RevisitOptions& options) {
  Result<engine::Session> session =
      engine::Session::make(model, static_cast<index_t>(problem.prompt.size() + full.tokens.size()));
  if (!session) return session.status();
  if (Status s = session->prefill(problem.prompt); !s) return s;
  session->record_attention(true);
  Replay replay(model.shape(), model.layers(), options);
  std::size_t next = 0;  // in `events`
  for (std::size_t i = 0; i + 1 < full.tokens.size(); ++i) {
    for (; next < events.size() && events[next].step < session->next_position(); ++next)
      if (Status s = replay.evict(events[next]); !s) return s;
    if (Status s = session->decode(full.tokens[i]); !s) return s;
    for (index_t l = 0; l < model.layers(); ++l) replay.look(l, session->attention(l));
  }
  return replay;
}

namespace {

/// Evicted positions by mass times `sign`, the lowest first.
[[nodiscard]] std::vector<Range> positions_by_mass(const Replay& replay, index_t count, double sign) {
  std::map<position_t, double> mass;
  for (const LostToken& token : replay.lost()) mass[token.position] += token.mass;
  std::vector<std::pair<double, position_t>> order;
  for (const auto& [position, sum] : mass) order.emplace_back(sign * sum, position);
  std::sort(order.begin(), order.end());
  order.resize(std::min(order.size(), static_cast<std::size_t>(count)));
  std::vector<Range> ranges;
  for (const auto& entry : order) ranges.push_back({entry.second, entry.second + 1});
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.first < b.first; });
  return ranges;
}

}  // namespace

std::vector<Range> dearest_positions(const Replay& replay, index_t count) { return positions_by_mass(replay, count, -1); }
std::vector<Range> cheapest_positions(const Replay& replay, index_t count) { return positions_by_mass(replay, count, 1); }

}  // namespace beaconkv::lab
