// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

/// \file
/// A conversation of three turns under BeaconKV, twice: plainly, and with a fork that is thrown away, drafts that are partly
/// wrong, a second and a third prompt into a full cache, and a restart in between. Both write the same tokens.

#include <cstdio>
#include <exception>

#include "conversation/script.hpp"
#include "engine/vocabulary.hpp"

namespace {

using namespace beaconkv;
using namespace beaconkv::conversation;

template <class Policy>
[[nodiscard]] std::vector<TurnReport> converse(const engine::Model& model, const Policy& policy, index_t capacity,
                                               const std::vector<Turn>& turns, const std::vector<Extras>& extras) {
  const auto make = [&](index_t rows) { return Talk<Policy>(model, policy, rows); };
  std::optional<Talk<Policy>> talk(make(capacity));
  std::vector<TurnReport> reports;
  for (std::size_t i = 0; i < turns.size(); ++i) reports.push_back(take_turn(talk, turns[i], extras[i], make));
  return reports;
}

/// Counts the turns that the model wrote without a mistake.
[[nodiscard]] int num_right(const std::vector<Turn>& turns, const std::vector<TurnReport>& reports) {
  int count = 0;
  for (std::size_t i = 0; i < turns.size(); ++i) count += turns[i].right == reports[i].text ? 1 : 0;
  return count;
}

[[nodiscard]] bool run(const std::filesystem::path& folder) {
  const engine::Model model = engine::Model::load(folder).or_throw();
  const auto words = engine::Vocabulary::load(folder / "vocab.json").or_throw();
  const std::vector<Turn> turns = three_turns(folder);
  constexpr index_t capacity = 256;  // the problem, the budget, and a chunk
  const std::vector<Extras> plain(3);
  const std::vector<Extras> disturbed{{.fork = true}, {.drafts = true}, {.drafts = true, .reload = true}};

  const RecentWindow<> never(model.shape(), {.budget = {.max = 100000}});
  const RecentWindow<> window(model.shape(), {.budget = {.max = 64}});
  const BeaconKV<> beacons(model.shape(), {.budget = {.max = 64}, .n_beacon = 28, .n_recent_queries = 4, .n_recent_kv = 8},
                           model.rope());
  const std::vector<TurnReport> full = converse(model, never, 1000, turns, plain);
  const std::vector<TurnReport> recent = converse(model, window, capacity, turns, plain);
  const std::vector<TurnReport> expected = converse(model, beacons, capacity, turns, plain);
  const std::vector<TurnReport> reports = converse(model, beacons, capacity, turns, disturbed);

  bool good = num_right(turns, full) == 3 && reports[0].evictions_of_fork > 0;
  std::printf(
      "A problem of 24 steps in three turns, %td rows of memory. Keys and values are kept of the problem's %zu tokens and\n"
      "at most 64 others of each head; whoever talks to the model does some steps himself in between.\n",
      capacity, turns[0].said.size());
  for (std::size_t i = 0; i < turns.size(); ++i) {
    const TurnReport& r = reports[i];
    std::printf("turn %zu: %zu tokens read, %zu written; %td evictions in %td layers\n", i + 1, turns[i].said.size(),
                r.text.size(), r.evictions, model.layers());
    const std::vector<int> end(r.text.end() - std::min<index_t>(12, std::ssize(r.text)), r.text.end());
    std::printf("  it ends: %s\n", words.decode(end).or_throw().c_str());
    if (disturbed[i].fork)
      std::printf("  a fork heard the problem once more, wrote %zu tokens (%td evictions) and was thrown away\n",
                  r.text_of_fork.size(), r.evictions_of_fork);
    if (disturbed[i].drafts) std::printf("  %td drafts, of which %td were taken back\n", r.drafts, r.taken_back);
    if (disturbed[i].reload)
      std::printf("  saved as %zu bytes, all objects destroyed, loaded into memory for %td rows\n", r.saved_bytes,
                  capacity + 37);
    const bool same = r.text == expected[i].text && r.evictions == expected[i].evictions;
    std::printf("  %s\n", same ? "same tokens as without" : "NOT the same tokens as without");
    good = good && same && r.evictions > 0 && (r.drafts > r.taken_back) == disturbed[i].drafts;
  }
  std::printf("turns without a mistake: full cache %d of 3, BeaconKV %d, the recent window %d\n", num_right(turns, full),
              num_right(turns, reports), num_right(turns, recent));
  return good;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc > 1 ? argv[1] : "examples/models/reasoner") ? 0 : 1;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
