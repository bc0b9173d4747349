// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Files of a test's own, and what messages must say.

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "support/catch.hpp"

namespace beaconkv::test {

/// A file that is gone afterwards.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& text = "")
      : path_(std::filesystem::temp_directory_path() /
              ("beaconkv_test_" + std::to_string(::getpid()) + "_" + std::to_string(counter_++) + ".txt")) {
    std::ofstream(path_, std::ios::binary) << text;
  }
  ~TemporaryFile() { std::filesystem::remove(path_); }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  [[nodiscard]] const std::filesystem::path& path() const { return path_; }

 private:
  static inline int counter_ = 0;
  std::filesystem::path path_;
};

[[nodiscard]] inline std::string text_of(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

inline void require_says(const std::string& message, const std::vector<std::string>& parts) {
  CAPTURE(message);
  for (const std::string& part : parts) {
    CAPTURE(part);
    REQUIRE(message.find(part) != std::string::npos);
  }
}

}  // namespace beaconkv::test
