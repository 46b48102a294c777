// Matmuls: blocking, packing, threads. What is multiplied and what becomes of the results comes from generated code.
//
//   const Strided<float> x{p_x, 4096, 1}, w{p_w, 4096, 1};          // x[m, k] and w[n, k]: nn.Linear's layout
//   const auto q = filled<float, Along::k>([&](int64_t n0, int64_t n, int64_t k0, int64_t k, float* to, int64_t ld) {...});
//   const auto finish = [&](int64_t m0, int64_t n0, int64_t rows, int64_t columns, const float* tile, int64_t ld) {
//     for (int64_t r = 0; r < rows; ++r) {
//       vector_loop<16>(0, columns, [&](int64_t j, auto w) KGEN_INLINE {
//         store(p_out + (m0 + r) * N + n0 + j, add_(load<16>(tile + r * ld + j, w), load<16>(p_bias + n0 + j, w)), w);
//       });
//     }
//   };
//   matmul(threads, M, K, Blocking{.rows = 512, .tile_columns = 128}, x, columns(N, finish, w));
//
// Several matmuls with the same left operand are one call, which packs that operand once. Where an epilogue needs several
// results at once, `columns(N, finish, w, v)` gives `finish` a tile of each, `(m0, n0, rows, columns, tile0, tile1, ld)`; where each
// has its own epilogue, and perhaps its own width, the call has several: `matmul(..., x, columns(N, finish, w), columns(P, end, v))`.
//
// `finish` gets every result exactly once, after the whole sum over k, as part of a rectangle of finished results in a thread's
// cache: element (m0 + r, n0 + j) is tile[r * ld + j], its type the unit's Acc (float, double, int32_t or int64_t). It is called
// by several threads at once, each for its own rectangles. Results do not depend on timing: a sum over k has a fixed order, given
// by the sizes and the blocking alone.
//
// Where rows may go to one place (an update at indices from data), `columns<Order::down>(N, finish, w)` makes threads share columns
// alone: each column gets its results from the first row to the last. `Order::along` is the same for the columns of a row.
//
// A right operand whose columns were packed before (`pack_columns`) is `Packed<float>{words, K}`: no call packs it again.
//
// `matmul(..., summed(x, end), ...)` also gives `end(m0, rows, sums)` the sums of x's rows over k, as numbers of the same type: all
// of them once, whatever the columns, in an order that depends on k alone.
//
// Memory: two buffers a thread, which grow to the largest matmul that it has run and are reused by the next one.
#pragma once

#include "matmul_operands.h"

namespace kgen {

// How a matmul is cut. What is good for which sizes: kgen/templates/cpp/blocking.py.
struct Blocking {
  int64_t rows = 512;         // packed at a time, over all of k, and shared by all threads
  int64_t tile_rows = 512;    // of a rectangle of results that stays in a thread's cache
  int64_t tile_columns = 128;
  int parts = 1;              // of the sum over k, for threads that would have no rectangle
  int64_t few_rows = 0;       // at most so many rows read the right operand in place, and so many columns the left one
  bool whole = false;         // rectangles begin at multiples of tile_rows and tile_columns and end with them or the results
};

// Multiplications of two numbers that are worth waking a thread for.
inline constexpr int64_t kGrain = 1 << 17;

// ---- a few rows -----------------------------------------------------------------------------------------------------

template <class U>
class FewRowsMatmul {
  using Word = typename U::Word;
  using Acc = typename U::Acc;
  static constexpr int64_t depth = kDepth<U> * U::elements;
  static constexpr int64_t kFilledDepths = 4;  // blocks of k that are computed at a time

 public:
  // Results are stored `store_width` columns at a time, or as they come (0).
  FewRowsMatmul(const Matmuls<U>& all, int64_t store_width) : all_(all), x_(FewRows<U>::of(all.m, along_k(all))), store_width_(store_width) {}

  // From 9 rows on tiles on packed columns beat registers on columns that are neighbours, and so do dot products of more rows at
  // a time.
  static bool wanted(const Matmuls<U>& all, int64_t few) {
    if (all.m > smaller(few, kFewRows)) return false;
    return all.m <= 8 || (tiles_t<U>::granted() ? along_k(all) : !all.takes_dots());
  }

