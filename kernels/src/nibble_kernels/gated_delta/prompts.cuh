// The gated delta rule for sequences of several tokens, token after token, in three kernels: the convolution,
// the rule, and the output's norm. Each row of a head's state is a group of lanes' own, so that a step takes
// no barrier; a sequence of one token is as good as any.
#pragma once

#include "gated_delta/arithmetic.cuh"

namespace nibble::gated_delta {

// --- the convolution: eight neighbouring channels of a token in each thread ---

inline constexpr uint32_t kConvolveThreads = 256, kChannels = 8, kLanesOfHead = kHead / kChannels;

class Convolution {
 public:
  __device__ __forceinline__ explicit Convolution(const Prompts& prompts)
      : all_(prompts), p_(prompts.p), token_(blockIdx.x / blocks_of_token(prompts.p)) {
    const uint32_t unit = blockIdx.x % blocks_of_token(p_) * kConvolveThreads + threadIdx.x;
    is_there_ = unit / kLanesOfHead < 2 * p_.key_heads + p_.value_heads;
    head_ = is_there_ ? unit / kLanesOfHead : 0, column_ = unit % kLanesOfHead * kChannels;
  }

  __host__ __device__ static constexpr uint32_t blocks_of_token(const Problem& p) {
    return ((2 * p.key_heads + p.value_heads) * kLanesOfHead + kConvolveThreads - 1) / kConvolveThreads;
  }

  __device__ __forceinline__ void run() const {
    const uint32_t sequence = sequence_of(all_, token_), first = static_cast<uint32_t>(all_.starts[sequence]);
    const int32_t slot = p_.slots[size_t{sequence} * p_.slot_stride];
    if (slot <= 0) return;
    Eight result{};
    float(&sums)[kChannels] = result.values;
    uint4 weights[kTaps];  // of two channels each
#pragma unroll
    for (uint32_t i = 0; i < kTaps; ++i)
      weights[i] = __ldg(reinterpret_cast<const uint4*>(p_.conv_weight + size_t{channel()} * kTaps) + i);
#pragma unroll
    for (uint32_t tap = 0; tap < kTaps; ++tap) {
      const uint32_t back = kTaps - 1 - tap;
      const Eight x = floats_of(token_ >= first + back ? row_at(token_ - back)
                                                       : state_at(sequence, slot, token_ - first + tap));
#pragma unroll
      for (uint32_t i = 0; i < kChannels; ++i) {
        const uint4& pair = weights[i / 2];
        const uint32_t word = i % 2 == 0 ? (tap < 2 ? pair.x : pair.y) : (tap < 2 ? pair.z : pair.w);
        sums[i] = __builtin_fmaf(x.values[i], tap % 2 == 0 ? low(word) : high(word), sums[i]);
      }
    }
    float squares = 0;
#pragma unroll
    for (uint32_t i = 0; i < kChannels; ++i) {
      sums[i] = rounded(sums[i] * sigmoid(sums[i]));
      squares += sums[i] * sums[i];
    }
    const size_t channels = size_t{2 * p_.key_heads + p_.value_heads} * kHead;
    uint4* const to = reinterpret_cast<uint4*>(all_.convolved + token_ * channels + channel());
    if (is_there_) *to = rounded(result);
    squares = sum_of_lanes<kLanesOfHead>(squares);
    if (is_there_ && head_ < 2 * p_.key_heads && column_ == 0)
      all_.factors[size_t{token_} * 2 * p_.key_heads + head_] =
          norm_factor(squares) * (head_ < p_.key_heads ? kQueryScale : 1.0f);
  }

  // The sequence that has a token.
  __device__ __forceinline__ static uint32_t sequence_of(const Prompts& all, uint32_t token) {
    uint32_t first = 0, last = all.sequences - 1;
    while (first < last) {
      const uint32_t middle = (first + last + 1) / 2;
      if (static_cast<uint32_t>(all.starts[middle]) <= token) {
        first = middle;
      } else {
        last = middle - 1;
      }
    }
    return first;
  }

