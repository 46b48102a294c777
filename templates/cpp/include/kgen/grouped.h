// Grouped matmuls: runs of rows (or of what is summed over), whose ends are numbers in memory, are matmuls of their own.
#pragma once

#include <vector>

#include "matmul.h"

namespace kgen {

// An operand whose element (i, k) is element (i + i0, k + k0) of another one.
template <class T>
KGEN_FN Strided<T> shifted(const Strided<T>& operand, int64_t i0, int64_t k0) {
  return {operand.data + i0 * operand.i_stride + k0 * operand.k_stride, operand.i_stride, operand.k_stride};
}
template <class T, Along A, class F>
KGEN_FN auto shifted(const Filled<T, A, F>& operand, int64_t i0, int64_t k0) {
  return filled<T, A>([&operand, i0, k0](int64_t i, int64_t ni, int64_t k, int64_t nk, T* to, int64_t ld) {
    operand.fill(i + i0, ni, k + k0, nk, to, ld);
  });
}

// Calls f(group, begin, count, threads) for each group of `total` rows, those from the end of the group before to
// `end_of(group)`, and with `groups` as its number for those behind the last one. Ends that fall or lie outside make empty groups,
// so that every row is in one. `work` is what a row takes, in pairs of numbers. Of many groups, none of which has most of the
// work, each thread takes some; else all threads take one after the other.
template <class E, class F>
inline void share_groups(int threads, int64_t groups, int64_t total, int64_t work, E end_of, F f) {
  std::vector<int64_t> ends(size_t(groups + 2));
  int64_t longest = 0;
  for (int64_t g = 0; g < groups; ++g) {
    ends[size_t(g + 1)] = smaller(larger<int64_t>(end_of(g), ends[size_t(g)]), total);
    longest = larger(longest, ends[size_t(g + 1)] - ends[size_t(g)]);
  }
  ends[size_t(groups + 1)] = total;
  const auto one = [&](int64_t g, int team) { f(g, ends[size_t(g)], ends[size_t(g + 1)] - ends[size_t(g)], team); };
  const bool even = longest * threads <= 2 * total && groups >= 2 * threads;
  if (!even) {
    for (int64_t g = 0; g <= groups; ++g) one(g, threads);
    return;
  }
  const int useful = useful_threads(threads, total * work);
  // a thread's groups begin in its share of the rows: neighbours, of about as much work as those of others
  parallel_for(useful, useful, 1, [&](int64_t first, int64_t last) {
    const int64_t low = total * first / useful, high = total * last / useful;
    for (int64_t g = 0; g <= groups; ++g) {
      const int64_t begin = ends[size_t(g)];
      if (begin >= low && (begin < high || last == useful)) one(g, 1);
    }
  });
}

}  // namespace kgen
