// vLLM's own Marlin MoE GEMM, callable with a c_tmp of the caller's on a GPU that pretends to be another.
// Compiled with csrc/moe/marlin_moe_wna16 of a vLLM source on the include path; see marlin_moe_c_tmp.py.

#include <cuda_runtime.h>

#include <cstdio>
#include <exception>

static int pretended_sms = 0, pretended_shared_memory = 0;

static cudaError_t device_attribute(int* value, cudaDeviceAttr attribute, int device) {
  if (attribute == cudaDevAttrMultiProcessorCount && pretended_sms) {
    *value = pretended_sms;
    return cudaSuccess;
  }
  if (attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin && pretended_shared_memory) {
    *value = pretended_shared_memory;
    return cudaSuccess;
  }
  return cudaDeviceGetAttribute(value, attribute, device);
}

#define cudaDeviceGetAttribute device_attribute
#include "ops.cu"
#undef cudaDeviceGetAttribute

struct Call {
  void *a, *b, *c, *c_tmp, *scales, *global_scale, *sorted_token_ids, *expert_ids, *padded_tokens, *topk_weights, *locks;
  int block_m, experts, top_k, m, n, k;
};

struct Launch {
  int thread_k, thread_n, threads, blocks_per_sm, resident_per_sm;
};

// The GPU that the op and the calls below see: its SMs and its shared memory a block, in bytes; 0: the real one's.
extern "C" void pretend(int sms, int shared_memory) {
  pretended_sms = sms;
  pretended_shared_memory = shared_memory;
}

// What the op would launch for an NVFP4 call; 0 where it finds no kernel. resident_per_sm: what fits on an SM of the real GPU.
extern "C" int plan(const Call* call, Launch* launch) {
  using namespace MARLIN_NAMESPACE_NAME;
  int sms, shared_memory;
  device_attribute(&sms, cudaDevAttrMultiProcessorCount, 0);
  device_attribute(&shared_memory, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0);
  int m_blocks = div_ceil(call->block_m, 16);
  bool eight = call->block_m == 8;
  auto config = determine_exec_config(vllm::kBFloat16, vllm::kFE2M1f, vllm::kBFloat16, vllm::kFE4M3fn, call->m,
                                      call->n, call->k, call->experts, call->top_k, m_blocks, eight, 4, 16, false,
                                      false, false, 4, shared_memory, sms);
  auto threads = config.tb_cfg;
  if (threads.thread_k == -1) return 0;
  auto kernel = get_marlin_kernel(vllm::kBFloat16, vllm::kFE2M1f, vllm::kBFloat16, vllm::kFE4M3fn, m_blocks,
                                  threads.thread_n / 16, threads.thread_k / 16, eight, false, 1, threads.num_threads,
                                  false, 4);
  int dynamic = config.blocks_per_sm > 1 ? shared_memory / config.blocks_per_sm - 1024 : shared_memory;
  *launch = Launch{threads.thread_k, threads.thread_n, threads.num_threads, config.blocks_per_sm, 0};
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, dynamic);
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&launch->resident_per_sm, kernel, threads.num_threads, dynamic);
  return kernel != MarlinDefault;
}

// Launch the GEMM as the op does, with its own choice of kernel and grid; 0 where it refuses.
extern "C" int gemm(const Call* call, void* stream) {
  int sms;
  device_attribute(&sms, cudaDevAttrMultiProcessorCount, 0);
  try {
    MARLIN_NAMESPACE_NAME::marlin_mm(
        call->a, call->b, call->c, call->c_tmp, nullptr, nullptr, call->scales, call->global_scale, nullptr,
        call->sorted_token_ids, call->expert_ids, call->padded_tokens, call->topk_weights, call->block_m, call->experts,
        call->top_k, false, call->m, call->n, call->k, call->locks, vllm::kBFloat16, vllm::kFE2M1f, vllm::kBFloat16,
        vllm::kFE4M3fn, false, false, 16, 0, static_cast<cudaStream_t>(stream), -1, -1, sms, -1, false, true, false);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 0;
  }
  return 1;
}
