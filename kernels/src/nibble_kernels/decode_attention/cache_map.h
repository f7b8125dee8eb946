// The cache as copies of tiles see it.
#pragma once

#include "decode_attention/problem.h"
#include "nibble/tensor_map.h"

namespace nibble::attention {

// Strides are in bytes.
struct CacheMap {
  const void* cache;
  uint64_t pages, heads, tokens_per_page;
  uint64_t page_stride, head_stride, token_stride;

  // Boxes of some tokens with all of their chunks of 128 bytes, of a head. Units of 16 bytes are swapped, so
  // that reads do not meet in a bank.
  CUtensorMap of_tokens(uint32_t tokens, uint32_t chunks) const {
    CUtensorMap map{};
    const cuuint64_t sizes[] = {128, tokens_per_page, chunks, heads, pages},
                     bytes[] = {token_stride, 128, head_stride, page_stride};
    const cuuint32_t box[] = {128, tokens, chunks, 1, 1}, steps[] = {1, 1, 1, 1, 1};
    const CUresult result =
        encode_tiled()(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 5, const_cast<void*>(cache), sizes, bytes, box,
                       steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                       CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    require(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled: ", static_cast<int>(result));
    return map;
  }
};

// For what clusters::has_form() (clusters/division.h).
namespace clusters {
cudaError_t launch_fp8(const Problem& problem, const CacheMap& cache, uint32_t head_dim, int device,
                       cudaStream_t stream);
cudaError_t launch_bf16(const Problem& problem, const CacheMap& cache, uint32_t head_dim, int device,
                        cudaStream_t stream);
}  // namespace clusters

// For what warpgroups::has_form() (warpgroups/form.h), on SM90.
namespace warpgroups {
cudaError_t launch_fp8(const Problem& problem, const CacheMap& cache, uint32_t head_dim, int device,
                       cudaStream_t stream);
cudaError_t launch_bf16(const Problem& problem, const CacheMap& cache, uint32_t head_dim, int device,
                        cudaStream_t stream);
}  // namespace warpgroups

}  // namespace nibble::attention
