// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Reader of one safetensors file: 8 bytes header length, a JSON header, then the tensors' bytes, little-endian.

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "beaconkv/types.hpp"

namespace beaconkv::engine {

/// What the header says of one tensor.
struct TensorInfo {
  std::string dtype;
  std::vector<index_t> shape;
  std::uint64_t begin = 0;  ///< first byte, counted from the end of the header
  std::uint64_t end = 0;    ///< one past the last
};

/// An open file whose header has been checked against its size: every tensor's shape and type agree with its bytes, and the
/// tensors cover the data without gap or overlap. Reads tensors of type F32, F16 and BF16 as floats; others may be present.
class SafetensorsFile {
 public:
  /// Reads the header only. Allocates in proportion to the header, which is at most 100 MB and never longer than the file.
  [[nodiscard]] static Result<SafetensorsFile> open(const std::filesystem::path& path);

  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  [[nodiscard]] const std::map<std::string, TensorInfo, std::less<>>& tensors() const noexcept { return tensors_; }

  /// Whether `read` can give this tensor in this shape, or why not. To be asked before memory for it is allocated.
  [[nodiscard]] Status expect(std::string_view tensor, std::span<const index_t> shape) const;

  /// Writes the tensor, row-major, to `out`. Precondition: `expect` was content and `out` holds the product of the shape.
  [[nodiscard]] Status read(std::string_view tensor, float* out);

 private:
  SafetensorsFile() = default;
  [[nodiscard]] Status read_header(const std::filesystem::path& path);
  [[nodiscard]] Status check_layout(std::uint64_t data_bytes) const;

  std::string name_;
  std::ifstream file_;
  std::uint64_t data_start_ = 0;
  std::map<std::string, TensorInfo, std::less<>> tensors_;
};

}  // namespace beaconkv::engine
