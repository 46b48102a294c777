"""Random numbers in Triton as functions of (seed, counter), as kgen/rng.py defines them: Philox4x32-10."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from kgen.templates.triton.arithmetic import sqrt


@triton.jit
def philox(seed, counter):
    """The first two words of the block, as uint32."""
    key, block = tl.broadcast(seed.to(tl.uint64), counter.to(tl.uint64))
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
    return c0, c1


@triton.jit
def unit_interval(word):
    """The upper 24 of 32 bits as a multiple of 2**-24 in [0, 1)."""
    return (word >> 8).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def rand(seed, counter):
    first, _ = philox(seed, counter)
    return unit_interval(first)


@triton.jit
def randn(seed, counter):
    first, second = philox(seed, counter)
    positive = unit_interval(first) + 5.9604644775390625e-08
    return sqrt(libdevice.log(positive) * -2.0) * libdevice.cos(unit_interval(second) * 6.283185307179586)


@triton.jit
def randbits(seed, counter):
    first, second = philox(seed, counter)
    return (first.to(tl.uint64) | (second.to(tl.uint64) << 32)).to(tl.int64)
