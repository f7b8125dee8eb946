// What lies between the attentions of two dense decoder layers, in one launch: three or four products with
// prepared NVFP4 weights, and their norms. For SM90 and few rows: docs/kernels/nvfp4_linear.md.
//
// One thread block on each multiprocessor, which all run at once, computes its share of each product as the
// decode kernel does. Between two products all blocks meet. A warp's ring of tiles goes on into the next
// product meanwhile, so that memory is never idle.
#pragma once

#include "nibble/warpgroup_instructions.cuh"
#include "nvfp4_linear/decode.cuh"

namespace nibble::layer {

using decode::kChunk;
using decode::kLanes;
using decode::kTileBytes;
using decode::Problem;
using decode::Round;
using decode::Rounds;
using decode::Share;
using instruction::SharedPlace;

constexpr uint32_t kMostProducts = 4;
constexpr uint32_t kMostTokens = 8;
constexpr uint32_t kNormVectors = 2;  // of 8 elements, of a thread
constexpr uint32_t kMostNormColumns = 16 * kLanes * kNormVectors * 8;

struct Layer {
  Problem products[kMostProducts];   // each reads what an earlier one wrote
  const uint4* norms[kMostProducts];  // weights of the RMSNorm of a product's x, or null
  uint32_t* meetings;                 // 0 or 2^31 before and after a launch
  float epsilon;
  uint32_t count;
};

// Bulk: whole tiles are copied by one lane, past the first cache's queues.
template <uint32_t Depth, bool Bulk>
struct Form : decode::Form<false, 1, 16, Depth, 16> {
  using Base = decode::Form<false, 1, 16, Depth, 16>;
  static constexpr bool kBulk = Bulk;
  static constexpr uint32_t kBarrierBytes = Base::kWarps * Depth * 8;
  static_assert(kMostTokens * Base::kWarps * sizeof(float) <= Base::kSlotBytes);

  static constexpr uint32_t shared_bytes(uint32_t chunks, uint32_t tokens) {
    return kBarrierBytes + Base::shared_bytes(chunks, tokens, false);
  }
};

__device__ __forceinline__ Share share_of_block(const Problem& p) {
  return decode::share_of(p.groups, blockIdx.x, gridDim.x, p.groups_per_cluster);
}

// A warp's tiles of all products on their way to shared memory.
template <class Form>
class Stream {
 public:
  __device__ __forceinline__ Stream(const Layer& layer, uint8_t* shared)
      : layer_(layer), tiles_(layer.products[0]) {
    const uint32_t lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
    begin_ = instruction::shared_place(shared + Form::kBarrierBytes + warp * (Form::kDepth * kTileBytes) +
                                       lane * 16);
    if constexpr (Form::kBulk) {
      barrier_ = first_barrier_ = instruction::shared_place(shared + warp * (Form::kDepth * 8));
      if (lane == 0) {
        for (uint32_t i = 0; i < Form::kDepth; ++i) instruction::init_barrier(first_barrier_ + i * 8, 1);
        instruction::publish_barriers();
      }
      __syncwarp();
    }
    start_run();
    place_ = begin_;
#pragma unroll 1
    for (uint32_t i = 0; i < Form::kDepth; ++i) {
      fetch();
      advance();
    }
    phase_ = 0;
  }

  // The oldest tile; `replace` must follow.
  __device__ __forceinline__ decode::Fragment take() const {
    if constexpr (Form::kBulk) {
      instruction::wait_for_phase(barrier_, phase_);
    } else {
      instruction::wait_for_copies<Form::kDepth - 1>();
    }
    return Tiles::load(place_);
  }

  __device__ __forceinline__ void replace() {
    if constexpr (Form::kBulk) __syncwarp();  // all lanes have read
    fetch();
    advance();
  }

 private:
  using Tiles = decode::Tiles<typename Form::Format>;

