// RMSNorms beside products, without kernels of their own.
#pragma once

#include <cstdint>

namespace nibble {

// Before a product, whose x comes without the norm's factors: 1 / RMS of each row. Or after one that writes its sum
// with a residual, that times the norm's weight, and sums of squares.
enum class Norm { none, before, after };

// After a product, for the next one: the norm's weight, what it scales, and sums of squares, [parts, tile]. In
// warpgroup.cuh `scaled` is in order for tiles of `tile` tokens (warpgroup_form.h), and a part is a thread block's; in
// decode.cuh it is in rows, and a part is a group's.
struct NormAfter {
  const void* weight;
  void* scaled;
  float* squares;
  uint32_t tile;
};

// Before a product: sums of squares, [parts, tile].
struct NormBefore {
  const float* squares;
  uint32_t parts;
  float epsilon;
  uint32_t tile;
};

}  // namespace nibble
