// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Rotary position embedding: rotate, unrotate and re-align vectors, for every common variant.
///
/// Source: Su et al., RoFormer (arXiv 2104.09864) eq. 34; the scalings as Hugging Face Transformers computes them. Frequencies
/// and angles are formed in double, so that a move over 100,000 positions is as exact as one over ten; vectors are float.

#include <cmath>
#include <numbers>
#include <optional>
#include <span>
#include <type_traits>
#include <variant>
#include <vector>

#include "beaconkv/types.hpp"

namespace beaconkv::inline v0 {

/// Which two dimensions turn together, of `r = rotary_dim`.
enum class RopeLayout : std::uint8_t {
  half,         ///< `(i, i + r/2)`: GPT-NeoX, Llama and Qwen in Hugging Face layout
  interleaved,  ///< `(2i, 2i + 1)`: GPT-J, llama2.c
};

/// Every frequency divided by `factor`.
struct LinearScaling {
  double factor = 1;
};
/// NTK-aware: the base stretched once, `theta * factor^(r / (r - 2))`.
struct NtkScaling {
  double factor = 1;
};
/// Llama 3.1 and later: long wavelengths divided by `factor`, short ones kept, a blend between.
struct Llama3Scaling {
  double factor = 8;
  double low_freq_factor = 1;
  double high_freq_factor = 4;
  double original_max_position = 8192;
};
/// YaRN (arXiv 2309.00071). `attention_factor` defaults to `0.1 ln(factor) + 1`.
struct YarnScaling {
  double factor = 1;
  double original_max_position = 0;
  double beta_fast = 32;
  double beta_slow = 1;
  std::optional<double> attention_factor{};
};
/// The engine's own inverse frequencies, one a pair (`rotary_dim / 2` of them): the safest choice, since nothing is derived
/// twice.
struct GivenFrequencies {
  std::vector<double> inv_freq;
  double attention_factor = 1;
};
using RopeScaling = std::variant<std::monostate, LinearScaling, NtkScaling, Llama3Scaling, YarnScaling, GivenFrequencies>;

/// What defines a model's (or one layer's) RoPE.
struct RopeOptions {
  index_t head_dim = 0;
  std::optional<index_t> rotary_dim{};  ///< dimensions that turn; default: all from `rotary_first` on
  index_t rotary_first = 0;             ///< the first of them: multi-head latent attention turns the last 64 of 576
  double theta = 10000;
  RopeLayout layout = RopeLayout::half;
  RopeScaling scaling{};
};

/// Cosines and sines of one rotation, one of each a pair. Views scratch given to `RopeTable::rotation`.
struct RopeRotation {
  std::span<const float> cos;
  std::span<const float> sin;
};

/// The rotation of one layer, ready to use. A small value (a vector of frequencies): copy it freely, one for each layer where
/// layers differ.
///
/// Positions are integers; a negative one is a shift backwards. Moves are pure rotations: the attention factor multiplies a
/// vector once, in `rotate`, and is taken back in `unrotate`, never in `realign`.
class RopeTable {
 public:
  /// An empty table: no RoPE, only there to be replaced or to say "none".
  RopeTable() = default;

  /// The table, or what is wrong with the options. Allocates `rotary_dim / 2` doubles.
  [[nodiscard]] static Result<RopeTable> make(const RopeOptions& options);

#ifndef BEACONKV_NO_EXCEPTIONS
  /// As `make`; throws `Error`.
  explicit RopeTable(const RopeOptions& options) : RopeTable(make(options).or_throw()) {}
#endif

