// share_out.h's threads.
#include <unistd.h>

#include <chrono>
#include <mutex>
#include <thread>

#include "nibble/share_out.h"

namespace nibble::cpu {
namespace {

// Longer than what lies between two products of a step, shorter than what lies between two steps.
constexpr auto kWatchTime = std::chrono::microseconds(100);

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Calls `done` until it is true, at most for `time`; returns whether it was.
template <class F>
bool watch(std::chrono::nanoseconds time, const F& done) {
  const auto until = std::chrono::steady_clock::now() + time;
  while (true) {
    for (int i = 0; i < 32; ++i) {
      if (done()) return true;
      pause();
    }
    if (std::chrono::steady_clock::now() >= until) return false;
  }
}

class Pool {
 public:
  explicit Pool(int64_t helpers) : helpers_(helpers) {
    for (int64_t i = 0; i < helpers; ++i) std::thread([this, i] { help(i); }).detach();
  }

  int64_t helpers() const { return helpers_; }

  // With the first `wanted` helpers.
  void run(int64_t wanted, const std::function<void()>& work) {
    wanted_.store(wanted);
    work_.store(&work);
    round_.fetch_add(1);
    if (sleeping_.load() > 0) round_.notify_all();
    work();
    work_.store(nullptr);
    // Those that have begun. One that has no processor just now gets this thread's.
    while (!watch(kWatchTime, [&] { return helping_.load() == 0; })) std::this_thread::yield();
  }

 private:
  void help(int64_t number) {
    uint32_t seen = 0;
    while (true) {
      const auto has_new = [&] { return round_.load(std::memory_order_acquire) != seen; };
      if (!watch(kWatchTime, has_new)) {
        sleeping_.fetch_add(1);
        round_.wait(seen);
        sleeping_.fetch_sub(1);
      }
      seen = round_.load(std::memory_order_acquire);
      // `run` takes the work back before it reads helping_, so it waits for whoever still finds the work.
      helping_.fetch_add(1);
      const auto* work = work_.load();
      if (work && number < wanted_.load()) (*work)();
      helping_.fetch_sub(1);
    }
  }

  const int64_t helpers_;
  alignas(64) std::atomic<const std::function<void()>*> work_{nullptr};
  std::atomic<int64_t> wanted_{0};  // of the work that is there
  alignas(64) std::atomic<uint32_t> round_{0};
  alignas(64) std::atomic<int64_t> helping_{0};
  std::atomic<int64_t> sleeping_{0};
};

std::atomic<Pool*> pool{nullptr};  // never deleted: its threads end with the process
pid_t owner = 0;
std::mutex mutex;

}  // namespace

bool Threads::exist() { return pool.load() != nullptr; }

void Threads::run(int64_t count, const std::function<void()>& work) {
  // Work of another thread at the same time is done there alone.
  const std::unique_lock lock(mutex, std::try_to_lock);
  if (!lock.owns_lock()) return work();
  // A process that was forked has none of the threads. Work of few pieces wants fewer than there are: another
  // pool for it would leave this one's threads behind.
  if (!pool || owner != getpid() || pool.load()->helpers() < count - 1) {
    pool = new Pool(std::max<int64_t>(count, torch::stable::get_num_threads()) - 1);
    owner = getpid();
  }
  pool.load()->run(count - 1, work);
}

}  // namespace nibble::cpu
