// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// The problems of a prompts file: JSON lines.

#include <filesystem>
#include <string>
#include <vector>

#include "beaconkv/status.hpp"
#include "beaconkv/types.hpp"

namespace beaconkv::lab {

/// One line. `prompt_ids` is required, or `prompt` (words) where the model folder has a `vocab.json`; everything else is
/// optional.
struct Problem {
  std::string id{};  ///< of a line without one: "line 7"
  int level = 0;
  std::vector<int> prompt{};
  std::vector<int> expected{};  ///< the right text, `<eos>` included
  std::vector<int> answer{};    ///< the part of it that counts

  /// Whether `generated` (up to and including one of `eos`) answers the problem: what stands between the marker before the
  /// answer (the token before it in `expected`) and `<eos>` equals `answer`. Without `expected`, whether it ends in the answer.
  [[nodiscard]] bool answered_by(const std::vector<int>& generated, const std::vector<int>& eos) const;
};

/// Reads a file; `model_directory` is where `vocab.json` may lie. Ids are checked against `vocab_size`. Errors name file and
/// line; so do two lines with one id.
[[nodiscard]] Result<std::vector<Problem>> load_problems(const std::filesystem::path& file,
                                                         const std::filesystem::path& model_directory, index_t vocab_size);

/// `limit` of them, evenly over the levels and in file order; the lower levels get what does not divide. 0: all.
[[nodiscard]] std::vector<Problem> take_evenly(std::vector<Problem> problems, index_t limit);

/// The longest text that a problem may take: `given`, or where that is 0 a little more than the longest right one of its level.
[[nodiscard]] index_t max_new_of(const Problem& problem, const std::vector<Problem>& all, index_t given);

}  // namespace beaconkv::lab
