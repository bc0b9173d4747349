// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Softmax over keys of many rows at once: logits `[key][row]`, a register holds one key's logits of several rows.

#include <bit>
#include <cfloat>
#include <cstdint>

#include "beaconkv/kernel/exponential.hpp"
#include "beaconkv/kernel/products.hpp"

namespace beaconkv::inline v0::detail {

/// A logit that stands for "not visible"; finite, so that arithmetic on it is defined under every compiler flag.
inline constexpr float masked_logit = -FLT_MAX;

/// All ones in each lane whose logit is not masked.
template <class F, class I>
BEACONKV_KERNEL void mask_visible(I& mask, const F& logit) noexcept {
  I bits;
  bits_of(bits, logit);
  mask_not_zero(mask, bits ^ std::bit_cast<std::int32_t>(masked_logit));
}

/// `x = cap * tanh(x / cap)` for `n` logits, a multiple of `lanes`; masked ones stay.
struct CapLogits {
  template <class Isa>
  BEACONKV_KERNEL void run(float* logits, index_t n, float cap) noexcept {
    using F = typename Isa::Floats;
    using I = typename Isa::Ints;
    for (index_t i = 0; i < n; i += Isa::width) {
      F z;
      load(z, logits + i);
      I visible;
      mask_visible(visible, z);
      F capped = z / cap;
      tanh_of<Isa>(capped);
      capped *= cap;
      select(z, visible, capped, z);
      store(logits + i, z);
    }
  }
};

/// Masks the logits of keys `[first, first + count)` that a row does not see: those at or behind `visible[row]`.
struct MaskUnseen {
  template <class Isa>
  BEACONKV_KERNEL void run(float* logits, index_t first, index_t count, index_t rows, const slot_t* visible) noexcept {
    using F = typename Isa::Floats;
    using I = typename Isa::Ints;
    const F masked = F{} + masked_logit;
    for (index_t j = 0; j < count; ++j)
      for (index_t r = 0; r < rows; r += Isa::width) {
        I limit, seen;
        load(limit, visible + r);
        mask_negative(seen, static_cast<slot_t>(first + j) - limit);
        F z;
        load(z, logits + j * rows + r);
        select(z, seen, z, masked);
        store(logits + j * rows + r, z);
      }
  }
};

/// Several heads' logits of a key become one head's: `in` [count][heads * padded, up to total], `out` [count][out_rows]. A
/// masked logit has no say. `padded` is a multiple of 4; rows of `out` beyond it become 0.
struct ReduceGroup {
  template <class Isa>
  BEACONKV_KERNEL void run(const float* in, index_t count, index_t heads, index_t padded, index_t total, bool mean, float* out,
                           index_t out_rows) noexcept {
    for (index_t j = 0; j < count; ++j) {
      for (index_t r = 0; r < padded; r += 4) {
        Float4 sum{}, seen{}, top = Float4{} + masked_logit;
        for (index_t h = 0; h < heads; ++h) {
          Float4 z;
          load(z, in + j * total + h * padded + r);
          Int4 visible;
          mask_visible(visible, z);
          Float4 one, part;
          select(part, visible, z, Float4{});
          select(one, visible, Float4{} + 1.0F, Float4{});
          sum += part;
          seen += one;
          raise_to(top, z);
        }
        if (mean) {
          Int4 any;
          bits_of(any, seen);
          mask_not_zero(any, any);
          const Float4 average = sum / (seen + 1e-30F);
          select(top, any, average, top);
        }
        store(out + j * out_rows + r, top);
      }
      for (index_t r = padded; r < out_rows; ++r) out[j * out_rows + r] = 0.0F;
    }
  }
};

/// Adds a tile of keys to each row's running softmax: `top` is its largest logit, `sum` the sum of exp(logit - top).
struct AddToSoftmax {
  template <class Isa>
  BEACONKV_KERNEL void run(const float* logits, index_t count, index_t rows, float* top, float* sum) noexcept {
    using F = typename Isa::Floats;
    for (index_t r = 0; r < rows; r += Isa::width) {
      F old_top, new_top, total;
      load(old_top, top + r);
      load(total, sum + r);
      new_top = old_top;
      for (index_t j = 0; j < count; ++j) {
        F z;
        load(z, logits + j * rows + r);
        raise_to(new_top, z);
      }
      F shrink = old_top - new_top;  // masked - top is far below -87: the empty sum stays 0
      exp_not_positive<Isa>(shrink);
      F added{};  // one long chain of float additions would drift: sum the tile, then the tiles
      for (index_t j = 0; j < count; ++j) {
        F z;
        load(z, logits + j * rows + r);
        z -= new_top;
        exp_not_positive<Isa>(z);
        added += z;
      }
      store(top + r, new_top);
      store(sum + r, total * shrink + added);
    }
  }
};

/// `out[l] = ` the largest of the lanes `l`, `l + 4`, `l + 8`, `l + 12`.
template <class Isa>
BEACONKV_KERNEL void largest_four(Float4& out, const Lanes<Isa>& x) noexcept {
  if constexpr (Isa::width == 4) {
    Float4 low = x.part[0], high = x.part[1];
    raise_to(low, x.part[2]);
    raise_to(high, x.part[3]);
    raise_to(low, high);
    out = low;
  } else {
    Float8 half;
    if constexpr (Isa::width == 8) {
      half = x.part[0];
      raise_to(half, x.part[1]);
    } else {
      const Float16& all = x.part[0];
      half = __builtin_shufflevector(all, all, 0, 1, 2, 3, 4, 5, 6, 7);
      const Float8 high = __builtin_shufflevector(all, all, 8, 9, 10, 11, 12, 13, 14, 15);
      raise_to(half, high);
    }
    out = __builtin_shufflevector(half, half, 0, 1, 2, 3);
    const Float4 high = __builtin_shufflevector(half, half, 4, 5, 6, 7);
    raise_to(out, high);
  }
}

/// One number a key from the weights exp(logit - top + shift) of rows `[first, first + rows)`, a multiple of `lanes`: their sum
/// divided by `divisor`, or the largest. A row with `shift = masked_logit` has no say.
template <bool add>
struct ReduceRows {
  template <class Isa>
  BEACONKV_KERNEL void run(const float* logits, index_t count, index_t all_rows, index_t first, index_t rows, const float* top,
                           const float* shift, float divisor, float* out) noexcept {
    for (index_t j = 0; j < count; j += 4) {
      Float4 of_key[4];
      for (index_t i = 0; i < 4; ++i) {
        const index_t key = j + i < count ? j + i : count - 1;
        over_rows<Isa>(of_key[i], logits + key * all_rows + first, rows, top + first, shift + first);
      }
      transpose(of_key[0], of_key[1], of_key[2], of_key[3]);
      if constexpr (add) {
        of_key[0] = ((of_key[0] + of_key[2]) + (of_key[1] + of_key[3])) / divisor;
      } else {
        raise_to(of_key[0], of_key[2]);
        raise_to(of_key[1], of_key[3]);
        raise_to(of_key[0], of_key[1]);
        exp_not_positive<Baseline>(of_key[0]);
      }
      float numbers[4];
      store(numbers, of_key[0]);
      for (index_t i = 0; i < 4 && j + i < count; ++i) out[j + i] = numbers[i];
    }
  }

