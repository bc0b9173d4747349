// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// The methods whose cases the library is compared with: one function each. They throw `InputError` for a case that cannot be
/// read, and `Unsupported` or `beaconkv::Error` for one that the library refuses.

#include "case.hpp"
#include "report.hpp"

namespace beaconkv::conformance {

using Method = void (*)(const Case&, Report&);

void run_fps(const Case& c, Report& report);
void run_continual_fps(const Case& c, Report& report);
void run_rope(const Case& c, Report& report);
void run_beaconkv(const Case& c, Report& report);
void run_beaconkv_trace(const Case& c, Report& report);
void run_snapkv(const Case& c, Report& report);
void run_rpc(const Case& c, Report& report);
void run_rpc_trace(const Case& c, Report& report);
void run_rkv(const Case& c, Report& report);
void run_rkv_trace(const Case& c, Report& report);
void run_rkv_trace_chronological(const Case& c, Report& report);
void run_rkv_snapkv(const Case& c, Report& report);
void run_rkv_streaming(const Case& c, Report& report);
void run_kvpress_snapkv(const Case& c, Report& report);
void run_kvpress_streaming(const Case& c, Report& report);
void run_kvpress_key_rerotation(const Case& c, Report& report);
void run_kvpress_knorm(const Case& c, Report& report);
void run_kvpress_keydiff(const Case& c, Report& report);
void run_kvpress_lagkv(const Case& c, Report& report);
void run_kvpress_tova(const Case& c, Report& report);
void run_kvpress_observed_attention(const Case& c, Report& report);
void run_kvpress_expected_attention(const Case& c, Report& report);
void run_kvpress_adakv(const Case& c, Report& report);
void run_kvpress_pyramidkv(const Case& c, Report& report);

}  // namespace beaconkv::conformance
