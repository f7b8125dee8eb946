// The kernel of experts, its own source run on the host: test_grouped_experts_on_the_host.py.
#include "nvfp4_moe/few.cuh"
#include "run_cluster.h"

using namespace nibble::experts;

namespace {

struct Layer {
  const uint16_t* x;
  Chosen chosen;
  uint32_t tokens, hidden, inner;

  uint32_t pairs() const { return tokens * chosen.pairs_of_token(); }
};

// What route.cuh leaves: tiles, pairs and weights in their order, x as the products read it.
template <class Form>
struct Routed {
  std::vector<Tile> tiles;
  std::vector<uint32_t> pairs;
  std::vector<float> weights;
  std::vector<uint32_t> x;

  Routed(const Layer& layer, uint32_t chunks) {
    for (uint32_t expert = 0; expert < layer.chosen.experts(); ++expert) {
      const uint32_t begin = pairs.size();
      for (uint32_t pair = 0; pair < layer.pairs(); ++pair) {
        if (layer.chosen.expert_of(pair) != static_cast<int32_t>(expert)) continue;
        pairs.push_back(pair);
        weights.push_back(layer.chosen.weight_of(pair));
      }
      for (uint32_t first = begin; first < pairs.size(); first += Form::kTokens)
        tiles.push_back({expert, first, min<uint32_t>(Form::kTokens, pairs.size() - first), 0});
    }
    const uint32_t words = Form::kXChunkBytes / 4;
    x.resize(tiles.size() * chunks * words);
    for (uint32_t tile = 0; tile < tiles.size(); ++tile) {
      for (uint32_t token = 0; token < tiles[tile].count; ++token) {
        const uint32_t pair = pairs[tiles[tile].first + token];
        const uint16_t* row = layer.x + size_t{pair / layer.chosen.pairs_of_token()} * layer.hidden;
        for (uint32_t column = 0; column < layer.hidden; column += 2) {
          const size_t chunk = size_t{tile} * chunks + column / kChunk;
          x[chunk * words + Form::word_of(token, column)] = row[column] | uint32_t{row[column + 1]} << 16;
        }
      }
    }
  }
};

Weight weight_of(const void* codes, const void* scales, const void* global_scales, const void* bias,
                 uint32_t outputs, uint32_t columns, uint32_t experts) {
  Weight weight{};
  weight.global_scales = static_cast<const float2*>(global_scales);
  weight.bias = bias;
  weight.outputs = outputs;
  weight.chunks = quotient_up(columns, kChunk);
  weight.groups = quotient_up(outputs / 2, kGroup);
  const auto map = [&](const void* words, uint32_t each) {
    return CUtensorMap{static_cast<const uint32_t*>(words), each * weight.chunks, experts * weight.groups,
                       each};
  };
  weight.codes = map(codes, kCodeBytes / 4);
  weight.scales = map(scales, kScaleBytes / 4);
  return weight;
}

template <class Form>
void set_boxes(Problem& p) {
  for (Weight* weight : {&p.first, &p.second, &p.shared_first, &p.shared_second}) {
    weight->row_blocks = quotient_up(weight->groups, Form::kGroups);
    for (CUtensorMap* map : {&weight->codes, &weight->scales}) {
      map->box_rows = Form::kGroups;
      map->box_chunks = Form::kStageChunks;
    }
  }
}

template <class Form>
void run(Problem p, const Layer& layer, uint32_t blocks) {
  set_boxes<Form>(p);
  const Routed<Form> routed(layer, p.first.chunks);
  const uint32_t tiles = routed.tiles.size();
  // Bits of NaN where nothing is written, zeros where columns fill the last chunk.
  const size_t words = size_t{tiles} * p.second.chunks * (Form::kXChunkBytes / 4);
  std::vector<uint32_t> inner(words, layer.inner % kChunk ? 0 : ~0u), complete(tiles + 1);
  uint32_t queue = 0;
  p.x = reinterpret_cast<const uint4*>(routed.x.data());
  p.inner = inner.data();
  p.tiles = routed.tiles.data();
  p.tile_count = &tiles;
  p.pairs = routed.pairs.data();
  p.weights = routed.weights.data();
  p.queue = &queue;
  p.complete = complete.data();
  p.most_tiles = tiles;
  run_cluster(blocks, Form::kThreads, Form::kSharedBytes, 0, 1, [&](uint4* memory) {
    const Multiplier<__nv_bfloat16, nibble::BfloatOperand, Form> multiplier{
        p, nibble::instruction::shared_place(reinterpret_cast<uint8_t*>(memory))};
    multiplier.start();
    multiplier.run();
  });
}

// From the choices to products, twice on the same counters. Whether they are zero after it.
template <class Form>
bool run_few_twice(Problem p, const Layer& layer, uint32_t blocks) {
  set_boxes<Form>(p);
  const uint32_t pairs = layer.pairs();
  std::vector<uint32_t> words(FewCounters::kWords);
  const FewCounters counters(words.data());
  p.queue = counters.queue;
  p.complete = counters.complete;
  const Choices choices{.chosen = layer.chosen,
                        .x = reinterpret_cast<const uint4*>(layer.x),
                        .pairs = pairs,
                        .columns = layer.hidden,
                        .inner_columns = layer.inner};
  for (uint32_t launch = 0; launch < 2; ++launch) {
    std::vector<uint16_t> inner(size_t{pairs} * layer.inner, 0xffff);  // NaN where nothing is written
    p.inner = reinterpret_cast<uint32_t*>(inner.data());
    std::vector<FewTable> tables(blocks);
    std::memset(static_cast<void*>(tables.data()), 0xff, blocks * sizeof(FewTable));
    run_cluster(blocks, Form::kThreads, Form::kSharedBytes, 0, 1, [&](uint4* memory) {
      uint8_t* const bytes = reinterpret_cast<uint8_t*>(memory);
      run_few<__nv_bfloat16, nibble::BfloatOperand, Form>(
          p, choices, nibble::instruction::shared_place(bytes), bytes, tables[blockIdx.x]);
    });
  }
  return std::all_of(words.begin(), words.end(), [](uint32_t word) { return word == 0; });
}

}  // namespace

