// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Shares of right answers that somebody else found on the same problems, and whether ours agree.

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "policy_lab/swept.hpp"

namespace beaconkv::lab {

struct ReferenceRow {
  std::string policy{};
  index_t budget = 0;
  double percent = 0;
  std::string source{};
};

struct ReferenceResults {
  std::map<int, index_t> problems{};  ///< level -> how many, the first ones of the file
  std::vector<ReferenceRow> rows{};

  [[nodiscard]] const ReferenceRow* find(const std::string& policy, index_t budget) const;
};

/// Reads `{"problems": {"12": 67, ...}, "tables": [{"source": ..., "rows": {POLICY: {BUDGET: PERCENT}}}]}`. Errors name the
/// file and what is wrong.
[[nodiscard]] Result<ReferenceResults> read_reference(const std::filesystem::path& file);

/// A row beside the reference.
struct Agreement {
  double ours = 0;  ///< %
  double theirs = 0;
  double errors = 0;  ///< the difference in standard errors of one share

  [[nodiscard]] bool agrees() const noexcept { return errors >= -2 && errors <= 2; }
};

/// An error where the results are of other problems, as far as levels and their numbers tell.
[[nodiscard]] Status check_problems(const ReferenceResults& results, const std::vector<Problem>& problems);

[[nodiscard]] Agreement compare_with_reference(const SweptRow& row, const ReferenceRow& reference);

}  // namespace beaconkv::lab
