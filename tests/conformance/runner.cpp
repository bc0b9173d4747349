// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "runner.hpp"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <map>
#include <ostream>
#include <vector>

#include "beaconkv/kernel/instruction_set.hpp"
#include "beaconkv/status.hpp"
#include "methods.hpp"

namespace beaconkv::conformance {
namespace {

namespace fs = std::filesystem;

constexpr const char* usage =
    "usage: conformance [--verbose] [--instruction-set baseline|avx2|avx512] DIR...\n"
    "Compares the library with the right answers in DIR/METHOD/CASE/{params.json,*.npy}.\n"
    "One line a method: METHOD cases N failed N max_score_diff X, where X is relative to the largest reference of an array.\n"
    "The instruction set is that of the library's kernels, by default the best that this machine has.\n"
    "Exit code: 0, 1 where a case failed, 2 where something cannot be read.\n";

const std::map<std::string, Method>& methods() {
  static const std::map<std::string, Method> table{
      {"fps", run_fps},
      {"continual_fps", run_continual_fps},
      {"rope", run_rope},
      {"beaconkv", run_beaconkv},
      {"beaconkv_trace", run_beaconkv_trace},
      {"snapkv", run_snapkv},
      {"rpc", run_rpc},
      {"rpc_trace", run_rpc_trace},
      {"rkv", run_rkv},
      {"rkv_trace", run_rkv_trace},
      {"rkv_trace_chronological", run_rkv_trace_chronological},
      {"rkv_snapkv", run_rkv_snapkv},
      {"rkv_streaming", run_rkv_streaming},
      {"kvpress_snapkv", run_kvpress_snapkv},
      {"kvpress_streaming", run_kvpress_streaming},
      {"kvpress_key_rerotation", run_kvpress_key_rerotation},
      {"kvpress_knorm", run_kvpress_knorm},
      {"kvpress_keydiff", run_kvpress_keydiff},
      {"kvpress_lagkv", run_kvpress_lagkv},
      {"kvpress_tova", run_kvpress_tova},
      {"kvpress_observed_attention", run_kvpress_observed_attention},
      {"kvpress_expected_attention", run_kvpress_expected_attention},
      {"kvpress_adakv", run_kvpress_adakv},
      {"kvpress_pyramidkv", run_kvpress_pyramidkv},
  };
  return table;
}

/// Methods that the library does not have yet.
[[nodiscard]] bool is_skipped(const std::string& method) {
  return method.starts_with("kvpress_") && !methods().contains(method);
}

[[nodiscard]] std::vector<fs::path> sorted_entries(const fs::path& folder) {
  std::error_code error;
  fs::directory_iterator entries(folder, error);
  if (error) throw InputError(folder.string() + ": cannot be read: " + error.message());
  std::vector<fs::path> paths;
  for (const fs::directory_entry& entry : entries) paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  return paths;
}

/// Of each method: the folders of its cases, or files of cases without arrays (for a skipped one, whatever it consists of).
using CaseFolders = std::map<std::string, std::vector<fs::path>>;

void find_cases(const fs::path& root, CaseFolders& found) {
  bool any = false;
  for (const fs::path& folder : sorted_entries(root)) {
    if (!fs::is_directory(folder)) continue;
    const std::string method = folder.filename().string();
    if (!methods().contains(method) && !is_skipped(method))
      throw InputError(folder.string() + ": there is no method '" + method + "'");
    std::vector<fs::path>& cases = found[method];
    const std::size_t before = cases.size();
    for (const fs::path& entry : sorted_entries(folder))
      if (is_skipped(method) || fs::is_directory(entry) || entry.extension() == ".json") cases.push_back(entry);
    if (cases.size() == before) throw InputError(folder.string() + ": has no cases");
    any = true;
  }
  if (!any) throw InputError(root.string() + ": has no folder METHOD/CASE");
}

struct Outcome {
  std::vector<std::string> differences;
  double max_score_diff = 0;
  bool unreadable = false;
};

[[nodiscard]] Outcome run_case(const std::string& method, const fs::path& folder) {
  try {
    const Case c(method, folder);
    Report report;
    methods().at(method)(c, report);
    Outcome outcome{report.differences(), report.max_score_diff(), false};
    if (report.compared() == 0) outcome.differences.push_back("nothing was compared");
    return outcome;
  } catch (const InputError& error) {
    return {{error.what()}, 0, true};
  } catch (const Unsupported& error) {
    return {{error.what()}, 0, false};
  } catch (const Error& error) {
    return {{std::string("the library refuses: ") + error.what()}, 0, false};
  }
}

[[nodiscard]] std::string number_text(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g", value);
  return text;
}

[[nodiscard]] std::string all_of(const std::vector<std::string>& differences) {
  std::string text;
  for (const std::string& difference : differences) text += (text.empty() ? "" : "; ") + difference;
  return text;
}

/// Runs the cases of one method and prints its line. Returns the exit code.
[[nodiscard]] int run_method(const std::string& method, const std::vector<fs::path>& folders, bool verbose, std::ostream& out,
                             std::ostream& err) {
  index_t failed = 0;
  double max_score_diff = 0;
  int code = 0;
  for (const fs::path& folder : folders) {
    const Outcome outcome = run_case(method, folder);
    const std::string name = method + "/" + folder.filename().string();
    max_score_diff = std::max(max_score_diff, outcome.max_score_diff);
    if (outcome.differences.empty()) {
      if (verbose) out << name << " ok max_score_diff " << number_text(outcome.max_score_diff) << "\n";
      continue;
    }
    ++failed;
    code = std::max(code, outcome.unreadable ? 2 : 1);
    err << name << ": " << outcome.differences.front() << "\n";
    if (verbose) out << name << " failed " << all_of(outcome.differences) << "\n";
  }
  out << method << " cases " << folders.size() << " failed " << failed << " max_score_diff " << number_text(max_score_diff)
      << "\n"
      << std::flush;
  return code;
}

[[nodiscard]] int run_all(const std::vector<fs::path>& roots, bool verbose, std::ostream& out, std::ostream& err) {
  CaseFolders found;
  for (const fs::path& root : roots) find_cases(root, found);
  int code = 0;
  for (const auto& [method, folders] : found) {
    if (is_skipped(method))
      out << method << " cases " << folders.size() << " skipped\n";
    else
      code = std::max(code, run_method(method, folders, verbose, out, err));
  }
  return code;
}

[[nodiscard]] Status choose_instruction_set(const std::string& name) {
  const Result<InstructionSet> set = instruction_set_of(name);
  return set ? use_instruction_set(*set) : set.status();
}

}  // namespace

int run(std::span<const std::string> arguments, std::ostream& out, std::ostream& err) {
  std::vector<fs::path> roots;
  bool verbose = false;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    if (argument == "--help") {
      out << usage;
      return 0;
    }
    if (argument == "--verbose") {
      verbose = true;
    } else if (argument == "--instruction-set") {
      if (Status s = choose_instruction_set(++i < arguments.size() ? arguments[i] : ""); !s) {
        err << "conformance: " << s.message() << "\n";
        return 2;
      }
    } else if (argument.starts_with("-")) {
      err << "conformance: unknown option '" << argument << "'\n" << usage;
      return 2;
    } else {
      roots.emplace_back(argument);
    }
  }
  if (roots.empty()) {
    err << "conformance: no DIR is given\n" << usage;
    return 2;
  }
  try {
    return run_all(roots, verbose, out, err);
  } catch (const std::exception& error) {
    err << "conformance: " << error.what() << "\n";
    return 2;
  }
}

}  // namespace beaconkv::conformance
