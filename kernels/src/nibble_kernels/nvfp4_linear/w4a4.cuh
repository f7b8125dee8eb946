// Rows of NVFP4 activations times an NVFP4 weight, for SM12x: the decode kernel's weight as the first operand
// of FP4 products. Layouts and order of work: docs/kernels/blackwell.md.
//
// A thread block multiplies 128 rows of the weight by a tile of tokens. One warp fetches 128 columns at a time
// in bulk; eight others have 16 rows each. All chunks of all units are divided in equal ranges, one for each
// block. Elsewhere products are emulated (nibble/mma_fp4.cuh).
//
// Multiplier is the loop. Its argument Rows says where a tile's rows come from and where their sums go:
// Matrix here, ExpertRows in nvfp4_moe/w4a4.cuh.
#pragma once

#include "nibble/mma_fp4.cuh"
#include "nibble/scale_layout.h"
#include "nvfp4_linear/output.cuh"

namespace nibble::w4a4 {

using instruction::SharedPlace;
using warpgroup::kChunk;
using warpgroup::kCodeBytes;
using warpgroup::kGroup;
using warpgroup::kLanes;
using warpgroup::kScaleBytes;
using warpgroup::kTileBytes;
using warpgroup::kTokenGroup;

constexpr uint32_t kSharedBytes = 99 * 1024;         // of a thread block, on SM12x
constexpr uint32_t kWarps = 8, kGroups = kWarps;     // that multiply, a group of 16 rows each
constexpr uint32_t kThreads = (kWarps + 1) * kLanes;
constexpr uint32_t kXRowBytes = kChunk / 2;          // of a token's codes in a chunk
constexpr uint32_t kXTileBytes = 512;                // scales of 128 tokens in 64 columns: scale_layout.h
constexpr uint32_t kXTileTokens = 128;
// More tokens are multiplied in slices, so that a slice's codes stay in the second cache while all row blocks
// of the weight read them.
constexpr uint32_t kMostTokens = 512;
static_assert(kMostTokens % kXTileTokens == 0);

// ScaleBytes: of x's scales in a stage.
template <uint32_t Tokens, uint32_t Stages, uint32_t ScaleBytes = 2 * kXTileBytes>
struct Form {
  static_assert(kXTileTokens % Tokens == 0 && Tokens % (2 * kTokenGroup) == 0);
  static constexpr uint32_t kTokens = Tokens, kStages = Stages, kTokenGroups = Tokens / kTokenGroup;
  static constexpr uint32_t kWeightBytes = kGroups * kTileBytes, kXBytes = Tokens * kXRowBytes;
  static constexpr uint32_t kStageBytes = kWeightBytes + kXBytes + ScaleBytes;
  static constexpr uint32_t kSharedBytes = kStages * (kStageBytes + 2 * 8);
  static constexpr uint32_t kSlots = kTokenGroups * kWarps;  // of 32 float4: a unit's sums
  static_assert(kSharedBytes <= w4a4::kSharedBytes);
};
using Few = Form<32, 8>;
using Some = Form<64, 7>;
using Many = Form<128, 5>;

// How sums become results: output.cuh.
struct Products {
  static constexpr float kUnit = 1.0f;
};

// A block's part of a unit that another began, [blocks, slots, 32], and whether it is there, [blocks, warps].
struct Shares {
  float4* parts;
  uint32_t* flags;
};

struct Problem {
  const uint8_t *codes, *scales;  // [groups, chunks, 1024] and [groups, chunks, 128]: weight.py, native
  const uint8_t* x;               // [tokens, columns / 2]
  const uint8_t* x_scales;        // 128x4 tiles, zeros past the last column
  warpgroup::Output output;
  uint32_t tokens, columns, chunks, groups;
  uint32_t row_blocks, token_tiles;
  Shares shares;

  NIBBLE_FUNCTION uint32_t units() const { return row_blocks * token_tiles; }

  // The product of `most` tokens or fewer from `first_token` on, which begins a tile of x's scales.
  NIBBLE_FUNCTION Problem slice(uint32_t first_token, uint32_t most) const {
    Problem part = *this;
    const size_t k_tiles = (columns / 16 + kTileBlocks - 1) / kTileBlocks;
    const size_t out_bytes = size_t{first_token} * (output.silu_mul ? output.outputs / 2 : output.outputs) * 2;
    part.tokens = tokens - first_token < most ? tokens - first_token : most;
    part.x += size_t{first_token} * (columns / 2);
    part.x_scales += first_token / kXTileTokens * k_tiles * kXTileBytes;
    part.output.out = static_cast<char*>(output.out) + out_bytes;
    if (output.residual) part.output.residual = static_cast<const char*>(output.residual) + out_bytes;
    return part;
  }
};

// Scales of eight blocks, as two words, in the order of an instruction.
__device__ __forceinline__ uint32_t in_order(uint32_t low, uint32_t high, bool second) {
  return __byte_perm(low, high, second ? 0x7362 : 0x5140);
}

// Rows of one matrix.
template <class T, class Form>
struct Matrix {
  struct Unit {
    uint32_t first_group, first_token;
  };

