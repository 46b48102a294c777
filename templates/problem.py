"""What a template is asked to compute: a kernel whose loops have been sorted into the template's named axes."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from types import MappingProxyType
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from kgen.device import Device, is_rounded
from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Atom, Expr, Size, Sizes, Var
from kgen.ir.plan import Kernel, Statement
from kgen.ir.program import Contract, Elementwise, Program, Softmax
from kgen.ir.values import Value
from kgen.templates.arguments import Arguments
from kgen.templates.base import Request
from kgen.templates.contract import Config, Template
from kgen.templates.middle import Middle
from kgen.templates.pattern import Pattern
from kgen.templates.windows import Grid, grid_of, over_coordinates, windows_of

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Input:
    """An operand of a problem. `dtype` is the type in which it is multiplied; `load` the load that it is, if it is one and
    nothing else, of that very type. `loops` are those of each of its axes: one, wherever memory allows. If scales of it are
    part of the epilogue, `unscaled` contractions would read it from the kernel that scales it."""

    name: str
    axes: tuple[str, ...]
    value: Value
    dtype: torch.dtype
    load: Value | None
    loops: Mapping[str, tuple[Var, ...]]
    unscaled: int = 0

    @property
    def identity(self) -> Hashable:
        """Equal for operands that are one array. The interned value alone does not say that: ``t.expand(5, 4)`` and
        ``t.expand(4, 6)`` are one value, over loops that it does not name."""
        return self.dtype, vs.over(self.value, (self.loops[axis] for axis in self.axes))

    def is_array_of(self, other: Input) -> bool:
        """Whether another operand is the same array, over loops of its own."""
        own, others = ([one.loops[axis] for axis in one.axes] for one in (self, other))
        if self.dtype is not other.dtype or [_extents(loops) for loops in own] != [_extents(loops) for loops in others]:
            return False
        mapping: dict[Atom, Expr] = {
            v: w.expr() for loops, theirs in zip(own, others, strict=True) for v, w in zip(loops, theirs, strict=True)
        }
        return vs.over(vs.substitute(self.value, mapping), others) == vs.over(other.value, others)

    @property
    def bounded_load(self) -> Value | None:
        """The load that it is, of that very type, but zero where a condition of its own does not hold, as the padding of a
        convolution says; None where it is something else."""
        if self.value.op != "where":
            return None
        condition, load, other = self.value.args
        zero = other.op == "const" and other.attr == 0
        plain = load.op == "load" and load.attr[2] == self.dtype and load.args == (condition,)
        return load if zero and plain else None

    @property
    def entry(self) -> Value | None:
        """Where it is 1 at one entry along its last axis and 0 at others, that entry, a function of the other axes: for them it
        is an integer, which may be none of the axis."""
        selected = bare_number(self.value)
        if selected.op != "where" or [one.attr for one in selected.args[1:] if one.op == "const"] != [1, 0]:
            return None
        condition, own = selected.args[0], self.loops[self.axes[-1]]
        if condition.op != "eq" or len(own) != 1:
            return None
        found = [one for one in condition.args if own[0] not in one.variables()]
        own_index = [one for one in condition.args if one.op == "index" and one.attr is own[0].expr()]
        return found[0] if len(found) == len(own_index) == 1 else None


def _extents(loops: Iterable[Var]) -> list[Expr]:
    return [v.extent for v in loops]


def bare_number(value: Value) -> Value:
    """A value before its conversions."""
    while value.op in ("cast", "round_to"):
        [value] = value.args
    return value


@dataclass(frozen=True, slots=True)
class SummedOperand:
    """The sum of an operand, the one of contraction `number` of a family, over all that the contractions are summed over.
    `statements` are the reductions, of equal values, and what is made of their results, in order."""

    operand: str
    number: int
    statements: tuple[Statement, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """What a partial reduction folds of a tile: points along `axis`, of which `run` neighbours have one result. `whole`: all of
    the axis has one, so that a tile makes a part of it."""

    axis: str
    run: Expr
    whole: bool

    def is_row(self, block: int) -> bool:
        """Whether parts of `block` points are all of the axis."""
        return self.whole and block > 0 and self.run == block

    def block(self, tile: int, wanted: int = 0) -> int | None:
        """Points of a part: the tile's, or fewer where it holds several runs, or all of an axis that wants to be one part.
        None where neither divides the other, or the run's length is known at run time only."""
        run = self.run.as_int() or 0
        if self.whole:
            return run if self.is_row(wanted) and tile >= run else tile
        if not run:
            return None
        return run if tile % run == 0 else tile if run % tile == 0 else None


_MISSING: Any = object()


def _memoising(where: str) -> Callable[[Callable[Concatenate[Problem, P], T]], Callable[Concatenate[Problem, P], T]]:
    """Makes decorators of functions of a problem: what they return is kept in that attribute of the problem, by arguments."""

    def decorated(compute: Callable[Concatenate[Problem, P], T]) -> Callable[Concatenate[Problem, P], T]:
        @wraps(compute)
        def known(problem: Problem, /, *args: P.args, **kwargs: P.kwargs) -> T:
            kept: dict[Hashable, Any] = getattr(problem, where)
            key = (compute, *args, *kwargs.items()) if kwargs else (compute, *args)
            found: T = kept.get(key, _MISSING)
            if found is _MISSING:
                found = kept[key] = compute(problem, *args, **kwargs)
            return found

        return known

    return decorated


def memoised(compute: Callable[Concatenate[Problem, P], T]) -> Callable[Concatenate[Problem, P], T]:
    """Of a function of a problem that asks for no sizes: computes it once, whatever the hints are."""
    return _memoising("known")(compute)


