// The work of the decode kernel (decode.cuh) and how thread blocks and warps share it.
#pragma once

#include <algorithm>

#include "nibble/mma_operand.cuh"
#include "nvfp4_linear/norm_beside.h"

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

// Columns of x as most formats need them: a lane has 32 in their order, a quarter of a chunk.
struct QuarterColumns {
  // The first of a piece's eight columns in a chunk.
  static __device__ __forceinline__ uint32_t column(uint32_t quarter, uint32_t piece) {
    return quarter * 32 + piece * 8;
  }
  static __device__ __forceinline__ uint4 arranged(const uint4& x) { return x; }
};

// How weights lie in memory: of a tile, the codes in 16 bytes and the scales in words. kTileBytes: in shared
// memory.
struct Nvfp4 : QuarterColumns {
  static constexpr bool kInRows = false;
  static constexpr uint32_t kCodes = 2 * kLanes, kScales = kLanes, kTileBytes = decode::kTileBytes;
};
// One float32 for the upper rows of a tile and one for the lower; each lane has a copy of both.
struct E4m3 : QuarterColumns {
  static constexpr bool kInRows = false;
  static constexpr uint32_t kCodes = 4 * kLanes, kScales = 2, kTileBytes = kCodes * 16 + kLanes * 8;
};
// Codes in rows, [outputs, columns], as a checkpoint has them, and the scales of E4m3. A lane has 16 columns of
// each half of a chunk, so that four lanes read whole sectors of a row. Codes that decode as neighbours have one
// between them: so have the columns of x.
struct E4m3Rows {
  static constexpr bool kInRows = true;
  static constexpr uint32_t kCodes = E4m3::kCodes, kScales = E4m3::kScales, kTileBytes = E4m3::kTileBytes;

  static __device__ __forceinline__ uint32_t column(uint32_t quarter, uint32_t piece) {
    return piece / 2 * (kChunk / 2) + quarter * 16 + piece % 2 * 8;
  }
  static __device__ __forceinline__ uint4 arranged(const uint4& x) {
    return make_uint4(low_halves(x.x, x.y), high_halves(x.x, x.y), low_halves(x.z, x.w), high_halves(x.z, x.w));
  }
};

struct Problem {
  const uint4* x;          // [tokens, columns]
  const uint4* codes;      // [groups, chunks, Format::kCodes]: weight.py, e4m3.py; or rows
  const uint32_t* scales;  // [groups, chunks, Format::kScales]
  const float* column_scale;
  const void* bias;
  const void* residual;
  void* out;
  float upper_global_scale, lower_global_scale;  // of rows below N / 2 and of the others
  uint32_t tokens, outputs, columns, chunks, groups;
  uint32_t ranks;                                 // thread blocks of a cluster
  uint32_t chunks_per_phase, groups_per_cluster;  // of the smaller share
  bool silu_mul;
  NormBefore norm_before;  // of forms with one
  NormAfter norm_after;
};

// kDepth: tiles that a warp has under way. kGroupsPerRound: groups whose sums meet at a time.
template <bool Small, uint32_t TokenGroups, uint32_t Warps, uint32_t Depth, uint32_t GroupsPerRound,
          class WeightFormat = Nvfp4, Norm Beside = Norm::none>
struct Form {
  using Format = WeightFormat;
  template <Norm Other>
  using With = Form<Small, TokenGroups, Warps, Depth, GroupsPerRound, WeightFormat, Other>;
  static constexpr Norm kNorm = Beside;
  static_assert(kNorm == Norm::none || TokenGroups == 1);
  static constexpr bool kSmall = Small;  // for GPUs with little shared memory
  static constexpr uint32_t kTokenGroups = TokenGroups, kTokens = TokenGroups * kTokenGroup;
  static constexpr uint32_t kWarps = Warps, kThreads = Warps * kLanes, kDepth = Depth;
  static constexpr uint32_t kGroupsPerRound = GroupsPerRound;
  static constexpr uint32_t kFirstSquares = 64 / Warps;  // that a thread asks for at once
  static constexpr uint32_t kSums = TokenGroups * 2 * kItems;  // of a group, or of a warp's part of it
  static constexpr uint32_t kSlots = Warps + GroupsPerRound;   // parts of groups in a round
  static constexpr uint32_t kRingBytes = Warps * Depth * Format::kTileBytes;
  static constexpr uint32_t kSlotBytes = kSlots * kSums * sizeof(float);
  static constexpr uint32_t kTotalBytes = GroupsPerRound * kSums * sizeof(float);
  static constexpr uint32_t kEndBytes = GroupsPerRound * 2 * sizeof(uint32_t);
  static constexpr uint32_t kRangeBytes = kTokens * sizeof(uint32_t);
  // For the norm before: factors, and sums of squares of warps.
  static constexpr uint32_t kNormFloats = kNorm == Norm::before ? kTokens * (1 + Warps) : 0;

