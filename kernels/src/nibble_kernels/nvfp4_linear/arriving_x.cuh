// Activations that arrive in shared memory while the decode kernel multiplies, for SM90.
//
// With 9 to 16 tokens a multiprocessor reads about as much of x as of the weight. Here tensor maps bring some chunks at
// a time, in the order in which all warps need them, and two neighbouring thread blocks may fetch half each for
// both. Measured: docs/kernels/nvfp4_linear.md.
#pragma once

#include "nibble/warpgroup_instructions.cuh"
#include "nvfp4_linear/work.cuh"

namespace nibble::decode {

// x lies as in memory, a chunk's tokens one after the other: a quarter of a chunk is 64 bytes, whose four pieces copies
// swap (CU_TENSOR_MAP_SWIZZLE_64B), so that eight lanes read 128 different bytes of shared memory.
template <class Form>
struct ArrivingX {
  using Place = instruction::SharedPlace;
  static constexpr bool kArrives = true;
  static constexpr uint32_t kQuarterBytes = 64, kTokenBytes = kChunk * 2,
                            kChunkBytes = Form::kTokens * kTokenBytes;
  static constexpr uint32_t kAlignment = 512;  // after which the swaps repeat themselves
  static constexpr uint32_t kBegin =
      (Form::kRingBytes + Form::kSlotBytes + Form::kEndBytes + kAlignment - 1) / kAlignment * kAlignment;
  static constexpr uint32_t kMostPlaces = 8;
  static constexpr uint32_t kBarrierBytes = 2 * kMostPlaces * sizeof(uint64_t);

  static constexpr uint32_t shared_bytes(uint32_t chunks, bool totals) {
    return kBegin + chunks * kChunkBytes + kBarrierBytes + (totals ? Form::kTotalBytes : 0);
  }

  const Problem& p;
  const CUtensorMap& map;  // of quarters of tokens, kTokens at a time
  uint8_t* const shared;   // [places, chunks of a segment, tokens], full barriers, empty barriers
  const Place elements = instruction::shared_place(shared);
  const Place barriers = elements + p.places * p.chunks_per_segment * kChunkBytes;
  const uint32_t lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;

  // `ends`: what lies in front in shared memory, which begins at a multiple of kAlignment.
  template <class Rows>
  __device__ __forceinline__ ArrivingX(const Problem& problem, const Rows&, uint32_t* behind_ends,
                                       const CUtensorMap& map)
      : p(problem),
        map(map),
        shared(reinterpret_cast<uint8_t*>(behind_ends) +
               (kBegin - Form::kRingBytes - Form::kSlotBytes - Form::kEndBytes)) {}

  __device__ __forceinline__ void* end() const {
    return shared + p.places * p.chunks_per_segment * kChunkBytes + kBarrierBytes;
  }
  __device__ __forceinline__ float undo(uint32_t) const { return 1.0f; }

  // This lane's pieces of a chunk: piece i is at the place with i's bits turned.
  struct Pieces {
    Place first;
    __device__ __forceinline__ uint4 of(uint32_t piece, uint32_t token_group) const {
      return instruction::load_shared(instruction::turned(first, piece << 4) +
                                      token_group * (kTokenGroup * kTokenBytes));
    }
  };
  __device__ __forceinline__ Pieces pieces(uint32_t chunk) const {
    const uint32_t quarter = lane;  // of a token: lane / 4, lane % 4
    return {elements + (chunk * kChunkBytes + quarter * kQuarterBytes + ((quarter >> 1 & 3) << 4))};
  }
  __device__ __forceinline__ void advance(Pieces& pieces) const { pieces.first += kChunkBytes; }

  // Where a warp is: the place of its segment and its phase there, and what to ask for next.
  struct Turn {
    uint32_t place, parity, next_segment, left;
  };
  __device__ __forceinline__ Turn first_turn(const Round& round, uint32_t rounds) const {
    if (all_stay(round)) return {0, 0, 0, 0};
    return {0, 0, p.places, segments(round) * rounds - p.places};
  }
  __device__ __forceinline__ Place full(uint32_t place) const { return barriers + 8 * place; }
  __device__ __forceinline__ Place empty(uint32_t place) const {
    return barriers + (8 * kMostPlaces + 8 * place);
  }
  __device__ __forceinline__ uint32_t segments(const Round& round) const {
    return quotient(round.chunks, p.chunks_per_segment);
  }
  // Whether all segments of a round have places, which then hold them for every round.
  __device__ __forceinline__ bool all_stay(const Round& round) const {
    return p.places * p.chunks_per_segment == round.chunks;
  }

  struct Start {};
  __device__ __forceinline__ Start start() const {
    if (threadIdx.x == 0) {
      instruction::prefetch_map(map);
      for (uint32_t place = 0; place < p.places; ++place) {
        instruction::init_barrier(full(place), 1);
        instruction::init_barrier(empty(place), Form::kWarps);
      }
      instruction::publish_barriers();
    }
    __syncwarp();
    if (p.sharers > 1) {
      instruction::begin_cluster_barrier_with_barriers();
    } else {
      __syncthreads();
    }
    return {};
  }

  // Asks for the first segments; asked() runs once that is done.
  template <class F>
  __device__ __forceinline__ void stage(const Round& round, const Start&, F&& asked) const {
    if (p.sharers > 1) instruction::end_cluster_barrier();
    if (warp == 0) {
      for (uint32_t place = 0; place < p.places; ++place) ask(round.first_chunk, place, place);
    }
    asked();
  }

  // Of a round from `first_chunk`. By a whole warp, whose lanes have copies of their own.
  __device__ __forceinline__ void ask(uint32_t first_chunk, uint32_t segment, uint32_t place) const {
    const uint32_t chunks = p.chunks_per_segment;
    if (lane == 0) instruction::arrive_expecting(full(place), chunks * kChunkBytes);
    __syncwarp();
    const uint32_t rank = p.sharers > 1 ? instruction::cluster_rank() : 0;
    for (uint32_t i = lane * p.sharers + rank; i < chunks; i += kLanes * p.sharers) {
      const Place to = elements + (place * chunks + i) * kChunkBytes;
      const uint32_t quarter = (first_chunk + segment * chunks + i) * kQuarters;
      if (p.sharers > 1) {
        instruction::copy_box_to_all(to, map, 0, quarter, 0, full(place), (1u << p.sharers) - 1);
      } else {
        instruction::copy_box(to, map, 0, quarter, 0, full(place));
      }
    }
  }

  // Until a segment is there. One that stays has been waited for once.
  __device__ __forceinline__ void wait(const Turn& turn) const {
    instruction::wait_for_phase(full(turn.place), turn.parity);
  }
  __device__ __forceinline__ uint32_t first_chunk(const Turn& turn) const {
    return turn.place * p.chunks_per_segment;
  }
  // After a warp's last look at a segment: its place may take another one, of this round or the next.
  __device__ __forceinline__ void leave(const Round& round, Turn& turn) const {
    const bool stays = all_stay(round);
    if (!stays) {
      __syncwarp();
      if (lane == 0) instruction::arrive(empty(turn.place));
      if (warp == 0 && turn.left != 0) {
        instruction::wait_for_phase(empty(turn.place), turn.parity);
        if (turn.next_segment == segments(round)) turn.next_segment = 0;
        ask(round.first_chunk, turn.next_segment++, turn.place);
        --turn.left;
      }
    }
    if (++turn.place == p.places) {
      turn.place = 0;
      if (!stays) turn.parity ^= 1;
    }
  }
};

}  // namespace nibble::decode