 private:
  __device__ __forceinline__ uint32_t channel() const { return head_ * kHead + column_; }
  __device__ __forceinline__ uint4 row_at(uint32_t token) const {
    uint32_t begin = head_ * kHead;
    if (p_.is_interleaved) {
      const uint32_t share = p_.value_heads / p_.key_heads;
      if (head_ < 2 * p_.key_heads) {
        begin = Place(p_, head_ % p_.key_heads * share).column(head_ / p_.key_heads, true);
      } else {
        begin = Place(p_, head_ - 2 * p_.key_heads).column(2, true);
      }
    }
    return *reinterpret_cast<const uint4*>(p_.qkvz + size_t{token} * p_.qkvz_stride + begin + column_);
  }
  // Token `place` of the three before the sequence's first.
  __device__ __forceinline__ uint4 state_at(uint32_t sequence, int32_t slot, uint32_t place) const {
    if (!all_.has_state[sequence]) return make_uint4(0, 0, 0, 0);
    const uint16_t* const state = p_.conv_state + slot * p_.conv_slot_stride +
                                  int64_t{channel()} * p_.conv_channel_stride + place * p_.conv_token_stride;
    uint32_t words[kChannels / 2];
#pragma unroll
    for (uint32_t i = 0; i < kChannels; i += 2)
      words[i / 2] =
          state[i * p_.conv_channel_stride] | uint32_t{state[(i + 1) * p_.conv_channel_stride]} << 16;
    return make_uint4(words[0], words[1], words[2], words[3]);
  }

  const Prompts& all_;
  const Problem& p_;
  const uint32_t token_;
  uint32_t head_, column_;
  bool is_there_;
};

// --- the rule: a thread block has 32 values of a head of a sequence ---

template <class State>
class Rule {
 public:
  static constexpr uint32_t kThreads = 256, kLanesOfRow = 8, kRows = kThreads / kLanesOfRow;
  static constexpr uint32_t kSplits = kHead / kRows;  // blocks of a head
  static constexpr uint32_t kTile = 16;               // tokens in shared memory at a time, twice

  struct alignas(16) Tile {
    uint4 q[kTile][kHead / 8], k[kTile][kHead / 8], v[kTile][kRows / 8];  // bfloat16
    float q_factor[kTile], k_factor[kTile], decay[kTile], beta[kTile], products[kTile];
  };
  struct Shared {
    Tile tiles[2];
  };

  __device__ __forceinline__ Rule(const Prompts& prompts, Shared& shared)
      : all_(prompts),
        p_(prompts.p),
        s_(shared),
        split_(blockIdx.x % kSplits),
        head_(blockIdx.x / kSplits % prompts.p.value_heads),
        sequence_(blockIdx.x / kSplits / prompts.p.value_heads),
        place_(prompts.p, head_) {}

  __device__ __forceinline__ void run() {
    const uint32_t first = static_cast<uint32_t>(all_.starts[sequence_]);
    const uint32_t last = static_cast<uint32_t>(all_.starts[sequence_ + 1]);
    const int32_t slot = p_.slots[size_t{sequence_} * p_.slot_stride];
    if (first == last) return;
    if (slot <= 0) {
      for (uint32_t token = first; token < last; ++token) write(token, 0);
      return;
    }
    load_tile(0, first, last);
    load_state(slot);
    for (uint32_t begin = first, number = 0; begin < last; begin += kTile, ++number) {
      if (begin + kTile < last) {
        load_tile(number + 1, begin + kTile, last);
        instruction::wait_for_copies<1>();
      } else {
        instruction::wait_for_copies<0>();
      }
      __syncthreads();
      Tile& tile = s_.tiles[number % 2];
      find_products(tile);
      __syncthreads();
      for (uint32_t i = 0; i < kTile && begin + i < last; ++i) advance(tile, i, begin + i);
      __syncthreads();  // the tile is read
    }
    store_state(slot);
    if (split_ == 0) keep_taps(slot, first, last);
  }

 private:
  static constexpr uint32_t kColumns = kHead / kLanesOfRow;  // of a lane: eight at 8 lane, eight 64 further
  static constexpr uint32_t kUnit = 8, kUnits = kColumns / kUnit;

  __device__ __forceinline__ static uint32_t lane() { return threadIdx.x % kLanesOfRow; }
  __device__ __forceinline__ uint32_t value() const { return split_ * kRows + threadIdx.x / kLanesOfRow; }
  __device__ __forceinline__ size_t channels() const {
    return size_t{2 * p_.key_heads + p_.value_heads} * kHead;
  }
  __device__ __forceinline__ static uint32_t unit(uint32_t j) { return j * kLanesOfRow + lane(); }