// A weight's tensors: weight.py.
struct Stored {
  const void *codes, *scales, *global_scales, *bias;
};

// stored: of the experts' first and second weight, and of the shared expert's; without shared_weights, these
// are not read. False if counters that must be zero are not.
extern "C" bool multiply_experts_on_the_host(bool late, int32_t form, uint32_t blocks, const void* x,
                                             const int32_t* ids, const float* weights,
                                             const uint16_t* shared_weights, uint32_t tokens, uint32_t topk,
                                             uint32_t experts, uint32_t hidden, uint32_t inner,
                                             const Stored* stored, void* products, uint32_t function,
                                             bool gated, float limit, float alpha, float beta) {
  emulated_is_late = late;
  Problem p{};
  const auto first = [&](const Stored& s, uint32_t count) {
    return weight_of(s.codes, s.scales, s.global_scales, s.bias, gated ? 2 * inner : inner, hidden, count);
  };
  const auto second = [&](const Stored& s, uint32_t count) {
    return weight_of(s.codes, s.scales, s.global_scales, s.bias, hidden, inner, count);
  };
  p.first = first(stored[0], experts), p.second = second(stored[1], experts);
  p.shared_first = first(stored[2], 1), p.shared_second = second(stored[3], 1);
  p.routed = experts;
  p.products = products;
  p.activation = {static_cast<Function>(function), gated, limit, alpha, beta};
  const Chosen chosen{ids, weights, shared_weights, topk, experts};
  const Layer layer{static_cast<const uint16_t*>(x), chosen, tokens, hidden, inner};
  if (form == kFew4) return run_few_twice<FewForm4>(p, layer, blocks);
  if (form == kFew8) return run_few_twice<FewForm8>(p, layer, blocks);
  if (form == 8) run<Form8>(p, layer, blocks);
  if (form == 16) run<Form16>(p, layer, blocks);
  if (form == 32) run<Form32>(p, layer, blocks);
  if (form == 64) run<Form64>(p, layer, blocks);
  if (form == 128) run<Form128>(p, layer, blocks);
  return true;
}

extern "C" int64_t experts_workspace_bytes(uint32_t pairs, uint32_t experts, uint32_t hidden,
                                           uint32_t inner) {
  const uint32_t chunks = quotient_up(hidden, kChunk), inner_chunks = quotient_up(inner, kChunk);
  const auto bytes = [&](auto form) {
    return Workspace::of<decltype(form)>(pairs, experts, chunks, inner_chunks, hidden).parts.bytes;
  };
  switch (tokens_of(pairs, experts)) {
    case 8:
      return bytes(Form8{});
    case 16:
      return bytes(Form16{});
    case 32:
      return bytes(Form32{});
    case 64:
      return bytes(Form64{});
  }
  return bytes(Form128{});
}
