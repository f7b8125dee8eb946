// What each warp computes, in order, and its tiles on their way to shared memory.
//
// Sequences that one block's warps can share come first, a unit of a block for each KV head and tile of rows:
// each warp has one split. Then come the splits of longer sequences, an equal number of neighbours for each
// warp of the grid.
#pragma once

#include "decode_attention/problem.h"
#include "nibble/tensor_core.cuh"

namespace nibble::attention {

// Sizes of a kernel. RowGroups: eights of rows. IsSmall: for SM12x, where a block has 99 KB of shared memory.
template <uint32_t HeadDim, bool IsFp8, uint32_t RowGroups, bool IsSmall>
struct Form {
  static constexpr uint32_t kHeadDim = HeadDim, kRowGroups = RowGroups;
  static constexpr bool kIsFp8 = IsFp8, kIsSmall = IsSmall;
  static constexpr uint32_t kElement = IsFp8 ? 1 : 2;
  static constexpr uint32_t kRowBytes = 2 * HeadDim * kElement, kRowUnits = kRowBytes / 16;
  static constexpr uint32_t kTileBytes = kTile * kRowBytes;
  // Of the head dim and type alone: the division of a sequence depends on them.
  static constexpr uint32_t kWarps = kTileBytes <= 4096 || !IsSmall ? 8 : kTileBytes == 8192 ? 4 : 2;
  // A large tile is copied as keys and then values, so that more warps have room for parts of it.
  static constexpr uint32_t kParts = kTileBytes == 16384 && !IsSmall ? 2 : 1;
  static constexpr uint32_t kPartBytes = kTileBytes / kParts, kPartRowBytes = kRowBytes / kParts;
  static constexpr uint32_t kPartRowUnits = kRowUnits / kParts;
  static constexpr uint32_t kThreads = kWarps * kLanes;
  // A multiprocessor of SM90 has registers and shared memory for these.
  static constexpr uint32_t kBlocks = !IsSmall && kTileBytes <= 4096 && RowGroups == 1 ? 2 : 1;
  static constexpr uint32_t kRingBytes = IsSmall ? 64 * 1024 : kBlocks == 2 ? 96 * 1024 : 192 * 1024;
  static constexpr uint32_t kStages = kRingBytes / (kWarps * kPartBytes);  // parts of tiles
  static constexpr uint32_t kSteps = HeadDim / 16;     // of the product of queries and keys
  static constexpr uint32_t kDimTiles = HeadDim / 16;  // of the product of weights and values
  static constexpr uint32_t kLoad = HeadDim * kElement / 8 < 16 ? 8 : 16;  // bytes of a value at a time
  static constexpr uint32_t kLoads = HeadDim * kElement / 8 / kLoad, kPerLoad = kLoad / kElement;
};

template <class Form>
class Cursor;

template <class Form>
struct Shared {
  union {
    alignas(16) uint8_t ring[Form::kRingBytes];
    float weights[kRows * kMostSplits];  // when the ring is empty
  };
  float maxima[Form::kWarps][8], totals[Form::kWarps][8];
  uint32_t held[Form::kWarps];  // where in the ring a warp's partial result lies
  uint32_t row_first[Form::kWarps][kRows], row_end[Form::kWarps][kRows];  // tokens that a row sees
  uint32_t unit_ends[kMostSequences], split_ends[kMostSequences];  // up to and with each sequence
  uint32_t lengths[kMostSequences], query_begins[kMostSequences + 1];
  uint32_t chunks[kMostSequences];  // tiles of a split
  Cursor<Form> fetching[Form::kWarps], computing[Form::kWarps];  // of which registers are short
  uint32_t finished;  // a pair of sequence and head whose splits are all there, plus one
};

// Of a sequence with queries, without `is_together`.
template <class Form>
__device__ __forceinline__ Span span_of_sequence(const Problem& p, const Shared<Form>& shared,
                                                 uint32_t sequence) {
  const uint32_t queries = shared.query_begins[sequence + 1] - shared.query_begins[sequence];
  Span span = undivided_span(p, shared.lengths[sequence], queries);
  span.chunk = shared.chunks[sequence];
  span.splits = splits_of(span.tiles, span.chunk);
  return span;
}

// Sums of a lane's share of numbers, then of all lanes before it, in place.
__device__ __forceinline__ void add_up(uint32_t* numbers, uint32_t count) {
  const uint32_t lane = threadIdx.x % kLanes, share = quotient_up(count, kLanes);
  const uint32_t begin = min(lane * share, count), end = min(begin + share, count);
  uint32_t sum = 0;
  for (uint32_t i = begin; i < end; ++i) sum += numbers[i];
  uint32_t before = sum;
  for (uint32_t step = 1; step < kLanes; step *= 2) {
    const uint32_t other = __shfl_sync(~0u, before, lane >= step ? lane - step : lane);
    if (lane >= step) before += other;
  }
  before -= sum;
  for (uint32_t i = begin; i < end; ++i) numbers[i] = before += numbers[i];
}

// Fills shared's tables of sequences.
template <class Form>
__device__ __forceinline__ void count_work(const Problem& p, Shared<Form>& shared) {
  const uint32_t heads = p.kv_heads * row_tiles_of(p);
  if (threadIdx.x == 0) shared.finished = 0;
  for (uint32_t i = threadIdx.x; i < p.sequences; i += Form::kThreads) {
    const uint32_t begin = static_cast<uint32_t>(__ldg(p.query_begins + i));
    const uint32_t end = static_cast<uint32_t>(__ldg(p.query_begins + i + 1));
    const uint32_t length = static_cast<uint32_t>(max(__ldg(p.lengths + i), 0));
    const Span span = span_of(p, length, end - begin, Form::kWarps);
    shared.lengths[i] = length;
    shared.query_begins[i] = begin;
    shared.chunks[i] = span.chunk;
    if (i + 1 == p.sequences) shared.query_begins[i + 1] = end;
    shared.unit_ends[i] = span.is_together && span.splits != 0 ? heads : 0;
    shared.split_ends[i] = span.is_together ? 0 : span.splits * heads;
  }
  __syncthreads();
  if (threadIdx.x / kLanes == 0) add_up(shared.unit_ends, p.sequences);
  if (threadIdx.x / kLanes == 1) add_up(shared.split_ends, p.sequences);
  __syncthreads();
}

// The part of `all` numbers that one of `parts` has; the first parts have one more.
struct Share {
  uint32_t begin, end;
};
__device__ __forceinline__ Share share_of(uint32_t all, uint32_t parts, uint32_t part) {
  const uint32_t each = all / parts, more = all - each * parts;
  const uint32_t begin = part * each + min(part, more);
  return {begin, begin + each + (part < more ? 1 : 0)};
}

// Goes through a warp's splits.
template <class Form>
class Cursor {
 public:
  uint32_t sequence, head, row_tile, split, splits;
  uint32_t first, length;  // tokens that are seen
  uint32_t begin, tiles;   // of the split
  uint32_t number;         // of the unit, or of the split
  bool is_together, is_over;