  void run(int threads) {
    if (all_.stores(Order::along)) threads = 1;  // what they share is columns
    const auto share = [&](int64_t n) {
      const int64_t wide = columns_at_once(), shares = threads * ceil_div(n, threads * wide);
      return round_up(ceil_div(n, shares), store_width_ > 0 ? store_width_ : 16);
    };
    const auto tasks = [&](const Family<U>& family) { return family.n > 0 ? ceil_div(family.n, share(family.n)) : 0; };
    parallel_team(threads, [&] {
      [[maybe_unused]] const tiles_t<U> registers;
      int64_t columns = 0;
      for (int i = 0; i < all_.count; ++i) columns = larger(columns, share(all_.families[i].n));
      const int64_t depths = ceil_div(all_.k, depth), results_size = x_.padded * columns, rights = all_.most_rights();
      const int64_t room_size = larger(all_.left.room(all_.m, depth), all_.room(columns, depth * kFilledDepths));
      Rooms own(scratch<1>(Rooms::bytes<Word>(x_.block * depths) + Rooms::bytes<Word>(x_.tile_words()) +
                           Rooms::bytes<Acc>(results_size * rights) + room_size));
      FewRows<U> x = x_;
      x.words = own.take<Word>(x_.block * depths);
      x.room = own.take<Word>(x_.tile_words());
      Acc* const results = own.take<Acc>(results_size * rights);
      void* const room = own.take<char>(0);
      pack(x, room);  // each thread for itself: that costs less than waiting for each other
      team_share(all_.total(tasks), [&](int64_t task) {
        all_.with(task, tasks, [&](const Family<U>& family, int64_t own_task) {
          const int64_t wide = share(family.n), n = own_task * wide, count = smaller(wide, family.n - n);
          for (int64_t i = 0; i < results_size * family.count; ++i) results[i] = Acc(0);
          for (int i = 0; i < family.count; ++i) multiply(family.rights[i], n, count, x, results + i * results_size, columns, room);
          const int64_t store_width = store_width_ > 0 ? store_width_ : count;
          for (int64_t j = 0; j < count; j += store_width) {
            family.store(family.self, 0, n + j, all_.m, smaller(store_width, count - j), results + j, results_size, columns);
          }
        });
      });
    });
  }

 private:
  static bool along_k(const Matmuls<U>& all) {
    for (int i = 0; i < all.count; ++i) {
      if (!all.families[i].along_k()) return false;
    }
    return true;
  }

  // Columns of a rectangle of results: a few streams at a time, or the rows of results that L1 holds.
  int64_t columns_at_once() const {
    for (int i = 0; i < all_.count; ++i) {
      for (int r = 0; r < all_.families[i].count; ++r) {
        const Operand<U>& right = all_.families[i].rights[r];
        if (right.along_k || !right.in_place) return 48;
      }
    }
    return 1024;
  }

  void pack(const FewRows<U>& x, void* room) const {
    for (int64_t k = 0; k < all_.k; k += depth) {
      const Block block{0, all_.m, k, smaller(depth, all_.k - k)};
      Word* const to = x.words + k / depth * x.block;
      if (x.in_tiles) all_.left.pack_panels(all_.left.self, block, to, room);
      else all_.left.pack_rows(all_.left.self, block, x.padded, to, kDepth<U>, room);
    }
  }

  void multiply(const Operand<U>& right, int64_t n, int64_t count, const FewRows<U>& x, Acc* c, int64_t ldc, void* room) const {
    const int64_t step = !right.in_place ? depth * kFilledDepths : right.along_k ? x.k_at_once(all_.k) : all_.k;
    for (int64_t k = 0; k < all_.k; k += step) {
      right.multiply(right.self, {n, count, k, smaller(step, all_.k - k)}, x, c, ldc, room);
    }
  }

  const Matmuls<U>& all_;
  FewRows<U> x_;
  int64_t store_width_;
};

// A matmul with a few columns is one with a few rows, turned: what stores its results turns them back.
template <class U>
class FewColumns {
  using Acc = typename U::Acc;

