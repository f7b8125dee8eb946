// Which chunk of which sequence a thread block computes, and the order of a warp's tiles.
#pragma once

#include "decode_attention/problem.h"
#include "nibble/tensor_core.cuh"

namespace nibble::attention {

// Sizes of a kernel. kTile: tokens that a warp computes at a time.
template <uint32_t HeadDim, bool IsFp8, uint32_t Warps, uint32_t Stages>
struct Form {
  static constexpr uint32_t kHeadDim = HeadDim, kWarps = Warps, kStages = Stages;
  static constexpr bool kIsFp8 = IsFp8;
  static constexpr uint32_t kElement = IsFp8 ? 1 : 2, kThreads = Warps * kLanes;
  static constexpr uint32_t kRowBytes = 2 * HeadDim * kElement, kRowUnits = kRowBytes / 16;
  static constexpr uint32_t kTile = kRowBytes > 512 ? 16 : 8192 / kRowBytes;
  static constexpr uint32_t kTileBytes = kTile * kRowBytes;
  static constexpr uint32_t kSteps = HeadDim / 16;   // of the product of queries and keys
  static constexpr uint32_t kColumns = HeadDim / 8;  // tiles of eight columns of the output
  static constexpr uint32_t kLoad = HeadDim * kElement / 8 < 16 ? 8 : 16;  // bytes of a value at a time
  static constexpr uint32_t kLoads = HeadDim * kElement / 8 / kLoad, kPerLoad = kLoad / kElement;
  static constexpr uint32_t kSumStride = HeadDim + 8;
  static constexpr bool kQueryInRegisters = HeadDim <= 128;
  // A multiprocessor of SM90 has registers and shared memory for these.
  static constexpr uint32_t kBlocks = HeadDim == 256 && !IsFp8 ? 1 : 2;
};

template <class Form>
struct Shared {
  alignas(16) uint8_t ring[Form::kWarps * Form::kStages * Form::kTileBytes];
  alignas(16) uint32_t query[Form::kSteps * kLanes * 4];  // as lanes take it
  alignas(16) float sums[8 * Form::kSumStride];
  float weights[kRows * kMostSplits];
  float maxima[Form::kWarps][kRows], totals[Form::kWarps][kRows];
  uint32_t largest[kRows];  // bits of the largest |query|
  float maximum[kRows], total[kRows];
  uint32_t ends[kMostSequences];  // items up to and with each sequence
  uint32_t lengths[kMostSequences], query_begins[kMostSequences + 1];
  uint32_t is_last;
};

// One KV head's chunk of a sequence for a tile of rows.
struct Item {
  uint32_t sequence, head, row_tile, split, splits;
  uint32_t first, length;  // tokens that are seen
  uint32_t begin, tiles;   // of the chunk
  uint32_t query_begin, queries;
  const int32_t* pages;
};

template <class Form>
__device__ __forceinline__ Span span_of_sequence(const Problem& p, const Shared<Form>& shared,
                                                 uint32_t sequence) {
  const uint32_t queries = shared.query_begins[sequence + 1] - shared.query_begins[sequence];
  return span_of(p, shared.lengths[sequence], queries, Form::kTile);
}

// The number of items; fills shared's tables of sequences.
template <class Form>
__device__ __forceinline__ uint32_t count_items(const Problem& p, Shared<Form>& shared) {
  const uint32_t heads = p.kv_heads * row_tiles_of(p);
  for (uint32_t i = threadIdx.x; i <= p.sequences; i += Form::kThreads) {
    shared.query_begins[i] = static_cast<uint32_t>(__ldg(p.query_begins + i));
    if (i < p.sequences) shared.lengths[i] = static_cast<uint32_t>(max(__ldg(p.lengths + i), 0));
  }
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < p.sequences; i += Form::kThreads)
    shared.ends[i] = span_of_sequence(p, shared, i).splits * heads;
  __syncthreads();
  if (threadIdx.x < kLanes) {  // sums of a lane's share, then of all lanes before it
    const uint32_t share = quotient_up(p.sequences, kLanes), begin = threadIdx.x * share;
    const uint32_t end = min(begin + share, p.sequences);
    uint32_t sum = 0;
    for (uint32_t i = begin; i < end; ++i) sum += shared.ends[i];
    uint32_t before = sum;
    for (uint32_t step = 1; step < kLanes; step *= 2) {
      const uint32_t other = __shfl_sync(~0u, before, threadIdx.x >= step ? threadIdx.x - step : threadIdx.x);
      if (threadIdx.x >= step) before += other;
    }
    before -= sum;
    for (uint32_t i = begin; i < end; ++i) shared.ends[i] = before += shared.ends[i];
  }
  __syncthreads();
  return shared.ends[p.sequences - 1];
}

