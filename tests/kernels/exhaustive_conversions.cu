// Converts every one of the 2^32 float bit patterns in every way the kernels have, and counts where the
// result differs from what CUDA's own headers compute: their conversions from double are plain integer code
// on every target. One line of JSON.
#include <cuda_fp16.h>
#include <cuda_fp4.h>
#include <cuda_fp8.h>

#include <cstdio>
#include <cstdlib>

#include "nibble/conversions.cuh"

using Count = unsigned long long;

struct Counts {
  Count e2m1_integer, e2m1_eight, e2m1_instructions, e2m1_magnitudes, e4m3_integer, e4m3_instructions;
};

__global__ void compare(Counts* counts) {
  Counts mine{};
  const uint64_t stride = static_cast<uint64_t>(gridDim.x) * blockDim.x;
  const uint64_t thread = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (uint64_t eight = thread; eight < uint64_t{1} << 29; eight += stride) {
    float x[8], amax = 0.0f;
    uint32_t words[4] = {};
    for (int i = 0; i < 8; ++i) {
      const uint32_t bits = static_cast<uint32_t>(eight * 8 + i);
      x[i] = __uint_as_float(bits);
      words[i / 2] |= bits >> 16 << 16 * (i % 2);
      amax = nibble::maximum(amax, fabsf(x[i]));
    }
    const uint4 packed = {words[0], words[1], words[2], words[3]};
    const nibble::Encoded8 software = nibble::Software::e2m1_encode8(x, packed, amax, 1.0f);
    const nibble::Encoded8 instructions = nibble::Instructions::e2m1_encode8(x, packed, amax, 1.0f);
    for (int i = 0; i < 8; ++i) {
      const double wide =
          isnan(x[i]) ? __uint_as_float(0x7fffffff) : x[i];  // as cuda_fp8.hpp does with floats
      const uint32_t e2m1 = __nv_cvt_double_to_fp4(wide, __NV_E2M1, cudaRoundNearest) & 15;
      const uint32_t e4m3 = __nv_cvt_double_to_fp8(wide, __NV_SATFINITE, __NV_E4M3);
      mine.e2m1_integer += nibble::e2m1_encode(x[i]) != e2m1;
      mine.e2m1_eight += (software.codes >> 4 * i & 15) != e2m1;
      mine.e2m1_instructions += (instructions.codes >> 4 * i & 15) != e2m1;
      const float value = __half2float(__nv_cvt_fp4_to_halfraw(e2m1 & 7, __NV_E2M1));
      mine.e2m1_magnitudes += software.magnitudes[i] != value || instructions.magnitudes[i] != value;
      mine.e4m3_integer += nibble::e4m3_encode(x[i]) != e4m3;
      mine.e4m3_instructions += nibble::Instructions::e4m3_encode(x[i]) != e4m3;
    }
  }
  atomicAdd(&counts->e2m1_integer, mine.e2m1_integer);
  atomicAdd(&counts->e2m1_eight, mine.e2m1_eight);
  atomicAdd(&counts->e2m1_instructions, mine.e2m1_instructions);
  atomicAdd(&counts->e2m1_magnitudes, mine.e2m1_magnitudes);
  atomicAdd(&counts->e4m3_integer, mine.e4m3_integer);
  atomicAdd(&counts->e4m3_instructions, mine.e4m3_instructions);
}

void check(cudaError_t error) {
  if (error != cudaSuccess) {
    std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(error));
    std::exit(1);
  }
}

int main() {
  Counts *counts, found;
  check(cudaMalloc(&counts, sizeof(Counts)));
  check(cudaMemset(counts, 0, sizeof(Counts)));
  compare<<<4096, 256>>>(counts);
  check(cudaGetLastError());
  check(cudaMemcpy(&found, counts, sizeof(Counts), cudaMemcpyDeviceToHost));
  std::printf(
      "{\"floats\": 4294967296, \"mismatches\": {\"e2m1_integer\": %llu, \"e2m1_eight\": %llu, "
      "\"e2m1_instructions\": %llu, \"e2m1_magnitudes\": %llu, \"e4m3_integer\": %llu, "
      "\"e4m3_instructions\": %llu}}\n",
      found.e2m1_integer, found.e2m1_eight, found.e2m1_instructions, found.e2m1_magnitudes,
      found.e4m3_integer, found.e4m3_instructions);
}
