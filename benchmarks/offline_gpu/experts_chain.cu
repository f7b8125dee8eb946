// Time of a layer of experts from the router's choices to the sum, in the shapes of Qwen3-30B-A3B and
// Qwen3.6-35B-A3B, behind a stand-in for the router, in CUDA graphs in turns. Without torch. "Shared": with
// the shared expert of each token in the same launch.
//
//   nvcc -std=c++20 -O3 --expt-relaxed-constexpr -arch=sm_90a -I kernels/src/nibble_kernels \
//     -I kernels/src/nibble_kernels/include -o experts_chain benchmarks/offline_gpu/experts_chain.cu
//   ./experts_chain
//   ./experts_chain stress SECONDS     replays of every form, whose bits are compared
//   ./experts_chain spin SECONDS       keeps the GPU busy for another process
//
// Each layer has another routing; the weights of several layers exceed the cache. Medians, in µs a layer,
// less the stand-in's own time. A star marks the form that nvfp4_moe_linear takes.
#include <cuda.h>
#include <cuda_bf16.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "device_memory.cuh"
#include "nibble/overlap.cuh"
#include "nvfp4_moe/add_up.cuh"
#include "nvfp4_moe/decode.cuh"
#include "nvfp4_moe/few.cuh"
#include "nvfp4_moe/grouped.cuh"
#include "nvfp4_moe/route.cuh"

namespace {

using namespace nibble::experts;
namespace decode = nibble::decode;
using nibble::launch_early;
using Bfloat = __nv_bfloat16;
using Few = decode::LargeForms::Few;

constexpr uint32_t kTopk = 8, kMostTokens = 64, kLayers = 3, kCalls = 12, kRounds = 15;

__global__ void fill(uint32_t* to, size_t count, uint32_t mask, uint32_t base, uint32_t seed) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count;
       i += size_t{gridDim.x} * blockDim.x) {
    uint32_t x = static_cast<uint32_t>(i) * 2654435761u + seed;
    x ^= x >> 16, x *= 0x7feb352du, x ^= x >> 15, x *= 0x846ca68bu, x ^= x >> 16;
    to[i] = (x & mask) + base;
  }
}

CUtensorMap map_of(const void* data, uint32_t words, uint32_t chunks, uint32_t rows, uint32_t box_chunks,
                   uint32_t box_rows) {
  static void* function = nullptr;
  if (!function) {
    cudaDriverEntryPointQueryResult result{};
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault,
                                           &result));
  }
  CUtensorMap map{};
  const cuuint64_t sizes[] = {words, chunks, rows},
                   bytes[] = {uint64_t{words} * 4, uint64_t{words} * chunks * 4};
  const cuuint32_t box[] = {words, box_chunks, box_rows}, steps[] = {1, 1, 1};
  const CUresult result = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function)(
      &map, CU_TENSOR_MAP_DATA_TYPE_UINT32, 3, const_cast<void*>(data), sizes, bytes, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) std::printf("map: %d\n", static_cast<int>(result)), std::exit(1);
  return map;
}

// Writes what the next kernels read, as a router does.
__global__ void __launch_bounds__(256)
    router(const int32_t* ids_from, const float* weights_from, int32_t* ids, float* weights, uint32_t pairs,
           const uint4* x_from, uint4* x, uint32_t words) {
  nibble::wait_for_kernel_before();
  for (uint32_t i = blockIdx.x * 256 + threadIdx.x; i < pairs; i += gridDim.x * 256)
    ids[i] = ids_from[i], weights[i] = weights_from[i];
  for (uint32_t i = blockIdx.x * 256 + threadIdx.x; i < words; i += gridDim.x * 256) x[i] = x_from[i];
}

template <class F>
__global__ void __launch_bounds__(kRouteThreads)
    order_few(const __grid_constant__ Routing routing, const __grid_constant__ Ordering ordering) {
  extern __shared__ uint16_t counts[];
  __shared__ Table table;
  nibble::wait_for_kernel_before();
  const uint32_t tiles = route_few(routing, F::kTokens, table, counts);
  order_x<F>(ordering, tiles, table.tiles, table.order);
}

