// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// What kernels are written with: compiler vectors, the registers of each instruction set, and `run`, which picks one.
///
/// A kernel is a struct with `template <class Isa> BEACONKV_KERNEL void run(arguments)`. It is written once, in vectors of
/// `Isa::width` floats, and compiled for each set through the `target` attribute of the function that it is inlined into.
/// Vectors never cross a function boundary by value: their calling convention depends on the instruction set.
///
/// Same bits for every width: whatever is summed across lanes is summed over `Lanes`, sixteen floats in as many registers as it
/// takes.

#include <cstdint>

#include "beaconkv/kernel/instruction_set.hpp"
#include "beaconkv/types.hpp"

#define BEACONKV_KERNEL [[gnu::always_inline]] static inline

#if defined(__clang__)
#define BEACONKV_UNROLL _Pragma("clang loop unroll(full)")
#else
#define BEACONKV_UNROLL _Pragma("GCC unroll 32")
#endif

#ifdef BEACONKV_DETAIL_X86
#define BEACONKV_DETAIL_AVX2 gnu::target("avx2,fma")
#if defined(__clang__)
#define BEACONKV_DETAIL_AVX512 \
  gnu::target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"), clang::min_vector_width(512)  // or vectors are halved
#else
#define BEACONKV_DETAIL_AVX512 gnu::target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512")
#endif
#endif

namespace beaconkv::inline v0::detail {

typedef float Float2 __attribute__((vector_size(8)));
typedef float Float4 __attribute__((vector_size(16)));
typedef float Float8 __attribute__((vector_size(32)));
typedef float Float16 __attribute__((vector_size(64)));
typedef std::int32_t Int2 __attribute__((vector_size(8)));
typedef std::int32_t Int4 __attribute__((vector_size(16)));
typedef std::int32_t Int8 __attribute__((vector_size(32)));
typedef std::int32_t Int16 __attribute__((vector_size(64)));
typedef double Double2 __attribute__((vector_size(16)));
typedef double Double4 __attribute__((vector_size(32)));
typedef double Double8 __attribute__((vector_size(64)));

/// Four floats a register; sixteen registers on x86-64. `NarrowFloats` and `NarrowInts` are as many as `Doubles`.
struct Baseline {
  using Floats = Float4;
  using Ints = Int4;
  using Doubles = Double2;
  using NarrowFloats = Float2;
  using NarrowInts = Int2;
  static constexpr index_t width = 4;
};
struct Avx2 {
  using Floats = Float8;
  using Ints = Int8;
  using Doubles = Double4;
  using NarrowFloats = Float4;
  using NarrowInts = Int4;
  static constexpr index_t width = 8;
};
struct Avx512 {
  using Floats = Float16;
  using Ints = Int16;
  using Doubles = Double8;
  using NarrowFloats = Float8;
  using NarrowInts = Int8;
  static constexpr index_t width = 16;
};

/// The number of floats that kernels treat as one, on every instruction set.
inline constexpr index_t lanes = 16;
/// The same for doubles.
inline constexpr index_t double_lanes = 8;

/// The least multiple of `unit` that is not below `n`.
[[nodiscard]] constexpr index_t round_up(index_t n, index_t unit) noexcept { return (n + unit - 1) / unit * unit; }

/// Reads and writes a vector at any address.
template <class V, class T>
BEACONKV_KERNEL void load(V& v, const T* from) noexcept {
  __builtin_memcpy(&v, from, sizeof(V));
}
template <class V, class T>
BEACONKV_KERNEL void store(T* to, const V& v) noexcept {
  __builtin_memcpy(static_cast<void*>(to), &v, sizeof(V));
}
/// Stays in its register: g++ would read it from memory again for each of its uses.
template <class V>
BEACONKV_KERNEL void read_once([[maybe_unused]] V& v) noexcept {
#if defined(BEACONKV_DETAIL_X86) && !defined(__clang__)
  asm("" : "+v"(v));
#endif
}
/// The same bits as another vector type of the same size.
template <class To, class From>
BEACONKV_KERNEL void bits_of(To& to, const From& from) noexcept {
  static_assert(sizeof(To) == sizeof(From));
  __builtin_memcpy(&to, &from, sizeof(To));
}

/// All ones in each lane where `x` is negative, else zeros. Masks are made by arithmetic: g++ 12 takes comparisons of vectors
/// apart where the function's target has other registers than the program's.
template <class I>
BEACONKV_KERNEL void mask_negative(I& mask, const I& x) noexcept {
  mask = x >> 31;
}
/// All ones in each lane where `x` is not 0, else zeros.
template <class I>
BEACONKV_KERNEL void mask_not_zero(I& mask, const I& x) noexcept {
  mask = (x | -(x & INT32_MAX)) >> 31;
}
/// `out[i] = mask[i] ? a[i] : b[i]`.
template <class V, class M>
BEACONKV_KERNEL void select(V& out, const M& mask, const V& a, const V& b) noexcept {
  M x, y;
  bits_of(x, a);
  bits_of(y, b);
  const M chosen = (x & mask) | (y & ~mask);
  bits_of(out, chosen);
}

/// `a = max(a, b)` where neither is NaN.
template <class V>
BEACONKV_KERNEL void raise_to(V& a, const V& b) noexcept {
  a = a > b ? a : b;
}

/// Sixteen floats.
template <class Isa>
struct Lanes {
  static constexpr index_t count = lanes / Isa::width;
  typename Isa::Floats part[static_cast<std::size_t>(count)];

