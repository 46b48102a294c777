"""What stands between steps of a program in Gluon, in two parts, so that one of them runs while matrix units make the other
one's elements:

    s' = exp(s * 0.125 - lse[n]) * (t - delta[n])     ->     early0 = exp(s * 0.125 - lse[n])     first
                                                             s' = early0 * (t - delta[n])         second

What is early is 0 where the mask keeps nothing, so the function has to be 0 there as well. Of a row of which a mask keeps
nothing the numbers are NaN: where there may be such rows, the function is made 0. Numbers of columns that it reads come
through shared memory by TMA, those of rows are read once, in front of the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count

import torch

from kgen.ir import index as ix
from kgen.ir import values as vs
from kgen.ir.index import Atom, Expr, Var
from kgen.ir.spans import Known, where_holds
from kgen.ir.values import Value
from kgen.rendered.tensor_map import TensorMap
from kgen.templates.middle import Middle
from kgen.templates.problem import Problem
from kgen.templates.slots import Index
from kgen.templates.triton.codegen.gluon_handles import ColumnRing, Columns
from kgen.templates.triton.codegen.launch import ALIGNMENT, aligned
from kgen.templates.triton.codegen.powers import in_powers_of_two
from kgen.templates.triton.codegen.slots import Slots, Within
from kgen.templates.triton.codegen.table import TRITON_TYPES
from kgen.templates.triton.codegen.tile import TileEmitter
from kgen.templates.triton.codegen.tma_moves import digit

__all__ = ["Shared", "StepHalves", "parts_of", "vanishes", "why_whole"]

NO_COLUMNS = Columns(())
# Elements that TMA may count.
MAX_ELEMENTS = 2**31 - 1


def why_whole(problem: Problem, step: str, number: int) -> str | None:
    """Why a step's function cannot be had in two parts, the first of which needs the element `number` alone; None if it can."""
    middle = problem.middles[step]
    if middle.guards and len(middle.steps) > 1:
        return "its mask says nothing unless numbers in memory are 0"
    value = middle.function(masked=False)
    parts = parts_of(value, middle.steps[number])
    if not parts:
        return "one of the elements is not in its function"
    if middle.mask is not None and not middle.guards and not vanishes(value, frozenset(parts)):
        return "its function may be other than 0 where a mask keeps nothing"
    return None


def parts_of(value: Value, step: str) -> tuple[Value, ...]:
    """The parts of a function that say all of the element of one step, and need no other one: a single part where one is all,
    the last such, and the function is 0 with it; or else the largest ones."""
    needs = _needs(value)
    if needs[value] == {step}:
        return (value,)
    own = [one for one, found in needs.items() if found == {step}]
    single = next((one for one in reversed(own) if one.op != "step" and step not in _needs(value, one)[value]), None)
    if single is not None and vanishes(value, frozenset([single])):
        return (single,)
    return tuple(dict.fromkeys(arg for one, found in needs.items() for arg in one.args if needs[arg] == {step} != found))


def _needs(value: Value, known: Value | None = None) -> dict[Value, frozenset[str]]:
    """The steps whose elements a value, and all in it, needs where a part is `known`, arguments first."""
    found: dict[Value, frozenset[str]] = {}
    for one in vs.topological([value], through_indices=False):
        own = frozenset([one.attr]) if one.op == "step" else frozenset[str]()
        found[one] = frozenset() if one is known else own.union(*(found[arg] for arg in one.args))
    return found


def vanishes(value: Value, zeros: frozenset[Value]) -> bool:
    """Whether a value is 0 where all of `zeros` are, and everything else is a number."""
    if value in zeros or (value.op == "const" and value.attr == 0):
        return True
    if value.op == "mul":
        return any(vanishes(arg, zeros) for arg in value.args)
    if value.op in ("add", "sub"):
        return all(vanishes(arg, zeros) for arg in value.args)
    if value.op in ("neg", "round_to", "cast", "truediv"):
        return vanishes(value.args[0], zeros)
    return value.op == "where" and all(vanishes(arg, zeros) for arg in value.args[1:])


