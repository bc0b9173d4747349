// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "policy_lab/cost.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <limits>

namespace beaconkv::lab {
namespace {

using Clock = std::chrono::steady_clock;

[[nodiscard]] double microseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

/// The value below which a share of the values lies (nearest rank).
[[nodiscard]] double percentile(std::vector<double> values, double share) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const auto rank = static_cast<std::size_t>(std::ceil(share * static_cast<double>(values.size())));
  return values[std::clamp<std::size_t>(rank, 1, values.size()) - 1];
}

/// A session along a text, and the policy that works on it.
struct Sequence {
  engine::Session session;
  std::unique_ptr<ModelPolicy> policy;
  double prefill_us = 0;  ///< of the policy
  std::size_t next = 0;   ///< token of the text

  [[nodiscard]] static Result<Sequence> begin(const engine::Model& model, const PolicySpec& spec, PolicyRequest request,
                                              const Problem& problem) {
    const Result<PolicyEntry> entry = find_policy(spec.name);
    if (!entry) return entry.status();
    request.model = &model;
    Settings settings(spec.text, spec.settings, {});
    Result<engine::Session> session = engine::Session::make(model, request.capacity);
    if (!session) return session.status();
    Sequence sequence{std::move(*session), nullptr};
    if (Status s = sequence.session.prefill(problem.prompt); !s) return s;
    Result<std::unique_ptr<ModelPolicy>> policy = entry->maker(request)(request, settings, sequence.session);
    if (!policy) return policy.status();
    sequence.policy = std::move(*policy);
    const auto start = Clock::now();
    const Result<index_t> evicted = sequence.policy->after_prefill(sequence.session);
    if (!evicted) return evicted.status();
    sequence.prefill_us = microseconds_since(start);
    return sequence;
  }

  /// The next token; its keys and values are in the cache afterwards.
  [[nodiscard]] Result<StepTime> decode(const FullText& text) {
    StepTime time;
    const auto start = Clock::now();
    if (Status s = session.decode(text.tokens[next++]); !s) return s;
    time.model_us = microseconds_since(start);
    const auto policy_start = Clock::now();
    if (Status s = policy->append(session); !s) return s;
    time.policy_us = microseconds_since(policy_start);
    return time;
  }
  [[nodiscard]] Status observe_and_evict(StepTime& time) {
    const auto start = Clock::now();
    const Result<index_t> evicted = policy->observe_and_evict(session);
    if (!evicted) return evicted.status();
    time.policy_us += microseconds_since(start);
    time.evicted = *evicted > 0;
    return {};
  }
  /// The last token of a text is not decoded: nothing follows it.
  [[nodiscard]] bool done(const FullText& text) const noexcept { return next + 1 >= text.tokens.size(); }
};

[[nodiscard]] index_t rows_of(const engine::Model& model, const ModelPolicy& policy) {
  index_t rows = 0;
  for (index_t l = 0; l < model.layers(); ++l)
    for (index_t h = 0; h < model.shape().kv_heads; ++h) rows = std::max(rows, policy.num_tokens(l, h));
  return rows;
}

[[nodiscard]] index_t length_of(const Problem& problem, const FullText& text) {
  return static_cast<index_t>(problem.prompt.size() + text.tokens.size());
}

/// One run over a problem; what is larger or longer than before is noted, of the times the least.
[[nodiscard]] Status measure(const engine::Model& model, const PolicySpec& spec, const PolicyRequest& request,
                             const Problem& problem, const FullText& text, PolicyCost& cost, double& samplings,
                             double& prefill_us, std::vector<StepTime>& steps) {
  Result<Sequence> sequence = Sequence::begin(model, spec, request, problem);
  if (!sequence) return sequence.status();
  std::vector<StepTime> measured;
  while (!sequence->done(text)) {
    Result<StepTime> time = sequence->decode(text);
    if (!time) return time.status();
    cost.rows = std::max(cost.rows, rows_of(model, *sequence->policy));
    const PolicyBytes bytes = sequence->policy->bytes();
    if (bytes.total() > cost.bytes.total()) cost.bytes = bytes;
    if (Status s = sequence->observe_and_evict(*time); !s) return s;
    measured.push_back(*time);
  }
  samplings = sequence->policy->samplings();
  prefill_us = std::min(prefill_us, sequence->prefill_us);
  if (steps.empty())
    steps = std::move(measured);
  else
    keep_least(steps, measured);
  return {};
}

}  // namespace

