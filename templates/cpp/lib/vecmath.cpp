// The vector math library of generated kernels: torch's own vector functions and special functions behind C linkage, compiled
// once a machine with the kernels' instruction set, so that no kernel includes a torch header. See kgen/mathlist.h.
//
// Build: the kernels' flags, torch's include directories, and a link with torch_cpu and c10.
#include <kgen/mathlist.h>

// torch's vector headers choose their instruction set by these names.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define CPU_CAPABILITY AVX512
#define CPU_CAPABILITY_AVX512
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define CPU_CAPABILITY AVX2
#define CPU_CAPABILITY_AVX2
#else
#define CPU_CAPABILITY DEFAULT
#endif

#include <ATen/native/Math.h>

#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
#include <ATen/cpu/vec/vec.h>
#define KGEN_HAS_VECTORS 1
#else
#define KGEN_HAS_VECTORS 0
#endif

#include <cmath>
#include <limits>

namespace {

#if KGEN_HAS_VECTORS
using Floats = at::vec::Vectorized<float>;
using Doubles = at::vec::Vectorized<double>;
#ifdef CPU_CAPABILITY_AVX512
using FloatRegister = __m512;
using DoubleRegister = __m512d;
#else
using FloatRegister = __m256;
using DoubleRegister = __m256d;
#endif

// Lane 0, so that a scalar gets the bits that a lane of a vector gets.
template <class V>
auto lane0(V v) {
  typename V::value_type lanes[V::size()];
  v.store(lanes);
  return lanes[0];
}

// Sleef's fmod is exact while the quotient is a number, and NaN when that overflows.
template <class V>
V fmod_of(V x, V y) {
  using T = typename V::value_type;
  const V infinite = (x / y).abs() == V(std::numeric_limits<T>::infinity());
  if (infinite.zero_mask() == (1 << V::size()) - 1) return x.fmod(y);
  T a[V::size()], b[V::size()];
  x.store(a);
  y.store(b);
  for (int i = 0; i < V::size(); ++i) a[i] = std::fmod(a[i], b[i]);
  return V::loadu(a);
}
#endif

// torch's vectors have these too, but overflow above the square root of the largest float
template <class T> T at_asinh(T x) { return std::asinh(x); }
template <class T> T at_acosh(T x) { return std::acosh(x); }

// torch's scalar functions under the names of the table
template <class T> T at_erfinv(T x) { return calc_erfinv(x); }
template <class T> T at_digamma(T x) { return calc_digamma(x); }
template <class T> T at_i0(T x) { return calc_i0(x); }
template <class T> T at_i0e(T x) { return calc_i0e(x); }
template <class T> T at_i1(T x) { return calc_i1(x); }
template <class T> T at_i1e(T x) { return calc_i1e(x); }
template <class T> T at_ndtri(T x) { return calc_ndtri(x); }
template <class T> T at_log_ndtr(T x) { return calc_log_ndtr(x); }
template <class T> T at_erfcx(T x) { return calc_erfcx(x); }
template <class T> T at_igamma(T a, T x) { return calc_igamma(a, x); }
template <class T> T at_igammac(T a, T x) { return calc_igammac(a, x); }
template <class T> T at_zeta(T x, T q) { return zeta<T>(x, q); }
template <class T> T at_polygamma(T x, T order) {
  const int n = static_cast<int>(order);
  return n == 0 ? calc_digamma(x) : n == 1 ? static_cast<T>(trigamma(x)) : calc_polygamma(x, n);
}

#define KGEN_FORWARD_UNARY(name) \
  template <class T> T at_##name(T x) { return name##_forward(x); }
KGEN_FORWARD_UNARY(bessel_j0)
KGEN_FORWARD_UNARY(bessel_j1)
KGEN_FORWARD_UNARY(bessel_y0)
KGEN_FORWARD_UNARY(bessel_y1)
KGEN_FORWARD_UNARY(modified_bessel_i0)
KGEN_FORWARD_UNARY(modified_bessel_i1)
KGEN_FORWARD_UNARY(modified_bessel_k0)
KGEN_FORWARD_UNARY(modified_bessel_k1)
KGEN_FORWARD_UNARY(scaled_modified_bessel_k0)
KGEN_FORWARD_UNARY(scaled_modified_bessel_k1)
KGEN_FORWARD_UNARY(spherical_bessel_j0)
KGEN_FORWARD_UNARY(airy_ai)

// torch's recurrences leave their result unset when they start from NaN
#define KGEN_FORWARD_POLYNOMIAL(name) \
  template <class T> T at_##name(T x, T n) { return std::isnan(x) && n >= 1 ? x : name##_forward(x, n); }
KGEN_POLYNOMIALS(KGEN_FORWARD_POLYNOMIAL)

}  // namespace

