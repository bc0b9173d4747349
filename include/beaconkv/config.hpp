// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// The macros that a user may set before including the library.
///
/// * `BEACONKV_ASSERT(condition)`: preconditions of internal functions. By default `assert`, so on in debug builds, and
///   on under AddressSanitizer too.
/// * `BEACONKV_NO_EXCEPTIONS`: set by itself where the compiler has exceptions off. Constructors that throw and
///   `Status::or_throw` do not exist then; `make` functions and `Status` do everything.

#include "beaconkv/version.hpp"

#if !defined(__GNUC__) && !defined(__clang__)
#error "beaconkv needs g++ or clang: its kernels are written with their vector extensions"
#endif

#if !defined(BEACONKV_NO_EXCEPTIONS) && !defined(__cpp_exceptions)
#define BEACONKV_NO_EXCEPTIONS 1
#endif

#ifndef BEACONKV_ASSERT
#if defined(__SANITIZE_ADDRESS__)
#define BEACONKV_DETAIL_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define BEACONKV_DETAIL_ASAN 1
#endif
#endif
#if defined(BEACONKV_DETAIL_ASAN) && defined(NDEBUG)
#include <cstdlib>
#define BEACONKV_ASSERT(condition) ((condition) ? static_cast<void>(0) : std::abort())
#else
#include <cassert>
#define BEACONKV_ASSERT(condition) assert(condition)
#endif
#endif
