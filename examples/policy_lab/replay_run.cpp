// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "policy_lab/replay_run.hpp"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <fstream>
#include <map>
#include <optional>
#include <utility>

#include "engine/vocabulary.hpp"
#include "policy_lab/event_lines.hpp"
#include "policy_lab/files.hpp"

namespace beaconkv::lab {
namespace {

/// A problem with the full cache's text, made once for all policies.
struct Task {
  Problem problem;
  FullText full;
  EvaluationOptions how;
};

/// A policy on a problem.
struct Replayed {
  const Task* task = nullptr;
  EventRun run;
  Replay replay;
  std::optional<Outcome> outcome{};  ///< none where the log came from a file
};

/// Sums over steps, as means.
struct Means {
  std::vector<double> regret;  ///< [layers][kv_heads]
  double all = 0;
  index_t revisits = 0, wanted = 0, found = 0;
};

[[nodiscard]] Means means_of(const std::vector<Replayed>& runs, index_t layers, index_t kv_heads) {
  Means m{.regret = std::vector<double>(static_cast<std::size_t>(layers * kv_heads))};
  std::size_t steps = 0;
  for (const Replayed& r : runs)
    for (const HeadStep& s : r.replay.steps()) {
      m.regret[static_cast<std::size_t>(s.layer * kv_heads + s.head)] += s.regret;
      m.revisits += s.revisits;
      m.wanted += s.wanted;
      m.found += s.found;
      ++steps;
    }
  for (double& regret : m.regret) {
    m.all += regret / static_cast<double>(std::max<std::size_t>(1, steps));
    regret *= static_cast<double>(m.regret.size()) / static_cast<double>(std::max<std::size_t>(1, steps));
  }
  return m;
}

/// Token ids as words, where the model has some.
class Words {
 public:
  explicit Words(const std::filesystem::path& model) {
    if (Result<engine::Vocabulary> words = engine::Vocabulary::load(model / "vocab.json"); words) words_ = std::move(*words);
  }
  [[nodiscard]] std::string operator()(std::span<const int> ids) const {
    if (words_)
      if (Result<std::string> text = words_->decode(ids); text) return *text;
    std::string out;
    for (const int id : ids) out.append(out.empty() ? "" : " ").append(std::to_string(id));
    return out;
  }

 private:
  std::optional<engine::Vocabulary> words_;
};

/// The token at a position of prompt and text.
[[nodiscard]] int token_at(const Task& task, position_t position) {
  const auto at = static_cast<std::size_t>(position);
  const std::size_t prompt = task.problem.prompt.size();
  return at < prompt ? task.problem.prompt[at] : task.full.tokens[at - prompt];
}

/// The end of a text: as many tokens as the answer has, and its `<eos>`.
[[nodiscard]] std::string answer_of(const Problem& problem, const std::vector<int>& text, const Words& words) {
  const std::size_t count = std::min(text.size(), std::max<std::size_t>(1, problem.answer.size()) + 2);
  return words(std::span(text).last(count));
}

/// How many evicted tokens of each layer a later query gives more than `needed`.
[[nodiscard]] std::string needed_tokens(const std::vector<Replayed>& runs, index_t layers, double needed) {
  std::vector<index_t> counts(static_cast<std::size_t>(layers));
  for (const Replayed& r : runs)
    for (const LostToken& token : r.replay.lost()) counts[static_cast<std::size_t>(token.layer)] += token.peak > needed ? 1 : 0;
  std::string out;
  for (const index_t count : counts) out.append(out.empty() ? "" : "/").append(std::to_string(count));
  return out;
}

void print_row(const std::string& policy, index_t budget, const std::vector<Replayed>& runs, const engine::Model& model,
               const ReplayOptions& options) {
  const index_t layers = model.layers();
  const index_t kv_heads = model.shape().kv_heads;
  const Means m = means_of(runs, layers, kv_heads);
  std::string exact = "-";
  if (!runs.empty() && runs[0].outcome) {
    const auto right = std::count_if(runs.begin(), runs.end(), [](const Replayed& r) { return r.outcome->exact; });
    exact = std::to_string(right) + "/" + std::to_string(runs.size());
  }
  std::string found = "-";
  if (m.wanted > 0) {
    char text[16];
    std::snprintf(text, sizeof text, "%.1f", 100.0 * static_cast<double>(m.found) / static_cast<double>(m.wanted));
    found = text;
  }
  std::printf("%-24s %6td %3zu %7s %8.3f %9td %7s %18s ", policy.c_str(), budget, runs.size(), exact.c_str(), 100 * m.all,
              m.revisits, found.c_str(), needed_tokens(runs, layers, options.needed).c_str());
  for (index_t l = 0; l < layers; ++l)
    for (index_t h = 0; h < kv_heads; ++h)
      std::printf("%s%.2f", h > 0 ? "/" : " ", 100 * m.regret[static_cast<std::size_t>(l * kv_heads + h)]);
  std::printf("\n");
}

void print_dearest(const std::vector<Replayed>& runs, index_t count, const Words& words) {
  std::vector<std::pair<LostToken, const Task*>> all;
  for (const Replayed& r : runs)
    for (const LostToken& token : r.replay.lost()) all.emplace_back(token, r.task);
  std::stable_sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.first.mass > b.first.mass; });
  for (std::size_t i = 0; i < std::min(all.size(), static_cast<std::size_t>(count)); ++i) {
    const LostToken& t = all[i].first;
    const int token = token_at(*all[i].second, t.position);
    char score[32] = "none";
    if (t.score) std::snprintf(score, sizeof score, "%.3g", static_cast<double>(*t.score));
    std::printf("  missed %.2f: problem %s position %td '%s', layer %td head %td, went at %td with score %s\n", t.mass,
                all[i].second->problem.id.c_str(), static_cast<index_t>(t.position), words(std::span(&token, 1)).c_str(),
                t.layer, t.head, static_cast<index_t>(t.evicted_at), score);
  }
}

