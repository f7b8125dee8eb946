// Runs SM12x's kernels on the GPU that is here and compares them with float64: the cases that
// blackwell_cases.py wrote. Without torch: one program and one file go to a machine with nothing on it.
//
//   nvcc -std=c++20 -O3 -fmad=false --expt-relaxed-constexpr -arch=sm_90a -I kernels/src/nibble_kernels/include \
//     -I kernels/src/nibble_kernels -o blackwell_proof benchmarks/offline_gpu/blackwell_proof.cu
//   blackwell_proof cases.bin > blackwell.jsonl
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "fp8_linear/small_launch.cuh"
#include "nibble/mma_fp4.cuh"
#include "nvfp4_linear/w4a4_launch.cuh"
#include "nvfp4_moe/w4a4_launch.cuh"
#include "nvfp4_sparse/launch.cuh"

namespace {

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("{\"error\": \"%s: %s\"}\n", what, cudaGetErrorString(error));
  std::exit(1);
}

// A buffer of a case: on the device, or null where it has none.
struct Buffer {
  std::vector<char> bytes;
  void* device = nullptr;
};
struct Case {
  std::string op, name;
  std::vector<int64_t> numbers;
  double global_scale;
  std::vector<Buffer> inputs;
  std::vector<double> expected;
  std::vector<float> bound;
};

class Reader {
 public:
  explicit Reader(const char* path) : file_(std::fopen(path, "rb")) {
    if (!file_) std::exit(2);
  }
  bool next(Case& to) {
    int64_t count;
    if (std::fread(&count, 8, 1, file_) != 1) return false;
    to = {};
    to.op = text(count);
    to.name = text(number());
    to.numbers.resize(number());
    for (int64_t& one : to.numbers) one = number();
    to.global_scale = std::stod(text(number()));
    to.inputs.resize(number());
    for (Buffer& one : to.inputs) {
      one.bytes.resize(number());
      read(one.bytes.data(), one.bytes.size());
      if (one.bytes.empty()) continue;
      check(cudaMalloc(&one.device, one.bytes.size()), "malloc");
      check(cudaMemcpy(one.device, one.bytes.data(), one.bytes.size(), cudaMemcpyHostToDevice), "copy");
    }
    to.expected.resize(number());
    read(to.expected.data(), to.expected.size() * 8);
    to.bound.resize(to.expected.size());
    read(to.bound.data(), to.bound.size() * 4);
    return true;
  }

 private:
  void read(void* to, size_t bytes) {
    if (bytes && std::fread(to, bytes, 1, file_) != 1) std::exit(2);
  }
  int64_t number() {
    int64_t value;
    read(&value, 8);
    return value;
  }
  std::string text(int64_t count) {
    std::string value(count, ' ');
    read(value.data(), count);
    return value;
  }
  FILE* file_;
};

template <class T>
T* at(const Case& from, size_t i) {
  return static_cast<T*>(from.inputs[i].device);
}

// Registers of 32 lanes for each of the case's tiles.
template <bool Sparse>
__global__ void multiply_tiles(const uint32_t* a, const uint32_t* b, const uint32_t* places,
                               const uint32_t* scale_a, const uint32_t* scale_b, float* sum) {
  const uint32_t lane = blockIdx.x * 32 + threadIdx.x;
  uint32_t own_a[4], own_b[4];
  float own[4];
  for (uint32_t i = 0; i < 4; ++i) {
    own_a[i] = a[lane * 4 + i];
    own_b[i] = b[lane * 4 + i];
    own[i] = 0.0f;
  }
  using namespace nibble::instruction;
  if constexpr (Sparse) {
    mma_fp4_sparse<1, 3>(own, own_a, own_b, places[lane], scale_a[lane], scale_b[lane]);
  } else {
    mma_fp4<1, 3>(own, own_a, {own_b[0], own_b[1]}, scale_a[lane], scale_b[lane]);
  }
  for (uint32_t i = 0; i < 4; ++i) sum[lane * 4 + i] = own[i];
}

void run_tiles(const Case& from, void* out) {
  const auto kernel = from.numbers[1] ? multiply_tiles<true> : multiply_tiles<false>;
  kernel<<<from.numbers[0], 32>>>(at<uint32_t>(from, 0), at<uint32_t>(from, 1), at<uint32_t>(from, 2),
                                  at<uint32_t>(from, 3), at<uint32_t>(from, 4), static_cast<float*>(out));
  check(cudaGetLastError(), "tiles");
}

// A temporary buffer, as large as any case needed.
void* work_of(size_t bytes) {
  static void* work = nullptr;
  static size_t most = 0;
  if (bytes > most) check(cudaMalloc(&work, most = bytes), "malloc");
  return work;
}