template <class F>
__global__ void __launch_bounds__(F::kThreads, F::kBlocks) multiply(const __grid_constant__ Problem problem) {
#if NIBBLE_HAS_WARPGROUP_PRODUCTS
  extern __shared__ __align__(128) uint8_t shared[];
  const Multiplier<Bfloat, nibble::BfloatOperand, F> multiplier{problem,
                                                                nibble::instruction::shared_place(shared)};
  multiplier.start();
  nibble::wait_for_kernel_before();
  multiplier.run();
#endif
}

template <class F>
__global__ void __launch_bounds__(F::kThreads, F::kBlocks)
    multiply_few(const __grid_constant__ Problem problem, const __grid_constant__ Choices choices) {
#if NIBBLE_HAS_WARPGROUP_PRODUCTS
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ FewTable table;
  run_few<Bfloat, nibble::BfloatOperand, F>(problem, choices, nibble::instruction::shared_place(shared),
                                            shared, table);
#endif
}

__global__ void __launch_bounds__(kSumThreads, kSumBlocks)
    add_up(const Chosen chosen, const uint4* products, uint4* out, uint32_t tokens, uint32_t pieces) {
  nibble::wait_for_kernel_before();
  add_products<Bfloat>(blockIdx.x * kSumThreads + threadIdx.x, chosen, products, out, tokens, pieces);
}

__global__ void __launch_bounds__(Few::kThreads, 1)
    multiply_experts(const __grid_constant__ decode::Problem problem,
                     const __grid_constant__ decode::Experts experts) {
  extern __shared__ uint4 memory[];
  __shared__ decode::Table table;
  decode::run_experts<Bfloat, nibble::BfloatOperand, Few>(problem, experts, table, memory);
}

// Where replays differ from the first one: the number of words, and the first of them.
struct Differences {
  unsigned long long words;
  uint32_t call, word, expected, found;
};
__global__ void __launch_bounds__(256)
    compare(const uint32_t* expected, const uint32_t* found, uint32_t words, uint32_t call, Differences* to) {
  const uint32_t i = blockIdx.x * 256 + threadIdx.x;
  if (i >= words || expected[i] == found[i]) return;
  if (atomicAdd(&to->words, 1ull) != 0) return;
  to->call = call, to->word = i, to->expected = expected[i], to->found = found[i];
}

__global__ void spin_for(uint64_t cycles) {
  const uint64_t begin = clock64();
  while (clock64() - begin < cycles) {
  }
}

struct Shape {
  const char* name;
  uint32_t experts, inner, hidden;
  bool has_shared;
};
constexpr Shape kShapes[] = {{"30b-a3b", 128, 768, 2048, false},
                             {"35b-a3b", 256, 512, 2048, false},
                             {"35b-a3b, shared", 256, 512, 2048, true}};

struct Prepared {
  uint32_t *codes, *scales;
  float2* factors;
};

Prepared prepare(uint32_t experts, uint32_t outputs, uint32_t columns, float factor, uint32_t seed) {
  const size_t codes = size_t{experts} * outputs * columns / 8,
               scales = size_t{experts} * outputs * columns / 64;
  Prepared w{allocate<uint32_t>(codes), allocate<uint32_t>(scales),
             copied(std::vector<float2>(experts, make_float2(factor, factor)))};
  fill<<<1024, 256>>>(w.codes, codes, ~0u, 0, seed);
  fill<<<1024, 256>>>(w.scales, scales, 0x0f0f0f0fu, 0x30303030u, seed + 1);
  return w;
}

