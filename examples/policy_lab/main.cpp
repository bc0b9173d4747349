// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

/// \file
/// `policy_lab`: a language model under every eviction policy, against its full cache.

#include <CLI/CLI.hpp>
#include <cstdio>
#include <new>
#include <string>

#include "policy_lab/capacity.hpp"
#include "policy_lab/cost.hpp"
#include "policy_lab/replay_run.hpp"
#include "policy_lab/report.hpp"
#include "policy_lab/run.hpp"
#include "policy_lab/sweep.hpp"

namespace {

/// Flags that hand a setting to every policy that has it.
void add_settings(CLI::App& app, std::map<std::string, std::string>& settings) {
  const auto add = [&](const std::string& name, const std::string& help) {
    std::string flag = "--" + name;
    std::replace(flag.begin(), flag.end(), '_', '-');
    app.add_option_function<std::string>(
           flag, [&settings, name](const std::string& value) { settings[name] = value; }, help)
        ->group("Settings of all policies that have them");
  };
  add("budget_min", "Tokens left after an eviction (default 7/8 of the budget)");
  add("n_recent_kv", "Newest rows that always stay (default 8; as published: each paper's)");
  add("n_recent_queries", "Newest queries that score (default 16, rkv 8)");
  add("n_beacon", "Beacon queries of a query head (default 16)");
  add("orphan_credit", "What is left of an orphan's credit at each eviction, 0 to 1 (beaconkv; 0: none)");
  add("key_diff_share", "Share of a rank that goes by unlikeness to the mean key (beaconkv)");
  add("value_norm", "1: scores times the length of the value (beaconkv, snapkv, rpc, expected_attention)");
  add("sampler", "fps, random, recent, centroid or medoid (beaconkv_ablation)");
  add("sample_space", "Queries are sampled pre_rope or post_rope (beaconkv_ablation)");
  add("history", "bounded, or whole: nothing is forgotten (beaconkv_ablation)");
  add("beacon_place", "Beacons look from now, their own position, or own_unmasked: seeing later keys (beaconkv_ablation)");
  add("credit_per_token", "Orphan credit as what is left after each token (beaconkv_ablation)");
  add("score_at_reductions", "1: keys remember scores of every reduction of the pool (beaconkv_ablation)");
  add("value_exponent", "Scores times this power of the value's length (beaconkv_ablation)");
  add("value_limit", "No value counts as longer than so many medians of its head (beaconkv_ablation)");
  add("pool", "none, average or max");
  add("kernel", "Width of the pool, odd");
  add("over_queries", "max, mean or sum");
  add("over_heads", "max or mean");
  add("head_scope", "group or layer (rpc)");
  add("softmax_domain", "all_visible or candidates_only");
  add("causal", "1: a query does not see rows newer than itself; 0: it does (rpc, rkv)");
  add("lambda", "Weight of the importance (rkv)");
  add("threshold", "Cosine of look-alikes (rkv)");
  add("spare_column_zero", "1: as published, 0: corrected (rkv)");
  add("order", "chronological or published (rkv)");
  add("newest_query_twice", "1: as published (rpc)");
  add("interval", "Tokens between evictions (rkv, as published)");
  add("ratio", "Compression (rpc, as published)");
  add("n_prefix", "Sinks (recent_window, as published)");
  add("max_pending_queries", "Most queries between two evictions that count (h2o, default 512)");
  add("lag", "Tokens of a partition (lagkv, default 16; as published 128)");
  add("cross_scoring", "1: partitions compete with each other (lagkv)");
  add("n_sink", "Positions below this are left out (expected_attention, default 4)");
  add("n_future_positions", "Positions to come (expected_attention, default 32; as published 512)");
  add("use_covariance", "0: the mean query alone (expected_attention)");
  add("epsilon", "Added to the weight that the value's length multiplies (expected_attention)");
  add("beta", "The last layer's share of the mean budget is one in so many (pyramidkv, default 20)");
  add("safeguard", "Share of the mean budget that every head keeps (adakv, default 0.2)");
}

CLI::App* add_sweep(CLI::App& app, beaconkv::lab::SweepOptions& o) {
  CLI::App* const sweep = app.add_subcommand("sweep", "One switch of a policy at a time, with intervals");
  sweep->add_option("--table", o.table,
                    "1: every policy, 2: which queries look at the keys, 3: how they score them, or coverage");
  CLI::Option* const model = sweep->add_option("--model", o.run.model, "Folder with config.json and model.safetensors");
  CLI::Option* const prompts = sweep->add_option("--prompts", o.run.prompts, "JSON lines, as for run");
  sweep->add_option("--budgets", o.run.budgets, "Generated tokens that a KV head may hold at most (default: the table's)");
  sweep->add_option("--limit", o.run.limit, "So many problems, evenly over the levels (0: all)")->capture_default_str();
  CLI::Option* const threads =
      sweep->add_option("--threads", o.run.threads, "Problems at a time (0: one a core)")->capture_default_str();
  CLI::Option* const fast = sweep->add_flag_callback(
      "--no-compare", [&o] { o.run.compare = false; }, "Without the shadow full cache: no KL, no regret, half the time");
  CLI::Option* const results = sweep->add_option("--results", o.run.results, "Write results here, as JSON lines");
  sweep->add_option("--from", o.from, "Make the table of such files and run nothing")
      ->excludes(model)
      ->excludes(prompts)
      ->excludes(threads)
      ->excludes(fast)
      ->excludes(results);
  sweep->add_option("--base", o.base, "The row of the table that others are compared with (default: its first)");
  sweep->add_option("--compare-with", o.compare_with,
                    "Reference results: each row beside theirs; without --table, all of their rows");
  sweep->add_flag("--markdown", o.markdown, "Tables in Markdown");
  return sweep;
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

CLI::App* add_report(CLI::App& app, beaconkv::lab::ReportOptions& o) {
  CLI::App* const report = app.add_subcommand("report", "One page with tables and plots: DIR/index.html");
  report->add_option("directory", o.directory, "Where the page goes; made where it is missing")->required()->type_name("DIR");
  report->add_option("--model", o.model, "Folder with config.json and model.safetensors (Hugging Face layout)")->required();
  report->add_option("--prompts", o.prompts, "JSON lines, as for run")->required();
  report->add_option("--results", o.results,
                     "Accuracy from files of run --results, once or more; without it, it is measured here");
  report->add_option("--policies", o.policies, "Names with optional settings, as for run: those in colour")
      ->capture_default_str();
  report->add_option("--budgets", o.budgets, "Of accuracy, where it is measured here")->capture_default_str();
  report->add_option("--budget", o.budget, "Of regret, latency and kept positions")->capture_default_str();
  report->add_option("--limit", o.limit, "So many problems are run here, evenly over the levels (0: all)")
      ->capture_default_str();
  report->add_option("--repeats", o.repeats, "Each step's time is the least of so many runs")->capture_default_str();
  report->add_option("--max-new", o.max_new, "Longest text (0: 24 more than the longest right one of the level)")
      ->capture_default_str();
  report->add_option("--needed", o.needed, "A key that the full cache gives a larger weight is needed")->capture_default_str();
  report->add_option("--problem", o.problem,
                     "The id of the problem whose kept positions are shown (default: one on which the policies differ)");
  report->add_option("--instruction-set", o.instruction_set,
                     "baseline, avx2 or avx512, of all kernels (default: the best that this machine has)");
  report->add_option("--date", o.date, "The date on the page (default: today)");
  return report;
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

/// CLI11 takes the largest number for one that is larger.
void refuse_huge_numbers(CLI::App& app) {
  for (CLI::Option* option : app.get_options())
    if (option->get_type_name().find("INT") != std::string::npos)
      option->check([](const std::string& text) {
        constexpr std::size_t most_digits = 18;
        const bool is_number = text.find_first_not_of("+-0123456789") == std::string::npos;
        return is_number && text.size() > most_digits ? text + ": has more digits than fit" : std::string();
      });
  for (CLI::App* sub : app.get_subcommands({})) refuse_huge_numbers(*sub);
}

int run_program(int argc, char** argv) {
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
  run->add_option("--results", options.results, "Write each policy's result on each problem here, as JSON lines");
  run->add_option("--plot", options.plot,
                  "Draw exact answers and the policies' share of decoding over the budget as PNG (needs gnuplot)");
  add_settings(*run, options.settings);

  beaconkv::lab::ReplayOptions replay_options;
  CLI::App* const replay = add_replay(app, replay_options);

  beaconkv::lab::CapacityOptions capacity_options;
  CLI::App* const capacity = add_capacity(app, capacity_options);

  beaconkv::lab::ReportOptions report_options;
  CLI::App* const report = add_report(app, report_options);
  report_options.command = "policy_lab";
  for (int i = 1; i < argc; ++i) report_options.command.append(" ").append(argv[i]);

  beaconkv::lab::SweepOptions sweep_options;
  CLI::App* const sweep = add_sweep(app, sweep_options);
  beaconkv::lab::CostOptions cost_options;
  CLI::App* const cost = add_cost(app, cost_options);

  refuse_huge_numbers(app);
  CLI11_PARSE(app, argc, argv);
  options.compare = !fast;
  const beaconkv::Status status = *replay     ? beaconkv::lab::replay(replay_options)
                                  : *sweep    ? beaconkv::lab::sweep(sweep_options)
                                  : *cost     ? beaconkv::lab::cost(cost_options)
                                  : *capacity ? beaconkv::lab::capacity(capacity_options)
                                  : *report   ? beaconkv::lab::report(report_options)
                                              : beaconkv::lab::run(options);
  if (!status) {
    std::fprintf(stderr, "policy_lab: %s\n", status.message().c_str());
    return 1;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run_program(argc, argv);
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "policy_lab: a setting asks for more memory than there is\n");
    return 1;
  }
}
