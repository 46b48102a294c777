"""Sizes as numbers: expressions evaluated at the values that the graph's symbols had when it was captured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir.index import Atom, Expr, Size, Var

# For a size of which nothing is known.
GUESS = 64


@dataclass(frozen=True, slots=True)
class Sizes:
    """Evaluates sizes at the hints of the graph's symbols."""

    hints: dict[Size, int]

    def of(self, expr: Expr) -> int:
        literal = expr.as_int()
        return literal if literal is not None else int(ix.evaluate(expr, self._value))

    def _value(self, atom: Atom) -> int:
        if isinstance(atom, Size):
            return self.hints.get(atom, GUESS)
        return self.of(atom.extent) // 2 if isinstance(atom, Var) else 0

    def points(self, loops: Iterable[Var]) -> int:
        return self.of(ix.product(v.extent for v in loops))

    def bytes(self, buffer: ir.Buffer) -> int:
        return self.of(ix.product(buffer.sizes)) * buffer.dtype.itemsize


def with_derived(sizes: Mapping[Size, int], derived: Mapping[Size, Expr]) -> dict[Size, int]:
    """The sizes with those that are functions of them, each of which is defined by ones before it."""
    found = dict(sizes)
    for size, definition in derived.items():
        try:
            found[size] = Sizes(found).of(definition)
        except (ArithmeticError, ValueError):  # sizes that nobody gave need not make sense
            found[size] = GUESS
    return found