def memoised_at_sizes(compute: Callable[Concatenate[Problem, P], T]) -> Callable[Concatenate[Problem, P], T]:
    """Of a function of a problem that asks for sizes: computes it once for these hints."""
    return _memoising("known_here")(compute)


class Problem:
    """One kernel as a template sees it. Sizes are numbers at the hints (`size`) or expressions (`extent`)."""

    def __init__(
        self,
        template: Template,
        kernel: Kernel,
        graph: ir.Graph,
        loops: Mapping[str, tuple[Var, ...]],
        device: Device,
        steps: Mapping[Var, int] = MappingProxyType({}),
    ) -> None:
        self.template, self.kernel, self.graph, self.loops, self.device = template, kernel, graph, loops, device
        self.steps = steps
        self.sizes = Sizes(graph.size_hints)
        self.mains = [s for s in kernel.statements if s.kind == "contraction"]
        self.main = self.mains[0]
        self.arguments = Arguments(self.main.arguments)
        self.members = [self._inputs(s) for s in self.mains]
        self.inputs = self.members[0]
        self.known: dict[Hashable, Any] = {}  # what `memoised` has computed

    def _inputs(self, matmul: Statement) -> dict[str, Input]:
        values = (matmul.value, *matmul.factors)[: len(self.template.operands)]
        unscaled = matmul.unscaled or (0,) * len(values)
        kinds = matmul.operands[: len(values)]
        operands = zip(self.template.operands.items(), values, kinds, unscaled, strict=True)
        return {
            name: replace(self._input(name, operand.axes, value, dtype), unscaled=count)
            for (name, operand), value, dtype, count in operands
        }

    def _input(self, name: str, axes: tuple[str, ...], value: Value, dtype: torch.dtype) -> Input:
        """The operand with the loops of an axis joined where it walks through memory as if they were one: what the epilogue
        makes of a result's rows, say two dimensions of them, need not concern the operands."""
        exprs = [e for v in vs.topological([value]) for e in vs.index_exprs(v)]
        loops: dict[str, tuple[Var, ...]] = {}
        mapping: dict[Atom, Expr] = {}
        for axis in axes:
            loops[axis] = self.loops[axis]
            if len(loops[axis]) > 1 and all(_as_one(e, loops[axis]) for e in exprs):
                *rest, last = loops[axis]
                whole = ix.var(f"{axis}_joined", self.extent(axis))  # templates have variables by the names of axes
                mapping |= {**dict.fromkeys(rest, ix.ZERO), last: whole.expr()}
                loops[axis] = (whole,)
        value = vs.substitute(value, mapping) if mapping else value
        return Input(name, axes, value, dtype, _plain(value, dtype), loops)

    def at(self, hints: Mapping[Size, int]) -> Problem:
        """The same problem where size symbols have other hints."""
        if not hints:  # what is known of it holds
            return self
        found = copy(self)
        found.sizes = Sizes({**self.sizes.hints, **hints})
        for name in ("epilogue_bytes", "stored_bytes", "known_here"):  # what is cached of the old hints
            found.__dict__.pop(name, None)
        return found

    @cached_property
    def known_here(self) -> dict[Hashable, Any]:
        """What `memoised_at_sizes` has computed."""
        return {}

    @cached_property
    def epilogue(self) -> tuple[Statement, ...]:
        """What happens to the result before it is stored."""
        return tuple(s for s in self.kernel.statements if s.kind != "contraction" and self._beside.isdisjoint(s.outs))

    @cached_property
    def _beside(self) -> frozenset[str]:
        """What sums of operands make, and what follows from them; and second results of steps."""
        found: set[str] = set()
        for s in self.kernel.statements:
            if s.kind == "reduction" or _steps_in(s) or any(load.attr[0] in found for load in vs.loads(s.roots)):
                found.update(s.outs)
        return frozenset(found)

    @cached_property
    def operand_reductions(self) -> tuple[SummedOperand, ...]:
        """The operands that are summed as well."""
        beside = [s for s in self.kernel.statements if not (self._beside.isdisjoint(s.outs) or _steps_in(s))]
        found: dict[tuple[str, int], list[Statement]] = {}
        maker: dict[str, tuple[str, int]] = {}
        for s in beside:
            if s.kind == "reduction":
                key = self._operand_of(s.value)
            else:
                key = next(maker[load.attr[0]] for load in vs.loads(s.roots) if load.attr[0] in maker)
            maker |= dict.fromkeys(s.outs, key)
            found.setdefault(key, []).append(s)
        return tuple(SummedOperand(name, number, tuple(own)) for (name, number), own in found.items())

    def _operand_of(self, value: Value) -> tuple[str, int]:
        """The name of an operand and the number of the first contraction that has it."""
        for number, s in enumerate(self.mains):
            for name, one in zip(self.template.operands, (s.value, *s.factors), strict=True):
                if one is value:
                    return name, number
        raise AssertionError("an operand reduction adds up an operand")

    def operand_reduction(self, operand: str, number: int) -> SummedOperand:
        """The sum of an operand that is summed as well."""
        return next(one for one in self.operand_reductions if (one.operand, one.number) == (operand, number))

    @cached_property
    def middles(self) -> dict[str, Middle]:
        """What a program makes of each element of its steps, by the names that the template has for these."""
        program = self.template.implements.program
        if program is None:
            return {}
        values = (self.main.value, *self.main.factors)[len(program.operands) :]
        named = zip(program.middles, program.canonical.middles, values, strict=True)
        return {
            step.name: Middle(
                step.axes,
                program.canonical.elements(canonical),
                value,
                self._normalised(program, step),
                _summed(program, step),
                self.loops,
            )
            for step, canonical, value in named
        }

    def seconds(self, result: str) -> tuple[Statement, ...]:
        """What is stored of a second result, if anything is."""
        program, step = self.template.implements.program, self.template.seconds[result]
        assert program is not None
        names = dict(zip((one.name for one in program.steps), (one.name for one in program.canonical.steps), strict=True))
        return tuple(s for s in self.kernel.statements if _steps_in(s) == {names[step]})

    def _normalised(self, program: Program, step: Contract | Elementwise) -> str | None:
        reader = program.reader(step)
        return reader.over if isinstance(reader, Softmax) else None

    @cached_property
    def has_fused_call(self) -> bool:
        """Whether the library has one call for all that the kernel computes."""
        stored = tuple(o for s in self.kernel.statements for o, kept in zip(s.outs, s.stored, strict=True) if kept)
        fused = (node.fused for node in self.graph.nodes if isinstance(node, ir.Contraction))
        return len(self.members) == 1 and any(call is not None and call.outs == stored for call in fused)

    @cached_property
    def contraction(self) -> ir.Contraction | None:
        """The node of the first contraction, if a library call computes it alone."""
        found = self._node
        return found if isinstance(found, ir.Contraction) and found.vendor is not None else None

    @property
    def windowed_call(self) -> ir.Extern | None:
        """The library call of the first contraction, if it reads operands as windows of tensors: of a convolution, or of one of
        its gradients."""
        found = self.contraction
        return found.vendor if found is not None and found.windowed else None

    @cached_property
    def _node(self) -> ir.Contraction | ir.Operation | None:
        """The node of which the first main loop is the kernel's."""
        made = self.graph.provenance.get(self.mains[0].outs[0])
        nodes = (node for node in self.graph.nodes if ir.is_template_node(node))
        return next((node for node in nodes if made is not None and made.source in ir.outs(node)), None)

    @cached_property
    def has_library_call(self) -> bool:
        """Whether the library has one call for all that the main loop of an operator or a program computes."""
        return isinstance(self._node, ir.Operation) and self._node.vendor is not None

    @cached_property
    def narrows(self) -> bool:
        """Whether the contractions of which a program takes the place multiply wider numbers than its own do: of 16-bit numbers
        that were widened before. Separate kernels then have neither the matrix units nor half of the bytes."""
        replaced = self._node.replaces if isinstance(self._node, ir.Operation) else ()
        kinds = [one.operands for one in replaced if ir.is_contraction(one)]
        return any(kind is not None and kind.itemsize > self.main_dtype.itemsize for kind in kinds)

    @property
    def reduces_tiles(self) -> bool:
        """Whether the epilogue reduces each tile along an axis."""
        return any(s.kind == "partial" for s in self.epilogue)

    @cached_property
    def scatters(self) -> tuple[Statement, ...]:
        """Updates of the epilogue that may hit one element twice, where the device runs them in order."""
        return tuple(s for s in self.epilogue if s.in_order)

    @cached_property
    def in_order(self) -> tuple[str, ...]:
        """Axes of the result along which updates may hit one element twice, outermost first: of points that differ in nothing
        else, the first one is stored first."""
        found: set[Atom] = set().union(*(ix.free_atoms(s.rank) for s in self.scatters if s.rank is not None))
        return tuple(a for a in self.template.implements.results[0] if not found.isdisjoint(self.loops[a]))

    @cached_property
    def accumulator(self) -> torch.dtype:
        """The accumulator's type."""
        return self.graph.buffers[self.main.outs[0]].dtype

    @memoised
    def part(self, s: Statement) -> Part:
        """What a partial reduction folds of a tile."""
        found = _part(s, self)
        assert isinstance(found, Part)
        return found

    def side(self, axis: str, config: Config) -> int:
        """Points along an axis of what the epilogue gets at once: the tile's, or as many as the author says."""
        block: int = config.get(self.template.block(axis) or "", 1)
        return self.template.author.epilogue_subtile(self, config).get(axis, block)

    def part_blocks(self, config: Config) -> dict[str, int | None]:
        """Points of a part of each partial reduction, by its first result; None where the tile does not suit it."""
        found = {s.outs[0]: (self.part(s), s.block) for s in self.epilogue if s.kind == "partial"}
        return {out: self._part_block(part, wanted, config) for out, (part, wanted) in found.items()}

    def _part_block(self, part: Part, wanted: int, config: Config) -> int | None:
        """A tile that the epilogue gets in several subtiles has a full row in the first at most, and the others, with nothing
        of it, would write its results as well."""
        side = self.side(part.axis, config)
        if part.is_row(wanted) and side < config.get(self.template.block(part.axis) or "", 1):
            return None
        return part.block(side, wanted)

    @cached_property
    def whole(self) -> dict[str, int]:
        """By axis, how many points a tile has to hold: rows that the epilogue reduces and reads again."""
        parts = [(self.part(s), s.block) for s in self.epilogue if s.kind == "partial"]
        return {part.axis: block for part, block in parts if part.is_row(block)}

    def admits(self, config: Config) -> bool:
        """Whether the tile makes parts of just the length that the plan has for what joins them, where it has one yet."""
        wanted = {s.outs[0]: s.block for s in self.epilogue if s.kind == "partial"}
        return all(block is not None and wanted[out] in (0, block) for out, block in self.part_blocks(config).items())

    # ---- sizes ------------------------------------------------------------------------------------------------------

    @memoised
    def identity(self) -> Hashable:
        """Equal for problems of which a compiler makes the same but for names, in another attempt at the graph as well."""
        lengths = tuple((axis, self.extent(axis)) for axis in self.loops)
        return lengths, tuple(map(self._text, self.kernel.statements))

    def _text(self, s: Statement) -> Hashable:
        """What a statement does: its operations, and the layouts of what it reads and stores."""
        walk = vs.topological(s.roots)
        names = (*(v.attr[0] for v in walk if v.op == "load"), *(name for name in s.outs if name is not None))
        found = (self.graph.buffers.get(name) for name in names)
        buffers = tuple((b.dtype, b.sizes, b.strides) if b is not None else None for b in found)
        return s.kind, s.op, s.stored, tuple((v.op, v.dtype, len(v.args)) for v in walk), buffers

    def extent(self, axis: str) -> Expr:
        """The length of an axis; 1 for an empty one."""
        return ix.product(v.extent for v in self.loops[axis])

    @memoised_at_sizes
    def size(self, axis: str) -> int:
        """The length of an axis at the hints, at least 1: estimates divide by it."""
        return max(1, self.sizes.of(self.extent(axis)))

    def static(self, axis: str) -> bool:
        return self.extent(axis).as_int() is not None

    def step(self, axis: str) -> int | None:
        """Of an axis of a window: by how many elements of the tensor's dimension its index moves, the stride of positions and
        the dilation of taps; None where it stands for several loops that do not walk as one."""
        loops = self.loops[axis]
        if len(loops) > 1:
            return None
        return self.steps.get(loops[0], 1) if loops else 1

    def grid(self, position: str) -> Grid | None:
        """The coordinates that the positions of a window and its taps come to; None where one of them is not one loop."""
        tap = next(tap for own, tap in self.template.implements.windows if own == position)
        pair = [*self.loops[position], *self.loops[tap]]
        one_each = len(pair) == 2 and len(self.loops[tap]) == 1
        return grid_of(pair[0], pair[1], self.steps) if one_each else None

    @memoised
    def over_coordinates(self, name: str) -> Input | str:
        """An operand over the coordinates that its windows come to, by the names of positions; or why it is none such."""
        one, pairs = self.inputs[name], dict(self.template.implements.windows)
        value, loops = one.value, dict(one.loops)
        for position, tap in pairs.items():
            if position not in one.axes or not (loops[position] or loops[tap]):
                continue
            grid = self.grid(position)
            if grid is None:
                return f"the windows {position} + {tap} of {name} are several loops"
            found = over_coordinates(value, grid)
            if found is None:
                return f"{name} depends on positions {position} and taps {tap}, not on their coordinates alone"
            value, loops[position] = found, (grid.coordinate,)
        taps = {tap for position, tap in pairs.items() if position in one.axes}
        axes = tuple(axis for axis in one.axes if axis not in taps)
        return replace(one, axes=axes, value=value, load=None, loops={axis: loops[axis] for axis in axes})

    def tiles(self, axis: str, block: int) -> Expr:
        return ix.ceildiv(self.extent(axis), block)

    def programs(self, config: Config) -> Expr:
        """The author's number of programs, or one for each tile of the first result."""
        return ix.as_expr(self.template.author.grid(self, config))

    def blocks(self, config: Config) -> Expr:
        """The tiles of the first result."""
        count = ix.ONE
        for axis in self.template.implements.results[0]:
            block = self.template.block(axis)
            count = count * (self.extent(axis) if block is None else self.tiles(axis, config.get(block)))
        return count

    # ---- layouts ----------------------------------------------------------------------------------------------------

    @memoised
    def stride(self, name: str, axis: str, number: int = 0) -> Expr | None:
        """Elements from one index of an axis to the next, where the operand is one load and the axis one loop."""
        one = self.members[number][name]
        load, loops = one.load, one.loops[axis]
        if load is None or len(loops) > 1:
            return None
        return ix.stride_of(load.attr[1][0], loops[0]) if loops else ix.ZERO

    def copied(self, one: Input) -> Value | None:
        """The load that brings an operand's tile as it is in memory, by predicates where the template has such an operand;
        None where the tile is computed."""
        predicated = self.template.operands[one.name].access == "predicated"
        return one.load or (one.bounded_load if predicated else None)

    @memoised
    def is_frozen(self, name: str, number: int = 0) -> bool:
        """Whether the operand is one load of a tensor that has the same elements at each call."""
        load = self.members[number][name].load
        return load is not None and load.attr[0] in self.graph.frozen

    def operand_axes(self, name: str) -> tuple[str, str]:
        """The operand's own axis, which the result has too, and the one that is summed over. Of a program, or where axes are
        windows, these are the axes with a `BLOCK_` knob, in their order."""
        pattern = self.template.implements
        if pattern.program is not None or pattern.windows:
            first, second = (a for a in self.inputs[name].axes if self.template.block(a) is not None)
            return first, second
        if pattern.operator:  # its other axes may be in some operands alone
            tiled = [a for a in self.inputs[name].axes if self.template.block(a) is not None]
            kept = [a for a in tiled if a in pattern.results[0]]
            if len(tiled) == 2 and len(kept) == 1:
                return kept[0], next(a for a in tiled if a not in kept)
        shared = [a for a in self.inputs[name].axes if all(a in axes for axes in pattern.operands)]
        own = next(a for a in self.inputs[name].axes if a not in shared)
        results = {a for axes in pattern.results for a in axes}
        return own, next(a for a in shared if a not in results)

    def contiguous(self, name: str) -> str | None:
        """The axis along which the operand's neighbours are neighbours in memory, where it is one load."""
        return next((axis for axis in self.inputs[name].axes if self.stride(name, axis) == 1), None)

    @cached_property
    def uncalibrated(self) -> str | None:
        """Why estimates of the template's time cannot be relied on; None where they can."""
        return self.template.uncalibrated(self)

    def reads_window(self, one: Input) -> bool:
        """Whether some tile of the operand is no matrix in memory: addresses jump between the loops of an axis, as between the
        rows and the taps of a convolution, bounds guard what several loops count, or elements are read by several points."""
        loops = [one.loops[axis] for axis in one.axes if axis not in self.template.implements.batch]
        for load in vs.loads([one.value]):
            index = load.attr[1][0]
            found = ix.free_atoms(index)
            if any(found.isdisjoint(own) for own in loops):
                continue
            if any(len(own) > 1 and (load.args or _jumps(index, own)) for own in loops):
                return True
            if self._overlaps(index, [v for own in loops for v in own]):
                return True
        return False

    def joins_matrices(self, one: Input) -> bool:
        """Whether an operand is matrices in memory, one behind the other along an axis, as of a concatenation: bounds on that
        axis' one loop say which of them has an element."""
        loops = [one.loops[axis] for axis in one.axes if axis not in self.template.implements.batch]
        for load in vs.loads([one.value]):
            index = load.attr[1][0]
            bounded = {v for bound in load.args for v in bound.variables()}
            if len(bounded) > 1 or any(len(own) > 1 and (not bounded.isdisjoint(own) or _jumps(index, own)) for own in loops):
                return False
            if self._overlaps(index, [v for own in loops for v in own if v not in bounded]):
                return False
        return True

    def _overlaps(self, index: Expr, loops: Iterable[Var]) -> bool:
        """Whether loops with steps of their own come to one place several times, as positions and taps do."""
        steps = [(ix.stride_of(index, v), v) for v in loops if v.extent != 1]
        known = sorted(
            (abs(self.sizes.of(step)), self.sizes.of(v.extent)) for step, v in steps if step is not None and step.terms
        )
        return any(step * extent > longer for (step, extent), (longer, _) in itertools.pairwise(known))

    @property
    def flops(self) -> int:
        program = self.template.implements.program
        if program is None:
            return 2 * len(self.members) * self._points(self.loops)
        return sum(self.flops_of(step) for step in program.steps if isinstance(step, Contract))

    def flops_of(self, step: Contract) -> int:
        """Operations of a contraction of the program."""
        program = self.template.implements.program
        assert program is not None
        return 2 * self._points((*step.axes, *program.reduced(step)))

    @property
    def tf32(self) -> bool:
        """Whether the operands are of float32, and torch's settings let their last digits go: that for matmuls, and that for
        convolutions where the contractions are those of convolutions or of their gradients."""
        return self.main_dtype is torch.float32 and all(is_rounded(torch.float32, windows) for windows in self._read_windows)

    @cached_property
    def _read_windows(self) -> frozenset[bool]:
        return frozenset(ir.reads_windows(self.graph, s.outs[0]) for s in self.mains)

    @property
    def rounds(self) -> bool:
        """Whether operands become TF32 in registers, but for those that TMA rounds on their way: the matrix units would cut
        the last digits off, and sums would come out too small by 7e-4."""
        return self.tf32 and self.template.on_matrix_units

    @property
    def exact_float32(self) -> bool:
        """Whether the operands are of float32, and multiplied as they are."""
        return self.main_dtype is torch.float32 and not self.tf32

    @property
    def rate(self) -> float:
        """Operations a second of the units that multiply the operands."""
        return self.device.rate(self.main_dtype, self.tf32)

    @property
    def size_of_result(self) -> int:
        """Bytes of the contraction as the library would store it, in the operands' type."""
        return self._points(self.template.implements.results[0]) * self.main_dtype.itemsize

    def bytes_of_operand(self, name: str) -> int:
        """Bytes of an operand as the library would read it."""
        return self._points(self.inputs[name].axes) * self.inputs[name].dtype.itemsize

    def bytes_over(self, axes: Iterable[str]) -> int:
        """Bytes of a tensor over some axes in the operands' type."""
        return self._points(axes) * self.main_dtype.itemsize

    def _points(self, axes: Iterable[str]) -> int:
        total = 1
        for axis in axes:
            total *= self.size(axis)
        return total

    @property
    def main_dtype(self) -> torch.dtype:
        """The type of the first operand, and of both factors of a contraction."""
        return self.main.operands[0]

    @property
    def finishing(self) -> bool:
        """Whether the epilogue is more than storing the sum: a bias, too, is something that libraries add themselves."""
        return len(self.epilogue) > len(self.members)

    def bytes_read(self, name: str) -> int:
        """Bytes of the buffers from which an operand is made, each counted once; of rows of which data or strides choose some,
        only these."""
        total = sum(self.sizes.bytes(self.graph.buffers[b]) for b in self._read(name))
        rows = self._rows_read(name)
        return min(total, rows * self.bytes_of_operand(name)) if rows else total

    @memoised
    def _rows_read(self, name: str) -> int:
        """How many arrays an operand is, of which each is one load of rows: of neighbours in memory, or chosen by data."""
        values = {member[name].value: member[name] for member in self.members}
        return len(values) if all(map(_reads_rows, values.values())) else 0

    @memoised
    def _read(self, name: str) -> set[str]:
        loads = {v.attr[0] for v in vs.loads([member[name].value for member in self.members])}
        return loads & self.graph.buffers.keys()

    @cached_property
    def epilogue_bytes(self) -> int:
        """Bytes that the epilogue reads and writes; of rows of which data or strides choose some, only these."""
        made = {o for s in self.kernel.statements for o in s.outs}
        read = Counter(v.attr[0] for v in {v for s in self.epilogue for v in vs.loads(s.roots)} if v.attr[0] not in made)
        points = max(self._points(axes) for axes in self.template.implements.results)
        buffers = [(self.graph.buffers[name], loads) for name, loads in read.items()]
        return self.stored_bytes + sum(min(self.sizes.bytes(b), loads * points * b.dtype.itemsize) for b, loads in buffers)

    @cached_property
    def stored_bytes(self) -> int:
        """Bytes that the epilogue writes."""
        written = {o for s in self.epilogue for o, kept in zip(s.outs, s.stored, strict=True) if kept}
        return sum(self.sizes.bytes(self.graph.buffers[b]) for b in written)


