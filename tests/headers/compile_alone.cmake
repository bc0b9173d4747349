# beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
cmake_minimum_required(VERSION 3.25)

# Compiles each header of INCLUDE_DIR as the only include of a program, with FLAGS, and again behind itself.
file(GLOB_RECURSE headers RELATIVE "${INCLUDE_DIR}" "${INCLUDE_DIR}/*.hpp")
if(NOT headers)
  message(FATAL_ERROR "no headers in ${INCLUDE_DIR}")
endif()

set(failed "")
foreach(header IN LISTS headers)
  file(WRITE "${SCRATCH}" "#include <${header}>\n#include <${header}>\n")
  execute_process(COMMAND "${COMPILER}" -std=c++20 ${FLAGS} "-I${INCLUDE_DIR}" -fsyntax-only "${SCRATCH}"
                  RESULT_VARIABLE result)
  if(NOT result EQUAL 0)
    list(APPEND failed "${header}")
  endif()
endforeach()

list(LENGTH headers count)
message("${count} headers compiled with: ${FLAGS}")
if(failed)
  list(JOIN failed "\n  " failed)
  message(FATAL_ERROR "do not compile alone:\n  ${failed}")
endif()
