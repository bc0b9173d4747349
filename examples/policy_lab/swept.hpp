// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// From results on single problems to rows with intervals.

#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "policy_lab/results.hpp"
#include "policy_lab/statistics.hpp"

namespace beaconkv::lab {

/// A policy at a budget over all problems, and beside the base policy on the same ones.
struct SweptRow {
  std::string policy{};
  index_t budget = 0;
  index_t problems = 0;
  index_t right = 0;
  std::map<int, std::pair<index_t, index_t>> by_level{};  ///< level -> right, of
  std::optional<Paired> against_base{};
  std::optional<double> kl{};      ///< nats a token
  std::optional<double> regret{};  ///< share of the full cache's attention that falls on what was evicted
  double policy_share = 0;         ///< of the time of decoding
  std::size_t state_bytes = 0;     ///< at most

  [[nodiscard]] double share() const noexcept {
    return problems > 0 ? static_cast<double>(right) / static_cast<double>(problems) : 0;
  }
};

/// Results by policy, budget and problem.
class ResultTable {
 public:
  /// Refused where a result is there already.
  [[nodiscard]] Status add(const std::vector<ProblemResult>& results);

  /// `limit` of the problems (0: all), evenly over the levels, in the order in which they came.
  [[nodiscard]] std::vector<Problem> problems(index_t limit) const;

  /// Errors name the row or the problem that is missing. `base`: the policy to compare with; null: with none.
  [[nodiscard]] Result<SweptRow> row(const std::string& policy, index_t budget, const std::string* base,
                                     const std::vector<Problem>& problems) const;

 private:
  using Key = std::pair<std::string, index_t>;
  using Results = std::map<std::string, ProblemResult>;  // by problem

  [[nodiscard]] Result<const ProblemResult*> find(const Key& key, const std::string& problem) const;

  std::map<Key, Results> rows_;
  std::vector<Problem> problems_;  // ids and levels
  std::set<std::string> known_;
};

/// Lines of a table on the terminal, or of one in Markdown.
class SweptLines {
 public:
  SweptLines(bool markdown, std::size_t policy_width) : markdown_(markdown), policy_width_(policy_width) {}

  [[nodiscard]] std::string header() const;
  [[nodiscard]] std::string group(const std::string& name) const;
  [[nodiscard]] std::string line(const SweptRow& row) const;

 private:
  [[nodiscard]] std::string join(const std::vector<std::string>& cells) const;

  bool markdown_;
  std::size_t policy_width_;
};

}  // namespace beaconkv::lab
