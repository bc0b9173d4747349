// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Event logs as JSON lines, written and read. The schema is docs/event_log.md.

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "beaconkv/sequence/event_log.hpp"

namespace beaconkv::lab {

/// The evictions of one policy on one text.
struct EventRun {
  std::string problem{};
  std::string policy{};
  index_t budget = 0;
  std::vector<EvictionEvent> events{};
};

/// The line of an eviction, without its end.
[[nodiscard]] std::string event_line(const EvictionEvent& event);

/// Reads such a line; errors begin with `where`.
[[nodiscard]] Result<EvictionEvent> parse_event(std::string_view line, const std::string& where);

/// Writes a file anew: of each run its head, then its evictions.
[[nodiscard]] Status write_events(const std::filesystem::path& file, const std::vector<EventRun>& runs);

/// Reads it. A damaged line is refused with its number and the reason; so is a file that ends before a run does.
[[nodiscard]] Result<std::vector<EventRun>> read_events(const std::filesystem::path& file);

}  // namespace beaconkv::lab
