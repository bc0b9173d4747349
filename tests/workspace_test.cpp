// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "beaconkv/workspace.hpp"

#include <cstdlib>
#include <memory>
#include <utility>

#include "beaconkv/algorithm/attention.hpp"
#include "beaconkv/algorithm/continual_fps.hpp"
#include "beaconkv/algorithm/key_redundancy.hpp"
#include "beaconkv/algorithm/top_k.hpp"
#include "support/check.hpp"

namespace {

using namespace beaconkv;
using namespace beaconkv::test;

/// Keeps the compiler from removing an allocation that nobody uses.
void use(const volatile void* memory) {
  static const volatile void* volatile last = nullptr;
  last = memory;
  static_cast<void>(last);
}

template <class T>
bool aligned(std::span<T> taken) {
  return reinterpret_cast<std::uintptr_t>(taken.data()) % Workspace::alignment == 0;
}

TEST_CASE("The allocation counter of the tests sees every kind of allocation") {
  CHECK(allocations_of([] {}) == 0);
  CHECK(allocations_of([] { use(std::make_unique<int>(1).get()); }) == 1);
  CHECK(allocations_of([] {
          void* const memory = std::malloc(100);
          use(memory);
          std::free(memory);
        }) == 1);
  CHECK(allocations_of([] {
          void* memory = std::calloc(3, 100);
          use(memory);
          memory = std::realloc(memory, 100000);
          use(memory);
          std::free(memory);
        }) >= 2);
  CHECK(allocations_of([] {
          void* const memory = std::aligned_alloc(64, 128);
          use(memory);
          std::free(memory);
        }) == 1);
  CHECK(allocations_of([] {
          struct alignas(128) Wide {
            char bytes[128];
          };
          use(std::make_unique<Wide>().get());
        }) == 1);
  int failed = 0;
  CHECK(allocations_of([&] {
          void* memory = nullptr;
          failed = posix_memalign(&memory, 64, 128);
          use(memory);
          std::free(memory);
        }) == 1);
  CHECK(failed == 0);
}

TEST_CASE("A workspace gives out aligned pieces that do not overlap, and counts them") {
  Workspace work(WorkspaceSize{1024, 0, 0});
  CHECK(work.capacity() == 1024);
  CHECK(work.peak() == 0);
  const std::span<float> a = work.take<float>(3);
  const std::span<std::uint8_t> b = work.take<std::uint8_t>(65);
  const std::span<double> c = work.take<double>(8);
  CHECK(a.size() == 3);
  CHECK(b.size() == 65);
  CHECK(aligned(a));
  CHECK(aligned(b));
  CHECK(aligned(c));
  CHECK(reinterpret_cast<std::byte*>(b.data()) - reinterpret_cast<std::byte*>(a.data()) == 64);
  CHECK(reinterpret_cast<std::byte*>(c.data()) - reinterpret_cast<std::byte*>(b.data()) == 128);
  CHECK(work.peak() == 64 + 128 + 64);
  CHECK(work.require({1024 - 256, 0, 0}).ok());
  check_error(work.require({1024 - 255, 0, 0}), StatusCode::workspace_too_small, {"768", "769"});
}

TEST_CASE("Nothing is used by an empty piece") {
  Workspace work(WorkspaceSize{0, 0, 0});
  CHECK(work.take<double>(0).empty());
  CHECK(work.peak() == 0);
  CHECK(work.require({0, 0, 0}).ok());
  check_error(work.require({1, 0, 0}), StatusCode::workspace_too_small, {"0 free bytes", "1 are needed"});
}

TEST_CASE("A frame gives back what was taken since, the peak stays") {
  Workspace work(WorkspaceSize{512, 0, 0});
  const std::span<float> kept = work.take<float>(16);
  float* inner = nullptr;
  {
    const Workspace::Frame frame(work);
    inner = work.take<float>(16).data();
    {
      const Workspace::Frame nested(work);
      CHECK(work.take<float>(32).size() == 32);
      CHECK(work.peak() == 256);
    }
    CHECK(work.require({512 - 128, 0, 0}).ok());
    CHECK_FALSE(work.require({512 - 127, 0, 0}).ok());
  }
  CHECK(work.require({512 - 64, 0, 0}).ok());
  CHECK_FALSE(work.require({512 - 63, 0, 0}).ok());
  CHECK(work.peak() == 256);
  CHECK(work.take<float>(16).data() == inner);
  CHECK(inner == kept.data() + 16);
}

TEST_CASE("A counting workspace measures what a carving takes") {
  const auto carve = [](Workspace& work) {
    static_cast<void>(work.take<float>(5));
    {
      const Workspace::Frame frame(work);
      static_cast<void>(work.take<double>(100));
    }
    static_cast<void>(work.take<std::uint8_t>(1));
  };
  CHECK(detail::measure(carve).bytes == 64 + 832);
  Workspace work(detail::measure(carve));
  carve(work);
  CHECK(work.peak() == work.capacity());
  CHECK(Workspace::counting().capacity() == 0);
}

TEST_CASE("The larger of two workspace sizes has room for either") {
  const WorkspaceSize larger = max(WorkspaceSize{10, 1, 300}, WorkspaceSize{7, 4, 200});
  CHECK(larger.bytes == 10);
  CHECK(larger.plan_sets == 4);
  CHECK(larger.plan_tokens == 300);
  CHECK(max(WorkspaceSize{7, 4, 200}, WorkspaceSize{10, 1, 300}).plan_tokens == 300);
}

TEST_CASE("A workspace has room for the plan that it was sized for") {
  Workspace work(WorkspaceSize{0, 3, 50});
  CHECK(allocations_of([&] {
          for (int round = 0; round < 3; ++round) {
            work.plan().start(1, 50, {0, 50});
            for (int set = 0; set < 3; ++set) static_cast<void>(work.plan().add_set(50, 50));
          }
        }) == 0);
  CHECK(work.plan().sets() == 3);
}

TEST_CASE("A copy of a workspace has memory of its own, a moved one keeps its memory") {
  Workspace work(WorkspaceSize{256, 1, 8});
  float* const memory = work.take<float>(64).data();
  memory[0] = 5;
  work.plan().start(9, 8, {0, 8});
  static_cast<void>(work.plan().add_set(2, 2));

  Workspace copy(work);
  CHECK(copy.capacity() == 256);
  CHECK(copy.peak() == 0);
  CHECK(copy.plan().epoch() == 9);
  CHECK(copy.plan().num_kept(0) == 2);
  const std::span<float> of_copy = copy.take<float>(64);
  CHECK(aligned(of_copy));
  CHECK(of_copy.data() != memory);
  of_copy[0] = 6;
  CHECK(memory[0] == 5);

  Workspace moved(std::move(work));
  CHECK(moved.capacity() == 256);
  CHECK_FALSE(moved.require({1, 0, 0}).ok());  // what was taken is still taken
  CHECK(memory[0] == 5);
  CHECK(moved.plan().epoch() == 9);

  Workspace assigned(WorkspaceSize{64, 0, 0});
  assigned = moved;
  CHECK(assigned.capacity() == 256);
  CHECK(assigned.require({256, 0, 0}).ok());
  CHECK(assigned.take<float>(64).data() != memory);
}

}  // namespace

