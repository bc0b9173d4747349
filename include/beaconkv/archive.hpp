// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// State as bytes and back, so that a conversation survives a restart.
///
/// A class with state has one function, `exchange(archive)`, which names its members in order; a `StateWriter` writes them, a
/// `StateReader` reads them, so that saving and loading cannot drift apart. Numbers are stored little-endian on every machine.
/// The first error sticks in the archive and everything after it is skipped: who loads does it into a copy and looks at
/// `status()` before the copy takes the place of what there was.
///
/// `save_framed` and `load_framed` put magic number, format version, length and checksum (FNV-1a, 64 bits) around it, so that
/// damage is found before any of it is believed.

#include <bit>
#include <cstddef>
#include <cstring>
#include <limits>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "beaconkv/types.hpp"

namespace beaconkv::inline v0 {

namespace detail {

template <class T>
concept Stored = std::is_arithmetic_v<T> || std::is_enum_v<T>;

/// The bytes of a number, little-endian, in place.
inline void little_endian([[maybe_unused]] std::byte* bytes, [[maybe_unused]] std::size_t size) noexcept {
  if constexpr (std::endian::native == std::endian::big)
    for (std::size_t i = 0; i < size / 2; ++i) std::swap(bytes[i], bytes[size - 1 - i]);
}

/// FNV-1a over 64 bits: other for any change of a single byte.
[[nodiscard]] inline std::uint64_t checksum(std::span<const std::byte> bytes) noexcept {
  std::uint64_t hash = 0xCBF29CE484222325U;
  for (const std::byte b : bytes) hash = (hash ^ static_cast<std::uint64_t>(b)) * 0x100000001B3U;
  return hash;
}

}  // namespace detail

/// Writes state to the end of a vector, which grows.
class StateWriter {
 public:
  static constexpr bool loading = false;
  explicit StateWriter(std::vector<std::byte>& out) : out_(&out) {}

  /// A number; a reader refuses one outside `[low, high]`.
  template <detail::Stored T>
  void value(const char*, const T& x, std::int64_t = 0, std::int64_t = 0) {
    put(x);
  }
  /// Something that the loading object must have, too: a size, a kind.
  void expect(const char*, std::int64_t x) { put(x); }
  /// As many numbers as the object has room for, or uses.
  template <detail::Stored T>
  void array(const char*, std::span<T> all) {
    put(static_cast<std::uint64_t>(all.size()));
    for (const T& x : all) put(x);
  }
  /// A list of any length up to `most`.
  template <detail::Stored T>
  void list(const char*, const std::vector<T>& all, std::size_t) {
    put(static_cast<std::uint64_t>(all.size()));
    for (const T& x : all) put(x);
  }
  /// Bytes that are stored as they are (elements of a cache).
  void bytes(const void* data, std::size_t size) {
    const auto* const first = static_cast<const std::byte*>(data);
    out_->insert(out_->end(), first, first + size);
  }
  void fail(Status) {}
  [[nodiscard]] bool ok() const noexcept { return true; }

 private:
  template <class T>
  void put(T x) {
    std::byte raw[sizeof(T)];
    std::memcpy(raw, &x, sizeof(T));
    detail::little_endian(raw, sizeof(T));
    out_->insert(out_->end(), raw, raw + sizeof(T));
  }

  std::vector<std::byte>* out_;
};

/// Reads state. Never past the end; counts are checked before anything is written.
class StateReader {
 public:
  static constexpr bool loading = true;
  explicit StateReader(std::span<const std::byte> in) : in_(in) {}

