"""The tile of a kernel that sorts rows: a warp has full rows, as far as registers allow.

A step of the sorting network between registers of a thread is one comparison, between lanes a shuffle more, and between warps a
trip through shared memory with a barrier. So rows of up to a vector for each lane share a warp, and longer ones have a warp of
their own, with up to 32 elements a thread.
"""

from __future__ import annotations

from dataclasses import replace

from kgen.device import Gpu
from kgen.ir import nodes as ir
from kgen.ir.plan import Blocks, Kernel
from kgen.ir.vectors import widest_vector

# Points of a thread of long rows, of those whose positions are sorted beside them, and of short rows, of which a program has
# several warps.
LONG_POINTS, PAIRED_POINTS, SHORT_POINTS, SHORT_WARPS = 32, 16, 8, 4
# Where rows are neighbours: those of a program, at most and at least, whose loads are full sectors.
MOST_COLUMNS, FEWEST_COLUMNS = 32, 8
# Warps of an SM that rows are shared among where there are few of them; most warps of a row; and the fewest points of their
# threads then.
WARPS_PER_SM, MOST_WARPS, FEWEST_POINTS = 8, 16, 8


def sorting_blocks(kernel: Kernel, graph: ir.Graph, rows: int, length: int, across: bool, gpu: Gpu) -> Blocks:
    """The tile of a kernel whose rows of `length` elements are sorted; `across`: neighbours in memory are of several rows."""
    r = 1 << max(0, length - 1).bit_length()
    points = PAIRED_POINTS if any(s.op == "stable_sort" for s in kernel.statements) else LONG_POINTS
    if across:
        points = points if points == LONG_POINTS else SHORT_POINTS
        x = min(max(FEWEST_COLUMNS, min(MOST_COLUMNS, 32 * points // r)), MOST_WARPS * 32 * points // r)
        few = rows < FEWEST_COLUMNS // 2 * gpu.compute_units  # parts of sectors are better than SMs without work
        x = _fewer(x, rows, 1 if few else FEWEST_COLUMNS // 2, gpu)
        return _with_warps(Blocks(x=x, r=r), rows, points, gpu)
    if r <= 32 * widest_vector(kernel, graph):
        x = _fewer(max(1, 32 * SHORT_WARPS * SHORT_POINTS // r), rows, 1, gpu)
        return Blocks(x=x, r=r, warps=max(1, min(SHORT_WARPS, x * r // (32 * SHORT_POINTS))))
    x = _fewer(max(1, 32 * SHORT_POINTS // r), rows, 1, gpu)
    return _with_warps(Blocks(x=x, r=r), rows, points, gpu)


def _with_warps(blocks: Blocks, rows: int, points: int, gpu: Gpu) -> Blocks:
    """Up to so many points a thread; fewer where SMs have few warps."""
    tile, programs = blocks.x * blocks.r, -(-rows // blocks.x)
    warps = max(1, min(MOST_WARPS, tile // (32 * points)))
    while warps < MOST_WARPS and programs * warps < gpu.compute_units * WARPS_PER_SM and tile >= 64 * warps * FEWEST_POINTS:
        warps *= 2
    return replace(blocks, warps=warps)


def _fewer(x: int, rows: int, least: int, gpu: Gpu) -> int:
    """Rows of a program that leave a program for each SM, and a second one."""
    while x > least and rows < x * gpu.compute_units * 2:
        x //= 2
    return x
