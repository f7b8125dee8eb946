// The source of nvfp4_layer, run on the host: test_layer_products_on_the_host.py.
#include <type_traits>

#include "nibble/warpgroup_instructions.cuh"
#include "nvfp4_layer/products.cuh"
#include "run_cluster.h"

using namespace nibble::layer;

namespace {

template <class T, class Operand, class Form>
void run(const Layer& layer, uint32_t blocks) {
  uint32_t chunks = 0;
  for (uint32_t i = 0; i < layer.count; ++i) chunks = std::max(chunks, layer.products[i].chunks);
  // All blocks of the grid at once, as if they were a cluster.
  run_cluster(blocks, Form::kThreads, Form::shared_bytes(chunks, layer.products[0].tokens), 0, 1,
              [&](uint4* memory) { compute<T, Operand, Form>(layer, memory); });
}

template <class Form>
void run_form(const Layer& layer, uint32_t blocks, bool bfloat) {
  if (bfloat) return run<__nv_bfloat16, nibble::BfloatOperand, Form>(layer, blocks);
  run<__half, nibble::HalfOperand, Form>(layer, blocks);
}

}  // namespace

struct HostProduct {
  const void *x, *codes, *scales, *column_scale, *bias, *residual, *norm;
  void* out;
  float global_scale;
  uint32_t outputs, columns, silu_mul;
};

extern "C" uint32_t shared_bytes_on_the_host(uint32_t chunks, uint32_t rows) {
  return Form<2, 2, true>::shared_bytes(chunks, rows);
}

extern "C" void compute_layer_on_the_host(bool bfloat, bool bulk, uint32_t together, bool late, const HostProduct* products,
                                          uint32_t count, uint32_t tokens, float epsilon, uint32_t* meetings,
                                          uint32_t blocks) {
  Layer layer{};
  layer.count = count;
  layer.epsilon = epsilon;
  layer.meetings = meetings;
  for (uint32_t i = 0; i < count; ++i) {
    const HostProduct& given = products[i];
    Problem& p = layer.products[i];
    p.x = static_cast<const uint4*>(given.x);
    p.codes = static_cast<const uint4*>(given.codes);
    p.scales = static_cast<const uint32_t*>(given.scales);
    p.column_scale = static_cast<const float*>(given.column_scale);
    p.bias = given.bias;
    p.residual = given.residual;
    p.out = given.out;
    p.upper_global_scale = p.lower_global_scale = given.global_scale;
    p.tokens = tokens;
    p.outputs = given.outputs;
    p.columns = given.columns;
    p.chunks = p.chunks_per_phase = (given.columns + kChunk - 1) / kChunk;
    p.groups = (given.outputs / 2 + nibble::decode::kGroup - 1) / nibble::decode::kGroup;
    p.groups_per_cluster = p.groups / blocks;
    p.ranks = 1;
    p.silu_mul = given.silu_mul;
    layer.norms[i] = static_cast<const uint4*>(given.norm);
  }
  emulated_is_late = late;
  if (!bulk) return run_form<Form<2, 2, false>>(layer, blocks, bfloat);
  if (together == 4) return run_form<Form<2, 4, true>>(layer, blocks, bfloat);
  run_form<Form<2, 2, true>>(layer, blocks, bfloat);
}