[[nodiscard]] double regret_of(const Replay& replay) {
  double sum = 0;
  for (const HeadStep& s : replay.steps()) sum += s.regret;
  return sum / static_cast<double>(std::max<std::size_t>(1, replay.steps().size()));
}

[[nodiscard]] std::string text_of(const std::vector<Range>& ranges) {
  std::string out;
  for (const Range& r : ranges) {
    out.append(out.empty() ? "" : ",").append(std::to_string(r.first));
    if (r.size() > 1) out.append("-").append(std::to_string(r.last - 1));
  }
  return out.empty() ? "nothing" : out;
}

/// What an intervention changed, problem by problem.
void print_changes(const std::vector<Replayed>& before, const std::vector<Replayed>& after,
                   const std::vector<Intervention>& interventions, const Words& words) {
  const auto word = [](bool exact) { return exact ? "right" : "wrong"; };
  index_t gained = 0, lost = 0;
  for (std::size_t i = 0; i < before.size(); ++i) {
    const Outcome& was = *before[i].outcome;
    const Outcome& is = *after[i].outcome;
    gained += !was.exact && is.exact ? 1 : 0;
    lost += was.exact && !is.exact ? 1 : 0;
    const Problem& problem = before[i].task->problem;
    std::printf("  problem %s: %s -> %s, regret %.3f -> %.3f %%; stayed: %s; went: %s\n", problem.id.c_str(), word(was.exact),
                word(is.exact), 100 * regret_of(before[i].replay), 100 * regret_of(after[i].replay),
                text_of(interventions[i].keep).c_str(), text_of(interventions[i].evict).c_str());
    if (was.text != is.text)
      std::printf("    ... %s\n -> ... %s\n", answer_of(problem, was.text, words).c_str(),
                  answer_of(problem, is.text, words).c_str());
  }
  std::printf("  intervention: %td turned right, %td turned wrong\n", gained, lost);
}

[[nodiscard]] Status write_steps(std::ofstream& out, const std::vector<Replayed>& runs) {
  for (const Replayed& r : runs)
    for (const HeadStep& s : r.replay.steps())
      out << r.run.problem << ',' << r.run.policy << ',' << r.run.budget << ',' << s.position << ',' << s.layer << ',' << s.head
          << ',' << s.regret << ',' << s.revisits << ',' << s.wanted << ',' << s.found << '\n';
  return out.flush() ? Status() : detail::invalid("--csv: cannot be written");
}

