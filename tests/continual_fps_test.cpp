// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "beaconkv/algorithm/continual_fps.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "support/check.hpp"
#include "support/instruction_sets.hpp"
#include "support/random.hpp"
#include "support/reference.hpp"

namespace {

using namespace beaconkv;
using namespace beaconkv::test;
using Slots = std::vector<slot_t>;
using Positions = std::vector<position_t>;

ContinualFps buffer_of(index_t dim, index_t n_min, index_t n_max) { return ContinualFps::make(dim, n_min, n_max).or_throw(); }

std::vector<float> contents(const ContinualFps& buffer) {
  return {buffer.rows().data, buffer.rows().data + buffer.size() * buffer.dim()};
}

/// A buffer beside its reference. They may part only where rounding decides between two rows; then the reference follows.
struct Pair {
  ContinualFps buffer;
  reference::ContinualSampling expected;
  index_t partings = 0;

  Pair(index_t dim, index_t n_min, index_t n_max)
      : buffer(buffer_of(dim, n_min, n_max)), expected{static_cast<std::size_t>(n_min), static_cast<std::size_t>(n_max)} {}

  void compare() {
    REQUIRE(buffer.size() == static_cast<index_t>(expected.rows.size()));
    if (to_vector(buffer.tags()) != expected.tags) {
      CAPTURE(expected.gap);
      REQUIRE(expected.gap < 2e-6);
      ++partings;
      expected.tags = to_vector(buffer.tags());
      expected.rows = reference::matrix_of(buffer.rows());
    }
    REQUIRE(reference::matrix_of(buffer.rows()) == expected.rows);
  }
};

TEST_CASE("A stream is sampled like the reference samples it") {
  Random random;
  CAPTURE(random.seed());
  struct Size {
    index_t dim;
    index_t n_min;
    index_t n_max;
    index_t pushes;
  };
  const auto size = GENERATE(values<Size>({{8, 4, 8, 3000},
                                           {64, 16, 32, 2000},
                                           {3, 1, 3, 300},
                                           {5, 1, 9, 300},
                                           {7, 5, 6, 500},
                                           {128, 16, 48, 400},
                                           {33, 3, 67, 500}}));
  Pair pair(size.dim, size.n_min, size.n_max);
  Workspace work(pair.buffer.workspace_size());
  std::vector<float> topic = random.normals(size.dim);
  for (index_t i = 0; i < size.pushes; ++i) {
    if (random.integer(0, 19) == 0) topic = random.normals(size.dim);  // directions come and go
    std::vector<float> row = topic;
    for (float& x : row) x += 0.3F * random.normal();
    CAPTURE(size.dim, size.n_min, size.n_max, i);
    REQUIRE(pair.buffer.push(row.data(), i, work).ok());
    pair.expected.push(reference::row_of(row.data(), size.dim), i);
    pair.compare();
    REQUIRE(pair.buffer.size() < size.n_max);
    REQUIRE(std::is_sorted(pair.buffer.tags().begin(), pair.buffer.tags().end()));
    REQUIRE(pair.buffer.size() >= std::min(i + 1, size.n_min));
  }
  CHECK(pair.partings <= size.pushes / 200);
}

TEST_CASE("A prompt, in one piece or in chunks, then a stream: like the reference") {
  Random random;
  CAPTURE(random.seed());
  for (index_t round = 0; round < 60; ++round) {
    const index_t dim = random.integer(1, 40);
    const index_t n_min = random.integer(1, 12);
    const index_t n_max = n_min + random.integer(1, 12);
    Pair pair(dim, n_min, n_max);
    Workspace work(pair.buffer.workspace_size(70));
    position_t tag = random.integer(0, 1000);
    for (index_t call = 0; call < 8; ++call) {
      if (random.coin()) {
        const index_t count = random.integer(0, 70);
        const std::vector<float> rows = random.normals(count * dim);
        CAPTURE(round, call, dim, n_min, n_max, count);
        const auto load = [&](index_t i, float* out) { std::copy_n(rows.data() + i * dim, dim, out); };
        REQUIRE(pair.buffer.prefill(count, load, tag, work).ok());
        pair.expected.prefill(reference::matrix_of({rows.data(), count, dim, dim}), tag);
        tag += count;
        pair.compare();
        REQUIRE(pair.buffer.size() <= n_min);
      } else {
        const index_t count = random.integer(0, 20);
        CAPTURE(round, call, dim, n_min, n_max, count);
        for (index_t i = 0; i < count; ++i, ++tag) {
          const std::vector<float> row = random.normals(dim);
          REQUIRE(pair.buffer.push(row.data(), tag, work).ok());
          pair.expected.push(reference::row_of(row.data(), dim), tag);
          pair.compare();
        }
      }
    }
    REQUIRE(pair.buffer.reduce(work).ok());
    pair.expected.reduce();
    pair.compare();
  }
}

TEST_CASE("Duplicates and ties: the oldest stay, index for index like the reference") {
  Random random;
  CAPTURE(random.seed());
  constexpr index_t dim = 6;
  Pair pair(dim, 4, 8);  // sums of at most 8 exact cosines
  Workspace work(pair.buffer.workspace_size());
  for (index_t i = 0; i < 2000; ++i) {
    std::vector<float> row(dim, 0.0F);
    if (random.integer(0, 9) != 0) row[static_cast<std::size_t>(random.integer(0, dim - 1))] = random.coin() ? 2.0F : -0.5F;
    REQUIRE(pair.buffer.push(row.data(), i, work).ok());
    pair.expected.push(reference::row_of(row.data(), dim), i);
    pair.compare();
  }
  CHECK(pair.partings == 0);
}

TEST_CASE("Rows that are not finite leave the buffer first") {
  ContinualFps buffer = buffer_of(2, 2, 4);
  Workspace work(buffer.workspace_size());
  const std::vector<std::vector<float>> rows{{nan_float(), 1}, {1, 0}, {0, infinity_float()}, {1, 0.1F}};
  for (std::size_t i = 0; i < rows.size(); ++i) REQUIRE(buffer.push(rows[i].data(), static_cast<position_t>(i), work).ok());
  CHECK(to_vector(buffer.tags()) == Positions{1, 3});
}

TEST_CASE("Rows and tags come back as they were given") {
  Random random;
  CAPTURE(random.seed());
  ContinualFps buffer = buffer_of(3, 2, 5);
  CHECK(buffer.size() == 0);
  CHECK(buffer.rows().rows == 0);
  CHECK(buffer.tags().empty());
  CHECK(buffer.dim() == 3);
  CHECK(buffer.n_min() == 2);
  CHECK(buffer.n_max() == 5);
  // Rows with their tags; of those that stay, the cosines and scales, and which they are.
  CHECK(buffer.state_bytes() ==
        5 * (3 * sizeof(float) + sizeof(position_t)) + (2 * 2 + 2) * sizeof(float) + 2 * sizeof(slot_t));
  CHECK(buffer_of(3, 300, 1000).state_bytes() ==
        1000 * (3 * sizeof(float) + sizeof(position_t)) + 300 * sizeof(slot_t));  // never by cosines
  Workspace work(buffer.workspace_size());
  const std::vector<float> row{0.1F, -3e-30F, 7e30F};  // not normalised, whatever the sampling does
  REQUIRE(buffer.push(row.data(), -5, work).ok());
  CHECK(same_bits(contents(buffer), row));
  CHECK(to_vector(buffer.tags()) == Positions{-5});
}

TEST_CASE("would_keep says what reduce does, and does nothing") {
  Random random;
  CAPTURE(random.seed());
  for (index_t round = 0; round < 40; ++round) {
    ContinualFps buffer = buffer_of(6, 5, 14);
    Workspace work(buffer.workspace_size());
    const index_t count = random.integer(0, 13);
    for (index_t i = 0; i < count; ++i) REQUIRE(buffer.push(random.normals(6).data(), 10 * i, work).ok());
    const std::vector<float> before = contents(buffer);
    const Positions tags = to_vector(buffer.tags());
    Slots kept(5, -1);
    const index_t n = buffer.would_keep(kept, work).or_throw();
    CAPTURE(round, count, kept);
    CHECK(same_bits(contents(buffer), before));
    CHECK(to_vector(buffer.tags()) == tags);
    CHECK(n == std::min<index_t>(count, 5));
    REQUIRE(buffer.reduce(work).ok());
    Positions expected;
    for (index_t i = 0; i < n; ++i) expected.push_back(tags[static_cast<std::size_t>(kept[static_cast<std::size_t>(i)])]);
    CHECK(to_vector(buffer.tags()) == expected);
    REQUIRE(buffer.reduce(work).ok());
    CHECK(to_vector(buffer.tags()) == expected);  // a second time nothing happens
  }
}

TEST_CASE("What a buffer knows of its rows is what their numbers say: a buffer that knows nothing keeps the same") {
  Random random;
  CAPTURE(random.seed());
  const InstructionSet before = instruction_set();
  for (const InstructionSet set : {InstructionSet::baseline, InstructionSet::avx2, InstructionSet::avx512}) {
    if (!use_instruction_set(set).ok()) continue;
    for (const auto& [dim, n_min, n_max] :
         {std::array<index_t, 3>{128, 16, 32}, {17, 5, 40}, {5, 3, 9}, {64, 20, 50}, {33, 1, 2}, {9, 7, 8}}) {
      ContinualFps buffer = buffer_of(dim, n_min, n_max);
      Workspace work(buffer.workspace_size(40));
      for (index_t i = 0; i < 150; ++i) {
        std::vector<float> row = random.normals(dim);
        if (random.integer(0, 4) == 0 && buffer.size() > 0) row.assign(buffer.rows().data, buffer.rows().data + dim);
        if (random.integer(0, 9) == 0)
          for (float& x : row) x = std::ldexp(x, random.coin() ? 90 : -90);
        if (random.integer(0, 9) == 0) row[0] = nan_float();
        if (random.integer(0, 9) == 0) std::fill(row.begin(), row.end(), 0.0F);
        if (i % 50 == 33) {
          const auto load = [&](index_t k, float* out) {
            std::copy(row.begin(), row.end(), out);
            out[0] += static_cast<float>(k);
          };
          REQUIRE(buffer.prefill(random.integer(0, 40), load, i, work).ok());
        }
        REQUIRE(buffer.push(row.data(), i, work).ok());
        ContinualFps fresh = buffer_of(dim, n_min, n_max);
        for (index_t k = 0; k < buffer.size(); ++k) REQUIRE(fresh.push(buffer.rows().row(k), k, work).ok());
        Slots kept(static_cast<std::size_t>(n_min), -1);
        Slots kept_by_fresh = kept;
        REQUIRE(buffer.would_keep(kept, work).or_throw() == fresh.would_keep(kept_by_fresh, work).or_throw());
        CAPTURE(name_of(set), dim, n_min, n_max, i);
        REQUIRE(kept == kept_by_fresh);
      }
    }
  }
  REQUIRE(use_instruction_set(before).ok());
}

TEST_CASE("A sampling is remembered until rows come or go, and changes nothing until it is merged") {
  Random random;
  CAPTURE(random.seed());
  index_t from_memory = 0;
  for (const auto& [dim, n_min, most] : {std::array<index_t, 3>{17, 5, 4}, {9, 16, 16}, {5, 3, 100}, {33, 1, 1}}) {
    ContinualFps plain = buffer_of(dim, n_min, n_min + 3);
    ContinualFps sampled = plain;
    Workspace work(plain.merge_workspace_size(2 * n_min + most + 1, most));
    std::vector<std::vector<float>> rows;
    std::vector<const float*> pointers;
    Positions tags;
    for (position_t i = 0; i < 400; ++i) {
      CAPTURE(dim, n_min, most, i);
      rows.push_back(random.normals(dim));
      tags.push_back(i);
      pointers.clear();
      for (const std::vector<float>& row : rows) pointers.push_back(row.data());
      const WaitingRows waiting{pointers, tags};
      const bool samples = random.coin();
      if (samples) {
        Slots expected(static_cast<std::size_t>(n_min), -1);
        expected.resize(static_cast<std::size_t>(plain.would_keep(expected, work, waiting).or_throw()));
        REQUIRE(to_vector(sampled.sample(waiting, work).or_throw()) == expected);
        REQUIRE(to_vector(sampled.sample(waiting, work).or_throw()) == expected);
        REQUIRE(to_vector(sampled.tags()) == to_vector(plain.tags()));
        Slots kept(static_cast<std::size_t>(n_min), -1);
        REQUIRE(sampled.would_keep(kept, work, waiting).or_throw() == static_cast<index_t>(expected.size()));
        kept.resize(expected.size());
        REQUIRE(kept == expected);
      }
      const bool other = random.integer(0, 3) == 0;  // a sampling of fewer rows takes its place
      if (other) REQUIRE(sampled.sample({}, work).ok());
      const index_t what = static_cast<index_t>(rows.size()) >= most ? random.integer(2, 6) : random.integer(0, 6);
      if (what < 2) continue;  // another row waits first
      if (what == 2) {         // other rows are merged instead, as many
        const std::vector<float> others = random.normals(static_cast<index_t>(rows.size()) * dim);
        for (std::size_t r = 0; r < rows.size(); ++r) pointers[r] = others.data() + static_cast<index_t>(r) * dim;
        REQUIRE(plain.merge(waiting, work).ok());
        REQUIRE(sampled.merge(waiting, work).ok());
      } else if (what == 3) {  // a row comes by itself, and as many as before are merged
        const std::vector<float> row = random.normals(dim);
        const WaitingRows rest{std::span(pointers).subspan(1), std::span(tags).subspan(1)};
        REQUIRE(plain.push(row.data(), -1, work).ok());
        REQUIRE(sampled.push(row.data(), -1, work).ok());
        REQUIRE(plain.merge(rest, work).ok());
        REQUIRE(sampled.merge_sampled(rest, work).ok());
      } else {
        ContinualFps fork = sampled;
        REQUIRE(plain.merge(waiting, work).ok());
        Workspace none(samples ? sampled.merge_workspace_size(sampled.size() + waiting.size(), waiting.size())
                               : plain.merge_workspace_size(2 * n_min + most + 1, most));
        Status status;
        REQUIRE(allocations_of([&] { status = sampled.merge_sampled(waiting, none); }) == 0);
        REQUIRE(status.ok());
        if (samples && !other) REQUIRE(none.peak() == 0);  // nothing is sampled a second time
        from_memory += samples && !other ? 1 : 0;
        REQUIRE(fork.merge_sampled(waiting, work).ok());
        REQUIRE(same_bits(contents(fork), contents(plain)));
      }
      REQUIRE(to_vector(sampled.tags()) == to_vector(plain.tags()));
      REQUIRE(same_bits(contents(sampled), contents(plain)));
      rows.clear();
      tags.clear();
    }
  }
  REQUIRE(from_memory > 50);
}

TEST_CASE("would_keep refuses an output that is too small, and writes nothing") {
  ContinualFps buffer = buffer_of(2, 3, 6);
  Workspace work(buffer.workspace_size());
  for (position_t i = 0; i < 5; ++i) {
    const float row[2] = {static_cast<float>(i), 1.0F};
    REQUIRE(buffer.push(row, i, work).ok());
  }
  Slots out(6, -7);
  check_invalid(buffer.would_keep(std::span(out).first(2), work).status(), {"out has room for 2", "3 are needed"});
  CHECK(out == Slots(6, -7));
}

TEST_CASE("[I1] a copy of a buffer is a fork", "[I1]") {
  Random random;
  CAPTURE(random.seed());
  ContinualFps buffer = buffer_of(4, 3, 6);
  Workspace work(buffer.workspace_size());
  for (position_t i = 0; i < 5; ++i) REQUIRE(buffer.push(random.normals(4).data(), i, work).ok());
  const std::vector<float> before = contents(buffer);
  ContinualFps fork = buffer;
  for (position_t i = 5; i < 8; ++i) REQUIRE(fork.push(random.normals(4).data(), i, work).ok());
  CHECK(same_bits(contents(buffer), before));
  CHECK(to_vector(buffer.tags()) == Positions{0, 1, 2, 3, 4});
  CHECK(fork.tags().back() == 7);
  buffer = fork;
  CHECK(same_bits(contents(buffer), contents(fork)));
}

TEST_CASE("Buffers that cannot work are refused by name and value") {
  check_invalid(ContinualFps::make(0, 1, 2).status(), {"dim = 0"});
  check_invalid(ContinualFps::make(4, 0, 2).status(), {"n_min = 0"});
  check_invalid(ContinualFps::make(4, -1, 2).status(), {"n_min = -1"});
  check_invalid(ContinualFps::make(4, 2, 2).status(), {"n_max = 2", "n_min = 2"});
  check_invalid(ContinualFps::make(4, 3, 2).status(), {"n_max = 2", "n_min = 3"});
  CHECK(ContinualFps::make(1, 1, 2).ok());
}

TEST_CASE("a prompt of no rows reduces the buffer, with the scratch that no rows need") {
  Random random;
  CAPTURE(random.seed());
  for (const auto& [dim, n_min, n_max] : {std::array<index_t, 3>{128, 1, 3}, {8, 16, 32}, {5, 3, 600}}) {
    ContinualFps buffer = buffer_of(dim, n_min, n_max);
    Workspace work(buffer.workspace_size(0));
    for (index_t i = 0; i + 1 < n_max; ++i) REQUIRE(buffer.push(random.normals(dim).data(), i, work).ok());
    ContinualFps reduced = buffer;
    REQUIRE(reduced.reduce(work).ok());
    const auto load = [](index_t, float*) { FAIL("there is no row"); };
    REQUIRE(buffer.prefill(0, load, 99, work).ok());
    REQUIRE(to_vector(buffer.tags()) == to_vector(reduced.tags()));
  }
}

TEST_CASE("rows that wait elsewhere are sampled as if they had been pushed, and only those that stay are copied") {
  Random random;
  CAPTURE(random.seed());
  for (const InstructionSet set : supported_sets()) {
    const ForcedSet forced(set);
    for (const auto& [dim, n_min, waiting] :
         {std::array<index_t, 3>{128, 16, 16}, {17, 5, 40}, {5, 28, 4}, {33, 1, 1}, {9, 90, 200}, {3, 6, 5}}) {
      CAPTURE(name_of(set), dim, n_min, waiting);
      ContinualFps pushed = buffer_of(dim, n_min, n_min + waiting);
      ContinualFps merged = buffer_of(dim, n_min, n_min + 1);
      Workspace push_work(pushed.workspace_size());
      Workspace work(merged.merge_workspace_size(n_min + waiting, waiting));
      position_t position = 0;
      for (index_t cycle = 0; cycle < 6; ++cycle) {
        const index_t count = n_min + waiting - pushed.size();
        std::vector<std::vector<float>> rows;
        std::vector<const float*> pointers;
        Positions tags;
        for (index_t i = 0; i < count; ++i) {
          rows.push_back(random.normals(dim));
          if (random.integer(0, 9) == 0) rows.back()[0] = nan_float();
          tags.push_back(position += 3);
        }
        for (const std::vector<float>& row : rows) pointers.push_back(row.data());
        // The first cycle fills the buffer: as many as fit are taken as they are.
        std::size_t taken = 0;
        while (merged.size() < n_min) {
          REQUIRE(merged.merge({std::span(&pointers[taken], 1), std::span(&tags[taken], 1)}, work).ok());
          ++taken;
        }
        const WaitingRows rest{std::span(pointers).subspan(taken), std::span(tags).subspan(taken)};
        for (index_t i = 0; i + 1 < count; ++i)
          REQUIRE(pushed.push(rows[static_cast<std::size_t>(i)].data(), tags[static_cast<std::size_t>(i)], push_work).ok());
        const Positions before = to_vector(merged.tags());
        Slots kept(static_cast<std::size_t>(n_min), -1);
        REQUIRE(merged.would_keep(kept, work, rest, pointers).or_throw() == n_min);
        REQUIRE(to_vector(merged.tags()) == before);
        Status status;
        REQUIRE(allocations_of([&] { status = merged.merge(rest, work, pointers); }) == 0);
        REQUIRE(status.ok());
        REQUIRE(pushed.push(rows.back().data(), tags.back(), push_work).ok());
        REQUIRE(to_vector(merged.tags()) == to_vector(pushed.tags()));
        REQUIRE(same_bits(contents(merged), contents(pushed)));
        Positions all = before;
        all.insert(all.end(), rest.tags.begin(), rest.tags.end());
        Positions shown;
        for (const slot_t slot : kept) shown.push_back(all[static_cast<std::size_t>(slot)]);
        REQUIRE(shown == to_vector(merged.tags()));
      }
    }
  }
  ContinualFps buffer = buffer_of(2, 1, 2);
  Workspace work(buffer.merge_workspace_size(2, 1));
  const float row[2] = {1, 2};
  const float* const pointer = row;
  check_invalid(buffer.merge({std::span(&pointer, 1), {}}, work), {"1 rows", "0 tags"});
  CHECK(buffer.size() == 0);
}

TEST_CASE("[K4] every call uses the workspace that was asked for and allocates nothing", "[K4]") {
  Random random;
  CAPTURE(random.seed());
  const index_t dim = GENERATE(1, 64, 256);
  const index_t n_min = GENERATE(1, 16);
  ContinualFps buffer = buffer_of(dim, n_min, n_min + 16);
  Workspace fill_work(buffer.workspace_size());
  const std::vector<float> rows = random.normals(70 * dim);
  const auto load = [&](index_t i, float* out) { std::copy_n(rows.data() + i * dim, dim, out); };
  for (index_t i = 0; i < n_min + 15; ++i) REQUIRE(buffer.push(rows.data() + i * dim, i, fill_work).ok());
  CHECK(fill_work.peak() == 0);

  // Each call on a copy of a buffer that is full but for one row.
  const std::vector<float> before = contents(buffer);
  ContinualFps copy = buffer;
  const auto restore = [&] { copy = buffer; };
  const auto unchanged = [&] {
    return same_bits(contents(copy), before) && to_vector(copy.tags()) == to_vector(buffer.tags());
  };
  check_workspace(
      buffer.workspace_size(), [&](Workspace& work) { return copy.push(rows.data(), 99, work); }, restore);
  CHECK(unchanged());

  // The size query does not know how full the buffer will be; this one lacks a row.
  const std::int64_t missing = 1;
  Workspace exact(buffer.workspace_size(70));
  Status status;
  CHECK(allocations_of([&] { status = copy.prefill(70, load, 99, exact); }) == 0);
  CHECK(status.ok());
  CHECK(exact.peak() == buffer.workspace_size(70 - missing).bytes);
  restore();
  Workspace less({buffer.workspace_size(70).bytes - 1, 0, 0});
  check_error(copy.prefill(70, load, 99, less), StatusCode::workspace_too_small, {"workspace"});
  check_invalid(copy.prefill(-1, load, 99, exact), {"count = -1"});
  CHECK(unchanged());

  Workspace none(WorkspaceSize{});
  check_error(copy.reduce(none), StatusCode::workspace_too_small, {"workspace"});
  Slots out(16, -7);
  check_error(copy.would_keep(out, none).status(), StatusCode::workspace_too_small, {"workspace"});
  CHECK(out == Slots(16, -7));
  CHECK(unchanged());
  Workspace reduce_work(buffer.workspace_size());
  index_t kept = 0;
  CHECK(allocations_of([&] {
          kept = *copy.would_keep(out, reduce_work);
          status = copy.reduce(reduce_work);
        }) == 0);
  CHECK(status.ok());
  CHECK(kept == n_min);
  CHECK(copy.size() == n_min);
  CHECK(reduce_work.peak() <= buffer.workspace_size().bytes);
}

TEST_CASE("A push that does not fill the buffer, and a reduction of nothing, need no workspace") {
  ContinualFps buffer = buffer_of(2, 1, 3);
  Workspace none(WorkspaceSize{});
  const float row[2] = {1, 2};
  CHECK(buffer.reduce(none).ok());
  CHECK(buffer.push(row, 0, none).ok());
  CHECK(buffer.reduce(none).ok());  // as many as it may keep
  CHECK(buffer.push(row, 1, none).ok());
  check_error(buffer.push(row, 2, none), StatusCode::workspace_too_small, {"workspace"});
  CHECK(to_vector(buffer.tags()) == Positions{0, 1});
}

}  // namespace
