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
constexpr uint32_t kWarps = 16, kThreads = kWarps * kLanes;
constexpr uint32_t kMostNormColumns = kThreads * kNormVectors * 8;
constexpr uint32_t kGroupsPerRound = 16;
static_assert(kGroupsPerRound * decode::kGroup * kMostTokens <= 2 * kThreads);  // at most two items of a thread

struct Layer {
  Problem products[kMostProducts];   // each reads what an earlier one wrote
  const uint4* norms[kMostProducts];  // weights of the RMSNorm of a product's x, or null
  uint32_t* meetings;                 // 0 or 2^31 before and after a launch
  float epsilon;
  uint32_t count;
};

// Slots: parts of a warp's ring. Together: tiles of a slot, which the warp waits for, and fetches, at once.
// Bulk: they are copied by one lane, past the first cache's queues.
template <uint32_t Slots, uint32_t Together, bool Bulk>
struct Form : decode::Form<false, 1, kWarps, Slots * Together, kGroupsPerRound> {
  using Base = decode::Form<false, 1, kWarps, Slots * Together, kGroupsPerRound>;
  static constexpr bool kBulk = Bulk;
  static constexpr uint32_t kTogether = Together;
  static constexpr uint32_t kRingSlots = Slots;
  static constexpr uint32_t kBarrierBytes = kWarps * Slots * 8;
  static_assert(kMostTokens * kWarps * sizeof(float) <= Base::kSlotBytes);

  static constexpr uint32_t shared_bytes(uint32_t chunks, uint32_t tokens) {
    return kBarrierBytes + Base::shared_bytes(chunks, tokens, false);
  }
};

__device__ __forceinline__ Share share_of_block(const Problem& p) {
  return decode::share_of(p.groups, blockIdx.x, gridDim.x, p.groups_per_cluster);
}

// A warp's tiles of all products on their way to shared memory. They come in runs, which lie one after the
// other in memory: one for each round of a product.
template <class Form>
class Stream {
 public:
  __device__ __forceinline__ Stream(const Layer& layer, uint8_t* shared)
      : layer_(layer),
        place_(instruction::shared_place(shared + Form::kBarrierBytes + warp_ * (Form::kRingSlots * kSlotBytes))),
        barrier_(instruction::shared_place(shared + warp_ * (Form::kRingSlots * 8))) {
    if constexpr (Form::kBulk) {
      if (threadIdx.x % kLanes == 0) {
        for (uint32_t i = 0; i < Form::kRingSlots; ++i) instruction::init_barrier(barrier_ + i * 8, 1);
        instruction::publish_barriers();
      }
      __syncwarp();
    }
    start_run();
#pragma unroll 1
    for (uint32_t i = 0; i < Form::kRingSlots; ++i) replace();
    phase_ = 0;
    start_slot();
  }

  // Calls f with the next `count` tiles of a run.
  template <class F>
  __device__ __forceinline__ void for_tiles(uint32_t count, F&& f) {
    static_assert(kTogether % 2 == 0);
#pragma unroll 1
    while (count != 0) {
      if (taken_ % 2 == 0) {
        if (taken_ == 0) wait();
        f(load(0));
        ++taken_;
        if (--count == 0) return;
      }
      f(load(1));
      --count;
      codes_at_ = codes_at_ + 2 * kCodeBytes;
      scales_at_ = scales_at_ + 2 * kScaleBytes;
      if (++taken_ == kTogether) end_slot();
    }
  }

  // Where a run has ended; another one may begin.
  __device__ __forceinline__ void end_run() {
    if (taken_ != 0) end_slot();
  }

 private:
  static constexpr uint32_t kTogether = Form::kTogether;
  static constexpr uint32_t kCodeBytes = decode::Nvfp4::kCodes * 16,
                            kScaleBytes = decode::Nvfp4::kScales * sizeof(uint32_t),
                            kSlotBytes = kTogether * (kCodeBytes + kScaleBytes);

  __device__ __forceinline__ void wait() const {
    if constexpr (Form::kBulk) {
      instruction::wait_for_phase(barrier_ + slot_ * 8, phase_);
    } else {
      instruction::wait_for_copies<Form::kRingSlots - 1>();
    }
  }

  // This lane's part of the first or the second of the next two tiles.
  __device__ __forceinline__ decode::Fragment load(uint32_t tile) const {
    return {instruction::load_shared(codes_at_ + tile * kCodeBytes),
            instruction::load_shared(codes_at_ + (tile * kCodeBytes + kCodeBytes / 2)),
            instruction::load_shared_word(scales_at_ + tile * kScaleBytes)};
  }

  __device__ __forceinline__ void end_slot() {
    replace();
    start_slot();
  }
  __device__ __forceinline__ void start_slot() {
    taken_ = 0;
    codes_at_ = place_ + slot_ * kSlotBytes + threadIdx.x % kLanes * 16;
    scales_at_ = place_ + slot_ * kSlotBytes + kTogether * kCodeBytes + threadIdx.x % kLanes * 4;
  }

