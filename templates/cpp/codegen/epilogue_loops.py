"""Loop nests over rectangles in a thread's memory: blocks of an operand that are computed, and the walks of an epilogue."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.ir.index import Atom, Expr, Var
from kgen.ir.plan import PART, Kernel, Nest, Statement
from kgen.ir.values import Value
from kgen.templates.contract import Config
from kgen.templates.cpp.codegen.emit import Emitter, Section
from kgen.templates.cpp.codegen.expression import IndexText
from kgen.templates.cpp.codegen.prefetch import POINTED, pointed_row, step_between
from kgen.templates.cpp.codegen.table import CPP_TYPES
from kgen.templates.cpp.codegen.tile_loops import Cut, TileLoop, joined, with_loads
from kgen.templates.problem import Problem
from kgen.templates.render import clean

# Rows of a rectangle to those that are asked for in advance: a row is short, and the next one on another page.
PREFETCH_ROWS = 4


@dataclass(slots=True)
class Parameters:
    """What the slots of one function have in common."""

    pointers: dict[str, None] = field(default_factory=dict)
    sizes: dict[str, None] = field(default_factory=dict)
    made_names: set[str] = field(default_factory=set)
    checks: bool = False


@dataclass(frozen=True, slots=True)
class Block:
    """One side of a rectangle: the axis, its loops, and C++ names: of the first index, the number of indices, and the loop.
    `extent` is how many indices there may be, where these are not the axis' own."""

    axis: str
    loops: tuple[Var, ...]
    first: str
    count: str
    name: str
    extent: Expr | None = None


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Blocks of values in a thread's memory: each of `buffers` holds rows of `ld` elements apart, the first at `start`. `local`
    are buffers that nothing else knows, with their types; `fixed` are loops that have one index."""

    slow: Block
    fast: Block
    buffers: tuple[str, ...]
    ld: str
    fixed: Mapping[Atom, Expr] = field(default_factory=dict)
    local: Mapping[str, torch.dtype] = field(default_factory=dict)
    start: Expr = ix.ZERO

    @property
    def own(self) -> frozenset[str]:
        """Buffers that are no memory of the graph."""
        return frozenset((*self.buffers, *self.local))


@dataclass(slots=True)
class EpilogueLoops:
    """Writes the nests of one function. `variables` are C++ variables in indices, which are no parameters of the function."""

    problem: Problem
    config: Config
    parameters: Parameters
    variables: set[str] = field(default_factory=set)
    folds: dict[str, tuple[str, Cut | None]] = field(default_factory=dict)  # results of reductions: the axis, and the cut

    def text(self, expr: Expr) -> str:
        """An expression of sizes, and of the author's variables."""
        for atom in sorted(ix.free_atoms(expr), key=lambda a: a.order):
            if isinstance(atom, ix.Size) and atom.name not in self.variables:
                self.parameters.sizes.setdefault(atom.name)
        return IndexText(None, 1, _no_data).scalar(expr)

    def place(self, expr: Expr, name: str) -> tuple[list[str], str]:
        """Statements before the text of an expression, and the text. What takes part in it from data is read and checked by the
        statements, which name the place."""
        if not any(isinstance(atom, ix.Indirect) for atom in ix.free_atoms(expr)):
            return [], self.text(expr)
        emitter = Emitter(Nest(Kernel(name, (), (), 0, ()), None, self.problem.device.lanes), self.problem.graph)
        found = emitter.scalar(expr)
        self.note(emitter, frozenset())
        self.parameters.made_names.add(name)
        return [f"const int64_t {name} = [&] {{", *_indented([*emitter.lines, f"return {found};"]), "}();"], name

    def integer(self, value: Value, name: str) -> list[str]:
        """Statements that make `name` an integer from memory."""
        emitter = Emitter(Nest(Kernel(name, (), (), 0, ()), None, self.problem.device.lanes), self.problem.graph)
        found = emitter.emit(value)
        self.note(emitter, frozenset())
        self.parameters.made_names.add(name)
        return [f"const int64_t {name} = [&] {{", *_indented([*emitter.lines, f"return int64_t({found});"]), "}();"]

    def block(self, statement: Statement, over: Rectangle) -> list[str]:
        """Computes all of a rectangle."""
        return [self._lanes(), *self._rows(over, [self._moved(statement, over)], [], [])]

    def epilogue(self, tile_loops: Sequence[TileLoop], over: Rectangle) -> list[str]:
        """All walks over a rectangle, one after the other."""
        for tile_loop in tile_loops:
            for s in (*tile_loop.across, *tile_loop.down):
                self.folds |= dict.fromkeys(s.outs, (self.problem.part(s).axis, tile_loop.cut))
        found = [
            self._tile_loop(tile_loop, over) if tile_loop.cut is None else self._cut(tile_loop, tile_loop.cut, over)
            for tile_loop in tile_loops
        ]
        if len(found) > 1:
            found = [["{", *_indented(lines), "}"] for lines in found]
        return [self._lanes(), *(line for lines in found for line in lines)]

    def totals(self, statements: Sequence[Statement], total: str, over: Block, fixed: Mapping[Atom, Expr]) -> list[str]:
        """What is made of sums, or of second results, of which `total` has one for each index of a side."""
        j, kind = _loop(over, self.problem).expr(), self.problem.accumulator
        self.variables.add(over.first)
        mapping: dict[Atom, Expr] = {**fixed, **digits(over.loops, ix.size(over.first).expr() + j)}
        points: list[Statement] = []
        made = vs.load(total, (j,), kind)
        for s in statements:
            moved = s.substituted(mapping)
            value = made if s.kind == "reduction" else vs.replace_steps(moved.value, lambda _: made)
            store = moved.store if over.loops else (moved.store[0] + j,)
            points.append(replace(_point(s.outs[0], value, store), outs=s.outs, stored=s.stored))
        return [self._lanes(), *self._one_row(Rectangle(over, over, (), "", fixed, {total: kind}), points)]

    def numbers(self, value: Value, name: str, over: Block, fixed: Mapping[Atom, Expr]) -> list[str]:
        """Computes `name`, a number for each index of a side."""
        j, kind = _loop(over, self.problem).expr(), self.problem.accumulator
        self.variables.add(over.first)
        moved = vs.substitute(value, {**fixed, **digits(over.loops, ix.size(over.first).expr() + j)})
        point = _point(name, vs.cast(moved, kind), (j,))
        return [self._lanes(), *self._one_row(Rectangle(over, over, (), "", fixed, {name: kind}), [point])]

    # ---- walks ------------------------------------------------------------------------------------------------------

    def _cut(self, tile_loop: TileLoop, cut: Cut, over: Rectangle) -> list[str]:
        """A walk over each of the rectangles that are as long as a reduction's runs."""
        along = over.fast if over.fast.axis == cut.axis else over.slow
        begin, first, count = (f"{name}_{along.name}" for name in ("begin", "first", "count"))
        self.variables |= {begin, over.ld}
        shorter, offset = replace(along, first=first, count=count), ix.size(begin).expr()
        if along is over.fast:
            inside = replace(over, fast=shorter, start=offset)
        else:
            inside = replace(over, slow=shorter, start=offset * ix.size(over.ld).expr())
        return [
            f"for (int64_t {begin} = 0; {begin} < {along.count}; {begin} += {cut.length}) {{",
            f"  const int64_t {first} = {along.first} + {begin};",
            f"  const int64_t {count} = smaller<int64_t>({cut.length}, {along.count} - {begin});",
            *_indented(self._tile_loop(tile_loop, inside)),
            "}",
        ]

    def _tile_loop(self, tile_loop: TileLoop, over: Rectangle) -> list[str]:
        if tile_loop.vertical:
            return self._columns(over, [self._folded(s, over, tile_loop.cut) for s in tile_loop.down])
        names = [ir.fresh(self.problem.graph, f"{s.outs[0]}_total") for s in tile_loop.down]
        kinds = [ops.compute_dtype(s.value.dtype) for s in tile_loop.down]
        over = replace(over, local=dict(zip(names, kinds, strict=True)))
        at = (_loop(over.fast, self.problem).expr(),)
        lines: list[str] = []
        begin, steps, end = [], [], []
        for s, name, kind in zip(tile_loop.down, names, kinds, strict=True):
            total, folded = vs.load(name, at, kind), self._folded(s, over, tile_loop.cut)
            first = vs.const(ops.identity(s.op, s.value.dtype), kind)
            begin.append(_point(name, first, at))
            steps.append(_point(name, joined(folded, total), at))
            end.append(replace(folded, kind="pointwise", value=total, rank=None, op=""))
            self.parameters.made_names.add(f"p_{clean(name)}")
            lines.append(f"alignas(64) {CPP_TYPES[kind].storage} p_{clean(name)}[{self._most(over.fast, tile_loop.cut)}];")
        points = [self._moved(s, over, tile_loop.cut) for s in tile_loop.points]
        across = [self._folded(s, over, tile_loop.cut) for s in tile_loop.across]
        asked = self._asking([*points, *steps], over)
        rows = self._rows(over, [*points, *steps], across, asked)
        return [*lines, *self._one_row(over, begin), *rows, *self._one_row(over, end)]

    def _most(self, side: Block, cut: Cut | None) -> int:
        """Points along the side of a walk's rectangle."""
        if cut is not None and cut.axis == side.axis:
            return cut.length
        return self.problem.side(side.axis, self.config)

    def _moved(
        self, s: Statement, over: Rectangle, cut: Cut | None = None, parts: Mapping[Atom, Expr] = MappingProxyType({})
    ) -> Statement:
        """The statement over the loops of the rectangle, with the values where they lie in it; `parts` are numbers of parts."""
        r, j = (_loop(side, self.problem).expr() for side in (over.slow, over.fast))
        self.variables |= {over.slow.first, over.fast.first, over.ld}
        mapping: dict[Atom, Expr] = {
            **parts,
            **over.fixed,
            **digits(over.slow.loops, ix.size(over.slow.first).expr() + r),
            **digits(over.fast.loops, ix.size(over.fast.first).expr() + j),
        }
        place = over.start + r * ix.size(over.ld).expr() + j

        def found(load: Value) -> Value | None:
            name, at, kind = load.attr
            if name in over.buffers:
                return vs.load(name, (place,), kind) if at != (place,) else None
            axis, own = self.folds.get(name, ("", cut))
            if own != cut or not axis:
                return None
            first = self._first(at[0], over, axis)  # all points of the rectangle have one result
            return vs.load(name, (first,), kind) if first is not at[0] else None

        moved = with_loads(s.substituted(mapping), found)
        store = (place,) if s.outs[0] in over.buffers else moved.store
        if not over.fast.loops and s.outs[0] not in over.buffers:  # of one column; its lanes, all but one idle, lie along j
            store = (store[0] + j, *store[1:])
        return replace(moved, store=store, inner=False, section=-1)

    def _first(self, expr: Expr, over: Rectangle, axis: str) -> Expr:
        """An index at the first of a rectangle's points along an axis."""
        side = over.fast if over.fast.axis == axis else over.slow
        return ix.substitute(expr, {_loop(side, self.problem): ix.ZERO}, {})

    def _folded(self, s: Statement, over: Rectangle, cut: Cut | None) -> Statement:
        """A reduction of the rectangle's rows or columns, whose result is that of their first point."""
        part = self.problem.part(s)
        side = over.fast if over.fast.axis == part.axis else over.slow
        begin = ix.size(side.first).expr()
        number = ix.floordiv(begin if part.whole else ix.mod(begin, part.run), s.block)
        indices = [s.store[0], *(e for v in vs.topological(s.roots) for e in vs.index_exprs(v))]
        atoms = {a for e in indices for a in ix.free_atoms(e)}
        moved = self._moved(s, over, cut, {a: number for a in atoms if isinstance(a, Var) and a.name == PART})
        return replace(moved, kind="reduction", store=(self._first(moved.store[0], over, part.axis),))

    # ---- nests ------------------------------------------------------------------------------------------------------

    def _rows(self, over: Rectangle, points: list[Statement], folds: list[Statement], asked: list[str]) -> list[str]:
        """Row by row: points, and folds of each row."""
        r, j = _loop(over.slow, self.problem), _loop(over.fast, self.problem)
        if folds:
            inside = [replace(s, inner=True, section=0) for s in (*points, *folds)]
            emitter = self._emitter(over, Kernel("block", (r,), (j,), 1, tuple(inside)), j)
        else:
            emitter = self._emitter(over, Kernel("block", (r, j), (), 0, tuple(points)), j)
        head, sections = emitter.run()
        self.note(emitter, over.own)
        section = sections[0] if sections else Section(body=head)
        before = [*head, *section.before] if sections else emitter.task.lines
        return [
            *_opened(over.slow),
            *_indented([*asked, *before, *_vector(over.fast, section.body), *section.after]),
            "}",
        ]

    def _columns(self, over: Rectangle, folds: list[Statement]) -> list[str]:
        """Down the columns, a register of them at a time."""
        r, j = _loop(over.slow, self.problem), _loop(over.fast, self.problem)
        inside = tuple(replace(s, inner=True, section=0) for s in folds)
        emitter = self._emitter(over, Kernel("block", (j,), (r,), 1, inside), j)
        head, (section,) = emitter.run()
        self.note(emitter, over.own)
        rows = [*_opened(over.slow), *_indented(section.body), "}"]
        return [*emitter.task.lines, *_vector(over.fast, [*head, *section.before, *rows, *section.after])]

    def _one_row(self, over: Rectangle, points: list[Statement]) -> list[str]:
        """Points of which each column has one."""
        if not points:
            return []
        j = _loop(over.fast, self.problem)
        emitter = self._emitter(over, Kernel("block", (j,), (), 0, tuple(points)), j)
        head, _ = emitter.run()
        self.note(emitter, over.own)
        return ["{", *_indented([*emitter.task.lines, *_vector(over.fast, head)]), "}"]

    def _emitter(self, over: Rectangle, kernel: Kernel, lanes: Var) -> Emitter:
        graph = replace(self.problem.graph, buffers=dict(self.problem.graph.buffers))
        for name, kind in over.local.items():
            graph.buffers[name] = ir.Buffer(name, kind, torch.device("cpu"), (), ())
        return Emitter(Nest(kernel, lanes, self.problem.device.lanes), graph)

    def note(self, emitter: Emitter, own: Container[str]) -> None:
        """What a nest needs from outside: not the buffers that are its `own`."""
        self.parameters.pointers.update(dict.fromkeys(p for p in emitter.pointers if p not in own))
        self.parameters.sizes.update(dict.fromkeys(s for s in emitter.sizes if s not in self.variables))
        self.parameters.made_names |= emitter.made_names
        self.parameters.checks |= emitter.includes_check

    def _lanes(self) -> str:
        return f"constexpr int L = {self.problem.device.lanes};"

    def _asking(self, statements: list[Statement], over: Rectangle) -> list[str]:
        """Asks for a later row of all memory that is along the rows, be it where data say."""
        r, j = _loop(over.slow, self.problem), _loop(over.fast, self.problem)
        made = {o for s in self.problem.kernel.statements for o, kept in zip(s.outs, s.stored, strict=True) if not kept}
        found: dict[str, None] = {}
        for s in statements:
            loads = [(v.attr[0], v.attr[1][0]) for v in vs.loads(s.roots)]
            stores = [(out, s.store[0]) for out, kept in zip(s.outs, s.stored, strict=True) if kept]
            for name, at in (*loads, *stores):
                step = step_between(at, j, r)
                if name in made:
                    continue
                if step is not None:
                    later = self.text(at + step * PREFETCH_ROWS - j.expr())
                    found.setdefault(f"  prefetch_run(p_{clean(name)} + {later}, {over.fast.count});")
                elif (pointed := pointed_row(at, j, r, PREFETCH_ROWS)) is not None and pointed.source not in made:
                    self.parameters.pointers.setdefault(pointed.source)
                    read = f"p_{clean(pointed.source)}[{self.text(pointed.place)}]"
                    asking = f"prefetch_run(p_{clean(name)} + {self.text(pointed.target)}, {over.fast.count});"
                    found.setdefault(f"  {{ const int64_t {POINTED} = {read}; {asking} }}")
        return [f"if ({r.name} + {PREFETCH_ROWS} < {over.slow.count}) {{", *found, "}"] if found else []


