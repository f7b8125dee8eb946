// Products of E2M1 matrices under E4M3 block scales on tensor cores: SM12x's instructions, and an exact
// emulation by f16 products elsewhere, so that one source runs on every target and on the host.
//
// Fragments, as PTX has them. Lane l has q = l / 4 and c = l % 4; nibble n of a register is bits 4 n.
//   a, register r       row q + 8 (r % 2), column 32 (r / 2) + 8 c + n
//   b, register j       column q of b, its row 32 j + 8 c + n
//   sum 0, 1; 2, 3      rows q; q + 8, columns 2 c and 2 c + 1
//   scale_a, byte j     of columns 16 j to 16 j + 15: row q in lane 4 q + 2 LaneA, row q + 8 in the next one
//   scale_b, byte j     of rows 16 j to 16 j + 15 of b: column q in lane 4 q + LaneB
// Sparse: a has 128 columns. Of four neighbouring pairs two are stored, their numbers in `places`.
//   a, register r       row q + 8 (r % 2), the stored of columns 64 (r / 2) + 16 c to + 15
//   places, lane        row q + 8 (c % 2), columns 64 (c / 2) to + 63: four bits for eight columns, the
//                       number of the first stored pair in the lower two
//   b, register j < 4   as above; a byte of a scale is for 32 columns
//
// The emulation multiplies codes by their scales in f16, exactly, and adds up in float32: only the order and
// the rounding of these additions can differ from the instruction's. Scales are unsigned: their sign bit is
// ignored.
#pragma once

#include "nibble/tensor_core.cuh"

namespace nibble {

struct EmulatedFp4 {
  // sum += a b, a [16, 64], b [64, 8].
  template <uint32_t LaneA, uint32_t LaneB>
  static __device__ __forceinline__ void mma(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                             uint32_t scale_a, uint32_t scale_b) {
    const uint32_t lane = threadIdx.x % 32, first = lane / 4 * 4, c = lane % 4;
    const Scales scales = scales_of<LaneA, LaneB>(scale_a, scale_b);
    float part[4] = {};
#pragma unroll
    for (uint32_t j = 0; j < 4; ++j) {
      // A block's 16 columns are in two lanes. Which of them are neighbours in a product does not matter.
      const uint32_t from = first + j % 2 * 2 + c / 2, k = j / 2 * 2, shift = c % 2 * 16;
      const uint32_t upper = __shfl_sync(~0u, a[k], from) >> shift,
                     lower = __shfl_sync(~0u, a[k + 1], from) >> shift,
                     token = __shfl_sync(~0u, b[j / 2], from) >> shift;
      multiply(part, upper, lower, token, scales, j);
    }
    add(sum, part);
  }

  // sum += a b, a [16, 128] sparse, b [128, 8].
  template <uint32_t LaneA, uint32_t LaneB>
  static __device__ __forceinline__ void mma_sparse(float (&sum)[4], const uint32_t (&a)[4],
                                                    const uint32_t (&b)[4], uint32_t places, uint32_t scale_a,
                                                    uint32_t scale_b) {
    const uint32_t lane = threadIdx.x % 32, first = lane / 4 * 4, c = lane % 4;
    const Scales scales = scales_of<LaneA, LaneB>(scale_a, scale_b);
    float part[4] = {};
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t upper_places = __shfl_sync(~0u, places, first + 2 * half) >> 8 * c,
                     lower_places = __shfl_sync(~0u, places, first + 2 * half + 1) >> 8 * c;
#pragma unroll
      for (uint32_t group = 0; group < 2; ++group) {
        // b's rows for columns 64 half + 16 c + 8 group to + 7 of a.
        const uint32_t from = first + c % 2 * 2 + group;
        const uint32_t low = __shfl_sync(~0u, b[2 * half], from), high = __shfl_sync(~0u, b[2 * half + 1], from);
        const uint32_t token = c / 2 ? high : low;
        const uint32_t upper = dense(a[2 * half] >> 16 * group, upper_places >> 4 * group),
                       lower = dense(a[2 * half + 1] >> 16 * group, lower_places >> 4 * group);
#pragma unroll
        for (uint32_t shift = 0; shift < 32; shift += 16)
          multiply(part, upper >> shift, lower >> shift, token >> shift, scales, 2 * half + c / 2);
      }
    }
    add(sum, part);
  }

