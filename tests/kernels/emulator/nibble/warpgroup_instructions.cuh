// Instructions of SM90 on a host, in place of kernels/src/nibble_kernels/include/nibble/warpgroup_instructions.cuh.
#pragma once

#include <cstring>

#include "nibble/tensor_core.cuh"

#define NIBBLE_HAS_WARPGROUP_PRODUCTS 1

// A matrix of words, and how many of its rows and columns a box has. Or pages of heads of tokens of chunks of 128
// bytes, of which a box has box_tokens tokens with all of their chunks.
struct CUtensorMap {
  const uint32_t* words;
  uint32_t columns, rows, box_columns, box_rows, box_chunks = 1;
  const uint8_t* bytes = nullptr;
  uint32_t tokens = 0, chunks = 0, heads = 0, pages = 0, box_tokens = 0;
  int64_t token_stride = 0, head_stride = 0, page_stride = 0;
};

namespace nibble::instruction {

inline uint32_t offset_of(SharedPlace place) {
  auto& own = emulated_cluster->memory[emulated_block->rank];
  const uint32_t offset = static_cast<uint32_t>(place - reinterpret_cast<uint8_t*>(own.data()));
  if (offset < own.size() * sizeof(uint4)) return offset;
  std::fprintf(stderr, "%u is not in the block's shared memory\n", offset);
  std::abort();
}
inline SharedPlace place_at_rank(SharedPlace place, uint32_t rank) {
  emulated_cluster->require_running(rank);
  return reinterpret_cast<uint8_t*>(emulated_cluster->memory[rank].data()) + offset_of(place);
}

struct Barrier {
  uint16_t arrivals, missing;
  int32_t bytes : 31;  // still expected; negative where they came before they were expected
  uint32_t parity : 1;

