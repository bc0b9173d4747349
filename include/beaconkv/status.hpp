// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// How the library reports what went wrong: `Status` and `Result<T>`.
///
/// Everything that a caller can get wrong at run time (a budget that cannot work, a wrong shape, a plan for an older
/// cache) comes back as a `Status` whose message names the argument and its value, before anything is changed.

#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "beaconkv/config.hpp"
#ifndef BEACONKV_NO_EXCEPTIONS
#include <stdexcept>
#endif

namespace beaconkv::inline v0 {

/// The kind of an error, for programs; the message is for people.
enum class StatusCode : std::uint8_t {
  ok,
  invalid_argument,     ///< an option, a shape or a value that cannot work
  out_of_order,         ///< a position that runs backwards, a call in the wrong order
  out_of_capacity,      ///< the memory given does not hold what it should
  workspace_too_small,  ///< the workspace is smaller than the matching `workspace_size` said
  stale_plan,           ///< a plan made for another state of the cache
  damaged,              ///< saved bytes that are not what was saved
  unsupported,          ///< a combination that the library refuses by design
};

#ifndef BEACONKV_NO_EXCEPTIONS
/// What the throwing constructors and `Status::or_throw` throw.
class Error : public std::runtime_error {
 public:
  Error(StatusCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  [[nodiscard]] StatusCode code() const noexcept { return code_; }

 private:
  StatusCode code_;
};
#endif

/// Success, or an error code with a message. Success does not allocate.
class [[nodiscard]] Status {
 public:
  Status() noexcept = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  [[nodiscard]] bool ok() const noexcept { return code_ == StatusCode::ok; }
  explicit operator bool() const noexcept { return ok(); }
  [[nodiscard]] StatusCode code() const noexcept { return code_; }
  [[nodiscard]] const std::string& message() const noexcept { return message_; }

#ifndef BEACONKV_NO_EXCEPTIONS
  /// Throws `Error` unless ok: for callers who prefer exceptions.
  void or_throw() const {
    if (!ok()) throw Error(code_, message_);
  }
#endif

 private:
  StatusCode code_ = StatusCode::ok;
  std::string message_;
};

/// A value, or the status that says why there is none.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}       // NOLINT: a value is a result
  Result(Status error) : status_(std::move(error)) {  // NOLINT: so is an error
    BEACONKV_ASSERT(!status_.ok());
  }

  [[nodiscard]] bool ok() const noexcept { return value_.has_value(); }
  explicit operator bool() const noexcept { return ok(); }
  [[nodiscard]] const Status& status() const noexcept { return status_; }

  /// Precondition: `ok()`.
  [[nodiscard]] T& operator*() noexcept {
    BEACONKV_ASSERT(ok());
    return *value_;
  }
  [[nodiscard]] const T& operator*() const noexcept {
    BEACONKV_ASSERT(ok());
    return *value_;
  }
  [[nodiscard]] T* operator->() noexcept { return &**this; }
  [[nodiscard]] const T* operator->() const noexcept { return &**this; }

#ifndef BEACONKV_NO_EXCEPTIONS
  /// The value; throws `Error` where there is none.
  T or_throw() && {
    status_.or_throw();
    return std::move(*value_);
  }
#endif

 private:
  std::optional<T> value_;
  Status status_;
};

namespace detail {

inline void append(std::string& out, std::string_view text) { out += text; }
template <class N>
requires std::is_arithmetic_v<N>
void append(std::string& out, N number) {
  if constexpr (std::is_floating_point_v<N>) {  // std::to_string would show 1e-9 as 0
    char text[32];
    std::snprintf(text, sizeof text, "%g", static_cast<double>(number));
    out += text;
  } else {
    out += std::to_string(number);
  }
}

/// One message from texts and numbers: `error(code, "budget.max = ", max, ": must be positive")`.
template <class... Parts>
[[nodiscard]] Status error(StatusCode code, const Parts&... parts) {
  std::string message;
  (append(message, parts), ...);
  return Status(code, std::move(message));
}
template <class... Parts>
[[nodiscard]] Status invalid(const Parts&... parts) {
  return error(StatusCode::invalid_argument, parts...);
}

}  // namespace detail
}  // namespace beaconkv::inline v0
