# beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

# ARM64 by Debian's cross compiler, run by qemu-user: shows that the kernels are right without any x86 instruction set.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L /usr/aarch64-linux-gnu)

# Header-only libraries of the host, behind the target's own headers.
set(CMAKE_CXX_FLAGS_INIT "-idirafter /usr/include")
list(APPEND CMAKE_CXX_IMPLICIT_INCLUDE_DIRECTORIES /usr/include)
