// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// The conversation: a problem of the reasoner in three turns. The model knows one kind of text only, a problem worked out to
/// its answer, and a second problem behind the first is beyond it with any cache. So what is said later goes on with the same
/// text: somebody does the next two steps himself, and the model takes over again.

#include <array>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "conversation/talk.hpp"
#include "engine/json_file.hpp"

namespace beaconkv::conversation {

inline constexpr int end_of_text = 2;  // "<eos>"
inline constexpr int end_of_step = 6;  // ";"

struct Turn {
  std::vector<int> said{};   ///< what the model reads
  std::vector<int> right{};  ///< what it should write then
  index_t steps = 0;         ///< how many of them; it stops behind the last, or at the end of the text
};

/// The first problem of 24 steps: the model does 7, then 6, then the last 7 and the answer.
[[nodiscard]] inline std::vector<Turn> three_turns(const std::filesystem::path& model) {
  std::ifstream lines(model / "prompts.jsonl");
  for (std::string line; std::getline(lines, line);) {
    const nlohmann::json problem = engine::parse_json(line, "prompts.jsonl").or_throw();
    if (problem["level"] != 24) continue;
    std::vector<Turn> turns{{.said = problem["prompt_ids"].get<std::vector<int>>(), .steps = 7}, {.steps = 6}, {.steps = 8}};
    index_t step = 0;
    for (const int token : problem["expected_ids"].get<std::vector<int>>()) {
      Turn& turn = turns[step < 7 ? 0 : (step < 15 ? 1 : 2)];
      const bool by_hand = (step >= 7 && step < 9) || (step >= 15 && step < 17);
      (by_hand ? turn.said : turn.right).push_back(token);
      step += token == end_of_step ? 1 : 0;
    }
    return turns;
  }
  detail::invalid(model.string(), ": its prompts.jsonl has no problem of 24 steps").or_throw();
  return {};
}

/// What happens in the middle of a turn besides.
struct Extras {
  bool fork = false;    ///< a copy goes its own way and is thrown away
  bool drafts = false;  ///< speculative decoding
  bool reload = false;  ///< saved, destroyed, loaded into other memory
};

struct TurnReport {
  std::vector<int> text{};
  index_t evictions = 0;
  index_t drafts = 0;
  index_t taken_back = 0;
  std::vector<int> text_of_fork{};
  index_t evictions_of_fork = 0;
  std::size_t saved_bytes = 0;
};

/// Drafts without a second model: what followed when the last two tokens were last written, up to the end of a step. Some are
/// made wrong on purpose.
[[nodiscard]] inline std::vector<int> drafts_for(const std::vector<int>& text, int next, index_t most) {
  std::vector<int> drafts;
  const auto stops = [](int token) { return token == end_of_step || token == end_of_text; };
  const std::array pair{text.back(), next};
  const auto found = std::find_end(text.begin(), text.end(), pair.begin(), pair.end());
  if (stops(next) || found == text.end()) return drafts;
  for (auto i = found + 2; i != text.end() && std::ssize(drafts) < most; ++i) {
    drafts.push_back((i - text.begin()) % 7 == 0 ? next : *i);
    if (stops(*i)) break;
  }
  return drafts;
}

/// One turn. `make(capacity)` makes a `Talk` with empty memory. The text is the same whatever `extras` are.
template <class Policy, class Make>
[[nodiscard]] TurnReport take_turn(std::optional<Talk<Policy>>& talk, const Turn& turn, const Extras& extras, Make&& make) {
  const index_t most = std::ssize(turn.right) + 24;
  const std::size_t middle = turn.right.size() / 2;  // where a fork or a restart comes
  TurnReport report{.evictions = -talk->num_evictions(), .drafts = -talk->num_drafts(), .taken_back = -talk->num_taken_back()};
  talk->read(turn.said);
  std::vector<int> all = turn.said;  // said and written
  index_t steps = 0;
  bool in_middle = false;
  while (steps < turn.steps && std::ssize(report.text) < most && all.back() != end_of_text) {
    if (!in_middle && report.text.size() >= middle) {
      in_middle = true;
      if (extras.fork) {
        Talk<Policy> other = make(talk->capacity());
        other.fork_from(*talk);
        other.read(turn.said);  // it hears the problem again
        while (report.text_of_fork.size() < 60) report.text_of_fork.push_back(other.write().front());
        report.evictions_of_fork = other.num_evictions();
      }
      if (extras.reload) {
        const std::vector<std::byte> saved = talk->save();
        const index_t capacity = talk->capacity() + 37;
        talk.reset();
        talk.emplace(make(capacity));
        talk->load(saved);
        report.saved_bytes = saved.size();
      }
    }
    std::vector<int> drafts;
    if (extras.drafts) drafts = drafts_for(all, talk->picked(), most - std::ssize(report.text) - 1);
    for (const int token : talk->write(drafts)) {
      report.text.push_back(token);
      all.push_back(token);
      steps += token == end_of_step ? 1 : 0;
    }
  }
  report.evictions += talk->num_evictions();
  report.drafts += talk->num_drafts();
  report.taken_back += talk->num_taken_back();
  return report;
}

}  // namespace beaconkv::conversation
