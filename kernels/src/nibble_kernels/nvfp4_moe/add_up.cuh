// After the products of experts: the sum over a token's experts.
#pragma once

#include "nvfp4_linear/output.cuh"
#include "nvfp4_moe/chosen.cuh"

namespace nibble::experts {

constexpr uint32_t kChoicesAtOnce = 12;  // their loads are under way together
// Blocks on a multiprocessor: with more, threads have too few registers for that.
constexpr uint32_t kSumThreads = 128, kSumBlocks = 4;

// out[token] = the sum of its experts' products, in the order of its choices, rounded once. `at`: a thread's
// eight columns, of `pieces` a row. Products: [pairs, pieces].
template <class T>
__device__ __forceinline__ void add_products(uint32_t at, const Chosen& chosen, const uint4* products,
                                             uint4* out, uint32_t tokens, uint32_t pieces) {
  const uint32_t token = at / pieces, piece = at - token * pieces, pairs = chosen.pairs_of_token();
  if (token >= tokens) return;
  float sums[8] = {};
  for (uint32_t begin = 0; begin < pairs; begin += kChoicesAtOnce) {
    const uint32_t first = token * pairs + begin;
    bool is_here[kChoicesAtOnce];
    uint4 more[kChoicesAtOnce];
#pragma unroll
    for (uint32_t i = 0; i < kChoicesAtOnce; ++i)
      is_here[i] = begin + i < pairs && chosen.expert_of(token, begin + i) >= 0;
#pragma unroll
    for (uint32_t i = 0; i < kChoicesAtOnce; ++i) {
      more[i] = make_uint4(0, 0, 0, 0);  // adds nothing
      if (is_here[i]) more[i] = __ldcg(products + size_t{first + i} * pieces + piece);
    }
#pragma unroll
    for (uint32_t i = 0; i < kChoicesAtOnce; ++i) {
      const T* const values = reinterpret_cast<const T*>(&more[i]);
#pragma unroll
      for (uint32_t k = 0; k < 8; ++k) sums[k] += warpgroup::to_float(values[k]);
    }
  }
  using warpgroup::pair_of;
  out[at] = make_uint4(pair_of(T(), sums[0], sums[1]), pair_of(T(), sums[2], sums[3]),
                       pair_of(T(), sums[4], sums[5]), pair_of(T(), sums[6], sums[7]));
}

}  // namespace nibble::experts
