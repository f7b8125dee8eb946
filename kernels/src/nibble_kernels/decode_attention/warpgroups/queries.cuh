// The warp that brings queries into the order in which products read them.
#pragma once

#include "decode_attention/warpgroups/tile.cuh"

namespace nibble::attention::warpgroups {

#if NIBBLE_HAS_WARPGROUP_PRODUCTS

// The warp that prepares queries.
template <class Form>
class QueryLoader {
 public:
  __device__ __forceinline__ QueryLoader(const Problem& p, Shared<Form>& shared) : p_(p), shared_(shared) {}

  __device__ __forceinline__ void run() {
    const float scale = p_.scale * (p_.soft_cap != 0 ? 1 : kLog2E) * (p_.k_scale ? __ldg(p_.k_scale) : 1);
    Place place;
#pragma unroll 1
    for (;;) {
      wait_for(shared_.known[place.number], place.parity);
      const Unit& unit = shared_.units[place.number];
      const bool is_end = unit.splits == 0;
      if (!is_end) load(unit, scale, shared_.queries[place.number], shared_.factors[place.number]);
      instruction::publish_to_products();
      arrive(shared_.ready[place.number]);
      if (is_end) return;
      arrive(shared_.forgotten[place.number]);
      place.advance(1, Form::kUnits);
    }
  }

 private:
  static constexpr uint32_t kLoads = Form::kHeadDim / 4 / kLanes, kAtOnce = 8;
  using Row = uint2[kLoads];  // four elements after four, in turn with the other lanes

  __device__ __forceinline__ void load(const Unit& unit, float scale, uint8_t* to, float* factors) const {
    const uint32_t rows = rows_of(p_, unit);
#pragma unroll 1
    for (uint32_t begin = 0; begin < Form::kColumns; begin += kAtOnce) {
      Row found[kAtOnce];
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        const bool is_there = begin + i < rows;
        const RowPlace place = place_of(p_, unit, is_there ? begin + i : 0);
        const uint16_t* const from = static_cast<const uint16_t*>(p_.query) +
                                     place.token * p_.query_token_stride + place.head * p_.query_head_stride +
                                     lane() * 4;
#pragma unroll
        for (uint32_t j = 0; j < kLoads; ++j) {
          found[i][j] = uint2{0, 0};
          if (is_there) found[i][j] = __ldg(reinterpret_cast<const uint2*>(from + j * kLanes * 4));
        }
      }
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        const float range = Form::kIsFp8 ? fit_range<kLanes>(found[i]) : 1;
        if (lane() == 0) factors[begin + i] = scale * range;
        store(found[i], begin + i, to);
      }
    }
  }

  static __device__ __forceinline__ void store(const Row& of_row, uint32_t row, uint8_t* to) {
#pragma unroll
    for (uint32_t i = 0; i < kLoads * 2; ++i) {
      const ElementPlace at = place_of_pair<Form>((i / 2 * kLanes + lane()) * 4 + i % 2 * 2);
      *reinterpret_cast<uint32_t*>(to + (at.piece * Form::kColumns + row) * 16 + at.at * 2) =
          i % 2 == 0 ? of_row[i / 2].x : of_row[i / 2].y;
    }
  }

  const Problem& p_;
  Shared<Form>& shared_;
};

#endif
}  // namespace nibble::attention::warpgroups
