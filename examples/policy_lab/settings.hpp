// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Settings of a policy as the command line gives them: `snapkv:pool=max:kernel=7`.

#include <initializer_list>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "beaconkv/policy/rkv.hpp"

namespace beaconkv::lab {

/// Named values for one policy. A builder asks for the settings that it has; what nobody asked for was a mistake.
///
/// The first value that cannot be read is remembered as `status()`; the getters then return the default.
class Settings {
 public:
  Settings() = default;
  /// `own` are the policy's own (after its name), `common` those given for every policy; own ones win.
  Settings(std::string policy, std::map<std::string, std::string> own, std::map<std::string, std::string> common)
      : policy_(std::move(policy)), own_(std::move(own)), common_(std::move(common)) {}

  [[nodiscard]] index_t count(const char* name, index_t fallback);
  [[nodiscard]] std::optional<index_t> optional_count(const char* name, std::optional<index_t> fallback = {});
  [[nodiscard]] float number(const char* name, float fallback);
  /// One of some words.
  template <class E>
  [[nodiscard]] E choice(const char* name, E fallback, std::initializer_list<std::pair<std::string_view, E>> choices) {
    const std::string* const text = find(name);
    if (text == nullptr) return fallback;
    std::string names;
    for (const auto& [word, value] : choices) {
      if (*text == word) return value;
      names.append(names.empty() ? "" : " or ").append(word);
    }
    fail(name, *text, names);
    return fallback;
  }
  [[nodiscard]] bool flag(const char* name, bool fallback);
  [[nodiscard]] Reduce reduce(const char* name, Reduce fallback);
  /// `pool` (none, average, max) and `kernel`.
  [[nodiscard]] Pool pool(Pool fallback);
  [[nodiscard]] HeadScope head_scope(HeadScope fallback);
  [[nodiscard]] SoftmaxDomain softmax_domain(SoftmaxDomain fallback);
  [[nodiscard]] RKVOrder order(RKVOrder fallback);

  /// The first unreadable value, or an own setting that nobody asked for.
  [[nodiscard]] Status status() const;
  /// Every name that was asked for.
  [[nodiscard]] const std::set<std::string>& known() const noexcept { return known_; }

 private:
  [[nodiscard]] const std::string* find(const char* name);
  void fail(const char* name, const std::string& value, const std::string& expected);

  std::string policy_;
  std::map<std::string, std::string> own_;
  std::map<std::string, std::string> common_;
  std::set<std::string> known_;
  Status status_;
};

/// One entry of `--policies`: a name and its own settings.
struct PolicySpec {
  std::string text;  ///< as given
  std::string name;
  std::map<std::string, std::string> settings;
};

/// Reads `name:key=value:...,name,...`.
[[nodiscard]] Result<std::vector<PolicySpec>> parse_policies(std::string_view text);

/// Reads `64,96,128`.
[[nodiscard]] Result<std::vector<index_t>> parse_budgets(std::string_view text);

}  // namespace beaconkv::lab