  Cursor() = default;
  __device__ __forceinline__ Cursor(const Problem& p, const Shared<Form>& shared) {
    const uint32_t warp = threadIdx.x / kLanes;
    const uint32_t units = shared.unit_ends[p.sequences - 1], splits = shared.split_ends[p.sequences - 1];
    const Share unit = share_of(units, gridDim.x, blockIdx.x);
    number = unit.begin, end_ = unit.end;
    // The blocks that may have a unit less come first.
    own_ = share_of(splits, gridDim.x * Form::kWarps, warp * gridDim.x + gridDim.x - 1 - blockIdx.x);
    is_over = false, is_together = true;
    if (number < end_) {
      find(p, shared, shared.unit_ends);
    } else {
      go_to_splits(p, shared);
    }
  }

  __device__ __forceinline__ void next(const Problem& p, const Shared<Form>& shared) {
    if (++number == end_) {
      if (!is_together) {
        is_over = true;
      } else {
        go_to_splits(p, shared);
      }
      return;
    }
    if (!is_together && ++split < splits) return look_at_split();
    if (!is_together) split = 0;
    if (++row_tile == row_tiles_of(p)) {
      row_tile = 0;
      if (++head == p.kv_heads) {
        head = 0;
        const uint32_t* const ends = is_together ? shared.unit_ends : shared.split_ends;
        do ++sequence;
        while (ends[sequence] <= number);
        look_at_sequence(p, shared);
      }
    }
    look_at_split();
  }