@dataclass(frozen=True, slots=True)
class Shared:
    """An early part of a step's function is what another step sees of the same element: where the mask keeps all, or
    `everywhere`."""

    part: int
    everywhere: bool

    def of(self, stem: str, whole: bool) -> str:
        """The part, of those that begin with `stem`; empty where it is another."""
        return f"{stem}{self.part}" if whole or self.everywhere else ""


@dataclass(frozen=True, slots=True)
class StepHalves:
    """The two parts of a step's function. `known` are values that were made in front of the loop, by their names."""

    slots: Slots
    step: str
    known: dict[Value, str]
    scaled: bool = True
    masked: bool = True
    into: str = ""
    inside: str = ""
    stats: Columns = NO_COLUMNS

    def first(self, stem: str, tile: str, number: int, indices: Sequence[Index]) -> list[str]:
        """Statements that make of the tile of one element what the second part needs of it: of 16 bits what is rounded to
        them, and 0 where a mask keeps nothing, and past the end."""
        emitter = self._emitter(indices)
        name = self._middle.steps[number]
        emitter.locals[name] = (tile, emitter.level)
        kept = self._kept(emitter)
        for k, part in enumerate(parts_of(self._function(emitter), name)):
            narrow = _narrow(part)
            text = emitter._tile(part if narrow is None else part.args[0])
            if kept:
                text = f"{kept} & {text}" if part.dtype is torch.bool else f"tl.where({kept}, {text}, 0.0)"
            text = text if narrow is None else f"lib.to_halves({text}, {TRITON_TYPES[narrow].storage})"
            emitter.outer.lines.append(f"{stem}{k} = {text}")
        return emitter.finish()

    def second(self, stem: str, tile: str, number: int, indices: Sequence[Index]) -> list[str]:
        """Statements that make of the tile of the other element, and of what is early, the function."""
        emitter = self._emitter(indices)
        other = self._middle.steps[1 - number]
        value, mapping = self._function(emitter), dict[Value, Value]()
        for k, part in enumerate(parts_of(value, other)):
            early = f"{stem}{k}"
            mapping[part] = vs.step_result(early, part.dtype)
            text = early if _narrow(part) is None else f"{early}.to({TRITON_TYPES[part.dtype].compute})"
            emitter.locals[early] = (text, emitter.level)
        emitter.locals[self._middle.steps[number]] = (tile, emitter.level)
        text = emitter._tile(vs.with_parts(value, mapping))
        if mapping and _may_keep_nothing(self._middle):
            nothing = " & ".join(f"({early.attr} == 0)" for early in mapping.values())
            text = f"tl.where({nothing}, 0.0, {text})"
        past = [emitter.inside(axis) for axis in self._middle.axes[-1:] if axis in emitter.masked()]
        emitter.outer.lines.append(f"{tile} = " + (f"tl.where({past[0]}, {text}, 0.0)" if past else text))
        return emitter.finish()

    def among(self, other: StepHalves, number: int) -> Shared | None:
        """Which early part, of those that another step has of its element `number`, is the function of this one."""
        mapping: dict[Atom, Expr] = {}
        for axis, theirs in zip(self._middle.axes, other._middle.axes, strict=True):
            own, place = self._middle.loops[axis], ix.position_in(other._middle.loops[theirs])
            mapping |= zip(own, ix.delinearize(place, [v.extent for v in own]), strict=True)
        name = other._middle.steps[number]
        value = _renamed(vs.substitute(self._unmasked, mapping), name)
        for k, part in enumerate(parts_of(other._unmasked, name)):
            rounded = self._into is not None and _narrow(part) is self._into and value is part.args[0]
            if rounded or value is part:
                return Shared(k, self._same_mask(other, mapping))
        return None

    def _same_mask(self, other: StepHalves, mapping: Mapping[Atom, Expr]) -> bool:
        """Whether both are 0 for the same elements. Of a row of which the mask keeps nothing, one that says nothing there may
        be NaN."""
        own, theirs = self._middle.mask, other._middle.mask
        same = own is theirs if own is None or theirs is None else vs.substitute(own, mapping) is theirs
        return same and not (self._middle.guards and _may_keep_nothing(other._middle))

    def rows(self, indices: Sequence[Index]) -> list[str]:
        """Statements that read what the function needs of rows, with what is made of that alone."""
        axis = self._middle.axes[-1]
        emitter = self.slots.emitter(self._middle.axes[:-1], indices, self.slots.problem.loops, {})
        emitter.suffix, emitter.behind = f"_{self.step}_rows", True
        assert len(emitter.dimensions) == 1, "rows are one axis with tiles"
        columns = frozenset(self.slots.problem.loops[axis])
        for value in _of_rows(self._values(emitter), columns):
            emitter.emit(value)
        for value, name in emitter.outer.names.items():
            if isinstance(value, Value) and value.op != "const":
                self.known[value] = f"{name}[:, None]" if emitter.axes(value) else name
        return emitter.finish()

    def columns(self, name: str, stages: int) -> Columns:
        """Shared memory for the numbers of columns that the function reads, those that TMA can move."""
        axis = self._middle.axes[-1]
        emitter = self.slots.emitter((), (), {}, {})
        loads = vs.loads([self._middle.function()])
        rings = (self._column(emitter, load, axis, name, stages) for load in loads)
        return Columns.of(ring for ring in rings if ring is not None)

    def _column(self, emitter: TileEmitter, load: Value, axis: str, name: str, stages: int) -> ColumnRing | None:
        problem = self.slots.problem
        buffer, (offset, *more), dtype = load.attr
        loops = problem.loops[axis]
        free = ix.free_atoms(offset)
        batch = [(a, v) for a in self._middle.axes[:-2] for v in problem.loops[a]]
        others = free - set(loops) - {v for _, v in batch}
        if load.args or more or dtype is not torch.float32 or len(loops) != 1 or loops[0] not in free or others:
            return None
        strides = [(v, a, ix.stride_of(offset, v)) for a, v in batch if v in free]
        last = offset.bounds()[1]
        static = all(problem.static(a) for a in problem.loops)
        linear = ix.stride_of(offset, loops[0]) == 1 and all(stride is not None for *_, stride in strides)
        if not (linear and static and aligned(problem.graph.buffers[buffer]) and last < MAX_ELEMENTS):
            return None
        base = ix.substitute(offset, dict.fromkeys([loops[0], *(v for v, *_ in strides)], ix.ZERO))
        if not all(ix.mod(e * dtype.itemsize, ALIGNMENT) == 0 for e in (base, *(s for *_, s in strides if s is not None))):
            return None  # TMA takes an illegal instruction for a row that begins elsewhere
        length = self.slots.config.get(problem.template.block(axis) or "")
        box = TensorMap(
            buffer, TRITON_TYPES[dtype].pointer.removeprefix("*"), (length,), (ix.constant(int(last) + 1),), (ix.ONE,)
        )
        descriptor = self.slots.descriptor(box)
        self.slots.parameters.made_names.add(descriptor)

        def begin(row: str, column: str) -> str:
            digits = (
                f"({digit(row, problem.loops[a], v, emitter.text)}) * ({emitter.text(s)})"
                for v, a, s in strides
                if s is not None
            )
            return " + ".join([column, *digits, emitter.text(base)])

        key = (buffer, begin("b", "n"))
        memory = self._unused(f"{name}_{descriptor.removeprefix('map_')}")
        return ColumnRing(memory, stages, length, descriptor, key, frozenset([(buffer, offset)]), begin)

    def _unused(self, name: str) -> str:
        """A name that the kernel has not yet: of one buffer it may read the numbers of several places."""
        made = self.slots.parameters.made_names
        found = next(one for one in chain([name], (f"{name}_{i}" for i in count(1))) if one not in made)
        made.add(found)
        return found

    # ---- the function -----------------------------------------------------------------------------------------------

    @property
    def _middle(self) -> Middle:
        return self.slots.problem.middles[self.step]

    def _function(self, emitter: TileEmitter) -> Value:
        """Where the mask keeps all; of one that says nothing unless numbers are 0 with that mask inside of it."""
        inside = self.masked and bool(self._middle.guards)
        return in_powers_of_two(self._middle.function(self.scaled, inside, self._into), emitter.exact)

    @property
    def _into(self) -> torch.dtype | None:
        """The type that the function's result gets where it is multiplied."""
        return self.slots.problem.inputs[self.into].dtype if self.into else None

    @property
    def _unmasked(self) -> Value:
        """The function where the mask keeps all."""
        return replace(self, masked=False)._function(self.slots.emitter((), (), {}, {}))

    def _values(self, emitter: TileEmitter) -> list[Value]:
        """All that is emitted: the function, and its mask."""
        return [self._function(emitter), *([] if self._middle.mask is None else [self._middle.mask])]

    def _kept(self, emitter: TileEmitter) -> str:
        """Where elements are not 0, as one number or a tile of any axes; empty: everywhere."""
        axis = self._middle.axes[-1]
        mask = self._middle.mask if self.masked and not self._middle.guards else None
        parts = [] if mask is None else [emitter.emit(mask)]  # Gluon spreads no single number
        parts += [emitter.inside(axis)] if axis in emitter.masked() else []
        return " & ".join(parts)

    def _emitter(self, indices: Sequence[Index]) -> TileEmitter:
        emitter = self.slots.emitter(self._middle.axes, indices, self.slots.problem.loops, {}, within=Within(self.inside))
        emitter.suffix, emitter.behind = f"_{self.step}", True
        emitter.outer.names.update(self.known)
        emitter.engine = ThroughColumns(self.stats)
        return emitter


