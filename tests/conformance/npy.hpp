// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// NumPy's `.npy` files, as far as cases use them.

#include <cstdint>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

#include "beaconkv/types.hpp"

namespace beaconkv::conformance {

/// What is wrong with a file or a command line; the message names it.
class InputError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A dense array in C order.
template <class T>
struct Array {
  std::vector<index_t> shape;
  std::vector<T> data;

  [[nodiscard]] index_t dim(std::size_t axis) const { return shape.at(axis); }
  /// The last axis at `[i]` of a matrix, or at `[i][j]` of an array of three axes.
  [[nodiscard]] const T* row(index_t i) const { return data.data() + i * shape[1]; }
  [[nodiscard]] const T* row(index_t i, index_t j) const { return data.data() + (i * shape[1] + j) * shape[2]; }
};

using FloatArray = Array<float>;
using IndexArray = Array<std::int64_t>;
using AnyArray = std::variant<FloatArray, IndexArray>;

/// `[2, 40]`, as messages show a shape.
[[nodiscard]] std::string shown(const std::vector<index_t>& shape);

/// Reads format 1.0 in C order: `<f4` or `<f8` (rounded) as floats, `<i8`, `<i4` or bool as integers. Anything else, and a file
/// that is shorter or longer than its header says, throws `InputError`.
[[nodiscard]] AnyArray read_npy(const std::filesystem::path& path);

}  // namespace beaconkv::conformance
