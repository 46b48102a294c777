"""Tiles of kernels that look up tables at places from data: who shares a place, and who shares a table."""

from __future__ import annotations

from collections.abc import Sequence

from kgen.ir import index as ix
from kgen.ir import values as vs
from kgen.ir.index import Sizes, Var
from kgen.ir.plan import Blocks, Kernel
from kgen.ir.values import Value
from kgen.scheduler.tiling.loops import Touch, stride_along, through_data, unflattened

# Rows of a program, one for each lane of a warp, points of a step along what has tables of its own, and warps.
LANES, TABLES_OF_A_STEP, LOOKUP_WARPS = 32, 8, 4
# Elementary operations that take as long as a gathered number, in a program that waits for many (H200, 2026-11-30: the sum of
# 16,384 logits of labels took 15.7 us in one program).
OF_A_GATHER = 48


def is_run_from_data(load: Value, fast: Var, sizes: Sizes) -> bool:
    """Whether neighbours along the loop read neighbours of memory, beginning at a place that data gives."""
    (offset,) = load.attr[1]
    return stride_along(offset, fast, sizes) == 1 and any(isinstance(atom, ix.Indirect) for atom in ix.free_atoms(offset))


def cost_of_gathers(kernel: Kernel) -> int:
    """What gathers take for an inner point, in elementary operations: a sector of memory for each number, in no order."""
    inner = frozenset(kernel.inner)
    loads = dict.fromkeys(vs.loads([root for s in kernel.statements if s.inner for root in s.roots]))
    return OF_A_GATHER * sum(_is_gather(load, inner) for load in loads)


def _is_gather(load: Value, inner: frozenset[Var]) -> bool:
    """Whether data say for each inner point where it is, and no neighbour is beside it."""
    index = load.attr[1]
    by_data = any(through_data(one, v) for one in index for v in inner)
    return by_data and not any(ix.stride_of(index[-1], v) == 1 for v in inner)


def gathers_runs(kernel: Kernel, sizes: Sizes) -> bool:
    """Whether half of what a point moves is runs of neighbours at indices from data, such as rows of an embedding."""
    fast = kernel.outer[-1] if kernel.outer else None
    if fast is None:
        return False
    loads = {load for s in kernel.statements for load in vs.loads(s.roots) if fast in load.variables()}
    runs = [load for load in loads if is_run_from_data(load, fast, sizes)]
    stored = sum(len(s.outs) for s in kernel.statements if any(s.stored))
    return bool(runs) and 2 * len(runs) >= len(loads) + stored


def by_short_runs(kernel: Kernel, sizes: Sizes) -> Kernel | None:
    """The kernel with short runs from data as its last loop, a power of two long. None where it gathers no such runs, or adds
    to memory: threads would exchange addresses and values for that."""
    if any(s.kind != "pointwise" for s in kernel.statements):
        return None
    kernel = unflattened(kernel)
    length = kernel.outer[-1].extent.as_int() if len(kernel.outer) > 1 else None
    if length is None or length < 2 or length & (length - 1) or not gathers_runs(kernel, sizes):
        return None
    return kernel


def lookup_steps(kernel: Kernel, touches: Sequence[Touch], sizes: Sizes, units: int) -> Blocks | None:
    """A tile whose lanes are rows, where most of what these read is at places from data in tables that belong to inner points
    alone, as nodes of the trees of a forest. Neighbouring rows share a table then, which stays in the L1 cache for a step.
    None where SMs would be idle."""
    if not kernel.outer or sizes.points(kernel.outer) < LANES * units:
        return None
    inner = [touch for touch in touches if touch.inner and not touch.store]
    if 2 * sum(_is_in_shared_table(kernel, touch) for touch in inner) <= len(inner):
        return None
    return Blocks(x=LANES, r=TABLES_OF_A_STEP, warps=LOOKUP_WARPS)


def _is_in_shared_table(kernel: Kernel, touch: Touch) -> bool:
    """Whether the place differs from row to row by data alone, and the table from inner point to inner point."""
    atoms = ix.free_atoms(touch.offset)
    row = kernel.outer[-1]
    return through_data(touch.offset, row) and row not in atoms and not atoms.isdisjoint(kernel.inner)
