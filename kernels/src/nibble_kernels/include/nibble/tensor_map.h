// Tensor maps, for copies of boxes in warpgroup_instructions.cuh.
#pragma once

#include <cuda.h>

#include "nibble/cuda.h"

namespace nibble {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// The driver's function, by way of the runtime: nothing here links the driver.
inline EncodeTiled encode_tiled() {
  static const EncodeTiled found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault,
                                           &result));
    require(result == cudaDriverEntryPointSuccess, "the NVIDIA driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<EncodeTiled>(function);
  }();
  return found;
}

// Boxes of `box_rows` rows of `box_chunks` chunks, from a matrix of `rows` rows of chunks of `words` words.
inline CUtensorMap map_of_words(const void* data, uint32_t words, uint32_t chunks, uint32_t rows,
                                uint32_t box_chunks, uint32_t box_rows) {
  CUtensorMap map{};
  const cuuint64_t sizes[] = {words, chunks, rows},
                   bytes[] = {uint64_t{words} * 4, uint64_t{words} * chunks * 4};
  const cuuint32_t box[] = {words, box_chunks, box_rows}, steps[] = {1, 1, 1};
  const CUresult result =
      encode_tiled()(&map, CU_TENSOR_MAP_DATA_TYPE_UINT32, 3, const_cast<void*>(data), sizes, bytes, box,
                     steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  require(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled: ", static_cast<int>(result));
  return map;
}

}  // namespace nibble
