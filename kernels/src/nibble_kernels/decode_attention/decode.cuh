// Attention of a few query tokens a sequence over a paged cache of keys and values.
//
// Persistent thread blocks. An item is a chunk of a sequence for one KV head; its warps take tiles in turns.
// A block adds its warps' results in order, and the last block of a sequence's chunks adds theirs in order.
#pragma once

#include "decode_attention/tile.cuh"

namespace nibble::attention {

template <class Form>
class Attention {
 public:
  __device__ __forceinline__ Attention(const Problem& p, Shared<Form>& shared) : p_(p), shared_(shared) {}

  __device__ __forceinline__ void run() {
    const uint32_t items = count_items(p_, shared_);
    if (blockIdx.x >= items) return;
    uint8_t* const memory = shared_.ring + warp() * (Form::kStages * Form::kTileBytes);
    Ring<Form> ring(p_, shared_, memory, items);
    for (uint32_t number = blockIdx.x; number < items; number += gridDim.x) {
      Partial<Form> partial;
      compute(item_of(p_, shared_, number), ring, partial);
      join_warps(partial);
      // Found again, so that it takes no registers meanwhile.
      finish(item_of(p_, shared_, number), number, partial);
      __syncthreads();
    }
    instruction::wait_for_copies<0>();
  }

 private:
  static __device__ __forceinline__ uint32_t warp() { return threadIdx.x / kLanes; }
  static __device__ __forceinline__ uint32_t lane() { return threadIdx.x % kLanes; }

  __device__ __forceinline__ uint32_t rows_of(const Item& item) const {
    const uint32_t rows = p_.group * item.queries, before = item.row_tile * kRows;
    return rows > before ? min(rows - before, kRows) : 0;
  }

  // Where a row's query, and its result without strides, lies: token and head.
  struct Place {
    uint32_t token, head, query;
  };
  __device__ __forceinline__ Place place_of(const Item& item, uint32_t row) const {
    const uint32_t all = item.row_tile * kRows + row, query = all / p_.group;
    return {item.query_begin + query, item.head * p_.group + all - query * p_.group, query};
  }

  // --- a chunk ---

