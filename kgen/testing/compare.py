"""Whether results are right: how far from the reference the types of a problem allow them to be."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from kgen.testing.case import Case

__all__ = ["Difference", "compare", "in_common", "in_eager", "in_float64"]

# Roundings of the coarsest type that may add up, and those of types whose sums are made in the same type.
ROUNDINGS, SUMMED_ROUNDINGS = 8, 64
# The error of the same operators in eager, on the same device, is one that the problem makes: so much of it is allowed, too.
EAGER_ERRORS = 1.1
# Of fewer wrong elements nothing is said that they have in common.
LEAST_COMMON = 2


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest error, relative to 1 plus the size of the element, what is allowed, and what is wrong, if anything is."""

    error: float
    tolerance: float
    problem: str = ""


def in_eager(case: Case, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What eager gives: its shapes and types are right."""
    return tree_leaves(case.function(*(t.clone() for t in inputs)))


def in_float64(case: Case, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What the reference gives in float64: its values are right."""
    exact = [t.to(torch.float64, copy=True) if t.is_floating_point() else t.clone() for t in inputs]
    return tree_leaves((case.reference or case.function)(*exact))


def compare(
    got: Any,
    eager: Sequence[torch.Tensor],
    reference: Sequence[torch.Tensor],
    inputs: Sequence[Any],
    own_errors: float = EAGER_ERRORS,
) -> Difference:
    """The worst of the results, in float64 on the CPU. So many times eager's own error are allowed, too."""
    results = tree_leaves(got)
    if len(results) != len(eager):
        return Difference(math.inf, 0, f"{len(results)} results, not {len(eager)}")
    kinds = [t.dtype for t in (*inputs, *eager) if t.dtype.is_floating_point]
    worst = Difference(0.0, 0.0)
    for number, (result, like, exact) in enumerate(zip(results, eager, reference, strict=True)):
        tolerance = _tolerance([*kinds, like.dtype])
        found = _one(result, like, exact, tolerance)
        if found.problem and own_errors:  # eager's own error is large where a sum cancels, or an exponential grows
            found = _one(result, like, exact, max(tolerance, own_errors * _one(like, like, exact, 0.0).error))
        if found.problem:
            return Difference(found.error, found.tolerance, f"result {number}: {found.problem}")
        worst = max(worst, found, key=lambda d: d.error)
    return worst


def _tolerance(kinds: Sequence[torch.dtype]) -> float:
    """Integers are exact. Elements are about 1, whatever the length of the sums: `fusions.Shapes.operands`."""
    if not kinds[-1].is_floating_point:
        return 0.0
    coarsest = max(torch.finfo(kind).eps for kind in kinds if kind.is_floating_point)
    return coarsest * (ROUNDINGS if coarsest > torch.finfo(torch.float32).eps else SUMMED_ROUNDINGS)


def _one(result: torch.Tensor, like: torch.Tensor, exact: torch.Tensor, tolerance: float) -> Difference:
    if result.shape != like.shape or result.dtype != like.dtype:
        found, wanted = (f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in (result, like))
        return Difference(math.inf, tolerance, f"{found}, not {wanted}")
    if result.numel() == 0:
        return Difference(0.0, tolerance)
    is_, should = result.detach().cpu().double(), exact.detach().cpu().double()
    errors = (is_ - should).abs() / (1 + should.abs())
    errors[is_ == should] = 0.0  # infinities
    errors[is_.isnan() & should.isnan()] = 0.0
    errors.nan_to_num_(nan=math.inf)
    worst = float(errors.max())
    if worst <= tolerance:
        return Difference(worst, tolerance)
    wrong = errors > tolerance
    where = tuple(int(i) for i in torch.unravel_index(errors.argmax(), errors.shape)) if errors.dim() else ()
    return Difference(
        worst, tolerance,
        f"error {worst:.2e} where {tolerance:.2e} is allowed, at {list(where)} it is {float(is_[where]):.6g} and should be "
        f"{float(should[where]):.6g}; {int(wrong.sum())} of {errors.numel()} elements are wrong{in_common(wrong, is_)}",
    )  # fmt: skip


def in_common(wrong: torch.Tensor, found: torch.Tensor) -> str:
    """What wrong elements share, behind a comma: where they are along each dimension, and their value. `wrong` is of bools, and
    of the shape of `found`; nothing is said of one element, or where they are everywhere."""
    if int(wrong.sum()) < LEAST_COMMON:
        return ""
    parts = (_along(dim, wrong.shape[dim], wrong.nonzero()[:, dim].unique().tolist()) for dim in range(wrong.dim()))
    values = found[wrong]
    same = "all of them are nan" if values.isnan().all() else "all of them are 0" if not values.any() else ""
    return "".join(f", {text}" for text in (*parts, same) if text)


def _along(dim: int, length: int, indices: Sequence[int]) -> str:
    first, last = indices[0], indices[-1]
    steps = {b - a for a, b in itertools.pairwise(indices)}
    if len(indices) == length:
        return ""
    if len(indices) == 1:
        return f"all at {first} of {length} along dimension {dim}"
    if steps == {1}:
        return f"all at {first}...{last} of {length} along dimension {dim}"
    if len(steps) == 1:
        return f"all at each {steps.pop()}th from {first} to {last} of {length} along dimension {dim}"
    return f"all at {len(indices)} of {length} along dimension {dim}, from {first} to {last}"
