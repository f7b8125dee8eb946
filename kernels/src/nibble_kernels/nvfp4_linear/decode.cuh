// The decode kernel: few rows of activations times an NVFP4 weight, at the speed at which the weight can be
// read. Layouts, order of work and measurements: docs/kernels/nvfp4_linear.md.
//
// A warp multiplies 16 weight rows by up to 64 rows of x ("tokens"), 128 columns at a time. The warps of a
// team take turns at the columns of the same weight rows, and add up their sums in shared memory; thread
// blocks may share columns, too ("splits"), and the last one adds up. Every order is fixed.
#pragma once

#include <algorithm>
#include <type_traits>

#include "nibble/mma_operand.cuh"

namespace nibble::decode {

constexpr uint32_t kChunk = 128;  // columns that a warp multiplies at a time: 64 bytes of a weight row
constexpr uint32_t kGroup = 8;  // rows of the weight's upper half in a group; as many of the lower half join
constexpr uint32_t kTokenGroup = 8;  // tokens side by side in a tensor core instruction
constexpr uint32_t kLanes = 32;
constexpr uint32_t kPieces = 4;  // 16 bytes of x for each of a weight's four words in a lane
constexpr uint32_t kItems =
    kGroup * kTokenGroup;  // pairs of outputs (r, r + N / 2) of a group and a token group
constexpr uint32_t kGroupChunkBytes = 2 * kGroup * kChunk * 9 / 16;

struct Problem {
  const uint4* x;          // [tokens, columns]
  const uint8_t* codes;    // [outputs, columns / 2]
  const uint32_t* scales;  // [groups, chunks, 32]: weight.py
  const float* column_scale;
  const void* bias;
  const void* residual;
  void* out;
  float* partials;                               // [groups, splits, token groups, 2, 64]
  uint32_t* arrivals;                            // [groups], zero before and after
  float upper_global_scale, lower_global_scale;  // of rows below N / 2 and of the others
  uint32_t tokens, outputs, columns, chunks, groups, splits, chunks_per_split;
  bool silu_mul;
};

// How a thread block is divided: kTeams times kTeamWarps warps. kDepth: chunks whose loads a warp has under
// way.
template <uint32_t TokenGroups, uint32_t Teams, uint32_t TeamWarps, uint32_t Depth>
struct Form {
  static constexpr uint32_t kTokenGroups = TokenGroups, kTeams = Teams, kTeamWarps = TeamWarps,
                            kDepth = Depth;
  static constexpr uint32_t kThreads = Teams * TeamWarps * kLanes, kTeamThreads = TeamWarps * kLanes;
  static constexpr uint32_t kChunkBytes = TokenGroups * kPieces * kLanes * sizeof(uint4);  // of x
  static constexpr uint32_t kSums = TokenGroups * 2 * kItems;                              // of a warp
  static constexpr uint32_t kBuffers = TokenGroups <= 2 ? 2 : 1;  // of sums, as shared memory allows
  static constexpr uint32_t kReductionBytes = Teams * kBuffers * TeamWarps * kSums * sizeof(float);
  static constexpr uint32_t kFactorBytes = TokenGroups * kTokenGroup * sizeof(float);

