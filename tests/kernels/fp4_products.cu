// A kernel for each product of nibble/mma_fp4.cuh, whose machine code test_fp4_instructions.py reads.
#include "nibble/mma_fp4.cuh"

__global__ void dense_product(const uint32_t (*a)[4], const uint32_t (*b)[2], const uint32_t* scales, float (*sum)[4]) {
  const uint32_t lane = threadIdx.x;
  nibble::instruction::mma_fp4<1, 3>(sum[lane], a[lane], b[lane], scales[lane], scales[32 + lane]);
}

__global__ void sparse_product(const uint32_t (*a)[4], const uint32_t (*b)[4], const uint32_t* places,
                               const uint32_t* scales, float (*sum)[4]) {
  const uint32_t lane = threadIdx.x;
  nibble::instruction::mma_fp4_sparse<1, 3>(sum[lane], a[lane], b[lane], places[lane], scales[lane],
                                            scales[32 + lane]);
}
