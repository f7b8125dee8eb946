// NVFP4 quantization on the GPU: what a thread does, how threads share rows and tiles, and the kernel that
// reads, quantizes and writes. An operation gives it a Source (what the elements are) and a Rule (how a block
// becomes codes and a scale).
//
// A thread has eight elements, two neighbouring threads a block. A warp loads whole lines, 16 bytes a thread,
// and does so kSteps times before it computes:
//   linear  256 elements of one row a step, the steps side by side
//   tiled   64 elements of the four rows whose scales share 16 bytes (a line) of a 128x4 tile a step,
//           the steps being two neighbouring lines of kSteps / 2 tiles
#pragma once

#include "scale_layout.h"
#include "static_scale.cuh"
#include "tensors.h"

namespace nibble {

constexpr uint32_t kWarps = 8;

// ---- numbers

struct Approximate {
  static __device__ __forceinline__ float reciprocal(float x) {
    return instruction::approximate_reciprocal(x);
  }
  static __device__ __forceinline__ float reciprocal_root(float x) { return rsqrtf(x); }
  static __device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }
};

// ---- what the elements are

template <class T>
struct Plain {
  using Element = T;
  static constexpr uint32_t kSteps = 4;  // four loads in flight a thread

  struct Raw {
    uint4 x = {};
  };

  const uint4* x;

  __device__ __forceinline__ void load(uint32_t row, uint32_t vectors, uint32_t vector, Raw& raw) const {
    raw.x = instruction::load_once(x + (uint64_t{row} * vectors + vector));
  }

  static __device__ __forceinline__ uint4 words(const Raw& raw) { return raw.x; }
};

// silu(gate) * up of rows gate | up, rounded to T.
template <class T, class Precision>
struct SiluMul {
  using Element = T;
  static constexpr uint32_t kSteps = 2;

  struct Raw {
    uint4 gate = {};
    uint4 up = {};
  };

  const uint4* x;

  __device__ __forceinline__ void load(uint32_t row, uint32_t vectors, uint32_t vector, Raw& raw) const {
    const uint64_t gate = uint64_t{row} * (2 * vectors) + vector;
    raw.gate = instruction::load_once(x + gate);
    raw.up = instruction::load_once(x + gate + vectors);
  }

  static __device__ __forceinline__ uint4 words(const Raw& raw) {
    float gate[8], up[8];
    unpack<T>(raw.gate, gate);
    unpack<T>(raw.up, up);
#pragma unroll
    for (int i = 0; i < 8; ++i) gate[i] = Precision::silu(gate[i]) * up[i];
    return pack<T>(gate);
  }
};

// ---- other rules, by which a block becomes codes and a scale

// quartet2/quantize/reference.py
template <class Convert, class Precision, bool FourOverSix>
struct TensorScale {
  struct Parameters {
    const float* amax;
    float* tensor_scale;
    float scale_override;
  };

  float g, inverse_g, inverse_6, inverse_4;

  __device__ __forceinline__ explicit TensorScale(const Parameters& parameters) {
    const float amax = __ldg(parameters.amax), scale_override = parameters.scale_override;
    inverse_6 = (1.0f / 6.0f) * scale_override;
    inverse_4 = (1.0f / 4.0f) * scale_override;
    g = amax == 0.0f ? 1.0f : (amax * (FourOverSix ? 1.0f / 256.0f : 1.0f / 448.0f)) * inverse_6;
    inverse_g = Precision::reciprocal(g);
    if (blockIdx.x + blockIdx.y + threadIdx.x + threadIdx.y == 0) *parameters.tensor_scale = g;
  }

  __device__ __forceinline__ Quantized operator()(const Half& half) const {
    float error_6, error_4;
    const Quantized six = candidate(half, inverse_6, error_6);
    if constexpr (!FourOverSix) return six;
    const Quantized four = candidate(half, inverse_4, error_4);
    return error_4 < error_6 ? four : six;
  }

