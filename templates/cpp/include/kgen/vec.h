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

#if KGEN_AVX512
// The bits of a mask in a wider integer. GCC merges a comparison with the extension of its mask to one instruction that it takes
// to write the lower bits only. Where registers run out it keeps these alone, and reads the upper ones from what lay there: so
// it may not see that the bits come from a comparison.
template <class To, class Bits>
KGEN_FN To extend_bits(Bits bits) {
  if constexpr (sizeof(To) > sizeof(Bits)) {
    if (!__builtin_constant_p(bits)) asm("" : "+k"(bits));
  }
  return bits;
}
#endif

// L booleans: one bit a lane where the machine has mask registers (bits from L up hold anything), else int32 lanes of 0 or -1.
template <int L>
struct Mask {
#if KGEN_AVX512
  using Bits = unsigned_of_size<(L <= 8 ? 1 : L / 8)>;
  Bits bits;
  KGEN_FN bool operator[](int lane) const { return (extend_bits<uint64_t>(bits) >> lane) & 1; }
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

// The first lane of a vector, or the scalar itself.
template <class X>
KGEN_FN lane_t<X> first_lane(X x) {
  if constexpr (lanes_of<X> > 1) {
    return x[0];
  } else {
    return x;
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

// Lanes [Nth * N, (Nth + 1) * N) as a GCC vector of exactly N lanes.
template <int N, int Nth, class T, int L>
KGEN_FN Register<T, N> subvector(Vec<T, L> v) {
  constexpr int W = Vec<T, L>::W, first = Nth * N;
  if constexpr (N == W) {
    return v.r[Nth];
  } else if constexpr (N < W) {
    return register_part<N, first % W>(v.r[first / W]);
  } else {
    return join_registers(subvector<N / 2, 2 * Nth>(v), subvector<N / 2, 2 * Nth + 1>(v));
  }
}

// A Vec from `make(integral_constant<part>)`, which gives N lanes each.
template <class T, int L, int N, class F>
KGEN_FN Vec<T, L> from_subvectors(F make) {
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
    constexpr int each = larger(1, smaller(V::W, L) / N);  // parts in one register
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
  return {typename Mask<L / 2>::Bits(extend_bits<uint64_t>(m.bits) >> (Half * L / 2))};
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

}  // namespace kgen
