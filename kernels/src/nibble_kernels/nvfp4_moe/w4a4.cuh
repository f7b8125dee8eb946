// Experts with NVFP4 activations and NVFP4 weights, for SM12x: the loop of nvfp4_linear/w4a4.cuh over tiles of
// tokens that have an expert in common. Order of work: docs/kernels/blackwell.md.
//
// Six kernels: pairs of a token and an expert in the order of experts; x quantized in the order of tiles; its
// products with w13 and the activation; the intermediate quantized likewise; its products with w2; the sum
// over a token's experts.
#pragma once

#include "nibble/static_scale.cuh"
#include "nvfp4_moe/activation.cuh"
#include "nvfp4_moe/route.cuh"
#include "nvfp4_moe/w4a4_form.h"

namespace nibble::w4a4_experts {

using experts::Activation;
using experts::kMostExperts;
using experts::kRouteThreads;
using experts::kRouteWarps;
using instruction::SharedPlace;
using warpgroup::pair_of;
using warpgroup::to_float;

// ---- pairs in the order of experts

constexpr uint32_t kSlices = 16;  // of the pairs, a warp for each

struct Routing {
  const int32_t* ids;    // [pairs]; below 0 or too large: an expert of another process
  const float* weights;  // [pairs]
  uint32_t pairs, experts;
  Tile* tiles;
  Pair* ordered;
  uint32_t* counts;  // of tiles and of ordered pairs
  uint32_t* flags;   // of both products, to be zero
  uint32_t flag_count;

