// A pool of threads that shares the tasks of a phase, one phase after the other.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace inflight {

// The caller is thread 0. A thread that finds no task spins for a while and then sleeps, so that others may have its
// core. A phase ends when its tasks have ended, whether or not all threads have woken: a core that something else takes
// delays one task at the most.
class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;

  int threads() const { return (int)workers_.size() + 1; }

  // Calls body(task, thread) for each task from 0 to `tasks`; returns when all have ended. Throws the first exception
  // that one has thrown.
  template <class Body>
  void run(int tasks, Body&& body) {
    run(tasks, [](void* context, int task, int thread) { (*(Body*)context)(task, thread); }, &body);
  }

 private:
  using Call = void (*)(void* context, int task, int thread);

  void run(int tasks, Call call, void* context);
  void run_phase(int tasks);
  void close();
  bool take(int thread);
  void work(int thread);

  // The phase, its number of tasks and the next task, in one word: a thread that comes late cannot take a task of a
  // phase that it has not seen.
  static constexpr int kBits = 24;
  static constexpr uint64_t kMask = (1u << kBits) - 1;
  alignas(64) std::atomic<uint64_t> state_{0};
  alignas(64) std::atomic<int> ended_{0};
  alignas(64) std::atomic<bool> closing_{false};
  Call call_ = nullptr;
  void* context_ = nullptr;
  int first_ = 0;  // what the phase's task 0 is to the caller
  std::mutex failing_;
  std::exception_ptr failure_;
  std::vector<std::thread> workers_;
};

}  // namespace inflight