def _reads_rows(one: Input) -> bool:
    """Whether an operand is one load of neighbours in memory, or of what data choose."""
    if one.load is None:
        return False
    index = one.load.attr[1][0]
    chosen = any(isinstance(atom, ix.Indirect) for atom in ix.free_atoms(index))
    return chosen or any(ix.stride_of(index, v) == 1 for own in one.loops.values() for v in own)


def _summed(program: Program, step: Contract | Elementwise) -> str | None:
    """The axis along which a contraction sums what goes through a step's slot."""
    reader = program.reader(step)
    return next((a for a in program.reduced(reader) if a in step.axes), None) if isinstance(reader, Contract) else None


def _jumps(index: Expr, loops: tuple[Var, ...]) -> bool:
    """Whether loops of an index do not walk through memory as one. Indices from data are gathers, and no windows. Nor are
    elements of which the last loops make several neighbours each, as of a byte that holds two numbers, or a group's scale."""
    atoms = ix.free_atoms(index)
    known = not any(isinstance(a, ix.Indirect) for a in atoms)
    moving = loops[: max((k + 1 for k, v in enumerate(loops) if v in atoms), default=0)]
    return known and len(moving) > 1 and not _as_one(index, moving)


def _as_one(expr: Expr, loops: tuple[Var, ...]) -> bool:
    """Whether the index walks through the loops, the last one fastest, as through one. Indices from data are left alone."""
    if any(isinstance(a, ix.Indirect) for a in ix.free_atoms(expr)):
        return False
    strides = [ix.stride_of(expr, v) for v in loops]
    pairs = zip(strides, strides[1:], loops[1:], strict=False)
    return all(a is not None and b is not None and a is b * v.extent for a, b, v in pairs)


