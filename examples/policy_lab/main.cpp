// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

/// \file
/// `policy_lab`: a language model under every eviction policy, against its full cache.

#include <CLI/CLI.hpp>
#include <cstdio>

#include "policy_lab/capacity.hpp"
#include "policy_lab/cost.hpp"
#include "policy_lab/replay_run.hpp"
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

CLI::App* add_replay(CLI::App& app, beaconkv::lab::ReplayOptions& o) {
  CLI::App* const replay =
      app.add_subcommand("replay", "What the full cache looks for that a policy evicted, and what changes when it may not");
  replay->add_option("--model", o.model, "Folder with config.json and model.safetensors (Hugging Face layout)")->required();
  replay->add_option("--prompts", o.prompts, "JSON lines, as for run")->required();
  CLI::Option* const policies =
      replay->add_option("--policies", o.policies, "Names with optional settings, as for run")->capture_default_str();
  replay->add_option("--budgets", o.budgets, "Generated tokens that a KV head may hold at most")->capture_default_str();
  replay->add_option("--problem", o.problem, "The id of one problem");
  replay->add_option("--limit", o.limit, "So many problems, evenly over the levels (0: all)")->capture_default_str();
  replay->add_option("--level", o.level, "Only the problems of this level");
  replay->add_option("--max-new", o.max_new, "Longest text (0: 24 more than the longest right one of the level)")
      ->capture_default_str();
  replay->add_flag("--as-published", o.as_published, "Each policy with its paper's trigger, protection and growth");
  replay->add_option("--top-k", o.revisit.top_k, "Strongest keys of a query")->capture_default_str();
  replay
      ->add_option("--distance", o.revisit.min_distance,
                   "A query whose strongest keys lie further back on average is a revisit")
      ->capture_default_str();
  replay->add_option("--needed", o.needed, "An evicted token that a later query gives a larger weight was needed")
      ->capture_default_str();
  replay->add_option("--dearest", o.dearest, "So many evicted tokens are shown, most missed first")->capture_default_str();
  CLI::Option* const keep = replay->add_option(
      "--keep", o.keep, "Positions that must stay, such as 90,120-133, or dearest:N; the answers of both runs are shown");
  CLI::Option* const evict =
      replay->add_option("--evict", o.evict, "Generated positions that go as soon as they were written; the same");
  CLI::Option* const blame = replay->add_option(
      "--blame", o.blame,
      "For each wrong answer, so many of the most missed positions stay, each in a run of its own; and of the least");
  CLI::Option* const events = replay->add_option("--events", o.events, "Write the evictions here (docs/event_log.md)");
  replay->add_option("--log", o.log, "Replay evictions from such a file instead of running policies")
      ->excludes(policies)
      ->excludes(keep)
      ->excludes(evict)
      ->excludes(blame)
      ->excludes(events);
  replay->add_option("--csv", o.csv, "Write every step, layer and KV head here");
  return replay;
}

CLI::App* add_capacity(CLI::App& app, beaconkv::lab::CapacityOptions& o) {
  CLI::App* const capacity = app.add_subcommand("capacity", "Bytes of known models with and without eviction, by arithmetic");
  std::string models = "Names with commas between them: all";
  for (const beaconkv::lab::ModelShape& model : beaconkv::lab::model_shapes()) models += ", " + model.name;
  capacity->add_option("--models", o.models, models)->capture_default_str();
  capacity->add_option("--policies", o.policies, "Names with commas between them")->capture_default_str();
  capacity->add_option("--length", o.length, "Tokens of each sequence at the end")->capture_default_str();
  capacity->add_option("--prompt", o.prompt, "Of these: a prompt that stays and lies on top of the budget")
      ->capture_default_str();
  capacity->add_option("--batch", o.batch, "Sequences")->capture_default_str();
  capacity->add_option("--budget", o.budget, "Tokens that a KV head holds at most")->capture_default_str();
  capacity->add_option("--bytes-per-number", o.bytes_per_number, "Of weights, keys and values")->capture_default_str();
  capacity->add_option("--memory", o.memory, "Bytes of the device, for the number of sequences that fit")
      ->capture_default_str();
  return capacity;
}

CLI::App* add_cost(CLI::App& app, beaconkv::lab::CostOptions& o) {
  CLI::App* const cost = app.add_subcommand("cost", "Bytes item by item, samplings, latency, and how many sequences fit");
  cost->add_option("--model", o.model, "Folder with config.json and model.safetensors (Hugging Face layout)")->required();
  cost->add_option("--prompts", o.prompts, "JSON lines, as for run")->required();
  cost->add_option("--policies", o.policies, "Names with optional settings, as for run")->capture_default_str();
  cost->add_option("--budgets", o.budgets, "Generated tokens that a KV head may hold at most")->capture_default_str();
  cost->add_option("--limit", o.limit, "So many problems, evenly over the levels (0: all)")->capture_default_str();
  cost->add_option("--max-new", o.max_new, "Longest text (0: 24 more than the longest right one of the level)")
      ->capture_default_str();
  cost->add_option("--repeats", o.repeats, "Each step's time is the least of so many runs")->capture_default_str();
  cost->add_option("--memory-mb", o.memory_mb,
                   "Run as many sequences as fit into so many megabytes, weights included (0: do not)")
      ->capture_default_str();
  return cost;
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
  add_setting(*run, options, "value_norm",
              "1: scores times the length of the value (beaconkv, snapkv, rpc, expected_attention)");
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
  add_setting(*run, options, "max_pending_queries", "Most queries between two evictions that count (h2o, default 512)");
  add_setting(*run, options, "lag", "Tokens of a partition (lagkv, default 16; as published 128)");
  add_setting(*run, options, "cross_scoring", "1: partitions compete with each other (lagkv)");
  add_setting(*run, options, "n_sink", "Positions below this are left out (expected_attention, default 4)");
  add_setting(*run, options, "n_future_positions", "Positions to come (expected_attention, default 32; as published 512)");
  add_setting(*run, options, "use_covariance", "0: the mean query alone (expected_attention)");
  add_setting(*run, options, "epsilon", "Added to the weight that the value's length multiplies (expected_attention)");
  add_setting(*run, options, "beta", "The last layer's share of the mean budget is one in so many (pyramidkv, default 20)");
  add_setting(*run, options, "safeguard", "Share of the mean budget that every head keeps (adakv, default 0.2)");

  beaconkv::lab::ReplayOptions replay_options;
  CLI::App* const replay = add_replay(app, replay_options);

  beaconkv::lab::CapacityOptions capacity_options;
  CLI::App* const capacity = add_capacity(app, capacity_options);

  beaconkv::lab::CostOptions cost_options;
  CLI::App* const cost = add_cost(app, cost_options);

  CLI11_PARSE(app, argc, argv);
  options.compare = !fast;
  const beaconkv::Status status = *replay     ? beaconkv::lab::replay(replay_options)
                                  : *cost     ? beaconkv::lab::cost(cost_options)
                                  : *capacity ? beaconkv::lab::capacity(capacity_options)
                                              : beaconkv::lab::run(options);
  if (!status) {
    std::fprintf(stderr, "policy_lab: %s\n", status.message().c_str());
    return 1;
  }
  return 0;
}
