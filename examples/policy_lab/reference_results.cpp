// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "policy_lab/reference_results.hpp"

#include <charconv>

#include "policy_lab/json_reader.hpp"

namespace beaconkv::lab {
namespace {

template <class N>
[[nodiscard]] bool read_key(JsonReader& reader, const std::string& key, const std::string& name, N& out) {
  const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), out);
  if (error == std::errc() && end == key.data() + key.size() && out > 0) return true;
  return reader.fail(name, " = '", key, "': must be a positive whole number");
}

[[nodiscard]] bool read_table(JsonReader& reader, const json& table, ReferenceResults& results) {
  std::string source;
  if (!reader.has_keys(table, "a table", {"source", "rows"}) || !reader.read_text(table["source"], "source", source))
    return false;
  if (!table["rows"].is_object()) return reader.fail("rows = ", engine::shown(table["rows"]), ": must be an object");
  for (const auto& policy : table["rows"].items()) {
    if (!policy.value().is_object())
      return reader.fail(policy.key(), " = ", engine::shown(policy.value()), ": must be an object");
    for (const auto& budget : policy.value().items()) {
      ReferenceRow row{.policy = policy.key(), .source = source};
      if (!read_key(reader, budget.key(), "a budget of " + policy.key(), row.budget) ||
          !reader.read_amount(budget.value(), policy.key() + " at " + budget.key(), row.percent))
        return false;
      if (row.percent > 100) return reader.fail(row.policy, " at ", row.budget, " = ", row.percent, ": is above 100 %");
      if (results.find(row.policy, row.budget) != nullptr)
        return reader.fail(row.policy, " at ", row.budget, " is there twice");
      results.rows.push_back(std::move(row));
    }
  }
  return true;
}

}  // namespace

const ReferenceRow* ReferenceResults::find(const std::string& policy, index_t budget) const {
  for (const ReferenceRow& row : rows)
    if (row.policy == policy && row.budget == budget) return &row;
  return nullptr;
}

Result<ReferenceResults> read_reference(const std::filesystem::path& file) {
  const Result<json> read = engine::read_json(file);
  if (!read) return read.status();
  ReferenceResults results;
  JsonReader reader(file.filename().string());
  if (!reader.has_keys(*read, "the file", {"problems", "tables"}) || !reader.is_list((*read)["tables"], "tables"))
    return reader.status();
  const json& problems = (*read)["problems"];
  if (!problems.is_object()) {
    reader.fail("problems = ", engine::shown(problems), ": must be an object");
    return reader.status();
  }
  for (const auto& level : problems.items()) {
    int number = 0;
    if (!read_key(reader, level.key(), "a level", number) ||
        !reader.read_count(level.value(), "problems of level " + level.key(), results.problems[number]))
      return reader.status();
  }
  for (const json& table : (*read)["tables"])
    if (!read_table(reader, table, results)) return reader.status();
  return results;
}

Status check_problems(const ReferenceResults& results, const std::vector<Problem>& problems) {
  std::map<int, index_t> ours;
  for (const Problem& problem : problems) ++ours[problem.level];
  for (const auto& [level, count] : results.problems) {
    const auto found = ours.find(level);
    const index_t of_ours = found == ours.end() ? 0 : found->second;
    if (of_ours != count || ours.size() != results.problems.size())
      return detail::invalid("--compare-with: its figures are of ", count, " problems of level ", level, ", ours of ", of_ours,
                             ": choose --limit accordingly");
  }
  return {};
}

Agreement compare_with_reference(const SweptRow& row, const ReferenceRow& reference) {
  return {100 * row.share(), reference.percent,
          (row.share() - reference.percent / 100) / standard_error(reference.percent / 100, row.problems)};
}

}  // namespace beaconkv::lab