def _plain(value: Value, dtype: torch.dtype) -> Value | None:
    """The value itself where it is one load, unmasked, of `dtype`."""
    return value if value.op == "load" and value.attr[2] == dtype and not value.args else None


def problem_of(template: Template, kernel: Kernel, graph: ir.Graph, device: Device) -> Problem | str:
    """The problem that a kernel is for a template, or why it is none. `kernel` has linear offsets."""
    problem = _problem_of(template, kernel, graph, device)
    if isinstance(problem, str):
        return problem
    reasons = (_part(s, problem) for s in problem.epilogue if s.kind == "partial")
    beside = (_no_sum(one, problem) for one in problem.operand_reductions)
    scatters = (_no_order(s, problem) for s in problem.scatters)
    return next((reason for reason in (*reasons, *beside, *scatters) if isinstance(reason, str)), problem)


def _problem_of(template: Template, kernel: Kernel, graph: ir.Graph, device: Device) -> Problem | str:
    """The problem with its loops sorted into axes."""
    main = [s for s in kernel.statements if s.kind == "contraction"]
    pattern = template.implements
    reason = _other_work(template, main, kernel.statements)
    if reason is not None:
        return reason
    if pattern.operator:
        names = pattern.axes if pattern.program is not None else [axis for axis, _ in main[0].axes]
        if tuple(names) != pattern.axes:  # the operator's tensors may have other ranks, for which there are other templates
            return f"its tensors have the axes {', '.join(names)}, not {', '.join(pattern.axes)}"
        named = {axis: _digits_of(e, kernel) for axis, (_, e) in zip(names, main[0].axes, strict=True)}
        if None in named.values():
            return "an axis whose loops are no digits of one number"
        return Problem(template, kernel, graph, {a: found for a, found in named.items() if found is not None}, device)
    if pattern.windows:
        ways = (_in_windows(template, way, graph, device) for way in (kernel, _exchanged(kernel, main)))
        return next((found for found in ways if found is not None), "it reads no operand in such windows")
    turned = _turned(template, kernel, graph, main)
    if turned is None:
        return "its contractions have no operand in common"
    kernel = turned
    loops: dict[str, list[Var]] = {axis: [] for axis in pattern.axes}
    # of all contractions: one may have an operand that repeats along a loop of another one's
    operands = [(s.value, *s.factors) for s in kernel.statements if s.kind == "contraction"]
    used = [frozenset().union(*(v.variables() for v in position)) for position in zip(*operands, strict=True)]
    for v in (*kernel.outer, *kernel.inner):
        axis = _axis_of(v, used, v in kernel.outer, template, pattern.axes)
        if axis is None:
            return f"loop {v.name} fits none of the axes {', '.join(pattern.axes)}"
        loops[axis].append(v)
    if device.kind == "cpu":  # which computes operands in runs of the last loop
        values = [value for position in operands for value in position]
        loops = {
            axis: found if axis in pattern.results[0] else _contiguous_last(found, values) for axis, found in loops.items()
        }
    return Problem(template, kernel, graph, {a: tuple(found) for a, found in loops.items()}, device)


