// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

// The one translation unit that compiles Catch2's runner: all test programs share it.
#define CATCH_CONFIG_RUNNER
#include "support/catch.hpp"

#include <cstdio>

int main(int argc, char** argv) {
  Catch::Session session;
  session.configData().rngSeed = 20260701;                         // fixed, so that a run can be repeated
  session.configData().warnings = Catch::WarnAbout::NoAssertions;  // a case that asserts nothing fails
  if (const int error = session.applyCommandLine(argc, argv); error != 0) return error;
  // Before the tests: Catch2 2 prints the seed only with a failed assertion, not where a sanitizer ends the program.
  std::printf("random seed: %u\n", static_cast<unsigned>(session.configData().rngSeed));
  std::fflush(stdout);
  return session.run();
}
