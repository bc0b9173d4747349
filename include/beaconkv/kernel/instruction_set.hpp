// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Which instructions the library's kernels use: the best that this machine has, chosen at run time, unless told otherwise.
///
/// Every kernel is compiled for each set, whatever `-march` the program is built with. What is promised: the same contract on
/// every set (order of ties, treatment of NaN, fixed order of sums), and the same bits on `avx2` and `avx512` (unless
/// `-ffast-math` lets a compiler reorder sums). `baseline` has no fused multiply-add on x86-64, so its scores may differ in
/// their last bits, and with them the choice between two tokens whose scores are that close. Where runs on different machines
/// must agree bit for bit, use one set (and one compiler) on all.

#include <atomic>
#include <cstdint>
#include <string_view>

#include "beaconkv/status.hpp"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define BEACONKV_DETAIL_X86 1
#endif

namespace beaconkv::inline v0 {

enum class InstructionSet : std::uint8_t {
  baseline,  ///< what the program is compiled for: SSE2 on x86-64, NEON on ARM64, more under `-march`
  avx2,      ///< AVX2 and FMA
  avx512,    ///< AVX-512 F, BW, DQ and VL
};

[[nodiscard]] constexpr const char* name_of(InstructionSet set) noexcept {
  if (set == InstructionSet::avx2) return "avx2";
  return set == InstructionSet::avx512 ? "avx512" : "baseline";
}

/// The set of that name.
[[nodiscard]] inline Result<InstructionSet> instruction_set_of(std::string_view name) {
  for (const InstructionSet set : {InstructionSet::baseline, InstructionSet::avx2, InstructionSet::avx512})
    if (name == name_of(set)) return set;
  return detail::invalid("instruction set = '", name, "': must be baseline, avx2 or avx512");
}

/// Whether this machine has it.
[[nodiscard]] inline bool is_supported(InstructionSet set) noexcept {
  if (set == InstructionSet::baseline) return true;
#ifdef BEACONKV_DETAIL_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (set == InstructionSet::avx2) return avx2;
  return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

namespace detail {

inline constexpr std::uint8_t not_chosen = 255;
/// The one piece of state that is shared by the whole program.
inline std::atomic<std::uint8_t> chosen_instruction_set{not_chosen};

}  // namespace detail

/// The set in use: the best one supported, or the one given to `use_instruction_set`.
[[nodiscard]] inline InstructionSet instruction_set() noexcept {
  const std::uint8_t chosen = detail::chosen_instruction_set.load(std::memory_order_relaxed);
  if (chosen != detail::not_chosen) return static_cast<InstructionSet>(chosen);
  InstructionSet best = InstructionSet::baseline;
  for (const InstructionSet set : {InstructionSet::avx2, InstructionSet::avx512})
    if (is_supported(set)) best = set;
  detail::chosen_instruction_set.store(static_cast<std::uint8_t>(best), std::memory_order_relaxed);
  return best;
}

/// From now on all kernels of the program use `set`. Call it between evictions. Refused where this machine lacks it.
[[nodiscard]] inline Status use_instruction_set(InstructionSet set) {
  if (!is_supported(set))
    return detail::error(StatusCode::unsupported, "instruction set = ", name_of(set), ": this machine does not have it");
  detail::chosen_instruction_set.store(static_cast<std::uint8_t>(set), std::memory_order_relaxed);
  return {};
}

}  // namespace beaconkv::inline v0