  __device__ __forceinline__ bool is_here(int32_t id) const { return static_cast<uint32_t>(id) < experts; }
};

struct RoutingTable {
  uint64_t of_warps[kRouteWarps];
  uint32_t to_slot[kMostExperts];  // from a place in the order
};

// One block. Pairs of an expert stay in their order, so that a tile has the same ones in every run.
// `counts`: [kSlices, experts].
__device__ __forceinline__ void route(const Routing& r, uint32_t tokens, RoutingTable& table,
                                      uint32_t* counts) {
  const uint32_t lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes, expert = threadIdx.x;
  const uint32_t each = quotient_up(quotient_up(r.pairs, kSlices), kLanes) * kLanes;
  const uint32_t begin = min(warp * each, r.pairs), end = warp < kSlices ? min(begin + each, r.pairs) : begin;
  uint32_t* const own = counts + warp * r.experts;
  // f(pair, its expert, its place), where `own` has the place of an expert's next pair.
  const auto for_pairs = [&](auto&& f) {
    for (uint32_t first = begin; first < end; first += kLanes) {
      const uint32_t pair = first + lane;
      const int32_t id = pair < end ? r.ids[pair] : -1;
      const bool here = r.is_here(id);
      const uint32_t alike = __match_any_sync(~0u, here ? id : -1),
                     before = __popc(alike & ((1u << lane) - 1)), place = here ? own[id] + before : 0;
      __syncwarp();
      if (here && before == 0) own[id] = place + __popc(alike);
      __syncwarp();
      if (here) f(pair, static_cast<uint32_t>(id), place);
    }
  };

  for (uint32_t i = threadIdx.x; i < r.flag_count; i += kRouteThreads) r.flags[i] = 0;
  for (uint32_t i = threadIdx.x; i < kSlices * r.experts; i += kRouteThreads) counts[i] = 0;
  __syncthreads();
  for_pairs([](uint32_t, uint32_t, uint32_t) {});  // counts them
  __syncthreads();
  uint32_t count = 0;
  if (expert < r.experts) {
    for (uint32_t i = 0; i < kSlices; ++i) {
      uint32_t& place = counts[i * r.experts + expert];
      const uint32_t more = place;
      place = count;
      count += more;
    }
  }
  uint32_t all_tiles;
  const experts::Offsets at =
      experts::offsets_of(count, quotient_up(count, tokens), table.of_warps, all_tiles);
  if (expert < r.experts) {
    for (uint32_t i = 0; i < kSlices; ++i) counts[i * r.experts + expert] += at.pairs;
    table.to_slot[expert] = at.tiles * tokens - at.pairs;
    experts::write_tiles(tokens, count, at, [&](uint32_t i, const Tile& tile) { r.tiles[i] = tile; });
    if (expert == r.experts - 1) {
      r.counts[0] = all_tiles;
      r.counts[1] = at.pairs + count;
    }
  }
  __syncthreads();
  for_pairs([&](uint32_t pair, uint32_t id, uint32_t place) {
    r.ordered[place] = {pair, place + table.to_slot[id], id, r.weights[pair]};
  });
}

// ---- rows quantized in the order of tiles

struct Quantization {
  const uint4* x;             // rows of tokens, or of ordered pairs
  uint8_t* to;                // [tiles, chunks, a tile's chunk]
  const float* input_scales;  // [experts]
  const Pair* ordered;
  const uint32_t* counts;
  uint32_t topk, columns, chunks;  // topk: pairs of a row of x
  bool is_inner;                   // x has a row for each ordered pair
};

// The place of a block's scale among the eight of a chunk: w4a4::in_order for both instructions, one after
// the other.
__device__ __forceinline__ uint32_t scale_place(uint32_t block) { return block % 4 * 2 + block / 4; }

// A warp has 256 columns of a row at a time. Codes and scales past the last column are zero.
template <class T, class Form, class Convert>
__device__ __forceinline__ void quantize_rows(const Quantization& q) {
  const uint32_t lane = threadIdx.x % kLanes, warps = gridDim.x * (blockDim.x / kLanes),
                 each = quotient_up(q.chunks, 2), units = __ldcg(q.counts + 1) * each;
  for (uint32_t unit = blockIdx.x * (blockDim.x / kLanes) + threadIdx.x / kLanes; unit < units;
       unit += warps) {
    const uint32_t place = unit / each, column = (unit - place * each) * (2 * kChunk) + lane * kVector;
    const uint4 pair = __ldcg(reinterpret_cast<const uint4*>(q.ordered + place));  // Pair
    const uint32_t row = q.is_inner ? place : pair.x / q.topk, chunk = column / kChunk;
    uint4 words = make_uint4(0, 0, 0, 0);
    if (column < q.columns) words = __ldcg(q.x + size_t{row} * (q.columns / kVector) + column / kVector);
    const StaticScale<Convert, Exact> rule(Exact::reciprocal(__ldg(q.input_scales + pair.z)));
    const Quantized found = rule(half_of<T>(words));
    if (chunk >= q.chunks) continue;
    const uint32_t tile = pair.y / Form::kTokens, token = pair.y % Form::kTokens;
    uint8_t* const to = q.to + (size_t{tile} * q.chunks + chunk) * kTileChunkBytes<Form>;
    *reinterpret_cast<uint32_t*>(to + token * kXRowBytes + column % kChunk / 2) = found.codes;
    if (lane % 2 == 0)
      to[Form::kXBytes + token * kTokenScales + scale_place(column % kChunk / 16)] =
          static_cast<uint8_t>(found.scale);
  }
}

// ---- the products

// One weight of every expert: weight.py, native.
struct Weight {
  const uint8_t *codes, *scales;  // [experts · groups, chunks, 1024] and [experts · groups, chunks, 128]
  const float2* global_scales;    // of the upper and of the lower half of an expert's rows
  const float* input_scales;      // [experts]
  const void* bias;               // [experts, outputs], or null
  uint32_t outputs, columns, chunks, groups, row_blocks;  // the last three: divide()
};

NIBBLE_FUNCTION void divide(Weight& weight) {
  weight.chunks = quotient_up(weight.columns, kChunk);
  weight.groups = quotient_up(weight.outputs / 2, kGroup);
  weight.row_blocks = quotient_up(weight.groups, kGroups);
}

struct Problem {
  Weight weight;
  const uint8_t* x;  // as quantize_rows writes it
  void* out;         // the intermediate, [ordered pairs, columns of w2]; or products, [pairs, outputs]
  const Tile* tiles;
  const uint32_t* tile_count;
  const Pair* ordered;
  Activation activation;
  w4a4::Shares shares;
  bool is_second;
};

// Rows of x by expert.
template <class T, class Form>
struct ExpertRows {
  struct Unit {
    Tile tile;
    uint32_t number, row_block;  // number: of the tile
  };

