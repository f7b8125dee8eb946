// What grouped.cuh computes.
#pragma once

#include "nibble/warpgroup_instructions.cuh"
#include "nvfp4_moe/activation.cuh"
#include "nvfp4_moe/grouped_form.h"

namespace nibble::experts {

// One weight of every expert, or of a shared one: weight.py.
struct Weight {
  CUtensorMap codes, scales;    // words of [experts · groups, chunks, 256 and 32]
  const float2* global_scales;  // of the upper and of the lower half of an expert's rows
  const void* bias;             // [experts, outputs], or null
  uint32_t outputs, chunks, groups, row_blocks;
};

struct Problem {
  Weight first, second;
  Weight shared_first, shared_second;  // of the shared expert, if there is one: as large, without bias
  uint32_t routed;                     // experts before it
  const uint4* x;   // [tiles, chunks, a tile's chunk]: Form::word_of
  uint32_t* inner;  // the intermediate, likewise
  void* products;   // [pairs, outputs of w2], times the router's weights
  const Tile* tiles;
  const uint32_t* tile_count;
  const uint32_t* pairs;       // in the order of tiles
  const float* weights;        // in the order of tiles
  uint32_t *queue, *complete;  // units taken; row blocks of a tile's intermediate that are there, [tiles]
  uint32_t most_tiles;
  Activation activation;
};

}  // namespace nibble::experts