  __device__ __forceinline__ void fetch() {
    if (tile_ != run_end_) {
      if constexpr (Form::kBulk) {
        if (threadIdx.x % kLanes == 0) {
          instruction::arrive_expecting(barrier_, kTileBytes);
          instruction::copy_bulk(place_, instruction::element<decode::Nvfp4::kCodes>(tiles_.codes, tile_),
                                 kCodeBytes, barrier_);
          instruction::copy_bulk(place_ + kCodeBytes,
                                 instruction::element<decode::Nvfp4::kScales>(tiles_.scales, tile_),
                                 kTileBytes - kCodeBytes, barrier_);
        }
      } else {
        tiles_.fetch(place_, tile_);
      }
      if (++tile_ == run_end_) start_run();
    }
    if constexpr (!Form::kBulk) instruction::end_copies();
  }

  __device__ __forceinline__ void advance() {
    if (place_ == begin_ + (Form::kDepth - 1) * kTileBytes) {
      place_ = begin_;
      barrier_ = first_barrier_;
      phase_ ^= 1;
    } else {
      place_ = place_ + kTileBytes;
      barrier_ = barrier_ + 8;
    }
  }

  // This warp's range of the next round that has tiles for it, of this product or of a later one.
  __device__ __forceinline__ void start_run() {
    const uint32_t warp = threadIdx.x / kLanes;
    while (product_ != layer_.count) {
      const Problem& p = layer_.products[product_];
      const Rounds<Form> rounds(p, share_of_block(p), 0);
      if (batch_ == rounds.batches) {
        ++product_;
        batch_ = 0;
        continue;
      }
      const Round round = rounds.of(batch_++, 0);
      const uint32_t first = decode::first_step<Form>(round, warp),
                     end = decode::first_step<Form>(round, warp + 1);
      if (first == end) continue;
      tiles_ = Tiles(p);
      tile_ = round.first_group * p.chunks + first;
      run_end_ = tile_ + (end - first);
      return;
    }
  }

  static constexpr uint32_t kCodeBytes = decode::Nvfp4::kCodes * 16;
  const Layer& layer_;
  Tiles tiles_;
  SharedPlace begin_, place_, first_barrier_ = {}, barrier_ = {};
  uint32_t tile_ = 0, run_end_ = 0, product_ = 0, batch_ = 0, phase_ = 0;
};

// Where all blocks of the grid meet. The counter's highest bit changes with each meeting, and the other bits
// are zero after it: so it serves any number of launches, one after the other.
class Meetings {
 public:
  __device__ __forceinline__ explicit Meetings(uint32_t* counter)
      : counter_(counter), side_(threadIdx.x == 0 ? __ldcg(counter) & kSide : 0) {}

  // What a block wrote before is visible to all afterwards, past the first cache.
  __device__ __forceinline__ void meet() {
    __syncthreads();
    if (threadIdx.x == 0) {
      instruction::add_release(counter_, blockIdx.x == 0 ? kSide - (gridDim.x - 1) : 1);
      side_ ^= kSide;
      instruction::wait_for_bits(counter_, kSide, side_);
    }
    __syncthreads();
  }

 private:
  static constexpr uint32_t kSide = 1u << 31;
  uint32_t* const counter_;
  uint32_t side_;
};

template <class T>
union Vector {
  uint4 words;
  T elements[8];
};

// The RMSNorm of a product's x, in its place in shared memory. A thread has the same columns of each row.
template <class T, class Form, class Multiplier>
class Norm {
 public:
  // Reads the weight, which no kernel writes; null without a norm.
  __device__ __forceinline__ Norm(const Multiplier& product, const uint4* weight, float epsilon)
      : product_(product), epsilon_(epsilon) {
#pragma unroll
    for (uint32_t i = 0; i < kNormVectors; ++i) {
      scale_[i].words = make_uint4(0, 0, 0, 0);
      if (weight && is_there(i)) scale_[i].words = __ldg(weight + column(i) / 8);
    }
  }

