// Prompts times an NVFP4 weight on SM90: a warpgroup decodes the weight into shared memory, two others multiply
// 64 rows each by 256 tokens from there. Layouts and measurements: docs/kernels/nvfp4_linear.md.
#pragma once

#include "nvfp4_linear/output.cuh"

namespace nibble::warpgroup {

struct PromptProblem {
  CUtensorMap codes, scales;  // as in Problem
  CUtensorMap x;              // [tokens, columns] in swizzled boxes of 64 columns
  Output output;
  uint32_t tokens, chunks, groups, row_blocks, token_tiles;
};

struct PromptForm {
  static constexpr uint32_t kTokens = 256, kRows = 128, kGroups = kRows / 16;
  static constexpr uint32_t kRanks = 2;  // of a cluster: with other rows of the weight and the same tokens
  static constexpr uint32_t kHalves = 2;  // of a chunk: 64 columns, 128 bytes of a row
  static constexpr uint32_t kConsumerWarps = 2 * kWarps, kDecodingWarps = kWarps;
  static constexpr uint32_t kThreads = (kConsumerWarps + kDecodingWarps) * kLanes;
  static constexpr uint32_t kPackedStages = 3, kWeightStages = 2, kXStages = 4;
  static constexpr uint32_t kPackedBytes = kGroups * kTileBytes, kHalfBytes = kRows * 128,
                            kWeightBytes = kHalves * kHalfBytes, kXBytes = kTokens * 128;
  static constexpr uint32_t kBarriers = 2 * (kPackedStages + kWeightStages + kXStages);
  static constexpr uint32_t kSharedBytes = kWeightStages * kWeightBytes + kXStages * kXBytes +
                                           kPackedStages * kPackedBytes + kBarriers * 8;
};

#if NIBBLE_HAS_WARPGROUP_PRODUCTS

// Stages of a ring and the parity of their phases.
template <uint32_t Stages>
struct Turn {
  uint32_t stage = 0, parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == Stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

template <class T, class Operand>
struct PromptMultiplier {
  using Form = PromptForm;
  static constexpr bool kBfloat = std::is_same_v<typename Operand::Element, __nv_bfloat16>;

  const PromptProblem& p;
  const SharedPlace shared;  // a multiple of 1024
  const uint32_t lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  const uint32_t rank = instruction::cluster_rank();
  // Of a cluster: kRanks blocks of rows by a tile of tokens.
  const uint32_t units = p.row_blocks * p.token_tiles, clusters = gridDim.x / Form::kRanks;
  const uint32_t first_unit = blockIdx.x / Form::kRanks;

  __device__ __forceinline__ SharedPlace weight(uint32_t i) const { return shared + i * Form::kWeightBytes; }
  __device__ __forceinline__ SharedPlace x(uint32_t i) const {
    return shared + Form::kWeightStages * Form::kWeightBytes + i * Form::kXBytes;
  }
  __device__ __forceinline__ SharedPlace packed(uint32_t i) const { return x(Form::kXStages) + i * Form::kPackedBytes; }
  // Full, then empty.
  __device__ __forceinline__ SharedPlace barrier(uint32_t i) const { return packed(Form::kPackedStages) + i * 8; }
  __device__ __forceinline__ SharedPlace packed_full(uint32_t i) const { return barrier(2 * i); }
  __device__ __forceinline__ SharedPlace weight_full(uint32_t i) const {
    return barrier(2 * (Form::kPackedStages + i));
  }
  __device__ __forceinline__ SharedPlace x_full(uint32_t i) const {
    return barrier(2 * (Form::kPackedStages + Form::kWeightStages + i));
  }
  static __device__ __forceinline__ SharedPlace empty(SharedPlace full) { return full + 8; }

