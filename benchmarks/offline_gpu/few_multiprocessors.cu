// The W4A16 decode kernel in the forms of SM12x, with GB10's limits, on a larger GPU: 48 multiprocessors, 99 KB of
// shared memory a block and 100 KB a multiprocessor. Beside it, what these multiprocessors read at most.
//
//   nvcc -std=c++20 -O3 -fmad=false --expt-relaxed-constexpr -arch=sm_90a -I kernels/src/nibble_kernels/include \
//     -I kernels/src/nibble_kernels -o few_multiprocessors benchmarks/offline_gpu/few_multiprocessors.cu
//   few_multiprocessors > few_multiprocessors.jsonl
#include <cuda.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "nvfp4_linear/decode.cuh"

namespace {

using namespace nibble::decode;

constexpr uint32_t kMultiprocessors = 48, kSharedBytes = 99 * 1024, kSharedOfAll = 100 * 1024;
constexpr uint32_t kSharedHere = 228 * 1024, kReservedBytes = 1024;
constexpr size_t kWeightBytes = size_t{1} << 30;  // copies of a weight, so that none stays in a cache
constexpr uint32_t kTurns = 5, kCalls = 400;

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("{\"error\": \"%s: %s\"}\n", what, cudaGetErrorString(error));
  std::exit(1);
}

// Calls a function of the driver, which is found when the program runs.
template <class... Parameters, class... Arguments>
void call(const char* name, CUresult (*)(Parameters...), Arguments... arguments) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult state;
  check(cudaGetDriverEntryPointByVersion(name, &found, CUDART_VERSION, cudaEnableDefault, &state), name);
  const CUresult result =
      found ? reinterpret_cast<CUresult (*)(Parameters...)>(found)(arguments...) : CUDA_ERROR_NOT_FOUND;
  if (result == CUDA_SUCCESS) return;
  std::printf("{\"error\": \"%s: %d\"}\n", name, static_cast<int>(result));
  std::exit(1);
}
#define CALL(function, ...) call(#function, static_cast<decltype(&(function))>(nullptr), __VA_ARGS__)

// A stream whose kernels run on so many multiprocessors.
cudaStream_t stream_on(uint32_t multiprocessors) {
  check(cudaFree(nullptr), "device");
  CUdevResource all{}, part{}, rest{};
  unsigned int groups = 1;
  CALL(cuDeviceGetDevResource, 0, &all, CU_DEV_RESOURCE_TYPE_SM);
  CALL(cuDevSmResourceSplitByCount, &part, &groups, &all, &rest, 0, multiprocessors);
  if (part.sm.smCount != multiprocessors) {
    std::printf("{\"error\": \"%u multiprocessors instead of %u\"}\n", part.sm.smCount, multiprocessors);
    std::exit(1);
  }
  CUdevResourceDesc description;
  CUgreenCtx context;
  CUstream stream;
  CALL(cuDevResourceGenerateDesc, &description, &part, 1);
  CALL(cuGreenCtxCreate, &context, description, 0, CU_GREEN_CTX_DEFAULT_STREAM);
  CALL(cuGreenCtxStreamCreate, &stream, context, CU_STREAM_NON_BLOCKING, 0);
  return stream;
}

template <class Form>
__global__ void __launch_bounds__(Form::kThreads, Form::kBlocks)
    multiply(const __grid_constant__ Problem problem) {
  extern __shared__ uint4 shared[];
  const uint32_t clusters = gridDim.x / problem.ranks;
  const Share share =
      share_of(problem.groups, blockIdx.x / problem.ranks, clusters, problem.groups_per_cluster);
  Multiplier<__nv_bfloat16, nibble::HalfOperand, Form>(problem, share, shared).run();
}

constexpr uint32_t kReadThreads = 1024, kReadsAtOnce = 8;
__global__ void __launch_bounds__(kReadThreads) read_all(const uint4* from, size_t count, uint32_t* to) {
  uint32_t all = 0;
  const size_t step = size_t{gridDim.x} * kReadThreads * kReadsAtOnce;
  for (size_t first = size_t{blockIdx.x} * kReadThreads * kReadsAtOnce; first < count; first += step) {
    uint4 values[kReadsAtOnce];
#pragma unroll
    for (uint32_t i = 0; i < kReadsAtOnce; ++i)
      values[i] = nibble::instruction::load_once(from + min(first + i * kReadThreads + threadIdx.x, count - 1));
#pragma unroll
    for (uint32_t i = 0; i < kReadsAtOnce; ++i) all |= values[i].x ^ values[i].y ^ values[i].z ^ values[i].w;
  }
  if (all == 0x12345678) *to = all;
}

// Nanoseconds of a call of f(number), of many in a row, in the best of some turns.
template <class F>
double time_of(cudaStream_t stream, uint32_t calls, F&& f) {
  check(cudaDeviceSynchronize(), "kernel");
  double best = 1e18;
  for (uint32_t turn = 0; turn < kTurns; ++turn) {
    const auto begin = std::chrono::steady_clock::now();
    for (uint32_t i = 0; i < calls; ++i) f(i);
    check(cudaStreamSynchronize(stream), "kernel");
    const std::chrono::duration<double, std::nano> taken = std::chrono::steady_clock::now() - begin;
    best = std::min(best, taken.count());
  }
  return best / calls;
}