def _contiguous_last(loops: list[Var], values: Sequence[Value]) -> list[Var]:
    """Loops of a sum, in which the one comes last along which most of what depends on several of them is contiguous: the
    channels of a window, before which come its taps. They are added up in any order."""
    weights = dict.fromkeys(loops, 0)
    if len(loops) < 2:
        return loops
    for load in vs.loads(values):
        index = load.attr[1][0]
        own = [v for v in loops if v in ix.free_atoms(index)]
        rest = ix.free_atoms(index).difference(loops)
        for v in own if len(own) > 1 and load.args else ():
            weights[v] += len(rest) if ix.stride_of(index, v) == 1 else 0
    last = max(loops, key=lambda v: weights[v])
    return [*(v for v in loops if v is not last), last] if weights[last] else loops


def _in_windows(template: Template, kernel: Kernel, graph: ir.Graph, device: Device) -> Problem | None:
    """The problem of a sum of products of which one operand is read in windows. These are the last windows of the pattern; axes
    of the others are empty. Of more windows the first ones share the pattern's first one, whose axes are composite then. A loop
    of no window may have the axis of one, if no other axis is in as few operands: images are rows beside positions."""
    pattern = template.implements
    main = next(s for s in kernel.statements if s.kind == "contraction")
    values = (main.value, *main.factors)
    if any(v.extent == 0 for v in kernel.inner):  # rows of nothing begin at neighbouring addresses, as windows do
        return None
    windowed = next(k for k, axes in enumerate(pattern.operands) if pattern.windows[0][0] in axes)
    used = [v.variables() for v in values]
    moving = [v for v in kernel.outer if _may_be_position(v, used, pattern)]  # groups and their channels are no window
    windows = windows_of(values[windowed], graph, moving, kernel.inner)
    if not windows:
        return None
    pairs = [pattern.windows[0]] * (len(windows) - len(pattern.windows)) + list(pattern.windows[-len(windows) :])
    named = {v: axis for pair, w in zip(pairs, windows, strict=True)
             for axis, own in zip(pair, (w.positions, w.taps), strict=True) for v in own}  # fmt: skip
    together = [axis for pair in pattern.windows for axis in pair]
    apart = [*(axis for axis in pattern.axes if axis not in together), *together]
    loops: dict[str, list[Var]] = {axis: [] for axis in pattern.axes}
    for v in (*kernel.outer, *kernel.inner):
        axis = _axis_of(v, used, v in kernel.outer, template, [named[v]] if v in named else apart)
        if axis is None:
            return None
        loops[axis].append(v)
    steps = {v: count for w in windows for v, count in w.steps.items()}
    return Problem(template, kernel, graph, {a: tuple(found) for a, found in loops.items()}, device, steps)


