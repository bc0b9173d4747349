// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "policy_lab/problems.hpp"

#include <algorithm>
#include <fstream>
#include <map>
#include <optional>

#include "engine/json_file.hpp"
#include "engine/vocabulary.hpp"

namespace beaconkv::lab {
namespace {

using nlohmann::json;

/// Token ids under `key`; none where the key is absent.
[[nodiscard]] Result<std::vector<int>> read_ids(const json& line, const char* key, index_t vocab_size,
                                                const std::string& where) {
  std::vector<int> ids;
  const auto found = line.find(key);
  if (found == line.end()) return ids;
  if (!found->is_array())
    return detail::invalid(where, ": ", key, " = ", engine::shown(*found), ": must be a list of token ids");
  for (const json& id : *found) {
    if (!id.is_number_integer() || id.get<double>() < 0 || id.get<double>() >= static_cast<double>(vocab_size))
      return detail::invalid(where, ": ", key, " has ", engine::shown(id), ": token ids are whole numbers below ", vocab_size);
    ids.push_back(id.get<int>());
  }
  return ids;
}

[[nodiscard]] Result<Problem> read_problem(const json& line, const engine::Vocabulary* words, index_t vocab_size,
                                           const std::string& where) {
  if (!line.is_object()) return detail::invalid(where, ": ", engine::shown(line), ": must be an object");
  Problem problem;
  if (const auto id = line.find("id"); id != line.end()) problem.id = id->is_string() ? id->get<std::string>() : id->dump();
  if (const auto level = line.find("level"); level != line.end()) {
    if (!level->is_number_integer() || level->get<double>() < 0 || level->get<double>() > 1e9)
      return detail::invalid(where, ": level = ", engine::shown(*level), ": must be a whole number");
    problem.level = level->get<int>();
  }
  for (const auto& [key, ids] :
       {std::pair{"prompt_ids", &problem.prompt}, {"expected_ids", &problem.expected}, {"answer_ids", &problem.answer}}) {
    Result<std::vector<int>> read = read_ids(line, key, vocab_size, where);
    if (!read) return read.status();
    *ids = std::move(*read);
  }
  if (problem.prompt.empty()) {
    const auto text = line.find("prompt");
    if (text == line.end() || !text->is_string())
      return detail::invalid(where, ": has neither prompt_ids nor a text under prompt");
    if (words == nullptr)
      return detail::invalid(where, ": has no prompt_ids, and the model folder has no vocab.json to read prompt by");
    Result<std::vector<int>> ids = words->encode(text->get<std::string>());
    if (!ids) return detail::invalid(where, ": prompt: ", ids.status().message());
    problem.prompt = std::move(*ids);
  }
  if (problem.prompt.empty()) return detail::invalid(where, ": the prompt is empty");
  return problem;
}

}  // namespace

bool Problem::answered_by(const std::vector<int>& generated, const std::vector<int>& eos) const {
  if (answer.empty() || generated.empty() || std::find(eos.begin(), eos.end(), generated.back()) == eos.end()) return false;
  const auto text_end = generated.end() - 1;
  if (const auto last = std::find_end(expected.begin(), expected.end(), answer.begin(), answer.end());
      last != expected.end() && last != expected.begin()) {
    const int marker = *(last - 1);
    const auto found = std::find(generated.begin(), text_end, marker);
    return found != text_end && std::equal(found + 1, text_end, answer.begin(), answer.end());
  }
  return text_end - generated.begin() >= static_cast<std::ptrdiff_t>(answer.size()) &&
         std::equal(answer.rbegin(), answer.rend(), generated.rbegin() + 1);
}

Result<std::vector<Problem>> load_problems(const std::filesystem::path& file, const std::filesystem::path& model_directory,
                                           index_t vocab_size) {
  std::ifstream in(file);
  if (!in) return detail::invalid("--prompts = ", file.string(), ": cannot be read");
  std::optional<engine::Vocabulary> words;
  if (const auto vocabulary = model_directory / "vocab.json"; std::filesystem::exists(vocabulary)) {
    Result<engine::Vocabulary> loaded = engine::Vocabulary::load(vocabulary);
    if (loaded) words = std::move(*loaded);  // a byte-pair vocabulary has no words to offer; prompt_ids still work
  }
  std::vector<Problem> problems;
  std::map<std::string, index_t> lines;  // of each id
  std::string text;
  for (index_t number = 1; std::getline(in, text); ++number) {
    if (text.find_first_not_of(" \t\r") == std::string::npos) continue;
    const std::string where = file.filename().string() + " line " + std::to_string(number);
    Result<json> line = engine::parse_json(text, where);
    if (!line) return line.status();
    Result<Problem> problem = read_problem(*line, words ? &*words : nullptr, vocab_size, where);
    if (!problem) return problem.status();
    if (problem->id.empty()) problem->id = "line " + std::to_string(number);
    if (const auto [first, is_new] = lines.emplace(problem->id, number); !is_new)
      return detail::invalid(where, ": id = '", problem->id, "': line ", first->second, " has it, too");
    problems.push_back(std::move(*problem));
  }
  if (problems.empty()) return detail::invalid("--prompts = ", file.string(), ": has no problems");
  return problems;
}

std::vector<Problem> take_evenly(std::vector<Problem> problems, index_t limit) {
  if (limit == 0 || limit >= static_cast<index_t>(problems.size())) return problems;
  std::map<int, index_t> quota;
  for (const Problem& p : problems) quota[p.level] = 0;
  std::map<int, index_t> available;
  for (const Problem& p : problems) ++available[p.level];
  for (index_t left = limit; left > 0;)
    for (auto& [level, count] : quota)
      if (left > 0 && count < available[level]) {
        ++count;
        --left;
      }
  std::vector<Problem> taken;
  for (Problem& p : problems)
    if (quota[p.level]-- > 0) taken.push_back(std::move(p));
  return taken;
}

index_t max_new_of(const Problem& problem, const std::vector<Problem>& all, index_t given) {
  if (given > 0) return given;
  std::size_t longest = 0;
  for (const Problem& p : all)
    if (p.level == problem.level) longest = std::max(longest, p.expected.size());
  return longest > 0 ? static_cast<index_t>(longest) + 24 : 1024;
}

}  // namespace beaconkv::lab
