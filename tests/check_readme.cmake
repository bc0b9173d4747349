# beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

# README's snippet is the marked part of examples/quickstart.cpp, which is compiled and run. Fails where they differ.
# cmake -D SOURCE_DIR=<project root> -P check_readme.cmake
file(READ "${SOURCE_DIR}/README.md" readme)
file(READ "${SOURCE_DIR}/examples/quickstart.cpp" example)

string(FIND "${example}" "  // README: begin\n" first)
string(FIND "${example}" "  // README: end\n" last)
if(first EQUAL -1 OR last EQUAL -1)
  message(FATAL_ERROR "examples/quickstart.cpp has lost its README markers")
endif()
math(EXPR first "${first} + 19")
math(EXPR length "${last} - ${first}")
string(SUBSTRING "${example}" ${first} ${length} snippet)
string(REGEX REPLACE "^  " "" snippet "${snippet}")
string(REPLACE "\n  " "\n" snippet "${snippet}")

string(FIND "${readme}" "${snippet}" found)
if(found EQUAL -1)
  message(FATAL_ERROR "README.md does not hold this part of examples/quickstart.cpp word for word:\n${snippet}")
endif()