def _may_be_position(v: Var, used: Sequence[frozenset[Atom]], pattern: Pattern) -> bool:
    """Whether all operands that know the loop have the positions of some window."""
    known = [axes for axes, atoms in zip(pattern.operands, used, strict=True) if v in atoms]
    return any(all(position in axes for axes in known) for position, _ in pattern.windows)


def _other_work(template: Template, main: list[Statement], statements: Sequence[Statement]) -> str | None:
    """Why contractions are not what a template computes, whatever their loops."""
    pattern = template.implements
    if len(main) > template.most.family:
        return template.why_not(Request(family=len(main)))
    if any(s.op != (pattern.operator or "sum") for s in main):
        return f"it is {main[0].op}, not {pattern.operator or 'a sum of products'}"
    if len(main[0].factors) + 1 != len(pattern.operands) + len(pattern.middles):
        return f"{len(main[0].factors) + 1} operands, where the template has {len(pattern.operands)}"
    if not pattern.seconds and any(map(_steps_in, statements)):
        return "somebody reads a log-sum-exp, which it does not store"
    return None


def _steps_in(s: Statement) -> set[str]:
    """The steps of which a statement stores a second result."""
    return {v.attr for v in vs.topological([s.value]) if v.op == "step"} if s.kind == "pointwise" else set()


