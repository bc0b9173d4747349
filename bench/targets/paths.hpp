// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// The hot paths, one function and one file each. They measure what the report wants and leave their rows in it.

#include "targets/report.hpp"

namespace beaconkv::bench {

void measure_limits(Report& report);
void measure_scoring(Report& report);
void measure_top_k(Report& report);
void measure_fps(Report& report);
void measure_redundancy(Report& report);
void measure_compaction(Report& report);
void measure_rope(Report& report);
void measure_eviction(Report& report);
void measure_tail(Report& report);

}  // namespace beaconkv::bench
