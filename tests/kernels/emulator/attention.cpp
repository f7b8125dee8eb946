// The decode attention's own source, run on the host: test_decode_attention_on_the_host.py.
#include <new>

#include "decode_attention/decode.cuh"
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

template <bool IsFp8>
void run_size(const Problem& problem, uint32_t head_dim, bool is_small, uint32_t blocks) {
  if (head_dim == 64) return run<Form<64, IsFp8, 4, 2>>(problem, blocks);
  if (head_dim == 128 && is_small) return run<Form<128, IsFp8, 4, 2>>(problem, blocks);
  if (head_dim == 128) return run<Form<128, IsFp8, 4, 3>>(problem, blocks);
  if (is_small) return run<Form<256, IsFp8, IsFp8 ? 4 : 2, 2>>(problem, blocks);
  run<Form<256, IsFp8, 4, IsFp8 ? 2 : 3>>(problem, blocks);
}

}  // namespace

extern "C" uint32_t problem_bytes() { return sizeof(Problem); }

extern "C" void attend_on_the_host(const Problem* problem, uint32_t head_dim, bool is_fp8, bool is_small,
                                   uint32_t blocks, bool is_late) {
  emulated_is_late = is_late;
  if (is_fp8) {
    run_size<true>(*problem, head_dim, is_small, blocks);
  } else {
    run_size<false>(*problem, head_dim, is_small, blocks);
  }
}