  BEACONKV_KERNEL void fill(Lanes& x, float value) noexcept {
    const typename Isa::Floats all = typename Isa::Floats{} + value;
    BEACONKV_UNROLL for (index_t i = 0; i < count; ++i) x.part[i] = all;
  }
  BEACONKV_KERNEL void read(Lanes& x, const float* from) noexcept {
    BEACONKV_UNROLL for (index_t i = 0; i < count; ++i) load(x.part[i], from + i * Isa::width);
  }
  BEACONKV_KERNEL void write(float* to, const Lanes& x) noexcept {
    BEACONKV_UNROLL for (index_t i = 0; i < count; ++i) store(to + i * Isa::width, x.part[i]);
  }
  BEACONKV_KERNEL void read_once(Lanes& x) noexcept {
    BEACONKV_UNROLL for (index_t i = 0; i < count; ++i) detail::read_once(x.part[i]);
  }
};

/// `sum[l] = ` the sum of the numbers `l`, `l + 4`, `l + 8`, ... of a register.
template <class Four, class V>
BEACONKV_KERNEL void sum_to_four(Four& sum, const V& x) noexcept {
  if constexpr (sizeof(V) == sizeof(Four)) {
    sum = x;
  } else if constexpr (sizeof(V) == 2 * sizeof(Four)) {
    sum = __builtin_shufflevector(x, x, 0, 1, 2, 3) + __builtin_shufflevector(x, x, 4, 5, 6, 7);
  } else {
    const auto half =
        __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) + __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
    sum_to_four(sum, half);
  }
}
/// The same of sixteen lanes, by the same additions on every instruction set.
template <class Isa>
BEACONKV_KERNEL void sum_to_four(Float4& sum, const Lanes<Isa>& x) noexcept {
  if constexpr (Isa::width == 4) {
    sum = (x.part[0] + x.part[2]) + (x.part[1] + x.part[3]);
  } else if constexpr (Isa::width == 8) {
    const Float8 half = x.part[0] + x.part[1];
    sum_to_four(sum, half);
  } else {
    sum_to_four(sum, x.part[0]);
  }
}

/// Eight doubles: what eight floats become where a float is not enough.
template <class Isa>
struct DoubleLanes {
  static constexpr index_t width = Isa::width / 2;
  static constexpr index_t count = double_lanes / width;
  typename Isa::Doubles part[static_cast<std::size_t>(count)];

