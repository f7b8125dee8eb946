// The decode attention's own source, run on the host: test_decode_attention_on_the_host.py.
#include <new>
#include <string_view>

#include "decode_attention/decode.cuh"
#include "decode_attention/clusters/decode.cuh"
#include "decode_attention/warpgroups/decode.cuh"
#include "run_cluster.h"

using namespace nibble::attention;

namespace {

template <class Form>
void run(const Problem& problem, uint32_t blocks) {
  for (uint32_t block = 0; block < blocks; ++block) {
    run_cluster(1, Form::kThreads, sizeof(Shared<Form>), block, blocks, [&](uint4* memory) {
      Attention<Form>(problem, *reinterpret_cast<Shared<Form>*>(memory)).run();
    });
  }
}

template <uint32_t HeadDim, bool IsFp8>
void run_rows(const Problem& problem, bool is_small, uint32_t blocks) {
  const bool is_one_group = slot_rows(problem) <= 8;
  if (is_small && is_one_group) return run<Form<HeadDim, IsFp8, 1, true>>(problem, blocks);
  if (is_small) return run<Form<HeadDim, IsFp8, 2, true>>(problem, blocks);
  if (is_one_group) return run<Form<HeadDim, IsFp8, 1, false>>(problem, blocks);
  run<Form<HeadDim, IsFp8, 2, false>>(problem, blocks);
}

template <bool IsFp8>
void run_size(const Problem& problem, uint32_t head_dim, bool is_small, uint32_t blocks) {
  if (head_dim == 64) return run_rows<64, IsFp8>(problem, is_small, blocks);
  if (head_dim == 128) return run_rows<128, IsFp8>(problem, is_small, blocks);
  run_rows<256, IsFp8>(problem, is_small, blocks);
}

// What the kernel before this one writes: until it ends, something else is there.
class Unwritten {
 public:
  Unwritten(const Problem& p, uint32_t head_dim, bool is_fp8) {
    const uint32_t tokens = static_cast<uint32_t>(p.query_begins[p.sequences]);
    add(p.query, tokens * p.kv_heads * p.group * head_dim * 2);
    for (uint32_t i = 0; i < p.sequences; ++i) {
      const int32_t queries = p.query_begins[i + 1] - p.query_begins[i];
      for (int32_t token = std::max(0, p.lengths[i] - queries); token < p.lengths[i]; ++token) {
        const int32_t page = p.pages[i * p.pages_stride + token / p.tokens_per_page];
        for (uint32_t head = 0; head < p.kv_heads; ++head)
          add(p.cache + page * p.page_stride + head * p.head_stride + token % p.tokens_per_page * p.token_stride,
              head_dim * (is_fp8 ? 2 : 4));
      }
    }
    if (!p.is_early) add(p.lengths, p.sequences * 4);
  }

  void begin() {
    for (const Part& part : parts_) std::memset(part.place, 0x7f, part.bytes.size());
    run_previous_kernel([this] {
      for (const Part& part : parts_) std::ranges::copy(part.bytes, part.place);
    });
  }

