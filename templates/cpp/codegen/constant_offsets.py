"""Constant offsets of accesses as arguments: nests that differ in nothing else become one function.

A loop of writes to the rows of a tensor makes a kernel for each row. Where the row begins is a number in its text otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kgen.ir import index as ix
from kgen.ir import values as vs
from kgen.ir.index import Expr, Size
from kgen.ir.plan import Nest, Statement
from kgen.ir.values import Value

__all__ = ["with_offsets_as_sizes"]

_LIMIT = 1 << 62


def with_offsets_as_sizes(nest: Nest) -> tuple[Nest, dict[str, int]]:
    """The nest with a size in place of each constant that a load or store adds to its offset, and what the sizes are."""
    offsets = _Offsets()
    statements = tuple(map(offsets.statement, nest.kernel.statements))
    return replace(nest, kernel=replace(nest.kernel, statements=statements)), {
        size.name: number for number, size in offsets.sizes.items()
    }


@dataclass(slots=True)
class _Offsets:
    sizes: dict[int, Size] = field(default_factory=dict)  # equal offsets stay equal
    memo: dict[Expr, Expr] = field(default_factory=dict)

    def statement(self, s: Statement) -> Statement:
        new = vs.rewrite(s.roots, self.value)
        store = tuple(self.offset(ix.substitute(e, {}, self.memo, new.__getitem__)) for e in s.store)
        mask = None if s.mask is None else new[s.mask]
        rank = None if s.rank is None else ix.substitute(s.rank, {}, self.memo, new.get)
        return replace(s, value=new[s.value], store=store, mask=mask, rank=rank, factors=tuple(new[v] for v in s.factors))

    def value(self, value: Value, args: tuple[Value, ...], lookup: Callable[[Value], Value]) -> Value:
        if value.op == "load":
            name, (place,), dtype = value.attr
            moved = self.offset(ix.substitute(place, {}, self.memo, lookup))
            return vs.load(name, (moved,), dtype, args[0] if args else None)
        if value.op == "index":
            return vs.index_value(ix.substitute(value.attr, {}, self.memo, lookup), value.dtype)
        return value if args == value.args else vs.rebuild(value, args, value.attr)

    def offset(self, place: Expr) -> Expr:
        constant = dict(place.terms).get((), 0)
        if not constant:
            return place
        size = self.sizes.setdefault(constant, ix.size(f"offset{len(self.sizes)}", -_LIMIT, _LIMIT))
        return place - constant + size.expr()
