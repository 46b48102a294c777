// Exact operations: arithmetic, comparisons, logic, bits, rounding, selection. Names end in an underscore. Every argument may
// be a Vec or a scalar, which is splatted; with scalars alone the result is a scalar.
#pragma once

#include "mask.h"

namespace kgen {

#define KGEN_BINARY(name, apply, ...)                                  \
  template <class A, class B>                                          \
  KGEN_FN auto name##_(A a, B b) {                                     \
    return apply([](auto x, auto y) KGEN_INLINE { return __VA_ARGS__; }, a, b); \
  }

// Integers as unsigned ones, so that overflow wraps.
template <class F, class... A>
KGEN_FN auto wrapping(F f, A... a) {
  using T = common_lane<A...>;
  if constexpr (std::is_floating_point_v<T>) {
    return lanewise(f, a...);
  } else if constexpr (lanes_of<A...> == 1) {
    return T(f(uint64_t(T(a))...));
  } else {
    return bitcast_<T>(lanewise(f, bitcast_<std::make_unsigned_t<T>>(coerce<common_t<A...>>(a))...));
  }
}

KGEN_BINARY(add, wrapping, x + y)
KGEN_BINARY(sub, wrapping, x - y)
KGEN_BINARY(mul, wrapping, x* y)
KGEN_BINARY(truediv, lanewise, x / y)
KGEN_BINARY(bitand, lanewise, x& y)
KGEN_BINARY(bitor, lanewise, x | y)
KGEN_BINARY(bitxor, lanewise, x ^ y)

// x > y ? x : y, and x < y ? x : y: the second argument when either is NaN, as the x86 instructions do.
template <class X>
KGEN_FN X max_or_second(X x, X y) {
#if KGEN_X86
  if constexpr (!std::is_arithmetic_v<X>) {
    using T = std::remove_cvref_t<decltype(x[0])>;
    if constexpr (std::is_floating_point_v<T>) {
      using R = X;
      constexpr int B = sizeof(R);
      KGEN_PICK_FP(max, x, y)
    }
  }
#endif
  return x > y ? x : y;
}
template <class X>
KGEN_FN X min_or_second(X x, X y) {
#if KGEN_X86
  if constexpr (!std::is_arithmetic_v<X>) {
    using T = std::remove_cvref_t<decltype(x[0])>;
    if constexpr (std::is_floating_point_v<T>) {
      using R = X;
      constexpr int B = sizeof(R);
      KGEN_PICK_FP(min, x, y)
    }
  }
#endif
  return x < y ? x : y;
}

KGEN_BINARY(fmax, lanewise, y != y ? x : max_or_second(x, y))
KGEN_BINARY(fmin, lanewise, y != y ? x : min_or_second(x, y))
template <class A, class B>
KGEN_FN auto maximum_(A a, B b) {
  if constexpr (std::is_floating_point_v<common_lane<A, B>>) {
    return lanewise([](auto x, auto y) KGEN_INLINE { return x != x ? x : max_or_second(x, y); }, a, b);
  } else {
    return lanewise([](auto x, auto y) KGEN_INLINE { return x > y ? x : y; }, a, b);
  }
}
template <class A, class B>
KGEN_FN auto minimum_(A a, B b) {
  if constexpr (std::is_floating_point_v<common_lane<A, B>>) {
    return lanewise([](auto x, auto y) KGEN_INLINE { return x != x ? x : min_or_second(x, y); }, a, b);
  } else {
    return lanewise([](auto x, auto y) KGEN_INLINE { return x < y ? x : y; }, a, b);
  }
}

template <class X>
KGEN_FN X neg_(X x) {
  return wrapping([](auto v) KGEN_INLINE { return -v; }, x);
}
template <class X>
KGEN_FN X square_(X x) {
  return mul_(x, x);
}
template <class X>
KGEN_FN X invert_(X x) {
  return lanewise([](auto v) KGEN_INLINE { return ~v; }, x);
}
template <class X>
KGEN_FN X reciprocal_(X x) {
  return truediv_(lane_t<X>(1), x);
}

