// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "support/counting_allocator.hpp"

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdlib>

// Constant-initialised: the first allocations come before any constructor runs.
static constinit std::atomic<std::int64_t> allocations{0};

namespace beaconkv::test {

AllocationCounter::AllocationCounter() noexcept : before_(allocations.load()) {}
std::int64_t AllocationCounter::count() const noexcept { return allocations.load() - before_; }

}  // namespace beaconkv::test

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define BEACONKV_TEST_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define BEACONKV_TEST_SANITIZER 1
#endif
#endif

#if defined(BEACONKV_TEST_SANITIZER)

// Sanitizers bring a malloc of their own, which tells.
extern "C" int __sanitizer_install_malloc_and_free_hooks(void (*on_malloc)(const volatile void*, std::size_t),
                                                         void (*on_free)(const volatile void*));

static const int installed = __sanitizer_install_malloc_and_free_hooks(
    [](const volatile void*, std::size_t) { allocations.fetch_add(1, std::memory_order_relaxed); },
    [](const volatile void*) {});

#elif defined(__GLIBC__)

// A program's own malloc goes before the C library's, for `operator new` too. `free` stays the C library's.
extern "C" {
void* __libc_malloc(std::size_t size);
void* __libc_calloc(std::size_t count, std::size_t size);
void* __libc_realloc(void* old, std::size_t size);
void* __libc_memalign(std::size_t alignment, std::size_t size);

void* malloc(std::size_t size) noexcept {
  allocations.fetch_add(1, std::memory_order_relaxed);
  return __libc_malloc(size);
}
void* calloc(std::size_t count, std::size_t size) noexcept {
  allocations.fetch_add(1, std::memory_order_relaxed);
  return __libc_calloc(count, size);
}
void* realloc(void* old, std::size_t size) noexcept {
  allocations.fetch_add(1, std::memory_order_relaxed);
  return __libc_realloc(old, size);
}
void* memalign(std::size_t alignment, std::size_t size) noexcept {
  allocations.fetch_add(1, std::memory_order_relaxed);
  return __libc_memalign(alignment, size);
}
void* aligned_alloc(std::size_t alignment, std::size_t size) noexcept { return memalign(alignment, size); }
int posix_memalign(void** out, std::size_t alignment, std::size_t size) noexcept {
  void* const memory = memalign(alignment, size);
  if (memory == nullptr) return ENOMEM;
  *out = memory;
  return 0;
}
}

#else
#error "counting_allocator.cpp knows glibc and the sanitizers' runtimes: tell it how this C library allocates"
#endif