class Bench {
 public:
  explicit Bench(const Shape& shape) : shape_(shape) {
    check(cudaStreamCreate(&stream_));
    check(cudaDeviceGetAttribute(&multiprocessors_, cudaDevAttrMultiProcessorCount, 0));
    for (uint32_t i = 0; i < kLayers; ++i) {
      first_.push_back(prepare(shape.experts, 2 * shape.inner, shape.hidden, 0.01f, 4 * i));
      second_.push_back(prepare(shape.experts, shape.hidden, shape.inner, 0.02f, 4 * i + 2));
      shared_first_.push_back(prepare(1, 2 * shape.inner, shape.hidden, 0.01f, 4 * i + 1));
      shared_second_.push_back(prepare(1, shape.hidden, shape.inner, 0.02f, 4 * i + 3));
    }
    shared_weights_ = copied(std::vector<uint16_t>(kMostTokens, 0x3e80));  // 0.25
    const uint32_t pairs = kMostTokens * kTopk;
    ids_ = allocate<int32_t>(pairs), weights_ = allocate<float>(pairs);
    x_ = allocate<Bfloat>(kMostTokens * shape.hidden);
    std::mt19937 random(1);
    std::vector<Bfloat> x(kMostTokens * shape.hidden);
    for (auto& one : x) one = __float2bfloat16(std::normal_distribution<float>()(random));
    x_from_ = copied(x);
    work_ = allocate<uint8_t>(256 << 20);
    zeros_ = allocate<uint32_t>(1 << 16);
    for (uint32_t i = 0; i < kCalls; ++i) out_.push_back(allocate<Bfloat>(kMostTokens * shape.hidden));
  }

  // Tokens choose one after another of all experts.
  void route_each(uint32_t tokens) {
    tokens_ = tokens, used_ = std::min(tokens * kTopk, shape_.experts);
    std::mt19937 random(tokens);
    ids_from_.clear(), weights_from_.clear();
    for (uint32_t call = 0; call < kCalls; ++call) {
      std::vector<int32_t> ids;
      std::vector<float> weights;
      for (uint32_t pair = 0; pair < tokens * kTopk; ++pair) {
        ids.push_back(static_cast<int32_t>((pair + call * 37) % shape_.experts));
        weights.push_back(std::uniform_real_distribution<float>(0, 0.25f)(random));
      }
      ids_from_.push_back(copied(ids)), weights_from_.push_back(copied(weights));
    }
  }
  void route(uint32_t tokens, double exponent) {
    tokens_ = tokens;
    std::mt19937 random(tokens);
    ids_from_.clear(), weights_from_.clear();
    used_ = 0;
    for (uint32_t call = 0; call < kCalls; ++call) {
      std::vector<double> likely(shape_.experts);
      for (uint32_t i = 0; i < shape_.experts; ++i) likely[i] = std::pow(i + 1.0, -exponent);
      std::shuffle(likely.begin(), likely.end(), random);
      std::vector<int32_t> ids;
      std::vector<float> weights;
      std::vector<bool> used(shape_.experts);
      for (uint32_t token = 0; token < tokens; ++token) {
        std::vector<double> left = likely;
        for (uint32_t k = 0; k < kTopk; ++k) {
          const int id = std::discrete_distribution<int>(left.begin(), left.end())(random);
          left[id] = 0, used[id] = true;
          ids.push_back(id), weights.push_back(std::uniform_real_distribution<float>(0, 0.25f)(random));
        }
      }
      used_ += std::count(used.begin(), used.end(), true) / static_cast<double>(kCalls);
      ids_from_.push_back(copied(ids)), weights_from_.push_back(copied(weights));
    }
  }
  Chosen chosen() const {
    return {ids_, weights_, shape_.has_shared ? shared_weights_ : nullptr, kTopk, shape_.experts};
  }
  uint32_t pairs() const { return tokens_ * chosen().pairs_of_token(); }
  double megabytes() const {
    return (used_ + shape_.has_shared) * 3 * shape_.hidden * shape_.inner * 9 / 16 / 1e6;
  }
  double used() const { return used_; }

  void enqueue_router(uint32_t call) {
    const uint32_t words = tokens_ * shape_.hidden / 8;
    check(launch_early(std::min(8u, quotient_up(words, 256)), 256, 0, stream_, router, ids_from_[call],
                       weights_from_[call], ids_, weights_, tokens_ * kTopk,
                       reinterpret_cast<const uint4*>(x_from_), reinterpret_cast<uint4*>(x_), words));
  }