 public:
  explicit FewColumns(const Matmuls<U>& all) : family_(all.families[0]), turned_{all.m, 1, {all.left}, this, store, turned(family_.order)} {
    matmuls_ = {family_.n, all.k, family_.rights[0], &turned_, 1};
  }
  FewColumns(const FewColumns&) = delete;
  static bool wanted(const Matmuls<U>& all, int64_t few) {
    const Family<U>& first = all.families[0];
    return all.count == 1 && first.count == 1 && first.n <= few && first.n < all.m && FewColumns(all).fits(few);
  }
  void run(int threads) { FewRowsMatmul<U>(matmuls_, 0).run(threads); }

 private:
  bool fits(int64_t few) const { return FewRowsMatmul<U>::wanted(matmuls_, few); }
  static Order turned(Order order) {
    return order == Order::down ? Order::along : order == Order::along ? Order::down : Order::none;
  }

  // `tile` has the columns n0, ... as rows.
  static void store(const void* self, int64_t n0, int64_t m0, int64_t columns, int64_t rows, const Acc* tile, int64_t,
                    int64_t ld) {
    constexpr int64_t strip = 64;
    const Family<U>& family = static_cast<const FewColumns*>(self)->family_;
    alignas(64) Acc turned[strip * kFewRows];
    for (int64_t r = 0; r < rows; r += strip) {
      const int64_t some = smaller(strip, rows - r);
      for (int64_t j = 0; j < columns; ++j) {
        for (int64_t i = 0; i < some; ++i) turned[i * kFewRows + j] = tile[j * ld + r + i];
      }
      family.store(family.self, m0 + r, n0, some, columns, turned, 0, kFewRows);
    }
  }

  const Family<U>& family_;
  Family<U> turned_;
  Matmuls<U> matmuls_;
};

// ---- packed matmuls ------------------------------------------------------------------------------------------------

template <class U>
class PackedMatmul {
  using Word = typename U::Word;
  using Acc = typename U::Acc;
  static constexpr int64_t P = kPanel<U>, depth = kDepth<U> * U::elements;
  static constexpr int64_t kPackRows = 48;  // a unit of packing; a multiple of every row step

 public:
  PackedMatmul(const Matmuls<U>& all, const Blocking& how)
      : all_(all), depths_(ceil_div(all.k, depth)), whole_(how.whole), dots_(all.takes_dots()), step_(dots_ ? kDotDepths : 1) {
    int64_t widest = 0;
    for (int i = 0; i < all.count; ++i) widest = larger(widest, all.families[i].n);
    tile_rows_ = round_up(how.tile_rows, kPackRows);
    rows_ = smaller(round_up(how.rows, tile_rows_), round_up(all.m, U::row_step));
    tile_rows_ = smaller(tile_rows_, rows_);
    tile_columns_ = smaller(round_up(how.tile_columns, P), round_up(widest, P));
    tile_ld_ = tile_columns_ + 64 / sizeof(Acc);  // rows a power of two apart would push each other out of L1
    tile_size_ = tile_rows_ * tile_ld_;
    sheets_ = tile_size_ * all.most_rights();
    parts_ = how.parts < 1 ? 1 : smaller<int64_t>(how.parts, larger<int64_t>(depths_, 1));
  }

  void run(int threads) {
    const int64_t words = rows_ * depths_ * kDepth<U>, tiles = tiles_of_all(rows_);
    const int64_t sums = all_.sums.store != nullptr ? round_up(rows_, kPackRows) * depths_ : 0;
    Rooms shared(scratch<0>(Rooms::bytes<Word>(words) + Rooms::bytes<Acc>(sums) +
                            (parts_ > 1 ? tiles * parts_ * sheets_ * sizeof(Acc) : 0)));
    packed_ = shared.take<Word>(words);
    sums_ = shared.take<Acc>(sums);
    partial_ = shared.take<Acc>(0);
    parallel_team(threads, [&] {
      for (int64_t m = 0; m < all_.m; m += rows_) {
        if (m > 0) team_wait();  // the packed rows before were still read
        some_rows(m, smaller(rows_, all_.m - m));
      }
    });
  }