 private:
  template <class Isa>
  BEACONKV_KERNEL void over_rows(Float4& out, const float* logits, index_t rows, const float* top,
                                 const float* shift) noexcept {
    Lanes<Isa> all;
    Lanes<Isa>::fill(all, add ? 0.0F : masked_logit);
    for (index_t r = 0; r < rows; r += lanes) {
      Lanes<Isa> z, largest, offset;
      Lanes<Isa>::read(z, logits + r);
      Lanes<Isa>::read(largest, top + r);
      Lanes<Isa>::read(offset, shift + r);
      BEACONKV_UNROLL for (index_t i = 0; i < Lanes<Isa>::count; ++i) {
        typename Isa::Floats t = (z.part[i] - largest.part[i]) + offset.part[i];
        if constexpr (add) {
          exp_not_positive<Isa>(t);
          all.part[i] += t;
        } else {
          raise_to(all.part[i], t);
        }
      }
    }
    if constexpr (add)
      sum_to_four(out, all);
    else
      largest_four(out, all);
  }
};

/// Two kinds of rows apart: `a` the largest weight that rows of the first kind give a key, `row` the lowest row that gives it,
/// `b` the largest of the second kind. `shift_a` and `shift_b` are `ReduceRows`' shift, masked for rows of the other kind; all
/// `rows` rows, a multiple of `lanes` below 2^24. `kinds` says which kinds there are among each `lanes` rows.
struct ReduceTwoKinds {
  static constexpr std::uint8_t has_a = 1;
  static constexpr std::uint8_t has_b = 2;