  const Problem& p;

  __device__ __forceinline__ w4a4::Shares shares() const { return p.shares; }
  __device__ __forceinline__ uint32_t units() const { return __ldcg(p.tile_count) * p.weight.row_blocks; }
  __device__ __forceinline__ uint32_t chunks() const { return p.weight.chunks; }
  __device__ __forceinline__ Unit unit(uint32_t number) const {
    const uint32_t tile = number / p.weight.row_blocks;
    const uint4 found = __ldcg(reinterpret_cast<const uint4*>(p.tiles + tile));
    return {{found.x, found.y, found.z, 0}, tile, number - tile * p.weight.row_blocks};
  }
  __device__ __forceinline__ uint32_t groups(const Unit& unit) const {
    return min(kGroups, p.weight.groups - unit.row_block * kGroups);
  }
  __device__ __forceinline__ size_t weight_group(const Unit& unit) const {
    return size_t{unit.tile.expert} * p.weight.groups + unit.row_block * kGroups;
  }
  __device__ __forceinline__ const uint8_t* codes() const { return p.weight.codes; }
  __device__ __forceinline__ const uint8_t* scales() const { return p.weight.scales; }

  // Copies are of 16 bytes: the scales of an even number of tokens.
  __device__ __forceinline__ uint32_t code_bytes(const Unit& unit) const {
    return unit.tile.count * kXRowBytes;
  }
  __device__ __forceinline__ uint32_t scale_bytes(const Unit& unit) const {
    return quotient_up(unit.tile.count, 2) * (2 * kTokenScales);
  }
  __device__ __forceinline__ uint32_t x_bytes(const Unit& unit, uint32_t) const {
    return code_bytes(unit) + scale_bytes(unit);
  }
  __device__ __forceinline__ void fetch_x(const Unit& unit, uint32_t chunk, SharedPlace to,
                                          SharedPlace barrier) const {
    const uint8_t* const from =
        p.x + (size_t{unit.number} * p.weight.chunks + chunk) * kTileChunkBytes<Form>;
    const uint32_t lane = threadIdx.x % kLanes;
    if (lane == 2 * kGroups) {
      instruction::copy_bulk(to, from, code_bytes(unit), barrier);
    } else if (lane == 2 * kGroups + 1) {
      instruction::copy_bulk(to + Form::kXBytes, from + Form::kXBytes, scale_bytes(unit), barrier);
    }
  }
  __device__ __forceinline__ uint32_t scales_of(SharedPlace x_scales, const Unit&, uint32_t, uint32_t token,
                                                bool second) const {
    return instruction::load_shared_word(x_scales + token * kTokenScales + second * 4);
  }

  using Sums = float[Form::kTokenGroups][4];
  __device__ __forceinline__ void write(const Unit& unit, uint32_t warp, const Sums& sums) const {
    if (p.is_second) return write_products(unit, warp, sums);
    // One decision for all sums: most models have this one.
    if (p.activation.is_plain()) return write_inner(unit, warp, sums, experts::SiluMul());
    write_inner(unit, warp, sums, p.activation);
  }

