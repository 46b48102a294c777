"""Contractions that differ in nothing but names, as those of equal layers do: what was found for one of them holds for all.

The search over configurations, at ten lengths where sizes are dynamic, would otherwise be repeated for each layer, and at each
attempt at a schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import TypeVar

from kgen import unusable
from kgen.cost import model
from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Expr
from kgen.ir.plan import Kernel, Statement
from kgen.ir.values import Value
from kgen.scheduler.analysis.memo import is_memoising, memoised, memoised_for
from kgen.scheduler.selection.size_buckets import Best
from kgen.templates.contract import Config
from kgen.templates.problem import Problem
from kgen.templates.problem import memoised as known_memoised

T = TypeVar("T")
# Bytes of which an address is a multiple or not, to templates.
START = 16


def for_equal(what: Hashable, kernel: Kernel, graph: ir.Graph, make: Callable[[], T]) -> T:
    """A memo of what kernels have that are equal, with equal buffers."""
    return memoised((what, _identity(kernel, graph)), make)


def for_form(what: Hashable, kernels: Sequence[Kernel], graph: ir.Graph, make: Callable[[], T]) -> T:
    """A memo of what kernels have that are equal but for names: to templates, and to the libraries that compete with them."""
    return memoised((what, _likeness(kernels, graph), _left_out()), make)


def _left_out() -> Hashable:
    """Stands for the configurations that are known not to run: prices, and what they decide, depend on these."""
    found = unusable.FOUND.get()
    return memoised_for(found, "left out", object) if found else None


def _identity(kernel: Kernel, graph: ir.Graph) -> Hashable:
    """A small key, for kernels are many objects."""
    return memoised_for(kernel, "identity", lambda: memoised(("identity", kernel, _layouts(kernel, graph)), object), graph)


def _layouts(kernel: Kernel, graph: ir.Graph) -> Hashable:
    """The buffers of a kernel. Another attempt at a schedule may have cut another part of a tensor, or padded its rows
    otherwise, under the name that an equal kernel has for it."""
    touched = {load.attr[0] for s in kernel.statements for load in vs.loads(s.roots)}
    touched.update(name for s in kernel.statements for name in (*s.outs, s.target) if name is not None)
    return frozenset(graph.buffers[name] for name in touched if name in graph.buffers)


def memoised_best(problems: Sequence[Problem], how: Hashable, find: Callable[[], Best | None]) -> Best | None:
    """What `find` returns for a matmul, or several in one kernel, as templates see them, or returned for one like it. `how` is
    what else it depends on."""
    if not problems or not is_memoising():
        return find()
    key = ("best", how, _left_out(), problems[0].device, tuple((problem.template.name, _form(problem)) for problem in problems))
    found = memoised(key, find)
    if found is None:
        return None
    return replace(found, problem=next(p for p in problems if p.template is found.problem.template))


def prices(problem: Problem) -> Sequence[tuple[Config, float]]:
    """The configurations that the device can run and their estimated seconds, kept for equal problems."""
    if not is_memoising():
        return _prices(problem)
    key = ("prices", problem.device, problem.template.name, _form(problem), frozenset(problem.sizes.hints.items()))
    if not unusable.FOUND.get():
        return memoised(key, lambda: _prices(problem))
    return memoised((key, _left_out()), lambda: _usable(problem, memoised(key, lambda: _prices_of_all(problem))))


def _usable(problem: Problem, every: Sequence[tuple[Config, float]]) -> Sequence[tuple[Config, float]]:
    """Those of configurations that have not turned out not to run."""
    name = problem.template.name
    return [row for row in every if unusable.usable(name, row[0].values, problem.identity)]


def _prices_of_all(problem: Problem) -> Sequence[tuple[Config, float]]:
    with unusable.without(()):
        return _prices(problem)


def _prices(problem: Problem) -> Sequence[tuple[Config, float]]:
    return [(config, model.seconds(problem, config)) for config in model.feasible(problem)]


def _likeness(kernels: Sequence[Kernel], graph: ir.Graph) -> Hashable:
    def found() -> Hashable:
        return "likeness", form(kernels, graph), tuple(_library(kernel, graph) for kernel in kernels)

    return found() if len(kernels) > 1 else memoised_for(kernels[0], "likeness", lambda: memoised(found(), object), graph)


def _library(kernel: Kernel, graph: ir.Graph) -> Hashable:
    """What the cost model asks about the library's calls for a kernel's contractions."""
    nodes = contractions_by_result(graph)
    fused = memoised_for(graph.nodes, "fused calls", lambda: {n.fused.outs for n in nodes.values() if n.fused is not None})
    stored = tuple(o for s in kernel.statements for o, kept in zip(s.outs, s.stored, strict=True) if kept)
    made = [graph.provenance.get(s.outs[0]) for s in kernel.statements if s.kind == "contraction"]
    calls = [nodes.get(one.source) if one is not None else None for one in made]
    windows = tuple(node.out if node is not None and node.windowed else "" for node in calls)  # have sizes of their own
    return stored in fused, windows, tuple(node is not None and node.vendor is not None for node in calls)


def contractions_by_result(graph: ir.Graph) -> dict[str, ir.Contraction]:
    """The contractions of a graph, found once for all graphs that have the same list of nodes."""
    return memoised_for(graph.nodes, "contractions", lambda: {n.out: n for n in graph.nodes if ir.is_contraction(n)})


@known_memoised
def _form(problem: Problem) -> Hashable:
    return form((problem.kernel,), problem.graph)


def form(kernels: Sequence[Kernel], graph: ir.Graph) -> Hashable:
    """Equal for kernels that are equal but for the names of buffers, those that several of them read included, and for where in
    a buffer they begin, as the steps of a sequence do: an equal distance from a multiple of 16 bytes is enough."""
    writer = _Form(graph)
    for kernel in kernels:
        writer.add(kernel)
    return tuple(writer.tokens), tuple(map(writer.facts, writer.names))


def _numbered(expr: Expr) -> Hashable:
    """An index with sizes in the place of integers that are read, and their limits: what they are is written down elsewhere."""
    read = ix.indirects(expr)
    if not read:
        return expr
    numbers: dict[ix.Atom, Expr] = {one: ix.size(f"read{k}").expr() for k, one in enumerate(read)}
    return ix.substitute(expr, numbers), tuple(one.size for one in read)


def _stride(b: ir.Buffer | None, d: int, dimensions: int) -> int | None:
    """Elements between neighbours along a dimension of an index, which may be an offset; None where that is no known number."""
    if dimensions == 1:
        return 1
    strides = None if b is None else b.strides
    return ix.as_expr(strides[d]).as_int() if strides is not None and len(strides) == dimensions else None


class _Form:
    """Writes kernels down as tokens, with numbers in the place of names: each value once, and its number where it is met again.
    Values go by their place, for equal bodies over other data may have been made in any order. `firsts` are the constants of
    the first index that each dimension of a buffer has; other constants count from there."""

    def __init__(self, graph: ir.Graph) -> None:
        self.graph, self.frozen = graph, memoised_for(graph.inputs, "frozen", lambda: graph.frozen)
        self.tokens: list[Hashable] = []
        self.names: dict[str, int] = {}
        self.values: dict[Value, int] = {}
        self.firsts: dict[tuple[str, int], int] = {}
        self.wholes: dict[str, int] = {}

    def named(self, buffer: str) -> int:
        return self.names.setdefault(buffer, len(self.names))

    def add(self, kernel: Kernel) -> None:
        rows = tuple(map(self.named, kernel.rows))
        self.tokens += (kernel.target, kernel.outer, kernel.inner, kernel.sections, kernel.share, rows)
        for statement in kernel.statements:
            self.statement(statement)

    def statement(self, s: Statement) -> None:
        for root in s.roots:
            self.value(root)
        for expr in s.store:
            for one in ix.indirects(expr):
                self.value(one.value)
        stores = tuple((self.named(out), self.place(out, s.store)) for out in s.outs)
        self.tokens += (
            s.kind, stores, s.inner, s.section, s.stored, s.op, s.mask is None,
            None if s.target is None else self.named(s.target), s.axis, s.rank, s.block, len(s.factors), s.operands, s.axes,
            tuple((name, repr(argument)) for name, argument in s.arguments), s.unscaled,
        )  # fmt: skip

    def value(self, root: Value) -> None:
        pending = [root]
        while pending:
            value = pending.pop()
            known = self.values.get(value)
            if known is not None:
                self.tokens.append(known)
                continue
            self.values[value] = len(self.values)
            pending += value.args
            if value.op == "load":
                pending += [one.value for expr in value.attr[1] for one in ix.indirects(expr)]
            self.tokens.append(self.operation(value))

    def operation(self, value: Value) -> Hashable:
        if value.op == "load":
            buffer, index, dtype = value.attr
            return "load", self.named(buffer), self.place(buffer, index), dtype, len(value.args)
        return (value.op, value.attr, value.dtype, len(value.args)) if value.args else value

    def place(self, buffer: str, index: Sequence[Expr]) -> Hashable:
        """An index, with numbers in the place of integers that are read, and what matters of the constants in it."""
        b = self.graph.buffers.get(buffer)
        found: list[Hashable] = []
        for d, expr in enumerate(index):
            constant = expr.constant_term()
            stride = _stride(b, d, len(index))
            if not constant or stride is None or b is None:
                found.append((_numbered(expr), None, 0))
                continue
            distance = constant - self.firsts.setdefault((buffer, d), constant)
            start = math.gcd(constant * stride * b.dtype.itemsize, START)
            found.append((_numbered(expr - ix.constant(constant)), start, distance))
        return tuple(found)

    def facts(self, name: str) -> Hashable:
        """What templates may ask about a buffer. Frozen ones are packed once, which costs a call nothing."""
        b = self.graph.buffers.get(name)
        made = self.graph.provenance.get(name)
        source = None if made is None else self.graph.buffers.get(made.source)
        role = None if made is None else (made.role, source and source.strides)
        if b is None:
            return role
        is_frozen = name in self.frozen
        return is_frozen, role, b.dtype, b.device, b.sizes, b.strides, self.start(b), b.kind, self.whole(b), b.hint, b.is_part

    def whole(self, b: ir.Buffer) -> Hashable:
        """What a buffer is in: its number, and what templates may ask about it where no kernel names it."""
        if b.alias_of is None or b.alias_of in self.names:
            return b.alias_of and self.names[b.alias_of]
        number = self.wholes.setdefault(b.alias_of, len(self.wholes))
        return "whole", number, self.facts(b.alias_of)

    def start(self, b: ir.Buffer) -> Hashable:
        """Where a buffer begins in the one that it is in: what matters of that, and how far from the first one in there."""
        offset = ix.as_expr(b.offset).as_int()
        if not offset or b.alias_of is None:
            return b.offset
        distance = offset - self.firsts.setdefault((b.alias_of, -1), offset)
        return math.gcd(offset * b.dtype.itemsize, START), distance
