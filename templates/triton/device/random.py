"""Random numbers in Triton as functions of (seed, counter), as kgen/capture/rng.py defines them: Philox4x32-10.

Where the counters along the last axis are neighbours and start at the start of a block, `rand_of_adjacent` and its kin
compute each block once and give the same numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from kgen.templates.triton.device.arithmetic import sqrt


@triton.jit
def philox(seed, number):
    """The four words of the block, as uint32."""
    key, block = tl.broadcast(seed.to(tl.uint64), number)
    k0 = key.to(tl.uint32)
    k1 = (key >> 32).to(tl.uint32)
    c0 = block.to(tl.uint32)
    c1 = (block >> 32).to(tl.uint32)
    c2 = c0 ^ c0
    c3 = c2
    m0 = tl.full([], 0xD2511F53, tl.uint32)
    m1 = tl.full([], 0xCD9E8D57, tl.uint32)
    for _ in tl.static_range(10):
        high0 = tl.umulhi(c0, m0)
        high1 = tl.umulhi(c2, m1)
        low0 = c0 * m0
        low1 = c2 * m1
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 += tl.full([], 0x9E3779B9, tl.uint32)
        k1 += tl.full([], 0xBB67AE85, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def random_pair(seed, number):
    w0, w1, w2, w3 = philox(seed, number >> 1)
    odd = (number & 1) != 0
    return tl.where(odd, w2, w0), tl.where(odd, w3, w1)


@triton.jit
def unit_interval(word):
    """The upper 24 of 32 bits as a multiple of 2**-24 in [0, 1)."""
    return (word >> 8).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def box_muller(low, high):
    """(radius, angle in half turns) of the numbers of a pair."""
    positive = unit_interval(low) + 5.9604644775390625e-08
    return sqrt(libdevice.log(positive) * -2.0), unit_interval(high) * 2.0


@triton.jit
def joined_words(low, high):
    return (low.to(tl.uint64) | (high.to(tl.uint64) << 32)).to(tl.int64)


@triton.jit
def rand(seed, counter):
    number = counter.to(tl.uint64)
    low, high = random_pair(seed, number >> 1)
    return unit_interval(tl.where((number & 1) != 0, high, low))


@triton.jit
def randn(seed, counter):
    number = counter.to(tl.uint64)
    low, high = random_pair(seed, number >> 1)
    radius, angle = box_muller(low, high)
    return radius * tl.where((number & 1) != 0, libdevice.sinpi(angle), libdevice.cospi(angle))


@triton.jit
def randbits(seed, counter):
    low, high = random_pair(seed, counter.to(tl.uint64))
    return joined_words(low, high)


# ---- neighbours -----------------------------------------------------------------------------------------------------


@triton.jit
def halves(x):
    """Elements 0, 2, 4... and 1, 3, 5... along the last axis."""
    if len(x.shape) == 1:
        return tl.split(tl.reshape(x, [x.shape[0] // 2, 2]))
    else:
        return tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))


@triton.jit
def interleaved(even, odd):
    """even0, odd0, even1, odd1... along the last axis."""
    if len(even.shape) == 1:
        return tl.reshape(tl.join(even, odd), [2 * even.shape[0]])
    else:
        return tl.reshape(tl.join(even, odd), [even.shape[0], 2 * even.shape[1]])


@triton.jit
def words_of_adjacent(seed, counter, paired: tl.constexpr):
    """The words of the block of each four neighbours. `paired`: a thread computes two blocks side by side, so that one that
    stores eight elements at once need not fetch four of them from another thread."""
    even, _ = halves(counter)
    first, _ = halves(even)
    number = first.to(tl.uint64) >> 2
    if paired:
        even, odd = halves(number)
        a0, a1, a2, a3 = philox(seed, even)
        b0, b1, b2, b3 = philox(seed, odd)
        return interleaved(a0, b0), interleaved(a1, b1), interleaved(a2, b2), interleaved(a3, b3)
    else:
        return philox(seed, number)


@triton.jit
def rand_of_adjacent(seed, counter, paired: tl.constexpr):
    w0, w1, w2, w3 = words_of_adjacent(seed, counter, paired)
    return unit_interval(interleaved(interleaved(w0, w2), interleaved(w1, w3)))


@triton.jit
def randn_of_adjacent(seed, counter, paired: tl.constexpr):
    w0, w1, w2, w3 = words_of_adjacent(seed, counter, paired)
    radius, angle = box_muller(interleaved(w0, w2), interleaved(w1, w3))
    return interleaved(radius * libdevice.cospi(angle), radius * libdevice.sinpi(angle))


@triton.jit
def randbits_of_adjacent(seed, counter, paired: tl.constexpr):
    even, _ = halves(counter)
    w0, w1, w2, w3 = philox(seed, even.to(tl.uint64) >> 1)
    return interleaved(joined_words(w0, w1), joined_words(w2, w3))
