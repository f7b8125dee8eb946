// Rows of a weight in NVFP4, one after another.
#pragma once

#include <cstdint>
#include <vector>

namespace nibble::cpu {

// The arguments of nibble::nvfp4_quantize_weight, and what a thread keeps between rows.
class WeightRows {
 public:
  WeightRows(int64_t columns, float amax, float global_scale, bool four_over_six);

  // The codes and scales of a row.
  void quantize(const float* x, uint8_t* packed, uint8_t* scales);

 private:
  void choose(const float* x, uint8_t* packed, uint8_t* scales);

  int64_t blocks_;
  float sixth_, global_scale_;
  bool four_over_six_;
  std::vector<float> largest_;
  // With the largest element of each block at 4, and the errors of both.
  std::vector<uint8_t> scales_, packed_;
  std::vector<float> six_errors_, four_errors_;
};

// Sixteen times the highest magnitude of bfloat16 that is quantized to zero, and to a code below 1, 2, ... 7.
struct Below {
  typedef int16_t Block __attribute__((vector_size(32)));
  Block magnitudes[8];
};

// The same for bfloat16, which must be finite, and without four-over-six. A magnitude of 15 bits needs no
// division: for each scale a table has where each code begins.
class Bfloat16Rows {
 public:
  explicit Bfloat16Rows(float global_scale);

  // The codes and scales of a row. `largest` has room for a number a block.
  void quantize(const uint16_t* x, int64_t blocks, float* largest, uint8_t* packed, uint8_t* scales) const;

 private:
  float global_scale_;
  std::vector<Below> below_;  // by the code of the scale
};

}  // namespace nibble::cpu