 private:
  struct Tile {
    const Family<U>& family;
    int64_t m, rows, n, columns, number;
  };
  struct Room {
    Acc* results;
    Word* columns;
    void* block;
  };

  int64_t across(const Family<U>& family) const { return ceil_div(family.n, tile_columns_); }
  int64_t tiles_of(const Family<U>& family, int64_t rows) const { return ceil_div(rows, tile_rows_) * across(family); }
  int64_t tiles_of_all(int64_t rows) const {
    return all_.total([&](const Family<U>& family) { return tiles_of(family, rows); });
  }
  // Tiles that one thread stores one after the other make a run: a column of them, a row, or a tile by itself.
  int64_t runs_of(const Family<U>& family, int64_t rows) const {
    if (family.order == Order::none) return tiles_of(family, rows);
    return family.order == Order::down ? across(family) : ceil_div(rows, tile_rows_);
  }

  // The tile that is `own` of the family's, for `rows` rows. All tiles have numbers, those of the first family first.
  Tile tile_of(const Family<U>& family, int64_t own, int64_t rows) const {
    const int64_t r = own / across(family) * tile_rows_, n = own % across(family) * tile_columns_;
    for (const Family<U>* before = all_.families; before != &family; ++before) own += tiles_of(*before, rows);
    return {family, r, smaller(tile_rows_, rows - r), n, smaller(tile_columns_, family.n - n), own};
  }
  // Calls f(tile) for each tile of a run of the matmuls of `rows` rows, in order.
  template <class F>
  void each_of_run(const Family<U>& family, int64_t run, int64_t rows, F f) const {
    const int64_t down = ceil_div(rows, tile_rows_), wide = across(family);
    switch (family.order) {
      case Order::none: return f(tile_of(family, run, rows));
      case Order::down:
        for (int64_t i = 0; i < down; ++i) f(tile_of(family, i * wide + run, rows));
        return;
      case Order::along:
        for (int64_t j = 0; j < wide; ++j) f(tile_of(family, run * wide + j, rows));
    }
  }

  // Blocks of k stand together by steps of as many as are multiplied at a time, those of the last one perhaps fewer: the first
  // block of d's step, the words of a row in that, and where block d of row r (the first of a panel) begins among `rows` rows.
  int64_t step_of(int64_t d) const { return d / step_ * step_; }
  int64_t words_of_step(int64_t d) const { return smaller(step_, depths_ - step_of(d)) * kDepth<U>; }
  int64_t row_place(int64_t d, int64_t r, int64_t rows) const {
    const int64_t first = step_of(d);
    return first * rows * kDepth<U> + r * words_of_step(d) + (d - first) * kDotRows * kDepth<U>;
  }
  // The block with which a part of the sum begins.
  int64_t begin_of(int64_t part) const { return smaller(depths_, ceil_div(depths_, step_) * part / parts_ * step_); }

  // All columns of the results of rows m, ..., m + rows - 1.
  void some_rows(int64_t m, int64_t rows) {
    const int64_t padded = round_up(rows, U::row_step);
    Rooms own(scratch<1>(Rooms::bytes<Acc>(sheets_) + Rooms::bytes<Word>(tile_columns_ * kDepth<U>) +
                         larger(larger(all_.left.room(kPackRows, depth), all_.room(tile_columns_, depth)),
                                all_.room(kFilledDots, depth * kDotDepths))));
    const Room room{own.take<Acc>(sheets_), own.take<Word>(tile_columns_ * kDepth<U>), own.take<char>(0)};
    const int64_t chunks = ceil_div(rows, kPackRows);
    team_share(chunks * depths_, [&](int64_t unit) {
      const int64_t r = unit % chunks * kPackRows, k = unit / chunks * depth;
      const Block block{m + r, smaller(kPackRows, rows - r), k, smaller(depth, all_.k - k)};
      const Panels panels{dots_ ? kDotRows : kRows<U>, words_of_step(unit / chunks)};
      Word* const to = packed_ + row_place(unit / chunks, r, padded);
      all_.left.pack_row_panels(all_.left.self, block, smaller(kPackRows, padded - r), panels, to, room.block);
      if (all_.sums.store != nullptr) {
        sum_row_panels<U>(to, smaller(kPackRows, padded - r), panels, words_of<U>(block.nk), sums_ + unit * kPackRows);
      }
    });
    team_wait();
    if (all_.sums.store != nullptr) store_sums(m, rows, chunks);
    if (parts_ == 1) {
      const auto runs = [&](const Family<U>& family) { return runs_of(family, rows); };
      team_share(all_.total(runs), [&](int64_t task) {
        all_.with(task, runs, [&](const Family<U>& family, int64_t run) {
          each_of_run(family, run, rows, [&](const Tile& tile) {
            multiply_all(tile, {0, depths_}, padded, room.results, room);
            store(m, tile, 0, tile.rows, room.results);
          });
        });
      });
      return;
    }
    const auto shares = [&](const Family<U>& family) { return tiles_of(family, rows) * parts_; };
    team_share(all_.total(shares), [&](int64_t task) {
      all_.with(task, shares, [&](const Family<U>& family, int64_t own) {
        const int64_t part = own % parts_;
        const Depths share{begin_of(part), begin_of(part + 1)};
        multiply_all(tile_of(family, own / parts_, rows), share, padded, partial_ + task * sheets_, room);
      });
    });
    team_wait();
    add_parts(m, rows);
  }

