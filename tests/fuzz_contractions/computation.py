"""A problem as a function of tensors, its result in float64, and how far from that rounding may lead."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from .around import EPILOGUES, FAMILIES, LEFT, RIGHT, Prologue
from .kinds import KINDS, Kind
from .problem import Problem
from .tensors import Spec

# Half of the distance between neighbours, relative to their size.
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-11, torch.float64: 2.0**-53}
TF32_UNIT = 2.0**-10  # digits are cut off
# Matrix units add float32 numbers with a few digits less, and those of 8-bit floats with 13 digits.
ADDING, ADDING_FLOAT8 = 8 * 2.0**-23, 2.0**-12
# Errors as large as bounds allow in one direction do not add up; what is not linear may make them larger.
MARGIN = 3.0
# Elements that say how large bounds usually are.
SAMPLED = 100_000
# Errors relative to the norm, by the coarsest type that anything is rounded to.
NORM_LIMIT = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float64: 1e-9}
TF32_NORM_LIMIT = 3e-3
# By how much a number shrinks whose digits are cut off for TF32, in the mean: half of the last digit that is left.
TF32_SHRINKS = TF32_UNIT / 2


@dataclass(frozen=True)
class Expected:
    """A result in float64 and what each element may be off by."""

    values: torch.Tensor
    bound: torch.Tensor


def _prologue(table: dict[str, Prologue], name: str) -> Prologue:
    return table[name] if name else Prologue("", lambda a, kind, dim: a, roundings=0)


class Computation:
    """What a problem computes. Tensors come flat: the left operand and what its prologue reads, then the same of each right
    operand with what the kind reads, then what the epilogue reads."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.kind: Kind = KINDS[problem.kind]
        self.left, self.right = _prologue(LEFT, problem.left), _prologue(RIGHT, problem.right)
        family = FAMILIES[problem.family] if problem.family else None
        shares = (1.0, *(family.parts if family else ()))
        self.members = [self._member(share) for share in shares]
        self.join: Callable[..., Any] = family.run if family else lambda dim, c: c

    def _member(self, share: float) -> Problem:
        name = "o" if "conv" in self.problem.kind else "n"
        if share == 1:
            return self.problem
        return self.problem.with_size(name, max(1, int(self.problem.size(name) * share)))

    # ---- tensors ----------------------------------------------------------------------------------------------------

    @cached_property
    def groups(self) -> list[list[Spec]]:
        """The tensors of the left operand, of each right one, and of the epilogue."""
        kind, dtype = self.kind, self.problem.torch_dtype
        high = 0 if dtype.is_floating_point else 100
        left, _ = kind.shapes(self.problem)
        first = Spec(left, dtype, self.problem.layouts[0], high=high)
        found = [[self.left.stored(first, kind.channel), *self.left.extras(first, kind.channel)]]
        for member in self.members:
            shape = kind.shapes(member)[1]
            one = Spec(shape, dtype, self.problem.layouts[1], max(1, kind.depth(member)) ** -0.5, high)
            right = kind.right_column
            found.append([self.right.stored(one, right), *self.right.extras(one, right), *kind.extras(member)])
        return [*found, list(self._epilogue_specs())]

    def _epilogue_specs(self) -> tuple[Spec, ...]:
        if not self.problem.epilogue:
            return ()
        kind = self.problem.torch_dtype if self.problem.torch_dtype.is_floating_point else torch.float32
        kind = torch.bfloat16 if kind.itemsize == 1 else kind
        return EPILOGUES[self.problem.epilogue].extras(self.result_shape(), kind, self.kind.column)

    def result_shape(self) -> tuple[int, ...]:
        shapes = [self.kind.result(member) for member in self.members]
        if self.problem.family == "joined":
            lengths = list(shapes[0])
            lengths[self.kind.column] = sum(shape[self.kind.column] for shape in shapes)
            return tuple(lengths)
        return shapes[0]

    @property
    def specs(self) -> list[Spec]:
        return [spec for group in self.groups for spec in group]

    def _grouped(self, flat: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        given = iter(flat)
        return [[next(given) for _ in group] for group in self.groups]

    # ---- the function -----------------------------------------------------------------------------------------------

    def run(self, *flat: torch.Tensor) -> Any:
        """What is compiled."""
        left, *rights, around = self._grouped(flat)
        dtype = self.problem.torch_dtype
        a = self.left.run(*left, dtype, self.kind.channel)
        results = []
        for member, group in zip(self.members, rights, strict=True):
            b, extras = self._right(group, dtype)
            results.append(self.kind.call(member, a, b, *extras))
        return self._finish(results, around)

    def _right(self, group: Sequence[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        count = len(group) - len(self.kind.extras(self.problem))
        return self.right.run(*group[:count], dtype, self.kind.right_column), group[count:]

    def _finish(self, results: Sequence[torch.Tensor], around: Sequence[torch.Tensor]) -> Any:
        found = self.join(self.kind.column, *results)
        if not self.problem.epilogue:
            return found
        return EPILOGUES[self.problem.epilogue].run(found, *around, self.kind.column)

    # ---- what it should give ----------------------------------------------------------------------------------------

    def expected(self, flat: Sequence[torch.Tensor]) -> list[Expected]:
        """Results in float64. Bounds come from sums of absolute products: the epilogue of results that are as far off, in
        one direction and at random, says what becomes of that."""
        left, *rights, around = self._grouped([x if x.dtype is torch.int64 else x.double() for x in flat])
        a = self.left.run(*left, torch.float64, self.kind.channel)
        sums, errors = [], []
        for member, group in zip(self.members, rights, strict=True):
            b, extras = self._right(group, torch.float64)
            total = self.kind.reference(member, a, b, *extras)
            size = self.kind.reference(member, a.abs(), b.abs(), *(x.abs() for x in extras))
            before = self.kind.reference(member, a, b, *(torch.zeros_like(x) for x in extras))  # a library adds a bias later
            sums.append(total)
            rounded = torch.maximum(total.abs(), before.abs()) * self._unit_of_result()
            errors.append(size * self._unit_of_sum(member) + rounded)
        exact = tree_leaves(self._finish(sums, around))
        bounds = [torch.zeros_like(x) for x in exact]
        for signs in self._signs(sums):
            moved = self._finish([c + e * s for c, e, s in zip(sums, errors, signs, strict=True)], around)
            for bound, one, value in zip(bounds, tree_leaves(moved), exact, strict=True):
                torch.maximum(bound, (one - value).abs(), out=bound)
        return [Expected(value, bound * MARGIN) for value, bound in zip(exact, bounds, strict=True)]

    def _unit_of_sum(self, member: Problem) -> float:
        """Of the sum of absolute products: roundings of computed operands, TF32's, and those of additions."""
        dtype = self.problem.torch_dtype
        if not dtype.is_floating_point:
            return 0.0
        computed = UNIT.get(dtype, 0.0) * (self.left.roundings + self.right.roundings) * 1.01
        rounded = 2 * TF32_UNIT if self.problem.tf32 else 0.0
        adding = ADDING_FLOAT8 if dtype.itemsize == 1 else ADDING
        return computed + rounded + adding * math.sqrt(max(1, self.kind.depth(member)))

    def _unit_of_result(self) -> float:
        """A result may be rounded before its epilogue."""
        dtype = self.problem.torch_dtype
        if not dtype.is_floating_point:
            return 0.0
        return 2 * UNIT.get(dtype, UNIT[torch.bfloat16])

    def _signs(self, sums: Sequence[torch.Tensor]) -> list[list[Any]]:
        first = sums[0]
        generator = torch.Generator(first.device).manual_seed(self.problem.seed)

        def random() -> list[torch.Tensor]:
            return [torch.randint(0, 2, c.shape, generator=generator, device=c.device) * 2.0 - 1 for c in sums]

        ones = [1.0 for _ in sums]
        smaller = [[-c.sign() for c in sums]] if self.problem.tf32 else []  # digits are cut off: sums of squares shrink
        return [ones, [-1.0] * len(ones), [(-1.0) ** k for k in range(len(ones))], random(), *smaller]

    def norm_limit(self, number: int) -> float:
        """Of a result. TF32 cuts digits off in one direction: in sums of positive terms these errors do not average out, but
        come once for each rounded factor. Two contractions that are multiplied have four, the square of that eight."""
        if self.problem.tf32:
            family, epilogue = FAMILIES.get(self.problem.family), EPILOGUES.get(self.problem.epilogue)
            factors = 2 * (family.factors if family else 1) * (epilogue.factors_of(number) if epilogue else 1)
            return max(TF32_NORM_LIMIT, factors * TF32_SHRINKS)
        kinds = [kind for kind in (self.problem.torch_dtype, *(s.dtype for s in self.specs)) if kind in UNIT]
        kinds.append(torch.bfloat16 if self.problem.kind == "scaled mm" else torch.float32)
        return max(NORM_LIMIT[kind] for kind in kinds)


def wrong(
    got: Sequence[torch.Tensor], like: Sequence[torch.Tensor], expected: Sequence[Expected], limit: Callable[[int], float]
) -> str:
    """What is wrong with results, of shapes and types as eager's `like`; empty where nothing is. `limit` says of each
    how large its error may be, relative to its norm."""
    if len(got) != len(like):
        return f"{len(got)} results, not {len(like)}"
    for number, (one, other, want) in enumerate(zip(got, like, expected, strict=True)):
        problem = _wrong(one, other, want, limit(number))
        if problem:
            return f"result {number} {problem}"
    return ""


def _wrong(one: torch.Tensor, like: torch.Tensor, want: Expected, limit: float) -> str:
    if one.shape != like.shape or one.dtype != like.dtype:
        return f"is {one.dtype} {list(one.shape)}, not {like.dtype} {list(like.shape)}"
    if one.numel() == 0:
        return ""
    values = want.values
    off = (_overflowed(one, values) - values).abs()
    unit = UNIT.get(one.dtype, 0.0)
    usual = want.values.square().mean().sqrt()  # what an epilogue rounds on the way may be as large
    allowed = torch.maximum(want.bound, want.values.abs() * _typical(want)) + 8 * unit * (want.values.abs() + usual)
    # float32 loses most of a gelu's tail, in eager as well
    allowed = torch.maximum(allowed, (_overflowed(like, values) - values).abs().nan_to_num(0.0, 0.0))
    bad = ~(off <= allowed)  # NaNs too
    count = int(bad.sum())
    if count:
        return _message(one, want.values, bad, count)
    error = float(off.norm() / values.norm().clamp_min(1e-30))
    return f"is off by {error:.1e} of its norm, {limit:.1e} is allowed" if error > limit and one.is_floating_point() else ""


def _typical(want: Expected) -> float:
    """The bound of a middling element, relative to it. Where few elements decide what all are divided by, as in a softmax, the
    signs that were tried may have moved an element and its divisor in one direction."""
    some = slice(None, None, max(1, want.values.numel() // SAMPLED))
    relative = (want.bound.flatten()[some] / want.values.flatten()[some].abs().clamp_min(1e-30)).nan_to_num(0.0)
    return float(relative.median())


def _overflowed(one: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A result in float64, the reference where both are as large as the type allows: it may be infinite there, or not."""
    exact = one.double()
    if not one.is_floating_point():
        return exact
    large = torch.finfo(one.dtype).max * 0.99
    both = (values.abs() > large) & (exact.abs() > large) & (values.sign() == exact.sign())
    return torch.where(both, values, exact)


def _message(one: torch.Tensor, values: torch.Tensor, bad: torch.Tensor, count: int) -> str:
    """How many elements are wrong, within which bounds, and what the first of them is."""
    wrong_at = bad.nonzero()
    low, high = (found.tolist() for found in (wrong_at.amin(0), wrong_at.amax(0)))
    box = ", ".join(str(a) if a == b else f"{a}..{b}" for a, b in zip(low, high, strict=True))
    first = tuple(wrong_at[0].tolist())
    off = (one.double() - values)[bad]
    finite = off[off.isfinite()]
    error = float(finite.norm() / values.norm().clamp_min(1e-30))
    unwritten = f"; {len(off) - len(finite)} are not finite" if len(finite) < len(off) else ""
    return (
        f"{list(one.shape)} is wrong in {count} elements ({count / one.numel():.2%}) within [{box}]; at {list(first)} it is "
        f"{float(one[first]):.6g} and should be {float(values[first]):.6g}; these are off by {error:.1e} of its norm{unwritten}"
    )
