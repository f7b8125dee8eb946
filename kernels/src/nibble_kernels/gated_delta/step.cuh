// One token of linear attention with the gated delta rule, for sequences side by side: the gates' product,
// the convolution of four tokens, the update of the state, the output's norm and its gate.
//
// A thread block has one or two value heads of a key head and a token, each with 128 rows of the state, of 128
// keys. The blocks of a key head form a cluster, because all of them read its convolution's state, which one
// of them writes. A token's results depend neither on the others nor on the heads of a block.
//
// The first half of the threads has the channels of query and key, the second those of the values.
#pragma once

#include "gated_delta/state_rows.cuh"

namespace nibble::gated_delta {

// State: Floats or Bfloats. Heads: of a block. Blocks: at least so many on a multiprocessor of SM90; for other
// GPUs the compiler keeps more in registers.
template <class StateType, uint32_t Heads, uint32_t Blocks>
struct Form {
  using State = StateType;
  static constexpr uint32_t kThreads = gated_delta::kThreads, kHeads = Heads, kBlocksOnHopper = Blocks;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
  static constexpr uint32_t kBlocks = Blocks;
#else
  static constexpr uint32_t kBlocks = 1;
#endif
};

// Calls f with the fastest form on an H200 (benchmarks/offline_gpu/gated_delta_chain.cu). Results are the same.
template <class F>
auto with_form(const Problem& p, bool is_float, uint32_t multiprocessors, F&& f) {
  const uint64_t heads = uint64_t{p.tokens} * p.value_heads;
  const bool are_few = heads <= 2 * multiprocessors;
  if (is_float) return are_few ? f(Form<Floats, 1, 2>{}) : f(Form<Floats, 1, 3>{});
  if (are_few) return f(Form<Bfloats, 1, 2>{});
  const bool are_pairs = p.value_heads / p.key_heads % 2 == 0 && heads > 4 * multiprocessors;
  return are_pairs ? f(Form<Bfloats, 2, 3>{}) : f(Form<Bfloats, 1, 4>{});
}

template <class F>
struct alignas(16) Shared {
  Inputs in;
  float values[F::kHeads][kHead], outputs[F::kHeads][kHead], norm[kHead];
  uint4 state[F::kHeads][Rows<typename F::State>::kUnits * kThreads];
  float sums[3][kHead / kLanes];  // of the warps of query and key: squares of both, products
  float gates[F::kHeads][2][4];   // sums of b and of a
  float a_log[F::kHeads], dt_bias[F::kHeads];
};

template <class F>
class Step {
 public:
  using MyRows = Rows<typename F::State>;
  static constexpr uint32_t kHeads = F::kHeads;

  // place: of the block's first head.
  __device__ __forceinline__ Step(const Problem& problem, Shared<F>& shared, uint32_t token, const Place& place)
      : p_(problem),
        s_(shared),
        token_(token),
        head_(place.group * place.share + place.rank),
        place_(place) {}

  // Memory is read in two rounds: what no slot is needed for, and the states.
  __device__ __forceinline__ void run() {
    instruction::let_next_kernel_start();
    const First weight = load_gates(gate_weight());
    uint2 taps_weight[2];
    load_taps_weight(taps_weight);
    copy_constants();
    instruction::wait_for_previous_kernel();
    const int32_t slot = token_ < p_.live_tokens ? p_.slots[size_t{token_} * p_.slot_stride] : 0;
    const First x = load_gates(gate_x());
    uint16_t own[2] = {}, z = 0;
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      if (has_channel(i)) own[i] = row()[place_.column(part(i), p_.is_interleaved) + offset(i)];
    }
    if (has_output()) z = row()[place_.column(3, p_.is_interleaved) + threadIdx.x];
    if (slot <= 0) {  // so it is for the whole cluster
      if (has_output()) outputs()[threadIdx.x] = 0;
      return;
    }
    uint4* const state = state_of(slot);
#pragma unroll
    for (uint32_t head = 0; head < kHeads; ++head) copy_state(head, state);
    uint2 taps[2];  // a channel's four tokens, oldest first
    load_taps(slot, own, taps);
    multiply_gates(x, weight);
    convolve(taps, taps_weight);
    const bool is_alone = place_.share == kHeads;
    if (!is_alone) instruction::begin_cluster_barrier();
    instruction::wait_for_copies<kHeads - 1>();
    __syncthreads();
    update(0, state);
    if constexpr (kHeads > 1) {
      instruction::wait_for_copies<0>();
      update(1, state);
    }
    // All blocks of the cluster have read what this replaces.
    if (!is_alone) instruction::end_cluster_barrier();
    keep_taps(slot, taps);
    __syncthreads();
    if (!has_output()) return;
    const float output = normalized() * output_gate(p_, low(z));
    outputs()[threadIdx.x] = static_cast<uint16_t>(pair_of(output, 0));
  }

