// A block's units, with their queries and tiles on their way to shared memory. Block i has every unit whose
// number modulo the number of blocks is i. The tiles of all of its units go around its warpgroups.
#pragma once

#include "decode_attention/unit.cuh"
#include "decode_attention/warpgroups/form.h"

namespace nibble::attention::warpgroups {

struct Unit : attention::Unit {
  uint32_t first_worker = 0;  // it has the first tile
};

// A tile has pieces of 8 or 16 tokens; a piece has the tokens' first 128 bytes, then their next ones, and so
// on. The copies swap units of 16 bytes, as products expect them. Queries and weights: pieces of eight of a
// column's elements, one column after the other.
template <class Form>
struct Shared {
  alignas(1024) uint8_t ring[Form::kStages * Form::kTileBytes];
  alignas(128) uint8_t queries[Form::kUnits][Form::kQueryBytes];
  alignas(128) uint8_t weights[Form::kWorkers][2][Form::kWeightBytes];
  alignas(16) uint8_t parts[Form::kPartBytes];  // buffers, as many as there is room for
  float factors[Form::kUnits][Form::kColumns];  // of queries
  float maxima[Form::kWorkers][Form::kWarps][Form::kColumns],
      totals[Form::kWorkers][Form::kWarps][Form::kColumns];
  Unit units[Form::kUnits];
  uint64_t full[Form::kStages], empty[Form::kStages];  // stages of the ring
  uint64_t known[Form::kUnits], ready[Form::kUnits];   // a unit, and its queries
  uint64_t forgotten[Form::kUnits];
  uint64_t got[Form::kMostBuffers];  // a unit's partial results are all there
  uint64_t free[Form::kMostBuffers];
};

__device__ __forceinline__ uint32_t lane() { return threadIdx.x % kLanes; }
// One arrival of the warp, after what its lanes did before.
__device__ __forceinline__ void arrive(uint64_t& barrier) {
  __syncwarp();
  if (lane() == 0) instruction::arrive(instruction::shared_place(&barrier));
}
__device__ __forceinline__ float base_of(float maximum) { return maximum == -INFINITY ? 0 : maximum; }
__device__ __forceinline__ float maximum_of_warp(float x) {
#pragma unroll
  for (uint32_t mask = 1; mask < kLanes; mask *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, mask));
  return x;
}

// How many warpgroups have tiles of a unit.
template <class Form>
__device__ __forceinline__ uint32_t slots_of(const Unit& unit) {
  return min(quotient_up(unit.tiles, kGroups), Form::kWorkers);
}
// Of a unit's partial results in shared memory: a row of a slot.
template <class Form>
__device__ __forceinline__ float* part_of(const Problem& p, Shared<Form>& shared, uint32_t buffer,
                                          uint32_t slot, uint32_t row) {
  float* const parts = reinterpret_cast<float*>(shared.parts + buffer * Form::part_bytes(slot_rows(p)));
  return parts + (slot * slot_rows(p) + row) * Form::kPartFloats;
}

// f(unit, its number in shared memory, place of its buffer) for each of the block's units, behind `barriers`
// of theirs. The warp forgets it then. Returns whether a sequence of the batch has several splits.
template <class Form, class F>
__device__ __forceinline__ bool for_units(Shared<Form>& shared, uint64_t (&barriers)[Form::kUnits],
                                          uint32_t buffers, F&& f) {
  Place place, buffer;
#pragma unroll 1
  for (;;) {
    wait_for(barriers[place.number], place.parity);
    const Unit& unit = shared.units[place.number];
    if (unit.splits == 0) return unit.has_splits != 0;
    f(unit, place.number, buffer);
    arrive(shared.forgotten[place.number]);
    place.advance(1, Form::kUnits);
    buffer.advance(1, buffers);
  }
}

// The warp that copies.
template <class Form>
class Copier {
 public:
  __device__ __forceinline__ Copier(const Problem& p, const CUtensorMap& map, Shared<Form>& shared)
      : p_(p), map_(map), shared_(shared) {}

