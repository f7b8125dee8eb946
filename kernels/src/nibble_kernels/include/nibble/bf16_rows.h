// Products of a few rows of BF16 activations with rows of a BF16 weight as checkpoints store it.
#pragma once

#include <cstdint>

namespace nibble::cpu {

constexpr int64_t kBf16Rows = 8;  // of activations, at most

// sums[row * stride + n] = Σ_k x[row][k] · weight[n][k] for `count` rows of x and `weight_rows` of the weight.
// A sum's order depends on the level and on nothing else.
void bf16_products(const uint16_t* x, int64_t count, const uint16_t* weight, int64_t weight_rows, int64_t columns,
                   float* sums, int64_t stride);
// The same with AVX2 and FMA; there where matmul_level() has them.
void bf16_products_avx2(const uint16_t* x, int64_t count, const uint16_t* weight, int64_t weight_rows,
                        int64_t columns, float* sums, int64_t stride);
// The same with AVX-512's products of BF16; there where matmul_level() has them.
void bf16_products_avx512_bf16(const uint16_t* x, int64_t count, const uint16_t* weight, int64_t weight_rows,
                               int64_t columns, float* sums, int64_t stride);

using Bf16Products = decltype(&bf16_products);
// Those of matmul_level().
Bf16Products bf16_products_of_level();

}  // namespace nibble::cpu