 private:
  __device__ __forceinline__ static bool is_second_half() { return threadIdx.x >= kHead; }
  __device__ __forceinline__ static uint32_t column() { return threadIdx.x % kHead; }
  // A thread has a channel of query and key, or one of each value head.
  __device__ __forceinline__ static bool has_channel(uint32_t i) { return i < kHeads || !is_second_half(); }
  __device__ __forceinline__ static uint32_t part(uint32_t i) { return is_second_half() ? 2 : i; }
  __device__ __forceinline__ static uint32_t offset(uint32_t i) {  // from the part's first channel
    return column() + (is_second_half() ? i * kHead : 0);
  }
  __device__ __forceinline__ static bool has_output() { return threadIdx.x < kHeads * kHead; }
  __device__ __forceinline__ const uint16_t* row() const { return p_.qkvz + size_t{token_} * p_.qkvz_stride; }
  __device__ __forceinline__ uint16_t* outputs() const {
    return p_.out + (size_t{token_} * p_.value_heads + head_) * kHead;
  }

  __device__ __forceinline__ uint4* own_units(uint32_t head) const { return s_.state[head] + threadIdx.x; }
  static constexpr uint32_t kHeadUnits = kHead * kHead / F::State::kEach;
  __device__ __forceinline__ uint4* state_of(int32_t slot) const {
    constexpr int64_t kBytes = 16 / F::State::kEach;
    return reinterpret_cast<uint4*>(static_cast<uint8_t*>(p_.state) + slot * p_.state_slot_stride * kBytes) +
           head_ * kHeadUnits + MyRows::first();
  }
  __device__ __forceinline__ void copy_state(uint32_t head, const uint4* state) const {
#pragma unroll
    for (uint32_t i = 0; i < MyRows::kUnits; ++i)
      instruction::copy_once(instruction::shared_place(own_units(head) + i * kThreads),
                             state + head * kHeadUnits + MyRows::step(i));
    instruction::end_copies();
  }
  __device__ __forceinline__ void update(uint32_t head, uint4* state) const {
    MyRows::update(own_units(head), s_.in, s_.values[head], change(head), state + head * kHeadUnits,
                   s_.outputs[head]);
  }

  // The norm's weight and the numbers of these heads, to shared memory.
  __device__ __forceinline__ void copy_constants() const {
    if (!is_second_half()) {
      copy(s_.norm + threadIdx.x, p_.norm + threadIdx.x);
    } else if (column() < kHeads) {
      copy(s_.a_log + column(), p_.a_log + head_ + column());
      copy(s_.dt_bias + column(), p_.dt_bias + head_ + column());
    }
  }
  __device__ __forceinline__ static void copy(float* to, const float* from) {
    instruction::copy_word(instruction::shared_place(to), reinterpret_cast<const uint32_t*>(from));
  }

  // Neighbouring threads multiply b's row of a head, the next ones a's. There are 128 sums of a row, so that
  // the order of additions is the same for any number of heads: a thread has one for each head.
  static constexpr uint32_t kGateSums = 128, kGateThreads = kGateSums / kHeads, kFirst = 256 / kGateThreads;
  struct First {  // loads of a thread
    uint4 units[kFirst];
  };
  __device__ __forceinline__ static uint32_t gate_head() { return threadIdx.x / kGateThreads / 2; }
  __device__ __forceinline__ static uint32_t is_a() { return threadIdx.x / kGateThreads % 2; }
  __device__ __forceinline__ const uint4* gate_x() const {
    return reinterpret_cast<const uint4*>(p_.x + size_t{token_} * p_.columns);
  }
  __device__ __forceinline__ const uint4* gate_weight() const {
    const uint32_t row = place_.gate(is_a(), p_.is_interleaved) + gate_head();
    return reinterpret_cast<const uint4*>(p_.gates + size_t{row} * p_.columns);
  }
  __device__ __forceinline__ static uint32_t gate_place(uint32_t i) {
    return i / kHeads * kGateSums + i % kHeads * kGateThreads + threadIdx.x % kGateThreads;
  }
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
    float sums[kHeads] = {};
#pragma unroll
    for (uint32_t i = 0; i < kFirst; ++i) sums[i % kHeads] += dot(x.units[i], weight.units[i]);
#pragma unroll
    for (uint32_t n = 0; n < kHeads; ++n) {
      for (uint32_t i = gate_place(kFirst + n); i < p_.columns / 8; i += kGateSums)
        sums[n] += dot(gate_x()[i], gate_weight()[i]);
      const float sum = sum_of_lanes<kLanes>(sums[n]);
      const uint32_t warp = (n * kGateThreads + threadIdx.x % kGateThreads) / kLanes;
      if (threadIdx.x % kLanes == 0) s_.gates[gate_head()][is_a()][warp] = sum;
    }
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
  __device__ __forceinline__ static float sum_of(const float (&s)[4]) { return (s[0] + s[1]) + (s[2] + s[3]); }