  // Begins copies of queries, keys and values, and finds the numbers of each token.
  __device__ __forceinline__ void load_tile(uint32_t number, uint32_t begin, uint32_t last) const {
    Tile& tile = s_.tiles[number % 2];
    constexpr uint32_t kOfPart = kHead / 8, kOfValues = kRows / 8, kOfToken = 2 * kOfPart + kOfValues;
    for (uint32_t i = threadIdx.x; i < kTile * kOfToken; i += kThreads) {
      const uint32_t at = i / kOfToken, place = i % kOfToken, part = place / kOfPart;
      if (begin + at >= last) break;
      const uint16_t* const row = all_.convolved + (begin + at) * channels();
      uint4* const to = part == 0 ? &tile.q[at][place] : part == 1 ? &tile.k[at][place - kOfPart]
                                                                   : &tile.v[at][place - 2 * kOfPart];
      const uint32_t column = part < 2 ? place % kOfPart * 8 : split_ * kRows + (place - 2 * kOfPart) * 8;
      instruction::copy_once(instruction::shared_place(to),
                             reinterpret_cast<const uint4*>(row + place_.channel(part) + column));
    }
    instruction::end_copies();
    const uint32_t token = begin + threadIdx.x;
    if (threadIdx.x >= kTile || token >= last) return;
    const uint16_t* const ba = all_.ba + size_t{token} * 2 * p_.value_heads;
    const float b = low(ba[place_.gate(0, p_.is_interleaved)]), a = low(ba[place_.gate(1, p_.is_interleaved)]);
    const Gates gates = gates_of(b, a, p_.a_log[head_], p_.dt_bias[head_]);
    tile.decay[threadIdx.x] = gates.decay, tile.beta[threadIdx.x] = gates.beta;
    const float* const factors = all_.factors + size_t{token} * 2 * p_.key_heads + place_.group;
    tile.q_factor[threadIdx.x] = factors[0], tile.k_factor[threadIdx.x] = factors[p_.key_heads];
  }

  struct Numbers {
    float values[kColumns];
    __device__ __forceinline__ explicit Numbers(const uint4 (&row)[kHead / 8]) {
#pragma unroll
      for (uint32_t j = 0; j < kUnits; ++j) {
        const Eight eight = floats_of(row[unit(j)]);
#pragma unroll
        for (uint32_t i = 0; i < kUnit; ++i) values[j * kUnit + i] = eight.values[i];
      }
    }
  };
  // Two chains, so that one need not wait for the other.
  __device__ __forceinline__ static float dot(const float (&a)[kColumns], const float (&b)[kColumns]) {
    float sums[2] = {};
#pragma unroll
    for (uint32_t i = 0; i < kColumns; ++i) sums[i % 2] = __builtin_fmaf(a[i], b[i], sums[i % 2]);
    return sums[0] + sums[1];
  }

  // Of each token's query and key: a group of lanes has every 32nd token.
  __device__ __forceinline__ static void find_products(Tile& tile) {
    static_assert(kTile <= kRows);
    const uint32_t token = threadIdx.x / kLanesOfRow;
    const uint32_t at = token < kTile ? token : 0;
    const float sum = sum_of_lanes<kLanesOfRow>(dot(Numbers(tile.q[at]).values, Numbers(tile.k[at]).values));
    if (token < kTile && lane() == 0) tile.products[token] = sum * tile.q_factor[token] * tile.k_factor[token];
  }

  __device__ __forceinline__ void advance(const Tile& tile, uint32_t at, uint32_t token) {
    const Numbers q(tile.q[at]), k(tile.k[at]);
    const float with_k = sum_of_lanes<kLanesOfRow>(dot(state_, k.values));
    const float with_q = sum_of_lanes<kLanesOfRow>(dot(state_, q.values));
    const float decay = tile.decay[at], k_factor = tile.k_factor[at];
    const uint32_t row = threadIdx.x / kLanesOfRow;
    const float v = low(reinterpret_cast<const uint16_t*>(tile.v[at])[row]);
    const float new_value = tile.beta[at] * (v - decay * with_k * k_factor);
    const float output = decay * with_q * tile.q_factor[at] + new_value * tile.products[at];
    const float change = new_value * k_factor;
#pragma unroll
    for (uint32_t i = 0; i < kColumns; ++i) state_[i] = __builtin_fmaf(change, k.values[i], decay * state_[i]);
    write(token, static_cast<uint16_t>(pair_of(output, 0)));
  }
  // The output before its norm.
  __device__ __forceinline__ void write(uint32_t token, uint16_t output) const {
    if (lane() == 0) p_.out[(size_t{token} * p_.value_heads + head_) * kHead + value()] = output;
  }