  // Whether this split is the first one, or the last one, of its pair of sequence and head that this warp
  // has.
  __device__ __forceinline__ bool is_first_of_pair() const {
    return is_together || split == 0 || number == own_.begin;
  }
  __device__ __forceinline__ bool is_last_of_pair() const {
    return number + 1 == end_ || split + 1 == splits;
  }

  // To shared memory, where it takes no registers.
  __device__ __forceinline__ void park(Cursor& place) const {
    __syncwarp();
    if (threadIdx.x % kLanes == 0) place = *this;
    __syncwarp();
  }

  // How many of its pair this warp has up to this one.
  __device__ __forceinline__ uint32_t splits_of_pair() const { return min(split, number - own_.begin) + 1; }

 private:
  __device__ __forceinline__ void go_to_splits(const Problem& p, const Shared<Form>& shared) {
    number = own_.begin, end_ = own_.end;
    is_together = false;
    if (number >= end_) {
      is_over = true;
    } else {
      find(p, shared, shared.split_ends);
    }
  }

  __device__ __forceinline__ void find(const Problem& p, const Shared<Form>& shared, const uint32_t* ends) {
    uint32_t low = 0, high = p.sequences - 1;  // the first sequence that ends after `number`
    while (low < high) {
      const uint32_t middle = (low + high) / 2;
      if (ends[middle] > number) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    sequence = low;
    look_at_sequence(p, shared);
    const uint32_t in_sequence = number - (low == 0 ? 0 : ends[low - 1]), tiles = row_tiles_of(p);
    const uint32_t pair = is_together ? in_sequence : in_sequence / splits;
    split = is_together ? threadIdx.x / kLanes : in_sequence - pair * splits;
    head = pair / tiles;
    row_tile = pair - head * tiles;
    look_at_split();
  }

  __device__ __forceinline__ void look_at_sequence(const Problem& p, const Shared<Form>& shared) {
    const Span span = span_of_sequence(p, shared, sequence);
    first = span.first, length = span.end, span_begin_ = span.begin;
    span_tiles_ = span.tiles, chunk_ = span.chunk, splits = span.splits;
  }
  __device__ __forceinline__ void look_at_split() {
    const uint32_t before = split * chunk_;
    begin = span_begin_ + before * kTile;
    tiles = before >= span_tiles_ ? 0 : min(chunk_, span_tiles_ - before);
  }

  uint32_t end_, span_begin_, span_tiles_, chunk_;
  Share own_;
};

// A warp's tiles, or their keys and values in turns, on their way to shared memory, across the borders of
// splits.
template <class Form>
class Ring {
 public:
  __device__ __forceinline__ Ring(const Problem& p, Shared<Form>& shared, uint8_t* memory)
      : p_(p), shared_(shared), memory_(memory) {
    look_at(Cursor<Form>(p, shared));
#pragma unroll 1
    for (uint32_t i = 0; i < Form::kStages; ++i) fetch(i % Form::kParts);
  }

  // The oldest one; `replace` must follow, with 0 for keys and 1 for their values.
  __device__ __forceinline__ uint8_t* take() const {
    instruction::wait_for_copies<Form::kStages - 1>();
    __syncwarp();
    return oldest();
  }
  __device__ __forceinline__ uint8_t* oldest() const { return memory_ + slot_ * Form::kPartBytes; }
  __device__ __forceinline__ void replace(uint32_t part) {
    __syncwarp();
    fetch((part + Form::kStages) % Form::kParts);
  }

