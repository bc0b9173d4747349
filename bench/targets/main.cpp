// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

/// \file
/// `bench_targets`: every hot path against its opponent, and whether it reaches its target.

#include <CLI/CLI.hpp>
#include <cstdio>

#include "beaconkv/kernel/instruction_set.hpp"
#include "targets/paths.hpp"

namespace {

using namespace beaconkv;

[[nodiscard]] Status measure(const bench::ReportOptions& options, const std::string& json) {
  const bench::Machine machine = bench::this_machine();
  std::printf("# %s | %s | %s | kernels: %s\n", machine.cpu.c_str(), machine.compiler.c_str(), machine.flags.c_str(),
              machine.instruction_set.c_str());
  bench::Report report(options);
  const double start = bench::now();
  for (const auto path :
       {bench::measure_limits, bench::measure_scoring, bench::measure_top_k, bench::measure_fps, bench::measure_redundancy,
        bench::measure_compaction, bench::measure_rope, bench::measure_eviction, bench::measure_tail})
    path(report);
  std::printf("# %.0f s\n", bench::now() - start);
  if (report.rows().empty()) return beaconkv::detail::invalid("--only = ", options.only, ": no row has this in its name");
  if (!json.empty())
    if (Status s = report.write_json(json, machine); !s) return s;
  if (!options.check && !report.all_pass()) return beaconkv::detail::error(StatusCode::unsupported, "a target was not reached");
  return {};
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Every hot path against its opponent, interleaved in one run. Exit code 1 where a target is not reached.");
  bench::ReportOptions options;
  std::string json;
  std::string set;
  app.add_flag("--quick", options.quick, "Fewer repeats: under two minutes");
  app.add_flag("--check", options.check,
               "Everything once, to compare results: times mean nothing and targets are not asked for");
  app.add_option("--only", options.only, "Only rows whose name holds this");
  app.add_option("--json", json, "Write the rows here, too");
  app.add_option("--instruction-set", set, "That the library's kernels use (default: the best that this machine has)")
      ->check(CLI::IsMember({"baseline", "avx2", "avx512"}));
  CLI11_PARSE(app, argc, argv);
  try {
    for (const InstructionSet known : {InstructionSet::baseline, InstructionSet::avx2, InstructionSet::avx512})
      if (set == name_of(known)) use_instruction_set(known).or_throw();
    if (const Status status = measure(options, json); !status) {
      std::fprintf(stderr, "bench_targets: %s\n", status.message().c_str());
      return 1;
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_targets: %s\n", error.what());
    return 1;
  }
  return 0;
}
