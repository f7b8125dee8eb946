// What comes before attention: norms of queries and keys, RoPE, and the write into the paged cache.
//
// The arithmetic is that of vLLM 0.32's kernels for CUDA, one after the other: rms_norm, rotary_embedding,
// reshape_and_cache_flash. Each rounds once to bfloat16, and the order of a norm's sum is theirs.
#pragma once

#include "nibble/bfloats.cuh"
#include "nibble/conversions.cuh"

namespace nibble::front {

inline constexpr uint32_t kThreads = 128;
inline constexpr uint32_t kEach = 8;  // neighbouring elements of a head that a lane has

// Strides of the cache are in bytes; a token's key is followed by its value.
struct Problem {
  const void* qkv;                            // bfloat16 [tokens, heads and twice the KV heads, D]
  const void *q_weight, *k_weight;            // of norms, bfloat16 [D], or null
  const void* cos_sin;                        // bfloat16 [positions, cosines and then sines]
  const int64_t* positions;                   // [tokens]
  const int64_t* slots;                       // of the first `slot_count` tokens, less than 0 for none
  const float *k_scale, *v_scale, *q_scale;   // of FP8, or null
  void* q;                                    // bfloat16, with a q_scale E4M3 [tokens, heads, D]
  uint8_t* cache;
  int64_t qkv_stride;  // elements
  int64_t page_stride, token_stride, head_stride;
  uint32_t tokens, slot_count, heads, kv_heads, rotary, tokens_per_page;
  float epsilon;
  uint32_t is_neox;  // halves of a head are rotated into each other, else neighbours
};

__device__ __forceinline__ float bfloat_at(const uint32_t (&words)[kEach / 2], uint32_t i) {
  const uint32_t word = words[i / 2];
  return __uint_as_float(i % 2 ? word & 0xffff0000 : word << 16);
}
__device__ __forceinline__ uint32_t e4m3_word(float a, float b, float c, float d) {
  return Instructions::e4m3_encode(a) | Instructions::e4m3_encode(b) << 8 |
         Instructions::e4m3_encode(c) << 16 | Instructions::e4m3_encode(d) << 24;
}

// A group of HeadDim / 8 lanes has a head of a token.
template <uint32_t HeadDim, bool IsFp8>
class Front {
 public:
  static constexpr uint32_t kLanesOfHead = HeadDim / kEach;

  __device__ __forceinline__ explicit Front(const Problem& p) : p_(p) {
    const uint32_t item = blockIdx.x * kThreads + threadIdx.x, all = p.heads + 2 * p.kv_heads;
    const uint32_t row = item / kLanesOfHead, last = p.tokens * all - 1;
    part_ = item % kLanesOfHead;
    is_there_ = row <= last;
    token_ = (is_there_ ? row : last) / all;
    head_ = (is_there_ ? row : last) - token_ * all;
    is_query_ = head_ < p.heads;
    is_value_ = head_ >= p.heads + p.kv_heads;
  }

  __device__ __forceinline__ void run() {
    instruction::let_next_kernel_start();
    // No kernel writes weights and scales, so they need not wait.
    uint32_t weight[kEach / 2] = {};
    const bool has_norms = p_.q_weight != nullptr;
    if (has_norms) load(weight, is_query_ ? p_.q_weight : p_.k_weight, part_ * kEach);
    const float* const scale_place = is_query_ ? p_.q_scale : is_value_ ? p_.v_scale : p_.k_scale;
    const float scale = scale_place != nullptr ? *scale_place : 1;
    instruction::wait_for_previous_kernel();

    const int64_t position = p_.positions[token_];
    const int64_t slot = is_query_ || token_ >= p_.slot_count ? -1 : p_.slots[token_];
    uint32_t x[kEach / 2], cosines[kEach / 2] = {}, sines[kEach / 2] = {};
    load(x, p_.qkv, token_ * p_.qkv_stride + head_ * HeadDim + part_ * kEach);
    const bool is_rotated = !is_value_ && part_ * kEach < p_.rotary;
    if (is_rotated) load_rotation(position, cosines, sines);
    if (has_norms) normalize(x, weight);
    if (p_.is_neox) {
      rotate_halves(x, cosines, sines, is_rotated);
    } else if (is_rotated) {
      rotate_neighbours(x, cosines, sines);
    }
    if (!is_there_) return;
    if (is_query_) {
      store_query(x, scale);
    } else if (slot >= 0) {
      store_in_cache(x, static_cast<uint32_t>(slot), scale);
    }
  }

 private:
  static __device__ __forceinline__ void load(uint32_t (&words)[kEach / 2], const void* from,
                                              int64_t element) {
    const uint4 unit = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(from) + element);
    words[0] = unit.x, words[1] = unit.y, words[2] = unit.z, words[3] = unit.w;
  }

  // Eight of each for halves; four of each, in the first words, for neighbours.
  __device__ __forceinline__ void load_rotation(int64_t position, uint32_t (&cosines)[kEach / 2],
                                                uint32_t (&sines)[kEach / 2]) const {
    const uint32_t half = p_.rotary / 2;
    const uint16_t* const row = static_cast<const uint16_t*>(p_.cos_sin) + position * p_.rotary;
    if (p_.is_neox) {
      const uint32_t first = part_ * kEach < half ? part_ * kEach : part_ * kEach - half;
      load(cosines, row, first);
      load(sines, row, half + first);
    } else {
      const uint2 c = *reinterpret_cast<const uint2*>(row + part_ * (kEach / 2));
      const uint2 s = *reinterpret_cast<const uint2*>(row + half + part_ * (kEach / 2));
      cosines[0] = c.x, cosines[1] = c.y, sines[0] = s.x, sines[1] = s.y;
    }
  }

