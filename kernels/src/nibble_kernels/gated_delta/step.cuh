// One token of linear attention with the gated delta rule, for sequences side by side: the gates' product,
// the convolution of four tokens, the update of the state, the output's norm and its gate.
//
// A thread block has a value head of a token: 128 rows of the state, of 128 keys. The blocks of the value
// heads that share a key form a cluster, because all of them read its convolution's state, which one of them
// writes. A token's results do not depend on the others.
#pragma once

#include "gated_delta/arithmetic.cuh"

namespace nibble::gated_delta {

// State: Floats or Bfloats. Each thread has 128 bytes of a head's state.
template <class StateType>
struct Form {
  using State = StateType;
  static constexpr uint32_t kEach = State::kEach;
  static constexpr uint32_t kThreads = kHead * kHead / kEach / 8, kWarps = kThreads / kLanes;
  // At least so many on a multiprocessor. The compiler keeps more in registers for other GPUs.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
  static constexpr uint32_t kBlocks = 1024 / kThreads;
#else
  static constexpr uint32_t kBlocks = 1;
#endif
};

template <class F>
struct alignas(16) Shared {
  float parts[4][kHead];  // query, key and value after the convolution, and z
  float o[kHead], norm[kHead];
  uint4 state[kHead * kHead / F::kEach];  // a thread's units, in the order in which it reads them
  float squares[2][kHead / kLanes];   // of the queries' and of the keys' warps
  float gates[2][F::kWarps / 2];      // sums of b in the first half of the warps, of a in the second
  float a_log, dt_bias;
};

template <class F>
class Step {
 public:
  using State = typename F::State;
  static constexpr uint32_t kEach = F::kEach, kThreads = F::kThreads;

  __device__ __forceinline__ Step(const Problem& problem, Shared<F>& shared)
      : p_(problem),
        s_(shared),
        token_(blockIdx.x / problem.value_heads),
        head_(blockIdx.x % problem.value_heads),
        place_(problem, head_) {}

  // Memory is read in two rounds: what no slot is needed for, and the states.
  __device__ __forceinline__ void run() {
    instruction::let_next_kernel_start();
    const First weight = load_gates(gate_weight());
    uint2 taps_weight[kParts];
    load_taps_weight(taps_weight);
    copy_constants();
    instruction::wait_for_previous_kernel();
    const int32_t slot = token_ < p_.live_tokens ? p_.slots[size_t{token_} * p_.slot_stride] : 0;
    const First x = load_gates(gate_x());
    uint16_t own[kParts];
#pragma unroll
    for (uint32_t i = 0; i < kParts; ++i) own[i] = p_.qkvz[row_place(part(i))];
    if (slot <= 0) {  // so it is for the whole cluster
      if (threadIdx.x < kHead) p_.out[out_place()] = 0;
      return;
    }
    uint4* const state = rows_of_state(slot);
#pragma unroll
    for (uint32_t i = 0; i < kRows; ++i) {
#pragma unroll
      for (uint32_t j = 0; j < kUnits; ++j)
        instruction::copy_once(instruction::shared_place(copied(i, j)), state + place(i, j));
    }
    instruction::end_copies();
    uint2 taps[kParts];  // a channel's four tokens, oldest first
    load_taps(slot, own, taps);
    multiply_gates(x, weight);
    convolve(taps, taps_weight);
    if (place_.share > 1) instruction::begin_cluster_barrier();
    instruction::wait_for_copies<0>();
    __syncthreads();
    update(state);
    // All blocks of the cluster have read what this replaces.
    if (place_.share > 1) instruction::end_cluster_barrier();
    keep_taps(slot, taps);
    __syncthreads();
    if (threadIdx.x < kHead) {
      const float output = normalized() * output_gate(p_, s_.parts[3][threadIdx.x]);
      p_.out[out_place()] = static_cast<uint16_t>(pair_of(output, 0));
    }
  }

