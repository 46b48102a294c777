// Random numbers as functions of (seed, counter): Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as
// easy as 1, 2, 3" (2011), with the seed as the 64-bit key and the counter in the two low words of the 128-bit counter.
#pragma once

#include "math.h"

namespace kgen {

// The product of the low 32 bits of each 64-bit lane.
KGEN_FN uint64_t multiply_low(uint64_t x, uint64_t y) { return uint64_t(uint32_t(x)) * uint32_t(y); }
template <class R>
KGEN_FN R multiply_low(R x, R y) {
#if KGEN_X86
#if KGEN_AVX512
  if constexpr (sizeof(R) == 64) return (R)_mm512_mul_epu32((__m512i)x, (__m512i)y);
#endif
  if constexpr (sizeof(R) == 32) return (R)_mm256_mul_epu32((__m256i)x, (__m256i)y);
  if constexpr (sizeof(R) == 16) return (R)_mm_mul_epu32((__m128i)x, (__m128i)y);
#else
  const R low = splat_register<R>(uint64_t(0xffffffff));
  return (x & low) * (y & low);
#endif
}

// The first two words of the block, each in the low 32 bits of a 64-bit lane.
template <class U>
struct PhiloxWords {
  U first, second;
};
template <class S, class N>
KGEN_FN auto philox_(S seed, N counter) {
  using U = value_t<uint64_t, lanes_of<S, N>>;
  const auto product = [](U x, uint64_t y) KGEN_INLINE {
    return lanewise([](auto a, auto b) KGEN_INLINE { return multiply_low(a, b); }, x, y);
  };
  const auto high = [](U x) KGEN_INLINE { return lanewise([](auto a) KGEN_INLINE { return a >> 32; }, x); };
  auto key = cast_<uint64_t>(seed);
  const U whole = coerce<U>(cast_<uint64_t>(counter));
  U c0 = whole, c1 = high(whole), c2 = splat<lanes_of<U>>(uint64_t(0)), c3 = c2;
  // only the low 32 bits of each word count: a product ignores the others, and the last step drops them
  auto k0 = key, k1 = lanewise([](auto a) KGEN_INLINE { return a >> 32; }, key);
  KGEN_UNROLL for (int round = 0; round < 10; ++round) {
    const U p0 = product(c0, 0xD2511F53), p1 = product(c2, 0xCD9E8D57);
    c0 = bitxor_(bitxor_(high(p1), c1), k0);
    c1 = p1;
    c2 = bitxor_(bitxor_(high(p0), c3), k1);
    c3 = p0;
    k0 = add_(k0, uint64_t(0x9E3779B9));
    k1 = add_(k1, uint64_t(0xBB67AE85));
  }
  return PhiloxWords<U>{bitand_(c0, uint64_t(0xffffffff)), bitand_(c1, uint64_t(0xffffffff))};
}

// The upper 24 of 32 bits as a multiple of 2^-24 in [0, 1).
template <class U>
KGEN_FN auto unit_interval(U word) {
  const auto top = lanewise([](auto a) KGEN_INLINE { return a >> 8; }, word);
  return mul_(cast_<float>(cast_<int32_t>(top)), 0x1p-24f);
}

template <class S, class N>
KGEN_FN auto rand_(S seed, N counter) {
  return unit_interval(philox_(seed, counter).first);
}
// Box and Muller (1958), the cosine branch.
template <class S, class N>
KGEN_FN auto randn_(S seed, N counter) {
  const auto words = philox_(seed, counter);
  const auto positive = add_(unit_interval(words.first), 0x1p-24f);
  const auto radius = sqrt_(mul_(log_(positive), -2.0f));
  return mul_(radius, cos_(mul_(unit_interval(words.second), 6.283185307f)));
}
template <class S, class N>
KGEN_FN auto randbits_(S seed, N counter) {
  const auto words = philox_(seed, counter);
  const auto upper = lanewise([](auto a) KGEN_INLINE { return a << 32; }, words.second);
  return cast_<int64_t>(bitor_(words.first, upper));
}

}  // namespace kgen