  __device__ __forceinline__ void start() const {
    if (threadIdx.x == 0) {
      instruction::prefetch_map(p.codes);
      instruction::prefetch_map(p.scales);
      instruction::prefetch_map(p.x);
      const auto init = [&](SharedPlace full, uint32_t arrivals, uint32_t departures) {
        instruction::init_barrier(full, arrivals);
        instruction::init_barrier(empty(full), departures);
      };
      for (uint32_t i = 0; i < Form::kPackedStages; ++i) init(packed_full(i), 1, Form::kDecodingWarps);
      for (uint32_t i = 0; i < Form::kWeightStages; ++i)
        init(weight_full(i), Form::kDecodingWarps, Form::kConsumerWarps);
      for (uint32_t i = 0; i < Form::kXStages; ++i) init(x_full(i), 1, Form::kRanks * Form::kConsumerWarps);
      instruction::publish_barriers();
    }
    instruction::cluster_barrier();
  }

  // A block's chunks in order.
  struct Place {
    uint32_t unit, chunk = 0;
  };
  __device__ __forceinline__ void advance(Place& place) const {
    if (++place.chunk == p.chunks) {
      place.chunk = 0;
      place.unit += clusters;
    }
  }

  __device__ __forceinline__ uint32_t first_group_of(uint32_t unit) const {
    return (unit / p.token_tiles * Form::kRanks + rank) * Form::kGroups;
  }

  __device__ __forceinline__ void fetch_packed(const Place& at, const Turn<Form::kPackedStages>& turn) const {
    const uint32_t first_group = first_group_of(at.unit);
    const SharedPlace full = packed_full(turn.stage), to = packed(turn.stage);
    instruction::wait_for_phase(empty(full), turn.parity ^ 1);
    instruction::arrive_expecting(full, Form::kPackedBytes);
    instruction::copy_box(to, p.codes, at.chunk * (kCodeBytes / 4), first_group, full);
    instruction::copy_box(to + Form::kGroups * kCodeBytes, p.scales, at.chunk * (kScaleBytes / 4), first_group, full);
  }
  // Each block fetches its share of the tokens for all of them.
  __device__ __forceinline__ void fetch_x(const Place& at, uint32_t half, const Turn<Form::kXStages>& turn) const {
    const SharedPlace full = x_full(turn.stage);
    instruction::wait_for_phase(empty(full), turn.parity ^ 1);
    instruction::arrive_expecting(full, Form::kXBytes);
    constexpr uint32_t kShare = Form::kTokens / Form::kRanks;
    instruction::copy_box_to_ranks(x(turn.stage) + rank * (Form::kXBytes / Form::kRanks), p.x,
                                   at.chunk * kChunk + half * (kChunk / 2),
                                   at.unit % p.token_tiles * Form::kTokens + rank * kShare, full,
                                   (1u << Form::kRanks) - 1);
  }

  // Four warps, each for a group of either consumer. A lane's 32 columns are half of the row's 128 bytes. One
  // thread fetches, too: the packed weight two chunks ahead, x when the multiplying warps have room.
  __device__ __forceinline__ void decode() const {
    const uint32_t own = warp - Form::kConsumerWarps, row = lane / 4, quarter = lane % 4;
    const bool fetches = own == 0 && lane == 0;
    Turn<Form::kPackedStages> packed_turn, ahead_turn;
    Turn<Form::kWeightStages> turn;
    Turn<Form::kXStages> x_turn;
    Place at{first_unit}, ahead = at;
    const auto fetch_ahead = [&] {
      if (ahead.unit >= units) return;
      if (fetches) fetch_packed(ahead, ahead_turn);
      ahead_turn.next();
      advance(ahead);
    };
    fetch_ahead();
    fetch_ahead();
    instruction::wait_for_previous_kernel();  // weights do not depend on it, x does
    for (; at.unit < units; advance(at)) {
      fetch_ahead();
      for (uint32_t half = 0; half < Form::kHalves; ++half) {
        if (fetches) fetch_x(at, half, x_turn);
        x_turn.next();
      }
      __syncwarp();
      const SharedPlace from = packed(packed_turn.stage);
      instruction::wait_for_phase(packed_full(packed_turn.stage), packed_turn.parity);
      Fragment tiles[2];
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) {
        const uint32_t group = own + i * kWarps;
        tiles[i] = load_tile(from + group * kCodeBytes, from + Form::kGroups * kCodeBytes + group * kScaleBytes);
      }
      __syncwarp();
      if (lane == 0) instruction::arrive(empty(packed_full(packed_turn.stage)));
      packed_turn.next();
      instruction::wait_for_phase(empty(weight_full(turn.stage)), turn.parity ^ 1);
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) {
        const SharedPlace to = weight(turn.stage) + quarter / 2 * Form::kHalfBytes +
                               ((i * kWarps + own) * 16 + row) * 128;
        uint32_t scales[4];
        Operand::scales(tiles[i].scales, scales);
#pragma unroll
        for (uint32_t piece = 0; piece < kPieces; ++piece) {
          const SharedPlace place = to + (quarter % 2 * kPieces + piece ^ row) * 16;
          instruction::store_shared(place, decoded(word(tiles[i].upper, piece), scales[piece / 2]));
          instruction::store_shared(place + kGroup * 128, decoded(word(tiles[i].lower, piece), scales[2 + piece / 2]));
        }
      }
      instruction::publish_to_products();
      __syncwarp();
      if (lane == 0) instruction::arrive(weight_full(turn.stage));
      turn.next();
    }
  }
  static __device__ __forceinline__ uint4 decoded(uint32_t codes, uint32_t scale) {
    uint32_t pairs[4];
    Operand::decode(codes, pairs);
    return make_uint4(Operand::multiply(pairs[0], scale), Operand::multiply(pairs[1], scale),
                      Operand::multiply(pairs[2], scale), Operand::multiply(pairs[3], scale));
  }

