// Time of the warpgroup kernel in a layer of Qwen3-8B's shape, with 16 to 128 tokens. Without torch.
//
//   nvcc -std=c++20 -O3 -fmad=false --expt-relaxed-constexpr -gencode=arch=compute_90a,code=sm_90a \
//     -I kernels/src/nibble_kernels -I kernels/src/nibble_kernels/include -o warpgroup_chain \
//     benchmarks/offline_gpu/warpgroup_chain.cu
//   ./warpgroup_chain > FILE
//
// A CUDA graph has the four products of eight layers with different random weights; each kernel may begin while the
// one before ends. Writes JSON, medians in µs: of a layer, whose products have x in order ("ordered"), with both
// norms' kernels ("norms"), with the product after attention having its x in rows ("rows"), with both, and with the
// norms inside the products ("inside", "inside_rows"); of each product without a norm and with one inside; and of
// each product in each division ("form tokens x rows, sharing ranks", as warpgroup_division.h has them).
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include "nvfp4_linear/warpgroup.cuh"
#include "nvfp4_linear/warpgroup_division.h"
#include "product_chain.cuh"

using namespace nibble::warpgroup;

namespace {

constexpr uint32_t kHidden = 4096, kOrderWarps = 4;
constexpr size_t kStep = 4 << 20;  // bytes of an activation

template <uint32_t Tokens>
__global__ void __launch_bounds__(kOrderWarps* kLanes)
    order_x(const uint4* x, uint4* to, uint32_t tokens, uint32_t columns, uint32_t chunks) {
  nibble::wait_for_kernel_before();
  const uint32_t unit = blockIdx.x * kOrderWarps + threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const uint32_t token = unit / chunks * kTokenGroup + lane % kTokenGroup, chunk = unit % chunks;
  const uint32_t piece = lane / kTokenGroup, column = chunk * kChunk + piece * 8;
  uint4 quarters[4];
  load_quarters(x + (size_t{token} * columns + column) / 8, quarters, [&](uint32_t) { return token < tokens; });
  to += piece_place(token, chunk, piece * 4, Tokens, chunks);
  for (uint32_t i = 0; i < 4; ++i) to[i * Tokens] = ordered(quarters, i);
}

template <class Form>
__global__ void __launch_bounds__(Form::kThreads, 1) multiply(const __grid_constant__ Problem problem) {
#if NIBBLE_HAS_WARPGROUP_PRODUCTS
  extern __shared__ __align__(128) uint8_t shared[];
  Multiplier<__nv_bfloat16, nibble::BfloatOperand, Form>{problem, nibble::instruction::shared_place(shared)}.run();
#endif
}

struct Product {
  const char* name;
  uint32_t outputs, columns;
  bool silu_mul;
  size_t code_bytes() const { return size_t{outputs} * columns / 2; }
  size_t bytes() const { return size_t{outputs} * columns / 16 * 9; }
};
constexpr Product kProducts[] = {{"qkv", 6144, kHidden, false},
                                 {"o", kHidden, 4096, false},
                                 {"gate_up", 24576, kHidden, true},
                                 {"down", kHidden, 12288, false}};

struct Device {
  char *weights, *activations, *ordered, *parts, *flags, *squares;
  cudaStream_t stream;
  uint32_t multiprocessors;
  char* activation(int i) const { return activations + i * kStep; }
};

// Of a norm without a kernel: what the product before it leaves, and how many of its blocks.
struct LinearNorm {
  void* scaled;
  float* squares;
  uint32_t blocks;
};

// What a launch multiplies.
struct Call {
  const Product& product;
  const char* weight;
  const void* x;
  Input input;
  void* out;
  const void* residual;
  bool ordered_result;
  uint32_t tokens;
  LinearNorm* norm;  // between two products
};

template <class Kernel, class... Arguments>
void launch(const Device& device, Kernel kernel, uint32_t blocks, uint32_t ranks, uint32_t threads, uint32_t bytes,
            const Arguments&... arguments) {
  check(nibble::launch_clusters_early(ranks, dim3(blocks), threads, bytes, device.stream, kernel, arguments...));
}

CUtensorMap map_of(const void* data, uint32_t words, uint32_t chunks, uint32_t rows, uint32_t box_rows) {
  static const auto encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result));
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
  }();
  CUtensorMap map{};
  const cuuint64_t sizes[] = {uint64_t{words} * chunks, rows}, bytes[] = {uint64_t{words} * chunks * 4};
  const cuuint32_t box[] = {words, box_rows}, steps[] = {1, 1};
  if (encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT32, 2, const_cast<void*>(data), sizes, bytes, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS)
    std::exit(1);
  return map;
}

