// Experts for few tokens: nvfp4_linear/decode.cuh for each expert that a token chose, straight from the
// router's choices. Each thread block finds the experts in use by itself, takes its share of one, and reads
// that share's weights once for all of the expert's tokens.
#pragma once

#include "nvfp4_linear/decode.cuh"

namespace nibble::decode {

constexpr uint32_t kMostPairs = 64;  // of a token and an expert

struct Experts {
  const int32_t* ids;          // [pairs]; below 0 or too large: an expert of another process
  const float* weights;        // [pairs], or null
  const float* global_scales;  // [experts, 2]: of the upper and of the lower half of the rows
  const float* row_scales;     // [experts, rows], or null
  uint32_t pairs, experts;
  uint32_t pairs_per_input;  // pairs that share a row of x: 1, or as many experts as a token has
};

// The experts in use, in the order of the pairs, and their pairs in that order.
struct Table {
  int32_t ids[kMostPairs];
  uint8_t first_of[kMostPairs];  // the first pair with the same expert
  uint8_t first_pair[kMostPairs], count[kMostPairs];
  uint8_t pairs[kMostPairs][kMostPairs / 4];
  uint32_t used;
};

// Rows of one expert. Its pairs lie anywhere in x and in the output.
struct ExpertRows {
  const uint8_t* pairs;
  uint32_t pairs_per_input;
  const float* weights;

  static __device__ __forceinline__ void before_x() {}  // the kernel has waited: it had to read the choices
  __device__ __forceinline__ uint32_t input(uint32_t token) const { return pairs[token] / pairs_per_input; }
  __device__ __forceinline__ uint32_t output(uint32_t token) const { return pairs[token]; }
  __device__ __forceinline__ float weight(uint32_t token) const {
    return weights ? weights[pairs[token]] : 1.0f;
  }
};

// Fills the table; `most` is how many pairs an expert may have.
__device__ __forceinline__ void find_experts(const Experts& experts, uint32_t most, Table& table) {
  const uint32_t pair = threadIdx.x;
  if (pair < experts.pairs) table.ids[pair] = experts.ids[pair];
  __syncthreads();
  const bool is_here =
      pair < experts.pairs && table.ids[pair] >= 0 && table.ids[pair] < static_cast<int32_t>(experts.experts);
  if (pair < experts.pairs) {
    uint32_t first = 0;
    while (table.ids[first] != table.ids[pair]) ++first;
    table.first_of[pair] = is_here ? first : kMostPairs;
  }
  __syncthreads();
  if (is_here && table.first_of[pair] == pair) {
    uint32_t place = 0, count = 0;
    for (uint32_t i = 0; i < pair; ++i) place += table.first_of[i] == i;
    for (uint32_t i = pair; i < experts.pairs && count < most; ++i) {
      if (table.first_of[i] == pair) table.pairs[place][count++] = static_cast<uint8_t>(i);
    }
    table.first_pair[place] = static_cast<uint8_t>(pair);
    table.count[place] = static_cast<uint8_t>(count);
  }
  if (pair == 0) {
    uint32_t used = 0;
    for (uint32_t i = 0; i < experts.pairs; ++i) used += table.first_of[i] == i;
    table.used = used;
  }
  __syncthreads();
}

// Zeros for the pairs of other processes' experts.
template <class T>
__device__ __forceinline__ void clear_others(const Problem& p, const Experts& experts, const Table& table) {
  const uint32_t columns = p.silu_mul ? p.outputs / 2 : p.outputs;
  for (uint32_t pair = 0; pair < experts.pairs; ++pair) {
    if (table.first_of[pair] < kMostPairs) continue;
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < columns; i += gridDim.x * blockDim.x)
      assign(static_cast<T*>(p.out)[size_t{pair} * columns + i], 0.0f);
  }
}

template <class T, class Operand, class Form>
__device__ __forceinline__ void run_experts(const Problem& all, const Experts& experts, Table& table,
                                            uint4* shared) {
  instruction::wait_for_previous_kernel();
  instruction::let_next_kernel_start();
  find_experts(experts, Form::kTokens, table);
  clear_others<T>(all, experts, table);
  if (table.used == 0) return;
  const uint32_t blocks_each = max(1u, gridDim.x / table.used);
  const Share share = share_of(all.groups, blockIdx.x % blocks_each, blocks_each, all.groups / blocks_each);
  if (share.groups == 0) return;
  for (uint32_t i = blockIdx.x / blocks_each; i < table.used; i += gridDim.x / blocks_each) {
    const size_t expert = table.ids[table.first_pair[i]];
    Problem p = all;
    p.codes += expert * p.groups * p.chunks * Form::Format::kCodes;
    p.scales += expert * p.groups * p.chunks * Form::Format::kScales;
    p.column_scale = experts.row_scales ? experts.row_scales + expert * p.outputs : nullptr;
    p.upper_global_scale = __ldg(experts.global_scales + 2 * expert);
    p.lower_global_scale = __ldg(experts.global_scales + 2 * expert + 1);
    p.tokens = table.count[i];
    const ExpertRows rows{table.pairs[i], experts.pairs_per_input, experts.weights};
    Multiplier<T, Operand, Form, ExpertRows>(p, share, shared, rows).run();
    __syncthreads();  // x and sums are over
  }
}

}  // namespace nibble::decode
