// The activation functions of experts: reference.py has the formulas.
#pragma once

#include <cstdint>

namespace nibble::experts {

enum class Function : uint32_t { silu, gelu_tanh, relu2 };

struct Activation {
  Function function;
  bool gated;
  float limit, alpha, beta;

  __device__ __forceinline__ bool is_plain() const {
    return gated && function == Function::silu && limit > 3e38f && alpha == 1.0f && beta == 0.0f;
  }
  __device__ __forceinline__ float operator()(float x) const {
    if (function == Function::relu2) return x > 0.0f ? x * x : x * 0.0f;  // NaN stays
    const float inner = function == Function::silu ? alpha * x : 1.5957691216f * (x + 0.044715f * x * x * x);
    return __fdividef(x, 1.0f + __expf(-inner));
  }
  __device__ __forceinline__ float operator()(float gate, float up) const {
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
    return (*this)(gate) * (up + beta);
  }
};

// Activation where it is_plain.
struct SiluMul {
  __device__ __forceinline__ float operator()(float x) const { return __fdividef(x, 1.0f + __expf(-x)); }
  __device__ __forceinline__ float operator()(float gate, float up) const { return (*this)(gate) * up; }
};

}  // namespace nibble::experts