  static Barrier& at(SharedPlace place) { return *reinterpret_cast<Barrier*>(place); }
  void end_phase_if_over() {
    if (missing != 0 || bytes != 0) return;
    missing = arrivals;
    parity ^= 1;
  }
  void arrive() {
    if (missing == 0) {
      std::fprintf(stderr, "too many arrivals at a barrier\n");
      std::abort();
    }
    --missing;
    end_phase_if_over();
  }
};
static_assert(sizeof(Barrier) == 8);

inline void init_barrier(SharedPlace barrier, uint32_t arrivals) {
  const uint16_t count = static_cast<uint16_t>(arrivals);
  Barrier::at(barrier) = {count, count, 0, 0};
}
inline void publish_barriers() {}
inline void publish_to_products() {}
inline void arrive_expecting(SharedPlace barrier, uint32_t bytes) {
  Barrier& at = Barrier::at(barrier);
  at.bytes += static_cast<int32_t>(bytes);
  at.arrive();
}
inline void arrive(SharedPlace barrier) { Barrier::at(barrier).arrive(); }
inline void arrive_at_rank(SharedPlace barrier, uint32_t rank) { arrive(place_at_rank(barrier, rank)); }
inline void arrive_at_rank_after_reads(SharedPlace barrier, uint32_t rank) { arrive_at_rank(barrier, rank); }
template <bool Of_cluster = false>
void wait_for_phase(SharedPlace barrier, uint32_t parity) {
  EmulatedLanes::wait_until([&] { return Barrier::at(barrier).parity != parity; });
}

// f() and then the arrival of its bytes, now or later.
template <class F>
void begin_copy(SharedPlace barrier, uint32_t bytes, F&& f) {
  std::function<void()> copy = [=] {
    f();
    Barrier& at = Barrier::at(barrier);
    at.bytes -= static_cast<int32_t>(bytes);
    at.end_phase_if_over();
  };
  if (emulated_is_late) {
    end_later(std::move(copy));
  } else {
    copy();
  }
}
inline void copy_bulk(SharedPlace to, const void* from, uint32_t bytes, SharedPlace barrier) {
  if (bytes % 16 != 0 || offset_of(to) % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0) {
    std::fprintf(stderr, "a bulk copy is not of 16 bytes\n");
    std::abort();
  }
  begin_copy(barrier, bytes, [=] { std::memcpy(to, from, bytes); });
}
inline void copy_box(SharedPlace to, const CUtensorMap& map, uint32_t x, uint32_t y, SharedPlace barrier) {
  begin_copy(barrier, map.box_columns * map.box_rows * 4, [=, map = map] {
    uint32_t* word = reinterpret_cast<uint32_t*>(to);
    for (uint32_t row = y; row < y + map.box_rows; ++row) {
      for (uint32_t column = x; column < x + map.box_columns; ++column) {
        const bool is_there = row < map.rows && column < map.columns;
        *word++ = is_there ? map.words[size_t{row} * map.columns + column] : 0;
      }
    }
  });
}
// Of a matrix of rows of `columns` words, chunks of box_columns: y counts chunks, box_chunks are fetched.
inline void copy_box(SharedPlace to, const CUtensorMap& map, uint32_t x, uint32_t y, uint32_t z,
                     SharedPlace barrier) {
  const uint32_t words = map.box_columns * map.box_chunks * map.box_rows;
  begin_copy(barrier, words * 4, [=, map = map] {
    uint32_t* word = reinterpret_cast<uint32_t*>(to);
    for (uint32_t row = z; row < z + map.box_rows; ++row) {
      for (uint32_t column = 0; column < map.box_columns * map.box_chunks; ++column) {
        const uint32_t at = x + y * map.box_columns + column;
        const bool is_there = row < map.rows && at < map.columns;
        *word++ = is_there ? map.words[size_t{row} * map.columns + at] : 0;
      }
    }
  });
}
// Units of 16 bytes are swapped as CU_TENSOR_MAP_SWIZZLE_128B does it, by bits of their place.
inline void copy_tokens(SharedPlace to, const CUtensorMap& map, uint32_t token, uint32_t head, uint32_t page,
                        SharedPlace barrier) {
  if (token + map.box_tokens > map.tokens || head >= map.heads || page >= map.pages || offset_of(to) % 1024) {
    std::fprintf(stderr, "no box of token %u of head %u of page %u\n", token, head, page);
    std::abort();
  }
  const uint32_t bytes = map.box_tokens * 128 * map.chunks;
  begin_copy(barrier, bytes, [=, map = map] {
    const uint8_t* const first = map.bytes + page * map.page_stride + head * map.head_stride;
    for (uint32_t place = 0; place < bytes; place += 16) {
      const uint32_t row = token + place / 128 % map.box_tokens, chunk = place / (128 * map.box_tokens);
      const uint8_t* const from = first + row * map.token_stride + chunk * 128 + place % 128;
      std::memcpy(to + (place ^ (place >> 7 & 7) << 4), from, 16);
    }
  });
}
inline void prefetch_map(const CUtensorMap&) {}

inline void store_at_rank(SharedPlace to, uint32_t rank, const float4& value, SharedPlace barrier) {
  begin_copy(place_at_rank(barrier, rank), sizeof value,
             [=, place = place_at_rank(to, rank)] { *reinterpret_cast<float4*>(place) = value; });
}
inline void send_to_rank(SharedPlace to, uint32_t rank, SharedPlace barrier, const float4& value) {
  begin_copy(place_at_rank(barrier, rank), sizeof(value),
             [to = place_at_rank(to, rank), rank, cluster = emulated_cluster, value] {
               cluster->require_running(rank);
               std::memcpy(to, &value, sizeof(value));
             });
}
inline void store_shared(SharedPlace to, const uint4& value) { *reinterpret_cast<uint4*>(to) = value; }
inline float4 load_shared_floats(SharedPlace place) { return *reinterpret_cast<const float4*>(place); }
inline void store_release(uint32_t* flag, uint32_t value) { *flag = value; }
inline uint32_t load_acquire(const uint32_t* flag) {
  EmulatedLanes::wait_until([&] { return *flag != 0; });  // whoever looks waits for it
  return *flag;
}

inline void add_release(uint32_t* counter) { ++*counter; }
inline bool has_reached(const uint32_t* counter, uint32_t count) { return *counter >= count; }
inline void wait_until_reached(const uint32_t* counter, uint32_t count) {
  EmulatedLanes::wait_until([&] { return *counter >= count; });
}
inline void publish_to_copies() {}
inline void store_shared_word(SharedPlace to, uint32_t value) { std::memcpy(to, &value, 4); }

template <uint32_t Registers>
void take_registers() {}
template <uint32_t Registers>
void give_registers() {}

inline uint64_t operand_in_shared(SharedPlace place, uint32_t next_rows, uint32_t next_columns) {
  if (offset_of(place) % 16 != 0 || next_rows % 16 != 0 || next_columns % 16 != 0) std::abort();
  return uint64_t{offset_of(place) >> 4} | uint64_t{next_rows >> 4} << 16 | uint64_t{next_columns >> 4} << 32;
}

// Products of a lane's rows r and r + 8 of its warp's 16. They read a and b when they run.
template <bool Bfloat, uint32_t Columns>
void run_product(float* sum, const std::array<const uint32_t*, 4>& a, uint64_t b, const uint8_t* shared) {
  const auto value = [](uint32_t pair, int i) { return Bfloat ? bfloat_of(pair, i) : half_of(pair, i); };
  const uint32_t begin = (b & 0x3fff) << 4, next_rows = (b >> 16 & 0x3fff) << 4,
                 next_columns = (b >> 32 & 0x3fff) << 4;
  double left[2][16];
  for (uint32_t k = 0; k < 16; ++k) {
    for (uint32_t i = 0; i < 2; ++i) left[i][k] = value(a[k % 8 / 2][k / 8 * 2 + i], k % 2);
  }
  for (uint32_t i = 0; i < Columns / 2; ++i) {
    const uint32_t column = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
    double total = sum[i];
    for (uint32_t k = 0; k < 16; k += 2) {
      const uint32_t place = begin + k / 8 * next_rows + column / 8 * next_columns + column % 8 * 16 + k % 8 * 2;
      uint32_t pair;
      std::memcpy(&pair, shared + place, 4);
      total += left[i % 4 / 2][k] * value(pair, 0) + left[i % 4 / 2][k + 1] * value(pair, 1);
    }
    sum[i] = static_cast<float>(total);
  }
}

// The same with a in shared memory, rows or columns of 64 elements whose units of 16 bytes are swapped.
template <bool Is_transposed, uint32_t Columns>
void run_shared_product(float* sum, uint64_t a, uint64_t b, const uint8_t* shared) {
  const uint32_t begin = (a & 0x3fff) << 4, next_eight = (a >> 32 & 0x3fff) << 4, warp = threadIdx.x / 32 % 4;
  const auto element = [&](uint32_t row, uint32_t k) {
    const uint32_t outer = Is_transposed ? k : row, inner = Is_transposed ? row : k;
    const uint32_t place = begin + outer / 8 * next_eight + outer % 8 * 128 + inner * 2;
    uint16_t bits;
    std::memcpy(&bits, shared + (place ^ (place >> 7 & 7) << 4), 2);
    return uint32_t{bits};
  };
  uint32_t of_rows[16][4];
  for (uint32_t c = 0; c < 4; ++c) {
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t row = warp * 16 + threadIdx.x % 32 / 4 + i % 2 * 8, k = 2 * c + i / 2 * 8;
      of_rows[c][i] = element(row, k) | element(row, k + 1) << 16;
    }
  }
  run_product<true, Columns>(sum, {of_rows[0], of_rows[1], of_rows[2], of_rows[3]}, b, shared);
}

