// The decode kernel: few rows of activations times an NVFP4 weight, at the speed at which the weight can be
// read. Layouts, order of work and measurements: docs/kernels/nvfp4_linear.md.
//
// A thread block has whole groups of 16 weight rows, one by one or in strips of two. Its warps share their
// tiles, 16 rows by 128 columns each, in equal ranges, one after the other in memory, and read ahead of what
// they multiply. A strip's sums meet in shared memory, in a fixed order. Where x does not fit into shared
// memory, columns come in phases.
#pragma once

#include "nvfp4_linear/activations.cuh"
#include "nvfp4_linear/ring.cuh"

namespace nibble::decode {

// The warps that have the first and the last step of a strip.
struct Ends {
  uint32_t first, last;
};

template <class T, class Operand, class Form, class Rows = InOrder>
struct Multiplier {
  using Input = Activations<T, Operand, Form, Rows>;
  static constexpr uint32_t kTokenGroups = Form::kTokenGroups, kGroups = Form::kGroups;
  using Sums = float[kGroups][kTokenGroups][4];

  const Problem& p;
  const Rows rows;
  const Rounds<Form> rounds;
  uint8_t* const ring;
  float* const slots;  // [slots, sums]
  Ends* const ends;    // [strips]
  const Input input;
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
        input(problem, rows, ends + Form::kStripsPerRound, slots),  // slots are free until the first sums
        totals(reinterpret_cast<float2*>(input.x + problem.chunks_per_phase * input.chunk_size)) {}

  // `even` and `odd`: this lane's first and second piece of x.
  __device__ __forceinline__ void multiply(const Fragment (&tiles)[kGroups], const uint4* even,
                                           const uint4* odd, Sums& sums) const {
    uint32_t scales[kGroups][4];
#pragma unroll
    for (uint32_t group = 0; group < kGroups; ++group) Operand::scales(tiles[group].scales, scales[group]);
#pragma unroll
    for (uint32_t piece = 0; piece < kPieces; ++piece) {
      uint4 b[kTokenGroups];
#pragma unroll
      for (uint32_t i = 0; i < kTokenGroups; ++i)
        b[i] = (piece % 2 ? odd : even)[piece / 2 * (2 * kQuarters) + i * (kTokenGroup * Input::kRow)];
#pragma unroll
      for (uint32_t group = 0; group < kGroups; ++group) {
        uint32_t upper[4], lower[4];
        Operand::decode(word(tiles[group].upper, piece), upper);
        Operand::decode(word(tiles[group].lower, piece), lower);
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
          upper[i] = Operand::multiply(upper[i], scales[group][piece / 2]);
          lower[i] = Operand::multiply(lower[i], scales[group][2 + piece / 2]);
        }
#pragma unroll
        for (uint32_t i = 0; i < kTokenGroups; ++i) {
          Operand::mma(sums[group][i], upper[0], lower[0], upper[1], lower[1], b[i].x, b[i].y);
          Operand::mma(sums[group][i], upper[2], lower[2], upper[3], lower[3], b[i].z, b[i].w);
        }
      }
    }
  }

