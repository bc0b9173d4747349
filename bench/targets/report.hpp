// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// The rows of the table: printed as they come, kept for JSON and for the exit code.

#include <initializer_list>
#include <string>
#include <vector>

#include "beaconkv/status.hpp"
#include "measure.hpp"
#include "targets/machine.hpp"

namespace beaconkv::bench {

/// What a measured number must be.
struct Bound {
  enum Kind { at_most, at_least, none } kind = none;
  double value = 0;
};
[[nodiscard]] inline Bound at_most(double value) { return {Bound::at_most, value}; }
[[nodiscard]] inline Bound at_least(double value) { return {Bound::at_least, value}; }

struct Row {
  std::string name;
  double measured = 0;
  std::string unit;  ///< "x" and "%" are ratios
  Bound bound{};
  std::string note;  ///< the two numbers of a ratio, or why there is none

  [[nodiscard]] bool passes() const noexcept;
};

struct ReportOptions {
  bool quick = false;
  bool check = false;  ///< everything once, for its results: times mean nothing
  std::string only;    ///< rows whose name holds this
};

/// Where measurements ask what is wanted and leave what they found.
class Report {
 public:
  explicit Report(ReportOptions options) : options_(std::move(options)) {}

  /// Whether any of these rows is wanted: ask before measuring them.
  [[nodiscard]] bool wants(std::initializer_list<std::string> names) const;
  [[nodiscard]] bool quick() const noexcept { return options_.quick; }
  /// How long to measure a group of contestants.
  [[nodiscard]] Pace pace() const noexcept {
    if (options_.check) return {0, 1};
    return quick() ? Pace{0.8, 3} : Pace{2.5, 5};
  }
  /// The same for those that take seconds a round.
  [[nodiscard]] Pace heavy_pace() const noexcept {
    const Pace pace = this->pace();
    return {pace.seconds, (pace.rounds + 1) / 2};
  }

  /// A ratio with a target.
  void target(const std::string& name, double measured, const std::string& unit, Bound bound, const std::string& note);
  /// A number without one.
  void number(const std::string& name, double measured, const std::string& unit, const std::string& note);

  [[nodiscard]] const std::vector<Row>& rows() const noexcept { return rows_; }
  [[nodiscard]] bool all_pass() const noexcept;
  /// Writes machine and rows as JSON.
  [[nodiscard]] Status write_json(const std::string& file, const Machine& machine) const;

 private:
  void add(Row row);

  ReportOptions options_;
  std::vector<Row> rows_;
};

/// "1.23 ms", "4.5 us": seconds for people.
[[nodiscard]] std::string shown_seconds(double seconds);
/// "1.23 ms against 1.40 ms".
[[nodiscard]] std::string against(double ours, double theirs);
/// Throws unless `right`: what is measured against something must come to the same result.
void require_same(bool right, const std::string& what);

}  // namespace beaconkv::bench
