// nibble::decoder_…: the layers of a dense decoder with NVFP4 products, with few operators and little between
// the products. decoder/__init__.py has the order of a decoder's tensors.
#include <memory>
#include <mutex>

#include "attention.h"

namespace nibble::cpu {
namespace {

constexpr int64_t kProductTensors = 6, kLayerTensors = 4 * kProductTensors + 4;
enum Norm { kInputNorm, kOutputNorm, kQueryNorm, kKeyNorm };

struct Product {
  Nvfp4Weight weight;
  const float* input_scale_inv;
  Epilogue epilogue;
  std::vector<float> bias;
};

struct Layer {
  Product qkv, output, gate_up, down;
  const BFloat16* norms[4];
};

struct Decoder {
  std::vector<Tensor> tensors;  // owns what the layers point to
  std::vector<Layer> layers;
  const BFloat16* last_norm;
  const BFloat16* cos_sin;  // [positions][2 * half]
  int64_t positions, half, hidden, intermediate;
  Heads heads;
  float epsilon, scale;
};

const float* float_or_null(const Tensor& x, int64_t count, const char* name) {
  if (!x.numel()) return nullptr;
  require(x.scalar_type() == ScalarType::Float && x.numel() == count && x.is_contiguous(), name,
          " must be float32, ", count, " elements");
  return static_cast<const float*>(x.const_data_ptr());
}

const BFloat16* bfloat16_or_null(const Tensor& x, int64_t count, const char* name) {
  if (!x.numel()) return nullptr;
  require(x.scalar_type() == ScalarType::BFloat16 && x.numel() == count && x.is_contiguous(), name,
          " must be bfloat16, ", count, " elements");
  return static_cast<const BFloat16*>(x.const_data_ptr());
}

// codes, scales, global_scale, column_scale, bias, input_scale_inv
Product product_of(const Tensor* tensors, int64_t rows, int64_t columns) {
  Product product{packed_weight(tensors[0], tensors[1], rows, columns), nullptr, {1.0f, nullptr, nullptr}, {}};
  check_scalar(tensors[2], "global_scale");
  product.epilogue.alpha = *static_cast<const float*>(tensors[2].const_data_ptr());
  product.epilogue.column_scale = float_or_null(tensors[3], rows, "column_scale");
  if (const BFloat16* bias = bfloat16_or_null(tensors[4], rows, "bias")) {
    product.bias.resize(rows);
    load(bias, rows, product.bias.data());
  }
  product.input_scale_inv = float_or_null(tensors[5], 1, "input_scale_inv");
  if (product.input_scale_inv) product.epilogue.alpha *= 1.0f / *product.input_scale_inv;
  return product;
}

Epilogue epilogue_of(const Product& product) {
  Epilogue epilogue = product.epilogue;
  if (!product.bias.empty()) epilogue.bias = product.bias.data();
  return epilogue;
}

std::unique_ptr<Decoder> make_decoder(const std::vector<Tensor>& tensors, int64_t layers, int64_t hidden,
                                      int64_t intermediate, Heads heads, double epsilon, double scale) {
  require(static_cast<int64_t>(tensors.size()) == layers * kLayerTensors + 2, "a decoder of ", layers,
          " layers has ", layers * kLayerTensors + 2, " tensors");
  require(intermediate % kLaneRows == 0 && heads.size % kColumnsAtOnce == 0,
          "a decoder needs multiples of 16 as intermediate and head size");
  auto decoder = std::make_unique<Decoder>();
  decoder->tensors = tensors;
  decoder->hidden = hidden;
  decoder->intermediate = intermediate;
  decoder->heads = heads;
  decoder->epsilon = static_cast<float>(epsilon);
  decoder->scale = static_cast<float>(scale);
  for (int64_t i = 0; i < layers; ++i) {
    const Tensor* own = decoder->tensors.data() + i * kLayerTensors;
    Layer layer;
    layer.qkv = product_of(own, heads.width(), hidden);
    layer.output = product_of(own + kProductTensors, hidden, heads.queries * heads.size);
    layer.gate_up = product_of(own + 2 * kProductTensors, 2 * intermediate, hidden);
    layer.down = product_of(own + 3 * kProductTensors, hidden, intermediate);
    const Tensor* norms = own + 4 * kProductTensors;
    for (int norm = kInputNorm; norm <= kKeyNorm; ++norm)
      layer.norms[norm] = bfloat16_or_null(norms[norm], norm < kQueryNorm ? hidden : heads.size, "a norm");
    require(layer.norms[kInputNorm] && layer.norms[kOutputNorm], "a layer needs two norms");
    decoder->layers.push_back(std::move(layer));
  }
  const Tensor& cos_sin = decoder->tensors[layers * kLayerTensors + 1];
  decoder->last_norm = bfloat16_or_null(decoder->tensors[layers * kLayerTensors], hidden, "the last norm");
  decoder->positions = cos_sin.size(0);
  decoder->half = cos_sin.size(1) / 2;
  require(decoder->last_norm && 2 * decoder->half <= heads.size, "a decoder needs a last norm and a rotation");
  decoder->cos_sin = bfloat16_or_null(cos_sin, cos_sin.numel(), "cos_sin");
  return decoder;
}

std::mutex decoders_mutex;
std::vector<std::unique_ptr<Decoder>> decoders;

int64_t decoder_new(std::vector<Tensor> tensors, int64_t layers, int64_t hidden, int64_t intermediate,
                    int64_t queries, int64_t keys, int64_t head_size, double epsilon, double scale) {
  require(keys > 0 && queries % keys == 0, "each key head serves as many query heads");
  auto decoder =
      make_decoder(tensors, layers, hidden, intermediate, {queries, keys, head_size}, epsilon, scale);
  const std::lock_guard lock(decoders_mutex);
  decoders.push_back(std::move(decoder));
  return static_cast<int64_t>(decoders.size()) - 1;
}

void decoder_delete(const Tensor&, int64_t number) {
  const std::lock_guard lock(decoders_mutex);
  if (number >= 0 && number < static_cast<int64_t>(decoders.size())) decoders[number].reset();
}

const Decoder& decoder_at(int64_t number) {
  const std::lock_guard lock(decoders_mutex);
  require(number >= 0 && number < static_cast<int64_t>(decoders.size()) && decoders[number], "no such decoder");
  return *decoders[number];
}

// Rows that are worked on together, and the memory between their products.
struct Rows {
  int64_t count;
  BFloat16* residual;
  BFloat16* hidden;  // what is added next, or null before the first layer
  const int64_t* positions;
};

using Range = Activations<BFloat16>::Range;

void multiply(const Product& product, const BFloat16* from, int64_t rows, BFloat16* to) {
  const Nvfp4Weight& weight = product.weight;
  const Epilogue epilogue = epilogue_of(product);
  for_row_groups(rows, [&](int64_t row, int64_t count) {
    const auto activations = activations_of(from + row * weight.columns, count, weight.columns, product.input_scale_inv);
    for_pieces(weight.tiles(), weight.blocks(), activations, [&](int64_t first, int64_t tiles, Range some) {
      struct Sums;
      const int64_t begin = first * kLaneRows, stride = tiles * kLaneRows;
      float* sums = sums_of<Sums>(activations, weight, first, tiles, some);
      const int64_t wanted = std::min(stride, weight.rows - begin);
      BFloat16* result = to + (row + some.first) * weight.rows + begin;
      for (int64_t i = 0; i < some.count; ++i)
        finish_and_store(sums + i * stride, wanted, epilogue.from(begin), result + i * weight.rows);
    });
  });
}

// silu(gate) · up for the two halves of a weight.
void multiply_gated(const Product& product, const BFloat16* from, int64_t rows, BFloat16* to) {
  const Nvfp4Weight& weight = product.weight;
  const Epilogue epilogue = epilogue_of(product);
  const int64_t half = weight.rows / 2, half_tiles = half / kLaneRows;
  for_row_groups(rows, [&](int64_t row, int64_t count) {
    const auto activations = activations_of(from + row * weight.columns, count, weight.columns, product.input_scale_inv);
    for_pieces(half_tiles, 2 * weight.blocks(), activations, [&](int64_t first, int64_t tiles, Range some) {
      struct Gate;
      struct Up;
      const int64_t begin = first * kLaneRows, stride = tiles * kLaneRows;
      float* gate = sums_of<Gate>(activations, weight, first, tiles, some);
      float* up = sums_of<Up>(activations, weight, half_tiles + first, tiles, some);
      BFloat16* result = to + (row + some.first) * half + begin;
      for (int64_t i = 0; i < some.count; ++i)
        finish_silu_mul(gate + i * stride, up + i * stride, stride, epilogue.from(begin), epilogue.from(half + begin),
                        result + i * half);
    });
  });
}

void normalize(const Decoder& decoder, const Rows& rows, const BFloat16* weight, BFloat16* to) {
  const int64_t size = decoder.hidden;
  share_out_rows(rows.count, size, [&](int64_t row) {
    struct Floats;
    float* floats = static_cast<float*>(scratch<Floats>(size * sizeof(float)));
    add_and_normalize(rows.hidden ? rows.hidden + row * size : nullptr, rows.residual + row * size, size, weight,
                      decoder.epsilon, floats, to + row * size);
  });
}

// Queries, keys and values of a layer, normalized and rotated.
void before_attention(const Decoder& decoder, const Layer& layer, const Rows& rows, BFloat16* normalized,
                      BFloat16* qkv) {
  const Heads& heads = decoder.heads;
  normalize(decoder, rows, layer.norms[kInputNorm], normalized);
  multiply(layer.qkv, normalized, rows.count, qkv);
  share_out_rows(rows.count, heads.width(), [&](int64_t row) {
    struct Floats;
    float* floats = static_cast<float*>(scratch<Floats>(heads.size * sizeof(float)));
    BFloat16* x = qkv + row * heads.width();
    const BFloat16* cos_sin = decoder.cos_sin + rows.positions[row] * 2 * decoder.half;
    for (int64_t head = 0; head < heads.queries + heads.keys; ++head, x += heads.size) {
      const BFloat16* norm = layer.norms[head < heads.queries ? kQueryNorm : kKeyNorm];
      normalize_and_rotate(x, heads.size, norm, decoder.epsilon, cos_sin, decoder.half, floats);
    }
  });
}

// From the attention's result to the layer's. `wide` holds rows of the intermediate size.
void after_attention(const Decoder& decoder, const Layer& layer, Rows& rows, const BFloat16* attention,
                     BFloat16* normalized, BFloat16* wide, BFloat16* hidden) {
  multiply(layer.output, attention, rows.count, hidden);
  rows.hidden = hidden;
  normalize(decoder, rows, layer.norms[kOutputNorm], normalized);
  multiply_gated(layer.gate_up, normalized, rows.count, wide);
  multiply(layer.down, wide, rows.count, hidden);
}

BFloat16* rows_of(const Tensor& x, int64_t columns, const char* name) {
  require(x.scalar_type() == ScalarType::BFloat16 && x.is_contiguous() && x.dim() == 2 && x.size(1) == columns, name,
          " must be contiguous bfloat16 rows of ", columns);
  return static_cast<BFloat16*>(x.mutable_data_ptr());
}

const int64_t* positions_of(const Decoder& decoder, const Tensor& positions, int64_t count) {
  require(positions.scalar_type() == ScalarType::Long && positions.is_contiguous() && positions.numel() == count,
          "positions must be int64, one a row");
  const auto* values = static_cast<const int64_t*>(positions.const_data_ptr());
  for (int64_t i = 0; i < count; ++i)
    require(values[i] >= 0 && values[i] < decoder.positions, "position ", values[i], " of ", decoder.positions);
  return values;
}

const Layer& layer_at(const Decoder& decoder, int64_t number) {
  require(number >= 0 && number < static_cast<int64_t>(decoder.layers.size()), "no layer ", number);
  return decoder.layers[number];
}

// Memory of the calling thread between the products of a step.
struct Between {
  struct Normalized;
  struct Wide;
  BFloat16* normalized;
  BFloat16* wide;
  Between(const Decoder& decoder, int64_t rows)
      : normalized(static_cast<BFloat16*>(scratch<Normalized>(rows * decoder.hidden * sizeof(BFloat16)))),
        wide(static_cast<BFloat16*>(scratch<Wide>(rows * decoder.intermediate * sizeof(BFloat16)))) {}
};

Tensor decoder_before_attention(int64_t number, int64_t layer, const std::optional<Tensor>& hidden, Tensor residual,
                                const Tensor& positions) {
  const WithThreads threads;
  const Decoder& decoder = decoder_at(number);
  const int64_t count = residual.size(0);
  Rows rows{count, rows_of(residual, decoder.hidden, "residual"),
            hidden ? rows_of(*hidden, decoder.hidden, "hidden") : nullptr,
            positions_of(decoder, positions, count)};
  Tensor qkv = torch::stable::new_empty(residual, {count, decoder.heads.width()});
  before_attention(decoder, layer_at(decoder, layer), rows, Between(decoder, count).normalized,
                   static_cast<BFloat16*>(qkv.mutable_data_ptr()));
  return qkv;
}

Tensor decoder_after_attention(int64_t number, int64_t layer, const Tensor& attention, Tensor residual) {
  const WithThreads threads;
  const Decoder& decoder = decoder_at(number);
  const int64_t count = residual.size(0);
  Rows rows{count, rows_of(residual, decoder.hidden, "residual"), nullptr, nullptr};
  Tensor hidden = torch::stable::new_empty(residual, {count, decoder.hidden});
  const Between between(decoder, count);
  after_attention(decoder, layer_at(decoder, layer), rows,
                  rows_of(attention, decoder.heads.queries * decoder.heads.size, "attention"), between.normalized,
                  between.wide, static_cast<BFloat16*>(hidden.mutable_data_ptr()));
  return hidden;
}

Tensor decoder_last_norm(int64_t number, const Tensor& hidden, Tensor residual) {
  const WithThreads threads;
  const Decoder& decoder = decoder_at(number);
  Rows rows{residual.size(0), rows_of(residual, decoder.hidden, "residual"),
            rows_of(hidden, decoder.hidden, "hidden"), nullptr};
  Tensor result = torch::stable::new_empty(residual, {rows.count, decoder.hidden});
  normalize(decoder, rows, decoder.last_norm, static_cast<BFloat16*>(result.mutable_data_ptr()));
  return result;
}

// A step's sequences and their new tokens.
struct Sequences {
  const int64_t* slots;
  const int32_t* blocks;  // [sequence][blocks_stride]
  const int32_t* lengths;
  int64_t blocks_stride, window;
};

// New tokens of a sequence that are worked on at once: kQueriesAtOnce, or one.
struct Queries {
  int64_t sequence, row, count;
  int64_t length;  // that the first one sees
};

// starts: the sequences' first rows and the number of rows, or null where each sequence has one.
std::vector<Queries> queries_of(const int32_t* starts, const int32_t* lengths, int64_t sequences) {
  std::vector<Queries> found;
  for (int64_t i = 0; i < sequences; ++i) {
    const int64_t begin = starts ? starts[i] : i, end = starts ? starts[i + 1] : i + 1;
    for (int64_t row = begin; row < end;) {
      const int64_t length = lengths[i] - (end - row) + 1;
      const int64_t count = end - row >= kQueriesAtOnce && length > 0 ? kQueriesAtOnce : 1;
      found.push_back({i, row, count, length});
      row += count;
    }
  }
  return found;
}

Cache cache_of(const Tensor& x, const Heads& heads) {
  require(x.scalar_type() == ScalarType::BFloat16 && x.dim() == 4 && x.size(1) == heads.keys &&
              x.size(3) == 2 * heads.size && x.stride(3) == 1 && x.stride(2) == 2 * heads.size,
          "a cache must be bfloat16 [blocks, key heads, tokens, 2 * head size]");
  BFloat16* keys = static_cast<BFloat16*>(x.mutable_data_ptr());
  return {keys, keys + x.size(2) * heads.size, x.stride(0), x.stride(1), x.size(2)};
}

void attend_all(const Decoder& decoder, const Sequences& sequences, const std::vector<Queries>& queries, int64_t count,
                const Cache& cache, const BFloat16* qkv, BFloat16* to) {
  const Heads& heads = decoder.heads;
  share_out_rows(count, heads.keys * heads.size, [&](int64_t row) {
    const BFloat16* keys = qkv + row * heads.width() + heads.queries * heads.size;
    if (sequences.slots[row] >= 0)
      write_cache(cache, heads, sequences.slots[row], keys, keys + heads.keys * heads.size);
  });
  const int64_t groups = static_cast<int64_t>(queries.size()), size = heads.size;
  share_out(groups * heads.queries, [&](int64_t item) {
    const Queries& own = queries[item / heads.queries];
    const int64_t head = item % heads.queries;
    const BFloat16* const from = qkv + own.row * heads.width() + head * size;
    BFloat16* const result = to + (own.row * heads.queries + head) * size;
    const int32_t* const blocks = sequences.blocks + own.sequence * sequences.blocks_stride;
    const int64_t key_head = head / heads.queries_each(), window = sequences.window;
    if (own.length <= 0) return std::fill(result, result + size, BFloat16(0.0f));
    if (own.count == kQueriesAtOnce)
      return attend_rows(from, heads.width(), cache, key_head, size, blocks, own.length, window, decoder.scale, result,
                         heads.queries * size);
    const int64_t first = window > 0 ? std::max<int64_t>(0, own.length - window) : 0;
    attend(from, cache, key_head, size, blocks, first, own.length, decoder.scale, result);
  });
}

// All layers and the last norm for the new tokens of each sequence; `residual` is overwritten.
Tensor decoder_step(int64_t number, Tensor residual, const Tensor& positions, std::vector<Tensor> caches,
                    const Tensor& slots, const Tensor& blocks, const Tensor& lengths, int64_t window,
                    const std::optional<Tensor>& starts) {
  const WithThreads threads;
  const Decoder& decoder = decoder_at(number);
  const Heads& heads = decoder.heads;
  const int64_t count = residual.size(0);
  require(caches.size() == decoder.layers.size(), "a decoder has a cache for each layer");
  require(!starts || (starts->scalar_type() == ScalarType::Int && starts->is_contiguous() && starts->numel() > 0),
          "starts must be int32, one for each sequence and one more");
  const int64_t count_of_sequences = starts ? starts->numel() - 1 : count;
  const auto* const first_rows = starts ? static_cast<const int32_t*>(starts->const_data_ptr()) : nullptr;
  for (int64_t i = 0; first_rows && i < count_of_sequences; ++i)
    require(first_rows[i] <= first_rows[i + 1], "starts must rise");
  require(!first_rows || (first_rows[0] == 0 && first_rows[count_of_sequences] == count),
          "starts must go from 0 to the number of rows");
  require(slots.scalar_type() == ScalarType::Long && slots.numel() >= count && slots.is_contiguous() &&
              blocks.scalar_type() == ScalarType::Int && blocks.dim() == 2 &&
              blocks.size(0) >= count_of_sequences && blocks.stride(1) == 1 &&
              lengths.scalar_type() == ScalarType::Int && lengths.numel() >= count_of_sequences &&
              lengths.is_contiguous(),
          "slots must be int64, for each row, and blocks and lengths int32, for each sequence");
  const Sequences sequences{static_cast<const int64_t*>(slots.const_data_ptr()),
                            static_cast<const int32_t*>(blocks.const_data_ptr()),
                            static_cast<const int32_t*>(lengths.const_data_ptr()), blocks.stride(0), window};
  Rows rows{count, rows_of(residual, decoder.hidden, "residual"), nullptr, positions_of(decoder, positions, count)};
  const Between between(decoder, count);
  const std::vector<Queries> queries = queries_of(first_rows, sequences.lengths, count_of_sequences);
  std::vector<BFloat16> qkv(count * heads.width()), attention(count * heads.queries * heads.size),
      hidden(count * decoder.hidden);
  for (size_t i = 0; i < decoder.layers.size(); ++i) {
    const Layer& layer = decoder.layers[i];
    before_attention(decoder, layer, rows, between.normalized, qkv.data());
    attend_all(decoder, sequences, queries, count, cache_of(caches[i], heads), qkv.data(), attention.data());
    after_attention(decoder, layer, rows, attention.data(), between.normalized, between.wide, hidden.data());
  }
  Tensor result = torch::stable::new_empty(residual, {count, decoder.hidden});
  normalize(decoder, rows, decoder.last_norm, static_cast<BFloat16*>(result.mutable_data_ptr()));
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(nibble, CPU, library) {
  library.impl("decoder_new", TORCH_BOX(&decoder_new));
  library.impl("decoder_delete", TORCH_BOX(&decoder_delete));
  library.impl("decoder_before_attention", TORCH_BOX(&decoder_before_attention));
  library.impl("decoder_after_attention", TORCH_BOX(&decoder_after_attention));
  library.impl("decoder_last_norm", TORCH_BOX(&decoder_last_norm));
  library.impl("decoder_step", TORCH_BOX(&decoder_step));
}

}  // namespace nibble::cpu