Tail tail_of(const std::vector<std::vector<StepTime>>& steps) {
  Tail tail;
  std::vector<double> evictions;
  for (const std::vector<StepTime>& of_problem : steps) {
    std::vector<double> all;
    for (const StepTime& step : of_problem) {
      all.push_back(step.model_us + step.policy_us);
      if (step.evicted) evictions.push_back(all.back());
    }
    if (all.empty()) continue;
    tail.worst = std::max(tail.worst, *std::max_element(all.begin(), all.end()) / percentile(all, 0.5));
  }
  tail.evictions = static_cast<index_t>(evictions.size());
  tail.p50_us = percentile(evictions, 0.5);
  tail.p99_us = percentile(evictions, 0.99);
  return tail;
}

Result<PolicyCost> cost_of(const engine::Model& model, const PolicySpec& spec, index_t budget,
                           const std::vector<Problem>& problems, const std::vector<FullText>& texts, index_t repeats) {
  if (problems.size() != texts.size())
    return detail::invalid("texts are ", texts.size(), ": there are ", problems.size(), " problems");
  PolicyCost cost;
  std::vector<std::vector<StepTime>> together(problems.size());
  std::vector<std::vector<StepTime>> staggered(problems.size());
  std::vector<double> prefill(problems.size(), std::numeric_limits<double>::max());
  std::vector<double> samplings(problems.size());
  std::vector<index_t> rows(problems.size());
  for (index_t pass = 0; pass <= repeats; ++pass)
    for (std::size_t i = 0; i < problems.size(); ++i) {
      const index_t length = length_of(problems[i], texts[i]);
      PolicyCost first;   // looks for the rows that are enough
      PolicyCost larger;  // layers that wait hold more
      std::vector<StepTime> ignored;
      const auto run = [&](index_t capacity, index_t layers_per_step, PolicyCost& into, std::vector<StepTime>& steps) {
        const PolicyRequest request{.capacity = capacity, .budget = budget, .layers_per_step = layers_per_step};
        return measure(model, spec, request, problems[i], texts[i], into, samplings[i], prefill[i], steps);
      };
      if (pass == 0) {
        if (Status s = run(length, 0, first, ignored); !s) return s;
        rows[i] = first.rows;
        continue;
      }
      if (Status s = run(length, 1, larger, staggered[i]); !s) return s;
      if (Status s = run(rows[i], 0, cost, together[i]); !s) return s;
    }
  index_t steps = 0;
  for (std::size_t i = 0; i < problems.size(); ++i) {
    cost.prefill_us += prefill[i] / static_cast<double>(problems.size());
    cost.samplings += samplings[i];
    for (const StepTime& step : together[i]) cost.policy_us += step.policy_us;
    steps += static_cast<index_t>(together[i].size());
  }
  cost.samplings *= 1000.0 / static_cast<double>(std::max<index_t>(1, steps));
  cost.policy_us /= static_cast<double>(std::max<index_t>(1, steps));
  cost.together = tail_of(together);
  cost.staggered = tail_of(staggered);
  return cost;
}

index_t sequences_that_fit(double memory, double weights, double per_sequence) {
  return static_cast<index_t>(std::clamp(std::floor((memory - weights) / per_sequence), 0.0, 1e15));
}

