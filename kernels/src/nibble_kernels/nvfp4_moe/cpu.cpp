// nibble::nvfp4_moe on the CPU: the products of nvfp4_linear, for each expert that has tokens.
#include "nibble/exact.h"
#include "nibble/nvfp4_weight.h"

#include <memory>
#include <optional>

namespace nibble::cpu {
namespace {

// Tokens that are worked on at once; their experts' inputs and intermediates are held in float32.
constexpr int64_t kTokens = 512;

struct Activation {
  enum class Function { kSilu, kGelu, kGeluTanh, kRelu2, kSwigluStep } function;
  bool gated, interleaved;
  float limit, alpha, beta;
};

Activation::Function function_of(const std::string& name) {
  if (name == "silu") return Activation::Function::kSilu;
  if (name == "gelu") return Activation::Function::kGelu;
  if (name == "gelu_tanh") return Activation::Function::kGeluTanh;
  if (name == "relu2") return Activation::Function::kRelu2;
  if (name == "swiglustep") return Activation::Function::kSwigluStep;
  require(false, "unknown function ", name.c_str());
  return {};
}

NIBBLE_CPU_LEVELS void silu(float* x, int64_t count, float alpha) {
  for (int64_t i = 0; i < count; ++i) x[i] = x[i] / (1.0f + exact_exp(-(alpha * x[i])));
}

// gelu's approximation by tanh, written with 0.5 · (1 + tanh(u)) = 1 / (1 + exp(-2u)).
NIBBLE_CPU_LEVELS void gelu_tanh(float* x, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const float u = 0x1.988454p-1f * (x[i] + 0.044715f * x[i] * x[i] * x[i]);  // sqrt(2 / pi)
    x[i] = x[i] / (1.0f + exact_exp(-2.0f * u));
  }
}

void apply(Activation::Function function, float* x, int64_t count, float alpha) {
  switch (function) {
    case Activation::Function::kSilu:
    case Activation::Function::kSwigluStep:
      return silu(x, count, alpha);
    case Activation::Function::kGeluTanh:
      return gelu_tanh(x, count);
    case Activation::Function::kGelu:
      for (int64_t i = 0; i < count; ++i) x[i] = 0.5f * x[i] * (1.0f + std::erf(x[i] * 0x1.6a09e6p-1f));
      return;
    case Activation::Function::kRelu2:
      for (int64_t i = 0; i < count; ++i) x[i] = x[i] <= 0.0f ? 0.0f : x[i] * x[i];
      return;
  }
}

// `columns` results in `to`, of as many or twice as many floats in `from`.
void activate(const Activation& activation, const float* from, int64_t columns, float* to) {
  const int64_t step = activation.interleaved ? 2 : 1;
  const float* up = from + (activation.interleaved ? 1 : columns);
  const bool clamps_gate = activation.gated && activation.function != Activation::Function::kSwigluStep;
  for (int64_t i = 0; i < columns; ++i) {
    const float gate = from[i * step];
    to[i] = clamps_gate && gate > activation.limit ? activation.limit : gate;
  }
  apply(activation.function, to, columns, activation.alpha);
  if (!activation.gated) return;
  for (int64_t i = 0; i < columns; ++i) {
    const float limited = up[i * step] > activation.limit    ? activation.limit
                          : up[i * step] < -activation.limit ? -activation.limit
                                                             : up[i * step];
    const float gate = !clamps_gate && to[i] > activation.limit ? activation.limit : to[i];
    to[i] = gate * (limited + activation.beta);
  }
}

// One of the two weights of all experts.
struct Experts {
  Nvfp4Weight each;  // the first
  const float* global_scales;  // [experts][shards]
  const float* input_scales;   // [experts], or null
  int64_t count;