  template <detail::Stored T>
  void value(const char* name, T& x, std::int64_t low = std::numeric_limits<std::int64_t>::min(),
             std::int64_t high = std::numeric_limits<std::int64_t>::max()) {
    T read{};
    if (!get(name, read)) return;
    if constexpr (!std::is_floating_point_v<T> && !std::is_same_v<T, std::uint64_t>) {
      const auto number = static_cast<std::int64_t>(read);
      if (number < low || number > high) return refuse(name, number, low, high);
    }
    x = read;
  }
  void value(const char* name, bool& x) {
    std::uint8_t read = 0;
    value(name, read, 0, 1);
    if (ok()) x = read != 0;
  }
  void expect(const char* name, std::int64_t x) {
    std::int64_t read = 0;
    if (get(name, read) && read != x)
      fail(detail::invalid("saved state: ", name, " = ", read, ": must be ", x, ", as in what it is loaded into"));
  }
  template <detail::Stored T>
  void array(const char* name, std::span<T> all) {
    std::uint64_t size = 0;
    if (!get(name, size)) return;
    if (size != all.size())
      return fail(detail::invalid("saved state: ", name, " has ", size, " entries: must have ", all.size()));
    for (T& x : all) static_cast<void>(get(name, x));
  }
  template <detail::Stored T>
  void list(const char* name, std::vector<T>& all, std::size_t most) {
    std::uint64_t size = 0;
    if (!get(name, size)) return;
    if (size > most || size > left() / sizeof(T))
      return fail(detail::error(StatusCode::damaged, "saved state: ", name, " has ", size, " entries: more than there can be"));
    all.resize(static_cast<std::size_t>(size));
    for (T& x : all) static_cast<void>(get(name, x));
  }
  void bytes(void* data, std::size_t size) {
    if (!has("rows", size)) return;
    if (size > 0) std::memcpy(data, in_.data(), size);
    in_ = in_.subspan(size);
  }
  /// Keeps the first error.
  void fail(Status status) {
    if (ok()) status_ = std::move(status);
  }
  [[nodiscard]] bool ok() const noexcept { return status_.ok(); }
  [[nodiscard]] const Status& status() const noexcept { return status_; }
  /// Bytes not read yet.
  [[nodiscard]] std::size_t left() const noexcept { return in_.size(); }

 private:
  [[nodiscard]] bool has(const char* name, std::size_t size) {
    if (ok() && in_.size() < size)
      fail(detail::error(StatusCode::damaged, "saved state: ends within ", name, ", ", in_.size(), " bytes where ", size,
                         " are needed"));
    return ok();
  }
  template <class T>
  [[nodiscard]] bool get(const char* name, T& x) {
    if (!has(name, sizeof(T))) return false;
    std::byte raw[sizeof(T)];
    std::memcpy(raw, in_.data(), sizeof(T));
    detail::little_endian(raw, sizeof(T));
    std::memcpy(&x, raw, sizeof(T));
    in_ = in_.subspan(sizeof(T));
    return true;
  }
  void refuse(const char* name, std::int64_t x, std::int64_t low, std::int64_t high) {
    fail(detail::error(StatusCode::damaged, "saved state: ", name, " = ", x, ": must be between ", low, " and ", high));
  }

  std::span<const std::byte> in_;
  Status status_;
};

/// Version of the saved format; another one is refused.
inline constexpr std::uint32_t saved_format_version = 1;

namespace detail {

inline constexpr std::uint32_t saved_magic = 0x53564B42;  // "BKVS"
inline constexpr std::size_t saved_header_size = 24;

/// Appends a frame around what `write(StateWriter&)` writes.
template <class Write>
void save_framed(std::vector<std::byte>& out, Write write) {
  std::vector<std::byte> payload;
  StateWriter content(payload);
  write(content);
  StateWriter header(out);
  header.value("magic", saved_magic);
  header.value("version", saved_format_version);
  header.value("length", static_cast<std::uint64_t>(payload.size()));
  header.value("checksum", checksum(payload));
  header.bytes(payload.data(), payload.size());
}

/// Checks the frame and calls `read(StateReader&)` on its content, all of which it must take.
template <class Read>
[[nodiscard]] Status load_framed(std::span<const std::byte> in, Read read) {
  if (in.size() < saved_header_size)
    return error(StatusCode::damaged, "saved state: has ", in.size(), " bytes: a header alone has ", saved_header_size);
  StateReader header(in.first(saved_header_size));
  std::uint32_t magic = 0;
  std::uint32_t version = 0;
  std::uint64_t length = 0;
  std::uint64_t sum = 0;
  header.value("magic", magic);
  header.value("version", version);
  header.value("length", length);
  header.value("checksum", sum);
  if (magic != saved_magic)
    return error(StatusCode::damaged, "saved state: magic number = ", magic, ": this is no saved state");
  if (version != saved_format_version)
    return error(StatusCode::unsupported, "saved state: format version = ", version, ": this library reads version ",
                 saved_format_version);
  const std::span<const std::byte> payload = in.subspan(saved_header_size);
  if (payload.size() != length)
    return error(StatusCode::damaged, "saved state: has ", payload.size(), " bytes behind its header: must have ", length);
  if (checksum(payload) != sum) return error(StatusCode::damaged, "saved state: checksum differs: the bytes were changed");
  StateReader content(payload);
  read(content);
  if (content.ok() && content.left() > 0)
    content.fail(error(StatusCode::damaged, "saved state: ", content.left(), " bytes too many"));
  return content.status();
}

}  // namespace detail
}  // namespace beaconkv::inline v0
