// Rows of activations as 16-bit integers: what owns nvfp4_matmul.h's WordRows.
#pragma once

#include <vector>

#include "nvfp4_matmul.h"

namespace nibble::cpu {

class OwnedWordRows {
 public:
  void allocate(int64_t rows, int64_t columns);

  // Different threads may set different rows. False if a value is not finite; the row is then zero.
  bool set(int64_t row, const float* x);

  WordRows from(int64_t row) const {
    const int64_t block = row * columns_ / kBlockColumns;
    return {words_.data() + row * columns_, scales_.data() + block, more_.data() + block};
  }

 private:
  void add_parts(int64_t row, const std::vector<float>& rest);

  int64_t columns_ = 0;
  std::vector<int16_t> words_;
  std::vector<float> scales_;
  std::vector<const WordPart*> more_;
  std::vector<std::vector<WordPart>> parts_;  // of each row
};

}  // namespace nibble::cpu