def digits(loops: tuple[Var, ...], index: Expr) -> dict[Atom, Expr]:
    """The loops of an axis as digits of its index, the last one fastest."""
    found: dict[Atom, Expr] = {}
    divisor = ix.ONE
    for v in reversed(loops):
        length = v.extent if v.extent.terms else ix.ONE  # of no elements any place will do
        digit = ix.floordiv(index, divisor)
        found[v] = digit if v is loops[0] else ix.mod(digit, length)
        divisor = divisor * length
    return found


def _loop(side: Block, problem: Problem) -> Var:
    """The loop over a side. It is said to be longer than a vector: a nest in one step would be another kind of code."""
    extent, least = side.extent or problem.extent(side.axis), problem.device.lanes + 1
    known = extent.as_int()
    return ix.var(side.name, least if known is not None and known < least else extent)


def _point(out: str, value: Value, at: tuple[Expr, ...]) -> Statement:
    return Statement("pointwise", (out,), value, at, False, -1, (True,))


def _no_data(atom: ix.Indirect) -> tuple[str, bool]:
    raise AssertionError(f"an index from data below {atom.size} has no text without statements that read and check it")


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _opened(side: Block) -> list[str]:
    return [f"for (int64_t {side.name} = 0; {side.name} < {side.count}; ++{side.name}) {{"]


def _vector(side: Block, body: Iterable[str]) -> list[str]:
    return [f"vector_loop<L>(0, {side.count}, [&](int64_t {side.name}, auto w) KGEN_INLINE {{", *_indented(body), "});"]
