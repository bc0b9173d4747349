// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// The version of the library: the single place where it is written. CMake reads it from here.

#define BEACONKV_VERSION_MAJOR 0
#define BEACONKV_VERSION_MINOR 1
#define BEACONKV_VERSION_PATCH 0
