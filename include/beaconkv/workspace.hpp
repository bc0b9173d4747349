// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Scratch memory that the caller owns, sized once by a query, so that nothing allocates afterwards.

#include <algorithm>
#include <cstring>
#include <span>
#include <type_traits>
#include <vector>

#include "beaconkv/keep_plan.hpp"

namespace beaconkv::inline v0 {

/// What a `workspace_size` query answers: bytes of scratch and the room for a plan (used by `evict`).
struct WorkspaceSize {
  std::size_t bytes = 0;
  index_t plan_sets = 0;
  index_t plan_tokens = 0;

  [[nodiscard]] bool operator==(const WorkspaceSize&) const noexcept = default;
  /// Enough for either of two uses, one after the other: several policies may share one workspace.
  [[nodiscard]] friend WorkspaceSize max(const WorkspaceSize& a, const WorkspaceSize& b) noexcept {
    return {std::max(a.bytes, b.bytes), std::max(a.plan_sets, b.plan_sets), std::max(a.plan_tokens, b.plan_tokens)};
  }
};

/// A stack of scratch memory. One thread uses a workspace at a time.
///
/// Functions that need scratch say how much by a `..._workspace_size` function, which runs the same carving code on a
/// workspace in counting mode, so that the answer cannot drift from the use.
class Workspace {
 public:
  static constexpr std::size_t alignment = 64;

  /// Allocates once.
  explicit Workspace(const WorkspaceSize& size) : memory_(size.bytes + alignment), size_(size) {
    plan_.reserve(size.plan_sets, size.plan_tokens);
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.data());
    base_ = memory_.data() + (alignment - address % alignment) % alignment;
    capacity_ = size.bytes;
  }
  /// A copy is a workspace of its own of the same size; contents are scratch and not copied, the plan is.
  Workspace(const Workspace& other) : Workspace(other.size_) { plan_ = other.plan_; }
  /// Allocates unless both have the same size.
  Workspace& operator=(const Workspace& other) {
    if (memory_.empty() || !(size_ == other.size_)) return *this = Workspace(other);
    plan_ = other.plan_;
    return *this;
  }
  Workspace(Workspace&&) noexcept = default;
  Workspace& operator=(Workspace&&) noexcept = default;

  /// Counts instead of giving out memory: `take` returns null spans of the right size; read `peak()` afterwards.
  [[nodiscard]] static Workspace counting() { return Workspace(); }

  /// `count` uninitialised values of `T`. Precondition: they fit (see `require`).
  template <class T>
  [[nodiscard]] std::span<T> take(index_t count) {
    static_assert(std::is_trivially_copyable_v<T> && alignof(T) <= alignment);
    BEACONKV_ASSERT(count >= 0);
    const std::size_t n = static_cast<std::size_t>(count);
    std::byte* const at = base_ == nullptr ? nullptr : base_ + used_;
    used_ += (n * sizeof(T) + alignment - 1) / alignment * alignment;
    peak_ = std::max(peak_, used_);
    BEACONKV_ASSERT(base_ == nullptr || used_ <= capacity_);
    return std::span<T>(reinterpret_cast<T*>(at), n);
  }

  /// Gives back what was taken since it was made.
  class Frame {
   public:
    explicit Frame(Workspace& work) noexcept : work_(&work), used_(work.used_) {}
    ~Frame() { work_->used_ = used_; }
    Frame(const Frame&) = delete;
    Frame& operator=(const Frame&) = delete;

   private:
    Workspace* work_;
    std::size_t used_;
  };

  /// An error unless `size` more bytes are free.
  [[nodiscard]] Status require(const WorkspaceSize& size) const {
    const std::size_t free = capacity_ - std::min(used_, capacity_);
    if (size.bytes <= free) return {};
    return detail::error(StatusCode::workspace_too_small, "workspace has ", free, " free bytes: ", size.bytes, " are needed");
  }

  [[nodiscard]] std::size_t capacity() const noexcept { return capacity_; }
  /// The most that was in use at once.
  [[nodiscard]] std::size_t peak() const noexcept { return peak_; }
  /// The plan that `evict` fills and applies; it shows what the last `evict` did.
  [[nodiscard]] KeepPlan& plan() noexcept { return plan_; }
  [[nodiscard]] const KeepPlan& plan() const noexcept { return plan_; }

 private:
  Workspace() = default;

  std::vector<std::byte> memory_;
  WorkspaceSize size_;  // asked for
  std::byte* base_ = nullptr;
  std::size_t capacity_ = 0;
  std::size_t used_ = 0;
  std::size_t peak_ = 0;
  KeepPlan plan_;
};

namespace detail {

/// The scratch that `carve(workspace)` takes.
template <class Carve>
[[nodiscard]] WorkspaceSize measure(Carve&& carve) {
  Workspace counter = Workspace::counting();
  carve(counter);
  return {counter.peak(), 0, 0};
}

}  // namespace detail
}  // namespace beaconkv::inline v0
