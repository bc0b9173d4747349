// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "policy_lab/coverage.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace beaconkv::lab {
namespace {

struct Variant {
  const char* name;
  AblationQueries::Options options;
  std::size_t history;  ///< the variant that keeps all that this one should cover: as many queries are recent
};

[[nodiscard]] std::vector<Variant> variants() {
  const auto with = [](QuerySampler sampler, bool whole, index_t beacons, index_t recent) {
    return AblationQueries::Options{
        .n_beacon = beacons, .n_recent_queries = recent, .sampler = sampler, .whole_history = whole};
  };
  return {{"fps of the whole history", with(QuerySampler::fps, true, 16, 16), 0},
          {"continual fps", with(QuerySampler::fps, false, 16, 16), 0},
          {"fps of the whole history, 24 + 8", with(QuerySampler::fps, true, 24, 8), 2},
          {"continual fps, 24 + 8", with(QuerySampler::fps, false, 24, 8), 2},
          {"random", with(QuerySampler::random, false, 16, 16), 0},
          {"recent", with(QuerySampler::recent, false, 16, 16), 0},
          {"centroid", with(QuerySampler::centroid, false, 16, 16), 0},
          {"medoid", with(QuerySampler::medoid, false, 16, 16), 0}};
}

/// Sums over problems and query heads, of each variant and layer.
struct Sums {
  std::vector<Coverage> coverage;  // [variants][layers]
  index_t heads = 0;               // query heads of a layer, of all problems
};

/// After so many cycles; the last is the end of the text.
const std::vector<index_t> marks{1, 4, 16, 64, 0};

/// Observers of all layers along one text.
class Watch {
 public:
  Watch(const engine::Model& model, index_t period) : model_(model), period_(period) {
    for (const Variant& variant : variants())
      for (index_t l = 0; l < model.layers(); ++l) observers_.emplace_back(model.shape(), variant.options);
  }

  [[nodiscard]] Status follow(const Problem& problem, const FullText& full, std::vector<Sums>& sums) {
    const auto length = static_cast<index_t>(problem.prompt.size() + full.tokens.size());
    Result<engine::Session> session = engine::Session::make(model_, length);
    if (!session) return session.status();
    if (Status s = session->prefill(problem.prompt); !s) return s;
    Workspace work{WorkspaceSize{}};
    for (std::size_t i = 0; i < observers_.size(); ++i) {
      const QuerySource prompt{session->queries(layer_of(i)), 0};
      if (Status s = observers_[i].prefill(prompt, work); !s) return s;
    }
    index_t cycles = 0;
    for (std::size_t t = 0; t + 1 < full.tokens.size(); ++t) {
      if (Status s = session->decode(full.tokens[t]); !s) return s;
      const bool reduces = static_cast<index_t>(t + 1) % period_ == 0;
      for (std::size_t i = 0; i < observers_.size(); ++i) {
        const QuerySource query{session->queries(layer_of(i)), session->next_position() - 1};
        if (Status s = observers_[i].observe(query); !s) return s;
        if (reduces)
          if (Status s = observers_[i].commit(); !s) return s;
      }
      cycles += reduces ? 1 : 0;
      for (std::size_t m = 0; reduces && m < marks.size(); ++m)
        if (marks[m] == cycles) look(sums[m]);
    }
    look(sums.back());
    return {};
  }

 private:
  [[nodiscard]] index_t layer_of(std::size_t i) const { return static_cast<index_t>(i) % model_.layers(); }
  [[nodiscard]] const AblationQueries& observer(std::size_t variant, index_t layer) const {
    return observers_[variant * static_cast<std::size_t>(model_.layers()) + static_cast<std::size_t>(layer)];
  }

  void look(Sums& sums) const {
    const std::vector<Variant> all = variants();
    for (std::size_t i = 0; i < observers_.size(); ++i) {
      const AblationQueries& whole = observer(all[i / static_cast<std::size_t>(model_.layers())].history, layer_of(i));
      for (index_t h = 0; h < model_.shape().query_heads; ++h) {
        const Coverage c = coverage_of(whole.pool(h), observers_[i].beacons(h));
        sums.coverage[i].worst += c.worst;
        sums.coverage[i].mean += c.mean;
      }
    }
    sums.heads += model_.shape().query_heads;
  }

