// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "policy_lab/event_lines.hpp"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <initializer_list>
#include <limits>
#include <optional>
#include <set>
#include <utility>

#include "policy_lab/json_reader.hpp"

namespace beaconkv::lab {
namespace {

using nlohmann::json;

constexpr const char* format_name = "beaconkv-evictions";
constexpr int format_version = 1;

/// JSON has no NaN and no infinity.
[[nodiscard]] json json_of(const std::optional<float>& score) {
  if (!score) return nullptr;
  if (std::isnan(*score)) return "nan";
  if (std::isinf(*score)) return *score > 0 ? "inf" : "-inf";
  return static_cast<double>(*score);
}

[[nodiscard]] json json_of(const std::vector<LoggedToken>& tokens) {
  json positions = json::array();
  json scores = json::array();
  for (const LoggedToken& token : tokens) {
    positions.push_back(token.position);
    scores.push_back(json_of(token.score));
  }
  return {{"positions", std::move(positions)}, {"scores", std::move(scores)}};
}

/// Takes a line of an event log apart.
class Reader : public JsonReader {
 public:
  using JsonReader::JsonReader;

  /// Ascending; the same one twice where `may_repeat`.
  [[nodiscard]] bool read_positions(const json& value, const std::string& name, bool may_repeat, std::vector<position_t>& out) {
    if (!is_list(value, name)) return false;
    for (const json& item : value) {
      position_t position = 0;
      if (!read_count(item, name + "[" + std::to_string(out.size()) + "]", position)) return false;
      if (!out.empty() && (may_repeat ? position < out.back() : position <= out.back()))
        return fail(name, "[", out.size(), "] = ", position, " behind ", out.back(), ": must ascend");
      out.push_back(position);
    }
    return true;
  }
  [[nodiscard]] bool read_tokens(const json& value, const std::string& name, std::vector<LoggedToken>& out) {
    std::vector<position_t> positions;
    if (!has_keys(value, name, {"positions", "scores"}) ||
        !read_positions(value["positions"], name + ".positions", false, positions) ||
        !is_list(value["scores"], name + ".scores"))
      return false;
    if (value["scores"].size() != positions.size())
      return fail(name, " has ", positions.size(), " positions and ", value["scores"].size(), " scores");
    for (const position_t position : positions) {
      LoggedToken token{position, {}};
      const std::string score = name + ".scores[" + std::to_string(out.size()) + "]";
      if (!read_score(value["scores"][out.size()], score, token.score)) return false;
      out.push_back(token);
    }
    return true;
  }
  [[nodiscard]] bool read_head(const json& value, const std::string& name, HeadEvent& out) {
    if (!has_keys(value, name, {"evicted", "kept", "queries"}) ||
        !read_tokens(value["evicted"], name + ".evicted", out.evicted) ||
        !read_tokens(value["kept"], name + ".kept", out.kept) || !is_list(value["queries"], name + ".queries"))
      return false;
    std::set<position_t> kept;
    for (const LoggedToken& token : out.kept) kept.insert(token.position);
    for (const LoggedToken& token : out.evicted)
      if (kept.contains(token.position)) return fail(name, ": position ", token.position, " is both evicted and kept");
    for (const json& query : value["queries"]) {
      const std::string which = name + ".queries[" + std::to_string(out.queries.size()) + "]";
      QueryOrigins origins;
      if (!has_keys(query, which, {"beacons", "recent"}) ||
          !read_positions(query["beacons"], which + ".beacons", false, origins.beacons) ||
          !read_positions(query["recent"], which + ".recent", true, origins.recent))
        return false;
      out.queries.push_back(std::move(origins));
    }
    return true;
  }