extern "C" {

#if KGEN_HAS_VECTORS
#define KGEN_DEFINE_VECTOR_UNARY(name)                                                            \
  FloatRegister KGEN_MATH(v, name, f32)(FloatRegister x) noexcept { return Floats(x).name(); }    \
  DoubleRegister KGEN_MATH(v, name, f64)(DoubleRegister x) noexcept { return Doubles(x).name(); } \
  float KGEN_MATH(s, name, f32)(float x) noexcept { return lane0(Floats(x).name()); }             \
  double KGEN_MATH(s, name, f64)(double x) noexcept { return lane0(Doubles(x).name()); }
#define KGEN_DEFINE_VECTOR_BINARY(name)                                                                                       \
  FloatRegister KGEN_MATH(v, name, f32)(FloatRegister x, FloatRegister y) noexcept { return Floats(x).name(Floats(y)); }      \
  DoubleRegister KGEN_MATH(v, name, f64)(DoubleRegister x, DoubleRegister y) noexcept { return Doubles(x).name(Doubles(y)); } \
  float KGEN_MATH(s, name, f32)(float x, float y) noexcept { return lane0(Floats(x).name(Floats(y))); }                       \
  double KGEN_MATH(s, name, f64)(double x, double y) noexcept { return lane0(Doubles(x).name(Doubles(y))); }
#else
#define KGEN_DEFINE_VECTOR_UNARY(name)                                     \
  float KGEN_MATH(s, name, f32)(float x) noexcept { return std::name(x); } \
  double KGEN_MATH(s, name, f64)(double x) noexcept { return std::name(x); }
#define KGEN_DEFINE_VECTOR_BINARY(name)                                                \
  float KGEN_MATH(s, name, f32)(float x, float y) noexcept { return std::name(x, y); } \
  double KGEN_MATH(s, name, f64)(double x, double y) noexcept { return std::name(x, y); }
#endif

#define KGEN_DEFINE_SCALAR_UNARY(name)                                     \
  float KGEN_MATH(s, name, f32)(float x) noexcept { return at_##name(x); } \
  double KGEN_MATH(s, name, f64)(double x) noexcept { return at_##name(x); }
#define KGEN_DEFINE_SCALAR_BINARY(name)                                                \
  float KGEN_MATH(s, name, f32)(float x, float y) noexcept { return at_##name(x, y); } \
  double KGEN_MATH(s, name, f64)(double x, double y) noexcept { return at_##name(x, y); }

#if KGEN_HAS_VECTORS
FloatRegister KGEN_MATH(v, fmod, f32)(FloatRegister x, FloatRegister y) noexcept { return fmod_of(Floats(x), Floats(y)); }
DoubleRegister KGEN_MATH(v, fmod, f64)(DoubleRegister x, DoubleRegister y) noexcept { return fmod_of(Doubles(x), Doubles(y)); }
#endif
float KGEN_MATH(s, fmod, f32)(float x, float y) noexcept { return std::fmod(x, y); }
double KGEN_MATH(s, fmod, f64)(double x, double y) noexcept { return std::fmod(x, y); }

KGEN_VECTOR_UNARY(KGEN_DEFINE_VECTOR_UNARY)
KGEN_VECTOR_BINARY(KGEN_DEFINE_VECTOR_BINARY)
KGEN_SCALAR_UNARY(KGEN_DEFINE_SCALAR_UNARY)
KGEN_SCALAR_BINARY(KGEN_DEFINE_SCALAR_BINARY)

}  // extern "C"
