// What differs by architecture, for host and device: every other source is the same for all targets.
#pragma once

#include <bit>
#include <cstdint>

#ifdef __CUDACC__
#define NIBBLE_FUNCTION __host__ __device__ __forceinline__
#else
#define NIBBLE_FUNCTION [[gnu::always_inline]] inline
#endif

// CPU loops that gcc compiles once per level and chooses from when the library is loaded (from gcc 12). The
// arithmetic is the same in each: nothing is contracted (setup.py), and std::fma rounds once with or without
// the instruction. NIBBLE_WITHOUT_AVX512 and NIBBLE_WITHOUT_AVX_VNNI leave levels out, for measurements.
#if defined(__x86_64__) && !defined(__clang__) && !defined(__CUDACC__) && __GNUC__ >= 12
#define NIBBLE_HAS_X86_LEVELS 1
#ifdef NIBBLE_WITHOUT_AVX512
#define NIBBLE_HAS_AVX512 0
#define NIBBLE_CPU_LEVELS [[gnu::target_clones("default", "arch=x86-64-v3")]]
#else
#define NIBBLE_HAS_AVX512 1
#define NIBBLE_CPU_LEVELS [[gnu::target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")]]
#endif
#else
#define NIBBLE_HAS_X86_LEVELS 0
#define NIBBLE_HAS_AVX512 0
#define NIBBLE_CPU_LEVELS
#endif
// Tiles need the permission of the system (amx_tiles.h).
#if NIBBLE_HAS_AVX512 && defined(__linux__)
#define NIBBLE_HAS_AMX 1
#else
#define NIBBLE_HAS_AMX 0
#endif

// cvt to and from e2m1x2 exists for the a and f targets of compute capability 10 and later, and not for the
// plain ones (measured with ptxas 13.0: 100a 100f 103a 110a 120a 120f 121a 121f). nvcc 12.8 has only the FEAT
// macros.
#if (defined(__CUDA_ARCH_FAMILY_SPECIFIC__) && __CUDA_ARCH_FAMILY_SPECIFIC__ >= 1000) || \
    (defined(__CUDA_ARCH_SPECIFIC__) && __CUDA_ARCH_SPECIFIC__ >= 1000) ||               \
    defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM101_ALL) ||        \
    defined(__CUDA_ARCH_FEAT_SM120_ALL)
#define NIBBLE_HAS_E2M1_INSTRUCTIONS 1
#else
#define NIBBLE_HAS_E2M1_INSTRUCTIONS 0
#endif

// mma with E2M1 operands under block scales: the a and f targets of compute capability 12 (measured with ptxas
// 13.0: 120a 120f 121a 121f). Its sparse form is for the a targets alone.
#if (defined(__CUDA_ARCH_FAMILY_SPECIFIC__) && __CUDA_ARCH_FAMILY_SPECIFIC__ >= 1200 && \
     __CUDA_ARCH_FAMILY_SPECIFIC__ < 1300) ||                                           \
    defined(__CUDA_ARCH_FEAT_SM120_ALL)
#define NIBBLE_HAS_FP4_PRODUCTS 1
#else
#define NIBBLE_HAS_FP4_PRODUCTS 0
#endif
#if (defined(__CUDA_ARCH_SPECIFIC__) && __CUDA_ARCH_SPECIFIC__ >= 1200 && __CUDA_ARCH_SPECIFIC__ < 1300) || \
    defined(__CUDA_ARCH_FEAT_SM120_ALL)
#define NIBBLE_HAS_SPARSE_FP4_PRODUCTS 1
#else
#define NIBBLE_HAS_SPARSE_FP4_PRODUCTS 0
#endif

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define NIBBLE_HAS_E4M3_INSTRUCTIONS 1
#else
#define NIBBLE_HAS_E4M3_INSTRUCTIONS 0
#endif

namespace nibble {

// The smaller of two numbers, in the form that each compiler makes one instruction of; not for NaN.
NIBBLE_FUNCTION float minimum(float a, float b) {
#ifdef __CUDA_ARCH__
  return fminf(a, b);
#else
  return a < b ? a : b;
#endif
}

// Instructions of the target. Calling one that the target lacks is a mistake of the caller and does not
// compile.
namespace instruction {

#if NIBBLE_HAS_E2M1_INSTRUCTIONS

// Eight floats as E2M1 codes, x[0] in the lowest nibble.
__device__ __forceinline__ uint32_t e2m1_encode8(const float (&x)[8]) {
  uint32_t codes;
  asm("{\n"
      ".reg .b8 b0, b1, b2, b3;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b0, %2, %1;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b1, %4, %3;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b2, %6, %5;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b3, %8, %7;\n"
      "mov.b32 %0, {b0, b1, b2, b3};\n"
      "}"
      : "=r"(codes)
      : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "f"(x[4]), "f"(x[5]), "f"(x[6]), "f"(x[7]));
  return codes;
}

// And back, as four pairs of f16.
__device__ __forceinline__ void e2m1_decode8(uint32_t codes, uint32_t (&pairs)[4]) {
  asm("{\n"
      ".reg .b8 b0, b1, b2, b3;\n"
      "mov.b32 {b0, b1, b2, b3}, %4;\n"
      "cvt.rn.f16x2.e2m1x2 %0, b0;\n"
      "cvt.rn.f16x2.e2m1x2 %1, b1;\n"
      "cvt.rn.f16x2.e2m1x2 %2, b2;\n"
      "cvt.rn.f16x2.e2m1x2 %3, b3;\n"
      "}"
      : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
      : "r"(codes));
}

#endif
#if NIBBLE_HAS_E4M3_INSTRUCTIONS

__device__ __forceinline__ uint32_t e4m3_encode(float x) {
  uint16_t code;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(code) : "f"(0.0f), "f"(x));
  return code;
}

__device__ __forceinline__ float e4m3_decode(uint32_t code) {
  float value;
  asm("{\n"
      ".reg .b32 pair;\n"
      ".reg .b16 low, high;\n"
      "cvt.rn.f16x2.e4m3x2 pair, %1;\n"
      "mov.b32 {low, high}, pair;\n"
      "cvt.f32.f16 %0, low;\n"
      "}"
      : "=f"(value)
      : "h"(static_cast<uint16_t>(code)));
  return value;
}

#endif
#ifdef __CUDACC__

// 1/x within one unit in the last place, subnormal numbers taken as zero.
__device__ __forceinline__ float approximate_reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

#endif
}  // namespace instruction
}  // namespace nibble
