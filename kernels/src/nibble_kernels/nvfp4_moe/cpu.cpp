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
  Nvfp4Weight all;
  const float* global_scales;  // [experts][shards]
  const float* input_scales;   // [experts], or null
  int64_t count;

  int64_t rows() const { return all.rows / count; }
  Nvfp4Weight weight(int64_t expert) const {
    return {all.codes + expert * rows() * (all.columns / 2),
            all.scales + expert * rows() * (all.columns / kBlock), rows(), all.columns};
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

// An expert's tokens and what is computed for them.
struct Work {
  int64_t expert;
  std::vector<Choice> choices;
  std::unique_ptr<Activations> input, middle;
  std::vector<float> hidden;  // [choices][rows of w13]

  int64_t count() const { return static_cast<int64_t>(choices.size()); }
};

// The experts that tokens [begin, end) have chosen.
std::vector<Work> sort_choices(const int64_t* ids, const float* weights, int64_t begin, int64_t end,
                               int64_t k, int64_t experts) {
  std::vector<std::vector<Choice>> chosen(experts);
  for (int64_t token = begin; token < end; ++token) {
    for (int64_t place = token * k; place < (token + 1) * k; ++place) {
      require(ids[place] < experts, "expert ", ids[place], " of ", experts);
      if (ids[place] >= 0) chosen[ids[place]].push_back({token - begin, weights[place]});
    }
  }
  std::vector<Work> result;
  for (int64_t expert = 0; expert < experts; ++expert) {
    if (!chosen[expert].empty()) result.push_back({expert, std::move(chosen[expert]), nullptr, nullptr, {}});
  }
  return result;
}

struct Place {
  int64_t work, row;
};

// Calls f(work, row) for the rows of all experts, in parallel.
template <class F>
void for_choices(std::vector<Work>& works, int64_t columns, const F& f) {
  std::vector<Place> places;
  for (size_t i = 0; i < works.size(); ++i)
    for (int64_t row = 0; row < works[i].count(); ++row) places.push_back({static_cast<int64_t>(i), row});
  for_rows(static_cast<int64_t>(places.size()), columns,
           [&](int64_t i) { f(works[places[i].work], places[i].row); });
}

template <class T>
class Layer {
 public:
  Layer(const Experts& w13, const Experts& w2, const Activation& activation, bool weight_on_input)
      : w13_(w13), w2_(w2), activation_(activation), weight_on_input_(weight_on_input) {}

  void run(const T* x, std::vector<Work>& works, int64_t tokens, T* out) const {
    take_inputs(x, works);
    multiply_w13(works);
    take_middles(works);
    multiply_w2(works, tokens, out);
  }

 private:
  void take_inputs(const T* x, std::vector<Work>& works) const {
    const int64_t columns = w13_.all.columns;
    for (Work& work : works) work.input = std::make_unique<Activations>(work.count(), columns);
    for_choices(works, columns, [&](Work& work, int64_t row) {
      thread_local std::vector<float> floats;
      floats.resize(columns);
      const Choice& choice = work.choices[row];
      load(x + choice.token * columns, columns, floats.data());
      if (weight_on_input_) {
        for (float& value : floats) value *= choice.weight;
        round_row<T>(floats.data(), columns);
      }
      if (w13_.input_scales) round_to_nvfp4(floats.data(), columns, w13_.input_scale_inv(work.expert));
      work.input->set_row(row, floats.data());
    });
  }

  void multiply_w13(std::vector<Work>& works) const {
    const int64_t rows = w13_.rows(), tiles = (rows + kWeightRows - 1) / kWeightRows;
    for (Work& work : works) work.hidden.resize(work.count() * rows);
    torch::stable::parallel_for(
        0, static_cast<int64_t>(works.size()) * tiles, 1, [&](int64_t first, int64_t last) {
          for (int64_t i = first; i < last; ++i) {
            const int64_t begin = i % tiles * kWeightRows;
            multiply_w13_tile(works[i / tiles], begin, std::min(begin + kWeightRows, rows));
          }
        });
  }

  void multiply_w13_tile(Work& work, int64_t begin, int64_t end) const {
    thread_local std::vector<float> sums;
    const int64_t stride = work.input->stride(), rows = w13_.rows(), shards = activation_.gated ? 2 : 1;
    sums.resize(kWeightRows * stride);
    work.input->multiply(w13_.weight(work.expert), begin, end, sums.data());
    for (int64_t n = begin; n < end; ++n) {
      const int64_t shard = activation_.interleaved ? n % 2 : n * shards / rows;
      const float factor = w13_.factor(w13_.global_scales[work.expert * shards + shard], work.expert);
      for (int64_t row = 0; row < work.count(); ++row)
        work.hidden[row * rows + n] = sums[(n - begin) * stride + row] * factor;
    }
  }

  void take_middles(std::vector<Work>& works) const {
    const int64_t columns = w2_.all.columns, rows = w13_.rows();
    for (Work& work : works) work.middle = std::make_unique<Activations>(work.count(), columns);
    for_choices(works, columns, [&](Work& work, int64_t row) {
      thread_local std::vector<float> floats;
      floats.resize(columns);
      activate(activation_, work.hidden.data() + row * rows, columns, floats.data());
      round_row<T>(floats.data(), columns);
      if (w2_.input_scales) round_to_nvfp4(floats.data(), columns, w2_.input_scale_inv(work.expert));
      work.middle->set_row(row, floats.data());
    });
  }

  // Each thread has columns of the output for itself and adds the experts up in their order.
  void multiply_w2(const std::vector<Work>& works, int64_t tokens, T* out) const {
    for_tiles(w2_.rows(), [&](int64_t begin, int64_t end) {
      thread_local std::vector<float> sums, total;
      total.assign(tokens * kWeightRows, 0.0f);
      for (const Work& work : works) {
        const int64_t stride = work.middle->stride();
        sums.resize(kWeightRows * stride);
        work.middle->multiply(w2_.weight(work.expert), begin, end, sums.data());
        const float factor = w2_.factor(w2_.global_scales[work.expert], work.expert);
        for (int64_t row = 0; row < work.count(); ++row) {
          const Choice& choice = work.choices[row];
          for (int64_t n = 0; n < end - begin; ++n) {
            const float y = sums[n * stride + row] * factor;
            total[choice.token * kWeightRows + n] += weight_on_input_ ? y : y * choice.weight;
          }
        }
      }
      for (int64_t token = 0; token < tokens; ++token)
        store(total.data() + token * kWeightRows, end - begin, out + token * w2_.rows() + begin);
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

Experts experts_of(const Tensor& codes, const Tensor& scales, int64_t columns, const Tensor& global_scales,
                   const std::optional<Tensor>& input_scales, int64_t shards) {
  const int64_t count = codes.size(0);
  require(codes.is_contiguous() && scales.is_contiguous(), "experts' weights must be contiguous");
  return {weight_of(codes, scales, columns), floats_of(global_scales, count * shards, "global scales"),
          input_scales ? floats_of(*input_scales, count, "input scales") : nullptr, count};
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
  const Experts first = experts_of(w13, w13_scale, columns, w13_global_scale, w13_input_scale, shards);
  const Experts second = experts_of(w2, w2_scale, first.rows() / shards, w2_global_scale, w2_input_scale, 1);
  require(second.count == first.count && second.rows() == columns, "w2 does not fit w13 and x");
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
      auto works = sort_choices(id_data, weight_data, begin, end, k, first.count);
      layer.run(from + begin * columns, works, end - begin, to + begin * columns);
    }
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(nibble, CPU, library) { library.impl("nvfp4_moe", TORCH_BOX(&nvfp4_moe)); }

}  // namespace nibble::cpu