template <class Form>
void multiply_with(const Device& device, const Call& call, const Division& division) {
  const Product& product = call.product;
  Problem p{};
  p.tokens = call.tokens, p.columns = product.columns, p.chunks = product.columns / kChunk;
  p.groups = product.outputs / 16, p.ranks = division.ranks;
  p.row_blocks = quotient_up(p.groups, Form::kGroups), p.token_tiles = quotient_up(call.tokens, Form::kTokens);
  p.output.residual = call.residual, p.output.out = call.out, p.output.global_scale = 1e-3f;
  p.output.outputs = product.outputs, p.output.silu_mul = product.silu_mul;
  p.output.ordered = call.ordered_result;
  p.codes = map_of(call.weight, kCodeBytes / 4, p.chunks, p.groups, Form::kGroups);
  p.scales = map_of(call.weight + product.code_bytes(), kScaleBytes / 4, p.chunks, p.groups, Form::kGroups);
  p.parts = reinterpret_cast<float4*>(device.parts), p.flags = reinterpret_cast<uint32_t*>(device.flags);
  p.x = static_cast<const uint4*>(call.x);
  if (call.norm && call.residual) {
    p.output.norm = {device.activation(5), call.norm->scaled, call.norm->squares,
                     tile_of(call.tokens, Input::ordered)};
    call.norm->blocks = division.clusters * p.ranks;
  } else if (call.norm) {
    p.norm = {call.norm->squares, call.norm->blocks, 1e-6f, tile_of(call.tokens, Input::ordered)};
  }
  if (!Form::kOrdersX && call.input == Input::rows) {
    uint4* const to = reinterpret_cast<uint4*>(device.ordered);
    const uint32_t warps = p.token_tiles * Form::kTokenGroups * p.chunks;
    launch(device, order_x<Form::kTokens>, quotient_up(warps, kOrderWarps), 1, kOrderWarps * kLanes, 0, p.x, to,
           p.tokens, p.columns, p.chunks);
    p.x = to;
  }
  launch(device, multiply<Form>, division.clusters * p.ranks, p.ranks, Form::kThreads,
         Form::shared_bytes(p.ranks), p);
}

template <class Form>
uint32_t clusters_at_a_time(const Device& device, uint32_t ranks) {
  static uint32_t known[kMostRanks + 1]{};
  if (known[ranks] != 0) return known[ranks];
  cudaLaunchAttribute attributes[2]{};
  const cudaLaunchConfig_t config =
      nibble::early_config(attributes, ranks, dim3(device.multiprocessors / ranks * ranks), Form::kThreads,
                           Form::shared_bytes(ranks), device.stream);
  int clusters = 0;
  check(cudaFuncSetAttribute(multiply<Form>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(Form::shared_bytes(ranks))));
  check(cudaOccupancyMaxActiveClusters(&clusters, multiply<Form>, &config));
  return known[ranks] = std::min(static_cast<uint32_t>(clusters), device.multiprocessors / ranks);
}

template <class Forms, class IsAllowed>
std::optional<Division> division_for(const Device& device, const Call& call, IsAllowed&& is_allowed) {
  return division_of<Forms>(
      {call.tokens, call.product.outputs / 16, call.product.columns / kChunk, call.input}, device.multiprocessors,
      [&](uint32_t ranks) { return clusters_at_a_time<typename Forms::Clusters>(device, ranks); }, is_allowed);
}

