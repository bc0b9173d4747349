// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "policy_lab/kept_map.hpp"

#include <algorithm>

namespace beaconkv::lab {

std::vector<KeptRun> kept_runs(const std::vector<EvictionEvent>& events, index_t layer, index_t head, Span span) {
  std::vector<position_t> until(static_cast<std::size_t>(span.tokens), span.tokens - 1);
  for (const EvictionEvent& event : events) {
    if (event.layer != layer) continue;
    for (const LoggedToken& token : event.heads[static_cast<std::size_t>(head)].evicted)
      if (token.position < span.tokens) until[static_cast<std::size_t>(token.position)] = event.step;
  }
  std::vector<KeptRun> runs;
  for (position_t p = 0; p < span.tokens; ++p) {
    const position_t end = until[static_cast<std::size_t>(p)];
    if (!runs.empty() && runs.back().until == end)
      runs.back().last = p + 1;
    else
      runs.push_back({p, p + 1, end});
  }
  return runs;
}

std::string path_of(const std::vector<KeptRun>& runs, Span span) {
  const position_t start = span.prompt - 1;
  std::string path;
  for (const KeptRun& run : runs) {
    // Along the foot to the right end, up, back along the head, and down the stairs of the births.
    const position_t left = std::max(run.first, start);
    path.append("M").append(std::to_string(left - start)).append(" ").append(std::to_string(run.first));
    path.append("H").append(std::to_string(run.until + 1 - start)).append("V").append(std::to_string(run.last));
    position_t at = std::max(run.last - 1, start);
    path.append("H").append(std::to_string(at - start));
    for (position_t p = run.last - 1; p > run.first && at > left; --p) {
      path.append("v-1h-1");
      --at;
    }
    path.append("z");
  }
  return path;
}

Result<std::vector<std::vector<Need>>> needs_of(const engine::Model& model, const Problem& problem, const FullText& full,
                                                double least, position_t distance) {
  const Shape& shape = model.shape();
  std::vector<std::vector<Need>> needs(static_cast<std::size_t>(model.layers() * shape.kv_heads));
  Result<engine::Session> session =
      engine::Session::make(model, static_cast<index_t>(problem.prompt.size() + full.tokens.size()));
  if (!session) return session.status();
  if (Status s = session->prefill(problem.prompt); !s) return s;
  session->record_attention(true);
  for (std::size_t i = 0; i + 1 < full.tokens.size(); ++i) {
    if (Status s = session->decode(full.tokens[i]); !s) return s;
    for (index_t l = 0; l < model.layers(); ++l) {
      const std::span<const float> weights = session->attention(l);
      const auto rows = static_cast<position_t>(weights.size()) / static_cast<position_t>(shape.query_heads);
      for (index_t h = 0; h < shape.kv_heads; ++h)
        for (position_t p = 0; p + distance < rows; ++p) {
          bool large = false;
          for (index_t q = h * shape.group(); q < (h + 1) * shape.group(); ++q)
            large =
                large || static_cast<double>(weights[static_cast<std::size_t>(static_cast<position_t>(q) * rows + p)]) > least;
          if (large) needs[static_cast<std::size_t>(l * shape.kv_heads + h)].push_back({rows - 1, p});
        }
    }
  }
  return needs;
}

bool held(const std::vector<KeptRun>& runs, const Need& need) {
  const auto behind = std::upper_bound(runs.begin(), runs.end(), need.position,
                                       [](position_t position, const KeptRun& run) { return position < run.first; });
  return behind != runs.begin() && need.position < (behind - 1)->last && need.step <= (behind - 1)->until;
}

}  // namespace beaconkv::lab
