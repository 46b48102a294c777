// Matmuls of a few rows with a large matrix: bound by reading the matrix, so that it is read once, in place, unpacked.
//
// Columns whose k are neighbours (nn.Linear's weights) become dot products, several columns at a time, each a stream. Columns that
// are neighbours for one k become multiples of rows added to the results, which stay in L1, several rows at a time.
#pragma once

#include "few_rows_tiles.h"
#include "pack.h"

namespace kgen {

// ---- neighbours along k ---------------------------------------------------------------------------------------------

// Elements from those that are multiplied to those that come to L2, and from there to L1, meanwhile. Memory takes longer to answer
// than a column's part takes to be multiplied, and L1 has room for few questions.
struct Next {
  int64_t far, near;
};

// c[r * ldc + j] += dot products of Rows rows with Columns columns. `x` has rows of kDepth words, `block` words from one block of
// k to the next. `next` is asked for in advance.
template <class U, int Rows, int Columns, class T>
[[gnu::noinline]] void dot_columns(const typename U::Word* x, int64_t block, Words<U, T> b, typename U::Acc* c, int64_t ldc, Next next) {
  constexpr int L = word_lanes<U>, E = U::elements;
  using R = Register<typename U::Word, L>;
  using S = Register<typename U::Acc, L>;
  S sums[Rows * Columns] = {};
  const T* column[Columns];
  KGEN_UNROLL for (int j = 0; j < Columns; ++j) column[j] = b.view.data + smaller<int64_t>(j, b.ni - 1) * b.view.i_stride;
  const auto add = [&](const typename U::Word* row, auto lanes) KGEN_INLINE {
    R right[Columns];
    KGEN_UNROLL for (int j = 0; j < Columns; ++j) right[j] = lanes(j);
    KGEN_UNROLL for (int r = 0; r < Rows; ++r) {
      const R left = register_at<R>(row + r * kDepth<U>);
      KGEN_UNROLL for (int j = 0; j < Columns; ++j) sums[r * Columns + j] = U::step(sums[r * Columns + j], left, right[j]);
    }
  };
  for (int64_t d = 0; d * kDepth<U> * E < b.nk; ++d, x += block) {
    const int64_t first_k = d * kDepth<U> * E, nk = smaller<int64_t>(kDepth<U> * E, b.nk - first_k);
    int64_t k = 0;
    constexpr int line = larger(L * E, 64 / int(sizeof(T)));  // asked for once
    for (; k + line <= nk; k += line) {
      KGEN_UNROLL for (int j = 0; j < Columns; ++j) {
        __builtin_prefetch(column[j] + first_k + k + next.far, 0, 2);
        __builtin_prefetch(column[j] + first_k + k + next.near);
      }
      KGEN_UNROLL for (int i = 0; i < line; i += L * E) {
        add(x + (k + i) / E, [&](int j) KGEN_INLINE { return b.words_at(column[j] + first_k + k + i, Full<L * E>{}); });
      }
    }
    for (; k + L * E <= nk; k += L * E) {
      add(x + k / E, [&](int j) KGEN_INLINE { return b.words_at(column[j] + first_k + k, Full<L * E>{}); });
    }
    if (k < nk) {
      add(x + k / E, [&](int j) KGEN_INLINE { return b.words_at(column[j] + first_k + k, Tail<L * E>{nk - k}); });
    }
  }
  static_assert(Rows * Columns % 4 == 0);
  alignas(64) typename U::Acc folded[Rows * Columns];
  KGEN_UNROLL for (int i = 0; i < Rows * Columns; i += 4) {
    const auto four = fold_four(sums[i], sums[i + 1], sums[i + 2], sums[i + 3], lane_numbers<L>{});
    __builtin_memcpy(folded + i, &four, sizeof(four));
  }
  KGEN_UNROLL for (int r = 0; r < Rows; ++r) {
    KGEN_UNROLL for (int j = 0; j < Columns; ++j) {
      if (j < b.ni) c[r * ldc + j] += folded[r * Columns + j];
    }
  }
}

// ---- neighbours along the columns -----------------------------------------------------------------------------------

// c[r * ldc + j] += the words k, ..., k + Depth - 1 of `rows` rows (x[r * kDepth]) times those of all columns. One or two rows
// (Rows > 0) keep their words in registers.
template <class U, int Depth, int Rows, class T>
KGEN_FN void add_multiples(const typename U::Word* x, int64_t rows, Words<U, T> b, int64_t k, typename U::Acc* c, int64_t ldc) {
  constexpr int L = word_lanes<U>, E = U::elements;
  using R = Register<typename U::Word, L>;
  using S = Register<typename U::Acc, L>;
  R left[larger(Rows, 1) * Depth];
  KGEN_UNROLL for (int i = 0; i < Rows * Depth; ++i) left[i] = splat_register<R>(x[i / Depth * kDepth<U> + i % Depth]);
  vector_loop<L>(0, b.ni, [&](int64_t i, auto w) KGEN_INLINE {
    R right[Depth];
    KGEN_UNROLL for (int u = 0; u < Depth; ++u) {
      const T* const next = b.view.data + i * b.view.i_stride + (k + u + Depth) * E * b.view.k_stride;
      KGEN_UNROLL for (int e = 0; e < E; ++e) __builtin_prefetch(next + e * b.view.k_stride);
      right[u] = b.along_i(i, k + u, w);
    }
    const auto add = [&](int64_t r, auto word) KGEN_INLINE {
      S sum = register_at<S>(c + r * ldc + i);
      KGEN_UNROLL for (int u = 0; u < Depth; ++u) sum = U::step(sum, word(u), right[u]);
      __builtin_memcpy(c + r * ldc + i, &sum, sizeof(sum));
    };
    if constexpr (Rows > 0) {
      KGEN_UNROLL for (int r = 0; r < Rows; ++r) add(r, [&](int u) KGEN_INLINE { return left[r * Depth + u]; });
    } else {
      for (int64_t r = 0; r < rows; ++r) {
        add(r, [&](int u) KGEN_INLINE { return splat_register<R>(x[r * kDepth<U> + u]); });
      }
    }
  });
}

template <class U, int Rows, class T>
[[gnu::noinline]] void add_all_multiples(const typename U::Word* x, int64_t block, int64_t rows, Words<U, T> b,
                                         typename U::Acc* c, int64_t ldc) {
  constexpr int64_t depth = 8 / U::elements;
  const int64_t words = (b.nk + U::elements - 1) / U::elements;
  for (int64_t k = 0; k < words;) {
    const auto* const from = x + k / kDepth<U> * block + k % kDepth<U>;
    if (k + depth <= words) {  // kDepth is a multiple of depth
      add_multiples<U, depth, Rows>(from, rows, b, k, c, ldc);
      k += depth;
    } else {
      add_multiples<U, 1, Rows>(from, rows, b, k, c, ldc);
      ++k;
    }
  }
}

// ---- a few packed rows ----------------------------------------------------------------------------------------------

// At most kFewRows rows.
inline constexpr int64_t kFewRows = 16;

// The rows of the left operand, packed in blocks of k: `block` words from one to the next. In tiles they are panels.
template <class U>
struct FewRows {
  using Word = typename U::Word;
  using Acc = typename U::Acc;
  static constexpr int64_t depth = kDepth<U> * U::elements;
  static constexpr bool has_tiles = !std::is_same_v<tiles_t<U>, NoTiles>;
  int64_t m, padded, block;
  bool in_tiles;
  Word* words;  // of the rows
  Word* room;   // for the tiles of columns, tile_words()