  [[nodiscard]] bool empty() const noexcept { return inv_freq_.empty(); }
  [[nodiscard]] index_t head_dim() const noexcept { return head_dim_; }
  [[nodiscard]] index_t rotary_dim() const noexcept { return 2 * pairs(); }
  [[nodiscard]] index_t rotary_first() const noexcept { return rotary_first_; }
  [[nodiscard]] index_t pairs() const noexcept { return static_cast<index_t>(inv_freq_.size()); }
  [[nodiscard]] RopeLayout layout() const noexcept { return layout_; }
  [[nodiscard]] double attention_factor() const noexcept { return attention_factor_; }
  /// Radians per position of each pair, scaling included.
  [[nodiscard]] std::span<const double> inv_freq() const noexcept { return inv_freq_; }

  /// The rotation by `delta` positions, written to `scratch` (`rotary_dim` floats). O(D) sines and cosines: form it once for
  /// all vectors of a position.
  [[nodiscard]] RopeRotation rotation(position_t delta, std::span<float> scratch) const noexcept;

  /// Turns `rotary_dim` numbers of `row` (`head_dim` floats) and multiplies them by `factor`; the rest stays, bit for bit.
  void apply(const RopeRotation& rotation, float* row, float factor = 1.0F) const noexcept;

  /// `row` (`head_dim` floats) at `position`, in place: rotation and attention factor.
  void rotate(float* row, position_t position) const noexcept { turn(row, position, static_cast<float>(attention_factor_)); }

  /// The inverse of `rotate`.
  void unrotate(float* row, position_t position) const noexcept {
    turn(row, -position, static_cast<float>(1 / attention_factor_));
  }

  /// Moves a rotated `row` from one position to another, in place. A move by 0 leaves every bit as it is. Several moves add up
  /// as integers: make one call of the sum.
  void realign(float* row, position_t from, position_t to) const noexcept {
    if (from != to) turn(row, to - from, 1.0F);
  }

 private:
  void turn(float* row, position_t delta, float factor) const noexcept;
  void turn_pair(float* row, index_t pair, float cos, float sin) const noexcept {
    row += rotary_first_;
    float& x = row[layout_ == RopeLayout::half ? pair : 2 * pair];
    float& y = row[layout_ == RopeLayout::half ? pair + pairs() : 2 * pair + 1];
    const float a = x;
    x = a * cos - y * sin;
    y = y * cos + a * sin;
  }

