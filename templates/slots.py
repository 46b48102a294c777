"""What a template's Jinja file sees: one object for each operand, result and axis, whose calls become text.

The two languages fill the slots in their own ways; what they share is here: the context of a rendering, and the rule that a
slot on a line of its own takes that line's indentation.
"""

from __future__ import annotations

import difflib
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import jinja2

from kgen.errors import BadSlot
from kgen.ir import index as ix
from kgen.ir.index import Expr, as_expr
from kgen.ir.spans import Holds, Known, Span
from kgen.templates.contract import Config, Template
from kgen.templates.middle import Middle
from kgen.templates.problem import Problem
from kgen.templates.render import clean, is_marked, of_slots, tidy, with_line_marks

Lines = list[str]


@dataclass(frozen=True, slots=True)
class Segment:
    """Indices of a tile along an axis: `length` of them, a power of two, from `begin` on. Its text is a vector of these."""

    begin: int
    length: int

    def __str__(self) -> str:
        return f"({self.begin} + tl.arange(0, {self.length}))"


@dataclass(frozen=True, slots=True)
class Pair:
    """One index along an axis of several loops: `outer` counts the first of them, `inner` the others, of which there are
    `length` together. Where an operand has one loop for all, its text is their number."""

    outer: str
    inner: str
    length: str

    def __str__(self) -> str:
        return f"({self.outer} * {self.length} + {self.inner})"


# Indices along an axis, as an author gives them to a slot.
Index = str | Segment | Pair


class Named:
    """A slot: asked for an attribute that it does not have, it says which one may have been meant."""

    __slots__ = ()
    name: str

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # Python's and Jinja's own questions
            raise AttributeError(attribute)
        known = [one for one in dir(type(self)) if not one.startswith("_")]
        near = difflib.get_close_matches(attribute, known, n=1)
        hint = f": was {near[0]} meant?" if near else ""
        raise ValueError(f"{self.name} has no {attribute}{hint}")


@dataclass(frozen=True, slots=True)
class OperandSlot(Named):
    """``{{ A.tile("a", "rm", "rk") }}`` makes `a` the tile of A at those indices, with whatever prologue is fused into it. Of
    an operand with access "tma" the indices are where the tile begins: ``{{ A.tile("a", "m0", "k0") }}``.
    ``{% for one in B %}`` goes through the operands of a family, ``one.number`` counts them from 0. A tile in front of a loop
    that holds other slots, ``{{ A.tile("a", "rm", "rk", own=True) }}``, has variables of its own: Triton's have one type.

    Of an operand declared with ``sums``, ``{% if A.summed %}`` says whether its elements are to be added up as well, and
    ``{{ A.store_sum("sums", "rm") }}`` stores the sums `sums`, with what is made of them: each exactly once. Of a family's
    operands, ``{% if B.summed %}`` says whether any is, ``one.summed`` which.

    Of an operand that is 1 at one entry along its last axis and 0 at others (`Input.entry`), ``{{ P.entry("e", "rm", "rn") }}``
    makes `e` the tile of these entries, integers, -1 where there is none, by the indices of the other axes.

    ``{% if R.same_as("V") %}`` says that two operands are one array: one tile does for both.

    In C++, ``{{ A.element("a", "m", "k") }}`` makes `a` one element, with its prologue; with ``lanes="k"``, in a `vector_loop`
    that counts `k`, a vector of neighbours."""

    name: str
    filler: Filler
    facts: dict[str, Any]
    count: int = 1
    number: int = 0
    sums: frozenset[int] = frozenset()

    @property
    def summed(self) -> bool:
        return bool(self.sums & set(range(self.number, self.number + self.count)))

    def store_sum(self, name: str, *indices: str) -> str:
        return "\n".join(self.filler.store_sum(self.name, self.number, name, indices))

    def tile(self, name: str, *indices: Index, **how: bool | str) -> str:
        return "\n".join(self.filler.tile(self.name, self.number, name, indices, **how))

    def element(self, name: str, *indices: str, lanes: str = "") -> str:
        return "\n".join(self.filler.element(self.name, self.number, name, indices, lanes))

    def same_as(self, other: str) -> bool:
        """Whether it is the same array as another operand: a tile of that is one of this, too."""
        inputs = self.filler.problem.members[self.number]
        return inputs[self.name].is_array_of(inputs[other])

    def entry(self, name: str, *indices: Index, **how: bool | str) -> str:
        return "\n".join(self.filler.entry(self.name, self.number, name, indices, **how))

    def __iter__(self) -> Iterator[Self]:
        return (replace(self, count=1, number=number) for number in range(self.count))

    def __getattr__(self, name: str) -> Any:
        facts = object.__getattribute__(self, "facts")
        return facts[name] if name in facts else Named.__getattr__(self, name)


