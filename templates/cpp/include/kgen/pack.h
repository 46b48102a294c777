// Operands of a matmul, and how their values come into packed words (microkernel.h).
//
// Both operands are seen in one way: element (i, k), where i is a row of the left operand or a column of the right one, and k
// is summed over. An operand is either memory with strides (Strided) or a function that computes a block of values (Filled).
#pragma once

#include "microkernel.h"
#include "tile.h"

namespace kgen {

// Element (i, k) is at data[i * i_stride + k * k_stride]; any strides, zero and negative ones too.
template <class T>
struct Strided {
  using Element = T;
  static constexpr bool in_place = true;
  const T* data;
  int64_t i_stride, k_stride;

  KGEN_FN bool along_k() const { return k_stride == 1; }
  KGEN_FN Strided view(int64_t i, int64_t, int64_t k, int64_t, T*) const {
    return {data + i * i_stride + k * k_stride, i_stride, k_stride};
  }
};

// Which neighbours are computed into neighbouring places: those along k, or those along the operand's own axis i.
enum class Along { k, i };

// Values that `fill(i0, ni, k0, nk, to, ld)` computes into to[(i - i0) * ld + (k - k0)] (Along::k) or
// to[(k - k0) * ld + (i - i0)] (Along::i), for i0 <= i < i0 + ni and k0 <= k < k0 + nk. Called by several threads at once, perhaps
// more than once for a value; `to` is a thread's own memory at a multiple of 64 bytes, as is every ld elements after it.
template <class T, Along A, class F>
struct Filled {
  using Element = T;
  static constexpr bool in_place = false;
  F fill;

  KGEN_FN static constexpr bool along_k() { return A == Along::k; }
  KGEN_FN Strided<T> view(int64_t i, int64_t ni, int64_t k, int64_t nk, T* room) const {
    const int64_t ld = ((A == Along::k ? nk : ni) + 63) / 64 * 64;
    fill(i, ni, k, nk, room, ld);
    if constexpr (A == Along::k) return {room, ld, 1};
    else return {room, 1, ld};
  }
};
template <class T, Along A, class F>
KGEN_FN Filled<T, A, F> filled(F fill) {
  return {fill};
}


// The same of a function that takes blocks which are all of one run along both axes, whose runs have these lengths (0: any).
template <class T, Along A, class F>
KGEN_FN auto filled(F fill, int64_t run_i, int64_t run_k) {
  return filled<T, A>([=](int64_t i0, int64_t ni, int64_t k0, int64_t nk, T* to, int64_t ld) {
    const auto in_run = [](int64_t at, int64_t end, int64_t run) { return run > 0 ? smaller(end - at, run - at % run) : end - at; };
    for (int64_t k = k0; k < k0 + nk;) {
      const int64_t some_k = in_run(k, k0 + nk, run_k);
      for (int64_t i = i0; i < i0 + ni;) {
        const int64_t some_i = in_run(i, i0 + ni, run_i);
        fill(i, some_i, k, some_k, to + (A == Along::k ? (i - i0) * ld + (k - k0) : (k - k0) * ld + (i - i0)), ld);
        i += some_i;
      }
      k += some_k;
    }
  });
}

// Elements that a view of ni by nk needs as room: in either orientation.
KGEN_FN constexpr int64_t room_of(int64_t ni, int64_t nk) { return (ni + 63) / 64 * 64 * ((nk + 63) / 64 * 64); }

// Columns of a right operand that were packed before the call (pack_columns), all `k` elements of each; T is the type they had.
template <class T>
struct Packed {
  using Element = T;
  const void* words;
  int64_t k;
};

// Whether the elements of one i may be neighbours, as far as the type tells.
template <class S>
inline constexpr bool may_lie_along_k = true;
template <class T, class F>
inline constexpr bool may_lie_along_k<Filled<T, Along::i, F>> = false;
template <class T>
inline constexpr bool may_lie_along_k<Packed<T>> = false;

// ---- words of a view ------------------------------------------------------------------------------------------------

// A view's ni by nk elements as words of unit U; zero beyond them.
template <class U, class T>
struct Words {
  static constexpr int L = word_lanes<U>, E = U::elements;
  using Word = typename U::Word;
  using R = Register<Word, L>;
  Strided<T> view;
  int64_t ni, nk;

