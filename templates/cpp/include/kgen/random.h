// Random numbers as functions of (seed, counter): Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as
// easy as 1, 2, 3" (2011), with the seed as the 64-bit key and a block's number in the two low words of the 128-bit counter.
// Which words of which block an element takes stands in kgen/capture/rng.py.
#pragma once

#include "math.h"
#include "strided.h"

namespace kgen {

// Multiplies the low 32 bits of each 64-bit lane.
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

// Words, each in the low 32 bits of a 64-bit lane; above stands anything.
template <class U>
struct PhiloxPair {
  U low, high;
};
template <class U>
struct PhiloxBlock {
  PhiloxPair<U> first, second;
};
template <class S, class U>
KGEN_FN auto philox_(S seed, U block) {
  const auto product = [](U x, uint64_t y) KGEN_INLINE {
    return lanewise([](auto a, auto b) KGEN_INLINE { return multiply_low(a, b); }, x, y);
  };
  const auto high = [](U x) KGEN_INLINE { return lanewise([](auto a) KGEN_INLINE { return a >> 32; }, x); };
  auto key = cast_<uint64_t>(seed);
  U c0 = block, c1 = high(block), c2 = splat<lanes_of<U>>(uint64_t(0)), c3 = c2;
  // only the low 32 bits of each word count: a multiplication ignores the others, and the last step drops them
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
  return PhiloxBlock<U>{{c0, c1}, {c2, c3}};
}

template <class U>
KGEN_FN U halved(U number) {
  return lanewise([](auto a) KGEN_INLINE { return a >> 1; }, number);
}
// `odd` where the number is odd, else `even`.
template <class U>
KGEN_FN U by_parity(U number, U even, U odd) {
  return lanewise([](auto n, auto a, auto b) KGEN_INLINE { return a ^ ((a ^ b) & -(n & 1)); }, number, even, odd);
}
template <class S, class U>
KGEN_FN PhiloxPair<U> random_pair(S seed, U number) {
  const auto [first, second] = philox_(seed, halved(number));
  return {by_parity(number, first.low, second.low), by_parity(number, first.high, second.high)};
}
template <class U>
KGEN_FN U joined(PhiloxPair<U> pair) {
  return lanewise([](auto a, auto b) KGEN_INLINE { return (a & (~uint64_t(0) >> 32)) | (b << 32); }, pair.low, pair.high);
}

// ---- lanes with neighbouring numbers --------------------------------------------------------------------------------

// Whether lane i has the number of lane 0, a multiple of 4, plus i.
template <int L>
KGEN_FN bool are_adjacent(Vec<uint64_t, L> numbers) {
  const uint64_t first = numbers[0];
  return first % 4 == 0 && none_of(ne_(numbers, iota<uint64_t, L>(first)));
}
// The pairs `first`, first + 1, ..., joined: each block is computed once.
template <int L, class S>
KGEN_FN Vec<uint64_t, L> neighbouring_pairs(S seed, uint64_t first) {
  if constexpr (L >= 8) {
    const auto block = philox_(seed, iota<uint64_t, L / 2>(first / 2));
    return interleaved(joined(block.first), joined(block.second));
  } else {
    return joined(random_pair(seed, iota<uint64_t, L>(first)));
  }
}
// The lanes' elements by `of_adjacent(first number)` where that is possible, else by `of_each(numbers)`.
template <class S, class N, class F, class G>
KGEN_FN auto random_lanes(S seed, N counter, F of_adjacent, G of_each) {
  constexpr int L = lanes_of<S, N>;
  const auto numbers = coerce<value_t<uint64_t, L>>(cast_<uint64_t>(counter));
  if constexpr (lanes_of<S> == 1 && L >= 8) {
    if (are_adjacent(numbers)) return of_adjacent(numbers[0]);
  }
  return of_each(numbers);
}

// Both words of each pair, one after the other.
template <int L>
KGEN_FN Vec<uint32_t, 2 * L> words_of(Vec<uint64_t, L> pairs) {
  Vec<uint32_t, 2 * L> out;
  KGEN_UNROLL for (int i = 0; i < out.K; ++i) out.r[i] = (typename Vec<uint32_t, 2 * L>::reg)pairs.r[i];
  return out;
}

// ---- numbers --------------------------------------------------------------------------------------------------------

// The upper 24 of a word's 32 bits as a multiple of 2^-24 in [0, 1).
template <class W>
KGEN_FN auto unit_interval(W word) {
  const auto top = lanewise([](auto a) KGEN_INLINE { return a >> 8; }, cast_<uint32_t>(word));
  return mul_(cast_<float>(bitcast_<int32_t>(top)), 0x1p-24f);
}

template <class S, class N>
KGEN_FN auto rand_(S seed, N counter) {
  constexpr int L = lanes_of<S, N>;
  const auto of_each = [&](auto numbers) KGEN_INLINE {
    const auto pair = random_pair(seed, halved(numbers));
    return unit_interval(by_parity(numbers, pair.low, pair.high));
  };
  const auto of_adjacent = [&](auto first) KGEN_INLINE {
    return unit_interval(words_of(neighbouring_pairs<L / 2>(seed, first / 2)));
  };
  return random_lanes(seed, counter, of_adjacent, of_each);
}

// Box and Muller (1958): two numbers of each pair, by the cosine and by the sine.
template <class U>
struct BoxMuller {
  static constexpr int L = lanes_of<U>;
  value_t<float, L> radius, angle;
  KGEN_FN explicit BoxMuller(PhiloxPair<U> pair)
      : radius(sqrt_(mul_(log_(add_(unit_interval(pair.low), 0x1p-24f)), -2.0f))),
        angle(mul_(unit_interval(pair.high), 6.283185307f)) {}
  KGEN_FN auto even() const { return mul_(radius, cos_(angle)); }
  KGEN_FN auto odd() const { return mul_(radius, sin_(angle)); }
};

template <class S, class N>
KGEN_FN auto randn_(S seed, N counter) {
  constexpr int L = lanes_of<S, N>;
  const auto of_each = [&](auto numbers) KGEN_INLINE {
    const BoxMuller made(random_pair(seed, halved(numbers)));
    const auto is_odd = ne_(bitand_(numbers, uint64_t(1)), uint64_t(0));
    if constexpr (L == 1) return is_odd ? made.odd() : made.even();
    else return where_(is_odd, made.odd(), made.even());
  };
  const auto of_adjacent = [&](auto first) KGEN_INLINE {
    const auto pairs = neighbouring_pairs<L / 2>(seed, first / 2);
    const BoxMuller made(PhiloxPair{pairs, lanewise([](auto a) KGEN_INLINE { return a >> 32; }, pairs)});
    return interleaved(made.even(), made.odd());
  };
  return random_lanes(seed, counter, of_adjacent, of_each);
}

template <class S, class N>
KGEN_FN auto randbits_(S seed, N counter) {
  constexpr int L = lanes_of<S, N>;
  const auto of_each = [&](auto numbers) KGEN_INLINE { return cast_<int64_t>(joined(random_pair(seed, numbers))); };
  const auto of_adjacent = [&](auto first) KGEN_INLINE { return cast_<int64_t>(neighbouring_pairs<L>(seed, first)); };
  return random_lanes(seed, counter, of_adjacent, of_each);
}

}  // namespace kgen