 private:
  // Eight lanes have a row: unit 8 j + lane of it. A warp has four neighbouring rows at a time.
  static constexpr uint32_t kLanesOfRow = 8, kRowsAtATime = kThreads / kLanesOfRow;
  static constexpr uint32_t kRows = kHead / kRowsAtATime, kUnits = kHead / kEach / kLanesOfRow;
  static constexpr uint32_t kFours = kEach / 4;  // of a unit
  static constexpr uint32_t kParts = 4 * kHead / kThreads;  // of which a thread has an element

  __device__ __forceinline__ static uint32_t warp() { return threadIdx.x / kLanes; }
  __device__ __forceinline__ static uint32_t lane_of_row() { return threadIdx.x % kLanesOfRow; }
  __device__ __forceinline__ static uint32_t row(uint32_t i) {
    return i * kRowsAtATime + threadIdx.x / kLanesOfRow;
  }
  __device__ __forceinline__ static uint32_t unit(uint32_t j) { return j * kLanesOfRow + lane_of_row(); }
  __device__ __forceinline__ static uint32_t place(uint32_t i, uint32_t j) {
    return row(i) * (kHead / kEach) + unit(j);
  }
  __device__ __forceinline__ uint4* copied(uint32_t i, uint32_t j) const {
    return s_.state + (i * kUnits + j) * kThreads + threadIdx.x;
  }
  __device__ __forceinline__ uint4* rows_of_state(int32_t slot) const {
    constexpr int64_t kBytes = 16 / kEach;
    return reinterpret_cast<uint4*>(static_cast<uint8_t*>(p_.state) +
                                    (slot * p_.state_slot_stride + int64_t{head_} * kHead * kHead) * kBytes);
  }

  // Number i of the parts of which a thread has element `column()`.
  __device__ __forceinline__ static uint32_t part(uint32_t i) {
    return i * (kThreads / kHead) + threadIdx.x / kHead;
  }
  __device__ __forceinline__ static uint32_t column() { return threadIdx.x % kHead; }
  __device__ __forceinline__ size_t out_place() const {
    return (size_t{token_} * p_.value_heads + head_) * kHead + threadIdx.x;
  }
  // This thread's element of a part, in qkvz.
  __device__ __forceinline__ size_t row_place(uint32_t part) const {
    return size_t{token_} * p_.qkvz_stride + place_.column(part, p_.is_interleaved) + column();
  }

  // The norm's weight and the numbers of this head, to shared memory.
  __device__ __forceinline__ void copy_constants() const {
    if (threadIdx.x < kHead) copy(s_.norm + threadIdx.x, p_.norm + threadIdx.x);
    if (threadIdx.x != kThreads - 1) return;
    copy(&s_.a_log, p_.a_log + head_);
    copy(&s_.dt_bias, p_.dt_bias + head_);
  }
  __device__ __forceinline__ static void copy(float* to, const float* from) {
    instruction::copy_word(instruction::shared_place(to), reinterpret_cast<const uint32_t*>(from));
  }

