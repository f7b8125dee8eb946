// The sparse kernel's own source, run on the host: test_nvfp4_sparse.py.
#include "nvfp4_sparse/decode.cuh"

#include "run_cluster.h"

using namespace nibble::sparse;

namespace {

template <class Operand, uint32_t TokenGroups>
void run(const Problem& p) {
  const uint32_t blocks = (p.outputs / 2 + kGroup - 1) / kGroup;
  using Kernel = Multiplier<Operand, TokenGroups>;
  for (uint32_t block = 0; block < blocks; ++block) {
    run_cluster(1, kThreads, Kernel::kSharedBytes, block, blocks,
                [&](uint4* memory) { Kernel{p, memory}.run(); });
  }
}

template <class Operand>
void run_form(const Problem& p) {
  if (p.tokens <= 8) return run<Operand, 1>(p);
  run<Operand, 2>(p);
}

}  // namespace

// At most 16 tokens.
extern "C" void multiply_sparse_on_the_host(bool bfloat, const void* x, const void* codes, const void* places,
                                            const void* scales, const void* column_scale, const void* bias,
                                            void* out, float global_scale, uint32_t tokens, uint32_t outputs,
                                            uint32_t columns, bool silu_mul) {
  const Problem p{static_cast<const uint32_t*>(x),
                  static_cast<const uint4*>(codes),
                  static_cast<const uint2*>(places),
                  static_cast<const uint32_t*>(scales),
                  static_cast<const float*>(column_scale),
                  bias,
                  out,
                  global_scale,
                  tokens,
                  outputs,
                  columns,
                  (columns + kChunk - 1) / kChunk,
                  silu_mul};
  if (bfloat) return run_form<nibble::BfloatOperand>(p);
  run_form<nibble::HalfOperand>(p);
}
