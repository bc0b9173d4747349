// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "engine/json_file.hpp"

#include <cstdint>
#include <fstream>
#include <set>
#include <system_error>
#include <vector>

namespace beaconkv::engine {
namespace {

using nlohmann::json;

constexpr std::uintmax_t max_bytes = std::uintmax_t{256} << 20;

/// Watches the keys of a document while it is parsed: the parser itself keeps the last of two equal ones.
class DuplicateKeys {
 public:
  bool operator()(json::parse_event_t event, const json& parsed) {
    if (event == json::parse_event_t::object_start) open_.emplace_back();
    if (event == json::parse_event_t::object_end) open_.pop_back();
    if (event == json::parse_event_t::key) {
      const auto& key = parsed.get_ref<const std::string&>();
      if (!open_.back().insert(key).second && found_.empty()) found_ = shown(parsed);
    }
    return true;
  }
  /// The first key that came twice, quoted; empty if none did.
  [[nodiscard]] const std::string& found() const noexcept { return found_; }

 private:
  std::vector<std::set<std::string>> open_;
  std::string found_;
};

}  // namespace

Result<json> parse_json(std::string_view text, const std::string& name) {
  DuplicateKeys duplicates;
  json value;
  try {
    value = json::parse(text, [&](int, json::parse_event_t event, const json& parsed) { return duplicates(event, parsed); });
  } catch (const json::parse_error& error) {
    return detail::invalid(name, ": not JSON (error at byte ", error.byte, ")");
  } catch (const json::exception& error) {  // a number that no double holds
    return detail::invalid(name, ": not usable JSON: ", error.what());
  }
  if (!duplicates.found().empty()) return detail::invalid(name, ": key ", duplicates.found(), " stands twice in one object");
  return value;
}

Result<json> read_json(const std::filesystem::path& path) {
  std::error_code failed;
  if (!std::filesystem::is_regular_file(path, failed)) return detail::invalid("no such file: ", path.string());
  const std::uintmax_t size = std::filesystem::file_size(path, failed);
  const std::string name = path.filename().string();
  if (failed) return detail::invalid(path.string(), ": ", failed.message());
  if (size > max_bytes) return detail::invalid(name, ": ", size, " bytes, more than the ", max_bytes, " that are read as JSON");
  std::string text(static_cast<std::size_t>(size), '\0');
  std::ifstream file(path, std::ios::binary);
  if (!file.read(text.data(), static_cast<std::streamsize>(size))) return detail::invalid("cannot read ", path.string());
  return parse_json(text, name);
}

std::string shown(const json& value) {
  constexpr std::size_t longest = 60;
  std::string text = value.dump(-1, ' ', false, json::error_handler_t::replace);
  if (text.size() > longest) text.replace(longest, std::string::npos, "...");
  return text;
}

}  // namespace beaconkv::engine