TEST_CASE("a copy of a workspace has its own room for a plan, and equal ones are assigned without allocating", "[allocation]") {
  const WorkspaceSize size{1000, 2, 50};
  const Workspace made(size);
  Workspace copy = made;
  const auto fill = [](Workspace& work) {
    work.plan().start(1, 50, {0, 50});
    for (index_t set = 0; set < 2; ++set) static_cast<void>(work.plan().add_set(50, 50));
  };
  CHECK(allocations_of([&] { fill(copy); }) == 0);
  Workspace other(size);
  CHECK(allocations_of([&] { other = copy; }) == 0);
  CHECK(other.plan().num_kept(1) == 50);
  Workspace smaller(WorkspaceSize{10, 1, 5});
  smaller = copy;
  CHECK(smaller.capacity() == 1000);
  CHECK(allocations_of([&] { fill(smaller); }) == 0);

  Workspace taken = std::move(other);
  other = copy;  // from which its memory was moved: memory of its own again
  CHECK(other.take<float>(16).data() != taken.take<float>(16).data());
}

TEST_CASE("A workspace for many serves for fewer: no algorithm needs less for more") {
  for (index_t n = 0; n < 3000; ++n) {
    CAPTURE(n);
    REQUIRE(top_k_workspace_size(n).bytes <= top_k_workspace_size(n + 1).bytes);
    REQUIRE(fps_workspace_size(n, 48).bytes <= fps_workspace_size(n + 1, 48).bytes);
    REQUIRE(key_redundancy_workspace_size(n, 48).bytes <= key_redundancy_workspace_size(n + 1, 48).bytes);
    REQUIRE(attention_workspace_size(3, 7, 48, n).bytes <= attention_workspace_size(3, 7, 48, n + 1).bytes);
  }
  for (index_t n = 1; n < 200; ++n) {
    CAPTURE(n);
    REQUIRE(attention_workspace_size(3, n, 48, 100).bytes <= attention_workspace_size(3, n + 1, 48, 100).bytes);
    REQUIRE(attention_workspace_size(n, 7, 48, 100).bytes <= attention_workspace_size(n + 1, 7, 48, 100).bytes);
    REQUIRE(fps_workspace_size(100, n).bytes <= fps_workspace_size(100, n + 1).bytes);
  }
  for (const index_t n_max : {3, 8, 32, 33, 100, 257}) {
    const ContinualFps buffer = ContinualFps::make(16, n_max / 2, n_max).or_throw();
    for (index_t prompt = 0; prompt < 300; ++prompt) {
      CAPTURE(n_max, prompt);
      REQUIRE(buffer.workspace_size(prompt).bytes <= buffer.workspace_size(prompt + 1).bytes);
    }
  }
}
