// Attention of a few query tokens a sequence over a paged cache of keys and values, on SM90.
//
// Persistent thread blocks. One warp copies the tiles of the block's units (work.cuh), one prepares their
// queries, and warpgroups multiply: each in turn has a tile of 64 tokens, with the queries as the columns of
// products. Two warps add up what the warpgroups have of a unit. Where a sequence has several splits, their
// results go to global memory. Behind its last unit each warp adds up the splits of its share of all rows,
// and waits for them: all blocks run at the same time. All sums are in a fixed order.
#pragma once

#include "decode_attention/warpgroups/add_up.cuh"
#include "decode_attention/warpgroups/multiply.cuh"
#include "decode_attention/warpgroups/queries.cuh"

namespace nibble::attention::warpgroups {

#if NIBBLE_HAS_WARPGROUP_PRODUCTS

// By one thread.
template <class Form>
__device__ __forceinline__ void init_barriers(Shared<Form>& shared) {
  const auto init = [](auto& barriers, uint32_t arrivals) {
    for (uint64_t& barrier : barriers)
      instruction::init_barrier(instruction::shared_place(&barrier), arrivals);
  };
  constexpr uint32_t kMultiplying = Form::kWorkers * Form::kWarps;
  init(shared.full, 1), init(shared.empty, Form::kWarps);
  init(shared.known, 1), init(shared.ready, 1), init(shared.forgotten, kMultiplying + Form::kAdders + 1);
  init(shared.got, kMultiplying), init(shared.free, Form::kAdders);
  instruction::publish_barriers();
}

template <class Form>
__device__ __forceinline__ void run(const Problem& p, const CUtensorMap& map, Shared<Form>& shared) {
  constexpr uint32_t kMultiplying = Form::kWorkers * Form::kWarps;
  const uint32_t buffers = min(Form::kPartBytes / Form::part_bytes(slot_rows(p)), Form::kMostBuffers);
  const uint32_t warp = threadIdx.x / kLanes;
  instruction::let_next_kernel_start();
  if (threadIdx.x == 0) {
    instruction::prefetch_map(map);
    init_barriers(shared);
  }
  __syncthreads();
  if (warp < kMultiplying) {
    // From a lane of the warp, so that the compiler knows it is the same in all.
    const uint32_t worker = __shfl_sync(~0u, warp / Form::kWarps, 0);
    const bool has_splits = Multiplier<Form>(p, shared, worker, buffers).run();
    if (!has_splits) return;
    instruction::wait_for_previous_kernel();
    Merger<Form>(p).run(warp, kMultiplying);
  } else if (warp == kMultiplying) {
    Copier<Form>(p, map, shared).run();
  } else {
    instruction::wait_for_previous_kernel();
    if (warp == kMultiplying + 1) {
      QueryLoader<Form>(p, shared).run();
    } else {
      Adder<Form>(p, shared, warp - kMultiplying - 2, buffers).run();
    }
  }
}

#endif
}  // namespace nibble::attention::warpgroups
