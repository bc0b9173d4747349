// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

/// \file
/// Paged memory that the library cannot reach (a GPU's, say): the policy reads a copy of it and plans; the engine moves the
/// rows itself, page by page, and gets pages back. The prompt's pages are shared with a second sequence, which notices nothing.

#include <algorithm>
#include <beaconkv/beaconkv.hpp>
#include <cstdio>
#include <random>
#include <vector>

using namespace beaconkv;

namespace {

constexpr Shape shape{.query_heads = 4, .kv_heads = 2, .head_dim = 16};
constexpr index_t page_size = 8, num_pages = 24, max_pages = 12;       // max_pages: of one sequence
constexpr index_t half = page_size * shape.kv_heads * shape.head_dim;  // the keys of a page; its values follow
constexpr Strides strides{2 * half, shape.head_dim, shape.kv_heads* shape.head_dim, 1};

/// One layer: a pool `[page][K, V][page_size][kv_head][head_dim]`. The functions stand for kernels.
struct Device {
  std::vector<float> memory = std::vector<float>(num_pages * 2 * half);

  float* row(page_t page, index_t offset, index_t head) {
    return memory.data() + page * strides.page + offset * strides.token + head * strides.head;
  }
  void move(index_t head, const PagedMove& m) {
    for (index_t i = 0; i < m.count; ++i)
      for (const index_t kv : {index_t{0}, half})
        std::copy_n(row(m.from_page, m.from_offset + i, head) + kv, shape.head_dim, row(m.to_page, m.to_offset + i, head) + kv);
  }
  void copy_page(const PageCopy& copy) {
    if (copy.to != no_page) std::copy_n(row(copy.from, 0, 0), 2 * half, row(copy.to, 0, 0));
  }
};

}  // namespace

int main() {
  Device device;
  std::mt19937 random{1};
  std::normal_distribution<float> normal;
  PagePool pool = PagePool::make(num_pages).or_throw();
  PageTable table = PageTable::make(max_pages, page_size).or_throw();
  PageTable other = PageTable::make(max_pages, page_size).or_throw();

  // The host's copy, seen through the page numbers that go to the device with every step.
  std::vector<float> host(device.memory.size());
  std::vector<page_t> pages(max_pages);
  const auto plane = [&](float* base) {
    return Plane<float>{base, strides, shape.kv_heads, shape.head_dim, max_pages * page_size, page_size, pages.data()};
  };
  auto cache = PlaneCache<float>::make(plane(host.data()), plane(host.data() + half)).or_throw();
  RKV policy(shape, {.budget = {.tokens = 48, .interval = 24}});
  Workspace work(policy.workspace_size(cache.capacity()));
  KeepPlan plan;

  std::vector<float> at_fork, queries(static_cast<std::size_t>(shape.query_heads * shape.head_dim));
  index_t copied = 0, moved = 0, freed = 0, wrong = 0;
  for (position_t t = 0; t < 200; ++t) {
    if (t == 20) {  // another request with the same prompt
      other.fork_from(table, pool).or_throw();
      at_fork = device.memory;
    }
    const PagePlace place = table.append(pool).or_throw();
    device.copy_page(place.copy);  // once: the prompt's last page is shared and not full
    copied += place.copy.to != no_page;
    std::copy(table.entries().begin(), table.entries().end(), pages.begin());
    for (index_t h = 0; h < shape.kv_heads; ++h)
      for (index_t d = 0; d < shape.head_dim; ++d)
        for (const index_t kv : {index_t{0}, half}) device.row(place.page, place.offset, h)[kv + d] = normal(random);
    for (float& q : queries) q = normal(random);
    cache.append(t).or_throw();
    policy.observe_rotated(queries, t).or_throw();
    if (!policy.due(cache)) continue;

    std::copy(device.memory.begin(), device.memory.end(), host.begin());  // download; then plan on the copy
    policy.plan(cache, work, plan).or_throw();
    std::vector<index_t> need_copy(max_pages);
    const auto holders = [&](page_t page) { return pool.ref_count(page); };
    const PageChanges changes = page_changes(plan, page_size, table.entries(), holders, need_copy).or_throw();
    copied += changes.num_need_copy;
    for (index_t i = 0; i < changes.num_need_copy; ++i)
      device.copy_page(table.make_own(need_copy[static_cast<std::size_t>(i)], pool).or_throw());
    for (index_t h = 0; h < shape.kv_heads; ++h)  // every head keeps tokens of its own, equally many
      for_each_paged_move(plan, h, page_size, table.entries(), [&](const PagedMove& move) {
        device.move(h, move);
        moved += move.count;
      }).or_throw();
    freed += table.truncate(plan.num_kept(0), pool).or_throw();

    compact(cache, plan).or_throw();  // as `evict` does: the copy follows, and so do its positions
    policy.commit(plan).or_throw();
    for (index_t h = 0; h < shape.kv_heads; ++h)  // the device holds what `evict` would have left
      for (index_t s = 0; s < cache.num_tokens(); ++s) {
        const PagePlace at = table.locate(s).or_throw();
        for (const index_t kv : {index_t{0}, half})
          wrong += !std::equal(device.row(at.page, at.offset, h) + kv, device.row(at.page, at.offset, h) + kv + shape.head_dim,
                               cache.key_plane().row(h, s) + kv);
      }
  }
  bool untouched = true;
  for (index_t t = 0; t < other.num_tokens(); t += page_size) {
    const float* const page = device.row(other.locate(t).or_throw().page, 0, 0);
    untouched = untouched && std::equal(page, page + 2 * half, at_fork.data() + (page - device.memory.data()));
  }
  std::printf("200 tokens: %td are left in %td pages; %td pages copied, %td rows moved, %td pages came back\n",
              cache.num_tokens(), table.num_pages(), copied, moved, freed);
  std::printf("%td rows differ from what evict leaves; the other sequence has its %td tokens%s\n", wrong, other.num_tokens(),
              untouched ? "" : ", changed");
  const bool counted = pool.num_free() == num_pages - table.num_pages() - other.num_pages();
  return wrong == 0 && untouched && copied == 3 && freed > 0 && counted ? 0 : 1;
}