template <class Form>
__device__ __forceinline__ Item item_of(const Problem& p, const Shared<Form>& shared, uint32_t number) {
  uint32_t low = 0, high = p.sequences - 1;  // the first sequence whose items end after `number`
  while (low < high) {
    const uint32_t middle = (low + high) / 2;
    if (shared.ends[middle] > number) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  Item item;
  const Span span = span_of_sequence(p, shared, low);
  const uint32_t in_sequence = number - (low == 0 ? 0 : shared.ends[low - 1]);
  const uint32_t pair = in_sequence / span.splits, tiles = row_tiles_of(p);
  item.sequence = low;
  item.splits = span.splits;
  item.split = in_sequence - pair * span.splits;
  item.head = pair / tiles;
  item.row_tile = pair - item.head * tiles;
  item.first = span.first;
  item.length = span.end;
  item.begin = span.begin + item.split * span.chunk;
  item.tiles = quotient_up(min(span.chunk, span.end - item.begin), Form::kTile);
  item.query_begin = shared.query_begins[low];
  item.queries = shared.query_begins[low + 1] - item.query_begin;
  item.pages = p.pages + static_cast<int64_t>(low) * p.pages_stride;
  return item;
}

// A warp's tiles on their way to shared memory, across the borders of items.
template <class Form>
class Ring {
 public:
  __device__ __forceinline__ Ring(const Problem& p, const Shared<Form>& shared, uint8_t* memory,
                                  uint32_t items)
      : p_(p), shared_(shared), items_(items), number_(blockIdx.x), memory_(memory) {
    if (number_ < items_) {
      item_ = item_of(p_, shared_, number_);
      tile_ = threadIdx.x / kLanes;
      skip_empty();
      look_up_page();
    }
#pragma unroll 1
    for (uint32_t i = 0; i < Form::kStages; ++i) fetch();
  }

  // The oldest tile; `replace` must follow.
  __device__ __forceinline__ const uint8_t* take() const {
    instruction::wait_for_copies<Form::kStages - 1>();
    __syncwarp();
    return memory_ + slot_ * Form::kTileBytes;
  }
  __device__ __forceinline__ void replace() {
    __syncwarp();
    fetch();
  }

 private:
  __device__ __forceinline__ void skip_empty() {
    while (number_ < items_ && tile_ >= item_.tiles) {
      number_ += gridDim.x;
      if (number_ >= items_) return;
      item_ = item_of(p_, shared_, number_);
      tile_ = threadIdx.x / kLanes;
    }
  }

  // Each lane's page, of those that the next tile lies in. Tokens outside of what is seen have none.
  __device__ __forceinline__ void look_up_page() {
    if (number_ >= items_) return;
    const uint32_t token = item_.begin + tile_ * Form::kTile + threadIdx.x % kLanes * kPageGroup;
    const bool is_seen = threadIdx.x % kLanes * kPageGroup < Form::kTile && token < item_.length &&
                         token + kPageGroup > item_.first;
    const uint32_t page = token / p_.tokens_per_page;
    offset_ = is_seen ? static_cast<int64_t>(__ldg(item_.pages + page)) * p_.page_stride +
                            static_cast<int64_t>(token - page * p_.tokens_per_page) * p_.token_stride
                      : 0;
  }

  __device__ __forceinline__ void fetch() {
    if (number_ < items_) {
      constexpr uint32_t kAtOnce = Form::kRowUnits < kLanes ? kLanes / Form::kRowUnits : 1;
      constexpr uint32_t kParts = Form::kRowUnits < kLanes ? 1 : Form::kRowUnits / kLanes;
      const uint32_t lane = threadIdx.x % kLanes;
      const uint32_t unit = lane % Form::kRowUnits, begin = item_.begin + tile_ * Form::kTile;
      const uint8_t* const head = p_.cache + item_.head * p_.head_stride + unit * 16;
      uint8_t* const to = memory_ + slot_ * Form::kTileBytes;
#pragma unroll
      for (uint32_t i = 0; i < Form::kTile / kAtOnce; ++i) {
        const uint32_t row = i * kAtOnce + lane / Form::kRowUnits;
        const int64_t group = static_cast<int64_t>(
            __shfl_sync(~0u, static_cast<unsigned long long>(offset_), i * kAtOnce / kPageGroup));
        const bool is_seen = begin + row < item_.length && begin + row >= item_.first;
        const uint8_t* const from = head + (is_seen ? group + (row % kPageGroup) * p_.token_stride : 0);
#pragma unroll
        for (uint32_t part = 0; part < kParts; ++part) {
          uint8_t* const place = to + row * Form::kRowBytes + unit_place(row, unit + part * kLanes) * 16;
          instruction::copy_or_clear(instruction::shared_place(place), from + part * kLanes * 16, is_seen);
        }
      }
      tile_ += Form::kWarps;
      skip_empty();
      look_up_page();
    }
    instruction::end_copies();
    slot_ = slot_ + 1 == Form::kStages ? 0 : slot_ + 1;
  }

  const Problem& p_;
  const Shared<Form>& shared_;
  const uint32_t items_;
  uint32_t number_, tile_ = 0, slot_ = 0;
  uint8_t* const memory_;
  Item item_;
  int64_t offset_ = 0;

 public:
  // Where a row's 16 bytes lie, so that neither reads of keys nor of values meet in a bank: a key's readers
  // are two rows of four units, a value's every second row of eight with two units.
  static __device__ __forceinline__ uint32_t unit_place(uint32_t row, uint32_t unit) {
    return unit ^ ((row >> 2 & 1) << 1 | ((row >> 1 ^ row) & 1) << 2);
  }
};

}  // namespace nibble::attention
