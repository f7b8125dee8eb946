// nibble::nvfp4_linear and nibble::nvfp4_packed_linear on the CPU, and the packing of weights.
#include "nibble/nvfp4_product.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace nibble::cpu {
namespace {

NIBBLE_CPU_LEVELS void finish_row(float* sums, int64_t count, Epilogue epilogue) { finish(sums, count, epilogue); }

// Rows of x, about kManyRows at most.
template <class T>
void multiply_rows(const T* from, int64_t rows, const Nvfp4Weight& weight, const float* input_scale_inv,
                   const Epilogue& epilogue, T* to) {
  const auto activations = activations_of(from, rows, weight.columns, input_scale_inv);
  using Range = typename Activations<T>::Range;
  for_pieces(weight.tiles(), weight.blocks(), activations, [&](int64_t first, int64_t count, Range some) {
    struct Sums;
    const int64_t begin = first * kLaneRows, stride = count * kLaneRows;
    float* sums = sums_of<Sums>(activations, weight, first, count, some);
    const int64_t wanted = std::min(stride, weight.rows - begin);
    for (int64_t row = 0; row < some.count; ++row) {
      finish_row(sums + row * stride, wanted, epilogue.from(begin));
      store(sums + row * stride, wanted, to + (some.first + row) * weight.rows + begin);
    }
  });
}

// A tensor's floats, or null where there is none. Other types are converted into `copy`.
const float* floats_of(const std::optional<Tensor>& tensor, int64_t count, const char* name,
                       std::vector<float>& copy) {
  if (!tensor) return nullptr;
  const Tensor x = torch::stable::contiguous(*tensor);
  require(x.numel() == count, name, " must have ", count, " elements");
  copy.resize(count);
  for_float_type<true>(x.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    load(static_cast<const T*>(x.const_data_ptr()), count, copy.data());
  });
  return copy.data();
}

Tensor multiply(const Tensor& x, const Nvfp4Weight& weight, const Tensor& global_scale,
                const std::optional<Tensor>& column_scale, const std::optional<Tensor>& bias,
                const std::optional<Tensor>& input_scale_inv) {
  check_scalar(global_scale, "global_scale");
  Epilogue epilogue{*static_cast<const float*>(global_scale.const_data_ptr()), nullptr, nullptr};
  const float* inverse = nullptr;
  if (input_scale_inv) {
    check_scalar(*input_scale_inv, "input_scale_inv");
    inverse = static_cast<const float*>(input_scale_inv->const_data_ptr());
    epilogue.alpha *= 1.0f / *inverse;
  }
  std::vector<float> column_floats, bias_floats;
  epilogue.column_scale = floats_of(column_scale, weight.rows, "column_scale", column_floats);
  epilogue.bias = floats_of(bias, weight.rows, "bias", bias_floats);
  Tensor y = torch::stable::new_empty(x, with_last(x, weight.rows), x.scalar_type());
  const int64_t rows = x.numel() / weight.columns;
  for_float_type<true>(x.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    const T* from = static_cast<const T*>(x.const_data_ptr());
    T* to = static_cast<T*>(y.mutable_data_ptr());
    for_row_groups(rows, [&](int64_t row, int64_t count) {
      multiply_rows(from + row * weight.columns, count, weight, inverse, epilogue, to + row * weight.rows);
    });
  });
  return y;
}

Tensor nvfp4_linear(const Tensor& input, const Tensor& codes, const Tensor& scales,
                    const Tensor& global_scale, const std::optional<Tensor>& column_scale,
                    const std::optional<Tensor>& bias, const std::optional<Tensor>& input_scale_inv) {
  const Tensor x = torch::stable::contiguous(input);
  const Tensor all_codes = torch::stable::contiguous(codes), all_scales = torch::stable::contiguous(scales);
  return multiply(x, stored_weight(all_codes, all_scales, x.size(x.dim() - 1)), global_scale, column_scale, bias,
                  input_scale_inv);
}

Tensor nvfp4_packed_linear(const Tensor& input, const Tensor& codes, const Tensor& scales, int64_t rows,
                           const Tensor& global_scale, const std::optional<Tensor>& column_scale,
                           const std::optional<Tensor>& bias, const std::optional<Tensor>& input_scale_inv) {
  const Tensor x = torch::stable::contiguous(input);
  return multiply(x, packed_weight(codes, scales, rows, x.size(x.dim() - 1)), global_scale, column_scale, bias,
                  input_scale_inv);
}