/// A policy at a budget on all tasks; `interventions` for each, or none at all.
[[nodiscard]] Result<std::vector<Replayed>> run_policy(const engine::Model& model, const std::vector<Task>& tasks,
                                                       const PolicySpec& spec, index_t budget, const ReplayOptions& options,
                                                       const std::vector<Intervention>& interventions) {
  const Result<PolicyEntry> entry = find_policy(spec.name);
  if (!entry) return entry.status();
  std::vector<Replayed> runs;
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    const Task& task = tasks[i];
    EvaluationOptions how = task.how;
    EventLog log;
    how.log = &log;
    if (!interventions.empty()) how.intervention = interventions[i];
    Result<Outcome> outcome = evaluate(model, *entry, {.budget = budget, .as_published = options.as_published},
                                       {spec.text, spec.settings, {}}, task.problem, task.full, how);
    if (!outcome) return detail::invalid(spec.text, " on problem ", task.problem.id, ": ", outcome.status().message());
    EventRun run{task.problem.id, spec.text, budget, log.take()};
    Result<Replay> replay = replay_events(model, task.problem, task.full, run.events, options.revisit);
    if (!replay) return replay.status();
    runs.push_back({&task, std::move(run), std::move(*replay), std::move(*outcome)});
  }
  return runs;
}

/// Those of some positions that turn a wrong answer right where each stays alone, in words.
[[nodiscard]] Result<std::vector<std::string>> causes_among(const engine::Model& model, const Task& task,
                                                            const std::vector<Range>& positions, const PolicySpec& spec,
                                                            index_t budget, const ReplayOptions& options, const Words& words) {
  std::vector<std::string> causes;
  for (const Range& position : positions) {
    const Result<std::vector<Replayed>> again = run_policy(model, {task}, spec, budget, options, {{{position}, {}}});
    if (!again) return again.status();
    if (!(*again)[0].outcome->exact) continue;
    const int token = token_at(task, position.first);
    causes.push_back(std::to_string(position.first) + " '" + words(std::span(&token, 1)) + "'");
  }
  return causes;
}

/// What the wrong answers came from: positions that turn them right by staying. The least missed ones are the control: where
/// they do as much, any disturbance does.
[[nodiscard]] Status print_blame(const engine::Model& model, const std::vector<Replayed>& runs, const PolicySpec& spec,
                                 index_t budget, const ReplayOptions& options, const Words& words) {
  for (const Replayed& r : runs) {
    if (r.outcome->exact) continue;
    const std::vector<Range> most = dearest_positions(r.replay, options.blame);
    const std::vector<Range> least = cheapest_positions(r.replay, options.blame);
    const Result<std::vector<std::string>> causes = causes_among(model, *r.task, most, spec, budget, options, words);
    if (!causes) return causes.status();
    const Result<std::vector<std::string>> control = causes_among(model, *r.task, least, spec, budget, options, words);
    if (!control) return control.status();
    std::string all;
    for (const std::string& cause : *causes) all.append(all.empty() ? ": " : ", ").append(cause);
    std::printf(
        "  problem %s is wrong; turned right by one that stays: %zu of the %zu most missed, %zu of the %zu least missed%s\n",
        r.task->problem.id.c_str(), causes->size(), most.size(), control->size(), least.size(), all.c_str());
    std::fflush(stdout);
  }
  return {};
}

/// `--keep`: positions for all problems, or the dearest of each.
struct Keep {
  std::vector<Range> positions{};
  std::optional<index_t> dearest{};
};
[[nodiscard]] Result<Keep> parse_keep(const std::string& text) {
  constexpr std::string_view word = "dearest:";
  if (text.rfind(word, 0) != 0) {
    Result<std::vector<Range>> positions = parse_positions(text, "--keep");
    if (!positions) return positions.status();
    return Keep{std::move(*positions), {}};
  }
  index_t count = 0;
  const char* const end = text.data() + text.size();
  const auto [at, error] = std::from_chars(text.data() + word.size(), end, count);
  if (error != std::errc() || at != end || count < 1)
    return detail::invalid("--keep = ", text, ": behind 'dearest:' must be a positive whole number");
  return Keep{{}, count};
}