  __device__ __forceinline__ void run() {
    if (!p_.is_early) wait_for_previous();
    Finder<Division> finder(p_);
    uint32_t number = blockIdx.x;
    Unit unit{finder.find(number)};
    announce(unit);
    Groups groups = look_up(unit, 0);
#pragma unroll 1
    while (unit.splits != 0) {
      if (unit.tiles != 0) copy(unit, 0, groups);
      // The next unit's pages and queries come while this one's tiles are copied.
      Unit next{finder.find(number += gridDim.x)};
      next.first_worker = (unit.first_worker + quotient_up(unit.tiles, kGroups)) % Form::kWorkers;
      announce(next);
      const Groups next_groups = look_up(next, 0);
      copy_after_first(unit, groups);
      unit = next, groups = next_groups;
    }
  }

 private:
  // Where 16 tokens of each lane lie.
  struct Groups {
    int32_t page = 0;
    uint32_t token = 0;  // the first one, in the page
  };

  static __device__ __forceinline__ bool is_first_lane() { return threadIdx.x % kLanes == 0; }

  __device__ __forceinline__ void wait_for_previous() {
    if (!waited_) instruction::wait_for_previous_kernel();
    waited_ = true;
  }

  __device__ __forceinline__ void announce(const Unit& unit) {
    if (is_first_lane()) {
      wait_for(shared_.forgotten[place_.number], place_.parity ^ 1);
      shared_.units[place_.number] = unit;
      instruction::arrive(instruction::shared_place(&shared_.known[place_.number]));
    }
    __syncwarp();
    place_.advance(1, Form::kUnits);
  }

  // Of the unit's 32 groups from number `begin` on, one for each lane.
  __device__ __forceinline__ Groups look_up(const Unit& unit, uint32_t begin) const {
    const uint32_t group = begin + threadIdx.x % kLanes;
    if (group >= unit.tiles) return {};
    const uint32_t token = unit.begin + group * kTile, index = token / p_.tokens_per_page;
    return {__ldg(p_.pages + static_cast<int64_t>(unit.sequence) * p_.pages_stride + index),
            token - index * p_.tokens_per_page};
  }

  __device__ __forceinline__ void copy_after_first(const Unit& unit, Groups groups) {
    Groups next;
#pragma unroll 1
    for (uint32_t group = kGroups; group < unit.tiles; group += kGroups) {
      if (group % kLanes == kLanes / 2) next = look_up(unit, group + kLanes / 2);
      if (group % kLanes == 0) groups = next;
      copy(unit, group, groups);
    }
  }

  // The tile that begins with this group.
  __device__ __forceinline__ void copy(const Unit& unit, uint32_t begin, const Groups& groups) {
    const uint32_t count = min(unit.tiles - begin, kGroups), stage = stage_.number;
    const instruction::SharedPlace full = instruction::shared_place(&shared_.full[stage]);
    if (unit.begin + (begin + count) * kTile + unit.queries > unit.length) wait_for_previous();
    if (is_first_lane()) {
      wait_for(shared_.empty[stage], stage_.parity ^ 1);
      instruction::arrive_expecting(full, count * kTile * Form::kRowBytes);
    }
    const instruction::SharedPlace to = instruction::shared_place(shared_.ring + stage * Form::kTileBytes);
#pragma unroll
    for (uint32_t i = 0; i < kGroups; ++i) {
      const uint32_t page = __shfl_sync(~0u, static_cast<uint32_t>(groups.page), (begin + i) % kLanes),
                     token = __shfl_sync(~0u, groups.token, (begin + i) % kLanes);
      if (i >= count || !is_first_lane()) continue;
#pragma unroll
      for (uint32_t in = 0; in < kTile; in += Form::kPieceTokens)
        instruction::copy_tokens(to + (i * kTile + in) * Form::kRowBytes, map_, token + in, unit.head, page,
                                 full);
    }
    __syncwarp();
    stage_.advance(1, Form::kStages);
  }

  const Problem& p_;
  const CUtensorMap& map_;
  Shared<Form>& shared_;
  Place stage_, place_;
  bool waited_ = false;
};

}  // namespace nibble::attention::warpgroups
