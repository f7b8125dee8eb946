// A cluster's units, and their tiles on their way to shared memory. Cluster i has the units i, i + clusters,
// ... The tiles of all of its units go around the warps of its blocks: first to all blocks, then to their
// next warps.
#pragma once

#include "decode_attention/clusters/division.h"
#include "decode_attention/unit.cuh"

namespace nibble::attention::clusters {

struct Unit : attention::Unit {
  uint32_t first_warp = 0;  // of the cluster: it has the first tile
};

template <class Form>
struct Shared {
  alignas(1024) uint8_t ring[Form::kStages * Form::kTileBytes];
  alignas(16) uint8_t received[Form::kReceivedBytes];  // buffers, as many as there is room for
  Unit units[Form::kUnits];
  uint64_t full[Form::kStages], empty[Form::kStages];     // stages of the ring
  uint64_t known[Form::kUnits], forgotten[Form::kUnits];  // places of units
  uint64_t got[Form::kMostBuffers];                       // a unit's partial results are all there
  uint64_t free[Form::kMostBuffers];                      // in all blocks of the cluster
};

__device__ __forceinline__ void wait_for_cluster(uint64_t& barrier, uint32_t parity) {
  instruction::wait_for_phase<true>(instruction::shared_place(&barrier), parity);
}

// Where a tile lies.
struct TilePlace {
  int32_t page = 0;
  uint32_t token = 0;  // the first one, in the page
};

// The warp that copies: its cluster's units, and those of their tiles that its block has.
template <class Form>
class Copier {
 public:
  __device__ __forceinline__ Copier(const Problem& p, const CUtensorMap& map, Shared<Form>& shared)
      : p_(p), map_(map), shared_(shared), rank_(instruction::cluster_rank()) {}

  __device__ __forceinline__ void run() {
    if (!p_.is_early) wait_for_previous();
    Finder<Division> finder(p_);
    const uint32_t clusters = gridDim.x / Form::kRanks;
    uint32_t number = blockIdx.x / Form::kRanks;
    Unit unit{finder.find(number)};
    TilePlace places = look_up(unit, 0);
#pragma unroll 1
    for (;;) {
      announce(unit);
      if (unit.splits == 0) return;
      const uint32_t tiles = tiles_of(unit);
      if (tiles != 0) copy(unit, 0, places);
      // The next unit's pages come while this one's tiles are copied.
      Unit next{finder.find(number += clusters)};
      next.first_warp = (unit.first_warp + unit.tiles) % Form::kSlots;
      const TilePlace next_places = look_up(next, 0);
      copy_after_first(unit, tiles, places);
      unit = next, places = next_places;
    }
  }

 private:
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

  // Of the unit's tiles this block has the first one, and each kRanks-th from there on.
  __device__ __forceinline__ uint32_t first_of(const Unit& unit) const {
    return (rank_ - unit.first_warp) % Form::kRanks;
  }
  __device__ __forceinline__ uint32_t tiles_of(const Unit& unit) const {
    return (unit.tiles + Form::kRanks - 1 - first_of(unit)) / Form::kRanks;
  }

  // Of this block's 32 tiles from its number `begin` on, one for each lane.
  __device__ __forceinline__ TilePlace look_up(const Unit& unit, uint32_t begin) const {
    const uint32_t tile = first_of(unit) + (begin + threadIdx.x % kLanes) * Form::kRanks;
    if (tile >= unit.tiles) return {};
    const uint32_t token = unit.begin + tile * kTile, index = token / p_.tokens_per_page;
    return {__ldg(p_.pages + static_cast<int64_t>(unit.sequence) * p_.pages_stride + index),
            token - index * p_.tokens_per_page};
  }

  __device__ __forceinline__ void copy_after_first(const Unit& unit, uint32_t tiles, TilePlace places) {
    TilePlace next;
#pragma unroll 1
    for (uint32_t i = 1; i < tiles; ++i) {
      if (i % kLanes == kLanes / 2) next = look_up(unit, i + kLanes / 2);
      if (i % kLanes == 0) places = next;
      copy(unit, i, places);
    }
  }

  // Tile i of this block.
  __device__ __forceinline__ void copy(const Unit& unit, uint32_t i, const TilePlace& places) {
    const uint32_t page = __shfl_sync(~0u, static_cast<uint32_t>(places.page), i % kLanes),
                   token = __shfl_sync(~0u, places.token, i % kLanes), stage = stage_.number;
    const uint32_t end = unit.begin + (first_of(unit) + i * Form::kRanks + 1) * kTile;
    if (end + unit.queries > unit.length) wait_for_previous();
    // One lane alone: after its copy the next phase may be over before another lane looks.
    if (is_first_lane()) {
      wait_for(shared_.empty[stage], stage_.parity ^ 1);
      const instruction::SharedPlace full = instruction::shared_place(&shared_.full[stage]);
      instruction::arrive_expecting(full, Form::kTileBytes);
      instruction::copy_tokens(instruction::shared_place(shared_.ring + stage * Form::kTileBytes), map_,
                               token, unit.head, page, full);
    }
    __syncwarp();
    stage_.advance(1, Form::kStages);
  }

  const Problem& p_;
  const CUtensorMap& map_;
  Shared<Form>& shared_;
  const uint32_t rank_;
  Place stage_, place_;
  bool waited_ = false;
};

}  // namespace nibble::attention::clusters
