// Loads and stores of every S-th element, S = 2, 3 or 4: whole registers and shuffles instead of one memory operation a lane.
#pragma once

#include "memory.h"

namespace kgen {

// Lane i of a mask at bit i * S.
template <int S, int L>
KGEN_FN Mask<L * S> spread_mask(Mask<L> mask) {
#if KGEN_AVX512
  return {typename Mask<L * S>::Bits(_pdep_u64(mask_bits(mask), S == 2 ? 0x5555555555555555u : 0x1111111111111111u))};
#else
  const auto from = spill(mask);
  Spilled<bool, L * S> out{};
  for (int i = 0; i < L; ++i) out.lane[i * S] = from.lane[i];
  return unspill(out);
#endif
}

// Lanes 0, 2, 4, ... of two registers one after the other.
template <class R>
KGEN_FN R even_lanes(R low, R high) {
  return [&]<int... I>(Lanes<I...>) KGEN_INLINE {
    return __builtin_shufflevector(low, high, (2 * I)...);
  }(lane_numbers<sizeof(R) / sizeof(low[0])>{});
}

template <class T, int L>
KGEN_FN Vec<T, L / 2> even_lanes(Vec<T, L> v) {
  constexpr int N = Vec<T, L / 2>::W;
  return from_subvectors<T, L / 2, N>([&](auto part) KGEN_INLINE {
    return even_lanes(subvector<N, 2 * part.value>(v), subvector<N, 2 * part.value + 1>(v));
  });
}

// Lanes a0, b0, a1, b1, ...
template <class T, int L>
KGEN_FN Vec<T, 2 * L> interleaved(Vec<T, L> a, Vec<T, L> b) {
  constexpr int N = Vec<T, L>::W;
  return from_subvectors<T, 2 * L, N>([&](auto part) KGEN_INLINE {
    const auto x = subvector<N, part.value / 2>(a), y = subvector<N, part.value / 2>(b);
    constexpr int first = part.value % 2 * (N / 2);
    return [&]<int... I>(Lanes<I...>) KGEN_INLINE {
      return __builtin_shufflevector(x, y, (first + I / 2 + I % 2 * N)...);
    }(lane_numbers<N>{});
  });
}

// Lane i at lane i * S; what stands between has no meaning.
template <int S, class T, int L>
KGEN_FN Vec<T, L * S> spread_lanes(Vec<T, L> v) {
  constexpr int N = Vec<T, L>::W;
  return from_subvectors<T, L * S, N>([&](auto part) KGEN_INLINE {
    const auto from = subvector<N, part.value / S>(v);
    constexpr int first = part.value % S * (N / S);
    return [&]<int... I>(Lanes<I...>) KGEN_INLINE {
      return __builtin_shufflevector(from, from, (first + I / S)...);
    }(lane_numbers<N>{});
  });
}

// Whether shuffles pay: masks of all elements must fit, and masked memory operations must be cheap.
template <int S, int L, class T>
inline constexpr bool by_shuffles = KGEN_AVX512 && S != 3 && L* S <= 64 && L * sizeof(T) >= 16;

// The L * S elements from p on, the last S - 1 of them undefined: nothing is read behind the last one that is wanted, and nothing
// by a mask, which takes twice as long on some CPUs. Of several registers.
template <int S, int L, class U>
KGEN_FN Vec<U, L * S> load_through(const U* p) {
  using V = Vec<U, L * S>;
  using R = typename V::reg;
  constexpr int W = V::W, K = V::K;
  V out;
  KGEN_UNROLL for (int i = 0; i < K - 1; ++i) __builtin_memcpy(&out.r[i], p + i * W, sizeof(R));
  R last;
  __builtin_memcpy(&last, p + (K - 1) * W - (S - 1), sizeof(R));
  out.r[K - 1] = [&]<int... I>(Lanes<I...>) KGEN_INLINE {
    return __builtin_shufflevector(last, last, smaller(I + S - 1, W - 1)...);
  }(lane_numbers<W>{});
  return out;
}

template <int S, class T, int L>
KGEN_FN Vec<T, L> every_lane(Vec<T, L * S> all) {
  if constexpr (S == 2) {
    return even_lanes(all);
  } else {
    return even_lanes(even_lanes(all));
  }
}

// Every third element from p on: of each three registers two shuffles make one. Nothing is read behind the last one that is wanted.
template <int L, class U>
KGEN_FN Vec<U, L> load_thirds(const U* p) {
  using V = Vec<U, L>;
  using R = typename V::reg;
  constexpr int W = V::W;
  V out;
  KGEN_UNROLL for (int i = 0; i < V::K; ++i) {
    R first, second, third;
    __builtin_memcpy(&first, p + 3 * i * W, sizeof(R));
    __builtin_memcpy(&second, p + (3 * i + 1) * W, sizeof(R));
    __builtin_memcpy(&third, p + (3 * i + 2) * W - 2, sizeof(R));
    out.r[i] = [&]<int... I>(Lanes<I...>) KGEN_INLINE {
      const R both = __builtin_shufflevector(first, second, (3 * I < 2 * W ? 3 * I : 0)...);
      return __builtin_shufflevector(both, third, (3 * I < 2 * W ? I : 3 * I - W + 2)...);
    }(lane_numbers<W>{});
  }
  return out;
}

// The same for stores: a third of a register's lanes goes to one third of its run.
template <int Third, class U, int W>
KGEN_FN void store_third(U* p, Vec<U, W> v) {
  [&]<int... I>(Lanes<I...>) KGEN_INLINE {
    constexpr uint64_t bits = (((Third * W + I) % 3 == 0 ? uint64_t(1) << I : 0) | ...);
    const Vec<U, W> spread{{__builtin_shufflevector(v.r[0], v.r[0], ((Third * W + I) / 3)...)}};
    store_raw(p + Third * W, spread, Mask<W>{typename Mask<W>::Bits(bits)});
  }(lane_numbers<W>{});
}
template <class U, int L>
KGEN_FN void store_thirds(U* p, Vec<U, L> v) {
  constexpr int W = Vec<U, L>::W;
  KGEN_UNROLL for (int i = 0; i < v.K; ++i) {
    const Vec<U, W> one{{v.r[i]}};
    store_third<0>(p + 3 * i * W, one);
    store_third<1>(p + 3 * i * W, one);
    store_third<2>(p + 3 * i * W, one);
  }
}

// Whether these pay: registers are full, and shuffles of two of them are one instruction.
template <class U, class W>
inline constexpr bool by_thirds = KGEN_AVX512 && W::full && sizeof(U) >= 4 && W::L * sizeof(U) >= 32;

template <int S, int L, class T, class M, class W>
KGEN_FN value_t<compute_t<T>, L> load_every_masked(const T* p, M mask, W w) {
  using U = stored_t<T>;
  if constexpr (by_shuffles<S, L, U>) {
    const auto real = coerce<Mask<L>>(mask) & w.mask();
    // only the elements that are wanted: those between them may lie beyond the buffer
    const auto all = load_raw<U, L * S>(reinterpret_cast<const U*>(p), spread_mask<S>(real));
    return decode<T>(every_lane<S, U, L>(all));
  } else {
    return load_strided_masked<L>(p, S, mask, w);
  }
}
template <int S, int L, class T, class W>
KGEN_FN value_t<compute_t<T>, L> load_every(const T* p, W w) {
  using U = stored_t<T>;
  if constexpr (S == 3 && by_thirds<U, W>) {
    return decode<T>(load_thirds<L>(reinterpret_cast<const U*>(p)));
  } else if constexpr (by_shuffles<S, L, U>) {
    if constexpr (W::full && Vec<U, L * S>::K > 1) {
      return decode<T>(every_lane<S, U, L>(load_through<S, L>(reinterpret_cast<const U*>(p))));
    } else {
      return load_every_masked<S, L>(p, true, w);
    }
  } else {
    return load_strided<L>(p, S, w);
  }
}

template <int S, class T, class V, class M, class W>
KGEN_FN void store_every_masked(T* p, V v, M mask, W w) {
  constexpr int L = W::L;
  using U = stored_t<T>;
  if constexpr (by_shuffles<S, L, U>) {
    const auto real = coerce<Mask<L>>(mask) & w.mask();
    store_raw(reinterpret_cast<U*>(p), spread_lanes<S>(to_storage<T, L>(v)), spread_mask<S>(real));
  } else {
    store_strided_masked(p, S, v, mask, w);
  }
}
template <int S, class T, class V, class W>
KGEN_FN void store_every(T* p, V v, W w) {
  using U = stored_t<T>;
  if constexpr (S == 3 && by_thirds<U, W>) {
    store_thirds(reinterpret_cast<U*>(p), to_storage<T, W::L>(v));
  } else if constexpr (by_shuffles<S, W::L, stored_t<T>>) {
    store_every_masked<S>(p, v, true, w);
  } else {
    store_strided(p, S, v, w);
  }
}

// p[i] = Op(p[i], v) on neighbouring elements.
template <class Op, class T, class V, class M, class W>
KGEN_FN void combine_masked(T* p, V v, M mask, W w) {
  const auto old = load_masked<W::L>(p, mask, w);
  store_masked(p, Op::apply(old, coerce<value_t<compute_t<T>, W::L>>(cast_<compute_t<T>>(v))), mask, w);
}
template <class Op, class T, class V, class W>
KGEN_FN void combine(T* p, V v, W w) {
  store(p, Op::apply(load<W::L>(p, w), coerce<value_t<compute_t<T>, W::L>>(cast_<compute_t<T>>(v))), w);
}

}  // namespace kgen