  index_t head_dim_ = 0;
  index_t rotary_first_ = 0;
  RopeLayout layout_ = RopeLayout::half;
  double attention_factor_ = 1;
  std::vector<double> inv_freq_;
};

namespace detail {

/// An error unless both tables turn the same dimensions.
[[nodiscard]] inline Status same_rotated_dims(const RopeTable& a, const RopeTable& b) {
  if (a.head_dim() == b.head_dim() && a.rotary_dim() == b.rotary_dim() && a.rotary_first() == b.rotary_first() &&
      a.layout() == b.layout())
    return {};
  return error(StatusCode::unsupported, "realign: the two RoPE tables differ in head_dim (", a.head_dim(), ", ", b.head_dim(),
               "), rotary_dim (", a.rotary_dim(), ", ", b.rotary_dim(), "), rotary_first (", a.rotary_first(), ", ",
               b.rotary_first(), ") or layout");
}

}  // namespace detail

/// Moves a row that `from_table` rotated at `from` to where `to_table` would have put it at `to` (a switch between two LongRoPE
/// tables, say). Both must turn the same dimensions.
[[nodiscard]] inline Status realign(float* row, const RopeTable& from_table, position_t from, const RopeTable& to_table,
                                    position_t to) {
  if (Status s = detail::same_rotated_dims(from_table, to_table); !s) return s;
  from_table.unrotate(row, from);
  to_table.rotate(row, to);
  return {};
}

namespace detail {

[[nodiscard]] inline std::vector<double> rope_frequencies(index_t rotary_dim, double theta) {
  std::vector<double> freq(static_cast<std::size_t>(rotary_dim / 2));
  for (std::size_t i = 0; i < freq.size(); ++i)
    freq[i] = std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(rotary_dim));
  return freq;
}

inline void scale_llama3(std::vector<double>& freq, const Llama3Scaling& s) {
  for (double& f : freq) {
    const double wavelength = 2 * std::numbers::pi / f;
    const double smooth = (s.original_max_position / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor);
    if (wavelength > s.original_max_position / s.low_freq_factor)
      f /= s.factor;
    else if (wavelength >= s.original_max_position / s.high_freq_factor)
      f = (1 - smooth) * f / s.factor + smooth * f;
  }
}

inline void scale_yarn(std::vector<double>& freq, const YarnScaling& s, double theta) {
  const auto r = 2.0 * static_cast<double>(freq.size());
  const auto dim_of_turns = [&](double turns) {
    return r * std::log(s.original_max_position / (turns * 2 * std::numbers::pi)) / (2 * std::log(theta));
  };
  double low = std::floor(dim_of_turns(s.beta_fast));
  double high = std::ceil(dim_of_turns(s.beta_slow));
  if (low < 0) low = 0;
  if (high > r - 1) high = r - 1;
  if (low == high) high += 0.001;  // as Transformers: no division by zero
  for (std::size_t i = 0; i < freq.size(); ++i) {
    double ramp = (static_cast<double>(i) - low) / (high - low);
    ramp = ramp < 0 ? 0 : (ramp > 1 ? 1 : ramp);
    freq[i] = freq[i] / s.factor * ramp + freq[i] * (1 - ramp);
  }
}

[[nodiscard]] inline bool positive(double x) noexcept { return x > 0 && x <= 1e300; }

/// Empty where the scaling's numbers can work.
[[nodiscard]] inline Status validate_scaling(const RopeScaling& scaling, index_t rotary_dim, double theta) {
  const auto factor_of = [](const auto& s) -> double {
    if constexpr (requires { s.factor; })
      return s.factor;
    else
      return 1;
  };
  const double factor = std::visit(factor_of, scaling);
  if (!positive(factor)) return invalid("scaling.factor = ", factor, ": must be positive");
  if (std::holds_alternative<NtkScaling>(scaling) && rotary_dim <= 2)
    return invalid("rotary_dim = ", rotary_dim, ": NTK scaling needs more than 2");
  if (const auto* s = std::get_if<Llama3Scaling>(&scaling)) {
    if (!positive(s->original_max_position))
      return invalid("scaling.original_max_position = ", s->original_max_position, ": must be positive");
    if (!positive(s->low_freq_factor) || !(s->high_freq_factor > s->low_freq_factor))
      return invalid("scaling.low_freq_factor = ", s->low_freq_factor, ", high_freq_factor = ", s->high_freq_factor,
                     ": must be positive and ascending");
  }
  if (const auto* s = std::get_if<YarnScaling>(&scaling)) {
    if (!positive(s->original_max_position))
      return invalid("scaling.original_max_position = ", s->original_max_position, ": must be positive");
    if (!positive(s->beta_slow) || !(s->beta_fast > s->beta_slow))
      return invalid("scaling.beta_slow = ", s->beta_slow, ", beta_fast = ", s->beta_fast, ": must be positive and ascending");
    if (theta <= 1) return invalid("theta = ", theta, ": YaRN scaling needs more than 1");
    if (s->attention_factor && !positive(*s->attention_factor))
      return invalid("scaling.attention_factor = ", *s->attention_factor, ": must be positive");
  }
  if (const auto* s = std::get_if<GivenFrequencies>(&scaling)) {
    if (static_cast<index_t>(s->inv_freq.size()) * 2 != rotary_dim)
      return invalid("scaling.inv_freq has ", s->inv_freq.size(), " entries: rotary_dim = ", rotary_dim, " needs ",
                     rotary_dim / 2);
    for (std::size_t i = 0; i < s->inv_freq.size(); ++i)
      if (!(s->inv_freq[i] >= 0 && s->inv_freq[i] <= 1e300))
        return invalid("scaling.inv_freq[", i, "] = ", s->inv_freq[i], ": must be finite and not negative");
    if (!positive(s->attention_factor))
      return invalid("scaling.attention_factor = ", s->attention_factor, ": must be positive");
  }
  return {};
}

}  // namespace detail

