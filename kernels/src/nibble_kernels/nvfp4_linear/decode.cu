// nibble::nvfp4_decode_linear: how the work of decode.cuh is divided, and its launch.
#include "nibble/decode_launch.h"

namespace nibble::decode {
namespace {

template <class T, class Operand, class Form>
__global__ void __launch_bounds__(Form::kThreads, 1) multiply(const __grid_constant__ Problem problem) {
  extern __shared__ uint4 shared[];
  const Share share{blockIdx.x % problem.splits, blockIdx.x / problem.splits, gridDim.x / problem.splits};
  Multiplier<T, Operand, Form>(problem, share, shared).run();
}

// How the work is divided.
struct Division {
  uint32_t splits, chunks_per_split, blocks_per_split;
};

// The division whose slowest multiprocessor is first, by what it must read and what the splits cost. The
// constants are nanoseconds on an H200; only their proportions matter.
template <class Form>
std::optional<Division> best_division(const Problem& p, uint32_t tokens, const Device& device) {
  constexpr float kWeightBytes = 33, kXBytes = 45, kSplit = 1200,
                  kPartBytes = 20;  // a nanosecond; but kSplit
  std::optional<Division> best;
  float least = 0;
  for (uint32_t wanted = 1; wanted <= std::min(p.chunks, device.multiprocessors); ++wanted) {
    const uint32_t chunks = quotient_up(p.chunks, wanted), splits = quotient_up(p.chunks, chunks);
    if (splits != wanted || Form::shared_bytes(chunks) > device.shared_bytes) continue;
    const uint32_t blocks = std::min(device.multiprocessors / splits, p.groups);
    const float groups = quotient_up(p.groups, blocks);
    const float time = groups * chunks * kGroupChunkBytes / kWeightBytes +
                       tokens * chunks * kChunk * 2 / kXBytes +
                       (splits > 1 ? kSplit + groups * Form::kSums * 4 * 2 / kPartBytes : 0);
    if (!best || time < least) {
      best = {splits, chunks, blocks};
      least = time;
    }
  }
  return best;
}

struct Run {
  Problem problem;
  const Device& device;
  const std::vector<int64_t>& division;  // splits and blocks for each, or empty: the best
  cudaStream_t stream;
  const Tensor& like;  // partial sums are allocated beside it
};

template <class T, class Operand, class Form>
bool try_form(Run& run) {
  Problem& p = run.problem;
  std::optional<Division> division = best_division<Form>(p, Form::kTokenGroups * kTokenGroup, run.device);
  if (!run.division.empty()) {
    const uint32_t splits = static_cast<uint32_t>(run.division[0]), chunks = quotient_up(p.chunks, splits);
    require(quotient_up(p.chunks, chunks) == splits && Form::shared_bytes(chunks) <= run.device.shared_bytes,
            splits, " splits of ", p.chunks, " chunks are not possible here");
    division = {splits, chunks, static_cast<uint32_t>(run.division[1])};
  }
  if (!division) return false;
  p.splits = division->splits;
  p.chunks_per_split = division->chunks_per_split;
  std::optional<Tensor> partials;
  if (p.splits > 1) {
    partials =
        torch::stable::new_empty(run.like, {int64_t{p.groups} * p.splits * Form::kSums}, ScalarType::Float);
    p.partials = static_cast<float*>(partials->mutable_data_ptr());
  }
  launch_overlapped(multiply<T, Operand, Form>, p.splits * division->blocks_per_split, Form::kThreads,
                    Form::shared_bytes(p.chunks_per_split), run.stream, p);
  return true;
}

template <class T, class Operand>
void multiply_all(Run& run, bool batch_invariant) {
  Problem& p = run.problem;
  const uint32_t all = p.tokens;
  const size_t x_row = p.columns * sizeof(T),
               out_row = size_t{p.silu_mul ? p.outputs / 2 : p.outputs} * sizeof(T);
  for (uint32_t done = 0; done < all; done += p.tokens) {
    const uint32_t left = all - done;
    const auto try_up_to = [&](auto form, uint32_t tokens) {
      p.tokens = std::min(left, tokens);
      return try_form<T, Operand, typename decltype(form)::type>(run);
    };
    const bool launched = batch_invariant ? try_up_to(TypeOf<Some>(), 16)
                                          : (left > 32 && try_up_to(TypeOf<Most>(), 64)) ||
                                                (left > 16 && try_up_to(TypeOf<Many>(), 32)) ||
                                                (left > 8 && try_up_to(TypeOf<Some>(), 16)) ||
                                                try_up_to(TypeOf<Few>(), 8);
    require(launched, "no division of ", p.columns, " columns fits this GPU's shared memory");
    p.x += p.tokens * x_row / sizeof(uint4);
    p.out = static_cast<char*>(p.out) + p.tokens * out_row;
    if (p.residual) p.residual = static_cast<const char*>(p.residual) + p.tokens * out_row;
  }
}

const void* data_or_null(const std::optional<Tensor>& tensor) {
  return tensor ? tensor->const_data_ptr() : nullptr;
}

Tensor nvfp4_decode_linear(const Tensor& input, const Tensor& codes, const Tensor& scales,
                           const Tensor& arrivals, double global_scale,
                           const std::optional<Tensor>& column_scale, const std::optional<Tensor>& bias,
                           const std::optional<Tensor>& residual, bool silu_mul, int64_t operands,
                           bool batch_invariant, const std::vector<int64_t>& division) {
  const Tensor x = torch::stable::contiguous(input);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const int64_t outputs = codes.size(0);
  const Device device = device_of(x.get_device_index());
  const cudaStream_t stream = current_stream(x);
  const Tensor out =
      torch::stable::new_empty(x, with_last(x, silu_mul ? outputs / 2 : outputs), x.scalar_type());

  Problem problem = problem_of(x, codes, outputs, scales);
  problem.column_scale = static_cast<const float*>(data_or_null(column_scale));
  problem.bias = data_or_null(bias);
  problem.residual = data_or_null(residual);
  problem.out = out.mutable_data_ptr();
  problem.arrivals = static_cast<uint32_t*>(arrivals.mutable_data_ptr());
  problem.upper_global_scale = problem.lower_global_scale = static_cast<float>(global_scale);
  problem.tokens = static_cast<uint32_t>(x.numel() / problem.columns);
  problem.silu_mul = silu_mul;
  require(scales.numel() == int64_t{problem.groups} * problem.chunks * kLanes * 4 &&
              arrivals.numel() >= problem.groups,
          "scales or arrivals are not those of prepare_weight");

  Run run{problem, device, division, stream, x};
  for_operands(x, operands, device, stream, [&](auto type, auto operand) {
    multiply_all<typename decltype(type)::type, typename decltype(operand)::type>(run, batch_invariant);
  });
  return out;
}

}  // namespace
}  // namespace nibble::decode

STABLE_TORCH_LIBRARY_IMPL(nibble, CUDA, library) {
  library.impl("nvfp4_decode_linear", TORCH_BOX(&nibble::decode::nvfp4_decode_linear));
}
