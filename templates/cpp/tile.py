"""Slots of C++ templates: operands of the matrix product engine (`include/kgen/matmul.h`), and what becomes of its results.

An operand is memory with strides, or a function that computes a block of its values into a thread's memory. A result's tile
lies in a thread's cache, and its epilogue is a loop nest over it like that of any pointwise kernel, the tile one more input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from kgen import index as ix
from kgen import ir
from kgen import values as vs
from kgen.index import Atom, Expr, Var
from kgen.plan import Kernel, Nest, Statement
from kgen.templates.contract import Config
from kgen.templates.cpp.emit import Emitter
from kgen.templates.cpp.expression import IndexText
from kgen.templates.cpp.table import CPP_TYPES
from kgen.templates.problem import Input, Problem
from kgen.templates.render import clean
from kgen.values import Value

# Rows of a rectangle to those that are asked for in advance: a row is short, and the next one on another page.
AHEAD = 4


@dataclass(slots=True)
class Parameters:
    """What the slots of one function have in common."""

    pointers: dict[str, None] = field(default_factory=dict)
    sizes: dict[str, None] = field(default_factory=dict)
    made_names: set[str] = field(default_factory=set)
    checks: bool = False


@dataclass(frozen=True, slots=True)
class Block:
    """One side of a rectangle: the axis, its loops, and C++ names: of the first index, the number of indices, and the loop."""

    axis: str
    loops: tuple[Var, ...]
    first: str
    count: str
    name: str


@dataclass(frozen=True, slots=True)
class _Rectangle:
    """Blocks of values in a thread's memory: each of `buffers` holds rows of `ld` elements apart."""

    slow: Block
    fast: Block
    buffers: tuple[str, ...]
    ld: str


