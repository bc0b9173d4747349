# beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

# One way to use the library (CASE), from nothing, in SCRATCH. See CMakeLists.txt beside this file for the arguments.
cmake_minimum_required(VERSION 3.25)

function(run)
  execute_process(COMMAND ${ARGV} COMMAND_ERROR_IS_FATAL ANY COMMAND_ECHO STDOUT)
endfunction()

set(configure "${CMAKE_COMMAND}" -B "${SCRATCH}" -G "${GENERATOR}" "-DCMAKE_MAKE_PROGRAM=${MAKE_PROGRAM}"
    "-DCMAKE_CXX_COMPILER=${COMPILER}" -DCMAKE_DISABLE_FIND_PACKAGE_Eigen3=ON) # only our benchmarks and examples may look for it

# build_and_run(<project> <configure argument>...)
function(build_and_run project)
  run(${configure} -S "${CMAKE_CURRENT_LIST_DIR}/${project}" ${ARGN})
  run("${CMAKE_COMMAND}" --build "${SCRATCH}")
  run("${SCRATCH}/consumer")
endfunction()

function(must_be_refused version)
  execute_process(COMMAND ${configure} -S "${CMAKE_CURRENT_LIST_DIR}/find_package" "-DCMAKE_PREFIX_PATH=${PREFIX}"
                          -DWANTED_VERSION=${version}
                  RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  # The message names the version that it found: the package was seen, and refused for its version alone.
  if(result EQUAL 0 OR NOT output MATCHES "beaconkvConfig.cmake, version: ${VERSION}")
    message(FATAL_ERROR "find_package(beaconkv ${version}) should be refused by version ${VERSION}; it said:\n${output}")
  endif()
  message("version ${version} is refused")
endfunction()

function(must_not_install_beaconkv)
  run("${CMAKE_COMMAND}" --install "${SCRATCH}" --prefix "${SCRATCH}/prefix")
  file(GLOB_RECURSE installed RELATIVE "${SCRATCH}/prefix" "${SCRATCH}/prefix/*")
  if(NOT installed STREQUAL "bin/consumer")
    message(FATAL_ERROR "installing the project that uses beaconkv installed: ${installed}")
  endif()
endfunction()

file(REMOVE_RECURSE "${SCRATCH}")

if(CASE STREQUAL "install")
  # Installed and then moved, since packages are.
  file(REMOVE_RECURSE "${PREFIX}")
  run("${CMAKE_COMMAND}" --install "${BEACONKV_BINARY_DIR}" --prefix "${SCRATCH}")
  file(RENAME "${SCRATCH}" "${PREFIX}")
elseif(CASE STREQUAL "find_package")
  string(REGEX MATCH "^[0-9]+\\.[0-9]+" major_minor "${VERSION}")
  build_and_run(find_package "-DCMAKE_PREFIX_PATH=${PREFIX}" -DWANTED_VERSION=${major_minor})
elseif(CASE STREQUAL "no_exceptions")
  build_and_run(find_package "-DCMAKE_PREFIX_PATH=${PREFIX}" "-DCMAKE_CXX_FLAGS=-fno-exceptions -fno-rtti")
elseif(CASE STREQUAL "refused_version")
  if(NOT VERSION MATCHES "^0\\.([1-9][0-9]*)\\.")
    message(FATAL_ERROR "from version 1.0 on other versions are refused: adapt this test")
  endif()
  math(EXPR next_minor "${CMAKE_MATCH_1} + 1")
  math(EXPR last_minor "${CMAKE_MATCH_1} - 1")
  foreach(version IN ITEMS 99 1 0.${next_minor} 0.${last_minor})
    must_be_refused(${version})
  endforeach()
elseif(CASE STREQUAL "pkg_config")
  set(ENV{PKG_CONFIG_PATH} "${PREFIX}/share/pkgconfig")
  execute_process(COMMAND "${PKG_CONFIG}" --cflags --libs "beaconkv = ${VERSION}" OUTPUT_VARIABLE flags COMMAND_ERROR_IS_FATAL ANY)
  separate_arguments(flags UNIX_COMMAND "${flags}")
  file(MAKE_DIRECTORY "${SCRATCH}")
  execute_process(COMMAND "${PKG_CONFIG}" --print-requires beaconkv OUTPUT_VARIABLE packages COMMAND_ERROR_IS_FATAL ANY)
  if(packages)
    message(FATAL_ERROR "beaconkv.pc requires other packages: ${packages}")
  endif()
  run("${COMPILER}" -std=c++20 "${CMAKE_CURRENT_LIST_DIR}/main.cpp" ${flags} -o "${SCRATCH}/consumer")
  run("${SCRATCH}/consumer")
elseif(CASE STREQUAL "single_header")
  run("${CMAKE_COMMAND}" -D "OUTPUT=${SCRATCH}/beaconkv/beaconkv.hpp" -P "${BEACONKV_SOURCE_DIR}/cmake/single_header.cmake")
  run("${COMPILER}" -std=c++20 "${CMAKE_CURRENT_LIST_DIR}/main.cpp" "-I${SCRATCH}" -o "${SCRATCH}/consumer")
  run("${SCRATCH}/consumer")
elseif(CASE STREQUAL "add_subdirectory")
  build_and_run(add_subdirectory "-DBEACONKV_SOURCE_DIR=${BEACONKV_SOURCE_DIR}")
  must_not_install_beaconkv()
elseif(CASE STREQUAL "fetch_content")
  build_and_run(add_subdirectory "-DBEACONKV_SOURCE_DIR=${BEACONKV_SOURCE_DIR}" -DWITH_FETCH_CONTENT=ON)
  must_not_install_beaconkv()
else()
  message(FATAL_ERROR "no such case: '${CASE}'")
endif()
