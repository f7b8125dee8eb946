// How thread blocks divide a product whose x arrives while it multiplies (arriving_x.cuh).
#pragma once

#include <algorithm>
#include <optional>

#include "nvfp4_linear/arriving_x.cuh"

namespace nibble::decode {

// A cluster's blocks divide the columns (ranks) or share what arrives of x (sharers), not both.
struct Arrival {
  uint32_t ranks, sharers, clusters;  // clusters: how many divide the groups
  uint32_t chunks_per_segment, places;
};

// Chunks of x that arrive together: as few as leave the warps' shares of tiles as equal as those of all columns.
template <class Form>
uint32_t chunks_per_segment(uint32_t chunks, uint32_t groups) {
  const auto longest = [&](uint32_t segments) {  // of a warp's shares of tiles
    return (groups * (chunks / segments) + Form::kWarps - 1) / Form::kWarps * segments;
  };
  for (uint32_t segments = ArrivingX<Form>::kMostPlaces; segments > 1; --segments) {
    if (chunks % segments == 0 && longest(segments) * 25 <= longest(1) * 26) return chunks / segments;
  }
  return chunks;
}

// Nanoseconds of a block, of which only proportions matter: its tiles, what it waits for x, and the sums of a cluster.
// From four products of an 8B layer on an H100 (benchmarks/offline_gpu/decode_chain.cu).
inline float cost(const Arrival& arrival, uint32_t groups, uint32_t chunks) {
  constexpr float kTile = 54, kChunk = 75, kCluster = 1200;
  const float of_x = static_cast<float>(chunks) * kChunk / static_cast<float>(arrival.sharers);
  return static_cast<float>(groups * chunks) * kTile + of_x + (arrival.ranks > 1 ? kCluster : 0);
}

// clusters_of(blocks): how many clusters of so many the device runs at a time. None where no division fits into shared
// memory.
template <class Form, class F>
std::optional<Arrival> arrival_of(uint32_t all_groups, uint32_t all_chunks, uint32_t shared_bytes, F&& clusters_of) {
  using X = ArrivingX<Form>;
  constexpr uint32_t kWays[][2] = {{1, 2}, {1, 1}, {2, 1}};
  std::optional<Arrival> best;
  float least = 0;
  for (const auto& [ranks, sharers] : kWays) {
    if (all_chunks % ranks != 0) continue;
    const uint32_t clusters = std::min(clusters_of(ranks * sharers) * sharers, all_groups) / sharers * sharers;
    if (clusters == 0) continue;
    const uint32_t groups = (all_groups + clusters - 1) / clusters, chunks = all_chunks / ranks;
    Arrival arrival{ranks, sharers, clusters,
                    chunks_per_segment<Form>(chunks, std::min(groups, Form::kGroupsPerRound)), 0};
    const uint32_t segments = chunks / arrival.chunks_per_segment, fixed = X::shared_bytes(0, ranks > 1),
                   each = arrival.chunks_per_segment * X::kChunkBytes;
    if (fixed + each > shared_bytes) continue;
    arrival.places = std::min(segments, (shared_bytes - fixed) / each);
    if (arrival.places < segments && (arrival.places < 2 || sharers > 1)) continue;
    const float now = cost(arrival, groups, chunks);
    if (!best || now < least) best = arrival, least = now;
  }
  return best;
}

}  // namespace nibble::decode