  // Fetches into the oldest slot, which has been read, and goes on to the next.
  __device__ __forceinline__ void replace() {
    if (tile_ != run_end_) {
      const uint32_t count = min(kTogether, run_end_ - tile_);
      fetch(place_ + slot_ * kSlotBytes, count);
      tile_ += count;
      if (tile_ == run_end_) start_run();
    }
    if constexpr (!Form::kBulk) instruction::end_copies();
    if (++slot_ == Form::kRingSlots) {
      slot_ = 0;
      phase_ ^= 1;
    }
  }

  __device__ __forceinline__ void fetch(SharedPlace to, uint32_t count) const {
    const uint4* const codes = codes_ + size_t{tile_} * decode::Nvfp4::kCodes;
    const uint32_t* const scales = scales_ + size_t{tile_} * decode::Nvfp4::kScales;
    const SharedPlace to_scales = to + kTogether * kCodeBytes;
    if constexpr (Form::kBulk) {
      __syncwarp();  // all lanes have read the slot
      if (instruction::is_elected()) {
        const SharedPlace barrier = barrier_ + slot_ * 8;
        instruction::arrive_expecting(barrier, count * (kCodeBytes + kScaleBytes));
        instruction::copy_bulk(to, codes, count * kCodeBytes, barrier);
        instruction::copy_bulk(to_scales, scales, count * kScaleBytes, barrier);
      }
    } else {
      // A lane copies what it reads itself.
      const uint32_t lane = threadIdx.x % kLanes;
#pragma unroll
      for (uint32_t i = 0; i < kTogether; ++i) {
        if (i >= count) break;
        const SharedPlace place = to + (i * kCodeBytes + lane * 16);
        instruction::copy_once(place, codes + (i * decode::Nvfp4::kCodes + lane));
        instruction::copy_once(place + kCodeBytes / 2, codes + (i * decode::Nvfp4::kCodes + kLanes + lane));
        instruction::copy_word(to_scales + (i * kScaleBytes + lane * 4),
                               scales + (i * decode::Nvfp4::kScales + lane));
      }
    }
  }

  // This warp's range of the next round that has tiles for it, of this product or of a later one.
  __device__ __forceinline__ void start_run() {
    while (product_ != layer_.count) {
      const Problem& p = layer_.products[product_];
      const Rounds<Form> rounds(p, share_of_block(p), 0);
      if (batch_ == rounds.batches) {
        ++product_;
        batch_ = 0;
        continue;
      }
      const Round round = rounds.of(batch_++, 0);
      const uint32_t first = decode::first_step<Form>(round, warp_),
                     end = decode::first_step<Form>(round, warp_ + 1);
      if (first == end) continue;
      codes_ = p.codes;
      scales_ = p.scales;
      tile_ = round.first_group * p.chunks + first;
      run_end_ = tile_ + (end - first);
      return;
    }
  }

  const Layer& layer_;
  const uint32_t warp_ = __shfl_sync(~0u, threadIdx.x / kLanes, 0);  // the compiler sees one number of all lanes
  const SharedPlace place_, barrier_;                                // of the warp's slots
  SharedPlace codes_at_, scales_at_;                                 // of this lane and the next two tiles
  const uint4* codes_ = nullptr;
  const uint32_t* scales_ = nullptr;
  uint32_t tile_ = 0, run_end_ = 0, product_ = 0, batch_ = 0;  // of what is fetched next
  uint32_t slot_ = 0, phase_ = 0, taken_ = 0;  // the oldest slot, and how many of its tiles are used
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
      if (product_.lane == 0) product_.slots[token * kWarps + product_.warp] = squares;
    }
    __syncthreads();
    for (uint32_t token = 0; token < p.tokens; ++token) {
      float squares = 0.0f;
#pragma unroll
      for (uint32_t warp = 0; warp < kWarps; ++warp)
        squares += product_.slots[token * kWarps + warp];
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

  static __device__ __forceinline__ uint32_t vector(uint32_t i) { return threadIdx.x + i * kThreads; }
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

// What comes after the sum of one of this thread's items of a round.
template <class Multiplier>
__device__ __forceinline__ decode::After after_of(const Multiplier& product, const Round& round, uint32_t number) {
  const uint32_t item = threadIdx.x + number * kThreads;
  if (item >= round.groups * decode::kGroup * product.p.tokens) return {};
  return product.after(round, product.item_of(item));
}

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
      // Read before it is needed: that would take as long as a meeting.
      const decode::After first = after_of(product, round, 0), second = after_of(product, round, 1);
      product.multiply(round, tiles);
      tiles.end_run();
      __syncthreads();
      product.add_up(round, [&](const auto&, uint32_t before) { return before == 0 ? first : second; });
    }
  }
}

}  // namespace nibble::layer
