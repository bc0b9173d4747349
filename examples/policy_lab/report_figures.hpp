// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// The figures of a report's page, each with its caption and its numbers. Without the data it needs, a figure says how to get
/// them.

#include <string>

#include "policy_lab/html.hpp"
#include "policy_lab/report_data.hpp"

namespace beaconkv::lab {

/// A row for each policy, a column for each budget: exact answers in percent, with their interval.
[[nodiscard]] Table accuracy_table(const ReportData& data);
/// A row for each policy at each budget, with all that was measured.
[[nodiscard]] Table cost_table(const ReportData& data);

[[nodiscard]] std::string accuracy_figure(const ReportData& data);
[[nodiscard]] std::string regret_figure(const ReportData& data);
[[nodiscard]] std::string latency_figure(const ReportData& data);
[[nodiscard]] std::string map_figure(const ReportData& data);

/// The class of a policy's colour: those of the command line have one of their own each (of eight), others are grey.
[[nodiscard]] std::string style_of(const ReportData& data, const std::string& policy);

/// A figure with a caption. `name` is what it is called: `Figure 1`.
[[nodiscard]] std::string figure(std::string_view name, std::string_view caption, std::string_view panels,
                                 std::string_view below);

/// A percentage of a share with one decimal, `%` not included.
[[nodiscard]] std::string percent(double share);

}  // namespace beaconkv::lab
