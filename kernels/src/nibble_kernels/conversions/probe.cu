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

__global__ void compare(Report* report) {
  const int first = 8 * (blockIdx.x * blockDim.x + threadIdx.x);
  float x[8], finite[8];
  long long mismatches = 0;
  for (int i = 0; i < 8; ++i) {
    const int value = first + i;
    x[i] = __uint_as_float((static_cast<uint32_t>(value % 65536) << 16) + static_cast<uint32_t>(value / 65536 - 1));
    finite[i] = isnan(x[i]) ? 0.0f : x[i];
    const uint32_t code = Instructions::e4m3_encode(x[i]);
    mismatches += code != e4m3_encode(x[i]);
    if (code != 0x7f) mismatches += Instructions::e4m3_decode(code) != e4m3_decode(code);
  }
  const Encoded8 with_nan = Instructions::e2m1_encode8(x, true), without = Instructions::e2m1_encode8(finite, false);
  const Encoded8 software = Software::e2m1_encode8(finite, false);
  for (int i = 0; i < 8; ++i) {
    mismatches += (with_nan.codes >> 4 * i & 15) != e2m1_encode(x[i]);
    mismatches += (without.codes >> 4 * i & 15) != e2m1_encode(finite[i]);
    mismatches += (software.codes >> 4 * i & 15) != e2m1_encode(finite[i]);
    mismatches += without.magnitudes[i] != e2m1_decode(e2m1_encode(finite[i]) & 7);
    mismatches += software.magnitudes[i] != without.magnitudes[i];
  }
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
  STD_TORCH_CHECK(device < kDevices, "device ", device, " is more than nibble-kernels counts");
  const std::lock_guard<std::mutex> lock(mutex);
  if (!reports[device]) {
    reports[device] = run();
    choices[device] = reports[device]->mismatches ? 1 : 2;
  }
  return *reports[device];
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
}
