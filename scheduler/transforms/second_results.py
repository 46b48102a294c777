"""Finds who reads the log-sum-exp of a softmax's rows, however it was written, and has them read a buffer that the program's
kernel stores.

    m + log(s), where(isinf(m), m, m + log(s)), log(s)      with s = sum(exp(x - m)) or sum(exp(x)), m = max(x)

The maximum and the sum may be those of the softmax or others of the same elements: values are interned.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

import torch

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Atom, Expr, Var
from kgen.ir.values import Value
from kgen.scheduler.transforms.graph_reader import Reader
from kgen.scheduler.transforms.softmax_form import LogSumExp, bare, logsumexp_form, total_of

LOGSUMEXP = "logsumexp"
Readers = ir.Pointwise | ir.Reduction


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a step that is a softmax of the value `of` along loops. `total` is the load of their sums, at indices over
    the loops of the program's result."""

    step: str
    of: Value
    total: Value
    along: tuple[Var, ...]


@dataclass(frozen=True, slots=True)
class Shared:
    """Second results that somebody reads. `made` are nodes that compute them without the program: one of the new `buffer`,
    where somebody goes on reading that, and those that the program's kernel computes as well. `readers` are the nodes that read
    the buffer, by what they make, each with the values in it that are to be replaced, and by what."""

    seconds: tuple[ir.Second, ...]
    buffer: ir.Buffer
    made: tuple[ir.Pointwise, ...]
    readers: Mapping[str, Mapping[Value, Value]]

    @property
    def gone(self) -> frozenset[str]:
        """What others need not make any more."""
        return frozenset(one.out for one in self.seconds if one.out != self.buffer.name)


def shared(graph: ir.Graph, reader: Reader, rows: Rows) -> Shared | None:
    """The log-sum-exp of rows; None where nobody reads it."""
    source = graph.buffers[rows.total.attr[0]]
    found = {ir.outs(node)[0]: own for node in _candidates(graph.nodes) if (own := _forms(node, rows, reader))}
    if not found:
        return None
    name = ir.derived(graph, ir.Derived(source.name, LOGSUMEXP))
    readers = {out: {value: _read(name, form, source.dtype) for value, form in own.items()} for out, own in found.items()}
    leaf, index = vs.step_result(rows.step, source.dtype), rows.total.attr[1]
    seconds: list[ir.Second] = []
    made: list[ir.Pointwise] = []
    for out, new in list(readers.items()):
        node, after = reader.makers[out], rewritten(reader.makers[out], [new])
        if isinstance(node, ir.Pointwise) and isinstance(after, ir.Pointwise) and _is_of_rows_alone(after, name, graph):
            [value] = vs.replace_loads([after.value], lambda _: leaf)
            seconds.append(ir.Second(rows.step, out, value, _with_ones(after, index)))
            made.append(node)
            del readers[out]
    if readers:
        value, form = next(iter(found[next(iter(readers))].items()))
        seconds.append(ir.Second(rows.step, name, leaf, index))
        made.append(_alone(name, value, form, source))
    return Shared(tuple(seconds), replace(source, name=name), tuple(made), readers)


def _forms(node: Readers, rows: Rows, reader: Reader) -> dict[Value, LogSumExp]:
    """The values in a node that are the log-sum-exp of rows."""
    forms = ((value, logsumexp_form(value)) for value in _outermost(node.value))
    return {value: form for value, form in forms if form is not None and _is_of(form, rows, reader)}


def _is_of_rows_alone(node: ir.Pointwise, name: str, graph: ir.Graph) -> bool:
    """Whether a node makes one element of each row, of nothing but its log-sum-exp."""
    buffer, own = graph.buffers[node.out], _without_zeros(v.expr() for v in node.vars)
    loads = vs.loads([node.value])
    plain = buffer.alias_of is None and not buffer.parts
    only = all(load.attr[0] == name and _without_zeros(load.attr[1]) == own and not load.args for load in loads)
    [rest] = vs.replace_loads([node.value], lambda load: vs.const(0, load.dtype))
    return plain and only and not rest.variables()


def _without_zeros(index: Iterable[Expr]) -> list[Expr]:
    """An index but for dimensions of one element, which a reduction may have kept."""
    return [expr for expr in index if expr is not ix.ZERO]


