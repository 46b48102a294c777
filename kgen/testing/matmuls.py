"""What a template implements as a call of torch, over axes of given lengths."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kgen import errors
from kgen.templates.contract import Template
from kgen.templates.pattern import Pattern
from kgen.testing.fusions import Shapes
from kgen.testing.steps import Convolution, Steps, shape_of

__all__ = ["Roles", "call_of", "reference_of", "shapes_of"]


# What the longest length that a template takes is cut down to a multiple of, for fusions that take an axis in parts.
DIVISOR = 6


# How long axes are at most where there are windows, by their role: problems are as large as many axes multiplied.
FEW = {"taps": 3, "positions": 3, "images": 2, "rows": 24, "columns": 42, "depth": 24, "batch": 3}


@dataclass(frozen=True, slots=True)
class Roles:
    """What each axis of a template is: "depth" where no result has it, "batch" where all operands have it and the result too,
    "rows" where the first operand has it, else "columns". Where there are windows, their axes are "taps" and "positions", the
    last positions "rows", and what else of the result the tensor has "images"."""

    template: Template

    @property
    def pattern(self) -> Pattern:
        return self.template.implements

    def of(self, axis: str) -> str:
        windows = self.pattern.windows
        inside = [axis in axes for axes in self.pattern.operands]
        if any(axis in pair for pair in windows):
            return "taps" if axis not in self.pattern.results[0] else "rows" if axis == windows[-1][0] else "positions"
        if (
            windows
            and axis in self.pattern.results[0]
            and not all(inside)
            and any(windows[0][0] in axes and axis in axes for axes in self.pattern.operands)
        ):
            return "images"
        if axis not in self.pattern.results[0]:
            return "depth"
        if all(inside) and len(inside) > 1:
            return "batch"
        return "rows" if inside[0] else "columns"

    def longest(self, axis: str) -> int:
        """How long the template takes an axis."""
        own = self.template.longest.get(axis, sys.maxsize)
        return min(own, FEW[self.of(axis)]) if self.pattern.windows else own

    def lengths(self, by_role: Mapping[str, int], batched: bool = False) -> dict[str, int]:
        """Lengths by axis, no longer than the template takes, and with divisors where it takes less. Without a batch its axes
        are left out, as a plain matmul has it; an operator has all."""
        roles = {axis: self.of(axis) for axis in self.pattern.axes}
        whole = batched or (bool(self.pattern.operator) and self.pattern.program is None)
        return {axis: self._length(axis, by_role[role]) for axis, role in roles.items() if whole or role != "batch"}

    def _length(self, axis: str, wanted: int) -> int:
        longest = self.longest(axis)
        return wanted if wanted <= longest else longest - longest % DIVISOR or longest

    @property
    def batches(self) -> bool:
        """Whether there is a batch that may be left out."""
        return (not self.pattern.operator or self.pattern.program is not None) and any(
            self.of(axis) == "batch" for axis in self.pattern.axes
        )


def shapes_of(pattern: Pattern, lengths: Mapping[str, int], dtype: torch.dtype) -> Shapes:
    shapes = [shape_of(pattern, axes, lengths) for axes in (*pattern.operands, pattern.results[0])]
    last = [a for a in pattern.operands[-1] if a in lengths]
    elsewhere = {a for axes in pattern.operands[:-1] for a in axes}
    own = [k for k, axis in enumerate(last) if axis in pattern.results[0] and axis not in elsewhere]
    return Shapes(tuple(shapes[:-1]), shapes[-1], dtype, own[0] if own else -1)


def call_of(template: Template, present: Iterable[str], all_results: bool = False, example: int = 0) -> Callable[..., Any]:
    """A function of the operands; of an operator with several results, the first one, unless `all_results`. `example` is the
    number of that of the author's examples which the operator's other arguments are of.

    Raises BadTemplate for an operator that needs more than tensors and has no example."""
    pattern = template.implements
    if pattern.program is not None:
        return Steps(pattern.program, frozenset(present))
    if pattern.windows:
        return Convolution(pattern)
    if not pattern.operator:
        return _contraction(pattern, set(present))
    call = _operator(template, example)
    return call if all_results or len(pattern.results) == 1 else lambda *operands: call(*operands)[0]


def reference_of(template: Template, all_results: bool = False, example: int = 0) -> Callable[..., Any] | None:
    """The author's reference, if there is one."""
    found = template.implements.reference
    if found is not None and template.implements.examples:
        found = partial(found, **dict(template.implements.examples[example]))
    if found is None or all_results or len(template.implements.results) == 1:
        return found
    return lambda *operands: found(*operands)[0]


def _operator(template: Template, example: int) -> Callable[..., Any]:
    namespace, _, name = template.implements.operator.partition("::")
    call = getattr(getattr(torch.ops, namespace), name).default
    arguments, count = call._schema.arguments, len(template.implements.operands)
    tensors = [isinstance(a.type, torch.TensorType) for a in arguments]
    examples = template.implements.examples
    given = dict(examples[example]) if examples else {}
    if tensors[:count] == [True] * count and all(a.has_default_value() or a.name in given for a in arguments[count:]):
        return partial(call, **given) if given else call
    raise errors.BadTemplate(
        template=template.name,
        problem=f"{call} needs more than its {count} operands: give kgen.operator examples of its other arguments",
    )


def _contraction(pattern: Pattern, present: set[str]) -> Callable[..., Any]:
    """The call that users would write: a matmul, a batched one, or an einsum."""
    groups = (*pattern.operands, *pattern.results)
    left, right, result = ("".join(_letter(pattern, a) for a in axes if a in present) for axes in groups)
    call = {2: torch.mm, 3: torch.bmm}.get(len(result))
    for exchanged, (a, b) in enumerate(((left, right), (right, left))):
        if call is None or not len(a) == len(b) == len(result) or not a[:-2] == b[:-2] == result[:-2]:
            continue
        turned = (a[-2] != result[-2], b[-1] != result[-1])
        rows, columns = a[:-3:-1] if turned[0] else a[-2:], b[:-3:-1] if turned[1] else b[-2:]
        if rows[0] == result[-2] and columns[1] == result[-1] and rows[1] == columns[0]:
            return _matmul(call, bool(exchanged), turned)
    return _einsum(f"{left},{right}->{result}")


def _matmul(call: Callable[..., Any], exchanged: bool, turned: tuple[bool, bool]) -> Callable[..., Any]:
    """A matmul whose operands come the other way round or transposed."""

    def run(*operands: torch.Tensor) -> Any:
        pair = operands[::-1] if exchanged else operands
        return call(*(x.mT if turn else x for x, turn in zip(pair, turned, strict=True)))

    return run if exchanged or any(turned) else call


def _einsum(equation: str) -> Callable[..., Any]:
    return lambda a, b: torch.einsum(equation, a, b)


def _letter(pattern: Pattern, axis: str) -> str:
    return "abcdefghijklmnopqrstuvwxyz"[pattern.axes.index(axis)]
