// nibble::add_rmsnorm_nvfp4_quant on the GPU: a thread block a row, the row's sums kept in shared memory
// between two passes.
#include "nibble/cuda.h"
#include "nibble/quantize.cuh"

namespace nibble {
namespace {

constexpr uint32_t kMaxThreads = 512;
constexpr int kMaxColumns =
    49152;  // two bytes each in what every target has of shared memory (99 KB on SM12x)
constexpr uint32_t kMaxChunks = 256;  // of 32 vectors; a power of two

// The sum of eight, neighbours first; tree_sum's first three levels.
__device__ __forceinline__ float sum8(const float (&x)[8]) {
  return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
}

// And of 32 neighbouring threads: the next five.
__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}

// The sum of `count` chunks in order, padded with zeros to a power of two: the rest of the tree, in every
// warp.
__device__ __forceinline__ float sum_of_chunks(const float* sums, uint32_t count, uint32_t lane) {
  const uint32_t width =
      count <= 32 ? 1 : 1 << (27 - __clz(count - 1));  // chunks a thread has: 2^ceil(log2(count)) / 32
  float mine[8];
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i)
    mine[i] = i < width && lane * width + i < count ? sums[lane * width + i] : 0.0f;
  return sum_of_warp(sum8(mine));
}

template <class T, class Rule, class Precision, bool Tiled>
__global__ void __launch_bounds__(kMaxThreads)
    add_rmsnorm_quantize(const uint4* x, const uint4* residual, const uint4* weight, float epsilon,
                         uint4* total, typename Rule::Parameters parameters, Output output, uint32_t rows,
                         uint32_t vectors) {
  extern __shared__ uint4 row_sums[];
  __shared__ float chunk_sums[kMaxChunks];
  instruction::let_next_kernel_start();
  const uint32_t row = blockIdx.x, thread = threadIdx.x, lane = thread % 32;
  const uint32_t tiles = (vectors + 2 * kTileBlocks - 1) / (2 * kTileBlocks);
  const uint32_t chunks = (vectors + 31) / 32;
  if (Tiled && row >= rows) {
    for (uint32_t block = thread; block < tiles * kTileBlocks; block += blockDim.x) {
      output.scales[tiled_offset(row, block, tiles)] = 0;
    }
    return;
  }
  const uint64_t start = uint64_t{row} * vectors;
  for (uint32_t vector = thread; vector < chunks * 32; vector += blockDim.x) {
    float z[8] = {};
    if (vector < vectors) {
      float added[8];
      unpack<T>(instruction::load_once(x + start + vector), z);
      unpack<T>(instruction::load_once(residual + start + vector), added);
#pragma unroll
      for (int i = 0; i < 8; ++i) z[i] += added[i];
      const uint4 rounded = pack<T>(z);
      total[start + vector] = rounded;
      row_sums[vector] = rounded;
      unpack<T>(rounded, z);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) z[i] *= z[i];
    const float sum = sum_of_warp(sum8(z));
    if (lane == 0) chunk_sums[vector / 32] = sum;
  }
  __syncthreads();
  const float mean =
      __fdiv_rn(sum_of_chunks(chunk_sums, chunks, lane), static_cast<float>(vectors * kVector));
  const float inverse = Precision::reciprocal_root(mean + epsilon);
  const Rule rule(parameters);
  for (uint32_t vector = thread; vector < chunks * 32; vector += blockDim.x) {
    const bool inside = vector < vectors;
    uint4 words = {};
    if (inside) {
      float y[8], scale[8];
      unpack<T>(row_sums[vector], y);
      unpack<T>(__ldg(weight + vector), scale);
#pragma unroll
      for (int i = 0; i < 8; ++i) y[i] = y[i] * inverse * scale[i];
      words = pack<T>(y);
    }
    const Quantized quantized = rule(half_of<T>(words));
    if (inside) output.codes[start + vector] = quantized.codes;
    if (lane % 2) continue;
    if constexpr (Tiled) {
      if (vector / 8 < tiles)
        output.scales[tiled_offset(row, vector / 2, tiles)] = inside ? quantized.scale : 0;
    } else if (inside) {
      output.scales[uint64_t{row} * (vectors / 2) + vector / 2] = quantized.scale;
    }
  }
}

const uint4* data(const Tensor& x) { return static_cast<const uint4*>(x.const_data_ptr()); }

std::tuple<Tensor, Tensor, Tensor> add_rmsnorm_nvfp4_quant(const Tensor& input, const Tensor& input_residual,
                                                           const Tensor& input_weight,
                                                           const Tensor& global_scale_inv, double epsilon,
                                                           bool tiled, bool exact) {
  const Tensor x = torch::stable::contiguous(input), residual = torch::stable::contiguous(input_residual);
  const Tensor weight = torch::stable::contiguous(input_weight);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const cudaStream_t stream = current_stream(x);
  const Shape shape = shape_of(x, x.size(x.dim() - 1));
  check_scalar(global_scale_inv, "global_scale_inv");
  check_same(x, residual, "residual");
  require(weight.numel() == shape.columns && weight.scalar_type() == x.scalar_type(),
          "weight must have x's type and one element a column");
  require(shape.columns <= kMaxColumns, "rows of up to ", kMaxColumns, " elements, found ", shape.columns);
  auto [packed, scales] = empty_outputs(x, shape, tiled);
  Tensor total = torch::stable::new_empty(x, x.sizes());
  const Output output{static_cast<uint32_t*>(packed.mutable_data_ptr()),
                      static_cast<uint8_t*>(scales.mutable_data_ptr())};
  const uint32_t vectors = static_cast<uint32_t>(shape.columns / kVector);
  const uint32_t threads = std::min(kMaxThreads, round_up(vectors, 32u));
  const size_t shared_bytes = vectors * sizeof(uint4);
  const int64_t blocks = tiled ? round_up<int64_t>(shape.rows, kTileRows) : shape.rows;
  for_cuda_type(x.scalar_type(), [&](auto type) {
    for_bool(use_instructions(x.get_device_index(), stream), [&](auto instructions) {
      for_bool(exact, [&](auto with_exact) {
        for_bool(tiled, [&](auto layout) {
          using Convert = std::conditional_t<decltype(instructions)::value, Instructions, Software>;
          using Precision = std::conditional_t<decltype(with_exact)::value, Exact, Approximate>;
          using Rule = StaticScale<Convert, Precision>;
          const auto kernel =
              add_rmsnorm_quantize<typename decltype(type)::type, Rule, Precision, decltype(layout)::value>;
          if (shared_bytes > 48 * 1024) {
            check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       static_cast<int>(shared_bytes)));
          }
          const typename Rule::Parameters parameters{
              static_cast<const float*>(global_scale_inv.const_data_ptr())};
          launch(kernel, blocks_of(blocks), dim3(threads), shared_bytes, stream, data(x), data(residual),
                 data(weight), static_cast<float>(epsilon), static_cast<uint4*>(total.mutable_data_ptr()),
                 parameters, output, static_cast<uint32_t>(shape.rows), vectors);
        });
      });
    });
  });
  return {packed, scales, total};
}

}  // namespace
}  // namespace nibble

STABLE_TORCH_LIBRARY_IMPL(nibble, CUDA, library) {
  library.impl("add_rmsnorm_nvfp4_quant", TORCH_BOX(&nibble::add_rmsnorm_nvfp4_quant));
}