@dataclass(frozen=True, slots=True)
class ResultSlot(Named):
    """``{{ C.store("acc", "rm", "rn") }}`` runs the epilogue on the tile `acc` and stores what it makes. Every element of the
    result has to come by exactly once, after all of its sum: ``{{ C.store("half", "rm", "rn", n="BLOCK_N // 2") }}`` stores a
    part of a tile, which begins at a multiple of its own length. Of a result with access "tma" the indices are where the tile
    begins, at such a multiple. The tiles of a family are `acc0`, `acc1`, and so on; those of an
    operator's several results are named one by one, ``"first second"``; ``{{ C.type }}`` is the type of their elements. Of a
    second result ``{% if L.wanted %}`` says whether anybody reads it: only then ``{{ L.store("lse", "b", "rm") }}`` stores it,
    by the indices of its axes (in C++ those of batches, the first row, and the number of rows). Programs that work out one row
    may each store it.

    In C++, ``{{ C.store_element("c", "m", "n") }}`` runs the epilogue on one element `c`; with ``lanes="n"`` on a vector."""

    name: str
    filler: Filler

    @property
    def wanted(self) -> bool:
        return self.name not in self.filler.problem.template.seconds or bool(self.filler.problem.seconds(self.name))

    @property
    def type(self) -> str:
        return self.filler.accumulator

    def store(self, name: str, *indices: Index, **how: Any) -> str:
        second = self.name in self.filler.problem.template.seconds
        store = self.filler.store_second if second else self.filler.store
        return "\n".join(store(self.name, name, indices, **how))

    def store_element(self, name: str, *indices: str, lanes: str = "") -> str:
        return "\n".join(self.filler.store_element(self.name, name, indices, lanes))


@dataclass(frozen=True, slots=True)
class RunsOf:
    """Runs of tiles of a program's step: `rows` of a tile (0: a block's), indices of its batch, if they depend on these, and
    whether they leave out what is filled."""

    step: str
    rows: int
    batch: tuple[Index, ...]
    filled: bool


