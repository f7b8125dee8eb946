// What the loops of every level share; included by nvfp4_matmul_floats.h, nvfp4_matmul_bytes.h and others, in the
// unnamed namespace of a file with instructions of its own.
#pragma once

constexpr float kSumFactor = 0x1p15f;  // of floats: 2^7 of the weights, 2^8 of the scales

constexpr int64_t kAhead = 64;  // blocks that are fetched in advance, 8 KB of codes

// A tile is one sequence of bytes, and the next tile follows. Processors fetch ahead by themselves, but not
// past a page. Not to be kept in the outer caches: a weight is read once a step, and the engine's own data is there.
inline void fetch(const uint8_t* codes, const uint8_t* scales, int64_t block) {
  __builtin_prefetch(codes + kAhead * kBlockCodeBytes, 0, 0);
  __builtin_prefetch(codes + kAhead * kBlockCodeBytes + 64, 0, 0);
  if (block % 4 == 0) __builtin_prefetch(scales + kAhead * kLaneRows, 0, 0);
}

// Calls f<count> for 1 to kMost.
template <int kMost, class F>
inline void with_count(int64_t count, const F& f) {
  if constexpr (kMost > 1) {
    if (count < kMost) return with_count<kMost - 1>(count, f);
  }
  f(std::integral_constant<int, kMost>());
}

// Calls f(0) to f(kCount - 1), with constants.
template <int kCount, class F>
inline void for_each_of(const F& f) {
  [&]<int... i>(std::integer_sequence<int, i...>) {
    (f(std::integral_constant<int, i>()), ...);
  }
  (std::make_integer_sequence<int, kCount>());
}
