// Lanes that take turns on one thread of the host. A lane runs until it waits for others.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

struct Index {
  uint32_t x;
};
inline Index threadIdx, blockIdx, blockDim, gridDim;

struct EmulatedBlock;
struct EmulatedCluster;
inline EmulatedBlock* emulated_block;
inline EmulatedCluster* emulated_cluster;

// Bulk copies are over a while after they begin, the latest first and some much later than others, and products
// when they are waited for; some warps pause. Or all goes on at once. A kernel must be right either way.
inline bool emulated_is_late;
inline std::vector<std::function<void()>> emulated_copies;

// Every seventh copy is over when many that began after it are used.
inline constexpr uint32_t kSlowCopy = 7, kSlowRounds = 1000;
struct SlowCopy {
  uint32_t round;
  std::function<void()> end;
};
inline uint32_t emulated_round, emulated_copies_begun;
inline std::deque<SlowCopy> emulated_slow_copies;

inline void end_later(std::function<void()> copy) {
  if (++emulated_copies_begun % kSlowCopy == 0) {
    emulated_slow_copies.push_back({emulated_round + kSlowRounds, std::move(copy)});
  } else {
    emulated_copies.push_back(std::move(copy));
  }
}

// The kernel before this one, which ends with f().
inline bool emulated_previous_kernel_runs;
inline void run_previous_kernel(std::function<void()> f) {
  if (!emulated_is_late) return f();
  emulated_previous_kernel_runs = true;
  emulated_slow_copies.push_back({emulated_round + kSlowRounds, [f = std::move(f)] {
                                    f();
                                    emulated_previous_kernel_runs = false;
                                  }});
}

class EmulatedLanes {
 public:
  void add(Index thread, Index block, EmulatedBlock* of_block, EmulatedCluster* of_cluster,
           std::function<void()> f) {
    lanes_.push_back(std::make_unique<Lane>(Lane{thread, block, of_block, of_cluster, std::move(f)}));
  }

  // All lanes from beginning to end, the last one first where copies are late.
  void run() {
    EmulatedLanes* const outer = std::exchange(running_, this);
    for (auto& lane : lanes_) {
      getcontext(&lane->context);
      lane->stack = std::make_unique<char[]>(kStackBytes);
      lane->context.uc_stack.ss_sp = lane->stack.get();
      lane->context.uc_stack.ss_size = kStackBytes;
      lane->context.uc_link = &main_;
      makecontext(&lane->context, [] { running_->begin(); }, 0);
    }
    uint32_t& round = emulated_round;
    for (size_t left = lanes_.size(); left != 0; ++round) {
      bool is_stuck = emulated_slow_copies.empty();
      if (!is_stuck && emulated_slow_copies.front().round <= round) {
        emulated_slow_copies.front().end();
        emulated_slow_copies.pop_front();
      }
      if (!emulated_copies.empty()) {
        is_stuck = false;
        const std::function<void()> copy = std::move(emulated_copies.back());
        emulated_copies.pop_back();
        copy();
      }
      for (size_t i = 0; i < lanes_.size(); ++i) {
        const size_t number = emulated_is_late ? lanes_.size() - 1 - i : i;
        Lane& lane = *lanes_[number];
        if (lane.is_over || (lane.is_ready && !lane.is_ready())) continue;
        is_stuck = false;
        if (emulated_is_late && pauses(number / 32, round)) continue;
        lane.is_ready = nullptr;
        current_ = &lane;
        threadIdx = lane.thread;
        blockIdx = lane.block;
        emulated_block = lane.of_block;
        emulated_cluster = lane.of_cluster;
        swapcontext(&main_, &lane.context);
        left -= lane.is_over;
      }
      if (is_stuck) {
        std::fprintf(stderr, "%zu lanes wait for each other\n", left);
        std::abort();
      }
    }
    running_ = outer;
  }

  template <class F>
  static void wait_until(F&& is_over) {
    if (is_over()) return;
    Lane& own = *running_->current_;
    own.is_ready = [&is_over] { return is_over(); };
    swapcontext(&own.context, &running_->main_);
  }

 private:
  static constexpr size_t kStackBytes = 64 * 1024;
  struct Lane {
    Index thread, block;
    EmulatedBlock* of_block;
    EmulatedCluster* of_cluster;
    std::function<void()> f;
    std::function<bool()> is_ready = nullptr;
    bool is_over = false;
    std::unique_ptr<char[]> stack = nullptr;
    ucontext_t context = {};
  };

  // Of 64 rounds, a warp pauses in all or in none.
  static bool pauses(size_t warp, uint32_t round) {
    return (warp * 40503u + round / 64 * 2654435761u) >> 15 & 1;
  }

  void begin() {
    Lane& own = *current_;
    own.f();
    own.is_over = true;
  }

  std::vector<std::unique_ptr<Lane>> lanes_;
  Lane* current_ = nullptr;
  ucontext_t main_ = {};
  static inline EmulatedLanes* running_;
};

class EmulatedBarrier {
 public:
  explicit EmulatedBarrier(uint32_t size) : size_(size) {}
  void arrive_and_wait() { wait(arrive()); }
  // The phase to wait for.
  uint32_t arrive() {
    const uint32_t now = phase_;
    if (++arrived_ == size_) {
      arrived_ = 0;
      ++phase_;
    }
    return now;
  }
  void wait(uint32_t phase) {
    EmulatedLanes::wait_until([&] { return phase_ != phase; });
  }

 private:
  uint32_t size_, arrived_ = 0, phase_ = 0;
};