def _no_sum(one: SummedOperand, problem: Problem) -> str | None:
    """Why a template cannot sum an operand as well."""
    operand, value = problem.template.operands[one.operand], one.statements[0].value
    if not operand.sums:
        return f"it does not add up {one.operand} as well"
    results = problem.template.implements.results[0]
    if any(ix.lower_bound(problem.extent(axis)) < 1 for axis in results):
        return "without a tile of the result nothing makes the sums"
    kept = [v for axis in operand.axes if axis in results for v in problem.loops[axis]]
    if not value.variables().issuperset(kept):
        return f"{one.operand} repeats along what its sums are of"
    # of an expanded tensor the sums are equal along a loop that is an axis of the other operand
    stored = {atom for s in one.statements for e in s.store for atom in ix.free_atoms(e) if isinstance(atom, Var)}
    return None if stored.issubset(kept) else f"the sums of {one.operand} are stored along another operand's axis"


def _no_order(s: Statement, problem: Problem) -> str | None:
    """Why a template cannot run the updates of an element in order."""
    template = problem.template
    axes = template.implements.results[0]
    if (reason := template.why_not(Request(ordered=True))) is not None:
        return reason
    apart = [axis for axis in problem.in_order if axis not in template.implements.batch]
    if len(apart) > 1:
        return f"updates along both {' and '.join(apart)} may hit one element, and threads share one of these axes"
    assert s.rank is not None
    loops = [v for axis in axes for v in problem.loops[axis] if v in ix.free_atoms(s.rank)]
    return None if s.rank is ix.position_in(loops) else "its tiles come in another order than the updates"


def _part(s: Statement, problem: Problem) -> Part | str:
    """What a partial reduction folds of a tile, or why it cannot."""
    folded = _folded(s, problem.kernel)
    axis = next((a for a, own in problem.loops.items() if folded and folded[0] in own), None)
    if axis is None or problem.template.block(axis) is None:
        return "it has no tiles along what is reduced"
    own = problem.loops[axis]
    if tuple(folded) != own[len(own) - len(folded) :]:
        return f"what is reduced is no run of neighbours along axis {axis}"
    position = ix.position_in(folded)
    if s.op in ("argmax", "argmin") and s.rank is not position:
        return f"places along axis {axis} are counted in another order than its tiles"
    return Part(axis, ix.product(v.extent for v in folded), len(folded) == len(own))