uint32_t quotient_up(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

// As decode.cu launches it; as many blocks fit on a multiprocessor as on one with 100 KB.
template <class Form>
void launch(Problem p, uint32_t ranks, cudaStream_t stream) {
  const uint32_t chunks = quotient_up(p.chunks, ranks), fixed = Form::shared_bytes(0, Form::kTokens, true),
                 each = Form::shared_bytes(1, Form::kTokens, true) - fixed;
  p.ranks = ranks;
  p.chunks_per_phase = quotient_up(chunks, quotient_up(chunks, (kSharedBytes - fixed) / each));
  const uint32_t clusters = std::min(kMultiprocessors / ranks, p.groups);
  p.groups_per_cluster = p.groups / clusters;
  uint32_t bytes = Form::shared_bytes(p.chunks_per_phase, p.tokens, true);
  if (ranks > 1) bytes = std::max(bytes, kSharedBytes / 2 + 1024);
  const uint32_t fit = kSharedOfAll / (bytes + kReservedBytes);
  bytes = std::max(bytes, kSharedHere / (fit + 1) + kReservedBytes);  // not one more
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {ranks, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(clusters * ranks);
  config.blockDim = dim3(Form::kThreads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = ranks > 1 ? 2 : 1;
  check(cudaFuncSetAttribute(multiply<Form>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(bytes)),
        "shared memory");
  check(cudaLaunchKernelEx(&config, multiply<Form>, p), "launch");
}

struct Memory {
  uint8_t* weights;
  __nv_bfloat16 *x, *out;
};

// A weight of ones and x of ones: each sum is the number of columns.
bool is_right(const Memory& memory, const Problem& p) {
  std::vector<__nv_bfloat16> found(size_t{p.tokens} * p.outputs);
  check(cudaMemcpy(found.data(), memory.out, found.size() * 2, cudaMemcpyDeviceToHost), "result");
  return std::ranges::all_of(found, [](__nv_bfloat16 y) { return __bfloat162float(y) == 1.0f; });
}

template <class Form>
void measure(const Memory& memory, cudaStream_t stream, double reads, uint32_t tokens, uint32_t outputs,
             uint32_t columns) {
  Problem p{};
  p.x = reinterpret_cast<const uint4*>(memory.x);
  p.out = memory.out;
  p.upper_global_scale = p.lower_global_scale = 1.0f / static_cast<float>(columns);
  p.tokens = tokens;
  p.outputs = outputs;
  p.columns = columns;
  p.chunks = quotient_up(columns, kChunk);
  p.groups = quotient_up(outputs / 2, kGroup);
  const size_t tiles = size_t{p.chunks} * p.groups, bytes = tiles * kTileBytes;
  const uint32_t copies = static_cast<uint32_t>(kWeightBytes / bytes);
  // All codes, then all scales.
  check(cudaMemset(memory.weights, 0x22, copies * tiles * 1024), "codes");
  check(cudaMemset(memory.weights + copies * tiles * 1024, 0x38, copies * tiles * 128), "scales");
  for (uint32_t ranks = 1; ranks <= 4; ranks *= 2) {
    if (ranks > p.chunks) continue;
    check(cudaMemset(memory.out, 0xff, size_t{tokens} * outputs * 2), "memset");
    const double nanoseconds = time_of(stream, kCalls, [&](uint32_t call) {
      const size_t i = call % copies;
      p.codes = reinterpret_cast<const uint4*>(memory.weights + i * tiles * 1024);
      p.scales = reinterpret_cast<const uint32_t*>(memory.weights + copies * tiles * 1024 + i * tiles * 128);
      launch<Form>(p, ranks, stream);
    });
    const double speed = static_cast<double>(bytes) / nanoseconds;
    std::printf("{\"tokens\": %u, \"outputs\": %u, \"columns\": %u, \"ranks\": %u, \"right\": %s, "
                "\"microseconds\": %.2f, \"gb_per_s\": %.0f, \"of_reads\": %.3f}\n",
                tokens, outputs, columns, ranks, is_right(memory, p) ? "true" : "false", nanoseconds / 1000,
                speed, speed / reads);
    std::fflush(stdout);
  }
}

}  // namespace

int main() {
  const cudaStream_t stream = stream_on(kMultiprocessors);
  Memory memory;
  check(cudaMalloc(&memory.weights, kWeightBytes), "malloc");
  constexpr uint32_t kMostTokens = 16, kMostColumns = 16384, kMostOutputs = 32768;
  check(cudaMalloc(&memory.x, kMostTokens * kMostColumns * 2), "malloc");
  check(cudaMalloc(&memory.out, kMostTokens * kMostOutputs * 2), "malloc");
  const std::vector<uint16_t> ones(kMostTokens * kMostColumns, 0x3f80);
  check(cudaMemcpy(memory.x, ones.data(), ones.size() * 2, cudaMemcpyHostToDevice), "x");
  check(cudaMemset(memory.weights, 0x22, kWeightBytes), "weights");
  double reads = 0;
  for (uint32_t blocks = 1; blocks <= 2; ++blocks) {
    const double nanoseconds = time_of(stream, 10, [&](uint32_t) {
      read_all<<<blocks * kMultiprocessors, kReadThreads, 0, stream>>>(
          reinterpret_cast<const uint4*>(memory.weights), kWeightBytes / 16,
          reinterpret_cast<uint32_t*>(memory.out));
      check(cudaGetLastError(), "read");
    });
    reads = std::max(reads, static_cast<double>(kWeightBytes) / nanoseconds);
  }
  cudaDeviceProp device{};
  check(cudaGetDeviceProperties(&device, 0), "device");
  std::printf("{\"gpu\": \"%s\", \"multiprocessors\": %u, \"reads_gb_per_s\": %.0f}\n", device.name,
              kMultiprocessors, reads);
  const uint32_t shapes[][2] = {{4096, 4096}, {6144, 4096}, {28672, 4096}, {4096, 14336}};
  for (const auto& [outputs, columns] : shapes) {
    for (const uint32_t tokens : {1u, 8u}) measure<SmallForms::Few>(memory, stream, reads, tokens, outputs, columns);
    measure<SmallForms::Some>(memory, stream, reads, 16, outputs, columns);
  }
}