  Nvfp4Weight weight(int64_t expert) const {
    const int64_t lanes = expert * (each.packed ? each.tiles() * kLaneRows : each.rows);
    return {each.codes + lanes * (each.columns / 2), each.scales + lanes * each.blocks(), each.rows,
            each.columns, each.packed};
  }
  float input_scale_inv(int64_t expert) const { return 1.0f / input_scales[expert]; }
  // What the quantized input stands for, times the weight's own scale.
  float factor(float global_scale, int64_t expert) const {
    return input_scales ? global_scale * (1.0f / input_scale_inv(expert)) : global_scale;
  }
};

// A token that has chosen an expert.
struct Choice {
  int64_t token;
  float weight;
};

// An expert's tokens and what is computed for them, with activations of type T.
template <class T>
struct Work {
  int64_t expert;
  std::vector<Choice> choices;
  std::unique_ptr<Activations<T>> input, middle;
  std::vector<float> hidden;  // [choices][rows of w13]

  int64_t count() const { return static_cast<int64_t>(choices.size()); }
};

// The experts that tokens [begin, end) have chosen.
template <class T>
std::vector<Work<T>> sort_choices(const int64_t* ids, const float* weights, int64_t begin, int64_t end,
                               int64_t k, int64_t experts) {
  std::vector<std::vector<Choice>> chosen(experts);
  for (int64_t token = begin; token < end; ++token) {
    for (int64_t place = token * k; place < (token + 1) * k; ++place) {
      require(ids[place] < experts, "expert ", ids[place], " of ", experts);
      if (ids[place] >= 0) chosen[ids[place]].push_back({token - begin, weights[place]});
    }
  }
  std::vector<Work<T>> result;
  for (int64_t expert = 0; expert < experts; ++expert) {
    if (!chosen[expert].empty()) result.push_back({expert, std::move(chosen[expert]), nullptr, nullptr, {}});
  }
  return result;
}

struct Place {
  int64_t work, row;
};

// Calls f(work, row) for the rows of all experts, in parallel.
template <class T, class F>
void for_choices(std::vector<Work<T>>& works, int64_t columns, const F& f) {
  std::vector<Place> places;
  for (size_t i = 0; i < works.size(); ++i)
    for (int64_t row = 0; row < works[i].count(); ++row) places.push_back({static_cast<int64_t>(i), row});
  for_rows(static_cast<int64_t>(places.size()), columns,
           [&](int64_t i) { f(works[places[i].work], places[i].row); });
}

// Some tiles of one expert's weight.
struct Part {
  int64_t work, first, count;
};

// The w13 tiles of all experts, as many at a time as their numbers of tokens want.
template <class T>
std::vector<Part> parts_of(const std::vector<Work<T>>& works, int64_t tiles) {
  std::vector<Part> parts;
  for (size_t i = 0; i < works.size(); ++i) {
    for (int64_t first = 0; first < tiles; first += kPanelTiles)
      parts.push_back({static_cast<int64_t>(i), first, std::min(kPanelTiles, tiles - first)});
  }
  return parts;
}

template <class T>
class Layer {
 public:
  Layer(const Experts& w13, const Experts& w2, const Activation& activation, bool weight_on_input)
      : w13_(w13), w2_(w2), activation_(activation), weight_on_input_(weight_on_input) {}

  void run(const T* x, std::vector<Work<T>>& works, int64_t tokens, T* out) const {
    take_inputs(x, works);
    multiply_w13(works);
    take_middles(works);
    multiply_w2(works, tokens, out);
  }

 private:
  static float* sums_of(const Activations<T>& activations, int64_t stride) {
    struct Sums;
    return static_cast<float*>(scratch<Sums>(activations.sum_rows() * stride * sizeof(float)));
  }

  void take_inputs(const T* x, std::vector<Work<T>>& works) const {
    const int64_t columns = w13_.each.columns;
    for (Work<T>& work : works) {
      work.input = std::make_unique<Activations<T>>(work.count(), columns, w13_.input_scales != nullptr);
      work.input->allocate();
    }
    for_choices(works, columns, [&](Work<T>& work, int64_t row) {
      thread_local std::vector<float> floats;
      floats.resize(columns);
      const Choice& choice = work.choices[row];
      load(x + choice.token * columns, columns, floats.data());
      if (weight_on_input_) {
        for (float& value : floats) value *= choice.weight;
        round_row<T>(floats.data(), columns);
      }
      work.input->set_row(row, floats.data(), w13_.input_scales ? w13_.input_scale_inv(work.expert) : 0.0f);
    });
  }