  __device__ __forceinline__ void load_taps_weight(uint2 (&weight)[2]) const {
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      if (has_channel(i))
        weight[i] = reinterpret_cast<const uint2*>(p_.conv_weight)[place_.channel(part(i)) + offset(i)];
    }
  }
  __device__ __forceinline__ uint16_t* conv_place(int32_t slot, uint32_t i) const {
    return p_.conv_state + slot * p_.conv_slot_stride +
           int64_t{place_.channel(part(i)) + offset(i)} * p_.conv_channel_stride;
  }
  __device__ __forceinline__ void load_taps(int32_t slot, const uint16_t (&own)[2], uint2 (&taps)[2]) const {
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      if (!has_channel(i)) continue;
      const uint16_t* const state = conv_place(slot, i);
      taps[i].x = state[0] | uint32_t{state[p_.conv_token_stride]} << 16;
      taps[i].y = state[2 * p_.conv_token_stride] | uint32_t{own[i]} << 16;
    }
  }
  // silu of the convolution, rounded.
  __device__ __forceinline__ static float convolved(const uint2& taps, const uint2& weight) {
    const float sum = (low(taps.x) * low(weight.x) + high(taps.x) * high(weight.x)) +
                      (low(taps.y) * low(weight.y) + high(taps.y) * high(weight.y));
    return rounded(sum * sigmoid(sum));
  }
  __device__ __forceinline__ void convolve(const uint2 (&taps)[2], const uint2 (&weight)[2]) const {
    float results[2] = {};
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      if (has_channel(i)) results[i] = convolved(taps[i], weight[i]);
    }
    const auto [query, key] = results;  // in the first half
    const float sums[3] = {sum_of_lanes<kLanes>(query * query), sum_of_lanes<kLanes>(key * key),
                           sum_of_lanes<kLanes>(query * key)};
    if (is_second_half()) {
#pragma unroll
      for (uint32_t head = 0; head < kHeads; ++head) s_.values[head][column()] = results[head];
      return;
    }
    s_.in.query[column()] = query, s_.in.key[column()] = key;
    s_.in.bfloats[0][column()] = static_cast<uint16_t>(pair_of(key, 0));
    s_.in.bfloats[1][column()] = static_cast<uint16_t>(pair_of(query, 0));
    if (threadIdx.x % kLanes != 0) return;
#pragma unroll
    for (uint32_t i = 0; i < 3; ++i) s_.sums[i][threadIdx.x / kLanes] = sums[i];
  }
  // The key's and query's channels are the first block's of the cluster.
  __device__ __forceinline__ void keep_taps(int32_t slot, const uint2 (&taps)[2]) const {
    if (!is_second_half() && place_.rank != 0) return;
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      if (!has_channel(i)) continue;
      uint16_t* const state = conv_place(slot, i);
      state[0] = static_cast<uint16_t>(taps[i].x >> 16);
      state[p_.conv_token_stride] = static_cast<uint16_t>(taps[i].y);
      state[2 * p_.conv_token_stride] = static_cast<uint16_t>(taps[i].y >> 16);
    }
  }

  // b and a as a linear layer rounds them.
  __device__ __forceinline__ Change change(uint32_t head) const {
    const auto& sums = s_.gates[head];
    const Gates gates =
        gates_of(rounded(sum_of(sums[0])), rounded(sum_of(sums[1])), s_.a_log[head], s_.dt_bias[head]);
    const float q_factor = norm_factor(sum_of(s_.sums[0])) * kQueryScale;
    const float k_factor = norm_factor(sum_of(s_.sums[1]));
    return {gates.decay, gates.beta, k_factor, q_factor, sum_of(s_.sums[2]) * k_factor * q_factor};
  }
  // Each warp adds up all squares of its head.
  __device__ __forceinline__ float normalized() const {
    const float(&outputs)[kHead] = s_.outputs[threadIdx.x / kHead];
    const float4 four = *reinterpret_cast<const float4*>(outputs + threadIdx.x % kLanes * 4);
    const float squares =
        sum_of_lanes<kLanes>((four.x * four.x + four.y * four.y) + (four.z * four.z + four.w * four.w));
    return outputs[column()] * rsqrtf(squares / kHead + p_.epsilon) * s_.norm[column()];
  }

  const Problem& p_;
  Shared<F>& s_;
  const uint32_t token_, head_;
  const Place place_;
};

}  // namespace nibble::gated_delta
