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

bool Settings::flag(const char* name, bool fallback) { return choice<bool>(name, fallback, {{"0", false}, {"1", true}}); }

Reduce Settings::reduce(const char* name, Reduce fallback) {
  return choice<Reduce>(name, fallback, {{"max", Reduce::max}, {"mean", Reduce::mean}, {"sum", Reduce::sum}});
}

Pool Settings::pool(Pool fallback) {
  const PoolKind kind = choice<PoolKind>("pool", fallback.kind,
                                         {{"none", PoolKind::none}, {"average", PoolKind::average}, {"max", PoolKind::max}});
  return {kind, count("kernel", fallback.kernel)};
}

HeadScope Settings::head_scope(HeadScope fallback) {
  return choice<HeadScope>("head_scope", fallback, {{"group", HeadScope::group}, {"layer", HeadScope::layer}});
}

SoftmaxDomain Settings::softmax_domain(SoftmaxDomain fallback) {
  return choice<SoftmaxDomain>(
      "softmax_domain", fallback,
      {{"all_visible", SoftmaxDomain::all_visible}, {"candidates_only", SoftmaxDomain::candidates_only}});
}

RKVOrder Settings::order(RKVOrder fallback) {
  return choice<RKVOrder>("order", fallback, {{"chronological", RKVOrder::chronological}, {"published", RKVOrder::published}});
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
