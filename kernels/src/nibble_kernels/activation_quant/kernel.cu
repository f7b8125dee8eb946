// nibble::nvfp4_quant and silu_mul_nvfp4_quant on the GPU. Layouts, formula and measurements:
// docs/kernels/nvfp4_quant.md.
#include "nibble/cuda.h"
#include "nibble/quantize.cuh"

namespace nibble {
namespace {

// Calls f(element type, conversions, precision, layout) with types for each of the run-time choices.
template <template <class, class> class Source, class F>
void choose(const Tensor& x, bool instructions, bool exact, bool tiled, F&& f) {
  for_cuda_type(x.scalar_type(), [&](auto type) {
    for_bool(instructions, [&](auto with_instructions) {
      for_bool(exact, [&](auto with_exact) {
        for_bool(tiled, [&](auto layout) {
          using Convert = std::conditional_t<decltype(with_instructions)::value, Instructions, Software>;
          using Precision = std::conditional_t<decltype(with_exact)::value, Exact, Approximate>;
          f(TypeOf<Source<typename decltype(type)::type, Precision>>(),
            TypeOf<StaticScale<Convert, Precision>>(), layout);
        });
      });
    });
  });
}

template <class T, class>
using PlainOf = Plain<T>;

template <template <class, class> class Source>
std::tuple<Tensor, Tensor> quantize_op(const Tensor& input, int64_t inputs, const Tensor& global_scale_inv,
                                       bool tiled, bool exact) {
  const Tensor x = torch::stable::contiguous(input);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const cudaStream_t stream = current_stream(x);
  const Shape shape = shape_of(x, x.size(x.dim() - 1) / inputs);
  check_scalar(global_scale_inv, "global_scale_inv");
  auto [packed, scales] = empty_outputs(x, shape, tiled);
  const Output output{static_cast<uint32_t*>(packed.mutable_data_ptr()),
                      static_cast<uint8_t*>(scales.mutable_data_ptr())};
  const bool instructions = use_instructions(x.get_device_index(), stream);
  choose<Source>(x, instructions, exact, tiled, [&](auto source_type, auto rule_type, auto layout) {
    using Elements = typename decltype(source_type)::type;
    using Rule = typename decltype(rule_type)::type;
    constexpr bool kTiled = decltype(layout)::value;
    const Elements source{static_cast<const uint4*>(x.const_data_ptr())};
    const typename Rule::Parameters parameters{static_cast<const float*>(global_scale_inv.const_data_ptr())};
    const Grid grid = grid_of<kTiled>(shape, false);
    launch(quantize<Elements, Rule, kTiled>, thread_blocks<Elements, kTiled>(grid), dim3(32, kWarps), 0,
           stream, source, parameters, output, grid);
  });
  return {packed, scales};
}

std::tuple<Tensor, Tensor> nvfp4_quant(const Tensor& x, const Tensor& global_scale_inv, bool tiled,
                                       bool exact) {
  return quantize_op<PlainOf>(x, 1, global_scale_inv, tiled, exact);
}

std::tuple<Tensor, Tensor> silu_mul_nvfp4_quant(const Tensor& x, const Tensor& global_scale_inv, bool tiled,
                                                bool exact) {
  return quantize_op<SiluMul>(x, 2, global_scale_inv, tiled, exact);
}

}  // namespace
}  // namespace nibble

STABLE_TORCH_LIBRARY_IMPL(nibble, CUDA, library) {
  library.impl("nvfp4_quant", TORCH_BOX(&nibble::nvfp4_quant));
  library.impl("silu_mul_nvfp4_quant", TORCH_BOX(&nibble::silu_mul_nvfp4_quant));
}