  template <class Isa>
  BEACONKV_KERNEL void run(const float* logits, index_t count, index_t rows, const float* top, const float* shift_a,
                           const float* shift_b, const std::uint8_t* kinds, float* a, slot_t* row, float* b) noexcept {
    for (index_t j = 0; j < count; j += 4) {
      Float4 most_a[4], reached_by[4], most_b[4];
      for (index_t i = 0; i < 4; ++i) {
        const index_t key = j + i < count ? j + i : count - 1;
        over_rows<Isa>(most_a[i], reached_by[i], most_b[i], logits + key * rows, rows, top, shift_a, shift_b, kinds);
      }
      largest_of_each(most_a);
      largest_of_each(reached_by);
      largest_of_each(most_b);
      exp_not_positive<Baseline>(most_a[0]);
      exp_not_positive<Baseline>(most_b[0]);
      float of_a[4], of_b[4];
      slot_t of_row[4];
      store(of_a, most_a[0]);
      store(of_b, most_b[0]);
      store(of_row, __builtin_convertvector(-reached_by[0], Int4));
      for (index_t i = 0; i < 4 && j + i < count; ++i) {
        a[j + i] = of_a[i];
        row[j + i] = of_row[i];
        b[j + i] = of_b[i];
      }
    }
  }

 private:
  /// `x[0][i] = ` the largest number of `x[i]`.
  BEACONKV_KERNEL void largest_of_each(Float4 (&x)[4]) noexcept {
    transpose(x[0], x[1], x[2], x[3]);
    raise_to(x[0], x[2]);
    raise_to(x[1], x[3]);
    raise_to(x[0], x[1]);
  }

  /// The largest of four, in each lane of a register.
  template <class F>
  BEACONKV_KERNEL void spread_largest(F& all, const Float4& x) noexcept {
    Float4 most = __builtin_shufflevector(x, x, 2, 3, 0, 1);
    raise_to(most, x);
    const Float4 other = __builtin_shufflevector(most, most, 1, 0, 3, 2);
    raise_to(most, other);
    if constexpr (sizeof(F) == sizeof(Float4))
      all = most;
    else if constexpr (sizeof(F) == sizeof(Float8))
      all = __builtin_shufflevector(most, most, 0, 0, 0, 0, 0, 0, 0, 0);
    else
      all = __builtin_shufflevector(most, most, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
  }

  template <class Isa>
  BEACONKV_KERNEL void over_rows(Float4& most_a, Float4& reached_by, Float4& most_b, const float* logits, index_t rows,
                                 const float* top, const float* shift_a, const float* shift_b,
                                 const std::uint8_t* kinds) noexcept {
    using F = typename Isa::Floats;
    using I = typename Isa::Ints;
    constexpr float from_zero[lanes] = {0, -1, -2, -3, -4, -5, -6, -7, -8, -9, -10, -11, -12, -13, -14, -15};
    Lanes<Isa> number, a, b, by;  // rows count down from 0, so that the lowest is the largest
    Lanes<Isa>::read(number, from_zero);
    Lanes<Isa>::read(by, from_zero);
    Lanes<Isa>::fill(a, masked_logit);
    Lanes<Isa>::fill(b, masked_logit);
    for (index_t r = 0; r < rows; r += lanes) {
      const std::uint8_t kind = kinds[r / lanes];
      Lanes<Isa> below, largest, offset;
      Lanes<Isa>::read(below, logits + r);
      Lanes<Isa>::read(largest, top + r);
      BEACONKV_UNROLL for (index_t i = 0; i < Lanes<Isa>::count; ++i) below.part[i] = below.part[i] - largest.part[i];
      if ((kind & has_a) != 0) {
        Lanes<Isa>::read(offset, shift_a + r);
        BEACONKV_UNROLL for (index_t i = 0; i < Lanes<Isa>::count; ++i) {
          const F of_a = below.part[i] + offset.part[i];
          I more;
          bits_of(more, F(a.part[i] - of_a));
          mask_negative(more, more);
          select(by.part[i], more, number.part[i], by.part[i]);
          raise_to(a.part[i], of_a);
        }
      }
      if ((kind & has_b) != 0) {
        Lanes<Isa>::read(offset, shift_b + r);
        BEACONKV_UNROLL for (index_t i = 0; i < Lanes<Isa>::count; ++i) {
          const F of_b = below.part[i] + offset.part[i];
          raise_to(b.part[i], of_b);
        }
      }
      BEACONKV_UNROLL for (index_t i = 0; i < Lanes<Isa>::count; ++i) number.part[i] -= static_cast<float>(lanes);
    }
    largest_four(most_a, a);
    largest_four(most_b, b);
    F all;
    spread_largest(all, most_a);
    I largest;
    bits_of(largest, all);
    BEACONKV_UNROLL for (index_t i = 0; i < Lanes<Isa>::count; ++i) {
      I less;
      bits_of(less, a.part[i]);
      mask_not_zero(less, I(less ^ largest));
      select(by.part[i], less, F(F{} - 1e9F), by.part[i]);
    }
    largest_four(reached_by, by);
  }
};

}  // namespace beaconkv::inline v0::detail