 private:
  [[nodiscard]] bool read_score(const json& value, const std::string& name, std::optional<float>& out) {
    if (value.is_null()) return true;
    if (value.is_string()) {
      const auto& text = value.get_ref<const std::string&>();
      if (text != "nan" && text != "inf" && text != "-inf")
        return fail(name, " = ", engine::shown(value), ": must be a number, null, \"nan\", \"inf\" or \"-inf\"");
      constexpr float infinity = std::numeric_limits<float>::infinity();
      out = text == "nan" ? std::numeric_limits<float>::quiet_NaN() : (text == "inf" ? infinity : -infinity);
      return true;
    }
    if (!value.is_number() || std::abs(value.get<double>()) > static_cast<double>(std::numeric_limits<float>::max()))
      return fail(name, " = ", engine::shown(value), ": must be a number, null, \"nan\", \"inf\" or \"-inf\"");
    out = value.get<float>();
    return true;
  }
};

/// A run's first line: what ran, and how many evictions follow.
[[nodiscard]] Result<std::pair<EventRun, index_t>> parse_head(std::string_view line, const std::string& where) {
  const Result<json> value = engine::parse_json(line, where);
  if (!value) return detail::error(StatusCode::damaged, value.status().message());
  EventRun run;
  std::string format;
  int version = 0;
  index_t events = 0;
  Reader reader(where);
  const json& v = *value;
  if (!reader.has_keys(v, "the head of a run", {"format", "version", "problem", "policy", "budget", "events"}) ||
      !reader.read_text(v["format"], "format", format) || !reader.read_count(v["version"], "version", version) ||
      !reader.read_text(v["problem"], "problem", run.problem) || !reader.read_text(v["policy"], "policy", run.policy) ||
      !reader.read_count(v["budget"], "budget", run.budget) || !reader.read_count(v["events"], "events", events))
    return reader.status();
  if (format != format_name) reader.fail("format = ", engine::shown(v["format"]), ": must be \"", format_name, "\"");
  if (version != format_version) reader.fail("version = ", version, ": this program reads ", format_version);
  if (!reader.status().ok()) return reader.status();
  return std::pair(std::move(run), events);
}

}  // namespace

std::string event_line(const EvictionEvent& event) {
  json heads = json::array();
  for (const HeadEvent& head : event.heads) {
    json queries = json::array();
    for (const QueryOrigins& q : head.queries) queries.push_back({{"beacons", q.beacons}, {"recent", q.recent}});
    heads.push_back({{"evicted", json_of(head.evicted)}, {"kept", json_of(head.kept)}, {"queries", std::move(queries)}});
  }
  const json line{{"step", event.step},
                  {"layer", event.layer},
                  {"seconds", event.seconds},
                  {"bytes_freed", event.bytes_freed},
                  {"heads", std::move(heads)}};
  return line.dump();
}

Result<EvictionEvent> parse_event(std::string_view line, const std::string& where) {
  const Result<json> value = engine::parse_json(line, where);
  if (!value) return detail::error(StatusCode::damaged, value.status().message());
  EvictionEvent event;
  Reader reader(where);
  const json& v = *value;
  if (!reader.has_keys(v, "the eviction", {"step", "layer", "seconds", "bytes_freed", "heads"}) ||
      !reader.read_count(v["step"], "step", event.step) || !reader.read_count(v["layer"], "layer", event.layer) ||
      !reader.read_amount(v["seconds"], "seconds", event.seconds) ||
      !reader.read_count(v["bytes_freed"], "bytes_freed", event.bytes_freed) || !reader.is_list(v["heads"], "heads"))
    return reader.status();
  for (const json& head : v["heads"]) {
    HeadEvent read;
    if (!reader.read_head(head, "heads[" + std::to_string(event.heads.size()) + "]", read)) return reader.status();
    event.heads.push_back(std::move(read));
  }
  return event;
}

Status write_events(const std::filesystem::path& file, const std::vector<EventRun>& runs) {
  std::ofstream out(file);
  for (const EventRun& run : runs) {
    const json head{{"format", format_name}, {"version", format_version}, {"problem", run.problem},
                    {"policy", run.policy},  {"budget", run.budget},      {"events", run.events.size()}};
    out << head.dump(-1, ' ', false, json::error_handler_t::replace) << '\n';
    for (const EvictionEvent& event : run.events) out << event_line(event) << '\n';
  }
  out.close();
  if (!out) return detail::invalid(file.string(), ": cannot be written");
  return {};
}

Result<std::vector<EventRun>> read_events(const std::filesystem::path& file) {
  std::ifstream in(file);
  if (!in) return detail::invalid(file.string(), ": cannot be read");
  const std::string name = file.filename().string();
  std::vector<EventRun> runs;
  index_t left = 0;  // evictions of the last run
  index_t number = 1;
  std::string text;
  for (; std::getline(in, text); ++number) {
    const std::string where = name + " line " + std::to_string(number);
    if (left > 0) {
      Result<EvictionEvent> event = parse_event(text, where);
      if (!event) return event.status();
      runs.back().events.push_back(std::move(*event));
      --left;
      continue;
    }
    Result<std::pair<EventRun, index_t>> head = parse_head(text, where);
    if (!head) return head.status();
    left = head->second;
    runs.push_back(std::move(head->first));
  }
  if (left > 0)
    return detail::error(StatusCode::damaged, name, " line ", number, ": the file ends where ", left,
                         " more evictions must follow");
  return runs;
}

}  // namespace beaconkv::lab
