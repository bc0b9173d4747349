# beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
cmake_minimum_required(VERSION 3.25)

# What the headers of INCLUDE_DIR include: nothing that costs every user compile time, no Eigen (matrix products are kernels), and
# beaconkv.hpp includes them all (those in detail/ are no user's business).
set(banned "<(iostream|sstream|iomanip|fstream|ranges|functional|regex|random|thread|future|Eigen/.*)>")

set(errors "")
file(GLOB_RECURSE headers RELATIVE "${INCLUDE_DIR}/beaconkv" "${INCLUDE_DIR}/beaconkv/*.hpp")
file(STRINGS "${INCLUDE_DIR}/beaconkv/beaconkv.hpp" umbrella REGEX "^#include")
foreach(header IN LISTS headers)
  file(STRINGS "${INCLUDE_DIR}/beaconkv/${header}" includes REGEX "^ *# *include")
  foreach(line IN LISTS includes)
    if(line MATCHES "${banned}")
      list(APPEND errors "${header}: ${line}: banned in a public header")
    endif()
  endforeach()
  if(NOT header MATCHES "^(beaconkv.hpp|detail/.*)$" AND NOT "#include \"beaconkv/${header}\"" IN_LIST umbrella)
    list(APPEND errors "beaconkv.hpp: does not include ${header}")
  endif()
endforeach()

list(LENGTH headers count)
message("${count} headers checked")
if(errors)
  list(JOIN errors "\n  " errors)
  message(FATAL_ERROR "\n  ${errors}")
endif()