template <class Forms>
void multiply_as(const Device& device, const Call& call, const Division& division) {
  const auto with = [&]<nibble::Norm Beside>() {
    if (division.sharing == Sharing::ranges)
      return multiply_with<typename Forms::template Of<Sharing::ranges, Beside>>(device, call, division);
    if constexpr (Forms::kHasClusters) {
      if (division.sharing == Sharing::clusters)
        return multiply_with<typename Forms::template Of<Sharing::clusters, Beside>>(device, call, division);
    }
    multiply_with<typename Forms::template Of<Sharing::units, Beside>>(device, call, division);
  };
  if constexpr (Forms::kTokens <= kMostNormTokens) {
    if (call.norm && call.residual) return with.template operator()<nibble::Norm::after>();
    if constexpr (!Forms::Units::kOrdersX) {
      if (call.norm) return with.template operator()<nibble::Norm::before>();
    }
  }
  with.template operator()<nibble::Norm::none>();
}

// As the operator divides it.
void multiply_best(const Device& device, const Call& call) {
  std::optional<Division> best;
  void (*as)(const Device&, const Call&, const Division&) = nullptr;
  for_every_form([&](auto forms) {
    using Considered = decltype(forms);
    if (!Considered::is_for(call.tokens, call.input)) return;
    const auto found = division_for<Considered>(device, call, [](Sharing, uint32_t) { return true; });
    if (!found || (best && best->cost <= found->cost)) return;
    best = found;
    as = multiply_as<Considered>;
  });
  as(device, call, *best);
}

void layer(const Device& device, const char* weight, uint32_t tokens, Norms norms, bool rows) {
  char *const stream = device.activation(0), *const normal = device.activation(1), *const qkv = device.activation(2),
              *const sum = device.activation(3), *const between = device.activation(4);
  int next = 0;
  const auto product = [&](const void* x, Input input, void* out, const void* residual, bool ordered, LinearNorm* norm) {
    const Product& one = kProducts[next++];
    multiply_best(device, {one, weight, x, input, out, residual, ordered, tokens, norm});
    weight += one.bytes();
  };
  float* const squares = reinterpret_cast<float*>(device.squares);
  static LinearNorm before{normal, squares, 1};  // of the layer before
  LinearNorm after{normal, squares + (1 << 16), 0};
  const bool inside = norms == Norms::inside;
  const auto normalize = [&](const void* x) {
    if (norms == Norms::kernels)
      norm(device.stream, x, device.activation(5), normal, tokens, kHidden, tile_of(tokens, Input::ordered));
  };
  normalize(stream);
  product(normal, Input::ordered, qkv, nullptr, false, inside ? &before : nullptr);
  product(qkv, rows ? Input::rows : Input::ordered, sum, stream, false, inside ? &after : nullptr);
  normalize(sum);
  product(normal, Input::ordered, between, nullptr, true, inside ? &after : nullptr);
  product(between, Input::ordered, stream, sum, false, inside ? &before : nullptr);
}

// Of each of kLayers layers that enqueue(layer) launches.
float microseconds(const Device& device, const std::function<void(int)>& enqueue) {
  return microseconds(device.stream, [&] {
    for (int i = 0; i < kLayers; ++i) enqueue(i);
  });
}

// Every division of a product, with x in order.
template <class Forms>
void print_divisions(const Device& device, uint32_t tokens, size_t layer_bytes, bool& is_first) {
  size_t offset = 0;
  for (const Product& product : kProducts) {
    const auto call_of = [&](int i) {
      return Call{product, device.weights + i * layer_bytes + offset, device.activation(1), Input::ordered,
                  device.activation(2), nullptr, false, tokens, nullptr};
    };
    for (uint32_t ranks = 1; ranks <= kMostRanks; ++ranks) {
      for (const Sharing sharing : {Sharing::units, Sharing::clusters, Sharing::ranges}) {
        const auto division = division_for<Forms>(device, call_of(0), [&](Sharing one, uint32_t of) {
          return one == sharing && of == ranks;
        });
        if (!division) continue;
        const float us = microseconds(device, [&](int i) { multiply_as<Forms>(device, call_of(i), *division); });
        const char* names[] = {"units", "clusters", "ranges"};
        std::printf("%s\n  {\"product\": \"%s\", \"tokens\": %u, \"rows\": %u, \"sharing\": \"%s\", \"ranks\": %u, "
                    "\"us\": %.2f, \"cost\": %.2f}",
                    is_first ? "" : ",", product.name, tokens, Forms::kRows, names[static_cast<int>(sharing)], ranks,
                    us, division->cost);
        is_first = false;
      }
    }
    offset += product.bytes();
  }
}