  __device__ __forceinline__ void compute(const Item& item, Ring<Form>& ring, Partial<Form>& partial) {
#pragma unroll
    for (uint32_t column = 0; column < Form::kColumns; ++column) {
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) partial.sums[column][i] = 0;
    }
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) partial.maximum[half] = -INFINITY, partial.total[half] = 0;
    load_query(item);
    const Rows<Form> rows = look_at_rows(item);
    uint4 query[Form::kSteps];
    if constexpr (Form::kQueryInRegisters) {
#pragma unroll
      for (uint32_t step = 0; step < Form::kSteps; ++step)
        query[step] = reinterpret_cast<const uint4*>(shared_.query)[step * kLanes + lane()];
    }
#pragma unroll 1
    for (uint32_t tile = warp(); tile < item.tiles; tile += Form::kWarps) {
      const uint32_t begin = item.begin + tile * Form::kTile;
      Tile<Form>(ring.take(), shared_.query).add(partial, rows, p_.soft_cap, begin, query);
      ring.replace();
    }
  }

  // Queries as products take them.
  __device__ __forceinline__ void load_query(const Item& item) {
    if constexpr (Form::kIsFp8) {
      load_query_in_range(item);
    } else {
      __syncthreads();
      const uint32_t rows = rows_of(item);
#pragma unroll 4
      for (uint32_t index = threadIdx.x; index < Form::kSteps * kLanes; index += Form::kThreads) {
        store_query(index, query_part(item, rows, index, 0), query_part(item, rows, index, 1));
      }
      __syncthreads();
    }
  }

  // For FP8 they become float16 after a power of two that fits each row; what this rounds off is below 2^-25
  // of the row's largest element.
  __device__ __forceinline__ void load_query_in_range(const Item& item) {
    constexpr uint32_t kEach = quotient_up_constant(Form::kSteps * kLanes, Form::kThreads);
    const uint32_t rows = rows_of(item);
    uint2 parts[kEach][2];
    if (threadIdx.x < kRows) shared_.largest[threadIdx.x] = 0;
    __syncthreads();
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
      const uint32_t index = i * Form::kThreads + threadIdx.x;
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        parts[i][half] = query_part(item, rows, index, half);
        const uint32_t low = max(magnitude(parts[i][half].x), magnitude(parts[i][half].x >> 16));
        const uint32_t high = max(magnitude(parts[i][half].y), magnitude(parts[i][half].y >> 16));
        atomicMax(&shared_.largest[lane() / 4 + half * 8], max(low, high));
      }
    }
    __syncthreads();
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
      const uint32_t index = i * Form::kThreads + threadIdx.x;
      if (index >= Form::kSteps * kLanes) continue;
      store_query(index, as_operand(parts[i][0], lane() / 4), as_operand(parts[i][1], lane() / 4 + 8));
    }
    __syncthreads();
  }

  __device__ __forceinline__ void store_query(uint32_t index, const uint2& low, const uint2& high) {
    reinterpret_cast<uint4*>(shared_.query)[index] = make_uint4(low.x, high.x, low.y, high.y);
  }

  static constexpr uint32_t quotient_up_constant(uint32_t a, uint32_t b) { return (a + b - 1) / b; }
  static __device__ __forceinline__ uint32_t magnitude(uint32_t bits) { return bits & 0x7fff; }

  // This lane's part of a row of each half; zeros where the item has no such row.
  __device__ __forceinline__ uint2 query_part(const Item& item, uint32_t rows, uint32_t index,
                                              uint32_t half) const {
    const uint32_t row = lane() / 4 + half * 8;
    if (row >= rows || index >= Form::kSteps * kLanes) return {0, 0};
    const Place place = place_of(item, row);
    const int64_t offset = place.token * p_.query_token_stride + place.head * p_.query_head_stride;
    const uint16_t* const query = static_cast<const uint16_t*>(p_.query) + offset;
    return __ldg(reinterpret_cast<const uint2*>(query + element_of<Form>(index / kLanes, lane() % 4)));
  }

  // 2^-e for a row whose largest element is in [2^e, 2^(e + 1)).
  __device__ __forceinline__ float row_factor(uint32_t row) const {
    const uint32_t exponent = min(shared_.largest[row] >> 7, 252u);
    return __uint_as_float((254 - max(exponent, 2u)) << 23);
  }

  __device__ __forceinline__ uint2 as_operand(uint2 part, uint32_t row) const {
    const float factor = row_factor(row);
    const auto pair = [&](uint32_t bits) {
      return pair_of(__uint_as_float(bits << 16) * factor, __uint_as_float(bits & 0xffff0000) * factor, true);
    };
    return {pair(part.x), pair(part.y)};
  }

  __device__ __forceinline__ Rows<Form> look_at_rows(const Item& item) const {
    constexpr float kLog2E = 1.4426950408889634f;
    const uint32_t count = rows_of(item);
    Rows<Form> rows;
    rows.all_first = seen_first(item, count == 0 ? 0 : place_of(item, count - 1).query);
    rows.all_end = seen_end(item, place_of(item, 0).query);
    const float scale = p_.scale * (p_.soft_cap != 0 ? 1 : kLog2E) * (p_.k_scale ? __ldg(p_.k_scale) : 1);
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t row = min(lane() / 4 + half * 8, count == 0 ? 0 : count - 1);
      rows.factor[half] = scale;
      if constexpr (Form::kIsFp8) rows.factor[half] = scale / row_factor(lane() / 4 + half * 8);
      rows.first[half] = seen_first(item, place_of(item, row).query);
      rows.end[half] = seen_end(item, place_of(item, row).query);
    }
    return rows;
  }
  __device__ __forceinline__ uint32_t seen_end(const Item& item, uint32_t query) const {
    const uint32_t end = item.length + query + 1;
    return end > item.queries ? min(end - item.queries, item.length) : 0;
  }
  __device__ __forceinline__ uint32_t seen_first(const Item& item, uint32_t query) const {
    const uint32_t end = seen_end(item, query);
    return p_.window != 0 && end > p_.window ? end - p_.window : 0;
  }

  // --- the sum of a block's warps ---

  // Afterwards the partial sums are relative to shared_.maximum.
  __device__ __forceinline__ void join_warps(Partial<Form>& partial) {
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      float total = partial.total[half];
      total += __uint_as_float(__shfl_xor_sync(~0u, __float_as_uint(total), 1));
      total += __uint_as_float(__shfl_xor_sync(~0u, __float_as_uint(total), 2));
      const uint32_t row = lane() / 4 + half * 8;
      if (lane() % 4 == 0)
        shared_.maxima[warp()][row] = partial.maximum[half], shared_.totals[warp()][row] = total;
    }
    __syncthreads();
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t row = lane() / 4 + half * 8;
      float maximum = shared_.maxima[0][row], total = 0;
