// Vec<T, L>: L lanes of a compute type. Mask<L>: L booleans. Full<L> and Tail<L>: how many lanes of a step are real.
//
// Everything also works for L = 1, where Vec is the plain scalar T, Mask is bool and Tail cannot occur, so one text serves the
// vector body, its masked tail and a scalar loop.
#pragma once

#include "base.h"

namespace kgen {

// L lanes as K registers of W lanes. A vector shorter than 16 bytes sits in the low lanes of one 16-byte register, whose other
// lanes hold anything. An array of registers, not one large GCC vector: those beyond the machine's width go through memory.
template <class T, int L>
struct Vec {
  static_assert(L >= 4 && L <= 64 && (L & (L - 1)) == 0, "lane counts are powers of two from 4 to 64");
  static constexpr int bytes = larger(16, smaller(kRegisterBytes, L * int(sizeof(T))));
  static constexpr int W = bytes / sizeof(T);
  static constexpr int K = larger(1, L / W);
  using reg = Register<T, W>;

  reg r[K];

  KGEN_FN T operator[](int lane) const { return r[lane / W][lane % W]; }
};

// L booleans: one bit a lane where the machine has mask registers (bits from L up hold anything), else int32 lanes of 0 or -1.
template <int L>
struct Mask {
#if KGEN_AVX512
  using Bits = unsigned_of_size<(L <= 8 ? 1 : L / 8)>;
  Bits bits;
  KGEN_FN bool operator[](int lane) const { return (bits >> lane) & 1; }
#else
  Vec<int32_t, L> lanes;
  KGEN_FN bool operator[](int lane) const { return lanes[lane] != 0; }
#endif
};

template <class T, int L>
struct ValueOf {
  using type = Vec<T, L>;
};
template <int L>
struct ValueOf<bool, L> {
  using type = Mask<L>;
};
template <class T>
struct ValueOf<T, 1> {
  using type = T;
};
template <>
struct ValueOf<bool, 1> {
  using type = bool;
};
// The value of L lanes of T: Vec, Mask or the scalar itself.
template <class T, int L>
using value_t = typename ValueOf<T, L>::type;

template <class X>
struct Shape {
  using lane = X;
  static constexpr int L = 1;
};
template <class T, int N>
struct Shape<Vec<T, N>> {
  using lane = T;
  static constexpr int L = N;
};
template <int N>
struct Shape<Mask<N>> {
  using lane = bool;
  static constexpr int L = N;
};
template <class X>
using lane_t = typename Shape<X>::lane;
template <class... X>
inline constexpr int lanes_of = [] {
  int most = 1;
  ((most = larger(most, Shape<X>::L)), ...);
  return most;
}();

// The lane type of several arguments: that of the vectors among them, else C++'s common type of the scalars.
template <class A, class... Rest>
struct CommonLane {
  using B = typename CommonLane<Rest...>::type;
  static constexpr bool a_decides = lanes_of<A> > 1, b_decides = lanes_of<Rest...> > 1;
  static_assert(!(a_decides && b_decides) || std::is_same_v<lane_t<A>, B>, "vectors of different lane types");
  using both = std::conditional_t<std::is_same_v<lane_t<A>, B>, std::type_identity<B>, std::common_type<lane_t<A>, B>>;
  using scalar = typename both::type;  // not common_type for equal types: it would be int for two int8_t
  using type = std::conditional_t<a_decides, lane_t<A>, std::conditional_t<b_decides, B, scalar>>;
};
template <class A>
struct CommonLane<A> {
  using type = lane_t<A>;
};
template <class... X>
using common_lane = typename CommonLane<X...>::type;
template <class... X>
using common_t = value_t<common_lane<X...>, lanes_of<X...>>;

// ---- splat and lane access ------------------------------------------------------------------------------------------

template <class R, class T>
KGEN_FN R splat_register(T scalar) {
  return scalar - R{};  // x - 0 is x for every x, -0.0 included, and compiles to a broadcast
}

template <int L, class T>
KGEN_FN value_t<T, L> splat(T scalar) {
  if constexpr (L == 1) {
    return scalar;
  } else if constexpr (std::is_same_v<T, bool>) {
#if KGEN_AVX512
    return {typename Mask<L>::Bits(-int64_t(scalar))};
#else
    return {splat<L>(-int32_t(scalar))};
#endif
  } else {
    Vec<T, L> out;
    KGEN_UNROLL for (int i = 0; i < out.K; ++i) out.r[i] = splat_register<typename Vec<T, L>::reg>(scalar);
    return out;
  }
}

// `x` as a C: unchanged, splatted from a scalar, or (scalars only) converted.
template <class C, class X>
KGEN_FN C coerce(X x) {
  if constexpr (std::is_same_v<C, X>) {
    return x;
  } else {
    static_assert(lanes_of<X> == 1, "a vector is never converted silently: use cast_");
    return splat<lanes_of<C>>(static_cast<lane_t<C>>(x));
  }
}

// Applies `f` to each register of the arguments, or to the scalars.
template <class Out, class F, class... V>
KGEN_FN Out map_registers(F f, V... v) {
  if constexpr (lanes_of<Out> == 1) {
    return static_cast<Out>(f(v...));
  } else {
    Out out;
    KGEN_UNROLL for (int i = 0; i < Out::K; ++i) out.r[i] = f(v.r[i]...);
    return out;
  }
}
template <class F, class... A>
KGEN_FN auto lanewise(F f, A... a) {
  using C = common_t<A...>;
  return map_registers<C>(f, coerce<C>(a)...);
}

// The same lanes under another type of the same size.
template <class To, class X>
KGEN_FN value_t<To, lanes_of<X>> bitcast_(X x) {
  static_assert(sizeof(To) == sizeof(lane_t<X>));
  if constexpr (lanes_of<X> == 1) {
    return bits_as<To>(x);
  } else {
    value_t<To, lanes_of<X>> out;
    KGEN_UNROLL for (int i = 0; i < out.K; ++i) out.r[i] = (typename value_t<To, lanes_of<X>>::reg)x.r[i];
    return out;
  }
}

// ---- parts of registers ---------------------------------------------------------------------------------------------

// The first Bytes (4 or 8) bytes of memory as a 16-byte register, zero above. Through an integer: a copy into part of a
// register would go through the stack.
template <class R, int Bytes>
KGEN_FN R load_low(const void* from) {
  using U = unsigned_of_size<Bytes>;
  U low;
  __builtin_memcpy(&low, from, Bytes);
  return (R)Register<U, 16 / Bytes>{low};
}

// Lanes [Offset, Offset + N) of a register. Shuffles whose result is shorter than 16 bytes are not compiled to instructions by
// GCC 12, and those that take a half cost an extra move: both are spelled out.
template <int N, int Offset, class R>
KGEN_FN auto register_part(R r) {
  using T = std::remove_cvref_t<decltype(r[0])>;
  using Part = Register<T, N>;
  constexpr int bytes = N * sizeof(T), first = Offset * sizeof(T), B = sizeof(R);
  if constexpr (bytes == B) {
    return r;
  } else if constexpr (bytes < 16) {
    using U = unsigned_of_size<bytes>;
    return bits_as<Part>(U(((Register<U, B / bytes>)r)[first / bytes]));
#if KGEN_AVX512
  } else if constexpr (B == 64 && bytes == 32) {
    if constexpr (first == 0) return (Part)_mm512_castsi512_si256((__m512i)r);
    else return (Part)_mm512_extracti64x4_epi64((__m512i)r, 1);
  } else if constexpr (B == 64 && bytes == 16) {
    if constexpr (first == 0) return (Part)_mm512_castsi512_si128((__m512i)r);
    else return (Part)_mm512_extracti64x2_epi64((__m512i)r, first / 16);
#endif
#if KGEN_X86
  } else if constexpr (B == 32 && bytes == 16) {
    if constexpr (first == 0) return (Part)_mm256_castsi256_si128((__m256i)r);
    else return (Part)_mm256_extracti128_si256((__m256i)r, 1);
#endif
  } else {
    return [&]<int... I>(Lanes<I...>) KGEN_INLINE { return __builtin_shufflevector(r, r, (Offset + I)...); }(lane_numbers<N>{});
  }
}
template <class R>
KGEN_FN auto join_registers(R low, R high) {
  using T = std::remove_cvref_t<decltype(low[0])>;
  constexpr int B = sizeof(R), N = B / sizeof(T);
  using Joined = Register<T, 2 * N>;
  if constexpr (B < 16) {
    using U = unsigned_of_size<B>;
    return bits_as<Joined>(Register<U, 2>{bits_as<U>(low), bits_as<U>(high)});
#if KGEN_AVX512
  } else if constexpr (B == 32) {
    return (Joined)_mm512_inserti64x4(_mm512_castsi256_si512((__m256i)low), (__m256i)high, 1);
#endif
#if KGEN_X86
  } else if constexpr (B == 16) {
    return (Joined)_mm256_inserti128_si256(_mm256_castsi128_si256((__m128i)low), (__m128i)high, 1);
#endif
  } else {
    return [&]<int... I>(Lanes<I...>) KGEN_INLINE { return __builtin_shufflevector(low, high, I...); }(lane_numbers<2 * N>{});
  }
}

// Lanes in memory, for what goes lane by lane.
template <class T, int L>
struct Spilled {
  alignas(L == 1 ? alignof(T) : 64) T lane[L];
};

template <class T, int L, int B = Vec<T, L>::bytes>
KGEN_FN Vec<T, L> load_lanes(const T* from) {
  Vec<T, L> out;
  constexpr int size = smaller(B, int(L * sizeof(T)));
  KGEN_UNROLL for (int i = 0; i < out.K; ++i) {
    if constexpr (size < B) {
      out.r[i] = load_low<typename Vec<T, L>::reg, size>(from);
    } else {
      __builtin_memcpy(&out.r[i], from + i * out.W, size);
    }
  }
  return out;
}
template <class T, int L, int B = Vec<T, L>::bytes>
KGEN_FN void store_lanes(T* to, Vec<T, L> v) {
  KGEN_UNROLL for (int i = 0; i < v.K; ++i) __builtin_memcpy(to + i * v.W, &v.r[i], smaller(B, int(L * sizeof(T))));
}

// The register in the low lanes of one of N lanes; the others are zero, so that no operation on them is slow.
template <int N, class R>
KGEN_FN auto widen_register(R r) {
  constexpr int have = sizeof(R) / sizeof(r[0]);
  if constexpr (have >= N) {
    return r;
  } else {
    return widen_register<N>(join_registers(r, R{}));
  }
}

// Lanes [Piece * N, (Piece + 1) * N) as a GCC vector of exactly N lanes.
template <int N, int Piece, class T, int L>
KGEN_FN Register<T, N> piece_of(Vec<T, L> v) {
  constexpr int W = Vec<T, L>::W, first = Piece * N;
  if constexpr (N == W) {
    return v.r[Piece];
  } else if constexpr (N < W) {
    return register_part<N, first % W>(v.r[first / W]);
  } else {
    return join_registers(piece_of<N / 2, 2 * Piece>(v), piece_of<N / 2, 2 * Piece + 1>(v));
  }
}

// A Vec from `make(integral_constant<piece>)`, which gives N lanes each.
template <class T, int L, int N, class F>
KGEN_FN Vec<T, L> from_pieces(F make) {
  using V = Vec<T, L>;
  V out;
  [&]<int... I>(Lanes<I...>) KGEN_INLINE {
    auto build = [&]<int Count, int First>(auto& self, Lanes<Count, First>) KGEN_INLINE {
      if constexpr (Count == 1) {
        return make(std::integral_constant<int, First>{});
      } else {
        return join_registers(self(self, Lanes<Count / 2, First>{}), self(self, Lanes<Count / 2, First + Count / 2>{}));
      }
    };
    constexpr int each = larger(1, smaller(V::W, L) / N);  // pieces in one register
    ((out.r[I] = widen_register<V::W>(build(build, Lanes<each, I * each>{}))), ...);
  }(lane_numbers<V::K>{});
  return out;
}

// The lower and upper half of a vector of at least 8 lanes.
template <int Half, class T, int L>
KGEN_FN Vec<T, L / 2> half_of(Vec<T, L> v) {
  using V = Vec<T, L / 2>;
  V out;
  if constexpr (Vec<T, L>::K > 1) {
    KGEN_UNROLL for (int i = 0; i < V::K; ++i) out.r[i] = v.r[Half * V::K + i];
  } else {
    out.r[0] = widen_register<V::W>(register_part<L / 2, Half * (L / 2)>(v.r[0]));
  }
  return out;
}
template <int Half, int L>
KGEN_FN Mask<L / 2> half_of(Mask<L> m) {
#if KGEN_AVX512
  return {typename Mask<L / 2>::Bits(m.bits >> (Half * L / 2))};
#else
  return {half_of<Half>(m.lanes)};
#endif
}

// ---- how many lanes are real ----------------------------------------------------------------------------------------

template <int N>
struct Full {
  static constexpr int L = N;
  static constexpr bool full = true;
  static constexpr int64_t n = N;
  KGEN_FN value_t<bool, N> mask() const { return splat<N>(true); }
};

// The first `n` lanes, 1 <= n < N.
template <int N>
struct Tail {
  static constexpr int L = N;
  static constexpr bool full = false;
  int64_t n;
  KGEN_FN Mask<N> mask() const {
#if KGEN_AVX512
    return {typename Mask<N>::Bits((uint64_t(1) << n) - 1)};
#else
    Mask<N> out;
    KGEN_UNROLL for (int i = 0; i < out.lanes.K; ++i) {
      constexpr int W = Vec<int32_t, N>::W;
      [&]<int... I>(Lanes<I...>) KGEN_INLINE {
        out.lanes.r[i] = Register<int32_t, W>{I...} < splat_register<Register<int32_t, W>>(int32_t(n - i * W));
      }(lane_numbers<W>{});
    }
    return out;
#endif
  }
};

// ---- conversions between lane types ---------------------------------------------------------------------------------

#if KGEN_X86
// Integers to wider ones. GCC 12 compiles many of its own vector conversions lane by lane, so all are spelled out.
template <class To, class From, int N>
KGEN_FN Register<To, N> widen_integers(Register<From, N> x) {
  const auto whole = widen_register<larger(N, int(16 / sizeof(From)))>(x);
#define KGEN_WIDEN(count, from, to, prefix, raw)                                              \
  if constexpr (sizeof(From) * 8 == from && sizeof(To) * 8 == to && N == count) {             \
    if constexpr (std::is_signed_v<From>) return (Register<To, N>)prefix##_cvtepi##from##_epi##to((raw)whole); \
    else return (Register<To, N>)prefix##_cvtepu##from##_epi##to((raw)whole);                 \
  }
  KGEN_WIDEN(8, 8, 16, _mm, __m128i)
  KGEN_WIDEN(4, 8, 32, _mm, __m128i)
  KGEN_WIDEN(4, 16, 32, _mm, __m128i)
  KGEN_WIDEN(16, 8, 16, _mm256, __m128i)
  KGEN_WIDEN(8, 8, 32, _mm256, __m128i)
  KGEN_WIDEN(4, 8, 64, _mm256, __m128i)
  KGEN_WIDEN(8, 16, 32, _mm256, __m128i)
  KGEN_WIDEN(4, 16, 64, _mm256, __m128i)
  KGEN_WIDEN(4, 32, 64, _mm256, __m128i)
#if KGEN_AVX512
  KGEN_WIDEN(32, 8, 16, _mm512, __m256i)
  KGEN_WIDEN(16, 8, 32, _mm512, __m128i)
  KGEN_WIDEN(8, 8, 64, _mm512, __m128i)
  KGEN_WIDEN(16, 16, 32, _mm512, __m256i)
  KGEN_WIDEN(8, 16, 64, _mm512, __m128i)
  KGEN_WIDEN(8, 32, 64, _mm512, __m256i)
#endif
#undef KGEN_WIDEN
}
#endif

#if KGEN_AVX512
// The low bytes of each integer.
template <class To, class From, int N>
KGEN_FN Register<To, N> narrow_integers(Register<From, N> x) {
#define KGEN_NARROW(from, to)                                                                                      \
  if constexpr (sizeof(From) * 8 == from && sizeof(To) * 8 == to) {                                                \
    if constexpr (sizeof(x) == 64) return low_lanes(_mm512_cvtepi##from##_epi##to((__m512i)x));                    \
    else if constexpr (sizeof(x) == 32) return low_lanes(_mm256_cvtepi##from##_epi##to((__m256i)x));               \
    else return low_lanes(_mm_cvtepi##from##_epi##to((__m128i)x));                                                 \
  }
  const auto low_lanes = [](auto r) KGEN_INLINE { return register_part<N, 0>((Register<To, sizeof(r) / sizeof(To)>)r); };
  KGEN_NARROW(64, 32)
  KGEN_NARROW(64, 16)
  KGEN_NARROW(64, 8)
  KGEN_NARROW(32, 16)
  KGEN_NARROW(32, 8)
  KGEN_NARROW(16, 8)
#undef KGEN_NARROW
}
#endif

#if KGEN_AVX2
// The low bytes of each integer. AVX2 has no such instruction: one byte shuffle, then the halves side by side.
template <class To, class From, int N>
KGEN_FN Register<To, N> narrow_integers(Register<From, N> x) {
  constexpr int S = sizeof(From), D = sizeof(To), each = 16 * D / S;
  using Bytes = Register<int8_t, 16>;
  Bytes picks;
  [&]<int... I>(Lanes<I...>) KGEN_INLINE { picks = Bytes{int8_t(I < each ? I / D * S + I % D : -1)...}; }(lane_numbers<16>{});
  if constexpr (sizeof(x) == 16) {
    return register_part<N, 0>((Register<To, 16 / D>)_mm_shuffle_epi8((__m128i)x, (__m128i)picks));
  } else {
    const __m128i low = _mm_shuffle_epi8(_mm256_castsi256_si128((__m256i)x), (__m128i)picks);
    const __m128i high = _mm_shuffle_epi8(_mm256_extracti128_si256((__m256i)x, 1), (__m128i)picks);
    __m128i both;
    if constexpr (each == 8) both = _mm_unpacklo_epi64(low, high);
    if constexpr (each == 4) both = _mm_unpacklo_epi32(low, high);
    if constexpr (each == 2) both = _mm_unpacklo_epi16(low, high);
    return register_part<N, 0>((Register<To, 16 / D>)both);
  }
}
#endif

// One exact register; out-of-range floats convert as the x86 truncating instructions do.
template <class To, class From, int N>
KGEN_FN Register<To, N> convert_register(Register<From, N> x) {
  constexpr bool from_float = std::is_floating_point_v<From>;
  if constexpr (std::is_same_v<To, From>) {
    return x;
#if KGEN_X86
  } else if constexpr (std::is_integral_v<From> && std::is_integral_v<To> && sizeof(To) > sizeof(From) &&
                       N * sizeof(To) >= 16) {
    return widen_integers<To, From, N>(x);
  } else if constexpr (std::is_integral_v<From> && std::is_integral_v<To> && sizeof(To) < sizeof(From) && sizeof(x) >= 16) {
    return narrow_integers<To, From, N>(x);
#endif
  } else if constexpr (from_float && std::is_integral_v<To> && sizeof(To) < 4) {
    return convert_register<To, int32_t, N>(convert_register<int32_t, From, N>(x));
  } else if constexpr (from_float && std::is_same_v<To, uint64_t>) {
    using R = Register<From, N>;
    using I = Register<int64_t, N>;
    const R limit = splat_register<R>(From(9223372036854775808.0));
    const Register<signed_of_size<sizeof(From)>, N> high = x >= limit;
    const I low = convert_register<int64_t, From, N>(x - (R)(high & (Register<signed_of_size<sizeof(From)>, N>)limit));
    return (Register<uint64_t, N>)(low ^ (convert_register<int64_t, signed_of_size<sizeof(From)>, N>(high) << 63));
#if KGEN_AVX512
  } else if constexpr (std::is_same_v<From, float> && std::is_same_v<To, int64_t> && N == 8) {
    return (Register<int64_t, N>)_mm512_cvttps_epi64((__m256)x);
  } else if constexpr (std::is_same_v<From, float> && std::is_same_v<To, int64_t> && N == 4) {
    return (Register<int64_t, N>)_mm256_cvttps_epi64((__m128)x);
#endif
#if KGEN_AVX512
  } else if constexpr (std::is_same_v<To, double> && N == 8 && std::is_same_v<From, float>) {
    return (Register<To, N>)_mm512_cvtps_pd((__m256)x);
  } else if constexpr (std::is_same_v<To, double> && N == 8 && std::is_same_v<From, int32_t>) {
    return (Register<To, N>)_mm512_cvtepi32_pd((__m256i)x);
  } else if constexpr (std::is_same_v<To, double> && N == 8 && std::is_same_v<From, uint32_t>) {
    return (Register<To, N>)_mm512_cvtepu32_pd((__m256i)x);
#endif
  } else if constexpr (std::is_integral_v<From> && sizeof(From) < 4 && std::is_floating_point_v<To>) {
    return convert_register<To, int32_t, N>(convert_register<int32_t, From, N>(x));
  } else {
    return __builtin_convertvector(x, Register<To, N>);
  }
}

template <class To, class From>
KGEN_FN To convert_scalar(From x) {
  if constexpr (std::is_same_v<To, bool>) {
    return x != From(0);
  } else if constexpr (std::is_floating_point_v<From> && std::is_integral_v<To> && sizeof(To) < 4) {
    return To(int32_t(x));
  } else if constexpr (std::is_floating_point_v<From> && std::is_same_v<To, uint32_t>) {
    return To(int64_t(x));
  } else if constexpr (std::is_floating_point_v<From> && std::is_same_v<To, uint64_t>) {
    constexpr From limit = From(9223372036854775808.0);
    return x >= limit ? uint64_t(int64_t(x - limit)) ^ (uint64_t(1) << 63) : uint64_t(int64_t(x));
  } else {
    return static_cast<To>(x);
  }
}

template <class To, class From, int L>
KGEN_FN Vec<To, L> convert(Vec<From, L> v) {
  constexpr int N = smaller(L, kRegisterBytes / larger(int(sizeof(To)), int(sizeof(From))));
  if constexpr (std::is_same_v<To, From>) {
    return v;
  } else if constexpr (std::is_integral_v<To> && std::is_integral_v<From> && sizeof(To) == sizeof(From)) {
    return bitcast_<To>(v);
  } else if constexpr (std::is_floating_point_v<From> && std::is_same_v<To, uint32_t>) {
    // through 64 bits, so that negative values wrap as a scalar conversion does
    return convert<uint32_t>(convert<int64_t>(v));
  } else {
    return from_pieces<To, L, N>([&](auto piece) KGEN_INLINE {
      return convert_register<To, From, N>(piece_of<N, piece.value>(v));
    });
  }
}

// ---- masks: comparison results and selection ------------------------------------------------------------------------

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

template <int L>
KGEN_FN uint64_t mask_bits(Mask<L> mask) {
  return mask.bits;
}

template <Compare P, class T, class V>
KGEN_FN uint64_t compare_bits(V a, V b) {
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
    bits |= typename Mask<L>::Bits(typename Mask<L>::Bits(compare_bits<P, T>(a.r[i], b.r[i])) << (i * V::W % L));
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
  KGEN_UNROLL for (int i = 0; i < V::K; ++i) out.r[i] = blend_register(mask.bits >> (i * V::W % L), yes.r[i], no.r[i]);
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