// Each product alone, without a norm and with one inside.
void print_products(const Device& device, uint32_t tokens, size_t layer_bytes) {
  static LinearNorm norm{device.activation(4), reinterpret_cast<float*>(device.squares), device.multiprocessors};
  size_t offset = 0;
  for (const Product& product : kProducts) {
    const void* const residual = product.outputs == kHidden ? device.activation(3) : nullptr;
    const auto time = [&](LinearNorm* norm) {
      return microseconds(device, [&](int i) {
        multiply_best(device, {product, device.weights + i * layer_bytes + offset, device.activation(1),
                               Input::ordered, device.activation(2), residual, product.silu_mul, tokens, norm});
      });
    };
    const float without = time(nullptr);
    std::printf("%s\n  {\"product\": \"%s\", \"tokens\": %u, \"us\": %.2f, \"with_norm\": %.2f}",
                tokens == 16 && offset == 0 ? "" : ",", product.name, tokens, without, time(&norm));
    offset += product.bytes();
  }
}

uint32_t random_word() {
  static uint64_t state = 1;
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  return static_cast<uint32_t>(state >> 32);
}

void fill(char* to, size_t bytes, uint32_t mask, uint32_t set) {
  std::vector<uint32_t> words(bytes / 4);
  for (uint32_t& word : words) word = (random_word() & mask) | set;
  check(cudaMemcpy(to, words.data(), bytes, cudaMemcpyHostToDevice));
}

}  // namespace

int main() {
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, 0));
  Device device{};
  device.multiprocessors = static_cast<uint32_t>(properties.multiProcessorCount);
  check(cudaStreamCreate(&device.stream));
  size_t layer_bytes = 0;
  for (const Product& product : kProducts) layer_bytes += product.bytes();
  check(cudaMalloc(&device.weights, kLayers * layer_bytes));
  for (char* to = device.weights; to < device.weights + kLayers * layer_bytes;) {
    for (const Product& product : kProducts) {
      fill(to, product.code_bytes(), ~0u, 0);
      fill(to + product.code_bytes(), product.bytes() - product.code_bytes(), 0x0f0f0f0f, 0x30303030);
      to += product.bytes();
    }
  }
  check(cudaMalloc(&device.activations, 6 * kStep));
  fill(device.activations, 6 * kStep, 0xbfffbfff, 0x30003000);  // bfloat16 of both signs, below 2
  check(cudaMalloc(&device.ordered, kStep));
  check(cudaMalloc(&device.parts, 64 << 20));
  check(cudaMalloc(&device.flags, 1 << 20));
  check(cudaMemset(device.flags, 0, 1 << 20));
  check(cudaMalloc(&device.squares, 1 << 20));
  check(cudaMemset(device.squares, 0, 1 << 20));
  std::printf("{\"gpu\": \"%s\", \"us_a_layer\": [", properties.name);
  for (const uint32_t tokens : {16u, 32u, 64u, 128u}) {
    const auto time = [&](Norms norms, bool rows) {
      return microseconds(
          device, [&](int i) { layer(device, device.weights + i * layer_bytes, tokens, norms, rows); });
    };
    std::printf("%s\n  {\"tokens\": %u", tokens == 16 ? "" : ",", tokens);
    const bool fits = tokens <= kMostNormTokens;
    std::printf(", \"ordered\": %.2f, \"norms\": %.2f", time(Norms::none, false), time(Norms::kernels, false));
    std::printf(", \"rows\": %.2f, \"both\": %.2f", time(Norms::none, true), time(Norms::kernels, true));
    if (fits)
      std::printf(", \"inside\": %.2f, \"inside_rows\": %.2f", time(Norms::inside, false),
                  time(Norms::inside, true));
    std::printf("}");
  }
  std::printf("],\n\"products\": [");
  for (const uint32_t tokens : {16u, 32u, 64u}) print_products(device, tokens, layer_bytes);
  std::printf("],\n\"divisions\": [");
  bool is_first = true;
  for_every_form([&](auto forms) {
    using F = decltype(forms);
    if constexpr (F::kTokens <= 64 && !F::Units::kOrdersX)
      print_divisions<F>(device, F::kTokens, layer_bytes, is_first);
  });
  std::printf("]}\n");
}
