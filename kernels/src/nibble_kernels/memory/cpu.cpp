// nibble::read_memory: reads a tensor with torch's threads and does as little else as possible, to measure how
// fast that is.
#include "nibble/tensors.h"

namespace nibble::cpu {
namespace {

constexpr int64_t kWordsAtOnce = 1 << 15;

// A cache line.
typedef uint64_t Line __attribute__((vector_size(64), aligned(8)));
constexpr int64_t kLineWords = 8, kLines = 4;

NIBBLE_CPU_LEVELS uint64_t sum_of(const uint64_t* words, int64_t count) {
  Line lines[kLines] = {};
  int64_t at = 0;
  for (; at + kLines * kLineWords <= count; at += kLines * kLineWords)
    for (int64_t i = 0; i < kLines; ++i) lines[i] += *reinterpret_cast<const Line*>(words + at + i * kLineWords);
  uint64_t sum = 0;
  for (int64_t i = 0; i < kLineWords; ++i) sum += lines[0][i] + lines[1][i] + lines[2][i] + lines[3][i];
  for (; at < count; ++at) sum += words[at];
  return sum;
}

Tensor read_memory(const Tensor& x) {
  require(x.is_contiguous() && x.scalar_type() == ScalarType::Byte && x.numel() % 8 == 0,
          "read_memory reads contiguous uint8, a multiple of 8 bytes");
  const auto* words = static_cast<const uint64_t*>(x.const_data_ptr());
  const int64_t count = x.numel() / 8, parts = (count + kWordsAtOnce - 1) / kWordsAtOnce;
  std::vector<uint64_t> sums(parts);
  torch::stable::parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part)
      sums[part] = sum_of(words + part * kWordsAtOnce, std::min(kWordsAtOnce, count - part * kWordsAtOnce));
  });
  Tensor result = torch::stable::new_empty(x, {}, ScalarType::Long);
  *static_cast<int64_t*>(result.mutable_data_ptr()) = static_cast<int64_t>(sum_of(sums.data(), parts));
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(nibble, CPU, library) { library.impl("read_memory", TORCH_BOX(&read_memory)); }

}  // namespace nibble::cpu
