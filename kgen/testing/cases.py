"""Problems for a template, from its pattern and its knobs: sizes, layouts, types, batches, and every kind of slot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from kgen import errors
from kgen.templates.contract import Pattern, Template
from kgen.testing.case import LAYOUTS, Case
from kgen.testing.fusions import EPILOGUES, PROLOGUES, Fusion, Shapes

__all__ = ["DTYPES", "cases", "cases_of_dtype", "large", "plain"]

# The types to try, the ones for everything else first.
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# The length of an axis where another one is tried, and where slots are: a multiple of 4 for them, but not of any tile.
LENGTHS = {"batch": 3, "rows": 35, "columns": 37, "depth": 43}
SLOTS = {"batch": 3, "rows": 36, "columns": 39, "depth": 44}
PRIMES = {"rows": (7, 53), "columns": (11, 61), "depth": (5, 71), "batch": (5,)}
SEVERAL = {"batch": 2, "rows": 67, "columns": 131, "depth": 197}
LARGE = {"batch": 2, "rows": 1031, "columns": 1543, "depth": 2053}
# Longest length around a knob's value: an interpreter walks through every tile.
LONGEST = 257


def cases(template: Template, dtype: torch.dtype = torch.float32) -> Iterator[Case]:
    """Problems of all kinds in a type that the template takes."""
    pattern = _pattern(template)
    yield from _sizes(template, pattern, dtype)
    yield from _layouts(pattern, dtype)
    yield from _slots(pattern, dtype, "epilogue", EPILOGUES)
    yield from _slots(pattern, dtype, "prologue", PROLOGUES)
    yield from _dynamic(pattern, dtype)


def plain(template: Template, dtype: torch.dtype) -> Case:
    """The product alone: a template that refuses this refuses the type."""
    pattern = _pattern(template)
    return _case("alone", f"{dtype}".removeprefix("torch."), pattern, _lengths(pattern, LENGTHS, batched=False), dtype)


def large(template: Template, dtype: torch.dtype) -> Iterator[Case]:
    """Many tiles along each axis: too slow for an interpreter."""
    pattern = _pattern(template)
    yield _case("size", "large", pattern, _lengths(pattern, LARGE, batched=False), dtype)
    yield _case("size", "large, few rows", pattern, _lengths(pattern, {**LARGE, "rows": 3}, batched=False), dtype)


def cases_of_dtype(template: Template, dtype: torch.dtype) -> Iterator[Case]:
    """What depends on the type: rounding to it, casts from and to it, long sums."""
    pattern = _pattern(template)
    name = f"{dtype}".removeprefix("torch.")
    lengths = _lengths(pattern, {**LENGTHS, "depth": 300}, batched=False)
    yield _case("long", name, pattern, lengths, dtype)
    chosen = {"plus a row", "to float32", "raw result kept", "cast", "dequantised from int8", "and epilogue", "sum of rows"}
    for fusion in (*EPILOGUES, *PROLOGUES):
        if fusion.name in chosen:
            yield replace(_fused(fusion, pattern, dtype, "dtype"), name=f"{name}, {fusion.name}")


# ---- the pattern ------------------------------------------------------------------------------------------------------


def _pattern(template: Template) -> Pattern:
    """Of templates that the kit has problems for; others have to bring their own."""
    pattern = template.implements
    if isinstance(pattern, Pattern) and len(pattern.operands) == 2 and len(pattern.results) == 1:
        return pattern
    raise errors.BadTemplate(
        template=template.name, problem="there are no ready-made problems for what it implements: give check_template some"
    )


def _role(pattern: Pattern, axis: str) -> str:
    left, right = (axis in axes for axes in pattern.operands)
    if left and right:
        return "batch" if axis in pattern.results[0] else "depth"
    return "rows" if left else "columns"


def _lengths(pattern: Pattern, lengths: Mapping[str, int], batched: bool) -> dict[str, int]:
    """Lengths by axis. Without a batch, axes of both operands and the result are left out, as a plain matrix product has it."""
    roles = {axis: _role(pattern, axis) for axis in pattern.axes}
    return {axis: lengths[role] for axis, role in roles.items() if batched or role != "batch"}


def product_of(pattern: Pattern, present: Iterable[str]) -> Callable[..., Any]:
    """The pattern as a call of torch, over the axes that are present."""
    present = set(present)
    left, right, result = ("".join(_letter(pattern, a) for a in axes if a in present)
                           for axes in (*pattern.operands, *pattern.results))  # fmt: skip
    for call, rank in ((torch.mm, 2), (torch.bmm, 3)):
        lead, a, b, c = left[:-2], left[-2:], right[-2:], result[-2:]
        if len(left) == rank and right == lead + b and result == lead + c and a[1] == b[0] and c == a[0] + b[1]:
            return call
    return _einsum(f"{left},{right}->{result}")


def _einsum(equation: str) -> Callable[..., Any]:
    return lambda a, b: torch.einsum(equation, a, b)


def _letter(pattern: Pattern, axis: str) -> str:
    return "abcdefghijklmnopqrstuvwxyz"[pattern.axes.index(axis)]


def _shapes(pattern: Pattern, lengths: Mapping[str, int], dtype: torch.dtype) -> Shapes:
    groups = (*pattern.operands, *pattern.results)
    left, right, result = (tuple(lengths[a] for a in axes if a in lengths) for axes in groups)
    return Shapes(left, right, result, dtype)


# ---- one case ---------------------------------------------------------------------------------------------------------


def _case(kind: str, name: str, pattern: Pattern, lengths: Mapping[str, int], dtype: torch.dtype) -> Case:
    """The product alone."""
    return Case(name, kind, product_of(pattern, lengths), _shapes(pattern, lengths, dtype).operands())


def _fused(fusion: Fusion, pattern: Pattern, dtype: torch.dtype, kind: str, batched: bool = False) -> Case:
    lengths = _lengths(pattern, SLOTS, batched)
    shapes = _shapes(pattern, lengths, dtype)
    product = product_of(pattern, lengths)

    def function(a: torch.Tensor, b: torch.Tensor, *extras: torch.Tensor) -> Any:
        return fusion.run(product, a, b, *extras)

    inputs = (*fusion.operands(shapes), *fusion.extras(shapes))
    return Case(fusion.name, kind, function, inputs, fusion.kernels)


# ---- the kinds of problems --------------------------------------------------------------------------------------------


def _sizes(template: Template, pattern: Pattern, dtype: torch.dtype) -> Iterator[Case]:
    """Each axis in turn: prime, 1 and 0, and around the tiles of the template; then all axes at once; then batches."""
    usual = _lengths(pattern, LENGTHS, batched=False)
    batched = _lengths(pattern, LENGTHS, batched=True)
    for axis in pattern.axes:
        base = usual if axis in usual else batched
        for length in (0, 1, *PRIMES[_role(pattern, axis)], *_around_tiles(template, axis)):
            yield _case("size", f"{axis}={length}", pattern, {**base, axis: length}, dtype)
    yield _case("size", "several tiles", pattern, _lengths(pattern, SEVERAL, batched=False), dtype)
    for length in (1, 16, 128):
        yield _case("size", f"all {length}", pattern, dict.fromkeys(usual, length), dtype)
    if len(batched) > len(usual):
        yield _case("size", "batch", pattern, batched, dtype)
        yield _case("size", "batch of aligned", pattern, {a: 2 if a not in usual else 32 for a in batched}, dtype)


def _around_tiles(template: Template, axis: str) -> list[int]:
    """One less than the smallest and the first tile, as much, and one more."""
    knob = template.block(axis)
    if knob is None:
        return []
    values = [v for v in template.knobs[knob].values if isinstance(v, int)]
    found = {n for v in {min(values), values[0]} for n in (v - 1, v, v + 1)} if values else set()
    return sorted(n for n in found if 1 < n <= LONGEST)


def _layouts(pattern: Pattern, dtype: torch.dtype) -> Iterator[Case]:
    """Every layout of either operand, then pairs, and then with a batch."""
    for batched in (False, True):
        base = _case("layout", "", pattern, _lengths(pattern, LENGTHS, batched), dtype)
        rank = len(base.inputs[0].shape)
        if batched and rank < 3:
            return
        known = LAYOUTS[1:7] if not batched else ("transposed", "inner batch", "expanded batch", "strided")
        for layout in known:
            for k, side in enumerate(("left", "right")):
                inputs = tuple(replace(s, layout=layout) if j == k else s for j, s in enumerate(base.inputs))
                yield replace(base, name=f"{side} {layout}{', batched' if batched else ''}", inputs=inputs)
        for pair in (("transposed", "transposed"), ("offset", "strided"), ("expanded rows", "expanded columns")):
            inputs = tuple(replace(s, layout=layout) for s, layout in zip(base.inputs, pair, strict=True))
            yield replace(base, name=" and ".join(pair) + (", batched" if batched else ""), inputs=inputs)


def _slots(pattern: Pattern, dtype: torch.dtype, kind: str, fusions: tuple[Fusion, ...]) -> Iterator[Case]:
    for fusion in fusions:
        yield _fused(fusion, pattern, dtype, kind)
    if len(_lengths(pattern, SLOTS, True)) > len(_lengths(pattern, SLOTS, False)):
        for fusion in fusions:
            if fusion.name in ("gelu", "all kinds of input", "transposed", "sum of rows", "times a row", "and epilogue"):
                yield replace(_fused(fusion, pattern, dtype, kind, batched=True), name=f"{fusion.name}, batched")


def _dynamic(pattern: Pattern, dtype: torch.dtype) -> Iterator[Case]:
    """Sizes that are symbols."""
    lengths = _lengths(pattern, LENGTHS, batched=False)
    yield replace(_case("dynamic", "alone", pattern, lengths, dtype), dynamic=True)
    chosen = [f for f in (*EPILOGUES, *PROLOGUES) if f.name in ("all kinds of input", "transposed", "padded", "normalised")]
    for fusion in chosen:
        yield replace(_fused(fusion, pattern, dtype, "dynamic"), dynamic=True)
