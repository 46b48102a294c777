// Conversions between lane types: integers to wider and narrower ones, integers to floats and back.
#pragma once

#include "vec.h"

namespace kgen {

#if KGEN_X86
// Integers to wider ones. GCC 12 compiles many of its own vector conversions lane by lane, so all are spelled out.
template <class To, class From, int N>
KGEN_FN Register<To, N> widen_integers(Register<From, N> x) {
  auto whole = widen_register<larger(N, int(16 / sizeof(From)))>(x);
#if KGEN_AVX512
  // GCC 12 joins a load of 8 bytes, this and a selection against zero into one instruction, which it then fails to print
  if constexpr (sizeof(x) == 8) asm("" : "+v"(whole));
#endif
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
  Bytes byte_order;
  [&]<int... I>(Lanes<I...>) KGEN_INLINE { byte_order = Bytes{int8_t(I < each ? I / D * S + I % D : -1)...}; }(lane_numbers<16>{});
  if constexpr (sizeof(x) == 16) {
    return register_part<N, 0>((Register<To, 16 / D>)_mm_shuffle_epi8((__m128i)x, (__m128i)byte_order));
  } else {
    const __m128i low = _mm_shuffle_epi8(_mm256_castsi256_si128((__m256i)x), (__m128i)byte_order);
    const __m128i high = _mm_shuffle_epi8(_mm256_extracti128_si256((__m256i)x, 1), (__m128i)byte_order);
    __m128i both;
    if constexpr (each == 8) both = _mm_unpacklo_epi64(low, high);
    if constexpr (each == 4) both = _mm_unpacklo_epi32(low, high);
    if constexpr (each == 2) both = _mm_unpacklo_epi16(low, high);
    return register_part<N, 0>((Register<To, 16 / D>)both);
  }
}
#endif

// The instruction's own conversion, to 32 or 64 bits. The compiler may see neither end of it. Without -ftrapping-math, GCC takes
// float(int(x)) for trunc(x), which keeps -0.0, NaN and infinities; and of a NaN that it knows it makes zero.
template <class To, class From>
KGEN_FN To truncate_scalar(From x) {
#if KGEN_X86
  __asm__("" : "+x"(x));
#else
  __asm__("" : "+g"(x));
#endif
  To whole = static_cast<To>(x);
  __asm__("" : "+r"(whole));
  return whole;
}

// Of one register, 32 or 64 bits a lane.
template <class To, class From, int N>
KGEN_FN Register<To, N> truncate_register(Register<From, N> x) {
#if KGEN_X86
  if constexpr (sizeof(Register<To, N>) >= 16) {
    Register<To, N> whole = __builtin_convertvector(x, Register<To, N>);
    __asm__("" : "+x"(whole));
    return whole;
  }
#endif
  Register<To, N> whole;
  for (int k = 0; k < N; ++k) whole[k] = truncate_scalar<To, From>(x[k]);
  return whole;
}

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
  } else if constexpr (from_float && std::is_integral_v<To>) {
    return truncate_register<To, From, N>(x);
#if KGEN_AVX512
  } else if constexpr (std::is_same_v<To, double> && N == 8 && std::is_same_v<From, float>) {
    return (Register<To, N>)_mm512_cvtps_pd((__m256)x);
  } else if constexpr (std::is_same_v<To, double> && N == 8 && std::is_same_v<From, int32_t>) {
    return (Register<To, N>)_mm512_cvtepi32_pd((__m256i)x);
  } else if constexpr (std::is_same_v<To, double> && N == 8 && std::is_same_v<From, uint32_t>) {
    return (Register<To, N>)_mm512_cvtepu32_pd((__m256i)x);
#endif
#if KGEN_X86
  } else if constexpr (std::is_same_v<To, double> && N == 4 && std::is_same_v<From, float>) {
    return (Register<To, N>)_mm256_cvtps_pd((__m128)x);
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
    return To(truncate_scalar<int32_t>(x));
  } else if constexpr (std::is_floating_point_v<From> && std::is_same_v<To, uint32_t>) {
    return To(truncate_scalar<int64_t>(x));
  } else if constexpr (std::is_floating_point_v<From> && std::is_same_v<To, uint64_t>) {
    constexpr From limit = From(9223372036854775808.0);
    const bool high = x >= limit;
    return uint64_t(truncate_scalar<int64_t>(high ? x - limit : x)) ^ (uint64_t(high) << 63);
  } else if constexpr (std::is_floating_point_v<From> && std::is_integral_v<To>) {
    return truncate_scalar<To>(x);
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
    return from_subvectors<To, L, N>([&](auto part) KGEN_INLINE {
      return convert_register<To, From, N>(subvector<N, part.value>(v));
    });
  }
}

}  // namespace kgen
