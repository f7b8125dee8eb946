// nibble::gumbel_argmax on the CPU: the tokens of vLLM 0.32's fused_gumbel_argmax (csrc/cpu/sampling_kernels.cpp),
// bit by bit, with an exponential for few tokens instead of one for each.
#include <cmath>
#include <limits>
#include <optional>

#include "nibble/cpu.h"
#include "nibble/share_out.h"

namespace nibble::cpu {
namespace {

constexpr uint64_t kStep = 0x9E3779B97F4A7C15;
constexpr double kMostNoise = 37.5;  // of 53 bits
constexpr int kBits = 53;
constexpr int64_t kTogether = 32;
// Below 1 / ln 2, so that 2^-halvings is never below an exponential.
constexpr double kHalvings = 1.4426950408;

NIBBLE_FUNCTION uint64_t mixed(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

struct Best {
  double logit, noise;
  int64_t token;
};

// 53 random bits of a token.
NIBBLE_FUNCTION uint64_t bits_of(uint64_t key, int64_t token) {
  return mixed(key + static_cast<uint64_t>(token + 1) * kStep) >> 11;
}

// 2^53 * (1 - u) - 0.5
NIBBLE_FUNCTION uint64_t rest_of(uint64_t bits) { return (uint64_t{1} << kBits) - 1 - bits; }

// Whether one of kTogether tokens may win. One cannot where 1 - u is at least the power of two that is above
// exp(exponent). No branches, so that compilers make it vector code.
NIBBLE_CPU_LEVELS bool may_win(const float* row, uint64_t key, int64_t first, Best best) {
  uint64_t found = 0;
  for (int64_t i = 0; i < kTogether; ++i) {
    const double exponent = (row[first + i] - best.logit) - best.noise;
    // NaN and what is not negative become zero: 1 - u is below 1.
    const double halvings = exponent < 0 ? std::min(-exponent * kHalvings, kBits + 1.0) : 0.0;
    const uint64_t least = (uint64_t{1} << kBits) >> static_cast<int32_t>(halvings);
    found |= rest_of(bits_of(key, first + i)) < least;
  }
  return found;
}

void take_if_best(float value, uint64_t key, int64_t token, std::optional<Best>& best) {
  const double logit = value;
  if (logit == -std::numeric_limits<double>::infinity()) return;
  const uint64_t bits = bits_of(key, token);
  if (best) {
    const double difference = logit - best->logit;
    if (difference + kMostNoise <= best->noise) return;
    if ((static_cast<double>(rest_of(bits)) + 0.5) * 0x1p-53 >= std::exp(difference - best->noise)) return;
  }
  const double noise = -std::log(-std::log((static_cast<double>(bits) + 0.5) * 0x1p-53));
  if (!best || (logit - best->logit) + noise > best->noise) best = {logit, noise, token};
}

// The token whose logit + noise is the largest. Sums are compared as differences of logits and of noise, which
// keeps the noise where logits are large.
int64_t sample(const float* row, uint64_t seed, int64_t vocabulary) {
  const uint64_t key = mixed(seed);
  std::optional<Best> best;
  for (int64_t first = 0; first < vocabulary; first += kTogether) {
    const int64_t end = std::min(first + kTogether, vocabulary);
    if (best && end - first == kTogether && !may_win(row, key, first, *best)) continue;
    for (int64_t token = first; token < end; ++token) take_if_best(row[token], key, token, best);
  }
  return best ? best->token : 0;
}

Tensor gumbel_argmax(const Tensor& logits, const Tensor& seeds) {
  std::optional<WithThreads> threads;
  if (Threads::exist()) threads.emplace();
  require(logits.scalar_type() == ScalarType::Float && logits.dim() == 2 && logits.is_contiguous() &&
              seeds.scalar_type() == ScalarType::Long && seeds.is_contiguous() && seeds.numel() == logits.size(0),
          "gumbel_argmax takes contiguous float32 rows and an int64 seed for each");
  const int64_t rows = logits.size(0), vocabulary = logits.size(1);
  const auto* from = static_cast<const float*>(logits.const_data_ptr());
  const auto* seed = static_cast<const int64_t*>(seeds.const_data_ptr());
  Tensor tokens = torch::stable::new_empty(seeds, {rows});
  auto* to = static_cast<int64_t*>(tokens.mutable_data_ptr());
  share_out(rows, [&](int64_t row) {
    to[row] = sample(from + row * vocabulary, static_cast<uint64_t>(seed[row]), vocabulary);
  });
  return tokens;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(nibble, CPU, library) { library.impl("gumbel_argmax", TORCH_BOX(&gumbel_argmax)); }

}  // namespace nibble::cpu
