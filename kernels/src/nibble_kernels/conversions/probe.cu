// Runs the device's conversion instructions against the software and decides which of the two kernels use.
#include "nibble/cuda.h"

#include <atomic>
#include <mutex>
#include <optional>

#include "nibble/conversions.cuh"

namespace nibble {
namespace {

struct Report {
  long long e2m1_instruction;
  long long e4m3_instruction;
  long long compared;
  long long mismatches;
};

// Every bfloat16, among them every tie and limit of both formats, and the floats next to it on either side.
constexpr int kValues = 3 * 65536;

// How many of eight codes differ from what the integers give for x * factor.
template <class Convert>
__device__ int wrong_codes(const float (&x)[8], const uint4& words, float amax, float factor) {
  const Encoded8 found = Convert::e2m1_encode8(x, words, amax, factor);
  int wrong = 0;
  for (int i = 0; i < 8; ++i) {
    const uint32_t code = e2m1_encode(x[i] * factor);
    wrong += (found.codes >> 4 * i & 15) != code || found.magnitudes[i] != e2m1_decode(code & 7);
  }
  return wrong;
}

__global__ void compare(Report* report) {
  const int first = 8 * (blockIdx.x * blockDim.x + threadIdx.x);
  float x[8];
  uint32_t words[4] = {};
  float amax = 0.0f;
  long long mismatches = 0;
  for (int i = 0; i < 8; ++i) {
    const int value = first + i;
    const uint32_t bits =
        (static_cast<uint32_t>(value % 65536) << 16) + static_cast<uint32_t>(value / 65536 - 1);
    x[i] = __uint_as_float(bits);
    words[i / 2] |= bits >> 16 << 16 * (i % 2);
    amax = maximum(amax, fabsf(x[i]));
    const uint32_t code = Instructions::e4m3_encode(x[i]);
    mismatches += code != e4m3_encode(x[i]);
    mismatches += (code & 0x7f) != 0x7f && Instructions::e4m3_decode(code) != e4m3_decode(code);
  }
  const uint4 packed = {words[0], words[1], words[2], words[3]};
  for (const float factor : {1.0f, 0.7f, 0x1p-125f}) {
    mismatches +=
        wrong_codes<Instructions>(x, packed, amax, factor) + wrong_codes<Software>(x, packed, amax, factor);
  }
  const uint32_t unscaled = Instructions::e2m1_encode8(x);
  mismatches += unscaled != Software::e2m1_encode8(x);
  if (mismatches) atomicAdd(reinterpret_cast<unsigned long long*>(&report->mismatches), mismatches);
  if (first == 0) {
    report->e2m1_instruction = NIBBLE_HAS_E2M1_INSTRUCTIONS;
    report->e4m3_instruction = NIBBLE_HAS_E4M3_INSTRUCTIONS;
    report->compared = kValues;
  }
}

Report run() {
  Report report{}, *on_device;
  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  check(cudaMalloc(&on_device, sizeof(Report)));
  check(cudaMemsetAsync(on_device, 0, sizeof(Report), stream));
  launch(compare, dim3(kValues / 8 / 256), dim3(256), 0, stream, on_device);
  check(cudaMemcpyAsync(&report, on_device, sizeof(Report), cudaMemcpyDeviceToHost, stream));
  check(cudaStreamSynchronize(stream));
  check(cudaFree(on_device));
  check(cudaStreamDestroy(stream));
  return report;
}

constexpr int kDevices = 64;
std::mutex mutex;
std::optional<Report> reports[kDevices];
std::atomic<int> choices[kDevices];  // 0 unknown, 1 software, 2 instructions

// The current device's.
Report report_of(int device) {
  require(device < kDevices, "device ", device, " is more than nibble-kernels counts");
  const std::lock_guard<std::mutex> lock(mutex);
  if (!reports[device]) {
    reports[device] = run();
    choices[device] = reports[device]->mismatches ? 1 : 2;
  }
  return *reports[device];
}

// nibble::use_software_conversions
void use_software_conversions(const Tensor& like, bool software) {
  const int device = like.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const bool sound = report_of(device).mismatches == 0;
  choices[device] = sound && !software ? 2 : 1;
}

// nibble::conversion_mismatches
Tensor conversion_mismatches(const Tensor& like) {
  const torch::stable::accelerator::DeviceGuard guard(like.get_device_index());
  const Report report = report_of(like.get_device_index());
  Tensor result = torch::stable::empty(std::vector<int64_t>{4}, ScalarType::Long);
  long long* values = static_cast<long long*>(result.mutable_data_ptr());
  values[0] = report.e2m1_instruction;
  values[1] = report.e4m3_instruction;
  values[2] = report.compared;
  values[3] = report.mismatches;
  return result;
}

}  // namespace

bool use_instructions(int device, cudaStream_t stream) {
  if (device < kDevices && choices[device]) return choices[device] == 2;
  cudaStreamCaptureStatus capturing;
  check(cudaStreamIsCapturing(stream, &capturing));
  return capturing == cudaStreamCaptureStatusNone && report_of(device).mismatches == 0;
}

}  // namespace nibble

STABLE_TORCH_LIBRARY_IMPL(nibble, CUDA, library) {
  library.impl("conversion_mismatches", TORCH_BOX(&nibble::conversion_mismatches));
  library.impl("use_software_conversions", TORCH_BOX(&nibble::use_software_conversions));
}