@dataclass(frozen=True, slots=True)
class StepSlot(Named):
    """A step of a program. ``{{ scores.apply("s", "b", "rm", "rn") }}`` makes of the tile `s` of a contraction's sums what the
    next step sees of them: the function that was fused there, in the same type. Where that step is a softmax, what is past
    the end of its axis is -inf; ``scores.begin("m0", "rows")`` and ``scores.end("m0", "rows")`` are the ends of what a mask may
    keep there in some rows, `full_begin` and `full_end` those of what it keeps in all, where ``apply(..., masked=False)`` does.
    Who leaves out what a finite number masks (`of_fill`) applies that step.
    An element comes by each time that it is computed; in C++ the indices are those of a store. Of
    a softmax, ``{% if weights.safe %}`` says that rows which are -inf as a whole have weights of 0, and not NaN."""

    name: str
    filler: Filler
    rows: int = 0
    batch: tuple[Index, ...] = ()
    filled: bool = False
    asked: bool = False

    @property
    def type(self) -> str:
        return self.filler.accumulator

    @property
    def safe(self) -> bool:
        return bool(dict(self.filler.problem.arguments.values).get("safe", False))

    @property
    def runs(self) -> tuple[Any, ...]:
        """In Triton, runs of tiles along the axis of the softmax, one behind the other: ``run.first`` and ``run.last`` are the
        numbers of their edges, ``run.whole`` says that all of a tile is inside of the axis, and that no mask keeps out any."""
        return self.filler.runs(self.name, self.rows, bool(self.batch), self.filled)

    @property
    def runs_from_the_end(self) -> tuple[Any, ...]:
        """The `runs`, the last one first."""
        return tuple(reversed(self.runs))

    def edges(self, stem: str, row: str, **how: str) -> str:
        """Statements that make `stem` and a number each edge's name, for a tile of rows from `row` on. In Triton, where these
        are of another tile of the batch already, ``like="edge"`` says that its mask holds where it held for them."""
        runs = RunsOf(self.name, self.rows, self.batch, self.filled)
        return "\n".join(self.filler.edges(runs, stem, row, **how))

    @property
    def last_edge(self) -> int:
        """The number of the edge behind all tiles."""
        return int(self.runs[-1].last)

    def of_rows(self, rows: int) -> StepSlot:
        """The step whose runs are those of so many rows, where that is not the length of a block."""
        return replace(self, rows=rows)

    def of_batch(self, *batch: Index) -> StepSlot:
        """The step whose runs are those of one index of each axis of the batch. A mask may depend on these, and on integers
        from memory at these, such as lengths."""
        return replace(self, batch=batch)

    def of_fill(self) -> StepSlot:
        """The step whose runs, or whose span, leave out what is masked by a finite number as well. What they leave out has to
        be made after all for rows whose weights of that number are not 0: `fill` is its text, one of the `runs` is `rest`."""
        return replace(self, filled=self._middle.fill is not None)

    @property
    def fill(self) -> str:
        """The text of the finite number that masked elements are, without `factor`; none if there is none."""
        found = self._middle.fill
        return "" if found is None else self.filler.number(found.number)

    def of_guards(self) -> StepSlot:
        """In C++, the step with a mask that says nothing unless some numbers are 0: where it is `guarded`, the template has to
        ask whether it `holds`."""
        return replace(self, asked=True)

    @property
    def guarded(self) -> bool:
        return self.asked and bool(self._middle.guards)

    def holds(self, name: str, *indices: Index) -> str:
        """Statements that make `name` whether what is masked is 0, for indices of the batch, and the first row, and in C++ how
        many rows."""
        return "\n".join(self.filler.holds(self.name, name, indices))

    @property
    def factor(self) -> float:
        """The positive number that the function multiplies by at last: ``apply(..., scaled=False)`` leaves that out."""
        return self.filler.problem.middles[self.name].factor

    def is_exact(self, masked: bool = True) -> bool:
        """Whether powers of scores have to be made of differences from a row's highest score, as those of large numbers and of
        float32 are. With a multiple of each, one instruction less, the last digit of the multiple is a factor of the power."""
        problem = self.filler.problem
        return problem.main_dtype.itemsize > 2 or self._middle.is_large(masked, self.filled)

    @property
    def masked(self) -> bool:
        """Whether a mask keeps some elements, and makes others -inf."""
        return self.filled or (self._middle.mask is not None and (self.asked or not self._middle.guards))

    def apply(self, name: str, *indices: Index, **how: Any) -> str:
        return "\n".join(self.filler.apply(self.name, name, indices, filled=self.filled, **how))

    def fixed(self, stem: str, *indices: Index) -> str:
        """In Triton, statements that make what the function needs of no contraction, as tiles whose names begin with `stem`, if
        it is the same for all indices of the batch's first loop. With the index of a batch in which that one is 0, they may
        stand in front of a loop over these, in which ``apply(..., fixed=stem)`` takes the tiles."""
        return "\n".join(self.filler.fixed(self.name, stem, indices))

    def begin(self, first: str, count: str) -> str:
        """The text of the first column that the mask may keep in any of `count` rows, at least one, from the row `first` on."""
        return self._begin(self._reach(first, count).may, (first, count))

    def end(self, first: str, count: str) -> str:
        """The text of the column behind the last one that it may keep there; all others are -inf, and need no tiles."""
        return self._end(self._reach(first, count).may, (first, count))

    def full_begin(self, first: str, count: str) -> str:
        """The text of the first of those columns that it keeps in all of these rows, where it need not be applied."""
        return self._begin(self._reach(first, count).must, (first, count))

    def full_end(self, first: str, count: str) -> str:
        """The text of the column behind the last one of those."""
        return self._end(self._reach(first, count).must, (first, count))

    def _begin(self, span: Span | None, names: Sequence[str]) -> str:
        return self.filler.expression(self._ends(span)[0], names)

    def _end(self, span: Span | None, names: Sequence[str]) -> str:
        return self.filler.expression(self._ends(span)[1], names)

    def span(self, begin: str, end: str, first: str, count: str, *batch: str) -> str:
        """In C++, statements that make `begin` and `end` the ends of the columns that the mask may keep there, for one index of
        each axis of the batch. A mask may depend on these, and on integers from memory at these, such as lengths."""
        known = self._middle.known(self.filler.problem.loops)
        may = self._reach(first, count, known).may
        return "\n".join(self.filler.bounds(self.name, (begin, end), self._ends(may), known, (first, count), batch))

    def _ends(self, span: Span | None) -> tuple[Expr, Expr]:
        length = self.filler.problem.extent(self._middle.axes[-1])
        if span is None:
            return ix.ZERO, ix.ZERO
        begin = ix.ZERO if span.begin is None else ix.maximum(span.begin, ix.ZERO)
        return begin, length if span.end is None else ix.minimum(span.end, length)

    @property
    def _middle(self) -> Middle:
        return self.filler.problem.middles[self.name]

    def _reach(self, first: str, count: str, known: Known | None = None) -> Holds:
        from_row, rows = (ix.size(name).expr() for name in (first, count))
        found = self._middle.reach(self.filler.problem.loops, from_row, rows, known, self.filled)
        return found if self.asked or not self._middle.guards else replace(found, may=Span())


