// NVFP4 weights and activations as tensors, and the sharing out of a weight's rows: for the operators of the
// CPU.
#pragma once

#include <limits>
#include <optional>

#include "cpu.h"
#include "nvfp4_matmul.h"
#include "word_rows.h"

namespace nibble::cpu {

// One row as nvfp4_quant makes it, as QuantizedRows has it.
void quantize_row(const float* x, int64_t columns, float global_scale_inv, int8_t* values, float* scales,
                  int32_t* offsets, ScaledOffset* scaled_offsets);

// Memory of a thread, aligned to 64 bytes; what was in it is gone.
template <class Tag>
void* scratch(size_t bytes) {
  thread_local std::vector<char> memory;
  if (memory.size() < bytes + 64) memory.resize(bytes + 64);
  return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
}

// A weight of `rows` rows in either layout: packed, or as checkpoints store it and packed again each time.
struct Nvfp4Weight {
  const uint8_t* codes;
  const uint8_t* scales;
  int64_t rows;
  int64_t columns;
  bool packed;

  int64_t blocks() const { return columns / kBlockColumns; }
  int64_t tiles() const { return (rows + kLaneRows - 1) / kLaneRows; }
};

// Some tiles of a weight, packed, until the thread makes others.
class PackedTiles {
 public:
  PackedTiles(const Nvfp4Weight& weight, int64_t first, int64_t count) : count_(count) {
    if (weight.packed) {
      tiles_ = Tiles{weight.codes, weight.scales, weight.blocks()}.from(first);
      return;
    }
    struct Codes;
    struct Scales;
    auto* codes = static_cast<uint8_t*>(scratch<Codes>(count * weight.blocks() * kBlockCodeBytes));
    auto* scales = static_cast<uint8_t*>(scratch<Scales>(count * weight.blocks() * kLaneRows));
    tiles_ = {codes, scales, weight.blocks()};
    nan_rows_.resize(count);
    const StoredWeight stored{weight.codes, weight.scales, weight.rows, weight.columns};
    for (int64_t i = 0; i < count; ++i)
      nan_rows_[i] = pack_tile(stored, (first + i) * kLaneRows, codes + i * weight.blocks() * kBlockCodeBytes,
                               scales + i * weight.blocks() * kLaneRows);
  }

  const Tiles& tiles() const { return tiles_; }
  int64_t count() const { return count_; }

  // NaN in the sums of weight rows that have a scale of NaN.
  void mark(float* sums, int64_t rows, int64_t stride) const {
    for (size_t tile = 0; tile < nan_rows_.size(); ++tile) {
      for (int64_t lane = 0; nan_rows_[tile] >> lane; ++lane) {
        if (!(nan_rows_[tile] >> lane & 1)) continue;
        for (int64_t row = 0; row < rows; ++row)
          sums[row * stride + tile * kLaneRows + lane] = std::numeric_limits<float>::quiet_NaN();
      }
    }
  }

 private:
  Tiles tiles_;
  int64_t count_;
  std::vector<uint32_t> nan_rows_;
};

// How many BF16 numbers add up to any number of a type, exactly.
template <class T>
constexpr int64_t kBfloat16Parts = std::is_same_v<T, float> ? 3 : std::is_same_v<T, torch::headeronly::Half> ? 2 : 1;

// Rows of activations of type T, quantized or as they are, in the form that the level multiplies.
template <class T>
class Activations {
 public:
  Activations(int64_t rows, int64_t columns, bool quantized)
      : level_(matmul_level()),
        rows_(rows),
        columns_(columns),
        quantized_(quantized),
        parts_(!quantized && is_bfloat16() ? kBfloat16Parts<T> : 1) {}

  bool few() const { return rows_ <= kFewRows; }
  // Rows of the sums that `multiply` needs memory for.
  int64_t sum_rows(int64_t rows) const { return rows * parts_; }
  int64_t sum_rows() const { return sum_rows(rows_); }

  // Uses x itself, if it can: set_row is not needed then.
  bool borrow(const T* x) {
    if (quantized_ || !is_bfloat16() || !std::is_same_v<T, torch::headeronly::BFloat16>) return false;
    values_ = x;
    return true;
  }

  void allocate() {
    if (quantized_) {
      bytes_.resize(rows_ * columns_);
      scales_.resize(rows_ * columns_ / kBlockColumns);
      offsets_.resize(scales_.size());
      scaled_offsets_.resize(scales_.size());
    } else if (has_words()) {
      words_.allocate(rows_, columns_, level_.words->digits && rows_ == 1);
      not_finite_.resize(rows_);
    } else if (is_bfloat16()) {
      halves_.resize(rows_ * parts_ * columns_);
      values_ = halves_.data();
    } else {
      floats_.resize(rows_ * columns_);
      values_ = floats_.data();
    }
  }

