// nibble::nvfp4_moe_add_up: the sum behind the products of decode.cu.
#include "nibble/cuda.h"
#include "nibble/overlap.cuh"
#include "nvfp4_moe/add_up.cuh"

namespace nibble::experts {
namespace {

template <class T>
__global__ void __launch_bounds__(kSumThreads, kSumBlocks)
    add_up(const Chosen chosen, const uint4* products, uint4* out, uint32_t tokens, uint32_t pieces) {
  wait_for_kernel_before();
  add_products<T>(blockIdx.x * kSumThreads + threadIdx.x, chosen, products, out, tokens, pieces);
}

// products: [tokens * topk, columns], of ids [tokens, topk].
Tensor nvfp4_moe_add_up(const Tensor& input, const Tensor& ids, int64_t count) {
  const Tensor products = torch::stable::contiguous(input), choices = torch::stable::contiguous(ids);
  const int64_t tokens = choices.size(0), topk = choices.size(1), columns = products.size(1);
  require(choices.scalar_type() == ScalarType::Int && products.size(0) == tokens * topk,
          "expected int32 ids of the products' experts");
  require(columns % 8 == 0, "expected columns in 8s, found ", columns);
  const torch::stable::accelerator::DeviceGuard guard(products.get_device_index());
  const Tensor out = torch::stable::new_empty(products, {tokens, columns}, products.scalar_type());
  if (tokens == 0) return out;
  const auto pieces = static_cast<uint32_t>(columns / 8), rows = static_cast<uint32_t>(tokens);
  const Chosen chosen{static_cast<const int32_t*>(choices.const_data_ptr()), nullptr, nullptr,
                      static_cast<uint32_t>(topk), static_cast<uint32_t>(count)};
  for_cuda_type(products.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    check(launch_early(
        (rows * pieces + kSumThreads - 1) / kSumThreads, kSumThreads, 0, current_stream(products), add_up<T>,
        chosen, static_cast<const uint4*>(products.const_data_ptr()),
        static_cast<uint4*>(out.mutable_data_ptr()), rows, pieces));
  });
  return out;
}

}  // namespace
}  // namespace nibble::experts

STABLE_TORCH_LIBRARY_IMPL(nibble, CUDA, library) {
  library.impl("nvfp4_moe_add_up", TORCH_BOX(&nibble::experts::nvfp4_moe_add_up));
}
