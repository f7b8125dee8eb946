// nibble::decode_attention on NVIDIA GPUs.
#include <optional>

#include "decode_attention/cache_map.h"
#include "decode_attention/clusters/division.h"
#include "decode_attention/launch.cuh"
#include "decode_attention/warpgroups/form.h"
#include "nibble/cuda.h"

namespace nibble::attention {
namespace {

template <class T>
const T* data_or_null(const std::optional<Tensor>& tensor) {
  return tensor ? static_cast<const T*>(tensor->const_data_ptr()) : nullptr;
}

void check_tables(const Tensor& pages, const Tensor& lengths, const Tensor& query_begins) {
  for (const Tensor* table : {&pages, &lengths, &query_begins})
    require(table->scalar_type() == ScalarType::Int && table->stride(table->dim() - 1) == 1,
            "tables of pages, lengths and query begins are int32 without gaps");
  require(pages.dim() == 2 && pages.size(0) >= lengths.numel() && query_begins.numel() > lengths.numel(),
          "expected a row of pages and a query begin for each of ", lengths.numel(), " sequences");
}

void check_cache(const Tensor& query, const Tensor& cache) {
  const int64_t head_dim = query.size(2);
  require(query.scalar_type() == ScalarType::BFloat16 && query.stride(2) == 1 && query.stride(0) % 4 == 0 &&
              query.stride(1) % 4 == 0,
          "expected bfloat16 queries whose heads begin at multiples of 8 bytes");
  require(head_dim == 64 || head_dim == 128 || head_dim == 256,
          "expected a head dim of 64, 128 or 256, found ", head_dim);
  require(cache.scalar_type() == ScalarType::BFloat16 || cache.scalar_type() == ScalarType::Float8_e4m3fn,
          "expected a cache in bfloat16 or float8_e4m3fn");
  require(cache.dim() == 4 && cache.size(3) == 2 * head_dim && cache.stride(3) == 1,
          "expected a cache [pages, KV heads, tokens, 2 D] with D = ", head_dim);
  require(cache.size(2) % kTile == 0, "expected pages of a multiple of 16 tokens, found ", cache.size(2));
  require(query.size(1) % cache.size(1) == 0, query.size(1), " heads are not divided by ", cache.size(1),
          " KV heads");
  const int64_t unit = 16 / cache.element_size();
  for (int64_t i = 0; i < 3; ++i) require(cache.stride(i) % unit == 0, "a key does not begin at 16 bytes");
}

Problem problem_of(const Tensor& query, const Tensor& cache, const Tensor& pages, int64_t most_queries,
                   int64_t least_chunk, int64_t most_splits) {
  const int64_t size = cache.element_size();
  Problem p{};
  p.query = query.const_data_ptr();
  p.cache = static_cast<const uint8_t*>(cache.const_data_ptr());
  p.page_stride = cache.stride(0) * size;
  p.head_stride = cache.stride(1) * size;
  p.token_stride = cache.stride(2) * size;
  p.query_token_stride = query.stride(0);
  p.query_head_stride = query.stride(1);
  p.kv_heads = static_cast<uint32_t>(cache.size(1));
  p.group = static_cast<uint32_t>(query.size(1) / cache.size(1));
  p.most_queries = static_cast<uint32_t>(most_queries);
  p.tokens_per_page = static_cast<uint32_t>(cache.size(2));
  p.pages_stride = static_cast<uint32_t>(pages.stride(0));
  p.least_chunk = static_cast<uint32_t>(least_chunk);
  p.most_splits = static_cast<uint32_t>(most_splits);
  require(p.group <= kRows && most_queries >= 1 && most_queries <= 8,
          "expected up to 16 query heads a KV head and 1 to 8 query tokens");
  require(least_chunk >= kTile && least_chunk % kTile == 0 && most_splits >= 1 && most_splits <= kMostSplits,
          "expected splits of a multiple of 16 tokens, and 1 to ", kMostSplits, " of them");
  return p;
}

// The sequences in parts that a launch has tables and the workspace has room for. A sequence's result depends
// on the others only through their number: clusters are faster for at most `most_clustered`. SM90 has
// warpgroups for more; elsewhere, and for other sizes, blocks compute them.
void launch_parts(Problem p, uint32_t sequences, uint32_t at_a_time, const Tensor& query, const Tensor& cache,
                  uint32_t most_clustered, bool use_warpgroups) {
  const int device = query.get_device_index();
  const cudaStream_t stream = current_stream(query);
  const uint32_t head_dim = static_cast<uint32_t>(query.size(2));
  const bool is_fp8 = cache.scalar_type() == ScalarType::Float8_e4m3fn;
  const CacheMap map{p.cache,
                     static_cast<uint64_t>(cache.size(0)),
                     p.kv_heads,
                     p.tokens_per_page,
                     static_cast<uint64_t>(p.page_stride),
                     static_cast<uint64_t>(p.head_stride),
                     static_cast<uint64_t>(p.token_stride)};
  Gpu gpu;
  check(find_gpu(device, gpu));
  // Targets with less shared memory have no kernel of clusters.
  const bool is_clustered = sequences <= most_clustered && gpu.shared_bytes >= kLargeSharedBytes &&
                            clusters::has_form(head_dim, slot_rows(p));
  const bool has_warpgroups = use_warpgroups && gpu.capability == 90 && warpgroups::has_form(head_dim);
  p.blocks_each = warpgroups::Division::blocks_each(p, sequences);
  for (uint32_t done = 0; done < sequences; done += p.sequences) {
    p.sequences = std::min(sequences - done, at_a_time);
    if (is_clustered) {
      check((is_fp8 ? clusters::launch_fp8 : clusters::launch_bf16)(p, map, head_dim, device, stream));
    } else if (has_warpgroups) {
      check((is_fp8 ? warpgroups::launch_fp8 : warpgroups::launch_bf16)(p, map, head_dim, device, stream));
    } else {
      check(launch(p, head_dim, is_fp8, device, stream));
    }
    p.pages += int64_t{p.sequences} * p.pages_stride;
    p.lengths += p.sequences;
    p.query_begins += p.sequences;
  }
}

void decode_attention(const Tensor& query, const Tensor& cache, const Tensor& pages, const Tensor& lengths,
                      const Tensor& query_begins, int64_t most_queries, double scale,
                      const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale,
                      int64_t window, double soft_cap, const std::optional<Tensor>& sinks, Tensor out,
                      std::optional<Tensor> lse, Tensor partials, Tensor counters, int64_t least_chunk,
                      int64_t most_splits, int64_t most_clustered, bool use_warpgroups, bool is_early) {
  check_tables(pages, lengths, query_begins);
  check_cache(query, cache);
  Problem p = problem_of(query, cache, pages, most_queries, least_chunk, most_splits);
  const uint32_t sequences = static_cast<uint32_t>(lengths.numel()), heads = p.kv_heads * row_tiles_of(p);
  require(out.is_contiguous() && out.numel() == query.numel() && out.scalar_type() == query.scalar_type(),
          "expected a result without gaps, as large as the queries");
  const int64_t floats = heads * most_splits * partial_floats(p, static_cast<uint32_t>(query.size(2)));
  const int64_t room = std::min(partials.numel() / floats, counters.numel() / (heads * kRows * kRanks));
  require(room >= 1, "the workspace is too small for a sequence");
  const uint32_t at_a_time = static_cast<uint32_t>(std::min<int64_t>(room, kMostSequences));
  p.pages = static_cast<const int32_t*>(pages.const_data_ptr());
  p.lengths = static_cast<const int32_t*>(lengths.const_data_ptr());
  p.query_begins = static_cast<const int32_t*>(query_begins.const_data_ptr());
  p.k_scale = data_or_null<float>(k_scale);
  p.v_scale = data_or_null<float>(v_scale);
  p.sinks = data_or_null<float>(sinks);
  p.out = out.mutable_data_ptr();
  p.lse = lse ? static_cast<float*>(lse->mutable_data_ptr()) : nullptr;
  p.partials = static_cast<float*>(partials.mutable_data_ptr());
  p.counters = static_cast<uint32_t*>(counters.mutable_data_ptr());
  p.window = static_cast<uint32_t>(window);
  p.scale = static_cast<float>(scale);
  p.soft_cap = static_cast<float>(soft_cap);
  p.is_early = is_early;
  const torch::stable::accelerator::DeviceGuard guard(query.get_device_index());
  launch_parts(p, sequences, at_a_time, query, cache, static_cast<uint32_t>(most_clustered), use_warpgroups);
}

}  // namespace
}  // namespace nibble::attention

STABLE_TORCH_LIBRARY_IMPL(nibble, CUDA, library) {
  library.impl("decode_attention", TORCH_BOX(&nibble::attention::decode_attention));
}
