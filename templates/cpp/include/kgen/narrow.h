// Conversions between float and the storage formats of 8 and 16 bits: exact widening, narrowing to nearest even.
#pragma once

#include "mask.h"

namespace kgen {

// The integer type in which a storage type is kept in memory.
template <class T>
using stored_t =
    std::conditional_t<std::is_same_v<T, bool> || (is_narrow_float<T> && sizeof(T) == 1), uint8_t,
                       std::conditional_t<is_narrow_float<T>, uint16_t, T>>;

// The same code serves scalars and registers: GCC's ?: selects lane by lane when its condition is a vector.
KGEN_FN float float_bits(uint32_t x) { return bits_as<float>(x); }
KGEN_FN uint32_t float_bits(float x) { return bits_as<uint32_t>(x); }
template <class R>
KGEN_FN auto float_bits(R x) {
  constexpr int N = sizeof(R) / 4;
  using Other = std::conditional_t<std::is_same_v<std::remove_cvref_t<decltype(x[0])>, float>, uint32_t, float>;
  return (Register<Other, N>)x;
}
template <class X, class T>
KGEN_FN X constant_like(X, T value) {
  if constexpr (std::is_arithmetic_v<X>) {
    return value;
  } else {
    return splat_register<X>(value);
  }
}

// A small float format: sign, exponent with bias Bias, Mantissa bits. Magnitudes whose float bits reach OverflowFrom become
// OverflowCode; NaN becomes NanCode.
template <int Bits, int Mantissa, int Bias, uint32_t OverflowFrom, uint32_t OverflowCode, uint32_t NanCode, bool HasInfinity>
struct SmallFloat {
  static constexpr int drop = 23 - Mantissa;
  static constexpr uint32_t sign = 1u << (Bits - 1), magnitude = sign - 1;
  // float whose last mantissa bit weighs as much as the smallest subnormal: adding it rounds there
  static constexpr float round_subnormal = bits_as<float>(uint32_t(127 + 23 + 1 - Bias - Mantissa) << 23);
  static constexpr float rebias = bits_as<float>(uint32_t(127 + 127 - Bias) << 23);

  template <class U>
  KGEN_FN static auto widen(U code) {
    const U size = code & constant_like(code, magnitude);
    const auto value = float_bits(U(size << drop)) * constant_like(float_bits(code), rebias);
    const U special = HasInfinity ? U(float_bits(value) | constant_like(code, 0x7f800000u)) : constant_like(code, 0x7fc00000u);
    const U bits = size >= constant_like(code, HasInfinity ? OverflowCode : NanCode) ? special : float_bits(value);
    return float_bits(U(bits | ((code & constant_like(code, sign)) << (32 - Bits))));
  }

