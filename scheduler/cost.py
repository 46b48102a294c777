"""What a fusion is worth: memory traffic at the size hints, and when saving it would cost more elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kgen import index as ix
from kgen import ir
from kgen.index import Atom, Expr, Size, Var
from kgen.scheduler.items import Item, Members
from kgen.verdict import Reason

# A row longer than this (in points) is worth sharing among threads when there are fewer rows than MIN_ROWS.
LONG_ROW = 32768
MIN_ROWS = 4
# Bounds of one kernel: beyond these the compiler spills registers and its time grows.
MAX_ITEMS = 64
MAX_COST = 2500
MAX_BUFFERS = 96


@dataclass(frozen=True, slots=True)
class Sizes:
    """Evaluates sizes at the hints of the graph's symbols."""

    hints: dict[Size, int]

    def of(self, expr: Expr) -> int:
        literal = expr.as_int()
        return literal if literal is not None else int(ix.evaluate(expr, self._value))

    def _value(self, atom: Atom) -> int:
        if isinstance(atom, Size):
            return self.hints.get(atom, 64)
        return self.of(atom.extent) // 2 if isinstance(atom, Var) else 0

    def points(self, loops: Iterable[Var]) -> int:
        return self.of(ix.product(v.extent for v in loops))

    def bytes(self, buffer: ir.Buffer) -> int:
        return self.of(ix.product(buffer.sizes)) * buffer.dtype.itemsize


def bytes_of_access(sizes: Sizes, buffer: ir.Buffer, item: Item) -> int:
    """Memory that reading `buffer` over the item's loops moves: no more than the buffer, no more than the loops."""
    loops = sizes.points(item.outer + item.inner) * buffer.dtype.itemsize
    return min(sizes.bytes(buffer), loops)


def unprofitable(sizes: Sizes, a: Members, b: Members, outer: tuple[Var, ...], inner: tuple[Var, ...]) -> Reason | None:
    """Why the joint kernel would be worse although it moves less memory."""
    if len(a.items) + len(b.items) > MAX_ITEMS or a.cost + b.cost > MAX_COST:
        return Reason.TOO_LARGE
    if len(a.reads) + len(b.reads) + len(a.made) + len(b.made) > 2 * MAX_BUFFERS:
        return Reason.TOO_LARGE
    if inner and sizes.points(inner) > LONG_ROW and sizes.points(outer) < MIN_ROWS and _revisits(a.joined(b).items):
        return Reason.PARALLELISM
    return None


def _revisits(items: list[Item]) -> bool:
    """Whether some item at inner level needs a reduction's finished result, so that the row is walked again."""
    finished: set[str] = set()
    for item in items:
        if item.inner and any(r.buffer in finished for r in item.reads):
            return True
        if item.reduces or any(r.buffer in finished for r in item.reads):
            finished.update(item.outs)
    return False