  // Adds up what the blocks along k of each row make, in their order.
  void store_sums(int64_t m, int64_t rows, int64_t chunks) {
    team_share(chunks, [&](int64_t chunk) {
      alignas(64) Acc sums[kPackRows] = {};
      for (int64_t d = 0; d < depths_; ++d) {
        for (int64_t i = 0; i < kPackRows; ++i) sums[i] += sums_[(d * chunks + chunk) * kPackRows + i];
      }
      all_.sums.store(all_.sums.self, m + chunk * kPackRows, smaller(kPackRows, rows - chunk * kPackRows), sums);
    });
  }

  void add_parts(int64_t m, int64_t rows) {
    const int64_t strip = whole_ ? tile_rows_ : 8;  // rows that a thread adds up at a time
    const int64_t strips = ceil_div(tile_rows_, strip);
    const auto tasks = [&](const Family<U>& family) {
      return runs_of(family, rows) * (family.order == Order::none ? strips : 1);
    };
    team_share(all_.total(tasks), [&](int64_t task) {
      all_.with(task, tasks, [&](const Family<U>& family, int64_t own) {
        if (family.order == Order::none) return add_strip(m, tile_of(family, own / strips, rows), own % strips * strip, strip);
        each_of_run(family, own, rows, [&](const Tile& tile) {
          for (int64_t r = 0; r < tile.rows; r += strip) add_strip(m, tile, r, strip);
        });
      });
    });
  }

  void add_strip(int64_t m, const Tile& tile, int64_t r, int64_t strip) const {
    if (r >= tile.rows) return;
    const int64_t count = smaller(strip, tile.rows - r);
    Acc* const first = partial_ + tile.number * parts_ * sheets_ + r * tile_ld_;
    for (int sheet = 0; sheet < tile.family.count; ++sheet) {
      Acc* const to = first + sheet * tile_size_;
      for (int64_t part = 1; part < parts_; ++part) {
        for (int64_t i = 0; i < count * tile_ld_; ++i) to[i] += to[part * sheets_ + i];
      }
    }
    store(m, tile, r, count, first);
  }

  void store(int64_t m, const Tile& tile, int64_t r, int64_t rows, const Acc* from) const {
    tile.family.store(tile.family.self, m + tile.m + r, tile.n, rows, tile.columns, from, tile_size_, tile_ld_);
  }

  struct Depths {
    int64_t begin, end;
  };

  // One rectangle of results of all matmuls of its family, over some blocks of k.
  void multiply_all(const Tile& tile, Depths share, int64_t block_rows, Acc* results, const Room& room) {
    for (int i = 0; i < tile.family.count; ++i) {
      multiply(tile, tile.family.rights[i], share, block_rows, results + i * tile_size_, room);
    }
  }

