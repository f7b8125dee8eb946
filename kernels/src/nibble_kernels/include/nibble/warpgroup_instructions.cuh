// Instructions of SM90: matrix products of a warpgroup, bulk copies and barriers in shared memory.
#pragma once

#include <cuda.h>

#include "nibble/tensor_core.cuh"

// wgmma is for the architecture-specific target alone, sm_90a.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || (defined(__CUDA_ARCH_SPECIFIC__) && __CUDA_ARCH_SPECIFIC__ == 900)
#define NIBBLE_HAS_WARPGROUP_PRODUCTS 1
#else
#define NIBBLE_HAS_WARPGROUP_PRODUCTS 0
#endif

namespace nibble::instruction {

// Barriers in shared memory. A phase ends when `arrivals` threads have arrived and all expected bytes are
// there.
__device__ __forceinline__ void init_barrier(SharedPlace barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes barriers known to bulk copies and to the other blocks of a cluster.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void arrive_expecting(SharedPlace barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void arrive(SharedPlace barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// At the barrier of the same place in the block `rank` of the cluster. Who waits for its phase there sees
// what this thread wrote.
__device__ __forceinline__ void arrive_at_rank(SharedPlace barrier, uint32_t rank) {
  asm volatile(
      "{\n\t"
      ".reg .u32 place;\n\t"
      "mapa.shared::cluster.u32 place, %0, %1;\n\t"
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [place];\n\t"
      "}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}
// Until the phase of this parity is over. Of_cluster: what threads of other blocks wrote before they arrived
// is visible then, too; that empties the first cache.
template <bool Of_cluster = false>
__device__ __forceinline__ void wait_for_phase(SharedPlace barrier, uint32_t parity) {
  if constexpr (Of_cluster) {
    asm volatile(
        "{\n\t"
        ".reg .pred over;\n\t"
        "AGAIN:\n\t"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 over, [%0], %1;\n\t"
        "@!over bra AGAIN;\n\t"
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
  } else {
    asm volatile(
        "{\n\t"
        ".reg .pred over;\n\t"
        "AGAIN:\n\t"
        "mbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\n\t"
        "@!over bra AGAIN;\n\t"
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
  }
}
// In one lane of the warp, whose lanes are all here.
__device__ __forceinline__ bool is_elected() {
  uint32_t is_so;
  asm volatile(
      "{\n\t"
      ".reg .pred elected;\n\t"
      "elect.sync _|elected, 0xffffffff;\n\t"
      "selp.u32 %0, 1, 0, elected;\n\t"
      "}"
      : "=r"(is_so));
  return is_so != 0;
}
__device__ __forceinline__ void copy_bulk(SharedPlace to, const void* from, uint32_t bytes,
                                          SharedPlace barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
// A box of a map of two dimensions; x counts elements of a row, y rows. Zeros outside the map.
__device__ __forceinline__ void copy_box(SharedPlace to, const CUtensorMap& map, uint32_t x, uint32_t y,
                                         SharedPlace barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3}], "
      "[%4];" ::"r"(to),
      "l"(&map), "r"(x), "r"(y), "r"(barrier)
      : "memory");
}
// A box of a map of three dimensions.
__device__ __forceinline__ void copy_box(SharedPlace to, const CUtensorMap& map, uint32_t x, uint32_t y,
                                         uint32_t z, SharedPlace barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3, %4}], "
      "[%5];" ::"r"(to),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
__device__ __forceinline__ void store_at_rank(SharedPlace to, uint32_t rank, const float4& value) {
  asm volatile(
      "{\n\t"
      ".reg .u32 place;\n\t"
      "mapa.shared::cluster.u32 place, %0, %1;\n\t"
      "st.shared::cluster.v4.f32 [place], {%2, %3, %4, %5};\n\t"
      "}" ::"r"(to),
      "r"(rank), "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w)
      : "memory");
}
__device__ __forceinline__ void store_shared(SharedPlace to, const uint4& value) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}
// A flag in global memory: who sees it sees what was written before, by this warp too.
__device__ __forceinline__ void store_release(uint32_t* flag, uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* flag) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}
// A counter in global memory: who sees it reached sees what was written before it was raised.
__device__ __forceinline__ void add_release(uint32_t* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
__device__ __forceinline__ bool has_reached(const uint32_t* counter, uint32_t count) {
  return load_acquire(counter) >= count;
}
__device__ __forceinline__ void wait_until_reached(const uint32_t* counter, uint32_t count) {
  while (!has_reached(counter, count)) {
  }
}
__device__ __forceinline__ void add_release(uint32_t* counter, uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
}
// Until these bits of a counter have this value.
__device__ __forceinline__ void wait_for_bits(const uint32_t* counter, uint32_t bits, uint32_t value) {
  while ((load_acquire(counter) & bits) != value) {
  }
}
// Between stores to global memory and bulk copies from there.
__device__ __forceinline__ void publish_to_copies() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
__device__ __forceinline__ void store_shared_word(SharedPlace to, uint32_t value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}
// Makes this thread's stores to shared memory visible to products and bulk copies.
__device__ __forceinline__ void publish_to_products() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ float4 load_shared_floats(SharedPlace place) {
  float4 value;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(place)
               : "memory");
  return value;
}

#if NIBBLE_HAS_WARPGROUP_PRODUCTS

template <uint32_t Registers>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <uint32_t Registers>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

// b of a product: pieces of 16 bytes, 8 rows of b for one of its columns; those of 8 columns side by side.
// `next_rows` and `next_columns`: bytes to the pieces of the next 8 rows and of the next 8 columns.
__device__ __forceinline__ uint64_t operand_in_shared(SharedPlace place, uint32_t next_rows,
                                                      uint32_t next_columns) {
  return uint64_t{(place & 0x3ffff) >> 4} | uint64_t{next_rows >> 4} << 16 |
         uint64_t{next_columns >> 4} << 32;
}
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until at most `Pending` groups of products run.
template <uint32_t Pending>
__device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

#define NIBBLE_NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NIBBLE_NAMES_16 \
  NIBBLE_NAMES_8        \
  ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NIBBLE_NAMES_32 \
  NIBBLE_NAMES_16       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NIBBLE_NAMES_64                                                              \
  NIBBLE_NAMES_32                                                                    \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NIBBLE_SUMS_8(i)                                                                    \
  "+f"(sum[i + 0]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3]), "+f"(sum[i + 4]), \
      "+f"(sum[i + 5]), "+f"(sum[i + 6]), "+f"(sum[i + 7])
#define NIBBLE_SUMS_16(i) NIBBLE_SUMS_8(i), NIBBLE_SUMS_8(i + 8)
#define NIBBLE_SUMS_32(i) NIBBLE_SUMS_16(i), NIBBLE_SUMS_16(i + 16)
#define NIBBLE_SUMS_64(i) NIBBLE_SUMS_32(i), NIBBLE_SUMS_32(i + 32)
#define NIBBLE_PRODUCT(columns, registers, type, a0, a1, a2, a3, place)                              \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type                 \
               " {" NIBBLE_NAMES_##registers "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #place \
                                             ", 1, 1, 1, 0;"                                         \
               : NIBBLE_SUMS_##registers(0)                                                          \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define NIBBLE_PRODUCT_OF(columns, registers, a0, a1, a2, a3, place)     \
  if constexpr (Columns == columns) {                                    \
    if constexpr (Bfloat) {                                              \
      NIBBLE_PRODUCT(columns, registers, "bf16", a0, a1, a2, a3, place); \
    } else {                                                             \
      NIBBLE_PRODUCT(columns, registers, "f16", a0, a1, a2, a3, place);  \
    }                                                                    \
  }

// sum += a b: a [64, 16] of the warpgroup in registers, a warp's 16 rows as m16n8k16 has them; b [16,
// Columns] in shared memory. It runs on: the sum may be read after wait_for_products.
template <bool Bfloat, uint32_t Columns>
__device__ __forceinline__ void multiply_warpgroup(float (&sum)[Columns / 2], const uint32_t (&a)[4],
                                                   uint64_t b) {
  static_assert(Columns == 32 || Columns == 64 || Columns == 128);
  NIBBLE_PRODUCT_OF(32, 16, 16, 17, 18, 19, 20)
  NIBBLE_PRODUCT_OF(64, 32, 32, 33, 34, 35, 36)
  NIBBLE_PRODUCT_OF(128, 64, 64, 65, 66, 67, 68)
}
#undef NIBBLE_PRODUCT_OF
#undef NIBBLE_PRODUCT
#undef NIBBLE_SUMS_8
#undef NIBBLE_NAMES_8
#undef NIBBLE_SUMS_16
#undef NIBBLE_NAMES_16
#undef NIBBLE_SUMS_32
#undef NIBBLE_NAMES_32
#undef NIBBLE_SUMS_64
#undef NIBBLE_NAMES_64

#endif
}  // namespace nibble::instruction
