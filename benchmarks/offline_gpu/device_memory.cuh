// Memory of a GPU for programs without torch. They end with CUDA's message where a call fails.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

inline void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::printf("%s\n", cudaGetErrorString(error));
  std::exit(1);
}

// Zeros.
template <class T>
T* allocate(size_t count) {
  void* found = nullptr;
  const size_t bytes = std::max<size_t>(count * sizeof(T), 256);
  check(cudaMalloc(&found, bytes));
  check(cudaMemset(found, 0, bytes));
  return static_cast<T*>(found);
}

template <class T>
T* copied(const std::vector<T>& values) {
  T* const found = allocate<T>(values.size());
  check(cudaMemcpy(found, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return found;
}