  // Rows that x has in shared memory. As many as the form takes, where that gives their places constant
  // distances; nobody looks at the sums of those past the last token.
  static constexpr uint32_t x_rows(uint32_t tokens) { return TokenGroups == 1 ? tokens : kTokens; }

  // With `totals` where a block's sums of a round are not yet the result.
  static constexpr uint32_t shared_bytes(uint32_t chunks, uint32_t tokens, bool totals) {
    return kRingBytes + kSlotBytes + kEndBytes + kNormFloats * sizeof(float) + kRangeBytes + chunks * x_rows(tokens) * kChunk * 2 +
           (totals ? kTotalBytes : 0);
  }
};

// How many tokens a launch takes, and the warps for them. On SM12x a thread block has 99 KB of shared memory
// and less bandwidth to keep busy: fewer warps, and more of x at a time.
struct LargeForms {
  using Few = Form<false, 1, 16, 3, 32>;
  using Some = Form<false, 2, 16, 2, 16>;
  using Many = Form<false, 4, 12, 2, 8>;
};
struct SmallForms {
  using Few = Form<true, 1, 8, 3, 16>;
  using Some = Form<true, 2, 8, 3, 8>;
  using Many = Form<true, 4, 8, 2, 4>;
};
// Of E4M3: as many bytes under way in fewer tiles.
template <class Format>
struct LargeByteForms {
  using Few = Form<false, 1, 16, 2, 32, Format>;
  using Some = Form<false, 2, 16, 2, 16, Format>;
  using Many = Form<false, 4, 12, 2, 8, Format>;
};
template <class Format>
struct SmallByteForms {
  using Few = Form<true, 1, 8, 2, 16, Format>;
  using Some = Form<true, 2, 8, 2, 8, Format>;
  using Many = Form<true, 4, 8, 2, 4, Format>;
};
using LargeE4m3Forms = LargeByteForms<E4m3>;  // experts
using SmallE4m3Forms = SmallByteForms<E4m3>;
using LargeE4m3RowsForms = LargeByteForms<E4m3Rows>;  // linear layers
using SmallE4m3RowsForms = SmallByteForms<E4m3Rows>;

constexpr uint32_t kLeastSharedBytes = 99 * 1024;
static_assert(SmallForms::Few::With<Norm::before>::shared_bytes(24, SmallForms::Few::kTokens, true) <=
              kLeastSharedBytes);
static_assert(SmallForms::Some::shared_bytes(11, SmallForms::Some::kTokens, true) <= kLeastSharedBytes);
static_assert(SmallE4m3Forms::Few::shared_bytes(20, SmallE4m3Forms::Few::kTokens, true) <= kLeastSharedBytes);
static_assert(SmallE4m3Forms::Some::shared_bytes(8, SmallE4m3Forms::Some::kTokens, true) <=
              kLeastSharedBytes);
static_assert(SmallForms::Many::shared_bytes(6, SmallForms::Many::kTokens, true) <= kLeastSharedBytes);
static_assert(SmallE4m3RowsForms::Many::shared_bytes(3, SmallE4m3RowsForms::Many::kTokens, true) <=
              kLeastSharedBytes);

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

// Warps share the steps of a round, a tile each: those of group 0, then those of group 1 ... This is the
// first of a warp.
template <class Form>
__device__ __forceinline__ uint32_t first_step(const Round& round, uint32_t warp) {
  return warp * (round.groups * round.chunks) / Form::kWarps;
}

}  // namespace nibble::decode
