// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "policy_lab/evaluation.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>

#include "engine/sampler.hpp"

namespace beaconkv::lab {
namespace {

using Clock = std::chrono::steady_clock;

[[nodiscard]] double microseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

[[nodiscard]] bool ends_text(int token, const EvaluationOptions& options) {
  return std::find(options.eos.begin(), options.eos.end(), token) != options.eos.end();
}

/// A session and the policy that works on it.
struct Sequence {
  engine::Session session;
  std::unique_ptr<ModelPolicy> policy;
  std::vector<Range> forced_out{};
  std::optional<double> prompt_eviction_us{};  ///< set where the prompt itself was cut

  [[nodiscard]] static Result<Sequence> begin(const engine::Model& model, const PolicyEntry& entry,
                                              const PolicyRequest& request, Settings& settings, std::span<const int> prompt,
                                              const EvaluationOptions& options) {
    Result<engine::Session> session = engine::Session::make(model, request.capacity);
    if (!session) return session.status();
    Sequence sequence{std::move(*session), nullptr, options.intervention.evict, {}};
    if (Status s = sequence.session.prefill(prompt); !s) return s;
    Result<std::unique_ptr<ModelPolicy>> policy = entry.maker(request)(request, settings, sequence.session);
    if (!policy) return policy.status();
    sequence.policy = std::move(*policy);
    sequence.policy->set_event_log(options.log);
    for (const Range& range : options.intervention.keep)
      if (Status s = sequence.policy->keep(range); !s) return s;
    const auto start = Clock::now();
    const Result<index_t> evicted = sequence.policy->after_prefill(sequence.session);
    if (!evicted) return evicted.status();
    if (*evicted > 0) sequence.prompt_eviction_us = microseconds_since(start);
    if (Status s = sequence.intervene(); !s) return s;
    return sequence;
  }

  [[nodiscard]] Result<Sequence> fork() const {
    Sequence copy{session, nullptr, forced_out, {}};
    Result<std::unique_ptr<ModelPolicy>> forked = policy->fork(copy.session);
    if (!forked) return forked.status();
    copy.policy = std::move(*forked);
    return copy;
  }