inline Result<RopeTable> RopeTable::make(const RopeOptions& options) {
  if (options.head_dim < 1) return detail::invalid("head_dim = ", options.head_dim, ": must be at least 1");
  if (options.rotary_first < 0 || options.rotary_first >= options.head_dim)
    return detail::invalid("rotary_first = ", options.rotary_first, ": must be between 0 and head_dim = ", options.head_dim);
  const index_t room = options.head_dim - options.rotary_first;
  const index_t rotary = options.rotary_dim.value_or(room);
  if (rotary < 2 || rotary > room || rotary % 2 != 0)
    return detail::invalid("rotary_dim = ", rotary, ": must be even, at least 2 and at most ", room,
                           " (head_dim = ", options.head_dim, ", rotary_first = ", options.rotary_first, ")");
  if (!detail::positive(options.theta)) return detail::invalid("theta = ", options.theta, ": must be positive");
  if (Status s = detail::validate_scaling(options.scaling, rotary, options.theta); !s) return s;

  RopeTable table;
  table.head_dim_ = options.head_dim;
  table.rotary_first_ = options.rotary_first;
  table.layout_ = options.layout;
  table.inv_freq_ = detail::rope_frequencies(rotary, options.theta);
  std::visit(
      [&](const auto& s) {
        using S = std::remove_cvref_t<decltype(s)>;
        if constexpr (std::is_same_v<S, LinearScaling>) {
          for (double& f : table.inv_freq_) f /= s.factor;
        } else if constexpr (std::is_same_v<S, NtkScaling>) {
          const auto r = static_cast<double>(rotary);
          table.inv_freq_ = detail::rope_frequencies(rotary, options.theta * std::pow(s.factor, r / (r - 2)));
        } else if constexpr (std::is_same_v<S, Llama3Scaling>) {
          detail::scale_llama3(table.inv_freq_, s);
        } else if constexpr (std::is_same_v<S, YarnScaling>) {
          detail::scale_yarn(table.inv_freq_, s, options.theta);
          table.attention_factor_ = s.attention_factor.value_or(s.factor > 1 ? 0.1 * std::log(s.factor) + 1 : 1.0);
        } else if constexpr (std::is_same_v<S, GivenFrequencies>) {
          table.inv_freq_ = s.inv_freq;
          table.attention_factor_ = s.attention_factor;
        }
      },
      options.scaling);
  return table;
}

inline RopeRotation RopeTable::rotation(position_t delta, std::span<float> scratch) const noexcept {
  const auto n = inv_freq_.size();
  BEACONKV_ASSERT(scratch.size() >= 2 * n);
  const std::span<float> cos = scratch.first(n);
  const std::span<float> sin = scratch.subspan(n, n);
  for (std::size_t i = 0; i < n; ++i) {
    const double angle = static_cast<double>(delta) * inv_freq_[i];
    cos[i] = static_cast<float>(std::cos(angle));
    sin[i] = static_cast<float>(std::sin(angle));
  }
  return {cos, sin};
}

inline void RopeTable::apply(const RopeRotation& rotation, float* row, float factor) const noexcept {
  for (index_t i = 0; i < pairs(); ++i)
    turn_pair(row, i, rotation.cos[static_cast<std::size_t>(i)] * factor, rotation.sin[static_cast<std::size_t>(i)] * factor);
}

inline void RopeTable::turn(float* row, position_t delta, float factor) const noexcept {
  for (index_t i = 0; i < pairs(); ++i) {
    const double angle = static_cast<double>(delta) * inv_freq_[static_cast<std::size_t>(i)];
    turn_pair(row, i, static_cast<float>(std::cos(angle)) * factor, static_cast<float>(std::sin(angle)) * factor);
  }
}

}  // namespace beaconkv::inline v0