@dataclass(frozen=True, slots=True)
class AxisSlot(Named):
    """``{{ k.size }}`` is the text of the axis' length, in parentheses where it is a sum or a product, and ``{{ k.static }}``
    says whether that is a number. In Triton, ``k.segment(64, 32)`` are indices for a slot: 32 of them, from 64 on, whatever the
    length of a block; and of an axis without a block, ``t.pair("row", "rest", "count")`` is an index whose first loop is at
    `row`, and whose other loops, `count` together, are at `rest`: nothing has to be divided."""

    name: str
    size: str
    static: bool

    def segment(self, begin: int, length: int) -> Segment:
        return Segment(begin, length)

    def pair(self, outer: str, inner: str, length: str) -> Pair:
        return Pair(outer, inner, length)


@dataclass(frozen=True, slots=True)
class PartSlots:
    """The slots of one of several problems that a kernel makes together, as attributes: ``{{ part.B.tile(...) }}``. `suffix`
    tells its names from those of the others."""

    suffix: str
    problem: Problem
    slots: Mapping[str, object]

    def __getattr__(self, name: str) -> object:
        try:
            return object.__getattribute__(self, "slots")[name]
        except KeyError:
            raise AttributeError(name) from None


class Parameters(Protocol):
    """What a kernel turns out to need."""

    @property
    def pointers(self) -> dict[str, None]:
        """Buffers, in the order in which they were first asked for."""

    @property
    def sizes(self) -> dict[str, None]:
        """Symbols, in the order in which they were first asked for."""


@dataclass(frozen=True, slots=True)
class Lazy:
    """A text that is noted as a parameter when it is used: ``{{ LOCKS }}``."""

    name: str
    text: str
    among: dict[str, None]

    def __str__(self) -> str:
        self.among.setdefault(self.name)
        return self.text


class Filler(Protocol):
    """A language's slots for one problem under one configuration, as lists of lines."""

    problem: Problem
    config: Config

    @property
    def parameters(self) -> Parameters:
        """Of the kernel."""

    def operand_slot(self, name: str, facts: dict[str, Any], count: int, sums: frozenset[int]) -> OperandSlot:
        """What the Jinja file sees of an operand, of which there are `count`, `sums` of them summed."""

    def result_slot(self, name: str) -> ResultSlot:
        """What the Jinja file sees of a result."""

    def step_slot(self, name: str) -> StepSlot:
        """What the Jinja file sees of a step of a program."""

    def workspace_slot(self, memory: Lazy) -> Lazy:
        """What it sees of memory of the kernel's own, where that is more than a pointer."""

    @property
    def tile(self) -> Callable[..., Lines]:
        """Of an operand, its number in a family, the tile's name and indices; what else it may be told is the language's."""

    def element(self, operand: str, number: int, name: str, indices: Sequence[str], lanes: str) -> Lines:
        """Of an operand, its number in a family, the element's name and indices, and the one of these that counts lanes."""

    def store_element(self, result: str, text: str, indices: Sequence[str], lanes: str) -> Lines:
        """Of a result, the element's name and indices, and the one of these that counts lanes."""

    @property
    def entry(self) -> Callable[..., Lines]:
        """Of an operand, its number in a family, the tile's name and indices of all axes but the last."""

    @property
    def store_sum(self) -> Callable[..., Lines]:
        """Of an operand, its number in a family, the name of its sums and their indices."""

    @property
    def store(self) -> Callable[..., Lines]:
        """Of a result, its name and its indices; what else a store may be told is the language's."""

    @property
    def store_second(self) -> Callable[..., Lines]:
        """Of a second result, its name and its indices."""

    @property
    def apply(self) -> Callable[..., Lines]:
        """Of a step of a program, its tile's name and indices."""

    @property
    def fixed(self) -> Callable[..., Lines]:
        """Of a step of a program, the stem of tiles' names, and indices."""

    @property
    def edges(self) -> Callable[..., Lines]:
        """Of runs of a program's step, the stem of the edges' names, and the first row of a tile."""

    @property
    def runs(self) -> Callable[[str, int, bool, bool], tuple[Any, ...]]:
        """Of a step of a program, the rows of a tile, whether its batch is given, and whether what is filled is left out."""

    @property
    def holds(self) -> Callable[..., Lines]:
        """Of a step of a program, the name of a truth value, and indices."""

    def number(self, number: float) -> str:
        """The text of a number."""

    @property
    def bounds(self) -> Callable[..., Lines]:
        """Of a step of a program, names for two ends, the ends, what is known, and names of variables, of its batch last."""

    @property
    def accumulator(self) -> str:
        """The text of the type of sums."""

    def size(self, axis: str) -> str:
        """The text of an axis' length."""

    def expression(self, expr: Expr, names: Sequence[str]) -> str:
        """The text of an expression of sizes, and of variables of the author's."""


