// nvfp4_matmul.h for any processor: loops that compilers make vectors of.
#include "nibble/nvfp4_matmul.h"

#include <cstring>

#include "nibble/conversions.h"

namespace nibble::cpu {
namespace {

struct Lanes {
  float lane[kLaneRows];
};

template <class F>
inline Lanes lanes(const F& f) {
  Lanes result;
  for (int i = 0; i < kLaneRows; ++i) result.lane[i] = f(i);
  return result;
}

inline Lanes zero() { return Lanes{}; }
inline Lanes load(const float* p) {
  return lanes([&](int i) { return p[i]; });
}
inline void store(float* p, Lanes a) { std::memcpy(p, a.lane, sizeof a.lane); }
inline Lanes broadcast(float x) {
  return lanes([&](int) { return x; });
}
inline Lanes operator*(const Lanes& a, const Lanes& b) {
  return lanes([&](int i) { return a.lane[i] * b.lane[i]; });
}
inline Lanes fma(const Lanes& a, const Lanes& b, const Lanes& c) {
  return lanes([&](int i) { return a.lane[i] * b.lane[i] + c.lane[i]; });
}
inline Lanes scales_of(const uint8_t* p) {
  return lanes([&](int i) { return e4m3_decode(p[i]) * 0x1p-8f; });
}

constexpr int8_t kDoubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

typedef float X;
constexpr Operand kOperand = Operand::kFloat;
constexpr float kFactor = 1.0f;
constexpr int kStepColumns = 1;
constexpr int kFewAtOnce = 4, kTilesAtOnce = 1, kRowsAtOnce = 4;
constexpr int64_t kDepth = 32;

// Of each row's four bytes of a half, one nibble.
template <int kColumn>
inline int8_t doubled_at(const uint8_t* codes, int row) {
  constexpr int place = kColumn % 8 / 2 + kColumn % 2 * 4;
  return kDoubled[codes[kColumn / 8 * 64 + row * 4 + place / 2] >> place % 2 * 4 & 15];
}

struct Decoded {
  const uint8_t* codes;
  explicit Decoded(const uint8_t* codes) : codes(codes) {}
};

template <int kColumn>
inline Lanes weights(const Decoded& decoded) {
  return lanes([&](int i) { return 0x1p-8f * doubled_at<kColumn>(decoded.codes, i); });
}

inline void store_scaled(const Lanes& w, const Lanes& scale, char* to) {
  store(reinterpret_cast<float*>(to), w * scale);
}
inline Lanes panel_weights(const char* from) { return load(reinterpret_cast<const float*>(from)); }
inline Lanes multiply(const Lanes& sums, const Lanes& w, const float* x) { return fma(w, broadcast(*x), sums); }

#include "nibble/nvfp4_matmul_floats.h"

// Signed values here, so that the offset is added and taken away.
struct Bytes {
  int8_t value[4 * kLaneRows];
};
constexpr int kFewOfBytes = 4, kTilesOfBytes = 1, kRowsOfBytes = 4;
constexpr int64_t kDepthOfBytes = 32;

template <int i>
inline Bytes bytes_of(const uint8_t* codes) {
  Bytes w;
  for (int at = 0; at < 4 * kLaneRows; ++at) w.value[at] = kDoubled[codes[i / 2 * 64 + at] >> i % 2 * 4 & 15];
  return w;
}
inline void store_bytes(char* to, const Bytes& w) { std::memcpy(to, w.value, sizeof w.value); }
inline Bytes load_bytes(const char* from) {
  Bytes w;
  std::memcpy(w.value, from, sizeof w.value);
  return w;
}

inline Lanes block_dot(const Bytes (&w)[4], const int8_t* x, const int32_t*) {
  int32_t sums[kLaneRows] = {};
  for (int i = 0; i < 4; ++i)
    for (int at = 0; at < kLaneRows; ++at)
      for (int byte = 0; byte < 4; ++byte) sums[at] += w[i].value[at * 4 + byte] * x[i * 4 + byte];
  return lanes([&](int i) { return static_cast<float>(sums[i]); });
}

#include "nibble/nvfp4_block_dots.h"
#include "nibble/nvfp4_matmul_bytes.h"

}  // namespace

extern const FloatLoops kPortableFloats = kFloatLoops;
extern const ByteLoops kPortableBytes = kByteLoops;

}  // namespace nibble::cpu
