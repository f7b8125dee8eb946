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
// ptxas may put it before products that come first in the source, while their loads from shared memory are
// incomplete. A bulk copy that follows the arrival may overwrite what they read: on an H200, sums were wrong.
// So a stage is given back in another block of instructions, after a branch or a loop.
// tests/support/kernels/shared_reads.py finds incomplete loads in machine code.
__device__ __forceinline__ void arrive(SharedPlace barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// At the barrier of the same place in the block `rank` of the cluster, after what this thread read. It says
// nothing about what this thread wrote, so that it does not wait for stores.
__device__ __forceinline__ void arrive_at_rank(SharedPlace barrier, uint32_t rank) {
  asm volatile(
      "{\n\t"
      ".reg .u32 place;\n\t"
      "mapa.shared::cluster.u32 place, %0, %1;\n\t"
      "mbarrier.arrive.shared::cluster.b64 _, [place];\n\t"
      "}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}
// The same for a thread that has read, not written: what it writes to global memory meanwhile is not waited
// for.
__device__ __forceinline__ void arrive_at_rank_after_reads(SharedPlace barrier, uint32_t rank) {
  asm volatile(
      "{\n\t"
      ".reg .u32 place;\n\t"
      "mapa.shared::cluster.u32 place, %0, %1;\n\t"
      "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [place];\n\t"
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
// A box of a map of five dimensions: all chunks of some tokens of a page and one of its heads.
__device__ __forceinline__ void copy_tokens(SharedPlace to, const CUtensorMap& map, uint32_t token,
                                            uint32_t head, uint32_t page, SharedPlace barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, "
      "%2, %4, %5}], [%6];" ::"r"(to),
      "l"(&map), "r"(0), "r"(token), "r"(head), "r"(page), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
// To the same place in the block `rank` of the cluster; its bytes arrive at the barrier there.
__device__ __forceinline__ void store_at_rank(SharedPlace to, uint32_t rank, const float4& value,
                                              SharedPlace barrier) {
  asm volatile(
      "{\n\t"
      ".reg .u32 place, there;\n\t"
      "mapa.shared::cluster.u32 place, %0, %1;\n\t"
      "mapa.shared::cluster.u32 there, %6, %1;\n\t"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [place], {%2, %3, %4, %5}, [there];\n\t"
      "}" ::"r"(to),
      "r"(rank), "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(barrier)
      : "memory");
}
// The same, and its 16 bytes arrive at the barrier of this place there.
__device__ __forceinline__ void send_to_rank(SharedPlace to, uint32_t rank, SharedPlace barrier,
                                             const float4& value) {
  asm volatile(
      "{\n\t"
      ".reg .u32 place, at;\n\t"
      "mapa.shared::cluster.u32 place, %0, %2;\n\t"
      "mapa.shared::cluster.u32 at, %1, %2;\n\t"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [place], {%3, %4, %5, %6}, [at];\n\t"
      "}" ::"r"(to),
      "r"(barrier), "r"(rank), "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w)
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
// Between stores to global memory and bulk copies from there.
__device__ __forceinline__ void publish_to_copies() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
__device__ __forceinline__ void store_shared_word(SharedPlace to, uint32_t value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}
// The warps of a block's warpgroup of this number meet.
__device__ __forceinline__ void meet_warpgroup(uint32_t number) {
  asm volatile("barrier.cta.sync.aligned %0, 128;" ::"r"(number + 1) : "memory");
}
// The same, and whether it is so for any thread.
__device__ __forceinline__ bool any_of_warpgroup(uint32_t number, bool is_so) {
  uint32_t any;
  asm volatile(
      "{\n\t"
      ".reg .pred own, all;\n\t"
      "setp.ne.u32 own, %2, 0;\n\t"
      "barrier.cta.red.or.aligned.pred all, %1, 128, own;\n\t"
      "selp.u32 %0, 1, 0, all;\n\t"
      "}"
      : "=r"(any)
      : "r"(number + 1), "r"(static_cast<uint32_t>(is_so))
      : "memory");
  return any != 0;
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

// An operand in shared memory as copies that swap units of 16 bytes among 128 put it there: eight times 128
// bytes after eight times 128 bytes, `next_eight` bytes apart. Each 128 bytes are of a row, or of a column
// where the product reads it transposed.
__device__ __forceinline__ uint64_t swapped_operand(SharedPlace place, uint32_t next_eight) {
  return uint64_t{(place & 0x3ffff) >> 4} | uint64_t{1} << 16 | uint64_t{next_eight >> 4} << 32 |
         uint64_t{1} << 62;
}

// The operand that lies this many bytes further.
__device__ __forceinline__ uint64_t moved(uint64_t operand, uint32_t bytes) { return operand + (bytes >> 4); }

#define NIBBLE_NAMES_4 "%0, %1, %2, %3"
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
#define NIBBLE_SUMS_4(i) "+f"(sum[i + 0]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3])
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
  static_assert(Columns == 8 || Columns == 16 || Columns == 32 || Columns == 64 || Columns == 128);
  NIBBLE_PRODUCT_OF(8, 4, 4, 5, 6, 7, 8)
  NIBBLE_PRODUCT_OF(16, 8, 8, 9, 10, 11, 12)
  NIBBLE_PRODUCT_OF(32, 16, 16, 17, 18, 19, 20)
  NIBBLE_PRODUCT_OF(64, 32, 32, 33, 34, 35, 36)
  NIBBLE_PRODUCT_OF(128, 64, 64, 65, 66, 67, 68)
}
#define NIBBLE_SHARED_PRODUCT(columns, registers, a_place, b_place, adds_place, transposed)            \
  asm volatile("{\n\t.reg .pred adds;\n\tsetp.ne.u32 adds, %" #adds_place                              \
               ", 0;\n\twgmma.mma_async.sync.aligned.m64n" #columns                                    \
               "k16.f32.bf16.bf16 {" NIBBLE_NAMES_##registers "}, %" #a_place ", %" #b_place           \
                                                              ", adds, 1, 1, " #transposed ", 0;\n\t}" \
               : NIBBLE_SUMS_##registers(0)                                                            \
               : "l"(a), "l"(b), "r"(static_cast<uint32_t>(adds)))

// sum = a b, or sum += a b where it `adds`: a [64, 16] and b [16, Columns] of bfloat16, both in shared
// memory. Is_ transposed: a has 64 rows of a column side by side.
template <bool Is_transposed, uint32_t Columns>
__device__ __forceinline__ void multiply_shared(float (&sum)[Columns / 2], uint64_t a, uint64_t b,
                                                bool adds) {
  static_assert(Columns == 8 || Columns == 16);
  if constexpr (Columns == 8 && Is_transposed) NIBBLE_SHARED_PRODUCT(8, 4, 4, 5, 6, 1);
  if constexpr (Columns == 8 && !Is_transposed) NIBBLE_SHARED_PRODUCT(8, 4, 4, 5, 6, 0);
  if constexpr (Columns == 16 && Is_transposed) NIBBLE_SHARED_PRODUCT(16, 8, 8, 9, 10, 1);
  if constexpr (Columns == 16 && !Is_transposed) NIBBLE_SHARED_PRODUCT(16, 8, 8, 9, 10, 0);
}
#undef NIBBLE_SHARED_PRODUCT

// Operands in registers stay there until here: behind a wait for the products that read them.
template <uint32_t Count>
__device__ __forceinline__ void keep(const uint32_t (&operands)[Count][4]) {
#pragma unroll
  for (uint32_t i = 0; i < Count; ++i)
    asm volatile("" ::"r"(operands[i][0]), "r"(operands[i][1]), "r"(operands[i][2]), "r"(operands[i][3]));
}

// Matrices of 8 x 8 pairs of 16 bits, of which lane 4 r + c has columns 2 c and 2 c + 1 of row r: a column is
// written as 16 bytes to the place of lane 8 m + i, column i of matrix m.
__device__ __forceinline__ void store_transposed(SharedPlace place, const uint32_t (&matrices)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(place),
               "r"(matrices[0]), "r"(matrices[1])
               : "memory");
}
__device__ __forceinline__ void store_transposed(SharedPlace place, const uint32_t (&matrices)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(place),
               "r"(matrices[0]), "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
               : "memory");
}

#undef NIBBLE_PRODUCT_OF
#undef NIBBLE_PRODUCT
#undef NIBBLE_SUMS_4
#undef NIBBLE_NAMES_4
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
