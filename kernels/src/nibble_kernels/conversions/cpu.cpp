// nibble::e2m1_encode, e2m1_decode, e4m3_encode and e4m3_decode on the CPU.
#include "nibble/cpu.h"

namespace nibble::cpu {
namespace {

constexpr int64_t kChunk = 4096;

NIBBLE_CPU_LEVELS void e2m1_encode_chunk(const float* x, int64_t pairs, uint8_t* packed) {
  for (int64_t i = 0; i < pairs; ++i) {
    packed[i] = static_cast<uint8_t>(e2m1_encode(x[2 * i]) | e2m1_encode(x[2 * i + 1]) << 4);
  }
}

NIBBLE_CPU_LEVELS void e2m1_decode_chunk(const uint8_t* packed, int64_t pairs, float* x) {
  for (int64_t i = 0; i < pairs; ++i) {
    x[2 * i] = e2m1_decode(packed[i] & 15);
    x[2 * i + 1] = e2m1_decode(packed[i] >> 4);
  }
}

NIBBLE_CPU_LEVELS void e4m3_encode_chunk(const float* x, int64_t count, uint8_t* codes) {
  for (int64_t i = 0; i < count; ++i) codes[i] = static_cast<uint8_t>(e4m3_encode(x[i]));
}

NIBBLE_CPU_LEVELS void e4m3_decode_chunk(const uint8_t* codes, int64_t count, float* x) {
  for (int64_t i = 0; i < count; ++i) x[i] = e4m3_decode(codes[i]);
}

template <class F>
void for_chunks(int64_t count, const F& f) {
  torch::stable::parallel_for(0, (count + kChunk - 1) / kChunk, 4, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk)
      f(chunk * kChunk, std::min(kChunk, count - chunk * kChunk));
  });
}

// Calls f(floats, offset, count) for chunks of x.
template <class F>
void for_float_chunks(const Tensor& x, const F& f) {
  for_float_type<true>(x.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    const T* from = static_cast<const T*>(x.const_data_ptr());
    for_chunks(x.numel(), [&](int64_t offset, int64_t count) {
      float floats[kChunk];
      load(from + offset, count, floats);
      f(floats, offset, count);
    });
  });
}

Tensor encode_e2m1(const Tensor& input) {
  const Tensor x = torch::stable::contiguous(input);
  const int64_t columns = x.size(x.dim() - 1);
  require(columns % 2 == 0, "two E2M1 codes share a byte, found rows of ", columns);
  Tensor packed = torch::stable::new_empty(x, with_last(x, columns / 2), ScalarType::Byte);
  uint8_t* to = static_cast<uint8_t*>(packed.mutable_data_ptr());
  for_float_chunks(x, [&](const float* floats, int64_t offset, int64_t count) {
    e2m1_encode_chunk(floats, count / 2, to + offset / 2);
  });
  return packed;
}

Tensor decode_e2m1(const Tensor& input) {
  const Tensor packed = torch::stable::contiguous(input);
  Tensor x = torch::stable::new_empty(packed, with_last(packed, packed.size(packed.dim() - 1) * 2),
                                      ScalarType::Float);
  const uint8_t* from = static_cast<const uint8_t*>(packed.const_data_ptr());
  float* to = static_cast<float*>(x.mutable_data_ptr());
  for_chunks(packed.numel(), [&](int64_t offset, int64_t count) {
    e2m1_decode_chunk(from + offset, count, to + 2 * offset);
  });
  return x;
}

Tensor encode_e4m3(const Tensor& input) {
  const Tensor x = torch::stable::contiguous(input);
  Tensor codes = torch::stable::new_empty(x, x.sizes(), ScalarType::Float8_e4m3fn);
  uint8_t* to = static_cast<uint8_t*>(codes.mutable_data_ptr());
  for_float_chunks(x, [&](const float* floats, int64_t offset, int64_t count) {
    e4m3_encode_chunk(floats, count, to + offset);
  });
  return codes;
}

Tensor decode_e4m3(const Tensor& input) {
  const Tensor codes = torch::stable::contiguous(input);
  Tensor x = torch::stable::new_empty(codes, codes.sizes(), ScalarType::Float);
  const uint8_t* from = static_cast<const uint8_t*>(codes.const_data_ptr());
  float* to = static_cast<float*>(x.mutable_data_ptr());
  for_chunks(codes.numel(),
             [&](int64_t offset, int64_t count) { e4m3_decode_chunk(from + offset, count, to + offset); });
  return x;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(nibble, CPU, library) {
  library.impl("e2m1_encode", TORCH_BOX(&encode_e2m1));
  library.impl("e2m1_decode", TORCH_BOX(&decode_e2m1));
  library.impl("e4m3_encode", TORCH_BOX(&encode_e4m3));
  library.impl("e4m3_decode", TORCH_BOX(&decode_e4m3));
}

}  // namespace nibble::cpu