  template <class F>
  KGEN_FN static auto narrow(F value) {
    const auto raw = float_bits(value);
    using U = std::remove_const_t<decltype(raw)>;
    const U size = raw & constant_like(raw, 0x7fffffffu);
    const U subnormal = float_bits(F(float_bits(size) + constant_like(value, round_subnormal))) -
                        constant_like(raw, bits_as<uint32_t>(round_subnormal));
    constexpr uint32_t shift_bias = (uint32_t(Bias - 127) << 23) + (1u << (drop - 1)) - 1;
    const U normal = (size + constant_like(raw, shift_bias) + ((size >> drop) & constant_like(raw, 1u))) >> drop;
    U code = size < constant_like(raw, uint32_t(128 - Bias) << 23) ? subnormal : normal;
    code = size >= constant_like(raw, OverflowFrom) ? constant_like(raw, OverflowCode) : code;
    code = size > constant_like(raw, 0x7f800000u) ? constant_like(raw, NanCode) : code;
    return U(code | ((raw >> (32 - Bits)) & constant_like(raw, sign)));
  }
};

template <class T>
struct FormatOf;
template <>
struct FormatOf<half> : SmallFloat<16, 10, 15, 0x47800000u, 0x7c00u, 0x7e00u, true> {};
template <>
struct FormatOf<float8_e5m2> : SmallFloat<8, 2, 15, 0x47800000u, 0x7cu, 0x7fu, true> {};
// what rounds above 448 becomes 448, infinity too: this format has none, and torch (2.13) saturates
template <>
struct FormatOf<float8_e4m3fn> : SmallFloat<8, 3, 7, 0x43e80001u, 0x7eu, 0x7fu, false> {};
template <>
struct FormatOf<bfloat16> {
  template <class U>
  KGEN_FN static auto widen(U code) {
    return float_bits(U(code << 16));
  }
  template <class F>
  KGEN_FN static auto narrow(F value) {
    const auto raw = float_bits(value);
    using U = std::remove_const_t<decltype(raw)>;
    const U rounded = (raw + constant_like(raw, 0x7fffu) + ((raw >> 16) & constant_like(raw, 1u))) >> 16;
    return U(value != value ? constant_like(raw, 0x7fc0u) : rounded);
  }
};

#if KGEN_AVX512 && defined(__AVX512BF16__)
// The instruction rounds as `narrow` does, but flushes subnormal numbers and keeps the sign and bits of a NaN. Registers with one
// of these are converted without it.
template <int N>
KGEN_FN Register<uint16_t, N> bfloat16_codes(Register<float, N> x) {
  constexpr int special = 0x01 | 0x20 | 0x80;  // a quiet NaN, a subnormal number, a signalling NaN
  if constexpr (N == 16) {
    if (__builtin_expect(_mm512_fpclass_ps_mask((__m512)x, special) != 0, 0)) {
      return (Register<uint16_t, N>)_mm512_cvtepi32_epi16((__m512i)FormatOf<bfloat16>::narrow(x));
    }
    return (Register<uint16_t, N>)_mm512_cvtneps_pbh((__m512)x);
  } else {
    if (__builtin_expect(_mm256_fpclass_ps_mask((__m256)x, special) != 0, 0)) {
      return (Register<uint16_t, N>)_mm256_cvtepi32_epi16((__m256i)FormatOf<bfloat16>::narrow(x));
    }
    return (Register<uint16_t, N>)_mm256_cvtneps_pbh((__m256)x);
  }
}
#endif

// Storage bits <-> compute values, for any storage type.
template <class T, class X>
KGEN_FN value_t<compute_t<T>, lanes_of<X>> decode(X stored) {
  constexpr int L = lanes_of<X>;
  if constexpr (std::is_same_v<T, bool>) {
    return cast_<bool>(stored);
  } else if constexpr (!is_narrow_float<T>) {
    return stored;
#if KGEN_X86
  } else if constexpr (std::is_same_v<T, half> && L >= 8) {
    constexpr int N = Vec<float, L>::W;
    return from_subvectors<float, L, N>([&](auto part) KGEN_INLINE {
      const auto x = subvector<N, part.value>(stored);
#if KGEN_AVX512
      if constexpr (N == 16) return (Register<float, N>)_mm512_cvtph_ps((__m256i)x);
      else
#endif
        return (Register<float, N>)_mm256_cvtph_ps((__m128i)x);
    });
#endif
  } else {
    return map_registers<value_t<float, L>>([](auto x) KGEN_INLINE { return FormatOf<T>::widen(x); }, cast_<uint32_t>(stored));
  }
}
template <class T, class X>
KGEN_FN value_t<stored_t<T>, lanes_of<X>> encode(X value) {
  constexpr int L = lanes_of<X>;
  if constexpr (std::is_same_v<T, bool>) {
    return cast_<uint8_t>(value);
  } else if constexpr (!is_narrow_float<T>) {
    return value;
#if KGEN_X86
  } else if constexpr (std::is_same_v<T, half> && L >= 8) {
    constexpr int N = Vec<float, L>::W, nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return from_subvectors<uint16_t, L, N>([&](auto part) KGEN_INLINE {
      const auto x = subvector<N, part.value>(value);
#if KGEN_AVX512
      if constexpr (N == 16) return (Register<uint16_t, N>)_mm512_cvtps_ph(x, nearest);
      else
#endif
        return (Register<uint16_t, N>)_mm256_cvtps_ph(x, nearest);
    });
#endif
#if KGEN_AVX512 && defined(__AVX512BF16__)
  } else if constexpr (std::is_same_v<T, bfloat16> && L >= 8) {
    constexpr int N = Vec<float, L>::W;
    return from_subvectors<uint16_t, L, N>([&](auto part) KGEN_INLINE {
      return bfloat16_codes<N>(subvector<N, part.value>(value));
    });
#endif
  } else {
    const auto codes = map_registers<value_t<uint32_t, L>>([](auto x) KGEN_INLINE { return FormatOf<T>::narrow(x); }, value);
    return cast_<stored_t<T>>(codes);
  }
}

// Rounds to a narrow format and stays float.
template <class T, class X>
KGEN_FN X round_to_(X value) {
  static_assert(is_narrow_float<T> && std::is_same_v<lane_t<X>, float>);
  if constexpr (std::is_same_v<T, bfloat16>) {  // without the way through 16-bit lanes
    return map_registers<X>([](auto x) KGEN_INLINE { return FormatOf<T>::widen(FormatOf<T>::narrow(x)); }, value);
  } else {
    return decode<T>(encode<T>(value));
  }
}

}  // namespace kgen
