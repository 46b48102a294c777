// What the loops of matmuls share: sizes, memory that threads keep, teams of threads.
#pragma once

#include "loops.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace kgen {

struct Extents {
  int64_t m, n, k;
};

// This thread's buffer number Slot, at least `bytes` long; what it held is lost. Plain data: a destructor would need libstdc++.
template <int Slot>
inline void* scratch(int64_t bytes) {
  struct Buffer {
    void* data;
    int64_t bytes;
  };
  static thread_local Buffer buffer{nullptr, 0};
  if (buffer.bytes < bytes) {
    constexpr int64_t huge = 2 << 20;
    const int64_t page = bytes < huge / 2 ? 4096 : huge;
    std::free(buffer.data);
    buffer.bytes = (bytes + page - 1) / page * page;
    buffer.data = std::aligned_alloc(size_t(page), size_t(buffer.bytes));
#ifdef __linux__
    if (page == huge) madvise(buffer.data, size_t(buffer.bytes), MADV_HUGEPAGE);  // packed blocks are all over their pages
#endif
  }
  return buffer.data;
}

// Hands out parts of one buffer.
class Rooms {
 public:
  template <class T>
  KGEN_FN static constexpr int64_t bytes(int64_t count) {
    return (count * int64_t(sizeof(T)) + 63) / 64 * 64;
  }
  explicit Rooms(void* from) : next_(static_cast<char*>(from)) {}
  template <class T>
  T* take(int64_t count) {
    T* const out = reinterpret_cast<T*>(next_);
    next_ += bytes<T>(count);
    return out;
  }

 private:
  char* next_;
};

// Calls f() in a team of threads; within a parallel region in a team of one.
template <class F>
inline void parallel_team(int threads, F f) {
  const int count = omp_in_parallel() ? 1 : threads;
#pragma omp parallel num_threads(count)
  f();
}
// Within a team: shares [0, tasks) among its threads. Who comes first takes the next task: cores are not equally fast.
template <class F>
inline void team_share(int64_t tasks, F f) {
#pragma omp for schedule(dynamic, 1) nowait
  for (int64_t task = 0; task < tasks; ++task) f(task);
}
// Waits until every thread of the team is here.
inline void team_wait() {
#pragma omp barrier
}

KGEN_FN constexpr int64_t round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }
KGEN_FN constexpr int64_t ceil_div(int64_t x, int64_t size) { return (x + size - 1) / size; }

}  // namespace kgen
