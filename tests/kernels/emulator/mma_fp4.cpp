// The emulation of FP4 products, run on the host: test_mma_fp4_on_the_host.py.
#include "nibble/mma_fp4.cuh"
#include "run_cluster.h"

namespace {

template <uint32_t LaneA, uint32_t LaneB>
void multiply(bool sparse, const uint32_t* a, const uint32_t* b, const uint32_t* places,
              const uint32_t* scale_a, const uint32_t* scale_b, float* sum) {
  run_cluster(1, 32, 16, 0, 1, [&](uint4*) {
    const uint32_t lane = threadIdx.x;
    uint32_t own_a[4], own_b[4];
    float own[4];
    for (uint32_t i = 0; i < 4; ++i) {
      own_a[i] = a[lane * 4 + i];
      own_b[i] = b[lane * 4 + i];
      own[i] = sum[lane * 4 + i];
    }
    using namespace nibble::instruction;
    if (sparse) {
      mma_fp4_sparse<LaneA, LaneB>(own, own_a, own_b, places[lane], scale_a[lane], scale_b[lane]);
    } else {
      mma_fp4<LaneA, LaneB>(own, own_a, {own_b[0], own_b[1]}, scale_a[lane], scale_b[lane]);
    }
    for (uint32_t i = 0; i < 4; ++i) sum[lane * 4 + i] = own[i];
  });
}

}  // namespace

// Registers of 32 lanes. `selectors`: 0 for lanes (0, 0) of the scales, 1 for (1, 3).
extern "C" void multiply_fp4_on_the_host(bool sparse, uint32_t selectors, const uint32_t* a,
                                         const uint32_t* b, const uint32_t* places, const uint32_t* scale_a,
                                         const uint32_t* scale_b, float* sum) {
  if (selectors == 0) return multiply<0, 0>(sparse, a, b, places, scale_a, scale_b, sum);
  multiply<1, 3>(sparse, a, b, places, scale_a, scale_b, sum);
}
