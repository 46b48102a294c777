"""Where neighbouring points of a tile take their random numbers from one block: each block is then computed once.

Of the points of a line the compiler finds equal blocks by itself; of rows and of points across a thread's tile it does not, and
computes up to three times as many.
"""

from __future__ import annotations

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Var
from kgen.ir.plan import Tiling
from kgen.ir.values import Value

# Random numbers that the largest block serves, see kgen/capture/rng.py.
PER_BLOCK = 4
# Bytes that a thread of a GPU loads or stores at once, at most, and the threads of a warp.
ACCESS = 16
WARP = 32


def of_adjacent(value: Value, tiling: Tiling, graph: ir.Graph) -> str | None:
    """The text of a random value of (seed, counter) whose seed is one number, where its points share blocks along an axis."""
    blocks, kernel = tiling.blocks, tiling.kernel
    first, last = (
        ((tiling.x, blocks.x), (kernel.inner, blocks.r)) if kernel.inner else ((tiling.y, blocks.y), (tiling.x, blocks.x))
    )
    if share_blocks(value, *last):
        return by_blocks(value, paired=_in_pairs_of_blocks(last[1], tiling, graph))
    if share_blocks(value, *first):
        return by_blocks(value, paired=_in_pairs_of_blocks(first[1], tiling, graph), turned=True)
    return None


def by_blocks(value: Value, paired: bool = False, turned: bool = False) -> str:
    """The text of random numbers of which those of a block are made together, with gaps for the arguments. The points of a
    block follow each other along the last axis, or, where `turned`, along the one before; `paired` as in the library."""
    text = f"lib.{value.op}_of_adjacent({{0}}, {'tl.trans({1})' if turned else '{1}'}, {paired})"
    return f"tl.trans({text})" if turned else text


def share_blocks(random: Value, loops: tuple[Var, ...], block: int = PER_BLOCK) -> bool:
    """Whether the counters of a tile run along an axis in steps of one, from a multiple of PER_BLOCK each PER_BLOCK points.

    Tiles start at multiples of their size. Several loops on the axis follow each other: the last must end where a block does.
    """
    if random.args[1].op != "index" or not loops or block % PER_BLOCK:
        return False
    counter, fast = random.args[1].attr, loops[-1]
    if ix.stride_of(counter, fast) != 1 or (len(loops) > 1 and ix.mod(fast.extent, PER_BLOCK) != 0):
        return False
    return ix.mod(counter - fast.expr(), PER_BLOCK) == 0


def _in_pairs_of_blocks(length: int, tiling: Tiling, graph: ir.Graph) -> bool:
    """Whether a thread has the points of two blocks side by side, on an axis of `length` points: where numbers of 16 bits or
    less are loaded or stored."""
    blocks = tiling.blocks
    if length % (2 * PER_BLOCK) or blocks.x * blocks.y * blocks.r < 2 * PER_BLOCK * WARP * blocks.warps:
        return False
    statements = tiling.kernel.statements
    made = {out for s in statements for out in s.outs}
    moved = [load.attr[2] for s in statements for load in vs.loads(s.roots) if load.attr[0] not in made]
    moved += [graph.buffers[out].dtype for s in statements for out, kept in zip(s.outs, s.stored, strict=True) if kept]
    return any(dtype.itemsize * PER_BLOCK < ACCESS for dtype in moved)
