#include "decode_attention/warpgroups/launch.cuh"

namespace nibble::attention::warpgroups {

cudaError_t launch_bf16(const Problem& problem, const CacheMap& cache, uint32_t head_dim, int device,
                       cudaStream_t stream) {
  return launch_type<false>(problem, cache, head_dim, device, stream);
}

}  // namespace nibble::attention::warpgroups
