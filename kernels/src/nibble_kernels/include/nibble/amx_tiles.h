// AMX: eight tile registers of 16 rows by 64 bytes, and products of tiles. tests/kernels/emulator/nibble/amx_tiles.h
// has the same functions for processors without AMX.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

#include "nibble/amx_shapes.h"

namespace nibble::cpu::tiles {

// Whether this process may use tiles. Linux makes room for them in the threads of processes that ask.
inline bool permitted() {
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
         syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

// Shapes of this thread's tiles, which become zero; and none.
inline void configure(const Shapes& shapes) { asm volatile("ldtilecfg %0" : : "m"(shapes) : "memory"); }
inline void release() { asm volatile("tilerelease" : : : "memory"); }

template <int kTile>
inline void zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
}

// Rows that are `stride` bytes apart.
template <int kTile>
inline void load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(kTile), "r"(from), "r"(stride) : "memory");
}
template <int kTile>
inline void store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(kTile), "r"(to), "r"(stride) : "memory");
}

// sums[m][n] += Σ_k a[m][k] · b[k][n]: `a` has pairs of BF16 side by side, and so has b.
template <int kSums, int kA, int kB>
inline void multiply_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kA), "i"(kB));
}

}  // namespace nibble::cpu::tiles
