// Time of a decode step of linear attention (gated_delta_step) in Qwen3.6-35B-A3B's shape, behind a stand-in
// for the product of queries, keys, values and gates, in CUDA graphs. Without torch.
//
//   nvcc -std=c++20 -O3 --expt-relaxed-constexpr -arch=sm_90a -I kernels/src/nibble_kernels \
//     -I kernels/src/nibble_kernels/include -o gated_delta_chain benchmarks/offline_gpu/gated_delta_chain.cu
//   ./gated_delta_chain [bfloat16|float32 TOKENS]     one call alone, for ncu
//
// Each call has other sequences, drawn from a pool that exceeds the cache. Medians, in us a call, less the
// stand-in's own time, of each form: heads of a block, blocks of a multiprocessor. A star marks the form that
// gated_delta_step takes. "copy" reads and writes the same states only.
#include <cuda_bf16.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "device_memory.cuh"
#include "gated_delta/step.cuh"
#include "nibble/overlap.cuh"

namespace {

using namespace nibble::gated_delta;
using nibble::launch_clusters_early;
using nibble::launch_early;

constexpr uint32_t kKeyHeads = 16, kValueHeads = 32, kColumns = 2048, kPool = 1024, kMostTokens = 128;
constexpr uint32_t kChannels = (2 * kKeyHeads + kValueHeads) * kHead;
constexpr uint32_t kRow = 2 * (kKeyHeads + kValueHeads) * kHead, kLayers = 4, kCalls = 12, kRounds = 15;

uint16_t bfloat(float x) { return static_cast<__nv_bfloat16_raw>(__float2bfloat16(x)).x; }

uint16_t* random_bfloats(size_t count, float scale, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, scale);
  std::vector<uint16_t> some(std::min<size_t>(count, 1 << 16)), all(count);
  for (auto& one : some) one = bfloat(normal(random));
  for (size_t i = 0; i < count; ++i) all[i] = some[i % some.size()];
  return copied(all);
}

// Writes what the step reads, as a product does.
__global__ void __launch_bounds__(256) product(const uint4* from, uint4* to, uint32_t words) {
  nibble::wait_for_kernel_before();
  for (uint32_t i = blockIdx.x * 256 + threadIdx.x; i < words; i += gridDim.x * 256) to[i] = from[i];
}

// The states alone.
__global__ void __launch_bounds__(256) copy_states(uint4* states, const int32_t* slots, uint32_t units) {
  nibble::wait_for_kernel_before();
  uint4* const state = states + size_t(slots[blockIdx.y]) * units + blockIdx.x * 2048 + threadIdx.x;
  uint4 all[8];
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) all[i] = state[i * 256];
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) all[i].x ^= 0x80008000u, state[i * 256] = all[i];
}

template <class F>
__global__ void __launch_bounds__(F::kThreads, F::kBlocks) step(const __grid_constant__ Problem problem) {
  extern __shared__ uint4 memory[];
  const Place place(problem, gridDim.x * F::kHeads, blockIdx.y, blockIdx.x * F::kHeads);
  Step<F>(problem, *reinterpret_cast<Shared<F>*>(memory), blockIdx.z, place).run();
}

class Bench {
 public:
  Bench() {
    check(cudaStreamCreate(&stream_));
    int multiprocessors = 0;
    check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
    multiprocessors_ = static_cast<uint32_t>(multiprocessors);
    x_ = random_bfloats(kMostTokens * kColumns, 1, 1);
    qkvz_from_ = random_bfloats(size_t{kMostTokens} * kRow, 1, 2);
    qkvz_ = allocate<uint16_t>(size_t{kMostTokens} * kRow);
    for (uint32_t i = 0; i < kLayers; ++i) {
      gates_.push_back(random_bfloats(size_t{2} * kValueHeads * kColumns, 0.02f, 3 + i));
      conv_weight_.push_back(random_bfloats(kChannels * kTaps, 0.3f, 30 + i));
    }
    conv_state_ = random_bfloats(size_t{kPool} * kChannels * 3, 1, 5);
    state_ = allocate<float>(size_t{kPool} * kValueHeads * kHead * kHead);
    numbers_ = copied(std::vector<float>(kHead, 0.5f));
    out_ = allocate<uint16_t>(size_t{kMostTokens} * kValueHeads * kHead);
    std::mt19937 random(9);
    for (uint32_t call = 0; call < kCalls; ++call) {
      std::vector<int32_t> slots;
      for (uint32_t i = 1; i < kPool; ++i) slots.push_back(static_cast<int32_t>(i));
      std::shuffle(slots.begin(), slots.end(), random);
      slots_.push_back(copied(slots));
    }
  }

  void enqueue_product(uint32_t tokens) {
    const uint32_t words = tokens * kRow / 8;
    check(launch_early(std::min(132u, words / 256), 256, 0, stream_, product,
                       reinterpret_cast<const uint4*>(qkvz_from_), reinterpret_cast<uint4*>(qkvz_), words));
  }

  Problem problem_of(uint32_t tokens, uint32_t call) const {
    Problem p{};
    p.x = x_, p.gates = gates_[call % kLayers], p.qkvz = qkvz_;
    p.conv_weight = conv_weight_[call % kLayers];
    p.conv_state = conv_state_, p.state = state_, p.slots = slots_[call];
    p.a_log = p.dt_bias = p.norm = numbers_;
    p.out = out_, p.qkvz_stride = kRow;
    p.conv_slot_stride = int64_t{kChannels} * 3, p.conv_channel_stride = 1, p.conv_token_stride = kChannels;
    p.state_slot_stride = int64_t{kValueHeads} * kHead * kHead;
    p.tokens = p.live_tokens = tokens, p.columns = kColumns;
    p.key_heads = kKeyHeads, p.value_heads = kValueHeads, p.slot_stride = 1;
    p.epsilon = 1e-6f, p.is_interleaved = 1;
    return p;
  }