  // This warp's steps of a round. A part of a strip has the slot of its number: each warp and each strip
  // begins one.
  __device__ __forceinline__ void multiply(const Round& round, Ring<Form>& ring) const {
    // Of tokens past the last, where x has no row for them, the last is multiplied; nobody looks at their
    // sums.
    const uint32_t token = min(lane / 4, Form::x_rows(p.tokens) - 1);
    const uint4* const first_piece =
        input.x + token * Input::kRow + Input::place_of(token, 0, lane % kQuarters);
    const uint4* const second_piece =
        input.x + token * Input::kRow + Input::place_of(token, 1, lane % kQuarters);
    const uint32_t first = first_step<Form>(round, warp);
    uint32_t left = first_step<Form>(round, warp + 1) - first;
    uint32_t strip = quotient(first, round.chunks), chunk = first - strip * round.chunks;
    while (true) {
      const uint4 *even = first_piece + chunk * input.chunk_size,
                  *odd = second_piece + chunk * input.chunk_size;
      const uint32_t part = min(left, round.chunks - chunk);
      if (lane == 0) {
        if (chunk == 0 && part != 0) ends[strip].first = warp;
        if (chunk + part == round.chunks) ends[strip].last = warp;
      }
      Sums sums = {};
#pragma unroll 1
      for (uint32_t i = part; i != 0; --i) {
        Fragment tiles[kGroups];
        ring.take(tiles);
        multiply(tiles, even, odd, sums);
        ring.replace();
        even += input.chunk_size;
        odd += input.chunk_size;
      }
      float2* const slot = reinterpret_cast<float2*>(slots + (warp + strip) * Form::kSums) + lane;
#pragma unroll
      for (uint32_t i = 0; i < kGroups * kTokenGroups; ++i) {
        const float (&part_sums)[4] = sums[i / kTokenGroups][i % kTokenGroups];
        slot[i * kItems] = make_float2(part_sums[0], part_sums[1]);
        slot[i * kItems + kItems / 2] = make_float2(part_sums[2], part_sums[3]);
      }
      left -= part;
      if (left == 0) return;  // a warp without steps adds zeros to its strip
      chunk = 0;
      ++strip;
    }
  }

  // Adds up the parts of strips, and the phases. A lane had rows (row, row + N / 2) of tokens 2 quarter and
  // 2 quarter + 1; an item is one of those pairs.
  __device__ __forceinline__ void add_up(const Round& round) const {
    const uint32_t items = round.strips * kGroups * kGroup * p.tokens;
    for (uint32_t item = threadIdx.x; item < items; item += Form::kThreads) {
      const uint32_t row = item % kGroup, group = quotient(item / kGroup, p.tokens),
                     token = item / kGroup - group * p.tokens, strip = group / kGroups;
      const Ends end = ends[strip];
      const float* summand = slots + (end.first + strip) * Form::kSums +
                             (group % kGroups * kTokenGroups + token / kTokenGroup) * (2 * kItems) +
                             row * kTokenGroup + token % kTokenGroup;
      float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll 4
      for (uint32_t i = end.first; i <= end.last; ++i) {
        sum.x += summand[0];
        sum.y += summand[kItems];
        summand += Form::kSums;
      }
      if constexpr (Input::kConverts) {  // other phases have other ranges
        sum.x *= input.undo(token);
        sum.y *= input.undo(token);
      }
      if (round.first_chunk != rounds.begin) {
        sum.x += totals[item].x;
        sum.y += totals[item].y;
      }
      if (p.ranks == 1 && is_last_phase(round)) {
        write(round.first_strip * kGroups + group, row, token, sum);
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
    const uint32_t items = round.strips * kGroups * kGroup * p.tokens;
    for (uint32_t item = instruction::cluster_rank() * Form::kThreads + threadIdx.x; item < items;
         item += p.ranks * Form::kThreads) {
      float2 sum = make_float2(0.0f, 0.0f);
      for (uint32_t rank = 0; rank < p.ranks; ++rank) {
        const float2 part = instruction::load_of_rank(totals + item, rank);
        sum.x += part.x;
        sum.y += part.y;
      }
      const uint32_t group = quotient(item / kGroup, p.tokens);
      write(round.first_strip * kGroups + group, item % kGroup, item / kGroup - group * p.tokens, sum);
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
    for (bool has_x = false;; has_x = rounds.one_phase()) {
      const Round round = rounds.of(batch, first_chunk);
      if (!has_x) input.stage(round, first_chunk == rounds.begin);
      multiply(round, tiles);
      __syncthreads();
      add_up(round);
      if (p.ranks > 1 && is_last_phase(round)) add_up_cluster(round);
      if (!rounds.advance(batch, first_chunk)) break;
      __syncthreads();  // x, sums and ends are over
    }
    prefetch_next();
    instruction::wait_for_copies<0>();
  }
};

}  // namespace nibble::decode
