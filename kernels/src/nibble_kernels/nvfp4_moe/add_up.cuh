// After the products of experts: the sum over a token's experts.
#pragma once

#include "nvfp4_linear/output.cuh"

namespace nibble::experts {

// out[token] = the sum of its experts' products, in the order of its choices, rounded once. `at`: a thread's
// eight columns, of `pieces` a row. Products: [pairs, pieces].
template <class T>
__device__ __forceinline__ void add_products(uint32_t at, const int32_t* ids, uint32_t experts,
                                             const uint4* products, uint4* out, uint32_t tokens,
                                             uint32_t topk, uint32_t pieces) {
  const uint32_t token = at / pieces, piece = at - token * pieces;
  if (token >= tokens) return;
  float sums[8] = {};
  for (uint32_t i = 0; i < topk; ++i) {
    const uint32_t pair = token * topk + i;
    if (static_cast<uint32_t>(ids[pair]) >= experts) continue;
    const uint4 more = __ldcg(products + size_t{pair} * pieces + piece);
    const T* const values = reinterpret_cast<const T*>(&more);
#pragma unroll
    for (uint32_t k = 0; k < 8; ++k) sums[k] += warpgroup::to_float(values[k]);
  }
  using warpgroup::pair_of;
  out[at] = make_uint4(pair_of(T(), sums[0], sums[1]), pair_of(T(), sums[2], sums[3]),
                       pair_of(T(), sums[4], sums[5]), pair_of(T(), sums[6], sums[7]));
}

}  // namespace nibble::experts
