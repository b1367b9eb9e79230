#include "pool.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace inflight {

namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kSpin = std::chrono::microseconds(50);  // longer than the gap between two phases of a step

void pause() { __builtin_ia32_pause(); }

}  // namespace

Pool::Pool(int threads) {
  try {
    for (int thread = 1; thread < threads; thread++) workers_.emplace_back([this, thread] { work(thread); });
  } catch (...) {  // the system gives no more threads; a thread that is not joined would end the process
    close();
    throw;
  }
}

Pool::~Pool() { close(); }

void Pool::close() {
  closing_ = true;
  state_ += (uint64_t)1 << 2 * kBits;
  state_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void Pool::run(int tasks, Call call, void* context) {
  if (tasks <= 0) return;
  if (tasks == 1 || workers_.empty()) {
    for (int task = 0; task < tasks; task++) call(context, task, 0);
    return;
  }
  call_ = call;
  context_ = context;
  for (first_ = 0; first_ < tasks;) {
    const int some = std::min<int64_t>(tasks - first_, kMask);
    run_phase(some);
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
    first_ += some;
  }
}

void Pool::run_phase(int tasks) {
  ended_.store(0, std::memory_order_relaxed);
  const uint64_t phase = (state_.load(std::memory_order_relaxed) >> 2 * kBits) + 1;
  state_.store(phase << 2 * kBits | (uint64_t)tasks << kBits, std::memory_order_release);
  state_.notify_all();
  while (take(0)) {
  }
  for (int spins = 0; ended_.load(std::memory_order_acquire) < tasks; spins++) {
    pause();
    if (spins % 2048 == 2047) std::this_thread::yield();  // a thread that has a task may be waiting for this core
  }
}

// Takes a task and runs it; false: there is none.
bool Pool::take(int thread) {
  uint64_t state = state_.load(std::memory_order_acquire);
  do {
    if ((state & kMask) >= (state >> kBits & kMask)) return false;
  } while (!state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel));
  try {
    call_(context_, first_ + (int)(state & kMask), thread);
  } catch (...) {  // the caller waits for all, since tasks use its stack
    const std::lock_guard lock(failing_);
    if (!failure_) failure_ = std::current_exception();
  }
  ended_.fetch_add(1, std::memory_order_release);
  return true;
}

void Pool::work(int thread) {
  while (true) {
    // `seen` is read first: if the state changes after that, the wait below ends at once.
    const uint64_t seen = state_.load(std::memory_order_acquire);
    if (closing_.load(std::memory_order_acquire)) return;
    if (take(thread)) continue;
    const auto until = Clock::now() + kSpin;
    while (state_.load(std::memory_order_acquire) == seen) {
      for (int i = 0; i < 16; i++) pause();
      if (Clock::now() > until) {
        state_.wait(seen, std::memory_order_acquire);
        break;
      }
    }
  }
}

}  // namespace inflight
