// A chunk of a weight, decoded into registers, times x in shared memory: products of a warpgroup.
#pragma once

#include <type_traits>

#include "nvfp4_linear/output.cuh"

namespace nibble::warpgroup {

// Decodes a piece of a tile: two products' a, with the upper half's row and the lower half's.
template <class Operand>
__device__ __forceinline__ void decode_piece(uint32_t upper, uint32_t lower, uint32_t upper_scale,
                                             uint32_t lower_scale, uint32_t (&a)[2][4]) {
  uint32_t u[4], l[4];
  Operand::decode(upper, u);
  Operand::decode(lower, l);
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i) {
    a[i][0] = Operand::multiply(u[2 * i], upper_scale);
    a[i][1] = Operand::multiply(l[2 * i], lower_scale);
    a[i][2] = Operand::multiply(u[2 * i + 1], upper_scale);
    a[i][3] = Operand::multiply(l[2 * i + 1], lower_scale);
  }
}

#if NIBBLE_HAS_WARPGROUP_PRODUCTS

// Registers of a are written again when the products before the latest have read them.
using Operands = uint32_t[2][2][4];

// A chunk of a warpgroup's strips. `codes` and `scales`: of this warp's tile of the first strip; a strip's are
// kWarps tiles further. after_previous() runs when the products of the chunk before are over.
template <class Operand, uint32_t Tokens, uint32_t Strips, class F>
__device__ __forceinline__ void multiply_chunk(SharedPlace codes, SharedPlace scales, SharedPlace x,
                                               Operands& a, float (&sums)[Strips][Tokens / 2],
                                               F&& after_previous) {
  Fragment tiles[Strips];
  uint32_t factors[Strips][4];
#pragma unroll
  for (uint32_t s = 0; s < Strips; ++s) {
    tiles[s] = load_tile(codes + s * kWarps * kCodeBytes, scales + s * kWarps * kScaleBytes);
    Operand::scales(tiles[s].scales, factors[s]);
  }
  const uint64_t b = instruction::operand_in_shared(x, Tokens * 16, kTokenGroup * 16);
#pragma unroll
  for (uint32_t piece = 0; piece < kPieces; ++piece) {
#pragma unroll
    for (uint32_t s = 0; s < Strips; ++s) {
      const uint32_t i = piece * Strips + s;
      uint32_t (&now)[2][4] = a[i % 2];
      instruction::wait_for_products<1>();
      if (i == 1) after_previous();
      decode_piece<Operand>(word(tiles[s].upper, piece), word(tiles[s].lower, piece), factors[s][piece / 2],
                            factors[s][2 + piece / 2], now);
      instruction::begin_products();
#pragma unroll
      for (uint32_t step = 0; step < 2; ++step) {
        instruction::multiply_warpgroup<std::is_same_v<typename Operand::Element, __nv_bfloat16>, Tokens>(
            sums[s], now[step], b + (2 * piece + step) * (2 * Tokens));
      }
      instruction::end_products();
    }
  }
}

#endif
}  // namespace nibble::warpgroup