  const Problem& p;
  const uint32_t k_tiles = (p.columns / 16 + kTileBlocks - 1) / kTileBlocks;

  __device__ __forceinline__ Shares shares() const { return p.shares; }
  __device__ __forceinline__ uint32_t units() const { return p.units(); }
  __device__ __forceinline__ uint32_t chunks() const { return p.chunks; }
  __device__ __forceinline__ Unit unit(uint32_t number) const {
    return {number / p.token_tiles * kGroups, number % p.token_tiles * Form::kTokens};
  }
  __device__ __forceinline__ uint32_t groups(const Unit& unit) const {
    return min(kGroups, p.groups - unit.first_group);
  }
  __device__ __forceinline__ size_t weight_group(const Unit& unit) const { return unit.first_group; }
  __device__ __forceinline__ const uint8_t* codes() const { return p.codes; }
  __device__ __forceinline__ const uint8_t* scales() const { return p.scales; }

  // Bytes of a chunk, and their copies, which the lanes from 16 on begin: lane 16 that of the scales. What is
  // past the last token is left as it was: nothing looks at its sums.
  __device__ __forceinline__ uint32_t row_bytes(uint32_t chunk) const {
    return min(kXRowBytes, p.columns / 2 - chunk * kXRowBytes);
  }
  __device__ __forceinline__ bool has_second_tile(uint32_t chunk) const { return 2 * chunk + 1 < k_tiles; }
  __device__ __forceinline__ uint32_t scale_bytes(uint32_t chunk) const {
    return has_second_tile(chunk) ? 2 * kXTileBytes : kXTileBytes;
  }
  __device__ __forceinline__ uint32_t tokens(const Unit& unit) const {
    return min(Form::kTokens, p.tokens - unit.first_token);
  }
  __device__ __forceinline__ uint32_t x_bytes(const Unit& unit, uint32_t chunk) const {
    return tokens(unit) * row_bytes(chunk) + scale_bytes(chunk);
  }
  __device__ __forceinline__ void fetch_x(const Unit& unit, uint32_t chunk, SharedPlace to,
                                          SharedPlace barrier) const {
    const uint32_t lane = threadIdx.x % kLanes, count = tokens(unit), bytes = row_bytes(chunk);
    if (lane == 2 * kGroups) {
      const size_t tile = size_t{unit.first_token / kXTileTokens} * k_tiles + 2 * chunk;
      instruction::copy_bulk(to + Form::kXBytes, p.x_scales + tile * kXTileBytes, scale_bytes(chunk),
                             barrier);
    }
    for (uint32_t i = lane; i < count; i += kLanes) {
      instruction::copy_bulk(to + i * kXRowBytes,
                             p.x + size_t{unit.first_token + i} * (p.columns / 2) + chunk * kXRowBytes,
                             bytes, barrier);
    }
  }

  // A token's scales for the first or second instruction.
  __device__ __forceinline__ uint32_t scales_of(SharedPlace x_scales, const Unit& unit, uint32_t chunk,
                                                uint32_t token, bool second) const {
    const uint32_t in_tile = unit.first_token % kXTileTokens + token;
    const SharedPlace place = x_scales + in_tile % 32 * 16 + in_tile / 32 * 4;
    return in_order(instruction::load_shared_word(place),
                    has_second_tile(chunk) ? instruction::load_shared_word(place + kXTileBytes) : 0, second);
  }

  __device__ __forceinline__ void write(const Unit& unit, uint32_t warp,
                                        const float (&sums)[Form::kTokenGroups][4]) const {
    warpgroup::write_all<T, Products, Form::kTokenGroups>(
        p.output, p.tokens, unit.first_group + warp, unit.first_token,
        [&](uint32_t i) { return make_float4(sums[i][0], sums[i][1], sums[i][2], sums[i][3]); },
        [](uint32_t, float) {});
  }
};

template <class Form, class Rows>
struct Multiplier {
  using Sums = float[Form::kTokenGroups][4];
  using Unit = typename Rows::Unit;

