"""Range checks of indices from data that no access makes. A kernel checks an index where it computes an address with it. That
leaves out what does not move the address: an index into a dimension of size 1 or stride 0, into a tensor that is a number, or
into what another condition masks. Eager checks these too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Expr, Indirect
from kgen.ir.values import Value


def checked(graph: ir.Graph, value: Value, where: Iterable[Expr], mask: Value | None = None) -> Value:
    """`value` with an assertion for each index from data in `where` that no access of the value checks. Where `mask` is false,
    an index may be anything."""
    made = set(_checked_by(graph, value))
    for atom in dict.fromkeys(_indirects(where)):
        if atom not in made and not atom.inside:
            inside = vs.index_inside(atom.value, atom.size)
            condition = inside if mask is None else vs.call("or", vs.call("not", mask), inside)
            value = vs.asserted(value, condition, "index")
    return value


def checked_write(graph: ir.Graph, value: Value, where: Iterable[Expr], access: Value, mask: Value | None) -> Value:
    """`value`, which is to be written at `where`: assertions for what the `access`, a load of the element, does not check."""
    made = set(_checked_by(graph, access))
    return checked(graph, value, [atom.expr() for atom in _indirects(where) if atom not in made], mask)


def _checked_by(graph: ir.Graph, value: Value) -> Iterator[Indirect]:
    """Indices that computing the value checks, whatever the data."""
    for v in vs.topological([value]):
        if v.op == "index":
            yield from _indirects([v.attr])
        elif v.op == "load" and not v.args:
            name, index, _ = v.attr
            yield from _indirects(_moving(graph.buffers[name], index))


def _moving(buffer: ir.Buffer, index: Sequence[Expr]) -> list[Expr]:
    """The indices that the address depends on."""
    strides = buffer.strides or [ix.ONE] * len(index)
    return [e for e, stride in zip(index, strides, strict=True) if stride != 0]


def _indirects(exprs: Iterable[Expr]) -> Iterator[Indirect]:
    for expr in exprs:
        yield from sorted((a for a in ix.free_atoms(expr) if isinstance(a, Indirect)), key=lambda a: a.order)
