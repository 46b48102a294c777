// Instruction set, storage types and the small vocabulary that the other headers share.
//
// The layer is written on GCC's vector extensions: a kernel includes no torch header and compiles in a fraction of a second.
// Three targets: AVX-512 (F, BW, DQ, VL), AVX2 with FMA and F16C, and plain GCC vectors of 16 bytes for everything else.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define KGEN_AVX512 1
#define KGEN_AVX2 0
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define KGEN_AVX512 0
#define KGEN_AVX2 1
#else
#define KGEN_AVX512 0
#define KGEN_AVX2 0
#endif
#define KGEN_X86 (KGEN_AVX512 || KGEN_AVX2)

#if KGEN_X86
#include <immintrin.h>
#endif

#define KGEN_FN [[gnu::always_inline]] inline
#define KGEN_INLINE __attribute__((always_inline))
// loops over the registers of one value: their indices must become constants before the value can live in registers
#define KGEN_UNROLL _Pragma("GCC unroll 64")
// With this switch every place that leaves the vector registers and goes lane by lane says so in the assembly: see
// tests/templates/cpp/test_vectorisation.py.
#ifdef KGEN_MARK_LANES
#define KGEN_LANE_BY_LANE() asm volatile("# lane by lane")
#else
#define KGEN_LANE_BY_LANE()
#endif

namespace kgen {

inline constexpr int kRegisterBytes = KGEN_AVX512 ? 64 : KGEN_AVX2 ? 32 : 16;

struct bfloat16 {
  uint16_t bits;
};
struct half {
  uint16_t bits;
};
struct float8_e4m3fn {
  uint8_t bits;
};
struct float8_e5m2 {
  uint8_t bits;
};

template <class T>
inline constexpr bool is_narrow_float = std::is_same_v<T, bfloat16> || std::is_same_v<T, half> ||
                                        std::is_same_v<T, float8_e4m3fn> || std::is_same_v<T, float8_e5m2>;

// The type in which a kernel computes on values stored as T.
template <class T>
using compute_t = std::conditional_t<is_narrow_float<T>, float, T>;

template <int Bytes>
using signed_of_size = std::conditional_t<
    Bytes == 1, int8_t, std::conditional_t<Bytes == 2, int16_t, std::conditional_t<Bytes == 4, int32_t, int64_t>>>;
template <int Bytes>
using unsigned_of_size = std::make_unsigned_t<signed_of_size<Bytes>>;

template <class To, class From>
KGEN_FN constexpr To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, from);
}

// A GCC vector of exactly N lanes.
template <class T, int N>
struct RegisterOf {
  typedef T type __attribute__((vector_size(N * sizeof(T))));
};
template <class T, int N>
using Register = typename RegisterOf<T, N>::type;

template <int... I>
struct Lanes {};
template <int N>
using lane_numbers = Lanes<__integer_pack(N)...>;

template <class T>
KGEN_FN constexpr T smaller(T a, T b) {
  return a < b ? a : b;
}
template <class T>
KGEN_FN constexpr T larger(T a, T b) {
  return a < b ? b : a;
}

}  // namespace kgen

// Chooses the x86 intrinsic for a register of B bytes with lanes of S bytes (KGEN_PICK_INT) or for float and double lanes T
// (KGEN_PICK_FP). Each expands to a chain of `if constexpr` with a return in every branch.
#define KGEN_PICK_INT(name, ...)                                                            \
  if constexpr (B == 64 && S == 1) { return (R)_mm512_##name##_epi8(__VA_ARGS__); }         \
  else if constexpr (B == 64 && S == 2) { return (R)_mm512_##name##_epi16(__VA_ARGS__); }   \
  else if constexpr (B == 64 && S == 4) { return (R)_mm512_##name##_epi32(__VA_ARGS__); }   \
  else if constexpr (B == 64 && S == 8) { return (R)_mm512_##name##_epi64(__VA_ARGS__); }   \
  else if constexpr (B == 32 && S == 1) { return (R)_mm256_##name##_epi8(__VA_ARGS__); }    \
  else if constexpr (B == 32 && S == 2) { return (R)_mm256_##name##_epi16(__VA_ARGS__); }   \
  else if constexpr (B == 32 && S == 4) { return (R)_mm256_##name##_epi32(__VA_ARGS__); }   \
  else if constexpr (B == 32 && S == 8) { return (R)_mm256_##name##_epi64(__VA_ARGS__); }   \
  else if constexpr (S == 1) { return (R)_mm_##name##_epi8(__VA_ARGS__); }                  \
  else if constexpr (S == 2) { return (R)_mm_##name##_epi16(__VA_ARGS__); }                 \
  else if constexpr (S == 4) { return (R)_mm_##name##_epi32(__VA_ARGS__); }                 \
  else { return (R)_mm_##name##_epi64(__VA_ARGS__); }
#define KGEN_PICK_FP(name, ...)                                                                               \
  if constexpr (B == 64 && std::is_same_v<T, float>) { return (R)_mm512_##name##_ps(__VA_ARGS__); }           \
  else if constexpr (B == 64) { return (R)_mm512_##name##_pd(__VA_ARGS__); }                                  \
  else if constexpr (B == 32 && std::is_same_v<T, float>) { return (R)_mm256_##name##_ps(__VA_ARGS__); }      \
  else if constexpr (B == 32) { return (R)_mm256_##name##_pd(__VA_ARGS__); }                                  \
  else if constexpr (std::is_same_v<T, float>) { return (R)_mm_##name##_ps(__VA_ARGS__); }                    \
  else { return (R)_mm_##name##_pd(__VA_ARGS__); }
