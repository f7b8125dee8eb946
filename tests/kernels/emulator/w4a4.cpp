// The W4A4 kernel's own source, run on the host: test_w4a4_kernel_on_the_host.py.
#include "nvfp4_linear/w4a4.cuh"

#include "run_cluster.h"

using namespace nibble::w4a4;

namespace {

template <class T, class Form>
void run(Problem p, uint32_t blocks) {
  p.row_blocks = (p.groups + kGroups - 1) / kGroups;
  p.token_tiles = (p.tokens + Form::kTokens - 1) / Form::kTokens;
  const float nan = __uint_as_float(~0u);
  std::vector<float4> parts(size_t{blocks} * Form::kSlots * kLanes, {nan, nan, nan, nan});
  std::vector<uint32_t> flags(blocks * kWarps);
  p.shares = {parts.data(), flags.data()};
  for (uint32_t block = 0; block < blocks; ++block) {
    run_cluster(1, kThreads, Form::kSharedBytes, block, blocks, [&](uint4* memory) {
      Multiplier<Form, Matrix<T, Form>>{{p},
                                        nibble::instruction::shared_place(reinterpret_cast<uint8_t*>(memory))}
          .run();
    });
  }
}

template <class T>
void run_form(uint32_t tokens_of_a_tile, const Problem& p, uint32_t blocks) {
  if (tokens_of_a_tile == 32) return run<T, Few>(p, blocks);
  if (tokens_of_a_tile == 64) return run<T, Some>(p, blocks);
  run<T, Many>(p, blocks);
}

template <class T>
void run_slices(uint32_t tokens_of_a_tile, const Problem& p, uint32_t blocks, uint32_t most_tokens) {
  for (uint32_t first = 0; first < p.tokens; first += most_tokens)
    run_form<T>(tokens_of_a_tile, p.slice(first, most_tokens), blocks);
}

}  // namespace

// Of the largest form, with its flags.
extern "C" uint32_t sum_bytes_of_a_block() { return Many::kSlots * kLanes * 16 + kWarps * 4; }

extern "C" void multiply_w4a4_on_the_host(bool late, bool bfloat, uint32_t tokens_of_a_tile, const void* x,
                                          const void* x_scales, const void* codes, const void* scales,
                                          const void* column_scale, const void* bias,
                                          const void* residual, void* out, float global_scale,
                                          uint32_t tokens, uint32_t outputs, uint32_t columns,
                                          uint32_t blocks, bool silu_mul, uint32_t most_tokens) {
  emulated_is_late = late;
  Problem p{};
  p.x = static_cast<const uint8_t*>(x);
  p.x_scales = static_cast<const uint8_t*>(x_scales);
  p.codes = static_cast<const uint8_t*>(codes);
  p.scales = static_cast<const uint8_t*>(scales);
  p.output = {static_cast<const float*>(column_scale), bias, residual, out, global_scale, outputs, silu_mul};
  p.tokens = tokens;
  p.columns = columns;
  p.chunks = (columns + kChunk - 1) / kChunk;
  p.groups = (outputs / 2 + kGroup - 1) / kGroup;
  if (bfloat) return run_slices<__nv_bfloat16>(tokens_of_a_tile, p, blocks, most_tokens);
  run_slices<__half>(tokens_of_a_tile, p, blocks, most_tokens);
}
