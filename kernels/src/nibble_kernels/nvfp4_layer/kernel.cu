// nibble::nvfp4_layer_products on SM90.
#include "nibble/decode_launch.h"
#include "nvfp4_layer/products.cuh"

namespace nibble::layer {
namespace {

using decode::Device;

template <class T, class Operand, class Form>
__global__ void __launch_bounds__(Form::kThreads, 1) compute_layer(const __grid_constant__ Layer layer) {
  if constexpr (NIBBLE_HAS_WARPGROUP_PRODUCTS) {
    extern __shared__ uint4 shared[];
    compute<T, Operand, Form>(layer, shared);
  }
}

const void* data_or_null(const std::optional<Tensor>& tensor) {
  return tensor ? tensor->const_data_ptr() : nullptr;
}

struct Run {
  const Layer& layer;
  const Device& device;
  cudaStream_t stream;
};

// Launches the form if its shared memory is there.
template <class T, class Operand, class Form>
bool launch_form(const Run& run) {
  uint32_t chunks = 0;
  for (uint32_t i = 0; i < run.layer.count; ++i) chunks = std::max(chunks, run.layer.products[i].chunks);
  // More than half: two blocks on one multiprocessor would leave another without any.
  const uint32_t bytes = std::max(Form::shared_bytes(chunks, run.layer.products[0].tokens),
                                  run.device.shared_bytes / 2 + 1024);
  if (bytes > run.device.shared_bytes) return false;
  decode::Launch launch(run.device.multiprocessors, 1, Form::kThreads, bytes, run.stream);
  launch(compute_layer<T, Operand, Form>, run.layer);
  return true;
}

// Launches the first form that fits, of those that have `wanted` slots and tiles together; or of all, if that
// is empty. The form does not change results.
template <class T, class Operand, bool Bulk>
void launch_first(const Run& run, const std::vector<int64_t>& wanted) {
  const auto launch = [&](auto form) {
    using Form = typename decltype(form)::type;
    if (!wanted.empty() && (wanted[1] != Form::kRingSlots || wanted[2] != Form::kTogether)) return false;
    return launch_form<T, Operand, Form>(run);
  };
  const bool launched = launch(TypeOf<Form<5, 2, Bulk>>()) || launch(TypeOf<Form<2, 4, Bulk>>()) ||
                        launch(TypeOf<Form<4, 2, Bulk>>()) || launch(TypeOf<Form<3, 2, Bulk>>()) ||
                        launch(TypeOf<Form<2, 2, Bulk>>());
  require(launched, "rows are too many or too wide for one launch");
}

std::tuple<Tensor, Tensor> nvfp4_layer_products(
    const Tensor& attended_, const Tensor& residual_, const Tensor& second_norm,
    const std::optional<Tensor>& next_norm, double epsilon, const std::vector<Tensor>& codes,
    const std::vector<Tensor>& scales, const std::vector<int64_t>& outputs, bool native,
    const std::vector<double>& global_scales, const std::vector<std::optional<Tensor>>& column_scales,
    const std::vector<std::optional<Tensor>>& biases, const Tensor& meetings,
    const std::vector<int64_t>& division) {
  const Tensor attended = torch::stable::contiguous(attended_), residual = torch::stable::contiguous(residual_);
  const torch::stable::accelerator::DeviceGuard guard(attended.get_device_index());
  const Device device = decode::device_of(attended.get_device_index());
  int major = 0, minor = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device.index));
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device.index));
  require(major == 9 && minor == 0, "compiled for SM90 alone");
  const uint32_t count = next_norm ? 4 : 3;
  require(codes.size() == count && scales.size() == count && outputs.size() == count &&
              global_scales.size() == count && column_scales.size() == count && biases.size() == count,
          "expected ", int64_t{count}, " products");
  const int64_t columns = attended.size(attended.dim() - 1), rows = attended.numel() / columns;
  const int64_t hidden = outputs[0], next = next_norm ? outputs[3] : 0;
  require(rows >= 1 && rows <= kMostTokens, "expected 1 to ", int64_t{kMostTokens}, " rows, found ", rows);
  require(residual.numel() == rows * hidden && residual.scalar_type() == attended.scalar_type() &&
              outputs[2] == hidden,
          "the residual must have the shape and type of the results of the first and the third product");
  require(meetings.numel() == 1 && meetings.element_size() == 4, "meetings must be one int32");

  const auto made = [&](int64_t last) {
    return torch::stable::new_empty(attended, with_last(attended, last), attended.scalar_type());
  };
  const Tensor first_sum = made(hidden), middle = made(outputs[1] / 2), second_sum = made(hidden),
               out = made(next);
  const Tensor* const inputs[] = {&attended, &first_sum, &middle, &second_sum};
  const Tensor* const results[] = {&first_sum, &middle, &second_sum, &out};
  Layer layer{};
  layer.count = count;
  layer.epsilon = static_cast<float>(epsilon);
  layer.meetings = static_cast<uint32_t*>(meetings.mutable_data_ptr());
  for (uint32_t i = 0; i < count; ++i) {
    Problem& p = layer.products[i];
    p = decode::problem_of(*inputs[i], codes[i], outputs[i], scales[i], 1);
    p.tokens = static_cast<uint32_t>(rows);
    p.out = results[i]->mutable_data_ptr();
    p.upper_global_scale = p.lower_global_scale = static_cast<float>(global_scales[i]);
    p.column_scale = static_cast<const float*>(data_or_null(column_scales[i]));
    p.bias = data_or_null(biases[i]);
    p.ranks = 1;
    p.chunks_per_phase = p.chunks;
    p.groups_per_cluster = p.groups / device.multiprocessors;
  }
  layer.products[0].residual = residual.const_data_ptr();
  layer.products[1].silu_mul = true;
  layer.products[2].residual = first_sum.const_data_ptr();
  const auto set_norm = [&](uint32_t product, const Tensor& weight) {
    require(weight.numel() == hidden && weight.scalar_type() == attended.scalar_type() && weight.is_contiguous() &&
                hidden <= kMostNormColumns,
            "the norm's weight must have x's type and one element a column, at most ",
            int64_t{kMostNormColumns});
    layer.norms[product] = static_cast<const uint4*>(weight.const_data_ptr());
  };
  set_norm(1, second_norm);
  if (next_norm) set_norm(3, *next_norm);

  const Run run{layer, device, current_stream(attended)};
  const bool bulk = division.empty() || division[0] != 0;
  for_bool(bulk, [&](auto is_bulk) {
    if (attended.scalar_type() == ScalarType::BFloat16) {
      require(!native, "the weight was prepared for float16 activations");
      launch_first<__nv_bfloat16, BfloatOperand, decltype(is_bulk)::value>(run, division);
    } else {
      require(native && attended.scalar_type() == ScalarType::Half,
              "the weight was prepared for bfloat16 activations");
      launch_first<__half, HalfOperand, decltype(is_bulk)::value>(run, division);
    }
  });
  return {second_sum, out};
}

}  // namespace
}  // namespace nibble::layer

STABLE_TORCH_LIBRARY_IMPL(nibble, CUDA, library) {
  library.impl("nvfp4_layer_products", TORCH_BOX(&nibble::layer::nvfp4_layer_products));
}
