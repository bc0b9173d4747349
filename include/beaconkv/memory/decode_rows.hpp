// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Rows of stored numbers become floats, many at a time: the same bits as `decode`.

#include "beaconkv/kernel/vector.hpp"
#include "beaconkv/memory/codec.hpp"

namespace beaconkv::inline v0::detail {

/// Stored rows whose elements lie side by side. `scales` is null where the type takes none.
template <class T>
struct StoredRows {
  const T* data = nullptr;
  index_t stride = 0;
  index_t rows = 0;
  index_t dim = 0;  // numbers a row
  const float* scales = nullptr;
  index_t scale_stride = 0;
};

/// As many small integers as there are lanes.
template <class Isa>
struct Narrow;
template <>
struct Narrow<Baseline> {
  typedef std::uint16_t Words __attribute__((vector_size(8)));
  typedef std::int16_t Shorts __attribute__((vector_size(8)));
  typedef std::uint8_t Bytes __attribute__((vector_size(4)));
  typedef std::int8_t SignedBytes __attribute__((vector_size(4)));
};
template <>
struct Narrow<Avx2> {
  typedef std::uint16_t Words __attribute__((vector_size(16)));
  typedef std::int16_t Shorts __attribute__((vector_size(16)));
  typedef std::uint8_t Bytes __attribute__((vector_size(8)));
  typedef std::int8_t SignedBytes __attribute__((vector_size(8)));
};
template <>
struct Narrow<Avx512> {
  typedef std::uint16_t Words __attribute__((vector_size(32)));
  typedef std::int16_t Shorts __attribute__((vector_size(32)));
  typedef std::uint8_t Bytes __attribute__((vector_size(16)));
  typedef std::int8_t SignedBytes __attribute__((vector_size(16)));
};

/// A small float of `mantissa` bits, its sign at `sign_bit`, in each lane. `infinite` is the exponent of infinity and NaN; 0
/// where the type has none.
template <class Isa, int mantissa, int bias, int sign_bit, int infinite>
BEACONKV_KERNEL void widen(typename Isa::Floats& out, const typename Isa::Ints& code) noexcept {
  using F = typename Isa::Floats;
  using I = typename Isa::Ints;
  constexpr int shift = 23 - mantissa;
  const I sign = (code & (1 << sign_bit)) << (31 - sign_bit);
  const I magnitude = code & ((1 << sign_bit) - 1);
  I bits = (magnitude << shift) + ((127 - bias) << 23);
  if constexpr (infinite > 0) {
    I finite;
    mask_negative(finite, magnitude - (infinite << mantissa));
    bits += ~finite & ((127 - bias) << 23);
  } else {  // all ones is NaN
    I number;
    mask_negative(number, magnitude - ((1 << sign_bit) - 1));
    bits = (bits & number) | (~number & 0x7FC00000);
  }
  I subnormal, small_bits;
  mask_negative(subnormal, magnitude - (1 << mantissa));
  const F small = __builtin_convertvector(magnitude & subnormal, F) * (1.0F / static_cast<float>(1 << (bias + mantissa - 1)));
  bits_of(small_bits, small);
  bits = (bits & ~subnormal) | (small_bits & subnormal) | sign;
  bits_of(out, bits);
}

template <class Isa>
BEACONKV_KERNEL void read_numbers(typename Isa::Floats& out, const bfloat16* from) noexcept {
  typename Narrow<Isa>::Words words;
  load(words, from);
  const typename Isa::Ints bits = __builtin_convertvector(words, typename Isa::Ints) << 16;
  bits_of(out, bits);
}
template <class Isa>
BEACONKV_KERNEL void read_numbers(typename Isa::Floats& out, const float16* from) noexcept {
  typename Narrow<Isa>::Words words;
  load(words, from);
  widen<Isa, 10, 15, 15, 31>(out, __builtin_convertvector(words, typename Isa::Ints));
}
/// Bytes become integers by way of 16 bits: in one step, g++ 12 takes them one at a time.
template <class Isa, class Bytes, class T>
BEACONKV_KERNEL void read_bytes(typename Isa::Ints& out, const T* from) noexcept {
  Bytes bytes;
  load(bytes, from);
  const typename Narrow<Isa>::Shorts shorts = __builtin_convertvector(bytes, typename Narrow<Isa>::Shorts);
  out = __builtin_convertvector(shorts, typename Isa::Ints);
}
template <class Isa>
BEACONKV_KERNEL void read_numbers(typename Isa::Floats& out, const float8_e5m2* from) noexcept {
  typename Isa::Ints codes;
  read_bytes<Isa, typename Narrow<Isa>::Bytes>(codes, from);
  widen<Isa, 2, 15, 7, 31>(out, codes);
}
template <class Isa>
BEACONKV_KERNEL void read_numbers(typename Isa::Floats& out, const float8_e4m3* from) noexcept {
  typename Isa::Ints codes;
  read_bytes<Isa, typename Narrow<Isa>::Bytes>(codes, from);
  widen<Isa, 3, 7, 7, 0>(out, codes);
}
template <class Isa>
BEACONKV_KERNEL void read_numbers(typename Isa::Floats& out, const std::int8_t* from) noexcept {
  typename Isa::Ints numbers;
  read_bytes<Isa, typename Narrow<Isa>::SignedBytes>(numbers, from);
  out = __builtin_convertvector(numbers, typename Isa::Floats);
}
template <class Isa>
BEACONKV_KERNEL void read_numbers(typename Isa::Floats& out, const float* from) noexcept {
  load(out, from);
}
/// A type of a user's own.
template <class Isa, class T, std::enable_if_t<storage_code<T> == 0, int> = 0>
BEACONKV_KERNEL void read_numbers(typename Isa::Floats& out, const T* from) noexcept {
  float numbers[static_cast<std::size_t>(Isa::width)];
  for (index_t i = 0; i < Isa::width; ++i) numbers[i] = decode(from[i]);
  load(out, numbers);
}

/// To `out` [rows][dim], dense.
template <class T>
struct DecodeRows {
  template <class Isa>
  BEACONKV_KERNEL void run(StoredRows<T> in, float* out) noexcept {
    for (index_t i = 0; i < in.rows; ++i) {
      const T* const row = in.data + i * in.stride;
      index_t d = 0;
      for (; d + Isa::width <= in.dim; d += Isa::width) {
        typename Isa::Floats numbers;
        read_numbers<Isa>(numbers, row + d);
        if constexpr (takes_scale<T>) numbers *= in.scales[i * in.scale_stride];
        store(out + i * in.dim + d, numbers);
      }
      for (; d < in.dim; ++d) {
        out[i * in.dim + d] = decode(row[d]);
        if constexpr (takes_scale<T>) out[i * in.dim + d] *= in.scales[i * in.scale_stride];
      }
    }
  }
};

template <>
struct DecodeRows<q8_0> {
  template <class Isa>
  BEACONKV_KERNEL void run(StoredRows<q8_0> in, float* out) noexcept {
    for (index_t i = 0; i < in.rows; ++i)
      for (index_t b = 0; b < in.dim / 32; ++b) {
        const q8_0& block = in.data[i * in.stride + b];
        const float scale = decode(block.scale);
        for (index_t d = 0; d < 32; d += Isa::width) {
          typename Isa::Floats numbers;
          read_numbers<Isa>(numbers, block.values + d);
          store(out + i * in.dim + b * 32 + d, numbers * scale);
        }
      }
  }
};

}  // namespace beaconkv::inline v0::detail
