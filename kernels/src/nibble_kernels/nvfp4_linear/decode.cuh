// The decode kernel: few rows of activations times an NVFP4 weight, at the speed at which the weight can be
// read. Layouts, order of work and measurements: docs/kernels/nvfp4_linear.md.
//
// A thread block has whole groups of 16 weight rows. Its warps share their tiles, 16 rows by 128 columns
// each, in equal ranges, one after the other in memory, and read ahead of what they multiply. A group's sums
// meet in shared memory, in a fixed order. Where x does not fit into shared memory, columns come in phases.
#pragma once

#include <algorithm>
#include <type_traits>

#include "nibble/mma_operand.cuh"

namespace nibble::decode {

constexpr uint32_t kChunk = 128;  // columns of a tile
constexpr uint32_t kGroup = 8;  // rows of the weight's upper half in a group; as many of the lower half join
constexpr uint32_t kTokenGroup = 8;  // tokens side by side in a tensor core instruction
constexpr uint32_t kLanes = 32;
constexpr uint32_t kPieces = 4;    // 16 bytes of x for each of a weight's four words in a lane
constexpr uint32_t kQuarters = 4;  // of a chunk: a lane has the columns of one
constexpr uint32_t kItems =
    kGroup * kTokenGroup;  // pairs of outputs (r, r + N / 2) of a group and a token group
constexpr uint32_t kTileBytes = 2 * kGroup * kChunk * 9 / 16;
constexpr uint32_t kPiece = 16384;  // bytes of the next weight, of whose beginning the second cache is asked

struct Problem {
  const uint4* x;          // [tokens, columns]
  const uint4* codes;      // [groups, chunks, 2, 32]: weight.py
  const uint32_t* scales;  // [groups, chunks, 32]
  const float* column_scale;
  const void* bias;
  const void* residual;
  void* out;
  float upper_global_scale, lower_global_scale;  // of rows below N / 2 and of the others
  uint32_t tokens, outputs, columns, chunks, groups;
  uint32_t ranks;                                 // thread blocks of a cluster
  uint32_t chunks_per_phase, groups_per_cluster;  // of the smaller share
  bool silu_mul;
  const uint8_t* next;  // the weight of the next product, in pieces
  uint32_t next_pieces, next_bytes;
};

// kDepth: tiles of a warp under way. kGroupsPerRound: groups whose sums meet at a time.
template <bool Small, uint32_t TokenGroups, uint32_t Warps, uint32_t Depth, uint32_t GroupsPerRound>
struct Form {
  static constexpr bool kSmall = Small;  // for GPUs with little shared memory
  static constexpr uint32_t kTokenGroups = TokenGroups, kTokens = TokenGroups * kTokenGroup;
  static constexpr uint32_t kWarps = Warps, kThreads = Warps * kLanes, kDepth = Depth;
  static constexpr uint32_t kGroupsPerRound = GroupsPerRound;
  static constexpr uint32_t kBlocks =
      TokenGroups == 1 ? 2 : 1;                                // of a multiprocessor: the next kernel's, too
  static constexpr uint32_t kSums = TokenGroups * 2 * kItems;  // of a group, or of a warp's part of it
  static constexpr uint32_t kSlots = Warps + GroupsPerRound;   // parts of groups in a round
  static constexpr uint32_t kRingBytes = Warps * Depth * kTileBytes;
  static constexpr uint32_t kSlotBytes = kSlots * kSums * sizeof(float);
  static constexpr uint32_t kTotalBytes = GroupsPerRound * kSums * sizeof(float);
  static constexpr uint32_t kEndBytes = GroupsPerRound * 2 * sizeof(uint32_t);
  static constexpr uint32_t kRangeBytes = kTokens * sizeof(uint32_t);