def _with_ones(node: ir.Pointwise, index: Sequence[Expr]) -> tuple[Expr, ...]:
    """Where a node's element of a row is, from where the row's sum is."""
    found = dict(zip(_without_zeros(v.expr() for v in node.vars), _without_zeros(index), strict=True))
    return tuple(found.get(v.expr(), ix.ZERO) for v in node.vars)


def rewritten(node: ir.Node, changes: Iterable[Mapping[Value, Value]]) -> ir.Node:
    """The node with values in it replaced."""
    new = {old: value for one in changes for old, value in one.items()}
    if not new or not isinstance(node, Readers):
        return node

    def visit(value: Value, args: tuple[Value, ...], _: object) -> Value:
        if value in new:
            return new[value]
        return value if args == value.args else vs.rebuild(value, args, value.attr)

    return replace(node, value=vs.rewrite([node.value], visit)[node.value])


def _candidates(nodes: Sequence[ir.Node]) -> list[Readers]:
    return [n for n in nodes if may_read_second(n)]


def may_read_second(node: ir.Node) -> TypeGuard[Readers]:
    """Whether a node may read the log-sum-exp of rows: a logarithm is in it."""
    return isinstance(node, Readers) and any(v.op == "log" for v in vs.topological([node.value]))


def _outermost(root: Value) -> list[Value]:
    """The values in one that have the form of a log-sum-exp, without those inside of others."""
    found = [value for value in vs.topological([root]) if logsumexp_form(value) is not None]
    inside = {part for value in found for part in vs.topological([value]) if part is not value}
    return [value for value in found if value not in inside]


def _is_of(form: LogSumExp, rows: Rows, reader: Reader) -> bool:
    """Whether a value is the log-sum-exp of rows, wherever it reads these."""
    mapping = _mapping(form.total.attr[1], rows.total.attr[1])
    if mapping is None:
        return False
    total, top = (None if load is None else vs.substitute(load, mapping) for load in (form.total, form.top))

    def reduced(load: Value, op: str) -> Value | None:
        return reader.reduced(load, op, rows.along) if load.op == "load" else None

    assert total is not None
    summed = total_of(total, reduced)
    if summed is None or summed.of is not rows.of or summed.shifted != (top is not None):
        return False
    largest = None if top is None else reduced(top, "max")
    return top is None or (largest is not None and bare(largest) is rows.of)


def _mapping(index: Sequence[Expr], wanted: Sequence[Expr]) -> dict[Atom, Expr] | None:
    """The loops of an index in terms of others: one for each dimension, or one for several where both go through them so."""
    if len(index) != len(wanted):
        return None
    mapping: dict[Atom, Expr] = {}
    for own, other in zip(index, wanted, strict=True):
        atoms = ix.free_atoms(own)
        loop = next(iter(atoms), None)
        if own is other and not atoms:
            continue
        if not isinstance(loop, Var):
            return None
        place = other if own is loop.expr() and loop not in mapping else _counterpart(own, loop, other)
        if place is None or mapping.get(loop, place) is not place:
            return None
        mapping[loop] = place
    return mapping


def _counterpart(own: Expr, loop: Var, other: Expr) -> Expr | None:
    """The loop that has in one expression the part that `loop` has in another, such as of ``b // 16`` and ``i // 16``."""
    atoms = list(ix.free_atoms(other))
    if len(ix.free_atoms(own)) != 1 or len(atoms) != 1 or not isinstance(atoms[0], Var) or atoms[0].extent is not loop.extent:
        return None
    place = atoms[0].expr()
    return place if ix.substitute(own, {loop: place}) is other else None


def _read(name: str, form: LogSumExp, dtype: torch.dtype) -> Value:
    """The load in place of a form. Of a row that is -inf as a whole, ``m + log(s)`` without a guard is NaN: m is subtracted
    from itself."""
    load = vs.load(name, form.total.attr[1], dtype)
    if form.guarded or form.top is None:
        return load
    empty = vs.call("eq", load, vs.const(-math.inf, load.dtype))
    return vs.where(empty, vs.const(math.nan, load.dtype), load)


def _alone(name: str, value: Value, form: LogSumExp, source: ir.Buffer) -> ir.Pointwise:
    """What computes the buffer by itself."""
    loops = tuple(ix.var(f"r{k}", size) for k, size in enumerate(source.sizes))
    row = tuple(v.expr() for v in loops)
    [own] = vs.replace_loads([value], lambda load: vs.load(load.attr[0], row, load.attr[2]))
    return ir.Pointwise(name, loops, own)