  void multiply_w13(std::vector<Work<T>>& works) const {
    for (Work<T>& work : works) work.hidden.resize(work.count() * w13_.each.rows);
    const std::vector<Part> parts = parts_of(works, w13_.each.tiles());
    torch::stable::parallel_for(0, static_cast<int64_t>(parts.size()), 1, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) multiply_w13_part(works[parts[i].work], parts[i]);
    });
  }

  void multiply_w13_part(Work<T>& work, const Part& part) const {
    const int64_t rows = w13_.each.rows, shards = activation_.gated ? 2 : 1;
    const int64_t stride = part.count * kLaneRows, begin = part.first * kLaneRows;
    float* sums = sums_of(*work.input, stride);
    work.input->multiply(PackedTiles(w13_.weight(work.expert), part.first, part.count), sums, stride);
    float factors[kPanelTiles * kLaneRows];
    const int64_t wanted = std::min(stride, rows - begin);
    for (int64_t i = 0; i < wanted; ++i) {
      const int64_t n = begin + i, shard = activation_.interleaved ? n % 2 : n * shards / rows;
      factors[i] = w13_.factor(w13_.global_scales[work.expert * shards + shard], work.expert);
    }
    for (int64_t row = 0; row < work.count(); ++row)
      for (int64_t i = 0; i < wanted; ++i)
        work.hidden[row * rows + begin + i] = sums[row * stride + i] * factors[i];
  }

  void take_middles(std::vector<Work<T>>& works) const {
    const int64_t columns = w2_.each.columns, rows = w13_.each.rows;
    for (Work<T>& work : works) {
      work.middle = std::make_unique<Activations<T>>(work.count(), columns, w2_.input_scales != nullptr);
      work.middle->allocate();
    }
    for_choices(works, columns, [&](Work<T>& work, int64_t row) {
      thread_local std::vector<float> floats;
      floats.resize(columns);
      activate(activation_, work.hidden.data() + row * rows, columns, floats.data());
      round_row<T>(floats.data(), columns);
      work.middle->set_row(row, floats.data(), w2_.input_scales ? w2_.input_scale_inv(work.expert) : 0.0f);
    });
  }

  // Each thread has columns of the output for itself and adds the experts up in their order.
  void multiply_w2(const std::vector<Work<T>>& works, int64_t tokens, T* out) const {
    const bool few = std::all_of(works.begin(), works.end(), [](const auto& work) { return work.middle->few(); });
    for_tiles(w2_.each.tiles(), few, [&](int64_t first, int64_t count) {
      thread_local std::vector<float> total;
      const int64_t stride = count * kLaneRows, begin = first * kLaneRows;
      total.assign(tokens * stride, 0.0f);
      for (const Work<T>& work : works) {
        float* sums = sums_of(*work.middle, stride);
        work.middle->multiply(PackedTiles(w2_.weight(work.expert), first, count), sums, stride);
        const float factor = w2_.factor(w2_.global_scales[work.expert], work.expert);
        for (int64_t row = 0; row < work.count(); ++row) {
          const Choice& choice = work.choices[row];
          float* to = total.data() + choice.token * stride;
          for (int64_t n = 0; n < stride; ++n) {
            const float y = sums[row * stride + n] * factor;
            to[n] += weight_on_input_ ? y : y * choice.weight;
          }
        }
      }
      const int64_t wanted = std::min(stride, w2_.each.rows - begin);
      for (int64_t token = 0; token < tokens; ++token)
        store(total.data() + token * stride, wanted, out + token * w2_.each.rows + begin);
    });
  }

  const Experts& w13_;
  const Experts& w2_;
  const Activation& activation_;
  bool weight_on_input_;
};

