// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// JSON lines of the lab's own formats, read with care.

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "engine/json_file.hpp"

namespace beaconkv::lab {

using nlohmann::json;

/// Takes a value apart and remembers the first thing that is wrong with it; messages begin with `where`.
class JsonReader {
 public:
  explicit JsonReader(std::string where) : where_(std::move(where)) {}

  [[nodiscard]] const Status& status() const noexcept { return status_; }

  /// An object with just these keys.
  [[nodiscard]] bool has_keys(const json& value, const std::string& name, std::initializer_list<const char*> keys) {
    if (!value.is_object()) return fail(name, " = ", engine::shown(value), ": must be an object");
    for (const char* key : keys)
      if (!value.contains(key)) return fail(name, " has no '", key, "'");
    for (const auto& item : value.items())
      if (std::find(keys.begin(), keys.end(), item.key()) == keys.end())
        return fail(name, " has the key ", engine::shown(item.key()), ", which is not known");
    return true;
  }
  [[nodiscard]] bool is_list(const json& value, const std::string& name) {
    return value.is_array() || fail(name, " = ", engine::shown(value), ": must be a list");
  }
  /// A whole number from 0.
  template <class N>
  [[nodiscard]] bool read_count(const json& value, const std::string& name, N& out) {
    constexpr auto most = static_cast<std::uint64_t>(std::numeric_limits<N>::max());
    if (!value.is_number_unsigned() || value.get<std::uint64_t>() > most)
      return fail(name, " = ", engine::shown(value), ": must be a whole number, not negative");
    out = static_cast<N>(value.get<std::uint64_t>());
    return true;
  }
  [[nodiscard]] bool read_text(const json& value, const std::string& name, std::string& out) {
    if (!value.is_string()) return fail(name, " = ", engine::shown(value), ": must be a text");
    out = value.get<std::string>();
    return true;
  }
  [[nodiscard]] bool read_amount(const json& value, const std::string& name, double& out) {
    if (!value.is_number() || value.get<double>() < 0)
      return fail(name, " = ", engine::shown(value), ": must be a number, not negative");
    out = value.get<double>();
    return true;
  }
  [[nodiscard]] bool read_flag(const json& value, const std::string& name, bool& out) {
    if (!value.is_boolean()) return fail(name, " = ", engine::shown(value), ": must be true or false");
    out = value.get<bool>();
    return true;
  }
  /// `null` where there is none.
  [[nodiscard]] bool read_amount(const json& value, const std::string& name, std::optional<double>& out) {
    double read = 0;
    out.reset();
    if (value.is_null()) return true;
    if (!read_amount(value, name, read)) return false;
    out = read;
    return true;
  }
  template <class... Parts>
  bool fail(const Parts&... parts) {
    if (status_.ok()) status_ = detail::error(StatusCode::damaged, where_, ": ", parts...);
    return false;
  }

 private:
  std::string where_;
  Status status_;
};

}  // namespace beaconkv::lab
