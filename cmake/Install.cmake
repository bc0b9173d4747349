# beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(package_dir "${CMAKE_INSTALL_DATADIR}/cmake/beaconkv")
set(pkgconfig_dir "${CMAKE_INSTALL_DATADIR}/pkgconfig")

install(TARGETS beaconkv EXPORT beaconkvTargets FILE_SET HEADERS DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
install(EXPORT beaconkvTargets NAMESPACE beaconkv:: DESTINATION "${package_dir}")

# Before 1.0 a new minor version may break users.
if(PROJECT_VERSION_MAJOR EQUAL 0)
  set(compatibility SameMinorVersion)
else()
  set(compatibility SameMajorVersion)
endif()
configure_package_config_file(cmake/beaconkvConfig.cmake.in beaconkvConfig.cmake INSTALL_DESTINATION "${package_dir}")
write_basic_package_version_file(beaconkvConfigVersion.cmake COMPATIBILITY ${compatibility} ARCH_INDEPENDENT)
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/beaconkvConfig.cmake" "${CMAKE_CURRENT_BINARY_DIR}/beaconkvConfigVersion.cmake"
        DESTINATION "${package_dir}")

# Relative to where the file lies, so that the installed tree can be moved.
file(RELATIVE_PATH pc_to_include "${CMAKE_INSTALL_FULL_DATADIR}/pkgconfig" "${CMAKE_INSTALL_FULL_INCLUDEDIR}")
configure_file(cmake/beaconkv.pc.in beaconkv.pc @ONLY)
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/beaconkv.pc" DESTINATION "${pkgconfig_dir}")

install(FILES LICENSE DESTINATION "${CMAKE_INSTALL_DATADIR}/licenses/beaconkv")