[[nodiscard]] Result<std::vector<Task>> prepare(const engine::Model& model, const ReplayOptions& options,
                                                const std::vector<EventRun>& logged) {
  Result<std::vector<Problem>> all = load_problems(options.prompts, options.model, model.vocab_size());
  if (!all) return all.status();
  std::vector<Problem> chosen;
  if (!options.problem.empty() || !options.log.empty()) {
    for (const Problem& p : *all)
      if (p.id == options.problem ||
          std::any_of(logged.begin(), logged.end(), [&](const EventRun& run) { return run.problem == p.id; }))
        chosen.push_back(p);
    if (chosen.empty()) return detail::invalid("--problem = ", options.problem, ": no problem has this id");
  } else {
    for (const Problem& p : *all)
      if (!options.level || p.level == *options.level) chosen.push_back(p);
    chosen = take_evenly(std::move(chosen), options.limit);
    if (chosen.empty()) return detail::invalid("--level = ", options.level.value_or(0), ": no problem has this level");
  }
  std::vector<Task> tasks;
  for (Problem& p : chosen) {
    Task task{std::move(p), {}, {}};
    task.how = {.max_new = max_new_of(task.problem, *all, options.max_new), .eos = model.config().eos_ids, .compare = false};
    Result<FullText> full = generate_full(model, task.problem, task.how);
    if (!full) return full.status();
    task.full = std::move(*full);
    tasks.push_back(std::move(task));
  }
  return tasks;
}

/// The runs of a file, one row for each policy and budget.
[[nodiscard]] Status replay_logged(const engine::Model& model, const std::vector<Task>& tasks, std::vector<EventRun> logged,
                                   const ReplayOptions& options, const Words& words, std::ofstream& csv) {
  std::vector<std::pair<std::pair<std::string, index_t>, std::vector<Replayed>>> rows;
  for (EventRun& run : logged) {
    const auto task = std::find_if(tasks.begin(), tasks.end(), [&](const Task& t) { return t.problem.id == run.problem; });
    if (task == tasks.end()) return detail::invalid("--log: its problem '", run.problem, "' is not among the prompts");
    Result<Replay> replay = replay_events(model, task->problem, task->full, run.events, options.revisit);
    if (!replay) return detail::invalid("--log: problem '", run.problem, "': ", replay.status().message());
    const std::pair<std::string, index_t> key(run.policy, run.budget);
    auto row = std::find_if(rows.begin(), rows.end(), [&](const auto& r) { return r.first == key; });
    if (row == rows.end()) row = rows.insert(rows.end(), {key, {}});
    row->second.push_back({&*task, std::move(run), std::move(*replay), {}});
  }
  for (const auto& [key, runs] : rows) {
    print_row(key.first, key.second, runs, model, options);
    print_dearest(runs, options.dearest, words);
    if (csv.is_open())
      if (Status s = write_steps(csv, runs); !s) return s;
  }
  return {};
}

[[nodiscard]] Status check(const ReplayOptions& options) {
  if (options.revisit.top_k < 1) return detail::invalid("--top-k = ", options.revisit.top_k, ": must be at least 1");
  if (!(options.revisit.min_distance >= 0))
    return detail::invalid("--distance = ", options.revisit.min_distance, ": must not be negative");
  if (options.limit < 0) return detail::invalid("--limit = ", options.limit, ": must not be negative");
  if (options.max_new < 0) return detail::invalid("--max-new = ", options.max_new, ": must not be negative");
  if (!(options.needed >= 0)) return detail::invalid("--needed = ", options.needed, ": must not be negative");
  if (options.blame < 0) return detail::invalid("--blame = ", options.blame, ": must not be negative");
  if (options.dearest < 0) return detail::invalid("--dearest = ", options.dearest, ": must not be negative");
  return {};
}

}  // namespace

Result<std::vector<Range>> parse_positions(std::string_view text, std::string_view name) {
  std::vector<Range> ranges;
  const char* at = text.data();
  const char* const end = at + text.size();
  const auto wrong = [&] { return detail::invalid(name, " = ", text, ": must be positions such as 3,17-20, not negative"); };
  while (at != end) {
    std::int64_t first = 0;
    auto read = std::from_chars(at, end, first);
    if (read.ec != std::errc() || first < 0) return wrong();
    std::int64_t last = first;
    if (read.ptr != end && *read.ptr == '-') {
      read = std::from_chars(read.ptr + 1, end, last);
      if (read.ec != std::errc()) return wrong();
    }
    if (last < first || last > (std::int64_t{1} << 40)) return wrong();
    ranges.push_back({first, last + 1});
    at = read.ptr;
    if (at == end) break;
    if (*at++ != ',' || at == end) return wrong();
  }
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.first < b.first; });
  for (std::size_t i = 1; i < ranges.size(); ++i)
    if (ranges[i].first < ranges[i - 1].last)
      return detail::invalid(name, " = ", text, ": position ", ranges[i].first, " stands there twice");
  return ranges;
}

