// The warpgroup kernel's own source, run on the host: test_warpgroup_kernel_on_the_host.py.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "nvfp4_linear/warpgroup.cuh"
#include "nvfp4_linear/warpgroup_division.h"
#include "run_cluster.h"

using namespace nibble::warpgroup;
using nibble::Norm;

namespace {

// A copy with a page behind it that ends the process when it is read.
class Guarded {
 public:
  Guarded(const void* data, size_t bytes) {
    const size_t page = static_cast<size_t>(getpagesize()), pages = (bytes + page - 1) / page * page;
    size_ = pages + page;
    begin_ = static_cast<uint8_t*>(
        mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (begin_ == MAP_FAILED || mprotect(begin_ + pages, page, PROT_NONE) != 0) std::abort();
    data_ = reinterpret_cast<uint4*>(begin_ + pages - bytes);
    std::memcpy(data_, data, bytes);
  }
  Guarded(const Guarded&) = delete;
  ~Guarded() { munmap(begin_, size_); }
  const uint4* data() const { return data_; }

 private:
  uint8_t* begin_;
  uint4* data_;
  size_t size_;
};

template <uint32_t Tokens>
std::vector<uint4> order(const uint4* x, const Problem& p) {
  std::vector<uint4> ordered_x(size_t{p.token_tiles} * p.chunks * kSteps * 2 * Tokens);
  for (uint32_t tile = 0; tile < p.token_tiles; ++tile) {
    for (uint32_t i = 0; i < Tokens * p.chunks * kPieces; ++i) {
      const uint32_t piece = i % kPieces, chunk = i / kPieces % p.chunks, token = i / kPieces / p.chunks;
      const uint32_t row = tile * Tokens + token, column = chunk * kChunk + piece * 8;
      uint4 quarters[4];
      load_quarters(x + (size_t{row} * p.columns + column) / 8, quarters,
                    [&](uint32_t t) { return row < p.tokens && column + t * 32 < p.columns; });
      uint4* const to =
          &ordered_x[((size_t{tile} * p.chunks + chunk) * kSteps + piece * 2) * 2 * Tokens + token];
      for (uint32_t k = 0; k < 4; ++k) to[k * Tokens] = ordered(quarters, k);
    }
  }
  return ordered_x;
}

template <class T, class Operand, class Form>
void run(Problem p, const uint4* given_x, const uint32_t* codes, const uint32_t* scales, uint32_t clusters) {
  const auto map = [&](const uint32_t* words, uint32_t bytes) {
    return CUtensorMap{words, bytes / 4 * p.chunks, p.groups, bytes / 4, Form::kGroups};
  };
  p.codes = map(codes, kCodeBytes);
  p.scales = map(scales, kScaleBytes);
  p.row_blocks = (p.groups + Form::kGroups - 1) / Form::kGroups;
  p.token_tiles = (p.tokens + Form::kTokens - 1) / Form::kTokens;
  const Guarded guarded_x(given_x, size_t{p.tokens} * p.columns * 2);
  const uint4* const x = guarded_x.data();
  const std::vector<uint4> x_in_order = Form::kOrdersX ? std::vector<uint4>() : order<Form::kTokens>(x, p);
  p.x = Form::kOrdersX ? x : x_in_order.data();
  const float nan = __uint_as_float(~0u);
  std::vector<float4> parts(Form::kRanges ? size_t{clusters} * Form::kSlots * kLanes : 0, {nan, nan, nan, nan});
  std::vector<uint32_t> flags(clusters * Form::kConsumerWarps);
  p.parts = parts.data();
  p.flags = flags.data();
  for (uint32_t cluster = 0; cluster < clusters; ++cluster) {
    run_cluster(p.ranks, Form::kThreads, Form::shared_bytes(p.ranks), cluster, clusters, [&](uint4* memory) {
      Multiplier<T, Operand, Form>{p, nibble::instruction::shared_place(reinterpret_cast<uint8_t*>(memory))}
          .run();
    });
  }
  if (std::any_of(flags.begin(), flags.end(), [](uint32_t flag) { return flag != 0; })) {
    std::fprintf(stderr, "a flag of a part is left raised\n");
    std::abort();
  }
}

template <class T, class Operand, class Forms, Norm Beside>
void run_beside(Sharing sharing, const Problem& p, const uint4* x, const uint32_t* codes, const uint32_t* scales,
                uint32_t clusters) {
  const auto run_as = [&]<class Form>() { run<T, Operand, Form>(p, x, codes, scales, clusters); };
  if (sharing == Sharing::units)
    return run_as.template operator()<typename Forms::template Of<Sharing::units, Beside>>();
  if (sharing == Sharing::ranges)
    return run_as.template operator()<typename Forms::template Of<Sharing::ranges, Beside>>();
  if constexpr (Forms::kHasClusters) {
    if (sharing == Sharing::clusters)
      return run_as.template operator()<typename Forms::template Of<Sharing::clusters, Beside>>();
  }
  std::fprintf(stderr, "this form has no such sharing\n");
  std::abort();
}

template <class T, class Operand, class Forms>
void run_sharing(Sharing sharing, const Problem& p, const uint4* x, const uint32_t* codes,
                 const uint32_t* scales, uint32_t clusters) {
  if constexpr (Forms::kTokens <= kMostNormTokens) {
    if (p.output.norm.scaled)
      return run_beside<T, Operand, Forms, Norm::after>(sharing, p, x, codes, scales, clusters);
    if constexpr (!Forms::Units::kOrdersX) {
      if (p.norm.squares) return run_beside<T, Operand, Forms, Norm::before>(sharing, p, x, codes, scales, clusters);
    }
  }
  if (p.norm.squares || p.output.norm.scaled) {
    std::fprintf(stderr, "this form has no norm beside it\n");
    std::abort();
  }
  run_beside<T, Operand, Forms, Norm::none>(sharing, p, x, codes, scales, clusters);
}

// f(a form of warpgroup_division.h)
template <class F>
void with_forms(uint32_t number, F&& f) {
  uint32_t i = 0;
  for_every_form([&](auto forms) {
    if (i++ == number) f(forms);
  });
}

}  // namespace

extern "C" void multiply_warpgroup_on_the_host(bool late, bool bfloat, uint32_t form, uint32_t sharing,
                                               const void* x, const void* codes, const void* scales,
                                               const void* column_scale, const void* bias,
                                               const void* residual, void* out, float global_scale,
                                               uint32_t tokens, uint32_t outputs, uint32_t columns,
                                               uint32_t clusters, uint32_t ranks, bool silu_mul, bool ordered,
                                               const void* norm_weight, void* scaled, void* squares_after,
                                               uint32_t tile, const void* squares_before, uint32_t square_blocks,
                                               float epsilon) {
  emulated_is_late = late;
  Problem p{};
  p.output = {static_cast<const float*>(column_scale), bias, residual, out, global_scale, outputs, silu_mul, ordered,
              {norm_weight, scaled, static_cast<float*>(squares_after), tile}};
  p.norm = {static_cast<const float*>(squares_before), square_blocks, epsilon, tile};
  p.tokens = tokens;
  p.columns = columns;
  p.chunks = (columns + kChunk - 1) / kChunk;
  p.groups = (outputs / 2 + kGroup - 1) / kGroup;
  p.ranks = ranks;
  with_forms(form, [&]<class Forms>(Forms) {
    const auto run_as = [&]<class T, class Operand>() {
      run_sharing<T, Operand, Forms>(static_cast<Sharing>(sharing), p, static_cast<const uint4*>(x),
                                     static_cast<const uint32_t*>(codes),
                                     static_cast<const uint32_t*>(scales), clusters);
    };
    if (bfloat) return run_as.template operator()<__nv_bfloat16, nibble::BfloatOperand>();
    run_as.template operator()<__half, nibble::HalfOperand>();
  });
}

// Sharing, clusters, thread blocks of each, whether the form is for so many tokens, and the cost in nanoseconds,
// where the device runs as many blocks as it has multiprocessors.
extern "C" void divide_on_the_host(uint32_t form, uint32_t tokens, uint32_t outputs, uint32_t columns,
                                   uint32_t multiprocessors, bool ordered, uint32_t* chosen) {
  const Input input = ordered ? Input::ordered : Input::rows;
  const Shape shape{tokens, quotient_up(outputs / 2, kGroup), quotient_up(columns, kChunk), input};
  with_forms(form, [&]<class Forms>(Forms) {
    const Division division = *division_of<Forms>(
        shape, multiprocessors, [&](uint32_t ranks) { return multiprocessors / ranks; },
        [](Sharing, uint32_t) { return true; });
    chosen[0] = static_cast<uint32_t>(division.sharing);
    chosen[1] = division.clusters;
    chosen[2] = division.ranks;
    chosen[3] = Forms::is_for(tokens, input);
    chosen[4] = static_cast<uint32_t>(division.cost * 1000);
  });
}
