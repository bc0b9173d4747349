// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// The tensors of a checkpoint folder, whether they lie in one file or in several.

#include <cstddef>
#include <filesystem>
#include <functional>
#include <map>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/safetensors.hpp"

namespace beaconkv::engine {

/// `model.safetensors`, or the files that `model.safetensors.index.json` names. Remembers what was read, so that a tensor that
/// nobody asked for can be reported.
class Checkpoint {
 public:
  /// Opens every file and checks its header.
  [[nodiscard]] static Result<Checkpoint> open(const std::filesystem::path& directory);

  /// Whether the tensor can be read in this shape, or why not.
  [[nodiscard]] Status expect(std::string_view tensor, std::span<const index_t> shape) const;
  /// Writes the tensor, row-major, to `out`. Precondition: `expect` was content.
  [[nodiscard]] Status read(std::string_view tensor, float* out);

  /// Tensors that were never read.
  [[nodiscard]] std::vector<std::string> unread() const;

 private:
  Checkpoint() = default;
  [[nodiscard]] Status add_file(const std::filesystem::path& path);
  [[nodiscard]] Status add_indexed_files(const std::filesystem::path& index);

  std::string name_;  ///< of the file that lists the tensors
  std::vector<SafetensorsFile> files_;
  std::map<std::string, std::size_t, std::less<>> file_of_;
  std::set<std::string, std::less<>> read_;
};

}  // namespace beaconkv::engine
