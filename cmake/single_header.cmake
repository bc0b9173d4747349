# beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

# Writes the whole library as one header:  cmake -D OUTPUT=beaconkv.hpp -P cmake/single_header.cmake
cmake_minimum_required(VERSION 3.25)

set(include_dir "${CMAKE_CURRENT_LIST_DIR}/../include")
set(license_line "// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT\n")

# The text of a header with the library's own headers in place of their includes; empty where it already came.
function(inlined header result)
  get_property(done GLOBAL PROPERTY done_headers)
  if(header IN_LIST done)
    set(${result} "" PARENT_SCOPE)
    return()
  endif()
  set_property(GLOBAL APPEND PROPERTY done_headers "${header}")

  file(READ "${include_dir}/${header}" rest)
  string(REPLACE "#pragma once\n" "" rest "${rest}")
  string(REPLACE "${license_line}" "" rest "${rest}")
  set(text "")
  while(rest MATCHES "\n#include \"(beaconkv/[a-z0-9_/]+\\.hpp)\"")
    set(line "${CMAKE_MATCH_0}")
    inlined("${CMAKE_MATCH_1}" inner)
    string(FIND "${rest}" "${line}" start)
    string(SUBSTRING "${rest}" 0 ${start} before)
    string(LENGTH "${line}" length)
    math(EXPR end "${start} + ${length}")
    string(SUBSTRING "${rest}" ${end} -1 rest)
    string(APPEND text "${before}${inner}")
  endwhile()
  set(${result} "${text}${rest}" PARENT_SCOPE)
endfunction()

inlined(beaconkv/beaconkv.hpp text)
file(READ "${CMAKE_CURRENT_LIST_DIR}/../LICENSE" license)
file(WRITE "${OUTPUT}" "${license_line}\n/* Generated from beaconkv's headers.\n\n${license}*/\n#pragma once\n${text}")
