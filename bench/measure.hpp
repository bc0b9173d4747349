// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Times of several things, taken in turn, so that a machine that drifts drifts for all of them.

#include <time.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <type_traits>

namespace beaconkv::bench {

/// How long to measure: at least `rounds`, and as many more as fit into `seconds`.
struct Pace {
  double seconds = 4;
  int rounds = 3;
};

[[nodiscard]] inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Seconds that this thread worked since it was made: those of the clock, or of the processor where another program had it in
/// between. All contestants run in one thread.
class Stopwatch {
 public:
  [[nodiscard]] double seconds() const {
    const double by_clock = now() - clock_;
    const double by_processor = worked() - worked_;
    // On virtual machines the processor's count stands still at times, and a contestant would seem to take no time.
    return by_processor < by_clock / 8 ? by_clock : std::min(by_clock, by_processor);
  }

 private:
  [[nodiscard]] static double worked() {
    timespec t{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
  }

  double worked_ = worked();  // first, since asking takes as long as a short contestant
  double clock_ = now();
};

/// Makes the compiler believe that `x` is looked at, so that what led to it stays.
template <class T>
inline void keep(const T& x) noexcept {
  asm volatile("" : : "g"(&x) : "memory");
}

/// The seconds that `f()` takes, or says that it took: one that prepares something before it starts its own clock.
template <class F>
[[nodiscard]] double seconds_of(F&& f) {
  if constexpr (std::is_same_v<std::invoke_result_t<F&>, double>) {
    return f();
  } else {
    const Stopwatch watch;
    f();
    return watch.seconds();
  }
}

/// The least seconds of each contestant, which run A B C A B C ... The least, since everything that disturbs a measurement
/// makes it longer.
template <class... F>
[[nodiscard]] std::array<double, sizeof...(F)> fastest(const Pace& pace, F&&... contestants) {
  std::array<double, sizeof...(F)> best;
  best.fill(1e300);
  const double end = now() + pace.seconds;
  for (int round = 0; round < pace.rounds || now() < end; ++round) {
    std::size_t i = 0;
    ((best[i] = std::min(best[i], seconds_of(contestants)), ++i), ...);
  }
  return best;
}

}  // namespace beaconkv::bench