  template <class F>
  Problem problem_of(uint32_t call) {
    Problem p{};
    const auto weight = [&](const Prepared& w, uint32_t outputs, uint32_t columns, uint32_t experts) {
      Weight weight{};
      weight.global_scales = w.factors;
      weight.outputs = outputs, weight.chunks = quotient_up(columns, kChunk);
      weight.groups = outputs / 2 / decode::kGroup,
      weight.row_blocks = quotient_up(weight.groups, F::kGroups);
      const uint32_t rows = experts * weight.groups;
      weight.codes = map_of(w.codes, kCodeBytes / 4, weight.chunks, rows, F::kStageChunks, F::kGroups);
      weight.scales = map_of(w.scales, kScaleBytes / 4, weight.chunks, rows, F::kStageChunks, F::kGroups);
      return weight;
    };
    const uint32_t layer = call % kLayers;
    p.first = weight(first_[layer], 2 * shape_.inner, shape_.hidden, shape_.experts);
    p.second = weight(second_[layer], shape_.hidden, shape_.inner, shape_.experts);
    p.shared_first = weight(shared_first_[layer], 2 * shape_.inner, shape_.hidden, 1);
    p.shared_second = weight(shared_second_[layer], shape_.hidden, shape_.inner, 1);
    p.routed = shape_.experts;
    p.activation = {Function::silu, true, INFINITY, 1.0f, 0.0f};
    return p;
  }

  void enqueue_sum(uint32_t call, const void* products) {
    const uint32_t pieces = shape_.hidden / 8;
    check(launch_early(quotient_up(tokens_ * pieces, kSumThreads), kSumThreads, 0, stream_, add_up,
                       chosen(), static_cast<const uint4*>(products), reinterpret_cast<uint4*>(out_[call]),
                       tokens_, pieces));
  }

  template <class F>
  void three_launches(uint32_t call) {
    Problem p = problem_of<F>(call);
    const uint32_t experts = chosen().experts();
    const Workspace w = Workspace::of<F>(pairs(), experts, p.first.chunks, p.second.chunks, shape_.hidden);
    Routing r{};
    Ordering o{};
    r.chosen = chosen(), r.pairs = pairs();
    r.most_tiles = p.most_tiles = w.most_tiles;
    o.x = reinterpret_cast<const uint4*>(x_), o.columns = shape_.hidden;
    o.pairs_of_token = r.chosen.pairs_of_token();
    o.chunks = p.first.chunks, o.inner_columns = shape_.inner, o.inner_chunks = p.second.chunks;
    p.x = o.to = reinterpret_cast<uint4*>(work_ + w.x);
    o.inner = reinterpret_cast<uint4*>(work_ + w.inner);
    p.inner = reinterpret_cast<uint32_t*>(work_ + w.inner);
    p.products = work_ + w.products;
    p.tiles = r.tiles = reinterpret_cast<Tile*>(work_ + w.tiles);
    p.pairs = r.order = reinterpret_cast<uint32_t*>(work_ + w.order);
    p.weights = r.ordered_weights = reinterpret_cast<float*>(work_ + w.weights);
    p.complete = r.complete = reinterpret_cast<uint32_t*>(work_ + w.complete);
    p.queue = r.queue = reinterpret_cast<uint32_t*>(work_ + w.counters);
    p.tile_count = r.tile_count = r.queue + 1;
    const uint32_t units = r.most_tiles * (o.chunks + 1) * F::kTokenGroups;
    check(launch_early(std::min<uint32_t>(multiprocessors_, quotient_up(units, kRouteWarps)), kRouteThreads,
                       quotient_up(r.pairs, kLanes) * experts * 2, stream_, order_few<F>, r, o));
    check(launch_early(blocks<F>(r.most_tiles, p), F::kThreads, F::kSharedBytes, stream_, multiply<F>, p));
    enqueue_sum(call, p.products);
  }

