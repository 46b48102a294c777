// Matrix products: blocking, packing, threads. What is multiplied and what becomes of the results comes from generated code.
//
//   const Strided<float> x{p_x, 4096, 1}, w{p_w, 4096, 1};          // x[m, k] and w[n, k]: nn.Linear's layout
//   const auto q = filled<float, Along::k>([&](int64_t n0, int64_t n, int64_t k0, int64_t k, float* to, int64_t ld) {...});
//   matmul(threads, {M, N, K}, Blocking{.rows = 512, .tile_columns = 128}, x, w,
//          [&](int64_t m0, int64_t n0, int64_t rows, int64_t columns, const float* tile, int64_t ld) {
//            for (int64_t r = 0; r < rows; ++r) {
//              vector_loop<16>(0, columns, [&](int64_t j, auto w) KGEN_INLINE {
//                store(p_out + (m0 + r) * N + n0 + j, add_(load<16>(tile + r * ld + j, w), load<16>(p_bias + n0 + j, w)), w);
//              });
//            }
//          });
//
// `store` gets every result exactly once, after the whole sum over k, as part of a rectangle of finished results in a thread's
// cache: element (m0 + r, n0 + j) is tile[r * ld + j], its type the unit's Acc (float, double, int32_t or int64_t). It is called
// by several threads at once, each for its own rectangles. Results do not depend on timing: a sum over k has a fixed order, given
// by the sizes and the blocking alone.
//
// Memory: two buffers a thread, which grow to the largest product that it has run and are reused by the next one.
#pragma once

#include "few_rows.h"
#include "pack.h"
#include "team.h"

namespace kgen {

// How a product is cut. What is good for which sizes: kgen/templates/cpp/blocking.py.
struct Blocking {
  int64_t rows = 512;         // packed at a time, over all of k, and shared by all threads
  int64_t tile_rows = 512;    // of a rectangle of results that stays in a thread's cache
  int64_t tile_columns = 128;
  int parts = 1;              // of the sum over k, for threads that would have no rectangle
  int64_t few_rows = 0;       // at most so many rows read the right operand where it lies
};

// ---- packed products ------------------------------------------------------------------------------------------------

template <class U, class A, class B, class Store>
class PackedProduct {
  using Word = typename U::Word;
  using Acc = typename U::Acc;
  using TA = typename A::Element;
  using TB = typename B::Element;
  static constexpr int64_t P = kPanel<U>, depth = kDepth * U::elements;
  static constexpr int64_t kPackRows = 48;  // a unit of packing; a multiple of every row step

 public:
  PackedProduct(Extents size, const Blocking& how, const A& a, const B& b, const Store& store)
      : size_(size), a_(a), b_(b), store_(store) {
    rows_ = smaller(round_up(how.rows, kPackRows), round_up(size.m, U::row_step));
    tile_rows_ = smaller(round_up(how.tile_rows, kPackRows), rows_);
    tile_columns_ = smaller(round_up(how.tile_columns, P), round_up(size.n, P));
    depths_ = pieces(size.k, depth);
    parts_ = how.parts < 1 ? 1 : smaller<int64_t>(how.parts, larger<int64_t>(depths_, 1));
  }

  void run(int threads) {
    const int64_t tile = tile_rows_ * tile_columns_, tiles = pieces(rows_, tile_rows_) * column_tiles();
    Rooms shared(scratch<0>(Rooms::bytes<Word>(rows_ * depths_ * kDepth) + (parts_ > 1 ? tiles * parts_ * tile * sizeof(Acc) : 0)));
    packed_ = shared.take<Word>(rows_ * depths_ * kDepth);
    partial_ = shared.take<Acc>(0);
    parallel_team(threads, [&] {
      for (int64_t m = 0; m < size_.m; m += rows_) {
        if (m > 0) team_wait();  // the packed rows before were still read
        some_rows(m, smaller(rows_, size_.m - m));
      }
    });
  }

 private:
  struct Tile {
    int64_t m, rows, n, columns;
  };

  int64_t column_tiles() const { return pieces(size_.n, tile_columns_); }