  // With `totals` where a block's sums of a round are not yet the result.
  static constexpr uint32_t shared_bytes(uint32_t chunks, uint32_t tokens, bool totals) {
    return kRingBytes + kSlotBytes + kEndBytes + kRangeBytes + chunks * tokens * kChunk * 2 +
           (totals ? kTotalBytes : 0);
  }
};

// How many tokens a launch takes, and the warps for them. On SM12x a thread block has 99 KB of shared memory
// and less bandwidth to keep busy: fewer warps, and more of x at a time.
struct LargeForms {
  using Few = Form<false, 1, 16, 3, 32>;
  using Some = Form<false, 2, 16, 2, 16>;
  using Many = Form<false, 4, 8, 3, 8>;
};
struct SmallForms {
  using Few = Form<true, 1, 8, 3, 16>;
  using Some = Form<true, 2, 8, 3, 8>;
  using Many = Form<true, 4, 8, 2, 4>;
};

constexpr uint32_t kLeastSharedBytes = 99 * 1024;
static_assert(SmallForms::Few::shared_bytes(24, SmallForms::Few::kTokens, true) <= kLeastSharedBytes);
static_assert(SmallForms::Some::shared_bytes(11, SmallForms::Some::kTokens, true) <= kLeastSharedBytes);
static_assert(SmallForms::Many::shared_bytes(6, SmallForms::Many::kTokens, true) <= kLeastSharedBytes);

// Whether the target that is compiled for launches a form; the others' kernels are empty.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
template <class Form>
constexpr bool kIsLaunched = Form::kSmall;
#elif defined(__CUDA_ARCH__)
template <class Form>
constexpr bool kIsLaunched = !Form::kSmall;
#else
template <class Form>
constexpr bool kIsLaunched = true;
#endif

// Groups of a thread block.
struct Share {
  uint32_t first_group, groups;
};

// One of `parts` nearly equal shares, of which `base` groups is the smaller.
__device__ __forceinline__ Share share_of(uint32_t groups, uint32_t part, uint32_t parts, uint32_t base) {
  const uint32_t larger = groups - base * parts;
  return {part * base + min(part, larger), base + (part < larger)};
}

// n / d for n < 2^21, without the thirty instructions of an integer division: the exact quotient of n + 1/2
// is further from an integer than what is computed is from it.
__device__ __forceinline__ uint32_t quotient(uint32_t n, uint32_t d) {
  return static_cast<uint32_t>((static_cast<float>(n) + 0.5f) *
                               instruction::reciprocal(static_cast<float>(d)));
}

// The tiles whose sums meet: some groups by the columns of a phase.
struct Round {
  uint32_t first_group, groups, first_chunk, chunks;
};

// The rounds of a thread block: phase after phase of some groups, then those of others.
template <class Form>
struct Rounds {
  const Share share;
  const uint32_t begin, end, chunks_per_phase;  // chunks of this block
  const uint32_t batches = (share.groups + Form::kGroupsPerRound - 1) / Form::kGroupsPerRound;
  const uint32_t batch_base = batches == 1 ? share.groups : quotient(share.groups, batches);

  __device__ __forceinline__ Rounds(const Problem& p, const Share& share, uint32_t rank)
      : share(share),
        begin(rank * p.chunks / p.ranks),
        end((rank + 1) * p.chunks / p.ranks),
        chunks_per_phase(p.chunks_per_phase) {}

  __device__ __forceinline__ bool one_phase() const { return chunks_per_phase >= end - begin; }

  __device__ __forceinline__ Round of(uint32_t batch, uint32_t first_chunk) const {
    const Share groups = share_of(share.groups, batch, batches, batch_base);
    return {share.first_group + groups.first_group, groups.groups, first_chunk,
            min(chunks_per_phase, end - first_chunk)};
  }
  // Goes on to the next round; false after the last.
  __device__ __forceinline__ bool advance(uint32_t& batch, uint32_t& first_chunk) const {
    first_chunk += chunks_per_phase;
    if (first_chunk < end) return true;
    first_chunk = begin;
    return ++batch < batches;
  }
};

// Warps share the tiles of a round: those of group 0, then those of group 1 ... This is the first of a warp.
template <class Form>
__device__ __forceinline__ uint32_t first_tile(const Round& round, uint32_t warp) {
  return warp * (round.groups * round.chunks) / Form::kWarps;
}

// What a lane has of a tile: 32 columns of a row of the upper half and of one of the lower, four scales.
struct Fragment {
  uint4 upper, lower;
  uint32_t scales;
};

// A warp's tiles on their way to shared memory. A lane reads nothing but what it fetched itself.
template <class Form>
class Ring {
 public:
  __device__ __forceinline__ Ring(const Problem& problem, const Rounds<Form>& rounds, uint8_t* shared)
      : p_(problem), rounds_(rounds) {
    const uint32_t lane = threadIdx.x % kLanes;
    begin_ =
        instruction::shared_place(shared + threadIdx.x / kLanes * (Form::kDepth * kTileBytes) + lane * 16);
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
    if (left_in_run_ != 0) {
      instruction::copy_once(place_, codes_);
      instruction::copy_once(place_ + 512, codes_ + kLanes);
      instruction::copy_word(scale_place(), scales_);
      codes_ += 2 * kLanes;
      scales_ += kLanes;
      if (--left_in_run_ == 0) start_run();
    }
    instruction::end_copies();
  }

