// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

/// \file
/// A policy of one's own: twenty lines of scorer, put into the observer, schedule and protection that the library has.

#include <beaconkv/beaconkv.hpp>
#include <cstdio>
#include <numeric>
#include <vector>

using namespace beaconkv;

/// Tokens whose keys are long stay: score = squared norm of the key.
struct KeyNormScorer {
  [[nodiscard]] Status validate(const Shape&) const { return {}; }

  template <CacheReader Cache>
  [[nodiscard]] Result<ScoreReport> score(const Cache& cache, const Observations&, Range candidates, ScoreMatrix out,
                                          Workspace& work) const {
    const Workspace::Frame frame(work);
    const std::span<float> scratch = work.take<float>(cache.key_dim());
    for (index_t h = 0; h < out.heads; ++h)
      for (index_t j = candidates.first; j < candidates.last; ++j) {
        const ConstRows key = cache.keys(h, j, 1, scratch.data());
        out.row(h)[static_cast<std::size_t>(j)] = std::inner_product(key.data, key.data + key.dim, key.data, 0.0F);
      }
    return ScoreReport{};
  }

  [[nodiscard]] WorkspaceSize workspace_size(const Shape& shape, index_t, index_t) const {
    return detail::measure([&](Workspace& work) { static_cast<void>(work.take<float>(shape.head_dim)); });
  }
};

int main() {
  const Shape shape{.query_heads = 1, .kv_heads = 1, .head_dim = 4};
  RecentWindow<KeyNormScorer> policy(shape, {.budget = {.max = 8, .min = 4}, .n_prefix = 1});
  OwningCache<float> cache(shape, 8);
  Workspace work(policy.workspace_size(8));

  for (position_t t = 0; t < 8; ++t) {
    const std::vector<float> row(4, t % 2 == 0 ? 1.0F : static_cast<float>(t));  // odd tokens have long keys
    cache.append(row, row, t).or_throw();
    policy.observe({}, t).or_throw();
  }
  evict(policy, cache.view(), work).or_throw();

  std::printf("kept positions:");
  for (index_t slot = 0; slot < cache.view().num_tokens(); ++slot)
    std::printf(" %td", static_cast<index_t>(cache.view().position(0, slot)));
  std::printf("\n");
  return cache.view().position(0, 1) == 1 ? 0 : 1;  // the prefix (position 0), then 1, 3, 5, 7 as far as the budget goes
}