Result<Goodput> run_many(const engine::Model& model, const PolicySpec& spec, index_t budget, index_t rows,
                         const std::vector<Problem>& problems, const std::vector<FullText>& texts, double memory) {
  if (problems.empty() || problems.size() != texts.size())
    return detail::invalid("texts are ", texts.size(), ": there are ", problems.size(), " problems");
  const PolicyRequest request{.capacity = rows, .budget = budget};
  Goodput out;
  std::vector<Sequence> sequences;
  do {
    const Problem& problem = problems[sequences.size() % problems.size()];
    Result<Sequence> sequence = Sequence::begin(model, spec, request, problem);
    if (!sequence) return sequence.status();
    if (sequences.empty()) {
      const PolicyBytes bytes = sequence->policy->bytes();
      out.sequence_bytes = static_cast<std::size_t>(rows * sequence->policy->bytes_per_token());
      const std::size_t shared = spec.name == "full" ? 0 : bytes.workspace;
      if (spec.name != "full") out.sequence_bytes += bytes.total() - bytes.cache;
      const double weights = static_cast<double>(model.weight_count()) * sizeof(float);
      out.sequences = sequences_that_fit(memory, weights, static_cast<double>(out.sequence_bytes));
      out.sequences_sharing =
          sequences_that_fit(memory, weights + static_cast<double>(shared), static_cast<double>(out.sequence_bytes - shared));
      if (out.sequences == 0) return out;
      constexpr index_t most = 4096;
      if (out.sequences > most)
        return detail::invalid("--memory-mb = ", memory / 1e6, ": ", out.sequences,
                               " sequences fit, of which each is run: at most ", most);
    }
    sequences.push_back(std::move(*sequence));
  } while (static_cast<index_t>(sequences.size()) < out.sequences);

  const auto start = Clock::now();
  for (bool all_done = false; !all_done;) {
    all_done = true;
    for (std::size_t i = 0; i < sequences.size(); ++i) {
      const FullText& text = texts[i % texts.size()];
      if (sequences[i].done(text)) continue;
      Result<StepTime> time = sequences[i].decode(text);
      if (!time) return time.status();
      if (Status s = sequences[i].observe_and_evict(*time); !s) return s;
      ++out.tokens;
      all_done = false;
    }
  }
  out.seconds = microseconds_since(start) / 1e6;
  return out;
}

namespace {

struct Line {
  PolicySpec spec;
  index_t budget = 0;  ///< 0: none
  PolicyCost cost{};

  [[nodiscard]] std::string budget_text() const { return budget > 0 ? std::to_string(budget) : "-"; }
};

[[nodiscard]] std::string kilobytes(std::size_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f", static_cast<double>(bytes) / 1e3);
  return text;
}

void print_bytes(const std::vector<Line>& lines, int width) {
  std::puts("# kB (10^3 bytes) of one sequence, all layers, where its cache is largest");
  std::printf("%-*s %6s %9s %9s %9s %9s %9s %9s %9s\n", width, "policy", "budget", "cache", "beacons", "queries", "keys",
              "books", "workspace", "total");
  for (const Line& line : lines) {
    const PolicyBytes& b = line.cost.bytes;
    std::printf("%-*s %6s %9s %9s %9s %9s %9s %9s %9s\n", width, line.spec.text.c_str(), line.budget_text().c_str(),
                kilobytes(b.cache).c_str(), kilobytes(b.beacons).c_str(), kilobytes(b.queries).c_str(),
                kilobytes(b.keys).c_str(), kilobytes(b.books).c_str(), kilobytes(b.workspace).c_str(),
                kilobytes(b.total()).c_str());
  }
}

void print_times(const std::vector<Line>& lines, int width) {
  std::puts("# times in us, all layers; steps that evict: all layers that are due at once | one layer a step");
  std::printf("%-*s %6s %9s %9s %9s | %6s %8s %8s %8s | %6s %8s %8s %8s\n", width, "policy", "budget", "sampl/1k", "prompt",
              "token", "steps", "p50", "p99", "max/med", "steps", "p50", "p99", "max/med");
  for (const Line& line : lines) {
    const PolicyCost& c = line.cost;
    std::printf("%-*s %6s %9.1f %9.1f %9.2f | %6lld %8.1f %8.1f %7.2fx | %6lld %8.1f %8.1f %7.2fx\n", width,
                line.spec.text.c_str(), line.budget_text().c_str(), c.samplings, c.prefill_us, c.policy_us,
                static_cast<long long>(c.together.evictions), c.together.p50_us, c.together.p99_us, c.together.worst,
                static_cast<long long>(c.staggered.evictions), c.staggered.p50_us, c.staggered.p99_us, c.staggered.worst);
  }
}

[[nodiscard]] Status print_goodput(const engine::Model& model, const std::vector<Line>& lines,
                                   const std::vector<Problem>& problems, const std::vector<FullText>& texts, double memory_mb,
                                   int width) {
  std::printf("# sequences that fit into %g MB with %.2f MB of weights, decoding in turn on one thread\n", memory_mb,
              static_cast<double>(model.weight_count()) * sizeof(float) / 1e6);
  std::printf("%-*s %6s %7s %12s %10s %8s %9s %9s\n", width, "policy", "budget", "rows", "kB/sequence", "sequences", "sharing",
              "tokens", "tokens/s");
  for (const Line& line : lines) {
    const Result<Goodput> g = run_many(model, line.spec, line.budget, line.cost.rows, problems, texts, memory_mb * 1e6);
    if (!g) return detail::invalid(line.spec.text, " at ", line.budget_text(), ": ", g.status().message());
    std::printf("%-*s %6s %7lld %12s %10lld %8lld %9lld %9.0f\n", width, line.spec.text.c_str(), line.budget_text().c_str(),
                static_cast<long long>(line.cost.rows), kilobytes(g->sequence_bytes).c_str(),
                static_cast<long long>(g->sequences), static_cast<long long>(g->sequences_sharing),
                static_cast<long long>(g->tokens), g->tokens_per_second());
    std::fflush(stdout);
  }
  return {};
}

}  // namespace

