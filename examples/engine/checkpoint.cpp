// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "engine/checkpoint.hpp"

#include <utility>

#include "engine/json_file.hpp"

namespace beaconkv::engine {
namespace {

/// The files that an index names, each once. A name with a folder in it is refused: it could lead out of the checkpoint.
Result<std::set<std::string>> indexed_files(const nlohmann::json& index, const std::string& name) {
  const auto weight_map = index.is_object() ? index.find("weight_map") : index.end();
  if (weight_map == index.end() || !weight_map->is_object() || weight_map->empty())
    return detail::invalid(name, ": weight_map is missing or not an object");
  std::set<std::string> files;
  for (const auto& [tensor, file] : weight_map->items()) {
    if (!file.is_string() || file.get_ref<const std::string&>().find_first_of("/\\") != std::string::npos)
      return detail::invalid(name, ": tensor '", tensor, "' lies in ", shown(file),
                             ", must be the name of a file beside the index");
    files.insert(file.get<std::string>());
  }
  return files;
}

}  // namespace

Result<Checkpoint> Checkpoint::open(const std::filesystem::path& directory) {
  Checkpoint opened;
  const std::filesystem::path single = directory / "model.safetensors";
  const std::filesystem::path index = directory / "model.safetensors.index.json";
  if (std::error_code ignored; !std::filesystem::exists(single, ignored) && std::filesystem::exists(index, ignored)) {
    if (Status s = opened.add_indexed_files(index); !s) return s;
  } else {
    if (Status s = opened.add_file(single); !s) return s;
  }
  return opened;
}

Status Checkpoint::add_file(const std::filesystem::path& path) {
  Result<SafetensorsFile> file = SafetensorsFile::open(path);
  if (!file) return file.status();
  if (name_.empty()) name_ = file->name();
  for (const auto& [tensor, info] : file->tensors())
    if (!file_of_.emplace(tensor, files_.size()).second)
      return detail::invalid(file->name(), ": tensor '", tensor, "' is in ", files_[file_of_.find(tensor)->second].name(),
                             " too");
  files_.push_back(std::move(*file));
  return {};
}

Status Checkpoint::add_indexed_files(const std::filesystem::path& index) {
  name_ = index.filename().string();
  const Result<nlohmann::json> json = read_json(index);
  if (!json) return json.status();
  const Result<std::set<std::string>> files = indexed_files(*json, name_);
  if (!files) return files.status();
  for (const std::string& file : *files)
    if (Status s = add_file(index.parent_path() / file); !s) return s;
  return {};
}

Status Checkpoint::expect(std::string_view tensor, std::span<const index_t> shape) const {
  const auto found = file_of_.find(tensor);
  if (found == file_of_.end()) return detail::invalid(name_, ": tensor '", tensor, "' is missing");
  return files_[found->second].expect(tensor, shape);
}

Status Checkpoint::read(std::string_view tensor, float* out) {
  const auto found = file_of_.find(tensor);
  BEACONKV_ASSERT(found != file_of_.end());
  read_.emplace(tensor);
  return files_[found->second].read(tensor, out);
}

std::vector<std::string> Checkpoint::unread() const {
  std::vector<std::string> names;
  for (const auto& [tensor, file] : file_of_)
    if (!read_.contains(tensor)) names.push_back(tensor);
  return names;
}

}  // namespace beaconkv::engine