  const Rows rows;
  const SharedPlace shared;  // [stages]: codes [groups], scales [groups], x, x's scales; barriers
  const uint32_t lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  const uint32_t chunks = rows.chunks(), all_chunks = rows.units() * chunks,
                 blocks = min(gridDim.x, all_chunks);
  // The last blocks begin, so that whom a block waits for has begun before it.
  const uint32_t range = blocks - 1 - blockIdx.x;

  __device__ __forceinline__ SharedPlace stage(uint32_t i) const { return shared + i * Form::kStageBytes; }
  __device__ __forceinline__ SharedPlace full(uint32_t i) const {
    return shared + Form::kStages * Form::kStageBytes + i * 8;
  }
  __device__ __forceinline__ SharedPlace empty(uint32_t i) const { return full(Form::kStages + i); }

  // A block's chunks in order. Bit i of `phases` is the parity of the phase in which stage i is filled.
  struct Place {
    uint32_t unit, chunk, left, stage = 0, phases = 0;
    __device__ __forceinline__ uint32_t parity() const { return phases >> stage & 1; }
  };
  __device__ __forceinline__ uint32_t range_begin(uint32_t i) const {
    return static_cast<uint32_t>(uint64_t{i} * all_chunks / blocks);
  }
  __device__ __forceinline__ Place first() const {
    const uint32_t from = range_begin(range);
    return {from / chunks, from % chunks, range_begin(range + 1) - from};
  }
  __device__ __forceinline__ void advance(Place& place) const {
    place.phases ^= 1u << place.stage;
    if (++place.stage == Form::kStages) place.stage = 0;
    --place.left;
    if (++place.chunk == chunks) {
      place.chunk = 0;
      ++place.unit;
    }
  }

  // The fetching warp's share of a chunk: its lanes begin a copy each, so that no thread is the limit. What
  // is past the last row is left as it was: nothing looks at its sums.
  __device__ __forceinline__ void fetch(const Place& at, const Unit& unit) const {
    const uint32_t groups = rows.groups(unit);
    const SharedPlace own = stage(at.stage), barrier = full(at.stage);
    if (lane == 0)
      instruction::arrive_expecting(barrier, groups * kTileBytes + rows.x_bytes(unit, at.chunk));
    __syncwarp();
    const uint32_t group = lane % kGroups;
    const size_t tile = (rows.weight_group(unit) + group) * chunks + at.chunk;
    if (group < groups && lane < kGroups) {
      instruction::copy_bulk(own + group * kCodeBytes, rows.codes() + tile * kCodeBytes, kCodeBytes, barrier);
    } else if (group < groups && lane < 2 * kGroups) {
      instruction::copy_bulk(own + kGroups * kCodeBytes + group * kScaleBytes,
                             rows.scales() + tile * kScaleBytes, kScaleBytes, barrier);
    }
    rows.fetch_x(unit, at.chunk, own + Form::kWeightBytes, barrier);
  }
  __device__ __forceinline__ void fetch_all() const {
    Place at = first();
    for (uint32_t number = 0; at.left != 0;) {
      const Unit unit = rows.unit(at.unit);
      const uint32_t own = at.unit;
      for (; at.left != 0 && at.unit == own; advance(at), ++number) {
        if (number >= Form::kStages) instruction::wait_for_phase(empty(at.stage), at.parity() ^ 1);
        fetch(at, unit);
      }
    }
  }

  // A lane has the 32 columns of two blocks, and its neighbour those of the next two. An instruction's block
  // is in two neighbouring lanes: they exchange words. Its four blocks are then those of columns 0, 64, 16
  // and 80; of the second instruction, 32, 96, 48 and 112.
  __device__ __forceinline__ void exchange(const uint4& words, uint32_t (&first)[2],
                                           uint32_t (&second)[2]) const {
    const bool odd = lane % 2;
    const uint32_t x = __shfl_xor_sync(~0u, odd ? words.x : words.y, 1),
                   z = __shfl_xor_sync(~0u, odd ? words.z : words.w, 1);
    first[0] = odd ? x : words.x;
    first[1] = odd ? z : words.z;
    second[0] = odd ? words.y : x;
    second[1] = odd ? words.w : z;
  }

  __device__ __forceinline__ void multiply(SharedPlace own, const Unit& unit, uint32_t chunk,
                                           Sums& sums) const {
    const uint32_t q = lane / 4, c = lane % 4;
    uint32_t a[2][4], upper[2][2], lower[2][2];
    const SharedPlace codes = own + warp * kCodeBytes + lane * 16;
    exchange(instruction::load_shared(codes), upper[0], upper[1]);
    exchange(instruction::load_shared(codes + kCodeBytes / 2), lower[0], lower[1]);
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      a[i][0] = upper[i][0];
      a[i][1] = lower[i][0];
      a[i][2] = upper[i][1];
      a[i][3] = lower[i][1];
    }
    // Lanes 0 and 1 of four have the first instruction's scales of both rows, the others the second's.
    const SharedPlace scales =
        own + kGroups * kCodeBytes + warp * kScaleBytes + (q * 4 + c / 2) * 4;
    const uint32_t scale_a = in_order(instruction::load_shared_word(scales),
                                      instruction::load_shared_word(scales + 8), c % 2);

