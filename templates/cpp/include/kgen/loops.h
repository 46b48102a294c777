// How generated kernels run their loops: threads over independent tasks, lanes over the vector loop.
#pragma once

#include <omp.h>

#include <cstdlib>
#include <limits>
#include <new>

#include "memory.h"

namespace kgen {

// The lane count of scalar statements, so that they use the same memory functions.
inline constexpr Full<1> one{};

// Calls f(begin, end) on contiguous shares of [0, tasks), one a thread. Shares depend only on the number of threads. `grain` is the
// least number of tasks worth a thread of its own: waking a thread costs microseconds. Always inlined, early: where the numbers
// say that one thread does it all, the compiler drops what the others would run before it spends time on that.
template <class F>
KGEN_FN void parallel_for(int threads, int64_t tasks, int64_t grain, F f) {
  const int64_t useful = grain > 0 ? (tasks + grain - 1) / grain : tasks;
  const int count = int(useful < threads ? useful : threads);
  if (count <= 1 || omp_in_parallel()) {
    if (tasks > 0) f(int64_t(0), tasks);
    return;
  }
#pragma omp parallel num_threads(count)
  {
    const int64_t n = omp_get_num_threads(), t = omp_get_thread_num();
    const int64_t begin = tasks * t / n, end = tasks * (t + 1) / n;
    if (begin < end) f(begin, end);
  }
}

// The same where there are few tasks: without threads there is no second copy of f to compile.
template <class F>
KGEN_FN void serial_for(int64_t tasks, F f) {
  if (tasks > 0) f(int64_t(0), tasks);
}

// Like parallel_for over elements of a vector loop: shares begin at multiples of the lane count.
template <int L, class F>
KGEN_FN void parallel_lanes(int threads, int64_t extent, int64_t grain, F f) {
  parallel_for(threads, (extent + L - 1) / L, (grain + L - 1) / L, [&](int64_t begin, int64_t end) KGEN_INLINE {
    f(begin * L, end * L < extent ? end * L : extent);
  });
}

// One of the loops that `parallel_members` runs: which body, where its pointers begin, how many tasks of which weight it has,
// and the sizes that its body asks for.
template <int Sizes>
struct Member {
  int form, pointers;
  int64_t tasks, weight, sizes[Sizes];
};

// Calls f(member, begin, end) on shares of the tasks of all members, taken as one list: every thread gets the same weight, so a
// long member is shared and short ones keep each other company. `grain` is the least weight worth a thread.
template <class M, int Count, class F>
inline void parallel_members(int threads, const M (&members)[Count], int64_t grain, F f) {
  int64_t total = 0;
  for (const M& m : members) total += m.tasks * m.weight;
  parallel_for(threads, total, grain, [&](int64_t begin, int64_t end) {
    int64_t before = 0;
    for (const M& m : members) {
      // the first task that starts at or after a bound: what one share ends with, the next one begins with
      const auto task_at = [&](int64_t bound) { return bound <= before ? 0 : (bound - before + m.weight - 1) / m.weight; };
      const int64_t lo = task_at(begin), hi = task_at(end);
      if (lo < m.tasks && lo < hi) f(m, lo, hi < m.tasks ? hi : m.tasks);
      before += m.tasks * m.weight;
      if (before >= end) break;
    }
  });
}

// Splits one long loop: f(begin, end, part) for each thread's share, which starts at a multiple of `step`. Parts without a share
// are not called; their partial results stay at the identity.
template <class F>
inline void parallel_shares(int threads, int64_t extent, int64_t step, int64_t grain, F f) {
  const int64_t units = (extent + step - 1) / step;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int part = 0; part < threads; ++part) {
    const int64_t begin = units * part / threads * step, end = units * (part + 1) / threads * step;
    if (begin < extent) f(begin, end < extent ? end : extent, part);
  }
}

