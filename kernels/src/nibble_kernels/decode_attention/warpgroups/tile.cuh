// A warpgroup's products with a tile of keys and values. Tokens and the head dim are the rows of products,
// queries their columns, so that few queries take few registers. bfloat16 keys and values are multiplied
// where the copies put them; FP8 ones become float16 in registers, which is exact.
#pragma once

#include "decode_attention/warpgroups/work.cuh"

namespace nibble::attention::warpgroups {

#if NIBBLE_HAS_WARPGROUP_PRODUCTS

// Element of the tensor cores' order of a query: `piece` of eight, `at` in it. For FP8 it is the order in
// which a lane reads a key, 16 bytes after 16; two steps of the sum never need the same bank.
struct ElementPlace {
  uint32_t piece, at;
};
template <class Form>
__device__ __forceinline__ ElementPlace place_of_pair(uint32_t element) {  // even
  if constexpr (!Form::kIsFp8) return {element / 8, element % 8};
  const uint32_t unit = element / 16, read = unit / 8 * 2 + unit % 2, lane = unit % 8 / 2;
  const uint32_t step = read * 4 + element % 16 / 4;
  return {2 * step + element % 4 / 2, lane * 2};
}

// Lane 4 r + c has tokens r and r + 8 of its warp's 16, and of each eight queries 2 c and 2 c + 1.
template <class Form>
struct Scores {
  float of[Form::kColumns / 2];
};

// What a lane has of a unit's result. It has the queries 2 c and 2 c + 1 of each eight.
template <class Form>
struct Partial {
  float sums[Form::kDimTiles][Form::kColumns / 2];
  float reference[Form::kRowGroups][2];  // weights are relative to it, in base 2
  float total[Form::kRowGroups][2];      // of this lane's tokens alone
};

// Queries or weights as an operand. Each step has 16 elements of the head dim, or 16 tokens.
template <class Form>
__device__ __forceinline__ uint64_t columns_of(uint8_t* from) {
  return instruction::operand_in_shared(instruction::shared_place(from), Form::kColumns * 16, 128);
}
template <class Form>
inline constexpr uint32_t kColumnBytes = 2 * Form::kColumns * 16;  // of a step

// scores = keys x queries.
template <class Form>
__device__ __forceinline__ void score(Scores<Form>& scores, uint8_t* queries, uint8_t* tile) {
  const uint64_t columns = columns_of<Form>(queries);
  if constexpr (Form::kIsFp8) {
    const uint32_t lane = threadIdx.x % kLanes, r = lane / 4, c = lane % 4, warp = threadIdx.x / kLanes % 4;
    const uint8_t* const rows = tile + warp * Form::kPieceBytes + r * 128;
    uint32_t keys[Form::kSteps][4];
#pragma unroll
    for (uint32_t read = 0; read < Form::kSteps / 4; ++read) {
      const uint8_t* const place = rows + read / 2 * Form::kChunkBytes + ((2 * c + read % 2) ^ r) * 16;
      const uint4 low = *reinterpret_cast<const uint4*>(place),
                  high = *reinterpret_cast<const uint4*>(place + 8 * 128);
      const uint32_t lows[4] = {low.x, low.y, low.z, low.w}, highs[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j) {
        const uint2 of_low = instruction::e4m3_pairs(lows[j]), of_high = instruction::e4m3_pairs(highs[j]);
        uint32_t (&key)[4] = keys[read * 4 + j];
        key[0] = of_low.x, key[1] = of_high.x, key[2] = of_low.y, key[3] = of_high.y;
      }
    }
#pragma unroll
    for (float& sum : scores.of) sum = 0;
    instruction::begin_products();
#pragma unroll
    for (uint32_t step = 0; step < Form::kSteps; ++step)
      instruction::multiply_warpgroup<false, Form::kColumns>(
          scores.of, keys[step], instruction::moved(columns, step * kColumnBytes<Form>));
    instruction::end_products();
    instruction::wait_for_products<0>();
    instruction::keep(keys);
  } else {
    const uint64_t first = instruction::swapped_operand(instruction::shared_place(tile), Form::kPieceBytes);
    instruction::begin_products();
#pragma unroll
    for (uint32_t step = 0; step < Form::kSteps; ++step) {
      const uint64_t keys = instruction::moved(first, step / 4 * Form::kChunkBytes + step % 4 * 32);
      instruction::multiply_shared<false, Form::kColumns>(
          scores.of, keys, instruction::moved(columns, step * kColumnBytes<Form>), step != 0);
    }
    instruction::end_products();
    instruction::wait_for_products<0>();
  }
}

// Weights as the next product reads them.
template <class Form>
__device__ __forceinline__ void write_weights(const Scores<Form>& weights, uint8_t* to) {
  const auto pair = [](float low, float high) { return pair_of(low, high, Form::kIsFp8); };
  const uint32_t lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes % 4;
  // Lane i says where column i % 8 of a matrix of 8 tokens by 8 queries goes: both eights of tokens of a
  // group of queries, then of the next.
  const uint32_t piece = 2 * warp + lane / 8 % 2, column = lane / 16 * 8 + lane % 8;
  const instruction::SharedPlace place =
      instruction::shared_place(to + (piece * Form::kColumns + column % Form::kColumns) * 16);
  const float (&of)[Form::kColumns / 2] = weights.of;
  if constexpr (Form::kRowGroups == 1) {
    instruction::store_transposed(place, {pair(of[0], of[1]), pair(of[2], of[3])});
  } else {
    instruction::store_transposed(
        place, {pair(of[0], of[1]), pair(of[2], of[3]), pair(of[4], of[5]), pair(of[6], of[7])});
  }
}

// Values of 16 tokens, as rows of the head dim: of each 128 of it, two tiles of 64.
template <class Form>
__device__ __forceinline__ void load_values(const uint8_t* tile, uint32_t step, uint32_t chunk,
                                            uint32_t (&values)[2][4]) {
  const uint32_t lane = threadIdx.x % kLanes, r = lane / 4, c = lane % 4, warp = threadIdx.x / kLanes % 4;
  const uint8_t* const from =
      tile + step * Form::kPieceBytes + (Form::kChunks / 2 + chunk) * Form::kChunkBytes + r % 4 * 4;
  uint32_t words[4];  // four elements of tokens 2 c, 2 c + 1, 2 c + 8, 2 c + 9
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t token = 2 * c + i % 2;
    words[i] = *reinterpret_cast<const uint32_t*>(from + i / 2 * 8 * 128 + token * 128 +
                                                  ((2 * warp + r / 4) ^ token) * 16);
  }
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i) {
    const uint2 low = instruction::e4m3_pairs(__byte_perm(words[2 * i], words[2 * i + 1], 0x5140)),
                high = instruction::e4m3_pairs(__byte_perm(words[2 * i], words[2 * i + 1], 0x7362));
    values[0][2 * i] = low.x, values[0][2 * i + 1] = low.y;
    values[1][2 * i] = high.x, values[1][2 * i + 1] = high.y;
  }
}

