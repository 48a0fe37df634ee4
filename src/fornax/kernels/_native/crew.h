// Threads that share short loops, one after the other: what a step of an engine is made of.
//
// A token of a small model is a hundred products of some 50 microseconds each, and waking a sleeping
// thread takes 20. So the threads here watch for the next loop for a while before they sleep. They
// give their core away whenever another thread can run, and a second caller at the same time takes
// XLA's pool instead.

#ifndef FORNAX_KERNELS_CREW_H_
#define FORNAX_KERNELS_CREW_H_

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "simd.h"

namespace fornax {

inline void pause_a_little() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Crew {
 public:
  // One for the process, and never destroyed: its threads end with the process. (The linker of ELF
  // systems merges it between libraries that g++ has compiled; otherwise each library has one.)
  static Crew& only() {
    static Crew* crew = new Crew;
    return *crew;
  }

  // Runs work(0) .. work(count - 1) on up to `threads` threads, the caller's among them. Returns
  // false, having done nothing, while another caller is in here.
  template <typename Work>
  bool run(int64_t threads, int64_t count, bool linger, const Work& work) {
    std::unique_lock<std::mutex> lock(callers_, std::try_to_lock);
    if (!lock.owns_lock()) return false;
    hire(threads - 1);
    linger_ = linger;
    caller_core_ = this_core();
    body_ = [](const void* at, int64_t i) { (*static_cast<const Work*>(at))(i); };
    at_ = &work;
    count_ = count;
    next_ = 0;
    open_ = true;
    ++loops_;
    if (sleeping_ > 0) {
      std::lock_guard<std::mutex> guard(sleep_);
      for (std::thread& member : members_) keep_off(caller_core_, member.native_handle());
      wake_.notify_all();
    }
    share();
    open_ = false;
    finish();
    return true;
  }

 private:
  static constexpr int64_t kTurns = 2000;  // some 40 microseconds

#if defined(__linux__)
  static int this_core() { return sched_getcpu(); }

  // Schedulers may leave two threads on one core for many milliseconds while another idles. A member
  // may run anywhere but on the caller's core (-1: on that too); the cores are those the first caller
  // was allowed.
  void keep_off(int core, pthread_t member) const {
    cpu_set_t others = cores_;
    if (core >= 0) CPU_CLR(core, &others);
    if (CPU_COUNT(&others) > 0) pthread_setaffinity_np(member, sizeof others, &others);
  }

  static cpu_set_t allowed_cores() {
    cpu_set_t cores;
    if (sched_getaffinity(0, sizeof cores, &cores) != 0) CPU_ZERO(&cores);
    return cores;
  }

  int64_t cores() const { return CPU_COUNT(&cores_); }

  const cpu_set_t cores_ = allowed_cores();
#else
  static int this_core() { return -1; }
  static void keep_off(int, pthread_t) {}
  static int64_t cores() { return std::thread::hardware_concurrency(); }
#endif

  void hire(int64_t wanted) {
    wanted = std::min(wanted, cores() - 1);
    try {
      while (static_cast<int64_t>(members_.size()) < wanted) {
        members_.emplace_back([this] { watch(); });
      }
    } catch (const std::system_error&) {  // the system has no thread left: fewer will do
    }
  }

  void share() {
    for (int64_t i = next_++; i < count_; i = next_++) body_(at_, i);
  }

  // All indices are taken; whoever is still inside is at its last one, or has lost its core to another
  // thread in the middle of it. Then the caller sleeps, so that its own core is free for that member.
  void finish() {
    for (int64_t turn = 0; turn < kTurns; ++turn, pause_a_little()) {
      if (inside_ == 0) return;
    }
    for (std::thread& member : members_) keep_off(-1, member.native_handle());
    std::unique_lock<std::mutex> lock(sleep_);
    waiting_ = true;
    left_.wait(lock, [&] { return inside_ == 0; });
    waiting_ = false;
  }

  void leave() {
    if (--inside_ == 0 && waiting_) {
      std::lock_guard<std::mutex> guard(sleep_);
      left_.notify_all();
    }
  }

  // A member's life. `inside_` goes up before `open_` is read, and the caller closes before it reads
  // `inside_`: either the member sees the loop closed, or the caller sees the member.
  void watch() {
    for (uint64_t seen = 0;;) {
      await(seen);
      seen = loops_;
      ++inside_;
      if (open_) {
        if (caller_core_ >= 0 && this_core() == caller_core_) {
          keep_off(caller_core_, pthread_self());
        }
        share();
      }
      leave();
    }
  }

  // Returns when there has been a loop after the one that was seen.
  void await(uint64_t seen) {
    constexpr auto kLinger = std::chrono::microseconds(200);
    const auto start = std::chrono::steady_clock::now();
    for (int64_t turn = 0; loops_ == seen; ++turn) {
      if (linger_ && turn < kTurns) {
        pause_a_little();
      } else if (linger_ && std::chrono::steady_clock::now() - start < kLinger) {
        sched_yield();
      } else {
        ++sleeping_;
        {
          std::unique_lock<std::mutex> lock(sleep_);
          wake_.wait(lock, [&] { return loops_ != seen; });
        }
        --sleeping_;
      }
    }
  }

  std::mutex callers_;
  std::vector<std::thread> members_;
  // The loop at hand; written while it is closed.
  void (*body_)(const void*, int64_t) = nullptr;
  const void* at_ = nullptr;
  int64_t count_ = 0;
  int caller_core_ = -1;
  std::atomic<bool> linger_{false};
  std::atomic<bool> open_{false};
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int64_t> inside_{0};
  alignas(64) std::atomic<uint64_t> loops_{0};
  alignas(64) std::atomic<int64_t> sleeping_{0};
  std::mutex sleep_;
  std::condition_variable wake_;
  std::condition_variable left_;
  std::atomic<bool> waiting_{false};
};

constexpr int64_t kShort = 512;  // most rows of a loop after which the crew lingers

// `parallel_for` by the crew, over something that has so many rows. After loops over many rows it
// sleeps at once: waking is nothing beside those, and what XLA runs between them wants the cores.
template <typename Work>
void share_rows(ffi::ThreadPool& pool, int64_t rows, int64_t count, const Work& work) {
  const int64_t threads = std::min<int64_t>(pool.num_threads(), count);
  if (threads <= 1) {
    for (int64_t i = 0; i < count; ++i) work(i);
  } else if (!Crew::only().run(threads, count, rows <= kShort, work)) {
    parallel_for(pool, count, work);
  }
}

constexpr int64_t kAlone = 1 << 16;  // elements that are not worth a second thread

// work(first, last) over all of `rows`, by several threads where they have so many elements.
template <typename Work>
void share_evenly(ffi::ThreadPool& pool, int64_t rows, int64_t elements, const Work& work) {
  const int64_t most = elements <= kAlone ? 1 : 4 * pool.num_threads();
  const int64_t parts = std::clamp<int64_t>(most, 1, std::max<int64_t>(rows, 1));
  share_rows(pool, rows, parts, [&](int64_t part) {
    work(rows * part / parts, rows * (part + 1) / parts);
  });
}

}  // namespace fornax

#endif  // FORNAX_KERNELS_CREW_H_
