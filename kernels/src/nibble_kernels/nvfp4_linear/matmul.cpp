// nvfp4_matmul.h: which instructions this processor has, and the packing of weights.
#include "nibble/nvfp4_matmul.h"

#include <atomic>
#include <cstring>

#include "nibble/arch.h"
#if NIBBLE_HAS_AMX
#include "nibble/amx_tiles.h"
#endif

namespace nibble::cpu {

extern const FloatLoops kPortableFloats;
extern const ByteLoops kPortableBytes;
#if NIBBLE_HAS_X86_LEVELS
extern const FloatLoops kAvx2Floats, kAvx512Floats, kAvx512Bf16Floats;
extern const ByteLoops kAvx2Bytes, kAvxVnniBytes, kAvx512VnniBytes;
extern const WordLoops kAvx2Words, kAvxVnniWords, kAvx512VnniWords;
#endif
#if NIBBLE_HAS_AMX
FloatLoops with_amx(FloatLoops loops);
#endif

const std::vector<const MatmulLevel*>& matmul_levels() {
  static const std::vector<const MatmulLevel*> levels = [] {
    std::vector<const MatmulLevel*> found;
#if NIBBLE_HAS_X86_LEVELS
    static const MatmulLevel kBf16{5, &kAvx512Bf16Floats, &kAvx512VnniBytes, nullptr},
        kVnni{4, &kAvx512Floats, &kAvx512VnniBytes, &kAvx512VnniWords},
        kAvx512{3, &kAvx512Floats, &kAvx2Bytes, nullptr},
        kAvxVnni{2, &kAvx2Floats, &kAvxVnniBytes, &kAvxVnniWords}, kAvx2{1, &kAvx2Floats, &kAvx2Bytes, &kAvx2Words};
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");  // and so F16C
    const bool avx512 = NIBBLE_HAS_AVX512 && avx2 && __builtin_cpu_supports("avx512f");
    const bool vnni = avx512 && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni");
#if defined(NIBBLE_WITHOUT_AVX_VNNI)
    const bool avx_vnni = false;
#elif defined(NIBBLE_AVX_VNNI_BY_AVX512)
    const bool avx_vnni = avx2 && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
#else
    const bool avx_vnni = avx2 && __builtin_cpu_supports("avxvnni");
#endif
    const bool bf16 = vnni && __builtin_cpu_supports("avx512bf16");
#if NIBBLE_HAS_AMX
    static const FloatLoops kAmxFloats = with_amx(kAvx512Bf16Floats);
    // Each block of 16 columns has its own scales: its products of bytes leave most of a tile empty.
    static const MatmulLevel kAmx{6, &kAmxFloats, &kAvx512VnniBytes, nullptr};
    if (bf16 && tiles::permitted()) found.push_back(&kAmx);
#endif
    if (bf16) found.push_back(&kBf16);
    if (vnni) found.push_back(&kVnni);
    if (avx512) found.push_back(&kAvx512);
    if (avx_vnni) found.push_back(&kAvxVnni);
    if (avx2) found.push_back(&kAvx2);
#endif
    static const MatmulLevel kPortable{0, &kPortableFloats, &kPortableBytes, nullptr};
    found.push_back(&kPortable);
    return found;
  }();
  return levels;
}

static std::atomic<int64_t> chosen_level{0};

const MatmulLevel& matmul_level() { return *matmul_levels()[chosen_level]; }

void use_matmul_level(int64_t index) { chosen_level = index; }

// Eight codes in the order of columns, to those of even columns below those of odd ones; and back.
static uint32_t pack_word(uint32_t word) {
  const auto every_other = [](uint32_t x) {
    x &= 0x0f0f0f0f;
    x = (x | x >> 4) & 0x00ff00ff;
    return (x | x >> 8) & 0xffff;
  };
  return every_other(word) | every_other(word >> 4) << 16;
}

static uint32_t unpack_word(uint32_t word) {
  const auto spread = [](uint32_t x) {
    x = (x | x << 8) & 0x00ff00ff;
    return (x | x << 4) & 0x0f0f0f0f;
  };
  return spread(word & 0xffff) | spread(word >> 16) << 4;
}

// Words are little-endian, as they are on every processor that torch has wheels for.
uint32_t pack_tile(const StoredWeight& weight, int64_t row, uint8_t* codes, uint8_t* scales) {
  const int64_t blocks = weight.columns / kBlockColumns, rows = weight.rows - row;
  uint32_t nan_rows = 0;
  for (int64_t r = 0; r < kLaneRows; ++r) {
    const uint8_t* from = weight.codes + (row + r) * blocks * 8;
    const uint8_t* from_scales = weight.scales + (row + r) * blocks;
    bool has_nan = false;
    for (int64_t b = 0; b < blocks; ++b) {
      uint32_t words[2] = {};
      uint8_t scale = 0;
      if (r < rows) {
        std::memcpy(words, from + b * 8, 8);
        scale = from_scales[b];
        has_nan |= (scale & 0x7f) == 0x7f;
      }
      for (int half = 0; half < 2; ++half) {
        const uint32_t packed = pack_word(words[half]);
        std::memcpy(codes + b * kBlockCodeBytes + half * 64 + r * 4, &packed, 4);
      }
      scales[b * kLaneRows + r] = scale;
    }
    nan_rows |= static_cast<uint32_t>(has_nan) << r;
  }
  return nan_rows;
}

void unpack_tile(const Tiles& tile, int64_t row, int64_t rows, uint8_t* codes, uint8_t* scales) {
  for (int64_t r = 0; r < kLaneRows && row + r < rows; ++r) {
    for (int64_t b = 0; b < tile.blocks; ++b) {
      for (int half = 0; half < 2; ++half) {
        uint32_t word;
        std::memcpy(&word, tile.codes + b * kBlockCodeBytes + half * 64 + r * 4, 4);
        word = unpack_word(word);
        std::memcpy(codes + ((row + r) * tile.blocks + b) * 8 + half * 4, &word, 4);
      }
      scales[(row + r) * tile.blocks + b] = tile.scales[b * kLaneRows + r];
    }
  }
}

}  // namespace nibble::cpu
