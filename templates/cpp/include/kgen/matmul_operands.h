// A matmul as its loops see it: operands and results whose types are hidden behind functions on whole blocks, so that all
// matmuls of a unit share one copy of the loops, whatever their operands and epilogues.
#pragma once

#include "dots.h"
#include "few_rows.h"
#include "team.h"

namespace kgen {

// Right operands of one kernel's matmuls with a joint epilogue, at most.
inline constexpr int kFamily = 4;

// A block of an operand: its rows (columns, of a right operand) i, ..., i + ni - 1 and the elements k, ..., k + nk - 1 of each.
struct Block {
  int64_t i, ni, k, nk;
};

// An operand for matmuls of unit U. `room` is a thread's memory, of `element` bytes for each value of a block (room_of).
template <class U>
struct Operand {
  using Word = typename U::Word;
  using Acc = typename U::Acc;
  const void* self;
  bool along_k, in_place;
  int64_t element;
  void (*pack_rows)(const void* self, Block block, int64_t rows, Word* to, int64_t ld, void* room);
  void (*pack_row_panels)(const void* self, Block block, int64_t rows, Panels panels, Word* to, void* room);
  void (*pack_panels)(const void* self, Block block, Word* to, void* room);
  // Adds the dot products with a few packed rows to c.
  void (*multiply)(const void* self, Block block, const FewRows<U>& x, Acc* c, int64_t ldc, void* room);
  // Of columns that were packed before the call, and the words of each; then there are no functions.
  const Word* packed = nullptr;
  int64_t packed_depth = 0;
  // Dot products of packed rows with columns where they lie (dot_panels). None where columns cannot be so read.
  void (*dots)(const void* self, Block block, const Word* x, int64_t words, int64_t rows, Acc* c, int64_t ldc, bool first,
               void* room) = nullptr;

  int64_t room(int64_t ni, int64_t nk) const { return room_of(ni, nk) * element; }
  bool takes_dots(int64_t rows) const { return dots != nullptr && along_k && rows <= kMostDotRows && !tiles_t<U>::granted(); }
};

template <class U, class S>
struct OperandFunctions {
  using Word = typename U::Word;
  using T = typename S::Element;

  static Words<U, T> words(const void* self, Block b, void* room) {
    return {static_cast<const S*>(self)->view(b.i, b.ni, b.k, b.nk, static_cast<T*>(room)), b.ni, b.nk};
  }
  static void rows(const void* self, Block block, int64_t rows, Word* to, int64_t ld, void* room) {
    pack_rows(words(self, block, room), rows, to, ld);
  }
  static void row_panels(const void* self, Block block, int64_t rows, Panels panels, Word* to, void* room) {
    pack_row_panels(words(self, block, room), rows, panels, to);
  }
  static void panels(const void* self, Block block, Word* to, void* room) { pack_panels(words(self, block, room), to); }
  static void multiply(const void* self, Block block, const FewRows<U>& x, typename U::Acc* c, int64_t ldc, void* room) {
    x.multiply(words(self, block, room), block.k, c, ldc);
  }
  static void dots(const void* self, Block block, const Word* x, int64_t n_words, int64_t rows, typename U::Acc* c, int64_t ldc,
                   bool first, void* room) {
    const int64_t at_once = S::in_place ? block.ni : kFilledDots;
    for (int64_t i = 0; i < block.ni; i += at_once) {
      const Block some{block.i + i, smaller(at_once, block.ni - i), block.k, block.nk};
      dot_panels(x, n_words, rows, words(self, some, room), c + i, ldc, first);
    }
  }
};

// `few`: whether the operand may have to multiply a few rows in place.
template <class U, class S>
KGEN_FN Operand<U> operand_of(const S& from, bool few) {
  using F = OperandFunctions<U, S>;
  return {&from, from.along_k(), S::in_place, S::in_place ? 0 : int64_t(sizeof(typename S::Element)), F::rows, F::row_panels,
          F::panels, few ? F::multiply : nullptr};
}

template <class U, class T>
KGEN_FN Operand<U> operand_of(const Packed<T>& from, bool) {
  return {&from, true, true, 0, nullptr, nullptr, nullptr, nullptr, static_cast<const typename U::Word*>(from.words),
          packed_depth<U>(from.k)};
}

// A right operand: one whose columns may be read where they lie.
template <class U, class S>
KGEN_FN Operand<U> right_operand_of(const S& from, bool few) {
  Operand<U> out = operand_of<U>(from, few);
  if constexpr (may_lie_along_k<S>) out.dots = OperandFunctions<U, S>::dots;
  return out;
}

// Sums of the left operand's rows over k, which are made as these are packed: `store(m0, rows, sums)` gets each exactly once.
template <class S, class F>
struct Summed {
  using Element = typename S::Element;
  const S& operand;
  const F& store;
};
template <class S, class F>
KGEN_FN Summed<S, F> summed(const S& operand, const F& store) {
  return {operand, store};
}

template <class U>
struct RowSums {
  const void* self = nullptr;
  void (*store)(const void* self, int64_t m0, int64_t rows, const typename U::Acc* sums) = nullptr;
};
template <class U, class F>
void store_sums(const void* self, int64_t m0, int64_t rows, const typename U::Acc* sums) {
  (*static_cast<const F*>(self))(m0, rows, sums);
}
template <class U, class S>
KGEN_FN RowSums<U> sums_of(const S&) {
  return {};
}
template <class U, class S, class F>
KGEN_FN RowSums<U> sums_of(const Summed<S, F>& from) {
  return {&from.store, store_sums<U, F>};
}
template <class U, class S, class F>
KGEN_FN Operand<U> operand_of(const Summed<S, F>& from, bool few) {
  return operand_of<U>(from.operand, few);
}

// ---- results --------------------------------------------------------------------------------------------------------

// What of the results has to be stored in order, because rows (or columns) may go to one place: rectangles with the same columns
// from the first row down, or rectangles with the same rows along the columns. Threads share what is left.
enum class Order { none, down, along };

// Matmuls with `count` right operands of n columns each, and what becomes of a rectangle of their results: `store` gets the
// first matmul's, the others' each `next` elements further, in `order`.
template <class U>
struct Family {
  using Acc = typename U::Acc;
  int64_t n;
  int count;
  Operand<U> rights[kFamily];
  const void* self;
  void (*store)(const void* self, int64_t m0, int64_t n0, int64_t rows, int64_t columns, const Acc* tile, int64_t next, int64_t ld);
  Order order = Order::none;

