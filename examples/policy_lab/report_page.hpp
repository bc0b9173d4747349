// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// A report's page.

#include <string>

#include "policy_lab/report_data.hpp"

namespace beaconkv::lab {

/// The whole page. It refers to nothing outside itself and has no scripts.
[[nodiscard]] std::string page_of(const ReportData& data);

}  // namespace beaconkv::lab
