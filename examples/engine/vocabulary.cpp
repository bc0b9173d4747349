// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "engine/vocabulary.hpp"

#include <utility>

#include "engine/json_file.hpp"

namespace beaconkv::engine {

Result<Vocabulary> Vocabulary::make(std::vector<std::string> words) {
  Vocabulary vocabulary;
  for (const std::string& word : words) {
    const int id = static_cast<int>(vocabulary.ids_.size());
    if (word.empty() || word.find_first_of(" \t\r\n\v\f") != std::string::npos)
      return detail::invalid("token ", id, " = ", shown(word), ": a word must not be empty or hold white space");
    const auto [entry, is_new] = vocabulary.ids_.emplace(word, id);
    if (!is_new) return detail::invalid("token ", id, " = ", shown(word), ": token ", entry->second, " is the same");
  }
  vocabulary.words_ = std::move(words);
  return vocabulary;
}

Result<Vocabulary> Vocabulary::load(const std::filesystem::path& path) {
  const Result<nlohmann::json> list = read_json(path);
  if (!list) return list.status();
  const std::string name = path.filename().string();
  if (!list->is_array()) return detail::invalid(name, ": is ", shown(*list), ", must be a list of words");
  std::vector<std::string> words;
  for (const nlohmann::json& word : *list) {
    if (!word.is_string()) return detail::invalid(name, ": token ", words.size(), " = ", shown(word), ": must be a word");
    words.push_back(word.get<std::string>());
  }
  Result<Vocabulary> made = make(std::move(words));
  if (!made) return detail::invalid(name, ": ", made.status().message());
  return made;
}

Result<std::vector<int>> Vocabulary::encode(std::string_view text) const {
  std::vector<int> ids;
  if (text.empty()) return ids;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(' ', begin), text.size());
    const std::string_view word = text.substr(begin, end - begin);
    if (word.empty()) return detail::invalid("text: no word at byte ", begin, ", words are separated by single spaces");
    const auto found = ids_.find(word);
    if (found == ids_.end()) return detail::invalid("text: unknown word ", shown(word), " at byte ", begin);
    ids.push_back(found->second);
    begin = end + 1;
  }
  return ids;
}

Result<std::string> Vocabulary::decode(std::span<const int> ids) const {
  std::string text;
  for (const int id : ids) {
    if (id < 0 || id >= size()) return detail::invalid("token ", id, ": the vocabulary has ", size());
    if (!text.empty()) text += ' ';
    text += words_[static_cast<std::size_t>(id)];
  }
  return text;
}

}  // namespace beaconkv::engine
