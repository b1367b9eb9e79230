// Holds the pool and the buffers to what they promise where tasks fail and memory is refused; prints what does not hold.
// The argument is how many tasks the largest phase has.
#include <cstdio>
#include <stdexcept>
#include <vector>

#include "model.h"

using inflight::Buffer;
using inflight::Pool;

namespace {

int failures = 0;

void expect(bool holds, const char* what) {
  if (!holds) printf("%s\n", what), failures++;
}

// How often each task of a phase runs is one.
void run_all(Pool& pool, int tasks, const char* what) {
  std::vector<std::atomic<char>> runs(tasks);
  pool.run(tasks, [&](int task, int) { runs[task]++; });
  bool once = true;
  for (auto& one : runs) once = once && one == 1;
  expect(once, what);
}

// Counts a task when it has ended, also by an exception, and a while later.
struct Ending {
  std::atomic<int>& count;
  ~Ending() {
    for (int spins = 0; spins < 2000; spins++) __builtin_ia32_pause();
    count++;
  }
};

void throw_in_tasks(Pool& pool) {
  for (int turn = 0; turn < 50; turn++) {
    std::atomic<int> ended{0};
    bool caught = false;
    try {
      pool.run(64, [&](int task, int) {
        const Ending ending{ended};
        if (task % 7 == turn % 7) throw std::runtime_error("no memory");
      });
    } catch (const std::runtime_error& error) {
      caught = !strcmp(error.what(), "no memory");
    }
    expect(caught, "an exception of a task does not reach the caller");
    expect(ended == 64 || pool.threads() == 1, "the caller does not wait for all tasks");
    run_all(pool, 64, "a phase behind one that has thrown is not whole");
  }
}

void refuse_memory() {
  Buffer<char> buffer;
  buffer.need(1 << 20)[0] = 1;
  try {
    buffer.need((size_t)1 << 60);
    expect(false, "an exbibyte is there");
  } catch (const std::bad_alloc&) {
  }
  buffer.need(16)[15] = 1;  // the first memory was freed, once
}

}  // namespace

int main(int, char** arguments) {
  for (int threads : {1, 2, 5}) {
    Pool pool(threads);
    run_all(pool, 1000, "a phase is not whole");
    throw_in_tasks(pool);
  }
  Pool pool(3);
  run_all(pool, atoi(arguments[1]), "a phase of many tasks is not whole");
  for (int turn = 0; turn < 500; turn++) Pool short_lived(4);  // a thread that misses its end would be waited for
  refuse_memory();
  return failures != 0;
}
