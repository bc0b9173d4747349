// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Text for models whose tokens are whole words: words separated by single spaces, one token each.

#include <filesystem>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "beaconkv/status.hpp"

namespace beaconkv::engine {

/// A list of distinct words; the index of a word is its token id.
class Vocabulary {
 public:
  /// Words must be distinct, not empty and without white space.
  [[nodiscard]] static Result<Vocabulary> make(std::vector<std::string> words);

  /// From a JSON list of words. Any other content is an error, such as the byte-pair vocabularies of large models.
  [[nodiscard]] static Result<Vocabulary> load(const std::filesystem::path& path);

  [[nodiscard]] int size() const noexcept { return static_cast<int>(words_.size()); }

  /// The ids of a text; an empty text has none. An unknown word, or two spaces in a row, is an error that says where.
  [[nodiscard]] Result<std::vector<int>> encode(std::string_view text) const;

  /// The words, with single spaces between them. An id outside `[0, size())` is an error.
  [[nodiscard]] Result<std::string> decode(std::span<const int> ids) const;

 private:
  Vocabulary() = default;

  std::vector<std::string> words_;
  std::map<std::string, int, std::less<>> ids_;
};

}  // namespace beaconkv::engine
