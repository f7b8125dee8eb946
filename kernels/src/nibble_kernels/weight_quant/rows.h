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

}  // namespace nibble::cpu