Status replay(const ReplayOptions& options) {
  if (Status s = check(options); !s) return s;
  const Result<std::vector<PolicySpec>> specs = parse_policies(options.policies);
  if (!specs) return specs.status();
  for (const PolicySpec& spec : *specs)
    if (const Result<PolicyEntry> entry = find_policy(spec.name); !entry) return entry.status();
  const Result<std::vector<index_t>> budgets = parse_budgets(options.budgets);
  if (!budgets) return budgets.status();
  const Result<Keep> keep = parse_keep(options.keep);
  if (!keep) return keep.status();
  const Result<std::vector<Range>> evict = parse_positions(options.evict, "--evict");
  if (!evict) return evict.status();
  std::vector<EventRun> logged;
  if (!options.log.empty()) {
    Result<std::vector<EventRun>> read = read_events(options.log);
    if (!read) return read.status();
    logged = std::move(*read);
  }
  const Result<engine::Model> model = engine::Model::load(options.model);
  if (!model) return detail::invalid("--model = ", options.model.string(), ": ", model.status().message());
  const Result<std::vector<Task>> tasks = prepare(*model, options, logged);
  if (!tasks) return tasks.status();
  for (const Task& task : *tasks)
    if (const auto prompt = static_cast<position_t>(task.problem.prompt.size()); !evict->empty() && (*evict)[0].first < prompt)
      return detail::invalid("--evict = ", options.evict, ": the first ", prompt, " positions are the prompt of problem ",
                             task.problem.id);
  if (Status s = check_files({{"--prompts", options.prompts},
                              {"--log", options.log},
                              {"--events", options.events, true},
                              {"--csv", options.csv, true}});
      !s)
    return s;
  std::ofstream csv;
  if (!options.csv.empty()) {
    csv.open(options.csv);
    csv << "problem,policy,budget,position,layer,head,regret,revisits,wanted,found\n";
    if (!csv) return detail::invalid("--csv = ", options.csv.string(), ": cannot be written");
  }
  const Words words(options.model);
  std::printf("%s: %zu problems; a revisit is a query whose %td strongest keys lie more than %g tokens back on average\n",
              options.model.string().c_str(), tasks->size(), options.revisit.top_k, options.revisit.min_distance);
  std::printf("%-24s %6s %3s %7s %8s %9s %7s %18s  %s\n", "policy", "budget", "n", "exact", "regret%", "revisits", "found%",
              "needed, by layer", "regret% of each layer, KV head/KV head");
  if (!options.log.empty()) return replay_logged(*model, *tasks, std::move(logged), options, words, csv);

  std::vector<EventRun> all_events;
  for (const PolicySpec& spec : *specs)
    for (const index_t budget : *budgets) {
      const Result<std::vector<Replayed>> runs = run_policy(*model, *tasks, spec, budget, options, {});
      if (!runs) return runs.status();
      print_row(spec.text, budget, *runs, *model, options);
      print_dearest(*runs, options.dearest, words);
      if (csv.is_open())
        if (Status s = write_steps(csv, *runs); !s) return s;
      for (const Replayed& r : *runs) all_events.push_back(r.run);
      if (options.blame > 0)
        if (Status s = print_blame(*model, *runs, spec, budget, options, words); !s) return s;
      std::fflush(stdout);
      if (options.keep.empty() && options.evict.empty()) continue;
      std::vector<Intervention> interventions;
      for (const Replayed& r : *runs)
        interventions.push_back({keep->dearest ? dearest_positions(r.replay, *keep->dearest) : keep->positions, *evict});
      const Result<std::vector<Replayed>> changed = run_policy(*model, *tasks, spec, budget, options, interventions);
      if (!changed) return changed.status();
      print_row("  with the intervention", budget, *changed, *model, options);
      print_changes(*runs, *changed, interventions, words);
      std::fflush(stdout);
    }
  if (!options.events.empty()) return write_events(options.events, all_events);
  return {};
}

}  // namespace beaconkv::lab