  // All columns of the results of rows m, ..., m + rows - 1.
  void some_rows(int64_t m, int64_t rows) {
    const int64_t tiles = pieces(rows, tile_rows_) * column_tiles(), tile_size = tile_rows_ * tile_columns_;
    const int64_t padded = round_up(rows, U::row_step);
    Rooms own(scratch<1>(own_bytes()));
    Acc* const results = own.take<Acc>(tile_size);
    Word* const columns = own.take<Word>(tile_columns_ * kDepth);
    auto* const room = own.take<char>(0);
    const int64_t chunks = pieces(rows, kPackRows);
    team_share(chunks * depths_, [&](int64_t unit) {
      const int64_t r = unit % chunks * kPackRows, d = unit / chunks;
      pack_a(m, r, smaller(kPackRows, rows - r), smaller(kPackRows, padded - r), d, padded, reinterpret_cast<TA*>(room));
    });
    team_wait();
    const auto tile_of = [&](int64_t number) {
      const int64_t r = number / column_tiles() * tile_rows_, n = number % column_tiles() * tile_columns_;
      return Tile{r, smaller(tile_rows_, rows - r), n, smaller(tile_columns_, size_.n - n)};
    };
    team_share(tiles * parts_, [&](int64_t task) {
      const int64_t number = task / parts_, part = task % parts_;
      const Tile tile = tile_of(number);
      Acc* const to = parts_ > 1 ? partial_ + task * tile_size : results;
      multiply(tile, {depths_ * part / parts_, depths_ * (part + 1) / parts_}, padded, to, columns, reinterpret_cast<TB*>(room));
      if (parts_ == 1) store_(m + tile.m, tile.n, tile.rows, tile.columns, to, tile_columns_);
    });
    if (parts_ > 1) {
      team_wait();
      constexpr int64_t strip = 8;  // rows that a thread adds up at a time
      const int64_t strips = pieces(tile_rows_, strip);
      team_share(tiles * strips, [&](int64_t task) {
        const Tile tile = tile_of(task / strips);
        const int64_t r = task % strips * strip;
        if (r >= tile.rows) return;
        const int64_t count = smaller(strip, tile.rows - r);
        Acc* const first = partial_ + task / strips * parts_ * tile_size + r * tile_columns_;
        for (int64_t part = 1; part < parts_; ++part) {
          for (int64_t i = 0; i < count * tile_columns_; ++i) first[i] += first[part * tile_size + i];
        }
        store_(m + tile.m + r, tile.n, count, tile.columns, first, tile_columns_);
      });
    }
  }

  int64_t own_bytes() const {
    const int64_t room_a = A::in_place ? 0 : room_of(kPackRows, depth) * sizeof(TA);
    const int64_t room_b = B::in_place ? 0 : room_of(tile_columns_, depth) * sizeof(TB);
    return Rooms::bytes<Acc>(tile_rows_ * tile_columns_) + Rooms::bytes<Word>(tile_columns_ * kDepth) + larger(room_a, room_b);
  }

  // Rows r, ... of the block that starts at m, elements of the d-th block of k.
  void pack_a(int64_t m, int64_t r, int64_t rows, int64_t padded, int64_t d, int64_t block_rows, TA* room) {
    const int64_t k = d * depth, nk = smaller(depth, size_.k - k);
    pack_rows(Words<U, TA>{a_.view(m + r, rows, k, nk, room), rows, nk}, padded, packed_ + (d * block_rows + r) * kDepth, kDepth);
  }

  struct Depths {
    int64_t begin, end;
  };

  // One rectangle of results, over some blocks of k.
  void multiply(const Tile& tile, Depths share, int64_t block_rows, Acc* results, Word* columns, TB* room) {
    [[maybe_unused]] const tiles_t<U> registers;
    const int64_t padded = round_up(tile.rows, U::row_step);
    if (share.begin == share.end) {
      for (int64_t i = 0; i < padded * tile_columns_; ++i) results[i] = Acc(0);
    }
    for (int64_t d = share.begin; d < share.end; ++d) {
      const int64_t k = d * depth, nk = smaller(depth, size_.k - k);
      pack_panels(Words<U, TB>{b_.view(tile.n, tile.columns, k, nk, room), tile.columns, nk}, columns);
      const Word* const rows = packed_ + (d * block_rows + tile.m) * kDepth;
      for (int64_t n = 0; n < tile.columns; n += P) {
        multiply_panel<U>(rows, columns + n * kDepth, words_of<U>(nk), results + n, tile_columns_, padded, d == share.begin);
      }
    }
  }

  Extents size_;
  const A& a_;
  const B& b_;
  const Store& store_;
  int64_t rows_, tile_rows_, tile_columns_, depths_, parts_;
  Word* packed_ = nullptr;
  Acc* partial_ = nullptr;
};

// store(...) of all results of a (m by k) times b (k by n). `a` and `b` are Strided or Filled.
template <class A, class B, class Store>
inline void matmul(int threads, Extents size, const Blocking& how, const A& a, const B& b, const Store& store) {
  using U = unit_t<typename A::Element, typename B::Element>;
  if (size.m <= 0 || size.n <= 0) return;
  using FewRows = FewRowsProduct<U, A, B, Store>;
  if (size.m <= smaller(how.few_rows, kFewRows) && FewRows::wanted(size, b)) {
    FewRows(size, a, b, store).run(threads);
  } else {
    PackedProduct<U, A, B, Store>(size, how, a, b, store).run(threads);
  }
}

}  // namespace kgen
