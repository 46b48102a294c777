// Masks: comparison results, selection, and what is built on them: casts to and from bool, lanes in memory.
#pragma once

#include "convert.h"

namespace kgen {

enum class Compare { eq, lt, le, ne, ge, gt };

template <Compare P, class X>
KGEN_FN auto compare_lanes(X a, X b) {  // C++'s operators on scalars and GCC vectors
  if constexpr (P == Compare::eq) return a == b;
  if constexpr (P == Compare::lt) return a < b;
  if constexpr (P == Compare::le) return a <= b;
  if constexpr (P == Compare::ne) return a != b;
  if constexpr (P == Compare::ge) return a >= b;
  if constexpr (P == Compare::gt) return a > b;
}

#if KGEN_AVX512
template <int B>
using Raw = Register<long long, B / 8>;

// The bits of the lanes alone: an access of four narrow lanes uses a register, and a mask, for more, and would reach beyond them.
template <int L>
KGEN_FN uint64_t mask_bits(Mask<L> mask) {
  if constexpr (L < 8) {
    return extend_bits<uint64_t>(mask.bits) & ((1u << L) - 1);
  } else {
    return extend_bits<uint64_t>(mask.bits);
  }
}

template <Compare P, class T, class V>
KGEN_FN auto compare_bits(V a, V b) {
  constexpr int B = sizeof(V), S = sizeof(T);
  if constexpr (std::is_floating_point_v<T>) {
    constexpr int code = P == Compare::eq   ? _CMP_EQ_OQ
                         : P == Compare::lt ? _CMP_LT_OQ
                         : P == Compare::le ? _CMP_LE_OQ
                         : P == Compare::ne ? _CMP_NEQ_UQ
                         : P == Compare::ge ? _CMP_GE_OQ
                                            : _CMP_GT_OQ;
    if constexpr (B == 64 && S == 4) return _mm512_cmp_ps_mask(a, b, code);
    if constexpr (B == 64 && S == 8) return _mm512_cmp_pd_mask(a, b, code);
    if constexpr (B == 32 && S == 4) return _mm256_cmp_ps_mask(a, b, code);
    if constexpr (B == 32 && S == 8) return _mm256_cmp_pd_mask(a, b, code);
    if constexpr (B == 16 && S == 4) return _mm_cmp_ps_mask(a, b, code);
    if constexpr (B == 16 && S == 8) return _mm_cmp_pd_mask(a, b, code);
  } else {
    constexpr int code = P == Compare::eq   ? _MM_CMPINT_EQ
                         : P == Compare::lt ? _MM_CMPINT_LT
                         : P == Compare::le ? _MM_CMPINT_LE
                         : P == Compare::ne ? _MM_CMPINT_NE
                         : P == Compare::ge ? _MM_CMPINT_NLT
                                            : _MM_CMPINT_NLE;
    const auto x = (Raw<B>)a, y = (Raw<B>)b;
    if constexpr (std::is_signed_v<T>) {
#define KGEN_CMP(width, size, suffix) \
  if constexpr (B * 8 == width && S == size) return suffix(x, y, code);
      KGEN_CMP(512, 1, _mm512_cmp_epi8_mask) KGEN_CMP(512, 2, _mm512_cmp_epi16_mask)
      KGEN_CMP(512, 4, _mm512_cmp_epi32_mask) KGEN_CMP(512, 8, _mm512_cmp_epi64_mask)
      KGEN_CMP(256, 1, _mm256_cmp_epi8_mask) KGEN_CMP(256, 2, _mm256_cmp_epi16_mask)
      KGEN_CMP(256, 4, _mm256_cmp_epi32_mask) KGEN_CMP(256, 8, _mm256_cmp_epi64_mask)
      KGEN_CMP(128, 1, _mm_cmp_epi8_mask) KGEN_CMP(128, 2, _mm_cmp_epi16_mask)
      KGEN_CMP(128, 4, _mm_cmp_epi32_mask) KGEN_CMP(128, 8, _mm_cmp_epi64_mask)
    } else {
      KGEN_CMP(512, 1, _mm512_cmp_epu8_mask) KGEN_CMP(512, 2, _mm512_cmp_epu16_mask)
      KGEN_CMP(512, 4, _mm512_cmp_epu32_mask) KGEN_CMP(512, 8, _mm512_cmp_epu64_mask)
      KGEN_CMP(256, 1, _mm256_cmp_epu8_mask) KGEN_CMP(256, 2, _mm256_cmp_epu16_mask)
      KGEN_CMP(256, 4, _mm256_cmp_epu32_mask) KGEN_CMP(256, 8, _mm256_cmp_epu64_mask)
      KGEN_CMP(128, 1, _mm_cmp_epu8_mask) KGEN_CMP(128, 2, _mm_cmp_epu16_mask)
      KGEN_CMP(128, 4, _mm_cmp_epu32_mask) KGEN_CMP(128, 8, _mm_cmp_epu64_mask)
#undef KGEN_CMP
    }
  }
}

template <class V, int S = sizeof(V{}[0])>
KGEN_FN V blend_register(uint64_t bits, V yes, V no) {
  using R = V;
  constexpr int B = sizeof(V);
  KGEN_PICK_INT(mask_blend, bits, (Raw<B>)no, (Raw<B>)yes)
}
#else
template <class V>
KGEN_FN V blend_register(Register<signed_of_size<sizeof(V{}[0])>, sizeof(V) / sizeof(V{}[0])> mask, V yes, V no) {
#if KGEN_AVX2
  if constexpr (sizeof(V) == 32) {
    return (V)_mm256_blendv_epi8((__m256i)no, (__m256i)yes, (__m256i)mask);
  } else {
    return (V)_mm_blendv_epi8((__m128i)no, (__m128i)yes, (__m128i)mask);
  }
#else
  using M = decltype(mask);
  return (V)((mask & (M)yes) | (~mask & (M)no));
#endif
}
#endif

template <Compare P, class T, int L>
KGEN_FN Mask<L> compare_vectors(Vec<T, L> a, Vec<T, L> b) {
  using V = Vec<T, L>;
#if KGEN_AVX512
  typename Mask<L>::Bits bits = 0;
  KGEN_UNROLL for (int i = 0; i < V::K; ++i) {
    const auto part = extend_bits<typename Mask<L>::Bits>(compare_bits<P, T>(a.r[i], b.r[i]));
    bits |= typename Mask<L>::Bits(part << (i * V::W % L));
  }
  return {bits};
#else
  Vec<signed_of_size<sizeof(T)>, L> out;
  KGEN_UNROLL for (int i = 0; i < V::K; ++i) out.r[i] = compare_lanes<P>(a.r[i], b.r[i]);
  return {convert<int32_t>(out)};
#endif
}

template <class T, int L>
KGEN_FN Vec<T, L> select(Mask<L> mask, Vec<T, L> yes, Vec<T, L> no) {
  using V = Vec<T, L>;
  V out;
#if KGEN_AVX512
  const auto bits = V::K > 1 ? extend_bits<uint64_t>(mask.bits) : mask.bits;
  KGEN_UNROLL for (int i = 0; i < V::K; ++i) out.r[i] = blend_register(bits >> (i * V::W % L), yes.r[i], no.r[i]);
#else
  const auto wide = convert<signed_of_size<sizeof(T)>>(mask.lanes);
  KGEN_UNROLL for (int i = 0; i < V::K; ++i) out.r[i] = blend_register(wide.r[i], yes.r[i], no.r[i]);
#endif
  return out;
}

#if KGEN_AVX512
#define KGEN_MASK_OP(name, op) \
  template <int L>             \
  KGEN_FN Mask<L> name(Mask<L> a, Mask<L> b) { return {typename Mask<L>::Bits(a.bits op b.bits)}; }
#else
#define KGEN_MASK_OP(name, op) \
  template <int L>             \
  KGEN_FN Mask<L> name(Mask<L> a, Mask<L> b) { \
    const auto apply = [](auto x, auto y) KGEN_INLINE { return x op y; }; \
    return {map_registers<Vec<int32_t, L>>(apply, a.lanes, b.lanes)}; \
  }
#endif
KGEN_MASK_OP(operator&, &)
KGEN_MASK_OP(operator|, |)
KGEN_MASK_OP(operator^, ^)
#undef KGEN_MASK_OP

template <int L>
KGEN_FN Mask<L> operator~(Mask<L> a) {
  return a ^ splat<L>(true);
}

// Conversion between compute types; bool included.
template <class To, class X>
KGEN_FN value_t<To, lanes_of<X>> cast_(X x) {
  using From = lane_t<X>;
  constexpr int L = lanes_of<X>;
  if constexpr (std::is_same_v<To, From>) {
    return x;
  } else if constexpr (L == 1) {
    return convert_scalar<To>(x);
  } else if constexpr (std::is_same_v<To, bool>) {
    return compare_vectors<Compare::ne>(x, splat<L>(From(0)));
  } else if constexpr (std::is_same_v<From, bool>) {
    return select(x, splat<L>(To(1)), splat<L>(To(0)));
  } else {
    return convert<To>(x);
  }
}

// The lanes in memory; bool lanes as bools.
template <class X>
KGEN_FN Spilled<lane_t<X>, lanes_of<X>> spill(X x) {
  Spilled<lane_t<X>, lanes_of<X>> out;
  if constexpr (lanes_of<X> > 1) KGEN_LANE_BY_LANE();
  if constexpr (lanes_of<X> == 1) {
    out.lane[0] = x;
  } else if constexpr (std::is_same_v<lane_t<X>, bool>) {
    const auto bytes = cast_<uint8_t>(x);
    __builtin_memcpy(out.lane, &bytes, sizeof(out.lane));
  } else {
    store_lanes(out.lane, x);
  }
  return out;
}
template <class T, int L>
KGEN_FN value_t<T, L> unspill(const Spilled<T, L>& from) {
  if constexpr (L == 1) {
    return from.lane[0];
  } else if constexpr (std::is_same_v<T, bool>) {
    return cast_<bool>(load_lanes<uint8_t, L>(reinterpret_cast<const uint8_t*>(from.lane)));
  } else {
    return load_lanes<T, L>(from.lane);
  }
}

// Lane by lane through a scalar function of several arguments (brought to their common type).
template <class Out, class F, class... A>
KGEN_FN value_t<Out, lanes_of<A...>> each_lane(F f, A... a) {
  constexpr int L = lanes_of<A...>;
  if constexpr (L == 1) {
    return f(static_cast<common_lane<A...>>(a)...);
  } else {
    return [&](auto... in) KGEN_INLINE {
      Spilled<Out, L> out;
      for (int i = 0; i < L; ++i) out.lane[i] = f(in.lane[i]...);
      return unspill(out);
    }(spill(coerce<common_t<A...>>(a))...);
  }
}

// start, start + step, start + 2 step, ... (one multiplication a lane, wrapping for integers).
template <class T, int L>
KGEN_FN value_t<T, L> iota(T start = T(0), T step = T(1)) {
  if constexpr (L == 1) {
    return start;
  } else {
    using V = Vec<T, L>;
    using U = typename std::conditional_t<std::is_integral_v<T>, std::make_unsigned<T>, std::type_identity<T>>::type;
    using R = Register<U, V::W>;
    V out;
    [&]<int... I>(Lanes<I...>) KGEN_INLINE {
      KGEN_UNROLL for (int i = 0; i < V::K; ++i) {
        const R number = R{U(I)...} + splat_register<R>(U(i * V::W));
        out.r[i] = (typename V::reg)(splat_register<R>(U(start)) + number * splat_register<R>(U(step)));
      }
    }(lane_numbers<V::W>{});
    return out;
  }
}

}  // namespace kgen