  /// The token's forward pass; its keys and values are in the cache afterwards.
  [[nodiscard]] Result<StepTime> decode(int token) {
    StepTime time;
    const auto start = Clock::now();
    if (Status s = session.decode(token); !s) return s;
    time.model_us = microseconds_since(start);
    const auto policy_start = Clock::now();
    if (Status s = policy->append(session); !s) return s;
    time.policy_us = microseconds_since(policy_start);
    return time;
  }
  /// What follows on the forward pass; its time is added.
  [[nodiscard]] Status observe_and_evict(StepTime& time) {
    const auto start = Clock::now();
    const Result<index_t> evicted = policy->observe_and_evict(session);
    if (!evicted) return evicted.status();
    time.policy_us += microseconds_since(start);
    time.evicted = *evicted > 0;
    return intervene();
  }
  [[nodiscard]] Status intervene() {
    const position_t newest = session.next_position() - 1;
    for (const Range& range : forced_out)
      if (range.first <= newest && newest < range.last) return policy->evict_newest(session);
    return {};
  }
};

/// KL(full || other) of two logit rows, in nats.
[[nodiscard]] double divergence(std::span<const float> full, std::span<const float> other) {
  const auto log_sum = [](std::span<const float> z) {
    const double top = *std::max_element(z.begin(), z.end());
    double sum = 0;
    for (const float x : z) sum += std::exp(static_cast<double>(x) - top);
    return top + std::log(sum);
  };
  const double full_sum = log_sum(full);
  const double other_sum = log_sum(other);
  double kl = 0;
  for (std::size_t i = 0; i < full.size(); ++i) {
    const double log_p = static_cast<double>(full[i]) - full_sum;
    kl += std::exp(log_p) * (log_p - (static_cast<double>(other[i]) - other_sum));
  }
  return std::max(kl, 0.0);
}

/// How much of the full cache's attention, in its newest step, falls on what the policy's cache still holds: mean over layers
/// and heads.
[[nodiscard]] double mass_kept(const engine::Session& full, const ModelPolicy& policy) {
  const Shape& shape = full.model().shape();
  double total = 0;
  for (index_t l = 0; l < full.model().layers(); ++l) {
    const std::span<const float> weights = full.attention(l);
    const index_t rows = static_cast<index_t>(weights.size()) / shape.query_heads;
    for (index_t q = 0; q < shape.query_heads; ++q)
      for (index_t slot = 0; slot < policy.num_tokens(l, q / shape.group()); ++slot)
        total += static_cast<double>(weights[static_cast<std::size_t>(q * rows + policy.position(l, q / shape.group(), slot))]);
  }
  return total / static_cast<double>(full.model().layers() * shape.query_heads);
}

/// Goes on from `sequence`, whose logits predict the next token, until `<eos>` or `max_new` tokens in all.
[[nodiscard]] Status continue_freely(Sequence& sequence, std::vector<int>& text, const EvaluationOptions& options) {
  while (static_cast<index_t>(text.size()) < options.max_new) {
    const Result<int> token = engine::greedy(sequence.session.logits());
    if (!token) return token.status();
    text.push_back(*token);
    if (ends_text(*token, options)) return {};
    Result<StepTime> time = sequence.decode(*token);
    if (!time) return time.status();
    if (Status s = sequence.observe_and_evict(*time); !s) return s;
  }
  return {};
}

}  // namespace

void keep_least(std::vector<StepTime>& steps, const std::vector<StepTime>& again) {
  for (std::size_t i = 0; i < std::min(steps.size(), again.size()); ++i) {
    steps[i].model_us = std::min(steps[i].model_us, again[i].model_us);
    steps[i].policy_us = std::min(steps[i].policy_us, again[i].policy_us);
  }
}

Result<FullText> generate_full(const engine::Model& model, const Problem& problem, const EvaluationOptions& options) {
  Result<engine::Session> session = engine::Session::make(model, static_cast<index_t>(problem.prompt.size()) + options.max_new);
  if (!session) return session.status();
  if (Status s = session->prefill(problem.prompt); !s) return s;
  FullText full;
  while (static_cast<index_t>(full.tokens.size()) < options.max_new) {
    const Result<int> token = engine::greedy(session->logits());
    if (!token) return token.status();
    full.tokens.push_back(*token);
    if (ends_text(*token, options)) break;
    const auto start = Clock::now();
    if (Status s = session->decode(*token); !s) return s;
    full.steps.push_back({.model_us = microseconds_since(start)});
  }
  return full;
}

Result<Outcome> evaluate(const engine::Model& model, const PolicyEntry& entry, PolicyRequest request, Settings settings,
                         const Problem& problem, const FullText& full, const EvaluationOptions& options) {
  request.model = &model;
  request.capacity = static_cast<index_t>(problem.prompt.size()) + options.max_new;
  Result<Sequence> forced = Sequence::begin(model, entry, request, settings, problem.prompt, options);
  if (!forced) return forced.status();
  std::optional<engine::Session> shadow;
  if (options.compare) {
    Result<engine::Session> session = engine::Session::make(model, request.capacity);
    if (!session) return session.status();
    if (Status s = session->prefill(problem.prompt); !s) return s;
    session->record_attention(true);
    shadow = std::move(*session);
  }

  Outcome outcome;
  const index_t heads = model.shape().kv_heads;
  const auto bytes_per_row = static_cast<std::size_t>(forced->policy->bytes_per_token() / (model.layers() * heads));
  outcome.peak_kv_bytes = problem.prompt.size() * static_cast<std::size_t>(forced->policy->bytes_per_token());
  outcome.prompt_eviction_us = forced->prompt_eviction_us;
  double mass = 0;
  std::optional<std::vector<int>> own_text;
  for (std::size_t i = 0; i < full.tokens.size(); ++i) {
    const Result<int> choice = engine::greedy(forced->session.logits());
    if (!choice) return choice.status();
    if (*choice != full.tokens[i] && !own_text) {
      own_text.emplace(full.tokens.begin(), full.tokens.begin() + static_cast<std::ptrdiff_t>(i));
      if (options.answer) {
        Result<Sequence> free = forced->fork();
        if (!free) return free.status();
        if (Status s = continue_freely(*free, *own_text, options); !s) return s;
      }
    }
    if (shadow) outcome.kl += divergence(shadow->logits(), forced->session.logits());
    if (i + 1 == full.tokens.size()) break;

    Result<StepTime> time = forced->decode(full.tokens[i]);
    if (!time) return time.status();
    std::size_t rows = 0;
    for (index_t l = 0; l < model.layers(); ++l)
      for (index_t h = 0; h < heads; ++h) rows += static_cast<std::size_t>(forced->policy->num_tokens(l, h));
    outcome.peak_kv_bytes = std::max(outcome.peak_kv_bytes, rows * bytes_per_row);
    if (shadow) {
      if (Status s = shadow->decode(full.tokens[i]); !s) return s;
      mass += mass_kept(*shadow, *forced->policy);
    }
    if (Status s = forced->observe_and_evict(*time); !s) return s;
    outcome.steps.push_back(*time);
    outcome.state_bytes = std::max(outcome.state_bytes, forced->policy->state_bytes());
  }
  outcome.same_text = !own_text;
  outcome.exact =
      problem.answer.empty() ? outcome.same_text : problem.answered_by(own_text ? *own_text : full.tokens, options.eos);
  outcome.text = own_text ? std::move(*own_text) : full.tokens;
  outcome.kl /= static_cast<double>(std::max<std::size_t>(1, full.tokens.size()));
  outcome.mass_kept = outcome.steps.empty() ? 1 : mass / static_cast<double>(outcome.steps.size());
  return outcome;
}

}  // namespace beaconkv::lab