  // `along_k`: of all right operands.
  static FewRows of(int64_t m, bool along_k) {
    const bool in_tiles = has_tiles && m > 4 && along_k && tiles_t<U>::granted();
    const int64_t padded = m > 8 || in_tiles ? 16 : m > 4 ? 8 : m > 2 ? 4 : m;
    return {m, padded, kDepth<U> * (in_tiles ? kPanel<U> : padded), in_tiles, nullptr, nullptr};
  }
  // How many k's all columns are multiplied by before the next k's. The rows are read anew for every few columns: of so many
  // k's they fill half of L1, while all of 8 rows would come from L2. Tiles read them fast enough from there.
  int64_t k_at_once(int64_t all) const {
    constexpr int64_t bytes = 16 << 10;
    return in_tiles ? all : depth * larger<int64_t>(1, bytes / (block * int64_t(sizeof(Word))));
  }
  int64_t tile_words() const { return in_tiles ? 48 * kDepth<U> : 0; }

  // c[r * ldc + j] += the dot products with the columns of a block that begins at k, a multiple of `depth`.
  template <class T>
  void multiply(Words<U, T> b, int64_t k, Acc* c, int64_t ldc) const;

 private:
  template <int Rows, class T>
  void dots(const Word* x, Words<U, T> b, Acc* c, int64_t ldc) const {
    // At most three quarters of the registers hold sums; with 16 registers, eight streams are more than are kept fed.
    constexpr int Columns = KGEN_AVX512 ? smaller(8, 24 / Rows) : smaller(4, 12 / Rows);
    constexpr int64_t near = 1024 / sizeof(T), is_short = 8 * near;
    // further on in a column, or where that is short, some columns on; behind the last ones come the first ones for the next k's
    const int64_t columns = round_up(b.ni, Columns);
    const auto steps = [&](int64_t n, int64_t count) {
      const int64_t column = n + count * Columns;
      return column < columns ? count * Columns * b.view.i_stride : (column % columns - n) * b.view.i_stride + b.nk;
    };
    for (int64_t n = 0; n < b.ni; n += Columns) {
      const Words<U, T> some{b.view.view(n, 0, 0, 0, nullptr), b.ni - n, b.nk};
      const Next next = b.nk > is_short ? Next{2 * near, near} : Next{steps(n, 3), steps(n, 1)};
      for (int64_t r = 0; r < padded; r += Rows) {
        dot_columns<U, Rows, Columns>(x + r * kDepth<U>, block, some, c + r * ldc + n, ldc, next);
      }
    }
  }
};

// Not in the class, where it would be inline, and instantiated by every kernel (matmul.h, KGEN_MATMUL).
template <class U>
template <class T>
void FewRows<U>::multiply(Words<U, T> b, int64_t k, Acc* c, int64_t ldc) const {
  const Word* const x = words + k / depth * block;
#if KGEN_AMX
  if constexpr (has_tiles) {
    if (in_tiles) {
      for (int64_t n = 0; n < b.ni; n += kTileDots) {
        const Words<U, T> some{b.view.view(n, 0, 0, 0, nullptr), smaller(kTileDots, b.ni - n), b.nk};
        dots_in_tiles(x, some, room, c + n, ldc, m);
      }
      return;
    }
  }
#endif
  if (b.view.along_k()) {
    switch (padded) {
      case 1: return dots<1>(x, b, c, ldc);
      case 2: return dots<2>(x, b, c, ldc);
      case 4: return dots<4>(x, b, c, ldc);
      default: return dots<8>(x, b, c, ldc);
    }
  }
  if (m == 1) return add_all_multiples<U, 1>(x, block, 1, b, c, ldc);
  if (m == 2) return add_all_multiples<U, 2>(x, block, 2, b, c, ldc);
  add_all_multiples<U, 0>(x, block, m, b, c, ldc);
}

}  // namespace kgen
