// Products of float32 activations with NVFP4 weights on the CPU, the weights read as checkpoints store them.
// No torch here: nvfp4_linear and nvfp4_moe bring tensors, threads and what follows the sums.
#pragma once

#include <cstdint>
#include <vector>

namespace nibble::cpu {

// Columns that are decoded at a time: 32 bytes of codes and 4 scales.
constexpr int64_t kChunk = 64;
// Weight rows that one thread multiplies at a time.
constexpr int64_t kWeightRows = 24;
// Up to so many rows of activations the weights are decoded in registers; above, in tiles that every row
// uses.
constexpr int64_t kFewRows = 8;

// A weight [rows, columns]: codes [rows, columns / 2], even column low, and E4M3 scales [rows, columns / 16].
struct Nvfp4Weight {
  const uint8_t* codes;
  const uint8_t* scales;
  int64_t rows;
  int64_t columns;
};

// One set of instructions. `few` and `many` write the sums of weight rows [begin, end) as [row][activation
// row].
struct MatmulLevel {
  int64_t number;        // in __init__.py's LEVELS
  int64_t panel_rows;    // activation rows side by side in the layout of `many`
  const uint8_t* order;  // order[i] is the column of the i-th decoded element of a chunk
  // x is [count][padded columns] in decoded order, count at most 4; sums has `stride` floats a weight row.
  void (*few)(const Nvfp4Weight& weight, int64_t begin, int64_t end, const float* x, int64_t count,
              float* sums, int64_t stride);
  // x is [panels][padded columns][panel_rows]; at most kWeightRows weight rows.
  void (*many)(const Nvfp4Weight& weight, int64_t begin, int64_t end, const float* x, int64_t panels,
               float* sums);
};

// The best level that this processor has, or the one chosen by use_matmul_level.
const MatmulLevel& matmul_level();
// Every level compiled in that this processor has, best first.
const std::vector<const MatmulLevel*>& matmul_levels();
// Which of them is used from now on.
void use_matmul_level(int64_t index);

// Rows of activations in the layout that the level wants for their number.
class Activations {
 public:
  Activations(int64_t rows, int64_t columns);

  // Rows may be set by different threads.
  void set_row(int64_t row, const float* x);

  // Floats of `sums` for each weight row: rows, padded.
  int64_t stride() const { return stride_; }

  // sums[n - begin][row] = Σ_k x[row][k] · weight[n][k], end - begin at most kWeightRows. In float32, each
  // sum in an order that depends on the level and on whether there are more than kFewRows rows, and on
  // nothing else.
  void multiply(const Nvfp4Weight& weight, int64_t begin, int64_t end, float* sums) const;

 private:
  const MatmulLevel& level_;
  int64_t rows_;
  int64_t columns_;
  int64_t padded_columns_;
  int64_t stride_;
  bool few_;
  std::vector<float> values_;
};

}  // namespace nibble::cpu