@dataclass(frozen=True, slots=True)
class ThroughColumns:
    """Reads numbers of columns where TMA has brought them."""

    stats: Columns

    def load(self, buffer: str, offset: Expr, dtype: torch.dtype) -> str | None:
        return self.stats.load(buffer, offset)

    def store(self, buffer: str, offset: Expr, dtype: torch.dtype) -> Callable[[str], list[str]] | None:
        return None


def _may_keep_nothing(middle: Middle) -> bool:
    """Whether a mask may keep none of the elements that share a number in memory, such as the scores of a row with one
    log-sum-exp."""
    if middle.mask is None:
        return False
    loads = frozenset[Var]().union(*(load.variables() for load in vs.loads([middle.function(masked=False)])))
    named = [axis for axis in middle.axes[-2:] if not loads.isdisjoint(middle.loops[axis])]
    own = middle.loops[named[0]] if len(named) == 1 else ()
    others = [v for axis in middle.axes[-2:] if axis not in named for v in middle.loops[axis]]
    if len(own) != 1 or len(others) != 1:
        return True
    must = where_holds(middle.mask, others[0], {}, Known(frozenset(own))).must
    if must is None:
        return True
    begins = (ix.ZERO,) if must.begin is None else (ix.ZERO, must.begin)
    ends = (others[0].extent,) if must.end is None else (others[0].extent, must.end)
    return any((end - begin).bounds()[0] < 1 for begin in begins for end in ends)


def _narrow(part: Value) -> torch.dtype | None:
    """The type of 16 bits that a value is rounded to."""
    return part.attr if part.op == "round_to" and part.attr.itemsize == 2 else None


def _renamed(value: Value, step: str) -> Value:
    """A function of one element, as of that of another step."""
    own = {one for one in vs.topological([value]) if one.op == "step"}
    return vs.with_parts(value, {one: vs.step_result(step, one.dtype) for one in own})


def _of_rows(values: Iterable[Value], columns: frozenset[object]) -> list[Value]:
    """The largest parts of values that read memory and depend on no element and no column."""
    found: dict[Value, None] = {}
    alone: dict[Value, bool] = {}
    for value in vs.topological(values):
        own = value.op != "step" and columns.isdisjoint(value.variables())
        alone[value] = own and all(alone[arg] for arg in value.args)
        if not alone[value]:
            found |= {arg: None for arg in value.args if alone[arg] and vs.loads([arg])}
    return list(found)