// The oldest groups, until `pending` are left.
inline void run_products(uint32_t pending) {
  auto& groups = emulated_lane(threadIdx.x % 32).products;
  meet_warp();
  const size_t count = groups.size() - std::min<size_t>(pending, groups.size());
  for (size_t group = 0; group < count; ++group) {
    for (const EmulatedBlock::Product& product : groups[group]) product.run(group);
  }
  meet_warp();
  groups.erase(groups.begin(), groups.begin() + count);
  meet_warp();
}
inline void begin_products() { emulated_lane(threadIdx.x % 32).products.emplace_back(); }
inline void end_products() {
  if (!emulated_is_late) run_products(0);
}
template <uint32_t Pending>
void wait_for_products() {
  run_products(Pending);
}

template <bool Bfloat, uint32_t Columns>
void multiply_warpgroup(float (&sum)[Columns / 2], const uint32_t (&a)[4], uint64_t b) {
  auto& products = emulated_lane(threadIdx.x % 32).products.back();
  const size_t number = products.size();
  const uint8_t* const shared =
      reinterpret_cast<const uint8_t*>(emulated_cluster->memory[emulated_block->rank].data());
  products.push_back({[=, sum = &sum[0]](size_t group) {
                        std::array<const uint32_t*, 4> of_row;
                        for (uint32_t i = 0; i < 4; ++i)
                          of_row[i] = emulated_lane(threadIdx.x % 32 / 4 * 4 + i).products[group][number].a;
                        run_product<Bfloat, Columns>(sum, of_row, b, shared);
                      },
                      a});
}

