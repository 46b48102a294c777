// Products of a few rows with a large matrix: bound by reading the matrix, so that it is read once, where it lies, unpacked.
//
// Columns whose k are neighbours (nn.Linear's weights) become dot products, several columns at a time, each a stream. Columns that
// are neighbours for one k become multiples of rows added to the results, which stay in L1, several rows at a time.
#pragma once

#include "few_rows_tiles.h"
#include "pack.h"
#include "reduce.h"
#include "team.h"

namespace kgen {

// ---- neighbours along k ---------------------------------------------------------------------------------------------

// c[r * ldc + j] += dot products of Rows rows with Columns columns. `x` has rows of kDepth words, `block` words from one block of
// k to the next.
template <class U, int Rows, int Columns, class T>
[[gnu::noinline]] void dot_columns(const typename U::Word* x, int64_t block, Words<U, T> b, typename U::Acc* c, int64_t ldc) {
  constexpr int L = word_lanes<U>, E = U::elements;
  constexpr int64_t ahead = 1024 / sizeof(T);  // elements to the memory that is asked for in advance
  using R = Register<typename U::Word, L>;
  using S = Register<typename U::Acc, L>;
  S sums[Rows * Columns] = {};
  const T* column[Columns];
  KGEN_UNROLL for (int j = 0; j < Columns; ++j) column[j] = b.view.data + smaller<int64_t>(j, b.ni - 1) * b.view.i_stride;
  const auto add = [&](const typename U::Word* row, auto lanes) KGEN_INLINE {
    R right[Columns];
    KGEN_UNROLL for (int j = 0; j < Columns; ++j) right[j] = lanes(j);
    KGEN_UNROLL for (int r = 0; r < Rows; ++r) {
      const R left = register_at<R>(row + r * kDepth);
      KGEN_UNROLL for (int j = 0; j < Columns; ++j) sums[r * Columns + j] = U::step(sums[r * Columns + j], left, right[j]);
    }
  };
  for (int64_t d = 0; d * kDepth * E < b.nk; ++d, x += block) {
    const int64_t first_k = d * kDepth * E, nk = smaller<int64_t>(kDepth * E, b.nk - first_k);
    int64_t k = 0;
    for (; k + L * E <= nk; k += L * E) {
      add(x + k / E, [&](int j) KGEN_INLINE {
        const T* const from = column[j] + first_k + k;
        __builtin_prefetch(from + ahead);
        return b.words_at(from, Full<L * E>{});
      });
    }
    if (k < nk) {
      add(x + k / E, [&](int j) KGEN_INLINE { return b.words_at(column[j] + first_k + k, Tail<L * E>{nk - k}); });
    }
  }
  KGEN_UNROLL for (int r = 0; r < Rows; ++r) {
    KGEN_UNROLL for (int j = 0; j < Columns; ++j) {
      const auto sum = fold_sum(bits_as<Vec<typename U::Acc, L>>(sums[r * Columns + j]));
      if (j < b.ni) c[r * ldc + j] += sum;
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
  KGEN_UNROLL for (int i = 0; i < Rows * Depth; ++i) left[i] = splat_register<R>(x[i / Depth * kDepth + i % Depth]);
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
        add(r, [&](int u) KGEN_INLINE { return splat_register<R>(x[r * kDepth + u]); });
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
    const auto* const from = x + k / kDepth * block + k % kDepth;
    if (k + depth <= words) {  // kDepth is a multiple of depth
      add_multiples<U, depth, Rows>(from, rows, b, k, c, ldc);
      k += depth;
    } else {
      add_multiples<U, 1, Rows>(from, rows, b, k, c, ldc);
      ++k;
    }
  }
}

// ---- the product ----------------------------------------------------------------------------------------------------

// At most kFewRows rows.
inline constexpr int64_t kFewRows = 16;

template <class U, class A, class B, class Store>
class FewRowsProduct {
  using Word = typename U::Word;
  using Acc = typename U::Acc;
  using TA = typename A::Element;
  using TB = typename B::Element;
  static constexpr int64_t depth = kDepth * U::elements, P = kPanel<U>;
  static constexpr bool has_tiles = !std::is_same_v<tiles_t<U>, NoTiles>;
  static constexpr int64_t kFilledDepths = 4;  // blocks of k that are computed at a time

 public:
  FewRowsProduct(Extents size, const A& a, const B& b, const Store& store) : size_(size), a_(a), b_(b), store_(store) {
    in_tiles_ = has_tiles && size.m > 4 && b.along_k() && tiles_t<U>::granted();
    rows_ = size.m > 8 || in_tiles_ ? 16 : size.m > 4 ? 8 : size.m > 2 ? 4 : size.m;
    depths_ = pieces(size.k, depth);
    x_block_ = kDepth * (in_tiles_ ? P : rows_);
  }

  // Tiles on packed columns beat registers on columns that are neighbours from 9 rows on.
  static bool wanted(Extents size, const B& b) { return size.m <= 8 || b.along_k() || !tiles_t<U>::granted(); }

  void run(int threads) {
    const int64_t wide = columns_at_once(), shares = threads * pieces(size_.n, threads * wide);
    const int64_t columns = round_up(pieces(size_.n, shares), 16);
    parallel_team(threads, [&] {
      [[maybe_unused]] const tiles_t<U> registers;
      Rooms own(scratch<1>(own_bytes(columns)));
      Word* const x = own.take<Word>(x_block_ * depths_);
      Word* const tiles = own.take<Word>(tile_words());
      Acc* const results = own.take<Acc>(rows_ * columns);
      auto* const room = own.take<char>(0);
      pack_x(x, reinterpret_cast<TA*>(room));  // each thread for itself: that costs less than waiting for each other
      team_share(pieces(size_.n, columns), [&](int64_t task) {
        const int64_t n = task * columns, count = smaller(columns, size_.n - n);
        for (int64_t i = 0; i < rows_ * columns; ++i) results[i] = Acc(0);
        const int64_t step = B::in_place ? size_.k : depth * kFilledDepths;
        for (int64_t k = 0; k < size_.k; k += step) {
          const int64_t nk = smaller(step, size_.k - k);
          const auto view = b_.view(n, count, k, nk, reinterpret_cast<TB*>(room));
          add(x + k / depth * x_block_, Words<U, TB>{view, count, nk}, tiles, results, columns);
        }
        store_(int64_t(0), n, size_.m, count, results, columns);
      });
    });
  }

 private:
  // Columns of a rectangle of results: a few streams at a time, or the rows of results that L1 holds.
  int64_t columns_at_once() const {
    return b_.along_k() || !B::in_place ? 48 : 1024;
  }

  int64_t tile_words() const { return in_tiles_ ? 48 * kDepth : 0; }

  int64_t own_bytes(int64_t columns) const {
    const int64_t room_a = A::in_place ? 0 : room_of(size_.m, depth) * sizeof(TA);
    const int64_t room_b = B::in_place ? 0 : room_of(columns, depth * kFilledDepths) * sizeof(TB);
    const int64_t words = Rooms::bytes<Word>(x_block_ * depths_) + Rooms::bytes<Word>(tile_words());
    return words + Rooms::bytes<Acc>(rows_ * columns) + larger(room_a, room_b);
  }

  void pack_x(Word* x, TA* room) {
    for (int64_t d = 0; d < depths_; ++d) {
      const int64_t k = d * depth, nk = smaller(depth, size_.k - k);
      const Words<U, TA> rows{a_.view(0, size_.m, k, nk, room), size_.m, nk};
      if (in_tiles_) pack_panels(rows, x + d * x_block_);
      else pack_rows(rows, rows_, x + d * x_block_, kDepth);
    }
  }

  void add(const Word* x, Words<U, TB> b, [[maybe_unused]] Word* room, Acc* c, int64_t ldc) {
#if KGEN_AMX
    if constexpr (has_tiles) {
      if (in_tiles_) {
        for (int64_t n = 0; n < b.ni; n += kTileDots) {
          const Words<U, TB> some{b.view.view(n, 0, 0, 0, nullptr), smaller(kTileDots, b.ni - n), b.nk};
          dots_in_tiles(x, some, room, c + n, ldc, size_.m);
        }
        return;
      }
    }
#endif
    if (b_.along_k()) {
      switch (rows_) {
        case 1: return dots<1>(x, b, c, ldc);
        case 2: return dots<2>(x, b, c, ldc);
        case 4: return dots<4>(x, b, c, ldc);
        default: return dots<8>(x, b, c, ldc);
      }
    }
    if (size_.m == 1) return add_all_multiples<U, 1>(x, x_block_, 1, b, c, ldc);
    if (size_.m == 2) return add_all_multiples<U, 2>(x, x_block_, 2, b, c, ldc);
    add_all_multiples<U, 0>(x, x_block_, size_.m, b, c, ldc);
  }

  template <int Rows>
  void dots(const Word* x, Words<U, TB> b, Acc* c, int64_t ldc) {
    constexpr int Columns = smaller(8, (KGEN_AVX512 ? 24 : 12) / Rows);  // three quarters of the registers hold sums
    for (int64_t n = 0; n < b.ni; n += Columns) {
      const Words<U, TB> some{b.view.view(n, 0, 0, 0, nullptr), b.ni - n, b.nk};
      for (int64_t r = 0; r < rows_; r += Rows) {
        dot_columns<U, Rows, Columns>(x + r * kDepth, x_block_, some, c + r * ldc + n, ldc);
      }
    }
  }

  Extents size_;
  const A& a_;
  const B& b_;
  const Store& store_;
  bool in_tiles_;
  int64_t rows_, depths_, x_block_;
};

}  // namespace kgen
