"""Rows of a tile in ascending order, by bitonic networks (K. E. Batcher, "Sorting networks and their applications", 1968).

A row of 2**levels elements is a cube with a side of 2 for each bit of an element's place. A comparator is between two elements
whose indices differ in one bit, so each step of the network is an exchange along one side. What that costs depends on where
the side is: two registers of a thread, two lanes of a warp, or two warps, which meet in shared memory.

The place of an element in the input is of no interest. So the bits of a place may stand for other bits of ranks: those that
lanes have are the highest ones of ranks, along which the fewest steps go. The result is put in order in the end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kgen.templates.triton.device.folds import combine_bitxor


@triton.jit
def sort_rows(keys, levels: tl.constexpr, low: tl.constexpr, lanes: tl.constexpr):
    """Integers. Of each row's positions the `low` lowest bits are registers, and the `lanes` bits above these are lanes and
    warps."""
    cube = tl.reshape(keys, [keys.shape[0]] + [2] * levels)
    for level in tl.static_range(1, levels + 1):
        if cube.dtype.primitive_bitwidth <= 32:
            cube = inverted(cube, level, levels, low, lanes)
        for step in tl.static_range(1, level + 1):
            cube = exchanged(cube, side_of(level - step, levels, low, lanes), side_of(level, levels, low, lanes), levels + 1)
    return in_order_of_ranks(cube, keys.shape, levels, low, lanes)


@triton.jit
def sort_pairs(keys, positions, levels: tl.constexpr, low: tl.constexpr, lanes: tl.constexpr):
    """The same of integers with their positions, which are all different: of equal integers the lower place is first."""
    cube = tl.reshape(keys, [keys.shape[0]] + [2] * levels)
    at = tl.reshape(positions, [keys.shape[0]] + [2] * levels)
    for level in tl.static_range(1, levels + 1):
        for step in tl.static_range(1, level + 1):
            cube, at = exchanged_pairs(
                cube, at, side_of(level - step, levels, low, lanes), side_of(level, levels, low, lanes), levels + 1
            )
    turned = in_order_of_ranks(cube, keys.shape, levels, low, lanes)
    return turned, in_order_of_ranks(at, keys.shape, levels, low, lanes)


@triton.constexpr_function
def side_of(rank_bit, levels, low, lanes):
    """The side of the cube that stands for a bit of ranks; 0 where ranks have no such bit."""
    above = levels - low - lanes
    if rank_bit >= levels:
        return 0
    if rank_bit < low or above <= 0:
        return levels - rank_bit
    return levels - (rank_bit + lanes if rank_bit < low + above else rank_bit - above)


@triton.jit
def in_order_of_ranks(cube, shape: tl.constexpr, levels: tl.constexpr, low: tl.constexpr, lanes: tl.constexpr):
    """A tile of rows again."""
    if levels - low - lanes > 0:
        parts = tl.reshape(cube, [shape[0], 2 ** (levels - low - lanes), 2**lanes, 2**low])
        cube = tl.permute(parts, [0, 2, 1, 3])
    return tl.reshape(cube, shape)


@triton.jit
def inverted(cube, level: tl.constexpr, levels: tl.constexpr, low: tl.constexpr, lanes: tl.constexpr):
    """Numbers of 32 bits are inverted where a level sorts downwards, so that all steps sort upwards, by instructions for
    extremes: at its begin those for which that is other than it was in the level before."""
    flips: tl.constexpr = side_of(level, levels, low, lanes)
    turned: tl.constexpr = side_of(level - 1, levels, low, lanes)
    if level > 1:
        return tl.where(is_larger_here(turned, flips, levels + 1), ~cube, cube)
    elif flips > 0:
        return tl.where(far_end(flips, levels + 1), ~cube, cube)
    else:
        return cube


@triton.jit
def exchanged(cube, side: tl.constexpr, flips: tl.constexpr, rank: tl.constexpr):
    """The larger one of two elements along a side goes to its far end; of numbers of 64 bits, to the near one in the half of
    the cube where the order flips."""
    other = opposite(cube, side)
    if cube.dtype.primitive_bitwidth <= 32:
        return tl.where(far_end(side, rank), tl.maximum(cube, other), tl.minimum(cube, other))
    else:
        return tl.where((cube > other) ^ is_larger_here(side, flips, rank), other, cube)


@triton.jit
def exchanged_pairs(cube, at, side: tl.constexpr, flips: tl.constexpr, rank: tl.constexpr):
    other, there = opposite(cube, side), opposite(at, side)
    behind = (cube > other) | ((cube == other) & (at > there))
    swaps = behind ^ is_larger_here(side, flips, rank)
    return tl.where(swaps, other, cube), tl.where(swaps, there, at)


@triton.jit
def opposite(cube, side: tl.constexpr):
    """The other element along a side of two: both together without the own one."""
    return cube ^ tl.reduce(cube, side, combine_bitxor, keep_dims=True)


@triton.jit
def is_larger_here(side: tl.constexpr, flips: tl.constexpr, rank: tl.constexpr):
    """Whether an element is where the larger one of two goes. The order flips along one more side; 0 is none."""
    far = far_end(side, rank)
    if flips > 0:
        far = far ^ far_end(flips, rank)
    return far


@triton.jit
def far_end(side: tl.constexpr, rank: tl.constexpr):
    """Whether an element is at the second place along a side of the cube."""
    return tl.reshape(tl.arange(0, 2), [1] * side + [2] + [1] * (rank - side - 1)) != 0
