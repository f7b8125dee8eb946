// Work that threads take in pieces: a thread that is held up, by another program or by a slower core, takes
// fewer of them.
#pragma once

#include <atomic>
#include <functional>

#include "tensors.h"

namespace nibble::cpu {

// Threads of this library: they do not wait for one another at the end of some work, as OpenMP's do. Work ends
// when its last piece does, and a thread that got no processor in the meantime has no part in it. Idle threads
// watch for work for kWatchTime and then sleep.
class Threads {
 public:
  // Calls `work` on this thread and on up to `count` - 1 others, until it returns on this one and on those that
  // have begun it.
  static void run(int64_t count, const std::function<void()>& work);
  // Whether this process has any. Where torch's threads do the rest of a model's work, they would be in its way.
  static bool exist();
};

// While one exists, this thread shares out its work among Threads instead of torch's.
class WithThreads {
 public:
  WithThreads() : before_(active()) { active() = true; }
  ~WithThreads() { active() = before_; }
  WithThreads(const WithThreads&) = delete;
  static bool& active() {
    thread_local bool is_active = false;
    return is_active;
  }

 private:
  bool before_;
};

constexpr int64_t kMostThreads = 256;

// Pieces [0, count) in as many shares as there are threads.
class Shares {
 public:
  Shares(int64_t pieces, int64_t threads) : threads_(threads) {
    for (int64_t i = 0; i < threads; ++i) {
      shares_[i].next.store(pieces * i / threads, std::memory_order_relaxed);
      shares_[i].end = pieces * (i + 1) / threads;
    }
  }

  // Calls f for the pieces of a share in order, so that memory is read in sequence, and then for those that are
  // left of the others' shares.
  template <class F>
  void take(int64_t own, const F& f) {
    for (int64_t i = 0; i < threads_; ++i) {
      Share& share = shares_[(own + i) % threads_];
      // A share that is used up is only read: its owner may still be computing.
      while (share.next.load(std::memory_order_relaxed) < share.end) {
        const int64_t piece = share.next.fetch_add(1, std::memory_order_relaxed);
        if (piece < share.end) f(piece);
      }
    }
  }

 private:
  struct alignas(64) Share {
    std::atomic<int64_t> next;
    int64_t end;
  };
  int64_t threads_;
  Share shares_[kMostThreads];
};

// Calls f(piece) for each of `pieces`.
template <class F>
void share_out(int64_t pieces, const F& f) {
  const int64_t threads =
      std::min({static_cast<int64_t>(torch::stable::get_num_threads()), pieces, kMostThreads});
  if (threads <= 1) {
    for (int64_t piece = 0; piece < pieces; ++piece) f(piece);
    return;
  }
  Shares shares(pieces, threads);
  if (WithThreads::active()) {
    std::atomic<int64_t> joined{0};
    Threads::run(threads, [&] { shares.take(joined.fetch_add(1, std::memory_order_relaxed), f); });
    return;
  }
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t own = begin; own < end; ++own) shares.take(own, f);
  });
}

}  // namespace nibble::cpu