 private:
  struct Scales {
    uint32_t upper, lower, token;
  };

  template <uint32_t LaneA, uint32_t LaneB>
  static __device__ __forceinline__ Scales scales_of(uint32_t scale_a, uint32_t scale_b) {
    static_assert(LaneA < 2 && LaneB < 4);
    const uint32_t first = threadIdx.x % 32 / 4 * 4;
    return {__shfl_sync(~0u, scale_a, first + 2 * LaneA), __shfl_sync(~0u, scale_a, first + 2 * LaneA + 1),
            __shfl_sync(~0u, scale_b, first + LaneB)};
  }

  // Eight codes of which two pairs are stored.
  static __device__ __forceinline__ uint32_t dense(uint32_t stored, uint32_t places) {
    return (stored & 255) << 8 * (places & 3) | (stored >> 8 & 255) << 8 * (places >> 2 & 3);
  }

  // Two codes as f16, 2^-14 of their values.
  static __device__ __forceinline__ uint32_t pair_of(uint32_t codes) {
    const uint32_t apart = (codes & 0xf) | (codes & 0xf0) << 12;
    return (apart & 0x00080008) << 12 | (apart & 0x00070007) << 9;
  }

  static __device__ __forceinline__ uint32_t scale_of(uint32_t scales, uint32_t j) {
    const uint32_t byte = scales >> 8 * j & 0x7f;
    return instruction::e4m3_pair(byte | byte << 8);
  }

  // Four codes of each row, and their scales.
  static __device__ __forceinline__ void multiply(float (&part)[4], uint32_t upper, uint32_t lower,
                                                  uint32_t token, const Scales& scales, uint32_t j) {
    const uint32_t of_upper = scale_of(scales.upper, j), of_lower = scale_of(scales.lower, j),
                   of_token = scale_of(scales.token, j);
    using instruction::multiply_halves;
    instruction::mma_halves(part, multiply_halves(pair_of(upper), of_upper),
                            multiply_halves(pair_of(lower), of_lower),
                            multiply_halves(pair_of(upper >> 8), of_upper),
                            multiply_halves(pair_of(lower >> 8), of_lower),
                            multiply_halves(pair_of(token), of_token),
                            multiply_halves(pair_of(token >> 8), of_token));
  }

  static __device__ __forceinline__ void add(float (&sum)[4], const float (&part)[4]) {
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) sum[i] += part[i] * 0x1p28f;
  }
};

namespace instruction {

template <uint32_t LaneA, uint32_t LaneB>
__device__ __forceinline__ void mma_fp4(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                        uint32_t scale_a, uint32_t scale_b) {
#if NIBBLE_HAS_FP4_PRODUCTS
  asm("mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, %10, {0, %12}, %11, {0, %13};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(scale_a), "r"(scale_b),
        "n"(LaneA), "n"(LaneB));
#else
  EmulatedFp4::mma<LaneA, LaneB>(sum, a, b, scale_a, scale_b);
#endif
}

template <uint32_t LaneA, uint32_t LaneB>
__device__ __forceinline__ void mma_fp4_sparse(float (&sum)[4], const uint32_t (&a)[4],
                                               const uint32_t (&b)[4], uint32_t places, uint32_t scale_a,
                                               uint32_t scale_b) {
#if NIBBLE_HAS_SPARSE_FP4_PRODUCTS
  asm("mma.sync.aligned.kind::mxf4nvf4.sp::ordered_metadata.block_scale.scale_vec::4X.m16n8k128.row.col.f32."
      "e2m1.e2m1.f32.ue4m3 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, 0, "
      "%13, {0, %15}, %14, {0, %16};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(places),
        "r"(scale_a), "r"(scale_b), "n"(LaneA), "n"(LaneB));
#else
  EmulatedFp4::mma_sparse<LaneA, LaneB>(sum, a, b, places, scale_a, scale_b);
#endif
}

}  // namespace instruction
}  // namespace nibble