 private:
  struct Part {
    uint8_t* place;
    std::vector<uint8_t> bytes;
  };
  void add(const void* from, size_t size) {
    uint8_t* const place = static_cast<uint8_t*>(const_cast<void*>(from));
    parts_.push_back({place, {place, place + size}});
  }
  std::vector<Part> parts_;
};

template <class Form>
void run_clusters(const Problem& problem, CUtensorMap map, uint32_t clusters) {
  map.chunks = Form::kChunks, map.box_tokens = kTile;
  Unwritten unwritten(problem, Form::kHeadDim, Form::kIsFp8);
  for (uint32_t cluster = 0; cluster < clusters; ++cluster) {
    unwritten.begin();
    run_cluster(Form::kRanks, Form::kThreads, sizeof(clusters::Shared<Form>), cluster, clusters, [&](uint4* memory) {
      clusters::Attention<Form>(problem, map, *reinterpret_cast<clusters::Shared<Form>*>(memory)).run();
    });
  }
}

template <bool IsFp8>
void run_cluster_size(const Problem& p, const CUtensorMap& map, uint32_t head_dim, uint32_t clusters) {
  if (head_dim == 128) return run_clusters<clusters::Form<128, IsFp8, 1>>(p, map, clusters);
  if (slot_rows(p) > 8) return run_clusters<clusters::Form<64, IsFp8, 2>>(p, map, clusters);
  run_clusters<clusters::Form<64, IsFp8, 1>>(p, map, clusters);
}

template <class Form>
void run_warpgroups(const Problem& problem, CUtensorMap map, uint32_t blocks) {
  map.chunks = Form::kChunks, map.box_tokens = Form::kPieceTokens;
  Unwritten unwritten(problem, Form::kHeadDim, Form::kIsFp8);
  unwritten.begin();
  // All blocks at a time, since they wait for each other.
  run_cluster(blocks, Form::kThreads, sizeof(warpgroups::Shared<Form>), 0, 1, [&](uint4* memory) {
    warpgroups::run<Form>(problem, map, *reinterpret_cast<warpgroups::Shared<Form>*>(memory));
  });
}

template <uint32_t HeadDim, bool IsFp8>
void run_warpgroup_rows(const Problem& p, const CUtensorMap& map, uint32_t blocks) {
  if (slot_rows(p) > 8) return run_warpgroups<warpgroups::Form<HeadDim, IsFp8, 2>>(p, map, blocks);
  run_warpgroups<warpgroups::Form<HeadDim, IsFp8, 1>>(p, map, blocks);
}

template <bool IsFp8>
void run_warpgroup_size(const Problem& p, const CUtensorMap& map, uint32_t head_dim, uint32_t blocks) {
  if (head_dim == 128) return run_warpgroup_rows<128, IsFp8>(p, map, blocks);
  run_warpgroup_rows<256, IsFp8>(p, map, blocks);
}

}  // namespace

extern "C" uint32_t problem_bytes() { return sizeof(Problem); }

// Tokens of a split, and how many splits there are.
extern "C" void divide(const Problem* problem, uint32_t length, uint32_t warps, uint32_t* found) {
  const Span span = span_of(*problem, length, 1, warps);
  found[0] = span.chunk * kTile, found[1] = span.splits;
}

// How many splits clusters have of a sequence, and the tiles where those begin, with the end.
extern "C" uint32_t divide_for_clusters(const Problem* problem, uint32_t length, uint32_t* begins) {
  const uint32_t tiles = undivided_span(*problem, length, 1).tiles, splits = clusters::Division::splits_of(*problem, tiles);
  for (uint32_t split = 0; split <= splits; ++split) begins[split] = clusters::Division::first_tile(*problem, tiles, splits, split);
  return splits;
}

// How many splits warpgroups have of a sequence, with as many others.
extern "C" uint32_t divide_for_warpgroups(Problem* problem, uint32_t length, uint32_t sequences) {
  problem->blocks_each = warpgroups::Division::blocks_each(*problem, sequences);
  return warpgroups::Division::splits_of(*problem, undivided_span(*problem, length, 1).tiles);
}

extern "C" void attend_on_the_host(const Problem* problem, uint32_t head_dim, bool is_fp8, bool is_small,
                                   const char* form, uint32_t pages, uint32_t blocks, bool is_late) {
  emulated_is_late = is_late;
  const std::string_view kernel = is_small ? "blocks" : form;
  CUtensorMap map{};
  map.bytes = problem->cache;
  map.tokens = problem->tokens_per_page, map.heads = problem->kv_heads, map.pages = pages;
  map.token_stride = problem->token_stride, map.head_stride = problem->head_stride;
  map.page_stride = problem->page_stride;
  if (kernel == "clusters" && clusters::has_form(head_dim, slot_rows(*problem))) {
    if (is_fp8) return run_cluster_size<true>(*problem, map, head_dim, blocks);
    return run_cluster_size<false>(*problem, map, head_dim, blocks);
  }
  if (kernel == "warpgroups" && warpgroups::has_form(head_dim)) {
    if (is_fp8) return run_warpgroup_size<true>(*problem, map, head_dim, 2);
    return run_warpgroup_size<false>(*problem, map, head_dim, 2);
  }
  if (is_fp8) {
    run_size<true>(*problem, head_dim, is_small, blocks);
  } else {
    run_size<false>(*problem, head_dim, is_small, blocks);
  }
}
