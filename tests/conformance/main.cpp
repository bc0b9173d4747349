// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include <iostream>
#include <string>
#include <vector>

#include "runner.hpp"

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + (argc > 0 ? 1 : 0), argv + argc);
  return beaconkv::conformance::run(arguments, std::cout, std::cerr);
}
