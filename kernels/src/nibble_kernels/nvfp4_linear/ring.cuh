// The way of a weight to the decode kernel's warps.
#pragma once

#include "nvfp4_linear/work.cuh"

namespace nibble::decode {

// What a lane has of a tile: 32 columns of a row of the upper half and of one of the lower, four scales.
struct Fragment {
  uint4 upper, lower;
  uint32_t scales;
};

// The same columns and rows of an E4M3 weight, 16 columns each, and the scales of the tile's upper and lower
// rows.
struct ByteFragment {
  uint4 upper[2], lower[2];
  float2 scales;
};

// A lane's part of the tiles in memory, and of one in shared memory, which begins at its first codes.
template <class Format>
struct Tiles;

template <>
struct Tiles<Nvfp4> {
  using SharedPlace = instruction::SharedPlace;
  const uint4* const codes;
  const uint32_t* const scales;

  __device__ __forceinline__ explicit Tiles(const Problem& p)
      : codes(p.codes + threadIdx.x % kLanes), scales(p.scales + threadIdx.x % kLanes) {}
  static __device__ __forceinline__ SharedPlace scale_place(SharedPlace place) {
    return place + (1024 - threadIdx.x % kLanes * 12);
  }
  __device__ __forceinline__ void fetch(SharedPlace place, uint32_t tile) const {
    const uint4* const from = instruction::element<Nvfp4::kCodes>(codes, tile);
    instruction::copy_once(place, from);
    instruction::copy_once(place + 512, from + kLanes);
    instruction::copy_word(scale_place(place), instruction::element<Nvfp4::kScales>(scales, tile));
  }
  static __device__ __forceinline__ Fragment load(SharedPlace place) {
    return {instruction::load_shared(place), instruction::load_shared(place + 512),
            instruction::load_shared_word(scale_place(place))};
  }
};

template <>
struct Tiles<E4m3> {
  using SharedPlace = instruction::SharedPlace;
  const uint4* const codes;
  const float2* const scales;

  __device__ __forceinline__ explicit Tiles(const Problem& p)
      : codes(p.codes + threadIdx.x % kLanes), scales(reinterpret_cast<const float2*>(p.scales)) {}
  static __device__ __forceinline__ SharedPlace scale_place(SharedPlace place) {
    return place + (2048 - threadIdx.x % kLanes * 8);
  }
  __device__ __forceinline__ void fetch(SharedPlace place, uint32_t tile) const {
    const uint4* const from = instruction::element<E4m3::kCodes>(codes, tile);
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) instruction::copy_once(place + i * 512, from + i * kLanes);
    instruction::copy_pair(scale_place(place), instruction::element<1>(scales, tile));
  }
  static __device__ __forceinline__ ByteFragment load(SharedPlace place) {
    const SharedPlace scales = scale_place(place);
    return {{instruction::load_shared(place), instruction::load_shared(place + 512)},
            {instruction::load_shared(place + 1024), instruction::load_shared(place + 1536)},
            make_float2(__uint_as_float(instruction::load_shared_word(scales)),
                        __uint_as_float(instruction::load_shared_word(scales + 4)))};
  }
};

// In shared memory a tile is as an E4m3 one is.
template <>
struct Tiles<E4m3Rows> {
  using SharedPlace = instruction::SharedPlace;
  const Problem& p;

  __device__ __forceinline__ explicit Tiles(const Problem& p) : p(p) {}

  // Rows past the half and columns past the last are others of the weight: x is zero there, or nobody looks at
  // the sums.
  __device__ __forceinline__ void fetch(SharedPlace place, uint32_t tile) const {
    const uint32_t group = quotient(tile, p.chunks), chunk = tile - group * p.chunks;
    const uint32_t lane = threadIdx.x % kLanes, half = p.outputs / 2;
    const uint32_t row = min(group * kGroup + lane / kQuarters, half - 1);
    const uint32_t begin = chunk * kChunk + E4m3Rows::column(lane % kQuarters, 0);
    const uint8_t* const upper = reinterpret_cast<const uint8_t*>(p.codes) + size_t{row} * p.columns;
    const uint8_t* const lower = upper + size_t{half} * p.columns;
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const uint32_t column = min(begin + i * (kChunk / 2), p.columns - 16);
      instruction::copy_once(place + i * 512, reinterpret_cast<const uint4*>(upper + column));
      instruction::copy_once(place + 1024 + i * 512, reinterpret_cast<const uint4*>(lower + column));
    }
    const float2* const scales = reinterpret_cast<const float2*>(p.scales);
    instruction::copy_pair(Tiles<E4m3>::scale_place(place), instruction::element<1>(scales, tile));
  }
  static __device__ __forceinline__ ByteFragment load(SharedPlace place) { return Tiles<E4m3>::load(place); }
};

// A warp's tiles on their way to shared memory, one after the other as they lie in memory: the first from the
// start, as many as there is room for from `fill` on. A lane reads nothing but what it fetched itself.
template <class Form>
class Ring {
 public:
  __device__ __forceinline__ Ring(const Problem& problem, const Rounds<Form>& rounds, uint8_t* shared)
      : p_(problem),
        rounds_(rounds),
        tiles_(problem) {
    const uint32_t lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
    begin_ = instruction::shared_place(shared + warp * (Form::kDepth * kTileBytes) + lane * 16);
    first_chunk_ = rounds.begin;
    place_ = begin_;
    start_run();
    fetch();
  }

  // Fetches as many more as there is room for. Not before x is under way: x would come after them all.
  __device__ __forceinline__ void fill() {
#pragma unroll 1
    for (uint32_t i = 1; i < Form::kDepth; ++i) {
      place_ += kTileBytes;
      fetch();
    }
    place_ = begin_;
  }

  // The oldest tile; `replace` must follow.
  __device__ __forceinline__ auto take() const {
    instruction::wait_for_copies<Form::kDepth - 1>();
    return Tiles<Format>::load(place_);
  }

  __device__ __forceinline__ void replace() {
    fetch();
    place_ = place_ == begin_ + (Form::kDepth - 1) * kTileBytes ? begin_ : place_ + kTileBytes;
  }

 private:
  using Format = typename Form::Format;
  static constexpr uint32_t kTileBytes = Format::kTileBytes;

  __device__ __forceinline__ void fetch() {
    if (tile_ != run_end_) {
      tiles_.fetch(place_, tile_);
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
  const Tiles<Format> tiles_;
  instruction::SharedPlace begin_, place_;
  uint32_t tile_ = 0, run_end_ = 0, done_ = 0, batch_ = 0, first_chunk_ = 0;
  bool over_ = false;
};

}  // namespace nibble::decode