// Numbers: tokens, outputs, columns, silu_mul, is float16, multiprocessors.
void run_w4a4(const Case& from, void* out) {
  using namespace nibble::w4a4;
  Problem p{};
  p.x = at<uint8_t>(from, 0);
  p.x_scales = at<uint8_t>(from, 1);
  p.codes = at<uint8_t>(from, 2);
  p.scales = at<uint8_t>(from, 3);
  p.output = {at<float>(from, 4), at<void>(from, 5), nullptr, out, static_cast<float>(from.global_scale),
              static_cast<uint32_t>(from.numbers[1]), from.numbers[3] != 0};
  p.tokens = static_cast<uint32_t>(from.numbers[0]);
  p.columns = static_cast<uint32_t>(from.numbers[2]);
  const uint32_t blocks = divide(p, static_cast<uint32_t>(from.numbers[5]));
  void* const work = work_of(part_bytes(p.tokens, blocks) + flag_bytes(blocks));
  check(from.numbers[4] ? launch<__half>(p, blocks, work, nullptr)
                        : launch<__nv_bfloat16>(p, blocks, work, nullptr),
        "w4a4");
}

// Numbers: tokens, experts a token, experts, hidden, is float16 (never), intermediate, function, gated,
// multiprocessors, pairs with an expert here. Inputs: x, ids, weights; codes, scales, global scales, input scales
// and bias of w13 and of w2; limit, alpha and beta; the intermediate. Calls f(launches, temporary buffer) with
// launches that write to `out`.
template <class F>
void with_experts(const Case& from, void* out, F&& f) {
  using namespace nibble::w4a4_experts;
  const auto number = [&](size_t i) { return static_cast<uint32_t>(from.numbers[i]); };
  const uint32_t hidden = number(3), inner = number(5);
  const bool gated = number(7) != 0;
  const auto weight_of = [&](size_t first, uint32_t outputs, uint32_t columns) {
    Weight weight{at<uint8_t>(from, first),    at<uint8_t>(from, first + 1), at<float2>(from, first + 2),
                  at<float>(from, first + 3), at<void>(from, first + 4),    outputs,
                  columns};
    divide(weight);
    return weight;
  };
  float limits[3];
  std::memcpy(limits, from.inputs[13].bytes.data(), sizeof(limits));
  const Layer layer{at<uint4>(from, 0),
                    at<int32_t>(from, 1),
                    at<float>(from, 2),
                    static_cast<uint4*>(out),
                    number(0),
                    number(1),
                    number(2),
                    weight_of(3, gated ? 2 * inner : inner, hidden),
                    weight_of(8, hidden, inner),
                    {static_cast<nibble::experts::Function>(number(6)), gated, limits[0], limits[1], limits[2]}};
  for_form(tokens_of_a_tile(layer.pairs(), layer.experts), [&]<class Form>(Form) {
    const Launches<__nv_bfloat16, Form, nibble::Instructions> launches(layer, number(8));
    f(launches, work_of(launches.bytes()));
  });
}

// NaN where two results differ.
__global__ void mark_differences(const uint16_t* a, const uint16_t* b, uint16_t* to, uint32_t count) {
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) to[i] = a[i] == b[i] ? 0 : 0x7fff;
}

void run_experts_at_once(const Case& from, void* out) {
  with_experts(from, out, [](const auto& launches, void* work) { check(launches.all(work, nullptr), "experts"); });
}

// Three results: the intermediate that follows from x; the output that follows from the given one; zero where
// overlapping launches give the output that they give one after the other.
void run_experts(const Case& from, void* out) {
  const size_t inner = from.numbers[9] * from.numbers[5], count = from.numbers[0] * from.numbers[3];
  uint16_t* const results = static_cast<uint16_t*>(out);
  uint16_t *apart, *at_once;
  check(cudaMalloc(&apart, count * 2), "malloc");
  check(cudaMalloc(&at_once, count * 2), "malloc");
  for (const bool is_given : {false, true}) {
    with_experts(from, is_given ? results + inner : apart, [&](const auto& launches, void* work) {
      void* const place = static_cast<char*>(work) + launches.workspace().inner;
      check(launches.route(work, nullptr), "route");
      check(cudaDeviceSynchronize(), "route");
      check(launches.first(work, nullptr), "first product");
      check(cudaMemcpy(results, place, inner * 2, cudaMemcpyDeviceToDevice), "intermediate");
      if (is_given && inner)
        check(cudaMemcpy(place, at<void>(from, 14), inner * 2, cudaMemcpyDeviceToDevice), "given");
      check(launches.second(work, nullptr), "second product");
      check(cudaDeviceSynchronize(), "experts");
    });
  }
  run_experts_at_once(from, at_once);
  mark_differences<<<count / 256 + 1, 256>>>(apart, at_once, results + inner + count, count);
  check(cudaGetLastError(), "differences");
  check(cudaFree(apart), "free");
  check(cudaFree(at_once), "free");
}

// Numbers: tokens, outputs, columns, blockwise, is float16, one scale of x, one scale of the weight.
void run_fp8(const Case& from, void* out) {
  using namespace nibble::fp8;
  Problem p{};
  p.x = at<uint8_t>(from, 0);
  p.weight = at<uint8_t>(from, 1);
  p.x_scale = at<float>(from, 2);
  p.weight_scale = at<float>(from, 3);
  p.bias = at<void>(from, 4);
  p.out = out;
  p.tokens = static_cast<uint32_t>(from.numbers[0]);
  p.outputs = static_cast<uint32_t>(from.numbers[1]);
  p.columns = static_cast<uint32_t>(from.numbers[2]);
  p.x_has_one_scale = from.numbers[5];
  p.weight_has_one_scale = from.numbers[6];
  const bool half = from.numbers[4];
  check(from.numbers[3] ? half ? launch<__half, true>(p, nullptr) : launch<__nv_bfloat16, true>(p, nullptr)
        : half          ? launch<__half, false>(p, nullptr)
                        : launch<__nv_bfloat16, false>(p, nullptr),
        "fp8");
}

