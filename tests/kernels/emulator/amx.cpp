// The CPU's products with tiles (nvfp4_linear/matmul_amx.cpp) as functions of a library. nibble/amx_tiles.h is the
// emulator's, so any processor with AVX-512 runs them; activations and sums end where a page does that may not be
// touched.
#include "nvfp4_linear/matmul_amx.cpp"

#include <sys/mman.h>

#include <memory>

namespace {

using namespace nibble::cpu;

// Bytes that end at a page without access.
class Guarded {
 public:
  explicit Guarded(size_t bytes) : room_((bytes + kPage - 1) / kPage * kPage), bytes_(bytes) {
    void* const all = mmap(nullptr, room_ + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED) std::abort();
    memory_ = static_cast<char*>(all);
    mprotect(memory_ + room_, kPage, PROT_NONE);
  }
  Guarded(const void* from, size_t bytes) : Guarded(bytes) { std::memcpy(data(), from, bytes); }
  ~Guarded() { munmap(memory_, room_ + kPage); }
  Guarded(const Guarded&) = delete;

  void* data() const { return memory_ + room_ - bytes_; }

 private:
  static constexpr size_t kPage = 4096;
  size_t room_, bytes_;
  char* memory_;
};

// Calls multiply(tiles, count, panel, sums) for panels of a weight, and copies the sums to `to`.
template <class F>
void for_panels(const Tiles& all, int64_t tiles, int64_t rows, int64_t panel_bytes, float* to, const F& multiply) {
  const std::unique_ptr<void, decltype(&std::free)> panel(std::aligned_alloc(64, (panel_bytes + 63) / 64 * 64),
                                                          &std::free);
  const int64_t stride = tiles * kLaneRows;
  std::memset(panel.get(), 0xff, panel_bytes);  // NaN
  for (int64_t tile = 0; tile < tiles; tile += kPanelTiles) {
    const int64_t count = std::min(kPanelTiles, tiles - tile), bytes = count * kLaneRows * sizeof(float);
    const Guarded sums(rows * bytes);
    multiply(all.from(tile), count, panel.get(), static_cast<float*>(sums.data()));
    for (int64_t row = 0; row < rows; ++row)
      std::memcpy(to + row * stride + tile * kLaneRows, static_cast<char*>(sums.data()) + row * bytes, bytes);
  }
}

}  // namespace

extern "C" int can_run() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("f16c");
}

// sums [rows][tiles * 16] of x [rows][blocks * 16] in BF16 with a packed weight.
extern "C" void multiply_floats(const uint8_t* codes, const uint8_t* scales, int64_t tiles, int64_t blocks,
                                const uint16_t* x, int64_t rows, float* sums) {
  const FloatLoops loops = with_amx(FloatLoops{});
  const Guarded of_x(x, rows * blocks * kBlockColumns * sizeof *x);
  for_panels({codes, scales, blocks}, tiles, rows, loops.panel_bytes, sums,
             [&](const Tiles& some, int64_t count, void* panel, float* to) {
               loops.many(some, count, of_x.data(), rows, panel, to, count * kLaneRows);
             });
}
