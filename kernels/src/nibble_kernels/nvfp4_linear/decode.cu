// nibble::nvfp4_decode_linear: how the work of decode.cuh is divided, and its launch.
#include "nibble/decode_launch.h"

namespace nibble::decode {
namespace {

template <class T, class Operand, class Form>
__global__ void __launch_bounds__(Form::kThreads, Form::kBlocks)
    multiply(const __grid_constant__ Problem problem) {
  extern __shared__ uint4 shared[];
  const Share share = share_of(problem.groups, blockIdx.x, gridDim.x, problem.groups_per_block);
  Multiplier<T, Operand, Form>(problem, share, shared).run();
}

struct Run {
  Problem problem;
  const Device& device;
  const std::vector<int64_t>& division;  // thread blocks and phases, or empty
  cudaStream_t stream;
};

// `capacity`: tokens that x is given room for. Phases decide the order of additions and must not depend on
// the batch.
template <class T, class Operand, class Form>
void launch(Run& run, uint32_t capacity) {
  Problem& p = run.problem;
  p.chunks_per_phase = chunks_per_phase<Form>(p, capacity, run.device);
  uint32_t blocks = std::min(run.device.multiprocessors, p.groups);
  if (!run.division.empty()) {
    blocks = std::min(static_cast<uint32_t>(run.division[0]), p.groups);
    p.chunks_per_phase =
        std::min(p.chunks_per_phase, quotient_up(p.chunks, static_cast<uint32_t>(run.division[1])));
  }
  p.groups_per_block = p.groups / blocks;
  launch_overlapped(multiply<T, Operand, Form>, blocks, Form::kThreads,
                    Form::shared_bytes(p.chunks_per_phase, p.tokens, p.chunks_per_phase == p.chunks),
                    run.stream, p);
}

template <class T, class Operand>
void multiply_all(Run& run, bool batch_invariant) {
  Problem& p = run.problem;
  const uint32_t all = p.tokens;
  const size_t x_row = p.columns * sizeof(T),
               out_row = size_t{p.silu_mul ? p.outputs / 2 : p.outputs} * sizeof(T);
  for (uint32_t done = 0; done < all; done += p.tokens) {
    const uint32_t left = all - done;
    const auto launch_for = [&](auto form, uint32_t capacity) {
      p.tokens = std::min(left, capacity);
      launch<T, Operand, typename decltype(form)::type>(run, capacity);
    };
    if (batch_invariant || (left > 8 && left <= 16)) {
      launch_for(TypeOf<Some>(), 16);
    } else if (left > 16) {
      launch_for(TypeOf<Many>(), 32);
    } else {
      launch_for(TypeOf<Few>(), left > 4 ? 8 : 4);
    }
    p.x += p.tokens * x_row / sizeof(uint4);
    p.out = static_cast<char*>(p.out) + p.tokens * out_row;
    if (p.residual) p.residual = static_cast<const char*>(p.residual) + p.tokens * out_row;
  }
}

const void* data_or_null(const std::optional<Tensor>& tensor) {
  return tensor ? tensor->const_data_ptr() : nullptr;
}

Tensor nvfp4_decode_linear(const Tensor& input, const Tensor& codes, const Tensor& scales, int64_t outputs,
                           bool native, double global_scale, const std::optional<Tensor>& column_scale,
                           const std::optional<Tensor>& bias, const std::optional<Tensor>& residual,
                           bool silu_mul, bool batch_invariant, const std::vector<int64_t>& division) {
  const Tensor x = torch::stable::contiguous(input);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Device device = device_of(x.get_device_index());
  const cudaStream_t stream = current_stream(x);
  const Tensor out =
      torch::stable::new_empty(x, with_last(x, silu_mul ? outputs / 2 : outputs), x.scalar_type());

  Problem problem = problem_of(x, codes, outputs, scales, 1);
  problem.column_scale = static_cast<const float*>(data_or_null(column_scale));
  problem.bias = data_or_null(bias);
  problem.residual = data_or_null(residual);
  problem.out = out.mutable_data_ptr();
  problem.upper_global_scale = problem.lower_global_scale = static_cast<float>(global_scale);
  problem.tokens = static_cast<uint32_t>(x.numel() / problem.columns);
  problem.silu_mul = silu_mul;

  Run run{problem, device, division, stream};
  for_operands(x, native, [&](auto type, auto operand) {
    multiply_all<typename decltype(type)::type, typename decltype(operand)::type>(run, batch_invariant);
  });
  return out;
}

}  // namespace
}  // namespace nibble::decode

STABLE_TORCH_LIBRARY_IMPL(nibble, CUDA, library) {
  library.impl("nvfp4_decode_linear", TORCH_BOX(&nibble::decode::nvfp4_decode_linear));
}