const float* floats_of(const Tensor& tensor, int64_t count, const char* name) {
  require(tensor.numel() == count && tensor.scalar_type() == ScalarType::Float && tensor.is_contiguous(),
          name, " must be ", count, " float32");
  return static_cast<const float*>(tensor.const_data_ptr());
}

// Experts in either layout: codes [E, rows, columns / 2], or packed, [E, tiles, blocks, 128].
Experts experts_of(const Tensor& codes, const Tensor& scales, int64_t rows, int64_t columns,
                   const Tensor& global_scales, const std::optional<Tensor>& input_scales, int64_t shards) {
  const int64_t count = codes.size(0);
  Experts experts{{}, floats_of(global_scales, count * shards, "global scales"),
                  input_scales ? floats_of(*input_scales, count, "input scales") : nullptr, count};
  if (codes.dim() == 4) {
    experts.each = packed_weight(codes, scales, rows, columns, count);
  } else {
    require(codes.is_contiguous() && scales.is_contiguous(), "experts' weights must be contiguous");
    experts.each = stored_weight(codes, scales, columns);
    experts.each.rows /= count;
    require(experts.each.rows == rows, "experts have ", experts.each.rows, " rows, expected ", rows);
  }
  return experts;
}

Tensor nvfp4_moe(const Tensor& input, const Tensor& topk_weights, const Tensor& topk_ids, const Tensor& w13,
                 const Tensor& w13_scale, const Tensor& w13_global_scale, const Tensor& w2,
                 const Tensor& w2_scale, const Tensor& w2_global_scale,
                 const std::optional<Tensor>& w13_input_scale, const std::optional<Tensor>& w2_input_scale,
                 bool weight_on_input, std::string function, bool gated, bool interleaved, double limit,
                 double alpha, double beta) {
  const Tensor x = torch::stable::contiguous(input);
  const Tensor weights = torch::stable::contiguous(topk_weights), ids = torch::stable::contiguous(topk_ids);
  const Activation activation{
      function_of(function),   gated, interleaved, static_cast<float>(limit), static_cast<float>(alpha),
      static_cast<float>(beta)};
  const int64_t tokens = x.size(0), columns = x.size(1), shards = gated ? 2 : 1;
  // Packed codes have the columns of w2 in blocks of 16, stored ones two a byte.
  const int64_t middle = w2.dim() == 4 ? w2.size(2) * kBlockColumns : w2.size(2) * 2;
  require(w13.size(0) == w2.size(0), "w2 does not fit w13");
  const Experts first =
      experts_of(w13, w13_scale, middle * shards, columns, w13_global_scale, w13_input_scale, shards);
  const Experts second = experts_of(w2, w2_scale, columns, middle, w2_global_scale, w2_input_scale, 1);
  require(ids.scalar_type() == ScalarType::Long && ids.numel() == weights.numel(),
          "ids must be int64, one a weight");
  const float* weight_data = floats_of(weights, ids.numel(), "topk_weights");
  const int64_t* id_data = static_cast<const int64_t*>(ids.const_data_ptr());
  const int64_t k = tokens ? ids.numel() / tokens : 0;
  Tensor out = torch::stable::new_empty(x, x.sizes());
  for_float_type<true>(x.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    const T* from = static_cast<const T*>(x.const_data_ptr());
    T* to = static_cast<T*>(out.mutable_data_ptr());
    const Layer<T> layer(first, second, activation, weight_on_input);
    for (int64_t begin = 0; begin < tokens; begin += kTokens) {
      const int64_t end = std::min(begin + kTokens, tokens);
      auto works = sort_choices<T>(id_data, weight_data, begin, end, k, first.count);
      layer.run(from + begin * columns, works, end - begin, to + begin * columns);
    }
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(nibble, CPU, library) {
  library.impl("nvfp4_moe", TORCH_BOX(&nvfp4_moe));
  library.impl("nvfp4_packed_moe", TORCH_BOX(&nvfp4_moe));
}

}  // namespace nibble::cpu
