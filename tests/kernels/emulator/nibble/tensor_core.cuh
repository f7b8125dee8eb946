// CUDA for a host, as far as the GEMMs use it: lanes take turns on one thread, and instructions are what PTX
// says of them. In place of kernels/src/nibble_kernels/include/nibble/tensor_core.cuh. A product of
// two bfloat16 or float16 numbers that is not exact ends the program: the kernel counts on there being none.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <utility>
#include <vector>

#include "lanes.h"
#include "nibble/arch.h"

#undef NIBBLE_HAS_E2M1_INSTRUCTIONS
#define NIBBLE_HAS_E2M1_INSTRUCTIONS EMULATE_E2M1_INSTRUCTIONS

#define __device__
#define __forceinline__ inline
#define __host__

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct __nv_bfloat16 {
  uint16_t bits;
};
struct __nv_bfloat162 {
  __nv_bfloat16 low, high;
};
struct __half {
  uint16_t bits;
};
struct __half2 {
  __half low, high;
};

using std::max;
using std::min;

inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float __uint_as_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline uint32_t __float_as_uint(float x) { return std::bit_cast<uint32_t>(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }

inline float __half2float(__half x) { return std::bit_cast<_Float16>(x.bits); }
inline __half __float2half_rn(float x) { return {std::bit_cast<uint16_t>(static_cast<_Float16>(x))}; }
inline __half2 __floats2half2_rn(float a, float b) { return {__float2half_rn(a), __float2half_rn(b)}; }
inline float __bfloat162float(__nv_bfloat16 x) { return __uint_as_float(uint32_t{x.bits} << 16); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  if (std::isnan(x)) return {0x7fff};
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) {
  return {__float2bfloat16_rn(a), __float2bfloat16_rn(b)};
}

inline float2 __half22float2(__half2 x) { return {__half2float(x.low), __half2float(x.high)}; }

inline float __frcp_rn(float x) { return 1.0f / x; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline uint32_t __popc(uint32_t bits) { return static_cast<uint32_t>(std::popcount(bits)); }
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = uint64_t{b} << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= (bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return result;
}

template <class T>
T __ldg(const T* place) {
  return *place;
}
template <class T>
T __ldcg(const T* place) {
  return *place;
}

// What the lanes of a thread block share.
struct EmulatedBlock {
  struct Product {
    std::function<void(size_t group)> run;
    const uint32_t* a;
  };
  struct Lane {
    uint32_t a[4], b[2], sparse_b[4], places;
    uint64_t shuffled;
    uint32_t cluster_phase;  // begun, not yet waited for
    std::deque<std::vector<Product>> products;  // in groups: begun, not yet waited for
    std::deque<std::vector<std::function<void()>>> copies{{}};  // in groups; the last one is not ended
  };
  std::vector<EmulatedBarrier> warps, warpgroups;
  EmulatedBarrier all;
  std::vector<Lane> lanes;
  uint32_t rank;

  EmulatedBlock(uint32_t threads, uint32_t rank)
      : warps(threads / 32, EmulatedBarrier(32)),
        warpgroups(threads / 128, EmulatedBarrier(128)),
        all(threads),
        lanes(threads),
        rank(rank) {}
};

// The blocks of a cluster, each with its shared memory.
struct EmulatedCluster {
  EmulatedBarrier all;
  std::vector<std::vector<uint4>> memory;
  std::vector<uint32_t> running;  // threads of each block

  void require_running(uint32_t rank) const {
    if (running[rank] != 0) return;
    std::fprintf(stderr, "block %u of the cluster is over, and another one reaches into it\n", rank);
    std::abort();
  }
};

inline EmulatedBlock::Lane& emulated_lane(uint32_t lane) {
  return emulated_block->lanes[threadIdx.x / 32 * 32 + lane];
}
inline void meet_warp() { emulated_block->warps[threadIdx.x / 32].arrive_and_wait(); }
inline void __syncwarp() { meet_warp(); }
inline void __syncthreads() { emulated_block->all.arrive_and_wait(); }

template <class T>
T __shfl_sync(uint32_t, T value, uint32_t from) {
  emulated_lane(threadIdx.x % 32).shuffled = (uint64_t)value;
  meet_warp();
  const T result = (T)emulated_lane(from).shuffled;
  meet_warp();
  return result;
}
inline float __shfl_sync(uint32_t lanes, float value, uint32_t from) {
  return __uint_as_float(__shfl_sync(lanes, __float_as_uint(value), from));
}
inline uint32_t __shfl_xor_sync(uint32_t lanes, uint32_t value, uint32_t mask) {
  return __shfl_sync(lanes, value, threadIdx.x % 32 ^ mask);
}

inline float __shfl_xor_sync(uint32_t lanes, float value, uint32_t mask) {
  return __uint_as_float(__shfl_xor_sync(lanes, __float_as_uint(value), mask));
}
template <class T>
T __shfl_up_sync(uint32_t lanes, T value, uint32_t by) {
  const uint32_t own = threadIdx.x % 32;
  return __shfl_sync(lanes, value, own < by ? own : own - by);
}
inline uint32_t __match_any_sync(uint32_t, int32_t value) {
  emulated_lane(threadIdx.x % 32).shuffled = static_cast<uint32_t>(value);
  meet_warp();
  uint32_t alike = 0;
  for (uint32_t lane = 0; lane < 32; ++lane)
    alike |= uint32_t{emulated_lane(lane).shuffled == static_cast<uint32_t>(value)} << lane;
  meet_warp();
  return alike;
}

inline bool __any_sync(uint32_t, bool is_so) {
  emulated_lane(threadIdx.x % 32).shuffled = is_so;
  meet_warp();
  bool any = false;
  for (uint32_t lane = 0; lane < 32; ++lane) any |= emulated_lane(lane).shuffled != 0;
  meet_warp();
  return any;
}

inline uint32_t __ballot_sync(uint32_t, bool is_so) {
  emulated_lane(threadIdx.x % 32).shuffled = is_so;
  meet_warp();
  uint32_t all = 0;
  for (uint32_t lane = 0; lane < 32; ++lane) all |= uint32_t{emulated_lane(lane).shuffled != 0} << lane;
  meet_warp();
  return all;
}
inline uint32_t __reduce_max_sync(uint32_t, uint32_t value) {
  emulated_lane(threadIdx.x % 32).shuffled = value;
  meet_warp();
  uint64_t most = 0;
  for (uint32_t lane = 0; lane < 32; ++lane) most = std::max(most, emulated_lane(lane).shuffled);
  meet_warp();
  return static_cast<uint32_t>(most);
}
inline int __ffs(uint32_t bits) { return bits ? std::countr_zero(bits) + 1 : 0; }

inline uint32_t atomicExch(uint32_t* place, uint32_t value) { return std::exchange(*place, value); }
inline uint32_t atomicAdd(uint32_t* place, uint32_t value) { return std::exchange(*place, *place + value); }
inline uint32_t atomicMax(uint32_t* place, uint32_t value) {
  return std::exchange(*place, std::max(*place, value));
}
inline void __threadfence() {}

namespace nibble::instruction {

inline float e4m3_value(uint32_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const float magnitude =
      exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp(1.0f * mantissa, -9);
  return code & 128 ? -magnitude : magnitude;
}

inline float e2m1_value(uint32_t code) {
  constexpr float kMagnitudes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return code & 8 ? -kMagnitudes[code & 7] : kMagnitudes[code & 7];
}

inline uint32_t half_pair(float low, float high) {
  return __float2half_rn(low).bits | uint32_t{__float2half_rn(high).bits} << 16;
}

inline uint32_t e4m3_pair(uint32_t codes) { return half_pair(e4m3_value(codes), e4m3_value(codes >> 8)); }

inline uint2 e4m3_pairs(uint32_t codes) { return {e4m3_pair(codes), e4m3_pair(codes >> 16)}; }

inline void e2m1_decode8(uint32_t codes, uint32_t (&pairs)[4]) {
  for (int i = 0; i < 4; ++i) {
    pairs[i] = half_pair(e2m1_value(codes >> 8 * i & 15), e2m1_value(codes >> (8 * i + 4) & 15));
  }
}

inline float half_of(uint32_t pair, int i) { return __half2float({static_cast<uint16_t>(pair >> 16 * i)}); }
inline float bfloat_of(uint32_t pair, int i) {
  return __bfloat162float({static_cast<uint16_t>(pair >> 16 * i)});
}

inline void require_exact(double product, float rounded) {
  if (product == rounded) return;
  std::fprintf(stderr, "a product is rounded: %a instead of %a\n", rounded, product);
  std::abort();
}

inline uint32_t multiply_halves(uint32_t a, uint32_t b) {
  const float low = half_of(a, 0) * half_of(b, 0), high = half_of(a, 1) * half_of(b, 1);
  const uint32_t pair = half_pair(low, high);
  require_exact(low, half_of(pair, 0));
  require_exact(high, half_of(pair, 1));
  return pair;
}

inline uint32_t multiply_bfloats(uint32_t a, uint32_t b) {
  uint32_t pair = 0;
  for (int i = 0; i < 2; ++i) {
    const double product = double{bfloat_of(a, i)} * bfloat_of(b, i);
    const __nv_bfloat16 rounded = __float2bfloat16_rn(static_cast<float>(product));
    require_exact(product, __bfloat162float(rounded));
    pair |= uint32_t{rounded.bits} << 16 * i;
  }
  return pair;
}

// The fragments of PTX's mma.m16n8k16: lane 4 r + c has rows r and r + 8 of a and of the sum, and column r of
// b.
template <class Value>
void mma(Value&& value, float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  const uint32_t own = threadIdx.x % 32;
  std::ranges::copy(a, emulated_lane(own).a);
  std::ranges::copy(b, emulated_lane(own).b);
  meet_warp();
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t row = own / 4 + i / 2 * 8, column = own % 4 * 2 + i % 2;
    double total = sum[i];
    for (uint32_t k = 0; k < 16; ++k) {
      const EmulatedBlock::Lane &left = emulated_lane(row % 8 * 4 + k % 8 / 2),
                                &right = emulated_lane(column * 4 + k % 8 / 2);
      total += double{value(left.a[k / 8 * 2 + row / 8], k % 2)} * value(right.b[k / 8], k % 2);
    }
    sum[i] = static_cast<float>(total);
  }
  meet_warp();
}

inline void mma_bfloats(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                        uint32_t b1) {
  mma(bfloat_of, sum, {a0, a1, a2, a3}, {b0, b1});
}
inline void mma_halves(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                       uint32_t b1) {
  mma(half_of, sum, {a0, a1, a2, a3}, {b0, b1});
}

// As PTX has m16n8k32 of bytes: a register's four columns are neighbours.
inline void mma_e4m3(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                     uint32_t b1) {
  const uint32_t own = threadIdx.x % 32;
  std::ranges::copy(std::array{a0, a1, a2, a3}, emulated_lane(own).a);
  std::ranges::copy(std::array{b0, b1}, emulated_lane(own).b);
  meet_warp();
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t row = own / 4 + i / 2 * 8, column = own % 4 * 2 + i % 2;
    double total = sum[i];
    for (uint32_t k = 0; k < 32; ++k) {
      const uint32_t a = emulated_lane(row % 8 * 4 + k % 16 / 4).a[k / 16 * 2 + row / 8],
                     b = emulated_lane(column * 4 + k % 16 / 4).b[k / 16];
      total += double{e4m3_value(a >> k % 4 * 8 & 255)} * e4m3_value(b >> k % 4 * 8 & 255);
    }
    sum[i] = static_cast<float>(total);
  }
  meet_warp();
}

// As PTX has mma.sp.m16n8k32 of two-byte numbers.
template <uint32_t Lanes, class Value>
void mma_sparse(Value&& value, float (&sum)[4], const uint32_t (&a)[4], const uint4& b, uint32_t places) {
  const uint32_t own = threadIdx.x % 32;
  EmulatedBlock::Lane& lane = emulated_lane(own);
  std::ranges::copy(a, lane.a);
  std::ranges::copy(std::array{b.x, b.y, b.z, b.w}, lane.sparse_b);
  lane.places = places;
  meet_warp();
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t row = own / 4 + i / 2 * 8, column = own % 4 * 2 + i % 2;
    double total = sum[i];
    for (uint32_t stored = 0; stored < 16; ++stored) {
      const uint32_t group = stored / 2;
      const uint32_t word = emulated_lane(row % 8 * 4 + 2 * Lanes + group / 4).places >> row / 8 * 16;
      const uint32_t first = word >> group % 4 * 4 & 3, second = word >> (group % 4 * 4 + 2) & 3;
      if (first >= second) {
        std::fprintf(stderr, "places of a sparse product are not in order\n");
        std::abort();
      }
      const uint32_t k = group * 4 + (stored % 2 ? second : first);
      const uint32_t left = emulated_lane(row % 8 * 4 + stored % 8 / 2).a[stored / 8 * 2 + row / 8],
                     right = emulated_lane(column * 4 + k % 8 / 2).sparse_b[k / 8];
      total += double{value(left, stored % 2)} * value(right, k % 2);
    }
    sum[i] = static_cast<float>(total);
  }
  meet_warp();
}
template <uint32_t Lanes>
void mma_sparse_halves(float (&sum)[4], const uint32_t (&a)[4], const uint4& b, uint32_t places) {
  mma_sparse<Lanes>(half_of, sum, a, b, places);
}
template <uint32_t Lanes>
void mma_sparse_bfloats(float (&sum)[4], const uint32_t (&a)[4], const uint4& b, uint32_t places) {
  mma_sparse<Lanes>(bfloat_of, sum, a, b, places);
}

