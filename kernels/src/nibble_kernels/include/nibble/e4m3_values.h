// The 256 values of E4M3.
#pragma once

#include <array>

#include "conversions.h"

namespace nibble {

inline constexpr auto kE4m3Table = [] {
  std::array<float, 256> values{};
  for (uint32_t code = 0; code < 256; ++code) values[code] = e4m3_decode(code);
  return values;
}();
inline constexpr const float* kE4m3Values = kE4m3Table.data();

}  // namespace nibble
