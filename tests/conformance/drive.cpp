// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "drive.hpp"

#include <cmath>
#include <cstring>
#include <numeric>

namespace beaconkv::conformance {
namespace {

[[nodiscard]] bool same_bits(const float* a, const float* b, index_t n) {
  return std::memcmp(a, b, static_cast<std::size_t>(n) * sizeof(float)) == 0;
}

[[nodiscard]] std::vector<std::int64_t> sorted_rows(const IndexArray& array) {
  std::vector<std::int64_t> rows = array.data;
  for (auto row = rows.begin(); row != rows.end(); row += array.dim(1)) std::sort(row, row + array.dim(1));
  return rows;
}

/// The sorted scores of those slots that are candidates.
[[nodiscard]] std::vector<float> sorted_scores(std::span<const std::int64_t> slots, const float* scores, Range candidates) {
  std::vector<float> found;
  for (const std::int64_t slot : slots)
    if (slot >= candidates.first && slot < candidates.last) found.push_back(scores[slot - candidates.first]);
  std::sort(found.begin(), found.end());
  return found;
}

void compare_kept_scores(Report& report, const Case& c, const IndexArray& expected, std::span<const std::int64_t> actual,
                         const Scored& scored) {
  const FloatArray reference = c.floats("scores", {Case::any, scored.range.size()});
  const auto n = static_cast<std::size_t>(expected.dim(1));
  FloatArray wanted{{0}, {}};
  std::vector<float> found;
  for (index_t h = 0; h < expected.dim(0); ++h) {
    const std::size_t first = static_cast<std::size_t>(h) * n;
    const std::vector<float> a = sorted_scores(std::span(expected.data).subspan(first, n),
                                               reference.row(std::min(h, reference.dim(0) - 1)), scored.range);
    const std::vector<float> b =
        sorted_scores(actual.subspan(first, n), scored.values.data() + h * scored.range.size(), scored.range);
    wanted.data.insert(wanted.data.end(), a.begin(), a.end());
    found.insert(found.end(), b.begin(), b.end());
  }
  wanted.shape[0] = static_cast<index_t>(wanted.data.size());
  report.compare("kept (sorted scores)", wanted, found);
}

/// Ranks of the `n` entries of `order`, by ascending entry.
[[nodiscard]] std::vector<index_t> ranks_by_slot(const std::int64_t* order, index_t n) {
  std::vector<index_t> ranks(static_cast<std::size_t>(n));
  std::iota(ranks.begin(), ranks.end(), index_t{0});
  std::sort(ranks.begin(), ranks.end(), [&](index_t a, index_t b) { return order[a] < order[b]; });
  return ranks;
}

void compare_plane(Report& report, const Case& c, const std::string& array, const IndexArray& order,
                   const PlaneCache<float>& cache, const Plane<float>& plane) {
  if (!c.has(array)) return;
  report.count();
  const FloatArray expected = c.floats(array, {order.dim(0), order.dim(1), plane.dim});
  for (index_t h = 0; h < order.dim(0); ++h) {
    const std::vector<index_t> ranks = ranks_by_slot(order.row(h), order.dim(1));
    for (index_t slot = 0; slot < order.dim(1); ++slot) {
      const index_t rank = ranks[static_cast<std::size_t>(slot)];
      if (order.row(h)[rank] != cache.position(h, slot)) break;  // another set, which compare_kept judges
      if (!same_bits(expected.row(h, rank), plane.row(h, slot), plane.dim))
        return report.fail(
            array, "at " + shown({h, rank}) + ": other bits than the row in slot " + std::to_string(slot) + " of the cache");
    }
  }
}

}  // namespace

CaseCache::CaseCache(index_t heads, index_t key_dim, index_t value_dim, index_t capacity)
    : keys_(static_cast<std::size_t>(heads * std::max<index_t>(capacity, 1) * key_dim)),
      values_(static_cast<std::size_t>(heads * std::max<index_t>(capacity, 1) * value_dim)),
      view_(PlaneCache<float>::make(head_major_plane(keys_.data(), heads, key_dim, capacity),
                                    head_major_plane(values_.data(), heads, value_dim, capacity))
                .or_throw()) {}

CaseCache CaseCache::filled(const FloatArray& k, const FloatArray& v, index_t repeat) {
  CaseCache cache(k.dim(0) * repeat, k.dim(2), v.dim(2), k.dim(1));
  for (index_t t = 0; t < k.dim(1); ++t) {
    for (index_t h = 0; h < k.dim(0) * repeat; ++h) cache.write(h, k.row(h / repeat, t), v.row(h / repeat, t));
    cache.append(t);
  }
  return cache;
}

void CaseCache::write(index_t head, const float* key, const float* value) {
  const index_t slot = view_.num_tokens();
  std::copy_n(key, view_.key_dim(), view_.key_plane().row(head, slot));
  std::copy_n(value, view_.value_dim(), view_.value_plane().row(head, slot));
}

FloatArray values_or_keys(const Case& c, const FloatArray& k) {
  return c.has("v") ? c.floats("v", {k.dim(0), k.dim(1), Case::any}) : k;
}

std::vector<float> columns(std::span<const float> scores, index_t heads, index_t tokens, Range range) {
  std::vector<float> out;
  for (index_t h = 0; h < heads; ++h) {
    const auto row = scores.subspan(static_cast<std::size_t>(h * tokens + range.first), static_cast<std::size_t>(range.size()));
    out.insert(out.end(), row.begin(), row.end());
  }
  return out;
}

std::vector<std::int64_t> kept_slots(const KeepPlan& plan, index_t heads) {
  std::vector<std::int64_t> out;
  for (index_t h = 0; h < heads; ++h) out.insert(out.end(), plan.kept(h).begin(), plan.kept(h).end());
  return out;
}

std::vector<std::int64_t> cached_positions(const PlaneCache<float>& cache) {
  return cached_positions(cache, detail::PublishedOrder{});
}

std::vector<std::int64_t> cached_positions(const PlaneCache<float>& cache, const detail::PublishedOrder& order) {
  std::vector<std::int64_t> out;
  for (index_t h = 0; h < cache.num_kv_heads(); ++h)
    for (index_t rank = 0; rank < cache.num_tokens(); ++rank) out.push_back(cache.position(h, order.slot_at(h, rank)));
  return out;
}

WindowCase::WindowCase(const Case& c)
    : shape(c.shape()),
      tokens(c.integer("L")),
      q(c.floats("q_obs", {shape.query_heads, Case::any, shape.head_dim})),
      k(c.floats("k", {shape.kv_heads, tokens, shape.head_dim})),
      v(values_or_keys(c, k)) {}

void compare_scores(Report& report, const Case& c, const std::string& array, const Scored& scored) {
  if (!c.has(array)) return;
  const index_t heads = static_cast<index_t>(scored.values.size()) / std::max<index_t>(1, scored.range.size());
  report.compare(array, c.floats(array, {heads, scored.range.size()}), scored.values);
}

void compare_kept(Report& report, const Case& c, std::span<const std::int64_t> actual, index_t heads, const Scored& scored) {
  const IndexArray expected = c.integers("kept", {heads, Case::any});
  if (c.exact_indices() || actual.size() != expected.data.size())
    report.compare("kept", expected, actual);
  else
    compare_kept_scores(report, c, expected, actual, scored);
  compare_order_as_set(report, c, expected);
}

void compare_order_as_set(Report& report, const Case& c, const IndexArray& kept) {
  if (c.has("kept_order"))
    report.compare("kept_order (sorted)", kept, sorted_rows(c.integers("kept_order", {kept.dim(0), kept.dim(1)})));
}

void compare_order(Report& report, const std::string& array, const IndexArray& expected, const PlaneCache<float>& cache,
                   const detail::PublishedOrder& order, const KeepPlan& plan) {
  report.count();
  const std::vector<std::int64_t> actual = cached_positions(cache, order);
  if (actual.size() != expected.data.size()) return report.fail(array, "another number of tokens");
  const index_t n = cache.num_tokens();
  for (index_t h = 0; h < cache.num_kv_heads(); ++h) {
    const double tolerance = score_tolerance * max_magnitude(plan.kept_scores(h));
    const auto candidate_score = [&](std::int64_t position) -> std::optional<double> {
      const auto i = static_cast<std::size_t>(detail::slot_at_or_behind(cache, h, position));
      if (i == plan.kept(h).size() || cache.position(h, static_cast<index_t>(i)) != position) return {};
      const slot_t slot = plan.kept(h)[i];
      if (slot < plan.candidates().first || slot >= plan.candidates().last) return {};
      return plan.kept_scores(h)[i];
    };
    for (index_t rank = 0; rank < n; ++rank) {
      const std::int64_t wanted = expected.row(h)[rank];
      const std::int64_t found = actual[static_cast<std::size_t>(h * n + rank)];
      if (wanted == found) continue;
      const std::optional<double> a = candidate_score(wanted);
      const std::optional<double> b = candidate_score(found);
      if (!a || !b || std::fabs(*a - *b) > tolerance)
        return report.fail(array,
                           "at " + shown({h, rank}) + ": expected " + std::to_string(wanted) + ", is " + std::to_string(found));
    }
  }
}

void compare_compacted(Report& report, const Case& c, const PlaneCache<float>& cache) {
  const IndexArray order = c.integers(c.has("kept_order") ? "kept_order" : "kept", {cache.num_kv_heads(), Case::any});
  if (order.dim(1) != cache.num_tokens()) return;  // another number of tokens, which compare_kept judges
  compare_plane(report, c, "k_out", order, cache, cache.key_plane());
  compare_plane(report, c, "v_out", order, cache, cache.value_plane());
}

void compare_rows(Report& report, const PlaneCache<float>& cache, const FloatArray& k, const FloatArray& v, index_t repeat) {
  report.count();
  for (index_t h = 0; h < cache.num_kv_heads(); ++h)
    for (index_t slot = 0; slot < cache.num_tokens(); ++slot) {
      const auto position = static_cast<index_t>(cache.position(h, slot));
      if (!same_bits(cache.key_plane().row(h, slot), k.row(h / repeat, position), k.dim(2)) ||
          !same_bits(cache.value_plane().row(h, slot), v.row(h / repeat, position), v.dim(2)))
        return report.fail("compacted cache",
                           "at " + shown({h, slot}) + ": is not the key or value of position " + std::to_string(position));
    }
}

void compare_part(Report& report, const std::string& name, const FloatArray& expected, std::span<const float> actual,
                  Range range) {
  const FloatArray part{{expected.dim(0), range.size()}, columns(expected.data, expected.dim(0), expected.dim(1), range)};
  report.compare(name, part, columns(actual, expected.dim(0), expected.dim(1), range));
}

Scored with_mark(const Scored& candidates, index_t heads, index_t tokens) {
  const auto n = static_cast<std::size_t>(candidates.range.size());
  const float mark =
      candidates.values.empty() ? 1.0F : *std::max_element(candidates.values.begin(), candidates.values.end()) + 1.0F;
  Scored all{std::vector<float>(static_cast<std::size_t>(heads * tokens), mark), {0, tokens}};
  for (index_t h = 0; h < heads; ++h)
    std::copy_n(candidates.values.begin() + h * candidates.range.size(), n,
                all.values.begin() + h * tokens + candidates.range.first);
  return all;
}

std::optional<std::string> Rounds::begin(position_t position) {
  std::string name = array_ + "_" + std::to_string(round_++);
  if (case_.has(name)) return name;
  report_.fail(name, "is not in the case, but the library evicted after the token at position " + std::to_string(position));
  return {};
}

void Rounds::end() {
  const std::string next = array_ + "_" + std::to_string(round_);
  if (case_.has(next)) report_.fail(next, "is in the case, but the library evicted only " + std::to_string(round_) + " times");
}

}  // namespace beaconkv::conformance