  // A lane's eight columns j of its row.
  __device__ __forceinline__ uint4* place_of_state(int32_t slot, uint32_t j) const {
    constexpr int64_t kBytes = 16 / State::kEach;
    const int64_t element = slot * p_.state_slot_stride + (int64_t{head_} * kHead + value()) * kHead;
    return reinterpret_cast<uint4*>(static_cast<uint8_t*>(p_.state) + (element + unit(j) * kUnit) * kBytes);
  }
  __device__ __forceinline__ void load_state(int32_t slot) {
    const bool has_state = all_.has_state[sequence_];
#pragma unroll
    for (uint32_t j = 0; j < kUnits; ++j) {
#pragma unroll
      for (uint32_t i = 0; i < kUnit; i += 4) {
        float4 four = make_float4(0, 0, 0, 0);
        if (has_state) {
          const uint4 unit = __ldcg(place_of_state(slot, j) + i / State::kEach);
          four = State::unpack(unit, i % State::kEach / 4);
        }
        float* const x = state_ + j * kUnit + i;
        x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
      }
    }
  }
  __device__ __forceinline__ void store_state(int32_t slot) const {
#pragma unroll
    for (uint32_t j = 0; j < kUnits; ++j) {
      uint4 packed = make_uint4(0, 0, 0, 0);
#pragma unroll
      for (uint32_t i = 0; i < kUnit; i += 4) {
        const float* const x = state_ + j * kUnit + i;
        State::pack(packed, i % State::kEach / 4, make_float4(x[0], x[1], x[2], x[3]));
        if ((i + 4) % State::kEach == 0) place_of_state(slot, j)[i / State::kEach] = packed;
      }
    }
  }

  // The last three tokens of the value's channels, and of the query's and key's in one block of their group.
  __device__ __forceinline__ void keep_taps(int32_t slot, uint32_t first, uint32_t last) const {
    const uint32_t parts = place_.rank == 0 ? 3 : 1, before = kTaps - 1;
    for (uint32_t i = threadIdx.x; i < parts * kHead; i += kThreads) {
      const uint32_t part = i / kHead == 0 ? 2 : i / kHead - 1, column = i % kHead;
      uint16_t* const state = p_.conv_state + slot * p_.conv_slot_stride +
                              int64_t{place_.channel(part) + column} * p_.conv_channel_stride;
      const uint16_t* const rows = p_.qkvz + place_.column(part, p_.is_interleaved) + column;
      uint16_t kept[kTaps - 1];
#pragma unroll
      for (uint32_t tap = 0; tap < before; ++tap) {
        const uint32_t back = before - tap;  // of the end
        if (last - first >= back) {
          kept[tap] = rows[size_t{last - back} * p_.qkvz_stride];
        } else {
          kept[tap] = all_.has_state[sequence_] ? state[(tap + last - first) * p_.conv_token_stride] : 0;
        }
      }
#pragma unroll
      for (uint32_t tap = 0; tap < before; ++tap) state[tap * p_.conv_token_stride] = kept[tap];
    }
  }

  const Prompts& all_;
  const Problem& p_;
  Shared& s_;
  const uint32_t split_, head_, sequence_;
  const Place place_;
  float state_[kColumns];
};

// --- the output's norm and gate: a warp has a head of a token ---

inline constexpr uint32_t kNormThreads = 256;

__device__ __forceinline__ void norm_output(const Problem& p) {
  const uint32_t row = (blockIdx.x * kNormThreads + threadIdx.x) / kLanes, lane = threadIdx.x % kLanes;
  if (row >= p.tokens * p.value_heads) return;
  const uint32_t token = row / p.value_heads, head = row % p.value_heads;
  uint2* const out = reinterpret_cast<uint2*>(p.out + size_t{row} * kHead) + lane;
  if (token >= p.live_tokens) {
    *out = make_uint2(0, 0);
    return;
  }
  const uint32_t column = Place(p, head).column(3, p.is_interleaved);
  const uint2 z = reinterpret_cast<const uint2*>(p.qkvz + size_t{token} * p.qkvz_stride + column)[lane];
  const float4 norm = reinterpret_cast<const float4*>(p.norm)[lane];
  const uint2 x = *out;
  float4 four = make_float4(low(x.x), high(x.x), low(x.y), high(x.y));
  float squares = 0;
  add_dot(squares, four, four);
  const float factor = rsqrtf(sum_of_lanes<kLanes>(squares) / kHead + p.epsilon);
  four.x = four.x * factor * norm.x * output_gate(p, low(z.x));
  four.y = four.y * factor * norm.y * output_gate(p, high(z.x));
  four.z = four.z * factor * norm.z * output_gate(p, low(z.y));
  four.w = four.w * factor * norm.w * output_gate(p, high(z.y));
  *out = make_uint2(pair_of(four.x, four.y), pair_of(four.z, four.w));
}

}  // namespace nibble::gated_delta
