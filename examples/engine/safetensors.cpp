// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "engine/safetensors.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <system_error>
#include <utility>

#include "beaconkv/memory/codec.hpp"
#include "engine/json_file.hpp"

namespace beaconkv::engine {
namespace {

using nlohmann::json;

constexpr std::uint64_t max_header_bytes = 100'000'000;  // the format's own limit

/// Bytes of one element; 0 for a type that is not known here.
std::uint64_t bytes_of(std::string_view dtype) {
  static constexpr auto sizes = std::to_array<std::pair<std::string_view, std::uint64_t>>({
      {"F64", 8},
      {"F32", 4},
      {"F16", 2},
      {"BF16", 2},
      {"F8_E4M3", 1},
      {"F8_E5M2", 1},
      {"I64", 8},
      {"U64", 8},
      {"I32", 4},
      {"U32", 4},
      {"I16", 2},
      {"U16", 2},
      {"I8", 1},
      {"U8", 1},
      {"BOOL", 1},
  });
  const auto* const found = std::find_if(sizes.begin(), sizes.end(), [&](const auto& entry) { return entry.first == dtype; });
  return found == sizes.end() ? 0 : found->second;
}

template <class Word>
Word little_endian(const unsigned char* bytes) {
  Word word = 0;
  for (std::size_t i = 0; i < sizeof(Word); ++i) word = static_cast<Word>(word | static_cast<Word>(bytes[i]) << (8 * i));
  return word;
}

float element(const unsigned char* bytes, float /*type*/) { return std::bit_cast<float>(little_endian<std::uint32_t>(bytes)); }
float element(const unsigned char* bytes, float16 /*type*/) { return decode(float16{little_endian<std::uint16_t>(bytes)}); }
float element(const unsigned char* bytes, bfloat16 /*type*/) { return decode(bfloat16{little_endian<std::uint16_t>(bytes)}); }

template <class T>
float* decode_all(std::span<const unsigned char> bytes, float* out) {
  for (std::size_t at = 0; at < bytes.size(); at += sizeof(T)) *out++ = element(bytes.data() + at, T{});
  return out;
}

float* decode_all(std::string_view dtype, std::span<const unsigned char> bytes, float* out) {
  if (dtype == "F16") return decode_all<float16>(bytes, out);
  if (dtype == "BF16") return decode_all<bfloat16>(bytes, out);
  return decode_all<float>(bytes, out);
}

bool is_count(const json& value) {
  return value.is_number_unsigned() && value.get<std::uint64_t>() <= std::uint64_t{std::numeric_limits<std::int64_t>::max()};
}

std::string shape_text(std::span<const index_t> shape) {
  std::string text = "[";
  for (const index_t size : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

/// Bytes that `shape` and `dtype` need, or nothing where that is more than `limit`.
std::optional<std::uint64_t> bytes_needed(std::span<const index_t> shape, std::uint64_t element_bytes, std::uint64_t limit) {
  std::uint64_t bytes = element_bytes;
  for (const index_t size : shape) {
    const auto n = static_cast<std::uint64_t>(size);
    if (n != 0 && bytes > limit / n) return {};
    bytes *= n;
  }
  return bytes;
}

/// One entry of the header; `where` begins the messages.
Result<TensorInfo> parse_entry(const json& entry, std::uint64_t data_bytes, const std::string& where) {
  const auto field = [&](const char* name) -> const json& {
    static const json missing;
    return entry.is_object() && entry.contains(name) ? entry[name] : missing;
  };
  const json& dtype = field("dtype");
  const json& shape = field("shape");
  const json& offsets = field("data_offsets");
  if (!dtype.is_string()) return detail::invalid(where, " has dtype ", shown(dtype), ", must be a text");
  if (!shape.is_array() || !std::all_of(shape.begin(), shape.end(), is_count))
    return detail::invalid(where, " has shape ", shown(shape), ", must be a list of sizes");
  if (!offsets.is_array() || offsets.size() != 2 || !std::all_of(offsets.begin(), offsets.end(), is_count))
    return detail::invalid(where, " has data_offsets ", shown(offsets), ", must be two byte offsets");

  TensorInfo info{.dtype = dtype.get<std::string>(),
                  .shape = shape.get<std::vector<index_t>>(),
                  .begin = offsets[0].get<std::uint64_t>(),
                  .end = offsets[1].get<std::uint64_t>()};
  if (info.begin > info.end)
    return detail::invalid(where, " has data_offsets ", shown(offsets), ": the end is before the start");
  if (info.end > data_bytes)
    return detail::invalid(where, " ends at data byte ", info.end, ", the file has ", data_bytes,
                           " after its header: is it truncated?");
  const std::uint64_t element_bytes = bytes_of(info.dtype);
  if (element_bytes != 0 && bytes_needed(info.shape, element_bytes, data_bytes) != info.end - info.begin)
    return detail::invalid(where, " has shape ", shown(shape), " of ", info.dtype, ", but ", info.end - info.begin, " bytes");
  return info;
}

}  // namespace

Result<SafetensorsFile> SafetensorsFile::open(const std::filesystem::path& path) {
  SafetensorsFile opened;
  opened.name_ = path.filename().string();
  if (Status s = opened.read_header(path); !s) return s;
  return opened;
}

Status SafetensorsFile::read_header(const std::filesystem::path& path) {
  std::error_code failed;
  if (!std::filesystem::is_regular_file(path, failed)) return detail::invalid("no such file: ", path.string());
  const std::uint64_t file_bytes = std::filesystem::file_size(path, failed);
  if (failed) return detail::invalid(path.string(), ": ", failed.message());
  if (file_bytes < 8) return detail::invalid(name_, ": ", file_bytes, " bytes, too short for a safetensors file");
  file_.open(path, std::ios::binary);
  std::array<unsigned char, 8> length_bytes{};
  if (!file_.read(reinterpret_cast<char*>(length_bytes.data()), 8)) return detail::invalid("cannot read ", path.string());

  const auto header_bytes = little_endian<std::uint64_t>(length_bytes.data());
  if (header_bytes > max_header_bytes || header_bytes > file_bytes - 8)
    return detail::invalid(name_, ": says that its header has ", header_bytes, " bytes, the file has ", file_bytes,
                           ": truncated, or not a safetensors file");
  std::string text(static_cast<std::size_t>(header_bytes), '\0');
  if (!file_.read(text.data(), static_cast<std::streamsize>(header_bytes)))
    return detail::invalid("cannot read ", path.string());
  data_start_ = 8 + header_bytes;

  const Result<json> header = parse_json(text, name_ + ": header");
  if (!header) return header.status();
  if (!header->is_object()) return detail::invalid(name_, ": header is ", shown(*header), ", must be an object");
  for (const auto& [tensor, entry] : header->items()) {
    if (tensor == "__metadata__") continue;
    Result<TensorInfo> info = parse_entry(entry, file_bytes - data_start_, name_ + ": tensor '" + tensor + "'");
    if (!info) return info.status();
    tensors_.emplace(tensor, std::move(*info));
  }
  return check_layout(file_bytes - data_start_);
}

Status SafetensorsFile::check_layout(std::uint64_t data_bytes) const {
  using Entry = std::pair<const std::string, TensorInfo>;
  std::vector<const Entry*> order;
  for (const Entry& entry : tensors_) order.push_back(&entry);
  std::sort(order.begin(), order.end(), [](const Entry* a, const Entry* b) {
    return std::pair(a->second.begin, a->second.end) < std::pair(b->second.begin, b->second.end);
  });
  std::uint64_t covered = 0;
  for (const Entry* entry : order) {
    if (entry->second.begin != covered)
      return detail::invalid(name_, ": tensor '", entry->first, "' begins at data byte ", entry->second.begin,
                             ", the tensor before it ends at ", covered);
    covered = entry->second.end;
  }
  if (covered != data_bytes)
    return detail::invalid(name_, ": its tensors have ", covered, " bytes, the file has ", data_bytes, " after its header");
  return {};
}

Status SafetensorsFile::expect(std::string_view tensor, std::span<const index_t> shape) const {
  const auto found = tensors_.find(tensor);
  if (found == tensors_.end()) return detail::invalid(name_, ": tensor '", tensor, "' is missing");
  const TensorInfo& info = found->second;
  if (!std::equal(shape.begin(), shape.end(), info.shape.begin(), info.shape.end()))
    return detail::invalid(name_, ": tensor '", tensor, "' has shape ", shape_text(info.shape), ", config.json needs ",
                           shape_text(shape));
  if (info.dtype != "F32" && info.dtype != "F16" && info.dtype != "BF16")
    return detail::error(StatusCode::unsupported, name_, ": tensor '", tensor, "' has dtype ", info.dtype,
                         ", supported are F32, F16 and BF16");
  return {};
}

Status SafetensorsFile::read(std::string_view tensor, float* out) {
  const auto found = tensors_.find(tensor);
  BEACONKV_ASSERT(found != tensors_.end());
  const TensorInfo& info = found->second;
  std::vector<unsigned char> piece(static_cast<std::size_t>(std::min<std::uint64_t>(info.end - info.begin, 1U << 20)));
  file_.clear();
  file_.seekg(static_cast<std::streamoff>(data_start_ + info.begin));
  for (std::uint64_t left = info.end - info.begin; left > 0;) {
    const auto count = static_cast<std::size_t>(std::min<std::uint64_t>(left, piece.size()));
    if (!file_.read(reinterpret_cast<char*>(piece.data()), static_cast<std::streamsize>(count)))
      return detail::invalid(name_, ": cannot read tensor '", tensor, "'");
    out = decode_all(info.dtype, std::span<const unsigned char>(piece).first(count), out);
    left -= count;
  }
  return {};
}

}  // namespace beaconkv::engine