  // The next tiles that lie one after the other: to the end of this warp's range, or of a phase's columns.
  __device__ __forceinline__ void start_run() {
    const uint32_t lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
    while (!over_) {
      const Round round = rounds_.of(batch_, first_chunk_);
      const uint32_t first = first_tile<Form>(round, warp) + done_,
                     left = first_tile<Form>(round, warp + 1) - first;
      if (left == 0) {
        over_ = !rounds_.advance(batch_, first_chunk_);
        done_ = 0;
        continue;
      }
      const uint32_t group = quotient(first, round.chunks), chunk = first - group * round.chunks;
      left_in_run_ = round.chunks == p_.chunks ? left : min(left, round.chunks - chunk);
      done_ += left_in_run_;
      const size_t tile = size_t{round.first_group + group} * p_.chunks + round.first_chunk + chunk;
      codes_ = p_.codes + tile * (2 * kLanes) + lane;
      scales_ = p_.scales + tile * kLanes + lane;
      return;
    }
  }

  const Problem& p_;
  const Rounds<Form>& rounds_;
  instruction::SharedPlace begin_, place_;
  const uint4* codes_ = nullptr;
  const uint32_t* scales_ = nullptr;
  uint32_t left_in_run_ = 0, done_ = 0, batch_ = 0, first_chunk_ = 0;
  bool over_ = false;
};

// The warps that have the first and the last tile of a group.
struct Ends {
  uint32_t first, last;
};

__device__ __forceinline__ uint32_t word(const uint4& words, uint32_t i) {
  return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ void assign(__nv_bfloat16& to, float x) { to = __float2bfloat16_rn(x); }
__device__ __forceinline__ void assign(__half& to, float x) { to = __float2half_rn(x); }

// The power of two that brings a row whose largest magnitude has these bits (as bfloat16) to [2^14, 2^15), as
// the exponent field of a float32; that of its inverse is 254 less it.
__device__ __forceinline__ uint32_t range_exponent(uint32_t largest) {
  return min(268 - (largest >> 7), 253u);
}

// Where tokens lie: one after the other, in x as in the output.
struct InOrder {
  // Weights may be read while the previous kernel runs, x may not.
  static __device__ __forceinline__ void before_x() {
    instruction::let_next_kernel_start();
    instruction::wait_for_previous_kernel();
  }
  __device__ __forceinline__ uint32_t input(uint32_t token) const { return token; }
  __device__ __forceinline__ uint32_t output(uint32_t token) const { return token; }
  __device__ __forceinline__ float weight(uint32_t) const { return 1.0f; }
};

template <class T, class Operand, class Form, class Rows = InOrder>
struct Multiplier {
  static constexpr bool kConverts = !Operand::kAnyRange && std::is_same_v<T, __nv_bfloat16>;
  static constexpr uint32_t kTokenGroups = Form::kTokenGroups;

  const Problem& p;
  const Rows rows;
  const Rounds<Form> rounds;
  uint8_t* const ring;
  float* const slots;           // [slots, sums]
  Ends* const ends;             // [groups]
  uint32_t* const token_range;  // [tokens]: largest bits
  uint4* const x;               // [chunks of the phase, pieces, tokens, quarters]
  float2* const totals;         // [items] of a thread's own, over phases, then for the cluster
  const uint32_t lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  const uint32_t x_piece = p.tokens * kQuarters, x_chunk = kPieces * x_piece;
  const uint32_t half = p.outputs / 2;

  __device__ __forceinline__ Multiplier(const Problem& problem, const Share& share, uint4* shared,
                                        Rows rows = {})
      : p(problem),
        rows(rows),
        rounds(problem, share, problem.ranks > 1 ? instruction::cluster_rank() : 0),
        ring(reinterpret_cast<uint8_t*>(shared)),
        slots(reinterpret_cast<float*>(ring + Form::kRingBytes)),
        ends(reinterpret_cast<Ends*>(slots + Form::kSlotBytes / sizeof(float))),
        token_range(reinterpret_cast<uint32_t*>(ends + Form::kGroupsPerRound)),
        x(reinterpret_cast<uint4*>(token_range + Form::kTokens)),
        totals(
            reinterpret_cast<float2*>(x + problem.chunks_per_phase * kPieces * kQuarters * problem.tokens)) {}

  // Calls f(place in shared memory, eight elements or zeros past the end of the row) for the columns of a
  // round. Eight lanes have 128 bytes of shared memory, the warp whole sectors of x.
  template <class F>
  __device__ __forceinline__ void for_x(const Round& round, F&& f) const {
    constexpr uint32_t kAtOnce = Form::kBlocks == 2 ? 6 : 8, kNowhere = ~0u;
    const uint32_t piece = lane / 8, odd = lane / 4 % 2, quarter = lane % kQuarters;
    const uint32_t units = (p.tokens + 1) / 2 * round.chunks;
    for (uint32_t first = warp; first < units; first += kAtOnce * Form::kWarps) {
      uint4 elements[kAtOnce];
      uint32_t places[kAtOnce];
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        const uint32_t unit = first + i * Form::kWarps, pair = quotient(unit, round.chunks);
        const uint32_t chunk = unit - pair * round.chunks, token = pair * 2 + odd;
        const uint32_t column = (round.first_chunk + chunk) * kChunk + quarter * 32 + piece * 8;
        const bool is_there = unit < units && token < p.tokens;
        elements[i] = make_uint4(0, 0, 0, 0);
        if (is_there && column < p.columns)
          elements[i] = __ldcg(p.x + (size_t{rows.input(token)} * p.columns + column) / 8);
        places[i] = is_there ? chunk * x_chunk + piece * x_piece + token * kQuarters + quarter : kNowhere;
      }
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        if (places[i] != kNowhere) f(places[i], elements[i]);
      }
    }
  }