// ---- comparisons, logic, selection ----------------------------------------------------------------------------------

template <Compare P, class A, class B>
KGEN_FN value_t<bool, lanes_of<A, B>> compare(A a, B b) {
  using C = common_t<A, B>;
  const C x = coerce<C>(a), y = coerce<C>(b);
  if constexpr (lanes_of<C> == 1) {
    return compare_lanes<P>(x, y);
  } else if constexpr (!std::is_same_v<lane_t<C>, bool>) {
    return compare_vectors<P>(x, y);
  } else {
    if constexpr (P == Compare::eq) return ~(x ^ y);
    if constexpr (P == Compare::ne) return x ^ y;
    if constexpr (P == Compare::lt) return ~x & y;
    if constexpr (P == Compare::le) return ~x | y;
    if constexpr (P == Compare::gt) return x & ~y;
    if constexpr (P == Compare::ge) return x | ~y;
  }
}
#define KGEN_COMPARE(name)                \
  template <class A, class B>             \
  KGEN_FN auto name##_(A a, B b) {        \
    return compare<Compare::name>(a, b);  \
  }
KGEN_COMPARE(eq)
KGEN_COMPARE(ne)
KGEN_COMPARE(lt)
KGEN_COMPARE(le)
KGEN_COMPARE(gt)
KGEN_COMPARE(ge)
#undef KGEN_COMPARE

template <class A, class B>
KGEN_FN auto and_(A a, B b) {
  using C = common_t<A, B>;
  return C(coerce<C>(a) & coerce<C>(b));
}
template <class A, class B>
KGEN_FN auto or_(A a, B b) {
  using C = common_t<A, B>;
  return C(coerce<C>(a) | coerce<C>(b));
}
template <class A, class B>
KGEN_FN auto xor_(A a, B b) {
  using C = common_t<A, B>;
  return C(coerce<C>(a) ^ coerce<C>(b));
}
KGEN_FN bool not_(bool a) { return !a; }
template <int L>
KGEN_FN Mask<L> not_(Mask<L> a) {
  return ~a;
}

template <class M, class A, class B>
KGEN_FN auto where_(M mask, A a, B b) {
  constexpr int L = lanes_of<M, A, B>;
  using C = value_t<common_lane<A, B>, L>;
  const C yes = coerce<C>(coerce<common_t<A, B>>(a)), no = coerce<C>(coerce<common_t<A, B>>(b));
  if constexpr (L == 1) {
    return mask ? yes : no;
  } else {
    const auto m = coerce<Mask<L>>(mask);
    if constexpr (std::is_same_v<lane_t<C>, bool>) {
      return (m & yes) | (~m & no);
    } else {
      return select(m, yes, no);
    }
  }
}

