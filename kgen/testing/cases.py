"""Problems for a template, from its pattern and its knobs: sizes, layouts, types, batches, and every kind of slot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from kgen.ir.program import Program
from kgen.templates.contract import Template
from kgen.testing.case import LAYOUTS, Case
from kgen.testing.fusions import EPILOGUES, FAMILIES, PROLOGUES, Fusion, operand_reductions
from kgen.testing.matmuls import Roles, call_of, reference_of, shapes_of
from kgen.testing.middles import MIDDLES, Between
from kgen.testing.steps import Convolution, Steps

__all__ = ["DTYPES", "cases", "cases_of_dtype", "large", "plain"]

# The types to try, the ones for everything else first.
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# The length of an axis where another one is tried, and where slots are: with the divisors that they ask for, but of no tile.
WINDOWS = {"taps": 2, "positions": 2, "images": 2}
LENGTHS = {"batch": 3, "rows": 35, "columns": 37, "depth": 43, **WINDOWS}
SLOTS = {"batch": 3, "rows": 36, "columns": 42, "depth": 44, **WINDOWS}
# The same for operands that are not read by pointers but by TMA, whose rows begin at multiples of 16 bytes.
BOX_LENGTHS = {"batch": 3, "rows": 35, "columns": 40, "depth": 72, **WINDOWS}
BOX_SLOTS = {"batch": 3, "rows": 36, "columns": 48, "depth": 72, **WINDOWS}
PRIMES = {"rows": (7, 53), "columns": (11, 61), "depth": (5, 71), "batch": (5,), "taps": (3,), "positions": (3,), "images": ()}
SEVERAL = {"batch": 2, "rows": 67, "columns": 131, "depth": 197, **WINDOWS}
LARGE = {"batch": 2, "rows": 1031, "columns": 1543, "depth": 2053, **WINDOWS}
# Longest length around a knob's value: an interpreter walks through every tile.
LONGEST = 257
# How windows walk through a tensor, besides step by step.
LOOP_ARGUMENTS: tuple[dict[str, int], ...] = (
    {"stride": 2}, {"dilation": 2}, {"padding": 1}, {"stride": 3, "padding": 2}, {"stride": 2, "dilation": 2, "padding": 4},
)  # fmt: skip
# What is tried with a batch, in other types than the first, and with sizes that are symbols.
BATCHED = {"gelu", "all kinds of input", "transposed", "sum of rows", "times a row", "and epilogue"}
TYPED = {"plus a row", "to float32", "raw result kept", "cast", "dequantised from int8", "and epilogue", "sum of rows"}
# Functions of a step whose second result is read.
SECOND = {"scaled and causal", "scaled", "plus a tile", "rows without elements", "much of it"}
DYNAMIC = {"all kinds of input", "transposed", "padded", "normalised"}


def cases(template: Template, dtype: torch.dtype = torch.float32) -> Iterator[Case]:
    """Problems of all kinds in a type that the template takes.

    Raises BadTemplate for an operator that needs numbers besides its operands: only its author knows which."""
    maker = _Maker(template, dtype)
    yield from maker.sizes()
    yield from maker.arguments()
    yield from maker.layouts()
    yield from maker.slots("epilogue", EPILOGUES)
    yield from maker.slots("prologue", PROLOGUES)
    if template.many is not None:
        yield from maker.slots("family", FAMILIES)
    yield from maker.sums()
    yield from maker.middles()
    yield from maker.seconds()
    yield from maker.windows()
    yield from maker.dynamic()


def plain(template: Template, dtype: torch.dtype) -> Case:
    """The matmul alone: a template that refuses this refuses the type."""
    maker = _Maker(template, dtype)
    return maker.alone("alone", _name(dtype), maker.usual)


def large(template: Template, dtype: torch.dtype) -> Iterator[Case]:
    """Many tiles along each axis: too slow for an interpreter."""
    maker = _Maker(template, dtype)
    for name, lengths in (("large", LARGE), ("large, few rows", {**LARGE, "rows": 3})):
        yield maker.alone("size", name, maker.roles.lengths(lengths))


def cases_of_dtype(template: Template, dtype: torch.dtype) -> Iterator[Case]:
    """What depends on the type: rounding to it, casts from and to it, long sums."""
    maker = _Maker(template, dtype)
    yield maker.alone("long", _name(dtype), maker.roles.lengths({**maker.by_role, "depth": 304}))
    for fusion in (*EPILOGUES, *PROLOGUES):
        if fusion.name in TYPED:
            yield from (replace(c, name=f"{_name(dtype)}, {c.name}") for c in maker.slots("dtype", [fusion], batches=False))
    yield from (replace(c, name=f"{_name(dtype)}, {c.name}") for c in maker.sums())
    yield from (replace(c, name=f"{_name(dtype)}, {c.name}") for c in maker.middles(MIDDLES[::4]))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _Maker:
    """Makes the problems of one template in one type."""

    def __init__(self, template: Template, dtype: torch.dtype) -> None:
        self.template, self.dtype, self.pattern = template, dtype, template.implements
        self.roles = Roles(template)
        uses_tma = any(operand.access == "tma" for operand in template.operands.values())
        self.by_role, self.for_slots = (BOX_LENGTHS, BOX_SLOTS) if uses_tma else (LENGTHS, SLOTS)
        self.usual, self.batched = (self.roles.lengths(self.by_role, batched) for batched in (False, True))

    # ---- one case ---------------------------------------------------------------------------------------------------

    def alone(self, kind: str, name: str, lengths: Mapping[str, int], example: int = 0) -> Case:
        function = call_of(self.template, lengths, all_results=True, example=example)
        reference = reference_of(self.template, all_results=True, example=example)
        operands = shapes_of(self.pattern, lengths, self.dtype).operands()
        return Case(name, kind, function, operands, reference=reference)

    def fused(self, kind: str, fusion: Fusion, batched: bool = False) -> Case | None:
        """The problem of a fusion, if there is one for the shapes of this template."""
        lengths = self.roles.lengths(self.for_slots, batched)
        shapes = shapes_of(self.pattern, lengths, self.dtype)
        if not fusion.fits(shapes):
            return None
        function = _around(fusion, call_of(self.template, lengths), len(shapes.inputs))
        exact = reference_of(self.template)
        reference = None if exact is None else _around(fusion, exact, len(shapes.inputs))
        inputs = (*fusion.operands(shapes), *fusion.extras(shapes))
        return Case(fusion.name, kind, function, inputs, fusion.kernels, reference=reference)

    # ---- the kinds of problems --------------------------------------------------------------------------------------

    def sizes(self) -> Iterator[Case]:
        """Each axis in turn: prime, 1 and 0, and around the tiles of the template; then all axes at once; then batches."""
        for axis in self.pattern.axes:
            base = self.usual if axis in self.usual else self.batched
            lengths = (*self._least(axis), *PRIMES[self.roles.of(axis)], *self._around_tiles(axis))
            for length in (n for n in lengths if n <= self.roles.longest(axis)):
                yield self.alone("size", f"{axis}={length}", {**base, axis: length})
        yield self.alone("size", "several tiles", self.roles.lengths(SEVERAL))
        for length in (1, 16, 128):
            yield self.alone("size", f"all {length}", {a: min(length, self.roles.longest(a)) for a in self.usual})
        if self.roles.batches:
            yield self.alone("size", "batch", self.batched)
            yield self.alone(
                "size", "batch of aligned", {a: min(32, self.roles.longest(a)) if a in self.usual else 2 for a in self.batched}
            )

    def arguments(self) -> Iterator[Case]:
        """Further examples of an operator's other arguments."""
        for number, example in enumerate(self.pattern.examples[1:], 1):
            text = ", ".join(f"{name}={value}" for name, value in example)
            yield self.alone("arguments", text, self.usual, number)

    def _least(self, axis: str) -> tuple[int, ...]:
        """The shortest lengths: torch has convolutions of no images, and else of something."""
        return (1,) if self.pattern.windows and self.roles.of(axis) != "images" else (0, 1)

    def _around_tiles(self, axis: str) -> list[int]:
        """One less than the smallest and the first tile, as much, and one more."""
        knob = self.template.block(axis)
        values = [v for v in self.template.knobs[knob].values if isinstance(v, int)] if knob else []
        found = {n for v in {min(values), values[0]} for n in (v - 1, v, v + 1)} if values else set()
        return sorted(n for n in found if 1 < n <= LONGEST)

    def layouts(self) -> Iterator[Case]:
        """Every layout of each operand, then pairs; with a batch those that are about it."""
        yield from self._layouts(self.usual, LAYOUTS[1:7], "")
        if self.roles.batches:
            yield from self._layouts(self.batched, ("transposed", "inner batch", "expanded batch", "strided"), ", batched")

    def _layouts(self, lengths: Mapping[str, int], layouts: Sequence[str], suffix: str) -> Iterator[Case]:
        base = self.alone("layout", "", lengths)
        for name, k in zip(self.template.operands, range(len(base.inputs)), strict=True):
            for layout in layouts:
                if len(base.inputs[k].shape) >= 2:
                    inputs = tuple(replace(s, layout=layout) if j == k else s for j, s in enumerate(base.inputs))
                    yield replace(base, name=f"{name} {layout}{suffix}", inputs=inputs)
        for pair in (("transposed", "transposed"), ("offset", "strided"), ("expanded rows", "expanded columns")):
            if [len(s.shape) >= 2 for s in base.inputs] == [True, True]:
                inputs = tuple(replace(s, layout=layout) for s, layout in zip(base.inputs, pair, strict=True))
                yield replace(base, name=" and ".join(pair) + suffix, inputs=inputs)

    def slots(self, kind: str, fusions: Sequence[Fusion], batches: bool = True) -> Iterator[Case]:
        yield from (case for fusion in fusions if (case := self.fused(kind, fusion)))
        if batches and self.roles.batches:
            made = (self.fused(kind, fusion, batched=True) for fusion in fusions if fusion.name in BATCHED)
            yield from (replace(case, name=f"{case.name}, batched") for case in made if case)

    def sums(self) -> Iterator[Case]:
        """Of each operand that the template can sum as well."""
        for number, (name, operand) in enumerate(self.template.operands.items()):
            for batched in (False, True)[: 1 + self.roles.batches] if operand.sums else ():
                present = [a for a in operand.axes if a in self.roles.lengths(self.for_slots, batched)]
                along = tuple(k for k, axis in enumerate(present) if axis not in self.pattern.results[0])
                made = (self.fused("operand reduction", fusion, batched) for fusion in operand_reductions(number, along))
                suffix = f" ({name}, batched)" if batched else f" ({name})"
                yield from (replace(case, name=f"{case.name}{suffix}") for case in made if case)

    def middles(self, rows: Iterable[Between] = MIDDLES) -> Iterator[Case]:
        """Each kind of function in the first slot between steps, without and with a batch; then with all around it."""
        program = self.pattern.program
        if program is None:
            return
        for batched in (False, True)[: 1 + self.roles.batches]:
            suffix = ", batched" if batched else ""
            yield from (self._between(program, row, f"{row.name}{suffix}", batched) for row in rows)
        row = replace(next(iter(rows)), name="between a prologue and an epilogue")
        yield self._between(program, row, row.name, False, torch.relu)

    def seconds(self) -> Iterator[Case]:
        """Second results of steps, as they are and with something made of them, for some functions in the first slot."""
        program = self.pattern.program
        if program is None or not program.seconds:
            return
        for batched in (False, True)[: 1 + self.roles.batches]:
            suffix = ", batched" if batched else ""
            rows = (row for row in MIDDLES if row.name in SECOND)
            made = (self._between(program, row, f"{row.name}{suffix}", batched, seconds=True) for row in rows)
            yield from (replace(case, kind="second result") for case in made)

    def _between(
        self,
        program: Program,
        row: Between,
        name: str,
        batched: bool,
        around: Callable[..., Any] = lambda x: x,
        seconds: bool = False,
    ) -> Case:
        lengths = self.roles.lengths(self.for_slots, batched)
        run, step = Steps(program, frozenset(lengths)), program.middles[0]
        operands = shapes_of(self.pattern, lengths, self.dtype).operands()
        extras = row.extras(tuple(lengths[a] for a in run.axes(step.axes)), self.dtype)

        def function(*inputs: torch.Tensor) -> Any:
            own, more = inputs[: len(operands)], inputs[len(operands) :]

            def middle(at: str, made: torch.Tensor) -> Any:
                return row.run(made, *more) if at == step.name else made

            if seconds:
                result, *others = run.with_seconds(*own, middle=middle)
                return result, *others, *(one * 0.5 + 1 for one in others)
            return around(run(around(own[0]), *own[1:], middle=middle))

        return Case(name, "middle", function, (*operands, *extras), kernels=1 + seconds)

    def windows(self) -> Iterator[Case]:
        """Strides, dilations and paddings."""
        if not self.pattern.windows:
            return
        shapes = shapes_of(self.pattern, {**self.usual}, self.dtype)
        for arguments in LOOP_ARGUMENTS:
            name = ", ".join(f"{word}={value}" for word, value in arguments.items())
            yield Case(name, "window", Convolution(self.pattern, arguments), shapes.operands())

    def dynamic(self) -> Iterator[Case]:
        """Sizes that are symbols."""
        yield replace(self.alone("dynamic", "alone", self.usual), dynamic=True)
        chosen = [f for f in (*EPILOGUES, *PROLOGUES) if f.name in DYNAMIC]
        yield from (replace(case, dynamic=True) for case in self.slots("dynamic", chosen, batches=False))


def _around(fusion: Fusion, matmul: Callable[..., Any], count: int) -> Callable[..., Any]:
    def function(*inputs: torch.Tensor) -> Any:
        return fusion.run(matmul, inputs[:count], *inputs[count:])

    return function
