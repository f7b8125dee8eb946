// The way of an NVFP4 weight to the decode kernel's warps.
#pragma once

#include "nvfp4_linear/work.cuh"

namespace nibble::decode {

// What a lane has of a tile: 32 columns of a row of the upper half and of one of the lower, four scales.
struct Fragment {
  uint4 upper, lower;
  uint32_t scales;
};

// A warp's tiles on their way to shared memory, one after the other as they lie in memory. A lane reads
// nothing but what it fetched itself.
template <class Form>
class Ring {
 public:
  __device__ __forceinline__ Ring(const Problem& problem, const Rounds<Form>& rounds, uint8_t* shared)
      : p_(problem),
        rounds_(rounds),
        codes_(problem.codes + threadIdx.x % kLanes),
        scales_(problem.scales + threadIdx.x % kLanes) {
    const uint32_t lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
    begin_ = instruction::shared_place(shared + warp * (Form::kDepth * kTileBytes) + lane * 16);
    first_chunk_ = rounds.begin;
    start_run();
#pragma unroll
    for (uint32_t i = 0; i < Form::kDepth; ++i) {
      place_ = begin_ + i * kTileBytes;
      fetch();
    }
    place_ = begin_;
  }

  // The oldest tile; `replace` must follow.
  __device__ __forceinline__ Fragment take() const {
    instruction::wait_for_copies<Form::kDepth - 1>();
    return {instruction::load_shared(place_), instruction::load_shared(place_ + 512),
            instruction::load_shared_word(scale_place())};
  }

  __device__ __forceinline__ void replace() {
    fetch();
    place_ = place_ == begin_ + (Form::kDepth - 1) * kTileBytes ? begin_ : place_ + kTileBytes;
  }

 private:
  __device__ __forceinline__ instruction::SharedPlace scale_place() const {
    return place_ + (1024 - threadIdx.x % kLanes * 12);
  }

  __device__ __forceinline__ void fetch() {
    if (tile_ != run_end_) {
      const uint4* const codes = instruction::element<2 * kLanes>(codes_, tile_);
      instruction::copy_once(place_, codes);
      instruction::copy_once(place_ + 512, codes + kLanes);
      instruction::copy_word(scale_place(), instruction::element<kLanes>(scales_, tile_));
      if (++tile_ == run_end_) start_run();
    }
    instruction::end_copies();
  }

  // The next tiles that lie one after the other: to the end of this warp's range or of a phase's columns.
  __device__ __forceinline__ void start_run() {
    const uint32_t warp = threadIdx.x / kLanes;
    while (!over_) {
      const Round round = rounds_.of(batch_, first_chunk_);
      const uint32_t first = first_step<Form>(round, warp) + done_,
                     left = first_step<Form>(round, warp + 1) - first;
      if (left == 0) {
        over_ = !rounds_.advance(batch_, first_chunk_);
        done_ = 0;
        continue;
      }
      const uint32_t group = quotient(first, round.chunks), chunk = first - group * round.chunks;
      const uint32_t in_run = round.chunks == p_.chunks ? left : min(left, round.chunks - chunk);
      done_ += in_run;
      tile_ = (round.first_group + group) * p_.chunks + round.first_chunk + chunk;
      run_end_ = tile_ + in_run;
      return;
    }
  }

  const Problem& p_;
  const Rounds<Form>& rounds_;
  const uint4* const codes_;
  const uint32_t* const scales_;
  instruction::SharedPlace begin_, place_;
  uint32_t tile_ = 0, run_end_ = 0, done_ = 0, batch_ = 0, first_chunk_ = 0;
  bool over_ = false;
};

}  // namespace nibble::decode