  // bfloat16 that stay bfloat16 are moved as bits.
  using Moved = std::conditional_t<is_narrow_float<T> && std::is_same_v<typename U::Element, uint16_t>, uint16_t, T>;

  template <int N, class V, class W>
  KGEN_FN static auto load_as(const T* p, int64_t stride, V, W w) {
    const auto* from = reinterpret_cast<const Moved*>(p);
    return cast_<V>(stride == 1 ? load<N>(from, w) : load_strided<N>(from, stride, w));
  }

  // Words k, k + 1, ... of i, one a lane; k < words_of(nk).
  KGEN_FN R along_k(int64_t i, int64_t k) const {
    const int64_t left = nk - k * E;
    if (i >= ni || left <= 0) return R{};
    const T* p = view.data + i * view.i_stride + k * E * view.k_stride;
    using V = typename U::Element;
    if (left >= E * L) return bits_as<R>(load_as<E * L>(p, view.k_stride, V{}, Full<E * L>{}));
    return bits_as<R>(load_as<E * L>(p, view.k_stride, V{}, Tail<E * L>{left}));
  }
  // Asks for what along_i(i, k) reads; nothing has to be there.
  KGEN_FN void prefetch(int64_t i, int64_t k) const {
    const T* p = view.data + i * view.i_stride + k * E * view.k_stride;
    KGEN_UNROLL for (int e = 0; e < E; ++e) __builtin_prefetch(p + e * view.k_stride);
  }
  // The same of elements that are neighbours from `p`.
  template <class W>
  KGEN_FN R words_at(const T* p, W w) const {
    return bits_as<R>(load_as<E * L>(p, 1, typename U::Element{}, w));
  }

  // Word k of i, i + 1, ..., one a lane.
  KGEN_FN R along_i(int64_t i, int64_t k) const {
    const int64_t left = ni - i;
    if (left >= L) return along_i(i, k, Full<L>{});
    return left > 0 ? along_i(i, k, Tail<L>{left}) : R{};
  }
  // The same for a number of lanes that is known not to go beyond the view.
  template <class W>
  KGEN_FN R along_i(int64_t i, int64_t k, W w) const {
    const T* p = view.data + i * view.i_stride + k * E * view.k_stride;
    if (k * E >= nk) return R{};
    if constexpr (E == 1) {
      return bits_as<R>(load_as<L>(p, view.i_stride, Word{}, w));
    } else {
      const R low = bits_as<R>(load_as<L>(p, view.i_stride, Word{}, w));
      if (k * E + 1 >= nk) return low & 0xffff;
      const R high = bits_as<R>(load_as<L>(p + view.k_stride, view.i_stride, Word{}, w));
      return (low & 0xffff) | (high << 16);
    }
  }
};

// ---- packing --------------------------------------------------------------------------------------------------------

// Rows of words, word k of row i at place(i, k). Writes `rows` rows and words_of(nk) words of each, rounded up to a register.
template <class U, class T, class Place>
KGEN_FN void place_rows(const Words<U, T>& from, int64_t rows, Place place) {
  constexpr int L = word_lanes<U>;
  using R = typename Words<U, T>::R;
  const int64_t words = words_of<U>(from.nk);
  if (from.view.i_stride == 1 && from.view.k_stride != 1) {
    for (int64_t i = 0; i < rows; i += L) {
      for (int64_t k = 0; k < words; k += L) {
        R block[L];
        KGEN_UNROLL for (int t = 0; t < L; ++t) block[t] = from.along_i(i, k + t);
        transpose_registers(block);
        KGEN_UNROLL for (int t = 0; t < L; ++t) {
          if (i + t < rows) __builtin_memcpy(place(i + t, k), &block[t], sizeof(R));
        }
      }
    }
  } else {
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t k = 0; k < words; k += L) {
        const R row = from.along_k(i, k);
        __builtin_memcpy(place(i, k), &row, sizeof(R));
      }
    }
  }
}
template <class U, class T>
[[gnu::noinline]] void pack_rows(Words<U, T> from, int64_t rows, typename U::Word* to, int64_t ld) {
  place_rows(from, rows, [&](int64_t i, int64_t k) KGEN_INLINE { return to + i * ld + k; });
}

// Where packed rows stand: in panels of `rows` (the last one may have less), `words` words of each row in a panel.
struct Panels {
  int64_t rows, words;
};

