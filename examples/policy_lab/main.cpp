// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

/// \file
/// `policy_lab`: a language model under every eviction policy, against its full cache.

#include <CLI/CLI.hpp>
#include <cstdio>

#include "policy_lab/run.hpp"

namespace {

/// A flag that hands a setting to every policy that has it.
void add_setting(CLI::App& app, beaconkv::lab::RunOptions& options, const std::string& name, const std::string& help) {
  std::string flag = "--" + name;
  std::replace(flag.begin(), flag.end(), '_', '-');
  app.add_option_function<std::string>(
         flag, [&options, name](const std::string& value) { options.settings[name] = value; }, help)
      ->group("Settings of all policies that have them");
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("A language model under every KV-cache eviction policy, against its full cache.");
  app.require_subcommand(1);
  beaconkv::lab::RunOptions options;
  bool fast = false;

  CLI::App* const run = app.add_subcommand("run", "Every policy at every budget on the same problems: one table");
  run->add_option("--model", options.model, "Folder with config.json and model.safetensors (Hugging Face layout)")->required();
  run->add_option("--prompts", options.prompts,
                  "JSON lines: prompt_ids or prompt, and optionally id, level, expected_ids, answer_ids")
      ->required();
  run->add_option("--policies", options.policies, "Names with optional settings, such as rkv:lambda=0.1,beaconkv")
      ->capture_default_str();
  run->add_option("--budgets", options.budgets, "Generated tokens that a KV head may hold at most")->capture_default_str();
  run->add_option("--limit", options.limit, "So many problems, evenly over the levels, in file order (0: all)")
      ->capture_default_str();
  run->add_option("--max-new", options.max_new, "Longest text (0: 24 more than the longest right one of the level)")
      ->capture_default_str();
  run->add_option("--seed", options.seed, "Of the policy 'random'")->capture_default_str();
  run->add_option("--threads", options.threads, "Problems at a time (0: one a core)")->capture_default_str();
  run->add_option("--repeats", options.repeats, "Each step's time is the least of so many runs; the policies take turns")
      ->capture_default_str();
  run->add_option("--layers-per-step", options.layers_per_step,
                  "The most layers that evict in one decode step; the others come next (0: all that are due)")
      ->capture_default_str();
  run->add_option("--instruction-set", options.instruction_set,
                  "baseline, avx2 or avx512, of all kernels (default: the best that this machine has)");
  run->add_flag("--as-published", options.as_published,
                "Each policy with its paper's trigger, protection and growth instead of one rule for all");
  run->add_flag("--no-compare", fast, "Without the shadow full cache: no KL, no attention mass, half the time");
  run->add_option("--csv", options.csv, "Write the table here, too");
  run->add_option("--plot", options.plot,
                  "Draw exact answers and the policies' share of decoding over the budget as PNG (needs gnuplot)");
  add_setting(*run, options, "budget_min", "Tokens left after an eviction (default 7/8 of the budget)");
  add_setting(*run, options, "n_recent_kv", "Newest rows that always stay (default 8; as published: each paper's)");
  add_setting(*run, options, "n_recent_queries", "Newest queries that score (default 16, rkv 8)");
  add_setting(*run, options, "n_beacon", "Beacon queries of a query head (default 16)");
  add_setting(*run, options, "orphan_credit",
              "What is left of an orphan's credit at each eviction, 0 to 1 (beaconkv; 0: none)");
  add_setting(*run, options, "key_diff_share", "Share of a rank that goes by unlikeness to the mean key (beaconkv)");
  add_setting(*run, options, "value_norm", "1: scores times the length of the value (beaconkv, snapkv, rpc)");
  add_setting(*run, options, "pool", "none, average or max");
  add_setting(*run, options, "kernel", "Width of the pool, odd");
  add_setting(*run, options, "over_queries", "max, mean or sum");
  add_setting(*run, options, "over_heads", "max or mean");
  add_setting(*run, options, "head_scope", "group or layer (rpc)");
  add_setting(*run, options, "softmax_domain", "all_visible or candidates_only");
  add_setting(*run, options, "causal", "1: a query does not see rows newer than itself; 0: it does (rpc, rkv)");
  add_setting(*run, options, "lambda", "Weight of the importance (rkv)");
  add_setting(*run, options, "threshold", "Cosine of look-alikes (rkv)");
  add_setting(*run, options, "spare_column_zero", "1: as published, 0: corrected (rkv)");
  add_setting(*run, options, "order", "chronological or published (rkv)");
  add_setting(*run, options, "newest_query_twice", "1: as published (rpc)");
  add_setting(*run, options, "interval", "Tokens between evictions (rkv, as published)");
  add_setting(*run, options, "ratio", "Compression (rpc, as published)");
  add_setting(*run, options, "n_prefix", "Sinks (recent_window, as published)");

  CLI11_PARSE(app, argc, argv);
  options.compare = !fast;
  if (const beaconkv::Status status = beaconkv::lab::run(options); !status) {
    std::fprintf(stderr, "policy_lab: %s\n", status.message().c_str());
    return 1;
  }
  return 0;
}
