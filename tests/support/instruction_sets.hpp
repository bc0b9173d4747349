// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

#include <vector>

#include "beaconkv/kernel/instruction_set.hpp"
#include "support/catch.hpp"

namespace beaconkv::test {

/// What this machine can run.
inline std::vector<InstructionSet> supported_sets() {
  std::vector<InstructionSet> sets;
  for (const InstructionSet set : {InstructionSet::baseline, InstructionSet::avx2, InstructionSet::avx512})
    if (is_supported(set)) sets.push_back(set);
  return sets;
}

/// Kernels use one instruction set as long as it lives.
class ForcedSet {
 public:
  explicit ForcedSet(InstructionSet set) : before_(instruction_set()) {
    UNSCOPED_INFO("instruction set " << name_of(set));
    use_instruction_set(set).or_throw();
  }
  ~ForcedSet() { static_cast<void>(use_instruction_set(before_)); }
  ForcedSet(const ForcedSet&) = delete;
  ForcedSet& operator=(const ForcedSet&) = delete;

 private:
  InstructionSet before_;
};

}  // namespace beaconkv::test