  __device__ __forceinline__ void consume() const {
    const uint32_t warpgroup = warp / kWarps;
    Turn<Form::kWeightStages> turn;
    Turn<Form::kXStages> x_turn;
    for (uint32_t unit = first_unit; unit < units; unit += clusters) {
      float sums[Form::kTokens / 2] = {};
      SharedPlace x_before = 0, weight_before = 0;  // whose products may run
      for (uint32_t chunk = 0; chunk < p.chunks; ++chunk) {
        instruction::wait_for_phase(weight_full(turn.stage), turn.parity);
#pragma unroll
        for (uint32_t half = 0; half < Form::kHalves; ++half) {
          instruction::wait_for_phase(x_full(x_turn.stage), x_turn.parity);
          const uint64_t a = instruction::swizzled_in_shared(__shfl_sync(
              ~0u, weight(turn.stage) + half * Form::kHalfBytes + warpgroup * (Form::kHalfBytes / 2), 0));
          const uint64_t b = instruction::swizzled_in_shared(__shfl_sync(~0u, x(x_turn.stage), 0));
          instruction::begin_products();
#pragma unroll
          for (uint32_t step = 0; step < kSteps / 2; ++step)
            instruction::multiply_shared<kBfloat>(sums, a + step * 2, b + step * 2);
          instruction::end_products();
          instruction::wait_for_products<1>();
          if (x_before) leave_x(x_before);
          if (lane == 0 && half == 0 && weight_before) instruction::arrive(empty(weight_before));
          x_before = x_full(x_turn.stage);
          x_turn.next();
        }
        weight_before = weight_full(turn.stage);
        turn.next();
      }
      instruction::wait_for_products<0>();
      leave_x(x_before);
      if (lane == 0) instruction::arrive(empty(weight_before));
      const uint32_t group = first_group_of(unit) + warp, first = unit % p.token_tiles * Form::kTokens;
#pragma unroll
      for (uint32_t i = 0; i < Form::kTokens / kTokenGroup; ++i) {
        write<T, Operand>(p.output, p.tokens, group, first + i * kTokenGroup,
                          make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]));
      }
    }
  }

  __device__ __forceinline__ void leave_x(SharedPlace full) const {
    if (lane < Form::kRanks) instruction::leave_at_rank(empty(full), lane);
  }

  __device__ __forceinline__ void run() const {
    start();
    instruction::let_next_kernel_start();
    if (warp < Form::kConsumerWarps) {
      consume();
    } else {
      decode();
    }
    instruction::cluster_barrier();  // others may still write to this block's shared memory
  }
};

#endif
}  // namespace nibble::warpgroup