template <class X>
KGEN_FN auto isnan_(X x) {
  return ne_(x, x);
}
template <class X>
KGEN_FN X abs_(X x) {
  using T = lane_t<X>;
  if constexpr (std::is_floating_point_v<T>) {
    using I = unsigned_of_size<sizeof(T)>;
    return bitcast_<T>(bitand_(bitcast_<I>(x), I(I(-1) >> 1)));
  } else if constexpr (std::is_unsigned_v<T>) {
    return x;
  } else {
    return maximum_(x, neg_(x));
  }
}
template <class X>
KGEN_FN auto isinf_(X x) {
  return eq_(abs_(x), lane_t<X>(__builtin_inf()));
}
template <class X>
KGEN_FN auto signbit_(X x) {
  using T = lane_t<X>;
  if constexpr (std::is_floating_point_v<T>) {
    using I = signed_of_size<sizeof(T)>;
    return lt_(bitcast_<I>(x), I(0));
  } else {
    return lt_(x, T(0));
  }
}
template <class X>
KGEN_FN X sign_(X x) {
  using T = lane_t<X>;
  if constexpr (std::is_unsigned_v<T>) {
    return where_(ne_(x, T(0)), T(1), T(0));
  } else {
    return where_(gt_(x, T(0)), T(1), where_(lt_(x, T(0)), T(-1), T(0)));
  }
}
// The bits of `b` where the mask has ones, else those of `a`. GCC 12 makes three instructions of the operators.
template <class R>
KGEN_FN R bits_where(R mask, R a, R b) {
#if KGEN_AVX512
  if constexpr (sizeof(R) == 64) return (R)_mm512_ternarylogic_epi64((__m512i)a, (__m512i)b, (__m512i)mask, 0xD8);
  else if constexpr (sizeof(R) == 32) return (R)_mm256_ternarylogic_epi64((__m256i)a, (__m256i)b, (__m256i)mask, 0xD8);
  else if constexpr (sizeof(R) == 16) return (R)_mm_ternarylogic_epi64((__m128i)a, (__m128i)b, (__m128i)mask, 0xD8);
#endif
  return (a & ~mask) | (b & mask);
}
template <class A, class B>
KGEN_FN auto copysign_(A a, B b) {
  using C = common_t<A, B>;
  using T = lane_t<C>;
  using I = unsigned_of_size<sizeof(T)>;
  constexpr I sign = I(1) << (8 * sizeof(T) - 1);
  const auto from = [](auto size, auto number) KGEN_INLINE { return bits_where(decltype(size){} + sign, size, number); };
  return bitcast_<T>(lanewise(from, bitcast_<I>(coerce<C>(a)), bitcast_<I>(coerce<C>(b))));
}

// ---- shifts: counts outside the width act as torch's CPU kernels make them act ------------------------------------------

template <class A, class B>
KGEN_FN auto shl_(A a, B b) {
  using C = common_t<A, B>;
  using T = lane_t<C>;
  using U = std::make_unsigned_t<T>;
  constexpr U width = 8 * sizeof(T);
  const auto value = bitcast_<U>(coerce<C>(a)), count = bitcast_<U>(coerce<C>(b));
  const auto safe = bitand_(count, U(width - 1));
  return bitcast_<T>(where_(lt_(count, width), lanewise([](auto x, auto n) KGEN_INLINE { return x << n; }, value, safe), U(0)));
}
template <class A, class B>
KGEN_FN auto shr_(A a, B b) {
  using C = common_t<A, B>;
  using T = lane_t<C>;
  using U = std::make_unsigned_t<T>;
  constexpr U width = 8 * sizeof(T), most = width - 1;
  const C value = coerce<C>(a);
  const auto count = bitcast_<U>(coerce<C>(b));
  const auto safe = bitcast_<T>(minimum_(count, most));
  const C shifted = lanewise([](auto x, auto n) KGEN_INLINE { return x >> n; }, value, safe);
  if constexpr (std::is_signed_v<T>) {
    return shifted;
  } else {
    return where_(lt_(count, width), shifted, T(0));
  }
}

// ---- rounding, roots, fused multiply-add --------------------------------------------------------------------------------

enum class Rounding { nearest = 0, down = 1, up = 2, zero = 3 };

