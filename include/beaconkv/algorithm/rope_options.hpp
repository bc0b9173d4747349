// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// What defines a model's RoPE: layout, dimensions, frequencies and their scalings.

#include <cmath>
#include <numbers>
#include <optional>
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
}  // namespace beaconkv::inline v0
