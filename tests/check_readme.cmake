# beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

# Snippets in README.md and docs/ are marked parts of the examples, which are compiled and run:
#   // docs/integration.md: 3 begin
#   ...
#   // docs/integration.md: 3 end
# (README.md has one part, without a name: `// README: begin`.) Fails where a text does not hold such a part word for word, and
# where a text in docs/ has C++ that no example has.
# cmake -D SOURCE_DIR=<project root> -P check_readme.cmake

cmake_minimum_required(VERSION 3.25)
file(GLOB_RECURSE examples RELATIVE "${SOURCE_DIR}" "${SOURCE_DIR}/examples/*.cpp" "${SOURCE_DIR}/examples/*.hpp")
set(texts "") # that hold a part of an example, once for each
foreach(example IN LISTS examples)
  file(READ "${SOURCE_DIR}/${example}" code)
  while(code MATCHES "\n( *)// (README|docs/[a-z_]+\\.md): ([a-z0-9]+ )?begin\n(.*)")
    set(indent "${CMAKE_MATCH_1}")
    set(text "${CMAKE_MATCH_2}")
    set(name "${CMAKE_MATCH_3}")
    set(code "\n${CMAKE_MATCH_4}")
    string(FIND "${code}" "\n${indent}// ${text}: ${name}end\n" length)
    if(length EQUAL -1)
      message(FATAL_ERROR "${example}: the marker \"${text}: ${name}begin\" has no end")
    endif()
    string(SUBSTRING "${code}" 0 ${length} snippet)
    string(SUBSTRING "${code}" ${length} -1 code)
    string(REPLACE "\n${indent}" "\n" snippet "${snippet}\n")
    string(SUBSTRING "${snippet}" 1 -1 snippet)

    if(text STREQUAL "README")
      set(text "README.md")
    else()
      string(PREPEND snippet "```cpp\n") # all of a block
      string(APPEND snippet "```\n")
    endif()
    file(READ "${SOURCE_DIR}/${text}" content)
    string(FIND "${content}" "${snippet}" found)
    if(found EQUAL -1)
      message(FATAL_ERROR "${text} does not hold this part of ${example} word for word:\n${snippet}")
    endif()
    list(APPEND texts "${text}")
  endwhile()
endforeach()
if(NOT "README.md" IN_LIST texts)
  message(FATAL_ERROR "examples/quickstart.cpp has lost its README markers")
endif()

file(GLOB documents RELATIVE "${SOURCE_DIR}" "${SOURCE_DIR}/docs/*.md")
foreach(document IN LISTS documents)
  file(READ "${SOURCE_DIR}/${document}" content)
  string(REGEX MATCHALL "```cpp\n" blocks "${content}")
  list(LENGTH blocks count)
  set(parts "${texts}")
  list(FILTER parts INCLUDE REGEX "^${document}$")
  list(LENGTH parts marked)
  if(NOT count EQUAL marked)
    message(FATAL_ERROR "${document} has ${count} C++ snippets, but ${marked} parts of examples are marked for it")
  endif()
endforeach()