  // b is of the first half of the threads, a of the second. The first loads of a thread:
  static constexpr uint32_t kHalf = kThreads / 2, kFirst = 256 / kHalf;
  struct First {
    uint4 units[kFirst];
  };
  __device__ __forceinline__ const uint4* gate_x() const {
    return reinterpret_cast<const uint4*>(p_.x + size_t{token_} * p_.columns);
  }
  __device__ __forceinline__ const uint4* gate_weight() const {
    const uint32_t row = place_.gate(threadIdx.x / kHalf, p_.is_interleaved);
    return reinterpret_cast<const uint4*>(p_.gates + size_t{row} * p_.columns);
  }
  __device__ __forceinline__ static uint32_t gate_place(uint32_t i) { return i * kHalf + threadIdx.x % kHalf; }
  __device__ __forceinline__ First load_gates(const uint4* from) const {
    First gates;
#pragma unroll
    for (uint32_t i = 0; i < kFirst; ++i) {
      gates.units[i] = make_uint4(0, 0, 0, 0);
      if (gate_place(i) < p_.columns / 8) gates.units[i] = from[gate_place(i)];
    }
    return gates;
  }
  __device__ __forceinline__ void multiply_gates(const First& x, const First& weight) const {
    float sum = 0;
#pragma unroll
    for (uint32_t i = 0; i < kFirst; ++i) sum += dot(x.units[i], weight.units[i]);
    for (uint32_t i = gate_place(kFirst); i < p_.columns / 8; i += kHalf)
      sum += dot(gate_x()[i], gate_weight()[i]);
    sum = sum_of_lanes<kLanes>(sum);
    if (threadIdx.x % kLanes == 0) s_.gates[threadIdx.x / kHalf][warp() % (F::kWarps / 2)] = sum;
  }
  __device__ __forceinline__ static void add_pair(float& sum, uint32_t a, uint32_t b) {
    sum = __builtin_fmaf(low(a), low(b), sum);
    sum = __builtin_fmaf(high(a), high(b), sum);
  }
  __device__ __forceinline__ static float dot(const uint4& a, const uint4& b) {
    float x = 0, y = 0;
    add_pair(x, a.x, b.x), add_pair(y, a.y, b.y);
    add_pair(x, a.z, b.z), add_pair(y, a.w, b.w);
    return x + y;
  }
  // As a linear layer rounds it.
  __device__ __forceinline__ float gate_sum(uint32_t is_a) const {
    float sum = 0;
#pragma unroll
    for (uint32_t i = 0; i < F::kWarps / 2; ++i) sum += s_.gates[is_a][i];
    return rounded(sum);
  }

  __device__ __forceinline__ void load_taps_weight(uint2 (&weight)[kParts]) const {
#pragma unroll
    for (uint32_t i = 0; i < kParts; ++i) {
      if (part(i) == 3) continue;
      weight[i] = reinterpret_cast<const uint2*>(p_.conv_weight)[place_.channel(part(i)) + column()];
    }
  }
  __device__ __forceinline__ uint16_t* conv_place(int32_t slot, uint32_t part) const {
    return p_.conv_state + slot * p_.conv_slot_stride +
           int64_t{place_.channel(part) + column()} * p_.conv_channel_stride;
  }
  __device__ __forceinline__ void load_taps(int32_t slot, const uint16_t (&own)[kParts],
                                            uint2 (&taps)[kParts]) const {
#pragma unroll
    for (uint32_t i = 0; i < kParts; ++i) {
      taps[i] = make_uint2(0, uint32_t{own[i]} << 16);
      if (part(i) == 3) continue;
      const uint16_t* const state = conv_place(slot, part(i));
      taps[i].x = state[0] | uint32_t{state[p_.conv_token_stride]} << 16;
      taps[i].y |= state[2 * p_.conv_token_stride];
    }
  }
  // silu of the convolution, rounded; z stays as it is.
  __device__ __forceinline__ void convolve(const uint2 (&taps)[kParts], const uint2 (&weight)[kParts]) const {
#pragma unroll
    for (uint32_t i = 0; i < kParts; ++i) {
      float result = high(taps[i].y);
      if (part(i) != 3) {
        const float sum = (low(taps[i].x) * low(weight[i].x) + high(taps[i].x) * high(weight[i].x)) +
                          (low(taps[i].y) * low(weight[i].y) + high(taps[i].y) * high(weight[i].y));
        result = rounded(sum * sigmoid(sum));
      }
      s_.parts[part(i)][column()] = result;
      if (part(i) >= 2) continue;
      const float squares = sum_of_lanes<kLanes>(result * result);
      if (threadIdx.x % kLanes == 0) s_.squares[part(i)][column() / kLanes] = squares;
    }
  }
  // The key's and query's channels are the first block's of the cluster.
  __device__ __forceinline__ void keep_taps(int32_t slot, const uint2 (&taps)[kParts]) const {
#pragma unroll
    for (uint32_t i = 0; i < kParts; ++i) {
      if (part(i) == 3 || (part(i) < 2 && place_.rank != 0)) continue;
      uint16_t* const state = conv_place(slot, part(i));
      state[0] = static_cast<uint16_t>(taps[i].x >> 16);
      state[p_.conv_token_stride] = static_cast<uint16_t>(taps[i].y);
      state[2 * p_.conv_token_stride] = static_cast<uint16_t>(taps[i].y >> 16);
    }
  }