  const engine::Model& model_;
  index_t period_;
  std::vector<AblationQueries> observers_{};  // [variants][layers]
};

void print(const std::vector<Sums>& sums, index_t layers, bool markdown) {
  std::printf(markdown ? "| sampler | cycles | worst 1 - cosine, by layer | mean of it |\n|---|---:|---|---|\n"
                       : "%-34s %6s  %-28s %s\n",
              "sampler", "cycles", "worst 1 - cosine, by layer", "mean of it");
  const std::vector<Variant> all = variants();
  for (std::size_t v = 0; v < all.size(); ++v)
    for (std::size_t m = 0; m < marks.size(); ++m) {
      if (sums[m].heads == 0) continue;  // no text was as long
      std::string worst, mean;
      for (index_t l = 0; l < layers; ++l) {
        const Coverage& c = sums[m].coverage[v * static_cast<std::size_t>(layers) + static_cast<std::size_t>(l)];
        char text[32];
        std::snprintf(text, sizeof text, "%s%.3f", l > 0 ? " / " : "", c.worst / static_cast<double>(sums[m].heads));
        worst += text;
        std::snprintf(text, sizeof text, "%s%.3f", l > 0 ? " / " : "", c.mean / static_cast<double>(sums[m].heads));
        mean += text;
      }
      const std::string cycles = marks[m] > 0 ? std::to_string(marks[m]) : "end";
      std::printf(markdown ? "| %s | %s | %s | %s |\n" : "%-34s %6s  %-28s %s\n", all[v].name, cycles.c_str(), worst.c_str(),
                  mean.c_str());
    }
}

}  // namespace

Coverage coverage_of(const std::vector<OldQuery>& history, const std::vector<OldQuery>& few) {
  const auto product = [](const OldQuery& a, const OldQuery& b) {
    double sum = 0;
    for (std::size_t d = 0; d < a.row.size(); ++d) sum += static_cast<double>(a.row[d]) * static_cast<double>(b.row[d]);
    return sum;
  };
  Coverage coverage;
  for (const OldQuery& query : history) {
    double best = -1;
    for (const OldQuery& one : few) {
      const double lengths = std::sqrt(product(query, query) * product(one, one));
      best = std::max(best, lengths > 0 ? product(query, one) / lengths : 0);
    }
    coverage.worst = std::max(coverage.worst, 1 - best);
    coverage.mean += (1 - best) / static_cast<double>(history.size());
  }
  return coverage;
}

Status print_coverage(const RunOptions& options, bool markdown) {
  const Result<std::vector<index_t>> budgets = parse_budgets(options.budgets.empty() ? "64" : options.budgets);
  if (!budgets) return budgets.status();
  RunOptions with_model = options;
  with_model.policies = "full";
  const Result<Study> study = Study::make(with_model, {{"full", 0}});
  if (!study) return study.status();
  const engine::Model& model = study->model();
  const auto count = variants().size() * static_cast<std::size_t>(model.layers());
  for (const index_t budget : *budgets) {
    const index_t period = std::max<index_t>(1, budget - FixedBudget{.max = budget}.lower());
    std::vector<Sums> sums(marks.size(), {std::vector<Coverage>(count)});
    for (const Problem& problem : study->problems()) {
      const Result<FullText> full = generate_full(
          model, problem, {.max_new = max_new_of(problem, study->problems(), options.max_new), .eos = model.config().eos_ids});
      if (!full) return full.status();
      if (Status s = Watch(model, period).follow(problem, *full, sums); !s) return s;
    }
    std::printf(
        "coverage of all older queries; %zu problems; a reduction every %td tokens (budget %td); means over query heads\n\n",
        study->problems().size(), period, budget);
    print(sums, model.layers(), markdown);
    std::printf("\n");
    std::fflush(stdout);
  }
  return {};
}

}  // namespace beaconkv::lab
