// nibble::attention_front on NVIDIA GPUs.
#include <optional>

#include "attention_front/front.cuh"
#include "nibble/cuda.h"
#include "nibble/overlap.cuh"

namespace nibble::front {
namespace {

template <uint32_t HeadDim, bool IsFp8>
__global__ void __launch_bounds__(kThreads) prepare(const __grid_constant__ Problem problem) {
  Front<HeadDim, IsFp8>(problem).run();
}

template <class T>
const T* data_or_null(const std::optional<Tensor>& tensor) {
  return tensor ? static_cast<const T*>(tensor->const_data_ptr()) : nullptr;
}

bool is_plain(const Tensor& tensor, ScalarType type) {
  return tensor.scalar_type() == type && tensor.is_contiguous();
}

void check_scale(const std::optional<Tensor>& scale, const char* name) {
  if (scale) check_scalar(*scale, name);
}

void set_cache(Problem& p, const Tensor& cache, const Tensor& slots, int64_t head_dim) {
  require(cache.scalar_type() == ScalarType::BFloat16 || cache.scalar_type() == ScalarType::Float8_e4m3fn,
          "expected a cache in bfloat16 or float8_e4m3fn");
  require(cache.dim() == 4 && cache.size(1) == p.kv_heads && cache.size(3) == 2 * head_dim &&
              cache.stride(3) == 1,
          "expected a cache [pages, ", p.kv_heads, " heads, tokens, 2 D] with D = ", head_dim);
  const int64_t size = cache.element_size(), unit = kEach;
  for (int64_t i = 0; i < 3; ++i)
    require(cache.stride(i) % unit == 0, "a key does not begin at a multiple of eight elements");
  require(cache.size(0) * cache.size(2) < int64_t{1} << 32, "the cache has too many tokens");
  require(is_plain(slots, ScalarType::Long) && slots.numel() <= p.tokens,
          "expected int64 slots, at most one for each token");
  p.cache = static_cast<uint8_t*>(cache.mutable_data_ptr());
  p.page_stride = cache.stride(0) * size;
  p.head_stride = cache.stride(1) * size;
  p.token_stride = cache.stride(2) * size;
  p.tokens_per_page = static_cast<uint32_t>(cache.size(2));
  p.slots = static_cast<const int64_t*>(slots.const_data_ptr());
  p.slot_count = static_cast<uint32_t>(slots.numel());
}

void set_norms(Problem& p, const std::optional<Tensor>& q_weight, const std::optional<Tensor>& k_weight,
               int64_t head_dim) {
  require(q_weight.has_value() == k_weight.has_value(), "expected norms of queries and keys, or neither");
  if (!q_weight) return;
  for (const Tensor* weight : {&*q_weight, &*k_weight})
    require(is_plain(*weight, ScalarType::BFloat16) && weight->numel() == head_dim,
            "expected a norm's weight in bfloat16, of ", head_dim, " elements");
  p.q_weight = q_weight->const_data_ptr();
  p.k_weight = k_weight->const_data_ptr();
}

void set_rotation(Problem& p, const Tensor& positions, const Tensor& cos_sin, int64_t head_dim) {
  require(is_plain(positions, ScalarType::Long) && positions.numel() == p.tokens,
          "expected an int64 position for each token");
  require(is_plain(cos_sin, ScalarType::BFloat16) && cos_sin.dim() == 2 && cos_sin.size(1) % 16 == 0 &&
              cos_sin.size(1) <= head_dim,
          "expected cosines and sines in bfloat16, a multiple of 16 up to D in all");
  p.positions = static_cast<const int64_t*>(positions.const_data_ptr());
  p.cos_sin = cos_sin.const_data_ptr();
  p.rotary = static_cast<uint32_t>(cos_sin.size(1));
}

template <uint32_t HeadDim>
void launch_size(const Problem& p, bool is_fp8, cudaStream_t stream) {
  const int64_t rows = int64_t{p.tokens} * (p.heads + 2 * p.kv_heads);
  const int64_t lanes = rows * Front<HeadDim, false>::kLanesOfHead;
  require(lanes < int64_t{1} << 32, "too many tokens for one launch");
  const uint32_t blocks = static_cast<uint32_t>((lanes + kThreads - 1) / kThreads);
  for_bool(is_fp8, [&](auto fp8) {
    check(launch_early(blocks, kThreads, 0, stream, prepare<HeadDim, decltype(fp8)::value>, p));
  });
}

void attention_front(const Tensor& qkv, const std::optional<Tensor>& q_weight,
                     const std::optional<Tensor>& k_weight, double epsilon, const Tensor& positions,
                     const Tensor& cos_sin, bool neox, int64_t heads, int64_t kv_heads,
                     const std::optional<Tensor>& slots, std::optional<Tensor> cache,
                     const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale,
                     const std::optional<Tensor>& q_scale, Tensor q) {
  require(qkv.dim() == 2 && qkv.scalar_type() == ScalarType::BFloat16 && qkv.stride(1) == 1 &&
              qkv.stride(0) % kEach == 0 && heads > 0 && kv_heads > 0 &&
              qkv.size(1) % (heads + 2 * kv_heads) == 0,
          "expected bfloat16 rows of queries, keys and values");
  const int64_t head_dim = qkv.size(1) / (heads + 2 * kv_heads), tokens = qkv.size(0);
  require(head_dim == 64 || head_dim == 128 || head_dim == 256,
          "expected a head dim of 64, 128 or 256, found ", head_dim);
  require(tokens < int64_t{1} << 32, "too many tokens for one launch");
  require(is_plain(q, q_scale ? ScalarType::Float8_e4m3fn : ScalarType::BFloat16) &&
              q.numel() == tokens * heads * head_dim,
          "expected room for the queries, in float8_e4m3fn with their scale and else in bfloat16");
  require(cache.has_value() == slots.has_value(), "expected a cache with slots, or neither");
  for (const auto* scale : {&k_scale, &v_scale, &q_scale}) check_scale(*scale, "a scale");
  Problem p{};
  p.qkv = qkv.const_data_ptr();
  p.qkv_stride = qkv.stride(0);
  p.tokens = static_cast<uint32_t>(tokens);
  p.heads = static_cast<uint32_t>(heads);
  p.kv_heads = static_cast<uint32_t>(kv_heads);
  p.epsilon = static_cast<float>(epsilon);
  p.is_neox = neox;
  p.q = q.mutable_data_ptr();
  p.k_scale = data_or_null<float>(k_scale);
  p.v_scale = data_or_null<float>(v_scale);
  p.q_scale = data_or_null<float>(q_scale);
  set_norms(p, q_weight, k_weight, head_dim);
  set_rotation(p, positions, cos_sin, head_dim);
  if (cache) set_cache(p, *cache, *slots, head_dim);
  const bool is_fp8 = cache && cache->scalar_type() == ScalarType::Float8_e4m3fn;
  require(!is_fp8 || (k_scale && v_scale), "a cache in float8_e4m3fn needs scales of keys and values");
  if (tokens == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(qkv.get_device_index());
  const cudaStream_t stream = current_stream(qkv);
  if (head_dim == 64) return launch_size<64>(p, is_fp8, stream);
  if (head_dim == 128) return launch_size<128>(p, is_fp8, stream);
  launch_size<256>(p, is_fp8, stream);
}

}  // namespace
}  // namespace nibble::front

STABLE_TORCH_LIBRARY_IMPL(nibble, CUDA, library) {
  library.impl("attention_front", TORCH_BOX(&nibble::front::attention_front));
}