// Panels of rows, the first at `to`: `rows` of them, a multiple of the row step. Those for multiply_panel have kRows rows and kDepth
// words of each.
template <class U, class T>
[[gnu::noinline]] void pack_row_panels(Words<U, T> from, int64_t rows, Panels panels, typename U::Word* to) {
  constexpr int64_t L = word_lanes<U>;
  place_rows(from, rows, [&](int64_t i, int64_t k) KGEN_INLINE {
    const int64_t first = i / panels.rows * panels.rows;
    return to + first * panels.words + k * smaller(panels.rows, rows - first) + (i - first) * L;
  });
}

// The sums of `rows` packed rows, each of `words`: what pack_row_panels has just written is still in L1.
template <class U>
[[gnu::noinline]] void sum_row_panels(const typename U::Word* from, int64_t rows, Panels panels, int64_t words, typename U::Acc* to) {
  constexpr int L = word_lanes<U>, Rows = smaller(4, int(U::row_step));
  using R = Register<typename U::Word, L>;
  using S = Register<typename U::Acc, L>;
  for (int64_t i = 0; i < rows; i += Rows) {
    const int64_t first = i / panels.rows * panels.rows, step = smaller(panels.rows, rows - first) * L;
    const typename U::Word* row = from + first * panels.words + (i - first) * L;
    S sums[Rows] = {};
    for (int64_t k = 0; k < words; k += L, row += step) {
      KGEN_UNROLL for (int r = 0; r < Rows; ++r) sums[r] = U::add(sums[r], register_at<R>(row + r * L));
    }
    KGEN_UNROLL for (int r = 0; r < Rows; ++r) {
      typename U::Acc sum = 0;
      for (int lane = 0; lane < L; ++lane) sum += sums[r][lane];
      to[i + r] = sum;
    }
  }
}

// Panels of columns: word k of column i at to[i / kPanel * kPanel * kDepth + k * kPanel + i % kPanel], for whole panels.
template <class U, class T>
[[gnu::noinline]] void pack_panels(Words<U, T> from, typename U::Word* to) {
  constexpr int L = word_lanes<U>;
  constexpr int64_t P = kPanel<U>;
  using R = typename Words<U, T>::R;
  const int64_t words = words_of<U>(from.nk), columns = (from.ni + P - 1) / P * P;
  const auto place = [&](int64_t i, int64_t k) KGEN_INLINE { return to + i / P * P * kDepth<U> + k * P + i % P; };
  if (from.view.k_stride == 1 && from.view.i_stride != 1) {
    for (int64_t i = 0; i < columns; i += L) {
      for (int64_t k = 0; k < words; k += L) {
        R block[L];
        KGEN_UNROLL for (int t = 0; t < L; ++t) block[t] = from.along_k(i + t, k);
        transpose_registers(block);
        // whole registers: kDepth is a multiple of L
        KGEN_UNROLL for (int t = 0; t < L; ++t) __builtin_memcpy(place(i, k + t), &block[t], sizeof(R));
      }
    }
  } else {
    for (int64_t k = 0; k < words; ++k) {
      for (int64_t i = 0; i < columns; i += L) {
        from.prefetch(i, k + 4);
        const R row = from.along_i(i, k);
        __builtin_memcpy(place(i, k), &row, sizeof(R));
      }
    }
  }
}

// Words along k of a panel of columns that is packed whole; pack_panels writes whole registers along k.
template <class U>
KGEN_FN constexpr int64_t packed_depth(int64_t k) {
  return (words_of<U>(k) + word_lanes<U> - 1) / word_lanes<U> * word_lanes<U>;
}
// Words of n packed columns.
template <class U>
KGEN_FN constexpr int64_t packed_words(int64_t n, int64_t k) {
  return (n + kPanel<U> - 1) / kPanel<U> * kPanel<U> * packed_depth<U>(k);
}
// Packs a panel of columns over all of k: word k of column i at to[k * kPanel + i], so that the blocks along k that pack_panels
// makes one by one follow each other.
template <class U, class T>
void pack_column(Words<U, T> from, typename U::Word* to) {
  constexpr int64_t depth = kDepth<U> * U::elements;
  for (int64_t k = 0; k < from.nk; k += depth) {
    const Words<U, T> block{from.view.view(0, 0, k, 0, nullptr), from.ni, smaller(depth, from.nk - k)};
    pack_panels(block, to + k / U::elements * kPanel<U>);
  }
}

}  // namespace kgen