// Large pages, where the system gives them to those who ask: a product reads all of a weight.
void ask_for_large_pages([[maybe_unused]] const Tensor& x) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = 2 << 20;
  const auto start = reinterpret_cast<uintptr_t>(x.mutable_data_ptr());
  const uintptr_t first = (start + kPage - 1) / kPage * kPage, last = (start + x.numel()) / kPage * kPage;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

std::tuple<Tensor, Tensor> nvfp4_pack(const Tensor& codes, const Tensor& scales) {
  const Tensor all_codes = torch::stable::contiguous(codes), all_scales = torch::stable::contiguous(scales);
  const int64_t columns = codes.size(1) * 2;
  const Nvfp4Weight weight = stored_weight(all_codes, all_scales, columns);
  const int64_t tiles = weight.tiles(), blocks = weight.blocks();
  Tensor packed = torch::stable::new_empty(codes, {tiles, blocks, kBlockCodeBytes}, ScalarType::Byte);
  Tensor packed_scales = torch::stable::new_empty(codes, {tiles, blocks, kLaneRows}, ScalarType::Float8_e4m3fn);
  ask_for_large_pages(packed);
  auto* to = static_cast<uint8_t*>(packed.mutable_data_ptr());
  auto* to_scales = static_cast<uint8_t*>(packed_scales.mutable_data_ptr());
  const StoredWeight stored{weight.codes, weight.scales, weight.rows, columns};
  torch::stable::parallel_for(0, tiles, 1, [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile)
      pack_tile(stored, tile * kLaneRows, to + tile * blocks * kBlockCodeBytes,
                to_scales + tile * blocks * kLaneRows);
  });
  return {packed, packed_scales};
}

std::tuple<Tensor, Tensor> nvfp4_unpack(const Tensor& codes, const Tensor& scales, int64_t rows) {
  const int64_t blocks = codes.size(1), columns = blocks * kBlockColumns;
  const Nvfp4Weight weight = packed_weight(codes, scales, rows, columns);
  Tensor stored = torch::stable::new_empty(codes, {rows, columns / 2}, ScalarType::Byte);
  Tensor stored_scales = torch::stable::new_empty(codes, {rows, blocks}, ScalarType::Float8_e4m3fn);
  auto* to = static_cast<uint8_t*>(stored.mutable_data_ptr());
  auto* to_scales = static_cast<uint8_t*>(stored_scales.mutable_data_ptr());
  torch::stable::parallel_for(0, weight.tiles(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile)
      unpack_tile(Tiles{weight.codes, weight.scales, blocks}.from(tile), tile * kLaneRows, rows, to, to_scales);
  });
  return {stored, stored_scales};
}

Tensor nvfp4_cpu_levels(const Tensor& like) {
  const auto& levels = matmul_levels();
  Tensor result = torch::stable::new_empty(like, {static_cast<int64_t>(levels.size())}, ScalarType::Long);
  for (size_t i = 0; i < levels.size(); ++i)
    static_cast<int64_t*>(result.mutable_data_ptr())[i] = levels[i]->number;
  return result;
}

void nvfp4_use_cpu_level(const Tensor&, int64_t index) {
  require(index >= 0 && index < static_cast<int64_t>(matmul_levels().size()), "no such level");
  use_matmul_level(index);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(nibble, CPU, library) {
  library.impl("nvfp4_linear", TORCH_BOX(&nvfp4_linear));
  library.impl("nvfp4_packed_linear", TORCH_BOX(&nvfp4_packed_linear));
  library.impl("nvfp4_pack", TORCH_BOX(&nvfp4_pack));
  library.impl("nvfp4_unpack", TORCH_BOX(&nvfp4_unpack));
  library.impl("nvfp4_cpu_levels", TORCH_BOX(&nvfp4_cpu_levels));
  library.impl("nvfp4_use_cpu_level", TORCH_BOX(&nvfp4_use_cpu_level));
}

}  // namespace nibble::cpu