  template <class F>
  uint32_t blocks(uint32_t tiles, const Problem& p) const {
    return std::min<uint32_t>(multiprocessors_ * F::kBlocks,
                              tiles * (p.first.row_blocks + p.second.row_blocks));
  }

  template <class F>
  void few(uint32_t call) {
    Problem p = problem_of<F>(call);
    p.products = work_;
    p.inner = reinterpret_cast<uint32_t*>(work_ + (64 << 20));
    p.queue = zeros_, p.complete = FewCounters(zeros_).complete;
    Choices c{};
    c.chosen = chosen(), c.x = reinterpret_cast<const uint4*>(x_), c.pairs = pairs();
    c.columns = shape_.hidden, c.inner_columns = shape_.inner;
    const uint32_t tiles = std::min(c.pairs, c.chosen.experts() + c.pairs / F::kTokens);
    check(launch_early(blocks<F>(tiles, p), F::kThreads, F::kSharedBytes, stream_, multiply_few<F>, p, c));
    enqueue_sum(call, p.products);
  }

  void enqueue_product(const Prepared& w, uint32_t outputs, uint32_t columns, const void* x, void* out,
                       bool is_first) {
    decode::Problem p{};
    p.x = static_cast<const uint4*>(x), p.codes = reinterpret_cast<const uint4*>(w.codes),
    p.scales = w.scales;
    p.out = out, p.outputs = outputs, p.columns = columns, p.silu_mul = is_first;
    p.chunks = p.chunks_per_phase = columns / kChunk, p.groups = outputs / 2 / decode::kGroup, p.ranks = 1;
    const decode::Experts e{ids_,
                            is_first ? nullptr : weights_,
                            reinterpret_cast<const float*>(w.factors),
                            nullptr,
                            tokens_ * kTopk,
                            shape_.experts,
                            is_first ? kTopk : 1};
    check(launch_early(multiprocessors_, Few::kThreads, Few::shared_bytes(p.chunks, Few::kTokens, false),
                       stream_, multiply_experts, p, e));
  }
  void decoded(uint32_t call) {
    uint8_t* const h = work_ + (64 << 20);
    enqueue_product(first_[call % kLayers], 2 * shape_.inner, shape_.hidden, x_, h, true);
    enqueue_product(second_[call % kLayers], shape_.hidden, shape_.inner, h, work_, false);
    enqueue_sum(call, work_);
  }

  using Chain = std::function<void(uint32_t)>;

  cudaGraphExec_t captured(const Chain& chain, uint32_t calls = kCalls) {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    for (uint32_t i = 0; i < calls; ++i) {
      enqueue_router(i);
      chain(i);
    }
    check(cudaStreamEndCapture(stream_, &graph));
    check(cudaGraphInstantiate(&exec, graph, 0));
    return exec;
  }

  void replay(cudaGraphExec_t exec) {
    check(cudaGraphLaunch(exec, stream_));
    check(cudaStreamSynchronize(stream_));
  }

  bool counters_are_zero() const {
    std::vector<uint32_t> words(FewCounters::kWords);
    check(cudaMemcpy(words.data(), zeros_, words.size() * sizeof(uint32_t), cudaMemcpyDeviceToHost));
    return std::all_of(words.begin(), words.end(), [](uint32_t word) { return word == 0; });
  }

  std::vector<std::vector<float>> outputs() {
    std::vector<std::vector<float>> found;
    for (Bfloat* out : out_) {
      std::vector<Bfloat> values(tokens_ * shape_.hidden);
      check(cudaMemcpy(values.data(), out, values.size() * 2, cudaMemcpyDeviceToHost));
      found.emplace_back();
      for (const Bfloat one : values) found.back().push_back(__bfloat162float(one));
      check(cudaMemset(out, 0xff, values.size() * 2));
    }
    return found;
  }

