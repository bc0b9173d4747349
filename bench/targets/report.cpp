// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "targets/report.hpp"

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>

namespace beaconkv::bench {
namespace {

[[nodiscard]] std::string number_text(double value, const std::string& unit) {
  const int digits = value < 0.1 ? 4 : (value < 10 ? 3 : 1);
  char text[64];
  std::snprintf(text, sizeof text, "%.*f%s%s", digits, value, unit.size() > 1 ? " " : "", unit.c_str());
  return text;
}

[[nodiscard]] std::string bound_text(const Bound& bound, const std::string& unit) {
  char text[64];
  std::snprintf(text, sizeof text, "%s%g%s", bound.kind == Bound::at_most ? "<=" : ">=", bound.value, unit.c_str());
  return text;
}

}  // namespace

bool Row::passes() const noexcept {
  if (bound.kind == Bound::none) return true;
  return bound.kind == Bound::at_most ? measured <= bound.value : measured >= bound.value;
}

bool Report::wants(std::initializer_list<std::string> names) const {
  return std::any_of(names.begin(), names.end(),
                     [&](const std::string& name) { return name.find(options_.only) != name.npos; });
}

void Report::target(const std::string& name, double measured, const std::string& unit, Bound bound, const std::string& note) {
  add({name, measured, unit, bound, note});
}

void Report::number(const std::string& name, double measured, const std::string& unit, const std::string& note) {
  add({name, measured, unit, {}, note});
}

void Report::add(Row row) {
  if (!wants({row.name})) return;
  const std::string measured = number_text(row.measured, row.unit);
  if (row.bound.kind == Bound::none)
    std::printf("NUMBER %-42s %10s  # %s\n", row.name.c_str(), measured.c_str(), row.note.c_str());
  else
    std::printf("TARGET %-42s %10s %8s %-11s # %s\n", row.name.c_str(), measured.c_str(),
                bound_text(row.bound, row.unit).c_str(), row.passes() ? "PASS" : "FALLS_SHORT", row.note.c_str());
  std::fflush(stdout);
  rows_.push_back(std::move(row));
}

bool Report::all_pass() const noexcept {
  return std::all_of(rows_.begin(), rows_.end(), [](const Row& row) { return row.passes(); });
}

Status Report::write_json(const std::string& file, const Machine& machine) const {
  nlohmann::json json{{"cpu", machine.cpu},
                      {"compiler", machine.compiler},
                      {"flags", machine.flags},
                      {"instruction_set", machine.instruction_set},
                      {"quick", quick()}};
  nlohmann::json& rows = json["rows"] = nlohmann::json::array();
  for (const Row& row : rows_) {
    nlohmann::json& out = rows.emplace_back(
        nlohmann::json{{"name", row.name}, {"measured", row.measured}, {"unit", row.unit}, {"note", row.note}});
    if (row.bound.kind == Bound::none) continue;
    out[row.bound.kind == Bound::at_most ? "at_most" : "at_least"] = row.bound.value;
    out["passes"] = row.passes();
  }
  std::ofstream out(file);
  out << json.dump(2) << '\n';
  out.close();
  if (!out) return beaconkv::detail::invalid("--json = ", file, ": cannot be written");
  return {};
}

std::string shown_seconds(double seconds) {
  char text[64];
  if (seconds >= 1e-3)
    std::snprintf(text, sizeof text, "%.3g ms", seconds * 1e3);
  else
    std::snprintf(text, sizeof text, "%.3g us", seconds * 1e6);
  return text;
}

std::string against(double ours, double theirs) { return shown_seconds(ours) + " against " + shown_seconds(theirs); }

void require_same(bool right, const std::string& what) {
  if (!right) throw std::runtime_error(what + ": the two sides of a comparison differ in their results");
}

}  // namespace beaconkv::bench
