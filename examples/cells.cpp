// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

/// \file
/// Plan only, on memory as llama.cpp keeps it: rows ("cells") in any order under one table of positions for all layers and
/// heads. Tokens are removed by position, `seq_rm(p0, p1)`, and no row moves; new tokens take the holes. At the end the gaps
/// are closed: `seq_add` adds up shifts, and each key is rotated once, by their sum.

#include <algorithm>
#include <beaconkv/beaconkv.hpp>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <vector>

using namespace beaconkv;

namespace {

constexpr index_t layers = 2, heads = 2, dim = 16, num_cells = 64;

struct Cells {
  std::vector<position_t> pos = std::vector<position_t>(num_cells, -1);                // -1: empty
  std::vector<position_t> shift = std::vector<position_t>(num_cells, 0);               // of the position, not yet of the key
  std::vector<float16> keys = std::vector<float16>(num_cells * layers * heads * dim);  // [layer][cell][head][dim]

  float16* key(index_t head, index_t cell) {  // heads of all layers, one after the other
    return keys.data() + ((head / heads * num_cells + cell) * heads + head % heads) * dim;
  }
  void store(index_t head, index_t cell, const std::vector<float>& row) {
    std::transform(row.begin(), row.end(), key(head, cell), encode<float16>);
  }
  void seq_rm(position_t p0, position_t p1) {
    for (position_t& p : pos) p = p0 <= p && p < p1 ? -1 : p;
  }
  void seq_add(position_t p0, position_t delta) {  // everything from p0 on
    for (std::size_t c = 0; c < pos.size(); ++c) {
      shift[c] += pos[c] >= p0 ? delta : 0;
      pos[c] += pos[c] >= p0 ? delta : 0;
    }
  }
};

/// The occupied cells in the order of their positions, the heads of all layers as heads of one cache: a `CacheReader`.
class CellReader {
 public:
  static constexpr Granularity granularity = Granularity::per_layer;  // one table: one set for all heads

  explicit CellReader(Cells& cells) : cells_(&cells) {}
  void refresh() {  // after every change of the table
    order_.clear();
    for (index_t c = 0; c < num_cells; ++c)
      if (pos(c) >= 0) order_.push_back(c);
    std::sort(order_.begin(), order_.end(), [&](index_t a, index_t b) { return pos(a) < pos(b); });
    ++changes_;
  }
  index_t num_kv_heads() const noexcept { return layers * heads; }
  index_t num_tokens() const noexcept { return static_cast<index_t>(order_.size()); }
  index_t key_dim() const noexcept { return dim; }
  index_t value_dim() const noexcept { return dim; }
  std::uint64_t epoch() const noexcept { return changes_; }
  position_t position(index_t, index_t slot) const noexcept { return pos(cell(slot)); }
  ConstRows keys(index_t head, index_t first, index_t count, float* scratch) const noexcept {
    for (index_t i = 0; i < count; ++i)
      for (index_t d = 0; d < dim; ++d) scratch[i * dim + d] = decode(cells_->key(head, cell(first + i))[d]);
    return {scratch, count, dim, dim};
  }
  ConstRows values(index_t, index_t, index_t, float* scratch) const noexcept {
    return {scratch, 0, dim, dim};  // SnapKV reads none
  }
  index_t cell(index_t slot) const noexcept { return order_[static_cast<std::size_t>(slot)]; }

 private:
  position_t pos(index_t c) const noexcept { return cells_->pos[static_cast<std::size_t>(c)]; }
  Cells* cells_;
  std::vector<index_t> order_;
  std::uint64_t changes_ = 0;
};

/// The key of a token before RoPE, made up.
std::vector<float> made_up(index_t head, position_t token) {
  std::vector<float> row;
  for (index_t d = 0; d < dim; ++d)
    row.push_back(static_cast<float>(std::sin(static_cast<double>((token + 1) * (head + 2) * (d + 3)))));
  return row;
}

}  // namespace

int main() {
  Cells cells;
  CellReader reader(cells);
  const RopeTable rope({.head_dim = dim, .theta = 10000});
  // All layers decide together: their heads are the heads of one cache.
  SnapKV policy({.query_heads = layers * heads, .kv_heads = layers * heads, .head_dim = dim},
                {.budget = {.tokens = 32, .interval = 24}, .n_recent_queries = 8, .n_recent_kv = 8}, rope);
  Workspace work(policy.workspace_size(num_cells));
  KeepPlan plan;
  std::vector<float> row(dim);
  std::vector<position_t> token(num_cells);  // whose row lies in a cell, for the check at the end

  index_t ranges = 0;
  for (position_t t = 0; t < 200; ++t) {
    const auto cell = std::find(cells.pos.begin(), cells.pos.end(), -1) - cells.pos.begin();  // any empty one
    for (index_t h = 0; h < layers * heads; ++h) {
      row = made_up(h, t);
      rope.rotate(row.data(), t);
      cells.store(h, cell, row);
    }
    cells.pos[static_cast<std::size_t>(cell)] = token[static_cast<std::size_t>(cell)] = t;
    reader.refresh();
    std::vector<float> queries;
    for (index_t h = 0; h < layers * heads; ++h)
      for (const float q : made_up(h, t + 1000)) queries.push_back(q);
    policy.observe(queries, t).or_throw();
    if (!policy.due(reader)) continue;

    policy.plan(reader, work, plan).or_throw();
    plan.for_each_evicted_positions(reader, 0,
                                    [&](Range range) {
                                      cells.seq_rm(range.first, range.last);
                                      ++ranges;
                                    })
        .or_throw();
    reader.refresh();
    policy.commit(plan).or_throw();
  }
  const index_t left = reader.num_tokens();

  // Close the gaps, the newest first, so that no range has moved when its turn comes; then rotate, once for each key.
  for (index_t slot = left - 1; slot >= 0; --slot) {
    const position_t behind = slot > 0 ? reader.position(0, slot - 1) + 1 : 0;
    if (reader.position(0, slot) > behind) cells.seq_add(reader.position(0, slot), behind - reader.position(0, slot));
  }
  double worst = 0;
  for (index_t slot = 0; slot < left; ++slot) {
    const auto cell = reader.cell(slot);
    const auto c = static_cast<std::size_t>(cell);
    for (index_t h = 0; h < layers * heads; ++h) {
      std::transform(cells.key(h, cell), cells.key(h, cell) + dim, row.begin(), [](float16 x) { return decode(x); });
      rope.realign(row.data(), cells.pos[c] - cells.shift[c], cells.pos[c]);
      cells.store(h, cell, row);

      row = made_up(h, token[c]);
      rope.rotate(row.data(), slot);  // as if the token had always stood there
      for (index_t d = 0; d < dim; ++d)
        worst = std::max(worst, std::fabs(double{decode(cells.key(h, cell)[d])} - row[static_cast<std::size_t>(d)]));
    }
    cells.shift[c] = 0;
    if (cells.pos[c] != slot) worst = 1;
  }
  std::printf("200 tokens went through %td cells: %td are left, the others removed as %td ranges of positions\n", num_cells,
              left, ranges);
  std::printf("gaps closed by one rotation a key: positions 0 to %td, largest difference from fresh keys %.4f\n", left - 1,
              worst);
  return left == 32 + (200 - 32) % 24 && ranges > 7 && worst < 2e-3 ? 0 : 1;
}
