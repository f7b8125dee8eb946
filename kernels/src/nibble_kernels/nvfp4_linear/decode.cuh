// The decode kernel: few rows of activations times an NVFP4 or E4M3 weight, at the speed at which the weight can be
// read. Layouts, order of work and measurements: docs/kernels/nvfp4_linear.md.
//
// A thread block has whole groups of 16 weight rows, and its warps share their
// tiles, 16 rows by 128 columns each, in equal ranges, one after the other in memory, and read ahead of what
// they multiply. A group's sums meet in shared memory, in a fixed order. Where x does not fit into shared
// memory, columns come in phases.
#pragma once

#include <type_traits>

#include "nvfp4_linear/ring.cuh"

namespace nibble::decode {

// The warps that have the first and the last step of a group.
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

// What comes after the sums of a row of the upper half (x) and of one of the lower (y), of a token.
struct After {
  float2 factor{1.0f, 1.0f}, bias{-0.0f, -0.0f}, residual{-0.0f, -0.0f};
};

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

// A lane's rows of a tile as operands, eight columns at a time.
template <class Operand>
struct Decoder {
  const Fragment& tile;
  uint32_t scales[4];

  __device__ __forceinline__ explicit Decoder(const Fragment& tile) : tile(tile) {
    Operand::scales(tile.scales, scales);
  }
  __device__ __forceinline__ void decode(uint32_t piece, uint32_t (&upper)[4], uint32_t (&lower)[4]) const {
    Operand::decode(word(tile.upper, piece), upper);
    Operand::decode(word(tile.lower, piece), lower);
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      upper[i] = Operand::multiply(upper[i], scales[piece / 2]);
      lower[i] = Operand::multiply(lower[i], scales[2 + piece / 2]);
    }
  }
};
template <>
struct Decoder<E4m3Operand> {
  const ByteFragment& tile;

  __device__ __forceinline__ explicit Decoder(const ByteFragment& tile) : tile(tile) {}
  __device__ __forceinline__ void decode(uint32_t piece, uint32_t (&upper)[4], uint32_t (&lower)[4]) const {
    const uint4 &above = tile.upper[piece / 2], &below = tile.lower[piece / 2];
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      E4m3Operand::decode(word(above, piece % 2 * 2 + i), upper[2 * i], upper[2 * i + 1]);
      E4m3Operand::decode(word(below, piece % 2 * 2 + i), lower[2 * i], lower[2 * i + 1]);
    }
  }
};

template <class T, class Operand, class Form, class Rows = InOrder>
struct Multiplier {
  static constexpr bool kConverts = !Operand::kAnyRange && std::is_same_v<T, __nv_bfloat16>;
  static constexpr uint32_t kTokenGroups = Form::kTokenGroups;
  static constexpr uint32_t kXRow = kChunk / 8;  // 16 bytes each of a row of x in a chunk
  using Sums = float[kTokenGroups][4];

  const Problem& p;
  const uint32_t x_chunk = Form::x_rows(p.tokens) * kXRow;
  const Rows rows;
  const Rounds<Form> rounds;
  uint8_t* const ring;
  float* const slots;           // [slots, sums]
  Ends* const ends;             // [groups]
  uint32_t* const token_range;  // [tokens]: largest bits
  uint4* const x;               // [chunks of the phase, tokens, x_place]
  float2* const totals;         // [items] of a thread's own, over phases, then for the cluster
  const uint32_t lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
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
        totals(reinterpret_cast<float2*>(x + problem.chunks_per_phase * x_chunk)) {}