  __device__ __forceinline__ float factor_of(uint32_t part) const {
    const float(&s)[kHead / kLanes] = s_.squares[part];
    return norm_factor((s[0] + s[1]) + (s[2] + s[3]));
  }

  // One pass over the state has both of the sums that arithmetic.cuh's Gates speak of.
  __device__ __forceinline__ void update(uint4* state) const {
    const float q_factor = factor_of(0) * kQueryScale, k_factor = factor_of(1);
    const auto [decay, beta] = gates_of(gate_sum(0), gate_sum(1), s_.a_log, s_.dt_bias);
    float products = 0;
    float with_k[kRows] = {}, with_q[kRows] = {};
#pragma unroll
    for (uint32_t j = 0; j < kUnits; ++j) {
#pragma unroll
      for (uint32_t four = 0; four < kFours; ++four)
        add_dot(products, four_of(1, j, four), four_of(0, j, four));
#pragma unroll
      for (uint32_t i = 0; i < kRows; ++i) {
        const uint4 unit = *copied(i, j);
#pragma unroll
        for (uint32_t four = 0; four < kFours; ++four) {
          const float4 x = State::unpack(unit, four);
          add_dot(with_k[i], x, four_of(1, j, four));
          add_dot(with_q[i], x, four_of(0, j, four));
        }
      }
    }
    products = sum_of_lanes<kLanesOfRow>(products) * k_factor * q_factor;
    float change[kRows];
#pragma unroll
    for (uint32_t i = 0; i < kRows; ++i) {
      const float old = decay * sum_of_lanes<kLanesOfRow>(with_k[i]) * k_factor;
      const float new_value = beta * (s_.parts[2][row(i)] - old);
      const float output = decay * sum_of_lanes<kLanesOfRow>(with_q[i]) * q_factor + new_value * products;
      if (lane_of_row() == 0) s_.o[row(i)] = rounded(output);
      change[i] = new_value * k_factor;
    }
#pragma unroll
    for (uint32_t j = 0; j < kUnits; ++j) {
#pragma unroll
      for (uint32_t i = 0; i < kRows; ++i) {
        uint4 unit = *copied(i, j);
#pragma unroll
        for (uint32_t four = 0; four < kFours; ++four) {
          const float4 k = four_of(1, j, four);
          float4 x = State::unpack(unit, four);
          x.x = __builtin_fmaf(change[i], k.x, decay * x.x);
          x.y = __builtin_fmaf(change[i], k.y, decay * x.y);
          x.z = __builtin_fmaf(change[i], k.z, decay * x.z);
          x.w = __builtin_fmaf(change[i], k.w, decay * x.w);
          State::pack(unit, four, x);
        }
        state[place(i, j)] = unit;
      }
    }
  }
  // Four numbers of the query (part 0) or the key (1), those that belong to a lane's units.
  __device__ __forceinline__ float4 four_of(uint32_t part, uint32_t j, uint32_t four) const {
    return *reinterpret_cast<const float4*>(s_.parts[part] + unit(j) * kEach + four * 4);
  }
  // In the first four warps, each of which adds up all squares.
  __device__ __forceinline__ float normalized() const {
    const float4 four = *reinterpret_cast<const float4*>(s_.o + threadIdx.x % kLanes * 4);
    const float squares =
        sum_of_lanes<kLanes>((four.x * four.x + four.y * four.y) + (four.z * four.z + four.w * four.w));
    return s_.o[threadIdx.x] * rsqrtf(squares / kHead + p_.epsilon) * s_.norm[threadIdx.x];
  }
  const Problem& p_;
  Shared<F>& s_;
  const uint32_t token_, head_;
  const Place place_;
};

}  // namespace nibble::gated_delta