  bool along_k() const {
    for (int i = 0; i < count; ++i) {
      if (!rights[i].along_k) return false;
    }
    return true;
  }
  bool packed() const {
    for (int i = 0; i < count; ++i) {
      if (rights[i].packed != nullptr) return true;
    }
    return false;
  }
  int64_t room(int64_t ni, int64_t nk) const {
    int64_t most = 0;
    for (int i = 0; i < count; ++i) most = larger(most, rights[i].room(ni, nk));
    return most;
  }
};

template <class U, class Store, int Count>
void store_tiles(const void* self, int64_t m0, int64_t n0, int64_t rows, int64_t columns, const typename U::Acc* tile, int64_t next,
                 int64_t ld) {
  [&]<int... I>(Lanes<I...>) {
    (*static_cast<const Store*>(self))(m0, n0, rows, columns, (tile + I * next)..., ld);
  }(lane_numbers<Count>{});
}

// What `columns` makes: `apply(f)` is f(right operands...).
template <class Store, class Apply, int Count>
struct Columns {
  int64_t n;
  const Store& store;
  Apply apply;
  Order order;

  template <class A>
  using unit = decltype(apply([](const auto& first, const auto&...) {
    return unit_t<typename A::Element, typename std::decay_t<decltype(first)>::Element>{};
  }));
  template <class U>
  KGEN_FN Family<U> family(bool few) const {
    return apply([&](const auto&... rights) KGEN_INLINE {
      return Family<U>{n, Count, {right_operand_of<U>(rights, few)...}, &store, store_tiles<U, Store, Count>, order};
    });
  }
};

// Right operands, n columns each, whose results `store(m0, n0, rows, columns, tile..., ld)` gets together, a tile of each. All of it
// has to live until the matmul is done.
template <Order order = Order::none, class Store, class... B>
KGEN_FN auto columns(int64_t n, const Store& store, const B&... rights) {
  static_assert(0 < sizeof...(B) && sizeof...(B) <= kFamily);
  const auto apply = [&](auto f) KGEN_INLINE { return f(rights...); };
  return Columns<Store, decltype(apply), int(sizeof...(B))>{n, store, apply, order};
}

// The matmuls, all with the same left operand.
template <class U>
struct Matmuls {
  int64_t m, k;
  Operand<U> left;
  const Family<U>* families;
  int count;
  RowSums<U> sums = {};

  bool packed() const {
    for (int i = 0; i < count; ++i) {
      if (families[i].packed()) return true;
    }
    return false;
  }
  // Whether all columns are multiplied where they lie.
  bool takes_dots() const {
    for (int i = 0; i < count; ++i) {
      for (int r = 0; r < families[i].count; ++r) {
        if (!families[i].rights[r].takes_dots(m)) return false;
      }
    }
    return true;
  }
  int most_rights() const {
    int most = 1;
    for (int i = 0; i < count; ++i) most = larger(most, families[i].count);
    return most;
  }
  int64_t room(int64_t ni, int64_t nk) const {
    int64_t most = 0;
    for (int i = 0; i < count; ++i) most = larger(most, families[i].room(ni, nk));
    return most;
  }
  bool stores(Order order) const {
    for (int i = 0; i < count; ++i) {
      if (families[i].order == order) return true;
    }
    return false;
  }
  // Calls f(family, number) for the task that is `number` in all families, of which each has tasks(family).
  template <class Tasks, class F>
  void with(int64_t number, Tasks tasks, F f) const {
    const Family<U>* family = families;
    for (int64_t own; number >= (own = tasks(*family)); ++family) number -= own;
    f(*family, number);
  }
  template <class Tasks>
  int64_t total(Tasks tasks) const {
    int64_t sum = 0;
    for (int i = 0; i < count; ++i) sum += tasks(families[i]);
    return sum;
  }
};

}  // namespace kgen
