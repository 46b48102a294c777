// Loads and stores. The last argument `w` says how many lanes are real (Full or Tail): lanes beyond read 0, write nothing, and
// touch no memory. T is a storage type; values are of its compute type.
#pragma once

#include "narrow.h"

namespace kgen {

// ---- unit stride ----------------------------------------------------------------------------------------------------

#if KGEN_AVX512
template <class T, int L>
KGEN_FN Vec<T, L> load_raw(const T* p, Mask<L> mask) {
  Vec<T, L> out;
  KGEN_UNROLL for (int i = 0; i < out.K; ++i) {
    out.r[i] = [&]() KGEN_INLINE {
      using R = typename Vec<T, L>::reg;
      constexpr int B = sizeof(R), S = sizeof(T);
      const auto bits = mask_bits(mask) >> (i * out.W % L);
      KGEN_PICK_INT(maskz_loadu, bits, p + i * out.W)
    }();
  }
  return out;
}
template <class T, int L>
KGEN_FN void store_raw(T* p, Vec<T, L> v, Mask<L> mask) {
  KGEN_UNROLL for (int i = 0; i < v.K; ++i) {
    [&]() KGEN_INLINE {
      using R = void;
      constexpr int B = Vec<T, L>::bytes, S = sizeof(T);
      const auto bits = mask_bits(mask) >> (i * v.W % L);
      KGEN_PICK_INT(mask_storeu, p + i * v.W, bits, (Raw<B>)v.r[i])
    }();
  }
}
#else
template <class T, int L>
KGEN_FN Vec<T, L> load_raw(const T* p, Mask<L> mask) {
#if KGEN_AVX2
  if constexpr (sizeof(T) >= 4) {
    const auto wide = convert<signed_of_size<sizeof(T)>>(mask.lanes);
    Vec<T, L> out;
    KGEN_UNROLL for (int i = 0; i < out.K; ++i) {
      using R = typename Vec<T, L>::reg;
      const auto* from = p + i * out.W;
      constexpr int B = sizeof(R), S = sizeof(T);
      if constexpr (B == 32 && S == 4) out.r[i] = (R)_mm256_maskload_epi32((const int*)from, (__m256i)wide.r[i]);
      if constexpr (B == 32 && S == 8) out.r[i] = (R)_mm256_maskload_epi64((const long long*)from, (__m256i)wide.r[i]);
      if constexpr (B == 16 && S == 4) out.r[i] = (R)_mm_maskload_epi32((const int*)from, (__m128i)wide.r[i]);
    }
    return out;
  }
#endif
  const auto real = spill(mask);
  Spilled<T, L> out;
  for (int i = 0; i < L; ++i) out.lane[i] = real.lane[i] ? p[i] : T(0);
  return unspill(out);
}
template <class T, int L>
KGEN_FN void store_raw(T* p, Vec<T, L> v, Mask<L> mask) {
  const auto real = spill(mask);
  const auto from = spill(v);
  for (int i = 0; i < L; ++i) {
    if (real.lane[i]) p[i] = from.lane[i];
  }
}
#endif

template <int L, class T, class W>
KGEN_FN value_t<compute_t<T>, L> load(const T* p, W w) {
  const auto* from = reinterpret_cast<const stored_t<T>*>(p);
  if constexpr (L == 1) {
    return decode<T>(*from);
  } else if constexpr (W::full) {
    return decode<T>(load_lanes<stored_t<T>, L>(from));
  } else {
    return decode<T>(load_raw<stored_t<T>, L>(from, w.mask()));
  }
}

template <int L, class T, class M, class W>
KGEN_FN value_t<compute_t<T>, L> load_masked(const T* p, M mask, W w) {
  if constexpr (L == 1) {
    return mask ? load<1>(p, w) : compute_t<T>(0);
  } else {
    const auto real = coerce<Mask<L>>(mask) & w.mask();
    return decode<T>(load_raw<stored_t<T>, L>(reinterpret_cast<const stored_t<T>*>(p), real));
  }
}

// `v` as the bits that a T* stores, one for each lane.
template <class T, int L, class V>
KGEN_FN value_t<stored_t<T>, L> to_storage(V v) {
  return coerce<value_t<stored_t<T>, L>>(encode<T>(cast_<compute_t<T>>(v)));
}

template <class T, class V, class W>
KGEN_FN void store(T* p, V v, W w) {
  auto* to = reinterpret_cast<stored_t<T>*>(p);
  const auto bits = to_storage<T, W::L>(v);
  if constexpr (W::L == 1) {
    *to = bits;
  } else if constexpr (W::full) {
    store_lanes(to, bits);
  } else {
    store_raw(to, bits, w.mask());
  }
}

template <class T, class V, class M, class W>
KGEN_FN void store_masked(T* p, V v, M mask, W w) {
  if constexpr (W::L == 1) {
    if (mask) store(p, v, w);
  } else {
    store_raw(reinterpret_cast<stored_t<T>*>(p), to_storage<T, W::L>(v), coerce<Mask<W::L>>(mask) & w.mask());
  }
}

// ---- computed addresses ---------------------------------------------------------------------------------------------

template <int L, class T, class M>
KGEN_FN Vec<T, L> gather_raw(const T* p, Vec<int64_t, L> index, M mask) {
#if KGEN_AVX512
  if constexpr (sizeof(T) >= 4) {
    constexpr int N = Vec<int64_t, L>::W;
    return from_subvectors<T, L, N>([&](auto part) KGEN_INLINE {
      using R = Register<T, N>;
      const auto at = index.r[part.value];
      const __mmask8 real = mask_bits(mask) >> (part.value * N);
      if constexpr (N == 8 && sizeof(T) == 8) return (R)_mm512_mask_i64gather_epi64(__m512i{}, real, (__m512i)at, p, 8);
      if constexpr (N == 8 && sizeof(T) == 4) return (R)_mm512_mask_i64gather_epi32(__m256i{}, real, (__m512i)at, p, 4);
      if constexpr (N == 4 && sizeof(T) == 8) return (R)_mm256_mmask_i64gather_epi64(__m256i{}, real, (__m256i)at, p, 8);
      if constexpr (N == 4 && sizeof(T) == 4) return (R)_mm256_mmask_i64gather_epi32(__m128i{}, real, (__m256i)at, p, 4);
    });
  }
#endif
  const auto at = spill(index);
  const auto real = spill(mask);
  Spilled<T, L> out;
  for (int i = 0; i < L; ++i) out.lane[i] = real.lane[i] ? p[at.lane[i]] : T(0);
  return unspill(out);
}

// p[index], lane by lane; an index that is one scalar for all lanes gives a scalar.
template <int L, class T, class I, class W>
KGEN_FN value_t<compute_t<T>, lanes_of<I>> gather(const T* p, I index, W w) {
  if constexpr (lanes_of<I> == 1) {
    return load<1>(p + index, Full<1>{});
  } else {
    const auto* from = reinterpret_cast<const stored_t<T>*>(p);
    const auto at = cast_<int64_t>(index);
    if constexpr (W::full && (sizeof(T) < 4 || !KGEN_AVX512)) {
      const auto lane = spill(at);
      Spilled<stored_t<T>, L> out;
      for (int i = 0; i < L; ++i) out.lane[i] = from[lane.lane[i]];
      return decode<T>(unspill(out));
    } else {
      return decode<T>(gather_raw<L>(from, at, w.mask()));
    }
  }
}

template <int L, class T, class I, class M, class W>
KGEN_FN value_t<compute_t<T>, L> gather_masked(const T* p, I index, M mask, W w) {
  if constexpr (L == 1) {
    return mask ? load<1>(p + index, Full<1>{}) : compute_t<T>(0);
  } else {
    const auto at = coerce<Vec<int64_t, L>>(cast_<int64_t>(index));
    const auto real = coerce<Mask<L>>(mask) & w.mask();
    return decode<T>(gather_raw<L>(reinterpret_cast<const stored_t<T>*>(p), at, real));
  }
}

// p[index()], lane by lane. No step from lane to lane is longer than one: where the last real lane is as far from the first as
// in a run, they are one.
template <int L, class T, class F, class W>
KGEN_FN value_t<compute_t<T>, L> gather_run(const T* p, int64_t first, int64_t last, F index, W w) {
  if (__builtin_expect(last - first == w.n - 1, 1)) return load<L>(p + first, w);
  return gather<L>(p, index(), w);
}
template <int L, class T, class F, class M, class W>
KGEN_FN value_t<compute_t<T>, L> gather_run_masked(const T* p, int64_t first, int64_t last, F index, M mask, W w) {
  if (__builtin_expect(last - first == w.n - 1, 1)) return load_masked<L>(p + first, mask, w);
  return gather_masked<L>(p, index(), mask, w);
}

// The same of indices that never go back: where the last one is the first, all lanes read that.
template <int L, class T, class F, class W>
KGEN_FN value_t<compute_t<T>, L> gather_number(const T* p, int64_t first, int64_t last, F index, W w) {
  if (__builtin_expect(last == first, 1)) return splat<L>(load<1>(p + first, Full<1>{}));
  return gather<L>(p, index(), w);
}

// Asks for `count` neighbours from `p` on, for L2. Nothing has to be there.
template <class T>
KGEN_FN void prefetch_run(const T* p, int64_t count) {
  for (int64_t i = 0; i < count; i += 64 / int64_t(sizeof(T))) __builtin_prefetch(p + i, 0, 2);
}

// Asks for L neighbours from `p` on. Nothing has to be there.
template <int L, class T>
KGEN_FN void prefetch_lanes(const T* p) {
  KGEN_UNROLL for (int64_t i = 0; i < L; i += 64 / int64_t(sizeof(T))) __builtin_prefetch(p + i, 0, 2);
}

// Asks for what `rows` rows hold so many cache lines behind their present place: no hardware prefetcher follows the rows of a
// tile by itself.
template <int Lines, class T>
KGEN_FN void prefetch_rows(const T* p, int64_t stride, int64_t rows) {
  for (int64_t i = 0; i < rows; ++i) __builtin_prefetch(p + i * stride + Lines * 64 / int64_t(sizeof(T)));
}

// Stride -1 is one access of all lanes, which then change places; the address is that of the first lane.
KGEN_FN constexpr bool is_reversed(int64_t stride) { return __builtin_constant_p(stride) && stride == -1; }

template <class T, int L>
KGEN_FN Vec<T, L> reverse_lanes(Vec<T, L> v) {
  using V = Vec<T, L>;
  V out;
  [&]<int... I>(Lanes<I...>) KGEN_INLINE {
    KGEN_UNROLL for (int i = 0; i < V::K; ++i) {
      const auto from = v.r[V::K - 1 - i];
      out.r[i] = __builtin_shufflevector(from, from, (I < L ? smaller(L, V::W) - 1 - I : I)...);
    }
  }(lane_numbers<V::W>{});
  return out;
}
template <int L>
KGEN_FN Mask<L> reverse_lanes(Mask<L> m) {
  return cast_<bool>(reverse_lanes(cast_<uint8_t>(m)));
}

template <int L, class T, class W>
KGEN_FN value_t<compute_t<T>, L> load_back(const T* p, W w) {
  const auto* from = reinterpret_cast<const stored_t<T>*>(p) - (L - 1);
  if constexpr (W::full) {
    return decode<T>(reverse_lanes(load_lanes<stored_t<T>, L>(from)));
  } else {
    return decode<T>(reverse_lanes(load_raw<stored_t<T>, L>(from, reverse_lanes(w.mask()))));
  }
}
template <class T, class V, class W>
KGEN_FN void store_back(T* p, V v, W w) {
  auto* to = reinterpret_cast<stored_t<T>*>(p) - (W::L - 1);
  const auto bits = reverse_lanes(to_storage<T, W::L>(v));
  if constexpr (W::full) {
    store_lanes(to, bits);
  } else {
    store_raw(to, bits, reverse_lanes(w.mask()));
  }
}

template <int L, class T, class W>
KGEN_FN value_t<compute_t<T>, L> load_strided(const T* p, int64_t stride, W w) {
  if constexpr (L > 1) {
    if (is_reversed(stride)) return load_back<L>(p, w);
  }
  return gather<L>(p, iota<int64_t, L>(0, stride), w);
}
template <int L, class T, class M, class W>
KGEN_FN value_t<compute_t<T>, L> load_strided_masked(const T* p, int64_t stride, M mask, W w) {
  if constexpr (L > 1) {
    if (is_reversed(stride)) {
      using S = stored_t<T>;
      const auto real = reverse_lanes(coerce<Mask<L>>(mask) & w.mask());
      return decode<T>(reverse_lanes(load_raw<S, L>(reinterpret_cast<const S*>(p) - (L - 1), real)));
    }
  }
  return gather_masked<L>(p, iota<int64_t, L>(0, stride), mask, w);
}

// Lanes are written in order, so that the last of equal indices wins.
template <class T, class I, class V, class M, class W>
KGEN_FN void scatter_masked(T* p, I index, V v, M mask, W w) {
  constexpr int L = W::L;
  auto* to = reinterpret_cast<stored_t<T>*>(p);
  const auto at = spill(coerce<value_t<int64_t, L>>(cast_<int64_t>(index)));
  const auto from = spill(to_storage<T, L>(v));
  const auto real = spill(coerce<value_t<bool, L>>(mask));
  for (int i = 0; i < w.n; ++i) {
    if (real.lane[i]) to[at.lane[i]] = from.lane[i];
  }
}
template <class T, class I, class V, class W>
KGEN_FN void scatter(T* p, I index, V v, W w) {
  constexpr int L = W::L;
  auto* to = reinterpret_cast<stored_t<T>*>(p);
  const auto at = spill(coerce<value_t<int64_t, L>>(cast_<int64_t>(index)));
  const auto from = spill(to_storage<T, L>(v));
  for (int i = 0; i < w.n; ++i) to[at.lane[i]] = from.lane[i];
}
template <class T, class V, class W>
KGEN_FN void store_strided(T* p, int64_t stride, V v, W w) {
  if constexpr (W::L > 1) {
    if (is_reversed(stride)) return store_back(p, v, w);
  }
  auto* to = reinterpret_cast<stored_t<T>*>(p);
  const auto from = spill(to_storage<T, W::L>(v));
  for (int i = 0; i < w.n; ++i) to[i * stride] = from.lane[i];
}
template <class T, class V, class M, class W>
KGEN_FN void store_strided_masked(T* p, int64_t stride, V v, M mask, W w) {
  scatter_masked(p, iota<int64_t, W::L>(0, stride), v, mask, w);
}

// p[index] = Op(p[index], v), lane by lane in order: equal indices combine one after the other.
template <class Op, class T, class I, class V, class M, class W>
KGEN_FN void scatter_combine_masked(T* p, I index, V v, M mask, W w) {
  constexpr int L = W::L;
  auto* to = reinterpret_cast<stored_t<T>*>(p);
  const auto at = spill(coerce<value_t<int64_t, L>>(cast_<int64_t>(index)));
  const auto from = spill(coerce<value_t<compute_t<T>, L>>(cast_<compute_t<T>>(v)));
  const auto real = spill(coerce<value_t<bool, L>>(mask));
  for (int i = 0; i < w.n; ++i) {
    if (real.lane[i]) to[at.lane[i]] = encode<T>(Op::apply(decode<T>(to[at.lane[i]]), from.lane[i]));
  }
}
template <class Op, class T, class I, class V, class W>
KGEN_FN void scatter_combine(T* p, I index, V v, W w) {
  scatter_combine_masked<Op>(p, index, v, true, w);
}

}  // namespace kgen
