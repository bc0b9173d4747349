# beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

# Runs PROGRAM with each number of RANKS (separated by commas). CASE agree: it succeeds, and its line "kept sets" is the same for all.
# CASE refused: it fails, and every rank says why.
# cmake -D MPIEXEC=mpirun -D MPIEXEC_FLAG=-n -D PROGRAM=... -D CASE=... -D RANKS=... -P check_ranks.cmake
string(REPLACE "," ";" RANKS "${RANKS}")
set(first "")
foreach(ranks IN LISTS RANKS)
  execute_process(
    COMMAND "${MPIEXEC}" ${MPIEXEC_FLAG} ${ranks} "${PROGRAM}"
    RESULT_VARIABLE result
    OUTPUT_VARIABLE output
    ERROR_VARIABLE output
    TIMEOUT 50)
  message("${output}")
  if(CASE STREQUAL "refused")
    if(result EQUAL 0)
      message(FATAL_ERROR "${ranks} ranks: not refused")
    endif()
    math(EXPR last "${ranks} - 1")
    foreach(rank RANGE ${last})
      if(NOT output MATCHES "rank ${rank}: ${ranks} ranks: must divide the layer's 4 KV heads")
        message(FATAL_ERROR "${ranks} ranks: rank ${rank} does not say why (result ${result})")
      endif()
    endforeach()
  else()
    if(NOT result EQUAL 0)
      message(FATAL_ERROR "${ranks} ranks: failed with ${result}")
    endif()
    if(NOT output MATCHES "ranks: ${ranks}," OR NOT output MATCHES "all ranks keep the same tokens as one rank")
      message(FATAL_ERROR "${ranks} ranks: did not report")
    endif()
    if(NOT output MATCHES "kept sets: [0-9a-f]+")
      message(FATAL_ERROR "${ranks} ranks: no kept sets")
    endif()
    if(first STREQUAL "")
      set(first "${CMAKE_MATCH_0}")
    elseif(NOT CMAKE_MATCH_0 STREQUAL first)
      message(FATAL_ERROR "${ranks} ranks: ${CMAKE_MATCH_0}, but others ${first}")
    endif()
  endif()
endforeach()
