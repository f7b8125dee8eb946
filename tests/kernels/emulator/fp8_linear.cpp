// The FP8 kernel's own source, run on the host: test_fp8_linear.py.
#include "fp8_linear/small.cuh"

#include "run_cluster.h"

using namespace nibble::fp8;

namespace {

template <class T, uint32_t TokenGroups, bool Blockwise>
void run(const Problem& p) {
  const uint32_t blocks = (p.outputs + kRows - 1) / kRows;
  using Kernel = Multiplier<T, TokenGroups, Blockwise>;
  for (uint32_t block = 0; block < blocks; ++block) {
    run_cluster(1, kThreads, Kernel::kSharedBytes, block, blocks,
                [&](uint4* memory) { Kernel{p, reinterpret_cast<float*>(memory)}.run(); });
  }
}

template <class T, bool Blockwise>
void run_form(const Problem& p) {
  if (p.tokens <= 8) return run<T, 1, Blockwise>(p);
  if (p.tokens <= 16) return run<T, 2, Blockwise>(p);
  run<T, 4, Blockwise>(p);
}

}  // namespace

// At most 32 tokens.
extern "C" void multiply_fp8_on_the_host(bool bfloat, bool blockwise, const void* x, const void* weight,
                                         const void* x_scale, const void* weight_scale, const void* bias,
                                         void* out, uint32_t tokens, uint32_t outputs, uint32_t columns,
                                         bool x_has_one_scale, bool weight_has_one_scale) {
  const Problem p{static_cast<const uint8_t*>(x),
                  static_cast<const uint8_t*>(weight),
                  static_cast<const float*>(x_scale),
                  static_cast<const float*>(weight_scale),
                  bias,
                  out,
                  tokens,
                  outputs,
                  columns,
                  (columns + kChunk - 1) / kChunk,
                  x_has_one_scale,
                  weight_has_one_scale};
  if (blockwise) return bfloat ? run_form<__nv_bfloat16, true>(p) : run_form<__half, true>(p);
  if (bfloat) return run_form<__nv_bfloat16, false>(p);
  run_form<__half, false>(p);
}
