// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "npy.hpp"

#include <algorithm>
#include <bit>
#include <cctype>
#include <cstring>
#include <fstream>
#include <iterator>
#include <optional>
#include <string_view>

namespace beaconkv::conformance {
namespace {

static_assert(std::endian::native == std::endian::little, "the files hold little-endian numbers");

struct Header {
  std::string type;
  std::vector<index_t> shape;
};

/// Parses `{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }`, in any order of its three entries.
class HeaderParser {
 public:
  HeaderParser(std::string_view text, const std::filesystem::path& path) : text_(text), path_(path) {}

  [[nodiscard]] Header parse() {
    std::optional<std::string> type;
    std::optional<std::vector<index_t>> shape;
    bool has_order = false;
    for (const char c : text_)
      if (c != '\n' && (c < ' ' || c > '~')) fail("a character is no ASCII");
    expect('{');
    while (!take('}')) {
      const std::string key = quoted();
      expect(':');
      if (key == "descr" && !type)
        type = quoted();
      else if (key == "shape" && !shape)
        shape = tuple();
      else if (key == "fortran_order" && !has_order)
        has_order = c_order();
      else
        fail("entry '" + key + "' is unknown or there twice");
      if (!take(',')) {
        expect('}');
        break;
      }
    }
    skip_spaces();
    if (at_ != text_.size()) fail("something stands behind the dictionary");
    if (!type || !shape || !has_order) fail("'descr', 'fortran_order' or 'shape' is missing");
    return {*type, *shape};
  }

 private:
  [[noreturn]] void fail(const std::string& what) const { throw InputError(path_.string() + ": bad header: " + what); }

  void skip_spaces() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n')) ++at_;
  }
  [[nodiscard]] bool take(char c) {
    skip_spaces();
    if (at_ == text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  void expect(char c) {
    if (!take(c)) fail(std::string("expected '") + c + "' at character " + std::to_string(at_));
  }
  [[nodiscard]] std::string quoted() {
    expect('\'');
    const std::size_t end = text_.find('\'', at_);
    if (end == std::string_view::npos) fail("a quote is not closed");
    const std::string_view found = text_.substr(at_, end - at_);
    at_ = end + 1;
    return std::string(found);
  }
  [[nodiscard]] bool c_order() {
    skip_spaces();
    if (text_.substr(at_, 5) != "False") fail("'fortran_order' must be False");
    at_ += 5;
    return true;
  }
  [[nodiscard]] std::vector<index_t> tuple() {
    std::vector<index_t> sizes;
    expect('(');
    while (!take(')')) {
      sizes.push_back(number());
      if (!take(',')) {
        expect(')');
        break;
      }
    }
    return sizes;
  }
  [[nodiscard]] index_t number() {
    skip_spaces();
    const std::size_t first = at_;
    index_t value = 0;
    for (; at_ < text_.size() && std::isdigit(static_cast<unsigned char>(text_[at_])) != 0; ++at_) {
      if (at_ - first == 12) fail("a size of 'shape' has more than 12 digits");
      value = value * 10 + (text_[at_] - '0');
    }
    if (at_ == first) fail("a size of 'shape' is no number");
    return value;
  }

  std::string_view text_;
  std::filesystem::path path_;
  std::size_t at_ = 0;
};

/// How many elements the shape has. Refused unless they take exactly `bytes`.
[[nodiscard]] std::size_t checked_count(const Header& header, std::size_t element_size, std::size_t bytes,
                                        const std::filesystem::path& path) {
  const bool is_empty = std::find(header.shape.begin(), header.shape.end(), 0) != header.shape.end();
  std::size_t count = is_empty ? 0 : 1;
  for (const index_t size : header.shape)
    if (count <= bytes) count *= static_cast<std::size_t>(size);  // beyond it the answer is no, and the product could overflow
  if (count > bytes || count * element_size != bytes)
    throw InputError(path.string() + ": shape " + shown(header.shape) + " of '" + header.type + "' does not go with its " +
                     std::to_string(bytes) + " bytes of data: truncated?");
  return count;
}

template <class Stored, class T>
[[nodiscard]] Array<T> convert(const Header& header, std::string_view bytes, const std::filesystem::path& path) {
  Array<T> array{header.shape, std::vector<T>(checked_count(header, sizeof(Stored), bytes.size(), path))};
  for (std::size_t i = 0; i < array.data.size(); ++i) {
    Stored value;
    std::memcpy(&value, bytes.data() + i * sizeof(Stored), sizeof(Stored));
    array.data[i] = static_cast<T>(value);
  }
  return array;
}

}  // namespace

std::string shown(const std::vector<index_t>& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  return text + "]";
}

AnyArray read_npy(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw InputError(path.string() + ": cannot be read");
  const std::string content{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  const std::string_view all = content;
  constexpr std::string_view magic = "\x93NUMPY";
  constexpr std::size_t preamble = 10;  // magic, two bytes of version, two of header length
  if (all.substr(0, magic.size()) != magic) throw InputError(path.string() + ": is no .npy file");
  if (all.size() < preamble) throw InputError(path.string() + ": truncated: " + std::to_string(all.size()) + " bytes");
  if (all[6] != 1 || all[7] != 0)
    throw InputError(path.string() + ": format " + std::to_string(all[6]) + "." + std::to_string(all[7]) +
                     ": only 1.0 is read");
  const std::size_t header_size = static_cast<unsigned char>(all[8]) + std::size_t{256} * static_cast<unsigned char>(all[9]);
  if (all.size() < preamble + header_size) throw InputError(path.string() + ": truncated within its header");

  const Header header = HeaderParser(all.substr(preamble, header_size), path).parse();
  const std::string_view bytes = all.substr(preamble + header_size);
  if (header.type == "<f4") return convert<float, float>(header, bytes, path);
  if (header.type == "<f8") return convert<double, float>(header, bytes, path);
  if (header.type == "<i8") return convert<std::int64_t, std::int64_t>(header, bytes, path);
  if (header.type == "<i4") return convert<std::int32_t, std::int64_t>(header, bytes, path);
  if (header.type == "|b1") return convert<std::uint8_t, std::int64_t>(header, bytes, path);
  throw InputError(path.string() + ": type '" + header.type + "': must be <f4, <f8, <i8, <i4 or |b1");
}

}  // namespace beaconkv::conformance