 private:
  __device__ __forceinline__ Quantized candidate(const Half& half, float inverse, float& error) const {
    const uint32_t scale = Convert::e4m3_encode((half.amax * inverse) * inverse_g);
    const float value = Convert::e4m3_decode(scale);
    const float factor = Precision::reciprocal((value == 0.0f ? 1.0f : value) * g);
    const Encoded8 encoded = Convert::e2m1_encode8(half.x, half.words, half.amax, factor);
    const float step = value * g;
    float even = 0.0f, odd = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      // Of magnitudes: x and its code have one sign.
      const float first = fmaf(-encoded.magnitudes[i], step, fabsf(half.x[i]));
      const float second = fmaf(-encoded.magnitudes[i + 1], step, fabsf(half.x[i + 1]));
      even = fmaf(first, first, even);
      odd = fmaf(second, second, odd);
    }
    error = even + odd;
    error += __shfl_xor_sync(0xffffffffu, error, 1);
    return {encoded.codes, scale};
  }
};

// ---- the kernel

struct Output {
  uint32_t* codes;
  uint8_t* scales;
};

struct Grid {
  uint32_t rows;
  uint32_t vectors;     // of eight elements in a row
  uint32_t row_groups;  // of the rows that a thread block has
  bool backwards;       // last rows first: a pass before this one left them in the second cache
};

template <bool Tiled>
inline Grid grid_of(const Shape& shape, bool backwards) {
  const int64_t groups =
      Tiled ? round_up<int64_t>(shape.rows, kTileRows) / 64 : (shape.rows + kWarps - 1) / kWarps;
  return {static_cast<uint32_t>(shape.rows), static_cast<uint32_t>(shape.columns / kVector),
          static_cast<uint32_t>(groups), backwards};
}

template <class Source, bool Tiled>
inline dim3 thread_blocks(const Grid& grid) {
  const uint32_t wide = Source::kSteps * (Tiled ? 4 : 32);
  return dim3((grid.vectors + wide - 1) / wide, std::min(grid.row_groups, 65535u));
}

template <class Source, class Rule, bool Tiled>
__device__ __forceinline__ void quantize_rows(const Source& source, const Rule& rule, const Output& output,
                                              const Grid& grid, uint32_t group) {
  const uint32_t lane = threadIdx.x, warp = threadIdx.y;
  const uint32_t tiles = (grid.vectors + 2 * kTileBlocks - 1) / (2 * kTileBlocks);

  constexpr uint32_t kSteps = Source::kSteps;
  typename Source::Raw raw[kSteps];
  uint32_t row[kSteps], vector[kSteps];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    if constexpr (Tiled) {
      const uint32_t line = group % 2 * 16 + warp * 2 + step % 2;  // of the tile's 32 lines of 16 bytes
      row[step] = group / 2 * kTileRows + lane / 8 * 32 + line;
      vector[step] = (blockIdx.x * (kSteps / 2) + step / 2) * 8 + lane % 8;
    } else {
      row[step] = group * kWarps + warp;
      vector[step] = (blockIdx.x * kSteps + step) * 32 + lane;
    }
    if (row[step] < grid.rows && vector[step] < grid.vectors) {
      source.load(row[step], grid.vectors, vector[step], raw[step]);
    }
  }

#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const bool inside = row[step] < grid.rows && vector[step] < grid.vectors;
    const Quantized quantized = rule(half_of<typename Source::Element>(Source::words(raw[step])));
    if (inside) output.codes[uint64_t{row[step]} * grid.vectors + vector[step]] = quantized.codes;
    if constexpr (Tiled) {  // padding too: nothing else writes it
      if (lane % 2 == 0 && vector[step] / 8 < tiles) {
        output.scales[tiled_offset(row[step], vector[step] / 2, tiles)] = inside ? quantized.scale : 0;
      }
    } else if (lane % 2 == 0 && inside) {
      output.scales[uint64_t{row[step]} * (grid.vectors / 2) + vector[step] / 2] = quantized.scale;
    }
  }
}

template <class Source, class Rule, bool Tiled>
__global__ void __launch_bounds__(32 * kWarps, 4)
    quantize(Source source, typename Rule::Parameters parameters, Output output, Grid grid) {
  instruction::let_next_kernel_start();
  const Rule rule(parameters);
  for (uint32_t group = blockIdx.y; group < grid.row_groups; group += gridDim.y) {
    quantize_rows<Source, Rule, Tiled>(source, rule, output, grid,
                                       grid.backwards ? grid.row_groups - 1 - group : group);
  }
}

}  // namespace nibble