inline uint64_t swapped_operand(SharedPlace place, uint32_t next_eight) {
  if (offset_of(place) % 16 != 0 || next_eight % 1024 != 0) std::abort();
  return uint64_t{offset_of(place) >> 4} | uint64_t{next_eight >> 4} << 32;
}

inline uint64_t moved(uint64_t operand, uint32_t bytes) {
  if (bytes % 16 != 0) std::abort();
  return operand + (bytes >> 4);
}

template <bool Is_transposed, uint32_t Columns>
void multiply_shared(float (&sum)[Columns / 2], uint64_t a, uint64_t b, bool adds) {
  const uint8_t* const shared =
      reinterpret_cast<const uint8_t*>(emulated_cluster->memory[emulated_block->rank].data());
  emulated_lane(threadIdx.x % 32)
      .products.back()
      .push_back({[=, sum = &sum[0]](size_t) {
                    if (!adds) std::fill_n(sum, Columns / 2, 0.0f);
                    run_shared_product<Is_transposed, Columns>(sum, a, b, shared);
                  },
                  nullptr});
}

template <uint32_t Count>
void keep(const uint32_t (&)[Count][4]) {}

inline void meet_warpgroup(uint32_t number) { emulated_block->warpgroups[number].arrive_and_wait(); }
inline bool any_of_warpgroup(uint32_t number, bool is_so) {
  emulated_lane(threadIdx.x % 32).shuffled = is_so;
  meet_warpgroup(number);
  bool any = false;
  for (uint32_t i = 0; i < 128; ++i) any |= emulated_block->lanes[number * 128 + i].shuffled != 0;
  meet_warpgroup(number);
  return any;
}

template <size_t Count>
void store_transposed(SharedPlace place, const uint32_t (&matrices)[Count]) {
  const uint32_t own = threadIdx.x % 32;
  std::ranges::copy(matrices, emulated_lane(own).a);
  meet_warp();
  for (uint32_t row = 0; own / 8 < Count && row < 8; ++row) {
    const uint32_t pair = emulated_lane(row * 4 + own % 8 / 2).a[own / 8];
    const uint16_t bits = static_cast<uint16_t>(pair >> own % 2 * 16);
    std::memcpy(place + row * 2, &bits, 2);
  }
  meet_warp();
}

}  // namespace nibble::instruction