// Numbers: tokens, outputs, columns, silu_mul, is float16.
void run_sparse(const Case& from, void* out) {
  using namespace nibble::sparse;
  Problem p{};
  p.x = at<uint32_t>(from, 0);
  p.codes = at<uint4>(from, 1);
  p.places = at<uint2>(from, 2);
  p.scales = at<uint32_t>(from, 3);
  p.column_scale = at<float>(from, 4);
  p.bias = at<void>(from, 5);
  p.out = out;
  p.global_scale = static_cast<float>(from.global_scale);
  p.tokens = static_cast<uint32_t>(from.numbers[0]);
  p.outputs = static_cast<uint32_t>(from.numbers[1]);
  p.columns = static_cast<uint32_t>(from.numbers[2]);
  p.chunks = (p.columns + kChunk - 1) / kChunk;
  p.silu_mul = from.numbers[3];
  check(from.numbers[4] ? launch<nibble::HalfOperand>(p, nullptr) : launch<nibble::BfloatOperand>(p, nullptr),
        "sparse");
}

double value_of(const char* bytes, size_t i, const Case& from) {
  if (from.op == "tiles") return reinterpret_cast<const float*>(bytes)[i];
  const uint16_t bits = reinterpret_cast<const uint16_t*>(bytes)[i];
  if (from.numbers[4]) return __half2float(__ushort_as_half(bits));
  const uint32_t wide = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

// Microseconds of a launch, of 20 in a row.
float time_of(const Case& from, void (*run)(const Case&, void*), void* out) {
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "event");
  check(cudaEventCreate(&end), "event");
  check(cudaEventRecord(begin), "event");
  for (int i = 0; i < 20; ++i) run(from, out);
  check(cudaEventRecord(end), "event");
  check(cudaEventSynchronize(end), "kernel");
  float milliseconds = 0;
  check(cudaEventElapsedTime(&milliseconds, begin, end), "event");
  return milliseconds * 50;
}

bool prove(Case& of) {
  const auto run = of.op == "tiles"     ? run_tiles
                   : of.op == "w4a4"    ? run_w4a4
                   : of.op == "experts" ? run_experts
                   : of.op == "fp8"     ? run_fp8
                                        : run_sparse;
  const size_t bytes = of.expected.size() * (of.op == "tiles" ? 4 : 2);
  void* out;
  check(cudaMalloc(&out, bytes), "malloc");
  std::vector<char> found(bytes), again(bytes);
  check(cudaMemset(out, 0xff, bytes), "memset");
  run(of, out);
  check(cudaMemcpy(found.data(), out, bytes, cudaMemcpyDeviceToHost), of.name.c_str());
  size_t wrong = 0, different = 0;
  double worst = 0;  // of the bound
  for (size_t i = 0; i < of.expected.size(); ++i) {
    const double error = std::abs(value_of(found.data(), i, of) - of.expected[i]);
    if (!(error <= of.bound[i])) ++wrong;
    if (of.bound[i] > 0 && !(error / of.bound[i] <= worst)) worst = error / of.bound[i];
  }
  const int replays = 10;
  for (int i = 0; i < replays; ++i) {
    check(cudaMemset(out, 0xff, bytes), "memset");
    run(of, out);
    check(cudaMemcpy(again.data(), out, bytes, cudaMemcpyDeviceToHost), "replay");
    different += again != found;
  }
  const float microseconds = time_of(of, of.op == "experts" ? run_experts_at_once : run, out);
  std::printf("{\"op\": \"%s\", \"case\": \"%s\", \"values\": %zu, \"wrong\": %zu, \"worst_of_bound\": %.4f, "
              "\"replays\": %d, \"replays_that_differ\": %zu, \"microseconds\": %.2f}\n",
              of.op.c_str(), of.name.c_str(), of.expected.size(), wrong, worst, replays, different,
              static_cast<double>(microseconds));
  std::fflush(stdout);
  check(cudaFree(out), "free");
  for (Buffer& one : of.inputs) check(cudaFree(one.device), "free");
  return wrong == 0 && different == 0;
}

}  // namespace

int main(int, char** arguments) {
  cudaDeviceProp device{};
  check(cudaGetDeviceProperties(&device, 0), "device");
  std::printf("{\"gpu\": \"%s\", \"multiprocessors\": %d}\n", device.name, device.multiProcessorCount);
  Reader reader(arguments[1]);
  Case next;
  int cases = 0, failed = 0;
  for (; reader.next(next); ++cases) failed += !prove(next);
  std::printf("{\"cases\": %d, \"failed\": %d}\n", cases, failed);
  return failed != 0;
}
