#include "decode_attention/clusters/launch.cuh"

namespace nibble::attention::clusters {

cudaError_t launch_fp8(const Problem& problem, const CacheMap& cache, uint32_t head_dim, int device,
                       cudaStream_t stream) {
  return launch_type<true>(problem, cache, head_dim, device, stream);
}

}  // namespace nibble::attention::clusters
