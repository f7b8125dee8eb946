// The two loops of nvfp4_matmul.h, for the instructions of the file that includes this one. That file
// defines, in its unnamed namespace,
//
//   Vec                                       a vector type of gcc of kLanes floats
//   load(p), broadcast(x), fma(a, b, c), sum(v)
//   decode(codes, scales, Vec (&w)[kVectors]) one chunk, each element times its scale: exact, at most 6 bits
//
// where every function may use instructions that the rest of the library may not.

constexpr int kVectors = kChunk / kLanes;

inline int64_t chunks_of(const Nvfp4Weight& weight) { return (weight.columns + kChunk - 1) / kChunk; }

// What is left of a weight row after its whole chunks, with zeros behind it.
inline void decode_rest(const uint8_t* codes, const uint8_t* scales, int64_t columns, Vec (&w)[kVectors]) {
  uint8_t last_codes[kChunk / 2] = {}, last_scales[kChunk / 16] = {};
  for (int64_t i = 0; i < columns / 2; ++i) last_codes[i] = codes[i];
  for (int64_t i = 0; i < columns / 16; ++i) last_scales[i] = scales[i];
  decode(last_codes, last_scales, w);
}

// One weight row, chunk by chunk.
struct Row {
  const uint8_t* codes;
  const uint8_t* scales;

  Row(const Nvfp4Weight& weight, int64_t row)
      : codes(weight.codes + row * (weight.columns / 2)),
        scales(weight.scales + row * (weight.columns / 16)) {}

  void decode_whole(int64_t chunk, Vec (&w)[kVectors]) const {
    decode(codes + chunk * (kChunk / 2), scales + chunk * (kChunk / 16), w);
  }
  void decode_last(int64_t chunk, int64_t columns, Vec (&w)[kVectors]) const {
    decode_rest(codes + chunk * (kChunk / 2), scales + chunk * (kChunk / 16), columns, w);
  }
};

// Adds one decoded chunk times kCount activation rows, `stride` apart, to two partial sums each.
template <int kCount>
inline void add_chunk(const Vec (&w)[kVectors], const float* x, int64_t stride, Vec (&total)[kCount][2]) {
  for (int i = 0; i < kVectors; ++i)
    for (int m = 0; m < kCount; ++m)
      total[m][i % 2] = fma(load(x + m * stride + i * kLanes), w[i], total[m][i % 2]);
}

// kRows weight rows times kCount activation rows.
template <int kRows, int kCount>
inline void dot(const Nvfp4Weight& weight, int64_t first, const float* x, float* sums, int64_t stride) {
  const int64_t whole = weight.columns / kChunk, rest = weight.columns % kChunk;
  const int64_t x_stride = chunks_of(weight) * kChunk;
  Vec total[kRows][kCount][2] = {};
  Vec w[kVectors];
  for (int64_t chunk = 0; chunk < whole; ++chunk) {
    for (int r = 0; r < kRows; ++r) {
      Row(weight, first + r).decode_whole(chunk, w);
      add_chunk(w, x + chunk * kChunk, x_stride, total[r]);
    }
  }
  for (int r = 0; r < kRows && rest; ++r) {
    Row(weight, first + r).decode_last(whole, rest, w);
    add_chunk(w, x + whole * kChunk, x_stride, total[r]);
  }
  for (int r = 0; r < kRows; ++r)
    for (int m = 0; m < kCount; ++m) sums[r * stride + m] = sum(total[r][m][0] + total[r][m][1]);
}

template <int kRows, int kCount>
inline void dot_rows(const Nvfp4Weight& weight, int64_t begin, int64_t end, const float* x, float* sums,
                     int64_t stride) {
  int64_t row = begin;
  for (; row + kRows <= end; row += kRows)
    dot<kRows, kCount>(weight, row, x, sums + (row - begin) * stride, stride);
  for (; row < end; ++row) dot<1, kCount>(weight, row, x, sums + (row - begin) * stride, stride);
}

void few(const Nvfp4Weight& weight, int64_t begin, int64_t end, const float* x, int64_t count, float* sums,
         int64_t stride) {
  if (count == 1) return dot_rows<2, 1>(weight, begin, end, x, sums, stride);
  if (count == 2) return dot_rows<2, 2>(weight, begin, end, x, sums, stride);
  if (count == 3) return dot_rows<1, 3>(weight, begin, end, x, sums, stride);
  dot_rows<1, 4>(weight, begin, end, x, sums, stride);
}

constexpr int kGroupRows =
    6;  // weight rows whose sums stay in registers, two vectors of activation rows each
constexpr int64_t kDepth = 1024;  // columns decoded before they are used: with a panel they stay in the cache
constexpr int64_t kPanel = 2 * kLanes;

// kGroupRows decoded weight rows times one panel, added to sums [row][stride].
inline void multiply_group(const float* w, const float* x, int64_t depth, float* sums, int64_t stride) {
  Vec total[kGroupRows][2];
  for (int r = 0; r < kGroupRows; ++r)
    for (int v = 0; v < 2; ++v) total[r][v] = load(sums + r * stride + v * kLanes);
  for (int64_t k = 0; k < depth; ++k) {
    const Vec first = load(x + k * kPanel), second = load(x + k * kPanel + kLanes);
    for (int r = 0; r < kGroupRows; ++r) {
      const Vec one = broadcast(w[r * kDepth + k]);
      total[r][0] = fma(first, one, total[r][0]);
      total[r][1] = fma(second, one, total[r][1]);
    }
  }
  for (int r = 0; r < kGroupRows; ++r)
    for (int v = 0; v < 2; ++v) store(sums + r * stride + v * kLanes, total[r][v]);
}

// Chunks [first, first + count) of a weight row.
inline void decode_part(const Nvfp4Weight& weight, int64_t row, int64_t first, int64_t count, float* to) {
  for (int64_t chunk = first; chunk < first + count; ++chunk) {
    Vec w[kVectors];
    const int64_t columns = weight.columns - chunk * kChunk;
    if (columns >= kChunk) {
      Row(weight, row).decode_whole(chunk, w);
    } else {
      Row(weight, row).decode_last(chunk, columns, w);
    }
    for (int i = 0; i < kVectors; ++i) store(to + (chunk - first) * kChunk + i * kLanes, w[i]);
  }
}

void many(const Nvfp4Weight& weight, int64_t begin, int64_t end, const float* x, int64_t panels,
          float* sums) {
  alignas(64) thread_local float decoded[kWeightRows * kDepth];
  const int64_t chunks = chunks_of(weight), stride = panels * kPanel;
  const int64_t groups = (end - begin + kGroupRows - 1) / kGroupRows;
  for (int64_t i = 0; i < groups * kGroupRows * stride; ++i) sums[i] = 0.0f;
  for (int64_t first = 0; first < chunks; first += kDepth / kChunk) {
    const int64_t count = chunks - first < kDepth / kChunk ? chunks - first : kDepth / kChunk;
    for (int64_t row = begin; row < end; ++row)
      decode_part(weight, row, first, count, decoded + (row - begin) * kDepth);
    for (int64_t panel = 0; panel < panels; ++panel) {
      const float* from = x + (panel * chunks + first) * kChunk * kPanel;
      for (int64_t group = 0; group < groups; ++group)
        multiply_group(decoded + group * kGroupRows * kDepth, from, count * kChunk,
                       sums + group * kGroupRows * stride + panel * kPanel, stride);
    }
  }
}
