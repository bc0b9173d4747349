// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Files of a command line: none is written over that is read, and no two results go to one.

#include <filesystem>
#include <vector>

#include "beaconkv/status.hpp"

namespace beaconkv::lab {

struct NamedFile {
  const char* option;
  std::filesystem::path path;  ///< empty: not given
  bool written = false;
};

/// An error where two options name the same file, of which at least one is written.
[[nodiscard]] inline Status check_files(const std::vector<NamedFile>& files) {
  const auto place = [](const NamedFile& file) {
    std::error_code ignored;
    return std::filesystem::weakly_canonical(std::filesystem::absolute(file.path, ignored), ignored);
  };
  for (std::size_t i = 0; i < files.size(); ++i)
    for (std::size_t j = i + 1; j < files.size(); ++j)
      if (!files[i].path.empty() && !files[j].path.empty() && (files[i].written || files[j].written) &&
          place(files[i]) == place(files[j]))
        return detail::invalid(files[j].option, " = ", files[j].path.string(), ": is the file of ", files[i].option, ", too");
  return {};
}

}  // namespace beaconkv::lab
