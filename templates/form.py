"""The form of a loop nest: what is left of it when its buffers and its sizes are arguments.

Nests of one form can share one body, which a batch of a hundred parameters lives on. Loop extents and strides become size
symbols, but for strides along the lanes, which decide how memory is accessed, and for 0, 1 and -1, which cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Expr, Size, Var
from kgen.ir.plan import Kernel, Nest, Statement
from kgen.ir.values import Value


@dataclass(frozen=True, slots=True)
class Form:
    """`key` is equal for equal forms, the types of their buffers included. `nest` has the sizes as symbols and the buffers
    under their own names; `buffers` are these in order of first use, and `sizes` what each symbol stands for."""

    key: Hashable
    nest: Nest
    buffers: tuple[str, ...]
    sizes: dict[Size, Expr]


def form_of(nest: Nest, graph: ir.Graph) -> Form:
    """The form of a nest of points, or of one walk over rows. One that computes an address in another way than by strides, or
    whose lanes share results of rows of a fixed length, is a form of its own."""
    try:
        abstraction = _Abstraction(nest)
        anonymous = abstraction.nest(lambda name: f"b{abstraction.buffers[name]}")
        named = abstraction.nest(lambda name: name)
    except _NoStrides:
        buffers = {v.attr[0]: 0 for v in vs.loads(s.value for s in nest.kernel.statements)}
        buffers |= {out: 0 for s in nest.kernel.statements for out in s.outs}
        return Form(nest, nest, tuple(buffers), {})
    sizes = {symbol: expr for expr, symbol in abstraction.steps.items()} | abstraction.lengths
    # a store rounds to its buffer's type, which the value does not tell
    types = tuple(graph.buffers[name].dtype for name in abstraction.buffers)
    return Form((anonymous, types), named, tuple(abstraction.buffers), sizes)


class _NoStrides(Exception):
    """An index that is no sum of loop variables times strides."""


class _Abstraction:
    def __init__(self, nest: Nest) -> None:
        self.old = nest
        self.buffers: dict[str, int] = {}
        self.steps: dict[Expr, Size] = {}
        self.lengths: dict[Size, Expr] = {}
        self.loops: dict[Var, Var] = {}
        if nest.group > 1:
            raise _NoStrides
        self.outer = tuple(self._loop(v, f"len{k}", f"x{k}") for k, v in enumerate(nest.kernel.outer))
        self.inner = tuple(self._loop(v, f"row{k}", f"y{k}") for k, v in enumerate(nest.kernel.inner))
        self._number_all()

    def _loop(self, v: Var, length_name: str, name: str) -> Var:
        length = ix.size(length_name)
        self.lengths[length] = v.extent
        self.loops[v] = ix.var(name, length.expr())
        return self.loops[v]

    def _number_all(self) -> None:
        """Numbers buffers and strides by where they stand."""
        for value in vs.by_place(s.value for s in self.old.kernel.statements):
            if value.op == "load":
                self.buffers.setdefault(value.attr[0], len(self.buffers))
            for expr in vs.index_exprs(value):
                self._index(expr)
        for s in self.old.kernel.statements:
            for out in s.outs:
                self.buffers.setdefault(out, len(self.buffers))
            for expr in s.store:
                self._index(expr)

    def nest(self, rename: Callable[[str], str]) -> Nest:
        old = self.old
        statements = self._statements(rename)
        kernel = replace(old.kernel, name="", origins=(), outer=self.outer, inner=self.inner, statements=statements)
        vector, tile = (None if v is None else self.loops[v] for v in (old.vector, old.tile))
        return replace(old, kernel=kernel, vector=vector, tile=tile)

    def _statements(self, rename: Callable[[str], str]) -> tuple[Statement, ...]:
        def visit(value: Value, args: tuple[Value, ...], _: object) -> Value:
            if value.op == "load":
                name, (offset,), dtype = value.attr
                return vs.load(rename(name), (self._index(offset),), dtype, args[0] if args else None)
            if value.op == "index":
                return vs.index_value(self._index(value.attr), value.dtype)
            return value if args == value.args else vs.rebuild(value, args, value.attr)

        statements = self.old.kernel.statements
        new = vs.rewrite([s.value for s in statements], visit)
        return tuple(
            replace(s, outs=tuple(map(rename, s.outs)), value=new[s.value], store=tuple(map(self._index, s.store)), target=None)
            for s in statements
        )

    def _index(self, expr: Expr) -> Expr:
        total, rest = ix.ZERO, expr
        for old, new in self.loops.items():
            stride = ix.stride_of(expr, old)
            if stride is None or not _fixed(stride):
                raise _NoStrides
            total = total + self._step(stride, old is self.old.vector or old is self.old.tile) * new.expr()
            rest = rest - stride * old.expr()
        if not _fixed(rest):
            raise _NoStrides
        return total + self._step(rest, False)

    def _step(self, stride: Expr, literal: bool) -> Expr:
        known = stride.as_int()
        if known is not None and (literal or known in (-1, 0, 1)):
            return stride
        return self.steps.setdefault(stride, ix.size(f"step{len(self.steps)}", lo=-(2**62))).expr()


def _fixed(expr: Expr) -> bool:
    """Whether it is made of sizes alone."""
    return all(isinstance(atom, Size) for atom in ix.free_atoms(expr))


# ---- parts of a buffer ------------------------------------------------------------------------------------------------


def without_parts(kernel: Kernel, graph: ir.Graph) -> Kernel:
    """A kernel over linear offsets that addresses the whole buffer where it touches a part: all parts share one pointer."""

    def visit(value: Value, args: tuple[Value, ...], _: object) -> Value:
        if value.op == "load":
            name, (offset,), dtype = value.attr
            whole, start = whole_of(graph, name)
            return vs.load(whole, (offset + start,), dtype, args[0] if args else None)
        return value if args == value.args else vs.rebuild(value, args, value.attr)

    names = {name for s in kernel.statements for name in (*s.outs, *(load.attr[0] for load in vs.loads(s.roots)))}
    if not any(graph.buffers[name].is_part for name in names):
        return kernel
    new = vs.rewrite([s.value for s in kernel.statements], visit)
    return replace(kernel, statements=tuple(_of_whole(s, new[s.value], graph) for s in kernel.statements))


def _of_whole(s: Statement, value: Value, graph: ir.Graph) -> Statement:
    found = [whole_of(graph, out) for out in s.outs]
    return replace(s, value=value, outs=tuple(name for name, _ in found), store=tuple(e + found[0][1] for e in s.store))


def whole_of(graph: ir.Graph, name: str) -> tuple[str, Expr]:
    """The buffer that a part is of, and where the part begins in it; the buffer itself where it is no part."""
    part = graph.buffers[name]
    if not part.is_part or part.alias_of is None:
        return name, ix.ZERO
    whole = graph.buffers[part.alias_of]
    return whole.name, ix.as_expr(part.offset) - ix.as_expr(whole.offset)