@dataclass(slots=True)
class Slots:
    """Renders the slots of one problem under one configuration."""

    problem: Problem
    config: Config
    parameters: Parameters = field(default_factory=Parameters)
    variables: set[str] = field(default_factory=set)  # of the author's, in indices: no parameters of the function

    # ---- operands ---------------------------------------------------------------------------------------------------

    def tile(self, operand: str, number: int, name: str, indices: Sequence[str]) -> list[str]:
        """Declares `name`, the operand as the engine takes it. `indices` are those of the axes without a tile (batches)."""
        one = self.problem.members[number][operand]
        own, summed = self._sides(one)
        batch = [a for a in one.axes if a not in (own, summed)]
        if len(indices) != len(batch):
            raise ValueError(f"{self.problem.template.name}: {len(indices)} indices for the axes {', '.join(batch)}")
        fixed = self._digits(batch, indices, one.loops)
        strides = [self.problem.stride(operand, axis, number) for axis in (own, summed)]
        if one.load is not None and None not in strides:
            return [self._strided(one, name, fixed, [s for s in strides if s is not None])]
        return self._filled(one, name, fixed, self._along(one, own))

    def _sides(self, one: Input) -> tuple[str, str]:
        """The operand's own axis, which the result has too, and the one that is summed over."""
        results = {a for axes in self.problem.template.implements.results for a in axes}
        operands = self.problem.template.implements.operands
        shared = [a for a in one.axes if all(a in axes for axes in operands)]
        own = next(a for a in one.axes if a not in shared)
        return own, next(a for a in shared if a not in results)

    def _strided(self, one: Input, name: str, fixed: Mapping[Atom, Expr], strides: list[Expr]) -> str:
        assert one.load is not None
        buffer, (offset,), _ = one.load.attr
        zero: dict[Atom, Expr] = {v: ix.ZERO for axis in one.axes for v in one.loops[axis]}
        start = ix.substitute(offset, {**zero, **fixed}, {})
        kind = CPP_TYPES[one.dtype].storage
        self.parameters.pointers.setdefault(buffer)
        where = f"p_{clean(buffer)}" + (f" + {self.text(start)}" if start.terms else "")
        return f"const Strided<{kind}> {name}{{{where}, {self.text(strides[0])}, {self.text(strides[1])}}};"

    def _along(self, one: Input, own: str) -> str:
        """The axis along which most of the operand's memory is contiguous: neighbours in a vector."""
        weights = dict.fromkeys(one.axes, 0)
        for load in vs.loads([one.value]):
            for axis in one.axes:
                loops = one.loops[axis]
                if loops and ix.stride_of(load.attr[1][0], loops[-1]) == 1:
                    weights[axis] += load.attr[2].itemsize
        summed = self._sides(one)[1]
        return own if weights[own] > weights[summed] else summed

    def _filled(self, one: Input, name: str, fixed: Mapping[Atom, Expr], along: str) -> list[str]:
        """A function that computes a block of the operand."""
        own, summed = self._sides(one)
        sides = {own: Block(own, one.loops[own], "i0", "ni", "i"), summed: Block(summed, one.loops[summed], "k0", "nk", "k")}
        slow, fast = (sides[a] for a in ((own, summed) if along == summed else (summed, own)))
        buffer = f"{name}_block"
        kind = CPP_TYPES[one.dtype].storage
        value = vs.substitute(one.value, fixed)
        statement = Statement("pointwise", (buffer,), value, (ix.ZERO,), False, -1, (True,))
        body = self._nest([statement], _Rectangle(slow, fast, (buffer,), "ld"), {buffer: one.dtype})
        head = f"const auto {name} = filled<{kind}, Along::{'k' if along == summed else 'i'}>("
        arguments = f"int64_t i0, int64_t ni, int64_t k0, int64_t nk, {kind}* p_{buffer}, int64_t ld"
        return [f"{head}[&]({arguments}) {{", *(f"  {line}" for line in body), "});"]

    # ---- results ----------------------------------------------------------------------------------------------------

    def store(self, result: str, name: str, indices: Sequence[str]) -> list[str]:
        """The epilogue of the rectangle `name`; of a family, of the rectangles `name`0, `name`1, and so on. `indices` are those
        of the batch axes, then the first row, the first column, the numbers of rows and of columns, and the tiles' leading
        dimension."""
        axes = self.problem.template.results[result].axes
        batch, (rows, columns) = axes[:-2], axes[-2:]
        scalars, (row, column, count, width, ld) = indices[: len(batch)], indices[len(batch) :]
        loops = self.problem.loops
        fixed = self._digits(batch, scalars, loops)
        slow, fast = Block(rows, loops[rows], row, count, "r"), Block(columns, loops[columns], column, width, "j")
        sums = tuple(out for s in self.problem.mains for out in s.outs)
        many = self.problem.template.results[result].many
        names = [f"{name}{k}" for k in range(len(sums))] if many else [name]
        statements = [_moved(s, fixed) for s in self.problem.epilogue]
        rectangle = _Rectangle(slow, fast, sums, ld)
        aliases = [f"const auto* const p_{clean(out)} = {one};" for out, one in zip(sums, names, strict=True)]
        return [*aliases, *self._nest(statements, rectangle, {})]

    # ---- nests ------------------------------------------------------------------------------------------------------

    def _nest(self, statements: list[Statement], over: _Rectangle, local: Mapping[str, torch.dtype]) -> list[str]:
        """A loop nest over a rectangle. `local` are buffers that only the nest knows."""
        slow, fast, blocks, ld = over.slow, over.fast, over.buffers, over.ld
        self.variables |= {slow.first, fast.first, ld}
        lanes = self.problem.device.lanes
        r, j = ix.var(slow.name, self.problem.extent(slow.axis)), ix.var(fast.name, self.problem.extent(fast.axis))
        first = ix.size(fast.first)
        mapping: dict[Atom, Expr] = {
            **_digits(slow.loops, ix.size(slow.first).expr() + r.expr()), **_digits(fast.loops, first.expr() + j.expr())
        }  # fmt: skip
        place = r.expr() * ix.size(ld).expr() + j.expr()
        moved = [_placed(_moved(s, mapping), blocks, place) for s in statements]
        graph = replace(self.problem.graph, buffers=dict(self.problem.graph.buffers))
        for name, kind in local.items():
            graph.buffers[name] = ir.Buffer(name, kind, torch.device("cpu"), (), ())
        kernel = Kernel("block", (r, j), (), 0, tuple(moved))
        emitter = Emitter(Nest(kernel, j, lanes), graph)
        body, _ = emitter.run()
        self.parameters.pointers.update(dict.fromkeys(p for p in emitter.pointers if p not in blocks))
        self.parameters.sizes.update(dict.fromkeys(s for s in emitter.sizes if s not in self.variables))
        self.parameters.made_names |= emitter.made_names
        self.parameters.checks |= emitter.includes_check
        return [
            f"constexpr int L = {lanes};",
            f"for (int64_t {slow.name} = 0; {slow.name} < {slow.count}; ++{slow.name}) {{",
            *(f"  {line}" for line in ([] if local else self._asking(moved, r, j, slow, fast))),
            *(f"  {line}" for line in emitter.task.lines),
            f"  vector_loop<L>(0, {fast.count}, [&](int64_t {fast.name}, auto w) KGEN_INLINE {{",
            *(f"    {line}" for line in body),
            "  });",
            "}",
        ]

    def _asking(self, statements: list[Statement], r: Var, j: Var, slow: Block, fast: Block) -> list[str]:
        """Asks for a later row of all memory that lies along the rows."""
        found: dict[str, None] = {}
        made = {o for s in self.problem.kernel.statements for o, kept in zip(s.outs, s.stored, strict=True) if not kept}
        for s in statements:
            loads = [(v.attr[0], v.attr[1][0]) for v in vs.loads(s.roots)]
            stores = [(out, s.store[0]) for out, kept in zip(s.outs, s.stored, strict=True) if kept]
            for name, at in (*loads, *stores):
                step = ix.stride_of(at, r)
                known = not any(isinstance(a, ix.Indirect) for a in ix.free_atoms(at))
                if known and ix.stride_of(at, j) == 1 and step is not None and step != 0 and name not in made:
                    later = self.text(at + step * AHEAD - j.expr())
                    found.setdefault(f"  prefetch_run(p_{clean(name)} + {later}, {fast.count});")
        return [f"if ({r.name} + {AHEAD} < {slow.count}) {{", *found, "}"] if found else []

    def _digits(self, axes: Sequence[str], indices: Sequence[str], loops: Mapping[str, tuple[Var, ...]]) -> dict[Atom, Expr]:
        """Loops of axes of which the function has one index, a C++ variable."""
        found: dict[Atom, Expr] = {}
        self.variables.update(indices)
        for axis, index in zip(axes, indices, strict=True):
            found |= _digits(loops[axis], ix.size(index).expr())
        return found

    def size(self, axis: str) -> str:
        """The text of an axis' length."""
        return self.text(self.problem.extent(axis))

    def text(self, expr: Expr) -> str:
        """An expression of sizes, and of the author's variables."""
        for atom in sorted(ix.free_atoms(expr), key=lambda a: a.order):
            if isinstance(atom, ix.Size) and atom.name not in self.variables:
                self.parameters.sizes.setdefault(atom.name)
        return IndexText(None, 1, lambda value, extent: ("", False)).scalar(expr)


def _digits(loops: tuple[Var, ...], index: Expr) -> dict[Atom, Expr]:
    """The loops of an axis as digits of its index, the last one fastest."""
    found: dict[Atom, Expr] = {}
    divisor = ix.ONE
    for v in reversed(loops):
        length = v.extent if v.extent.terms else ix.ONE  # of no elements any place will do
        digit = ix.floordiv(index, divisor)
        found[v] = digit if v is loops[0] else ix.mod(digit, length)
        divisor = divisor * length
    return found


def _moved(s: Statement, mapping: Mapping[Atom, Expr]) -> Statement:
    """The statement over other variables, all of them outer loops."""
    return replace(s.substituted(mapping), inner=False, section=-1)


def _placed(s: Statement, blocks: tuple[str, ...], place: Expr) -> Statement:
    """The statement with the rectangle's elements where they lie in it."""

    def found(load: Value) -> Value | None:
        name, at, kind = load.attr
        return vs.load(name, (place,), kind) if name in blocks and at != (place,) else None

    value, *rest = vs.replace_loads([s.value, *([] if s.mask is None else [s.mask])], found)
    store = (place,) if s.outs[0] in blocks else s.store
    return replace(s, value=value, mask=rest[0] if rest else None, store=store)