 private:
  __device__ __forceinline__ void look_at(Cursor<Form> cursor) {
    while (!cursor.is_over && cursor.tiles == 0) cursor.next(p_, shared_);
    cursor.park(parked());
    tiles_ = cursor.is_over ? 0 : cursor.tiles;
    from_ = p_.cache + cursor.head * p_.head_stride;
    ahead_ = cursor.begin - cursor.first;
    seen_ = cursor.length - cursor.first;
    tile_ = 0;
    look_up_pages(cursor);
  }

  // Each lane has the page of one of the next 32 tiles. They are read well before they are used.
  __device__ __forceinline__ void look_up_pages(const Cursor<Form>& cursor) {
    const uint32_t tile = tile_ + threadIdx.x % kLanes;
    if (tile >= tiles_) return;
    const uint32_t token = cursor.begin + tile * kTile, index = token / p_.tokens_per_page;
    page_ = __ldg(p_.pages + static_cast<int64_t>(cursor.sequence) * p_.pages_stride + index);
    in_page_ = token - index * p_.tokens_per_page;
  }

  __device__ __forceinline__ void fetch(uint32_t part) {
    if (tiles_ != 0) {
      constexpr uint32_t kUnits = Form::kPartRowUnits;
      constexpr uint32_t kAtOnce = kUnits < kLanes ? kLanes / kUnits : 1;
      constexpr uint32_t kEach = kUnits < kLanes ? 1 : kUnits / kLanes;
      const uint32_t lane = threadIdx.x % kLanes, unit = lane % kUnits, own_row = lane / kUnits;
      const int32_t page =
          static_cast<int32_t>(__shfl_sync(~0u, static_cast<uint32_t>(page_), tile_ % kLanes));
      const uint32_t in_page = __shfl_sync(~0u, in_page_, tile_ % kLanes);
      const uint8_t* from = from_ + page * p_.page_stride + (in_page + own_row) * p_.token_stride + unit * 16;
      from += part * Form::kPartRowBytes;
      uint8_t* const to = memory_ + slot_ * Form::kPartBytes;
#pragma unroll
      for (uint32_t i = 0; i < kTile / kAtOnce; ++i) {
        const uint32_t row = i * kAtOnce + own_row;
        // Less than zero, as a number without a sign, is more than all that is seen.
        const bool is_seen = ahead_ + tile_ * kTile + row < seen_;
#pragma unroll
        for (uint32_t each = 0; each < kEach; ++each) {
          uint8_t* const place = to + row * Form::kPartRowBytes + unit_place(row, unit + each * kLanes) * 16;
          instruction::copy_or_clear(instruction::shared_place(place), from + each * kLanes * 16, is_seen);
        }
        from += kAtOnce * p_.token_stride;
      }
      if (part + 1 == Form::kParts) next_tile();
    }
    instruction::end_copies();
    slot_ = slot_ + 1 == Form::kStages ? 0 : slot_ + 1;
  }

  __device__ __forceinline__ void next_tile() {
    if (++tile_ == tiles_) {
      Cursor<Form> cursor = parked();
      cursor.next(p_, shared_);
      look_at(cursor);
    } else if (tile_ % kLanes == 0) {
      look_up_pages(parked());
    }
  }

  __device__ __forceinline__ Cursor<Form>& parked() const { return shared_.fetching[threadIdx.x / kLanes]; }

  const Problem& p_;
  Shared<Form>& shared_;
  uint8_t* const memory_;
  const uint8_t* from_;  // the head in the first page
  uint32_t tiles_, tile_, slot_ = 0, in_page_ = 0;
  uint32_t ahead_, seen_;  // tokens from the first that is seen
  int32_t page_ = 0;

 public:
  // Where a row's 16 bytes lie, so that neither reads of keys nor of values meet in a bank: a key's readers
  // are two rows of four units, a value's every second row of eight with two units.
  static __device__ __forceinline__ uint32_t unit_place(uint32_t row, uint32_t unit) {
    return unit ^ ((row >> 2 & 1) << 1 | ((row >> 1 ^ row) & 1) << 2);
  }
};

}  // namespace nibble::attention
