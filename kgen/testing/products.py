"""What a template implements as a call of torch, over axes of given lengths."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kgen import errors
from kgen.templates.contract import Pattern, Template
from kgen.testing.fusions import Shapes

__all__ = ["Roles", "product_of", "reference_of", "shapes_of"]


@dataclass(frozen=True, slots=True)
class Roles:
    """What each axis of a template is: "depth" where no result has it, "batch" where all operands have it and the result too,
    "rows" where the first operand has it, else "columns"."""

    template: Template

    @property
    def pattern(self) -> Pattern:
        return self.template.implements

    def of(self, axis: str) -> str:
        inside = [axis in axes for axes in self.pattern.operands]
        if axis not in self.pattern.results[0]:
            return "depth"
        if all(inside) and len(inside) > 1:
            return "batch"
        return "rows" if inside[0] else "columns"

    def longest(self, axis: str) -> int:
        """How long the template takes an axis."""
        return self.template.longest.get(axis, sys.maxsize)

    def lengths(self, by_role: Mapping[str, int], batched: bool = False) -> dict[str, int]:
        """Lengths by axis, no longer than the template takes. Without a batch its axes are left out, as a plain matrix product
        has it; an operator has all."""
        roles = {axis: self.of(axis) for axis in self.pattern.axes}
        whole = batched or bool(self.pattern.operator)
        return {axis: min(by_role[role], self.longest(axis)) for axis, role in roles.items() if whole or role != "batch"}

    @property
    def batches(self) -> bool:
        """Whether there is a batch that may be left out."""
        return not self.pattern.operator and any(self.of(axis) == "batch" for axis in self.pattern.axes)


def shapes_of(pattern: Pattern, lengths: Mapping[str, int], dtype: torch.dtype) -> Shapes:
    shapes = [tuple(lengths[a] for a in axes if a in lengths) for axes in (*pattern.operands, pattern.results[0])]
    return Shapes(tuple(shapes[:-1]), shapes[-1], dtype)


def product_of(template: Template, present: Iterable[str], all_results: bool = False) -> Callable[..., Any]:
    """A function of the operands; of an operator with several results, the first one, unless `all_results`.

    Raises BadTemplate for an operator that needs more than tensors: its author has to bring problems."""
    pattern = template.implements
    if not pattern.operator:
        return _contraction(pattern, set(present))
    call = _operator(template)
    return call if all_results or len(pattern.results) == 1 else lambda *operands: call(*operands)[0]


def reference_of(template: Template, all_results: bool = False) -> Callable[..., Any] | None:
    """The author's reference, if there is one."""
    found = template.implements.reference
    if found is None or all_results or len(template.implements.results) == 1:
        return found
    return lambda *operands: found(*operands)[0]


def _operator(template: Template) -> Callable[..., Any]:
    namespace, _, name = template.implements.operator.partition("::")
    call = getattr(getattr(torch.ops, namespace), name).default
    arguments, count = call._schema.arguments, len(template.implements.operands)
    tensors = [isinstance(a.type, torch.TensorType) for a in arguments]
    if tensors[:count] == [True] * count and all(a.has_default_value() for a in arguments[count:]):
        found: Callable[..., Any] = call
        return found
    raise errors.BadTemplate(
        template=template.name, problem=f"{call} needs more than its {count} operands: give check_template problems with them"
    )


def _contraction(pattern: Pattern, present: set[str]) -> Callable[..., Any]:
    """The call that users would write: a product of matrices, one of batches of them, or an einsum."""
    groups = (*pattern.operands, *pattern.results)
    left, right, result = ("".join(_letter(pattern, a) for a in axes if a in present) for axes in groups)
    for call, rank in ((torch.mm, 2), (torch.bmm, 3)):
        lead, a, b, c = left[:-2], left[-2:], right[-2:], result[-2:]
        if len(left) == rank and right == lead + b and result == lead + c and a[1] == b[0] and c == a[0] + b[1]:
            return call
    return _einsum(f"{left},{right}->{result}")


def _einsum(equation: str) -> Callable[..., Any]:
    return lambda a, b: torch.einsum(equation, a, b)


def _letter(pattern: Pattern, axis: str) -> str:
    return "abcdefghijklmnopqrstuvwxyz"[pattern.axes.index(axis)]