template <Rounding To, class T>
KGEN_FN T round_scalar(T x) {
  if constexpr (To == Rounding::nearest) return sizeof(T) == 4 ? __builtin_rintf(x) : __builtin_rint(x);
  if constexpr (To == Rounding::down) return sizeof(T) == 4 ? __builtin_floorf(x) : __builtin_floor(x);
  if constexpr (To == Rounding::up) return sizeof(T) == 4 ? __builtin_ceilf(x) : __builtin_ceil(x);
  if constexpr (To == Rounding::zero) return sizeof(T) == 4 ? __builtin_truncf(x) : __builtin_trunc(x);
}
template <class F, class R, class... Rest>
KGEN_FN R map_lanes_of_register(F f, R x, Rest... rest) {
  R out;
  KGEN_LANE_BY_LANE();
  for (size_t i = 0; i < sizeof(R) / sizeof(x[0]); ++i) out[i] = f(x[i], rest[i]...);
  return out;
}
template <Rounding To, class R, class T = std::remove_cvref_t<decltype(R{}[0])>, int B = sizeof(R)>
KGEN_FN R round_register(R x) {
#if KGEN_AVX512
  KGEN_PICK_FP(roundscale, x, int(To) | _MM_FROUND_NO_EXC)
#elif KGEN_AVX2
  KGEN_PICK_FP(round, x, int(To) | _MM_FROUND_NO_EXC)
#else
  return map_lanes_of_register([](T v) KGEN_INLINE { return round_scalar<To>(v); }, x);
#endif
}
template <class R, class T = std::remove_cvref_t<decltype(R{}[0])>, int B = sizeof(R)>
KGEN_FN R sqrt_register(R x) {
#if KGEN_X86
  KGEN_PICK_FP(sqrt, x)
#else
  return map_lanes_of_register([](T v) KGEN_INLINE { return sizeof(T) == 4 ? __builtin_sqrtf(v) : __builtin_sqrt(v); }, x);
#endif
}
template <class R, class T = std::remove_cvref_t<decltype(R{}[0])>, int B = sizeof(R)>
KGEN_FN R fma_register(R x, R y, R z) {
#if KGEN_X86
  KGEN_PICK_FP(fmadd, x, y, z)
#else
  return map_lanes_of_register(
      [](T a, T b, T c) KGEN_INLINE { return sizeof(T) == 4 ? __builtin_fmaf(a, b, c) : __builtin_fma(a, b, c); }, x, y, z);
#endif
}

template <Rounding To, class X>
KGEN_FN X round_to_integer(X x) {
  if constexpr (lanes_of<X> == 1) {
    return round_scalar<To>(x);
  } else {
    return map_registers<X>([](auto r) KGEN_INLINE { return round_register<To>(r); }, x);
  }
}
template <class X>
KGEN_FN X floor_(X x) { return round_to_integer<Rounding::down>(x); }
template <class X>
KGEN_FN X ceil_(X x) { return round_to_integer<Rounding::up>(x); }
template <class X>
KGEN_FN X trunc_(X x) { return round_to_integer<Rounding::zero>(x); }
template <class X>
KGEN_FN X round_(X x) { return round_to_integer<Rounding::nearest>(x); }

template <class X>
KGEN_FN X sqrt_(X x) {
  if constexpr (lanes_of<X> == 1) {
    return sizeof(X) == 4 ? __builtin_sqrtf(x) : __builtin_sqrt(x);
  } else {
    return map_registers<X>([](auto r) KGEN_INLINE { return sqrt_register(r); }, x);
  }
}
template <class X>
KGEN_FN X rsqrt_(X x) {
  return truediv_(lane_t<X>(1), sqrt_(x));
}
template <class A, class B, class C>
KGEN_FN auto fma_(A a, B b, C c) {
  using V = common_t<A, B, C>;
  if constexpr (lanes_of<V> == 1) {
    return sizeof(V) == 4 ? V(__builtin_fmaf(a, b, c)) : V(__builtin_fma(a, b, c));
  } else {
    const auto fused = [](auto x, auto y, auto z) KGEN_INLINE { return fma_register(x, y, z); };
    return map_registers<V>(fused, coerce<V>(a), coerce<V>(b), coerce<V>(c));
  }
}

// True when every lane of a mask is false.
template <int L>
KGEN_FN bool none_of(Mask<L> m) {
#if KGEN_AVX512
  return L >= 8 ? m.bits == 0 : (m.bits & ((1 << (L & 7)) - 1)) == 0;
#else
  auto any = m.lanes.r[0];
  KGEN_UNROLL for (int i = 1; i < m.lanes.K; ++i) any |= m.lanes.r[i];
  const auto words = (Register<uint64_t, sizeof(any) / 8>)any;
  uint64_t all = 0;
  KGEN_UNROLL for (size_t i = 0; i < sizeof(any) / 8; ++i) all |= words[i];
  return all == 0;
#endif
}

