// The decode kernel: few rows of activations times an NVFP4 or E4M3 weight, at the speed at which the weight can be
// read. Layouts, order of work and measurements: docs/kernels/nvfp4_linear.md.
//
// A thread block has whole groups of 16 weight rows, and its warps share their
// tiles, 16 rows by 128 columns each, in equal ranges, one after the other in memory, and read ahead of what
// they multiply. A group's sums meet in shared memory, in a fixed order. Where x does not fit into shared
// memory, columns come in phases.
#pragma once

#include "nvfp4_linear/ring.cuh"
#include "nvfp4_linear/staged_x.cuh"

namespace nibble::decode {

// The warps that have the first and the last step of a group.
struct Ends {
  uint32_t first, last;
};

__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ void assign(__nv_bfloat16& to, float x) { to = __float2bfloat16_rn(x); }
__device__ __forceinline__ void assign(__half& to, float x) { to = __float2half_rn(x); }

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
  static constexpr uint32_t kTokenGroups = Form::kTokenGroups;
  using X = StagedX<T, Operand, Form, Rows>;
  using Sums = float[kTokenGroups][4];

  const Problem& p;
  const Rows rows;
  const Rounds<Form> rounds;
  uint8_t* const ring;
  float* const slots;  // [slots, sums]
  Ends* const ends;    // [groups]
  float* const squares;  // Form::kNormFloats
  const X x;
  float2* const totals;  // [items] of a thread's own, over phases, then for the cluster
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
        squares(reinterpret_cast<float*>(ends + Form::kGroupsPerRound)),
        x(problem, rows, reinterpret_cast<uint32_t*>(squares + Form::kNormFloats)),
        totals(reinterpret_cast<float2*>(x.elements + problem.chunks_per_phase * x.chunk_size)) {}

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

