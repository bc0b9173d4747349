// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "targets/machine.hpp"

#include <fstream>

#include "beaconkv/kernel/instruction_set.hpp"

namespace beaconkv::bench {
namespace {

[[nodiscard]] std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  std::string name = "unknown processor";
  std::string family;
  for (std::string line; std::getline(file, line) && !line.empty();) {  // the first processor's lines
    const std::size_t colon = line.find(": ");
    if (colon == std::string::npos) continue;
    const std::string value = line.substr(colon + 2);
    if (line.rfind("model name", 0) == 0) name = value;
    if (line.rfind("cpu family", 0) == 0) family = " family " + value;  // virtual machines have short names
    if (line.rfind("model\t", 0) == 0) family += " model " + value;
  }
  return name + family;
}

}  // namespace

Machine this_machine() {
#if defined(__clang__)
  const std::string compiler = __VERSION__;
#else
  const std::string compiler = "g++ " __VERSION__;
#endif
  return {cpu_name(), compiler, BEACONKV_BENCH_FLAGS, name_of(instruction_set())};
}

bool is_native_build() noexcept {
#if defined(__AVX2__) || defined(__AVX512F__)
  return true;
#else
  return false;
#endif
}

}  // namespace beaconkv::bench
