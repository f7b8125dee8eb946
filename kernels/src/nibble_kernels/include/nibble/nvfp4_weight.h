// NVFP4 weights and activations as tensors, and the sharing out of a weight's rows: for the operators of the
// CPU.
#pragma once

#include "cpu.h"
#include "nvfp4_matmul.h"

namespace nibble::cpu {

// A few hundred rows of activations are multiplied at once, so that their float32 copy stays small.
constexpr int64_t kManyRows = 256;

// Replaces x by what its NVFP4 form stands for, divided by the global scale: what nvfp4_quant makes of it,
// decoded.
void round_to_nvfp4(float* x, int64_t columns, float global_scale_inv);

inline Nvfp4Weight weight_of(const Tensor& codes, const Tensor& scales, int64_t columns) {
  const int64_t rows = columns ? codes.numel() / (columns / 2) : 0;
  require(columns > 0 && columns % kBlock == 0, "NVFP4 has blocks of 16 columns, found rows of ", columns);
  require(codes.scalar_type() == ScalarType::Byte && scales.scalar_type() == ScalarType::Float8_e4m3fn,
          "a weight must be uint8 codes with float8_e4m3fn scales");
  require(codes.numel() == rows * (columns / 2) && scales.numel() == rows * (columns / kBlock),
          "the weight's codes and scales do not fit rows of ", columns);
  return {static_cast<const uint8_t*>(codes.const_data_ptr()),
          static_cast<const uint8_t*>(scales.const_data_ptr()), rows, columns};
}

// Calls f(begin, end) for tiles of weight rows, shared out among torch's threads.
template <class F>
void for_tiles(int64_t rows, const F& f) {
  torch::stable::parallel_for(0, (rows + kWeightRows - 1) / kWeightRows, 1, [&](int64_t first, int64_t last) {
    for (int64_t tile = first; tile < last; ++tile)
      f(tile * kWeightRows, std::min((tile + 1) * kWeightRows, rows));
  });
}

}  // namespace nibble::cpu