  struct Variant {
    std::string name;
    Chain chain;
  };
  std::vector<Variant> variants() {
    std::vector<Variant> some;
    const int64_t taken = form_of(pairs(), chosen().experts());
    const auto name = [&](const char* of_form, int64_t form) {
      return std::string(of_form) + (form == taken ? "*" : "");
    };
    if (tokens_ <= 2 && !shape_.has_shared) some.push_back({"decode", [this](uint32_t i) { decoded(i); }});
    some.push_back({name("tiles", 8), [this](uint32_t i) { three_launches<Form8>(i); }});
    if (tokens_ <= 8)
      some.push_back({name("few, units of 4", kFew4), [this](uint32_t i) { few<FewForm4>(i); }});
    some.push_back({name("few, units of 8", kFew8), [this](uint32_t i) { few<FewForm8>(i); }});
    some.push_back({name("tiles of 16", 16), [this](uint32_t i) { three_launches<Form16>(i); }});
    return some;
  }

  // Replays each form for so long, and compares every result with the form's first.
  void stress(double seconds) {
    auto some = variants();
    some.push_back({"tiles of 32", [this](uint32_t i) { three_launches<Form32>(i); }});
    some.push_back({"tiles of 64", [this](uint32_t i) { three_launches<Form64>(i); }});
    some.push_back({"tiles of 128", [this](uint32_t i) { three_launches<Form128>(i); }});
    const uint32_t words = tokens_ * shape_.hidden / 2, blocks = quotient_up(words, 256);
    uint32_t* const expected = allocate<uint32_t>(size_t{words} * kCalls);
    Differences* const differences = allocate<Differences>(1);
    for (const Variant& one : some) {
      const cudaGraphExec_t graph = captured(one.chain);
      replay(graph);
      for (uint32_t call = 0; call < kCalls; ++call)
        check(cudaMemcpy(expected + size_t{call} * words, out_[call], size_t{words} * 4,
                         cudaMemcpyDeviceToDevice));
      check(cudaMemset(differences, 0, sizeof(Differences)));
      uint64_t replays = 0;
      const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
      for (; std::chrono::steady_clock::now() < end; ++replays) {
        check(cudaGraphLaunch(graph, stream_));
        for (uint32_t call = 0; call < kCalls; ++call) {
          compare<<<blocks, 256, 0, stream_>>>(expected + size_t{call} * words,
                                               reinterpret_cast<const uint32_t*>(out_[call]), words, call,
                                               differences);
        }
        if (replays % 16 == 0) check(cudaStreamSynchronize(stream_));
      }
      check(cudaStreamSynchronize(stream_));
      Differences found;
      check(cudaMemcpy(&found, differences, sizeof(found), cudaMemcpyDeviceToHost));
      std::printf("%s, %u tokens, %s: %llu layers, %llu words differ, counters %s", shape_.name, tokens_,
                  one.name.c_str(), static_cast<unsigned long long>(replays * kCalls), found.words,
                  counters_are_zero() ? "zero" : "NOT ZERO");
      if (found.words)
        std::printf("; call %u, token %u, column %u: %08x, found %08x", found.call,
                    found.word / (shape_.hidden / 2), found.word % (shape_.hidden / 2) * 2, found.expected,
                    found.found);
      std::printf("\n");
      std::fflush(stdout);
      check(cudaGraphExecDestroy(graph));
    }
    check(cudaFree(expected)), check(cudaFree(differences));
  }

