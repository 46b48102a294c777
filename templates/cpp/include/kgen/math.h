// Transcendental and special functions. The hot ones of float are inline polynomials (exp, log, tanh, sigmoid, erf); the others
// are calls into lib/vecmath.cpp, compiled once a machine. A scalar gets the same result as a lane of a vector.
#pragma once

#include "mathlist.h"
#include "ops.h"

// ---- the library ----------------------------------------------------------------------------------------------------

extern "C" {
#if KGEN_X86
#if KGEN_AVX512
typedef __m512 kgen_floats;
typedef __m512d kgen_doubles;
#else
typedef __m256 kgen_floats;
typedef __m256d kgen_doubles;
#endif
#define KGEN_DECLARE_VECTOR_UNARY(name)                      \
  kgen_floats KGEN_MATH(v, name, f32)(kgen_floats) noexcept; \
  kgen_doubles KGEN_MATH(v, name, f64)(kgen_doubles) noexcept;
#define KGEN_DECLARE_VECTOR_BINARY(name)                                  \
  kgen_floats KGEN_MATH(v, name, f32)(kgen_floats, kgen_floats) noexcept; \
  kgen_doubles KGEN_MATH(v, name, f64)(kgen_doubles, kgen_doubles) noexcept;
#else
#define KGEN_DECLARE_VECTOR_UNARY(name)
#define KGEN_DECLARE_VECTOR_BINARY(name)
#endif
#define KGEN_DECLARE_UNARY(name)                 \
  float KGEN_MATH(s, name, f32)(float) noexcept; \
  double KGEN_MATH(s, name, f64)(double) noexcept;
#define KGEN_DECLARE_BINARY(name)                       \
  float KGEN_MATH(s, name, f32)(float, float) noexcept; \
  double KGEN_MATH(s, name, f64)(double, double) noexcept;
KGEN_VECTOR_UNARY(KGEN_DECLARE_VECTOR_UNARY)
KGEN_VECTOR_BINARY(KGEN_DECLARE_VECTOR_BINARY)
KGEN_DECLARE_VECTOR_BINARY(fmod)
KGEN_VECTOR_UNARY(KGEN_DECLARE_UNARY)
KGEN_SCALAR_UNARY(KGEN_DECLARE_UNARY)
KGEN_VECTOR_BINARY(KGEN_DECLARE_BINARY)
KGEN_DECLARE_BINARY(fmod)
KGEN_SCALAR_BINARY(KGEN_DECLARE_BINARY)
#undef KGEN_DECLARE_VECTOR_UNARY
#undef KGEN_DECLARE_VECTOR_BINARY
#undef KGEN_DECLARE_UNARY
#undef KGEN_DECLARE_BINARY
}

namespace kgen {

// Calls `f` on full machine registers: shorter ones are padded with zeros.
template <class V, class F, class... A>
KGEN_FN V map_full_registers(F f, A... a) {
  constexpr int full = kRegisterBytes / sizeof(lane_t<V>);
  return map_registers<V>(
      [&](auto... r) KGEN_INLINE { return register_part<V::W, 0>(f(widen_register<full>(r)...)); }, a...);
}

// One library function as an object: picks the float or the double entry.
#define KGEN_SCALAR_ENTRY(name)                                                 \
  struct scalar_##name {                                                        \
    template <class T, class... Rest>                                           \
    KGEN_FN T operator()(T x, Rest... rest) const {                             \
      if constexpr (sizeof(T) == 4) return KGEN_MATH(s, name, f32)(x, rest...); \
      else return KGEN_MATH(s, name, f64)(x, rest...);                          \
    }                                                                           \
  };
#if KGEN_X86
#define KGEN_VECTOR_ENTRY(name)                                                       \
  struct vector_##name {                                                              \
    template <class R, class... Rest>                                                 \
    KGEN_FN R operator()(R x, Rest... rest) const {                                   \
      if constexpr (sizeof(x[0]) == 4) return (R)KGEN_MATH(v, name, f32)(x, rest...); \
      else return (R)KGEN_MATH(v, name, f64)(x, rest...);                             \
    }                                                                                 \
  };
