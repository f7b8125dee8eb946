// Products with an NVFP4 weight and what follows the sums: what nvfp4_linear and decoder share.
#pragma once

#include "nvfp4_weight.h"
#include "share_out.h"

namespace nibble::cpu {

// What follows the sums, for each column of the result.
struct Epilogue {
  float alpha;
  const float* column_scale;  // may be null, as may bias
  const float* bias;

  Epilogue from(int64_t column) const {
    return {alpha, column_scale ? column_scale + column : nullptr, bias ? bias + column : nullptr};
  }
};

NIBBLE_FUNCTION void finish(float* sums, int64_t count, const Epilogue& epilogue) {
  for (int64_t i = 0; i < count; ++i) sums[i] *= epilogue.alpha;
  if (epilogue.column_scale)
    for (int64_t i = 0; i < count; ++i) sums[i] *= epilogue.column_scale[i];
  if (epilogue.bias)
    for (int64_t i = 0; i < count; ++i) sums[i] += epilogue.bias[i];
}

// Bytes of a weight that a thread takes at a time: short enough to share well, long enough to be fetched in
// sequence.
constexpr int64_t kPieceBytes = 64 << 10;

// Fewer rows would not be worth the decoding of a panel, which takes about as long as so many rows' products.
constexpr int64_t kPanelRows = 64, kRowsOfDecoding = 6;

// How many groups of rows have the panels of a weight, so that threads with the same number of pieces end soonest.
inline int64_t row_groups_of(int64_t panels, int64_t rows, int64_t threads) {
  const auto time = [&](int64_t groups) {
    return (panels * groups + threads - 1) / threads * ((rows + groups - 1) / groups + kRowsOfDecoding);
  };
  int64_t best = 1;
  for (int64_t groups = 2; groups <= rows / kPanelRows && groups <= 2 * threads; ++groups)
    if (time(groups) < time(best)) best = groups;
  return best;
}

// Calls f(first, count, rows) for tiles of a weight and rows of activations, shared out among threads: all rows and
// pieces of about kPieceBytes, or panels where there are many rows. Where threads would have different numbers of
// panels, rows are divided too.
template <class T, class F>
void for_pieces(int64_t tiles, int64_t blocks, const Activations<T>& activations, const F& f) {
  const int64_t threads = torch::stable::get_num_threads();
  const auto all = activations.all();
  if (activations.few()) {
    const int64_t of_size = kPieceBytes / (blocks * (kBlockCodeBytes + kLaneRows));
    const int64_t unit = std::max<int64_t>(1, std::min(of_size, tiles / (8 * threads)));
    return share_out((tiles + unit - 1) / unit,
                     [&](int64_t piece) { f(piece * unit, std::min(unit, tiles - piece * unit), all); });
  }
  const int64_t panels = (tiles + kPanelTiles - 1) / kPanelTiles;
  const int64_t wanted = row_groups_of(panels, all.count, threads);
  const int64_t rows = (all.count + wanted - 1) / wanted, groups = (all.count + rows - 1) / rows;
  share_out(panels * groups, [&](int64_t piece) {
    const int64_t tile = piece / groups * kPanelTiles, row = piece % groups * rows;
    f(tile, std::min(kPanelTiles, tiles - tile), {row, std::min(rows, all.count - row)});
  });
}

// Calls f(row) for every row, in pieces of about 16 K elements.
template <class F>
void share_out_rows(int64_t rows, int64_t columns, const F& f) {
  const int64_t unit = std::max<int64_t>(1, 16384 / columns);
  share_out((rows + unit - 1) / unit, [&](int64_t piece) {
    for (int64_t row = piece * unit; row < std::min(rows, (piece + 1) * unit); ++row) f(row);
  });
}

// Rows of x, about kManyRows at most, quantized where there is an input_scale_inv.
template <class T>
Activations<T> activations_of(const T* from, int64_t rows, int64_t columns, const float* input_scale_inv) {
  Activations<T> activations(rows, columns, input_scale_inv != nullptr);
  if (activations.borrow(from)) return activations;
  activations.allocate();
  share_out_rows(rows, columns, [&](int64_t row) {
    thread_local std::vector<float> floats;
    floats.resize(columns);
    load(from + row * columns, columns, floats.data());
    activations.set_row(row, floats.data(), input_scale_inv ? *input_scale_inv : 0.0f);
  });
  return activations;
}

// Calls f(row, count) for rows of x that are multiplied at once. The last ones do not come to few: a row's
// result does not depend on its place.
template <class F>
void for_row_groups(int64_t rows, const F& f) {
  for (int64_t row = 0; row < rows;) {
    const int64_t left = rows - row, count = left <= kManyRows + kFewRows ? left : kManyRows;
    f(row, count);
    row += count;
  }
}

// Sums of one piece of a weight for some rows, in memory of the thread.
template <class Tag, class T>
float* sums_of(const Activations<T>& activations, const Nvfp4Weight& weight, int64_t first, int64_t count,
               typename Activations<T>::Range rows) {
  const int64_t stride = count * kLaneRows;
  float* sums = static_cast<float*>(scratch<Tag>(activations.sum_rows(rows.count) * stride * sizeof(float)));
  activations.multiply(PackedTiles(weight, first, count), rows, sums, stride);
  return sums;
}

}  // namespace nibble::cpu
