// Rows of activations as 16-bit integers: what owns nvfp4_matmul.h's WordRows.
#pragma once

#include <vector>

#include "nvfp4_matmul.h"

namespace nibble::cpu {

class OwnedWordRows {
 public:
  // With digits: of a single row.
  void allocate(int64_t rows, int64_t columns, bool with_digits);

  // Different threads may set different rows. False if a value is not finite; the row is then zero.
  bool set(int64_t row, const float* x);

  WordRows from(int64_t row) const {
    const int64_t blocks = columns_ / kBlockColumns;
    return {words_.data() + row * columns_,
            scales_.data() + row * blocks,
            rest_of_rows_.data() + row,
            first_rests_.data() + row * (blocks + 1),
            has_digits_ ? digits_.data() : nullptr,
            digit_scales_.data(),
            has_tiny_.data() + row};
  }

 private:
  void set_rests(int64_t row, const std::vector<uint32_t>& lacking, const std::vector<float>& rest);

  int64_t columns_ = 0;
  bool has_digits_ = false;
  std::vector<int16_t> words_;
  std::vector<float> scales_;
  std::vector<uint8_t> has_tiny_;
  std::vector<int8_t> digits_;
  std::vector<DigitScale> digit_scales_;
  std::vector<const Rest*> rest_of_rows_;
  std::vector<int32_t> first_rests_;
  std::vector<std::vector<Rest>> rests_;  // of each row
};

}  // namespace nibble::cpu
