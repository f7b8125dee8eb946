// How the work of warpgroup.cuh is divided among thread blocks: a decision without effects.
#pragma once

#include <cstdint>
#include <optional>

#include "nvfp4_linear/warpgroup_form.h"

namespace nibble::warpgroup {

// How x comes: in order (warpgroup_form.h), from the kernel that made it; or in rows, which the blocks of the
// product or a separate launch bring into order.
enum class Input { ordered, rows };

// Tokens of a tile.
constexpr uint32_t tile_of(uint32_t tokens, Input input) {
  return tokens <= 16 && input == Input::ordered ? 16 : tokens <= 32 ? 32 : tokens <= 64 ? 64 : 128;
}

// kStageCost: microseconds that a block takes for a chunk of a unit, on an H200.
template <uint32_t Tokens, uint32_t Warpgroups, uint32_t Strips, uint32_t Stages, bool OrdersX = false>
struct Forms {
  template <Sharing Shares, Norm Beside = Norm::none>
  using Of = Form<Tokens, Warpgroups, Strips, Stages, Shares, OrdersX && Shares != Sharing::ranges, Beside>;
  using Units = Of<Sharing::units>;
  using Clusters = Of<Sharing::clusters>;
  static constexpr uint32_t kTokens = Tokens, kRows = Units::kGroups * 16;
  static constexpr bool kHasClusters = Clusters::fits();
  static_assert(kHasClusters || kTokens == 128);
  static constexpr float stage_cost() {
    if (OrdersX) return 0.76f;
    if (Tokens == 16) return kRows == 192 ? 0.50f : 0.60f;
    if (Tokens == 32) return kRows == 192 ? 0.57f : 0.67f;
    if (Tokens == 64) return 0.64f;
    return kRows == 128 ? 0.91f : kRows == 192 ? 1.26f : 1.63f;
  }
  static constexpr float kStageCost = stage_cost();
  // In chunks: of sums that blocks of a cluster exchange, and of each part of a unit in equal ranges.
  static constexpr float kExchangeCost = Tokens <= 64 && kRows == 256 && !OrdersX ? 2.0f : 1.0f,
                         kPartCost = Tokens <= 32 ? 2.0f : 4.0f;
  // Blocks of equal ranges read different rows at a time, which a chunk of many tokens makes slower.
  static constexpr float kRangeCost = Tokens == 128 ? 1.08f : 1.0f;

  // Whether the form is for so many tokens. Two strips only for more than a tile has.
  static constexpr bool is_for(uint32_t tokens, Input input) {
    return Tokens == tile_of(tokens, input) && (Strips == 1 || tokens > 128) &&
           !(OrdersX && input == Input::ordered);
  }
};
// Microseconds of a launch that orders x.
constexpr float kOrderCost = 1.7f;

// f(forms) of every form: tiles of 16 to 128 tokens by 128, 192 or 256 rows.
template <class F>
void for_every_form(F&& f) {
  f(Forms<32, 4, 1, 6, true>());
  f(Forms<64, 3, 1, 5>());
  f(Forms<128, 2, 1, 3>());
  f(Forms<128, 3, 1, 4>());
  f(Forms<128, 2, 2, 4>());
  f(Forms<16, 3, 1, 8>());
  f(Forms<16, 4, 1, 7>());
  f(Forms<32, 3, 1, 7>());
  f(Forms<32, 4, 1, 6>());
}

struct Shape {
  uint32_t tokens, groups, chunks;
  Input input;

  template <class Forms>
  uint32_t row_blocks() const {
    return quotient_up(groups, Forms::Units::kGroups);
  }
  template <class Forms>
  uint32_t token_tiles() const {
    return quotient_up(tokens, Forms::Units::kTokens);
  }
};

struct Division {
  Sharing sharing;
  uint32_t clusters, ranks;  // of `ranks` thread blocks each
  float cost;  // microseconds until the last block is through, without what all divisions have in common
};

// The cheapest division, or none of those that `is_allowed(sharing, ranks)`. clusters_at_a_time(ranks):
// clusters that the device runs at a time. Costs are fitted to every division's time for six products on an
// H200 (docs/kernels/nvfp4_linear.md). The division decides the order of additions.
template <class Forms, class ClustersAtATime, class IsAllowed>
std::optional<Division> division_of(const Shape& shape, uint32_t multiprocessors,
                                    ClustersAtATime&& clusters_at_a_time, IsAllowed&& is_allowed) {
  const uint32_t units = shape.row_blocks<Forms>() * shape.token_tiles<Forms>(), all = units * shape.chunks;
  const uint32_t blocks = all < multiprocessors ? all : multiprocessors;
  std::optional<Division> best;
  const auto consider = [&](Sharing sharing, uint32_t clusters, uint32_t ranks, float chunks) {
    const bool orders_first =
        shape.input == Input::rows && !(Forms::Units::kOrdersX && sharing != Sharing::ranges);
    const float cost = chunks * Forms::kStageCost + (orders_first ? kOrderCost : 0.0f);
    if (is_allowed(sharing, ranks) && (!best || cost < best->cost))
      best = Division{sharing, clusters, ranks, cost};
  };
  const auto at_most_units = [&](uint32_t clusters) { return clusters < units ? clusters : units; };
  consider(Sharing::units, at_most_units(multiprocessors), 1,
           static_cast<float>(quotient_up(units, multiprocessors) * shape.chunks));
  if constexpr (Forms::kHasClusters) {
    for (uint32_t ranks = 2; ranks <= kMostRanks && ranks <= shape.chunks; ++ranks) {
      const uint32_t clusters = clusters_at_a_time(ranks);
      if (clusters == 0) continue;
      const uint32_t rounds = quotient_up(units, clusters);
      // Blocks of a cluster wait for one another between two units.
      consider(Sharing::clusters, at_most_units(clusters), ranks,
               static_cast<float>(rounds * quotient_up(shape.chunks, ranks) + (rounds - 1) * 8) +
                   Forms::kExchangeCost);
    }
  }
  // Each block writes a part and adds those of others to its own.
  consider(Sharing::ranges, blocks, 1,
           static_cast<float>(quotient_up(all, blocks)) * Forms::kRangeCost +
               Forms::kPartCost * static_cast<float>(quotient_up(blocks, units)));
  return best;
}

}  // namespace nibble::warpgroup