 private:
  // Of a lane's rows of the upper and of the lower half.
  struct Target {
    uint32_t half, row;  // row: the first of the two that a lane writes
    float2 factor, bias;
  };
  __device__ __forceinline__ Target target_of(const Unit& unit, uint32_t warp) const {
    const uint32_t lane = threadIdx.x % kLanes, half = p.weight.outputs / 2,
                   group = unit.row_block * kGroups + warp, upper = group * kGroup + lane / 4;
    const float2 scale = __ldg(p.weight.global_scales + unit.tile.expert);
    const float of_x = Exact::reciprocal(Exact::reciprocal(__ldg(p.weight.input_scales + unit.tile.expert)));
    Target to{half, group * kGroup + lane % 4 * 2, make_float2(scale.x * of_x, scale.y * of_x),
              make_float2(0.0f, 0.0f)};
    if (p.weight.bias && upper < half) {
      const T* const bias =
          static_cast<const T*>(p.weight.bias) + size_t{unit.tile.expert} * p.weight.outputs + upper;
      to.bias = make_float2(to_float(bias[0]), to_float(bias[half]));
    }
    return to;
  }
  static __device__ __forceinline__ float4 finished(const Target& to, const float (&sums)[4]) {
    return make_float4(sums[0] * to.factor.x + to.bias.x, sums[1] * to.factor.x + to.bias.x,
                       sums[2] * to.factor.y + to.bias.y, sums[3] * to.factor.y + to.bias.y);
  }
  static __device__ __forceinline__ uint32_t transposed(float a, float b) {
    return instruction::transpose_pairs(pair_of(T(), a, b));
  }
  __device__ __forceinline__ void store(uint32_t row, uint32_t columns, uint32_t column,
                                        uint32_t pair) const {
    *reinterpret_cast<uint32_t*>(static_cast<T*>(p.out) + size_t{row} * columns + column) = pair;
  }

  template <class F>
  __device__ __forceinline__ void write_inner(const Unit& unit, uint32_t warp, const Sums& sums,
                                              const F& activation) const {
    const Target to = target_of(unit, warp);
#pragma unroll
    for (uint32_t i = 0; i < Form::kTokenGroups; ++i) {
      if (i * kTokenGroup >= unit.tile.count) break;
      const float4 y = finished(to, sums[i]);
      const uint32_t token = i * kTokenGroup + threadIdx.x % kLanes / 4, row = unit.tile.first + token;
      const bool writes = token < unit.tile.count && to.row < to.half;
      if (p.activation.gated) {
        const uint32_t pair = transposed(activation(y.x, y.z), activation(y.y, y.w));
        if (writes) store(row, to.half, to.row, pair);
        continue;
      }
      const uint32_t upper = transposed(activation(y.x), activation(y.y)),
                     lower = transposed(activation(y.z), activation(y.w));
      if (!writes) continue;
      store(row, 2 * to.half, to.row, upper);
      store(row, 2 * to.half, to.half + to.row, lower);
    }
  }

  __device__ __forceinline__ void write_products(const Unit& unit, uint32_t warp, const Sums& sums) const {
    const Target to = target_of(unit, warp);
    const uint32_t lane = threadIdx.x % kLanes;
#pragma unroll
    for (uint32_t i = 0; i < Form::kTokenGroups; ++i) {
      if (i * kTokenGroup >= unit.tile.count) break;
      // Of tokens past the last, the last.
      const auto pair_at = [&](uint32_t token) {
        return p.ordered + unit.tile.first + min(i * kTokenGroup + token, unit.tile.count - 1);
      };
      const float4 y = finished(to, sums[i]);
      const float v = __ldcg(&pair_at(lane % 4 * 2)->weight), w = __ldcg(&pair_at(lane % 4 * 2 + 1)->weight);
      const uint32_t row = __ldcg(&pair_at(lane / 4)->number);
      const uint32_t upper = transposed(y.x * v, y.y * w), lower = transposed(y.z * v, y.w * w);
      if (i * kTokenGroup + lane / 4 >= unit.tile.count || to.row >= to.half) continue;
      store(row, p.weight.outputs, to.row, upper);
      store(row, p.weight.outputs, to.half + to.row, lower);
    }
  }
};

template <class T, class Form>
using Multiplier = w4a4::Multiplier<Form, ExpertRows<T, Form>>;

}  // namespace nibble::w4a4_experts