def _folded(s: Statement, kernel: Kernel) -> list[Var]:
    """The loops along which a partial reduction goes."""
    assert s.rank is not None
    return [v for v in kernel.outer if v in ix.free_atoms(s.rank)]


def _row(s: Statement, kernel: Kernel) -> list[Var]:
    """The loops of a partial reduction that makes one part of all its points."""
    loops = _folded(s, kernel)
    return loops if s.block > 0 and ix.product(v.extent for v in loops) == s.block else []


def _turned(template: Template, kernel: Kernel, graph: ir.Graph, main: list[Statement]) -> Kernel | None:
    """The kernel with both operands of its contractions exchanged, where that makes the last axis of the result the contiguous
    one, or an axis as short as the template wants it, or makes a family's common operand the one that the template has once.
    None where the contractions of a family have nothing in common."""
    values = (main[0].value, *main[0].factors)
    exchange = _contiguous_first(kernel, graph, values)
    if template.longest and not any(_row(s, kernel) for s in kernel.statements if s.kind == "partial"):
        short = [_short_enough(template, kernel, way) for way in (values, values[::-1])]
        exchange = exchange if short[0] is short[1] else short[1]
    if len(main) > 1:
        single = next(k for k, one in enumerate(template.operands.values()) if not one.many)
        common = [len({(s.value, *s.factors)[k] for s in main}) == 1 for k in range(2)]
        if not any(common):
            return None
        exchange = not common[single]
    return _exchanged(kernel, main) if exchange else kernel


def _exchanged(kernel: Kernel, main: Iterable[Statement]) -> Kernel:
    """The kernel with both operands of its contractions exchanged."""
    new = {id(s): replace(s, value=s.factors[0], factors=(s.value,), unscaled=s.unscaled[::-1]) for s in main}
    return replace(kernel, statements=tuple(new.get(id(s), s) for s in kernel.statements))


def _short_enough(template: Template, kernel: Kernel, values: tuple[Value, ...]) -> bool:
    """Whether axes of the result that come from one of these operands alone are no longer than the template takes."""
    pattern = template.implements
    used = [value.variables() for value in values]
    for axis, most in template.longest.items():
        inside = [axis in axes for axes in pattern.operands]
        if axis not in pattern.results[0] or all(inside) or len(values) != len(inside):
            continue
        own, other = (used if inside[0] else used[::-1])[:2]
        length = ix.product(v.extent for v in kernel.outer if v in own and v not in other).as_int()
        if length is None or length > most:
            return False
    return True


def _digits_of(expr: Expr, kernel: Kernel) -> tuple[Var, ...] | None:
    """The loops that an axis consists of, outermost first; None where it is not their number, the last one fastest."""
    steps = {v: ix.stride_of(expr, v) for v in (*kernel.outer, *kernel.inner)}
    digits = {v: stride for v, stride in steps.items() if stride is None or stride.terms}
    total, found = ix.ONE, []
    while digits:
        v = next((v for v, stride in digits.items() if stride is total), None)
        if v is None:
            return None
        del digits[v]
        found.append(v)
        total = total * v.extent
    return tuple(reversed(found))


def _axis_of(v: Var, used: Sequence[frozenset[Atom]], outer: bool, template: Template, axes_there: Iterable[str]) -> str | None:
    """The axis of the loop among `axes_there`: of the results for an outer one, in all operands that know the loop, and in as
    few others as can be. To those others it is an axis along which they repeat, as what is expanded does, or anything along a
    length of 1."""
    pattern = template.implements
    needed = {k for k, atoms in enumerate(used) if v in atoms}
    fitting: list[tuple[int, str]] = []
    for axis in axes_there:
        inside = {k for k, axes in enumerate(pattern.operands) if axis in axes}
        if inside >= needed and any(axis in axes for axes in pattern.results) == outer:
            fitting.append((len(inside), axis))
    return min(fitting, key=lambda one: one[0])[1] if fitting else None


def _contiguous_first(kernel: Kernel, graph: ir.Graph, values: tuple[Value, ...]) -> bool:
    """Whether the rows of a contraction, not its columns, are contiguous in what is stored, or have to be in one tile each:
    then the contraction is turned, so that the last axis of the result is the one."""
    if len(values) != 2:
        return False
    left, right = (v.variables() for v in values)
    rows = [v for s in kernel.statements if s.kind == "partial" for v in _row(s, kernel)]
    if rows:  # tiles are longer along the last axis
        return any(v in left for v in rows) and not any(v in right for v in rows)
    score = 0
    for s in kernel.statements:
        points = all(v in ix.free_atoms(s.store[0]) for v in kernel.outer if v.extent != 1)  # not one for each row
        for out, kept in zip(s.outs, s.stored, strict=True):
            for v in kernel.outer if kept and points and s.kind != "partial" else ():
                if ix.stride_of(s.store[0], v) == 1 and (v in left) != (v in right):
                    score += graph.buffers[out].dtype.itemsize * (1 if v in left else -1)
    return score > 0


def buffers_of(statements: Iterable[Statement]) -> list[str]:
    """Every buffer that statements touch in memory, in order of first use."""
    statements = list(statements)
    made = {o for s in statements for o, kept in zip(s.outs, s.stored, strict=True) if not kept}
    found: dict[str, None] = {}
    for s in statements:
        for load in vs.loads(s.roots):
            found.setdefault(load.attr[0])
        for out, kept in zip(s.outs, s.stored, strict=True):
            if kept:
                found.setdefault(out)
    return [name for name in found if name not in made]
