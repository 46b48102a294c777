"""Sizes as numbers: expressions evaluated at the values that the graph's symbols had when it was captured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kgen import index as ix
from kgen import ir
from kgen.index import Atom, Expr, Size, Var


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
