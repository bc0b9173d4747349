// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

/// \file
/// A conversation of three turns under BeaconKV, twice: plainly, and with a fork that is thrown away, drafts that are partly
/// wrong, a second and a third prompt into a full cache, and a restart in between. Both write the same tokens.

#include <cstdio>
#include <exception>

#include "conversation/script.hpp"

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

  bool good = true;
  for (std::size_t i = 0; i < turns.size(); ++i) {
    const TurnReport& r = reports[i];
    std::printf("turn %zu: %zu tokens read, %zu written; %td times a layer evicted", i + 1, turns[i].said.size(), r.text.size(),
                r.evictions);
    if (disturbed[i].fork)
      std::printf("\n  a fork read the problem again, wrote %zu tokens (%td evictions) and was thrown away",
                  r.text_of_fork.size(), r.evictions_of_fork);
    if (disturbed[i].drafts) std::printf("\n  of %td drafts %td were wrong and taken back", r.drafts, r.taken_back);
    if (disturbed[i].reload)
      std::printf("\n  saved as %zu bytes, destroyed, loaded into memory for other %td rows", r.saved_bytes, capacity + 37);
    const bool same = r.text == expected[i].text && r.evictions == expected[i].evictions;
    std::printf("\n  %s\n", same ? "same tokens" : "NOT the same tokens as without all that");
    good = good && same && r.evictions > 0;
  }
  std::printf("right turns: full cache %d of 3, BeaconKV %d, recent window %d\n", num_right(turns, full),
              num_right(turns, reports), num_right(turns, recent));
  return good && num_right(turns, full) == 3 && reports[0].evictions_of_fork > 0 && reports[1].taken_back > 0 &&
         reports[1].taken_back < reports[1].drafts;
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
