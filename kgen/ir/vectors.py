"""How many neighbours along a row a thread moves at once."""

from __future__ import annotations

from collections.abc import Iterator

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Expr
from kgen.ir.plan import Kernel

# Bytes that a thread moves at once.
VECTOR = 16


def widest_vector(kernel: Kernel, graph: ir.Graph) -> int:
    """Elements of the widest access along the inner loops; 1 where rows begin anywhere, or no neighbours are read."""
    return max((_width(offset, size, kernel) for offset, size in _accesses(kernel, graph)), default=1)


def _accesses(kernel: Kernel, graph: ir.Graph) -> Iterator[tuple[Expr, int]]:
    made = {o for s in kernel.statements for o in s.outs}
    for s in kernel.statements:
        for load in vs.loads(s.roots):
            if load.attr[0] not in made:
                yield load.attr[1][0], load.attr[2].itemsize
        for out, stored in zip(s.outs, s.stored, strict=True):
            if stored and s.inner and s.kind != "reduction":
                yield s.store[0], graph.buffers[out].dtype.itemsize


def _width(offset: Expr, size: int, kernel: Kernel) -> int:
    """A power of two that divides all steps of an offset but those to the next element."""
    last = kernel.inner[-1]
    if ix.stride_of(offset, last) != 1:
        return 1
    width, steps = max(1, VECTOR // size), [number for _, number in (offset - last.expr()).terms]
    while any(step % width for step in steps):
        width //= 2
    return width
