// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// One case: a folder with `params.json` and arrays.

#include <filesystem>
#include <initializer_list>
#include <limits>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>

#include "beaconkv/algorithm/pooling.hpp"
#include "beaconkv/algorithm/rope.hpp"
#include "npy.hpp"

namespace beaconkv::conformance {

/// What a case asks for and the library has not. The case fails.
class Unsupported : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Parameters and arrays of a case. Everything that is missing, or of another type or shape than asked for, throws `InputError`
/// with the name of the file.
class Case {
 public:
  /// Stands for any size in a shape.
  static constexpr index_t any = std::numeric_limits<index_t>::min();

  /// Reads `folder/params.json`, and checks that every array that it lists (`arrays`) is there. A case without arrays may be
  /// the file itself.
  Case(std::string method, std::filesystem::path folder);

  [[nodiscard]] const std::string& method() const noexcept { return method_; }
  /// `METHOD/CASE`.
  [[nodiscard]] std::string name() const { return method_ + "/" + folder_.filename().string(); }

  /// True where the parameter is there and not null.
  [[nodiscard]] bool has_param(const std::string& name) const;
  [[nodiscard]] const nlohmann::json& param(const std::string& name) const;
  [[nodiscard]] index_t integer(const std::string& name) const;
  [[nodiscard]] double number(const std::string& name) const;
  [[nodiscard]] std::string text(const std::string& name) const;
  [[nodiscard]] bool flag(const std::string& name, bool fallback) const;
  /// False where scores tie at the boundary, so that several sets are right.
  [[nodiscard]] bool exact_indices() const { return flag("exact_indices", true); }
  /// `kv_heads`, `gqa_group` and `head_dim`.
  [[nodiscard]] Shape shape() const;

  [[nodiscard]] bool has(const std::string& array) const;
  [[nodiscard]] FloatArray floats(const std::string& array, std::initializer_list<index_t> shape) const;
  [[nodiscard]] IndexArray integers(const std::string& array, std::initializer_list<index_t> shape) const;

  /// What a message needs to say which parameter is wrong.
  [[nodiscard]] std::string where(const std::string& parameter) const {
    return params_file().string() + ": '" + parameter + "'";
  }

 private:
  [[nodiscard]] std::filesystem::path params_file() const {
    return folder_.extension() == ".json" ? folder_ : folder_ / "params.json";
  }
  [[nodiscard]] std::filesystem::path file(const std::string& array) const { return folder_ / (array + ".npy"); }
  template <class T>
  [[nodiscard]] Array<T> load(const std::string& array, std::initializer_list<index_t> shape, const char* kind) const;

  std::string method_;
  std::filesystem::path folder_;
  nlohmann::json params_;
};

/// `pooling` (avgpool or maxpool) and `kernel_size`.
[[nodiscard]] Pool pool_of(const Case& c);

/// The parameter `name`: how many of a trace's `tokens` come at once, before the others.
[[nodiscard]] index_t prompt_of(const Case& c, const std::string& name, index_t tokens);

/// `theta` (or `rope_theta`), `rotary_dim`, `layout` and `scaling`: by default all of `head_dim` turns, half-split, unscaled.
[[nodiscard]] RopeTable rope_of(const Case& c, index_t head_dim);

}  // namespace beaconkv::conformance