def render(
    fillers: Sequence[Filler], head: Callable[[], str], facts: Callable[[Problem, str], dict[str, Any]], program: str
) -> str:
    """The template's text. `head` opens the kernel, `facts` are further attributes of an operand's slot, `program` is the text
    of a program's number. Of several problems in one launch the first one's slots have names of their own; a template that
    makes them together finds the slots of each in ``parts``, with a suffix that tells them apart, empty where there is one."""
    first = fillers[0]
    names = _names(first, facts)
    suffixes = [f"_{c}" for c in string.ascii_lowercase] if len(fillers) > 1 else [""]
    names["parts"] = [PartSlots(c, f.problem, _names(f, facts)) for c, f in zip(suffixes, fillers, strict=False)]
    names |= {"kernel": head, "config": first.config, "problem": first.problem, "program": program}
    names["facts"] = first.problem.template.facts([f.problem for f in fillers], first.config)
    path = first.problem.template.source
    source = of_slots((path.parent,), is_marked(path.parent)).get_template(path.name)
    try:
        text = tidy(source.render(names))
        return with_line_marks(text, (path.parent,), "cpp" if first.problem.template.device == "cpu" else "python")
    except (TypeError, ValueError, LookupError, AttributeError, AssertionError, ArithmeticError, jinja2.TemplateError) as error:
        raise _bad_slot(error, first.problem.template) from error


def _bad_slot(error: Exception, template: Template) -> BadSlot:
    """What went wrong while a slot became text, with the line of the Jinja file whose call it was."""
    where, frames = str(template.source), error.__traceback__
    while frames is not None:
        if frames.tb_frame.f_code.co_filename == str(template.source):
            where = f"{template.source}, line {frames.tb_lineno}"
        frames = frames.tb_next
    return BadSlot(template=template.name, where=where, problem=f"{type(error).__name__}: {error}")


def _closed(text: str) -> str:
    """A text that stays one factor whatever stands around it."""
    return text if text.replace("_", "").isalnum() else f"({text})"


def _names(filler: Filler, facts: Callable[[Problem, str], dict[str, Any]]) -> dict[str, Any]:
    problem, template = filler.problem, filler.problem.template
    count = {name: len(problem.members) if one.many else 1 for name, one in template.operands.items()}
    names: dict[str, Any] = dict(filler.config.values)
    sums = {
        name: frozenset(one.number for one in problem.operand_reductions if one.operand == name) for name in template.operands
    }
    names |= {name: filler.operand_slot(name, facts(problem, name), count[name], sums[name]) for name in template.operands}
    names |= {name: filler.result_slot(name) for name in template.results}
    if template.implements.program is not None:
        names |= {step.name: filler.step_slot(step.name) for step in template.implements.program.steps[:-1]}
    names |= {axis: AxisSlot(axis, _closed(filler.size(axis)), problem.static(axis)) for axis in template.axes}
    pointers, symbols = filler.parameters.pointers, dict(problem.kernel.host_values)
    lazy = {name: Lazy(buffer, f"p_{clean(buffer)}", pointers) for name, buffer in problem.kernel.workspaces}
    names |= {name: filler.workspace_slot(one) for name, one in lazy.items()}
    for name, one in template.values.items():
        found = as_expr(one.compute(problem, filler.config))
        symbol = symbols[found].name if found.as_int() is None else ""
        names[name] = Lazy(symbol, clean(symbol), filler.parameters.sizes) if symbol else str(found)
    return names