// Of FP8 the values of half of a tile's tokens, in registers.
inline constexpr uint32_t kHalf = kGroups / 2;
template <class Form>
struct Values {
  uint32_t of[kHalf][Form::kDimTiles][4];
};

template <class Form>
__device__ __forceinline__ void load_values(const uint8_t* tile, uint32_t half, Values<Form>& values) {
#pragma unroll
  for (uint32_t step = 0; step < kHalf; ++step) {
#pragma unroll
    for (uint32_t chunk = 0; chunk < Form::kDimTiles / 2; ++chunk) {
      uint32_t two[2][4];
      load_values<Form>(tile, half * kHalf + step, chunk, two);
#pragma unroll
      for (uint32_t i = 0; i < 8; ++i) values.of[step][chunk * 2 + i / 4][i % 4] = two[i / 4][i % 4];
    }
  }
}

// sums += values x weights. They run on.
template <class Form>
__device__ __forceinline__ void add_values(Partial<Form>& partial, uint8_t* weights, uint32_t half,
                                           const Values<Form>& values) {
  const uint64_t columns = columns_of<Form>(weights);
  instruction::begin_products();
#pragma unroll
  for (uint32_t step = 0; step < kHalf; ++step) {
#pragma unroll
    for (uint32_t i = 0; i < Form::kDimTiles; ++i)
      instruction::multiply_warpgroup<false, Form::kColumns>(
          partial.sums[i], values.of[step][i],
          instruction::moved(columns, (half * kHalf + step) * kColumnBytes<Form>));
  }
  instruction::end_products();
}
template <class Form>
__device__ __forceinline__ void add_values(Partial<Form>& partial, uint8_t* weights, uint8_t* tile) {
  const uint64_t columns = columns_of<Form>(weights);
  const uint64_t first = instruction::swapped_operand(
      instruction::shared_place(tile + Form::kChunks / 2 * Form::kChunkBytes), Form::kPieceBytes);
  instruction::begin_products();
#pragma unroll
  for (uint32_t step = 0; step < kGroups; ++step) {
#pragma unroll
    for (uint32_t i = 0; i < Form::kDimTiles; ++i) {
      const uint64_t values = instruction::moved(first, step * 2 * Form::kPieceBytes + i * Form::kChunkBytes);
      instruction::multiply_shared<true, Form::kColumns>(
          partial.sums[i], values, instruction::moved(columns, step * kColumnBytes<Form>), true);
    }
  }
  instruction::end_products();
}

#endif
}  // namespace nibble::attention::warpgroups