  // `even` and `odd`: this lane's first and second piece of x. Two chains of sums wait for each other half as
  // long as one.
  __device__ __forceinline__ void multiply(const Decoder<Operand>& weight, const uint4* even,
                                           const uint4* odd, Sums& sums) const {
    Sums others = {};
#pragma unroll
    for (uint32_t piece = 0; piece < kPieces; ++piece) {
      uint4 b[kTokenGroups];
#pragma unroll
      for (uint32_t i = 0; i < kTokenGroups; ++i)
        b[i] = (piece % 2 ? odd : even)[piece / 2 * (2 * kQuarters) + i * (kTokenGroup * X::kRow)];
      uint32_t upper[4], lower[4];
      weight.decode(piece, upper, lower);
#pragma unroll
      for (uint32_t i = 0; i < kTokenGroups; ++i) {
        Operand::mma(sums[i], upper[0], lower[0], upper[1], lower[1], b[i].x, b[i].y);
        Operand::mma(others[i], upper[2], lower[2], upper[3], lower[3], b[i].z, b[i].w);
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < kTokenGroups; ++i) {
#pragma unroll
      for (uint32_t k = 0; k < 4; ++k) sums[i][k] += others[i][k];
    }
  }

  // This warp's steps of a round: how many, and the first.
  struct Steps {
    uint32_t left, group, chunk;
  };
  __device__ __forceinline__ Steps steps_of(const Round& round) const {
    const uint32_t first = first_step<Form>(round, warp), group = quotient(first, round.chunks);
    return {first_step<Form>(round, warp + 1) - first, group, first - group * round.chunks};
  }

  // A part of a group has the slot of its number: each warp and each group begins one.
  __device__ __forceinline__ void multiply(const Round& round, Steps steps, Ring<Form>& ring) const {
    // Of tokens past the last, where x has no row for them, the last is multiplied; nobody looks at their
    // sums.
    const uint32_t token = min(lane / 4, Form::x_rows(p.tokens) - 1);
    const uint4* const row = x.elements + token * X::kRow;
    const uint4* const first_piece = row + X::place(token, 0, lane % kQuarters);
    const uint4* const second_piece = row + X::place(token, 1, lane % kQuarters);
    auto& [left, group, chunk] = steps;
    while (true) {
      const uint4 *even = first_piece + chunk * x.chunk_size, *odd = second_piece + chunk * x.chunk_size;
      const uint32_t part = min(left, round.chunks - chunk);
      if (lane == 0) {
        if (chunk == 0 && part != 0) ends[group].first = warp;
        if (chunk + part == round.chunks) ends[group].last = warp;
      }
      Sums sums = {};
#pragma unroll 1
      for (uint32_t i = part; i != 0; --i) {
        const auto tile = ring.take();
        multiply(tile, even, odd, sums);
        ring.replace();
        even += x.chunk_size;
        odd += x.chunk_size;
      }
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

  // A pair of outputs (row, row + N / 2) of a token, in a round.
  struct Item {
    uint32_t group, row, token;
  };
  __device__ __forceinline__ Item item_of(uint32_t number) const {
    const uint32_t group = quotient(number / kGroup, p.tokens);
    return {group, number % kGroup, number / kGroup - group * p.tokens};
  }
  // Of those that a thread writes, whose blocks share a cluster's.
  __device__ __forceinline__ uint32_t first_number() const {
    return (p.ranks > 1 ? instruction::cluster_rank() * Form::kThreads : 0) + threadIdx.x;
  }
  __device__ __forceinline__ uint32_t items(const Round& round) const {
    return round.groups * kGroup * p.tokens;
  }

  // What comes after an item's sums. It is read before they are there: a read takes as long as a small
  // weight.
  struct After {
    float upper_factor, lower_factor;
    T upper_bias, lower_bias, upper_residual, lower_residual, upper_norm, lower_norm;
  };
  __device__ __forceinline__ uint32_t upper_row(const Round& round, const Item& item) const {
    return (round.first_group + item.group) * kGroup + item.row;
  }
  __device__ __forceinline__ size_t place(const Item& item, uint32_t row) const {
    return rows.output(item.token) * size_t{p.silu_mul ? half : p.outputs} + row;
  }
  __device__ __forceinline__ After after(const Round& round, const Item& item) const {
    const uint32_t upper = upper_row(round, item), lower = upper + half;
    After after;
    if (upper >= half) return after;
    if (p.column_scale) {
      after.upper_factor = __ldg(p.column_scale + upper);
      after.lower_factor = __ldg(p.column_scale + lower);
    }
    if (p.bias) {
      after.upper_bias = static_cast<const T*>(p.bias)[upper];
      after.lower_bias = static_cast<const T*>(p.bias)[lower];
    }
    if (p.residual) {
      after.upper_residual = static_cast<const T*>(p.residual)[place(item, upper)];
      if (!p.silu_mul) after.lower_residual = static_cast<const T*>(p.residual)[place(item, lower)];
    }
    if constexpr (kNormIsAfter) {
      after.upper_norm = static_cast<const T*>(p.norm_after.weight)[upper];
      after.lower_norm = static_cast<const T*>(p.norm_after.weight)[lower];
    }
    return after;
  }

  // A thread's first item of a round, and what comes after it.
  struct First {
    Item item;
    After after;
  };
  __device__ __forceinline__ First first_of(const Round& round) const {
    First first;
    if (first_number() < items(round)) first.item = item_of(first_number());
    return first;
  }
  __device__ __forceinline__ void read_after(const Round& round, First& first) const {
    if (first_number() < items(round) && is_last_phase(round)) first.after = after(round, first.item);
  }
  // Calls f(number, item, after) for a thread's items of a round. With a norm after the product, f returns the sum
  // of an item's squares; eight lanes have those of a group's rows of a token.
  template <class F>
  __device__ __forceinline__ void for_items(const Round& round, const First& first, F&& f) const {
    const uint32_t step = p.ranks * Form::kThreads;
    uint32_t number = first_number();
    if constexpr (kNormIsAfter) {
      const uint32_t count = items(round);
      for (bool is_first = true; number - lane < count; number += step, is_first = false) {
        float sum = 0.0f;
        if (number < count) {
          const Item item = is_first ? first.item : item_of(number);
          sum = f(number, item, is_first ? first.after : after(round, item));
        }
#pragma unroll
        for (uint32_t mask = 1; mask < kGroup; mask *= 2) sum += __shfl_xor_sync(~0u, sum, mask);
        if (number < count && number % kGroup == 0) {
          const Item item = is_first ? first.item : item_of(number);
          p.norm_after.squares[(round.first_group + item.group) * p.norm_after.tile + item.token] = sum;
        }
      }
      return;
    }
    if (number >= items(round)) return;
    f(number, first.item, first.after);
    while ((number += step) < items(round)) {
      const Item item = item_of(number);
      f(number, item, after(round, item));
    }
  }

  // Adds up the parts of a group, and the phases. A lane had rows (row, row + N / 2) of tokens 2 quarter and
  // 2 quarter + 1.
  __device__ __forceinline__ float2 sum_of(const Round& round, uint32_t number, const Item& item) const {
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
    const float undo = x.undo(item.token);  // other phases have other ranges
    sum.x *= undo;
    sum.y *= undo;
    if (round.first_chunk != rounds.begin) {
      sum.x += totals[number].x;
      sum.y += totals[number].y;
    }
    return sum;
  }

  __device__ __forceinline__ bool is_last_phase(const Round& round) const {
    return round.first_chunk + round.chunks == rounds.end;
  }

  __device__ __forceinline__ void add_up(const Round& round, const First& first) const {
    if (p.ranks == 1 && is_last_phase(round)) {
      for_items(round, first, [&](uint32_t number, const Item& item, const After& after) {
        return write(round, item, sum_of(round, number, item), after);
      });
      return;
    }
    for (uint32_t number = threadIdx.x; number < items(round); number += Form::kThreads)
      totals[number] = sum_of(round, number, item_of(number));
    if (is_last_phase(round)) add_up_cluster(round, first);
  }

  // Adds up the blocks of a cluster, each for its share of the items.
  __device__ __forceinline__ void add_up_cluster(const Round& round, const First& first) const {
    instruction::cluster_barrier();
    for_items(round, first, [&](uint32_t number, const Item& item, const After& after) {
      float2 sum = make_float2(0.0f, 0.0f);
      for (uint32_t rank = 0; rank < p.ranks; ++rank) {
        const float2 part = instruction::load_of_rank(totals + number, rank);
        sum.x += part.x;
        sum.y += part.y;
      }
      return write(round, item, sum, after);
    });
    instruction::cluster_barrier();  // the others have read, too
  }

  // Returns the sum of squares of what was written, where a norm comes next.
  __device__ __forceinline__ float write(const Round& round, const Item& item, float2 sum,
                                         const After& after) const {
    const uint32_t upper = upper_row(round, item);
    if (upper >= half) return 0.0f;
    const float weight = rows.weight(item.token);
    if constexpr (kNormIsBefore) {
      sum.x *= squares[item.token];
      sum.y *= squares[item.token];
    }
    const float y = finished(sum.x, p.upper_global_scale, after.upper_factor, after.upper_bias) * weight;
    const float z = finished(sum.y, p.lower_global_scale, after.lower_factor, after.lower_bias) * weight;
    if (!kNormIsAfter && p.silu_mul) {
      store(place(item, upper), __fdividef(y, 1.0f + __expf(-y)) * z, after.upper_residual, after.upper_norm);
      return 0.0f;
    }
    return store(place(item, upper), y, after.upper_residual, after.upper_norm) +
           store(place(item, upper + half), z, after.lower_residual, after.lower_norm);
  }

  __device__ __forceinline__ float finished(float sum, float global_scale, float factor, T bias) const {
    sum *= Operand::kUnit;
    sum *= global_scale;
    if (p.column_scale) sum *= factor;
    if (p.bias) sum += to_float(bias);
    return sum;
  }

  __device__ __forceinline__ float store(size_t place, float y, T residual, T norm) const {
    if (p.residual) y += to_float(residual);
    T rounded;
    assign(rounded, y);
    static_cast<T*>(p.out)[place] = rounded;
    if constexpr (!kNormIsAfter) return 0.0f;
    const float value = to_float(rounded);
    assign(static_cast<T*>(p.norm_after.scaled)[place], value * to_float(norm));
    return value * value;
  }

  static constexpr bool kNormIsBefore = Form::kNorm == Norm::before, kNormIsAfter = Form::kNorm == Norm::after;

  // Of the norm before the product: a thread's share of the sums of squares of a token, which it adds up when
  // all that it asks for is under way; those of warps; and a token's factor.
  struct Squares {
    float first[Form::kFirstSquares], others;
  };
  __device__ __forceinline__ Squares read_squares() const {
    const NormBefore& norm = p.norm_before;
    const uint32_t count = norm.parts * norm.tile;
    Squares own{};
    uint32_t place = threadIdx.x;
#pragma unroll
    for (uint32_t i = 0; i < Form::kFirstSquares; ++i, place += Form::kThreads) {
      if (place < count) own.first[i] = __ldcg(norm.squares + place);
    }
    for (; place < count; place += Form::kThreads) own.others += __ldcg(norm.squares + place);
    return own;
  }
  __device__ __forceinline__ void share_squares(const Squares& own) const {
    float sum = own.others;
#pragma unroll
    for (const float square : own.first) sum += square;
    for (uint32_t mask = p.norm_before.tile; mask < kLanes; mask *= 2) sum += __shfl_xor_sync(~0u, sum, mask);
    if (lane < p.norm_before.tile) squares[(1 + warp) * Form::kTokens + lane] = sum;
  }
  __device__ __forceinline__ void find_factors() const {
    if (threadIdx.x >= p.tokens) return;
    float sum = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < Form::kWarps; ++i) sum += squares[(1 + i) * Form::kTokens + threadIdx.x];
    squares[threadIdx.x] = rsqrtf(sum / static_cast<float>(p.columns) + p.norm_before.epsilon);
  }

  __device__ __forceinline__ void run() const {
    uint32_t batch = 0, first_chunk = rounds.begin;
    Round round = rounds.of(batch, first_chunk);
    Ring<Form> tiles(p, rounds, ring);
    const typename X::Start start = x.start();
    Steps steps = steps_of(round);
    First first = first_of(round);
    Squares before;
    Rows::before_x();
    x.stage(
        round, start,
        [&] {
          if constexpr (kNormIsBefore) before = read_squares();
          read_after(round, first);
          tiles.fill();
        },
        [&] {
          if constexpr (kNormIsBefore) share_squares(before);
        });
    if constexpr (kNormIsBefore) find_factors();
    while (true) {
      multiply(round, steps, tiles);
      __syncthreads();
      add_up(round, first);
      if (!rounds.advance(batch, first_chunk)) break;
      round = rounds.of(batch, first_chunk);
      steps = steps_of(round);
      first = first_of(round);
      read_after(round, first);
      __syncthreads();  // x, sums and ends are over
      if (!rounds.one_phase()) x.stage(round, start, [] {}, [] {});
    }
    instruction::wait_for_copies<0>();
  }
};

}  // namespace nibble::decode