  BEACONKV_KERNEL void clear(DoubleLanes& x) noexcept {
    BEACONKV_UNROLL for (index_t i = 0; i < count; ++i) x.part[i] = typename Isa::Doubles{};
  }
  BEACONKV_KERNEL void read(DoubleLanes& x, const double* from) noexcept {
    BEACONKV_UNROLL for (index_t i = 0; i < count; ++i) load(x.part[i], from + i * width);
  }
  BEACONKV_KERNEL void read(DoubleLanes& x, const float* from) noexcept {
#ifndef __clang__
    if constexpr (count == 2) {  // g++ 12 knows no way from floats to as many doubles but by halves of a register
      Float8 some;
      load(some, from);
      const Double8 all = __builtin_convertvector(some, Double8);
      x.part[0] = __builtin_shufflevector(all, all, 0, 1, 2, 3);
      x.part[1] = __builtin_shufflevector(all, all, 4, 5, 6, 7);
      return;
    }
#endif
    BEACONKV_UNROLL for (index_t i = 0; i < count; ++i) {
      typename Isa::NarrowFloats some;
      load(some, from + i * width);
      x.part[i] = __builtin_convertvector(some, typename Isa::Doubles);
    }
  }
  BEACONKV_KERNEL void write(double* to, const DoubleLanes& x) noexcept {
    BEACONKV_UNROLL for (index_t i = 0; i < count; ++i) store(to + i * width, x.part[i]);
  }
  BEACONKV_KERNEL void write(float* to, const DoubleLanes& x) noexcept {
    typename Isa::NarrowFloats some[static_cast<std::size_t>(count)];
    BEACONKV_UNROLL for (index_t i = 0; i < count; ++i) some[i] =
        __builtin_convertvector(x.part[i], typename Isa::NarrowFloats);
    if constexpr (count == 4) {
      store(to, __builtin_shufflevector(some[0], some[1], 0, 1, 2, 3));
      store(to + 4, __builtin_shufflevector(some[2], some[3], 0, 1, 2, 3));
    } else if constexpr (count == 2) {  // as they will be read: a register that was stored in halves has to wait for the cache
      store(to, __builtin_shufflevector(some[0], some[1], 0, 1, 2, 3, 4, 5, 6, 7));
    } else {
      store(to, some[0]);
    }
  }
  /// `x += a * b`.
  BEACONKV_KERNEL void add_product(DoubleLanes& x, const DoubleLanes& a, const DoubleLanes& b) noexcept {
    BEACONKV_UNROLL for (index_t i = 0; i < count; ++i) x.part[i] += a.part[i] * b.part[i];
  }
  BEACONKV_KERNEL void add(DoubleLanes& x, const DoubleLanes& a) noexcept {
    BEACONKV_UNROLL for (index_t i = 0; i < count; ++i) x.part[i] += a.part[i];
  }
  BEACONKV_KERNEL void scale(DoubleLanes& x, double factor) noexcept {
    BEACONKV_UNROLL for (index_t i = 0; i < count; ++i) x.part[i] *= factor;
  }
  /// The sum across lanes, by the same additions on every instruction set.
  BEACONKV_KERNEL double sum(const DoubleLanes& x) noexcept {
    Double2 a, b;
    if constexpr (count == 4) {
      a = x.part[0] + x.part[2];
      b = x.part[1] + x.part[3];
    } else {
      Double4 half;
      if constexpr (count == 2) {
        half = x.part[0] + x.part[1];
      } else {
        const Double8& all = x.part[0];
        half = __builtin_shufflevector(all, all, 0, 1, 2, 3) + __builtin_shufflevector(all, all, 4, 5, 6, 7);
      }
      a = __builtin_shufflevector(half, half, 0, 1);
      b = __builtin_shufflevector(half, half, 2, 3);
    }
    a += b;
    return a[0] + a[1];
  }
};

template <class Kernel, class... Args>
inline void run_baseline(Args... args) noexcept {
  Kernel::template run<Baseline>(args...);
}
#ifdef BEACONKV_DETAIL_X86
template <class Kernel, class... Args>
[[BEACONKV_DETAIL_AVX2]] inline void run_avx2(Args... args) noexcept {
  Kernel::template run<Avx2>(args...);
}
template <class Kernel, class... Args>
[[BEACONKV_DETAIL_AVX512]] inline void run_avx512(Args... args) noexcept {
  Kernel::template run<Avx512>(args...);
}
#endif

/// Runs a kernel with the instruction set in use. Arguments are pointers, numbers and small structs of these.
template <class Kernel, class... Args>
inline void run(Args... args) noexcept {
#ifdef BEACONKV_DETAIL_X86
  switch (instruction_set()) {
    case InstructionSet::avx512:
      return run_avx512<Kernel>(args...);
    case InstructionSet::avx2:
      return run_avx2<Kernel>(args...);
    case InstructionSet::baseline:
      break;
  }
#endif
  run_baseline<Kernel>(args...);
}

}  // namespace beaconkv::inline v0::detail