  __device__ __forceinline__ void apply() const {
    const Problem& p = product_.p;
    for (uint32_t token = 0; token < p.tokens; ++token) {
      float squares = 0.0f;
#pragma unroll
      for (uint32_t i = 0; i < kNormVectors; ++i) {
        if (!is_there(i)) break;
        Vector<T> x;
        x.words = product_.x[place(i, token)];
#pragma unroll
        for (uint32_t k = 0; k < 8; ++k) {
          const float element = decode::to_float(x.elements[k]);
          squares = fmaf(element, element, squares);
        }
      }
#pragma unroll
      for (uint32_t mask = 1; mask < kLanes; mask *= 2) squares += __shfl_xor_sync(~0u, squares, mask);
      if (product_.lane == 0) product_.slots[token * Form::kWarps + product_.warp] = squares;
    }
    __syncthreads();
    for (uint32_t token = 0; token < p.tokens; ++token) {
      float squares = 0.0f;
#pragma unroll
      for (uint32_t warp = 0; warp < Form::kWarps; ++warp)
        squares += product_.slots[token * Form::kWarps + warp];
      const float factor = rsqrtf(squares / static_cast<float>(p.columns) + epsilon_);
#pragma unroll
      for (uint32_t i = 0; i < kNormVectors; ++i) {
        if (!is_there(i)) break;
        Vector<T> x;
        x.words = product_.x[place(i, token)];
#pragma unroll
        for (uint32_t k = 0; k < 8; ++k) {
          T normal;
          decode::assign(normal, decode::to_float(x.elements[k]) * factor);
          decode::assign(x.elements[k], decode::to_float(normal) * decode::to_float(scale_[i].elements[k]));
        }
        product_.x[place(i, token)] = x.words;
      }
    }
    __syncthreads();
  }

 private:
  static constexpr uint32_t kXRow = Multiplier::kXRow;

  static __device__ __forceinline__ uint32_t vector(uint32_t i) { return threadIdx.x + i * Form::kThreads; }
  static __device__ __forceinline__ uint32_t piece(uint32_t i) { return vector(i) / decode::kQuarters % 4; }
  static __device__ __forceinline__ uint32_t quarter(uint32_t i) { return vector(i) % decode::kQuarters; }
  static __device__ __forceinline__ uint32_t column(uint32_t i) {
    return vector(i) / kXRow * kChunk + quarter(i) * 32 + piece(i) * 8;
  }
  __device__ __forceinline__ bool is_there(uint32_t i) const { return column(i) < product_.p.columns; }
  __device__ __forceinline__ uint32_t place(uint32_t i, uint32_t token) const {
    return vector(i) / kXRow * product_.x_chunk + token * kXRow +
           Multiplier::x_place(token, piece(i), quarter(i));
  }

  const Multiplier& product_;
  const float epsilon_;
  Vector<T> scale_[kNormVectors];
};

template <class T, class Operand, class Form>
__device__ __forceinline__ void compute(const Layer& layer, uint4* shared) {
  using Multiplier = decode::Multiplier<T, Operand, Form>;
  Stream<Form> tiles(layer, reinterpret_cast<uint8_t*>(shared));
  instruction::let_next_kernel_start();
  instruction::wait_for_previous_kernel();
  Meetings meetings(layer.meetings);
#pragma unroll 1
  for (uint32_t number = 0; number < layer.count; ++number) {
    const Problem& p = layer.products[number];
    const Multiplier product(p, share_of_block(p), shared + Form::kBarrierBytes / sizeof(uint4));
    const uint4* const weight = layer.norms[number];
    const Norm<T, Form, Multiplier> norm(product, weight, layer.epsilon);
    if (number != 0) meetings.meet();
    if (product.rounds.batches == 0) continue;
    product.stage_x(product.rounds.of(0, 0));
    if (weight) norm.apply();
    for (uint32_t batch = 0; batch < product.rounds.batches; ++batch) {
      if (batch != 0) __syncthreads();  // sums and ends have been read
      const Round round = product.rounds.of(batch, 0);
      product.multiply(round, tiles);
      __syncthreads();
      product.add_up(round);
    }
  }
}

}  // namespace nibble::layer