#pragma unroll
      for (uint32_t i = 1; i < Form::kWarps; ++i) maximum = fmaxf(maximum, shared_.maxima[i][row]);
      const float base = maximum == -INFINITY ? 0 : maximum;
#pragma unroll
      for (uint32_t i = 0; i < Form::kWarps; ++i)
        total = fmaf(shared_.totals[i][row], instruction::power_of_two(shared_.maxima[i][row] - base), total);
      const float factor = instruction::power_of_two(partial.maximum[half] - base);
#pragma unroll
      for (uint32_t column = 0; column < Form::kColumns; ++column) {
        partial.sums[column][2 * half] *= factor;
        partial.sums[column][2 * half + 1] *= factor;
      }
      if (warp() == 0 && lane() % 4 == 0) shared_.maximum[row] = maximum, shared_.total[row] = total;
    }
  }

  // shared_.sums: eight rows of all warps' sums. Each warp begins with another part of the columns.
  __device__ __forceinline__ void add_warps(const Partial<Form>& partial, uint32_t half) {
    constexpr uint32_t kPart = Form::kColumns / Form::kWarps;
#pragma unroll 1
    for (uint32_t turn = 0; turn < Form::kWarps; ++turn) {
      const uint32_t own = (warp() + turn) % Form::kWarps;
#pragma unroll
      for (uint32_t column = 0; column < Form::kColumns; ++column) {
        if (column / kPart != own) continue;
        float2* const place = reinterpret_cast<float2*>(
            &shared_.sums[lane() / 4 * Form::kSumStride + column * 8 + lane() % 4 * 2]);
        float2 sum = make_float2(partial.sums[column][2 * half], partial.sums[column][2 * half + 1]);
        if (turn != 0) sum = make_float2(place->x + sum.x, place->y + sum.y);
        *place = sum;
      }
      __syncthreads();
    }
  }

  // --- results ---

  __device__ __forceinline__ void finish(const Item& item, uint32_t number, const Partial<Form>& partial) {
    const uint32_t rows = rows_of(item);
    float* const slot = p_.partials + static_cast<size_t>(number) * partial_floats(Form::kHeadDim);
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      if (half * 8 >= rows) continue;
      add_warps(partial, half);
      const uint32_t values = min(rows - half * 8, 8u) * Form::kHeadDim;
      for (uint32_t i = threadIdx.x; i < values; i += Form::kThreads) {
        const uint32_t row = i / Form::kHeadDim, element = i % Form::kHeadDim;
        if (item.splits == 1) {
          const float sum = shared_.sums[row * Form::kSumStride + place_of_element(element)];
          const uint32_t at = half * 8 + row;
          write(item, at, element, sum, shared_.maximum[at], shared_.total[at]);
        } else {
          slot[half * 8 * Form::kHeadDim + i] = shared_.sums[row * Form::kSumStride + element];
        }
      }
      __syncthreads();
    }
    if (item.splits == 1) return;
    if (threadIdx.x < kRows) {
      slot[kRows * Form::kHeadDim + threadIdx.x] = shared_.maximum[threadIdx.x];
      slot[kRows * Form::kHeadDim + kRows + threadIdx.x] = shared_.total[threadIdx.x];
    }
    if (is_last(item)) join_chunks(item, number - item.split, rows);
  }

  // Element of the head dim -> place in a row of sums, which are in the order of tiles of columns.
  static __device__ __forceinline__ uint32_t place_of_element(uint32_t element) {
    const uint32_t unit = element / Form::kPerLoad;
    return (unit / 8 * Form::kPerLoad + element % Form::kPerLoad) * 8 + unit % 8;
  }
  static __device__ __forceinline__ uint32_t element_at(uint32_t place) {
    const uint32_t column = place / 8;
    return (column / Form::kPerLoad * 8 + place % 8) * Form::kPerLoad + column % Form::kPerLoad;
  }

  __device__ __forceinline__ bool is_last(const Item& item) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      const uint32_t tiles = row_tiles_of(p_);
      uint32_t* const counter =
          p_.counters + (item.sequence * p_.kv_heads + item.head) * tiles + item.row_tile;
      shared_.is_last = atomicAdd(counter, 1u) == item.splits - 1;
      if (shared_.is_last) *counter = 0;
    }
    __syncthreads();
    if (shared_.is_last) __threadfence();
    return shared_.is_last;
  }

  // The sum of a sequence's chunks, the first one first.
  __device__ __forceinline__ void join_chunks(const Item& item, uint32_t first, uint32_t rows) {
    constexpr uint32_t kFloats = kRows * (Form::kHeadDim + 2), kStats = kRows * Form::kHeadDim;
    const float* const slots = p_.partials + static_cast<size_t>(first) * kFloats;
    for (uint32_t i = threadIdx.x; i < rows * item.splits; i += Form::kThreads) {
      const uint32_t split = i / rows, row = i - split * rows;
      shared_.weights[row * kMostSplits + split] = __ldcg(slots + size_t{split} * kFloats + kStats + row);
    }
    __syncthreads();
    for (uint32_t row = warp(); row < rows; row += Form::kWarps) weigh_chunks(item, slots, row);
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < rows * (Form::kHeadDim / 4); i += Form::kThreads) {
      const uint32_t row = i / (Form::kHeadDim / 4);
      float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 8
      for (uint32_t split = 0; split < item.splits; ++split) {
        const float weight = shared_.weights[row * kMostSplits + split];
        const float4 part = __ldcg(reinterpret_cast<const float4*>(slots + size_t{split} * kFloats) + i);
        sum.x = fmaf(part.x, weight, sum.x), sum.y = fmaf(part.y, weight, sum.y);
        sum.z = fmaf(part.z, weight, sum.z), sum.w = fmaf(part.w, weight, sum.w);
      }
      const float values[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j) {
        const uint32_t element = element_at(i % (Form::kHeadDim / 4) * 4 + j);
        write(item, row, element, values[j], shared_.maximum[row], shared_.total[row]);
      }
    }
  }

  // Maxima of a row's chunks -> their weights; the row's maximum and total.
  __device__ __forceinline__ void weigh_chunks(const Item& item, const float* slots, uint32_t row) {
    constexpr uint32_t kFloats = kRows * (Form::kHeadDim + 2), kStats = kRows * (Form::kHeadDim + 1);
    float* const weights = shared_.weights + row * kMostSplits;
    float maximum = -INFINITY;
    for (uint32_t split = lane(); split < item.splits; split += kLanes)
      maximum = fmaxf(maximum, weights[split]);
    for (uint32_t mask = 1; mask < kLanes; mask *= 2)
      maximum = fmaxf(maximum, __uint_as_float(__shfl_xor_sync(~0u, __float_as_uint(maximum), mask)));
    const float base = maximum == -INFINITY ? 0 : maximum;
    float total = 0;
    for (uint32_t split = lane(); split < item.splits; split += kLanes) {
      weights[split] = instruction::power_of_two(weights[split] - base);
      total = fmaf(__ldcg(slots + size_t{split} * kFloats + kStats + row), weights[split], total);
    }
    for (uint32_t mask = 1; mask < kLanes; mask *= 2)
      total += __uint_as_float(__shfl_xor_sync(~0u, __float_as_uint(total), mask));
    if (lane() == 0) shared_.maximum[row] = maximum, shared_.total[row] = total;
  }

  __device__ __forceinline__ void write(const Item& item, uint32_t row, uint32_t element, float sum,
                                        float maximum, float total) const {
    constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
    const Place place = place_of(item, row);
    const size_t at = size_t{place.token} * (p_.kv_heads * p_.group) + place.head;
    if (p_.sinks != nullptr) {
      const float sink = __ldg(p_.sinks + place.head) * kLog2E, top = fmaxf(maximum, sink);
      const float factor = instruction::power_of_two(maximum - top);
      total = fmaf(total, factor, instruction::power_of_two(sink - top));
      sum *= factor;
      maximum = top;
    }
    const float scale = p_.v_scale ? __ldg(p_.v_scale) : 1;
    const float value = total > 0 ? sum * scale / total : 0;
    static_cast<__nv_bfloat16*>(p_.out)[at * Form::kHeadDim + element] = __float2bfloat16_rn(value);
    if (p_.lse != nullptr && element == 0)
      p_.lse[at] = total > 0 ? (maximum + log2f(total)) * kLn2 : -INFINITY;
  }

  const Problem& p_;
  Shared<Form>& shared_;
};

}  // namespace nibble::attention
