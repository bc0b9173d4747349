# beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

# What only our own programs get: warnings, sanitizers, ccache. Nothing here reaches the beaconkv target or a project that uses it.

option(BEACONKV_HARDEN "Keep assertions on in our own programs in every build type, the standard library's too" OFF)
set(BEACONKV_SANITIZE "" CACHE STRING "Build our own programs with these sanitizers: \"address,undefined\" or \"thread\"")

find_program(BEACONKV_CCACHE ccache)
mark_as_advanced(BEACONKV_CCACHE)

set(BEACONKV_WARNINGS -Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow -Werror)

add_library(beaconkv_own_flags INTERFACE)
target_compile_options(beaconkv_own_flags INTERFACE ${BEACONKV_WARNINGS})
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # Wrong inside libstdc++, where sums of strings (GCC bug 105651) and sorts of constants are inlined.
  target_compile_options(beaconkv_own_flags INTERFACE -Wno-restrict -Wno-stringop-overread)
  if(CMAKE_CXX_FLAGS MATCHES "-march=")
    # Wrong inside the intrinsics of AVX-512 (GCC bug 105593), which Eigen uses where the whole program may.
    target_compile_options(beaconkv_own_flags INTERFACE -Wno-maybe-uninitialized)
  endif()
endif()
if(BEACONKV_HARDEN)
  target_compile_options(beaconkv_own_flags INTERFACE -UNDEBUG)
  target_compile_definitions(beaconkv_own_flags INTERFACE _GLIBCXX_ASSERTIONS)
endif()
if(BEACONKV_SANITIZE)
  # Without -fno-sanitize-recover an undefined operation prints a line and the program still exits with 0.
  target_compile_options(beaconkv_own_flags INTERFACE -fsanitize=${BEACONKV_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  target_link_options(beaconkv_own_flags INTERFACE -fsanitize=${BEACONKV_SANITIZE})
  # g++ 12 then sees uninitialized variables inside libstdc++'s <regex>, which Catch2 uses. The other builds keep the warning.
  target_compile_options(beaconkv_own_flags INTERFACE $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
endif()

# beaconkv_own_target(<target>): makes an executable or a library one of ours.
function(beaconkv_own_target target)
  target_link_libraries(${target} PRIVATE beaconkv::beaconkv beaconkv_own_flags)
  set_target_properties(${target} PROPERTIES CXX_EXTENSIONS OFF)
  if(BEACONKV_CCACHE)
    set_target_properties(${target} PROPERTIES CXX_COMPILER_LAUNCHER "${BEACONKV_CCACHE}")
  endif()
endfunction()

# beaconkv_find_eigen(): Eigen3::Eigen, the opponent of the benchmarks and the matrix products of examples/engine. The library itself
# has no use for it. A find_package that names a version cannot do this: "3.4" refuses Eigen 5, and Eigen 3.4.0 refuses the range
# "3.4...5".
macro(beaconkv_find_eigen)
  if(NOT TARGET Eigen3::Eigen)
    find_package(Eigen3 CONFIG REQUIRED)
    if(Eigen3_VERSION VERSION_LESS 3.4)
      message(FATAL_ERROR "benchmarks and examples need Eigen 3.4 or newer, found ${Eigen3_VERSION} in ${Eigen3_DIR}")
    endif()
  endif()
endmacro()

# beaconkv_all_built(<pattern>): each source of this directory that matches is built by the target of its name. A program that nobody
# builds would look like one that works.
function(beaconkv_all_built pattern)
  file(GLOB sources RELATIVE "${CMAKE_CURRENT_SOURCE_DIR}" CONFIGURE_DEPENDS ${pattern})
  foreach(source IN LISTS sources)
    cmake_path(REMOVE_EXTENSION source OUTPUT_VARIABLE name)
    if(NOT TARGET ${name})
      message(FATAL_ERROR "${CMAKE_CURRENT_SOURCE_DIR}/CMakeLists.txt does not build ${source}")
    endif()
  endforeach()
endfunction()
