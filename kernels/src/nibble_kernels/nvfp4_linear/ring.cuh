// The way of an NVFP4 weight to the decode kernel's warps.
#pragma once

#include "nvfp4_linear/work.cuh"

namespace nibble::decode {

// What a lane has of a tile: 32 columns of a row of the upper half and of one of the lower, four scales.
struct Fragment {
  uint4 upper, lower;
  uint32_t scales;
};

// A warp's tiles on their way to shared memory, a strip's of the same columns in a stage. A lane reads
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
    begin_ = instruction::shared_place(shared + warp * (Form::kDepth * Form::kStageBytes) + lane * 16);
    first_chunk_ = rounds.begin;
    start_run();
#pragma unroll
    for (uint32_t i = 0; i < Form::kDepth; ++i) {
      place_ = begin_ + i * Form::kStageBytes;
      fetch();
    }
    place_ = begin_;
  }

  // The oldest stage's tiles; `replace` must follow.
  __device__ __forceinline__ void take(Fragment (&tiles)[Form::kGroups]) const {
    instruction::wait_for_copies<Form::kDepth - 1>();
#pragma unroll
    for (uint32_t i = 0; i < Form::kGroups; ++i) {
      const auto place = place_ + i * kTileBytes;
      tiles[i] = {instruction::load_shared(place), instruction::load_shared(place + 512),
                  instruction::load_shared_word(scale_place() + i * kTileBytes)};
    }
  }

  __device__ __forceinline__ void replace() {
    fetch();
    place_ = place_ == begin_ + (Form::kDepth - 1) * Form::kStageBytes ? begin_ : place_ + Form::kStageBytes;
  }

 private:
  __device__ __forceinline__ instruction::SharedPlace scale_place() const {
    return place_ + (1024 - threadIdx.x % kLanes * 12);
  }

  __device__ __forceinline__ void fetch() {
    if (tile_ != run_end_) {
#pragma unroll
      for (uint32_t i = 0; i < Form::kGroups; ++i) {
        const uint32_t tile = tile_ + i * to_next_group_;
        const uint4* const codes = instruction::element<2 * kLanes>(codes_, tile);
        instruction::copy_once(place_ + i * kTileBytes, codes);
        instruction::copy_once(place_ + (i * kTileBytes + 512), codes + kLanes);
        instruction::copy_word(scale_place() + i * kTileBytes, instruction::element<kLanes>(scales_, tile));
      }
      if (++tile_ == run_end_) start_run();
    }
    instruction::end_copies();
  }

  // The next tiles that lie one after the other: to the end of this warp's range, of a phase's columns, or of
  // a strip of several groups.
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
      const uint32_t strip = quotient(first, round.chunks), chunk = first - strip * round.chunks;
      const bool goes_on = Form::kGroups == 1 && round.chunks == p_.chunks;
      const uint32_t in_run = goes_on ? left : min(left, round.chunks - chunk);
      done_ += in_run;
      const uint32_t group = (round.first_strip + strip) * Form::kGroups;
      tile_ = group * p_.chunks + round.first_chunk + chunk;
      run_end_ = tile_ + in_run;
      // The last strip may lack a group; its first one then comes twice.
      to_next_group_ = group + 1 < p_.groups ? p_.chunks : 0;
      return;
    }
  }

  const Problem& p_;
  const Rounds<Form>& rounds_;
  const uint4* const codes_;
  const uint32_t* const scales_;
  instruction::SharedPlace begin_, place_;
  uint32_t tile_ = 0, run_end_ = 0, to_next_group_ = 0, done_ = 0, batch_ = 0, first_chunk_ = 0;
  bool over_ = false;
};

}  // namespace nibble::decode