inline uint32_t transpose_pairs(uint32_t pair) {
  const uint32_t row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
  const uint32_t low = __shfl_sync(~0u, pair, column * 4 + row / 2);
  const uint32_t high = __shfl_sync(~0u, pair, (column + 1) * 4 + row / 2);
  return (low >> row % 2 * 16 & 0xffff) | high >> row % 2 * 16 << 16;
}

inline uint4 load_once(const void* address) { return *static_cast<const uint4*>(address); }

inline float power_of_two(float x) { return std::exp2(x); }
inline float reciprocal(float x) { return 1.0f / x; }
inline uint32_t turn_left(uint32_t bits, int by) { return std::rotl(bits, by); }
template <uint32_t Each, class T>
const T* element(const T* begin, uint32_t index) {
  return begin + size_t{index} * Each;
}

using SharedPlace = uint8_t*;
inline SharedPlace shared_place(void* pointer) { return static_cast<uint8_t*>(pointer); }
inline uint4 load_shared(SharedPlace place) { return *reinterpret_cast<const uint4*>(place); }
inline uint2 load_shared_pair(SharedPlace place) { return *reinterpret_cast<const uint2*>(place); }
inline uint32_t load_shared_word(SharedPlace place) { return *reinterpret_cast<const uint32_t*>(place); }
// Where copies are late, they are over when they are waited for.
inline void copy_or_clear(SharedPlace to, const void* from, bool is_there) {
  const auto copy = [=] {
    *reinterpret_cast<uint4*>(to) = is_there ? *static_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
  };
  if (!emulated_is_late) return copy();
  emulated_lane(threadIdx.x % 32).copies.back().push_back(copy);
}
inline void copy_once(SharedPlace to, const uint4* from) { *reinterpret_cast<uint4*>(to) = *from; }
inline void copy_word(SharedPlace to, const uint32_t* from) { *reinterpret_cast<uint32_t*>(to) = *from; }
inline void copy_pair(SharedPlace to, const float2* from) { *reinterpret_cast<float2*>(to) = *from; }
inline uint32_t count_in_order(uint32_t* counter) { return (*counter)++; }
inline uint32_t cluster_rank() { return emulated_block->rank; }
inline void cluster_barrier() { emulated_cluster->all.arrive_and_wait(); }
inline void begin_cluster_barrier() {
  emulated_lane(threadIdx.x % 32).cluster_phase = emulated_cluster->all.arrive();
}
inline void begin_cluster_barrier_with_barriers() { begin_cluster_barrier(); }
inline void end_cluster_barrier() { emulated_cluster->all.wait(emulated_lane(threadIdx.x % 32).cluster_phase); }
template <class T>
T* of_rank(T* own, uint32_t rank) {
  emulated_cluster->require_running(rank);
  auto& memory = emulated_cluster->memory;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(memory[emulated_block->rank].data());
  const uintptr_t theirs = reinterpret_cast<uintptr_t>(memory[rank].data());
  return reinterpret_cast<T*>(theirs + (reinterpret_cast<uintptr_t>(own) - begin));
}
inline void store_to_rank(float* own, uint32_t rank, float value) { *of_rank(own, rank) = value; }
inline float2 load_of_rank(const float2* own, uint32_t rank) { return *of_rank(own, rank); }

inline void end_copies() { emulated_lane(threadIdx.x % 32).copies.emplace_back(); }
template <uint32_t Pending>
void wait_for_copies() {
  auto& groups = emulated_lane(threadIdx.x % 32).copies;
  while (groups.size() > Pending + 1) {
    for (const auto& copy : groups.front()) copy();
    groups.pop_front();
  }
}
inline void wait_for_previous_kernel() {
  EmulatedLanes::wait_until([] { return !emulated_previous_kernel_runs; });
}
inline void let_next_kernel_start() {}

}  // namespace nibble::instruction
