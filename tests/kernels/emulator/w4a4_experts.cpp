// The kernels of experts with NVFP4 activations, their own source run on the host:
// test_w4a4_experts_on_the_host.py.
#include "nvfp4_moe/w4a4.cuh"

#include <cstring>

#include "nvfp4_moe/add_up.cuh"
#include "run_cluster.h"

using namespace nibble::w4a4_experts;
using T = __nv_bfloat16;

namespace {

// A launch of `blocks` thread blocks, the first one first: blocks wait for earlier ones alone.
template <class F>
void launch(uint32_t blocks, uint32_t threads, size_t shared_bytes, F&& f) {
  for (uint32_t block = 0; block < blocks; ++block) run_cluster(1, threads, shared_bytes, block, blocks, f);
}

Weight weight_of(const void* codes, const void* scales, const void* global_scales, const float* input_scales,
                 const void* bias, uint32_t outputs, uint32_t columns) {
  Weight weight{};
  weight.codes = static_cast<const uint8_t*>(codes);
  weight.scales = static_cast<const uint8_t*>(scales);
  weight.global_scales = static_cast<const float2*>(global_scales);
  weight.input_scales = input_scales;
  weight.bias = bias;
  weight.outputs = outputs;
  weight.columns = columns;
  divide(weight);
  return weight;
}

struct Layer {
  const void* x;
  const int32_t* ids;
  const float* weights;
  uint32_t tokens, topk, experts;
  Weight first, second;
  Activation activation;
  uint8_t* quantized[2];
  uint16_t *inner, *products, *out;
  uint32_t* places;  // of the ordered pairs: number and slot
};

template <class Form>
void run(const Layer& layer, uint32_t blocks) {
  const uint32_t pairs = layer.tokens * layer.topk;
  const Workspace w = Workspace::of<Form>(pairs, layer.experts, layer.first.columns, layer.second.columns,
                                          layer.second.outputs, blocks);
  std::vector<uint4> memory(static_cast<size_t>(w.parts.bytes) / 16, make_uint4(~0u, ~0u, ~0u, ~0u));
  uint8_t* const begin = reinterpret_cast<uint8_t*>(memory.data());
  const Routing routing{layer.ids,
                        layer.weights,
                        pairs,
                        layer.experts,
                        reinterpret_cast<Tile*>(begin + w.tiles),
                        reinterpret_cast<Pair*>(begin + w.pairs),
                        reinterpret_cast<uint32_t*>(begin + w.counts),
                        reinterpret_cast<uint32_t*>(begin + w.flags),
                        2 * blocks * nibble::w4a4::kWarps};
  RoutingTable table;
  std::vector<uint32_t> counts(kSlices * layer.experts, ~0u);
  launch(1, kRouteThreads, 16, [&](uint4*) { route(routing, Form::kTokens, table, counts.data()); });

  const auto multiply = [&](const Weight& weight, const void* x, int64_t to, void* out, bool is_second) {
    const Quantization quantization{
        static_cast<const uint4*>(x), begin + to,    weight.input_scales, routing.ordered, routing.counts,
        layer.topk,                   weight.columns, weight.chunks,       is_second};
    launch(3, 64, 16, [&](uint4*) { quantize_rows<T, Form, nibble::Software>(quantization); });
    const Problem problem{weight,
                          begin + to,
                          out,
                          routing.tiles,
                          routing.counts,
                          routing.ordered,
                          layer.activation,
                          {reinterpret_cast<float4*>(begin + w.shares),
                           routing.flags + is_second * blocks * nibble::w4a4::kWarps},
                          is_second};
    launch(blocks, nibble::w4a4::kThreads, Form::kSharedBytes, [&](uint4* shared) {
      Multiplier<T, Form>{{problem}, nibble::instruction::shared_place(reinterpret_cast<uint8_t*>(shared))}
          .run();
    });
  };
  multiply(layer.first, layer.x, w.x, layer.inner, false);
  multiply(layer.second, layer.inner, w.quantized_inner, layer.products, true);
  const uint32_t pieces = layer.second.outputs / nibble::kVector;
  launch(layer.tokens * pieces / 32 + 1, 32, 16, [&](uint4*) {
    const nibble::experts::Chosen chosen{layer.ids, nullptr, nullptr, layer.topk, layer.experts};
    nibble::experts::add_products<T>(blockIdx.x * 32 + threadIdx.x, chosen,
                                     reinterpret_cast<const uint4*>(layer.products),
                                     reinterpret_cast<uint4*>(layer.out), layer.tokens, pieces);
  });
  for (uint32_t i = 0; i < routing.counts[1]; ++i) {
    layer.places[2 * i] = routing.ordered[i].number;
    layer.places[2 * i + 1] = routing.ordered[i].slot;
  }
  const auto copy = [&](uint8_t* to, int64_t from, const Weight& weight) {
    std::memcpy(to, begin + from, size_t{w.most_tiles} * weight.chunks * kTileChunkBytes<Form>);
  };
  copy(layer.quantized[0], w.x, layer.first);
  copy(layer.quantized[1], w.quantized_inner, layer.second);
}

}  // namespace

// `inner`: [pairs, columns of w2], in the order of `places`; products: [pairs, hidden]; quantized: tiles of x and
// of the intermediate.
extern "C" void multiply_w4a4_experts_on_the_host(
    bool late, uint32_t form, uint32_t blocks, const void* x, const int32_t* ids, const float* weights,
    uint32_t tokens, uint32_t topk, uint32_t experts, uint32_t hidden, uint32_t inner_columns,
    const void* codes, const void* scales, const void* global_scales, const float* input_scales,
    const void* bias, const void* second_codes, const void* second_scales, const void* second_global_scales,
    const float* second_input_scales, const void* second_bias, uint8_t* quantized_x,
    uint8_t* quantized_inner, uint16_t* inner, uint16_t* products, uint16_t* out, uint32_t* places, uint32_t function, bool gated, float limit, float alpha, float beta) {
  emulated_is_late = late;
  const Layer layer{x,
                    ids,
                    weights,
                    tokens,
                    topk,
                    experts,
                    weight_of(codes, scales, global_scales, input_scales, bias,
                              gated ? 2 * inner_columns : inner_columns, hidden),
                    weight_of(second_codes, second_scales, second_global_scales, second_input_scales,
                              second_bias, hidden, inner_columns),
                    {static_cast<nibble::experts::Function>(function), gated, limit, alpha, beta},
                    {quantized_x, quantized_inner},
                    inner,
                    products,
                    out,
                    places};
  for_form(form, [&]<class Form>(Form) { run<Form>(layer, blocks); });
}

extern "C" uint32_t tokens_of_a_w4a4_tile(uint32_t pairs, uint32_t experts) {
  return tokens_of_a_tile(pairs, experts);
}

extern "C" int64_t w4a4_workspace_bytes(uint32_t pairs, uint32_t experts, uint32_t columns, uint32_t inner,
                                        uint32_t outputs, uint32_t blocks) {
  return for_form(tokens_of_a_tile(pairs, experts), [&]<class Form>(Form) {
    return Workspace::of<Form>(pairs, experts, columns, inner, outputs, blocks).parts.bytes;
  });
}