// ---- integer division: zero where the divisor is zero, wrapping for the smallest integer by -1 ----------------------------

template <class T>
KGEN_FN T divide_scalar(T a, T b) {
  if (b == T(0)) return T(0);
  if constexpr (std::is_signed_v<T>) {
    if (b == T(-1)) return T(-uint64_t(a));
  }
  return T(a / b);
}
// kept out of line: sixteen divisions in a row are rare and long
template <class T, int L>
[[gnu::noinline, gnu::cold]] Vec<T, L> divide_lanes(Vec<T, L> a, Vec<T, L> b) {
  return each_lane<T>([](T x, T y) KGEN_INLINE { return divide_scalar(x, y); }, a, b);
}

// Quotients rounded to zero. A float quotient of n-bit integers cannot round up to the next integer when the format has more
// than n bits: the gap is at least 1/b of it. So 16 bits go through float, 32 bits through double, and 64-bit integers
// through double too when all are below 2**52.
template <class T, int L>
KGEN_FN Vec<T, L> divide_vectors(Vec<T, L> a, Vec<T, L> b) {
  const auto through = [&]<class F>(F) KGEN_INLINE {
    const auto q = cast_<T>(truediv_(cast_<F>(a), cast_<F>(b)));
    return where_(eq_(b, T(0)), T(0), q);
  };
  if constexpr (sizeof(T) <= 2) {
    return through(float{});
  } else if constexpr (KGEN_X86 && std::is_same_v<T, int32_t>) {
    return through(double{});
  } else if constexpr (KGEN_AVX512 && sizeof(T) == 4) {
    return through(double{});
  } else if constexpr (KGEN_AVX512) {
    const auto most = maximum_(bitcast_<uint64_t>(abs_(a)), bitcast_<uint64_t>(abs_(b)));
    return none_of(ge_(most, uint64_t(1) << 52)) ? through(double{}) : divide_lanes(a, b);
  } else {
    return divide_lanes(a, b);
  }
}

template <class A, class B>
KGEN_FN auto divide_integers(A a, B b) {
  using C = common_t<A, B>;
  if constexpr (lanes_of<C> == 1) {
    return divide_scalar(coerce<C>(a), coerce<C>(b));
  } else {
    return divide_vectors(coerce<C>(a), coerce<C>(b));
  }
}
// a - q b, and 0 where b is 0
template <class C>
KGEN_FN C rest_of_division(C a, C b, C q) {
  return where_(eq_(b, lane_t<C>(0)), lane_t<C>(0), sub_(a, mul_(q, b)));
}
// Where a non-zero rest and the divisor differ in sign: there the floored quotient is one less than the truncated one.
template <class C>
KGEN_FN auto rounds_wrong(C rest, C b) {
  using T = lane_t<C>;
  return and_(ne_(rest, T(0)), xor_(lt_(rest, T(0)), lt_(b, T(0))));
}

// Euclid's algorithm. Sizes wrap: the smallest integer stays negative, as in torch.
template <class T>
KGEN_FN T gcd_scalar(T a, T b) {
  a = abs_(a);
  b = abs_(b);
  while (a != 0) {
    const T rest = T(b % a);
    b = a;
    a = rest;
  }
  return b;
}
// All lanes step until the last one is done; one that is done divides by zero, which changes nothing.
template <class A, class B>
KGEN_FN auto gcd_(A a, B b) {
  using C = common_t<A, B>;
  using T = lane_t<C>;
  C x = coerce<C>(a), y = coerce<C>(b);
  if constexpr (lanes_of<C> == 1) {
    return gcd_scalar(x, y);
  } else {
    x = abs_(x);
    y = abs_(y);
    for (auto left = ne_(x, T(0)); !none_of(left); left = ne_(x, T(0))) {
      const C rest = rest_of_division(y, x, divide_vectors(y, x));
      y = where_(left, x, y);
      x = rest;
    }
    return y;
  }
}