  // Rows may be set by different threads. x is of type T, if not by its C++ type.
  void set_row(int64_t row, const float* x, float global_scale_inv) {
    const int64_t at = row * columns_, block = at / kBlockColumns;
    if (quantized_) {
      quantize_row(x, columns_, global_scale_inv, bytes_.data() + at, scales_.data() + block,
                   offsets_.data() + block, scaled_offsets_.data() + block);
    } else if (has_words()) {
      if (!words_.set(row, x))
        for (int64_t i = 0; i < columns_; ++i) not_finite_[row].push_back(x[i] * level_.floats->factor);
    } else if (is_bfloat16()) {
      for (int64_t part = 0; part < parts_; ++part)
        for (int64_t i = 0; i < columns_; ++i) halves_[(row * parts_ + part) * columns_ + i] = part_of(x[i], part);
    } else {
      for (int64_t i = 0; i < columns_; ++i) floats_[at + i] = x[i] * level_.floats->factor;
    }
  }

  // Some rows of x, more than kFewRows of them or all.
  struct Range {
    int64_t first, count;
  };
  Range all() const { return {0, rows_}; }

  // sums[row * stride + n] = Σ_k x[first + row][k] · weight[n][k] for the rows of the tiles. In float32, each sum in an
  // order that depends on the level and on whether there are more than kFewRows rows, and on nothing else;
  // for words only on the level, and for quantized activations on nothing at all.
  void multiply(const PackedTiles& tiles, Range rows, float* sums, int64_t stride) const {
    if (few()) {
      for (int64_t tile = 0; tile < tiles.count(); ++tile)
        multiply_few(tiles.tiles().from(tile), sums + tile * kLaneRows, stride);
    } else {
      multiply_many(tiles.tiles(), tiles.count(), rows, sums, stride);
    }
    add_parts(sums, rows.count, tiles.count() * kLaneRows, stride);
    multiply_not_finite(tiles, rows, sums, stride);
    tiles.mark(sums, rows.count, stride);
  }
  void multiply(const PackedTiles& tiles, float* sums, int64_t stride) const { multiply(tiles, all(), sums, stride); }

 private:
  bool is_bfloat16() const { return level_.floats->operand == Operand::kBfloat16; }

  // The upper half of a float32 and of what is left of it.
  static uint16_t part_of(float x, int64_t part) {
    uint32_t bits = std::bit_cast<uint32_t>(x);
    const bool is_finite = (bits & kFloatInfinity) != kFloatInfinity;
    if (!is_finite) return part ? 0 : static_cast<uint16_t>(bits >> 16 | ((bits & 0x7fffff) != 0));
    for (; part > 0; --part) {
      x -= std::bit_cast<float>(bits & 0xffff0000);
      bits = std::bit_cast<uint32_t>(x);
    }
    return static_cast<uint16_t>(bits >> 16);
  }

  QuantizedRows quantized_rows(int64_t row) const {
    const int64_t block = row * columns_ / kBlockColumns;
    return {bytes_.data() + row * columns_, scales_.data() + block, offsets_.data() + block,
            scaled_offsets_.data() + block};
  }

  const void* row_of(int64_t row) const {
    const int64_t bytes = is_bfloat16() ? 2 : 4;
    return static_cast<const char*>(values_) + row * columns_ * bytes;
  }

  // float32 would leave a rest of almost every value.
  bool has_words() const { return !quantized_ && level_.words && !std::is_same_v<T, float>; }

  void multiply_few(const Tiles& tile, float* sums, int64_t stride) const {
    const int64_t at_once = quantized_     ? level_.bytes->few_rows
                            : has_words() ? level_.words->few_rows
                                          : level_.floats->few_rows;
    for (int64_t row = 0; row < sum_rows(); row += at_once) {
      const int64_t count = std::min(at_once, sum_rows() - row);
      if (quantized_) {
        level_.bytes->few(tile, quantized_rows(row), count, sums + row * stride, stride);
      } else if (has_words()) {
        level_.words->few(tile, words_.from(row), count, sums + row * stride, stride);
      } else {
        level_.floats->few(tile, row_of(row), count, sums + row * stride, stride);
      }
    }
  }

  void multiply_many(const Tiles& tiles, int64_t count, Range rows, float* sums, int64_t stride) const {
    struct Panel;
    if (quantized_) {
      level_.bytes->many(tiles, count, quantized_rows(rows.first), rows.count, scratch<Panel>(level_.bytes->panel_bytes),
                         sums, stride);
    } else if (has_words()) {
      level_.words->many(tiles, count, words_.from(rows.first), rows.count, scratch<Panel>(level_.words->panel_bytes),
                         sums, stride);
    } else {
      level_.floats->many(tiles, count, row_of(rows.first * parts_), sum_rows(rows.count),
                          scratch<Panel>(level_.floats->panel_bytes), sums, stride);
    }
  }