  // All lanes take part in the sum; a value stays as it is.
  __device__ __forceinline__ void normalize(uint32_t (&x)[kEach / 2],
                                            const uint32_t (&weight)[kEach / 2]) const {
    float sum = 0;
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) sum = __builtin_fmaf(bfloat_at(x, i), bfloat_at(x, i), sum);
#pragma unroll
    for (uint32_t mask = 1; mask < kLanesOfHead; mask *= 2)
      sum += __uint_as_float(__shfl_xor_sync(~0u, __float_as_uint(sum), mask));
    const float inverse = rsqrtf(sum * (1.0f / HeadDim) + p_.epsilon);
    if (is_value_) return;
#pragma unroll
    for (uint32_t i = 0; i < kEach; i += 2) {
      x[i / 2] = pair_of(bfloat_at(x, i) * inverse * bfloat_at(weight, i),
                         bfloat_at(x, i + 1) * inverse * bfloat_at(weight, i + 1));
    }
  }

  // Products of two bfloat16 numbers are exact in float32, so a result is rounded to it once.
  static __device__ __forceinline__ float rotated(float own, float cosine, float other, float sine) {
    return __builtin_fmaf(own, cosine, other * sine);
  }

  // The other half's elements are in another lane; all lanes take part.
  __device__ __forceinline__ void rotate_halves(uint32_t (&x)[kEach / 2],
                                                const uint32_t (&cosines)[kEach / 2],
                                                const uint32_t (&sines)[kEach / 2],
                                                bool is_rotated) const {
    const uint32_t half = p_.rotary / (2 * kEach), lane = threadIdx.x % 32;
    const bool is_first = part_ < half;
    const uint32_t from = !is_rotated ? lane : is_first ? lane + half : lane - half;
    uint32_t other[kEach / 2];
#pragma unroll
    for (uint32_t i = 0; i < kEach / 2; ++i) other[i] = __shfl_sync(~0u, x[i], from);
    if (!is_rotated) return;
#pragma unroll
    for (uint32_t i = 0; i < kEach; i += 2) {
      float turned[2];
#pragma unroll
      for (uint32_t j = 0; j < 2; ++j) {
        const float sine = bfloat_at(sines, i + j);
        turned[j] = rotated(bfloat_at(x, i + j), bfloat_at(cosines, i + j), bfloat_at(other, i + j),
                            is_first ? -sine : sine);
      }
      x[i / 2] = pair_of(turned[0], turned[1]);
    }
  }

  static __device__ __forceinline__ void rotate_neighbours(uint32_t (&x)[kEach / 2],
                                                           const uint32_t (&cosines)[kEach / 2],
                                                           const uint32_t (&sines)[kEach / 2]) {
#pragma unroll
    for (uint32_t i = 0; i < kEach / 2; ++i) {
      const float a = bfloat_at(x, 2 * i), b = bfloat_at(x, 2 * i + 1);
      const float cosine = bfloat_at(cosines, i), sine = bfloat_at(sines, i);
      x[i] = pair_of(rotated(a, cosine, b, -sine), rotated(b, cosine, a, sine));
    }
  }

  static __device__ __forceinline__ void store(void* to, const uint32_t (&x)[kEach / 2]) {
    *static_cast<uint4*>(to) = make_uint4(x[0], x[1], x[2], x[3]);
  }
  // f(an element) as E4M3.
  template <class F>
  static __device__ __forceinline__ void store_e4m3(void* to, const uint32_t (&x)[kEach / 2], F&& f) {
    uint2 codes;
    codes.x = e4m3_word(f(bfloat_at(x, 0)), f(bfloat_at(x, 1)), f(bfloat_at(x, 2)), f(bfloat_at(x, 3)));
    codes.y = e4m3_word(f(bfloat_at(x, 4)), f(bfloat_at(x, 5)), f(bfloat_at(x, 6)), f(bfloat_at(x, 7)));
    *static_cast<uint2*>(to) = codes;
  }

  __device__ __forceinline__ void store_query(const uint32_t (&x)[kEach / 2], float scale) const {
    const int64_t element = (int64_t{token_} * p_.heads + head_) * HeadDim + part_ * kEach;
    if (p_.q_scale == nullptr) return store(static_cast<uint16_t*>(p_.q) + element, x);
    const float inverse = 1.0f / scale;  // as vLLM's scaled_fp8_quant
    store_e4m3(static_cast<uint8_t*>(p_.q) + element, x, [&](float value) { return value * inverse; });
  }

  __device__ __forceinline__ void store_in_cache(const uint32_t (&x)[kEach / 2], uint32_t slot,
                                                 float scale) const {
    constexpr uint32_t kElement = IsFp8 ? 1 : 2;
    const uint32_t page = slot / p_.tokens_per_page, token = slot - page * p_.tokens_per_page;
    const uint32_t head = head_ - p_.heads - (is_value_ ? p_.kv_heads : 0);
    uint8_t* const to = p_.cache + page * p_.page_stride + token * p_.token_stride + head * p_.head_stride +
                        ((is_value_ ? HeadDim : 0) + part_ * kEach) * kElement;
    if constexpr (IsFp8) {
      store_e4m3(to, x, [&](float value) { return value / scale; });
    } else {
      store(to, x);
    }
  }

  const Problem& p_;
  uint32_t part_, token_, head_;
  bool is_there_, is_query_, is_value_;
};

}  // namespace nibble::front
