// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// `policy_lab replay`: what evictions cost later, and what changes when positions are forced to stay or to go.

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "policy_lab/replay.hpp"

namespace beaconkv::lab {

struct ReplayOptions {
  std::filesystem::path model{};
  std::filesystem::path prompts{};
  std::string policies = "recent_window,snapkv,beaconkv";
  std::string budgets = "64";
  std::string problem{};  ///< the id of one problem; empty: `limit` of all
  index_t limit = 6;
  std::optional<index_t> level{};  ///< only the problems of this level
  index_t max_new = 0;             ///< 0: from the problems, or 1024
  bool as_published = false;
  RevisitOptions revisit{};
  double needed = 0.3;  ///< a token that a later query gives a larger weight was needed
  index_t dearest = 5;  ///< evicted tokens that are shown
  std::string keep{};   ///< `3,17-20` or `dearest:N`
  std::string evict{};  ///< `3,17-20`
  index_t blame = 0;  ///< of a wrong answer, so many of the most missed positions are made to stay, each alone, and as many of
                      ///< the least missed
  std::filesystem::path log{};     ///< evictions that were written before, instead of running policies
  std::filesystem::path events{};  ///< where to write the evictions
  std::filesystem::path csv{};     ///< where to write every step, layer and head
};

/// Runs and prints, a policy at a budget after the other. Errors in the arguments are found before the first problem is run.
[[nodiscard]] Status replay(const ReplayOptions& options);

/// Reads `3,17-20`: positions, and ranges with both ends. Ascending and disjoint afterwards; errors begin with `name`.
[[nodiscard]] Result<std::vector<Range>> parse_positions(std::string_view text, std::string_view name);

}  // namespace beaconkv::lab
