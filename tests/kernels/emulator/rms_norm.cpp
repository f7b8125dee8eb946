// The norm's own source, run on the host: test_norm_on_the_host.py.
#include "rms_norm/norm.cuh"
#include "run_cluster.h"

using namespace nibble::norm;

// bfloat16 [rows, columns]; into rows (tile 0), or in order for tiles of so many tokens.
extern "C" void normalize_on_the_host(const void* x, const void* weight, void* out, float epsilon, uint32_t rows,
                                      uint32_t columns, uint32_t tile, uint32_t threads) {
  const Problem p{static_cast<const uint4*>(x), nullptr, static_cast<const uint4*>(weight), epsilon,
                  static_cast<uint4*>(out),     nullptr, columns / 8,                       tile};
  for (uint32_t row = 0; row < rows; ++row) {
    run_cluster(1, threads, kMaxThreads / 32 * sizeof(float), row, rows, [&](uint4* memory) {
      normalize_row<__nv_bfloat16, kMostVectors>(p, reinterpret_cast<float*>(memory), [] {});
    });
  }
}
