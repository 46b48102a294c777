"""Which elements of memory kernels touch. Two that touch others of one buffer need not wait for each other, as those that write
the rows of a tensor one by one."""

from __future__ import annotations

from dataclasses import dataclass, field

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Expr
from kgen.ir.plan import Kernel
from kgen.scheduler.analysis.memory import reads, root, writes

__all__ = ["Touched", "touched"]

Index = tuple[Expr, ...]


@dataclass(slots=True)
class Touched:
    """Elements of the memory of one buffer, as indices each at any point of its kernel's loops. Layouts are sizes, strides and
    offset; indices say the same only in the same one."""

    layout: tuple[object, ...]
    read: list[Index] = field(default_factory=list)
    written: list[Index] = field(default_factory=list)

    def apart(self, other: Touched) -> bool:
        """Whether no element that one of them writes is touched by the other."""
        if self.layout != other.layout:
            return False
        pairs = [(a, b) for a in self.written for b in (*other.read, *other.written)]
        pairs += [(a, b) for a in self.read for b in other.written]
        return all(ix.disjoint(a, b) for a, b in pairs)


def touched(graph: ir.Graph, kernel: Kernel) -> dict[str, Touched]:
    """By the buffer that owns the memory; that of which nothing is known is left out."""
    if any(s.kind != "pointwise" or s.inner for s in kernel.statements) or kernel.workspaces:
        return {}
    names = reads(kernel) | writes(kernel)
    known, accesses = dict[str, Touched](), _accesses(kernel)
    for name in names:
        buffer, owner = graph.buffers[name], root(graph, name)
        layout = (buffer.sizes, buffer.strides, ix.as_expr(buffer.offset), buffer.dtype)
        one = known.setdefault(owner, Touched(layout))
        if one.layout != layout or buffer.strides is None:
            one.layout = (object(),)  # equals no other
        for index, written in accesses.get(name, ()):
            (one.written if written else one.read).append(index)
    return known


def _accesses(kernel: Kernel) -> dict[str, list[tuple[Index, bool]]]:
    """The indices of a kernel's loads, and of its stores, by the name of the buffer."""
    found = dict[str, list[tuple[Index, bool]]]()
    for load in vs.loads(r for s in kernel.statements for r in s.roots):
        found.setdefault(load.attr[0], []).append((load.attr[1], False))
    for statement in kernel.statements:
        for out in statement.outs:
            found.setdefault(out, []).append((statement.store, True))
    return found
