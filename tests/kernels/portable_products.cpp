// The CPU's kernels that every processor has: conversions, packing and products, without torch. Prints a
// digest of each part's bytes, which must be the same on every processor.
#include "nibble/arch.h"
// Of matmul.cpp the packing alone: its list of instruction sets differs by processor.
#undef NIBBLE_HAS_X86_LEVELS
#define NIBBLE_HAS_X86_LEVELS 0

#include "nvfp4_linear/matmul.cpp"
#include "nvfp4_linear/matmul_portable.cpp"

#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

using namespace nibble;
using namespace nibble::cpu;

struct Digest {
  uint64_t value = 0xcbf29ce484222325;

  void add(const void* from, size_t bytes) {
    for (size_t i = 0; i < bytes; ++i)
      value = (value ^ static_cast<const uint8_t*>(from)[i]) * 0x100000001b3;  // FNV-1a
  }
  void print(const char* name) const {
    std::printf("%s %016llx\n", name, static_cast<unsigned long long>(value));
  }
};

uint32_t random_bits() {
  static uint64_t state = 0x9e3779b97f4a7c15;
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return static_cast<uint32_t>(state >> 32);
}

void conversions() {
  Digest codes, values;
  for (uint32_t i = 0; i < 1 << 20; ++i) {
    const float x = std::bit_cast<float>(random_bits());
    const uint8_t found[3] = {static_cast<uint8_t>(e2m1_encode(x)), static_cast<uint8_t>(e4m3_encode(x)),
                              static_cast<uint8_t>(e2m1_shifted_code(x < 0 ? -x : x) - 0x1p23f)};
    codes.add(found, x == x ? 3 : 2);
  }
  for (uint32_t code = 0; code < 256; ++code) {
    const float found[2] = {e2m1_decode(code & 15), e4m3_decode(code)};
    values.add(found, sizeof found);
  }
  codes.print("codes");
  values.print("values");
}

// Scales without NaN: products do not see those.
std::vector<uint8_t> random_bytes(size_t count, bool are_scales) {
  std::vector<uint8_t> bytes(count);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random_bits() % (are_scales ? 0x7f : 0x100));
  return bytes;
}

void products(int64_t rows, int64_t columns, int64_t count) {
  const int64_t blocks = columns / kBlockColumns, tiles = (rows + kLaneRows - 1) / kLaneRows;
  const auto codes = random_bytes(rows * columns / 2, false), scales = random_bytes(rows * blocks, true);
  std::vector<uint8_t> packed(tiles * blocks * kBlockCodeBytes), packed_scales(tiles * blocks * kLaneRows);
  std::vector<uint8_t> again(codes.size()), scales_again(scales.size());
  const StoredWeight weight{codes.data(), scales.data(), rows, columns};
  const Tiles all{packed.data(), packed_scales.data(), blocks};
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const Tiles one = all.from(tile);
    pack_tile(weight, tile * kLaneRows, const_cast<uint8_t*>(one.codes), const_cast<uint8_t*>(one.scales));
    unpack_tile(one, tile * kLaneRows, rows, again.data(), scales_again.data());
  }
  if (again != codes || scales_again != scales) std::abort();

  std::vector<float> x(count * columns), row_scales(count * blocks);
  std::vector<int8_t> values(count * columns);
  std::vector<int32_t> offsets(count * blocks);
  for (float& one : x) one = (static_cast<int32_t>(random_bits() % 2001) - 1000) / 256.0f;
  for (int8_t& one : values) one = static_cast<int8_t>(static_cast<int32_t>(random_bits() % 25) - 12);
  for (float& one : row_scales) one = static_cast<float>(random_bits() % 448);
  const QuantizedRows quantized{values.data(), row_scales.data(), offsets.data(), nullptr};
  std::vector<float> sums(count * tiles * kLaneRows);
  const int64_t panel_bytes = std::max(kPortableFloats.panel_bytes, kPortableBytes.panel_bytes);
  void* const panel = std::aligned_alloc(64, (panel_bytes + 63) / 64 * 64);
  Digest floats, bytes;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    float* const to = sums.data() + tile * kLaneRows;
    if (count <= kPortableFloats.few_rows)
      kPortableFloats.few(all.from(tile), x.data(), count, to, tiles * kLaneRows);
    else
      kPortableFloats.many(all.from(tile), 1, x.data(), count, panel, to, tiles * kLaneRows);
  }
  floats.add(sums.data(), sums.size() * sizeof(float));
  for (int64_t tile = 0; tile < tiles; ++tile) {
    float* const to = sums.data() + tile * kLaneRows;
    if (count <= kPortableBytes.few_rows)
      kPortableBytes.few(all.from(tile), quantized, count, to, tiles * kLaneRows);
    else
      kPortableBytes.many(all.from(tile), 1, quantized, count, panel, to, tiles * kLaneRows);
  }
  bytes.add(sums.data(), sums.size() * sizeof(float));
  std::free(panel);
  std::printf("%d x %d, %d rows: ", static_cast<int>(rows), static_cast<int>(columns),
              static_cast<int>(count));
  floats.print("floats");
  bytes.print("bytes");
}

}  // namespace

int main() {
  conversions();
  products(64, 256, 1);
  products(40, 1040, 3);
  products(24, 528, 40);
}