// a to the b by squaring, wrapping; with a negative exponent 0, or 1 and -1 for the bases 1 and -1.
template <class T>
KGEN_FN T power_scalar(T base, T exponent) {
  if (exponent < T(0)) {
    if (base == T(1)) return T(1);
    return base == T(-1) ? (exponent % 2 == 0 ? T(1) : T(-1)) : T(0);
  }
  uint64_t result = 1, square = uint64_t(base);
  for (uint64_t left = uint64_t(exponent); left != 0; left >>= 1) {
    if (left & 1) result *= square;
    square *= square;
  }
  return T(result);
}
template <class T, int L>
KGEN_FN Vec<T, L> power_vectors(Vec<T, L> base, Vec<T, L> exponent) {
  using U = std::make_unsigned_t<T>;
  auto result = splat<L>(U(1)), square = bitcast_<U>(base), left = bitcast_<U>(exponent);
  const auto negative = lt_(exponent, T(0));
  if constexpr (std::is_signed_v<T>) left = where_(negative, U(0), left);
  while (!none_of(ne_(left, U(0)))) {
    result = where_(ne_(bitand_(left, U(1)), U(0)), mul_(result, square), result);
    square = mul_(square, square);
    left = shr_(left, U(1));
  }
  if constexpr (std::is_signed_v<T>) {
    const auto even = eq_(bitand_(exponent, T(1)), T(0));
    const auto of_minus_one = where_(eq_(base, T(-1)), where_(even, T(1), T(-1)), T(0));
    return where_(negative, where_(eq_(base, T(1)), T(1), of_minus_one), bitcast_<T>(result));
  } else {
    return result;
  }
}
template <class A, class B>
KGEN_FN auto ipow_(A a, B b) {
  using C = common_t<A, B>;
  if constexpr (lanes_of<C> == 1) {
    return power_scalar(coerce<C>(a), coerce<C>(b));
  } else {
    return power_vectors(coerce<C>(a), coerce<C>(b));
  }
}

// The next float from a towards b.
template <class A, class B>
KGEN_FN auto nextafter_(A a, B b) {
  using C = common_t<A, B>;
  using T = lane_t<C>;
  using I = signed_of_size<sizeof(T)>;
  const C x = coerce<C>(a), y = coerce<C>(b);
  const auto bits = bitcast_<I>(x);
  const auto away = eq_(lt_(x, y), gt_(x, T(0)));
  const C moved = bitcast_<T>(add_(bits, where_(away, I(1), I(-1))));
  const C from_zero = copysign_(C(coerce<C>(bits_as<T>(I(1)))), y);
  const C result = where_(eq_(x, y), y, where_(eq_(x, T(0)), from_zero, moved));
  return where_(or_(isnan_(x), isnan_(y)), add_(x, y), result);
}

#undef KGEN_BINARY

// Operators as types, for scatter_combine.
struct Add {
  template <class A, class B>
  KGEN_FN static auto apply(A a, B b) { return add_(a, b); }
};
struct Mul {
  template <class A, class B>
  KGEN_FN static auto apply(A a, B b) { return mul_(a, b); }
};
struct Max {
  template <class A, class B>
  KGEN_FN static auto apply(A a, B b) { return maximum_(a, b); }
};
struct Min {
  template <class A, class B>
  KGEN_FN static auto apply(A a, B b) { return minimum_(a, b); }
};
struct Or {
  template <class A, class B>
  KGEN_FN static auto apply(A a, B b) { return or_(a, b); }
};
struct And {
  template <class A, class B>
  KGEN_FN static auto apply(A a, B b) { return and_(a, b); }
};

}  // namespace kgen
