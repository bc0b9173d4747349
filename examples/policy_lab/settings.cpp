// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "policy_lab/settings.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>

namespace beaconkv::lab {
namespace {

template <class N>
[[nodiscard]] std::optional<N> read_number(std::string_view text) {
  N value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return {};
  return value;
}

[[nodiscard]] std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (true) {
    const std::size_t at = text.find(separator);
    parts.push_back(text.substr(0, at));
    if (at == std::string_view::npos) return parts;
    text.remove_prefix(at + 1);
  }
}

}  // namespace

const std::string* Settings::find(const char* name) {
  known_.insert(name);
  if (const auto own = own_.find(name); own != own_.end()) return &own->second;
  if (const auto common = common_.find(name); common != common_.end()) return &common->second;
  return nullptr;
}

void Settings::fail(const char* name, const std::string& value, const std::string& expected) {
  if (status_.ok()) status_ = detail::invalid(policy_, ": ", name, " = ", value, ": must be ", expected);
}

index_t Settings::count(const char* name, index_t fallback) { return optional_count(name, fallback).value_or(fallback); }

std::optional<index_t> Settings::optional_count(const char* name, std::optional<index_t> fallback) {
  const std::string* const text = find(name);
  if (text == nullptr) return fallback;
  const std::optional<index_t> value = read_number<index_t>(*text);
  if (!value) fail(name, *text, "a whole number");
  return value ? value : fallback;
}

float Settings::number(const char* name, float fallback) {
  const std::string* const text = find(name);
  if (text == nullptr) return fallback;
  const std::optional<float> value = read_number<float>(*text);
  if (!value || !std::isfinite(*value)) fail(name, *text, "a number");
  return value.value_or(fallback);
}

std::string Settings::word(const char* name, std::string_view fallback, std::initializer_list<std::string_view> allowed) {
  const std::string* const text = find(name);
  if (text == nullptr) return std::string(fallback);
  if (std::find(allowed.begin(), allowed.end(), *text) != allowed.end()) return *text;
  std::string choices;
  for (const std::string_view choice : allowed) choices.append(choices.empty() ? "" : " or ").append(choice);
  fail(name, *text, choices);
  return std::string(fallback);
}

bool Settings::flag(const char* name, bool fallback) { return word(name, fallback ? "1" : "0", {"0", "1"}) == "1"; }

Reduce Settings::reduce(const char* name, Reduce fallback) {
  const std::string_view given = fallback == Reduce::max ? "max" : (fallback == Reduce::mean ? "mean" : "sum");
  const std::string value = word(name, given, {"max", "mean", "sum"});
  return value == "max" ? Reduce::max : (value == "mean" ? Reduce::mean : Reduce::sum);
}

Pool Settings::pool(Pool fallback) {
  const std::string_view given = fallback.kind == PoolKind::none ? "none" : (fallback.kind == PoolKind::max ? "max" : "average");
  const std::string kind = word("pool", given, {"none", "average", "max"});
  const PoolKind value = kind == "none" ? PoolKind::none : (kind == "max" ? PoolKind::max : PoolKind::average);
  return {value, count("kernel", fallback.kernel)};
}

HeadScope Settings::head_scope(HeadScope fallback) {
  return word("head_scope", fallback == HeadScope::layer ? "layer" : "group", {"group", "layer"}) == "layer" ? HeadScope::layer : HeadScope::group;
}

SoftmaxDomain Settings::softmax_domain(SoftmaxDomain fallback) {
  const std::string_view given = fallback == SoftmaxDomain::all_visible ? "all_visible" : "candidates_only";
  return word("softmax_domain", given, {"all_visible", "candidates_only"}) == "all_visible" ? SoftmaxDomain::all_visible : SoftmaxDomain::candidates_only;
}

Status Settings::status() const {
  if (!status_.ok()) return status_;
  for (const auto& entry : own_) {
    if (known_.contains(entry.first)) continue;
    std::string names;
    for (const std::string& name : known_) names.append(names.empty() ? "" : ", ").append(name);
    return detail::invalid(policy_, " has no setting '", entry.first, "'; it has ", names);
  }
  return {};
}

Result<std::vector<PolicySpec>> parse_policies(std::string_view text) {
  std::vector<PolicySpec> specs;
  for (const std::string_view part : split(text, ',')) {
    const std::vector<std::string_view> words = split(part, ':');
    PolicySpec spec{std::string(part), std::string(words[0]), {}};
    if (spec.name.empty()) return detail::invalid("--policies = '", text, "': there is an empty name");
    for (std::size_t i = 1; i < words.size(); ++i) {
      const std::size_t equals = words[i].find('=');
      if (equals == 0 || equals == std::string_view::npos)
        return detail::invalid("--policies: '", words[i], "' in '", part, "' must read setting=value");
      if (!spec.settings.emplace(words[i].substr(0, equals), words[i].substr(equals + 1)).second)
        return detail::invalid("--policies: '", words[i].substr(0, equals), "' stands twice in '", part, "'");
    }
    specs.push_back(std::move(spec));
  }
  return specs;
}

Result<std::vector<index_t>> parse_budgets(std::string_view text) {
  std::vector<index_t> budgets;
  for (const std::string_view part : split(text, ',')) {
    const std::optional<index_t> value = read_number<index_t>(part);
    if (!value || *value < 1) return detail::invalid("--budgets: '", part, "' must be a positive whole number");
    budgets.push_back(*value);
  }
  return budgets;
}

}  // namespace beaconkv::lab
