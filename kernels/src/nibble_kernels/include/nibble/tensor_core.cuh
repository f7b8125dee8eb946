// Instructions of kernels: of those that multiply on tensor cores, and loads. tests/kernels/emulator/ has the
// same names for a host, where a thread stands for each lane.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "nibble/arch.h"

namespace nibble::instruction {

// Two E4M3 values as f16, exact.
__device__ __forceinline__ uint32_t e4m3_pair(uint32_t codes) {
  uint32_t pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<uint16_t>(codes)));
  return pair;
}

// Four of them, the lower two first. In one piece, or the compiler moves the upper two by a shift.
__device__ __forceinline__ uint2 e4m3_pairs(uint32_t codes) {
  uint2 pairs;
  asm("{\n\t"
      ".reg .b16 low, high;\n\t"
      "mov.b32 {low, high}, %2;\n\t"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n\t"
      "cvt.rn.f16x2.e4m3x2 %1, high;\n\t"
      "}"
      : "=r"(pairs.x), "=r"(pairs.y)
      : "r"(codes));
  return pairs;
}

__device__ __forceinline__ float half_of(uint32_t pair, uint32_t i) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(pair >> 16 * i)));
}

__device__ __forceinline__ uint32_t multiply_bfloats(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

__device__ __forceinline__ uint32_t multiply_halves(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// Written out, since the compiler would see that a mask needs no more than a shift, and make both.
__device__ __forceinline__ uint32_t turn_left(uint32_t bits, uint32_t by) {
  uint32_t turned;
  asm("shf.l.wrap.b32 %0, %1, %1, %2;" : "=r"(turned) : "r"(bits), "r"(by));
  return turned;
}

__device__ __forceinline__ float reciprocal(float x) {  // within 2^-23
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float power_of_two(float x) {  // within 2^-22; 0 for -infinity
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// sum += a b, a [16, 16] and b [16, 8] spread over the warp as PTX has m16n8k16.
__device__ __forceinline__ void mma_bfloats(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                            uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_halves(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                           uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// sum += a b, a [16, 32] and b [32, 8] of E4M3 as PTX has m16n8k32: four bytes of a row's columns from 4 c and
// from 16 + 4 c. SM90 and SM100 have no such instruction: the compiler makes f16 products of it.
__device__ __forceinline__ void mma_e4m3(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                         uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// sum += a b, a [16, 32] of which two in four neighbours are stored, b [32, 8], as PTX has mma.sp.m16n8k32.
// `places` of lanes 2 Lanes and 2 Lanes + 1 of four: numbers of the stored, four bits for four columns, of the
// first 16 columns and of the others; row q in the low half, row q + 8 in the high one.
#define NIBBLE_MMA_SPARSE(type)                                                                           \
  asm("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32." type "." type                         \
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, %13;"          \
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                                            \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y), "r"(b.z), "r"(b.w), "r"(places), \
        "n"(Lanes))
template <uint32_t Lanes>
__device__ __forceinline__ void mma_sparse_halves(float (&sum)[4], const uint32_t (&a)[4], const uint4& b,
                                                  uint32_t places) {
  NIBBLE_MMA_SPARSE("f16");
}
template <uint32_t Lanes>
__device__ __forceinline__ void mma_sparse_bfloats(float (&sum)[4], const uint32_t (&a)[4], const uint4& b,
                                                   uint32_t places) {
  NIBBLE_MMA_SPARSE("bf16");
}
#undef NIBBLE_MMA_SPARSE

// Of an 8 x 8 matrix of 16 bits, of which lane 4 r + c has columns 2 c and 2 c + 1 of row r: those of row r of
// the transposed one.
__device__ __forceinline__ uint32_t transpose_pairs(uint32_t pair) {
  uint32_t transposed;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
  return transposed;
}

// Read once: nothing of it stays in the first cache. Volatile, or the compiler puts loads off until registers
// are free.
__device__ __forceinline__ uint4 load_once(const void* address) {
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address));
  return value;
}

// &begin[index * Each], in one instruction.
template <uint32_t Each, class T>
__device__ __forceinline__ const T* element(const T* begin, uint32_t index) {
  const T* place;
  asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(place) : "r"(index), "n"(Each * sizeof(T)), "l"(begin));
  return place;
}

// A place in shared memory, as a number of its own: loads need no more than that.
using SharedPlace = uint32_t;
__device__ __forceinline__ SharedPlace shared_place(const void* pointer) {
  return static_cast<SharedPlace>(__cvta_generic_to_shared(pointer));
}
__device__ __forceinline__ uint4 load_shared(SharedPlace place) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(place)
               : "memory");
  return value;
}
__device__ __forceinline__ uint2 load_shared_pair(SharedPlace place) {
  uint2 value;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(place) : "memory");
  return value;
}
__device__ __forceinline__ uint32_t load_shared_word(SharedPlace place) {
  uint32_t value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(place) : "memory");
  return value;
}

// Copies of 16 bytes and of a word to shared memory, past the first cache: what is read once need not stay
// there. They run on; all that began before the last `Pending` calls of end_copies are over after
// wait_for_copies.
__device__ __forceinline__ void copy_once(SharedPlace to, const uint4* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_word(SharedPlace to, const uint32_t* from) {
  asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_pair(SharedPlace to, const float2* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}
// 16 bytes, or zeros without a read of `from`.
__device__ __forceinline__ void copy_or_clear(SharedPlace to, const void* from, bool is_there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(is_there ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <uint32_t Pending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// Of the thread blocks of a cluster, whose shared memory all of them may read between two barriers.
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void cluster_barrier() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n\t"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}
// In two steps: a block knows after the second that all others have begun the first.
__device__ __forceinline__ void begin_cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
// Of what was written before, others see barriers that were made known to them.
__device__ __forceinline__ void begin_cluster_barrier_with_barriers() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void end_cluster_barrier() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void store_to_rank(float* own, uint32_t rank, float value) {
  asm volatile(
      "{\n\t"
      ".reg .u32 place;\n\t"
      "mapa.shared::cluster.u32 place, %0, %1;\n\t"
      "st.shared::cluster.f32 [place], %2;\n\t"
      "}" ::"r"(shared_place(own)),
      "r"(rank), "f"(value)
      : "memory");
}
__device__ __forceinline__ float2 load_of_rank(const float2* own, uint32_t rank) {
  float2 value;
  asm volatile(
      "{\n\t"
      ".reg .u32 place;\n\t"
      "mapa.shared::cluster.u32 place, %2, %3;\n\t"
      "ld.shared::cluster.v2.f32 {%0, %1}, [place];\n\t"
      "}"
      : "=f"(value.x), "=f"(value.y)
      : "r"(shared_place(own)), "r"(rank)
      : "memory");
  return value;
}

// Adds one, and returns what was there. What this thread knows of before is known to who counts later.
__device__ __forceinline__ uint32_t count_in_order(uint32_t* counter) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

__device__ __forceinline__ void wait_for_previous_kernel() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;"); }

}  // namespace nibble::instruction