  void multiply_not_finite(const PackedTiles& tiles, Range rows, float* sums, int64_t stride) const {
    if (not_finite_.empty()) return;
    for (int64_t row = 0; row < rows.count; ++row) {
      const auto& x = not_finite_[rows.first + row];
      if (x.empty()) continue;
      for (int64_t tile = 0; tile < tiles.count(); ++tile)
        level_.floats->few(tiles.tiles().from(tile), x.data(), 1, sums + row * stride + tile * kLaneRows, stride);
    }
  }

  void add_parts(float* sums, int64_t rows, int64_t columns, int64_t stride) const {
    for (int64_t row = 0; parts_ > 1 && row < rows; ++row) {
      const float* from = sums + row * parts_ * stride;
      for (int64_t i = 0; i < columns; ++i) {
        float sum = from[(parts_ - 1) * stride + i];
        for (int64_t part = parts_ - 2; part >= 0; --part) sum += from[part * stride + i];
        sums[row * stride + i] = sum;
      }
    }
  }

  const MatmulLevel& level_;
  int64_t rows_;
  int64_t columns_;
  bool quantized_;
  int64_t parts_;
  const void* values_ = nullptr;
  std::vector<uint16_t> halves_;
  std::vector<float> floats_, scales_;
  std::vector<int8_t> bytes_;
  std::vector<int32_t> offsets_;
  std::vector<ScaledOffset> scaled_offsets_;
  OwnedWordRows words_;
  std::vector<std::vector<float>> not_finite_;  // rows that words do not hold, for the loops of floats
};

// Tiles that a thread multiplies before it goes on with their sums.
constexpr int64_t kFewTiles = 32;

// Calls f(first, count) for tiles of a weight, shared out among torch's threads: up to `most` at a time, and
// whole panels of them where there are many rows.
template <class F>
void for_tiles(int64_t tiles, bool few, const F& f) {
  const int64_t unit = few ? 1 : kPanelTiles, most = few ? kFewTiles : kPanelTiles;
  torch::stable::parallel_for(0, (tiles + unit - 1) / unit, 1, [&](int64_t begin, int64_t end) {
    const int64_t last = std::min(end * unit, tiles);
    for (int64_t tile = begin * unit; tile < last; tile += most) f(tile, std::min(most, last - tile));
  });
}

// The tensors of a weight as checkpoints store it, of any number of dimensions.
inline Nvfp4Weight stored_weight(const Tensor& codes, const Tensor& scales, int64_t columns) {
  const int64_t rows = columns ? codes.numel() / (columns / 2) : 0;
  require(columns > 0 && columns % kBlock == 0, "NVFP4 has blocks of 16 columns, found rows of ", columns);
  require(codes.scalar_type() == ScalarType::Byte && scales.scalar_type() == ScalarType::Float8_e4m3fn,
          "a weight must be uint8 codes with float8_e4m3fn scales");
  require(codes.numel() == rows * (columns / 2) && scales.numel() == rows * (columns / kBlock),
          "the weight's codes and scales do not fit rows of ", columns);
  return {static_cast<const uint8_t*>(codes.const_data_ptr()),
          static_cast<const uint8_t*>(scales.const_data_ptr()), rows, columns, false};
}

// The tensors of packed weights of `rows` rows each, codes [..., tiles, blocks, 128] and scales
// [..., tiles, blocks, 16]: the first of them.
inline Nvfp4Weight packed_weight(const Tensor& codes, const Tensor& scales, int64_t rows, int64_t columns,
                                 int64_t count = 1) {
  const Nvfp4Weight weight{static_cast<const uint8_t*>(codes.const_data_ptr()),
                           static_cast<const uint8_t*>(scales.const_data_ptr()), rows, columns, true};
  require(columns > 0 && columns % kBlock == 0, "NVFP4 has blocks of 16 columns, found rows of ", columns);
  require(codes.scalar_type() == ScalarType::Byte && scales.scalar_type() == ScalarType::Float8_e4m3fn &&
              codes.is_contiguous() && scales.is_contiguous(),
          "a packed weight must be contiguous uint8 codes with float8_e4m3fn scales");
  require(codes.numel() == count * weight.tiles() * weight.blocks() * kBlockCodeBytes &&
              scales.numel() == count * weight.tiles() * weight.blocks() * kLaneRows,
          "the packed weight's codes and scales do not fit ", rows, " rows of ", columns);
  return weight;
}

}  // namespace nibble::cpu
