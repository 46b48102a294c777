// Dot products of packed rows with columns whose k are neighbours, read where they lie: for more rows than bring the time of
// reading the columns, and too few to pay for packing these. Dot products of rows and columns are summed lane by lane, and the
// lanes at the end.
#pragma once

#include "pack.h"
#include "team.h"

namespace kgen {

// At most so many rows: of 128, packed columns are as fast. As in blocking.py.
inline constexpr int64_t kMostDotRows = 96;
// Sums of so many rows and columns are kept in registers, a register each.
inline constexpr int kDotRows = KGEN_AVX512 ? 4 : 2, kDotColumns = 6;
// Blocks along k that are multiplied at a time: the columns of one step stay in L1 beside its rows, for all rows.
inline constexpr int64_t kDotDepths = 3;
// Columns of an operand that is computed, at a time.
inline constexpr int64_t kFilledDots = 4 * kDotColumns;

// Memory that is asked for, `step` bytes at a time.
struct Prefetch {
  const char* from;
  int64_t step;
};

// to[0], ..., to[N - 1] (+)= `sums`.
template <class R, class T>
KGEN_FN void put_sums(T* to, R sums, bool first) {
  if (!first) sums += register_at<R>(to);
  __builtin_memcpy(to, &sums, sizeof(R));
}

// c[r * ldc + j] (+)= the dot products of kDotRows packed rows (word k of row r at x[k / L * kDotRows * L + r * L + k % L]) with the
// first columns of `b`, kDotColumns of them if there are so many.
template <class U, class T>
[[gnu::noinline]] void dot_block(const typename U::Word* x, Words<U, T> b, typename U::Acc* c, int64_t ldc, bool first, Prefetch prefetch) {
  constexpr int L = word_lanes<U>, E = U::elements, Rows = kDotRows, Columns = kDotColumns;
  using R = Register<typename U::Word, L>;
  using S = Register<typename U::Acc, L>;
  S sums[Rows * Columns] = {};
  const T* column[Columns];
  KGEN_UNROLL for (int j = 0; j < Columns; ++j) column[j] = b.view.data + smaller<int64_t>(j, b.ni - 1) * b.view.i_stride;
  const auto add = [&](auto lanes) KGEN_INLINE {
    R right[Columns];
    KGEN_UNROLL for (int j = 0; j < Columns; ++j) right[j] = lanes(column[j]);
    KGEN_UNROLL for (int r = 0; r < Rows; ++r) {
      const R left = register_at<R>(x + r * L);
      KGEN_UNROLL for (int j = 0; j < Columns; ++j) sums[r * Columns + j] = U::step(sums[r * Columns + j], left, right[j]);
    }
    x += Rows * L;
  };
  int64_t k = 0;
  for (; k + L * E <= b.nk; k += L * E) {
    __builtin_prefetch(prefetch.from);
    prefetch.from += prefetch.step;
    add([&](const T* from) KGEN_INLINE { return b.words_at(from + k, Full<L * E>{}); });
  }
  if (k < b.nk) add([&](const T* from) KGEN_INLINE { return b.words_at(from + k, Tail<L * E>{b.nk - k}); });

  using Four = Register<typename U::Acc, 4>;
  using Two = Register<typename U::Acc, 2>;
  const bool all = b.ni >= Columns;
  alignas(64) typename U::Acc edge[Rows * Columns];
  auto* const to = all ? c : edge;
  const int64_t ld = all ? ldc : Columns;
  const bool fresh = first || !all;
  constexpr auto lanes = lane_numbers<L>{};
  KGEN_UNROLL for (int r = 0; r < Rows; ++r) {
    const S* const s = sums + r * Columns;
    put_sums<Four>(to + r * ld, fold_four(s[0], s[1], s[2], s[3], lanes), fresh);
  }
  KGEN_UNROLL for (int r = 0; r < Rows; r += 2) {
    const S *const s = sums + r * Columns + 4, *const t = s + Columns;
    const auto four = fold_four(s[0], s[1], t[0], t[1], lanes);
    put_sums<Two>(to + r * ld + 4, __builtin_shufflevector(four, four, 0, 1), fresh);
    put_sums<Two>(to + (r + 1) * ld + 4, __builtin_shufflevector(four, four, 2, 3), fresh);
  }
  if (all) return;
  for (int r = 0; r < Rows; ++r) {
    for (int j = 0; j < b.ni; ++j) c[r * ldc + j] = first ? edge[r * Columns + j] : c[r * ldc + j] + edge[r * Columns + j];
  }
}

// c[r * ldc + j] (+)= the dot products of `rows` packed rows (a multiple of kDotRows; as panels of so many, `words` words of each
// row) with all columns. What comes next of these, in this call or the one for the next k, is asked for in time and evenly: groups
// of rows share each column out, of which those of less than kDotColumns groups leave some.
template <class U, class T>
KGEN_FN void dot_panels(const typename U::Word* x, int64_t words, int64_t rows, Words<U, T> b, typename U::Acc* c, int64_t ldc,
                        bool first) {
  constexpr int64_t line = 64;
  const int64_t groups = larger<int64_t>(1, rows / kDotRows / kDotColumns);  // for each column
  const int64_t bytes = b.nk * int64_t(sizeof(T)), stride = b.view.i_stride * int64_t(sizeof(T));
  for (int64_t n = 0; n < b.ni; n += kDotColumns) {
    const Words<U, T> some{b.view.view(n, 0, 0, 0, nullptr), b.ni - n, b.nk};
    const auto* const now = reinterpret_cast<const char*>(some.view.data);
    const char* const next = n + kDotColumns < b.ni ? now + kDotColumns * stride : reinterpret_cast<const char*>(b.view.data) + bytes;
    for (int64_t r = 0, group = 0; r < rows; r += kDotRows, ++group) {
      const bool asks = group < groups * kDotColumns;
      const char* const column = next + group / groups * stride;
      const Prefetch prefetch = asks ? Prefetch{column + bytes * (group % groups) / groups, ceil_div(line, groups)} : Prefetch{now, 0};
      dot_block(x + r * words, some, c + r * ldc + n, ldc, first, prefetch);
    }
  }
}

}  // namespace kgen
