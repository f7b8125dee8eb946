// Words of global memory that kernels find at zero and leave at zero.
#pragma once

#include <map>
#include <mutex>

#include "nibble/cuda.h"

namespace nibble {

// `words` words that are zero before and after each launch, of a stream, on which launches follow each other.
// Each Purpose has its own, always as many.
template <class Purpose>
uint32_t* zero_words_of(int device, cudaStream_t stream, size_t words) {
  static std::mutex mutex;
  static std::map<std::pair<int, cudaStream_t>, uint32_t*> known;
  const std::lock_guard lock(mutex);
  uint32_t*& found = known[{device, stream}];
  if (found != nullptr) return found;
  // Also while the stream is captured.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  check(cudaThreadExchangeStreamCaptureMode(&mode));
  void* memory = nullptr;
  cudaStream_t own = nullptr;
  check(cudaMalloc(&memory, words * sizeof(uint32_t)));
  check(cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking));
  check(cudaMemsetAsync(memory, 0, words * sizeof(uint32_t), own));
  check(cudaStreamSynchronize(own));
  check(cudaStreamDestroy(own));
  check(cudaThreadExchangeStreamCaptureMode(&mode));
  return found = static_cast<uint32_t*>(memory);
}

}  // namespace nibble
