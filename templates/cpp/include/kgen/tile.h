// Transposed L x L tiles, for operands whose unit-stride dimension is not the loop's.
#pragma once

#include "memory.h"

namespace kgen {

// N registers of N lanes, transposed in place by log2(N) perfect shuffles.
template <class R, int N>
KGEN_FN void transpose_registers(R (&rows)[N]) {
  KGEN_UNROLL for (int step = 1; step < N; step *= 2) {
    R next[N];
    [&]<int... I>(Lanes<I...>) KGEN_INLINE {
      KGEN_UNROLL for (int i = 0; i < N / 2; ++i) {
        next[2 * i] = __builtin_shufflevector(rows[i], rows[i + N / 2], ((I & 1) * N + I / 2)...);
        next[2 * i + 1] = __builtin_shufflevector(rows[i], rows[i + N / 2], ((I & 1) * N + I / 2 + N / 2)...);
      }
    }(lane_numbers<N>{});
    KGEN_UNROLL for (int i = 0; i < N; ++i) rows[i] = next[i];
  }
}

// Tiles at the edge: neither unrolled nor inlined, as they are few.
template <class U>
[[gnu::noinline, gnu::cold]] void transpose_partial(U* to, int64_t to_stride, const U* from, int64_t from_stride, int64_t rows,
                                                    int64_t cols) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) to[c * to_stride + r] = from[r * from_stride + c];
  }
}

// to[c * to_stride + r] = from[r * from_stride + c] for r < rows and c < cols, both at most N.
template <int N, class U>
KGEN_FN void transpose_block(U* to, int64_t to_stride, const U* from, int64_t from_stride, int64_t rows, int64_t cols) {
  if (rows == N && cols == N) {
    using R = Register<U, N>;
    R block[N];
    KGEN_UNROLL for (int i = 0; i < N; ++i) __builtin_memcpy(&block[i], from + i * from_stride, sizeof(R));
    transpose_registers(block);
    KGEN_UNROLL for (int i = 0; i < N; ++i) __builtin_memcpy(to + i * to_stride, &block[i], sizeof(R));
  } else {
    transpose_partial(to, to_stride, from, from_stride, rows, cols);
  }
}

// Blocks of one register a row, at most 16 by 16: more registers than that the machine does not have.
template <class T, int L>
inline constexpr int tile_block = smaller(smaller(L, 16), kRegisterBytes / int(sizeof(T)));

// Out of line: one copy serves a kernel's full and partial tiles.
template <class T, int L>
[[gnu::noinline]] void transpose_tile(T* to, int64_t to_stride, const T* from, int64_t from_stride, int64_t rows,
                                      int64_t cols) {
  constexpr int N = tile_block<T, L>;
  using U = unsigned_of_size<sizeof(T)>;
  for (int64_t r = 0; r < rows; r += N) {
    for (int64_t c = 0; c < cols; c += N) {
      auto* block_to = reinterpret_cast<U*>(to) + c * to_stride + r;
      const auto* block_from = reinterpret_cast<const U*>(from) + r * from_stride + c;
      transpose_block<N>(block_to, to_stride, block_from, from_stride, smaller<int64_t>(N, rows - r),
                         smaller<int64_t>(N, cols - c));
    }
  }
}

// scratch[c * L + r] = p[r * row_stride + c]: the tile's columns become the scratch tile's rows. T is a storage type; scratch
// has room for L * L.
template <class T, int L>
KGEN_FN void load_tile(const T* p, int64_t row_stride, T* scratch, int64_t rows, int64_t cols) {
  transpose_tile<T, L>(scratch, L, p, row_stride, rows, cols);
}
// p[r * row_stride + c] = scratch[c * L + r]: the way back.
template <class T, int L>
KGEN_FN void store_tile(T* p, int64_t row_stride, const T* scratch, int64_t rows, int64_t cols) {
  transpose_tile<T, L>(p, row_stride, scratch, L, cols, rows);
}

}  // namespace kgen
