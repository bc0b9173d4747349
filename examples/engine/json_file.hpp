// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// JSON from files that somebody else wrote: whatever is wrong comes back as a `Status`.

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "beaconkv/status.hpp"

namespace beaconkv::engine {

/// The value that `text` holds. Not JSON, or an object with the same key twice, is an error that begins with `name`.
[[nodiscard]] Result<nlohmann::json> parse_json(std::string_view text, const std::string& name);

/// The content of a regular file of at most 256 MiB, parsed; messages name the file without its folder.
[[nodiscard]] Result<nlohmann::json> read_json(const std::filesystem::path& path);

/// `value` as a message shows it: JSON, cut after 60 characters.
[[nodiscard]] std::string shown(const nlohmann::json& value);

}  // namespace beaconkv::engine
