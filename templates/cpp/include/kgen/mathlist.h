// The functions of lib/vecmath.cpp. For each name and each of float (f32) and double (f64) it exports with C linkage
//   KGEN_MATH(s, name, type)  on scalars, and, for the vector lists,
//   KGEN_MATH(v, name, type)  on full machine registers (AVX-512: 64 bytes, AVX2: 32 bytes; other machines: scalars only).
// The instruction set is in the symbol: a process may hold kernels for several, each with a library of its own.
#pragma once

#include "base.h"

#if KGEN_AVX512
#define KGEN_MATH(kind, name, type) kgen_avx512_##kind##_##name##_##type
#elif KGEN_AVX2
#define KGEN_MATH(kind, name, type) kgen_avx2_##kind##_##name##_##type
#else
#define KGEN_MATH(kind, name, type) kgen_generic_##kind##_##name##_##type
#endif

#define KGEN_VECTOR_UNARY(X) \
  X(exp) X(exp2) X(expm1) X(log) X(log2) X(log10) X(log1p) \
  X(sin) X(cos) X(tan) X(asin) X(acos) X(atan) X(sinh) X(cosh) X(tanh) X(atanh) \
  X(erf) X(erfc) X(lgamma)

#define KGEN_VECTOR_BINARY(X) X(pow) X(atan2) X(hypot)  // and fmod, which vecmath.cpp defines by itself

#define KGEN_SCALAR_UNARY(X) \
  X(asinh) X(acosh) X(erfinv) X(digamma) X(i0) X(i0e) X(i1) X(i1e) X(ndtri) X(log_ndtr) X(erfcx) \
  X(bessel_j0) X(bessel_j1) X(bessel_y0) X(bessel_y1) \
  X(modified_bessel_i0) X(modified_bessel_i1) X(modified_bessel_k0) X(modified_bessel_k1) \
  X(scaled_modified_bessel_k0) X(scaled_modified_bessel_k1) X(spherical_bessel_j0) X(airy_ai)

#define KGEN_POLYNOMIALS(X) \
  X(chebyshev_polynomial_t) X(chebyshev_polynomial_u) X(chebyshev_polynomial_v) X(chebyshev_polynomial_w) \
  X(shifted_chebyshev_polynomial_t) X(shifted_chebyshev_polynomial_u) X(shifted_chebyshev_polynomial_v) \
  X(shifted_chebyshev_polynomial_w) X(hermite_polynomial_h) X(hermite_polynomial_he) X(laguerre_polynomial_l) \
  X(legendre_polynomial_p)

#define KGEN_SCALAR_BINARY(X) X(igamma) X(igammac) X(zeta) X(polygamma) KGEN_POLYNOMIALS(X)