#else
#define KGEN_VECTOR_ENTRY(name)
#endif

// Lane by lane.
#define KGEN_SCALAR_FUNCTION(name)                                     \
  KGEN_SCALAR_ENTRY(name)                                              \
  template <class... A>                                                \
  KGEN_FN auto name##_(A... a) {                                       \
    return each_lane<common_lane<A...>>(scalar_##name{}, a...);        \
  }
// A whole register at a time.
#if KGEN_X86
#define KGEN_VECTOR_FUNCTION_AS(name, as)                              \
  KGEN_SCALAR_ENTRY(name)                                              \
  KGEN_VECTOR_ENTRY(name)                                              \
  template <class... A>                                                \
  KGEN_FN auto as(A... a) {                                            \
    using C = common_t<A...>;                                          \
    if constexpr (lanes_of<C> == 1) return scalar_##name{}(coerce<C>(a)...); \
    else return map_full_registers<C>(vector_##name{}, coerce<C>(a)...); \
  }
#else
#define KGEN_VECTOR_FUNCTION_AS(name, as)                              \
  KGEN_SCALAR_ENTRY(name)                                              \
  template <class... A>                                                \
  KGEN_FN auto as(A... a) {                                            \
    return each_lane<common_lane<A...>>(scalar_##name{}, a...);        \
  }
#endif
#define KGEN_VECTOR_FUNCTION(name) KGEN_VECTOR_FUNCTION_AS(name, name##_)

KGEN_VECTOR_FUNCTION_AS(exp, library_exp)
KGEN_VECTOR_FUNCTION_AS(log, library_log)
KGEN_VECTOR_FUNCTION_AS(tanh, library_tanh)
KGEN_VECTOR_FUNCTION_AS(erf, library_erf)
KGEN_VECTOR_FUNCTION(exp2)
KGEN_VECTOR_FUNCTION(expm1)
KGEN_VECTOR_FUNCTION(log2)
KGEN_VECTOR_FUNCTION(log10)
KGEN_VECTOR_FUNCTION(log1p)
KGEN_VECTOR_FUNCTION(sin)
KGEN_VECTOR_FUNCTION(cos)
KGEN_VECTOR_FUNCTION(tan)
KGEN_VECTOR_FUNCTION(asin)
KGEN_VECTOR_FUNCTION(acos)
KGEN_VECTOR_FUNCTION(atan)
KGEN_VECTOR_FUNCTION(sinh)
KGEN_VECTOR_FUNCTION(cosh)
KGEN_VECTOR_FUNCTION(atanh)
KGEN_VECTOR_FUNCTION(erfc)
KGEN_VECTOR_FUNCTION(lgamma)
KGEN_VECTOR_FUNCTION(pow)
KGEN_VECTOR_FUNCTION(atan2)
KGEN_VECTOR_FUNCTION(hypot)
KGEN_VECTOR_FUNCTION_AS(fmod, library_fmod)
KGEN_SCALAR_UNARY(KGEN_SCALAR_FUNCTION)
KGEN_SCALAR_BINARY(KGEN_SCALAR_FUNCTION)

#undef KGEN_VECTOR_FUNCTION
#undef KGEN_VECTOR_FUNCTION_AS
#undef KGEN_SCALAR_FUNCTION
#undef KGEN_VECTOR_ENTRY
#undef KGEN_SCALAR_ENTRY

// ---- inline float functions -----------------------------------------------------------------------------------------
//
// Arguments are reduced as in Cody and Waite, "Software Manual for the Elementary Functions" (1980); the polynomials are this
// project's own weighted minimax fits (Lawson's iteration, computed in 40 digits). R is a register of float lanes.

template <class R>
KGEN_FN R lit(float value) {
  return splat_register<R>(value);
}
template <class R>
using int_register = Register<int32_t, sizeof(R) / 4>;

// x y + z: fused where the machine can, as nothing here depends on the single rounding.
template <class R>
KGEN_FN R mul_add(R x, R y, R z) {
#if KGEN_X86
  return fma_register(x, y, z);
#else
  return x * y + z;
#endif
}
template <class R>
KGEN_FN R polynomial(R, float constant) {
  return lit<R>(constant);
}
// c0 + c1 x + c2 x^2 + ...
template <class R, class... C>
KGEN_FN R polynomial(R x, float c0, C... rest) {
  return mul_add(polynomial(x, rest...), x, lit<R>(c0));
}

// exp(x) = 2^n exp(r), |r| <= log(2) / 2, of numbers whose result is one of the format, or NaN. Error below 1 ulp.
template <class R>
KGEN_FN R exp_in_range(R x) {
  const R magic = lit<R>(12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest integer
  const R shifted = mul_add(x, lit<R>(1.44269504f), magic);
  const R n = shifted - magic;
  R r = mul_add(n, lit<R>(-0.693359375f), x);
  r = mul_add(n, lit<R>(2.12194440e-4f), r);
  const R tail = polynomial(r, 4.999999404e-01f, 1.666651517e-01f, 4.166845977e-02f, 8.369423449e-03f, 1.381308888e-03f);
  const R p = mul_add(r * r, tail, r) + lit<R>(1.0f);
#if KGEN_AVX512
  using T = float;
  constexpr int B = sizeof(R);
  return [&]() KGEN_INLINE { KGEN_PICK_FP(scalef, p, n) }();
#else
  // in two steps: the exponent may lie outside the format where the result does not
  const auto whole = (int_register<R>)shifted - (int_register<R>)magic;
  const auto half_of_it = whole >> 1;
  const auto power = [](auto k) KGEN_INLINE { return (R)((k + 127) << 23); };
  return p * power(half_of_it) * power(whole - half_of_it);
#endif
}
template <class R>
KGEN_FN R exp_register(R x) {
  // in this order of arguments NaN passes; beyond these bounds the result is 0 or infinity anyway
  return exp_in_range(min_or_second(lit<R>(89.0f), max_or_second(lit<R>(-104.5f), x)));
}
// exp(x) for x <= 0, with 0 for what would be subnormal: making one of these takes a CPU a hundred cycles.
template <class R>
KGEN_FN R exp_of_negative_register(R x) {
  const R least = lit<R>(-87.0f);
  const R result = exp_in_range(max_or_second(least, x));
  return x < least ? R{} : result;
}

// log(x) = e log(2) + log(1 + f), 1 + f in [2/3, 4/3). Error below 1 ulp.
template <class R>
KGEN_FN R log_register(R x) {
  using I = int_register<R>;
  const auto subnormal = x < lit<R>(1.17549435e-38f);
  const R scaled = subnormal ? x * lit<R>(8388608.0f) : x;
  const I bits = (I)scaled;
  const I exponent = (bits - splat_register<I>(0x3f2aaaab)) >> 23;
  const R f = (R)(bits - (exponent << 23)) - lit<R>(1.0f);
  const R e = __builtin_convertvector(exponent, R) - (subnormal ? lit<R>(23.0f) : R{});
  const R square = f * f;
  const R tail = polynomial(f, 3.333333433e-01f, -2.499981970e-01f, 1.999959946e-01f, -1.667958200e-01f, 1.430440694e-01f,
                            -1.219572499e-01f, 1.075483412e-01f, -1.284528077e-01f, 1.200475618e-01f);
  R low = mul_add(square * f, tail, e * lit<R>(-2.12194440e-4f));
  low = mul_add(square, lit<R>(-0.5f), low);
  R result = mul_add(e, lit<R>(0.693359375f), low + f);
  const R infinity = lit<R>(__builtin_inff());
  result = x == infinity ? infinity : result;
  result = x == R{} ? -infinity : result;
  return x >= R{} ? result : lit<R>(__builtin_nanf(""));
}

template <class R>
KGEN_FN R with_sign_of(R size, R sign) {
  using I = int_register<R>;
  return (R)((I)size | ((I)sign & splat_register<I>(int32_t(0x80000000))));
}
template <class R>
KGEN_FN R size_of(R x) {
  using I = int_register<R>;
  return (R)((I)x & splat_register<I>(0x7fffffff));
}

// Below 0.625 an odd polynomial, above 1 - 2 / (exp(2x) + 1). Error below 1.5 ulp.
template <class R>
KGEN_FN R tanh_register(R x) {
  const R size = size_of(x), square = x * x;
  const R tail =
      polynomial(square, -3.333328068e-01f, 1.333144158e-01f, -5.373964831e-02f, 2.063888870e-02f, -5.704785232e-03f);
  const R small = mul_add(x * square, tail, x);
  const R large = lit<R>(1.0f) - lit<R>(2.0f) / (exp_register(size + size) + lit<R>(1.0f));
  return with_sign_of(size < lit<R>(0.625f) ? small : large, x);  // the polynomial of -0 is +0
}

#if KGEN_X86
// erf(n Width + r) = sum of table[k][n] r^k for |r| <= Width / 2: see tools/fit_erf.py. A permutation of AVX-512 selects from
// sixteen centres, one of AVX2 from eight.
#if KGEN_AVX512
inline constexpr float erf_width = 17.0f / 64.0f;
alignas(64) inline constexpr float erf_table[6][16] = {
    {0.000000000e+00f, 2.928232339e-01f, 5.475284371e-01f, 7.402369806e-01f, 8.670582712e-01f, 9.396533572e-01f,
     9.757977233e-01f, 9.914502890e-01f, 9.973459703e-01f, 9.992773910e-01f, 9.998276967e-01f, 9.999640621e-01f,
     9.999934498e-01f, 9.999989576e-01f, 9.999998552e-01f, 9.999999825e-01f},
    {1.128379163e+00f, 1.051508284e+00f, 8.509139062e-01f, 5.979623287e-01f, 3.649028933e-01f, 1.933731035e-01f,
     8.898772534e-02f, 3.556144699e-02f, 1.234082029e-02f, 3.718980734e-03f, 9.732381913e-04f, 2.211717723e-04f,
     4.364712395e-05f, 7.479920762e-06f, 1.113150443e-06f, 1.438554505e-07f},
    {0.000000000e+00f, -2.792995417e-01f, -4.520395495e-01f, -4.764976054e-01f, -3.877111670e-01f, -2.568275431e-01f,
     -1.418269406e-01f, -6.612288773e-02f, -2.622393119e-02f, -8.890148724e-03f, -2.584796553e-03f, -6.460647578e-04f,
     -1.390638647e-04f, -2.581153289e-05f, -4.135405507e-06f, -5.723703598e-07f},
    {-3.761217102e-01f, -3.010395645e-01f, -1.235389904e-01f, 5.381719604e-02f, 1.529909500e-01f, 1.629381831e-01f,
     1.210266667e-01f, 7.011088778e-02f, 3.303773362e-02f, 1.292984156e-02f, 4.253362040e-03f, 1.185006601e-03f,
     2.810541257e-04f, 5.695460803e-05f, 9.888094769e-06f, 1.473793973e-06f},
    {0.000000000e+00f, 1.319722650e-01f, 1.822166174e-01f, 1.368418686e-01f, 4.823861591e-02f, -2.200446340e-02f,
     -4.875141134e-02f, -4.301584397e-02f, -2.640829553e-02f, -1.257332281e-02f, -4.842928104e-03f, -1.541802998e-03f,
     -4.108565787e-04f, -9.239129742e-05f, -1.763161487e-05f, -2.867076208e-06f},
    {1.121298065e-01f, 7.577857980e-02f, -1.725961223e-03f, -5.943869878e-02f, -6.594930929e-02f, -3.687014874e-02f,
     -5.121039481e-03f, 1.091733374e-02f, 1.244587314e-02f, 8.071180737e-03f, 3.828644578e-03f, 1.428831748e-03f,
     4.334212531e-04f, 1.087966717e-04f, 2.285199229e-05f, 4.046486237e-06f},
};

// table[n], where n is the low four bits of each lane.
template <class R>
KGEN_FN R look_up(const float (&table)[16], int_register<R> n) {
  if constexpr (sizeof(R) == 64) {
    return _mm512_permutexvar_ps((__m512i)n, _mm512_load_ps(table));
  } else {
    const __m256 low = _mm256_load_ps(table), high = _mm256_load_ps(table + 8);
    if constexpr (sizeof(R) == 32) return _mm256_permutex2var_ps(low, (__m256i)n, high);
    else return _mm256_castps256_ps128(_mm256_permutex2var_ps(low, _mm256_castsi128_si256((__m128i)n), high));
  }
}
#else
inline constexpr float erf_width = 17.0f / 32.0f;
alignas(32) inline constexpr float erf_table[8][8] = {
    {0.000000000e+00f, 5.475284436e-01f, 8.670582705e-01f, 9.757977208e-01f,
     9.973459704e-01f, 9.998276970e-01f, 9.999934499e-01f, 9.999998552e-01f},
    {1.128379166e+00f, 8.509139054e-01f, 3.649028914e-01f, 8.898772607e-02f,
     1.234082067e-02f, 9.732381000e-04f, 4.364708200e-05f, 1.113145734e-06f},
    {0.000000000e+00f, -4.520472058e-01f, -3.877098005e-01f, -1.418242793e-01f,
     -2.622412385e-02f, -2.585163233e-03f, -1.391335593e-04f, -4.140689390e-06f},
    {-3.761259406e-01f, -1.235378549e-01f, 1.529930411e-01f, 1.210257563e-01f,
     3.303738089e-02f, 4.253469675e-03f, 2.810940719e-04f, 9.892121837e-06f},
    {0.000000000e+00f, 1.834401203e-01f, 4.799284375e-02f, -4.916117952e-02f,
     -2.636933860e-02f, -4.787456918e-03f, -4.010147908e-04f, -1.692921700e-05f},
    {1.128060758e-01f, -1.915972351e-03f, -6.627349177e-02f, -4.972664058e-03f,
     1.249721149e-02f, 3.811422911e-03f, 4.275693459e-04f, 2.229418369e-05f},
    {0.000000000e+00f, -4.728686156e-02f, 9.908964396e-03f, 1.560457925e-02f,
     -1.627901634e-03f, -2.097087275e-03f, -3.609803679e-04f, -2.502234256e-05f},
    {-2.614056450e-02f, 7.471828304e-03f, 1.237980972e-02f, -5.777719354e-03f,
     -1.908860185e-03f, 6.659078917e-04f, 2.182101246e-04f, 2.027562660e-05f},
};

// table[n], where n is the low three bits of each lane.
template <class R>
KGEN_FN R look_up(const float (&table)[8], int_register<R> n) {
  const __m256 entries = _mm256_load_ps(table);
  if constexpr (sizeof(R) == 32) return _mm256_permutevar8x32_ps(entries, (__m256i)n);
  else return _mm256_castps256_ps128(_mm256_permutevar8x32_ps(entries, _mm256_castsi128_si256((__m128i)n)));
}
#endif

// A polynomial around the nearest centre, whose coefficients are permutations of a register each: no exponential, no division.
// The last one reaches 1 where erf does. Error below 2.5 ulp (1 where erf is above 0.5).
template <class R>
KGEN_FN R erf_register(R x) {
  constexpr int powers = sizeof(erf_table) / sizeof(erf_table[0]);
  const R size = min_or_second(lit<R>(3.98f), size_of(x));  // NaN passes
  const R magic = lit<R>(12582912.0f);  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const R shifted = mul_add(size, lit<R>(1.0f / erf_width), magic);
  const R r = mul_add(shifted - magic, lit<R>(-erf_width), size);
  const auto n = (int_register<R>)shifted;
  R result = look_up<R>(erf_table[powers - 1], n);
  KGEN_UNROLL for (int k = powers - 2; k >= 0; --k) result = mul_add(result, r, look_up<R>(erf_table[k], n));
  return with_sign_of(result, x);
}
#else
// Below 1 an odd polynomial, above 1 - exp(-q(|x|)) with a polynomial q for -log(erfc). Error below 1.5 ulp.
template <class R>
KGEN_FN R erf_register(R x) {
  const R size = size_of(x);
  const R small = mul_add(x, polynomial(x * x, 1.283791661e-01f, -3.761262596e-01f, 1.128358543e-01f, -2.685381100e-02f,
                                        5.188324489e-03f, -8.010166930e-04f, 7.853773423e-05f), x);
  const R bounded = min_or_second(lit<R>(4.0f), size);
  const R q = polynomial(bounded, -1.885179227e-04f, 1.129580498e+00f, 6.332159638e-01f, 1.084225699e-01f, -2.521063015e-02f,
                         4.205390345e-03f, -4.414934083e-04f, 2.169932850e-05f);
  const R large = lit<R>(1.0f) - exp_register(-q);
  return size < lit<R>(1.0f) ? small : with_sign_of(large, x);
}
#endif

// 1 / (1 + exp(-x)): as torch, it reaches zero where exp(-x) overflows. Error below 2.5 ulp.
template <class R>
KGEN_FN R sigmoid_register(R x) {
  return lit<R>(1.0f) / (lit<R>(1.0f) + exp_register(-x));
}

template <class X, class F>
KGEN_FN X map_float(F f, X x) {
  if constexpr (lanes_of<X> == 1) {
    return f(splat_register<Register<float, 4>>(x))[0];
  } else {
    return map_registers<X>(f, x);
  }
}

#define KGEN_INLINE_FUNCTION(name, otherwise)                                      \
  template <class X>                                                               \
  KGEN_FN X name##_(X x) {                                                         \
    if constexpr (std::is_same_v<lane_t<X>, float>) {                              \
      return map_float([](auto r) KGEN_INLINE { return name##_register(r); }, x);  \
    } else {                                                                       \
      return otherwise;                                                            \
    }                                                                              \
  }
KGEN_INLINE_FUNCTION(exp, library_exp(x))
KGEN_INLINE_FUNCTION(log, library_log(x))
KGEN_INLINE_FUNCTION(tanh, library_tanh(x))
KGEN_INLINE_FUNCTION(erf, library_erf(x))
KGEN_INLINE_FUNCTION(sigmoid, truediv_(lane_t<X>(1), add_(lane_t<X>(1), library_exp(neg_(x)))))
#undef KGEN_INLINE_FUNCTION

// ---- division by one number -------------------------------------------------------------------------------------------

// A divisor that many vectors share. Between its bounds a quotient comes from the reciprocal and its rest (Markstein, "Computation
// of elementary functions on the IBM RISC System/6000 processor", 1990): three multiplications in place of a division.
template <class T>
struct Divisor {
  T value, reciprocal;
  bool fast;
};
template <class T>
KGEN_FN Divisor<T> divisor(T value) {
  constexpr T bound = sizeof(T) == 4 ? T(0x1p24) : T(0x1p60);
  const T size = value < 0 ? -value : value;
  return {value, T(1) / value, KGEN_X86 && size > 1 / bound && size < bound};
}

// The sum of a vector's registers: NaN where one of them is.
template <class X>
KGEN_FN auto one_register(X x) {
  if constexpr (X::K == 1) return x;
  else return one_register(add_(half_of<0>(x), half_of<1>(x)));
}

// x / d: correctly rounded, below 2^-100 (double: 2^-900) within one unit in the last place.
template <class X, class T>
KGEN_FN X divide_by(X x, Divisor<T> d) {
  if constexpr (KGEN_X86 && lanes_of<X> > 1) {
    const X value = splat<lanes_of<X>>(d.value), quotient = mul_(x, d.reciprocal);
    const X rest = fma_(neg_(quotient), value, x);
    X result = fma_(rest, splat<lanes_of<X>>(d.reciprocal), quotient);
    result = copysign_(result, quotient);  // the rest of -0 is 0; a sign takes one instruction, a comparison a mask as well
    // infinities and NaN have no rest; register by register, else a compiler keeps the choice of two vectors in memory
    if (__builtin_expect(!d.fast || !none_of(isnan_(one_register(result))), 0)) {
      KGEN_UNROLL for (int i = 0; i < X::K; ++i) result.r[i] = x.r[i] / value.r[i];
    }
    return result;
  } else {
    return truediv_(x, d.value);
  }
}

// ---- division with a quotient or rest, integers and floats ---------------------------------------------------------------

template <class A, class B>
KGEN_FN auto truncdiv_(A a, B b) {
  if constexpr (std::is_floating_point_v<common_lane<A, B>>) {
    return trunc_(truediv_(a, b));
  } else {
    return divide_integers(a, b);
  }
}
template <class A, class B>
KGEN_FN auto fmod_(A a, B b) {
  using C = common_t<A, B>;
  if constexpr (std::is_floating_point_v<lane_t<C>>) {
    return library_fmod(a, b);
  } else {
    const C x = coerce<C>(a), y = coerce<C>(b);
    return rest_of_division(x, y, C(divide_integers(x, y)));
  }
}
// The rest with the divisor's sign.
template <class A, class B>
KGEN_FN auto remainder_(A a, B b) {
  using C = common_t<A, B>;
  const C y = coerce<C>(b), rest = fmod_(a, b);
  if constexpr (std::is_unsigned_v<lane_t<C>>) {
    return rest;
  } else {
    return where_(rounds_wrong(rest, y), add_(rest, y), rest);
  }
}
template <class A, class B>
KGEN_FN auto floordiv_(A a, B b) {
  using C = common_t<A, B>;
  using T = lane_t<C>;
  const C x = coerce<C>(a), y = coerce<C>(b);
  if constexpr (std::is_unsigned_v<T>) {
    return divide_integers(x, y);
  } else if constexpr (std::is_integral_v<T>) {
    const C q = divide_integers(x, y);
    return where_(rounds_wrong(rest_of_division(x, y, q), y), sub_(q, T(1)), q);
  } else {
    // as in torch: the quotient of what is exactly divisible, so that it agrees with remainder_
    const C rest = library_fmod(x, y), plain = truediv_(x, y);
    const C whole = truediv_(sub_(x, rest), y);
    const C q = where_(rounds_wrong(rest, y), sub_(whole, T(1)), whole);
    const C low = floor_(q);
    const C nearest = where_(gt_(sub_(q, low), T(0.5)), add_(low, T(1)), low);
    return where_(eq_(y, T(0)), plain, where_(eq_(q, T(0)), copysign_(T(0), plain), nearest));
  }
}

// x / By and x % By of 0 <= x < 2^31: a multiplication and a shift (Granlund and Montgomery, "Division by invariant integers using
// multiplication", 1994). Machines have no division of integer lanes.
template <int64_t By, class X>
KGEN_FN X index_quotient(X x) {
  static_assert(By > 0 && By < (int64_t(1) << 31));
  constexpr int shift = 31 + (By == 1 ? 0 : 64 - __builtin_clzll(uint64_t(By - 1)));
  constexpr int64_t inverse = int64_t((__int128(1) << shift) / By) + 1;
  return shr_(mul_(x, inverse), int64_t(shift));
}
template <int64_t By, class X>
KGEN_FN X index_rest(X x) {
  return sub_(x, mul_(index_quotient<By>(x), By));
}

}  // namespace kgen