  // One rectangle of results of one matmul.
  void multiply(const Tile& tile, const Operand<U>& right, Depths share, int64_t block_rows, Acc* results, const Room& room) {
    [[maybe_unused]] const tiles_t<U> registers;
    const int64_t padded = round_up(tile.rows, U::row_step);
    if (share.begin == share.end) {
      for (int64_t i = 0; i < padded * tile_ld_; ++i) results[i] = Acc(0);
    }
    if (dots_) {
      for (int64_t d = share.begin; d < share.end; d += step_) {
        const int64_t k = d * depth, nk = smaller(step_ * depth, all_.k - k);
        right.dots(right.self, {tile.n, tile.columns, k, nk}, packed_ + row_place(d, tile.m, block_rows), words_of_step(d), padded,
                   results, tile_ld_, d == share.begin, room.block);
      }
      return;
    }
    for (int64_t d = share.begin; d < share.end; ++d) {
      const int64_t k = d * depth, nk = smaller(depth, all_.k - k);
      const Word* columns = room.columns;
      int64_t column = kDepth<U>;  // words from one to the next, by panels
      if (right.packed != nullptr) {
        column = right.packed_depth;
        columns = right.packed + tile.n * column + d * kDepth<U> * P;
      } else {
        right.pack_panels(right.self, {tile.n, tile.columns, k, nk}, room.columns, room.block);
      }
      const Word* const rows = packed_ + row_place(d, tile.m, block_rows);
      for (int64_t n = 0; n < tile.columns; n += P) {
        multiply_panel<U>(rows, columns + n * column, words_of<U>(nk), results + n, tile_ld_, padded, d == share.begin,
                          tile.columns - n);
      }
    }
  }

  const Matmuls<U>& all_;
  int64_t depths_, rows_, tile_rows_, tile_columns_, tile_ld_, tile_size_, sheets_, parts_;
  bool whole_, dots_;
  int64_t step_;  // blocks of k that are multiplied at a time
  Word* packed_ = nullptr;
  Acc* partial_ = nullptr;
  Acc* sums_ = nullptr;  // of the packed rows, block by block
};

// ---- entries --------------------------------------------------------------------------------------------------------

// Threads worth waking for so many multiplications.
KGEN_FN int useful_threads(int threads, int64_t work) { return int(smaller<int64_t>(threads, larger<int64_t>(1, work / kGrain))); }

template <class U>
[[gnu::noinline]] void multiply(int threads, const Blocking& how, const Matmuls<U>& all) {
  const int64_t n = all.total([](const Family<U>& family) { return family.n; });
  if (all.m <= 0 || n <= 0) return;
  // a few rows are read, not multiplied: for 8 of them that takes as long
  const int useful = useful_threads(threads, larger<int64_t>(all.m, 8) * larger<int64_t>(n, 8) * all.k);
  if (how.few_rows > 0 && all.sums.store == nullptr && !all.packed()) {
    const int64_t store_width = how.whole ? how.tile_columns : 0;
    if (FewRowsMatmul<U>::wanted(all, how.few_rows)) return FewRowsMatmul<U>(all, store_width).run(useful);
    if (!how.whole && FewColumns<U>::wanted(all, how.few_rows)) return FewColumns<U>(all).run(useful);
  }
  PackedMatmul<U>(all, how).run(useful);
}

// All results of a (m by k) times the right operands of `columns`. Operands are Strided or Filled.
template <class A, class First, class... Columns>
KGEN_FN void matmul(int threads, int64_t m, int64_t k, const Blocking& how, const A& a, const First& first, const Columns&... more) {
  using U = typename First::template unit<A>;
  const bool few = how.few_rows > 0;
  const Family<U> families[] = {first.template family<U>(few), more.template family<U>(few)...};
  multiply<U>(threads, how, {m, k, operand_of<U>(a, few), families, 1 + int(sizeof...(Columns)), sums_of<U>(a)});
}

// Packs the columns of `count` right operands, all n columns and k elements, one after the other, for matmuls with a left
// operand of type A: what `Packed` reads. `from(b)` is operand b, Strided; `to` has room for count * packed_words(n, k) words.
template <class A, class F>
void pack_columns(int threads, int64_t count, int64_t n, int64_t k, F from, void* to) {
  using T = typename decltype(from(int64_t(0)))::Element;
  using U = unit_t<A, T>;
  const int64_t panels = ceil_div(n, kPanel<U>), words = kPanel<U> * packed_depth<U>(k);
  parallel_for(threads, count * panels, 1, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      const int64_t i = panel % panels * kPanel<U>;
      const auto view = from(panel / panels).view(i, 0, 0, 0, nullptr);
      pack_column(Words<U, T>{view, smaller(kPanel<U>, n - i), k}, static_cast<typename U::Word*>(to) + panel * words);
    }
  });
}
template <class A, class T>
KGEN_FN constexpr int64_t packed_bytes(int64_t n, int64_t k) {
  using U = unit_t<A, T>;
  return packed_words<U>(n, k) * int64_t(sizeof(typename U::Word));
}