    const SharedPlace x = own + Form::kWeightBytes + lane * 16;
    const SharedPlace x_scales = own + Form::kWeightBytes + Form::kXBytes;
#pragma unroll
    for (uint32_t i = 0; i < Form::kTokenGroups; i += 2) {
      // Lanes 0 and 1 have both instructions' scales of the first eight tokens, the others of the next.
      const uint32_t scale_b =
          rows.scales_of(x_scales, unit, chunk, (i + c / 2) * kTokenGroup + q, c % 2);
      uint32_t b[2];
      uint32_t second[2];
      exchange(instruction::load_shared(x + i * (kTokenGroup * kXRowBytes)), b, second);
      instruction::mma_fp4<0, 0>(sums[i], a[0], b, scale_a, scale_b);
      instruction::mma_fp4<1, 1>(sums[i], a[1], second, scale_a, scale_b);
      exchange(instruction::load_shared(x + (i + 1) * (kTokenGroup * kXRowBytes)), b, second);
      instruction::mma_fp4<0, 2>(sums[i + 1], a[0], b, scale_a, scale_b);
      instruction::mma_fp4<1, 3>(sums[i + 1], a[1], second, scale_a, scale_b);
    }
  }

  // Who begins a unit adds the parts of those that go on with it, in their order. They had the unit first, so
  // that it does not wait long.
  __device__ __forceinline__ void leave_part(const Sums& sums) const {
#pragma unroll
    for (uint32_t i = 0; i < Form::kTokenGroups; ++i)
      *part_of(range, i) = make_float4(sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
    __syncwarp();
    if (lane == 0) instruction::store_release(flag_of(range), 1);
  }
  __device__ __forceinline__ void add_parts(uint32_t unit, Sums& sums) const {
    for (uint32_t other = range + 1; range_begin(other) < (unit + 1) * chunks; ++other) {
      while (instruction::load_acquire(flag_of(other)) == 0) {
      }
      __syncwarp();
#pragma unroll
      for (uint32_t i = 0; i < Form::kTokenGroups; ++i) {
        const float4 more = __ldcg(part_of(other, i));
        sums[i][0] += more.x;
        sums[i][1] += more.y;
        sums[i][2] += more.z;
        sums[i][3] += more.w;
      }
    }
  }
  __device__ __forceinline__ float4* part_of(uint32_t block, uint32_t tokens) const {
    return rows.shares().parts + (size_t{block} * Form::kSlots + tokens * kWarps + warp) * kLanes + lane;
  }
  __device__ __forceinline__ uint32_t* flag_of(uint32_t block) const {
    return rows.shares().flags + block * kWarps + warp;
  }

  __device__ __forceinline__ void consume() const {
    for (Place at = first(); at.left != 0;) {
      Sums sums = {};
      const uint32_t number = at.unit, first_chunk = at.chunk;
      const Unit unit = rows.unit(number);
      uint32_t previous = Form::kStages;
      do {
        if (previous != Form::kStages) free_stage(previous);
        instruction::wait_for_phase(full(at.stage), at.parity());
        multiply(stage(at.stage), unit, at.chunk, sums);
        __syncwarp();
        previous = at.stage;
        advance(at);
      } while (at.left != 0 && at.unit == number);
      free_stage(previous);
      if (first_chunk != 0) {
        leave_part(sums);
        continue;
      }
      add_parts(number, sums);
      rows.write(unit, warp, sums);
    }
  }

  // In another block of instructions than the products of this stage: see instruction::arrive.
  __device__ __forceinline__ void free_stage(uint32_t i) const {
    if (lane == 0) instruction::arrive(empty(i));
  }

  __device__ __forceinline__ void run() const {
    if (blockIdx.x >= blocks) return;
    if (threadIdx.x == 0) {
      for (uint32_t i = 0; i < Form::kStages; ++i) {
        instruction::init_barrier(full(i), 1);
        instruction::init_barrier(empty(i), kWarps);
      }
      instruction::publish_barriers();
    }
    __syncthreads();
    if (warp == kWarps) {
      fetch_all();
    } else {
      consume();
    }
  }
};

}  // namespace nibble::w4a4