// One accumulator a thread, each on cache lines of its own.
template <class A>
struct ThreadPartials {
  struct alignas(64) Cell {
    A value;
  };
  Cell* cells;
  struct View {
    Cell* cells;
    A& operator[](int k) const { return cells[k].value; }
  } data;
  ThreadPartials(int n, A start) : cells(static_cast<Cell*>(std::aligned_alloc(64, sizeof(Cell) * size_t(n)))), data{cells} {
    for (int k = 0; k < n; ++k) new (&cells[k]) Cell{start};
  }
  ~ThreadPartials() { std::free(cells); }
  ThreadPartials(const ThreadPartials&) = delete;
  ThreadPartials& operator=(const ThreadPartials&) = delete;
};

// Calls body(i, w) for i = lo, lo + L, ...: w says that all lanes are real, but in the last call perhaps only some.
template <int L, class F>
KGEN_FN void vector_loop(int64_t lo, int64_t hi, F body) {
  int64_t i = lo;
  for (; i + L <= hi; i += L) body(i, Full<L>{});
  if constexpr (L > 1) {
    if (i < hi) body(i, Tail<L>{int(hi - i)});
  }
}

// body(value), compiled for both values.
template <class F>
KGEN_FN void for_each_value(bool value, F body) {
  if (value) {
    body(true);
  } else {
    body(false);
  }
}

// Memory of one thread for rows that stay in cache between two sections.
template <class T>
struct Row {
  T* data;
  explicit Row(int64_t n) : data(static_cast<T*>(std::aligned_alloc(64, (size_t(n) * sizeof(T) + 127) / 64 * 64))) {}
  ~Row() { std::free(data); }
  Row(const Row&) = delete;
  Row& operator=(const Row&) = delete;
};

// log(exp(a) + exp(b)) without overflow; infinities of one sign give that infinity.
template <class A, class B>
KGEN_FN auto logaddexp_(A a, B b) {
  const auto high = maximum_(a, b), low = minimum_(a, b);
  const auto sum = add_(high, log1p_(exp_(sub_(low, high))));
  return where_(and_(eq_(a, b), isinf_(high)), high, sum);
}

// What went wrong, if anything did. Any thread may raise it. Not std::atomic: that header alone costs every unit 0.1 s, precompiled as it is.
struct Flag {
  int raised = 0;
  KGEN_FN void raise(int failure) { __atomic_store_n(&raised, failure, __ATOMIC_RELAXED); }
};

// Reports a failure (a number of kgen.ir.ops.FAILURES) where a condition does not hold in a real lane.
template <class C, class W>
KGEN_FN void assert_(C holds, W w, int failure, Flag& failed) {
  if constexpr (lanes_of<C> == 1) {
    if (__builtin_expect(!holds, 0)) failed.raise(failure);
  } else {
    if (__builtin_expect(fold_any(and_(not_(holds), w.mask())), 0)) failed.raise(failure);
  }
}

// An index that was read from data: reports the first one outside [0, size) and reads element 0 in its place. With a mask, only
// indices where it holds count.
template <class I, class M, class W>
KGEN_FN auto checked_index(I index, int64_t size, M mask, W w, Flag& failed) {
  const auto bad = ge_(cast_<uint64_t>(index), uint64_t(size));  // negative ones are large: one comparison
  const auto counts = and_(bad, mask);
  if constexpr (lanes_of<I, M> == 1) {
    if (__builtin_expect(counts, 0)) failed.raise(1);
  } else {
    if (__builtin_expect(fold_any(and_(counts, w.mask())), 0)) failed.raise(1);
  }
  return where_(bad, int64_t(0), index);
}
template <class I, class W>
KGEN_FN auto checked_index(I index, int64_t size, W w, Flag& failed) {
  return checked_index(index, size, true, w, failed);
}

inline int64_t ipow(int64_t base, int64_t exponent) {
  int64_t result = 1;
  for (; exponent > 0; --exponent) result *= base;
  return result;
}

}  // namespace kgen