  __device__ __forceinline__ uint32_t token_of(uint32_t place) const {
    return (place - quotient(place, x_piece) * x_piece) / kQuarters;
  }

  // A round's columns of x, in the order in which lanes need them.
  __device__ __forceinline__ void stage_x(const Round& round) const {
    if constexpr (kConverts) find_ranges(round);
    for_x(round, [&](uint32_t place, uint4 elements) {
      if constexpr (kConverts) elements = in_range(elements, token_range[token_of(place)]);
      x[place] = elements;
    });
    __syncthreads();
  }

  __device__ __forceinline__ void find_ranges(const Round& round) const {
    for (uint32_t token = threadIdx.x; token < Form::kTokens; token += Form::kThreads) token_range[token] = 0;
    __syncthreads();
    for_x(round, [&](uint32_t place, const uint4& elements) {
      const uint32_t token = token_of(place);
      uint32_t largest = 0;
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        const uint32_t pair = word(elements, i) & 0x7fff7fff;
        largest = max(largest, max(pair & 0xffff, pair >> 16));
      }
      if (largest > token_range[token]) atomicMax(token_range + token, largest);
    });
    __syncthreads();
  }

  // bfloat16 as float16, times the row's power of two.
  static __device__ __forceinline__ uint4 in_range(const uint4& elements, uint32_t largest) {
    const float factor = __uint_as_float(range_exponent(largest) << 23);
    const auto convert = [&](uint32_t pair) {
      const __half2 halves = __floats2half2_rn(__uint_as_float(pair << 16) * factor,
                                               __uint_as_float(pair & 0xffff0000) * factor);
      return *reinterpret_cast<const uint32_t*>(&halves);
    };
    return make_uint4(convert(elements.x), convert(elements.y), convert(elements.z), convert(elements.w));
  }

  // Of tokens past the last the last is multiplied; nobody looks at their sums.
  __device__ __forceinline__ void multiply(const Fragment& fragment, const uint4* pieces,
                                           const uint32_t (&tokens)[kTokenGroups],
                                           float (&sums)[kTokenGroups][4]) const {
    uint32_t scales[4];
    Operand::scales(fragment.scales, scales);
#pragma unroll
    for (uint32_t piece = 0; piece < kPieces; ++piece) {
      uint32_t upper[4], lower[4];
      Operand::decode(word(fragment.upper, piece), upper);
      Operand::decode(word(fragment.lower, piece), lower);
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        upper[i] = Operand::multiply(upper[i], scales[piece / 2]);
        lower[i] = Operand::multiply(lower[i], scales[2 + piece / 2]);
      }
#pragma unroll
      for (uint32_t i = 0; i < kTokenGroups; ++i) {
        const uint4 b = pieces[piece * x_piece + tokens[i]];
        Operand::mma(sums[i], upper[0], lower[0], upper[1], lower[1], b.x, b.y);
        Operand::mma(sums[i], upper[2], lower[2], upper[3], lower[3], b.z, b.w);
      }
    }
  }

  // This warp's tiles of a round. A part of a group has the slot of its number: each warp and each group
  // begins one.
  __device__ __forceinline__ void multiply(const Round& round, Ring<Form>& tiles) const {
    uint32_t tokens[kTokenGroups];
#pragma unroll
    for (uint32_t i = 0; i < kTokenGroups; ++i)
      tokens[i] = min(i * kTokenGroup + lane / 4, p.tokens - 1) * kQuarters + lane % 4;
    const uint32_t first = first_tile<Form>(round, warp);
    uint32_t left = first_tile<Form>(round, warp + 1) - first;
    uint32_t group = quotient(first, round.chunks), chunk = first - group * round.chunks;
    while (true) {
      const uint4* pieces = x + chunk * x_chunk;
      const uint32_t part = min(left, round.chunks - chunk);
      float sums[kTokenGroups][4] = {};
#pragma unroll 1
      for (uint32_t i = 0; i < part; ++i) {
        multiply(tiles.take(), pieces, tokens, sums);
        tiles.replace();
        pieces += x_chunk;
      }
      float2* const slot = reinterpret_cast<float2*>(slots + (warp + group) * Form::kSums) + lane;
#pragma unroll
      for (uint32_t i = 0; i < kTokenGroups; ++i) {
        slot[i * kItems] = make_float2(sums[i][0], sums[i][1]);
        slot[i * kItems + kItems / 2] = make_float2(sums[i][2], sums[i][3]);
      }
      if (lane == 0) {
        if (chunk == 0 && part != 0) ends[group].first = warp;
        if (chunk + part == round.chunks) ends[group].last = warp;
      }
      left -= part;
      if (left == 0) return;  // a warp without tiles adds zeros to its group
      chunk = 0;
      ++group;
    }
  }

  // Adds up the parts of groups, and the phases. A lane had rows (row, row + N / 2) of tokens 2 quarter and
  // 2 quarter + 1; an item is one of those pairs.
  __device__ __forceinline__ void add_up(const Round& round) const {
    const uint32_t items = round.groups * kGroup * p.tokens;
    for (uint32_t item = threadIdx.x; item < items; item += Form::kThreads) {
      const uint32_t row = item % kGroup, group = quotient(item / kGroup, p.tokens),
                     token = item / kGroup - group * p.tokens;
      const Ends end = ends[group];
      const float* summand = slots + (end.first + group) * Form::kSums + token / kTokenGroup * (2 * kItems) +
                             row * kTokenGroup + token % kTokenGroup;
      float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll 4
      for (uint32_t i = end.first; i <= end.last; ++i) {
        sum.x += summand[0];
        sum.y += summand[kItems];
        summand += Form::kSums;
      }
      if constexpr (kConverts) {  // other phases have other ranges
        const float undo = __uint_as_float(254 - range_exponent(token_range[token]) << 23);
        sum.x *= undo;
        sum.y *= undo;
      }
      if (round.first_chunk != rounds.begin) {
        sum.x += totals[item].x;
        sum.y += totals[item].y;
      }
      if (p.ranks == 1 && is_last_phase(round)) {
        write(round.first_group + group, row, token, sum);
      } else {
        totals[item] = sum;
      }
    }
  }

  __device__ __forceinline__ bool is_last_phase(const Round& round) const {
    return round.first_chunk + round.chunks == rounds.end;
  }

  // Adds up the blocks of a cluster, each for its share of the items.
  __device__ __forceinline__ void add_up_cluster(const Round& round) const {
    instruction::cluster_barrier();
    const uint32_t items = round.groups * kGroup * p.tokens;
    for (uint32_t item = instruction::cluster_rank() * Form::kThreads + threadIdx.x; item < items;
         item += p.ranks * Form::kThreads) {
      float2 sum = make_float2(0.0f, 0.0f);
      for (uint32_t rank = 0; rank < p.ranks; ++rank) {
        const float2 part = instruction::load_of_rank(totals + item, rank);
        sum.x += part.x;
        sum.y += part.y;
      }
      const uint32_t group = quotient(item / kGroup, p.tokens);
      write(round.first_group + group, item % kGroup, item / kGroup - group * p.tokens, sum);
    }
    instruction::cluster_barrier();  // the others have read, too
  }

  __device__ __forceinline__ void write(uint32_t group, uint32_t row, uint32_t token, float2 sum) const {
    const uint32_t upper = group * kGroup + row;
    if (upper >= half) return;
    const float weight = rows.weight(token);
    const float y = finished(sum.x, p.upper_global_scale, upper) * weight;
    const float z = finished(sum.y, p.lower_global_scale, upper + half) * weight;
    const size_t out_row = rows.output(token);
    if (p.silu_mul) {
      store(out_row * half + upper, y / (1.0f + __expf(-y)) * z);
    } else {
      store(out_row * p.outputs + upper, y);
      store(out_row * p.outputs + upper + half, z);
    }
  }

  __device__ __forceinline__ float finished(float sum, float global_scale, uint32_t output) const {
    sum *= Operand::kUnit;
    sum *= global_scale;
    if (p.column_scale) sum *= __ldg(p.column_scale + output);
    if (p.bias) sum += to_float(static_cast<const T*>(p.bias)[output]);
    return sum;
  }

  __device__ __forceinline__ void store(size_t place, float y) const {
    if (p.residual) y += to_float(static_cast<const T*>(p.residual)[place]);
    assign(static_cast<T*>(p.out)[place], y);
  }

  // While this kernel ends and others run that read little, memory would be idle. A part of each piece, so
  // that every block of the next product finds as much of its share in the cache; pieces past the last thread
  // stay.
  __device__ __forceinline__ void prefetch_next() const {
    const uint32_t piece = threadIdx.x * gridDim.x + blockIdx.x;
    if (piece < p.next_pieces) instruction::prefetch(p.next + size_t{piece} * kPiece, p.next_bytes);
  }

  __device__ __forceinline__ void run() const {
    Ring<Form> tiles(p, rounds, ring);
    Rows::before_x();
    uint32_t batch = 0, first_chunk = rounds.begin;
    Round round = rounds.of(batch, first_chunk);
    stage_x(round);
    while (true) {
      multiply(round, tiles);
      __syncthreads();
      add_up(round);
      if (p.ranks > 1 && is_last_phase(round)) add_up_cluster(round);
      if (!rounds.advance(batch, first_chunk)) break;
      round = rounds.of(batch, first_chunk);
      __syncthreads();  // x, sums and ends are over
      if (!rounds.one_phase()) stage_x(round);
    }
    prefetch_next();
    instruction::wait_for_copies<0>();
  }
};

}  // namespace nibble::decode