Status cost(const CostOptions& options) {
  if (options.limit < 0) return detail::invalid("--limit = ", options.limit, ": must not be negative");
  if (options.max_new < 0) return detail::invalid("--max-new = ", options.max_new, ": must not be negative");
  if (options.repeats < 1) return detail::invalid("--repeats = ", options.repeats, ": must be at least 1");
  if (!(options.memory_mb >= 0 && options.memory_mb <= 1e9))
    return detail::invalid("--memory-mb = ", options.memory_mb, ": must be between 0 and 1e9");
  const Result<engine::Model> model = engine::Model::load(options.model);
  if (!model) return detail::invalid("--model = ", options.model.string(), ": ", model.status().message());
  Result<std::vector<Problem>> loaded = load_problems(options.prompts, options.model, model->vocab_size());
  if (!loaded) return loaded.status();
  const std::vector<Problem> problems = take_evenly(std::move(*loaded), options.limit);
  const Result<std::vector<PolicySpec>> specs = parse_policies(options.policies);
  if (!specs) return specs.status();
  const Result<std::vector<index_t>> budgets = parse_budgets(options.budgets);
  if (!budgets) return budgets.status();

  std::vector<Line> lines;
  std::size_t width = 14;
  for (const PolicySpec& spec : *specs) {
    width = std::max(width, spec.text.size());
    for (const index_t budget : spec.name == "full" ? std::vector<index_t>{0} : *budgets) {
      const Result<Sequence> trial = Sequence::begin(
          *model, spec, {.capacity = static_cast<index_t>(problems.front().prompt.size()), .budget = budget}, problems.front());
      if (!trial) return detail::invalid(spec.text, " at ", budget, ": ", trial.status().message());
      lines.push_back({spec, budget});
    }
  }
  std::vector<FullText> texts;
  for (const Problem& problem : problems) {
    Result<FullText> text = generate_full(
        *model, problem, {.max_new = max_new_of(problem, problems, options.max_new), .eos = model->config().eos_ids});
    if (!text) return text.status();
    texts.push_back(std::move(*text));
  }
  for (Line& line : lines) {
    const Result<PolicyCost> cost = cost_of(*model, line.spec, line.budget, problems, texts, options.repeats);
    if (!cost) return detail::invalid(line.spec.text, " at ", line.budget_text(), ": ", cost.status().message());
    line.cost = *cost;
  }
  std::printf("# %s: %zu problems, %td layers, %s\n", options.model.string().c_str(), problems.size(), model->layers(),
              name_of(instruction_set()));
  print_bytes(lines, static_cast<int>(width));
  print_times(lines, static_cast<int>(width));
  if (options.memory_mb == 0) return {};
  return print_goodput(*model, lines, problems, texts, options.memory_mb, static_cast<int>(width));
}

}  // namespace beaconkv::lab