  // Where a piece of a quarter of a chunk lies in a row of x. Neighbouring tokens have their pieces the other
  // way round, so that eight lanes read 128 different bytes of shared memory.
  static __device__ __forceinline__ uint32_t x_place(uint32_t token, uint32_t piece, uint32_t quarter) {
    return (piece ^ token % 2) * kQuarters + quarter;
  }

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
        places[i] = is_there ? chunk * x_chunk + token * kXRow + x_place(odd, piece, quarter) : kNowhere;
      }
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        if (places[i] != kNowhere) f(places[i], elements[i]);
      }
    }
  }

  __device__ __forceinline__ uint32_t token_of(uint32_t place) const {
    return (place - quotient(place, x_chunk) * x_chunk) / kXRow;
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

  // The sums of an E4M3 tile are scaled as they are, in float32.
  __device__ __forceinline__ void multiply(const ByteFragment& tile, const uint4* even, const uint4* odd,
                                           Sums& sums) const {
    Sums own = {};
    multiply(Decoder<Operand>(tile), even, odd, own);
#pragma unroll
    for (uint32_t i = 0; i < kTokenGroups; ++i) {
#pragma unroll
      for (uint32_t k = 0; k < 4; ++k) sums[i][k] += own[i][k] * (k < 2 ? tile.scales.x : tile.scales.y);
    }
  }
  __device__ __forceinline__ void multiply(const Fragment& tile, const uint4* even, const uint4* odd,
                                           Sums& sums) const {
    multiply(Decoder<Operand>(tile), even, odd, sums);
  }

  // `even` and `odd`: this lane's first and second piece of x.
  __device__ __forceinline__ void multiply(const Decoder<Operand>& weight, const uint4* even,
                                           const uint4* odd, Sums& sums) const {
#pragma unroll
    for (uint32_t piece = 0; piece < kPieces; ++piece) {
      uint4 b[kTokenGroups];
#pragma unroll
      for (uint32_t i = 0; i < kTokenGroups; ++i)
        b[i] = (piece % 2 ? odd : even)[piece / 2 * (2 * kQuarters) + i * (kTokenGroup * kXRow)];
      uint32_t upper[4], lower[4];
      weight.decode(piece, upper, lower);
#pragma unroll
      for (uint32_t i = 0; i < kTokenGroups; ++i) {
        Operand::mma(sums[i], upper[0], lower[0], upper[1], lower[1], b[i].x, b[i].y);
        Operand::mma(sums[i], upper[2], lower[2], upper[3], lower[3], b[i].z, b[i].w);
      }
    }
  }

  // This warp's steps of a round. A part of a group has the slot of its number: each warp and each group
  // begins one.
  template <class Tiles>
  __device__ __forceinline__ void multiply(const Round& round, Tiles& ring) const {
    // Of tokens past the last, where x has no row for them, the last is multiplied; nobody looks at their
    // sums.
    const uint32_t token = min(lane / 4, Form::x_rows(p.tokens) - 1);
    const uint4* const first_piece = x + token * kXRow + x_place(token, 0, lane % kQuarters);
    const uint4* const second_piece = x + token * kXRow + x_place(token, 1, lane % kQuarters);
    const uint32_t first = first_step<Form>(round, warp);
    uint32_t left = first_step<Form>(round, warp + 1) - first;
    uint32_t group = quotient(first, round.chunks), chunk = first - group * round.chunks;
    while (true) {
      const uint4 *even = first_piece + chunk * x_chunk, *odd = second_piece + chunk * x_chunk;
      const uint32_t part = min(left, round.chunks - chunk);
      if (lane == 0) {
        if (chunk == 0 && part != 0) ends[group].first = warp;
        if (chunk + part == round.chunks) ends[group].last = warp;
      }
      Sums sums = {};
      ring.for_tiles(part, [&](const auto& tile) {
        multiply(tile, even, odd, sums);
        even += x_chunk;
        odd += x_chunk;
      });
      float2* const slot = reinterpret_cast<float2*>(slots + (warp + group) * Form::kSums) + lane;
#pragma unroll
      for (uint32_t i = 0; i < kTokenGroups; ++i) {
        const float (&part_sums)[4] = sums[i];
        slot[i * kItems] = make_float2(part_sums[0], part_sums[1]);
        slot[i * kItems + kItems / 2] = make_float2(part_sums[2], part_sums[3]);
      }
      left -= part;
      if (left == 0) return;  // a warp without steps adds zeros to its group
      chunk = 0;
      ++group;
    }
  }

  // A lane had rows (row, row + N / 2) of tokens 2 quarter and 2 quarter + 1; an item is one of those pairs.
  struct Item {
    uint32_t group, row, token;  // of a round
  };
  __device__ __forceinline__ Item item_of(uint32_t number) const {
    const uint32_t group = quotient(number / kGroup, p.tokens);
    return {group, number % kGroup, number / kGroup - group * p.tokens};
  }

  // Adds up the parts of groups, and the phases.
  __device__ __forceinline__ void add_up(const Round& round) const {
    add_up(round, [&](const Item& item, uint32_t) { return after(round, item); });
  }
  // after(item, how many of this thread come before it)
  template <class F>
  __device__ __forceinline__ void add_up(const Round& round, F&& after) const {
    const uint32_t items = round.groups * kGroup * p.tokens;
    uint32_t before = 0;
    for (uint32_t number = threadIdx.x; number < items; number += Form::kThreads) {
      const Item item = item_of(number);
      const Ends end = ends[item.group];
      const float* summand = slots + (end.first + item.group) * Form::kSums +
                             item.token / kTokenGroup * (2 * kItems) + item.row * kTokenGroup +
                             item.token % kTokenGroup;
      float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll 4
      for (uint32_t i = end.first; i <= end.last; ++i) {
        sum.x += summand[0];
        sum.y += summand[kItems];
        summand += Form::kSums;
      }
      if constexpr (kConverts) {  // other phases have other ranges
        const float undo = __uint_as_float(254 - range_exponent(token_range[item.token]) << 23);
        sum.x *= undo;
        sum.y *= undo;
      }
      if (round.first_chunk != rounds.begin) {
        sum.x += totals[number].x;
        sum.y += totals[number].y;
      }
      if (p.ranks == 1 && is_last_phase(round)) {
        write(round, item, sum, after(item, before));
      } else {
        totals[number] = sum;
      }
      ++before;
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
      write(round, item_of(item), sum, after(round, item_of(item)));
    }
    instruction::cluster_barrier();  // the others have read, too
  }

  __device__ __forceinline__ uint32_t upper_row(const Round& round, const Item& item) const {
    return (round.first_group + item.group) * kGroup + item.row;
  }
  __device__ __forceinline__ size_t place(const Item& item, uint32_t row) const {
    return rows.output(item.token) * size_t{p.silu_mul ? half : p.outputs} + row;
  }

  __device__ __forceinline__ After after(const Round& round, const Item& item) const {
    After after;
    const uint32_t upper = upper_row(round, item), lower = upper + half;
    if (upper >= half) return after;
    if (p.column_scale) after.factor = make_float2(__ldg(p.column_scale + upper), __ldg(p.column_scale + lower));
    const auto load = [](const void* elements, size_t place) {
      return to_float(static_cast<const T*>(elements)[place]);
    };
    if (p.bias) after.bias = make_float2(load(p.bias, upper), load(p.bias, lower));
    if (p.residual) {
      after.residual.x = load(p.residual, place(item, upper));
      if (!p.silu_mul) after.residual.y = load(p.residual, place(item, lower));
    }
    return after;
  }

  __device__ __forceinline__ void write(const Round& round, const Item& item, float2 sum,
                                        const After& after) const {
    const uint32_t upper = upper_row(round, item);
    if (upper >= half) return;
    const float weight = rows.weight(item.token);
    const float y = (sum.x * Operand::kUnit * p.upper_global_scale * after.factor.x + after.bias.x) * weight;
    const float z = (sum.y * Operand::kUnit * p.lower_global_scale * after.factor.y + after.bias.y) * weight;
    T* const out = static_cast<T*>(p.out);
    if (p.silu_mul) {
      assign(out[place(item, upper)], y / (1.0f + __expf(-y)) * z + after.residual.x);
    } else {
      assign(out[place(item, upper)], y + after.residual.x);
      assign(out[place(item, upper + half)], z + after.residual.y);
    }
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
    instruction::wait_for_copies<0>();
  }
};

}  // namespace nibble::decode