// Calls f(batch, threads) for one batch after the other: batches, too, may go to one place.
template <class F>
inline void batches_in_turn(int threads, int64_t batches, F f) {
  for (int64_t b = 0; b < batches; ++b) f(b, threads);
}

// Calls f(batch, threads) for every batch of matmuls of `work` pairs of numbers each: as many of them at a time as there are
// threads, or, of a few large ones, one after the other with all threads.
template <class F>
inline void share_batches(int threads, int64_t batches, int64_t work, F f) {
  const bool few = batches < 4 * threads && batches % threads != 0 && work >= kGrain * threads;
  if (batches == 1 || few) {
    for (int64_t b = 0; b < batches; ++b) f(b, threads);
    return;
  }
  const int64_t grain = larger<int64_t>(1, kGrain / larger<int64_t>(work, 1));
  parallel_for(threads, batches, grain, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) f(b, 1);
  });
}

}  // namespace kgen

// ---- loops compiled once --------------------------------------------------------------------------------------------

// A unit with `KGEN_MATMUL(A, B)` compiles no matmul loops for elements of types A (left) and B (right): they are objects,
// compiled once a machine, that the build links to it (`objects` of kgen/build/cpp.py:Unit, templates/cpp/codegen/engine.py).
// What is left for the unit takes a tenth of the time. Their functions are the same and were never inlined. With KGEN_OWN_LOOPS
// it has them itself.
#ifdef KGEN_OWN_LOOPS
#define KGEN_MATMUL(A, B)
#else
#define KGEN_MATMUL(A, B)                 \
  KGEN_LOOPS_OF_MATMUL(extern, A, B)      \
  KGEN_LOOPS_OF_PACKING(extern, A, B, A)  \
  KGEN_LOOPS_OF_PACKING(extern, A, B, B)  \
  KGEN_LOOPS_OF_FEW_ROWS(extern, A, B, A) \
  KGEN_LOOPS_OF_FEW_ROWS(extern, A, B, B)
#endif
// An object is one of these, with nothing for `how`: all of a matmul but what reads its operands, what packs or multiplies
// those of type T, and what multiplies a few rows by them.
#define KGEN_LOOPS_OF_MATMUL(how, A, B)                                                          \
  namespace kgen {                                                                               \
  how template void multiply<unit_t<A, B>>(int, const Blocking&, const Matmuls<unit_t<A, B>>&);  \
  }
#define KGEN_LOOPS_OF_PACKING(how, A, B, T)                                                                                 \
  namespace kgen {                                                                                                          \
  how template void pack_rows(Words<unit_t<A, B>, T>, int64_t, unit_t<A, B>::Word*, int64_t);                               \
  how template void pack_row_panels(Words<unit_t<A, B>, T>, int64_t, Panels, unit_t<A, B>::Word*);                          \
  how template void pack_panels(Words<unit_t<A, B>, T>, unit_t<A, B>::Word*);                                               \
  how template void dot_block(const unit_t<A, B>::Word*, Words<unit_t<A, B>, T>, unit_t<A, B>::Acc*, int64_t, bool, Prefetch); \
  }
#define KGEN_LOOPS_OF_FEW_ROWS(how, A, B, T)                                                                             \
  namespace kgen {                                                                                                       \
  how template void FewRows<unit_t<A, B>>::multiply(Words<unit_t<A, B>, T>, int64_t, unit_t<A, B>::Acc*, int64_t) const; \
  }