  static constexpr uint32_t shared_bytes(uint32_t chunks) {
    return chunks * kChunkBytes + kReductionBytes + kFactorBytes + Teams * sizeof(uint32_t);
  }
};

// How many tokens a launch takes, and the warps for them. Up to 16 tokens the order of additions is the same
// whatever their number, as long as the division is.
using Few = Form<1, 2, 8, 4>;
using Some = Form<2, 2, 8, 4>;
using Many = Form<4, 4, 4, 4>;
using Most = Form<8, 8, 2, 2>;

// What a lane loads of 16 rows and 128 columns: 32 columns of a row of the upper half and of one of the
// lower, and their four scales.
struct Fragment {
  uint4 upper, lower;
  uint32_t scales;
};

__device__ __forceinline__ uint32_t word(const uint4& words, uint32_t i) {
  return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

// The fragments of a warp, group after group.
template <class Form>
class Loader {
 public:
  __device__ __forceinline__ Loader(const Problem& problem, uint32_t group, uint32_t group_stride,
                                    uint32_t chunk, uint32_t chunks)
      : p(problem), first_chunk_(chunk), chunks_(chunks), group_(group), group_stride_(group_stride) {
    start_group();
  }

  __device__ __forceinline__ Fragment next() {
    // Past the end of a row x is zero, and any codes will do.
    const uint8_t* const upper = row_ + (inside_ < p.columns / 2 ? inside_ : 0);
    const Fragment fragment{instruction::load_once(upper),
                            instruction::load_once(upper + size_t{p.outputs / 2} * (p.columns / 2)),
                            instruction::load_once(scales_)};
    inside_ += Form::kTeamWarps * (kChunk / 2);
    scales_ += Form::kTeamWarps * kLanes;
    if (++loaded_ == chunks_) {
      group_ += group_stride_;
      start_group();
    }
    return fragment;
  }

 private:
  __device__ __forceinline__ void start_group() {
    const uint32_t lane = threadIdx.x % kLanes;
    const uint32_t upper_row = min(group_ * kGroup + lane / 4, p.outputs / 2 - 1);
    row_ = p.codes + size_t{upper_row} * (p.columns / 2);
    scales_ = p.scales + (size_t{group_} * p.chunks + first_chunk_) * kLanes + lane;
    inside_ = first_chunk_ * (kChunk / 2) + lane % 4 * sizeof(uint4);
    loaded_ = 0;
  }

  const Problem& p;
  const uint32_t first_chunk_, chunks_;
  uint32_t group_, loaded_, inside_;
  const uint32_t group_stride_;
  const uint8_t* row_;
  const uint32_t* scales_;
};

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

// What a thread block multiplies: the columns of a split, and every `groups_apart`-th group.
struct Share {
  uint32_t split, first_group, groups_apart;
};

template <class T, class Operand, class Form, class Rows = InOrder>
struct Multiplier {
  static constexpr bool kConverts = !Operand::kAnyRange && std::is_same_v<T, __nv_bfloat16>;
  static constexpr uint32_t kTokenGroups = Form::kTokenGroups;

  const Problem& p;
  const Rows rows;
  const Share share;
  uint4* const x;               // [chunks of the split, token groups, pieces, lanes]
  float* const reduction;       // [teams, buffers, warps, sums]
  uint32_t* const token_range;  // [tokens]: largest bits, then the factor that undoes the scaling
  uint32_t* const is_last;      // [teams]
  const uint32_t lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  const uint32_t team = warp / Form::kTeamWarps, team_warp = warp % Form::kTeamWarps;
  const uint32_t row = lane / 4, quarter = lane % 4;  // of a group, and of a chunk's columns
  const uint32_t first_chunk = share.split * p.chunks_per_split;
  const uint32_t chunk_count = min(p.chunks_per_split, p.chunks - first_chunk);
  const uint32_t half = p.outputs / 2;

  __device__ __forceinline__ Multiplier(const Problem& problem, const Share& share, uint4* shared,
                                        Rows rows = {})
      : p(problem),
        rows(rows),
        share(share),
        x(shared),
        reduction(reinterpret_cast<float*>(shared +
                                           problem.chunks_per_split * (Form::kChunkBytes / sizeof(uint4)))),
        token_range(reinterpret_cast<uint32_t*>(reduction + Form::kReductionBytes / sizeof(float))),
        is_last(token_range + Form::kTokenGroups * kTokenGroup) {}

  // Eight elements of a token, or zeros past the end of its row.
  __device__ __forceinline__ uint4 load_x(uint32_t token, uint32_t chunk, uint32_t piece) const {
    const uint32_t column = (first_chunk + chunk) * kChunk + quarter * 32 + piece * 8;
    if (token >= p.tokens || column >= p.columns) return make_uint4(0, 0, 0, 0);
    return __ldcg(p.x + (size_t{rows.input(token)} * p.columns + column) / 8);
  }

  // The split's columns of x, in the order in which lanes need them.
  __device__ __forceinline__ void stage_x() const {
    if constexpr (kConverts) find_ranges();
    for (uint32_t unit = warp; unit < chunk_count * kTokenGroups; unit += Form::kThreads / kLanes) {
      const uint32_t chunk = unit / kTokenGroups, token = unit % kTokenGroups * kTokenGroup + row;
#pragma unroll
      for (uint32_t piece = 0; piece < kPieces; ++piece) {
        uint4 elements = load_x(token, chunk, piece);
        if constexpr (kConverts) elements = in_range(elements, token_range[token]);
        Operand::arrange(elements);
        x[(unit * kPieces + piece) * kLanes + lane] = elements;
      }
    }
    __syncthreads();
  }

  __device__ __forceinline__ void find_ranges() const {
    for (uint32_t token = threadIdx.x; token < kTokenGroups * kTokenGroup; token += Form::kThreads)
      token_range[token] = 0;
    __syncthreads();
    for (uint32_t unit = warp; unit < chunk_count * kTokenGroups; unit += Form::kThreads / kLanes) {
      const uint32_t chunk = unit / kTokenGroups, token = unit % kTokenGroups * kTokenGroup + row;
      uint32_t largest = 0;
#pragma unroll
      for (uint32_t piece = 0; piece < kPieces; ++piece) {
        const uint4 elements = load_x(token, chunk, piece);
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
          const uint32_t pair = word(elements, i) & 0x7fff7fff;
          largest = max(largest, max(pair & 0xffff, pair >> 16));
        }
      }
      largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
      if (quarter == 0) atomicMax(token_range + token, largest);
    }
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

  __device__ __forceinline__ void multiply(const Fragment& fragment, uint32_t chunk,
                                           float (&sums)[kTokenGroups][4]) const {
    const uint4* const pieces = x + chunk * (kTokenGroups * kPieces * kLanes) + lane;
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
      for (uint32_t tokens = 0; tokens < kTokenGroups; ++tokens) {
        const uint4 b = pieces[(tokens * kPieces + piece) * kLanes];
        Operand::mma(sums[tokens], upper[0], lower[0], upper[1], lower[1], b.x, b.y);
        Operand::mma(sums[tokens], upper[2], lower[2], upper[3], lower[3], b.z, b.w);
      }
    }
  }

  __device__ __forceinline__ void team_barrier() const { instruction::barrier<Form::kTeamThreads>(team + 1); }

  // Writes a group's sums over the team and over the splits. A lane has rows (row, row + N / 2) of tokens
  // 2 quarter and 2 quarter + 1; an item is one of those pairs.
  __device__ __forceinline__ void finish(uint32_t group, uint32_t turn,
                                         const float (&sums)[kTokenGroups][4]) const {
    float* const buffer =
        reduction + (team * Form::kBuffers + turn % Form::kBuffers) * Form::kTeamWarps * Form::kSums;
    float2* const own = reinterpret_cast<float2*>(buffer + team_warp * Form::kSums) + lane;
    if constexpr (Form::kBuffers == 1) team_barrier();
#pragma unroll
    for (uint32_t tokens = 0; tokens < kTokenGroups; ++tokens) {
      own[tokens * kItems] = make_float2(sums[tokens][0], sums[tokens][1]);
      own[tokens * kItems + kItems / 2] = make_float2(sums[tokens][2], sums[tokens][3]);
    }
    team_barrier();

    // Other threads each time: adding up takes its share of a warp's time.
    constexpr uint32_t kAll = kTokenGroups * kItems;
    const uint32_t thread = team_warp * kLanes + lane;
    const uint32_t first =
        (thread + (Form::kTeamThreads - turn * kAll % Form::kTeamThreads)) % Form::kTeamThreads;
    float2* const partials = reinterpret_cast<float2*>(p.partials) + size_t{group} * p.splits * kAll;
#pragma unroll 1
    for (uint32_t item = first; item < kAll; item += Form::kTeamThreads) {
      const float* const summands = buffer + item / kItems * 2 * kItems + item % kItems;
      float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
      for (uint32_t i = 0; i < Form::kTeamWarps; ++i) {
        sum.x += summands[i * Form::kSums];
        sum.y += summands[i * Form::kSums + kItems];
      }
      if constexpr (kConverts) {  // other splits have other ranges
        const float undo = __uint_as_float(254 - range_exponent(token_range[token_of(item)]) << 23);
        sum.x *= undo;
        sum.y *= undo;
      }
      if (p.splits == 1) {
        write(group, item, sum);
      } else {
        __stcg(partials + share.split * kAll + item, sum);
      }
    }
    if (p.splits == 1 || !arrived_last(group, thread)) return;
#pragma unroll 1
    for (uint32_t item = first; item < kAll; item += Form::kTeamThreads) {
      float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll 4
      for (uint32_t i = 0; i < p.splits; ++i) {
        const float2 part = __ldcg(partials + i * kAll + item);
        sum.x += part.x;
        sum.y += part.y;
      }
      write(group, item, sum);
    }
  }

  // Whether all other splits of the group have written their sums, which are then visible here.
  __device__ __forceinline__ bool arrived_last(uint32_t group, uint32_t thread) const {
    __threadfence();
    team_barrier();
    if (thread == 0) {
      const bool last = atomicAdd(p.arrivals + group, 1) == p.splits - 1;
      if (last) p.arrivals[group] = 0;
      is_last[team] = last;
    }
    team_barrier();
    if (!is_last[team]) return false;
    __threadfence();
    return true;
  }

  static __device__ __forceinline__ uint32_t token_of(uint32_t item) {
    return item / kItems * kTokenGroup + item % 8;  // as the lanes have them: 2 quarter, 2 quarter + 1
  }

  __device__ __forceinline__ void write(uint32_t group, uint32_t item, float2 sum) const {
    const uint32_t token = token_of(item), upper = group * kGroup + item % kItems / 8;
    if (token >= p.tokens || upper >= half) return;
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

  __device__ __forceinline__ void run() const {
    const uint32_t first_group = share.first_group + team * share.groups_apart;
    const uint32_t team_stride = Form::kTeams * share.groups_apart;
    const uint32_t groups = first_group < p.groups ? (p.groups - first_group - 1) / team_stride + 1 : 0;
    const uint32_t chunks =
        (chunk_count + Form::kTeamWarps - 1 - team_warp) / Form::kTeamWarps;  // of this warp
    const uint32_t fragments = groups * chunks;

    Loader<Form> loader(p, first_group, team_stride, first_chunk + team_warp, chunks);
    Fragment ring[Form::kDepth];
#pragma unroll
    for (uint32_t i = 0; i < Form::kDepth; ++i) {
      if (i < fragments) ring[i] = loader.next();
    }
    Rows::before_x();
    stage_x();

    float sums[kTokenGroups][4] = {};
    if (chunks == 0) {  // fewer chunks than warps
      for (uint32_t turn = 0; turn < groups; ++turn) finish(first_group + turn * team_stride, turn, sums);
    }
    uint32_t turn = 0, chunk = 0, slot = 0;
    for (uint32_t done = 0; done < fragments;) {
      bool ended = false;
      // Each slot's registers have a name in one place of the code only, wherever in the ring a group ends.
#pragma unroll
      for (uint32_t i = 0; i < Form::kDepth; ++i) {
        if (ended || slot != i) continue;
        multiply(ring[i], team_warp + chunk * Form::kTeamWarps, sums);
        if (done + Form::kDepth < fragments) ring[i] = loader.next();
        slot = (i + 1) % Form::kDepth;
        ++done;
        ended = ++chunk == chunks;
      }
      if (!ended) continue;
      finish(first_group + turn * team_stride, turn, sums);
#pragma unroll
      for (uint32_t tokens = 0; tokens < kTokenGroups; ++tokens) {
#pragma unroll
        for (uint32_t value = 0; value < 4; ++value) sums[tokens][value] = 0.0f;
      }
      chunk = 0;
      ++turn;
    }
  }
};

}  // namespace nibble::decode