  void measure() {
    const cudaGraphExec_t alone = captured([](uint32_t) {});
    std::vector<cudaGraphExec_t> graphs{alone};
    const auto some = variants();
    std::vector<std::vector<float>> reference;
    std::string notes;
    for (const Variant& one : some) {
      std::fprintf(stderr, "%s, %u tokens, %s\n", shape_.name, tokens_, one.name.c_str());
      graphs.push_back(captured(one.chain));
      replay(graphs.back());
      const auto first = outputs();
      bool same_again = true;
      for (uint32_t i = 0; i < 6; ++i) {
        replay(graphs.back());
        same_again &= outputs() == first;
      }
      if (reference.empty()) reference = first;
      double worst = 0, squares = 0, count = 0;
      uint64_t differ = 0;
      for (uint32_t call = 0; call < kCalls; ++call) {
        for (size_t i = 0; i < first[call].size(); ++i) {
          const double off = std::abs(static_cast<double>(first[call][i]) - reference[call][i]);
          worst = off <= worst ? worst : off;
          squares += static_cast<double>(reference[call][i]) * reference[call][i], count += 1;
          differ += first[call][i] != reference[call][i];
        }
      }
      char line[200];
      std::snprintf(line, sizeof(line),
                    "    %-18s worst/rms %.5f, %.2f %% differ, rms %.4f, replays %s, counters %s\n",
                    one.name.c_str(), worst / std::sqrt(squares / count), 100.0 * differ / count,
                    std::sqrt(squares / count), same_again ? "equal" : "DIFFER",
                    counters_are_zero() ? "zero" : "NOT ZERO");
      notes += line;
    }
    std::vector<std::vector<float>> times(graphs.size());
    cudaEvent_t begin, end;
    check(cudaEventCreate(&begin)), check(cudaEventCreate(&end));
    for (uint32_t round = 0; round < kRounds + 2; ++round) {
      for (size_t i = 0; i < graphs.size(); ++i) {
        check(cudaEventRecord(begin, stream_));
        for (int k = 0; k < 3; ++k) check(cudaGraphLaunch(graphs[i], stream_));
        check(cudaEventRecord(end, stream_));
        check(cudaEventSynchronize(end));
        float ms;
        check(cudaEventElapsedTime(&ms, begin, end));
        if (round >= 2) times[i].push_back(ms * 1e3f / (3 * kCalls));
      }
    }
    const auto median = [](std::vector<float>& all) {
      std::sort(all.begin(), all.end());
      return all[all.size() / 2];
    };
    const float router_time = median(times[0]);
    std::printf("%s, %u tokens, %.1f experts, %.1f MB; router %.2f us;", shape_.name, tokens_, used(),
                megabytes(), router_time);
    for (size_t i = 0; i < some.size(); ++i)
      std::printf(" | %s %.2f", some[i].name.c_str(), median(times[i + 1]) - router_time);
    std::printf("\n%s", notes.c_str());
    std::fflush(stdout);
    for (const auto graph : graphs) check(cudaGraphExecDestroy(graph));
  }

 private:
  Shape shape_;
  cudaStream_t stream_;
  int multiprocessors_ = 0;
  std::vector<Prepared> first_, second_, shared_first_, shared_second_;
  uint16_t* shared_weights_;
  int32_t* ids_;
  float* weights_;
  Bfloat *x_, *x_from_;
  uint8_t* work_;
  uint32_t* zeros_;
  std::vector<Bfloat*> out_;
  std::vector<int32_t*> ids_from_;
  std::vector<float*> weights_from_;
  uint32_t tokens_ = 0;
  double used_ = 0;
};

}  // namespace

int main(int count, char** words) {
  if (count == 3 && std::string(words[1]) == "spin") {
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(std::atof(words[2]));
    while (std::chrono::steady_clock::now() < end) {
      spin_for<<<1024, 256>>>(4'000'000);
      check(cudaDeviceSynchronize());
    }
    return 0;
  }
  if (count == 3 && std::string(words[1]) == "stress") {
    for (const Shape& shape : kShapes) {
      Bench bench(shape);
      for (const uint32_t tokens : {4, 16, 33, 64}) {
        bench.route_each(tokens);
        bench.stress(std::atof(words[2]));
        bench.route(tokens, 0.0);
        bench.stress(std::atof(words[2]));
      }
    }
    return 0;
  }
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, 0));
  std::printf("%s, %d multiprocessors\n", properties.name, properties.multiProcessorCount);
  for (const Shape& shape : kShapes) {
    Bench bench(shape);
    for (const double exponent : {0.0, 1.2}) {
      std::printf("%s, Zipf %.1f\n", shape.name, exponent);
      for (const uint32_t tokens : {1, 2, 4, 8, 16, 32, 64}) {
        bench.route(tokens, exponent);
        bench.measure();
      }
    }
  }
}