  template <class F>
  void enqueue_step(uint32_t tokens, uint32_t call) {
    const uint32_t ranks = kValueHeads / kKeyHeads / F::kHeads;
    check(launch_clusters_early(ranks, dim3(ranks, kKeyHeads, tokens), F::kThreads, sizeof(Shared<F>),
                                stream_, step<F>, problem_of(tokens, call)));
  }
  template <class F>
  bool is_chosen(uint32_t tokens) const {
    constexpr bool kIsFloat = std::is_same_v<typename F::State, Floats>;
    return with_form(problem_of(tokens, 0), kIsFloat, multiprocessors_,
                     []<class Chosen>(Chosen) { return std::is_same_v<Chosen, F>; });
  }

  void enqueue_copy(uint32_t tokens, uint32_t call, uint32_t number_bytes) {
    const uint32_t units = kValueHeads * kHead * kHead * number_bytes / 16;
    cudaLaunchAttribute attributes[2]{};
    cudaLaunchConfig_t config = nibble::early_config(attributes, 1, 1, 256, 0, stream_);
    config.gridDim = dim3(units / 2048, tokens);
    check(cudaLaunchKernelEx(&config, copy_states, reinterpret_cast<uint4*>(state_),
                             static_cast<const int32_t*>(slots_[call]), units));
  }

  // Medians of a call of each, in turns.
  std::vector<double> time(const std::vector<std::function<void(uint32_t)>>& all) {
    std::vector<cudaGraphExec_t> graphs;
    for (const auto& enqueue : all) {
      check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal));
      for (uint32_t call = 0; call < kCalls; ++call) enqueue(call);
      cudaGraph_t graph;
      cudaGraphExec_t executable;
      check(cudaStreamEndCapture(stream_, &graph));
      check(cudaGraphInstantiate(&executable, graph, 0));
      graphs.push_back(executable);
    }
    cudaEvent_t begin, end;
    check(cudaEventCreate(&begin)), check(cudaEventCreate(&end));
    std::vector<std::vector<double>> found(all.size());
    for (uint32_t round = 0; round < kRounds; ++round) {
      for (size_t i = 0; i < graphs.size(); ++i) {
        check(cudaGraphLaunch(graphs[i], stream_));
        check(cudaEventRecord(begin, stream_));
        for (int k = 0; k < 3; ++k) check(cudaGraphLaunch(graphs[i], stream_));
        check(cudaEventRecord(end, stream_));
        check(cudaEventSynchronize(end));
        float ms = 0;
        check(cudaEventElapsedTime(&ms, begin, end));
        found[i].push_back(ms * 1e3 / 3 / kCalls);
      }
    }
    std::vector<double> medians;
    for (auto& times : found) {
      std::nth_element(times.begin(), times.begin() + kRounds / 2, times.end());
      medians.push_back(times[kRounds / 2]);
    }
    return medians;
  }

  template <class... Forms>
  void compare(const char* name, uint32_t number_bytes) {
    for (const uint32_t tokens : {1u, 2u, 4u, 8u, 16u, 32u, 64u, 128u}) {
      const std::vector<double> t = time(
          {[&](uint32_t) { enqueue_product(tokens); },
           [&](uint32_t call) { enqueue_product(tokens), enqueue_copy(tokens, call, number_bytes); },
           [&](uint32_t call) { enqueue_product(tokens), enqueue_step<Forms>(tokens, call); }...});
      std::printf("%s, %3u tokens: copy %6.2f", name, tokens, t[1] - t[0]);
      const double* found = t.data() + 2;
      (std::printf(" | %u head, %u blocks%s %6.2f", Forms::kHeads, Forms::kBlocksOnHopper,
                   is_chosen<Forms>(tokens) ? "*" : "", *found++ - t[0]),
       ...);
      std::printf("\n");
    }
  }

  // One call of the form that is taken.
  void once(bool is_float, uint32_t tokens) {
    for (uint32_t call = 0; call < 3; ++call) {
      enqueue_product(tokens);
      with_form(problem_of(tokens, call), is_float, multiprocessors_,
                [&]<class F>(F) { enqueue_step<F>(tokens, call); });
    }
    check(cudaDeviceSynchronize());
  }

 private:
  cudaStream_t stream_{};
  uint32_t multiprocessors_;
  uint16_t *x_, *qkvz_from_, *qkvz_, *conv_state_, *out_;
  std::vector<uint16_t*> gates_, conv_weight_;
  void* state_;
  float* numbers_;
  std::vector<int32_t*> slots_;
};

}  // namespace

int main(int count, char** words) {
  Bench bench;
  if (count == 3) {
    bench.once(std::string(words[1]) == "float32", static_cast<uint32_t>(std::atoi(words[2])));
    return 0;
  }
  bench.compare<Form<Bfloats, 1, 2>, Form<Bfloats, 1, 4>, Form<Bfloats, 2, 3>>("bfloat16", 2);
  bench.compare<Form<Floats, 1, 2>, Form<Floats, 1, 3>>("float32", 4);
  return 0;
}
