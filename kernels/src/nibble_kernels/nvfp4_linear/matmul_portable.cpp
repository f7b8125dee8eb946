// nvfp4_matmul.h for any processor: vectors of four floats, which compilers have everywhere.
#include "nibble/nvfp4_matmul.h"

#include "nibble/conversions.h"

namespace nibble::cpu {
namespace {

constexpr int kLanes = 4;
typedef float Vec __attribute__((vector_size(16)));

inline Vec load(const float* p) { return Vec{p[0], p[1], p[2], p[3]}; }
inline void store(float* p, Vec v) {
  for (int i = 0; i < kLanes; ++i) p[i] = v[i];
}
inline Vec broadcast(float x) { return Vec{x, x, x, x}; }
inline Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
inline float sum(Vec v) { return (v[0] + v[1]) + (v[2] + v[3]); }

constexpr float kValues[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                               -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

inline void decode(const uint8_t* codes, const uint8_t* scales, Vec (&w)[kChunk / kLanes]) {
  for (int i = 0; i < kChunk / kLanes; ++i) {
    const uint32_t low = codes[2 * i], high = codes[2 * i + 1];
    const Vec values = {kValues[low & 15], kValues[low >> 4], kValues[high & 15], kValues[high >> 4]};
    w[i] = values * broadcast(e4m3_decode(scales[i / 4]));
  }
}

#include "nibble/nvfp4_matmul_kernels.h"

constexpr auto kOrder = [] {
  struct {
    uint8_t column[kChunk];
  } order{};
  for (int i = 0; i < kChunk; ++i) order.column[i] = static_cast<uint8_t>(i);
  return order;
}();

}  // namespace

extern const MatmulLevel kPortableLevel = {0, kPanel, kOrder.column, few, many};

}  // namespace nibble::cpu
